"""Four ways to start one model of carbon dioxide, sampled: what a first state costs NUTS.

Level, slope, season of twelve and noise for 526 months, thirteen states, by pymc-extras with the
filter `closed_form` and the same priors for the four standard deviations. What differs is the
first state:

- "thirty": a prior for each of its thirteen means and thirteen variances, as in the examples of
  pymc-extras: 30 numbers to sample;
- "seventeen": a prior for each mean, and no variance (P0 = 0);
- "vague": its means are the first year's, P0 = 1e7 I; the sampler has the four numbers to itself;
- "diffuse": exact, by `diffuse_start`; the four numbers again.

    python benchmarks/co2_starts.py [--quick] [--record FILE]

Each is sampled by PyMC on Numba, one chain after the other on one core, from five seeds, in a
process of its own. Before that the value and all gradients of the same model are timed, as
functions of PyTensor with nothing around them: with an ordinary first state, and with its first two
or all thirteen entries diffuse; and statsmodels' value with an exact diffuse start. It takes about
ten minutes and writes ``results/co2_starts.json``.
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
from pathlib import Path
from time import perf_counter

import kalman_nuts
import numpy as np
from measured import in_a_row
from one_core import ONE_THREAD
from threadpoolctl import threadpool_limits

from helpers.datasets import co2
from helpers.timing import machine, write_record

RECORD = Path(__file__).parent / "results" / "co2_starts.json"
SAMPLED = ("sigma_level", "sigma_season", "sigma_noise")
SEEDS = kalman_nuts.SEEDS
TURN = 5e-3  # seconds that calls in a row take at least
LENGTH = {False: {"tune": 300, "draws": 300}, True: {"tune": 30, "draws": 30}}  # by --quick


def model_of(start: str):
    """The model, built and with its graph, for one of STARTS."""
    import pandas as pd
    import pymc as pm
    import pytensor.tensor as pt
    from pymc_extras.statespace import structural

    from helpers.kalman import register_filter
    from helpers.kalman.pymc import diffuse_start

    register_filter()
    series = co2()
    y, index = series.y[:, 0], pd.DatetimeIndex(series.index, freq="MS")
    level = np.nanmean(y[:12])
    parts = (
        structural.LevelTrend(order=2, innovations_order=2, name="level")
        + structural.TimeSeasonality(season_length=12, name="season")
        + structural.MeasurementError(name="noise")
    )
    built = parts.build(filter_type="closed_form", verbose=False)
    m = built.k_states
    with pm.Model(coords=built.coords) as model:
        pm.Gamma("sigma_level", alpha=2, beta=[10.0, 100.0], dims="shock_level")
        pm.Gamma("sigma_season", alpha=2, beta=50)
        pm.Gamma("sigma_noise", alpha=2, beta=10)
        if start in ("thirty", "seventeen"):
            pm.Normal("initial_level", mu=[level, 0.1], sigma=[10.0, 1.0], dims="state_level")
            pm.Normal("params_season", sigma=10.0, dims="state_season")
        if start == "thirty":
            pm.Deterministic("P0", pt.diag(pm.Gamma("P0_diag", alpha=5, beta=5, shape=m)))
        elif start == "seventeen":
            pm.Deterministic("P0", pt.zeros((m, m)))
        elif start == "vague":
            pm.Deterministic("initial_level", pt.constant([level, 0.0]), dims="state_level")
            pm.Deterministic("params_season", pt.zeros(11), dims="state_season")
            pm.Deterministic("P0", 1e7 * pt.eye(m))
        else:
            diffuse_start(built)
        built.build_statespace_graph(pd.DataFrame({"data": y}, index=index))
    return model


def price(turns: int) -> dict:
    """Seconds per call, in turns, of value and gradient by start, and of statsmodels' value."""
    import pytensor
    import pytensor.tensor as pt
    from statsmodels.tsa.statespace.structural import UnobservedComponents

    from helpers.datasets import seasonal_arrays
    from helpers.kalman import kalman_loglike
    from helpers.kalman.ops.diffuse import kalman_diffuse_loglike

    y, variances = co2().y, np.array([0.02, 0.05, 1e-5, 1e-4])
    arrays = seasonal_arrays(variances, P0=0.0)
    m = len(arrays["a0"])
    known = arrays | {"a0": np.append(y[0], np.zeros(m - 1)), "P0": np.eye(m)}
    symbols = [pt.tensor(x, dtype="float64", shape=X.shape) for x, X in arrays.items()]

    def call(value, arrays):
        outputs = [value, *pytensor.grad(value, symbols)]
        f = pytensor.function(symbols, outputs, mode="NUMBA", trust_input=True)
        inputs = [np.array(X, order="C") for X in arrays.values()]
        return lambda: f(*inputs)

    def diffuse(q):
        return kalman_diffuse_loglike(pt.constant(y), *symbols, A=pt.constant(np.eye(m)[:, :q]))

    theirs = UnobservedComponents(y[:, 0], "lltrend", seasonal=12, use_exact_diffuse=True)
    theirs.update(variances)
    calls = {
        "ordinary": call(kalman_loglike(pt.constant(y), *symbols).sum(), known),
        "two diffuse": call(diffuse(2), known),
        "thirteen diffuse": call(diffuse(m), arrays),
        "statsmodels, value": lambda: theirs.ssm.loglike(),
    }
    found = {name: [] for name in calls}
    for function in calls.values():
        in_a_row(function, 0.1)
    for _ in range(turns):
        for name, function in calls.items():
            found[name].append(float(f"{in_a_row(function, TURN):.4g}"))
    return found


