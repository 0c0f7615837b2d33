"""axe-core's rules of WCAG 2, levels A and AA, on every page of the built book, also on a phone.

Formulas are left out: MathJax has an accessible form of its own, and thousands of nodes.

Needs the package axe-playwright-python besides playwright (not pinned either); skipped without it.
"""

from pathlib import Path

import pytest

from tools import book

PAGES = [f"{name}.html" for name in book.page_names()]
RULES = """async () => {
    const found = await axe.run({exclude: [["mjx-container"]]}, {
        runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"],
        resultTypes: ["violations"],
    });
    return found.violations
        .filter(({ impact }) => ["serious", "critical"].includes(impact))
        .map(({ id, help, nodes }) =>
            `${id}: ${help}: ${nodes.length} times, first ${nodes[0].target.join(" ")}: ` +
            nodes[0].html.slice(0, 200));
}"""


@pytest.fixture(scope="session")
def axe():
    package = pytest.importorskip(
        "axe_playwright_python", reason="axe-playwright-python is not installed: no rule was tried"
    )
    return (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_no_serious_violation(open_page, axe, name, scheme):
    page = open_page(name, color_scheme=scheme)
    page.evaluate(axe)
    page.wait_for_timeout(500)  # the dark theme's colours come in over a sixth of a second
    found = page.evaluate(RULES)
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_timeout(500)  # the theme looks for what scrolls some time after a change
    found += [f"390 px: {trouble}" for trouble in page.evaluate(RULES)]
    assert not found, "\n".join(found)
