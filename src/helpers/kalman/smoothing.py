r"""Estimates of past states: smoothed means and covariances, and draws of whole paths.

Given all observations, the states are jointly normal. Everything here comes from the smoother's
:math:`r` (:mod:`helpers.kalman.panel` computes it for many columns at once): with
:math:`W = R Q R^\top` the smoothed means are a path of the model whose shocks are
:math:`W r_t`,

.. math::

   \hat\alpha_1 &= a_0 + P_0 r_0 , \\
   \hat\alpha_{t+1} &= T \hat\alpha_t + c + W r_t ,

so no :math:`P_t` has to be kept. A draw of the whole path takes a path
:math:`(\alpha^+, y^+)` that is simulated from the model and corrects it by the smoothed means for
the difference :math:`y - y^+` in the model with :math:`a_0 = c = d = 0`. As both are paths of
the same model, their sum is one, with the r of :math:`y - y^+`:

.. math::

   \tilde\alpha_1 &= \alpha^+_1 + P_0 r_0 , \\
   \tilde\alpha_{t+1} &= T \tilde\alpha_t + c \\
   &\quad + R \eta^+_t + W r_t .

That r is also the one of y less the simulated noise in the model that starts at
:math:`\alpha^+_1` and has the shocks :math:`c + R \eta^+_t`, known as they are, in the place of
its mean: the pass moves each column's mean by them, and no :math:`y^+` is formed.

With all random numbers zero this is the smoothed mean. A thousand draws are a thousand columns of
one covariance recursion. Covariances may be singular, H may be zero, y may have gaps: forecasts are
draws after the last observation.

**Diffuse starts.** What A and delta are stands in :mod:`helpers.kalman.diffuse`. The columns of A
are q more series, with y = 0; with rho the r of those, less their sign,

.. math::

   S &= A^\top \rho_0 , \\
   \hat\delta &= S^{-1} A^\top r_0 , \\
   \hat r &= r - \rho \hat\delta , \\
   \tilde\alpha_1 &= \alpha^+_1 + A \hat\delta + P_0 \hat r_0 ,

where :math:`\alpha^+` is simulated with delta = 0.

De Jong 1988, doi:10.1093/biomet/75.3.594 and 1989, Smoothing and interpolation with the state-space
model, doi:10.1080/01621459.1989.10478876 (r and N); Durbin and Koopman 2002, A simple and efficient
simulation smoother for state space time series analysis, doi:10.1093/biomet/89.3.603 (draws).

>>> import numpy as np
>>> from helpers.kalman import StateSpace, smoothing
>>> one = np.eye(1)
>>> level = StateSpace([0.0], one, [0.0], [0.0], T=one, Z=one, R=one, H=one, Q=one)
>>> y = np.array([[1.0], [2.0]])
>>> print(smoothing.means(y, level).round(12).tolist())
[[0.8], [1.4]]
>>> smoothing.draw(y, level, count=1000, rng=1).shape
(1000, 2, 1)
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace

import numpy as np

from helpers.kalman import _passes, _takes_reference, reference
from helpers.kalman.diffuse import (
    _checked,
    _in_words,
    _refuse_unidentified,
    first_room,
    first_variances,
    mean_variance,
    without_mean,
)
from helpers.kalman.recursions import TOLERANCE, at_step, cholesky, solve, symmetric
from helpers.kalman.reference import _symmetric
from helpers.kalman.square_root import root
from helpers.statespace import StateSpace, _as_numbers, check_data

__all__ = ["Forecast", "covariances", "draw", "forecast", "means", "normals_of_a_draw"]

VAGUE = 100.0  # times the other variances, above which a direction of P0 is taken to be vague
CHUNK = 256  # draws that are carried at once: some megabytes at a time, whatever their number


class Forecast(namedtuple("Forecast", "mean covariance states y")):
    """What :func:`forecast` returns.

    Parameters
    ----------
    mean : array (ahead, p)
        Of the observations to come.
    covariance : array (ahead, p, p)
        Of each of them.
    states : array (count, ahead, m)
        Draws.
    y : array (count, ahead, p)
        Draws of the observations, of the same futures.
    """


def means(y, model: StateSpace, A=None, method: str = "fused", *, tol: float = TOLERANCE):
    """Smoothed means: the expected states given all observations.

    Parameters
    ----------
    y : array (n, p)
        NaN marks a gap.
    model : StateSpace
    A : array (m, q), optional
        What unknown numbers delta add to the first state, under a flat prior: columns of the
        identity where single states are diffuse.
    method : "fused" or "reference"
        Compiled, or the readable loop; complex arrays take the loop.
    tol : float
        As :func:`helpers.kalman.loglike`.

    Returns
    -------
    array (n, m)

    Raises
    ------
    ValueError
        If y or A does not fit the model, the data say nothing about a direction of delta, or
        ``method`` or ``tol`` is invalid.
    numpy.linalg.LinAlgError
        If F is not positive definite at some step, which the message names.
    MemoryError, ImportError
        As :func:`helpers.kalman.loglike`.
    """
    return _Smoother(y, model, A, method, tol).corrected(None)[0]


def covariances(y, model: StateSpace, A=None, method: str = "fused"):
    """Smoothed covariances, of the states of each step.

    Parameters
    ----------
    y, model, A, method
        As :func:`means`; only where y is missing counts.

    Returns
    -------
    array (n, m, m)
        Symmetric. Exact where P0 is vague, as the likelihood's gradient is.

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError, MemoryError, ImportError
        As :func:`means`.
    """
    return _Smoother(y, model, A, method, TOLERANCE).covariances()


def draw(
    y, model: StateSpace, count: int = 1, rng=None, A=None, method: str = "fused", *,
    normals=None, tol: float = TOLERANCE,
):  # fmt: skip
    """Draw paths of the states, jointly over all steps, given all observations.

    Parameters
    ----------
    y, model, A, method, tol
        As :func:`means`.
    count : int
        Number of draws.
    rng : int or numpy.random.Generator, optional
        Source of the random numbers; draw j is the same for every count greater than j, but for
        rounding.
    normals : array (J, k), optional
        Standard normal numbers to use instead, for J draws; k is :func:`normals_of_a_draw`. A draw
        is linear in them, plus the smoothed means.

    Returns
    -------
    array (count, n, m)

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError, MemoryError, ImportError
        As :func:`means`; also if count or normals is invalid, or P0, Q or H is not a covariance.
    """
    smoother = _Smoother(y, model, A, method, tol)
    chunks = [smoother.corrected(xi) for xi in smoother.normals(count, rng, normals)]
    return np.concatenate(chunks)


def forecast(
    y, model: StateSpace, ahead: int, count: int = 1, rng=None, A=None, method: str = "fused", *,
    normals=None, tol: float = TOLERANCE,
) -> Forecast:  # fmt: skip
    """Draw the steps after the last observation, states and observations.

    Parameters
    ----------
    y, A, count, rng, method, normals, tol
        As :func:`draw`; normals for n + ahead steps.
    model : StateSpace
        Arrays that vary with time have n + ahead steps.
    ahead : int
        Number of steps.

    Returns
    -------
    Forecast

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError, MemoryError, ImportError
        As :func:`draw`; also if ahead is not positive.
    """
    # As the caller gave it: the steps of a model that varies are those of the forecast too.
    y = check_data(y, replace(model, **{x: getattr(model, x)[0] for x in model.time_varying}))
    if not _is_count(ahead):
        raise ValueError(f"ahead is {ahead!r}, expected a number of steps, 1 or more")
    if model.n not in (None, len(y) + ahead):
        raise ValueError(
            f"{model.time_varying[0]} has {model.n} steps, expected those of y and of the "
            f"forecast, {len(y)} + {ahead}"
        )
    n, gaps = len(y), np.full((ahead, *y.shape[1:]), np.nan)
    smoother = _Smoother(np.concatenate([y, gaps]), model, A, method, tol)
    Z, d, H = (model.over_time(x, n + ahead)[n:] for x in "ZdH")
    states, ys = [], []
    for xi in smoother.normals(count, rng, normals):
        states.append(smoother.corrected(xi)[:, n:])
        noise = smoother.split(xi)[2][n:].swapaxes(0, 1)
        ys.append((Z @ states[-1][..., np.newaxis])[..., 0] + d + noise)
    mean = (Z @ smoother.corrected(None)[0, n:, :, np.newaxis])[..., 0] + d
    V = smoother.covariances()[n:]
    return Forecast(mean, Z @ V @ Z.swapaxes(1, 2) + H, np.concatenate(states), np.concatenate(ys))


def normals_of_a_draw(n: int, model: StateSpace) -> int:
    """How many standard normal numbers a draw over n steps takes: m + n (r + p).

    In this order: for the first state, for the shocks of each step, for the noise of each step.
    The shocks of the last step lead out of the series, and change nothing.
    """
    return model.m + n * (model.r + model.p)


# The columns, from what is given to r and from r to paths. Time comes first, then the column: a
# step of all columns is one product. Arrays of the model have a time axis of length 1 or n.
# drawing compiles these lines as they stand.


def path(start, T, shocks):
    """Paths of the states X (n, J, m) from where they start (J, m) and what each step adds."""
    X = np.empty_like(shocks)
    X[0] = start
    for t in range(len(X) - 1):
        np.dot(X[t], at_step(T, t).T, X[t + 1])  # def-draws-path
        X[t + 1] += shocks[t]
    return X


def pull_path(T, g):
    """The gradients (n + 1, J, m) of the start and of what the steps add, from those of X."""
    rho = np.zeros((len(g) + 1, g.shape[1], g.shape[2]), g.dtype)
    for t in range(len(g) - 1, -1, -1):
        rho[t] = g[t] + rho[t + 1] @ at_step(T, t)
    return rho


def times(X, W):
    """W x for all columns x of all steps; W (1 or n, k, m), X (n, J, m)."""
    n, J, m = X.shape
    if len(W) == 1:
        return (np.ascontiguousarray(X).reshape((n * J, m)) @ W[0].T).reshape((n, J, W.shape[1]))
    out = np.empty((n, J, W.shape[1]), X.dtype)
    for t in range(n):
        out[t] = X[t] @ W[t].T
    return out


def series_of(y, noise, starts, shocks, A):
    """The columns as series (K + q, n, p), their starts and what their steps add (K + q, n, m).

    All have the gaps of y (n, p). First come y less each noise (n, J, p), then series of zeros:
    K - J that fill up starts (K, m) and shocks (n, K, m), and one for each column of A (m, q),
    which starts there and moves without shocks.
    """
    n, J, p = noise.shape
    K, q, m = len(starts), A.shape[1], len(A)
    Y = np.zeros((K + q, n, p), noise.dtype)
    nothing = np.where(np.isnan(y), np.nan, 0.0)
    for k in range(K + q):
        Y[k] = y - noise[:, k] if k < J else nothing
    first, c = np.zeros((K + q, m), noise.dtype), np.zeros((K + q, n, m), noise.dtype)
    first[:K], first[K:] = starts, A.T
    for k in range(K):  # which Numba compiles faster than a transposition
        c[k] = shocks[:, k]
    return Y, first, c


def information_of(r, A):
    """S (q, q) of the flat delta, from the r_0 of all columns, the last of which are those of A."""
    q = A.shape[1]
    if q == 0:
        return np.zeros((q, q), r.dtype)
    return symmetric(-(np.ascontiguousarray(r[0, r.shape[1] - q :]) @ A))  # def-draws-delta


def shift_to_mode(r, e, rho_0, S, A):
    """Move r (n + 1, J + q, m) and e (n, J + q, p), in place, to where delta is most likely.

    Returns delta (J, q). rho_0 (J, m) is added to the score of delta.
    """
    J, q = len(rho_0), A.shape[1]
    if q == 0:
        return np.zeros((J, q), r.dtype)
    s = (np.ascontiguousarray(r[0, :J]) + rho_0) @ A
    C, _ = cholesky(S)
    C_inv = solve(C, np.eye(q).astype(r.dtype))
    delta = (s @ C_inv.T) @ C_inv
    for t in range(len(r)):
        r[t, :J] += delta @ r[t, J:]
        if t < len(e):
            e[t, :J] += delta @ e[t, J:]
    return delta


def roots(P):
    """B (k, m, m) with B B' = P for each of k covariances, which may be singular."""
    B = np.zeros_like(P)
    for t in range(len(P)):
        B_t, _ = root(P[t])
        B[t, :, : len(B_t)] = B_t.T
    return B


