r"""Smoothed means and draws of the states as an Op, with its pullback in closed form.

:func:`kalman_smooth` and :func:`kalman_draw` are :func:`helpers.kalman.smoothing.means` and
:func:`helpers.kalman.smoothing.draw` for PyTensor and PyMC. Given its standard normal numbers a
draw is a differentiable function of the model's arrays, and so are the means, the draw whose
numbers are all zero.

**The pullback.** Let g be the cotangent of the draw, :math:`\rho_{t-1} = T^\top \rho_t + g_t` its
pullback through the model's recursion, and x the path with the shocks :math:`W \rho_t` that starts
at :math:`P_0 \rho_0`: the states' covariance times g, before any observation. One more column
through the same gains, the series :math:`y = -Z x`, gives :math:`r^x` and :math:`e^x`. (So does
y = 0 in the model whose mean is x.) With

.. math::

   q_t = \rho_t + r^x_t, \qquad \lambda = \text{the path with the shocks } W q_t
   \text{ that starts at } P_0 q_0

(:math:`\lambda` is the posterior covariance times g) the gradients are, with r and e those of
:math:`y - y^+` and :math:`\tilde\alpha` the draw,

.. math::

   \bar y_t = -e^x_t, \quad \bar\alpha^+_1 = q_0, \quad \overline{R \eta^+_t} = q_t, \quad
   \bar\varepsilon^+_t = e^x_t, \quad
   \bar W = \operatorname{sym} \sum q_t r_t^\top, \quad
   \bar H = \operatorname{sym} \sum e^x_t e_t^\top, \\
   \bar T = \sum q_t \tilde\alpha_t^\top + r_t \lambda_t^\top, \quad
   \bar Z = \sum e^x_t \tilde\alpha_t^\top + e_t \lambda_t^\top, \quad
   \bar P_0 = \operatorname{sym} q_0 r_0^\top, \quad
   \bar A = q_0 \hat\delta^\top + r_0 \hat\delta^{x\top} .

It runs in Numba, C and Python modes, and in JAX mode by :mod:`helpers.kalman.jax_draws`.
"""

from __future__ import annotations

import threading
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType, disconnected_grad, disconnected_type
from pytensor.graph import Apply, Op

from helpers.kalman import smoothing
from helpers.kalman.diffuse import room
from helpers.kalman.fused import lanes
from helpers.kalman.fused.building import load
from helpers.kalman.fused.registers import larger
from helpers.kalman.fused.tiles import LANES, Memory, get, put
from helpers.kalman.numba_backend import (
    compile_numba_function_src,
    numba_njit,
    register_funcify_and_cache_key,
)
from helpers.kalman.op import _from_model, check_lengths, less, real_tensors, tolerance
from helpers.kalman.panel_op import with_all_axes
from helpers.kalman.recursions import TOLERANCE, at_step, factor_if_identified, solve, symmetric
from helpers.kalman.smoothing import (
    check_square,
    information_of,
    path,
    pull_path,
    series_of,
    settle,
    times,
)
from helpers.kalman.square_root import root

# The share of each variance that is left as a pivot where a Cholesky factor needs no exchanges: far
# above rounding, and below what the jitter of pymc-extras leaves.
FULL_RANK = 1e-10

INPUTS = ("y", "start", "shocks", "noise", "P0", "T", "Z", "H", "W", "A")
_NDIM = {"y": 2, "start": 2, "P0": 2, "A": 2}  # of the others 3


def kalman_smooth(y, a0, P0, c, d, T, Z, R, H, Q, A=None, tol=TOLERANCE):  # noqa: N803
    """Smoothed means of the states, symbolically.

    Parameters
    ----------
    y, a0, P0, c, d, T, Z, R, H, Q, tol
        As :func:`helpers.kalman.op.kalman_loglike`.
    A : tensor (m, q), optional
        As :func:`helpers.kalman.smoothing.means`.

    Returns
    -------
    TensorVariable (n, m)
        NaN where some F is not positive definite, or the data leave a direction of delta open.

    Raises
    ------
    ValueError, TypeError
        As :func:`helpers.kalman.op.kalman_loglike`.
    NotImplementedError
        Where a second derivative is asked for.

    Examples
    --------
    >>> import numpy as np
    >>> from helpers.kalman.smoothing_op import kalman_smooth
    >>> one, zero = np.eye(1), np.zeros(1)
    >>> y = np.array([[1.0], [2.0]])
    >>> print(kalman_smooth(y, zero, one, zero, zero, one, one, one, one, one).eval().round(12).T)
    [[0.8 1.4]]
    """
    return smooth_from_W(*_from_model(y, a0, P0, c, d, T, Z, R, H, Q), A, tol)


