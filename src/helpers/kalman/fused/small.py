"""The pass of a model with few states and few series: the readable text, in registers.

For matrices of two to four rows what the big pass is made for, vectors of numbers and products by
tiles, takes longer to begin than to do. Here each size has machine code of its own, compiled when
it is first met, in which a step of :mod:`helpers.kalman.recursions` is arithmetic and nothing else
(:mod:`~helpers.kalman.fused.registers`). A steady state is looked for as in
:mod:`helpers.kalman.fused.forward`; where P0 turns out to be vague, no more is lost than the time
until then.
"""

from typing import NamedTuple

import numpy as np
from numba import carray

from helpers.kalman import recursions
from helpers.kalman.fused import (
    building,
    text,  # noqa: F401 (lets compiled code call the readable text)
)
from helpers.kalman.fused.entry import (
    GRADIENT,
    SMALL,
    bundle,
    kept_on_disk,
    numbers_at,
    wanted_of,
)
from helpers.kalman.fused.forward import (
    DONE,
    FIRST_LOOK,
    NOT_POSITIVE_DEFINITE,
    VAGUE,
    is_steady,
    is_time_to_look,
)
from helpers.kalman.fused.inputs import Arrays, Observed, look_at
from helpers.kalman.fused.layout import blocks
from helpers.kalman.fused.registers import (
    diagonal,
    filled,
    identity,
    larger,
    read,
    seen,
    write,
    zeros,
)
from helpers.kalman.fused.step import JOSEPH_BELOW
from helpers.kalman.fused.tiles import jitable, put
from helpers.kalman.on_disk import cfunc
from helpers.kalman.recursions import symmetric
from helpers.kalman.square_root import WATCHED, fill_shares


class Like(NamedTuple):
    """A matrix of each shape: its type is what tells the compiler the size."""

    I_m: object  # the identity, (m, m)
    I_p: object  # (p, p)
    Z: object  # zeros, (p, m)


class InTime(NamedTuple):
    """An array with a first axis for time, by its address, in Python a Memory."""

    w: int
    steps: int
    size: int  # of one step


class Kept(NamedTuple):
    """What the way back reads of each step, by address, in Python a Memory."""

    mean: int  # u, a_filt
    gain: int  # C^-1, Z (masked), Kf, P_filt


@jitable
def sizes_of_kept(m, p):
    """Doubles of a step in each of `Kept`."""
    return p + m, p * p + 2 * p * m + m * m


@jitable
def at_step(like, X, t):
    """The array of step t, of the shape of `like`."""
    return read(like, X.w, (t if X.steps > 1 else 0) * X.size)


@jitable
def add_to(X, t, A):
    """Add A to the array of step t."""
    place = (t if X.steps > 1 else 0) * X.size
    write(X.w, place, read(A, X.w, place) + A)


@jitable
def matrices_vary(model):
    """:func:`helpers.kalman.fused.inputs.varies`, of a model by its addresses."""
    return max(model.T.steps, model.Z.steps, model.H.steps, model.W.steps) > 1


@jitable
def vectors_vary(model):
    """:func:`helpers.kalman.fused.inputs.vectors_vary`, of a model by its addresses."""
    return max(model.c.steps, model.d.steps) > 1


@jitable
def gains_at(like, kept, gain):
    """C^-1, Z with zeros where a component is missing, Kf and P_filt of the step `gain`."""
    m, p = len(like.I_m), len(like.I_p)
    _, of_gain = sizes_of_kept(m, p)
    place = gain * of_gain
    return (
        read(like.I_p, kept.gain, place),
        read(like.Z, kept.gain, place + p * p),
        read(like.Z.T, kept.gain, place + p * p + p * m),
        read(like.I_m, kept.gain, place + p * p + 2 * p * m),
    )


@jitable
def means_at(like, kept, t):
    """u and a_filt of step t."""
    x, z, p = diagonal(like.I_m), diagonal(like.I_p), len(like.I_p)
    of_mean, _ = sizes_of_kept(len(like.I_m), p)
    place = t * of_mean
    return read(z, kept.mean, place), read(x, kept.mean, place + p)


@jitable
def change(P, P_next):
    """:func:`helpers.kalman.fused.forward.change`, of matrices in registers."""
    largest = 0.0
    for i in range(len(P)):
        for j in range(i + 1):
            scale = max(P[i, i], P_next[i, i]) * max(P[j, j], P_next[j, j])
            x = P_next[i, j] - P[i, j]
            if scale > 0.0:
                largest = max(largest, x * x / scale)
    return np.sqrt(largest)


