"""The compiled filter: step by step, and where the covariance is in its steady state, many at once.

Labels name the equations of the chapters "The filter and its likelihood" and "Steady state".
"""

from typing import NamedTuple

import numpy as np

from helpers.kalman.fused import text  # noqa: F401 (lets compiled code call the readable text)
from helpers.kalman.fused.inputs import load, load_step, load_symmetric, load_vectors, vectors_vary
from helpers.kalman.fused.layout import sizes, space
from helpers.kalman.fused.tiles import (
    LANES,
    Mat,
    axpy,
    below,
    clear,
    dot,
    entry,
    get,
    jitable,
    largest_change,
    padded,
    product,
    put,
    put_first,
    rank_one,
    row_product,
    sparse_product,
    sparse_product_transposed,
    sparse_product_updated,
    symmetrize,
    transposed,
)
from helpers.kalman.recursions import LOG_2PI
from helpers.kalman.square_root import LOST, WATCHED, is_past, was_known

# How a pass ended. Zero is what a pass that was cut off would leave, so it is none of them.
DONE, NOT_POSITIVE_DEFINITE, VAGUE = 1, 2, 3

# An update that leaves less than this share of a variance takes Joseph's form: three digits of a
# difference are lost there, and more with every smaller share.
JOSEPH_BELOW = 1e-3
# P and N are made symmetric in every step, from their lower half, where it takes less time than the
# whole; small ones every so many steps, between which they stay symmetric to a few roundings.
SYMMETRIC_EVERY = 4
# Two looks at the change of P lie FIRST_LOOK steps apart at first, then an eighth of the steps that
# the search has taken: the search costs little where P never settles, and finds it late by 1/8.
FIRST_LOOK, LOOK_LATER = 4, 8
TELLING = 0.01  # a change below which the next one tells a rate
ROUNDING = 16 * np.finfo(np.float64).eps  # of the change from one step to the next


class Steps(NamedTuple):
    """What a forward pass leaves of each step, for the caller and for the way back."""

    l: np.ndarray  # (n,), log-likelihoods
    steady_from: np.ndarray  # (n,), at the last step of a steady stretch its first step, else -1


@jitable
def invert_factor(w, F, C_inv, p):
    """C_inv = C^-1, lower triangular, C C' = F; and log|F|, NaN if F is not positive definite."""
    logdet, C = 0.0, C_inv
    for j in range(p):
        x = entry(w, F, j, j)
        for k in range(j):
            x -= entry(w, C, j, k) ** 2
        if not x > 0.0:
            return np.nan
        logdet += np.log(x)
        pivot = np.sqrt(x)
        put(w, C.at + j * C.ld + j, pivot)
        for i in range(j + 1, p):
            x = entry(w, F, i, j)
            for k in range(j):
                x -= entry(w, C, i, k) * entry(w, C, j, k)
            put(w, C.at + i * C.ld + j, x / pivot)
    for j in range(p):  # C <- C^-1
        put(w, C.at + j * C.ld + j, 1.0 / entry(w, C, j, j))
        for i in range(j):
            put(w, C.at + i * C.ld + j, 0.0)
        for i in range(j + 1, p):
            x = 0.0
            for k in range(j, i):
                x -= entry(w, C, i, k) * entry(w, C, k, j)
            put(w, C.at + i * C.ld + j, x / entry(w, C, i, i))
    return logdet


@jitable
def observe(w, P, Z_entries):
    """M = Z P."""
    s = space(w)
    _, p, m = sizes(w)
    if Z_entries.sparse:
        sparse_product(w, s.M, s.Z, Z_entries, P, s.zero, p, m)
    elif p == 1:
        row_product(w, s.M.at, 1.0, s.Z.at, P, s.zero.at, m, m)
    else:
        product(w, s.M, 1.0, s.Z, P, s.zero, p, m, m)


