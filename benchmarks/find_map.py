"""Newton's method and Laplace's approximation on a PyMC model: seconds from model to answer.

Level, trend, season of twelve and noise on 200 steps, 30 parameters (`peers.pymc_models`).
``find_MAP(use_hess=True, method="trust-ncg")`` and ``fit_laplace`` of pymc-extras, with the filters
`closed_form` and `standard`, each in three modes of PyTensor: Numba; JAX; and Python, where nothing
is compiled and each Op is run by Python.

    python benchmarks/find_map.py [--only NAME ...] [--record FILE]

Each contender has a process to itself, on one thread, first with empty caches of PyTensor, Numba
and JAX, then with what the first process left there. The kernels of the closed form are compiled
beforehand: that is done once on a machine, and `helpers.kalman.warmup` says how long it takes. Who
is not done in ten minutes (``--patience``, in seconds) is recorded as such. It takes up to an hour
and writes ``results/find_map.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from itertools import product
from pathlib import Path
from time import perf_counter

import numpy as np
from one_core import ONE_THREAD

from helpers.timing import machine, write_record

RECORD = Path(__file__).parent / "results" / "find_map.json"
SEASON, N = 12, 200
FILTERS, MODES = ("closed_form", "standard"), ("Python", "Numba", "JAX")
JOBS = ("find_MAP", "fit_laplace")


def run(job: str, filter_type: str, mode: str) -> dict:
    """Seconds from the model to the answer, and the answer; of `find_MAP` also those per call."""
    import pymc_extras
    from peers import pymc_models
    from pymc_extras.inference.laplace_approx import find_map
    from pytensor.compile.mode import Mode

    warnings.simplefilter("ignore")
    pymc_models.register()
    compiled = {"mode": Mode("py", "fast_run") if mode == "Python" else mode.upper()}
    model = pymc_models.structural(SEASON, N, filter_type)
    how = {"progressbar": False, "random_seed": 1, "compile_kwargs": compiled}
    minimize, given = find_map.minimize, []

    def noted(**arguments):
        given.append(arguments)
        return minimize(**arguments)

    find_map.minimize = noted
    start = perf_counter()
    with model:
        if job == "find_MAP":
            found = pymc_extras.find_MAP(
                method="trust-ncg", use_grad=True, use_hess=True, compute_hessian=False, **how
            )
        else:
            found = pymc_extras.fit_laplace(draws=500, **how)
    seconds = perf_counter() - start
    optimum, fit = found.optimizer_result, found.fit
    answer = {
        "seconds": seconds, "steps": int(optimum["nit"]), "success": bool(optimum["success"]),
        "log density": -float(optimum["fun"]),
    }  # fmt: skip
    if job == "find_MAP":
        answer["seconds per call"] = per_call(**given[0], x=optimum["x"])
    if job == "fit_laplace":
        answer["standard errors"] = np.sqrt(np.diag(fit["covariance_matrix"].values)).tolist()
    return answer


def per_call(f, x, args=(), seconds=3.0, **ignored) -> float:
    """The median of the value, the gradient and the Hessian at once, calls in a row at x."""
    taken, end = [], perf_counter() + seconds
    while len(taken) < 5 or perf_counter() < end:
        start = perf_counter()
        for result in f(x, *args):
            np.asarray(result)  # some answer before they have computed
        taken.append(perf_counter() - start)
    return float(np.median(taken))


def measure(job: str, filter_type: str, mode: str, patience: float) -> dict:
    """The answers of a process with empty caches and of one after it."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "PYTENSOR_FLAGS": f"base_compiledir={folder}",
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax",
        }
        answers = {}
        for when in ("cold", "warm"):
            command = [sys.executable, __file__, "--job", job, filter_type, mode]
            try:
                done = subprocess.run(
                    command, env=os.environ | ONE_THREAD | caches, capture_output=True, text=True,
                    timeout=patience,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return {"failed": f"not done after {patience:.0f} s"}
            if done.returncode:
                return {"failed": " ".join(done.stderr.strip().splitlines()[-1:])[:200]}
            answers[when] = json.loads(done.stdout.splitlines()[-1])
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", help="contenders, such as 'closed_form, Python'")
    parser.add_argument("--patience", type=float, default=600.0)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print(json.dumps(run(*options.job)))
        return
    found = {}
    for job, filter_type, mode in product(JOBS, FILTERS, MODES):
        name = f"{filter_type}, {mode}"
        if options.only and name not in options.only:
            continue
        answers = found.setdefault(job, {})[name] = measure(
            job, filter_type, mode, options.patience
        )
        said = answers.get("failed") or ", ".join(
            f"{w} {a['seconds']:.1f} s" for w, a in answers.items()
        )
        if "seconds per call" in answers.get("warm", {}):
            said += f", {1e3 * answers['warm']['seconds per call']:.2f} ms a call"
        print(f"{job:12s} {name:22s} {said}", flush=True)
    record = {"machine": machine(), "season": SEASON, "n": N, "found": found}
    write_record(record, options.record)


if __name__ == "__main__":
    main()
