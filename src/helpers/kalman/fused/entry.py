"""The whole pass, and how compiled code calls it: by address, with everything checked before.

A function that calls the pass by its symbol does not carry its code: PyTensor compiles each of its
functions in a second or two, and the pass is compiled once for each machine, on its first use, and
kept on disk under a name that changes with every line of its sources.
"""

import ctypes
import traceback
from hashlib import sha256
from pathlib import Path

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.core.imputils import impl_ret_new_ref
from numba.core.typeconv import Conversion
from numba.extending import intrinsic, overload

from helpers.kalman.fused.forward import DONE, VAGUE, Steps
from helpers.kalman.fused.inputs import (
    Arrays,
    Observed,
    Wanted,
    indices_in,
    look,
    look_at,
    room_for_indices,
    varies,
)
from helpers.kalman.fused.layout import (
    HEADER,
    Saved,
    Sizes,
    begin,
    blocks,
    distance,
    integers,
    lay_out,
)
from helpers.kalman.fused.one_pass import all_equal, one_pass
from helpers.kalman.fused.tiles import LANES, PART, jitable
from helpers.kalman.on_disk import cfunc, njit
from helpers.kalman.square_root import fill_shares


def source_digest(folder: Path = Path(__file__).parent) -> str:
    """A digest of all that is compiled here, which names what is kept of it on disk."""
    other = "__init__.py", "building.py"  # nothing in them is compiled
    files = sorted(path for path in folder.glob("*.py") if path.name not in other)
    files += [folder.parent / name for name in ("recursions.py", "square_root.py", "tangents.py")]
    text = b"".join(path.name.encode() + path.read_bytes() for path in files)
    return sha256(text).hexdigest()[:16]


DIGEST = source_digest()  # of the sources as they were imported


def kept_on_disk(compile):
    """Numba looks at no file but a function's own to see whether its machine code is still good.

    So the name under which it is kept is made to change with all of them.
    """

    def decorate(function):
        function.__qualname__ += f"_{DIGEST}"
        return compile(function)

    return decorate


# Beside how a pass ended: H does not allow to rotate the series into fewer.
NOT_ROTATED = 4

# What a pass is for: the value alone; the gradient; the value, and the gains for a sweep.
VALUE, GRADIENT, GAINS = 0, 1, 2
REALS, INTEGERS = types.CPointer(types.float64), types.CPointer(types.int64)
PASS = types.int64(
    types.intp, INTEGERS, types.CPointer(types.uint8), INTEGERS, INTEGERS, INTEGERS,
    types.float64, *[REALS] * 20,
)  # fmt: skip


def compiled_once(function, signature, symbol):
    """A function of addresses as machine code, and what calls it by its own address."""
    code = kept_on_disk(cfunc(signature, error_model="numpy"))(function)
    llvmlite.binding.add_symbol(symbol, code.address)
    return types.ExternalFunction(symbol, signature)


# Numbers (k axes) that are only read, however they lie.
READ = [types.Array(types.float64, k, "A", readonly=True) for k in range(5)]
# Arrays of a model, or its gradient, as compiled code makes them.
ARRAYS = types.NamedTuple(
    (types.float64[::1], *[types.float64[:, ::1]] * 3, *[types.float64[:, :, ::1]] * 4), Arrays
)


def linked(function, arguments):
    """What calls a compiled function for arguments of these types, or what Numba makes of others.

    By an address, as `compiled_once` has it, but with errors raised and arrays returned: compiled
    code that calls the function itself carries its code, and is long in compiling it once more.
    """
    function.compile(arguments)  # or load it from disk
    made = function.overloads[arguments]
    returned = made.signature.return_type
    # With all that is compiled in it, and for which types.
    types_of_it = sha256(str(arguments).encode()).hexdigest()[:8]
    symbol = f"{function.__module__}.{function.__qualname__}.{types_of_it}"
    at = made.library.get_pointer_to_function(made.fndesc.llvm_func_name)
    if not at:
        raise RuntimeError(f"{symbol} was compiled, but has no address")
    llvmlite.binding.add_symbol(symbol, at)

    @intrinsic
    def call(typing, given):
        casts = {typing.can_convert(*pair) for pair in zip(given, arguments, strict=False)}
        if len(given) != len(arguments) or casts & {None, Conversion.unsafe}:
            raise TypingError(f"{function.__name__} takes {arguments}, not {given}")

        def generate(context, builder, signature, args):
            values = [
                context.cast(builder, value, kind, wanted)
                for value, kind, wanted in zip(
                    cgutils.unpack_tuple(builder, args[0]), given, arguments, strict=True
                )
            ]
            kind = context.call_conv.get_function_type(returned, arguments)
            code = cgutils.get_or_insert_function(builder.module, kind, symbol)
            status, result = context.call_conv.call_function(
                builder, code, returned, arguments, values
            )
            with cgutils.if_unlikely(builder, status.is_error):
                context.call_conv.return_status_propagate(builder, status)
            return impl_ret_new_ref(context, builder, returned, result)

        return returned(given), generate

    return call


