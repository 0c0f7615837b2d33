"""Many series, compiled: grouped by their gaps, a pass for each group, a sweep over its gains.

Each part is compiled once, for arrays of one type, and what calls it does not carry its code
(:func:`~helpers.kalman.compiled.door.linked`). The steps of a square-root start are those of
:mod:`helpers.kalman.square_root`, for all series of a group at once.
"""

import numpy as np
from numba import types

from helpers.kalman.compiled.collapse import patterns_of, seen_of
from helpers.kalman.compiled.door import (
    ARRAYS,
    GAINS,
    GRADIENT,
    READ,
    VALUE,
    WANTED,
    asked_for,
    check,
    compiled,
    compiled_part,
    contiguous,
    copied,
    costs,
    linked,
    linked_pass,
    may_collapse,
    room_in,
    run_whole,
    saved_of,
    zeros_like,
)
from helpers.kalman.compiled.forward import DONE, VAGUE
from helpers.kalman.compiled.inputs import (
    Arrays,
    Observed,
    Wanted,
    fill,
    first_steps,
    indices_in,
    listed_pattern,
    look_at,
    model_later,
    varies,
)
from helpers.kalman.compiled.layout import HEADER, Sizes, lay_out_together
from helpers.kalman.compiled.one_pass import all_equal
from helpers.kalman.compiled.roots import linked_pull, linked_start
from helpers.kalman.compiled.sweep import (
    WIDTH,
    Series,
    add_matrices,
    gain_of_each_step,
    lay_out_columns,
    sweep,
)
from helpers.kalman.compiled.tiles import jitable, padded
from helpers.kalman.recursions import at_step, symmetric, update_columns
from helpers.kalman.square_root import columns_at_the_start, pull_step_columns


@jitable
def forward_in_roots(roots, series, observed, model, a, l_of_P):
    """The columns through the square-root start; a (m, J) is moved on.

    Returns w (k, p, J) and a_filt (k, m, J) of its steps.
    """
    k, m, J = len(roots), len(a), len(series.members)
    p = series.y.shape[2]
    ws, a_filts = np.empty((k, p, J)), np.empty((k, m, J))
    y, c = np.empty((p, J)), np.empty((m, J))
    for t in range(k):
        Z = at_step(model.Z, t).copy()
        for i in range(p):
            here = observed.entries[t, i]
            if not here:
                Z[i] = 0.0
            for j in range(J):
                y[i, j] = series.y[series.members[j], t, i] if here else 0.0
        for j in range(J):
            member = series.members[j] if len(series.c) > 1 else 0
            c[:, j] = series.c[member, t if series.c.shape[1] > 1 else 0]
        w, a_filt = update_columns(y, a, Z, roots[t].C_inv, roots[t].Kf)
        ws[t], a_filts[t] = w, a_filt
        a[:] = at_step(model.T, t) @ a_filt + c
        for j in range(J):
            series.l[series.members[j], t] = l_of_P[t] - 0.5 * np.sum(w[:, j] ** 2)
    return ws, a_filts


@jitable
def back_in_roots(roots, B_t, ws, a_filts, series, observed, model, r, out):
    """The way back through the square-root start: from r (m, J) after it to that of a0."""
    Br, J = B_t @ r, len(series.members)
    g = np.empty(J)
    for j in range(J):
        g[j] = series.weights[series.members[j]]
    for t in range(len(roots) - 1, -1, -1):
        e, smoothed, r_before, Br = pull_step_columns(
            roots[t], r, Br, a_filts[t], ws[t], np.ascontiguousarray(at_step(model.T, t))
        )
        rg, eg, smoothed_t = r * g, e * g, np.ascontiguousarray(smoothed.T)
        at_step(out.T, t)[:] += rg @ smoothed_t
        at_step(out.Z, t)[:] += eg @ smoothed_t  # e is zero where a component is missing
        at_step(out.H, t)[:] += eg @ np.ascontiguousarray(e.T) / 2
        at_step(out.W, t)[:] += rg @ np.ascontiguousarray(r.T) / 2
        for j in range(J):
            member = series.members[j]
            shared = member if len(series.c) > 1 else 0
            series.c_bar[shared, t if series.c.shape[1] > 1 else 0] += rg[:, j]
            for i in range(e.shape[0]):
                if observed.entries[t, i]:
                    series.y_bar[member, t, i] = -eg[i, j]
        r = r_before
    return columns_at_the_start(r, Br, symmetric(model.P0))


