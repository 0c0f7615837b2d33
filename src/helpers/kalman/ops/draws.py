r"""Smoothed means and draws of the states as an Op, with its pullback in closed form.

:func:`kalman_smooth` and :func:`kalman_draw` are :func:`helpers.kalman.smoothing.means` and
:func:`helpers.kalman.smoothing.draw` for PyTensor and PyMC. Given its standard normal numbers a
draw is a differentiable function of the model's arrays, and so are the means, the draw whose
numbers are all zero.

**The pullback.** Let g be the cotangent of the draw, :math:`\rho_{t-1} = T^\top \rho_t + g_t` its
pullback through the model's recursion, and x the path with the shocks :math:`W \rho_t` that starts
at :math:`P_0 \rho_0`: the states' covariance times g, before any observation. One more column
through the same gains, the series :math:`y = -Z x`, gives :math:`r^x` and :math:`e^x`. (So does
y = 0 in the model whose mean is x.) Let :math:`q_t = \rho_t + r^x_t`, and :math:`\lambda` be the
path with the shocks :math:`W q_t` that starts at :math:`P_0 q_0`: the posterior covariance times g.
With r and e those of :math:`y - y^+` and :math:`\tilde\alpha` the draw, the gradients are

.. math::

   \bar y_t &= -e^x_t, \quad \bar\varepsilon^+_t = e^x_t, \\
   \bar\alpha^+_1 &= q_0, \quad \overline{R \eta^+_t} = q_t, \\
   \bar W &= \operatorname{sym} \sum q_t r_t^\top, \\
   \bar H &= \operatorname{sym} \sum e^x_t e_t^\top, \\
   \bar T &= \sum q_t \tilde\alpha_t^\top + r_t \lambda_t^\top, \\
   \bar Z &= \sum e^x_t \tilde\alpha_t^\top + e_t \lambda_t^\top, \\
   \bar P_0 &= \operatorname{sym} q_0 r_0^\top, \\
   \bar A &= q_0 \hat\delta^\top + r_0 \hat\delta^{x\top} .

The Ops call the functions of :mod:`helpers.kalman.drawing`, from JAX mode in Python.
"""

from __future__ import annotations

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import disconnected_grad

from helpers.kalman import drawing
from helpers.kalman.diffuse import room
from helpers.kalman.ops.declared import Declared, real_tensors
from helpers.kalman.ops.likelihood import from_model, less
from helpers.kalman.recursions import TOLERANCE
from helpers.kalman.shapes import NEEDED, check

# The data with d taken off, where the paths start, R eta with c, and the noise.
DRAW = {
    "y": "n p", "start": "J m", "shocks": "n J m", "noise": "n J p", "P0": "m m",
    "T": "n? m m", "Z": "n? p m", "H": "n? p p", "W": "n? m m", "A": "m q",
}  # fmt: skip


def kalman_smooth(y, a0, P0, c, d, T, Z, R, H, Q, A=None, tol=TOLERANCE):
    """Smoothed means of the states, symbolically.

    Parameters
    ----------
    y, a0, P0, c, d, T, Z, R, H, Q, tol
        As :func:`helpers.kalman.ops.likelihood.kalman_loglike`.
    A : tensor (m, q), optional
        As :func:`helpers.kalman.smoothing.means`.

    Returns
    -------
    TensorVariable (n, m)
        NaN where some F is not positive definite, or the data leave a direction of delta open.

    Raises
    ------
    ValueError, TypeError
        As :func:`helpers.kalman.ops.likelihood.kalman_loglike`.
    NotImplementedError
        Where a second derivative is asked for.

    Examples
    --------
    >>> import numpy as np
    >>> from helpers.kalman.ops.draws import kalman_smooth
    >>> one, zero = np.eye(1), np.zeros(1)
    >>> y = np.array([[1.0], [2.0]])
    >>> print(kalman_smooth(y, zero, one, zero, zero, one, one, one, one, one).eval().round(12).T)
    [[0.8 1.4]]
    """
    return smooth_from_W(*from_model(y, a0, P0, c, d, T, Z, R, H, Q), A, tol)


def smooth_from_W(y, a0, P0, c, d, T, Z, H, W, A=None, tol=TOLERANCE):  # noqa: N802
    """:func:`kalman_smooth` with W = R Q R' (m, m) or (n, m, m) in the place of R and Q."""
    n, p = y.shape
    shocks = pt.zeros((n, 1, a0.shape[0]), dtype=y.dtype)
    noise = pt.zeros((n, 1, p), dtype=y.dtype)
    return _drawn(y, a0[None], shocks, noise, P0, c, d, T, Z, H, W, A, tol)[:, 0]


