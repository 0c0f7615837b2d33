"""Series with models of their own, compiled: LANES of them at once, in as many threads as wanted.

The text is that of :mod:`helpers.kalman.recursions`, entry by entry, with a vector for each number
(:mod:`~helpers.kalman.fused.lanes`): forwards the filter, backwards the disturbance smoother in
factors. There is no steady state and no start in roots. A series that needs the latter, or whose
numbers are not finite, takes the pass for one series afterwards (:func:`passes`), which also says
what is wrong with it.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, types

from helpers.kalman.fused.entry import call, kept_on_disk
from helpers.kalman.fused.forward import DONE
from helpers.kalman.fused.inputs import Arrays, Wanted, until
from helpers.kalman.fused.lanes import (
    Many,
    apply,
    broadcast,
    clear,
    constant,
    gather,
    load,
    mat,
    product,
    root,
    scatter,
    store,
)
from helpers.kalman.fused.registers import larger
from helpers.kalman.fused.tiles import LANES, get, jitable, put, transposed
from helpers.kalman.recursions import LOG_2PI
from helpers.kalman.square_root import WATCHED, fill_shares

# Pivots whose logarithms are taken together. Where their product is beyond the range of a double,
# 1e308, the series takes the pass for one.
FACTORS = 8

# Arrays (series, time, ...), contiguous: compiled for these alone, when this module is imported.
_VECTORS, _MATRICES = types.float64[:, :, ::1], types.float64[:, :, :, ::1]
_MODEL = types.NamedTuple(
    (types.float64[:, ::1], _VECTORS, _VECTORS, _VECTORS, *[_MATRICES] * 4), Arrays
)
_NUMBERS, _COUNTS = types.float64[::1], types.int64[::1]
IN_LANES = types.void(
    types.int64, types.int64, _COUNTS, _VECTORS, _MODEL, types.boolean, _NUMBERS, _NUMBERS,
    _VECTORS, _MODEL,
)  # fmt: skip
PASSES = types.void(
    _COUNTS, _COUNTS, _VECTORS, _MODEL, types.boolean, types.float64, _NUMBERS, _COUNTS, _VECTORS,
    _MODEL,
)  # fmt: skip


class Space(NamedTuple):
    """Where the numbers of LANES series lie. First those of a step, then those kept of each."""

    none: int  # (max(m, p),) of zeros
    y: int  # (p,), then v, then e
    o: int  # (p,), 1.0 where y is observed, else 0.0
    d: int  # (p,)
    Z: int  # (p, m), as H with zeros where y is not observed
    H: int  # (p, p)
    T: int  # (m, m)
    W: int  # (m, m)
    c: int  # (m,)
    a: int  # (m,), then r
    P: int  # (m, m), then N
    share: int  # (m,), as `fill_shares` has them
    most: int  # (m,), the largest variances so far
    l: int  # the log-likelihood
    pivots: int  # the product of some pivots of F
    s: int  # (m,), T'r
    a_smooth: int  # (m,)
    X: int  # (m, m)
    Y: int  # (m, m)
    B: int  # (p, m) or (m, p)
    F: int  # (p, p), then its factor C
    c_bar: int
    d_bar: int
    T_bar: int
    Z_bar: int
    H_bar: int
    W_bar: int
    w: int  # (n, p), C^-1 v
    C_inv: int  # (n, p, p)
    S: int  # (n, p, m), C^-1 Z
    G: int  # (n, p, m), C^-1 Z P
    Kf: int  # (n, m, p)
    a_filt: int  # (n, m)
    P_filt: int  # (n, m, m)
    end: int


@jitable
def lay_out(n, p, m):
    """The places, and after the last one the number of vectors that are needed."""
    sizes = (
        max(m, p), p, p, p, p * m, p * p, m * m, m * m, m, m, m * m, m, m, 1, 1, m, m, m * m, m * m,
        p * m, p * p, m, p, m * m, p * m, p * p, m * m, n * p, n * p * p, n * p * m, n * p * m,
        n * p * m, n * m, n * m * m,
    )  # fmt: skip
    x = np.zeros(len(sizes) + 1, np.int64)
    for i in range(len(sizes)):
        x[i + 1] = x[i] + sizes[i]
    return Space(
        x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12], x[13],
        x[14], x[15], x[16], x[17], x[18], x[19], x[20], x[21], x[22], x[23], x[24], x[25], x[26],
        x[27], x[28], x[29], x[30], x[31], x[32], x[33], x[34],
    )  # fmt: skip


@jitable
def load_step(w, s, sizes, y, model, first, t):
    """y and the arrays of step t. Returns the least number of observations in any lane."""
    _, p, m = sizes
    gather(w, s.y, y, first, t)
    least, same = p, t > 0 and model.Z.steps == 1 and model.H.steps == 1
    for lane in range(LANES):
        seen = 0
        for i in range(p):
            there = not np.isnan(get(w, (s.y + i) * LANES + lane))
            if not there:
                put(w, (s.y + i) * LANES + lane, 0.0)
            o = 1.0 if there else 0.0
            same = same and get(w, (s.o + i) * LANES + lane) == o
            put(w, (s.o + i) * LANES + lane, o)
            seen += 1 if there else 0
        least = min(least, seen)
    for at, X in ((s.d, model.d), (s.c, model.c), (s.T, model.T), (s.W, model.W)):
        if t == 0 or X.steps > 1:
            gather(w, at, X, first, t)
    if same:
        return least
    gather(w, s.Z, model.Z, first, t)
    gather(w, s.H, model.H, first, t)
    for i in range(p):
        o = load(w, s.o + i)
        for k in range(s.Z + i * m, s.Z + (i + 1) * m):
            store(w, k, o * load(w, k))
        for k in range(p):
            x = load(w, s.H + i * p + k)
            store(w, s.H + i * p + k, o * x * load(w, s.o + k))
    return least


@jitable
def take_logarithms(w, s):
    """Add -1/2 log of the pivots, whose product has been formed, to l."""
    for lane in range(LANES):
        k = s.l * LANES + lane
        put(w, k, get(w, k) - 0.5 * np.log(get(w, s.pivots * LANES + lane)))
    store(w, s.pivots, broadcast(1.0))


@jitable
def cholesky(w, s, C_inv, p):
    """C in the place of F, and C^-1; the factor has a one where y is not observed."""
    one, none = broadcast(1.0), broadcast(0.0)
    for j in range(p):
        x = load(w, s.F + j * p + j) + (one - load(w, s.o + j))
        for k in range(j):
            c = load(w, s.F + j * p + k)
            x = x - c * c
        store(w, s.pivots, load(w, s.pivots) * x)
        x = root(x)
        store(w, s.F + j * p + j, x)
        for i in range(j + 1, p):
            y = load(w, s.F + i * p + j)
            for k in range(j):
                y = y - load(w, s.F + i * p + k) * load(w, s.F + j * p + k)
            store(w, s.F + i * p + j, y / x)
    for j in range(p):
        for i in range(p):
            x = load(w, s.o + j) if i == j else none
            for k in range(j, i):
                x = x - load(w, s.F + i * p + k) * load(w, C_inv + k * p + j)
            store(w, C_inv + i * p + j, x / load(w, s.F + i * p + i))


@jitable
def update(w, s, t, p, m):
    """From a and P to a_filt and P_filt, as :func:`helpers.kalman.recursions.factor`."""
    plus, minus, zero = broadcast(1.0), broadcast(-1.0), constant(s.none)
    P, Z, F, B = mat(s.P, m), mat(s.Z, m), mat(s.F, p), mat(s.B, p)
    C_inv, Kf = mat(s.C_inv + t * p * p, p), mat(s.Kf + t * m * p, p)
    S, G, P_filt = mat(s.S + t * p * m, m), mat(s.G + t * p * m, m), mat(s.P_filt + t * m * m, m)
    x = s.w + t * p
    ZP = mat(s.B, m)
    product(w, ZP, plus, Z, P, zero, p, m, m)
    product(w, F, plus, ZP, transposed(Z), mat(s.H, p), p, m, p, True)
    cholesky(w, s, C_inv.at, p)
    product(w, S, plus, C_inv, Z, zero, p, p, m)
    product(w, G, plus, C_inv, ZP, zero, p, p, m)
    product(w, Kf, plus, transposed(G), C_inv, zero, m, p, p)
    for i in range(p):
        store(w, s.y + i, load(w, s.y + i) - load(w, s.d + i))
    apply(w, s.y, minus, Z, s.a, s.y, p, m)
    apply(w, x, plus, C_inv, s.y, s.none, p, p)
    apply(w, s.a_filt + t * m, plus, transposed(G), x, s.a, m, p)
    square = broadcast(0.0)
    for i in range(p):
        square = square + load(w, x + i) * load(w, x + i) + broadcast(LOG_2PI) * load(w, s.o + i)
    store(w, s.l, load(w, s.l) - broadcast(0.5) * square)
    # Joseph's form: X = P - G'G, then X - (X Z' - Kf H) Kf'.
    product(w, P_filt, minus, transposed(G), G, P, m, p, m, True)
    product(w, B, minus, Kf, mat(s.H, p), zero, m, p, p)
    product(w, B, plus, P_filt, transposed(Z), B, m, m, p)
    product(w, P_filt, minus, B, transposed(Kf), P_filt, m, p, m, True)


@jitable
def fell(w, s, P, m):
    """Above zero where a variance of P is below its share of the most that it was.

    If its share is not 0. Then P may count as the most.
    """
    found = broadcast(-1.0)
    for i in range(m):
        x, share, most = load(w, P + i * m + i), load(w, s.share + i), load(w, s.most + i)
        found = larger(share * (share * most - x), found)
        store(w, s.most + i, larger(x, most))
    return found


@jitable
def filter_lanes(w, s, sizes, y, model, shares, first):
    """Forwards. Returns a number above zero for the series whose P0 may be vague."""
    n, p, m = sizes
    plus, zero = broadcast(1.0), constant(s.none)
    P, T, W, X = mat(s.P, m), mat(s.T, m), mat(s.W, m), mat(s.X, m)
    gather(w, s.a, model.a0, first, 0)
    gather(w, s.P, model.P0, first, 0)
    clear(w, s.none, max(m, p))
    clear(w, s.l, 1)
    store(w, s.pivots, plus)
    gather(w, s.share, shares, first, 0)
    clear(w, s.most, m)
    vague, taken = fell(w, s, s.P, m), 0
    for t in range(n):
        watch = taken < WATCHED * m
        taken += load_step(w, s, sizes, y, model, first, t)
        update(w, s, t, p, m)
        P_filt = mat(s.P_filt + t * m * m, m)
        if (t + 1) * p % FACTORS < p or t == n - 1:
            take_logarithms(w, s)
        if t == n - 1:
            return larger(fell(w, s, P_filt.at, m), vague) if watch else vague
        apply(w, s.a, plus, T, s.a_filt + t * m, s.c, m, m)
        product(w, X, plus, T, P_filt, zero, m, m, m)
        product(w, P, plus, X, transposed(T), W, m, m, m, True)
        if watch:
            vague = larger(fell(w, s, s.P, m), vague)
    return vague


@jitable
def add_outer(w, X, weight, x, y, sign, Y, rows, cols):
    """X += weight (x y' + sign Y), for vectors x and y."""
    for i in range(rows):
        left = load(w, x + i)
        for k in range(cols):
            more = left * load(w, y + k) + sign * load(w, Y.at + i * Y.ld + k * Y.step)
            store(w, X + i * cols + k, load(w, X + i * cols + k) + weight * more)


@jitable
def smooth_lanes(w, s, sizes, model, y_bar, out, first):
    """Backwards, as :func:`helpers.kalman.recursions.pull_smooth`: y_bar and the gradient."""
    n, p, m = sizes
    plus, minus, half, zero = broadcast(1.0), broadcast(-1.0), broadcast(0.5), constant(s.none)
    e, r, sr, a_smooth = s.y, s.a, s.s, s.a_smooth
    N, T, X, Y, B = mat(s.P, m), mat(s.T, m), mat(s.X, m), mat(s.Y, m), mat(s.B, m)
    T_bar, Z_bar, D = mat(s.T_bar, m), mat(s.Z_bar, m), mat(s.F, p)
    clear(w, s.a, m)
    clear(w, s.P, m * m)
    clear(w, s.c_bar, s.w - s.c_bar)
    for t in range(n - 1, -1, -1):
        if model.T.steps > 1:
            gather(w, s.T, model.T, first, t)
        C_inv, Kf = mat(s.C_inv + t * p * p, p), mat(s.Kf + t * m * p, p)
        S, G = mat(s.S + t * p * m, m), mat(s.G + t * p * m, m)
        P_filt, x = mat(s.P_filt + t * m * m, m), s.w + t * p
        apply(w, sr, plus, transposed(T), r, s.none, m, m)
        apply(w, a_smooth, plus, P_filt, sr, s.a_filt + t * m, m, m)
        apply(w, e, plus, transposed(C_inv), x, s.none, p, p)
        apply(w, e, minus, transposed(Kf), sr, e, p, m)
        product(w, Y, plus, N, T, zero, m, m, m)
        product(w, X, plus, transposed(T), Y, zero, m, m, m, True)
        product(w, T_bar, minus, Y, P_filt, T_bar, m, m, m)
        add_outer(w, s.T_bar, plus, r, a_smooth, plus, zero, m, m)
        add_outer(w, s.W_bar, half, r, r, minus, N, m, m)
        product(w, B, plus, transposed(Kf), X, zero, p, m, m)
        product(w, Z_bar, plus, B, P_filt, Z_bar, p, m, m)
        add_outer(w, s.Z_bar, plus, e, a_smooth, minus, transposed(Kf), p, m)
        product(w, D, plus, B, Kf, zero, p, m, p)
        product(w, D, plus, transposed(C_inv), C_inv, D, p, p, p)
        add_outer(w, s.H_bar, half, e, e, minus, D, p, p)
        for i in range(m):
            store(w, s.c_bar + i, load(w, s.c_bar + i) + load(w, r + i))
        for i in range(p):
            store(w, s.d_bar + i, load(w, s.d_bar + i) + load(w, e + i))
            store(w, e + i, minus * load(w, e + i))
        for at, A in (
            (s.c_bar, out.c), (s.d_bar, out.d), (s.T_bar, out.T), (s.Z_bar, out.Z),
            (s.H_bar, out.H), (s.W_bar, out.W),
        ):  # fmt: skip
            if t == 0 or A.steps > 1:
                scatter(w, at, A, first, t)
        # r and N before the step, with J = I - G'S: J's + S'w and J'X J + S'S.
        apply(w, r, plus, transposed(S), x, sr, m, p)
        apply(w, x, plus, G, sr, s.none, p, m)
        apply(w, r, minus, transposed(S), x, r, m, p)
        product(w, B, plus, G, X, zero, p, m, m)
        product(w, X, minus, transposed(B), S, X, m, p, m)
        product(w, B, minus, G, X, S, p, m, m)
        product(w, N, plus, transposed(S), B, X, m, p, m, True)
        scatter(w, s.y, y_bar, first, t)
    clear(w, s.X, m * m)
    add_outer(w, s.X, half, r, r, minus, N, m, m)
    scatter(w, s.a, out.a0, first, 0)
    scatter(w, s.X, out.P0, first, 0)


@jitable
def all_in_lanes(w, s, sizes, first, stop, ends, y, model, shares, backwards, l, vague, y_bar, out):
    """Series first to stop - 1 in the memory w; arrays in `Many`."""
    _, p, m = sizes
    for j in range(first, stop, LANES):
        n = 1
        for lane in range(min(LANES, stop - j)):
            n = max(n, ends[j + lane])
        store(w, s.X, filter_lanes(w, s, (n, p, m), y, model, shares, j))
        scatter(w, s.X, vague, j, 0)
        scatter(w, s.l, l, j, 0)
        if backwards:
            smooth_lanes(w, s, (n, p, m), model, y_bar, out, j)


@jitable
def many(X, size):
    """An array (series, steps, ...) or (series, ...) by its address."""
    return Many(X.ctypes.data, X.shape[0], X.size // (X.shape[0] * size), size)


@jitable
def all_many(arrays, p, m):
    """Arrays of all series by their addresses."""
    return Arrays(
        many(arrays.a0, m), many(arrays.P0, m * m), many(arrays.c, m), many(arrays.d, p),
        many(arrays.T, m * m), many(arrays.Z, p * m), many(arrays.H, p * p), many(arrays.W, m * m),
    )  # fmt: skip


@jitable
def member(A, j):
    """That of series j, or of all."""
    return A[j if len(A) > 1 else 0]


@kept_on_disk(njit(IN_LANES, cache=True, error_model="numpy", nogil=True))
def in_lanes(first, stop, ends, y, model, backwards, l, vague, y_bar, out):
    """Series first to stop - 1, each of ends[j] steps: their l (J,), y_bar (J, n, p) and out.

    All arrays are contiguous and have a first axis for the series, of length 1 in `model` where
    they share it; those of the model and of `out`, in `Arrays`, have a second one of length 1 or n
    for time (not a0 and P0). `first` is a multiple of LANES, or the series before it are done.
    vague (J,) is above zero where the result is not to be used, since P0 may be vague.
    """
    n, p = y.shape[1:]
    m = model.a0.shape[1]
    s = lay_out(n, p, m)
    memory = np.empty((s.end + 1) * LANES)
    w = (memory.ctypes.data + 63) // 64 * 64
    shares = np.empty((max(len(model.P0), len(model.T), len(model.W)), m))
    for j in range(len(shares)):
        fill_shares(member(model.P0, j), member(model.T, j), member(model.W, j), shares[j])
    all_in_lanes(
        w, s, (n, p, m), first, stop, ends, many(y, p), all_many(model, p, m), many(shares, m),
        backwards, many(l, 1), many(vague, 1), many(y_bar, p), all_many(out, p, m),
    )  # fmt: skip
    memory[0], shares[0, 0] = 0.0, 0.0  # their addresses were good until here


@jitable
def of_series(arrays, j, n):
    """The arrays of series j, of n steps."""
    return Arrays(
        member(arrays.a0, j), member(arrays.P0, j), until(member(arrays.c, j), n),
        until(member(arrays.d, j), n), until(member(arrays.T, j), n), until(member(arrays.Z, j), n),
        until(member(arrays.H, j), n), until(member(arrays.W, j), n),
    )  # fmt: skip


@kept_on_disk(njit(PASSES, cache=True, error_model="numpy", nogil=True))
def passes(members, ends, y, model, backwards, tol, l, failed, y_bar, out):
    """The series `members` one by one: as :func:`in_lanes`, added to y_bar and out.

    failed (J,) receives the step whose F is not positive definite; l is NaN then.
    """
    wanted, report = Wanted(backwards, backwards, backwards, backwards), np.empty(3, np.int64)
    ones, terms = np.ones(y.shape[1]), np.empty(y.shape[1])
    for j in members:
        n = ends[j]
        how = call(
            y[j, :n], of_series(model, j, n), of_series(out, j, n), terms[:n], ones[:n],
            y_bar[j, :n], backwards, wanted, tol, report,
        )  # fmt: skip
        l[j] = terms[:n].sum() if how == DONE else np.nan
        if how != DONE:
            failed[j] = report[0]
