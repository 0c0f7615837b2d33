"""NUTS on two models of pymc-extras, with its own filter and with the closed form.

A structural model of carbon dioxide (level, trend, season of twelve, noise) and a VARMAX(1, 1) of
three quarterly series, sampled by PyMC and by nutpie with the filters `standard` and
`closed_form`, from the same seeds: what the posterior is, how sure of that one can be, and how
long it took, with compilation and without.  Each of the eight runs is a process of its own that
starts with empty caches; a second process compiles again with the caches that the first one left.
It takes about three quarters of an hour and writes ``results/kalman_nuts.json``.

    python benchmarks/kalman_nuts.py [--quick] [--only MODEL] [--record FILE]

With ``--quick`` the chains are a fifth as long, for a trial.  With ``--only``, the other model's
part of the record stays as it is.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter

import numpy as np
from threadpoolctl import threadpool_limits

from helpers.datasets import co2, macro
from helpers.timing import compare, machine, progress, write_record

RECORD = Path(__file__).parent / "results" / "kalman_nuts.json"
FILTERS = ("standard", "closed_form")
SAMPLERS = ("PyMC", "nutpie")
CHAINS, SEED = 2, 20231
LENGTH = {False: {"tune": 400, "draws": 400}, True: {"tune": 80, "draws": 80}}  # by --quick
QUANTILES = (0.05, 0.5, 0.95)


# --- the models -----------------------------------------------------------------------------------


def structural_model(filter_type: str):
    """Level, trend, season of twelve and noise; m = 13, p = 1, r = 3, n = 200 with five gaps."""
    import pandas as pd
    import pymc as pm
    import pytensor.tensor as pt
    from pymc_extras.statespace import structural

    series = co2()
    y, index = series.y[:200, 0], pd.DatetimeIndex(series.index[:200], freq="MS")
    parts = (
        structural.LevelTrend(order=2, innovations_order=2, name="level")
        + structural.TimeSeasonality(season_length=12, name="season")
        + structural.MeasurementError(name="noise")
    )
    built = parts.build(filter_type=filter_type, verbose=False)
    with pm.Model(coords=built.coords) as model:
        pm.Deterministic("P0", 5 * pt.eye(built.k_states))
        pm.Normal(
            "initial_level", mu=[np.nanmean(y[:12]), 0.1], sigma=[2.0, 0.1], dims="state_level"
        )
        pm.Normal("params_season", sigma=2.0, dims="state_season")
        pm.Gamma("sigma_level", alpha=2, beta=[10.0, 100.0], dims="shock_level")
        pm.Gamma("sigma_season", alpha=2, beta=50)
        pm.Gamma("sigma_noise", alpha=2, beta=10)
        built.build_statespace_graph(pd.DataFrame({"data": y}, index=index))
    return model


def varmax_model(filter_type: str):
    """VARMAX(1, 1) of three growth rates; m = 6, p = 3, r = 3, n = 202."""
    import pandas as pd
    import pymc as pm
    import pytensor.tensor as pt
    from pymc_extras.statespace import BayesianVARMAX

    series = macro()
    y = (series.y - series.y.mean(axis=0)) / series.y.std(axis=0)
    index = pd.DatetimeIndex(series.index, freq="QS")
    built = BayesianVARMAX(
        order=(1, 1), endog_names=list(series.names), filter_type=filter_type, verbose=False
    )
    with pm.Model(coords=built.coords) as model:
        pm.Deterministic("x0", pt.zeros(built.k_states))
        pm.Deterministic("P0", 5 * pt.eye(built.k_states))
        pm.Normal("ar_params", sigma=0.3, dims=built.param_dims["ar_params"])
        pm.Normal("ma_params", sigma=0.3, dims=built.param_dims["ma_params"])
        chol, *_ = pm.LKJCholeskyCov("shocks", n=3, eta=2, sd_dist=pm.Exponential.dist(1))
        pm.Deterministic("state_cov", chol @ chol.T, dims=built.param_dims["state_cov"])
        built.build_statespace_graph(pd.DataFrame(y, index=index, columns=series.names))
    return model


# name: (how it is built, whose posteriors are recorded)
MODELS = {
    "structural": (
        structural_model,
        ("initial_level", "params_season", "sigma_level", "sigma_season", "sigma_noise"),
    ),
    "VARMAX": (varmax_model, ("ar_params", "ma_params", "state_cov")),
}


# --- what a process of its own does ---------------------------------------------------------------


def build(name: str, filter_type: str):
    from helpers.kalman import register_filter

    register_filter()
    return MODELS[name][0](filter_type)


def start_backend() -> None:
    """What any first compilation pays for, so that none of those measured does."""
    import pytensor
    import pytensor.tensor as pt

    x = pt.vector("x")
    pytensor.function([x], x + 1, mode="NUMBA")(np.ones(2))


def sample(name: str, filter_type: str, sampler: str, tune: int, draws: int) -> dict:
    """Seconds to compile and to sample, and the posterior.

    For PyMC compilation is all that its `sample` does before and after sampling.
    """
    import nutpie
    import pymc as pm

    model = build(name, filter_type)
    start_backend()
    start = perf_counter()
    if sampler == "PyMC":
        with model:
            trace = pm.sample(
                tune=tune, draws=draws, chains=CHAINS, cores=CHAINS, random_seed=SEED,
                progressbar=False, compute_convergence_checks=False, quiet=True,
                compile_kwargs={"mode": "NUMBA"},
            )  # fmt: skip
        sampling = float(trace.posterior.attrs["sampling_time"])
    else:
        compiled = nutpie.compile_pymc_model(model, backend="numba")
        sampling_starts = perf_counter()
        trace = nutpie.sample(
            compiled, tune=tune, draws=draws, chains=CHAINS, cores=CHAINS, seed=SEED,
            progress_bar=False,
        )  # fmt: skip
        sampling = perf_counter() - sampling_starts
    compiling = perf_counter() - start - sampling
    stats = trace.sample_stats
    steps = stats["n_steps" if "n_steps" in stats else "tree_size"].values
    return {
        "seconds": {"compile": compiling, "sample": sampling},
        "steps": int(steps.sum()),
        "divergences": int(stats["diverging"].values.sum()),
        "posterior": summary(trace, MODELS[name][1]),
    }


def summary(trace, names: tuple[str, ...]) -> dict:
    """For each scalar its moments and quantiles, with Monte Carlo errors, and effective sizes."""
    import arviz as az

    posterior = trace.posterior.to_dataset()[list(names)]

    def reduced(function):
        return posterior.reduce(function, ("chain", "draw"))

    figures = {
        "mean": posterior.mean(("chain", "draw")),
        "sd": posterior.std(("chain", "draw"), ddof=1),
        "mean_mcse": az.mcse(posterior, method="mean"),
        "sd_mcse": az.mcse(posterior, method="sd"),
        "ess_bulk": az.ess(posterior, method="bulk"),
        "ess_tail": az.ess(posterior, method="tail"),
        "rhat": az.rhat(posterior),
    }
    for q in QUANTILES:
        figures[f"q{q}"] = posterior.quantile(q, ("chain", "draw"))
        figures[f"q{q}_mcse"] = az.mcse(posterior, method="quantile", prob=q)
    return {
        f"{name}{list(place) if place else ''}": {
            what: float(f"{data[name].values[place]:.5g}") for what, data in figures.items()
        }
        for name in names
        for place in np.ndindex(figures["mean"][name].shape)
    }


def evaluations(name: str, seconds: float) -> dict:
    """Interleaved seconds for one log density of the whole model with its gradient."""
    calls, found = {}, {}
    for filter_type in FILTERS:
        model = build(name, filter_type)
        function = model.logp_dlogp_function(ravel_inputs=True, mode="NUMBA")
        function.set_extra_values({})
        point = model.initial_point(SEED)
        x = np.concatenate([np.ravel(point[v.name]) for v in model.value_vars]).astype(float)
        found[filter_type] = function(x)
        calls[filter_type] = partial(function, x)
    (value, gradient), (value_2, gradient_2) = (found[f] for f in FILTERS)
    times = compare(calls, seconds=seconds, label=f"{name}: log density and gradient")
    return {
        "date": times.date,
        "seconds": {f: [float(f"{s:.3e}") for s in t] for f, t in times.seconds.items()},
        "relative difference": {
            "value": float(f"{abs(value_2 / value - 1):.1e}"),
            "gradient": float(f"{abs(gradient_2 - gradient).max() / abs(gradient).max():.1e}"),
        },
        "parameters": len(gradient),
    }


# --- and the one that starts them -----------------------------------------------------------------


def in_own_process(folder: str, job: dict) -> dict:
    """The result of a job, with the caches of PyTensor and Numba in `folder`."""
    flags = [os.environ.get("PYTENSOR_FLAGS"), f"base_compiledir={folder}", "blas__ldflags="]
    environment = os.environ | {
        "PYTENSOR_FLAGS": ",".join(filter(None, flags)),
        "NUMBA_CACHE_DIR": str(Path(folder) / "numba"),
    }
    out = Path(folder) / "result.json"
    command = [sys.executable, __file__, "--job", json.dumps(job), "--record", str(out)]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return json.loads(out.read_text(encoding="utf-8"))


def measure(name: str, quick: bool, say) -> dict:
    found = {"doc": MODELS[name][0].__doc__.rstrip("."), "runs": {}}
    with tempfile.TemporaryDirectory() as kept:
        for filter_type, sampler in progress(list(product(FILTERS, SAMPLERS)), name):
            label = f"{filter_type}, {sampler}"
            say(f"{name}: {label}")
            job = {"what": "sample", "name": name, "filter_type": filter_type, "sampler": sampler}
            with tempfile.TemporaryDirectory() as own:
                # The folder of the run that compiles longest serves the evaluations afterwards.
                folder = kept if label == "standard, PyMC" else own
                run = in_own_process(folder, job | LENGTH[quick])
                again = in_own_process(folder, job | {"tune": 5, "draws": 5})
            cold, sampling = run["seconds"]["compile"], run["seconds"]["sample"]
            run["seconds"] = {
                "compile, cold": cold,
                "compile, warm": again["seconds"]["compile"],
                "sample": sampling,
            }
            smallest = min(x["ess_bulk"] for x in run["posterior"].values())
            say(f"    {run['seconds']}, smallest effective size {smallest:.0f}")
            found["runs"][label] = run
        say(f"{name}: evaluations")
        found["evaluation"] = in_own_process(
            kept, {"what": "evaluate", "name": name, "seconds": 5 if quick else 15}
        )
    return found


def main(quick: bool, only: str | None, path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8")) if only and path.exists() else {}
    start = perf_counter()

    def say(what: str) -> None:
        print(f"{perf_counter() - start:5.0f} s  {what}", flush=True)

    for name in [only] if only else MODELS:
        how = {"machine": machine(), "chains": CHAINS, **LENGTH[quick]}
        record[name] = how | measure(name, quick, say)
        write_record(record, path)  # what is measured is kept, whatever happens to the next


def do(job: dict) -> dict:
    # pymc-extras is told how it is sampled and samplers announce themselves: not news here.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    threadpool_limits(1)
    work = {"sample": sample, "evaluate": evaluations}[job.pop("what")]
    return work(**job)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="chains a fifth as long")
    parser.add_argument("--only", choices=list(MODELS), help="measure one model again")
    parser.add_argument("--record", type=Path, default=RECORD, help="file to write")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        write_record(do(options.job), options.record)
    else:
        if options.quick and options.record == RECORD:
            parser.error("a trial does not replace the record: say --record FILE")
        main(options.quick, options.only, options.record)
