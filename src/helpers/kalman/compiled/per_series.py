"""Series with models of their own, compiled: one pass after the other, for threads to share."""

import numpy as np
from numba import types

from helpers.kalman.compiled.door import GRADIENT, VALUE, asked_for, kept_on_disk, linked_pass
from helpers.kalman.compiled.forward import DONE
from helpers.kalman.compiled.inputs import Arrays, Wanted, for_each, until
from helpers.kalman.compiled.tiles import jitable
from helpers.kalman.on_disk import njit

# Arrays (series, time, ...), contiguous: compiled for these alone, when this module is imported.
_VECTORS, _MATRICES = types.float64[:, :, ::1], types.float64[:, :, :, ::1]
_MODEL = types.NamedTuple(
    (types.float64[:, ::1], _VECTORS, _VECTORS, _VECTORS, *[_MATRICES] * 4), Arrays
)
_NUMBERS, _COUNTS = types.float64[::1], types.int64[::1]
PASSES = types.void(
    types.int64, types.int64, _COUNTS, _VECTORS, _MODEL, types.boolean, types.float64, _NUMBERS,
    _COUNTS, _VECTORS, _MODEL,
)  # fmt: skip


@jitable
def member(A, j):
    """That of series j, or of all."""
    return A[j if len(A) > 1 else 0]


# The arrays of series j, of n steps.
of_series = for_each(
    Arrays, "arrays, j, n", "until(member(arrays.{x}, j), n)", "member(arrays.{x}, j)",
    until=until, member=member,
)  # fmt: skip


@kept_on_disk(njit(PASSES, error_model="numpy", nogil=True))
def passes(first, stop, ends, y, model, backwards, tol, l, failed, y_bar, out):
    """Series first to stop - 1, each of ends[j] steps: fills l (J,), y_bar (J, n, p) and out.

    All arrays are contiguous and have a first axis for the series, of length 1 in `model` where
    they share it; those of the model and of `out`, in `Arrays`, have a second one of length 1 or n
    for time (not a0 and P0). failed (J,) receives the step whose F is not positive definite; l is
    NaN then.
    """
    every, report = np.arange(model.a0.shape[1]), np.empty(3, np.int64)
    wanted = Wanted(backwards, backwards, backwards, backwards, every)
    asked = asked_for(GRADIENT if backwards else VALUE, wanted, True)
    ones, terms = np.ones(y.shape[1]), np.empty(y.shape[1])
    for j in range(first, stop):
        n = ends[j]
        status = linked_pass(
            (y[j, :n], of_series(model, j, n), of_series(out, j, n), terms[:n], ones[:n],
             y_bar[j, :n], asked, tol, report)
        )  # fmt: skip
        l[j] = terms[:n].sum() if status == DONE else np.nan
        if status != DONE:
            failed[j] = report[0]
