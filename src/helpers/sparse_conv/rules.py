"""Rulebooks: which active site each output site sees, and where in its window.

The rulebook depends on the sites alone. It is made outside of any graph, once for each set of
sites, and then serves values, ground states and weights of every kind. Whether a layer is strided,
padded, dilated, submanifold or transposed is stated here and nowhere else.
"""

import math
import zlib
from typing import NamedTuple

import numpy as np

from helpers.sparse_conv import search, value

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
INT32_MAX = 2**31 - 1
# A rulebook's kind: what made it. From UNION on it is a union, of as many kinds as there are
# checksums of sites, so that a sum refuses rulebooks of two unions.
WINDOWS, TRANSPOSED, DENSE, UNION = range(4)
NOT_OF_TRANSPOSED = (
    "takes no rulebook of a transposed or an inverse convolution: its windows do not lie on the "
    "grid of the input. Make one of the same sites with rulebook or submanifold_rulebook"
)


class Rulebook(NamedTuple):
    """The active output sites of a layer, and what they see of the active input sites.

    The positions of a window are numbered in row-major order: k = p f + q is row p and column q.

    Parameters
    ----------
    sites : int64 array (a_out, d) or (a_out, 1 + d)
        Active output sites, in the order in which the input sites first reach them.
    grid : tuple (h_out, w_out) or (images, h_out, w_out), and so on
        The grid they lie on.
    src : int32 array (a_out, f^d)
        Row of the input site at position k of output o's window; a_in where there is none, so
        that the ground state is seen.
    dst : int32 array (a_in, f^d)
        The inverse: the output that has input site s at position k; a_out where there is none.
    kind : int
        What made it: WINDOWS of a convolution or a pooling, TRANSPOSED (or inverse), DENSE, or
        UNION plus a checksum of the output sites. A layer refuses those that have no meaning for
        it. A convolution of a transposed one acts on what differs from the ground state, since what
        it would make of the ground state depends on the place.
    sites_in, grid_in : int64 array (a_in, d) or (a_in, 1 + d) and tuple
        The input sites and their grid, so that an image of other sites can be refused.
    """

    sites: np.ndarray
    grid: tuple[int, ...]
    src: np.ndarray
    dst: np.ndarray
    kind: int
    sites_in: np.ndarray
    grid_in: tuple[int, ...]

    @property
    def transposed(self) -> bool:
        """Of a transposed or an inverse convolution."""
        return self.kind == TRANSPOSED

    def refuse_other(self, sites: np.ndarray, grid: tuple[int, ...]) -> None:
        """ValueError if the rulebook was made of other sites or of another grid."""
        value.refuse_other_sites(sites, grid, self.sites_in, self.grid_in, "the rulebook")


def expect_rules(rules, *images) -> None:
    """TypeError if it is no rulebook; ValueError if it was made of other sites than an image's."""
    value.expect_kind(
        "rules", rules, Rulebook, made=", as rulebook or submanifold_rulebook makes it"
    )
    for x in images:
        value.expect_kind("x", x, value.SparseValue)
        rules.refuse_other(x.sites, x.grid)


def refuse_transposed(rules, what: str) -> None:
    """ValueError if the rulebook is of a transposed or an inverse convolution."""
    if rules.transposed:
        raise ValueError(f"{what} {NOT_OF_TRANSPOSED}")


