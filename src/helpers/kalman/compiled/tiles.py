"""Products of small matrices in one block of memory: vector instructions, and their checked twin.

The Kalman filter's matrices are too small for a BLAS call (its overhead alone outweighs a product
of size ten) and too short for the compiler's own loop vectoriser. So the products are written as
register tiles: some rows and columns of the result stay in registers while the inner index runs.
Rows are padded to whole vectors with zeros, so that no loop has a remainder.

A matrix is a ``Mat``, a place in the workspace ``w``. In compiled code w is an address: no
views, no reference counts (an array passed to a function costs two of them), no allocation. Called
from Python, every function of this package runs as the Python that it is, and w is a
``Memory``, whose every read and write is checked: the same text, without a compiler.
"""

import contextlib
from functools import partial
from typing import NamedTuple

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import (
    AbstractTemplate,
    infer,
    infer_global,
    make_intrinsic_template,
)
from numba.extending import intrinsic, overload

from helpers.kalman.compiled.parts import Part

# Rows are padded to a multiple of LANES doubles, one vector of this processor. A tile of four rows
# is WIDEST columns wide, eight registers, or three vectors where that leaves fewer tiles to begin:
# the twelve sums, three vectors and a factor are all sixteen registers of most processors.
_AVX512 = not numba.config.CPU_NAME and llvmlite.binding.get_host_cpu_features().get("avx512f")
LANES = 8 if _AVX512 else 4
WIDEST = 2 * LANES

# How what compiled code calls is compiled.
PART = {
    "error_model": "numpy", "nogil": True, "no_cfunc_wrapper": True, "no_cpython_wrapper": True,
    "pipeline_class": Part,
}  # fmt: skip


def jitable(function, machine=None, **options):
    """A Python function that compiled code can call too; with ``machine`` it calls that one.

    It is compiled once for arguments of these types. `numba.extending.register_jitable` compiles it
    again for each kind of caller.
    """
    part = numba.njit(machine or function, **PART, **options)

    class Shared(AbstractTemplate):
        key = function

        def generic(self, args, kws):
            return types.Dispatcher(part).get_call_type(self.context, args, kws)

        def get_impl_key(self, sig):
            return part.get_overload(sig.args)

    infer(Shared)
    infer_global(function, types.Function(Shared))
    return function


# As part of its caller: what is known there shortens its loops.
inlined = partial(jitable, forceinline=True)


class Mat(NamedTuple):
    """Entry (i, j) lies ``at + i * ld + j * step`` doubles after the beginning of w."""

    at: int
    ld: int
    step: int


class Listed(NamedTuple):
    """The non-zeros of a matrix: those of row i in columns ``index[start[i]:start[i + 1]]``.

    At least one for each row. Both are arrays of integers in Python, in compiled code places.
    """

    start: int
    index: int
    sparse: bool  # whether a product takes less time by them


class Memory:
    """A workspace for Python: ``size`` doubles, all NaN, and every access is checked.

    None beyond its end is read or written, and no write reaches from one matrix into the next.

    Parameters
    ----------
    size : int
    space : NamedTuple of Mat
        What :func:`helpers.kalman.compiled.layout.space` answers.
    sizes : NamedTuple of int
        What :func:`helpers.kalman.compiled.layout.sizes` answers.
    """

    def __init__(self, size, space=None, sizes=None):
        self.data = np.full(size, np.nan)
        self.space, self.sizes = space, sizes
        starts = [mat.at for mat in space or [Mat(0, size, 1)]]
        self._bounds = np.sort([*starts, size])

    def _slice(self, start, stop):
        if not 0 <= start <= stop <= len(self.data):
            raise IndexError(f"doubles {start} to {stop} of a workspace of {len(self.data)}")
        return slice(start, stop)

    def read(self, i, length=1):
        """Doubles i to i + length, a copy."""
        return self.data[self._slice(i, i + length)].copy()

    def write(self, i, values):
        """Doubles i and following, all within one matrix."""
        stop = i + len(values)
        if stop > self._bounds[np.searchsorted(self._bounds, i, side="right")]:
            raise IndexError(f"doubles {i} to {stop} lie in two matrices")
        self.data[self._slice(i, stop)] = values


DOUBLES = ir.DoubleType().as_pointer()


def stands_for(function, definition):
    """Let compiled code have what an intrinsic's ``definition`` writes where it finds the function.

    `numba.extending.overload` would compile a function that calls it, for all types of arguments.
    """
    template = make_intrinsic_template(function, definition, function.__name__)
    infer(template)
    infer_global(function, types.Function(template))


def compiled_as(machine):
    """Let compiled code call the intrinsic ``machine`` where Python calls the function below."""

    def decorate(function):
        stands_for(function, machine._defn)
        return function

    return decorate


