r"""How much the data say about k directions of a model: expected information and outer product.

The expected information is the covariance of the score, and the mean of minus the Hessian, where
the data come from the model itself.  Of a Gaussian vector with mean :math:`\mu` and covariance
:math:`\Sigma`, the whole series stacked, it is

.. math::

   \mathcal I_{ij} = \dot\mu_i^\top \Sigma^{-1} \dot\mu_j
   + \tfrac12 \operatorname{tr}(\Sigma^{-1} \dot\Sigma_i \Sigma^{-1} \dot\Sigma_j) ,

and here it comes from the filter: an (m, m + 1) recursion forwards for each direction, and the
smoother's N backwards.  No data enter but for where they are missing.

>>> import numpy as np
>>> from helpers.kalman import StateSpace
>>> from helpers.kalman.information import expected_information
>>> one, y = np.eye(1), np.array([[1.0], [2.0]])
>>> walk = StateSpace([0.0], one, [0.0], [0.0], T=one, Z=one, R=one, H=one, Q=one)
>>> units = np.array([[[1.0]], [[0.0]]]), np.array([[[0.0]], [[1.0]]])
>>> print(expected_information(y, walk, {"H": units[0], "Q": units[1]}).round(3))
[[0.3  0.1 ]
 [0.1  0.08]]

The differentiated innovations form is that of Cavanaugh and Shumway (1996, On computing the
expected Fisher information matrix for state-space model parameters, Statistics and Probability
Letters 26, 347-355); Segal and Weinstein (1989, doi:10.1109/18.30995) have the Hessian and the
information too.  Harvey (1989, section 3.4.5) has a misprint.
"""

from __future__ import annotations

import numpy as np

from helpers.kalman import hessian, reference
from helpers.kalman.reference import _symmetric as symmetric
from helpers.statespace import STATIC, StateSpace, check_weights

__all__ = ["expected_information", "outer_product"]


def expected_information(
    y, model: StateSpace, directions: dict[str, np.ndarray], weights=None
) -> np.ndarray:
    """The expected (Fisher) information of k directions, given where y is observed.

    Parameters
    ----------
    y : array (n, p)
        Only its gaps matter: NaN marks them.
    model : StateSpace
    directions : dict of arrays (k, ...)
        As in :func:`helpers.kalman.hessian.hessian_vector`; those of ``"y"`` are regressors, which
        count as shifts of the mean by as much to the other side.
    weights : array (n,), optional
        Weights of the steps in the log-likelihood; ones if None.  The result is then the mean of
        minus the Hessian of the weighted sum.

    Returns
    -------
    array (k, k)
        Symmetric, and positive semidefinite where no weight is negative.

    Raises
    ------
    ValueError
        If there is no direction, or one has an unknown name or a wrong shape or is not finite;
        ``weights`` has a wrong shape, or ``y`` does not fit the model.
    numpy.linalg.LinAlgError
        If F is not positive definite at some step, which the message names.
    """
    dot = hessian.in_time(y, model, reference.check_directions(y, model, directions))
    filtered = reference.kalman_filter(y, model)
    g = check_weights(weights, len(filtered.u), real=True)
    steps, da0 = _forwards(model, filtered, dot), dot["a0"]
    N, found = np.zeros((model.m, model.m)), np.zeros((len(da0), len(da0)))
    for t in reversed(range(len(steps))):
        Z, F, F_inv, L, A, C, dF, dK, w, B = steps[t]
        E = F_inv @ dF
        found += g[t] * (np.einsum("iab,jba->ij", E, E) / 2 + _inner(w @ A, F_inv @ w))
        found += _inner(B @ A, N @ B) + _inner(dK @ F, N @ dK)
        mixed = _inner(C, g[t] * Z.T @ F_inv @ w + L.T @ N @ B)
        found += mixed + mixed.T
        N = symmetric(g[t] * Z.T @ F_inv @ Z + L.T @ N @ L)
    return symmetric(found + da0 @ N @ da0.T)


