"""The filter's steps with all that they give: in tiles, and as the text in a loop."""

import numpy as np

from helpers.kalman.compiled import (
    forward,
    overloads,  # noqa: F401 (lets compiled code call the readable text)
    step,
)
from helpers.kalman.compiled.inputs import load_step, load_vectors, vectors_vary
from helpers.kalman.compiled.layout import sizes, space
from helpers.kalman.compiled.tiles import below, dot, element, get, jitable, row_product
from helpers.kalman.recursions import at_step, factor, mask, predict, symmetric, update
from helpers.kalman.reference import FilterOutputs


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
def room_for_outputs(n, p, m):
    """The seven outputs, to be filled."""
    return FilterOutputs(
        np.empty((n, m)), np.empty((n, m)), np.empty((n, p)), np.empty((n, m, m)),
        np.empty((n, m, m)), np.empty((n, p, p)), np.empty(n),
    )  # fmt: skip


@jitable
def run(y, o, model, out):
    """Write the seven outputs; returns w, u, C^-1, S, Kf and G of each step."""
    n, p = y.shape
    m = len(model.a0)
    I_p = np.eye(p)
    w, u, C_inv = np.empty((n, p)), np.empty((n, p)), np.empty((n, p, p))
    S, Kf, G = np.empty((n, p, m)), np.empty((n, m, p)), np.empty((n, p, m))
    a, P = model.a0.copy(), symmetric(model.P0)
    for t in range(n):
        out.a_pred[t], out.P_pred[t] = a, P
        d, Z, H = mask(o[t], at_step(model.d, t), at_step(model.Z, t), at_step(model.H, t))
        out.F[t], logdet, C_inv[t], S[t], Kf[t], G[t], P_filt = factor(o[t], P, Z, H, I_p)
        out.y_hat[t], w[t], u[t], a_filt, out.l[t] = update(
            y[t], o[t], a, d, Z, logdet, C_inv[t], G[t]
        )
        out.a_filt[t], out.P_filt[t] = a_filt, P_filt
        W = symmetric(at_step(model.W, t))
        a, P = predict(a_filt, P_filt, at_step(model.c, t), at_step(model.T, t), W)
    return w, u, C_inv, S, Kf, G


@jitable
def store_row(w, place, out):
    """Write the row that begins at a place to `out`, a vector."""
    for i in range(len(out)):
        out[i] = get(w, place + i)


@jitable
def store_symmetric(w, A, out):
    """Write the mean of A and A' to `out` (rows, rows)."""
    for i in range(len(out)):
        for j in range(i + 1):
            out[i, j] = out[j, i] = 0.5 * (element(w, A, i, j) + element(w, A, j, i))


@jitable
def store_observed(w, t, observed, out):
    """The prediction of y at step t and its covariance F, after the update; zeros for gaps."""
    s = space(w)
    _, p, m = sizes(w)
    for i in range(p):
        here = observed.entries[t, i]
        of_a = get(w, s.d.at + i) + dot(w, s.a.at + t * s.a.ld, s.Z.at + i * s.Z.ld, m)
        out.y_hat[t, i] = of_a if here else 0.0
        for j in range(i + 1):  # the update has left Z P in M
            F = element(w, s.H, i, j) + dot(w, s.M.at + i * s.M.ld, s.Z.at + j * s.Z.ld, m)
            out.F[t, i, j] = out.F[t, j, i] = F if here and observed.entries[t, j] else 0.0


@jitable
def filter_steps(w, y, observed, model, varying, pattern, out):
    """Write all outputs; NaN from the step on at which F is not positive definite."""
    s = space(w)
    n, p, m = sizes(w)
    forward.load_start(w, y, model)
    P, P_next, moving = s.P, s.P_next, vectors_vary(model)
    for t in range(n):
        if t == 0 or moving:
            load_vectors(w, t, model)
        if t == 0 or varying or observed.same_until[t - 1] == t:
            load_step(w, t, model, observed)
        a = below(s.a, t)
        store_row(w, a.at, out.a_pred[t])
        store_symmetric(w, P, out.P_pred[t])
        out.l[t] = step.update(
            w, a, P, below(s.v, t), below(s.u, t), s.Kf, s.F_inv, s.a_filt, pattern.Z, True
        )
        if np.isnan(out.l[t]):
            for X in (out.a_filt, out.a_pred, out.y_hat):
                X[t:] = np.nan
            for X in (out.P_filt, out.P_pred, out.F):
                X[t:] = np.nan
            out.l[t:] = np.nan
            return
        store_observed(w, t, observed, out)
        store_row(w, s.a_filt.at, out.a_filt[t])
        store_symmetric(w, s.P_filt, out.P_filt[t])
        step.predict(w, t, P, s.F_inv, P_next, s.TP, pattern.T)
        row_product(w, below(s.a, t + 1).at, 1.0, s.a_filt.at, s.T_t, s.c.at, m, m)
        P, P_next = P_next, P
