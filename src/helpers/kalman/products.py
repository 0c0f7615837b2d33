"""Products of small matrices that live in one workspace, in vector instructions.

The Kalman filter's matrices are too small for a BLAS call (its overhead alone outweighs a product
of size ten) and too short for the compiler's own loop vectoriser. So the products are written as
register tiles: four rows by sixteen columns of the result stay in registers while the inner index
runs. Rows are padded to whole vectors with zeros, so that no loop has a remainder.

A matrix is a `Mat`, a place in the workspace, and ``w`` is the address of the workspace: no views,
no reference counts (an array passed to a function costs two of them), no allocation inside a loop.
"""

from typing import NamedTuple

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

DOUBLES = ir.DoubleType().as_pointer()
LANES = 8  # doubles in a vector; the compiler splits it where the machine's vectors are shorter


class Mat(NamedTuple):
    """Entry (i, j) lies ``at + i * ld + j * step`` doubles after the address w."""

    at: int
    ld: int
    step: int


def _spread(builder, x):
    """x in every lane of a vector."""
    undefined = ir.Constant(ir.VectorType(ir.DoubleType(), LANES), ir.Undefined)
    first = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    one = builder.insert_element(undefined, x, ir.IntType(32)(0))
    return builder.shuffle_vector(one, undefined, first)


def _vector(builder, data, place):
    """Where the vector lies that begins `place` doubles after w."""
    vector = ir.VectorType(ir.DoubleType(), LANES)
    return builder.bitcast(builder.gep(data, [place]), vector.as_pointer())


