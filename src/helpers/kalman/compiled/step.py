"""What a step of the compiled pass does, written from the readable text: see `writing`.

Here is what of it is kept where. A function that ends in `_one` is for p = 1, where F, v and u are
numbers.
"""

import numpy as np

from helpers.kalman import recursions
from helpers.kalman.compiled import tiles, writing
from helpers.kalman.compiled.layout import sizes, space
from helpers.kalman.compiled.tiles import (
    LANES,
    Mat,
    axpy,
    below,
    clear,
    element,
    get,
    jitable,
    product,
    put,
)

# An update that leaves less than this share of a variance takes Joseph's form: three digits of a
# difference are lost there, and more with every smaller share.
JOSEPH_BELOW = 1e-3
# P and N are made symmetric in every step, from their lower half, where it takes less time than the
# whole; small ones every so many steps, between which they stay symmetric to a few roundings.
SYMMETRIC_EVERY = 4

MOST_INFLATED = recursions.most_inflated(float)

# Where a step has room for what it computes on the way.
SCRATCH = {
    ("m", "m"): ("s.X1", "s.X2", "s.X3"),
    ("p", "m"): ("s.KN", "s.K", "s.M2"),
    ("m", "p"): ("s.K_t",),
    ("p", "p"): ("s.F", "s.F2"),
    (1, "m"): ("s.KN", "s.K", "s.M2", "s.row2"),
    (1, "q"): ("s.row3",),
    (1, "p"): ("s.w", "s.gu", "s.v2"),
}
BEGIN = ["s = space(w)", "_, p, m = sizes(w)"]


@jitable
def fill_gaps(w, v, p):
    """Zeros in v where nothing is observed, and in d; ones in o where something is, counted."""
    s, count = space(w), 0.0
    for i in range(p):
        y = get(w, v.at + i)
        there = 0.0 if np.isnan(y) else 1.0
        put(w, v.at + i, y if there > 0.0 else 0.0)
        put(w, s.d_seen.at + i, get(w, s.d.at + i) if there > 0.0 else 0.0)
        put(w, s.o.at + i, there)
        count += there
    return count


@jitable
def invert_factor(w, F, C_inv, o, p):
    """C_inv = C^-1, lower triangular, C C' = F; and log|F|, NaN if F is not positive definite.

    Or if it is singular up to rounding, as in :func:`helpers.kalman.recursions.inverse_factor`.
    Where o (a row that begins at a place) is zero, F has a one, and C_inv becomes zero. F becomes
    C' on and above its diagonal: what makes it that makes the identity matrix C_inv.
    """
    logdet, zero = 0.0, space(w).zero.at
    clear(w, C_inv, p)
    for first in range(0, p, 4):
        last, start = min(first + 4, p), first // LANES * LANES
        by, rows = Mat(F.at + first, 1, F.ld), last - first
        right, out = Mat(F.at + first * F.ld + start, F.ld, 1), below(C_inv, first)
        if first > 0:
            product(w, right, -1.0, by, Mat(F.at + start, F.ld, 1), right, rows, first, p - start)
            product(w, out, -1.0, by, C_inv, out, rows, first, first)
        for i in range(first, last):
            row, out_row = F.at + i * F.ld + start, below(C_inv, i).at
            put(w, out_row + i, 1.0)
            for k in range(first, i):
                x = -element(w, F, k, i)
                axpy(w, row, x, F.at + k * F.ld + start, row, p - start)
                axpy(w, out_row, x, below(C_inv, k).at, out_row, i)
            x = element(w, F, i, i)
            if not x > 0.0:
                return np.nan
            logdet += np.log(x)
            x = 1.0 / np.sqrt(x)
            axpy(w, row, x, row, zero, p - start)
            axpy(w, out_row, x * get(w, o + i), out_row, zero, i + 1)
    for j in range(p):
        variance, inverse = 0.0, 0.0
        for i in range(j + 1):
            variance += element(w, F, i, j) ** 2
        for i in range(j, p):
            inverse += element(w, C_inv, i, j) ** 2
        if not inverse * variance < MOST_INFLATED:
            return np.nan
    return logdet


@jitable
def shrinks(w, before, after, share, m):
    """Whether some variance of the covariance `after` is below `share` of that in `before`."""
    for i in range(m):
        if element(w, after, i, i) < share * element(w, before, i, i):
            return True
    return False


