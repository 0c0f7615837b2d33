"""All seven outputs of the filter.

They are copied from the steps of :mod:`helpers.kalman.compiled.forward`. Many series that see few
states are rotated first: y_hat and F follow from the predicted state. Like the pass of
:mod:`helpers.kalman.compiled.door` the function is called by its address, and compiled when this
module is imported: a function of PyTensor that calls it does not carry it.
"""

import numpy as np

from helpers.kalman.compiled.collapse import patterns_in
from helpers.kalman.compiled.door import (
    MODEL,
    ROTATION,
    address_of,
    call_rotation,
    check,
    collapses,
    compiled,
    contiguous,
    copied,
    linked,
    room_in,
)
from helpers.kalman.compiled.inputs import indices_in, look, varies
from helpers.kalman.compiled.layout import HEADER, Saved, Sizes, lay_out_together
from helpers.kalman.compiled.one_pass import clean
from helpers.kalman.compiled.steps import filter_steps, room_for_outputs
from helpers.kalman.compiled.tiles import jitable
from helpers.kalman.recursions import at_step
from helpers.kalman.reference import FilterOutputs

# Times what a rotation costs the value, to rotate for outputs: F costs the same either way.
WORTH_IT = 3


@compiled
def filter_outputs(y, a0, P0, c, d, T, Z, H, W):
    """a_filt, a_pred, y_hat, P_filt, P_pred, F, l.

    y (n, p), NaN for a gap; c, d, T, Z, H, W with an axis of length 1 or n in front, in any
    layout. Where F is not positive definite, everything is NaN from there on. ValueError if shapes
    do not fit, MemoryError if there is not enough.
    """
    y = contiguous(y)
    model = copied(a0, P0, c, d, T, Z, H, W)
    check(y, model, y[:, 0])
    (n, p), m = y.shape, len(model.a0)
    out = room_for_outputs(n, p, m)
    if collapses(y, m, True, WORTH_IT):
        o, patterns = patterns_in(y, model.Z, model.H)
        good, x, Y, rotated, _ = call_rotation(
            address_of(0, ROTATION), (y, o, patterns, model, np.zeros(n), False, False, False)
        )
        if good:
            few = room_for_outputs(n, m, m)
            run_in_tiles(
                Y, rotated,
                FilterOutputs(
                    out.a_filt, out.a_pred, few.y_hat, out.P_filt, out.P_pred, few.F, out.l
                ),
            )  # fmt: skip
            for place in range(n):
                out.l[patterns.order[place]] += x.l[place]
            observe(y, model, out)
            return out.a_filt, out.a_pred, out.y_hat, out.P_filt, out.P_pred, out.F, out.l
    run_in_tiles(y, model, out)
    return out.a_filt, out.a_pred, out.y_hat, out.P_filt, out.P_pred, out.F, out.l


@jitable
def run_in_tiles(y, model, out):
    """`filter_steps`, in memory laid out for it."""
    (n, p), m = y.shape, len(model.a0)
    plan = np.empty(HEADER, np.int64)
    memory = np.empty(lay_out_together(Sizes(n, p, m), Saved(False, 0), plan) + 8)
    room = room_in(memory, plan, n, p, m)
    clean(room.w)
    observed, pattern = look(y, model, room.entries, indices_in(room.indices, n, p, m))
    filter_steps(room.w, y, observed, model, varies(model), pattern, out)
    memory[0], room.indices[0] = 0.0, 0  # Numba frees an array after its last use


@jitable
def observe(y, model, out):
    """Write y_hat and F of the series y, from the predicted state; zeros for gaps."""
    n, p = y.shape
    for t in range(n):
        Z, d, H = at_step(model.Z, t), at_step(model.d, t), at_step(model.H, t)
        failed, y_hat, F = np.isnan(out.l[t]), Z @ out.a_pred[t], Z @ out.P_pred[t] @ Z.T
        for i in range(p):
            gap = np.isnan(y[t, i]) and not failed
            out.y_hat[t, i] = 0.0 if gap else y_hat[i] + d[i]
            for j in range(i + 1):
                zero = gap or (np.isnan(y[t, j]) and not failed)
                seen = 0.0 if zero else F[i, j] + 0.5 * (H[i, j] + H[j, i])
                out.F[t, i, j] = out.F[t, j, i] = seen


linked_filter_outputs = linked(filter_outputs, MODEL)
