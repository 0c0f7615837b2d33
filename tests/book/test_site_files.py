"""What the site leaves out changes nothing that a reader sees."""

import json

import numpy as np
import pytest
from docutils import nodes
from fontTools import ttLib
from nbformat.v4 import new_code_cell, new_notebook, new_output, writes
from PIL import Image

from tools.sphinx import dark_figures, page_head, site_files


def drawing(shades):
    """A picture of lines in a few colours, each with as many shades."""
    colours = np.array([[0, 0, 0], [0, 114, 178], [213, 94, 0]])
    share = np.linspace(0, 1, shades)[:, None, None]
    rows = 255 + share * (colours - 255)  # (shades, colours, 3)
    return Image.fromarray(np.tile(rows.astype(np.uint8), (6, 40, 1)))


def test_a_drawing_gets_a_palette_and_looks_the_same(tmp_path):
    path, picture = tmp_path / "drawing.png", drawing(60)
    picture.save(path)
    picture.convert("RGBA").save(path)
    before = path.stat().st_size
    site_files.with_few_colours(path)
    after = Image.open(path)
    assert after.mode == "P" and path.stat().st_size < before
    apart = np.abs(np.subtract(after.convert("RGB"), picture, dtype=int))
    assert apart.max() <= 2
    assert [file.name for file in tmp_path.iterdir()] == ["drawing.png"]


def test_shades_and_what_shines_through_stay_as_they_are(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    clear = drawing(8).convert("RGBA")
    clear.putpixel((0, 0), (0, 0, 0, 0))
    for name, picture in {"noise.png": Image.fromarray(noise), "clear.png": clear}.items():
        picture.save(tmp_path / name)
        before = (tmp_path / name).read_bytes()
        site_files.with_few_colours(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before, name


def test_a_notebook_to_download_keeps_text_and_code(tmp_path):
    both = new_output(
        "display_data",
        data={kind: "AAAA" for kind in ("image/png", "image/svg+xml")} | {"text/plain": "a figure"},
    )
    said = new_output("stream", text="3\n")
    (tmp_path / "a.ipynb").write_text(
        writes(new_notebook(cells=[new_code_cell("print(3)", outputs=[both, said])]))
    )
    site_files.without_pictures(tmp_path / "a.ipynb")
    (cell,) = json.loads((tmp_path / "a.ipynb").read_text())["cells"]
    assert "".join(cell["source"]) == "print(3)"
    assert cell["outputs"][0]["data"] == {"text/plain": "a figure"}
    assert cell["outputs"][1]["text"] == "3\n"


def test_code_without_marks_that_no_sheet_colours():
    code = '<span class="n">F</span> <span class="o">=</span> <span class="p">(</span>1'
    assert site_files.with_plain_code(code) == 'F <span class="o">=</span> (1'
    nested = '<span class="n"><b>F</b></span>'
    assert site_files.with_plain_code(nested) == nested


CSS = (
    '.fa-rocket:before{content:"\\f135"}.fa-bars:before,.fa-navicon:before{content:"\\f0c9"}'
    '.fa-ghost:before{content:"\\f6e2"}.admonition:after{content:"\\f06a"}a{color:red}'
)


def test_icons_that_are_shown():
    assert site_files.icons(CSS, {"fa-rocket", "fa-navicon"}) == {0xF135, 0xF0C9, 0xF06A}


def test_fonts_of_the_icons_that_are_shown(tmp_path):
    sheet = tmp_path / "styles/pydata-sphinx-theme.css"
    fonts = tmp_path / site_files.WEBFONTS
    sheet.parent.mkdir()
    fonts.mkdir(parents=True)
    (fonts / "fa-solid-900.woff2").write_bytes(b"all of them")
    source = f'url(../{site_files.WEBFONTS}/fa-solid-900.{{}}) format("{{}}")'
    both = f"{source.format('woff2', 'woff2')},{source.format('ttf', 'truetype')}"
    sheet.write_text(f"@font-face{{src:{both}}}{CSS}")
    for _ in range(2):  # a second build finds what the first has made
        site_files.with_few_icons(tmp_path, ['<i class="fa-solid fa-rocket">'])
        assert source.format("woff", "woff") in sheet.read_text()
        assert "woff2" not in sheet.read_text() and "truetype" not in sheet.read_text()
        names = {path.name for path in fonts.iterdir()}
        assert names == {"fa-solid-900.woff", "fa-regular-400.woff", "fa-brands-400.woff"}
        font = ttLib.TTFont(fonts / "fa-solid-900.woff")
        assert set(font.getBestCmap()) == {0xF135, 0xF06A}
        assert font.getGlyphSet()[font.getBestCmap()[0xF135]].width > 0


@pytest.mark.parametrize(
    ("caption", "kept"), [("The mean (black)", True), ("Darker is lower.", True), ("Blue", False)]
)
def test_a_caption_that_speaks_of_light_is_true_in_the_dark(caption, kept):
    figure = nodes.figure("", nodes.image(), nodes.caption("", caption))
    dark_figures.mark(None, nodes.section("", figure))
    assert ("as-drawn" in figure["classes"]) == kept


def test_arrows_of_the_side_bar_have_a_name():
    arrow = '<summary><span class="toctree-toggle"><i></i></span></summary>'

    def draw(kind, collapse):
        return f"<p>{kind}{collapse}</p>{arrow * 2}<summary>own</summary>"

    named = page_head.with_names(draw)("sidebar", collapse=True)
    assert named.startswith("<p>sidebarTrue</p>")
    assert named.count('<summary aria-label="Pages below"><span class="toctree-toggle">') == 2
    assert "<summary>own</summary>" in named