def smooth_from_W(y, a0, P0, c, d, T, Z, H, W, A=None, tol=TOLERANCE):  # noqa: N802, N803
    """:func:`kalman_smooth` with W = R Q R' (m, m) or (n, m, m) in the place of R and Q."""
    n, p = y.shape
    shocks = pt.zeros((n, 1, a0.shape[0]), dtype=y.dtype)
    noise = pt.zeros((n, 1, p), dtype=y.dtype)
    return _drawn(y, a0[None], shocks, noise, P0, c, d, T, Z, H, W, A, tol)[:, 0]


def kalman_draw(y, a0, P0, c, d, T, Z, R, H, Q, normals, A=None, tol=TOLERANCE):  # noqa: N803
    """Draws of the states' path given y, as a function of standard normal numbers, symbolically.

    Parameters
    ----------
    y, a0, P0, c, d, T, Z, R, H, Q, A, tol
        As :func:`kalman_smooth`.
    normals : tensor (J, m + n (r + p))
        Standard normal numbers, for J draws.

    Returns
    -------
    TensorVariable (J, n, m)
        NaN as :func:`kalman_smooth`.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As :func:`kalman_smooth`.

    Notes
    -----
    The gradients of P0, Q and H are those at their rank: where one is singular, along changes that
    leave its rank as it is.
    """
    given = _from_model(y, a0, P0, c, d, T, Z, R, H, Q)
    return draw_from_W(*given, R, Q, given[-2], normals, A, tol)


def draw_from_W(y, a0, P0, c, d, T, Z, H, W, R, Q, of_noise, normals, A=None, tol=TOLERANCE):  # noqa: N802, N803
    """:func:`kalman_draw` with the H and W of the smoother apart from what is simulated.

    The paths are simulated with R, Q and noise of covariance ``of_noise`` (p, p) or (n, p, p).
    """
    given = {"R": R, "Q": Q, "of_noise": of_noise, "normals": normals}
    given = [X.astype(y.dtype) for X in real_tensors(given).values()]
    R, Q, of_noise, normals = given  # noqa: N806
    if normals.ndim != 2:
        raise ValueError(f"normals has {normals.ndim} dimensions, expected 2: (J, m + n (r + p))")
    sizes = (*y.type.shape, a0.type.shape[0], R.type.shape[-1])
    if None not in sizes:
        n, p, m, r = sizes
        own = {"m + n (r + p)": m + n * (r + p)}
        check_lengths({"normals": ("J", *own)}, {"normals": normals.type.shape}, own)
    (n, p), m, r, J = y.shape, a0.shape[0], R.shape[-1], normals.shape[0]  # noqa: N806
    # A length that is not known yet, and does not fit, is an error of the last reshape.
    start = normals[:, :m] @ covariance_root(P0).mT + a0
    eta = normals[:, m : m + n * r].reshape((J, n, r)).dimshuffle(1, 0, 2)
    eps = normals[:, m + n * r :].reshape((J, n, p)).dimshuffle(1, 0, 2)
    shocks = eta @ covariance_root(Q).mT @ R.mT
    noise = eps @ covariance_root(of_noise).mT
    # Noise that is not a number is no gap of y: there is no such draw.
    seen = pt.switch(pt.isnan(y)[:, None], 0.0, noise).sum(axis=(0, 2))
    start = pt.switch(pt.isnan(seen)[:, None], np.nan, start)
    return _drawn(y, start, shocks, noise, P0, c, d, T, Z, H, W, A, tol).dimshuffle(1, 0, 2)


