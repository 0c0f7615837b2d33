r"""The square-root start: the first steps of the filter, in which a vague P0 costs no digit.

Under P0 = kappa I the covariance of the first steps holds numbers of the size of kappa beside
numbers of the size of the noise, and no matrix P can hold both: the gradients of T and Z lose
eps kappa. A root B, P = B B', can. While P owes its size to P0 these steps carry B, turned by
orthogonal q (Householder reflections of the transposed array, rows and columns pivoted; Higham
2002, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 19.4, says why both):

.. math::

   [H^{1/2} \;\; Z B; \; 0 \;\; B]\, q = [C \;\; 0; \; G^\top \;\; B_f], \\
   B_\text{next} = [T B_f \;\; W^{1/2}]

and the way back carries r, Pi (the cotangent of P) and, beside them, B'r, B'Pi B and Pi B, which
are turned by the same q. Some 10 eps of the gradients are lost, whatever kappa (chapter "Where
digits die").

The lines below run in NumPy as they stand and are compiled by Numba for the fused pass.
"""

from typing import NamedTuple

import numpy as np

from helpers.kalman.recursions import (
    at_step,
    mask,
    outer,
    pull_columns,
    pull_update,
    solve,
    symmetric,
    times_J,
    update,
)

# P0 is vague where the predicted variance of a state (but of no `is_past`) falls below LOST of the
# most that it was, before WATCHED m entries of y have been seen. The law eps kappa says that the
# gradients of T and Z would lose 1e-12 at that share.
LOST, WATCHED = 1e-5, 4
# The start lasts while what P0 alone contributes is more than this share of some variance.
OWED = 0.99
# What is left of a variance may be below zero by this share of the largest entry, by rounding.
INDEFINITE = 1e-6
# A root with more columns than this times m is turned into one with m.
WIDEST = 2


def was_known(P0, W):
    """Whether the state was known exactly at the start, or one step before it: P0 is zero, or W.

    Then nothing is vague. The variances of such a state are often the rounding of zeros, of which
    one may be far below the other.
    """
    zero, same = True, True
    for i in range(len(P0)):
        for j in range(len(P0)):
            zero = zero and P0[i, j] == 0.0
            apart = abs(P0[i, j] - W[i, j])
            same = same and apart <= 1e-9 * np.sqrt(abs(P0[i, i] * P0[j, j]))
    return zero or same


def is_past(i, P0, T, W):
    """Whether state i only repeats what others were: it is made of them, without noise of its own.

    So are the lags of a vector autoregression, whose variance falls to nothing as soon as what they
    repeat has been seen. Whether P0 was vague shows in the states that they are made of, if each of
    those has noise that is no smaller than the share LOST of its variance in P0, and if that noise,
    as it reaches state i, is no smaller than the same share of the variance of state i. Some states
    are not found out, and watched: the chain from state to state is followed while each is made of
    no more than one without noise; T and W, of shape (1, m, m), must not vary.
    """
    if len(T) > 1 or len(W) > 1:
        return False
    m, own, scale = len(P0), P0[i, i], 1.0
    for _ in range(m):
        if W[0, i, i] > LOST * P0[i, i]:
            return False  # state i itself; below, no state with noise is gone to
        following, noise = -1, 0.0
        for j in range(m):
            if T[0, i, j] != 0.0:
                if W[0, j, j] > LOST * P0[j, j]:
                    noise += T[0, i, j] * T[0, i, j] * W[0, j, j]
                elif following >= 0:
                    return False
                else:
                    following = j
        if following < 0:
            return noise == 0.0 or LOST * own <= scale * noise
        scale *= T[0, i, following] * T[0, i, following]
        i = following
    return False  # a circle


def fill_shares(P0, T, W, shares):
    """Fill shares (m,): of the most that a variance was, below which it shows a vague P0, or 0."""
    known = was_known(P0, W[0])
    for i in range(len(P0)):
        shares[i] = 0.0 if known or is_past(i, P0, T, W) else LOST


class Reflections(NamedTuple):
    """An orthogonal q as k reflections: of rows j and top[j] exchanged, then of h[j]."""

    h: np.ndarray  # (k, rows)
    top: np.ndarray  # (k,)


class RootStep(NamedTuple):
    """What the way back needs of one step: names of :mod:`helpers.kalman.recursions`.

    Bf_t (k, columns) is the transposed root of P_filt, in the columns asked for;
    ``update`` the q of the update and ``narrow`` that of a prediction whose root was made narrower
    (no reflection where it was not).
    """

    a_filt: np.ndarray
    w: np.ndarray
    u: np.ndarray
    C_inv: np.ndarray
    S: np.ndarray
    Kf: np.ndarray
    G: np.ndarray
    Bf_t: np.ndarray
    update: Reflections
    narrow: Reflections


