"""Tangents for a model with few states and few series: the readable text, in registers.

It is to second derivatives what :mod:`helpers.kalman.fused.small` is to the gradient: after the
filter, and r and Pi backwards, each direction goes forwards and backwards through the lines of
:mod:`helpers.kalman.tangents`, step by step. Models that settle early are left to the pass for any
size.
"""

from typing import NamedTuple

import numpy as np
from numba import carray, cfunc, types

from helpers.kalman import recursions, tangents
from helpers.kalman.fused import building
from helpers.kalman.fused.entry import INTEGERS, REALS, bundle, kept_on_disk
from helpers.kalman.fused.forward import DONE, SETTLES_EARLY
from helpers.kalman.fused.inputs import Observed, look_at, varies
from helpers.kalman.fused.moves import Directions
from helpers.kalman.fused.registers import diagonal, identity, read, seen, write, zeros
from helpers.kalman.fused.small import (
    InTime,
    Kept,
    Like,
    add_to,
    all_in_time,
    at_step,
    filter_small,
    gains_at,
    in_time,
    means_at,
    sizes_of_kept,
)
from helpers.kalman.fused.tiles import get, jitable, put
from helpers.kalman.recursions import symmetric

# Where less than one in so many steps has a gain of its own, the pass for any size is done sooner:
# it goes through settled stretches all at once. With two states and series at most it never is.
FEW_UNSETTLED = 12
# The numbers of `run`, tol, the weights, y, the model, directions, what comes of them, the slopes
# and W_sum.
PASS = types.int64(INTEGERS, types.float64, *[REALS] * 30)


class Adjoint(NamedTuple):
    """r, Pi, s and Pt of each step, by address, in Python a Memory: see `recursions.pull_predict`.

    r and Pi are the cotangents of what follows the step, s and Pt those of a_filt and P_filt.
    """

    w: int


class Moved(NamedTuple):
    """dE, du, dKf, da_filt and dP_filt of each step, by address, in Python a Memory."""

    w: int


@jitable
def size_of_adjoint(m):
    """Doubles of a step in `Adjoint`."""
    return 2 * (m + m * m)


@jitable
def size_of_moved(m, p):
    """Doubles of a step in `Moved`."""
    return p * p + p + m * p + m + m * m


@jitable
def adjoint_at(like, adjoint, t):
    """r, Pi, s and Pt of step t."""
    x, m = diagonal(like.I_m), len(like.I_m)
    place = t * size_of_adjoint(m)
    return (
        read(x, adjoint.w, place),
        read(like.I_m, adjoint.w, place + m),
        read(x, adjoint.w, place + m + m * m),
        read(like.I_m, adjoint.w, place + 2 * m + m * m),
    )


@jitable
def moved_at(like, moved, t):
    """dE, du, dKf, da_filt and dP_filt of step t."""
    x, z, m, p = diagonal(like.I_m), diagonal(like.I_p), len(like.I_m), len(like.I_p)
    place = t * size_of_moved(m, p)
    return (
        read(like.I_p, moved.w, place),
        read(z, moved.w, place + p * p),
        read(like.Z.T, moved.w, place + p * p + p),
        read(x, moved.w, place + p * p + p + m * p),
        read(like.I_m, moved.w, place + p * p + p + m * p + m),
    )


@jitable
def pull_small(like, model, varying, weights, kept, gain_of, adjoint, W_bar):
    """Backwards through the steps that `filter_small` took: fill `adjoint`, add to W_bar."""
    I_m, n, m = like.I_m, len(gain_of), len(like.I_m)
    r, Pi, T = 0.0 * diagonal(I_m), 0.0 * I_m, I_m
    W_sum = Pi
    for t in range(n - 1, -1, -1):
        if t == n - 1 or varying:
            T = at_step(I_m, model.T, t)
        C_inv, S, Kf, J, P_filt = gains_at(like, kept, gain_of[t])
        w, u, a_filt = means_at(like, kept, t)
        _, s, Pt = recursions.pull_predict(r, Pi, T, a_filt, Pi)
        place = t * size_of_adjoint(m)
        write(adjoint.w, place, r)
        write(adjoint.w, place + m, Pi)
        write(adjoint.w, place + m + m * m, s)
        write(adjoint.w, place + 2 * m + m * m, Pt)
        W_sum = W_sum + Pi
        if varying or t == 0:
            add_to(W_bar, t, W_sum)
            W_sum = 0.0 * I_m
        _, _, _, r, Pi = recursions.pull_update(
            s, Pt, get(weights, t), w, u, C_inv, S, Kf, J, a_filt, P_filt @ s, Pt @ P_filt
        )


