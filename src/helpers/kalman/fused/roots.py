"""The pass of a model whose P0 is vague: its first steps in square-root coordinates.

The steps are those of :mod:`helpers.kalman.square_root`, compiled; what follows them is a pass like
any other, called by its address. This module is imported, and its code compiled, when a vague P0 is
met for the first time.
"""

import numpy as np
from numba import carray, types

from helpers.kalman import recursions
from helpers.kalman.fused import text  # noqa: F401 (lets compiled code call the readable text)
from helpers.kalman.fused.entry import (
    ARRAYS,
    GRADIENT,
    PASS,
    WHOLE,
    address_of,
    bundle,
    kept_on_disk,
    linked,
    numbers_at,
    run,
    run_small,
    saved_of,
    small_pass_for,
)
from helpers.kalman.fused.forward import DONE, NOT_POSITIVE_DEFINITE
from helpers.kalman.fused.inputs import (
    Arrays,
    Observed,
    look_at,
    model_later,
    room_for_indices,
)
from helpers.kalman.fused.layout import GAINS_FROM, HEADER, Sizes, lay_out
from helpers.kalman.fused.steps import gaps
from helpers.kalman.fused.tiles import jitable
from helpers.kalman.on_disk import cfunc, njit
from helpers.kalman.recursions import symmetric
from helpers.kalman.square_root import at_the_start, carry, filter_roots, listed, pull_step

compiled = njit(error_model="numpy", nogil=True)


@jitable
def from_roots(y, model, l, columns):
    """The square-root start: its steps, the mean, P and its root after it, and if it was good."""
    filled, o = gaps(y)
    return filter_roots(
        filled, o, model.a0, symmetric(model.P0), model.c, model.d, model.T, model.Z, model.H,
        model.W, l, columns,
    )  # fmt: skip


@kept_on_disk(compiled)
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


@kept_on_disk(compiled)
def start_in_roots(
    w, header, entries, indices, sizes, report, tol, l, l_bar, y, y_bar, model, observed, out, sweep
):  # fmt: skip
    """Forwards from a vague P0: the first steps in roots, the whole pass over the others.

    ``sizes`` and ``report`` are those of `whole_pass`. For a `sweep` the pass leaves behind in w,
    header, entries and indices what belongs to the other steps. Returns how it ended, the steps in
    roots, the root after them and the mean there.
    """
    n, p, m = sizes[0], sizes[1], sizes[2]
    look_at(y, observed)
    roots, a, P, B_t, good = from_roots(y, model, l, sizes[16:])
    k = len(roots)
    report[0], report[1], report[2] = n, k, n
    if not good:
        report[0] = k
        return NOT_POSITIVE_DEFINITE, roots, B_t, a
    how = DONE
    if k < n:
        rest = sizes.copy()
        rest[0], rest[14] = n - k, 0
        for i in range(3, 9):
            if rest[i] > 1:
                rest[i] -= k
        saved = saved_of(rest)
        x, out_k = model_later(model, k), model_later(out, k)
        x = Arrays(a, P, x.c, x.d, x.T, x.Z, x.H, x.W)
        l_k, l_bar_k, y_k, y_bar_k = l[k:], l_bar[k:], y[k:], y_bar[k:]
        small = np.int64(0) if sweep else small_pass_for(rest, l_bar_k)
        if small != 0:
            how = run_small(small, rest, report, tol, l_k, l_bar_k, y_k, y_bar_k, x, out_k, ())
        else:
            lay_out(Sizes(n - k, p, m), saved, header, header[2 * GAINS_FROM])
            room = w, header, entries, indices
            whole = address_of(0, WHOLE)
            how = run(whole, room, rest, report, tol, l_k, l_bar_k, y_k, y_bar_k, x, out_k)
        report[0], report[1], report[2] = report[0] + k, k, report[2] + k
    return how, roots, B_t, a


_VECTOR, _MATRIX = types.float64[::1], types.float64[:, ::1]
_COUNTS, _FLAGS = types.int64[::1], types.uint8[:, ::1]
_OBSERVED = types.NamedTuple((_FLAGS, _COUNTS), Observed)
linked_start = linked(
    start_in_roots,
    (types.intp, _COUNTS, _FLAGS, _COUNTS, _COUNTS, _COUNTS, types.float64, _VECTOR, _VECTOR,
     _MATRIX, _MATRIX, ARRAYS, _OBSERVED, ARRAYS, types.boolean),
)  # fmt: skip
_ROOTS = start_in_roots.nopython_signatures[0].return_type[1]
linked_pull = linked(
    pull_roots, (_ROOTS, _MATRIX, ARRAYS, _OBSERVED, _VECTOR, _MATRIX, ARRAYS, _COUNTS)
)


def _pass_from_roots(
    w, header, entries, indices, sizes, report, tol, l, l_bar, y, y_bar, a0, P0, c, d, T, Z, H, W,
    a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar,
):  # fmt: skip
    """`whole_pass` with its first steps in roots: for a vague P0."""
    num = numbers_at(sizes)
    n, p, m = num[0], num[1], num[2]
    model = bundle(num, a0, P0, c, d, T, Z, H, W)
    out = bundle(num, a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar)
    ys, y_bars, weights = carray(y, (n, p)), carray(y_bar, (n, p)), carray(l_bar, n)
    flags, room = carray(entries, (n, p)), carray(indices, room_for_indices(n, p, m))
    observed = Observed(flags, room[:n])
    how, roots, B_t, _ = linked_start(
        (w, carray(header, HEADER), flags, room, num, carray(report, 3), tol, carray(l, n), weights,
         ys, y_bars, model, observed, out, False)
    )  # fmt: skip
    if how == DONE and num[9] == GRADIENT:
        look_at(ys, observed)  # the other steps have written over it
        linked_pull((roots, B_t, model, observed, weights, y_bars, out, num[16:]))
    return how


_code = kept_on_disk(cfunc(PASS, error_model="numpy"))(_pass_from_roots)
ADDRESS = _code.address