def _vector_type(width):
    return ir.VectorType(ir.DoubleType(), width)


def _spread(builder, x, width):
    """x in every lane of a vector."""
    undefined = ir.Constant(_vector_type(width), ir.Undefined)
    first = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
    one = builder.insert_element(undefined, x, ir.IntType(32)(0))
    return builder.shuffle_vector(one, undefined, first)


def _vector(builder, data, place, width):
    """Where the vector lies that begins `place` doubles after w."""
    return builder.bitcast(builder.gep(data, [place]), _vector_type(width).as_pointer())


def _multiply_add(builder, a, b, c):
    """a b + c, in one instruction where the machine has it."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


@contextlib.contextmanager
def _loop(builder, count):
    """A loop of ``count`` rounds that the compiler leaves as it is; gives the index.

    Most have one round or a few: unrolled, they would take longer to begin than to run.
    """
    with cgutils.for_range(builder, count, intp=count.type) as loop:
        yield loop.index
        end_of_body = builder.basic_block
    module = builder.module
    option = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    options = ir.MDValue(module, [option], name=str(len(module.metadata)))
    options.operands = (options, option)  # a loop's options name themselves first
    end_of_body.terminator.set_metadata("llvm.loop", options)


@intrinsic
def _get(typing, w, i):
    def generate(context, builder, signature, args):
        return builder.load(builder.gep(builder.inttoptr(args[0], DOUBLES), [args[1]]))

    return types.float64(w, types.intp), generate


@compiled_as(_get)
def get(w, i):
    """The double at place i."""
    return w.read(i)[0]


@intrinsic
def _put(typing, w, i, x):
    def generate(context, builder, signature, args):
        builder.store(args[2], builder.gep(builder.inttoptr(args[0], DOUBLES), [args[1]]))
        return context.get_dummy_value()

    return types.void(w, types.intp, types.float64), generate


@compiled_as(_put)
def put(w, i, x):
    """Write x at place i."""
    w.write(i, [x])


@intrinsic
def _put_first(typing, w, i, x):
    def generate(context, builder, signature, args):
        zeros = ir.Constant(_vector_type(LANES), [0.0] * LANES)
        row = builder.insert_element(zeros, args[2], ir.IntType(32)(0))
        data = builder.inttoptr(args[0], DOUBLES)
        builder.store(row, _vector(builder, data, args[1], LANES), align=8)
        return context.get_dummy_value()

    return types.void(w, types.intp, types.float64), generate


@compiled_as(_put_first)
def put_first(w, i, x):
    """Write x at place i, and zeros in the rest of its vector: a row of one number."""
    w.write(i, [x, *[0.0] * (LANES - 1)])


def _tile(rows, width, chains):
    """The function that computes one tile, ``rows`` by ``width``, of ``out = C + alpha A B``.

    The sums run in ``chains`` independent parts, which hides the latency of additions where a tile
    has few entries.
    """

    @intrinsic
    def machine(typing, w, out, ldo, alpha, A, lda, step, B, ldb, C, ldc, inner):
        def generate(context, builder, signature, args):
            w, out, ldo, alpha, A, lda, step, B, ldb, C, ldc, inner = args
            data, integer = builder.inttoptr(w, DOUBLES), inner.type
            zero = ir.Constant(_vector_type(LANES), [0.0] * LANES)
            places = range(0, width, LANES)  # where the vectors of a row begin
            sums = [
                [[cgutils.alloca_once_value(builder, zero) for _ in places] for _ in range(rows)]
                for _ in range(chains)
            ]

            def row(matrix, ld, i):
                start = builder.add(matrix, builder.mul(ld, i))
                return [
                    _vector(builder, data, builder.add(start, integer(j)), LANES) for j in places
                ]

            def add(q, chain):
                b = [builder.load(place, align=8) for place in row(B, ldb, q)]
                for i in range(rows):
                    place = builder.add(A, builder.mul(lda, integer(i)))
                    place = builder.add(place, builder.mul(q, step))
                    a = _spread(builder, builder.load(builder.gep(data, [place])), LANES)
                    for x, total in zip(b, sums[chain][i], strict=True):
                        x = _multiply_add(builder, a, x, builder.load(total))
                        builder.store(x, total)

            whole = builder.udiv(inner, integer(chains))
            with _loop(builder, whole) as index:
                q = builder.mul(index, integer(chains))
                for chain in range(chains):
                    add(builder.add(q, integer(chain)), chain)
            if chains > 1:
                done = builder.mul(whole, integer(chains))
                with _loop(builder, builder.sub(inner, done)) as index:
                    add(builder.add(done, index), 0)

            factor = _spread(builder, alpha, LANES)
            for i in range(rows):
                here = zip(row(C, ldc, integer(i)), row(out, ldo, integer(i)), strict=True)
                for j, (c, o) in enumerate(here):
                    total = builder.load(sums[0][i][j])
                    for chain in range(1, chains):
                        total = builder.fadd(total, builder.load(sums[chain][i][j]))
                    x = _multiply_add(builder, factor, total, builder.load(c, align=8))
                    builder.store(x, o, align=8)
            return context.get_dummy_value()

        place = types.intp
        return types.void(w, *[place] * 2, types.float64, *[place] * 8), generate

    @compiled_as(machine)
    def tile(w, out, ldo, alpha, A, lda, step, B, ldb, C, ldc, inner):
        results = []
        for i in range(rows):
            total = np.zeros(width)
            for q in range(inner):
                total += w.read(A + i * lda + q * step)[0] * w.read(B + q * ldb, width)
            results.append(w.read(C + i * ldc, width) + alpha * total)
        for i, values in enumerate(results):
            w.write(out + i * ldo, values)

    return tile


def _listed(width, updated):
    """The function that computes ``width`` columns of a sparse product, from row ``first`` on.

    ``out = C + A B``; row i of A has its non-zeros in columns ``index[start[i]:start[i + 1]]``, of
    which there is at least one. If ``updated``, B counts as ``B + alpha x'x``, where columns j and
    following of the row x are those of the others here.
    """

    @intrinsic
    def machine(
        typing, w, out, ldo, A, lda, B, ldb, C, ldc, start, index, first, rows, alpha, x, j
    ):
        def generate(context, builder, signature, args):
            w, out, ldo, A, lda, B, ldb, C, ldc, start, index, first, rows, alpha, x, j = args
            data, integer = builder.inttoptr(w, DOUBLES), first.type
            starts, columns = (builder.inttoptr(a, integer.as_pointer()) for a in (start, index))

            def row(matrix, ld, i):
                return _vector(builder, data, builder.add(matrix, builder.mul(ld, i)), width)

            if updated:
                right = builder.load(_vector(builder, data, builder.add(x, j), width), align=8)
                right = builder.fmul(_spread(builder, alpha, width), right)
            total = cgutils.alloca_once(builder, _vector_type(width))
            with _loop(builder, builder.sub(rows, first)) as k:
                i = builder.add(first, k)
                begin = builder.load(builder.gep(starts, [i]))
                end = builder.load(builder.gep(starts, [builder.add(i, integer(1))]))
                a = builder.add(A, builder.mul(lda, i))

                def plus(place, sum_before):
                    q = builder.load(builder.gep(columns, [place]))
                    factor = builder.load(builder.gep(data, [builder.add(a, q)]))
                    factor = _spread(builder, factor, width)
                    b = builder.load(row(B, ldb, q), align=8)
                    if updated:
                        left = builder.load(builder.gep(data, [builder.add(x, q)]))
                        b = _multiply_add(builder, _spread(builder, left, width), right, b)
                    return _multiply_add(builder, factor, b, sum_before)

                c = builder.load(row(C, ldc, i), align=8)
                builder.store(plus(begin, c), total)  # most rows have one entry alone: no loop
                second = builder.add(begin, integer(1))
                with _loop(builder, builder.sub(end, second)) as k:
                    x = plus(builder.add(second, k), builder.load(total))
                    builder.store(x, total)
                builder.store(builder.load(total), row(out, ldo, i), align=8)
            return context.get_dummy_value()

        place = types.intp
        return types.void(w, *[place] * 12, types.float64, *[place] * 2), generate

    @compiled_as(machine)
    def tile(w, out, ldo, A, lda, B, ldb, C, ldc, start, index, first, rows, alpha, x, j):
        for i in range(first, rows):
            total = w.read(C + i * ldc, width)
            if start[i] == start[i + 1]:
                raise IndexError(f"row {i} lists no entry")
            for q in index[start[i] : start[i + 1]]:
                b = w.read(B + q * ldb, width)
                if updated:
                    b += w.read(x + q)[0] * (alpha * w.read(x + j, width))
                total += w.read(A + i * lda + q)[0] * b
            w.write(out + i * ldo, total)

    return tile


def _outer(width, terms):
    """The function that computes ``width`` columns of ``out = C + alpha x'y``, for rows x and y.

    With two ``terms`` it is ``C + alpha (x'y + y'x)``.
    """

    @intrinsic
    def machine(typing, w, out, ldo, alpha, x, y, j, C, ldc, rows):
        def generate(context, builder, signature, args):
            w, out, ldo, alpha, x, y, j, C, ldc, rows = args
            data, factor = builder.inttoptr(w, DOUBLES), _spread(builder, alpha, width)
            pairs = [(x, y), (y, x)][:terms]

            def vector(place):
                return builder.load(_vector(builder, data, place, width), align=8)

            right = [builder.fmul(factor, vector(builder.add(b, j))) for _, b in pairs]
            with _loop(builder, rows) as i:
                row = vector(builder.add(builder.add(C, j), builder.mul(ldc, i)))
                for (a, _), b in zip(pairs, right, strict=True):
                    a = builder.load(builder.gep(data, [builder.add(a, i)]))
                    row = _multiply_add(builder, _spread(builder, a, width), b, row)
                place = builder.add(builder.add(out, j), builder.mul(ldo, i))
                builder.store(row, _vector(builder, data, place, width), align=8)
            return context.get_dummy_value()

        return types.void(w, *[types.intp] * 2, types.float64, *[types.intp] * 6), generate

    @compiled_as(machine)
    def tile(w, out, ldo, alpha, x, y, j, C, ldc, rows):
        for i in range(rows):
            row = w.read(C + i * ldc + j, width)
            for a, b in [(x, y), (y, x)][:terms]:
                row += w.read(a + i)[0] * (alpha * w.read(b + j, width))
            w.write(out + i * ldo + j, row)

    return tile


def _stripe(four, two, one):
    """The function that computes as many columns of a product as the tiles have, from row `first`.

    The tiles are those of four, two rows and one.
    """

    @jitable
    def stripe(w, out, alpha, A, B, C, j, first, rows, inner):
        i, b = first, B.at + j
        while i < rows:
            a, o, c = A.at + i * A.ld, out.at + i * out.ld + j, C.at + i * C.ld + j
            if i + 4 <= rows:
                four(w, o, out.ld, alpha, a, A.ld, A.step, b, B.ld, c, C.ld, inner)
                i += 4
            elif i + 2 <= rows:
                two(w, o, out.ld, alpha, a, A.ld, A.step, b, B.ld, c, C.ld, inner)
                i += 2
            else:
                one(w, o, out.ld, alpha, a, A.ld, A.step, b, B.ld, c, C.ld, inner)
                i += 1

    return stripe


_one_wide, _one = _tile(1, WIDEST, 2), _tile(1, LANES, 4)
_wide = _stripe(_tile(4, WIDEST, 1), _tile(2, WIDEST, 1), _one_wide)
_narrow = _stripe(_tile(4, LANES, 1), _tile(2, LANES, 2), _one)
_widest = _stripe(_tile(4, 3 * LANES, 1), _tile(2, 3 * LANES, 1), _tile(1, 3 * LANES, 2))
_outer_wide, _outer_one = _outer(2 * LANES, 1), _outer(LANES, 1)
_outers_wide, _outers_one = _outer(2 * LANES, 2), _outer(LANES, 2)


@jitable
def product(w, out, alpha, A, B, C, rows, inner, cols, lower=False):
    """out = C + alpha A B; A (rows, inner), B (inner, cols), out and C (rows, cols).

    B, C and out lie row by row (step 1), with rows padded to whole vectors; A may have any strides.
    With `lower`, some entries above the diagonal are left as they are.
    """
    j = first = 0
    while j + LANES < cols:
        left = cols - j
        if lower:  # of the first rows the first vector alone
            first = min(j + LANES, rows)
            _narrow(w, out, alpha, A, B, C, j, j, first, inner)
        if left > 2 * LANES and (left <= 3 * LANES or left > 4 * LANES):
            if lower:  # and of those that follow two
                _wide(w, out, alpha, A, B, C, j, first, min(first + LANES, rows), inner)
                first = min(first + LANES, rows)
            _widest(w, out, alpha, A, B, C, j, first, rows, inner)
            j += 3 * LANES
        else:
            _wide(w, out, alpha, A, B, C, j, first, rows, inner)
            j += 2 * LANES
    if j < cols:
        _narrow(w, out, alpha, A, B, C, j, j if lower else 0, rows, inner)


@jitable
def row_product(w, out, alpha, a, B, c, inner, cols):
    """out = c + alpha a B for rows that begin at the places out, a and c; B (inner, cols)."""
    j = 0
    while j < cols:
        if j + WIDEST - LANES < cols:
            _one_wide(w, out + j, 0, alpha, a, 0, 1, B.at + j, B.ld, c + j, 0, inner)
            j += WIDEST
        else:
            _one(w, out + j, 0, alpha, a, 0, 1, B.at + j, B.ld, c + j, 0, inner)
            j += LANES


@jitable
def row_dots(w, out, alpha, a, B, c, inner, cols):
    """out = c + alpha a B' for rows that begin at the places out, a and c; B (cols, inner)."""
    for j in range(cols):
        put(w, out + j, get(w, c + j) + alpha * dot(w, a, B.at + j * B.ld, inner))


