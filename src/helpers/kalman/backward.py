"""The compiled disturbance smoother: the gradient from the last step to the first.

Labels name the equations of the chapters "The adjoint is the smoother" and "Steady state".
"""

import numpy as np

from helpers.kalman.products import (
    dot,
    get,
    jit,
    product,
    put,
    row_product,
    sparse_product,
    symmetrize,
    transpose,
)
from helpers.kalman.workspace import (
    add,
    at_step,
    below,
    clear,
    copy,
    entry,
    load_step,
    same_row,
    turned,
)


@jit
def doubling(w, s, steps, m):
    """Run N <- N_1 + L' N L from zero: N after `steps` times, N_sum the sum of the N before.

    On entry N is N_1. Blocks (size, L^size, N, N_sum) combine: eq-steady-combine.
    """
    A, A_block, N_block, sum_block, half, other = s.X1, s.L, s.X2, s.X3, s.B, s.P_filt
    copy(w, N_block, s.N, m)
    clear(w, sum_block, m)
    clear(w, s.N, m)
    clear(w, s.N_sum, m)
    empty, size, left = True, 1.0, steps
    while True:
        if left & 1:
            if empty:
                copy(w, A, A_block, m)
                copy(w, s.N, N_block, m)
                copy(w, s.N_sum, sum_block, m)
                empty = False
            else:
                add(w, s.N_sum, size, s.N, m)
                product(w, half, 1.0, sum_block, A, s.zero, m, m, m)
                product(w, s.N_sum, 1.0, turned(A), half, s.N_sum, m, m, m)
                product(w, half, 1.0, N_block, A, s.zero, m, m, m)
                product(w, s.N, 1.0, turned(A), half, s.N, m, m, m)
                product(w, half, 1.0, A, A_block, s.zero, m, m, m)
                A, half = half, A
        left >>= 1
        if left == 0:
            break
        product(w, half, 1.0, sum_block, A_block, s.zero, m, m, m)
        add(w, sum_block, size, N_block, m)
        product(w, other, 1.0, turned(A_block), half, sum_block, m, m, m)
        sum_block, other = other, sum_block
        product(w, half, 1.0, N_block, A_block, s.zero, m, m, m)
        product(w, other, 1.0, turned(A_block), half, N_block, m, m, m)
        N_block, other = other, N_block
        product(w, half, 1.0, A_block, A_block, s.zero, m, m, m)
        A_block, half = half, A_block
        size *= 2.0
    symmetrize(w, s.N, m)
    symmetrize(w, s.N_sum, m)


@jit
def settled_backward(w, s, k, sizes, asked):
    """Steps n - 1..k: r and e step by step, N and the sums over N by doubling."""
    n, p, m, r = sizes
    left = n - k
    Kf, F_inv = below(s.Kf, k * p), below(s.F_inv, k * p)
    v, u, e, adjoint, r_next = (
        below(s.v, k),
        below(s.u, k),
        below(s.e, k),
        below(s.r, k),
        below(s.r, k + 1),
    )
    product(w, s.K, 1.0, Kf, s.T_t, s.zero, p, m, m)
    transpose(w, s.K_t, s.K, p, m)
    product(w, s.L, -1.0, s.K_t, s.Z, s.T, m, p, m)
    product(w, adjoint, 1.0, u, s.Z, s.zero, left, p, m)
    for t in range(n - 1, k - 1, -1):
        r_t = below(s.r, t)
        row_product(w, r_t.at, 1.0, below(s.r, t + 1).at, s.L, r_t.at, m, m)
    product(w, e, -1.0, r_next, s.K_t, u, left, m, p)
    if not asked.matrices:
        return
    product(w, s.M, 1.0, F_inv, s.Z, s.zero, p, p, m)
    product(w, s.N, 1.0, turned(s.Z), s.M, s.zero, m, p, m)
    doubling(w, s, left, m)
    KS = s.M  # K' N_sum
    product(w, KS, 1.0, s.K, s.N_sum, s.zero, p, m, m)
    product(w, s.D_sum, 1.0, KS, s.K_t, s.zero, p, m, p)
    add(w, s.D_sum, float(left), F_inv, p)
    if asked.T or asked.Z:
        TP, a_filt, ahat = below(s.TP, k * m), below(s.a_filt, k), below(s.ahat, k)
        product(w, a_filt, 1.0, v, Kf, below(s.a, k), left, p, m)
        product(w, ahat, 1.0, r_next, TP, a_filt, left, m, m)
        if asked.T:
            product(w, s.T_bar, -1.0, s.N_sum, TP, s.zero, m, m, m)
        if asked.Z:
            product(w, s.Z_bar, 1.0, KS, TP, s.zero, p, m, m)
            add(w, s.Z_bar, -float(left), Kf, p)


