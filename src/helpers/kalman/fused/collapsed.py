"""The pass over rotated series as machine code, called by its address.

The text is that of :mod:`~helpers.kalman.fused.collapse`. This module is imported, and its code
compiled, when a model is met whose series are rotated.
"""

import numpy as np
from numba import carray

from helpers.kalman.fused.collapse import (
    expand,
    keeps_digits,
    patterns_of,
    rotate,
    rotated_model,
    smoothed,
)
from helpers.kalman.fused.entry import (
    COLLAPSED,
    NOT_ROTATED,
    VALUE,
    bundle,
    call,
    kept_on_disk,
    numbers_at,
    wanted_of,
)
from helpers.kalman.fused.forward import DONE
from helpers.kalman.fused.inputs import Arrays, Wanted
from helpers.kalman.fused.steps import gaps
from helpers.kalman.on_disk import cfunc
from helpers.kalman.recursions import LOG_2PI


def _collapsed(
    sizes, report, tol, l, l_bar, y, y_bar, a0, P0, c, d, T, Z, H, W,
    a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar,
):  # fmt: skip
    """A pass over the rotated series, with the whole pass's arguments but its memory."""
    num = numbers_at(sizes)
    n, p, m = num[0], num[1], num[2]
    model = bundle(num, a0, P0, c, d, T, Z, H, W)
    out = bundle(num, a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar)
    backwards = num[9] != VALUE
    # Rotated rows of Z are made of all columns.
    asked = wanted_of(num)
    wanted = Wanted(asked.matrices, asked.T, asked.Z, asked.W, np.arange(m))
    ys, dys, ls, g = carray(y, (n, p)), carray(y_bar, (n, p)), carray(l, n), carray(l_bar, n)
    _, o = gaps(ys)
    patterns = patterns_of(o, max(len(model.Z), len(model.H)) > 1)
    x, invertible, good = rotate(ys, o, model.d, model.Z, model.H, g, patterns, backwards)
    if not good or (wanted.matrices and not keeps_digits(x, patterns, g)):
        return NOT_ROTATED
    read_off = wanted.Z and not invertible
    Y, rotated = rotated_model(x, patterns, model, read_off)
    Y_bar, d_star = np.zeros(Y.shape), np.zeros(rotated.d.shape)
    Z_star, H_star = np.zeros(rotated.Z.shape), np.zeros(rotated.H.shape)
    bars = Arrays(out.a0, out.P0, out.c, d_star, out.T, Z_star, H_star, out.W)
    how = call(Y, rotated, bars, ls, g, Y_bar, backwards, wanted, tol, carray(report, 3))
    if how == DONE:
        for j in range(n):
            ls[patterns.order[j]] += x.l[j] + (0.5 * (LOG_2PI + 1.0) if read_off else 0.0)
        if backwards:
            h = np.ascontiguousarray(Z_star[:, m]) if read_off else smoothed(x, patterns, g, Y_bar)
            expand(x, patterns, g, wanted, h, dys, Y_bar, bars, out, False)
    return how


_code = kept_on_disk(cfunc(COLLAPSED, error_model="numpy"))(_collapsed)
ADDRESS = _code.address
