"""Active sites and their values: the sparse form of an image, or of a batch of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["SparseValue", "stack"]

INT64_MAX = 2**63 - 1


@dataclass(frozen=True, eq=False)
class SparseValue:
    """An image that is the same everywhere, except at some active sites.

    An image has d = 1, 2 or 3 dimensions: a signal, a picture, a volume of voxels. Every function
    of this package takes a batch of images in the place of one image: its sites have a leading
    column, the image, and its shape a leading entry, the number of images. All images of a batch
    have the same ground state.

    Parameters
    ----------
    sites : array (a, d) or (a, 1 + d), any integers
        Coordinates of each active site (row and column, say), in a batch the image first; no site
        twice. Kept in int64.
    values : array (a, n_in)
        What is there: float32, float64 or complex (for a complex step).
    shape : tuple (h, w, n_in) or (depth, h, w, n_in), in a batch (images, h, w, n_in), and so on
        Shape of the dense form.
    ground_state : array (n_in,), optional
        What is at every other site. Default: zeros.
    d : int, optional
        Dimensions of one image. Four entries of shape may be a volume, d = 3, or a batch of
        pictures, d = 2, and need it. Default for two, three and five entries: 1, 2 and 3.

    Raises
    ------
    ValueError
        If shapes do not fit each other, d is missing or does not fit, sites are not integers, lie
        outside the grid or occur twice, values are not numbers, or the grid has more than
        2^63 - 1 cells.

    Examples
    --------
    >>> x = SparseValue(sites=[[0, 1]], values=[[7.0]], shape=(2, 3, 1))
    >>> x.to_dense()[:, :, 0]
    array([[0., 7., 0.],
           [0., 0., 0.]])
    """

    sites: np.ndarray
    values: np.ndarray
    shape: tuple[int, ...]
    ground_state: np.ndarray | None = None
    d: int | None = None

    def __post_init__(self):
        shape = check_shape(self.shape)
        d = dimensions(len(shape) - 1, self.d, shape)
        sites = check_sites(self.sites, shape[:-1])
        n_in = shape[-1]
        values = numbers("values", self.values)
        if values.size == 0 and len(sites) == 0:
            values = values.reshape(0, n_in)
        expect("values", values, "(a, n_in)", (len(sites), n_in))
        t = _ground_state(self.ground_state, n_in, values.dtype)
        refuse_duplicates(sites, shape[:-1])
        dtype = np.result_type(values, t)
        values, t = values.astype(dtype, copy=False), t.astype(dtype, copy=False)
        vars(self).update(sites=sites, values=values, shape=shape, ground_state=t, d=d)

    @classmethod
    def _trusted(cls, sites, values, shape, ground_state, d) -> SparseValue:
        """Without the checks: for what a layer made of a SparseValue."""
        x = object.__new__(cls)
        vars(x).update(sites=sites, values=values, shape=shape, ground_state=ground_state, d=d)
        return x

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape without the channels."""
        return self.shape[:-1]

    def to_dense(self) -> np.ndarray:
        """The dense form, an array of this shape."""
        dense = np.empty(self.shape, self.values.dtype)
        dense[...] = self.ground_state
        dense[tuple(self.sites.T)] = self.values
        return dense

    @classmethod
    def from_dense(cls, dense, ground_state=None, d=None) -> SparseValue:
        """The sparse form: active is each site that differs from the ground state in a channel.

        Parameters
        ----------
        dense : array (h, w, n_in) or another shape of a :class:`SparseValue`
        ground_state : array (n_in,), optional
            Default: zeros.
        d : int, optional
            Dimensions of one image, as in :class:`SparseValue`.

        Returns
        -------
        SparseValue
            Sites in row-major order.

        Raises
        ------
        ValueError
            If shapes do not fit each other, or entries are not numbers.
        """
        dense = numbers("dense", dense)
        shape = check_shape(dense.shape)
        t = _ground_state(ground_state, shape[-1], dense.dtype)
        sites = np.argwhere((dense != t).any(axis=-1))
        return cls(sites, dense[tuple(sites.T)], shape, t, d)

    @classmethod
    def from_points(cls, points, features, cell, grid) -> SparseValue:
        """A point cloud in voxels: active is each voxel that holds a point; features are averaged.

        Which point went where: :func:`~helpers.sparse_conv.points.point_map`.

        Parameters
        ----------
        points, cell, grid
            As in :func:`~helpers.sparse_conv.points.point_map`.
        features : array (m, n_in)

        Returns
        -------
        SparseValue (*grid, n_in)
            Sites in row-major order.

        Raises
        ------
        ValueError
            If shapes do not fit, a coordinate is not finite, or a point lies outside the grid.
        """
        from helpers.sparse_conv import points as clouds  # which needs this class

        return clouds.voxel_means(features, clouds.point_map(points, cell, grid))


