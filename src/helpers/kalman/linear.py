"""Linear maps with constant coefficients around the filter, each as one Op.

Between a model's parameters and the filter's arrays, and on the way back from the filter's
gradients, most of what a graph does is to move numbers: into a block of a matrix, onto its
diagonal, out of it again, times a constant R on both sides.  PyTensor has an Op for each move, and
in Numba mode each of them is compiled for every kind of index and every layout of arrays: half a
second of compilation for a few dozen numbers.  All of it is y = A x + b with constants A and b,
which are known when the function is compiled.  A rewrite follows where each number comes from, and
puts one :class:`LinearMap` in the place of the whole way.  Its code does not depend on A, so that
it is compiled once for each number of dimensions and found on disk from then on.
"""

from __future__ import annotations

from hashlib import sha256
from math import prod

import numpy as np
import pytensor.scalar as ps
import pytensor.tensor as pt
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.mode import optdb
from pytensor.graph import Apply, Op
from pytensor.graph.basic import Constant
from pytensor.graph.rewriting.basic import GraphRewriter
from pytensor.tensor.basic import (
    Alloc,
    ARange,
    ExtractDiag,
    Join,
    MakeVector,
    Split,
)
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.linalg.constructors import BlockDiagonal
from pytensor.tensor.math import Sum
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    IncSubtensor,
    Subtensor,
)
from pytensor.tensor.type import TensorType
from scipy.sparse import coo_array, csr_array, vstack

from helpers.kalman.numba_backend import (
    compile_numba_function_src,
    numba_njit,
    register_funcify_and_cache_key,
)
from helpers.kalman.ops.likelihood import OfModel, Product
from helpers.kalman.ops.rewrites import merge

# Larger maps are left to PyTensor.  Coefficients are constants of the compiled function; and where
# there are many numbers to move, code that knows how they lie is worth its compilation.
COEFFICIENTS = 10_000
ENTRIES = 300_000  # of an array: looking at more of them takes longer than compiling
# All maps have this many columns: the matrices are sparse, so that columns without entries cost
# nothing.
COLUMNS = np.iinfo(np.int32).max

# These put numbers elsewhere, repeat or drop them, and put zeros between them.
MOVES = (
    Alloc,
    AdvancedSubtensor,
    BlockDiagonal,
    DimShuffle,
    ExtractDiag,
    Join,
    MakeVector,
    Reshape,
    SpecifyShape,
    Split,
    Subtensor,
)
INCREMENTS = IncSubtensor, AdvancedIncSubtensor
# These elementwise functions may be linear in one argument.
LINEAR = ps.Add, ps.Identity, ps.Mul, ps.Neg, ps.Sub, ps.TrueDiv
FOLLOWED = (
    *MOVES,
    *INCREMENTS,
    ARange,
    Blockwise,
    Elemwise,
    OpFromGraph,
    Product,
    Shape,
    Shape_i,
    Sum,
)
# These cost next to nothing to compile, or are fused with what is beside them.
CHEAP = DimShuffle, Elemwise, MakeVector, Subtensor, Sum


class LinearMap(Op):
    """y = b + sum of the A x, with A as rows and columns (2, count) and values before each x.

    y has `shape` and each x its number of dimensions, of `ndims`; their entries are numbered row by
    row. The first input holds the lengths of y and then how many entries each x has, the next two
    where b is not zero and what it is there.

    A coefficient that is zero is not there, so that its product with an infinite or NaN entry of x
    is zero, where the Ops that the map replaces would say NaN.
    """

    __props__ = ("shape", "ndims")

    def __init__(self, shape: tuple[int, ...], ndims: tuple[int, ...]):
        self.shape, self.ndims = shape, ndims

    def make_node(self, *inputs):
        inputs = [pt.as_tensor(X) for X in inputs]
        expected = [1, 1, 1, *(k for ndim in self.ndims for k in (2, 1, ndim))]
        for k, (X, ndim) in enumerate(zip(inputs, expected, strict=True)):
            if X.ndim != ndim:
                raise TypeError(f"input {k} has {X.ndim} dimensions, expected {ndim}")
        for X in inputs[5::3]:
            if X.dtype != "float64":
                raise TypeError(f"a map of {X}, which is of {X.dtype}, expected float64")
        return Apply(self, inputs, [pt.tensor(dtype="float64", shape=self.shape)])

    def perform(self, node, inputs, output_storage):
        lengths, at, b, *terms = inputs
        y = np.zeros(self.shape)
        flat = y.reshape(-1)
        flat[at] = b
        sizes = lengths[len(self.shape) :]
        for size, where, values, x in zip(sizes, *[iter(terms)] * 3, strict=True):
            if x.size != size:
                raise ValueError(f"an array has {x.size} entries, expected {size}")
            np.add.at(flat, where[0], values * np.ravel(x)[where[1]])
        output_storage[0][0] = y

    def infer_shape(self, node, shapes):
        return [tuple(pt.constant(k, dtype="int64") for k in self.shape)]


