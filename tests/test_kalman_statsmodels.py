"""helpers.kalman.statsmodels: likelihood, score, Hessian, information, and what it refuses.

The reference is a complex step through everything: the model's update, its initial distribution
(solved here) and the NumPy filter.  statsmodels' own score has the noise of its step, about 1e-8.
"""

import copy
import gc
import pickle
import warnings
import weakref
from dataclasses import replace

import flint
import numpy as np
import pandas as pd
import pytest
from kalman_oracle import exact, law_of_data, loglike_in_any_arithmetic, rounded
from scipy.linalg import solve_discrete_lyapunov
from scipy.optimize import minimize_scalar

from benchmarks.statsmodels_fits import Autoregression, random_model
from helpers.checks import complex_step, relative_error
from helpers.kalman import StateSpace, compiled, diffuse, reference
from helpers.kalman import statsmodels as ours
from helpers.kalman.stationary import Stationary
from helpers.kalman.statsmodels import updates
from helpers.kalman.statsmodels.arrays import ARRAYS
from helpers.kalman.statsmodels.climbing import climb
from helpers.kalman.statsmodels.information import _inverse
from helpers.statespace import NAMES

sm = pytest.importorskip("statsmodels.api")
from statsmodels.regression.recursive_ls import RecursiveLS  # noqa: E402
from statsmodels.tools.sm_exceptions import ConvergenceWarning  # noqa: E402
from statsmodels.tsa.arima.model import ARIMA  # noqa: E402
from statsmodels.tsa.exponential_smoothing.ets import ETSModel  # noqa: E402
from statsmodels.tsa.statespace import (  # noqa: E402
    dynamic_factor,
    dynamic_factor_mq,
    exponential_smoothing,
    sarimax,
    structural,
    varmax,
)
from statsmodels.tsa.statespace.initialization import Initialization  # noqa: E402
from statsmodels.tsa.statespace.kalman_filter import MEMORY_CONSERVE  # noqa: E402
from statsmodels.tsa.statespace.mlemodel import MLEModel  # noqa: E402

STEP = 1e-30


def nile(gaps=False):
    y = sm.datasets.nile.data.load_pandas().data.volume.to_numpy(float).copy()
    if gaps:
        y[0], y[20:30] = np.nan, np.nan
    return y


def co2():
    months = sm.datasets.co2.load_pandas().data.co2.resample("MS").mean()
    return months.iloc[:120].to_numpy()  # with its gaps


def macro(n=60):
    levels = sm.datasets.macrodata.load_pandas().data[["realgdp", "realcons", "realinv"]]
    return 100 * np.diff(np.log(levels.to_numpy(float)), axis=0)[:n]


def regressors(n, k=2):
    return np.random.default_rng(0).normal(size=(n, k))


MODELS = {
    "SARIMA with integration": lambda: sarimax.SARIMAX(
        co2(), order=(1, 1, 1), seasonal_order=(1, 1, 1, 4)
    ),
    "SARIMA with trend and gaps": lambda: sarimax.SARIMAX(
        co2(), order=(2, 0, 1), seasonal_order=(1, 0, 0, 4), trend="ct"
    ),
    "SARIMAX with measurement error": lambda: sarimax.SARIMAX(
        nile(), order=(1, 0, 1), exog=regressors(100), measurement_error=True
    ),
    "SARIMAX, coefficients that vary": lambda: sarimax.SARIMAX(
        nile(), order=(1, 0, 0), exog=regressors(100), mle_regression=False,
        time_varying_regression=True,
    ),
    "ARMA, scale concentrated, gaps": lambda: sarimax.SARIMAX(
        nile(gaps=True), order=(1, 0, 1), trend="c", concentrate_scale=True
    ),
    "ARMA, differenced beforehand": lambda: sarimax.SARIMAX(
        nile(), order=(2, 1, 1), simple_differencing=True
    ),
    "trend and season": lambda: structural.UnobservedComponents(co2(), "lltrend", seasonal=12),
    "level, cycle, autoregression": lambda: structural.UnobservedComponents(
        nile(gaps=True), "llevel", cycle=True, stochastic_cycle=True, damped_cycle=True,
        autoregressive=1,
    ),
    "exact diffuse trend and season": lambda: structural.UnobservedComponents(
        co2(), "lltrend", seasonal=4, use_exact_diffuse=True
    ),
    "exact diffuse SARIMA": lambda: sarimax.SARIMAX(
        co2(), order=(1, 1, 1), seasonal_order=(0, 1, 1, 4), use_exact_diffuse=True
    ),
    "exact diffuse SARIMA, scale concentrated, gaps": lambda: sarimax.SARIMAX(
        nile(gaps=True), order=(1, 1, 1), seasonal_order=(0, 1, 1, 4),
        concentrate_scale=True, use_exact_diffuse=True,
    ),
    "exact diffuse level and autoregression": lambda: structural.UnobservedComponents(
        nile(gaps=True), "llevel", autoregressive=2, use_exact_diffuse=True
    ),
    "VAR": lambda: varmax.VARMAX(macro(), order=(2, 0)),
    "VAR with regressors": lambda: varmax.VARMAX(macro(), order=(1, 0), exog=regressors(60, 1)),
    "VARMA with measurement error": lambda: varmax.VARMAX(
        macro(), order=(1, 1), measurement_error=True
    ),
    "dynamic factor": lambda: dynamic_factor.DynamicFactor(
        macro(), k_factors=1, factor_order=2, error_order=1
    ),
    "dynamic factor, mixed-frequency class": lambda: dynamic_factor_mq.DynamicFactorMQ(
        macro(), factors=1, factor_orders=1
    ),
    "exponential smoothing": lambda: exponential_smoothing.ExponentialSmoothing(
        nile(), trend=True, damped_trend=True
    ),
    "exponential smoothing, scale concentrated": lambda: (
        exponential_smoothing.ExponentialSmoothing(nile(), trend=True, concentrate_scale=True)
    ),
}  # fmt: skip


