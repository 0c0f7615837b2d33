"""Fits with the exact score: ``mod.fit`` with it, and an end that second derivatives certify."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from inspect import signature

import numpy as np
from statsmodels.base.optimizer import Optimizer
from statsmodels.tools.sm_exceptions import ConvergenceWarning
from statsmodels.tsa.arima.model import ARIMA
from statsmodels.tsa.statespace.mlemodel import MLEModel, _handle_args

from helpers.kalman.statsmodels.arrays import (
    ARRAYS,
    _check_supported,
    _checked,
    _Door,
    _names,
    _NoLikelihoodError,
    _parts,
)
from helpers.kalman.statsmodels.climbing import SAME, climb, flat, flat_combination
from helpers.kalman.statsmodels.information import _combination, hessian
from helpers.kalman.statsmodels.score import _Point, _pulled, _score_as_given

# Iterations of L-BFGS before the first step with second derivatives: starting values may be wrong
# by orders of magnitude, and scores are cheap.
APPROACH = 15

# When L-BFGS stops. Its own rules for "lbfgs" leave 1e-4 of a log-likelihood and more on a ridge,
# and a score costs less than the second derivatives that would find it.
RULES = {"lbfgs": {"factr": 1e3, "pgtol": 1e-7}, "newton": {"factr": 0.0, "pgtol": 0.0}}

# Newton's steps where another method has ended: mostly one is enough, and along a ridge that goes
# up by next to nothing each costs as much as a hundred scores.
POLISH = 50

# Iterations, unless told otherwise, the last of them reserved for Newton's steps; ``mod.fit`` ends
# after 50, wherever it is then.  Here they take a fraction of the time.
MOST = 200 + POLISH

# What an optimiser is given for an infinite parameter of its own: less than a hundredth of the way
# from the edge of an interval that statsmodels maps by a logistic function.
FARTHEST = 5.0

# Where a trial is refused, the next one goes this share of the way.
SHORTER = 0.25

# Where so many iterations of one of these methods gain less than `SAME`, Newton's steps go on.
LONG, BY_SLOPES = 50, ("lbfgs", "bfgs", "cg")

# Methods that climb from the same start: the last one, whose steps cost most, only where the others
# have ended on an edge of what a parameter may be, to which they are drawn from far away.
CLIMBS = "bfgs", "lbfgs", "newton"

# By so little, a share of what it is, the optimiser moves a parameter that is on an edge.
EDGE = 1e-3

# Steps across a ridge, until it is known whether the likelihood curves along it: each where an
# eigenvalue is less than this, which at first is that of the last step but one.
ACROSS = 1e-2, 1e-4, 1e-4

# Arguments by which an optimiser of ours is put in the place of one of statsmodels'.
OURS = ("extra_fit_funcs", "cov_params_func")


@contextmanager
def using(mod: MLEModel) -> Iterator[MLEModel]:
    """Within it, ``mod.loglike`` and ``mod.score`` of this one model are those of this module.

    Everything that statsmodels builds on them uses them, above all ``mod.fit``, which takes the
    score as its gradient unless ``optim_score`` says otherwise. Where the likelihood has no value
    it is -inf, and the score NaN; but to an optimiser within ``mod.fit`` that asks for slopes both
    are those of a parabola that leads it back. (It may still end where there is no maximum, and say
    that it has converged: :func:`fit` looks.)

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
    ...     results = mod.fit(method="bfgs", disp=False)
    """
    _check_supported(mod)
    within, names = _Within(mod), ("loglike", "score", "fit")
    own = {name: X for name, X in vars(mod).items() if name in names}
    vars(mod).update({name: _Door(within, name) for name in names})
    try:
        yield mod
    finally:
        for name in names:
            del vars(mod)[name]
        vars(mod).update(own)  # a context around this one
        within.leave()


def _state(mod: MLEModel) -> tuple:
    """What a likelihood depends on beside the data and what an update makes of the parameters."""
    of_part = "initialization_type", "constant", "stationary_cov", "approximate_diffuse_variance"
    start = [
        X if X is None or isinstance(X, str) else np.asarray(X).tobytes()
        for part, states in _parts(mod.ssm.initialization, np.arange(mod.ssm.k_states))
        for X in (states, *(getattr(part, x) for x in of_part))
    ]
    return mod.loglikelihood_burn, mod.ssm.filter_concentrated, *start


class _Within:
    """The likelihood and the score of a model, each found once where an optimiser asks for both.

    A trial that has no likelihood is given a parabola while the model is fitted: with the value and
    the slope of the last `sound` trial, and its minimum at a share of the step from there, so that
    a line search tries a shorter one.  `refusal` says why it had none; `best` is the trial with the
    highest value.
    """

    def __init__(self, mod: MLEModel):
        self.mod, self.their_loglike, self.their_fit = mod, mod.loglike, mod.fit
        self.point = self.state = self.refusal = self.differentiated = None
        self.fitting, self.sound, self.best = False, None, (-np.inf, None)

    def at(self, full) -> _Point:
        y = self.mod.ssm.endog.T
        known = self.point is not None and np.array_equal(full, self.point.params)
        if not (known and np.array_equal(y, self.point.y, True) and _state(self.mod) == self.state):
            self.point = _Point(self.mod, full, in_columns=True)
            self.state = _state(self.mod)  # afterwards: an update may make the start
        return self.point

    def loglike(self, params, *args, **kwargs):
        names, defaults = MLEModel._loglike_param_names, MLEModel._loglike_param_defaults
        transformed, includes_fixed, complex_step, more = _handle_args(
            names, defaults, *args, **kwargs
        )
        if complex_step or more:
            return self.their_loglike(params, *args, **kwargs)
        full = self.mod.handle_params(params, transformed, includes_fixed)
        try:
            value = self.at(full).value
        except (np.linalg.LinAlgError, _NoLikelihoodError) as refused:
            self.refusal = str(refused)
            if self.sound is not None:
                return self._parabola(params)[0]
            return np.nan if np.isnan(full).any() else -np.inf
        if self.fitting and value > self.best[0]:
            self.best = value, np.copy(params)
        return value

    def score(self, params, *args, **kwargs):
        names, defaults = MLEModel._score_param_names, MLEModel._score_param_defaults
        transformed, includes_fixed, *_ = _handle_args(names, defaults, *args, **kwargs)

        def of_all(full):
            self.differentiated = full
            return _pulled(self.mod, full, self.at(full))

        try:
            found = _score_as_given(self.mod, params, transformed, includes_fixed, of_all)
        except (np.linalg.LinAlgError, _NoLikelihoodError):  # asked for with the value there
            if self.sound is not None:
                return self._parabola(params)[1]
            return np.full(np.shape(params), np.nan)
        if self.fitting:
            self.sound = np.copy(params), self.point.value, found
        return found

    def _parabola(self, params):
        before, value, slope = self.sound
        step = params - before
        rise = abs(slope @ step) or 1.0
        return value - rise * (0.5 / SHORTER - 1), step * rise * (1 - 1 / SHORTER) / (step @ step)

    def fit(self, *args, **kwargs):
        """That of the model, by the exact score, where its arguments leave that open."""
        taken = signature(self.their_fit)
        given = taken.bind_partial(*args, **kwargs)
        ours, named = {"optim_score": "approx"}, given.arguments
        if "optim_score" in taken.parameters:
            given.arguments = ours | named
        elif isinstance(self.mod, ARIMA) and "method" not in named and not named.get("gls"):
            named["method_kwargs"] = ours | (named.get("method_kwargs") or {})
        self.fitting, self.best = True, (-np.inf, None)
        try:
            return self.their_fit(*given.args, **given.kwargs)
        finally:
            self.end()

    def end(self):
        """From here on, refusals are refusals again."""
        self.fitting, self.sound = False, None

    def leave(self):
        """Leave the model real, which a score left complex; unless it has been updated since."""
        arrays = (getattr(self.mod.ssm, theirs) for theirs in ARRAYS.values())
        params = self.differentiated
        if params is not None and any(np.iscomplexobj(X) and X.imag.any() for X in arrays):
            self.mod.update(params, transformed=True, includes_fixed=True)


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
        One of ``mod.fit``, but "em"; "newton" stands for fifteen iterations of L-BFGS and then
        Newton's steps, a handful, of which each costs a few scores.

        A trial that has no likelihood makes a line search try a shorter step.  Wherever a method
        ends, or gains next to nothing, the Hessian says what is left to gain, and Newton's steps go
        on if it is more than 1e-8, up to fifty, as far as ``maxiter`` allows.  So the end is a
        maximum, or there is a warning.  From the same start BFGS and L-BFGS climb as well, each
        until it is known to lead to the same maximum, and Newton's steps where that is on the edge
        of what a parameter may be, a variance of zero or a unit root, or is none.  If one of them
        ends at a higher maximum, that is the result.  (There may be a higher one still.)
    **kwargs
        Those of ``mod.fit``, for all methods: ``maxiter`` (250 if not given, the last fifty
        for Newton's steps, where ``mod.fit`` ends after 50), ``cov_type``, ``disp``, ``callback``
        and others.

    Returns
    -------
    statsmodels.tsa.statespace.mlemodel.MLEResults
        Its filter and its standard errors are statsmodels' own.

    Raises
    ------
    ValueError
        If the model is one of those that :func:`loglike` refuses, or its start has no likelihood;
        if its transformation depends on the last update, as that of a `DynamicFactor` with
        ``error_var=True`` does unless ``enforce_stationarity=False``; or for estimates without a
        score, "em" and ``gls=True``.

    Warns
    -----
    statsmodels.tools.sm_exceptions.ConvergenceWarning
        If the end is not a maximum; the message names the parameter with which the likelihood
        rises. Also if the likelihood does not depend on a parameter there, or on a combination of
        parameters.
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
    # Far out, the logistic functions of statsmodels' transformations overflow, and are right.
    with using(mod), np.errstate(over="ignore"):
        ends = []
        ours = {method: partial(_optimise, mod, method, ends)}, lambda *_: None
        given = {"method": method, "optim_score": "approx", "maxiter": MOST}
        given |= dict(zip(OURS, ours, strict=True)) | {"warn_convergence": False} | kwargs
        if isinstance(mod, ARIMA):
            # It takes what is for the optimiser in a bundle, and another method for itself.
            own = signature(mod.fit.within.their_fit).parameters.keys() - {"start_params", "method"}
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
    _check_supported(mod)
    if np.isnan(mod.endog).all():
        raise ValueError("every observation is missing: there is nothing to fit the model to")
    includes_fixed = start is None or given.get("includes_fixed", False)
    start = start if includes_fixed else _checked(mod, start)
    if start is not None and not given.get("transformed", True):
        return start, given
    try:
        full = mod.start_params if start is None else start
    except np.linalg.LinAlgError as error:
        raise ValueError(
            f"this {type(mod).__name__} finds no start_params of its own in these data ({error}, "
            "as it may where there are gaps); give it some, fit(mod, start_params=...), for "
            f"{', '.join(mod.param_names)}"
        ) from error
    full = mod.handle_params(full, transformed=True, includes_fixed=includes_fixed)
    try:
        with np.errstate(divide="ignore", invalid="ignore"):
            free = np.asarray(mod.untransform_params(full), float)
    except np.linalg.LinAlgError:  # of a vector autoregression
        free = np.full(len(full), np.nan)
    lost = np.isnan(free)
    if lost.any():
        named = (f"{x} = {full[j]:.6g}" for j, x in enumerate(mod.param_names) if lost[j])
        model = type(mod).__name__
        raise ValueError(
            "the start_params have no likelihood to begin with: what the optimiser of this "
            f"{model} moves cannot become {', '.join(named)}. Others may have one, "
            "fit(mod, start_params=...)"
            + f", or another model, {model}(..., enforce_stationarity=False)"
            * bool(getattr(mod, "enforce_stationarity", False))
        )
    edge = np.isinf(free)
    if edge.any():
        full = np.where(edge, mod.transform_params(np.clip(free, -FARTHEST, FARTHEST)), full)
    return full, given | {"includes_fixed": True, "transformed": True}


def _optimise(mod, method, ends, objective, _, start, fargs, given, *, maxiter, disp, **how):
    """A method of statsmodels', and Newton's steps from where it ends, in its optimisers' form."""
    if not start.size:
        return start, {"converged": True, "iterations": 0}
    within, callback = mod.loglike.within, how["callback"] or (lambda *_: None)
    value = -objective(start, *fargs)
    if not np.isfinite(value):
        why = within.refusal or f"it is {value}"
        raise ValueError(
            f"the start_params have no likelihood to begin with: {why}. Others may have one, "
            "fit(mod, start_params=...)"
        )

    def gradient(x, *args):  # that of statsmodels before 0.15 has another sign for "newton"
        return -mod.score(x, *args) / len(mod.endog)

    how |= {"hessian": lambda x, *_: -_hessian(mod, x) / len(mod.endog)}
    del how["hess"]
    given = {x: X for x, X in given.items() if x not in OURS}

    def ended(method, most, given, each, disp=False):
        """Where a method of statsmodels' ends, or its best trial if that is higher."""
        within.fitting, within.best, past = True, (-np.inf, None), []
        given = RULES.get(method, {}) | given
        if method == "newton":
            method, most, disp = "lbfgs", min(APPROACH, most), False

        def looked(*args, **kwargs):
            each(*args, **kwargs)
            past.append(within.best[0])
            if method in BY_SLOPES and len(past) > LONG and past[-1] - past[-LONG] < SAME:
                raise StopIteration

        named = how | {"method": method, "maxiter": most, "disp": disp, "callback": looked}
        x, about, _ = Optimizer()._fit(objective, gradient, start, fargs, given, **named)
        within.end()
        lost = within.best[0] > mod.loglike(x, transformed=False)
        return within.best[1] if lost else x, about | {"iterations": len(past)}

    reserved = POLISH if maxiter >= MOST and method != "newton" else 0
    x, about = ended(method, maxiter - reserved, given, callback, disp)
    # A parameter on a bound that it was given stays there.
    low, high = np.array(given.get("bounds") or [(None, None)] * len(x), float).T
    moves = ~((x <= low) | (x >= high))

    def whole(some):
        full = x.copy()
        full[moves] = some
        return full

    def trial(some):
        full = whole(some)
        if ((full < low) | (full > high)).any():
            return -np.inf, None
        value = mod.loglike(full, transformed=False)
        return value, mod.score(full, transformed=False)[moves]

    def curvature(some):
        return -_hessian(mod, whole(some))[np.ix_(moves, moves)]

    taken, most = (0, maxiter) if method == "newton" else (about["iterations"], POLISH)
    most = min(most, max(0, maxiter - taken))
    best = found = climb(trial, curvature, x[moves], most, lambda some: callback(whole(some)))
    calls, iterations = about.get("fcalls", 0) + found.evaluations, taken + found.steps

    def unless_known(x):
        if best.converged and best.leads_here(x, trial):
            raise StopIteration

    # By other methods from the same start: where there are several maxima, they may end higher.
    for other in (x for x in CLIMBS if x != method):
        if taken + found.steps >= maxiter or np.isfinite([low, high]).any():
            break
        if other == "newton" and best.converged and not _on_an_edge(mod, best, start):
            break
        x, more = ended(other, min(maxiter, MOST), {}, unless_known)
        calls += more.get("fcalls", 0)
        with suppress(StopIteration):
            unless_known(x)
            again = climb(trial, curvature, x, POLISH, unless_known)
            calls += again.evaluations
            better = SAME if best.converged or not again.converged else -SAME
            if again.value > best.value + better:
                best, iterations = again, more["iterations"] + again.steps
    ends.append((best, moves, start))
    if disp:
        how_it_ended = "converged" if best.converged else "has not converged"
        print(f"{method} {how_it_ended} after {iterations} steps, likelihood {best.value:.6g}")
    told = {"fcalls": calls, "converged": best.converged, "iterations": iterations}
    told |= {"fopt": -best.value / len(mod.endog), "gopt": -best.slope / len(mod.endog)}
    return whole(best.x), about | told | {"warnflag": 0 if best.converged else 1}


