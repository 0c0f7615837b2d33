"""The pass of a model of any size as machine code, called by its address.

The text is that of :mod:`~helpers.kalman.compiled.one_pass`. This module is imported, and its code
compiled, when a model is met that no pass in registers takes.
"""

import numpy as np

from helpers.kalman.compiled.door import (
    GRADIENT,
    PASS,
    ROOM,
    WHOLE,
    address_in,
    compiled_part,
    saved_of,
)
from helpers.kalman.compiled.forward import DONE, Steps
from helpers.kalman.compiled.inputs import indices_in, look, varies
from helpers.kalman.compiled.one_pass import one_pass


@compiled_part
def whole_pass(room, y, model, out, l, l_bar, y_bar, asked, tol, report):
    """`one_pass` in memory that is laid out for it."""
    (n, p), m, back = y.shape, len(model.a0), asked.purpose == GRADIENT
    found = indices_in(room.indices, n, p, m)
    steps = Steps(l, found.steady_from)
    observed, pattern = look(y, model, room.entries[:n], found)
    status, t = one_pass(
        room.w, y, model, saved_of(asked), back, varies(model), pattern, asked.wanted, l_bar, tol,
        observed, asked.watch, steps, y_bar, out,
    )  # fmt: skip
    report[0], report[1], report[2] = t, 0, n
    if status == DONE:
        for k in range(n - 1, -1, -1):
            if steps.steady_from[k] >= 0:
                report[2] = steps.steady_from[k]
    return np.int64(status)


ADDRESSES = {WHOLE: address_in(whole_pass, (ROOM, *PASS))}
