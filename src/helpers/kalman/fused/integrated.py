"""A series with unknown numbers integrated out, compiled: one pass, and columns through its gains.

Column 0 is the series, the others are what the unknown numbers delta (q,) add to it, as series
with y = 0. Between the way forwards and the way back the columns are mixed: the series moves to
where delta is most likely, the others become steps of one standard deviation around it. What all
of this is for stands in :mod:`helpers.kalman.diffuse`, whose readable loop tests hold it to.
"""

import numpy as np
from numba import carray, njit, types

from helpers.kalman.fused.entry import (
    GAINS,
    GRADIENT,
    INTEGERS,
    OUT_OF_MEMORY,
    REALS,
    address_of_pass,
    bundle,
    check,
    compiled_once,
    contiguous,
    copied,
    kept_on_disk,
    run,
    zeros_like,
)
from helpers.kalman.fused.forward import DONE
from helpers.kalman.fused.inputs import (
    Observed,
    Wanted,
    indices_in,
    listed_pattern,
    room_for_indices,
    varies,
)
from helpers.kalman.fused.layout import HEADER, Saved, Sizes, begin, lay_out
from helpers.kalman.fused.sweep import (
    Series,
    clear_sums,
    gain_of_each_step,
    hand_over_y,
    lay_out_columns,
    sweep_back,
    sweep_forward,
)
from helpers.kalman.fused.tiles import (
    Mat,
    below,
    clear,
    copy,
    dot,
    entry,
    get,
    jitable,
    padded,
    product,
    put,
    transposed,
)
from helpers.kalman.recursions import factor_if_identified

UNIDENTIFIED = 4  # beside the ways in which a pass ends
REFINED = 2  # times that the mean of delta is looked at again from where it was found
ROWS = 32  # that are mixed at once


@jitable
def root_of_inverse(S, root):
    """root root' = S^-1, and log|S|; NaN where a pivot of S, scaled to ones, is next to nothing."""
    q = len(S)
    C, logdet = factor_if_identified(S)
    if np.isnan(logdet):
        return logdet
    root[:] = 0.0
    for j in range(q):  # root' = C^-1
        root[j, j] = 1.0 / C[j, j]
        for i in range(j + 1, q):
            x = 0.0
            for l in range(j, i):
                x -= C[i, l] * root[j, l]
            root[j, i] = x / C[i, i]
    return logdet


@jitable
def find_delta(w, x, rows, columns, products, move, S, precision, delta, root):
    """The mean of delta, and the root of its covariance, from the columns of u = F^-1 v and of v.

    Column 0 of both, all `rows` of them, moves to that mean. ``S`` receives that of delta, with the
    precision; ``products`` and ``move`` are room for a square matrix and a row. Returns what delta
    adds to the log-likelihood of the series at its mean; NaN if the data leave a direction open.
    """
    q = len(delta)
    product(w, products, 1.0, transposed(x.v), x.u, x.zero, q + 1, rows, columns)  # V'U
    for i in range(q):
        for j in range(q):
            S[i, j] = precision[i, j] + entry(w, products, i + 1, j + 1)
    logdet = root_of_inverse(S, root)
    if np.isnan(logdet):
        return logdet
    s, y = np.empty(q), np.empty(q)
    for again in range(1 + REFINED):
        if again > 0:
            product(w, products, 1.0, transposed(x.v), x.u, x.zero, q + 1, rows, 1)
        for i in range(q):
            s[i] = -entry(w, products, i + 1, 0)
            for j in range(q):
                s[i] -= precision[i, j] * delta[j]
        for j in range(q):  # the step is root root' s
            y[j] = 0.0
            for i in range(q):
                y[j] += root[i, j] * s[i]
        clear(w, move, 1)
        for i in range(q):
            step = 0.0
            for j in range(q):
                step += root[i, j] * y[j]
            delta[i] += step
            put(w, move.at + i + 1, step)
        for t in range(rows):
            u, v = x.u.at + t * columns, x.v.at + t * columns
            put(w, u, get(w, u) + dot(w, u, move.at, columns))
            put(w, v, get(w, v) + dot(w, v, move.at, columns))
    found = logdet
    for i in range(q):
        for j in range(q):
            found += delta[i] * precision[i, j] * delta[j]
    return -0.5 * found


@jitable
def mix(w, X, rows, columns, mixture, block, zero):
    """The columns of X (rows, columns), times the matrix `mixture`; block is room for ROWS rows."""
    for first in range(0, rows, ROWS):
        count = min(ROWS, rows - first)
        here = below(X, first)
        product(w, block, 1.0, here, mixture, zero, count, columns, columns)
        copy(w, here, block, count)