def reflect(X, k):
    """Turn the rows of X (rows, cols) so that its first k columns become triangular, in place.

    Returns the :class:`Turn` q, where X was q X, and the order in which columns became triangular.
    """
    rows = X.shape[0]
    h, top, order = np.zeros((k, rows), X.dtype), np.arange(k), np.arange(k)
    for j in range(min(k, rows)):
        largest, chosen, sizes = -1.0, j, lengths(X, j, k)
        for i in range(j, k):  # the column of those left that is longest below row j
            if sizes[order[i]] > largest:
                largest, chosen = sizes[order[i]], i
        c = order[chosen]
        order[chosen], order[j] = order[j], c
        for i in range(j, rows):
            if abs(X[i, c]) > abs(X[top[j], c]):
                top[j] = i
        exchange(X, j, top[j])
        if largest > 0:
            x = X[j, c] + np.copysign(largest, X[j, c])
            size = np.sqrt(2 * largest * (largest + abs(X[j, c])))
            h[j, j] = x / size
            for i in range(j + 1, rows):
                h[j, i] = X[i, c] / size
            reflect_rows(X, h[j], j)
            for i in range(j + 1, rows):
                X[i, c] = 0.0
    return Reflections(h, top), order


def lengths(X, j, k):
    """The Euclidean lengths (k,) of the first k columns of X from row j on."""
    total = np.zeros(k, X.dtype)
    for i in range(j, X.shape[0]):
        for c in range(k):
            total[c] += X[i, c] * X[i, c]
    return np.sqrt(total)


def reflect_rows(X, h, j):
    """X - 2 h h'X in rows j and below, in place."""
    total = np.zeros(X.shape[1], X.dtype)
    for i in range(j, X.shape[0]):
        if h[i] != 0:
            for c in range(X.shape[1]):
                total[c] += h[i] * X[i, c]
    for i in range(j, X.shape[0]):
        if h[i] != 0:
            for c in range(X.shape[1]):
                X[i, c] -= 2 * h[i] * total[c]


def place(X, i, j, block):
    """Write `block` into X, its first entry at (i, j). Compiled, slices take five times as long."""
    for k in range(block.shape[0]):
        for c in range(block.shape[1]):
            X[i + k, j + c] = block[k, c]


def exchange(X, i, j):
    """Rows i and j of X, in place."""
    for c in range(X.shape[1]):
        X[i, c], X[j, c] = X[j, c], X[i, c]


def apply_reflections(q, X):
    """q X, in place."""
    for j in range(len(q.top) - 1, -1, -1):
        reflect_rows(X, q.h[j], j)
        exchange(X, j, q.top[j])
    return X


def root(P):
    """B' (k, m) with B B' = P (m, m), k its rank: Cholesky with pivots, exact on a diagonal.

    Also returns the pivots' order (m,): row i is zero in the columns order[:i]. What is left of a
    variance and below its own rounding error counts as zero. NaN throughout where P is none that a
    covariance can be: not a number, or with a variance that turns out negative.
    """
    m, eps = len(P), np.finfo(P.dtype).eps
    B_t, order, left = np.zeros((m, m), P.dtype), np.arange(m), P.copy()
    for k in range(m):
        chosen, largest = -1, 0.0
        for i in range(k, m):
            c = order[i]
            if left[c, c] > largest and left[c, c] > m * eps * P[c, c]:
                chosen, largest = i, left[c, c]
        if chosen < 0:
            for i in range(k, m):
                c = order[i]
                if not left[c, c] >= -INDEFINITE * np.abs(P).max():
                    return np.full_like(B_t, np.nan), order
            return B_t[:k].copy(), order
        c = order[chosen]
        order[chosen], order[k] = order[k], c
        B_t[k, c] = np.sqrt(left[c, c])
        for i in range(k + 1, m):
            B_t[k, order[i]] = left[c, order[i]] / B_t[k, c]
        for i in range(k + 1, m):
            x = B_t[k, order[i]]
            if x != 0:
                for j in range(m):  # whole rows: earlier pivots' columns are not looked at again
                    left[order[i], j] -= x * B_t[k, j]
    return B_t, order


