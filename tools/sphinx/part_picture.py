"""Sphinx: a figure of a chapter on another page, as the executed notebook holds it.

:::{from-chapter} notebooks/kalman/05-adjoint-smoother fig-adjoint-nile
What to see in it.
:::
"""

import base64
import sys
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tools import book  # noqa: E402

FOLDER = "_build/part-pictures"
KINDS = {"image/png", "image/svg+xml"}


class FromChapter(SphinxDirective):
    has_content = True
    required_arguments = 2

    def run(self):
        chapter, name = self.arguments
        self.env.note_dependency(f"{chapter}.ipynb")
        for cell in book.read_cells(chapter):
            said = cell.metadata.get("mystnb", {})
            if said.get("figure", {}).get("name") == name:
                break
        else:
            raise self.error(f"{chapter} has no figure {name!r}")
        data = next(output.data for output in cell.outputs if KINDS & set(output.get("data", {})))
        kind = "svg" if "image/svg+xml" in data else "png"
        path = Path(self.env.srcdir) / FOLDER / f"{name}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "svg":
            path.write_text(data["image/svg+xml"], encoding="utf-8")
        else:
            path.write_bytes(base64.b64decode(data["image/png"]))
        alt = " ".join(said["image"]["alt"].split())
        image = nodes.image(uri=f"/{FOLDER}/{name}.{kind}", alt=alt)
        figure = nodes.figure("", image, classes=["part-picture"])
        text, messages = self.state.inline_text(" ".join(self.content), self.lineno)
        figure += nodes.caption("", "", *text)
        return [figure, *messages]


def setup(app):
    app.add_directive("from-chapter", FromChapter)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
