"""Tangents for a model with few states and few series: the readable text, in registers.

It is to second derivatives what :mod:`helpers.kalman.fused.small` is to the gradient, and as that
it takes the weights of all steps to be the same. After the filter, and the smoother's r and N, each
direction goes forwards and backwards through the lines of :mod:`helpers.kalman.tangents`, step by
step; where the gain has settled, its tangents settle too, and N with its own, and only those of the
means are left to do.
"""

from typing import NamedTuple

import numpy as np
from numba import carray, types

from helpers.kalman import recursions, tangents
from helpers.kalman.fused import building
from helpers.kalman.fused.entry import INTEGERS, REALS, bundle, kept_on_disk
from helpers.kalman.fused.forward import DONE, is_steady, is_time_to_look
from helpers.kalman.fused.inputs import Arrays, Observed, look_at, varies
from helpers.kalman.fused.layout import blocks
from helpers.kalman.fused.moves import Directions
from helpers.kalman.fused.push import LATER, relative_move
from helpers.kalman.fused.registers import diagonal, identity, read, seen, write, zeros
from helpers.kalman.fused.small import (
    InTime,
    Kept,
    Like,
    add_to,
    all_in_time,
    at_step,
    change,
    filter_small,
    gains_at,
    in_time,
    means_at,
    sizes_of_kept,
    vectors_vary,
)
from helpers.kalman.fused.tiles import jitable, put
from helpers.kalman.on_disk import cfunc
from helpers.kalman.recursions import symmetric

# The numbers of `run`, tol, the weight, y, the model, directions, what comes of them, the slopes
# and W_sum.
_SIGNATURE = types.int64(INTEGERS, types.float64, types.float64, *[REALS] * 29)


class Smoothed(NamedTuple):
    """What the smoother leaves of each step, by address, in Python a Memory."""

    mean: int  # e, the smoothed mean, and r after the step
    N: int  # after the step


class Pass(NamedTuple):
    """What all directions share, the arrays by address and in Python as Memory."""

    y: int
    model: Arrays
    varying: bool
    tol: float
    weight: float  # of every step
    kept: Kept
    gain_of: np.ndarray  # (n,), the step whose gain each step has
    smoothed: Smoothed
    N_of: np.ndarray  # (n,), the step whose N each step has


class Moved(NamedTuple):
    """The tangents of each step, by address, in Python a Memory."""

    mean: int  # du, da_filt
    gain: int  # dE, dKf, dP_filt


@jitable
def sizes_of_smoothed(m, p):
    """Doubles of a step in each of `Smoothed`."""
    return p + 2 * m, m * m


@jitable
def sizes_of_moved(m, p):
    """Doubles of a step in each of `Moved`."""
    return p + m, p * p + m * p + m * m


@jitable
def smoothed_at(like, smoothed, t):
    """e, the smoothed mean and r of step t."""
    x, z, m, p = diagonal(like.I_m), diagonal(like.I_p), len(like.I_m), len(like.I_p)
    place = t * (p + 2 * m)
    return (
        read(z, smoothed.mean, place),
        read(x, smoothed.mean, place + p),
        read(x, smoothed.mean, place + p + m),
    )


@jitable
def moved_means_at(like, moved, t):
    """du and da_filt of step t."""
    x, z, m, p = diagonal(like.I_m), diagonal(like.I_p), len(like.I_m), len(like.I_p)
    place = t * (p + m)
    return read(z, moved.mean, place), read(x, moved.mean, place + p)


@jitable
def moved_gains_at(like, moved, gain):
    """dE, dKf and dP_filt of the step `gain`."""
    m, p = len(like.I_m), len(like.I_p)
    _, of_gain = sizes_of_moved(m, p)
    place = gain * of_gain
    return (
        read(like.I_p, moved.gain, place),
        read(like.Z.T, moved.gain, place + p * p),
        read(like.I_m, moved.gain, place + p * p + m * p),
    )


@jitable
def moved_change(P, dP, dP_next, most, n):
    """:func:`helpers.kalman.fused.push.moved_change`, of matrices in registers.

    Returns the largest square that there was as well, `most` before.
    """
    moves, largest = 0.0, 0.0
    for i in range(len(P)):
        for j in range(i + 1):
            scale = P[i, i] * P[j, j]
            x, y = dP_next[i, j] - dP[i, j], dP_next[i, j]
            if scale > 0.0:
                moves, largest = max(moves, x * x / scale), max(largest, y * y / scale)
            elif x != 0.0:
                return 1.0, most
    most = max(most, largest)
    return np.sqrt(relative_move(moves, largest, most, n) if moves > 0.0 else 0.0), most


