"""The site reads every line that `verify` prints, and says each fact once."""

import pytest

from helpers.checks import Check
from tools import book
from tools.sphinx.check_marks import fact, summary

NOTEBOOKS = book.notebook_names()


@pytest.mark.parametrize("rtol", [1e-9, 1e-12, 3e-2])
def test_a_line_is_read_back(rtol):
    check = Check("eq-page-Pbar", "SciPy's filter, to 60 digits", rtol, 0.0)
    assert fact(str(check)) == (check.label, check.against, rtol)


@pytest.mark.parametrize("text", ["", "eq-page-a: agrees", "the series of two: True"])
def test_another_line_is_left_alone(text):
    assert fact(text) is None


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_lines_of_a_chapter_say_what_their_metadata_say(name):
    for cell in book.read_cells(name):
        for output in cell.get("outputs", []):
            recorded = output.get("metadata", {}).get("verify")
            found = fact(output.get("data", {}).get("text/plain", ""))
            wanted = recorded and (recorded["label"], recorded["against"], recorded["rtol"])
            assert found == wanted


def test_summary():
    # The hyphen is one that does not break: on a phone 1e- stood on one line and 1 on the next.
    assert summary([("autodiff", 1e-9)]) == "autodiff, ≤ 1e\N{NON-BREAKING HYPHEN}9"
    # The loosest bound of two, and how often.
    checks = [("autodiff", 1e-12), ("SciPy", 1e-10), ("autodiff", 1e-9)]
    assert (
        summary(checks)
        == "autodiff, ≤ 1e\N{NON-BREAKING HYPHEN}9 (2 checks); SciPy, ≤ 1e\N{NON-BREAKING HYPHEN}10"
    )
