"""Matrices whose shapes the compiler knows, in registers: the readable text writes machine code.

Matrices of two or three rows are too small for loops, calls and memory: each costs more than the
product itself. A matrix or vector is one value of the compiler's here, all its entries in one
vector, row by row. While a function is compiled, what it calls is run in Python on matrices that
stand for those values, `Value`, whose operators write instructions: so the lines of
:mod:`helpers.kalman.recursions` become arithmetic and shuffles alone.

Called from Python, a matrix is an array of NumPy's and what is read and written a
``Memory`` of :mod:`~helpers.kalman.compiled.tiles`: the text is the same.
"""

import inspect
import operator
from functools import reduce, singledispatch
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

from helpers.kalman import recursions
from helpers.kalman.compiled.tiles import DOUBLES, stands_for
from helpers.kalman.tangents import Moving, still

_DOUBLE, _INT, _PLACE = ir.DoubleType(), ir.IntType(32), ir.IntType(64)


class Fixed(types.Type):
    """A matrix or vector of doubles of this shape, in Numba's types; if `moving`, with its tangent.

    A number, of shape (), is one of these where it moves.
    """

    def __init__(self, shape, moving=False):
        self.shape, self.moving = shape, moving
        self.vector = ir.VectorType(_DOUBLE, int(np.prod(shape))) if shape else _DOUBLE
        self.value = ir.LiteralStructType([self.vector] * 2) if moving else self.vector
        super().__init__(f"Fixed({shape}, {moving})")


@register_model(Fixed)
class _FixedModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, kind.value)


def _sum(terms):
    terms = list(terms)
    return reduce(operator.add, terms) if terms else 0.0


class Place:
    """An integer of compiled code, while it is written."""

    def __init__(self, builder, value):
        self.builder, self.value = builder, value

    def _with(self, instruction, other):
        other = other.value if isinstance(other, Place) else _PLACE(int(other))
        return Place(self.builder, getattr(self.builder, instruction)(self.value, other))

    def __add__(self, other):
        return self._with("add", other)

    def __mul__(self, other):
        return self._with("mul", other)

    __radd__, __rmul__ = __add__, __mul__


class Value:
    """A matrix, a vector or a number of compiled code, while it is written.

    Its operators are NumPy's, and write instructions.
    """

    __array_ufunc__ = None  # numbers of NumPy's leave operators to this class

    def __init__(self, builder, value, shape=()):
        self.builder, self.value, self.shape = builder, value, shape

    def places(self):
        """Of each entry, where it lies: an array of the shape."""
        return np.arange(int(np.prod(self.shape))).reshape(self.shape)

    def pick(self, places):
        """The entries at these places, in this order: a matrix of their shape."""
        order, value = np.ravel(places), self.value
        if not self.shape:
            none = ir.Constant(ir.VectorType(_DOUBLE, 1), ir.Undefined)
            value = self.builder.insert_element(none, value, _INT(0))
        mask = ir.Constant(ir.VectorType(_INT, len(order)), [int(k) for k in order])
        value = self.builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)
        return Value(self.builder, value, np.shape(places))

    def number(self, x):
        """A number, or what is one of these."""
        if isinstance(x, Place):
            return Value(self.builder, self.builder.sitofp(x.value, _DOUBLE))
        return x if isinstance(x, Value) else Value(self.builder, _DOUBLE(float(x)))

    def cast(self, shape):
        """The same by NumPy's rules for an operator whose result has this shape."""
        return self if self.shape == shape else self.pick(np.broadcast_to(self.places(), shape))

    def _with(self, write, other, first=False):
        """What ``write`` makes of the builder and both, of which self is the second if `first`."""
        if isinstance(other, Moving):
            return NotImplemented
        other = self.number(other)
        shape = np.broadcast_shapes(self.shape, other.shape)
        pair = self.cast(shape).value, other.cast(shape).value
        return Value(self.builder, write(self.builder, *(pair[::-1] if first else pair)), shape)

    def __getitem__(self, key):
        shape = self.places()[key].shape
        if shape:  # [:, None] or [None, :]
            return Value(self.builder, self.value, shape)
        place = _INT(int(self.places()[key]))
        return Value(self.builder, self.builder.extract_element(self.value, place))

    def __len__(self):
        return self.shape[0]

    def __neg__(self):
        return -1.0 * self

    def __matmul__(self, other):
        """A column of A and a row of B at a time; vectors are rows before and columns behind."""
        if isinstance(other, Moving):
            return NotImplemented
        left = np.atleast_2d(self.places())
        right = other.places() if len(other.shape) == 2 else other.places()[:, None]
        if left.shape[1] != len(right):
            raise ValueError(f"a product of matrices of shapes {self.shape} and {other.shape}")
        (rows, inner), cols, total = left.shape, right.shape[1], None
        for k in range(inner):
            a, b = self.pick(np.repeat(left[:, k], cols)), other.pick(np.tile(right[k], rows))
            total = a * b if total is None else total + a * b
        shape = self.shape[:-1] + other.shape[1:]
        return Value(self.builder, total.value, shape) if shape else total[0]

    @property
    def T(self):  # noqa: N802
        return self.pick(self.places().T)

    def entries(self):
        return [self.pick([k])[0] for k in self.places().ravel()]

    def sum(self):
        return _sum(self.entries())

    def trace(self):
        return diagonal(self).sum()


