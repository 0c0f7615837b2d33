"""NUTS on two models of pymc-extras, with its own filter and with the closed form.

A structural model of carbon dioxide (level, trend, season of twelve, noise) and a VARMAX(1, 1) of
three quarterly series, sampled by PyMC and by nutpie, each on PyTensor's Numba and on its JAX
backend, with the filters `standard` and `closed_form`. Two questions are kept apart: what a
gradient costs *inside the sampler* (seconds of sampling over leapfrog steps, those of tuning
included), and how many effective draws a gradient gives. The second is the same for both filters,
as they lead to the same posterior; both sample from five seeds, and the standard filter, for which
that would take hours on the VARMAX, runs chains of a quarter of the length. The log density is also
evaluated alone, at draws of the posterior, by calls in a row: at a model's initial point the
transition of a VARMAX is zero.

    python benchmarks/kalman_nuts.py [--quick] [--only MODEL] [--record FILE]

Every kind of run has two processes of its own: one starts with empty caches, and is what "cold"
means; the next finds what the first has left, and samples seed by seed, one chain after the other
on one core. First compilations run two at a time, a core each, and before anything is sampled. It
takes an hour and a half and writes ``results/kalman_nuts.json``. With ``--quick`` there are two
seeds and short chains, on Numba alone, for a trial. With ``--only``, the other model's part of the
record stays as it is.
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
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter

import numpy as np
from measured import commit, in_a_row
from threadpoolctl import threadpool_limits

from helpers.datasets import co2, macro
from helpers.timing import machine, write_record

RECORD = Path(__file__).parent / "results" / "kalman_nuts.json"
FILTERS = ("standard", "closed_form")
SAMPLERS = ("PyMC", "nutpie")
BACKENDS = {"Numba": "numba", "JAX": "jax"}
CHAINS, SEEDS = 2, (20231, 20232, 20233, 20234, 20235)
LENGTH = {
    "closed_form": {"tune": 400, "draws": 400}, "standard": {"tune": 100, "draws": 100}
}  # fmt: skip
QUICK = {"tune": 20, "draws": 20}
TURNS, TURN = 7, 0.02  # at least so many turns of calls in a row, of so many seconds each
POINTS = 5  # draws of the posterior at which the filters are compared
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


def start_backend(backend: str) -> None:
    """What any first compilation pays for, so that none of those measured does."""
    import pytensor
    import pytensor.tensor as pt

    if backend == "JAX":
        import jax

        jax.config.update("jax_enable_x64", True)
    x = pt.vector("x")
    pytensor.function([x], x + 1, mode=MODES[backend])(np.ones(2))


MODES = {"Numba": "NUMBA", "JAX": "JAX"}


def once(model, sampler: str, backend: str, seed: int, tune: int, draws: int):
    """A trace, and the seconds to compile and to sample.

    For PyMC compilation is all that its `sample` does before and after sampling. Its chains run one
    after the other, and so do nutpie's.
    """
    import pymc as pm

    start = perf_counter()
    if sampler == "PyMC":
        with model:
            trace = pm.sample(
                tune=tune, draws=draws, chains=CHAINS, cores=1, random_seed=seed,
                progressbar=False, compute_convergence_checks=False, quiet=True,
                discard_tuned_samples=False, compile_kwargs={"mode": MODES[backend]},
            )  # fmt: skip
        sampling = float(trace.posterior.attrs["sampling_time"])
    else:
        import nutpie

        compiled = nutpie.compile_pymc_model(model, backend=BACKENDS[backend])
        sampling_starts = perf_counter()
        trace = nutpie.sample(
            compiled, tune=tune, draws=draws, chains=CHAINS, cores=1, seed=seed,
            progress_bar=False, save_warmup=True,
        )  # fmt: skip
        sampling = perf_counter() - sampling_starts
    return trace, {"compile": perf_counter() - start - sampling, "sample": sampling}


def steps_of(stats) -> int:
    """Leapfrog steps, each of which is a gradient."""
    return int(stats["n_steps" if "n_steps" in stats else "tree_size"].values.sum())


def sample(
    name: str, filter_type: str, sampler: str, backend: str, seeds, tune: int, draws: int
) -> dict:
    """For each seed the seconds to compile and to sample and the steps; and the posterior of all.

    The file "points.npz" beside the answer holds draws of the posterior, unconstrained.
    """
    import arviz as az
    import xarray as xr

    model = build(name, filter_type)
    start_backend(backend)
    found, posteriors, divergences, in_draws = [], [], 0, 0
    for seed in seeds:
        trace, seconds = once(model, sampler, backend, seed, tune, draws)
        posterior = trace.posterior.to_dataset()[list(MODELS[name][1])]
        steps = steps_of(trace.sample_stats)
        tuning = steps_of(trace.warmup_sample_stats)
        smallest = min(float(x.min()) for x in az.ess(posterior, method="bulk").values())
        found.append({
            "seed": seed,
            "seconds": {what: float(f"{s:.4g}") for what, s in seconds.items()},
            "steps": steps, "steps, tuning": tuning,
            "seconds per gradient": float(f"{seconds['sample'] / (steps + tuning):.4g}"),
            "effective draws per gradient": float(f"{smallest / steps:.4g}"),
        })  # fmt: skip
        posteriors.append(posterior)
        divergences += int(trace.sample_stats["diverging"].values.sum())
        in_draws += steps
    pooled = xr.concat(
        [x.assign_coords(chain=x.chain + CHAINS * k) for k, x in enumerate(posteriors)], "chain"
    )
    return {
        "seeds": found,
        "seconds": {
            what: float(np.median([run["seconds"][what] for run in found]))
            for what in ("compile", "sample")
        },
        "tune": tune,
        "draws": draws,
        "steps": in_draws,
        "divergences": divergences,
        "posterior": summary(pooled),
        "points": [x.tolist() for x in unconstrained(model, trace)],
    }


def unconstrained(model, trace) -> list[np.ndarray]:
    """Some draws of a trace as the flat vectors that the log density takes."""
    import pytensor.tensor as pt

    chosen = np.linspace(0, trace.posterior.sizes["draw"] - 1, POINTS).astype(int)
    points = []
    for draw in chosen:
        pieces = []
        for rv in model.free_RVs:
            value = np.asarray(trace.posterior[rv.name].values[0, draw], dtype=float)
            transform = model.rvs_to_transforms[rv]
            if transform is not None:
                value = transform.forward(pt.as_tensor(value), *rv.owner.inputs).eval()
            pieces.append(np.ravel(value))
        points.append(np.concatenate(pieces))
    return points


def summary(posterior) -> dict:
    """For each scalar its moments and quantiles, with Monte Carlo errors, and effective sizes."""
    import arviz as az

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
        for name in posterior.data_vars
        for place in np.ndindex(figures["mean"][name].shape)
    }


def evaluations(name: str, points, seconds: float) -> dict:
    """Both filters at draws of the posterior: seconds, and how far they differ.

    Each is called in a row, for a turn; they take turns, and of a point's turns the median counts.
    """
    functions = {}
    for filter_type in FILTERS:
        model = build(name, filter_type)
        functions[filter_type] = model.logp_dlogp_function(ravel_inputs=True, mode="NUMBA")
        functions[filter_type].set_extra_values({})
    values, slopes, times = [], [], {f: [] for f in FILTERS}
    for x in map(np.array, points):
        (value, gradient), (value_2, gradient_2) = (functions[f](x) for f in FILTERS)
        values.append(abs(value_2 / value - 1))
        slopes.append(abs(gradient_2 - gradient).max() / abs(gradient).max())
        taken, end = {f: [] for f in FILTERS}, perf_counter() + seconds / len(points)
        while len(taken["standard"]) < TURNS or perf_counter() < end:
            for f, function in functions.items():
                taken[f].append(in_a_row(partial(function, x), TURN))
        for f, found in taken.items():
            times[f].append(float(f"{np.median(found):.3e}"))
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "points": len(points),
        "seconds": times,  # a median for each point
        "relative difference": {  # the largest over the points
            "value": float(f"{max(values):.1e}"), "gradient": float(f"{max(slopes):.1e}")
        },
        "parameters": len(gradient),
    }  # fmt: skip


# --- and the one that starts them -----------------------------------------------------------------


def in_own_process(folder: Path, job: dict) -> dict:
    """The result of a job, with the caches of PyTensor and Numba in `folder`."""
    flags = [os.environ.get("PYTENSOR_FLAGS"), f"base_compiledir={folder}", "blas__ldflags="]
    environment = os.environ | {
        "PYTENSOR_FLAGS": ",".join(filter(None, flags)),
        "NUMBA_CACHE_DIR": str(folder / "numba"),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    out = folder / "result.json"
    command = [sys.executable, __file__, "--job", json.dumps(job), "--record", str(out)]
    subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        check=True,
    )  # fmt: skip
    return json.loads(out.read_text(encoding="utf-8"))


def measure(name: str, quick: bool, say) -> dict:
    found = {"doc": MODELS[name][0].__doc__.rstrip("."), "runs": {}, "failed": {}}
    seeds, backends = (SEEDS[:2], ["Numba"]) if quick else (SEEDS, list(BACKENDS))
    points, jobs = None, {}
    for filter_type, sampler, backend in product(FILTERS, SAMPLERS, backends):
        label = f"{filter_type}, {sampler}" + (f", {backend}" if backend != "Numba" else "")
        jobs[label] = {
            "what": "sample", "name": name, "filter_type": filter_type, "sampler": sampler,
            "backend": backend,
        }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:

        def attempt(label, **how):
            own = Path(folder) / label.replace(", ", "-")
            own.mkdir(exist_ok=True)
            try:
                return in_own_process(own, jobs[label] | how)
            except subprocess.CalledProcessError as error:
                found["failed"][label] = (error.stderr or "").strip().splitlines()[-1:]
                say(f"{name}: {label} failed: {found['failed'][label]}")

        def first(label):
            run = attempt(label, seeds=seeds[:1], tune=5, draws=5)
            if run:
                say(f"{name}: {label}, first compilation: {run['seconds']['compile']:.0f} s")
                return run["seconds"]["compile"]

        with ThreadPoolExecutor(2) as pool:
            cold = dict(zip(jobs, pool.map(first, jobs), strict=True))
        for label, job in jobs.items():
            length = QUICK if quick else LENGTH[job["filter_type"]]
            run = attempt(label, seeds=seeds, **length) if cold[label] else None
            if run is None:
                continue
            run["seconds"] = {
                "compile, cold": cold[label],
                "compile, warm": run["seeds"][0]["seconds"]["compile"],
                "sample": run["seconds"]["sample"],
            }
            last = run.pop("points")
            points = last if job["filter_type"] == "closed_form" or points is None else points
            say(f"{name}: {label}, {len(run['seeds'])} seeds: {run['seconds']}")
            found["runs"][label] = run
        say(f"{name}: evaluations at draws of the posterior")
        own = Path(folder) / "standard-PyMC"
        own.mkdir(exist_ok=True)
        job = {"what": "evaluate", "name": name, "points": points, "seconds": 5 if quick else 15}
        found["evaluation"] = in_own_process(own, job)
    return found


def main(quick: bool, only: str | None, path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8")) if only and path.exists() else {}
    start = perf_counter()

    def say(what: str) -> None:
        print(f"{perf_counter() - start:5.0f} s  {what}", flush=True)

    for name in [only] if only else MODELS:
        how = {"machine": machine(), "commit": commit(), "chains": CHAINS}
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
