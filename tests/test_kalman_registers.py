"""Matrices in registers: each operator, compiled for some shapes, against the text in NumPy."""

import numpy as np
import pytest
from numba import njit

from helpers.checks import relative_error
from helpers.kalman import recursions
from helpers.kalman.compiled import overloads  # noqa: F401 (of the readable text)
from helpers.kalman.compiled.registers import (
    Along,
    diagonal,
    filled,
    identity,
    larger,
    largest,
    moving,
    read,
    seen,
    total,
    transposed,
    where_positive,
    write,
    written,
    zeros,
)
from helpers.kalman.compiled.tiles import Memory, jitable
from helpers.kalman.tangents import Moving, still

ROOM = 240


@written
def everything(like, I_r, w):
    """What the operators make of a matrix A (r, c), of its size; written from place ROOM on."""
    A = read(like, w, 0)
    r, c = len(A), len(A.T)
    y = diagonal(read(A @ A.T, w, 0))
    x = diagonal(read(A.T @ A, w, 40))
    gaps = read(x, w, 80)  # some of them NaN
    S = A @ A.T + 0.5
    o = seen(diagonal(S))
    C_inv, logdet = recursions.inverse_factor(I_r + S @ S.T, o, I_r)
    place = ROOM
    write(-A - 2 * A.T.T / 3 + 1, w, place)
    write(transposed(A), w, place + 20)
    write(A @ x, w, place + 40)
    write(y @ A, w, place + 45)
    write(recursions.outer(y, x), w, place + 50)
    write(A * x, w, place + 70)
    write(A * y[:, None], w, place + 90)
    write(filled(gaps), w, place + 115)
    write(0 * x + seen(gaps), w, place + 120)
    write(recursions.rows(A, o) @ A.T @ recursions.rows(y, seen(y)), w, place + 125)
    write(recursions.symmetric(A @ A.T + recursions.outer(y, 2 + y)), w, place + 145)
    write(x @ x, w, place + 165)
    write(logdet, w, place + 170)
    write(total(x), w, place + 175)
    write(A[r - 1, c - 1] + x[c - 1], w, place + 180)
    write(S.trace(), w, place + 185)
    write(C_inv.T @ C_inv, w, place + 190)


@written
def of_numbers(like, I_r, w):
    """What is asked of matrices that do not move alone."""
    x = diagonal(read(like @ like.T, w, 0))
    write(larger(x, x[0] + 0 * x), w, ROOM)
    write(larger(x, 0.1), w, ROOM + 5)
    write(where_positive(x, x * x), w, ROOM + 10)
    write(largest(x), w, ROOM + 15)
    write(largest(-1.0 * x * x), w, ROOM + 16)


def numbers(rows, cols):
    rng = np.random.default_rng(rows + 10 * cols)
    memory = Memory(2 * ROOM)
    memory.data[:ROOM] = rng.normal(size=ROOM)
    memory.data[80 : 80 + cols : 2] = np.nan
    return memory


SIZES = [(1, 1), (1, 4), (3, 2), (2, 3), (4, 4)]


@pytest.mark.parametrize(("rows", "cols"), SIZES)
@pytest.mark.parametrize("what", [everything, of_numbers])
def test_every_operator_is_that_of_numpy(rows, cols, what):
    memory = numbers(rows, cols)
    compiled = memory.data.copy()

    @jitable
    def run(address):
        what(zeros(rows, cols), identity(rows), address)

    what(np.zeros((rows, cols)), np.eye(rows), memory)
    njit(lambda address: run(address))(compiled.ctypes.data)
    expected = memory.data[ROOM:]
    written = ~np.isnan(expected)
    assert written.sum() > 3 * rows
    np.testing.assert_array_equal(~np.isnan(compiled[ROOM:]), written)
    assert relative_error(compiled[ROOM:][written], expected[written]) < 1e-13


@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_tangents_are_derivatives(rows, cols):
    """Of what operators make of matrices that move: by complex steps, and compiled as in NumPy."""
    start, moves = numbers(rows, cols), numbers(cols, rows)
    place = Along(start, moves)
    everything(moving(np.zeros((rows, cols))), moving(np.eye(rows)), place)
    stepped = Memory(2 * ROOM)
    stepped.data = np.full(2 * ROOM, np.nan, complex)
    stepped.data[:ROOM] = numbers(rows, cols).data[:ROOM] + 1e-30j * moves.data[:ROOM]
    stepped.data[80:85] = np.nan_to_num(stepped.data[80:85])
    everything(np.zeros((rows, cols)), np.eye(rows) + 0j, stepped)
    there = ~np.isnan(start.data[ROOM:])
    there[115:125] = False  # gaps, which are not complex
    derivative = stepped.data[ROOM:][there].imag / 1e-30
    assert relative_error(moves.data[ROOM:][there], derivative) < 1e-12

    both = np.stack([numbers(rows, cols).data, numbers(cols, rows).data])

    @jitable
    def run(w, dw):
        everything(moving(zeros(rows, cols)), moving(identity(rows)), Along(w, dw))

    njit(lambda w, dw: run(w, dw))(both[0].ctypes.data, both[1].ctypes.data)
    for found, expected in zip(both, (start.data, moves.data), strict=True):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        assert relative_error(found[ROOM:][there], expected[ROOM:][there]) < 1e-13


def test_to_one_address_the_tangent_alone_is_written():
    x, memory = Moving(np.ones(2), np.arange(2.0)), Memory(2)
    write(x, memory, 0)
    assert memory.data.tolist() == [0, 1] == read(x, memory, 0).dX.tolist()
    assert still(x).tolist() == [1, 1] and still(3.0) == 3.0


def test_products_of_shapes_that_do_not_fit_do_not_compile():
    @njit
    def wrong():
        return total(zeros(2, 3) @ zeros(2, 3))

    with pytest.raises(Exception, match=r"a product of matrices of shapes \(2, 3\) and \(2, 3\)"):
        wrong()
