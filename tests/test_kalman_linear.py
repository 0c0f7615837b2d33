"""One Op in the place of whatever is linear with constant coefficients around the filter."""

import tracemalloc

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from kalman_models import season
from pytensor.compile.mode import Mode
from pytensor.graph import FunctionGraph, Op
from pytensor.graph.traversal import ancestors

from helpers.checks import relative_error
from helpers.kalman import linear
from helpers.kalman.linear import LinearMap, OneMap
from helpers.kalman.ops.likelihood import (
    KalmanLoglikeGrad,
    KalmanLoglikeTangents,
    kalman_loglike,
    product,
    sandwich,
)

PYTHON = Mode("py", "fast_run")
R = np.random.default_rng(0).standard_normal((5, 3))


def everywhere(outputs, inputs):
    """The outputs after the rewrite, whatever Ops there are around them."""
    rewrite = OneMap()
    rewrite.around = Op
    graph = FunctionGraph(inputs, outputs, clone=True)
    rewrite.apply(graph)
    return graph.inputs, graph.outputs


def maps_in(outputs) -> list:
    nodes = {X.owner for X in ancestors(outputs) if X.owner}
    return [node.op for node in nodes]


x, X, s = pt.vector(shape=(6,)), pt.matrix(shape=(3, 3)), pt.scalar()
ROWS, COLUMNS = np.array([2, 0]), np.array([1, 2])
CASES = {
    "onto the diagonal": pt.diag(x),
    "off the diagonal": pt.diagonal(X) + x[:3] / 4.0,
    "block diagonal": pt.linalg.block_diag(X, pt.diag(x[1:3])),
    "joined, split, backwards": pt.concatenate([x[::-1], pt.split(x, [2, 4])[1]])[1:],
    "put in": pt.set_subtensor(pt.ones((3, 4))[1:, ::-2], x.reshape((2, 3))[:, :2]),
    "added to": pt.inc_subtensor(pt.ones((3, 4))[:, 2], 2 * x[:3]),
    "added to itself": pt.inc_subtensor(x[::-1][1:3], x[:2]) - x,
    "put at indices": pt.set_subtensor(pt.zeros((3, 3))[ROWS, COLUMNS], s)[None] * R[:2, :1, None],
    "added at indices": pt.inc_subtensor((-X)[ROWS, COLUMNS], x[:2]).T,
    "taken at indices": X[ROWS[:, None], COLUMNS],
    "sums": pt.sum(pt.diag(x)[:3], axis=1) + X.sum() - pt.sum(x[:3]),
    "a number": pt.diag(x)[2, 2] + product(R[:1, :], X)[0, 1],
    "R Q R'": sandwich(R, pt.diag(x[:3])) + np.eye(5),
    "many R Q": product(np.stack([R, 2 * R]), pt.stack([X, X.T])),
    "many Q R": product(pt.stack([X, X.T]), R.T[None]),
    "repeated": pt.alloc(x, 2, 6).reshape((3, 4)),
    "a vector of numbers": pt.stack([s, pt.diag(x)[1, 1], s * 3.0]),
    "constants of other types": pt.linalg.block_diag(
        pt.join(1, X, np.array([[1], [2], [3]])),
        pt.set_subtensor(pt.diag(x[:2])[0, 1], np.float32(1.0)),
    ),
    "the shape of a number": x.reshape(pt.concatenate([s.shape, [2, 3]])),
    "a batch beside integers": pt.linalg.block_diag(pt.stack([X, X.T]), np.ones((2, 1, 1), int)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["py", "NUMBA"])
def test_one_map_moves_numbers_as_the_nodes_do(name, mode):
    inputs, given = [x, X, s], CASES[name]
    rng = np.random.default_rng(1)
    values = [rng.standard_normal(6), rng.standard_normal((3, 3)), rng.standard_normal()]
    expected = pytensor.function(inputs, given, mode=PYTHON, on_unused_input="ignore")(*values)
    new_inputs, new = everywhere([given], inputs)
    assert [type(op) for op in maps_in(new)] == [LinearMap]
    mode = Mode("py", None) if mode == "py" else mode
    found = pytensor.function(new_inputs, new[0], mode=mode, on_unused_input="ignore")(*values)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-14, atol=1e-14)


