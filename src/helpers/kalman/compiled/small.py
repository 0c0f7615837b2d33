"""The pass of a model with few states and few series: the readable text, in registers.

For matrices of two to four rows what the big pass is made for, vectors of numbers and products by
tiles, takes longer to begin than to do. Here each size has machine code of its own, compiled when
it is first met, in which a step of :mod:`helpers.kalman.recursions` is arithmetic and nothing else
(:mod:`~helpers.kalman.compiled.registers`). A steady state is looked for as in
:mod:`helpers.kalman.compiled.forward`; where P0 turns out to be vague, no more is lost than the
time until then. Second derivatives are the same pass on matrices that move.
"""

from typing import NamedTuple

import numpy as np

from helpers.kalman import recursions
from helpers.kalman.compiled import (
    building,
    overloads,  # noqa: F401 (lets compiled code call the readable text)
)
from helpers.kalman.compiled.door import (
    GRADIENT,
    SMALL,
    SMALL_TANGENTS,
    address_in,
    compiled_part,
    sizes_of_kept,
)
from helpers.kalman.compiled.forward import (
    DONE,
    FIRST_LOOK,
    LATER,
    NOT_POSITIVE_DEFINITE,
    VAGUE,
    is_steady,
    is_time_to_look,
)
from helpers.kalman.compiled.inputs import Arrays, for_each
from helpers.kalman.compiled.registers import (
    Along,
    diagonal,
    filled,
    identity,
    larger,
    largest,
    moving,
    read,
    seen,
    total,
    transposed,
    where_positive,
    write,
    written,
    zeros,
)
from helpers.kalman.compiled.step import JOSEPH_BELOW
from helpers.kalman.compiled.tiles import jitable
from helpers.kalman.square_root import WATCHED
from helpers.kalman.tangents import Moving, still

TINY = np.finfo(np.float64).tiny


class Like(NamedTuple):
    """A matrix of each shape: its type is what tells the compiler the size."""

    I_m: object  # the identity, (m, m)
    I_p: object  # (p, p)
    Z: object  # zeros, (p, m)


class InTime(NamedTuple):
    """An array with a first axis for time, by its address, in Python a Memory."""

    w: int
    step: int  # doubles from one step to the next, 0 if it does not vary


class Kept(NamedTuple):
    """What the way back reads of each step, by address, in Python a Memory."""

    mean: int  # u, a_filt
    gain: int  # C^-1, Z (masked), Kf, T P_filt


@written
def at_step(like, X, t):
    """The array of step t, of the shape of `like`."""
    return read(like, X.w, t * X.step)


@written
def add_to(X, t, A):
    """Add A to the array of step t."""
    write(read(A, X.w, t * X.step) + A, X.w, t * X.step)


@jitable
def matrices_vary(model):
    """:func:`helpers.kalman.compiled.inputs.varies`, of a model by its addresses."""
    return max(model.T.step, model.Z.step, model.H.step, model.W.step) > 0


@jitable
def vectors_vary(model):
    """:func:`helpers.kalman.compiled.inputs.vectors_vary`, of a model by its addresses."""
    return max(model.c.step, model.d.step) > 0


def read_all(likes, w, place):
    """Matrices of the shapes of `likes` that lie one after the other."""
    found = []
    for like in likes:
        found.append(read(like, w, place))
        place = place + int(np.prod(like.shape))
    return tuple(found)


@written
def write_all(matrices, w, place):
    """Write matrices one after the other."""
    for A in matrices:
        write(A, w, place)
        place = place + int(np.prod(A.shape))


@written
def gains_at(like, kept, gain):
    """C^-1, Z with zeros where a component is missing, Kf and T P_filt of the step `gain`."""
    likes = like.I_p, like.Z, like.Z.T, like.I_m
    _, of_gain = sizes_of_kept(len(like.I_m), len(like.I_p))
    return read_all(likes, kept.gain, gain * of_gain)


@written
def means_at(like, kept, t):
    """u and a_filt of step t."""
    of_mean, _ = sizes_of_kept(len(like.I_m), len(like.I_p))
    return read_all((diagonal(like.I_p), diagonal(like.I_m)), kept.mean, t * of_mean)