def _hessian(mod: MLEModel, free: np.ndarray) -> np.ndarray:
    """NaN where the second derivatives cannot be had: a climb ends there, and says so."""
    try:
        return hessian(mod, free, transformed=False)
    except (np.linalg.LinAlgError, _NoLikelihoodError):
        return np.full((len(free), len(free)), np.nan)


def _on_an_edge(mod: MLEModel, found, start) -> bool:
    """Whether a parameter ended where it hardly moves: a variance of zero, a unit root."""
    here = mod.handle_params(found.x, transformed=False)
    for step in np.diag(np.maximum(np.abs(found.x), 1 / found.units) / 2):
        ahead, behind = (mod.handle_params(found.x + s * step, transformed=False) for s in (1, -1))
        size = np.abs([ahead, behind])[:, ahead != here].max(initial=0)
        if np.abs(ahead - behind).max() <= EDGE * size:
            return True
    return bool(found.flat_from(start).any())


def _in_own_params(mod: MLEModel, x: np.ndarray, of):
    """What `of` says of the curvature in the model's own free parameters; None on an edge."""
    params = mod.handle_params(x, transformed=False)
    params = params[mod._free_params_index] if mod._has_fixed_params else params
    with suppress(np.linalg.LinAlgError, _NoLikelihoodError):
        return of(hessian(mod, params), params)