@jitable
def update(w, a, P, v, u, Kf, F_inv, a_filt, Z_entries):
    """The update with the observations that stand in v, NaN where there is none.

    Writes v, u, the transposed gain (def-filter-gain), F^-1, a_filt, P_filt = P - G'G and the
    square v' F^-1 v. Returns log|F| + p log(2 pi), counting what is observed; NaN if F is not
    positive definite. (One number: two would be returned through memory, where they arrive late.)
    """
    s = space(w)
    _, p, m = sizes(w)
    observe(w, P, Z_entries)
    product(w, s.F, 1.0, s.M, s.Z_t, s.H, p, m, p)
    const = invert_factor(w, s.F, s.C_inv, p)
    if np.isnan(const):
        return const
    product(w, F_inv, 1.0, transposed(s.C_inv), s.C_inv, s.zero, p, p, p)
    row_product(w, u.at, -1.0, a.at, s.Z_t, s.zero.at, m, p)
    for i in range(p):
        y = get(w, v.at + i)
        if np.isnan(y):
            put(w, v.at + i, 0.0)
            put(w, F_inv.at + i * F_inv.ld + i, 0.0)
        else:
            const += LOG_2PI
            put(w, v.at + i, y - get(w, s.d.at + i) + get(w, u.at + i))
    square = 0.0
    for i in range(p):
        x = dot(w, s.C_inv.at + i * s.C_inv.ld, v.at, p)
        put(w, s.w.at + i, x)
        square += x * x
    put(w, s.square.at, square)
    row_product(w, u.at, 1.0, s.w.at, s.C_inv, s.zero.at, p, p)
    # The gain in factors, C'^-1 (C^-1 Z P): with F^-1 it would lose eps kappa^2 of T and Z.
    product(w, s.G, 1.0, s.C_inv, s.M, s.zero, p, p, m)
    product(w, Kf, 1.0, transposed(s.C_inv), s.G, s.zero, p, p, m)
    row_product(w, a_filt.at, 1.0, s.w.at, s.G, a.at, p, m)
    product(w, s.P_filt, -1.0, transposed(s.G), s.G, P, m, p, m)
    return const


@jitable
def update_one(w, a, P, v, u, Kf, F_inv, a_filt, Z_entries):
    """`update` where p = 1: F, v and u are numbers, and all but P are places of rows.

    It leaves P_filt to `update_covariance`, or to `predict`.
    """
    s = space(w)
    m = sizes(w).m
    observe(w, P, Z_entries)
    F = get(w, s.H.at) + dot(w, s.M.at, s.Z.at, m)
    if not F > 0.0:
        return np.nan
    v_t, const, inverse, y = 0.0, 0.0, 1.0 / F, get(w, v)
    axpy(w, Kf, inverse, s.M.at, s.zero.at, m)
    if np.isnan(y):
        inverse = 0.0
    else:
        v_t = y - get(w, s.d.at) - dot(w, a, s.Z.at, m)
        const = np.log(F) + LOG_2PI
    put_first(w, v, v_t)
    put_first(w, u, v_t * inverse)
    put_first(w, F_inv, inverse)
    put(w, s.square.at, v_t * v_t * inverse)
    axpy(w, a_filt, v_t, Kf, a, m)
    return const


@jitable
def shrinks(w, before, after, share, m):
    """Whether some variance of the covariance `after` is below `share` of that in `before`."""
    for i in range(m):
        if entry(w, after, i, i) < share * entry(w, before, i, i):
            return True
    return False


@jitable
def shows_vague(w, P, model):
    """Whether some variance of P is below LOST of the most that it was, and P0 not known.

    Not that of a state that is past, of which a smaller one says nothing.
    """
    s = space(w)
    for i in range(sizes(w).m):
        if entry(w, P, i, i) < LOST * get(w, s.most.at + i) and is_news(i, model):
            return True
    return False


@jitable
def is_news(i, model):
    """Whether a variance of state i that fell says that P0 was vague."""
    return not is_past(i, model.P0, model.T, model.W) and not was_known(model.P0, model.W[0])


@jitable
def joseph(w, Kf):
    """P_filt from P - G'G =: X: Joseph's form J P J' + Kf H Kf' = X - (X Z' - Kf H) Kf'."""
    s = space(w)
    _, p, m = sizes(w)
    symmetrize(w, s.P_filt, m)
    product(w, s.Y, -1.0, s.H, Kf, s.zero, p, p, m)
    product(w, s.Y, 1.0, s.Z, s.P_filt, s.Y, p, m, m)
    product(w, s.P_filt, -1.0, transposed(s.Y), Kf, s.P_filt, m, p, m)
    symmetrize(w, s.P_filt, m)


@jitable
def update_covariance(w, P, F_inv):
    """P_filt = P - M'M / F where p = 1. (In a gap M and F^-1 are zero.)"""
    s = space(w)
    m = sizes(w).m
    rank_one(w, s.P_filt, -get(w, F_inv.at), s.M.at, s.M.at, P, m, m)


@jitable
def keeps_variances(w, F_inv):
    """Whether p = 1, and every variance sure to keep some of what it was through the update.

    It keeps at least the share H / F of it (Cauchy, Schwarz).
    """
    return sizes(w).p == 1 and get(w, space(w).H.at) * get(w, F_inv.at) >= JOSEPH_BELOW


