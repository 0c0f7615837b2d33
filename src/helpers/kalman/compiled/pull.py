"""The tangents of the gradient, compiled: after each step of the way back, those of what it did.

In the smoother's form (:mod:`helpers.kalman.compiled.backward`), with r and N in the place of the
cotangents of a and P. N does not see the data; so over a stretch of steady state the sum of its
tangents is the solution of an equation, and only r, e and the smoothed states go step by step.
"""

import numpy as np

from helpers.kalman.compiled.backward import (
    accumulate_W,
    congruence,
    steady_backward,
    step_back,
    take_in,
)
from helpers.kalman.compiled.directions import (
    add_outer,
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
    hand_over_moves,
    plus_transpose,
    tangent_space,
    transpose_each,
)
from helpers.kalman.compiled.forward import (
    change,
)
from helpers.kalman.compiled.inputs import (
    Wanted,
    load_step,
)
from helpers.kalman.compiled.layout import sizes, space
from helpers.kalman.compiled.push import in_turn, load_directions, move_gain
from helpers.kalman.compiled.tiles import (
    add,
    axpy,
    below,
    clear,
    copy,
    get,
    jitable,
    product,
    put,
    row_product,
    sparse_product,
    transpose,
    transposed,
)

# What L'^i X L^i leaves of X where a sum of them is doubled for the last time.
FADED = 1e-9
# A steady state of N that is more times its stretch away is of no use: digits would be lost.
FARTHEST = 8


@jitable
def pull_mean(w, x, t, gain, g, equal, Z_moves, kept, pattern_T_t, group):
    """The tangents of r, e and of the smoothed state at step t, with the gains of step `gain`.

    The pass, `weigh_gain` and `move_gain` have been there. With weights that differ the last are
    those of the filtered state, and d.q what the smoothed one adds.
    """
    s, d = space(w), tangent_space(x)
    n, p, m = sizes(w)
    _, _, k, block = group
    pk, mk = p * k, m * k
    dr_next, dr, de = below(d.r, t + 1), below(d.r, t), below(d.e, t)
    r_next, e = s.r.at + (t + 1) * s.r.ld, s.e.at + t * s.e.ld
    # ds = T'dr + dT'r
    from_right_listed(w, d.s, dr_next, s.T_t, pattern_T_t, s.T, d.zero, 1, m, m, k)
    if block.bottom > 0:
        top, rows = block.top, block.bottom - block.top
        row_product(w, d.s.at, 1.0, r_next + top, below(d.T, top), d.s.at, rows, mk)
    # e = g u - K r, and r before the step T'r + Z'e
    axpy(w, de.at, g, d.u.at + t * d.u.ld, d.zero.at, pk)
    add_times_rows(w, de, -1.0, dr_next, s.K, p, m, k)
    add_times_row(w, de, -1.0, d.K, r_next, p, m, k)
    from_right(w, dr, 1.0, de, s.Z, d.s, 1, p, m, k)
    if Z_moves:
        row_product(w, dr.at, 1.0, e, d.Z, dr.at, p, mk)
    if kept:
        da_filt, dahat = below(d.a, t), below(d.ahat, t)
        if t == n - 1:  # r is zero, and there is no TP
            clear(w, d.q, 1)
        else:
            from_right(w, d.q, 1.0, dr_next, below(s.TP, gain * m), d.zero, 1, m, m, k)
            row_product(w, d.q.at, 1.0, r_next, below(d.TP, gain * m), d.q.at, m, mk)
        axpy(w, dahat.at, 1.0 if equal else 0.0, d.q.at, da_filt.at, mk)