@jitable
def bundle(sizes, a0, P0, c, d, T, Z, H, W):
    """Arrays by their addresses and ``sizes``: n, p, m and the lengths over time of c ... W."""
    p, m = sizes[1], sizes[2]
    return Arrays(
        carray(a0, m), carray(P0, (m, m)), carray(c, (sizes[3], m)), carray(d, (sizes[4], p)),
        carray(T, (sizes[5], m, m)), carray(Z, (sizes[6], p, m)), carray(H, (sizes[7], p, p)),
        carray(W, (sizes[8], m, m)),
    )  # fmt: skip


@jitable
def numbers_of(n, p, model, purpose, wanted, watch):
    """The ``sizes`` of `whole_pass`, which compiled code hands on by their address."""
    q = len(wanted.columns)
    numbers = np.empty(16 + q, np.int64)
    first = (
        n, p, len(model.a0), len(model.c), len(model.d), len(model.T), len(model.Z), len(model.H),
        len(model.W), purpose, int(wanted.matrices), int(wanted.T), int(wanted.Z), int(wanted.W),
        int(watch), q,
    )  # fmt: skip
    for k in range(len(first)):
        numbers[k] = first[k]
    for k in range(q):
        numbers[16 + k] = wanted.columns[k]
    return numbers


@jitable
def numbers_at(sizes):
    """`numbers_of` by their address."""
    return carray(sizes, 16 + carray(sizes, 16)[15])


@jitable
def wanted_of(numbers):
    """`Wanted` of `numbers_of`."""
    return Wanted(
        numbers[10] != 0, numbers[11] != 0, numbers[12] != 0, numbers[13] != 0, numbers[16:]
    )


@jitable
def saved_of(numbers):
    """`Saved` of `numbers_of`."""
    gradient = numbers[9] == GRADIENT and numbers[11] + numbers[12] > 0
    return Saved(numbers[9] != VALUE, numbers[15] if gradient else 0)


@jitable
def whole_pass(
    w, header, entries, indices, sizes, report, tol, l, l_bar, y, y_bar, a0, P0, c, d, T, Z, H, W,
    a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar,
):  # fmt: skip
    """`one_pass` with arrays by their addresses, in memory that is laid out, ``header`` its plan.

    ``sizes`` are n, p, m, the lengths over time of c, d, T, Z, H, W, then VALUE, GRADIENT or GAINS,
    the four of `Wanted` and whether to watch for a vague P0, 0 or 1, then how many columns are
    wanted, and which. ``report`` receives the step at which the pass ended, the number of steps in
    roots, and the first step of the first steady state (n if there is none). Returns how it ended;
    0 if it could not finish.
    """
    num = numbers_at(sizes)
    n, p, m, wanted, saved = num[0], num[1], num[2], wanted_of(num), saved_of(num)
    model = bundle(num, a0, P0, c, d, T, Z, H, W)
    out = bundle(num, a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar)
    found = indices_in(carray(indices, room_for_indices(n, p, m)), n, p, m)
    ys, weights, steps = carray(y, (n, p)), carray(l_bar, n), Steps(carray(l, n), found.steady_from)
    observed, pattern = look(ys, model, carray(entries, (n, p)), found)
    varying, equal = varies(model), num[9] != GRADIENT or all_equal(weights)
    how, t = one_pass(
        w, ys, model, saved, num[9] == GRADIENT, varying, pattern, wanted, weights, equal,
        tol if equal else 0.0, observed, num[14] != 0, steps, carray(y_bar, (n, p)), out,
    )  # fmt: skip
    told = carray(report, 3)
    told[0], told[1], told[2] = t, 0, n
    if how == DONE:
        for k in range(n - 1, -1, -1):
            if steps.steady_from[k] >= 0:
                told[2] = steps.steady_from[k]
    return how


compiled_once(whole_pass, PASS, "helpers_kalman_pass")


