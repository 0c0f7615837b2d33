"""The pass with unknown numbers integrated out, as XLA calls it.

It is what :mod:`helpers.kalman.fused.xla` is for the pass without. The arguments are y, starts, c,
P0, T, Z, H, W and precision, as :mod:`helpers.kalman.fused.integrated` takes them, and tol (1,);
the results the value (1,), the mean and the covariance of delta, and the gradients of the first
eight arguments.
"""

import numpy as np

from helpers.kalman.fused.entry import doubles
from helpers.kalman.fused.integrated import linked_integrated
from helpers.kalman.fused.xla import (
    ARGUMENTS,
    RESULTS,
    TOL,
    count_of,
    handlers,
    matrices,
    stacks,
    vectors,
    write,
)


def integrated(frame, dtype):
    """A gradient that is not wanted has axes of length 0; where none is, there is no way back."""
    count = count_of(frame)
    y = stacks(frame, ARGUMENTS, 0, count, dtype)
    starts = matrices(frame, ARGUMENTS, 1, count, dtype)
    c, P0 = stacks(frame, ARGUMENTS, 2, count, dtype), matrices(frame, ARGUMENTS, 3, count, dtype)
    T, Z = stacks(frame, ARGUMENTS, 4, count, dtype), stacks(frame, ARGUMENTS, 5, count, dtype)
    H, W = stacks(frame, ARGUMENTS, 6, count, dtype), stacks(frame, ARGUMENTS, 7, count, dtype)
    precision = matrices(frame, ARGUMENTS, 8, count, dtype)
    tol = vectors(frame, ARGUMENTS, TOL, count, dtype)
    value_out = vectors(frame, RESULTS, 0, count, dtype)
    mean_out = vectors(frame, RESULTS, 1, count, dtype)
    covariance_out = matrices(frame, RESULTS, 2, count, dtype)
    y_out = stacks(frame, RESULTS, 3, count, dtype)
    starts_out = matrices(frame, RESULTS, 4, count, dtype)
    c_out = stacks(frame, RESULTS, 5, count, dtype)
    P0_out = matrices(frame, RESULTS, 6, count, dtype)
    T_out, Z_out = stacks(frame, RESULTS, 7, count, dtype), stacks(frame, RESULTS, 8, count, dtype)
    H_out, W_out = stacks(frame, RESULTS, 9, count, dtype), stacks(frame, RESULTS, 10, count, dtype)
    want_T, want_Z, want_W = T_out.size > 0, Z_out.size > 0, W_out.size > 0
    want = want_T or want_Z or want_W or P0_out.size > 0 or H_out.size > 0
    back = want or y_out.size > 0 or starts_out.size > 0 or c_out.size > 0
    for k in range(count):
        _, number, mean, root, _, y_bar, starts_bar, c_bar, out, _ = linked_integrated(
            (doubles(y[k]), doubles(starts[k]), doubles(c[k]), doubles(P0[k]), doubles(T[k]),
             doubles(Z[k]), doubles(H[k]), doubles(W[k]), doubles(precision[k]), back, want, want_T,
             want_Z, want_W, np.float64(tol[k, 0]))
        )  # fmt: skip
        value_out[k, 0] = number
        write(mean_out[k], mean, 1.0)
        write(covariance_out[k], root @ root.T, 1.0)
        write(y_out[k], y_bar, 1.0)
        write(starts_out[k], starts_bar, 1.0)
        write(c_out[k], c_bar, 1.0)
        write(P0_out[k], out.P0, 1.0)
        write(T_out[k], out.T, 1.0)
        write(Z_out[k], out.Z, 1.0)
        write(H_out[k], out.H, 1.0)
        write(W_out[k], out.W, 1.0)


HANDLERS = handlers(integrated)