@jitable
def smooth_steps(like, shared, W_bar):
    """Backwards through the steps of `filter_small`: fill what is smoothed, add to W_bar."""
    _, model, varying, tol, weight, kept, gain_of, smoothed, N_of = shared
    I_m, n, m, p = like.I_m, len(gain_of), len(like.I_m), len(like.I_p)
    r, N, T = 0.0 * diagonal(I_m), 0.0 * I_m, I_m
    C_inv, Z, Kf, TP = like.I_p, like.Z, like.Z.T, I_m
    of_mean, of_N = sizes_of_smoothed(m, p)
    of_T, of_Z, D, N_before = N, like.Z, like.I_p, N
    W_sum, gain, here, settled, since, before, looked = N, n, n, False, n, -1.0, n
    for t in range(n - 1, -1, -1):
        if t == n - 1 or varying:
            T = at_step(I_m, model.T, t)
        if gain_of[t] != gain:
            gain = gain_of[t]
            C_inv, Z, Kf, P_filt = gains_at(like, kept, gain)
            TP = T @ P_filt
            settled, since, before, looked = False, t, -1.0, t
        u, a_filt = means_at(like, kept, t)
        e, a_smooth, r_before = recursions.smooth_mean(r, T, Z, u, Kf, a_filt, TP)
        place = t * of_mean
        write(smoothed.mean, place, e)
        write(smoothed.mean, place + p, a_smooth)
        write(smoothed.mean, place + p + m, r)
        if not settled:
            here = t
            write(smoothed.N, t * of_N, N)
            of_T, of_Z, D, N_before = recursions.smooth_covariance(N, T, Z, C_inv, Kf, TP)
            if tol > 0.0 and is_time_to_look(looked - t, since - t):
                now = change(N, N_before)
                settled = is_steady(now, before, looked - t, tol)
                before, looked = now, t
        N_of[t] = here
        _, _, _, W_bar_t = recursions.smooth_gradient(r, N, e, a_smooth, of_T, of_Z, D)
        W_sum = W_sum + W_bar_t
        if varying or t == 0:
            add_to(W_bar, t, weight * W_sum)
            W_sum = 0.0 * I_m
        r, N = r_before, N_before


@jitable
def push_direction(like, shared, dots, moved, moved_of, slopes):
    """Forwards along one direction: fill `moved` and the slopes.

    moved_of receives the step whose tangents of the gain each step has. Of what is missing C^-1 and
    Kf are zero, whatever moves there.
    """
    y, model, varying, tol, _, kept, gain_of, _, _ = shared
    I_m, n, m, p = like.I_m, len(gain_of), len(like.I_m), len(like.I_p)
    x, z = diagonal(I_m), diagonal(like.I_p)
    a, P = at_step(x, model.a0, 0), symmetric(at_step(I_m, model.P0, 0))
    da, dP = at_step(x, dots.a0, 0), symmetric(at_step(I_m, dots.P0, 0))
    c = dc = x
    T = W = dT = dW = P_filt = dP_filt = I_m
    dd, Z, dZ, dH = z, like.Z, like.Z, like.I_p
    C_inv = dF = dE = like.I_p
    Kf = M = dM = dKf = like.Z.T
    of_mean, of_gain = sizes_of_moved(m, p)
    gain, here, settled, since, before, looked, most = n, n, False, 0, -1.0, 0, 0.0
    moving = vectors_vary(model)
    for t in range(n):
        if t == 0 or moving:
            c, dc, dd = at_step(x, model.c, t), at_step(x, dots.c, t), at_step(z, dots.d, t)
        if t == 0 or varying:
            T, dT = at_step(I_m, model.T, t), at_step(I_m, dots.T, t)
            dZ = at_step(like.Z, dots.Z, t)
            W, dW = at_step(I_m, model.W, t), symmetric(at_step(I_m, dots.W, t))
            dH = symmetric(at_step(like.I_p, dots.H, t))
        o = seen(read(z, y, t * p))
        if gain_of[t] != gain:
            gain = gain_of[t]
            C_inv, Z, Kf, P_filt = gains_at(like, kept, gain)
            settled, since, before, looked = False, t, -1.0, t
        u, a_filt = means_at(like, kept, t)
        if not settled:
            M, dM, dF, dE, dKf, dP_filt = tangents.push_covariance(dP, dZ, dH, C_inv, Kf, P, Z)
            here, place = t, t * of_gain
            write(moved.gain, place, dE)
            write(moved.gain, place + p * p, dKf)
            write(moved.gain, place + p * p + m * p, dP_filt)
        moved_of[t] = here
        dy_t = recursions.rows(at_step(z, dots.y, t), o)
        du, da_filt, dl = tangents.push_mean(dy_t, da, dd, dZ, M, dM, dF, dE, u, C_inv, a, Z)
        put(slopes, t, dl)
        write(moved.mean, t * of_mean, du)
        write(moved.mean, t * of_mean + p, da_filt)
        da = tangents.push_predict_mean(da_filt, dc, dT, a_filt, T)
        a, _ = recursions.predict(a_filt, P_filt, c, T, W)
        if not settled:
            dP_next = tangents.push_predict_covariance(dP_filt, dT, dW, P_filt, T)
            _, P = recursions.predict(a_filt, P_filt, c, T, W)
            if tol > 0.0 and is_time_to_look(t - looked, t - since):
                now, most = moved_change(P, dP, dP_next, most, n)
                settled = is_steady(now, before, t - looked, LATER * tol)
                before, looked = now, t
            dP = dP_next


