"""Series with models of their own, compiled: a pass for each, in as many threads as are wanted."""

import numpy as np
from numba import njit

from helpers.kalman.fused.entry import call, kept_on_disk
from helpers.kalman.fused.forward import DONE
from helpers.kalman.fused.inputs import Arrays, Wanted
from helpers.kalman.fused.tiles import jitable


@jitable
def until(A, n):
    """A (1 or more, ...) up to step n."""
    return A[:n] if len(A) > 1 else A


@jitable
def of_series(arrays, j, n):
    """The arrays of series j, of n steps."""
    return Arrays(
        arrays.a0[j], arrays.P0[j], until(arrays.c[j], n), until(arrays.d[j], n),
        until(arrays.T[j], n), until(arrays.Z[j], n), until(arrays.H[j], n),
        until(arrays.W[j], n),
    )  # fmt: skip


@kept_on_disk(njit(cache=True, error_model="numpy", nogil=True))
def passes(first, stop, ends, y, model, backwards, tol, l, y_bar, out):
    """Series first to stop - 1, each of ends[j] steps: their l (J, n), and added to y_bar and out.

    All arrays are contiguous and have a first axis for the series; those of the model and of `out`,
    in `Arrays`, have a second one of length 1 or n for time (not a0 and P0). Returns the first
    series with an F that is not positive definite and the step where, or -1 and 0.
    """
    wanted, report = Wanted(backwards, backwards, backwards, backwards), np.empty(3, np.int64)
    ones = np.ones(y.shape[1])
    for j in range(first, stop):
        n = ends[j]
        how = call(
            y[j, :n], of_series(model, j, n), of_series(out, j, n), l[j, :n], ones[:n],
            y_bar[j, :n], backwards, wanted, tol, report,
        )  # fmt: skip
        if how != DONE:
            return j, report[0]
    return -1, 0
