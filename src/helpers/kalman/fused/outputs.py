"""All seven outputs of the filter, and their gradient for any cotangents.

The outputs are copied from the steps of :mod:`helpers.kalman.fused.forward`. The gradient is form 1
of the book with a cotangent on every output: its steps are those of
:mod:`helpers.kalman.recursions`, compiled as they stand. Like the pass of
:mod:`helpers.kalman.fused.entry` both are called by their addresses, and compiled when this module
is imported: a function of PyTensor that calls them does not carry them.
"""

import numpy as np
from numba import carray, types

from helpers.kalman.fused.entry import (
    INTEGERS,
    MODEL,
    OUT_OF_MEMORY,
    REALS,
    bundle,
    check,
    compiled_once,
    contiguous,
    copied,
    kept_on_disk,
    linked,
    zeros_like,
)
from helpers.kalman.fused.forward import DONE
from helpers.kalman.fused.inputs import indices_in, look, room_for_indices, varies
from helpers.kalman.fused.layout import HEADER, Saved, Sizes, begin, lay_out_together
from helpers.kalman.fused.one_pass import clean
from helpers.kalman.fused.steps import filter_steps, gaps, run
from helpers.kalman.fused.tiles import jitable
from helpers.kalman.on_disk import njit
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

# Addresses of the sizes, of y and the model, and of the outputs; of their cotangents, the gradient.
FILTER = types.int64(INTEGERS, *[REALS] * 16)
REVERSE = types.int64(INTEGERS, *[REALS] * 25)


@jitable
def outputs_of(sizes, a_filt, a_pred, y_hat, P_filt, P_pred, F, l):
    """The seven outputs, or their cotangents, by their addresses."""
    n, p, m = sizes[0], sizes[1], sizes[2]
    return FilterOutputs(
        carray(a_filt, (n, m)), carray(a_pred, (n, m)), carray(y_hat, (n, p)),
        carray(P_filt, (n, m, m)), carray(P_pred, (n, m, m)), carray(F, (n, p, p)), carray(l, n),
    )  # fmt: skip


def _filter_outputs(
    sizes, y, a0, P0, c, d, T, Z, H, W, a_filt, a_pred, y_hat, P_filt, P_pred, F, l
):  # fmt: skip
    """``sizes`` are n, p, m and the lengths over time of c, d, T, Z, H, W. Returns DONE."""
    num = carray(sizes, 9)
    n, p, m = num[0], num[1], num[2]
    model = bundle(num, a0, P0, c, d, T, Z, H, W)
    out = outputs_of(num, a_filt, a_pred, y_hat, P_filt, P_pred, F, l)
    plan = np.empty(HEADER, np.int64)
    memory = np.empty(lay_out_together(Sizes(n, p, m), Saved(False, 0), plan) + 8)
    w = memory.ctypes.data + 8 * begin(memory, plan)
    clean(w)
    room = np.empty(room_for_indices(n, p, m), np.int64)
    ys = carray(y, (n, p))
    found = indices_in(room, n, p, m)
    observed, pattern = look(ys, model, np.empty((n, p), np.uint8), found)
    filter_steps(w, ys, observed, model, varies(model), pattern, out)
    memory[0], room[0] = 0.0, 0  # their addresses were good until here
    return DONE


_call_filter_outputs = compiled_once(_filter_outputs, FILTER, "helpers_kalman_outputs")


def _reverse(
    sizes, y, a0, P0, c, d, T, Z, H, W, a_filt, a_pred, y_hat, P_filt, P_pred, F, l,
    a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar, y_bar,
):  # fmt: skip
    """As `_filter_outputs`, with the cotangents for the outputs; and ``sizes`` says which there
    are (0 for none, seven more entries). The gradients are given as zeros."""
    num = carray(sizes, 16)
    n, p, m = num[0], num[1], num[2]
    model = bundle(num, a0, P0, c, d, T, Z, H, W)
    bar = outputs_of(num, a_filt, a_pred, y_hat, P_filt, P_pred, F, l)
    gradient = bundle(num, a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar)
    dy = carray(y_bar, (n, p))
    out = FilterOutputs(
        np.empty((n, m)), np.empty((n, m)), np.empty((n, p)), np.empty((n, m, m)),
        np.empty((n, m, m)), np.empty((n, p, p)), np.empty(n),
    )  # fmt: skip
    ys, o = gaps(carray(y, (n, p)))
    ws, us, C_invs, Ss, Kfs, Gs = run(ys, o, model, out)
    r, Pi, no_y_hat, no_F = np.zeros(m), np.zeros((m, m)), np.zeros(p), np.zeros((p, p))
    for t in range(n - 1, -1, -1):
        T_t, P_filt_t, o_t = at_step(model.T, t), out.P_filt[t], o[t]
        _, Z_t, _ = mask(o_t, at_step(model.d, t), at_step(model.Z, t), at_step(model.H, t))
        at_step(gradient.c, t)[:] += r
        at_step(gradient.W, t)[:] += Pi
        more_T, s, Pt = pull_predict(r, Pi, T_t, out.a_filt[t], Pi @ T_t @ P_filt_t)
        at_step(gradient.T, t)[:] += more_T
        if num[9]:
            s = s + bar.a_filt[t]
        if num[12]:
            Pt = Pt + symmetric(bar.P_filt[t])
        e, more_Z, more_H, r, Pi = pull_update(
            s, Pt, bar.l[t] if num[15] else 0.0, ws[t], us[t], C_invs[t], Ss[t], Kfs[t], Gs[t],
            out.a_filt[t], P_filt_t @ s, Pt @ P_filt_t,
        )  # fmt: skip
        d_seen, Z_seen, H_seen, r_seen, Pi_seen = pull_observed(
            bar.y_hat[t] * o_t if num[11] else no_y_hat,
            symmetric(bar.F[t]) if num[14] else no_F, out.a_pred[t], out.P_pred[t], Z_t,
        )  # fmt: skip
        dy[t] = -e * o_t
        at_step(gradient.d, t)[:] += (e + d_seen) * o_t
        at_step(gradient.Z, t)[:] += (more_Z + Z_seen) * o_t[:, None]
        at_step(gradient.H, t)[:] += (more_H + H_seen) * outer(o_t, o_t)
        r, Pi = r + r_seen, Pi + Pi_seen
        if num[10]:
            r = r + bar.a_pred[t]
        if num[13]:
            Pi = Pi + symmetric(bar.P_pred[t])
    gradient.a0[:] = r
    gradient.P0[:] = Pi
    return DONE


