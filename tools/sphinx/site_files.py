"""Sphinx: leave out of the site what no page asks for, and add what every site has.

The packages copy whole folders: all builds of MathJax, source maps, icons as a script of 1.5 MB
beside the same icons as fonts. Notebooks to download hold every picture once more, as text; those
who run them draw the pictures themselves. A drawn figure has a few dozen colours and their shades,
and needs no 32 bits for each point.
"""

import shutil
from pathlib import Path

import nbformat
import numpy as np
from PIL import Image

MATHJAX = ("tex-chtml.js", "input/tex", "output/chtml/fonts", "a11y", "ui", "sre")
"""The page loads the first; the others are what that one loads when a formula or a reader asks."""

SPEECH = ("base", "en", "nemeth")

NOT_FOUND = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="{base}_static/favicon.svg">
<title>Page not found: {title}</title>
<style>
:root {{ color-scheme: light dark; font: 1.1rem/1.6 sans-serif; }}
body {{ max-width: 34rem; margin: 20vh auto 0; padding: 0 1.5rem; }}
</style>
<h1>There is no such page</h1>
<p>It may have moved. Start from <a href="{base}">{title}</a>, or
<a href="{base}search.html">search the book</a>.</p>
</html>
"""


def trim(app, exception):
    if exception or app.builder.format != "html":
        return
    out = Path(app.outdir)
    static = out / "_static"
    for path in static.rglob("*.map"):
        path.unlink()
    # The script that draws icons from a copy of its own; the fonts are what the theme uses.
    (static / "scripts/fontawesome.js").write_text("// The icons are fonts.\n", encoding="utf-8")
    shutil.rmtree(static / "locales", ignore_errors=True)
    mathjax = static / "mathjax"
    for path in sorted(mathjax.rglob("*")):
        name = path.relative_to(mathjax).as_posix()
        if path.is_file() and not name.startswith(MATHJAX):
            path.unlink()
    for path in (mathjax / "sre/mathmaps").iterdir():
        if path.stem not in SPEECH:
            path.unlink()
    for path in (static / "vendor").rglob("*.ttf"):
        path.unlink()  # every browser of today takes the .woff2 beside it
    for path in (out / "_sources").rglob("*.ipynb"):
        without_pictures(path)
    for path in (out / "_images").glob("*.png"):
        with_few_colours(path)
    base, title = app.config.html_baseurl, app.config.html_title
    page = NOT_FOUND.format(base=base, title=title)
    (out / "404.html").write_text(page, encoding="utf-8")
    pages = "".join(
        f"<url><loc>{base}{name}.html</loc></url>\n" for name in sorted(app.env.all_docs)
    )
    head = '<?xml version="1.0" encoding="UTF-8"?>\n'
    space = "http://www.sitemaps.org/schemas/sitemap/0.9"
    (out / "sitemap.xml").write_text(f'{head}<urlset xmlns="{space}">\n{pages}</urlset>\n')


def without_pictures(path: Path) -> None:
    """Leave out the pictures of a notebook; its text, code and printed results stay."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/png", None)
    nbformat.write(notebook, path)


def with_few_colours(path: Path) -> None:
    """Give an opaque picture a palette of 256 colours, if that is smaller and looks the same."""
    picture = Image.open(path)
    if picture.mode == "P" or (picture.mode == "RGBA" and picture.getextrema()[3][0] < 255):
        return
    picture = picture.convert("RGB")
    few = picture.quantize(256, dither=Image.Dither.NONE)
    apart = np.abs(np.subtract(few.convert("RGB"), picture, dtype=np.int16)).max(axis=2)
    if apart.mean() > 0.5:  # of 255: shades, not lines
        return
    small = path.with_suffix(".few")
    few.save(small, "PNG")
    if small.stat().st_size < path.stat().st_size:
        small.replace(path)
    else:
        small.unlink()


def setup(app):
    app.connect("build-finished", trim, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
