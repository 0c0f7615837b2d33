"""The memory map of a pass, as data: each matrix of the filter has a place in one block or two.

``LAYOUT`` says what lies there, in the book's symbols. ``lay_out`` turns it into places for
given sizes; they are written at the beginning of the block, from where ``space`` and
``sizes`` read them again. A test goes through all sizes to 17 and sees that no two matrices
overlap, that each begins on a whole vector, and that each is large enough.

The last matrices, the gains of every step, are as good as untouched where a steady state is found,
and may be most of the memory: for a long series they lie in a block of their own.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.imputils import impl_ret_borrowed, lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, models, register_model

from helpers.kalman.compiled.tiles import LANES, Mat, Memory, compiled_as, jitable, padded


class Sizes(NamedTuple):
    """n steps, p observed, m states."""

    n: int
    p: int
    m: int


class Saved(NamedTuple):
    """Which matrices are kept for every step; of the others there is one, written over and over."""

    gains: bool  # what any gradient needs: v, u, the gain and F^-1
    filtered: int  # of how many columns what those of T and Z need besides; 0 if not asked for


# Rows and columns of each matrix. m and p are padded to whole vectors, columns always, rows where
# whole blocks are read. "steps ..." are rows for every step if they are saved for the way back:
# "gains" if there is one, "filtered" if the gradients of T or Z are asked for.
LAYOUT = {
    "zero": ("any", "widest"),  # one row of zeros, which is every row: its rows lie 0 apart
    # the model at the step at hand, with the rows of missing observations taken out
    "T": ("m", "m"),
    "T_t": ("m", "m"),
    "Z": ("p", "m"),
    "Z_t": ("m", "p"),
    "W": ("m", "m"),
    "H": ("p", "p"),
    "c": ("1", "m"),
    "d": ("1", "p"),
    # matrices that a step works on
    "P": ("m", "m"),
    "P_next": ("m", "m"),
    "P_filt": ("m", "m"),
    "B": ("m", "m"),
    "TN": ("m", "m"),  # T'N
    "L": ("m", "m"),
    "N": ("m", "m"),
    "N_sum": ("m", "m"),
    "T_bar": ("m", "m"),
    "X1": ("m", "m"),
    "X2": ("m", "m"),
    "X3": ("m", "m"),
    "X4": ("m", "m"),
    "S": ("m", "m"),  # of a stretch of steady state: the sum of its N, the N before it, and what
    "N_k": ("m", "m"),  # the N after it adds to the sum
    "N_end": ("m", "m"),
    "M": ("p", "m"),  # Z P
    "G": ("p", "m"),
    "Y": ("p", "m"),
    "K": ("p", "m"),
    "KN": ("p", "m"),
    "Z_bar": ("p", "m"),
    "M2": ("p", "m"),
    "K_t": ("m", "p"),
    "F": ("p", "p"),
    "F2": ("p", "p"),
    "C_inv": ("p", "p"),
    "D": ("p", "p"),
    "D_sum": ("p", "p"),
    "row": ("1", "m"),
    "row2": ("1", "m"),
    "row3": ("1", "m"),
    "picked": ("1", "m"),  # of a row, the columns asked for
    "TP_now": ("m", "m"),  # T P_filt of the step at hand, where not all its columns are saved
    "most": ("1", "m"),  # the largest that each variance was
    "w": ("1", "p"),
    "gu": ("1", "p"),
    "v2": ("1", "p"),
    "o": ("1", "p"),  # 1.0 where something is observed
    "d_seen": ("1", "p"),  # d with zeros for the rest
    "const": ("1", "p"),  # one number, log|F| and log(2 pi) for each observation
    # matrices of every step; those whose blocks are transposed have a block to spare at the end
    "a": ("steps + 1", "m"),
    "v": ("steps", "p"),
    "u": ("steps", "p"),
    "a_filt": ("steps filtered", "m"),
    "r": ("steps gains + 1", "m"),
    "e": ("steps gains", "p"),
    "ahat": ("steps filtered", "columns"),
    # and those of them that only steps with gains of their own have
    "Kf": ("steps gains p", "m"),
    "F_inv": ("steps gains p", "p"),
    "TP": ("steps filtered m", "columns"),  # T P_filt
}
GAINS_FROM = list(LAYOUT).index("Kf")
Space = NamedTuple("Space", [(name, Mat) for name in LAYOUT])  # noqa: UP014

_KINDS = (
    "any", "1", "m", "p", "widest", "columns", "steps", "steps + 1", "steps gains",
    "steps gains + 1", "steps gains p", "steps filtered", "steps filtered m",
)  # fmt: skip
_TABLE = np.array([[_KINDS.index(kind) for kind in dims] for dims in LAYOUT.values()])
HEADER = padded(2 * len(LAYOUT) + len(Sizes._fields))


@jitable
def extent(kind, sizes, saved):
    """The number of rows or columns that a kind, an index into _KINDS, stands for."""
    n, p, m = sizes
    gains, filtered = n if saved.gains else 1, n if saved.filtered > 0 else 1
    columns = saved.filtered if saved.filtered > 0 else m
    lengths = (
        1, 1, padded(m), padded(p), max(padded(m), padded(p)), padded(columns), n,
        n + 1, gains, gains + 1, gains * p + LANES, filtered, filtered * m + LANES,
    )  # fmt: skip
    return lengths[kind]


@jitable
def lay_out(sizes, saved, header, far):
    """The places of a pass, those of the gains of every step from `far` on.

    Into ``header`` (HEADER,) of int64: entries 2 k and 2 k + 1 are the place and the row length of
    the k-th matrix of :data:`LAYOUT`; then come the sizes. Returns the places after the other
    matrices and after the gains.
    """
    at = HEADER
    for k in range(len(_TABLE)):
        rows, ld = extent(_TABLE[k, 0], sizes, saved), extent(_TABLE[k, 1], sizes, saved)
        header[2 * k] = at if k < GAINS_FROM else far
        header[2 * k + 1] = ld if _TABLE[k, 0] > 0 else 0
        if k < GAINS_FROM:
            at += padded(rows * ld)
        else:
            far += padded(rows * ld)
    for k in range(len(sizes)):
        header[2 * len(_TABLE) + k] = sizes[k]
    return at, far


@jitable
def lay_out_together(sizes, saved, header):
    """`lay_out` in one block; returns the number of doubles."""
    near, _ = lay_out(sizes, saved, header, 0)
    return lay_out(sizes, saved, header, near)[1]


# C's library gives blocks above 32 MB back to the system after each call; to be given new pages by
# the next one may take several times as long as the work.
LARGEST_BLOCK = 4_000_000


@jitable
def blocks(near, far):
    """Memory for so many doubles that are used and so many of which most may stay untouched.

    One block in two parts or, where that would be too large, two.
    """
    if near + far <= LARGEST_BLOCK:
        memory = np.empty(near + far)
        return memory[:near], memory[near:]
    return np.empty(near), np.empty(far)


@jitable
def first_line(memory):
    """Where the first cache line begins in `memory`, in doubles: no vector shall lie in two."""
    return ((memory.ctypes.data + 63) // 64 * 64 - memory.ctypes.data) // 8


@jitable
def distance(memory, far):
    """How many doubles after the first line of `memory` the first one of `far` begins."""
    lines = far.ctypes.data + 8 * first_line(far) - memory.ctypes.data - 8 * first_line(memory)
    return lines // 8


@intrinsic
def _integers(typing, memory):
    answer = types.Array(types.int64, 1, "C")

    def generate(context, builder, signature, args):
        given = context.make_array(memory)(context, builder, args[0])
        made = context.make_array(answer)(context, builder)
        for name in ("meminfo", "parent", "nitems", "itemsize", "shape", "strides"):
            setattr(made, name, getattr(given, name))
        made.data = builder.bitcast(given.data, made.data.type)
        return impl_ret_borrowed(context, builder, answer, made._getvalue())

    return answer(memory), generate


@compiled_as(_integers)
def integers(memory):
    """The same memory as integers; Numba's `view` takes seconds to compile, for its errors."""
    return memory.view(np.int64)


