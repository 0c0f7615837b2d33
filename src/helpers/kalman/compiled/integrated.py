"""A series with unknown numbers integrated out, compiled: one pass, and columns through its gains.

Column 0 is the series, the others are what the unknown numbers delta (q,) add to it, as series
with y = 0. Between the way forwards and the way back the columns are mixed: the series moves to
where delta is most likely, the others become steps of one standard deviation around it. What all
of this is for stands in :mod:`helpers.kalman.diffuse`, whose readable loop tests hold it to.
"""

import numpy as np
from numba import types

from helpers.kalman.compiled import overloads  # noqa: F401 (of the readable text)
from helpers.kalman.compiled.door import (
    GAINS,
    GRADIENT,
    READ,
    asked_for,
    check,
    collapses,
    compiled,
    contiguous,
    copied,
    linked,
    linked_pass,
    room_in,
    run_whole,
    saved_of,
    zeros_like,
)
from helpers.kalman.compiled.forward import DONE
from helpers.kalman.compiled.inputs import (
    Arrays,
    Observed,
    Wanted,
    fill,
    first_steps,
    indices_in,
    later,
    listed_pattern,
    model_later,
    varies,
)
from helpers.kalman.compiled.layout import HEADER, Sizes, lay_out_together, space
from helpers.kalman.compiled.sweep import (
    Series,
    add_matrices,
    clear_sums,
    gain_of_each_step,
    hand_over_y,
    lay_out_columns,
    sweep_back,
    sweep_forward,
)
from helpers.kalman.compiled.tiles import (
    Mat,
    clear,
    dot,
    element,
    get,
    jitable,
    padded,
    product,
    put,
    transposed,
)
from helpers.kalman.recursions import factor_if_identified
from helpers.kalman.square_root import root as root_of

UNIDENTIFIED, LATE, LOST = 4, 5, 6  # beside the ways in which a pass ends
# The columns are handed over once the variance due to delta is below WIDE times the rest, for every
# state: a pass that began with more would lose digits of P.
WIDE = 1e3
# And where no pivot of S is below this share of its diagonal: what comes later moves delta by what
# is left of its digits.
TELLING = 1e-6
# And where what comes later leaves this share of delta's variance in every direction: the variance
# given all is a difference, and would lose more digits than that.
LEFT = 1e-5
WORTH_IT = 3  # times what a rotation costs the value, to end the columns for a value alone
REFINED = 2  # times that the mean of delta is looked at again from where it was found


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
            S[i, j] = precision[i, j] + element(w, products, i + 1, j + 1)
    logdet = root_of_inverse(S, root)
    if np.isnan(logdet):
        return logdet
    s, y = np.empty(q), np.empty(q)
    for again in range(1 + REFINED):
        if again > 0:
            product(w, products, 1.0, transposed(x.v), x.u, x.zero, q + 1, rows, 1)
        for i in range(q):
            s[i] = -element(w, products, i + 1, 0)
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
def steps_that_show(y, q):
    """The steps after which as many entries of y (n, p) have been observed as there are numbers."""
    n, p = y.shape
    observed = 0
    for t in range(n):
        for i in range(p):
            observed += not np.isnan(y[t, i])
        if observed >= q:
            return t + 1
    return n


@jitable
def tell_all(S, root):
    """Whether the columns are so far from each other that delta is known well; root'root = S^-1."""
    for j in range(len(S)):
        if not 1.0 > TELLING * S[j, j] * root[j, j] * root[j, j]:
            return False
    return True


@jitable
def state_after(w, x, mean, root, a, P, B):
    """The state after the columns' steps, with delta in what is not known of it.

    Its mean a, its covariance P = P_given + B B' and B = A_t root. Returns whether P is not WIDE.
    """
    s = space(w)
    m, q = B.shape
    for i in range(m):
        a[i] = element(w, x.a, i, 0)
        for j in range(q):
            a[i] += element(w, x.a, i, j + 1) * mean[j]
            B[i, j] = 0.0
            for l in range(q):
                B[i, j] += element(w, x.a, i, l + 1) * root[l, j]
    P[:] = B @ np.ascontiguousarray(B.T)
    narrow = True
    for i in range(m):
        narrow = narrow and P[i, i] <= WIDE * element(w, s.P_filt, i, i)
        for j in range(m):
            P[i, j] += 0.5 * (element(w, s.P_filt, i, j) + element(w, s.P_filt, j, i))
    return narrow


