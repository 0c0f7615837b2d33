"""Make the page "Equation index": each result of the book, and what it was held against."""

from collections import defaultdict
from pathlib import Path

from tools import book

PAGE = "book/equation-index.md"

HEAD = """\
(equation-index)=
# Equation index

% Made by `make notebooks` from the executed notebooks, not by hand.

Every labelled result of this book is executed: a cell of its chapter evaluates it and holds it
against an independent reference, and the book's tests fail when a result has no such check. Here
are the {results} results with their {checks} checks. The error is the largest difference relative
to the largest entry of the reference, rounded up to a power of ten; where a result was held
against one reference several times (on different models, say), it is the worst of them.
"""

# What book/_static/equation-index.js filters.
ENTRY = """\
::::{{div}} equation-entry
{{eq}}`{label}` {says} (`{label}`)

$$
{formula}
$$

{checks}
::::
"""

FOLDED = """\
:::::{{dropdown}} {results} results
{entries}
:::::
"""

TAIL = """\
```{raw} html
<script defer src="../_static/equation-index.js"></script>
```
"""

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def make(root: Path = book.ROOT) -> str:
    """The text of the page."""
    cells = {name: book.read_cells(name, root) for name in book.notebook_names(root)}
    checks = [check for name in cells for check in book.checks_of(name, cells[name])]
    worst: dict[str, dict[str, int]] = defaultdict(dict)
    for check in checks:
        powers = worst[check.label]
        powers[check.against] = max(check.error_power, powers.get(check.against, check.error_power))

    results, sections = 0, []
    for part, pages in book.parts(root):
        chapters = []
        for page in (page for page in pages if page in cells):
            formulas = book.formulas_of(cells[page])
            entries = [
                entry(label, formulas[label.name], worst[label.name])
                for label in book.labels_of(page, cells[page])
                if label.is_result
            ]
            results += len(entries)
            if entries:
                folded = FOLDED.format(results=len(entries), entries="\n".join(entries))
                chapters += [f"### {book.title_of(cells[page])}\n", folded]
        if chapters:
            sections += [f"## {part}\n", *chapters]
    return "\n".join([HEAD.format(results=results, checks=len(checks)), *sections, TAIL])


def entry(label: book.Label, formula: str, worst: dict[str, int]) -> str:
    """One result: its number, what it is, the formula, and each reference with the error."""
    held = [f"- {name}, 10{str(power).translate(RAISED)}" for name, power in worst.items()]
    checks = "\n".join(held) or "- nothing"
    return ENTRY.format(label=label.name, says=label.says, formula=formula, checks=checks)


def write(root: Path = book.ROOT) -> None:
    """Write the page."""
    (root / PAGE).write_text(make(root), encoding="utf-8")


if __name__ == "__main__":
    write()
