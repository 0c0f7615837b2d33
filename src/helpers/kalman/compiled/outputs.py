"""All seven outputs of the filter, and their gradient for any cotangents.

The outputs are copied from the steps of :mod:`helpers.kalman.compiled.forward`. The gradient is
form 1 of the book with a cotangent on every output: its steps are those of
:mod:`helpers.kalman.recursions`, compiled as they stand. Like the pass of
:mod:`helpers.kalman.compiled.door` both are called by their addresses, and compiled when this
module is imported: a function of PyTensor that calls them does not carry them.
"""

import numpy as np
from numba import types

from helpers.kalman.compiled.door import (
    MODEL,
    check,
    compiled,
    contiguous,
    copied,
    linked,
    room_in,
    zeros_like,
)
from helpers.kalman.compiled.inputs import indices_in, look, varies
from helpers.kalman.compiled.layout import HEADER, Saved, Sizes, lay_out_together
from helpers.kalman.compiled.one_pass import clean
from helpers.kalman.compiled.steps import filter_steps, gaps, run
from helpers.kalman.compiled.tiles import jitable
from helpers.kalman.recursions import (
    at_step,
    mask,
    outer,
    pull_observed,
    pull_predict,
    pull_update,
    symmetric,
)
from helpers.kalman.reference import FilterOutputs


@compiled
def filter_outputs(y, a0, P0, c, d, T, Z, H, W):
    """a_filt, a_pred, y_hat, P_filt, P_pred, F, l.

    y (n, p), NaN for a gap; c, d, T, Z, H, W with an axis of length 1 or n in front, in any
    layout. Where F is not positive definite, everything is NaN from there on. ValueError if shapes
    do not fit, MemoryError if there is not enough.
    """
    y = contiguous(y)
    model = copied(a0, P0, c, d, T, Z, H, W)
    check(y, model, y[:, 0])
    (n, p), m = y.shape, len(model.a0)
    out, plan = room_for_outputs(n, p, m), np.empty(HEADER, np.int64)
    memory = np.empty(lay_out_together(Sizes(n, p, m), Saved(False, 0), plan) + 8)
    room = room_in(memory, plan, n, p, m)
    clean(room.w)
    observed, pattern = look(y, model, room.entries, indices_in(room.indices, n, p, m))
    filter_steps(room.w, y, observed, model, varies(model), pattern, out)
    memory[0], room.indices[0] = 0.0, 0  # Numba frees an array after its last use
    return out.a_filt, out.a_pred, out.y_hat, out.P_filt, out.P_pred, out.F, out.l


@jitable
def room_for_outputs(n, p, m):
    """The seven outputs, to be filled."""
    return FilterOutputs(
        np.empty((n, m)), np.empty((n, m)), np.empty((n, p)), np.empty((n, m, m)),
        np.empty((n, m, m)), np.empty((n, p, p)), np.empty(n),
    )  # fmt: skip


linked_filter_outputs = linked(filter_outputs, MODEL)


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
    gradient, dy, out = zeros_like(model), np.zeros((n, p)), room_for_outputs(n, p, m)
    ys, o = gaps(y)
    ws, us, C_invs, Ss, Kfs, Gs = run(ys, o, model, out)
    r, Pi, no_y_hat, no_F = np.zeros(m), np.zeros((m, m)), np.zeros(p), np.zeros((p, p))
    for t in range(n - 1, -1, -1):
        T_t, P_filt_t, o_t = at_step(model.T, t), out.P_filt[t], o[t]
        _, Z_t, _ = mask(o_t, at_step(model.d, t), at_step(model.Z, t), at_step(model.H, t))
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
        d_seen, Z_seen, H_seen, r_seen, Pi_seen = pull_observed(
            bar.y_hat[t] * o_t if len(bar.y_hat) else no_y_hat,
            symmetric(bar.F[t]) if len(bar.F) else no_F, out.a_pred[t], out.P_pred[t], Z_t,
        )  # fmt: skip
        dy[t] = -e * o_t
        at_step(gradient.d, t)[:] += (e + d_seen) * o_t
        at_step(gradient.Z, t)[:] += (more_Z + Z_seen) * o_t[:, None]
        at_step(gradient.H, t)[:] += (more_H + H_seen) * outer(o_t, o_t)
        r, Pi = r + r_seen, Pi + Pi_seen
        if len(bar.a_pred):
            r = r + bar.a_pred[t]
        if len(bar.P_pred):
            Pi = Pi + symmetric(bar.P_pred[t])
    gradient.a0[:] = r
    gradient.P0[:] = Pi
    return gradient, dy


_COTANGENTS = [types.Array(types.float64, k, "C", readonly=True) for k in (2, 2, 2, 3, 3, 3, 1)]
linked_reverse = linked(reverse, (*MODEL, *_COTANGENTS))
