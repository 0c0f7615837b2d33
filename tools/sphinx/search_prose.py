"""Sphinx: the search finds what a page says, not what its code imports.

Code and what it prints are left out of the index; book/search-order.js puts a page whose
title has the words before others, and names of the package after the pages that explain them.
Where no title has the word that a reader would type, an index directive in the page gives it, with
an exclamation mark: `! panel`.
"""

from docutils import nodes


def prose(doctree: nodes.document) -> nodes.document:
    """A copy without blocks of code."""
    copy = doctree.deepcopy()
    for block in list(copy.findall(nodes.literal_block)):
        block.parent.remove(block)
    return copy


def index_prose(app):
    if app.builder.format != "html":
        return
    index = app.builder.index_page
    app.builder.index_page = lambda name, doctree, title: index(name, prose(doctree), title)


def setup(app):
    app.connect("builder-inited", index_prose)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