@written
def change(P, P_next, most, n):
    """How far P moved: the square of :func:`helpers.kalman.compiled.forward.change`.

    Of a matrix that moves also how far its tangent did, as a square relative to the largest that it
    is or, over the n steps, was; and the larger one of that, in its units, and `most`. Where a
    variance is zero any change is a large one.
    """
    x = larger(diagonal(still(P)), diagonal(still(P_next)))
    far = relative(still(P_next) - still(P), recursions.outer(x, x))
    if not isinstance(P, Moving):
        return far, 0.0 * far, most
    variances = diagonal(P.X)
    scale, X = recursions.outer(variances, variances), P_next.dX - P.dX
    moves, now = relative(X, scale), relative(P_next.dX, scale)
    most = larger(now, most)
    moves = moves / larger(larger(now, most / (n * n)), TINY)
    none = largest(X * X - where_positive(scale, X * X))
    return far, larger(where_positive(none, 1.0), moves), most


def relative(X, scale):
    """The largest square of an entry relative to its scale, where that is positive."""
    return largest(where_positive(scale, X * X) / larger(scale, TINY))


@written
def shortfall(P, share, most):
    """How far a variance of P is below its share, if that is not 0, of the most that it was."""
    return largest(where_positive(share, share * most - diagonal(still(P))))


@jitable
def both_steady(now, before, steps, tol):
    """:func:`.forward.is_steady` of a matrix and its tangent, from what `change` returns."""
    far, moves = now[0], now[1]
    of_tangent = is_steady(np.sqrt(moves), np.sqrt(before[1]), steps, LATER * tol)
    return of_tangent and is_steady(np.sqrt(far), np.sqrt(before[0]), steps, tol)


@jitable
def filter_small(like, y, same_until, model, varying, shares, tol, back, l, kept, gain_of):
    """Forwards: write l, what is `kept` if `back`, and the step whose gain each step has.

    `varying` where a matrix of the model is: there is no steady state then.
    shares (m,) are those of `fill_shares`, zeros if a vague P0 is not watched for.
    Returns how it ended, at which step, and the first step of the first steady state, n if there
    is none.
    """
    I_m, I_p = like.I_m, like.I_p
    n, m, p = len(gain_of), len(I_m), len(I_p)
    of_mean, of_gain = sizes_of_kept(m, p)
    x, z = diagonal(I_m), diagonal(I_p)  # vectors of the states and of the series
    a, P = at_step(x, model.a0, 0), recursions.symmetric(at_step(I_m, model.P0, 0))
    P_next = P_filt = T = W = I_m
    C_inv = H = I_p
    c, d, Z, G, Kf = x, z, like.Z, like.Z, transposed(like.Z)
    Z_t, logdet, moves = Z, total(0.0 * x), vectors_vary(model)
    share = read(still(x), shares, 0)
    most, below = 0.0 * share, 0.0 * share + JOSEPH_BELOW
    watch = total(share) > 0.0
    first, until, gain, steady, taken = n, 0, 0, False, 0.0
    since, before, looked = 0, (0.0, 0.0, 0.0), 0  # the first look has none before it
    for t in range(n):
        if t == 0 or moves:
            c, d = at_step(x, model.c, t), at_step(z, model.d, t)
        if t == 0 or varying:
            T, Z = at_step(I_m, model.T, t), at_step(like.Z, model.Z, t)
            H, W = at_step(I_p, model.H, t), at_step(I_m, model.W, t)
        if t > 0 and (varying or t == until or same_until[t - 1] == t):
            since, before, looked = t, (0.0, 0.0, before[2]), t
        y_t = read(z, y, t * p)
        o = seen(y_t)
        if t >= until:
            _, Z_t, H_t = recursions.mask(o, d, Z, H)
            _, logdet, C_inv, G, Kf, P_filt = recursions.gains(o, P, Z_t, H_t, I_p)
            if shortfall(P_filt, below, diagonal(still(P))) > 0.0:
                P_filt = recursions.joseph(P_filt, Z_t, H_t, Kf)
            if np.isnan(still(logdet)):
                return (VAGUE if watch and p > 1 else NOT_POSITIVE_DEFINITE), t, n
            gain = t
            if back:
                write_all((C_inv, Z_t, Kf, T @ P_filt), kept.gain, t * of_gain)
        gain_of[t] = gain
        _, _, u, a_filt, l_t = recursions.update(
            filled(y_t), o, a, recursions.rows(d, o), Z_t, logdet, C_inv, G
        )
        write(l_t, l, t)
        if back:
            write_all((u, a_filt), kept.mean, t * of_mean)
        if t < until:
            a, _ = recursions.predict(a_filt, P_filt, c, T, W)
            continue
        a, P_next = recursions.predict(a_filt, P_filt, c, T, W)
        if watch and taken < WATCHED * m:
            taken += total(o)
            most = larger(most, diagonal(still(P)))
            if shortfall(P_filt if t == n - 1 else P_next, share, most) > 0.0:
                return VAGUE, t, n
        if steady:  # from here on with the gain of this step
            until, steady = same_until[t], False
            first = min(first, t)
            continue
        if (
            tol > 0.0
            and not varying
            and is_time_to_look(t - looked, t - since)
            and same_until[t] - t > 2 * FIRST_LOOK
        ):
            now = change(P, P_next, before[2], float(n))
            steady = both_steady(now, before, t - looked, tol)
            before, looked = now, t
        P = P_next
    return DONE, n, first


