"""Numbers of LANES series at once, one in each lane of a vector, and products of their matrices.

Where every series has a model of its own, a matrix of the filter is one for each series, and too
small to fill a vector with its rows. So a vector holds the same entry of LANES matrices (a
structure of arrays), and text that is written for numbers runs for LANES series.

A number lies at a *place* of the workspace w, which counts vectors, and a matrix is a
:class:`~helpers.kalman.fused.tiles.Mat` of places. Called from Python, w is a
:class:`~helpers.kalman.fused.tiles.Memory` and a number an array (LANES,): the text is the same.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from helpers.kalman.fused.registers import Fixed
from helpers.kalman.fused.tiles import (
    DOUBLES,
    LANES,
    Mat,
    _spread,
    _vector,
    compiled_as,
    get,
    jitable,
    put,
)

# The operators on it are those of every matrix in registers.
LANES_TYPE = Fixed((LANES,))


@intrinsic
def _load(typing, w, place):
    def generate(context, builder, signature, args):
        data = builder.inttoptr(args[0], DOUBLES)
        at = builder.mul(args[1], args[1].type(LANES))
        return builder.load(_vector(builder, data, at, LANES), align=8)

    return LANES_TYPE(w, types.intp), generate


@compiled_as(_load)
def load(w, place):
    """The number at a place."""
    return w.read(place * LANES, LANES)


@intrinsic
def _store(typing, w, place, x):
    def generate(context, builder, signature, args):
        data = builder.inttoptr(args[0], DOUBLES)
        at = builder.mul(args[1], args[1].type(LANES))
        builder.store(args[2], _vector(builder, data, at, LANES), align=8)
        return context.get_dummy_value()

    return types.void(w, types.intp, x), generate


@compiled_as(_store)
def store(w, place, x):
    """Write a number."""
    w.write(place * LANES, x)


@intrinsic
def _broadcast(typing, x):
    def generate(context, builder, signature, args):
        return _spread(builder, args[0], LANES)

    return LANES_TYPE(types.float64), generate


@compiled_as(_broadcast)
def broadcast(x):
    """The same number for all series."""
    return np.full(LANES, x)


@intrinsic
def _root(typing, x):
    def generate(context, builder, signature, args):
        signature = ir.FunctionType(args[0].type, [args[0].type])
        name = f"llvm.sqrt.v{LANES}f64"
        return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)

    return LANES_TYPE(LANES_TYPE), generate


@compiled_as(_root)
def root(x):
    """The square root; NaN of what is below zero."""
    with np.errstate(invalid="ignore"):
        return np.sqrt(x)


@jitable
def mat(at, cols):
    """A matrix that lies row by row."""
    return Mat(at, cols, np.int64(1))


@jitable
def constant(at):
    """A matrix whose entries are all the same."""
    return Mat(at, np.int64(0), np.int64(0))


@jitable
def _entry(w, C, sign, A, step_a, B, step_b, inner):
    x = load(w, A) * load(w, B)
    for k in range(1, inner):
        x = x + load(w, A + k * step_a) * load(w, B + k * step_b)
    return load(w, C) + sign * x


@jitable
def mirror(w, A, size):
    """A's entries above the diagonal from those below it."""
    for i in range(size):
        for j in range(i):
            store(w, A.at + j * A.ld + i, load(w, A.at + i * A.ld + j))


@jitable
def _put_pair(w, o, C, c, sign, x, y):
    """Two neighbours of a product: those of C, at c, and `sign` times x and y."""
    store(w, o, load(w, c) + sign * x)
    store(w, o + 1, load(w, c + C.step) + sign * y)


@jitable
def _four_rows(w, out, sign, A, B, C, i, j, inner):
    """Rows i to i + 3 and columns j, j + 1 of :func:`product`: eight independent sums."""
    a, b = A.at + i * A.ld, B.at + j * B.step
    x, y = load(w, b), load(w, b + B.step)
    s, t = load(w, a), load(w, a + A.ld)
    u, v = load(w, a + 2 * A.ld), load(w, a + 3 * A.ld)
    sx, sy, tx, ty, ux, uy, vx, vy = s * x, s * y, t * x, t * y, u * x, u * y, v * x, v * y
    for _ in range(1, inner):
        a, b = a + A.step, b + B.ld
        x, y = load(w, b), load(w, b + B.step)
        s, t = load(w, a), load(w, a + A.ld)
        u, v = load(w, a + 2 * A.ld), load(w, a + 3 * A.ld)
        sx, sy, tx, ty = sx + s * x, sy + s * y, tx + t * x, ty + t * y
        ux, uy, vx, vy = ux + u * x, uy + u * y, vx + v * x, vy + v * y
    o, c = out.at + i * out.ld + j, C.at + i * C.ld + j * C.step
    _put_pair(w, o, C, c, sign, sx, sy)
    _put_pair(w, o + out.ld, C, c + C.ld, sign, tx, ty)
    _put_pair(w, o + 2 * out.ld, C, c + 2 * C.ld, sign, ux, uy)
    _put_pair(w, o + 3 * out.ld, C, c + 3 * C.ld, sign, vx, vy)


