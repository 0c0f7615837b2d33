r"""Likelihood, exact score and Hessian of statsmodels' state space models, in closed form.

statsmodels differentiates by running its filter once more for each parameter.  Here the
likelihood's gradient with respect to the arrays of the model, :math:`\bar T, \bar Z, \dots`, comes
from one pass; what the parameters :math:`\theta` do to the arrays is differentiated by a complex
step of ``mod.update``, which runs no filter; and the two meet in

.. math::

   \frac{\partial \mathcal L}{\partial \theta_j}
   = \sum_X \langle \bar X, \partial X / \partial \theta_j \rangle ,
   \qquad X = a_0, P_0, c, d, T, Z, R, H, Q .

The Hessian is that of the arrays, along their derivatives, and what the arrays' own second
derivatives add:

.. math::

   \frac{\partial^2 \mathcal L}{\partial \theta_i\, \partial \theta_j}
   = \sum_X \Bigl\langle \frac{\partial X}{\partial \theta_i} ,
     \frac{\partial \bar X}{\partial \theta_j} \Bigr\rangle
   + \sum_X \Bigl\langle \bar X, \frac{\partial^2 X}{\partial \theta_i\, \partial \theta_j}
     \Bigr\rangle .

>>> import statsmodels.api as sm
>>> from helpers.kalman.statsmodels import fit, score
>>> mod = sm.tsa.SARIMAX(sm.datasets.nile.data.load_pandas().data["volume"], order=(1, 0, 1))
>>> exact = score(mod, mod.start_params)
>>> results = fit(mod, disp=False)
>>> errors = standard_errors(mod, results.params, "expected")
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from inspect import signature
from weakref import WeakKeyDictionary, proxy

import numpy as np

from helpers.kalman import _needing, diffuse, fused, updates
from helpers.kalman import hessian as arrays_hessian
from helpers.kalman import information as arrays_information
from helpers.kalman.climbing import climb
from helpers.kalman.information import _inner
from helpers.kalman.recursions import TOLERANCE, symmetric
from helpers.kalman.stationary import Stationary
from helpers.kalman.updates import STEP, Colored
from helpers.statespace import SHAPES, STATIC, Gradients, StateSpace

with _needing(__name__, "statsmodels", "[statsmodels]"):
    from statsmodels.base.optimizer import Optimizer
    from statsmodels.regression.recursive_ls import RecursiveLS
    from statsmodels.tools.sm_exceptions import ConvergenceWarning
    from statsmodels.tsa.arima.model import ARIMA
    from statsmodels.tsa.statespace.dynamic_factor import DynamicFactor
    from statsmodels.tsa.statespace.exponential_smoothing import ExponentialSmoothing
    from statsmodels.tsa.statespace.kalman_filter import TIMING_INIT_FILTERED, KalmanFilter
    from statsmodels.tsa.statespace.mlemodel import MLEModel, _handle_args
    from statsmodels.tsa.statespace.varmax import VARMAX

__all__ = ["fit", "hessian", "information", "loglike", "score", "standard_errors", "using"]

# An eigenvalue of an information matrix, its diagonal scaled to ones, that counts as zero: that of
# a parameter without effect comes out as 1e-13 or so, and one of 1e-9 still has a digit or two.
SINGULAR = 1e-11
# Differences with two steps, one half of the other, agree to this share, or are halved so often.
AGREE, HALVINGS = 1e-9, 16

# A variance that counts as zero, relative to the largest of the model's. Optimisers work with its
# square root, and leave that at 1e-7 or so where the variance is to be zero.
BOUNDARY = 1e-12

# A variance of an exact diffuse state given the data, in its own units, relative to the least such
# variance, that means there is nothing to see of it: sin(pi) in a full set of harmonics makes 1e32.
UNSEEN = 1e20
# One that the data tell exactly, as a random walk without noise does its level, has a variance of
# zero, which rounding leaves on either side of it: others are compared with this at least.
EXACTLY_SEEN = 1e-4

# A singular value, relative to the largest, of what diffuse numbers do to all observations, that
# is the rounding of one that does nothing: sin(pi) makes 1e-16, some hundred steps of it more.
CANCELS = 1e-12

# Iterations of L-BFGS before the first step with second derivatives: starting values may be wrong
# by orders of magnitude, and scores are cheap.
APPROACH = 15

# Iterations of an optimiser, unless told otherwise; ``mod.fit`` ends after 50, wherever it is then.
# Here they take a fraction of the time.
MOST = 200

# What an optimiser is given for an infinite parameter of its own: less than a hundredth of the way
# from the edge of an interval that statsmodels maps by a logistic function.
FARTHEST = 5.0

# Where a trial is refused, the next one goes this share of the way.
SHORTER = 0.25

# Log-likelihoods that count as the same.
SAME = 0.01

# Arguments by which an optimiser of ours is put in the place of one of statsmodels'.
OURS = ("extra_fit_funcs", "cov_params_func")

SCALED = ("P0", "H", "Q")  # by a scale that is concentrated out

# Our names and statsmodels', whose last axis is time.
ARRAYS = {
    "c": "state_intercept", "d": "obs_intercept", "T": "transition", "Z": "design",
    "R": "selection", "H": "obs_cov", "Q": "state_cov",
}  # fmt: skip


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
        Whether they are those of the model, or those that its optimiser sees.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If the number of parameters is wrong, or one of them is not a number; if they lie outside
        the stationary region of a model that starts from its stationary distribution; if the model
        is none in state space, is a `RecursiveLS`, which has no parameters, or has no initial
        distribution, filtered timing, a log-likelihood of its own, or an exact diffuse start
        together with a burn-in, or of a state that the data do not reach at these parameters, or
        changes its data with them.
    numpy.linalg.LinAlgError
        If some F is not positive definite.
    """
    full = mod.handle_params(_checked(mod, params), transformed=transformed)
    return _value_and_gradient(mod, full)[0]


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


def hessian(mod: MLEModel, params, *, transformed: bool = True) -> np.ndarray:
    """The second derivatives of the log-likelihood; ``mod.hessian(params)`` divides by ``nobs``.

    Parameters
    ----------
    mod, params, transformed
        As :func:`loglike`.  A concentrated scale and an exact diffuse start count here too.

    Returns
    -------
    array (k, k)
        Symmetric.  Exact but for the second derivatives of the arrays, which are differences of
        first ones that are exact: 1e-10 or better.

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError
        As :func:`loglike`.
    """
    params = _checked(mod, params)
    full = mod.handle_params(params, transformed=transformed)
    point = _Point(mod, full)
    if not params.size:
        return np.zeros((0, 0))
    found = point.hessian()
    if not transformed:
        free = mod.handle_params(params, True, False)
        found, slopes = (
            _without_fixed(mod, X, mod._has_fixed_params) for X in (found, _score(mod, full))
        )
        map = _transformation(mod, free)
        J = map.dense(free)
        curved = _jacobian(lambda x: map.pull(x, slopes), free)
        found = symmetric(J.T @ found @ J + curved)
    return _free(mod, found)


