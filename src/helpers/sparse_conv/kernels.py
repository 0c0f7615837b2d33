"""Numba kernels: Q and its gradient, the convolution without Q, max pooling.

Compiled on the first call for each dtype, and kept on disk. The products are BLAS calls on tiles
of rows that stay in the cache; a gather in front of them or a scatter behind them does the rest.
Sums over all sites are accumulated in float64: in float32 a million terms lose their tail.
No rulebook and no arrays, however wrong, make them read or write out of bounds.
"""

import numpy as np

from helpers.kalman import on_disk

TILE = 128  # rows of a BLAS call: 128 rows of 9 x 16 float32 are 72 KiB

njit = on_disk.njit(nogil=True)


# --- Q and its gradient ---------------------------------------------------------------------------


@njit
def _check(src, dst):
    if src.shape[1] != dst.shape[1]:
        raise ValueError("src and dst are of windows of different sizes")


@njit
def _check_inputs(values, dst):
    if values.shape[0] != dst.shape[0]:
        raise ValueError("values need one row for each input site of the rulebook")


@njit
def _check_outputs(dY, src):
    if dY.shape[0] != src.shape[0]:
        raise ValueError("cotangents need one row for each output site of the rulebook")


@njit
def _check_columns(rows, columns, rows_W, n_out):  # integers, so that it is compiled once
    if columns != n_out:
        raise ValueError(
            f"cotangents have shape ({rows}, {columns}) and W has ({rows_W}, {n_out}), "
            "but both need n_out columns"
        )


@njit
def build_q(values, ground_state, src, dst):
    """Q (a_out, f^d*n_in)."""
    _check_inputs(values, dst)
    a, n = values.shape
    if len(ground_state) != n:
        raise ValueError("ground_state needs one entry for each column of values")
    Q = np.empty((src.shape[0], src.shape[1] * n), values.dtype)
    for o in range(src.shape[0]):
        for k in range(src.shape[1]):
            s = src[o, k]
            active = 0 <= s < a
            for c in range(n):
                Q[o, k * n + c] = values[s, c] if active else ground_state[c]
    return Q


@njit
def grad_q(dQ, src, dst):
    """dM (a_in, n_in) and dt (n_in,)."""
    _check(src, dst)
    _check_outputs(dQ, src)
    a, positions = dst.shape
    a_out, n = src.shape[0], dQ.shape[1] // max(positions, 1)
    if n * positions != dQ.shape[1]:
        raise ValueError("dQ needs f^d*n_in columns")
    dM, dt = np.zeros((a, n), dQ.dtype), np.zeros(n)
    for s in range(a):
        for k in range(positions):
            o = dst[s, k]
            if 0 <= o < a_out:
                for c in range(n):
                    dM[s, c] += dQ[o, k * n + c]
    for o in range(a_out):
        for k in range(positions):
            if not 0 <= src[o, k] < a:
                for c in range(n):
                    dt[c] += dQ[o, k * n + c]
    return dM, dt.astype(dQ.dtype)


# --- the convolution without Q --------------------------------------------------------------------


@njit
def _side_by_side(W, positions):
    """W (f^d*n_in, n_out) with its f^d blocks side by side: (n_in, f^d*n_out)."""
    n_in, n_out = W.shape[0] // positions, W.shape[1]
    if n_in * positions != W.shape[0]:
        raise ValueError("W needs f^d*n_in rows")
    blocks = np.ascontiguousarray(W).reshape((positions, n_in, n_out))
    return blocks.transpose((1, 0, 2)).copy().reshape((n_in, positions * n_out))


@njit
def _on_top(wide, positions, dtype):
    """The inverse of _side_by_side."""
    n_in, n_out = wide.shape[0], wide.shape[1] // positions
    blocks = wide.reshape((n_in, positions, n_out)).transpose((1, 0, 2)).astype(dtype)
    return np.ascontiguousarray(blocks).reshape((positions * n_in, n_out))


@njit
def _add(total, part):
    """total += part."""
    for i in range(total.shape[0]):
        for j in range(total.shape[1]):
            total[i, j] += part[i, j]


@njit
def _gather(dY, dst, first, G):
    """Rows of dY that the sites first, first + 1, ... reach, side by side; zero for none."""
    a_out, n_out = dY.shape
    for r in range(len(G)):
        for k in range(dst.shape[1]):
            o = dst[first + r, k]
            if 0 <= o < a_out:
                for n in range(n_out):
                    G[r, k * n_out + n] = dY[o, n]
            else:
                for n in range(n_out):
                    G[r, k * n_out + n] = 0