@jitable
def fell(P, share, most):
    """Whether some variance of P is below its share, if that is not 0, of the most that it was."""
    for i in range(len(P)):
        if share[i] > 0.0 and P[i, i] < share[i] * most[i]:
            return True
    return False


@jitable
def filter_small(like, y, observed, model, varying, shares, tol, back, l, kept, gain_of):
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
    a, P = at_step(x, model.a0, 0), symmetric(at_step(I_m, model.P0, 0))
    P_next = P_filt = T = W = I_m
    C_inv = H = I_p
    c, d, Z, G, Kf = x, z, like.Z, like.Z, like.Z.T
    Z_t, logdet, moving = Z, 0.0, vectors_vary(model)
    share, most, below = read(x, shares, 0), 0.0 * x, 0.0 * x + JOSEPH_BELOW
    watch = share.sum() > 0.0
    first, until, gain, steady, taken = n, 0, 0, False, 0.0
    since, before, looked = 0, -1.0, 0
    for t in range(n):
        if t == 0 or moving:
            c, d = at_step(x, model.c, t), at_step(z, model.d, t)
        if t == 0 or varying:
            T, Z = at_step(I_m, model.T, t), at_step(like.Z, model.Z, t)
            H, W = at_step(I_p, model.H, t), at_step(I_m, model.W, t)
        if t > 0 and (varying or t == until or observed.same_until[t - 1] == t):
            since, before, looked = t, -1.0, t
        y_t = read(z, y, t * p)
        o = seen(y_t)
        if t >= until:
            _, Z_t, H_t = recursions.mask(o, d, Z, H)
            _, logdet, C_inv, G, Kf, P_filt = recursions.gains(o, P, Z_t, H_t, I_p)
            if fell(P_filt, below, diagonal(P)):
                P_filt = recursions.joseph(P_filt, Z_t, H_t, Kf)
            if np.isnan(logdet):
                return NOT_POSITIVE_DEFINITE, t, n
            gain = t
            if back:
                place = t * of_gain
                write(kept.gain, place, C_inv)
                write(kept.gain, place + p * p, Z_t)
                write(kept.gain, place + p * p + p * m, Kf)
                write(kept.gain, place + p * p + 2 * p * m, P_filt)
        gain_of[t] = gain
        _, _, u, a_filt, l_t = recursions.update(
            filled(y_t), o, a, recursions.rows(d, o), Z_t, logdet, C_inv, G
        )
        put(l, t, l_t)
        if back:
            place = t * of_mean
            write(kept.mean, place, u)
            write(kept.mean, place + p, a_filt)
        if t < until:
            a, _ = recursions.predict(a_filt, P_filt, c, T, W)
            continue
        a, P_next = recursions.predict(a_filt, P_filt, c, T, W)
        if watch and taken < WATCHED * m:
            taken += o.sum()
            most = larger(most, diagonal(P))
            if fell(P_filt if t == n - 1 else P_next, share, most):
                return VAGUE, t, n
        if steady:  # from here on with the gain of this step
            until, steady = observed.same_until[t], False
            first = min(first, t)
            continue
        if (
            tol > 0.0
            and not varying
            and is_time_to_look(t - looked, t - since)
            and observed.same_until[t] - t > 2 * FIRST_LOOK
        ):
            now = change(P, P_next)
            steady = is_steady(now, before, t - looked, tol)
            before, looked = now, t
        P = P_next
    return DONE, n, first


@jitable
def smooth_small(like, model, varying, wanted, tol, weight, y_bar, kept, gain_of, out):
    """Backwards: write y_bar and the gradients of a0 and P0, add the others to `out`.

    In a steady stretch N settles too, and is then left as it is.
    """
    I_m, I_p = like.I_m, like.I_p
    n, p = len(gain_of), len(I_p)
    x, z = diagonal(I_m), diagonal(I_p)
    no_x, no_z, no_m, no_p = 0.0 * x, 0.0 * z, 0.0 * I_m, 0.0 * I_p
    r, N, T, TP = no_x, no_m, I_m, I_m
    C_inv, Z, Kf = I_p, like.Z, like.Z.T
    of_T, of_Z, D, N_before = no_m, like.Z, no_p, no_m
    c_sum, d_sum, T_sum, Z_sum, H_sum, W_sum = no_x, no_z, no_m, like.Z, no_p, no_m
    gain, settled, since, before, looked = n, False, n, -1.0, n
    moving = vectors_vary(model)
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
        write(y_bar, t * p, -weight * e)
        c_sum, d_sum = c_sum + r, d_sum + e
        if wanted.matrices:
            if not settled:
                of_T, of_Z, D, N_before = recursions.smooth_covariance(N, T, Z, C_inv, Kf, TP)
                if tol > 0.0 and is_time_to_look(looked - t, since - t):
                    now = change(N, N_before)
                    settled = is_steady(now, before, looked - t, tol)
                    before, looked = now, t
            T_bar, Z_bar, H_bar, W_bar = recursions.smooth_gradient(
                r, N, e, a_smooth, of_T, of_Z, D
            )
            T_sum, Z_sum, H_sum, W_sum = T_sum + T_bar, Z_sum + Z_bar, H_sum + H_bar, W_sum + W_bar
            N = N_before
        r = r_before
        if moving or t == 0:
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
    write(out.a0.w, 0, weight * r)
    if wanted.matrices:
        write(out.P0.w, 0, weight * ((recursions.outer(r, r) - N) / 2))


