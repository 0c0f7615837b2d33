"""The second form of the gradient as a plain Numba loop: the readable text of a step, compiled.

No products in registers, no non-zeros of T, no steady state, memory as NumPy gives it: what is left
of the ratios here is the derivation, and what is gained beyond it is the engineering.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable

import numpy as np
from numba import njit

from helpers.kalman import StateSpace
from helpers.kalman.compiled import inputs  # noqa: F401 (registers what `run` calls)
from helpers.kalman.compiled.steps import gaps, run
from helpers.kalman.recursions import pull_smooth
from helpers.kalman.reference import FilterOutputs
from helpers.statespace import NAMES, STATIC

Model = namedtuple("Model", "a0 P0 c d T Z H W")


@njit(cache=True, error_model="numpy")
def value_and_sums(y, model, R, Q):
    """The log-likelihood and the gradients of the nine arrays, none of which varies with time."""
    y, o = gaps(y)
    n, p = y.shape
    m = len(model.a0)
    T = model.T[0]
    mean, cov = np.empty((n, m)), np.empty((n, m, m))
    out = FilterOutputs(
        mean, np.empty((n, m)), np.empty((n, p)), cov, np.empty((n, m, m)), np.empty((n, p, p)),
        np.empty(n),
    )  # fmt: skip
    _, u, C_inv, _, Kf, _ = run(y, o, model, out)
    r, N = np.zeros(m), np.zeros((m, m))
    c_bar, d_bar, T_bar, W_bar = np.zeros(m), np.zeros(p), np.zeros((m, m)), np.zeros((m, m))
    Z_bar, H_bar = np.zeros((p, m)), np.zeros((p, p))
    for t in range(n - 1, -1, -1):
        c_bar += r
        e, T_t, Z_t, H_t, W_t, r, N = pull_smooth(
            r, N, T, model.Z[0] * o[t].reshape(-1, 1), u[t], C_inv[t], Kf[t], mean[t], T @ cov[t]
        )
        d_bar += e * o[t]
        T_bar += T_t
        Z_bar += Z_t * o[t].reshape(-1, 1)
        H_bar += H_t * o[t].reshape(-1, 1) * o[t]
        W_bar += W_t
    P0_bar = (r.reshape(-1, 1) * r - N) / 2
    return out.l.sum(), (
        r, P0_bar, c_bar, d_bar, T_bar, Z_bar, 2 * W_bar @ R @ Q, H_bar, R.T @ W_bar @ R,
    )  # fmt: skip


def contender(y: np.ndarray, model: StateSpace, requested: tuple[str, ...] = NAMES) -> Callable:
    """All nine gradients are computed, whatever is requested."""
    X = model.asdict() | {"W": model.R @ model.Q @ model.R.T}
    arrays = Model(
        *(np.array(X[x] if x in STATIC else X[x][None], order="C") for x in Model._fields)
    )
    y, R, Q = (np.array(A, order="C") for A in (y, model.R, model.Q))

    def call():
        value, gradients = value_and_sums(y, arrays, R, Q)
        found = dict(zip(NAMES, gradients, strict=True))
        return value, {name: found[name] for name in requested}

    return call