def _line(mod: MLEModel, found):
    """The combination of parameters along which there are other maxima, if there is one."""
    for nearly in ACROSS:
        x = found.on_the_ridge(nearly)
        if x is None:
            break
        slope, curvature = mod.score(x, transformed=False), -_hessian(mod, x)
        found = found._replace(x=x, slope=slope, curvature=curvature)
        if flat_combination(curvature, x) is not None:
            return _in_own_params(mod, x, flat_combination)
    return None


def _told(mod: MLEModel, ends: list, results, refusal) -> Iterator[tuple]:
    """What a fit has to say of its end: where the likelihood still rises, and what is not its."""
    for found, moves, start in ends:
        names = np.array(_names(mod))[moves]
        # What has no effect at an end: to the optimiser, and as parameters of the model.
        blind = found.flat_from(start[moves])
        if blind.any() and len(blind) == len(mod.param_names):
            own = _in_own_params(mod, found.x, flat)
            blind = blind if own is None else blind & own
        blind = names[blind]
        if found.converged and blind.size:
            yield (
                f"the log-likelihood {found.value:.6g} does not depend on {', '.join(blind)} where "
                "it has its maximum, as where a variance is zero: these estimates mean nothing, "
                "and a higher maximum may lie where it depends on them. Other start_params may "
                "lead there",
                ConvergenceWarning,
            )
        elif found.converged and moves.all() and (line := _line(mod, found)) is not None:
            j = int(np.abs(line).argmax())
            yield (
                f"the log-likelihood {found.value:.6g} has its maximum all along a line: the "
                f"data say nothing about {_combination(line, names)}, so that these estimates "
                "are some of many, and their standard errors mean nothing. One of the "
                f"parameters may be fixed, with mod.fix_params({{{str(names[j])!r}: ...}})",
                ConvergenceWarning,
            )
        if not found.converged:
            j = int(np.argmax(np.abs(found.slope / found.units)))
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
