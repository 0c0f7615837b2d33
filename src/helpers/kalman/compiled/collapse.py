"""More series than states: each step's p observations become m, exactly, by one rotation.

With H = H^1/2 H^1/2' the entries of x = H^-1/2 (y - d) have unit variances. H^-1/2 Z = V A, V with
orthonormal columns and A upper triangular, says which m combinations of them see the state:
x* = V'x = A alpha + noise of covariance I. What is left, x - V x*, is independent of the state and
of x*. A missing component is a number that y leaves free: the column of H^-1/2 that belongs to it
is projected out of both sides. (For a diagonal H that leaves its row out.) A column of H^-1/2 Z
that depends on those before it has a zero in the place of its column of V: few observations need
nothing else. The gradient comes back by products with B = V' H^-1/2 and z = H^-1/2' (x - V x*).

Labels name the equations of the chapter "A hundred series". A collapse by (Z'H^-1 Z)^-1 Z'H^-1
instead: Jungbacker and Koopman 2015, doi:10.1111/ectj.12029.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from numba import types

from helpers.kalman.compiled.inputs import Arrays
from helpers.kalman.compiled.tiles import jitable
from helpers.kalman.recursions import LOG_2PI, at_step

# A pivot of H below this share of its variance leaves too few digits to divide by.
LEAST_PIVOT = 1e-10
# What is left of a column below this share of it is rounding.
SPANNED = 1e-14
# So many steps are rotated at a time: few enough for their rows to stay in a cache.
AT_ONCE = 64
# Gaps that leave less than this share of something do not correct a basis, but have their own.
LEAST_SEEN = 0.2
# The same where a sum over what is observed corrects it, which is no difference.
LEAST_SUM = 0.05
# Pivot of K's part for gaps, for each of its entries, below which too few digits are left.
LEAST_GAPS = 1e-2
# A row of which less than this share is left is projected once more.
FEW_DIGITS = 1e-2
# The smoothed state is solved for where that costs fewer than four digits.
WORST_A = 1e4
# What the states do not explain has to be this share of H^-1, or H_bar loses its digits.
LEAST_LEFT = 1e-3


class Patterns(NamedTuple):
    """Steps sorted so that those that observe the same components stand together."""

    order: np.ndarray  # (n,), the step at each place
    start: np.ndarray  # (patterns + 1,), the place where each pattern begins


class Rotated(NamedTuple):
    """What rotations make of the data, and what leads back; steps in the order of `Patterns`.

    Patterns that share Z and H share K = H^-1, B and A of all series. One that misses the series g,
    with the rows B_g of B' and K_g of K, has the solution D of K_gg D = B_g and U'U = I - B_g' D:
    its B is U^-T (B - D' K_g), its A is U A (eq-hundred-shared). A pattern that has its `own` B
    misses more than it sees, or leaves U too close to singular; or Z or H varies.
    """

    x: np.ndarray  # (n, m), x*
    z: np.ndarray  # (n, p)
    l: np.ndarray  # (n,), the log-likelihood of what does not see the state
    A: np.ndarray  # (patterns, m, m), of each its own
    U_inv: np.ndarray  # the same; of an own B that is still to be multiplied by U^-T
    own: np.ndarray  # (patterns,)
    first: np.ndarray  # (patterns + 1,), where the series of each begin
    series: np.ndarray  # those that a pattern misses, or sees if it has its own B
    rows: np.ndarray  # (len(series), m), for each its row of D, or of B' if it is its own
    B_t: np.ndarray  # (p, m), B'
    K: np.ndarray  # (p, p); of a diagonal H its diagonal, (1, p)
    H_inv: np.ndarray  # (1 or n, p, p), or (1 or n, 1, p): the sum of g K over what shares H_bar
    H_gaps: np.ndarray  # as K, the sum of g K_gg^-1


# Their types in compiled code.
PATTERNS = types.NamedUniTuple(types.int64[::1], 2, Patterns)
_AXES = {"l": 1, "A": 3, "U_inv": 3, "H_inv": 3}
_INTEGERS = {"own": types.bool_[::1], "first": types.int64[::1], "series": types.int64[::1]}
ROTATED = types.NamedTuple(
    [_INTEGERS.get(x) or types.Array(types.float64, _AXES.get(x, 2), "C") for x in Rotated._fields],
    Rotated,
)


@jitable
def seen_of(y):
    """Ones where series y (J, n, p) are observed, a row each; zeros elsewhere."""
    J, n, p = y.shape
    seen = np.zeros((J, n * p), np.uint8)
    for j in range(J):
        for t in range(n):
            for i in range(p):
                seen[j, t * p + i] = not np.isnan(y[j, t, i])
    return seen


@jitable
def same_pattern(o, s, t):
    """Whether steps s and t observe the same components."""
    for i in range(o.shape[1]):
        if o[s, i] != o[t, i]:
            return False
    return True


@jitable
def patterns_of(o, varying):
    """`Patterns` of o (n, p), 0 where y is missing; a step each if the matrices are `varying`."""
    n, p = o.shape
    first, pattern, count = np.zeros(n, np.int64), np.arange(n), 0
    # Patterns with one key stand in a chain: its last one, and before each another.
    last, before = np.full(n, -1), np.zeros(n, np.int64)
    numbers = 1 + (2654435761 * np.arange(p) + 40503 * np.arange(p) ** 2) % 2147483647
    for t in range(n):
        key = 0
        for i in range(p):
            key += numbers[i] * np.int64(o[t, i])
        key %= n
        k = -1 if varying else last[key]
        while k >= 0 and not same_pattern(o, first[k], t):
            k = before[k]
        if k < 0:
            k, count = count, count + 1
            first[k], before[k], last[key] = t, last[key], k
        pattern[t] = k
    order, start = np.zeros(n, np.int64), np.zeros(count + 1, np.int64)
    for t in range(n):
        start[pattern[t] + 1] += 1
    for k in range(count):
        start[k + 1] += start[k]
        first[k] = start[k]
    for t in range(n):
        order[first[pattern[t]]] = t
        first[pattern[t]] += 1
    return Patterns(order, start)


@jitable
def patterns_in(y, Z, H):
    """What of y (n, p) is observed, as ones and zeros, and `Patterns` for these matrices."""
    o = seen_of(y.reshape((-1, 1, y.shape[1])))
    return o, patterns_of(o, max(len(Z), len(H)) > 1)


@jitable
def is_diagonal(H):
    """Whether H (1 or n, p, p) is zero off the diagonal at any time."""
    for t in range(len(H)):
        for i in range(H.shape[1]):
            for j in range(H.shape[1]):
                if i != j and H[t, i, j] != 0.0:
                    return False
    return True


@partial(jitable, fastmath={"reassoc"})
def dot(A, i, B, j, length):
    """The product of row i of A and row j of B, of so many entries."""
    x = 0.0
    for k in range(length):
        x += A[i, k] * B[j, k]
    return x


@jitable
def add(A, i, factor, B, j, length):
    """Add `factor` times row j of B to row i of A, so many entries."""
    for k in range(length):
        A[i, k] += factor * B[j, k]


@jitable
def times(X, A, out, diagonal):
    """out = X A; of an A that is `diagonal` its diagonal is given, A (1, p)."""
    if not diagonal:
        np.dot(X, A, out)
        return
    for i in range(X.shape[0]):
        for j in range(X.shape[1]):
            out[i, j] = X[i, j] * A[0, j]


@jitable
def factor(S, size, least, L, L_inv):
    """L and L^-1 with L L' = S (size, size), and log|S|; NaN if a pivot has less of its variance.

    L and L_inv have room for it. What they hold above the diagonal is not read.
    """
    logdet = 0.0
    for j in range(size):
        x = S[j, j] - dot(L, j, L, j, j)
        if not least * S[j, j] < x < np.inf:
            return np.nan
        logdet += np.log(x)
        L[j, j] = np.sqrt(x)
        for i in range(j + 1, size):
            L[i, j] = (S[i, j] - dot(L, i, L, j, j)) / L[j, j]
    for i in range(size):
        for j in range(i + 1):
            L_inv[i, j] = 0.0
        L_inv[i, i] = 1.0
        for j in range(i):
            add(L_inv, i, -L[i, j], L_inv, j, j + 1)
        for j in range(i + 1):
            L_inv[i, j] /= L[i, i]
    return logdet


@jitable
def project(X, row, V, rows, along):
    """Take from a row of X its part in the first `rows` rows of V, which ``along`` (rows,) gets.

    Once more where little is left, of which the rounding of the first time would be too much.
    """
    for j in range(rows):
        along[j] = 0.0
    before, again = dot(X, row, X, row, X.shape[1]), True
    while again:
        for j in range(rows):
            x = dot(V, j, X, row, X.shape[1])
            along[j] += x
            add(X, row, -x, V, j, X.shape[1])
        after = dot(X, row, X, row, X.shape[1])
        again, before = SPANNED**2 * before < after < 0.5 * before, after
    return after


@jitable
def orthonormalize(V, A, rows, along):
    """Make the first `rows` of V orthonormal; A (rows, rows) upper triangular: V was A' V.

    Gram-Schmidt, repeated where it is needed. A row that depends on those before it becomes zero.
    """
    for j in range(rows):
        before = dot(V, j, V, j, V.shape[1])
        length = np.sqrt(project(V, j, V, j, along))
        for i in range(rows):
            A[i, j] = along[i] if i < j else 0.0
        if length > SPANNED * np.sqrt(before):
            A[j, j] = length
        for i in range(V.shape[1]):
            V[j, i] = V[j, i] / length if A[j, j] > 0.0 else 0.0


@jitable
def is_well(A):
    """Whether to solve with A (m, m), upper triangular, costs few digits."""
    m, A_inv, largest, most = len(A), np.zeros(A.shape), 0.0, 0.0
    for j in range(m):
        if A[j, j] == 0.0:
            return False
        A_inv[j, j] = 1.0 / A[j, j]
        for i in range(j - 1, -1, -1):
            for k in range(i + 1, j + 1):
                A_inv[i, j] -= A[i, k] * A_inv[k, j] / A[i, i]
        for i in range(j + 1):
            largest, most = max(largest, abs(A[i, j])), max(most, abs(A_inv[i, j]))
    return m * largest * most < WORST_A


@jitable
def basis(H, Z, seen, diagonal):
    """V (m, p), H^-1/2, A (m, m), H and H^-1 of the series `seen`, and log|H|.

    Of a `diagonal` H the diagonals alone, (1, p), else (p, p). NaN if H is too ill.
    """
    p, m = len(seen), Z.shape[1]
    V, A, along, logdet = np.zeros((m, p)), np.zeros((m, m)), np.zeros(m), 0.0
    H_seen = np.empty((1 if diagonal else p, p))
    for i in range(p):
        for j in range(m):
            V[j, i] = Z[seen[i], j]
            if not np.isfinite(V[j, i]):
                logdet = np.nan
        if diagonal:
            H_seen[0, i] = H[seen[i], seen[i]]
            logdet += np.log(H_seen[0, i]) if 0.0 < H_seen[0, i] < np.inf else np.nan
        for j in range(0 if diagonal else i + 1):
            H_seen[i, j] = 0.5 * (H[seen[i], seen[j]] + H[seen[j], seen[i]])
            H_seen[j, i] = H_seen[i, j]
    if diagonal:
        K = 1.0 / H_seen
        root = np.sqrt(K)
        times(V, root, V, True)
    else:
        L, root = np.zeros((p, p)), np.zeros((p, p))
        logdet += factor(H_seen, p, LEAST_PIVOT, L, root)
        V, K = V @ root.T, root.T @ root
    orthonormalize(V, A, m, along)
    return V, root, A, H_seen, K, logdet


# The series of a pattern stand from `first` to `last` - 1: slices would be counted at each step.


@jitable
def solve_gaps(series, first, last, B_t, K, log_K, diagonal, rows, of_gaps, L, L_inv):
    """K_gg^-1 in `of_gaps`, D = K_gg^-1 B_g in `rows`, and log|K_gg|; NaN if that is too ill."""
    q, m, logdet = last - first, rows.shape[1], 0.0
    if diagonal:
        for a in range(first, last):
            logdet += log_K[series[a]]
            of_gaps[a - first, a - first] = 1.0 / K[0, series[a]]
            for j in range(m):
                rows[a, j] = of_gaps[a - first, a - first] * B_t[series[a], j]
        return logdet
    for a in range(q):
        for b in range(a + 1):
            of_gaps[a, b] = K[series[first + a], series[first + b]]
    logdet = factor(of_gaps, q, LEAST_GAPS, L, L_inv)
    for a in range(q):
        for b in range(a + 1):
            of_gaps[a, b] = 0.0
            for l in range(a, q):
                of_gaps[a, b] += L_inv[l, a] * L_inv[l, b]
            of_gaps[b, a] = of_gaps[a, b]
    for a in range(q):
        for j in range(m):
            rows[first + a, j] = 0.0
        for b in range(q):
            for j in range(m):
                rows[first + a, j] += of_gaps[a, b] * B_t[series[first + b], j]
    return logdet


@jitable
def correct(series, first, last, missed, B_t, rows, A, k, A_own, U, U_inv):
    """U A and U^-1 of pattern k; false if it sees too little of something. U (m, m) is room.

    U'U = I - B_g' D for series that are `missed`; the same sum over all others is B_g' D.
    """
    m, least, variance, x = len(A), LEAST_SEEN if missed else LEAST_SUM, 0.0, 0.0
    for j in range(m):
        for i in range(j + 1):
            x = 0.0
            for a in range(first, last):
                x += B_t[series[a], i] * rows[a, j]
            x = int(i == j) - x if missed else x
            variance = x
            for l in range(i):
                x -= U[l, i] * U[l, j]
            U[i, j] = x * U_inv[k, i, i]
        if not (variance > least and x > least * variance):
            return False
        U[j, j] = np.sqrt(x)
        U_inv[k, j, j] = 1.0 / U[j, j]
        for i in range(j - 1, -1, -1):
            x = 0.0
            for l in range(i + 1, j + 1):
                x -= U[i, l] * U_inv[k, l, j]
            U_inv[k, i, j] = x * U_inv[k, i, i]
    for i in range(m):
        for j in range(i, m):
            A_own[k, i, j] = 0.0
            for l in range(i, j + 1):
                A_own[k, i, j] += U[i, l] * A[l, j]
    return True


@jitable
def leave_out(r, V_x, z, series, first, last, rows, of_gaps, K, along):
    """Project the gaps out of rows r of V'x (steps, m) and z (steps, s), which has zeros there."""
    for a in range(last - first):
        along[a] = 0.0
        for b in range(last - first):
            along[a] += of_gaps[a, b] * z[r, series[first + b]]
        add(V_x, r, -z[r, series[first + a]], rows, first + a, V_x.shape[1])
    for a in range(last - first):
        add(z, r, -along[a], K, series[first + a], z.shape[1])


@jitable
def clear_gaps(X, r, series, first, last, missed):
    """Zeros in row r of X for the series that are `missed`, or for all others."""
    start = 0
    for a in range(first, last):
        for i in range(series[a] if missed else start, series[a] + int(missed)):
            X[r, i] = 0.0
        start = series[a] + 1
    for i in range(X.shape[1] if missed else start, X.shape[1]):
        X[r, i] = 0.0


@jitable
def explain(V_x, C, z, patterns, begin, end, shared, gaps, x, U_inv, series, firsts, rows, K):
    """Add what the state explains of patterns `begin` to `end` - 1 to x*, and C = U^-1 of it.

    B'C - K_g D C is what it explains of z, from which B'C is still to be taken, and the other term
    where a full H has `gaps`.
    """
    m, start = V_x.shape[1], patterns.start
    for k in range(begin, end):
        first, last = firsts[k], firsts[k + 1] if gaps else firsts[k]
        for place in range(start[k], start[k + 1] if shared[k] else 0):
            r = place - start[begin]
            for j in range(m):
                C[r, j], star = 0.0, 0.0
                for i in range(j + 1):
                    star += U_inv[k, i, j] * V_x[r, i]
                x[place, j] += star
                for i in range(j + 1):
                    C[r, i] += U_inv[k, i, j] * star
            for a in range(first, last):
                add(z, r, dot(rows, a, C, r, m), K, series[a], z.shape[1])


@jitable
def rotate_steps(Y, z, B_t, A, H, K, const, g, patterns, begin, end, diagonal, one, shared, out):
    """Rotate the steps of patterns `begin` to `end` - 1, from what `basis` found.

    Y (steps, p) is y - d, with zeros in gaps; const is of l where nothing is missing. Fills z
    (steps, p) and `out`. What is `one` pattern has no gaps; of those that share a basis one whose
    gaps leave too little is `shared` no longer. Returns the sum of g.
    """
    (n, p), m, zero, total = Y.shape, len(A), patterns.start[begin], 0.0
    (order, start), l, x, A_own, U_inv = patterns, out.l, out.x, out.A, out.U_inv
    series, rows, own, firsts, H_gaps = out.series, out.rows, out.own, out.first, out.H_gaps
    most = 0 if one else np.diff(firsts[begin : end + 1]).max()
    C, before, left, along = np.zeros((n, m)), np.empty(n), np.empty(n), np.empty(most)
    of_gaps, L_g, L_g_inv = np.empty((most, most)), np.empty((most, most)), np.empty((most, most))
    U, log_K = np.empty((m, m)), np.zeros(p)
    if diagonal:
        np.log(K[0], log_K)
    all_K = log_K.sum()
    times(Y, K, z, diagonal)
    V_x = Y @ B_t
    for r in range(n):
        before[r] = dot(Y, r, z, r, p)
    for k in range(begin, end):
        first, last, missed = firsts[k], firsts[k] if one else firsts[k + 1], one or not own[k]
        of_K = solve_gaps(series, first, last, B_t, K, log_K, diagonal, rows, of_gaps, L_g, L_g_inv)
        shared[k] = np.isfinite(of_K) and correct(
            series, first, last, missed, B_t, rows, A, k, A_own, U, U_inv
        )
        gaps, of_K = (last - first, of_K) if missed else (p - last + first, all_K - of_K)
        weight = 0.0
        for place in range(start[k], start[k + 1] if shared[k] else 0):
            if not diagonal:
                leave_out(place - zero, V_x, z, series, first, last, rows, of_gaps, K, along)
            l[place] = -0.5 * (const - gaps * LOG_2PI + of_K)  # eq-hundred-gaps
            weight += g[order[place]]
        total += weight if missed else 0.0
        for a in range(first, last if shared[k] else first):
            for b in range(0 if diagonal else last - first):
                H_gaps[series[a], series[first + b]] += weight * of_gaps[a - first, b]
            if diagonal and missed:
                H_gaps[0, series[a]] += weight * of_gaps[a - first, a - first]
            elif diagonal:
                out.H_inv[0, 0, series[a]] += weight * K[0, series[a]]
                for j in range(m):
                    rows[a, j] = B_t[series[a], j]
    for again in (False, True):
        explain(
            V_x, C, z, patterns, begin, end, shared, not (one or diagonal), x, U_inv, series,
            firsts, rows, K,
        )  # fmt: skip
        z -= C @ B_t.T
        for k in range(begin, begin if one else end):
            for place in range(start[k], start[k + 1]):
                clear_gaps(z, place - zero, series, firsts[k], firsts[k + 1], not own[k])
        if again:
            times(z, H, Y, diagonal)
        few = False
        for r in range(n):
            left[r] = dot(z, r, Y, r, p)  # z'H z, as z'(y - d) is where more than a few digits stay
            few = few or left[r] < FEW_DIGITS * before[r]
        if again or not few:
            break
        times(z, H, Y, diagonal)
        np.dot(Y, B_t, V_x)
    for r in range(n):
        l[zero + r] -= 0.5 * left[r]  # eq-hundred-value
    return total


@jitable
def rotate_group(y, o, d, Z, H, g, patterns, begin, end, one, diagonal, shared, B_t, out):
    """Rotate those of patterns `begin` to `end` - 1 that are `shared`, by Z (p, m) and H, or `one`.

    That by what it sees. Writes B'; returns whether H is well enough, and whether A is where a
    smoothed state is to be read off.
    """
    m, p, weight, first = Z.shape[1], y.shape[1], 0.0, begin
    seen = out.series[out.first[begin] : out.first[end]] if one else np.arange(p)
    q, rank, backwards = len(seen), 0, len(out.z) > 0
    V, root, A, H_seen, K, logdet = basis(H, Z, seen, diagonal)
    if not np.isfinite(logdet):
        return False, True
    B = np.empty((m, q))
    times(V, root, B, diagonal)
    B_t[:] = B.T
    room = np.diff(patterns.start[begin : end + 1]).max()
    room = max(room, min(AT_ONCE, patterns.start[end] - patterns.start[begin]))
    Y_room, z_room, const = np.empty((room, q)), np.empty((room, q)), (q - m) * LOG_2PI + logdet
    if not one:
        out.K[:] = K
    while first < end:
        last, start = first + 1, patterns.start[first]
        if not (one or shared[first]):
            first = last
            continue
        while last < end and shared[last] and patterns.start[last + 1] - start <= AT_ONCE:
            last += 1
        stop, direct = patterns.start[last], backwards and not one
        Y, z = Y_room[: stop - start], out.z[start:stop] if direct else z_room[: stop - start]
        for place in range(start, stop):
            t = patterns.order[place]
            of_d = t if len(d) > 1 else 0
            for i in range(q):
                s = seen[i] if one else i
                x = y[t, s] - d[of_d, s]
                Y[place - start, i] = x if o[t, s] != 0 else 0.0
        weight += rotate_steps(
            Y, z, B_t, A, H_seen, K, const, g, patterns, first, last, diagonal, one, shared, out
        )
        for place in range(start, start if direct or not backwards else stop):
            for i in range(q):
                out.z[place, seen[i]] = z[place - start, i]
        first = last
    H_inv = at_step(out.H_inv, patterns.order[patterns.start[begin]])
    for i in range(len(K)):
        for j in range(q):
            H_inv[0 if diagonal else seen[i], seen[j]] += weight * K[i, j]
    for j in range(m):
        rank += int(A[j, j] != 0.0)
    # Where nothing is left z is zero, by which h is multiplied.
    return True, not backwards or rank == q or is_well(A)


@jitable
def list_series(o, patterns, own):
    """Where the series of each pattern begin, and they: what it misses, or sees if it is `own`."""
    first = np.zeros(len(own) + 1, np.int64)
    series = np.empty(o.shape[1] * len(own) + 1, np.int64)
    for k in range(len(own)):
        t, place = patterns.order[patterns.start[k]], first[k]
        for i in range(o.shape[1]):
            series[place] = i  # overwritten by the next one if this is none
            place += int((o[t, i] != 0) == own[k])
        first[k + 1] = place
    return first, series[: first[-1]]


@jitable
def rotate(y, o, d, Z, H, g, patterns, backwards):
    """`Rotated`, whether each of its A can be solved with, and false if H is too ill.

    y (n, p) and o (n, p), 0 where y is missing; d, Z and H with an axis of length 1 or n for time;
    g (n,) weights.
    """
    (n, p), m, count = y.shape, Z.shape[2], len(patterns.start) - 1
    back, fixed, ever = int(backwards), len(Z) == 1 and len(H) == 1, np.zeros((1, p))
    own, shared = np.full(count, not fixed), np.full(count, fixed)
    for k in range(count if fixed else 0):
        add(ever, 0, 1.0, o, patterns.order[patterns.start[k]], p)
    if fixed and ever.min() == 0.0:  # what the model says of such a series does not count
        Z, H = Z.copy(), H.copy()
        for i in range(p):
            if ever[0, i] == 0.0:
                Z[0, i], H[0, i], H[0, :, i], H[0, i, i] = 0.0, 0.0, 0.0, 1.0
    diagonal = is_diagonal(H)
    for k in range(count if fixed else 0):
        missing = p
        for i in range(p):
            missing -= int(o[patterns.order[patterns.start[k]], i])
        own[k] = 2 * missing > p
        shared[k] = diagonal or not own[k]
    size, (first, series) = 1 if diagonal else p, list_series(o, patterns, own)
    out = Rotated(
        np.zeros((n, m)), np.zeros((n * back, p)), np.zeros(n), np.zeros((count, m, m)),
        np.zeros((count, m, m)), own, first, series, np.empty((len(series), m)), np.zeros((p, m)),
        np.zeros((size, p)), np.zeros((len(H), size, p)), np.zeros((size, p)),
    )  # fmt: skip
    good, invertible = True, True
    if shared.any():
        good, invertible = rotate_group(
            y, o, d, Z[0], H[0], g, patterns, 0, count, False, diagonal, shared, out.B_t, out
        )
    if not (shared | own).all():  # some share no longer
        now, was = own | ~shared, out
        first, series = list_series(o, patterns, now)
        rows = np.empty((len(series), m))
        for k in range(count):
            if own[k] == now[k]:
                rows[first[k] : first[k + 1]] = was.rows[was.first[k] : was.first[k + 1]]
        out = Rotated(
            was.x, was.z, was.l, was.A, was.U_inv, now, first, series, rows, was.B_t, was.K,
            was.H_inv, was.H_gaps,
        )  # fmt: skip
    for k in range(count):
        if good and not shared[k]:
            t, rows = patterns.order[patterns.start[k]], out.rows[out.first[k] : out.first[k + 1]]
            good, inverted = rotate_group(
                y, o, d, at_step(Z, t), at_step(H, t), g, patterns, k, k + 1, True, diagonal,
                shared, rows, out,
            )  # fmt: skip
            invertible = invertible and inverted
    return out, invertible, good


@jitable
def column(x, k, s, out):
    """Column s of the B of pattern k, in `out` (m,)."""
    m, own = len(out), x.own[k]
    for j in range(m):
        out[j] = 0.0 if own else x.B_t[s, j]
    for a in range(x.first[k], x.first[k + 1]):
        if x.series[a] == s:
            for j in range(m):
                out[j] = x.rows[a, j] if own else 0.0
            break
        for j in range(m if len(x.K) > 1 and not own else 0):
            out[j] -= x.rows[a, j] * x.K[x.series[a], s]
    for j in range(m - 1, -1, -1):
        out[j] *= x.U_inv[k, j, j]
        for i in range(j):
            out[j] += x.U_inv[k, i, j] * out[i]


@jitable
def keeps_digits(x, patterns, g):
    """Whether H_bar, a difference of H^-1 and what sees the state, keeps all but three digits.

    It would not where few series with next to no noise say all that there is to know. With the sign
    of most of the weights g, which are -1 where a loss is minimized.
    """
    (p, m), size, weight = x.B_t.shape, len(x.K), np.zeros(len(x.own))
    whole, b, sign = np.zeros(p), np.zeros(m), 1.0 if g.sum() >= 0.0 else -1.0
    for t in range(len(x.H_inv)):
        for i in range(p):
            whole[i] += sign * x.H_inv[t, i if size > 1 else 0, i]
    for k in range(len(weight)):
        for place in range(patterns.start[k], patterns.start[k + 1]):
            weight[k] += sign * g[patterns.order[place]]
        for a in range(x.first[k], x.first[k] if x.own[k] else x.first[k + 1]):
            here = x.series[a]
            whole[here] -= weight[k] * x.K[here if size > 1 else 0, here]
    most = whole.max()
    while True:  # from the largest entry on: most often it keeps its own
        i = whole.argmax()
        if whole[i] < LEAST_LEFT * most:
            return False
        rest = whole[i]
        if size > 1:  # what of K is left without the gaps
            rest = -sign * dot(x.K, i, np.dot(x.K[i : i + 1], x.H_gaps), 0, p)
            for t in range(len(x.H_inv)):
                rest += sign * x.H_inv[t, i, i]
        for k in range(len(weight)):
            column(x, k, i, b)
            for j in range(m):
                rest -= weight[k] * b[j] ** 2
        if rest >= LEAST_LEFT * most:
            return True
        whole[i] = -1.0


@jitable
def add_product(out, X, Y, diagonal):
    """Add X'Y to `out`, or its `diagonal` alone."""
    if not diagonal:
        out += X.T @ Y
    for j in range(len(X) if diagonal else 0):
        for i in range(X.shape[1]):
            out[i, i] += X[j, i] * Y[j, i]


@jitable
def pull_data(x, patterns, g, y_bar, Y_bar, d_bar):
    """Write y_bar (n, p), add to d_bar, and return z g / 2 less the rows B' Y_bar (n, p)."""
    m, full, Q, start = x.x.shape[1], len(x.K) > 1, np.zeros(x.x.shape), patterns.start
    U_inv, series, rows, K, z, own, firsts = x.U_inv, x.series, x.rows, x.K, x.z, x.own, x.first
    for k in range(len(own)):
        for place in range(start[k], start[k + 1]):
            for j in range(m):
                for i in range(j, m):
                    Q[place, j] += U_inv[k, j, i] * Y_bar[patterns.order[place], i]
    G = Q @ x.B_t.T
    for k in range(len(own)):
        first, last = firsts[k], firsts[k + 1]
        for place in range(start[k], start[k + 1]):
            t = patterns.order[place]
            if own[k]:
                clear_gaps(G, place, series, first, first, False)
            for a in range(first, last if full or own[k] else first):
                along = dot(rows, a, Q, place, m)
                if own[k]:
                    G[place, series[a]] = along
                else:
                    add(G, place, -along, K, series[a], G.shape[1])
            if not own[k]:
                clear_gaps(G, place, series, first, last, True)
            of_d = t if len(d_bar) > 1 else 0
            for i in range(G.shape[1]):
                y_bar[t, i] = G[place, i] - g[t] * z[place, i]
                d_bar[of_d, i] -= y_bar[t, i]
                G[place, i] = 0.5 * g[t] * z[place, i] - G[place, i]
    return G


@jitable
def expand(x, patterns, g, wanted, h, y_bar, Y_bar, bars, out, diagonal):
    """Add the gradients of d, Z and H to `out`, and write y_bar (n, p): eq-hundred-gradient.

    From those of the rotated series, Y_bar (n, m or more) and `bars`, and h (n, m). With g = 0
    their tangents, from tangents, while the rotation and what is left of y stay as they are. H's
    may be wanted on its `diagonal` alone.
    """
    right = pull_data(x, patterns, g, y_bar, Y_bar, out.d)
    if not wanted.matrices:
        return
    (n, p), m, states, whole = x.z.shape, x.x.shape[1], h.shape[1], len(bars.Z) == 1
    # Of the steps that share B the sums of N = U^-1 Phi_bar U^-T and, beside it, M = U^-1 A_bar,
    # and those of D N D' and D (N, M), by which gaps change them.
    both, h_sorted, gaps = m + states, np.zeros((n, states)), False
    bar, NM, NM_sum = np.zeros((m, both)), np.zeros((m, both)), np.zeros((m, both))
    DND, DNM, DNM_sum = np.zeros((1, p, p)), np.zeros((p, both)), np.zeros((p, both))
    series, rows, U_inv, B_t, K, own_B = x.series, x.rows, x.U_inv, x.B_t, x.K, np.zeros((p, m))
    for k in range(len(x.own)):
        bar[:] = 0.0
        for place in range(patterns.start[k], patterns.start[k + 1]):
            t = patterns.order[place]
            add(h_sorted, place, 1.0, h, t, states)
            for i in range(m):
                bar[i, i] += 0.5 * g[t]
                for j in range(m if not whole or place == 0 else 0):
                    bar[i, j] += bars.H[0 if whole else t, i, j]
                for j in range(states if not whole or place == 0 else 0):
                    bar[i, m + j] += bars.Z[0 if whole else t, i, j]
        own, t = x.own[k], patterns.order[patterns.start[k]]
        first, last = x.first[k], x.first[k + 1]
        gaps = gaps or (last > first and not own)
        np.dot(U_inv[k], bar, NM)
        for i in range(m):
            for j in range(i + 1):
                of_N = 0.0
                for l in range(j, m):
                    of_N += NM[i, l] * U_inv[k, j, l]
                bar[i, j] = of_N
        for i in range(m):
            for j in range(i + 1):
                NM[i, j], NM[j, i] = bar[i, j], bar[i, j]
        np.dot(rows[first:last], NM, DNM[: last - first])
        H_bar, of_H = out.H if own else DND, t if own and len(out.H) > 1 else 0
        of_Z, many = t if len(out.Z) > 1 else 0, own and 2 * (last - first) > p
        if many:  # of most series: a product by BLAS takes less time
            own_B[:] = 0.0
            for a in range(first, last):
                for j in range(m):
                    own_B[series[a], j] = rows[a, j]
            add_product(out.H[of_H], (own_B @ np.ascontiguousarray(NM[:, :m])).T, own_B.T, diagonal)
        for a in range(last - first):
            i = series[first + a]
            for b in range(a if diagonal and own else 0, 0 if many else a + 1):
                j, product = series[first + b], dot(DNM, a, rows, first + b, m)
                H_bar[of_H, i, j] += product
                if b < a:  # symmetric, as N is
                    H_bar[of_H, j, i] += product
            for j in range(states if own and wanted.Z else 0):
                out.Z[of_Z, i, j] += DNM[a, m + j]
            for j in range(0 if own else both):
                DNM_sum[i, j] += DNM[a, j]
        for i in range(0 if own else m):
            for j in range(both):
                NM_sum[i, j] += NM[i, j]
    H_bar = out.H[0]
    if gaps and len(K) > 1:
        DNM_sum = K @ DNM_sum
        add_product(H_bar, (DND[0] + 0.5 * x.H_gaps) @ K, K, diagonal)
    elif gaps:
        for i in range(p):
            DND[0, i, i] += 0.5 * x.H_gaps[0, i]
            for j in range(both):
                DNM_sum[i, j] *= K[0, i]
            for j in range(i if diagonal else 0, i + 1 if diagonal else p):
                H_bar[i, j] += K[0, i] * DND[0, i, j] * K[0, j]
    NM = B_t @ NM_sum - DNM_sum
    add_product(H_bar, B_t.T, (NM[:, :m] - DNM_sum[:, :m]).T, diagonal)
    if wanted.Z:
        out.Z[0] += NM[:, m:]
    if len(out.H) == 1:
        add_product(out.H[0], x.z, right, diagonal)
    if len(out.Z) == 1 and wanted.Z:
        out.Z[0] += x.z.T @ h_sorted
    for place in range(n):
        t, here = patterns.order[place], slice(place, place + 1)
        if len(out.H) > 1:
            add_product(out.H[t], x.z[here], right[here], diagonal)
        if len(out.Z) > 1 and wanted.Z:
            out.Z[t] += x.z[here].T @ h_sorted[here]
    of_diagonal = x.H_inv.shape[1] == 1
    for t in range(len(out.H)):
        for i in range(p):
            for j in range(i + 1):
                found = 0.5 * (out.H[t, i, j] + out.H[t, j, i])
                if not of_diagonal:
                    found -= 0.25 * (x.H_inv[t, i, j] + x.H_inv[t, j, i])
                elif i == j:
                    found -= 0.5 * x.H_inv[t, 0, i]
                out.H[t, i, j] = out.H[t, j, i] = found


@jitable
def smoothed(x, patterns, g, Y_bar):
    """h (n, m) from A h = g x* - e*: eq-hundred-smoothed."""
    n, m = x.x.shape
    h, A = np.zeros((n, m)), x.A
    for k in range(len(patterns.start) - 1):
        for place in range(patterns.start[k], patterns.start[k + 1]):
            t = patterns.order[place]
            for i in range(m - 1, -1, -1):
                right = g[t] * x.x[place, i] + Y_bar[t, i]
                for j in range(i + 1, m):
                    right -= A[k, i, j] * h[t, j]
                h[t, i] = right / A[k, i, i] if A[k, i, i] != 0.0 else 0.0
    return h


@jitable
def rotated_model(x, patterns, model, read_off):
    """y and the model of the rotated series, with the component that h is read off, if asked."""
    (n, m), states = x.x.shape, len(model.a0)
    k, steps = m + int(read_off), 1 if len(patterns.start) == 2 and not read_off else n
    y, Z, H = np.ones((n, k)), np.zeros((steps, k, states)), np.zeros((steps, k, k))
    for i in range(len(patterns.start) - 1):
        for place in range(patterns.start[i], patterns.start[i + 1]):
            t = patterns.order[place]
            for j in range(m):
                y[t, j] = x.x[place, j]
                for l in range(states):
                    Z[t if steps > 1 else 0, j, l] = x.A[i, j, l]
    for t in range(steps):
        for i in range(k):
            H[t, i, i] = 1.0
    return y, Arrays(model.a0, model.P0, model.c, np.zeros((1, k)), model.T, Z, H, model.W)
