"""When does sparse pay?  One layer, forward and backward, against dense frameworks and spconv.

f = 3, 8 -> 16 channels, float32, one thread, on 128 x 128 and 512 x 512 grids with random sites and
with blobs, from nearly nothing to nearly everything active. Whatever is sparse also searches its
output sites each time; whatever is dense is given its dense image. Every contender returns the
output and the gradients to its input, W and b; the package's also those of the ground state.
The record holds, for each setting and contender, the quartiles of the seconds and the ratio of
medians to the package's best with the extremes of the rounds, as (median, low, high).

    python benchmarks/sparse_crossover.py [--seconds 6] [--only 512] [--record FILE]

It takes about six minutes and writes ``results/sparse_crossover.json``. TensorFlow, PyTorch, JAX
and spconv are optional: what is missing is named, and left out.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from statistics import quantiles
from time import perf_counter

import numpy as np
import pytensor
import pytensor.tensor as pt
from numpy.lib.stride_tricks import sliding_window_view
from threadpoolctl import threadpool_info, threadpool_limits

from helpers.checks import relative_error
from helpers.sparse_conv import SparseValue, graph, rulebook, sparse_conv_2d, sparse_conv_2d_grad
from helpers.timing import Timings, compare, machine, write_record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from sparse_loops import loop_build_q, loop_grad_q  # noqa: E402

RECORD = Path(__file__).parent / "results" / "sparse_crossover.json"
F, N_IN, N_OUT = 3, 8, 16
GRIDS = (128, 512)
# Shares of active inputs (random sites), and of active outputs (blobs).
RANDOM = (0.001, 0.005, 0.012, 0.0315, 0.05, 0.1, 0.25)
BLOBS = (0.01, 0.05, 0.1, 0.25, 0.4, 0.6, 0.9)
LOOPS = 1000  # sites, above which the loops are not run: they take seconds
DENSE = ("TensorFlow", "PyTorch", "JAX")
OURS = "without Q"


# --- the images -----------------------------------------------------------------------------------


def random_sites(size: int, share: float, rng) -> np.ndarray:
    cells = np.sort(rng.choice(size * size, round(share * size * size), replace=False))
    return np.column_stack(np.divmod(cells, size))


def blob_sites(size: int, share: float, rng) -> np.ndarray:
    """Discs at random places, until that share of the outputs is active."""
    rows, columns = np.indices((size, size))
    covered = np.zeros((size, size), bool)
    while sliding_window_view(covered, (F, F)).any(axis=(2, 3)).mean() < share:
        row, column = rng.uniform(0, size, 2)
        radius = size * rng.uniform(0.02, 0.05)
        covered |= (rows - row) ** 2 + (columns - column) ** 2 < radius**2
    return np.argwhere(covered)


def layer(sites: np.ndarray, size: int, rng) -> dict:
    """Everything that any contender needs; a cotangent that is zero where no output is active."""

    def numbers(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    x = SparseValue(
        sites, numbers(len(sites), N_IN), (size, size, N_IN), ground_state=numbers(N_IN)
    )
    rules = rulebook(sites, x.shape, F)
    dY = numbers(len(rules.sites), N_OUT)
    dense_dY = np.zeros((size - F + 1, size - F + 1, N_OUT), np.float32)
    dense_dY[tuple(rules.sites.T)] = dY
    return {
        "x": x,
        "W": numbers(F * F * N_IN, N_OUT) / 8,
        "b": numbers(N_OUT),
        "dY": dY,
        "dt_out": np.zeros(N_OUT, np.float32),
        "dense_dY": dense_dY,
        "rules": rules,
    }


# --- the package, and the loops -------------------------------------------------------------------
# A contender is made from a layer, and is a function without arguments that returns arrays: the
# output, then dW and db. What else it computes is in its signature.


def loops(x, W, b, dY, **_):
    def run():
        _, Q = loop_build_q(x.sites, x.values, x.shape, F, x.ground_state)
        Y = Q @ W + b
        loop_grad_q(dY @ W.T, x.sites, x.values, x.shape, F)
        return Y, Q.T @ dY, dY.sum(axis=0)

    return run


def in_numpy(x, W, b, dY, dt_out, **_):
    def run():
        y = sparse_conv_2d(x, W, b, F)
        _, _, dW, db = sparse_conv_2d_grad(x, W, F, dY, dt_out)
        return y.values, dW, db

    return run


def compile_layer(conv: Callable):
    """Function of values, t, W, b, dY, dt_out, src, dst: Y, t_out, dM, dt, dW, db."""
    x = graph.symbolic_value(dtype="float32")
    W, b = pt.fmatrix("W"), pt.fvector("b")
    dY, dt_out = pt.fmatrix("dY"), pt.fvector("dt_out")
    rules = graph.symbolic_rules()
    y = conv(x, W, b, rules)
    loss = (y.values * dY).sum() + (y.ground_state * dt_out).sum()
    return pytensor.function(
        [*x, W, b, dY, dt_out, *rules],
        [*y, *pt.grad(loss, [*x, W, b])],
        mode="NUMBA",
        trust_input=True,
    )


def in_pytensor(function, x, W, b, dY, dt_out, **_):
    def run():
        rules = rulebook(x.sites, x.shape, F)
        Y, _, _, _, dW, db = function(
            x.values, x.ground_state, W, b, dY, dt_out, rules.src, rules.dst
        )
        return Y, dW, db

    return run


# --- dense frameworks, and spconv -----------------------------------------------------------------


def in_tensorflow():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)

    @tf.function
    def both(x, W, b, dY):
        with tf.GradientTape() as tape:
            tape.watch([x, W, b])
            y = tf.nn.conv2d(x, W, 1, "VALID") + b
        return y, *tape.gradient(y, [x, W, b], output_gradients=dY)

    def make(x, W, b, dense_dY, **_):
        args = [
            tf.constant(v)
            for v in (x.to_dense()[None], W.reshape(F, F, N_IN, N_OUT), b, dense_dY[None])
        ]

        def run():
            y, _, dW, db = both(*args)
            return y, dW, db

        return run

    return make


def in_jax():
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    import jax

    def conv(x, W, b):
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, W, (1, 1), "VALID", dimension_numbers=layout) + b

    @jax.jit
    def both(x, W, b, dY):
        y, pullback = jax.vjp(conv, x, W, b)
        return y, *pullback(dY)

    def make(x, W, b, dense_dY, **_):
        args = [
            jax.numpy.array(v)
            for v in (x.to_dense()[None], W.reshape(F, F, N_IN, N_OUT), b, dense_dY[None])
        ]

        def run():
            y, _, dW, db = jax.block_until_ready(both(*args))
            return y, dW, db

        return run

    return make


def in_torch():
    import torch

    torch.set_num_threads(1)

    def tensor(array, axes):  # channels last in memory too: its faster layout
        return torch.tensor(array).permute(axes).contiguous(memory_format=torch.channels_last)

    def make(x, W, b, dense_dY, **_):
        image = tensor(x.to_dense()[None], (0, 3, 1, 2)).requires_grad_()
        weight = tensor(W.reshape(F, F, N_IN, N_OUT), (3, 2, 0, 1)).requires_grad_()
        bias, dY = torch.tensor(b, requires_grad=True), tensor(dense_dY[None], (0, 3, 1, 2))

        def run():
            image.grad = weight.grad = bias.grad = None
            y = torch.nn.functional.conv2d(image, weight, bias)
            y.backward(dY)
            return y.detach().permute(0, 2, 3, 1), weight.grad.permute(2, 3, 1, 0), bias.grad

        return run

    return make


def in_spconv():
    import spconv.pytorch as spconv
    import torch
    from spconv.core import ConvAlgo
    from spconv.pytorch import ops

    torch.set_num_threads(1)
    ops.get_current_stream = lambda: 0  # its backward pass asks for CUDA's, on a CPU too

    def make(x, W, b, dY, rules, **_):
        conv = spconv.SparseConv2d(N_IN, N_OUT, F, bias=True, algo=ConvAlgo.Native)
        W_spconv = torch.tensor(W.reshape(F, F, N_IN, N_OUT)).permute(spconv_axes(conv))
        with torch.no_grad():
            conv.weight.copy_(W_spconv)
            conv.bias.copy_(torch.tensor(b))
        values = torch.tensor(x.values, requires_grad=True)
        indices = torch.tensor(np.insert(x.sites, 0, 0, axis=1).astype(np.int32))
        # Its output sites come in another order: the cotangent of each, found once.
        place = np.zeros(x.grid, np.int64)
        place[tuple(rules.sites.T)] = np.arange(len(rules.sites))

        def forward():
            return conv(spconv.SparseConvTensor(values, indices, list(x.grid), 1))

        order = place[tuple(forward().indices[:, 1:].numpy().T)]
        dY_there, back = torch.tensor(dY[order]), np.argsort(order)

        def run():
            values.grad = conv.weight.grad = conv.bias.grad = None
            y = forward()
            y.features.backward(dY_there)
            dW = conv.weight.grad.permute(*np.argsort(spconv_axes(conv)))
            return y.features.detach(), dW, conv.bias.grad

        return run, back

    def spconv_axes(conv):  # (f, f, n_in, n_out) or (n_out, f, f, n_in), by its version
        return (0, 1, 2, 3) if conv.weight.shape[0] == F else (3, 0, 1, 2)

    return make


def dense_makers(say) -> dict[str, Callable]:
    """Makers of the frameworks that are here; the others are named."""
    makers = {}
    for name, load in {
        "TensorFlow": in_tensorflow,
        "PyTorch": in_torch,
        "JAX": in_jax,
        "spconv": in_spconv,
    }.items():
        try:
            makers[name] = load()
        except ImportError as error:
            say(f"{name} is left out: {error}")
    return makers


def use_the_processor() -> None:
    """Start again without what ties OpenBLAS to an older processor's kernels.

    Such settings make digits the same on every machine. The frameworks bring their own kernels,
    which take no notice of them.
    """
    ties = os.environ.keys() & {"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"}
    if ties:
        for name in ties:
            del os.environ[name]
        os.execv(sys.executable, [sys.executable, *sys.argv])


def keep_memory() -> None:
    """Let malloc keep what it once got (glibc; elsewhere nothing happens).

    Otherwise one contender's large arrays go back to the system when it is done, and the next one
    pays for new pages: that is a cost of taking turns, and no contender's own.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    trim_threshold, mmap_max = -1, -4  # as in malloc.h
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)


