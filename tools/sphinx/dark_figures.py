"""Sphinx: figures that scroll on a phone, and which keep their white ground in the dark theme.

A picture stands in a box of its own, so that it can be wider than a phone and its caption is not.
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
        for image in [node for node in figure.children if isinstance(node, nodes.image)]:
            figure.replace(image, nodes.container("", image, classes=["picture"]))


def setup(app):
    app.connect("doctree-resolved", mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
