"""When does sparse pay?  One layer, forward and backward, against dense frameworks and spconv.

f = 3, 8 -> 16 channels (some settings 64 -> 64), float32, on 128 x 128 and 512 x 512 grids with
random sites and with blobs, from nearly nothing to nearly everything active; in some settings also
a submanifold layer, whose outputs are at the sites of its inputs. Whatever is sparse also searches
its output sites each time; whatever is dense is given its dense image, for a submanifold layer with
a frame of ground state around it, and need not mask its output. Two contenders are in between:
JAX's dense convolution on the bounding box of the active outputs, and on the tiles of outputs that
hold an active one. Every contender returns the output and the gradients to its input, W and b, and
all four are compared with float64; the package's compute the ground state and its gradient besides.
spconv is a CUDA library; what is timed is its fallback for the CPU.

Contenders take turns. In its turn each is called once after the others have used the caches, and
then again and again for a few milliseconds; a call that lasts as long is not repeated. A turn
begins when the threads that the last contender left waiting have gone to sleep. All this is done
by one process that is kept to one core, with one thread for everybody, and again by another one
that has two of what the system calls processors, and two threads for the frameworks and for BLAS;
the package's loops have one in any case. Two such processors may be one core: the record says how
much more work than one they do at the same time.

The record holds, for each setting and contender, the quartiles of the seconds of a call in a row,
those of the first calls of the turns, the ratio of medians to the package's best with the extremes
of the rounds, as (median, low, high), the quartiles of the rounds' ratios, and how many processors
were busy. For the package's best it also holds the quartiles of its stages timed apart: the search,
all gathers and scatters without a product, all products without a gather, and what the ground state
adds. The run with two threads is the field "two threads".

    python benchmarks/sparse_crossover.py [--seconds 6] [--only 512] [--threads 2] [--record FILE]

It takes about twelve minutes and writes ``results/sparse_crossover.json``. TensorFlow, PyTorch, JAX
and spconv are optional: what is missing is named, and left out.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from itertools import repeat
from pathlib import Path
from statistics import quantiles
from time import perf_counter, process_time, sleep

import numba
import numpy as np
import pytensor
import pytensor.tensor as pt
from numpy.lib.stride_tricks import sliding_window_view
from one_core import ONE_THREAD, keep_to
from threadpoolctl import threadpool_info, threadpool_limits

from helpers.checks import relative_error
from helpers.sparse_conv import (
    SparseValue,
    graph,
    kernels,
    rulebook,
    sparse_conv,
    sparse_conv_2d,
    sparse_conv_2d_grad,
    sparse_conv_grad,
    submanifold_rulebook,
)
from helpers.timing import Timings, machine, progress, write_record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from sparse_loops import loop_build_q, loop_grad_q  # noqa: E402

RECORD = Path(__file__).parent / "results" / "sparse_crossover.json"
F, N_IN, N_OUT = 3, 8, 16
GRIDS = (128, 512)
# Shares of active inputs (random sites), and of active outputs (blobs).
RANDOM = (0.001, 0.005, 0.012, 0.0315, 0.05, 0.1, 0.25)
BLOBS = (0.01, 0.05, 0.1, 0.25, 0.4, 0.6, 0.9)
WIDE = (64, 64)  # channels of the wide settings, of these shares of active inputs and outputs:
WIDE_SETTINGS = ((128, "random", 0.0315), (128, "blobs", 0.25))
SUBMANIFOLD = ((128, "random", 0.05), (128, "blobs", 0.05), (128, "blobs", 0.25))
SUBMANIFOLD += ((512, "random", 0.05), (512, "blobs", 0.05), (512, "blobs", 0.25))
SUBMANIFOLD_WIDE = ((128, "random", 0.0315), (128, "blobs", 0.25))
LOOPS = 1000  # sites, above which the loops are not run: they take seconds
DENSE = ("TensorFlow", "PyTorch", "JAX")
TILE = 32  # outputs along the side of a dense tile
OURS = "without Q"
ROW = 5e-3  # seconds that the calls in a row last at least
ROUNDS = 5, 500  # at least and at most


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


def layer(
    sites: np.ndarray, size: int, rng, n_in: int = N_IN, n_out: int = N_OUT, same: bool = False
) -> dict:
    """Everything that any contender needs; a cotangent that is zero where no output is active.

    The layer is submanifold if the sites stay the `same`. What is dense then has an image with a
    frame of ground state, `framed`, in which the convolution is valid.
    """

    def numbers(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    x = SparseValue(
        sites, numbers(len(sites), n_in), (size, size, n_in), ground_state=numbers(n_in)
    )
    search, frame = (submanifold_rulebook, F // 2) if same else (rulebook, 0)
    rules = search(sites, x.shape, F)
    dY = numbers(len(rules.sites), n_out)
    side = size + 2 * frame
    dense_dY = np.zeros((side - F + 1, side - F + 1, n_out), np.float32)
    dense_dY[tuple(rules.sites.T)] = dY
    return {
        "x": x,
        "same": same,
        "search": search,
        "framed": SparseValue(sites + frame, x.values, (side, side, n_in), x.ground_state),
        "W": numbers(F * F * n_in, n_out) / 8,
        "b": numbers(n_out),
        "dY": dY,
        "dt_out": np.zeros(n_out, np.float32),
        "dense_dY": dense_dY,
        "rules": rules,
    }


# --- the package, and the loops -------------------------------------------------------------------
# A contender is made from a layer, and is a function without arguments that returns arrays: the
# output, then the gradients to its input, W and b.


def loops(x, W, b, dY, **_):
    def run():
        _, Q = loop_build_q(x.sites, x.values, x.shape, F, x.ground_state)
        Y = Q @ W + b
        dM, _ = loop_grad_q(dY @ W.T, x.sites, x.values, x.shape, F)
        return Y, dM, Q.T @ dY, dY.sum(axis=0)

    return run


def in_numpy(x, W, b, dY, dt_out, same, search, **_):
    def run():
        y = sparse_conv_2d(x, W, b, F)
        dM, _, dW, db = sparse_conv_2d_grad(x, W, F, dY, dt_out)
        return y.values, dM, dW, db

    def run_same():
        rules = search(x.sites, x.shape, F)
        y = sparse_conv(x, W, b, rules)
        dM, _, dW, db = sparse_conv_grad(x, W, rules, dY, dt_out)
        return y.values, dM, dW, db

    return run_same if same else run


def compile_layer(conv: Callable):
    """Function of values, t, W, b, dY, dt_out and a rulebook's arrays: Y, t_out, dM, dt, dW, db."""
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


