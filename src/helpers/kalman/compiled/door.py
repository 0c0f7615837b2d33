"""The whole pass, and how compiled code calls it: by a symbol, with everything checked before.

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
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.core.imputils import impl_ret_new_ref
from numba.core.typeconv import Conversion
from numba.extending import intrinsic, overload

from helpers.kalman.compiled.collapse import PATTERNS, ROTATED
from helpers.kalman.compiled.forward import DONE, VAGUE
from helpers.kalman.compiled.inputs import (
    Arrays,
    Asked,
    Observed,
    Room,
    Wanted,
    fill,
    for_each,
    look_at,
    room_for_indices,
    varies,
)
from helpers.kalman.compiled.layout import (
    HEADER,
    Saved,
    Sizes,
    begin,
    blocks,
    distance,
    integers,
    lay_out,
)
from helpers.kalman.compiled.one_pass import all_equal
from helpers.kalman.compiled.tiles import LANES, PART, jitable
from helpers.kalman.on_disk import njit
from helpers.kalman.square_root import fill_shares


def source_digest(folder: Path = Path(__file__).parent) -> str:
    """A digest of all that is compiled here, which names what is kept of it on disk."""
    other = "__init__.py", "building.py", "show.py"  # nothing in them is compiled
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


# What Python calls, and what compiled code alone calls: by a symbol, or at an address.
compiled = kept_on_disk(njit(error_model="numpy", nogil=True))
compiled_part = kept_on_disk(njit(error_model="numpy", nogil=True, no_cpython_wrapper=True))


# Beside how a pass ended: H does not allow to rotate the series into fewer.
NOT_ROTATED = 4

# What a pass is for: the value alone; the gradient; the value, and the gains for a sweep.
VALUE, GRADIENT, GAINS = 0, 1, 2
# Numbers (k axes) that are only read, however they lie.
READ = [types.Array(types.float64, k, "A", readonly=True) for k in range(5)]
# Arrays of a model, or its gradient, as compiled code makes them.
ARRAYS = types.NamedTuple(
    (types.float64[::1], *[types.float64[:, ::1]] * 3, *[types.float64[:, :, ::1]] * 4), Arrays
)


def address_in(function, arguments) -> int:
    """Where the machine code of a function begins, for arguments of these types."""
    function.compile(arguments)  # or load it from disk
    made = function.overloads[arguments]
    at = made.library.get_pointer_to_function(made.fndesc.llvm_func_name)
    if not at:
        raise RuntimeError(f"{function.__qualname__} was compiled, but has no address")
    return at


def _calling(typing, name, given, returned, arguments, find):
    """What an intrinsic answers that calls compiled code, with arguments that come as a tuple.

    ``find`` gives the code, as LLVM has it. Errors are raised, and arrays returned.
    """
    casts = {typing.can_convert(*pair) for pair in zip(given, arguments, strict=False)}
    if len(given) != len(arguments) or casts & {None, Conversion.unsafe}:
        raise TypingError(f"{name} takes {arguments}, not {given}")

    def generate(context, builder, signature, args):
        values = [
            context.cast(builder, value, kind, wanted)
            for value, kind, wanted in zip(
                cgutils.unpack_tuple(builder, args[-1]), given, arguments, strict=True
            )
        ]
        code = find(builder, context.call_conv.get_function_type(returned, arguments), args)
        status, result = context.call_conv.call_function(builder, code, returned, arguments, values)
        with cgutils.if_unlikely(builder, status.is_error):
            context.call_conv.return_status_propagate(builder, status)
        return impl_ret_new_ref(context, builder, returned, result)

    return generate


def linked(function, arguments):
    """What calls a compiled function for arguments of these types, or what Numba makes of others.

    By a symbol: compiled code that calls the function itself carries its code, and is long in
    compiling it once more. Nor is it compiled for other types: Python takes the same machine code.
    """
    at, returned = address_in(function, arguments), function.overloads[arguments].signature
    function.disable_compile()
    # With all that is compiled in it, and for which types.
    types_of_it = sha256(str(arguments).encode()).hexdigest()[:8]
    symbol = f"{function.__module__}.{function.__qualname__}.{types_of_it}"
    llvmlite.binding.add_symbol(symbol, at)

    @intrinsic
    def call(typing, given):
        def find(builder, kind, args):
            return cgutils.get_or_insert_function(builder.module, kind, symbol)

        kind = returned.return_type
        return kind(given), _calling(typing, function.__name__, given, kind, arguments, find)

    return call


def called_at(name, returned, arguments):
    """The same for a function that is compiled when it is first needed: it is called at an address.

    The address is the first argument.
    """

    @intrinsic
    def call(typing, address, given):
        def find(builder, kind, args):
            return builder.inttoptr(args[0], kind.as_pointer())

        return returned(address, given), _calling(typing, name, given, returned, arguments, find)

    return call


@jitable
def asked_for(purpose, wanted, watch):
    """`Asked`."""
    return Asked(np.int64(purpose), wanted, bool(watch))


@jitable
def saved_of(asked):
    """`Saved` for a pass."""
    filtered = asked.purpose == GRADIENT and (asked.wanted.T or asked.wanted.Z)
    return Saved(asked.purpose != VALUE, len(asked.wanted.columns) if filtered else 0)


# What every pass takes: y, the model, its gradient, l, l_bar, y_bar, `Asked`, tol and a report. The
# report receives the step at which the pass ended, the number of steps in roots, and the first step
# of the first steady state (n if there is none). It returns how it ended.
WANTED = types.NamedTuple((*[types.boolean] * 4, types.int64[::1]), Wanted)
PASS = (
    types.float64[:, ::1], ARRAYS, ARRAYS, types.float64[::1], types.float64[::1],
    types.float64[:, ::1], types.NamedTuple((types.int64, WANTED, types.boolean), Asked),
    types.float64, types.int64[::1],
)  # fmt: skip
ROOM = types.NamedTuple((types.intp, types.int64[::1], types.uint8[:, ::1], types.int64[::1]), Room)


# Up to so many states and series a pass in registers takes less time, compiled for its size alone.
# Beside what a pass takes: the shares of `fill_shares`, where what it keeps of means and of gains
# lies, the step whose gain each step has, and until when the gaps stay; that of tangents also the
# directions of y and the model, W's gradient, and where it keeps the tangents.
LARGEST = 4
SMALL = (*PASS, types.float64[::1], types.intp, types.intp, types.int64[::1], types.int64[::1])
SMALL_TANGENTS = (
    *SMALL, types.float64[:, ::1], ARRAYS, types.float64[:, :, ::1], types.intp, types.intp
)  # fmt: skip
call_small = called_at("a pass in registers", types.int64, SMALL)
call_small_tangents = called_at("a pass of tangents in registers", types.int64, SMALL_TANGENTS)
call_whole = called_at("the pass of any size", types.int64, (ROOM, *PASS))
call_roots = called_at("the pass with a start in roots", types.int64, (ROOM, *PASS))
call_collapsed = called_at("the pass of rotated series", types.int64, PASS)
# Rotating alone, and the way back: what they take, and what the first returns.
MATRIX = types.float64[:, ::1]
TO_ROTATE = (
    MATRIX, types.uint8[:, ::1], PATTERNS, ARRAYS, types.float64[::1], *[types.boolean] * 3
)  # fmt: skip
ROTATION_GIVES = types.Tuple((types.boolean, ROTATED, MATRIX, ARRAYS, types.boolean))
TO_LEAD_BACK = (
    ROTATED, PATTERNS, types.float64[::1], WANTED, types.boolean, MATRIX, MATRIX, ARRAYS, ARRAYS,
    types.boolean,
)  # fmt: skip
call_rotation = called_at("the rotation of series", ROTATION_GIVES, TO_ROTATE)
call_way_back = called_at("the gradient of rotated series", types.int64, TO_LEAD_BACK)
# Passes by their addresses, 0 for those that were not needed yet: at (m, p) those in registers, at
# (m, TANGENTS + p) those of their tangents; at (0, WHOLE) the one for any size, at (0, ROOTS) the
# one with its first steps in roots, at (0, COLLAPSE) the one that rotates series into fewer, at
# (0, ROTATION) and (0, WAY_BACK) its two parts, at (0, TURNED) the tangents of such. At FAILED:
# whether the compilation of one of those in row 0 has.
ROOTS, COLLAPSE, TURNED, WHOLE, ROTATION, WAY_BACK, TANGENTS = 0, 1, 2, 3, 4, 5, LARGEST
FAILED = 1, 0
MODULES = {
    ROOTS: "roots", WHOLE: "whole", TURNED: "rotated_tangents",
    COLLAPSE: "collapsed", ROTATION: "collapsed", WAY_BACK: "collapsed",
}  # fmt: skip
_KEPT = "helpers_kalman_passes"
_addresses = np.zeros((LARGEST + 1, TANGENTS + LARGEST + 1), np.int64)
llvmlite.binding.add_symbol(_KEPT, _addresses.ctypes.data)


def compile_later(m, p, tangents=False, announce=None):
    """Compile a pass of `_addresses`, or load it from disk, if need be; none for more states."""
    from helpers.kalman.compiled.building import load

    place = m, p + TANGENTS * tangents
    if (m and max(m, p) > LARGEST) or _addresses[place]:
        return
    if m:
        _addresses[place] = load("small").address(m, p, tangents, announce)
    else:
        for k, at in load(MODULES[p]).ADDRESSES.items():
            _addresses[0, k] = at


def _compiled_or_zero(m, p):
    """The same for compiled code, to which ctypes returns anything if Python raises."""
    try:
        tangents = m > 0 and p > LARGEST
        compile_later(m, p - TANGENTS * tangents, tangents)
        return _addresses[m, p]
    except BaseException:  # an interrupt as well
        traceback.print_exc()
        _addresses[FAILED] |= m == 0
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
    """The entry of `_addresses`, compiled if it was not before."""
    address = _kept_address(m, p)
    if address == 0:
        address = _call_compile_later(m, p)
    if address == 0 and m == 0:
        raise RuntimeError(NOT_COMPILED)
    return address


@jitable
def run_whole(arguments):
    """Call the pass for any size."""
    return call_whole(address_of(0, WHOLE), arguments)


@jitable
def is_not_compiled():
    """Whether a pass in row 0 was asked for and could not be compiled."""
    return _kept_address(FAILED[0], FAILED[1]) != 0


@intrinsic
def call_at(typing, address, arguments):
    """Call the function at an address, with numbers and addresses; it returns an int64."""

    def generate(context, builder, signature, args):
        values = cgutils.unpack_tuple(builder, args[1])
        kind = ir.FunctionType(ir.IntType(64), [value.type for value in values])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)

    return types.int64(types.int64, arguments), generate


@jitable
def small_pass_for(p, m, asked, l_bar):
    """The address of the pass for this size; 0 for the big one.

    It alone takes weights that differ, and leaves gains for a sweep.
    """
    if m > LARGEST or p > LARGEST or asked.purpose == GAINS:
        return np.int64(0)
    if asked.purpose == GRADIENT and not all_equal(l_bar):
        return np.int64(0)
    return address_of(m, p)


# So many steps pass before a covariance is steady, after the start and after each change of gaps.
STEADY_AFTER = 25


@jitable
def may_collapse(p, m):
    """Whether p series may be rotated into m.

    With m + 1 never: as many they are rotated into where a smoothed state is to be read off.
    """
    return p > max(m + 1, LARGEST)


@jitable
def costs(y, m, never_steady):
    """What a value takes as it is, and with the series of each step rotated into m.

    In nanoseconds, as measured for 6 to 100 series: of the steps before a steady state and of those
    in it, more for those that observe few. Rotated, up to four states go through a pass in
    registers.
    """
    n, p = y.shape
    changes, few = n if never_steady else 1, 0
    for t in range(n):
        observed, changed = 0, False
        for i in range(p):
            observed += int(not np.isnan(y[t, i]))
            changed |= np.isnan(y[t, i]) != np.isnan(y[max(t, 1) - 1, i])
        changes += int(changed)
        few += int(observed < min(p, 2 * m))
    moving = min(n, STEADY_AFTER * changes)
    steady = n - moving
    now = moving * (250 + 60 * p + 6 * p * p // 5 + p**3 // 20 + 3 * p * m // 2)
    now += steady * (100 + 5 * p // 2 + p * p // 20)
    rotated = moving * ((300 if m <= LARGEST else 220 * m) + 4 * p + 3 * p * m // 2)
    rotated += steady * (200 + 3 * p + 30 * m) + n * p * p // 10 + few * 800
    return now, rotated


@jitable
def collapses(y, m, never_steady, times):
    """Whether rotating the series of each step into m saves so many times what it takes."""
    if not may_collapse(y.shape[1], m):
        return False
    now, rotated = costs(y, m, never_steady)
    return now > times * rotated


@jitable
def sizes_of_kept(m, p):
    """Doubles that a pass in registers keeps of a step: of means, and of gains."""
    return p + m, p * p + 2 * p * m + m * m


@jitable
def run_small(address, y, model, out, l, l_bar, y_bar, asked, tol, report, more):
    """Call a pass in registers, in memory of its own.

    ``more`` is (), or what the tangents' takes beside that: the directions of y and of the model,
    and W's gradient.
    """
    (n, p), m = y.shape, len(model.a0)
    back, times = asked.purpose == GRADIENT, 1 if len(more) == 0 else 2
    of_mean, of_gain = sizes_of_kept(m, p)
    memory, gains = blocks(
        n * (2 + times * of_mean if back else 2), n * times * of_gain if back else 1
    )
    indices = integers(memory)[: 2 * n]
    same_until, gain_of = indices[:n], indices[n:]
    look_at(y, Observed(np.empty((n, p), np.uint8), same_until))
    shares = np.zeros(m)
    if asked.watch:
        fill_shares(model.P0, model.T, model.W, shares)
    mean, gain = np.int64(memory.ctypes.data) + 16 * n, np.int64(gains.ctypes.data)
    status = in_registers(
        address,
        (y, model, out, l, l_bar, y_bar, asked, tol, report, shares, mean, gain, gain_of,
         same_until),
        more, mean + 8 * n * of_mean, gain + 8 * n * of_gain,
    )  # fmt: skip
    memory[0], gains[0] = 0.0, 0.0  # Numba frees an array after its last use
    return status


def in_registers(address, arguments, more, mean, gain):
    """The pass at an address, or that of its tangents, which keep their own means and gains."""


@overload(in_registers, jit_options=PART)
def _in_registers(address, arguments, more, mean, gain):
    if len(more) == 0:
        return lambda address, arguments, more, mean, gain: call_small(address, arguments)
    return lambda address, arguments, more, mean, gain: call_small_tangents(
        address,
        arguments + (more[0], more[1], more[2], mean, gain),  # noqa: RUF005
    )


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


# The model's arrays, contiguous, and a gradient of zeros.
copied = for_each(Arrays, "a0, P0, c, d, T, Z, H, W", "contiguous({x})", contiguous=contiguous)
zeros_like = for_each(Arrays, "model", "np.zeros(model.{x}.shape)", np=np)


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
def any_pass(y, model, out, l, l_bar, y_bar, asked, tol, report):
    """The pass that takes the least time for these arrays, which are checked."""
    (n, p), m, status = y.shape, len(model.a0), np.int64(NOT_ROTATED)
    if collapses(y, m, tol == 0.0 or varies(model), 1):
        status = call_collapsed(
            address_of(0, COLLAPSE), (y, model, out, l, l_bar, y_bar, asked, tol, report)
        )
        if status != NOT_ROTATED:
            return status
    small, status = small_pass_for(p, m, asked, l_bar), np.int64(VAGUE)
    if small != 0:
        status = run_small(small, y, model, out, l, l_bar, y_bar, asked, tol, report, ())
        if status != VAGUE:
            return status
    saved = saved_of(asked)
    plan, shape = np.empty(HEADER, np.int64), Sizes(n, p, m)
    near, far = lay_out(shape, saved, plan, 0)
    memory, gains = blocks(near + LANES, far + LANES)
    lay_out(shape, saved, plan, distance(memory, gains))
    room = room_in(memory, plan, n, p, m)
    if small == 0:
        status = run_whole((room, y, model, out, l, l_bar, y_bar, asked, tol, report))
    if status == VAGUE:
        status = call_roots(
            address_of(0, ROOTS), (room, y, model, out, l, l_bar, y_bar, asked, tol, report)
        )
    memory[0], gains[0] = 0.0, 0.0  # the address w, and those it tells of, were good until here
    return status


@jitable
def room_in(memory, plan, n, p, m):
    """`Room` for n steps, in memory for which there is a plan."""
    start = begin(memory, plan)
    return Room(
        np.int64(memory.ctypes.data + 8 * start), integers(memory)[start:],
        np.empty((n, p), np.uint8), np.empty(room_for_indices(n, p, m), np.int64),
    )  # fmt: skip


@compiled_part
def checked_pass(y, model, out, l, l_bar, y_bar, asked, tol, report):
    """`any_pass`, its errors told in words."""
    status = np.int64(0)
    try:
        status = any_pass(y, model, out, l, l_bar, y_bar, asked, tol, report)
    except Exception:  # compiled code cannot ask which
        status = np.int64(0)
    if status == 0 and is_not_compiled():
        raise RuntimeError(NOT_COMPILED)
    if status == 0:
        raise MemoryError(OUT_OF_MEMORY)
    return status


linked_pass = linked(checked_pass, PASS)


@compiled
def loglike(y, a0, P0, c, d, T, Z, H, W, tol):
    """The log-likelihood of each step, (n,); NaN throughout where some F is not positive definite.

    y (n, p) with NaN for what is missing; c (k, m), d (k, p), T (k, m, m), Z (k, p, m),
    H (k, p, p), W = R Q R' (k, m, m) with k = 1 or n. Arrays of float64 in any layout;
    ValueError if their shapes do not fit. `tol` bounds, by estimate, what a covariance in a steady
    state misses: max |P - P*|_ij / sqrt(P_ii P_jj); 0 for none. MemoryError if there is not enough.
    """
    y = contiguous(y)
    model = copied(a0, P0, c, d, T, Z, H, W)
    l, report = np.empty(len(y)), np.empty(3, np.int64)
    check(y, model, l)
    wanted = Wanted(False, False, False, False, np.empty(0, np.int64))
    asked = asked_for(VALUE, wanted, True)
    if linked_pass((y, model, model, l, l, y, asked, tol, report)) != DONE:
        l[:] = np.nan
    return l


@jitable
def evaluate(y, model, l_bar, wanted, tol):
    """What `loglike_and_grad` returns, for arrays as they were given."""
    y, l_bar = contiguous(y), contiguous(l_bar)
    check(y, model, l_bar)
    l, y_bar, report = np.empty(len(y)), np.zeros(y.shape), np.empty(3, np.int64)
    out = zeros_like(model)
    asked = asked_for(GRADIENT, wanted, True)
    if linked_pass((y, model, out, l, l_bar, y_bar, asked, tol, report)) != DONE:
        l[:], y_bar[:] = np.nan, np.nan
        fill(out, np.nan)
    bars = out.a0, out.P0, out.c, out.d, out.T, out.Z, out.H, out.W
    return l, bars, y_bar, (report[0], report[1], report[2])


@compiled
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


@compiled
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
