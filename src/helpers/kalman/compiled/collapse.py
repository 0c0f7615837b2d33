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
# Pivot of K's part for gaps, for each of its entries, below which too few digits are left.
LEAST_GAPS = 1e-2
# A row of which less than this share is left is projected once more.
FEW_DIGITS = 1e-2
# A is inverted where that costs fewer than four digits.
WORST_A = 1e4
# What the states do not explain has to be this share of H^-1, or H_bar loses its digits.
LEAST_LEFT = 1e-3


class Patterns(NamedTuple):
    """Steps sorted so that those that observe the same components stand together."""

    order: np.ndarray  # (n,), the step at each place
    start: np.ndarray  # (patterns + 1,), the place where each pattern begins


class Rotated(NamedTuple):
    """What rotations make of the data, and what leads back; steps in the order of `Patterns`.

    Patterns that share Z and H are a group, with K = H^-1, B and A of what they ever observe. One
    that misses some of it, with the rows B_g of B' and K_g of K, has the solution D of K_gg D = B_g
    and U'U = I - B_g' D: eq-hundred-shared. Its own B is U^-T (B - D' K_g), its own A is U A. Where
    U is too close to singular, it is a group of its own.
    """

    x: np.ndarray  # (n, m), x*
    z: np.ndarray  # (n, p)
    l: np.ndarray  # (n,), the log-likelihood of what does not see the state
    A: np.ndarray  # (patterns, m, m), of each its own
    A_inv: np.ndarray  # the same
    U_inv: np.ndarray  # the same
    group: np.ndarray  # (patterns,), of each; group 0 alone has gaps and U
    B: list  # of each group (m, p)
    K: np.ndarray  # (p, p) of group 0; of a diagonal H its diagonal, (1, p)
    gaps: np.ndarray  # the series that patterns of group 0 miss, pattern by pattern
    first_gap: np.ndarray  # (patterns + 1,), where those of each begin
    D: np.ndarray  # (gaps, m)
    H_inv: np.ndarray  # (1 or n, p, p), or (1 or n, 1, p): the sum of g K over what shares H_bar
    H_gaps: np.ndarray  # as K, the sum of g K_gg^-1


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
def invert(A, A_inv):
    """A_inv = A^-1, A (m, m) upper triangular; returns whether that costs few digits."""
    m, largest, most = len(A), 0.0, 0.0
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
def basis(H, Z, ever, diagonal):
    """V (m, p), H^-1/2, A (m, m), H and H^-1 of what is `ever` observed, and log|H|.

    Of a `diagonal` H the diagonals alone, (1, p), else (p, p). NaN if H is too ill.
    """
    p, m = Z.shape
    V, A, along, logdet = np.zeros((m, p)), np.zeros((m, m)), np.zeros(m), 0.0
    H_seen = np.ones((1, p)) if diagonal else np.eye(p)
    for i in range(p):
        for j in range(m if ever[i] else 0):
            V[j, i] = Z[i, j]
            if not np.isfinite(V[j, i]):
                logdet = np.nan
        if diagonal and ever[i]:
            H_seen[0, i] = H[i, i]
        for j in range(0 if diagonal or not ever[i] else i + 1):
            if ever[j]:
                H_seen[i, j] = H_seen[j, i] = 0.5 * (H[i, j] + H[j, i])
    if diagonal:
        for i in range(p):
            logdet += np.log(H_seen[0, i]) if 0.0 < H_seen[0, i] < np.inf else np.nan
        K = 1.0 / H_seen
        root = np.sqrt(K)
        times(V, root, V, True)
    else:
        L, root = np.zeros((p, p)), np.zeros((p, p))
        logdet += factor(H_seen, p, LEAST_PIVOT, L, root)
        V, K = V @ root.T, root.T @ root
    orthonormalize(V, A, m, along)
    for i in range(p):
        if not ever[i]:
            K[0 if diagonal else i, i] = 0.0
    return V, root, A, H_seen, K, logdet


