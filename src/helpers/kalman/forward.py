"""The compiled filter: step by step until the covariance has settled, then the rest at once."""

import numpy as np

from helpers.kalman.products import (
    Mat,
    axpy,
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
    below,
    clear,
    entry,
    load_step,
    load_symmetric,
    same_row,
    turned,
)

LOG_2PI = np.log(2 * np.pi)
EVERY = 4  # steps between two looks at whether the covariance has settled


@jit
def invert(w, F, C, F_inv, zero, p):
    """F_inv = F^-1 and its log|F|, by Cholesky; NaN if F is not positive definite."""
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
def observe(w, s, y, observed, t, a, P, v, u, Kf, F_inv, p, m):
    """v, F^-1, u and the gain (def-filter-gain, transposed) of step t.

    Returns log|F| + p log(2 pi), counting what is observed; NaN if F is not positive definite.
    """
    product(w, s.M, 1.0, s.Z, P, s.zero, p, m, m)
    product(w, s.F, 1.0, s.M, s.Z_t, s.H, p, m, p)
    const = invert(w, s.F, s.C, F_inv, s.zero, p)
    if np.isnan(const):
        return const
    row_product(w, v.at, -1.0, a.at, s.Z_t, s.zero.at, m, p)
    for i in range(p):
        if observed[t, i]:
            const += LOG_2PI
            put(w, v.at + i, y[t, i] - get(w, s.d.at + i) + get(w, v.at + i))
        else:
            put(w, F_inv.at + i * F_inv.ld + i, 0.0)
    product(w, Kf, 1.0, F_inv, s.M, s.zero, p, p, m)
    row_product(w, u.at, 1.0, v.at, F_inv, s.zero.at, p, p)
    return const


@jit
def observe_one(w, s, y, observed, t, a, P, v, u, Kf, F_inv, m):
    """`observe` where p = 1: F, v and u are numbers."""
    clear(w, v, 1)
    clear(w, u, 1)
    clear(w, F_inv, 1)
    row_product(w, s.M.at, 1.0, s.Z.at, P, s.zero.at, m, m)
    F = get(w, s.H.at) + dot(w, s.M.at, s.Z.at, m)
    if not F > 0.0:
        return np.nan
    if not observed[t, 0]:
        clear(w, Kf, 1)
        return 0.0
    v_t = y[t, 0] - get(w, s.d.at) - dot(w, a.at, s.Z.at, m)
    put(w, v.at, v_t)
    put(w, u.at, v_t / F)
    put(w, F_inv.at, 1.0 / F)
    axpy(w, Kf.at, 1.0 / F, s.M.at, s.zero.at, m)
    return np.log(F) + LOG_2PI


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
    load_symmetric(w, s.P, model.P0, m)
    for i in range(m):
        put(w, s.a.at + i, model.a0[i])
    P, P_next = s.P, s.P_next
    before, k, const, taken = -1.0, n, 0.0, 0
    for t in range(n):
        if t == 0 or varying or not same_row(observed, t, t - 1):
            load_step(w, s, t, model, observed, sizes)
        a, v, u = below(s.a, t), below(s.v, t), below(s.u, t)
        Kf, F_inv = below(s.Kf, t * p if kept else 0), below(s.F_inv, t * p if kept else 0)
        a_filt = below(s.a_filt, t if asked.T or asked.Z else 0)
        TP = below(s.TP, t * m if asked.T or asked.Z else 0)

        if p == 1:
            const = observe_one(w, s, y, observed, t, a, P, v, u, Kf, F_inv, m)
        else:
            const = observe(w, s, y, observed, t, a, P, v, u, Kf, F_inv, p, m)
        if np.isnan(const):
            return k, t
        x = const
        for i in range(p):
            taken += observed[t, i]
            x += get(w, v.at + i) * get(w, u.at + i)
        l[t] = -0.5 * x
        if t == n - 1 and not kept:
            break
        row_product(w, a_filt.at, 1.0, v.at, Kf, a.at, p, m)
        if t == n - 1:
            break

        product(w, s.P_filt, -1.0, turned(Kf), s.M, P, m, p, m)
        if taken < 4 * m and loses_digits(w, P, s.P_filt, m):
            joseph(w, s, P, Kf, m, p)
        if sparse:
            sparse_product(w, TP, s.T, start, index, s.P_filt, s.zero, m, False)
        else:
            product(w, TP, 1.0, s.T, s.P_filt, s.zero, m, m, m)
        if k < n:
            break
        row_product(w, below(s.a, t + 1).at, 1.0, a_filt.at, s.T_t, s.c.at, m, m)
        if sparse:
            clear(w, below(TP, m), TP.ld - m)  # rows that are turned with the others
            transpose(w, s.B, TP, m, m)
            sparse_product(w, P_next, s.T, start, index, s.B, s.W, m, True)
        else:
            product(w, P_next, 1.0, TP, s.T_t, s.W, m, m, m, True)
        symmetrize(w, P_next, m)

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
        row_product(w, a_next.at, 1.0, below(s.a, t).at, L_t, a_next.at, m, m)
    product(w, v, -1.0, below(s.a, k), s.Z_t, v, left, m, p)
    product(w, u, 1.0, v, F_inv, s.zero, left, p, p)
    for t in range(k, n):
        x = const
        for i in range(p):
            x += entry(w, s.v, t, i) * entry(w, s.u, t, i)
        l[t] = -0.5 * x
