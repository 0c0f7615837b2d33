"""What a pass is given: the model over time, which observations there are, what is asked for."""

from typing import NamedTuple

import numpy as np

from helpers.kalman.compiled.layout import space
from helpers.kalman.compiled.tiles import (
    Listed,
    below,
    clear,
    jitable,
    place_of,
    put,
    transpose,
)
from helpers.kalman.recursions import at_step
from helpers.statespace import STATIC

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


def for_each(kind, takes, code, fixed="", **known):
    """A function of what it `takes` that makes a `kind` of tuple: of ``code`` for each field x.

    Compiled code does not loop over arrays of several numbers of axes. For a0 and P0, which have no
    axis for time, `fixed` stands in the place of ``code`` if it is given; both use what is `known`.
    """
    parts = ((fixed if fixed and x in STATIC else code).format(x=x) for x in kind._fields)
    return jitable(eval(f"lambda {takes}: kind({', '.join(parts)})", known | {"kind": kind}))


class Wanted(NamedTuple):
    """What of the gradient is asked for, by what it costs."""

    matrices: bool  # any of P0, T, Z, H, W: the recursion of N
    T: bool
    Z: bool
    W: bool
    columns: np.ndarray  # ascending, of T and Z: what their gradients are in others is not computed


class Asked(NamedTuple):
    """What a pass is for."""

    purpose: int  # VALUE, GRADIENT or GAINS
    wanted: Wanted
    watch: bool  # whether to end where a step shows that P0 was vague


class Room(NamedTuple):
    """Where a pass works: its arrays, written over by the next one."""

    w: int  # the address of the workspace
    header: np.ndarray  # its plan, as `layout.lay_out` fills it
    entries: np.ndarray  # (n or more, p), for `Observed`
    indices: np.ndarray  # for `Indices`


class Observed(NamedTuple):
    """Which entries of y are there, and for how long that stays as it is."""

    entries: np.ndarray  # (n, p) of uint8: 1 or 0
    same_until: np.ndarray  # (n,), the first later step that observes other components; n if none


SPARSE_BELOW = 0.4  # share of non-zeros in a matrix; near it a dense product takes as little time


class NonZeros(NamedTuple):
    """Row i of a matrix has its non-zeros in columns ``index[start[i]:start[i + 1]]``.

    At least one is listed: a row of zeros has its entry on the diagonal.
    """

    start: np.ndarray  # (rows + 1,)
    index: np.ndarray  # (rows * columns,)


class Pattern(NamedTuple):
    """Where the model has its non-zeros at any time, as `NonZeros` or as `tiles.Listed`."""

    T: NamedTuple
    T_t: NamedTuple  # of T'
    Z: NamedTuple


class Indices(NamedTuple):
    """What a pass knows of its steps and of its model without a look at any number."""

    same_until: np.ndarray  # (n,), as in `Observed`
    steady_from: np.ndarray  # (n,), as in `forward.Steps`
    pattern: Pattern


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
    """Fill ``found`` with the entries of A (k, rows, cols), or of its A', not zero at any time."""
    k, rows, cols = A.shape
    if transposed:
        rows, cols = cols, rows
    count = 0
    found.start[0] = 0
    for i in range(rows):
        for j in range(cols):
            for t in range(k):
                if (A[t, j, i] if transposed else A[t, i, j]) != 0.0:
                    found.index[count] = j
                    count += 1
                    break
        if count == found.start[i]:
            found.index[count] = min(i, cols - 1)
            count += 1
        found.start[i + 1] = count


@jitable
def listed(found):
    """The same for products, which compiled code tells where the arrays are: they must stay."""
    sparse = found.start[len(found.start) - 1] < SPARSE_BELOW * len(found.index)
    return Listed(place_of(found.start), place_of(found.index), sparse)


@jitable
def find_pattern(model, pattern):
    """Fill ``pattern``."""
    find_non_zeros(model.T, False, pattern.T)
    find_non_zeros(model.T, True, pattern.T_t)
    find_non_zeros(model.Z, False, pattern.Z)


