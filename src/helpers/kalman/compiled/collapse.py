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
# A is inverted where that costs fewer than four digits.
WORST_A = 1e4
# So many patterns go through one product of matrices: few enough for their rows to stay in a cache.
AT_ONCE = 32
# What the states do not explain has to be this share of H^-1, or H_bar loses its digits.
LEAST_LEFT = 1e-3


class Patterns(NamedTuple):
    """Steps sorted so that those that observe the same components stand together."""

    order: np.ndarray  # (n,), the step at each place
    start: np.ndarray  # (patterns + 1,), the place where each pattern begins


class Rotated(NamedTuple):
    """What rotations make of the data, and what leads back; steps in the order of `Patterns`."""

    x: np.ndarray  # (n, m), x*
    z: np.ndarray  # (n, p)
    l: np.ndarray  # (n,), the log-likelihood of what does not see the state
    A: np.ndarray  # (patterns, m, m)
    A_inv: np.ndarray  # the same
    B: np.ndarray  # (patterns, m, p)
    H_inv: np.ndarray  # (1 or n, p, p), the sum of g H^-1 over the steps that share H_bar


@jitable
def same_pattern(o, s, t):
    """Whether steps s and t observe the same components."""
    for i in range(o.shape[1]):
        if o[s, i] != o[t, i]:
            return False
    return True


@jitable
def patterns_of(o, varying):
    """`Patterns` of o (n, p), 0.0 where y is missing; a step each if the matrices are `varying`."""
    n, p = o.shape
    first, pattern, count = np.zeros(n, np.int64), np.arange(n), 0
    # Patterns with one key stand in a chain: its last one, and before each another.
    last, before = np.full(n, -1), np.zeros(n, np.int64)
    for t in range(n):
        key = 0
        for i in range(p):
            key = (31 * key + (7 if o[t, i] == 0.0 else 3)) & (2**50 - 1)
        key = key % n
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
def dot(A, i, B, j):
    """The product of row i of A and row j of B."""
    x = 0.0
    for k in range(A.shape[1]):
        x += A[i, k] * B[j, k]
    return x


@jitable
def add(A, i, factor, B, j):
    """Add `factor` times row j of B to row i of A, as many entries as B has."""
    for k in range(B.shape[1]):
        A[i, k] += factor * B[j, k]


@jitable
def leave_out(A, i, o):
    """Zeros in row i of A where the vector o is zero."""
    for k in range(len(o)):
        if o[k] == 0.0:
            A[i, k] = 0.0


@jitable
def times(X, A, diagonal):
    """X A; A may be `diagonal`."""
    if not diagonal:
        return X @ A
    out = np.empty(X.shape)
    for i in range(X.shape[0]):
        for j in range(X.shape[1]):
            out[i, j] = X[i, j] * A[j, j]
    return out


@jitable
def whitening(H, o, diagonal):
    """H^-1/2 (p, p), lower triangular, and log|H|; false if H is too ill.

    Rows and columns of H where o (p,) is zero are those of an identity matrix. H may be `diagonal`.
    """
    p = len(H)
    root, inverse, logdet = np.eye(p), np.eye(p), 0.0
    for j in range(p):
        if o[j] != 0.0:
            x = H[j, j]
            for k in range(0 if diagonal else j):
                x -= root[j, k] ** 2
            if not LEAST_PIVOT * H[j, j] < x < np.inf:
                return root, 0.0, False
            logdet += np.log(x)
            for i in range(j + 1, j + 1 if diagonal else p):
                if o[i] != 0.0:
                    y = 0.5 * (H[i, j] + H[j, i])
                    for k in range(j):
                        y -= root[i, k] * root[j, k]
                    root[i, j] = y / np.sqrt(x)
            root[j, j] = np.sqrt(x)
    for i in range(p):
        for j in range(0 if diagonal else i):
            if root[i, j] != 0.0:
                add(inverse, i, -root[i, j], inverse, j)
        for j in range(i + 1):
            inverse[i, j] /= root[i, i]
    return inverse, logdet, True


@jitable
def project(X, row, V, rows, along):
    """Take from a row of X its part in the first `rows` rows of V, which ``along`` (rows,) gets.

    Once more where little is left, of which the rounding of the first time would be too much.
    """
    for j in range(rows):
        along[j] = 0.0
    before, again = dot(X, row, X, row), True
    while again:
        for j in range(rows):
            x = dot(V, j, X, row)
            along[j] += x
            add(X, row, -x, V, j)
        after = dot(X, row, X, row)
        again, before = SPANNED**2 * before < after < 0.5 * before, after
    return after


