r"""Exact diffuse starts and regressions: unknown numbers are integrated out of the likelihood.

Some of a model's numbers :math:`\delta` (q,) enter its means linearly: a first state about which
nothing is known, the coefficients of regressors in the observations or in the state,

.. math::

   \alpha_1 &= a_0 + A \delta + N(0, P_0), \\
   y_t &\text{ gets } X_t \delta, \quad \alpha_{t+1} \text{ gets } B_t \delta .

For each :math:`\delta` the model is an ordinary one, and its log-likelihood is quadratic in
:math:`\delta`: so :math:`\delta` can be integrated out, under a flat prior or a normal one with
precision :math:`\Lambda`, and no large number occurs. What :math:`\delta` adds goes through the
covariance recursion of the series as columns, series with y = 0 that start from :math:`A`:

.. math::

   E_t &= Z A_t + X_t , \\
   A_{t+1} &= T (A_t - K^f_t E_t) + B_t , \\
   S &= \Lambda + \sum_t E_t^\top F_t^{-1} E_t , \\
   s &= \sum_t E_t^\top u_t , \quad \hat\delta = S^{-1} s ,

and with :math:`\mathcal L(\delta)` the likelihood at a given :math:`\delta`,

.. math::

   \mathcal L_\text{diffuse} &= \mathcal L(\hat\delta)
   - \tfrac12 \hat\delta^\top \Lambda \hat\delta \\
   &\quad - \tfrac12 \log |S| \; ( + \tfrac12 \log |\Lambda|) .

The gradient is the ordinary one, averaged over :math:`\delta \mid y \sim N(\hat\delta, S^{-1})`.
As the log-likelihood is quadratic, that is the sum of those of the series at :math:`\hat\delta`
and of q columns, each one standard deviation of :math:`\delta` long: a panel of q + 1 series
(:mod:`helpers.kalman.panel`) whose covariances count once.

On the directions of a flat start no P0 is needed: any :math:`P_0 + A M A^\top` gives the same
likelihood. The variances there are set to the size of the model's others, so that F is never
singular.

De Jong 1991 (The diffuse Kalman filter, Annals of Statistics 19, 1073-1083); Durbin and Koopman
2012 (Time Series Analysis by State Space Methods, 2nd ed.), sections 5.2, 5.7 and 6.2.3; Francke,
Koopman and de Vos 2010 (Likelihood functions for state space models with diffuse initial
conditions, Journal of Time Series Analysis 31, 407-414) for the marginal likelihood.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace

import numpy as np

from helpers.kalman import _passes, _takes_reference, reference
from helpers.kalman import hessian as hessians
from helpers.kalman.recursions import LEAST, LOG_2PI, TOLERANCE, at_step, symmetric, update_columns
from helpers.statespace import (
    Gradients,
    StateSpace,
    _as_numbers,
    _check_finite,
    _check_symmetric,
    check_data,
)

__all__ = ["Estimate", "Integrated", "hessian", "loglike", "loglike_and_grad"]


class Estimate(namedtuple("Estimate", "mean covariance")):
    """What the data say about delta: its posterior.

    Parameters
    ----------
    mean : array (q,)
    covariance : array (q, q)
    """


class Integrated(
    namedtuple("Integrated", "value dy gradients A_bar estimate X_bar B_bar precision_bar")
):
    """What :func:`loglike_and_grad` returns.

    Parameters
    ----------
    value : float
    dy : array (n, p)
        Zero in the gaps.
    gradients : Gradients
        As :func:`helpers.kalman.loglike_and_grad`.
    A_bar : array (m, q)
        The gradient with respect to A.
    estimate : Estimate
        The mean and the covariance of delta given the data.
    X_bar, B_bar : array, or None where there is no X or B
        The gradients with respect to X and B, of their shapes.
    precision_bar : array (q, q), or None where the prior is flat
        The gradient with respect to the precision; symmetric.
    """


def loglike(
    y, model: StateSpace, A=None, method: str = "fused", *, X=None, B=None, precision=None,
    marginal: bool = False, tol: float = TOLERANCE,
):  # fmt: skip
    """Log-likelihood with delta integrated out.

    Parameters
    ----------
    y : array (n, p)
        NaN marks a gap.
    model : StateSpace
        Its a0, c and d are those without delta, its P0 that of the first state given delta; what P0
        is on the span of A makes no difference under a flat prior. A state about which nothing is
        known belongs in A: a vague P0 costs digits here.
    A : array (m, q), optional
        What delta adds to the first state: columns of the identity where single states are diffuse.
        Zeros if None.
    method : "fused" or "reference"
        As :func:`helpers.kalman.loglike`; complex arrays take the reference.
    X : array (p, q) or (n, p, q), optional
        What delta adds to each observation: regressors.
    B : array (m, q) or (n, m, q), optional
        What delta adds to each next state.
    precision : array (q, q), optional
        Of delta's normal prior, whose mean is zero; positive definite. A flat prior if None.
    marginal : bool
        The marginal likelihood of what delta does not reach, which does not depend on the scale of
        A, X and B: it has q/2 log(2 pi) + log|E'E|/2 more, with E all that delta does to what is
        observed. For a flat prior.
    tol : float
        As :func:`helpers.kalman.loglike_and_grad`.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If A, X, B or the precision do not fit the model, or the data leave a direction of delta
        open: the message says which.
    numpy.linalg.LinAlgError
        If F is not positive definite at some step.
    MemoryError
        If memory runs out.
    """
    columns = _Columns(y, model, A, X, B, precision)
    value = columns.value(method, tol)
    if not marginal:
        return value
    mean, constant = _of_the_mean(columns)
    return value - mean.value(method, tol) - constant


def loglike_and_grad(
    y, model: StateSpace, A=None, method: str = "fused", *, X=None, B=None, precision=None,
    marginal: bool = False, tol: float = TOLERANCE,
) -> Integrated:  # fmt: skip
    """Log-likelihood, and its gradient with respect to everything.

    Parameters
    ----------
    y, model, A, method, X, B, precision, marginal, tol
        As :func:`loglike`; real.

    Returns
    -------
    Integrated

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError, MemoryError
        As :func:`loglike`.
    """
    columns = _Columns(y, model, A, X, B, precision)
    found = columns.value_and_grad(method, tol)
    if not marginal:
        return found
    mean, constant = _of_the_mean(columns)
    less = mean.value_and_grad(method, tol)
    G, T, Z = found.gradients, less.gradients.T, less.gradients.Z  # all that the mean of y knows
    return found._replace(
        value=found.value - less.value - constant,
        gradients=G._replace(T=G.T - T, Z=G.Z - Z),
        A_bar=found.A_bar - less.A_bar,
        X_bar=None if X is None else found.X_bar - less.X_bar,
        B_bar=None if B is None else found.B_bar - less.B_bar,
    )


def hessian(
    y, model: StateSpace, A, directions: dict[str, np.ndarray], method: str = "fused"
) -> np.ndarray:
    r"""Second derivatives of the log-likelihood along pairs of directions.

    With :math:`\delta \mid y \sim N(\hat\delta, S^{-1})`, and :math:`\mathcal L(\delta)` the
    ordinary likelihood that starts from :math:`a_0 + A \delta`,

    .. math::

       \nabla^2 \mathcal L_\text{diffuse}
       &= E\, \nabla^2 \mathcal L(\delta) \\
       &\quad + \operatorname{Cov} \nabla \mathcal L(\delta)

    (Louis 1982, Finding the observed information matrix when using the EM algorithm, Journal of
    the Royal Statistical Society B 44, 226-233).  Both derivatives are quadratic in delta, so that
    their values at 2 q + 1 points give the two moments exactly.

    Parameters
    ----------
    y, model, A, method
        As :func:`loglike`; real.
    directions : dict of arrays (k, ...)
        As in :func:`helpers.kalman.hessian.hessian_vector`; A does not move.

    Returns
    -------
    array (k, k)
        Symmetric.

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError
        As :func:`loglike`; and as :func:`helpers.kalman.hessian.hessian_vector`.
    """
    columns = _Columns(y, model, A, None, None, None)
    directions = reference.check_directions(y, model, directions)
    delta, covariance = columns.value_and_grad(method, TOLERANCE).estimate
    q, A = columns.q, columns.A
    # P0 has room on the span of A, and delta is so much less uncertain.
    root = np.linalg.cholesky(covariance + np.diag(columns.room))
    k = len(next(iter(directions.values())))
    # Beside the k directions, those in which a0 moves with delta.
    moves = {x: np.concatenate([X, np.zeros((q, *X.shape[1:]))]) for x, X in directions.items()}
    moves.setdefault("a0", np.zeros((k + q, model.m)))
    moves["a0"][k:] = (A @ root).T
    model = replace(model, P0=symmetric(model.P0) + A * columns.room @ A.T)

    def seen_from(at):
        return hessians.hessian(y, replace(model, a0=model.a0 + A @ at), moves, method)

    centre, curved = seen_from(delta), np.empty((k, q, q))
    mean, slopes = centre[:k, :k].copy(), centre[:k, k:]
    for i, side in enumerate(root.T):
        ahead, behind = seen_from(delta + side), seen_from(delta - side)
        mean += (ahead + behind - 2 * centre)[:k, :k] / 2
        curved[:, :, i] = (ahead - behind)[:k, k:] / 2
    return mean + slopes @ slopes.T + np.einsum("iab,jba->ij", curved, curved) / 2


class _Columns:
    """The series and what delta adds to it, checked, as q + 1 series with the same gaps."""

    def __init__(self, y, model: StateSpace, A, X, B, precision):
        y = check_data(y, model)
        n, p, m = len(y), model.p, model.m
        self.y, self.model = y, model
        self.given = given = {"A": A, "X": X, "B": B}
        shapes = {"A": ((m,),), "X": ((p,), (n, p)), "B": ((m,), (n, m))}
        most = m if X is None and B is None else m + n * p
        checked = {x: _checked(x, M, shapes[x], most) for x, M in given.items() if M is not None}
        if not checked:
            raise ValueError("delta enters nowhere: give A, X or B")
        qs = {x: M.shape[-1] for x, M in checked.items()}
        if len(set(qs.values())) > 1:
            told = ", ".join(f"{x} has {k}" for x, k in qs.items())
            raise ValueError(f"the columns differ in number: {told}")
        self.q, rows = next(iter(qs.values())), {"A": m, "X": p, "B": m}
        self.A, self.X, self.B = (checked.get(x, np.zeros((k, self.q))) for x, k in rows.items())
        self.flat = precision is None
        self.precision = (
            np.zeros((self.q, self.q)) if self.flat else _checked_precision(precision, self.q)
        )
        self.missing = np.isnan(y)

    @property
    def _in_the_start_alone(self) -> bool:
        return self.given["X"] is None and self.given["B"] is None

    def starts(self):
        """Those of the columns (q + 1, m), and P0."""
        # Of numbers that enter the first state alone P0 is free, under a flat prior.
        enters = sum(np.abs(M).reshape(-1, self.q).max(axis=0) for M in (self.X, self.B))
        pure = (enters == 0) & self.flat
        self.room = np.where(pure, first_room(self.A, self.model), 0.0)
        P0 = symmetric(self.model.P0) + self.A * self.room @ self.A.T
        return np.vstack([self.model.a0, self.A.T]), P0

    def series(self):
        """y (q + 1, n, p) with d taken off, and c (q + 1, n or 1, m)."""
        X, B = (np.moveaxis(M if M.ndim == 3 else M[np.newaxis], -1, 0) for M in (self.X, self.B))
        model = self.model.in_time
        y = np.empty((self.q + 1, *self.y.shape), np.result_type(self.y, X))
        y[0], y[1:] = self.y - model["d"], -X
        y[:, self.missing] = np.nan
        steps = max(B.shape[1], len(model["c"]))
        c = np.empty((self.q + 1, steps, self.model.m), np.result_type(model["c"], B))
        c[0], c[1:] = model["c"], B
        return y, c

    def value(self, method: str, tol: float):
        """The log-likelihood."""
        return self._evaluate(method, tol, False)[0]

    def value_and_grad(self, method: str, tol: float) -> Integrated:
        """The log-likelihood, its gradient, and the posterior of delta."""
        given = {"the model": self.model.a0, "y": self.y, "A": self.A, "X": self.X, "B": self.B}
        for name, M in given.items():
            if np.iscomplexobj(M):
                raise ValueError(
                    f"{name} is complex, expected real numbers: there is a complex step of "
                    "loglike, but none of its gradient"
                )
        return self._gathered(*self._evaluate(method, tol, True))

    def _evaluate(self, method: str, tol: float, gradient: bool):
        """The value and, for a gradient, what `_gathered` takes beside it."""
        if _takes_reference(self.y, self.model, method, tol, self.A, self.X, self.B):
            value, *found = _by_loop(self, gradient)
        else:
            _, value, delta, root, S, *bars, out, _ = self._compiled(gradient, tol)
            if np.isnan(value):
                _refuse_unidentified(S, self._told)
            gradients = _passes().gradients_of(self.model, out) if gradient else None
            value, found = float(value), (delta, root, *bars, gradients)
        of_the_prior = 0.0 if self.flat else float(np.linalg.slogdet(self.precision)[1]) / 2
        return value + of_the_prior, *found

    def _compiled(self, backwards: bool, tol: float):
        compiled = _passes()
        starts, P0 = self.starts()
        if self._in_the_start_alone:  # of the others that is zero
            y, c = (self.y - self.model.d)[np.newaxis], self.model.in_time["c"][np.newaxis]
        else:
            y, c = self.series()
        _, _, _, _, _, T, Z, H, W = compiled.arrays_of(self.y, self.model)
        arrays = (np.asarray(M, float) for M in (y, starts, c, P0, T, Z, H, W, self.precision))
        found = compiled.building.load("integrated").integrated(
            *arrays, backwards, *[backwards] * 4, float(tol)
        )
        if found[-1][0] < len(self.y):
            raise reference._not_positive_definite(int(found[-1][0]))
        return found

    def _told(self, direction) -> str:
        """What a direction of delta does, in words."""
        x = self.A @ direction
        if self.given["A"] is not None and np.abs(x).max() > 0:
            return _in_words(x)
        return "a column of zeros" if self._in_the_start_alone else "regressors alone"

    def _gathered(self, value, delta, root, y_bar, starts_bar, c_bar, gradients) -> Integrated:
        """The gradients of what was given, from those of the q + 1 series."""
        columns = {"X": None, "B": None}
        for x, bars in (("X", -y_bar), ("B", c_bar)):
            if self.given[x] is not None:
                bars = np.moveaxis(bars[1:], 0, -1)
                columns[x] = bars if getattr(self, x).ndim == 3 else bars.sum(axis=0)
        means = {"c": c_bar[0], "d": -y_bar[0]}
        varying = self.model.time_varying
        means = {x: X if x in varying else X.sum(axis=0) for x, X in means.items()}
        covariance, precision_bar = root @ root.T, None
        if not self.flat:
            inverse = np.linalg.inv(self.precision)
            precision_bar = (inverse - covariance - np.outer(delta, delta)) / 2
        return Integrated(
            value, y_bar[0], gradients._replace(a0=starts_bar[0], **means), starts_bar[1:].T,
            Estimate(delta, covariance - np.diag(self.room)), columns["X"], columns["B"],
            precision_bar,
        )  # fmt: skip


def _by_loop(columns: _Columns, gradient: bool):
    """The readable engine: what `_evaluate` returns, without the determinant of the precision."""
    (starts, P0), (y, c) = columns.starts(), columns.series()
    model, q, precision = without_mean(columns.model, P0=P0), columns.q, columns.precision
    delta = np.zeros(q)
    for again in (True, False):  # from where it starts, and then from near the mean of delta
        l, w = _forwards(y, starts, c, model)
        S = precision + np.einsum("npi,npj->ij", w[:, :, 1:], w[:, :, 1:])
        _refuse_unidentified(S.real, columns._told)
        left = -np.einsum("npi,np->i", w[:, :, 1:], w[:, :, 0]) - precision @ delta
        step = np.linalg.solve(S.real, left.real)
        if again:
            delta = delta + step
            y, starts, c = (
                np.concatenate([M[:1] + np.tensordot(step, M[1:], 1)[np.newaxis], M[1:]])
                for M in (y, starts, c)
            )
    # Complex arrays are for complex steps: this is analytic, with the centre held fixed.
    sign, logdet = np.linalg.slogdet(S)
    logdet = logdet if np.isrealobj(S) else logdet + np.log(sign)
    of_delta = left @ np.linalg.solve(S, left) - logdet - delta @ precision @ delta
    value = l + (of_delta - (w[:, :, 0] ** 2).sum()) / 2
    if not gradient:
        return (value,)
    # What the gradient is given delta is quadratic in delta, so 2 q points have its mean.
    root = np.linalg.inv(np.linalg.cholesky(S)).T
    apart = np.sqrt(q) * np.concatenate([root.T, -root.T])
    bars, slopes = [], np.empty((2 * q, q))
    for k, x in enumerate(apart):
        one, a0, move = (M[0] + np.tensordot(step + x, M[1:], 1) for M in (y, starts, c))
        given = replace(model, a0=a0, c=move if len(move) > 1 else move[0])
        _, dy, G = reference.loglike_and_grad(one, given)
        bars.append((dy, G.a0, G.c.reshape(move.shape), *G))
        slopes[k] = -precision @ (delta + step + x)
        for M, bar in zip((np.nan_to_num(y), starts, c), bars[-1], strict=False):
            slopes[k] += np.tensordot(M[1:], bar, bar.ndim)
    # They are weighted so that their mean is where the slope is zero to the last digit.
    delta = delta + step
    weights = (1 + apart @ slopes.mean(axis=0)) / (2 * q)
    back = weights * np.vstack([np.ones(2 * q), (delta + apart).T])
    bars = [np.array(X) for X in zip(*bars, strict=True)]
    y_bar, starts_bar, c_bar = (np.tensordot(back, X, 1) for X in bars[:3])
    gradients = Gradients(*(np.tensordot(weights, X, 1) for X in bars[3:]))
    return value, delta, root, y_bar, starts_bar, c_bar, gradients


def _forwards(y, starts, c, model: StateSpace):
    """The log-likelihood of a series without surprises, and w = C^-1 v (n, p, J) of J others.

    All have the gaps of y (J, n, p), starts (J, m) and c (J, 1 or n, m); `model` has no mean.
    """
    missing = np.isnan(y[0])
    l, (steps, _), filtered = reference._filter_in_parts(np.where(missing, np.nan, 0.0), model)
    gains = [(step.C_inv, step.Kf) for step in steps]
    gains += zip(filtered.C_inv, filtered.Kf, strict=True) if filtered else []
    T, Z = (model.over_time(x, len(l)) for x in "TZ")
    Z = np.where(missing[:, :, np.newaxis], 0, Z)
    y, c, a, w = np.where(missing, 0, y), c.swapaxes(0, 1), starts.T, []
    for t, gain in enumerate(gains):
        w_t, a_filt = update_columns(y[:, t].T, a, Z[t], *gain)
        w.append(w_t)
        a = T[t] @ a_filt + at_step(c, t).T
    return l.sum(), np.array(w)


def _of_the_mean(columns: _Columns) -> tuple[_Columns, float]:
    """What the marginal likelihood takes away: log|E'E|/2 as that of a series, and its constant.

    The same columns through a model in which all is certain but white noise of variance 1: there
    S = E'E, and a series of zeros has the log-likelihood -N/2 log(2 pi) - log|E'E|/2.
    """
    if not columns.flat:
        raise ValueError("the marginal likelihood is for a flat prior, but there is a precision")
    model = columns.model
    certain = without_mean(model, P0=0 * model.P0, H=np.eye(model.p), Q=0 * model.Q)
    zeros = np.where(columns.missing, np.nan, 0.0)
    seen = (~columns.missing).sum()
    constant = (seen - columns.q) / 2 * LOG_2PI
    return _Columns(zeros, certain, **columns.given, precision=None), constant


def without_mean(model: StateSpace, **more) -> StateSpace:
    """The model with a0 = c = d = 0, and what else is changed."""
    nothing = {"a0": 0 * model.a0, "c": np.zeros(model.m), "d": np.zeros(model.p)}
    return replace(model, **nothing | more)


def mean_variance(H, W, xp=np):
    """The mean of the variances in H (p, p) and W (m, m) that are positive, 1 if there is none."""
    variances = xp.concatenate([xp.diagonal(H), xp.diagonal(W)])
    positive = variances > 0
    mean = xp.where(positive, variances, 0).sum() / xp.maximum(positive.sum(), 1)
    return xp.where(mean > 0, mean, 1.0)


def room(A, Z, H, W, xp=np):
    """A variance (q,) for each diffuse number, so that no F is singular even where H = 0.

    P0 may have any on the span of A. This one is of the size of the model's other variances, or of
    what the first observation leaves of the number, if that is less: the covariance of delta is
    found up to the rounding of this variance, so it has to be small in the number's own units.
    A (m, q), Z (p, m), H (p, p), W (m, m), of the first step; ``xp`` is NumPy, or PyTensor.
    """
    noise = xp.diagonal(H) + ((Z @ W) * Z).sum(axis=1)
    seen = ((Z @ A) ** 2 / xp.where(noise > 0, noise, np.inf)[:, None]).sum(axis=0)
    precise = xp.maximum(seen, (A**2).sum(axis=0) / mean_variance(H, W, xp))
    return 1 / xp.where(precise > 0, precise, 1.0)


def first_room(A, model: StateSpace):
    """:func:`room` of a model."""
    return room(A.real, *first_variances(model))


def first_variances(model: StateSpace):
    """Z, H and W = R Q R' of the first step, real."""
    return tuple(model.in_time[x][0].real for x in "ZHW")