@register_funcify_and_cache_key(LinearMap)
def numba_funcify_linear_map(op, node, **kwargs):
    """A call of :func:`~helpers.kalman.terms.add_terms`, and a key to keep it on disk by PyTensor.

    All that differs from map to map is an argument, so that many of them are one function.
    """
    from helpers.kalman.terms import SYMBOL, add_terms

    ndim, count = len(op.shape), len(op.ndims)
    terms = [f"where_{i}, values_{i}, x_{i}, " for i in range(count)]
    lengths = [f"lengths[{i}], " for i in range(ndim)]
    source = "\n".join((
        f"def linear_map(lengths, at, b, {''.join(terms)}):",
        f"    y = np.zeros(({''.join(lengths)}))",
        f"    if add_terms(y, lengths, at, b, ({''.join(terms)})):",
        "        raise ValueError('an array is not of the size that it was compiled for')",
        "    return y",
    ))  # fmt: skip
    known = {"np": np, "add_terms": add_terms}
    function = compile_numba_function_src(source, "linear_map", global_env=known)
    return numba_njit(function), sha256(f"{SYMBOL} {source}".encode()).hexdigest()


class Affine:
    """What a variable is: its entries, in the order of rows, are matrix @ sources + offset."""

    def __init__(self, matrix: csr_array, offset: np.ndarray, shape: tuple[int, ...]):
        self.matrix, self.offset, self.shape = matrix, offset, shape

    @property
    def counts(self) -> np.ndarray:
        """How many coefficients each entry has."""
        return np.diff(self.matrix.indptr)


class Source(Affine):
    """What a source is of itself: an identity, made when it is asked for.

    In most functions more arrays are read beside the maps than by them, and an identity takes
    several times their memory.
    """

    def __init__(self, first: int, shape: tuple[int, ...]):
        self.first, self.shape = first, shape

    @property
    def matrix(self) -> csr_array:
        size = prod(self.shape)
        columns = np.arange(self.first, self.first + size)
        return csr_array((np.ones(size), columns, np.arange(size + 1)), shape=(size, COLUMNS))

    @property
    def counts(self) -> np.ndarray:
        return np.ones(prod(self.shape), np.int64)

    @property
    def offset(self) -> np.ndarray:
        return np.zeros(prod(self.shape))


class NotLinear(Exception):  # noqa: N818 (no error: a node at which a map begins)
    """The outputs of a node are not known to be affine in its inputs."""