@jitable
def pull_means(w, x, end, gain, Z_moves, kept, pattern_T_t, group):
    """`pull_mean` of the steps from `gain` to end - 1, a stretch of steady state.

    After `steady_backward`, whose L is in s.X4. Step by step there is only
    dr <- L'dr + dT'r + Z'(du - dK r) + dZ'e.
    """
    s, d = space(w), tangent_space(x)
    _, p, m = sizes(w)
    _, _, k, block = group
    mk, steps = m * k, end - gain
    if by_lists(pattern_T_t, k):
        for t in range(end - 1, gain - 1, -1):
            pull_mean(w, x, t, gain, 1.0, True, Z_moves, kept, pattern_T_t, group)
        return
    r_next, dr, dr_next = below(s.r, gain + 1), below(d.r, gain), below(d.r, gain + 1)
    de = below(d.e, gain)
    transpose_each(w, d.K_t, d.K, p, m, k)
    product(w, de, -1.0, r_next, d.K_t, below(d.u, gain), steps, m, p * k)
    from_right(w, dr, 1.0, de, s.Z, d.zero, steps, p, m, k)
    if Z_moves:
        product(w, dr, 1.0, below(s.e, gain), d.Z, dr, steps, p, mk)
    if block.bottom > 0:
        top, rows = block.top, block.bottom - block.top
        product(w, dr, 1.0, columns_from(r_next, top, 1), below(d.T, top), dr, steps, rows, mk)
    for t in range(end - 1, gain - 1, -1):
        here = below(d.r, t)
        from_right(w, here, 1.0, below(d.r, t + 1), s.X4, here, 1, m, m, k)
    from_right(w, de, -1.0, dr_next, s.K_t, de, steps, m, p, k)
    if kept:
        TP, dTP, dahat = below(s.TP, gain * m), below(d.TP, gain * m), below(d.ahat, gain)
        from_right(w, dahat, 1.0, dr_next, TP, below(d.a, gain), steps, m, m, k)
        product(w, dahat, 1.0, r_next, dTP, dahat, steps, m, mk)


@jitable
def weigh_gain(w, gain, S):
    """K = Kf'T' (p, m) of step `gain`, its transposed, and K S in s.G: shared by all directions."""
    s = space(w)
    _, p, m = sizes(w)
    product(w, s.K, 1.0, below(s.Kf, gain * p), s.T_t, s.zero, p, m, m)
    transpose(w, s.K_t, s.K, p, m)
    product(w, s.G, 1.0, s.K, S, s.zero, p, m, m)


@jitable
def pull_sums(w, x, t, gain, steps, S, dS, g, equal, T_wanted, want_Z, k):
    """What steps with the gains of step `gain` add to the sums, S being the sum of their N.

    Of a single step, t is that one. After `weigh_gain`; leaves the tangents of K S in d.KN, and in
    d.D those of D, or of the sum of the D.
    """
    s, d = space(w), tangent_space(x)
    n, p, m = sizes(w)
    mk, pk = m * k, p * k
    dKf, dF_inv = below(d.Kf, gain * p), below(d.F_inv, gain * p)
    product(w, d.Y, 1.0, s.K, dS, d.zero, p, m, mk)
    from_right(w, d.KN, 1.0, d.K, S, d.Y, p, m, m, k)
    # D = g F^-1 + K S K'
    axpy(w, d.Y.at, -0.5, d.Y.at, d.KN.at, p * d.Y.ld)
    if p == 1 and equal:
        clear(w, d.D, 1)
        add_times_rows(w, d.D, 2.0, d.Y, s.K, 1, m, k)
    else:
        from_right(w, d.F_half, 1.0, d.Y, s.K_t, d.zero, p, m, p, k)
        if not equal:  # - u e' - e u' + g u u'
            u, e, du, de = below(s.u, t), below(s.e, t), below(d.u, t), below(d.e, t)
            for i in range(p):
                x_i = g * get(w, u.at + i) - get(w, e.at + i)
                row = d.F_half.at + i * d.F_half.ld
                axpy(w, row, x_i, du.at, row, pk)
            add_outer_from_left(w, d.F_half, -1.0, de, u.at, p, p, k)
        plus_transpose(w, d.D, d.F_half, p, k)
    add(w, d.D, g * steps, dF_inv, p)
    add(w, d.D_sum, 1.0, d.D, p)
    add(w, d.N_sum, 1.0, dS, m)
    if gain < n - 1:
        TP, dTP = below(s.TP, gain * m), below(d.TP, gain * m)
        if T_wanted.bottom > 0:
            top, bottom, left, right = T_wanted
            out, rows, cols = columns_from(below(d.T_bar, top), left, k), bottom - top, right - left
            TP_here, dTP_here = columns_from(TP, left, 1), columns_from(dTP, left, k)
            from_right(w, out, -1.0, below(dS, top), TP_here, out, rows, m, cols, k)
            product(w, out, -1.0, below(S, top), dTP_here, out, rows, m, cols * k)
        if want_Z:
            from_right(w, d.Z_bar, 1.0, d.KN, TP, d.Z_bar, p, m, m, k)
            product(w, d.Z_bar, 1.0, s.G, dTP, d.Z_bar, p, m, mk)
    if want_Z:
        add(w, d.Z_bar, -g * steps, dKf, p)
        if not equal and t < n - 1:  # u times what the smoothed state adds
            r_next = s.r.at + (t + 1) * s.r.ld
            row_product(w, d.P_s.at, 1.0, r_next, below(s.TP, t * m), s.zero.at, m, m)
            add_outer(w, d.Z_bar, 1.0, s.u.at + t * s.u.ld, d.q, p, m, k)
            add_outer_from_left(w, d.Z_bar, 1.0, below(d.u, t), d.P_s.at, p, m, k)