# --- what is measured -----------------------------------------------------------------------------


def contenders_of(a: dict, functions: dict, makers: dict) -> dict[str, Callable]:
    """All that can run this layer, each checked against float64."""
    made = {
        "NumPy": in_numpy(**a),
        **{name: in_pytensor(function, **a) for name, function in functions.items()},
        **{name: make(**a) for name, make in makers.items() if name != "spconv"},
    }
    if len(a["x"].sites) <= LOOPS:
        made = {"loops": loops(**a)} | made
    x, rules = a["x"], a["rules"]
    for name, run in made.items():
        check(name, run(), a, x.values, x.ground_state, rules, dense=name in DENSE)
    if "spconv" in makers:
        made["spconv"], order = makers["spconv"](**a)
        # It knows no ground state: for it that is zero.
        y, dW, db = made["spconv"]()
        check("spconv", (y[order], dW, db), a, x.values, 0 * x.ground_state, rules, dense=False)
    return made


def check(name, found, a, values, ground_state, rules, dense: bool) -> None:
    x64 = SparseValue(a["x"].sites, values.astype(float), a["x"].shape, ground_state)
    W, b, dY = (a[key].astype(float) for key in ("W", "b", "dY"))
    y = sparse_conv_2d(x64, W, b, F)
    _, _, dW, db = sparse_conv_2d_grad(x64, W, F, dY, np.zeros(N_OUT))
    Y_found, dW_found, db_found = map(np.asarray, found)
    if dense:
        Y_found = Y_found[0][tuple(rules.sites.T)]
    pairs = ((Y_found, y.values), (dW_found.reshape(dW.shape), dW), (db_found, db))
    for value, reference in pairs:
        error = relative_error(value, reference)
        assert error < 1e-4, f"{name} computes something else: {error:.0e}"


