"""Many series at once: the package's panel and its peers. Time, and error beside it.

    python benchmarks/panels.py [--only PART ...] [--quick] [--record FILE] [--python NAME=FILE]

makes the record that the chapter "A thousand series" shows, in less than six minutes on a quiet
machine. Every contender has a process to itself and one thread, where its name does not say two;
they take turns, as in `kalman_peers.py`, whose processes and workers these are. Who is not
installed or fails is left out, and the record says why.

Parts: ``shared``, 1000 series of 200 steps with level, trend and season of twelve, one model;
``own``, 200 series with a model each, against loops over the pass for one; ``hierarchical``, a PyMC
model of 500 local levels, against the filters of pymc-extras, which get fewer series since each is
a scan to compile; ``fits``, 100 000 local levels by maximum likelihood. ``fits`` is
resumable: with --cache it keeps each finished piece there, and goes on where it ended.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
from kalman_peers import TURN, Field, named_python, say
from peers import many
from scipy.optimize import minimize

from helpers.datasets import random_model, seasonal_arrays, simulate
from helpers.kalman import StateSpace, loglike_and_grad, panel
from helpers.kalman.panel_fit import fit
from helpers.statespace import NAMES
from helpers.timing import machine, write_record

RECORD = Path(__file__).parent / "results" / "panels.json"
LARGEST_ERROR = 1e-9
OWN_SIZES = ((1, 1, 50), (2, 1, 200), (4, 1, 200), (8, 1, 200))  # m, p, n
# The package's passes as they are on this machine's disk: what compiling takes is not asked here.
AS_INSTALLED = {"NUMBA_CACHE_DIR": ""}
# Seconds of a turn where a contender has two threads: after a pause the second processor takes some
# fifty milliseconds to be of use.
LONG_TURN = 0.2
FEW = 2  # series that the slow peer of the hierarchical model gets


def drawn(model: StateSpace, J: int, n: int, rng) -> np.ndarray:  # noqa: N803
    return np.array([simulate(n, rng, **model.asdict())[0] for _ in range(J)])


def race(field: Field, Y, model, expected: dict, requested, options, ours, turn=TURN) -> dict:  # noqa: N803
    """Errors and times of a field on one problem; raises if one of the project's own is wrong."""
    problem = options.cache / "panel.npz"
    np.savez(problem, y=Y, **model.asdict(), **expected)
    job = {"what": "load", "problem": str(problem), "requested": list(requested)}
    loaded = field.all(dict.fromkeys(field.processes, job))
    errors = {name: float(f"{answer['error']:.1e}") for name, answer in loaded.items()}
    for name in ours:
        if not errors.get(name, 0.0) < LARGEST_ERROR:
            raise ArithmeticError(f"{name} is off by {errors[name]} of the largest entry")
    return {
        "series": len(Y),
        "size": [model.m, model.p, model.r, Y.shape[1]],
        "errors": errors,
        "rows": field.race(list(loaded), "row", seconds=turn),
        "left out": dict(field.left_out),
    }


def told(options, label: str, found: dict, ours: str) -> None:
    middle = {name: np.median(times) for name, times in found["rows"].items()}
    ratios = ", ".join(f"{x} {t / middle[ours]:.3g}" for x, t in middle.items() if x != ours)
    say(options, f"{label}: {ours} {1e3 * middle[ours]:.3g} ms; over it: {ratios}")


def measure_shared(options) -> dict:
    J, model = (100 if options.quick else 1000), StateSpace(**seasonal_arrays())
    Y = drawn(model, J, 200, np.random.default_rng(12))  # noqa: N806
    # The readable engine: NumPy, one series after the other, held to complex steps by the tests.
    l, _, bars = panel.loglike_and_grad(Y, model, "reference")
    expected = {"value": l.sum()} | {f"bar {x}": G for x, G in bars.asdict().items()}
    names = ["panel", "panel: loop", "panel: loop, kernel", "panel: dynamax", "panel: JAX"]
    with Field(names, options, **AS_INSTALLED) as field:
        found = race(field, Y, model, expected, NAMES, options, names[:3])
    told(options, "shared", found, "panel")
    return found


