"""The filter and its smoother for LANES series at once, each with a model of its own.

The text is that of :mod:`helpers.kalman.recursions`, entry by entry, with a vector for each number
(:mod:`~helpers.kalman.fused.lanes`): forwards the filter, backwards the disturbance smoother in
factors. The covariances are in a steady state where those of all LANES series are. There is no
start in roots. :mod:`~helpers.kalman.fused.own` compiles it.
"""

from typing import NamedTuple

import numpy as np

from helpers.kalman.fused.forward import is_steady, is_time_to_look
from helpers.kalman.fused.lanes import (
    apply,
    broadcast,
    clear,
    constant,
    gather,
    load,
    mat,
    mirror,
    product,
    root,
    scatter,
    store,
)
from helpers.kalman.fused.registers import larger
from helpers.kalman.fused.tiles import LANES, get, jitable, put, transposed
from helpers.kalman.recursions import LOG_2PI
from helpers.kalman.square_root import WATCHED

# Pivots whose logarithms are taken together. Where their product is beyond the range of a double,
# or so small that it has lost digits, the series takes the pass for one.
FACTORS = 8
TINY = 1e-300  # also in the place of the square of a variance that is zero


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
    of_step: int  # that of the pivots of one step
    before: int  # how far P, or N, moved when it was looked at last
    now: int  # how far it moves
    s: int  # (m,), T'r
    a_smooth: int  # (m,)
    X: int  # (m, m)
    Y: int  # (m, m)
    next: int  # (m, m), P after the step, N before it
    N_sum: int  # (m, m)
    B: int  # (p, m) or (m, p)
    F: int  # (p, p), then its factor C
    c_bar: int
    d_bar: int
    T_bar: int
    Z_bar: int
    H_bar: int
    W_bar: int
    w: int  # (n, p), C^-1 v
    a_filt: int  # (n, m)
    C_inv: int  # (n, p, p); of steps that have the covariances of another one, nothing
    S: int  # (n, p, m), C^-1 Z
    G: int  # (n, p, m), C^-1 Z P
    Kf: int  # (n, m, p)
    P_filt: int  # (n, m, m)
    end: int


@jitable
def lay_out(n, p, m):
    """The places, and after the last one the number of vectors that are needed."""
    sizes = (
        max(m, p), p, p, p, p * m, p * p, m * m, m * m, m, m, m * m, m, m, 1, 1, 1, 1, 1, m, m,
        m * m, m * m, m * m, m * m, p * m, p * p, m, p, m * m, p * m, p * p, m * m, n * p,
        n * m, n * p * p, n * p * m, n * p * m, n * p * m, n * m * m,
    )  # fmt: skip
    x = np.zeros(len(sizes) + 1, np.int64)
    for i in range(len(sizes)):
        x[i + 1] = x[i] + sizes[i]
    return Space(
        x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12], x[13],
        x[14], x[15], x[16], x[17], x[18], x[19], x[20], x[21], x[22], x[23], x[24], x[25], x[26],
        x[27], x[28], x[29], x[30], x[31], x[32], x[33], x[34], x[35], x[36], x[37], x[38], x[39],
    )  # fmt: skip


@jitable
def load_step(w, s, sizes, y, model, first, t):
    """y and the arrays of step t.

    Returns the least number of observations in any lane, and whether each has the gaps of step
    t - 1 and Z and H do not vary.
    """
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
        return least, same
    gather(w, s.Z, model.Z, first, t)
    gather(w, s.H, model.H, first, t)
    for i in range(p):
        o = load(w, s.o + i)
        for k in range(s.Z + i * m, s.Z + (i + 1) * m):
            store(w, k, o * load(w, k))
        for k in range(p):
            x = load(w, s.H + i * p + k)
            store(w, s.H + i * p + k, o * x * load(w, s.o + k))
    return least, same


@jitable
def take_logarithms(w, s):
    """Add -1/2 log of the pivots, whose product has been formed, to l; NaN if it is TINY."""
    for lane in range(LANES):
        k, x = s.l * LANES + lane, get(w, s.pivots * LANES + lane)
        put(w, k, get(w, k) - 0.5 * np.log(x if x > TINY else np.nan))
    store(w, s.pivots, broadcast(1.0))