def stack(images: Sequence[SparseValue]) -> SparseValue:
    """One batch of several images.

    Parameters
    ----------
    images : sequence of SparseValue (h, w, n_in), or of signals or volumes
        Of one shape and one ground state.

    Returns
    -------
    SparseValue (images, h, w, n_in)
        The sites of the first image, then those of the second, and so on.

    Raises
    ------
    ValueError
        If there is no image, one is a batch itself, shapes or ground states differ, or all cells
        are more than int64 can number.
    """
    expect_kind("images", images, Sequence, made=" of SparseValue")
    if len(images) == 0:
        raise ValueError("there are no images to stack")
    first = images[0]
    for k, x in enumerate(images):
        expect_kind(f"image {k}", x, SparseValue)
        if len(x.grid) != x.d:
            raise ValueError(f"image {k} is itself a batch: its shape is {x.shape}")
        if x.shape != first.shape:
            raise ValueError(f"image {k} has shape {x.shape}, image 0 has {first.shape}")
        if not np.array_equal(x.ground_state, first.ground_state, equal_nan=True):
            raise ValueError(f"image {k} and image 0 have different ground states")
    check_cells((len(images), *first.grid))
    sites = np.concatenate([x.sites for x in images])
    values = np.concatenate([x.values for x in images])
    which = np.repeat(np.arange(len(images), dtype=sites.dtype), [len(x.sites) for x in images])
    sites, shape = np.column_stack([which, sites]), (len(images), *first.shape)
    return SparseValue._trusted(sites, values, shape, first.ground_state, first.d)


def _ground_state(t, n_in: int, dtype) -> np.ndarray:
    t = numbers("ground_state", np.zeros(n_in, dtype) if t is None else t)
    expect("ground_state", t, "(n_in,)", (n_in,))
    return t


def whole_numbers(numbers) -> tuple[int, ...]:
    """As Python's integers, which do not overflow; () if one of them is no whole number."""
    try:
        whole = tuple(int(n) for n in numbers)
        return whole if all(n == m for n, m in zip(whole, numbers, strict=True)) else ()
    except (TypeError, ValueError, OverflowError):
        return ()


def check_shape(shape) -> tuple[int, ...]:
    """The shape as a tuple of int; ValueError if it is not one of an image or a batch."""
    numbers = whole_numbers(plain("shape", shape, "a tuple, such as its shape"))
    if len(numbers) not in (2, 3, 4, 5) or min(numbers) < 1:
        raise ValueError(
            f"shape is {shape!r}, expected (h, w, n_in), or with another number of dimensions, in "
            "a batch with the number of images first, all positive"
        )
    return numbers


def check_cells(grid: tuple[int, ...]) -> None:
    """ValueError if the cells of the grid cannot be numbered in int64."""
    if math.prod(grid) > INT64_MAX:
        raise ValueError(
            f"the grid {grid} has too many cells, {math.prod(grid)}, to be numbered in int64: "
            "cut it into parts, or take larger cells"
        )


def dimensions(columns: int, d: int | None, shape) -> int:
    """d of an image whose sites have so many columns; ValueError if that does not say it."""
    if d is None:
        if columns == 3:
            raise ValueError(
                f"shape {tuple(shape)} may be a volume (depth, h, w) or a batch of pictures "
                "(images, h, w): say d=3 or d=2"
            )
        return min(columns, 3)
    if d not in (1, 2, 3) or columns - d not in (0, 1):
        raise ValueError(
            f"d is {d!r} and the shape {tuple(shape)}, but an image has d = 1, 2 or 3 dimensions, "
            "and its sites have d columns, in a batch 1 + d"
        )
    return int(d)


