"""The filter type of pymc-extras: its outputs and gradients against StandardFilter's."""

import contextlib
import inspect
import os
import pickle
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pymc as pm
import pymc_extras
import pytensor
import pytensor.tensor as pt
import pytest
import xarray
from kalman_models import make
from kalman_oracle import true_gradient
from pymc.model.transform.optimization import freeze_dims_and_data
from pymc_extras.statespace import models
from pymc_extras.statespace import structural as st
from pymc_extras.statespace.core import statespace
from pymc_extras.statespace.filters.kalman_filter import StandardFilter
from pymc_extras.statespace.utils.constants import LONG_NAME_TO_SHORT
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import applys_between, explicit_graph_inputs
from scipy import optimize
from tiers import thorough

from helpers.checks import relative_error, symmetrize
from helpers.datasets import co2, nile, random_model, simulate, structural_example
from helpers.kalman import StateSpace, _install, diffuse, register_filter
from helpers.kalman.ops.diffuse import predictions
from helpers.kalman.ops.likelihood import KalmanLoglike, from_model
from helpers.kalman.pymc import ClosedFormFilter, diffuse_start, draw_initial
from helpers.kalman.scan import symbolic_model
from helpers.statespace import SYMMETRIC

PYTHON = pytensor.compile.mode.Mode(linker="py", optimizer="fast_run")
UNOPTIMISED = pytensor.compile.mode.Mode(linker="py", optimizer="fast_compile")
SHORT_TO_LONG = {short: long for long, short in LONG_NAME_TO_SHORT.items()}


@cache
def compiled(kind, time_varying, jitter):
    """Outputs and gradients of a filter, for arrays of any shape: StandardFilter takes seconds."""
    symbols = symbolic_model(time_varying)
    varying = [SHORT_TO_LONG[name] for name in time_varying]
    outputs = kind(time_varying_names=varying, cov_jitter=jitter).build_graph(
        *(symbols[name] for name in symbols)
    )
    wrt = [symbols[name] for name in symbols if name != "y"]
    gradients = pt.grad(outputs[-1].sum(), wrt)
    mode = PYTHON if kind is ClosedFormFilter else UNOPTIMISED
    return pytensor.function(list(symbols.values()), [*outputs, *gradients], mode=mode)


@pytest.mark.parametrize(
    ("name", "fill", "jitter"),
    [
        ("gaps", np.nan, 1e-8), ("gaps", -9999.0, 1e-8), thorough("gaps", np.nan, 0.0),
        ("H = 0, singular P0 and Q", np.nan, 1e-8), ("H = 0, singular P0 and Q", -9999.0, 1e-8),
        thorough("time-varying with gaps", np.nan, 1e-8),
    ],
)  # fmt: skip
def test_same_outputs_and_gradients_within_the_jitter(name, fill, jitter):
    y, model = make(name)
    arguments = [np.where(np.isnan(y), fill, y), *model.asdict().values()]
    ours = compiled(ClosedFormFilter, model.time_varying, jitter)(*arguments)
    theirs = compiled(StandardFilter, model.time_varying, jitter)(*arguments)
    for k, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        if k >= 7 and list(model.asdict())[k - 7] in SYMMETRIC:
            expected = symmetrize(expected)
        # The jitter of F where it is smallest makes the largest difference.
        bound = (1e3 * jitter or 1e-10) * max(np.abs(expected).max(), 1)
        assert np.abs(found - expected).max() < bound, k


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_whole_numbers_with_gaps():
    """There is no NaN among them: a gap is where the fill value stands, and nothing else."""
    _, model = make("gaps")
    y = np.arange(3 * model.Z.shape[0]).reshape(3, -1)
    y[1, 0] = -9999
    given = [pt.constant(X) for X in model.asdict().values()]
    found, expected = (
        pytensor.function([], ClosedFormFilter().build_graph(pt.constant(x), *given), mode=PYTHON)()
        for x in (y, y.astype(float))
    )
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)


def test_a_vague_start_with_jitter_against_eighty_digits():
    """T and Z: as good as in the filter alone, where autodiff of StandardFilter is not."""
    jitter, rng = 1e-8, np.random.default_rng(8)
    model = StateSpace(**(random_model(5, 3, 2, rng=rng) | {"P0": 1e7 * np.eye(5)}))
    y, _ = simulate(10, rng, **(model.asdict() | {"P0": np.eye(5)}))
    # With its jitter the filter is that of another model, exactly: m more shocks, T sqrt(jitter).
    R, Q = np.hstack([model.R, model.T]), np.diag([0.0] * 2 + [jitter] * 5)
    Q[:2, :2] = model.Q
    exact = StateSpace(**(model.asdict() | {"R": R, "Q": Q, "H": model.H + jitter * np.eye(3)}))
    truth = true_gradient(y, exact, names=["T", "Z", "R"])
    expected = {"T": truth["T"] + truth["R"][:, 2:], "Z": truth["Z"]}
    names, arguments = model.asdict(), [y, *model.asdict().values()]
    ours, theirs = (
        dict(zip(names, compiled(kind, model.time_varying, jitter)(*arguments)[7:], strict=True))
        for kind in (ClosedFormFilter, StandardFilter)
    )
    for x, G in expected.items():
        assert relative_error(ours[x], G) < 1e-9, x
        assert relative_error(ours[x], G) <= relative_error(theirs[x], G), x