@jitable
def keeps_variances(w, F_inv):
    """Whether p = 1, and every variance sure to keep some of what it was through the update.

    It keeps at least the share H / F of it (Cauchy, Schwarz).
    """
    return sizes(w).p == 1 and get(w, space(w).H.at) * get(w, F_inv.at) >= JOSEPH_BELOW


@jitable
def made_symmetric(t, m):
    """Whether step t computes a covariance's lower half, from which it becomes symmetric.

    With more than one and a half vectors of rows it takes less time than the whole.
    """
    return 2 * m > 3 * LANES or t % SYMMETRIC_EVERY == 0


def _given(e):
    """What all steps read: T, Z and H as they are loaded."""
    return (
        e.matrix("s.T", "m", "m", twin="s.T_t", lists="T_lists", lists_t="T_lists"),
        e.matrix("s.Z", "p", "m", twin="s.Z_t", lists="Z_lists"),
        e.matrix("s.H", "p", "p", symmetric=True),
    )


def write_update(name, p):
    """The update with the observations that stand in v; see `update`."""
    e = writing.Writer(p, "True", SCRATCH)
    _, Z, H = _given(e)
    P, a, y = e.matrix("P", "m", "m", symmetric=True), e.vector("a", "m"), e.vector("v", "p")
    d, o = e.vector("s.d_seen", "p"), writing.Seen()
    _, logdet, C_inv, G, Kf, X = recursions.gains(o, P, Z, H, None)
    _, w, u, a_filt, l = recursions.update(y, o, a, d, Z, logdet, C_inv, G)
    e.keep("s.M", Z @ P)
    e.keep("Kf", Kf)
    e.keep("F_inv", C_inv.T @ C_inv)
    e.keep("u", u)
    e.keep("a_filt", a_filt)
    e.line(f"put(w, s.const.at, {recursions.LOG_2PI * o.sum() + logdet})")
    e.keep("v", y - (Z @ a + d))
    with e.only("needed or not keeps_variances(w, F_inv)"):
        e.keep("s.P_filt", X)
    X = e.matrix("s.P_filt", "m", "m", symmetric=True)
    with e.only("not keeps_variances(w, F_inv) and shrinks(w, P, s.P_filt, JOSEPH_BELOW, m)"):
        e.keep("s.P_filt", recursions.joseph(X, Z, H, Kf))
    return e.source(
        name,
        "w, a, P, v, u, Kf, F_inv, a_filt, Z_lists, needed",
        [*BEGIN, "count = fill_gaps(w, v, p)"],
        [f"return {l}"],
    )


def write_predict(name, changed):
    """TP = T P_filt and P_next from it; with `changed` from P, of which P_filt is not written."""
    e = writing.Writer(1 if changed else "p", "lower", SCRATCH)
    T, _, _ = _given(e)
    P_filt, W = e.matrix("s.P_filt", "m", "m", symmetric=True), e.matrix("s.W", "m", "m")
    begin = [*BEGIN, "lower = made_symmetric(t, m)"]
    if changed:
        begin.append("inverse = get(w, F_inv.at)")
        P, M = e.matrix("P", "m", "m", symmetric=True), e.matrix("s.M", "p", "m")
        P_filt = recursions.filtered(P, writing.Matrix(e, "C_inv", 1, 1) @ M)
    a_filt, c = e.vector("a_filt", "m"), e.vector("s.c", "m")
    _, P_next = recursions.predict(a_filt, P_filt, c, T, W)
    e.keep("TP", T @ P_filt)
    e.keep("P_next", P_next)
    return e.source(name, "w, t, P, F_inv, P_next, TP, T_lists", begin)