def information(mod: MLEModel, params, kind: str = "observed") -> np.ndarray:
    """The information matrix: its inverse estimates the covariance of the fitted parameters.

    Parameters
    ----------
    mod, params
        As :func:`loglike`; the parameters are those of the model.
    kind : "observed", "expected", "opg" or "sandwich"
        - "observed": minus the Hessian, I.
        - "expected": its mean over series from the model with gaps in the same places.  (With an
          approximate diffuse start these have a starting level of any size, and what they say about
          a parameter in T or Z that multiplies it has little to do with the series at hand.)
        - "opg": the outer product of the gradients of the steps, G.
        - "sandwich": I G^-1 I, so that its inverse is I^-1 G I^-1, the covariance of an estimate
          that does not need the model to be true (but does need its score to have mean zero).

        Where a scale is concentrated out, what is lost by not knowing it is taken off.

    Returns
    -------
    array (k, k)
        Symmetric, of the whole series: not divided by its length.

    Raises
    ------
    ValueError
        If ``kind`` is none of these; if it is not "observed" and the start is exact diffuse; if G
        is singular for "sandwich".  Or as :func:`loglike`.
    numpy.linalg.LinAlgError
        As :func:`loglike`.
    """
    _check_kind(kind)
    params = _checked(mod, params)
    point = _Point(mod, mod.handle_params(params, transformed=True))
    if not params.size:
        return np.zeros((0, 0))
    if kind == "observed":
        return _free(mod, -point.hessian())
    if kind == "expected":
        return _free(mod, point.information(arrays_information.expected_information))
    if kind == "opg":
        return _free(mod, point.information(arrays_information.outer_product))
    observed, G, names = _observed_and_opg(mod, point)
    found = observed @ _inverse(G, names, "outer product of the gradients") @ observed
    return symmetric(_without_last(found) if len(names) > len(_names(mod)) else found)


def _observed_and_opg(mod: MLEModel, point: _Point):
    """I and G of the free parameters and, where it is concentrated, of the log scale; the names."""
    observed = _free(mod, -point.hessian(with_scale=True))
    G = _free(mod, point.information(arrays_information.outer_product, with_scale=True))
    return observed, G, [*_names(mod), "log scale"][: len(G)]


def standard_errors(mod: MLEModel, params, kind: str = "observed") -> np.ndarray:
    """Standard errors of fitted parameters: roots of the diagonal of the inverse information.

    Parameters
    ----------
    mod, params, kind
        As :func:`information`.

    Returns
    -------
    array (k,)

    Raises
    ------
    ValueError
        If a variance is zero, the boundary of what it may be: the message says which.  If the
        information is singular, or the likelihood curves upwards somewhere: the message names the
        direction.  Or as :func:`information`.
    numpy.linalg.LinAlgError
        As :func:`loglike`.
    """
    _check_kind(kind)
    params = _checked(mod, params)
    if not params.size:
        return np.sqrt(np.diag(information(mod, params, kind)))
    _refuse_boundary(mod, mod.handle_params(params, transformed=True))
    if kind == "sandwich":
        full = mod.handle_params(params, transformed=True)
        observed, G, names = _observed_and_opg(mod, _Point(mod, full))
        inverse = _inverse(observed, names, "observed information")
        return np.sqrt(np.diag(inverse @ G @ inverse))[: len(_names(mod))]
    covariance = _inverse(information(mod, params, kind), _names(mod), f"{kind} information")
    return np.sqrt(np.diag(covariance))


@contextmanager
def using(mod: MLEModel) -> Iterator[MLEModel]:
    """Within it, ``mod.loglike`` and ``mod.score`` of this one model are those of this module.

    Whatever statsmodels builds on them uses them: ``mod.fit(optim_score="approx")`` for one.  Where
    the likelihood has no value it is -inf, and the score NaN: an optimiser of statsmodels' may end
    at such a trial and say that it has converged, which :func:`fit` does not.

    Parameters
    ----------
    mod : statsmodels.tsa.statespace.mlemodel.MLEModel

    Yields
    ------
    mod

    Examples
    --------
    >>> import statsmodels.api as sm
    >>> mod = sm.tsa.SARIMAX(sm.datasets.nile.data.load_pandas().data["volume"], order=(1, 0, 1))
    >>> with using(mod):
    ...     results = mod.fit(optim_score="approx", method="bfgs", disp=False)
    """
    _check_supported(mod)
    within = _Within(mod)
    own = {name: X for name, X in vars(mod).items() if name in ("loglike", "score")}
    mod.loglike, mod.score = _Door(within, "loglike"), _Door(within, "score")
    try:
        yield mod
    finally:
        del mod.loglike, mod.score
        vars(mod).update(own)  # a context around this one
        within.leave()


class _Within:
    """The likelihood and the score of a model, each found once where an optimiser asks for both.

    `refusal` says why the last trial that had no likelihood had none.
    """

    def __init__(self, mod: MLEModel):
        self.mod, self.theirs, self.refusal = mod, mod.loglike, None
        self.kept, self.last = [None, None, None], None

    def at(self, params):
        here = params.tobytes()
        if here != self.kept[0] or _state(self.mod) != self.kept[1]:
            found = _value_and_gradient(self.mod, params)
            # The state afterwards: an update may make the start.
            self.kept = [here, _state(self.mod), found]
        return self.kept[2]

    def loglike(self, params, *args, **kwargs):
        names, defaults = MLEModel._loglike_param_names, MLEModel._loglike_param_defaults
        transformed, includes_fixed, complex_step, more = _handle_args(
            names, defaults, *args, **kwargs
        )
        if complex_step or more:
            return self.theirs(params, *args, **kwargs)
        full = self.mod.handle_params(params, transformed, includes_fixed)
        try:
            return self.at(full)[0]
        except (np.linalg.LinAlgError, _NoLikelihoodError) as refused:
            self.refusal = str(refused)  # an optimiser turns round there
            return np.nan if np.isnan(full).any() else -np.inf

    def score(self, params, *args, **kwargs):
        names, defaults = MLEModel._score_param_names, MLEModel._score_param_defaults
        transformed, includes_fixed, *_ = _handle_args(names, defaults, *args, **kwargs)

        def of_all(full):
            self.last = full
            return _pulled(self.mod, full, self.at(full)[1])

        try:
            return _score_as_given(self.mod, params, transformed, includes_fixed, of_all)
        except (np.linalg.LinAlgError, _NoLikelihoodError):  # asked for with the value there
            return np.full(np.shape(params), np.nan)

    def leave(self):
        """Leave the model real, which a score left complex; unless it has been updated since."""
        arrays = (getattr(self.mod.ssm, theirs) for theirs in ARRAYS.values())
        if self.last is not None and any(np.iscomplexobj(X) and X.imag.any() for X in arrays):
            self.mod.update(self.last, transformed=True, includes_fixed=True)


class _Door:
    """What stands in the place of a method of a model; in a copy of that, the method itself."""

    def __init__(self, within: _Within, name: str):
        self.within, self.name = within, name

    def __call__(self, *args, **kwargs):
        return getattr(self.within, self.name)(*args, **kwargs)

    def __reduce__(self):
        return getattr, (self.within.mod, self.name)