def _drawn(y, start, shocks, noise, P0, c, d, T, Z, H, W, A, tol):  # noqa: N803
    """The draws (n, J, m), from R eta (n, J, m) without c and noise (n, J, p)."""
    T, Z, H, W, c = (X if X.ndim == k else X[None] for X, k in zip(  # noqa: N806
        (T, Z, H, W, c), (3, 3, 3, 3, 2), strict=True))  # fmt: skip
    if A is None:
        A = pt.zeros((start.shape[1], 0), dtype=y.dtype)  # noqa: N806
    else:
        A = real_tensors({"A": A})["A"].astype(y.dtype)  # noqa: N806
        if A.ndim != 2:
            raise ValueError(f"A has {A.ndim} dimensions, expected 2: (m, q)")
        check_lengths({"A": "mq"}, {"A": A.type.shape}, {"m": start.type.shape[1]})
        # Under a flat prior P0 is free on the span of A: with room there F is never singular.
        P0 = P0 + disconnected_grad(A * room(A, Z[0], H[0], W[0], pt) @ A.mT)  # noqa: N806
    P0 = (P0 + P0.mT) / 2  # noqa: N806
    return KalmanDraw(tol)(less(y, d), start, shocks + c[:, None, :], noise, P0, T, Z, H, W, A)


# The Op's lines, from the recursions of smoothing: Numba compiles them as they stand.


def columns(Y, starts, c, P0, T, Z, H, W, tol):  # noqa: N803
    """r (n + 1, J, m) and e (n, J, p) of series Y (J, n, p), and whether all went well."""
    J, n, p = Y.shape
    _, dY, r_0, c_bar, _, report = panel_pass(  # noqa: N806
        Y, starts, P0, c, T, Z, H, W, np.ones((J, n)), True, False, False, False, False, tol
    )  # fmt: skip
    r, e = np.empty((n + 1, J, len(P0))), np.empty((n, J, p))
    r[0] = r_0
    for t in range(n):  # which Numba compiles faster than a transposition
        r[t + 1], e[t] = c_bar[:, t], -dY[:, t]
    return r, e, report[0] == n


def panel_pass(*arguments):
    """The compiled pass for many series."""
    return load("panel").loglike_and_grad(*arguments)


def is_identified(S):
    """Whether the data say something about every direction of delta."""
    return not np.isnan(factor_if_identified(S)[1])


def check_fit(y, start, shocks, noise, P0, T, Z, H, W, A):
    """Raise unless the arrays fit each other: compiled lines do not look where they read."""
    (n, p), (J, m) = y.shape, start.shape
    if J == 0:
        raise ValueError("there is no draw: normals or the start has no row")
    if shocks.shape != (n, J, m) or noise.shape != (n, J, p):
        raise ValueError("shocks or noise do not have the shapes (n, J, m) and (n, J, p)")
    for X in (T, Z, H, W):
        if len(X) != 1 and len(X) != n:
            raise ValueError("T, Z, H or W varies over time, but not over as many steps as y has")
    if P0.shape != (m, m) or T.shape[1:] != (m, m) or W.shape[1:] != (m, m):
        raise ValueError("P0, T or W is not of as many states as start, (m, m)")
    if Z.shape[1:] != (p, m) or H.shape[1:] != (p, p) or len(A) != m:
        raise ValueError("Z, H or A does not have the shape (p, m), (p, p) or (m, q)")


def draws(y, start, shocks, noise, P0, T, Z, H, W, A, tol):
    """The draws (n, J, m); y and shocks have d and c off and on."""
    check_fit(y, start, shocks, noise, P0, T, Z, H, W, A)
    J, m = start.shape
    Y, starts, c = series_of(y, noise, start, shocks, A)
    r, e, well = columns(Y, starts, c, P0, T, Z, H, W, tol)
    S = information_of(r, A)
    if not well or not is_identified(S):
        return np.full(shocks.shape, np.nan)
    delta = settle(r, e, np.zeros((J, m)), S, A)
    first = start + begun(delta, np.ascontiguousarray(r[0, :J]), A, P0)
    return path(first, T, shocks + times(r[1:, :J], W))


