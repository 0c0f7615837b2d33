"""Does 0003-closed-form-gradient.patch pay? Run with the patched pymc-extras on the path.

    PYTHONPATH=<patched checkout> python contrib/pymc-extras/measure.py [--mode NUMBA]

Compiles value and all gradients with StandardFilter and with ClosedFormFilter, one after the other,
and times them in turns on three sizes, float64. The compile times need empty caches:
``PYTENSOR_FLAGS=base_compiledir=<new folder>`` and ``NUMBA_CACHE_DIR=<new folder>``.
"""

from __future__ import annotations

import argparse
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
    """The gradients of symmetric matrices, of which autodiff gives what the triangle that it reads
    makes of them."""
    names = ["loglike", *list(NDIM)[1:]]
    return [
        (x + x.T) / 2 if name in ("P0", "H", "Q") else x
        for name, x in zip(names, answers, strict=True)
    ]


def main(mode: str) -> None:
    x = pt.vector("x")
    pytensor.function([x], x + 1, mode=mode)(np.ones(2))
    functions = {}
    for kind in (StandardFilter, ClosedFormFilter):
        start = perf_counter()
        functions[kind.__name__] = compiled(kind, mode)
        functions[kind.__name__](*problem(*SIZES[0]))
        print(f"{kind.__name__:18} first gradient {perf_counter() - start:7.1f} s", flush=True)
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
    main(parser.parse_args().mode)
