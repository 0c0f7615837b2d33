"""Many series through the gains of one pass: forwards, and backwards where a gradient is wanted.

A pass over a series that never surprises (:mod:`helpers.kalman.panel` says why) leaves its gains in
the workspace. The sweep carries a chunk of series through them as columns: a state is a matrix
(m, columns), one row for each state, and a step is the same products of small matrices as those of
the covariances.
"""

from typing import NamedTuple

import numpy as np

from helpers.kalman.compiled.forward import DONE
from helpers.kalman.compiled.inputs import load_step
from helpers.kalman.compiled.layout import sizes, space
from helpers.kalman.compiled.tiles import (
    LANES,
    Mat,
    add,
    axpy,
    below,
    clear,
    copy,
    element,
    get,
    gram,
    jitable,
    padded,
    product,
    put,
    rank_one,
    row_product,
    sparse_product,
    transposed,
)
from helpers.kalman.recursions import at_step

# Series that are carried at once: four vectors, the widest row that stays in registers while the
# non-zeros of T are followed. What is kept of them for the way back then fits into a cache.
WIDTH = 4 * LANES
# Steps whose products are summed at once. More of them would not fit beside each other into the
# nearest cache, fewer would add up the lanes of the sums more often.
BLOCK = 16


class Columns(NamedTuple):
    """Where a chunk of series lies: matrices with a column for each."""

    zero: Mat  # one row of zeros, which is every row
    g: Mat  # (1, columns), weights
    v: Mat  # (p, columns), y and then v; (steps, p, columns) if that is kept
    a: Mat  # (m, columns)
    c: Mat  # (m, columns)
    c_bar: Mat  # (m, columns)
    s: Mat  # (m, columns), T'r
    r: Mat  # (BLOCK + 1, m, columns): before the block's first step, and after each
    u: Mat  # (steps, p, columns), then e
    a_filt: Mat  # (steps, m, columns), then smoothed


class Series(NamedTuple):
    """Series j of a group is number members[j] of all; c and its gradient, the series' or shared.

    Those arrays have a first axis of length 1 where series share them, c a second one of length 1
    where it does not vary.
    """

    members: np.ndarray  # (J,)
    y: np.ndarray  # (all, n, p)
    c: np.ndarray  # (all or 1, n or 1, m)
    weights: np.ndarray  # (all,)
    l: np.ndarray  # (all, n)
    y_bar: np.ndarray  # (all, n, p)
    c_bar: np.ndarray  # as c


@jitable
def lay_out_columns(at, n, p, m, columns, keep_v):
    """Where the columns lie, from the place `at` on, and the place after them."""
    starts = np.empty(10, np.int64)
    v_rows = n * p if keep_v else p
    rows = (1, 1, v_rows, m, m, m, m, (BLOCK + 1) * m, n * p, n * m)
    for k in range(10):
        starts[k] = at
        at += rows[k] * columns
    step = np.int64(1)
    return Columns(
        Mat(starts[0], np.int64(0), step), Mat(starts[1], columns, step),
        Mat(starts[2], columns, step), Mat(starts[3], columns, step),
        Mat(starts[4], columns, step), Mat(starts[5], columns, step),
        Mat(starts[6], columns, step), Mat(starts[7], columns, step),
        Mat(starts[8], columns, step), Mat(starts[9], columns, step),
    ), at  # fmt: skip


@jitable
def gain_of_each_step(steady_from, gains):
    """The step whose gain was saved for step t: the first of its stretch in a steady state."""
    t = len(steady_from) - 1
    while t >= 0:
        first = steady_from[t] if steady_from[t] >= 0 else t
        for k in range(first, t + 1):
            gains[k] = first
        t = first - 1


@jitable
def load_c(w, x, series, first, count, t):
    """The intercepts of step t."""
    for i in range(series.c.shape[2]):
        for j in range(count):
            member = series.members[first + j] if len(series.c) > 1 else 0
            put(w, x.c.at + i * x.c.ld + j, series.c[member, t, i])


@jitable
def hand_over_c(w, A, x, series, first, count, t):
    """Add the weighted columns A (m, columns) to the gradient of c at step t."""
    for j in range(count):
        member = series.members[first + j] if len(series.c) > 1 else 0
        g = get(w, x.g.at + j)
        for i in range(series.c.shape[2]):
            series.c_bar[member, t, i] += g * element(w, A, i, j)