@jitable
def pull_covariance(w, x, t, swapped, equal, Z_moves, pattern_T_t, group):
    """The tangents of N before step t, after its `step_back` and `pull_sums`.

    N_before = T'N T + Z'Y + Y'Z, with Y = D Z / 2 + M and M = -K N T, as `step_back` has it.
    """
    s, d = space(w), tangent_space(x)
    dN, dN_before = in_turn(d, swapped)
    _, p, m = sizes(w)
    _, _, k, block = group
    top, bottom, left, right = block
    mk = m * k
    KN, Y = s.G, s.Y
    # dM = -(d(K N) T + K N dT)
    from_right(w, d.M, -1.0, d.KN, s.T, d.zero, p, m, m, k)
    if bottom > 0:
        KN_here, dT = columns_from(KN, top, 1), below(d.T, top)
        product(w, d.M, -1.0, KN_here, dT, d.M, p, bottom - top, mk)
    if not equal:  # - u s'
        add_outer(w, d.M, -1.0, s.u.at + t * s.u.ld, d.s, p, m, k)
        add_outer_from_left(w, d.M, -1.0, below(d.u, t), s.row.at, p, m, k)
    from_right(w, d.Y, 0.5, d.D, s.Z, d.M, p, p, m, k)
    if Z_moves:
        product(w, d.Y, 0.5, s.D, d.Z, d.Y, p, p, mk)
    # dN_before = T'dN T + X + X' with X = dT'N T + Z'dY + dZ'Y; where T is nearly empty, half of
    # T'dN T is in X
    sparse = pattern_T_t.sparse
    if sparse:
        sparse_product(w, d.half, s.T_t, pattern_T_t, dN, d.zero, m, mk)
        add(w, d.half, -0.5, d.half, m)
        transpose_each(w, d.work, d.half, m, m, k)
        sparse_product(w, d.U, s.T_t, pattern_T_t, d.work, d.zero, m, mk)
    else:
        product(w, d.half, 1.0, s.T_t, dN, d.zero, m, m, mk)
        clear(w, d.U, m)
    if bottom > 0:
        dT_t, out = columns_from(below(d.T_t, left), top, k), below(d.U, left)
        from_right(w, out, 1.0, dT_t, below(s.B, top), out, right - left, bottom - top, m, k)
    product(w, d.U, 1.0, transposed(s.Z), d.Y, d.U, m, p, mk)
    if Z_moves:
        from_right(w, d.U, 1.0, d.Z_t, Y, d.U, m, p, m, k)
    plus_transpose(w, dN_before, d.U, m, k)
    if not sparse:
        add_symmetric(w, dN_before, d.half, s.T, m, k)


