"""A page as `make pdf` prints it."""

import importlib.util
import subprocess
import sys

import pytest

from tools import book, browser, pdf

# In a process of its own: playwright runs once in a process.
PRINT = """
import sys
from tools import browser, pdf
for title, document in pdf.printed(sys.argv[1:], "https://example.org/", browser.program()):
    print(title, document[:5], document.count(b"/Type /Page\\n"), b"example.org/" in document)
"""


def test_a_printed_page(site):
    if not importlib.util.find_spec("playwright") or not browser.program():
        pytest.skip("playwright or Chromium is not there: no page was printed")
    command = [sys.executable, "-c", PRINT, "book/notation"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=book.ROOT)
    lines = found.stdout.splitlines()
    assert lines[-1] == "[1/1] book/notation"
    assert lines[0].startswith("Notation b'%PDF-") and lines[0].endswith("True")


def test_what_was_folded_is_printed_in_full_ink(open_page):
    """It fades in when it opens, and was printed before it could be read."""
    page = open_page("notebooks/pytensor/06-writing-an-op.html")
    faint = page.evaluate(
        f"""async (given) => {{
            await ({pdf.PREPARE})(given);
            return [...document.querySelectorAll("main details > *")]
                .filter((node) => getComputedStyle(node).opacity < 1).length;
        }}""",
        ["https://example.org/", pdf.PAPER],
    )
    assert page.locator("main details[open]").count() and not faint
