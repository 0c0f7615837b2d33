r"""The PyTensor Ops: linear and bilinear maps, whose pullbacks are each other.

Two families, each closed under differentiation, so that derivatives of every order exist.

- With Q: ``BuildQ`` is linear in (values, ground state), and ``GradQ`` is its transpose.
- Without Q: with :math:`\langle\cdot,\cdot\rangle` summing over outputs o and positions k that
  hold an active site,

  .. math:: \phi(M, W, Y) = \sum_{o,k} M_{\text{src}(o,k)}^\top W_k Y_o

  is linear in each argument. ``Conv``, ``ConvGradValues`` and ``ConvGradWeights`` are its
  gradients with respect to Y, M and W, so the pullback of each is made of the other two.
  Positions without a site are a sum of the same form: ``SpreadGround`` and its transpose
  ``SumGround``.

Max pooling finds its winners first (``PoolWinners``, integers) and is linear from there:
``Take`` and its transpose ``PutBack``.

Every Op ends its inputs with the integer arrays of a rulebook. In every mode of PyTensor it runs
its kernel of ``helpers.sparse_conv.kernels``; ``numpy`` is the same in NumPy, for complex steps.
"""

import zlib
from itertools import chain
from pathlib import Path

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType, disconnected_type
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.graph.traversal import variable_depends_on
from pytensor.scalar import upcast
from pytensor.tensor.rewriting.basic import register_specialize

from helpers.kalman.numba_backend import numba_njit, register_funcify_default_op_cache_key
from helpers.sparse_conv import conv, kernels, pairs, pool
from helpers.sparse_conv.rules import WINDOWS, Rulebook


class RulebookOp(Op):
    """Base: floating inputs of one dtype, then two integer matrices of a rulebook.

    A subclass gives the shapes of its floating inputs and of its outputs in letters (a and o count
    input and output sites, k positions of a window, n and m channels), its `kernel`, the NumPy
    function of a rulebook that is its `reference`, and either the linear map that is its `adjoint`
    or `transpose`: the cotangents of its floating inputs from the rulebook's arrays, the floating
    inputs and the cotangents of its outputs.
    """

    __props__ = ()
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rules = ("o k", "a k")
    out_dtype: str | None = None  # that of the inputs
    adjoint: Op | None = None

    def make_node(self, *inputs):
        count = len(self.inputs)
        if len(inputs) != count + len(self.rules):
            raise ValueError(
                f"{self} takes {count} arrays and {len(self.rules)} of a rulebook, "
                f"got {len(inputs)} inputs"
            )
        inputs = [pt.as_tensor_variable(x) for x in inputs]
        floats, integers = inputs[:count], inputs[count:]
        dtype = upcast(*(x.dtype for x in floats), "float32")
        if dtype not in ("float32", "float64"):
            raise TypeError(f"{self} takes float32 or float64, got {[x.dtype for x in floats]}")
        for x, ndim in zip(floats, map(_ndim, self.inputs), strict=True):
            if x.ndim != ndim:
                raise ValueError(f"{self}: {x} has {x.ndim} dimensions, expected {ndim}")
        for x in integers:
            if x.ndim != 2 or x.dtype not in ("int32", "int64"):
                raise ValueError(f"{self}: {x} is {x.type}, expected a matrix of int32 or int64")
        inputs = [pt.cast(x, dtype) for x in floats] + integers
        shapes = [(None,) * _ndim(letters) for letters in self.outputs]
        out_dtype = self.out_dtype or dtype
        return Apply(self, inputs, [pt.tensor(dtype=out_dtype, shape=shape) for shape in shapes])

    def infer_shape(self, node, shapes):
        letters = " ".join((*self.inputs, *self.rules)).split()
        length = dict(zip(letters, chain(*shapes), strict=True))
        if "n" not in length and "kn" in length:
            length["n"] = length["kn"] // pt.maximum(length["k"], 1)  # no position: no channels
        if "kn" not in length and "n" in length:
            length["kn"] = length["k"] * length["n"]
        return [tuple(length[x] for x in out.split()) for out in self.outputs]

    def connection_pattern(self, node):
        connected = self.out_dtype is None
        floats, integers = ([y] * len(self.outputs) for y in (connected, False))
        return [floats] * len(self.inputs) + [integers] * len(self.rules)

    def pullback(self, inputs, outputs, cotangents):
        cotangents = [  # zeros if nothing depends on that output
            pt.zeros_like(y) if isinstance(c.type, DisconnectedType) else c
            for c, y in zip(cotangents, outputs, strict=True)
        ]
        floats, rules = inputs[: len(self.inputs)], inputs[len(self.inputs) :]
        return [*self.transpose(rules, *floats, *cotangents), *(disconnected_type() for _ in rules)]

    def transpose(self, rules, *arrays):
        if self.adjoint is None:
            raise NotImplementedError
        return self.adjoint(*arrays[len(self.inputs) :], *rules, return_list=True)

    def numpy(self, *inputs):
        *floats, src, dst = inputs
        # As much of a Rulebook as the functions look at; of its kind the Ops are not told.
        rules = Rulebook(None, (), src, dst, WINDOWS, None, ())
        return self.reference(*floats, rules)

    def perform(self, node, inputs, output_storage):
        # A kernel is compiled for each layout of its arrays: one is enough.
        results = self.kernel(*(np.ascontiguousarray(x) for x in inputs))
        results = results if isinstance(results, tuple) else (results,)
        for storage, result in zip(output_storage, results, strict=True):
            storage[0] = result