@jitable
def cholesky(w, s, C_inv, p):
    """C in the place of F, and C^-1; the factor has a one where y is not observed."""
    one, none = broadcast(1.0), broadcast(0.0)
    store(w, s.of_step, one)
    for j in range(p):
        x = load(w, s.F + j * p + j) + (one - load(w, s.o + j))
        for k in range(j):
            c = load(w, s.F + j * p + k)
            x = x - c * c
        store(w, s.of_step, load(w, s.of_step) * x)
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
def update_covariance(w, s, P, t, p, m):
    """From P to P_filt and the gains, as :func:`helpers.kalman.recursions.factor`."""
    plus, minus, zero = broadcast(1.0), broadcast(-1.0), constant(s.none)
    Z, F, B = mat(s.Z, m), mat(s.F, p), mat(s.B, p)
    C_inv, Kf = mat(s.C_inv + t * p * p, p), mat(s.Kf + t * m * p, p)
    S, G, P_filt = mat(s.S + t * p * m, m), mat(s.G + t * p * m, m), mat(s.P_filt + t * m * m, m)
    ZP = mat(s.B, m)
    product(w, ZP, plus, Z, P, zero, p, m, m)
    product(w, F, plus, ZP, transposed(Z), mat(s.H, p), p, m, p, True)
    cholesky(w, s, C_inv.at, p)
    product(w, S, plus, C_inv, Z, zero, p, p, m)
    product(w, G, plus, C_inv, ZP, zero, p, p, m)
    product(w, Kf, plus, transposed(G), C_inv, zero, m, p, p)
    # Joseph's form: X = P - G'G, then X - (X Z' - Kf H) Kf'.
    product(w, P_filt, minus, transposed(G), G, P, m, p, m, True)
    product(w, B, minus, Kf, mat(s.H, p), zero, m, p, p)
    product(w, B, plus, P_filt, transposed(Z), B, m, m, p)
    product(w, P_filt, minus, B, transposed(Kf), P_filt, m, p, m, True)


@jitable
def update_mean(w, s, t, gain, p, m):
    """From a to a_filt, and what the step adds to l, with the gains of step `gain`."""
    x, Z = s.w + t * p, mat(s.Z, m)
    for i in range(p):
        store(w, s.y + i, load(w, s.y + i) - load(w, s.d + i))
    apply(w, s.y, broadcast(-1.0), Z, s.a, s.y, p, m)
    apply(w, x, broadcast(1.0), mat(s.C_inv + gain * p * p, p), s.y, s.none, p, p)
    G_t = transposed(mat(s.G + gain * p * m, m))
    apply(w, s.a_filt + t * m, broadcast(1.0), G_t, x, s.a, m, p)
    square = broadcast(0.0)
    for i in range(p):
        square = square + load(w, x + i) * load(w, x + i) + broadcast(LOG_2PI) * load(w, s.o + i)
    store(w, s.l, load(w, s.l) - broadcast(0.5) * square)
    store(w, s.pivots, load(w, s.pivots) * load(w, s.of_step))


@jitable
def moved(w, s, X, Y, m):
    """How far a covariance moved from X to Y, as :func:`forward.change` has it: to s.now."""
    least, largest = broadcast(TINY), broadcast(0.0)
    for i in range(m):
        x = larger(load(w, X + i * m + i), load(w, Y + i * m + i))
        store(w, s.s + i, x / larger(x * x, least))  # 1 / x, or 0 for 0
        for k in range(i + 1):
            x = load(w, Y + i * m + k) - load(w, X + i * m + k)
            largest = larger(x * x * load(w, s.s + i) * load(w, s.s + k), largest)
    store(w, s.now, root(largest))


@jitable
def all_steady(w, s, steps, tol):
    """Whether the covariances of all lanes are steady; what s.now says becomes s.before."""
    steady = True
    for lane in range(LANES):
        now, before = get(w, s.now * LANES + lane), get(w, s.before * LANES + lane)
        steady = steady and is_steady(now, before, steps, tol)
    store(w, s.before, load(w, s.now))
    return steady


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
def may_settle(model):
    """Whether nothing that the covariances depend on varies over time."""
    return model.T.steps == 1 and model.Z.steps == 1 and model.H.steps == 1 and model.W.steps == 1


