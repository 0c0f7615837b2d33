"""All seven outputs of the filter, and their gradient for any cotangents, compiled.

The plain counterpart of `helpers.kalman.kernels`: form 1 of the book (the reverse recursion), with
a cotangent on every output, written as in `helpers.kalman.reference` and compiled as it stands.
"""

import numpy as np
from numba import njit

from helpers.kalman.workspace import Arrays, at_step, seen

LOG_2PI = np.log(2 * np.pi)

jit = njit(cache=True, error_model="numpy", nogil=True)


@jit
def turned(A):
    return np.ascontiguousarray(A.T)


@jit
def symmetric(A):
    return (A + A.T) / 2


@jit
def invert(F, observed):
    """F^-1 with zeros for what is missing, and log|F| of what is observed; NaN if not positive."""
    p = len(F)
    C = np.zeros((p, p))  # C C' = F, with a one on the diagonal of what is missing
    logdet = 0.0
    for j in range(p):
        x = (F[j, j] if observed[j] else 1.0) - np.sum(C[j, :j] ** 2)
        if not x > 0.0:
            return F, np.nan
        C[j, j] = np.sqrt(x)
        logdet += np.log(x)
        for i in range(j + 1, p):
            C[i, j] = (F[i, j] - np.sum(C[i, :j] * C[j, :j])) / C[j, j]
    C_inv = np.zeros((p, p))
    for j in range(p):
        C_inv[j, j] = 1 / C[j, j]
        for i in range(j + 1, p):
            C_inv[i, j] = -np.sum(C[i, j:i] * C_inv[j:i, j]) / C[i, i]
    F_inv = turned(C_inv) @ C_inv
    for i in range(p):
        if not observed[i]:
            F_inv[i, i] = 0.0
    return F_inv, logdet


@jit
def mask(y_t, d, Z, H, observed):
    """y, d, Z and H of one step, zero where y is missing."""
    y_t, d, Z, H = y_t.copy(), d.copy(), Z.copy(), symmetric(H)
    for i in range(len(y_t)):
        if not observed[i]:
            y_t[i] = d[i] = 0.0
            Z[i] = 0.0
            H[i] = 0.0
            H[:, i] = 0.0
    return y_t, d, Z, H


@jit
def filter_outputs(y, a0, P0, c, d, T, Z, R, H, Q):
    """a_filt, a_pred, y_hat, P_filt, P_pred, F, l, and for the way back u, F_inv and Kf.

    y (n, p), NaN for a gap; c, d, T, Z, R, H, Q with an axis of length 1 or n in front. Where F is
    not positive definite, everything is NaN from there on.
    """
    n, p = y.shape
    m = len(a0)
    observed, _ = seen(y)
    a_filt, a_pred = np.full((n, m), np.nan), np.full((n, m), np.nan)
    P_filt, P_pred = np.full((n, m, m), np.nan), np.full((n, m, m), np.nan)
    y_hat, u, l = np.full((n, p), np.nan), np.full((n, p), np.nan), np.full(n, np.nan)
    F, F_inv = np.full((n, p, p), np.nan), np.full((n, p, p), np.nan)
    Kf = np.full((n, m, p), np.nan)
    a, P = a0.copy(), symmetric(P0)
    for t in range(n):
        y_t, d_t, Z_t, H_t = mask(y[t], at_step(d, t), at_step(Z, t), at_step(H, t), observed[t])
        a_pred[t], P_pred[t] = a, P
        y_hat[t] = Z_t @ a + d_t
        v = y_t - y_hat[t]
        ZP = Z_t @ P
        F[t] = symmetric(ZP @ turned(Z_t) + H_t)
        F_inv[t], logdet = invert(F[t], observed[t])
        if np.isnan(logdet):
            break
        u[t] = F_inv[t] @ v
        Kf[t] = turned(ZP) @ F_inv[t]
        a_filt[t] = a + Kf[t] @ v
        J = np.eye(m) - Kf[t] @ Z_t
        P_filt[t] = symmetric(J @ P @ turned(J) + Kf[t] @ H_t @ turned(Kf[t]))
        l[t] = -(observed[t].sum() * LOG_2PI + logdet + np.sum(v * u[t])) / 2
        T_t, R_t = np.ascontiguousarray(at_step(T, t)), np.ascontiguousarray(at_step(R, t))
        a = T_t @ a_filt[t] + at_step(c, t)
        RQ = R_t @ symmetric(at_step(Q, t))
        P = symmetric(T_t @ P_filt[t] @ turned(T_t) + RQ @ turned(R_t))
    return a_filt, a_pred, y_hat, P_filt, P_pred, F, l, u, F_inv, Kf