@jitable
def pull_direction(like, shared, dots, moved, moved_of, bars):
    """Backwards along one direction: write those of y, a0 and P0 in `bars`, add the others."""
    _, model, varying, tol, weight, kept, gain_of, smoothed, N_of = shared
    I_m, n, p, of_N = like.I_m, len(gain_of), len(like.I_p), len(like.I_m) ** 2
    x, z = diagonal(I_m), diagonal(like.I_p)
    no_x, no_z, no_m, no_p = 0.0 * x, 0.0 * z, 0.0 * I_m, 0.0 * like.I_p
    r, dr, N, dN, T, dT, Z, dZ = no_x, no_x, I_m, no_m, I_m, I_m, like.Z, like.Z
    C_inv, Kf, TP, dE, dKf, dTP = like.I_p, like.Z.T, I_m, like.I_p, like.Z.T, I_m
    of_T, of_Z, dD, dN_before = no_m, like.Z, no_p, no_m
    c_sum, d_sum, T_sum, Z_sum, H_sum, W_sum = no_x, no_z, no_m, like.Z, no_p, no_m
    gain, where_moved, where_N = n, n, n
    settled, since, before, looked, most = False, n, -1.0, n, 0.0
    moving = vectors_vary(model)
    for t in range(n - 1, -1, -1):
        if t == n - 1 or varying:
            T, dT = at_step(I_m, model.T, t), at_step(I_m, dots.T, t)
            dZ = at_step(like.Z, dots.Z, t)
        if gain_of[t] != gain or moved_of[t] != where_moved or N_of[t] != where_N:
            gain, where_moved, where_N = gain_of[t], moved_of[t], N_of[t]
            C_inv, Z, Kf, P_filt = gains_at(like, kept, gain)
            dE, dKf, dP_filt = moved_gains_at(like, moved, where_moved)
            N = read(I_m, smoothed.N, where_N * of_N)
            TP, dTP = T @ P_filt, dT @ P_filt + T @ dP_filt
            settled, since, before, looked = False, t, -1.0, t
        du, da_filt = moved_means_at(like, moved, t)
        e, a_smooth, r = smoothed_at(like, smoothed, t)
        de, da_smooth, dr_before = tangents.push_smooth_mean(
            dr, dT, du, dKf, da_filt, dTP, dZ, r, T, Z, e, Kf, TP
        )
        if not settled:
            of_T, of_Z, dD, dN_before = tangents.push_smooth_covariance(
                dN, dT, dE, dKf, dTP, dZ, N, T, Z, C_inv, Kf, TP
            )
            if tol > 0.0 and is_time_to_look(looked - t, since - t):
                now, most = moved_change(N, dN, dN_before, most, n)
                settled = is_steady(now, before, looked - t, LATER * tol)
                before, looked = now, t
        T_bar, Z_bar, H_bar, W_bar = tangents.push_smooth_gradient(
            dr, dN, de, da_smooth, of_T, of_Z, dD, r, e, a_smooth
        )
        write(bars.y.w, t * p, -weight * de)
        c_sum, d_sum, T_sum = c_sum + dr, d_sum + de, T_sum + T_bar
        Z_sum, H_sum, W_sum = Z_sum + Z_bar, H_sum + H_bar, W_sum + W_bar
        dr, dN = dr_before, dN_before
        if moving or t == 0:
            add_to(bars.c, t, weight * c_sum)
            add_to(bars.d, t, weight * d_sum)
            c_sum, d_sum = no_x, no_z
        if varying or t == 0:
            add_to(bars.T, t, weight * T_sum)
            add_to(bars.Z, t, weight * Z_sum)
            add_to(bars.H, t, weight * H_sum)
            add_to(bars.W, t, weight * W_sum)
            T_sum, Z_sum, H_sum, W_sum = no_m, like.Z, no_p, no_m
    u, a_filt = means_at(like, kept, 0)
    _, _, r = recursions.smooth_mean(r, T, Z, u, Kf, a_filt, TP)  # before the first step
    write(bars.a0.w, 0, weight * dr)
    write(bars.P0.w, 0, weight * (symmetric(recursions.outer(dr, r)) - dN / 2))


