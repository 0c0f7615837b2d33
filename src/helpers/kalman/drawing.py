"""Draws, smoothed means and roots of covariances: the functions that the Ops of draws call.

From the recursions of :mod:`helpers.kalman.smoothing`; Numba compiles them as they stand. They do
not look at shapes: ``ops.draws.OfText`` has done so.
"""

from __future__ import annotations

import threading
from hashlib import sha256
from pathlib import Path

import numpy as np

from helpers.kalman import smoothing
from helpers.kalman.compiled.building import load
from helpers.kalman.recursions import at_step, factor_if_identified, solve, symmetric
from helpers.kalman.smoothing import (
    information_of,
    path,
    pull_path,
    series_of,
    shift_to_mode,
    times,
)
from helpers.kalman.square_root import root

# The share of each variance that is left as a pivot where a Cholesky factor needs no exchanges: far
# above rounding, and below what the jitter of pymc-extras leaves.
FULL_RANK = 1e-10


def columns(Y, starts, c, P0, T, Z, H, W, tol):
    """r (n + 1, J, m) and e (n, J, p) of series Y (J, n, p), and whether all went well."""
    J, n, p = Y.shape
    _, dY, r_0, c_bar, _, report = panel_pass(
        Y, starts, P0, c, T, Z, H, W, np.ones((J, n)), True, False, False, False, False, tol
    )  # fmt: skip
    r, e = np.empty((n + 1, J, len(P0))), np.empty((n, J, p))
    r[0] = r_0
    for t in range(n):  # which Numba compiles faster than a transposition
        r[t + 1], e[t] = c_bar[:, t], -dY[:, t]
    return r, e, report[0] == n


def panel_pass(*arguments):
    """The compiled pass for many series."""
    return load("panel").loglike_and_grad(*arguments)


def is_identified(S):
    """Whether the data say something about every direction of delta."""
    return not np.isnan(factor_if_identified(S)[1])


def draws(y, start, shocks, noise, P0, T, Z, H, W, A, tol):
    """The draws (n, J, m); y and shocks have d and c off and on."""
    J, m = start.shape
    Y, starts, c = series_of(y, noise, start, shocks, A)
    r, e, well = columns(Y, starts, c, P0, T, Z, H, W, tol)
    S = information_of(r, A)
    if not well or not is_identified(S):
        return np.full(shocks.shape, np.nan)
    delta = shift_to_mode(r, e, np.zeros((J, m)), S, A)
    first = start + begun(delta, np.ascontiguousarray(r[0, :J]), A, P0)
    return path(first, T, shocks + times(r[1:, :J], W))


def pull_draws(y, start, shocks, noise, P0, T, Z, H, W, A, g, tol):
    """The gradients of the ten inputs from those of the draws, g (n, J, m)."""
    n, J, m = shocks.shape
    rho = pull_path(T, g)
    starts, moves = np.empty((2 * J, m)), np.empty((n, 2 * J, m))
    starts[:J], starts[J:] = start, rho[0] @ P0
    moves[:, :J], moves[:, J:] = shocks, times(rho[1:], W)
    Y, starts, c = series_of(y, noise, starts, moves, A)
    r, e, well = columns(Y, starts, c, P0, T, Z, H, W, tol)
    S = information_of(r, A)
    both = np.zeros((2 * J, m))
    both[J:] = rho[0]
    delta = np.full((2 * J, A.shape[1]), np.nan)
    if well and is_identified(S):
        delta[:] = shift_to_mode(r, e, both, S, A)
    else:
        r[:], e[:] = np.nan, np.nan
    q, ex = r[:, J : 2 * J] + rho, np.ascontiguousarray(e[:, J : 2 * J])
    r, e = np.ascontiguousarray(r[:, :J]), np.ascontiguousarray(e[:, :J])
    of_draw, of_g = np.ascontiguousarray(delta[:J]), np.ascontiguousarray(delta[J:])
    drawn = path(start + begun(of_draw, r[0], A, P0), T, shocks + times(r[1:], W))
    lam = path(begun(of_g, q[0], A, P0), T, times(q[1:], W))
    T_bar, Z_bar = np.zeros(T.shape), np.zeros(Z.shape)
    H_bar, W_bar = np.zeros(H.shape), np.zeros(W.shape)
    y_bar = np.zeros(y.shape)
    for t in range(n):
        for j in range(J):
            y_bar[t] -= ex[t, j]
        add_products(T_bar, t, q[t + 1], drawn[t], r[t + 1], lam[t])
        add_products(Z_bar, t, ex[t], drawn[t], e[t], lam[t])
        add_products(H_bar, t, ex[t], e[t], e[t], ex[t])
        add_products(W_bar, t, q[t + 1], r[t + 1], r[t + 1], q[t + 1])
    P0_bar, A_bar = np.zeros((1, m, m)), np.zeros((1, m, A.shape[1]))
    add_products(P0_bar, 0, q[0], r[0], r[0], q[0])
    add_products(A_bar, 0, q[0], of_draw, r[0], of_g)
    return (
        y_bar, q[0].copy(), q[1:].copy(), ex, P0_bar[0] / 2, T_bar, Z_bar, H_bar / 2, W_bar / 2,
        A_bar[0],
    )  # fmt: skip