def counts(a: dict) -> dict:
    """Floating-point operations of forward and backward, and the bytes of the arrays they touch."""
    rules, (h, w) = a["rules"], a["x"].grid
    a_in, a_out, pairs = (
        len(a["x"].sites),
        len(rules.sites),
        int((rules.src < len(a["x"].sites)).sum()),
    )
    product, cells = 2 * N_IN * N_OUT, (h - F + 1) * (w - F + 1)
    return {
        "a_in": a_in,
        "a_out": a_out,
        "pairs": pairs,
        "outputs": a_out / cells,
        "flops": {
            "dense": 3 * cells * F * F * product,
            "Q": 3 * a_out * F * F * product,
            "without Q": 3 * a_in * F * F * product,
        },
        "bytes": {
            "dense": 4 * 2 * (h * w * N_IN + cells * N_OUT),
            "Q": 4 * (2 * (a_in * N_IN + a_out * N_OUT) + 2 * a_out * F * F * N_IN),
            "rulebook": 4 * F * F * (a_in + a_out),
            "without Q": 4 * 2 * (a_in * N_IN + a_out * N_OUT),
        },
    }


def short(numbers) -> list[float]:
    """Four digits: more than a clock gives, and they keep the record small."""
    return [float(f"{x:.3e}") for x in numbers]


