"""Sphinx: what a page says of itself, and what it leaves to nobody: scripts that it does not need.

What the theme leaves without a name for a screen reader gets one.

A description and a card for those who share a link; the edit button leads to the text that people
edit; no script is loaded twice, and none of sphinx-thebe, which Jupyter Book brings and this book
does not use.
"""

import tomllib
from html import escape
from pathlib import Path

from docutils import nodes

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LONGEST = 200


def version_in_footer(app, config):
    config.html_theme_options["extra_footer"] = (
        f'Version {PROJECT["version"]}, <a href="{PROJECT["urls"]["Repository"]}">source</a>, '
        f'<a href="{PROJECT["urls"]["Repository"]}/blob/main/LICENSE">MIT licence</a>'
    )


def tidy(app, pagename, templatename, context, doctree):
    context["script_files"] = needed(context["script_files"], formulas=has_formulas(doctree))
    context["css_files"] = [file for file in context["css_files"] if "thebe" not in name_of(file)]
    context.setdefault("default_mode", "auto")
    if "generate_toctree_html" in context:
        context["generate_toctree_html"] = with_names(context["generate_toctree_html"])
    # An entry of a bibliography is no item of a list, and its links back are none of it.
    context["body"] = context.get("body", "").replace(
        '<div role="list" class="citation-list">', '<div class="citation-list">'
    )
    for button in buttons(context.get("header_buttons", [])):
        if button.get("label") == "source-edit-button":
            button["url"] = button["url"].removesuffix(".ipynb").removesuffix(".md") + ".md"
    if pagename == app.config.root_doc:
        context["docstitle"] = ""  # the title of the page says it already
    if doctree is not None:
        context["metatags"] = context.get("metatags", "") + card(app, pagename, context, doctree)


def with_names(draw):
    """The side bar, whose arrows say nothing to those who do not see them, with words."""

    def named(*args, **kwargs):
        arrow = '<summary><span class="toctree-toggle"'
        text = str(draw(*args, **kwargs))
        return text.replace(arrow, arrow.replace("<summary", '<summary aria-label="Pages below"'))

    return named


def name_of(file) -> str:
    return str(file.filename or "")


def has_formulas(doctree) -> bool:
    """Whether a page needs MathJax; search results and indices are made without a tree."""
    return doctree is not None and bool(
        doctree.next_node(nodes.math) or doctree.next_node(nodes.math_block)
    )


def needed(scripts: list, formulas: bool) -> list:
    """The scripts without sphinx-thebe, each once; MathJax only where there are formulas."""
    unwanted = ["thebe"] if formulas else ["thebe", "mathjax"]
    kept = {}
    for script in scripts:
        name, body = name_of(script), script.attributes.get("body") or ""
        if not any(word in (name + body).lower() for word in unwanted):
            kept.setdefault((name, body), script)
    return list(kept.values())


def buttons(tree: list):
    """Every button of the bar, those in menus too."""
    for button in tree:
        yield button
        yield from buttons(button.get("buttons", []))


def card(app, pagename, context, doctree) -> str:
    """Description and Open Graph tags."""
    title = nodes.Element.astext(
        doctree.next_node(nodes.title) or nodes.title("", app.config.html_title)
    )
    base = app.config.html_baseurl
    says = {
        "og:title": title,
        "og:description": description(doctree) or PROJECT["description"],
        "og:type": "article",
        "og:site_name": app.config.html_title,
        "og:url": f"{base}{pagename}.html",
        "og:image": f"{base}_static/card.png",
        "og:image:alt": "The flow of the Nile with its level, and the gradient of its likelihood",
    }
    tags = [f'<meta property="{name}" content="{escape(text)}" />' for name, text in says.items()]
    tags.append(f'<meta name="description" content="{escape(says["og:description"])}" />')
    tags.append('<meta name="twitter:card" content="summary_large_image" />')
    return "\n".join(["", *tags, ""])


def description(doctree) -> str:
    """The first paragraph that reads as a sentence without its formulas, cut at a word."""
    for paragraph in doctree.findall(nodes.paragraph):
        text = " ".join(paragraph.astext().split())
        if not paragraph.next_node(nodes.math) and text.endswith((".", "?")) and len(text) > 40:
            break
    else:
        return ""
    return text if len(text) <= LONGEST else text[: LONGEST - 1].rsplit(" ", 1)[0] + "…"


def setup(app):
    app.connect("config-inited", version_in_footer)
    app.connect("html-page-context", tidy, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
