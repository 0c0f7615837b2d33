r"""The stationary distribution of a state, and the adjoints of its two equations, by doubling.

:math:`P = T P T^\top + W` and :math:`a = T a + c` are solved by
:math:`\sum_j T^j W T^{j\top}` and :math:`\sum_j T^j c`, and :math:`2^k` terms of each come from k
squares of T; with the same squares the other way round, the adjoints solve
:math:`S = T^\top S T + \bar P` and :math:`s = T^\top s + \bar a`.

Smith (1968, Matrix equation XA + BX = C, SIAM Journal on Applied Mathematics 16, 198-201).
"""

from __future__ import annotations

import numpy as np

from helpers.kalman.on_disk import njit

__all__ = ["Stationary"]

# Squares of T: an eigenvalue of 1 - 1e-13 has come down to nothing after 49 of them, and one that
# is 1 but for rounding has not.
MOST = 50

# The largest entry of a power of T that no longer counts.
NOTHING = 1e-18


@njit(error_model="numpy")
def _squares(T):
    m = len(T)
    squares, A = np.empty((MOST, m, m)), T.copy()
    for k in range(MOST):
        squares[k] = A
        size = 0.0
        for x in A.flat:
            size = max(size, abs(x)) if x == x else np.inf
        if size < NOTHING:
            return squares[: k + 1], True
        if not size < 1e100:
            break
        A = A @ A
    return squares[:1], False


@njit(error_model="numpy")
def _sums(squares, a, P, transposed):
    for k in range(len(squares)):
        A = np.ascontiguousarray(squares[k].T) if transposed else squares[k]
        a = a + A @ a
        P = P + A @ P @ A.T
    return a, (P + P.T) / 2


class Stationary:
    """The stationary `mean` (m,) and `covariance` (m, m).

    `converged` says whether T has all its eigenvalues inside the unit circle, by 1e-13 or more; if
    not, there is neither.

    Parameters
    ----------
    T : array (m, m)
    c : array (m,)
    W : array (m, m)
    """

    def __init__(self, T: np.ndarray, c: np.ndarray, W: np.ndarray):
        self._squares, self.converged = _squares(np.ascontiguousarray(T))
        if self.converged:
            self.mean, self.covariance = self.solve(c, W)

    def solve(self, c: np.ndarray, W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same for other c and W."""
        return _sums(self._squares, np.ascontiguousarray(c), np.ascontiguousarray(W), False)

    def adjoints(self, a_bar: np.ndarray, P_bar: np.ndarray):
        """s and S: the gradients for c and W, of those for the mean and the covariance."""
        return _sums(self._squares, np.ascontiguousarray(a_bar), np.ascontiguousarray(P_bar), True)
