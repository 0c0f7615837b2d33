"""Hessian-vector products of many series that see few states: rotated, then along all directions.

By a rotation that does not move: among the columns of H^-1/2 Z stand those of H^-1/2 that belong to
the series of which some direction moves anything. What is left of y then sees nothing that moves.
This module is imported, and its code compiled, when such a model is met.
"""

import numpy as np

from helpers.kalman.compiled.collapse import column
from helpers.kalman.compiled.directions import Directions
from helpers.kalman.compiled.door import (
    NOT_ROTATED,
    ROTATION,
    TURNED,
    WAY_BACK,
    address_in,
    address_of,
    call_rotation,
    call_way_back,
    compiled_part,
)
from helpers.kalman.compiled.forward import DONE
from helpers.kalman.compiled.inputs import Arrays, Wanted
from helpers.kalman.compiled.tangents import ALONG_ROTATED, as_model, linked_along_all
from helpers.kalman.compiled.tiles import jitable


@compiled_part
def along_rotated(
    y, o, patterns, model, l_bar, dots, bars, slopes, W_sum, series, T_wanted, want_Z, diagonal,
    backwards, tol, memory, gains,
):  # fmt: skip
    """`tangents.along_all` for directions that move few `series`; NOT_ROTATED if H is too ill."""
    (n, p), m, k, nothing = y.shape, len(model.a0), len(slopes), np.zeros(len(y))
    columns = np.zeros((len(model.Z), p, m + len(series)))
    columns[:, :, :m] = model.Z
    for j in range(len(series)):
        columns[:, series[j], m + j] = 1.0
    a0, P0, c, d, T, _, H, W = model
    good, x, Y, rotated, read_off = call_rotation(
        address_of(0, ROTATION),
        (y, o, patterns, Arrays(a0, P0, c, d, T, columns, H, W), nothing, False, want_Z, True),
    )
    if not good:
        return np.int64(NOT_ROTATED), memory, gains
    _, size, _ = rotated.H.shape
    steps = len(rotated.H)
    y_dot, d_dot = np.zeros((k, n, size, 1)), np.zeros((k, 1, size, 1))
    Z_dot, H_dot = np.zeros((k, steps, size, m)), np.zeros((k, steps, size, size))
    B_t = np.zeros((p, x.x.shape[1]))
    for i in range(len(patterns.start) - 1):
        for j in series:
            column(x, i, j, B_t[j])
        for place in range(patterns.start[i], patterns.start[i + 1]):
            t = patterns.order[place]
            rotate_moves(B_t, dots, t, series, y_dot[:, t], Z_dot, H_dot)
    inner = Directions(
        y_dot, dots.a0, dots.P0, dots.c, d_dot, dots.T, Z_dot, H_dot, dots.W
    )  # fmt: skip
    Y_bar, d_bar = np.zeros(y_dot.shape), np.zeros(d_dot.shape)
    Z_bar, H_bar = np.zeros(Z_dot.shape), np.zeros(H_dot.shape)
    found = Directions(
        Y_bar, bars.a0, bars.P0, bars.c, d_bar, bars.T, Z_bar, H_bar, bars.W
    )  # fmt: skip
    status, memory, gains = linked_along_all(
        (Y, rotated, l_bar, inner, found, slopes, W_sum, T_wanted, want_Z, backwards, tol, memory,
         gains)
    )  # fmt: skip
    if status == DONE and backwards:
        wanted = Wanted(True, True, want_Z, True, np.empty(0, np.int64))
        for q in range(k):
            call_way_back(
                address_of(0, WAY_BACK),
                (x, patterns, nothing, wanted, read_off, bars.y[q].reshape((n, p)),
                 Y_bar[q].reshape((n, size)), as_model(found, q), as_model(bars, q), diagonal),
            )  # fmt: skip
    return status, memory, gains


@jitable
def rotate_moves(B_t, dots, t, series, y_dot, Z_dot, H_dot):
    """What directions that move these `series` alone move, rotated by B' (p, rows), at step t."""
    of_d = t if dots.d.shape[1] > 1 else 0
    of_Z, of_H = t if dots.Z.shape[1] > 1 else 0, t if dots.H.shape[1] > 1 else 0
    for q in range(len(y_dot)):
        for s in series:
            dx = dots.y[q, t, s, 0] - dots.d[q, of_d, s, 0]
            for j in range(B_t.shape[1]):
                y_dot[q, j, 0] += B_t[s, j] * dx
        if t >= Z_dot.shape[1]:  # all steps have the same
            continue
        for s in series:
            for j in range(B_t.shape[1]):
                for l in range(Z_dot.shape[3]):
                    Z_dot[q, t, j, l] += B_t[s, j] * dots.Z[q, of_Z, s, l]
            for l in series:
                dH = 0.5 * (dots.H[q, of_H, s, l] + dots.H[q, of_H, l, s])
                if dH != 0.0:
                    for i in range(B_t.shape[1]):
                        for j in range(B_t.shape[1]):
                            H_dot[q, t, i, j] += B_t[s, i] * dH * B_t[l, j]


ADDRESSES = {TURNED: address_in(along_rotated, ALONG_ROTATED)}