@jitable
def push_direction(like, y, model, varying, dots, kept, gain_of, moved, slopes):
    """Forwards along one direction: fill `moved` and the slopes.

    Of what is missing C^-1 and Kf are zero, whatever moves there.
    """
    I_m, n, m, p = like.I_m, len(gain_of), len(like.I_m), len(like.I_p)
    x, z = diagonal(I_m), diagonal(like.I_p)
    a, P = at_step(x, model.a0, 0), symmetric(at_step(I_m, model.P0, 0))
    da, dP = at_step(x, dots.a0, 0), symmetric(at_step(I_m, dots.P0, 0))
    c = dc = x
    T = W = dT = dW = I_m
    dd, Z, dZ, dH = z, like.Z, like.Z, like.I_p
    for t in range(n):
        if t == 0 or varying:
            c, T, W = at_step(x, model.c, t), at_step(I_m, model.T, t), at_step(I_m, model.W, t)
            dc, dT = at_step(x, dots.c, t), at_step(I_m, dots.T, t)
            dW = symmetric(at_step(I_m, dots.W, t))
            Z, dZ = at_step(like.Z, model.Z, t), at_step(like.Z, dots.Z, t)
            dd, dH = at_step(z, dots.d, t), symmetric(at_step(like.I_p, dots.H, t))
        o = seen(read(z, y, t * p))
        dy_t = recursions.rows(at_step(z, dots.y, t), o)
        C_inv, _, Kf, _, P_filt = gains_at(like, kept, gain_of[t])
        _, u, a_filt = means_at(like, kept, t)
        dE, du, dKf, da_filt, dP_filt, dl = tangents.push_update(
            dy_t, da, dP, dd, dZ, dH, u, C_inv, Kf, a, P, recursions.rows(Z, o)
        )
        put(slopes, t, dl)
        place = t * size_of_moved(m, p)
        write(moved.w, place, dE)
        write(moved.w, place + p * p, du)
        write(moved.w, place + p * p + p, dKf)
        write(moved.w, place + p * p + p + m * p, da_filt)
        write(moved.w, place + p * p + p + m * p + m, dP_filt)
        da, dP = tangents.push_predict(da_filt, dP_filt, dc, dT, dW, a_filt, P_filt, T)
        a, P = recursions.predict(a_filt, P_filt, c, T, W)


@jitable
def pull_direction(
    like, y, model, varying, dots, weights, kept, gain_of, adjoint, moved, bars
):  # fmt: skip
    """Backwards along one direction: write those of y, a0 and P0 in `bars`, add the others."""
    I_m, n, p = like.I_m, len(gain_of), len(like.I_p)
    x, z = diagonal(I_m), diagonal(like.I_p)
    no_x, no_z, no_m, no_p = 0.0 * x, 0.0 * z, 0.0 * I_m, 0.0 * like.I_p
    dr, dPi, T, dT, Z, dZ = no_x, no_m, I_m, I_m, like.Z, like.Z
    c_sum, d_sum, T_sum, Z_sum, H_sum, W_sum = no_x, no_z, no_m, like.Z, no_p, no_m
    for t in range(n - 1, -1, -1):
        if t == n - 1 or varying:
            T, dT = at_step(I_m, model.T, t), at_step(I_m, dots.T, t)
            Z, dZ = at_step(like.Z, model.Z, t), at_step(like.Z, dots.Z, t)
        o = seen(read(z, y, t * p))
        C_inv, S, Kf, J, P_filt = gains_at(like, kept, gain_of[t])
        w, u, a_filt = means_at(like, kept, t)
        r, Pi, s, Pt = adjoint_at(like, adjoint, t)
        dE, du, dKf, da_filt, dP_filt = moved_at(like, moved, t)
        dT_bar, ds, dPt = tangents.push_pull_predict(
            dr, dPi, dT, da_filt, dP_filt, r, Pi, T, a_filt, P_filt
        )
        c_sum, W_sum, T_sum = c_sum + dr, W_sum + dPi, T_sum + dT_bar
        de, dZ_bar, dH_bar, dr, dPi = tangents.push_pull_update(
            ds, dPt, dE, du, dKf, da_filt, dP_filt, dZ, s, Pt,
            get(weights, t), w, u, C_inv, S, Kf, J, a_filt, P_filt, recursions.rows(Z, o),
        )  # fmt: skip
        write(bars.y.w, t * p, -de)
        d_sum, Z_sum, H_sum = d_sum + de, Z_sum + dZ_bar, H_sum + dH_bar
        if varying or t == 0:
            add_to(bars.c, t, c_sum)
            add_to(bars.d, t, d_sum)
            add_to(bars.T, t, T_sum)
            add_to(bars.Z, t, Z_sum)
            add_to(bars.H, t, H_sum)
            add_to(bars.W, t, W_sum)
            c_sum, d_sum, T_sum, Z_sum, H_sum, W_sum = no_x, no_z, no_m, like.Z, no_p, no_m
    write(bars.a0.w, 0, dr)
    write(bars.P0.w, 0, dPi)