@jitable
def filter_lanes(w, s, sizes, y, model, shares, tol, first, gain_of):
    """Forwards. Returns a number above zero for the series whose P0 may be vague.

    gain_of (n,) receives of each step the one that its covariances are of.
    """
    n, p, m = sizes
    plus, zero = broadcast(1.0), constant(s.none)
    T, W, X = mat(s.T, m), mat(s.W, m), mat(s.X, m)
    P, P_next = mat(s.P, m), mat(s.next, m)
    gather(w, s.a, model.a0, first, 0)
    gather(w, s.P, model.P0, first, 0)
    clear(w, s.none, max(m, p))
    clear(w, s.l, 1)
    store(w, s.pivots, plus)
    gather(w, s.share, shares, first, 0)
    clear(w, s.most, m)
    vague, taken = fell(w, s, s.P, m), 0
    looks, steady, since, looked = tol > 0.0 and may_settle(model), False, 0, 0
    store(w, s.before, broadcast(-1.0))
    for t in range(n):
        watch = taken < WATCHED * m
        seen, same = load_step(w, s, sizes, y, model, first, t)
        taken += seen
        if not same:
            steady, since, looked = False, t, t
            store(w, s.before, broadcast(-1.0))
        gain_of[t] = gain_of[t - 1] if steady else t
        gain = gain_of[t]
        P_filt = mat(s.P_filt + gain * m * m, m)
        if not steady:
            update_covariance(w, s, P, t, p, m)
        update_mean(w, s, t, gain, p, m)
        if (t + 1) * p % FACTORS < p or t == n - 1:
            take_logarithms(w, s)
        if t == n - 1:
            return larger(fell(w, s, P_filt.at, m), vague) if watch else vague
        apply(w, s.a, plus, T, s.a_filt + t * m, s.c, m, m)
        if steady:
            continue
        product(w, X, plus, T, P_filt, zero, m, m, m)
        product(w, P_next, plus, X, transposed(T), W, m, m, m, True)
        if watch:
            vague = larger(fell(w, s, P_next.at, m), vague)
        if looks and is_time_to_look(t - looked, t - since):
            moved(w, s, P.at, P_next.at, m)
            steady = all_steady(w, s, t - looked, tol)
            looked = t
        P, P_next = P_next, P
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
def add_step(w, s, t, m, p):
    """What r, e and the smoothed state of step t add to the gradients; those of W, H: half of it.

    Of what is symmetric, only the lower half.
    """
    e, r, a_smooth = s.y, s.a, s.a_smooth
    for i in range(m):
        x = load(w, r + i)
        store(w, s.c_bar + i, load(w, s.c_bar + i) + x)
        add_row(w, s.T_bar + i * m, x, a_smooth, m)
        add_row(w, s.W_bar + i * m, x, r, i + 1)
    for i in range(p):
        x = load(w, e + i)
        store(w, s.d_bar + i, load(w, s.d_bar + i) + x)
        add_row(w, s.Z_bar + i * m, x, a_smooth, m)
        add_row(w, s.H_bar + i * p, x, e, i + 1)


@jitable
def add_covariances(w, s, N, gain, count, m, p):
    """What N, the sum over the `count` steps with the gains of step `gain`, adds; X = T' N T."""
    plus, minus, zero = broadcast(1.0), broadcast(-1.0), constant(s.none)
    X, Y, B, D = mat(s.X, m), mat(s.Y, m), mat(s.B, m), mat(s.F, p)
    C_inv, Kf = mat(s.C_inv + gain * p * p, p), mat(s.Kf + gain * m * p, p)
    P_filt, T_bar, Z_bar = mat(s.P_filt + gain * m * m, m), mat(s.T_bar, m), mat(s.Z_bar, m)
    times = broadcast(1.0 * count)
    product(w, T_bar, minus, Y, P_filt, T_bar, m, m, m)
    product(w, B, plus, transposed(Kf), X, zero, p, m, m)
    product(w, Z_bar, plus, B, P_filt, Z_bar, p, m, m)
    product(w, D, times, transposed(C_inv), C_inv, zero, p, p, p, True)
    product(w, D, plus, B, Kf, D, p, m, p, True)
    for i in range(p):
        for k in range(m):
            x = load(w, s.Z_bar + i * m + k) - times * load(w, Kf.at + k * p + i)
            store(w, s.Z_bar + i * m + k, x)
        add_row(w, s.H_bar + i * p, minus, D.at + i * p, i + 1)
    for i in range(m):
        add_row(w, s.W_bar + i * m, minus, N + i * m, i + 1)


@jitable
def add_row(w, at, x, y, count):
    """Add x times the numbers at y to those at a place."""
    for k in range(count):
        store(w, at + k, load(w, at + k) + x * load(w, y + k))


@jitable
def n_through_t(w, s, N, m):
    """Y = N T and X = T' N T."""
    T, X, Y, zero = mat(s.T, m), mat(s.X, m), mat(s.Y, m), constant(s.none)
    product(w, Y, broadcast(1.0), mat(N, m), T, zero, m, m, m)
    product(w, X, broadcast(1.0), transposed(T), Y, zero, m, m, m, True)


@jitable
def hand_over(w, s, t, sizes, out, first):
    """The gradients to those of the series, of step t where they vary, and zeros in their place."""
    _, p, m = sizes
    half = broadcast(0.5)
    for at, A, size in ((s.H_bar, out.H, p), (s.W_bar, out.W, m)):
        if t == 0 or A.steps > 1:
            for i in range(size):
                for k in range(i + 1):
                    store(w, at + i * size + k, half * load(w, at + i * size + k))
            mirror(w, mat(at, size), size)
    for at, A in (
        (s.c_bar, out.c), (s.d_bar, out.d), (s.T_bar, out.T), (s.Z_bar, out.Z), (s.H_bar, out.H),
        (s.W_bar, out.W),
    ):  # fmt: skip
        if t == 0 or A.steps > 1:
            scatter(w, at, A, first, t)