@jitable
def smooth_small(like, model, varying, wanted, tol, weight, y_bar, kept, gain_of, out):
    """Backwards: write y_bar and the gradients of a0 and P0, add the others to `out`.

    In a steady stretch N becomes steady too, and is then left as it is.
    """
    I_m, I_p = like.I_m, like.I_p
    n, p = len(gain_of), len(I_p)
    x, z = diagonal(I_m), diagonal(I_p)
    no_x, no_z, no_m, no_p = 0.0 * x, 0.0 * z, 0.0 * I_m, 0.0 * I_p
    r, N, T, TP = no_x, no_m, I_m, I_m
    C_inv, Z, Kf = I_p, like.Z, transposed(like.Z)
    of_T, of_Z, D, N_before = no_m, like.Z, no_p, no_m
    c_sum, d_sum, T_sum, Z_sum, H_sum, W_sum = no_x, no_z, no_m, like.Z, no_p, no_m
    gain, steady, since, before, looked = n, False, n, (0.0, 0.0, 0.0), n
    moves = vectors_vary(model)
    for t in range(n - 1, -1, -1):
        if t == n - 1 or varying:
            T = at_step(I_m, model.T, t)
        if gain_of[t] != gain:
            gain = gain_of[t]
            C_inv, Z, Kf, TP = gains_at(like, kept, gain)
            steady, since, before, looked = False, t, (0.0, 0.0, before[2]), t
        u, a_filt = means_at(like, kept, t)
        e, a_smooth, r_before = recursions.smooth_mean(r, T, Z, u, Kf, a_filt, TP)
        write(-weight * e, y_bar, t * p)
        c_sum, d_sum = c_sum + r, d_sum + e
        if wanted.matrices:
            if not steady:
                of_T, of_Z, D, N_before = recursions.smooth_covariance(N, T, Z, C_inv, Kf, TP)
                if tol > 0.0 and is_time_to_look(looked - t, since - t):
                    now = change(N, N_before, before[2], float(n))
                    steady = both_steady(now, before, looked - t, tol)
                    before, looked = now, t
            T_bar, Z_bar, H_bar, W_bar = recursions.smooth_gradient(
                r, N, e, a_smooth, of_T, of_Z, D
            )
            T_sum, Z_sum, H_sum, W_sum = T_sum + T_bar, Z_sum + Z_bar, H_sum + H_bar, W_sum + W_bar
            N = N_before
        r = r_before
        if moves or t == 0:
            add_to(out.c, t, weight * c_sum)
            add_to(out.d, t, weight * d_sum)
            c_sum, d_sum = no_x, no_z
        if varying or t == 0:
            if wanted.T:
                add_to(out.T, t, weight * T_sum)
            if wanted.Z:
                add_to(out.Z, t, weight * Z_sum)
            if wanted.matrices:
                add_to(out.H, t, weight * H_sum)
            if wanted.W:
                add_to(out.W, t, weight * W_sum)
            T_sum, Z_sum, H_sum, W_sum = no_m, like.Z, no_p, no_m
    write(weight * r, out.a0.w, 0)
    if wanted.matrices:
        write(weight * ((recursions.outer(r, r) - N) / 2), out.P0.w, 0)