@jitable
def begin(memory, plan):
    """Write a pass's plan where its workspace begins in `memory`; returns where, in doubles.

    Up to seven doubles are left before.
    """
    start = first_line(memory)
    header = integers(memory)[start:]
    for k in range(HEADER):
        header[k] = plan[k]
    return start


_MAT = types.NamedUniTuple(types.intp, 3, Mat)


def _read(w, builder, index):
    """The integer ``index`` of the header."""
    data = builder.inttoptr(w, ir.IntType(64).as_pointer())
    read = builder.load(builder.gep(data, [ir.IntType(64)(index)]))
    # It stays as it is for the whole pass: once read, it need not be read again after a write.
    read.set_metadata("invariant.load", builder.module.add_metadata([]))
    return read


class Header(types.Type):
    """A workspace, by its address, as a named tuple of `Mat` of the class ``places``.

    A `Mat` is read where it is asked for. A tuple of all would be some two hundred numbers, which
    Numba packs and unpacks in every function.
    """

    def __init__(self, places):
        super().__init__(f"Header({places.__name__})")
        self.places = places


@register_model(Header)
class _HeaderModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, ir.IntType(64))


@infer_getattr
class _HeaderFields(AttributeTemplate):
    key = Header

    def generic_resolve(self, header, name):
        return _MAT if name in header.places._fields else None


@lower_getattr_generic(Header)
def _read_mat(context, builder, header, w, name):
    k = 2 * header.places._fields.index(name)
    numbers = [_read(w, builder, i) for i in (k, k + 1)]
    return context.make_tuple(builder, _MAT, [*numbers, ir.IntType(64)(1)])


def reader(places):
    """An intrinsic that reads a named tuple of `Mat`, of the class ``places``, from a header."""

    @intrinsic
    def read(typing, w):
        return Header(places)(w), lambda context, builder, signature, args: args[0]

    return read


_space = reader(Space)


@compiled_as(_space)
def space(w):
    """Where everything lies."""
    return w.space


@intrinsic
def _sizes(typing, w):
    answer = types.NamedUniTuple(types.intp, len(Sizes._fields), Sizes)

    def generate(context, builder, signature, args):
        places = range(2 * len(LAYOUT), 2 * len(LAYOUT) + len(Sizes._fields))
        return context.make_tuple(
            builder, answer, [_read(args[0], builder, place) for place in places]
        )

    return answer(w), generate


@compiled_as(_sizes)
def sizes(w):
    """n, p, m."""
    return w.sizes


def checked_memory(sizes: Sizes, saved: Saved) -> tuple[Memory, np.ndarray]:
    """A workspace for Python, laid out, and its header: what the functions of a pass take as w."""
    header = np.zeros(HEADER, np.int64)
    total = lay_out_together(sizes, saved, header)
    places, lengths = header[: 2 * len(LAYOUT) : 2], header[1 : 2 * len(LAYOUT) : 2]
    mats = [Mat(int(at), int(ld), 1) for at, ld in zip(places, lengths, strict=True)]
    return Memory(total, Space(*mats), sizes), header
