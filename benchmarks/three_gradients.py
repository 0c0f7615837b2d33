"""Three gradients of one filter: seconds to run, seconds to compile, and errors.

Autodiff of the scan, the closed-form pullback of one step inside the scan, and NumPy by hand, for
the gradient of the log-likelihood with respect to a0 alone and to all arrays.  It takes about a
quarter of an hour, most of it to compile with empty caches, and writes
``results/three_gradients.json``.

    python benchmarks/three_gradients.py [--repeats 50] [--only compile|run] [--record FILE]

With ``--only``, the other half of the record stays as it is.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.builders import OpFromGraph

from helpers.checks import complex_step, relative_error, symmetrize
from helpers.datasets import local_level_arrays, nile, random_model, simulate, structural_example
from helpers.kalman import StateSpace, loglike
from helpers.kalman.recursions import LOG_2PI, mask
from helpers.kalman.reference import FilterOutputs, kalman_filter, reverse, smoother_form
from helpers.kalman.scan import filter_graph, step_pullback, symbolic_model
from helpers.statespace import NAMES, SYMMETRIC, Gradients
from helpers.timing import Timings, compare, machine, write_record

RECORD = Path(__file__).parent / "results" / "three_gradients.json"
BACKENDS = {"Numba": "NUMBA", "C": "CVM"}
WITH_RESPECT_TO = {"a0 alone": ("a0",), "all arrays": ("y", *NAMES)}
SIZES = (1, 3, 10, 30, 60)

# A PyTensor from pip has no BLAS to link C code to: say so beforehand, and it neither looks for
# one nor warns.  Most matrix products of the C backend are then calls of NumPy.
pytensor.config.blas__ldflags = ""
logging.getLogger("pytensor.tensor.blas").setLevel(logging.ERROR)


# --- the contenders -------------------------------------------------------------------------------


def joseph_step(y, a, P, c, d, T, Z, H, W):
    """The step as "Three gradients, one answer" writes it: Joseph's form by its two large products.

    The package's own :func:`helpers.kalman.scan.kalman_step` returns the same and spares them.
    """
    missing = pt.isnan(y)
    o = 1.0 - missing
    y, (d, Z, H) = pt.switch(missing, 0.0, y), mask(o, d, Z, H)
    y_hat, F = Z @ a + d, Z @ P @ Z.T + H
    v, C = y - y_hat, pt.linalg.cholesky(F + pt.diag(1.0 - o))
    u = pt.linalg.cho_solve((C, True), v)
    Kf = pt.linalg.cho_solve((C, True), Z @ P.T).T
    J = pt.eye(a.shape[0]) - Kf @ Z
    a_filt, P_filt = a + Kf @ v, J @ P @ J.T + Kf @ H @ Kf.T
    l = -(o.sum() * LOG_2PI + 2 * pt.log(pt.diag(C)).sum() + v @ u) / 2
    return [a_filt, T @ a_filt + c, y_hat, P_filt, T @ P_filt @ T.T + W, F, l]


def sealed(inline: bool = False) -> OpFromGraph:
    """:func:`joseph_step` as an Op with the closed-form pullback."""
    ndims = {"y": 1, "a": 1, "P": 2, "c": 1, "d": 1, "T": 2, "Z": 2, "H": 2, "W": 2}
    inputs = [pt.tensor(name, shape=(None,) * ndim) for name, ndim in ndims.items()]
    return OpFromGraph(inputs, joseph_step(*inputs), pullback=step_pullback, inline=inline)


METHODS = {
    "autodiff": joseph_step,
    "step Op": sealed(),
    "step Op, inlined": sealed(inline=True),
}


def compile_gradient(method: str, backend: str, names: tuple[str, ...]):
    """Function of y and the nine arrays: the log-likelihood, then its gradients."""
    inputs = symbolic_model()
    value = filter_graph(*inputs.values(), step=METHODS[method]).l.sum()
    gradients = pt.grad(value, [inputs[name] for name in names])
    return pytensor.function(
        list(inputs.values()), [value, *gradients], mode=BACKENDS[backend], trust_input=True
    )


def compile_forward(backend: str):
    """Function of y and the nine arrays: the log-likelihood, and what the moments were."""
    inputs = symbolic_model()
    out = filter_graph(*inputs.values(), step=joseph_step)
    return pytensor.function(
        list(inputs.values()),
        [out.l.sum(), out.a_pred, out.P_pred, out.a_filt, out.P_filt],
        mode=BACKENDS[backend],
        trust_input=True,
    )


def gains(y, model: StateSpace, out: FilterOutputs):
    """u (n, p), F_inv (n, p, p), Kf (n, m, p) of all steps at once, from the predictions."""
    M = out.P_pred @ model.Z.T
    F_inv = np.linalg.inv(model.Z @ M + model.H)
    v = y - out.a_pred @ model.Z.T - model.d
    return (F_inv @ v[..., np.newaxis])[..., 0], F_inv, M @ F_inv


def vector_recursion(y, model: StateSpace, out: FilterOutputs) -> np.ndarray:
    """Gradient (m,) for a0 alone: one vector recursion, all else in batches.

    No gaps, no array that varies with time.  Of the filter's outputs only the predictions.
    """
    u, _, Kf = gains(y, model, out)
    L = model.T - model.T @ Kf @ model.Z
    Zu = u @ model.Z
    r = np.zeros(model.m)
    for t in reversed(range(len(y))):
        r = Zu[t] + r @ L[t]
    return r


def batched_smoother(y, model: StateSpace, out: FilterOutputs) -> tuple[np.ndarray, Gradients]:
    """All gradients by `smoother_form`'s formulas: two recursions in the loop, all else in batches.

    No gaps, no array that varies with time.  Of the filter's outputs only the moments.
    """
    T, Z, R, Q, m = model.T, model.Z, model.R, model.Q, model.m
    u, F_inv, Kf = gains(y, model, out)
    K = T @ Kf
    L = T - K @ Z
    L_T, Zu, ZFZ = np.swapaxes(L, -1, -2), u @ Z, Z.T @ F_inv @ Z
    r, N = np.zeros((len(y) + 1, m)), np.zeros((len(y) + 1, m, m))
    for t in reversed(range(len(y))):
        r[t] = Zu[t] + r[t + 1] @ L[t]
        N[t] = symmetrize(ZFZ[t] + L_T[t] @ N[t + 1] @ L[t])
    r0, N0, r, N = r[0], N[0], r[1:], N[1:]
    K_T, NTP = np.swapaxes(K, -1, -2), N @ T @ out.P_filt
    e = u - (K_T @ r[..., np.newaxis])[..., 0]
    a_smooth = out.a_filt + (out.P_filt @ (r @ T)[..., np.newaxis])[..., 0]
    W_bar = (r.T @ r - N.sum(axis=0)) / 2
    return -e, Gradients(
        a0=r0,
        P0=(np.outer(r0, r0) - N0) / 2,
        c=r.sum(axis=0),
        d=e.sum(axis=0),
        T=r.T @ a_smooth - NTP.sum(axis=0),
        Z=e.T @ a_smooth + (K_T @ NTP - np.swapaxes(Kf, -1, -2)).sum(axis=0),
        R=2 * W_bar @ R @ Q,
        H=symmetrize(e.T @ e - (F_inv + K_T @ N @ K).sum(axis=0)) / 2,
        Q=symmetrize(R.T @ W_bar @ R),
    )


# --- what is measured -----------------------------------------------------------------------------


def errors(y, model: StateSpace, functions: dict) -> dict[str, dict[str, float]]:
    """Relative error of each gradient of each method, against the complex step."""
    arrays = {"y": y, **model.asdict()}

    def value(name, X):
        return loglike(X, model) if name == "y" else loglike(y, replace(model, **{name: X}))

    reference = {
        name: complex_step(partial(value, name), X, symmetric=name in SYMMETRIC)
        for name, X in arrays.items()
    }
    filtered = kalman_filter(y, model)
    weights = FilterOutputs(l=np.ones(len(y)))
    found = {
        "reverse": reverse(model, filtered, weights),
        "smoother": smoother_form(model, filtered),
        "batched smoother": batched_smoother(y, model, filtered.out),
    }
    found = {method: {"y": dy, **grads.asdict()} for method, (dy, grads) in found.items()}
    for (method, backend, names), function in functions.items():
        if names == "all arrays":
            gradients = function(*arrays.values())[1:]
            found[f"{method}, {backend}"] = dict(zip(arrays, gradients, strict=True))
        else:
            found[f"{method}, {backend}, a0 alone"] = {"a0": function(*arrays.values())[1]}
    found["vector recursion"] = {"a0": vector_recursion(y, model, filtered.out)}
    return {
        method: {
            name: relative_error(symmetrize(G) if name in SYMMETRIC else G, reference[name])
            for name, G in gradients.items()
        }
        for method, gradients in found.items()
    }


def timings(
    y, model: StateSpace, functions: dict, forwards: dict, names: str, repeats: int, label: str
) -> Timings:
    """Value and gradient by every method; by hand also forward and backward apart."""
    args = (y, *model.asdict().values())
    filtered = kalman_filter(y, model)
    weights = FilterOutputs(l=np.ones(len(y)))
    contenders = {
        f"{method}, {backend}": partial(function, *args)
        for (method, backend, wrt), function in functions.items()
        if wrt == names
    }
    contenders["forward, NumPy"] = partial(kalman_filter, y, model)
    for backend, function in forwards.items():
        contenders[f"forward, {backend}"] = partial(function, *args)
    if names == "a0 alone":
        backward = {"vector recursion": partial(vector_recursion, y, model, filtered.out)}
    else:
        backward = {
            "reverse": partial(reverse, model, filtered, weights),
            "smoother": partial(smoother_form, model, filtered),
            "batched smoother": partial(batched_smoother, y, model, filtered.out),
        }
    measured = compare(contenders | backward, repeats=repeats, label=label)
    # By hand the two halves are calls of their own: a round's sum is what both took in that round.
    seconds = dict(measured.seconds)
    for half in backward:
        for forward in ("NumPy", *forwards) if half not in ("reverse", "smoother") else ("NumPy",):
            pairs = zip(seconds[f"forward, {forward}"], seconds[half], strict=True)
            seconds[f"{half}, forward in {forward}"] = tuple(map(sum, pairs))
    return Timings(seconds, measured.label, measured.machine, measured.date)


def compile_times(method: str, backend: str) -> dict[str, float]:
    """Seconds from nothing to the first gradient of all arrays: with empty caches, then filled."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [os.environ.get("PYTENSOR_FLAGS"), f"base_compiledir={folder}"]
        environment = os.environ | {
            "PYTENSOR_FLAGS": ",".join(filter(None, flags)),
            "NUMBA_CACHE_DIR": str(Path(folder) / "numba"),
        }
        command = [sys.executable, __file__, "--compile", method, backend]

        def seconds():
            run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            return json.loads(run.stdout)

        return {"cold": seconds(), "warm": seconds()}


