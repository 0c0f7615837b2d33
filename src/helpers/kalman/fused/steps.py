"""The filter's steps for compiled code: the text, in a loop, with everything kept."""

import numpy as np

from helpers.kalman.fused import text  # noqa: F401 (lets compiled code call the readable text)
from helpers.kalman.fused.tiles import jitable
from helpers.kalman.recursions import at_step, factor, mask, predict, symmetric, update


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
def run(y, o, model, out):
    """Write the seven outputs; returns w, u, C^-1, S, Kf and J of each step."""
    n, p = y.shape
    m = len(model.a0)
    I_p, I_m = np.eye(p), np.eye(m)
    w, u, C_inv = np.empty((n, p)), np.empty((n, p)), np.empty((n, p, p))
    S, Kf, J = np.empty((n, p, m)), np.empty((n, m, p)), np.empty((n, m, m))
    a, P = model.a0.copy(), symmetric(model.P0)
    for t in range(n):
        out.a_pred[t], out.P_pred[t] = a, P
        d, Z, H = mask(o[t], at_step(model.d, t), at_step(model.Z, t), at_step(model.H, t))
        out.F[t], logdet, C_inv[t], S[t], Kf[t], J[t], P_filt, G = factor(o[t], P, Z, H, I_p, I_m)
        out.y_hat[t], w[t], u[t], a_filt, out.l[t] = update(
            y[t], o[t], a, d, Z, logdet, C_inv[t], G
        )
        out.a_filt[t], out.P_filt[t] = a_filt, P_filt
        W = symmetric(at_step(model.W, t))
        a, P = predict(a_filt, P_filt, at_step(model.c, t), at_step(model.T, t), W)
    return w, u, C_inv, S, Kf, J