def fit(mod: MLEModel, start_params=None, method: str = "lbfgs", **kwargs):
    """``mod.fit`` with the likelihood and the exact score of this module.

    Parameters
    ----------
    mod : statsmodels.tsa.statespace.mlemodel.MLEModel
    start_params : array (k,), optional
        As in ``mod.fit``; ``mod.start_params`` if None.  One on the edge of an interval, such as a
        cycle's damping of zero, is infinite to an optimiser, which could not move it: that one is
        moved inside.
    method : str
        One of ``mod.fit``, but "em", or, after fifteen iterations of L-BFGS, a climb with second
        derivatives (:mod:`helpers.kalman.climbing`):

        - "newton": with the Hessian.  A handful of steps, of which each costs a few scores.
        - "scoring": with the expected information, corrected by what the scores say.

        A trial that has no likelihood makes a line search try a shorter step.  Wherever a method
        ends, the Hessian says what is left to gain, and Newton's steps go on if it is more than
        1e-8, as far as ``maxiter`` allows.
    **kwargs
        Those of ``mod.fit``, for all methods: ``maxiter`` (200 if not given, 50 for the climbs,
        where ``mod.fit`` ends after 50), ``cov_type``, ``disp``, ``callback`` and others.

    Returns
    -------
    statsmodels.tsa.statespace.mlemodel.MLEResults
        Its filter and its standard errors are statsmodels' own.

    Raises
    ------
    ValueError
        If the model is one of those that :func:`loglike` refuses, or its start has no likelihood;
        for estimates without a score, "em" and ``gls=True``; or for "scoring" with an exact
        diffuse start, which has no expected information.

    Warns
    -----
    statsmodels.tools.sm_exceptions.ConvergenceWarning
        If the end is no maximum: the message names the parameter with which the likelihood rises.
    RuntimeWarning
        If ``results.llf``, which statsmodels' filter finds, is not what was maximised.
    """
    if kwargs.get("gls") or method == "em":
        what = "gls=True" if kwargs.get("gls") else "method='em'"
        raise ValueError(
            f"{what} is an estimate that takes no score: mod.fit({what}) instead, and from "
            "there, if its maximum is asked for, fit(mod, start_params=results.params)"
        )
    start_params, kwargs = _inside(mod, start_params, kwargs)
    with using(mod):
        ends = []
        given = {
            "method": method,
            "optim_score": "approx",
            "maxiter": 50 if method in CURVATURES else MOST,
            "extra_fit_funcs": {method: partial(_optimise, mod, method, ends)},
            "cov_params_func": lambda *_: None,
            "warn_convergence": False,
        } | kwargs
        if isinstance(mod, ARIMA):
            # It takes what is for the optimiser in a bundle, and another method for itself.
            own = signature(mod.fit).parameters.keys() - {"start_params", "method"}
            own = {name: given.pop(name) for name in own & given.keys()}
            bundle = own.pop("method_kwargs", None) or {}
            given = {"method": "statespace", "method_kwargs": given | bundle, **own}
        results = mod.fit(start_params, **given)
        for name in OURS:  # the results are saved without
            (getattr(results, "mle_settings", None) or {}).pop(name, None)
        for sentence, category in _told(mod, ends, results, mod.loglike.within.refusal):
            warnings.warn(sentence, category, stacklevel=2)
        return results


def _inside(mod: MLEModel, start, given: dict) -> tuple:
    """The start and the other arguments of a fit, without edges: only cycles have any."""
    if not getattr(mod, "cycle", False) or not given.get("transformed", True):
        return start, given
    includes_fixed = start is None or given.get("includes_fixed", False)
    full = mod.start_params if start is None else start
    full = mod.handle_params(full, transformed=True, includes_fixed=includes_fixed)
    with np.errstate(divide="ignore"):
        free = np.asarray(mod.untransform_params(full), float)
    edge = np.isinf(free)
    if not edge.any():
        return start, given
    full = np.where(edge, mod.transform_params(np.clip(free, -FARTHEST, FARTHEST)), full)
    return full, given | {"includes_fixed": True}


def _optimise(mod, method, ends, objective, gradient, start, fargs, given, *, maxiter, disp, **how):
    """A method of statsmodels', and Newton's steps from where it ends, as many as are left.

    In the form that statsmodels asks of an optimiser: the parameters, and what is told of them.
    """
    if not start.size:
        return start, {"converged": True, "iterations": 0}
    value = objective(start, *fargs)
    if not np.isfinite(value):
        why = mod.loglike.within.refusal or f"it is {-value}"
        raise ValueError(f"the start_params have no likelihood to begin with: {why}")
    climbs, iterations, callback = method in CURVATURES, 0, how["callback"]

    def counted(*args, **kwargs):
        nonlocal iterations
        iterations += 1
        return callback(*args, **kwargs) if callback else None

    how["callback"] = counted
    given = {x: X for x, X in given.items() if x not in OURS}
    trials = _Shortened(objective, gradient)
    how["hessian"] = lambda x, *args: _minus_hessian(mod, x) / len(mod.endog)
    del how["hess"]
    if climbs:
        named = {"method": "lbfgs", "maxiter": min(APPROACH, maxiter), "disp": False}
        given = {"factr": 0.0, "pgtol": 0.0} | given
    else:
        named = {"method": method, "maxiter": maxiter, "disp": disp}
    x, about, _ = Optimizer()._fit(trials.value, trials.slope, start, fargs, given, **how | named)
    taken = 0 if climbs else iterations
    # A parameter on a bound that it was given stays there.
    low, high = np.array(given.get("bounds") or [(None, None)] * len(x), float).T
    moves = ~((x <= low) | (x >= high))

    def function(some):
        whole = x.copy()
        whole[moves] = some
        if ((whole < low) | (whole > high)).any():
            return -np.inf, None
        value = mod.loglike(whole, transformed=False)
        finite = np.isfinite(value)
        return value, mod.score(whole, transformed=False)[moves] if finite else None

    def curvature(some):
        whole = x.copy()
        whole[moves] = some
        try:
            return CURVATURES[method if climbs else "newton"](mod, whole)[np.ix_(moves, moves)]
        except (np.linalg.LinAlgError, _NoLikelihoodError):  # a climb ends there, and says so
            return np.full((moves.sum(), moves.sum()), np.nan)

    def stepped(some):
        if callback:
            whole = x.copy()
            whole[moves] = some
            callback(whole)

    left, secant = max(0, maxiter - taken), method == "scoring"
    found = climb(function, curvature, x[moves], most=left, secant=secant, callback=stepped)
    x[moves] = found.x
    ends.append((found, moves))
    if disp:
        ended = "converged" if found.converged else "has not converged"
        print(f"{method} {ended} after {taken + found.steps} steps, likelihood {found.value:.6g}")
    return x, about | {
        "fopt": -found.value / len(mod.endog),
        "gopt": -found.slope / len(mod.endog),
        "fcalls": about.get("fcalls", 0) + found.evaluations,
        "warnflag": 0 if found.converged else 1,
        "converged": found.converged,
        "iterations": taken + found.steps,
    }


class _Shortened:
    """What a line search minimises, with an answer where a trial is refused: a shorter step.

    It is that of a parabola with the value and the slope of the last point that was not refused,
    and its minimum at a share of the step.
    """

    def __init__(self, objective, gradient):
        self.objective, self.gradient, self.last = objective, gradient, None

    def value(self, x, *args):
        self.here = self.objective(x, *args)
        return self.here if np.isfinite(self.here) else self._parabola(x)[0]

    def slope(self, x, *args):
        found = self.gradient(x, *args)
        if not np.isfinite(found).all():
            return self._parabola(x)[1]
        self.last = x.copy(), self.here, found
        return found

    def _parabola(self, x):
        if self.last is None:  # a method without slopes
            return np.inf, np.full(len(x), np.nan)
        before, value, slope = self.last
        step = x - before
        down = -abs(slope @ step) or -1.0
        return value + down * (1 - 0.5 / SHORTER), step * down * (1 - 1 / SHORTER) / (step @ step)


def _told(mod: MLEModel, ends: list, results, refusal) -> Iterator[tuple]:
    """What a fit has to say of its end: where the likelihood still rises, and what is not its."""
    for found, moves in ends:
        names = np.array(_names(mod))[moves]
        if not found.converged:
            units = np.sqrt(np.abs(np.diag(found.curvature)))
            units = np.where((units > 0) & np.isfinite(units), units, 1.0)
            j = int(np.argmax(np.abs(found.slope / units)))
            yield (
                "Maximum Likelihood optimization failed to converge: the log-likelihood "
                f"{found.value:.6g} still rises with {names[j]} (score {found.slope[j]:.3g} at "
                f"{found.x[j]:.6g}, both as the optimiser sees it). Check mle_retvals"
                + (f". The last trial that was refused: {refusal}" if refusal else ""),
                ConvergenceWarning,
            )
        llf = getattr(results, "llf", found.value)
        if not abs(llf - found.value) <= SAME:
            yield (
                f"results.llf is {llf:.6g}, by statsmodels' filter, and so are the criteria that "
                f"it enters; what was maximised, loglike(mod, results.params), is "
                f"{found.value:.6g}, and has more digits",
                RuntimeWarning,
            )


