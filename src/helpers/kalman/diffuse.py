r"""The start that nobody has to guess: likelihood and gradient with an exact diffuse initial state.

The first state is :math:`\alpha_1 = a_0 + A \delta + N(0, P_0)` with a :math:`\delta` (q,) of which
nothing is known.  For each :math:`\delta` the model is an ordinary one, and its likelihood is
quadratic in :math:`\delta`: so :math:`\delta` can be integrated out, exactly, and nothing is ever
large.  The columns of A go through the same covariance recursion as the state,

.. math::

   E_t = Z A_t , \quad A_{t+1} = T (A_t - K^f_t E_t) , \quad
   S = \sum_t E_t^\top F_t^{-1} E_t , \quad s = \sum_t E_t^\top u_t , \quad \hat\delta = S^{-1} s ,

and with :math:`\mathcal L` the likelihood that starts from :math:`a_0`,

.. math::

   \mathcal L_\text{diffuse} = \mathcal L + \tfrac12 s^\top \hat\delta - \tfrac12 \log |S| .

The gradient is the ordinary one, averaged over :math:`\delta \mid y \sim N(\hat\delta, S^{-1})`:
that of the pass which starts from :math:`a_0 + A \hat\delta`, and a rank-q term for each array.
No P0 is asked for on the diffuse states: any :math:`P_0 + A M A^\top` gives the same likelihood.
The variances there are put at the size of the model's others, so that F is never singular.

De Jong 1991 (The diffuse Kalman filter, Annals of Statistics 19, 1073-1083); Durbin and Koopman
2012 (Time Series Analysis by State Space Methods, 2nd ed.), sections 5.2 and 5.7.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from helpers.kalman import _fused, _takes_reference, reference
from helpers.kalman import hessian as hessians
from helpers.kalman import loglike_and_grad as with_known_start
from helpers.kalman.recursions import pull_columns, pull_spread, symmetric
from helpers.statespace import Gradients, StateSpace

__all__ = ["Estimate", "hessian", "loglike", "loglike_and_grad"]


class Estimate(NamedTuple):
    """What the data say about delta: its posterior under a flat prior.

    Parameters
    ----------
    mean : array (q,)
    covariance : array (q, q)
    """

    mean: np.ndarray
    covariance: np.ndarray


class _Column(NamedTuple):
    """What the way back needs of one step's columns."""

    w: np.ndarray  # (p, q), C^-1 Z A_t
    filtered: np.ndarray  # (m, q), A_t - Kf Z A_t


def loglike(y, model: StateSpace, A, method: str = "fused"):  # noqa: N803
    """Log-likelihood with the first state diffuse in the directions A.

    Parameters
    ----------
    y : array (n, p)
        NaN marks a gap.
    model : StateSpace
        Its a0 and P0 are those of the first state without delta; what they are on the span of A
        makes no difference.
    A : array (m, q)
        What delta adds to the first state: of full rank, and seen by the data. Columns of the
        identity where single states are diffuse. The value depends on its scale.
    method : "fused" or "reference"
        As :func:`helpers.kalman.loglike`; complex arrays take the reference.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If A does not fit the model, or the data leave a direction of delta open: the message says
        which.
    numpy.linalg.LinAlgError
        If F is not positive definite at some step.
    """
    return _Integrated(y, model, A, method).value


def loglike_and_grad(
    y,
    model: StateSpace,
    A,  # noqa: N803
    method: str = "fused",
) -> tuple[float, np.ndarray, Gradients, np.ndarray, Estimate]:
    """Log-likelihood, and its gradient with respect to everything.

    Parameters
    ----------
    y, model, A, method
        As :func:`loglike`; real.

    Returns
    -------
    value : float
    dy : array (n, p)
    gradients : Gradients
        As :func:`helpers.kalman.loglike_and_grad`.
    A_bar : array (m, q)
        The gradient with respect to A.
    estimate : Estimate
        The mean and the covariance of delta given the data.

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError
        As :func:`loglike`.
    """
    at = _Integrated(y, model, A, method)
    more, spread, rho = at.columns.pull(at.root, at.left, at.delta)
    gradients = Gradients(*(G + X for G, X in zip(at.gradients, spread, strict=True)))
    A_bar = np.outer(gradients.a0, at.delta) - rho @ at.root.T
    return at.value, at.dy + more, gradients, A_bar, at.estimate()


