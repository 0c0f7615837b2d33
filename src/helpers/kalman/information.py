r"""Information about k directions of a model: expected information and outer product.

The expected information is the covariance of the score, and the mean of minus the Hessian, where
the data come from the model itself.  Of a Gaussian vector with mean :math:`\mu` and covariance
:math:`\Sigma`, the whole series stacked, it is

.. math::

   \mathcal I_{ij} &= \dot\mu_i^\top \Sigma^{-1} \dot\mu_j \\
   &\quad + \tfrac12 \operatorname{tr}(\Sigma^{-1} \dot\Sigma_i \Sigma^{-1} \dot\Sigma_j) ,

and here it comes from the filter: an (m, m + 1) recursion forwards for each direction, and the
smoother's N backwards. Of the data only the gaps matter.

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
        count as equal shifts of the mean in the opposite direction.
    weights : array (n,), optional
        Weights of the steps in the log-likelihood; ones if None.  The result is then the mean of
        minus the Hessian of the weighted sum.

    Returns
    -------
    array (k, k)
        Symmetric, and positive semidefinite where no weight is negative.

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError
        As :func:`helpers.kalman.hessian.hessian_vector`.
    """
    dot = reference.moves_in_time(y, model, reference.check_directions(y, model, directions))
    filtered = reference.kalman_filter(y, model)
    g = check_weights(weights, len(filtered.u), real=True)
    Z, F, F_inv, L, A, C, dF, dK, w, B = _forwards(model, filtered, dot)
    seen = g[:, np.newaxis, np.newaxis] * np.swapaxes(Z, 1, 2) @ F_inv  # by the weighted likelihood
    N, later = np.empty(L.shape, A.dtype), np.zeros((model.m, model.m))
    for t in reversed(range(len(N))):
        N[t] = later
        later = symmetric(seen[t] @ Z[t] + L[t].T @ later @ L[t])
    # From here on all steps at once, with an axis for the directions behind that of the steps.
    F, F_inv, A, N, seen = (X[:, np.newaxis] for X in (F, F_inv, A, N, seen))
    E, weighted = F_inv @ dF, g[:, np.newaxis, np.newaxis, np.newaxis]
    found = _inner(weighted * E, np.swapaxes(E, 2, 3)) / 2 + _inner(w @ A, weighted * (F_inv @ w))
    found += _inner(B @ A, N @ B) + _inner(dK @ F, N @ dK)
    mixed = _inner(C, seen @ w + np.swapaxes(L, 1, 2)[:, np.newaxis] @ N @ B)
    return symmetric(found + mixed + mixed.T + dot["a0"] @ later @ dot["a0"].T)


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


def _forwards(model: StateSpace, filtered: reference.Filtered, dot: dict) -> tuple:
    """What each step gives to the information: Z, F, F^-1, L, A, C, dF, dK, w and B, stacked.

    With a1 = (a, 1), A = E a1 a1' (m + 1, m + 1) and C = E da a1' (k, m, m + 1) under the model.
    The innovation moves by -(Z da + w a1), the next prediction by L da + B a1 + dK v, and v has
    mean zero and covariance F whatever came before it.
    """
    n, m, k, out = len(filtered.u), model.m, len(dot["a0"]), filtered.out
    Z, F, F_inv, Kf, P = filtered.Z, out.F, filtered.F_inv, filtered.Kf, out.P_pred
    kind = np.result_type(float, F, *dot.values())
    T, T1 = model.over_time("T", n), np.zeros((n, m + 1, m + 1), kind)
    T1[:, :m], T1[:, m, m] = _join(T, model.over_time("c", n)), 1
    K = T @ Kf
    K1 = np.concatenate([K, 0 * K[:, :1]], axis=1)
    L, FK1 = T - K @ Z, F @ np.swapaxes(K1, 1, 2)
    K1FK1 = K1 @ FK1

    moves = {
        x: np.broadcast_to(X, (k, n, *X.shape[2:])).swapaxes(0, 1)
        for x, X in dot.items()
        if x not in STATIC
    }
    seen = filtered.observed[:, np.newaxis]
    dT, dZ, dW = moves["T"], moves["Z"] * seen[..., np.newaxis], moves["W"]
    w = _join(dZ, (moves["d"] - moves["y"]) * seen)
    B = _join(dT, moves["c"]) - K[:, np.newaxis] @ w
    dM_own = P[:, np.newaxis] @ np.swapaxes(dZ, 2, 3)  # what does not come from dP
    both = reference._pairs(filtered.observed)
    dF_own = 2 * Z[:, np.newaxis] @ dM_own + moves["H"] * both[:, np.newaxis]
    dK_own = dT @ Kf[:, np.newaxis]
    dP_own = 2 * dT @ (out.P_filt @ np.swapaxes(T, 1, 2))[:, np.newaxis]

    start, dP = np.append(model.a0, 1), dot["P0"]
    A, C = np.empty((n + 1, m + 1, m + 1), kind), np.empty((n + 1, k, m, m + 1), kind)
    dF, dK = np.empty((n, k, *F.shape[1:]), kind), np.empty((n, k, *K.shape[1:]), kind)
    A[0], C[0] = np.outer(start, start), dot["a0"][:, :, np.newaxis] * start
    for t in range(n):
        dM = dP @ Z[t].T + dM_own[t]
        dF[t] = symmetric(Z[t] @ dP @ Z[t].T + dF_own[t])
        dK[t] = dK_own[t] + T[t] @ (dM - Kf[t] @ dF[t]) @ F_inv[t]
        A[t + 1] = symmetric(T1[t] @ A[t] @ T1[t].T + K1FK1[t])
        C[t + 1] = (L[t] @ C[t] + B[t] @ A[t]) @ T1[t].T + dK[t] @ FK1[t]
        dP = symmetric(dP + Kf[t] @ dF[t] @ Kf[t].T - 2 * dM @ Kf[t].T)
        dP = symmetric(T[t] @ dP @ T[t].T + dP_own[t]) + dW[t]
    return Z, F, F_inv, L, A[:-1], C[:-1], dF, dK, w, B


def _join(X, x):
    """[X x], for one direction or k of them."""
    return np.concatenate([X, x[..., np.newaxis]], axis=-1)


def _inner(X, Y):
    """The inner products of k matrices with k others; of such for each step, summed over them."""
    axes = (*range(X.ndim - 3), -2, -1)
    return np.tensordot(X, Y, axes=(axes, axes))