def write_step_back(name, p):
    """One step of the smoother; see `step_back`."""
    e = writing.Writer(p, "lower", SCRATCH)
    T, Z, _ = _given(e)
    K = e.matrix("Kf", "p", "m")
    F_inv, C_inv = e.matrix("F_inv", "p", "p"), e.matrix("C_inv", "p", "p")
    e.known[(C_inv.T @ C_inv).key()] = F_inv
    N, TP = e.matrix("N", "m", "m", symmetric=True), e.matrix("TP", "m", "q")
    g = writing.Number("g")  # the weight
    r, u, a_filt = e.vector("r_next", "m"), e.vector("u", "p"), e.vector("a_filt", "q")
    e_t, a_smooth, r_before = recursions.smooth_mean(r, T, Z, g * u, K.T, a_filt, TP)
    e.keep("s.row", r @ T)
    e.keep("e", e_t)
    e.keep("r", r_before)
    e.line("if not wanted.matrices:")
    e.line("    return")
    with e.only("filtered"):
        e.keep("ahat", a_smooth)
    TN, of_T, of_Z, KS, D = recursions.smooth_predicted(g, N, T, C_inv, K.T, TP)
    e.keep("s.TN", TN)
    KS, D = KS.force(), D.force()
    with e.only("wanted.T"):
        e.add("s.T_bar", -of_T)
    with e.only("wanted.Z"):
        e.add("s.Z_bar", of_Z)
    with e.only("not equal"):
        of_D, of_KS = recursions.smooth_weighted(g, u, r @ T, e_t)
        with e.only("wanted.Z"):
            e.add("s.Z_bar", recursions.outer(u, r @ TP))
        with e.only("filtered"):
            e.keep("ahat", a_filt)
        e.add(D.at, of_D)
        e.add(KS.at, of_KS)
    e.keep("s.D", D)
    Y, before = recursions.smooth_observed(TN, KS, D, T, Z)
    e.keep("s.Y", Y)
    e.keep("N_before", before)
    e.line("add(w, s.D_sum, 1.0, s.D, p)")
    return e.source(
        name,
        "w, t, r, r_next, e, u, Kf, F_inv, a_filt, TP, ahat, N, N_before, T_lists, wanted, g, "
        "equal",
        [
            *BEGIN,
            "q, lower = len(wanted.columns), made_symmetric(t, m)",
            "filtered = wanted.T or wanted.Z",
        ],
    )


def write_all():
    """The sources of all functions, by their names."""
    return {
        "update": write_update("update", "p"),
        "update_one": write_update("update_one", 1),
        "predict": write_predict("predict", False),
        "predict_changed": write_predict("predict_changed", True),
        "step_back": write_step_back("step_back", "p"),
        "step_back_one": write_step_back("step_back_one", 1),
    }


SOURCES = write_all()
_update, _update_one, _predict, _predict_changed, _step_back, _step_back_one = (
    jitable(writing.function(source, name, vars(tiles) | globals()))
    for name, source in SOURCES.items()
)


@jitable
def update(w, a, P, v, u, Kf, F_inv, a_filt, Z_lists, needed):
    """The update with the observations that stand in v, NaN where there is none.

    Writes v, u, the transposed gain, F^-1, a_filt, P_filt, in Joseph's form where it leaves little
    of a variance, and the part of l that does not see the data, which the steps of a steady state
    share. Returns l; NaN if F is not positive definite. If it is not `needed`, P_filt is written
    only where a `predict` by lists cannot do without it.
    """
    if sizes(w).p == 1:
        return _update_one(w, a, P, v, u, Kf, F_inv, a_filt, Z_lists, needed)
    return _update(w, a, P, v, u, Kf, F_inv, a_filt, Z_lists, needed)


@jitable
def predict(w, t, P, F_inv, P_next, TP, T_lists):
    """TP = T P_filt and P_next = TP T' + W, after the `update` of P."""
    if T_lists.sparse and keeps_variances(w, F_inv):
        _predict_changed(w, t, P, F_inv, P_next, TP, T_lists)
    else:
        _predict(w, t, P, F_inv, P_next, TP, T_lists)


@jitable
def smooth(
    w, t, r, r_next, e, u, Kf, F_inv, a_filt, TP, ahat, N, N_before, T_lists, wanted, g, equal
):  # fmt: skip
    """One step of the smoother, t, with the weight g of its l.

    Writes e, r and, if `wanted.matrices`, ahat and N_before; adds to D_sum, T_bar and Z_bar.
    """
    if sizes(w).p == 1:
        _step_back_one(
            w, t, r, r_next, e, u, Kf, F_inv, a_filt, TP, ahat, N, N_before, T_lists, wanted, g,
            equal,
        )  # fmt: skip
    else:
        _step_back(
            w, t, r, r_next, e, u, Kf, F_inv, a_filt, TP, ahat, N, N_before, T_lists, wanted, g,
            equal,
        )  # fmt: skip
