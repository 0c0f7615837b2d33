"""One block of memory for a whole pass, and where each matrix lies in it.

A pass over the series allocates once. A matrix of the filter is a `Mat` there; a matrix of every
step is a `Mat` too, whose rows of step t start at ``below(A, t * rows)``.
"""

from typing import NamedTuple

import numpy as np

from helpers.kalman.products import LANES, Mat, axpy, get, jit, product, put, symmetrize, transpose


class Sizes(NamedTuple):
    """n steps, p observed, m states, r shocks."""

    n: int
    p: int
    m: int
    r: int


class Arrays(NamedTuple):
    """The model with a leading axis of length 1 or n for time (not for a0 and P0)."""

    a0: np.ndarray
    P0: np.ndarray
    c: np.ndarray
    d: np.ndarray
    T: np.ndarray
    Z: np.ndarray
    R: np.ndarray
    H: np.ndarray
    Q: np.ndarray


class Asked(NamedTuple):
    """What of the gradient is asked for, by what it costs."""

    matrices: bool  # any of P0, T, Z, R, H, Q: the recursion of N
    T: bool
    Z: bool
    W: bool  # R or Q


class Space(NamedTuple):
    """Where everything lies. The names are the book's symbols."""

    zero: Mat  # rows of zeros
    # the model at the step at hand, with the rows of missing observations taken out
    T: Mat
    T_t: Mat
    Z: Mat
    Z_t: Mat
    W: Mat
    R: Mat
    R_t: Mat
    Q: Mat
    H: Mat
    c: Mat
    d: Mat
    # matrices a step works on: square ones, then those with p or r rows or columns
    P: Mat
    P_next: Mat
    P_filt: Mat
    B: Mat
    L: Mat
    N: Mat
    N_sum: Mat
    T_bar: Mat
    X1: Mat
    X2: Mat
    X3: Mat
    M: Mat
    Y: Mat
    K: Mat
    KN: Mat
    Z_bar: Mat
    ZY: Mat
    YZ: Mat
    K_t: Mat
    RQ: Mat
    WR: Mat
    F: Mat
    C: Mat
    D: Mat
    D_sum: Mat
    row: Mat
    gu: Mat
    # matrices of every step
    a: Mat
    v: Mat
    u: Mat
    Kf: Mat
    F_inv: Mat
    a_filt: Mat
    TP: Mat  # T P_filt
    r: Mat
    e: Mat
    ahat: Mat


@jit
def padded(k):
    """The least multiple of LANES that holds k."""
    return (k + LANES - 1) // LANES * LANES


@jit
def turned(A):
    """A', as a left factor."""
    return Mat(A.at, A.step, A.ld)


@jit
def below(A, i):
    """A from its row i on."""
    return Mat(A.at + i * A.ld, A.ld, A.step)


@jit
def slot(base, k, rows, ld):
    """The k-th of the matrices of `rows` rows that lie one after the other from `base` on."""
    return Mat(base + k * rows * ld, ld, 1)


@jit
def workspace(sizes, backwards, asked):
    """The memory of a pass, its address w and its `Space`.

    What only a backward pass reads is kept only then. The memory must outlive the use of w.
    """
    n, p, m, r = sizes
    mp, pp, rp = padded(m), padded(p), padded(r)
    square = max(mp, pp, rp)  # the zeros lie before
    wide = square + 14 * mp * mp
    tall = wide + 10 * pp * mp + rp * mp
    shocks = tall + 2 * mp * pp
    small = shocks + 3 * max(mp, rp) * rp + rp * rp
    steps = small + 6 * pp * pp + 2 * mp + 2 * pp
    keep_gains = n if backwards else 1
    keep_all = n if asked.T or asked.Z else 1
    a = steps
    v = a + (n + 1) * mp
    u = v + n * pp
    Kf = u + n * pp
    F_inv = Kf + (keep_gains * p + LANES) * mp
    a_filt = F_inv + (keep_gains * p + LANES) * pp
    TP = a_filt + keep_all * mp
    adjoint = TP + (keep_all * m + LANES) * mp
    e = adjoint + (keep_gains + 1) * mp
    ahat = e + keep_gains * pp
    # From the start of a cache line on, so that no vector lies in two.
    memory = np.empty(ahat + keep_all * mp + LANES)
    w = (memory.ctypes.data + 8 * LANES - 1) // (8 * LANES) * (8 * LANES)
    clear(w, Mat(0, a + mp, 1), 1)
    return (
        memory,
        w,
        Space(
            zero=Mat(0, 0, 1),
            T=slot(square, 0, mp, mp),
            T_t=slot(square, 1, mp, mp),
            Z=slot(wide, 0, pp, mp),
            Z_t=slot(tall, 0, mp, pp),
            W=slot(square, 2, mp, mp),
            R=slot(shocks, 0, max(mp, rp), rp),
            R_t=Mat(wide + 10 * pp * mp, mp, 1),
            Q=Mat(shocks + 3 * max(mp, rp) * rp, rp, 1),
            H=slot(small, 0, pp, pp),
            c=Mat(small + 6 * pp * pp, mp, 1),
            d=Mat(small + 6 * pp * pp + mp, pp, 1),
            P=slot(square, 3, mp, mp),
            P_next=slot(square, 4, mp, mp),
            P_filt=slot(square, 5, mp, mp),
            B=slot(square, 6, mp, mp),
            L=slot(square, 7, mp, mp),
            N=slot(square, 8, mp, mp),
            N_sum=slot(square, 9, mp, mp),
            T_bar=slot(square, 10, mp, mp),
            X1=slot(square, 11, mp, mp),
            X2=slot(square, 12, mp, mp),
            X3=slot(square, 13, mp, mp),
            M=slot(wide, 1, pp, mp),
            Y=slot(wide, 2, pp, mp),
            K=slot(wide, 3, pp, mp),
            Z_bar=slot(wide, 4, pp, mp),
            KN=slot(wide, 5, pp, mp),
            ZY=slot(wide, 6, pp, mp),  # two slots each
            YZ=slot(wide, 8, pp, mp),
            K_t=slot(tall, 1, mp, pp),
            RQ=slot(shocks, 1, max(mp, rp), rp),
            WR=slot(shocks, 2, max(mp, rp), rp),
            F=slot(small, 1, pp, pp),
            C=slot(small, 2, pp, pp),
            D=slot(small, 3, pp, pp),
            D_sum=slot(small, 4, pp, pp),
            row=Mat(small + 6 * pp * pp + mp + pp, mp, 1),
            gu=Mat(small + 6 * pp * pp + 2 * mp + pp, pp, 1),
            a=Mat(a, mp, 1),
            v=Mat(v, pp, 1),
            u=Mat(u, pp, 1),
            Kf=Mat(Kf, mp, 1),
            F_inv=Mat(F_inv, pp, 1),
            a_filt=Mat(a_filt, mp, 1),
            TP=Mat(TP, mp, 1),
            r=Mat(adjoint, mp, 1),
            e=Mat(e, pp, 1),
            ahat=Mat(ahat, mp, 1),
        ),
    )