def _ndim(letters: str) -> int:
    return len(letters.split())


# --- with Q ---------------------------------------------------------------------------------------


class BuildQ(RulebookOp):
    """(values, ground_state) -> Q (a_out, f^d*n_in)."""

    inputs, outputs, rules = ("a n", "n"), ("o kn",), ("o k", "a j")  # j: it looks at src alone
    kernel, reference = map(staticmethod, (kernels.build_q, conv.build_q))


class GradQ(RulebookOp):
    """dQ -> dM (a_in, n_in), dt (n_in,)."""

    inputs, outputs = ("o kn",), ("a n", "n")
    kernel, reference = map(staticmethod, (kernels.grad_q, conv.grad_q))


# --- without Q ------------------------------------------------------------------------------------


class Conv(RulebookOp):
    """(values, W, tW (f^d, n_out)) -> Y (a_out, n_out)."""

    inputs, outputs = ("a n", "kn m", "k m"), ("o m",)
    kernel, reference = map(staticmethod, (kernels.conv, pairs.conv_pairs))

    def transpose(self, rules, values, W, tW, dY):
        dM, dW = conv_grad_values(dY, W, *rules), conv_grad_weights(values, dY, *rules)
        return [dM, dW, sum_ground(dY, *rules)]


def _conv_pairs(values, W, src, dst):
    """Conv where the ground state is zero."""
    return conv_pairs(values, W, pt.zeros((dst.shape[1], W.shape[1]), dtype=W.dtype), src, dst)


class ConvGradValues(RulebookOp):
    """(dY, W) -> dM (a_in, n_in)."""

    inputs, outputs, rules = ("o m", "kn m"), ("a n",), ("o j", "a k")
    kernel, reference = map(staticmethod, (kernels.conv_grad_values, pairs.pairs_grad_values))

    def transpose(self, rules, dY, W, dM_bar):
        return [_conv_pairs(dM_bar, W, *rules), conv_grad_weights(dM_bar, dY, *rules)]


class ConvGradWeights(RulebookOp):
    """(values, dY) -> dW (f^d*n_in, n_out), pairs alone."""

    inputs, outputs, rules = ("a n", "o m"), ("kn m",), ("o j", "a k")
    kernel, reference = map(staticmethod, (kernels.conv_grad_weights, pairs.pairs_grad_weights))

    def transpose(self, rules, values, dY, dW_bar):
        return [conv_grad_values(dY, dW_bar, *rules), _conv_pairs(values, dW_bar, *rules)]