def kalman_draw(y, a0, P0, c, d, T, Z, R, H, Q, normals, A=None, tol=TOLERANCE):
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
    given = from_model(y, a0, P0, c, d, T, Z, R, H, Q)
    return draw_from_W(*given, R, Q, given[-2], normals, A, tol)


def draw_from_W(y, a0, P0, c, d, T, Z, H, W, R, Q, of_noise, normals, A=None, tol=TOLERANCE):  # noqa: N802
    """:func:`kalman_draw` with the H and W of the smoother apart from what is simulated.

    The paths are simulated with R, Q and noise of covariance ``of_noise`` (p, p) or (n, p, p).
    """
    given = {"R": R, "Q": Q, "of_noise": of_noise, "normals": normals}
    given = [X.astype(y.dtype) for X in real_tensors(given).values()]
    R, Q, of_noise, normals = given
    sizes, k = (*y.type.shape, a0.type.shape[0], R.type.shape[-1]), None
    if None not in sizes:
        n, p, m, r = sizes
        k = m + n * (r + p)
    dims = ("J", "m + n (r + p)")
    check({"normals": dims}, {"normals": normals.type.shape}, sizes={dims[1]: k})
    (n, p), m, r, J = y.shape, a0.shape[0], R.shape[-1], normals.shape[0]
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


def _drawn(y, start, shocks, noise, P0, c, d, T, Z, H, W, A, tol):
    """The draws (n, J, m), from R eta (n, J, m) without c and noise (n, J, p)."""
    T, Z, H, W, c = (X if X.ndim == k else X[None] for X, k in zip(
        (T, Z, H, W, c), (3, 3, 3, 3, 2), strict=True))  # fmt: skip
    if A is None:
        A = pt.zeros((start.shape[1], 0), dtype=y.dtype)
    else:
        A = real_tensors({"A": A})["A"].astype(y.dtype)
        check({"A": "m q"}, {"A": A.type.shape}, sizes={"m": start.type.shape[1]})
        # Under a flat prior P0 is free on the span of A: with room there F is never singular.
        P0 = P0 + disconnected_grad(A * room(A, Z[0], H[0], W[0], pt) @ A.mT)
    P0 = (P0 + P0.mT) / 2
    return KalmanDraw(tol)(less(y, d), start, shocks + c[:, None, :], noise, P0, T, Z, H, W, A)


class OfText(Declared):
    """An Op whose code is a function of :mod:`helpers.kalman.drawing`, in Python and in Numba."""

    function: str

    def called(self, compiled):
        return (drawing.compiled() if compiled else drawing.PYTHON)[self.function]

    def digest(self):
        return drawing.digest()

    def prepare(self):
        return [f"{x} = contiguous({x})" for x in self.inputs]


class KalmanDraw(OfText):
    """y, start, shocks, noise, P0, T, Z, H, W and A -> draws (n, J, m)."""

    __props__ = ("tol",)
    inputs, needed = DRAW, NEEDED | {"J": "draw"}
    gives = {"draws": "n J m"}
    function = found = "draws"

    def pull(self, X, bars):
        return KalmanDrawGrad(self.tol).named(*X.values(), bars["draws"])


class KalmanDrawGrad(OfText):
    """The ten inputs and the draws' cotangent -> the gradients of the ten."""

    __props__ = ("tol",)
    inputs, needed = DRAW | {"draws_bar": "n J m"}, KalmanDraw.needed
    gives = DRAW
    function, found = "pull_draws", ", ".join(DRAW)
    missing = "second derivatives of draws and smoothed means are not there"


class CovarianceRoot(OfText):
    """P (k, m, m), which may be singular -> B with B B' = P."""

    inputs, gives = {"P": "k m m"}, {"B": "k m m"}
    function, found = "roots", "B"

    def pull(self, X, bars):
        return CovarianceRootGrad().named(X["P"], bars["B"])


class CovarianceRootGrad(OfText):
    """P and the cotangent of its root -> the gradient of P, symmetric."""

    inputs, gives = {"P": "k m m", "B_bar": "k m m"}, {"P": "k m m"}
    function, found = "pull_roots", "P"
    missing = "second derivatives of a covariance's root are not there"


class NormalMarginals(OfText):
    """Means (n, m), covariances (n, m, m) of any rank and standard normal numbers (n, m) -> draws
    (n, m), each step by itself."""

    inputs, gives = {"mean": "n m", "P": "n m m", "z": "n m"}, {"draws": "n m"}
    function, found = "marginals", "draws"
    missing = "take mean + covariance_root(P) @ z, which has derivatives"


def covariance_root(P):
    """B with B B' = P (m, m) or (n, m, m), symmetric and possibly singular, symbolically."""
    P = (P + P.mT) / 2
    return CovarianceRoot()(P) if P.ndim == 3 else CovarianceRoot()(P[None])[0]
