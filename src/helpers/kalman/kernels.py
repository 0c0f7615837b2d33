"""The log-likelihood of a whole series and its closed-form gradient, compiled.

`loglike` filters; `loglike_and_grad` filters and then runs the disturbance smoother backwards, for
the plain sum of the log-likelihoods (form 2 of the book, chapter "The adjoint is the smoother").
They compute what `helpers.kalman.reference` computes, and tests hold the two together. What makes
them fast:

- products of small matrices in registers (`helpers.kalman.products`), in one block of memory;
- rows of T that are nearly empty are followed by their non-zeros, in larger models;
- what is not asked for is neither computed nor kept (`Asked`);
- once the predicted covariance has settled, a step forwards or backwards is one product of a row
  with a matrix, and the sums over the settled steps come by doubling.
"""

import numpy as np
from numba import carray, cfunc, types

from helpers.kalman.products import (
    Mat,
    get,
    jit,
    product,
    put,
    sparse_product,
    symmetrize,
    transpose,
)
from helpers.kalman.workspace import (
    Arrays,
    Asked,
    Sizes,
    add,
    at_step,
    below,
    clear,
    copy,
    entry,
    load_step,
    non_zeros,
    same_row,
    seen,
    turned,
    varies,
    workspace,
)

LOG_2PI = np.log(2 * np.pi)
SPARSE_FROM = 20  # states: below, a dense product takes less time than following the non-zeros
EVERY = 4  # steps between two looks at whether the covariance has settled


@jit
def invert(w, F, C, F_inv, zero, p):
    """F_inv = F^-1 and its log|F|, by Cholesky; NaN if F is not positive definite."""
    if p == 1:
        f = get(w, F.at)
        if not f > 0.0:
            return np.nan
        put(w, F_inv.at, 1.0 / f)
        for j in range(1, F_inv.ld):
            put(w, F_inv.at + j, 0.0)
        return np.log(f)
    logdet = 0.0
    for j in range(p):  # C C' = F
        x = entry(w, F, j, j)
        for k in range(j):
            x -= entry(w, C, j, k) ** 2
        if not x > 0.0:
            return np.nan
        logdet += np.log(x)
        root = np.sqrt(x)
        put(w, C.at + j * C.ld + j, root)
        for i in range(j + 1, p):
            x = entry(w, F, i, j)
            for k in range(j):
                x -= entry(w, C, i, k) * entry(w, C, j, k)
            put(w, C.at + i * C.ld + j, x / root)
    for j in range(p):  # C <- C^-1
        put(w, C.at + j * C.ld + j, 1.0 / entry(w, C, j, j))
        for i in range(j):
            put(w, C.at + i * C.ld + j, 0.0)
        for i in range(j + 1, p):
            x = 0.0
            for k in range(j, i):
                x -= entry(w, C, i, k) * entry(w, C, k, j)
            put(w, C.at + i * C.ld + j, x / entry(w, C, i, i))
    product(w, F_inv, 1.0, turned(C), C, zero, p, p, p)
    return logdet


@jit
def loses_digits(w, P, P_filt, m):
    """Whether the observation took nearly all of the variance of some state."""
    for i in range(m):
        if entry(w, P_filt, i, i) < 1e-3 * entry(w, P, i, i):
            return True
    return False


@jit
def joseph(w, s, P, Kf, m, p):
    """P_filt = J P J' + Kf H Kf' with J = I - Kf Z: no difference of large numbers."""
    J, J_t, JP = s.X1, s.X2, s.X3
    clear(w, J, m)
    for i in range(m):
        put(w, J.at + i * J.ld + i, 1.0)
    product(w, J, -1.0, turned(Kf), s.Z, J, m, p, m)
    transpose(w, J_t, J, m, m)
    product(w, JP, 1.0, J, P, s.zero, m, m, m)
    product(w, s.Y, 1.0, s.H, Kf, s.zero, p, p, m)
    product(w, s.P_filt, 1.0, turned(Kf), s.Y, s.zero, m, p, m)
    product(w, s.P_filt, 1.0, JP, J_t, s.P_filt, m, m, m)


@jit
def change(w, s, P, P_next, m):
    """max |P_next - P|_ij / sqrt(P_ii P_jj): how far the covariance moved, whatever the units."""
    for i in range(m):
        x = entry(w, P_next, i, i)
        put(w, s.row.at + i, 1.0 / x if x > 0.0 else 0.0)
    largest = 0.0
    for i in range(m):
        scale = get(w, s.row.at + i)
        for j in range(i + 1):
            x = entry(w, P_next, i, j) - entry(w, P, i, j)
            largest = max(largest, x * x * scale * get(w, s.row.at + j))
    return np.sqrt(largest)


