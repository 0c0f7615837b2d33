"""Hessian-vector products, compiled: the tangents of the filter and of its pullback.

Each step of the ordinary pass is followed by that of the tangents, first forwards
(:mod:`helpers.kalman.fused.push`), then backwards (:mod:`helpers.kalman.fused.pull`), for one
direction or several groups of them. The loop of :mod:`helpers.kalman.hessian` is what tests hold
this to.

Many series that see few states are rotated first (:mod:`helpers.kalman.fused.collapse`), by a
rotation that does not move: among the columns of H^-1/2 Z stand those of H^-1/2 that belong to the
series of which some direction moves anything. What is left of y then sees nothing that moves.
"""

import numpy as np
from numba import types

from helpers.kalman.fused.collapse import (
    expand,
    is_diagonal,
    patterns_of,
    rotate,
    rotated_model,
)
from helpers.kalman.fused.entry import (
    GRADIENT,
    MODEL,
    NOT_ROTATED,
    READ,
    TANGENTS,
    VALUE,
    address_of,
    addresses,
    check,
    collapses,
    contiguous,
    copied,
    kept_on_disk,
    linked,
    numbers_of,
    run_small,
)
from helpers.kalman.fused.entry import LARGEST as LARGEST_SMALL
from helpers.kalman.fused.forward import DONE
from helpers.kalman.fused.inputs import (
    Arrays,
    Wanted,
    indices_in,
    look,
    room_for_indices,
    varies,
)
from helpers.kalman.fused.layout import HEADER, LARGEST_BLOCK, Sizes, begin, blocks, distance
from helpers.kalman.fused.moves import (
    FIRST_OF_STEPS,
    MOVED_HEADER,
    Block,
    Directions,
    Group,
    block_of,
    lay_out_all,
)
from helpers.kalman.fused.one_pass import all_equal, clean
from helpers.kalman.fused.pull import pull
from helpers.kalman.fused.push import push
from helpers.kalman.fused.steps import gaps
from helpers.kalman.fused.tiles import (
    LANES,
    jitable,
    padded,
    put,
)
from helpers.kalman.on_disk import njit

# Side by side, directions save time where rows are short, and where there are several of them.
WIDE_ENOUGH = 32
# The size of the tangents of a covariance for all directions of one pass: a dozen of them should
# stay in a cache of a megabyte, in half of it where they are side by side.
LARGEST = 8000
WORTH_IT = 3  # times what a rotation costs the value, to rotate for tangents
IN_CACHE = 200_000  # doubles of what directions use of all steps


@jitable
def in_registers(m, p):
    """Whether so few states and series go by :mod:`helpers.kalman.fused.small`."""
    return m <= LARGEST_SMALL and p <= LARGEST_SMALL


@jitable
def used_by(n, m, p, k, settles):
    """As many doubles as k directions side by side use of n steps.

    Where no steady state is looked for those of the gains, too.
    """
    mk, pk = padded(m * k), padded(p * k)
    return n * (3 * mk + 5 * pk + (0 if settles else (m + p) * mk + p * pk))


