"""What a :class:`~helpers.kalman.linear.LinearMap` adds up, as machine code that is made once.

Numba compiles a function for each combination of its arguments' ranks and layouts, and a model has
dozens of maps. So the loop takes arrays by their addresses, lengths and strides, and what is left
to compile for a map is a call for each of its inputs.
"""

from hashlib import sha256
from pathlib import Path

import llvmlite.binding
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from helpers.kalman.on_disk import cfunc

# Maps that are kept on disk call this version of the loop, or are compiled anew.
SYMBOL = f"{__name__}.{sha256(Path(__file__).read_bytes()).hexdigest()[:16]}"
REALS, INTEGERS = types.CPointer(types.float64), types.CPointer(types.int64)
TERMS = types.int64(
    REALS, INTEGERS, REALS, types.int64, REALS, INTEGERS, INTEGERS, types.int64, types.int64
)
CONSTANT = -1  # in the place of x's number of dimensions: there is no x


def _terms(y, where, values, count, x, lengths, strides, ndim, size):
    """y[where[0, i]] += values[i] x[where[1, i]] for i < count, entries numbered row by row.

    With CONSTANT for ndim, y[where[i]] += values[i]. Returns 1, and adds nothing, if x does not
    have `size` entries, else 0.
    """
    if ndim == CONSTANT:
        at = carray(where, count)
        for i in range(count):
            y[at[i]] += values[i]
        return 0
    entries, contiguous = 1, True
    for k in range(ndim - 1, -1, -1):
        contiguous = contiguous and (strides[k] == 8 * entries or lengths[k] == 1)
        entries *= lengths[k]
    if entries != size:
        return 1
    pairs = carray(where, (2, count))
    for i in range(count):
        number = pairs[1, i]
        at = number if contiguous else 0
        for k in range(-1 if contiguous else ndim - 1, -1, -1):
            at += number % lengths[k] * (strides[k] // 8)
            number //= lengths[k]
        y[pairs[0, i]] += values[i] * x[at]
    return 0


code = cfunc(TERMS, error_model="numpy")(_terms)
llvmlite.binding.add_symbol(SYMBOL, code.address)


@intrinsic
def add_terms(typing, y, lengths, at, b, terms):
    """Add b and the terms of each x to y; whether one of the x is not as large as `lengths` says.

    The arguments are as those of a `LinearMap`, y as contiguous as they, and `terms` a tuple.
    """
    given = y, lengths, at, b, *(X for i, X in enumerate(terms) if i % 3 < 2)
    if any(X.layout != "C" for X in given):
        raise TypingError("the constants of a linear map are not contiguous")

    def generate(context, builder, signature, args):
        number, pointer = ir.IntType(64), ir.IntType(64).as_pointer()
        reals = ir.DoubleType().as_pointer()
        kind = ir.FunctionType(
            number, [reals, pointer, reals, number, reals, pointer, pointer, number, number]
        )
        function = cgutils.get_or_insert_function(builder.module, kind, SYMBOL)

        def array(kind, value):
            return context.make_array(kind)(context, builder, value)

        def on_stack(values):
            return builder.bitcast(cgutils.alloca_once_value(builder, values), pointer)

        y, lengths, at, b = map(array, signature.args[:4], args[:4])
        nothing = reals(None), pointer(None), pointer(None), number(CONSTANT), number(0)
        builder.call(function, [y.data, at.data, b.data, b.nitems, *nothing])
        kinds = signature.args[4].types
        rest = list(map(array, kinds, cgutils.unpack_tuple(builder, args[4])))
        failed = number(0)
        for i in range(0, len(rest), 3):
            where, values, x = rest[i : i + 3]
            ndim = kinds[i + 2].ndim
            size = builder.gep(lengths.data, [number(signature.args[0].ndim + i // 3)])
            told = builder.call(
                function,
                [y.data, where.data, values.data, values.nitems, x.data, on_stack(x.shape),
                 on_stack(x.strides), number(ndim), builder.load(size)],
            )  # fmt: skip
            failed = builder.or_(failed, told)
        return builder.icmp_signed("!=", failed, number(0))

    return types.boolean(y, lengths, at, b, terms), generate