@jit
def forward(
    w,
    s,
    y,
    observed,
    settles_from,
    varying,
    sparse,
    start,
    index,
    model,
    sizes,
    kept,
    asked,
    tol,
    l,
):
    """Filter, l[t] the log-likelihood of step t.

    Returns (k, t): k the first settled step, n if there is none; t the step at which F is not
    positive definite, -1 if there is none. `kept` says whether a backward pass follows.
    """
    n, p, m, r = sizes
    for i in range(m):
        put(w, s.a.at + i, model.a0[i])
        for j in range(m):
            put(w, s.P.at + i * s.P.ld + j, 0.5 * (model.P0[i, j] + model.P0[j, i]))
    P, P_next = s.P, s.P_next
    before, k, const, taken = -1.0, n, 0.0, 0
    for t in range(n):
        if t == 0 or varying or not same_row(observed, t, t - 1):
            load_step(w, s, t, model, observed, sizes)
        a, v, u = below(s.a, t), below(s.v, t), below(s.u, t)
        Kf, F_inv = below(s.Kf, t * p if kept else 0), below(s.F_inv, t * p if kept else 0)
        a_filt = below(s.a_filt, t if asked.T or asked.Z else 0)
        TP = below(s.TP, t * m if asked.T or asked.Z else 0)

        product(w, s.M, 1.0, s.Z, P, s.zero, p, m, m)
        product(w, s.F, 1.0, s.M, s.Z_t, s.H, p, m, p)
        const = invert(w, s.F, s.C, F_inv, s.zero, p)
        if np.isnan(const):
            return k, t
        for i in range(p):
            if observed[t, i]:
                const += LOG_2PI
                taken += 1
            else:
                put(w, F_inv.at + i * F_inv.ld + i, 0.0)
        product(w, Kf, 1.0, F_inv, s.M, s.zero, p, p, m)  # def-filter-gain, transposed

        product(w, v, -1.0, a, s.Z_t, s.zero, 1, m, p)
        for i in range(p):
            if observed[t, i]:
                put(w, v.at + i, y[t, i] - get(w, s.d.at + i) + get(w, v.at + i))
        product(w, u, 1.0, v, F_inv, s.zero, 1, p, p)
        x = const
        for i in range(p):
            x += get(w, v.at + i) * get(w, u.at + i)
        l[t] = -0.5 * x
        if t == n - 1 and not kept:
            break
        product(w, a_filt, 1.0, v, Kf, a, 1, p, m)
        if t == n - 1:
            break

        product(w, s.P_filt, -1.0, turned(Kf), s.M, P, m, p, m)
        if taken < 4 * m and loses_digits(w, P, s.P_filt, m):
            joseph(w, s, P, Kf, m, p)
        if sparse:
            sparse_product(w, TP, s.T, start, index, s.P_filt, s.zero, m, m)
        else:
            product(w, TP, 1.0, s.T, s.P_filt, s.zero, m, m, m)
        if k < n:
            break
        product(w, below(s.a, t + 1), 1.0, a_filt, s.T_t, s.c, 1, m, m)
        if sparse:
            transpose(w, s.B, TP, m, m)
            sparse_product(w, P_next, s.T, start, index, s.B, s.W, m, m)
            symmetrize(w, P_next, m)
        else:
            product(w, P_next, 1.0, TP, s.T_t, s.W, m, m, m, True)
            symmetrize(w, P_next, m, True)

        if tol > 0.0 and t >= settles_from and t % EVERY == 0 and t < n - 2 * EVERY:
            now = change(w, s, P, P_next, m)
            if before > 0.0:
                rate = (now / before) ** (1.0 / EVERY)
                # what is still to come, were it to shrink at this rate for ever
                if rate < 1.0 and now * rate / (1.0 - rate) <= tol:
                    k = t + 1
            if now == 0.0:
                k = t + 1
            before = now
        P, P_next = P_next, P
    if k < n:
        settled_forward(w, s, y, k, const, sizes, kept, l)
    return k, -1