@jitable
def small_pass(
    like, y, model, backwards, wanted, shares, tol, weight, l, y_bar, kept, gain_of, observed, out,
    report,
):  # fmt: skip
    """Forwards and, if `backwards`, the gradient of the sum of l times `weight`.

    The arrays of `model` and `out` are `InTime`. ``report`` as that of `whole_pass`. Returns how it
    ended.
    """
    varying = matrices_vary(model)
    how, t, first = filter_small(
        like, y, observed, model, varying, shares, tol, backwards, l, kept, gain_of
    )
    report[0], report[1], report[2] = t, 0, first
    if how == DONE and backwards:
        smooth_small(like, model, varying, wanted, tol, weight, y_bar, kept, gain_of, out)
    return how


@jitable
def in_time(X, size):
    """An array of steps by its address."""
    return InTime(X.ctypes.data, X.size // size, size)


@jitable
def all_in_time(arrays, p, m):
    """The model's arrays, or its gradient's, by their addresses."""
    return Arrays(
        in_time(arrays.a0, m), in_time(arrays.P0, m * m), in_time(arrays.c, m),
        in_time(arrays.d, p), in_time(arrays.T, m * m), in_time(arrays.Z, p * m),
        in_time(arrays.H, p * p), in_time(arrays.W, m * m),
    )  # fmt: skip


@jitable
def run(like, num, tol, l, l_bar, y, y_bar, model, out, report):
    """`small_pass` on arrays, with memory of its own."""
    n, p, m, back = num[0], len(like.I_p), len(like.I_m), num[9] == GRADIENT
    of_mean, of_gain = sizes_of_kept(m, p)
    memory, gains = blocks(n * (1 + of_mean) if back else n, n * of_gain if back else 1)
    gain_of, kept = memory[:n].view(np.int64), Kept(memory.ctypes.data + 8 * n, gains.ctypes.data)
    observed = Observed(np.empty((n, p), np.uint8), np.empty(n, np.int64))
    look_at(y, observed)
    wanted = wanted_of(num)
    shares = np.zeros(m)
    if num[14] != 0:
        fill_shares(model.P0, model.T, model.W, shares)
    how = small_pass(
        like, y.ctypes.data, all_in_time(model, p, m), back, wanted,
        shares.ctypes.data, tol, l_bar[0] if back else 1.0, l.ctypes.data, y_bar.ctypes.data, kept,
        gain_of, observed, all_in_time(out, p, m), report,
    )  # fmt: skip
    shares[0], memory[0], gains[0] = 0.0, 0.0, 0.0  # their addresses were good until here
    return how


def address(m: int, p: int, announce: bool | None = None) -> int:
    """Where the pass for m states and p series begins, compiled if it was not before."""
    what = f"Kalman filter of {m} states and {p} series"
    return building.address(compiled, m, p, what, announce)


def compiled(m: int, p: int):
    """The pass for m states and p series, as machine code."""

    def small(
        sizes, report, tol, l, l_bar, y, y_bar, a0, P0, c, d, T, Z, H, W, a0_bar, P0_bar, c_bar,
        d_bar, T_bar, Z_bar, H_bar, W_bar,
    ):  # fmt: skip
        num = numbers_at(sizes)
        n = num[0]
        model = bundle(num, a0, P0, c, d, T, Z, H, W)
        out = bundle(num, a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar)
        like = Like(identity(m), identity(p), zeros(p, m))
        return run(
            like, num, tol, carray(l, n), carray(l_bar, n), carray(y, (n, p)),
            carray(y_bar, (n, p)), model, out, carray(report, 3),
        )  # fmt: skip

    return kept_on_disk(cfunc(SMALL, error_model="numpy"))(small)