@jitable
def sweep_forward(
    w, x, columns, k, n, model, observed, varying, T_entries, gains, l_of_P, series, first, count,
    keep_v,
):  # fmt: skip
    """The columns of `count` series from member `first` on, through the first n steps of a pass.

    The pass began at step k of the series. x.a holds the state before it. What the covariances give
    to the log-likelihoods is in l_of_P (n,). With `keep_v` v is kept for every step, x.v holds y
    beforehand (zeros in gaps), and no log-likelihoods are written.
    """
    s = space(w)
    _, p, m = sizes(w)
    for t in range(n):
        if t == 0 or varying or observed.same_until[t - 1] == t:
            load_step(w, t, model, observed)
        if t == 0 or series.c.shape[1] > 1:
            load_c(w, x, series, first, count, k + t if series.c.shape[1] > 1 else 0)
        Kf, F_inv = below(s.Kf, gains[t] * p), below(s.F_inv, gains[t] * p)
        u, a_filt = below(x.u, t * p), below(x.a_filt, t * m)
        v = below(x.v, t * p if keep_v else 0)
        if not keep_v:
            for i in range(p):
                here = observed.entries[t, i]
                for j in range(count):
                    y = series.y[series.members[first + j], k + t, i] if here else 0.0
                    put(w, v.at + i * columns + j, y)
        if p == 1:
            row_product(w, v.at, -1.0, s.Z.at, x.a, v.at, m, columns)
            axpy(w, u.at, get(w, F_inv.at), v.at, x.zero.at, columns)
        else:
            product(w, v, -1.0, s.Z, x.a, v, p, m, columns)
            product(w, u, 1.0, F_inv, v, x.zero, p, p, columns)
        if not keep_v:
            for j in range(count):
                square = 0.0
                for i in range(p):
                    square += element(w, v, i, j) * element(w, u, i, j)
                series.l[series.members[first + j], k + t] = l_of_P[t] - 0.5 * square
        if p == 1:
            rank_one(w, a_filt, 1.0, Kf.at, v.at, x.a, m, columns)
        else:
            product(w, a_filt, 1.0, transposed(Kf), v, x.a, m, p, columns)
        if T_entries.sparse:
            sparse_product(w, x.a, s.T, T_entries, a_filt, x.c, m, columns)
        else:
            product(w, x.a, 1.0, s.T, a_filt, x.c, m, m, columns)


@jitable
def sweep_back(
    w, x, columns, k, n, model, observed, varying, T_entries, gains, wanted, series, first, count,
    out,
):  # fmt: skip
    """The way back through the same steps. What the columns give is added to `out`, and to series.

    To series only what the first `count` columns give. x.r holds in its first place what the steps
    that follow left there, and then what comes before these steps; x.u is left with e. T_entries
    are those of T'.
    """
    s = space(w)
    last, p, m = sizes(w)
    filtered = wanted.T or wanted.Z
    clear(w, x.c_bar, m)
    block = 1 if varying else BLOCK
    stop = n
    while stop > 0:
        start = max(0, stop - block)
        copy(w, below(x.r, (stop - start) * m), x.r, m)
        for t in range(stop - 1, start - 1, -1):
            if t < n - 1 and (varying or observed.same_until[t] == t + 1):
                load_step(w, t, model, observed)
            i = t - start
            r, r_next, e = below(x.r, i * m), below(x.r, (i + 1) * m), below(x.u, t * p)
            Kf, a_filt = below(s.Kf, gains[t] * p), below(x.a_filt, t * m)
            if T_entries.sparse:
                sparse_product(w, x.s, s.T_t, T_entries, r_next, x.zero, m, columns)
            else:
                product(w, x.s, 1.0, transposed(s.T), r_next, x.zero, m, m, columns)
            if p == 1:
                row_product(w, e.at, -1.0, Kf.at, x.s, e.at, m, columns)
                rank_one(w, r, 1.0, s.Z.at, e.at, x.s, m, columns)
            else:
                product(w, e, -1.0, Kf, x.s, e, p, m, columns)
                product(w, r, 1.0, transposed(s.Z), e, x.s, m, p, columns)
            if filtered and t < last - 1:  # after the last step r is zero, and there is no TP
                TP = below(s.TP, gains[t] * m)
                product(w, a_filt, 1.0, transposed(TP), r_next, a_filt, m, m, columns)
            if series.c.shape[1] > 1:
                hand_over_c(w, r_next, x, series, first, count, k + t)
            else:
                add(w, x.c_bar, 1.0, r_next, m)
        if wanted.matrices:
            accumulate_columns(w, x, columns, start, stop, wanted)
            if varying:
                hand_over_columns(w, start, wanted, out)
        stop = start
    if wanted.matrices and not varying:
        hand_over_columns(w, stop, wanted, out)
    if series.c.shape[1] == 1:
        hand_over_c(w, x.c_bar, x, series, first, count, 0)