def solve_root(B_t, order, X):
    """B'^-1 X (m, k), with B' and the order of its pivots of :func:`root`, by back substitution."""
    m, answer = len(B_t), np.zeros_like(X)
    for k in range(m - 1, -1, -1):
        x = X[k].copy()
        for j in range(k + 1, m):
            b = B_t[k, order[j]]
            if b != 0:
                x -= b * answer[order[j]]
        answer[order[k]] = x / B_t[k, order[k]]
    return answer


def is_owed(owed_t, size, most):
    """Whether some variance, ``size`` (m,) squared, is but for a hundredth what P0 contributes.

    Not one that is the rounding of ``most`` (m,), the largest root that a variance had before: of a
    state that repeats what was seen without noise.
    """
    m = len(size)
    owed, rounding = lengths(owed_t, 0, m), m * np.finfo(most.dtype).eps * most
    return ((owed**2 > OWED * size**2) & (owed > rounding)).any()


class Listed(NamedTuple):
    """A matrix and where it is not zero: in row i in the columns index[start[i] : start[i + 1]].

    Most models have few such entries, which ``entry`` repeats: a step of a season is a permutation.
    ``index`` is empty where there are many, and a product of whole matrices is as fast.
    """

    matrix: np.ndarray
    start: np.ndarray
    index: np.ndarray
    entry: np.ndarray


def listed(A):
    """`Listed` for a contiguous A (rows, cols)."""
    rows, cols = A.shape
    start, index, k = np.zeros(rows + 1, np.int64), np.empty(A.size, np.int64), 0
    entry = np.empty(A.size, A.dtype)
    for i in range(rows):
        for j in range(cols):
            if A[i, j] != 0:
                index[k], entry[k] = j, A[i, j]
                k += 1
        start[i + 1] = k
    k = k if 5 * k < A.size else 0
    return Listed(A, start, index[:k].copy(), entry[:k].copy())


def times(A, X):
    """A X (rows, k) for A (rows, m) and X (m, k), contiguous."""
    if len(A.index) == 0:
        return A.matrix @ X
    out = np.zeros((len(A.matrix), X.shape[1]), X.dtype)
    for i in range(len(out)):
        for e in range(A.start[i], A.start[i + 1]):
            for j in range(X.shape[1]):
                out[i, j] += A.entry[e] * X[A.index[e], j]
    return out


def times_transposed(X, A):
    """X A' (k, rows) for X (k, m) and A (rows, m)."""
    if len(A.index) == 0:
        return np.ascontiguousarray(X) @ A.matrix.T
    out, last = np.zeros((len(X), len(A.matrix)), X.dtype), len(X) - 1
    for k in range(0, len(X), 4):  # four rows for each look at what is listed
        k1, k2, k3 = min(k + 1, last), min(k + 2, last), min(k + 3, last)
        for i in range(out.shape[1]):
            x = x1 = x2 = x3 = out[k, i]
            for e in range(A.start[i], A.start[i + 1]):
                j, entry = A.index[e], A.entry[e]
                x += X[k, j] * entry
                x1 += X[k1, j] * entry
                x2 += X[k2, j] * entry
                x3 += X[k3, j] * entry
            out[k, i], out[k1, i], out[k2, i], out[k3, i] = x, x1, x2, x3
    return out


