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

TABLE = """\
## {title}

:::{{list-table}}
:header-rows: 1
:widths: 15 45 40

* - Equation
  - What it is
  - Held against, error
{rows}
:::
"""

# A backslash at the end of a line breaks the line inside a cell.
ROW = """\
* - {{eq}}`{label}`
  - {says} \\
    `{label}`
  - {checks}"""


def make(root: Path = book.ROOT) -> str:
    """The text of the page."""
    cells = {name: book.read_cells(name, root) for name in book.notebook_names(root)}
    checks = [check for name in cells for check in book.checks_of(name, cells[name])]
    worst: dict[str, dict[str, int]] = defaultdict(dict)
    for check in checks:
        powers = worst[check.label]
        powers[check.against] = max(check.error_power, powers.get(check.against, check.error_power))

    results, tables = 0, []
    for page in cells:
        rows = []
        for label in book.labels_of(page, cells[page]):
            if label.is_result:
                lines = [f"{name}, $10^{{{power}}}$" for name, power in worst[label.name].items()]
                held = " \\\n    ".join(lines) or "nothing"
                rows.append(ROW.format(label=label.name, says=label.says, checks=held))
        results += len(rows)
        if rows:
            tables.append(TABLE.format(title=book.title_of(cells[page]), rows="\n".join(rows)))
    return "\n".join([HEAD.format(results=results, checks=len(checks)), *tables])


def write(root: Path = book.ROOT) -> None:
    """Write the page."""
    (root / PAGE).write_text(make(root), encoding="utf-8")


if __name__ == "__main__":
    write()
