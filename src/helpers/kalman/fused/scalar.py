"""The pass of a model with one state and one series: numbers, and no workspace.

What the matrices of the pass are made for, vectors of numbers and whole blocks, is wasted on one.
So its steps are written out here, in form 1 of the book, for any weights. P_filt = P H / F is a
product: it loses no digits however vague P0 is, so no step needs roots.
"""

import numpy as np

from helpers.kalman.fused.forward import (
    DONE,
    FIRST_LOOK,
    LOOK_LATER,
    NOT_POSITIVE_DEFINITE,
    is_steady,
)
from helpers.kalman.fused.inputs import Observed, look_at, varies
from helpers.kalman.fused.one_pass import all_equal
from helpers.kalman.fused.tiles import jitable
from helpers.kalman.recursions import LOG_2PI, at_step

# What the way back reads of each step: a, P, F^-1 (zero where nothing is observed) and v.
KEPT = 4


@jitable
def scalar_forward(y, observed, model, tol, l, kept):
    """Write l (n,) and kept (n, KEPT), or (0, KEPT) for the value alone.

    Returns how it ended, at which step, and the first step of the first steady state, n if there
    is none; that state is looked for as in :func:`helpers.kalman.fused.forward.forward`.
    """
    n, varying = len(y), varies(model)
    a, P, P_next = model.a0[0], model.P0[0, 0], 0.0
    Kf, F_inv, const, first, until, steady = 0.0, 0.0, 0.0, n, 0, False
    since, before, looked = 0, -1.0, 0
    d = Z = H = c = T = W = 0.0
    for t in range(n):
        if t == 0 or varying:
            d, Z, H = at_step(model.d, t)[0], at_step(model.Z, t)[0, 0], at_step(model.H, t)[0, 0]
            c, T, W = at_step(model.c, t)[0], at_step(model.T, t)[0, 0], at_step(model.W, t)[0, 0]
        if t > 0 and (varying or t == until or observed.same_until[t - 1] == t):
            since, before, looked = t, -1.0, t
        seen = observed.entries[t, 0] != 0
        if t >= until:
            Kf, F_inv, P_filt = 0.0, 0.0, P
            if seen:
                F = Z * Z * P + H
                if not F > 0.0:
                    return NOT_POSITIVE_DEFINITE, t, n
                F_inv, const = 1.0 / F, np.log(F) + LOG_2PI
                Kf, P_filt = P * Z * F_inv, P * H * F_inv
            P_next = T * P_filt * T + W
        v = y[t, 0] - d - Z * a if seen else 0.0
        l[t] = -0.5 * (const + v * v * F_inv) if seen else 0.0
        if len(kept) > 0:
            kept[t, 0], kept[t, 1], kept[t, 2], kept[t, 3] = a, P, F_inv, v
        a = T * (a + Kf * v) + c
        if t < until:
            continue
        if steady:  # from here on with the gain of this step
            until, steady = observed.same_until[t], False
            first = min(first, t)
            continue
        if (
            tol > 0.0
            and not varying
            and t - looked >= max(FIRST_LOOK, (t - since) // LOOK_LATER)
            and observed.same_until[t] - t > 2 * FIRST_LOOK
        ):
            now = abs(P_next - P) / P_next if P_next > 0.0 else 0.0
            steady = is_steady(now, before, t - looked, tol)
            before, looked = now, t
        P = P_next
    return DONE, n, first


@jitable
def scalar_backward(model, kept, l_bar, wanted, y_bar, out):
    """Add the gradients to `out`, and write those of a0, P0 and y."""
    n, varying = len(kept), varies(model)
    r, Pi, Z, H, T = 0.0, 0.0, 0.0, 0.0, 0.0
    for t in range(n - 1, -1, -1):
        if t == n - 1 or varying:
            Z, H = at_step(model.Z, t)[0, 0], at_step(model.H, t)[0, 0]
            T = at_step(model.T, t)[0, 0]
        a, P, F_inv, v = kept[t, 0], kept[t, 1], kept[t, 2], kept[t, 3]
        seen, Kf = F_inv != 0.0, P * Z * F_inv
        P_filt = P * H * F_inv if seen else P
        at_step(out.c, t)[0] += r
        if wanted.W:
            at_step(out.W, t)[0, 0] += Pi
        if wanted.T:
            at_step(out.T, t)[0, 0] += r * (a + Kf * v) + 2.0 * Pi * T * P_filt
        r, Pi = T * r, T * Pi * T
        y_bar[t, 0] = 0.0
        if seen:
            g, u, kept_share, sv = l_bar[t], v * F_inv, H * F_inv, r * v
            e, F_bar = g * u - Kf * r, 0.5 * g * (u * u - F_inv)
            at_step(out.d, t)[0] += e
            y_bar[t, 0] = -e
            if wanted.matrices:
                at_step(out.H, t)[0, 0] += F_bar + Pi * Kf * Kf - sv * Kf * F_inv
            if wanted.Z:
                of_gain = sv * P * F_inv * (kept_share - Kf * Z)
                of_P = 2.0 * (F_bar * Z * P - Pi * Kf * P_filt)
                at_step(out.Z, t)[0, 0] += of_P + of_gain + e * a
            Pi = F_bar * Z * Z + Pi * kept_share * kept_share + sv * Z * kept_share * F_inv
            r = kept_share * r + Z * g * u  # Z e + r, of which Z Kf r cancels where P is vague
    out.a0[0] = r
    if wanted.matrices:
        out.P0[0, 0] = Pi


@jitable
def scalar_pass(y, model, backwards, wanted, tol, l, l_bar, y_bar, out, report):
    """Forwards and, if `backwards`, the gradient of the sum of l weighted with l_bar.

    ``report`` as that of `_pass`. Returns how it ended.
    """
    n = len(y)
    kept = np.empty((n if backwards else 0, KEPT))
    observed = Observed(np.empty((n, 1), np.uint8), np.empty(n, np.int64))
    look_at(y, observed)
    equal = not backwards or all_equal(l_bar)
    how, t, first = scalar_forward(y, observed, model, tol if equal else 0.0, l, kept)
    report[0], report[1], report[2] = t, 0, first if how == DONE else n
    if how == DONE and backwards:
        scalar_backward(model, kept, l_bar, wanted, y_bar, out)
    return how