def outer_product(
    y, model: StateSpace, directions: dict[str, np.ndarray], weights=None
) -> np.ndarray:
    r"""The sum of the outer products of each step's gradient (OPG).

    It is :math:`\sum_t \dot\ell_t \dot\ell_t^\top`.  Where the data come from the model, each
    step's gradient has mean zero given the past, and this sum estimates the information without a
    second derivative.

    Parameters
    ----------
    y : array (n, p)
        NaN marks a gap.
    model : StateSpace
    directions : dict of arrays (k, ...)
        As in :func:`helpers.kalman.hessian.hessian_vector`.
    weights : array (n,), optional
        Weights of the steps in the log-likelihood; ones if None.

    Returns
    -------
    array (k, k)
        Symmetric, positive semidefinite, and of rank n at most.

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError
        As :func:`expected_information`.
    MemoryError
        If memory runs out.
    """
    slopes, *_ = hessian.hessian_vector(y, model, directions)
    slopes = slopes * check_weights(weights, slopes.shape[1], real=True)
    return slopes @ slopes.T


def _forwards(model: StateSpace, filtered: reference.Filtered, dot: dict) -> list[tuple]:
    """What each step gives to the information: Z, F, F^-1, L, A, C, dF, dK, w and B.

    With a1 = (a, 1), A = E a1 a1' (m + 1, m + 1) and C = E da a1' (k, m, m + 1) under the model.
    The innovation moves by -(Z da + w a1), the next prediction by L da + B a1 + dK v, and v has
    mean zero and covariance F whatever came before it.
    """
    n, m, out = len(filtered.u), model.m, filtered.out
    k, F_inv = len(dot["a0"]), filtered.F_inv
    both = reference._pairs(filtered.observed)
    T, c = model.over_time("T", n), model.over_time("c", n)
    moves = {x: np.broadcast_to(X, (k, n, *X.shape[2:])) for x, X in dot.items() if x not in STATIC}
    start, dP, steps = np.append(model.a0, 1), dot["P0"], []
    A, C = np.outer(start, start), dot["a0"][:, :, np.newaxis] * start
    for t in range(n):
        Z, F, Kf, P, o = filtered.Z[t], out.F[t], filtered.Kf[t], out.P_pred[t], both[t]
        dT, dc, dd, dH, dW, dy = (moves[x][:, t] for x in ("T", "c", "d", "H", "W", "y"))
        dZ = moves["Z"][:, t] * filtered.observed[t][:, np.newaxis]
        dM = dP @ Z.T + P @ np.swapaxes(dZ, 1, 2)
        dF = symmetric(2 * dZ @ P @ Z.T + Z @ dP @ Z.T + dH * o)
        K = T[t] @ Kf
        L, dK = T[t] - K @ Z, dT @ Kf + T[t] @ (dM - Kf @ dF) @ F_inv[t]
        w = _join(dZ, (dd - dy) * filtered.observed[t])
        B = _join(dT, dc) - K @ w
        steps.append((Z, F, F_inv[t], L, A, C, dF, dK, w, B))
        T1, K1 = np.vstack([_join(T[t], c[t]), np.eye(m + 1)[-1]]), np.vstack([K, 0 * K[:1]])
        A, C = symmetric(T1 @ A @ T1.T + K1 @ F @ K1.T), (L @ C + B @ A) @ T1.T + dK @ F @ K1.T
        dP = symmetric(dP + Kf @ dF @ Kf.T - 2 * dM @ Kf.T)
        dP = symmetric(T[t] @ dP @ T[t].T + 2 * dT @ out.P_filt[t] @ T[t].T) + dW
    return steps


def _join(X, x):
    """[X x], for one direction or k of them."""
    return np.concatenate([X, x[..., np.newaxis]], axis=-1)


def _inner(X, Y):
    """The inner products of k matrices with k others."""
    return np.tensordot(X, Y, axes=([1, 2], [1, 2]))