def verdict(times: Timings, facts: dict) -> str:
    dense = [name for name in DENSE if name in times.seconds]
    against = []
    if dense:
        best = min(dense, key=times.median)
        against.append(f"{times.ratio(best, OURS).median:.1f} x dense ({best})")
    for name in ("spconv", "loops", "NumPy", "with Q"):
        if name in times.seconds:
            against.append(f"{times.ratio(name, OURS).median:.1f} x {name}")
    return f"{times.median(OURS) * 1e3:8.3f} ms, faster by " + ", ".join(against)


def main(seconds: float, only: list[int] | None, path: Path) -> None:
    start = perf_counter()
    threadpool_limits(1)
    keep_memory()

    def say(what: str) -> None:
        print(f"{perf_counter() - start:5.0f} s  {what}", flush=True)

    makers = dense_makers(say)
    say("compiling")
    functions = {
        "with Q": compile_layer(graph.conv_with_q),
        OURS: compile_layer(graph.conv),
    }
    blas = sorted({f"{p['internal_api']}, {p.get('architecture')}" for p in threadpool_info()})
    say(f"BLAS: {'; '.join(blas)}")
    found = {}
    for size in only or GRIDS:
        for kind, shares, draw in (("random", RANDOM, random_sites), ("blobs", BLOBS, blob_sites)):
            for share in shares:
                label = f"{size} {kind} {share}"
                rng = np.random.default_rng(size)
                a = layer(draw(size, share, rng), size, rng)
                facts = counts(a)
                times = compare(contenders_of(a, functions, makers), seconds=seconds, label=label)
                say(f"{label:18}  {facts['outputs']:6.1%} of outputs  {verdict(times, facts)}")
                found[label] = {
                    "grid": size,
                    "sites": kind,
                    "share": share,
                    **facts,
                    "rounds": len(times.seconds["NumPy"]),
                    "seconds": {name: short(quantiles(t)) for name, t in times.seconds.items()},
                    "ratio": {name: short(times.ratio(name, OURS)) for name in times.seconds},
                }
    packages = ("tensorflow-cpu", "tensorflow", "torch", "jax", "spconv")
    versions = {
        d.name.lower().replace("_", "-"): d.version for d in metadata.distributions() if d.name
    }
    record = {
        "machine": machine(),
        "frameworks": {name: versions[name] for name in packages if name in versions},
        "blas": blas,
        "layer": {"f": F, "n_in": N_IN, "n_out": N_OUT, "dtype": "float32"},
        "settings": found,
    }
    write_record(record, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6, help="budget of each setting")
    parser.add_argument("--only", type=int, nargs="+", help="these grids alone (with --record)")
    parser.add_argument("--record", type=Path, default=RECORD, help="file to write")
    options = parser.parse_args()
    use_the_processor()
    main(options.seconds, options.only, options.record)
