"""Matrices in registers: each operator, compiled for some shapes, against the text in NumPy."""

import numpy as np
import pytest
from numba import njit

from helpers.checks import relative_error
from helpers.kalman import recursions
from helpers.kalman.fused import text  # noqa: F401 (lets compiled code call the readable text)
from helpers.kalman.fused.registers import (
    diagonal,
    filled,
    larger,
    read,
    seen,
    with_entry,
    write,
    zeros,
)
from helpers.kalman.fused.tiles import Memory, jitable

ROOM = 200


@jitable
def everything(like, w):
    """What the operators make of a matrix A (r, c), of its size; written from place ROOM on."""
    A = read(like, w, 0)
    r, c = len(A), len(A.T)
    y = diagonal(read(A @ A.T, w, 0))
    x = diagonal(read(A.T @ A, w, 40))
    gaps = read(x, w, 80)  # some of them NaN
    S = A @ A.T + 0.5
    for i in range(r):
        S = with_entry(S, i, i, S[i, i] + 2)
    C, logdet = recursions.cholesky(S)
    place = ROOM
    write(w, place, -A - 2 * A.T.T / 3 + 1)
    write(w, place + 20, A.T)
    write(w, place + 40, A @ x)
    write(w, place + 45, y @ A)
    write(w, place + 50, recursions.outer(y, x))
    write(w, place + 70, A * x)
    write(w, place + 90, A * y[:, None])
    write(w, place + 110, larger(x, x[0] + 0 * x))
    write(w, place + 115, filled(gaps))
    write(w, place + 120, seen(gaps))
    write(w, place + 125, recursions.solve(C, A))
    write(w, place + 145, recursions.symmetric(A @ A.T + recursions.outer(y, 2 + y)))
    last = diagonal(0 * S)
    write(w, place + 165, last + x @ x)
    write(w, place + 170, last + logdet)
    write(w, place + 175, last + x.sum())
    write(w, place + 180, last + A[r - 1, c - 1] + x[c - 1])
    write(w, place + 185, last + S.trace())
    return place + 190


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 4), (3, 2), (2, 3), (4, 4)])
def test_every_operator_is_that_of_numpy(rows, cols):
    rng = np.random.default_rng(rows + 10 * cols)
    memory = Memory(2 * ROOM)
    memory.data[:ROOM] = rng.normal(size=ROOM)
    memory.data[80 : 80 + cols : 2] = np.nan
    compiled = memory.data.copy()

    @njit
    def run(address):
        return everything(zeros(rows, cols), address)

    assert everything(np.zeros((rows, cols)), memory) == run(compiled.ctypes.data)
    expected = memory.data[ROOM:]
    written = ~np.isnan(expected)
    assert written.sum() > 10 * rows + 3 * cols
    np.testing.assert_array_equal(~np.isnan(compiled[ROOM:]), written)
    assert relative_error(compiled[ROOM:][written], expected[written]) < 1e-13


def test_products_of_shapes_that_do_not_fit_do_not_compile():
    @njit
    def wrong():
        return (zeros(2, 3) @ zeros(2, 3)).sum()

    with pytest.raises(Exception, match=r"a product of matrices of shapes \(2, 3\) and \(2, 3\)"):
        wrong()