def test_the_example_of_the_book_is_a_model_of_the_library():
    parts = (
        st.LevelTrend(order=2, innovations_order=[0, 1], name="level")
        + st.Autoregressive(order=1, name="ar")
        + st.MeasurementError(name="noise")
    )
    graph = parts.build(verbose=False)._unpack_statespace_with_placeholders()
    values = {"initial_level": [10.0, 0.1], "params_ar": [0.95], "P0": np.eye(3)}
    values |= {"sigma_level": [0.01], "sigma_ar": 0.01, "sigma_noise": 0.01}
    inputs = list(explicit_graph_inputs(graph))
    found = pytensor.function(inputs, graph, mode=UNOPTIMISED)(*(values[x.name] for x in inputs))
    model, _, _ = structural_example()
    for X, (name, expected) in zip(found, model.items(), strict=True):
        assert np.array_equal(X, expected), name


def test_names_and_shapes_of_the_outputs():
    _, model = make("two shocks")
    inputs = [pt.tensor(shape=X.shape) for X in (np.zeros((15, 2)), *model.asdict().values())]
    ours = ClosedFormFilter().build_graph(*inputs)
    theirs = StandardFilter().build_graph(*inputs)
    assert [x.name for x in ours] == [x.name for x in theirs]
    assert [x.type.shape for x in ours] == [x.type.shape for x in theirs]


def test_registered_once_and_under_any_free_name(monkeypatch):
    monkeypatch.setattr(statespace, "FILTER_FACTORY", dict(statespace.FILTER_FACTORY))
    register_filter()
    register_filter()
    register_filter("mine")
    assert statespace.FILTER_FACTORY["closed_form"] is ClosedFormFilter
    assert statespace.FILTER_FACTORY["mine"] is ClosedFormFilter
    with pytest.raises(ValueError, match="has a filter 'standard' already: StandardFilter"):
        register_filter("standard")
    with pytest.raises(ValueError, match="lower case"):
        register_filter("Closed")


def test_another_interface_is_refused(monkeypatch):
    def build_graph(self, data, model):
        """A filter of another time."""

    monkeypatch.setattr(StandardFilter, "build_graph", build_graph)
    assert list(inspect.signature(StandardFilter.build_graph).parameters) == [
        "self", "data", "model",
    ]  # fmt: skip
    with pytest.raises(
        ImportError, match=f"supports pymc-extras 0.15; found {pymc_extras.__version__}"
    ):
        register_filter()


@pytest.mark.parametrize("name", ["pymc", "pymc_extras"])
@pytest.mark.parametrize("line", ["helpers.kalman.pymc", "helpers.kalman"])
def test_without_pymc_the_error_names_the_line_that_installs_it(monkeypatch, name, line):
    monkeypatch.delitem(sys.modules, "helpers.kalman.pymc")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=f"needs {name}, which is not inst") as error:
        exec(f"from {line} import register_filter")
    assert str(error.value).count(_install("[pymc]")) == 1


REGRESSORS = ("x1", "x2")


def regression(**how):
    trend = st.LevelTrend(order=1)
    weights = st.Regression(name="exog", state_names=list(REGRESSORS), innovations=True)
    return (trend + weights + st.MeasurementError(name="noise")).build(**how)


def cycle(**how):
    around = st.Cycle(name="cycle", estimate_cycle_length=True, dampen=True, innovations=True)
    season = st.FrequencySeasonality(season_length=4, name="season")
    return (st.LevelTrend(order=1) + around + st.Autoregressive(order=2) + season).build(**how)


def two_trends(**how):
    both = ["a", "b"]
    trend = st.LevelTrend(order=2, observed_state_names=both)
    return (trend + st.MeasurementError(name="noise", observed_state_names=both)).build(**how)


def model_of(name, **arguments):
    def build(**how):
        return getattr(models, name)(**arguments, **how)

    return build


two, three = ["a", "b"], ["a", "b", "c"]
FAMILIES = {
    "regression: Z varies": regression,
    "cycle and autoregression": cycle,
    "two trends": two_trends,
    "SARIMAX": model_of(
        "BayesianSARIMAX", order=(1, 0, 1), seasonal_order=(1, 0, 0, 4), measurement_error=True
    ),
    "ARIMA, no noise": model_of(
        "BayesianSARIMAX", order=(1, 1, 1), stationary_initialization=False
    ),
    "SARIMAX with regressors": model_of(
        "BayesianSARIMAX", order=(1, 0, 1), exog_state_names=list(REGRESSORS)
    ),
    "VARMAX": model_of(
        "BayesianVARMAX", order=(1, 1), endog_names=two, stationary_initialization=True
    ),
    "VARMAX with regressors": model_of(
        "BayesianVARMAX", order=(2, 1), endog_names=two, exog_state_names=list(REGRESSORS)
    ),
    "ETS": model_of(
        "BayesianETS", order=("A", "Ad", "A"), seasonal_periods=4, endog_names=["a"],
        measurement_error=True,
    ),
    "dynamic factors": model_of(
        "BayesianDynamicFactor", k_factors=1, factor_order=2, endog_names=three, error_order=1
    ),
    "dynamic factors with regressors": model_of(
        "BayesianDynamicFactor", k_factors=1, factor_order=1, endog_names=two,
        exog_state_names=list(REGRESSORS), exog_innovations=True, measurement_error=True,
    ),
}  # fmt: skip


# A Z of data, an integrated start, an intercept of data and several shocks.
FIRST = "regression: Z varies", "ARIMA, no noise", "VARMAX with regressors"