@jit
def reverse(
    y, a0, P0, c, d, T, Z, R, H, Q,
    a_filt_bars, a_pred_bars, y_hat_bars, P_filt_bars, P_pred_bars, F_bars, l_bars,
):  # fmt: skip
    """The log-likelihoods, the gradients (as arrays of the model's shapes) and that of y.

    The last seven arguments are the cotangents of the outputs; one of length zero counts as zero.
    """
    a_filt, a_pred, _, P_filt, P_pred, _, l, us, F_invs, Kfs = filter_outputs(
        y, a0, P0, c, d, T, Z, R, H, Q
    )
    n, p = y.shape
    m = len(a0)
    observed, _ = seen(y)
    out = Arrays(
        np.zeros(a0.shape), np.zeros(P0.shape), np.zeros(c.shape), np.zeros(d.shape),
        np.zeros(T.shape), np.zeros(Z.shape), np.zeros(R.shape), np.zeros(H.shape),
        np.zeros(Q.shape),
    )  # fmt: skip
    y_bar = np.zeros((n, p))
    a_bar, P_bar = np.zeros(m), np.zeros((m, m))
    for t in range(n - 1, -1, -1):
        y_t, d_t, Z_t, H_t = mask(y[t], at_step(d, t), at_step(Z, t), at_step(H, t), observed[t])
        T_t, R_t = np.ascontiguousarray(at_step(T, t)), np.ascontiguousarray(at_step(R, t))
        u, F_inv, Kf = us[t], F_invs[t], Kfs[t]
        Kf_t, Z_tt = turned(Kf), turned(Z_t)
        l_bar = l_bars[t] if len(l_bars) else 0.0
        y_hat_bar = y_hat_bars[t] * observed[t] if len(y_hat_bars) else np.zeros(p)
        F_bar = symmetric(F_bars[t]) if len(F_bars) else np.zeros((p, p))

        at_step(out.c, t)[:] += a_bar
        PR = P_bar @ R_t
        at_step(out.R, t)[:] += 2 * PR @ symmetric(at_step(Q, t))
        at_step(out.Q, t)[:] += symmetric(turned(R_t) @ PR)
        PT = P_bar @ T_t
        at_step(out.T, t)[:] += np.outer(a_bar, a_filt[t]) + 2 * PT @ P_filt[t]
        a_filt_bar = turned(T_t) @ a_bar
        if len(a_filt_bars):
            a_filt_bar += a_filt_bars[t]
        P_filt_bar = symmetric(turned(T_t) @ PT)
        if len(P_filt_bars):
            P_filt_bar += symmetric(P_filt_bars[t])

        w = Kf_t @ a_filt_bar
        v_bar = w - l_bar * u
        KP = Kf_t @ P_filt_bar
        dl_dF = l_bar * (np.outer(u, u) - F_inv) / 2
        F_all = dl_dF + F_bar
        H_bar = F_all + symmetric(KP @ Kf - np.outer(w, u))
        Z_bar = (
            np.outer(u, P_filt[t] @ a_filt_bar)
            - 2 * KP @ P_filt[t]
            - l_bar * Kf_t
            - np.outer(v_bar, a_filt[t])
            + np.outer(y_hat_bar, a_pred[t])
            + 2 * F_bar @ Z_t @ P_pred[t]
        )
        d_out, Z_out, H_out = at_step(out.d, t), at_step(out.Z, t), at_step(out.H, t)
        for i in range(p):
            if observed[t, i]:
                y_bar[t, i] = v_bar[i]
                d_out[i] += y_hat_bar[i] - v_bar[i]
                Z_out[i] += Z_bar[i]
                for j in range(p):
                    if observed[t, j]:
                        H_out[i, j] += H_bar[i, j]

        J = np.eye(m) - Kf @ Z_t
        a_filt_bar = turned(J) @ a_filt_bar
        a_bar = a_filt_bar + Z_tt @ (l_bar * u + y_hat_bar)
        P_bar = symmetric(
            turned(J) @ P_filt_bar @ J + np.outer(a_filt_bar, Z_tt @ u) + Z_tt @ F_all @ Z_t
        )
        if len(a_pred_bars):
            a_bar += a_pred_bars[t]
        if len(P_pred_bars):
            P_bar += symmetric(P_pred_bars[t])
    out.a0[:] = a_bar
    out.P0[:] = P_bar
    return l, out, y_bar
