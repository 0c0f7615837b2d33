"""Sphinx: which figures keep their white ground in the dark theme.

book.css turns the others over, light for dark, so that no white slab stands on a dark page; hues
stay. A caption that speaks of light and dark has to be true of what is seen, so its figure stays as
drawn.
"""

import re

from docutils import nodes

SPEAKS_OF_LIGHT = re.compile(
    r"\b(black|white|pale|paler|dark|darker|light|lighter)\b", re.IGNORECASE
)


def mark(app, doctree, docname=None):
    for figure in doctree.findall(nodes.figure):
        caption = " ".join(node.astext() for node in figure.findall(nodes.caption))
        if SPEAKS_OF_LIGHT.search(caption):
            figure["classes"].append("as-drawn")


def setup(app):
    app.connect("doctree-resolved", mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