# Up to so many states and series a pass in registers takes less time, compiled for its size alone.
LARGEST = 4
SMALL = types.int64(*[INTEGERS] * 4, types.float64, types.float64, *[types.intp] * 22)
SMALL_TANGENTS = types.int64(*SMALL.args, *[types.intp] * 12)
COLLAPSED = types.int64(INTEGERS, INTEGERS, types.float64, *[REALS] * 20)
# Passes by their addresses, 0 for those that were not needed yet: at (m, p) those in registers, at
# (m, TANGENTS + p) those of their tangents; at (0, WHOLE) the one for any size, at (0, ROOTS) the
# one with its first steps in roots, at (0, COLLAPSE) the one that rotates series into fewer. At
# (1, 0): whether the compilation of one of those in row 0 has failed.
ROOTS, WHOLE, COLLAPSE, TANGENTS = 0, 1, 2, LARGEST
_KEPT = "helpers_kalman_passes"
_addresses = np.zeros((LARGEST + 1, TANGENTS + LARGEST + 1), np.int64)
_addresses[0, WHOLE] = llvmlite.binding.address_of_symbol("helpers_kalman_pass")
llvmlite.binding.add_symbol(_KEPT, _addresses.ctypes.data)


def compile_later(m, p, tangents=False, announce=None):
    """Compile a pass of `_addresses`, or load it from disk, if need be; none for more states."""
    from helpers.kalman.fused.building import load

    place = m, p + TANGENTS * tangents
    if max(m, p) > LARGEST or _addresses[place]:
        return
    if m:
        _addresses[place] = load("small").address(m, p, tangents, announce)
    else:
        _addresses[place] = load("collapsed" if p == COLLAPSE else "roots").ADDRESS


def _compiled_or_zero(m, p):
    """The same for compiled code, to which ctypes returns anything if Python raises."""
    try:
        tangents = p > LARGEST
        compile_later(m, p - TANGENTS * tangents, tangents)
        return _addresses[m, p]
    except BaseException:  # an interrupt as well
        traceback.print_exc()
        _addresses[1, 0] |= m == 0
        return 0


_python_compile_later = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(
    _compiled_or_zero
)
_address = ctypes.cast(_python_compile_later, ctypes.c_void_p).value
llvmlite.binding.add_symbol("helpers_kalman_compile_later", _address)
_call_compile_later = types.ExternalFunction(
    "helpers_kalman_compile_later", types.int64(types.int64, types.int64)
)


@intrinsic
def _kept_address(typing, m, p):
    """The entry of `_addresses`."""

    def generate(context, builder, signature, args):
        rows, columns = _addresses.shape
        table = builder.module.globals.get(_KEPT) or ir.GlobalVariable(
            builder.module, ir.ArrayType(ir.ArrayType(ir.IntType(64), columns), rows), _KEPT
        )
        return builder.load(builder.gep(table, [ir.IntType(64)(0), *args]))

    return types.int64(types.int64, types.int64), generate


@jitable
def address_of(m, p):
    """The entry of `_addresses`, compiled if it was not before; 0 if that failed."""
    address = _kept_address(m, p)
    return address if address != 0 else _call_compile_later(m, p)


@jitable
def is_not_compiled():
    """Whether a pass in row 0 was asked for and could not be compiled."""
    return _kept_address(1, 0) != 0


@intrinsic
def call_at(typing, address, arguments):
    """Call the function at an address, with numbers and addresses; it returns an int64."""

    def generate(context, builder, signature, args):
        values = cgutils.unpack_tuple(builder, args[1])
        kind = ir.FunctionType(ir.IntType(64), [value.type for value in values])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)

    return types.int64(types.int64, arguments), generate


@jitable
def small_pass_for(sizes, l_bar):
    """The address of the pass for this size, `sizes` as in `whole_pass`; 0 for the big one.

    It alone takes weights that differ, and leaves gains for a sweep.
    """
    p, m = sizes[1], sizes[2]
    if m > LARGEST or p > LARGEST or sizes[9] == GAINS:
        return np.int64(0)
    if sizes[9] == GRADIENT and not all_equal(l_bar):
        return np.int64(0)
    return address_of(m, p)


# So many steps pass before a covariance is steady, after the start and after each change of gaps.
STEADY_AFTER = 50


