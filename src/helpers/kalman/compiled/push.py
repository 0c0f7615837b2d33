"""The tangents of the filter, compiled: after each step of a forward pass, those of what it did.

The formulas are those of :mod:`helpers.kalman.tangents`, in factors where F^-1 would lose digits.
Where P and its tangents are in their steady state, only those of the means are left to do.
"""

import numpy as np

from helpers.kalman.compiled.directions import (
    add_outer_from_left,
    add_symmetric,
    add_times_row,
    add_times_rows,
    as_column,
    by_lists,
    columns_from,
    from_right,
    from_right_listed,
    group_of,
    load_moves,
    plus_transpose,
    tangent_space,
    transpose_each,
)
from helpers.kalman.compiled.forward import (
    DONE,
    FIRST_LOOK,
    LATER,
    NOT_POSITIVE_DEFINITE,
    Steps,
    change,
    is_steady,
    is_time_to_look,
    load_start,
    steady_forward,
)
from helpers.kalman.compiled.inputs import load_step, load_vectors, vectors_vary
from helpers.kalman.compiled.layout import Saved, sizes, space
from helpers.kalman.compiled.step import predict, update
from helpers.kalman.compiled.tiles import (
    Mat,
    add,
    axpy,
    below,
    clear,
    copy,
    element,
    from_left,
    get,
    jitable,
    product,
    put,
    row_product,
    sparse_product,
    transpose,
    transposed,
)


@jitable
def load_directions(w, x, t, dots, observed, group):
    """Those of the model's matrices and of c at step t; what y misses does not move."""
    d, k = tangent_space(x), group.k
    _, p, m = sizes(w)
    load_moves(w, d.T, dots.T, t, group, False)
    transpose_each(w, d.T_t, d.T, m, m, k)
    load_moves(w, d.Z, dots.Z, t, group, False)
    load_moves(w, d.H, dots.H, t, group, True)
    load_moves(w, d.W, dots.W, t, group, True)
    load_moves(w, as_column(d.c, group.k), dots.c, t, group, False)
    for i in range(p):
        if not observed.entries[t, i]:
            clear(w, below(d.Z, i), 1)
            clear(w, below(d.H, i), 1)
            for q in range(k):
                for j in range(p):
                    put(w, d.H.at + j * d.H.ld + i * k + q, 0.0)
    transpose_each(w, d.Z_t, d.Z, p, m, k)


@jitable
def in_turn(d, swapped):
    """Where the tangents of P or N are, and where the next ones come."""
    return (d.P_next, d.P) if swapped else (d.P, d.P_next)