def _multiply_add(builder, a, b, c):
    """a b + c, in one instruction where the machine has it."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def _tile(rows, vectors, chains):
    """Make the intrinsic that computes one tile of ``out = C + alpha * A B``.

    ``rows`` by ``vectors * LANES`` entries, summed in ``chains`` independent sums (which hides the
    latency of the additions when a tile has few entries).
    """

    @intrinsic
    def tile(typing, w, out, ldo, alpha, A, lda, step, B, ldb, C, ldc, inner):
        def generate(context, builder, signature, args):
            w, out, ldo, alpha, A, lda, step, B, ldb, C, ldc, inner = args
            data = builder.inttoptr(w, DOUBLES)
            vector = ir.VectorType(ir.DoubleType(), LANES)
            integer = inner.type

            def at(matrix, ld, row, k):
                place = builder.add(matrix, builder.mul(ld, integer(row)))
                return _vector(builder, data, builder.add(place, integer(k * LANES)))

            zero = ir.Constant(vector, [0.0] * LANES)
            sums = [
                [
                    [cgutils.alloca_once_value(builder, zero) for _ in range(vectors)]
                    for _ in range(rows)
                ]
                for _ in range(chains)
            ]

            def add(q, chain):
                row_of_B = builder.add(B, builder.mul(q, ldb))
                b = [builder.load(at(row_of_B, ldb, 0, k), align=8) for k in range(vectors)]
                for i in range(rows):
                    place = builder.add(A, builder.mul(lda, integer(i)))
                    place = builder.add(place, builder.mul(q, step))
                    a = _spread(builder, builder.load(builder.gep(data, [place])))
                    for k in range(vectors):
                        total = sums[chain][i][k]
                        x = _multiply_add(builder, a, b[k], builder.load(total))
                        builder.store(x, total)

            whole = builder.udiv(inner, integer(chains))
            with cgutils.for_range(builder, whole, intp=integer) as loop:
                q = builder.mul(loop.index, integer(chains))
                for chain in range(chains):
                    add(builder.add(q, integer(chain)), chain)
            if chains > 1:
                done = builder.mul(whole, integer(chains))
                with cgutils.for_range(builder, builder.sub(inner, done), intp=integer) as loop:
                    add(builder.add(done, loop.index), 0)

            factor = _spread(builder, alpha)
            for i in range(rows):
                for k in range(vectors):
                    total = builder.load(sums[0][i][k])
                    for chain in range(1, chains):
                        total = builder.fadd(total, builder.load(sums[chain][i][k]))
                    c = builder.load(at(C, ldc, i, k), align=8)
                    x = _multiply_add(builder, factor, total, c)
                    builder.store(x, at(out, ldo, i, k), align=8)
            return context.get_dummy_value()

        place = types.intp
        return types.void(w, *[place] * 2, types.float64, *[place] * 8), generate

    return tile


def _listed(vectors):
    """Make the intrinsic that computes ``vectors * LANES`` entries of one row of a sparse product.

    ``out = c + a B`` where the row a has its non-zeros in the columns ``index[start:stop]``.
    """

    @intrinsic
    def tile(typing, w, out, a, B, ldb, c, start, stop, index):
        def generate(context, builder, signature, args):
            w, out, a, B, ldb, c, start, stop, index = args
            data = builder.inttoptr(w, DOUBLES)
            listed = context.make_array(signature.args[-1])(context, builder, index).data

            def at(row, k):
                return _vector(builder, data, builder.add(row, row.type(k * LANES)))

            given = [builder.load(at(c, k), align=8) for k in range(vectors)]
            sums = [cgutils.alloca_once_value(builder, x) for x in given]
            with cgutils.for_range(builder, builder.sub(stop, start), intp=start.type) as loop:
                q = builder.load(builder.gep(listed, [builder.add(start, loop.index)]))
                row_of_B = builder.add(B, builder.mul(q, ldb))
                factor = _spread(builder, builder.load(builder.gep(data, [builder.add(a, q)])))
                for k, total in enumerate(sums):
                    b = builder.load(at(row_of_B, k), align=8)
                    builder.store(_multiply_add(builder, factor, b, builder.load(total)), total)
            for k, total in enumerate(sums):
                builder.store(builder.load(total), at(out, k), align=8)
            return context.get_dummy_value()

        return types.void(w, *[types.intp] * 7, index), generate

    return tile


_four_rows, _four_rows_short = _tile(4, 2, 1), _tile(4, 1, 1)
_one_row, _one_row_short = _tile(1, 2, 2), _tile(1, 1, 4)
_listed_four, _listed_two, _listed_one = _listed(4), _listed(2), _listed(1)

# Called by compiled code alone: without wrappers for Python they compile in a third less time.
jit = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


@jit
def product(w, out, alpha, A, B, C, rows, inner, cols, lower=False):
    """out = C + alpha A B; A (rows, inner), B (inner, cols), out and C (rows, cols).

    B, C and out lie row by row (step 1), with rows padded to whole vectors; A lies as it likes.
    With `lower`, tiles that lie wholly above the diagonal are left as they are.
    """
    i = 0
    while i < rows:
        height = 4 if i + 4 <= rows else 1
        o, a, c = out.at + i * out.ld, A.at + i * A.ld, C.at + i * C.ld
        stop = min(cols, i + height) if lower else cols
        j = 0
        while j < stop:
            b = B.at + j
            if height == 4:
                if j + LANES < stop:
                    _four_rows(
                        w, o + j, out.ld, alpha, a, A.ld, A.step, b, B.ld, c + j, C.ld, inner
                    )
                    j += LANES
                else:
                    _four_rows_short(
                        w, o + j, out.ld, alpha, a, A.ld, A.step, b, B.ld, c + j, C.ld, inner
                    )
            elif j + LANES < stop:
                _one_row(w, o + j, out.ld, alpha, a, A.ld, A.step, b, B.ld, c + j, C.ld, inner)
                j += LANES
            else:
                _one_row_short(
                    w, o + j, out.ld, alpha, a, A.ld, A.step, b, B.ld, c + j, C.ld, inner
                )
            j += LANES
        i += height


@jit
def row_product(w, out, alpha, a, B, c, inner, cols):
    """out = c + alpha a B for rows that begin at the places out, a and c; B (inner, cols)."""
    j = 0
    while j < cols:
        if j + LANES < cols:
            _one_row(w, out + j, 0, alpha, a, 0, 1, B.at + j, B.ld, c + j, 0, inner)
            j += 2 * LANES
        else:
            _one_row_short(w, out + j, 0, alpha, a, 0, 1, B.at + j, B.ld, c + j, 0, inner)
            j += LANES


@jit
def sparse_product(w, out, A, start, index, B, C, size, lower):
    """out = C + A B, square; row i of A has its non-zeros in columns index[start[i]:start[i + 1]].

    With `lower`, blocks of LANES columns that lie wholly above the diagonal are left as they are.
    `out` is neither B nor C.
    """
    for i in range(size):
        a, first, stop = A.at + i * A.ld, start[i], start[i + 1]
        last = i if lower else size - 1
        end = last - last % LANES + LANES
        width = 4 * LANES if end > 3 * LANES else 2 * LANES if end > LANES else LANES
        j = 0
        while j < end:
            j = min(j, end - width)  # where the tiles do not fit, the last two overlap
            o, b, c = out.at + i * out.ld + j, B.at + j, C.at + i * C.ld + j
            if width == 4 * LANES:
                _listed_four(w, o, a, b, B.ld, c, first, stop, index)
            elif width == 2 * LANES:
                _listed_two(w, o, a, b, B.ld, c, first, stop, index)
            else:
                _listed_one(w, o, a, b, B.ld, c, first, stop, index)
            j += width


def _raw():
    """Reading and writing the double that lies i doubles after w."""

    @intrinsic
    def get(typing, w, i):
        def generate(context, builder, signature, args):
            data = builder.inttoptr(args[0], DOUBLES)
            return builder.load(builder.gep(data, [args[1]]))

        return types.float64(w, types.intp), generate

    @intrinsic
    def put(typing, w, i, x):
        def generate(context, builder, signature, args):
            data = builder.inttoptr(args[0], DOUBLES)
            builder.store(args[2], builder.gep(data, [args[1]]))
            return context.get_dummy_value()

        return types.void(w, types.intp, types.float64), generate

    return get, put


get, put = _raw()


def _rows():
    """Two rows of whole vectors, padded with zeros: their dot product, and out = c + alpha a."""

    def vectors(builder, length):
        many = builder.udiv(builder.add(length, length.type(LANES - 1)), length.type(LANES))
        return cgutils.for_range(builder, many, intp=length.type)

    @intrinsic
    def dot(typing, w, a, b, length):
        def generate(context, builder, signature, args):
            w, a, b, length = args
            data = builder.inttoptr(w, DOUBLES)
            vector = ir.VectorType(ir.DoubleType(), LANES)
            zero = ir.Constant(vector, [0.0] * LANES)
            total = cgutils.alloca_once_value(builder, zero)
            with vectors(builder, length) as loop:
                k = builder.mul(loop.index, length.type(LANES))
                x = builder.load(_vector(builder, data, builder.add(a, k)), align=8)
                y = builder.load(_vector(builder, data, builder.add(b, k)), align=8)
                builder.store(_multiply_add(builder, x, y, builder.load(total)), total)
            x, lanes = builder.load(total), LANES
            while lanes > 1:  # the upper half of the lanes onto the lower
                lanes //= 2
                mask = ir.VectorType(ir.IntType(32), lanes)
                low = builder.shuffle_vector(x, x, ir.Constant(mask, [*range(lanes)]))
                high = builder.shuffle_vector(x, x, ir.Constant(mask, [*range(lanes, 2 * lanes)]))
                x = builder.fadd(low, high)
            return builder.extract_element(x, ir.IntType(32)(0))

        return types.float64(w, *[types.intp] * 3), generate

    @intrinsic
    def axpy(typing, w, out, alpha, a, c, length):
        def generate(context, builder, signature, args):
            w, out, alpha, a, c, length = args
            data = builder.inttoptr(w, DOUBLES)
            factor = _spread(builder, alpha)
            with vectors(builder, length) as loop:
                k = builder.mul(loop.index, length.type(LANES))
                x = builder.load(_vector(builder, data, builder.add(a, k)), align=8)
                y = builder.load(_vector(builder, data, builder.add(c, k)), align=8)
                x = _multiply_add(builder, factor, x, y)
                builder.store(x, _vector(builder, data, builder.add(out, k)), align=8)
            return context.get_dummy_value()

        return types.void(w, types.intp, types.float64, *[types.intp] * 3), generate

    return dot, axpy


dot, axpy = _rows()


def _turn(mean):
    """Make the intrinsic that turns one square block of LANES rows: ``out = in'``.

    With ``mean`` the block becomes symmetric: ``out = (in + in') / 2``.
    """

    @intrinsic
    def block(typing, w, out, ldo, A, lda):
        def generate(context, builder, signature, args):
            w, out, ldo, A, lda = args
            data = builder.inttoptr(w, DOUBLES)
            vector = ir.VectorType(ir.DoubleType(), LANES)
            masks = ir.VectorType(ir.IntType(32), LANES)
            half = LANES // 2
            low = ir.Constant(masks, [x for i in range(half) for x in (i, LANES + i)])
            high = ir.Constant(masks, [x for i in range(half, LANES) for x in (i, LANES + i)])

            def row(matrix, ld, i):
                return _vector(builder, data, builder.add(matrix, builder.mul(ld, ld.type(i))))

            rows = given = [builder.load(row(A, lda, i), align=8) for i in range(LANES)]
            for _ in range(LANES.bit_length() - 1):  # log2(LANES) perfect shuffles
                pairs = list(zip(rows[:half], rows[half:], strict=True))
                rows = [builder.shuffle_vector(a, b, m) for a, b in pairs for m in (low, high)]
            if mean:
                weight = ir.Constant(vector, [0.5] * LANES)
                pairs = zip(rows, given, strict=True)
                rows = [builder.fmul(weight, builder.fadd(a, b)) for a, b in pairs]
            for i, x in enumerate(rows):
                builder.store(x, row(out, ldo, i), align=8)
            return context.get_dummy_value()

        return types.void(w, *[types.intp] * 4), generate

    return block


_turn_block, _mean_block = _turn(False), _turn(True)


@jit
def transpose(w, out, A, rows, cols):
    """out (cols, rows) = A', A (rows, cols), by whole blocks: both have room for them."""
    for i in range(0, rows, LANES):
        for j in range(0, cols, LANES):
            _turn_block(w, out.at + j * out.ld + i, out.ld, A.at + i * A.ld + j, A.ld)


@jit
def symmetrize(w, A, size):
    """A's upper blocks from the lower ones; on the diagonal the mean of a block and its transpose.

    Of a matrix that is symmetric but for rounding, nothing is read above the diagonal's blocks.
    """
    for i in range(0, size, LANES):
        for j in range(0, i, LANES):
            _turn_block(w, A.at + j * A.ld + i, A.ld, A.at + i * A.ld + j, A.ld)
        _mean_block(w, A.at + i * A.ld + i, A.ld, A.at + i * A.ld + i, A.ld)
