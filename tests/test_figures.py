"""The house style: opaque, legible, and told apart with and without colour."""

import io
import itertools
import subprocess
import sys

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from helpers.figures import COLORS, STYLES, band, bars, error_axes, use_style

# Machado, Oliveira and Fernandes (2009), complete dichromacy, acting on linear RGB
VISION = {
    "full": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(color):
    rgb = np.array(to_rgb(color))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIE L*a*b* of linear RGB, where distance is difference to the eye."""
    t = XYZ @ np.clip(rgb, 0, 1) / XYZ.sum(axis=1)
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.fixture
def figure(monkeypatch):
    monkeypatch.delenv("DRAFT_FIGURES")
    with mpl.rc_context():
        use_style()
        figure = Figure()
        FigureCanvasAgg(figure)
        yield figure


def pixels(figure):
    file = io.BytesIO()
    figure.savefig(file)
    file.seek(0)
    return imread(file, format="png")


def test_png_is_opaque_white_even_after_a_dark_style():
    with mpl.rc_context():
        mpl.rcParams.update(
            {"figure.facecolor": "black", "axes.facecolor": "black", "savefig.transparent": True}
        )
        use_style()
        figure = Figure()
        FigureCanvasAgg(figure)
        figure.subplots().plot([1, 2])
        image = pixels(figure)
    assert image.shape[:2] == (600, 960)
    assert np.all(image[..., 3:] == 1)
    assert np.all(image[0, 0] == 1)
    assert np.all(image[300, 480] == 1)  # inside the axes, beside the line


def test_style_is_legible(figure):
    ax = figure.subplots()
    (line,) = ax.plot([1, 2], label="line")
    ax.set(title="title", xlabel="x", ylabel="y")
    texts = [ax.title, ax.xaxis.label, *ax.get_xticklabels(), *ax.legend().get_texts()]
    assert min(text.get_fontsize() for text in texts) >= 11
    assert line.get_linewidth() >= 2
    assert 6.4 <= figure.get_figwidth() <= 7
    assert figure.get_constrained_layout()


@pytest.mark.parametrize("vision", VISION)
def test_palette_is_told_apart(vision):
    seen = {name: lab(VISION[vision] @ linear(color)) for name, color in COLORS.items()}
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 8, (one, other)


def test_lines_stand_out_from_white():
    for style in STYLES:
        luminance = XYZ[1] @ linear(style["color"])
        assert 1.05 / (luminance + 0.05) > 2.2  # contrast, as WCAG defines it


@pytest.mark.parametrize("key", ["color", "linestyle", "marker"])
def test_styles_differ_in_every_respect(key):
    assert len({style[key] for style in STYLES}) == len(STYLES)


def test_plain_plots_take_styles_in_turn(figure):
    ax = figure.subplots()
    lines = [ax.plot([0, 1])[0] for _ in STYLES]
    assert [line.get_color() for line in lines] == [style["color"] for style in STYLES]
    assert len({str(line._unscaled_dash_pattern) for line in lines}) == len(STYLES)


def test_error_axes(figure):
    ax = figure.subplots()
    error_axes(ax, "step", "error")
    ax.plot([1e-16, 1e-8, 1.0], [1.0, 1e-9, 1e-2])
    figure.draw_without_rendering()
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "error")
    for ticks in (ax.get_xticks(), ax.get_yticks(), ax.get_xticks(minor=True)):
        np.testing.assert_allclose(np.log10(ticks), np.round(np.log10(ticks)), atol=1e-9)
    labelled = [t for t in ax.get_xticklabels() if t.get_text()]
    assert 3 <= len(labelled) <= 10
    assert not any(t.get_text() for t in ax.get_xticklabels(minor=True))
    assert any(np.all(line.get_ydata() == np.finfo(float).eps) for line in ax.lines)
    assert "machine\nepsilon" in [text.get_text() for text in ax.texts]


def test_band_is_two_standard_deviations(figure):
    ax = figure.subplots()
    band(ax, [0, 1, 2], [1.0, 2.0, 3.0], [0.5, 0.5, 1.0], label="level")
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [1, 2, 3])
    heights = ax.collections[0].get_paths()[0].vertices
    for x, low, high in [(0, 0, 2), (1, 1, 3), (2, 1, 5)]:
        here = heights[heights[:, 0] == x, 1]
        assert (here.min(), here.max()) == (low, high)
    assert ax.get_legend_handles_labels()[1] == ["level"]


def test_band_refuses_columns(figure):
    with pytest.raises(ValueError, match=r"mean has shape \(3, 1\), expected \(n,\) = \(3,\)"):
        band(figure.subplots(), np.arange(3), np.zeros((3, 1)), np.zeros(3))
    with pytest.raises(ValueError, match=r"sd has shape \(2,\)"):
        band(figure.subplots(), np.arange(3), np.zeros(3), np.zeros(2))


def test_bars(figure):
    ax = figure.subplots()
    bars(ax, ["autodiff", "closed form"], [(1.0, 1.0, 1.0), (0.25, 0.2, 0.5)])
    assert [bar.get_width() for bar in ax.patches] == [1.0, 0.25]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["autodiff", "closed form"]
    assert ax.yaxis_inverted()
    whiskers = ax.collections[0].get_segments()
    np.testing.assert_allclose(whiskers[1][:, 0], [0.2, 0.5])
    assert any(list(line.get_xdata()) == [1.0, 1.0] for line in ax.lines)
    assert [text.get_text() for text in ax.texts] == ["1", "0.25"]


@pytest.mark.parametrize(
    ("ratios", "message"),
    [([(1, 1, 1)], r"expected \(names, 3\) = \(2, 3\)"), ([(1, 2, 3)] * 2, "low <= median")],
)
def test_bars_refuse(figure, ratios, message):
    with pytest.raises(ValueError, match=message):
        bars(figure.subplots(), ["a", "b"], ratios)


SHOW = """
import matplotlib as mpl
import numpy as np
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
from helpers.figures import use_style
use_style()
from matplotlib.figure import Figure
def shown(draw):
    figure = Figure(figsize=(3, 2))
    draw(figure.subplots())
    data, _ = shell.display_formatter.format(figure)
    (kind,) = data.keys() - {"text/plain"}
    return kind, data[kind]
"""


def run_in_ipython(monkeypatch, code, draft=""):
    """In a process of its own, since an IPython shell stays for good."""
    monkeypatch.setenv("DRAFT_FIGURES", draft)
    run = [sys.executable, "-c", SHOW + code]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("draw", "kind"),
    [
        ("lambda ax: ax.plot([1, 3, 2])", "image/svg+xml"),
        ("lambda ax: ax.imshow(np.eye(3))", "image/png"),
        ("lambda ax: ax.pcolormesh(np.eye(3))", "image/png"),
        ("lambda ax: ax.scatter(*np.random.rand(2, 5000))", "image/png"),
        ("lambda ax: ax.scatter(*np.random.rand(2, 5000), rasterized=True)", "image/svg+xml"),
    ],
)
def test_lines_and_points_are_shown_as_svg(monkeypatch, draw, kind):
    assert run_in_ipython(monkeypatch, f"print(shown({draw})[0])") == f"{kind}\n"


def test_an_svg_is_the_same_in_every_run(monkeypatch):
    code = """print(shown(lambda ax: ax.plot([1, 3, 2], marker="o", clip_on=True))[1])"""
    one, two = (run_in_ipython(monkeypatch, code) for _ in range(2))
    assert one == two and "<svg" in one and "dc:date" not in one


def test_words_are_darker_than_lines(monkeypatch):
    """Vermillion letters on white had a contrast of 3.9."""
    code = (
        """print(shown(lambda ax: ax.plot([1, 2], "C1") and ax.text(1, 1, "x", color="C1"))[1])"""
    )
    drawing = run_in_ipython(monkeypatch, code).lower()
    assert "stroke: #d55e00" in drawing and 'style="fill: #bf5400"' in drawing
    assert "fill: #d55e00" not in drawing


def test_drafts_are_drawn_as_they_come(monkeypatch):
    code = """
from matplotlib_inline.config import InlineBackend
print(mpl.rcParams["figure.constrained_layout.use"], InlineBackend.instance().figure_formats)
print(list(shell.display_formatter.format(Figure())[0]))
"""
    printed = run_in_ipython(monkeypatch, code, draft="1")
    assert printed == "False {'png'}\n['text/plain']\n"