def _operator(name, instruction):
    def write(builder, x, y):
        return getattr(builder, instruction)(x, y, flags=("contract",))

    setattr(Value, f"__{name}__", lambda x, y: x._with(write, y))
    setattr(Value, f"__r{name}__", lambda x, y: x._with(write, y, first=True))


for _name, _instruction in (("add", "fadd"), ("sub", "fsub"), ("mul", "fmul"), ("truediv", "fdiv")):
    _operator(_name, _instruction)


def _stands_for(builder, kind, value):
    """What the text is given for a value of compiled code."""
    if isinstance(kind, Fixed) and kind.moving:
        parts = (builder.extract_value(value, i) for i in range(2))
        return Moving(*(Value(builder, part, kind.shape) for part in parts))
    if isinstance(kind, Fixed):
        return Value(builder, value, kind.shape)
    if isinstance(kind, types.Float):
        return Value(builder, value)
    if isinstance(kind, types.BaseTuple):
        parts = cgutils.unpack_tuple(builder, value, len(kind))
        parts = [_stands_for(builder, *pair) for pair in zip(kind, parts, strict=True)]
        return kind.instance_class(*parts) if hasattr(kind, "instance_class") else tuple(parts)
    return Place(builder, value)


def _kind_of(x):
    if isinstance(x, tuple):
        return types.Tuple([_kind_of(part) for part in x])
    if isinstance(x, Moving):
        return Fixed(x.shape, True)
    if isinstance(x, Value):
        return Fixed(x.shape) if x.shape else types.float64
    return types.none if x is None else types.intp


def _value_of(context, builder, x):
    if isinstance(x, tuple):
        parts = [_value_of(context, builder, part) for part in x]
        return context.make_tuple(builder, _kind_of(x), parts)
    if isinstance(x, Moving):
        value = builder.insert_value(ir.Constant(_kind_of(x).value, ir.Undefined), x.X.value, 0)
        return builder.insert_value(value, x.dX.value, 1)
    if isinstance(x, (Value, Place)):
        return x.value
    return context.get_dummy_value() if x is None else _PLACE(x)


def _holds(kind):
    return isinstance(kind, Fixed) or (isinstance(kind, types.BaseTuple) and any(map(_holds, kind)))