def compile_once(method: str, backend: str) -> float:
    """Seconds to build, rewrite, compile and call once; the backend itself was started before."""
    y, model = nile().y, StateSpace(**local_level_arrays())
    x = pt.vector("x")
    pytensor.function([x], x + 1, mode=BACKENDS[backend])(np.ones(2))
    start = perf_counter()
    compile_gradient(method, backend, WITH_RESPECT_TO["all arrays"])(y, *model.asdict().values())
    return perf_counter() - start


def sized_example(m: int, n: int = 100) -> tuple[np.ndarray, StateSpace]:
    arrays = random_model(m, rng=m)
    return simulate(n, m, **arrays)[0], StateSpace(**arrays)


def measure_compilation(say: Callable[[str], None]) -> dict:
    found = {}
    for backend in BACKENDS:
        for method in METHODS:
            say(f"compile time of {method}, {backend}")
            found[f"{method}, {backend}"] = compile_times(method, backend)
    return {"compile": {"machine": machine(), "seconds": found}}


def measure_runs(say: Callable[[str], None], repeats: int) -> dict:
    structural, structural_y, _ = structural_example()
    examples = {
        "structural": (structural_y, StateSpace(**structural)),
        "nile": (nile().y, StateSpace(**local_level_arrays())),
    }
    functions = {}
    for method, backend, wrt in product(METHODS, BACKENDS, WITH_RESPECT_TO):
        say(f"compiling {method}, {backend}, {wrt}")
        functions[method, backend, wrt] = compile_gradient(method, backend, WITH_RESPECT_TO[wrt])
    forwards = {backend: compile_forward(backend) for backend in BACKENDS}

    found, measured = {}, {}
    for name, (y, model) in examples.items():
        say(f"errors, {name}")
        found[name] = errors(y, model, functions)
        for wrt in WITH_RESPECT_TO:
            label = f"{name}, {wrt}"
            say(f"run time, {label}")
            measured[label] = timings(y, model, functions, forwards, wrt, repeats, label)

    in_numba = {key: f for key, f in functions.items() if key[1:] == ("Numba", "all arrays")}
    forward = {"Numba": forwards["Numba"]}
    for m in SIZES:
        label = f"m = {m}"
        say(f"run time, {label}")
        measured[label] = timings(
            *sized_example(m), in_numba, forward, "all arrays", repeats, label
        )
    for label, times in measured.items():
        print(f"\n{label}\n\n{times.table()}")
    return {
        "machine": machine(),
        "errors": found,
        # Four digits are more than a clock gives, and keep the record small.
        "timings": {
            label: {
                "seconds": {k: [float(f"{s:.3e}") for s in t] for k, t in times.seconds.items()},
                "label": times.label,
                "date": times.date,
            }
            for label, times in measured.items()
        },
    }


def main(repeats: int, only: str | None, path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8")) if only and path.exists() else {}
    start = perf_counter()

    def say(what: str) -> None:
        print(f"{perf_counter() - start:5.0f} s  {what}", flush=True)

    if only != "run":
        record |= measure_compilation(say)
    if only != "compile":
        record |= measure_runs(say, repeats)
    write_record(record, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=50, help="rounds to time (default 50)")
    parser.add_argument("--record", type=Path, default=RECORD, help="file to write")
    parser.add_argument("--only", choices=["compile", "run"], help="measure one half again")
    parser.add_argument("--compile", nargs=2, metavar=("METHOD", "BACKEND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        print(json.dumps(compile_once(*options.compile)))
    else:
        main(options.repeats, options.only, options.record)
