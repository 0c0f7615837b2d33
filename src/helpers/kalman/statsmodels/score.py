"""The log-likelihood of a model of statsmodels, and its exact score."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property

import numpy as np
from statsmodels.tsa.statespace.mlemodel import MLEModel

from helpers.kalman import compiled, diffuse
from helpers.kalman.statsmodels import updates
from helpers.kalman.statsmodels.arrays import (
    _arrays,
    _check_supported,
    _checked,
    _finite,
    _known,
    _NoLikelihoodError,
    _refuse_not_finite,
    _shapes,
    _Start,
    _through_stationary_start,
)
from helpers.kalman.statsmodels.updates import _derivatives, _transformation
from helpers.statespace import SHAPES, STATIC, Gradients, StateSpace

SCALED = ("P0", "H", "Q")  # by a scale that is concentrated out

# An exact diffuse state counts as unobserved where its variance given the data, in its own units,
# is this many times the least such variance: the rounding of sin(pi) in harmonics gives 1e32.
UNSEEN = 1e20

# One that the data tell exactly, as a random walk without noise does its level, has a variance of
# zero, which rounding leaves on either side of it: others are compared with this at least.
EXACTLY_SEEN = 1e-4

# A singular value, relative to the largest, of what diffuse numbers do to all observations, that
# is the rounding of one that does nothing: sin(pi) makes 1e-16, some hundred steps of it more.
CANCELS = 1e-12


def loglike(mod: MLEModel, params, *, transformed: bool = True) -> float:
    """The log-likelihood, as ``mod.loglike(params)``.

    Parameters
    ----------
    mod : statsmodels.tsa.statespace.mlemodel.MLEModel
        Any state space model: its burn-in, concentrated scale, gaps, varying arrays and fixed
        parameters count as they do there.
    params : array (k,)
        The free parameters.
    transformed : bool
        Whether they are the model's parameters (True) or those of its optimiser.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If the number of parameters is wrong, or one of them is not a number; if they lie outside
        the stationary region of a model that starts from its stationary distribution; if the model
        is not a state space model, is a `RecursiveLS`, which has no parameters, or has no initial
        distribution, filtered timing, a log-likelihood of its own, or an exact diffuse start
        together with a burn-in, or of a state that the data do not reach at these parameters, or
        changes its data with them.
    numpy.linalg.LinAlgError
        If some F is not positive definite.
    """
    full = mod.handle_params(_checked(mod, params), transformed=transformed)
    return _Point(mod, full, value_only=True).value


def score(mod: MLEModel, params, *, transformed: bool = True) -> np.ndarray:
    """The gradient of the log-likelihood, as ``mod.score(params)``, from one pass of the filter.

    Parameters
    ----------
    mod, params, transformed
        As :func:`loglike`.

    Returns
    -------
    array (k,)

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError
        As :func:`loglike`.
    """
    params = _checked(mod, params)
    return _score_as_given(mod, params, transformed, False, lambda full: _score(mod, full))


def _score_as_given(mod, params, transformed: bool, includes_fixed: bool, of_all) -> np.ndarray:
    """The score for parameters as they are given, by `of_all`, which is for all of the model's."""
    found = of_all(mod.handle_params(params, transformed, includes_fixed))
    dropped = mod._has_fixed_params and not includes_fixed
    if not transformed and found.size:
        free = mod.handle_params(params, True, includes_fixed)
        found = _transformation(mod, free).pull(free, _without_fixed(mod, found, dropped))
    return found[mod._free_params_index] if dropped else found


def _without_fixed(mod: MLEModel, found: np.ndarray, dropped: bool) -> np.ndarray:
    """Zeros for the fixed parameters, whatever the transformation makes of those beside them."""
    if dropped:
        found = found.copy()
        found[mod._fixed_params_index] = found.T[mod._fixed_params_index] = 0
    return found


def _score(mod: MLEModel, params: np.ndarray) -> np.ndarray:
    """The score for all parameters, fixed ones included."""
    known, before, jacobian = _known(mod), _known(mod).derivatives, None
    if before is not None and before.knows(params):
        # Before the likelihood, which leaves the model real. An update that fails will fail again.
        with suppress(ArithmeticError, LookupError, TypeError, ValueError):
            jacobian = before.jacobian(params)
    point = _Point(mod, params, in_columns=True)
    if jacobian is not None and known.derivatives is before and _shapes(mod) == known.shapes:
        return before.pull(params, before.pack(point.gradient), jacobian)
    found = _pulled(mod, params, point)
    mod.update(params, transformed=True, includes_fixed=True)  # leaves the model real
    return found