def pull_draws(y, start, shocks, noise, P0, T, Z, H, W, A, g, tol):
    """The gradients of the ten inputs from those of the draws, g (n, J, m)."""
    check_fit(y, start, shocks, noise, P0, T, Z, H, W, A)
    if g.shape != shocks.shape:
        raise ValueError("the cotangent does not have the shape of the draws, (n, J, m)")
    n, J, m = shocks.shape
    rho = pull_path(T, g)
    starts, moves = np.empty((2 * J, m)), np.empty((n, 2 * J, m))
    starts[:J], starts[J:] = start, rho[0] @ P0
    moves[:, :J], moves[:, J:] = shocks, times(rho[1:], W)
    Y, starts, c = series_of(y, noise, starts, moves, A)
    r, e, well = columns(Y, starts, c, P0, T, Z, H, W, tol)
    S = information_of(r, A)
    both = np.zeros((2 * J, m))
    both[J:] = rho[0]
    delta = np.full((2 * J, A.shape[1]), np.nan)
    if well and is_identified(S):
        delta[:] = settle(r, e, both, S, A)
    else:
        r[:], e[:] = np.nan, np.nan
    q, ex = r[:, J : 2 * J] + rho, np.ascontiguousarray(e[:, J : 2 * J])
    r, e = np.ascontiguousarray(r[:, :J]), np.ascontiguousarray(e[:, :J])
    of_draw, of_g = np.ascontiguousarray(delta[:J]), np.ascontiguousarray(delta[J:])
    drawn = path(start + begun(of_draw, r[0], A, P0), T, shocks + times(r[1:], W))
    lam = path(begun(of_g, q[0], A, P0), T, times(q[1:], W))
    T_bar, Z_bar = np.zeros(T.shape), np.zeros(Z.shape)
    H_bar, W_bar = np.zeros(H.shape), np.zeros(W.shape)
    y_bar = np.zeros(y.shape)
    for t in range(n):
        for j in range(J):
            y_bar[t] -= ex[t, j]
        add_products(T_bar, t, q[t + 1], drawn[t], r[t + 1], lam[t])
        add_products(Z_bar, t, ex[t], drawn[t], e[t], lam[t])
        add_products(H_bar, t, ex[t], e[t], e[t], ex[t])
        add_products(W_bar, t, q[t + 1], r[t + 1], r[t + 1], q[t + 1])
    P0_bar, A_bar = np.zeros((1, m, m)), np.zeros((1, m, A.shape[1]))
    add_products(P0_bar, 0, q[0], r[0], r[0], q[0])
    add_products(A_bar, 0, q[0], of_draw, r[0], of_g)
    return (
        y_bar, q[0].copy(), q[1:].copy(), ex, P0_bar[0] / 2, T_bar, Z_bar, H_bar / 2, W_bar / 2,
        A_bar[0],
    )  # fmt: skip


def begun(delta, r_0, A, P0):
    """What delta and the data add to where the paths start (J, m)."""
    return delta @ A.T + r_0 @ P0


def add_products(out, t, X, Y, U, V):
    """Add X'Y + U'V to `out` at step t."""
    at_step(out, t)[:] += X.T @ Y + U.T @ V


def pull_root(P, B_bar):
    """The gradient of P (m, m) from that of its root B (m, m), with columns of zeros at its end.

    Where P has rank k, along changes that leave it so: the rows and columns of k pivots count.
    """
    B_t, order = root(P)
    k, m = len(B_t), len(P)
    out = np.zeros((m, m))
    if k == 0:
        return out
    L, L_bar = np.zeros((m, k)), np.zeros((m, k))
    for i in range(m):
        for j in range(k):
            L[i, j] = B_t[j, order[i]]
            L_bar[i, j] = B_bar[order[i], j]
    L_inv = solve(L[:k], np.eye(k))
    below = L_bar[k:] @ L_inv
    low = L[:k].T @ (L_bar[:k] - below.T @ L[k:])
    for i in range(k):
        low[i, i] /= 2.0
        low[i, i + 1 :] = 0.0
    top = L_inv.T @ low @ L_inv
    for i in range(m):
        for j in range(k):
            x = (top[i, j] + top[j, i]) / 2.0 if i < k else below[i - k, j] / 2.0
            out[order[i], order[j]] = x
            out[order[j], order[i]] = x
    return out


