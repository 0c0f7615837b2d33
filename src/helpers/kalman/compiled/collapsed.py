"""The pass over rotated series, the rotation and the way back as machine code, by their addresses.

The text is that of :mod:`~helpers.kalman.compiled.collapse`. This module is imported, and its code
compiled, when a model is met whose series are rotated.
"""

import numpy as np

from helpers.kalman.compiled.collapse import (
    expand,
    keeps_digits,
    patterns_in,
    rotate,
    rotated_model,
    smoothed,
)
from helpers.kalman.compiled.door import (
    COLLAPSE,
    NOT_ROTATED,
    PASS,
    ROTATION,
    TO_LEAD_BACK,
    TO_ROTATE,
    VALUE,
    WAY_BACK,
    address_in,
    address_of,
    asked_for,
    call_rotation,
    call_way_back,
    compiled_part,
    linked_pass,
)
from helpers.kalman.compiled.forward import DONE
from helpers.kalman.compiled.inputs import Arrays, Wanted
from helpers.kalman.recursions import LOG_2PI


@compiled_part
def rotation(y, o, patterns, model, g, matrices, want_Z, backwards):
    """Whether there is one, `Rotated`, what `rotated_model` returns, and whether h is read off.

    There is none where H, or H_bar if `matrices` are wanted, would lose its digits. A Z with more
    columns than there are states has others rotated as well.
    """
    x, invertible, good = rotate(y, o, model.d, model.Z, model.H, g, patterns, backwards)
    if not good or (matrices and not keeps_digits(x, patterns, g)):
        return False, x, y, model, False
    read_off = want_Z and not (invertible and model.Z.shape[2] == len(model.a0))
    Y, rotated = rotated_model(x, patterns, model, read_off)
    return True, x, Y, rotated, read_off


@compiled_part
def way_back(x, patterns, g, wanted, read_off, y_bar, Y_bar, bars, out, diagonal):
    """`expand`, with h as it is read off, or solved for. Returns 0."""
    h, m = np.zeros((len(y_bar), out.Z.shape[2])), x.x.shape[1]
    if read_off:
        h[:] = bars.Z[:, m]
    elif wanted.Z:
        h = smoothed(x, patterns, g, Y_bar)
    expand(x, patterns, g, wanted, h, y_bar, Y_bar, bars, out, diagonal)
    return np.int64(0)


@compiled_part
def collapsed(y, model, out, l, l_bar, y_bar, asked, tol, report):
    """A pass over the rotated series."""
    m, backwards, asked_of = len(model.a0), asked.purpose != VALUE, asked.wanted
    # Rotated rows of Z are made of all columns.
    wanted = Wanted(asked_of.matrices, asked_of.T, asked_of.Z, asked_of.W, np.arange(m))
    o, patterns = patterns_in(y, model.Z, model.H)
    good, x, Y, rotated, read_off = call_rotation(
        address_of(0, ROTATION),
        (y, o, patterns, model, l_bar, wanted.matrices, wanted.Z, backwards),
    )
    if not good:
        return np.int64(NOT_ROTATED)
    Y_bar, d_star = np.zeros(Y.shape), np.zeros(rotated.d.shape)
    Z_star, H_star = np.zeros(rotated.Z.shape), np.zeros(rotated.H.shape)
    bars = Arrays(out.a0, out.P0, out.c, d_star, out.T, Z_star, H_star, out.W)
    inner = asked_for(asked.purpose, wanted, True)
    status = linked_pass((Y, rotated, bars, l, l_bar, Y_bar, inner, tol, report))
    if status == DONE:
        for j in range(len(y)):
            l[patterns.order[j]] += x.l[j] + (0.5 * (LOG_2PI + 1.0) if read_off else 0.0)
        if backwards:
            call_way_back(
                address_of(0, WAY_BACK),
                (x, patterns, l_bar, wanted, read_off, y_bar, Y_bar, bars, out, False),
            )
    return status


ADDRESSES = {
    ROTATION: address_in(rotation, TO_ROTATE),
    WAY_BACK: address_in(way_back, TO_LEAD_BACK),
    COLLAPSE: address_in(collapsed, PASS),
}