def in_pytensor(function, x, W, b, dY, dt_out, search, **_):
    def run():
        rules = search(x.sites, x.shape, F)
        Y, _, dM, _, dW, db = function(
            x.values, x.ground_state, W, b, dY, dt_out, *graph.rule_arrays(x, rules)
        )
        return Y, dM, dW, db

    return run


# --- dense frameworks, and spconv -----------------------------------------------------------------


def in_tensorflow(threads):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)

    @tf.function
    def both(x, W, b, dY):
        with tf.GradientTape() as tape:
            tape.watch([x, W, b])
            y = tf.nn.conv2d(x, W, 1, "VALID") + b
        return y, *tape.gradient(y, [x, W, b], output_gradients=dY)

    def make(framed, W, b, dense_dY, **_):
        args = [
            tf.constant(v)
            for v in (framed.to_dense()[None], W.reshape(F, F, -1, W.shape[1]), b, dense_dY[None])
        ]

        def run():
            return both(*args)

        return run

    return make


def in_jax(_threads):
    import jax  # it has a thread for each core that the process is kept to

    def conv(x, W, b):
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, W, (1, 1), "VALID", dimension_numbers=layout) + b

    @jax.jit
    def both(x, W, b, dY):
        y, pullback = jax.vjp(conv, x, W, b)
        return y, *pullback(dY)

    def make(framed, W, b, dense_dY, **_):
        args = [
            jax.numpy.array(v)
            for v in (framed.to_dense()[None], W.reshape(F, F, -1, W.shape[1]), b, dense_dY[None])
        ]

        def run():
            return jax.block_until_ready(both(*args))

        return run

    return make