def _integrated(
    sizes, report, tol, y, c, starts, l, y_bar, c_bar, starts_bar, precision, S, delta, root, value,
    a0, P0, c_none, d_none, T, Z, H, W, a0_bar, P0_bar, c_none_bar, d_none_bar, T_bar, Z_bar, H_bar,
    W_bar,
):  # fmt: skip
    """The series and its columns, by their addresses.

    ``sizes`` are n, p, m, the lengths over time of (no) c and d, T, Z, H, W; q, the length over
    time of c, and 0 or 1: whether there is a way back, and the four of `Wanted`. y (q + 1, n, p),
    d taken off; c (q + 1, n or 1, m); starts (q + 1, m). Returns how it ended; 0 if it could not
    finish.
    """
    num = carray(sizes, 16)
    n, p, m, q, nc = num[0], num[1], num[2], num[9], num[10]
    J = q + 1
    backwards, wanted = num[11] != 0, Wanted(num[12] != 0, num[13] != 0, num[14] != 0, num[15] != 0)
    model = bundle(num, a0, P0, c_none, d_none, T, Z, H, W)
    out = bundle(num, a0_bar, P0_bar, c_none_bar, d_none_bar, T_bar, Z_bar, H_bar, W_bar)
    series = Series(
        np.arange(J), carray(y, (J, n, p)), carray(c, (J, nc, m)), np.ones(J), carray(l, (J, n)),
        carray(y_bar, (J, n, p)), carray(c_bar, (J, nc, m)),
    )  # fmt: skip

    # The pass of a series that never surprises: its gains, and what the covariances give.
    nothing, unused = np.zeros((n, p)), np.zeros((n, p))
    for t in range(n):
        for i in range(p):
            if np.isnan(series.y[0, t, i]):
                nothing[t, i] = np.nan
    covariances, l_of_P, ones = zeros_like(model), np.empty(n), np.ones(n)
    saved = Saved(True, backwards and (wanted.T or wanted.Z))
    plan, columns = np.empty(HEADER, np.int64), padded(J)
    at = padded(lay_out(Sizes(n, p, m), saved, plan))
    x, size = lay_out_columns(at, n, p, m, columns, True)
    step = np.int64(1)
    mixture, block = Mat(size, columns, step), Mat(size + columns * columns, columns, step)
    memory = np.empty(size + (columns + ROWS) * columns + 8)
    start = begin(memory, plan)
    w, header = memory.ctypes.data + 8 * start, memory.view(np.int64)[start:]
    entries, room = np.empty((n, p), np.uint8), np.empty(room_for_indices(n, p, m), np.int64)
    asked = np.zeros(15, np.int64)
    asked[:9] = num[:9]
    asked[9] = GRADIENT if backwards and wanted.matrices else GAINS
    if backwards:
        asked[10:14] = num[12:16]
    how = run(
        address_of_pass(), (w, header, entries, room), asked, carray(report, 3), tol, l_of_P, ones,
        nothing, unused, model, covariances,
    )  # fmt: skip
    if how != DONE:
        return how
    gains, places = np.empty(n, np.int64), indices_in(room, n, p, m)
    gain_of_each_step(places.steady_from, gains)
    observed, varying = Observed(entries, places.same_until), varies(model)
    pattern = listed_pattern(places.pattern)

    clear_sums(w)
    for place in range(x.zero.at, x.s.at):
        put(w, place, 0.0)
    for j in range(J):
        for t in range(n):
            for i in range(p):
                if entries[t, i]:
                    put(w, x.v.at + (t * p + i) * columns + j, series.y[j, t, i])
    beginnings = carray(starts, (J, m))
    for j in range(J):
        put(w, x.g.at + j, 1.0)
        for i in range(m):
            put(w, x.a.at + i * columns + j, beginnings[j, i])
    sweep_forward(
        w, x, columns, 0, model, observed, varying, pattern.T, gains, l_of_P, series, 0, J,
        True,
    )  # fmt: skip
    mean, root_out = carray(delta, q), carray(root, (q, q))
    more = find_delta(
        w, x, n * p, columns, mixture, block, carray(S, (q, q)), carray(precision, (q, q)), mean,
        root_out,
    )  # fmt: skip
    if np.isnan(more):
        return UNIDENTIFIED
    for t in range(n):
        more += l_of_P[t]
        for i in range(p):
            more -= 0.5 * entry(w, x.u, t * p + i, 0) * entry(w, x.v, t * p + i, 0)
    value_out = carray(value, 1)
    value_out[0] = more
    if not backwards:
        memory[0], room[0] = 0.0, 0  # their addresses were good until here
        return DONE
    # The series moves to the mean of delta, each column becomes a standard deviation of it.
    clear(w, mixture, columns)
    put(w, mixture.at, 1.0)
    for i in range(q):
        for j in range(q):
            put(w, mixture.at + (i + 1) * columns + j + 1, root_out[i, j])
    mix(w, x.u, n * p, columns, mixture, block, x.zero)
    if saved.filtered:
        for i in range(q):
            put(w, mixture.at + (i + 1) * columns, mean[i])
        mix(w, x.a_filt, n * m, columns, mixture, block, x.zero)
    clear(w, x.r, m)
    sweep_back(
        w, x, columns, 0, model, observed, varying, pattern.T_t, gains, wanted, series, 0, J,
        out,
    )  # fmt: skip
    hand_over_y(w, x, 0, observed, series, 0, J)
    r = np.empty((m, J))
    for i in range(m):
        for j in range(J):
            r[i, j] = entry(w, x.r, i, j)
    beginnings_bar = carray(starts_bar, (J, m))
    beginnings_bar[:] = r.T
    out.P0[:] += r @ np.ascontiguousarray(r.T) / 2 + covariances.P0
    out.T[:] += covariances.T
    out.Z[:] += covariances.Z
    out.H[:] += covariances.H
    out.W[:] += covariances.W
    memory[0], room[0] = 0.0, 0
    return DONE


