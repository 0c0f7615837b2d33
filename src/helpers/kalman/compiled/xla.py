"""The pass as XLA calls it: what JAX runs on a CPU in the place of two scans.

XLA hands a foreign function one structure with the addresses of its arguments and results, laid out
as in ``xla/ffi/api/c_api.h``, a file that jaxlib carries. Here it is read as words of eight bytes.
Each array comes with the same leading axes, those that `jax.vmap` added: so many models, and a
series of each. A result that is not wanted has axes of length 0. The arrays may be float32; the
computation is in float64.
"""

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from helpers.kalman.compiled.door import (
    NOT_COMPILED,
    OUT_OF_MEMORY,
    call_at,
    doubles,
    is_not_compiled,
    kept_on_disk,
    linked_loglike,
    linked_loglike_and_grad,
)
from helpers.kalman.compiled.inputs import Arrays, for_each
from helpers.kalman.compiled.one_pass import all_equal
from helpers.kalman.compiled.tiles import jitable
from helpers.kalman.on_disk import cfunc

# Places in XLA_FFI_CallFrame (a list is its length and, two words on, its address) ...
EXTENSION, API, ARGUMENTS, RESULTS = 1, 2, 7, 12
DATA, RANK, DIMENSIONS = 3, 4, 5  # ... in XLA_FFI_Buffer
TYPE, METADATA, VERSION = 1, 3, 3  # ... in XLA_FFI_Metadata_Extension and XLA_FFI_Metadata
API_VERSION, CREATE_ERROR = 4, 6  # ... and in XLA_FFI_Api
IS_METADATA, RESOURCE_EXHAUSTED, INTERNAL = 1, 8, 13  # their numbers in the enumerations
OLDEST = 1  # the minor version that releases of JAX have of which we know: 0.6 to 0.8
LOW = 2**32 - 1  # a number of four bytes shares its word with nothing, or with another one

# Places among the arguments of every function here: tol (1,), and of `gradient`: l_bar, and the
# gradients for weights of one.
TOL, WEIGHTS, KNOWN = 9, 10, 11
MESSAGE, OTHER = (
    np.frombuffer(text.encode() + b"\0", np.uint8) for text in (OUT_OF_MEMORY, NOT_COMPILED)
)


@intrinsic
def _pointer(typing, address):
    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@jitable
def words(address, count):
    """So many words of eight bytes."""
    return carray(_pointer(address), count, np.int64)


@jitable
def buffer(frame, where, k):
    """The address and the shape of the k-th argument or result."""
    found = words(words(frame[where + 2], frame[where])[k], DIMENSIONS + 1)
    return _pointer(found[DATA]), words(found[DIMENSIONS], found[RANK])


def of_rank(rank):
    """What reads an argument or result as (count, ...), with so many axes behind the first."""
    sizes = ", ".join(f"shape[-{i}]" for i in range(rank, 0, -1))
    code = f"carray(data, (count, {sizes}), dtype)"
    shaped = jitable(eval(f"lambda data, shape, count, dtype: {code}", globals()))

    def read(frame, where, k, count, dtype):
        data, shape = buffer(frame, where, k)
        return shaped(data, shape, count, dtype)

    return jitable(read)


OF_RANK = {rank: of_rank(rank) for rank in (1, 2, 3, 4)}
vectors, matrices = OF_RANK[1], OF_RANK[2]


@jitable
def write(result, found, factor):
    """What was found, times a factor, where it is wanted."""
    if result.size > 0:
        for i, value in np.ndenumerate(found):
            result[i] = factor * value


def together(kind, *ranks):
    """What reads, picks, makes float64 and writes a `kind` of tuple of arrays of these ranks.

    They are called with (frame, where, k, count, dtype), for the arguments or results from the k-th
    on; (x, k), for the k-th of each; the same, which give a plain tuple; and (result, found,
    factor), as :func:`write` is.
    """
    takes = "frame, where, k, count, dtype"
    parts = (f"of_{r}(frame, where, k + {i}, count, dtype)" for i, r in enumerate(ranks))
    known = {"kind": kind} | {f"of_{r}": of for r, of in OF_RANK.items()}
    as_doubles = (f"doubles(x.{x}[k])" for x in kind._fields)
    return (
        jitable(eval(f"lambda {takes}: kind({', '.join(parts)})", known)),
        for_each(kind, "x, k", "x.{x}[k]"),
        jitable(eval(f"lambda x, k: ({', '.join(as_doubles)},)", {"doubles": doubles})),
        for_each(
            kind, "result, found, factor", "write(result.{x}, found.{x}, factor)", write=write
        ),
    )