def _checked(name: str, M, shapes, most: int) -> np.ndarray:
    """A, X or B: numbers, of one of the shapes (rows) or (n, rows), and q columns."""
    M = _as_numbers(name, M)
    M = M.astype(np.result_type(M, float))
    if M.shape[:-1] not in shapes or not 0 < M.shape[-1] <= most:
        letters = {"A": "(m, q)", "X": "(p, q) or (n, p, q)", "B": "(m, q) or (n, m, q)"}[name]
        expected = " or ".join(f"({', '.join(map(str, rows))}, q)" for rows in shapes)
        raise ValueError(
            f"{name} has shape {M.shape}, expected {letters} = {expected} with q from 1 to {most}"
        )
    _check_finite(name, M)
    return M


def _checked_precision(precision, q: int) -> np.ndarray:
    precision = _as_numbers("precision", precision)
    if np.iscomplexobj(precision):
        raise ValueError("precision is complex, expected real numbers")
    precision = precision.astype(float)
    if precision.shape != (q, q):
        raise ValueError(f"precision has shape {precision.shape}, expected (q, q) = ({q}, {q})")
    _check_finite("precision", precision)
    _check_symmetric("precision", precision)
    precision = symmetric(precision)
    if not np.linalg.eigvalsh(precision)[0] > 0:
        raise ValueError("precision is not positive definite: for a flat prior leave it out")
    return precision


def _refuse_unidentified(S, told) -> None:
    """S is singular exactly where the data say nothing about a direction of delta."""
    size = np.sqrt(np.diag(S))
    blind = np.flatnonzero(~(size > 0))
    if len(blind):
        only = np.eye(len(S))[blind[0]]
        raise ValueError(
            f"the data say nothing about delta[{blind[0]}], {told(only)}: it reaches no observation"
        )
    values, vectors = np.linalg.eigh(S / size / size[:, np.newaxis])
    if values[0] <= len(S) * LEAST:
        direction = vectors[:, 0] / size
        direction /= np.abs(direction).max()
        direction[np.abs(direction) < 1e-6] = 0  # rounding
        raise ValueError(
            "the data say nothing about one direction of delta, "
            f"({', '.join(f'{x:.2g}' for x in direction)}): {told(direction)}"
        )


def _in_words(x) -> str:
    """A direction of the first state in words."""
    large = np.flatnonzero(np.abs(x) > 1e-6 * np.abs(x).max())
    named = ", ".join(f"{x[i]:.2g} of state {i}" for i in large[:6])
    return f"of the first state, {named}" + ", ..." * (len(large) > 6)
