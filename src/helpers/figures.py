"""The house style of every figure: legible on a phone and in print, with or without colour."""

import io
import os
import sys
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, NullFormatter

__all__ = ["COLORS", "STYLES", "band", "bars", "error_axes", "use_style"]

COLORS = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "purple": "#CC79A7",
}
"""Okabe and Ito's colour-blind-safe palette; yellow is for areas only, too pale for a line."""

VERMILLION_WORDS = "#BF5400"
"""Vermillion for letters, which need a contrast of 4.5 on white; as it is for lines, it has 3.9."""

STYLES = tuple(
    {"color": COLORS[name], "linestyle": line, "marker": marker}
    for name, line, marker in [
        ("blue", "-", "o"),
        ("vermillion", "--", "s"),
        ("green", "-.", "^"),
        ("black", ":", "D"),
        ("orange", (0, (5, 1, 1, 1, 1, 1)), "v"),
        ("purple", (0, (8, 3)), "P"),
        ("sky", (0, (3, 1, 1, 1)), "X"),
    ]
)
"""Keywords for ``ax.plot`` that differ in colour, dashes and marker alike."""

LARGEST_SVG = 400_000
"""Bytes; a drawing that takes more of them is shown as PNG."""


def use_style() -> None:
    """Set matplotlib to the book's style, and how a notebook shows its figures.

    Lines and points are shown as SVG, the same in every run. Images, heat maps and what would be a
    large SVG are shown as PNG: draw thousands of points or lines with ``rasterized=True``. The
    background is white and opaque whatever the theme of the page. A plain ``ax.plot`` takes the
    colours and dashes of `STYLES` in turn; ``**STYLES[0]`` adds the marker.

    If the environment variable ``DRAFT_FIGURES`` is set, a figure is drawn once, as PNG, and not
    three times to fit its text in, for runs whose figures are not looked at.
    """
    draft = bool(os.environ.get("DRAFT_FIGURES"))
    mpl.rcParams.update(
        {
            "figure.figsize": (6.4, 4.0),
            "figure.dpi": 150,
            "figure.facecolor": "white",
            "figure.constrained_layout.use": not draft,
            "savefig.facecolor": "white",
            "savefig.transparent": False,
            "savefig.format": "png",
            "svg.hashsalt": "gradients",  # without it, the names inside an SVG are random
            "font.size": 13,
            "axes.titlesize": "medium",
            "legend.frameon": False,
            "axes.facecolor": "white",
            "axes.grid": False,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.linewidth": 1.2,
            "lines.linewidth": 2.4,
            "lines.markersize": 7,
            "axes.prop_cycle": cycler(color=[style["color"] for style in STYLES])
            + cycler(linestyle=[style["linestyle"] for style in STYLES]),
        }
    )
    if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()) is not None:
        from matplotlib_inline.config import InlineBackend

        inline = InlineBackend.instance(parent=shell)
        inline.figure_formats = {"png"} if draft else set()
        margins = None if draft else "tight"
        inline.print_figure_kwargs = {"bbox_inches": margins, "facecolor": "white"}
        bundles = shell.display_formatter.mimebundle_formatter
        if draft:
            bundles.pop(Figure, None)
        else:
            bundles.for_type(Figure, _shown)


def _shown(figure: Figure, **_) -> dict[str, str | bytes]:
    """How a notebook shows a figure: a MIME type and the drawing."""
    for words in figure.findobj(Text):
        if to_hex(words.get_color()).upper() == COLORS["vermillion"]:
            words.set_color(VERMILLION_WORDS)
    heat = any(ax.images or ax.findobj(QuadMesh) for ax in figure.axes)
    for kind, metadata in (("svg", {"Date": None, "Creator": None}), ("png", None)):
        file = io.BytesIO()
        if kind == "svg" and heat:
            continue
        figure.savefig(file, format=kind, bbox_inches="tight", metadata=metadata)
        if kind == "svg" and len(file.getvalue()) <= LARGEST_SVG:
            return {"image/svg+xml": file.getvalue().decode()}
    return {"image/png": file.getvalue()}


def error_axes(ax: Axes, xlabel: str, ylabel: str) -> None:
    """Make `ax` a log-log plot of errors: ticks at decades, and a line at the machine epsilon.

    The line's name stands to the right of the axes, where no data are.
    Labels are thinned to the room there is; small ticks keep one a decade. An error of exactly
    zero has no place on a logarithmic axis and is not drawn.
    """
    eps = np.finfo(float).eps
    ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    for axis, most in ((ax.xaxis, 7), (ax.yaxis, 8)):
        axis.set_major_locator(LogLocator(base=10, numticks=most))
        axis.set_minor_locator(LogLocator(base=10, numticks=400))
        axis.set_minor_formatter(NullFormatter())
    ax.axhline(eps, color="0.45", linestyle="-", linewidth=1.2, zorder=0)
    beside = {"transform": ax.get_yaxis_transform(), "ha": "left", "va": "center"}
    ax.text(1.01, eps, "machine\nepsilon", color="0.35", fontsize=11, linespacing=1, **beside)


def band(ax: Axes, x, mean, sd, color: str = COLORS["blue"], label: str | None = None) -> None:
    r"""Draw a mean as a line, and mean :math:`\pm 2` standard deviations as a band around it.

    All three are arrays (n,), where a NaN leaves a gap; ValueError if their shapes differ. `label`
    names the line; what the band is belongs in the caption.
    """
    x, mean, sd = np.asarray(x), np.asarray(mean, float), np.asarray(sd, float)
    for name, array in (("mean", mean), ("sd", sd)):
        if array.shape != (x.size,):
            raise ValueError(f"{name} has shape {array.shape}, expected (n,) = ({x.size},)")
    ax.fill_between(x, mean - 2 * sd, mean + 2 * sd, color=color, alpha=0.25, linewidth=0)
    ax.plot(x, mean, color=color, linestyle="-", label=label)


def bars(ax: Axes, names: Sequence[str], ratios: Sequence[tuple[float, float, float]]) -> None:
    """Draw horizontal bars of ratios, the first on top, with whiskers and a line at 1.

    Each ratio is (median, low, high), as `helpers.timing.Timings.ratio` gives it: the bar reaches
    to the median, the whiskers span low to high. ValueError if there are not as many names as
    ratios, or if low <= median <= high does not hold.
    """
    values = np.asarray(ratios, float)
    if values.shape != (len(names), 3):
        raise ValueError(
            f"ratios has shape {values.shape}, expected (names, 3) = ({len(names)}, 3): "
            "median, low, high of each"
        )
    median, low, high = values.T
    if not (np.all(low <= median) and np.all(median <= high)):
        raise ValueError("expected low <= median <= high in every ratio (median, low, high)")
    y = np.arange(len(names))
    whiskers = {"ecolor": COLORS["black"], "capsize": 5, "elinewidth": 1.6}
    ax.barh(y, median, xerr=(median - low, high - median), color=COLORS["sky"], error_kw=whiskers)
    beside = {"xytext": (7, 0), "textcoords": "offset points", "va": "center", "zorder": 4}
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}  # above the line at 1
    for row in y:
        ax.annotate(f"{median[row]:.3g}", (high[row], row), bbox=paper, **beside)
    ax.set_yticks(y, names)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.axvline(1.0, color=COLORS["vermillion"], linestyle="--", linewidth=1.6, zorder=3)