STARTS = ("thirty", "seventeen", "vague", "diffuse")


def sample(start: str, seeds, tune: int, draws: int) -> dict:
    """For each seed the seconds and the leapfrog steps; the posterior of the four by all seeds."""
    import arviz as az
    import xarray as xr

    model = model_of(start)
    kalman_nuts.start_backend("Numba")
    kalman_nuts.once(model, "PyMC", "Numba", 1, 2, 2)  # finds everything compiled from here on
    found, posteriors, divergences = [], [], 0
    for seed in seeds:
        trace, seconds = kalman_nuts.once(model, "PyMC", "Numba", seed, tune, draws)
        posterior = trace.posterior.to_dataset()[list(SAMPLED)]
        steps, tuning = map(kalman_nuts.steps_of, (trace.sample_stats, trace.warmup_sample_stats))
        smallest = min(float(x.min()) for x in az.ess(posterior, method="bulk").values())
        found.append({
            "seed": seed, "seconds": float(f"{seconds['sample']:.4g}"),
            "steps": steps, "steps, tuning": tuning,
            "smallest effective size": float(f"{smallest:.4g}"),
        })  # fmt: skip
        posteriors.append(posterior)
        divergences += int(trace.sample_stats["diverging"].values.sum())
    chains = [
        x.assign_coords(chain=x.chain + kalman_nuts.CHAINS * k) for k, x in enumerate(posteriors)
    ]
    return {
        "parameters": sum(X.size for X in model.initial_point().values()),
        "seeds": found,
        "divergences": divergences,
        "posterior": kalman_nuts.summary(xr.concat(chains, "chain")),
    }


def in_own_process(job: dict) -> dict:
    """The result of `sample`, or of `price`, in a new process, on one BLAS thread."""
    environment = os.environ | ONE_THREAD
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--job", json.dumps(job), "--record", str(out)]
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        return json.loads(out.read_text(encoding="utf-8"))


def main(quick: bool, path: Path) -> None:
    begin = perf_counter()
    record = {"machine": machine(), "chains": kalman_nuts.CHAINS, **LENGTH[quick], "starts": {}}
    record["price"] = in_own_process({"turns": 5 if quick else 51})
    for start in STARTS:
        print(f"{perf_counter() - begin:5.0f} s  {start}", flush=True)
        job = {"start": start, "seeds": SEEDS[:2] if quick else SEEDS} | LENGTH[quick]
        record["starts"][start] = found = in_own_process(job)
        write_record(record, path)  # what is measured is kept, whatever happens to the next
        seconds = sum(run["seconds"] for run in found["seeds"])
        steps = sum(run["steps"] for run in found["seeds"])
        print(f"         {seconds:.0f} s of sampling, {steps} steps", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two seeds and short chains: a trial")
    parser.add_argument("--record", type=Path, default=RECORD, help="file to write")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        # pymc-extras is told how it is sampled and samplers announce themselves: not news here.
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        threadpool_limits(1)
        run = sample if "start" in options.job else price
        write_record(run(**options.job), options.record)
    elif options.quick and options.record == RECORD:
        parser.error("a trial does not replace the record: say --record FILE")
    else:
        main(options.quick, options.record)
