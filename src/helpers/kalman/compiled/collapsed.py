"""The pass over rotated series as machine code, called by its address.

The text is that of :mod:`~helpers.kalman.compiled.collapse`. This module is imported, and its code
compiled, when a model is met whose series are rotated.
"""

import numpy as np

from helpers.kalman.compiled.collapse import (
    expand,
    keeps_digits,
    patterns_of,
    rotate,
    rotated_model,
    seen_of,
    smoothed,
)
from helpers.kalman.compiled.door import (
    NOT_ROTATED,
    PASS,
    VALUE,
    address_in,
    asked_for,
    compiled_part,
    linked_pass,
)
from helpers.kalman.compiled.forward import DONE
from helpers.kalman.compiled.inputs import Arrays, Wanted
from helpers.kalman.recursions import LOG_2PI


@compiled_part
def collapsed(y, model, out, l, l_bar, y_bar, asked, tol, report):
    """A pass over the rotated series."""
    m, backwards, asked_of = len(model.a0), asked.purpose != VALUE, asked.wanted
    # Rotated rows of Z are made of all columns.
    wanted = Wanted(asked_of.matrices, asked_of.T, asked_of.Z, asked_of.W, np.arange(m))
    o = seen_of(y.reshape((len(y), 1, -1)))
    patterns = patterns_of(o, max(len(model.Z), len(model.H)) > 1)
    x, invertible, good = rotate(y, o, model.d, model.Z, model.H, l_bar, patterns, backwards)
    if not good or (wanted.matrices and not keeps_digits(x, patterns, l_bar)):
        return np.int64(NOT_ROTATED)
    read_off = wanted.Z and not invertible
    Y, rotated = rotated_model(x, patterns, model, read_off)
    Y_bar, d_star = np.zeros(Y.shape), np.zeros(rotated.d.shape)
    Z_star, H_star = np.zeros(rotated.Z.shape), np.zeros(rotated.H.shape)
    bars = Arrays(out.a0, out.P0, out.c, d_star, out.T, Z_star, H_star, out.W)
    inner = asked_for(asked.purpose, wanted, True)
    status = linked_pass((Y, rotated, bars, l, l_bar, Y_bar, inner, tol, report))
    if status == DONE:
        for j in range(len(y)):
            l[patterns.order[j]] += x.l[j] + (0.5 * (LOG_2PI + 1.0) if read_off else 0.0)
        if backwards:
            h = (
                np.ascontiguousarray(Z_star[:, m])
                if read_off
                else smoothed(x, patterns, l_bar, Y_bar)
            )
            expand(x, patterns, l_bar, wanted, h, y_bar, Y_bar, bars, out, False)
    return status


ADDRESS = address_in(collapsed, PASS)