def pull_roots(P, B_bar):
    """`pull_root` for k covariances (k, m, m)."""
    check_square(P)
    if B_bar.shape != P.shape:
        raise ValueError("the cotangent of the roots does not have the shape of P, (k, m, m)")
    out = np.zeros(P.shape)
    for t in range(len(P)):
        out[t] = pull_root(P[t], B_bar[t])
    return out


def factor_in_lanes(w, m):
    """C' with C C' = P for LANES covariances, in the place of their upper triangles at place 0.

    Without pivots, so not where a variance is lost but for FULL_RANK of it: returned is a number
    that is zero or more there, and below zero where the factor is all there.
    """
    lost = lanes.broadcast(-1.0)
    for i in range(m):
        x = lanes.load(w, i * m + i)
        least = lanes.broadcast(FULL_RANK) * x
        for k in range(i):
            y = lanes.load(w, k * m + i)
            x = x - y * y
        lost = larger(least - x, lost)
        pivot = lanes.root(x)
        lanes.store(w, i * m + i, pivot)
        for j in range(i + 1, m):
            x = lanes.load(w, i * m + j)
            for k in range(i):
                x = x - lanes.load(w, k * m + i) * lanes.load(w, k * m + j)
            lanes.store(w, i * m + j, x / pivot)
    return lost


def load_lanes(w, P, z, first):
    """Steps `first` and after: P (n, m, m), one triangle of it, at place 0, then z (n, m)."""
    n, m = z.shape
    for lane in range(LANES):  # in lanes beyond the last step stands the last one once more
        t = min(first + lane, n - 1)
        for i in range(m):
            put(w, (m * m + i) * LANES + lane, z[t, i])
            for j in range(i, m):
                put(w, (i * m + j) * LANES + lane, (P[t, i, j] + P[t, j, i]) / 2.0)


def add_marginals(w, P, z, out):
    """Add B z to `out` (n, m) for each step; w has room for m (m + 1) + 1 vectors."""
    n, m = z.shape
    for first in range(0, n, LANES):
        load_lanes(w, P, z, first)
        lost = m * (m + 1)
        lanes.store(w, lost, factor_in_lanes(w, m))
        for j in range(m - 1, -1, -1):
            x = lanes.load(w, m * m) * lanes.load(w, j)
            for k in range(1, j + 1):
                x = x + lanes.load(w, m * m + k) * lanes.load(w, k * m + j)
            lanes.store(w, j, x)  # the factor's first row is read no more in this column
        for lane in range(min(LANES, n - first)):
            t = first + lane
            if get(w, lost * LANES + lane) < 0.0:
                for j in range(m):
                    out[t, j] += get(w, j * LANES + lane)
            else:
                B_t, _ = root(symmetric(P[t]))
                for k in range(len(B_t)):
                    out[t] += z[t, k] * B_t[k]


def place(room):
    """Where compiled code finds a vector of doubles: in Python, checked memory of its size."""
    return Memory(len(room))


def marginals(mean, P, z):
    """mean + B z for each step, B B' = P (n, m, m) of any rank; mean and z (n, m)."""
    n, m = mean.shape
    if P.shape != (n, m, m) or z.shape != (n, m):  # from here on nobody looks at lengths
        raise ValueError("P or z does not fit the mean (n, m): not of shape (n, m, m) or (n, m)")
    out = mean.copy()
    room = np.empty((m * (m + 1) + 2) * LANES)
    add_marginals(place(room), P, z, out)
    room[0] = 0.0  # its address was good until here
    return out


