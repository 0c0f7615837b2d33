"""A browser, the built book on a local server, and every other host out of reach.

Needs `make book`, the package playwright (not pinned: only these tests use it) and a Chromium or
Chrome of the system; without them the tests are skipped, and say what is missing.
"""

import pytest

from tools import book
from tools.browser import SITE, program, served

SOURCES = ("book/**/*", "notebooks/**/*.ipynb", "tools/sphinx/*.py", "_config.yml", "_toc.yml")


def stale() -> str | None:
    """What makes the build useless, if anything does."""
    mark = SITE / "searchindex.js"
    if not mark.exists():
        return "the book is not built: run make book"
    built = mark.stat().st_mtime
    for pattern in SOURCES:
        for path in book.ROOT.glob(pattern):
            if path.is_file() and path.stat().st_mtime > built:
                name = path.relative_to(book.ROOT)
                return f"{name} is newer than the built book: run make book"
    return None


@pytest.fixture(scope="session")
def site():
    """The folder of the built book."""
    if trouble := stale():
        pytest.skip(trouble)
    return SITE


@pytest.fixture(scope="session")
def address(site):
    """Where the book is served."""
    with served(site) as address:
        yield address


@pytest.fixture(scope="session")
def browser(site):
    reason = "playwright is not installed: no page was opened in a browser"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    if not (path := program()):
        pytest.skip("there is no Chromium or Chrome: no page was opened in a browser")
    with playwright.sync_playwright() as runner:
        browser = runner.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, address):
    """Open a page of the book at a width, typeset; what went wrong meanwhile is in `.troubles`."""
    contexts = []

    def open_page(name, width=1400, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        context.set_default_timeout(120_000)  # a busy machine takes more than half a minute
        contexts.append(context)
        troubles = []

        def decide(route):
            if route.request.url.startswith((address, "data:", "blob:")):
                route.continue_()
            else:
                troubles.append(f"asks another host: {route.request.url}")
                route.abort()

        context.route("**/*", decide)
        page = context.new_page()
        page.troubles = troubles
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on(
            "console",
            lambda line: line.type == "error" and troubles.append(f"console: {line.text}"),
        )
        page.on(
            "response",
            lambda answer: (
                answer.status >= 400 and troubles.append(f"{answer.status}: {answer.url}")
            ),
        )
        page.goto(address + name)
        page.evaluate("() => window.MathJax?.startup?.promise")
        return page

    yield open_page
    for context in contexts:
        context.close()
