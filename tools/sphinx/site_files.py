"""Sphinx: leave out of the site what no page asks for, and add what every site has.

The packages copy whole folders: all builds of MathJax, source maps, icons as a script of 1.5 MB
beside the same icons as fonts. Notebooks to download hold every picture once more, as text; those
who run them draw the pictures themselves. A drawn figure has a few dozen colours and their shades,
and needs no 32 bits for each point. Names and punctuation of code have the colour of the block
around them, and need no mark-up each; of two thousand icons the pages show twenty.
"""

import json
import logging
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import nbformat
import numpy as np
import pydata_sphinx_theme
from fontTools import subset, ttLib
from PIL import Image

logging.getLogger("fontTools").setLevel(logging.WARNING)  # it tells of every table

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
    code = "".join(path.read_text(encoding="utf-8") for path in static.glob("*.js"))
    pages = [path.read_text(encoding="utf-8") for path in out.rglob("*.html")]
    with_few_icons(static, [code, *pages])
    for path in out.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        if text != (plain := with_plain_code(text)):
            path.write_text(plain, encoding="utf-8")
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
            for kind in ("image/png", "image/svg+xml"):
                output.get("data", {}).pop(kind, None)
    text = json.dumps(notebook, ensure_ascii=False, separators=(",", ":"))
    path.write_text(text, encoding="utf-8")


PLAIN = re.compile(r'<span class="(?:n|p|w)">([^<]*)</span>')


def with_plain_code(html: str) -> str:
    """Code without the marks of names, punctuation and spaces, which no style sheet colours."""
    return PLAIN.sub(r"\1", html)


WEBFONTS = "vendor/fontawesome/webfonts"
FONTS = Path(pydata_sphinx_theme.__file__).parent / "theme/pydata_sphinx_theme/static" / WEBFONTS


def with_few_icons(static: Path, texts: Iterable[str]) -> None:
    """Leave in the fonts of icons those whose names occur in the texts, and those of the theme."""
    sheet = static / "styles/pydata-sphinx-theme.css"
    css = sheet.read_text(encoding="utf-8")
    points = icons(css, {name for text in texts for name in re.findall(r"\bfa-[a-z0-9-]+", text)})
    for path in (static / WEBFONTS).iterdir():
        path.unlink()
    for source in FONTS.glob("*.ttf"):
        font = ttLib.TTFont(source)
        kept = subset.Subsetter(subset.Options(layout_features=[], notdef_outline=True))
        kept.populate(unicodes=points)
        kept.subset(font)
        font.flavor = "woff"
        font.save(static / WEBFONTS / f"{source.stem}.woff")
    fonts = re.compile(
        r"(/fa-[a-z0-9-]+)\.woff2\) format\(\"woff2\"\),url\([^)]*\) format\(\"truetype\"\)"
    )
    sheet.write_text(fonts.sub(r'\1.woff) format("woff")', css), encoding="utf-8")


def icons(css: str, names: set[str]) -> set[int]:
    """The code points of these icons in a style sheet, and of those that it shows by itself."""
    points = set()
    for selector, rules in re.findall(r"([^{}]*)\{([^{}]*)\}", css):
        own = set(re.findall(r"\.(fa-[a-z0-9-]+):before", selector))
        if own and not own & names:
            continue
        points |= {int(code, 16) for code in re.findall(r"\\([ef][0-9a-f]{3})", rules)}
        points |= {ord(sign) for sign in rules if 0xE000 <= ord(sign) <= 0xF8FF}
    return points


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
    few.save(small, "PNG", optimize=True)
    if small.stat().st_size < path.stat().st_size:
        small.replace(path)
    else:
        small.unlink()


def setup(app):
    app.connect("build-finished", trim, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