def rulebook(
    sites,
    shape,
    f: PerAxis,
    *,
    stride: PerAxis = 1,
    pad: PerAxis = 0,
    dilation: PerAxis = 1,
    d: int | None = None,
) -> Rulebook:
    """Rulebook of a convolution or a pooling: active is what sees an active site.

    Parameters
    ----------
    sites : array (a_in, d) or (a_in, 1 + d), any integers
        Coordinates of each active input site, in a batch the image first. Computed with in int64.
    shape : tuple (h, w) or (images, h, w), and so on, with or without a last entry n_in
        The input's grid. Without a site, the columns of an empty array say which of these it is.
    f : int, or tuple of d int
        The window is f by f, in d = 3 dimensions f by f by f; or as long along each axis as the
        tuple says, and W then has a block for each of its cells.
    stride : int, or tuple of d int
        From one window to the next.
    pad : int, or tuple of d int
        Number of cells of ground state put around each image. Default: 0, a valid convolution.
    dilation : int, or tuple of d int
        From one cell of a window to the next: at 2, every other cell is left out, and f cells span
        2 (f - 1) + 1. Default: 1, neighbours.
    d : int, optional
        Dimensions of one image. Sites of three columns need it: 3 for a volume, 2 for a batch of
        pictures. Default for one, two and four columns: 1, 2 and 3.

    Raises
    ------
    ValueError
        If a window is larger than the padded grid or f not positive, d is missing, a site lies
        outside the grid or occurs twice, shapes or dtypes do not fit, or a number is beyond int64.

    Examples
    --------
    One site in the corner of a 3 by 3 grid: only the first of four windows sees it.

    >>> rules = rulebook([[0, 0]], shape=(3, 3), f=2)
    >>> rules.sites, rules.src
    (array([[0, 0]]), array([[0, 1, 1, 1]], dtype=int32))
    """
    sites, grid, d = _arguments(sites, shape, d)
    axes = _windows(f, stride, pad, dilation, d)
    ways = [h + 2 * x.pad - x.span for h, x in zip(grid[-d:], axes, strict=True)]
    if min(ways) < 0:
        dilated = f" with dilation = {_shown(dilation)}" if np.max(dilation) > 1 else ""
        padded = f" padded by {_shown(pad)}" if np.any(pad) else ""
        raise ValueError(f"f = {_shown(f)}{dilated} is larger than the grid: {grid[-d:]}{padded}")
    pairs = list(zip(ways, axes, strict=True))
    out = tuple(way // x.stride + 1 for way, x in pairs)
    complete = all(x.stride <= x.f and way % x.stride == 0 and x.dilation == 1 for way, x in pairs)
    return _search(sites, grid, out, axes, complete=complete)


def submanifold_rulebook(
    sites, shape, f: PerAxis, *, dilation: PerAxis = 1, d: int | None = None
) -> Rulebook:
    """Rulebook of a submanifold convolution: active is what was active, the grid stays.

    Windows are centred on the sites; beyond the edge of the grid they see the ground state.

    Parameters
    ----------
    sites, shape, dilation, d
        As in :func:`rulebook`.
    f : int, or tuple of d int
        Odd; it may be larger than the grid, as in the depth of a network.

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
    axes = _windows(f, 1, 0, dilation, d)
    if not all(x.f % 2 for x in axes):
        raise ValueError(f"f = {f} is even, so its windows have no centre")
    centred = [x._replace(pad=x.f // 2 * x.dilation) for x in axes]
    return _search(sites, grid, grid[-d:], centred, closed=True)


def transposed_rulebook(
    sites,
    shape,
    f: PerAxis,
    *,
    stride: PerAxis = 1,
    pad: PerAxis = 0,
    dilation: PerAxis = 1,
    output_pad: PerAxis = 0,
    d: int | None = None,
) -> Rulebook:
    """Rulebook of a transposed convolution: active is every cell that a site's window covers.

    Site h reaches the cells stride h + dilation k - pad of a grid of
    (h - 1) stride + dilation (f - 1) + 1 - 2 pad + output_pad cells along each axis.

    Parameters
    ----------
    sites, shape, f, stride, pad, dilation, d
        As in :func:`rulebook`; pad cells are cut off at each edge.
    output_pad : int, or tuple of d int
        Number of additional cells at the far edge, less than stride or dilation: of the grids that
        a strided convolution maps to the same grid, the one that was there.

    Raises
    ------
    ValueError
        As :func:`rulebook`; or if pad leaves no cell, or output_pad is too large.
    """
    sites, grid, d = _arguments(sites, shape, d)
    axes = _windows(f, stride, pad, dilation, d)
    more = per_axis("output_pad", output_pad, 0, d)
    if any(o >= max(x.stride, x.dilation) for o, x in zip(more, axes, strict=True)):
        raise ValueError(
            f"output_pad = {output_pad}, expected less than stride = {stride} or "
            f"dilation = {dilation} along each axis"
        )
    of_axes = zip(grid[-d:], more, axes, strict=True)
    out = tuple((h - 1) * x.stride + x.span - 2 * x.pad + o for h, o, x in of_axes)
    if min(out) < 1:
        raise ValueError(f"pad = {pad} leaves no cell of a transposed convolution of {grid[-d:]}")
    complete = not any(x.pad for x in axes)
    return _search(sites, grid, out, axes, transposed=True, complete=complete)


def inverse_rulebook(rules: Rulebook, sites, shape) -> Rulebook:
    """Rulebook of an inverse convolution: from the outputs of `rules` back to its input sites.

    It is the transposed convolution at those sites alone: src and dst exchanged.

    Parameters
    ----------
    rules : Rulebook
        Of a :func:`rulebook`, mostly with a stride.
    sites, shape
        What `rules` was made of.

    Raises
    ------
    ValueError
        If `rules` was made of other sites, or as :func:`rulebook`.
    """
    expect_rules(rules)
    sites, grid = _on_grid(sites, shape)
    rules.refuse_other(sites, grid)
    kind = WINDOWS if rules.transposed else TRANSPOSED
    return Rulebook(sites, grid, rules.dst, rules.src, kind, rules.sites, rules.grid)


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
    if math.prod(grid) > INT32_MAX:
        raise ValueError(
            f"the dense form of {grid} has {math.prod(grid)} cells, more than rows can be numbered "
            "in int32: pool first, or take a smaller grid"
        )
    every = np.indices(grid, np.int64).reshape(len(grid), -1).T
    return _copies(sites, np.ravel_multi_index(tuple(sites.T), grid), every, grid, DENSE)


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
    out = sites, grid, UNION + zlib.crc32(sites.tobytes(), zlib.crc32(repr(grid).encode()))
    return _copies(first, number[:a], *out), _copies(second, number[a:], *out)


def _copies(sites, number, outputs, grid, kind: int) -> Rulebook:
    """Site s is output number[s]."""
    a = len(sites)
    dst = number.astype(np.int32)
    src = np.full(len(outputs), a, np.int32)
    src[dst] = np.arange(a, dtype=np.int32)
    src, dst = src[:, np.newaxis], dst[:, np.newaxis]
    return Rulebook(np.ascontiguousarray(outputs), grid, src, dst, kind, sites, grid)


class _Axis(NamedTuple):
    """The windows along one axis."""

    f: int
    stride: int
    pad: int
    dilation: int

    @property
    def span(self) -> int:
        """Cells from the first of a window to its last."""
        return self.dilation * (self.f - 1) + 1


def _search(sites, grid, space, axes, *, closed=False, transposed=False, complete=True) -> Rulebook:
    """The rulebook between two grids; `space` is that of an output image.

    `closed` says that the outputs are the sites, `complete` that some window holds each site.
    """
    d = len(axes)
    out = (*grid[:-d], *space)
    value.check_cells(out)
    for h, x in zip(grid[-d:], axes, strict=True):  # the search must not leave int64
        furthest = (h * x.stride if transposed else h) + x.dilation * x.f + x.pad
        if max(furthest, x.stride) > value.INT64_MAX:
            raise ValueError(
                f"f = {x.f}, stride = {x.stride}, pad = {x.pad} and dilation = {x.dilation} on {h} "
                "cells lead to coordinates beyond int64: take smaller ones"
            )
    cells = math.prod(x.f for x in axes)
    pairs = max(len(sites), 1) * cells
    if pairs > value.INT64_MAX or (not closed and min(pairs, math.prod(out)) > INT32_MAX):
        raise ValueError(
            f"windows of {cells} cells around {len(sites)} sites may be more than int32 can "
            "number: take smaller windows, or parts of the grid or of the batch one by one"
        )
    four = np.zeros((len(sites), 4), np.int64)  # image and three coordinates
    four[:, 4 - d :] = sites[:, -d:]
    if len(grid) > d:
        four[:, 0] = sites[:, 0]
    images = out[0] if len(grid) > d else 1
    size, missing = (images, *(1,) * (3 - d), *space), [_Axis(1, 1, 0, 1)] * (3 - d)
    windows = zip(*missing, *axes, strict=True)
    given = np.ravel_multi_index(tuple(sites.T), grid) if closed else np.empty(0, np.int64)
    keys, dst, twice = search.find_outputs(four, size, *windows, transposed, given)
    src, dst, repeated = search.invert(dst, len(keys))
    if not complete:
        value.refuse_duplicates(sites, grid)
    twice = max(twice, repeated)
    if twice >= 0:
        value.refuse_duplicates(sites[[twice, twice]], grid)
    if len(given):
        return Rulebook(sites, grid, src, dst, WINDOWS, sites, grid)
    kind = TRANSPOSED if transposed else WINDOWS
    found = np.stack(np.unravel_index(keys, out), axis=-1)
    return Rulebook(found, out, src, dst, kind, sites, grid)


def _on_grid(sites, shape) -> tuple[np.ndarray, tuple[int, ...]]:
    """Checked sites, none twice, and their grid."""
    columns = np.shape(sites)[1] if np.ndim(value.plain("sites", sites)) == 2 else 2
    sites, grid, _ = _arguments(sites, shape, min(columns, 3))
    value.refuse_duplicates(sites, grid)
    return sites, grid


def _arguments(sites, shape, d: int | None) -> tuple[np.ndarray, tuple[int, ...], int]:
    """Checked sites, grid and d; a last entry n_in is told by the columns of the sites."""
    sites = np.asarray(value.plain("sites", sites))
    columns = sites.shape[1] if sites.ndim == 2 else d or 2
    grid = value.whole_numbers(value.plain("shape", shape, "a tuple, such as its grid"))
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
    return value.check_sites(sites, grid), grid, value.dimensions(columns, d, grid)


def _shown(numbers) -> int | tuple[int, ...]:
    numbers = np.ravel(numbers).tolist()
    return numbers[0] if len(set(numbers)) == 1 else tuple(numbers)


def _windows(f, stride, pad, dilation, d: int) -> list[_Axis]:
    arguments = (("f", f, 1), ("stride", stride, 1), ("pad", pad, 0), ("dilation", dilation, 1))
    each = [per_axis(name, numbers, least, d) for name, numbers, least in arguments]
    return [_Axis(*axis) for axis in zip(*each, strict=True)]


def per_axis(name: str, numbers, least: int, d: int) -> tuple[int, ...]:
    """One integer for each of d axes; a single one serves them all."""
    numbers = value.plain(name, numbers, "integers: sparse_conv and graph.max_pool take rulebooks")
    if np.ndim(numbers) == 0:
        return (integer(name, numbers, least),) * d
    if np.shape(numbers) != (d,):
        raise ValueError(f"{name} is {numbers!r}, expected an integer, or one for each of {d} axes")
    return tuple(integer(name, number, least) for number in numbers)


def integer(name: str, number, least: int) -> int:
    """As Python's integer, which does not overflow; ValueError if it is none or less than least."""
    number = value.plain(name, number, "an integer")
    whole = value.whole_numbers([number]) if not isinstance(number, bool | np.bool) else ()
    if not whole or whole[0] < least:
        expected = "a positive integer" if least else "an integer that is not negative"
        raise ValueError(f"{name} is {number!r}, expected {expected}")
    return whole[0]
