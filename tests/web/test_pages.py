"""Every page of the built book, as a browser shows it."""

import io
import re
from pathlib import Path

import numpy as np
import pytest

from tools import book

INSPECT = Path(__file__).with_name("inspect.js").read_text(encoding="utf-8")
PAGES = [f"{name}.html" for name in book.page_names()]
OTHERS = ["genindex.html", "search.html"]

# The longest line of each block of code that scrolls, folded blocks too.
CUT_OFF = """() => {
    for (const node of document.querySelectorAll("main details")) node.open = true;
    for (const node of document.querySelectorAll("main .toggle-hidden")) {
        node.classList.remove("toggle-hidden");
    }
    return [...document.querySelectorAll("main pre")]
        .filter((node) => node.scrollWidth > node.clientWidth)
        .map((node) => node.textContent.split("\\n").sort((a, b) => b.length - a.length)[0]);
}"""

# Displayed formulas that are wider than the screen.
SCROLLS = """() => [...document.querySelectorAll("div.math mjx-container")]
    .filter((node) => node.scrollWidth > node.clientWidth + 1)
    .map((node) => node.textContent)"""

# The same of formulas in a line of text; a table scrolls as a whole.
INLINE = """() => [...document.querySelectorAll("main span.math:not(table *)")]
    .filter((node) => node.clientWidth && node.scrollWidth > node.clientWidth + 1)
    .map((node) => node.textContent)"""

# Words of tables that stand on two lines, though the screen has room for them.
BROKEN = """() => [...document.querySelectorAll("main :is(td, th)")].flatMap((cell) => {
    const found = [], texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const node = texts.currentNode, range = document.createRange();
        if (node.parentElement.closest("mjx-container")) continue;
        for (const word of node.data.matchAll(/\\p{L}+/gu)) {
            range.setStart(node, word.index);
            range.setEnd(node, word.index + word[0].length);
            const lines = [...range.getClientRects()];
            const width = lines.reduce((sum, line) => sum + line.width, 0);
            if (lines.length > 1 && width < 300) found.push(word[0]);
        }
    }
    return found;
})"""


@pytest.mark.parametrize("name", PAGES)
def test_page(open_page, name):
    """On a desktop, then on a phone."""
    page = open_page(name)
    troubles = [f"1400 px: {trouble}" for trouble in page.evaluate(INSPECT)]
    page.set_viewport_size({"width": 390, "height": 844})
    troubles += [f"390 px: a display scrolls: {text}" for text in page.evaluate(SCROLLS)]
    page.set_viewport_size({"width": 375, "height": 800})
    troubles += [f"375 px: {trouble}" for trouble in page.evaluate(INSPECT)]
    page.set_viewport_size({"width": 1400, "height": 900})
    troubles += [f"code is cut off: {line}" for line in page.evaluate(CUT_OFF)]
    page.set_viewport_size({"width": 390, "height": 844})
    troubles += [f"390 px: {text} scrolls; break it in two" for text in page.evaluate(INLINE)]
    troubles += [f"390 px: a table breaks {word}" for word in page.evaluate(BROKEN)]
    troubles += page.troubles
    assert not troubles, "\n".join(troubles)


@pytest.mark.parametrize("name", OTHERS)
def test_other_page(open_page, name):
    page = open_page(name)
    assert not page.troubles


def test_results_of_a_search_fit_a_phone(open_page):
    """Long names of the package among them, and the glass beside what is typed."""
    page = open_page("search.html?q=kalman", width=390)
    page.wait_for_selector("#search-results li p.context")
    assert page.evaluate("() => document.documentElement.scrollWidth") == 390
    glass = page.locator(".bd-search-container .fa-magnifying-glass").bounding_box()
    field = page.locator(".bd-search-container input")
    padding = field.evaluate("(field) => parseFloat(getComputedStyle(field).paddingLeft)")
    assert glass["x"] + glass["width"] <= field.bounding_box()["x"] + padding


@pytest.mark.parametrize("name", PAGES)
def test_edit_button(site, name):
    """It leads to the text that people edit, and that file is there."""
    found = re.findall(r'href="[^"]*/edit/main/([^"]*)"', (site / name).read_text(encoding="utf-8"))
    assert found and all(path.endswith(".md") and (book.ROOT / path).exists() for path in found)


TYPESET = [
    "book/notation.html",
    "notebooks/pytensor/02-pushing-and-pulling.html",
    "notebooks/kalman/04-all-ten-gradients.html",
    "notebooks/kalman/05-adjoint-smoother.html",
    "notebooks/sparse/02-gradient-of-a-gather.html",
    "notebooks/onnx/02-rules.html",
    "notebooks/onnx/03-rules-of-layers.html",
]
FREE = ":is(div.math mjx-container, span.math) { overflow: visible !important; }"


