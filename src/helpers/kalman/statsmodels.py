r"""The likelihood and the exact score of any state space model of statsmodels, in closed form.

statsmodels differentiates by running its filter once more for each parameter.  Here the
likelihood's gradient with respect to the arrays of the model, :math:`\bar T, \bar Z, \dots`, comes
from one pass; what the parameters :math:`\theta` do to the arrays is differentiated by a complex
step of ``mod.update``, which runs no filter; and the two meet in

.. math::

   \frac{\partial \mathcal L}{\partial \theta_j}
   = \sum_X \langle \bar X, \partial X / \partial \theta_j \rangle ,
   \qquad X = a_0, P_0, c, d, T, Z, R, H, Q .

>>> import statsmodels.api as sm
>>> from helpers.kalman.statsmodels import fit, score
>>> mod = sm.tsa.SARIMAX(sm.datasets.nile.data.load_pandas().data["volume"], order=(1, 0, 1))
>>> exact = score(mod, mod.start_params)
>>> results = fit(mod, disp=False)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from helpers.kalman import diffuse, fused
from helpers.statespace import SHAPES, StateSpace

try:
    from statsmodels.tsa.statespace.kalman_filter import TIMING_INIT_FILTERED
    from statsmodels.tsa.statespace.mlemodel import MLEModel, _handle_args
except ModuleNotFoundError as error:
    raise ImportError(
        f"{__name__} needs statsmodels, which is not installed: pip install statsmodels, or "
        'pip install "kalman-by-hand[statsmodels]"'
    ) from error

from scipy.linalg import solve_discrete_lyapunov

__all__ = ["fit", "loglike", "score", "using"]

STEP = 1e-40  # of the complex step: its square is lost, so the derivative has no truncation error

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
        If the number of parameters is wrong, or one of them is not a number; if the model has no
        initial distribution, filtered timing, or an exact diffuse start together with a
        concentrated scale or a burn-in.
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


@contextmanager
def using(mod: MLEModel) -> Iterator[MLEModel]:
    """Within it, ``mod.loglike`` and ``mod.score`` of this one model are those of this module.

    Whatever statsmodels builds on them uses them: ``mod.fit(optim_score="approx")`` for one.

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
    theirs, kept = mod.loglike, {}

    def at(params):
        key = params.tobytes()
        if key not in kept:
            kept.clear()
            kept[key] = _value_and_gradient(mod, params)
        return kept[key]

    def value(params, *args, **kwargs):
        names, defaults = MLEModel._loglike_param_names, MLEModel._loglike_param_defaults
        transformed, includes_fixed, complex_step, _ = _handle_args(
            names, defaults, *args, **kwargs
        )
        if complex_step:
            return theirs(params, *args, **kwargs)
        full = mod.handle_params(params, transformed, includes_fixed)
        try:
            return at(full)[0]
        except np.linalg.LinAlgError:  # as theirs: an optimiser turns round there
            return -np.inf

    def slope(params, *args, **kwargs):
        names, defaults = MLEModel._score_param_names, MLEModel._score_param_defaults
        transformed, includes_fixed, *_ = _handle_args(names, defaults, *args, **kwargs)
        return _score_as_given(
            mod, params, transformed, includes_fixed, lambda full: _score(mod, full, at(full)[1])
        )

    own = {name: X for name, X in vars(mod).items() if name in ("loglike", "score")}
    mod.loglike, mod.score = value, slope
    try:
        yield mod
    finally:
        del mod.loglike, mod.score
        vars(mod).update(own)  # a context around this one


def fit(mod: MLEModel, start_params=None, **kwargs):
    """``mod.fit`` with the likelihood and the exact score of this module.

    Parameters
    ----------
    mod : statsmodels.tsa.statespace.mlemodel.MLEModel
    start_params : array (k,), optional
        As in ``mod.fit``; ``mod.start_params`` if None.
    **kwargs
        Those of ``mod.fit``: method, maxiter, cov_type, disp and others.

    Returns
    -------
    statsmodels.tsa.statespace.mlemodel.MLEResults
        Its filter and its standard errors are statsmodels' own.

    Raises
    ------
    ValueError
        If the model is one of those that :func:`loglike` refuses.
    """
    with using(mod):
        return mod.fit(start_params, **({"optim_score": "approx"} | kwargs))