class _SmoothingOp(Op):
    """An Op whose code is one of the functions above, in Python and in Numba."""

    function: str

    def call(self, *inputs):
        """The outputs, as arrays."""
        found = _PYTHON[self.function](*inputs, *self.fixed())
        return found if isinstance(found, tuple) else (found,)

    def fixed(self) -> tuple:
        """Arguments after the inputs."""
        return ()

    def perform(self, node, inputs, output_storage):
        found = self.call(*(np.array(X, dtype=float, order="C") for X in inputs))
        for storage, X in zip(output_storage, found, strict=True):
            storage[0] = np.asarray(X, dtype=node.outputs[0].dtype)

    def numba_function(self, node):
        """A function of the Op's inputs for Numba, and a key under which it is kept on disk."""
        given = [f"x{i}" for i in range(len(node.inputs))]
        alike = [f"entry.contiguous({x})" for x in given] + [repr(x) for x in self.fixed()]
        outputs = [f"z{i}" for i in range(len(node.outputs))]
        dtype = node.outputs[0].dtype
        cast = "" if dtype == "float64" else f".astype(np.{dtype})"
        source = "\n".join(
            [
                f"def {self.function}_op({', '.join(given)}):",
                f"    {', '.join(outputs)} = function({', '.join(alike)})",
                f"    return {', '.join(z + cast for z in outputs)}",
            ]
        )
        key = sha256(f"{source} {_digest()}".encode()).hexdigest()
        known = {"np": np, "entry": load("entry"), "function": _compiled()[self.function]}
        name = f"{self.function}_op"
        return numba_njit(compile_numba_function_src(source, name, global_env=known)), key


class KalmanDraw(_SmoothingOp):
    """y (n, p), d off; start (J, m); shocks (n, J, m), c on; noise (n, J, p); P0 (m, m); T, Z, H, W
    with an axis of length n or 1 for time; A (m, q) -> draws (n, J, m)."""

    __props__ = ("tol",)
    function = "draws"

    def __init__(self, tol: float = TOLERANCE):
        self.tol = tolerance(tol)

    def fixed(self):
        return (self.tol,)

    def make_node(self, *inputs):
        inputs = with_all_axes(inputs, INPUTS, _NDIM)
        shape = inputs[2].type.shape
        return Apply(self, inputs, [pt.tensor(dtype=inputs[0].dtype, shape=shape)])

    def infer_shape(self, node, shapes):
        return [shapes[2]]

    def pullback(self, inputs, outputs, cotangents):
        (g,) = cotangents
        if isinstance(g.type, DisconnectedType):
            return [disconnected_type() for _ in inputs]
        return KalmanDrawGrad(self.tol)(*inputs, g)


class KalmanDrawGrad(_SmoothingOp):
    """The ten inputs and the draws' cotangent -> the gradients of the ten."""

    __props__ = ("tol",)
    function = "pull_draws"

    def __init__(self, tol: float = TOLERANCE):
        self.tol = tol

    def fixed(self):
        return (self.tol,)

    def make_node(self, *inputs):
        *given, g = inputs
        given = with_all_axes(given, INPUTS, _NDIM)
        g = pt.as_tensor_variable(g).astype(given[0].dtype)
        return Apply(
            self, [*given, g], [pt.tensor(dtype=g.dtype, shape=X.type.shape) for X in given]
        )

    def infer_shape(self, node, shapes):
        return shapes[:-1]

    def pullback(self, inputs, outputs, cotangents):
        raise NotImplementedError("second derivatives of draws and smoothed means are not there")


class CovarianceRoot(_SmoothingOp):
    """P (k, m, m), which may be singular -> B with B B' = P."""

    __props__ = ()
    function = "roots"

    def make_node(self, P):  # noqa: N803
        (P,) = _fitting({"P": P}, {"P": "kmm"})  # noqa: N806
        return Apply(self, [P], [P.type()])

    def infer_shape(self, node, shapes):
        return shapes

    def pullback(self, inputs, outputs, cotangents):
        return [CovarianceRootGrad()(*inputs, *cotangents)]


class CovarianceRootGrad(_SmoothingOp):
    """P and the cotangent of its root -> the gradient of P, symmetric."""

    __props__ = ()
    function = "pull_roots"

    def make_node(self, P, B_bar):  # noqa: N803
        given = _fitting({"P": P, "B_bar": B_bar}, {"P": "kmm", "B_bar": "kmm"})
        return Apply(self, given, [given[0].type()])

    def infer_shape(self, node, shapes):
        return shapes[:1]

    def pullback(self, inputs, outputs, cotangents):
        raise NotImplementedError("second derivatives of a covariance's root are not there")