class Follow:
    """Follows affine functions through the nodes of a graph, from `sources` with constant shapes.

    `state` has of each variable its `Affine`, its value if it is constant, or nothing.
    """

    def __init__(self, shape_of):
        self.shape_of = shape_of
        self.state, self.sources, self.used = {}, [], 0

    def get(self, X):
        """The state of a variable; one that no node before it gave is constant or a source."""
        if X not in self.state:
            self.state[X] = X.data if isinstance(X, Constant) else self._source(X)
        return self.state[X]

    def _source(self, X):
        shape = self.shape_of(X)
        if shape is None and is_float(X) and X.owner and isinstance(X.owner.op, Elemwise):
            # Of a batch, PyTensor does not always know how many there are.
            given = [self.get(Y) for Y in X.owner.inputs]
            if not any(Y is None for Y in given):
                try:
                    shape = common_shape(map(shape_of_state, given))
                except NotLinear:
                    return None
        if shape is None or prod(shape) > ENTRIES:
            return None
        size, first = prod(shape), self.used
        self.used += size
        self.sources.append((X, first, first + size))
        return Source(first, shape)

    def visit(self, node) -> bool:
        """Find the states of a node's outputs; False where they are sources."""
        if not self._may_follow(node):
            return False
        given = [self.get(X) for X in node.inputs]
        try:
            if any(X is None for X in given):
                raise NotLinear
            with np.errstate(all="ignore"):  # `combine` looks at what comes out
                found = self.outputs(node, given)
        except NotLinear:
            return False
        self.state |= zip(node.outputs, found, strict=True)
        return True

    def _may_follow(self, node) -> bool:
        """Whether a node is of a kind that is followed: what it reads need not be known if not."""
        if isinstance(node.op, Elemwise) and not isinstance(node.op.scalar_op, LINEAR):
            return all(self._is_constant(X) for X in node.inputs)
        return isinstance(node.op, FOLLOWED)

    def _is_constant(self, X) -> bool:
        if X not in self.state:
            return isinstance(X, Constant)
        return not (self.state[X] is None or isinstance(self.state[X], Affine))

    def outputs(self, node, given: list) -> list:
        """The states of a node's outputs from those of its inputs."""
        op = node.op
        if isinstance(op, Shape | Shape_i):
            shape = shape_of_state(given[0])
            return [np.array(shape if isinstance(op, Shape) else shape[op.i], dtype=np.int64)]
        if isinstance(op, OpFromGraph):
            return self._through(op.fgraph, given)
        if not any(isinstance(X, Affine) for X in given):
            return performed(node, given)
        if any(X.type.dtype != "float64" for X in node.outputs):
            raise NotLinear
        if isinstance(op, Elemwise):
            return [self._elemwise(op.scalar_op, given)]
        if isinstance(op, Sum):
            return [self._sum(op, given[0])]
        if isinstance(getattr(op, "core_op", op), Product):
            return [self._product(*given)]
        if isinstance(op, Blockwise):
            return self._blockwise(node, given)
        if isinstance(op, INCREMENTS) and not op.set_instead_of_inc:
            return [self._increment(node, given)]
        if isinstance(op, (*MOVES, *INCREMENTS)):
            return self._moved(node, given)
        raise NotLinear

    def combine(self, states, rows, tokens, weights, shape) -> Affine:
        """The array of which entry ``rows[i]`` has a term: weight i times what token i stands for.

        Tokens are numbered from 1 through all ``states``; 0 stands for nothing.
        """
        rows, tokens, weights = (np.ravel(X) for X in np.broadcast_arrays(rows, tokens, weights))
        size = prod(shape)
        if size > ENTRIES:
            raise NotLinear
        there = tokens > 0
        rows, tokens = rows[there].astype(np.int64), tokens[there].astype(np.int64) - 1
        weights, some = weights[there], weights[there] != 0
        counts = np.concatenate([X.counts for X in states])[tokens[some]]
        if counts.sum() > COEFFICIENTS:
            raise NotLinear
        offset, terms = np.zeros(size), np.concatenate([X.offset for X in states])[tokens]
        np.add.at(offset, rows, weights * terms)
        overflows = ~np.isfinite(offset)
        overflows[rows[~np.isfinite(terms)]] = False  # these are infinite or NaN whatever x is
        rows, tokens, weights = rows[some], tokens[some], weights[some]
        picked = vstack([X.matrix for X in states], format="csr")[tokens]
        entries = (
            picked.data * np.repeat(weights, counts),
            (np.repeat(rows, counts), picked.indices),
        )
        matrix = coo_array(entries, shape=(size, COLUMNS)).tocsr()
        # What overflows here need not do so where the function is called.
        if overflows.any() or not np.isfinite(matrix.data).all():
            raise NotLinear
        return Affine(matrix, offset, shape)

    def affine(self, X) -> Affine:
        """A number or array that does not change, as a function that is constant."""
        if isinstance(X, Affine):
            return X
        X = np.asarray(X, dtype=np.float64)
        if X.size > ENTRIES:
            raise NotLinear
        return Affine(csr_array((X.size, COLUMNS)), X.ravel(), X.shape)

    def _numbers(self, node, given: list) -> list:
        """What a node moves, of any type, as functions; indices, lengths and axes as given."""
        many = isinstance(node.op, BlockDiagonal | Join | MakeVector)
        last = len(given) - 1 if many else int(isinstance(node.op, INCREMENTS))
        return [self.affine(X) if i <= last else X for i, X in enumerate(given)]

    def _moved(self, node, given) -> list:
        states, arguments = with_tokens(self._numbers(node, given))
        found = performed(node, arguments)
        return [self.combine(states, np.arange(X.size), np.ravel(X), 1.0, X.shape) for X in found]

    def _increment(self, node, given) -> Affine:
        X, Y = (self.affine(x) for x in given[:2])
        (twice,) = performed(node, [np.zeros(X.shape), np.ones(Y.shape), *given[2:]])
        if (twice > 1).any():
            raise NotLinear
        states, (old, more) = with_tokens([X, Y])
        (put,) = performed(node, [np.zeros(X.shape), more, *given[2:]])
        rows = np.arange(X.offset.size)
        terms = np.stack([old.ravel(), put.ravel()])
        return self.combine(states, np.stack([rows, rows]), terms, 1.0, X.shape)

    def _elemwise(self, op, given) -> Affine:
        shape = common_shape(map(shape_of_state, given))
        if prod(shape) > ENTRIES:
            raise NotLinear
        rows = np.arange(prod(shape)).reshape(shape)
        if isinstance(op, ps.Add | ps.Sub | ps.Neg | ps.Identity):
            states, tokens = with_tokens([self.affine(X) for X in given])
            signs = {ps.Sub: [1.0, -1.0], ps.Neg: [-1.0]}.get(type(op), [1.0] * len(given))
            tokens = np.stack([np.broadcast_to(X, shape) for X in tokens])
            signs = np.reshape(signs, (-1, *[1] * len(shape)))
            return self.combine(states, rows[np.newaxis], tokens, signs, shape)
        moving = [i for i, X in enumerate(given) if isinstance(X, Affine)]
        divides = isinstance(op, ps.TrueDiv)
        if len(moving) > 1 or not (isinstance(op, ps.Mul) or divides and moving == [0]):
            raise NotLinear
        states, (tokens,) = with_tokens([given[moving[0]]])
        factors = [np.asarray(X, np.float64) for X in given if not isinstance(X, Affine)]
        weights = 1.0 / factors[0] if divides else np.asarray(1.0)
        for factor in [] if divides else factors:
            weights = weights * factor
        if not np.isfinite(weights).all():
            raise NotLinear
        tokens, weights = (np.broadcast_to(X, shape) for X in (tokens, weights))
        return self.combine(states, rows, tokens, weights, shape)

    def _sum(self, op, X: Affine) -> Affine:
        axes = range(len(X.shape)) if op.axis is None else op.axis
        kept = [1 if i in axes else k for i, k in enumerate(X.shape)]
        rows = np.broadcast_to(np.arange(prod(kept)).reshape(kept), X.shape)
        shape = tuple(k for i, k in enumerate(X.shape) if i not in axes)
        states, (tokens,) = with_tokens([X])
        return self.combine(states, rows, tokens, 1.0, shape)

    def _product(self, A, B) -> Affine:
        """out[..., i, j] = sum over k of A[..., i, k] B[..., k, j], of which one is constant."""
        left = isinstance(A, Affine)
        if left and isinstance(B, Affine):
            raise NotLinear
        states, (tokens,) = with_tokens([A if left else B])
        weights = np.asarray(B if left else A, np.float64)
        A, B = (tokens, weights) if left else (weights, tokens)
        if A.shape[-1] != B.shape[-2]:
            raise NotLinear
        A, B = A[..., :, :, np.newaxis], B[..., np.newaxis, :, :]
        full = common_shape([A.shape, B.shape])  # (..., i, k, j)
        if prod(full) > ENTRIES or not np.isfinite(weights).all():
            raise NotLinear
        shape = (*full[:-2], full[-1])
        rows = np.arange(prod(shape)).reshape(*full[:-2], 1, full[-1])
        tokens, weights = (A, B) if left else (B, A)
        return self.combine(states, *np.broadcast_arrays(rows, tokens, weights), shape)

    def _blockwise(self, node, given) -> list:
        """A node that moves numbers in each array of a batch."""
        core = node.op._create_dummy_core_node(node.inputs)
        if not isinstance(core.op, MOVES):
            raise NotLinear
        states, arguments = with_tokens(self._numbers(core, given))
        ranks = [len(x.shape) - v.ndim for x, v in zip(arguments, core.inputs, strict=True)]
        batch = common_shape(x.shape[:k] for x, k in zip(arguments, ranks, strict=True))
        wide = [
            np.broadcast_to(x, batch + x.shape[k:]) for x, k in zip(arguments, ranks, strict=True)
        ]
        found = [performed(core, [x[i] for x in wide]) for i in np.ndindex(batch)]
        whole = [np.stack(X) for X in zip(*found, strict=True)]
        whole = [X.reshape(batch + X.shape[1:]) for X in whole]
        return [self.combine(states, np.arange(X.size), np.ravel(X), 1.0, X.shape) for X in whole]

    def _through(self, fgraph, given) -> list:
        """The same through the graph inside a node."""
        inner = Follow(lambda X: None)
        inner.state |= zip(fgraph.inputs, given, strict=True)
        for node in fgraph.toposort():
            if not inner.visit(node):
                raise NotLinear
        return [inner.get(X) for X in fgraph.outputs]