@jit
def settled_forward(w, s, y, k, const, sizes, kept, l):
    """Steps k + 1..n - 1 with the gain of step k: a_{t+1} = L a_t + K (y_t - d) + c."""
    n, p, m, r = sizes
    left = n - k
    Kf, F_inv = below(s.Kf, k * p if kept else 0), below(s.F_inv, k * p if kept else 0)
    v, u, L_t = below(s.v, k), below(s.u, k), s.L
    for t in range(k, n):
        for i in range(p):
            put(w, s.v.at + t * s.v.ld + i, y[t, i] - get(w, s.d.at + i))
        for i in range(p, s.v.ld):
            put(w, s.v.at + t * s.v.ld + i, 0.0)
    product(w, s.K, 1.0, Kf, s.T_t, s.zero, p, m, m)
    product(w, L_t, -1.0, turned(s.Z), s.K, s.T_t, m, p, m)
    product(w, below(s.a, k + 1), 1.0, v, s.K, Mat(s.c.at, 0, 1), left - 1, p, m)
    for t in range(k, n - 1):
        a_next = below(s.a, t + 1)
        product(w, a_next, 1.0, below(s.a, t), L_t, a_next, 1, m, m)
    product(w, v, -1.0, below(s.a, k), s.Z_t, v, left, m, p)
    product(w, u, 1.0, v, F_inv, s.zero, left, p, p)
    for t in range(k, n):
        x = const
        for i in range(p):
            x += entry(w, s.v, t, i) * entry(w, s.u, t, i)
        l[t] = -0.5 * x


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
        product(w, r_t, 1.0, below(s.r, t + 1), s.L, r_t, 1, m, m)
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
        transpose(w, s.K_t, Kf, p, m)
        product(w, s.row, 1.0, r_next, s.T, s.zero, 1, m, m)
        if not equal:
            u = s.gu
            clear(w, u, 1)
            add(w, u, l_bar[t], below(s.u, t), 1)
        product(w, e, -1.0, s.row, s.K_t, u, 1, m, p)  # eq-adjoint-e
        product(w, r_t, 1.0, e, s.Z, s.row, 1, p, m)  # eq-adjoint-r
        if not asked.matrices:
            continue
        TP, ahat = below(s.TP, t * m), below(s.ahat, t)
        if (asked.T or asked.Z) and t == n - 1:  # r and N are zero
            copy(w, ahat, below(s.a_filt, t), 1)
        elif asked.T or asked.Z:
            product(w, ahat, 1.0, r_next, TP, below(s.a_filt, t), 1, m, m)
        if asked.W:
            if varying:
                gather_shocks(w, s, t, t + 1, N, model, sizes, equal, weight, out)
            else:
                add(w, s.N_sum, 1.0, N, m)
        if asked.T and t < n - 1:
            product(w, s.T_bar, -1.0, N, TP, s.T_bar, m, m, m)

        product(w, s.K, 1.0, Kf, s.T_t, s.zero, p, m, m)
        product(w, s.KN, 1.0, s.K, N, s.zero, p, m, m)
        product(w, s.M, -1.0, s.KN, s.T, s.zero, p, m, m)  # -Kf' T' N T
        if asked.Z:
            if t < n - 1:
                product(w, s.Z_bar, 1.0, s.KN, TP, s.Z_bar, p, m, m)
            add(w, s.Z_bar, -1.0 if equal else -l_bar[t], Kf, p)
        if equal:
            product(w, s.D, -1.0, s.M, s.K_t, F_inv, p, m, p)  # eq-adjoint-D
        else:
            unequal(w, s, t, F_inv, l_bar[t], TP, ahat, sizes, asked)
        add(w, s.D_sum, 1.0, s.D, p)
        # N_{t-1} = T' N T + Z' Y + Y' Z with Y = D Z / 2 - Kf' T' N T: eq-adjoint-N
        product(w, s.YZ, 0.5, s.D, s.Z, s.M, p, p, m)
        product(w, below(s.ZY, p), 0.5, s.D, s.Z, s.M, p, p, m)
        product(w, S, 1.0, turned(s.ZY), s.YZ, s.zero, m, 2 * p, m, True)
        if sparse:
            sparse_product(w, N_prev, s.T_t, start, index, N, s.zero, m, m)
            transpose(w, B, N_prev, m, m)
            sparse_product(w, N_prev, s.T_t, start, index, B, S, m, m)
        else:
            product(w, B, 1.0, N, s.T, s.zero, m, m, m)
            product(w, N_prev, 1.0, turned(s.T), B, S, m, m, m, True)
        symmetrize(w, N_prev, m, True)
        N, N_prev = N_prev, N
        if varying:
            gather(w, s, t, t + 1, model, sizes, asked, equal, weight, out)
    if asked.matrices:
        if not varying:
            gather(w, s, 0, n, model, sizes, asked, equal, weight, out)
            if asked.W:
                gather_shocks(w, s, 0, n, s.N_sum, model, sizes, equal, weight, out)
        for i in range(m):
            for j in range(m):
                x = get(w, s.r.at + i) * get(w, s.r.at + j) if equal else 0.0
                x -= entry(w, N, i, j)
                out.P0[i, j] = 0.5 * weight * x
    for j in range(m):
        out.a0[j] = weight * get(w, s.r.at + j)