def _minus_hessian(mod: MLEModel, free: np.ndarray) -> np.ndarray:
    return -hessian(mod, free, transformed=False)


def _expected(mod: MLEModel, free: np.ndarray) -> np.ndarray:
    """The expected information in the parameters that an optimiser sees."""
    point = _Point(mod, mod.handle_params(free, transformed=False))
    J = _transformation(mod, free).dense(mod.handle_params(free))
    found = point.information(arrays_information.expected_information)
    return _free(mod, J.T @ _without_fixed(mod, found, mod._has_fixed_params) @ J)


# What a climb takes for minus the second derivatives.
CURVATURES = {"newton": _minus_hessian, "scoring": _expected}


class _NoLikelihoodError(ValueError):
    """There is no stationary distribution to start from, or an array is not finite."""


def _refuse_not_finite(arrays: dict) -> None:
    for name, X in arrays.items():
        if not np.isfinite(X).all():
            raise _NoLikelihoodError(f"{name} is not finite at these params")


def _finite(arrays: dict) -> StateSpace:
    """The model of these arrays."""
    _refuse_not_finite(arrays)
    return StateSpace(**arrays)


def _state(mod: MLEModel) -> tuple:
    """What a likelihood depends on, beside what an update makes of the parameters."""
    start = [
        X if X is None or isinstance(X, str) else np.asarray(X).tobytes()
        for part, states in _parts(mod.ssm.initialization, np.arange(mod.ssm.k_states))
        for X in (
            states, part.initialization_type, part.constant, part.stationary_cov,
            part.approximate_diffuse_variance,
        )
    ]  # fmt: skip
    return mod.loglikelihood_burn, mod.ssm.filter_concentrated, mod.ssm.endog.tobytes(), *start


def _checked(mod: MLEModel, params) -> np.ndarray:
    _check_supported(mod)
    params = np.atleast_1d(np.asarray(params, dtype=float))
    k = _number_of_params(mod) - (len(mod._fixed_params) if mod._has_fixed_params else 0)
    if params.shape != (k,):
        raise ValueError(
            f"params has shape {params.shape}, expected (k,) = ({k},): "
            f"{', '.join(mod.param_names[:8])}{', ...' if len(mod.param_names) > 8 else ''}"
        )
    if not np.isfinite(params).all():
        names = np.array(mod.param_names)
        if mod._has_fixed_params:
            names = names[mod._free_params_index]
        raise ValueError(f"params has no number for {', '.join(names[~np.isfinite(params)])}")
    return params


def _check_supported(mod: MLEModel) -> None:
    name = type(mod).__name__
    if not isinstance(mod, MLEModel):
        raise ValueError(f"{name} is no state space model of statsmodels, expected an MLEModel")
    if isinstance(mod, RecursiveLS):
        raise ValueError(
            f"{name} has no parameters to differentiate by: its coefficients are states, and one "
            "pass of its filter finds them"
        )
    if mod.ssm._complex_endog:
        raise ValueError(f"the data of this {name} are complex, expected real ones")
    if mod.ssm.filter_timing == TIMING_INIT_FILTERED:
        raise ValueError(f"this {name} starts from a filtered state, expected a predicted one")
    of_the_model = {"loglike": [MLEModel.loglike, ExponentialSmoothing.loglike]} | {
        "loglikeobs": [MLEModel.loglikeobs]
    }
    of_the_filter = {x: [getattr(KalmanFilter, x)] for x in ("loglike", "loglikeobs", "_filter")}
    for where, expected in ((mod, of_the_model), (mod.ssm, of_the_filter)):
        for method, known in expected.items():
            found = getattr(where, method)
            if not isinstance(found, _Door) and getattr(found, "__func__", None) not in known:
                raise ValueError(
                    f"this {name} has a log-likelihood of its own, {type(where).__name__}."
                    f"{method}, expected that of its state space, MLEModel.loglike: with another "
                    "one, fit it by mod.fit"
                )
    if getattr(mod, "initialization_method", None) == "concentrated":
        raise ValueError(
            f"this {name} fits its initial states anew for all params, "
            "initialization_method='concentrated', expected 'estimated', where they are params"
        )


def _arrays(mod: MLEModel, params: np.ndarray) -> dict:
    """c, d, T, Z, R, H, Q for all parameters; time comes first where they vary."""
    mod.update(params, transformed=True, includes_fixed=True)
    found = {}
    for name, theirs in ARRAYS.items():
        X = getattr(mod.ssm, theirs)
        # A copy: the caller's array stays the caller's.
        X = np.array(X.T if X.ndim == 2 else X.transpose(2, 0, 1), order="C")
        found[name] = X[0] if len(X) == 1 else X
    if found["c"].ndim > 1:  # what comes after the last step is no part of the likelihood
        found["c"][-1] = 0
    return found


def _parts(start, states: np.ndarray) -> Iterator:
    """The parts of an initial distribution, each with the states that it is for."""
    if start is None:
        return
    if start.initialization_type is not None:
        yield start, states
    for block, part in start.blocks.items():
        yield from _parts(part, states[list(block)])


