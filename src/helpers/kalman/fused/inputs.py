"""What a pass is given: the model over time, which observations there are, what is asked for."""

from typing import NamedTuple

import numpy as np

from helpers.kalman.fused.layout import space
from helpers.kalman.fused.tiles import below, clear, copy, jitable, put, transpose
from helpers.kalman.recursions import at_step

jitable(at_step)


class Arrays(NamedTuple):
    """The model, or its gradient, with an axis of length 1 or n for time (not for a0 and P0).

    W = R Q R'. P0, H and W count by their symmetric part.
    """

    a0: np.ndarray
    P0: np.ndarray
    c: np.ndarray
    d: np.ndarray
    T: np.ndarray
    Z: np.ndarray
    H: np.ndarray
    W: np.ndarray


class Wanted(NamedTuple):
    """What of the gradient is asked for, by what it costs."""

    matrices: bool  # any of P0, T, Z, H, W: the recursion of N
    T: bool
    Z: bool
    W: bool


class Observed(NamedTuple):
    """Which entries of y are there, and for how long that stays as it is."""

    entries: np.ndarray  # (n, p) of uint8: 1 or 0
    same_until: np.ndarray  # (n,), the first later step that observes other components; n if none


class NonZeros(NamedTuple):
    """Row i of a square matrix has its non-zeros in columns ``index[start[i]:start[i + 1]]``.

    At least one is listed: a row of zeros has its entry on the diagonal.
    """

    start: np.ndarray  # (m + 1,)
    index: np.ndarray  # (m * m,)


@jitable
def look_at(y, observed):
    """Fill ``observed``."""
    n, p = y.shape
    for t in range(n - 1, -1, -1):
        same = t < n - 1
        for i in range(p):
            observed.entries[t, i] = 0 if np.isnan(y[t, i]) else 1
            if same and observed.entries[t, i] != observed.entries[t + 1, i]:
                same = False
        observed.same_until[t] = observed.same_until[t + 1] if same else t + 1


@jitable
def find_non_zeros(A, transposed, found):
    """Fill ``found`` with the entries of A (k, m, m), or of its A', that are not zero at any time.

    Returns how many are listed.
    """
    k, m, _ = A.shape
    count = 0
    found.start[0] = 0
    for i in range(m):
        for j in range(m):
            for t in range(k):
                if (A[t, j, i] if transposed else A[t, i, j]) != 0.0:
                    found.index[count] = j
                    count += 1
                    break
        if count == found.start[i]:
            found.index[count] = i
            count += 1
        found.start[i + 1] = count
    return count


@jitable
def varies(model):
    """Whether any array of the model varies over time."""
    longest = max(len(model.c), len(model.d), len(model.T), len(model.Z))
    return max(longest, len(model.H), len(model.W)) > 1


@jitable
def load(w, out, A, rows, cols):
    """Copy the array A (rows, cols) to `out`."""
    for i in range(rows):
        for j in range(cols):
            put(w, out.at + i * out.ld + j, A[i, j])


@jitable
def load_symmetric(w, out, A, rows):
    """Copy (A + A') / 2 to `out`, A (rows, rows)."""
    for i in range(rows):
        for j in range(rows):
            put(w, out.at + i * out.ld + j, 0.5 * (A[i, j] + A[j, i]))


@jitable
def load_step(w, t, model, observed):
    """The model's arrays of step t; a row that y misses has no Z and a one on the diagonal of H."""
    s = space(w)
    m, p = len(model.a0), model.d.shape[1]
    load(w, s.T, at_step(model.T, t), m, m)
    transpose(w, s.T_t, s.T, m, m)
    load(w, s.Z, at_step(model.Z, t), p, m)
    load_symmetric(w, s.H, at_step(model.H, t), p)
    load_symmetric(w, s.W, at_step(model.W, t), m)
    c, d = at_step(model.c, t), at_step(model.d, t)
    for j in range(m):
        put(w, s.c.at + j, c[j])
    for i in range(p):
        put(w, s.d.at + i, d[i])
        if not observed.entries[t, i]:
            clear(w, below(s.Z, i), 1)
            for j in range(p):
                put(w, s.H.at + i * s.H.ld + j, 0.0)
                put(w, s.H.at + j * s.H.ld + i, 0.0)
            put(w, s.H.at + i * s.H.ld + i, 1.0)
    transpose(w, s.Z_t, s.Z, p, m)
    copy(w, s.ZY, s.Z, p)
    copy(w, below(s.YZ, p), s.Z, p)


@jitable
def until(A, n):
    """A (1 or more, ...) up to step n."""
    return A[:n] if len(A) > 1 else A