def pymc_model_of(family, filter_type, n=10):
    """A model of the family with some prior that fits each parameter, and made data with gaps."""
    rng = np.random.default_rng(0)
    built = FAMILIES[family](filter_type=filter_type, verbose=False)
    with pm.Model(coords=built.coords) as model:
        for name in built.data_names:
            pm.Data(name, rng.standard_normal((n, len(REGRESSORS))))
        for name, info in built.param_info.items():
            shape, constraint = info["shape"], (info["constraints"] or "").lower()
            start = rng.uniform(0.2, 0.6, shape)
            if "definite" in constraint:
                root = pm.Normal(f"{name}_root", shape=shape, initval=start)
                pm.Deterministic(name, root @ root.T + pt.eye(shape[0]) / 2)
            elif "positive" in constraint or ">" in constraint:
                pm.Gamma(name, alpha=2, beta=2, shape=shape, initval=start)
            elif constraint:
                pm.Uniform(name, 0, 1, shape=shape, initval=start)
            else:
                pm.Normal(name, shape=shape, initval=start - 0.4)
        y = rng.standard_normal((n, built.k_endog))
        y[4, 0] = y[7] = np.nan
        index = pd.date_range("2000-01-01", periods=n, freq="MS")
        built.build_statespace_graph(pd.DataFrame(y, index=index, columns=built.observed_states))
    return model


@pytest.mark.filterwarnings("ignore:Provided data contains missing values")
@pytest.mark.parametrize(
    "family",
    [x if x in FIRST else thorough(x) for x in FAMILIES],
)
def test_every_family_of_models(family):
    """Log density and gradient of a whole model, with missing data, as with StandardFilter."""
    register_filter()
    values = []
    for kind in ("standard", "closed_form"):
        model = pymc_model_of(family, kind)
        logp = model.logp()
        ours = any(isinstance(node.op, KalmanLoglike) for node in applys_between([], [logp]))
        assert ours == (kind == "closed_form")
        outputs = [logp, *pt.grad(logp, model.value_vars)]
        start = model.initial_point(random_seed=1)
        evaluate = pytensor.function(model.value_vars, outputs, mode=UNOPTIMISED)
        values.append(evaluate(*(start[x.name] for x in model.value_vars)))
    for expected, found in zip(*values, strict=True):
        assert np.isfinite(expected).all()
        assert np.abs(found - expected).max() < 1e-6 * max(np.abs(expected).max(), 1)


@pytest.fixture(scope="module")
def structural():
    """A trend with a season, with gaps, as a PyMC model with either filter."""
    register_filter()
    y = co2().y[:60].copy()
    y[10:13] = np.nan
    index = pd.period_range("2000-01", periods=60, freq="M").to_timestamp()
    data = pd.DataFrame(y - np.nanmean(y), index=index, columns=["co2"])

    def model(filter_type):
        parts = (
            st.LevelTrend(order=2, innovations_order=[0, 1])
            + st.TimeSeasonality(season_length=12, name="season", innovations=False)
            + st.MeasurementError(name="noise")
        )
        built = parts.build(filter_type=filter_type, verbose=False, mode=UNOPTIMISED)
        with pm.Model(coords=built.coords) as pymc_model:
            pm.Deterministic("P0", pt.eye(built.k_states) * 10.0)
            for name in built.param_names:
                if name == "P0":
                    continue
                dims = built.param_dims.get(name)
                if name.startswith("sigma"):
                    pm.Gamma(name, alpha=2, beta=5, dims=dims)
                else:
                    pm.Normal(name, sigma=5, dims=dims)
            built.build_statespace_graph(data)
        return pymc_model, built

    return model


@pytest.mark.thorough  # as chapter "A drop-in for pymc-extras" does
def test_a_pymc_model_end_to_end(structural):
    """The same log density and gradient, then sampling and everything downstream."""
    values, all_built = [], []
    for kind in ("standard", "closed_form"):
        pymc_model, built = structural(kind)
        all_built.append(built)
        logp = pymc_model.logp()
        gradients = pt.grad(logp, pymc_model.value_vars)
        inputs = pymc_model.value_vars
        evaluate = pytensor.function(inputs, [logp, *gradients], mode=PYTHON)
        start = pymc_model.initial_point(random_seed=1)
        values.append(evaluate(*(start[x.name] for x in inputs)))
    for expected, found in zip(*values, strict=True):
        assert np.abs(found - expected).max() < 1e-5 * max(np.abs(expected).max(), 1)

    with pymc_model:
        trace = pm.sample(
            draws=5, tune=5, chains=1, cores=1, progressbar=False, random_seed=0,
            compute_convergence_checks=False, compile_kwargs={"mode": "NUMBA"},
        )  # fmt: skip
    assert np.isfinite(trace.sample_stats["lp"]).all()

    # Draws may differ: a decomposition turns vectors where singular values are equal.
    quiet = {"random_seed": 1, "progressbar": False}
    theirs, ours = (
        built.sample_filter_outputs(trace, **quiet)["posterior_predictive"] for built in all_built
    )
    assert {"smoothed_states", "smoothed_covariances"} <= set(ours)
    for name, expected in theirs.items():
        assert np.abs(ours[name] - expected).max() < 1e-5 * max(np.abs(expected).max(), 1), name
    built = all_built[1]
    ahead = built.forecast(trace, periods=4, verbose=False, **quiet)["forecast_observed"]
    assert np.isfinite(ahead).all()
    drawn = built.sample_conditional_posterior(trace, **quiet)["smoothed_posterior_observed"]
    assert np.isfinite(drawn).all()


def diffuse_model(y, names=None, built=None, **extra):
    """Trend, season of four and noise, the first state left to the data."""
    model = (
        st.LevelTrend(order=2)
        + st.TimeSeasonality(season_length=4, name="season")
        + st.MeasurementError(name="noise")
    )
    built = model.build(verbose=False) if built is None else built
    with pm.Model(coords=built.coords) as within:
        pm.HalfNormal("sigma_level_trend", 1.0, dims="shock_level_trend")
        pm.HalfNormal("sigma_season", 1.0)
        pm.HalfNormal("sigma_noise", 1.0)
        for name, make in extra.items():
            make(name)
        left_out = diffuse_start(built, names)
        built.build_statespace_graph(y)
    return built, within, left_out