class ConvGrads(RulebookOp):
    """(values, W, dY) -> dM, dW: a rewrite puts it where both are wanted, after all pullbacks."""

    inputs, outputs = ("a n", "kn m", "o m"), ("a n", "kn m")
    kernel = staticmethod(kernels.conv_grads)

    @staticmethod
    def reference(values, W, dY, rules):
        return pairs.pairs_grad_values(dY, W, rules), pairs.pairs_grad_weights(values, dY, rules)


class SpreadGround(RulebookOp):
    """D (f^d, n_out) -> Y (a_out, n_out)."""

    inputs, outputs = ("k m",), ("o m",)
    kernel, reference = map(staticmethod, (kernels.spread_ground, pairs.spread_ground))


class SumGround(RulebookOp):
    """dY (a_out, n_out) -> D (f^d, n_out)."""

    inputs, outputs, rules = ("o m",), ("k m",), ("o k", "a j")
    kernel, reference = map(staticmethod, (kernels.sum_ground, pairs.sum_ground))


# --- max pooling ----------------------------------------------------------------------------------


class PoolWinners(RulebookOp):
    """(values, ground_state) -> winner (a_out, n), int32: the maxima's places, constant nearby."""

    inputs, outputs, out_dtype = ("a n", "n"), ("o n",), "int32"
    kernel, reference = map(staticmethod, (kernels.pool_winners, pool.max_pool_winners))

    def transpose(self, rules, values, ground_state, winner_bar):
        return [disconnected_type(), disconnected_type()]


class Take(RulebookOp):
    """(values, ground_state) -> P (a_out, n), given (winner, dst)."""

    inputs, outputs, rules = ("a n", "n"), ("o n",), ("o n", "a k")
    kernel = staticmethod(kernels.take)

    def numpy(self, values, ground_state, winner, dst):
        return pool.take_winners(values, ground_state, winner)


class PutBack(RulebookOp):
    """dP (a_out, n) -> dM (a_in, n), dt (n,), given (winner, dst)."""

    inputs, outputs, rules = ("o n",), ("a n", "n"), ("o n", "a k")
    kernel = staticmethod(kernels.put_back)

    def numpy(self, dP, winner, dst):
        return pool.max_pool_grad(dP, winner, len(dst))


build_q, grad_q = BuildQ(), GradQ()
conv_pairs, conv_grads = Conv(), ConvGrads()
conv_grad_values, conv_grad_weights = ConvGradValues(), ConvGradWeights()
spread_ground, sum_ground = SpreadGround(), SumGround()
pool_winners, take, put_back = PoolWinners(), Take(), PutBack()
for one, other in ((build_q, grad_q), (spread_ground, sum_ground), (take, put_back)):
    type(one).adjoint, type(other).adjoint = other, one


# --- how Numba runs them, and one rewrite ---------------------------------------------------------

# Compiled graphs are kept on disk: other kernels, or another way to call them, other key.
VERSION = zlib.crc32(b"".join(Path(f).read_bytes() for f in (__file__, kernels.__file__)))


def _numba(sparse_op, node=None, **kwargs):
    kernel = sparse_op.kernel

    @numba_njit
    def call(*arrays):
        return kernel(*arrays)

    return call, VERSION


for op_type in RulebookOp.__subclasses__():
    register_funcify_default_op_cache_key(op_type)(_numba)


@register_specialize
@node_rewriter([ConvGradValues])
def both_gradients_at_once(fgraph, node):
    """Gradients to values and to W of one layer: one gather in place of two."""
    dY, W, *rules = node.inputs
    for client, _ in fgraph.clients[dY]:
        if not isinstance(client.op, ConvGradWeights) or client.inputs[1:] != [dY, *rules]:
            continue
        # In a second derivative the one may need the other first.
        if variable_depends_on(client.inputs[0], node.outputs) or variable_depends_on(
            W, client.outputs
        ):
            continue
        dM, dW = conv_grads(client.inputs[0], W, dY, *rules)
        return {node.outputs[0]: dM, client.outputs[0]: dW}
    return None