@compiled_part
def one_group(series, n, a0, model, out, a0_bar, backwards, wanted, tol, report):
    """The series of one group, of n steps; P0, T, Z, H and W of the model, and of `out`, count.

    ``report`` (3,) receives what :func:`door.loglike_and_grad` reports. Returns how it ended.
    """
    p, m, J = series.y.shape[2], len(model.P0), len(series.members)
    observed = Observed(np.empty((n, p), np.uint8), np.empty(n, np.int64))
    look_at(series.y[series.members[0], :n], observed)
    nothing, unused = np.zeros((n, p)), np.zeros((n, p))
    for t in range(n):
        for i in range(p):
            if not observed.entries[t, i]:
                nothing[t, i] = np.nan

    # The pass of a series that never surprises: its gains, and what the covariances give.
    covariances, l, ones = zeros_like(model), np.empty(n), np.ones(n)
    purpose = GRADIENT if backwards and wanted.matrices else GAINS
    asked = asked_for(purpose, wanted, True)
    plan = np.empty(HEADER, np.int64)
    at = padded(lay_out_together(Sizes(n, p, m), saved_of(asked), plan))
    _, size = lay_out_columns(at, n, p, m, padded(min(J, WIDTH)), False)
    memory = np.empty(size + 8)
    room = room_in(memory, plan, n, p, m)
    status = run_whole(
        (room, nothing, model, covariances, l, ones, unused, asked, tol, report)
    )  # fmt: skip
    a = np.empty((m, J))
    for j in range(J):
        a[:, j] = a0[series.members[j] if len(a0) > 1 else 0]
    k = 0
    if status == VAGUE:
        status, roots, B_t, _ = linked_start(
            (room, nothing, model, covariances, l, ones, unused, asked, tol, report, observed, True)
        )
        if status == DONE:
            k = len(roots)
            ws, a_filts = forward_in_roots(roots, series, observed, model, a, l)
    if status != DONE:
        return status

    rest = n - k
    if rest > 0:
        gains, places = np.empty(rest, np.int64), indices_in(room.indices, rest, p, m)
        gain_of_each_step(places.steady_from, gains)
        seen = Observed(room.entries[:rest], places.same_until)
        sweep(
            room.w, at, k, model_later(model, k), seen, varies(model),
            listed_pattern(places.pattern), gains, l[k:], wanted, backwards, series, a,
            model_later(out, k),
        )  # fmt: skip
    memory[0], room.indices[0] = 0.0, 0  # Numba frees an array after its last use
    if not backwards:
        return DONE
    if rest == 0:
        a[:] = 0.0
    if k > 0:
        linked_pull((roots, B_t, model, observed, ones, unused, covariances, wanted.columns))
        a[:] = back_in_roots(roots, B_t, ws, a_filts, series, observed, model, a, out)
    total, ag = 0.0, np.empty((m, J))
    for j in range(J):
        g = series.weights[series.members[j]]
        total += g
        ag[:, j] = g * a[:, j]
        a0_bar[series.members[j] if len(a0) > 1 else 0] += ag[:, j]
    out.P0[:] += ag @ np.ascontiguousarray(a.T) / 2
    add_matrices(out, total, covariances)
    return DONE


_NUMBERS, _ROWS, _STACKS = types.int64[::1], types.float64[:, ::1], types.float64[:, :, ::1]
SERIES = types.NamedTuple(
    (_NUMBERS, _STACKS, _STACKS, types.float64[::1], _ROWS, _STACKS, _STACKS), Series
)
linked_group = linked(
    one_group,
    (SERIES, types.int64, _ROWS, ARRAYS, ARRAYS, _ROWS, types.boolean, WANTED, types.float64,
     _NUMBERS),
)  # fmt: skip


@jitable
def go_alone(y, m, count, never_steady):
    """Whether so many series with the gaps of y (n, p) take less time one by one.

    Each is rotated then, where there are many observations for each state. In a pass that they
    share, each takes some 10 ns for an observation beside what all take together.
    """
    n, p = y.shape
    if count == 1 or not may_collapse(p, m):
        return count == 1
    now, rotated = costs(y, m, never_steady)
    return count * (rotated - 10 * n * p) < now


@jitable
def one_by_one(members, series, l_bar, a0, model, out, a0_bar, backwards, wanted, tol, report):
    """Each of the `members` in a pass of its own, with weights l_bar (J, n or 1) of the steps.

    Nothing is shared but where the gradients are added up.
    """
    n, purpose = series.y.shape[1], GRADIENT if backwards else VALUE
    told, ended, m = np.empty(3, np.int64), DONE, len(model.P0)
    P0_bar, one_a0, d_bar = np.zeros((m, m)), np.zeros(m), np.zeros(out.d.shape)
    for j in members:
        g = l_bar[j] if l_bar.shape[1] == n else np.full(n, l_bar[j, 0])
        own_a0, own_c = j if len(a0) > 1 else 0, j if len(series.c) > 1 else 0
        given = Arrays(
            a0[own_a0], model.P0, series.c[own_c], model.d, model.T, model.Z, model.H, model.W
        )
        gradient = Arrays(one_a0, P0_bar, series.c_bar[own_c], d_bar, out.T, out.Z, out.H, out.W)
        status = linked_pass(
            (series.y[j], given, gradient, series.l[j], g, series.y_bar[j],
             asked_for(purpose, wanted, True), tol, told)
        )  # fmt: skip
        if status != DONE:
            ended = status
            if told[0] < report[0]:
                report[0], report[1] = told[0], j
            series.l[j] = np.nan
        a0_bar[own_a0] += one_a0
        out.P0[:] += P0_bar
        one_a0[:], P0_bar[:] = 0.0, 0.0
    return ended