def _root_of(name: str, X):
    """`roots` of an array of covariances, or an error."""
    B = roots(_symmetric(X))
    if np.isnan(B).any():
        raise ValueError(
            f"{name} is no covariance, and nothing can be drawn: a variance is negative"
        )
    return B


class _Smoother:
    """A series, its model and A, checked; and the engine that answers."""

    def __init__(self, y, model: StateSpace, A, method: str, tol: float):
        y = check_data(y, model)
        self.y, self.model, self.tol, m = y, model, tol, model.m
        self.A = A = np.zeros((m, 0)) if A is None else _checked("A", A, ((m,),), m)
        self.loop = _takes_reference(y, model, method, tol, A)
        X = model.in_time
        self.c, self.d, self.T, self.Z, self.R, self.H, self.Q, self.W = (X[x] for x in "cdTZRHQW")
        # Under a flat prior P0 is free on the span of A: with room there F is never singular.
        self.room = A * first_room(A, model) @ A.T
        self.P0 = symmetric(model.P0) + self.room
        self.dtype = np.result_type(y, A, model.a0, float)

    def normals(self, count, rng, normals):
        """Standard normal numbers for the draws, chunk by chunk."""
        size = normals_of_a_draw(len(self.y), self.model)
        if normals is not None:
            normals = _as_numbers("normals", normals)
            if normals.ndim != 2 or normals.shape[1] != size or not len(normals):
                raise ValueError(
                    f"normals has shape {normals.shape}, expected (J, m + n (r + p)) = (J, {size})"
                )
            if np.iscomplexobj(normals) or not np.isfinite(normals).all():
                raise ValueError("normals is not finite and real")
            return [normals[k : k + CHUNK] for k in range(0, len(normals), CHUNK)]
        if not _is_count(count):
            raise ValueError(f"count is {count!r}, expected a number of draws, 1 or more")
        rng = np.random.default_rng(rng)
        starts = range(0, count, CHUNK)
        return (rng.standard_normal((min(CHUNK, count - k), size)) for k in starts)

    def split(self, xi):
        """Start (J, m), shocks R eta (n, J, m) and noise (n, J, p) from normal numbers (J, k)."""
        n, (m, r) = len(self.y), (self.model.m, self.model.r)
        xi = xi.astype(np.result_type(xi, self.dtype))
        start, eta, eps = np.split(xi, [m, m + n * r], axis=1)
        eta, eps = (x.reshape(len(xi), n, -1).swapaxes(0, 1) for x in (eta, eps))
        # Not a root of W: R eta reaches what R reaches, whatever rounding does to R Q R'.
        shocks = times(times(eta, _root_of("Q", self.Q)), self.R)
        (B,) = _root_of("P0", self.model.P0[None])
        return start @ B.T, shocks, times(eps, _root_of("H", self.H))

    def corrected(self, xi):
        """The draws (J, n, m) of these normal numbers (J, k); the smoothed means for None."""
        n, p, m = *self.y.shape, self.model.m
        none = np.zeros((1, m)), np.zeros((n, 1, m)), np.zeros((n, 1, p))
        start, shocks, noise = (
            X.astype(self.dtype) for X in (none if xi is None else self.split(xi))
        )
        start, shocks = start + self.model.a0, shocks + self.c[:, None]
        r, e = self.columns(*series_of(self.y - self.d, noise, start, shocks, self.A))
        J = len(start)
        delta = shift_to_mode(r, e, np.zeros_like(start), self.information(r), self.A)
        start = start + delta @ self.A.T + r[0, :J] @ symmetric(self.model.P0)
        return path(start, self.T, shocks + times(r[1:, :J], self.W)).swapaxes(0, 1)

    def information(self, r, flat=None):
        """S of all numbers, of which the first `flat` have to be known from the data alone."""
        S, A = information_of(r, self.A), self.A[:, :flat]
        if A.shape[1]:
            _refuse_unidentified(S.real[:flat, :flat], lambda x: _in_words(A @ x))
        return S

    def columns(self, Y, starts, c):
        """r (n + 1, J, m) and e (n, J, p) of series Y (J, n, p), starts (J, m) and c (J, n, m)."""
        J, n, _ = Y.shape
        if self.loop:
            model, parts = without_mean(self.model, P0=self.P0), []
            for y, a0, moves in zip(Y, starts, c, strict=True):
                _, dy, bars = reference.loglike_and_grad(y, replace(model, a0=a0, c=moves))
                parts.append((dy, bars.a0, bars.c))
            dY, r_0, r = (np.array(X) for X in zip(*parts, strict=True))
        elif J == 1:  # needs nothing of a panel, which takes its time to compile
            given = Y[0], starts[0], self.P0, c[0], np.zeros_like(self.d), self.T, self.Z
            _, bars, dy, report = self.load("door").loglike_and_grad(
                *(np.asarray(X, float) for X in (*given, self.H, self.W, np.ones(n))),
                *ONLY_VECTORS[1:], float(self.tol),
            )  # fmt: skip
            dY, r_0, r, ended = dy[None], bars[0][None], bars[2][None], report[0]
        else:
            given = Y, starts, self.P0, c, self.T, self.Z, self.H, self.W, np.ones((J, 1))
            _, dY, r_0, r, _, (ended, _) = self.load("panel").loglike_and_grad(
                *(np.asarray(X, float) for X in given), *ONLY_VECTORS, float(self.tol)
            )
        if not self.loop and ended < n:
            raise reference._not_positive_definite(int(ended))
        return np.concatenate([r_0[None], r.swapaxes(0, 1)]), -dY.swapaxes(0, 1)

    def load(self, name: str):
        """A compiled module."""
        return _passes().building.load(name)

    def covariances(self):
        """V (n, m, m): that given delta, and what the uncertainty of delta adds."""
        n, m = len(self.y), self.model.m
        flat = self.A.shape[1]
        self._split_off()
        nothing = np.where(np.isnan(self.y), np.nan, 0.0)
        # A series that never surprises has r = 0: the gradient of each step's W is -N / 2.
        W = np.broadcast_to(self.W, (n, m, m))
        given = without_mean(self.model, P0=self.P0, R=np.eye(m), Q=_symmetric(W))
        engine = reference if self.loop else _passes()
        N = -2 * engine.loglike_and_grad(nothing, given)[2].Q
        if self.loop:
            P_filt = reference.kalman_filter(nothing, given).out.P_filt
        else:
            P_filt = self.load("outputs").filter_outputs(*engine.arrays_of(nothing, given))[3]
        TP = self.T @ P_filt
        V = P_filt - TP.swapaxes(1, 2) @ N @ TP  # eq-draws-covariance
        if self.A.shape[1]:
            r, S, values, B = self.said(nothing, flat)
            if self.A.shape[1] > flat:
                # Far less may be said about one of them than about another, and be lost in the
                # rounding of that: once more, for numbers that have nothing to do with each other.
                self.A = np.hstack([self.A[:, :flat], self.A @ B])
                r, S, values, B = self.said(nothing, flat)
            covariance = B / (1 + np.maximum(values, 0)) @ B.T
            covariance[:flat, :flat] += np.linalg.inv(S[:flat, :flat])
            C = path(self.A.T + r[0] @ self.P0, self.T, times(r[1:], self.W))
            V = V + C.swapaxes(1, 2) @ covariance @ C
        return _symmetric(V)

    def said(self, nothing, flat):
        """What a series of zeros says about the numbers with variance one, the others being open.

        Returns r and S of all numbers, and of those with variance one the information along
        directions that have nothing to do with each other, and these directions (q, q - flat).
        """
        n, (m, q) = len(nothing), self.A.shape
        Y = np.repeat(nothing[None].astype(self.dtype), q, axis=0)
        r, _ = self.columns(Y, self.A.T.astype(self.dtype), np.zeros((q, n, m)))
        S = self.information(r, flat)
        known = np.linalg.solve(S[:flat, :flat], S[:flat, flat:])
        values, vectors = np.linalg.eigh(symmetric(S[flat:, flat:] - S[flat:, :flat] @ known))
        return r, S, values, np.vstack([-known, np.eye(q - flat)]) @ vectors

    def _split_off(self):
        """Move what is vague in P0 to A, where it costs no digits, as delta with variance one."""
        model = self.model
        if self.dtype.kind == "c":
            return
        most = VAGUE * mean_variance(*first_variances(model)[1:])
        sizes, directions = np.linalg.eigh(symmetric(model.P0))
        if sizes[-1] <= most:
            return
        if self.A.shape[1]:  # P0 is free on the span of A, and best without any there
            B, span = directions * np.sqrt(np.maximum(sizes, 0)), np.linalg.qr(self.A)[0]
            B = B - span @ (span.T @ B)
            sizes, directions = np.linalg.eigh(B @ B.T)
        vague = sizes > most
        self.A = np.hstack([self.A, directions[:, vague] * np.sqrt(sizes[vague] - most)])
        self.P0 = directions * np.clip(sizes, 0, most) @ directions.T + self.room


# What the pass for many series is asked for: a way back, and no gradient of a matrix.
ONLY_VECTORS = (True, False, False, False, False)


def _is_count(x) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool) and x >= 1