_call_reverse = compiled_once(_reverse, REVERSE, "helpers_kalman_outputs_reverse")


@kept_on_disk(njit(error_model="numpy", nogil=True))
def filter_outputs(y, a0, P0, c, d, T, Z, H, W):
    """a_filt, a_pred, y_hat, P_filt, P_pred, F, l.

    y (n, p), NaN for a gap; c, d, T, Z, H, W with an axis of length 1 or n in front, of any real
    type and layout. Where F is not positive definite, everything is NaN from there on. ValueError
    if shapes do not fit, MemoryError if there is not enough.
    """
    y = contiguous(y)
    model = copied(a0, P0, c, d, T, Z, H, W)
    check(y, model, y[:, 0])
    n, p = y.shape
    m = len(model.a0)
    sizes = np.array(
        [n, p, m, len(model.c), len(model.d), len(model.T), len(model.Z), len(model.H),
         len(model.W)]
    )  # fmt: skip
    a_filt, a_pred, y_hat = np.empty((n, m)), np.empty((n, m)), np.empty((n, p))
    P_filt, P_pred = np.empty((n, m, m)), np.empty((n, m, m))
    F, l = np.empty((n, p, p)), np.empty(n)
    how = _call_filter_outputs(
        sizes.ctypes, y.ctypes, model.a0.ctypes, model.P0.ctypes, model.c.ctypes, model.d.ctypes,
        model.T.ctypes, model.Z.ctypes, model.H.ctypes, model.W.ctypes, a_filt.ctypes,
        a_pred.ctypes, y_hat.ctypes, P_filt.ctypes, P_pred.ctypes, F.ctypes, l.ctypes,
    )  # fmt: skip
    if how != DONE:
        raise MemoryError(OUT_OF_MEMORY)
    return a_filt, a_pred, y_hat, P_filt, P_pred, F, l


linked_filter_outputs = linked(filter_outputs, MODEL)


@kept_on_disk(njit(error_model="numpy", nogil=True))
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
    n, p = y.shape
    sizes = np.array(
        [n, p, len(model.a0), len(model.c), len(model.d), len(model.T), len(model.Z), len(model.H),
         len(model.W), len(a_filt_bars), len(a_pred_bars), len(y_hat_bars), len(P_filt_bars),
         len(P_pred_bars), len(F_bars), len(l_bars)]
    )  # fmt: skip
    out, y_bar = zeros_like(model), np.zeros((n, p))
    how = _call_reverse(
        sizes.ctypes, y.ctypes, model.a0.ctypes, model.P0.ctypes, model.c.ctypes, model.d.ctypes,
        model.T.ctypes, model.Z.ctypes, model.H.ctypes, model.W.ctypes, a_filt_bars.ctypes,
        a_pred_bars.ctypes, y_hat_bars.ctypes, P_filt_bars.ctypes, P_pred_bars.ctypes,
        F_bars.ctypes, l_bars.ctypes, out.a0.ctypes, out.P0.ctypes, out.c.ctypes, out.d.ctypes,
        out.T.ctypes, out.Z.ctypes, out.H.ctypes, out.W.ctypes, y_bar.ctypes,
    )  # fmt: skip
    if how != DONE:
        raise MemoryError(OUT_OF_MEMORY)
    return out, y_bar


linked_reverse = linked(
    reverse, (*MODEL, *[types.Array(types.float64, k, "C") for k in (2, 2, 2, 3, 3, 3, 1)])
)
