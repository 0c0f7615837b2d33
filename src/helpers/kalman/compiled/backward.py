"""The compiled disturbance smoother: the gradient from the last step to the first.

Labels name the equations of the chapters "The adjoint is the smoother" and "Steady state".
"""

import numpy as np

from helpers.kalman.compiled.forward import pick
from helpers.kalman.compiled.inputs import load_step
from helpers.kalman.compiled.layout import sizes, space
from helpers.kalman.compiled.step import smooth
from helpers.kalman.compiled.tiles import (
    add,
    add_picked,
    axpy,
    below,
    clear,
    copy,
    element,
    get,
    jitable,
    product,
    put,
    row_product,
    symmetrize,
    transpose,
    transposed,
)
from helpers.kalman.recursions import at_step


@jitable
def congruence(w, out, X, A, C, half, m):
    """out = C + A' X A, square; half is room for X A, out is none of the others but perhaps C."""
    s = space(w)
    product(w, half, 1.0, X, A, s.zero, m, m, m)
    product(w, out, 1.0, transposed(A), half, C, m, m, m)


@jitable
def lyapunov(w, X, total, totals, sums, steps):
    """total = sum over i < steps of L'^i X L^i, and X1 = L^steps; with L in its place.

    With `sums`, totals = the sum of the totals after 0, 1, ..., steps - 1 terms. Blocks of (size,
    L^size, total, totals) combine (eq-steady-combine), and their sizes double: X and L are lost.
    """
    s = space(w)
    m = sizes(w).m
    A, A_block, block, block_sums, half, other = s.X1, s.L, X, s.X3, s.B, s.P_filt
    clear(w, total, m)
    clear(w, block_sums, m)
    if sums:
        clear(w, totals, m)
    empty, size, left = True, 1.0, steps
    while True:
        if left & 1:
            if empty:
                copy(w, A, A_block, m)
                copy(w, total, block, m)
                if sums:
                    copy(w, totals, block_sums, m)
                empty = False
            else:
                if sums:
                    add(w, totals, size, total, m)
                    congruence(w, totals, block_sums, A, totals, half, m)
                congruence(w, total, block, A, total, half, m)
                product(w, half, 1.0, A, A_block, s.zero, m, m, m)
                A, half = half, A
        left >>= 1
        if left == 0:
            break
        if sums:
            product(w, half, 1.0, block_sums, A_block, s.zero, m, m, m)
            add(w, block_sums, size, block, m)
            product(w, other, 1.0, transposed(A_block), half, block_sums, m, m, m)
            block_sums, other = other, block_sums
        congruence(w, other, block, A_block, block, half, m)
        block, other = other, block
        product(w, half, 1.0, A_block, A_block, s.zero, m, m, m)
        A_block, half = half, A_block
        size *= 2.0
    symmetrize(w, total, m)
    if sums:
        symmetrize(w, totals, m)
    return A


@jitable
def steady_backward(w, k, end, N, wanted):
    """Steps end - 1 to k, a stretch of steady state: r and e step by step, N and its sums at once.

    N is that of step end - 1 and becomes that of step k - 1; what the steps add to D_sum, N_sum,
    T_bar and Z_bar is added.
    """
    s = space(w)
    _, p, m = sizes(w)
    steps = end - k
    Kf, F_inv = below(s.Kf, k * p), below(s.F_inv, k * p)
    u, e, r, r_next = below(s.u, k), below(s.e, k), below(s.r, k), below(s.r, k + 1)
    product(w, s.K, 1.0, Kf, s.T_t, s.zero, p, m, m)
    transpose(w, s.K_t, s.K, p, m)
    product(w, s.L, -1.0, s.K_t, s.Z, s.T, m, p, m)
    product(w, r, 1.0, u, s.Z, s.zero, steps, p, m)
    for t in range(end - 1, k - 1, -1):
        r_t = below(s.r, t)
        row_product(w, r_t.at, 1.0, below(s.r, t + 1).at, s.L, r_t.at, m, m)
    product(w, e, -1.0, r_next, s.K_t, u, steps, m, p)
    if not wanted.matrices:
        return

    # The sum S of the N of these steps, and the N before them: what the steps make of the N that
    # came from later ones, L'^i N L^i, and what they would make of zero.
    product(w, s.M, 1.0, F_inv, s.Z, s.zero, p, p, m)
    product(w, s.X2, 1.0, transposed(s.Z), s.M, s.zero, m, p, m)
    copy(w, s.X4, s.L, m)
    S, before, later = s.S, s.N_k, s.N_end
    A = lyapunov(w, s.X2, before, S, True, steps)
    if end < sizes(w).n:
        congruence(w, before, N, A, before, later, m)
        copy(w, s.L, s.X4, m)
        lyapunov(w, N, later, later, False, steps)
        add(w, S, 1.0, later, m)
    copy(w, N, before, m)
    KS = s.M
    product(w, KS, 1.0, s.K, S, s.zero, p, m, m)
    product(w, s.D_sum, 1.0, KS, s.K_t, s.D_sum, p, m, p)
    add(w, s.D_sum, float(steps), F_inv, p)
    add(w, s.N_sum, 1.0, S, m)
    if wanted.T or wanted.Z:
        q = len(wanted.columns)
        TP, a_filt, ahat = below(s.TP, k * m), below(s.a_filt, k), below(s.ahat, k)
        product(w, a_filt, 1.0, below(s.v, k), Kf, below(s.a, k), steps, p, m)
        if q < m:
            for t in range(k, end):
                pick(w, below(s.ahat, t).at, below(s.a_filt, t).at, wanted.columns)
            a_filt = ahat
        product(w, ahat, 1.0, r_next, TP, a_filt, steps, m, q)
        if wanted.T:
            product(w, s.T_bar, -1.0, S, TP, s.T_bar, m, m, q)
        if wanted.Z:
            product(w, s.Z_bar, 1.0, KS, TP, s.Z_bar, p, m, q)
            add_picked(w, s.Z_bar, -float(steps), Kf, p, wanted.columns)


