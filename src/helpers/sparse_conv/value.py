"""Active sites and their values: the sparse form of an image, or of a batch of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from helpers.sparse_conv.search import first_outside

__all__ = ["SparseValue", "stack"]


@dataclass(frozen=True, eq=False)
class SparseValue:
    """An image that is the same everywhere, except at some active sites.

    An image has d = 1, 2 or 3 dimensions: a signal, a picture, a volume of voxels. Every function
    of this package takes a batch of images in the place of one image: its sites have a leading
    column, the image, and its shape a leading entry, the number of images. All images of a batch
    have the same ground state.

    Parameters
    ----------
    sites : array (a, d) or (a, 1 + d), int32 or int64
        Coordinates of each active site (row and column, say), in a batch the image first; no site
        twice.
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
        outside the grid or occur twice, or values are not numbers.

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
        values = _numbers("values", self.values)
        if values.size == 0 and len(sites) == 0:
            values = values.reshape(0, n_in)
        if values.shape != (len(sites), n_in):
            raise ValueError(
                f"values has shape {values.shape}, expected (a, n_in) = {(len(sites), n_in)}"
            )
        t = np.zeros(n_in, values.dtype) if self.ground_state is None else self.ground_state
        t = _numbers("ground_state", t)
        if t.shape != (n_in,):
            raise ValueError(f"ground_state has shape {t.shape}, expected (n_in,) = ({n_in},)")
        twice = first_duplicate(sites, shape[:-1])
        if twice is not None:
            raise ValueError(f"site {tuple(twice.tolist())} occurs more than once")
        dtype = np.result_type(values, t)
        self._set(sites, values.astype(dtype, copy=False), shape, t.astype(dtype, copy=False), d)

    def _set(self, *fields) -> None:
        names = ("sites", "values", "shape", "ground_state", "d")
        for name, field in zip(names, fields, strict=True):
            object.__setattr__(self, name, field)

    @classmethod
    def _trusted(cls, sites, values, shape, ground_state, d) -> SparseValue:
        """Without the checks: for what a layer made of a SparseValue."""
        x = object.__new__(cls)
        x._set(sites, values, shape, ground_state, d)
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
        dense = _numbers("dense", dense)
        shape = check_shape(dense.shape)
        t = np.zeros(shape[-1], dense.dtype) if ground_state is None else ground_state
        t = _numbers("ground_state", t)
        if t.shape != shape[-1:]:
            raise ValueError(f"ground_state has shape {t.shape}, expected (n_in,) = {shape[-1:]}")
        sites = np.argwhere((dense != t).any(axis=-1))
        return cls(sites, dense[tuple(sites.T)], shape, t, d)

    @classmethod
    def from_points(cls, points, features, cell, grid) -> SparseValue:
        """A point cloud in voxels: active is each voxel that holds a point; features are averaged.

        Parameters
        ----------
        points : array (m, d)
            Coordinates, counted from the corner of voxel 0.
        features : array (m, n_in)
        cell : float, or array (d,)
            Length of a voxel's edge, or its lengths along each axis.
        grid : tuple of d int
            Number of voxels along each axis.

        Returns
        -------
        SparseValue (*grid, n_in)
            Sites in row-major order.

        Raises
        ------
        ValueError
            If shapes do not fit, a coordinate is not finite, or a point lies outside the grid.
        """
        points, features = _numbers("points", points), _numbers("features", features)
        if features.ndim != 2 or np.ndim(grid) != 1:
            raise ValueError(
                f"features has shape {features.shape} and grid is {grid!r}, expected (m, n_in) and "
                "the number of voxels along each axis"
            )
        shape = check_shape((*grid, features.shape[1]))
        d = dimensions(len(grid), len(grid), shape)
        if points.ndim != 2 or points.shape[1] != d:
            raise ValueError(f"points has shape {points.shape}, expected (m, d) = (m, {d})")
        if len(features) != len(points):
            raise ValueError(f"there are {len(features)} features of {len(points)} points")
        cells = np.asarray(cell)
        real = cells.shape in ((), (d,)) and cells.dtype.kind in "iuf"
        if not (real and (cells > 0).all() and np.isfinite(cells).all()):
            raise ValueError(f"cell is {cell!r}, expected a positive length, or one for each axis")
        if not np.isfinite(points).all():
            raise ValueError("a point has a coordinate that is not finite")
        voxels = np.floor(points / cells).astype(np.int64)
        voxels = check_sites(voxels, shape[:-1])
        sites, which = np.unique(voxels, axis=0, return_inverse=True)
        sums = np.zeros((len(sites), shape[-1]), features.dtype)
        np.add.at(sums, which.ravel(), features)
        counts = np.bincount(which.ravel(), minlength=len(sites))[:, np.newaxis]
        return cls(sites, sums / counts.astype(sums.dtype), shape, None, d)


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
        If there is no image, one is a batch itself, or shapes or ground states differ.
    """
    if len(images) == 0:
        raise ValueError("there are no images to stack")
    first = images[0]
    for k, x in enumerate(images):
        if len(x.grid) != x.d:
            raise ValueError(f"image {k} is itself a batch: its shape is {x.shape}")
        if x.shape != first.shape:
            raise ValueError(f"image {k} has shape {x.shape}, image 0 has {first.shape}")
        if not np.array_equal(x.ground_state, first.ground_state, equal_nan=True):
            raise ValueError(f"image {k} and image 0 have different ground states")
    sites = np.concatenate([x.sites for x in images])
    which = np.repeat(np.arange(len(images), dtype=sites.dtype), [len(x.sites) for x in images])
    return SparseValue._trusted(
        np.column_stack([which, sites]),
        np.concatenate([x.values for x in images]),
        (len(images), *first.shape),
        first.ground_state,
        first.d,
    )


def check_shape(shape) -> tuple[int, ...]:
    """The shape as a tuple of int; ValueError if it is not one of an image or a batch."""
    try:
        numbers = tuple(int(s) for s in shape)
        whole = all(n == s for n, s in zip(numbers, shape, strict=True))
    except (TypeError, ValueError):
        numbers, whole = (), False
    if not whole or len(numbers) not in (2, 3, 4, 5) or min(numbers) < 1:
        raise ValueError(
            f"shape is {shape!r}, expected (h, w, n_in), or with another number of dimensions, in "
            "a batch with the number of images first, all positive"
        )
    return numbers


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
    """Sites as an int32 or int64 array (a, columns) within the grid, else ValueError."""
    sites = np.asarray(sites)
    d = len(grid)
    if sites.size == 0 and sites.ndim <= 2:
        integers = sites.dtype if sites.dtype in (np.int32, np.int64) else np.int64
        return np.empty((0, d), integers)
    if sites.dtype.kind not in "iu":
        raise ValueError(f"sites are {sites.dtype}, expected integers")
    if sites.dtype not in (np.int32, np.int64):
        sites = sites.astype(np.int64)
    if sites.ndim != 2 or sites.shape[1] != d:
        raise ValueError(f"sites has shape {sites.shape}, expected (a, {d}) as the grid is {grid}")
    sites = np.ascontiguousarray(sites)
    outside = first_outside(sites, grid)
    if outside >= 0:
        raise ValueError(f"site {tuple(sites[outside].tolist())} lies outside the grid {grid}")
    return sites


def first_duplicate(sites: np.ndarray, grid: tuple[int, ...]) -> np.ndarray | None:
    """A site that occurs more than once, or None."""
    cells = np.sort(np.ravel_multi_index(tuple(sites.T), grid))
    same = np.flatnonzero(cells[1:] == cells[:-1])
    return np.array(np.unravel_index(cells[same[0]], grid)) if len(same) else None


def _numbers(name: str, X) -> np.ndarray:
    X = np.asarray(X)
    if X.dtype.kind not in "biufc":
        raise ValueError(f"{name} is not an array of numbers: {X!r}")
    return X.astype(np.result_type(X, np.float32), copy=False)
