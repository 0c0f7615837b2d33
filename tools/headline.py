"""Draw the figure of the landing page and the README, and the card that a shared link shows:
`python -m tools.headline`.
"""

import matplotlib.pyplot as plt
import numpy as np

from helpers.datasets import local_level_arrays, nile
from helpers.figures import COLORS, band, use_style
from helpers.kalman import StateSpace
from helpers.kalman.reference import FilterOutputs, kalman_filter, reverse
from tools import book

PICTURE = "book/_static/headline.png"
CARD = "book/_static/card.png"


def adjoints(model, filtered):
    """Derivative of the log-likelihood for the predicted mean of each step, by backpropagation.

    Shifting the intercept c of step t - 1 shifts the prediction for step t and nothing else, so
    the per-step gradient of c is that derivative, one step late.
    """
    n = len(filtered.u)
    arrays = model.asdict() | {"c": np.zeros((n, model.m))}
    _, gradients = reverse(StateSpace(**arrays), filtered, FilterOutputs(l=np.ones(n)))
    return np.concatenate([gradients.a0[np.newaxis], gradients.c[:-1]])


def smoothing_cumulants(model, filtered):
    """r_{t-1} of the smoother, backwards from r_n = 0: the two recursions share no line."""
    r, cumulants = np.zeros(model.m), []
    for t in reversed(range(len(filtered.u))):
        L = model.T - model.T @ filtered.Kf[t] @ filtered.Z[t]
        r = filtered.Z[t].T @ filtered.u[t] + L.T @ r
        cumulants.append(r)
    return np.array(cumulants[::-1])


def draw():
    """The figure, 1600 x 640 pixels."""
    use_style()
    series, model = nile(), StateSpace(**local_level_arrays())
    filtered = kalman_filter(series.y, model)
    a_bar, r = adjoints(model, filtered), smoothing_cumulants(model, filtered)
    out = filtered.out
    smoothed = out.a_pred[:, 0] + out.P_pred[:, 0, 0] * r[:, 0]
    years = series.index.astype("datetime64[Y]").astype(int) + 1970

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4))
    _ = left.plot(years, series.y[:, 0], "o", color=COLORS["black"], markersize=3.5, label="flow")
    deviation = np.sqrt(out.P_filt[:, 0, 0])
    band(left, years, out.a_filt[:, 0], deviation, label="filtered, ± 2 sd")
    _ = left.plot(years, smoothed, color=COLORS["vermillion"], label="smoothed")
    _ = left.set(xlabel="year", ylabel="Nile at Aswan, $10^8$ m³ a year", ylim=(400, 1500))
    _ = left.set_title("The filter, and what comes back", loc="left")
    _ = left.legend(ncols=3, fontsize=11, loc="upper right")

    _ = right.plot(years, 1e3 * r[:, 0], color=COLORS["vermillion"], label="smoother's recursion")
    _ = right.plot(
        years, 1e3 * a_bar[:, 0], "o", color=COLORS["blue"], markersize=4, label="backpropagation"
    )
    _ = right.axhline(0, color=COLORS["black"], linewidth=0.8)
    _ = right.set(xlabel="year", ylabel=r"$\partial\mathcal{L} / \partial a_t$, times $10^3$")
    _ = right.set_title("The gradient is the smoother", loc="left")
    _ = right.legend(fontsize=11, loc="upper right")
    return figure


def draw_card():
    """1200 x 630 pixels, read at a third of that: the name, the motto and one line."""
    use_style()
    series, model = nile(), StateSpace(**local_level_arrays())
    filtered = kalman_filter(series.y, model)
    out, r = filtered.out, smoothing_cumulants(model, filtered)
    figure = plt.figure(figsize=(12, 6.3), layout="none")
    axes = figure.add_axes((0.05, 0.08, 0.9, 0.5))
    years = range(1871, 1971)
    _ = axes.plot(years, series.y[:, 0], "o", color=COLORS["black"], markersize=6)
    smoothed = out.a_pred[:, 0] + out.P_pred[:, 0, 0] * r[:, 0]
    _ = axes.plot(years, out.a_filt[:, 0], color=COLORS["blue"], linewidth=4)
    _ = axes.plot(years, smoothed, color=COLORS["vermillion"], linewidth=4)
    axes.set_axis_off()
    motto = "Derive the gradient, write it in NumPy\nand PyTensor, check it, measure it."
    _ = figure.text(0.05, 0.82, "Gradients by Hand", fontsize=54, fontweight="bold")
    _ = figure.text(0.05, 0.64, motto, fontsize=28, linespacing=1.4)
    return figure


if __name__ == "__main__":
    draw().savefig(book.ROOT / PICTURE, dpi=145)
    draw_card().savefig(book.ROOT / CARD, dpi=100, bbox_inches=None)
