"""The compiled kernel of the package, called without PyTensor, and what it does by count.

`helpers.kalman.compiled` is imported where it is used: the first import compiles the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from math import frexp

import numpy as np

from helpers.kalman import StateSpace
from helpers.kalman.model import NAMES, STATIC
from helpers.kalman.op import TOLERANCE
from helpers.kalman.products import LANES


def flags(asked: tuple[str, ...]) -> tuple[bool, bool, bool, bool]:
    """What the kernel is told: any matrix, T, Z, any of R and Q."""
    any_matrix = not {"P0", "T", "Z", "R", "H", "Q"}.isdisjoint(asked)
    return any_matrix, "T" in asked, "Z" in asked, not {"R", "Q"}.isdisjoint(asked)


def kernel_arrays(model: StateSpace) -> list[np.ndarray]:
    """The nine arrays with an axis for time, as the kernel takes them."""
    still = {name: X[np.newaxis] for name, X in model.asdict().items() if name not in STATIC}
    return [np.ascontiguousarray(X) for X in (model.asdict() | still).values()]


def contender(
    y: np.ndarray, model: StateSpace, asked: tuple[str, ...] = NAMES, *, tol: float = TOLERANCE
) -> Callable:
    from helpers.kalman import compiled

    arrays, ones, wanted = kernel_arrays(model), np.ones(len(y)), flags(asked)
    y = np.ascontiguousarray(y)

    def call():
        l, out, _, _ = compiled.loglike_and_grad(y, *arrays, ones, *wanted, tol)
        found = {name: X if name in STATIC else X[0] for name, X in zip(NAMES, out, strict=True)}
        return l.sum(), {name: found[name] for name in asked}

    return call


def value_alone(y: np.ndarray, model: StateSpace, *, tol: float = TOLERANCE) -> Callable:
    from helpers.kalman import compiled

    arrays, y = kernel_arrays(model), np.ascontiguousarray(y)
    return lambda: (compiled.loglike(y, *arrays, tol).sum(), {})


def settled_step(y: np.ndarray, model: StateSpace) -> int:
    """The step from which on the covariance counts as settled; n if it never does."""
    from helpers.kalman import compiled

    y, ones = np.ascontiguousarray(y), np.ones(len(y))
    return int(
        compiled.loglike_and_grad(y, *kernel_arrays(model), ones, *flags(NAMES), TOLERANCE)[3]
    )


def counts(
    y: np.ndarray, model: StateSpace, asked: tuple[str, ...] = NAMES, *, settled: int
) -> dict[str, float]:
    """Multiply-adds of a pass, value and gradients, and bytes it keeps from step to step.

    Counted product by product from the kernels, for a static model: a symmetric product costs half,
    and a product with a T that is followed by its non-zeros costs these.
    """
    from helpers.kalman.kernels import SPARSE_BELOW

    n, m, p = len(y), model.m, model.p
    any_matrix, T_too, Z_too, W_too = flags(asked)
    non_zeros = np.count_nonzero(model.T)
    sparse = non_zeros < SPARSE_BELOW * m**2
    cube = m**3
    congruence = 1.5 * non_zeros * m if sparse else 1.5 * cube  # T P T' or T' N T
    inverse = p**3 if p > 1 else 1
    states = T_too or Z_too

    forward = congruence + 2 * p * m**2 + 2 * p**2 * m + inverse + p**2 + m**2 + 2 * p * m
    forward_settled = m**2 + 2 * p * m + p**2
    backward = backward_settled = m**2 + 2 * p * m
    doubling = 0
    if any_matrix:
        backward += congruence + 3 * p * m**2 + 3 * p**2 * m + m**2 * W_too
        backward += states * m**2 + T_too * (cube + m**2) + Z_too * (2 * p * m**2 + p * m)
        backward_settled += m**2 * W_too + states * (m**2 + p * m) + T_too * m**2 + Z_too * p * m
    left = n - settled
    if left and any_matrix:
        doublings, ones = frexp(left)[1] - 1, left.bit_count() - 1
        doubling = 5 * cube * (doublings + ones) + T_too * cube + 4 * p * m**2
    mp, pp = (-(-k // LANES) * LANES for k in (m, p))
    kept = 2 * mp + 3 * pp + p * (mp + pp) + states * (2 * mp + m * mp)
    total_forward = settled * forward + left * forward_settled
    return {
        "forward": float(total_forward),
        "total": float(total_forward + settled * backward + left * backward_settled + doubling),
        "bytes per step": 8.0 * kept,
    }