@pytest.mark.parametrize("name", TYPESET)
def test_formulas_keep_their_ink(open_page, name):
    """Nothing more of a formula is seen when nothing cuts it off.

    A formula that is wider than its column scrolls, and is left out.
    """
    images = pytest.importorskip("PIL.Image")
    page = open_page(name)
    page.evaluate("""() => document.querySelectorAll("div.math mjx-container").forEach((node) => {
        if (node.scrollWidth > node.clientWidth) node.style.visibility = "hidden";
    })""")
    # The sidebar slides when a screenshot changes the window's height, and moves the text with it.
    page.add_style_tag(
        content="""#pst-back-to-top, .bd-header-article { display: none !important; }
        * { transition: none !important; }"""
    )

    def shot():
        clip = page.locator("article.bd-article")
        return np.asarray(images.open(io.BytesIO(clip.screenshot())).convert("L")).astype(int)

    before = shot()
    page.add_style_tag(content=FREE)
    after = shot()
    assert before.shape == after.shape
    rows = np.flatnonzero((np.abs(after - before) > 60).any(axis=1))
    assert not rows.size, f"ink is lost in rows {rows[:20].tolist()}"


def test_search_shows_no_tex(open_page):
    page = open_page("search.html?q=joseph")
    page.wait_for_selector("#search-results li p.context")
    page.wait_for_timeout(500)
    text = page.inner_text("#search-results")
    assert "Joseph" in text and "\\" not in text


FIRST = {
    "install": "book/how-to-read",
    "pip install": "book/how-to-read",
    "steady state": "notebooks/kalman/12-steady-state",
    "score": "notebooks/kalman/21-a-score-for-statsmodels",
    "missing": "notebooks/kalman/08-gaps-and-moving-parts",
    "gap": "notebooks/kalman/08-gaps-and-moving-parts",
    "panel": "notebooks/kalman/17-a-thousand-series",
    "many series": "notebooks/kalman/17-a-thousand-series",
    "standard errors": "notebooks/kalman/15-how-sure",
    "speed": "notebooks/kalman/14-benchmarks",
    "PyMC": "notebooks/kalman/13-drop-in",
    "statsmodels": "notebooks/kalman/21-a-score-for-statsmodels",
    "diffuse": "notebooks/kalman/16-the-start-nobody-has-to-guess",
    "JAX": "book/api/kalman",
    "seasonal": "notebooks/kalman/10-maximum-likelihood",
    "Kalman filter": "book/parts/kalman",
    "sparse": "book/parts/sparse",
    "ONNX": "book/parts/onnx",
    "Op": "notebooks/pytensor/06-writing-an-op",
    "Hessian": "notebooks/kalman/15-how-sure",
    "complex step": "notebooks/pytensor/05-is-my-gradient-right",
}


@pytest.mark.parametrize("words", FIRST)
def test_search_finds_the_page_of_its_words_first(open_page, words):
    page = open_page(f"search.html?q={words.replace(' ', '+')}")
    first = page.wait_for_selector("#search-results li > a").get_attribute("href")
    assert FIRST[words] in first


def test_a_link_shows_where_it_leads(open_page):
    """An equation of this page and one of another, by mouse and by keyboard."""
    page = open_page("notebooks/kalman/05-adjoint-smoother.html")
    here = "main a.reference.internal[href^='#equation-']"
    page.locator(here).first.hover()
    page.wait_for_selector(".preview-card mjx-container")
    page.keyboard.press("Escape")
    assert not page.query_selector(".preview-card")
    page.locator("main a.reference.internal[href*='.html#equation-']").first.focus()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    page.wait_for_selector(".preview-card mjx-container")
    assert not page.troubles


def test_a_check_and_its_formula_lead_to_each_other(open_page):
    page = open_page("notebooks/kalman/05-adjoint-smoother.html")
    mark = page.locator("p.check-mark a").first
    box = page.locator(mark.get_attribute("href"))
    assert "checks" in box.get_attribute("class")
    formulas = [link.get_attribute("href") for link in box.locator("a").all()]
    assert mark.locator("xpath=../preceding-sibling::div[1]").get_attribute("id") in [
        formula.removeprefix("#") for formula in formulas
    ]


def test_a_link_into_a_folded_solution_opens_it(open_page):
    page = open_page("notebooks/kalman/05-adjoint-smoother.html")
    anchor = page.get_attribute("div.solution.toggle-hidden", "id")
    page.evaluate("id => { location.hash = id; }", anchor)
    page.wait_for_selector(f"[id='{anchor}']:not(.toggle-hidden)")