def shape_of_state(X) -> tuple[int, ...]:
    """The shape of what is affine, or of a constant."""
    return X.shape if isinstance(X, Affine) else np.shape(X)


def common_shape(shapes) -> tuple[int, ...]:
    """The shape to which these are broadcast; where they do not fit, see `performed`."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError as error:
        raise NotLinear from error


def is_float(X) -> bool:
    """Whether a variable is one that maps are followed through."""
    return isinstance(X.type, TensorType) and X.type.dtype == "float64"


def with_tokens(given: list) -> tuple[list[Affine], list]:
    """The affine ones of these; and all, with arrays of tokens in their place, as in `combine`."""
    states, arguments, first = [], [], 1
    for X in given:
        if isinstance(X, Affine):
            states.append(X)
            size = prod(X.shape)
            X = np.arange(first, first + size, dtype=np.float64).reshape(X.shape)
            first += size
        arguments.append(X)
    return states, arguments


def entries_of(node, arguments: list) -> int:
    """How many entries the largest output of a node will have, as far as that is known."""
    shapes = [getattr(X.type, "shape", ()) for X in node.outputs]
    if isinstance(node.op, Alloc):
        shapes = [tuple(map(int, arguments[1:]))]
    elif isinstance(node.op, ARange):
        start, stop, step = map(float, arguments)
        shapes = [((stop - start) / step if step else 0,)]
    elif isinstance(node.op, Elemwise):
        shapes = [common_shape(map(np.shape, arguments))]
    return max((prod(shape) for shape in shapes if None not in shape), default=0)


def performed(node, arguments: list) -> list:
    """What a node makes of these values.

    A node that fails, for whatever reason of its own, is left as it is: where the function is
    called it says so again, and only if it is reached, with PyTensor's account of where it stands.
    """
    storage = [[None] for _ in node.outputs]
    if entries_of(node, arguments) > ENTRIES:
        raise NotLinear
    try:
        node.op.prepare_node(node, storage_map=None, compute_map=None, impl="py")
        node.op.perform(node, arguments, storage)
    except Exception as error:
        raise NotLinear from error
    return [X for (X,) in storage]


class OneMap(GraphRewriter):
    """One `LinearMap` in the place of all nodes that it is made of, around the filter's Ops."""

    around = OfModel

    def apply(self, fgraph):
        if not any(
            isinstance(getattr(x.op, "core_op", x.op), self.around) for x in fgraph.apply_nodes
        ):
            return
        follow = Follow(lambda X: shape_of(fgraph, X))
        linear = {node: None for node in fgraph.toposort() if follow.visit(node)}
        replaced = {}
        for node in linear:
            for X in node.outputs:
                if fgraph.clients[X] and all(client in linear for client, _ in fgraph.clients[X]):
                    continue
                found = self._instead(X, follow, linear)
                if found is not None:
                    replaced[X] = found
        fgraph.replace_all(list(replaced.items()), reason=type(self).__name__)
        merge(fgraph)

    def _instead(self, X, follow: Follow, linear: dict):
        """A constant, or a node of its own, if that takes less to compile."""
        state = follow.state[X]
        if not isinstance(state, Affine):
            return (
                pt.constant(state, dtype=X.type.dtype) if isinstance(X.type, TensorType) else None
            )
        if not state.matrix.nnz:
            return pt.constant(state.offset.reshape(state.shape))
        if all(isinstance(x.op, CHEAP) for x in behind(X, linear)):
            return None
        (at,) = state.offset.nonzero()
        inputs, sizes, matrix = [at, state.offset[at]], [*state.shape], state.matrix.tocoo()
        for source, first, last in follow.sources:
            within = (matrix.col >= first) & (matrix.col < last)
            if within.any():
                where = np.stack([matrix.row[within], matrix.col[within] - first])
                inputs += [where.astype(np.int64), matrix.data[within], source]
                sizes.append(last - first)
        ndims = tuple(source.ndim for source in inputs[4::3])
        return LinearMap(state.shape, ndims)(np.array(sizes, np.int64), *inputs)


def shape_of(fgraph, X) -> tuple[int, ...] | None:
    """The shape of a variable that maps can start from."""
    if not is_float(X):
        return None
    shape, feature = X.type.shape, getattr(fgraph, "shape_feature", None)
    if None in shape and feature is not None:
        known = [feature.get_shape(X, i) for i in range(X.ndim)]
        shape = [int(k.data) if isinstance(k, Constant) else None for k in known]
    return None if None in shape else tuple(shape)


def behind(X, nodes: dict):
    """Those of the nodes that lead to a variable without another node between."""
    seen, open_ = set(), [X.owner]
    while open_:
        node = open_.pop()
        if node in nodes and node not in seen:
            seen.add(node)
            yield node
            open_ += [x.owner for x in node.inputs if x.owner]


# After the shapes are known, and before elementwise Ops are fused.
optdb.register("helpers_kalman_linear", OneMap(), "numba", position=2.95)