def _pulled(mod: MLEModel, params: np.ndarray, point: _Point) -> np.ndarray:
    """The score of a point, from its gradient for the arrays. Leaves the model complex."""
    if not params.size:
        return np.zeros(0)
    moved = _derivatives(mod, params)
    found = moved.pull(params, moved.pack(point.gradient))
    if point.columns is not None and not np.isin(moved.columns(), point.columns).all():
        # Only now is it known that more of T or Z moves here: without a gradient so far.
        return _pulled(mod, params, _Point(mod, params, in_columns=True))
    return found


def _seen(y: np.ndarray, arrays: dict, A: np.ndarray, r: int | None = None) -> np.ndarray:
    """An orthonormal basis (q, r) of the diffuse numbers that reach an observation, r if known.

    Others reach none, or cancel: the level and the first state of an ARMA model that are both
    diffuse, as of an integrated SARIMAX whose stationarity is not enforced. The likelihood is that
    of the rest.
    """
    model = _finite(arrays)
    rows = _reach(y, model.T, model.Z, A)
    units = np.sqrt(diffuse.first_room(A, model))
    values, right = np.linalg.svd(rows * units, full_matrices=True)[1:]
    r = (values > CANCELS * values.max(initial=0)).sum() if r is None else r
    unseen = np.linalg.qr(right[r:].T * units[:, np.newaxis], mode="complete")[0]
    return unseen[:, len(right) - r :]


def _reach(y: np.ndarray, T: np.ndarray, Z: np.ndarray, A: np.ndarray) -> np.ndarray:  # noqa: N803
    """What the diffuse numbers (q of them) put into each observation: rows Z T^t A, scaled."""
    rows, X = [], A
    T, Z = (np.broadcast_to(x, (len(y), *x.shape[-2:])) for x in (T, Z))
    for t, gone in enumerate(np.isnan(y)):
        rows.append(Z[t][~gone] @ X)
        X = T[t] @ X
        size = np.abs(X).max()
        if not 0 < size < np.inf:
            break
        X = X / size
    return np.concatenate(rows)


def _pass(y, arrays: dict, weights: np.ndarray, columns, value_only: bool):
    """The value and the gradients of arrays that a model has written: they need no more checks.

    Those of T and Z may be right in some `columns` alone, and all may be left out.
    """
    kept = [x for x, X in arrays.items() if x in STATIC or X.ndim > len(SHAPES[x])]
    time = {x: X[:] if x in kept else X[np.newaxis] for x, X in arrays.items()}
    given = [np.asarray(time[x], float) for x in ("a0", "P0", *"cdTZH")]
    for X in given:
        X.flags.writeable = False
    R, Q = time["R"], time["Q"]
    given = [y, *given, R @ Q @ R.mT]
    if value_only:
        value = float(weights @ compiled.values(given))
        if np.isfinite(value):
            return value, None
        columns = np.empty(0, np.int64)  # what is wrong, the pass of the gradient tells
    try:
        l, _, out = compiled.evaluate(given, weights, columns=columns)
    except np.linalg.LinAlgError:
        _refuse_not_finite(arrays)
        raise
    value = float(weights @ l)
    if not np.isfinite(value):
        _refuse_not_finite(arrays)
    return value, compiled.gradients_in_time(R, Q, out, kept)


