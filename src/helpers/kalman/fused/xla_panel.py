"""The pass for many series of one model, as XLA calls it.

It is what :mod:`helpers.kalman.fused.xla` is for the pass of one. The arguments are y, a0, P0, c,
T, Z, H, W and l_bar, as ``helpers.kalman.fused.panel`` takes them, and tol (1,); the results l
(J, n) and the gradients of the first eight arguments. The gradients for weights of one may stand
behind the arguments: then weights that are all the same multiply them, and nothing else is done.
"""

import numpy as np

from helpers.kalman.fused.entry import doubles
from helpers.kalman.fused.one_pass import all_equal
from helpers.kalman.fused.panel import linked_loglike_and_grad
from helpers.kalman.fused.tiles import jitable
from helpers.kalman.fused.xla import (
    ARGUMENTS,
    KNOWN,
    RESULTS,
    TOL,
    count_of,
    handlers,
    matrices,
    stacks,
    vectors,
    write,
)


@jitable
def arrays(frame, where, k, count, dtype):
    """Eight arguments or results from the k-th on: the panel's arrays, or their gradients."""
    return (
        stacks(frame, where, k, count, dtype), matrices(frame, where, k + 1, count, dtype),
        matrices(frame, where, k + 2, count, dtype), stacks(frame, where, k + 3, count, dtype),
        stacks(frame, where, k + 4, count, dtype), stacks(frame, where, k + 5, count, dtype),
        stacks(frame, where, k + 6, count, dtype), stacks(frame, where, k + 7, count, dtype),
    )  # fmt: skip


@jitable
def write_each(results, k, found, factor):
    """`write` for each of eight results."""
    write(results[0][k], found[0], factor)
    write(results[1][k], found[1], factor)
    write(results[2][k], found[2], factor)
    write(results[3][k], found[3], factor)
    write(results[4][k], found[4], factor)
    write(results[5][k], found[5], factor)
    write(results[6][k], found[6], factor)
    write(results[7][k], found[7], factor)


def panel(frame, dtype):
    """A gradient that is not wanted has axes of length 0; where none is, there is no way back."""
    count = count_of(frame)
    y, a0, P0, c, T, Z, H, W = arrays(frame, ARGUMENTS, 0, count, dtype)
    l_bar = matrices(frame, ARGUMENTS, 8, count, dtype)
    tol = vectors(frame, ARGUMENTS, TOL, count, dtype)
    l_out = matrices(frame, RESULTS, 0, count, dtype)
    out = arrays(frame, RESULTS, 1, count, dtype)
    want_T, want_Z, want_W = out[4].size > 0, out[5].size > 0, out[7].size > 0
    want = want_T or want_Z or want_W or out[2].size > 0 or out[6].size > 0
    back = want or out[0].size > 0 or out[1].size > 0 or out[3].size > 0
    are_known = frame[ARGUMENTS] > KNOWN - 1
    known = arrays(frame, ARGUMENTS, KNOWN - 1 if are_known else 0, count, dtype)
    for k in range(count):
        if are_known and all_equal(l_bar[k].reshape(l_bar[k].size)):
            weight = l_bar[k, 0, 0]
            of_one = (known[0][k], known[1][k], known[2][k], known[3][k], known[4][k], known[5][k],
                      known[6][k], known[7][k])  # fmt: skip
            write_each(out, k, of_one, weight)
            continue
        l, y_bar, a0_bar, c_bar, bars, _ = linked_loglike_and_grad(
            (doubles(y[k]), doubles(a0[k]), doubles(P0[k]), doubles(c[k]), doubles(T[k]),
             doubles(Z[k]), doubles(H[k]), doubles(W[k]), doubles(l_bar[k]), back, want, want_T,
             want_Z, want_W, np.float64(tol[k, 0]))
        )  # fmt: skip
        write(l_out[k], l, 1.0)
        found = y_bar, a0_bar, bars.P0, c_bar, bars.T, bars.Z, bars.H, bars.W
        write_each(out, k, found, 1.0)


HANDLERS = handlers(panel)