@njit
def _scatter(Z, dst, first, Y):
    """Add the rows of Z, side by side, to those of Y that the sites first, first + 1, ... reach."""
    a_out, n_out = Y.shape
    for r in range(len(Z)):
        for k in range(dst.shape[1]):
            o = dst[first + r, k]
            if 0 <= o < a_out:
                for n in range(n_out):
                    Y[o, n] += Z[r, k * n_out + n]


@njit
def _unseen(src, a, mask):
    """Ones where src finds no active site, else zeros; both flat. How many ones?"""
    count = 0
    for i in range(len(src)):
        s = src[i]
        unseen = (s < 0) | (s >= a)  # no branch, so that this loop is vectorised
        mask[i] = unseen
        count += unseen
    return count


@njit
def _sum_unseen(X, src, a, back):
    """Sums of rows of X over positions without a site: by output site, or `back`, by position.

    The products with a mask below do the same, and meet 0 * inf = NaN: this is for those.
    """
    Y = np.zeros((src.shape[1] if back else src.shape[0], X.shape[1]))
    for o in range(src.shape[0]):
        for k in range(src.shape[1]):
            if not 0 <= src[o, k] < a:
                to, of = (k, o) if back else (o, k)
                for n in range(X.shape[1]):
                    Y[to, n] += X[of, n]
    return Y.astype(X.dtype)


@njit
def spread_ground(D, src, dst):
    """Y (a_out, n_out): the sum of the rows of D (f^d, n_out) at positions without a site."""
    a_out, positions = src.shape
    if D.shape[0] != positions:
        raise ValueError("the ground state's products need f^d rows")
    if not D.any():
        return np.zeros((a_out, D.shape[1]), D.dtype)
    if not np.isfinite(D).all():
        return _sum_unseen(D, src, len(dst), False)
    Y = np.empty((a_out, D.shape[1]), D.dtype)
    D, src = np.ascontiguousarray(D), np.ascontiguousarray(src)
    mask = np.empty((min(TILE, a_out), positions), D.dtype)
    for first in range(0, a_out, TILE):
        rows = min(TILE, a_out - first)
        if _unseen(src[first : first + rows].ravel(), len(dst), mask.ravel()):
            np.dot(mask[:rows], D, Y[first : first + rows])
        else:
            Y[first : first + rows] = 0
    return Y


@njit
def sum_ground(dY, src, dst):
    """D (f^d, n_out): row k sums the rows of dY whose window holds no site at position k."""
    _check_outputs(dY, src)
    dY, src = np.ascontiguousarray(dY), np.ascontiguousarray(src)
    a_out, positions = src.shape
    D = np.zeros((positions, dY.shape[1]))
    part = np.empty(D.shape, dY.dtype)
    mask = np.empty((min(TILE, a_out), positions), dY.dtype)
    for first in range(0, a_out, TILE):
        rows = min(TILE, a_out - first)
        if _unseen(src[first : first + rows].ravel(), len(dst), mask.ravel()):
            np.dot(mask[:rows].T, dY[first : first + rows], part)
            _add(D, part)
    if np.isfinite(D).all():
        return D.astype(dY.dtype)
    return _sum_unseen(dY, src, len(dst), True)


@njit
def conv(values, W, tW, src, dst):
    """Y (a_out, n_out): multiply every site by every block of W, then scatter the products."""
    _check(src, dst)
    _check_inputs(values, dst)
    values = np.ascontiguousarray(values)
    a, positions = dst.shape
    n_out = W.shape[1]
    if tW.shape[1] != n_out:
        raise ValueError("the ground state's products need n_out columns")
    Y = spread_ground(tW, src, dst)
    wide = _side_by_side(W, positions)
    Z = np.empty((min(TILE, a), positions * n_out), W.dtype)
    for first in range(0, a, TILE):
        rows = min(TILE, a - first)
        np.dot(values[first : first + rows], wide, Z[:rows])
        _scatter(Z[:rows], dst, first, Y)
    return Y