def begun(delta, r_0, A, P0):
    """What delta and the data add to where the paths start (J, m)."""
    return delta @ A.T + r_0 @ P0


def add_products(out, t, X, Y, U, V):
    """Add X'Y + U'V to `out` at step t."""
    at_step(out, t)[:] += X.T @ Y + U.T @ V


def pull_root(P, B_bar):
    """The gradient of P (m, m) from that of its root B (m, m), with columns of zeros at its end.

    Where P has rank k, along changes that leave it so: the rows and columns of k pivots count.
    """
    B_t, order = root(P)
    k, m = len(B_t), len(P)
    out = np.zeros((m, m))
    if k == 0:
        return out
    L, L_bar = np.ascontiguousarray(B_t.T[order]), np.ascontiguousarray(B_bar[order, :k])
    L_inv = solve(L[:k], np.eye(k))
    below = L_bar[k:] @ L_inv
    low = L[:k].T @ (L_bar[:k] - below.T @ L[k:])
    for i in range(k):
        low[i, i] /= 2.0
        low[i, i + 1 :] = 0.0
    top = L_inv.T @ low @ L_inv
    for i in range(m):
        for j in range(k):
            x = (top[i, j] + top[j, i]) / 2.0 if i < k else below[i - k, j] / 2.0
            out[order[i], order[j]] = x
            out[order[j], order[i]] = x
    return out


def pull_roots(P, B_bar):
    """`pull_root` for k covariances (k, m, m)."""
    out = np.zeros(P.shape)
    for t in range(len(P)):
        out[t] = pull_root(P[t], B_bar[t])
    return out


def without_pivots(P, C_t):
    """Fill C_t with C', C C' = P (m, m), and say whether no variance is lost but for FULL_RANK."""
    for i in range(len(P)):
        x = P[i, i]
        for k in range(i):
            x -= C_t[k, i] * C_t[k, i]
        if not x > FULL_RANK * P[i, i]:
            return False
        C_t[i, i] = np.sqrt(x)
        for j in range(i + 1, len(P)):
            x = (P[i, j] + P[j, i]) / 2
            for k in range(i):
                x -= C_t[k, i] * C_t[k, j]
            C_t[i, j] = x / C_t[i, i]
    return True


def marginals(mean, P, z):
    """mean + B z for each step, B B' = P (n, m, m) of any rank; mean and z (n, m)."""
    out, C_t = mean.copy(), np.zeros(P.shape[1:])
    for t in range(len(P)):
        B_t = C_t if without_pivots(P[t], C_t) else root(symmetric(P[t]))[0]
        for k in range(len(B_t)):
            out[t] += z[t, k] * B_t[k]
    return out


PYTHON = {
    "draws": draws, "pull_draws": pull_draws, "roots": smoothing.roots, "pull_roots": pull_roots,
    "marginals": marginals,
}  # fmt: skip
TEXT = [path, pull_path, times, series_of, information_of, shift_to_mode]
TEXT += [begun, add_products, columns, is_identified, pull_root, without_pivots]


def digest() -> str:
    """A digest of the lines that are compiled here, and of those that they call."""
    files = [Path(__file__), Path(smoothing.__file__)]
    text = b"".join(file.read_bytes() for file in files) + load("door").DIGEST.encode()
    return sha256(text).hexdigest()[:16]


def compiled() -> dict:
    """The Ops' functions as machine code, compiled once for each machine and kept on disk."""
    with _ONE_AT_A_TIME:
        if not _READY:
            _READY.update(_newly_compiled())
    return _READY


def _newly_compiled() -> dict:
    from numba.extending import overload

    from helpers.kalman.compiled import overloads  # noqa: F401 (compiles square_root's text)
    from helpers.kalman.compiled.tiles import PART, jitable
    from helpers.kalman.on_disk import njit

    code, options = load("panel").linked_loglike_and_grad, {"error_model": "numpy", "nogil": True}

    @overload(panel_pass, jit_options=PART)
    def _panel_pass(*arguments):
        return lambda *arguments: code(arguments)

    for function in TEXT:
        jitable(function)
    for function in PYTHON.values():
        # Numba looks at one file alone to see whether what it kept is still good.
        function.__qualname__ = f"{function.__name__}_{digest()}"
    return {name: njit(**options)(function) for name, function in PYTHON.items()}


_ONE_AT_A_TIME = threading.Lock()
_READY: dict = {}