@jitable
def columns_for_the_rest(w, x, mixture, mean, root, B, r, N):
    """Write the mixture for the way back through the first steps, and where it begins.

    From r and N of the steps after them. The mean and the root become those of delta given all.

    What the covariances and the columns give together is -(N - rho S^-1 rho'), in which S is that
    of all steps, and which is -N at the k-th. With root root' = S_k^-1, B = A_{k+1} root and R the
    root of B'NB, S^-1 = root (I - B'NB) root'. Let n and p be the N and the rho root that the first
    k steps make of zeros after them, and let L lead from there to the k-th. Then it is

        -n + (p + L'NB) (p + L'NB)' - L' (N + NB B'N) L - p R R'p' ,

    so q columns that begin with NB, m with a root of N + NB B'N and weight -1, and q that begin
    with nothing, of root R and weight -1. No term is larger than what the first steps say.

    Returns whether the root of delta's covariance has kept its digits, and the others are numbers:
    what the later steps say may be nothing, and the rounding of a zero has no root.
    """
    m, q = B.shape
    B_t = np.ascontiguousarray(B.T)
    NB = N @ B
    told = B_t @ NB
    after_t, _ = root_of(N + NB @ np.ascontiguousarray(NB.T))
    told_t, _ = root_of(told)
    shift, less = root @ (B_t @ r), root @ np.ascontiguousarray(told_t.T)
    mean += shift
    for i in range(q):
        row = mixture.at + (i + 1) * mixture.ld
        put(w, row, shift[i])
        for j in range(q):
            put(w, row + 1 + j, root[i, j])
        for j in range(len(told_t)):
            put(w, row + 1 + q + m + j, less[i, j])
    for j in range(1 + q, 1 + q + m + q):
        put(w, x.g.at + j, -1.0)
    for i in range(m):
        row = x.r.at + i * x.r.ld
        put(w, row, r[i])
        for j in range(q):
            put(w, row + 1 + j, -NB[i, j])
        for j in range(len(after_t)):
            put(w, row + 1 + q + j, after_t[j, i])
    left_t, order = root_of(np.eye(q) - told)
    left = np.zeros((q, q))
    left[:, : len(left_t)] = left_t.T
    root[:] = root @ left
    kept = len(left_t) == q and left_t[-1, order[-1]] ** 2 >= LEFT  # the pivots fall
    return kept and not (np.isnan(after_t).any() or np.isnan(told_t).any())


