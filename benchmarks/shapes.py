"""Long seasons and many series: scores of whole models beside likelihoods of their libraries. Time.

    python benchmarks/shapes.py [--quick] [--record FILE]

makes the record that the chapters "A score for statsmodels" and "A hundred series" show, in some
minutes. Contenders take turns in one process, with one BLAS thread. For statsmodels' models the
peer is its log-likelihood alone, by the fastest of its filters that gives the same number; for the
model of pymc-extras it is the log-density with its gradient by the standard filter.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import statsmodels.api as sm
from factors import FILTERS, race
from measured import commit
from threadpoolctl import threadpool_limits

from helpers.kalman.statsmodels import loglike, score
from helpers.timing import machine, write_record

RECORD = Path(__file__).parent / "results" / "shapes.json"
# Kind, season or number of series, steps, whether a twentieth is missing.
MODELS = (
    *[("level + season", s, n, gaps) for s in (52, 168)
      for n, gaps in ((1000, False), (1000, True), (2000, False))],
    ("level + season", 365, 1000, False),
    *[("SARIMA", s, n, False) for s, n in ((24, 1000), (52, 1000), (52, 2000), (168, 1000))],
    ("SARIMA", 168, 1000, True),
    ("DynamicFactor", 40, 200, True),
    ("DynamicFactor", 100, 200, True),
    ("DynamicFactorMQ", 40, 200, True),
)  # fmt: skip


def series(kind, size, n, gaps, rng):
    """A level that drifts, a season and noise; or series of two factors."""
    if "Factor" in kind:
        factors = np.cumsum(rng.standard_normal((n, 2)), axis=0) * 0.3
        factors -= factors.mean(axis=0)
        y = factors @ rng.standard_normal((2, size)) + rng.standard_normal((n, size))
    else:
        season = 3 * np.sin(2 * np.pi * np.arange(n) / size)
        y = 0.1 * np.cumsum(rng.standard_normal(n)) + season + rng.standard_normal(n)
    if gaps:
        y[rng.random(y.shape) < 0.05] = np.nan
    return y


def statsmodels_model(kind, size, y):
    if kind == "SARIMA":
        return sm.tsa.SARIMAX(y, order=(0, 1, 1), seasonal_order=(0, 1, 1, size))
    if kind == "DynamicFactor":
        return sm.tsa.DynamicFactor(y, k_factors=2, factor_order=1)
    if kind == "DynamicFactorMQ":
        index = pd.period_range("2000-01", periods=len(y), freq="M")
        return sm.tsa.DynamicFactorMQ(pd.DataFrame(y, index=index), factors=2, factor_orders=1)
    return sm.tsa.UnobservedComponents(y, "llevel", seasonal=size)


def by_statsmodels(mod, params, how):
    """Its log-likelihood by one of its filters."""
    for name, value in how.items():
        setattr(mod.ssm, name, value)
    try:
        return mod.loglike(params)
    finally:
        for name in how:
            setattr(mod.ssm, name, False)


def of_statsmodels(kind, size, n, gaps, rng, rounds):
    y = series(kind, size, n, gaps, rng)
    mod = statsmodels_model(kind, size, y)
    # The principal components that give a factor model its start want rows without gaps.
    whole = statsmodels_model(kind, size, np.nan_to_num(y)) if kind == "DynamicFactor" else mod
    params = whole.start_params
    expected = loglike(mod, params)
    calls = {"value": lambda: loglike(mod, params), "score": lambda: score(mod, params)}
    for name, how in FILTERS.items():
        if name == "collapsed" and mod.k_endog == 1:
            continue
        try:
            same = abs(by_statsmodels(mod, params, how) / expected - 1) < 1e-6
        except (ValueError, NotImplementedError, RuntimeError, np.linalg.LinAlgError):
            same = False
        if same:
            calls[f"statsmodels, {name}"] = lambda how=how: by_statsmodels(mod, params, how)
    rounds = 1 if mod.k_states > 300 else rounds  # seconds a call
    return race(calls, rounds), {"states": mod.k_states, "params": len(params)}


def of_pymc(size, n, rng, rounds):
    """Factors with errors of pymc-extras: the log-density and its gradient, by both filters."""
    import pymc as pm
    from pymc_extras.statespace.models import BayesianDynamicFactor

    from helpers.kalman import register_filter

    register_filter()
    y, calls, answers = series("Factor", size, n, True, rng), {}, []
    names = [f"y{i}" for i in range(size)]
    for name in ("closed_form", "standard"):
        built = BayesianDynamicFactor(
            k_factors=2, factor_order=1, endog_names=names, measurement_error=True,
            filter_type=name, verbose=False,
        )  # fmt: skip
        with pm.Model(coords=built.coords) as model:
            for parameter, info in built.param_info.items():
                shape, constraint = info["shape"], (info["constraints"] or "").lower()
                if "definite" in constraint:
                    pm.Deterministic(parameter, pm.math.constant(np.eye(shape[0])))
                elif "positive" in constraint:
                    pm.Gamma(parameter, 2, 2, shape=shape)
                else:
                    pm.Normal(parameter, 0, 0.5, shape=shape)
            built.build_statespace_graph(pd.DataFrame(y, columns=names))
        density = model.logp_dlogp_function(ravel_inputs=True, mode="NUMBA")
        density.set_extra_values({})
        at = pm.blocking.DictToArrayBijection.map(model.initial_point())
        nudge = np.random.default_rng(1).normal(scale=0.1, size=at.data.shape)
        at = pm.blocking.RaveledVars(at.data + nudge, at.point_map_info)
        calls[name] = lambda density=density, at=at: density(at)
        answers.append(calls[name]())
    apart = max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(*answers, strict=True))
    return race(calls, rounds), {"apart": apart, "params": len(answers[0][1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    threadpool_limits(1, "blas")
    rng, models = np.random.default_rng(168), {}
    rounds = 1 if options.quick else 3

    def add(name, seconds, facts):
        models[name] = {"s": seconds} | facts
        ms = {x: f"{1e3 * np.median(t):.1f}" for x, t in seconds.items()}
        print(name, facts, "ms:", ms, flush=True)
        write_record({"models": models, "machine": machine(), "commit": commit()}, options.record)

    for kind, size, n, gaps in MODELS:
        name = f"{kind}, {size}, {n}{', gaps' if gaps else ''}"
        add(name, *of_statsmodels(kind, size, n, gaps, rng, rounds))
    add("pymc-extras, 40, 200, gaps", *of_pymc(40, 200, rng, rounds))


if __name__ == "__main__":
    main()