@jitable
def fixed_point(w, gain, out, steps):
    """The N that a steady state would have if it lasted: X + L'N L = N with X = Z'F^-1 Z, in `out`.

    Returns how often L is squared until nothing is left of it, in units of the standard deviations
    in s.most; 0 if that takes many times as many steps as there are: N is far from there then, and
    nothing is gained by it.
    """
    s = space(w)
    _, p, m = sizes(w)
    A, A_next, total, other, units = s.L, s.X1, s.X3, s.X4, s.N_end
    product(w, s.K, 1.0, below(s.Kf, gain * p), s.T_t, s.zero, p, m, m)
    transpose(w, s.K_t, s.K, p, m)
    product(w, A, -1.0, s.K_t, s.Z, s.T, m, p, m)
    product(w, s.M, 1.0, below(s.F_inv, gain * p), s.Z, s.zero, p, p, m)
    product(w, total, 1.0, transposed(s.Z), s.M, s.zero, m, p, m)
    clear(w, units, m)
    for i in range(m):
        variance = get(w, s.most.at + i)
        put(w, units.at + i * units.ld + i, 1.0 / variance if variance > 0.0 else 1.0)
    many, size = 1, 1
    while size <= FARTHEST * steps:
        congruence(w, other, total, A, total, s.B, m)
        congruence(w, s.N_k, units, A, units, s.B, m)
        total, other = other, total
        if change(w, units, s.N_k) <= FADED:
            copy(w, out, total, m)
            return many + 1
        product(w, A_next, 1.0, A, A, s.zero, m, m, m)
        A, A_next = A_next, A
        many, size = many + 1, 2 * size
    return 0


@jitable
def sum_of_congruences(w, x, Y, doublings, k):
    """Y becomes the sum of L'^i Y L^i over all i, L being in s.X4: what solves Y = L'Y L + Y0."""
    s, d = space(w), tangent_space(x)
    m = sizes(w).m
    A, A_next = s.X1, s.X3
    copy(w, A, s.X4, m)
    for _ in range(doublings):
        product(w, d.half, 1.0, transposed(A), Y, d.zero, m, m, m * k)
        from_right(w, Y, 1.0, d.half, A, Y, m, m, m, k)
        product(w, A_next, 1.0, A, A, s.zero, m, m, m)
        A, A_next = A_next, A


@jitable
def add_power(w, x, steps, E, dE, dN, k):
    """Adds to dN the tangents of A'E A for A = L^steps, L in s.X4 and its tangents in d.L."""
    s, d = space(w), tangent_space(x)
    m = sizes(w).m
    mk = m * k
    A, A_next, L, L_next, dA = s.X1, s.X3, s.L, s.B, d.P_filt
    copy(w, L, s.X4, m)
    empty = True
    while True:
        if steps & 1:
            if empty:
                copy(w, A, L, m)
                copy(w, dA, d.L, m)
                empty = False
            else:  # A L, and dA L + A dL
                from_right(w, d.half, 1.0, dA, L, d.zero, m, m, m, k)
                product(w, dA, 1.0, A, d.L, d.half, m, m, mk)
                product(w, A_next, 1.0, A, L, s.zero, m, m, m)
                A, A_next = A_next, A
        steps >>= 1
        if steps == 0:
            break
        from_right(w, d.half, 1.0, d.L, L, d.zero, m, m, m, k)
        product(w, d.U, 1.0, L, d.L, d.half, m, m, mk)
        copy(w, d.L, d.U, m)
        product(w, L_next, 1.0, L, L, s.zero, m, m, m)
        L, L_next = L_next, L
    # A'dE A, and A'E dA with its transposed
    product(w, d.half, 1.0, transposed(A), dE, d.zero, m, m, mk)
    from_right(w, dN, 1.0, d.half, A, dN, m, m, m, k)
    product(w, A_next, 1.0, E, A, s.zero, m, m, m)
    product(w, d.half, 1.0, transposed(A_next), dA, d.zero, m, m, mk)
    plus_transpose(w, d.U, d.half, m, k)
    add(w, dN, 1.0, d.U, m)


