r"""Maximum likelihood for many series, each with parameters of its own, all at once.

One optimiser climbs in the rows of arrays: parameters (J, k), values (J,), slopes (J, k). A round
evaluates one trial point of every series that has not converged, in one call
(:mod:`helpers.kalman.panel`), and a series whose trial is no better tries a shorter step in the
next round. The steps are those of BFGS (Nocedal and Wright 2006, Numerical Optimization, 2nd ed.,
equations 6.17 and 6.20, doi:10.1007/978-0-387-40065-5), with minus the log-likelihood for f:

.. math::

   x_{+} &= x - \alpha B g , \\
   B_{+} &= (I - \rho s y^\top) B (I - \rho y s^\top) \\
   &\quad + \rho s s^\top , \quad \rho = 1 / y^\top s .

What a full step may still gain, :math:`g^\top B g / 2`, decides when a climb is over. But B says
nothing about directions in which the climb never went. So the curvature is first measured by
differences of slopes, and where a Newton step would gain more, the climb goes on with it. Where the
likelihood curves the other way, at a saddle or a minimum, whose slope may be zero, it leaves along
that axis.

The chain from the model's arrays to the parameters is exact: the derivative of the arrays along
each parameter is a complex step of the function that makes them.

>>> import numpy as np
>>> from helpers.kalman import StateSpace
>>> from helpers.kalman.panel_fit import fit
>>> def local_level(theta):
...     variances = np.exp(theta)[:, :, np.newaxis, np.newaxis]
...     return {"H": variances[:, 0], "Q": variances[:, 1]}
>>> one, rng = np.eye(1), np.random.default_rng(0)
>>> walk = StateSpace([0.0], one, [0.0], [0.0], T=one, Z=one, R=one, H=one, Q=one)
>>> Y = rng.normal(size=(20, 50, 1)).cumsum(axis=1) + rng.normal(size=(20, 50, 1))
>>> fits = fit(Y, walk, local_level, [0.0, 0.0])
>>> fits.params.shape, bool(fits.converged.all())
((20, 2), True)
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable

import numpy as np

from helpers.kalman import panel
from helpers.kalman.recursions import TOLERANCE
from helpers.statespace import SHAPES, StateSpace, _as_numbers, check_tolerance

__all__ = ["Fits", "fit"]

# The log-likelihood that a full step may still gain where a series has arrived.
GAIN = 1e-8
# A step is taken if it gains at least this share of what the slope promises (Armijo).
SHARE = 1e-4
# No parameter moves further in one step: those of a logarithm would overflow.
LONGEST = 3.0
# A step that would have to be shorter than this share of a full one is given up.
SHORTEST = 1e-12
# How far slopes are taken apart to see the curvature: a share of a standard deviation as B has it,
# within these shares of the parameter or of one.
APART, SHARES = 1e-3, (1e-7, 1e-4)
# How far the complex step goes: its error is its square.
STEP = 1e-30


class Fits(namedtuple("Fits", "params value slope evaluations converged message")):
    """Where the series' climbs ended.

    Parameters
    ----------
    params : array (J, k)
    value : array (J,)
        The log-likelihoods; NaN of series that could not be evaluated at the start.
    slope : array (J, k)
    evaluations : array (J,) of int
    converged : array (J,) of bool
    message : array (J,) of str
        What went wrong; empty where a fit has converged.
    """

    @property
    def failed(self) -> dict[int, str]:
        """What went wrong, by the number of the series."""
        return {int(j): str(self.message[j]) for j in np.flatnonzero(~self.converged)}


def fit(
    Y, model: StateSpace, arrays: Callable, start, *, most: int = 200, gain: float = GAIN,
    tol: float = TOLERANCE, threads: int | None = None,
) -> Fits:  # fmt: skip
    """Fit every series by maximum likelihood.

    A series that cannot be fitted does not stop the others: `Fits.message` says why.

    Parameters
    ----------
    Y : array (J, n, p), or list of J arrays (n_j, p)
        NaN marks a gap.
    model : StateSpace
        What is not a function of the parameters.
    arrays : function
        Of theta (J, k): a dict of those of a0, P0, c, d, T, Z, R, H and Q that parameters enter,
        each with a first axis for the series. Any number of rows, real or complex: row j may depend
        on row j alone, by functions that are analytic (no abs, no maximum).
    start : array (k,) or (J, k)
    most : int
        Rounds.
    gain : float
        What a full step must gain for a climb to go on; where none does, a Newton step.
    tol, threads
        As :func:`helpers.kalman.panel.loglike_and_grad`.

    Returns
    -------
    Fits

    Raises
    ------
    ValueError
        If Y and the model, the start or what `arrays` returns do not fit each other, or `most` is
        no number of rounds, or `tol` none that :func:`helpers.kalman.panel.loglike` takes.
    MemoryError, ImportError
        As :func:`helpers.kalman.panel.loglike_and_grad`.
    """
    y, lengths = panel._stacked(Y, model)
    panel._refuse_lengths(y.shape[1], model, lengths)
    panel._check_threads(threads)
    tol = check_tolerance(tol)
    if not isinstance(most, int | np.integer) or most < 0:
        raise ValueError(f"most is {most!r}, expected a number of rounds")
    J = len(y)
    x = _checked_start(start, J)
    likelihood = _Likelihood(y, model, arrays, tol, threads)
    likelihood.check(x)
    message = np.full(J, "", dtype=object)
    message[~likelihood.observed.any(axis=(1, 2))] = "the series has no observation at all"
    message[np.isinf(y).any(axis=(1, 2))] = "the series is infinite somewhere; NaN marks a gap"
    k = x.shape[1]
    f, g, evaluations = np.full(J, np.nan), np.full((J, k), np.nan), np.zeros(J, int)
    active = np.flatnonzero(message == "")
    f[active], g[active], message[active] = likelihood(x[active], active)
    evaluations[active] = 1
    f[np.isinf(f)] = np.nan
    active = active[np.isfinite(f[active])]
    arrived, converged, scaled = np.zeros((3, J), bool)
    B, alpha = np.zeros((J, k, k)), np.ones(J)
    B[active] = np.eye(k) / np.maximum(_length(g[active]), 1e-300)[:, None, None]

    def not_there():
        """Those that have arrived by what B says, and have not by the curvature."""
        unsure = np.flatnonzero(arrived & ~converged)
        more, bend, axis = _see_curvature(likelihood, x, g, B, unsure)
        evaluations[unsure] += k
        there, seen = more <= gain, np.isfinite(bend)
        message[unsure[there & ~seen]] = "the curvature is not finite where the slope is zero"
        left = leave(unsure[there & seen], bend[there & seen], axis[there & seen])
        there[there & seen] = ~left
        converged[unsure[there & seen]] = True
        arrived[unsure], scaled[unsure] = there, True
        return unsure[~there]

    def leave(members, bend, axis):
        """Which of those leave a point along an axis with this curvature, as it is no minimum."""
        left, step = np.zeros(len(members), bool), LONGEST
        while (open := np.flatnonzero(~left & (-bend * step**2 / 2 > gain))).size:
            j = members[open]
            there, slope, _ = likelihood(x[j] + step * axis[open], j)
            evaluations[j] += 1
            better = f[j] - there > np.maximum(gain, 1e-12 * np.abs(f[j]))
            moved = j[better]
            x[moved] += step * axis[open[better]]
            f[moved], g[moved], left[open[better]] = there[better], slope[better], True
            step /= 4
        return left

    for _ in range(most):
        if not len(active) and not len(active := not_there()):
            break
        s = -np.einsum("jab,jb->ja", B[active], g[active])
        s *= np.minimum(1, LONGEST / np.maximum(np.abs(s).max(axis=1), 1e-300))[:, None]
        s *= alpha[active, None]
        there, slope, _ = likelihood(x[active] + s, active)
        evaluations[active] += 1
        along = (g[active] * s).sum(axis=1)
        with np.errstate(invalid="ignore"):
            taken = there <= f[active] + SHARE * along + 1e-15 * np.abs(f[active])
        alpha[active[~taken]] /= 4
        j, s, change = active[taken], s[taken], slope[taken] - g[active[taken]]
        x[j], f[j], g[j], alpha[j] = x[j] + s, there[taken], slope[taken], 1.0
        _update(B, scaled, j, s, change)
        promised = np.einsum("ja,jab,jb->j", g[active], B[active], g[active]) / 2
        arrived[active] = (promised <= gain) & taken
        stuck = ~taken & (alpha[active] < SHORTEST)
        message[active[stuck]] = "no step along the slope is better"
        active = active[~arrived[active] & ~stuck]
    not_there()
    message[(message == "") & ~converged] = f"not converged after {most} rounds"
    return Fits(x, -f, -g, evaluations, converged, message.astype(str))


def _see_curvature(likelihood, x, g, B, members):
    """What a Newton step would gain, the least curvature and its axis downhill, by series.

    B becomes the inverse of the curvature. Downwards, or where next to nothing bends, the longest
    step counts. The least curvature is NaN where the curvature is not finite.
    """
    x, g, k = x[members], g[members], x.shape[1]
    deviation = APART * np.sqrt(np.abs(np.diagonal(B[members], axis1=1, axis2=2)))
    apart = np.clip(deviation, *(share * np.maximum(1, np.abs(x)) for share in SHARES))
    curvature = np.zeros((len(members), k, k))
    for i in range(k):
        moved = x.copy()
        moved[:, i] += apart[:, i]
        _, slope, _ = likelihood(moved, members)
        curvature[:, i] = (slope - g) / (moved - x)[:, i, None]
    seen = np.isfinite(curvature).all(axis=(1, 2))
    curvature = np.where(np.isfinite(curvature), curvature, 0)
    bend, axes = np.linalg.eigh((curvature + curvature.mT) / 2)
    along = np.einsum("jab,ja->jb", axes, g)
    least = np.where(seen, bend[:, 0], np.nan)
    axis = axes[:, :, 0] * np.where(along[:, :1] > 0, -1, 1)
    along = np.abs(along)
    bend = np.maximum(np.maximum(np.abs(bend), along / LONGEST), 1e-300)
    B[members] = np.einsum("jac,jc,jbc->jab", axes, 1 / bend, axes)
    return (along**2 / bend).sum(axis=1) / 2, least, axis


def _update(B, scaled, j, s, change) -> None:
    """B of the series j from their steps s and the changes of their slopes."""
    curved = (s * change).sum(axis=1)
    bends = curved > 1e-10 * _length(s) * _length(change)
    B[j[~bends]] *= 4  # downwards or straight: further next time
    j, s, change, curved = j[bends], s[bends], change[bends], curved[bends, None, None]
    first, I = ~scaled[j], np.eye(s.shape[1])
    B[j[first]] = curved[first] / (change[first] ** 2).sum(axis=1)[:, None, None] * I
    scaled[j] = True
    left = I - s[:, :, None] * change[:, None, :] / curved
    B[j] = left @ B[j] @ np.swapaxes(left, 1, 2) + s[:, :, None] * s[:, None, :] / curved


class _Likelihood:
    """Minus the log-likelihoods of some series and their slopes."""

    def __init__(self, y, model, arrays, tol, threads):
        self.y, self.model, self.arrays = y, model, arrays
        self.tol, self.threads = tol, threads
        self.shapes = {}  # of what `arrays` gives for one series, known once it is checked
        self.observed = ~np.isnan(y)
        self.ends = panel._ends(self.observed)

    def check(self, x) -> None:
        """Whether `arrays` gives what it should."""
        own = {name: np.where(np.isfinite(X), X, 0) for name, X in self._own(x).items()}
        panel._with_own(self.model, own, *self.y.shape[:2])
        self.shapes = {name: X.shape[1:] for name, X in own.items()}
        moved = self._own(x + 1j * STEP)
        real = [name for name in moved if not np.iscomplexobj(moved[name])]
        if real:
            raise ValueError(
                f"arrays(theta)[{real[0]!r}] is real where theta is complex: write it with "
                "functions that take complex numbers, and leave out what does not vary"
            )

    def _own(self, x) -> dict:
        own = self.arrays(x)
        if not isinstance(own, dict) or not own:
            raise ValueError(f"arrays(theta) is {own!r}, expected a dict of arrays of the model")
        try:
            own = panel._named(own)
        except TypeError as error:
            raise ValueError(f"arrays(theta): {error}") from None
        for name, X in own.items():
            own[name] = X = _as_numbers(f"arrays(theta)[{name!r}]", X)
            expected = (len(x), *self.shapes.get(name, X.shape[1:]))
            if X.shape != expected:
                raise ValueError(
                    f"arrays(theta)[{name!r}] has shape {X.shape} where theta has {len(x)} rows, "
                    f"expected {expected}"
                )
        return own

    def __call__(self, x, members):
        if not len(members):
            return np.zeros(0), np.zeros(x.shape), []
        with np.errstate(all="ignore"):
            own = self._own(x)
            J, n = len(members), self.y.shape[1]
            arrays = {name: X[np.newaxis] for name, X in self.model.asdict().items()} | own
            varying = tuple(x for x, X in arrays.items() if X.ndim - 1 > len(SHAPES[x]))
            given = panel._Given(self.y[members], self.ends[members], arrays, varying)
            l, failed, _, bars = panel._own(given, self.tol, True, self.threads)
            slope = np.zeros(x.shape)
            for i, unit in enumerate(np.eye(x.shape[1])):
                for name, X in self._own(x + 1j * STEP * unit).items():
                    terms = bars[name] * (X.imag / STEP)
                    slope[:, i] += terms.reshape(J, -1).sum(axis=1)
        good = np.isfinite(l) & np.isfinite(slope).all(axis=1)
        why = [
            "" if fine else f"F is not positive definite at step {t} at the start" if 0 <= t < n
            else "the likelihood or its slope is not finite at the start"
            for fine, t in zip(good, failed, strict=True)
        ]  # fmt: skip
        return np.where(good, -l, np.inf), np.where(good[:, None], -slope, np.nan), why


def _length(X):
    return np.sqrt((X**2).sum(axis=1))


def _checked_start(start, J: int) -> np.ndarray:
    start = _as_numbers("start", start)
    if start.ndim not in (1, 2) or start.shape[-1:] == (0,) or start.shape[:-1] not in ((), (J,)):
        raise ValueError(f"start has shape {start.shape}, expected (k,) or (J, k) = ({J}, k)")
    if np.iscomplexobj(start) or not np.isfinite(start).all():
        raise ValueError("start is not finite and real")
    return np.array(np.broadcast_to(start, (J, start.shape[-1])), dtype=float)
