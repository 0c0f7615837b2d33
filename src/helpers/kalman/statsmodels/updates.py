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
are written out for a complex step of our own (:func:`stationary_coefficients`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from weakref import proxy

import numpy as np
from statsmodels.tsa.statespace.dynamic_factor import DynamicFactor
from statsmodels.tsa.statespace.mlemodel import MLEModel
from statsmodels.tsa.statespace.varmax import VARMAX

from helpers.kalman.statsmodels.arrays import ARRAYS, _given, _known, _parts, _shapes
from helpers.statespace import SHAPES

# Differences with two steps, one half of the other, agree to this share, or are halved so often.
AGREE, HALVINGS = 1e-9, 16

STEP = 1e-40  # of the complex step: its square is lost, so the derivative has no truncation error

# What a derivative may miss, relative to its entry, before its pattern counts as wrong: rounding
# leaves 1e-15, an entry that is missing all of it.
MISSED = 1e-9

# The same for differences, which leave 1e-11 or so of the largest entry.
MISSED_BY_DIFFERENCES = 1e-6

# The share of what an entry does between two points that its derivatives may leave unsaid.
UNSAID = 0.01

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
        if self.told is not None and np.array_equal(in_all, self.told[0]):  # as at the last point
            return self.rows, self.columns, self.told[1]
        steps = np.stack([self.along(params, color) for color in self.masks])
        if in_all is None:  # each has had a step of its own
            full = steps[self.colors]
        else:
            values = steps[self.colors[self.columns], self.rows]
            if self._complete(in_all, values):
                self.told = (in_all, values) if self._tells_all(values) else None
                return self.rows, self.columns, values
            full = self._one_by_one(params)
        if (full[~self.pattern] != 0).any():
            self._paint(self.pattern | (full != 0))
        return self.rows, self.columns, full[self.columns, self.rows]

    def dense(self, params: np.ndarray, jacobian=None) -> np.ndarray:
        """The same as a matrix (N, k)."""
        rows, columns, values = self.jacobian(params) if jacobian is None else jacobian
        found = np.zeros((self.pattern.shape[1], self.k))
        found[rows, columns] = values
        return found

    def pull(self, params: np.ndarray, bar: np.ndarray, jacobian=None) -> np.ndarray:
        """The transposed derivatives, those of :meth:`jacobian`, times a cotangent (N,): (k,)."""
        rows, columns, values = self.jacobian(params) if jacobian is None else jacobian
        return np.bincount(columns, bar[rows] * values, minlength=self.k)

    def _one_by_one(self, params: np.ndarray) -> np.ndarray:
        return np.stack([self.along(params, unit) for unit in np.eye(self.k)])

    def _paint(self, pattern: np.ndarray) -> None:
        """Colours for a pattern (k, N), greedily, the parameters with most entries first."""
        self.pattern, self.told, taken = pattern, None, []
        self.colors = np.empty(self.k, int)
        for j in np.argsort(-pattern.sum(axis=1), kind="stable"):
            free = (c for c, entries in enumerate(taken) if not (entries & pattern[j]).any())
            self.colors[j] = c = next(free, len(taken))
            if c == len(taken):
                taken.append(np.zeros_like(pattern[j]))
            taken[c] |= pattern[j]
        self.masks = [(self.colors == c).astype(float) for c in range(len(taken))]
        columns, rows = np.nonzero(pattern)
        order = np.argsort(self.colors[columns], kind="stable")
        self.rows, self.columns = rows[order], columns[order]

    def _tells_all(self, values: np.ndarray) -> bool:
        """Whether no change of a derivative would be lost in the sum over its entry."""
        most = np.zeros(self.pattern.shape[1])
        np.maximum.at(most, self.rows, np.abs(values))
        return bool((np.abs(values) >= ALIKE * most[self.rows]).all())

    def _complete(self, found: np.ndarray, values: np.ndarray) -> bool:
        """Whether the derivatives add up to the one along a direction in which all move."""
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

    A polynomial in the step, but for its fifth power: some 12 digits. The step is halved until two
    in a row agree, as it has to be where a pole is near. (Of a function that is linear along the
    direction, the first two differences do.)
    """

    def along(params, direction):
        def between(h):
            return function(params + h * direction) - function(params - h * direction)

        with np.errstate(all="ignore"):
            # As far as the smallest of those that move allows.
            h = 1e-3 / np.max(np.abs(direction) / np.maximum(1.0, np.abs(params)))
            wide, near, apart = between(2 * h), between(h), np.inf
            best = before = (8 * near - wide) / (12 * h)
            gap = np.abs(wide - 2 * near).max(initial=0) / (4 * h)
            if gap <= AGREE * np.abs(best).max(initial=0):
                return best
            for _ in range(HALVINGS):
                h, wide, near = h / 2, near, between(h / 2)
                found = (8 * near - wide) / (12 * h)
                gap = np.abs(found - before).max(initial=0)
                if gap < apart:
                    best, apart = before, gap
                if apart <= AGREE * np.abs(best).max(initial=0):
                    break
                before = found
        return best

    return along


def jacobian(function: Callable, x: np.ndarray) -> np.ndarray:
    """Derivatives of a smooth function of x (k,) by differences, one column for each entry."""
    along = difference(function)
    return np.stack([along(x, unit) for unit in np.eye(len(x))], axis=1)


def _cholesky(X: np.ndarray):
    """The lower factors of matrices (k, p, p) that are one but for complex steps, and inverses.

    LAPACK's factor of a complex matrix is no analytic function of it.
    """
    L = np.linalg.cholesky(X[0].real)
    inverse, p = np.linalg.inv(L), len(L)
    inner = 1j * (np.tri(p) - np.eye(p) / 2) * (inverse @ X.imag @ inverse.T)
    return L + L @ inner, inverse - inner @ inverse


def stationary_coefficients(A: np.ndarray, M: np.ndarray) -> np.ndarray:
    r"""Coefficients of a stationary vector autoregression from any matrices, moved or not.

    Ansley and Kohn (1986, A note on reparameterizing a vector autoregressive moving average model
    to enforce stationarity, Journal of Statistical Computation and Simulation 24, 99-106), for a
    covariance of the shocks that is the identity; that of :math:`\Sigma = M M^\top` has
    coefficients :math:`M C_i M^{-1}`.

    Parameters
    ----------
    A : array (k, order, p, p)
        The same matrices but for complex steps, whose squares are lost.
    M : array (k, p, p) or (p, p)
        Lower triangular.

    Returns
    -------
    C : array (k, order, p, p)
    """
    eye = np.eye(A.shape[-1])
    # Factors of the variances of prediction errors, forwards and backwards, and their inverses.
    F = F_inv = G = G_inv = eye
    forwards, backwards = [], []
    for a in A.swapaxes(0, 1):
        # The partial autocorrelations P = B^-1 A, and I - P P' = B^-1 B^-T.
        B, B_inv = _cholesky(eye + a @ a.swapaxes(1, 2))
        P = B_inv @ a
        P_t = P.swapaxes(1, 2)
        newest, oldest = F @ P @ G_inv, G @ P_t @ F_inv
        # Whittle's recursion: the coefficients of a longer regression from those of the last one.
        forwards, backwards = (
            [*(f - newest @ b for f, b in zip(forwards, backwards[::-1], strict=True)), newest],
            [*(b - oldest @ f for b, f in zip(backwards, forwards[::-1], strict=True)), oldest],
        )
        D, D_inv = _cholesky(eye - P_t @ P)
        F, F_inv, G, G_inv = F @ B_inv, B @ F_inv, G @ D, D_inv @ G_inv
    left, right = M @ F_inv, F @ np.linalg.inv(M)
    return np.stack([left @ f @ right for f in forwards], axis=1)


class _ArrayDerivatives:
    """Those of the arrays of a model, and of the known parts of its initial distribution.

    All in one vector, in which the axes of a matrix are turned: as statsmodels stores them.
    """

    where = slice(0)  # parameters that are differentiated otherwise

    def __init__(self, mod: MLEModel, params: np.ndarray):
        self.mod, m = mod, mod.ssm.k_states
        self.shapes, self.at, stop = {}, {}, 0
        for x in SHAPES:
            known = getattr(mod.ssm, ARRAYS[x]).T.shape if x in ARRAYS else None
            self.shapes[x] = known or (1, *[m] * len(SHAPES[x]))
            self.at[x] = slice(stop, stop := stop + int(np.prod(self.shapes[x])))
        self.size, self.exact, self.colored, self.seen = stop, True, None, set()
        self.here = self.last = None
        self.look_at(params)

    def knows(self, params: np.ndarray) -> bool:
        """Whether it was looked at where the signs are these."""
        return np.sign(params).tobytes() in self.seen

    def look_at(self, params: np.ndarray) -> None:
        """Go over to differences where complex steps miss something.

        Looked at wherever signs are new: a parameter may enter by its absolute value.
        """
        if not self.knows(params):
            self.seen.add(np.sign(params).tobytes())
            self._look(params)

    def _look(self, params: np.ndarray) -> None:
        self._refuse_moving_data(params)
        if not self.exact:
            return
        try:
            # One by one at first: a parameter that moves an entry unseen would be painted in the
            # colour of others that move it.
            masks = np.eye(len(params)) if self.colored is None else self.colored.masks
            self.colored = self.colored or Colored(self._along, params)
            self.exact = all(self._is_analytic(params, mask) for mask in masks)
        except (TypeError, ValueError, np.linalg.LinAlgError):  # it takes no complex numbers
            self.exact = False
        if not self.exact:
            self.colored = Colored(self._along, params, MISSED_BY_DIFFERENCES)

    def _refuse_moving_data(self, params: np.ndarray) -> None:
        data = []
        for x in (away_from(params), params):
            with suppress(ArithmeticError, ValueError):
                self._at(x)
            data.append(self.mod.ssm.endog.copy())
        if not np.array_equal(*data, equal_nan=True):
            raise ValueError(
                f"the update of this {self.mod.__class__.__name__} changes the data, "
                "mod.ssm.endog, with the params, which no derivative takes into account: expected "
                "data that stay"
            )

    def _along(self, params: np.ndarray, direction: np.ndarray) -> np.ndarray:
        """By a complex step, which leaves the model complex."""
        if not self.exact:
            return difference(self._at)(params, direction)
        found = self._at(params + 1j * STEP * direction)
        self.here = found.real
        return found.imag / STEP

    def jacobian(self, params: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """That of `colored`, looked at once more where it does not say how the arrays moved."""
        found = self.colored.jacobian(params)
        if not self._as_said(params, found):
            self._look(params)
            found = self.colored.jacobian(params)
        self.last = params.copy(), self.here, found
        return found

    def _as_said(self, params: np.ndarray, found: tuple) -> bool:
        """Whether the arrays have moved since the last point as the derivatives at both say.

        An update may lose the imaginary part on a branch that was not taken there.
        """
        rows, columns, values = found
        if not self.exact or self.last is None or self.last[2][0] is not rows:
            return True
        x, before, (*_, slopes) = self.last
        moves = (params - x)[columns] * (slopes + values) / 2
        moved = self.here - before
        missed = np.abs(moved - np.bincount(rows, moves, minlength=self.size))
        return not (missed > UNSAID * np.abs(moved) + MISSED * np.abs(before)).any()

    def _is_analytic(self, params: np.ndarray, mask: np.ndarray) -> bool:
        """Whether complex steps see what differences see: not through abs, real or a factor.

        Differences see little near a pole, so one of four steps has to agree, and roughly; but a
        step that is lost in rounding, beside what the one before it missed, says nothing.
        """
        params = away_from(params)
        rates, here = mask * self.colored.rates, np.abs(self._at(params))
        rates[self.where] = 0
        found = self._along(params, rates)
        apart, before = np.ones(self.size, bool), np.inf
        for share in (1e-3, 1e-4, 1e-5, 1e-6):
            h = share * np.min(np.maximum(1, np.abs(params))[rates != 0], initial=np.inf)
            if not apart.any() or h == np.inf:
                break
            with np.errstate(all="ignore"):
                ahead, behind = (self._at(params + s * h * rates) for s in (1, -1))
                expected = (ahead - behind) / (2 * h)
                missed, rounding = np.abs(found - expected), 1e-14 * here / h
                apart &= (missed > 0.01 * np.abs(expected) + rounding) | (rounding > before / 10)
            before = missed
        return bool(np.isfinite(found).all() and (h == np.inf or not apart.any()))

    def _at(self, params: np.ndarray) -> np.ndarray:
        """The arrays as one vector, complex for complex parameters."""
        mod, is_complex = self.mod, np.iscomplexobj(params)
        mod.update(params, transformed=True, includes_fixed=True, complex_step=is_complex)
        found = np.zeros(self.size, params.dtype)

        def at(x):
            return found[self.at[x]].reshape(self.shapes[x])

        for x, theirs in ARRAYS.items():
            X = getattr(mod.ssm, theirs)
            at(x)[:] = X.T if is_complex else X.real.T
        if self.shapes["c"][0] > 1:  # as in `_arrays`
            at("c")[-1] = 0
        for part, states in _parts(mod.ssm.initialization, np.arange(mod.ssm.k_states)):
            if part.initialization_type in ("known", "approximate_diffuse"):
                for x, X in zip(("a0", "P0"), _given(part), strict=True):
                    at(x)[0][np.ix_(*[states] * X.ndim)] = X if is_complex else np.real(X)
        return found

    def _each(self, X: np.ndarray) -> dict[str, np.ndarray]:
        """What such vectors (..., N) hold of each array: views, with an axis for time."""
        views = {x: X[..., at].reshape(*X.shape[:-1], *self.shapes[x]) for x, at in self.at.items()}
        return {x: V if len(SHAPES[x]) == 1 else V.swapaxes(-1, -2) for x, V in views.items()}

    def pack(self, gradient) -> np.ndarray:
        """A gradient as one vector."""
        found = np.empty(self.size)
        for x, X in self._each(found).items():
            X[:] = getattr(gradient, x)
        return found

    def pull(self, params: np.ndarray, bar: np.ndarray, jacobian=None) -> np.ndarray:
        """The inner products of a gradient, as one vector, with the derivatives (k,)."""
        return self.colored.pull(params, bar, jacobian or self.jacobian(params))

    def columns(self) -> np.ndarray:
        """Those of T and Z that some parameter moves, ascending."""
        found = []
        for x in "TZ":
            moved = self.colored.rows - self.at[x].start
            moved = moved[(moved >= 0) & (moved < np.prod(self.shapes[x]))]
            _, width, height = self.shapes[x]  # columns come before rows
            found.append(moved // height % width)
        return np.unique(np.concatenate(found))

    def dense(self, params: np.ndarray) -> np.ndarray:
        """The derivatives in each parameter (N, k)."""
        return self.colored.dense(params, self.jacobian(params))

    def moves(self, params: np.ndarray) -> dict[str, np.ndarray]:
        """The same for each array (k, ...), time first where it varies."""
        each = self._each(self.dense(params).T)
        return {x: X[:, 0] if X.shape[1] == 1 else X for x, X in each.items()}


def _root_of_shocks(mod: VARMAX, params: np.ndarray):
    """L (..., p, p), of which Q = L L', and where the parameters of the shocks stand in it.

    Of free parameters (..., k); of the model's own only where the shocks are correlated.
    """
    p = mod.k_endog
    L = np.zeros((*params.shape[:-1], p, p), params.dtype)
    diagonal = mod.error_cov_type == "diagonal"
    rows = np.diag_indices(p) if diagonal else mod._idx_lower_state_cov
    L[..., *rows] = params[..., mod._params_state_cov]
    return L, rows


class _VarmaxDerivatives(_ArrayDerivatives):
    """The same for a `VARMAX` whose shocks are correlated, its Q = L L' by the product rule.

    The entries of L share most of those of Q, and each would take a complex step of its own.
    """

    def __init__(self, mod: VARMAX, params: np.ndarray):
        self.where = mod._params_state_cov
        super().__init__(mod, params)

    def _along(self, params: np.ndarray, direction: np.ndarray) -> np.ndarray:
        others = direction.copy()
        others[self.where] = 0
        return super()._along(params, others)

    def _as_said(self, params: np.ndarray, found: tuple) -> bool:
        return True  # of Q they say nothing

    def pull(self, params: np.ndarray, bar: np.ndarray, jacobian=None) -> np.ndarray:
        found = super().pull(params, bar, jacobian)
        L, rows = _root_of_shocks(self.mod, params)
        Q_bar = bar[self.at["Q"]].reshape(L.shape)
        found[self.where] = ((Q_bar + Q_bar.T) @ L)[rows]
        return found

    def dense(self, params: np.ndarray) -> np.ndarray:
        found, (L, rows) = super().dense(params), _root_of_shocks(self.mod, params)
        move = np.eye(len(L))[rows[0]][:, :, np.newaxis] * L.T[rows[1]][:, np.newaxis]  # dL L'
        found[self.at["Q"], self.where] = (move + move.swapaxes(1, 2)).reshape(len(move), -1).T
        return found


class _VectorTransformation:
    """That of a `VARMAX` or a `DynamicFactor`: their vector autoregressions are written out here.

    They take Cholesky factors, which no complex step through LAPACK can differentiate. `blocks` are
    where they stand among the parameters, each with a function of those that returns M. The others
    are coloured.
    """

    def __init__(self, mod, free: np.ndarray, blocks: list):
        self.blocks, written_out = blocks, np.zeros(len(free), bool)
        for where, _ in blocks:
            written_out[where] = True
        exact = complex_step(lambda free: mod.transform_params(free))
        self.others = Colored(lambda *at: np.where(written_out, 0.0, exact(*at)), free)

    def dense(self, free: np.ndarray) -> np.ndarray:
        found, steps = self.others.dense(free), free + 1j * STEP * np.eye(len(free))
        for where, root in self.blocks:
            M = root(steps)
            A = steps[:, where].reshape(len(free), len(M.T), -1, len(M.T))
            C = stationary_coefficients(A.swapaxes(1, 2), M).swapaxes(1, 2)
            found[where] = C.reshape(len(free), -1).T.imag / STEP
        return found

    def pull(self, free: np.ndarray, bar: np.ndarray) -> np.ndarray:
        return bar @ self.dense(free)


def second_derivatives(moved, params: np.ndarray, bar: np.ndarray) -> np.ndarray:
    """Those of what `moved` has the first ones of, times a cotangent, by differences of exact ones.

    A parameter whose derivatives are the same elsewhere, where all others have moved too, has none:
    most coefficients are such, and variances.
    """
    found = np.zeros((len(params), len(params)))
    here, there = moved.dense(params), moved.dense(away_from(params))
    size = np.abs(here).max(axis=0, initial=0)
    curved = np.flatnonzero(np.abs(here - there).max(axis=0, initial=0) > 1e-13 * size)
    if curved.size:

        def slopes(some):
            x = params.copy()
            x[curved] = some
            return moved.pull(x, bar)[curved]

        found[np.ix_(curved, curved)] = jacobian(slopes, params[curved])
    return found


def _derivatives(mod: MLEModel, params: np.ndarray) -> _ArrayDerivatives:
    known, shapes = _known(mod), _shapes(mod)
    if known.shapes != shapes:
        correlated = getattr(mod, "error_cov_type", "") == "unstructured"
        written_out = type(mod).update is VARMAX.update and correlated
        kind = _VarmaxDerivatives if written_out else _ArrayDerivatives
        known.derivatives, known.shapes = kind(proxy(mod), params), shapes
    known.derivatives.look_at(params)
    return known.derivatives


def _transformation(mod: MLEModel, free: np.ndarray):
    """What pulls a gradient for the parameters of the model back to those of its optimiser."""
    known = _known(mod)
    if known.transformation is None:
        known.transformation = _new_transformation(mod, free)
    return known.transformation


def _refuse_memory(mod: MLEModel, free: np.ndarray) -> None:
    """Of a transformation: that of a `DynamicFactor` may read a covariance of the last update."""
    params = mod.transform_params(free)
    with suppress(ArithmeticError, ValueError):
        mod.update(away_from(params), transformed=True, includes_fixed=True)
    later = mod.transform_params(free)
    mod.update(params, transformed=True, includes_fixed=True)
    if not np.allclose(later, params, rtol=1e-9, atol=0):
        named = ", ".join(np.array(mod.param_names)[~np.isclose(later, params, 1e-9, 0)])
        model = mod.__class__.__name__
        raise ValueError(
            f"the transformation of this {model} depends on the last update of the model, not on "
            f"its argument alone (it gives another {named} after another one), so that the "
            "likelihood is no function of what its optimiser moves: expected one that does not, "
            f"as that of {model}(..., enforce_stationarity=False)"
        )


def _new_transformation(mod: MLEModel, free: np.ndarray):
    transform, blocks = type(mod).transform_params, []
    model = proxy(mod)
    _refuse_memory(model, free)
    if transform is VARMAX.transform_params:

        def root(steps):  # the Cholesky factor of L L' is L, but for the signs of its columns
            L, _ = _root_of_shocks(model, steps)
            return L * np.sign(np.diagonal(L.real, axis1=-2, axis2=-1))[..., np.newaxis, :]

        if mod.k_ar and mod.enforce_stationarity:
            blocks.append((mod._params_ar, root))
        if mod.k_ma and mod.enforce_invertibility:
            blocks.append((mod._params_ma, lambda _: np.eye(model.k_endog)))
    if transform is DynamicFactor.transform_params and mod.enforce_stationarity:
        if mod.factor_order:  # the factors' shocks have the identity matrix for covariance
            blocks.append((mod._params_factor_transition, lambda _: np.eye(model.k_factors)))
    if blocks:
        return _VectorTransformation(model, free, blocks)

    def function(free):
        return model.transform_params(free)

    exact, rough = complex_step(function), difference(function)

    def along(free, direction):
        with np.errstate(all="ignore"):
            found = exact(free, direction)
        # A logistic curve far out is flat, and overflows for complex numbers.
        return found if np.isfinite(found).all() else rough(free, direction)

    direction = np.sin(np.arange(len(free)) + 1)
    expected = rough(free, direction)
    # Entry by entry, as their units differ; what the differences lose to rounding is no difference.
    missed = 1e-6 * np.abs(expected) + 1e-9 * np.abs(function(free))
    analytic = False
    with np.errstate(all="ignore"), suppress(TypeError, ValueError, np.linalg.LinAlgError):
        analytic = (np.abs(exact(free, direction) - expected) <= missed).all()
    return Colored(along, free) if analytic else Colored(rough, free, MISSED_BY_DIFFERENCES)