def build(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about starting values
        mod = (MODELS | MORE)[name]()
        params = np.asarray(mod.start_params, float)
    mod.ssm.tolerance = 0  # its own steady state costs digits
    # Not at the start, where gradients of some parameters vanish.
    return mod, params * (1 + 0.02 * np.sin(np.arange(len(params)) + 1))


def stationary(start, T, W, c):
    """The mean and the covariance of a stationary part, complex ones too."""
    eye = np.eye(len(T))
    P = np.linalg.solve(np.eye(len(T) ** 2) - np.kron(T, T), W.ravel()).reshape(T.shape)
    return np.linalg.solve(eye - T, c), P


def whole_model(mod, params):
    """y, the model for complex parameters with its start solved here, and its diffuse states."""
    mod.update(params, transformed=True, includes_fixed=True, complex_step=True)
    names = {"c": "state_intercept", "d": "obs_intercept", "T": "transition", "Z": "design",
             "R": "selection", "H": "obs_cov", "Q": "state_cov"}  # fmt: skip
    X = {x: np.moveaxis(getattr(mod.ssm, name), -1, 0).astype(complex) for x, name in names.items()}
    m = mod.ssm.k_states
    a0, P0, flat = np.zeros(m, complex), np.zeros((m, m), complex), []

    def fill(start, states):
        block, kind = np.ix_(states, states), start.initialization_type
        if kind == "known":
            a0[states], P0[block] = start.constant, start.stationary_cov
        elif kind == "diffuse":
            flat.extend(states)
        elif kind == "approximate_diffuse":
            P0[block] = start.approximate_diffuse_variance * np.eye(len(states))
            a0[states] = start.constant
        elif kind == "stationary":
            R = X["R"][0][states]
            a0[states], P0[block] = stationary(
                start, X["T"][0][block], R @ X["Q"][0] @ R.T, X["c"][0][states]
            )
        for inside, part in start.blocks.items():
            fill(part, states[list(inside)])

    fill(mod.ssm.initialization, np.arange(m))
    X["c"][~np.isfinite(X["c"])] = 0
    arrays = {x: A[0] if len(A) == 1 else A for x, A in X.items()} | {"a0": a0, "P0": P0}
    return mod.ssm.endog.T, StateSpace(**arrays), flat


def whole_likelihood(mod, params):
    """The log-likelihood for complex parameters, by the filter in NumPy."""
    y, model, flat = whole_model(mod, params)
    burn = mod.loglikelihood_burn

    def at(scale):
        scaled = replace(model, **{x: scale * getattr(model, x) for x in ("P0", "H", "Q")})
        if flat:
            return diffuse.loglike(y, scaled, np.eye(model.m)[:, flat])
        return reference.kalman_filter(y, scaled).out.l[burn:].sum()

    if not mod.ssm.filter_concentrated:
        return at(1.0)
    # A scale s adds -(k log s + squares (1 / s - 1)) / 2, which is largest at s = squares / k.
    k = np.isfinite(y[burn:]).sum() - len(flat)
    squares = 4 * (at(2.0) - at(1.0)) + 2 * k * np.log(2)
    return at(1.0) + (squares - k - k * np.log(squares / k)) / 2


def two_frequencies():
    rng, months = np.random.default_rng(0), pd.period_range("1990-01", periods=48, freq="M")
    monthly = pd.DataFrame(rng.normal(size=(48, 3)), index=months, columns=list("abc"))
    monthly.iloc[3:6, 1] = np.nan
    quarters = pd.period_range("1990Q1", periods=16, freq="Q")
    quarterly = pd.DataFrame(rng.normal(size=(16, 2)), index=quarters, columns=["u", "v"])
    return dynamic_factor_mq.DynamicFactorMQ(
        monthly, endog_quarterly=quarterly, factors=1, factor_orders=1
    )


def burned_in():
    mod = structural.UnobservedComponents(nile(), "llevel", autoregressive=1)
    mod.loglikelihood_burn = 7
    return mod


MORE = {
    "months and quarters": two_frequencies,
    "ARMA anywhere": lambda: sarimax.SARIMAX(
        nile(), order=(1, 0, 1), enforce_stationarity=False, enforce_invertibility=False
    ),
    "airline, scale concentrated": lambda: sarimax.SARIMAX(
        co2(), order=(0, 1, 1), seasonal_order=(0, 1, 1, 12), concentrate_scale=True
    ),
    "trend, harmonics, cycle, regressors": lambda: structural.UnobservedComponents(
        co2(), "rtrend", freq_seasonal=[{"period": 12, "harmonics": 2}], cycle=True,
        stochastic_cycle=True, damped_cycle=True, exog=regressors(120),
    ),
    "coefficients as states": lambda: structural.UnobservedComponents(
        nile(), "llevel", exog=regressors(100), mle_regression=False
    ),
    "burn-in of one's own": burned_in,
    "VARMA with a trend": lambda: varmax.VARMAX(macro()[:, :2], order=(1, 1), trend="ct"),
    "VAR with gaps, diagonal": lambda: varmax.VARMAX(
        np.where(np.arange(120).reshape(60, 2) % 17 == 3, np.nan, macro()[:, :2]),
        order=(1, 0), error_cov_type="diagonal", exog=regressors(60, 1),
    ),
    "dynamic factor, errors together": lambda: dynamic_factor.DynamicFactor(
        macro(), k_factors=1, factor_order=1, error_order=1, error_var=True
    ),
    "smoothing with a season": lambda: exponential_smoothing.ExponentialSmoothing(
        pd.Series(co2()).interpolate().to_numpy(), trend=True, seasonal=12
    ),
    "ARIMA": lambda: ARIMA(nile(), order=(1, 0, 1), exog=regressors(100)),
}  # fmt: skip


@pytest.mark.parametrize("name", [*MODELS, *MORE])
def test_likelihood_and_score(name):
    mod, params = build(name)
    value, found = ours.loglike(mod, params), ours.score(mod, params)
    assert not any(np.iscomplexobj(mod.ssm[x]) for x in ARRAYS.values())
    assert relative_error(value, mod.loglike(params)) < 1e-9
    slopes = derivatives_of(lambda x: whole_likelihood(mod, x), params)
    assert relative_error(found, np.array(slopes)) < (1e-9 if name in MORE else 1e-8)
    assert relative_error(found, mod.score(params, approx_complex_step=True)) < 1e-6


@pytest.mark.parametrize("name", [x for x in MODELS if not x.startswith("exponential")])
def test_as_the_optimiser_sees_them(name):
    """Against differences of the fourth order: statsmodels 0.14 and 0.15 multiply by J, not J'."""
    mod, params = build(name)
    free = mod.untransform_params(params)
    found = ours.score(mod, free, transformed=False)
    value = ours.loglike(mod, free, transformed=False)
    assert relative_error(value, mod.loglike(free, transformed=False)) < 1e-9

    def along(h):
        return ours.loglike(mod, free + h * direction, transformed=False)

    direction = np.random.default_rng(1).normal(size=len(free))
    h = 1e-3
    expected = (8 * (along(h) - along(-h)) - along(2 * h) + along(-2 * h)) / (12 * h)
    assert abs(found @ direction - expected) < 1e-6 * np.abs(found * direction).sum()


def test_a_concentrated_scale_with_gaps_among_the_first_observations():
    """Where the value of statsmodels 0.15 is the log-likelihood at no scale at all."""
    given = {"order": (1, 1, 1), "seasonal_order": (0, 1, 1, 4), "use_exact_diffuse": True}
    params = np.array([0.6, 0.3, -0.6])
    mod = sarimax.SARIMAX(co2(), **given)
    assert np.isnan(mod.endog[:9]).any()
    best = minimize_scalar(
        lambda x: -mod.loglike(np.append(params, np.exp(x))), bounds=(-3, 3), method="bounded"
    )
    found = ours.loglike(sarimax.SARIMAX(co2(), concentrate_scale=True, **given), params)
    assert relative_error(found, -best.fun) < 1e-9


def second_derivative(f, radius, points=8):
    """f''(0) by Cauchy's formula on the upper half of a circle: exact but for rounding.

    The lower half gives the conjugate values, as f is analytic and real for real numbers.
    """
    half = np.exp(1j * np.pi * (np.arange(points) + 0.5) / points)
    values = np.array([f(radius * z) for z in half])
    return 2 * (values / half**2).real.mean() / radius**2


@pytest.mark.parametrize("name", MODELS)
def test_hessian(name):
    """Along two directions, of the whole likelihood, which knows none of our derivatives."""
    mod, params = build(name)
    H = ours.hessian(mod, params)
    assert np.array_equal(H, H.T)
    assert not np.iscomplexobj(mod.ssm["transition"])
    rng = np.random.default_rng(0)
    for _ in range(2):
        v = rng.normal(size=len(params)) / np.sqrt(len(params) * np.abs(np.diag(H)))
        # A small circle magnifies rounding of the likelihood, a large one may meet a singularity.
        errors = (
            v @ H @ v - second_derivative(lambda z, v=v: whole_likelihood(mod, params + z * v), r)
            for r in (0.1, 0.2, 0.4, 0.8)
        )
        assert any(abs(error) < 1e-8 * (np.abs(v) @ np.abs(H) @ np.abs(v)) for error in errors)


@pytest.mark.parametrize(
    "name", ["SARIMA with trend and gaps", "level, cycle, autoregression", "dynamic factor"]
)
def test_the_hessian_as_the_optimiser_sees_it(name):
    """Central differences of the sixth order of the score, which is tested above."""
    mod, params = build(name)
    free = mod.untransform_params(params)
    H = ours.hessian(mod, free, transformed=False)
    v = np.random.default_rng(1).normal(size=len(free)) / np.sqrt(np.abs(np.diag(H)))

    def slope(h):
        return ours.score(mod, free + h * v, transformed=False)

    h = 1e-3
    one, two, three = (slope(i * h) - slope(-i * h) for i in (1, 2, 3))
    expected = (45 * one - 9 * two + three) / (60 * h)
    assert (np.abs(H @ v - expected) < 1e-7 * (np.abs(H) @ np.abs(v))).all()


def test_the_hessian_of_statsmodels_is_a_rough_one():
    """Its complex step is a difference of complex values: five digits or so."""
    mod, params = build("SARIMAX with measurement error")
    theirs = mod.hessian(params, approx_complex_step=True) * mod.nobs
    assert relative_error(ours.hessian(mod, params), theirs) < 1e-4


def derivatives_of(function, params):
    """Along each parameter, by complex steps."""
    return [function(params + 1j * STEP * unit).imag / STEP for unit in np.eye(len(params))]


def dense_information(mod, params, steps):
    """Expected information of the first steps, as one Gaussian vector, and of a log scale."""

    at = mod.filter(params).scale if mod.ssm.filter_concentrated else 1.0

    def law(params, scale=at):
        y, model, _ = whole_model(mod, params)
        X = {x: model.over_time(x, len(y))[:steps] for x in NAMES[2:]}
        X |= {"H": scale * X["H"], "Q": scale * X["Q"]}
        mean, S = law_of_data(steps, model.a0, scale * model.P0, **X)
        o = ~np.isnan(y[:steps]).ravel()
        return np.column_stack([mean[o], S[np.ix_(o, o)]])

    S = law(params.astype(complex)).real[:, 1:]
    moves = derivatives_of(law, params)
    if mod.ssm.filter_concentrated:
        moves.append(law(params.astype(complex), at * (1 + 1j * STEP)).imag / STEP)
    half = np.linalg.inv(np.linalg.cholesky(S))
    moves = [(half @ X[:, 0], half @ X[:, 1:] @ half.T) for X in moves]
    return np.array([[u @ v + (U * V).sum() / 2 for v, V in moves] for u, U in moves])


def without_the_scale(mod, info):
    """What is known of the parameters where the scale, which comes last, is not."""
    if not mod.ssm.filter_concentrated:
        return info
    return np.linalg.inv(np.linalg.inv(info)[:-1, :-1])


@pytest.mark.parametrize(
    "name",
    [
        "SARIMAX with measurement error",
        "ARMA, scale concentrated, gaps",
        "VAR with regressors",
        "dynamic factor",
        "exponential smoothing",
    ],
)
def test_expected_information(name):
    mod, params = build(name)
    expected = without_the_scale(mod, dense_information(mod, params, mod.nobs))
    assert relative_error(ours.information(mod, params, "expected"), expected) < 1e-8


def test_expected_information_after_a_burn_in():
    mod, params = build("level, cycle, autoregression")
    burn = mod.loglikelihood_burn
    assert burn
    expected = dense_information(mod, params, mod.nobs) - dense_information(mod, params, burn)
    assert relative_error(ours.information(mod, params, "expected"), expected) < 1e-7


@pytest.mark.parametrize("name", ["SARIMA with integration", "VAR", "dynamic factor"])
def test_outer_product_and_sandwich(name):
    mod, params = build(name)
    burn = mod.loglikelihood_burn

    def by_step(params):
        y, model, _ = whole_model(mod, params)
        return reference.kalman_filter(y, model).out.l[burn:]

    slopes = np.array(derivatives_of(by_step, params))
    found = ours.information(mod, params, "opg")
    assert relative_error(found, slopes @ slopes.T) < 1e-8
    theirs = mod.opg_information_matrix(params) * (mod.nobs - burn)
    assert relative_error(found, theirs) < 1e-4
    observed = ours.information(mod, params)
    slopes = updates.jacobian(lambda x: ours.score(mod, x), params)
    assert relative_error(observed, -slopes) < 1e-6
    sandwich = ours.information(mod, params, "sandwich")
    assert relative_error(sandwich @ np.linalg.solve(observed, found), observed) < 1e-7


FITTED = {
    "ARMA": lambda: sarimax.SARIMAX(nile(), order=(1, 0, 1), trend="c"),
    "SARIMA": lambda: sarimax.SARIMAX(co2(), order=(1, 1, 0), seasonal_order=(1, 0, 0, 12)),
    "SARIMAX": lambda: sarimax.SARIMAX(nile(), order=(1, 0, 0), exog=regressors(100)),
    "local level": lambda: structural.UnobservedComponents(nile(), "llevel"),
    "level and regressors": lambda: structural.UnobservedComponents(
        nile(gaps=True), "llevel", exog=regressors(100)
    ),
    "VAR": lambda: varmax.VARMAX(macro()[:, :2], order=(1, 0)),
    "dynamic factor": lambda: dynamic_factor.DynamicFactor(macro(202), k_factors=1, factor_order=1),
    "exponential smoothing": lambda: exponential_smoothing.ExponentialSmoothing(
        nile(), initialization_method="known", initial_level=1100
    ),
}


@pytest.mark.parametrize("name", FITTED)
def test_standard_errors_beside_those_of_statsmodels(name):
    """Theirs have the noise of their differences; "oim" is neither observed nor expected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mod = FITTED[name]()
        mod.ssm.tolerance = 0
        # From their end: that of the factor has a higher maximum where a variance is zero.
        start = mod.fit(disp=False, cov_type="none").params
        results = ours.fit(mod, start, disp=False, maxiter=500, pgtol=1e-8)
    kinds = {"observed": "approx", "opg": "opg", "sandwich": "robust_approx"}
    for kind, theirs in kinds.items():
        found = ours.standard_errors(mod, results.params, kind)
        covariance = getattr(results, f"cov_params_{theirs}")
        # The start of SARIMA at 1e6 costs their differences more digits than ours.
        bound = 1e-2 if name == "SARIMA" else 1e-3
        assert relative_error(found / np.sqrt(np.diag(covariance)), np.ones_like(found)) < bound
        info = ours.information(mod, results.params, kind)
        assert relative_error(found**2, np.diag(np.linalg.inv(info))) < 1e-6
    expected = ours.standard_errors(mod, results.params, "expected")
    harvey = np.sqrt(np.diag(results.cov_params_oim))
    assert (np.abs(np.log(expected / harvey)) < 0.5).all()


def test_hessian_of_a_vague_start_against_sixty_digits():
    """A level that begins with a variance of 1e6: statsmodels' differences lose digits there."""
    y = co2()[:30]
    mod = sarimax.SARIMAX(y, order=(1, 1, 0))
    x, h = np.array([0.4, 0.9]), flint.arb(2) ** -40
    weights = np.arange(30) >= mod.loglikelihood_burn

    def likelihood(phi, variance):
        entries = {
            "a0": [0, 0], "P0": [[1e6, 0], [0, variance / (1 - phi**2)]], "c": [0, 0], "d": [0],
            "T": [[1, 1], [0, phi]], "Z": [[1, 1]], "R": [[0], [1]], "H": [[0]], "Q": [[variance]],
        }  # fmt: skip
        return loglike_in_any_arithmetic(
            exact(np.nan_to_num(y)[:, np.newaxis]), np.isfinite(y)[:, np.newaxis], exact(weights),
            {name: exact(X) for name, X in entries.items()},
        )  # fmt: skip

    with flint.ctx.workdps(60):
        at = exact(x)
        moves = h * np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]])
        truth, e = np.empty((2, 2), object), np.eye(2, dtype=int)
        for i, j in np.ndindex(2, 2):
            four = [likelihood(*(at + a * e[i] + b * e[j])) for a, b in moves]
            truth[i, j] = (four[0] - four[1] - four[2] + four[3]) / (4 * h**2)
    assert relative_error(ours.hessian(mod, x), rounded(truth)) < 1e-9