Y = np.random.default_rng(2).standard_normal((4, 6, 5))
LAYOUTS = {
    "contiguous": Y,
    "turned": np.asfortranarray(Y),
    "every other, backwards": np.repeat(np.repeat(Y, 2, axis=1), 3, axis=2)[:, ::-2, ::3],
    "one row for all": np.broadcast_to(Y[0, :, 0], (4, 5, 6)).swapaxes(1, 2),
    "a vector": Y[0, 1, ::-1],
    "a number": Y[0, 0, 0, ...],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_maps_read_any_layout(layout):
    """Beside a second array, which is added to the first."""
    given, rng = LAYOUTS[layout], np.random.default_rng(3)
    where = np.stack([rng.integers(0, 6, 40), rng.integers(0, given.size, 40)])
    terms = where, rng.standard_normal(40), pt.tensor(shape=given.shape, dtype="float64")
    more = np.array([[5], [0]]), np.array([2.0]), pt.vector(shape=(1,))
    sizes, at, b = np.array([2, 3, given.size, 1]), np.array([1, 4]), np.array([3.0, -1.0])
    y = LinearMap((2, 3), (given.ndim, 1))(sizes, at, b, *terms, *more)
    flat = np.bincount(where[0], terms[1] * np.ravel(given)[where[1]], 6)
    flat[[1, 4, 5]] += 3.0, -1.0, 2.0 * 7.0
    inputs = [terms[2], more[2]]
    for mode in ("NUMBA", PYTHON):
        found = pytensor.function([pytensor.In(X, borrow=True) for X in inputs], y, mode=mode)(
            given, np.array([7.0])
        )
        np.testing.assert_allclose(found, flat.reshape(2, 3), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("mode", ["NUMBA", PYTHON])
def test_an_array_of_another_size_is_refused(mode):
    """A map is made for arrays of one size; one that is shorter is not read beyond its end."""
    X = pt.matrix()
    where, nothing = np.array([[0], [5]]), np.zeros(0)
    y = LinearMap((1,), (2,))(np.array([1, 6]), nothing.astype(int), nothing, where, np.ones(1), X)
    f = pytensor.function([X], y, mode=mode)
    assert f(np.arange(6.0).reshape(2, 3)) == 5.0
    for shape in ((2, 2), (3, 3), (0, 6)):
        with pytest.raises(ValueError, match="an array is not of the size|an array has"):
            f(np.ones(shape))


NOT_MAPS = {
    "an index twice": pt.inc_subtensor(pt.zeros(3)[np.array([1, 1])], x[:2]),
    "a product of two": product(X, pt.diag(x[:3])),
    "a square": pt.diag(x * x),
    "divided by it": pt.diag(1.0 / x),
    "infinite": pt.diag(np.inf * x),
}


@pytest.mark.parametrize("name", NOT_MAPS)
def test_what_is_no_map_keeps_its_value(name):
    inputs, values = [x, X], [np.arange(1.0, 7.0), np.arange(9.0).reshape(3, 3)]
    expected = pytensor.function(inputs, NOT_MAPS[name], mode=PYTHON, on_unused_input="ignore")
    new_inputs, new = everywhere([NOT_MAPS[name]], inputs)
    assert any(not isinstance(op, LinearMap) for op in maps_in(new))
    found = pytensor.function(new_inputs, new[0], mode=Mode("py", None), on_unused_input="ignore")
    np.testing.assert_array_equal(found(*values), expected(*values))


BIG = np.float64(1e200)
moved = pt.diagonal(pt.diag(x))
OVERFLOWS = {
    "a product of coefficients": moved * BIG * BIG,
    "a sum of coefficients": product(np.full((1, 6), 1e308), pt.stack([x[0]] * 6)[:, None]),
    "a product of constants": pt.mul(moved, BIG, BIG),
    "a constant term": (moved + BIG) * BIG,
    "an infinite constant term times zero": (moved + np.inf) * np.zeros(6),
    "infinite constant terms": (moved + np.inf) - np.inf,
    "one over a small number": moved / np.float64(1e-320),
    "one over zero": moved / np.zeros(6),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", OVERFLOWS)
def test_what_overflows_in_the_map_alone_keeps_its_value(name):
    """Coefficients are multiplied before any number is there that could keep the product small."""
    value, inputs = 1e-300 * np.arange(1.0, 7.0), [x]
    plain = Mode("py", None)
    new_inputs, new = everywhere([OVERFLOWS[name]], inputs)
    with np.errstate(all="ignore"):
        expected, found = (
            pytensor.function(ins, out, mode=plain, on_unused_input="ignore")(value)
            for ins, out in ((inputs, OVERFLOWS[name]), (new_inputs, new[0]))
        )
    np.testing.assert_allclose(found, expected, rtol=1e-15)


u = pt.vector()
FAILS = {
    "an index out of bounds": pt.diag(x)[np.array([7])].sum(axis=0),
    "a length that does not divide": u.reshape(pt.concatenate([s.shape, [2, 3]])),
    "arrays that do not fit": pt.diag(x) + pt.diag(u),
}


@pytest.mark.parametrize("name", FAILS)
def test_a_node_that_fails_does_so_when_it_is_called(name):
    """And the others are a map nevertheless."""
    follow = linear.Follow(lambda X: {u: (5,)}.get(X, X.type.shape))
    graph = FunctionGraph([x, u, s], [FAILS[name], pt.diag(x)[::-1]], clone=False)
    visited = [follow.visit(node) for node in graph.toposort()]
    assert not all(visited)
    assert isinstance(follow.state[graph.outputs[1]], linear.Affine)


@pytest.mark.parametrize("limit", ["COEFFICIENTS", "ENTRIES"])
def test_a_large_map_is_left_to_pytensor(limit, monkeypatch):
    monkeypatch.setattr(linear, limit, 5)  # a diagonal of six has 6 coefficients of 36 entries
    _, new = everywhere([pt.diag(x)], [x])
    assert not any(isinstance(op, LinearMap) for op in maps_in(new))


def peak_memory(outputs, inputs) -> int:
    tracemalloc.start()
    try:
        everywhere(outputs, inputs)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_what_stands_beside_the_maps_takes_no_memory():
    """Identities of all arrays of a large likelihood took half a gigabyte."""
    size = 100_000
    big = X = pt.vector(shape=(size,))  # noqa: N806
    for _ in range(20):
        X = pt.log1p(pt.exp(X - s)) * pt.exp(s)  # noqa: N806
    assert peak_memory([X.sum(), pt.diag(x)], [big, x, s]) < 20 * 8 * size


@pytest.mark.parametrize("large", [
    pt.zeros((400, 300, 300)) + s,
    pt.exp(pt.zeros((400, 300, 300))) + s,
    pt.alloc(s, 400, 300, 300),
    pt.exp(pt.arange(pt.constant(40_000_000.0))) * s,
], ids=["zeros", "exp", "alloc", "arange"])  # fmt: skip
def test_a_large_array_is_not_made_to_find_that_it_is_large(large):
    assert peak_memory([large, pt.diag(x)], [x, s]) < 10_000_000


def test_what_is_constant_is_a_constant():
    _, (new,) = everywhere([pt.diag(pt.ones(3)) * 2.0 + 0 * X], [X])
    assert new.owner is None
    np.testing.assert_array_equal(new.data, 2.0 * np.eye(3))


def hessian_of_a_season():
    """Log density and gradient and Hessian of a season in the logarithms of variances and a0."""
    model = season(4)
    y = np.random.default_rng(2).standard_normal((30, 1)).cumsum(axis=0)
    arrays, theta = model.asdict(), pt.vector("theta", shape=(2 + model.m,))
    scales = pt.exp(theta[:2])
    arrays["Q"] = pt.set_subtensor(pt.zeros(arrays["Q"].shape)[0, 0], scales[0])
    arrays["H"] = pt.diag(scales[1:2])
    arrays["a0"] = theta[2:]
    L = kalman_loglike(y, **arrays).sum()
    gradient = pt.grad(L, theta)
    return theta, [L, gradient, pytensor.gradient.jacobian(gradient, theta)]


def test_a_hessian_with_maps_is_that_without():
    theta, outputs = hessian_of_a_season()
    with_maps = pytensor.function([theta], outputs, mode=PYTHON.including("helpers_kalman_linear"))
    without = pytensor.function([theta], outputs, mode=PYTHON)
    kinds = [type(node.op) for node in with_maps.maker.fgraph.apply_nodes]
    assert LinearMap in kinds
    assert LinearMap not in [type(node.op) for node in without.maker.fgraph.apply_nodes]
    at = 0.3 * np.sin(1 + np.arange(theta.type.shape[0]))
    for found, expected in zip(with_maps(at), without(at), strict=True):
        assert relative_error(found, expected) < 1e-12


def test_the_filter_is_differentiated_once_for_the_gradient_and_all_rows():
    theta, outputs = hessian_of_a_season()
    function = pytensor.function([theta], outputs, mode=PYTHON)
    cores = [getattr(x.op, "core_op", x.op) for x in function.maker.fgraph.apply_nodes]
    assert sum(isinstance(op, KalmanLoglikeGrad) for op in cores) == 1
    assert sum(isinstance(op, KalmanLoglikeTangents) for op in cores) == 1


def test_a_pymc_model_has_no_index_left_to_compile_but_slices():
    pytest.importorskip("pymc_extras")
    import pymc as pm
    from pymc_extras.statespace import structural as st

    from helpers.kalman import register_filter

    register_filter()
    parts = st.LevelTrend(order=2) + st.TimeSeasonality(season_length=4, name="season")
    built = (parts + st.MeasurementError(name="noise")).build(
        filter_type="closed_form", verbose=False
    )
    with pm.Model(coords=built.coords) as model:
        pm.Deterministic("P0", pt.diag(pm.Gamma("diagonal", 5, 1, shape=5)))
        pm.Normal("initial_level_trend", shape=2)
        pm.Normal("params_season", shape=3)
        pm.Gamma("sigma_level_trend", 2, 1, shape=2)
        pm.Gamma("sigma_season", 2, 1)
        pm.Gamma("sigma_noise", 2, 1)
        built.build_statespace_graph(np.arange(8.0)[:, None])
    # It is compiled at its first call: this looks at the graph alone.
    function = model.logp_dlogp_function(ravel_inputs=True, mode="NUMBA")._pytensor_function
    names = {type(node.op).__name__ for node in function.maker.fgraph.apply_nodes}
    assert "LinearMap" in names
    assert not {x for x in names if "Advanced" in x or x in {"BlockDiagonal", "Product", "Split"}}
