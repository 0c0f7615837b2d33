"""Hessian-vector products, compiled: the tangents of the filter and of its pullback.

The ordinary pass of :mod:`helpers.kalman.fused.entry` runs first and leaves its gains. Then
directions go through, up to :data:`LANES` of them at once: a matrix of tangents (rows, columns)
lies as (rows, columns * k), the k directions of an entry side by side. A product with a matrix that
all share, from the left, is then one product with longer rows, whose loop the compiler turns into
vectors; and as the tangents of covariances are symmetric, products from the right are products from
the left of something transposed. Zeros of the model are skipped where they stand.

The formulas are those of :mod:`helpers.kalman.tangents`, with J = I - Kf Z multiplied out; under a
vague start this costs digits of the tangent of P0's gradient, and of no other. ``Kt`` stands for
the transposed gain. The loop of :mod:`helpers.kalman.hessian` is what tests hold this to.
"""

from typing import NamedTuple

import numpy as np
from numba import carray, njit, types
from numba.extending import overload, register_jitable

from helpers.kalman.fused.entry import (
    GAINS,
    INTEGERS,
    MODEL,
    OUT_OF_MEMORY,
    READ,
    REALS,
    address_of_pass,
    bundle,
    check,
    compiled_once,
    contiguous,
    copied,
    kept_on_disk,
    linked,
    run,
    zeros_like,
)
from helpers.kalman.fused.forward import DONE, NOT_POSITIVE_DEFINITE, invert_factor
from helpers.kalman.fused.inputs import room_for_indices
from helpers.kalman.fused.layout import HEADER, LAYOUT, Saved, Sizes, begin, lay_out
from helpers.kalman.fused.tiles import Mat, Memory, jitable
from helpers.kalman.recursions import at_step

LANES = 8  # directions at once

_KEPT = {name: list(LAYOUT).index(name) for name in ("a", "u", "Kf")}
_A, _U, _KF = _KEPT.values()


@jitable
def add_product(out, alpha, A, B):
    """out (r, c) += alpha A B, A (r, s), B (s, c)."""
    # Counted without a sign, an index needs no look at whether it counts from the end.
    rows, inner, cols = np.uint64(A.shape[0]), np.uint64(A.shape[1]), np.uint64(B.shape[1])
    for i in range(rows):
        for l in range(inner):
            x = alpha * A[i, l]
            if x != 0.0:
                for j in range(cols):
                    out[i, j] += x * B[l, j]


@jitable
def add_turned(out, alpha, A, B):
    """out (r, c) += alpha A' B, A (s, r), B (s, c)."""
    inner, rows, cols = np.uint64(A.shape[0]), np.uint64(A.shape[1]), np.uint64(B.shape[1])
    for l in range(inner):
        for i in range(rows):
            x = alpha * A[l, i]
            if x != 0.0:
                for j in range(cols):
                    out[i, j] += x * B[l, j]


@register_jitable(error_model="numpy", forceinline=True)
def add_lanes(out, i, j, x, X, r, c, k):
    """Entry (i, j) of out += x times entry (r, c) of X, for all k directions."""
    if k == 1:
        out[i, j] += x * X[r, c]
    else:  # a number of turns that the compiler knows
        for q in range(LANES):
            out[i, j * LANES + q] += x * X[r, c * LANES + q]


@jitable
def add_from_right(out, alpha, X, B, k):
    """out (r, c k) += alpha X B with B (s, c) for each of the k tangents X (r, s k)."""
    rows, inner, cols = np.uint64(X.shape[0]), np.uint64(B.shape[0]), np.uint64(B.shape[1])
    for l in range(inner):
        for j in range(cols):
            x = alpha * B[l, j]
            if x != 0.0:
                for i in range(rows):
                    add_lanes(out, i, j, x, X, i, l, k)


@jitable
def add_column(out, alpha, X, b, k):
    """`add_from_right` for one column: out (r, k) += alpha X b with b (s,)."""
    rows, inner = np.uint64(X.shape[0]), np.uint64(len(b))
    for i in range(rows):
        for l in range(inner):
            add_lanes(out, i, np.uint64(0), alpha * b[l], X, i, l, k)


@jitable
def add_row(out, alpha, b, X, k):
    """out (c, k) += alpha b' X with b (r,) for each of the k tangents X (r, c k)."""
    rows, cols = np.uint64(X.shape[0]), np.uint64(len(out))
    for i in range(rows):
        for j in range(cols):
            add_lanes(out, j, np.uint64(0), alpha * b[i], X, i, j, k)


