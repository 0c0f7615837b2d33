"""The gradient for any cotangents of the filter's outputs, compiled when this module is imported.

It is form 1 of the book with a cotangent on every output: its steps are those of
:mod:`helpers.kalman.recursions`, compiled as they stand. Where series are rotated first, cotangents
of y_hat and F lead to the predicted state.
"""

import numpy as np
from numba import types

from helpers.kalman.compiled.collapse import patterns_in
from helpers.kalman.compiled.door import (
    MODEL,
    ROTATION,
    WAY_BACK,
    address_of,
    call_rotation,
    call_way_back,
    check,
    collapses,
    compiled,
    contiguous,
    copied,
    linked,
    zeros_like,
)
from helpers.kalman.compiled.inputs import Arrays, Wanted
from helpers.kalman.compiled.steps import gaps, room_for_outputs, run
from helpers.kalman.compiled.tiles import jitable
from helpers.kalman.recursions import (
    at_step,
    outer,
    pull_observed,
    pull_predict,
    pull_update,
    rows,
    symmetric,
)
from helpers.kalman.reference import FilterOutputs


@compiled
def reverse(
    y, a0, P0, c, d, T, Z, H, W,
    a_filt_bars, a_pred_bars, y_hat_bars, P_filt_bars, P_pred_bars, F_bars, l_bars,
):  # fmt: skip
    """The gradients (as arrays of the model's shapes) and that of y.

    The last seven arguments are the cotangents of the outputs, contiguous; one of length zero
    counts as zero.
    """
    y = contiguous(y)
    model = copied(a0, P0, c, d, T, Z, H, W)
    check(y, model, y[:, 0])
    (n, p), m = y.shape, len(model.a0)
    bar = FilterOutputs(
        a_filt_bars, a_pred_bars, y_hat_bars, P_filt_bars, P_pred_bars, F_bars, l_bars
    )
    gradient, dy = zeros_like(model), np.zeros((n, p))
    if collapses(y, m, True, 1):
        g = bar.l.copy() if len(bar.l) else np.zeros(n)
        o, patterns = patterns_in(y, model.Z, model.H)
        good, x, Y, rotated, read_off = call_rotation(
            address_of(0, ROTATION), (y, o, patterns, model, g, True, True, True)
        )
        if good:
            Y_bar, few = np.zeros(Y.shape), zeros_like(rotated)
            bars = Arrays(
                gradient.a0, gradient.P0, gradient.c, few.d, gradient.T, few.Z, few.H, gradient.W
            )
            pull(Y, rotated, bars, Y_bar, y, model, gradient, bar)
            wanted = Wanted(True, True, True, True, np.arange(m))
            call_way_back(
                address_of(0, WAY_BACK),
                (x, patterns, g, wanted, read_off, dy, Y_bar, bars, gradient, False),
            )
            return gradient, dy
    pull(y, model, gradient, dy, y, model, gradient, bar)
    return gradient, dy


@jitable
def pull(y, model, gradient, dy, y_seen, seen, seen_gradient, bar):
    """Add the gradients to two: that of the model which is filtered, and that of what is `seen`.

    They are one unless the series are rotated. Writes dy (n, p) of the series that are filtered.
    """
    (n, p), m = y.shape, len(model.a0)
    out, (ys, o), (_, here) = room_for_outputs(n, p, m), gaps(y), gaps(y_seen)
    ws, us, C_invs, Ss, Kfs, Gs = run(ys, o, model, out)
    r, Pi = np.zeros(m), np.zeros((m, m))
    for t in range(n - 1, -1, -1):
        T_t, P_filt_t, o_t = at_step(model.T, t), out.P_filt[t], o[t]
        at_step(gradient.c, t)[:] += r
        at_step(gradient.W, t)[:] += Pi
        more_T, s, Pt = pull_predict(r, Pi, T_t, out.a_filt[t], Pi @ T_t @ P_filt_t)
        at_step(gradient.T, t)[:] += more_T
        if len(bar.a_filt):
            s = s + bar.a_filt[t]
        if len(bar.P_filt):
            Pt = Pt + symmetric(bar.P_filt[t])
        e, more_Z, more_H, r, Pi = pull_update(
            s, Pt, bar.l[t] if len(bar.l) else 0.0, ws[t], us[t], C_invs[t], Ss[t], Kfs[t], Gs[t],
            out.a_filt[t], P_filt_t @ s, Pt @ P_filt_t,
        )  # fmt: skip
        dy[t] = -e * o_t
        at_step(gradient.d, t)[:] += e * o_t
        at_step(gradient.Z, t)[:] += more_Z * o_t[:, None]
        at_step(gradient.H, t)[:] += more_H * outer(o_t, o_t)
        if len(bar.y_hat) or len(bar.F):
            more_r, more_Pi = pull_seen(
                here[t], seen, seen_gradient, bar, t, out.a_pred[t], out.P_pred[t]
            )
            r, Pi = r + more_r, Pi + more_Pi
        if len(bar.a_pred):
            r = r + bar.a_pred[t]
        if len(bar.P_pred):
            Pi = Pi + symmetric(bar.P_pred[t])
    gradient.a0[:] = r
    gradient.P0[:] = Pi


@jitable
def pull_seen(o, model, gradient, bar, t, a, P):
    """Add what cotangents of y_hat and F say at step t of d, Z and H; returns that of a and P."""
    p, Z = len(o), rows(at_step(model.Z, t), o)
    y_hat_bar = bar.y_hat[t] * o if len(bar.y_hat) else np.zeros(p)
    F_bar = symmetric(bar.F[t]) * outer(o, o) if len(bar.F) else np.zeros((p, p))
    more_d, more_Z, more_H, r, Pi = pull_observed(y_hat_bar, F_bar, a, P, Z)
    at_step(gradient.d, t)[:] += more_d
    at_step(gradient.Z, t)[:] += more_Z
    at_step(gradient.H, t)[:] += more_H
    return r, Pi


_COTANGENTS = [types.Array(types.float64, k, "C", readonly=True) for k in (2, 2, 2, 3, 3, 3, 1)]
linked_reverse = linked(reverse, (*MODEL, *_COTANGENTS))