@jitable
def direction(X, q):
    """Direction q of an array (directions, t, rows, columns)."""
    size = X.shape[2] * X.shape[3]
    return InTime(X.ctypes.data + 8 * q * X.shape[1] * size, X.shape[1], size)


@jitable
def in_direction(X, q):
    """Direction q of all nine."""
    return Directions(
        direction(X.y, q), direction(X.a0, q), direction(X.P0, q), direction(X.c, q),
        direction(X.d, q), direction(X.T, q), direction(X.Z, q), direction(X.H, q),
        direction(X.W, q),
    )  # fmt: skip


@jitable
def run(like, num, tol, weight, y, model, dots, bars, slopes, W_bar):
    """The tangents along all directions, with memory of its own."""
    n, k, p, m = num[0], num[9], len(like.I_p), len(like.I_m)
    varying, backwards = varies(model), num[10] != 0
    (kept_mean, kept_gain), (mean, N) = sizes_of_kept(m, p), sizes_of_smoothed(m, p)
    moved_mean, moved_gain = sizes_of_moved(m, p)
    memory, gains = blocks(
        n * (4 + kept_mean + mean + moved_mean), n * (kept_gain + N + moved_gain)
    )
    indices, step = memory[: 3 * n].view(np.int64), 8 * n
    gain_of, N_of, moved_of = indices[:n], indices[n : 2 * n], indices[2 * n :]
    l, at, far = memory.ctypes.data + 3 * step, memory.ctypes.data + 4 * step, gains.ctypes.data
    kept, at, far = Kept(at, far), at + step * kept_mean, far + step * kept_gain
    smoothed, at, far = Smoothed(at, far), at + step * mean, far + step * N
    moved = Moved(at, far)
    observed = Observed(np.empty((n, p), np.uint8), np.empty(n, np.int64))
    look_at(y, observed)
    given, no_shares = all_in_time(model, p, m), np.zeros(m)
    how, _, _ = filter_small(
        like, y.ctypes.data, observed, given, varying, no_shares.ctypes.data, tol, True,
        l, kept, gain_of,
    )  # fmt: skip
    if how == DONE:
        shared = Pass(y.ctypes.data, given, varying, tol, weight, kept, gain_of, smoothed, N_of)
        if backwards:
            smooth_steps(like, shared, in_time(W_bar, m * m))
        for q in range(k):
            along = in_direction(dots, q)
            push_direction(like, shared, along, moved, moved_of, slopes.ctypes.data + 8 * q * n)
            if backwards:
                pull_direction(like, shared, along, moved, moved_of, in_direction(bars, q))
    no_shares[0], memory[0], gains[0] = 0.0, 0.0, 0.0  # their addresses were good until here
    return how


@jitable
def directions_of(num, y, a0, P0, c, d, T, Z, H, W):
    """Directions, or what comes of them, by their addresses."""
    n, p, m, k = num[0], num[1], num[2], num[9]
    return Directions(
        carray(y, (k, n, p, 1)), carray(a0, (k, 1, m, 1)), carray(P0, (k, 1, m, m)),
        carray(c, (k, num[3], m, 1)), carray(d, (k, num[4], p, 1)), carray(T, (k, num[5], m, m)),
        carray(Z, (k, num[6], p, m)), carray(H, (k, num[7], p, p)), carray(W, (k, num[8], m, m)),
    )  # fmt: skip


def address(m: int, p: int, announce: bool | None = None) -> int:
    """Where the pass for m states and p series begins, compiled if it was not before."""
    what = f"second derivatives of {m} states and {p} series"
    return building.address(compiled, m, p, what, announce)


def compiled(m: int, p: int):
    """The pass for m states and p series, as machine code."""

    def small_tangents(
        sizes, tol, weight, y, a0, P0, c, d, T, Z, H, W, y_dot, a0_dot, P0_dot, c_dot, d_dot,
        T_dot, Z_dot, H_dot, W_dot, y_bar, a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar,
        slopes, W_sum,
    ):  # fmt: skip
        num = carray(sizes, 11)
        n = num[0]
        like = Like(identity(m), identity(p), zeros(p, m))
        dots = directions_of(num, y_dot, a0_dot, P0_dot, c_dot, d_dot, T_dot, Z_dot, H_dot, W_dot)
        bars = directions_of(num, y_bar, a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar)
        return run(
            like, num, tol, weight, carray(y, (n, p)),
            bundle(num, a0, P0, c, d, T, Z, H, W), dots, bars, carray(slopes, (num[9], n)),
            carray(W_sum, (num[8], m, m)),
        )  # fmt: skip

    return kept_on_disk(cfunc(_SIGNATURE, error_model="numpy"))(small_tangents)