@jit
def unequal(w, s, t, F_inv, weight, TP, ahat, sizes, asked):
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
    product(w, s.D, -1.0, s.M, s.K_t, s.D, p, m, p)
    product(w, s.M, -1.0, turned(u), s.row, s.M, p, 1, m)
    if asked.T or asked.Z:  # ahat - a_filt = P_filt s, then a_filt alone
        add(w, ahat, -1.0, below(s.a_filt, t), 1)
        if asked.Z:
            product(w, s.Z_bar, 1.0, turned(u), ahat, s.Z_bar, p, 1, m)
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


@jit
def whole_pass(y, model, backwards, asked, l_bar, tol, l, y_bar, out):
    """Filter into l and, if `backwards`, write the gradient into y_bar and out (zeros before).

    Returns the first settled step, n if there is none. All is NaN where some F is not positive
    definite.
    """
    n, p = y.shape
    sizes = Sizes(n, p, model.a0.shape[0], model.Q.shape[1])
    equal = True
    for t in range(n if backwards else 0):
        equal = equal and l_bar[t] == l_bar[0]
    memory, w, s = workspace(sizes, backwards, asked)
    observed, complete_from = seen(y)
    varying = varies(model)
    start, index = non_zeros(model.T[:0], False)
    start_t, index_t = start, index
    sparse = False
    if sizes.m >= SPARSE_FROM:
        start, index = non_zeros(model.T, False)
        sparse = 8 * index.size < sizes.m**2
        start_t, index_t = non_zeros(model.T, True)
    k, failed = forward(
        w, s, y, observed, complete_from, varying, sparse, start, index, model, sizes,
        backwards, asked, 0.0 if varying or not equal else tol, l,
    )  # fmt: skip
    if failed >= 0:
        l[:] = np.nan
        if backwards:
            y_bar[:] = np.nan
            for X in (out.a0, out.P0.ravel(), out.c.ravel(), out.d.ravel()):
                X[:] = np.nan
            for X in (out.T, out.Z, out.R, out.H, out.Q):
                X[:] = np.nan
    elif backwards:
        backward(
            w, s, k, observed, varying, sparse, start_t, index_t, model, sizes, asked, l_bar, equal,
            out,
        )  # fmt: skip
        gather_vectors(w, s, sizes, l_bar[0] if equal else 1.0, out.c, out.d, y_bar)
    memory[0] = 0.0  # the address w was good until here
    return k


PASS = types.void(*[types.CPointer(types.float64)] * 22, types.CPointer(types.int64))


@cfunc(PASS, cache=True, error_model="numpy")
def pass_by_address(
    y,
    a0,
    P0,
    c,
    d,
    T,
    Z,
    R,
    H,
    Q,
    l_bar,
    l,
    y_bar,
    a0_bar,
    P0_bar,
    c_bar,
    d_bar,
    T_bar,
    Z_bar,
    R_bar,
    H_bar,
    Q_bar,
    numbers,
):
    """`whole_pass` with arrays by their addresses.

    `numbers` are n, p, m, r, the lengths over time of c, d, T, Z, R, H, Q, then `backwards` and the
    four of `Asked` as 0 or 1; the tolerance lies at l[0] on entry, the first settled step returns
    as the first of the numbers.
    """
    num = carray(numbers, 16)
    n, p, m, r = num[0], num[1], num[2], num[3]
    c_k, d_k, T_k, Z_k, R_k, H_k, Q_k = num[4], num[5], num[6], num[7], num[8], num[9], num[10]
    model = Arrays(
        carray(a0, m), carray(P0, (m, m)), carray(c, (c_k, m)), carray(d, (d_k, p)),
        carray(T, (T_k, m, m)), carray(Z, (Z_k, p, m)), carray(R, (R_k, m, r)),
        carray(H, (H_k, p, p)), carray(Q, (Q_k, r, r)),
    )  # fmt: skip
    out = Arrays(
        carray(a0_bar, m), carray(P0_bar, (m, m)), carray(c_bar, (c_k, m)), carray(d_bar, (d_k, p)),
        carray(T_bar, (T_k, m, m)), carray(Z_bar, (Z_k, p, m)), carray(R_bar, (R_k, m, r)),
        carray(H_bar, (H_k, p, p)), carray(Q_bar, (Q_k, r, r)),
    )  # fmt: skip
    ls = carray(l, n)
    asked = Asked(num[12] != 0, num[13] != 0, num[14] != 0, num[15] != 0)
    num[0] = whole_pass(
        carray(y, (n, p)),
        model,
        num[11] != 0,
        asked,
        carray(l_bar, n),
        ls[0],
        ls,
        carray(y_bar, (n, p)),
        out,
    )