INTEGRATED = types.int64(INTEGERS, INTEGERS, types.float64, *[REALS] * 28)
_call_integrated = compiled_once(_integrated, INTEGRATED, "helpers_kalman_integrated")


@kept_on_disk(njit(cache=True, error_model="numpy", nogil=True))
def integrated(
    y, starts, c, P0, T, Z, H, W, precision, backwards, want_matrices, want_T, want_Z, want_W, tol
):  # fmt: skip
    """The log-likelihood with delta integrated out, and its gradient.

    y (q + 1, n, p), the series with d taken off and, with the same gaps, less what delta adds to d;
    starts (q + 1, m) and c (q + 1, n or 1, m) in the same way; P0 (m, m), and T, Z, H, W with an
    axis of length n or 1 for time; precision (q, q).

    Returns how it ended, the value (without the determinant of the precision), the mean of delta,
    root with root root' the covariance of delta, S + precision, the gradients of y, starts and c,
    and those of the model; and a report, whose first entry is the step whose F is not positive
    definite, else n. What is a number is NaN if it did not end well.
    """
    y, starts, c = contiguous(y), contiguous(starts), contiguous(c)
    precision = contiguous(precision)
    J, n, p = y.shape
    q, m = J - 1, len(P0)
    model = copied(np.zeros(m), P0, np.zeros((1, m)), np.zeros((1, p)), T, Z, H, W)
    check(y[0], model, y[0, :, 0])
    if starts.shape != (J, m) or c.shape[0] != J or c.shape[2] != m:
        raise ValueError("the starts or c are not as many or as long as the columns")
    if c.shape[1] != 1 and c.shape[1] != n:
        raise ValueError("c varies over time, but not over as many steps as y has")
    if precision.shape != (q, q):
        raise ValueError("the precision does not have shape (q, q)")
    l, y_bar, starts_bar, c_bar = (
        np.zeros((J, n)), np.zeros(y.shape), np.zeros(starts.shape), np.zeros(c.shape)
    )  # fmt: skip
    S, delta, root, value = np.zeros((q, q)), np.zeros(q), np.zeros((q, q)), np.zeros(1)
    out, report = zeros_like(model), np.array([n, 0, 0])
    sizes = np.array(
        [n, p, m, 1, 1, len(model.T), len(model.Z), len(model.H), len(model.W), q, c.shape[1],
         int(backwards), int(want_matrices), int(want_T), int(want_Z), int(want_W)]
    )  # fmt: skip
    how = _call_integrated(
        sizes.ctypes, report.ctypes, tol, y.ctypes, c.ctypes, starts.ctypes, l.ctypes, y_bar.ctypes,
        c_bar.ctypes, starts_bar.ctypes, precision.ctypes, S.ctypes, delta.ctypes, root.ctypes,
        value.ctypes, model.a0.ctypes, model.P0.ctypes, model.c.ctypes, model.d.ctypes,
        model.T.ctypes, model.Z.ctypes, model.H.ctypes, model.W.ctypes, out.a0.ctypes,
        out.P0.ctypes, out.c.ctypes, out.d.ctypes, out.T.ctypes, out.Z.ctypes, out.H.ctypes,
        out.W.ctypes,
    )  # fmt: skip
    if how == 0:
        raise MemoryError(OUT_OF_MEMORY)
    if how != DONE:
        value[:], y_bar[:], starts_bar[:], c_bar[:] = np.nan, np.nan, np.nan, np.nan
        out.P0[:], out.T[:], out.Z[:] = np.nan, np.nan, np.nan
        out.H[:], out.W[:], delta[:], root[:] = np.nan, np.nan, np.nan, np.nan
    elif backwards:
        # The series' part came with delta, that of column j with column j of the root.
        back = np.zeros((J, J))
        back[0, 0] = 1.0
        back[1:, 0], back[1:, 1:] = delta, root
        y_bar = (back @ y_bar.reshape(J, n * p)).reshape(J, n, p)
        starts_bar = back @ starts_bar
        c_bar = (back @ c_bar.reshape(J, c.shape[1] * m)).reshape(c.shape)
    return how, value[0], delta, root, S, y_bar, starts_bar, c_bar, out, report