def test_filters_of_the_equation_index(open_page):
    page = open_page("book/equation-index.html")
    assert not page.locator(".equation-entry:visible").count()
    everything = page.locator(".equation-entry").count()
    page.select_option("select[name=against]", "statsmodels")
    chosen = page.locator(".equation-entry:visible")
    assert 0 < chosen.count() < everything
    assert all("statsmodels" in text for text in chosen.all_inner_texts())
    page.fill("input[name=word]", "smooth")
    assert "smooth" in chosen.first.inner_text().lower()
    page.fill("input[name=word]", "no such word")
    assert chosen.count() == 0
    assert page.inner_text(".equation-filter output").startswith("0 of")


@pytest.mark.parametrize("color_scheme", ["light", "dark"])
def test_a_card_stays_inside_the_window(open_page, color_scheme):
    """Figures are the largest; the links are tried where they stand, near all edges."""
    page = open_page("notebooks/kalman/05-adjoint-smoother.html", color_scheme=color_scheme)
    for link in page.locator("main a.reference.internal[href*='#fig-']").all():
        link.hover()
        page.wait_for_selector(".preview-card img")
        page.wait_for_function("() => document.querySelector('.preview-card img').complete")
        page.wait_for_timeout(50)
        card = page.locator(".preview-card").bounding_box()
        assert card["x"] >= 0 and card["x"] + card["width"] <= 1400
        assert card["y"] >= 0 and card["y"] + card["height"] <= 900
        page.mouse.move(0, 0)
        page.keyboard.press("Escape")


@pytest.mark.parametrize("kept", [True, False])
def test_a_figure_whose_caption_speaks_of_light_stays_as_drawn_in_the_dark(open_page, kept):
    """A digit is dark for large there, and its curves are turned over like those of other pages."""
    page = open_page("notebooks/sparse/04-training-on-sparse-digits.html", color_scheme="dark")
    image = "figure.as-drawn img" if kept else "figure:not(.as-drawn) img"
    look = page.locator(image).first.evaluate("(image) => getComputedStyle(image).filter")
    assert (look == "none") == kept


def test_on_a_phone_letters_of_figures_are_as_large_as_the_text(open_page):
    """A figure drawn with text of 13 points keeps its size, and scrolls."""
    page = open_page("notebooks/pytensor/02-pushing-and-pulling.html", 390)
    size = page.evaluate("""() => [...document.querySelectorAll("figure img")].map((image) => [
        image.getBoundingClientRect().width / image.naturalWidth, image.src.endsWith(".svg")])""")
    letters = [13 * 4 / 3 * share for share, drawn in size if drawn]
    assert letters and min(letters) > 15


FORMULAS = """() => [...document.querySelectorAll("div.math")].flatMap((node) => {
    const formula = node.querySelector("mjx-container"), number = node.querySelector(".eqno");
    if (!node.offsetWidth || !number) return [];
    const [text, mark] = [formula, number].map((x) => x.getBoundingClientRect());
    return [[node.id, formula.scrollWidth > formula.clientWidth + 1,
             text.width > node.clientWidth - 2, mark.bottom <= text.top + 1]];
})"""


def test_on_a_phone_a_formula_has_the_whole_width(open_page):
    """One that scrolls has it, and its number above; a number beside a formula covers nothing."""
    page = open_page("notebooks/kalman/05-adjoint-smoother.html", 320)
    found = page.evaluate(FORMULAS)
    scrolling = [name for name, scrolls, *_ in found if scrolls]
    assert scrolling and len(scrolling) < len(found) / 2
    assert [name for name, scrolls, *good in found if scrolls and not all(good)] == []
    assert any(not above for *_, above in found)


@pytest.mark.parametrize("name", [*PAGES, "404.html"])
def test_what_a_page_says_of_itself(site, name):
    text = (site / name).read_text(encoding="utf-8")
    assert "name not set" not in text and "unpkg.com" not in text
    if name != "404.html":
        tags = dict(re.findall(r'<meta (?:property|name)="([^"]*)" content="([^"]*)"', text))
        assert len(tags["description"]) > 30
        assert tags["og:title"] and tags["og:site_name"] == "Gradients by Hand"
        assert "Version" in text and "MIT licence" in text


FIGURES = {
    "notebooks/pytensor/05-is-my-gradient-right.html": ".live-steps",
    "notebooks/kalman/12-steady-state.html": ".live-settling",
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_live_figure_follows_its_knob(open_page, name):
    """By keyboard, at both widths; the page grows no wider by it."""
    for width in (1400, 375):
        page = open_page(name, width)
        knob = page.locator(f"{FIGURES[name]} input")
        before = page.inner_text(FIGURES[name])
        knob.focus()
        page.keyboard.press("ArrowRight")
        assert page.inner_text(FIGURES[name]) != before
        assert knob.get_attribute("aria-valuetext")
        assert not page.troubles