def hessian(
    y,
    model: StateSpace,
    A,  # noqa: N803
    directions: dict[str, np.ndarray],
    method: str = "fused",
) -> np.ndarray:
    r"""Second derivatives of the log-likelihood along pairs of directions.

    With :math:`\delta \mid y \sim N(\hat\delta, S^{-1})`, and :math:`\mathcal L(\delta)` the
    ordinary likelihood that starts from :math:`a_0 + A \delta`,

    .. math::

       \nabla^2 \mathcal L_\text{diffuse}
       = E\, \nabla^2 \mathcal L(\delta) + \operatorname{Cov} \nabla \mathcal L(\delta)

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
        As :func:`loglike`; and if a direction has an unknown name or a wrong shape.
    """
    at = _Integrated(y, model, A, method)
    root, q = at.root, len(at.root)
    directions = reference.check_directions(y, model, directions)
    k = len(next(iter(directions.values()), ()))
    # Beside the k directions, those in which a0 moves with delta.
    moves = {x: np.concatenate([X, np.zeros((q, *X.shape[1:]))]) for x, X in directions.items()}
    moves.setdefault("a0", np.zeros((k + q, model.m)))
    moves["a0"][k:] = (A @ root).T
    model = replace(model, P0=symmetric(model.P0) + at.room * A @ A.T)

    def seen_from(delta):
        return hessians.hessian(y, replace(model, a0=model.a0 + A @ delta), moves, method)

    centre, curved = seen_from(at.delta), np.empty((k, q, q))
    mean, slopes = centre[:k, :k].copy(), centre[:k, k:]
    for i, side in enumerate(root.T):
        ahead, behind = seen_from(at.delta + side), seen_from(at.delta - side)
        mean += (ahead + behind - 2 * centre)[:k, :k] / 2
        curved[:, :, i] = (ahead - behind)[:k, k:] / 2
    return mean + slopes @ slopes.T + np.einsum("iab,jba->ij", curved, curved) / 2


class _Integrated:
    """The columns forwards, and the ordinary pass that starts where delta is most likely."""

    def __init__(self, y, model: StateSpace, A, method):  # noqa: N803
        A = _checked(A, model)
        self.room = _room(model)
        model = replace(model, P0=symmetric(model.P0) + self.room * A @ A.T)
        loop = _takes_reference(y, model, method) or np.iscomplexobj(A)
        self.columns = columns = (_ColumnsInNumPy if loop else _Columns)(y, model, A)
        _refuse_unidentified(columns.S.real, A.real)
        if np.iscomplexobj(columns.S):
            self.value = columns.complex_value(y)
            return
        C = np.linalg.cholesky(columns.S)
        self.root = np.linalg.inv(C).T  # S^-1 = root root'
        self.delta = self.root @ (self.root.T @ columns.s)
        # From there: the distance between the start and the data costs digits with its square.
        centre = replace(model, a0=model.a0 + A @ self.delta)
        l, self.dy, self.gradients = with_known_start(y, centre, method, tol=0.0)
        # How far delta is from its mean, in standard deviations: rounding.
        self.left = left = self.root.T @ (A.T @ self.gradients.a0)
        self.value = float(l + left @ left / 2 - np.log(np.diag(C)).sum())

    def estimate(self) -> Estimate:
        """Without the room that P0 was given on the span of A, which is taken for noise in S."""
        return Estimate(self.delta, self.root @ self.root.T - self.room * np.eye(len(self.root)))