@jitable
def listed_pattern(pattern):
    """What `find_pattern` has filled, for products."""
    return Pattern(listed(pattern.T), listed(pattern.T_t), listed(pattern.Z))


@jitable
def room_for_indices(n, p, m):
    """The number of int64 that `indices_in` is given."""
    return 2 * n + 2 * (m + 1 + m * m) + p + 1 + p * m


@jitable
def non_zeros_in(room, at, rows, cols):
    """The list that begins at a place of ``room``, and the place after it."""
    middle, stop = at + rows + 1, at + rows + 1 + rows * cols
    return NonZeros(room[at:middle], room[middle:stop]), stop


@jitable
def indices_in(room, n, p, m):
    """`Indices` as they lie in ``room``."""
    T, at = non_zeros_in(room, 2 * n, m, m)
    T_t, at = non_zeros_in(room, at, m, m)
    Z, _ = non_zeros_in(room, at, p, m)
    return Indices(room[:n], room[n : 2 * n], Pattern(T, T_t, Z))


@jitable
def look(y, model, entries, found):
    """`Observed` and `Pattern`, of which a pass is told before it begins.

    entries (n, p) and ``found``, in `Indices`, are filled; the pattern is places in it: it must
    stay.
    """
    observed = Observed(entries, found.same_until)
    look_at(y, observed)
    find_pattern(model, found.pattern)
    return observed, listed_pattern(found.pattern)


@jitable
def varies(model):
    """Whether any matrix of the model varies over time; c and d move no covariance."""
    return max(len(model.T), len(model.Z), len(model.H), len(model.W)) > 1


@jitable
def vectors_vary(model):
    """Whether c or d varies over time."""
    return max(len(model.c), len(model.d)) > 1


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
def load_vectors(w, t, model):
    """c and d of step t."""
    s = space(w)
    of_c, of_d = t if len(model.c) > 1 else 0, t if len(model.d) > 1 else 0
    for j in range(model.c.shape[1]):
        put(w, s.c.at + j, model.c[of_c, j])
    for i in range(model.d.shape[1]):
        put(w, s.d.at + i, model.d[of_d, i])


@jitable
def load_step(w, t, model, observed):
    """The matrices of step t; a row that y misses has no Z and a one on the diagonal of H."""
    s = space(w)
    m, p = len(model.a0), model.d.shape[1]
    load(w, s.T, at_step(model.T, t), m, m)
    transpose(w, s.T_t, s.T, m, m)
    load(w, s.Z, at_step(model.Z, t), p, m)
    load_symmetric(w, s.H, at_step(model.H, t), p)
    load_symmetric(w, s.W, at_step(model.W, t), m)
    for i in range(p):
        if not observed.entries[t, i]:
            clear(w, below(s.Z, i), 1)
            for j in range(p):
                put(w, s.H.at + i * s.H.ld + j, 0.0)
                put(w, s.H.at + j * s.H.ld + i, 0.0)
            put(w, s.H.at + i * s.H.ld + i, 1.0)
    transpose(w, s.Z_t, s.Z, p, m)


@jitable
def fill(arrays, x):
    """x in every entry of the model's arrays."""
    arrays.a0[:], arrays.P0[:], arrays.c[:], arrays.d[:] = x, x, x, x
    arrays.T[:], arrays.Z[:], arrays.H[:], arrays.W[:] = x, x, x, x


@jitable
def until(A, n):
    """A (1 or more, ...) up to step n."""
    return A[:n] if len(A) > 1 else A


# The model, or its gradient, up to step n.
first_steps = for_each(Arrays, "model, n", "until(model.{x}, n)", "model.{x}", until=until)


@jitable
def later(A, k):
    """A (1 or n, ...) from step k on."""
    return A[k:] if len(A) > 1 else A


# The model, or its gradient, from step k on.
model_later = for_each(Arrays, "model, k", "later(model.{x}, k)", "model.{x}", later=later)