@jitable
def solve_gaps(gaps, B_t, K, diagonal, D, of_gaps, L, L_inv):
    """D (q, m), K_gg^-1 (q, q), or its diagonal, in `of_gaps`, and log|K_gg|; NaN if too ill."""
    q, m, logdet = len(gaps), D.shape[1], 0.0
    if diagonal:
        for a in range(q):
            logdet += np.log(K[0, gaps[a]])
            of_gaps[a, a] = 1.0 / K[0, gaps[a]]
            for j in range(m):
                D[a, j] = of_gaps[a, a] * B_t[gaps[a], j]
        return logdet
    for a in range(q):
        for b in range(a + 1):
            of_gaps[a, b] = K[gaps[a], gaps[b]]
    logdet = factor(of_gaps, q, LEAST_GAPS, L, L_inv)
    for a in range(q):
        for b in range(a + 1):
            of_gaps[a, b] = 0.0
            for l in range(a, q):
                of_gaps[a, b] += L_inv[l, a] * L_inv[l, b]
            of_gaps[b, a] = of_gaps[a, b]
    for a in range(q):
        D[a] = 0.0
        for b in range(q):
            for j in range(m):
                D[a, j] += of_gaps[a, b] * B_t[gaps[b], j]
    return logdet


@jitable
def correct(gaps, B_t, D, A, A_own, U_inv, S, L, L_inv):
    """U A and U^-1 of a pattern with these gaps; false if they leave too little of something."""
    m = len(A)
    for i in range(m):
        for j in range(i + 1):
            S[i, j] = 1.0 if i == j else 0.0
            for a in range(len(gaps)):
                S[i, j] -= B_t[gaps[a], i] * D[a, j]
        if not S[i, i] > LEAST_SEEN:
            return False
    if not np.isfinite(factor(S, m, LEAST_SEEN, L, L_inv)):
        return False
    np.dot(L.T, A, A_own)
    U_inv[:] = L_inv.T
    return True


@jitable
def leave_out(r, V_x, z, gaps, D, of_gaps, K, along):
    """Project the gaps out of rows r of V'x (steps, m) and z (steps, s), which has zeros there."""
    for a in range(len(gaps)):
        along[a] = 0.0
        for b in range(len(gaps)):
            along[a] += of_gaps[a, b] * z[r, gaps[b]]
        add(V_x, r, -z[r, gaps[a]], D, a, V_x.shape[1])
    for a in range(len(gaps)):
        add(z, r, -along[a], K, gaps[a], z.shape[1])


@jitable
def explain(r, V_x, C, z, place, x, U_inv, gaps, D, K, diagonal):
    """Add what the state explains of step r to x*, at its place, and C = U^-1 of it.

    B'C - K_g D C is what it explains of z, from which B'C is still to be taken.
    """
    m = V_x.shape[1]
    for j in range(m):
        C[r, j], star = 0.0, 0.0
        for i in range(j + 1):
            star += U_inv[i, j] * V_x[r, i]
        x[place, j] += star
        for i in range(j + 1):
            C[r, i] += U_inv[i, j] * star
    for a in range(0 if diagonal else len(gaps)):
        add(z, r, dot(D, a, C, r, m), K, gaps[a], z.shape[1])


@jitable
def own_basis(gaps, V, root, A, A_own, U_inv):
    """B (m, p) and A of a pattern that leaves too little for `correct`, from V; of a diagonal H."""
    B, R, along = V.copy(), np.zeros(A.shape), np.zeros(len(A))
    for j in range(len(A)):
        U_inv[j, j] = 1.0
        for i in gaps:
            B[j, i] = 0.0
    orthonormalize(B, R, len(A), along)
    times(B, root, B, True)
    np.dot(R, A, A_own)
    return B


