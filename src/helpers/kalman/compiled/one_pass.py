"""A pass over the series: forwards, and backwards where a gradient is wanted."""

import numpy as np

from helpers.kalman.compiled.backward import accumulate_vectors, backward
from helpers.kalman.compiled.forward import DONE, forward
from helpers.kalman.compiled.layout import HEADER, space
from helpers.kalman.compiled.tiles import jitable, put


@jitable
def equal_from(x):
    """From which entry on all are the same."""
    first = x.size
    while first > 0 and x[first - 1] == x[-1]:
        first -= 1
    return first


@jitable
def all_equal(x):
    """Whether all entries are the same."""
    return equal_from(x) == 0


@jitable
def clean(w):
    """Zeros wherever a pass reads before it writes: all but the rows of the steps to come."""
    s = space(w)
    for k in range(HEADER, s.a.at + s.a.ld):
        put(w, k, 0.0)


@jitable
def one_pass(
    w, y, model, saved, back, varying, pattern, wanted, l_bar, tol, observed, watch, steps, y_bar,
    out,
):  # fmt: skip
    """Filter and, if `back`, add the gradient to `out` and write y_bar.

    The memory w is laid out for these sizes and ``saved``; the way back needs the gains.

    Returns how it ended and at which step.
    """
    clean(w)
    first = equal_from(l_bar) if back else np.int64(0)
    status, t = forward(
        w, y, observed, model, varying, pattern, saved, wanted.columns, watch, tol, first, steps
    )
    if status == DONE and back:
        backward(
            w, observed, model, varying, pattern.T_t, wanted, l_bar, first, steps.steady_from, out
        )
        accumulate_vectors(w, first, l_bar[-1], out.c, out.d, y_bar)
    return status, t