def place_of(x):
    """An array of integers, or in compiled code its address, which costs no reference count."""
    return x


@overload(place_of, jit_options=PART)
def _place(x):
    return lambda x: x.ctypes.data


def _by_lists(updated):
    """The function that computes rows of a sparse product by tiles: see those of `_listed`."""
    wide, half, one = (_listed(k * LANES, updated) for k in (4, 2, 1))

    @inlined
    def by_lists(w, out, A, found, B, C, first, rows, cols, lower, alpha, x):
        start, index, j = found.start, found.index, 0
        while j < cols:
            k = max(first, j) if lower else first
            o, b, c = out.at + j, B.at + j, C.at + j
            if j + 3 * LANES < cols:
                wide(w, o, out.ld, A.at, A.ld, b, B.ld, c, C.ld, start, index, k, rows, alpha, x, j)
                j += 4 * LANES
            elif j + LANES < cols:
                half(w, o, out.ld, A.at, A.ld, b, B.ld, c, C.ld, start, index, k, rows, alpha, x, j)
                j += 2 * LANES
            else:
                one(w, o, out.ld, A.at, A.ld, b, B.ld, c, C.ld, start, index, k, rows, alpha, x, j)
                j += LANES

    return by_lists


_sparse, _sparse_updated = _by_lists(False), _by_lists(True)