@jitable
def rotate_steps(Y, z, V, root, A, H, K, const, g, patterns, begin, end, diagonal, at, out):
    """Rotate the steps of patterns `begin` to `end` - 1, group `at`, from what `basis` found of it.

    Y (steps, p) is y - d, with zeros in gaps; const is of l where nothing is missing. Fills z
    (steps, p) and `out`. A pattern whose gaps leave too little has a basis of its own, or, unless H
    is `diagonal`, stays in group -1. Returns the sum of g.
    """
    (n, p), m, first, starts, total = Y.shape, len(V), patterns.start[begin], out.first_gap, 0.0
    most = np.diff(starts[begin : end + 1]).max()
    C, before, S, along = np.zeros((n, m)), np.empty(n), np.empty((m, m)), np.empty(most)
    of_gaps, L_g, L_g_inv = np.empty((most, most)), np.empty((most, most)), np.empty((most, most))
    B, L, L_inv, few = out.B[at], np.zeros((m, m)), np.zeros((m, m)), True
    times(Y, K, z, diagonal)
    B_t, V_x = np.ascontiguousarray(B.T), Y @ B.T
    for r in range(n):
        before[r] = FEW_DIGITS * dot(Y, r, z, r, p)
    for k in range(begin, end):
        stop, weight = starts[k + 1] if at == 0 else starts[k], 0.0
        gaps, D = out.gaps[starts[k] : stop], out.D[starts[k] : stop]
        of_K = solve_gaps(gaps, B_t, K, diagonal, D, of_gaps, L_g, L_g_inv)
        if np.isfinite(of_K) and correct(gaps, B_t, D, A, out.A[k], out.U_inv[k], S, L, L_inv):
            out.group[k] = at
        elif diagonal:
            out.group[k] = len(out.B)
            out.B.append(own_basis(gaps, V, root, A, out.A[k], out.U_inv[k]))
        else:
            continue
        for place in range(patterns.start[k], patterns.start[k + 1]):
            if not diagonal:
                leave_out(place - first, V_x, z, gaps, D, of_gaps, K, along)
            out.l[place] = -0.5 * (const - len(gaps) * LOG_2PI + of_K)  # eq-hundred-gaps
            weight += g[patterns.order[place]]
        total += weight
        for a in range(len(gaps)):
            for b in range(a if diagonal else 0, a + 1 if diagonal else len(gaps)):
                out.H_gaps[0 if diagonal else gaps[a], gaps[b]] += weight * of_gaps[a, b]
    for _ in range(2):
        for k in range(begin, end if few else begin):
            stop, own = starts[k + 1] if at == 0 else starts[k], out.group[k] != at
            gaps, D = out.gaps[starts[k] : stop], out.D[starts[k] : stop]
            if out.group[k] < 0:
                continue
            for place in range(patterns.start[k], patterns.start[k + 1]):
                r = place - first
                for j in range(m if own else 0):
                    V_x[r, j] = dot(out.B[out.group[k]], j, Y, r, p)
                explain(r, V_x, C, z, place, out.x, out.U_inv[k], gaps, D, K, diagonal or own)
                for j in range(m if own else 0):
                    add(z, r, -C[r, j], out.B[out.group[k]], j, p)
                    C[r, j] = 0.0
        if few:
            z -= C @ B
            for k in range(begin, end):
                for place in range(patterns.start[k], patterns.start[k + 1]):
                    for a in range(starts[k], starts[k + 1]):
                        z[place - first, out.gaps[a]] = 0.0
            times(z, H, Y, diagonal)
            V_x[:], few = Y @ B.T, False
            for r in range(n):
                few = few or dot(z, r, Y, r, p) < before[r]
    for r in range(n):
        out.l[first + r] -= 0.5 * dot(z, r, Y, r, p)  # eq-hundred-value
    return total