def _given(part) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the covariance that a part of an initial distribution was given."""
    if part.initialization_type == "known":
        return part.constant, part.stationary_cov
    return part.constant, part.approximate_diffuse_variance * np.eye(part.k_states)


class _Start:
    """a0 and P0 for the parameters that the model was updated with, and A (m, q) where diffuse.

    `stationary` are the parts whose distribution solves equations of T, c, R and Q: for each, where
    its states are in a vector and in a matrix, and its solution.
    """

    def __init__(self, mod: MLEModel, arrays: dict):
        m = mod.ssm.k_states
        if mod.ssm.initialization is None:
            raise ValueError(
                f"this {type(mod).__name__} has no initial distribution: give it one, "
                "mod.initialize"
            )
        self.a0, self.P0, self.stationary = np.zeros(m), np.zeros((m, m)), []
        diffuse_states, covered = [], 0
        here = _first(arrays)
        for part, states in _parts(mod.ssm.initialization, np.arange(m)):
            covered, kind = covered + len(states), part.initialization_type
            whole = np.array_equal(states, np.arange(m))  # by slices: no copies
            block = (slice(None),) * 2 if whole else np.ix_(states, states)
            if kind == "stationary":
                R = here["R"][states]
                solved = Stationary(here["T"][block], here["c"][states], R @ here["Q"] @ R.T)
                if not solved.converged:
                    _refuse_not_finite(arrays)
                    size = np.abs(np.linalg.eigvals(here["T"][block])).max()
                    raise _NoLikelihoodError(
                        f"the params lie outside the stationary region of this "
                        f"{type(mod).__name__}, which starts from its stationary distribution: "
                        f"the transition has an eigenvalue of modulus {size:.4g}, expected < 1 "
                        "by 1e-13 or more"
                    )
                self.a0[states], self.P0[block] = solved.mean, solved.covariance
                self.stationary.append((block[0] if whole else states, block, solved))
                continue
            if kind == "diffuse":
                diffuse_states.extend(states)
            else:
                self.a0[states], self.P0[block] = _given(part)
        if covered < m:
            raise ValueError(
                f"this {type(mod).__name__} has an initial distribution for {covered} of its {m} "
                "states, expected all"
            )
        if diffuse_states and mod.loglikelihood_burn:
            named = ", ".join(map(str, diffuse_states))
            raise ValueError(
                f"the states {named} of this {type(mod).__name__} have an exact diffuse start, "
                "which is not supported with a burn-in"
            )
        self.A = np.eye(m)[:, sorted(diffuse_states)]


def _first(arrays: dict) -> dict:
    """The arrays of the first step: those that statsmodels takes for a stationary start."""
    return {x: X if X.ndim == len(SHAPES[x]) else X[0] for x, X in arrays.items()}


def _through_stationary_start(start: _Start, arrays: dict, gradient) -> None:
    """Add to the gradients of c, T, R and Q what a stationary start passes on to them.

    P = T P T' + R Q R' and a = T a + c: the adjoints solve S = T' S T + P_bar and s = T' s + a_bar,
    and add 2 S T P + s a' to T_bar, 2 S R Q to R_bar, R' S R to Q_bar and s to c_bar.
    """
    if not start.stationary:
        return
    here, bar = _first(arrays), _first(gradient._asdict())
    for states, block, solved in start.stationary:
        R, Q = here["R"][states], here["Q"]
        s, S = solved.adjoints(bar["a0"][states], bar["P0"][block])
        bar["T"][block] += 2 * S @ here["T"][block] @ solved.covariance + np.outer(s, solved.mean)
        bar["c"][states] += s
        bar["R"][states] += 2 * S @ R @ Q
        bar["Q"] += R.T @ S @ R


def _seen(y: np.ndarray, arrays: dict, A: np.ndarray, r: int | None = None) -> np.ndarray:  # noqa: N803
    """An orthonormal basis (q, r) of the diffuse numbers that reach an observation, r if known.

    Others reach none, or cancel: the level and the first state of an ARMA model that are both
    diffuse, as of an integrated SARIMAX whose stationarity is not enforced. The likelihood is that
    of the rest.
    """
    model, rows, X = _finite(arrays), [], A
    T, Z = (np.broadcast_to(x, (len(y), *x.shape[-2:])) for x in (model.T, model.Z))  # noqa: N806
    for t, gone in enumerate(np.isnan(y)):
        rows.append(Z[t][~gone] @ X)
        X = T[t] @ X  # noqa: N806
        size = np.abs(X).max()
        if not 0 < size < np.inf:
            break
        X = X / size  # noqa: N806
    units = np.sqrt(diffuse.first_room(A, model))
    values, right = np.linalg.svd(np.concatenate(rows) * units, full_matrices=True)[1:]
    r = (values > CANCELS * values.max(initial=0)).sum() if r is None else r
    unseen = np.linalg.qr(right[r:].T * units[:, np.newaxis], mode="complete")[0]
    return unseen[:, len(right) - r :]


def _pass(y: np.ndarray, arrays: dict, weights: np.ndarray) -> tuple[float, Gradients]:
    """`fused.loglike_and_grad` for arrays that a model has written: less is checked beforehand."""
    time = {}
    for x in ("c", "d", "T", "Z", "R", "H", "Q"):
        X = arrays[x]
        time[x] = X if X.ndim > len(SHAPES[x]) else X[np.newaxis]
    R, Q = time["R"], time["Q"]
    given = [arrays["a0"][:], arrays["P0"][:], *(time[x][:] for x in "cdTZH")]
    for X in given:  # as those of a `StateSpace`: one type, and one compilation, for both
        X.flags.writeable = False
    l, out, *_ = fused._entry().loglike_and_grad(
        y, *given, R @ Q @ R.transpose(0, 2, 1), weights, True, True, True, True, TOLERANCE
    )
    value = float(weights @ l)
    if not np.isfinite(value):
        model = _finite(arrays)  # raises, and names what is not finite
        value, _, gradient = fused.loglike_and_grad(y, model, weights=weights)  # or the step
        return value, gradient
    kept = (*STATIC, *(x for x, X in time.items() if len(X) > 1))
    return value, fused.gradients_in_time(R, Q, out, kept)


class _Point:
    """A model at some parameters: its likelihood, its arrays, and what they make of directions.

    `arrays` are those of the model; `model` is what is filtered, where a concentrated scale has
    multiplied the covariances. `raw` is the gradient for the arrays of `model`, and `gradient` that
    for `arrays`, where c, T, R and Q have what they do to a stationary a0 and P0.
    """

    def __init__(self, mod: MLEModel, params: np.ndarray):
        _check_supported(mod)
        self.mod, self.params = mod, params
        self.arrays = arrays = _arrays(mod, params)
        self.start = start = _Start(mod, arrays)
        arrays |= {"a0": start.a0, "P0": start.P0}
        self.y = y = np.array(mod.ssm.endog.T, order="C")
        self.A = self._columns() if start.A.size else start.A
        burn = mod.loglikelihood_burn
        self.weights = np.ones(len(y))
        self.weights[:burn] = 0
        self.scale = 1.0
        self.value, self.raw = self._evaluate()
        if mod.ssm.filter_concentrated:
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
            self.value, self.raw = self._evaluate()
        if mod.ssm.filter_concentrated or start.stationary:
            self.gradient = self.raw._replace(
                **{x: self.scale * getattr(self.raw, x) for x in SCALED},
                **{x: getattr(self.raw, x).copy() for x in ("c", "T", "R")},
            )
            _through_stationary_start(start, arrays, self.gradient)
        else:
            self.gradient = self.raw

    def _evaluate(self) -> tuple[float, Gradients]:
        """The log-likelihood with the scale as it stands, and its gradient for those arrays."""
        if not self.A.size:
            return _pass(self.y, self._scaled(), self.weights)
        model = _finite(self._scaled())
        try:
            value, _, gradient, _, estimate, *_ = diffuse.loglike_and_grad(self.y, model, self.A)
        except ValueError:  # the data say nothing about a direction
            self._refuse_unseen()
        variances = np.diag(estimate.covariance) / diffuse.first_room(self.A, model)
        if (variances > UNSEEN * max(variances.min(), EXACTLY_SEEN)).any():
            self._refuse_unseen()
        return value, gradient

    def _seen_at(self, params: np.ndarray, r: int | None = None) -> np.ndarray:
        """The diffuse numbers that reach an observation at other parameters."""
        try:
            arrays = _arrays(self.mod, params) | {x: self.arrays[x] for x in ("a0", "P0")}
            return _seen(self.y, arrays, self.start.A, r)
        finally:
            _arrays(self.mod, self.params)

    def _columns(self) -> np.ndarray:
        """A for the diffuse numbers that reach an observation at most parameters."""
        known, A = _KNOWN.setdefault(self.mod, {}), self.start.A  # noqa: N806
        key = np.isnan(self.y).tobytes(), A.tobytes(), _shapes(self.mod)
        if known.get("diffuse") != key:
            try:
                seen = self._seen_at(updates.away_from(self.params))
            except (ArithmeticError, ValueError):  # none of its points
                seen = _seen(self.y, self.arrays, A)
            known["diffuse"], known["seen"] = key, seen.shape[1]
        r = known["seen"]
        return A if r == A.shape[1] else A @ _seen(self.y, self.arrays, A, r)

    def _refuse_unseen(self):
        """Which parameters hide a diffuse state: those that would show it by what they move."""
        shown = {
            x: np.abs(X @ self.start.A).reshape(len(X), -1).max(axis=1, initial=0)
            for x, X in _updates(self.mod, self.params).moves(self.params).items()
            if x in "TZ"
        }
        _arrays(self.mod, self.params)  # leaves the model real
        shows = shown["T"] + shown["Z"]
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

    def moves(self) -> dict[str, np.ndarray]:
        """The derivatives of the arrays in each parameter (k, ...), a stationary start included."""
        found = _updates(self.mod, self.params).moves(self.params)
        _arrays(self.mod, self.params)  # leaves the model real
        here = _first(self.arrays)
        for states, block, solved in self.start.stationary:
            R, Q = here["R"][states], here["Q"]
            first = {x: X[:, 0] if X.ndim > 1 + len(SHAPES[x]) else X for x, X in found.items()}
            for j in range(len(self.params)):
                dT, dR = first["T"][j][block], first["R"][j][states]
                E = dT @ solved.covariance @ here["T"][block].T + dR @ Q @ R.T
                found["a0"][j, states], found["P0"][j][block] = solved.solve(
                    dT @ solved.mean + first["c"][j][states], E + E.T + R @ first["Q"][j] @ R.T
                )
        return found

    def directions(self, moves: dict) -> dict[str, np.ndarray]:
        """The same for the arrays of `model`; where a scale is concentrated, its log comes last."""
        if not self.mod.ssm.filter_concentrated:
            return moves
        found = {}
        for x, dX in moves.items():
            X = getattr(self.model, x)[np.newaxis]
            found[x] = np.concatenate([self.scale * dX, X] if x in SCALED else [dX, 0 * X])
        return found

    def hessian(self, with_scale: bool = False) -> np.ndarray:
        """For all of the model's parameters, fixed ones included.

        Where a scale is concentrated, it is at its best for each value of the parameters, or its
        logarithm comes last, if `with_scale`.
        """
        moves = self.moves()
        directions = self.directions(moves)
        if self.A.size:
            found = diffuse.hessian(self.y, self.model, self.A, directions)
        else:
            found = arrays_hessian.hessian(self.y, self.model, directions, weights=self.weights)
        if self.mod.ssm.filter_concentrated:
            # In the log scale and in another parameter, an array has for its second derivative its
            # first in that other.
            mixed = sum(
                np.tensordot(directions[x], getattr(self.raw, x), getattr(self.raw, x).ndim)
                for x in SCALED
            )
            found[-1] += mixed
            found[:-1, -1] += mixed[:-1]
            found = found if with_scale else _without_last(found)
        k = len(self.params)
        found[:k, :k] += self._products_in_a_stationary_start(moves) + self._curved_arrays()
        if self.A.shape != self.start.A.shape:
            found[:k, :k] -= self._turns_of_the_unseen()
        return symmetric(found)

    def _curved_arrays(self) -> np.ndarray:
        """What second derivatives of the arrays add: differences of exact first ones.

        A parameter whose derivatives are the same elsewhere, where all others have moved too, has
        none: most coefficients are such, and variances.
        """
        mod, params, k = self.mod, self.params, len(self.params)
        found, moved = np.zeros((k, k)), _updates(mod, params)
        here, there = moved.dense(params), moved.dense(updates.away_from(params))
        size = np.abs(here).max(axis=1, initial=0)
        curved = np.flatnonzero(np.abs(here - there).max(axis=1, initial=0) > 1e-13 * size)
        if curved.size:
            bar = moved.pack(self.gradient)

            def slopes(some):
                x = params.copy()
                x[curved] = some
                return moved.pull(x, bar)[curved]

            found[np.ix_(curved, curved)] = _jacobian(slopes, params[curved])
        _arrays(mod, params)  # leaves the model real, and where it was
        return found

    def _turns_of_the_unseen(self) -> np.ndarray:
        """What second derivatives lose where the numbers that are never seen turn with parameters.

        |S| on those that are seen is that on the numbers that are seen here, over the square of the
        cosine of the angle between the two.
        """
        seen = self.start.A.T @ self.A
        along = updates.difference(lambda x: (V := self._seen_at(x, seen.shape[1])) @ V.T)
        turns = np.stack([seen.T @ along(self.params, unit) for unit in np.eye(len(self.params))])
        turns = turns - turns @ seen @ seen.T
        return np.einsum("iab,jab->ij", turns, turns)

    def _products_in_a_stationary_start(self, moves: dict):
        """What products of first derivatives add to the second ones of a stationary a0 and P0.

        d2P = T d2P T' + E, and <P_bar, d2P> = <S, E>. What second derivatives of T, R, Q and c give
        to E is in the gradients of those arrays already.
        """
        here, bar, total = _first(self.arrays), self.raw, 0.0
        for states, block, solved in self.start.stationary:
            T, R, Q, P = here["T"][block], here["R"][states], here["Q"], solved.covariance
            s, S = solved.adjoints(bar.a0[states], self.scale * bar.P0[block])
            dT, dR, dQ = (
                moves[x][:, 0] if moves[x].ndim > 1 + len(SHAPES[x]) else moves[x] for x in "TRQ"
            )
            dT, dR, da = dT[:, *block], dR[:, states], moves["a0"][:, states]
            # E is X + X' in each pair of parameters, so <S, E> = 2 <S, X>.
            one = _inner(S @ dT, T @ moves["P0"][:, *block]) + _inner(S @ dR, R @ dQ)
            both = _inner(S @ dT @ P, dT) + _inner(S @ dR @ Q, dR)
            mean = np.einsum("a,iab,jb->ij", s, dT, da)
            total = total + 2 * (one + one.T + both) + mean + mean.T
        return total

    def information(self, of_arrays, with_scale: bool = False) -> np.ndarray:
        """That of the arrays, in all of the model's parameters, as `hessian` has them."""
        if self.A.size:
            states = ", ".join(map(str, np.flatnonzero(self.A.any(axis=1))))
            raise ValueError(
                f"the states {states} of this {type(self.mod).__name__} have an exact diffuse "
                "start, which has the observed information alone: kind='observed'"
            )
        found = of_arrays(self.y, self.model, self.directions(self.moves()), self.weights)
        if self.mod.ssm.filter_concentrated and not with_scale:
            found = symmetric(_without_last(found))
        return found