@jitable
def push_covariance(w, x, t, P, swapped, Z_moves, kept, pattern, group):
    """The tangents of what step t does to covariances, after its `updated` and `predict`."""
    s, d = space(w), tangent_space(x)
    dP, dP_next = in_turn(d, swapped)
    n, p, m = sizes(w)
    _, _, k, block = group
    pk, mk = p * k, m * k
    Kf, dKf, dF_inv = below(s.Kf, t * p), below(d.Kf, t * p), below(d.F_inv, t * p)

    # dM' = Z dP + dZ P and dF = Z dM + dZ M + dH
    from_left(w, d.Mt, s.Z, pattern.Z, dP, d.zero, p, m, mk)
    if Z_moves:
        from_right(w, d.Mt, 1.0, d.Z, P, d.Mt, p, m, m, k)
    if p == 1:  # numbers, of which none has a transposed
        axpy(w, d.F.at, 2.0, d.H.at, d.zero.at, k)
        add_times_rows(w, d.F, 1.0, d.Mt, s.Z, 1, m, k)
        if Z_moves:
            add_times_row(w, d.F, 1.0, d.Z, s.M.at, 1, m, k)
    else:
        from_right(w, d.F_half, 0.5, d.Mt, s.Z_t, d.H, p, m, p, k)
        if Z_moves:
            transpose(w, s.K_t, s.M, p, m)
            from_right(w, d.F_half, 0.5, d.Z, s.K_t, d.F_half, p, m, p, k)
        plus_transpose(w, d.F, d.F_half, p, k)

    # dKf' = F^-1 (dM' - dF Kf') in factors, and dF^-1 = -F^-1 dF F^-1
    from_right(w, d.Q, -1.0, d.F, Kf, d.Mt, p, p, m, k)
    if p == 1:
        inverse = get(w, s.F_inv.at + t * s.F_inv.ld)
        axpy(w, dKf.at, inverse, d.Q.at, d.zero.at, mk)
        for q in range(k):
            share = inverse * get(w, d.F.at + q)
            put(w, d.trace.at + q, share)
            put(w, dF_inv.at + q, -inverse * share)
    else:
        clear(w, d.trace, 1)
        transpose(w, d.C_inv_t, s.C_inv, p, p)
        product(w, d.G, 1.0, s.C_inv, d.Q, d.zero, p, p, mk)
        product(w, dKf, 1.0, transposed(s.C_inv), d.G, d.zero, p, p, mk)
        product(w, d.F_half, 1.0, s.C_inv, d.F, d.zero, p, p, pk)
        from_right(w, d.E, 1.0, d.F_half, d.C_inv_t, d.zero, p, p, p, k)
        from_right(w, d.F_half, 1.0, d.E, s.C_inv, d.zero, p, p, p, k)
        product(w, dF_inv, -1.0, transposed(s.C_inv), d.F_half, d.zero, p, p, pk)
        for i in range(p):
            for q in range(k):
                trace = get(w, d.trace.at + q) + get(w, d.E.at + i * d.E.ld + i * k + q)
                put(w, d.trace.at + q, trace)
    if t == n - 1:
        return

    # dP_filt = dP - Kf Q' - Q Kf' with Q = dM - Kf dF / 2
    from_right(w, d.Q, -0.5, d.F, Kf, d.Mt, p, p, m, k)
    if k == 1 or p == 1:
        product(w, d.P_filt, -1.0, transposed(Kf), d.Q, dP, m, p, mk)
        if k == 1:
            product(w, d.P_filt, -1.0, transposed(d.Q), Kf, d.P_filt, m, p, m)
        else:
            add_outer_from_left(w, d.P_filt, -1.0, d.Q, Kf.at, m, m, k)
    else:
        product(w, d.half, -1.0, transposed(Kf), d.Q, d.zero, m, p, mk)
        plus_transpose(w, d.P_filt, d.half, m, k)
        add(w, d.P_filt, 1.0, dP, m)

    # d(T P_filt) = T dP_filt + dT P_filt
    top, bottom, left, right = block
    rows, dTP = bottom - top, below(d.TP, t * m) if kept else d.work
    from_left(w, d.half, s.T, pattern.T, d.P_filt, d.zero, m, m, mk)
    copy(w, dTP, d.half, top)
    if rows > 0:
        dT, out, C = columns_from(below(d.T, top), left, k), below(dTP, top), below(d.half, top)
        from_right(w, out, 1.0, dT, below(s.P_filt, left), C, rows, right - left, m, k)
    copy(w, below(dTP, bottom), below(d.half, bottom), m - bottom)

    # dP_next = T dP_filt T' + X + X' with X = dT P_filt T' + dW / 2 where few rows of T move; else
    # X + X' with X = (T dP_filt / 2 + dT P_filt) T' + dW / 2
    if 2 * rows <= m and not pattern.T.sparse:
        copy(w, d.U, d.W, m)
        if rows > 0:
            dT_P, out, here = below(d.L, top), below(d.U, top), below(d.half, top).at
            axpy(w, dT_P.at, -1.0, here, below(dTP, top).at, rows * dTP.ld)
            from_right(w, out, 1.0, dT_P, s.T_t, out, rows, m, m, k)
        plus_transpose(w, dP_next, d.U, m, k)
        add_symmetric(w, dP_next, d.half, s.T_t, m, k)
        return
    axpy(w, d.half.at, -0.5, d.half.at, dTP.at, m * dTP.ld)
    if pattern.T.sparse:  # transposed, which the sum of both does not see
        transpose_each(w, d.work, d.half, m, m, k)
        sparse_product(w, d.U, s.T, pattern.T, d.work, d.W, m, mk)
    else:
        from_right(w, d.U, 1.0, d.half, s.T_t, d.W, m, m, m, k)
    plus_transpose(w, dP_next, d.U, m, k)


