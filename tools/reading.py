"""How long a chapter takes to read."""

import re
from collections.abc import Iterable

import nbformat

WORDS, LINES, FORMULAS = 220, 20, 30
"""What one reads in a minute: words, lines of code that are shown, displayed formulas."""

FOLDED = {"hide-input", "remove-input", "hide-cell", "remove-cell"}


def minutes(cells: Iterable[nbformat.NotebookNode]) -> float:
    """Minutes for the text, the formulas and the code that is not folded."""
    total = 0.0
    for cell in cells:
        if cell.cell_type == "markdown":
            text, formulas = re.subn(r"\$\$.*?\$\$", " ", cell.source, flags=re.DOTALL)
            text = re.sub(r"\$[^$]+\$", "x", text)
            total += len(text.split()) / WORDS + formulas / FORMULAS
        elif cell.cell_type == "code" and not FOLDED & set(cell.metadata.get("tags", [])):
            total += len(cell.source.splitlines()) / LINES
    return total
