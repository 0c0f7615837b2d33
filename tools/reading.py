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
IMPORT = re.compile(r"^(?:from \S+ )?import (?:\([^)]*\)|.*)$", re.MULTILINE)
SAID = re.compile(r"Reading time: (?:about )?(\d+) minutes")


def minutes(cells: Iterable[nbformat.NotebookNode]) -> float:
    """Minutes for the text, the formulas and the code that is not folded; solutions are folded.

    Nobody reads the lines that import.
    """
    total, solution = 0.0, False
    for cell in cells:
        solution = solution or "{solution-start}" in cell.source
        if solution:
            solution = "{solution-end}" not in cell.source
        elif cell.cell_type == "markdown":
            text = FOLDED_TEXT.sub(" ", cell.source)
            text, formulas = re.subn(r"\$\$.*?\$\$", " ", text, flags=re.DOTALL)
            text = re.sub(r"\$[^$]+\$", "x", text)
            total += len(text.split()) / WORDS + formulas / FORMULAS
        elif cell.cell_type == "code" and not FOLDED & set(cell.metadata.get("tags", [])):
            code = IMPORT.sub("", cell.source)
            total += sum(bool(line.strip()) for line in code.splitlines()) / LINES
    return total


def rounded(time: float) -> int:
    """A reader plans by five minutes."""
    return 5 * round(time / 5)


def say(notebook: nbformat.NotebookNode) -> None:
    """Bring the line at the head of a chapter in line with what it takes."""
    words = f"Reading time: about {rounded(minutes(notebook.cells))} minutes"
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = SAID.sub(words, cell.source, count=1)