@compiled_part
def all_groups(series, l_bar, a0, model, out, a0_bar, backwards, wanted, tol, report):
    """All series, with weights l_bar (J, n or 1); what is written to is given as zeros.

    Series share a pass where their weights do not vary within any of them, unless they are faster
    alone. ``report`` (2,) receives the step whose F is not positive definite, and a series of that
    group. Returns how it ended.
    """
    J, equal, never_steady = len(l_bar), True, tol == 0.0 or varies(model)
    for j in range(J):
        equal = equal and all_equal(l_bar[j])
    if not equal:
        return one_by_one(
            np.arange(J), series, l_bar, a0, model, out, a0_bar, backwards, wanted, tol, report
        )
    of_group, ended, m = np.empty(3, np.int64), DONE, len(model.P0)
    seen = seen_of(series.y)
    patterns = patterns_of(seen, False)
    for k in range(len(patterns.start) - 1):
        members = patterns.order[patterns.start[k] : patterns.start[k + 1]].copy()
        one, last = members[0], seen.shape[1]
        while last > 0 and seen[one, last - 1] == 0:
            last -= 1
        if last == 0:
            continue  # nothing is observed, and nothing learned
        if go_alone(series.y[one], m, len(members), never_steady):
            status = one_by_one(
                members, series, l_bar, a0, model, out, a0_bar, backwards, wanted, tol, report
            )
            ended = ended if status == DONE else status
            continue
        end = (last - 1) // series.y.shape[2] + 1
        group = Series(
            members, series.y, series.c, series.weights, series.l, series.y_bar, series.c_bar
        )
        status = linked_group(
            (group, end, a0, first_steps(model, end), first_steps(out, end), a0_bar, backwards,
             wanted, tol, of_group)
        )  # fmt: skip
        if status != DONE:
            ended = status
            if of_group[0] < report[0]:
                report[0], report[1] = of_group[0], one
            for j in members:
                series.l[j] = np.nan
    return ended


linked_groups = linked(
    all_groups,
    (SERIES, _ROWS, _ROWS, ARRAYS, ARRAYS, _ROWS, types.boolean, WANTED, types.float64, _NUMBERS),
)


@compiled
def loglike_and_grad(
    y, a0, P0, c, T, Z, H, W, l_bar, backwards, want_matrices, want_T, want_Z, want_W, tol
):  # fmt: skip
    """The log-likelihoods l (J, n) and the gradient of their sum weighted with l_bar (J, n or 1).

    y (J, n, p), d taken off; a0 (J or 1, m); c (J or 1, n or 1, m); P0 (m, m); T, Z, H, W with an
    axis of length n or 1 for time. Returns l, y_bar, a0_bar (as a0), c_bar (as c), the gradients of
    the others in `Arrays`, and a report (2,): the step at which the pass of a group ended because F
    is not positive definite, else n, and a series of that group. The log-likelihoods of its series
    are NaN, and so are the gradients of what is theirs and of what all share. ValueError if shapes
    do not fit, MemoryError if there is not enough.
    """
    y, a0s, cs, weights = contiguous(y), contiguous(a0), contiguous(c), contiguous(l_bar)
    J, n, p = y.shape
    m = len(P0)
    if J == 0:
        raise ValueError("there is no series")
    model = copied(np.zeros(m), P0, np.zeros((1, m)), np.zeros((1, p)), T, Z, H, W)
    check(y[0], model, y[0, :, 0])
    if a0s.shape[1] != m or cs.shape[2] != m:
        raise ValueError("a0 or c does not have length m, the number of rows of P0")
    if (len(a0s) != J and len(a0s) != 1) or (len(cs) != J and len(cs) != 1):
        raise ValueError("a0 or c is not that of as many series as there are")
    if len(weights) != J or (weights.shape[1] != n and weights.shape[1] != 1):
        raise ValueError("l_bar does not have a row for each series and a column for each step")
    if cs.shape[1] != 1 and cs.shape[1] != n:
        raise ValueError("c varies over time, but not over as many steps as y has")
    l, y_bar = np.zeros((J, n)), np.zeros(y.shape)
    a0_bar, c_bar, out = np.zeros(a0s.shape), np.zeros(cs.shape), zeros_like(model)
    report = np.array([n, 0])
    series = Series(np.empty(0, np.int64), y, cs, weights[:, 0].copy(), l, y_bar, c_bar)
    wanted = Wanted(want_matrices, want_T, want_Z, want_W, np.arange(len(P0)))
    status = linked_groups(
        (series, weights, a0s, model, out, a0_bar, backwards, wanted, tol, report)
    )
    if status != DONE:
        for j in range(J):
            if np.isnan(l[j, 0]):
                y_bar[j] = np.nan
                a0_bar[j if len(a0s) > 1 else 0] = np.nan
                c_bar[j if len(cs) > 1 else 0] = np.nan
        fill(out, np.nan)
    return l, y_bar, a0_bar, c_bar, out, report


linked_loglike_and_grad = linked(
    loglike_and_grad,
    (READ[3], READ[2], READ[2], READ[3], *[READ[3]] * 4, READ[2], *[types.boolean] * 5,
     types.float64),
)  # fmt: skip
