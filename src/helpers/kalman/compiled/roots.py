"""The pass of a model whose P0 is vague: its first steps in square-root coordinates.

The steps are those of :mod:`helpers.kalman.square_root`, compiled; what follows them is a pass like
any other, called by its address. This module is imported, and its code compiled, when a vague P0 is
met for the first time.
"""

import numpy as np
from numba import types

from helpers.kalman import recursions
from helpers.kalman.compiled import overloads  # noqa: F401 (of the readable text)
from helpers.kalman.compiled.door import (
    ARRAYS,
    GRADIENT,
    PASS,
    ROOM,
    ROOTS,
    address_in,
    asked_for,
    compiled_part,
    linked,
    run_small,
    run_whole,
    saved_of,
    small_pass_for,
)
from helpers.kalman.compiled.forward import DONE, NOT_POSITIVE_DEFINITE
from helpers.kalman.compiled.inputs import (
    Arrays,
    Observed,
    look_at,
    model_later,
)
from helpers.kalman.compiled.layout import GAINS_FROM, Sizes, lay_out
from helpers.kalman.compiled.steps import gaps
from helpers.kalman.compiled.tiles import jitable
from helpers.kalman.recursions import symmetric
from helpers.kalman.square_root import at_the_start, carry, filter_roots, listed, pull_step


@jitable
def from_roots(y, model, l, columns):
    """The square-root start: its steps, the mean, P and its root after it, and if it was good."""
    filled, o = gaps(y)
    return filter_roots(
        filled, o, model.a0, symmetric(model.P0), model.c, model.d, model.T, model.Z, model.H,
        model.W, l, columns,
    )  # fmt: skip


@compiled_part
def pull_roots(roots, B_t, model, observed, l_bar, y_bar, out, columns):
    """The way back through the square-root start, from the state after it: a0 and P0 of `out`."""
    carried = carry(out.a0.copy(), out.P0.copy(), B_t, columns)
    m, p = len(model.a0), y_bar.shape[1]
    for t in range(len(roots) - 1, -1, -1):
        if t == len(roots) - 1 or len(model.T) > 1:
            T_t = listed(np.ascontiguousarray(recursions.at_step(model.T, t).T))
        r, Pi = carried.r, carried.Pi
        e, T_bar, Z_bar, H_bar, carried = pull_step(roots[t], carried, l_bar[t], T_t, columns)
        recursions.at_step(out.c, t)[:] += r
        recursions.at_step(out.W, t)[:] += Pi
        for row, more in zip(recursions.at_step(out.T, t), T_bar):  # noqa: B905
            for j, column in enumerate(columns):
                row[column] += more[j]
        d_t, Z_t = recursions.at_step(out.d, t), recursions.at_step(out.Z, t)
        H_t = recursions.at_step(out.H, t)
        for i in range(p):
            y_bar[t, i] = 0.0
            if observed.entries[t, i]:
                y_bar[t, i] = -e[i]
                d_t[i] += e[i]
                for j in range(m):
                    Z_t[i, j] += Z_bar[i, j]
                for j in range(p):
                    if observed.entries[t, j]:
                        H_t[i, j] += H_bar[i, j]
    out.a0[:], out.P0[:] = at_the_start(carried, symmetric(model.P0))


@compiled_part
def start_in_roots(
    room, y, model, out, l, l_bar, y_bar, asked, tol, report, observed, sweep
):  # fmt: skip
    """Forwards from a vague P0: the first steps in roots, the whole pass over the others.

    For a `sweep` the pass leaves behind in ``room`` what belongs to the other steps. Returns how it
    ended, the steps in roots, the root after them and the mean there.
    """
    (n, p), m = y.shape, len(model.a0)
    look_at(y, observed)
    roots, a, P, B_t, good = from_roots(y, model, l, asked.wanted.columns)
    k, status = len(roots), np.int64(DONE)
    report[0], report[1], report[2] = n, k, n
    if not good:
        report[0] = k
        return np.int64(NOT_POSITIVE_DEFINITE), roots, B_t, a
    if k < n:
        rest = asked_for(asked.purpose, asked.wanted, False)
        x, out_k = model_later(model, k), model_later(out, k)
        x = Arrays(a, P, x.c, x.d, x.T, x.Z, x.H, x.W)
        l_k, l_bar_k, y_k, y_bar_k = l[k:], l_bar[k:], y[k:], y_bar[k:]
        small = np.int64(0) if sweep else small_pass_for(p, m, rest, l_bar_k)
        if small != 0:
            status = run_small(small, y_k, x, out_k, l_k, l_bar_k, y_bar_k, rest, tol, report, ())
        else:
            lay_out(Sizes(n - k, p, m), saved_of(rest), room.header, room.header[2 * GAINS_FROM])
            status = run_whole((room, y_k, x, out_k, l_k, l_bar_k, y_bar_k, rest, tol, report))
        report[0], report[1], report[2] = report[0] + k, k, report[2] + k
    return status, roots, B_t, a


_VECTOR, _MATRIX = types.float64[::1], types.float64[:, ::1]
_COUNTS, _FLAGS = types.int64[::1], types.uint8[:, ::1]
_OBSERVED = types.NamedTuple((_FLAGS, _COUNTS), Observed)
linked_start = linked(start_in_roots, (ROOM, *PASS, _OBSERVED, types.boolean))
_ROOTS = start_in_roots.nopython_signatures[0].return_type[1]
linked_pull = linked(
    pull_roots, (_ROOTS, _MATRIX, ARRAYS, _OBSERVED, _VECTOR, _MATRIX, ARRAYS, _COUNTS)
)


@compiled_part
def pass_from_roots(room, y, model, out, l, l_bar, y_bar, asked, tol, report):
    """`whole_pass` with its first steps in roots: for a vague P0."""
    n = len(y)
    observed = Observed(room.entries, room.indices[:n])
    status, roots, B_t, _ = linked_start(
        (room, y, model, out, l, l_bar, y_bar, asked, tol, report, observed, False)
    )
    if status == DONE and asked.purpose == GRADIENT:
        look_at(y, observed)  # the other steps have written over it
        linked_pull((roots, B_t, model, observed, l_bar, y_bar, out, asked.wanted.columns))
    return status


ADDRESSES = {ROOTS: address_in(pass_from_roots, (ROOM, *PASS))}
