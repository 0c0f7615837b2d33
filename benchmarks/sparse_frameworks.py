"""The gradient of a gather, written by hand in TensorFlow, JAX and PyTorch, against ours.

Each framework gets Q with a pullback of its own. Recorded are, for two layers on a small image,
the differences of six Jacobians and of a second derivative from those of the package's Ops; what
the framework's own checker says; and the seconds for Q and its gradients, by hand and by the
framework's own rules, on the small image and on 128 x 128 cells with 5 % random sites. Everything
runs on one thread and is kept to one core.

    python benchmarks/sparse_frameworks.py [--seconds 10] [--record FILE]

It takes about a minute and writes ``results/sparse_frameworks.json``, in an environment that has
``tensorflow-cpu``, ``jax`` and ``torch``; what is missing is named, left out, and then nothing is
written unless ``--record`` says where. The chapter on custom Ops prints four functions of this
file: their names and their text are its listings.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from statistics import quantiles
from types import SimpleNamespace

import numpy as np
import pytensor
import pytensor.tensor as pt
from one_core import keep_to_one_core
from pytensor.compile.mode import Mode
from sparse_crossover import keep_memory, random_sites
from threadpoolctl import threadpool_limits

from helpers.checks import relative_error
from helpers.sparse_conv import Rulebook, SparseValue, graph, op, rulebook
from helpers.sparse_conv import build_q as numpy_build_q
from helpers.sparse_conv import grad_q as numpy_grad_q
from helpers.timing import compare, machine, write_record

RECORD = Path(__file__).parent / "results" / "sparse_frameworks.json"
PACKAGES = ("tensorflow-cpu", "tensorflow", "jax", "torch")

# --- Q and its pullback, three times: the listings ------------------------------------------------


def in_tensorflow():
    """Q with its gradient by hand: a tf.custom_gradient, and another one for its transpose."""
    import tensorflow as tf

    @tf.custom_gradient
    def build_q(M, t, src, dst):
        seen = tf.concat([M, t[None]], axis=0)
        Q = tf.reshape(tf.gather(seen, src), (src.shape[0], src.shape[1] * t.shape[0]))
        return Q, lambda dQ: (*grad_q(dQ, src, dst), None, None)

    @tf.custom_gradient
    def grad_q(dQ, src, dst):
        (a_out, positions), a = src.shape, dst.shape[0]
        n = dQ.shape[1] // positions
        blocks = tf.reshape(dQ, (a_out, positions, n))
        padded = tf.reshape(tf.pad(blocks, [[0, 1], [0, 0], [0, 0]]), (-1, n))
        rows = dst * positions + tf.range(positions)  # gather takes one index, not two
        dM = tf.reduce_sum(tf.gather(padded, rows), axis=1)
        unseen = tf.cast(src == a, dQ.dtype)
        dt = tf.einsum("ok,okc->c", unseen, blocks)
        return (dM, dt), lambda dM_bar, dt_bar: (build_q(dM_bar, dt_bar, src, dst), None, None)

    return build_q


def in_jax():
    """Q with its gradient by hand: a jax.custom_vjp, and another one for its transpose."""
    import jax
    import jax.numpy as jnp

    @jax.custom_vjp
    def build_q(M, t, src, dst):
        seen = jnp.concatenate([M, t[None]])
        return seen[src].reshape(len(src), src.shape[1] * t.size)

    @jax.custom_vjp
    def grad_q(dQ, src, dst):
        blocks = dQ.reshape(*src.shape, dQ.shape[1] // src.shape[1])
        padded = jnp.pad(blocks, [(0, 1), (0, 0), (0, 0)])
        dM = padded[dst, jnp.arange(src.shape[1])].sum(axis=1)
        unseen = (src == len(dst)).astype(dQ.dtype)
        return dM, jnp.einsum("ok,okc->c", unseen, blocks)

    def build_q_forward(M, t, src, dst):
        return build_q(M, t, src, dst), (src, dst)

    def grad_q_forward(dQ, src, dst):
        return grad_q(dQ, src, dst), (src, dst)

    build_q.defvjp(build_q_forward, lambda rules, dQ: (*grad_q(dQ, *rules), None, None))
    grad_q.defvjp(grad_q_forward, lambda rules, bars: (build_q(*bars, *rules), None, None))
    return build_q


def in_pytorch():
    """Q with its gradient by hand: an autograd.Function, and another one for its transpose."""
    import torch

    class BuildQ(torch.autograd.Function):
        @staticmethod
        def forward(M, t, src, dst):
            seen = torch.cat([M, t[None]])
            return seen[src].reshape(len(src), src.shape[1] * len(t))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs[2:])

        @staticmethod
        def backward(ctx, dQ):
            return *GradQ.apply(dQ, *ctx.saved_tensors), None, None

    class GradQ(torch.autograd.Function):
        @staticmethod
        def forward(dQ, src, dst):
            blocks = dQ.reshape(*src.shape, dQ.shape[1] // src.shape[1])
            padded = torch.nn.functional.pad(blocks, (0, 0, 0, 0, 0, 1))
            dM = padded[dst, torch.arange(src.shape[1])].sum(dim=1)
            unseen = (src == len(dst)).to(dQ.dtype)
            return dM, torch.einsum("ok,okc->c", unseen, blocks)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs[1:])

        @staticmethod
        def backward(ctx, dM_bar, dt_bar):
            return BuildQ.apply(dM_bar, dt_bar, *ctx.saved_tensors), None, None

    return BuildQ.apply


def in_tensorflow_with_numpy():
    """NumPy inside a TensorFlow graph, tf.numpy_function, and a gradient that is NumPy too."""
    import tensorflow as tf

    def in_numpy(function, arrays, outputs):
        dtype = arrays[0].dtype
        return tf.numpy_function(function, arrays, [dtype] * outputs if outputs > 1 else dtype)

    def rules(src, dst):
        return Rulebook(None, (), src, dst, False, None, ())

    @tf.custom_gradient
    def build_q(M, t, src, dst):
        Q = in_numpy(lambda M, t, *r: numpy_build_q(M, t, rules(*r)), [M, t, src, dst], 1)
        Q = tf.ensure_shape(Q, (src.shape[0], src.shape[1] * t.shape[0]))  # the graph cannot know
        return Q, lambda dQ: (*grad_q(dQ, src, dst), None, None)

    @tf.custom_gradient
    def grad_q(dQ, src, dst):
        dM, dt = in_numpy(lambda dQ, *r: numpy_grad_q(dQ, rules(*r)), [dQ, src, dst], 2)
        n = dQ.shape[1] // src.shape[1]
        dM, dt = tf.ensure_shape(dM, (dst.shape[0], n)), tf.ensure_shape(dt, (n,))
        return (dM, dt), lambda dM_bar, dt_bar: (build_q(dM_bar, dt_bar, src, dst), None, None)

    return build_q


# --- one face for all frameworks ------------------------------------------------------------------
# array, tile, vjp(f, inputs) -> outputs and pull(number of the output, cotangent),
# hvp(loss, inputs, directions), check(f, inputs) by the framework's own means,
# timed(build_q, arrays) -> function, and own: Q without a gradient by hand.


def tensorflow_face() -> SimpleNamespace:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    zero = tf.UnconnectedGradients.ZERO

    def vjp(f, inputs):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(inputs)
            outputs = f(*inputs)

        def pull(k, bar):
            return tape.gradient(outputs[k], inputs, tf.constant(bar), zero)

        return outputs, pull

    def hvp(loss, inputs, directions):
        with tf.GradientTape() as outer:
            outer.watch(inputs)
            with tf.GradientTape() as inner:
                inner.watch(inputs)
                value = loss(*inputs)
            slopes = inner.gradient(value, inputs)
            slope = sum(tf.reduce_sum(d * g) for d, g in zip(directions, slopes, strict=True))
        return outer.gradient(slope, inputs)

    def check(f, inputs):
        exact, differences = tf.test.compute_gradient(lambda M, t: f(M, t)[2], inputs, 1e-3)
        return all(np.allclose(a, b, atol=1e-9) for a, b in zip(exact, differences, strict=True))

    def timed(build_q, M, t, dQ, src, dst):
        M, t, dQ, src, dst = map(tf.constant, (M, t, dQ, src, dst))

        @tf.function
        def both(M, t, dQ):
            with tf.GradientTape() as tape:
                tape.watch([M, t])
                Q = build_q(M, t, src, dst)
            # Its own gradient of a gather is a list of what is still to be added: have it added.
            return Q, *map(tf.convert_to_tensor, tape.gradient(Q, [M, t], dQ))

        return lambda: both(M, t, dQ)

    def own(M, t, src, dst):
        seen = tf.concat([M, t[None]], axis=0)
        return tf.reshape(tf.gather(seen, src), (src.shape[0], src.shape[1] * t.shape[0]))

    return SimpleNamespace(
        array=tf.constant, tile=tf.tile, vjp=vjp, hvp=hvp, check=check, timed=timed, own=own
    )


def jax_face() -> SimpleNamespace:
    import jax
    import jax.numpy as jnp
    from jax.test_util import check_grads

    jax.config.update("jax_enable_x64", True)

    def vjp(f, inputs):
        outputs, pullback = jax.vjp(f, *inputs)

        def pull(k, bar):
            bars = [jnp.zeros_like(y) for y in outputs]
            bars[k] = jnp.asarray(bar)
            return pullback(tuple(bars))

        return outputs, pull

    def hvp(loss, inputs, directions):
        every = tuple(range(len(inputs)))

        def slope(*inputs):
            slopes = jax.grad(loss, every)(*inputs)
            return sum((d * g).sum() for d, g in zip(directions, slopes, strict=True))

        return jax.grad(slope, every)(*inputs)

    def check(f, inputs):
        try:
            check_grads(f, inputs, order=2, modes=["rev"])
        except AssertionError:
            return False
        return True

    def timed(build_q, M, t, dQ, src, dst):
        M, t, dQ, src, dst = map(jnp.asarray, (M, t, dQ, src, dst))

        @jax.jit
        def both(M, t, dQ):
            Q, pullback = jax.vjp(lambda M, t: build_q(M, t, src, dst), M, t)
            return Q, *pullback(dQ)

        return lambda: jax.block_until_ready(both(M, t, dQ))

    def own(M, t, src, dst):
        return jnp.concatenate([M, t[None]])[src].reshape(len(src), src.shape[1] * t.size)

    return SimpleNamespace(
        array=jnp.asarray, tile=jnp.tile, vjp=vjp, hvp=hvp, check=check, timed=timed, own=own
    )


def pytorch_face() -> SimpleNamespace:
    import torch

    torch.set_num_threads(1)
    grad = torch.autograd.grad

    def leaves(inputs):
        return [x.detach().requires_grad_() for x in inputs]

    def vjp(f, inputs):
        inputs = leaves(inputs)
        outputs = f(*inputs)

        def pull(k, bar):
            return grad(
                outputs[k],
                inputs,
                torch.tensor(bar),
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )

        return [y.detach() for y in outputs], pull

    def hvp(loss, inputs, directions):
        inputs = leaves(inputs)
        slopes = grad(loss(*inputs), inputs, create_graph=True)
        return grad(sum((d * g).sum() for d, g in zip(directions, slopes, strict=True)), inputs)

    def check(f, inputs):
        inputs = leaves(inputs)
        once = torch.autograd.gradcheck(f, inputs, raise_exception=False)
        return once and torch.autograd.gradgradcheck(f, inputs, raise_exception=False)

    def timed(build_q, M, t, dQ, src, dst):
        M, t, dQ, src, dst = map(torch.tensor, (M, t, dQ, src, dst))
        M, t = leaves((M, t))

        def run():
            Q = build_q(M, t, src, dst)
            return Q.detach(), *grad(Q, (M, t), dQ)

        return run

    def own(M, t, src, dst):
        return torch.cat([M, t[None]])[src].reshape(len(src), src.shape[1] * len(t))

    return SimpleNamespace(
        array=torch.tensor, tile=torch.tile, vjp=vjp, hvp=hvp, check=check, timed=timed, own=own
    )


FACES = {
    "TensorFlow": (tensorflow_face, in_tensorflow),
    "TensorFlow, numpy_function": (tensorflow_face, in_tensorflow_with_numpy),
    "JAX": (jax_face, in_jax),
    "PyTorch": (pytorch_face, in_pytorch),
}

# --- two layers on a small image ------------------------------------------------------------------

F, CHANNELS = 2, (2, 4, 8)
JACOBIANS = {  # names: number of the output, number of the input
    "dM1/dM0": (0, 0),
    "dM1/dt0": (0, 1),
    "dM2/dM0": (2, 0),
    "dM2/dt0": (2, 1),
    "dt1/dt0": (1, 1),
    "dt2/dt0": (3, 1),
}


def example():
    """A 4 by 4 image with three active sites, weights of two layers, and their rulebooks."""
    sites, values = [[0, 0], [2, 2], [2, 3]], [[1.7, 0.7], [7.9, 0.9], [4.8, 0.8]]
    x = SparseValue(sites, values, (4, 4, CHANNELS[0]), np.zeros(CHANNELS[0]))
    rng = np.random.default_rng(1095)
    weights = [
        (rng.random((F * F * n_in, n_out)), rng.random(n_out))
        for n_in, n_out in zip(CHANNELS[:-1], CHANNELS[1:], strict=True)
    ]
    first = rulebook(x.sites, x.grid, F)
    return x, weights, (first, rulebook(first.sites, first.grid, F))


def two_layers(build_q: Callable, tile: Callable, weights, books) -> Callable:
    """Function of M0, t0 that gives M1, t1, M2, t2, in whichever framework."""

    def network(M, t):
        outputs = ()
        for (W, b), (src, dst) in zip(weights, books, strict=True):
            M, t = build_q(M, t, src, dst) @ W + b, (tile(t[None], (1, F * F)) @ W + b)[0]
            outputs = (*outputs, M, t)
        return outputs

    return network


def loss_of(network: Callable, array: Callable) -> Callable:
    """A loss that is not linear in anything, of operations that all frameworks share."""
    ones = array(np.ones((CHANNELS[-1], 1)))

    def loss(M, t):
        *_, M2, t2 = network(M, t)
        cubes = (M2 * M2 * M2) @ ones  # one for each site
        rows = array(np.ones((1, len(M2))))
        return (rows @ cubes / 1000 + t2[None] @ t2[:, None])[0, 0]

    return loss


def jacobian(outputs, pull, k: int, j: int) -> np.ndarray:
    """Of output k with respect to input j, from as many pullbacks as the output has entries."""
    shape = tuple(outputs[k].shape)
    rows = []
    for index in np.ndindex(shape):
        bar = np.zeros(shape)
        bar[index] = 1
        rows.append(np.asarray(pull(k, bar)[j]))
    return np.array(rows)


def ours(x, weights, books, directions):
    """The same from the package's Ops: all Jacobians, and the second derivative."""
    mode = Mode(linker="py", optimizer="fast_compile")
    M0, t0 = graph.symbolic_value("x0")
    y, outputs = graph.SymbolicValue(M0, t0), []
    for (W, b), rules in zip(weights, books, strict=True):
        y = graph.conv_with_q(y, W, b, rules)
        outputs += [y.values, y.ground_state]
    bars = [Y.type() for Y in outputs]
    total = sum((Y * bar).sum() for Y, bar in zip(outputs, bars, strict=True))
    pullback = pytensor.function([M0, t0, *bars], pt.grad(total, [M0, t0]), mode=mode)
    values = pytensor.function([M0, t0], outputs, mode=mode)(x.values, x.ground_state)

    def pull(k, bar):
        return pullback(
            x.values, x.ground_state, *(bar if i == k else 0 * Y for i, Y in enumerate(values))
        )

    jacobians = {name: jacobian(values, pull, *which) for name, which in JACOBIANS.items()}
    slopes = pt.grad((outputs[2] ** 3).sum() / 1000 + (outputs[3] ** 2).sum(), [M0, t0])
    slope = sum((d * g).sum() for d, g in zip(directions, slopes, strict=True))
    second = pytensor.function([M0, t0], pt.grad(slope, [M0, t0]), mode=mode)
    return jacobians, second(x.values, x.ground_state)