def _checked(mod: MLEModel, params) -> np.ndarray:
    params = np.atleast_1d(np.asarray(params, dtype=float))
    k = len(mod.param_names) - (len(mod._fixed_params) if mod._has_fixed_params else 0)
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
    if mod.ssm._complex_endog:
        raise ValueError(f"the data of this {name} are complex, expected real ones")
    if mod.ssm.filter_timing == TIMING_INIT_FILTERED:
        raise ValueError(f"this {name} starts from a filtered state, expected a predicted one")
    if mod.ssm.initialization is None:
        raise ValueError(f"this {name} has no initial distribution: give it one, mod.initialize")


def _arrays(mod: MLEModel, params: np.ndarray) -> dict:
    """c, d, T, Z, R, H, Q for all parameters; time comes first where they vary."""
    mod.update(params, transformed=True, includes_fixed=True)
    found = {}
    for name, theirs in ARRAYS.items():
        X = np.moveaxis(getattr(mod.ssm, theirs), -1, 0)
        found[name] = X[0] if len(X) == 1 else X
    if found["c"].ndim > 1:  # what comes after the last step is no part of the likelihood
        found["c"] = np.append(found["c"][:-1], np.zeros_like(found["c"][:1]), axis=0)
    return found


def _start(mod: MLEModel):
    """a0 and P0 for the parameters that the model was updated with, and A (m, q) where diffuse."""
    a0, P_inf, P0 = mod.ssm.initialization(model=mod.ssm)
    states = np.flatnonzero(np.diag(P_inf))
    if len(states) and (mod.ssm.filter_concentrated or mod.loglikelihood_burn):
        raise ValueError(
            f"the states {', '.join(map(str, states))} of this {type(mod).__name__} have an exact "
            "diffuse start, which is not supported with a concentrated scale or a burn-in"
        )
    return {"a0": a0, "P0": P0}, np.eye(len(a0))[:, states]


def _parts(start, states: np.ndarray) -> Iterator:
    """The parts of an initial distribution, each with the states that it is for."""
    if start.initialization_type is not None:
        yield start, states
    for block, part in start.blocks.items():
        yield from _parts(part, states[list(block)])


def _through_stationary_start(mod: MLEModel, arrays: dict, gradient) -> None:
    """Add to the gradients of c, T, R and Q what a stationary a0 and P0 make of theirs.

    P = T P T' + R Q R' and a = T a + c have the pullbacks S = T' S T + P_bar, which is added to
    W_bar, and 2 S T P, to T_bar; and s = T' s + a_bar, to c_bar, and s a', to T_bar.
    """
    # An array that varies is that of its first step here, as in statsmodels.
    here, bar = ({x: X[0] if X.ndim > len(SHAPES[x]) else X for x, X in from_.items()}
                 for from_ in (arrays, gradient.asdict()))  # fmt: skip
    for part, states in _parts(mod.ssm.initialization, np.arange(mod.ssm.k_states)):
        if part.initialization_type != "stationary":
            continue
        block = np.ix_(states, states)
        T, R, Q = here["T"][block], here["R"][states], here["Q"]
        S = solve_discrete_lyapunov(T.T, bar["P0"][block])
        s = np.linalg.solve(np.eye(len(T)) - T.T, bar["a0"][states])
        bar["T"][block] += 2 * S @ T @ here["P0"][block] + np.outer(s, here["a0"][states])
        bar["c"][states] += s
        bar["R"][states] += 2 * S @ R @ Q
        bar["Q"] += R.T @ S @ R


