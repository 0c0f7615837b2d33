"""Posterior paths in a PyMC model: `sample_conditional_posterior` with our smoother and without it.

Level, trend, season of twelve and noise on 240 months with a gap, 13 states, and 4000 draws of the
parameters, by NUTS. pymc-extras draws filtered, predicted and smoothed states and observations for
each of them: with ``closed_form`` for filter and smoother, for the filter alone, and for neither.

    python benchmarks/draws.py [--draws 4000] [--repeats 3] [--record FILE]

They are called in turn, in one process on one core. A call builds and compiles its graph before it
draws; so each is called with five draws as well, and the difference is what the draws take. The
first calls, of which some parts may have to be compiled, are recorded apart. It takes a few minutes
and writes ``results/draws.json``.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path
from time import perf_counter

import numpy as np
from one_core import keep_to_one_core
from peers.pymc_models import built_structural
from threadpoolctl import threadpool_limits

from helpers.timing import machine, write_record

RECORD = Path(__file__).parent / "results" / "draws.json"
SEASON, N, GAP = 12, 240, slice(100, 106)
FEW = 5
KINDS = {
    "closed form": {"filter_type": "closed_form", "smoother_type": "closed_form"},
    "closed-form filter alone": {"filter_type": "closed_form"},
    "pymc-extras": {"filter_type": "standard"},
}


def main(draws: int, repeats: int, record: Path) -> None:
    import pymc as pm

    from helpers.kalman import register_filter

    register_filter()
    begin = perf_counter()
    models = {name: built_structural(SEASON, N, GAP, **types) for name, types in KINDS.items()}
    with models["closed form"][1]:  # its draws of the parameters serve all
        quiet = {"random_seed": 1, "progressbar": False}
        trace = pm.sample(draws, tune=500, chains=1, compute_convergence_checks=False, **quiet)
    print(f"{perf_counter() - begin:5.0f} s  {draws} draws of the posterior", flush=True)
    seconds = {name: {"first": None, "few": [], "all": []} for name in KINDS}

    def timed(name: str, count: int) -> float:
        start = perf_counter()
        some = trace.isel(draw=slice(count))
        drawn = models[name][0].sample_conditional_posterior(some, **quiet)
        if not np.isfinite(drawn["smoothed_posterior"].values).all():
            raise ArithmeticError(f"{name}: a path is not finite")
        return round(perf_counter() - start, 4)

    for name in KINDS:
        seconds[name]["first"] = timed(name, FEW)
    for _ in range(repeats):
        for name, found in seconds.items():
            found["few"].append(timed(name, FEW))
            found["all"].append(timed(name, draws))
            each = 1e3 * (found["all"][-1] - found["few"][-1]) / (draws - FEW)
            print(f"{perf_counter() - begin:5.0f} s  {name}, {each:.3f} ms a draw", flush=True)
    size = {"draws": draws, "few": FEW, "steps": N, "states": SEASON + 1}
    write_record({"machine": machine(), **size, "seconds": seconds}, record)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--record", type=Path, default=RECORD, help="file to write")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    threadpool_limits(1)
    keep_to_one_core()
    main(options.draws, options.repeats, options.record)
