"""Hessian-vector products, compiled: the tangents of the filter and of its pullback.

Each step of the ordinary pass is followed by that of the tangents, first forwards
(:mod:`helpers.kalman.compiled.push`), then backwards (:mod:`helpers.kalman.compiled.pull`), for one
direction or several groups of them. The loop of :mod:`helpers.kalman.hessian` is what tests hold
this to.

Many series that see few states are rotated first, by
:mod:`helpers.kalman.compiled.rotated_tangents`.
"""

import numpy as np
from numba import types

from helpers.kalman.compiled.collapse import PATTERNS, is_diagonal, patterns_in
from helpers.kalman.compiled.directions import (
    FIRST_OF_STEPS,
    TANGENT_HEADER,
    Block,
    Directions,
    Group,
    block_of,
    lay_out_all,
)
from helpers.kalman.compiled.door import (
    ARRAYS,
    GRADIENT,
    MODEL,
    NOT_ROTATED,
    READ,
    TANGENTS,
    TURNED,
    VALUE,
    address_of,
    asked_for,
    called_at,
    check,
    collapses,
    compiled,
    compiled_part,
    contiguous,
    copied,
    linked,
    run_small,
)
from helpers.kalman.compiled.door import LARGEST as LARGEST_SMALL
from helpers.kalman.compiled.forward import DONE
from helpers.kalman.compiled.inputs import (
    Arrays,
    Wanted,
    for_each,
    indices_in,
    look,
    room_for_indices,
    varies,
)
from helpers.kalman.compiled.layout import HEADER, LARGEST_BLOCK, Sizes, begin, blocks, distance
from helpers.kalman.compiled.one_pass import all_equal, clean, equal_from
from helpers.kalman.compiled.pull import pull
from helpers.kalman.compiled.push import push
from helpers.kalman.compiled.tiles import (
    LANES,
    jitable,
    padded,
    put,
)

# Side by side, directions save time where rows are short, and where there are several of them.
WIDE_ENOUGH = 32
# The size of the tangents of a covariance for all directions of one pass: a dozen of them should
# stay in a cache of a megabyte, in half of it where they are side by side.
LARGEST = 8000
WORTH_IT = 1.5  # times what a rotation costs the value, to rotate for tangents
IN_CACHE = 200_000  # doubles of what directions use of all steps


@jitable
def in_registers(m, p):
    """Whether so few states and series go by :mod:`helpers.kalman.compiled.small`."""
    return m <= LARGEST_SMALL and p <= LARGEST_SMALL


@jitable
def used_by(n, m, p, k, finds_steady):
    """As many doubles as k directions side by side use of n steps.

    Where no steady state is looked for those of the gains, too.
    """
    mk, pk = padded(m * k), padded(p * k)
    return n * (3 * mk + 5 * pk + (0 if finds_steady else (m + p) * mk + p * pk))


