"""The pass of a model whose P0 is vague: its first steps in square-root coordinates.

The steps are those of :mod:`helpers.kalman.square_root`, compiled; what follows them is a pass like
any other, called by its address. This module is imported, and its code compiled, when a vague P0 is
met for the first time.
"""

import numpy as np
from numba import carray, cfunc

from helpers.kalman import recursions
from helpers.kalman.fused import text  # noqa: F401 (lets compiled code call the readable text)
from helpers.kalman.fused.entry import PASS, PYTHON_PASS, bundle, call_pass, kept_on_disk
from helpers.kalman.fused.forward import DONE, NOT_POSITIVE_DEFINITE
from helpers.kalman.fused.inputs import Arrays, Observed, look_at
from helpers.kalman.fused.layout import HEADER, Saved, Sizes, lay_out
from helpers.kalman.fused.tiles import jitable
from helpers.kalman.recursions import symmetric
from helpers.kalman.square_root import at_the_start, carry, filter_roots, pull_step


@jitable
def later(A, k):
    """A (1 or n, ...) from step k on."""
    return A[k:] if len(A) > 1 else A


@jitable
def model_later(model, k):
    """The model, or its gradient, from step k on."""
    return Arrays(
        model.a0, model.P0, later(model.c, k), later(model.d, k), later(model.T, k),
        later(model.Z, k), later(model.H, k), later(model.W, k),
    )  # fmt: skip


@jitable
def from_roots(y, model, observed, l):
    """The square-root start: its steps, the mean, P and its root after it, and if it was good."""
    o = np.empty(y.shape)
    filled = np.empty(y.shape)
    for t in range(y.shape[0]):
        for i in range(y.shape[1]):
            o[t, i] = observed.entries[t, i]
            filled[t, i] = y[t, i] if observed.entries[t, i] else 0.0
    return filter_roots(
        filled, o, model.a0, symmetric(model.P0), model.c, model.d, model.T, model.Z, model.H,
        model.W, l,
    )  # fmt: skip


@jitable
def pull_roots(roots, B_t, model, observed, l_bar, y_bar, out):
    """The way back through the square-root start, from the state after it: a0 and P0 of `out`."""
    carried = carry(out.a0.copy(), out.P0.copy(), B_t)
    m, p = len(model.a0), y_bar.shape[1]
    for t in range(len(roots) - 1, -1, -1):
        T = np.ascontiguousarray(recursions.at_step(model.T, t))
        r, Pi = carried.r, carried.Pi
        e, T_bar, Z_bar, H_bar, carried = pull_step(roots[t], carried, l_bar[t], T)
        recursions.at_step(out.c, t)[:] += r
        recursions.at_step(out.W, t)[:] += Pi
        recursions.at_step(out.T, t)[:] += T_bar
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


def _pass_from_roots(
    w, header, entries, indices, sizes, report, tol, l, l_bar, y, y_bar, a0, P0, c, d, T, Z, H, W,
    a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar,
):  # fmt: skip
    """`_pass` with its first steps in roots: for a vague P0."""
    num = carray(sizes, 15)
    n, p, m = num[0], num[1], num[2]
    model = bundle(num, a0, P0, c, d, T, Z, H, W)
    out = bundle(num, a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar)
    ys, y_bars, ls, weights = (
        carray(y, (n, p)),
        carray(y_bar, (n, p)),
        carray(l, n),
        carray(l_bar, n),
    )
    observed = Observed(carray(entries, (n, p)), carray(indices, n))
    told = carray(report, 3)
    look_at(ys, observed)
    roots, a, P, B_t, good = from_roots(ys, model, observed, ls)
    k = len(roots)
    told[0], told[1], told[2] = n, k, n
    if not good:
        told[0] = k
        return NOT_POSITIVE_DEFINITE
    if k < n:
        rest = num.copy()
        rest[0], rest[14] = n - k, 0
        for i in range(3, 9):
            if rest[i] > 1:
                rest[i] -= k
        saved = Saved(num[9] != 0, num[9] != 0 and (num[11] != 0 or num[12] != 0))
        lay_out(Sizes(n - k, p, m), saved, carray(header, HEADER))
        from_k, out_k = model_later(model, k), model_later(out, k)
        how = call_pass(
            w, header, entries, indices, rest.ctypes, report, tol, ls[k:].ctypes,
            weights[k:].ctypes, ys[k:].ctypes, y_bars[k:].ctypes, a.ctypes, P.ctypes,
            from_k.c.ctypes, from_k.d.ctypes, from_k.T.ctypes, from_k.Z.ctypes, from_k.H.ctypes,
            from_k.W.ctypes, a0_bar, P0_bar, out_k.c.ctypes, out_k.d.ctypes, out_k.T.ctypes,
            out_k.Z.ctypes, out_k.H.ctypes, out_k.W.ctypes,
        )  # fmt: skip
        told[0], told[1], told[2] = told[0] + k, k, told[2] + k
        if how != DONE:
            return how
    if num[9] != 0:
        look_at(ys, observed)  # the other steps have written over it
        pull_roots(roots, B_t, model, observed, weights, y_bars, out)
    return DONE


_code = kept_on_disk(cfunc(PASS, cache=True, error_model="numpy"))(_pass_from_roots)
pass_from_roots = PYTHON_PASS(_code.address)