class _Point:
    """A model at some parameters: its likelihood, its arrays, and what they make of directions.

    `arrays` are those of the model; `model` is what is filtered, where a concentrated scale has
    multiplied the covariances. `raw` is the gradient for the arrays of `model`, and `gradient` that
    for `arrays`, where c, T, R and Q have what they do to a stationary a0 and P0. `columns` are
    those of T and Z that parameters move, where gradients are needed in no others (`in_columns`).
    With `value_only` there are none.
    """

    def __init__(self, mod: MLEModel, params: np.ndarray, in_columns=False, value_only=False):
        _check_supported(mod)
        self.mod, self.params = mod, params
        self.arrays = arrays = _arrays(mod, params)
        self.start = start = _Start(mod, arrays)
        arrays |= {"a0": start.a0, "P0": start.P0}
        self.y = y = np.array(mod.ssm.endog.T, order="C")
        self.A = self._columns() if start.A.size else start.A
        burn = mod.loglikelihood_burn
        self.weights, self.scale = np.ones(len(y)), 1.0
        self.weights[:burn] = 0
        # Only now: where the start is none, the derivatives are not asked for.
        in_columns = in_columns and params.size and not self.A.size
        self.columns = _derivatives(mod, params).columns() if in_columns else None
        if np.iscomplexobj(mod.ssm.transition):
            _arrays(mod, params)  # leaves the model real
        concentrated = mod.ssm.filter_concentrated
        self.value, self.raw = self._evaluate(value_only and not concentrated)
        if concentrated:
            # The scale that maximises the likelihood: all covariances times 1 + x add
            # x/2 (sum v' F^-1 v - k) to it, k the number of observations less one for each diffuse
            # state, which fits one. There its own derivative is zero.
            k = np.isfinite(y[burn:]).sum() - self.A.shape[1]
            if k < 1:
                raise ValueError(
                    f"the scale of this {type(mod).__name__} is concentrated out: "
                    f"{k + self.A.shape[1]} observations and {self.A.shape[1]} diffuse states "
                    "leave none to tell it by"
                )
            twice = 2 * sum((getattr(self.raw, x) * arrays[x]).sum() for x in SCALED)
            self.scale = (twice + k) / k
            self.value, self.raw = self._evaluate(value_only)
        self.gradient = None if value_only else self.raw
        if not value_only and (concentrated or start.stationary):
            self.gradient = self.raw._replace(
                **{x: self.scale * getattr(self.raw, x) for x in SCALED},
                **{x: getattr(self.raw, x).copy() for x in ("c", "T", "R")},
            )
            _through_stationary_start(start, arrays, self.gradient)

    def _evaluate(self, value_only: bool) -> tuple[float, Gradients | None]:
        """The log-likelihood with the scale as it stands, and its gradient for those arrays."""
        if not self.A.size:
            return _pass(self.y, self._scaled(), self.weights, self.columns, value_only)
        model = _finite(self._scaled())
        try:
            value, _, gradient, _, estimate, *_ = diffuse.loglike_and_grad(self.y, model, self.A)
        except ValueError:  # the data say nothing about a direction
            self._refuse_unseen()
        variances = np.diag(estimate.covariance) / diffuse.first_room(self.A, model)
        if (variances > UNSEEN * max(variances.min(), EXACTLY_SEEN)).any():
            self._refuse_unseen()
        return value, gradient

    def _columns(self) -> np.ndarray:
        """A for the diffuse numbers that reach an observation at most parameters."""
        known, A = _known(self.mod), self.start.A
        key = np.isnan(self.y).tobytes(), A.tobytes(), _shapes(self.mod)
        if known.diffuse != key:
            start = {x: self.arrays[x] for x in ("a0", "P0")}
            try:
                seen = _seen(self.y, _arrays(self.mod, updates.away_from(self.params)) | start, A)
            except (ArithmeticError, ValueError):  # none of its points
                seen = _seen(self.y, self.arrays, A)
            finally:
                _arrays(self.mod, self.params)
            known.diffuse, known.reached = key, seen.shape[1]
        r = known.reached
        return A if r == A.shape[1] else A @ _seen(self.y, self.arrays, A, r)

    def _refuse_unseen(self):
        """Which parameters hide a diffuse state: those that would show it by what they move."""
        moves = _derivatives(self.mod, self.params).moves(self.params)
        _arrays(self.mod, self.params)  # leaves the model real
        reach = (np.abs(moves[x] @ self.start.A).reshape(len(self.params), -1) for x in "TZ")
        shows = sum(X.max(axis=1, initial=0) for X in reach)
        named = ", ".join(
            f"{self.mod.param_names[j]} = {self.params[j]:.6g}"
            for j in np.flatnonzero(shows > 1e-6 * shows.max(initial=0))
        )
        raise _NoLikelihoodError(
            f"the data say nothing about a diffuse state of this {type(self.mod).__name__}"
            + (f" at {named}" if named else "")
            + ": there the likelihood of an exact diffuse start has no value, and on the way there "
            "it grows without bound, so that it has no maximum. Fix the parameter elsewhere, "
            "mod.fix_params, or take an approximate start, use_exact_diffuse=False"
        )

    def _scaled(self) -> dict:
        if self.scale == 1:
            return self.arrays
        return self.arrays | {x: self.scale * self.arrays[x] for x in SCALED}

    @cached_property
    def model(self) -> StateSpace:
        return _finite(self._scaled())
