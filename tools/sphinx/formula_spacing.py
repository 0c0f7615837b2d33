"""Sphinx: a comma after a formula, or a bracket before it, never stands on a line of its own.

The theme makes each inline formula a box, and a browser may break a line on both sides of a box.
"""

import re

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

BEFORE, AFTER = re.compile(r"[(\[“\"']+$"), re.compile(r"^[)\],.;:!?”\"'’]+")


class HoldTogether(SphinxPostTransform):
    """Put a formula and the marks that touch it into one box in which no line breaks."""

    default_priority = 800
    formats = ("html",)

    def run(self, **kwargs):
        for formula in list(self.document.findall(nodes.math)):
            parent, at = formula.parent, formula.parent.index(formula)
            before = _take(parent, at - 1, BEFORE) if at else ""
            after = _take(parent, at + 1, AFTER) if at + 1 < len(parent) else ""
            if before or after:
                kept = [nodes.Text(before), formula, nodes.Text(after)]
                parent[at] = nodes.inline("", "", *kept, classes=["nobreak"])


def _take(parent: nodes.Element, at: int, marks: re.Pattern) -> str:
    """Take away the marks at one end of a neighbour that is text."""
    text = parent[at]
    found = isinstance(text, nodes.Text) and marks.search(text)
    if not found:
        return ""
    parent[at] = nodes.Text(marks.sub("", text))
    return found[0]


def setup(app):
    app.add_post_transform(HoldTogether)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