@jitable
def add_transposed(out, alpha, X, k):
    """out (r, c k) += alpha X' of each of the k tangents X (c, r k)."""
    rows, cols = np.uint64(X.shape[1] // k), np.uint64(len(X))
    for i in range(rows):
        for j in range(cols):
            add_lanes(out, i, j, alpha, X, j, i, k)


@jitable
def assign(out, alpha, X):
    """out = alpha X, without a temporary array."""
    rows, cols = np.uint64(X.shape[0]), np.uint64(X.shape[1])
    for i in range(rows):
        for j in range(cols):
            out[i, j] = alpha * X[i, j]


@jitable
def add(out, alpha, X):
    """out += alpha X."""
    rows, cols = np.uint64(X.shape[0]), np.uint64(X.shape[1])
    for i in range(rows):
        for j in range(cols):
            out[i, j] += alpha * X[i, j]


@jitable
def symmetric_sum(out, X, k):
    """out = X + X' for each of the k tangents X (m, m k)."""
    assign(out, 1.0, X)
    add_transposed(out, 1.0, X, k)


@jitable
def add_outer(out, alpha, x, Y, k):
    """out (r, c k) += alpha x y' for a vector x (r,) and each of the k tangents Y (c, k)."""
    rows, cols = np.uint64(len(x)), np.uint64(len(Y))
    for i in range(rows):
        for j in range(cols):
            add_lanes(out, i, j, alpha * x[i], Y, j, np.uint64(0), k)


@jitable
def add_outer_from_left(out, alpha, X, y, k):
    """out (r, c k) += alpha x y' for each of the k tangents X (r, k) and a vector y (c,)."""
    rows, cols = np.uint64(len(X)), np.uint64(len(y))
    for i in range(rows):
        for j in range(cols):
            add_lanes(out, i, j, alpha * y[j], X, i, np.uint64(0), k)


@jitable
def congruence(out, T, X, half, turned, k):
    """out = T' X T for symmetric tangents X (m, m k); half and turned are room for two more."""
    half[:] = 0.0
    add_turned(half, 1.0, T, X)
    turned[:] = 0.0
    add_transposed(turned, 1.0, half, k)
    out[:] = 0.0
    add_turned(out, 1.0, T, turned)


@jitable
def kept(memory, start, plan, index, rows, cols):
    """A copy of what the pass left of the matrix with this place in LAYOUT, without padding."""
    at, ld = start + plan[2 * index], plan[2 * index + 1]
    return memory[at : at + rows * ld].reshape(rows, ld)[:, :cols].copy()


class Shared(NamedTuple):
    """What all directions share: of every step, and room for a step at work."""

    o: np.ndarray  # (n, p), 1 where y is observed
    a: np.ndarray  # (n, m)
    u: np.ndarray  # (n, p)
    Kt: np.ndarray  # (n p, m)
    C_inv: np.ndarray  # (n p, p), zero where y is missing; the way forwards fills it
    a_filt: np.ndarray  # (n, m)
    P_filt: np.ndarray  # (n, m, m), one for all where nobody asks for T or Z
    Z: np.ndarray  # (p, m), that of the step, zero where y is missing
    P: np.ndarray  # (m, m)
    Mt: np.ndarray  # (p, m), Z P


class Moved(NamedTuple):
    """Tangents of every step, for the way back."""

    Kt: np.ndarray  # (n, p, m k)
    u: np.ndarray  # (n, p, k)
    D: np.ndarray  # (n, p, p k), F^-1 dF F^-1
    a_filt: np.ndarray  # (n, m, k)
    P_filt: np.ndarray  # (n, m, m k), one for all where nobody asks for T or Z


@jitable
def filter_covariance(P_filt, P, Mt, Kt, Z, H, o, Y):
    """P_filt in Joseph's form: X - (X Z' - Kf H) Kf' with X = P - Kf M', Y room for one p x m."""
    p, m = Z.shape
    assign(P_filt, 1.0, P)
    add_turned(P_filt, -1.0, Kt, Mt)
    Y[:] = 0.0
    for i in range(p):  # Y = Z X - H Kf'
        for l in range(m):
            if Z[i, l] != 0.0:
                for j in range(m):
                    Y[i, j] += Z[i, l] * P_filt[j, l]
        for j in range(p):
            if o[i] and o[j]:
                for l in range(m):
                    Y[i, l] -= 0.5 * (H[i, j] + H[j, i]) * Kt[j, l]
    add_turned(P_filt, -1.0, Y, Kt)
    for i in range(m):
        for j in range(i):
            P_filt[i, j] = P_filt[j, i] = 0.5 * (P_filt[i, j] + P_filt[j, i])


@jitable
def observed_rows(out, X, o):
    """X with zeros in the rows that y misses."""
    for i in range(len(o)):
        for j in range(X.shape[1]):
            out[i, j] = X[i, j] if o[i] else 0.0


def held(X):
    """A contiguous array as the memory of :mod:`helpers.kalman.fused.tiles`: X itself, not a copy.

    In compiled code its address, good for as long as X is used.
    """
    memory = Memory(X.size)
    memory.data = X.reshape(-1)
    return memory


@overload(held)
def _held(X):
    return lambda X: X.ctypes.data


@jitable
def inverse_factor(C_inv, Mt, Z, H, o):
    """C_inv = C^-1 with C C' = F = Z P Z' + H, zero where y is missing; C_inv is contiguous.

    Returns whether F is positive definite.
    """
    p = len(o)
    for i in range(p):
        for j in range(i + 1):
            C_inv[i, j] = 1.0 if i == j else 0.0
            if o[i] and o[j]:
                x = 0.5 * (H[i, j] + H[j, i])
                for l in range(Z.shape[1]):
                    x += Mt[i, l] * Z[j, l]
                C_inv[i, j] = x
    # F's lower half may lie where C^-1 will: no entry is read after it has been written.
    place = Mat(0, p, 1)
    logdet = invert_factor(held(C_inv), place, place, p)
    for i in range(p):
        if not o[i]:
            C_inv[i, i] = 0.0
    return not np.isnan(logdet)


@jitable
def add_solved(out, C_inv, X, half):
    """out += F^-1 X in factors, C'^-1 (C^-1 X); half is room for one more.

    A formed F^-1 would cost the tangent of the gain eps kappa^2 under a start P0 = kappa I, as it
    would cost the gain (:mod:`helpers.kalman.recursions`).
    """
    half[:] = 0.0
    add_product(half, 1.0, C_inv, X)
    add_turned(out, 1.0, C_inv, half)


@jitable
def push(shared, moved, model, dot, slope, T_moves, Z_moves, k):
    """Forwards: fills C_inv, P_filt and a_filt, the tangents of every step, and the slopes (n, k).

    Returns how it ended.
    """
    n, p = shared.o.shape
    m = shared.a.shape[1]
    P, Mt, Z = shared.P, shared.Mt, shared.Z
    half, turned, room = np.zeros((m, m * k)), np.zeros((m, m * k)), np.zeros((p, m))
    one_half, one_turned, T_t = np.zeros((m, m)), np.zeros((m, m)), np.zeros((m, m))
    dMt, Q, half_M, dF, half_F, dE = (
        np.zeros((p, m * k)), np.zeros((p, m * k)), np.zeros((p, m * k)), np.zeros((p, p * k)),
        np.zeros((p, p * k)), np.zeros((p, p * k)),
    )  # fmt: skip
    dv, half_v, dZ, da, dP = (
        np.zeros((p, k)), np.zeros((p, k)), np.zeros((p, m * k)), np.zeros((m, k)),
        np.zeros((m, m * k)),
    )  # fmt: skip
    assign(da, 1.0, dot.a0)
    assign(half, 0.5, dot.P0)
    symmetric_sum(dP, half, k)
    assign(one_half, 0.5, model.P0)
    symmetric_sum(P, one_half, 1)
    for t in range(n):
        o, u, a, a_filt = shared.o[t], shared.u[t], shared.a[t], shared.a_filt[t]
        Kt, C_inv = shared.Kt[t * p : (t + 1) * p], shared.C_inv[t * p : (t + 1) * p]
        P_filt, dP_filt = at_step(shared.P_filt, t), at_step(moved.P_filt, t)
        du, dKt, da_filt = moved.u[t], moved.Kt[t], moved.a_filt[t]
        H, dH, dd = at_step(model.H, t), at_step(dot.H, t), at_step(dot.d, t)
        observed_rows(Z, at_step(model.Z, t), o)
        Mt[:] = 0.0
        add_product(Mt, 1.0, Z, P)
        # Of a P that always comes from Joseph's form, which that of the ordinary pass need not.
        if not inverse_factor(C_inv, Mt, Z, H, o):
            return NOT_POSITIVE_DEFINITE
        filter_covariance(P_filt, P, Mt, Kt, Z, H, o, room)

        # dM' = Z dP + dZ P,  dF = Z dM + dZ M + dH,  dv = dy - dd - dZ a - Z da
        dMt[:] = 0.0
        add_product(dMt, 1.0, Z, dP)
        half_F[:] = 0.0
        observed_rows(dv, dot.y[t], o)
        add_product(dv, -1.0, Z, da)
        if Z_moves:
            observed_rows(dZ, at_step(dot.Z, t), o)
            add_from_right(dMt, 1.0, dZ, P, k)
            add_from_right(half_F, 0.5, dZ, Mt.T, k)
            add_column(dv, -1.0, dZ, a, k)
        add_from_right(half_F, 0.5, dMt, Z.T, k)
        for i in range(p):
            if o[i]:
                for q in range(k):
                    dv[i, q] -= dd[i, q]
                for j in range(p):
                    if o[j]:
                        for q in range(k):
                            half_F[i, j * k + q] += 0.5 * dH[i, j * k + q]
        symmetric_sum(dF, half_F, k)

        # dE = C^-1 dF C'^-1,  dl = u'(dF u)/2 - u'dv - tr(dE)/2, then dv - dF u in the place of dv
        half_F[:] = 0.0
        add_product(half_F, 1.0, C_inv, dF)
        dE[:] = 0.0
        add_from_right(dE, 1.0, half_F, C_inv.T, k)
        for i in range(p):
            for q in range(k):
                slope[t, q] -= u[i] * dv[i, q] + 0.5 * dE[i, i * k + q]
            for j in range(p):
                for q in range(k):
                    x = dF[i, j * k + q]
                    slope[t, q] += 0.5 * u[i] * u[j] * x
                    dv[i, q] -= x * u[j]
        # du = F^-1 (dv - dF u),  dKf' = F^-1 (dM' - dF Kf'),  D = C'^-1 dE C^-1
        add_solved(du, C_inv, dv, half_v)
        assign(Q, 1.0, dMt)
        add_from_right(Q, -1.0, dF, Kt, k)
        add_solved(dKt, C_inv, Q, half_M)
        half_F[:] = 0.0
        add_from_right(half_F, 1.0, dE, C_inv, k)
        add_turned(moved.D[t], 1.0, C_inv, half_F)

        # a_filt = a + M u,  da_filt = da + dM u + M du
        assign(da_filt, 1.0, da)
        add_turned(da_filt, 1.0, Mt, du)
        add_row(da_filt, 1.0, u, dMt, k)
        for j in range(m):
            x = a[j]
            for i in range(p):
                x += Mt[i, j] * u[i]
            a_filt[j] = x
        # dP_filt = dP - Kf Q' - Q Kf' with Q = dM - Kf dF / 2
        assign(Q, 0.5, Q)
        add(Q, 0.5, dMt)
        assign(half, 0.5, dP)
        add_turned(half, -1.0, Kt, Q)
        symmetric_sum(dP_filt, half, k)
        if t == n - 1:
            break

        # da <- dT a_filt + T da_filt + dc,  dP <- T dP_filt T' + 2 dT P_filt T' + dW
        T, dT = at_step(model.T, t), at_step(dot.T, t)
        assign(da, 1.0, at_step(dot.c, t))
        add_product(da, 1.0, T, da_filt)
        T_t[:] = 0.0
        add_transposed(T_t, 1.0, T, 1)
        congruence(dP, T_t, dP_filt, half, turned, k)
        assign(half, 0.5, dP)
        add(half, 0.5, at_step(dot.W, t))
        congruence(P, T_t, P_filt, one_half, one_turned, 1)
        if T_moves:
            add_column(da, 1.0, dT, a_filt, k)
            one_half[:] = 0.0
            add_product(one_half, 1.0, P_filt, T_t)
            add_from_right(half, 1.0, dT, one_half, k)
        symmetric_sum(dP, half, k)
        assign(one_half, 0.5, P)
        add(one_half, 0.5, at_step(model.W, t))
        symmetric_sum(P, one_half, 1)
    return DONE


@jitable
def pull(shared, moved, model, dot, bar, total, g, T_moves, Z_moves, want_T, want_Z, k):
    """Backwards: adds the tangents of the gradients to `bar`, and the gradient of W to `total`."""
    n, p = shared.o.shape
    m = shared.a.shape[1]
    Z = shared.Z
    r, s, b, z, kv, e, Ps = (
        np.zeros(m), np.zeros(m), np.zeros(m), np.zeros(m), np.zeros(p), np.zeros(p), np.zeros(m)
    )  # fmt: skip
    dr, ds, db, dz, dk, de, dPs = (
        np.zeros((m, k)), np.zeros((m, k)), np.zeros((m, k)), np.zeros((m, k)), np.zeros((p, k)),
        np.zeros((p, k)), np.zeros((m, k)),
    )  # fmt: skip
    Pi, Pt, one_half, one_turned = (
        np.zeros((m, m)), np.zeros((m, m)), np.zeros((m, m)), np.zeros((m, m))
    )  # fmt: skip
    dPi, dPt, half, turned = (
        np.zeros((m, m * k)), np.zeros((m, m * k)), np.zeros((m, m * k)), np.zeros((m, m * k))
    )  # fmt: skip
    A1, A2, G, FZ, half_Z = (
        np.zeros((p, m)), np.zeros((p, p)), np.zeros((p, m)), np.zeros((p, m)), np.zeros((p, m))
    )  # fmt: skip
    B, BK, dKP, dKA, E, dZ, step = (
        np.zeros((p, m * k)), np.zeros((p, p * k)), np.zeros((p, m * k)), np.zeros((p, p * k)),
        np.zeros((p, m * k)), np.zeros((p, m * k)), np.zeros((p, m * k)),
    )  # fmt: skip
    for t in range(n - 1, -1, -1):
        o, u, a_filt = shared.o[t], shared.u[t], shared.a_filt[t]
        Kt, C_inv = shared.Kt[t * p : (t + 1) * p], shared.C_inv[t * p : (t + 1) * p]
        P_filt, dP_filt = at_step(shared.P_filt, t), at_step(moved.P_filt, t)
        dKt, du, dD, da_filt = moved.Kt[t], moved.u[t], moved.D[t], moved.a_filt[t]
        T, dT, g_t = at_step(model.T, t), at_step(dot.T, t), g[t]
        observed_rows(Z, at_step(model.Z, t), o)
        if Z_moves:
            observed_rows(dZ, at_step(dot.Z, t), o)

        # Back through the prediction.
        add(at_step(bar.c, t), 1.0, dr)
        add(at_step(bar.W, t), 1.0, dPi)
        add(at_step(total, t), 1.0, Pi)
        if want_T:
            T_bar = at_step(bar.T, t)
            add_outer_from_left(T_bar, 1.0, dr, a_filt, k)
            add_outer(T_bar, 1.0, r, da_filt, k)
            # 2 (dPi T P_filt + Pi (dT P_filt + T dP_filt)), the first transposed
            half[:] = 0.0
            one_half[:] = 0.0
            add_from_right(one_half, 2.0, P_filt, T.T, 1)
            add_product(half, 1.0, one_half, dPi)
            add_transposed(T_bar, 1.0, half, k)
            half[:] = 0.0
            add_product(half, 2.0, T, dP_filt)
            if T_moves:
                add_from_right(half, 2.0, dT, P_filt, k)
            add_product(T_bar, 1.0, Pi, half)
        ds[:] = 0.0
        add_turned(ds, 1.0, T, dr)
        for j in range(m):
            s[j] = 0.0
        for i in range(m):
            for j in range(m):
                s[j] += r[i] * T[i, j]
        congruence(dPt, T, dPi, half, turned, k)
        congruence(Pt, T, Pi, one_half, one_turned, 1)
        if T_moves:
            add_row(ds, 1.0, r, dT, k)
            one_half[:] = 0.0
            add_turned(one_half, 1.0, T, Pi)
            assign(half, 0.5, dPt)
            add_product(half, 1.0, one_half, dT)
            symmetric_sum(dPt, half, k)

        # Back through the update: A1 = Kf' Pt, A2 = Kf' Pt Kf, B = Kf' dPt, dK = dKf' Pt.
        A1[:], A2[:], B[:], BK[:], dKP[:], dKA[:] = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        add_product(A1, 1.0, Kt, Pt)
        add_from_right(A2, 1.0, A1, Kt.T, 1)
        add_product(B, 1.0, Kt, dPt)
        add_from_right(BK, 1.0, B, Kt.T, k)
        add_from_right(dKP, 1.0, dKt, Pt, k)
        add_from_right(dKA, 1.0, dKP, Kt.T, k)
        # k = Kf' s, z = Z' u, b = J' s = s - Z' k, e = g u - k
        for j in range(m):
            z[j], b[j] = 0.0, s[j]
        for i in range(p):
            x = 0.0
            for j in range(m):
                x += Kt[i, j] * s[j]
            kv[i], e[i] = x, g_t * u[i] - x
            for j in range(m):
                b[j] -= Z[i, j] * x
                z[j] += Z[i, j] * u[i]
        dk[:], dz[:] = 0.0, 0.0
        add_column(dk, 1.0, dKt, s, k)
        add_product(dk, 1.0, Kt, ds)
        assign(db, 1.0, ds)
        add_turned(db, -1.0, Z, dk)
        add_turned(dz, 1.0, Z, du)
        if Z_moves:
            add_row(db, -1.0, kv, dZ, k)
            add_row(dz, 1.0, u, dZ, k)
        assign(de, g_t, du)
        add(de, -1.0, dk)

        if want_Z:
            step[:], dPs[:] = 0.0, 0.0
            for i in range(m):
                Ps[i] = 0.0
                for j in range(m):
                    Ps[i] += P_filt[i, j] * s[j]
            add_column(dPs, 1.0, dP_filt, s, k)
            add_product(dPs, 1.0, P_filt, ds)
            add_outer_from_left(step, 1.0, de, a_filt, k)
            add_outer(step, 1.0, e, da_filt, k)
            add_outer_from_left(step, 1.0, du, Ps, k)
            add_outer(step, 1.0, u, dPs, k)
            add(step, -g_t, dKt)
            add_from_right(step, -2.0, dKP, P_filt, k)
            add_from_right(step, -2.0, B, P_filt, k)
            add_product(step, -2.0, A1, dP_filt)
            observed_rows(step, step, o)
            add(at_step(bar.Z, t), 1.0, step)
        H_bar = at_step(bar.H, t)
        for i in range(p):
            for j in range(p):
                if o[i] and o[j]:
                    w_i, w_j = g_t * u[i] - kv[i], g_t * u[j] - kv[j]
                    for q in range(k):
                        ij, ji = j * k + q, i * k + q
                        H_bar[i, ij] += dKA[i, ij] + dKA[j, ji] + 0.5 * (
                            BK[i, ij] + BK[j, ji] + du[i, q] * w_j + du[j, q] * w_i
                            - dk[i, q] * u[j] - dk[j, q] * u[i]
                            + 0.5 * g_t * (dD[i, ij] + dD[j, ji])
                        )  # fmt: skip
        add(at_step(bar.d, t), 1.0, de)
        assign(bar.y[t], -1.0, de)

        # dr = db + g dz;  dPi = U + U', U = dPt / 2 + Z' E + dZ' G, J = I - Kf Z multiplied out:
        # E = g/4 F^-1 dF F^-1 Z - Kf' dPt (I + J)/2 - dKf' Pt J + (u x' + du x'...)/2
        assign(dr, 1.0, db)
        add(dr, g_t, dz)
        add(db, 0.5 * g_t, dz)
        for j in range(m):
            r[j] = b[j] + g_t * z[j]
            b[j] += 0.5 * g_t * z[j]
        FZ[:] = 0.0  # F^-1 Z
        add_solved(FZ, C_inv, Z, half_Z)
        assign(E, -1.0, B)
        add(E, -1.0, dKP)
        assign(BK, 0.5, BK)
        add(BK, 1.0, dKA)
        add(BK, 0.25 * g_t, dD)
        add_from_right(E, 1.0, BK, Z, k)
        add_outer(E, 0.5, u, db, k)
        add_outer_from_left(E, 0.5, du, b, k)
        assign(half, 0.5, dPt)
        add_turned(half, 1.0, Z, E)
        if Z_moves:
            # G = -Kf' Pt J - g/2 F^-1 Z + u (b + g/2 z)'/2
            assign(G, -1.0, A1)
            add_product(G, 1.0, A2, Z)
            add(G, -0.5 * g_t, FZ)
            add_outer_vectors(G, 0.5, u, b)
            for i in range(np.uint64(p)):
                for j in range(np.uint64(m)):
                    for l in range(np.uint64(m)):
                        add_lanes(half, j, l, G[i, l], dZ, i, j, k)
        symmetric_sum(dPi, half, k)

        # And Pi, which all directions share.
        assign(G, -1.0, A1)
        add_product(G, 0.5, A2, Z)
        add(G, -0.25 * g_t, FZ)
        add_outer_vectors(G, 0.5, u, b)
        assign(one_half, 0.5, Pt)
        add_turned(one_half, 1.0, Z, G)
        symmetric_sum(Pi, one_half, 1)
    assign(bar.a0, 1.0, dr)
    assign(bar.P0, 1.0, dPi)


@jitable
def add_outer_vectors(out, alpha, x, y):
    """out += alpha x y'."""
    for i in range(len(x)):
        for j in range(len(y)):
            out[i, j] += alpha * x[i] * y[j]


class Tangents(NamedTuple):
    """A direction of y and the model, or what the gradients move by; directions lie last."""

    y: np.ndarray
    a0: np.ndarray
    P0: np.ndarray
    c: np.ndarray
    d: np.ndarray
    T: np.ndarray
    Z: np.ndarray
    H: np.ndarray
    W: np.ndarray


@jitable
def tangents_of(num, y, a0, P0, c, d, T, Z, H, W):
    """Tangents by their addresses; the sizes are n, p, m, the lengths of c ... W over time, k."""
    n, p, m, k = num[0], num[1], num[2], num[9]
    return Tangents(
        carray(y, (n, p, k)), carray(a0, (m, k)), carray(P0, (m, m * k)),
        carray(c, (num[3], m, k)), carray(d, (num[4], p, k)), carray(T, (num[5], m, m * k)),
        carray(Z, (num[6], p, m * k)), carray(H, (num[7], p, p * k)), carray(W, (num[8], m, m * k)),
    )  # fmt: skip


def _hessian_vector(
    sizes, flags, y, l_bar, slopes, W_sum, a0, P0, c, d, T, Z, H, W,
    y_dot, a0_dot, P0_dot, c_dot, d_dot, T_dot, Z_dot, H_dot, W_dot,
    y_bar, a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar,
):  # fmt: skip
    """Tangents of the gradients along directions, all by their addresses.

    ``sizes`` as :func:`tangents_of` takes them. ``flags`` are 0 or 1: whether T and Z move, whether
    the gradients of T and Z are wanted, whether any is. ``slopes`` (n, k), ``W_sum``, which
    receives the gradient of W, and the tangents are given as zeros. Returns how the pass ended.
    """
    num, flag = carray(sizes, 10), carray(flags, 5)
    n, p, m, k = num[0], num[1], num[2], num[9]
    T_moves, Z_moves, want_T, want_Z = flag[0] != 0, flag[1] != 0, flag[2] != 0, flag[3] != 0
    model = bundle(num, a0, P0, c, d, T, Z, H, W)
    dot = tangents_of(num, y_dot, a0_dot, P0_dot, c_dot, d_dot, T_dot, Z_dot, H_dot, W_dot)
    bar = tangents_of(num, y_bar, a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar)
    g = carray(l_bar, n)

    # The ordinary pass, from P0 as it is and without a steady state: it leaves every gain.
    plan = np.empty(HEADER, np.int64)
    memory = np.empty(lay_out(Sizes(n, p, m), Saved(True, False), plan) + 8)
    start = begin(memory, plan)
    w, header = memory.ctypes.data + 8 * start, memory.view(np.int64)[start:]
    entries = np.empty((n, p), np.uint8)
    indices = np.empty(room_for_indices(n, p, m), np.int64)
    asked, report = np.zeros(15, np.int64), np.empty(3, np.int64)
    asked[:9], asked[9] = num[:9], GAINS
    l, ones, ignored, out = np.empty(n), np.ones(n), np.zeros((n, p)), zeros_like(model)
    how = run(
        address_of_pass(m, p), (w, header, entries, indices), asked, report, 0.0, l, ones,
        carray(y, (n, p)), ignored, model, out,
    )  # fmt: skip
    if how != DONE:
        return how
    many = n if want_T or want_Z else 1
    shared = Shared(
        entries, kept(memory, start, plan, _A, n, m), kept(memory, start, plan, _U, n, p),
        kept(memory, start, plan, _KF, n * p, m), np.empty((n * p, p)),
        np.empty((n, m)), np.empty((many, m, m)), np.empty((p, m)), np.empty((m, m)),
        np.empty((p, m)),
    )  # fmt: skip
    moved = Moved(
        np.zeros((n, p, m * k)), np.zeros((n, p, k)), np.zeros((n, p, p * k)),
        np.empty((n, m, k)), np.empty((many, m, m * k)),
    )  # fmt: skip
    how = push(shared, moved, model, dot, carray(slopes, (n, k)), T_moves, Z_moves, k)
    if how == DONE and flag[4]:
        total = carray(W_sum, (num[8], m, m))
        pull(shared, moved, model, dot, bar, total, g, T_moves, Z_moves, want_T, want_Z, k)
    return how


# Addresses of the sizes and flags, and of all else.
HESSIAN = types.int64(INTEGERS, INTEGERS, *[REALS] * 30)
_call_hessian_vector = compiled_once(_hessian_vector, HESSIAN, "helpers_kalman_hessian_vector")


@jitable
def lanes(X, first, k):
    """Directions first to first + k - 1 of X (directions, t, r, c) as (t, r, c k), or zeros."""
    _, steps, rows, cols = X.shape
    out = np.zeros((steps, rows, cols * k))
    for q in range(min(k, len(X) - first)):
        for t in range(steps):
            for i in range(rows):
                for j in range(cols):
                    out[t, i, j * k + q] = X[first + q, t, i, j]
    return out


@jitable
def hand_over(out, first, k, X):
    """The other way: X (t, r, c k) into directions first to first + k - 1 of `out`."""
    _, steps, rows, cols = out.shape
    for q in range(min(k, len(out) - first)):
        for t in range(steps):
            for i in range(rows):
                for j in range(cols):
                    out[first + q, t, i, j] = X[t, i, j * k + q]


@jitable
def anything(X):
    """Whether any entry of X is not zero."""
    for x in X.ravel():
        if x != 0.0:
            return True
    return False


@kept_on_disk(njit(cache=True, error_model="numpy", nogil=True))
def hessian_vector(
    y, a0, P0, c, d, T, Z, H, W, l_bar, y_dot, a0_dot, P0_dot, c_dot, d_dot, T_dot, Z_dot, H_dot,
    W_dot, want_T, want_Z, backwards,
):  # fmt: skip
    """The gradient of W, the slopes (k, n), and the tangents of the gradients along k directions.

    y, a0, ..., W and l_bar as :func:`helpers.kalman.fused.entry.loglike_and_grad` takes them. The
    directions, and what comes back, are arrays (k, t, rows, columns): t = 1 or n as in the model
    (n for y, 1 for a0 and P0), one column for vectors, one row for each step of y. Without
    `backwards` only the slopes are computed. All is NaN where some F is not positive definite.
    """
    y, l_bar = contiguous(y), contiguous(l_bar)
    model = copied(a0, P0, c, d, T, Z, H, W)
    check(y, model, l_bar)
    n, p = y.shape
    m, directions = len(model.a0), len(y_dot)
    flags = np.array(
        [int(anything(T_dot)), int(anything(Z_dot)), int(want_T), int(want_Z), int(backwards)]
    )
    slopes, W_sum = np.empty((directions, n)), np.zeros(model.W.shape)
    dots = (y_dot, a0_dot, P0_dot, c_dot, d_dot, T_dot, Z_dot, H_dot, W_dot)
    bars = (
        np.zeros(y_dot.shape), np.zeros(a0_dot.shape), np.zeros(P0_dot.shape),
        np.zeros(c_dot.shape), np.zeros(d_dot.shape), np.zeros(T_dot.shape),
        np.zeros(Z_dot.shape), np.zeros(H_dot.shape), np.zeros(W_dot.shape),
    )  # fmt: skip
    first = 0
    while first < directions:
        k = 1 if directions - first == 1 else LANES
        sizes = np.array(
            [n, p, m, len(model.c), len(model.d), len(model.T), len(model.Z), len(model.H),
             len(model.W), k]
        )  # fmt: skip
        y_d, a0_d, P0_d, c_d, d_d, T_d, Z_d, H_d, W_d = (
            lanes(dots[0], first, k), lanes(dots[1], first, k), lanes(dots[2], first, k),
            lanes(dots[3], first, k), lanes(dots[4], first, k), lanes(dots[5], first, k),
            lanes(dots[6], first, k), lanes(dots[7], first, k), lanes(dots[8], first, k),
        )  # fmt: skip
        y_b, a0_b, P0_b, c_b, d_b, T_b, Z_b, H_b, W_b = (
            np.zeros_like(y_d), np.zeros_like(a0_d), np.zeros_like(P0_d), np.zeros_like(c_d),
            np.zeros_like(d_d), np.zeros_like(T_d), np.zeros_like(Z_d), np.zeros_like(H_d),
            np.zeros_like(W_d),
        )  # fmt: skip
        slope = np.zeros((n, k))
        W_sum[:] = 0.0
        how = _call_hessian_vector(
            sizes.ctypes, flags.ctypes, y.ctypes, l_bar.ctypes, slope.ctypes, W_sum.ctypes,
            model.a0.ctypes, model.P0.ctypes, model.c.ctypes, model.d.ctypes, model.T.ctypes,
            model.Z.ctypes, model.H.ctypes, model.W.ctypes, y_d.ctypes, a0_d.ctypes, P0_d.ctypes,
            c_d.ctypes, d_d.ctypes, T_d.ctypes, Z_d.ctypes, H_d.ctypes, W_d.ctypes, y_b.ctypes,
            a0_b.ctypes, P0_b.ctypes, c_b.ctypes, d_b.ctypes, T_b.ctypes, Z_b.ctypes, H_b.ctypes,
            W_b.ctypes,
        )  # fmt: skip
        if how == 0:
            raise MemoryError(OUT_OF_MEMORY)
        if how != DONE:
            slopes[:], W_sum[:] = np.nan, np.nan
            for bar in bars:
                bar[:] = np.nan
            return W_sum, slopes, bars
        for q in range(min(k, directions - first)):
            slopes[first + q] = slope[:, q]
        hand_over(bars[0], first, k, y_b)
        hand_over(bars[1], first, k, a0_b)
        hand_over(bars[2], first, k, P0_b)
        hand_over(bars[3], first, k, c_b)
        hand_over(bars[4], first, k, d_b)
        hand_over(bars[5], first, k, T_b)
        hand_over(bars[6], first, k, Z_b)
        hand_over(bars[7], first, k, H_b)
        hand_over(bars[8], first, k, W_b)
        first += k
    return W_sum, slopes, bars


_DIRECTIONS = types.Array(types.float64, 4, "C")
linked_hessian_vector = linked(
    hessian_vector, (*MODEL, READ[1], *[_DIRECTIONS] * 9, *[types.boolean] * 3)
)


@kept_on_disk(njit(cache=True, error_model="numpy", nogil=True))
def along_one(
    y, a0, P0, c, d, T, Z, H, W, l_bar, y_dot, a0_dot, P0_dot, c_dot, d_dot, T_dot, Z_dot, H_dot,
    W_dot, want_T, want_Z, backwards,
):  # fmt: skip
    """The slopes (n,), and the tangents of the gradients of the model and of y, along a direction.

    As :func:`hessian_vector`, with each tangent of the shape of what moves.
    """
    y, l_bar = contiguous(y), contiguous(l_bar)
    model, dy = copied(a0, P0, c, d, T, Z, H, W), contiguous(y_dot)
    check(y, model, l_bar)
    dot = copied(a0_dot, P0_dot, c_dot, d_dot, T_dot, Z_dot, H_dot, W_dot)
    check(dy, dot, l_bar)
    n, p = y.shape
    sizes = np.array(
        [n, p, len(model.a0), len(model.c), len(model.d), len(model.T), len(model.Z), len(model.H),
         len(model.W), 1]
    )  # fmt: skip
    moves = np.array(
        [len(dot.a0), len(dot.c), len(dot.d), len(dot.T), len(dot.Z), len(dot.H), len(dot.W)]
    )
    if (moves != sizes[2:9]).any() or dy.shape != y.shape:
        raise ValueError("a tangent does not have the shape of what it is a tangent of")
    flags = np.array(
        [int(anything(dot.T)), int(anything(dot.Z)), int(want_T), int(want_Z), int(backwards)]
    )
    slopes, y_bar, bar = np.zeros(n), np.zeros(y.shape), zeros_like(model)
    W_sum = np.zeros(model.W.shape)
    how = _call_hessian_vector(
        sizes.ctypes, flags.ctypes, y.ctypes, l_bar.ctypes, slopes.ctypes, W_sum.ctypes,
        model.a0.ctypes, model.P0.ctypes, model.c.ctypes, model.d.ctypes, model.T.ctypes,
        model.Z.ctypes, model.H.ctypes, model.W.ctypes, dy.ctypes, dot.a0.ctypes, dot.P0.ctypes,
        dot.c.ctypes, dot.d.ctypes, dot.T.ctypes, dot.Z.ctypes, dot.H.ctypes, dot.W.ctypes,
        y_bar.ctypes, bar.a0.ctypes, bar.P0.ctypes, bar.c.ctypes, bar.d.ctypes, bar.T.ctypes,
        bar.Z.ctypes, bar.H.ctypes, bar.W.ctypes,
    )  # fmt: skip
    if how == 0:
        raise MemoryError(OUT_OF_MEMORY)
    if how != DONE:
        slopes[:], y_bar[:] = np.nan, np.nan
        bar.a0[:], bar.P0[:], bar.c[:], bar.d[:] = np.nan, np.nan, np.nan, np.nan
        bar.T[:], bar.Z[:], bar.H[:], bar.W[:] = np.nan, np.nan, np.nan, np.nan
    return slopes, bar, y_bar


linked_along_one = linked(along_one, (*MODEL, READ[1], *MODEL, *[types.boolean] * 3))