def against_ours(face, build_q: Callable, case, directions, reference) -> dict:
    """Relative errors of the six Jacobians and of the second derivative, and the own check."""
    x, weights, books = case
    array = face.array
    weights = [(array(W), array(b)) for W, b in weights]
    books = [(array(rules.src), array(rules.dst)) for rules in books]
    network = two_layers(build_q, face.tile, weights, books)
    inputs = [array(x.values), array(x.ground_state)]
    outputs, pull = face.vjp(network, inputs)
    jacobians, second = reference
    errors = {
        name: relative_error(jacobian(outputs, pull, *which), jacobians[name])
        for name, which in JACOBIANS.items()
    }
    found = face.hvp(loss_of(network, array), inputs, [array(d) for d in directions])
    error = max(relative_error(np.asarray(a), b) for a, b in zip(found, second, strict=True))
    return {"jacobians": errors, "second": error, "own check": bool(face.check(network, inputs))}


# --- how long it takes ----------------------------------------------------------------------------


def contenders(setting: str, built: dict) -> dict[str, Callable]:
    """Functions that return Q and its pullback for one cotangent; all give the same."""
    rng = np.random.default_rng(128)
    if setting == "small":
        x, _, (rules, _) = example()
        M, t = x.values, x.ground_state
    else:
        size, n = 128, 8
        rules = rulebook(random_sites(size, 0.05, rng), (size, size), 3)
        M, t = rng.standard_normal((len(rules.dst), n)), rng.standard_normal(n)
    dtype = M.dtype if setting == "small" else np.float32
    M, t = M.astype(dtype), t.astype(dtype)
    src, dst = rules.src, rules.dst
    dQ = rng.standard_normal((len(src), src.shape[1] * t.size)).astype(dtype)
    symbols = [pt.as_tensor(a).type() for a in (M, t, dQ, src, dst)]
    outputs = [op.build_q(*symbols[:2], *symbols[3:]), *op.grad_q(*symbols[2:])]
    compiled = pytensor.function(symbols, outputs, mode="NUMBA", trust_input=True)
    runs = {
        "ours, Numba": lambda: compiled(M, t, dQ, src, dst),
        "ours, NumPy": lambda: (numpy_build_q(M, t, rules), *numpy_grad_q(dQ, rules)),
    }
    for name, (face, build_q) in built.items():
        runs[name] = face.timed(build_q, M, t, dQ, src, dst)
        if "numpy" not in name:
            runs[f"{name}, its own gradient"] = face.timed(face.own, M, t, dQ, src, dst)
    expected = runs["ours, NumPy"]()
    for name, run in runs.items():
        for value, reference in zip(run(), expected, strict=True):
            error = relative_error(np.asarray(value), reference)
            assert error < 1e-5, f"{name} computes something else: {error:.0e}"
    return runs