@jitable
def settles_early(m, p, observed, trial, first):
    """Whether the pass for any size is done sooner: see `FEW_UNSETTLED`.

    Of the first `trial` steps, those before `first` had gains of their own; so have about as many
    wherever something else is observed than before.
    """
    n, beginnings = len(observed.same_until), 1
    for t in range(n - 1):
        beginnings += observed.same_until[t] == t + 1
    return max(m, p) > 2 and first < trial and FEW_UNSETTLED * first * beginnings < n


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
def run(like, num, tol, weights, y, model, dots, bars, slopes, W_bar):
    """The tangents along all directions, with memory of its own."""
    n, k, p, m = num[0], num[9], len(like.I_p), len(like.I_m)
    varying, backwards = varies(model), num[10] != 0
    of_mean, of_gain = sizes_of_kept(m, p)
    means, gains, gain_of = np.empty(n * of_mean), np.empty(n * of_gain), np.empty(n, np.int64)
    kept = Kept(means.ctypes.data, gains.ctypes.data)
    observed = Observed(np.empty((n, p), np.uint8), np.empty(n, np.int64))
    look_at(y, observed)
    no_shares, l = np.zeros(m), np.empty(n)
    at, g = all_in_time(model, p, m), weights.ctypes.data
    how, steps = DONE, n if varying else n // FEW_UNSETTLED
    while how == DONE:
        how, _, first = filter_small(
            like, y.ctypes.data, observed, at, varying, no_shares.ctypes.data, tol, True,
            l.ctypes.data, kept, gain_of[:steps],
        )  # fmt: skip
        if steps == n:
            break
        if settles_early(m, p, observed, steps, first):
            how = SETTLES_EARLY
        steps = n
    if how == DONE:
        back, moves = np.empty(n * size_of_adjoint(m)), np.empty(n * size_of_moved(m, p))
        adjoint, moved = Adjoint(back.ctypes.data), Moved(moves.ctypes.data)
        if backwards:
            pull_small(like, at, varying, g, kept, gain_of, adjoint, in_time(W_bar, m * m))
        for q in range(k):
            along = in_direction(dots, q)
            push_direction(
                like, y.ctypes.data, at, varying, along, kept, gain_of, moved,
                slopes.ctypes.data + 8 * q * n,
            )  # fmt: skip
            if backwards:
                pull_direction(
                    like, y.ctypes.data, at, varying, along, g, kept, gain_of, adjoint, moved,
                    in_direction(bars, q),
                )  # fmt: skip
        back[:1], moves[:1] = 0.0, 0.0
    # The addresses of all these were good until here.
    no_shares[0], l[0], means[0], gains[0] = 0.0, 0.0, 0.0, 0.0
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
    return building.address(compiled, m, p, what, "five seconds", announce)


def compiled(m: int, p: int):
    """The pass for m states and p series, as machine code."""

    def small_tangents(
        sizes, tol, weights, y, a0, P0, c, d, T, Z, H, W, y_dot, a0_dot, P0_dot, c_dot, d_dot,
        T_dot, Z_dot, H_dot, W_dot, y_bar, a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar,
        slopes, W_sum,
    ):  # fmt: skip
        num = carray(sizes, 11)
        n = num[0]
        like = Like(identity(m), identity(p), zeros(p, m))
        dots = directions_of(num, y_dot, a0_dot, P0_dot, c_dot, d_dot, T_dot, Z_dot, H_dot, W_dot)
        bars = directions_of(num, y_bar, a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar)
        return run(
            like, num, tol, carray(weights, n), carray(y, (n, p)),
            bundle(num, a0, P0, c, d, T, Z, H, W), dots, bars, carray(slopes, (num[9], n)),
            carray(W_sum, (num[8], m, m)),
        )  # fmt: skip

    return kept_on_disk(cfunc(PASS, cache=True, error_model="numpy"))(small_tangents)