@jitable
def enough(n, m, p, settles):
    """So many directions take less time side by side than one after the other.

    Lanes that stay empty take memory as well: one more has to be filled where what they use is not
    in a cache, and most where it is too large for a block.
    """
    side_by_side = used_by(n, m, p, LANES, settles)
    if side_by_side + used_by(n, m, p, 1, settles) > LARGEST_BLOCK:
        return LANES - 2
    return min(LANES, (m + 8) // 4 + int(side_by_side > IN_CACHE))


@jitable
def arranged(T, n, p, settles, first):
    """As many groups of directions from the one called `first` on as go through one pass."""
    directions, _, m, _ = T.shape
    groups = [Group(first, first, first, block_of(T)) for _ in range(0)]
    room, memory = LARGEST, LARGEST_BLOCK - used_by(n, m, p, 1, settles)  # of the pass itself
    while first < directions:
        left = directions - first
        side_by_side = m < WIDE_ENOUGH and left >= enough(n, m, p, settles)
        k = np.int64(LANES if side_by_side else 1)
        room -= (2 if side_by_side else 1) * k * m * m
        memory -= used_by(n, m, p, k, settles)
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
    kept, equal, varying = T_wanted.bottom > 0 or want_Z, all_equal(l_bar), varies(model)
    Z_moves = block_of(dots.Z).bottom > 0
    plan, headers = np.empty(HEADER, np.int64), np.empty((len(groups), MOVED_HEADER), np.int64)
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
    how = push(
        w, x, groups, y, model, dots, observed, pattern, slopes, found.steady_from, varying,
        Z_moves, kept, tol if equal else 0.0,
    )  # fmt: skip
    if how == DONE and backwards:
        W_sum[:] = 0.0
        out = Arrays(
            model.a0, model.P0, model.c, model.d, model.T, model.Z, model.H, W_sum
        )  # fmt: skip
        pull(
            w, x, groups, model, dots, observed, pattern, l_bar, found.steady_from, varying, equal,
            Z_moves, T_wanted, want_Z, out, bars,
        )  # fmt: skip
    memory[0], gains[0], headers[0, 0] = 0.0, 0.0, 0  # their addresses were good until here
    return how, memory, gains


@jitable
def in_direction(X, q):
    """Direction q of the model's arrays, or of what comes of it."""
    return Arrays(X.a0[q], X.P0[q], X.c[q], X.d[q], X.T[q], X.Z[q], X.H[q], X.W[q])


@jitable
def part_of(X, first, last):
    """Directions `first` to `last` - 1 of `Directions`."""
    return Directions(
        X.y[first:last], X.a0[first:last], X.P0[first:last], X.c[first:last], X.d[first:last],
        X.T[first:last], X.Z[first:last], X.H[first:last], X.W[first:last],
    )  # fmt: skip


@jitable
def by_registers(y, model, l_bar, dots, bars, slopes, W_sum, backwards, tol):
    """All directions by the pass in registers for this size, one after the other."""
    (n, p), m, k = y.shape, len(model.a0), len(slopes)
    address = address_of(m, TANGENTS + p)
    if address == 0:
        raise RuntimeError("second derivatives were not compiled; why not, a message above says")
    wanted = Wanted(True, True, True, True, np.empty(0, np.int64))
    sizes = numbers_of(n, p, model, GRADIENT if backwards else VALUE, wanted, False)
    again, report, how = np.zeros_like(W_sum), np.empty(3, np.int64), np.int64(DONE)
    for q in range(k):
        along, out = in_direction(dots, q), in_direction(bars, q)
        total = W_sum.ctypes.data if q == 0 else again.ctypes.data
        more = (dots.y[q].ctypes.data, *addresses(along), total)
        how = run_small(
            address, sizes, report, tol, slopes[q], l_bar, y, bars.y[q], model, out, more
        )
        if how != DONE:
            break
    again[:] = 0.0  # its address was good until here
    if how == 0:
        raise MemoryError
    return how


@jitable
def along_all(
    y, model, l_bar, dots, bars, slopes, W_sum, T_wanted, want_Z, backwards, tol, memory, gains,
):  # fmt: skip
    """All directions, as many at once as go through one pass. Returns what `tangent_pass` does."""
    (n, p), how, first = y.shape, np.int64(DONE), 0
    settles = tol > 0.0 and all_equal(l_bar) and not varies(model)
    while first < len(slopes) and how == DONE:
        groups = arranged(dots.T, n, p, settles, first)
        how, memory, gains = tangent_pass(
            memory, gains, y, model, l_bar, dots, bars, slopes, W_sum, groups, T_wanted, want_Z,
            backwards, tol,
        )  # fmt: skip
        for group in groups:
            first += group.count
    return how, memory, gains


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


@jitable
def along_rotated(
    y, o, patterns, model, l_bar, dots, bars, slopes, W_sum, series, T_wanted, want_Z, diagonal,
    backwards, tol, memory, gains,
):  # fmt: skip
    """`along_all` for directions that move few `series`; NOT_ROTATED if H is too ill."""
    (n, p), m, k, nothing = y.shape, len(model.a0), len(slopes), np.zeros(len(y))
    columns = np.zeros((len(model.Z), p, m + len(series)))
    columns[:, :, :m] = model.Z
    for j in range(len(series)):
        columns[:, series[j], m + j] = 1.0
    x, _, good = rotate(y, o, model.d, columns, model.H, nothing, patterns, True)
    if not good:
        return np.int64(NOT_ROTATED), memory, gains
    Y, rotated = rotated_model(x, patterns, model, want_Z)
    _, size, _ = rotated.H.shape
    steps = len(rotated.H)
    y_dot, d_dot = np.zeros((k, n, size, 1)), np.zeros((k, 1, size, 1))
    Z_dot, H_dot = np.zeros((k, steps, size, m)), np.zeros((k, steps, size, size))
    for i in range(len(patterns.start) - 1):
        for place in range(patterns.start[i], patterns.start[i + 1]):
            t = patterns.order[place]
            rotate_moves(x.B[i], dots, t, series, y_dot[:, t], Z_dot, H_dot)
    inner = Directions(
        y_dot, dots.a0, dots.P0, dots.c, d_dot, dots.T, Z_dot, H_dot, dots.W
    )  # fmt: skip
    Y_bar, d_bar = np.zeros(y_dot.shape), np.zeros(d_dot.shape)
    Z_bar, H_bar = np.zeros(Z_dot.shape), np.zeros(H_dot.shape)
    found = Directions(
        Y_bar, bars.a0, bars.P0, bars.c, d_bar, bars.T, Z_bar, H_bar, bars.W
    )  # fmt: skip
    how, memory, gains = along_all(
        Y, rotated, l_bar, inner, found, slopes, W_sum, T_wanted, want_Z, backwards, tol, memory,
        gains,
    )  # fmt: skip
    if how == DONE and backwards:
        wanted = Wanted(True, True, want_Z, True, np.empty(0, np.int64))
        for q in range(k):
            h = np.ascontiguousarray(Z_bar[q, :, size - 1]) if want_Z else np.zeros((n, m))
            expand(
                x, patterns, nothing, wanted, h, bars.y[q, :, :, 0], Y_bar[q, :, :, 0],
                in_direction(found, q), in_direction(bars, q), diagonal,
            )  # fmt: skip
    return how, memory, gains


@jitable
def rotate_moves(B, dots, t, series, y_dot, Z_dot, H_dot):
    """What directions that move these `series` alone move, rotated by B (rows, p), at step t."""
    of_d = t if dots.d.shape[1] > 1 else 0
    of_Z, of_H = t if dots.Z.shape[1] > 1 else 0, t if dots.H.shape[1] > 1 else 0
    for q in range(len(y_dot)):
        for s in series:
            dx = dots.y[q, t, s, 0] - dots.d[q, of_d, s, 0]
            for j in range(len(B)):
                y_dot[q, j, 0] += B[j, s] * dx
        if t >= Z_dot.shape[1]:  # all steps have the same
            continue
        for s in series:
            for j in range(len(B)):
                for l in range(Z_dot.shape[3]):
                    Z_dot[q, t, j, l] += B[j, s] * dots.Z[q, of_Z, s, l]
            for l in series:
                dH = 0.5 * (dots.H[q, of_H, s, l] + dots.H[q, of_H, l, s])
                if dH != 0.0:
                    for i in range(len(B)):
                        for j in range(len(B)):
                            H_dot[q, t, i, j] += B[i, s] * dH * B[j, l]


@kept_on_disk(njit(error_model="numpy", nogil=True))
def hessian_vector(
    y, a0, P0, c, d, T, Z, H, W, l_bar, y_dot, a0_dot, P0_dot, c_dot, d_dot, T_dot, Z_dot, H_dot,
    W_dot, want_T, want_Z, everywhere, backwards, tol,
):  # fmt: skip
    """The gradient of W, the slopes (k, n), and the tangents of the gradients along k directions.

    y, a0, ..., W, l_bar and tol as :func:`helpers.kalman.fused.entry.loglike_and_grad` takes them,
    of float64. The directions, and what comes back, are `Directions`, contiguous. Unless
    `everywhere`, those of T's gradient are complete only where some direction moves T, and those of
    H's on its diagonal if none moves more. Without `backwards` only the slopes are computed. All is
    NaN where some F is not positive definite.
    """
    y, l_bar = contiguous(y), contiguous(l_bar)
    model = copied(a0, P0, c, d, T, Z, H, W)
    check(y, model, l_bar)
    dots = Directions(
        contiguous(y_dot), contiguous(a0_dot), contiguous(P0_dot), contiguous(c_dot),
        contiguous(d_dot), contiguous(T_dot), contiguous(Z_dot), contiguous(H_dot),
        contiguous(W_dot),
    )  # fmt: skip
    bars = Directions(
        np.zeros(y_dot.shape), np.zeros(a0_dot.shape), np.zeros(P0_dot.shape),
        np.zeros(c_dot.shape), np.zeros(d_dot.shape), np.zeros(T_dot.shape),
        np.zeros(Z_dot.shape), np.zeros(H_dot.shape), np.zeros(W_dot.shape),
    )  # fmt: skip
    directions, (n, p), m = len(y_dot), y.shape, len(model.a0)
    slopes, W_sum = np.empty((directions, n)), np.zeros(model.W.shape)
    T_wanted = Block(0, m if want_T else 0, 0, m if want_T else 0)
    if want_T and not everywhere:
        T_wanted = block_of(dots.T)
    # The same memory for all passes: to be given pages costs as much as what is done in them.
    memory, gains = blocks(0, 0)
    how, last, varying = np.int64(DONE), np.int64(0), varies(model)
    rotates = collapses(y, m, tol == 0.0 or varying, WORTH_IT)
    _, o = gaps(y if rotates else y[:0])
    patterns = patterns_of(o, max(len(model.Z), len(model.H)) > 1)
    moved = moved_series(dots) if rotates else np.zeros((0, 0), np.bool_)
    diagonal = not everywhere and is_diagonal(dots.H.reshape((-1, p, p)))
    at_once = max(1, LARGEST_BLOCK // (n * (m + max(m, LANES) + 1) ** 2))
    while last < directions and how == DONE:
        first, last, few, series = last, directions, False, np.empty(0, np.int64)
        if rotates:
            last, few, series = together(moved, first, m, at_once)
        dots_now, bars_now = part_of(dots, first, last), part_of(bars, first, last)
        slopes_now, how = slopes[first:last], np.int64(NOT_ROTATED)
        if few:
            how, memory, gains = along_rotated(
                y, o, patterns, model, l_bar, dots_now, bars_now, slopes_now, W_sum, series,
                T_wanted, want_Z, diagonal, backwards, tol, memory, gains,
            )  # fmt: skip
        if how == NOT_ROTATED and in_registers(m, p) and all_equal(l_bar):
            how = by_registers(y, model, l_bar, dots, bars, slopes, W_sum, backwards, tol)
        elif how == NOT_ROTATED:
            how, memory, gains = along_all(
                y, model, l_bar, dots_now, bars_now, slopes_now, W_sum, T_wanted, want_Z,
                backwards, tol, memory, gains,
            )  # fmt: skip
    if how != DONE:
        slopes[:], W_sum[:] = np.nan, np.nan
        for bar in bars:
            bar[:] = np.nan
    return W_sum, slopes, bars


_DIRECTIONS = types.Array(types.float64, 4, "C", readonly=True)
linked_hessian_vector = linked(
    hessian_vector, (*MODEL, READ[1], *[_DIRECTIONS] * 9, *[types.boolean] * 4, types.float64)
)
hessian_vector.disable_compile()  # Python takes the same machine code
