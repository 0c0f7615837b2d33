"""Tangents along several directions at once, as matrices beside those of a pass.

A matrix of tangents (rows, columns) lies as (rows, columns k), the k directions of an entry side by
side; a vector is a row. A product with a matrix that all directions share, from the left, is then
one product with longer rows; from the right it is one product for each row. There is one direction,
or as many as a vector has lanes.
"""

from typing import NamedTuple

import numpy as np
from numba.extending import overload

from helpers.kalman.compiled.layout import Saved, lay_out, reader, space
from helpers.kalman.compiled.tiles import (
    LANES,
    PART,
    Mat,
    axpy,
    compiled_as,
    dot,
    get,
    jitable,
    padded,
    product,
    put,
    row_product,
    sparse_product,
    symmetrize,
    transpose,
    transposed,
)

# Rows and columns of each matrix; columns "k m" are those of m for each direction. Names are those
# of :data:`helpers.kalman.compiled.layout.LAYOUT`, and mean the tangent of what lies there.
TANGENT_LAYOUT = {
    "zero": ("any", "k widest"),  # one row of zeros, which is every row
    # directions at the step at hand, of H and W half of the symmetric part; what a gap misses does
    # not move
    "T": ("m", "k m"),
    "T_t": ("m", "k m"),
    "Z": ("p", "k m"),
    "Z_t": ("m", "k p"),
    "H": ("p", "k p"),
    "W": ("m", "k m"),
    "c": ("1", "k m"),
    # matrices that a step works on
    "P": ("m", "k m"),
    "P_next": ("m", "k m"),
    "P_filt": ("m", "k m"),
    "half": ("m", "k m"),
    "work": ("m", "k m"),
    "U": ("m", "k m"),
    "L": ("m", "k m"),
    "S": ("m", "k m"),
    "N_sum": ("m", "k m"),
    "T_bar": ("m", "k m"),
    "Mt": ("p", "k m"),
    "Q": ("p", "k m"),
    "G": ("p", "k m"),
    "K": ("p", "k m"),
    "KN": ("p", "k m"),
    "M": ("p", "k m"),
    "Y": ("p", "k m"),
    "Z_bar": ("p", "k m"),
    "K_t": ("m", "k p"),
    "F": ("p", "k p"),
    "F_half": ("p", "k p"),
    "E": ("p", "k p"),
    "D": ("p", "k p"),
    "D_sum": ("p", "k p"),
    "C_inv_t": ("p", "p"),  # not a tangent: the transposed C^-1 of the last update
    "P_s": ("1", "m"),  # nor is this one: P_filt T'r
    "s": ("1", "k m"),  # of T'r
    "q": ("1", "k m"),  # of P_filt T'r
    "trace": ("1", "k 1"),  # of F^-1 dF
    "most": ("1", "k 1"),  # the largest that a square of P's was, in units of the variances
    # matrices of every step; "kept" if the gradients of T or Z are asked for
    "a": ("steps + 1", "k m"),  # from the step's update on that of a_filt
    "ahat": ("steps", "k m"),
    "r": ("steps + 1", "k m"),
    "v": ("steps", "k p"),
    "Fu": ("steps", "k p"),  # dv - dF u
    "w": ("steps", "k p"),
    "u": ("steps", "k p"),
    "e": ("steps", "k p"),
    "Kf": ("steps p", "k m"),
    "F_inv": ("steps p", "k p"),
    "TP": ("steps m kept", "k m"),
}
TangentSpace = NamedTuple("TangentSpace", [(name, Mat) for name in TANGENT_LAYOUT])  # noqa: UP014
TANGENT_HEADER = 2 * len(TANGENT_LAYOUT)
FIRST_OF_STEPS, GAINS_FROM = list(TANGENT_LAYOUT).index("a"), list(TANGENT_LAYOUT).index("Kf")

_ROWS = "any", "1", "m", "p", "steps", "steps + 1", "steps p", "steps m kept"
_COLUMNS = "k 1", "k m", "k p", "k widest", "p", "m"
_TABLE = np.array([[_ROWS.index(r), _COLUMNS.index(c)] for r, c in TANGENT_LAYOUT.values()])