# The model's arrays, or their gradients.
models, one_of, model_of, write_all = together(Arrays, 1, 2, 2, 2, 3, 3, 3, 3)


@jitable
def count_of(frame):
    """How many models there are: the leading axes of tol together."""
    _, shape = buffer(frame, ARGUMENTS, TOL)
    count = 1
    for k in range(len(shape) - 1):
        count *= shape[k]
    return count


def value(frame, dtype):
    """Arguments: y, the model and tol (1,). Result: l."""
    count = count_of(frame)
    y = matrices(frame, ARGUMENTS, 0, count, dtype)
    given = models(frame, ARGUMENTS, 1, count, dtype)
    tol = vectors(frame, ARGUMENTS, TOL, count, dtype)
    l_out = vectors(frame, RESULTS, 0, count, dtype)
    for k in range(count):
        x = model_of(given, k)
        l = linked_loglike((doubles(y[k]), *x, np.float64(tol[k, 0])))
        write(l_out[k], l, 1.0)


def gradient(frame, dtype):
    """Arguments: y, the model, tol (1,), l_bar; results: l and the gradients of y and of the model.

    The gradients for weights of one may stand behind the arguments: then weights that are all the
    same multiply them, and nothing else is done.
    """
    count = count_of(frame)
    y = matrices(frame, ARGUMENTS, 0, count, dtype)
    given = models(frame, ARGUMENTS, 1, count, dtype)
    tol = vectors(frame, ARGUMENTS, TOL, count, dtype)
    l_bar = vectors(frame, ARGUMENTS, WEIGHTS, count, dtype)
    l_out = vectors(frame, RESULTS, 0, count, dtype)
    y_out = matrices(frame, RESULTS, 1, count, dtype)
    out = models(frame, RESULTS, 2, count, dtype)
    want_T, want_Z, want_W = out.T.size > 0, out.Z.size > 0, out.W.size > 0
    want = want_T or want_Z or want_W or out.P0.size > 0 or out.H.size > 0
    are_known = frame[ARGUMENTS] > KNOWN
    first = KNOWN if are_known else 0  # else any of that rank: the branch needs a type
    y_known = matrices(frame, ARGUMENTS, first, count, dtype)
    known = models(frame, ARGUMENTS, first + 1, count, dtype)
    for k in range(count):
        if are_known and all_equal(l_bar[k]):
            write(y_out[k], y_known[k], l_bar[k, 0])
            write_all(one_of(out, k), one_of(known, k), l_bar[k, 0])
            continue
        x = model_of(given, k)
        l, found, y_bar, _ = linked_loglike_and_grad(
            (doubles(y[k]), *x, doubles(l_bar[k]), want, want_T, want_Z, want_W,
             np.float64(tol[k, 0]))
        )  # fmt: skip
        write(l_out[k], l, 1.0)
        write(y_out[k], y_bar, 1.0)
        write_all(one_of(out, k), Arrays(*found), 1.0)


def handlers(*functions):
    """Machine code by the name of a function of a frame and by the type of its arrays."""
    dtypes = np.float32, np.float64
    return {(f.__name__, np.dtype(x).name): _handler(f, x) for f in functions for x in dtypes}


def _handler(work, dtype):
    """`work` as a foreign function of XLA, which returns 0 or an error."""
    work = jitable(work)

    def handle(address):
        frame = words(address, RESULTS + 3)
        if frame[EXTENSION] != 0:
            extension = words(frame[EXTENSION], METADATA + 1)
            if extension[TYPE] & LOW == IS_METADATA:  # XLA asks what this was made for
                metadata = words(extension[METADATA], VERSION + 1)
                minor = OLDEST
                if frame[API] != 0:  # older releases do not say which version they have
                    minor = words(frame[API], API_VERSION + 1)[API_VERSION] >> 32
                metadata[VERSION] = minor << 32  # version 0.minor: a major one is another layout
                return 0
        error = np.zeros(4, np.int64)  # an XLA_FFI_Error_Create_Args
        error[0], error[2], error[3] = 28, MESSAGE.ctypes.data, RESOURCE_EXHAUSTED
        made = 0
        try:
            work(frame, dtype)
        except Exception:  # compiled code cannot ask which; the arguments have been checked
            if is_not_compiled():
                error[2], error[3] = OTHER.ctypes.data, INTERNAL
            create = words(frame[API], CREATE_ERROR + 1)[CREATE_ERROR]
            made = call_at(create, (error.ctypes.data,))
        error[0] = 0  # its address was good until here
        return made

    handle.__qualname__ = f"{work.__name__}_{np.dtype(dtype).name}"
    return kept_on_disk(cfunc(types.int64(types.int64), error_model="numpy"))(handle)


HANDLERS = handlers(value, gradient)