@jitable
def move_gain(w, x, gain, pattern_T, group):
    """The tangents of K = Kf'T' (p, m)."""
    s, d = space(w), tangent_space(x)
    _, p, m = sizes(w)
    dKf = below(d.Kf, gain * p)
    from_right_listed(w, d.K, dKf, s.T, pattern_T, s.T_t, d.zero, p, m, m, group.k)
    if group.T.bottom > 0:
        add_moved_by_T(w, d.K, below(s.Kf, gain * p), d.T_t, p, m, group)


@jitable
def add_moved_by_T(w, out, X, dT_t, rows, m, group):  # noqa: N802
    """out (rows, m k) += X dT' for a matrix X (rows, m) and directions that move T."""
    left, cols = group.T.left, group.T.right - group.T.left
    product(w, out, 1.0, columns_from(X, left, 1), below(dT_t, left), out, rows, cols, m * group.k)


@jitable
def push_data(w, x, first, end, dots, observed, Z_moves, group):
    """dv = dy - dd - dZ a of the steps first to end - 1: what they know before da."""
    s, d = space(w), tangent_space(x)
    _, p, m = sizes(w)
    k, dv = group.k, below(d.v, first)
    for t in range(first, end):
        row, step = below(d.v, t), t if dots.d.shape[1] > 1 else 0
        clear(w, row, 1)
        for i in range(p):
            if observed.entries[t, i]:
                for q in range(group.count):
                    here = group.first + q
                    change_of_v = dots.y[here, t, i, 0] - dots.d[here, step, i, 0]
                    put(w, row.at + i * k + q, change_of_v)
    if Z_moves:
        product(w, dv, -1.0, below(s.a, first), d.Z_t, dv, end - first, m, p * k)


@jitable
def push_update(w, x, first, end, gain, slopes, group):
    """du, da_filt and the slopes of these steps, with the gains of step `gain`, from dv and da."""
    s, d = space(w), tangent_space(x)
    _, p, m = sizes(w)
    k, steps = group.k, end - first
    v, u, Kf, dKf = (
        below(s.v, first),
        below(s.u, first),
        below(s.Kf, gain * p),
        below(d.Kf, gain * p),
    )
    dv, Fu, dw, du = below(d.v, first), below(d.Fu, first), below(d.w, first), below(d.u, first)

    # du = F^-1 (dv - dF u), and dl = -(tr(F^-1 dF) + u'(2 dv - dF u)) / 2
    product(w, Fu, -1.0, u, d.F, dv, steps, p, p * k)
    if p == 1:
        inverse = get(w, s.F_inv.at + gain * s.F_inv.ld)
        for i in range(steps):
            axpy(w, du.at + i * du.ld, inverse, Fu.at + i * Fu.ld, d.zero.at, k)
    else:
        from_right(w, dw, 1.0, Fu, d.C_inv_t, d.zero, steps, p, p, k)
        from_right(w, du, 1.0, dw, s.C_inv, d.zero, steps, p, p, k)
    for t in range(first, end):
        row, at, Fu_at = s.u.at + t * s.u.ld, d.v.at + t * d.v.ld, d.Fu.at + t * d.Fu.ld
        for q in range(group.count):
            slope = get(w, d.trace.at + q)
            for i in range(p):
                slope += get(w, row + i) * (get(w, at + i * k + q) + get(w, Fu_at + i * k + q))
            slopes[group.first + q, t] = -0.5 * slope

    # da_filt = da + dKf v + Kf dv
    da = below(d.a, first)
    product(w, da, 1.0, v, dKf, da, steps, p, m * k)
    from_right(w, da, 1.0, dv, Kf, da, steps, p, m, k)