@jitable
def take_in(w, N, first, weight):
    """From equal weights, which come last, to others: r and N before step `first`."""
    s = space(w)
    m, r = sizes(w).m, below(s.r, first)
    for i in range(m):
        for j in range(m):
            x = element(w, N, i, j) - get(w, r.at + i) * get(w, r.at + j)
            put(w, N.at + i * N.ld + j, weight * x)
    axpy(w, r.at, weight, r.at, s.zero.at, m)


@jitable
def backward(w, observed, model, varying, T_entries, wanted, l_bar, equal_from, steady_from, out):
    """From the last step to the first; adds the gradients of the sum of l weighted with l_bar.

    To those of the matrices and of a0 in `out`; c_bar, d_bar and y_bar are left to
    `accumulate_vectors`. T_entries are those of T'. With equal weights (form 2), as those from step
    `equal_from` on are, the adjoint of P is (r r' - N) / 2, and the weight comes last. With others
    (form 1) it is -N / 2, where N takes in, step by step, what r r' holds otherwise.
    """
    s = space(w)
    n, p, m = sizes(w)
    equal, weight, stop, first = True, l_bar[n - 1], n, np.int64(0)
    N, N_before = s.N, s.P_next
    clear(w, below(s.r, n), 1)
    clear(w, N, m)
    clear(w, s.N_sum, m)
    clear(w, s.T_bar, m)
    clear(w, s.Z_bar, p)
    clear(w, s.D_sum, p)
    t = n - 1
    while t >= 0:
        if t < n - 1 and (varying or observed.same_until[t] == t + 1):
            load_step(w, t, model, observed)
        if steady_from[t] >= 0:
            steady_backward(w, steady_from[t], t + 1, N, wanted)
            t = steady_from[t] - 1
            continue
        if equal and t < equal_from:
            if not varying:
                accumulate_all(w, equal_from, n, wanted, True, weight, out)
            take_in(w, N, equal_from, weight)
            equal, weight, stop = False, 1.0, equal_from
        if wanted.W and not varying:
            add(w, s.N_sum, 1.0, N, m)
        step_back(w, t, N, N_before, T_entries, wanted, l_bar[t], equal)
        if wanted.matrices:
            if varying:
                if wanted.W:
                    accumulate_W(w, t, t + 1, N, equal, weight, out)
                accumulate(w, t, t + 1, wanted, equal, weight, out)
            N, N_before = N_before, N
        t -= 1
    if wanted.matrices:
        if not varying:
            accumulate_all(w, first, stop, wanted, equal, weight, out)
        for i in range(m):
            for j in range(m):
                x = get(w, s.r.at + i) * get(w, s.r.at + j) if equal else 0.0
                x -= element(w, N, i, j)
                out.P0[i, j] = 0.5 * weight * x
    for j in range(m):
        out.a0[j] = weight * get(w, s.r.at + j)


