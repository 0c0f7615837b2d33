"""The compiled filter: step by step, and where the covariance is in its steady state, many at once.

Labels name the equations of the chapters "The filter and its likelihood" and "Steady state".
"""

from typing import NamedTuple

import numpy as np

from helpers.kalman.compiled import overloads  # noqa: F401 (of the readable text)
from helpers.kalman.compiled.inputs import (
    load,
    load_step,
    load_symmetric,
    load_vectors,
    vectors_vary,
)
from helpers.kalman.compiled.layout import sizes, space
from helpers.kalman.compiled.step import predict, update
from helpers.kalman.compiled.tiles import (
    Mat,
    below,
    clear,
    element,
    get,
    jitable,
    largest_change,
    product,
    put,
    row_product,
    transposed,
)
from helpers.kalman.square_root import LOST, WATCHED, is_past, was_known

# How a pass ended. Zero is what a pass that was cut off would leave, so it is none of them.
DONE, NOT_POSITIVE_DEFINITE, VAGUE = 1, 2, 3

# Two looks at the change of P lie FIRST_LOOK steps apart at first, then an eighth of the steps that
# the search has taken: the search costs little where P never settles, and finds it late by 1/8.
FIRST_LOOK, LOOK_LATER = 4, 8
TELLING = 0.01  # a change below which the next one tells a rate
ROUNDING = 16 * np.finfo(np.float64).eps  # of the change from one step to the next
# What tangents may miss in their steady state, in units of what a covariance may miss in its own.
# Tangents converge as t rho^t where a covariance converges as rho^t.
LATER = 100.0


class Steps(NamedTuple):
    """What a forward pass leaves of each step, for the caller and for the way back."""

    l: np.ndarray  # (n,), log-likelihoods
    steady_from: np.ndarray  # (n,), at the last step of a steady stretch its first step, else -1


@jitable
def shows_vague(w, P, model):
    """Whether some variance of P is below LOST of the most that it was, and P0 not known.

    Not that of a state that is past, of which a smaller one says nothing.
    """
    s = space(w)
    for i in range(sizes(w).m):
        if element(w, P, i, i) < LOST * get(w, s.most.at + i) and is_news(i, model):
            return True
    return False


@jitable
def is_news(i, model):
    """Whether a variance of state i that fell says that P0 was vague."""
    return not is_past(i, model.P0, model.T, model.W) and not was_known(model.P0, model.W[0])


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
        x = max(element(w, P, i, i), element(w, P_next, i, i))
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
def forward(w, y, observed, model, varying, pattern, saved, columns, watch, tol, first, steps):
    """Filter. The memory w is laid out for these sizes and ``saved``, and zero.

    Of T P_filt the `columns` are kept. Returns how it ended and at which step: DONE at n,
    NOT_POSITIVE_DEFINITE at the step whose F is not, or, if `watch`, VAGUE at a step that shows
    that P0 was vague. With tol = 0, a `varying` matrix or before the step `first` no steady state
    is looked for.
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
        steps.l[t] = update(w, a, P, v, u, Kf, F_inv, a_filt, pattern.Z, needed)
        if np.isnan(steps.l[t]):
            return (VAGUE if watch and p > 1 else NOT_POSITIVE_DEFINITE), t
        steps.steady_from[t] = -1
        if watch and taken < WATCHED * m:
            for i in range(p):
                taken += observed.entries[t, i]
            for i in range(m):
                put(w, s.most.at + i, max(get(w, s.most.at + i), element(w, P, i, i)))
        else:
            watch = False
        if t == n - 1:
            clear(w, TP_kept, m)  # what r and N, which are zero, are multiplied by
            return (VAGUE if watch and shows_vague(w, s.P_filt, model) else DONE), n
        predict(w, t, P, F_inv, P_next, TP, pattern.T)
        if not all_kept:
            for i in range(m):
                pick(w, below(TP_kept, i).at, below(TP, i).at, columns)
        if steady:
            end = observed.same_until[t]
            steady_forward(w, y, t, end, model, saved, steps)
            t, steady, since, before, looked = end, False, end, -1.0, end
            continue
        row_product(w, below(s.a, t + 1).at, 1.0, a_filt.at, s.T_t, s.c.at, m, m)

        if watch and shows_vague(w, P_next, model):
            return VAGUE, t
        if (
            tol > 0.0
            and not varying
            and t >= first
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
def steady_forward(w, y, k, end, model, saved, steps):
    """Steps k to end - 1 with the gain of step k: a_{t+1} = L a_t + K (y_t - d) + c."""
    s = space(w)
    _, p, m = sizes(w)
    const = get(w, s.const.at)
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
            x += element(w, s.v, t, i) * element(w, s.u, t, i)
        steps.l[t] = -0.5 * x
        steps.steady_from[t] = -1
    steps.steady_from[end - 1] = k