def main(seconds: float, path: Path | None) -> None:
    threadpool_limits(1)
    keep_to_one_core()  # before the frameworks start their threads
    keep_memory()
    built, faces = {}, {}
    for name, (make_face, make_q) in FACES.items():
        try:
            faces[make_face] = faces.get(make_face) or make_face()
            built[name] = faces[make_face], make_q()
        except ImportError as error:
            print(f"{name} is left out: {error}")
    case = example()
    x = case[0]
    rng = np.random.default_rng(7)
    directions = rng.standard_normal(x.values.shape), rng.standard_normal(x.shape[-1])
    reference = ours(*case, directions)
    record = {"machine": machine(), "frameworks": {}, "differences": {}, "times": {}}
    versions = {
        d.name.lower().replace("_", "-"): d.version for d in metadata.distributions() if d.name
    }
    record["frameworks"] = {name: versions[name] for name in PACKAGES if name in versions}
    for name, (face, build_q) in built.items():
        found = against_ours(face, build_q, case, directions, reference)
        record["differences"][name] = found
        worst = max(found["jacobians"].values())
        print(f"{name}: Jacobians {worst:.0e}, second derivative {found['second']:.0e}, "
              f"own check passes: {found['own check']}")  # fmt: skip
    for setting in ("small", "128 x 128"):
        times = compare(contenders(setting, built), seconds=seconds, label=setting)
        print(setting, times.table(), sep="\n")
        record["times"][setting] = {
            "rounds": len(times.seconds["ours, NumPy"]),
            "seconds": {
                name: [float(f"{q:.3e}") for q in quantiles(t)] for name, t in times.seconds.items()
            },
            "ratio": {
                name: [float(f"{r:.3e}") for r in times.ratio(name, "ours, Numba")]
                for name in times.seconds
            },
        }
    if path is None and len(built) < len(FACES):
        print("frameworks are missing: nothing is written")
        return
    path = path or RECORD
    write_record(record, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10, help="budget of each timing")
    parser.add_argument("--record", type=Path, help="file to write")
    options = parser.parse_args()
    main(options.seconds, options.record)