@jitable
def steady_tangents(w, x, gain, steps, fixed, N_after, swapped, Z_moves, doublings, k):
    """The tangents of N before a stretch of steady state, and in d.S those of the sum S of its N.

    After `steady_backward`, `move_gain` and `fixed_point`, which found N*. From N after the stretch
    it is N* + A'(N_after - N*) A with A = L^steps, and S - L'S L = steps X + N_after - N.
    """
    s, d = space(w), tangent_space(x)
    dN_after, dN = in_turn(d, swapped)
    _, p, m = sizes(w)
    mk = m * k
    L = s.X4
    # dL = dT - dK'Z - K'dZ
    transpose_each(w, d.K_t, d.K, p, m, k)
    from_right(w, d.L, -1.0, d.K_t, s.Z, d.T, m, p, m, k)
    # half of dX: Z'dF^-1 Z / 2 + Z'F^-1 dZ
    from_right(w, d.Y, 0.5, below(d.F_inv, gain * p), s.Z, d.zero, p, p, m, k)
    if Z_moves:
        product(w, d.L, -1.0, s.K_t, d.Z, d.L, m, p, mk)
        product(w, d.Y, 1.0, below(s.F_inv, gain * p), d.Z, d.Y, p, p, mk)
    product(w, d.work, 1.0, transposed(s.Z), d.Y, d.zero, m, p, mk)
    # and half of dL'S L + L'S dL, for later
    product(w, s.B, 1.0, s.S, L, s.zero, m, m, m)
    product(w, d.S, 1.0, transposed(s.B), d.L, d.zero, m, m, mk)
    add(w, d.S, float(steps), d.work, m)

    # N*
    product(w, s.B, 1.0, fixed, L, s.zero, m, m, m)
    product(w, d.U, 1.0, transposed(s.B), d.L, d.work, m, m, mk)
    plus_transpose(w, dN, d.U, m, k)
    sum_of_congruences(w, x, dN, doublings, k)
    # N_after - N*
    copy(w, s.X2, N_after, m)
    add(w, s.X2, -1.0, fixed, m)
    copy(w, d.work, dN_after, m)
    add(w, d.work, -1.0, dN, m)
    add_power(w, x, steps, s.X2, d.work, dN, k)

    plus_transpose(w, d.U, d.S, m, k)
    copy(w, d.S, d.U, m)
    add(w, d.S, 1.0, dN_after, m)
    add(w, d.S, -1.0, dN, m)
    sum_of_congruences(w, x, d.S, doublings, k)


@jitable
def spread(w, x, gain, end, kept):
    """The gains of one step, and their tangents, to those that follow it up to end - 1."""
    s, d = space(w), tangent_space(x)
    _, p, m = sizes(w)
    for t in range(gain + 1, end):
        copy(w, below(s.Kf, t * p), below(s.Kf, gain * p), p)
        copy(w, below(s.F_inv, t * p), below(s.F_inv, gain * p), p)
        copy(w, below(s.TP, t * m), below(s.TP, gain * m), m)
        copy(w, below(d.Kf, t * p), below(d.Kf, gain * p), p)
        copy(w, below(d.F_inv, t * p), below(d.F_inv, gain * p), p)
        if kept:
            copy(w, below(d.TP, t * m), below(d.TP, gain * m), m)


