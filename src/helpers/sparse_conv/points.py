r"""Points and voxels: which voxel each point is in, means over voxels, and values back at points.

With :math:`v(p)` the voxel of point p and :math:`n_s` the number of points in voxel s,

.. math:: M_s = \frac{1}{n_s} \sum_{p:\ v(p) = s} F_p , \qquad G_p = M_{v(p)} .

Both are linear, and each is the other's transpose but for the factor :math:`1/n_s`: so are their
gradients.
"""

from typing import NamedTuple

import numpy as np

from helpers.sparse_conv import value


class PointMap(NamedTuple):
    """Which voxel each of m points is in.

    Parameters
    ----------
    sites : int64 array (a, d), or of a batch (a, 1 + d)
        The voxels that hold a point, in row-major order.
    grid : tuple of d int, or of a batch 1 + d
    d : int
        Dimensions of one image.
    voxel : int64 array (m,)
        Row of each point's voxel in `sites`.
    counts : int64 array (a,)
        Number of points in each voxel.
    """

    sites: np.ndarray
    grid: tuple[int, ...]
    d: int
    voxel: np.ndarray
    counts: np.ndarray


def point_map(points, cell, grid, images=None) -> PointMap:
    """The voxels of a point cloud, or of a batch of clouds, and the map from points to voxels.

    Parameters
    ----------
    points : array (m, d)
        Coordinates, counted from the corner of voxel 0. Integers and integer cells are divided in
        int64, all others in float64.
    cell : float, or array (d,)
        Length of a voxel's edge, or its lengths along each axis.
    grid : tuple of d int, or of a batch 1 + d
        Number of voxels along each axis, in a batch the number of clouds first.
    images : int array (m,), optional
        Of a batch, the cloud that each point belongs to.

    Returns
    -------
    PointMap

    Raises
    ------
    ValueError
        If shapes do not fit, a coordinate is not finite, or a point lies outside the grid.

    Examples
    --------
    >>> points = point_map([[0.1, 0.2], [1.9, 0.0], [0.4, 0.4]], cell=0.5, grid=(4, 4))
    >>> points.sites, points.voxel
    (array([[0, 0],
           [3, 0]]), array([0, 1, 0]))
    """
    for name, X in (("points", points), ("cell", cell), ("grid", grid)):
        value.plain(name, X, "numbers")
    if np.ndim(grid) != 1:
        raise ValueError(f"grid is {grid!r}, expected the number of voxels along each axis")
    grid = value.check_shape((*grid, 1))[:-1]
    d = value.dimensions(len(grid), len(grid) - (images is not None), grid)
    points, cells = np.asarray(points), np.asarray(cell)
    if points.dtype.kind not in "iuf":
        raise ValueError(f"points is not an array of real numbers: {points!r}")
    if points.ndim != 2 or points.shape[1] != d:
        raise ValueError(f"points has shape {points.shape}, expected (m, d) = (m, {d})")
    real = cells.shape in ((), (d,)) and cells.dtype.kind in "iuf"
    if not (real and (cells > 0).all() and np.isfinite(cells).all()):
        raise ValueError(f"cell is {cell!r}, expected a positive length, or one for each axis")
    if not np.isfinite(points).all():
        raise ValueError("a point has a coordinate that is not finite")
    if points.dtype.kind in "iu" and cells.dtype.kind in "iu":
        if max(points.max(initial=0), cells.max()) > value.INT64_MAX:
            raise ValueError(f"points or cells are beyond int64: {points!r}, cell {cell!r}")
        voxels = points.astype(np.int64) // cells.astype(np.int64)
    else:
        voxels = np.floor(points.astype(np.float64) / cells.astype(np.float64))
    outside = ((voxels < 0) | (voxels >= np.array(grid[-d:]))).any(axis=1)
    if outside.any():
        p = outside.argmax()
        raise ValueError(
            f"point {p}, {tuple(points[p].tolist())}, lies outside the grid {grid} of cells {cell}"
        )
    voxels = voxels.astype(np.int64)
    if images is not None:
        images = np.asarray(images)
        value.expect("images", images, "(m,)", (len(points),))
        voxels = np.hstack([value.check_sites(images[:, np.newaxis], grid[:1]), voxels])
    value.check_cells(grid)
    which, voxel, counts = np.unique(
        np.ravel_multi_index(tuple(voxels.T), grid), return_inverse=True, return_counts=True
    )
    return PointMap(np.stack(np.unravel_index(which, grid), axis=-1), grid, d, voxel, counts)


def voxel_means(features, points: PointMap) -> value.SparseValue:
    """Mean of the features (m, n_in) of each voxel's points: a SparseValue at the map's voxels.

    Summed in float64 whatever the features' dtype.
    """
    value.expect_kind("points", points, PointMap)
    features = value.numbers("features", features)
    if features.ndim != 2 or len(features) != len(points.voxel):
        raise ValueError(
            f"features has shape {features.shape}, expected (m, n_in) as there are "
            f"{len(points.voxel)} points"
        )
    means = _sums(features, points) / points.counts[:, np.newaxis]
    shape = (*points.grid, features.shape[1])
    return value.SparseValue(points.sites, means.astype(features.dtype), shape, None, points.d)


def voxel_means_grad(dM, points: PointMap) -> np.ndarray:
    """Gradient (m, n_in) with respect to the features, from that to the means, dM (a, n_in)."""
    value.expect_kind("points", points, PointMap)
    dM = _rows("dM", dM, len(points.counts))
    return (dM / points.counts[:, np.newaxis]).astype(dM.dtype)[points.voxel]


def to_points(y: value.SparseValue, points: PointMap) -> np.ndarray:
    """Values (m, n) at the points: each takes that of its voxel.

    Parameters
    ----------
    y : SparseValue (*grid, n)
        At the map's voxels and no others, as submanifold and inverse layers leave them.
    points : PointMap

    Raises
    ------
    ValueError
        If the sites of y are not the map's.
    """
    value.expect_kind("points", points, PointMap)
    value.expect_kind("y", y, value.SparseValue)
    value.refuse_other_sites(y.sites, y.grid, points.sites, points.grid, "the map of points")
    return y.values[points.voxel]


def to_points_grad(dG, points: PointMap) -> np.ndarray:
    """Gradient (a, n) with respect to the voxels' values, from that to the points', dG (m, n)."""
    value.expect_kind("points", points, PointMap)
    dG = _rows("dG", dG, len(points.voxel))
    return _sums(dG, points).astype(dG.dtype)


def _sums(X, points: PointMap) -> np.ndarray:
    """Sums (a, n) of the rows of X over the points of each voxel, in float64 or complex128."""
    sums = np.zeros((len(points.counts), X.shape[1]), np.result_type(X, np.float64))
    np.add.at(sums, points.voxel, X)
    return sums


def _rows(name: str, X, rows: int) -> np.ndarray:
    X = value.numbers(name, X)
    if X.ndim != 2 or len(X) != rows:
        raise ValueError(f"{name} has shape {X.shape}, expected {rows} rows")
    return X
