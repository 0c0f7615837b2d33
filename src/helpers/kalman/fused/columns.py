"""Columns through the filter and back, compiled: what an exact diffuse start adds to a pass.

The steps are those of :mod:`helpers.kalman.recursions`, as in :mod:`helpers.kalman.diffuse`, whose
loop runs where ``method`` is "reference"; tests hold the two together.
"""

import numpy as np
from numba import njit

from helpers.kalman.fused.entry import check, contiguous, copied, kept_on_disk, zeros_like
from helpers.kalman.fused.steps import gaps, run
from helpers.kalman.recursions import at_step, pull_columns, pull_spread
from helpers.kalman.reference import FilterOutputs

compiled = njit(cache=True, error_model="numpy", nogil=True)


@kept_on_disk(compiled)
def forward(y, a0, P0, c, d, T, Z, H, W, A):
    """The columns A (m, q) through the filter.

    Returns S (q, q), s (q,), the steps' log-likelihoods, and for the way back a_filt, P_filt, C^-1,
    C^-1 Z, Kf, J, and of each step's columns C^-1 Z A_t (p, q) and A_t - Kf Z A_t (m, q).
    """
    y, A = contiguous(y), contiguous(A)
    model = copied(a0, P0, c, d, T, Z, H, W)
    check(y, model, y[:, 0])
    n, p = y.shape
    m, q = A.shape
    out = FilterOutputs(
        np.empty((n, m)), np.empty((n, m)), np.empty((n, p)), np.empty((n, m, m)),
        np.empty((n, m, m)), np.empty((n, p, p)), np.empty(n),
    )  # fmt: skip
    filled, o = gaps(y)
    w, _, C_inv, C_inv_Z, Kf, J = run(filled, o, model, out)
    seen, filtered = np.empty((n, p, q)), np.empty((n, m, q))
    S, s = np.zeros((q, q)), np.zeros(q)
    for t in range(n):
        seen[t], filtered[t] = C_inv_Z[t] @ A, J[t] @ A
        S += seen[t].T @ seen[t]
        s += w[t] @ seen[t]
        A = at_step(model.T, t) @ filtered[t]
    return S, s, out.l, (out.a_filt, out.P_filt, C_inv, C_inv_Z, Kf, J, seen, filtered)


@kept_on_disk(compiled)
def backward(a0, P0, c, d, T, Z, H, W, kept, root, left, delta):
    """What the spread of delta adds to the gradients: the model's, that of y, and rho_0 root."""
    model = copied(a0, P0, c, d, T, Z, H, W)
    a_filt, P_filt, C_inv, C_inv_Z, Kf, J, seen, filtered = kept
    n, p, q = seen.shape
    m = len(model.a0)
    out, y_bar, rho = zeros_like(model), np.zeros((n, p)), np.zeros((m, q))
    for t in range(n - 1, -1, -1):
        eE, aE, rho_before = pull_columns(
            rho, at_step(model.T, t), seen[t] @ root, C_inv[t], C_inv_Z[t], Kf[t], J[t], P_filt[t],
            filtered[t] @ root,
        )  # fmt: skip
        a = a_filt[t] + filtered[t] @ delta
        y_bar[t], c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar = pull_spread(rho, eE, aE, a, left)
        at_step(out.c, t)[:] += c_bar
        at_step(out.d, t)[:] += d_bar
        at_step(out.T, t)[:] += T_bar
        at_step(out.Z, t)[:] += Z_bar
        at_step(out.H, t)[:] += H_bar
        at_step(out.W, t)[:] += W_bar
        rho = rho_before
    out.a0[:] = -(rho @ left)
    out.P0[:] = rho @ rho.T / 2
    return out, y_bar, rho
