"""A model of statsmodels at some parameters: its arrays, its start, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import numpy as np
from statsmodels.regression.recursive_ls import RecursiveLS
from statsmodels.tsa.statespace.exponential_smoothing import ExponentialSmoothing
from statsmodels.tsa.statespace.kalman_filter import TIMING_INIT_FILTERED, KalmanFilter
from statsmodels.tsa.statespace.mlemodel import MLEModel

from helpers.kalman.stationary import Stationary
from helpers.statespace import SHAPES, StateSpace

# Our names and statsmodels', whose last axis is time.
ARRAYS = {
    "c": "state_intercept", "d": "obs_intercept", "T": "transition", "Z": "design",
    "R": "selection", "H": "obs_cov", "Q": "state_cov",
}  # fmt: skip


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


_KNOWN = WeakKeyDictionary()


def _known(mod: MLEModel) -> SimpleNamespace:
    """What has been found out about a model, none of which may hold on to its model.

    The number of `params` (some models write all their names anew each time), the `derivatives` for
    arrays of these `shapes`, the `transformation`, and how many `diffuse` numbers, in this case,
    have `reached` an observation.
    """
    if mod not in _KNOWN:
        names = "shapes", "derivatives", "transformation", "diffuse", "reached"
        _KNOWN[mod] = SimpleNamespace(params=len(mod.param_names), **dict.fromkeys(names))
    return _KNOWN[mod]


def _checked(mod: MLEModel, params) -> np.ndarray:
    _check_supported(mod)
    params = np.atleast_1d(np.asarray(params, dtype=float))
    k = _known(mod).params - (len(mod._fixed_params) if mod._has_fixed_params else 0)
    if params.shape != (k,):
        names = _names(mod)
        fixed = [name for name in mod.param_names if name not in names]
        raise ValueError(
            f"params has shape {params.shape}, expected (k,) = ({k},): "
            f"{', '.join(names[:8])}{', ...' * (len(names) > 8)}"
            + f", without the fixed {', '.join(fixed)}"
            * bool(fixed)
        )
    if not np.isfinite(params).all():
        named = np.array(_names(mod))[~np.isfinite(params)]
        raise ValueError(f"params has no number for {', '.join(named)}")
    return params


class _Door:
    """What stands in the place of a method of a model; in a copy of that, the method itself."""

    def __init__(self, within, name: str):
        self.within, self.name = within, name

    def __call__(self, *args, **kwargs):
        return getattr(self.within, self.name)(*args, **kwargs)

    def __reduce__(self):
        return getattr, (self.within.mod, self.name)


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
            elif kind == "diffuse":
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


def _first(arrays: dict, axis: int = 0) -> dict:
    """The arrays of the first step, which statsmodels takes for a stationary start, as views."""
    return {x: X if X.ndim == axis + len(SHAPES[x]) else X[(slice(None),) * axis + (0,)]
            for x, X in arrays.items()}  # fmt: skip


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


def _shapes(mod: MLEModel) -> tuple:
    """Those of the arrays as the last update has left them."""
    return tuple(mod.ssm.shapes.values())


def _names(mod: MLEModel) -> list[str]:
    """Of the free parameters."""
    names = np.array(mod.param_names)
    return list(names[mod._free_params_index] if mod._has_fixed_params else names)


def _free(mod: MLEModel, X: np.ndarray) -> np.ndarray:
    """The rows and columns of the free parameters, and of what comes after all of them."""
    if not mod._has_fixed_params:
        return X
    return np.delete(np.delete(X, mod._fixed_params_index, 0), mod._fixed_params_index, 1)