def measure_own(options) -> dict:
    found, J = {}, 40 if options.quick else 200
    names = ["own", "own: two threads", "own: loop", "own: loop, kernel"]
    with Field(names, options, **AS_INSTALLED) as field:
        for m, p, n in OWN_SIZES[:2] if options.quick else OWN_SIZES:
            rng = np.random.default_rng(m)
            model = StateSpace(**random_model(m, p, min(m, 2), rng=rng))
            Y = drawn(model, J, n, rng)  # noqa: N806
            l, _, bars = panel.loglike_and_grad(Y, many.models_of(model, J), "reference")
            # The contenders give the gradients of own arrays, T and Q, series by series.
            expected = {"value": l.sum(), "bar T": bars.T, "bar Q": bars.Q}
            field.left_out.clear()
            label = f"m = {m}, n = {n}"
            found[label] = race(field, Y, model, expected, ("T", "Q"), options, names, LONG_TURN)
            told(options, label, found[label], "own")
    return found


def hierarchical_truth(Y, model) -> dict:  # noqa: N803
    """The log-density and its gradient, from single series."""
    mean, log_sd, log_H, log_Q, *drift = many.point(len(Y))
    value, slope = 0.0, np.zeros(4 + len(Y))
    H, Q = np.exp(log_H), np.exp(log_Q)
    for j, (y, c) in enumerate(zip(Y, drift, strict=True)):
        arrays = model.asdict() | {"c": [c], "H": [[H]], "Q": [[Q]]}
        l, _, bars = loglike_and_grad(y, StateSpace(**arrays))
        value += l
        slope[2:4] += H * bars.H.item(), Q * bars.Q.item()
        slope[4 + j] = bars.c.item()
    common, z = many.point(len(Y))[:4], (np.array(drift) - mean) / np.exp(log_sd)
    value += -(common**2).sum() / 2 - (z**2).sum() / 2 - len(Y) * log_sd
    value += -(4 + len(Y)) * np.log(2 * np.pi) / 2
    slope[:4] -= common
    slope[0] += (z / np.exp(log_sd)).sum()
    slope[1] += (z**2 - 1).sum()
    slope[4:] -= z / np.exp(log_sd)
    return {"value": value, "bar theta": slope}


def measure_hierarchical(options) -> dict:
    one = np.eye(1)
    model = StateSpace([0.0], 10 * one, [0.0], [0.0], T=one, Z=one, R=one, H=one, Q=one)
    found = {}
    plan = {
        f"{FEW} series": (FEW, ["PyMC: ours", "PyMC: filters"]),
        "500 series": (50 if options.quick else 500, ["PyMC: ours"]),
    }
    for label, (J, names) in plan.items():
        rng = np.random.default_rng(J)
        Y = rng.normal(size=(J, 30)).cumsum(axis=1) / 2 + rng.normal(size=(J, 30))  # noqa: N806
        Y = Y[:, :, np.newaxis]  # noqa: N806
        with Field(names, options, **AS_INSTALLED) as field:
            truth = hierarchical_truth(Y, model)
            found[label] = race(field, Y, model, truth, ("theta",), options, names[:1])
        told(options, f"hierarchical, {label}", found[label], names[0])
    return found


def local_level(theta):
    variances = np.exp(theta)[:, :, np.newaxis, np.newaxis]
    return {"H": variances[:, 0], "Q": variances[:, 1]}