@jitable
def lay_out_tangents(sizes, k, kept, at, far, header):
    """Where tangents along k directions lie: from the place `at` on, those of the gains from `far`.

    ``header`` (TANGENT_HEADER,) of int64 receives what `tangent_space` reads: places and row
    lengths. Returns the places after both.
    """
    n, p, m = sizes
    rows = (1, 1, padded(m), padded(p), n, n + 1, n * p, (n if kept else 1) * m)
    columns = (k, m * k, p * k, max(m, p) * k, p, m)
    for i in range(len(_TABLE)):
        ld = padded(columns[_TABLE[i, 1]])
        header[2 * i] = at if i < GAINS_FROM else far
        header[2 * i + 1] = ld if _TABLE[i, 0] > 0 else 0
        if i < GAINS_FROM:
            at += rows[_TABLE[i, 0]] * ld
        else:
            far += rows[_TABLE[i, 0]] * ld
    return at, far


@jitable
def lay_out_all(sizes, groups, kept, plan, headers, far):
    """`lay_out` for a pass and `lay_out_tangents` for each group of directions with it."""
    at, far = lay_out(sizes, Saved(True, sizes.m), plan, far)
    for i in range(len(groups)):
        at, far = lay_out_tangents(sizes, groups[i].k, kept, at, far, headers[i])
    return at, far


_tangent_space = reader(TangentSpace)


@compiled_as(_tangent_space)
def tangent_space(w):
    """Where all tangents lie; in compiled code by the address of the header."""
    return w.space


class Block(NamedTuple):
    """Rows top to bottom - 1 and columns left to right - 1 of a matrix; all zero if there are none.

    The columns begin with a whole vector.
    """

    top: int
    bottom: int
    left: int
    right: int