@jitable
def orthonormalize(V, A, rows, along):
    """Make the first `rows` of V orthonormal; A (rows, rows) upper triangular: V was A' V.

    Gram-Schmidt, repeated where it is needed. A row that depends on those before it becomes zero.
    """
    for j in range(rows):
        before = dot(V, j, V, j)
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
def rotate(y, o, d, Z, H, g, patterns, backwards):
    """`Rotated`, whether each of its A has a good inverse, and false if H is too ill.

    y (n, p) and o (n, p), zero where y is missing; d, Z and H with an axis of length 1 or n for
    time; g (n,) weights.
    """
    n, p = y.shape
    m, count = Z.shape[2], len(patterns.start) - 1
    diagonal, fixed = is_diagonal(H), len(H) == 1
    block = min(count, AT_ONCE) if fixed else 1
    gaps, observed, ever = 0, np.zeros(count, np.int64), np.zeros((1 if fixed else n, p))
    for k in range(count):
        t = patterns.order[patterns.start[k]]
        for i in range(p):
            ever[0 if fixed else k, i] = max(ever[0 if fixed else k, i], o[t, i])
            observed[k] += int(o[t, i])
        gaps = max(gaps, p - observed[k])
    back, whole_back = int(backwards), int(backwards and not diagonal)
    out = Rotated(
        np.zeros((n, m)), np.zeros((n * back, p)), np.zeros(n), np.zeros((count, m, m)),
        np.zeros((count * back, m, m)), np.zeros((count * back, m, p)), np.zeros(H.shape),
    )  # fmt: skip
    V, A, along = np.zeros((gaps + m, p)), np.zeros((gaps + m, gaps + m)), np.zeros(gaps + m)
    B, Z_white = np.zeros((block * back * m, p)), np.zeros((m, p))
    of_gaps = np.zeros((block * whole_back * gaps, p))
    weighted, inner = np.zeros(of_gaps.shape), np.zeros((whole_back * p, p))
    inverse, whole, invertible, good = inner, 0.0, True, True
    inverse_t = inverse
    for first in range(0, count, block):
        last = min(first + block, count)
        begin, end, of_H = patterns.start[first], patterns.start[last], 0 if fixed else first
        if first == 0 or not fixed:
            H_t = at_step(H, patterns.order[begin])
            inverse, whole, good = whitening(H_t, ever[of_H], diagonal)
            if not good:
                return out, False, False
            inverse_t = np.ascontiguousarray(inverse.T)
        X, q_before = np.zeros((end - begin, p)), 0
        for place in range(begin, end):
            t = patterns.order[place]
            of_d = t if len(d) > 1 else 0
            for i in range(p):
                if o[t, i] != 0.0:
                    X[place - begin, i] = y[t, i] - d[of_d, i]
        X = times(X, inverse_t, diagonal)
        for k in range(first, last):
            t = patterns.order[patterns.start[k]]
            if k == 0 or len(Z) > 1 or not fixed:  # Z_white = (H^-1/2 Z)'
                of_Z = t if len(Z) > 1 else 0
                for i in range(p):
                    there = o[t, i] if len(Z) > 1 else ever[of_H, i]
                    for j in range(m):
                        Z_white[j, i] = Z[of_Z, i, j] if there != 0.0 else 0.0
                        if not np.isfinite(Z_white[j, i]):
                            return out, False, False
                Z_white = times(Z_white, inverse_t, diagonal)
            # The columns of H^-1/2 that belong to gaps, and those of H^-1/2 Z.
            logdet, q = whole, 0
            for i in range(p):
                if o[t, i] == 0.0 and ever[of_H, i] != 0.0:
                    if diagonal:
                        logdet += 2.0 * np.log(inverse[i, i])  # eq-hundred-gaps
                    else:
                        for j in range(p):
                            V[q, j] = inverse_t[i, j]
                        q += 1
            for j in range(m):
                for i in range(p):
                    V[q + j, i] = Z_white[j, i]
                if diagonal:
                    leave_out(V, q + j, o[t])
            orthonormalize(V, A, q + m, along)
            for i in range(m):
                for j in range(m):
                    out.A[k, i, j] = A[q + i, q + j]
            for j in range(q):
                logdet += 2.0 * np.log(A[j, j])  # eq-hundred-gaps
            weight, const = 0.0, (observed[k] - m) * LOG_2PI + logdet
            for place in range(patterns.start[k], patterns.start[k + 1]):
                weight += g[patterns.order[place]]
                square = project(X, place - begin, V, q + m, along)
                out.l[place] = -0.5 * (const + square)  # eq-hundred-value
                for j in range(m):
                    out.x[place, j] = along[q + j]
            if not backwards:
                continue
            invertible = invert(out.A[k], out.A_inv[k]) and invertible
            for j in range(m):
                for i in range(p):
                    B[(k - first) * m + j, i] = V[q + j, i]
            if diagonal:
                for i in range(p):
                    out.H_inv[of_H, i, i] += weight * o[t, i] * inverse[i, i] ** 2
                continue
            for i in range(p):
                inner[i, i] += weight * ever[of_H, i]
            for j in range(q):
                for i in range(p):
                    of_gaps[q_before + j, i] = V[j, i]
                    weighted[q_before + j, i] = weight * V[j, i]
            q_before += q
        if not backwards:
            continue
        z = times(X, inverse, diagonal)
        B_whole = times(B[: (last - first) * m], inverse, diagonal)
        for k in range(first, last):
            here = o[patterns.order[patterns.start[k]]]
            for place in range(patterns.start[k], patterns.start[k + 1]):
                add(out.z, place, 1.0, z, place - begin)
                leave_out(out.z, place, here)
            for j in range(m):
                add(out.B[k], j, 1.0, B_whole, (k - first) * m + j)
                leave_out(out.B[k], j, here)
        if not diagonal:  # the sum of g H^-1/2' (I - V_g V_g') H^-1/2
            inner -= of_gaps[:q_before].T @ weighted[:q_before]
            if last == count or not fixed:
                at = 0 if fixed else patterns.order[begin]
                out.H_inv[at] = inverse_t @ (inner @ inverse)
                inner[:] = 0.0
    return out, invertible, True


