"""Fits with the exact score: ``mod.fit`` with it, and an end that is looked at."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature

import numpy as np
from statsmodels.base.optimizer import Optimizer
from statsmodels.tools.sm_exceptions import ConvergenceWarning
from statsmodels.tsa.arima.model import ARIMA
from statsmodels.tsa.statespace.mlemodel import MLEModel, _handle_args

from helpers.kalman import information as arrays_information
from helpers.kalman.climbing import climb
from helpers.kalman.statsmodels.arrays import (
    ARRAYS,
    _check_supported,
    _Door,
    _free,
    _names,
    _NoLikelihoodError,
    _parts,
)
from helpers.kalman.statsmodels.information import hessian
from helpers.kalman.statsmodels.score import (
    _Point,
    _pulled,
    _score_as_given,
    _value_and_gradient,
    _without_fixed,
)
from helpers.kalman.statsmodels.updates import _transformation

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