def _without_last(X: np.ndarray) -> np.ndarray:  # noqa: N803
    """Second derivatives where the last parameter is at its best for each value of the others."""
    return X[:-1, :-1] - np.outer(X[:-1, -1], X[-1, :-1]) / X[-1, -1]


def _value_and_gradient(mod: MLEModel, params: np.ndarray):
    """The log-likelihood and its gradient for the model's arrays, all parameters given."""
    point = _Point(mod, params)
    return point.value, point.gradient


def _check_kind(kind: str) -> None:
    if kind not in ("observed", "expected", "opg", "sandwich"):
        raise ValueError(f"kind is {kind!r}, expected 'observed', 'expected', 'opg' or 'sandwich'")


def _names(mod: MLEModel) -> list[str]:
    """Of the free parameters."""
    names = np.array(mod.param_names)
    return list(names[mod._free_params_index] if mod._has_fixed_params else names)


def _free(mod: MLEModel, X: np.ndarray) -> np.ndarray:  # noqa: N803
    """The rows and columns of the free parameters, and of what comes after all of them."""
    if not mod._has_fixed_params:
        return X
    kept = np.delete(np.arange(len(X)), mod._fixed_params_index)
    return X[np.ix_(kept, kept)]


def _inverse(X: np.ndarray, names: list[str], what: str) -> np.ndarray:  # noqa: N803
    """The inverse of an information matrix, or a sentence that says what it leaves open."""
    size = np.sqrt(np.maximum(np.diag(X), 0))
    upwards = f"the {what} is not positive definite: the likelihood curves upwards along"
    blind = f"the {what} is singular: the data say nothing about"
    if not size.all():
        j = int(np.argmin(np.diag(X)))
        raise ValueError(f"{blind if X[j, j] == 0 else upwards} {names[j]}")
    values, vectors = np.linalg.eigh(X / size / size[:, np.newaxis])
    if values[0] <= SINGULAR:
        direction = vectors[:, 0] / size
        direction = direction / direction[np.abs(direction).argmax()]
        told = [
            f"{x:+.2g} {name}" for x, name in zip(direction, names, strict=True) if abs(x) > 1e-6
        ]
        sentence = f"{upwards if values[0] < -SINGULAR else blind} {' '.join(told)}"
        raise ValueError(sentence)
    scaled = vectors / size[:, np.newaxis]
    return scaled / values @ scaled.T


