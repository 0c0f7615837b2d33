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

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType, disconnected_type
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.scalar import upcast

from helpers.sparse_conv import conv, kernels, pairs, pool


def _cotangent(cotangent, like):
    """The cotangent, zeros if nothing depends on that output."""
    return pt.zeros_like(like) if isinstance(cotangent.type, DisconnectedType) else cotangent


class RulebookOp(Op):
    """Base: `n_float` floating inputs of one dtype, then integer matrices of a rulebook.

    A subclass gives `ndims`, the dimensions of its floating inputs, `out_ndims`, those of its
    outputs, `kernel`, `numpy`, and `transpose`, the cotangents of its floating inputs.
    """

    __props__ = ()
    ndims: tuple[int, ...]
    out_ndims: tuple[int, ...] = (2,)
    integers = 2

    def make_node(self, *inputs):
        if len(inputs) != len(self.ndims) + self.integers:
            raise ValueError(
                f"{self} takes {len(self.ndims)} arrays and {self.integers} of a rulebook, "
                f"got {len(inputs)} inputs"
            )
        inputs = [pt.as_tensor_variable(x) for x in inputs]
        floats, integers = inputs[: len(self.ndims)], inputs[len(self.ndims) :]
        dtype = upcast(*(x.dtype for x in floats), "float32")
        if dtype not in ("float32", "float64"):
            raise TypeError(f"{self} takes float32 or float64, got {[x.dtype for x in floats]}")
        for x, ndim in zip(floats, self.ndims, strict=True):
            if x.ndim != ndim:
                raise ValueError(f"{self}: {x} has {x.ndim} dimensions, expected {ndim}")
        for x in integers:
            if x.ndim != 2 or x.dtype not in ("int32", "int64"):
                raise ValueError(f"{self}: {x} is {x.type}, expected a matrix of int32 or int64")
        inputs = [pt.cast(x, dtype) for x in floats] + integers
        return Apply(self, inputs, [self.out_type(ndim, dtype) for ndim in self.out_ndims])

    def out_type(self, ndim, dtype):
        return pt.tensor(dtype=dtype, shape=(None,) * ndim)

    def connection_pattern(self, node):
        return [[k < len(self.ndims)] * len(node.outputs) for k in range(len(node.inputs))]

    def pullback(self, inputs, outputs, cotangents):
        cotangents = [_cotangent(c, y) for c, y in zip(cotangents, outputs, strict=True)]
        return [
            *self.transpose(inputs, cotangents),
            *(disconnected_type() for _ in range(self.integers)),
        ]

    def transpose(self, inputs, cotangents):
        raise NotImplementedError

    def perform(self, node, inputs, output_storage):
        # A kernel is compiled for each layout of its arrays: one is enough.
        results = self.kernel(*(np.ascontiguousarray(x) for x in inputs))
        results = results if isinstance(results, tuple) else (results,)
        for storage, result in zip(output_storage, results, strict=True):
            storage[0] = result


def _rules(src, dst):
    """As much of a Rulebook as the NumPy functions look at; of its kind the Ops are not told."""
    return SimpleNamespace(src=src, dst=dst, transposed=False)


# --- with Q ---------------------------------------------------------------------------------------


class BuildQ(RulebookOp):
    """(values, ground_state) -> Q (a_out, f^d*n_in)."""

    kernel = staticmethod(kernels.build_q)
    ndims = (2, 1)

    def numpy(self, values, ground_state, src, dst):
        return conv.build_q(values, ground_state, _rules(src, dst))

    def transpose(self, inputs, cotangents):
        return grad_q(*cotangents, *inputs[2:])

    def infer_shape(self, node, shapes):
        return [(shapes[2][0], shapes[2][1] * shapes[0][1])]


class GradQ(RulebookOp):
    """dQ -> dM (a_in, n_in), dt (n_in,)."""

    kernel = staticmethod(kernels.grad_q)
    ndims = (2,)
    out_ndims = (2, 1)

    def numpy(self, dQ, src, dst):
        return conv.grad_q(dQ, _rules(src, dst))

    def transpose(self, inputs, cotangents):
        return [build_q(*cotangents, *inputs[1:])]

    def infer_shape(self, node, shapes):
        n_in = shapes[0][1] // pt.maximum(shapes[1][1], 1)  # no position: no channels
        return [(shapes[2][0], n_in), (n_in,)]


# --- without Q ------------------------------------------------------------------------------------


class Conv(RulebookOp):
    """(values, W, tW (f^d, n_out)) -> Y (a_out, n_out)."""

    kernel = staticmethod(kernels.conv)
    ndims = (2, 2, 2)

    def numpy(self, values, W, tW, src, dst):
        return pairs.conv_pairs(values, W, tW, _rules(src, dst))

    def transpose(self, inputs, cotangents):
        values, W, _, *rules = inputs
        (dY,) = cotangents
        return [
            conv_grad_values(dY, W, *rules),
            conv_grad_weights(values, dY, *rules),
            sum_ground(dY, *rules),
        ]

    def infer_shape(self, node, shapes):
        return [(shapes[3][0], shapes[1][1])]