@jitable
def block_of(X):
    """The block that holds all that is not zero in any matrix of X (directions, t, rows, cols)."""
    directions, steps, rows, cols = X.shape
    top, bottom, left, right = rows, 0, cols, 0
    for q in range(directions):
        for t in range(steps):
            for i in range(rows):
                for j in range(cols):
                    if X[q, t, i, j] != 0.0:
                        top, bottom = min(top, i), max(bottom, i + 1)
                        left, right = min(left, j), max(right, j + 1)
    if bottom == 0:
        top, left = 0, 0
    return Block(top, bottom, left // LANES * LANES, right)


@jitable
def columns_from(A, j, k):
    """Tangents A from their column j on, or with k = 1 a matrix."""
    return Mat(A.at + j * k, A.ld, A.step)


class Group(NamedTuple):
    """Directions that go side by side."""

    first: int
    count: int
    k: int  # one, or the lanes of a vector, of which some may be empty
    T: Block  # where they move T


_BYTES = 8 * TANGENT_HEADER


def group_of(x, i):
    """The tangents of group i among those of several, as `tangent_space` takes them."""
    return x[i]


@overload(group_of, jit_options=PART)
def _group_of(x, i):
    return lambda x, i: x + i * _BYTES


@jitable
def lanes_of(A, i, k):
    """Row i of tangents A (rows, columns k) as a matrix (columns, k)."""
    return Mat(A.at + i * A.ld, min(A.ld, k), np.int64(1))


@jitable
def from_right(w, out, alpha, X, B, C, rows, inner, cols, k):
    """out (rows, cols k) = C + alpha X B for each of the k tangents X (rows, inner k)."""
    if k == 1 and rows == 1:
        row_product(w, out.at, alpha, X.at, B, C.at, inner, cols)
    elif k == 1:
        product(w, out, alpha, X, B, C, rows, inner, cols)
    else:
        for i in range(rows):
            here, there = lanes_of(out, i, k), lanes_of(C, i, k)
            product(w, here, alpha, transposed(B), lanes_of(X, i, k), there, cols, inner, k)


@jitable
def by_lists(listed, k):
    """Whether the non-zeros of a matrix, `Listed`, are what multiplies tangents from the right."""
    return k > 1 and listed.sparse


@jitable
def from_right_listed(w, out, X, B_t, listed, B, C, rows, inner, cols, k):
    """`from_right` with alpha = 1; by the non-zeros of B', `Listed`, where that is faster."""
    if by_lists(listed, k):
        for i in range(rows):
            here, there = lanes_of(out, i, k), lanes_of(C, i, k)
            sparse_product(w, here, B_t, listed, lanes_of(X, i, k), there, cols, k)
    else:
        from_right(w, out, 1.0, X, B, C, rows, inner, cols, k)


@jitable
def add_symmetric(w, out, X, B, size, k):
    """out += X B for each of the k tangents X (size, size k), where out and X B are symmetric."""
    if k == 1:
        product(w, out, 1.0, X, B, out, size, size, size, True)
        symmetrize(w, out, size)
    else:
        zero = space(w).zero.at
        for i in range(size):
            here = lanes_of(out, i, k)
            product(w, here, 1.0, transposed(B), lanes_of(X, i, k), here, i + 1, size, k)
            for j in range(i):
                axpy(w, out.at + j * out.ld + i * k, 1.0, out.at + i * out.ld + j * k, zero, k)


@jitable
def add_times_row(w, out, alpha, X, b, rows, inner, k):
    """out (1, rows k) += alpha X b for a row that begins at the place b and tangents X."""
    for i in range(rows):
        if k == 1:
            x = alpha * dot(w, X.at + i * X.ld, b, inner)
            put(w, out.at + i, get(w, out.at + i) + x)
        else:
            here = out.at + i * k
            row_product(w, here, alpha, b, lanes_of(X, i, k), here, inner, k)


@jitable
def add_times_rows(w, out, alpha, x, B, rows, inner, k):
    """out (1, rows k) += alpha x B' for tangents x (1, inner k) and B (rows, inner)."""
    for i in range(rows):
        b = B.at + i * B.ld
        if k == 1:
            y = alpha * dot(w, x.at, b, inner)
            put(w, out.at + i, get(w, out.at + i) + y)
        else:
            here = out.at + i * k
            row_product(w, here, alpha, b, lanes_of(x, 0, k), here, inner, k)


@jitable
def add_outer(w, out, alpha, x, Y, rows, cols, k):
    """out (rows, cols k) += alpha x' y for a row at the place x and tangents Y (1, cols k)."""
    for i in range(rows):
        row = out.at + i * out.ld
        axpy(w, row, alpha * get(w, x + i), Y.at, row, cols * k)


@jitable
def add_outer_from_left(w, out, alpha, X, y, rows, cols, k):
    """out (rows, cols k) += alpha x' y for tangents X (1, rows k) and a row at the place y."""
    for i in range(rows):
        row = out.at + i * out.ld
        if k == 1:
            axpy(w, row, alpha * get(w, X.at + i), y, row, cols)
        else:
            for j in range(cols):
                here = row + j * k
                axpy(w, here, alpha * get(w, y + j), X.at + i * k, here, k)


@jitable
def transpose_each(w, out, X, rows, cols, k):
    """out (cols, rows k) = X' for each of the k tangents X (rows, cols k)."""
    if k == 1:
        transpose(w, out, X, rows, cols)
    else:
        zero = space(w).zero.at
        for i in range(rows):
            for j in range(cols):
                axpy(w, out.at + j * out.ld + i * k, 1.0, X.at + i * X.ld + j * k, zero, k)


@jitable
def plus_transpose(w, out, X, size, k):
    """out = X + X' for each of the k tangents X (size, size k); out is not X."""
    if k == 1:
        transpose(w, out, X, size, size)
        axpy(w, out.at, 1.0, X.at, out.at, size * X.ld)
    else:
        for i in range(size):
            for j in range(size):
                x, y = X.at + i * X.ld + j * k, X.at + j * X.ld + i * k
                axpy(w, out.at + i * out.ld + j * k, 1.0, x, y, k)


class Directions(NamedTuple):
    """Directions of y and the model, or what the gradients move by along them.

    Each is (directions, t, rows, columns), with t = 1 or n as in the model (n for y, 1 for a0 and
    P0), one column for vectors, one row for each step of y.
    """

    y: np.ndarray
    a0: np.ndarray
    P0: np.ndarray
    c: np.ndarray
    d: np.ndarray
    T: np.ndarray
    Z: np.ndarray
    H: np.ndarray
    W: np.ndarray


@jitable
def as_column(row, k):
    """A row of k directions of a vector as tangents of one column."""
    return Mat(row.at, k, row.step)


@jitable
def load_moves(w, out, X, t, group, symmetric):
    """A group's directions of X at step t to `out`, or half of their symmetric part.

    In lanes that are empty `out` stays as it is.
    """
    first, count, k, _ = group
    _, steps, rows, cols = X.shape
    now = t if steps > 1 else 0
    for q in range(count):
        for i in range(rows):
            for j in range(cols):
                x = X[first + q, now, i, j]
                if symmetric:
                    x = 0.25 * (x + X[first + q, now, j, i])
                put(w, out.at + i * out.ld + j * k + q, x)


@jitable
def hand_over_moves(w, A, weight, bar, t, group):
    """Add weight times the tangents A to a group's directions of a gradient at step t."""
    first, count, k, _ = group
    _, steps, rows, cols = bar.shape
    now = t if steps > 1 else 0
    for q in range(count):
        for i in range(rows):
            for j in range(cols):
                bar[first + q, now, i, j] += weight * get(w, A.at + i * A.ld + j * k + q)