@jitable
def updated(w, a, P, v, u, Kf, F_inv, a_filt, Z_entries, needed):
    """`update`, with P_filt in Joseph's form where it leaves little of a variance.

    If it is not `needed`, P_filt is written only where a `predict` by lists cannot do without it.
    """
    s = space(w)
    _, p, m = sizes(w)
    if p > 1:
        const = update(w, a, P, v, u, Kf, F_inv, a_filt, Z_entries)
    else:
        const = update_one(w, a.at, P, v.at, u.at, Kf.at, F_inv.at, a_filt.at, Z_entries)
    if np.isnan(const):
        return const
    sure = keeps_variances(w, F_inv)
    if p == 1 and (needed or not sure):
        update_covariance(w, P, F_inv)
    if not sure and shrinks(w, P, s.P_filt, JOSEPH_BELOW, m):
        joseph(w, Kf)
    return const


@jitable
def made_symmetric(t, m):
    """Whether step t computes a covariance's lower half, from which it becomes symmetric.

    With more than one and a half vectors of rows it takes less time than the whole.
    """
    return 2 * m > 3 * LANES or t % SYMMETRIC_EVERY == 0


@jitable
def predict(w, t, P, F_inv, P_next, TP, T_entries):
    """TP = T P_filt and P_next = TP T' + W, after the update of P that `updated` has made."""
    s = space(w)
    m, lower = sizes(w).m, made_symmetric(t, sizes(w).m)
    if T_entries.sparse:
        clear(w, below(TP, m), padded(m) - m)  # rows that are transposed with the others
        T, zero = s.T, s.zero
        if keeps_variances(w, F_inv):
            share = -get(w, F_inv.at)
            sparse_product_updated(w, s.B, TP, T, T_entries, P, share, s.M.at, zero, m, m)
        else:
            sparse_product_transposed(w, s.B, TP, T, T_entries, s.P_filt, zero, m, m)
        sparse_product(w, P_next, s.T, T_entries, s.B, s.W, m, m, lower)
    else:
        product(w, TP, 1.0, s.T, s.P_filt, s.zero, m, m, m)
        product(w, P_next, 1.0, TP, s.T_t, s.W, m, m, m, lower)
    if lower:
        symmetrize(w, P_next, m)


@jitable
def pick(w, out, row, columns):
    """Copy the entries `columns` of the row at a place to another place."""
    for j in range(len(columns)):
        put(w, out + j, get(w, row + columns[j]))


@jitable
def change(w, P, P_next):
    """max |P_next - P|_ij / sqrt(x_i x_j), x the larger of both variances: how far P moved.

    Whatever the units, and at most 2, but for rounding.
    """
    s = space(w)
    m = sizes(w).m
    for i in range(m):
        x = max(entry(w, P, i, i), entry(w, P_next, i, i))
        put(w, s.row.at + i, 1.0 / x if x > 0.0 else 0.0)
    largest = 0.0
    for i in range(m):
        of_row = largest_change(w, below(P, i).at, below(P_next, i).at, s.row.at, m)
        largest = max(largest, of_row * get(w, s.row.at + i))
    return np.sqrt(largest)