def filter_roots(y, o, a0, P0, c, d, T, Z, H, W, l, columns):
    """Filter while P owes its size to P0: one step or more.

    Parameters
    ----------
    y, o : array (n, p)
        Observations, 0.0 where missing, and 1.0 or 0.0 for observed or missing.
    a0, P0 : array (m,), (m, m)
    c, d, T, Z, H, W : array
        With a leading axis of length 1 or n; W = R Q R'.
    l : array (n,)
        Is given the log-likelihoods of these steps.
    columns : array of int
        Those of T and Z of which the way back is to give gradients.

    Returns
    -------
    steps : list of RootStep
    a, P : array (m,), (m, m)
        Predicted mean and covariance for the step that follows.
    B_t : array (k, m)
        P's root, transposed: P = B_t' B_t.
    good : bool
        False where F was not positive definite, at the step after those returned.
    """
    (n, p), m = y.shape, len(a0)
    I_p = np.eye(p).astype(y.dtype)
    a, B_t = a0.copy(), root(P0)[0]
    W_root, T_listed = root(W[0])[0], listed(np.ascontiguousarray(T[0]))
    owed_t = B_t.copy()  # transposed E, where P0 alone contributes E E' to P
    most = lengths(B_t, 0, m)
    steps = []
    for t in range(n):
        d_t, Z_t, H_t = mask(o[t], at_step(d, t), at_step(Z, t), at_step(H, t))
        if t > 0 and len(T) > 1:
            T_listed = listed(np.ascontiguousarray(T[t]))
        if t > 0 and len(W) > 1:
            W_root = root(W[t])[0]
        X = np.zeros((p + len(B_t), p + m), y.dtype)
        H_root, _ = root(H_t + I_p * (1 - o[t]))
        X[: len(H_root), :p] = H_root
        X[p:, :p] = B_t @ np.ascontiguousarray(Z_t.T)
        place(X, p, p, B_t)
        size = lengths(X, 0, p)
        reflections, order = reflect(X, p)
        C = np.zeros((p, p), y.dtype)  # lower triangular: rows in the order of the pivots
        logdet = 0.0
        for j in range(p):
            for i in range(j + 1):
                C[j, i] = X[i, order[j]]
            if not abs(C[j, j]) > p * np.finfo(y.dtype).eps * size[order[j]]:
                return steps, a, P0, B_t, False
            logdet += 2 * np.log(abs(C[j, j]))
        C_solved, C_inv = solve(C, I_p), np.zeros((p, p), y.dtype)
        for j in range(p):
            for i in range(p):
                C_inv[i, order[j]] = C_solved[i, j] * o[t, order[j]]
        G, Bf_t = X[:p, p:].copy(), X[p:, p:]
        S, Kf = C_inv @ Z_t, np.ascontiguousarray(G.T) @ C_inv
        _, w, u, a_filt, l[t] = update(y[t], o[t], a, d_t, Z_t, logdet, C_inv, G)

        B_t = np.concatenate((times_transposed(Bf_t, T_listed), W_root))
        # E' J', by the rows of E'.
        owed_t = owed_t - (owed_t @ np.ascontiguousarray(S.T)) @ G
        owed_t = times_transposed(owed_t, T_listed)
        narrowed = Reflections(np.zeros((0, 0), y.dtype), np.arange(0))
        if len(B_t) > WIDEST * m:
            narrowed, _ = reflect(B_t, m)
            B_t = B_t[:m].copy()
        kept = np.ascontiguousarray(Bf_t[:, columns])
        steps.append(RootStep(a_filt, w, u, C_inv, S, Kf, G, kept, reflections, narrowed))
        a = at_step(T, t) @ a_filt + at_step(c, t)
        size = lengths(B_t, 0, m)
        if not is_owed(owed_t, size, most):
            break
        most = np.maximum(most, size)
    return steps, a, symmetric(np.ascontiguousarray(B_t.T) @ B_t), B_t, True


class Carried(NamedTuple):
    """What the way back carries: cotangents of a and P, and the same seen from P's root B.

    B' Pi serves the gradients of T and Z alone, and has no columns where nobody wants them.
    """

    r: np.ndarray  # (m,), the cotangent of a
    Pi: np.ndarray  # (m, m), that of P
    Br: np.ndarray  # (k,), B'r
    BPiB: np.ndarray  # (k, k), B' Pi B
    BPi: np.ndarray  # (k, m or 0), B' Pi


def carry(r, Pi, B_t, columns):
    """The cotangents r and Pi after the last step of the start, seen from its root.

    ``columns`` are those of :func:`filter_roots`.
    """
    BPi = B_t @ Pi
    width = len(Pi) if len(columns) else 0
    BPiB = BPi @ np.ascontiguousarray(B_t.T)
    return Carried(r, Pi, B_t @ r, BPiB, BPi[:, :width].copy())


def apply_on_both_sides(q, X):
    """q X q' for a symmetric X, in place."""
    k = len(X)
    for j in range(len(q.top) - 1, -1, -1):
        h, v = q.h[j], np.zeros(k, X.dtype)
        for i in range(j, k):
            for c in range(k):
                v[c] += h[i] * X[i, c]
        v -= (h @ v) * h  # (I - 2 h h') X (I - 2 h h') = X - 2 h v' - 2 v h'
        for i in range(k):
            for c in range(k):
                X[i, c] -= 2 * (h[i] * v[c] + v[i] * h[c])
        exchange(X, j, q.top[j])
        for i in range(k):
            X[i, j], X[i, q.top[j]] = X[i, q.top[j]], X[i, j]
    return X


