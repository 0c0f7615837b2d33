"""Many series on few states: value and gradient against statsmodels' likelihood. Time.

    python benchmarks/factors.py [--quick] [--record FILE]

makes the record that the chapter "A hundred series" shows, in a few minutes. Contenders take
turns in one process, with one BLAS thread. "p at once" is the package's own pass without the
rotation: one more series without noise, with a state of its own, keeps the rotation away.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
import statsmodels.api as sm
from measured import commit
from scipy.linalg import block_diag
from threadpoolctl import threadpool_limits

from helpers.datasets import random_model, simulate
from helpers.kalman import StateSpace, loglike, loglike_and_grad
from helpers.kalman.hessian import hessian
from helpers.timing import machine, write_record

RECORD = Path(__file__).parent / "results" / "factors.json"
SIZES = ((40, 2), (20, 4), (100, 4), (100, 10))  # p, m
STEPS, GAPS = 200, 0.05
FILTERS = {
    "conventional": {},
    "univariate": {"filter_univariate": True},
    "collapsed": {"filter_collapsed": True},
}


def problem(p, m, full, rng):
    model = StateSpace(**random_model(m, p, rng=rng))
    root = rng.standard_normal((p, p))
    H = root @ root.T / p + np.eye(p) if full else np.diag(rng.uniform(0.5, 2.0, p))  # noqa: N806
    model = replace(model, H=H, d=np.zeros(p))
    y, _ = simulate(STEPS, rng, **model.asdict())
    y[rng.random(y.shape) < GAPS] = np.nan
    return y, model


def with_exact_series(y, model):
    """One more series without noise, which shows a white noise of its own."""
    arrays = model.asdict()
    one, zero = np.ones((1, 1)), np.zeros((1, 1))
    more = {"P0": one, "T": zero, "Z": one, "R": one, "H": zero, "Q": one}
    arrays |= {x: block_diag(arrays[x], X) for x, X in more.items()}
    arrays |= {x: np.append(arrays[x], 0.0) for x in ("a0", "c", "d")}
    exact = np.random.default_rng(0).standard_normal((len(y), 1))
    return np.hstack([y, exact]), StateSpace(**arrays)


def loadings(model, series=3):
    """A direction for each loading of the first series."""
    k = series * model.m
    found = np.zeros((k, model.p, model.m))
    found[:, :series] = np.eye(k).reshape(k, series, model.m)
    return found


def with_one_more(Z):  # noqa: N803
    """The same directions for the model with one series and one state more."""
    return np.pad(Z, ((0, 0), (0, 1), (0, 1)))


def statsmodels_filter(y, model, **how):
    found = sm.tsa.statespace.MLEModel(y, k_states=model.m, k_posdef=model.r)
    names = {"c": "state_intercept", "d": "obs_intercept", "T": "transition", "Z": "design",
             "R": "selection", "H": "obs_cov", "Q": "state_cov"}  # fmt: skip
    for name, other in names.items():
        found[other] = getattr(model, name)
    found.ssm.initialize_known(model.a0, model.P0)
    for name, value in how.items():
        setattr(found.ssm, name, value)
    return found.ssm.loglike


def race(calls: dict, rounds: int) -> dict:
    seconds = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            begin = perf_counter()
            call()
            seconds[name].append(perf_counter() - begin)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three rounds instead of fifteen")
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    threadpool_limits(1, "blas")
    rng, models = np.random.default_rng(2015), {}
    for full in (False, True):
        for p, m in SIZES:
            y, model = problem(p, m, full, rng)
            exact, Z = with_exact_series(y, model), loadings(model)  # noqa: N806
            calls = {
                "value": lambda y=y, model=model: loglike(y, model),
                "gradient": lambda y=y, model=model: loglike_and_grad(y, model),
                "p at once": lambda exact=exact: loglike_and_grad(*exact),
                "Hessian": lambda y=y, model=model, Z=Z: hessian(y, model, {"Z": Z}),
                "Hessian, p at once": lambda exact=exact, Z=Z: hessian(
                    *exact, {"Z": with_one_more(Z)}
                ),
            }
            expected = loglike(y, model)
            errors = {}
            for name, how in FILTERS.items():
                call = statsmodels_filter(y, model, **how)
                errors[name] = abs(call() / expected - 1)
                if errors[name] < 1e-8:
                    calls[f"statsmodels, {name}"] = call
            seconds = race(calls, 3 if options.quick else 15)
            size = f"{p}, {m}, {'full' if full else 'diagonal'}"
            models[size] = {"s": seconds, "errors": errors}
            ms = {name: f"{1e3 * np.median(x):.2f}" for name, x in seconds.items()}
            print(size, ms, {name: f"{x:.0e}" for name, x in errors.items()}, flush=True)
    record = {"models": models, "steps": STEPS, "gaps": GAPS}
    write_record(record | {"machine": machine(), "commit": commit()}, options.record)


if __name__ == "__main__":
    main()