@jitable
def push_mean(w, x, t, gain, dots, observed, slopes, Z_moves, pattern, group):
    """The tangents of what step t does to the data, with the gains of step `gain`."""
    s, d = space(w), tangent_space(x)
    n, p, m = sizes(w)
    da, da_next, dv, k = below(d.a, t), below(d.a, t + 1), below(d.v, t), group.k
    push_data(w, x, t, t + 1, dots, observed, Z_moves, group)
    add_times_rows(w, dv, -1.0, da, s.Z, p, m, k)
    push_update(w, x, t, t + 1, gain, slopes, group)
    if t == n - 1:
        return
    if dots.c.shape[1] > 1:
        load_moves(w, as_column(d.c, group.k), dots.c, t, group, False)
    from_right_listed(w, da_next, da, s.T, pattern.T, s.T_t, d.c, 1, m, m, k)
    if group.T.bottom > 0:
        add_moved_by_T(w, da_next, below(s.a_filt, t), d.T_t, 1, m, group)


@jitable
def push_means(w, x, gain, end, dots, observed, slopes, Z_moves, pattern, group):
    """`push_mean` of the steps after `gain` to end - 1, which have its gains.

    After `steady_forward`, whose K and L are in s.K and s.L. What these steps share is a product
    for all of them; step by step there is only da <- L da + dT a + dK v + K (dy - dd - dZ a) + dc.
    """
    s, d = space(w), tangent_space(x)
    _, p, m = sizes(w)
    k, first, steps = group.k, gain + 1, end - gain - 1
    if by_lists(pattern.T, k):
        for t in range(first, end):
            push_mean(w, x, t, gain, dots, observed, slopes, Z_moves, pattern, group)
        return
    push_data(w, x, first, end, dots, observed, Z_moves, group)
    move_gain(w, x, gain, pattern.T, group)
    dv, da, da_next = below(d.v, first), below(d.a, first), below(d.a, first + 1)
    dc = Mat(d.c.at, 0, 1)
    if dots.c.shape[1] > 1:
        dc = da_next
        clear(w, dc, steps)
        for t in range(first, end):
            load_moves(w, as_column(below(d.a, t + 1), group.k), dots.c, t, group, False)
    product(w, da_next, 1.0, below(s.v, first), d.K, dc, steps, p, m * k)
    from_right(w, da_next, 1.0, dv, s.K, da_next, steps, p, m, k)
    if group.T.bottom > 0:
        add_moved_by_T(w, da_next, below(s.a, first), d.T_t, steps, m, group)
    for t in range(first, end):
        here, following = below(d.a, t), below(d.a, t + 1)
        from_right(w, following, 1.0, here, s.L, following, 1, m, m, k)
    from_right(w, dv, -1.0, da, s.Z_t, dv, steps, m, p, k)
    push_update(w, x, first, end, gain, slopes, group)


@jitable
def tangent_change(w, x, P, swapped, k):
    """The largest change of the tangents of P, relative to the largest of their direction.

    In units of the standard deviations. Where a variance is zero any change is a large one. Along a
    direction of P0 the tangents fade: below what they were, divided by the number of steps, all
    that is still to come of them is too small to count.
    """
    s, d = space(w), tangent_space(x)
    dP, dP_next = in_turn(d, swapped)
    n, _, m = sizes(w)
    for i in range(m):
        variance = element(w, P, i, i)
        put(w, s.row.at + i, 1.0 / variance if variance > 0.0 else 0.0)
    worst = 0.0
    for q in range(k):
        largest, moves = 0.0, 0.0
        for i in range(m):
            scale = get(w, s.row.at + i)
            for j in range(i + 1):
                y = get(w, dP_next.at + i * dP.ld + j * k + q)
                x = y - get(w, dP.at + i * dP.ld + j * k + q)
                share = scale * get(w, s.row.at + j)
                if share > 0.0:
                    moves, largest = max(moves, x * x * share), max(largest, y * y * share)
                elif x != 0.0:
                    return 1.0
        most = max(largest, get(w, d.most.at + q))
        put(w, d.most.at + q, most)
        if moves > 0.0:
            worst = max(worst, relative_move(moves, largest, most, n))
    return np.sqrt(worst)


