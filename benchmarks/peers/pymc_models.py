"""Whole PyMC models: log-density and gradient, with the filter as one part of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from time import perf_counter

import numpy as np


def structural(season: int, n: int, filter_type: str):
    """Level + trend + season + noise on data drawn from such a model."""
    return built_structural(season, n, filter_type=filter_type)[1]


def built_structural(season: int, n: int, gap: slice = slice(0), **types):
    """The state space model, of these types of filter and smoother, and the PyMC model around it.

    Its data have no observations in `gap`.
    """
    import pandas as pd
    import pymc as pm
    import pytensor.tensor as pt
    from pymc_extras.statespace import structural as st

    from peers.models import structural_problem

    y, _ = structural_problem(season, n)
    y[gap] = np.nan
    built = (
        st.LevelTrend(order=2, name="level")
        + st.TimeSeasonality(season_length=season, name="season")
        + st.MeasurementError(name="noise")
    ).build(verbose=False, **types)
    data = pd.DataFrame(y, columns=["data"], index=pd.RangeIndex(n))
    with pm.Model(coords=built.coords) as model:
        P0 = pm.Gamma("P0_diag", alpha=5, beta=1, dims=["state"])
        pm.Deterministic("P0", pt.diag(P0), dims=["state", "state_aux"])
        pm.Normal("initial_level", sigma=2, dims=["state_level"])
        pm.Normal("params_season", sigma=2, dims=["state_season"])
        pm.Gamma("sigma_level", alpha=2, beta=10, dims=["shock_level"])
        pm.Gamma("sigma_season", alpha=2, beta=10)
        pm.Gamma("sigma_noise", alpha=2, beta=4)
        built.build_statespace_graph(data)
    return built, model


def varmax(filter_type: str):
    """VARMA(1, 1) of three macroeconomic series."""
    import pandas as pd
    import pymc as pm
    import pytensor.tensor as pt
    from pymc_extras.statespace.models import BayesianVARMAX

    from helpers.datasets import macro

    series = macro()
    y = series.y - series.y.mean(axis=0)
    built = BayesianVARMAX(
        endog_names=list(series.names), order=(1, 1), measurement_error=False,
        stationary_initialization=False, filter_type=filter_type, verbose=False,
    )  # fmt: skip
    data = pd.DataFrame(y, columns=list(series.names), index=pd.RangeIndex(len(y)))
    with pm.Model(coords=built.coords) as model:
        pm.Normal("x0", sigma=1, dims=["state"])
        P0 = pm.Gamma("P0_diag", alpha=2, beta=1, dims=["state"])
        pm.Deterministic("P0", pt.diag(P0), dims=["state", "state_aux"])
        pm.Normal("ar_params", sigma=0.3, dims=["observed_state", "lag_ar", "observed_state_aux"])
        pm.Normal("ma_params", sigma=0.3, dims=["observed_state", "lag_ma", "observed_state_aux"])
        chol, *_ = pm.LKJCholeskyCov(
            "state_chol", n=3, eta=2, sd_dist=pm.Exponential.dist(1, shape=3), compute_corr=True
        )
        pm.Deterministic("state_cov", chol @ chol.T, dims=["shock", "shock_aux"])
        built.build_statespace_graph(data)
    return model


def local_level(filter_type: str):
    """The Nile: a level and noise."""
    import pandas as pd
    import pymc as pm
    import pytensor.tensor as pt
    from pymc_extras.statespace import structural as st

    from helpers.datasets import nile

    y = nile().y / 100
    built = (st.LevelTrend(order=1, name="level") + st.MeasurementError(name="noise")).build(
        filter_type=filter_type, verbose=False
    )
    data = pd.DataFrame(y, columns=["data"], index=pd.RangeIndex(len(y)))
    with pm.Model(coords=built.coords) as model:
        pm.Deterministic("P0", 1e3 * pt.eye(1), dims=["state", "state_aux"])
        pm.Normal("initial_level", mu=10, sigma=10, dims=["state_level"])
        pm.Gamma("sigma_level", alpha=2, beta=5, dims=["shock_level"])
        pm.Gamma("sigma_noise", alpha=2, beta=2)
        built.build_statespace_graph(data)
    return model


def register() -> None:
    """Both of ours, with a steady state and without one, as filter types of pymc-extras."""
    from pymc_extras.statespace.core import statespace

    from helpers.kalman import register_filter
    from helpers.kalman.ops.likelihood import loglike_from_W
    from helpers.kalman.pymc import ClosedFormFilter

    class EveryStep(ClosedFormFilter):
        def _loglike(self, y, *model):
            return loglike_from_W(y, *model, tol=0.0)

    register_filter()
    statespace.FILTER_FACTORY["every_step"] = EveryStep


def logp_dlogp(name: str, filter_type: str, mode: str = "NUMBA") -> tuple[Callable, dict]:
    """Function without arguments: log-density and gradient, near the initial point.

    And the seconds that it took to build the model, to make the function, and to call it once.
    """
    from pymc.blocking import DictToArrayBijection
    from pymc.model.transform.optimization import freeze_dims_and_data

    register()
    times = [perf_counter()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the index of the data, which has no dates
        if name.startswith("VARMAX"):
            model = varmax(filter_type)
        elif name.startswith("local level"):
            model = local_level(filter_type)
        else:
            season, n = (int(word) for word in name.replace(",", "").split() if word.isdigit())
            model = structural(season, n, filter_type)
        if mode == "JAX":  # the standard filter's scan needs shapes that are known when it is built
            model = freeze_dims_and_data(model)
        times.append(perf_counter())
        function = model.logp_dlogp_function(ravel_inputs=True, mode=mode)
    function.set_extra_values({})
    function._pytensor_function.trust_input = True
    start = DictToArrayBijection.map(model.initial_point()).data
    # Away from the initial point: the transition of a VARMAX is zero there, a pass over nothing.
    start = start + 0.1 * np.sin(1 + np.arange(len(start)))
    times.append(perf_counter())
    function(start)
    times.append(perf_counter())
    phases = dict(zip(("model", "function", "first call"), np.diff(times).round(2), strict=True))
    return lambda: function(start), phases
