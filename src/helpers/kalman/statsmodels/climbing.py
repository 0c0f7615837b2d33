"""Newton's steps to a maximum, and what second derivatives say of an end."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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
NEAR, AS_SAID, SLIGHT = 2.0, 0.3, 1e-3

# A climb is on a ridge where so many steps gain less than so much in all, and what is left to gain
# is still more than this share of what it was before them: it would go on for hundreds.
SLOW, SAME, SHARE = 10, 0.01, 0.25

# Newton's steps in a row that are turned back, each a quarter of the last, before they end.
TURNED_BACK = 20


class Climb(NamedTuple):
    """Where :func:`climb` ended: the units are those in which the likelihood curves by one."""

    x: np.ndarray
    value: float
    slope: np.ndarray
    curvature: np.ndarray
    units: np.ndarray
    steps: int
    evaluations: int
    converged: bool

    def leads_here(self, x: np.ndarray, value: float) -> bool:
        """Whether the likelihood at x is what the quadratic around this end says of it: whoever
        climbs from there ends here."""
        lower = (x - self.x) @ self.curvature @ (x - self.x) / 2
        said = abs(self.value - value - lower) < AS_SAID * abs(lower) + SLIGHT
        return -SLIGHT < lower < NEAR and said


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
        Of x (k,): the value, and the slope (k,). A value that is not finite turns a step back.
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
        if not np.isfinite(B).all():
            break
        curved, directions = np.linalg.eigh(B / units / units[:, np.newaxis])
        along = directions.T @ (slope / units)
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
            share = (reached - value) / (along @ step - curved @ step**2 / 2)
            if best and not reached > best[1]:
                break
            if share > LEAST:
                best = there, reached, slope_there
            size = np.linalg.norm(step)
            if share > POOR and size > 0.99 * radius:
                radius = 3 * size  # a value costs less than a matrix: as far as this one goes
                continue
            radius = size if share > POOR else size / 4
            if best:
                break
        if not best:
            break
        x, value, slope = best
        steps += 1
        if callback:
            callback(x)
        # Where the slope has gone as B said it would, no new B is needed.
        converged = _to_gain(curved, directions.T @ (slope / units)) <= GAIN / 10
        if converged:
            break
    return Climb(x, value, slope, B, units, steps, evaluations, converged)


def _to_gain(curved: np.ndarray, along: np.ndarray) -> float:
    """What is left to gain, in the eigenvectors of B: by a full step, or by one of length 1."""
    step = np.divide(along, curved, out=np.copysign(1.0, along), where=curved > np.abs(along))
    return float(along @ step - curved @ step**2 / 2)


def _step(curved: np.ndarray, along: np.ndarray, radius: float) -> np.ndarray:
    """The best step within a ball, in the eigenvectors of B, whose eigenvalues ascend."""

    def at(shift):
        return along / (curved + shift)

    if curved[0] > 0 and np.linalg.norm(at(0)) <= radius:
        return at(0)
    least = max(0.0, -curved[0]) + 1e-12 * max(np.abs(curved).max(), 1e-300)
    step = at(least)
    size = np.linalg.norm(step)
    if size < radius:  # the slope has no part along the direction that curves upwards
        step[0] += np.copysign(np.sqrt(radius**2 - size**2), along[0])
        return step
    most = least + 1.1 * np.linalg.norm(along) / radius
    return at(brentq(lambda x: np.linalg.norm(at(x)) - radius, least, most, rtol=1e-3))
