"""The pass with unknown numbers integrated out, as XLA calls it.

It is what :mod:`helpers.kalman.compiled.xla` is for the pass without. The arguments are y, starts,
c, P0, T, Z, H, W and precision, as :mod:`helpers.kalman.compiled.integrated` takes them, and tol
(1,); the results the value (1,), the mean and the covariance of delta, and the gradients of the
first eight arguments.
"""

from collections import namedtuple

import numpy as np

from helpers.kalman.compiled.door import doubles
from helpers.kalman.compiled.integrated import linked_integrated
from helpers.kalman.compiled.xla import (
    ARGUMENTS,
    RESULTS,
    TOL,
    count_of,
    handlers,
    matrices,
    together,
    vectors,
    write,
)

Integrated = namedtuple("Integrated", "y starts c P0 T Z H W")
arrays, one_of, arrays_of, write_all = together(Integrated, 3, 2, 3, 2, 3, 3, 3, 3)


def integrated(frame, dtype):
    """A gradient that is not wanted has axes of length 0; where none is, there is no way back."""
    count = count_of(frame)
    given = arrays(frame, ARGUMENTS, 0, count, dtype)
    precision = matrices(frame, ARGUMENTS, 8, count, dtype)
    tol = vectors(frame, ARGUMENTS, TOL, count, dtype)
    value_out = vectors(frame, RESULTS, 0, count, dtype)
    mean_out = vectors(frame, RESULTS, 1, count, dtype)
    covariance_out = matrices(frame, RESULTS, 2, count, dtype)
    out = arrays(frame, RESULTS, 3, count, dtype)
    want_T, want_Z, want_W = out.T.size > 0, out.Z.size > 0, out.W.size > 0
    want = want_T or want_Z or want_W or out.P0.size > 0 or out.H.size > 0
    back = want or out.y.size > 0 or out.starts.size > 0 or out.c.size > 0
    for k in range(count):
        _, number, mean, root, _, y_bar, starts_bar, c_bar, bars, _ = linked_integrated(
            (*arrays_of(given, k), doubles(precision[k]), back, want, want_T, want_Z, want_W,
             np.float64(tol[k, 0]))
        )  # fmt: skip
        value_out[k, 0] = number
        write(mean_out[k], mean, 1.0)
        write(covariance_out[k], root @ root.T, 1.0)
        found = Integrated(y_bar, starts_bar, c_bar, bars.P0, bars.T, bars.Z, bars.H, bars.W)
        write_all(one_of(out, k), found, 1.0)


HANDLERS = handlers(integrated)