def check_sites(sites, grid: tuple[int, ...]) -> np.ndarray:
    """Sites as an int64 array (a, columns) within the grid, else ValueError."""
    check_cells(grid)
    sites = np.asarray(plain("sites", sites))
    d = len(grid)
    if sites.size == 0 and sites.ndim <= 2:
        return np.empty((0, d), np.int64)
    if sites.dtype.kind not in "iu":
        raise ValueError(f"sites are {sites.dtype}, expected integers")
    if sites.ndim != 2 or sites.shape[1] != d:
        raise ValueError(f"sites has shape {sites.shape}, expected (a, {d}) as the grid is {grid}")
    inside = np.ascontiguousarray(sites, np.int64)  # beyond int64, uint64 becomes negative
    outside = ((inside < 0) | (inside >= grid)).any(axis=1)
    if outside.any():
        site = tuple(sites[outside.argmax()].tolist())
        raise ValueError(f"site {site} lies outside the grid {grid}")
    return inside


def refuse_other_sites(sites, grid, made_of: np.ndarray, made_on: tuple[int, ...], what: str):
    """ValueError if sites and grid are not those that `what` (a rulebook, say) was made of."""
    if grid != made_on:
        raise ValueError(f"sites are on a grid {grid}, but {what}'s on {made_on}")
    if len(sites) != len(made_of):
        raise ValueError(f"there are {len(sites)} sites, but {what} has {len(made_of)}")
    if sites is not made_of and not np.array_equal(sites, made_of):
        s = np.flatnonzero((sites != made_of).any(axis=1))[0]
        ours, theirs = tuple(sites[s].tolist()), tuple(made_of[s].tolist())
        raise ValueError(f"site {s} is {ours}, but in {what} {theirs}")


def refuse_duplicates(sites: np.ndarray, grid: tuple[int, ...]) -> None:
    """ValueError if a site occurs more than once."""
    cells = np.sort(np.ravel_multi_index(tuple(sites.T), grid))
    same = np.flatnonzero(cells[1:] == cells[:-1])
    if len(same):
        twice = np.array(np.unravel_index(cells[same[0]], grid))
        raise ValueError(f"site {tuple(twice.tolist())} occurs more than once")


def total(X: np.ndarray) -> np.ndarray:
    """The sum of the rows, accumulated in float64: in float32, a million rows lose their tail."""
    return X.sum(axis=0, dtype=np.result_type(X, np.float64)).astype(X.dtype)


def transpose_times(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """X' Y, a sum over rows too."""
    wide = np.result_type(X, Y, np.float64)
    return (X.T.astype(wide) @ Y.astype(wide)).astype(np.result_type(X, Y))


def expect(name: str, X: np.ndarray, letters: str, shape: tuple[int, ...]) -> None:
    """ValueError if an array has another shape."""
    if X.shape != shape:
        raise ValueError(f"{name} has shape {X.shape}, expected {letters} = {shape}")


def expect_kind(name: str, x, *kinds: type, made: str = "") -> None:
    """TypeError if x is something else, a rulebook in the place of an image, say."""
    if not isinstance(x, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{name} is of type {type(x).__name__}, expected {expected}{made}")


def plain(name: str, x, expected: str = "an array"):
    """The argument itself; TypeError if it is an image, a rulebook or a map of points."""
    if hasattr(x, "sites"):
        raise TypeError(f"{name} is of type {type(x).__name__}, expected {expected}")
    return x


def array(name: str, X) -> np.ndarray:
    """As an array; ValueError if it does not hold numbers."""
    X = np.asarray(plain(name, X))
    if X.dtype.kind not in "biufc":
        raise ValueError(f"{name} is not an array of numbers: {X!r}")
    return X


def numbers(name: str, X) -> np.ndarray:
    """As an array of float32 or of a wider dtype."""
    X = array(name, X)
    return X.astype(np.result_type(X, np.float32), copy=False)