@jitable
def run_columns(
    k, series, starts, model, out, wanted, backwards, precision, S, mean, root, value, starts_bar,
    tol, report,
):  # fmt: skip
    """The columns through the first k steps, and an ordinary pass through the others.

    With k < n there is a way back, and the series are one: the columns of y and c are zeros.
    Returns how it ended; UNIDENTIFIED and LATE before anything but S, mean, root and report is
    written, LOST where the columns are to go through all steps.
    """
    n, p, m, q, members = *series.y.shape[1:], len(model.P0), len(mean), len(series.y)
    # The pass of a series that never surprises: its gains, and what the covariances give. Its last
    # step, if it is the one after the columns' last, sees nothing: P_filt is the P that it began
    # with.
    steps = k if k == n else k + 1
    nothing, unused = np.zeros((steps, p)), np.zeros((steps, p))
    for t in range(steps):
        for i in range(p):
            if t == k or np.isnan(series.y[0, t, i]):
                nothing[t, i] = np.nan
    here, out_here = first_steps(model, steps), first_steps(out, steps)
    covariances, l_of_P, ones = zeros_like(here), np.empty(steps), np.ones(n)
    purpose = GRADIENT if backwards and wanted.matrices else GAINS
    asked = asked_for(purpose, wanted, False)
    saved = saved_of(asked)
    count = q + 1 if k == n else 1 + q + m + q
    columns, mixed = padded(q + 1), padded(count)
    plan, step = np.empty(HEADER, np.int64), np.int64(1)
    at = padded(lay_out_together(Sizes(steps, p, m), saved, plan))
    x, at = lay_out_columns(at, steps, p, m, columns, True)
    back, at = lay_out_columns(at, steps, p, m, mixed, False)
    move, mixture = Mat(at, columns, step), Mat(at + columns, mixed, step)
    memory = np.empty(at + columns + columns * mixed + 8)
    room = room_in(memory, plan, steps, p, m)
    w, entries = room.w, room.entries
    status = run_whole(
        (room, nothing, here, covariances, l_of_P, ones[:steps], unused, asked,
         tol if k == n else 0.0, report)
    )  # fmt: skip
    if status != DONE:
        return status
    gains, places = np.empty(steps, np.int64), indices_in(room.indices, steps, p, m)
    gain_of_each_step(places.steady_from, gains)
    observed, varying = Observed(entries, places.same_until), varies(here)
    pattern = listed_pattern(places.pattern)

    clear_sums(w)
    for place in range(x.zero.at, x.s.at):
        put(w, place, 0.0)
    for j in range(q + 1):
        if j < members:
            for t in range(k):
                for i in range(p):
                    if entries[t, i]:
                        put(w, x.v.at + (t * p + i) * columns + j, series.y[j, t, i])
        for i in range(m):
            put(w, x.a.at + i * columns + j, starts[j, i])
    sweep_forward(
        w, x, columns, 0, k, here, observed, varying, pattern.T, gains, l_of_P, series, 0,
        members, True,
    )  # fmt: skip
    mean[:] = 0.0
    more = find_delta(w, x, k * p, columns, mixture, move, S, precision, mean, root)
    if np.isnan(more):
        return UNIDENTIFIED
    for t in range(k):
        more += l_of_P[t]
        for i in range(p):
            more -= 0.5 * element(w, x.u, t * p + i, 0) * element(w, x.v, t * p + i, 0)

    for place in range(back.zero.at, back.s.at):
        put(w, place, 0.0)
    for j in range(count):
        put(w, back.g.at + j, 1.0)
    clear(w, back.r, m)
    clear(w, mixture, columns)
    put(w, mixture.at, 1.0)
    if k < n:
        a, P, B, r, P_bar = (
            np.empty(m), np.empty((m, m)), np.empty((m, q)), np.zeros(m), np.zeros((m, m))
        )  # fmt: skip
        if not (tell_all(S, root) and state_after(w, x, mean, root, a, P, B)):
            return LATE
        rest, out_rest, l = model_later(model, k), model_later(out, k), np.empty(n - k)
        c, c_bar = later(series.c[0], k), later(series.c_bar[0], k)
        rest = Arrays(a, P, c, rest.d, rest.T, rest.Z, rest.H, rest.W)
        out_rest = Arrays(
            r, P_bar, c_bar, out_rest.d, out_rest.T, out_rest.Z, out_rest.H, out_rest.W
        )
        of_rest = Wanted(True, wanted.T, wanted.Z, wanted.W, wanted.columns)
        status = linked_pass(
            (series.y[0, k:], rest, out_rest, l, ones[k:], series.y_bar[0, k:],
             asked_for(GRADIENT, of_rest, True), tol, report)
        )  # fmt: skip
        report[0] += k
        if status != DONE:
            return status
        more += np.sum(l)
        N = r.reshape((m, 1)) * r - 2.0 * P_bar
        if not columns_for_the_rest(w, back, mixture, mean, root, B, r, N):
            return LOST
    else:
        for i in range(q):
            for j in range(q):
                put(w, mixture.at + (i + 1) * mixed + j + 1, root[i, j])
    value[0] = more
    if backwards:
        # The series moves to the mean of delta, each column becomes a standard deviation of it.
        product(w, back.u, 1.0, x.u, mixture, back.zero, k * p, columns, mixed)
        for i in range(q):
            put(w, mixture.at + (i + 1) * mixed, mean[i])
        if saved.filtered > 0:
            product(w, back.a_filt, 1.0, x.a_filt, mixture, back.zero, k * m, columns, mixed)
        sweep_back(
            w, back, mixed, 0, k, here, observed, varying, pattern.T_t, gains, wanted, series, 0,
            members, out_here,
        )  # fmt: skip
        hand_over_y(w, back, 0, k, observed, series, 0, members)
        rg, r_t = np.empty((m, count)), np.empty((count, m))
        for j in range(count):
            for i in range(m):
                r_t[j, i] = element(w, back.r, i, j)
                rg[i, j] = r_t[j, i] * get(w, back.g.at + j)
        starts_bar[:] = 0.0
        starts_bar[0] = r_t[0]
        for i in range(q):
            for j in range(count):
                z = get(w, mixture.at + (i + 1) * mixed + j)
                for l in range(m):
                    starts_bar[i + 1, l] += z * rg[l, j]
        out.P0[:] += rg @ r_t / 2
        add_matrices(out_here, 1.0, covariances)
    report[1] = k
    memory[0], room.indices[0] = 0.0, 0  # Numba frees an array after its last use
    return DONE


