r"""What a model's parameters do to its arrays: derivatives in as few complex steps as can be.

A parameter of a state space model of statsmodels moves a few entries of a few arrays, and two that
share none can move in one complex step of ``mod.update``: each finds its derivative in its own
entries.  So there is one step for each *colour* in which parameters without a common entry are
painted, and not one for each parameter: Curtis, Powell and Reid (1974, On the estimation of sparse
Jacobian matrices, IMA Journal of Applied Mathematics 13, 117-119).  Which entries those are is
found once, at a point of general position, and every later use is checked by one step along a
direction in which all parameters move at rates of their own; where the check fails, each parameter
gets its own step again.  That step comes first: where all arrays are linear in the parameters, it
says to the last bit what it said before, and the derivatives are those that are known.  (Not where
an entry has several parameters of which one moves it by far more than another: the sum would hide
what the other does.)

The transformation in which optimisers see parameters is differentiated in the same way.  That of a
vector autoregression takes Cholesky factors, which for complex numbers are none; its derivatives
are written out (:func:`stationary_coefficients`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

__all__ = [
    "Colored",
    "away_from",
    "chol_tangent",
    "complex_step",
    "difference",
    "stationary_coefficients",
]

STEP = 1e-40  # of the complex step: its square is lost, so the derivative has no truncation error

# What a derivative may miss, relative to its entry, before its pattern counts as wrong: rounding
# leaves 1e-15, an entry that is missing all of it.
MISSED = 1e-9

# The same for differences, which leave 1e-11 or so of the largest entry.
MISSED_BY_DIFFERENCES = 1e-6

# The least that a parameter may do to an entry, relative to the one that does most: of less, a sum
# would not hold enough digits to tell whether it has changed.
ALIKE = 1e-5


class Colored:
    """The derivatives of a function of k parameters, those that share no entry taken together.

    `colors` (k,) holds the number of each parameter's colour.

    Parameters
    ----------
    along : function
        Of the parameters and a direction, both (k,): the function's derivative along it, an array
        (N,) whose length is the same at each call.
    params : array (k,)
        A point near which the entries that each parameter moves are looked for.
    missed : float
        What the sum along a direction may miss of an entry before the pattern counts as wrong.
    """

    def __init__(self, along: Callable, params: np.ndarray, missed: float = MISSED):
        self.along, self.missed, self.k = along, missed, len(params)
        # Rates of their own, so that no two parameters cancel in the check.
        self.rates = 1 + 0.5 * np.sin(np.sqrt(2) * np.arange(1, self.k + 1))
        self._paint(self._one_by_one(away_from(params)) != 0)

    def jacobian(self, params: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The derivatives that are not zero: their entries, their parameters and their values."""
        in_all = self.along(params, self.rates) if len(self.masks) < self.k else None
        if self._is_known(in_all):
            self.same = True
            return self.rows, self.columns, self.told[1]
        self.same = False
        steps = [self.along(params, color) for color in self.masks]
        if in_all is not None:
            values = np.concatenate(
                [step[rows] for step, (rows, _) in zip(steps, self.at, strict=True)]
            )
            if self._complete(in_all, steps, values):
                self.told = (in_all, values) if self._tells_all(values) else None
                return self.rows, self.columns, values
            full = self._one_by_one(params)
        else:  # each has had a step of its own
            full = np.stack([steps[c] for c in self.colors])
        if full.shape != self.pattern.shape:
            self._paint(full != 0)
        elif (full[~self.pattern] != 0).any():
            self._paint(self.pattern | (full != 0))
        return self.rows, self.columns, full[self.columns, self.rows]

    def known(self, params: np.ndarray):
        """What :meth:`jacobian` would return, if those of the last two points were the same.

        None if they were not, or if these are others: then it takes more than one step.
        """
        if not self.same or not self._is_known(self.along(params, self.rates)):
            return None
        return self.rows, self.columns, self.told[1]

    def dense(self, params: np.ndarray) -> np.ndarray:
        """The same as a matrix (N, k)."""
        rows, columns, values = self.jacobian(params)
        found = np.zeros((self.pattern.shape[1], self.k))
        found[rows, columns] = values
        return found

    def pull(self, params: np.ndarray, bar: np.ndarray, jacobian=None) -> np.ndarray:
        """The transposed derivatives times a cotangent (N,): an array (k,).

        `jacobian` are those of :meth:`jacobian` there, if they are known.
        """
        rows, columns, values = self.jacobian(params) if jacobian is None else jacobian
        return np.bincount(columns, bar[rows] * values, minlength=self.k)

    def _one_by_one(self, params: np.ndarray) -> np.ndarray:
        return np.stack([self.along(params, unit) for unit in np.eye(self.k)])

    def _paint(self, pattern: np.ndarray) -> None:
        """Colours for a pattern (k, N), greedily, the parameters with most entries first."""
        self.pattern, self.told, self.same, taken = pattern, None, False, []
        self.colors = np.empty(self.k, int)
        for j in np.argsort(-pattern.sum(axis=1), kind="stable"):
            free = [c for c, entries in enumerate(taken) if not (entries & pattern[j]).any()]
            if free:
                taken[free[0]] |= pattern[j]
            else:
                taken.append(pattern[j].copy())
            self.colors[j] = free[0] if free else len(taken) - 1
        self.masks = [(self.colors == c).astype(float) for c in range(len(taken))]
        self.at = []
        for mask in self.masks:
            columns, rows = np.nonzero(pattern & (mask > 0)[:, np.newaxis])
            self.at.append((rows, columns))
        self.rows, self.columns = (np.concatenate(X) for X in zip(*self.at, strict=True))

    def _is_known(self, in_all: np.ndarray | None) -> bool:
        """Whether the step in which all parameters move says what it said at the last point."""
        return self.told is not None and np.array_equal(in_all, self.told[0])

    def _tells_all(self, values: np.ndarray) -> bool:
        """Whether no change of a derivative would be lost in the sum over its entry."""
        most = np.zeros(self.pattern.shape[1])
        np.maximum.at(most, self.rows, np.abs(values))
        return bool((np.abs(values) >= ALIKE * most[self.rows]).all())

    def _complete(self, found: np.ndarray, steps: list, values: np.ndarray) -> bool:
        """Whether the derivatives add up to the one along a direction in which all move."""
        if len(steps[0]) != self.pattern.shape[1]:
            return False
        expected = np.bincount(self.rows, self.rates[self.columns] * values, minlength=len(found))
        size = np.abs(found)
        floor = size.max(initial=0) if self.missed > MISSED else size
        return bool((np.abs(found - expected) <= self.missed * floor).all())