@jit
def load(w, out, A, rows, cols):
    """Copy the array A (rows, cols) to `out`."""
    for i in range(rows):
        for j in range(cols):
            put(w, out.at + i * out.ld + j, A[i, j])


@jit
def load_symmetric(w, out, A, rows):
    """Copy (A + A') / 2 to `out`, A (rows, rows)."""
    for i in range(rows):
        for j in range(rows):
            put(w, out.at + i * out.ld + j, 0.5 * (A[i, j] + A[j, i]))


@jit
def clear(w, A, rows):
    for k in range(A.at, A.at + rows * A.ld):
        put(w, k, 0.0)


@jit
def copy(w, out, A, rows):
    """Copy `rows` whole rows of A to `out`, which has rows as long."""
    for k in range(rows * A.ld):
        put(w, out.at + k, get(w, A.at + k))


@jit
def add(w, out, factor, A, rows):
    """out += factor A, `rows` whole rows that are as long in both."""
    axpy(w, out.at, factor, A.at, out.at, rows * A.ld)


@jit
def entry(w, A, i, j):
    return get(w, A.at + i * A.ld + j)


@jit
def at_step(A, t):
    """The array of step t: the only one, if it does not vary."""
    return A[t if A.shape[0] > 1 else 0]


@jit
def varies(model):
    """Whether any array of the model varies over time."""
    longest = max(model.c.shape[0], model.d.shape[0], model.T.shape[0], model.Z.shape[0])
    return max(longest, model.R.shape[0], model.H.shape[0], model.Q.shape[0]) > 1


@jit
def load_step(w, s, t, model, observed, sizes):
    """The model's arrays of step t; a row that y misses has no Z and a one on the diagonal of H."""
    n, p, m, r = sizes
    load(w, s.T, at_step(model.T, t), m, m)
    transpose(w, s.T_t, s.T, m, m)
    load(w, s.Z, at_step(model.Z, t), p, m)
    load_symmetric(w, s.H, at_step(model.H, t), p)
    load(w, s.R, at_step(model.R, t), m, r)
    load_symmetric(w, s.Q, at_step(model.Q, t), r)
    transpose(w, s.R_t, s.R, m, r)
    product(w, s.RQ, 1.0, s.R, s.Q, s.zero, m, r, r)
    product(w, s.W, 1.0, s.RQ, s.R_t, s.zero, m, r, m)
    symmetrize(w, s.W, m)
    c, d = at_step(model.c, t), at_step(model.d, t)
    for j in range(m):
        put(w, s.c.at + j, c[j])
    for i in range(p):
        put(w, s.d.at + i, d[i])
        if not observed[t, i]:
            clear(w, below(s.Z, i), 1)
            for j in range(p):
                put(w, s.H.at + i * s.H.ld + j, 0.0)
                put(w, s.H.at + j * s.H.ld + i, 0.0)
            put(w, s.H.at + i * s.H.ld + i, 1.0)
    transpose(w, s.Z_t, s.Z, p, m)
    copy(w, s.ZY, s.Z, p)
    copy(w, below(s.YZ, p), s.Z, p)


@jit
def seen(y):
    """Which entries of y are there, and the step from which on none is missing."""
    n, p = y.shape
    observed = np.empty((n, p), np.bool_)
    complete_from = 0
    for t in range(n):
        for i in range(p):
            observed[t, i] = not np.isnan(y[t, i])
            if not observed[t, i]:
                complete_from = t + 1
    return observed, complete_from


@jit
def same_row(observed, t, q):
    """Whether steps t and q observe the same components."""
    for i in range(observed.shape[1]):
        if observed[t, i] != observed[q, i]:
            return False
    return True


@jit
def non_zeros(A, turn):
    """(start, index) by rows of the non-zeros, at any time, of A (k, rows, cols), or of its A'."""
    k, rows, cols = A.shape
    if turn:
        rows, cols = cols, rows
    start = np.zeros(rows + 1, np.int64)
    index = np.empty(rows * cols, np.int64)
    found = 0
    for i in range(rows):
        for j in range(cols):
            for t in range(k):
                if (A[t, j, i] if turn else A[t, i, j]) != 0.0:
                    index[found] = j
                    found += 1
                    break
        start[i + 1] = found
    return start, index[:found]