@jit
def backward(
    w, s, k, observed, varying, sparse, start, index, model, sizes, asked, l_bar, equal, out
):
    """From step n - 1 to 0; `out` becomes the gradient of the sum of l weighted with l_bar.

    With equal weights (form 2) the adjoint of P is (r r' - N) / 2, and the weight comes last. With
    others (form 1) it is -N / 2, where N takes in, step by step, what r r' holds otherwise.
    """
    n, p, m, r = sizes
    weight = l_bar[0] if equal else 1.0
    clear(w, below(s.r, n), 1)
    if k < n:
        settled_backward(w, s, k, sizes, asked)
    N, N_prev, B, S = s.N, s.P_next, s.B, s.P
    for t in range(k - 1, -1, -1):
        if t < n - 1 and (varying or not same_row(observed, t, t + 1)):
            load_step(w, s, t, model, observed, sizes)
        Kf, F_inv = below(s.Kf, t * p), below(s.F_inv, t * p)
        r_next, r_t, e, u = below(s.r, t + 1), below(s.r, t), below(s.e, t), below(s.u, t)
        row_product(w, s.row.at, 1.0, r_next.at, s.T, s.zero.at, m, m)
        if not equal:
            u = s.gu
            clear(w, u, 1)
            add(w, u, l_bar[t], below(s.u, t), 1)
        if p == 1:
            clear(w, e, 1)
            put(w, e.at, get(w, u.at) - dot(w, s.row.at, Kf.at, m))
        else:
            transpose(w, s.K_t, Kf, p, m)
            row_product(w, e.at, -1.0, s.row.at, s.K_t, u.at, m, p)
        row_product(w, r_t.at, 1.0, e.at, s.Z, s.row.at, p, m)  # eq-adjoint-r-recursion
        if not asked.matrices:
            continue
        TP, ahat = below(s.TP, t * m), below(s.ahat, t)
        if (asked.T or asked.Z) and t == n - 1:  # r and N are zero
            copy(w, ahat, below(s.a_filt, t), 1)
        elif asked.T or asked.Z:
            row_product(w, ahat.at, 1.0, r_next.at, TP, below(s.a_filt, t).at, m, m)
        if asked.W:
            if varying:
                gather_shocks(w, s, t, t + 1, N, model, sizes, equal, weight, out)
            else:
                add(w, s.N_sum, 1.0, N, m)
        if asked.T and t < n - 1:
            product(w, s.T_bar, -1.0, N, TP, s.T_bar, m, m, m)

        if sparse:
            sparse_product(w, N_prev, s.T_t, start, index, N, s.zero, m, False)
            transpose(w, B, N_prev, m, m)
        else:
            product(w, B, 1.0, N, s.T, s.zero, m, m, m)
        product(w, s.K, 1.0, Kf, s.T_t, s.zero, p, m, m)
        product(w, s.M, -1.0, s.K, B, s.zero, p, m, m)  # -Kf' T' N T
        if asked.Z:
            if t < n - 1:
                product(w, s.KN, 1.0, s.K, N, s.zero, p, m, m)
                product(w, s.Z_bar, 1.0, s.KN, TP, s.Z_bar, p, m, m)
            add(w, s.Z_bar, -1.0 if equal else -l_bar[t], Kf, p)
        if not equal:
            unequal(w, s, t, Kf, F_inv, l_bar[t], TP, ahat, sizes, asked)
        elif p == 1:
            put(w, s.D.at, get(w, F_inv.at) - dot(w, s.M.at, Kf.at, m))  # eq-adjoint-N
        else:
            product(w, s.D, -1.0, s.M, s.K_t, F_inv, p, m, p)  # eq-adjoint-N
        add(w, s.D_sum, 1.0, s.D, p)
        # N_{t-1} = T' N T + Z' Y + Y' Z with Y = D Z / 2 - Kf' T' N T:
        # eq-adjoint-sparse, eq-oneop-shared
        product(w, s.YZ, 0.5, s.D, s.Z, s.M, p, p, m)
        copy(w, below(s.ZY, p), s.YZ, p)
        product(w, S, 1.0, turned(s.ZY), s.YZ, s.zero, m, 2 * p, m, True)
        if sparse:
            sparse_product(w, N_prev, s.T_t, start, index, B, S, m, True)
        else:
            product(w, N_prev, 1.0, turned(s.T), B, S, m, m, m, True)
        symmetrize(w, N_prev, m)
        N, N_prev = N_prev, N
        if varying:
            gather(w, s, t, t + 1, model, sizes, asked, equal, weight, out)
    if asked.matrices:
        if not varying:
            first = np.int64(0)  # a bare 0 would be a type of its own, and compiled apart
            gather(w, s, first, n, model, sizes, asked, equal, weight, out)
            if asked.W:
                gather_shocks(w, s, first, n, s.N_sum, model, sizes, equal, weight, out)
        for i in range(m):
            for j in range(m):
                x = get(w, s.r.at + i) * get(w, s.r.at + j) if equal else 0.0
                x -= entry(w, N, i, j)
                out.P0[i, j] = 0.5 * weight * x
    for j in range(m):
        out.a0[j] = weight * get(w, s.r.at + j)