def _conv_pairs(values, W, src, dst):
    """Conv where the ground state is zero."""
    return conv_pairs(values, W, pt.zeros((dst.shape[1], W.shape[1]), dtype=W.dtype), src, dst)


class ConvGradValues(RulebookOp):
    """(dY, W) -> dM (a_in, n_in)."""

    kernel = staticmethod(kernels.conv_grad_values)
    ndims = (2, 2)

    def numpy(self, dY, W, src, dst):
        return pairs.pairs_grad_values(dY, W, _rules(src, dst))

    def transpose(self, inputs, cotangents):
        dY, W, *rules = inputs
        (dM_bar,) = cotangents
        return [_conv_pairs(dM_bar, W, *rules), conv_grad_weights(dM_bar, dY, *rules)]

    def infer_shape(self, node, shapes):
        return [(shapes[3][0], shapes[1][0] // shapes[3][1])]


class ConvGradWeights(RulebookOp):
    """(values, dY) -> dW (f^d*n_in, n_out), pairs alone."""

    kernel = staticmethod(kernels.conv_grad_weights)
    ndims = (2, 2)

    def numpy(self, values, dY, src, dst):
        return pairs.pairs_grad_weights(values, dY, _rules(src, dst))

    def transpose(self, inputs, cotangents):
        values, dY, *rules = inputs
        (dW_bar,) = cotangents
        return [conv_grad_values(dY, dW_bar, *rules), _conv_pairs(values, dW_bar, *rules)]

    def infer_shape(self, node, shapes):
        return [(shapes[3][1] * shapes[0][1], shapes[1][1])]


class ConvGrads(RulebookOp):
    """(values, W, dY) -> dM, dW: a rewrite puts it where both are wanted, after all pullbacks."""

    kernel = staticmethod(kernels.conv_grads)
    ndims = (2, 2, 2)
    out_ndims = (2, 2)

    def numpy(self, values, W, dY, src, dst):
        rules = _rules(src, dst)
        return pairs.pairs_grad_values(dY, W, rules), pairs.pairs_grad_weights(values, dY, rules)

    def infer_shape(self, node, shapes):
        return [shapes[0], shapes[1]]


class SpreadGround(RulebookOp):
    """D (f^d, n_out) -> Y (a_out, n_out)."""

    kernel = staticmethod(kernels.spread_ground)
    ndims = (2,)

    def numpy(self, D, src, dst):
        return pairs.spread_ground(D, _rules(src, dst))

    def transpose(self, inputs, cotangents):
        return [sum_ground(*cotangents, *inputs[1:])]

    def infer_shape(self, node, shapes):
        return [(shapes[1][0], shapes[0][1])]


class SumGround(RulebookOp):
    """dY (a_out, n_out) -> D (f^d, n_out)."""

    kernel = staticmethod(kernels.sum_ground)
    ndims = (2,)

    def numpy(self, dY, src, dst):
        return pairs.sum_ground(dY, _rules(src, dst))

    def transpose(self, inputs, cotangents):
        return [spread_ground(*cotangents, *inputs[1:])]

    def infer_shape(self, node, shapes):
        return [(shapes[1][1], shapes[0][1])]


# --- max pooling ----------------------------------------------------------------------------------


class PoolWinners(RulebookOp):
    """(values, ground_state) -> winner (a_out, n), int32: the maxima's places, constant nearby."""

    kernel = staticmethod(kernels.pool_winners)
    ndims = (2, 1)

    def out_type(self, ndim, dtype):
        return pt.imatrix()

    def connection_pattern(self, node):
        return [[False]] * len(node.inputs)

    def numpy(self, values, ground_state, src, dst):
        return pool.max_pool_winners(values, ground_state, _rules(src, dst))

    def transpose(self, inputs, cotangents):
        return [disconnected_type() for _ in self.ndims]

    def infer_shape(self, node, shapes):
        return [(shapes[2][0], shapes[0][1])]


class Take(RulebookOp):
    """(values, ground_state) -> P (a_out, n), given (winner, dst)."""

    kernel = staticmethod(kernels.take)
    ndims = (2, 1)

    def numpy(self, values, ground_state, winner, dst):
        return pool.take_winners(values, ground_state, winner)

    def transpose(self, inputs, cotangents):
        return put_back(*cotangents, *inputs[2:])

    def infer_shape(self, node, shapes):
        return [shapes[2]]


class PutBack(RulebookOp):
    """dP (a_out, n) -> dM (a_in, n), dt (n,), given (winner, dst)."""

    kernel = staticmethod(kernels.put_back)
    ndims = (2,)
    out_ndims = (2, 1)

    def numpy(self, dP, winner, dst):
        return pool.max_pool_grad(dP, winner, len(dst))

    def transpose(self, inputs, cotangents):
        return [take(*cotangents, *inputs[1:])]

    def infer_shape(self, node, shapes):
        return [(shapes[2][0], shapes[0][1]), (shapes[0][1],)]


build_q, grad_q = BuildQ(), GradQ()
conv_pairs, conv_grads = Conv(), ConvGrads()
conv_grad_values, conv_grad_weights = ConvGradValues(), ConvGradWeights()
spread_ground, sum_ground = SpreadGround(), SumGround()
pool_winners, take, put_back = PoolWinners(), Take(), PutBack()
