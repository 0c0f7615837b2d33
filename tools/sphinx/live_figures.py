"""Sphinx: a page with one of these figures loads the scripts that let a reader turn its knobs.

A script finds the figure by its name and stands under it or in its place; without scripts the
figure is there alone.
"""

from docutils import nodes

LIVE = {
    "fig-index-headline": ["nile-data.js", "local-level.js", "nile-live.js"],
    "fig-right-v": ["step-size.js"],
    "fig-steady-nile": ["local-level.js", "settling.js"],
}


def load(app, pagename, templatename, context, doctree):
    if doctree is None:
        return
    names = {name for figure in doctree.findall(nodes.figure) for name in figure["ids"]}
    for figure, scripts in LIVE.items():
        if figure in names:
            for script in scripts:
                app.add_js_file(script, loading_method="defer")


def setup(app):
    app.connect("html-page-context", load)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