def season_of_four():
    rng = np.random.default_rng(4)
    y = np.cumsum(rng.normal(size=(40, 1)), axis=0) + np.tile([3.0, -1, 0, -2], 10)[:, None]
    y[[5, 20]] = np.nan
    return y


def at_ones(y):
    """The model above with all standard deviations at one."""
    T = np.zeros((5, 5))
    T[0, :2] = T[1, 1] = T[3, 2] = T[4, 3] = 1
    T[2, 2:] = -1
    Z, R = np.array([[1.0, 0, 1, 0, 0]]), np.eye(5)[:, :3]
    return StateSpace(
        np.zeros(5), np.zeros((5, 5)), np.zeros(5), np.zeros(1), T, Z, R, np.eye(1), np.eye(3)
    )


def test_a_diffuse_start():
    y = season_of_four()
    built, within, left_out = diffuse_model(y)
    assert left_out == ("initial_level_trend", "params_season", "P0")
    names = {x.name for x in within.free_RVs}
    assert names == {"sigma_level_trend", "sigma_season", "sigma_noise"}
    point = {x: np.zeros(np.shape(X)) for x, X in within.initial_point().items()}
    slopes = pt.grad(within.logp(), within.value_vars)
    outputs = [within.observedlogp, within.logp(), pt.concatenate([x.ravel() for x in slopes])]
    evaluate, h = within.compile_fn(outputs, inputs=within.value_vars, mode=UNOPTIMISED), 1e-4
    logp, _, slope = evaluate(point)
    # The order of the seasons in the state is the component's own: what they span is all of it.
    expected = diffuse.loglike(y, at_ones(y), np.eye(5))
    assert relative_error(float(logp), expected) < 1e-6  # the jitter is 1e-8
    flat = np.concatenate([X.ravel() for X in point.values()])
    ends = np.cumsum([X.size for X in point.values()])[:-1]
    for i, exact in enumerate(slope):
        values = []
        for step in (h, -h):
            parts = np.split(flat + step * (np.arange(len(flat)) == i), ends)
            moved = {
                x: part.reshape(X.shape) for part, (x, X) in zip(parts, point.items(), strict=True)
            }
            values.append(float(evaluate(moved)[1]))
        assert abs((values[0] - values[1]) / (2 * h) - exact) < 1e-5 * np.abs(slope).max()


def test_draws_of_a_diffuse_start_have_their_posterior():
    y = season_of_four()
    built, _, _ = diffuse_model(y)
    posterior = diffuse.loglike_and_grad(y, at_ones(y), np.eye(5)).estimate
    draws = 4000
    arrays = {
        "initial_level_trend": np.zeros((1, draws, 2)),
        "params_season": np.zeros((1, draws, 3)),
        "diffuse_mean": np.broadcast_to(posterior.mean, (1, draws, 5)),
        "diffuse_covariance": np.broadcast_to(posterior.covariance, (1, draws, 5, 5)),
    }
    dims = {x: ("chain", "draw", *"abc"[: X.ndim - 2]) for x, X in arrays.items()}
    variables = {}
    for x, X in arrays.items():
        names = [f"{d}_{x}" if d in "abc" else d for d in dims[x]]
        variables[x] = (names, X)
    idata = xarray.DataTree.from_dict({"posterior": xarray.Dataset(variables)})
    found = draw_initial(built, idata, random_seed=1).posterior
    numbers = np.concatenate([found[x].values[0] for x in list(arrays)[:2]], axis=1)
    error = np.sqrt(np.diag(posterior.covariance) / draws)
    assert (np.abs(numbers.mean(axis=0) - posterior.mean) < 5 * error).all()
    spread = np.cov(numbers.T)
    assert np.abs(spread - posterior.covariance).max() < 0.1 * np.abs(posterior.covariance).max()
    assert (idata.posterior["params_season"].values == 0).all()  # a copy was changed
    assert "make_filters" not in vars(built)  # its filter is its own again
    with pytest.raises(ValueError, match="idata has no diffuse_covariance: is it of another model"):
        draw_initial(built, without(idata))


def without(idata):
    """The same without the covariances."""
    return xarray.DataTree.from_dict(
        {"posterior": idata.posterior.to_dataset().drop_vars("diffuse_covariance")}
    )


def test_some_numbers_keep_their_prior():
    y = season_of_four()
    _, within, left_out = diffuse_model(
        y,
        ["initial_level_trend"],
        params_season=lambda name: pm.Normal(name, 0, 2, shape=3),
        P0=lambda name: pm.Deterministic(name, pt.eye(5)),
    )
    assert left_out == ("initial_level_trend",)
    assert np.isfinite(within.compile_logp(mode=UNOPTIMISED)(within.initial_point()))


def test_a_diffuse_start_that_cannot_be():
    y = season_of_four()
    with pytest.raises(ValueError, match="sigma_noise does not enter the initial state alone"):
        diffuse_model(y, ["sigma_noise"])
    with pytest.raises(ValueError, match="P0 has a prior in the model, .* call: leave it out"):
        diffuse_model(y, P0=lambda name: pm.Deterministic(name, pt.eye(5)))
    built = (st.LevelTrend(order=1) + st.MeasurementError(name="noise")).build(verbose=False)
    with pytest.raises(TypeError, match="context"):
        diffuse_start(built)
    with pytest.raises(ValueError, match="call diffuse_start first"):
        draw_initial(built, None)


