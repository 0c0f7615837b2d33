"""What the landing page says of the length of a part, and a chapter of its own."""

import re

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell

from tools import book, reading
from tools.sphinx.part_length import say


def test_minutes():
    text = new_markdown_cell("word " * 220 + "\n$$\na\n\\\\ b c d e\n$$\n" * 30)
    shown, folded = new_code_cell("x\n" * 40), new_code_cell("x\n" * 400)
    folded.metadata["tags"] = ["hide-input"]
    assert reading.minutes([text, shown, folded]) == 1 + 1 + 2


def test_say():
    assert say(1, 32.6) == "35 minutes"
    assert say(1, 61) == "60 minutes"
    assert say(6, 221) == "6 chapters, 4 hours"


@pytest.mark.parametrize("name", book.notebook_names())
def test_a_chapter_is_a_lesson(name):
    """Nobody reads on for more than forty minutes, and the first screen says how long it takes."""
    cells = book.read_cells(name)
    said = [re.search(r"Reading time: (?:about )?(\d+) minutes", cell.source) for cell in cells]
    takes = reading.minutes(cells)
    assert takes < 41
    assert abs(next(int(found[1]) for found in said if found) - takes) < 6