@jitable
def pull(
    w, x, groups, model, dots, observed, pattern, l_bar, steady_from, varying, equal_from, Z_moves,
    T_wanted, want_Z, out, bars,
):  # fmt: skip
    """Backwards: adds the gradient of W to `out`, and the tangents of all gradients to `bars`.

    Those of T's are complete in the `Block` T_wanted alone. Weights are equal from a step on, as in
    :func:`helpers.kalman.compiled.backward.backward`.
    """
    s = space(w)
    n, p, m = sizes(w)
    want_T, start = T_wanted.bottom > 0, np.int64(0)
    equal, weight, stop = True, l_bar[n - 1], n
    kept = want_T or want_Z
    wanted = Wanted(True, False, True, True, np.arange(m))
    N, N_before, swapped = s.N, s.P_next, False
    clear(w, below(s.r, n), 1)
    for A in (N, s.N_sum, s.T_bar):
        clear(w, A, m)
    for A in (s.Z_bar, s.D_sum):
        clear(w, A, p)
    for i in range(len(groups)):
        d = tangent_space(group_of(x, i))
        clear(w, below(d.r, n), 1)
        for A in (d.P, d.N_sum, d.T_bar):
            clear(w, A, m)
        for A in (d.Z_bar, d.D_sum):
            clear(w, A, p)
    t = n - 1
    while t >= 0:
        if t < n - 1 and (varying or observed.same_until[t] == t + 1):
            load_step(w, t, model, observed)
            for i in range(len(groups)):
                load_directions(w, group_of(x, i), t, dots, observed, groups[i])
        gain, g = steady_from[t], 1.0 if equal else l_bar[t]
        doublings, steps = 0, t + 1 - gain
        if gain >= 0:
            doublings = fixed_point(w, gain, s.P, steps)
        if doublings > 0:
            copy(w, N_before, N, m)
            steady_backward(w, gain, t + 1, N, wanted)
            weigh_gain(w, gain, s.S)
            for i in range(len(groups)):
                here, group, k = group_of(x, i), groups[i], groups[i].k
                move_gain(w, here, gain, pattern.T, group)
                pull_means(w, here, t + 1, gain, Z_moves, kept, pattern.T_t, group)
                steady_tangents(w, here, gain, steps, s.P, N_before, swapped, Z_moves, doublings, k)
                dS = tangent_space(here).S
                pull_sums(
                    w, here, t, gain, float(steps), s.S, dS, g, equal, T_wanted, want_Z, k
                )  # fmt: skip
            t, swapped = gain - 1, not swapped
            continue
        if equal and t < equal_from:
            if not varying:
                accumulate_all(w, x, equal_from, n, True, weight, want_T, want_Z, out, bars, groups)
            for i in range(len(groups)):
                take_in_moves(w, group_of(x, i), swapped, equal_from, weight, groups[i])
            take_in(w, N, equal_from, weight)
            equal, weight, stop, g = False, 1.0, equal_from, l_bar[t]
        if gain >= 0:
            for i in range(len(groups)):
                spread(w, group_of(x, i), gain, t + 1, kept)
        add(w, s.N_sum, 1.0, N, m)
        step_back(w, t, N, N_before, pattern.T_t, wanted, g, equal)
        transpose(w, s.B, s.TN, m, m)  # N T
        weigh_gain(w, t, N)
        for i in range(len(groups)):
            here, group = group_of(x, i), groups[i]
            dN, _ = in_turn(tangent_space(here), swapped)
            move_gain(w, here, t, pattern.T, group)
            pull_mean(w, here, t, t, g, equal, Z_moves, kept, pattern.T_t, group)
            pull_sums(w, here, t, t, 1.0, N, dN, g, equal, T_wanted, want_Z, group.k)
            pull_covariance(w, here, t, swapped, equal, Z_moves, pattern.T_t, group)
        if varying:
            accumulate_all(w, x, t, t + 1, equal, weight, want_T, want_Z, out, bars, groups)
        N, N_before, swapped = N_before, N, not swapped
        t -= 1
    if not varying:
        accumulate_all(w, x, start, stop, equal, weight, want_T, want_Z, out, bars, groups)
    for i in range(len(groups)):
        here, group = group_of(x, i), groups[i]
        accumulate_vectors(w, here, equal_from, l_bar[n - 1], bars, group)
        accumulate_start(w, here, swapped, equal, weight, bars, group)


@jitable
def accumulate_all(w, x, begin, stop, equal, weight, want_T, want_Z, out, bars, groups):
    """The gradient of W and the moves of all groups, as `accumulate_moves`."""
    s = space(w)
    accumulate_W(w, begin, stop, s.N_sum, equal, weight, out)
    clear(w, s.N_sum, sizes(w).m)
    for i in range(len(groups)):
        here, group = group_of(x, i), groups[i]
        accumulate_moves(w, here, begin, stop, equal, weight, want_T, want_Z, bars, group)


@jitable
def move_adjoint(w, x, dN, t, equal, k):
    """That of P before step t, (r r' - N) / 2, in d.half."""
    s, d = space(w), tangent_space(x)
    m = sizes(w).m
    clear(w, d.U, m)
    if equal:
        add_outer(w, d.U, 0.5, below(s.r, t).at, below(d.r, t), m, m, k)
    add(w, d.U, -0.25, dN, m)
    plus_transpose(w, d.half, d.U, m, k)


@jitable
def take_in_moves(w, x, swapped, first, weight, group):
    """The tangents of what `take_in` makes, before it."""
    d = tangent_space(x)
    m, dr = sizes(w).m, below(d.r, first)
    dN, _ = in_turn(d, swapped)
    move_adjoint(w, x, dN, first, True, group.k)
    clear(w, dN, m)
    add(w, dN, -2.0 * weight, d.half, m)
    axpy(w, dr.at, weight, dr.at, d.zero.at, m * group.k)


