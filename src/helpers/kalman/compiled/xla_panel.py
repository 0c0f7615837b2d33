"""The pass for many series of one model, as XLA calls it.

It is what :mod:`helpers.kalman.compiled.xla` is for the pass of one. The arguments are y, a0, P0,
c, T, Z, H, W and l_bar, as ``helpers.kalman.compiled.panel`` takes them, and tol (1,); the results
l (J, n) and the gradients of the first eight arguments. The gradients for weights of one may stand
behind the arguments: then weights that are all the same multiply them, and nothing else is done.
"""

from collections import namedtuple

import numpy as np

from helpers.kalman.compiled.door import doubles
from helpers.kalman.compiled.one_pass import all_equal
from helpers.kalman.compiled.panel import linked_loglike_and_grad
from helpers.kalman.compiled.xla import (
    ARGUMENTS,
    KNOWN,
    RESULTS,
    TOL,
    count_of,
    handlers,
    matrices,
    together,
    vectors,
    write,
)

Panel = namedtuple("Panel", "y a0 P0 c T Z H W")
arrays, one_of, panel_of, write_all = together(Panel, 3, 2, 2, 3, 3, 3, 3, 3)


def panel(frame, dtype):
    """A gradient that is not wanted has axes of length 0; where none is, there is no way back."""
    count = count_of(frame)
    given = arrays(frame, ARGUMENTS, 0, count, dtype)
    l_bar = matrices(frame, ARGUMENTS, 8, count, dtype)
    tol = vectors(frame, ARGUMENTS, TOL, count, dtype)
    l_out = matrices(frame, RESULTS, 0, count, dtype)
    out = arrays(frame, RESULTS, 1, count, dtype)
    want_T, want_Z, want_W = out.T.size > 0, out.Z.size > 0, out.W.size > 0
    want = want_T or want_Z or want_W or out.P0.size > 0 or out.H.size > 0
    back = want or out.y.size > 0 or out.a0.size > 0 or out.c.size > 0
    are_known = frame[ARGUMENTS] > KNOWN - 1
    known = arrays(frame, ARGUMENTS, KNOWN - 1 if are_known else 0, count, dtype)
    for k in range(count):
        if are_known and all_equal(l_bar[k].reshape(l_bar[k].size)):
            write_all(one_of(out, k), one_of(known, k), l_bar[k, 0, 0])
            continue
        l, y_bar, a0_bar, c_bar, bars, _ = linked_loglike_and_grad(
            (*panel_of(given, k), doubles(l_bar[k]), back, want, want_T, want_Z, want_W,
             np.float64(tol[k, 0]))
        )  # fmt: skip
        write(l_out[k], l, 1.0)
        found = Panel(y_bar, a0_bar, bars.P0, c_bar, bars.T, bars.Z, bars.H, bars.W)
        write_all(one_of(out, k), found, 1.0)


HANDLERS = handlers(panel)