@njit
def conv_grad_values(dY, W, src, dst):
    """dM (a_in, n_in): gather the rows of dY that a site reaches, then multiply."""
    _check_outputs(dY, src)
    _check_columns(dY.shape[0], dY.shape[1], W.shape[0], W.shape[1])
    a, positions = dst.shape
    wide_T = np.ascontiguousarray(_side_by_side(W, positions).T)
    dM = np.empty((a, wide_T.shape[1]), W.dtype)
    G = np.empty((min(TILE, a), wide_T.shape[0]), W.dtype)
    for first in range(0, a, TILE):
        rows = min(TILE, a - first)
        _gather(dY, dst, first, G[:rows])
        np.dot(G[:rows], wide_T, dM[first : first + rows])
    return dM


@njit
def conv_grad_weights(values, dY, src, dst):
    """dW (f^d*n_in, n_out), without what the ground state adds: the same gather."""
    _check_inputs(values, dst)
    _check_outputs(dY, src)
    values = np.ascontiguousarray(values)
    a, positions = dst.shape
    wide = np.zeros((values.shape[1], positions * dY.shape[1]))
    part = np.empty(wide.shape, dY.dtype)
    G = np.empty((min(TILE, a), wide.shape[1]), dY.dtype)
    for first in range(0, a, TILE):
        rows = min(TILE, a - first)
        _gather(dY, dst, first, G[:rows])
        np.dot(values[first : first + rows].T, G[:rows], part)
        _add(wide, part)
    return _on_top(wide, positions, dY.dtype)


@njit
def conv_grads(values, W, dY, src, dst):
    """Both of the above, with one gather."""
    _check_inputs(values, dst)
    _check_outputs(dY, src)
    _check_columns(dY.shape[0], dY.shape[1], W.shape[0], W.shape[1])
    values = np.ascontiguousarray(values)
    a, positions = dst.shape
    wide_T = np.ascontiguousarray(_side_by_side(W, positions).T)
    dM = np.empty((a, wide_T.shape[1]), W.dtype)
    wide = np.zeros((wide_T.shape[1], wide_T.shape[0]))
    part = np.empty(wide.shape, W.dtype)
    G = np.empty((min(TILE, a), wide.shape[1]), W.dtype)
    for first in range(0, a, TILE):
        rows = min(TILE, a - first)
        _gather(dY, dst, first, G[:rows])
        np.dot(G[:rows], wide_T, dM[first : first + rows])
        np.dot(values[first : first + rows].T, G[:rows], part)
        _add(wide, part)
    return dM, _on_top(wide, positions, W.dtype)


# --- max pooling ----------------------------------------------------------------------------------


@njit
def pool_winners(values, ground_state, src, dst):
    """winner (a_out, n): the site that holds the largest value, a_in for the ground state.

    The first of equals wins, as in a dense network; so does the first NaN.
    """
    _check_inputs(values, dst)
    a, n = values.shape
    if len(ground_state) != n:
        raise ValueError("ground_state needs one entry for each column of values")
    winner = np.empty((src.shape[0], n), np.int32)
    best = np.empty(n, values.dtype)
    for o in range(src.shape[0]):
        for k in range(src.shape[1]):
            s = src[o, k]
            active = 0 <= s < a
            for c in range(n):
                v = values[s, c] if active else ground_state[c]
                if k == 0 or v > best[c] or (v != v and best[c] == best[c]):
                    best[c] = v
                    winner[o, c] = s if active else a
    return winner


@njit
def take(values, ground_state, winner, dst):
    """P (a_out, n): the winners' values."""
    _check_inputs(values, dst)
    a = values.shape[0]
    if len(ground_state) != values.shape[1] or winner.shape[1] != values.shape[1]:
        raise ValueError("values, ground_state and winner need the same columns")
    P = np.empty(winner.shape, values.dtype)
    for o in range(winner.shape[0]):
        for c in range(winner.shape[1]):
            s = winner[o, c]
            P[o, c] = values[s, c] if 0 <= s < a else ground_state[c]
    return P


@njit
def put_back(dP, winner, dst):
    """dM (a_in, n) and dt (n,): each cotangent to its winner."""
    if dP.shape != winner.shape:
        raise ValueError("cotangents need the shape of winner")
    a, n = len(dst), winner.shape[1]
    dM, dt = np.zeros((a, n), dP.dtype), np.zeros(n)
    for o in range(winner.shape[0]):
        for c in range(n):
            s = winner[o, c]
            if 0 <= s < a:
                dM[s, c] += dP[o, c]
            else:
                dt[c] += dP[o, c]
    return dM, dt.astype(dP.dtype)
