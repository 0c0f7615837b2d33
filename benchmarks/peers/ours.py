"""The compiled pass of the package, called without PyTensor, and what it does by count.

`helpers.kalman.compiled.door` is imported where it is used: the first import compiles the pass.
"""

from __future__ import annotations

from collections.abc import Callable
from math import frexp

import numpy as np

from helpers.kalman import StateSpace
from helpers.kalman.compiled.tiles import LANES
from helpers.kalman.recursions import TOLERANCE
from helpers.statespace import NAMES, STATIC


def flags(requested: tuple[str, ...]) -> tuple[bool, bool, bool, bool]:
    """What the pass is told: any matrix, T, Z, any of R and Q (which it sees as W = R Q R')."""
    any_matrix = not {"P0", "T", "Z", "R", "H", "Q"}.isdisjoint(requested)
    return any_matrix, "T" in requested, "Z" in requested, not {"R", "Q"}.isdisjoint(requested)


def pass_arrays(model: StateSpace) -> list[np.ndarray]:
    """a0, P0, c, d, T, Z, H, W with an axis for time, as the pass takes them."""
    X = {x: A if x in STATIC else A[np.newaxis] for x, A in model.asdict().items()}
    W = X["R"] @ X["Q"] @ X["R"].mT
    arrays = [*(X[x] for x in ("a0", "P0", "c", "d", "T", "Z", "H")), W]
    return [np.ascontiguousarray(A) for A in arrays]


def contender(
    y: np.ndarray, model: StateSpace, requested: tuple[str, ...] = NAMES, *,
    tol: float = TOLERANCE,
) -> Callable:  # fmt: skip
    from helpers.kalman.compiled import door

    arrays, ones, wanted = pass_arrays(model), np.ones(len(y)), flags(requested)
    y, R, Q = np.ascontiguousarray(y), model.R, model.Q

    def call():
        l, out, _, _ = door.loglike_and_grad(y, *arrays, ones, *wanted, tol)
        named = door.Arrays(*out)._asdict()
        found = {x: X if x in STATIC else X[0] for x, X in named.items()}
        if wanted[3]:
            WR = found["W"] @ R  # noqa: N806
            found |= {"R": 2 * WR @ Q, "Q": R.T @ WR}
        return l.sum(), {x: found[x] for x in requested}

    return call


def value_alone(
    y: np.ndarray, model: StateSpace, requested: tuple[str, ...] = (), *, tol: float = TOLERANCE
) -> Callable:
    from helpers.kalman.compiled import door

    arrays, y = pass_arrays(model), np.ascontiguousarray(y)
    return lambda: (door.loglike(y, *arrays, tol).sum(), {})


def steady_step(y: np.ndarray, model: StateSpace) -> int:
    """The step from which on the covariance counts as steady; n if it never does."""
    from helpers.kalman.compiled import door

    y, ones = np.ascontiguousarray(y), np.ones(len(y))
    report = door.loglike_and_grad(y, *pass_arrays(model), ones, *flags(NAMES), TOLERANCE)[3]
    return report[2]


def counts(
    y: np.ndarray, model: StateSpace, requested: tuple[str, ...] = NAMES, *, steady: int
) -> dict[str, float]:
    """Multiply-adds of a pass, value and gradients, and bytes it keeps from step to step.

    Counted product by product from the source, for a static model without gaps: a symmetric product
    costs half, and a product with a T or Z that is followed by its non-zeros costs these.
    """
    from helpers.kalman.compiled.inputs import SPARSE_BELOW

    n, m, p = len(y), model.m, model.p
    any_matrix, T_too, Z_too, W_too = flags(requested)
    non_zeros = np.count_nonzero(model.T)
    sparse = non_zeros < SPARSE_BELOW * m**2
    cube = m**3
    congruence = 1.5 * non_zeros * m if sparse else 1.5 * cube  # T P T' or T' N T
    several = p > 1  # series: then there are factors of F, and else a number
    states = T_too or Z_too

    entries_of_Z = np.count_nonzero(model.Z)  # noqa: N806
    if entries_of_Z >= SPARSE_BELOW * p * m:
        entries_of_Z = p * m  # noqa: N806
    forward = congruence + entries_of_Z * m + p * m**2 + m**2 + 2 * p * m  # Z P, G' G, the vectors
    forward += several * (3 * p**2 * m + 2 * p**3) + 2 * p**2  # Z P Z', the gain in factors, F^-1
    forward_steady = m**2 + 2 * p * m + p**2
    backward = backward_steady = m**2 + 2 * p * m
    doubling = 0
    if any_matrix:
        backward += congruence + 3 * p * m**2 + 2 * p**2 * m + m**2 * W_too
        backward += states * m**2 + T_too * (cube + m**2) + Z_too * (2 * p * m**2 + p * m)
        backward_steady += m**2 * W_too + states * (m**2 + p * m) + T_too * m**2 + Z_too * p * m
    left = n - steady
    if left and any_matrix:
        doublings, ones = frexp(left)[1] - 1, left.bit_count() - 1
        doubling = 5 * cube * (doublings + ones) + T_too * cube + 4 * p * m**2
    mp, pp = (-(-k // LANES) * LANES for k in (m, p))
    kept = 2 * mp + 3 * pp + p * (mp + pp) + states * (2 * mp + m * mp)
    total_forward = steady * forward + left * forward_steady
    return {
        "forward": float(total_forward),
        "total": float(total_forward + steady * backward + left * backward_steady + doubling),
        "bytes per step": 8.0 * kept,
    }
