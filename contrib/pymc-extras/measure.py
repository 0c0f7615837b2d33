"""Does 0003-closed-form-gradient.patch pay? Run with the patched pymc-extras on the path.

    PYTHONPATH=<patched checkout> python contrib/pymc-extras/measure.py [--mode NUMBA]

Times value and all gradients of StandardFilter and ClosedFormFilter in turns on three sizes.
Their first gradients are timed before, each in a process of its own with empty caches, so that
neither finds what the other has compiled.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from time import perf_counter

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc_extras.statespace.filters import ClosedFormFilter, StandardFilter

NDIM = {"y": 2, "a0": 1, "P0": 2, "c": 1, "d": 1, "T": 2, "Z": 2, "R": 2, "H": 2, "Q": 2}
SIZES = (4, 1, 2, 100), (10, 5, 5, 200), (20, 3, 5, 500)  # m, p, r, n
TURNS = 15


def compiled(filter_class, mode: str):
    inputs = [pt.tensor(name, dtype="float64", shape=(None,) * k) for name, k in NDIM.items()]
    loglike = filter_class().build_graph(*inputs)[-1].sum()
    outputs = [loglike, *pt.grad(loglike, inputs[1:])]
    return pytensor.function(inputs, outputs, mode=mode, trust_input=True)


def problem(m: int, p: int, r: int, n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(m)
    T = rng.standard_normal((m, m))
    T *= 0.9 / abs(np.linalg.eigvals(T)).max()
    Z, R = rng.standard_normal((p, m)), rng.standard_normal((m, r))
    y, zeros = rng.standard_normal((n, p)), np.zeros
    return [y, zeros(m), np.eye(m), zeros(m), zeros(p), T, Z, R, np.eye(p), np.eye(r)]


def symmetrised(answers: list) -> list:
    """Symmetric gradients of symmetric matrices: autodiff returns those for the one triangle that
    it reads."""
    names = ["loglike", *list(NDIM)[1:]]
    return [
        (x + x.T) / 2 if name in ("P0", "H", "Q") else x
        for name, x in zip(names, answers, strict=True)
    ]


FILTERS = {kind.__name__: kind for kind in (StandardFilter, ClosedFormFilter)}


def first_gradient(name: str, mode: str) -> None:
    """Compile a filter's gradient, call it once, and say how long that took."""
    x = pt.vector("x")
    pytensor.function([x], x + 1, mode=mode)(np.ones(2))
    start = perf_counter()
    compiled(FILTERS[name], mode)(*problem(*SIZES[0]))
    print(f"{name:18} first gradient {perf_counter() - start:7.1f} s", flush=True)


def main(mode: str) -> None:
    for name in FILTERS:
        with tempfile.TemporaryDirectory() as folder:
            flags = [os.environ.get("PYTENSOR_FLAGS"), f"base_compiledir={folder}"]
            empty = {
                "PYTENSOR_FLAGS": ",".join(filter(None, flags)), "NUMBA_CACHE_DIR": folder,
            }  # fmt: skip
            command = [sys.executable, __file__, "--mode", mode, "--first", name]
            subprocess.run(command, env=os.environ | empty, check=True)
    functions = {name: compiled(kind, mode) for name, kind in FILTERS.items()}
    for size in SIZES:
        arguments = problem(*size)
        answers = [symmetrised(f(*arguments)) for f in functions.values()]
        worst = max(abs(a - b).max() / abs(b).max() for a, b in zip(*answers, strict=True))
        times = {name: [] for name in functions}
        for _ in range(TURNS):
            for name, f in functions.items():
                start = perf_counter()
                f(*arguments)
                times[name].append(perf_counter() - start)
        standard, closed = (np.array(t) for t in times.values())
        low, high = np.quantile(standard / closed, [0.25, 0.75])
        print(
            f"{size!s:18} standard / closed form {np.median(standard) / np.median(closed):.2f} "
            f"({low:.2f} to {high:.2f}); answers differ by {worst:.0e}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", default="NUMBA")
    parser.add_argument("--first", choices=FILTERS, help="time this filter's first gradient alone")
    options = parser.parse_args()
    if options.first:
        first_gradient(options.first, options.mode)
    else:
        main(options.mode)
