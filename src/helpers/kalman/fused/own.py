"""Series with models of their own, compiled: LANES of them at once, in as many threads as wanted.

The text is that of :mod:`~helpers.kalman.fused.lane_pass`. A series that needs a start in roots, or
whose numbers are not finite, takes the pass for one series afterwards (:func:`passes`), which also
says what is wrong with it.
"""

import numpy as np
from numba import types

from helpers.kalman.fused.entry import call, kept_on_disk
from helpers.kalman.fused.forward import DONE
from helpers.kalman.fused.inputs import Arrays, Wanted, until
from helpers.kalman.fused.lane_pass import all_in_lanes, lay_out
from helpers.kalman.fused.lanes import Many
from helpers.kalman.fused.tiles import LANES, jitable
from helpers.kalman.on_disk import njit
from helpers.kalman.square_root import fill_shares

# Arrays (series, time, ...), contiguous: compiled for these alone, when this module is imported.
_VECTORS, _MATRICES = types.float64[:, :, ::1], types.float64[:, :, :, ::1]
_MODEL = types.NamedTuple(
    (types.float64[:, ::1], _VECTORS, _VECTORS, _VECTORS, *[_MATRICES] * 4), Arrays
)
_NUMBERS, _COUNTS = types.float64[::1], types.int64[::1]
IN_LANES = types.void(
    types.int64, types.int64, _NUMBERS, _COUNTS, _VECTORS, _MODEL, types.boolean, types.float64,
    _NUMBERS, _NUMBERS, _VECTORS, _MODEL,
)  # fmt: skip
PASSES = types.void(
    _COUNTS, _COUNTS, _VECTORS, _MODEL, types.boolean, types.float64, _NUMBERS, _COUNTS, _VECTORS,
    _MODEL,
)  # fmt: skip


@jitable
def many(X, size):
    """An array (series, steps, ...) or (series, ...) by its address."""
    return Many(X.ctypes.data, X.shape[0], X.size // (X.shape[0] * size), size)


@jitable
def all_many(arrays, p, m):
    """Arrays of all series by their addresses."""
    return Arrays(
        many(arrays.a0, m), many(arrays.P0, m * m), many(arrays.c, m), many(arrays.d, p),
        many(arrays.T, m * m), many(arrays.Z, p * m), many(arrays.H, p * p), many(arrays.W, m * m),
    )  # fmt: skip


@jitable
def member(A, j):
    """That of series j, or of all."""
    return A[j if len(A) > 1 else 0]


@jitable
def room_for(n, p, m):
    """How many doubles a thread needs, wherever they begin: the first place is a multiple of 64."""
    return lay_out(n, p, m).end * LANES + 8


@kept_on_disk(njit(IN_LANES, error_model="numpy", nogil=True))
def in_lanes(first, stop, room, ends, y, model, backwards, tol, l, vague, y_bar, out):
    """Series first to stop - 1, each of ends[j] steps: their l (J,), y_bar (J, n, p) and out.

    All arrays are contiguous and have a first axis for the series, of length 1 in `model` where
    they share it; those of the model and of `out`, in `Arrays`, have a second one of length 1 or n
    for time (not a0 and P0). `first` is a multiple of LANES, or the series before it are done.
    `room` has as many entries as :func:`room_for` says, and may be used again: memory that the
    system has to give anew takes time. vague (J,) is above zero where the result is not to be used,
    since P0 may be vague.
    """
    n, p = y.shape[1:]
    m = model.a0.shape[1]
    s = lay_out(n, p, m)
    if len(room) < room_for(n, p, m):
        raise ValueError("there is too little room")
    w = (room.ctypes.data + 63) // 64 * 64
    shares = np.empty((max(len(model.P0), len(model.T), len(model.W)), m))
    for j in range(min(first, len(shares) - 1), min(stop, len(shares))):
        fill_shares(member(model.P0, j), member(model.T, j), member(model.W, j), shares[j])
    all_in_lanes(
        w, s, (n, p, m), first, stop, ends, many(y, p), all_many(model, p, m), many(shares, m),
        backwards, tol, many(l, 1), many(vague, 1), many(y_bar, p), all_many(out, p, m),
        np.empty(n, np.int64),
    )  # fmt: skip
    room[0], shares[0, 0] = 0.0, 0.0  # their addresses were good until here


@jitable
def of_series(arrays, j, n):
    """The arrays of series j, of n steps."""
    return Arrays(
        member(arrays.a0, j), member(arrays.P0, j), until(member(arrays.c, j), n),
        until(member(arrays.d, j), n), until(member(arrays.T, j), n), until(member(arrays.Z, j), n),
        until(member(arrays.H, j), n), until(member(arrays.W, j), n),
    )  # fmt: skip


@kept_on_disk(njit(PASSES, error_model="numpy", nogil=True))
def passes(members, ends, y, model, backwards, tol, l, failed, y_bar, out):
    """The series `members` one by one: as :func:`in_lanes`, added to y_bar and out.

    failed (J,) receives the step whose F is not positive definite; l is NaN then.
    """
    wanted, report = Wanted(backwards, backwards, backwards, backwards), np.empty(3, np.int64)
    ones, terms = np.ones(y.shape[1]), np.empty(y.shape[1])
    for j in members:
        n = ends[j]
        how = call(
            y[j, :n], of_series(model, j, n), of_series(out, j, n), terms[:n], ones[:n],
            y_bar[j, :n], backwards, wanted, tol, report,
        )  # fmt: skip
        l[j] = terms[:n].sum() if how == DONE else np.nan
        if how != DONE:
            failed[j] = report[0]
