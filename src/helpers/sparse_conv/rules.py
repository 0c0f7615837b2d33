"""Rulebooks: which active site each output site sees, and where in its window.

The rulebook depends on the sites alone. It is made outside of any graph, once for each set of
sites, and then serves values, ground states and weights of every kind. Whether a layer is strided,
padded, submanifold or transposed is said here and nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from helpers.sparse_conv import search
from helpers.sparse_conv.value import check_sites, dimensions, first_duplicate

__all__ = [
    "Rulebook",
    "dense_rulebook",
    "inverse_rulebook",
    "rulebook",
    "submanifold_rulebook",
    "transposed_rulebook",
    "union_rulebooks",
]


PerAxis = int | tuple[int, ...]


class Rulebook(NamedTuple):
    """The active output sites of a layer, and what they see of the active input sites.

    The positions of a window are numbered in row-major order: k = p f + q is row p and column q.

    Parameters
    ----------
    sites : array (a_out, d) or (a_out, 1 + d)
        Active output sites, in the order in which the input sites first reach them; of the input
        sites' dtype.
    grid : tuple (h_out, w_out) or (images, h_out, w_out), and so on
        The grid they lie on.
    src : int32 array (a_out, f^d)
        Row of the input site at position k of output o's window; a_in where there is none, so
        that the ground state is seen.
    dst : int32 array (a_in, f^d)
        The inverse: the output that has input site s at position k; a_out where there is none.
    transposed : bool
        Of a transposed or an inverse convolution. These act on what differs from the ground state,
        since what they would make of the ground state depends on the place.
    sites_in, grid_in : array (a_in, d) or (a_in, 1 + d) and tuple, optional
        The input sites and their grid, so that an image of other sites can be refused.
    """

    sites: np.ndarray
    grid: tuple[int, ...]
    src: np.ndarray
    dst: np.ndarray
    transposed: bool = False
    sites_in: np.ndarray | None = None
    grid_in: tuple[int, ...] | None = None

    def refuse_other(self, sites: np.ndarray, grid: tuple[int, ...]) -> None:
        """ValueError if the rulebook was made of other sites or of another grid."""
        if self.grid_in is not None and self.grid_in != grid:
            raise ValueError(f"sites are on a grid {grid}, but the rulebook's on {self.grid_in}")
        if len(sites) != len(self.dst):
            raise ValueError(f"there are {len(sites)} sites, but the rulebook has {len(self.dst)}")
        if self.sites_in is not None and not np.array_equal(sites, self.sites_in):
            s = np.flatnonzero((sites != self.sites_in).any(axis=1))[0]
            ours, theirs = tuple(sites[s].tolist()), tuple(self.sites_in[s].tolist())
            raise ValueError(f"site {s} is {ours}, but in the rulebook {theirs}")


def rulebook(
    sites, shape, f: PerAxis, stride: PerAxis = 1, pad: PerAxis = 0, d: int | None = None
) -> Rulebook:
    """Rulebook of a convolution or a pooling: active is what sees an active site.

    Parameters
    ----------
    sites : array (a_in, d) or (a_in, 1 + d), int32 or int64
        Coordinates of each active input site, in a batch the image first.
    shape : tuple (h, w) or (images, h, w), and so on, with or without a last entry n_in
        The input's grid. Without a site, the columns of an empty array say which of these it is.
    f : int, or tuple of d int
        The window is f by f, in d = 3 dimensions f by f by f; or as long along each axis as the
        tuple says, and W then has a block for each of its cells.
    stride : int, or tuple of d int
        From one window to the next.
    pad : int, or tuple of d int
        So many cells of ground state are put around each image. Default: 0, a valid convolution.
    d : int, optional
        Dimensions of one image. Sites of three columns need it: 3 for a volume, 2 for a batch of
        pictures. Default for one, two and four columns: 1, 2 and 3.

    Returns
    -------
    Rulebook

    Raises
    ------
    ValueError
        If f is larger than the padded grid or not positive, d is missing, a site lies outside the
        grid or occurs twice, or shapes or dtypes do not fit.

    Examples
    --------
    One site in the corner of a 3 by 3 grid: only the first of four windows sees it.

    >>> rules = rulebook([[0, 0]], shape=(3, 3), f=2)
    >>> rules.sites, rules.src
    (array([[0, 0]]), array([[0, 1, 1, 1]], dtype=int32))
    """
    sites, grid, d = _arguments(sites, shape, d)
    f, stride, pad = _windows(f, stride, pad, d)
    _check_fit(f, grid[-d:], pad)
    ways = [h + 2 * p - w for h, w, p in zip(grid[-d:], f, pad, strict=True)]
    out = tuple(way // s + 1 for way, s in zip(ways, stride, strict=True))
    complete = all(s <= w and way % s == 0 for way, w, s in zip(ways, f, stride, strict=True))
    return _search(sites, grid, (*grid[:-d], *out), f, stride, pad, d, complete=complete)


def submanifold_rulebook(sites, shape, f: PerAxis, d: int | None = None) -> Rulebook:
    """Rulebook of a submanifold convolution: active is what was active, the grid stays.

    Windows are centred on the sites; beyond the edge of the grid they see the ground state.

    Parameters
    ----------
    sites, shape, d
        As in :func:`rulebook`.
    f : int, or tuple of d int
        Odd; it may be larger than the grid, as in the depth of a network.

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
    sites, grid, d = _arguments(sites, shape, d)
    window = _per_axis("f", f, 1, d)
    if not all(w % 2 for w in window):
        raise ValueError(f"f = {f} is even, so its windows have no centre")
    given = np.ravel_multi_index(tuple(sites.T), grid)
    half = tuple(w // 2 for w in window)
    return _search(sites, grid, grid, window, (1,) * d, half, d, given=given)


def transposed_rulebook(
    sites, shape, f: PerAxis, stride: PerAxis = 1, pad: PerAxis = 0, d: int | None = None
) -> Rulebook:
    """Rulebook of a transposed convolution: active is every cell that a site's window covers.

    Site h reaches the cells stride h + k - pad of a grid of (h - 1) stride + f - 2 pad cells along
    each axis.

    Parameters
    ----------
    sites, shape, f, stride, pad, d
        As in :func:`rulebook`; pad cells are cut off at each edge.

    Returns
    -------
    Rulebook

    Raises
    ------
    ValueError
        As :func:`rulebook`; or if pad leaves no cell.
    """
    sites, grid, d = _arguments(sites, shape, d)
    window, strides, pads = _windows(f, stride, pad, d)
    out = tuple(
        (h - 1) * s + w - 2 * p for h, w, s, p in zip(grid[-d:], window, strides, pads, strict=True)
    )
    if min(out) < 1:
        raise ValueError(f"pad = {pad} leaves no cell of a transposed convolution of {grid[-d:]}")
    whole = (*grid[:-d], *out)
    return _search(
        sites, grid, whole, window, strides, pads, d, transposed=True, complete=not any(pads)
    )


def inverse_rulebook(rules: Rulebook, sites, shape) -> Rulebook:
    """Rulebook of an inverse convolution: from the outputs of `rules` back to its input sites.

    It is the transposed convolution at those sites alone: src and dst exchanged.

    Parameters
    ----------
    rules : Rulebook
        Of a :func:`rulebook`, mostly with a stride.
    sites, shape
        What `rules` was made of.

    Returns
    -------
    Rulebook

    Raises
    ------
    ValueError
        If `rules` was made of other sites, or as :func:`rulebook`.
    """
    sites, grid = _on_grid(sites, shape)
    rules.refuse_other(sites, grid)
    back = not rules.transposed
    return Rulebook(sites, grid, rules.dst, rules.src, back, rules.sites, rules.grid)


def dense_rulebook(sites, shape) -> Rulebook:
    """Rulebook of windows of one cell at all sites of the grid, in row-major order: the dense form.

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
    sites, grid = _on_grid(sites, shape)
    every = np.indices(grid, sites.dtype).reshape(len(grid), -1).T
    return _copies(sites, np.ravel_multi_index(tuple(sites.T), grid), every, grid)


def union_rulebooks(first, second, shape) -> tuple[Rulebook, Rulebook]:
    """Two rulebooks of windows of one cell, with the same outputs: all sites of both images.

    They serve to add two images of different sites.

    Parameters
    ----------
    first, second : sites as in :func:`rulebook`
        Of two images on one grid.
    shape
        As in :func:`rulebook`.

    Returns
    -------
    Rulebook, Rulebook
        Of the first image, whose sites come first, and of the second.

    Raises
    ------
    ValueError
        As :func:`rulebook`.
    """
    (first, grid), (second, _) = _on_grid(first, shape), _on_grid(second, shape)
    both = np.concatenate([first, second])
    cells = np.ravel_multi_index(tuple(both.T), grid)
    _, seen, inverse = np.unique(cells, return_index=True, return_inverse=True)
    order = np.argsort(seen)
    number = np.argsort(order)[inverse]
    sites = both[seen[order]]
    a = len(first)
    return _copies(first, number[:a], sites, grid), _copies(second, number[a:], sites, grid)


def _copies(sites, number, outputs, grid) -> Rulebook:
    """Site s is output number[s]."""
    a = len(sites)
    dst = number.astype(np.int32)
    src = np.full(len(outputs), a, np.int32)
    src[dst] = np.arange(a, dtype=np.int32)
    src, dst = src[:, np.newaxis], dst[:, np.newaxis]
    return Rulebook(np.ascontiguousarray(outputs), grid, src, dst, False, sites, grid)


def _search(
    sites, grid, out, f, stride, pad, d, given=None, transposed=False, complete=True
) -> Rulebook:
    """The rulebook between two grids; `complete` says that some window holds each site."""
    batched = len(grid) > d
    four = np.zeros((len(sites), 4), sites.dtype)  # image and three coordinates
    four[:, 4 - d :] = sites[:, -d:]
    if batched:
        four[:, 0] = sites[:, 0]
    size = (out[0] if batched else 1, *(1,) * (3 - d), *out[-d:])
    if np.prod(size, dtype=object) >= 2**62:
        raise ValueError(f"the grid {out} has too many cells to be numbered")
    window, strides, pads = ((fill,) * (3 - d) + x for x, fill in ((f, 1), (stride, 1), (pad, 0)))
    given = np.empty(0, np.int64) if given is None else given
    keys, dst, twice = search.find_outputs(four, size, window, strides, pads, transposed, given)
    found, src, dst, repeated = search.invert(keys, dst, np.array(out), sites)
    if not complete:
        _refuse(first_duplicate(sites, grid))
    twice = max(twice, repeated)
    _refuse(sites[twice] if twice >= 0 else None)
    if len(given):
        return Rulebook(sites, grid, src, dst, False, sites, grid)
    return Rulebook(found, out, src, dst, transposed, sites, grid)


def _on_grid(sites, shape) -> tuple[np.ndarray, tuple[int, ...]]:
    """Checked sites, none twice, and their grid."""
    columns = np.shape(sites)[1] if np.ndim(sites) == 2 else 2
    sites, grid, _ = _arguments(sites, shape, min(columns, 3))
    _refuse(first_duplicate(sites, grid))
    return sites, grid


def _arguments(sites, shape, d: int | None) -> tuple[np.ndarray, tuple[int, ...], int]:
    """Checked sites, grid and d; a last entry n_in is told by the columns of the sites."""
    sites = np.asarray(sites)
    columns = sites.shape[1] if sites.ndim == 2 else d or 2
    try:
        grid = tuple(int(s) for s in shape)
    except (TypeError, ValueError):
        grid = ()
    if len(grid) not in (columns, columns + 1) or min(grid) < 1:
        raise ValueError(
            f"shape is {shape!r}, expected (h, w) or (images, h, w), with or without n_in, or a "
            f"grid of another dimension: sites of {columns} columns need {columns} entries"
        )
    if sites.ndim != 2 and sites.size == 0 and len(grid) > columns:
        raise ValueError(
            f"there is no site, so {grid} may be one grid with n_in or a batch's: give sites as "
            f"np.empty((0, {columns}), int) or np.empty((0, {columns + 1}), int)"
        )
    grid = grid[:columns]
    return check_sites(sites, grid), grid, dimensions(columns, d, grid)


def _check_fit(f: tuple[int, ...], grid: tuple[int, ...], pad: tuple[int, ...]) -> None:
    if any(w > h + 2 * p for w, h, p in zip(f, grid, pad, strict=True)):
        padded = f" padded by {_shown(pad)}" if any(pad) else ""
        raise ValueError(f"f = {_shown(f)} is larger than the grid: {grid}{padded}")


def _shown(numbers: tuple[int, ...]) -> int | tuple[int, ...]:
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _windows(f, stride, pad, d: int) -> list[tuple[int, ...]]:
    arguments = (("f", f, 1), ("stride", stride, 1), ("pad", pad, 0))
    return [_per_axis(name, numbers, least, d) for name, numbers, least in arguments]


def _per_axis(name: str, numbers, least: int, d: int) -> tuple[int, ...]:
    """One integer for each of d axes; a single one serves them all."""
    if np.ndim(numbers) == 0:
        return (_integer(name, numbers, least),) * d
    if np.shape(numbers) != (d,):
        raise ValueError(f"{name} is {numbers!r}, expected an integer, or one for each of {d} axes")
    return tuple(_integer(name, number, least) for number in numbers)


def _integer(name: str, number, least: int) -> int:
    whole = np.ndim(number) == 0 and np.asarray(number).dtype.kind in "iuf"
    if not whole or number % 1 or number < least:
        expected = "a positive integer" if least else "an integer that is not negative"
        raise ValueError(f"{name} is {number!r}, expected {expected}")
    return int(number)


def _refuse(twice: np.ndarray | None) -> None:
    if twice is not None:
        raise ValueError(f"site {tuple(twice.tolist())} occurs more than once")