def measure_fits(options) -> dict:
    """Local levels of 50 steps, 5000 in a piece; and SciPy on some of them, one by one."""
    J, piece, n = (10_000 if options.quick else 100_000), 5000, 50
    one = np.eye(1)
    walk = StateSpace([0.0], 10 * one, [0.0], [0.0], T=one, Z=one, R=one, H=one, Q=one)
    counts = dict.fromkeys(("series", "converged", "evaluations"), 0)
    busy = clock = 0.0
    for first in range(0, J, piece):
        kept = options.cache / f"fits-{first}.npz"
        rng = np.random.default_rng(first)
        sizes = np.exp(rng.normal(size=(piece, 1)) / 2)
        Y = (sizes * rng.normal(size=(piece, n))).cumsum(axis=1) + rng.normal(size=(piece, n))  # noqa: N806
        Y = Y[:, :, np.newaxis]  # noqa: N806
        if not kept.exists():
            before, since = process_time(), perf_counter()
            fits = fit(Y, walk, local_level, [0.0, 0.0], threads=options.threads)
            spent = np.array([process_time() - before, perf_counter() - since])
            told = ("params", "value", "converged", "evaluations")
            np.savez(kept, spent=spent, **{x: getattr(fits, x) for x in told})
        with np.load(kept) as old:
            counts["series"] += piece
            counts["converged"] += int(old["converged"].sum())
            counts["evaluations"] += int(old["evaluations"].sum())
            busy, clock = busy + old["spent"][0], clock + old["spent"][1]
            params, value = old["params"], old["value"]
        say(options, f"{first + piece} of {J} series are fitted")
    few = 20  # of the last piece
    before, worse = process_time(), []
    for j in range(few):

        def down(theta, j=j):
            H, Q = np.exp(theta)[:, None, None]
            l, _, bars = loglike_and_grad(Y[j], StateSpace(**(walk.asdict() | {"H": H, "Q": Q})))
            return -l, -np.array([bars.H.item() * H.item(), bars.Q.item() * Q.item()])

        found = minimize(down, np.zeros(2), jac=True, method="L-BFGS-B")
        worse.append(-found.fun - value[j])
    alone = (process_time() - before) / few
    at_the_edge = int((params < -8).any(axis=1).sum())
    say(options, f"a fit takes {1e6 * busy / counts['series']:.0f} us, alone {1e6 * alone:.0f}")
    return counts | {
        "steps": n, "threads": options.threads, "processor seconds": round(busy, 2),
        "seconds": round(clock, 2), "SciPy, seconds each": float(f"{alone:.3e}"),
        "SciPy is better by at most": float(f"{max(worse):.1e}"),
        "a variance is zero, of the last piece": at_the_edge,
    }  # fmt: skip


PARTS = {
    "shared": measure_shared,
    "own": measure_own,
    "hierarchical": measure_hierarchical,
    "fits": measure_fits,
}


def main(options) -> None:
    import json

    record = json.loads(options.record.read_text()) if options.record.exists() else {}
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    for name in options.only:
        say(options, f"-- {name}")
        record[name] = PARTS[name](options) | {"load before": load}
        write_record(record | {"machine": machine()}, options.record)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--quick", action="store_true", help="fewer series (a trial)")
    parser.add_argument("--seconds", type=float, default=12.0, help="budget of each race")
    parser.add_argument("--threads", type=int, default=2, help="for the fits")
    parser.add_argument("--record", type=Path, default=RECORD, help="file to write")
    parser.add_argument("--cache", type=Path, help="folder that keeps what is compiled and fitted")
    parser.add_argument("--python", type=named_python, nargs="+", default=[], metavar="NAME=FILE")
    options = parser.parse_args()
    options.began, options.python = perf_counter(), dict(options.python)
    if options.quick:
        options.seconds = min(options.seconds, 2.0)
        if options.record == RECORD:
            parser.error("a trial does not replace the record: say --record FILE")
    with tempfile.TemporaryDirectory() as folder:
        options.cache = (options.cache or Path(folder)).resolve()
        options.cache.mkdir(parents=True, exist_ok=True)
        main(options)
