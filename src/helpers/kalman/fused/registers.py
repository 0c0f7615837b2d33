"""Matrices whose shapes the compiler knows, in registers, and operators for the readable text.

Matrices of two or three rows are too small for loops, calls and memory: each costs more than the
product itself. A ``Fixed`` is a matrix or vector as one value of the compiler's, all its entries in
one vector, row by row. With the operators below on it, :mod:`helpers.kalman.recursions` compiles
as it stands, and what comes out is arithmetic and shuffles alone.

Called from Python, a matrix is an array of NumPy's and what is read and written a
``Memory`` of :mod:`~helpers.kalman.fused.tiles`: the text is the same.
"""

import operator

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import (
    intrinsic,
    models,
    overload,
    overload_attribute,
    overload_method,
    register_model,
)

from helpers.kalman import recursions
from helpers.kalman.fused.tiles import DOUBLES, PART, compiled_as, stands_for

# Part of its caller: what stays in registers cannot be handed to a function.
_OPTIONS = PART | {"forceinline": True}
_DOUBLE, _INT = ir.DoubleType(), ir.IntType(32)


class Fixed(types.Type):
    """A matrix or vector of doubles of this shape, in Numba's types."""

    def __init__(self, shape):
        self.shape, self.size = shape, int(np.prod(shape))
        self.vector = ir.VectorType(_DOUBLE, self.size)
        super().__init__(f"Fixed{shape}")

    def places(self):
        """Of each entry, where it lies: an array of the shape."""
        return np.arange(self.size).reshape(self.shape)


@register_model(Fixed)
class _FixedModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, kind.vector)


def _pick(builder, x, places):
    """The entries of x at these places, in this order."""
    places = [int(k) for k in np.ravel(places)]
    mask = ir.Constant(ir.VectorType(_INT, len(places)), places)
    return builder.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), mask)


def _broadcast(context, builder, x, kind, shape):
    """x, a number or a matrix, as a matrix of this shape, by the rules of NumPy."""
    if isinstance(kind, Fixed):
        places = np.broadcast_to(kind.places(), shape)
        return x if kind.shape == shape else _pick(builder, x, places)
    none = ir.Constant(ir.VectorType(_DOUBLE, 1), ir.Undefined)
    one = builder.insert_element(none, context.cast(builder, x, kind, types.float64), _INT(0))
    return _pick(builder, one, np.zeros(shape, int))


def _elementwise(instruction):
    @intrinsic
    def machine(typing, x, y):
        if not (isinstance(x, Fixed) or isinstance(y, Fixed)):
            return None
        shape = np.broadcast_shapes(*(kind.shape for kind in (x, y) if isinstance(kind, Fixed)))

        def generate(context, builder, signature, args):
            pair = [
                _broadcast(context, builder, value, kind, shape)
                for value, kind in zip(args, signature.args, strict=True)
            ]
            return getattr(builder, instruction)(*pair, flags=("contract",))

        return Fixed(shape)(x, y), generate

    return machine


@intrinsic
def _product(typing, A, B):
    """A B, a column of A and a row of B at a time; vectors are rows before and columns behind."""
    if not (isinstance(A, Fixed) and isinstance(B, Fixed)):
        return None
    left = np.atleast_2d(A.places())
    right = B.places() if len(B.shape) == 2 else B.places()[:, None]
    if left.shape[1] != right.shape[0]:
        raise ValueError(f"a product of matrices of shapes {A.shape} and {B.shape}")
    shape = A.shape[:-1] + B.shape[1:]
    rows, cols = len(left), right.shape[1]

    def generate(context, builder, signature, args):
        total = None
        for k in range(len(right)):
            a = _pick(builder, args[0], np.repeat(left[:, k], cols))
            b = _pick(builder, args[1], np.tile(right[k], rows))
            term = builder.fmul(a, b, flags=("contract",))
            total = builder.fadd(total, term, flags=("contract",)) if k > 0 else term
        return total if shape else builder.extract_element(total, _INT(0))

    return (Fixed(shape) if shape else types.float64)(A, B), generate


