"""The lines that the compiled pass runs at each step, for m states and p series.

``python -m helpers.kalman.compiled.show 13 1`` prints them. Up to four states and series
they are the readable text; for more they are written from it, and each stands beside the line of
the text that it does, with the label of its equation.
"""

import argparse
import inspect
import math

from helpers.kalman import recursions
from helpers.kalman.compiled import SMALL_SIZES
from helpers.kalman.compiled.step import SOURCES

FORWARDS = "mask", "gains", "update_covariance", "filtered", "joseph", "update", "predict"
BACKWARDS = "smooth_mean", "smooth_predicted", "smooth_weighted", "smooth_observed"


def lines(m: int, p: int) -> str:
    """The source of a step for m states and p series.

    Raises
    ------
    ValueError
        If m or p is not positive.
    """
    if m < 1 or p < 1:
        raise ValueError(f"{m} states and {p} series, expected at least one of each")
    if max(m, p) <= math.isqrt(SMALL_SIZES):
        texts = (getattr(recursions, name) for name in FORWARDS + BACKWARDS)
        return "\n\n".join(inspect.getsource(text) for text in texts)
    note = ""
    if p > max(m + 1, math.isqrt(SMALL_SIZES)):
        note = f"# Each step's {p} series are rotated into {m} first, where that saves time.\n\n"
    one = {"update": "update_one", "step_back": "step_back_one"}
    names = [one.get(x, x) if p == 1 else x for x in ("update", "predict", "step_back")]
    if p == 1:
        names.insert(2, "predict_changed")  # where T has few entries
    return note + "\n\n".join(SOURCES[name] for name in names)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("m", type=int, help="states")
    parser.add_argument("p", type=int, help="series")
    sizes = parser.parse_args()
    try:
        print(lines(sizes.m, sizes.p))
    except ValueError as error:
        parser.error(str(error))