def away_from(params: np.ndarray) -> np.ndarray:
    """A point of general position near these. No variance that is zero becomes negative."""
    sizes = 0.5 + np.abs(np.sin(np.arange(len(params)) + 1))
    moves = 1e-2 * np.maximum(1, np.abs(params)) * sizes
    return params + np.copysign(moves, params)


def complex_step(function: Callable) -> Callable:
    """The derivative along a direction of a function that takes complex numbers."""
    return lambda params, direction: function(params + 1j * STEP * direction).imag / STEP


def difference(function: Callable) -> Callable:
    """The same by central differences of the fourth order, for a smooth function of real numbers.

    A polynomial in the step, but for its fifth power: some 12 digits.
    """

    def along(params, direction):
        # As far as the smallest of those that move allows.
        h = 1e-3 / np.max(np.abs(direction) / np.maximum(1.0, np.abs(params)))
        move = h * direction
        one, two = (function(params + s * move) - function(params - s * move) for s in (1, 2))
        return (8 * one - two) / (12 * h)

    return along


def chol_tangent(L: np.ndarray, dX: np.ndarray) -> np.ndarray:  # noqa: N803
    """What the Cholesky factor L of X (m, m) moves by where X moves by dX (k, m, m), symmetric."""
    inverse = np.linalg.inv(L)
    inner = np.tril(inverse @ dX @ inverse.T)
    inner[:, *np.diag_indices(len(L))] /= 2
    return L @ inner


def stationary_coefficients(A: np.ndarray, dA: np.ndarray):  # noqa: N803
    r"""Coefficients of a stationary vector autoregression from any matrices, and their tangents.

    Ansley and Kohn (1986, A note on reparameterizing a vector autoregressive moving average model
    to enforce stationarity, Journal of Statistical Computation and Simulation 24, 99-106), for a
    covariance of the shocks that is the identity.  That of :math:`\Sigma = M M^\top` with a lower
    triangular M is :math:`M C_i M^{-1}`.

    Parameters
    ----------
    A : array (order, p, p)
    dA : array (k, order, p, p)
        Directions.

    Returns
    -------
    C : array (order, p, p)
    dC : array (k, order, p, p)
    """
    p = A.shape[-1]
    eye = np.eye(p)
    # Factors of the variances of forward and backward prediction errors, and their tangents.
    Lf, Lb, dLf, dLb = eye, eye, 0 * dA[:, 0], 0 * dA[:, 0]
    forwards, backwards = [], []
    for a, da in zip(A, np.moveaxis(dA, 1, 0), strict=True):
        # The partial autocorrelations P = B^-1 A, and I - P P' = B^-1 B^-T.
        B = np.linalg.cholesky(eye + a @ a.T)
        move = da @ a.T
        dB = chol_tangent(B, move + np.swapaxes(move, 1, 2))
        B_inv = np.linalg.inv(B)
        P, dP = B_inv @ a, B_inv @ (da - dB @ (B_inv @ a))
        newest = _quotient((Lf, dLf), (P, dP), (Lb, dLb))
        oldest = _quotient((Lb, dLb), (P.T, np.swapaxes(dP, 1, 2)), (Lf, dLf))
        forwards, backwards = (
            [*_lower(forwards, newest, backwards), newest],
            [*_lower(backwards, oldest, forwards), oldest],
        )
        Lf, dLf = Lf @ B_inv, (dLf - Lf @ B_inv @ dB) @ B_inv
        move = np.swapaxes(dP, 1, 2) @ P
        left = np.linalg.cholesky(eye - P.T @ P)
        dLb = dLb @ left + Lb @ chol_tangent(left, -move - np.swapaxes(move, 1, 2))
        Lb = Lb @ left
    inverse = np.linalg.inv(Lf)
    C = [inverse @ f @ Lf for f, _ in forwards]
    dC = [inverse @ (df @ Lf + f @ dLf - dLf @ c) for (f, df), c in zip(forwards, C, strict=True)]
    return np.stack(C), np.stack(dC, axis=1)


def _quotient(X, Y, Z):  # noqa: N803
    """X Y Z^-1 of three matrices, each with its tangents, and its tangents."""
    (x, dx), (y, dy), (z, dz) = X, Y, Z
    inverse = np.linalg.inv(z)
    found = x @ y @ inverse
    return found, (dx @ y + x @ dy - found @ dz) @ inverse


def _lower(these: list, newest, others: list) -> list:
    """Whittle's recursion: coefficients of a longer regression from those of the one before."""
    (n, dn), found = newest, []
    for (x, dx), (o, do) in zip(these, reversed(others), strict=True):
        found.append((x - n @ o, dx - dn @ o - n @ do))
    return found