class NormalMarginals(_SmoothingOp):
    """Means (n, m), covariances (n, m, m) of any rank and standard normal numbers (n, m) -> draws
    (n, m), each step by itself."""

    __props__ = ()
    function = "marginals"

    def call(self, *inputs):
        with np.errstate(all="ignore"):  # of lanes in which a factor is not all there
            return super().call(*inputs)

    def make_node(self, mean, P, z):  # noqa: N803
        given = {"mean": mean, "P": P, "z": z}
        given = _fitting(given, {"mean": "nm", "P": "nmm", "z": "nm"})
        return Apply(self, given, [given[0].type()])

    def infer_shape(self, node, shapes):
        return shapes[:1]

    def pullback(self, inputs, outputs, cotangents):
        raise NotImplementedError("take mean + covariance_root(P) @ z, which has derivatives")


def _fitting(given: dict, dims: dict) -> list:
    """Tensors of one float type, of these dimensions, whose shapes fit where they are known."""
    ndim = {x: len(letters) for x, letters in dims.items()}
    inputs = with_all_axes(given.values(), given, ndim)
    shapes = {x: X.type.shape for x, X in zip(given, inputs, strict=True)}
    check_lengths(dims, shapes, {})
    return inputs


def covariance_root(P):  # noqa: N803
    """B with B B' = P (m, m) or (n, m, m), symmetric and possibly singular, symbolically."""
    P = (P + P.mT) / 2  # noqa: N806
    return CovarianceRoot()(P) if P.ndim == 3 else CovarianceRoot()(P[None])[0]


_PYTHON = {
    "draws": draws, "pull_draws": pull_draws, "roots": smoothing.roots, "pull_roots": pull_roots,
    "marginals": marginals,
}  # fmt: skip
_TEXT = [check_fit, check_square, path, pull_path, times, series_of, information_of, settle]
_TEXT += [begun, add_products, columns, is_identified, pull_root, factor_in_lanes, load_lanes]
_TEXT += [add_marginals]


def _digest() -> str:
    """A digest of the lines that are compiled here, and of those that they call."""
    files = [Path(__file__), Path(smoothing.__file__)]
    text = b"".join(file.read_bytes() for file in files) + load("entry").DIGEST.encode()
    return sha256(text).hexdigest()[:16]


def _compiled() -> dict:
    """The Ops' functions as machine code, compiled once for each machine and kept on disk."""
    with _ONE_AT_A_TIME:
        if not _READY:
            _READY.update(_newly_compiled())
    return _READY


def _newly_compiled() -> dict:
    from numba.extending import overload

    from helpers.kalman.fused import text  # noqa: F401 (compiles square_root's text)
    from helpers.kalman.fused.tiles import PART, jitable
    from helpers.kalman.on_disk import njit

    code, options = load("panel").linked_loglike_and_grad, {"error_model": "numpy", "nogil": True}

    @overload(panel_pass, jit_options=PART)
    def _panel_pass(
        Y, starts, P0, c, T, Z, H, W, l_bar, back, matrices, of_T, of_Z, of_W, tol,  # noqa: N803
    ):  # fmt: skip
        def call(
            Y, starts, P0, c, T, Z, H, W, l_bar, back, matrices, of_T, of_Z, of_W, tol,  # noqa: N803
        ):  # fmt: skip
            return code(
                (Y, starts, P0, c, T, Z, H, W, l_bar, back, matrices, of_T, of_Z, of_W, tol)
            )

        return call

    @overload(place, jit_options=PART)
    def _place(room):
        return lambda room: (room.ctypes.data + 63) // 64 * 64

    for function in _TEXT:
        jitable(function)
    for function in _PYTHON.values():
        # Numba looks at one file alone to see whether what it kept is still good.
        function.__qualname__ = f"{function.__name__}_{_digest()}"
    return {name: njit(**options)(function) for name, function in _PYTHON.items()}


_ONE_AT_A_TIME = threading.Lock()
_READY: dict = {}


@register_funcify_and_cache_key(KalmanDraw)
@register_funcify_and_cache_key(KalmanDrawGrad)
@register_funcify_and_cache_key(CovarianceRoot)
@register_funcify_and_cache_key(CovarianceRootGrad)
@register_funcify_and_cache_key(NormalMarginals)
def numba_funcify_smoothing(op, node, **kwargs):
    return op.numba_function(node)