for _function, _name in (
    (operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):  # fmt: skip
    stands_for(_function, _elementwise(_name))
stands_for(operator.matmul, _product)


@overload(operator.neg, jit_options=_OPTIONS)
def _negative(A):
    if isinstance(A, Fixed):
        return lambda A: -1.0 * A


def _rearranged(shape_of, places_of):
    """The intrinsic for a matrix that has the entries of another one in other places."""

    @intrinsic
    def machine(typing, A):
        def generate(context, builder, signature, args):
            return _pick(builder, args[0], places_of(A.places()))

        return Fixed(shape_of(A.shape))(A), generate

    return machine


_transpose = _rearranged(lambda shape: shape[::-1], np.transpose)
_diagonal = _rearranged(lambda shape: shape[:1], np.diag)


@overload_attribute(Fixed, "T", jit_options=_OPTIONS)
def _transposed(A):
    return lambda A: _transpose(A)


@compiled_as(_diagonal)
def diagonal(A):
    """The diagonal of a matrix."""
    return np.diag(A)


@intrinsic
def _item(typing, A, index):
    """x[i], A[i, j], x[:, None] and x[None, :]."""
    if not isinstance(A, Fixed):
        return None
    indices = index.types if isinstance(index, types.BaseTuple) else (index,)
    added = [isinstance(kind, types.NoneType) for kind in indices]
    if any(added):  # another shape, and the same entries
        shape = (1, *A.shape) if added[0] else (*A.shape, 1)
        return Fixed(shape)(A, index), lambda context, builder, signature, args: args[0]

    def generate(context, builder, signature, args):
        given = cgutils.unpack_tuple(builder, args[1]) if len(indices) > 1 else args[1:]
        i, *j = (
            context.cast(builder, x, kind, types.intp)
            for x, kind in zip(given, indices, strict=True)
        )
        place = builder.add(builder.mul(i, i.type(A.shape[1])), *j) if j else i
        return builder.extract_element(args[0], place)

    return types.float64(A, index), generate


stands_for(operator.getitem, _item)


@intrinsic
def _with_entry(typing, A, i, j, x):
    def generate(context, builder, signature, args):
        A, i, j, x = args
        place = builder.add(builder.mul(i, i.type(signature.args[0].shape[1])), j)
        return builder.insert_element(A, x, place)

    return A(A, types.intp, types.intp, types.float64), generate


@compiled_as(_with_entry)
def with_entry(A, i, j, x):
    """A with x in place (i, j)."""
    A = A.copy()
    A[i, j] = x
    return A


@overload(len, jit_options=_OPTIONS)
def _len(A):
    if isinstance(A, Fixed):
        rows = A.shape[0]
        return lambda A: rows


@overload_method(Fixed, "sum", jit_options=_OPTIONS)
def _sum(x):
    size = x.size

    def add(x):
        total = x[0]
        for i in range(1, size):
            total += x[i]
        return total

    return add


@overload_method(Fixed, "trace", jit_options=_OPTIONS)
def _trace(A):
    return lambda A: _diagonal(A).sum()


@intrinsic
def _larger(typing, x, y):
    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return x(x, y), generate


@compiled_as(_larger)
def larger(x, y):
    """The larger one of two numbers, entry by entry; y if either is NaN."""
    return np.where(x > y, x, y)


@intrinsic
def _seen(typing, y):
    def generate(context, builder, signature, args):
        return builder.uitofp(builder.fcmp_ordered("ord", *args, *args), y.vector)

    return y(y), generate


@compiled_as(_seen)
def seen(y):
    """1.0 where y is a number, 0.0 where it is NaN."""
    return 1.0 - np.isnan(y)


@intrinsic
def _filled(typing, y):
    def generate(context, builder, signature, args):
        zeros = ir.Constant(y.vector, [_DOUBLE(0.0)] * y.size)
        return builder.select(builder.fcmp_ordered("ord", *args, *args), *args, zeros)

    return y(y), generate


@compiled_as(_filled)
def filled(y):
    """y with zeros for what is NaN."""
    return np.where(np.isnan(y), 0.0, y)


@intrinsic(prefer_literal=True)
def identity(typing, size):
    """The identity matrix, of a size that the compiler knows; for compiled code alone."""
    entries = np.eye(size.literal_value)

    def generate(context, builder, signature, args):
        vector = signature.return_type.vector
        return ir.Constant(vector, [_DOUBLE(x) for x in entries.ravel()])

    return Fixed(entries.shape)(size), generate


@intrinsic(prefer_literal=True)
def zeros(typing, rows, cols):
    """A matrix of zeros, of a shape that the compiler knows; for compiled code alone."""
    result = Fixed((rows.literal_value, cols.literal_value))

    def generate(context, builder, signature, args):
        return ir.Constant(result.vector, [_DOUBLE(0.0)] * result.size)

    return result(rows, cols), generate


@intrinsic
def _read(typing, like, w, place):
    def generate(context, builder, signature, args):
        data = builder.gep(builder.inttoptr(args[1], DOUBLES), [args[2]])
        return builder.load(builder.bitcast(data, like.vector.as_pointer()), align=8)

    return like(like, types.intp, types.intp), generate


@compiled_as(_read)
def read(like, w, place):
    """The matrix that lies at a place of w, row by row, of the shape of `like`."""
    return w.read(place, like.size).reshape(like.shape)


@intrinsic
def _write(typing, w, place, A):
    def generate(context, builder, signature, args):
        data = builder.gep(builder.inttoptr(args[0], DOUBLES), [args[1]])
        data = builder.bitcast(data, A.vector.as_pointer())
        builder.store(args[2], data, align=8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, A), generate


@compiled_as(_write)
def write(w, place, A):
    """Write a matrix at a place of w, row by row."""
    w.write(place, np.ravel(A))


@overload(recursions.cholesky, jit_options=_OPTIONS)
def _cholesky(F):
    if not isinstance(F, Fixed):
        return None

    def factor(F):
        C, logdet = F, 0.0
        for j in range(len(F)):
            x = F[j, j]
            for k in range(j):
                x -= C[j, k] ** 2
            if not x > 0.0:
                return C, np.nan
            logdet += np.log(x)
            C = with_entry(C, j, j, np.sqrt(x))
            for i in range(j + 1, len(F)):
                x = F[i, j]
                for k in range(j):
                    x -= C[i, k] * C[j, k]
                C = with_entry(C, i, j, x / C[j, j])
        return C, logdet

    return factor


@intrinsic
def _rows_of(typing, X, o):
    def generate(context, builder, signature, args):
        X_kind, o_kind = signature.args
        rows, entries = o_kind.size, X_kind.size
        there = builder.fcmp_unordered("!=", args[1], ir.Constant(o_kind.vector, [0.0] * rows))
        there = _pick(builder, there, np.repeat(np.arange(rows), entries // rows))
        return builder.select(there, args[0], ir.Constant(X_kind.vector, [0.0] * entries))

    return X(X, o), generate


@overload(recursions.rows, jit_options=_OPTIONS)
def _rows(X, o):
    if isinstance(X, Fixed):
        return lambda X, o: _rows_of(X, o)


@overload(recursions.solve, jit_options=_OPTIONS)
def _solve(C, B):
    if not isinstance(C, Fixed):
        return None
    cols = B.shape[1]

    def solve(C, B):
        X = B
        for i in range(len(C)):
            for j in range(cols):
                x = B[i, j]
                for k in range(i):
                    x -= C[i, k] * X[k, j]
                X = with_entry(X, i, j, x / C[i, i])
        return X

    return solve