@jitable
def enough(n, m, p, finds_steady):
    """So many directions take less time side by side than one after the other.

    Lanes that stay empty take memory as well: one more has to be filled where what they use is not
    in a cache, and most where it is too large for a block.
    """
    side_by_side = used_by(n, m, p, LANES, finds_steady)
    if side_by_side + used_by(n, m, p, 1, finds_steady) > LARGEST_BLOCK:
        return LANES - 2
    return min(LANES, (m + 8) // 4 + int(side_by_side > IN_CACHE))


@jitable
def arranged(T, n, p, finds_steady, first):
    """As many groups of directions from the one called `first` on as go through one pass."""
    directions, _, m, _ = T.shape
    groups = [Group(first, first, first, block_of(T)) for _ in range(0)]
    # What the pass itself needs is not theirs.
    room, memory = LARGEST, LARGEST_BLOCK - used_by(n, m, p, 1, finds_steady)
    while first < directions:
        left = directions - first
        side_by_side = m < WIDE_ENOUGH and left >= enough(n, m, p, finds_steady)
        k = np.int64(LANES if side_by_side else 1)
        room -= (2 if side_by_side else 1) * k * m * m
        memory -= used_by(n, m, p, k, finds_steady)
        if len(groups) > 0 and (room < 0 or (memory < 0 and m < WIDE_ENOUGH)):
            break
        count = min(left, k)
        groups.append(Group(first, count, k, block_of(T[first : first + count])))
        first += k
    return groups


@jitable
def tangent_pass(
    memory, gains, y, model, l_bar, dots, bars, slopes, W_sum, groups, T_wanted, want_Z, backwards,
    tol,
):  # fmt: skip
    """The directions of all groups: fills their slopes and bars, and W_sum.

    Returns how it ended, and the memory for the next pass, `blocks`: what was given or, if that was
    too little, more.
    """
    n, p = y.shape
    m = len(model.a0)
    kept, varying = T_wanted.bottom > 0 or want_Z, varies(model)
    first = equal_from(l_bar) if backwards else np.int64(0)
    Z_moves = block_of(dots.Z).bottom > 0
    plan, headers = np.empty(HEADER, np.int64), np.empty((len(groups), TANGENT_HEADER), np.int64)
    shape = Sizes(n, p, m)
    near, far = lay_out_all(shape, groups, kept, plan, headers, 0)
    if len(memory) < near + LANES or len(gains) < far + LANES:
        memory, gains = blocks(near + LANES, far + LANES)
    lay_out_all(shape, groups, kept, plan, headers, distance(memory, gains))
    start = begin(memory, plan)
    w, x = memory.ctypes.data + 8 * start, headers.ctypes.data
    clean(w)
    for i in range(len(groups)):
        for place in range(headers[i, 0], headers[i, 2 * FIRST_OF_STEPS]):
            put(w, place, 0.0)
    entries = np.empty((n, p), np.uint8)
    found = indices_in(np.empty(room_for_indices(n, p, m), np.int64), n, p, m)
    observed, pattern = look(y, model, entries, found)
    status = push(
        w, x, groups, y, model, dots, observed, pattern, slopes, found.steady_from, varying,
        Z_moves, kept, tol, first,
    )  # fmt: skip
    if status == DONE and backwards:
        W_sum[:] = 0.0
        out = Arrays(
            model.a0, model.P0, model.c, model.d, model.T, model.Z, model.H, W_sum
        )  # fmt: skip
        pull(
            w, x, groups, model, dots, observed, pattern, l_bar, found.steady_from, varying, first,
            Z_moves, T_wanted, want_Z, out, bars,
        )  # fmt: skip
    memory[0], gains[0], headers[0, 0] = 0.0, 0.0, 0  # Numba frees an array after its last use
    return status, memory, gains


# Directions `first` to `last` - 1, those of zeros, and what is given, contiguous.
part_of = for_each(Directions, "X, first, last", "X.{x}[first:last]")
nothing_like = for_each(Directions, "X", "np.zeros(X.{x}.shape)", np=np)
contiguous_in = for_each(
    Directions, ", ".join(Directions._fields), "contiguous({x})", contiguous=contiguous
)


@jitable
def as_model(X, q):
    """Direction q of the model's arrays, or of its gradient's, as those lie."""
    return Arrays(
        X.a0[q].reshape(-1), X.P0[q].reshape(X.P0.shape[2:]), X.c[q].reshape(X.c.shape[1:3]),
        X.d[q].reshape(X.d.shape[1:3]), X.T[q], X.Z[q], X.H[q], X.W[q],
    )  # fmt: skip


@jitable
def by_registers(y, model, l_bar, dots, bars, slopes, W_sum, backwards, tol):
    """All directions by the pass in registers for this size, one after the other."""
    p, m, status = y.shape[1], len(model.a0), np.int64(DONE)
    address = address_of(m, TANGENTS + p)
    if address == 0:
        raise RuntimeError("second derivatives were not compiled; why not, a message above says")
    wanted = Wanted(True, True, True, True, np.empty(0, np.int64))
    asked = asked_for(GRADIENT if backwards else VALUE, wanted, False)
    again, report = np.zeros_like(W_sum), np.empty(3, np.int64)
    for q in range(len(slopes)):
        more = dots.y[q].reshape(y.shape), as_model(dots, q), W_sum if q == 0 else again
        status = run_small(
            address, y, model, as_model(bars, q), slopes[q], l_bar, bars.y[q].reshape(y.shape),
            asked, tol, report, more,
        )  # fmt: skip
        if status != DONE:
            break
    return status


@compiled_part
def along_all(
    y, model, l_bar, dots, bars, slopes, W_sum, T_wanted, want_Z, backwards, tol, memory, gains,
):  # fmt: skip
    """All directions, as many at once as go through one pass. Returns what `tangent_pass` does."""
    (n, p), status, first = y.shape, np.int64(DONE), 0
    finds_steady = tol > 0.0 and 2 * equal_from(l_bar) < n and not varies(model)
    while first < len(slopes) and status == DONE:
        groups = arranged(dots.T, n, p, finds_steady, first)
        status, memory, gains = tangent_pass(
            memory, gains, y, model, l_bar, dots, bars, slopes, W_sum, groups, T_wanted, want_Z,
            backwards, tol,
        )  # fmt: skip
        for group in groups:
            first += group.count
    return status, memory, gains


DIRECTIONS = types.NamedUniTuple(types.float64[:, :, :, ::1], 9, Directions)
# What `along_all` takes, and what it returns.
ALONG = (
    types.float64[:, ::1], ARRAYS, types.float64[::1], DIRECTIONS, DIRECTIONS,
    types.float64[:, ::1], types.float64[:, :, ::1], types.NamedUniTuple(types.int64, 4, Block),
    types.boolean, types.boolean, types.float64, types.float64[::1], types.float64[::1],
)  # fmt: skip
linked_along_all = linked(along_all, ALONG)
ALONG_ROTATED = (
    types.float64[:, ::1], types.uint8[:, ::1], PATTERNS, *ALONG[1:7], types.int64[::1],
    *ALONG[7:9], types.boolean, *ALONG[9:],
)  # fmt: skip
along_rotated = called_at(
    "tangents of rotated series", along_all.overloads[ALONG].signature.return_type, ALONG_ROTATED
)


@jitable
def moved_series(dots):
    """Of which series each direction moves y, or a row of d, Z or H: (k, p), true or false."""
    k, p = dots.y.shape[0], dots.y.shape[2]
    moved = np.zeros((k, p), np.bool_)
    for X in (dots.y, dots.d, dots.Z, dots.H):
        for q in range(k):
            for t in range(X.shape[1]):
                for i in range(p):
                    for j in range(X.shape[3]):
                        if X[q, t, i, j] != 0.0:
                            moved[q, i] = True
    for q in range(k):
        for t in range(dots.H.shape[1]):
            for i in range(p):
                for j in range(p):
                    if dots.H[q, t, i, j] != 0.0:
                        moved[q, j] = True
    return moved


@jitable
def together(moved, first, m, at_once):
    """Directions `first` to `last` - 1 go through one pass, rotated or not: last, whether, series.

    At most `at_once` of them if rotated. Each series that they move is one more in that pass.
    """
    k, p = moved.shape
    most = p // 2 - m - 1  # with more it is not worth it
    several = min(most, max(m, LANES))
    of_all, last = moved[first].copy(), first + 1
    rotated = np.sum(of_all) <= most
    while last < k and rotated == (np.sum(moved[last]) <= most):
        more = of_all | moved[last]
        if rotated and (np.sum(more) > max(several, np.sum(of_all)) or last - first >= at_once):
            break
        of_all, last = more, last + 1
    return last, rotated, np.flatnonzero(of_all)


@compiled
def hessian_vector(
    y, a0, P0, c, d, T, Z, H, W, l_bar, y_dot, a0_dot, P0_dot, c_dot, d_dot, T_dot, Z_dot, H_dot,
    W_dot, want_T, want_Z, everywhere, backwards, tol,
):  # fmt: skip
    """The gradient of W, the slopes (k, n), and the tangents of the gradients along k directions.

    y, a0, ..., W, l_bar and tol as :func:`~helpers.kalman.compiled.door.loglike_and_grad` takes
    them, of float64. The directions, and what comes back, are `Directions`, contiguous. Unless
    `everywhere`, those of T's gradient are complete only where some direction moves T, and those of
    H's on its diagonal if none moves more. Without `backwards` only the slopes are computed. All is
    NaN where some F is not positive definite.
    """
    y, l_bar = contiguous(y), contiguous(l_bar)
    model = copied(a0, P0, c, d, T, Z, H, W)
    check(y, model, l_bar)
    dots = contiguous_in(y_dot, a0_dot, P0_dot, c_dot, d_dot, T_dot, Z_dot, H_dot, W_dot)
    bars = nothing_like(dots)
    directions, (n, p), m = len(y_dot), y.shape, len(model.a0)
    slopes, W_sum = np.empty((directions, n)), np.zeros(model.W.shape)
    T_wanted = Block(0, m if want_T else 0, 0, m if want_T else 0)
    if want_T and not everywhere:
        T_wanted = block_of(dots.T)
    # The same memory for all passes: to be given pages costs as much as what is done in them.
    memory, gains = blocks(0, 0)
    status, last, varying = np.int64(DONE), np.int64(0), varies(model)
    rotates = collapses(y, m, tol == 0.0 or varying, WORTH_IT)
    o, patterns = patterns_in(y[: n * int(rotates)], model.Z, model.H)
    moved = moved_series(dots) if rotates else np.zeros((0, 0), np.bool_)
    diagonal = not everywhere and is_diagonal(dots.H.reshape((-1, p, p)))
    at_once = max(1, LARGEST_BLOCK // (n * (m + max(m, LANES) + 1) ** 2))
    while last < directions and status == DONE:
        first, last, few, series = last, directions, False, np.empty(0, np.int64)
        if rotates:
            last, few, series = together(moved, first, m, at_once)
        dots_now, bars_now = part_of(dots, first, last), part_of(bars, first, last)
        slopes_now, status = slopes[first:last], np.int64(NOT_ROTATED)
        if few:
            status, memory, gains = along_rotated(
                address_of(0, TURNED),
                (y, o, patterns, model, l_bar, dots_now, bars_now, slopes_now, W_sum, series,
                 T_wanted, want_Z, diagonal, backwards, tol, memory, gains),
            )  # fmt: skip
        if status == NOT_ROTATED and in_registers(m, p) and all_equal(l_bar):
            status = by_registers(y, model, l_bar, dots, bars, slopes, W_sum, backwards, tol)
        elif status == NOT_ROTATED:
            status, memory, gains = linked_along_all(
                (y, model, l_bar, dots_now, bars_now, slopes_now, W_sum, T_wanted, want_Z,
                 backwards, tol, memory, gains)
            )  # fmt: skip
    if status != DONE:
        slopes[:], W_sum[:] = np.nan, np.nan
        for bar in bars:
            bar[:] = np.nan
    return W_sum, slopes, bars


_GIVEN = types.Array(types.float64, 4, "C", readonly=True)
linked_hessian_vector = linked(
    hessian_vector, (*MODEL, READ[1], *[_GIVEN] * 9, *[types.boolean] * 4, types.float64)
)
