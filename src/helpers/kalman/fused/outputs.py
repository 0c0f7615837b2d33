"""All seven outputs of the filter, and their gradient for any cotangents: the text, compiled.

Form 1 of the book with a cotangent on every output. The steps are those of
:mod:`helpers.kalman.recursions`, as in :mod:`helpers.kalman.reference`; only the loop is written
again, for arrays of a shape that compiled code likes.
"""

import numpy as np
from numba import njit

from helpers.kalman.fused import text  # noqa: F401 (lets compiled code call the readable text)
from helpers.kalman.fused.entry import check, contiguous, kept_on_disk
from helpers.kalman.fused.inputs import Arrays
from helpers.kalman.fused.tiles import jitable
from helpers.kalman.recursions import (
    at_step,
    factor,
    mask,
    outer,
    predict,
    pull_observed,
    pull_predict,
    pull_update,
    symmetric,
    update,
)

compiled = njit(cache=True, error_model="numpy", nogil=True)


@jitable
def gaps(y):
    """y (n, p) with zeros for what is missing, and 1.0 where there is something."""
    filled, o = y.copy(), np.ones(y.shape)
    for t in range(y.shape[0]):
        for i in range(y.shape[1]):
            if np.isnan(y[t, i]):
                filled[t, i] = o[t, i] = 0.0
    return filled, o


@jitable
def run(y, model):
    """The seven outputs, and w, u, C^-1, S, Kf and J of each step."""
    y, o = gaps(y)
    n, p = y.shape
    m = len(model.a0)
    I_p, I_m = np.eye(p), np.eye(m)
    a_filt, a_pred = np.full((n, m), np.nan), np.full((n, m), np.nan)
    P_filt, P_pred = np.full((n, m, m), np.nan), np.full((n, m, m), np.nan)
    y_hat, w, u = np.full((n, p), np.nan), np.full((n, p), np.nan), np.full((n, p), np.nan)
    F, C_inv, l = np.full((n, p, p), np.nan), np.full((n, p, p), np.nan), np.full(n, np.nan)
    S, Kf, J = np.full((n, p, m), np.nan), np.full((n, m, p), np.nan), np.full((n, m, m), np.nan)
    a, P = model.a0.copy(), symmetric(model.P0)
    for t in range(n):
        a_pred[t], P_pred[t] = a, P
        d, Z, H = mask(o[t], at_step(model.d, t), at_step(model.Z, t), at_step(model.H, t))
        F[t], logdet, C_inv[t], S[t], Kf[t], J[t], P_filt[t], G = factor(o[t], P, Z, H, I_p, I_m)
        y_hat[t], w[t], u[t], a_filt[t], l[t] = update(y[t], o[t], a, d, Z, logdet, C_inv[t], G)
        W = symmetric(at_step(model.W, t))
        a, P = predict(a_filt[t], P_filt[t], at_step(model.c, t), at_step(model.T, t), W)
    return (a_filt, a_pred, y_hat, P_filt, P_pred, F, l), (w, u, C_inv, S, Kf, J)


@kept_on_disk(compiled)
def filter_outputs(y, a0, P0, c, d, T, Z, H, W):
    """a_filt, a_pred, y_hat, P_filt, P_pred, F, l.

    y (n, p), NaN for a gap; c, d, T, Z, H, W with an axis of length 1 or n in front, of any real
    type and layout. Where F is not positive definite, everything is NaN from there on. ValueError
    if shapes do not fit.
    """
    y = contiguous(y)
    model = Arrays(
        contiguous(a0), contiguous(P0), contiguous(c), contiguous(d), contiguous(T), contiguous(Z),
        contiguous(H), contiguous(W),
    )  # fmt: skip
    check(y, model, y[:, 0])
    return run(y, model)[0]


@kept_on_disk(compiled)
def reverse(
    y, a0, P0, c, d, T, Z, H, W,
    a_filt_bars, a_pred_bars, y_hat_bars, P_filt_bars, P_pred_bars, F_bars, l_bars,
):  # fmt: skip
    """The gradients (as arrays of the model's shapes) and that of y.

    The last seven arguments are the cotangents of the outputs, contiguous; one of length zero
    counts as zero.
    """
    y = contiguous(y)
    model = Arrays(
        contiguous(a0), contiguous(P0), contiguous(c), contiguous(d), contiguous(T), contiguous(Z),
        contiguous(H), contiguous(W),
    )  # fmt: skip
    check(y, model, y[:, 0])
    (a_filt, a_pred, _, P_filt, P_pred, _, _), (ws, us, C_invs, Ss, Kfs, Js) = run(y, model)
    _, o = gaps(y)
    n, p = y.shape
    m = len(model.a0)
    out = Arrays(
        np.zeros(model.a0.shape), np.zeros(model.P0.shape), np.zeros(model.c.shape),
        np.zeros(model.d.shape), np.zeros(model.T.shape), np.zeros(model.Z.shape),
        np.zeros(model.H.shape), np.zeros(model.W.shape),
    )  # fmt: skip
    y_bar = np.zeros((n, p))
    a_bar, P_bar, no_y_hat, no_F = np.zeros(m), np.zeros((m, m)), np.zeros(p), np.zeros((p, p))
    for t in range(n - 1, -1, -1):
        T = at_step(model.T, t)
        _, Z, _ = mask(o[t], at_step(model.d, t), at_step(model.Z, t), at_step(model.H, t))
        at_step(out.c, t)[:] += a_bar
        at_step(out.W, t)[:] += P_bar
        T_bar, s, Pt = pull_predict(a_bar, P_bar, T, a_filt[t], P_bar @ T @ P_filt[t])
        at_step(out.T, t)[:] += T_bar
        if len(a_filt_bars):
            s = s + a_filt_bars[t]
        if len(P_filt_bars):
            Pt = Pt + symmetric(P_filt_bars[t])
        g = l_bars[t] if len(l_bars) else 0.0
        e, Z_bar, H_bar, a_bar, P_bar = pull_update(
            s, Pt, g, ws[t], us[t], C_invs[t], Ss[t], Kfs[t], Js[t], a_filt[t], P_filt[t] @ s,
            Pt @ P_filt[t],
        )  # fmt: skip
        d_more, Z_more, H_more, a_more, P_more = pull_observed(
            y_hat_bars[t] * o[t] if len(y_hat_bars) else no_y_hat,
            symmetric(F_bars[t]) if len(F_bars) else no_F, a_pred[t], P_pred[t], Z,
        )  # fmt: skip
        y_bar[t] = -e * o[t]
        at_step(out.d, t)[:] += (e + d_more) * o[t]
        at_step(out.Z, t)[:] += (Z_bar + Z_more) * o[t][:, None]
        at_step(out.H, t)[:] += (H_bar + H_more) * outer(o[t], o[t])
        a_bar, P_bar = a_bar + a_more, P_bar + P_more
        if len(a_pred_bars):
            a_bar = a_bar + a_pred_bars[t]
        if len(P_pred_bars):
            P_bar = P_bar + symmetric(P_pred_bars[t])
    out.a0[:] = a_bar
    out.P0[:] = P_bar
    return out, y_bar