@jitable
def rotate_group(y, o, d, Z, H, g, patterns, begin, end, ever, diagonal, at, K, H_inv, out):
    """Rotate patterns `begin` to `end` - 1, which share Z (p, m) and H (p, p), as group `at`.

    By what is `ever` observed of p series. Writes their K; returns whether H is well enough.
    """
    (p, m), weight, first = Z.shape, 0.0, begin
    V, root, A, H_seen, K[:], logdet = basis(H, Z, ever, diagonal)
    if not np.isfinite(logdet):
        return False
    times(V, root, out.B[at], diagonal)
    rows = max(np.diff(patterns.start[begin : end + 1]).max(), min(AT_ONCE, len(y)))
    Y_room, z_room, const = np.empty((rows, p)), np.empty((rows, p)), (ever.sum() - m) * LOG_2PI
    while first < end:
        last, start = first + 1, patterns.start[first]
        while last < end and patterns.start[last + 1] - start <= AT_ONCE:
            last += 1
        stop = patterns.start[last]
        Y, z = Y_room[: stop - start], out.z[start:stop] if len(out.z) else z_room[: stop - start]
        for place in range(start, stop):
            t = patterns.order[place]
            of_d = t if len(d) > 1 else 0
            for i in range(p):
                x = y[t, i] - d[of_d, i]
                Y[place - start, i] = x if o[t, i] != 0 else 0.0
        weight += rotate_steps(
            Y, z, V, root, A, H_seen, K, const + logdet, g, patterns, first, last, diagonal, at, out
        )
        first = last
    H_inv += weight * K
    return True


@jitable
def rotate(y, o, d, Z, H, g, patterns, backwards):
    """`Rotated`, whether each of its A has a good inverse, and false if H is too ill.

    y (n, p) and o (n, p), 0 where y is missing; d, Z and H with an axis of length 1 or n for time;
    g (n,) weights.
    """
    (n, p), m, count = y.shape, Z.shape[2], len(patterns.start) - 1
    diagonal, back, fixed = is_diagonal(H), int(backwards), len(Z) == 1 and len(H) == 1
    seen, first_gap = np.zeros((1, p)), np.zeros(count + 1, np.int64)
    for k in range(count if fixed else 0):
        add(seen, 0, 1.0, o, patterns.order[patterns.start[k]], p)
    ever = np.minimum(seen[0], 1.0)
    gaps = np.empty(count * int(ever.sum()) - int(seen.sum()) + 1, np.int64)
    for k in range(count if fixed else 0):
        t, place = patterns.order[patterns.start[k]], first_gap[k]
        for i in range(p):
            gaps[place] = i  # overwritten by the next one if this is none
            place += int(o[t, i] < ever[i])
        first_gap[k + 1] = place
    size, gaps = 1 if diagonal else p, gaps[: first_gap[count]]
    out = Rotated(
        np.zeros((n, m)), np.zeros((n * back, p)), np.zeros(n), np.zeros((count, m, m)),
        np.zeros((count * back, m, m)), np.zeros((count, m, m)), np.full(count, -1),
        [np.zeros((m, p))], np.zeros((size, p)), gaps, first_gap, np.empty((len(gaps), m)),
        np.zeros((len(H), size, p)), np.zeros((size, p)),
    )  # fmt: skip
    good, invertible = True, True
    if fixed:
        good = rotate_group(
            y, o, d, Z[0], H[0], g, patterns, 0, count, ever, diagonal, 0, out.K, out.H_inv[0], out
        )
    for k in range(count):
        if out.group[k] < 0 and good:
            t = patterns.order[patterns.start[k]]
            ever[:] = o[t]
            out.B.append(np.zeros((m, p)))
            good = rotate_group(
                y, o, d, at_step(Z, t), at_step(H, t), g, patterns, k, k + 1, ever, diagonal,
                len(out.B) - 1, np.empty((size, p)), at_step(out.H_inv, t), out,
            )  # fmt: skip
    for k in range(count if backwards and good else 0):
        rank, observed = 0, 0
        for j in range(m):
            rank += int(out.A[k, j, j] != 0.0)
        for i in range(p):
            observed += int(o[patterns.order[patterns.start[k]], i])
        if rank < observed:  # else z is zero, by which h is multiplied
            invertible = invert(out.A[k], out.A_inv[k]) and invertible
    return out, invertible, good


