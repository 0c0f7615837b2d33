"""Hessian-vector products, as XLA calls them.

It is what :mod:`helpers.kalman.compiled.xla` is for the pass itself. The arguments are y, the
model, tol (1,), l_bar and the directions, as :mod:`helpers.kalman.compiled.tangents` takes them;
the results the slopes (k, n) and the tangents of the gradients.
"""

import numpy as np

from helpers.kalman.compiled.directions import Directions
from helpers.kalman.compiled.door import doubles
from helpers.kalman.compiled.tangents import linked_hessian_vector
from helpers.kalman.compiled.xla import (
    ARGUMENTS,
    RESULTS,
    TOL,
    WEIGHTS,
    count_of,
    handlers,
    matrices,
    model_of,
    models,
    one_of,
    together,
    vectors,
    write,
    write_all,
)

directions, *_ = together(Directions, *[4] * 9)


def tangents(frame, dtype):
    """A tangent that is not wanted has axes of length 0; where none is, there is no way back."""
    count = count_of(frame)
    y = matrices(frame, ARGUMENTS, 0, count, dtype)
    given = models(frame, ARGUMENTS, 1, count, dtype)
    tol = vectors(frame, ARGUMENTS, TOL, count, dtype)
    l_bar = vectors(frame, ARGUMENTS, WEIGHTS, count, dtype)
    dots = directions(frame, ARGUMENTS, WEIGHTS + 1, count, dtype)
    slopes_out = matrices(frame, RESULTS, 0, count, dtype)
    out = directions(frame, RESULTS, 1, count, dtype)
    back = False
    for X in out:
        back = back or X.size > 0
    for k in range(count):
        _, slopes, bars = linked_hessian_vector(
            (doubles(y[k]), *model_of(given, k), doubles(l_bar[k]), doubles(dots.y[k]),
             *model_of(dots, k), out.T.size > 0, out.Z.size > 0, True, back, np.float64(tol[k, 0]))
        )  # fmt: skip
        write(slopes_out[k], slopes, 1.0)
        write(out.y[k], bars.y, 1.0)
        write_all(one_of(out, k), bars, 1.0)


HANDLERS = handlers(tangents)
