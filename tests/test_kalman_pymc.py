"""The filter type of pymc-extras: its outputs and gradients against StandardFilter's."""

import inspect

import numpy as np
import pymc_extras
import pytensor
import pytensor.tensor as pt
import pytest
from kalman_models import make
from pymc_extras.statespace.core import statespace
from pymc_extras.statespace.filters.kalman_filter import StandardFilter
from pymc_extras.statespace.utils.constants import LONG_NAME_TO_SHORT

from helpers.checks import symmetrize
from helpers.kalman import register_filter
from helpers.kalman.graph import symbolic_model
from helpers.kalman.model import SYMMETRIC
from helpers.kalman.pymc_filter import ClosedFormFilter

PYTHON = pytensor.compile.mode.Mode(linker="py", optimizer="fast_run")
SHORT_TO_LONG = {short: long for long, short in LONG_NAME_TO_SHORT.items()}


def compiled(kind, model, jitter, gradient=True):
    symbols = symbolic_model(model.time_varying)
    varying = [SHORT_TO_LONG[name] for name in model.time_varying]
    outputs = kind(time_varying_names=varying, cov_jitter=jitter).build_graph(
        *(symbols[name] for name in symbols)
    )
    wrt = [symbols[name] for name in symbols if name != "y"]
    gradients = pt.grad(outputs[-1].sum(), wrt) if gradient else []
    return pytensor.function(list(symbols.values()), [*outputs, *gradients], mode=PYTHON)


@pytest.mark.parametrize("fill", [np.nan, -9999.0])
@pytest.mark.parametrize("name", ["gaps", "time-varying with gaps", "H = 0, singular P0 and Q"])
def test_same_outputs_and_gradients_within_the_jitter(name, fill):
    y, model = make(name)
    y = np.where(np.isnan(y), fill, y)
    jitter = 1e-8
    arguments = [y, *model.asdict().values()]
    ours = compiled(ClosedFormFilter, model, jitter)(*arguments)
    theirs = compiled(StandardFilter, model, jitter)(*arguments)
    for k, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        if k >= 7 and list(model.asdict())[k - 7] in SYMMETRIC:
            expected = symmetrize(expected)
        # The jitter of F where it is smallest makes the largest difference.
        scale = max(np.abs(expected).max(), 1)
        assert np.abs(found - expected).max() < 1e3 * jitter * scale, k


def test_without_jitter_to_rounding():
    y, model = make("gaps")
    arguments = [y, *model.asdict().values()]
    ours = compiled(ClosedFormFilter, model, 0.0)(*arguments)
    theirs = compiled(StandardFilter, model, 0.0)(*arguments)
    for k, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        if k >= 7 and list(model.asdict())[k - 7] in SYMMETRIC:
            expected = symmetrize(expected)
        assert np.abs(found - expected).max() < 1e-10 * max(np.abs(expected).max(), 1), k


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


@pytest.fixture(scope="module")
def structural():
    """A trend with a season, with gaps, as a PyMC model with either filter."""
    import pandas as pd
    import pymc as pm
    from pymc_extras.statespace import structural as st

    from helpers.datasets import co2

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
        built = parts.build(filter_type=filter_type, verbose=False)
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


def test_a_pymc_model_end_to_end(structural):
    """The same log density and gradient, then sampling and everything downstream."""
    import pymc as pm

    values = []
    for kind in ("standard", "closed_form"):
        pymc_model, built = structural(kind)
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
