r"""Maximisation with second derivatives: steps within a region in which a quadratic is trusted.

At each point the function is taken for a quadratic,
:math:`\mathcal L + g^\top p - \tfrac12 p^\top B p`, and the step p goes to its maximum among those
with :math:`|D p| \le \rho`.  D has the roots of the diagonal of B, so the units of the parameters
do not matter; :math:`\rho` grows where the quadratic predicts well and shrinks where it does not.
B is minus the Hessian (Newton), or the expected information (Fisher scoring).

Near the maximum a step of scoring leaves the part :math:`I - \mathcal I^{-1} B` of the error, and
where observed and expected information differ that can be more than half of it.  So scoring here
learns the difference A = B - I from the gradients it meets, by a symmetric update of rank one, and
steps with I + A: the structured secant method of Dennis, Gay and Welsch (1981, An adaptive
nonlinear least-squares algorithm, ACM Transactions on Mathematical Software 7, 348-368), with a
likelihood in the place of a sum of squares.

The step is that of Moré and Sorensen (1983, Computing a trust region step, SIAM Journal on
Scientific and Statistical Computing 4, 553-572), from the eigenvectors of B: there are few
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

__all__ = ["Climb", "climb"]

# Shares of the predicted gain: below the first a step is not taken, below the second the region
# shrinks, above it the next step from the same point goes further.
LEAST, POOR = 1e-4, 0.25

# The log-likelihood that a full step may still gain where a climb ends. A distance from the maximum
# of 1e-4 standard errors, so far within what the data can tell.
GAIN = 1e-8


class Climb(NamedTuple):
    """Where a climb ended.

    Parameters
    ----------
    x : array (k,)
    value : float
    slope : array (k,)
    curvature : array (k, k)
        The last B.
    steps : int
        From one point to a higher one.
    evaluations : int
        The number of values, and of slopes.
    converged : bool
        Whether a further step would gain less than was asked for.
    """

    x: np.ndarray
    value: float
    slope: np.ndarray
    curvature: np.ndarray
    steps: int
    evaluations: int
    converged: bool


def climb(
    function: Callable,
    curvature: Callable,
    x: np.ndarray,
    *,
    most: int = 100,
    gain: float = GAIN,
    secant: bool = False,
    callback: Callable | None = None,
) -> Climb:
    """Climb to a maximum.

    Parameters
    ----------
    function : function
        Of x (k,): the value, and the slope (k,). A value that is not finite turns a step back.
    curvature : function
        Of x: B (k, k), symmetric, definite or not.
    x : array (k,)
        The start.
    most : int
        Steps; with none, the climb says whether x is a maximum.
    gain : float
        What a step must gain for the climb to go on: a full one, or one of length 1 in the scaled
        parameters where the quadratic is flat, or curves upwards.
    secant : bool
        Correct B by what the slopes say of it: for an information matrix.
    callback : function, optional
        Called with x after each step.

    Returns
    -------
    Climb

    Raises
    ------
    ValueError
        If the value at the start is not finite.
    """
    value, slope = function(x)
    if not np.isfinite(value):
        raise ValueError("the likelihood is not finite at the starting values")
    extra, radius, evaluations, steps = np.zeros((len(x), len(x))), None, 1, 0
    given = curvature(x)
    while True:
        B = given + extra

        def ended(converged: bool) -> Climb:
            return Climb(x, value, slope, B, steps, evaluations, bool(converged))  # noqa: B023

        if not np.isfinite(B).all():  # at the edge of where the function is smooth
            return ended(False)
        scales = np.sqrt(np.abs(np.diag(B)))
        scales[scales == 0] = 1.0
        values, vectors = np.linalg.eigh(B / scales / scales[:, np.newaxis])
        along = vectors.T @ (slope / scales)
        if radius is None:
            radius = np.linalg.norm(along) or 1.0  # a saddle is left all the same
        floor = 1e-14 * abs(value)
        to_gain = _gain(values, along, _step(values, along, 1.0))
        if to_gain <= max(gain, floor) or steps == most:
            return ended(to_gain <= max(gain, floor))
        best, whole = None, np.linalg.norm(along / values) if values[0] > 0 else np.inf
        while True:
            inner = _step(values, along, radius)
            move = vectors @ inner / scales
            predicted = _gain(values, along, inner)
            there, slope_there = function(x + move)
            evaluations += 1
            share = (there - value) / predicted if np.isfinite(there) and predicted > 0 else -1.0
            size = np.linalg.norm(inner)
            if best is not None and not there > best[0]:
                radius = best[3]
                break
            if share > LEAST:
                best = there, slope_there, move, size
            if share < POOR:
                radius = size / 4
            elif size < 0.9999 * whole:
                # A value costs less than a matrix: as far as this one goes.
                radius = 3 * size
                continue
            if best is not None:
                break
            if predicted <= max(gain, floor):
                # Not even a short step is better: there, if a full one is lost in the rounding.
                return ended(to_gain <= max(gain, 100 * floor))
        there, slope_there, move, _ = best
        x, before = x + move, slope
        value, slope = there, slope_there
        steps += 1
        if callback:
            callback(x)
        along = vectors.T @ (slope / scales)
        if _gain(values, along, _step(values, along, 1.0)) <= gain / 10:
            return ended(True)  # the slope has gone as B said it would, so no new B is needed
        given = curvature(x)
        if secant:
            missed = before - slope - (given + extra) @ move
            weight = missed @ move
            if abs(weight) > 1e-8 * np.linalg.norm(missed) * np.linalg.norm(move):
                extra = extra + np.outer(missed, missed) / weight


def _gain(values: np.ndarray, along: np.ndarray, step: np.ndarray) -> float:
    """What the quadratic gains by a step."""
    return along @ step - step @ (values * step) / 2


def _step(values: np.ndarray, along: np.ndarray, radius: float) -> np.ndarray:
    """The best step within a ball, in the eigenvectors of B, whose eigenvalues ascend."""
    if values[0] > 0:
        step = along / values
        if np.linalg.norm(step) <= radius:
            return step
    # |step| falls as the shift grows; the best shift is where it is the radius.
    low = max(0.0, -values[0])
    high = low + np.linalg.norm(along) / radius
    least = low + 1e-12 * max(abs(values[0]), values[-1], 1e-300)
    step = along / (values + least)
    size = np.linalg.norm(step)
    if size < radius:  # the slope has no part along the direction that curves upwards
        step[0] += np.copysign(np.sqrt(radius**2 - size**2), along[0])
        return step
    low = least
    for _ in range(60):
        shift = (low + high) / 2
        step = along / (values + shift)
        size = np.linalg.norm(step)
        if abs(size - radius) < 1e-3 * radius:
            break
        low, high = (shift, high) if size > radius else (low, shift)
    return step