@jitable
def relative_move(moves, largest, most, n):
    """A square of a change relative to the largest square now, or to that over n steps.

    All of that direction; `most` is the largest that there was.
    """
    scale = max(largest, most / float(n) ** 2)
    return moves / scale if scale > 0.0 else 1.0


@jitable
def push(
    w, x, groups, y, model, dots, observed, pattern, slopes, steady_from, varying, Z_moves, kept,
    tol, first,
):  # fmt: skip
    """Forwards: the gains and states, the tangents of both, and the slopes (directions, n).

    Before the step `first` no steady state is looked for. Leaves the variances of the last step in
    s.most. Returns how it ended.
    """
    s = space(w)
    n, p, m = sizes(w)
    saved, steps = Saved(True, m), Steps(np.empty(n), steady_from)
    load_start(w, y, model)
    for i in range(len(groups)):
        group, d = groups[i], tangent_space(group_of(x, i))
        load_moves(w, d.half, dots.P0, 0, group, True)
        plus_transpose(w, d.P, d.half, m, group.k)
        clear(w, d.a, 1)
        load_moves(w, as_column(d.a, group.k), dots.a0, 0, group, False)
    P, P_next, swapped = s.P, s.P_next, False
    steady, before, d_before, looked, since, t = False, -1.0, -1.0, 0, 0, 0
    moving = vectors_vary(model)
    while t < n:
        if t == 0 or moving:
            load_vectors(w, t, model)
        if t == 0 or varying or observed.same_until[t - 1] == t:
            load_step(w, t, model, observed)
            for i in range(len(groups)):
                load_directions(w, group_of(x, i), t, dots, observed, groups[i])
            since, before, d_before, looked = t, -1.0, -1.0, t
        a, v, u = below(s.a, t), below(s.v, t), below(s.u, t)
        Kf, F_inv = below(s.Kf, t * p), below(s.F_inv, t * p)
        a_filt, TP = below(s.a_filt, t), below(s.TP, t * m)
        steps.l[t] = update(w, a, P, v, u, Kf, F_inv, a_filt, pattern.Z, True)
        if np.isnan(steps.l[t]):
            return NOT_POSITIVE_DEFINITE
        steady_from[t] = -1
        if t < n - 1:
            predict(w, t, P, F_inv, P_next, TP, pattern.T)
        for i in range(len(groups)):
            here = group_of(x, i)
            push_covariance(w, here, t, P, swapped, Z_moves, kept, pattern, groups[i])
            push_mean(w, here, t, t, dots, observed, slopes, Z_moves, pattern, groups[i])
        if t == n - 1:
            clear(w, TP, m)  # what r and N, which are zero, are multiplied by
            break
        if steady:
            end = observed.same_until[t]
            steady_forward(w, y, t, end, model, saved, steps)
            product(w, a_filt, 1.0, v, Kf, a, end - t, p, m)
            for i in range(len(groups)):
                here, group = group_of(x, i), groups[i]
                push_means(w, here, t, end, dots, observed, slopes, Z_moves, pattern, group)
            t, steady, since, before, d_before, looked = end, False, end, -1.0, -1.0, end
            continue
        row_product(w, below(s.a, t + 1).at, 1.0, a_filt.at, s.T_t, s.c.at, m, m)
        if (
            tol > 0.0
            and not varying
            and t >= first
            and is_time_to_look(t - looked, t - since)
            and observed.same_until[t] - t > 2 * FIRST_LOOK
        ):
            now, d_now, waited = change(w, P, P_next), 0.0, t - looked
            steady = is_steady(now, before, waited, tol)
            for i in range(len(groups)):
                d_now = max(d_now, tangent_change(w, group_of(x, i), P_next, swapped, groups[i].k))
            steady = is_steady(d_now, d_before, waited, LATER * tol) and steady
            before, d_before, looked = now, d_now, t
        P, P_next, swapped = P_next, P, not swapped
        t += 1
    for i in range(m):
        put(w, s.most.at + i, element(w, P, i, i))
    return DONE