@jit
def rank_one(w, A, alpha, x, y, rows, cols):
    """A += alpha x' y, for rows x and y."""
    product(w, A, alpha, turned(x), y, A, rows, np.int64(1), cols)


@jit
def unequal(w, s, t, Kf, F_inv, weight, TP, ahat, sizes, asked):
    """What the step adds when weights differ: D and M take in the products of u with the rest.

    D = g (F^-1 - u u') + Kf' S Kf + w u' + u w' with w = Kf' T' r = g u - e, and M = -Kf' S - u s'
    with s = T' r; the smoothed state in Z_bar splits into e a_filt' + u (P_filt s)'.
    """
    n, p, m, r = sizes
    u, e = below(s.u, t), below(s.e, t)
    for i in range(p):
        for j in range(p):
            u_i, u_j = get(w, u.at + i), get(w, u.at + j)
            w_i, w_j = weight * u_i - get(w, e.at + i), weight * u_j - get(w, e.at + j)
            x = weight * (entry(w, F_inv, i, j) - u_i * u_j) + w_i * u_j + u_i * w_j
            put(w, s.D.at + i * s.D.ld + j, x)
    transpose(w, s.K_t, Kf, p, m)
    product(w, s.D, -1.0, s.M, s.K_t, s.D, p, m, p)
    rank_one(w, s.M, -1.0, u, s.row, p, m)
    if asked.T or asked.Z:  # ahat - a_filt = P_filt s, then a_filt alone
        add(w, ahat, -1.0, below(s.a_filt, t), 1)
        if asked.Z:
            rank_one(w, s.Z_bar, 1.0, u, ahat, p, m)
        copy(w, ahat, below(s.a_filt, t), 1)


@jit
def gather_vectors(w, s, sizes, weight, c_bar, d_bar, y_bar):
    """The gradients with respect to c, d and y."""
    n, p, m, r = sizes
    for t in range(n):
        c_t, d_t = at_step(c_bar, t), at_step(d_bar, t)
        for j in range(m):
            c_t[j] += weight * entry(w, s.r, t + 1, j)
        for i in range(p):
            x = weight * entry(w, s.e, t, i)
            d_t[i] += x
            y_bar[t, i] = -x


@jit
def gather(w, s, first, stop, model, sizes, asked, equal, weight, out):
    """The gradients of T, Z and H from the steps first..stop - 1: outer products as one product."""
    n, p, m, r = sizes
    steps = stop - first
    e, ahat, r_next = below(s.e, first), below(s.ahat, first), below(s.r, first + 1)
    product(w, s.F, 1.0 if equal else 0.0, turned(e), e, s.zero, p, steps, p)
    H_bar = at_step(out.H, first)
    for i in range(p):
        for j in range(p):
            x = entry(w, s.F, i, j) - entry(w, s.D_sum, i, j)
            y = entry(w, s.F, j, i) - entry(w, s.D_sum, j, i)
            H_bar[i, j] += 0.25 * weight * (x + y)
    clear(w, s.D_sum, p)
    if asked.T:
        product(w, s.T_bar, 1.0, turned(r_next), ahat, s.T_bar, m, steps, m)
        T_bar = at_step(out.T, first)
        for i in range(m):
            for j in range(m):
                T_bar[i, j] += weight * entry(w, s.T_bar, i, j)
        clear(w, s.T_bar, m)
    if asked.Z:
        product(w, s.Z_bar, 1.0, turned(e), ahat, s.Z_bar, p, steps, m)
        Z_bar = at_step(out.Z, first)
        for i in range(p):
            for j in range(m):
                Z_bar[i, j] += weight * entry(w, s.Z_bar, i, j)
        clear(w, s.Z_bar, p)


@jit
def gather_shocks(w, s, first, stop, N, model, sizes, equal, weight, out):
    """Those of R and Q: W_bar = (sum r r' - N) / 2, R_bar = 2 W_bar R Q, Q_bar = R' W_bar R."""
    n, p, m, r = sizes
    r_next, W_bar = below(s.r, first + 1), s.X1
    product(w, W_bar, 1.0 if equal else 0.0, turned(r_next), r_next, s.zero, m, stop - first, m)
    add(w, W_bar, -1.0, N, m)
    product(w, s.WR, 0.5 * weight, W_bar, s.R, s.zero, m, m, r)
    product(w, s.RQ, 2.0, s.WR, s.Q, s.zero, m, r, r)
    R_bar, Q_bar = at_step(out.R, first), at_step(out.Q, first)
    for i in range(m):
        for j in range(r):
            R_bar[i, j] += entry(w, s.RQ, i, j)
    product(w, s.RQ, 1.0, turned(s.R), s.WR, s.zero, r, m, r)
    for i in range(r):
        for j in range(r):
            Q_bar[i, j] += 0.5 * (entry(w, s.RQ, i, j) + entry(w, s.RQ, j, i))