@jitable
def small_pass(
    like, y, model, backwards, wanted, shares, tol, weight, l, y_bar, kept, gain_of, same_until,
    out, report,
):  # fmt: skip
    """Forwards and, if `backwards`, the gradient of the sum of l times `weight`.

    The arrays of `model` and `out` are `InTime`, `same_until` is `Observed`'s, ``report`` that
    of `whole_pass`. Returns how it ended.
    """
    varying = matrices_vary(model)
    status, t, first = filter_small(
        like, y, same_until, model, varying, shares, tol, backwards, l, kept, gain_of
    )
    report[0], report[1], report[2] = t, 0, first
    if status == DONE and backwards:
        smooth_small(like, model, varying, wanted, tol, weight, y_bar, kept, gain_of, out)
    return status


@jitable
def over_time(A):
    """An array with an axis for time, by its address."""
    return InTime(A.ctypes.data, A[0].size if len(A) > 1 else 0)


# The model's arrays, or its gradient's, by their addresses; and such, with what they move by.
in_time = for_each(
    Arrays, "arrays", "over_time(arrays.{x})", "InTime(arrays.{x}.ctypes.data, 0)",
    over_time=over_time, InTime=InTime,
)  # fmt: skip
along = for_each(
    Arrays, "A, B", "InTime(Along(A.{x}.w, B.{x}.w), A.{x}.step)", InTime=InTime, Along=Along
)


def address(m: int, p: int, tangents: bool = False, announce: bool | None = None) -> int:
    """Where the pass for m states and p series begins, compiled if it was not before."""
    what = "second derivatives" if tangents else "Kalman filter"
    of, what = compiled_tangents if tangents else compiled, f"{what} of {m} states and {p} series"
    return building.address(of, m, p, what, announce)


def compiled(m: int, p: int):
    """The pass for m states and p series, as machine code: it and its address."""

    def small(
        y, model, out, l, l_bar, y_bar, asked, tol, report, shares, mean, gain, gain_of, same_until
    ):  # fmt: skip
        back = asked.purpose == GRADIENT
        return small_pass(
            Like(identity(m), identity(p), zeros(p, m)), y.ctypes.data, in_time(model), back,
            asked.wanted, shares.ctypes.data, tol, l_bar[0] if back else 1.0, l.ctypes.data,
            y_bar.ctypes.data, Kept(mean, gain), gain_of, same_until, in_time(out), report,
        )  # fmt: skip

    code = compiled_part(small)
    return code, address_in(code, SMALL)


def compiled_tangents(m: int, p: int):
    """The same pass on what moves (:mod:`helpers.kalman.tangents`), along one direction.

    It writes the tangents of what it writes otherwise, and the gradient of W beside its own. A
    steady state is one of both.
    """

    def small_tangents(
        y, model, out, l, l_bar, y_bar, asked, tol, report, shares, mean, gain, gain_of, same_until,
        y_dot, dots, W_sum, mean_dot, gain_dot,
    ):  # fmt: skip
        back, bars = asked.purpose == GRADIENT, in_time(out)
        bars = Arrays(
            bars.a0, bars.P0, bars.c, bars.d, bars.T, bars.Z, bars.H,
            InTime(Along(W_sum.ctypes.data, bars.W.w), bars.W.step),
        )  # fmt: skip
        return small_pass(
            Like(moving(identity(m)), moving(identity(p)), moving(zeros(p, m))),
            Along(y.ctypes.data, y_dot.ctypes.data), along(in_time(model), in_time(dots)), back,
            asked.wanted, shares.ctypes.data, tol, l_bar[0] if back else 1.0, l.ctypes.data,
            y_bar.ctypes.data, Kept(Along(mean, mean_dot), Along(gain, gain_dot)), gain_of,
            same_until, bars, report,
        )  # fmt: skip

    code = compiled_part(small_tangents)
    return code, address_in(code, SMALL_TANGENTS)