def in_box(make: Callable) -> Callable:
    """A dense contender on the bounding box of the active outputs, and the box's corner.

    Outside of it everything is known: the output is the ground state and no cotangent comes back.
    """

    def make_boxed(framed, dense_dY, rules, **rest):
        low, high = rules.sites.min(axis=0), rules.sites.max(axis=0) + 1
        shape = (*(high - low + F - 1), framed.shape[-1])
        box = SparseValue(framed.sites - low, framed.values, shape, framed.ground_state)
        part = dense_dY[low[0] : high[0], low[1] : high[1]]
        return make(framed=box, dense_dY=np.ascontiguousarray(part), **rest), low

    return make_boxed


def in_tiles(framed, W, b, dense_dY, same, **_):
    """JAX's dense convolution on the tiles of outputs that hold an active one, found each time."""
    import jax

    count = -(-dense_dY.shape[0] // TILE)
    side = count * TILE
    X = np.zeros((side + F - 1, side + F - 1, framed.shape[-1]), np.float32) + framed.ground_state
    X[tuple(framed.sites.T)] = framed.values
    dY = np.zeros((side, side, W.shape[1]), np.float32)
    dY[: len(dense_dY), : len(dense_dY)] = dense_dY

    def cells(starts, length):
        every = starts[:, :, None] * TILE + np.arange(length)
        return every[:, 0, :, None], every[:, 1, None, :]

    def conv(X, W, b, seen):
        layout = ("NHWC", "HWIO", "NHWC")
        return (
            jax.lax.conv_general_dilated(X[seen], W, (1, 1), "VALID", dimension_numbers=layout) + b
        )

    @jax.jit
    def both(X, W, b, dY, seen, reached):
        Y, pullback = jax.vjp(lambda *a: conv(*a, seen), X, W, b)
        return Y, *pullback(dY[reached])

    args = [jax.numpy.array(v) for v in (X, W.reshape(F, F, -1, W.shape[1]), b, dY)]
    windows = np.array([(0, 0), (0, F - 1), (F - 1, 0), (F - 1, F - 1)])  # a tile is wider than F
    if same:
        windows = np.array([(F // 2, F // 2)])

    def tiles():
        reached = (framed.sites[:, None] - windows).reshape(-1, 2)
        inside = ((reached >= 0) & (reached < len(dense_dY))).all(axis=1)
        keys = np.unique((reached[inside] // TILE) @ [count, 1])
        return np.column_stack(np.divmod(keys, count))

    def run():
        starts = tiles()
        return jax.block_until_ready(both(*args, cells(starts, TILE + F - 1), cells(starts, TILE)))

    return run, tiles


def in_torch(threads):
    import torch

    torch.set_num_threads(threads)

    def tensor(array, axes):  # channels last in memory too: its faster layout
        return torch.tensor(array).permute(axes).contiguous(memory_format=torch.channels_last)

    def make(framed, W, b, dense_dY, **_):
        image = tensor(framed.to_dense()[None], (0, 3, 1, 2)).requires_grad_()
        weight = tensor(W.reshape(F, F, -1, W.shape[1]), (3, 2, 0, 1)).requires_grad_()
        bias, dY = torch.tensor(b, requires_grad=True), tensor(dense_dY[None], (0, 3, 1, 2))

        def run():
            image.grad = weight.grad = bias.grad = None
            y = torch.nn.functional.conv2d(image, weight, bias)
            y.backward(dY)
            y, dX = y.detach().permute(0, 2, 3, 1), image.grad.permute(0, 2, 3, 1)
            return y, dX, weight.grad.permute(2, 3, 1, 0), bias.grad

        return run

    return make


def in_spconv(threads):
    """spconv is made for CUDA. On the CPU it has a fallback, ConvAlgo.Native: this is that."""
    import spconv.pytorch as spconv
    import torch
    from spconv.core import ConvAlgo
    from spconv.pytorch import ops

    torch.set_num_threads(threads)
    ops.get_current_stream = lambda: 0  # its backward pass asks for CUDA's, on a CPU too

    def make(x, W, b, dY, rules, same, **_):
        kind = spconv.SubMConv2d if same else spconv.SparseConv2d
        conv = kind(x.shape[-1], len(b), F, bias=True, algo=ConvAlgo.Native)
        W_spconv = torch.tensor(W.reshape(F, F, -1, W.shape[1])).permute(spconv_axes(conv))
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
            return y.features.detach(), values.grad, dW, conv.bias.grad

        return run, back

    def spconv_axes(conv):  # (f, f, n_in, n_out) or (n_out, f, f, n_in), by its version
        return (0, 1, 2, 3) if conv.weight.shape[0] == F else (3, 0, 1, 2)

    return make


def differing(make, threads: int, calls: int = 200) -> list[int]:
    """Of so many calls with so many threads those whose output is not that of the first, and all.

    Of spconv's fallback, which adds products to rows of its output from several threads at once.
    """
    import torch

    rng = np.random.default_rng(0)
    a = layer(random_sites(128, 0.01, rng), 128, rng, N_IN, N_OUT, False)
    torch.set_num_threads(1)
    run, _ = make(**a)
    expected = run()[0].numpy().copy()
    torch.set_num_threads(threads)
    found = [run()[0].numpy() for _ in range(calls)]
    return [sum(relative_error(Y, expected) > 1e-4 for Y in found), calls]


def dense_makers(say, threads: int) -> dict[str, Callable]:
    """Makers of the frameworks that are here; the others are named."""
    makers = {}
    for name, load in {
        "TensorFlow": in_tensorflow,
        "PyTorch": in_torch,
        "JAX": in_jax,
        "spconv": in_spconv,
    }.items():
        try:
            makers[name] = load(threads)
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
    if len(a["x"].sites) <= LOOPS and not a["same"]:
        made = {"loops": loops(**a)} | made
    x, rules = a["framed"], a["rules"]
    reference = in_float64(a, x.ground_state)
    at, seen = tuple(rules.sites.T), tuple(x.sites.T)
    for name, run in made.items():
        Y, dX, dW, db = map(np.asarray, run())
        if name in DENSE:
            Y, dX = Y[0][at], dX[0][seen]
        check(name, (Y, dX, dW, db), reference)
    if "JAX" in makers and len(rules.sites):
        made["JAX, box"], low = in_box(makers["JAX"])(**a)
        Y, dX, dW, db = map(np.asarray, made["JAX, box"]())
        Y, dX = Y[0][tuple((rules.sites - low).T)], dX[0][tuple((x.sites - low).T)]
        check("JAX, box", (Y, dX, dW, db), reference)
        made["JAX, tiles"], tiles = in_tiles(**a)
        Y, dX, dW, db = map(np.asarray, made["JAX, tiles"]())
        number = np.zeros(tiles().max(axis=0) + 1, int)
        number[tuple(tiles().T)] = np.arange(len(Y))
        which, place = number[tuple((rules.sites // TILE).T)], rules.sites % TILE
        check("JAX, tiles", (Y[which, place[:, 0], place[:, 1]], dX[seen], dW, db), reference)
    if "spconv" in makers:
        made["spconv"], order = makers["spconv"](**a)
        # It knows no ground state: for it that is zero.
        Y, dX, dW, db = map(np.asarray, made["spconv"]())
        check("spconv", (Y[order], dX, dW, db), in_float64(a, 0 * x.ground_state))
    return made


def in_float64(a, ground_state) -> tuple[np.ndarray, ...]:
    """Output and gradients to the input, W and b."""
    x = SparseValue(a["x"].sites, a["x"].values.astype(float), a["x"].shape, ground_state)
    W, b, dY = (a[key].astype(float) for key in ("W", "b", "dY"))
    y = sparse_conv(x, W, b, a["rules"])
    dM, _, dW, db = sparse_conv_grad(x, W, a["rules"], dY, np.zeros(len(b)))
    return y.values, dM, dW, db


def check(name, found, reference) -> None:
    for what, value, expected in zip(("Y", "dX", "dW", "db"), found, reference, strict=True):
        error = relative_error(value.reshape(expected.shape), expected)
        assert error < 1e-4, f"{name} computes another {what}: {error:.0e}"


# --- the stages of the package's best -------------------------------------------------------------


@numba.njit
def gathers(Z, dY, Y, G, dst):
    """What `conv` and `conv_grads` move, tile by tile: one scatter of products, one gather."""
    a = len(dst)
    for first in range(0, a, kernels.TILE):
        rows = min(kernels.TILE, a - first)
        kernels._scatter(Z[:rows], dst, first, Y)
        kernels._gather(dY, dst, first, G[:rows])


@numba.njit
def products(values, wide, wide_T, Z, G, dM, part):
    """What `conv` and `conv_grads` multiply, tile by tile: three BLAS calls."""
    a = len(values)
    for first in range(0, a, kernels.TILE):
        rows = min(kernels.TILE, a - first)
        np.dot(values[first : first + rows], wide, Z[:rows])
        np.dot(G[:rows], wide_T, dM[first : first + rows])
        np.dot(values[first : first + rows].T, G[:rows], part)


def stages_of(a: dict) -> dict[str, Callable]:
    """The parts of "without Q", each alone; what is left is adding up, the bias and the call."""
    x, W, dY, rules = a["x"], a["W"], a["dY"], a["rules"]
    n_in, n_out = x.shape[-1], W.shape[1]
    rows = min(kernels.TILE, len(x.sites))
    wide = np.ascontiguousarray(W.reshape(F * F, n_in, n_out).swapaxes(0, 1).reshape(n_in, -1))
    wide_T, Z = np.ascontiguousarray(wide.T), np.zeros((rows, F * F * n_out), np.float32)
    G, Y, dM, part = Z.copy(), np.zeros_like(dY), np.empty_like(x.values), np.empty_like(wide)
    D = np.ones((F * F, n_out), np.float32)

    def ground():
        kernels.spread_ground(D, rules.src, rules.dst)
        kernels.sum_ground(dY, rules.src, rules.dst)

    return {
        "search": lambda: a["search"](x.sites, x.shape, F),
        "gather": lambda: gathers(Z, dY, Y, G, rules.dst),
        "product": lambda: products(x.values, wide, wide_T, Z, G, dM, part),
        "ground state": ground,
    }


def counts(a: dict) -> dict:
    """Floating-point operations of forward and backward, and the bytes of the arrays they touch."""
    rules, (h, w) = a["rules"], a["framed"].grid
    a_in, a_out, pairs = (
        len(a["x"].sites),
        len(rules.sites),
        int((rules.src < len(a["x"].sites)).sum()),
    )
    n_in, n_out = a["x"].shape[-1], a["W"].shape[1]
    product, cells = 2 * n_in * n_out, (h - F + 1) * (w - F + 1)
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
            "dense": 4 * 2 * (h * w * n_in + cells * n_out),
            "Q": 4 * (2 * (a_in * n_in + a_out * n_out) + 2 * a_out * F * F * n_in),
            "rulebook": 4 * F * F * (a_in + a_out),
            "without Q": 4 * 2 * (a_in * n_in + a_out * n_out),
        },
    }


def short(numbers) -> list[float]:
    """Four digits: more than a clock gives, and they keep the record small."""
    return [float(f"{x:.3e}") for x in numbers]


def take_turns(contenders: dict[str, Callable], seconds: float) -> tuple[Timings, dict, dict]:
    """Seconds of a call in a row; those of the first call in each turn; the processors at work."""
    for function in contenders.values():
        function()
    rows, firsts = ({name: [] for name in contenders} for _ in range(2))
    busy = {name: np.zeros(2) for name in contenders}
    begin, done = perf_counter(), 0
    collecting = gc.isenabled()
    gc.disable()
    try:
        while done < ROUNDS[0] or (
            done < ROUNDS[1] and (perf_counter() - begin) * (1 + 1 / done) < seconds
        ):
            for name, function in contenders.items():
                settle()
                worked, start = process_time(), perf_counter()
                function()
                first = row = perf_counter() - start
                if first < ROW:
                    calls = int(ROW / first) + 1
                    worked, start = process_time(), perf_counter()
                    for _ in repeat(None, calls):
                        function()
                    row = (perf_counter() - start) / calls
                busy[name] += process_time() - worked, perf_counter() - start
                rows[name].append(row)
                firsts[name].append(first)
            done += 1
            gc.collect(0)
    finally:
        if collecting:
            gc.enable()
    shares = {name: round(float(worked / passed), 2) for name, (worked, passed) in busy.items()}
    return Timings({name: tuple(t) for name, t in rows.items()}), firsts, shares


def settle() -> None:
    """Wait until the process does nothing: threads that look for more work do so for a while."""
    for _ in range(50):
        worked = process_time()
        sleep(2e-3)
        if process_time() - worked < 4e-4:
            return


def two_at_once() -> float:
    """How much more two threads do than one in the same time, in products of one thread each."""
    A = np.ones((512, 512), np.float32)

    def work(calls):
        out = np.empty_like(A)
        for _ in range(calls):
            np.dot(A, A, out)

    def seconds(threads):
        start = perf_counter()
        list(pool.map(work, [100] * threads))
        return perf_counter() - start

    with ThreadPoolExecutor(2) as pool, threadpool_limits(1):
        seconds(2)
        return round(float(np.median([2 * seconds(1) / seconds(2) for _ in range(9)])), 2)


def verdict(times: Timings, facts: dict) -> str:
    dense = [name for name in DENSE if name in times.seconds]
    against = []
    if dense:
        best = min(dense, key=times.median)
        against.append(f"{times.ratio(best, OURS).median:.1f} x dense ({best})")
    for name in ("JAX, box", "JAX, tiles", "spconv", "loops", "NumPy", "with Q"):
        if name in times.seconds:
            against.append(f"{times.ratio(name, OURS).median:.1f} x {name}")
    return f"{times.median(OURS) * 1e3:8.3f} ms, faster by " + ", ".join(against)


def measured(a: dict, seconds: float, functions: dict, makers: dict) -> tuple:
    """Timings of all contenders, and what the record says of this setting."""
    times, firsts, busy = take_turns(contenders_of(a, functions, makers), seconds)
    stages = take_turns(stages_of(a), seconds / 4)[0]
    rounds = {name: np.array(t) for name, t in times.seconds.items()}
    return times, {
        **counts(a),
        "rounds": len(times.seconds["NumPy"]),
        "seconds": {name: short(quantiles(t)) for name, t in times.seconds.items()},
        "first": {name: short(quantiles(t)) for name, t in firsts.items()},
        "ratio": {name: short(times.ratio(name, OURS)) for name in times.seconds},
        "ratio_quartiles": {name: short(quantiles(t / rounds[OURS])) for name, t in rounds.items()},
        "busy": busy,
        "stages": {name: short(quantiles(t)) for name, t in stages.seconds.items()},
    }


def settings_of(grids) -> list[tuple]:
    """Field of the record, channels, submanifold or not, and the settings."""
    listed = [(size, "random", share) for size in grids for share in RANDOM]
    listed += [(size, "blobs", share) for size in grids for share in BLOBS]
    narrow, groups = (N_IN, N_OUT), []
    for field, channels, same, settings in (
        ("settings", narrow, False, listed),
        ("wide", WIDE, False, WIDE_SETTINGS),
        ("submanifold", narrow, True, SUBMANIFOLD),
        ("submanifold, wide", WIDE, True, SUBMANIFOLD_WIDE),
    ):
        groups.append((field, channels, same, [s for s in settings if s[0] in grids]))
    return groups


def main(seconds: float, grids: list[int], threads: int, path: Path, quick: bool) -> None:
    start = perf_counter()
    threadpool_limits(threads)
    keep_to(threads)  # before the frameworks start their threads
    keep_memory()

    def say(what: str) -> None:
        print(f"{perf_counter() - start:5.0f} s  {what}", flush=True)

    makers, differ = dense_makers(say, threads), None
    if threads > 1 and "spconv" in makers:  # it is wrong then, now and then: it does not take part
        differ = differing(makers.pop("spconv"), threads)
        say(f"spconv gives another output in {differ[0]} of {differ[1]} calls: left out")
    say("compiling")
    functions = {
        "with Q": compile_layer(graph.conv_with_q),
        OURS: compile_layer(graph.conv),
    }
    blas = sorted({f"{p['internal_api']}, {p.get('architecture')}" for p in threadpool_info()})
    say(f"BLAS: {'; '.join(blas)}; threads: {threads}")
    draw = {"random": random_sites, "blobs": blob_sites}
    found = {}
    for field, channels, same, settings in settings_of(grids):
        found[field] = {}
        for size, kind, share in progress(settings[:1] if quick else settings, field):
            label = f"{size} {kind} {share}"
            rng = np.random.default_rng(size)
            a = layer(draw[kind](size, share, rng), size, rng, *channels, same)
            times, facts = measured(a, seconds, functions, makers)
            say(f"{label:18}  {facts['outputs']:6.1%} of outputs  {verdict(times, facts)}")
            found[field][label] = {"grid": size, "sites": kind, "share": share, **facts}
    packages = ("tensorflow-cpu", "tensorflow", "torch", "jax", "spconv")
    versions = {
        d.name.lower().replace("_", "-"): d.version for d in metadata.distributions() if d.name
    }
    channels = {"n_in": WIDE[0], "n_out": WIDE[1]}
    record = {
        "machine": machine(),
        "frameworks": {name: versions[name] for name in packages if name in versions},
        "blas": blas,
        "threads": threads,
        "layer": {"f": F, "n_in": N_IN, "n_out": N_OUT, "dtype": "float32"},
        "settings": found["settings"],
        "wide": {**channels, "settings": found["wide"]},
        "submanifold": {
            "settings": found["submanifold"],
            "wide": {**channels, "settings": found["submanifold, wide"]},
        },
    }
    if threads > 1:
        record["spconv differs"] = differ
        record["at once"] = two_at_once()
        say(f"two threads do {record['at once']} times the work of one in the same time")
    write_record(record, path)


def both(arguments: list[str], path: Path) -> None:
    """One thread, then two, each in a process of its own, in one record."""
    parts = {}
    with tempfile.TemporaryDirectory() as folder:
        for threads in (1, 2):
            part = Path(folder) / f"{threads}.json"
            command = [sys.executable, __file__, *arguments]
            command += ["--threads", str(threads), "--record", str(part)]
            environment = os.environ | dict.fromkeys(ONE_THREAD, str(threads))
            subprocess.run(command, env=environment, check=True)
            parts[threads] = json.loads(part.read_text(encoding="utf-8"))
            print(f"with {threads} threads: done", flush=True)
    record = parts[1] | {"two threads": timings_of(parts[2])}
    write_record(record, path)


def timings_of(record: dict) -> dict:
    """What a second run adds: times, no counts, and no stages."""
    fields = "rounds", "seconds", "first", "ratio", "ratio_quartiles", "busy"

    def shorter(settings):
        return {
            label: {field: setting[field] for field in fields}
            for label, setting in settings.items()
        }

    return {
        "threads": record["threads"],
        "at once": record["at once"],
        "spconv differs": record["spconv differs"],
        "settings": shorter(record["settings"]),
        "wide": {"settings": shorter(record["wide"]["settings"])},
        "submanifold": {
            "settings": shorter(record["submanifold"]["settings"]),
            "wide": {"settings": shorter(record["submanifold"]["wide"]["settings"])},
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6, help="budget of each setting")
    parser.add_argument("--only", type=int, nargs="+", help="these grids alone (with --record)")
    parser.add_argument("--threads", type=int, help="so many alone (with --record)")
    parser.add_argument("--quick", action="store_true", help="a setting of each kind: a trial")
    parser.add_argument("--record", type=Path, default=RECORD, help="file to write")
    options = parser.parse_args()
    if options.record == RECORD and (options.only or options.threads or options.quick):
        parser.error("a part does not replace the record: say --record FILE")
    use_the_processor()
    if options.threads:
        grids = options.only or list(GRIDS)
        main(options.seconds, grids, options.threads, options.record, options.quick)
    else:
        both(sys.argv[1:], options.record)