def test_fixed_parameters():
    mod, params = build("SARIMAX with measurement error")
    with mod.fix_params({mod.param_names[1]: params[1]}):
        free = np.delete(params, 1)
        found = ours.score(mod, free)
        assert relative_error(found, mod.score(free, approx_complex_step=True)) < 1e-6
        H, info = ours.hessian(mod, free), ours.information(mod, free, "expected")
        assert ours.hessian(mod, free / 1e4, transformed=False).shape == H.shape
    assert relative_error(found, np.delete(ours.score(mod, params), 1)) < 1e-12
    rows = np.ix_(*[np.delete(np.arange(len(params)), 1)] * 2)
    assert relative_error(H, ours.hessian(mod, params)[rows]) < 1e-12
    assert relative_error(info, ours.information(mod, params, "expected")[rows]) < 1e-12


def test_the_names_in_an_error_are_those_of_the_free_parameters():
    mod = structural.UnobservedComponents(nile(), "llevel")
    with mod.fix_params({"sigma2.level": 1e3}):
        said = (
            r"\(2,\), expected \(k,\) = \(1,\): sigma2.irregular, without the fixed sigma2.level$"
        )
        with pytest.raises(ValueError, match=said):
            ours.score(mod, [1.5e4, 1e3])
        assert np.isfinite(ours.score(mod, [1.5e4])).all()


def test_the_model_is_left_as_it_was():
    mod, params = build("VAR")
    before, loglike = mod.loglike(params), mod.loglike
    with ours.using(mod):
        assert mod.loglike(params) == pytest.approx(before, rel=1e-12)
        mod.score(params)
        outer = mod.score
        with ours.using(mod):
            mod.score(params)
        assert mod.score is outer
    assert mod.loglike == loglike and "loglike" not in vars(mod)
    assert not np.iscomplexobj(mod.ssm["transition"])
    assert mod.loglike(params) == before


@pytest.mark.parametrize(
    "name", ["VAR", "trend and season", "ARMA, scale concentrated, gaps", "dynamic factor"]
)
@pytest.mark.parametrize("method", ["lbfgs", "bfgs"])
def test_fit(name, method):
    mod, _ = build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about convergence
        theirs = mod.fit(method=method, disp=False, maxiter=300, cov_type="none")
        results = ours.fit(mod, method=method, disp=False, maxiter=300, cov_type="none")
    assert results.llf > theirs.llf - 1e-4
    assert type(results) is type(theirs)


@pytest.mark.parametrize("method", ["lbfgs", "bfgs", "newton"])
def test_fit_of_an_arima_model(method):
    """Its own fit takes neither an optimiser nor what is for one."""
    mod = ARIMA(nile(gaps=True), order=(1, 0, 1), exog=regressors(100))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = mod.fit(cov_type="none")
        results = ours.fit(mod, method=method, maxiter=300, disp=False, cov_type="none")
        bundled = {"method_kwargs": {"maxiter": 0, "disp": False}}
        first = ours.fit(mod, **({} if method == "newton" else bundled), cov_type="none")
    assert results.llf > theirs.llf - 1e-4 and type(results) is type(theirs)
    assert method == "newton" or first.llf < results.llf


def test_standard_errors_are_statsmodels_own():
    mod, _ = build("ARMA, differenced beforehand")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = ours.fit(mod, disp=False, maxiter=200)
    assert np.isfinite(results.bse).all() and "coef" in str(results.summary())


def diffuse_with_a_burn_in():
    mod = structural.UnobservedComponents(nile(), "llevel", use_exact_diffuse=True)
    mod.loglikelihood_burn = 3
    return mod


def full_harmonics():
    """The last one has a state that is seen through sin(pi) alone, which rounds to 1e-16."""
    return structural.UnobservedComponents(
        co2(), "lltrend", freq_seasonal=[{"period": 6}], use_exact_diffuse=True
    )


class Penalised(sarimax.SARIMAX):
    def loglike(self, params, *args, **kwargs):
        return super().loglike(params, *args, **kwargs) - params[0] ** 2


def too_short_for_a_scale():
    return sarimax.SARIMAX(
        [1.0, np.nan, 3.0], order=(0, 2, 0), concentrate_scale=True, use_exact_diffuse=True
    )


def half_started():
    mod = MLEModel(nile(), k_states=2)
    mod.ssm.initialization = Initialization(2)
    mod.ssm.initialization.set(0, "approximate_diffuse")
    return mod