@jitable
def is_time_to_look(waited, searched):
    """At a change of P or N: `waited` steps after the last look, `searched` after the first."""
    return waited >= max(FIRST_LOOK, searched // LOOK_LATER)


@jitable
def is_steady(now, before, steps, tol):
    """Whether what is still to come of the change, were it to shrink at this rate, is below tol.

    A change from which a rate is taken has to be small already: what is the rounding of a variance
    of zero changes by any factor in a step.

    Steady, too, where two looks find no more than rounding: in the steps between them, an eighth of
    all, what was below it has shrunk further, while the rate can no longer be seen.
    """
    if now == 0.0:
        return True
    if not 0.0 < before < TELLING:
        return False
    if now <= ROUNDING and before <= ROUNDING:
        return True
    rate = (now / before) ** (1.0 / steps)
    return rate < 1.0 and now * rate / (1.0 - rate) <= tol


@jitable
def load_start(w, y, model):
    """P0, a0 and y to where the filter reads them."""
    s = space(w)
    n, p, m = sizes(w)
    load_symmetric(w, s.P, model.P0, m)
    for i in range(m):
        put(w, s.a.at + i, model.a0[i])
    clear(w, s.v, n)
    load(w, s.v, y, n, p)


@jitable
def forward(w, y, observed, model, varying, pattern, saved, columns, watch, tol, steps):
    """Filter. The memory w is laid out for these sizes and ``saved``, and zero.

    Of T P_filt the `columns` are kept. Returns how it ended and at which step: DONE at n,
    NOT_POSITIVE_DEFINITE at the step whose F is not, or, if `watch`, VAGUE at a step that shows
    that P0 was vague. With tol = 0 or a `varying` matrix no steady state is looked for.
    """
    s = space(w)
    n, p, m = sizes(w)
    load_start(w, y, model)
    P, P_next = s.P, s.P_next
    taken, steady, before, looked, since, t = 0, False, -1.0, 0, 0, 0
    moving, all_kept = vectors_vary(model), saved.filtered == 0 or saved.filtered == m
    while t < n:
        if t == 0 or moving:
            load_vectors(w, t, model)
        if t == 0 or varying or observed.same_until[t - 1] == t:
            load_step(w, t, model, observed)
            since, before, looked = t, -1.0, t
        a, v, u = below(s.a, t), below(s.v, t), below(s.u, t)
        gain = t if saved.gains else 0
        Kf, F_inv = below(s.Kf, gain * p), below(s.F_inv, gain * p)
        kept = t if saved.filtered else 0
        a_filt, TP_kept = below(s.a_filt, kept), below(s.TP, kept * m)
        TP = TP_kept if all_kept else s.TP_now

        needed = t == n - 1 or not pattern.T.sparse
        const = updated(w, a, P, v, u, Kf, F_inv, a_filt, pattern.Z, needed)
        if np.isnan(const):
            return NOT_POSITIVE_DEFINITE, t
        steps.l[t] = -0.5 * (const + get(w, s.square.at))
        steps.steady_from[t] = -1
        if watch and taken < WATCHED * m:
            for i in range(p):
                taken += observed.entries[t, i]
            for i in range(m):
                put(w, s.most.at + i, max(get(w, s.most.at + i), entry(w, P, i, i)))
        else:
            watch = False
        if t == n - 1:
            return (VAGUE if watch and shows_vague(w, s.P_filt, model) else DONE), n
        predict(w, t, P, F_inv, P_next, TP, pattern.T)
        if not all_kept:
            for i in range(m):
                pick(w, below(TP_kept, i).at, below(TP, i).at, columns)
        if steady:
            end = observed.same_until[t]
            steady_forward(w, y, t, end, model, const, saved, steps)
            t, steady, since, before, looked = end, False, end, -1.0, end
            continue
        row_product(w, below(s.a, t + 1).at, 1.0, a_filt.at, s.T_t, s.c.at, m, m)

        if watch and shows_vague(w, P_next, model):
            return VAGUE, t
        if (
            tol > 0.0
            and not varying
            and is_time_to_look(t - looked, t - since)
            and observed.same_until[t] - t > 2 * FIRST_LOOK
        ):
            now = change(w, P, P_next)
            steady = is_steady(now, before, t - looked, tol)
            before, looked = now, t
        P, P_next = P_next, P
        t += 1
    return DONE, n


@jitable
def steady_forward(w, y, k, end, model, const, saved, steps):
    """Steps k to end - 1 with the gain of step k: a_{t+1} = L a_t + K (y_t - d) + c."""
    s = space(w)
    _, p, m = sizes(w)
    gain = k if saved.gains else 0
    Kf, F_inv = below(s.Kf, gain * p), below(s.F_inv, gain * p)
    v, u, L_t = below(s.v, k), below(s.u, k), s.L
    for t in range(k, end):
        row, step = s.v.at + t * s.v.ld, t if len(model.d) > 1 else 0
        for i in range(p):
            x = y[t, i] - model.d[step, i]
            put(w, row + i, 0.0 if np.isnan(x) else x)
    product(w, s.K, 1.0, Kf, s.T_t, s.zero, p, m, m)
    product(w, L_t, -1.0, transposed(s.Z), s.K, s.T_t, m, p, m)
    c, a_next = Mat(s.c.at, 0, 1), below(s.a, k + 1)
    if len(model.c) > 1:
        c = a_next
        clear(w, c, end - k)
        load(w, c, model.c[k:end], end - k, m)
    product(w, a_next, 1.0, v, s.K, c, end - k, p, m)
    for t in range(k, end):
        a_next = below(s.a, t + 1)
        row_product(w, a_next.at, 1.0, below(s.a, t).at, L_t, a_next.at, m, m)
    product(w, v, -1.0, below(s.a, k), s.Z_t, v, end - k, m, p)
    product(w, u, 1.0, v, F_inv, s.zero, end - k, p, p)
    for t in range(k, end):
        x = const
        for i in range(p):
            x += entry(w, s.v, t, i) * entry(w, s.u, t, i)
        steps.l[t] = -0.5 * x
        steps.steady_from[t] = -1
    steps.steady_from[end - 1] = k