def _refuse_boundary(mod: MLEModel, params: np.ndarray) -> None:
    """A variance of zero has nowhere to go but up, and its estimate no standard error."""
    here, found, free = _first(_arrays(mod, params)), [], _names(mod)
    spectra = {x: np.linalg.eigh(here[x]) for x in ("H", "Q")}
    least = BOUNDARY * max(values.max() for values, _ in spectra.values())
    null = {x: vectors[:, values <= least] for x, (values, vectors) in spectra.items()}
    moves = _updates(mod, params).moves(params)
    for j, name in enumerate(mod.param_names):
        d = _first({x: moves[x][j] for x in null})
        # Where a covariance takes no room, a derivative would make it negative to one side.
        if name in free and any(
            np.abs(V.T @ d[x] @ V).max(initial=0) > 1e-10 * np.abs(d[x]).max()
            for x, V in null.items()
        ):
            found.append(name)
    _arrays(mod, params)  # leaves the model real
    if found:
        fixed = ", ".join(f"{name!r}: 0" for name in found)
        raise ValueError(
            f"{', '.join(found)}: a variance of zero, the least that it may be, has no standard "
            f"error; for those of the other parameters, fix it, mod.fix_params({{{fixed}}})"
        )


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
    if not dropped:
        return found
    found = found.copy()
    fixed = mod._fixed_params_index
    found[fixed] = 0
    if found.ndim == 2:
        found[:, fixed] = 0
    return found


def _jacobian(function, x: np.ndarray) -> np.ndarray:
    """Derivatives of a smooth function of x (k,), one column for each entry, to some 12 digits.

    Central differences of the fourth order: a polynomial in the step, but for its fifth power. The
    step is halved until two in a row agree, as it has to be where a pole is near.
    """
    return np.stack([_slope(function, x, j) for j in range(len(x))], axis=1)


def _slope(function, x: np.ndarray, j: int) -> np.ndarray:
    def between(h):
        move = h * (np.arange(len(x)) == j)
        return function(x + move) - function(x - move)

    h, apart = 1e-3 * max(1.0, abs(x[j])), np.inf
    with np.errstate(all="ignore"):
        wide, near = between(2 * h), between(h)
        best = before = (8 * near - wide) / (12 * h)
        for _ in range(HALVINGS):
            h, wide = h / 2, near
            near = between(h)
            found = (8 * near - wide) / (12 * h)
            gap = np.abs(found - before).max(initial=0)
            if gap < apart:
                best, apart = before, gap
            if apart <= AGREE * np.abs(best).max(initial=0):
                break
            before = found
    return best


class _Updates:
    """The derivatives of the arrays of a model, and of the known parts of its initial distribution.

    All in one vector, in which the axes of a matrix are turned: as statsmodels stores them.
    """

    where = slice(0)  # parameters that are differentiated otherwise

    def __init__(self, mod: MLEModel, params: np.ndarray):
        self.mod, m = mod, mod.ssm.k_states
        self.shapes, self.at, stop = {}, {}, 0
        for x in SHAPES:
            theirs = (
                getattr(mod.ssm, ARRAYS[x]).T.shape if x in ARRAYS else (1, *[m] * len(SHAPES[x]))
            )
            size = int(np.prod(theirs))
            self.shapes[x], self.at[x] = theirs, slice(stop, stop + size)
            stop += size
        self.size, self.exact, self.colored, self.seen = stop, True, None, set()
        self.look_at(params)

    def knows(self, params: np.ndarray) -> bool:
        """Whether it was looked at where the signs are these."""
        return np.sign(params).tobytes() in self.seen

    def look_at(self, params: np.ndarray) -> None:
        """Go over to differences where complex steps miss something.

        Looked at wherever signs are new: a parameter may enter by its absolute value.
        """
        if self.knows(params):
            return
        self.seen.add(np.sign(params).tobytes())
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
            self.colored = Colored(self._along, params, updates.MISSED_BY_DIFFERENCES)

    def _refuse_moving_data(self, params: np.ndarray) -> None:
        data = []
        for x in (updates.away_from(params), params):
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
            return updates.difference(self._at)(params, direction)
        return self._at(params + 1j * STEP * direction).imag / STEP

    def _is_analytic(self, params: np.ndarray, mask: np.ndarray) -> bool:
        """Whether complex steps see what differences see: not through abs, real or a factor.

        Differences see little near a pole, so one of four steps has to agree, and roughly; but a
        step that is lost in rounding, beside what the one before it missed, says nothing.
        """
        params = updates.away_from(params)
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
        for x, theirs in ARRAYS.items():
            X = getattr(mod.ssm, theirs)
            found[self.at[x]].reshape(self.shapes[x])[:] = X.T if is_complex else X.real.T
        if self.shapes["c"][0] > 1:  # as in `_arrays`
            found[self.at["c"]].reshape(self.shapes["c"])[-1] = 0
        for part, states in _parts(mod.ssm.initialization, np.arange(mod.ssm.k_states)):
            if part.initialization_type in ("known", "approximate_diffuse"):
                for x, X in zip(("a0", "P0"), _given(part), strict=True):
                    whole = found[self.at[x]].reshape(self.shapes[x])[0]
                    whole[np.ix_(*[states] * whole.ndim)] = X if is_complex else np.real(X)
        return found

    def pack(self, gradient) -> np.ndarray:
        """A gradient as one vector."""
        found = np.empty(self.size)
        for x, where in self.at.items():
            X = getattr(gradient, x)
            found[where].reshape(self.shapes[x])[:] = (
                X if len(SHAPES[x]) == 1 else X.swapaxes(-1, -2)
            )
        return found

    def pull(self, params: np.ndarray, bar: np.ndarray, jacobian=None) -> np.ndarray:
        """The inner products of a gradient, as one vector, with the derivatives (k,)."""
        return self.colored.pull(params, bar, jacobian)

    def dense(self, params: np.ndarray) -> np.ndarray:
        """The derivatives in each parameter (k, N)."""
        return self.colored.dense(params).T

    def moves(self, params: np.ndarray) -> dict[str, np.ndarray]:
        """The same for each array (k, ...), time first where it varies."""
        dense, found = self.dense(params), {}
        for x, where in self.at.items():
            X = dense[:, where].reshape(len(dense), *self.shapes[x])
            X = X if len(SHAPES[x]) == 1 else X.swapaxes(-1, -2)
            found[x] = X[:, 0] if X.shape[1] == 1 else X
        return found


def _root_of_shocks(mod: VARMAX, params: np.ndarray):
    """L, of which Q = L L', and where the parameters of the shocks stand in it.

    Of free parameters; of the model's own only where the shocks are correlated.
    """
    L = np.zeros((mod.k_endog, mod.k_endog))
    diagonal = mod.error_cov_type == "diagonal"
    rows = np.diag_indices(len(L)) if diagonal else mod._idx_lower_state_cov
    L[rows] = params[mod._params_state_cov]
    return L, rows


