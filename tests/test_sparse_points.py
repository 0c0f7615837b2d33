"""Points to voxels and back, in NumPy and in PyTensor: against loops and complex steps."""

from dataclasses import replace

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode

from helpers.checks import complex_step, relative_error
from helpers.sparse_conv import (
    SparseValue,
    graph,
    point_map,
    sparse_conv,
    sparse_conv_grad,
    submanifold_rulebook,
    to_points,
    to_points_grad,
    voxel_means,
    voxel_means_grad,
)

PY = Mode(linker="py", optimizer="fast_compile")


def cloud(d, images=0, m=40, seed=0):
    rng = np.random.default_rng(seed)
    points, which = rng.uniform(0, 2, (m, d)), rng.integers(images, size=m) if images else None
    grid = ((images,) if images else ()) + (4,) * d
    return points, point_map(points, 0.5, grid, which), which, rng


@pytest.mark.parametrize(("d", "images"), [(1, 0), (2, 0), (3, 0), (1, 3), (2, 2), (3, 2)])
def test_the_map_the_means_and_the_way_back_are_those_of_loops(d, images):
    points, voxels, which, rng = cloud(d, images)
    F = rng.standard_normal((len(points), 2))
    cells = {}
    for p, point in enumerate(points):
        cell = tuple(int(c // 0.5) for c in point)
        cells.setdefault((int(which[p]), *cell) if images else cell, []).append(p)
    assert [tuple(site) for site in voxels.sites.tolist()] == sorted(cells)
    x = voxel_means(F, voxels)
    assert (x.grid, x.d) == (voxels.grid, d)
    for s, cell in enumerate(sorted(cells)):
        np.testing.assert_array_equal(np.flatnonzero(voxels.voxel == s), cells[cell])
        np.testing.assert_allclose(x.values[s], np.mean([F[p] for p in cells[cell]], axis=0))
        for p in cells[cell]:
            np.testing.assert_array_equal(to_points(x, voxels)[p], x.values[s])
    if not images:
        y = SparseValue.from_points(points, F, 0.5, voxels.grid)
        np.testing.assert_array_equal(y.values, x.values)
        np.testing.assert_array_equal(y.sites, x.sites)


@pytest.mark.parametrize(("d", "images"), [(1, 0), (2, 3), (3, 2)])
def test_gradients_of_the_means_and_of_the_way_back(d, images):
    _, voxels, _, rng = cloud(d, images)
    F, M = rng.standard_normal((40, 2)), rng.standard_normal((len(voxels.sites), 2))
    C, D = rng.standard_normal(M.shape), rng.standard_normal(F.shape)
    step = complex_step(lambda F: (C * voxel_means(F, voxels).values).sum(), F)
    assert relative_error(voxel_means_grad(C, voxels), step) < 1e-14
    x = voxel_means(F, voxels)
    step = complex_step(lambda M: (D * to_points(replace(x, values=M), voxels)).sum(), M)
    assert relative_error(to_points_grad(D, voxels), step) < 1e-14


@pytest.mark.parametrize(("d", "images"), [(1, 0), (2, 0), (3, 2)])
def test_a_network_from_points_to_points_to_its_second_derivative(d, images):
    _, voxels, _, rng = cloud(d, images)
    rules = submanifold_rulebook(voxels.sites, voxels.grid, 3, d=d)
    at = [rng.standard_normal(s) for s in ((40, 2), (3**d * 2, 3), (3,))]
    C, moves = rng.standard_normal((40, 3)), [rng.standard_normal(v.shape) for v in at]
    F, W, b = inputs = [pt.dmatrix(), pt.dmatrix(), pt.dvector()]
    voxel, counts = pt.lvector(), pt.lvector()
    y = graph.conv(graph.voxel_means(F, voxel, counts), W, b, rules)
    out = graph.to_points(y, voxel)
    first = pt.grad((C * out**3).sum(), inputs)
    directions = [v.type() for v in inputs]
    slope = sum((v * g).sum() for v, g in zip(directions, first, strict=True))
    outputs = [out, *first, *pt.grad(slope, inputs)]
    f = pytensor.function([*inputs, *directions, voxel, counts], outputs, mode=PY)
    values, *found = f(*at, *moves, voxels.voxel, voxels.counts)

    def network(F, W, b):
        x = voxel_means(F, voxels)
        return x, to_points(sparse_conv(x, W, b, rules), voxels)

    def gradients(F, W, b):
        x, G = network(F, W, b)
        dY = to_points_grad(3 * C * G**2, voxels)
        dM, _, dW, db = sparse_conv_grad(x, W, rules, dY, np.zeros(3))
        return voxel_means_grad(dM, voxels), dW, db

    assert relative_error(values, network(*at)[1]) < 1e-14
    moved = gradients(*(v + 1e-30j * u for v, u in zip(at, moves, strict=True)))
    for k, g in enumerate(moved):
        assert relative_error(found[k], g.real) < 1e-13
        assert relative_error(found[3 + k], g.imag / 1e-30) < 1e-13


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_mean_of_half_a_million_points(dtype):
    """Summed in float32, it is 0.10035 for 0.1."""
    m, tenth = 500_000, np.float32(dtype(0.1))
    F = np.full((m, 1), dtype(0.1))
    voxels = point_map(np.zeros((m, 1), np.int8), 1, (4,))
    x = voxel_means(F, voxels)
    assert x.values.dtype == np.float32 and x.values[0, 0] == tenth
    assert to_points_grad(F.astype(np.float32), voxels)[0, 0] == pytest.approx(m * tenth, rel=1e-6)
    features = pt.matrix(dtype="float32")
    means = graph.voxel_means(features, voxels.voxel, voxels.counts).values
    back = pt.grad(graph.to_points((means, means[0]), voxels.voxel).mean(), features)
    f = pytensor.function([features], [means, back], mode=PY)
    means, back = f(F.astype(np.float32))
    assert means.dtype == np.float32 and means[0, 0] == tenth
    assert back.sum(dtype=float) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("integers", "int8 uint8 int16 uint16 int32 uint32 int64 uint64".split())
def test_whole_coordinates_are_divided_exactly(integers):
    top = min(np.iinfo(integers).max, 2**56 - 1)  # in float64, 2^56 - 1 is 2^56
    points, images = np.array([[top], [top - 1], [0]], integers), np.array([120, 5, 5], integers)
    voxels = point_map(points, np.array(1, integers), (121, top + 1), images)
    assert voxels.sites.tolist() == [[5, 0], [5, top - 1], [120, top]]
    assert point_map(points, 3, (top,)).sites.tolist()[-1] == [top // 3]


BATCH = point_map([[0.5], [1.5]], 1.0, (2, 4), images=[0, 1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: point_map([[2**63]], 1, (4,)), "points or cells are beyond int64"),
        (lambda: point_map([[1e30]], 1.0, (4,)), r"point 0, \(1e\+30,\), lies outside the grid"),
        (lambda: point_map([[-0.1]], 1.0, (4,)), r"point 0, \(-0.1,\), lies outside the grid"),
        (lambda: point_map([[1j]], 1.0, (4,)), "points is not an array of real numbers"),
        (lambda: point_map([[0.0]], 1.0, (2, 4), images=[2]), r"site \(2,\) lies outside"),
        (lambda: point_map([[0.0]], 1.0, (2, 4), images=[0, 1]), r"images has shape \(2,\)"),
        (lambda: point_map([[0.0]], 1.0, (2, 4)), r"points has shape \(1, 1\), expected \(m, d\)"),
        (lambda: point_map([[0.0] * 3], 1.0, (2**21,) * 3), "too many cells, 9223372036854775808,"),
        (lambda: voxel_means(np.ones((3, 1)), BATCH), r"\(3, 1\), .* there are 2 points"),
        (lambda: voxel_means_grad(np.ones((3, 1)), BATCH), r"dM has shape \(3, 1\), expected 2"),
        (lambda: to_points_grad(np.ones(2), BATCH), r"dG has shape \(2,\), expected 2 rows"),
        (
            lambda: to_points(SparseValue([[0, 0], [1, 2]], np.ones((2, 1)), (2, 4, 1)), BATCH),
            r"site 1 is \(1, 2\), but in the map of points \(1, 1\)",
        ),
    ],
)
def test_bad_points_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