@jitable
def keeps_digits(x, patterns, g):
    """Whether H_bar, a difference of H^-1 and what sees the state, keeps all but three digits.

    It would not where few series with next to no noise say all that there is to know.
    """
    whole = np.zeros(x.z.shape[1])
    for t in range(len(x.H_inv)):
        for i in range(len(whole)):
            whole[i] += x.H_inv[t, i, i]
    rest = whole.copy()
    for k in range(len(patterns.start) - 1):
        weight, B = 0.0, x.B[k]
        for place in range(patterns.start[k], patterns.start[k + 1]):
            weight += g[patterns.order[place]]
        for j in range(len(B)):
            for i in range(len(rest)):
                rest[i] -= weight * B[j, i] ** 2
    return np.abs(rest).max() >= LEAST_LEFT * np.abs(whole).max()


@jitable
def expand(x, patterns, g, wanted, h, y_bar, Y_bar, bars, out, diagonal):
    """Add the gradients of d, Z and H to `out`, and write y_bar (n, p): eq-hundred-gradient.

    From those of the rotated series, Y_bar (n, m or more) and `bars`, and h (n, m). With g = 0
    their tangents, from tangents, while the rotation and what is left of y stay as they are. H's
    may be wanted on its `diagonal` alone.
    """
    (m, p), states = x.B.shape[1:], h.shape[1]
    count, whole = len(patterns.start) - 1, len(bars.Z) == 1
    block = min(count, AT_ONCE) if len(out.H) == 1 and len(out.Z) == 1 else 1
    # H_bar is B' (Phi_bar B + e z') for each pattern and z g z' / 2 for each step; Z_bar is
    # B' A_bar and z h'.
    right, A_bar = np.zeros((block * m, p)), np.zeros((block * m, states))
    Phi_bar = np.zeros((m, m))
    for first in range(0, count, block):
        last = min(first + block, count)
        begin, end, rows = patterns.start[first], patterns.start[last], (last - first) * m
        right_z, h_sorted = np.zeros((end - begin, p)), np.zeros((end - begin, states))
        right[:], A_bar[:] = 0.0, 0.0
        for k in range(first, last):
            B, at = x.B[k], (k - first) * m
            Phi_bar[:] = 0.0
            for place in range(patterns.start[k], patterns.start[k + 1]):
                t = patterns.order[place]
                of_d, of_bar = t if len(out.d) > 1 else 0, 0 if whole else t
                y_bar[t], h_sorted[place - begin] = 0.0, h[t]
                add(y_bar, t, -g[t], x.z, place)
                add(right_z, place - begin, 0.5 * g[t], x.z, place)
                for j in range(m):
                    add(y_bar, t, Y_bar[t, j], B, j)
                    add(right, at + j, -Y_bar[t, j], x.z, place)
                    Phi_bar[j, j] += 0.5 * g[t]
                    if wanted.matrices and (not whole or place == patterns.start[k]):
                        for i in range(m):
                            Phi_bar[j, i] += bars.H[of_bar, j, i]
                        for i in range(states):
                            A_bar[at + j, i] += bars.Z[of_bar, j, i]
                add(out.d, of_d, -1.0, y_bar, t)
            for j in range(m):
                for i in range(m):
                    add(right, at + j, Phi_bar[j, i], B, i)
        if not wanted.matrices:
            continue
        t, z = patterns.order[begin], x.z[begin:end]
        B, H_bar = x.B[first:last].reshape((-1, p)), at_step(out.H, t)
        if diagonal:
            add_diagonal(H_bar, B, right[:rows])
            add_diagonal(H_bar, z, right_z)
        else:
            H_bar[:] += B.T @ right[:rows] + z.T @ right_z
        if wanted.Z:
            at_step(out.Z, t)[:] += B.T @ A_bar[:rows] + z.T @ h_sorted
    for t in range(len(out.H) if wanted.matrices else 0):
        for i in range(p):
            for j in range(i + 1):
                found = 0.5 * (out.H[t, i, j] + out.H[t, j, i])
                found -= 0.25 * (x.H_inv[t, i, j] + x.H_inv[t, j, i])
                out.H[t, i, j] = out.H[t, j, i] = found


@jitable
def add_diagonal(out, X, Y):
    """Add the diagonal of X'Y to that of `out`."""
    for j in range(len(X)):
        for i in range(X.shape[1]):
            out[i, i] += X[j, i] * Y[j, i]


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