class _VarmaxUpdates(_Updates):
    """The same for a `VARMAX` whose shocks are correlated.

    Its Q = L L' is differentiated here: the entries of L share most of those of Q, and each of them
    would take a complex step of its own.
    """

    def __init__(self, mod: VARMAX, params: np.ndarray):
        self.where = mod._params_state_cov
        super().__init__(mod, params)

    def _along(self, params: np.ndarray, direction: np.ndarray) -> np.ndarray:
        others = direction.copy()
        others[self.where] = 0
        return super()._along(params, others)

    def pull(self, params: np.ndarray, bar: np.ndarray, jacobian=None) -> np.ndarray:
        found = super().pull(params, bar, jacobian)
        L, rows = _root_of_shocks(self.mod, params)
        Q_bar = bar[self.at["Q"]].reshape(L.shape)
        found[self.where] = ((Q_bar + Q_bar.T) @ L)[rows]
        return found

    def dense(self, params: np.ndarray) -> np.ndarray:
        found, (L, rows) = super().dense(params), _root_of_shocks(self.mod, params)
        dL = np.zeros((len(rows[0]), *L.shape))
        dL[np.arange(len(dL)), *rows] = 1
        move = dL @ L.T
        found[self.where, self.at["Q"]] = (move + move.swapaxes(1, 2)).reshape(len(dL), -1)
        return found


class _Varmax:
    """The transformation of `VARMAX`, whose Cholesky factors no complex step can differentiate."""

    def __init__(self, mod: VARMAX):
        self.mod = mod

    def dense(self, free: np.ndarray) -> np.ndarray:
        return np.stack([self.pull(free, row) for row in np.eye(len(free))])

    def pull(self, free: np.ndarray, bar: np.ndarray) -> np.ndarray:
        mod, found = self.mod, bar.copy()
        cov = mod._params_state_cov
        diagonal = mod.error_cov_type == "diagonal"
        if diagonal:
            found[cov] *= 2 * free[cov]
        if mod.measurement_error:
            found[mod._params_obs_cov] *= 2 * free[mod._params_obs_cov]
        p = mod.k_endog
        if mod.k_ma and mod.enforce_invertibility:
            where = mod._params_ma
            found[where] = _pull_coefficients(free[where], bar[where], np.eye(p))[0]
        if mod.k_ar and mod.enforce_stationarity:
            L, rows = _root_of_shocks(mod, free)
            M = np.linalg.cholesky(L @ L.T)  # L, but for the signs of its columns
            where = mod._params_ar
            found[where], M_bar = _pull_coefficients(free[where], bar[where], M)
            found[cov] += (M_bar * np.sign(np.diag(L)))[rows]
        return found


def _pull_coefficients(free: np.ndarray, bar: np.ndarray, M: np.ndarray):
    """The pullbacks of C -> M C M^-1 after `stationary_coefficients`, in A and in M."""
    p = len(M)

    def blocks(flat):  # (p, order p) side by side
        return flat.reshape(p, -1, p).transpose(1, 0, 2)

    A, bar = blocks(free), blocks(bar)
    units = np.eye(free.size).reshape(free.size, p, -1, p).transpose(0, 2, 1, 3)
    C, dC = updates.stationary_coefficients(A, units)
    inverse = np.linalg.inv(M)
    C = M @ C @ inverse
    M_bar = (bar @ C.transpose(0, 2, 1) - C.transpose(0, 2, 1) @ bar).sum(axis=0) @ inverse.T
    return np.tensordot(dC, M.T @ bar @ inverse.T, 3), M_bar


class _DynamicFactor:
    """The transformation of `DynamicFactor`: its factors as in `_Varmax`, the others colored."""

    def __init__(self, mod: DynamicFactor, free: np.ndarray):
        self.mod, self.where = mod, mod._params_factor_transition
        exact = updates.complex_step(lambda free: mod.transform_params(free))

        def along(free, direction):
            others = direction.copy()
            others[self.where] = 0
            return exact(free, others)

        self.others = Colored(along, free)

    def dense(self, free: np.ndarray) -> np.ndarray:
        return np.stack([self.pull(free, row) for row in np.eye(len(free))])

    def pull(self, free: np.ndarray, bar: np.ndarray) -> np.ndarray:
        found, where = self.others.pull(free, bar), self.where
        eye = np.eye(self.mod.k_factors)
        found[where] = _pull_coefficients(free[where], bar[where], eye)[0]
        return found


def _number_of_params(mod: MLEModel) -> int:
    known = _KNOWN.setdefault(mod, {})
    if "params" not in known:  # some models write all their names anew each time
        known["params"] = len(mod.param_names)
    return known["params"]


# What is known of the updates and transformations of models. None of it may hold on to its model.
_KNOWN = WeakKeyDictionary()


def _shapes(mod: MLEModel) -> tuple:
    """Those of the arrays as the last update has left them."""
    return tuple(mod.ssm.shapes.values())


def _updates(mod: MLEModel, params: np.ndarray) -> _Updates:
    known = _KNOWN.setdefault(mod, {})
    key = _shapes(mod)
    if known.get("shapes") != key:
        correlated = getattr(mod, "error_cov_type", "") == "unstructured"
        written_out = type(mod).update is VARMAX.update and correlated
        found = (_VarmaxUpdates if written_out else _Updates)(proxy(mod), params)
        known["shapes"], known["updates"] = key, found
    known["updates"].look_at(params)
    return known["updates"]


def _transformation(mod: MLEModel, free: np.ndarray):
    """What pulls a gradient for the parameters of the model back to those of its optimiser."""
    known = _KNOWN.setdefault(mod, {})
    if "transformation" not in known:
        known["transformation"] = _new_transformation(mod, free)
    return known["transformation"]


def _new_transformation(mod: MLEModel, free: np.ndarray):
    if type(mod).transform_params is VARMAX.transform_params:
        return _Varmax(proxy(mod))
    if type(mod).transform_params is DynamicFactor.transform_params and not (
        mod.error_var and mod.error_order
    ):
        if mod.enforce_stationarity and mod.factor_order:
            return _DynamicFactor(proxy(mod), free)
    model = proxy(mod)

    def function(free):
        return model.transform_params(free)

    exact, rough = updates.complex_step(function), updates.difference(function)
    along = np.sin(np.arange(len(free)) + 1)
    with np.errstate(all="ignore"):
        try:
            found = exact(free, along)
        except (TypeError, ValueError, np.linalg.LinAlgError):
            found = np.full(len(free), np.nan)
    expected = rough(free, along)
    # Entry by entry, as their units differ; what the differences lose to rounding is no difference.
    missed = 1e-6 * np.abs(expected) + 1e-9 * np.abs(function(free))
    if (np.abs(found - expected) <= missed).all():

        def along(free, direction):
            with np.errstate(all="ignore"):
                found = exact(free, direction)
            # A logistic curve far out is flat, and overflows for complex numbers.
            return found if np.isfinite(found).all() else rough(free, direction)

        return Colored(along, free)
    return Colored(rough, free, updates.MISSED_BY_DIFFERENCES)


def _score(mod: MLEModel, params: np.ndarray) -> np.ndarray:
    """The score for all parameters, fixed ones included."""
    known = _known_updates(mod, params)  # first, as the likelihood leaves the model real
    gradient = _value_and_gradient(mod, params)[1]
    if known is not None and _shapes(mod) == _KNOWN[mod]["shapes"]:
        moved = _KNOWN[mod]["updates"]
        return moved.pull(params, moved.pack(gradient), known)
    found = _pulled(mod, params, gradient)
    mod.update(params, transformed=True, includes_fixed=True)  # leaves the model real
    return found


def _known_updates(mod: MLEModel, params: np.ndarray):
    """The derivatives of the arrays, if one step says that they are those of the last point.

    Otherwise None; also where an update fails, which it will do again.
    """
    found = _KNOWN.get(mod, {}).get("updates")
    if found is None or not found.knows(params):
        return None
    try:
        return found.colored.known(params)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None


def _pulled(mod: MLEModel, params: np.ndarray, gradient) -> np.ndarray:
    """The score of a gradient for the arrays. Leaves the model complex."""
    if not params.size:
        return np.zeros(0)
    moved = _updates(mod, params)
    return moved.pull(params, moved.pack(gradient))
