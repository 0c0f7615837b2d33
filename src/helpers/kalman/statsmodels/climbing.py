"""Newton's steps to a maximum, and what second derivatives say of an end."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq

__all__ = ["Climb", "climb"]

# The log-likelihood that a step may still gain where a fit ends: a distance from the maximum of
# 1e-4 standard errors, far within what the data can tell.  And its share that is rounding.
GAIN, ROUNDING = 1e-8, 1e-12

# Shares of the gain that a step of Newton's promised: below the first it is turned back, below the
# second the next one is shorter, above it longer.
LEAST, POOR = 1e-4, 0.25

# A climb leads to a maximum that is known where it is lower by less than the first, in
# log-likelihood, and by what a quadratic says but for the second, a share, and the third.
NEAR, AS_SAID, SLIGHT = 0.1, 0.3, 1e-3

# Where the log-likelihood changes by less than this over the whole of what a parameter may be, the
# data say nothing about it.
FLAT = 1e-6

# An eigenvalue of an information matrix, its diagonal scaled to ones, that counts as zero: that of
# a parameter without effect comes out as 1e-13 or so, and one of 1e-9 still has a digit or two.
SINGULAR = 1e-11

# A climb is on a ridge where so many steps gain less than so much in all, and what is left to gain
# is still more than this share of what it was before them: it would go on for hundreds.
SLOW, SAME, SHARE = 10, 0.01, 0.25

# A number beyond this is none: its square would overflow, and with it a length.
LARGEST = 1e100

# Newton's steps in a row that are turned back, each a quarter of the last, before they end.
TURNED_BACK = 20


class Climb(namedtuple("Climb", "x value slope curvature units steps evaluations converged")):
    """Where :func:`climb` ended: the units are those in which the likelihood curves by one."""

    def flat_from(self, x: np.ndarray) -> np.ndarray:
        """Of which parameters the quadratic says nothing between here and x."""
        return flat(self.curvature, np.maximum(np.abs(x), np.abs(self.x)))

    def on_the_ridge(self, nearly: float) -> np.ndarray | None:
        """Where a step more across it leads, if an eigenvalue is nearly zero."""
        quadratic = _eigen(self.curvature, self.slope, self.units)
        if quadratic is None or not np.abs(quadratic[1]).min(initial=1) < nearly:
            return None
        directions, curved, along = quadratic
        step = np.divide(along, curved, out=np.zeros_like(along), where=np.abs(curved) > nearly)
        return self.x + directions @ step / self.units

    def leads_here(self, x: np.ndarray, trial: Callable) -> bool:
        """Whether the likelihood at x, and what its slope there says is left to gain, are what the
        quadratic around this end says of them: whoever climbs from there ends here."""
        lower = (x - self.x) @ self.curvature @ (x - self.x) / 2
        if not -SLIGHT < lower < NEAR or self.flat_from(x).any():
            return False
        value, slope = trial(x)
        quadratic = _eigen(self.curvature, slope, self.units)
        if quadratic is None:
            return False
        said = np.array([self.value - value, _to_gain(*quadratic[1:])])
        return bool((np.abs(said - lower) < AS_SAID * abs(lower) + SLIGHT).all())


def flat(curvature: np.ndarray, x: np.ndarray) -> np.ndarray:
    """On which parameters of these sizes (k,) the likelihood does not depend."""
    return np.abs(np.diag(curvature)) * np.maximum(1.0, np.abs(x)) ** 2 < FLAT


def flat_combination(curvature: np.ndarray, x: np.ndarray) -> np.ndarray | None:
    """A direction (k,) in which the likelihood does not change by a step as long as x is, if
    there is one."""
    units = np.sqrt(np.abs(np.diag(curvature)))
    units = np.where(units > 0, units, 1.0)
    curved, directions = np.linalg.eigh(curvature / units / units[:, np.newaxis])
    least = np.abs(curved).argmin()
    step = directions[:, least] / units
    step = step / np.max(np.abs(step) / np.maximum(1.0, np.abs(x)))
    lost = np.abs(curved[least]) < SINGULAR
    return step if lost or np.abs(curved[least]) * np.sum((step * units) ** 2) < FLAT else None


def climb(
    trial: Callable, curvature: Callable, x: np.ndarray, most: int, callback: Callable | None = None
) -> Climb:
    r"""Newton's steps, within a region in which the likelihood has been like its quadratic.

    The step is the best one for :math:`g^\top p - \tfrac12 p^\top B p` with :math:`|p| \le \rho`
    (Moré and Sorensen, 1983, Computing a trust region step, SIAM Journal on Scientific and
    Statistical Computing 4, 553-572), in units that make the diagonal of B one, and from the
    eigenvectors of B: there are few parameters.  SciPy's "trust-exact" takes a B for each trial
    that is turned back, has no units and does not leave a saddle.

    Parameters
    ----------
    trial : function
        Of x (k,): the value, and the slope (k,). One that is not finite turns a step back.
    curvature : function
        Of x: B (k, k), minus the second derivatives, definite or not; NaN where there are none.
    x : array (k,)
        The start.
    most : int
        Steps; with none, the climb says whether x is a maximum.
    callback : function, optional
        Called with x after each step.

    Returns
    -------
    Climb
        Converged if no step gains more than `GAIN` by what B says: a full one, or one of length 1
        where the quadratic is flat or curves upwards.  It ends elsewhere after `most` steps, or on
        a ridge along which they gain next to nothing.
    """
    (value, slope), radius, steps, evaluations, past = trial(x), None, 0, 1, []
    while True:
        B, converged = curvature(x), False
        units = np.sqrt(np.abs(np.diag(B)))
        units = np.where((units > 0) & np.isfinite(units), units, 1.0)
        quadratic = _eigen(B, slope, units)
        if quadratic is None:
            break
        directions, curved, along = quadratic
        left = _to_gain(curved, along)
        converged = left <= max(GAIN, ROUNDING * abs(value))
        past.append((value, left))
        before, was_left = past[-SLOW - 1] if len(past) > SLOW else (-np.inf, 0.0)
        on_a_ridge = value - before < SAME and left > SHARE * was_left
        if converged or steps == most or on_a_ridge:
            break
        radius, best = radius or np.linalg.norm(along) or 1.0, None
        for _ in range(TURNED_BACK):
            step = _step(curved, along, radius)
            there = x + directions @ step / units
            reached, slope_there = trial(there)
            evaluations += 1
            if not (np.isfinite(reached) and np.isfinite(slope_there).all()):
                reached = -np.inf
            share = (reached - value) / (along @ step - curved @ step**2 / 2)
            if best and not reached > best[1]:
                break
            if share > LEAST:
                best = there, reached, slope_there
            size = np.linalg.norm(step)
            if share > POOR and size > 0.99 * radius:
                # A value costs less than a matrix: as far as it goes.
                radius = min(3 * size, LARGEST)
                continue
            radius = size if share > POOR else size / 4
            if best:
                break
        if not best:
            break
        (x, value, slope), steps = best, steps + 1
        if callback:
            callback(x)
        # Where the slope has gone as B said it would, no new B is needed.
        converged = _to_gain(curved, directions.T @ (slope / units)) <= GAIN / 10
        if converged:
            break
    return Climb(x, value, slope, B, units, steps, evaluations, converged)


def _eigen(B: np.ndarray, slope: np.ndarray, units: np.ndarray):
    """The eigenvectors and eigenvalues of B in these units, and the slope along them, if finite."""
    with np.errstate(all="ignore"):
        scaled, in_units = B / units / units[:, np.newaxis], slope / units
    if not np.abs([*scaled.flat, *in_units]).max(initial=0) < LARGEST:
        return None
    curved, directions = np.linalg.eigh(scaled)
    return directions, curved, directions.T @ in_units


def _to_gain(curved: np.ndarray, along: np.ndarray) -> float:
    """What is left to gain, in the eigenvectors of B: by a full step, or by one of length 1."""
    step = np.divide(along, curved, out=np.copysign(1.0, along), where=curved > np.abs(along))
    return float(along @ step - curved @ step**2 / 2)


def _step(curved: np.ndarray, along: np.ndarray, radius: float) -> np.ndarray:
    """The best step within a ball, in the eigenvectors of B, whose eigenvalues ascend."""
    room = curved - min(0.0, curved[0])  # by so much the shift is beyond the least that there is

    def at(shift):
        return along / (room + shift)

    if curved[0] > 0 and np.linalg.norm(at(0)) <= radius:
        return at(0)
    least = 1e-12 * max(np.abs(curved).max(), 1e-300)
    step = at(least)
    size = np.linalg.norm(step)
    if size < radius:  # the slope has no part along the direction that curves upwards
        step[0] += np.copysign(np.sqrt(radius**2 - size**2), along[0])
        return step
    most = least + 2 * np.linalg.norm(along) / radius
    return at(brentq(lambda x: np.linalg.norm(at(x)) - radius, least, most, rtol=1e-3))