class _ColumnsInNumPy:
    """The columns of A through the filter and back, step by step: S (q, q) and s (q,)."""

    def __init__(self, y, model: StateSpace, A):  # noqa: N803
        self.model, self.A = model, A
        self.filtered = filtered = reference.kalman_filter(y, model)
        self.T = model.over_time("T", len(filtered.u))
        self.steps, self.S = [], np.zeros((A.shape[1], A.shape[1]))
        for t in range(len(self.T)):
            step = _Column(filtered.S[t] @ A, filtered.J[t] @ A)
            self.steps.append(step)
            self.S = self.S + step.w.T @ step.w
            A = self.T[t] @ step.filtered  # noqa: N806
        self.s = self.seen(filtered)

    def seen(self, filtered):
        """s: what the data say of delta, seen from where the filter started."""
        return sum(step.w.T @ w for step, w in zip(self.steps, filtered.w, strict=True))

    def complex_value(self, y):
        """The value for a complex step: symmetric, not Hermitian; and the centre is held fixed."""
        delta = np.linalg.solve(self.S, self.s).real
        centre = replace(self.model, a0=self.model.a0 + self.A @ delta)
        filtered = reference.kalman_filter(y, centre)
        s = self.seen(filtered)
        sign, logdet = np.linalg.slogdet(self.S)
        more = s @ np.linalg.solve(self.S, s) - np.log(sign) - logdet
        return filtered.out.l.sum() + more / 2

    def pull(self, root, left, delta):
        """What the spread of delta around the centre adds to the gradients, from the last step on.

        And what is `left` between the centre and the mean of delta: rounding, which a high level
        would magnify. Returns the parts of dy and of the model's gradients, and rho_0 times the
        root of S^-1 (m, q).
        """
        filtered, per_step = self.filtered, []
        rho = np.zeros((self.model.m, len(root)))
        for t in reversed(range(len(self.T))):
            w, A_filt = self.steps[t]
            eE, aE, rho_before = pull_columns(
                rho, self.T[t], w @ root, filtered.C_inv[t], filtered.S[t], filtered.Kf[t],
                filtered.J[t], filtered.out.P_filt[t], A_filt @ root,
            )  # fmt: skip
            a_filt = filtered.out.a_filt[t] + A_filt @ delta
            per_step.append(reference.StepGradients(*pull_spread(rho, eE, aE, a_filt, left)))
            rho = rho_before
        more, spread = reference._accumulate(
            self.model, -rho @ left, rho @ rho.T / 2, per_step[::-1], filtered.observed
        )
        return more, spread, rho


class _Columns:
    """The same, compiled."""

    def __init__(self, y, model: StateSpace, A):  # noqa: N803
        self.model, self.fused = model, _fused()
        self.arrays, self.code = self.fused.arrays_of(y, model), self.fused.building.load("columns")
        self.S, self.s, l, self.kept = self.code.forward(*self.arrays, A)
        if np.isnan(l).any():
            raise reference._not_positive_definite(int(np.isnan(l).argmax()))

    def pull(self, root, left, delta):
        """As :meth:`_ColumnsInNumPy.pull`."""
        out, more, rho = self.code.backward(*self.arrays[1:], self.kept, root, left, delta)
        return more, self.fused.gradients_of(self.model, out, len(more)), rho


def _room(model: StateSpace) -> float:
    """A variance of the size of the model's others, for the diffuse states."""
    first = {x: X[0] if x in model.time_varying else X for x, X in model.asdict().items()}
    W = first["R"] @ first["Q"] @ first["R"].T
    variances = np.concatenate([np.diag(first["H"]), np.diag(W)]).real
    variances = variances[variances > 0]
    return float(variances.mean()) if len(variances) else 1.0


def _checked(A, model: StateSpace) -> np.ndarray:  # noqa: N803
    A = np.asarray(A)
    if A.dtype.kind not in "fciu":
        raise ValueError(f"A has type {A.dtype}, expected numbers")
    A = A.astype(np.result_type(A, float))
    if A.ndim != 2 or len(A) != model.m or not 0 < A.shape[1] <= model.m:
        raise ValueError(
            f"A has shape {A.shape}, expected (m, q) = ({model.m}, q) with q from 1 to {model.m}"
        )
    if not np.isfinite(A).all():
        raise ValueError("A is not finite")
    return A


def _refuse_unidentified(S, A) -> None:  # noqa: N803
    """S is singular exactly where the data say nothing about a direction of delta."""
    size = np.sqrt(np.diag(S))
    blind = np.flatnonzero(~(size > 0))
    if len(blind):
        raise ValueError(
            f"the data say nothing about delta[{blind[0]}]: column {blind[0]} of A, "
            f"{_told(A[:, blind[0]])}, reaches no observation"
        )
    values, vectors = np.linalg.eigh(S / size / size[:, np.newaxis])
    if values[0] <= len(S) * 1e-12:
        direction = vectors[:, 0] / size
        direction = direction / np.abs(direction).max()
        raise ValueError(
            "the data say nothing about one direction of delta, "
            f"({', '.join(f'{x:.2g}' for x in direction)}): of the first state, "
            f"{_told(A @ direction)}"
        )


def _told(x) -> str:
    """A direction of the state in words."""
    named = [f"{x[i]:.2g} of state {i}" for i in np.flatnonzero(np.abs(x) > 1e-6 * np.abs(x).max())]
    return ", ".join(named[:6]) + (", ..." if len(named) > 6 else "")