@pytest.mark.parametrize(
    ("make", "params", "message"),
    [
        (MODELS["VAR"], np.ones(3), r"params has shape \(3,\), expected \(k,\) = \(27,\)"),
        (MODELS["exponential smoothing"], [0.1, np.nan, 0.9, 1000, 0], "no number for "),
        (diffuse_with_a_burn_in, np.ones(2), "the states 0 of this Unobserved.* with a burn-in"),
        (lambda: MLEModel(nile(), k_states=1), np.ones(0), "this MLEModel has no initial"),
        (lambda: RecursiveLS(nile(), regressors(100)), np.ones(0), "RecursiveLS has no parameters"),
        (lambda: ETSModel(nile()), np.ones(3), "ETSModel is no state space model of statsmodels"),
        (lambda: varmax.VARMAX(macro()[:, :2], order=(1, 0), trend="n"),
         [1.1, 0, 0, 0.5, 1, 0, 1], "outside the stationary region .* modulus 1.1, expected < 1"),
        (lambda: Penalised(nile(), order=(1, 0, 0)), [0.5, 1.0],
         "Penalised has a log-likelihood of its own, Penalised.loglike, expected that of its"),
        (lambda: exponential_smoothing.ExponentialSmoothing(
            nile(), initialization_method="concentrated"), [0.5, 1.0],
         "initialization_method='concentrated', expected 'estimated', where they are params"),
        (too_short_for_a_scale, np.ones(0), "2 observations and 2 diffuse states leave none"),
        (half_started, np.ones(0), "this MLEModel has an initial distribution for 1 of its 2"),
    ],
)  # fmt: skip
def test_what_is_refused(make, params, message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mod = make()
    with pytest.raises(ValueError, match=message):
        ours.score(mod, params)


def test_a_variance_on_the_boundary():
    mod = structural.UnobservedComponents(nile(), "lltrend")
    with pytest.raises(ValueError, match=r"sigma2.trend: a variance of zero.*'sigma2.trend': 0}"):
        ours.standard_errors(mod, [15000.0, 1400.0, 1e-15])
    assert np.isfinite(ours.information(mod, [15000.0, 1400.0, 0.0])).all()
    with mod.fix_params({"sigma2.trend": 0}):
        found = ours.standard_errors(mod, [15000.0, 1400.0])
    assert found.shape == (2,) and (found > 0).all()
    small = ours.standard_errors(mod, [15000.0, 1400.0, 1e-5], "expected")
    assert np.isfinite(small).all()


@pytest.mark.parametrize("kind", ["observed", "expected", "opg", "sandwich"])
def test_a_direction_of_which_the_data_say_nothing(kind):
    """The coefficients of a regressor that comes twice."""
    twice = np.repeat(regressors(100, 1), 2, axis=1)
    mod = sarimax.SARIMAX(nile(), order=(1, 0, 0), trend="c", exog=twice)
    params = [400.0, 10.0, 20.0, 0.5, 20000.0]
    with pytest.raises(ValueError, match=r"is singular: the data say nothing about .*x1.*x2"):
        ours.standard_errors(mod, params, kind)


def test_a_ridge_that_bends_is_no_way_up():
    """An ARMA(1,1) with noise is an ARMA(1,1): three parameters for two numbers."""
    y, e = np.zeros(200), np.random.default_rng(1).standard_normal((2, 201))
    for t in range(1, 200):
        y[t] = 0.6 * y[t - 1] + e[0, t] + 0.4 * e[0, t - 1]
    mod = sarimax.SARIMAX(y + 0.3 * e[1, :200], order=(1, 0, 1), measurement_error=True)
    phi, theta, noise, variance = 0.5, 0.4, 0.2, 0.9
    middle = (1 + theta**2) * variance + (1 + phi**2) * noise  # autocovariances of the MA part
    beside = theta * variance - phi * noise
    for other in (0.1, 0.15):  # of the noise, with the same autocovariances
        left, right = middle - (1 + phi**2) * other, beside + phi * other
        root = (left - np.sqrt(left**2 - 4 * right**2)) / (2 * right)
        same = [phi, root, other, right / root]
        assert ours.loglike(mod, same) == pytest.approx(
            ours.loglike(mod, [phi, theta, noise, variance]), abs=1e-9
        )
    with pytest.warns(ConvergenceWarning, match=r"all along a line: .* ma.L1 .*, so that these"):
        results = ours.fit(mod, method="newton", disp=False)
    with pytest.raises(ValueError, match=r"is singular: the data say nothing about .*ma.L1"):
        ours.standard_errors(mod, results.params)
    almost = np.array([[1.0, 1 + 1e-9], [1 + 1e-9, 1.0]])
    with pytest.raises(ValueError, match=r"the data say nothing about \+1 x -1 y$"):
        _inverse(almost, ["x", "y"], "information")


@pytest.mark.parametrize("seed", [1, 3, 4])
def test_a_line_of_maxima_is_told_wherever_a_method_ends_beside_it(seed):
    """What is left of the score makes a curvature along a line that bends."""
    y, e = np.zeros(200), np.random.default_rng(seed).standard_normal((2, 201))
    for t in range(1, 200):
        y[t] = 0.6 * y[t - 1] + e[0, t] + 0.4 * e[0, t - 1]
    mod = sarimax.SARIMAX(y + 0.3 * e[1, :200], order=(1, 0, 1), measurement_error=True)
    with pytest.warns(ConvergenceWarning, match="has its maximum all along a line"):
        ours.fit(mod, disp=False, cov_type="none")


def test_no_maximum():
    with pytest.raises(ValueError, match=r"curves upwards along \+1 x -1 y$"):
        _inverse(np.array([[1.0, 2.0], [2.0, 1.0]]), ["x", "y"], "information")
    mod = sarimax.SARIMAX(nile(), order=(1, 0, 1), trend="c")
    with pytest.raises(ValueError, match="the likelihood curves upwards along"):
        ours.standard_errors(mod, [400.0, 0.5, 0.1, 3e6])


def test_fewer_steps_than_parameters():
    mod = varmax.VARMAX(macro(20), order=(2, 0))
    params = np.asarray(mod.start_params)
    with pytest.raises(ValueError, match="the outer product of the gradients is singular"):
        ours.information(mod, params, "sandwich")


@pytest.mark.parametrize("function", [ours.information, ours.standard_errors])
def test_bad_arguments_of_information(function):
    mod, params = build("exact diffuse SARIMA")
    with pytest.raises(ValueError, match="kind is 'oim', expected 'observed', 'expected', 'opg'"):
        function(mod, params, "oim")
    for kind in ("expected", "opg", "sandwich"):
        with pytest.raises(ValueError, match="exact diffuse start, which has the observed inform"):
            ours.information(mod, params, kind)
    with pytest.raises(ValueError, match=r"params has shape \(2,\), expected \(k,\) = \(4,\): "):
        function(mod, params[:2])


def test_an_optimiser_may_step_out_of_bounds():
    """Where F is not positive definite the likelihood is -inf for an optimiser, an error for us."""
    mod, params = build("VARMA with measurement error")
    names = list(mod.param_names)
    bad = params.copy()
    bad[[k for k, name in enumerate(names) if name.startswith("measurement_variance")]] = -1e3
    with pytest.raises(np.linalg.LinAlgError, match="not positive definite"):
        ours.loglike(mod, bad)
    with ours.using(mod):
        assert mod.loglike(bad) == -np.inf


def test_few_steps_for_many_parameters():
    mod, params = build("VAR")
    colors = updates._derivatives(mod, params).colored.colors
    assert len(params) == 27 and colors.max() < 6
    # Regression coefficients and the entries of a transition share a colour.
    assert len(set(colors[:21])) == 1


def test_derivatives_that_change_are_found_anew():
    """The step in which all parameters move says whether they are those of the last point."""
    calls = []

    def function(x):
        calls.append(x)
        return np.array([x[0] * x[1], x[2], x[2] ** 2, x[0]])

    found = updates.Colored(updates.complex_step(function), np.ones(3))
    here, elsewhere, with_one_that_stays = np.array([[2.0, 3, 4], [5, 2, 7], [5, 2, 8]])
    for x in (here, elsewhere, here, with_one_that_stays, elsewhere):
        expected = [[x[1], x[0], 0], [0, 0, 1], [0, 0, 2 * x[2]], [1, 0, 0]]
        np.testing.assert_allclose(found.dense(x), expected, rtol=1e-14)
    calls.clear()
    np.testing.assert_array_equal(found.dense(elsewhere), found.dense(elsewhere))
    assert len(calls) == 2  # where they are known, one each


def test_derivatives_are_those_that_are_known_only_for_the_same_entries():
    """A parameter that moves one more entry from 2 on: there, and back again."""

    def function(x):
        return np.array([x[0] + (x[1] if x[1].real > 2 else 0), x[1], x[2]])

    found = updates.Colored(updates.complex_step(function), np.ones(3))
    for x in (1.0, 1.0, 3.0, 1.0, 3.0):
        expected = np.eye(3)
        expected[0, 1] = x > 2
        np.testing.assert_array_equal(found.dense(np.array([1.0, x, 1.0])).round(14), expected)


def test_a_score_updates_a_linear_model_twice(monkeypatch):
    """Once for all parameters, as the derivatives are those of the last time; once for arrays."""
    mod, params = build("VAR")
    for _ in range(2):
        ours.score(mod, params)
    update, steps = mod.update, []

    def counted(*args, **kwargs):
        steps.append(kwargs.get("complex_step", False))
        return update(*args, **kwargs)

    monkeypatch.setattr(mod, "update", counted)
    found = ours.score(mod, 1.1 * params)
    assert steps == [True, False]
    assert not np.iscomplexobj(mod.ssm["transition"])
    monkeypatch.undo()
    np.testing.assert_allclose(found, ours.score(build("VAR")[0], 1.1 * params), rtol=1e-12)


def test_derivatives_are_not_told_by_a_sum_that_hides_some_of_them():
    """The change of a small derivative is lost beside a large one of the same entry."""
    found = updates.Colored(
        updates.complex_step(lambda x: np.array([1e9 * x[0] + np.log(x[1]), x[2]])), np.ones(3)
    )
    for x in (1e9, 1e8, 1e7):
        np.testing.assert_allclose(found.dense(np.array([1, x, 1]))[0, 1], 1 / x, rtol=1e-14)


class Reshaping(MLEModel):
    """Whose update writes its intercept for one step or for all, as it is told."""

    param_names, start_params = ["H", "Q", "d"], np.array([1.0, 1.0, 9.0])  # noqa: RUF012
    steps, bound, folds = 1, np.inf, False

    def __init__(self):
        super().__init__(nile() / 100, k_states=1, initialization="approximate_diffuse")
        self.ssm["design"], self.ssm["selection"] = [[1.0]], [[1.0]]
        self.ssm["transition"] = [[0.5]]

    def update(self, params, **kwargs):
        params = super().update(params, **kwargs)
        self.ssm["obs_cov", 0, 0], self.ssm["state_cov", 0, 0] = params[:2]
        if params[2].real > self.bound:
            raise ValueError("out of bounds")
        d = params[2] + abs(params[2]) if self.folds and params[2].real < 0 else params[2]
        self.ssm["obs_intercept"] = np.full((1, self.steps), d)


@pytest.mark.parametrize("steps", [(1, 100), (100, 1)])
def test_a_score_of_arrays_that_have_changed_their_shape(steps):
    mod, fresh = Reshaping(), Reshaping()
    params = mod.start_params
    for mod.steps in (steps[0], steps[0], steps[0], steps[1]):  # noqa: B020
        found = ours.score(mod, params)
    fresh.steps = steps[1]
    np.testing.assert_allclose(found, ours.score(fresh, params), rtol=1e-12)
    assert not np.imag(mod.ssm["obs_intercept"]).any()


def test_a_score_is_not_taken_for_known_where_signs_are_new():
    """By complex steps, through abs, the intercept moves below zero as above; there it is zero."""
    mod = Reshaping()
    mod.folds = True
    for _ in range(3):
        assert ours.score(mod, mod.start_params)[2] != 0
    assert abs(ours.score(mod, [1.0, 1.0, -9.0])[2]) < 1e-9


@pytest.mark.parametrize("known", [False, True])
def test_a_score_that_fails_leaves_the_model_as_it_was_differentiated(known):
    """Out of bounds nothing is to be learnt of how to differentiate it."""
    mod = Reshaping()
    mod.bound = 10
    out = np.array([1.0, 1.0, 11.0])
    for _ in range(3 * known):
        ours.score(mod, mod.start_params)
    with pytest.raises(ValueError, match="out of bounds"):
        ours.score(mod, out)
    assert not np.imag(mod.ssm["obs_cov"]).any()
    ours.score(mod, mod.start_params)
    assert updates._derivatives(mod, mod.start_params).exact


class Changing(MLEModel):
    """Whose second parameter moves an entry of the first only from 2 on."""

    def __init__(self):
        super().__init__(nile() / 100, k_states=1, initialization="approximate_diffuse")
        self.ssm["design"], self.ssm["selection"] = [[1.0]], [[1.0]]

    param_names, start_params = ["H", "Q"], np.ones(2)  # noqa: RUF012

    def update(self, params, **kwargs):
        params = super().update(params, **kwargs)
        late = params[1] if params[1].real > 2 else 0 * params[1]
        self.ssm["obs_cov", 0, 0] = params[0] + late
        self.ssm["state_cov", 0, 0] = params[1]


class StartedByItsUpdate(Changing):
    """Which has no initial distribution before it has parameters."""

    def __init__(self):
        super().__init__()
        self.ssm.initialization = None

    def update(self, params, **kwargs):
        super().update(params, **kwargs)
        self.ssm.initialize_known(np.array([params[0]]), np.array([[params[0] * params[1]]]))


def test_a_start_that_the_update_makes():
    params = np.array([1.5, 0.5])
    found = ours.score(StartedByItsUpdate(), params)
    theirs = StartedByItsUpdate().score(params, approx_complex_step=True)
    assert relative_error(found, theirs) < 1e-8
    with ours.using(StartedByItsUpdate()) as mod:
        assert relative_error(mod.score(params), theirs) < 1e-8


def test_an_update_that_starts_to_move_other_entries_is_noticed():
    mod = Changing()
    for params in ([1.0, 1.0], [1.0, 3.0], [1.0, 1.0]):
        found = ours.score(mod, params)
        assert relative_error(found, mod.score(np.array(params))) < 1e-8


TRANSFORMED = {
    "VARMAX": lambda: varmax.VARMAX(macro()[:, :2], order=(2, 1), trend="c"),
    "VARMAX, diagonal": lambda: varmax.VARMAX(
        macro()[:, :2], order=(2, 1), trend="c", error_cov_type="diagonal", measurement_error=True
    ),
} | {
    f"{k} factors, order {order}": lambda k=k, order=order: dynamic_factor.DynamicFactor(
        macro(), k_factors=k, factor_order=order, error_order=2, error_cov_type="scalar"
    )
    for k, order in ((1, 2), (2, 1))
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMED)
def test_the_transformation_of_vector_autoregressions(name):
    """With negative entries on the diagonal of the factor, which a Cholesky factor has not."""
    mod, rng = TRANSFORMED[name](), np.random.default_rng(3)
    free = rng.normal(size=len(mod.param_names))
    if "VARMAX" in name:
        at = mod._params_state_cov
        free[at] = rng.permutation([-0.7, 1.2, 0.4][: len(free[at])])
    found = updates._transformation(mod, free)
    assert isinstance(found, updates._VectorTransformation)
    assert relative_error(found.dense(free), updates.jacobian(mod.transform_params, free)) < 1e-10


@pytest.mark.parametrize("radius", [0.5, 0.999])
def test_stationary_start(radius):
    rng = np.random.default_rng(0)
    T = rng.normal(size=(4, 4))
    T *= radius / np.abs(np.linalg.eigvals(T)).max()
    W, c, bar = np.eye(4), rng.normal(size=4), rng.normal(size=(4, 4))
    found = Stationary(T, c, W)
    assert relative_error(found.covariance, solve_discrete_lyapunov(T, W)) < 1e-11
    assert relative_error(found.mean, np.linalg.solve(np.eye(4) - T, c)) < 1e-11
    s, S = found.adjoints(c, bar + bar.T)
    assert relative_error(S, solve_discrete_lyapunov(T.T, bar + bar.T)) < 1e-11
    assert relative_error(s, np.linalg.solve(np.eye(4) - T.T, c)) < 1e-11
    assert not Stationary(T / radius, c, W).converged


def test_a_root_close_to_one_is_inside_and_one_that_is_one_is_not():
    one, zero = np.eye(1), np.zeros(1)
    near = Stationary((1 - 1e-12) * one, zero, one)
    assert near.converged and near.covariance[0, 0] == pytest.approx(0.5e12, rel=1e-3)
    for angle in np.linspace(0.1, 3.1, 200):  # of modulus one but for rounding
        T = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        assert not Stationary(T, np.zeros(2), np.eye(2)).converged


@pytest.mark.parametrize("name", ["local level", "VAR", "ARMA"])
def test_newton(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mod = FITTED[name]()
        theirs = mod.fit(disp=False, maxiter=500, cov_type="none")
        found = ours.fit(mod, method="newton", disp=False, cov_type="none")
    assert found.llf > theirs.llf - 1e-6 and type(found) is type(theirs)
    about = found.mle_retvals
    # The likelihood of the ARMA has a ridge, with a higher maximum than statsmodels finds.
    assert about["converged"] and about["iterations"] <= (25 if name == "ARMA" else 12)
    slope = ours.score(mod, mod.untransform_params(found.params), transformed=False)
    H = ours.hessian(mod, mod.untransform_params(found.params), transformed=False)
    assert slope @ np.linalg.solve(-H, slope) < 1e-6


@pytest.mark.parametrize("seed", range(40))
def test_a_climb_among_numbers_of_any_size_or_none_ends(seed):
    """Curvatures and slopes that overflow or underflow, in units or squared; NaN and infinity."""
    rng = np.random.default_rng(seed)
    k, most = rng.integers(1, 5), (300, 20)[seed % 2]
    B = np.tril(rng.normal(size=(k, k)) * 10.0 ** rng.uniform(-330, most, size=(k, k)))
    B = B + np.tril(B, -1).T
    g = rng.normal(size=k) * 10.0 ** rng.uniform(-320, most, size=k)
    B[np.diag_indices(k)] *= seed % 3 != 0
    g[0] = (g[0], g[0], np.nan, np.inf)[seed % 4]

    def trial(x):
        return g @ x - x @ B @ x / 2, g - B @ x

    with np.errstate(all="ignore"):
        found = climb(trial, lambda x: B, np.zeros(k), 5)
    assert np.isfinite(found.x).all() and not (seed % 4 > 1 and found.converged)


def test_a_climb_from_a_saddle():
    def trial(x):
        return x[0] ** 2 - x[0] ** 4 / 4 - x[1] ** 2, np.array([2 * x[0] - x[0] ** 3, -2 * x[1]])

    def curvature(x):
        return np.diag([3 * x[0] ** 2 - 2, 2.0])

    found = climb(trial, curvature, np.array([0.0, 1.0]), 100)
    assert found.converged and found.value == pytest.approx(1.0)
    stopped = climb(trial, curvature, np.array([0.0, 1.0]), 1)
    assert not stopped.converged and stopped.steps == 1
    assert not climb(trial, curvature, np.array([0.0, 1.0]), 0).converged
    exactly = climb(trial, curvature, np.zeros(2), 100)  # where all slopes are zero
    assert exactly.converged and exactly.value == pytest.approx(1.0)
    nothing = climb(lambda x: (0.0, 0 * x), lambda x: np.zeros((2, 2)), np.zeros(2), 100)
    assert nothing.converged and not nothing.steps


def test_a_climb_from_a_variance_of_zero():
    """Optimisers work with its square root, whose slope is zero there."""
    mod = sm.tsa.UnobservedComponents(nile(), "llevel")
    with mod.fix_params({"sigma2.irregular": 15000.0}):
        found = ours.fit(mod, [0.0], method="newton", disp=False, cov_type="none")
        best = ours.fit(mod, disp=False, cov_type="none")
    assert found.mle_retvals["converged"] and found.llf > best.llf - 1e-6


@pytest.mark.parametrize("method", ["lbfgs", "bfgs", "newton"])
@pytest.mark.parametrize("given", [False, True])
def test_a_start_on_the_edge_of_an_interval_is_moved_inside(method, given):
    """Of the damping of a cycle, which statsmodels starts at zero and then cannot move."""
    inflation = sm.datasets.macrodata.load_pandas().data["infl"].to_numpy(float)[:120]
    mod = structural.UnobservedComponents(
        inflation, "rwdrift", cycle=True, damped_cycle=True, autoregressive=1
    )
    start = mod.start_params
    assert start[mod.param_names.index("damping.cycle")] == 0.0
    with pytest.warns(ConvergenceWarning):
        stuck = mod.fit(disp=False)
        with ours.using(mod):  # whose fit is statsmodels' own: no further, and no less far
            assert mod.fit(disp=False).llf >= stuck.llf
    found = ours.fit(mod, start if given else None, method=method, disp=False)
    assert found.llf > stuck.llf + 20
    assert found.mle_retvals["converged"]


def test_a_fit_goes_on_where_that_of_statsmodels_ends():
    """It is at no maximum after 50 iterations, and whose likelihood is larger by then is chance."""
    mod = dynamic_factor.DynamicFactor(macro_growth(3)[:80], k_factors=2, factor_order=1)
    with pytest.warns(ConvergenceWarning):
        theirs = mod.fit(disp=False, cov_type="none")
    found = ours.fit(mod, disp=False, cov_type="none")
    assert found.mle_retvals["iterations"] > theirs.mle_retvals["iterations"] == 50
    assert found.llf > theirs.llf + 1
    few = ours.fit(mod, disp=False, cov_type="none", maxiter=7)
    assert few.mle_retvals["iterations"] == 7


def test_arguments_of_a_climb():
    mod = FITTED["local level"]()
    few = []
    ours.fit(mod, method="newton", disp=False, low_memory=True, callback=few.append, maxiter=3)
    assert 3 < len(few) <= 6  # three with slopes alone, and up to three steps
    with pytest.raises(ValueError, match="method"):
        ours.fit(mod, method="climb")
    params = ours.fit(mod, method="newton", disp=False, return_params=True)
    assert np.abs(params / [15099, 1469] - 1).max() < 0.01
    with mod.fix_params({"sigma2.level": 1469.0}):
        fixed = ours.fit(mod, method="newton", disp=False, cov_type="none")
    assert fixed.params[1] == 1469.0 and abs(fixed.params[0] / params[0] - 1) < 0.01


def test_a_transformation_that_is_flat_where_an_optimiser_has_gone():
    mod = structural.UnobservedComponents(nile(), "llevel", cycle=True)
    free = np.array([100.0, 30.0, -950.0])
    assert np.isfinite(updates._transformation(mod, free).pull(free, np.ones(3))).all()


def macro_growth(series=2):
    return np.asarray(100 * np.diff(np.log(macro_levels()), axis=0))[:, :series]


def macro_levels():
    names = ["realgdp", "realcons", "realinv"]
    return sm.datasets.macrodata.load_pandas().data[names].to_numpy(float)


def test_fixed_parameters_in_a_transformation_that_couples_them():
    """The fixed ones stay where they are, whatever the transformation makes of those beside."""
    mod = sm.tsa.VARMAX(macro_growth(), order=(1, 0), trend="n")
    with mod.fix_params(dict(zip(mod.param_names[:4], [0.4, 0.3, -0.2, 0.1], strict=True))):
        x = np.array([0.8, 0.2, 0.6])  # which transform by the identity
        free = ours.score(mod, x, transformed=False)
        assert relative_error(free, ours.score(mod, x)) < 1e-12
        H = ours.hessian(mod, x, transformed=False)
        assert relative_error(H, ours.hessian(mod, x)) < 1e-8
    es = sm.tsa.statespace.ExponentialSmoothing(
        nile(), trend=True, initialization_method="known", initial_level=1100.0, initial_trend=0.0
    )
    with es.fix_params({"smoothing_trend": 0.05}):

        def value(x):
            return es.loglike(np.array([x]), transformed=False)

        h = 1e-4
        slope = (value(-0.5 + h) - value(-0.5 - h)) / (2 * h)
        assert abs(ours.score(es, [-0.5], transformed=False)[0] / slope - 1) < 1e-6
        found = ours.fit(es, method="newton", disp=False, cov_type="none")
        assert found.mle_retvals["converged"]
        assert abs(ours.score(es, found.params[:1])[0]) < 1e-2


def test_the_sandwich_is_the_same_with_the_scale_concentrated():
    y = sm.datasets.sunspots.load_pandas().data["SUNACTIVITY"].to_numpy(float)
    full = sm.tsa.SARIMAX(y, order=(2, 0, 0), trend="c")
    concentrated = sm.tsa.SARIMAX(y, order=(2, 0, 0), trend="c", concentrate_scale=True)
    params = ours.fit(full, method="newton", disp=False, return_params=True)
    for kind in ("observed", "expected", "opg", "sandwich"):
        one = ours.standard_errors(full, params, kind)[:-1]
        other = ours.standard_errors(concentrated, params[:-1], kind)
        assert relative_error(other, one) < 1e-5, kind
    wanted = np.linalg.inv(ours.information(concentrated, params[:-1], "sandwich"))
    errors = ours.standard_errors(concentrated, params[:-1], "sandwich")
    assert relative_error(np.sqrt(np.diag(wanted)), errors) < 1e-9


def test_a_trial_outside_the_stationary_region_ends_no_fit():
    mod = sm.tsa.VARMAX(
        100 * np.log(macro_levels()[:, :2]), order=(1, 0), trend="n", enforce_stationarity=False
    )
    start = [0.98, 0, 0, 0.98, 5, 0, 5]
    found = ours.fit(mod, start_params=start, disp=False, cov_type="none")
    assert np.isfinite(found.llf)


def test_the_model_is_left_where_it_was_updated_last():
    mod = sm.tsa.UnobservedComponents(nile(), "llevel")
    with ours.using(mod):
        _ = mod.score(np.array([15000.0, 1400.0]))
        mod.smooth([10000.0, 3000.0])
    assert mod["obs_cov"].real == 10000
    with ours.using(mod):
        _ = mod.score(np.array([15000.0, 1400.0]))
    assert mod["obs_cov"] == 15000
    with ours.using(mod):
        x = np.array([15000.0, 1400.0])
        before, mod.loglikelihood_burn = mod.loglike(x), 5
        assert mod.loglike(x) != before


def test_no_climb_ends_where_only_the_region_shrank():
    def edge(x):
        return (float(x[0]), np.ones(1)) if x[0] < 1 else (-np.inf, None)

    assert not climb(edge, lambda x: np.eye(1), np.zeros(1), 100).converged


def test_a_model_that_nobody_needs_is_let_go():
    mod = sm.tsa.SARIMAX(nile(), order=(1, 0, 0))
    left = weakref.ref(mod)
    for transformed in (True, False):
        _ = ours.score(mod, mod.start_params, transformed=transformed)
    del mod
    gc.collect()
    assert left() is None


class _Plain(MLEModel):
    """A local level in a few lines."""

    param_names = ["H", "Q"]  # noqa: RUF012
    start_params = np.array([1e4, 1e3])

    def __init__(self, y, **how):
        super().__init__(y, k_states=1, **how)
        for x in ("design", "transition", "selection"):
            self.ssm[x] = [[1.0]]

    def update(self, params, **kwargs):
        params = super().update(params, **kwargs)
        self.fill(params)


def test_second_derivatives_beside_a_pole():
    """An update with sigma2 / (1 - phi^2) in it: the same likelihood as from a stationary start."""

    class Known(_Plain):
        param_names = ["phi", "sigma2"]  # noqa: RUF012

        def fill(self, params):
            phi, sigma2 = params
            self.ssm["transition", 0, 0], self.ssm["state_cov", 0, 0] = phi, sigma2
            self.ssm.initialize_known(np.array([0 * phi]), np.array([[sigma2 / (1 - phi**2)]]))

    y = (nile() - nile().mean()) / nile().std()
    stationary = sm.tsa.SARIMAX(y, order=(1, 0, 0))
    for phi, bound in ((0.5, 1e-9), (0.99, 1e-8), (0.997, 1e-7)):
        found = ours.hessian(Known(y), [phi, 1.0])
        assert relative_error(found, ours.hessian(stationary, [phi, 1.0])) < bound


HOW = {"initialization": "approximate_diffuse", "loglikelihood_burn": 1}


def test_an_absolute_value_on_a_branch_that_is_reached_later():
    class Late(_Plain):
        def fill(self, params):
            h, q = params
            self.ssm["obs_cov", 0, 0] = np.abs(h) if h.real < 0 else h
            self.ssm["state_cov", 0, 0] = q

    mod, x = Late(nile(), **HOW), np.array([1.4e4, 1.2e3])
    found = ours.score(mod, x)
    assert relative_error(ours.score(mod, x * [-1, 1]), found * [-1, 1]) < 1e-6


def test_an_update_that_loses_the_imaginary_part_on_a_branch_that_is_reached_later():
    class Late(_Plain):
        def fill(self, params):
            h, q = params
            self.ssm["obs_cov", 0, 0] = h if h.real < 2e4 else h / 2 + h.real / 2
            self.ssm["state_cov", 0, 0] = q if q.real < 2e3 else q.real

    for derivative in (ours.score, ours.hessian):
        mod, plain = Late(nile(), **HOW), sm.tsa.UnobservedComponents(nile(), "llevel")
        for x in ([1.4e4, 1.2e3], [1.5e4, 1.2e3], [2.5e4, 1.2e3], [1.5e4, 2.2e3]):
            assert relative_error(derivative(mod, x), derivative(plain, x)) < 1e-6


def test_an_absolute_value_beside_a_large_number():
    """Of which differences see no more than a few digits."""

    class Far(_Plain):
        def fill(self, params):
            h, q = params
            self.ssm["obs_cov", 0, 0], self.ssm["state_cov", 0, 0] = h, q
            self.ssm["obs_intercept", 0, 0] = 1e9 + 1e-2 * np.abs(q)

    mod, x = Far(nile() + 1e9, loglikelihood_burn=1), np.array([1.4e4, 1.2e3])
    mod.initialize_known(np.array([1000.0]), np.array([[1e4]]))
    expected = updates.jacobian(lambda x: np.array([ours.loglike(mod, x)]), x)[0]
    assert relative_error(ours.score(mod, x), expected) < 1e-4


@pytest.mark.parametrize(
    "variances",
    [
        np.abs,  # which no complex step differentiates
        lambda x: x if np.isrealobj(x) else x * [np.nan, 1],
        lambda x: np.exp(np.logaddexp(np.log(x), -np.inf)),  # takes no complex numbers
    ],
)
def test_an_update_that_is_no_analytic_function(variances):
    class Written(_Plain):
        def fill(self, params):
            self.ssm["obs_cov", 0, 0], self.ssm["state_cov", 0, 0] = variances(params)

    mod, plain = Written(nile(), **HOW), sm.tsa.UnobservedComponents(nile(), "llevel")
    x = np.array([1.4e4, 1.2e3])
    assert relative_error(ours.score(mod, x), plain.score(x, approx_complex_step=True)) < 1e-6
    if variances is np.abs:
        found = ours.fit(mod, disp=False, cov_type="none")
        assert found.llf > mod.loglike(mod.start_params) + 1


def test_an_update_that_takes_no_variance_below_zero():
    class Rooted(_Plain):
        param_names, start_params = ["a", "b", "H", "Q"], np.ones(4)  # noqa: RUF012

        def fill(self, params):
            if (params.real < 0).any():
                raise np.linalg.LinAlgError("no root of a negative variance")
            self.ssm["obs_cov", 0, 0], self.ssm["state_cov", 0, 0] = params[2:]

    mod, plain = Rooted(nile(), **HOW), sm.tsa.UnobservedComponents(nile(), "llevel")
    expected = ours.score(plain, [1.4e4, 0.0])
    assert relative_error(ours.score(mod, [1.0, 1.0, 1.4e4, 0.0])[2:], expected) < 1e-8


def test_a_trial_where_an_array_overflows_turns_an_optimiser_back():
    class Steep(_Plain):
        start_params = np.log([1e4, 1e3])

        def transform_params(self, free):
            return np.exp(free)

        def untransform_params(self, params):
            return np.log(params)

        def fill(self, params):
            self.ssm["obs_cov", 0, 0], self.ssm["state_cov", 0, 0] = params

    mod = Steep(nile(), **HOW)
    with np.errstate(all="ignore"), ours.using(mod):
        assert mod.loglike(np.array([800.0, 1.0]), transformed=False) == -np.inf
        assert np.isnan(mod.score(np.array([800.0, 1.0]), transformed=False)).all()
    # To others it is an error that names the array.
    mod.ssm["obs_intercept"] = [[np.inf]]
    said = pytest.raises(ValueError, match="d is not finite at these params")
    with np.errstate(all="ignore"), said:
        ours.loglike(mod, [1.0, 1.0])


def test_a_value_alone_takes_no_way_back(monkeypatch):
    mod = sm.tsa.UnobservedComponents(nile(), "llevel")
    expected, failing = mod.loglike([1.4e4, 1.2e3]), np.array([-1.0, -1.0])
    monkeypatch.setattr(compiled, "evaluate", lambda *_, **__: pytest.fail("it ran backwards"))
    assert abs(ours.loglike(mod, [1.4e4, 1.2e3]) - expected) < 1e-9 * abs(expected)
    monkeypatch.undo()
    with pytest.raises(np.linalg.LinAlgError, match="at step 0"):
        ours.loglike(mod, failing)


def test_second_derivatives_that_cannot_be_had_end_a_fit_with_a_warning(monkeypatch):
    def none(*arguments, **how):
        raise np.linalg.LinAlgError("F is not positive definite for the Hessian")

    monkeypatch.setitem(ours.fit.__globals__, "hessian", none)
    mod = sm.tsa.UnobservedComponents(nile(), "llevel")
    with pytest.warns(ConvergenceWarning):
        found = ours.fit(mod, method="newton", disp=False, cov_type="none")
    assert not found.mle_retvals["converged"] and np.isfinite(found.llf)


def test_what_is_changed_within_a_context_counts():
    mod, x = _level(), np.array([1.4e4, 1.2e3])

    def anew():
        one = _level()
        one.ssm.endog[:] = mod.ssm.endog
        one.ssm.filter_concentrated = mod.ssm.filter_concentrated
        one.ssm.initialization = mod.ssm.initialization
        return pytest.approx(ours.loglike(one, x), rel=1e-14)

    with ours.using(mod):
        assert mod.loglike(x) == anew()
        mod.initialize_known(np.array([1000.0]), np.array([[1e4]]))
        assert mod.loglike(x) == anew()
        mod.ssm.initialization.set(None, "known", constant=[900.0], stationary_cov=[[1e4]])
        assert mod.loglike(x) == anew()
        mod.ssm.endog[0, 3] += 100.0
        assert mod.loglike(x) == anew()
        mod.ssm.filter_concentrated = True
        assert mod.loglike(x) == anew()


def _level():
    class Level(_Plain):
        def fill(self, params):
            self.ssm["obs_cov", 0, 0], self.ssm["state_cov", 0, 0] = params

    return Level(nile(), **HOW)


@pytest.mark.parametrize("fixed", [False, True])
def test_no_parameter(fixed):
    mod = sm.tsa.SARIMAX(nile(), order=(0, 0, 0), concentrate_scale=not fixed)
    with mod.fix_params({"sigma2": 1e4} if fixed else {}):
        assert np.isfinite(ours.loglike(mod, []))
        for transformed in (True, False):
            assert ours.score(mod, [], transformed=transformed).shape == (0,)
            with ours.using(mod):
                assert mod.score([], transformed=transformed).shape == (0,)
            assert ours.hessian(mod, [], transformed=transformed).shape == (0, 0)
        for kind in ("observed", "expected", "opg", "sandwich"):
            assert ours.information(mod, [], kind).shape == (0, 0)
            assert ours.standard_errors(mod, [], kind).shape == (0,)


def test_a_structurally_singular_covariance_is_no_variance_of_zero():
    class Rank1(MLEModel):
        param_names, start_params = ["H", "s"], np.array([1.0, 1.0])  # noqa: RUF012

        def __init__(self):
            how = {"initialization": "approximate_diffuse", "loglikelihood_burn": 3}
            super().__init__(nile() / 100, k_states=3, **how)
            self.ssm["design"], self.ssm["selection"] = np.ones((1, 3)), np.eye(3)
            self.ssm["transition"] = np.diag([1.0, 0.5, -0.3])

        def update(self, params, **kwargs):
            params = super().update(params, **kwargs)
            b = np.array([1.0, 0.3, 0.7])
            self.ssm["obs_cov", 0, 0] = params[0]
            self.ssm["state_cov"] = params[1] * np.outer(b, b)

    assert np.isfinite(ours.standard_errors(Rank1(), [1.0, 1.0], "expected")).all()


def test_regressors_of_any_size():
    """Their coefficient is small, and known all the same."""
    x = np.random.default_rng(0).normal(size=(100, 1))
    found = []
    for s in 10.0 ** np.arange(0, 13, 4):
        mod = sm.tsa.UnobservedComponents(
            nile(), "llevel", exog=s * x, mle_regression=False, use_exact_diffuse=True
        )
        at = [15000.0, 1400.0]
        found.append([ours.loglike(mod, at) + np.log(s), *ours.score(mod, at)])
    assert relative_error(np.array(found), np.tile(found[0], (4, 1))) < 1e-10


def test_climbs_end_as_fits_do():
    """With what statsmodels leaves behind, in each of its ways to end."""
    mod = sm.tsa.SARIMAX(nile(), order=(1, 0, 0), trend="c")
    how = {"method": "newton", "disp": False}
    found = ours.fit(mod, **how)
    assert found.mlefit.mle_retvals["converged"] and found.mlefit.mle_settings["optimizer"]
    assert pickle.loads(pickle.dumps(found)).llf == found.llf
    with pytest.warns(ConvergenceWarning, match="Check mle_retvals"):
        ours.fit(mod, maxiter=1, **how)
    mod.ssm.set_conserve_memory(MEMORY_CONSERVE)
    assert abs(ours.fit(mod, **how).llf - found.llf) < 1e-6
    level = sm.tsa.UnobservedComponents(nile(), "llevel")
    with level.fix_params({"sigma2.irregular": 15000.0, "sigma2.level": 1400.0}):
        assert ours.fit(level, **how).llf == level.fit(disp=False).llf


@pytest.mark.parametrize("change", [-1e-3, -1e-5, 0.0, 1e-5, 1e-3])
def test_an_exact_diffuse_level_that_is_observed_without_noise(change):
    y = np.random.default_rng(59).normal(size=40)
    y[[7, 10]] = np.nan
    mod = structural.UnobservedComponents(y, "rwalk", use_exact_diffuse=True)
    params = np.array([0.04530609 * (1 + change)])
    value, terms = mod.loglike(params), np.isfinite(y).sum() - 1
    steps = np.diff(y[np.isfinite(y)]) ** 2 / np.diff(np.flatnonzero(np.isfinite(y)))
    assert relative_error(ours.loglike(mod, params), value) < 1e-12
    slope = (steps.sum() / params - terms) / (2 * params)
    assert relative_error(ours.score(mod, params), slope) < 1e-12


class MovingAverage(Autoregression):
    """ARMA(1, 1)."""

    param_names = ["ar.L1", "ma.L1", "sigma2"]  # noqa: RUF012

    def update(self, params, **kwargs):
        phi, theta, self["state_cov", 0, 0] = MLEModel.update(self, params, **kwargs)
        self["transition", 0, 0], self["selection", 1, 0] = phi, theta


def simulated(n=200, seed=0):
    y, e = np.zeros(n + 100), np.random.default_rng(seed).normal(size=n + 100)
    for t in range(2, n + 100):
        y[t] = 1.5 * y[t - 1] - 0.6 * y[t - 2] + e[t]
    return y[100:]


@pytest.mark.parametrize("method", ["lbfgs", "bfgs", "cg", "nm", "newton"])
@pytest.mark.parametrize("make", [Autoregression, MovingAverage])
def test_a_fit_goes_on_beside_what_has_no_likelihood(make, method):
    """Its first trial lies outside the stationary region, or has a variance below zero."""
    mod, limits = make(simulated()), {"enforce_stationarity": False, "enforce_invertibility": False}
    order = (2, 0, 0) if make is Autoregression else (1, 0, 1)
    inside = sarimax.SARIMAX(simulated(), order=order)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ours.fit(mod, method=method, disp=False, cov_type="none", maxiter=500)
    expected = inside.fit(disp=False, maxiter=500).params
    at = minimised_score(sarimax.SARIMAX(simulated(), order=order, **limits), expected)
    assert found.llf > inside.loglike(expected) - 1e-3 and at < 1e-2
    assert np.abs(ours.score(mod, found.params) * found.params).max() < 1e-2


def minimised_score(mod, params):
    mod.ssm.initialize_stationary()
    return np.abs(mod.score(params)).max() / len(mod.endog)


@pytest.mark.parametrize(
    "how", [{}, {"optim_score": "approx"}, {"method": "bfgs"}, {"method": "nm"}]
)
def test_a_fit_of_statsmodels_does_not_trust_a_refused_trial(how):
    """Within the context: with no slope there, L-BFGS ends at the start, and says it converged."""
    mod, elsewhere = Autoregression(simulated()), np.array([2.0, 0.0, 1.0])
    with ours.using(mod):
        found = mod.fit(disp=False, cov_type="none", maxiter=500, **how)
        assert mod.loglike(elsewhere) == -np.inf and np.isnan(mod.score(elsewhere)).all()
    best = ours.fit(Autoregression(simulated()), disp=False, cov_type="none")
    assert found.llf > best.llf - 1e-3 and "fit" not in vars(mod)


@pytest.mark.parametrize("unit", [1e-9, 1e9])
@pytest.mark.parametrize("method", ["lbfgs", "bfgs", "newton"])
def test_a_fit_ends_at_the_maximum_in_any_unit(method, unit):
    """In large units all slopes are small, and in small ones a first step is far too long."""
    mod = structural.UnobservedComponents(unit * nile(), "llevel")
    mod.initialize_approximate_diffuse(1e6 * unit**2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # statsmodels' filter has another value
        warnings.simplefilter("error", ConvergenceWarning)
        found = ours.fit(mod, method=method, disp=False, cov_type="none")
    assert np.abs(found.params / unit**2 / [15099, 1469] - 1).max() < 0.01


def test_a_start_without_a_likelihood_is_refused():
    for method in ("lbfgs", "newton"):
        with pytest.raises(ValueError, match="the start_params have no likelihood .* modulus 2"):
            ours.fit(Autoregression(simulated()), [2.0, 0, 1], method=method, disp=False)
    with pytest.raises(ValueError, match="every observation is missing"):
        ours.fit(sarimax.SARIMAX(np.full(30, np.nan), order=(1, 0, 0)), disp=False)


def first_order():
    return sarimax.SARIMAX(nile())


def errors_together(**how):
    return dynamic_factor.DynamicFactor(
        macro(), k_factors=1, factor_order=1, error_order=1, error_var=True, **how
    )


@pytest.mark.parametrize(
    ("make", "start", "message"),
    [
        (first_order, [1.0], r"shape \(1,\), expected \(k,\) = \(2,\): ar.L1, sigma2"),
        (first_order, [1.5, 1.0], "cannot become ar.L1 = 1.5. .*enforce_stationarity=False"),
        (first_order, [0.5, -1], "optimiser of this SARIMAX moves cannot become sigma2 = -1. Oth"),
        (
            lambda: structural.UnobservedComponents(nile(gaps=True), "irregular"), None,
            r"sigma2.irregular = nan. Others may have one, fit\(mod, start_params=...\)$",
        ),
        (
            lambda: varmax.VARMAX(macro(), order=(1, 0), trend="n"), 2 * np.ones(15),
            r"cannot become L1.y1.y1 = 2, .*enforce_stationarity=False",
        ),
        (errors_together, None, r"DynamicFactor\(..., enforce_stationarity=False\)"),
    ],
)  # fmt: skip
def test_a_start_that_an_optimiser_cannot_express_is_refused(make, start, message):
    with pytest.raises(ValueError, match=message):
        ours.fit(make(), start, disp=False)


def test_a_model_that_finds_no_start_in_its_data_is_told_one():
    """statsmodels regresses a series with gaps on its past."""
    y = nile() - 900.0
    y[10:15] = np.nan
    mod = sm.tsa.UnobservedComponents(y, "ntrend", autoregressive=1)
    message = "no start_params of its own .*SVD did not.*start_params=.* for sigma2.irregular"
    with pytest.raises(ValueError, match=message):
        ours.fit(mod, disp=False)
    found = ours.fit(mod, [5000.0, 10000.0, 0.5], disp=False)  # as the message says
    assert found.mle_retvals["converged"]


def test_a_transformation_that_remembers_an_update_is_refused():
    """Of errors that are a vector autoregression: statsmodels reads their last covariance."""
    mod = errors_together()
    params = mod.start_params
    mod.update(params)
    free = mod.untransform_params(params)
    for function in (ours.score, ours.hessian, lambda mod, *_, **how: ours.fit(mod, disp=False)):
        mod.update(params)
        with pytest.raises(ValueError, match="depends on the last update .*another L1.e"):
            function(mod, free, transformed=False)
    mod = errors_together(enforce_stationarity=False)
    free = mod.untransform_params(params)
    slopes = np.where(["sigma2" in x for x in mod.param_names], 2 * free, 1.0)
    expected = slopes * ours.score(mod, params)
    assert relative_error(ours.score(mod, free, transformed=False), expected) < 1e-9


def test_a_start_that_hides_a_diffuse_state_is_refused_and_another_one_is_not():
    """A cycle of four quarters beside a season of four, as statsmodels proposes it."""
    mod = structural.UnobservedComponents(
        sm.datasets.macrodata.load_pandas().data["unemp"].to_numpy(), "llevel", seasonal=4,
        cycle=True, stochastic_cycle=True, use_exact_diffuse=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"frequency.cycle = 1.5708.*fit\(mod, start_params=...\)"):
        ours.fit(mod, disp=False)
    start = np.where([x == "frequency.cycle" for x in mod.param_names], 0.5, mod.start_params)
    assert ours.fit(mod, start, disp=False, cov_type="none").mle_retvals["converged"]


def test_a_fit_that_ends_elsewhere_says_where():
    mod = Autoregression(simulated())
    with pytest.warns(ConvergenceWarning, match=r"still rises with (ar.L1|sigma2) \(score .* at "):
        found = ours.fit(mod, disp=False, maxiter=2, cov_type="none")
    assert not found.mle_retvals["converged"] and found.mle_retvals["iterations"] == 2


def test_a_refused_trial_of_a_fit_lies_on_a_parabola():
    """From the value and the slope before it, with its top at a quarter of the way."""
    mod, before, step = (
        Autoregression(simulated()),
        np.array([0.5, 0.0, 1.0]),
        np.array([1.5, 0, 0]),
    )
    with ours.using(mod):
        mod.loglike.within.fitting = True
        value, rise = mod.loglike(before), abs(mod.score(before) @ step)
        assert mod.loglike(before + step) == pytest.approx(value - rise)
        assert mod.score(before + step) @ step == pytest.approx(-3 * rise)
        mod.loglike.within.end()
        assert mod.loglike(before + step) == -np.inf


@pytest.mark.parametrize("most", [2, 50])
def test_newton_goes_on_from_the_best_trial_of_a_method_that_is_lost(monkeypatch, most):
    class Lost:
        def _fit(self, objective, gradient, start, fargs, given, **how):
            for x in (start, start + [0.5, -0.1, 1.0], start + [0.3, 0.0, 1.0]):
                objective(x, *fargs), gradient(x, *fargs)
            return np.array([2.0, 0.0, 1.0]), {}, None  # where there is no likelihood

    monkeypatch.setitem(ours.fit.__globals__, "Optimizer", Lost)
    monkeypatch.setitem(ours.fit.__globals__, "POLISH", most)
    mod = Autoregression(simulated())
    best = sarimax.SARIMAX(simulated(), order=(2, 0, 0)).fit(disp=False, maxiter=500).params
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if most == 2 else "error", ConvergenceWarning)
        found = ours.fit(mod, disp=False, cov_type="none")
    assert found.mle_retvals["converged"] == (most == 50)
    assert found.mle_retvals["iterations"] <= most
    assert found.llf > (mod.loglike(best) if most == 50 else mod.loglike([0.5, -0.1, 2.0])) - 1e-4


@pytest.mark.parametrize(
    "method, seed, highest",
    [
        ("lbfgs", 74, -369.539), ("newton", 90, -372.338), ("bfgs", 36, -274.412),
        # The other method passes where the likelihood is as high as near the lower maximum.
        ("bfgs", 86, -1009.857), ("bfgs", 156, 13.852),
        # Where a damping goes to one the quadratic is flat; BFGS is lost, and L-BFGS is not.
        ("newton", 2, -811.771),
        # On the edge: a frequency of pi, an autoregression with a unit root and no variance.
        ("lbfgs", 1013, -138.796),
        # L-BFGS ends on a ridge there, or does not, by the last bits of its start.
        ("lbfgs", 144, -357.034),
    ],
)  # fmt: skip
def test_a_fit_ends_at_the_higher_of_two_maxima(method, seed, highest):
    """As of one factor, of which either series may be the measure: another method finds it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mod = random_model(seed)()
        warnings.simplefilter("error", ConvergenceWarning)
        found = ours.fit(mod, method=method, disp=False, cov_type="none")
    assert ours.loglike(mod, found.params) == pytest.approx(highest, abs=1e-3)


def test_a_parameter_of_no_effect_is_named():
    class Idle(sm.tsa.UnobservedComponents):
        """Has a parameter that moves nothing."""

        @property
        def param_names(self):
            return [*super().param_names, "idle"]

        @property
        def start_params(self):
            return np.append(super().start_params, 0.5)

        def transform_params(self, unconstrained):
            return np.append(super().transform_params(unconstrained[:-1]), unconstrained[-1])

        def untransform_params(self, constrained):
            return np.append(super().untransform_params(constrained[:-1]), constrained[-1])

        def update(self, params, **kwargs):
            return super().update(params[:-1], **kwargs)

    mod = Idle(nile(), "llevel")
    with pytest.warns(ConvergenceWarning, match="does not depend on idle where it"):
        found = ours.fit(mod, disp=False, cov_type="none")
    assert found.llf == pytest.approx(
        ours.fit(sm.tsa.UnobservedComponents(mod.endog, "llevel")).llf
    )


def test_a_line_of_maxima_is_told():
    """The coefficients of a regressor that comes twice: statsmodels' standard errors of them are
    numbers like any other."""
    twice = np.repeat(regressors(100, 1), 2, axis=1)
    mod = sarimax.SARIMAX(nile(), order=(1, 0, 0), trend="c", exog=twice)
    with pytest.warns(ConvergenceWarning, match=r"nothing about [+-]\S+ x1 [+-]\S+ x2, so that"):
        found = ours.fit(mod, disp=False)
    with mod.fix_params({"x2": 0.0}), warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        assert ours.fit(mod, disp=False).llf == pytest.approx(found.llf, abs=1e-6)


def test_a_climb_along_a_ridge_that_gains_nothing_ends_early():
    """A narrow valley that turns, and rises by a thousandth of a unit with each."""

    def trial(x):
        off = x[1] - np.sin(x[0])
        slope = np.array([1e-3 + 1e4 * off * np.cos(x[0]), -1e4 * off])
        return 1e-3 * x[0] - 5e3 * off**2, slope

    def curvature(x):
        off, cosine = x[1] - np.sin(x[0]), np.cos(x[0])
        across = 1e4 * (cosine**2 + off * np.sin(x[0]))
        return np.array([[across, -1e4 * cosine], [-1e4 * cosine, 1e4]])

    found = climb(trial, curvature, np.zeros(2), 500)
    assert not found.converged and found.steps < 50


def test_bounds_are_kept():
    bounds = [(None, 1.0), (None, None), (0.1, None)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ours.fit(Autoregression(simulated()), disp=False, cov_type="none", bounds=bounds)
    slope = ours.score(found.model, found.params)
    assert found.params[0] == 1.0 and slope[0] > 0 and np.abs(slope[1:]).max() < 1e-2


def test_a_likelihood_that_is_not_the_one_that_was_maximised_is_told():
    mod = structural.UnobservedComponents(1e-9 * nile(), "llevel")
    with pytest.warns(RuntimeWarning, match=r"results.llf is 0, .* maximised, .* is 1419\.0[56]"):
        found = ours.fit(mod, disp=False, cov_type="none")
    assert ours.loglike(mod, found.params) == pytest.approx(1419.0577, abs=1e-3)


def known_start(init, states, params):
    init.set(states, "known", constant=params[:1], stationary_cov=[[params[1]]])


def vague_start(init, states, params):
    init.set(
        states, "approximate_diffuse", constant=params[:1], approximate_diffuse_variance=params[1]
    )


@pytest.mark.parametrize("first", [known_start, vague_start])
@pytest.mark.parametrize("second", [known_start, vague_start])
def test_all_numbers_of_a_start_may_be_parameters(first, second):
    class Started(MLEModel):
        param_names, start_params = ["a", "p", "b", "q"], np.array([1.0, 2.0, -1.0, 3.0])  # noqa: RUF012

        def __init__(self):
            super().__init__(simulated(20), k_states=2)
            self["design"], self["obs_cov"] = [[1.0, 0.5]], [[1.0]]
            self["transition"], self["selection"] = [[0.9, 0.1], [0, 0.5]], np.eye(2)
            self["state_cov"] = np.eye(2)

        def update(self, params, **kwargs):
            params = super().update(params, **kwargs)
            self.ssm.initialization = Initialization(2)
            first(self.ssm.initialization, 0, params[:2])
            second(self.ssm.initialization, (1, 2), params[2:])

    mod, x = Started(), Started.start_params
    expected = [whole_likelihood(mod, x + STEP * 1j * e).imag / STEP for e in np.eye(4)]
    assert relative_error(ours.score(mod, x), np.array(expected)) < 1e-10
    assert relative_error(ours.loglike(mod, x), mod.loglike(x)) < 1e-12


def test_data_that_move_with_the_parameters_are_refused():
    class Powers(_Plain):
        param_names, start_params = ["H", "Q", "power"], np.array([1.0, 1.0, 0.5])  # noqa: RUF012

        def fill(self, params):
            self.ssm["obs_cov", 0, 0], self.ssm["state_cov", 0, 0] = params[:2]
            self.ssm.bind(nile() ** params[2].real)

    with pytest.raises(ValueError, match=r"the update of this Powers changes the data, mod.ssm.en"):
        ours.score(Powers(nile(), **HOW), Powers.start_params)


@pytest.mark.parametrize("where", ["mod", "ssm"])
@pytest.mark.parametrize("method", ["loglike", "loglikeobs", "_filter"])
def test_a_likelihood_of_an_instance_is_refused(where, method):
    mod = structural.UnobservedComponents(nile(), "llevel")
    owner = mod if where == "mod" else mod.ssm
    if where == "mod" and method == "_filter":
        return
    before = getattr(owner, method)
    setattr(owner, method, lambda *args, **kwargs: before(*args, **kwargs))
    for function in (ours.loglike, ours.score, ours.hessian):
        with pytest.raises(ValueError, match=f"a log-likelihood of its own, .*{method}, expected"):
            function(mod, [15000.0, 1400.0])
    with pytest.raises(ValueError, match=f"a log-likelihood of its own, .*{method}, expected"):
        ours.fit(mod, disp=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda mod: pickle.loads(pickle.dumps(mod))]
)
def test_a_copy_within_the_context_has_a_likelihood_of_its_own(copied):
    mod, x = structural.UnobservedComponents(nile(), "llevel"), np.array([15000.0, 1400.0])
    with ours.using(mod):
        other = copied(mod)
        if copied is copy.copy:  # of which statsmodels' filter is the same one
            return
        other.ssm.endog[0, 3] += 1000.0
        anew = structural.UnobservedComponents(other.ssm.endog[0], "llevel")
        assert other.loglike(x) == pytest.approx(anew.loglike(x), rel=1e-12)
        assert relative_error(other.score(x), anew.score(x)) < 1e-12
        assert ours.loglike(other, x) == ours.loglike(anew, x) != mod.loglike(x)


def test_estimates_that_take_no_score_are_refused():
    mod = ARIMA(nile(), order=(1, 0, 0), exog=regressors(100))
    with pytest.raises(ValueError, match=r"gls=True is an estimate .* mod.fit\(gls=True\) instead"):
        ours.fit(mod, gls=True)
    start = mod.fit(gls=True).params
    assert ours.fit(mod, start_params=start).mle_retvals["converged"]
    mixed = MODELS["dynamic factor, mixed-frequency class"]()
    with pytest.raises(ValueError, match="method='em' is an estimate"):
        ours.fit(mixed, method="em")


def test_numbers_that_are_none_are_named():
    mod = Autoregression(simulated())
    with pytest.raises(ValueError, match="T is not finite at these params"):
        ours.loglike(ReadsNothing(simulated()), mod.start_params)


class ReadsNothing(Autoregression):
    def update(self, params, **kwargs):
        super().update(params, **kwargs)
        self["transition", 0, 1] = np.nan


@pytest.mark.parametrize("share", [1e-2, 1e-4, 1e-6])
def test_an_absolute_value_beside_what_moves_an_entry_more(share):
    class Beside(_Plain):
        param_names, start_params = ["a", "b", "H"], np.array([2.0, 0.5, 1.0])  # noqa: RUF012

        def fill(self, params):
            a, b, h = params
            self.ssm["obs_intercept", 0, 0] = a + share * np.abs(b)
            self.ssm["obs_cov", 0, 0], self.ssm["state_cov", 0, 0] = h, 1.0

    mod, x = Beside(nile() / 100, **HOW), Beside.start_params
    found = ours.score(mod, x)
    assert found[1] == pytest.approx(share * found[0], rel=1e-6)
    assert ours.score(mod, x * [1, -1, 1])[1] == pytest.approx(-share * found[0], rel=1e-6)


UNSEEN = {
    "SARIMAX(0,1,1)": lambda **how: sarimax.SARIMAX(nile(), order=(0, 1, 1), **how),
    "SARIMAX(2,1,3), gaps": lambda **how: sarimax.SARIMAX(nile(gaps=True), order=(2, 1, 3), **how),
    "SARIMAX, season": lambda **how: sarimax.SARIMAX(
        co2(), order=(1, 1, 1), seasonal_order=(0, 1, 1, 4), **how
    ),
    "SARIMAX, scale concentrated": lambda **how: sarimax.SARIMAX(
        nile(), order=(1, 1, 1), concentrate_scale=True, **how
    ),
    "all harmonics": lambda **_: full_harmonics(),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_diffuse_numbers_that_reach_no_observation(name):
    """They cancel, or sin(pi) hides them; statsmodels' filter passes them by."""
    mod = UNSEEN[name](enforce_stationarity=False, use_exact_diffuse=True)
    mod.ssm.tolerance = 0
    params = np.asarray(mod.start_params) * 1.05 + 0.01
    assert relative_error(ours.loglike(mod, params), mod.loglike(params)) < 1e-11

    def value(x):
        return np.array([mod.loglike(x)])

    slope = updates.jacobian(value, params)[0]
    assert np.abs(ours.score(mod, params) / slope - 1).max() < 1e-5
    curved = updates.jacobian(lambda x: ours.score(mod, x), params)
    assert relative_error(ours.hessian(mod, params), curved) < 1e-6
    # Beside where a parameter hides more, and rounding must not tell of them.
    for x in (1e-3 * params, 0.02 * params):
        x[-1] = params[-1]
        assert relative_error(ours.loglike(mod, x), mod.loglike(x)) < 1e-9
    found = ours.fit(mod, disp=False, cov_type="none")
    assert found.mle_retvals["converged"]
    assert found.llf > mod.fit(disp=False, maxiter=500, cov_type="none").llf - 0.01


def cycle(**how):
    return structural.UnobservedComponents(
        simulated(60, 3), cycle=True, stochastic_cycle=True, damped_cycle=True,
        cycle_period_bounds=(2, 20), **how,
    )  # fmt: skip


def test_an_exact_diffuse_likelihood_without_a_maximum():
    mod = cycle(use_exact_diffuse=True)
    x = np.array([1.0, 1.0, 0.0])
    for damping in (0.0, 1e-12):
        x[-1] = damping
        said = "nothing about a diffuse .* at damping.cycle = .* use_exact_diffuse=False"
        with pytest.raises(ValueError, match=said):
            ours.score(mod, x)
    values = []
    for damping in (1e-4, 1e-6):
        x[-1] = damping
        values.append(ours.loglike(mod, x))
    np.testing.assert_allclose(np.diff(values), np.log(100), atol=0.05)
    # The ways out.
    x[-1] = 0.0
    assert np.isfinite(ours.score(cycle(), x)).all()
    with mod.fix_params({"damping.cycle": 0.5}):
        assert ours.fit(mod, disp=False, cov_type="none").mle_retvals["converged"]


@pytest.mark.parametrize("method", ["lbfgs", "bfgs", "newton"])
def test_a_fit_towards_where_nothing_is_seen_says_so(method):
    y = np.random.default_rng(0).normal(size=60)
    mod = structural.UnobservedComponents(
        y, cycle=True, stochastic_cycle=True, damped_cycle=True, cycle_period_bounds=(2, 20),
        use_exact_diffuse=True,
    )  # fmt: skip
    with pytest.warns(ConvergenceWarning, match="damping.cycle .*no maximum"):
        found = ours.fit(mod, [1.0, 1.0, 0.1], method=method, disp=False, cov_type="none")
    assert not found.mle_retvals["converged"] and found.params[-1] < 1e-3


class MovingColumns(MLEModel):
    """Parameters in one column of T and in another of Z; the third state has neither."""

    def __init__(self):
        super().__init__(macro(), k_states=3, k_posdef=3, initialization="approximate_diffuse")
        self["selection"] = self["state_cov"] = np.eye(3)
        self["transition"] = np.diag([0.5, 0.4, 0.3])
        self["design"] = np.array([[1.0, 0.0, 0.3], [0.2, 1.0, 0.0], [0.4, 0.1, 1.0]])[
            : self.k_endog
        ]
        self["obs_cov"] = np.eye(self.k_endog)

    start_params = property(lambda self: np.array([0.5, 0.3]))
    param_names = property(lambda self: ["decay", "loading"])

    def update(self, params, **kwargs):
        params = super().update(params, **kwargs)
        self["transition", 2, 0], self["design", 0, 1] = params


def test_gradients_where_parameters_move_something():
    """Of T and Z in the columns that some parameter moves, and the score is what it was."""
    mod = MovingColumns()
    params = mod.start_params
    moved = updates._derivatives(mod, params)
    np.testing.assert_array_equal(moved.columns(), [0, 1])
    expected = complex_step(lambda x: mod.loglike(x, complex_step=True), params)
    assert relative_error(ours.score(mod, params), expected) < 1e-8
    season = structural.UnobservedComponents(macro()[:, 0], "llevel", seasonal=12)
    assert len(updates._derivatives(season, np.array(season.start_params)).columns()) == 0
    ar = sarimax.SARIMAX(macro()[:, 0], order=(2, 0, 1), seasonal_order=(1, 0, 0, 4))
    np.testing.assert_array_equal(
        updates._derivatives(ar, np.array(ar.start_params)).columns(), [0]
    )


@pytest.mark.parametrize("array", ["transition", "design"])
def test_a_parameter_that_moves_another_column_elsewhere(array):
    """Beyond 1, where nobody has looked: the gradient there is not one that was left out."""

    class Branching(MovingColumns):
        def update(self, params, **kwargs):
            super().update(params, **kwargs)
            x = params[0] - 1 if params[0].real > 1 else 0
            self[array, 1, 2] = 0.1 + 0.2 * x

    mod, there = Branching(), np.array([1.2, 0.3])
    ours.score(mod, mod.start_params)
    expected = complex_step(lambda x: mod.loglike(x, complex_step=True), there)
    assert relative_error(ours.score(mod, there), expected) < 1e-7
    with ours.using(Branching()) as within:
        within.score(within.start_params)
        assert relative_error(within.score(there), expected) < 1e-7


@pytest.mark.parametrize("gaps", [False, True])
def test_a_long_season_from_a_vague_start(gaps):
    """Score against central differences of statsmodels' own likelihood by its univariate filter."""
    rng, n, s = np.random.default_rng(24), 120, 24
    y = np.cumsum(rng.normal(size=n)) + 3 * np.sin(2 * np.pi * np.arange(n) / s)
    if gaps:
        y[rng.random(n) < 0.1] = np.nan
    for mod in (
        structural.UnobservedComponents(y, "llevel", seasonal=s),
        sarimax.SARIMAX(y, order=(1, 1, 1), seasonal_order=(0, 1, 1, s)),
    ):
        params = np.abs(mod.start_params) + 0.1
        if isinstance(mod, sarimax.SARIMAX):
            params = np.array([0.3, 0.4, -0.4, 1.2])
        steps = 1e-4 * np.eye(len(params))
        expected = [
            (8 * (mod.loglike(params + h) - mod.loglike(params - h))
             - mod.loglike(params + 2 * h) + mod.loglike(params - 2 * h)) / 12e-4
            for h in steps
        ]  # fmt: skip
        assert ours.loglike(mod, params) == pytest.approx(mod.loglike(params), rel=1e-9)
        np.testing.assert_allclose(
            ours.score(mod, params), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max()
        )