def written(function, numbers=False):
    """Let compiled code that calls the function on matrices in registers have what it writes.

    With `numbers` also where it is called on numbers alone.
    """
    signature = inspect.signature(function)

    def machine(typing, *given, **named):
        given = signature.bind(*given, **named).args
        if not (numbers or any(map(_holds, given))):
            return None
        nothing, kind_of = (
            ir.FunctionType(ir.VoidType(), ()),
            cpu_target.target_context.get_value_type,
        )
        nowhere = ir.IRBuilder(ir.Function(ir.Module(), nothing, "nowhere").append_basic_block())
        likes = (ir.Constant(kind_of(kind), ir.Undefined) for kind in given)
        pairs = zip(given, likes, strict=True)
        returned = _kind_of(function(*(_stands_for(nowhere, *pair) for pair in pairs)))

        def generate(context, builder, signature, args):
            pairs = zip(signature.args, args, strict=True)
            found = function(*(_stands_for(builder, *pair) for pair in pairs))
            return _value_of(context, builder, found)

        return returned(*given), generate

    typing = inspect.Parameter("typing", inspect.Parameter.POSITIONAL_ONLY)
    machine.__signature__ = signature.replace(
        parameters=[typing, *(x.replace(kind=1) for x in signature.parameters.values())]
    )
    stands_for(function, machine)
    return function


written(still, numbers=True)
for _function in (operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul, len):
    written(_function)
for _function in vars(recursions).values():
    if inspect.isfunction(_function) and _function.__module__ == recursions.__name__:
        written(_function)


@written
@singledispatch
def diagonal(A):
    """The diagonal of a matrix."""
    return np.diag(A)


@diagonal.register
def _(A: Value):  # noqa: N803
    return A.pick(np.diag(A.places()))


@diagonal.register
def _(A: Moving):  # noqa: N803
    return Moving(diagonal(A.X), diagonal(A.dX))


@written
def moving(A):
    """A as a matrix that could move, and does not."""
    return Moving(A, 0.0 * A)


@written
def transposed(A):
    """The transpose of a matrix."""
    return A.T


@written
def total(x):
    """The sum of all entries."""
    return x.sum()


@written
@singledispatch
def larger(x, y):
    """The larger one of two numbers, entry by entry; y if either is NaN."""
    return np.where(x > y, x, y)


@larger.register
def _(x: Value, y):
    return x._with(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y), y)


@singledispatch
def where_positive(x, y):
    """y where x is positive, 0 elsewhere, entry by entry; x and y are of one shape."""
    return np.where(x > 0, y, 0.0)


@where_positive.register
def _(x: Value, y):
    zero = ir.Constant(x.value.type, None)
    return x._with(lambda b, x, y: b.select(b.fcmp_ordered(">", x, zero), y, zero), y)


@singledispatch
def largest(x):
    """The largest entry, or 0; one that is NaN counts as 0."""
    return np.nan_to_num(x).max(initial=0.0)


@largest.register
def _(x: Value):
    found = x.number(0.0)
    for entry in x.entries():
        found = larger(entry, found)
    return found


@written
@singledispatch
def seen(y):
    """1.0 where y is a number, 0.0 where it is NaN."""
    return 1.0 - np.isnan(y)


@seen.register
def _(y: Moving):
    return seen(y.X)


@seen.register
def _(y: Value):
    return y._with(lambda b, y, _: b.uitofp(b.fcmp_ordered("ord", y, y), y.type), y)


@written
@singledispatch
def filled(y):
    """y with zeros for what is NaN."""
    return np.where(np.isnan(y), 0.0, y)


@filled.register
def _(y: Value):
    return y._with(lambda b, y, zero: b.select(b.fcmp_ordered("ord", y, y), y, zero), 0.0)


@filled.register
def _(y: Moving):
    return Moving(filled(y.X), y.dX)  # C^-1 is zero for what is missing, whatever moves there


class Along(NamedTuple):
    """Where a matrix lies, and where its tangent does."""

    w: int
    dw: int


@written
@singledispatch
def read(like, w, place):
    """The matrix that lies at a place of w, row by row, of the shape of `like`."""
    return w.read(place, like.size).reshape(like.shape)


def _pointer(builder, w, place, kind):
    """To what lies so many doubles after the address w."""
    place = place.value if isinstance(place, Place) else _PLACE(place)
    data = builder.gep(builder.inttoptr(w.value, DOUBLES), [place])
    return builder.bitcast(data, kind.as_pointer())


