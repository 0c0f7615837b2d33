"""A pass over the series: forwards, and backwards where a gradient is wanted."""

from helpers.kalman.compiled.backward import accumulate_vectors, backward
from helpers.kalman.compiled.forward import DONE, forward
from helpers.kalman.compiled.layout import HEADER, space
from helpers.kalman.compiled.tiles import jitable, put


@jitable
def all_equal(x):
    """Whether all entries are the same."""
    for t in range(x.size):
        if x[t] != x[0]:
            return False
    return True


@jitable
def clean(w):
    """Zeros wherever a pass reads before it writes: all but the rows of the steps to come."""
    s = space(w)
    for k in range(HEADER, s.a.at + s.a.ld):
        put(w, k, 0.0)


@jitable
def one_pass(
    w, y, model, saved, back, varying, pattern, wanted, l_bar, equal, tol, observed, watch, steps,
    y_bar, out,
):  # fmt: skip
    """Filter and, if `back`, add the gradient to `out` and write y_bar.

    The memory w is laid out for these sizes and ``saved``; the way back needs the gains.

    Returns how it ended and at which step.
    """
    clean(w)
    status, t = forward(
        w, y, observed, model, varying, pattern, saved, wanted.columns, watch, tol, steps
    )
    if status == DONE and back:
        backward(
            w, observed, model, varying, pattern.T_t, wanted, l_bar, equal, steps.steady_from, out
        )
        accumulate_vectors(w, l_bar[0] if equal else 1.0, out.c, out.d, y_bar)
    return status, t
