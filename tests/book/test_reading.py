"""What the pages say of the length of a chapter, a part and the book."""

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tools import book, reading
from tools.sphinx.part_length import say

CHAPTERS = {name: reading.minutes(book.read_cells(name)) for name in book.notebook_names()}
LONGEST, MOST_WORDS, WHOLE_BOOK = 40, 3500, 25 * 60


def test_minutes():
    text = new_markdown_cell("word " * 220 + "\n$$\na\n\\\\ b c d e\n$$\n" * 30)
    imports = "import x.y\nfrom z import a as b\nfrom x import (\n    a,\n    b,\n)\n\n"
    shown, folded = new_code_cell(imports + "x\n\n" * 40), new_code_cell("x\n" * 400)
    folded.metadata["tags"] = ["hide-input"]
    assert reading.minutes([text, shown, folded]) == 1 + 15 + 5


def test_a_folded_solution_takes_no_time():
    whole = new_markdown_cell("ask " * 110 + "\n\n```{solution} x\n" + "word " * 500 + "\n```\n")
    cells = [whole, new_markdown_cell("```{solution-start} y\n:class: dropdown\n```")]
    cells += [new_code_cell("x\n" * 80), new_markdown_cell("```{solution-end}\n```")]
    assert reading.minutes(cells) == 0.5


def test_say():
    assert say(1, 32.6) == "35 minutes"
    assert say(1, 61) == "60 minutes"
    assert say(6, 221) == "6 chapters, 4 hours"


def test_the_line_at_the_head_is_written():
    cells = [new_markdown_cell("word " * 2200 + "\n\nReading time: 3 minutes. Runs in: a minute.")]
    notebook = new_notebook(cells=cells)
    reading.say(notebook)
    assert "Reading time: about 10 minutes. Runs" in cells[0].source


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_is_a_lesson(name):
    """One that is longer is cut or split."""
    assert CHAPTERS[name] <= LONGEST
    assert reading.counts(book.read_cells(name))[0] <= MOST_WORDS


def test_the_book_is_read_in_twenty_five_hours():
    assert sum(CHAPTERS.values()) <= WHOLE_BOOK


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_says_how_long_it_takes(name):
    cells = book.read_cells(name)
    said = next(int(found[1]) for cell in cells if (found := reading.SAID.search(cell.source)))
    assert said == reading.rounded(CHAPTERS[name]), "run make notebooks"