@jitable
def accumulate_start(w, x, swapped, equal, weight, bars, group):
    """Those of a0 and P0."""
    d, start = tangent_space(x), np.int64(0)
    dN, _ = in_turn(d, swapped)
    hand_over_moves(w, as_column(d.r, group.k), weight, bars.a0, start, group)
    move_adjoint(w, x, dN, start, equal, group.k)
    hand_over_moves(w, d.half, weight, bars.P0, start, group)


@jitable
def accumulate_vectors(w, x, equal_from, weight, bars, group):
    """Those of c, d and y; the weight of the steps from `equal_from` on is not in r and e yet."""
    d = tangent_space(x)
    hand_over_rows(w, below(d.r, 1), 1.0, equal_from, weight, bars.c, d.s, group)
    hand_over_rows(w, d.e, 1.0, equal_from, weight, bars.d, d.w, group)
    hand_over_rows(w, d.e, -1.0, equal_from, weight, bars.y, d.w, group)


@jitable
def hand_over_rows(w, A, sign, equal_from, weight, bar, total, group):
    """Each row of A to its step of a vector's gradient; their sum, a row like `total`, to one."""
    n, start = sizes(w).n, np.int64(0)
    clear(w, total, 1)
    for t in range(n):
        g = sign * (weight if t >= equal_from else 1.0)
        if bar.shape[1] == n:
            hand_over_moves(w, as_column(below(A, t), group.k), g, bar, t, group)
        else:
            add(w, total, g, below(A, t), 1)
    if bar.shape[1] < n:
        hand_over_moves(w, as_column(total, group.k), 1.0, bar, start, group)


@jitable
def accumulate_moves(w, x, begin, stop, equal, weight, want_T, want_Z, bars, group):
    """Those of T, Z, H and W from the steps begin to stop - 1; leaves zeros in the sums."""
    s, d = space(w), tangent_space(x)
    _, p, m = sizes(w)
    k = group.k
    steps, mk, pk, half = stop - begin, m * k, p * k, 0.5 if equal else 0.0
    e, r, ahat = below(s.e, begin), below(s.r, begin + 1), below(s.ahat, begin)
    de, dr, dahat = below(d.e, begin), below(d.r, begin + 1), below(d.ahat, begin)
    # H_bar = (sum e e' - D) / 2 and W_bar = (sum r r' - N) / 2
    product(w, d.F_half, half, transposed(e), de, d.zero, p, steps, pk)
    add(w, d.F_half, -0.25, d.D_sum, p)
    plus_transpose(w, d.F, d.F_half, p, k)
    hand_over_moves(w, d.F, weight, bars.H, begin, group)
    product(w, d.U, half, transposed(r), dr, d.zero, m, steps, mk)
    add(w, d.U, -0.25, d.N_sum, m)
    plus_transpose(w, d.half, d.U, m, k)
    hand_over_moves(w, d.half, weight, bars.W, begin, group)
    clear(w, d.D_sum, p)
    clear(w, d.N_sum, m)
    if want_T:  # and sum r ahat'
        product(w, d.T_bar, 1.0, transposed(r), dahat, d.T_bar, m, steps, mk)
        product(w, d.U, 1.0, transposed(ahat), dr, d.zero, m, steps, mk)
        transpose_each(w, d.half, d.U, m, m, k)
        add(w, d.T_bar, 1.0, d.half, m)
        hand_over_moves(w, d.T_bar, weight, bars.T, begin, group)
        clear(w, d.T_bar, m)
    if want_Z:  # and sum e ahat'
        product(w, d.Z_bar, 1.0, transposed(e), dahat, d.Z_bar, p, steps, mk)
        product(w, d.K_t, 1.0, transposed(ahat), de, d.zero, m, steps, pk)
        transpose_each(w, d.Y, d.K_t, m, p, k)
        add(w, d.Z_bar, 1.0, d.Y, p)
        hand_over_moves(w, d.Z_bar, weight, bars.Z, begin, group)
        clear(w, d.Z_bar, p)
