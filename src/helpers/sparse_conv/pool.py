"""Max pooling of sparse images in NumPy, and its gradient."""

import numpy as np

from helpers.sparse_conv.rules import Rulebook, refuse_transposed, rulebook
from helpers.sparse_conv.value import SparseValue, expect_kind


def max_pool_winners(values, ground_state, rules: Rulebook) -> np.ndarray:
    """Where the maximum of each window and channel is.

    Parameters
    ----------
    values : array (a_in, n)
    ground_state : array (n,)
    rules : Rulebook

    Returns
    -------
    int32 array (a_out, n)
        Row of the input site, a_in for the ground state. The first of equals in the window wins,
        as in a dense network; a NaN wins over every number.

    Raises
    ------
    ValueError
        If the rulebook is of a transposed convolution.
    """
    refuse_transposed(rules, "max pooling")
    seen = np.concatenate([values, np.asarray(ground_state)[np.newaxis]])[rules.src]
    positions = seen.real.argmax(axis=1) if len(seen) else np.zeros((0, seen.shape[2]), int)
    return np.take_along_axis(rules.src, positions, axis=1)


def take_winners(values, ground_state, winner: np.ndarray) -> np.ndarray:
    """The maxima (a_out, n), from where they are: see :func:`max_pool_winners`."""
    seen = np.concatenate([values, np.asarray(ground_state)[np.newaxis]])
    return np.take_along_axis(seen, winner, axis=0)


def max_pool_grad(dP, winner: np.ndarray, a_in: int) -> tuple[np.ndarray, np.ndarray]:
    """Gradients with respect to values and ground state: each cotangent goes to its winner.

    Parameters
    ----------
    dP : array (a_out, n)
        Gradient with respect to the maxima.
    winner : int array (a_out, n)
        See :func:`max_pool_winners`.
    a_in : int

    Returns
    -------
    dM : array (a_in, n)
    dt : array (n,)
    """
    both = np.zeros((a_in + 1, dP.shape[1]), np.result_type(dP, np.float64))
    np.add.at(both, (winner, np.arange(dP.shape[1])), dP)
    both = both.astype(dP.dtype, copy=False)
    return both[:-1], both[-1]


def sparse_max_pool(x: SparseValue, f, *, stride=None) -> SparseValue:
    """Largest value of each channel in windows of f by f, in three dimensions f by f by f.

    The ground state counts where it is seen.

    Parameters
    ----------
    x : SparseValue (h, w, n), or a signal, a volume or a batch
    f : int, or tuple of d int
    stride : int, or tuple of d int, optional
        Default: f, windows side by side. Cells at the far edges that fill no window are dropped.

    Returns
    -------
    SparseValue ((h - f) // stride + 1, (w - f) // stride + 1, n)

    Raises
    ------
    ValueError
        If f is larger than the grid, or f or stride is not a positive integer.
    """
    expect_kind("x", x, SparseValue)
    rules = rulebook(x.sites, x.grid, f, stride=f if stride is None else stride, d=x.d)
    winner = max_pool_winners(x.values, x.ground_state, rules)
    values = take_winners(x.values, x.ground_state, winner)
    shape = (*rules.grid, x.shape[-1])
    return SparseValue._trusted(rules.sites, values, shape, x.ground_state, x.d)


def sparse_max_pool_2d(x: SparseValue, f, *, stride=None) -> SparseValue:
    """:func:`sparse_max_pool` of a picture (h, w, n), or of each of a batch."""
    expect_kind("x", x, SparseValue)
    if x.d != 2:
        raise ValueError(f"x has {x.d} dimensions: use sparse_max_pool")
    return sparse_max_pool(x, f, stride=stride)
