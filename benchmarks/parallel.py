"""Value and gradient of a long series: all steps at once, scans, and JAX's own derivatives.

    python benchmarks/parallel.py [--only PART ...] [--quick] [--record FILE]

times them on the device on which JAX runs by default, and writes what it finds beside the record
of other devices. Meant for a GPU; on a CPU the compiled pass is the one to beat, and takes part.
On a GPU set XLA_FLAGS=--xla_gpu_enable_triton_gemm=false: without it XLA of JAX 0.11.2 stopped in a
check in the derivative of the associative scan, at 10,000 steps.

Parts: ``single``, one series; ``batch``, parameter sets under ``jax.vmap``; ``memory``, what XLA
sets aside; ``sampler``, seconds a gradient in NumPyro's NUTS on a local linear trend of 10,000
steps (needs numpyro, and is asked for by name). Contenders take turns. The associative scan is the
filter of Särkkä and García-Fernández (2021), doi:10.1109/TAC.2020.2976316, for constant arrays,
written for JAX to differentiate.

The rows of the NVIDIA H200 in the record were not made by this script, and not by the package's
way of today: they come from the study before it, in which each single step was an element of the
tree, both ways. They say so themselves, under "source".
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np

from helpers.datasets import random_model, simulate
from helpers.kalman.jax import _with_W, loglike, scans
from helpers.timing import machine, write_record

RECORD = Path(__file__).parent / "results" / "parallel.json"
SIZES = ((13, 1, 1000), (4, 1, 10_000), (13, 1, 10_000), (4, 1, 100_000), (13, 1, 100_000),
         (50, 5, 2000), (4, 1, 1_000_000))  # fmt: skip
BATCHES = ((64, 13, 1, 1000), (256, 13, 1, 200), (1024, 4, 1, 200), (10_000, 2, 1, 100))
MEMORY = ((4, 1, 100_000), (13, 1, 100_000))
LONGEST_SCAN = 10_000  # steps that contenders which go one by one are given
TURNS = 5


def by_scan(*arrays):
    """The filter as one scan, for JAX to differentiate."""
    return scans.filter_scan(_with_W(*arrays), ("l",))["l"]


def by_associative_scan(*arrays):
    """The filter of Särkkä and García-Fernández, for JAX to differentiate; no gaps."""
    y, a0, P0, c, d, T, Z, H, W = _with_W(*arrays)
    I, x = jnp.eye(len(a0)), y - d  # noqa: E741

    def element(a, P, Phi, x):
        """Of a step from the prediction a, P; Phi is what a state before it is then."""
        S_inv = jnp.linalg.inv(Z @ P @ Z.T + H)
        K, v, seen = P @ Z.T @ S_inv, x - Z @ a, Z @ Phi
        J = I - K @ Z
        return J @ Phi, a + K @ v, J @ P, seen.T @ S_inv @ v, seen.T @ S_inv @ seen

    @jax.vmap
    def compose(first, second):
        (A1, b1, C1, h1, U1), (A2, b2, C2, h2, U2) = first, second
        m = len(b1)
        given = jnp.linalg.solve(I + C1 @ U2, jnp.concatenate([A1, C1, (b1 + C1 @ h2)[:, None]], 1))
        X, Y, z = given[:, :m], given[:, m:-1], given[:, -1]
        U = X.T @ U2 @ A1 + U1
        return A2 @ X, A2 @ z + b2, A2 @ Y @ A2.T + C2, X.T @ (h2 - U2 @ b1) + h1, (U + U.T) / 2

    first = element(a0, P0, 0 * I, x[0])
    others = jax.vmap(partial(element, c, W, T))(x[1:])
    elements = jax.tree.map(lambda X, Y: jnp.concatenate([X[None], Y]), first, others)
    _, a, P, _, _ = jax.lax.associative_scan(compose, elements)
    a = jnp.concatenate([a0[None], a[:-1] @ T.T + c])
    P = jnp.concatenate([P0[None], T @ P[:-1] @ T.T + W])
    v, F = x - a @ Z.T, Z @ P @ Z.T + H
    u = jnp.linalg.solve(F, v[..., None])[..., 0]
    return -(y.shape[1] * jnp.log(2 * jnp.pi) + jnp.linalg.slogdet(F)[1] + (u * v).sum(1)) / 2


CONTENDERS = {
    "all steps at once": partial(loglike, method="parallel"),
    "two scans": partial(loglike, method="scan"),
    "compiled pass": partial(loglike, method="fused"),
    "autodiff of the associative scan": by_associative_scan,
    "autodiff of a scan": by_scan,
}


def contenders(n: int) -> dict:
    """Those that take part at so many steps."""
    short = n <= LONGEST_SCAN
    on_cpu = jax.default_backend() == "cpu"
    left_out = {"compiled pass": not on_cpu, "two scans": not (short or on_cpu),
                "autodiff of a scan": not (short or on_cpu)}  # fmt: skip
    return {x: f for x, f in CONTENDERS.items() if not left_out.get(x)}


def problem(m: int, p: int, n: int) -> list:
    rng = np.random.default_rng(m)
    arrays = random_model(m, p, rng=rng)
    return [jnp.asarray(X) for X in (simulate(n, rng, **arrays)[0], *arrays.values())]


def value_and_gradient(f):
    """Of the sum, with the gradients of y and all nine arrays."""
    return jax.jit(jax.value_and_grad(lambda *X: f(*X).sum(), argnums=tuple(range(10))))


def race(calls: dict) -> dict:
    """Medians of seconds a call, with those of compiling; errors are taken over the first."""
    found, results = {}, {}
    for name, call in calls.items():
        begin = perf_counter()
        results[name] = jax.block_until_ready(call())
        found[name] = {"compile": round(perf_counter() - begin, 1), "s": []}
    first = jax.tree.leaves(next(iter(results.values())))
    for name, result in results.items():
        error = max(
            float(abs(X - G).max() / abs(G).max())
            for X, G in zip(jax.tree.leaves(result), first, strict=True)
        )
        found[name]["error"] = float(f"{error:.0e}")
        if error > 1e-9:
            raise ArithmeticError(f"{name} is off by {error:.0e} of the largest entry")
    for _ in range(TURNS):
        for name, call in calls.items():
            begin = perf_counter()
            jax.block_until_ready(call())
            found[name]["s"].append(float(f"{perf_counter() - begin:.4g}"))
    return found


def measure_single(options) -> dict:
    found = {}
    for m, p, n in ((2, 1, 1000), (4, 1, 1000)) if options.quick else SIZES:
        arrays = problem(m, p, n)
        calls = {x: partial(value_and_gradient(f), *arrays) for x, f in contenders(n).items()}
        found[f"{m}, {p}, {n}"] = told(race(calls), f"m, p, n = {m}, {p}, {n}")
    return found


def measure_batch(options) -> dict:
    found = {}
    for J, m, p, n in ((16, 2, 1, 100),) if options.quick else BATCHES:
        y, *arrays, Q = problem(m, p, n)
        Qs = Q * jnp.linspace(0.5, 2, J)[:, None, None]  # noqa: N806
        calls = {}
        for name, f in contenders(n).items():
            if name != "autodiff of the associative scan":
                many = jax.jit(jax.vmap(value_and_gradient(f), (*[None] * 9, 0)))
                calls[name] = partial(many, y, *arrays, Qs)
        found[f"{J} of {m}, {p}, {n}"] = told(race(calls), f"{J} of m, p, n = {m}, {p}, {n}")
    return found


def measure_memory(options) -> dict:
    """MiB that XLA sets aside beside arguments and results."""
    found = {}
    for m, p, n in ((2, 1, 1000),) if options.quick else MEMORY:
        shapes = [jax.ShapeDtypeStruct(X.shape, X.dtype) for X in problem(m, p, n)]
        sizes = found[f"{m}, {p}, {n}"] = {}
        for name, f in contenders(n).items():
            if name != "compiled pass":  # which asks the system, and not XLA
                compiled = value_and_gradient(f).lower(*shapes).compile()
                sizes[name] = round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1)
        print(n, "steps, MiB:", sizes, flush=True)
    return found


def measure_sampler(options) -> dict:
    """Seconds a gradient in NUTS, after tuning: a local linear trend, three variances."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import NUTS

    # On a CPU a gradient of the slowest takes a tenth of a second.
    draws = 20 if jax.default_backend() == "cpu" else 100
    n, draws = (500, 5) if options.quick else (10_000, draws)
    T, Z, zero = jnp.array([[1.0, 1.0], [0.0, 1.0]]), jnp.array([[1.0, 0.0]]), jnp.zeros(2)  # noqa: N806
    rng = np.random.default_rng(0)
    slopes = rng.normal(0, 0.01, n).cumsum()
    y = (slopes + rng.normal(0, 0.3, n)).cumsum() + rng.normal(size=n)

    def trend(f):
        scales = numpyro.sample("scales", dist.HalfNormal(jnp.array([2.0, 1.0, 0.1])))
        variances = scales**2
        one = jnp.eye(2)
        l = f(y[:, None], zero, 10 * one, zero, jnp.zeros(1), T, Z, one,
              variances[:1, None], jnp.diag(variances[1:]))  # fmt: skip
        numpyro.factor("likelihood", l.sum())

    found = {}
    for name, f in contenders(n).items():
        kernel = NUTS(partial(trend, f))
        state = kernel.init(jax.random.key(0), draws, None, (), {})
        draw = jax.jit(lambda state, kernel=kernel: kernel.sample(state, (), {}))
        for _ in range(draws):  # the first compiles
            state = draw(state)
        steps, begin = 0, perf_counter()
        for _ in range(draws):
            state = draw(state)
            steps += int(state.num_steps)
        spent = perf_counter() - begin
        found[name] = {"gradients": steps, "s": float(f"{spent / steps:.4g}")}
        print(n, "steps in NUTS:", name, found[name], flush=True)
    return {f"local linear trend, {n}": found}


def told(found: dict, label: str) -> dict:
    print(label, {x: f"{1e3 * np.median(row['s']):.3g} ms" for x, row in found.items()}, flush=True)
    return found


PARTS = {
    "single": measure_single,
    "batch": measure_batch,
    "memory": measure_memory,
    "sampler": measure_sampler,
}


def main(options) -> None:
    jax.config.update("jax_enable_x64", True)
    device = jax.devices()[0].device_kind
    record = json.loads(options.record.read_text()) if options.record.exists() else {}
    found = {} if options.quick else record.get(device, {})
    for name in options.only:
        found[name] = PARTS[name](options)
    found |= {"machine": machine(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    write_record(record | {device: found}, options.record)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS)[:3], metavar="PART")
    parser.add_argument("--quick", action="store_true", help="short series (a trial)")
    parser.add_argument("--record", type=Path, default=RECORD, help="file to write")
    options = parser.parse_args()
    if options.quick and options.record == RECORD:
        parser.error("a trial does not replace the record: say --record FILE")
    main(options)