@jitable
def through_enough(
    series, starts, model, out, wanted, backwards, precision, S, delta, root, value, starts_bar,
    tol, report,
):  # fmt: skip
    """`run_columns` as many steps as it takes; returns how it ended.

    There are as many series as starts, or one where the columns of y and c are zeros.
    """
    J, n, _ = series.y.shape
    k, q, m = n, len(delta), len(model.P0)
    never_steady = tol == 0.0 or varies(model)
    if J == 1 and q > 0 and (backwards or collapses(series.y[0], m, never_steady, WORTH_IT)):
        # Once delta is known the steps are those of any model: as soon as there are as many
        # observations as numbers, or later where these leave a direction open, or nearly so. For a
        # value alone they need a way back for what delta is, which pays where they are rotated.
        k = steps_that_show(series.y[0], q)
    status = np.int64(LATE)
    while status == LATE or status == UNIDENTIFIED or status == LOST:
        if 2 * k > n:
            k = n
        status = np.int64(run_columns(
            k, series, starts, model, out, wanted, backwards, precision, S, delta, root, value,
            starts_bar, tol, report,
        ))  # fmt: skip
        if k == n:
            break
        k *= 2
        if status == LOST:
            k = n
            series.y_bar[:], series.c_bar[:], out.T[:], out.Z[:] = 0.0, 0.0, 0.0, 0.0
            out.H[:], out.W[:], out.d[:] = 0.0, 0.0, 0.0
    return status


@compiled
def integrated(
    y, starts, c, P0, T, Z, H, W, precision, backwards, want_matrices, want_T, want_Z, want_W, tol
):  # fmt: skip
    """The log-likelihood with delta integrated out, and its gradient.

    y (q + 1, n, p), the series with d taken off and, with the same gaps, less what delta adds to d;
    starts (q + 1, m) and c (q + 1, n or 1, m) in the same way; P0 (m, m), and T, Z, H, W with an
    axis of length n or 1 for time; precision (q, q). Where delta enters the first state alone, y
    and c may have the series alone, (1, n, p) and (1, n or 1, m): then the columns end as soon as
    delta is known well, and an ordinary pass goes on.

    Returns how it ended, the value (without the determinant of the precision), the mean of delta,
    root with root root' the covariance of delta, S + precision, the gradients of y, starts and c,
    and those of the model; and a report, whose first entry is the step whose F is not positive
    definite, else n, and whose second is the number of steps that the columns took. What is a
    number is NaN if it did not end well.
    """
    y, starts, c = contiguous(y), contiguous(starts), contiguous(c)
    precision = contiguous(precision)
    J, n, p = y.shape
    q, m = len(starts) - 1, len(P0)
    model = copied(np.zeros(m), P0, np.zeros((1, m)), np.zeros((1, p)), T, Z, H, W)
    check(y[0], model, y[0, :, 0])
    if J != q + 1 and J != 1:
        raise ValueError("y is neither the series and its columns nor the series alone")
    if starts.shape[1] != m or c.shape[0] != J or c.shape[2] != m:
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
    wanted = Wanted(want_matrices, want_T, want_Z, want_W, np.arange(m))
    series = Series(np.arange(J), y, c, np.ones(J), l, y_bar, c_bar)
    status = through_enough(
        series, starts, model, out, wanted, backwards, precision, S, delta, root, value, starts_bar,
        tol, report,
    )  # fmt: skip
    if status != DONE:
        value[:], y_bar[:], starts_bar[:], c_bar[:] = np.nan, np.nan, np.nan, np.nan
        delta[:], root[:] = np.nan, np.nan
        fill(out, np.nan)
    elif backwards and J > 1:
        # The series' part came with delta, that of column j with column j of the root.
        back = np.zeros((J, J))
        back[0, 0] = 1.0
        back[1:, 0], back[1:, 1:] = delta, root
        y_bar = (back @ y_bar.reshape(J, n * p)).reshape(J, n, p)
        c_bar = (back @ c_bar.reshape(J, c.shape[1] * m)).reshape(c.shape)
    return status, value[0], delta, root, S, y_bar, starts_bar, c_bar, out, report


linked_integrated = linked(
    integrated,
    (READ[3], READ[2], READ[3], READ[2], *[READ[3]] * 4, READ[2], *[types.boolean] * 5,
     types.float64),
)  # fmt: skip
