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
    inlined,
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


@inlined
def _line(w, out, out_step, sign, A, A_ld, A_step, x, x_step, c, c_step, count, inner):
    """out_k = c_k + sign (row k of A) x for k < count: four rows share what is read of x."""
    fours = count - count % 4
    for k in range(0, fours, 4):
        a, b, y = A + k * A_ld, x, load(w, x)
        s, t = y * load(w, a), y * load(w, a + A_ld)
        u, v = y * load(w, a + 2 * A_ld), y * load(w, a + 3 * A_ld)
        for _ in range(1, inner):
            a, b = a + A_step, b + x_step
            y = load(w, b)
            s, t = s + y * load(w, a), t + y * load(w, a + A_ld)
            u, v = u + y * load(w, a + 2 * A_ld), v + y * load(w, a + 3 * A_ld)
        store(w, out + k * out_step, load(w, c + k * c_step) + sign * s)
        store(w, out + (k + 1) * out_step, load(w, c + (k + 1) * c_step) + sign * t)
        store(w, out + (k + 2) * out_step, load(w, c + (k + 2) * c_step) + sign * u)
        store(w, out + (k + 3) * out_step, load(w, c + (k + 3) * c_step) + sign * v)
    for k in range(fours, count):
        a = A + k * A_ld
        s = load(w, a) * load(w, x)
        for q in range(1, inner):
            s = s + load(w, a + q * A_step) * load(w, x + q * x_step)
        store(w, out + k * out_step, load(w, c + k * c_step) + sign * s)


@inlined
def mirror(w, A, size):
    """A's entries above the diagonal from those below it."""
    for i in range(size):
        for j in range(i):
            store(w, A.at + j * A.ld + i, load(w, A.at + i * A.ld + j))


@inlined
def _put_pair(w, o, C, c, sign, x, y):
    """Two neighbours of a product: those of C, at c, and `sign` times x and y."""
    store(w, o, load(w, c) + sign * x)
    store(w, o + 1, load(w, c + C.step) + sign * y)


@inlined
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


@inlined
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


@inlined
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
    i, j = rows - 1, cols - 1  # the last row and the last column, where their number is odd
    if rows % 2 == 1:
        _line(
            w, out.at + i * out.ld, 1, sign, B.at, B.step, B.ld, A.at + i * A.ld, A.step,
            C.at + i * C.ld, C.step, rows if lower else cols, inner,
        )  # fmt: skip
    if cols % 2 == 1 and not lower:
        _line(
            w, out.at + j, out.ld, sign, A.at, A.ld, A.step, B.at + j * B.step, B.ld,
            C.at + j * C.step, C.ld, rows - rows % 2, inner,
        )  # fmt: skip
    if lower:
        mirror(w, out, rows)


@inlined
def apply(w, out, sign, A, x, c, rows, inner):
    """The vector out = c + sign A x, for vectors at places; `out` may be c, not x."""
    _line(w, out, 1, sign, A.at, A.ld, A.step, x, 1, c, 1, rows, inner)


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