@jitable
def hand_over_y(w, x, k, n, observed, series, first, count):
    """The gradient of y in n steps, from the e that the way back left."""
    p = sizes(w).p
    for j in range(count):
        g, y_bar = get(w, x.g.at + j), series.y_bar[series.members[first + j]]
        for t in range(n):
            for i in range(p):
                if observed.entries[t, i]:
                    y_bar[k + t, i] = -g * element(w, x.u, t * p + i, j)


@jitable
def accumulate_columns(w, x, columns, start, stop, wanted):
    """Sums over the steps start to stop - 1 and over the columns: r r', r a', e e' and e a'."""
    s = space(w)
    _, p, m = sizes(w)
    r_next, e, ahat, g = below(x.r, m), below(x.u, start * p), below(x.a_filt, start * m), x.g.at
    R, E, steps = m * columns, p * columns, stop - start
    if wanted.W:
        gram(w, s.N_sum, r_next, R, r_next, R, g, steps, columns, m, m, True)
    gram(w, s.D_sum, e, E, e, E, g, steps, columns, p, p, True)
    if wanted.T:
        gram(w, s.T_bar, r_next, R, ahat, R, g, steps, columns, m, m, False)
    if wanted.Z:
        gram(w, s.Z_bar, e, E, ahat, R, g, steps, columns, p, m, False)


@jitable
def hand_over_columns(w, t, wanted, out):
    """Add the sums to the gradients of step t, and leave zeros."""
    s = space(w)
    _, p, m = sizes(w)
    if wanted.W:
        add_half(w, s.N_sum, at_step(out.W, t))
    add_half(w, s.D_sum, at_step(out.H, t))
    if wanted.T:
        add_all(w, s.T_bar, at_step(out.T, t))
    if wanted.Z:
        add_all(w, s.Z_bar, at_step(out.Z, t))
    clear_sums(w)


@jitable
def clear_sums(w):
    """Zeros in the sums."""
    s = space(w)
    _, p, m = sizes(w)
    clear(w, s.N_sum, m)
    clear(w, s.D_sum, p)
    clear(w, s.T_bar, m)
    clear(w, s.Z_bar, p)


@jitable
def add_all(w, A, out):
    """Add A to `out` (rows, cols)."""
    rows, cols = out.shape
    for i in range(rows):
        for j in range(cols):
            out[i, j] += element(w, A, i, j)


@jitable
def add_half(w, A, out):
    """Add half of the symmetric A, given on and below its diagonal, to `out`."""
    for i in range(len(out)):
        out[i, i] += 0.5 * element(w, A, i, i)
        for j in range(i):
            x = 0.5 * element(w, A, i, j)
            out[i, j] += x
            out[j, i] += x


@jitable
def add_matrices(out, factor, found):
    """Add what the covariances give, times a factor."""
    out.P0[:] += factor * found.P0
    out.T[:] += factor * found.T
    out.Z[:] += factor * found.Z
    out.H[:] += factor * found.H
    out.W[:] += factor * found.W


@jitable
def sweep(
    w, at, k, model, observed, varying, pattern, gains, l_of_P, wanted, backwards, series, a, out,
):  # fmt: skip
    """All series of a group through the steps of a pass, which began at their step k.

    The pass's gains are in w, where there is room for the columns from the place `at` on. The
    columns of a (m, J) are the states before the pass, and become the r before it. The pass has one
    step at least.
    """
    n, p, m = sizes(w)
    J = len(series.members)
    clear_sums(w)
    for first in range(0, J, WIDTH):
        count = min(WIDTH, J - first)
        columns = padded(count)
        x, _ = lay_out_columns(at, n, p, m, columns, False)
        for place in range(x.zero.at, x.s.at):  # columns beyond the last series stay zero
            put(w, place, 0.0)
        for j in range(count):
            put(w, x.g.at + j, series.weights[series.members[first + j]])
            for i in range(m):
                put(w, x.a.at + i * columns + j, a[i, first + j])
        sweep_forward(
            w, x, columns, k, n, model, observed, varying, pattern.T, gains, l_of_P, series, first,
            count, False,
        )  # fmt: skip
        if not backwards:
            continue
        clear(w, x.r, m)
        sweep_back(
            w, x, columns, k, n, model, observed, varying, pattern.T_t, gains, wanted, series,
            first, count, out,
        )  # fmt: skip
        hand_over_y(w, x, k, n, observed, series, first, count)
        for j in range(count):
            for i in range(m):
                a[i, first + j] = element(w, x.r, i, j)
    return DONE
