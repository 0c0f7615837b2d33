"""Rulebooks: which active site each output site sees, and where in its window.

The rulebook depends on the sites alone. It is made outside of any graph, once for each set of
sites, and then serves values, ground states and weights of every kind.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from helpers.sparse_conv import search
from helpers.sparse_conv.value import check_sites, first_duplicate

__all__ = ["Rulebook", "dense_rulebook", "rulebook", "submanifold_rulebook"]


class Rulebook(NamedTuple):
    """The active output sites of a layer, and what they see of the active input sites.

    Position k = p f + q of a window is its row p and column q.

    Parameters
    ----------
    sites : array (a_out, 2) or (a_out, 3)
        Active output sites, in the order in which the input sites first reach them; of the input
        sites' dtype.
    grid : tuple (h_out, w_out) or (images, h_out, w_out)
        The grid they lie on.
    src : int32 array (a_out, f*f)
        Row of the input site at position k of output o's window; a_in where there is none, so
        that the ground state is seen.
    dst : int32 array (a_in, f*f)
        The inverse: the output that has input site s at position k; a_out where there is none.
    """

    sites: np.ndarray
    grid: tuple[int, ...]
    src: np.ndarray
    dst: np.ndarray


def rulebook(sites, shape, f: int, stride: int = 1) -> Rulebook:
    """Rulebook of a valid convolution or a pooling: active is what sees an active site.

    Parameters
    ----------
    sites : array (a_in, 2) or (a_in, 3), int32 or int64
        Row and column, or image, row and column, of each active input site.
    shape : tuple (h, w) or (images, h, w), with or without a last entry n_in
        The input's grid.
    f : int
        The window is f by f.
    stride : int
        From one window to the next.

    Returns
    -------
    Rulebook

    Raises
    ------
    ValueError
        If f is larger than the grid or not positive, a site lies outside the grid or occurs
        twice, or shapes or dtypes do not fit.

    Examples
    --------
    One site in the corner of a 3 by 3 grid: only the first of four windows sees it.

    >>> rules = rulebook([[0, 0]], shape=(3, 3), f=2)
    >>> rules.sites, rules.src
    (array([[0, 0]]), array([[0, 1, 1, 1]], dtype=int32))
    """
    sites, grid = _arguments(sites, shape)
    images, h, w = (1, *grid)[-3:]
    f, stride = _positive("f", f), _positive("stride", stride)
    if f > min(h, w):
        raise ValueError(f"f = {f} is larger than the grid: {(h, w)}")
    h_out, w_out = (h - f) // stride + 1, (w - f) // stride + 1
    keys, dst = search.find_outputs(sites, images, h, w, f, stride)
    sites_out, src, repeated = search.invert(keys, dst, h_out, w_out, sites)
    if stride > f or (h - f) % stride or (w - f) % stride:  # some sites are in no window
        twice = first_duplicate(sites, grid)
    else:
        twice = sites[repeated] if repeated >= 0 else None
    _refuse(twice)
    return Rulebook(sites_out, (*grid[:-2], h_out, w_out), src, dst)


def submanifold_rulebook(sites, shape, f: int) -> Rulebook:
    """Rulebook of a submanifold convolution: active is what was active, the grid stays.

    Windows are centred on the sites; beyond the edge of the grid they see the ground state.

    Parameters
    ----------
    sites, shape
        As in :func:`rulebook`.
    f : int
        Odd.

    Returns
    -------
    Rulebook

    Raises
    ------
    ValueError
        As :func:`rulebook`; or if f is even.

    References
    ----------
    Graham, Engelcke and van der Maaten (2018), 3D semantic segmentation with submanifold sparse
    convolutional networks, doi:10.1109/CVPR.2018.00961.
    """
    sites, grid = _arguments(sites, shape)
    images, h, w = (1, *grid)[-3:]
    f = _positive("f", f)
    if f % 2 == 0:
        raise ValueError(f"f = {f} is even, so its windows have no centre")
    if f > min(h, w):
        raise ValueError(f"f = {f} is larger than the grid: {(h, w)}")
    src, dst, repeated = search.find_neighbours(sites, images, h, w, f)
    _refuse(sites[repeated] if repeated >= 0 else None)
    return Rulebook(sites, grid, src, dst)


def dense_rulebook(sites, shape) -> Rulebook:
    """Rulebook of 1 by 1 windows at all sites of the grid, in row-major order: the dense form.

    Parameters
    ----------
    sites, shape
        As in :func:`rulebook`.

    Returns
    -------
    Rulebook
        src is (cells, 1) and dst is (a_in, 1), where the grid has so many cells.

    Raises
    ------
    ValueError
        As :func:`rulebook`.
    """
    sites, grid = _arguments(sites, shape)
    _refuse(first_duplicate(sites, grid))
    a, cells = len(sites), int(np.prod(grid))
    dst = np.ravel_multi_index(tuple(sites.T), grid).astype(np.int32)
    src = np.full(cells, a, np.int32)
    src[dst] = np.arange(a, dtype=np.int32)
    every = np.indices(grid, sites.dtype).reshape(len(grid), cells).T
    return Rulebook(np.ascontiguousarray(every), grid, src[:, np.newaxis], dst[:, np.newaxis])


def _arguments(sites, shape) -> tuple[np.ndarray, tuple[int, ...]]:
    """Checked sites and grid; a shape of three is told apart by the columns of the sites."""
    sites = np.asarray(sites)
    columns = sites.shape[1] if sites.ndim == 2 and sites.shape[1] in (2, 3) else 2
    try:
        grid = tuple(int(s) for s in shape)
    except (TypeError, ValueError):
        grid = ()
    if len(grid) == 4 or (len(grid) == 3 and columns == 2):
        grid = grid[:-1]
    if len(grid) not in (2, 3) or min(grid) < 1:
        raise ValueError(
            f"shape is {shape!r}, expected (h, w) or (images, h, w), with or without n_in"
        )
    return check_sites(sites, grid), grid


def _positive(name: str, number) -> int:
    if isinstance(number, bool) or int(number) != number or number < 1:
        raise ValueError(f"{name} is {number!r}, expected a positive integer")
    return int(number)


def _refuse(twice: np.ndarray | None) -> None:
    if twice is not None:
        raise ValueError(f"site {tuple(twice.tolist())} occurs more than once")