@jitable
def smooth_lanes(w, s, sizes, model, tol, y_bar, out, first, gain_of):
    """Backwards, as :func:`helpers.kalman.recursions.pull_smooth`: y_bar and the gradient.

    In a steady stretch N settles too, and is then left as it is.
    """
    n, p, m = sizes
    plus, minus, zero = broadcast(1.0), broadcast(-1.0), constant(s.none)
    e, r, sr, a_smooth = s.y, s.a, s.s, s.a_smooth
    N, N_before, T, X, B = mat(s.P, m), mat(s.next, m), mat(s.T, m), mat(s.X, m), mat(s.B, m)
    clear(w, s.a, m)
    clear(w, s.P, m * m)
    clear(w, s.N_sum, m * m)
    clear(w, s.c_bar, s.w - s.c_bar)
    settled, since, looked, count, same = False, n, n, 0, 0
    for t in range(n - 1, -1, -1):
        if model.T.steps > 1:
            gather(w, s.T, model.T, first, t)
        gain = gain_of[t]
        if t == n - 1 or gain != gain_of[t + 1]:
            settled, since, looked = False, t, t
            store(w, s.before, broadcast(-1.0))
        C_inv, Kf = mat(s.C_inv + gain * p * p, p), mat(s.Kf + gain * m * p, p)
        S, G = mat(s.S + gain * p * m, m), mat(s.G + gain * p * m, m)
        P_filt, x = mat(s.P_filt + gain * m * m, m), s.w + t * p
        apply(w, sr, plus, transposed(T), r, s.none, m, m)
        apply(w, a_smooth, plus, P_filt, sr, s.a_filt + t * m, m, m)
        apply(w, e, plus, transposed(C_inv), x, s.none, p, p)
        apply(w, e, minus, transposed(Kf), sr, e, p, m)
        add_step(w, s, t, m, p)
        for i in range(p):
            store(w, e + i, minus * load(w, e + i))
        scatter(w, e, y_bar, first, t)
        alone = gain == t and count == 0  # the only step with these gains
        count += 1
        if settled:
            same += 1
        elif not alone:
            add_row(w, s.N_sum, plus, N.at, m * m)
        if alone:
            n_through_t(w, s, N.at, m)
            add_covariances(w, s, N.at, gain, 1, m, p)
        elif gain == t:
            add_row(w, s.N_sum, broadcast(1.0 * same), N.at, m * m)
            n_through_t(w, s, s.N_sum, m)
            add_covariances(w, s, s.N_sum, gain, count, m, p)
            clear(w, s.N_sum, m * m)
        hand_over(w, s, t, sizes, out, first)
        # r and N before the step, with J = I - G'S: J's + S'w and J'X J + S'S.
        apply(w, r, plus, transposed(S), x, sr, m, p)
        apply(w, x, plus, G, sr, s.none, p, m)
        apply(w, r, minus, transposed(S), x, r, m, p)
        if not settled:
            if not alone:
                n_through_t(w, s, N.at, m)
            product(w, B, plus, G, X, zero, p, m, m)
            product(w, X, minus, transposed(B), S, X, m, p, m)
            product(w, B, minus, G, X, S, p, m, m)
            product(w, N_before, plus, transposed(S), B, X, m, p, m, True)
            if tol > 0.0 and is_time_to_look(looked - t, since - t):
                moved(w, s, N.at, N_before.at, m)
                settled = all_steady(w, s, looked - t, tol)
                looked = t
            N, N_before = N_before, N
        if gain == t:
            count, same = 0, 0
    clear(w, s.X, m * m)
    for i in range(m):
        add_row(w, s.X + i * m, broadcast(0.5) * load(w, r + i), r, m)
    add_row(w, s.X, broadcast(-0.5), N.at, m * m)
    scatter(w, s.a, out.a0, first, 0)
    scatter(w, s.X, out.P0, first, 0)


@jitable
def all_in_lanes(
    w, s, sizes, first, stop, ends, y, model, shares, backwards, tol, l, vague, y_bar, out, gain_of
):  # fmt: skip
    """Series first to stop - 1 in the memory w, gain_of (n,) beside it; arrays in `Many`."""
    _, p, m = sizes
    for j in range(first, stop, LANES):
        n = 1
        for lane in range(min(LANES, stop - j)):
            n = max(n, ends[j + lane])
        store(w, s.X, filter_lanes(w, s, (n, p, m), y, model, shares, tol, j, gain_of))
        scatter(w, s.X, vague, j, 0)
        scatter(w, s.l, l, j, 0)
        if backwards:
            smooth_lanes(w, s, (n, p, m), model, tol, y_bar, out, j, gain_of)