@jitable
def column(x, k, s, out):
    """Column s of the B of pattern k, in that of `out` (m, p)."""
    m, B, U_inv = len(out), x.B[x.group[k]], x.U_inv[k]
    for j in range(m):
        out[j, s] = B[j, s]
    for a in range(x.first_gap[k], x.first_gap[k + 1] if x.group[k] == 0 else 0):
        for j in range(m if x.gaps[a] == s else 0):
            out[j, s] = 0.0
        if x.gaps[a] == s:
            return
        for j in range(m if len(x.K) > 1 else 0):
            out[j, s] -= x.D[a, j] * x.K[x.gaps[a], s]
    for j in range(m - 1, -1, -1):
        out[j, s] *= U_inv[j, j]
        for i in range(j):
            out[j, s] += U_inv[i, j] * out[i, s]


@jitable
def keeps_digits(x, patterns, g):
    """Whether H_bar, a difference of H^-1 and what sees the state, keeps all but three digits.

    It would not where few series with next to no noise say all that there is to know.
    """
    (m, p), size, weight = x.B[0].shape, len(x.K), np.zeros(len(x.group))
    whole, B = np.zeros(p), np.zeros((m, p))
    for t in range(len(x.H_inv)):
        for i in range(p):
            whole[i] += x.H_inv[t, i if size > 1 else 0, i]
    for k in range(len(x.group)):
        for place in range(patterns.start[k], patterns.start[k + 1]):
            weight[k] += g[patterns.order[place]]
        for a in range(x.first_gap[k], x.first_gap[k + 1] if x.group[k] == 0 or size == 1 else 0):
            here = x.gaps[a]
            whole[here] -= weight[k] * x.K[here if size > 1 else 0, here]
    most = whole.max()
    while True:  # from the largest entry on: most often it keeps its own
        i = whole.argmax()
        if whole[i] < LEAST_LEFT * most:
            return False
        rest = whole[i]
        if size > 1:  # what of K is left without the gaps
            rest = -dot(x.K, i, np.dot(x.K[i : i + 1], x.H_gaps), 0, p)
            for t in range(len(x.H_inv)):
                rest += x.H_inv[t, i, i]
        for k in range(len(x.group)):
            column(x, k, i, B)
            for j in range(m):
                rest -= weight[k] * B[j, i] ** 2
        if rest >= LEAST_LEFT * most:
            return True
        whole[i] = -1.0


@jitable
def add_diagonal(out, X, Y):
    """Add the diagonal of X'Y to that of `out`."""
    for j in range(len(X)):
        for i in range(X.shape[1]):
            out[i, i] += X[j, i] * Y[j, i]


@jitable
def add_product(out, X, Y, diagonal):
    """Add X'Y to `out`, or its `diagonal` alone."""
    if diagonal:
        add_diagonal(out, X, Y)
    else:
        out += X.T @ Y


