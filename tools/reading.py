"""How long a chapter takes to read; `make notebooks` writes it into the head of the chapter."""

import re
from collections.abc import Iterable

import nbformat

WORDS, LINES, FORMULAS = 220, 8, 2
"""What one reads in a minute: words, lines of code that are shown, displayed formulas."""

FOLDED = {"hide-input", "remove-input", "hide-cell", "remove-cell"}
FOLDED_TEXT = re.compile(
    r"^(`{3,}|:{3,})\{(?:solution|dropdown)\}.*?^\1[ ]*$", re.MULTILINE | re.DOTALL
)
SOLUTION = re.compile(r"(\{solution-start\}|\{solution-end\})")
MARKUP = re.compile(r"^(?:`{3,}|:{3,}|:\w+:).*$|\((?:eq|def)-[\w-]+\)|<!--.*?-->", re.MULTILINE)
IMPORT = re.compile(r"^(?:from \S+ )?import (?:\([^)]*\)|.*)$", re.MULTILINE)
SAID = re.compile(r"Reading time: (?:about )?(\d+) minutes")


def counts(cells: Iterable[nbformat.NotebookNode]) -> tuple[int, int, int]:
    """Words, formulas and lines of code that are not folded; solutions are folded.

    Nobody reads the lines that import.
    """
    words, formulas, lines, solution = 0, 0, 0, False
    for cell in cells:
        if cell.cell_type == "markdown":
            shown = []  # a solution begins and ends in the middle of cells
            for piece in SOLUTION.split(cell.source):
                if SOLUTION.fullmatch(piece):
                    solution = "start" in piece
                elif not solution:
                    shown.append(piece)
            text = FOLDED_TEXT.sub(" ", " ".join(shown))
            text, displayed = re.subn(r"\$\$.*?\$\$", " ", text, flags=re.DOTALL)
            formulas += displayed
            text = re.sub(r"\$[^$]+\$", "x", MARKUP.sub("", text))
            words += sum(any(map(str.isalnum, word)) for word in text.split())
        elif not solution and not FOLDED & set(cell.metadata.get("tags", [])):
            lines += sum(bool(line.strip()) for line in IMPORT.sub("", cell.source).splitlines())
    return words, formulas, lines


def minutes(cells: Iterable[nbformat.NotebookNode]) -> float:
    """Minutes for what `counts` counts."""
    words, formulas, lines = counts(cells)
    return words / WORDS + formulas / FORMULAS + lines / LINES


def rounded(time: float) -> int:
    """A reader plans by five minutes."""
    return 5 * round(time / 5)


def say(notebook: nbformat.NotebookNode) -> None:
    """Bring the line at the head of a chapter in line with what it takes."""
    words = f"Reading time: about {rounded(minutes(notebook.cells))} minutes"
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = SAID.sub(words, cell.source, count=1)