def test_numbers_that_no_data_tell_apart():
    """A level and all four seasons around it; the way out that the warning names has a value."""
    names = "initial_level", "initial_seasonal"
    priors = {
        "initial_seasonal": lambda name: pm.Normal(name, shape=4),
        "P0": lambda name: pm.Deterministic(name, pt.zeros((6, 6))),
    }

    def build(names, **more):
        built = models.BayesianETS(
            order=("A", "N", "A"), seasonal_periods=4, endog_names=["a"], verbose=False
        )
        with pm.Model(coords=built.coords) as within:
            for name in ("alpha", "gamma", "sigma_state"):
                pm.Beta(name, 2, 2)
            for name, make in more.items():
                make(name)
            diffuse_start(built, names)
            built.build_statespace_graph(season_of_four())
        return within.compile_logp(mode=UNOPTIMISED)(within.initial_point())

    with pytest.warns(UserWarning, match=f"do not tell all numbers of {', '.join(names)} apart"):
        assert np.isnan(build(None))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the data do not tell")
        assert np.isfinite(build(["initial_level"], **priors))


def test_second_derivatives_serve_the_optimisers_of_pymc_extras():
    """Newton's method by its `find_MAP`, and the Hessian there against differences of gradients."""
    register_filter()
    parts = st.LevelTrend(order=1, innovations_order=1) + st.MeasurementError(name="noise")
    built = parts.build(filter_type="closed_form", verbose=False)
    with pm.Model(coords=built.coords) as model:
        pm.Deterministic("P0", 100.0 * pt.eye(1))
        pm.Normal("initial_level_trend", mu=10.0, sigma=5.0, dims="state_level_trend")
        pm.Gamma("sigma_level_trend", alpha=2, beta=1, dims="shock_level_trend")
        pm.Gamma("sigma_noise", alpha=2, beta=1)
        built.build_statespace_graph(pd.DataFrame({"data": nile().y[:, 0] / 100}))
        found = pymc_extras.find_MAP(
            method="trust-ncg", use_grad=True, use_hess=True, compute_hessian=False,
            progressbar=False, random_seed=1, compile_kwargs={"mode": UNOPTIMISED},
        ).optimizer_result  # fmt: skip
    assert bool(found["success"]) and int(found["nit"]) <= 12
    assert np.abs(found["jac"].values).max() < 1e-4
    names = [str(name) for name in found["variables"].values]
    variables = [x.name for x in model.continuous_value_vars]
    order = [next(k for k, name in enumerate(names) if name.startswith(x)) for x in variables]
    at, hessian = found["x"].values[order], found["hess"].values[np.ix_(order, order)]
    # find_MAP leaves the transforms' Jacobian out; that of a logarithm has no second derivative.
    slope = model.logp_dlogp_function(ravel_inputs=True, mode=UNOPTIMISED)
    slope.set_extra_values({})
    for row, step in zip(hessian, 1e-4 * np.eye(len(at)), strict=True):
        one, two = (slope(at + k * step)[1] - slope(at - k * step)[1] for k in (1, 2))
        np.testing.assert_allclose(row, (two - 8 * one) / 12e-4, rtol=0, atol=1e-7)


def local_level(filter_type="closed_form", **given):
    """A random walk with noise, its first state left to the data if no prior is given."""
    register_filter()
    parts = st.LevelTrend(order=1) + st.MeasurementError(name="noise")
    built = parts.build(filter_type=filter_type, verbose=False, mode=UNOPTIMISED)
    rng = np.random.default_rng(6)
    y = 20 + np.cumsum(rng.normal(size=40)) + rng.normal(size=40)
    index = pd.date_range("2000-01-01", periods=40, freq="MS")
    with pm.Model(coords=built.coords) as within:
        pm.HalfNormal("sigma_level_trend", 1.0, dims="shock_level_trend")
        pm.HalfNormal("sigma_noise", 1.0)
        for name, make in given.items():
            make(name)
        if not given:
            diffuse_start(built)
        built.build_statespace_graph(pd.DataFrame({"data": y}, index=index))
    return built, within, y


