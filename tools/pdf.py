"""The built book as one PDF: every page as the browser prints it, with the table of contents.

Needs ``make book``, a Chromium or Chrome of the system, and two packages that are not pinned:
playwright and pypdf. Run it as ``python -m tools.pdf``, or ``make pdf``.
"""

import io
import sys
from pathlib import Path

import yaml

from tools import book, browser

TARGET = book.ROOT / "_build/gradients-by-hand.pdf"

# Code and formulas break or shrink where the paper ends; what only a screen needs stays away.
PAPER = """
.bd-sidebar-primary, .bd-sidebar-secondary, .bd-header, .bd-header-article, .prev-next-area,
#pst-back-to-top, .skip-link, footer, .headerlink, button { display: none !important; }
pre { white-space: pre-wrap !important; overflow-wrap: anywhere; }
div.highlight, div[class*="highlight-"] {
    display: block !important; break-inside: auto !important; overflow: visible !important;
}
figure, img, mjx-container, tr, .check-mark { break-inside: avoid; }
h1, h2, h3, h4, summary { break-after: avoid; }
* { animation: none !important; transition: none !important; }  /* what opens fades in */
.bd-main, .bd-content, .bd-article-container { max-width: none !important; }
"""
# Everything that is folded is opened, and a link to a page leads to the one on the web.
PREPARE = """async ([base, css]) => {
    const style = document.createElement("style");
    style.textContent = css;
    document.head.append(style);
    for (const folded of document.querySelectorAll("details")) folded.open = true;
    for (const link of document.querySelectorAll("article a[href]"))
        if (link.href.startsWith(location.origin) && !link.getAttribute("href").startsWith("#"))
            link.href = base + link.href.slice(location.origin.length + 1);
    await window.MathJax?.startup?.promise;
    for (const formula of document.querySelectorAll("div.math mjx-container")) {
        const wide = formula.scrollWidth / formula.clientWidth;
        if (wide > 1) formula.style.fontSize = `${100 / wide}%`;
    }
    await Promise.all([...document.images].map((image) => image.decode().catch(() => {})));
}"""


def printed(pages: list[str], base: str, program: str):
    """The PDF of each page, as bytes, with its title."""
    from playwright.sync_api import sync_playwright

    with browser.served() as address, sync_playwright() as runner:
        window = runner.chromium.launch(executable_path=program, args=["--no-sandbox"])
        # What fits the width of A4 between its margins, at this scale, fits on the paper.
        scale, width = 0.8, 850
        page = window.new_page(viewport={"width": width, "height": 1000}, color_scheme="light")
        for number, name in enumerate(pages, 1):
            page.goto(f"{address}{name}.html")
            page.emulate_media(media="screen")
            page.evaluate(PREPARE, [base, PAPER])
            margin = dict.fromkeys(("top", "bottom", "left", "right"), "1.5cm")
            yield (
                page.inner_text("h1").rstrip("#¶"),
                page.pdf(format="A4", margin=margin, scale=scale, print_background=True),
            )
            print(f"[{number}/{len(pages)}] {name}", flush=True)
        window.close()


def main(names: list[str]) -> None:
    try:
        from pypdf import PdfWriter
    except ImportError:
        sys.exit("pypdf is not installed: pip install pypdf playwright")
    program = browser.program()
    if not program:
        sys.exit("there is no Chromium or Chrome on this system")
    if not (browser.SITE / "index.html").exists():
        sys.exit("the book is not built: run make book")
    pages = [name for name in book.page_names() if not names or any(x in name for x in names)]
    if not pages:
        sys.exit(f"no page of the book has {' or '.join(names)} in its name")
    config = yaml.safe_load((book.ROOT / "_config.yml").read_text(encoding="utf-8"))
    whole = PdfWriter()
    for title, document in printed(pages, config["html"]["baseurl"], program):
        whole.append(io.BytesIO(document), outline_item=title)
    whole.compress_identical_objects()
    part = TARGET.with_suffix(".part")
    with part.open("wb") as file:
        whole.write(file)
    part.replace(TARGET)
    print(f"{TARGET.relative_to(Path.cwd())}: {len(whole.pages)} pages")


if __name__ == "__main__":
    main(sys.argv[1:])
