"""Columns through the filter and back, compiled: what an exact diffuse start adds to a pass.

The lines are those of :mod:`helpers.kalman.diffuse`, which runs them in NumPy where ``method`` is
"reference"; tests hold the two together.
"""

import numpy as np
from numba import njit

from helpers.kalman.fused.entry import check, contiguous, kept_on_disk, zeros_like
from helpers.kalman.fused.inputs import Arrays
from helpers.kalman.fused.steps import gaps, run
from helpers.kalman.recursions import at_step, outer
from helpers.kalman.reference import FilterOutputs

compiled = njit(cache=True, error_model="numpy", nogil=True)


@kept_on_disk(compiled)
def forward(y, a0, P0, c, d, T, Z, H, W, A):
    """The columns A (m, q) through the filter.

    Returns S (q, q), s (q,), the steps' log-likelihoods, and for the way back a_filt, P_filt, C^-1,
    C^-1 Z, Kf, J, and of each step's columns C^-1 Z A_t (p, q) and A_t - Kf Z A_t (m, q).
    """
    y, A = contiguous(y), contiguous(A)
    model = Arrays(
        contiguous(a0), contiguous(P0), contiguous(c), contiguous(d), contiguous(T), contiguous(Z),
        contiguous(H), contiguous(W),
    )  # fmt: skip
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
    model = Arrays(
        contiguous(a0), contiguous(P0), contiguous(c), contiguous(d), contiguous(T), contiguous(Z),
        contiguous(H), contiguous(W),
    )  # fmt: skip
    a_filt, P_filt, C_inv, C_inv_Z, Kf, J, seen, filtered = kept
    n, p, q = seen.shape
    m = len(model.a0)
    out, y_bar, rho = zeros_like(model), np.zeros((n, p)), np.zeros((m, q))
    for t in range(n - 1, -1, -1):
        w = seen[t] @ root
        s = np.ascontiguousarray(at_step(model.T, t).T) @ rho
        eE = np.ascontiguousarray(C_inv[t].T) @ w - np.ascontiguousarray(Kf[t].T) @ s
        aE = P_filt[t] @ s - filtered[t] @ root
        move, back = rho @ left, eE @ left
        a = a_filt[t] + filtered[t] @ delta
        y_bar[t] = back
        at_step(out.c, t)[:] -= move
        at_step(out.d, t)[:] -= back
        aE_t = np.ascontiguousarray(aE.T)
        at_step(out.T, t)[:] += rho @ aE_t - outer(move, a)
        at_step(out.Z, t)[:] += eE @ aE_t - outer(back, a)
        at_step(out.H, t)[:] += eE @ np.ascontiguousarray(eE.T) / 2
        at_step(out.W, t)[:] += rho @ np.ascontiguousarray(rho.T) / 2
        rho = np.ascontiguousarray(J[t].T) @ s + np.ascontiguousarray(C_inv_Z[t].T) @ w
    out.a0[:] = -(rho @ left)
    out.P0[:] = rho @ np.ascontiguousarray(rho.T) / 2
    return out, y_bar, rho