@jitable
def pull_data(x, patterns, g, y_bar, Y_bar, d_bar):
    """Write y_bar (n, p), add to d_bar, and return z g / 2 less the rows B' Y_bar (n, p)."""
    m, full, Q = x.x.shape[1], len(x.K) > 1, np.zeros(x.x.shape)
    for k in range(len(x.group)):
        for place in range(patterns.start[k], patterns.start[k + 1] if x.group[k] == 0 else 0):
            for j in range(m):
                for i in range(j, m):
                    Q[place, j] += x.U_inv[k, j, i] * Y_bar[patterns.order[place], i]
    G = Q @ x.B[0]
    for k in range(len(x.group)):
        own = x.group[k] > 0
        for place in range(patterns.start[k], patterns.start[k + 1]):
            t = patterns.order[place]
            for j in range(m if own else 0):
                add(G, place, Y_bar[t, j], x.B[x.group[k]], j, G.shape[1])
            for a in range(x.first_gap[k], x.first_gap[k + 1] if full and not own else 0):
                add(G, place, -dot(x.D, a, Q, place, m), x.K, x.gaps[a], G.shape[1])
            for a in range(x.first_gap[k], x.first_gap[k + 1] if not own else 0):
                G[place, x.gaps[a]] = 0.0
            of_d = t if len(d_bar) > 1 else 0
            for i in range(G.shape[1]):
                y_bar[t, i] = G[place, i] - g[t] * x.z[place, i]
                d_bar[of_d, i] -= y_bar[t, i]
                G[place, i] = 0.5 * g[t] * x.z[place, i] - G[place, i]
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
    # Of the steps of group 0, with N = U^-1 Phi_bar U^-T and M = U^-1 A_bar: the sums of N and M,
    # and those of D N D', N D' and D M, by which gaps change them.
    N_sum, M_sum, h_sorted = np.zeros((m, m)), np.zeros((m, states)), np.zeros((n, states))
    DND, ND_sum, DM_sum = np.zeros((p, p)), np.zeros((m, p)), np.zeros((p, states))
    Phi_bar, A_bar, half = np.zeros((m, m)), np.zeros((m, states)), np.zeros((m, m))
    N, M, D = np.zeros((m, m)), np.zeros((m, states)), x.D
    DN, DM = np.empty((len(D), m)), np.empty((len(D), states))
    for k in range(len(x.group)):
        Phi_bar[:], A_bar[:] = 0.0, 0.0
        for place in range(patterns.start[k], patterns.start[k + 1]):
            t = patterns.order[place]
            add(h_sorted, place, 1.0, h, t, states)
            for i in range(m):
                Phi_bar[i, i] += 0.5 * g[t]
                for j in range(m if not whole or place == 0 else 0):
                    Phi_bar[i, j] += bars.H[0 if whole else t, i, j]
                for j in range(states if not whole or place == 0 else 0):
                    A_bar[i, j] += bars.Z[0 if whole else t, i, j]
        np.dot(x.U_inv[k], Phi_bar, half)
        np.dot(half, x.U_inv[k].T, N)
        np.dot(x.U_inv[k], A_bar, M)
        if x.group[k] > 0:
            B, t = x.B[x.group[k]], patterns.order[patterns.start[k]]
            add_product(at_step(out.H, t), B, N @ B, diagonal)
            if wanted.Z:
                at_step(out.Z, t)[:] += B.T @ M
            continue
        for i in range(m):
            add(N_sum, i, 1.0, N, i, m)
            add(M_sum, i, 1.0, M, i, states)
        first, last = x.first_gap[k], x.first_gap[k + 1]
        np.dot(D[first:last], N, DN[first:last])
        np.dot(D[first:last], M, DM[first:last])
        for a in range(first, last):
            for j in range(m):
                ND_sum[j, x.gaps[a]] += DN[a, j]
            for j in range(states):
                DM_sum[x.gaps[a], j] += DM[a, j]
            for b in range(first, a + 1):
                DND[x.gaps[a], x.gaps[b]] += dot(DN, a, D, b, m)
    B, K, H_bar = x.B[0], x.K, out.H[0]
    for i in range(p if len(D) else 0):  # symmetric, as N is
        for j in range(i):
            DND[j, i] = DND[i, j]
    if len(K) > 1 and len(D):
        ND_sum, DM_sum = ND_sum @ K, K @ DM_sum
        add_product(H_bar, (DND + 0.5 * x.H_gaps) @ K, K, diagonal)
    elif len(D):
        times(ND_sum, K, ND_sum, True)
        for i in range(p):
            DM_sum[i] *= K[0, i]
            DND[i, i] += 0.5 * x.H_gaps[0, i]
            for j in range(i if diagonal else 0, i + 1 if diagonal else p):
                H_bar[i, j] += K[0, i] * DND[i, j] * K[0, j]
    add_product(H_bar, B, N_sum @ B - 2.0 * ND_sum, diagonal)
    if wanted.Z:
        out.Z[0] += B.T @ M_sum - DM_sum
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
    h, right = np.zeros((n, m)), np.zeros(m)
    for k in range(len(patterns.start) - 1):
        for place in range(patterns.start[k], patterns.start[k + 1]):
            t = patterns.order[place]
            for i in range(m):
                right[i] = g[t] * x.x[place, i] + Y_bar[t, i]
            for i in range(m):
                for j in range(m):
                    h[t, i] += x.A_inv[k, i, j] * right[j]
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