def _value_and_gradient(mod: MLEModel, params: np.ndarray):
    """The log-likelihood and its gradient for the model's arrays, all parameters given."""
    _check_supported(mod)
    arrays = _arrays(mod, params)
    start, A = _start(mod)
    arrays |= start
    y = np.ascontiguousarray(mod.ssm.endog.T)
    burn = mod.loglikelihood_burn
    weights = (np.arange(len(y)) >= burn).astype(float) if burn else None
    if A.size:
        value, _, gradient, *_ = diffuse.loglike_and_grad(y, StateSpace(**arrays), A)
    else:
        value, _, gradient = fused.loglike_and_grad(y, StateSpace(**arrays), weights=weights)
    if mod.ssm.filter_concentrated:
        # The scale that maximises the likelihood: all covariances times 1 + x add
        # x/2 (sum v' F^-1 v - number of observations) to it. There its own derivative is zero.
        observed = np.isfinite(y[burn:]).sum()
        twice = 2 * sum((getattr(gradient, x) * arrays[x]).sum() for x in ("P0", "H", "Q"))
        scale = (twice + observed) / observed
        scaled = StateSpace(**arrays | {x: scale * arrays[x] for x in ("P0", "H", "Q")})
        value, _, gradient = fused.loglike_and_grad(y, scaled, weights=weights)
        gradient = gradient._replace(**{x: scale * getattr(gradient, x) for x in ("P0", "H", "Q")})
    _through_stationary_start(mod, arrays, gradient)
    return value, gradient


def _score_as_given(mod, params, transformed: bool, includes_fixed: bool, of_all) -> np.ndarray:
    """The score for parameters as they are given, by `of_all`, which is for all of the model's."""
    found = of_all(mod.handle_params(params, transformed, includes_fixed))
    if not transformed:
        # The pullback of the transformation, J' s. It need not be one for complex numbers.
        free = mod.handle_params(params, True, includes_fixed)
        found = _jacobian(mod.transform_params, free).T @ found
    dropped = mod._has_fixed_params and not includes_fixed
    return found[mod._free_params_index] if dropped else found


def _jacobian(function, x: np.ndarray) -> np.ndarray:
    """Derivatives of a smooth function of x (k,), one column for each entry, to some 12 digits.

    Central differences of the fourth order: a polynomial in the step, but for its fifth power.
    """
    columns = []
    for j in range(len(x)):
        h = np.zeros(len(x))
        h[j] = 1e-3 * max(1.0, abs(x[j]))
        one, two = (function(x + s * h) - function(x - s * h) for s in (1, 2))
        columns.append((8 * one - two) / (12 * h[j]))
    return np.stack(columns, axis=1)


def _score(mod: MLEModel, params: np.ndarray, gradient=None) -> np.ndarray:
    """The score for all parameters, fixed ones included."""
    gradient = _value_and_gradient(mod, params)[1] if gradient is None else gradient
    bars = {}  # as statsmodels has the arrays: time last
    for x, theirs in ARRAYS.items():
        G = getattr(gradient, x)
        bars[theirs] = np.moveaxis(G, 0, -1) if G.ndim > len(SHAPES[x]) else G[..., np.newaxis]
    given = [  # the parts of a0 and P0 that `mod.update` may write
        (part, gradient.a0[states], gradient.P0[np.ix_(states, states)])
        for part, states in _parts(mod.ssm.initialization, np.arange(mod.ssm.k_states))
        if part.initialization_type == "known"
    ]
    found = np.zeros(len(params))
    for j in range(len(params)):
        shifted = params.astype(complex)
        shifted[j] += 1j * STEP
        mod.update(shifted, transformed=True, includes_fixed=True, complex_step=True)
        pairs = [(bar, getattr(mod.ssm, theirs)) for theirs, bar in bars.items()]
        for part, a0_bar, P0_bar in given:
            pairs += [(a0_bar, part.constant), (P0_bar, part.stationary_cov)]
        found[j] = sum(np.vdot(bar, X.imag) for bar, X in pairs if np.iscomplexobj(X))
    _arrays(mod, params)  # leaves the model real
    return found / STEP
