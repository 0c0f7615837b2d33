"""Products of the small matrices around the filter, and what of them never changes.

A model's arrays are functions of its parameters: W = R Q R' is two products of matrices, and its
gradient three more.  PyTensor's `Dot` calls BLAS for each, from code that Numba compiles for half a
minute where it is not on disk yet, many times what the products are worth: next to a filter's
hundreds of steps with matrices of that size they take no time, however they are written.  Here they
are three loops.

Of a structural model most arrays are constant, but put together anew in each call, as PyTensor
folds no `Alloc`.  A rewrite folds whatever constant leads to one of the filter's Ops.
"""

from __future__ import annotations

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.mode import optdb
from pytensor.gradient import DisconnectedType, disconnected_type
from pytensor.graph import Apply, Op
from pytensor.graph.basic import Constant
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.rewriting.basic import GraphRewriter
from pytensor.graph.traversal import toposort
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.rewriting.basic import unconditional_constant_folding

from helpers.kalman.numba_backend import numba_njit, register_funcify_and_cache_key


class Product(Op):
    """A (m, k), B (k, n) -> A B, without BLAS."""

    __props__ = ()
    gufunc_signature = "(m,k),(k,n)->(m,n)"

    def make_node(self, A, B):
        A, B = pt.as_tensor(A), pt.as_tensor(B)
        if (A.ndim, B.ndim) != (2, 2):
            raise TypeError(f"a product of {A.ndim} and {B.ndim} dimensions, expected 2 and 2")
        dtype = np.result_type(A.dtype, B.dtype, np.float32).name
        A, B = A.astype(dtype), B.astype(dtype)
        return Apply(
            self, [A, B], [pt.matrix(dtype=dtype, shape=(A.type.shape[0], B.type.shape[1]))]
        )

    def perform(self, node, inputs, output_storage):
        A, B = inputs
        output_storage[0][0] = A @ B

    def infer_shape(self, node, shapes):
        return [(shapes[0][0], shapes[1][1])]

    def pullback(self, inputs, outputs, cotangents):
        (A, B), (bar,) = inputs, cotangents
        if isinstance(bar.type, DisconnectedType):
            return [disconnected_type(), disconnected_type()]
        return [self(bar, B.mT), self(A.mT, bar)]

    def pushforward(self, inputs, outputs, tangents):
        (A, B), (dA, dB) = inputs, tangents
        moves = [] if isinstance(dA.type, DisconnectedType) else [self(dA, B)]
        moves += [] if isinstance(dB.type, DisconnectedType) else [self(A, dB)]
        return [sum(moves[1:], moves[0]) if moves else disconnected_type()]


@register_funcify_and_cache_key(Product)
def numba_funcify_product(op, node, **kwargs):
    """Three loops, and a key under which PyTensor keeps them on disk."""
    dtype = np.dtype(node.outputs[0].dtype)

    @numba_njit
    def product(A, B):
        if A.shape[1] != B.shape[0]:
            raise ValueError("two matrices do not fit: columns of the first, rows of the second")
        out = np.zeros((A.shape[0], B.shape[1]), dtype)
        for i in range(A.shape[0]):
            for k in range(A.shape[1]):
                for j in range(B.shape[1]):
                    out[i, j] += A[i, k] * B[k, j]
        return out

    return product, f"kalman-product-{dtype.name}-1"


_product = Product()
_products = Blockwise(_product)


def product(A, B):
    """A B, of matrices or of stacks of them."""
    A, B = pt.as_tensor(A), pt.as_tensor(B)
    return (_product if A.ndim == B.ndim == 2 else _products)(A, B)


def sandwich(R, Q):
    """R Q R'."""
    return product(product(R, Q), R.mT)


class FoldConstants(GraphRewriter):
    """Compute, once and for all, what leads from constants alone to an Op of these kinds."""

    def __init__(self, kinds: tuple[type, ...]):
        self.kinds = kinds

    def apply(self, fgraph):
        ends = [
            X
            for node in fgraph.apply_nodes
            if isinstance(getattr(node.op, "core_op", node.op), self.kinds)
            for X in node.inputs
        ]
        for node in toposort(ends):
            if isinstance(node.op, HasInnerGraph | CheckAndRaise):
                continue
            if not all(isinstance(X, Constant) for X in node.inputs):
                continue
            folded = unconditional_constant_folding.transform(fgraph, node)
            if folded:
                fgraph.replace_all(
                    zip(node.outputs, folded, strict=True), reason=type(self).__name__
                )


def fold_constants_into(*kinds: type) -> None:
    """Let PyTensor do so in every function that it compiles."""
    optdb.register(
        "helpers_kalman_fold_constants", FoldConstants(kinds), "fast_run", "fast_compile",
        position=0.5,
    )  # fmt: skip