@inlined
def sparse_product(w, out, A, found, B, C, rows, cols, lower=False):
    """out = C + A B; A has its non-zeros where ``found``, `Listed`, says.

    With `lower`, some entries above the diagonal are left as they are. `out` is neither B nor C.
    """
    _sparse(w, out, A, found, B, C, 0, rows, cols, lower, 0.0, 0)


def _vectors(builder, length):
    """A loop over the vectors of a row."""
    many = builder.udiv(builder.add(length, length.type(LANES - 1)), length.type(LANES))
    return _loop(builder, many)


def _padded(length):
    return (length + LANES - 1) // LANES * LANES


def _folded(builder, x, join):
    """The lanes of a vector in one number: its upper half joined with the lower, and so on."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        mask = ir.VectorType(ir.IntType(32), lanes)
        low = builder.shuffle_vector(x, x, ir.Constant(mask, [*range(lanes)]))
        high = builder.shuffle_vector(x, x, ir.Constant(mask, [*range(lanes, 2 * lanes)]))
        x = join(low, high)
    return builder.extract_element(x, ir.IntType(32)(0))


def _sum_of_lanes(builder, x):
    return _folded(builder, x, builder.fadd)


def _larger(builder, x, y):
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@intrinsic
def _dot(typing, w, a, b, length):
    def generate(context, builder, signature, args):
        w, a, b, length = args
        data = builder.inttoptr(w, DOUBLES)
        zero = ir.Constant(_vector_type(LANES), [0.0] * LANES)
        total = cgutils.alloca_once_value(builder, zero)
        with _vectors(builder, length) as index:
            k = builder.mul(index, length.type(LANES))
            x = builder.load(_vector(builder, data, builder.add(a, k), LANES), align=8)
            y = builder.load(_vector(builder, data, builder.add(b, k), LANES), align=8)
            builder.store(_multiply_add(builder, x, y, builder.load(total)), total)
        return _sum_of_lanes(builder, builder.load(total))

    return types.float64(w, *[types.intp] * 3), generate


@compiled_as(_dot)
def dot(w, a, b, length):
    """The product of the rows that begin at the places a and b, padded with zeros."""
    return float(w.read(a, _padded(length)) @ w.read(b, _padded(length)))


@intrinsic
def _largest_change(typing, w, a, b, weights, length):
    def generate(context, builder, signature, args):
        w, a, b, weights, length = args
        data = builder.inttoptr(w, DOUBLES)
        most = cgutils.alloca_once_value(builder, ir.Constant(_vector_type(LANES), [0.0] * LANES))
        with _vectors(builder, length) as index:
            k = builder.mul(index, length.type(LANES))
            x, y, weight = (
                builder.load(_vector(builder, data, builder.add(place, k), LANES), align=8)
                for place in (a, b, weights)
            )
            x = builder.fsub(y, x)
            x = builder.fmul(builder.fmul(x, x), weight)
            builder.store(_larger(builder, x, builder.load(most)), most)
        return _folded(builder, builder.load(most), partial(_larger, builder))

    return types.float64(w, *[types.intp] * 4), generate


@compiled_as(_largest_change)
def largest_change(w, a, b, weights, length):
    """The largest (b_j - a_j)^2 weights_j, or 0, of rows that begin at places and are padded."""
    x = w.read(b, _padded(length)) - w.read(a, _padded(length))
    return float((x * x * w.read(weights, _padded(length))).max(initial=0.0))


def _gram_tile(rows, cols):
    """The function that adds one tile, ``rows`` by ``cols``, of a sum of products A diag(g) B'.

    Both A and B lie row by row, and their rows are what is summed over: so each entry of the tile
    is a vector of partial sums in a register, whose lanes are added at the end.
    """

    @intrinsic
    def machine(typing, w, out, ldo, A, lda, leap_A, B, ldb, leap_B, g, blocks, length):
        def generate(context, builder, signature, args):
            w, out, ldo, A, lda, leap_A, B, ldb, leap_B, g, blocks, length = args
            data, integer = builder.inttoptr(w, DOUBLES), length.type
            zero = ir.Constant(_vector_type(LANES), [0.0] * LANES)
            sums = [
                [cgutils.alloca_once_value(builder, zero) for _ in range(cols)] for _ in range(rows)
            ]

            def row(matrix, ld, i, j):
                place = builder.add(builder.add(matrix, builder.mul(ld, integer(i))), j)
                return builder.load(_vector(builder, data, place, LANES), align=8)

            with _loop(builder, blocks) as block:
                a = builder.add(A, builder.mul(block, leap_A))
                b = builder.add(B, builder.mul(block, leap_B))
                with _vectors(builder, length) as index:
                    j = builder.mul(index, integer(LANES))
                    weights = row(g, integer(0), 0, j)
                    right = [row(b, ldb, k, j) for k in range(cols)]
                    for i in range(rows):
                        left = builder.fmul(weights, row(a, lda, i, j))
                        for x, total in zip(right, sums[i], strict=True):
                            x = _multiply_add(builder, left, x, builder.load(total))
                            builder.store(x, total)
            for i in range(rows):
                for k in range(cols):
                    place = builder.add(out, builder.add(builder.mul(ldo, integer(i)), integer(k)))
                    place = builder.gep(data, [place])
                    x = _sum_of_lanes(builder, builder.load(sums[i][k]))
                    builder.store(builder.fadd(builder.load(place), x), place)
            return context.get_dummy_value()

        return types.void(w, *[types.intp] * 11), generate

    @compiled_as(machine)
    def tile(w, out, ldo, A, lda, leap_A, B, ldb, leap_B, g, blocks, length):
        weights = w.read(g, length)
        for i in range(rows):
            for k in range(cols):
                x = w.read(out + i * ldo + k)[0]
                for block in range(blocks):
                    left = w.read(A + block * leap_A + i * lda, length)
                    x += (left * weights) @ w.read(B + block * leap_B + k * ldb, length)
                w.write(out + i * ldo + k, [x])

    return tile


_gram_four, _gram_tall, _gram_flat = _gram_tile(4, 4), _gram_tile(4, 1), _gram_tile(1, 4)
_gram_one = _gram_tile(1, 1)


@jitable
def gram(w, out, A, leap_A, B, leap_B, g, blocks, length, rows, cols, lower):
    """out += sum of A diag(g) B' over ``blocks`` pairs A (rows, length) and B (cols, length).

    Each pair lies leap_A and leap_B doubles after the one before, the row g (length,) at a place.
    The length is that of whole vectors. With `lower`, only the entries on and below the diagonal
    are sure to be written.
    """
    i = 0
    while i < rows:
        height = 4 if i + 4 <= rows else 1
        a, stop = A.at + i * A.ld, min(cols, i + height) if lower else cols
        k = 0
        while k < stop:
            o, b = out.at + i * out.ld + k, B.at + k * B.ld
            if height == 4 and k + 4 <= cols:
                _gram_four(w, o, out.ld, a, A.ld, leap_A, b, B.ld, leap_B, g, blocks, length)
                k += 4
            elif height == 4:
                _gram_tall(w, o, out.ld, a, A.ld, leap_A, b, B.ld, leap_B, g, blocks, length)
                k += 1
            elif k + 4 <= cols:
                _gram_flat(w, o, out.ld, a, A.ld, leap_A, b, B.ld, leap_B, g, blocks, length)
                k += 4
            else:
                _gram_one(w, o, out.ld, a, A.ld, leap_A, b, B.ld, leap_B, g, blocks, length)
                k += 1
        i += height


@intrinsic
def _axpy(typing, w, out, alpha, a, c, length):
    def generate(context, builder, signature, args):
        w, out, alpha, a, c, length = args
        data = builder.inttoptr(w, DOUBLES)
        factor = _spread(builder, alpha, LANES)
        with _vectors(builder, length) as index:
            k = builder.mul(index, length.type(LANES))
            x = builder.load(_vector(builder, data, builder.add(a, k), LANES), align=8)
            y = builder.load(_vector(builder, data, builder.add(c, k), LANES), align=8)
            x = _multiply_add(builder, factor, x, y)
            builder.store(x, _vector(builder, data, builder.add(out, k), LANES), align=8)
        return context.get_dummy_value()

    return types.void(w, types.intp, types.float64, *[types.intp] * 3), generate


@compiled_as(_axpy)
def axpy(w, out, alpha, a, c, length):
    """out = c + alpha a for rows that begin at the places out, c and a."""
    w.write(out, w.read(c, _padded(length)) + alpha * w.read(a, _padded(length)))


def _shuffled(builder, vectors, mask):
    """One vector from every two: the entries `mask` of the one followed by the other."""
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(mask)), mask)
    pairs = zip(vectors[::2], vectors[1::2], strict=True)
    return [builder.shuffle_vector(a, b, mask) for a, b in pairs]


def _block(mean):
    """The function that transposes one square block of LANES rows: ``out = A'``.

    With ``mean`` the block becomes symmetric: ``out = (A + A') / 2``.
    """

    @intrinsic
    def machine(typing, w, out, ldo, A, lda):
        def generate(context, builder, signature, args):
            w, out, ldo, A, lda = args
            data = builder.inttoptr(w, DOUBLES)

            def row(matrix, ld, i):
                place = builder.add(matrix, builder.mul(ld, ld.type(i)))
                return _vector(builder, data, place, LANES)

            places = range(0, LANES, 2)
            rows = given = [builder.load(row(A, lda, i), align=8) for i in range(LANES)]
            # Pairs of columns from pairs of rows, then pairs of columns as wholes: shuffles that
            # keep to pairs take half the time of those that take any double anywhere.
            low, high = ([x for j in places for x in (j + k, LANES + j + k)] for k in (0, 1))
            halves = [_shuffled(builder, rows, mask) for mask in (low, high)]
            even, odd = ([x for j in range(k, 2 * LANES, 4) for x in (j, j + 1)] for k in (0, 2))
            for _ in range(LANES.bit_length() - 2):
                halves = [
                    _shuffled(builder, half, even) + _shuffled(builder, half, odd)
                    for half in halves
                ]
            rows = [x for pair in zip(*halves, strict=True) for x in pair]
            if mean:
                weight = ir.Constant(_vector_type(LANES), [0.5] * LANES)
                pairs = zip(rows, given, strict=True)
                rows = [builder.fmul(weight, builder.fadd(a, b)) for a, b in pairs]
            for i, x in enumerate(rows):
                builder.store(x, row(out, ldo, i), align=8)
            return context.get_dummy_value()

        return types.void(w, *[types.intp] * 4), generate

    @compiled_as(machine)
    def block(w, out, ldo, A, lda):
        X = np.array([w.read(A + i * lda, LANES) for i in range(LANES)])
        for i, values in enumerate((X + X.T) / 2 if mean else X.T):
            w.write(out + i * ldo, values)

    return block


_transposed_block, _mean_block = _block(False), _block(True)


@jitable
def transpose(w, out, A, rows, cols):
    """out (cols, rows) = A', A (rows, cols), by whole blocks: both have room for them."""
    _transpose_rows(w, out, A, 0, rows, cols)


@inlined
def _transpose_rows(w, out, A, first, stop, cols):
    """`transpose` from row `first` on, which begins a block, to row `stop`."""
    for i in range(first, stop, LANES):
        for j in range(0, cols, LANES):
            _transposed_block(w, out.at + j * out.ld + i, out.ld, A.at + i * A.ld + j, A.ld)


@inlined
def sparse_product_transposed(w, out, X, A, found, B, C, rows, cols):
    """X = C + A B as `sparse_product` and out = X', with room for whole blocks in both.

    Where a row has more than WIDEST entries, the rows of a block are transposed as soon as they are
    there: a large matrix would have left the first cache until it is read again.
    """
    height = LANES if cols > WIDEST else rows
    for i in range(0, rows, height):
        _sparse(w, X, A, found, B, C, i, min(rows, i + height), cols, False, 0.0, 0)
        _transpose_rows(w, out, X, i, min(rows, i + height), cols)


@inlined
def sparse_product_updated(w, out, X, A, found, B, alpha, x, C, rows, cols):
    """`sparse_product_transposed` for X = C + A (B + alpha x'x), x a row that begins at a place.

    So the matrix in brackets need not be written.
    """
    height = LANES if cols > WIDEST else rows
    for i in range(0, rows, height):
        _sparse_updated(w, X, A, found, B, C, i, min(rows, i + height), cols, False, alpha, x)
        _transpose_rows(w, out, X, i, min(rows, i + height), cols)


@jitable
def symmetrize(w, A, size):
    """A's upper blocks from the lower ones; on the diagonal the mean of a block and its transpose.

    Of a matrix that is symmetric but for rounding, nothing is read above the diagonal's blocks.
    """
    for i in range(0, size, LANES):
        for j in range(0, i, LANES):
            _transposed_block(w, A.at + j * A.ld + i, A.ld, A.at + i * A.ld + j, A.ld)
        _mean_block(w, A.at + i * A.ld + i, A.ld, A.at + i * A.ld + i, A.ld)


@jitable
def padded(k):
    """The least multiple of LANES that holds k."""
    return (k + LANES - 1) // LANES * LANES


@jitable
def transposed(A):
    """A', as a left factor."""
    return Mat(A.at, A.step, A.ld)


@jitable
def below(A, i):
    """A from its row i on."""
    return Mat(A.at + i * A.ld, A.ld, A.step)


@jitable
def element(w, A, i, j):
    """Entry (i, j) of A, which lies row by row."""
    return get(w, A.at + i * A.ld + j)


@jitable
def clear(w, A, rows):
    """Zeros in `rows` whole rows of A."""
    for k in range(A.at, A.at + rows * A.ld):
        put(w, k, 0.0)


@jitable
def copy(w, out, A, rows):
    """`rows` whole rows of A to `out`, which has rows as long."""
    for k in range(rows * A.ld):
        put(w, out.at + k, get(w, A.at + k))


@jitable
def add(w, out, factor, A, rows):
    """out += factor A, `rows` whole rows that are as long in both."""
    axpy(w, out.at, factor, A.at, out.at, rows * A.ld)


@jitable
def add_picked(w, out, alpha, X, rows, columns):
    """out += alpha X for the `columns` of X."""
    for i in range(rows):
        here, row = below(out, i).at, below(X, i).at
        for j in range(len(columns)):
            put(w, here + j, get(w, here + j) + alpha * get(w, row + columns[j]))


@jitable
def from_left(w, out, A, listed, X, C, rows, inner, cols):
    """out (rows, cols) = C + A X; by the non-zeros of A where that is faster."""
    if listed.sparse:
        sparse_product(w, out, A, listed, X, C, rows, cols)
    elif rows == 1:
        row_product(w, out.at, 1.0, A.at, X, C.at, inner, cols)
    else:
        product(w, out, 1.0, A, X, C, rows, inner, cols)


@jitable
def from_left_transposing(w, out, out_t, A, listed, X, C, rows, inner, cols):
    """`from_left`, and where it goes by non-zeros the transposed of out as well."""
    if listed.sparse:
        clear(w, below(out, rows), padded(rows) - rows)  # transposed with the others
        sparse_product_transposed(w, out_t, out, A, listed, X, C, rows, cols)
    else:
        product(w, out, 1.0, A, X, C, rows, inner, cols)


@jitable
def from_left_changed(w, out, out_t, A, listed, X, alpha, x, C, rows, inner, cols):
    """`from_left_transposing` for X + alpha x'x, which need not be written; A is not dense."""
    clear(w, below(out, rows), padded(rows) - rows)
    sparse_product_updated(w, out_t, out, A, listed, X, alpha, x, C, rows, cols)


@jitable
def times_listed(w, out, X, out_t, A, listed, A_t, C, size, lower):
    """out = C + X A', which is symmetric; by the non-zeros of A where that is faster."""
    if listed.sparse:
        sparse_product(w, out, A, listed, out_t, C, size, size, lower)
    else:
        product(w, out, 1.0, X, A_t, C, size, size, size, lower)


@jitable
def rank_one(w, out, alpha, x, y, C, rows, cols):
    """out = C + alpha x' y, for rows that begin at the places x and y."""
    j = 0
    while j < cols:
        if j + LANES < cols:
            _outer_wide(w, out.at, out.ld, alpha, x, y, j, C.at, C.ld, rows)
            j += 2 * LANES
        else:
            _outer_one(w, out.at, out.ld, alpha, x, y, j, C.at, C.ld, rows)
            j += LANES


@jitable
def rank_two(w, out, x, y, C, size):
    """out = C + x' y + y' x, square, for rows that begin at the places x and y."""
    j = 0
    while j < size:
        if j + LANES < size:
            _outers_wide(w, out.at, out.ld, 1.0, x, y, j, C.at, C.ld, size)
            j += 2 * LANES
        else:
            _outers_one(w, out.at, out.ld, 1.0, x, y, j, C.at, C.ld, size)
            j += LANES