@jitable
def step_back(w, t, N, N_before, T_lists, wanted, g, equal):
    """Step t: its r, e and ahat, N_before from N, and what it adds to D_sum, Z_bar and T_bar."""
    s = space(w)
    _, p, m = sizes(w)
    filtered = wanted.T or wanted.Z
    kept = t if filtered else 0
    a_filt = below(s.a_filt, kept)
    if filtered and len(wanted.columns) < m:
        pick(w, s.picked.at, a_filt.at, wanted.columns)
        a_filt = s.picked
    smooth(
        w, t, below(s.r, t), below(s.r, t + 1), below(s.e, t), below(s.u, t), below(s.Kf, t * p),
        below(s.F_inv, t * p), a_filt, below(s.TP, kept * m), below(s.ahat, kept), N, N_before,
        T_lists, wanted, 1.0 if equal else g, equal,
    )  # fmt: skip


@jitable
def accumulate_vectors(w, equal_from, weight, c_bar, d_bar, y_bar):
    """Add the gradients with respect to c and d, and write that of y.

    The weight of the steps from `equal_from` on is not in r and e yet.
    """
    s = space(w)
    n, p, m = sizes(w)
    varying_c, varying_d = len(c_bar) > 1, len(d_bar) > 1
    clear(w, s.row, 1)
    for t in range(n):  # without views of the rows, which would take longer than what is added
        g = weight if t >= equal_from else 1.0
        if varying_c:
            for j in range(m):
                c_bar[t, j] += g * element(w, s.r, t + 1, j)
        else:
            axpy(w, s.row.at, g, below(s.r, t + 1).at, s.row.at, m)
        for i in range(p):
            x = g * element(w, s.e, t, i)
            d_bar[t if varying_d else 0, i] += x
            y_bar[t, i] = -x
    if not varying_c:
        for j in range(m):
            c_bar[0, j] += get(w, s.row.at + j)


@jitable
def hand_over(w, A, weight, columns, out):
    """Add weight A to the `columns` of `out`, and leave zeros in A."""
    rows = len(out)
    for i in range(rows):
        for j in range(len(columns)):
            out[i, columns[j]] += weight * element(w, A, i, j)
    clear(w, A, rows)


@jitable
def accumulate(w, first, stop, wanted, equal, weight, out):
    """Those of T, Z and H from the steps first to stop - 1: outer products as one product."""
    s = space(w)
    _, p, m = sizes(w)
    steps, q = stop - first, len(wanted.columns)
    e, r_next = below(s.e, first), below(s.r, first + 1)
    product(w, s.F, 1.0 if equal else 0.0, transposed(e), e, s.zero, p, steps, p)
    H_bar = at_step(out.H, first)
    for i in range(p):
        for j in range(p):
            x = element(w, s.F, i, j) - element(w, s.D_sum, i, j)
            y = element(w, s.F, j, i) - element(w, s.D_sum, j, i)
            H_bar[i, j] += 0.25 * weight * (x + y)
    clear(w, s.D_sum, p)
    if wanted.T:
        ahat = below(s.ahat, first)
        product(w, s.T_bar, 1.0, transposed(r_next), ahat, s.T_bar, m, steps, q)
        hand_over(w, s.T_bar, weight, wanted.columns, at_step(out.T, first))
    if wanted.Z:
        ahat = below(s.ahat, first)
        product(w, s.Z_bar, 1.0, transposed(e), ahat, s.Z_bar, p, steps, q)
        hand_over(w, s.Z_bar, weight, wanted.columns, at_step(out.Z, first))


@jitable
def accumulate_all(w, first, stop, wanted, equal, weight, out):
    """Those of T, Z, H and W from the steps first to stop - 1; leaves zeros in the sums."""
    s = space(w)
    accumulate(w, first, stop, wanted, equal, weight, out)
    if wanted.W:
        accumulate_W(w, first, stop, s.N_sum, equal, weight, out)
        clear(w, s.N_sum, sizes(w).m)


@jitable
def accumulate_W(w, first, stop, N, equal, weight, out):  # noqa: N802
    """That of W: (sum r r' - N) / 2 over the steps first to stop - 1, N being their sum.

    Of N nothing is read above the diagonal.
    """
    s = space(w)
    m = sizes(w).m
    r_next = below(s.r, first + 1)
    product(w, s.X1, 1.0 if equal else 0.0, transposed(r_next), r_next, s.zero, m, stop - first, m)
    W_bar = at_step(out.W, first)
    for i in range(m):
        for j in range(i + 1):
            x = 0.5 * (element(w, s.X1, i, j) + element(w, s.X1, j, i)) - element(w, N, i, j)
            W_bar[i, j] += 0.5 * weight * x
            if i > j:
                W_bar[j, i] += 0.5 * weight * x