def pull_step(step, after, g, T_t, columns):
    """The pullback of one step, for the weight g of its log-likelihood: form 1 from the root.

    T_t is T', `Listed`. Returns e (p,), T_bar (m, len(columns)) in the `columns` of `filter_roots`,
    Z_bar (p, m), right in these alone, H_bar (p, p) and what is carried to the step before. d_bar
    is e, c_bar and W_bar are the r and Pi that came.
    """
    dtype, narrow = T_t.matrix.dtype, step.narrow
    p, m, k = len(step.w), len(step.a_filt), len(step.Bf_t)
    Br, BPiB, BPi = after.Br, after.BPiB, after.BPi
    width = BPi.shape[1]
    if len(narrow.top):
        rows = narrow.h.shape[1]
        wide = np.zeros((rows, rows + width + 1), dtype)
        wide[:m, :m], wide[:m, rows : rows + width], wide[:m, rows + width] = BPiB, BPi, Br
        BPiB = apply_on_both_sides(narrow, wide[:, :rows].copy())
        wide = apply_reflections(narrow, wide[:, rows:].copy())
        BPi, Br = wide[:, :width].copy(), wide[:, width].copy()
    # From here on seen from Bf: T Bf are the first columns of the predicted root.
    Bs, BPtB = Br[:k], BPiB[:k, :k]
    P_s, Pt_P, T_bar = np.zeros(m, dtype), np.zeros((m, m), dtype), np.zeros((m, 0), dtype)
    if width:
        P_s[columns] = Bs @ step.Bf_t
        PiTP = np.ascontiguousarray((np.ascontiguousarray(step.Bf_t.T) @ BPi[:k]).T)
        Pt_P[:, columns], T_bar = times(T_t, PiTP), outer(after.r, step.a_filt[columns]) + 2 * PiTP
    s = T_t.matrix @ after.r
    Pt = times_transposed(times(T_t, after.Pi), T_t)
    e, Z_bar, H_bar, r, Pi = pull_update(
        s, Pt, g, step.w, step.u, step.C_inv, step.S, step.Kf, step.G, step.a_filt, P_s, Pt_P
    )

    w, S = step.w, step.S
    both, one = np.empty((p + k, p + k), dtype), np.empty((p + k, width + 1), dtype)
    both[:p, :p] = g / 2 * (outer(w, w) - np.eye(p).astype(dtype))
    both[:p, p:] = outer(w, Bs) / 2
    both[p:, :p] = both[:p, p:].T
    place(both, p, p, BPtB)
    if width:
        b, z, BPt = times_J(step.G, S, s), w @ S, times_transposed(BPi[:k], T_t)
        one[:p, :m] = outer(w, b + g * z) / 2 - g / 2 * S
        place(one, p, 0, times_J(step.G, S, BPt) + outer(Bs, z) / 2)
    one[:p, width] = g * w
    one[p:, width] = Bs
    both, one = apply_on_both_sides(step.update, both), apply_reflections(step.update, one)
    before = Carried(r, Pi, one[p:, width].copy(), both[p:, p:].copy(), one[p:, :width].copy())
    return e, T_bar, Z_bar, H_bar, before


def pull_step_columns(step, r, Br, a_filt, w, T):
    """What :func:`pull_step` does to r, for many series (J): r (m, J), Br (k, J) from its root.

    a_filt (m, J) and w (p, J) are those of the series. Returns e (p, J), the smoothed means (m, J),
    and r and Br before the step.
    """
    p, m = step.S.shape
    if len(step.narrow.top):
        wide = np.zeros((step.narrow.h.shape[1], r.shape[1]), r.dtype)
        wide[: len(Br)] = Br
        Br = apply_reflections(step.narrow, wide)
    Bs = Br[: len(step.Bf_t)].copy()
    # P_filt s comes from its root, so that pull_columns has none to add.
    smoothed = a_filt + np.ascontiguousarray(step.Bf_t.T) @ Bs
    e, smoothed, r_before = pull_columns(
        r, T, w, step.C_inv, step.S, step.Kf, step.G, np.zeros((m, m), T.dtype), -smoothed
    )
    return e, smoothed, r_before, apply_reflections(step.update, np.concatenate((w, Bs)))[p:].copy()


def at_the_start(carried, P0):
    """The gradients of a0 and P0: from the root of P0 where that has full rank."""
    B_t, order = root(P0)
    if len(B_t) < len(P0):
        return carried.r, carried.Pi
    BPi = np.ascontiguousarray(solve_root(B_t, order, carried.BPiB).T)
    r = solve_root(B_t, order, carried.Br.reshape((-1, 1)))[:, 0].copy()
    return r, symmetric(solve_root(B_t, order, BPi))


def columns_at_the_start(r, Br, P0):
    """The gradients of many series' a0 (m, J), as :func:`at_the_start` has them."""
    B_t, order = root(P0)
    return r if len(B_t) < len(P0) else solve_root(B_t, order, Br)