WITH_PRIOR = {
    "initial_level_trend": lambda name: pm.Normal(name, 20, 3, dims="state_level_trend"),
    "P0": lambda name: pm.Deterministic(name, 0.5 * pt.eye(1)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "given", [{}, thorough(WITH_PRIOR)], ids=["diffuse", "a P0 that is a constant"]
)
@pytensor.config.change_flags(linker="py")  # compiled, it takes a minute and a half more
def test_a_laplace_approximation_takes_one_draw_at_a_time(given):
    """Against the normal density of the differences of a random walk with noise."""
    built, within, y = local_level(**given)
    how = {"random_seed": 1, "progressbar": False, "draws": 100}
    with within:
        found = pymc_extras.fit_laplace(vectorize_draws=False, **how)

    def cost(z):
        walk, noise = np.exp(2 * np.asarray(z[-2:]))
        n, level = len(y), z[0] if given else 0.0
        C = walk * np.minimum.outer(range(n), range(n)) + noise * np.eye(n) + 0.5 * bool(given)
        D = np.eye(n) if given else np.diff(np.eye(n), axis=0)
        error, C = D @ (y - level), D @ C @ D.T
        value = error @ np.linalg.solve(C, error) + np.linalg.slogdet(C)[1] + walk + noise
        return (value + bool(given) * (level - 20) ** 2 / 9) / 2

    at = found.fit["mean_vector"].values
    names = [str(name) for name in found.fit["rows"].values]
    order = [next(k for k, x in enumerate(names) if x.startswith(name))
             for name in (*([*given][:1]), "sigma_level_trend", "sigma_noise")]  # fmt: skip
    best = optimize.minimize(cost, at[order], method="Nelder-Mead", tol=1e-10).x
    assert np.abs(at[order] - best).max() < 1e-3
    step, hessian = 1e-3 * np.eye(len(best)), []
    for a in step:
        hessian.append([cost(best + a + b) - cost(best + a - b) - cost(best - a + b)
                        + cost(best - a - b) for b in step])  # fmt: skip
    covariance = found.fit["covariance_matrix"].values[np.ix_(order, order)]
    assert relative_error(covariance, np.linalg.inv(np.array(hessian) / 4e-6)) < 0.02
    drawn = found if given else draw_initial(built, found, random_seed=2)
    ahead = built.forecast(drawn, periods=2, verbose=False, progressbar=False, random_seed=1)
    assert abs(ahead["forecast_observed"].mean() - y[-5:].mean()) < 2
    with within, pytest.raises(ValueError) if not given else contextlib.nullcontext():
        found = pymc_extras.fit_laplace(**how)
        assert found.posterior["P0"].ndim == 3  # where it should have four axes


def at_a_point(given):
    """Log density, gradient and one draw of the observations, each with its type."""
    _, within, _ = local_level(**given)
    outputs = [within.logp(), *pt.grad(within.logp(), within.value_vars)]
    evaluate = within.compile_fn(outputs, inputs=within.value_vars, mode=UNOPTIMISED)
    found = evaluate({x: np.full_like(X, 0.25) for x, X in within.initial_point().items()})
    found.append(pm.draw(within["obs"], random_seed=1, mode=UNOPTIMISED))
    return [(x.dtype.name, np.ravel(x).tolist()) for x in map(np.asarray, found)]


IN_FLOAT32 = """
from test_kalman_pymc import WITH_PRIOR, at_a_point
print([at_a_point(given) for given in ({}, WITH_PRIOR)])
"""


@pytest.mark.filterwarnings("ignore")
def test_a_whole_model_in_float32():
    """Likelihood and gradient are those of float64, with the digits that the parameters have."""
    run = subprocess.run(
        [sys.executable, "-c", IN_FLOAT32], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTENSOR_FLAGS": os.environ["PYTENSOR_FLAGS"] + ",floatX=float32"},
    )  # fmt: skip
    in_float32 = eval(run.stdout.splitlines()[-1], {"nan": np.nan})
    for given, found in zip(({}, WITH_PRIOR), in_float32, strict=True):
        expected = at_a_point(given)
        assert {kind for kind, _ in found[1:-1]} == {"float32"}
        for (_, right), (_, x) in zip(expected[:-1], found[:-1], strict=True):
            assert relative_error(np.array(x), np.array(right)) < 1e-5
        assert np.isfinite(found[-1][1][1:]).all()


def until(y, k):
    """The series whose later observations are missing."""
    return np.where(np.arange(len(y))[:, None] < k, y, np.nan)


def one_step_terms(y, model, A):
    """The log-likelihood of each step given those before it: differences of the first steps'."""
    found = np.full(len(y) + 1, np.nan)
    for k in range(1, len(y) + 1):
        with contextlib.suppress(ValueError):  # delta is open
            found[k] = diffuse.loglike(until(y, k), model, A, method="reference")
    return np.diff(found)


def one_step_moments(y, model, A, t):
    """Mean and variance of the observation of step t, from three values of its log-density."""
    at = []
    for x in (-1.0, 0.0, 1.0):
        y = y.copy()
        y[t] = x
        at.append(diffuse.loglike(until(y, t + 1), model, A, method="reference"))
    variance = -1 / (at[0] - 2 * at[1] + at[2])
    return variance * (at[2] - at[0]) / 2, variance


def test_each_observation_of_a_diffuse_start_given_those_before_it():
    """Its terms are not all alike, and nothing starts from zero where the data lie at 1000."""
    y = season_of_four() + 1000
    _, within, _ = diffuse_model(y)
    point = {x: np.zeros(np.shape(X)) for x, X in within.initial_point().items()}
    (terms,) = within.logp(vars=within.observed_RVs, sum=False)
    mean, covariance = within["obs"].owner.inputs[:2]
    mean, covariance = within.replace_rvs_by_values([mean, covariance])
    evaluate = within.compile_fn(
        [terms, mean, covariance], inputs=within.value_vars, mode=UNOPTIMISED,
        on_unused_input="ignore",
    )  # fmt: skip
    found, mean, covariance = evaluate(point)
    expected = one_step_terms(y, at_ones(y), np.eye(5))
    open_steps = np.arange(40) < 5
    assert np.array_equal(np.isnan(found), open_steps | np.isnan(y[:, 0]))
    assert np.array_equal(np.isnan(mean[:, 0]), open_steps)
    assert np.nanmax(np.abs(found - expected)[6:]) < 1e-6 and np.ptp(found[~np.isnan(found)]) > 0.1
    for t in (7, 20, 39):  # the second is a gap
        moments = one_step_moments(y, at_ones(y), np.eye(5), t)
        assert np.allclose((mean[t, 0], covariance[t, 0, 0]), moments, rtol=1e-6)
    in_jax = within.compile_fn([terms], inputs=within.value_vars, mode="JAX")
    np.testing.assert_allclose(in_jax(point)[0], found, rtol=1e-9)  # data of any length: not frozen
    drawn = pm.draw(within["obs"], random_seed=1, mode=UNOPTIMISED)
    assert np.array_equal(np.isnan(drawn[:, 0]), open_steps)
    assert np.abs(drawn[6:] - 1000).max() < 100


@pytest.mark.parametrize("seed", range(3))
def test_one_step_terms_of_two_series_with_gaps(seed):
    rng = np.random.default_rng(seed)
    model = StateSpace(**random_model(3, 2, rng=rng, n=9, time_varying=("T", "Z", "d")[:seed]))
    y, _ = simulate(9, rng, **model.asdict())
    y[1, 0] = y[4] = y[6, 1] = np.nan
    A = np.eye(3)[:, :2] + 0.1 * rng.normal(size=(3, 2))
    given = from_model(y, *model.asdict().values())
    terms, mean, covariance = (X.eval(mode=UNOPTIMISED) for X in predictions(*given, A))
    expected = one_step_terms(y, model, A)
    known = ~np.isnan(expected) & ~np.isnan(y).all(axis=1)
    assert known[5:].all() and np.isnan(terms[4]) and np.abs(terms - expected)[known].max() < 1e-9
    seen = ~np.isnan(y[5])
    error, F = (y[5] - mean[5])[seen], covariance[5][np.ix_(seen, seen)]
    density = -(error @ np.linalg.solve(F, error) + np.linalg.slogdet(2 * np.pi * F)[1]) / 2
    assert abs(density - expected[5]) < 1e-9


def test_a_sampler_does_not_compute_the_terms_and_has_the_gradient_of_their_sum_alone():
    _, within, _ = diffuse_model(season_of_four())
    logp = within.logp()
    slopes = pt.grad(logp, within.value_vars)
    graph = within.compile_fn([logp, *slopes], inputs=within.value_vars, mode=PYTHON).f
    names = {type(node.op).__name__ for node in graph.maker.fgraph.apply_nodes}
    assert "KalmanIntegratedGrad" in names
    assert not names & {"Scan", "KalmanFilter", "OneStepTerms", "Eigh"}
    (terms,) = within.logp(vars=within.observed_RVs, sum=False)
    weighted = pt.grad((terms * np.arange(40)).sum(), within.value_vars)
    evaluate = within.compile_fn(weighted, inputs=within.value_vars, mode=UNOPTIMISED)
    with pytest.raises(NotImplementedError, match="each with the same weight"):
        evaluate({x: np.zeros(np.shape(X)) for x, X in within.initial_point().items()})


@pytest.mark.parametrize("axis", [None, 1, 0])
def test_a_batch_of_log_densities_of_a_diffuse_start(axis):
    """As optimisers of pymc-extras take it: each is finite, though the first terms are NaN."""
    _, within, _ = diffuse_model(season_of_four())
    point = within.initial_point()
    batch = {x: np.stack([X, X - 0.5, X + 0.3]) for x, X in point.items()}
    (terms,) = within.logp(vars=within.observed_RVs, sum=False)
    inputs = [pt.tensor(dtype=x.dtype, shape=(3, *x.type.shape)) for x in within.value_vars]
    replaced = dict(zip(within.value_vars, inputs, strict=True))
    found = vectorize_graph(terms, replaced).sum(axis=axis)
    outputs = [found, *pt.grad(found.sum(), inputs)] if axis != 0 else [found]
    given = [batch[x.name] for x in within.value_vars]
    evaluate = pytensor.function(inputs, outputs, mode=PYTHON)
    value, *slopes = evaluate(*given)
    if axis == 0:  # of each step: NaN where nothing is observed, and in the diffuse ones
        assert np.isnan(value).any() and np.isfinite(value).any()
        return
    assert "Scan" not in str([node.op for node in evaluate.maker.fgraph.apply_nodes])
    one = [terms.sum(), *pt.grad(terms.sum(), within.value_vars)]
    evaluate = pytensor.function(within.value_vars, one, mode=UNOPTIMISED)
    singly = [evaluate(*(X[i] for X in given)) for i in range(3)]
    expected, *expected_slopes = (np.stack(X) for X in zip(*singly, strict=True))
    assert relative_error(value, expected if axis else expected.sum()) < 1e-12
    for slope, X in zip(slopes, expected_slopes, strict=True):
        assert relative_error(slope, X) < 1e-9


def test_terms_of_a_diffuse_start_are_not_taken_for_their_sum_without_rewrites():
    _, within, _ = diffuse_model(season_of_four())
    point, unrewritten = within.initial_point(), pytensor.compile.mode.Mode("py", None)
    with pytest.raises(NotImplementedError, match="optimizer='fast_compile' or 'fast_run'"):
        within.compile_logp(mode=unrewritten)(point)
    ones = {x.removesuffix("_log__"): np.ones(np.shape(X)) for x, X in point.items()}
    known = pm.do(freeze_dims_and_data(within), ones)
    value = known.compile_fn(known.observedlogp, inputs=[], mode=UNOPTIMISED, point_fn=False)()
    expected = diffuse.loglike(season_of_four(), at_ones(None), np.eye(5))
    assert relative_error(float(value), expected) < 1e-6


def as_sampled(within, built):
    """What a sampler returns of two draws, with NaN for what is integrated out."""
    shapes = {name: info["shape"] for name, info in built.param_info.items()}
    values = {x: np.full((1, 2, *shape), 0.5) for x, shape in shapes.items()}
    for x in built._integrated_out:
        values[x] = np.full_like(values[x], np.nan)
    q = sum(int(np.prod(shapes[x])) for x in built._integrated_out)
    values |= {"diffuse_mean": np.ones((1, 2, q)), "P0": np.zeros((1, 2, 5, 5))}
    values["diffuse_covariance"] = np.broadcast_to(np.eye(q), (1, 2, q, q))
    dims = built.param_dims
    variables = {
        x: (("chain", "draw", *(dims.get(x) or [f"{x}_{k}" for k in range(X.ndim - 2)])), X)
        for x, X in values.items()
    }
    coords = {x: list(X) for x, X in within.coords.items() if X is not None}
    used = {d for names, _ in variables.values() for d in names} & set(coords)
    posterior = xarray.Dataset(variables, coords={x: coords[x] for x in used})
    data = xarray.Dataset(
        {"data": (("time", "observed_state"), within["data"].get_value())},
        coords={x: coords[x] for x in ("time", "observed_state")},
    )
    observed = data.rename(data="obs")
    return xarray.DataTree.from_dict(
        {"posterior": posterior, "constant_data": data, "observed_data": observed}
    )


AFTERWARDS = {
    "forecast": {"periods": 3, "verbose": False},
    "impulse_response_function": {"n_steps": 3},
    "sample_conditional_posterior": {},
    "sample_filter_outputs": {},
    "sample_statespace_matrices": {},
    "sample_unconditional_posterior": {},
}
DRAW_IT_FIRST = (
    r"draw it first.*draw_initial\(built, idata\).*call diffuse_start\(built\) there too"
)


@pytest.mark.filterwarnings("ignore")
def test_what_reads_the_initial_state_waits_for_it():
    """The posterior has nothing in its place."""
    built, within, _ = diffuse_model(season_of_four())
    idata = as_sampled(within, built)
    for name, how in AFTERWARDS.items():
        with pytest.raises(ValueError, match=DRAW_IT_FIRST):
            getattr(built, name)(idata, **how)
    with within:
        for what in (built.make_filter_outputs, built.make_filters):
            with pytest.raises(ValueError, match=DRAW_IT_FIRST):
                what()
        x0 = built.unpack_statespace()[0]
        assert np.isnan(x0.eval()[:2]).all()
    # The way out: drawn, they have their numbers.
    drawn = draw_initial(built, idata, random_seed=1)
    how = {"progressbar": False, "compile_kwargs": {"mode": UNOPTIMISED}}
    matrices = built.sample_statespace_matrices(drawn, "initial_state", **how)
    x0 = matrices["posterior_predictive"]["initial_state"]
    assert np.isfinite(x0).all() and np.ptp(x0.values) > 0


def test_a_cell_that_builds_a_diffuse_model_runs_twice():
    """With the same model of pymc-extras; and where it has priors again the message says what."""
    y = season_of_four()
    built, within, left_out = diffuse_model(y)
    again, anew, _ = diffuse_model(y, built=built)
    assert again is built and anew is not within
    point = anew.initial_point()
    assert np.isfinite(anew.compile_logp(mode=UNOPTIMISED)(point))
    with pm.Model(coords=built.coords):
        for name, info in built.param_info.items():
            if name == "P0":
                pm.Deterministic(name, pt.eye(5))
            else:
                pm.HalfNormal(name, 1.0, shape=info["shape"])
        with pytest.raises(ValueError, match="or build the model of pymc-extras anew"):
            built.build_statespace_graph(y)


UNPICKLED = """
import pickle, sys
built = pickle.load(open(sys.argv[1], "rb"))
for model in built:
    try:
        print(*(type(x).__name__ for x in model.make_filters()), model.k_states)
    except ValueError as error:
        print(error)
"""


@pytest.mark.filterwarnings("ignore")
def test_pickled_models_in_a_process_that_knows_nothing_of_them(tmp_path):
    register_filter()
    parts = st.LevelTrend(order=1) + st.MeasurementError(name="noise")
    kinds = {"filter_type": "closed_form"}, {"smoother_type": "closed_form"}
    built = [parts.build(verbose=False, **kind) for kind in (*kinds, kinds[0] | kinds[1])]
    diffuse_one = diffuse_model(season_of_four())[0]
    path = tmp_path / "models"
    path.write_bytes(pickle.dumps([*built, diffuse_one]))
    found = subprocess.run(
        [sys.executable, "-c", UNPICKLED, path], capture_output=True, text=True, check=True
    )
    one, other, both, refused = found.stdout.splitlines()
    assert one == "ClosedFormFilter DisturbanceSmoother 1"
    assert other == "StandardFilter ClosedFormSmoother 1"
    assert both == "ClosedFormFilter ClosedFormSmoother 1"
    assert "draw it first" in refused
    # A copy is whole, and another model than the original.
    copy = pickle.loads(pickle.dumps(diffuse_one))
    assert diffuse_model(season_of_four(), built=copy)[0].make_likelihood.args[0] is copy
    draw_initial(copy, as_sampled(diffuse_model(season_of_four(), built=copy)[1], copy))
    assert "make_likelihood" in vars(diffuse_one) and "make_likelihood" not in vars(copy)


@pytest.mark.parametrize("family", ["cycle and autoregression", "SARIMAX"])
def test_a_model_is_pickled_after_its_gradient_was_taken(family):
    """Its diagonal matrices are graphs in boxes, which keep rules that cannot be pickled."""
    register_filter()
    built = FAMILIES[family](filter_type="closed_form", verbose=False)
    graph = built._unpack_statespace_with_placeholders()
    inputs = list(explicit_graph_inputs(graph))
    pt.grad(sum(X.sum() for X in graph), inputs, disconnected_inputs="ignore")
    with pytest.raises(AttributeError, match="local object"):
        pickle.dumps(graph)  # PyTensor may have mended it
    assert pickle.loads(pickle.dumps(built)).filter_type == "closed_form"