@read.register
def _(like: Value, w, place):
    data = _pointer(like.builder, w, place, like.value.type)
    return Value(like.builder, like.builder.load(data, align=8), like.shape)


@read.register
def _(like: Moving, w, place):
    """From one address the tangent alone."""
    if not isinstance(w, Along):
        return Moving(like.X, read(like.dX, w, place))
    return Moving(read(like.X, w.w, place), read(like.dX, w.dw, place))


@singledispatch
def write(A, w, place):
    """Write a matrix, or a number, at a place of w, row by row."""
    w.write(place, np.ravel(A))


written(write, numbers=True)


@write.register
def _(A: Value, w, place):  # noqa: N803
    A.builder.store(A.value, _pointer(A.builder, w, place, A.value.type), align=8)


@write.register
def _(A: Moving, w, place):  # noqa: N803
    """To one address the tangent alone."""
    if isinstance(w, Along):
        write(A.X, w.w, place)
    write(A.dX, w.dw if isinstance(w, Along) else w, place)


@recursions.rows.register
def _(X: Value, o):  # noqa: N803
    there = o if o.shape == X.shape else o[:, None].cast(X.shape)
    zero = ir.Constant(X.value.type, None)
    return X._with(lambda b, X, o: b.select(b.fcmp_unordered("!=", o, zero), X, zero), there)


def _called(name, x):
    """What a function of the processor's, or of its library, makes of a number."""
    code = x.builder.module.declare_intrinsic(name, [_DOUBLE])
    return Value(x.builder, x.builder.call(code, [x.value]))


@recursions.inverse_factor.register
def _(F: Value, o, I_p):  # noqa: N803
    F, rows = F + I_p * (1 - o), range(len(F))
    nan, logdet = F.number(np.nan), 0.0
    most = _DOUBLE(recursions.most_inflated(float))
    C, X = {}, {(i, j): F.number(0.0) for i in rows for j in rows}
    for j in rows:
        x = F[j, j] - _sum(C[j, k] * C[j, k] for k in range(j))
        x = x._with(lambda b, x, nan: b.select(b.fcmp_ordered(">", x, _DOUBLE(0.0)), x, nan), nan)
        logdet = _called("llvm.log", x) + logdet
        X[j, j] = 1.0 / _called("llvm.sqrt", x)
        for i in rows[j + 1 :]:
            C[i, j] = (F[i, j] - _sum(C[i, k] * C[j, k] for k in range(j))) * X[j, j]
    for j in rows:
        for i in rows[j + 1 :]:
            X[i, j] = -X[i, i] * _sum(C[i, k] * X[k, j] for k in range(j, i))
    for j in rows if len(rows) > 1 else ():
        inflated = F[j, j] * _sum(X[i, j] * X[i, j] for i in rows[j:])
        logdet = (
            inflated._with(
                lambda b, x, nan: b.select(b.fcmp_ordered("<", x, most), _DOUBLE(0.0), nan), nan
            )
            + logdet
        )
    made = F
    for (i, j), x in X.items():
        place = _INT(i * len(F) + j)
        made = Value(F.builder, F.builder.insert_element(made.value, x.value, place), F.shape)
    return made * o, logdet


@intrinsic(prefer_literal=True)
def identity(typing, size):
    """The identity matrix, of a size that the compiler knows; for compiled code alone."""
    entries = np.eye(size.literal_value)

    def generate(context, builder, signature, args):
        return ir.Constant(signature.return_type.vector, [_DOUBLE(x) for x in entries.ravel()])

    return Fixed(entries.shape)(size), generate


@intrinsic(prefer_literal=True)
def zeros(typing, rows, cols):
    """A matrix of zeros, of a shape that the compiler knows; for compiled code alone."""
    shape = rows.literal_value, cols.literal_value

    def generate(context, builder, signature, args):
        return ir.Constant(signature.return_type.vector, None)

    return Fixed(shape)(rows, cols), generate