@jitable
def _two_rows(w, out, sign, A, B, C, i, j, inner):
    """Rows i, i + 1 and columns j, j + 1 of :func:`product`."""
    a, b = A.at + i * A.ld, B.at + j * B.step
    u, v, x, y = load(w, a), load(w, a + A.ld), load(w, b), load(w, b + B.step)
    ux, uy, vx, vy = u * x, u * y, v * x, v * y
    for _ in range(1, inner):
        a, b = a + A.step, b + B.ld
        u, v, x, y = load(w, a), load(w, a + A.ld), load(w, b), load(w, b + B.step)
        ux, uy, vx, vy = ux + u * x, uy + u * y, vx + v * x, vy + v * y
    o, c = out.at + i * out.ld + j, C.at + i * C.ld + j * C.step
    _put_pair(w, o, C, c, sign, ux, uy)
    _put_pair(w, o + out.ld, C, c + C.ld, sign, vx, vy)


@jitable
def product(w, out, sign, A, B, C, rows, inner, cols, lower=False):
    """out = C + sign A B; A (rows, inner), B (inner, cols). `out` lies row by row; it may be C.

    Four rows and two columns at a time, so that what is loaded is used more than once. With
    `lower`, for a product that is symmetric, what lies above the diagonal is taken from below it.
    """
    fours = rows - rows % 4
    for i in range(0, fours, 4):
        for j in range(0, (i + 4 if lower else cols) - 1, 2):
            _four_rows(w, out, sign, A, B, C, i, j, inner)
    if rows % 4 >= 2:
        for j in range(0, (fours + 2 if lower else cols) - 1, 2):
            _two_rows(w, out, sign, A, B, C, fours, j, inner)
    for i in range(rows):  # the last row and the last column, where their number is odd
        alone = rows % 2 == 1 and i == rows - 1
        for j in range(0 if alone else cols - cols % 2, i + 1 if lower else cols):
            a, b = A.at + i * A.ld, B.at + j * B.step
            c = C.at + i * C.ld + j * C.step
            store(w, out.at + i * out.ld + j, _entry(w, c, sign, a, A.step, b, B.ld, inner))
    if lower:
        mirror(w, out, rows)


@jitable
def apply(w, out, sign, A, x, c, rows, inner):
    """The vector out = c + sign A x, for vectors at places; `out` may be c, not x."""
    for i in range(rows):
        total = load(w, A.at + i * A.ld) * load(w, x)
        for k in range(1, inner):
            total = total + load(w, A.at + i * A.ld + k * A.step) * load(w, x + k)
        store(w, out + i, load(w, c + i) + sign * total)


@jitable
def clear(w, at, count):
    """Zeros at `count` places."""
    for k in range(at, at + count):
        store(w, k, broadcast(0.0))


class Many(NamedTuple):
    """An array (series, steps, size) by its address: references to arrays would be counted.

    Series or steps that share what they have are one.
    """

    data: int  # a Memory in Python
    series: int
    steps: int
    size: int


@jitable
def gather(w, at, X, first, t):
    """Step t of X, of series `first` and those after it.

    In lanes beyond the last series stands the last one once more.
    """
    t = t if X.steps > 1 else 0
    for lane in range(LANES):
        j = min(first + lane, X.series - 1)
        for i in range(X.size):
            put(w, (at + i) * LANES + lane, get(X.data, (j * X.steps + t) * X.size + i))


@jitable
def scatter(w, at, X, first, t):
    """The reverse of :func:`gather`: write to X, and leave zeros behind."""
    t = t if X.steps > 1 else 0
    for lane in range(min(LANES, X.series - first)):
        for i in range(X.size):
            k = ((first + lane) * X.steps + t) * X.size + i
            put(X.data, k, get(w, (at + i) * LANES + lane))
    clear(w, at, X.size)