@jitable
def collapses(y, m, never_steady, times):
    """Whether rotating the series of each step into m saves so many times what it takes.

    By nanoseconds, of which an operation of large products takes less than one. (With m + 1 series
    never: as many they are rotated into where one is to be read off.)
    """
    n, p = y.shape
    if p <= max(m + 1, LARGEST):
        return False
    changes = n if never_steady else 1
    for t in range(1, n):
        for i in range(p):
            if np.isnan(y[t, i]) != np.isnan(y[t - 1, i]):
                changes += 1
                break
    now = min(n, STEADY_AFTER * changes) * p * (p * p // 3 + 4 * p * m) + n * p * (p + 4 * m) // 2
    return now > times * n * (1000 + 5 * p * m + p * p // 5)


@jitable
def addresses(arrays):
    """Those of the model's arrays, or its gradient's."""
    return (
        arrays.a0.ctypes.data, arrays.P0.ctypes.data, arrays.c.ctypes.data, arrays.d.ctypes.data,
        arrays.T.ctypes.data, arrays.Z.ctypes.data, arrays.H.ctypes.data, arrays.W.ctypes.data,
    )  # fmt: skip


@jitable
def run_at(address, room, sizes, report, tol, l, l_bar, y, y_bar, model, out):
    """Call a pass of `_addresses` on arrays: ``room`` are its first arguments."""
    numbers = sizes.ctypes.data, report.ctypes.data, np.float64(tol)
    steps = l.ctypes.data, l_bar.ctypes.data, y.ctypes.data, y_bar.ctypes.data
    return call_at(address, room + numbers + steps + addresses(model) + addresses(out))


@jitable
def run(address, room, sizes, report, tol, l, l_bar, y, y_bar, model, out):
    """`run_at` for `whole_pass` and its like; ``room`` is its w, header, entries and indices.

    It takes the arrays: compiled code frees an array of its own after the last line that names it,
    though its address may be in use.
    """
    where = room[0], room[1].ctypes.data, room[2].ctypes.data, room[3].ctypes.data
    return run_at(address, where, sizes, report, tol, l, l_bar, y, y_bar, model, out)


@jitable
def sizes_of_kept(m, p):
    """Doubles that a pass in registers keeps of a step: of means, and of gains."""
    return p + m, p * p + 2 * p * m + m * m


@jitable
def run_small(address, sizes, report, tol, l, l_bar, y, y_bar, model, out, more):
    """Call a pass in registers, in memory of its own.

    ``more`` is (), or what the tangents' takes beside that: the address of y's direction, those of
    the model's, and that of W's gradient.
    """
    n, p, m = sizes[0], sizes[1], sizes[2]
    back, times = sizes[9] == GRADIENT, 1 if len(more) == 0 else 2
    of_mean, of_gain = sizes_of_kept(m, p)
    memory, gains = blocks(
        n * (2 + times * of_mean if back else 2), n * times * of_gain if back else 1
    )
    indices = integers(memory)[: 2 * n]
    look_at(y, Observed(np.empty((n, p), np.uint8), indices[:n]))
    shares = np.zeros(m)
    if sizes[14] != 0:
        fill_shares(model.P0, model.T, model.W, shares)
    mean, gain = memory.ctypes.data + 16 * n, gains.ctypes.data
    how = call_at(
        address,
        (sizes.ctypes.data, report.ctypes.data, memory.ctypes.data, memory.ctypes.data + 8 * n,
         np.float64(tol), np.float64(l_bar[0] if back else 1.0), shares.ctypes.data, l.ctypes.data,
         y.ctypes.data, y_bar.ctypes.data, mean, gain)
        + addresses(model) + addresses(out)
        + with_tangents(more, mean + 8 * n * of_mean, gain + 8 * n * of_gain),
    )  # fmt: skip
    shares[0], memory[0], gains[0] = 0.0, 0.0, 0.0  # their addresses were good until here
    return how


def with_tangents(more, mean, gain):
    """What the tangents' pass takes beside the other: also where it keeps its own."""
    return (more[0], mean, gain, *more[1:]) if more else ()


@overload(with_tangents, jit_options=PART)
def _with_tangents(more, mean, gain):
    if len(more) == 0:
        return lambda more, mean, gain: ()
    return lambda more, mean, gain: (more[0], mean, gain) + more[1:]  # noqa: RUF005


NOT_COMPILED = "a pass was not compiled; why not, a message above says"
OUT_OF_MEMORY = "the Kalman filter ran out of memory; it needs about n (m + p) (m + 3 p) doubles"


def contiguous(x):
    """A copy as a contiguous float64 array, whatever the layout and type of x."""
    return np.array(x, np.float64)


@overload(contiguous, jit_options=PART)
def _contiguous(x):
    if x.dtype == types.float64:
        return lambda x: x.copy()

    def copied(x):
        out = np.empty(x.shape)
        # Not `out[...] = x`: the error for shapes that differ takes Numba a second to compile.
        for i, value in np.ndenumerate(x):
            out[i] = value
        return out

    return copied


def doubles(x):
    """An array as it is if it is of float64, else a copy that is."""
    return np.asarray(x, np.float64)


@overload(doubles, jit_options=PART)
def _doubles(x):
    return (lambda x: x) if x.dtype == types.float64 else (lambda x: contiguous(x))


@jitable
def copied(a0, P0, c, d, T, Z, H, W):
    """The model's arrays, contiguous."""
    return Arrays(
        contiguous(a0), contiguous(P0), contiguous(c), contiguous(d), contiguous(T), contiguous(Z),
        contiguous(H), contiguous(W),
    )  # fmt: skip


@jitable
def zeros_like(model):
    """A gradient of zeros."""
    return Arrays(
        np.zeros(model.a0.shape), np.zeros(model.P0.shape), np.zeros(model.c.shape),
        np.zeros(model.d.shape), np.zeros(model.T.shape), np.zeros(model.Z.shape),
        np.zeros(model.H.shape), np.zeros(model.W.shape),
    )  # fmt: skip


@jitable
def check(y, model, l_bar):
    """Raise where the sizes do not fit: a pass would read what is not there."""
    n, p = y.shape
    m = len(model.a0)
    if n == 0 or p == 0 or m == 0:
        raise ValueError("y or a0 is empty")
    for X in (model.c, model.d):
        if X.shape[0] != 1 and X.shape[0] != n:
            raise ValueError("c or d varies over time, but not over as many steps as y has")
    for X in (model.T, model.Z, model.H, model.W):
        if X.shape[0] != 1 and X.shape[0] != n:
            raise ValueError("T, Z, H or R Q R' varies over time, but not over as many steps as y")
    if model.P0.shape != (m, m):
        raise ValueError("P0 does not have shape (m, m), with m the length of a0")
    if model.c.shape[1] != m:
        raise ValueError("c does not have length m, the length of a0")
    if model.d.shape[1] != p:
        raise ValueError("d does not have length p, the number of columns of y")
    if model.T.shape[1:] != (m, m):
        raise ValueError("T does not have shape (m, m), with m the length of a0")
    if model.Z.shape[1:] != (p, m):
        raise ValueError("Z does not have shape (p, m): columns of y, length of a0")
    if model.H.shape[1:] != (p, p):
        raise ValueError("H does not have shape (p, p), with p the number of columns of y")
    if model.W.shape[1:] != (m, m):
        raise ValueError("R Q R' does not have shape (m, m), with m the length of a0")
    if len(l_bar) != n:
        raise ValueError("l_bar does not have length n, the number of rows of y")


@jitable
def call(y, model, out, l, l_bar, y_bar, backwards, wanted, tol, report):
    """Run the pass on checked, contiguous arrays. Returns how it ended."""
    n, p = y.shape
    m = len(model.a0)
    sizes = numbers_of(n, p, model, GRADIENT if backwards else VALUE, wanted, True)
    how = NOT_ROTATED
    if collapses(y, m, tol == 0.0 or varies(model), 1):
        address = address_of(0, COLLAPSE)
        if address == 0:
            raise RuntimeError(NOT_COMPILED)
        how = run_at(address, (), sizes, report, tol, l, l_bar, y, y_bar, model, out)
        if how == 0:
            raise MemoryError(OUT_OF_MEMORY)
        if how != NOT_ROTATED:
            return how
    small, how = small_pass_for(sizes, l_bar), VAGUE
    if small != 0:
        how = run_small(small, sizes, report, tol, l, l_bar, y, y_bar, model, out, ())
        if how == 0:
            raise MemoryError(OUT_OF_MEMORY)
        if how != VAGUE:
            return how
    saved = saved_of(sizes)
    plan, shape = np.empty(HEADER, np.int64), Sizes(n, p, m)
    near, far = lay_out(shape, saved, plan, 0)
    memory, gains = blocks(near + LANES, far + LANES)
    lay_out(shape, saved, plan, distance(memory, gains))
    start = begin(memory, plan)
    w, header = memory.ctypes.data + 8 * start, integers(memory)[start:]
    entries = np.empty((n, p), np.uint8)
    indices = np.empty(room_for_indices(n, p, m), np.int64)
    room = w, header, entries, indices
    if small == 0:
        how = run(address_of(0, WHOLE), room, sizes, report, tol, l, l_bar, y, y_bar, model, out)
    if how == VAGUE:
        from_roots = address_of(0, ROOTS)
        if from_roots == 0:
            raise RuntimeError(NOT_COMPILED)
        how = run(from_roots, room, sizes, report, tol, l, l_bar, y, y_bar, model, out)
    memory[0], gains[0] = 0.0, 0.0  # the address w, and those it tells of, were good until here
    if how == 0:
        raise MemoryError(OUT_OF_MEMORY)
    return how


@kept_on_disk(njit(error_model="numpy", nogil=True))
def loglike(y, a0, P0, c, d, T, Z, H, W, tol):
    """The log-likelihood of each step, (n,); NaN throughout where some F is not positive definite.

    y (n, p) with NaN for what is missing; c (k, m), d (k, p), T (k, m, m), Z (k, p, m),
    H (k, p, p), W = R Q R' (k, m, m) with k = 1 or n. Arrays of any real type and any layout;
    ValueError if their shapes do not fit. `tol` bounds, by estimate, what a covariance in a steady
    state misses: max |P - P*|_ij / sqrt(P_ii P_jj); 0 for none. MemoryError if there is not enough.
    """
    y = contiguous(y)
    model = copied(a0, P0, c, d, T, Z, H, W)
    l, report = np.empty(len(y)), np.empty(3, np.int64)
    check(y, model, l)
    wanted = Wanted(False, False, False, False, np.empty(0, np.int64))
    if call(y, model, model, l, l, y, False, wanted, tol, report) != DONE:
        l[:] = np.nan
    return l


@jitable
def evaluate(y, model, l_bar, wanted, tol):
    """What `loglike_and_grad` returns, for arrays as they were given."""
    y, l_bar = contiguous(y), contiguous(l_bar)
    check(y, model, l_bar)
    l, y_bar, report = np.empty(len(y)), np.zeros(y.shape), np.empty(3, np.int64)
    out = zeros_like(model)
    if call(y, model, out, l, l_bar, y_bar, True, wanted, tol, report) != DONE:
        l[:], y_bar[:] = np.nan, np.nan
        out.a0[:], out.P0[:], out.c[:], out.d[:] = np.nan, np.nan, np.nan, np.nan
        out.T[:], out.Z[:], out.H[:], out.W[:] = np.nan, np.nan, np.nan, np.nan
    bars = out.a0, out.P0, out.c, out.d, out.T, out.Z, out.H, out.W
    return l, bars, y_bar, (report[0], report[1], report[2])


@kept_on_disk(njit(error_model="numpy", nogil=True))
def loglike_and_grad(
    y, a0, P0, c, d, T, Z, H, W, l_bar, want_matrices, want_T, want_Z, want_W, tol
):  # fmt: skip
    """`loglike`, the gradient of its sum weighted with l_bar (n,), that of y, and a report.

    The gradient is an array for each of the model's, in the order of `Arrays` and of the same
    shape, symmetric for P0, H and W: a tuple, as Python is handed one sooner than a named one. The
    flags say what is wanted: any of P0, T, Z, H, W (`want_matrices`), T, Z, W; the others come
    back as zeros. The report holds the step at which the pass ended (n, or the step whose F is
    not positive definite, in which case all is NaN), the number of steps in square-root
    coordinates, and the first step of the first steady state, n if there is none.
    """
    wanted = Wanted(want_matrices, want_T, want_Z, want_W, np.arange(len(a0)))
    return evaluate(y, copied(a0, P0, c, d, T, Z, H, W), l_bar, wanted, tol)


@kept_on_disk(njit(error_model="numpy", nogil=True))
def gradient_in_columns(y, a0, P0, c, d, T, Z, H, W, l_bar, columns, tol):
    """`loglike_and_grad` with all that is wanted, but of T and Z in some columns (ascending) alone.

    What stands in the others is no gradient. With few of them a step takes m^2 operations, not m^3,
    where T has few entries that are not zero.
    """
    few = len(columns) > 0
    wanted = Wanted(True, few, few, True, columns)
    return evaluate(y, copied(a0, P0, c, d, T, Z, H, W), l_bar, wanted, tol)


# What y, a0, P0, c, d, T, Z, H and W are to the two functions above.
MODEL = READ[2], READ[1], READ[2], READ[2], READ[2], *[READ[3]] * 4
linked_loglike = linked(loglike, (*MODEL, types.float64))
linked_loglike_and_grad = linked(
    loglike_and_grad, (*MODEL, READ[1], *[types.boolean] * 4, types.float64)
)
