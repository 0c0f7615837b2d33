"""SparseValue and rulebooks, against the notebook's loops and against pictures of the grid."""

from dataclasses import replace
from inspect import signature

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_cases import layers, random_layer
from sparse_loops import loop_output_sites

from helpers import sparse_conv
from helpers.sparse_conv import (
    SparseValue,
    dense_rulebook,
    graph,
    inverse_rulebook,
    next_ground_state,
    point_map,
    rulebook,
    sparse_conv_2d,
    sparse_max_pool,
    stack,
    submanifold_rulebook,
    transposed_rulebook,
    union_rulebooks,
    voxel_means,
)

ONE = {"sites": [[0, 1]], "values": [[7.0, 8.0]], "shape": (2, 3, 2)}


@given(layers(), layers(images=True))
def test_dense_form_and_back(one, batch):
    for x, *_ in (one, batch):
        dense = x.to_dense()
        assert dense.shape == x.shape
        back = SparseValue.from_dense(dense, x.ground_state, d=2)
        order = np.lexsort(x.sites.T[::-1])
        np.testing.assert_array_equal(back.sites, x.sites[order])
        np.testing.assert_array_equal(back.values, x.values[order])
        np.testing.assert_array_equal(back.to_dense(), dense)


def test_from_dense_keeps_a_site_that_differs_in_one_channel_or_is_nan():
    dense = np.full((2, 2, 2), 3.0)
    dense[1, 0] = 3, 4
    dense[0, 1] = np.nan
    x = SparseValue.from_dense(dense, [3, 3])
    np.testing.assert_array_equal(x.sites, [[0, 1], [1, 0]])


@pytest.mark.parametrize("integers", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtypes_are_kept(integers, dtype):
    x, W, b = random_layer(5, (6, 6, 2), 3, 4, dtype=dtype, integers=integers)
    y = sparse_conv_2d(x, W, b, 3)
    assert x.sites.dtype == y.sites.dtype == np.int64
    assert x.values.dtype == y.values.dtype == y.ground_state.dtype == y.to_dense().dtype == dtype


def test_other_numbers_become_floats_and_other_integers_sites():
    x = SparseValue(np.array([[0, 1]], np.uint8), [[7, 8]], (2, 3, 2), [1, 2])
    assert (x.sites.dtype, x.values.dtype, x.ground_state.dtype) == (np.int64, float, float)
    assert SparseValue([], [], (2, 3, 2)).values.shape == (0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sites": [[0, 1], [0, 1]], "values": np.ones((2, 2))}, r"\(0, 1\) occurs more than once"),
        ({"sites": [[0, 3]]}, r"\(0, 3\) lies outside the grid \(2, 3\)"),
        ({"sites": [[-1, 0]]}, r"\(-1, 0\) lies outside"),
        ({"sites": [[0.0, 1.0]]}, "float64, expected integers"),
        ({"sites": [[True, False]]}, "bool, expected integers"),
        ({"sites": [0, 1]}, r"sites has shape \(2,\)"),
        ({"sites": [[0, 0, 1]]}, r"sites has shape \(1, 3\), expected \(a, 2\)"),
        ({"values": [[1.0]]}, r"values has shape \(1, 1\), expected \(a, n_in\) = \(1, 2\)"),
        ({"values": [["a", "b"]]}, "values is not an array of numbers"),
        ({"ground_state": [1.0]}, r"ground_state has shape \(1,\)"),
        ({"ground_state": 1.0}, r"ground_state has shape \(\)"),
        ({"shape": (2, 3)}, r"sites has shape \(1, 2\), expected \(a, 1\)"),
        ({"shape": (3,)}, "expected .h, w, n_in."),
        ({"shape": (2, 0, 2)}, "all positive"),
        ({"shape": (2.5, 3, 2)}, "all positive"),
        ({"shape": None}, "expected .h, w, n_in."),
    ],
)
def test_bad_sparse_values_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        SparseValue(**(ONE | change))


@settings(deadline=None)
@given(layers(images=True), st.integers(1, 3))
def test_rulebook_says_what_each_window_sees(layer, stride):
    x, f, *_ = layer
    *_, h, w, _ = x.shape
    rules = rulebook(x.sites, x.shape, f, stride=stride, d=2)
    a, a_out = len(x.sites), len(rules.sites)
    number = {tuple(site): s for s, site in enumerate(x.sites.tolist())}
    seen = set()
    for image in range(x.shape[0]):
        for i in range((h - f) // stride + 1):
            for j in range((w - f) // stride + 1):
                window = [
                    number.get((image, i * stride + p, j * stride + q), a)
                    for p in range(f)
                    for q in range(f)
                ]
                if min(window) < a:
                    (o,) = np.flatnonzero((rules.sites == (image, i, j)).all(axis=1))
                    seen.add(int(o))
                    np.testing.assert_array_equal(rules.src[o], window)
    assert seen == set(range(a_out))
    inverse = np.full((a, f * f), a_out)
    for o, k in zip(*np.nonzero(rules.src < a), strict=True):
        inverse[rules.src[o, k], k] = o
    np.testing.assert_array_equal(rules.dst, inverse)


def test_a_large_canvas_with_few_sites():
    """The table is hashed here: half a million windows, a few hundred found."""
    x, *_ = random_layer(60, (700, 800, 1), 3, 1)
    expected = loop_output_sites(x.sites, 700, 800, 3)
    rules = rulebook(x.sites, x.shape, 3)
    np.testing.assert_array_equal(rules.sites, np.array(list(expected)))
    np.testing.assert_array_equal(rules.sites, rulebook(x.sites[:], (700, 800), 3).sites)


def test_submanifold_keeps_the_sites():
    x, *_ = random_layer(9, (2, 5, 6, 1), 3, 1)
    rules = submanifold_rulebook(x.sites, x.shape, 3, d=2)
    np.testing.assert_array_equal(rules.sites, x.sites)
    number = {tuple(site): s for s, site in enumerate(x.sites.tolist())}
    for (image, row, col), window in zip(x.sites.tolist(), rules.src, strict=True):
        expected = [
            number.get((image, row + p, col + q), 9) for p in (-1, 0, 1) for q in (-1, 0, 1)
        ]
        np.testing.assert_array_equal(window, expected)
    for s, reached in enumerate(rules.dst):
        for k, o in enumerate(reached):
            assert o == 9 or rules.src[o, k] == s
    assert (rules.dst < 9).sum() == (rules.src < 9).sum()


def test_dense_rulebook_lists_every_cell():
    x, *_ = random_layer(4, (3, 4, 2), 3, 1)
    rules = dense_rulebook(x.sites, x.shape)
    seen = np.concatenate([x.values, x.ground_state[np.newaxis]])[rules.src[:, 0]]
    np.testing.assert_array_equal(seen.reshape(x.shape), x.to_dense())
    np.testing.assert_array_equal(rules.sites[rules.dst[:, 0]], x.sites)


@pytest.mark.parametrize(
    "make", [rulebook, submanifold_rulebook, lambda s, g, f: dense_rulebook(s, g)]
)
def test_bad_sites_are_refused_by_every_rulebook(make):
    for stride_grid in ((5, 5), (5, 6, 1)):
        with pytest.raises(ValueError, match=r"\(4, 4\) occurs more than once"):
            make([[4, 4], [0, 0], [4, 4]], stride_grid, 3)
    with pytest.raises(ValueError, match=r"\(5, 0\) lies outside the grid \(5, 5\)"):
        make([[5, 0]], (5, 5), 3)
    with pytest.raises(ValueError, match="expected .h, w."):
        make([[0, 0]], (5,), 3)


def test_windows_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"f = 3 is larger than the grid: \(2, 5\)"):
        rulebook([[0, 0]], (2, 5), 3)
    with pytest.raises(ValueError, match=r"f is \(3, 1, 1\), expected an integer, or one"):
        rulebook([[0, 0]], (5, 5), (3, 1, 1))
    for make in (rulebook, submanifold_rulebook):
        with pytest.raises(ValueError, match="expected a positive integer"):
            make([[0, 0]], (2, 5), 0)
    with pytest.raises(ValueError, match="f = 2 is even"):
        submanifold_rulebook([[0, 0]], (5, 5), 2)
    with pytest.raises(ValueError, match="stride is 0"):
        rulebook([[0, 0]], (5, 5), 3, stride=0)


def test_sites_that_no_window_holds_may_not_repeat_either():
    with pytest.raises(ValueError, match="more than once"):
        rulebook([[4, 4], [4, 4]], (5, 5), 2, stride=2)


@pytest.mark.parametrize("grid", [(5, 6), (3, 5, 6)])
def test_no_site_at_all(grid):
    sites = np.zeros((0, len(grid)), np.int32)
    for rules in (rulebook(sites, grid, 3, d=2), submanifold_rulebook(sites, grid, 3, d=2)):
        assert rules.sites.shape == (0, len(grid)) and rules.sites.dtype == np.int64
        assert rules.src.shape == rules.dst.shape == (0, 9)
    assert (dense_rulebook(sites, grid).src == 0).all()


def test_a_shape_that_no_site_explains_is_refused():
    """Taken for a picture of four channels, a batch of two lost its first axis."""
    message = r"\(2, 4, 4\) may be .*np.empty\(\(0, 2\), int\) or np.empty\(\(0, 3\), int\)"
    for call in (
        lambda: rulebook([], (2, 4, 4), 2, d=2),
        lambda: submanifold_rulebook([], (2, 4, 4), 3, d=2),
        lambda: dense_rulebook([], (2, 4, 4)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert rulebook(np.empty((0, 3), int), (2, 4, 4), 2, d=2).grid == (2, 3, 3)
    assert rulebook(np.empty((0, 2), int), (2, 4, 4), 2, d=2).grid == (1, 3)
    assert rulebook([], (4, 4), 2).grid == (3, 3)


def test_stacked_images_are_those_images():
    images = [replace(random_layer(a, (4, 5, 2), 3, 1)[0], ground_state=[1, 2]) for a in (3, 0, 6)]
    batch = stack(images)
    np.testing.assert_array_equal(batch.to_dense(), [x.to_dense() for x in images])
    assert batch.grid == (3, 4, 5)


def test_images_that_do_not_stack():
    x, *_ = random_layer(3, (4, 5, 2), 3, 1)
    other = SparseValue(x.sites, x.values, x.shape, x.ground_state + 1)
    wider = SparseValue(x.sites, x.values, (4, 6, 2), x.ground_state)
    for images, message in (
        ([], "no images"),
        ([x, other], "different ground states"),
        ([x, wider], "image 1 has shape"),
        ([stack([x, x])], "itself a batch"),
    ):
        with pytest.raises(ValueError, match=message):
            stack(images)


INTEGERS = "int8 uint8 int16 uint16 int32 uint32 int64 uint64".split()


@pytest.mark.parametrize("integers", INTEGERS)
def test_sites_of_every_integer_type_are_computed_with_in_int64(integers):
    """A transposed rulebook of site 2^30 + 5 with stride 4 in int32 gave 21 for 4294967317."""
    top = min(np.iinfo(integers).max, 2**55)
    grid = (top + 1,)
    sites, number = np.array([[top], [top - 3]], integers), np.dtype(integers).type
    wide = sites.astype(np.int64)
    assert transposed_rulebook(sites, grid, 1, stride=number(4)).sites[:, 0].tolist() == [
        4 * top, 4 * top - 12,
    ]  # fmt: skip
    padded = rulebook(sites, grid, number(3), pad=number(100), dilation=number(2))
    assert padded.sites[:, 0].min() == top - 3 + 100 - 4
    for make in (
        lambda sites: rulebook(sites, grid, 3, stride=2, pad=100),
        lambda sites: submanifold_rulebook(sites, grid, 3, dilation=3),
        lambda sites: transposed_rulebook(sites, grid, 3, stride=100, pad=50, output_pad=99),
        lambda sites: inverse_rulebook(rulebook(wide, grid, 3), sites, grid),
        lambda sites: union_rulebooks(sites, sites[:1], grid)[0],
        lambda sites: dense_rulebook(sites // (top // 2), (3,)),
    ):
        found, expected = make(sites), make(wide)
        for name in ("sites", "src", "dst", "sites_in"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
            assert getattr(found, name).dtype == getattr(expected, name).dtype
        assert found.sites.dtype == np.int64
    x = SparseValue(sites, np.ones((2, 1)), (*grid, 1))
    assert x.sites.dtype == np.int64
    batch = stack([x] * 200)  # more images than int8 can number
    assert batch.sites[:, 0].tolist() == np.repeat(np.arange(200), 2).tolist()


@pytest.mark.parametrize("integers", INTEGERS)
def test_the_kernels_size_may_be_of_any_integer_type(integers):
    """12 x 12 in int8 is -112."""
    f, x = np.dtype(integers).type(12), SparseValue([[7, 7]], [[2.0]], (20, 20, 1))
    y = sparse_conv_2d(x, np.ones((144, 1)), np.zeros(1), f)
    assert y.grid == (9, 9) and y.values.tolist() == [[2.0]] * 64
    assert next_ground_state(np.ones((12**3, 1)), np.ones(1), f, d=3).tolist() == [12**3]
    assert sparse_max_pool(x, f, stride=np.dtype(integers).type(1)).grid == (9, 9)


HUGE = 2**62


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SparseValue([[0, 0]], [[1.0]], (2**32, 2**31, 1)), "too many cells, 92233720"),
        (lambda: SparseValue([[2**63]], [[1.0]], (9, 1)), r"site \(9223372036854775808,\) lies"),
        (lambda: rulebook([[0, 0]], (2**32, 2**31), 3), "cut it into parts, or take larger cells"),
        (lambda: rulebook([[0]], (9,), 3, pad=HUGE), r"too many cells, 92233720.* in int64"),
        (lambda: rulebook([[0]], (9,), 3, pad=HUGE * 2, stride=HUGE), "beyond int64: take smaller"),
        (lambda: rulebook([[0]], (9,), 1, stride=2**64), "stride = 18446744073709551616, pad = 0"),
        (lambda: submanifold_rulebook([[0]], (9,), 3, dilation=HUGE), "coordinates beyond int64"),
        (lambda: transposed_rulebook([[9]], (HUGE,), 2, stride=4), "too many cells, 184467440737"),
        (lambda: transposed_rulebook([[0]], (1,), 1, stride=2**63), "stride = 9223372036854775808"),
        (lambda: submanifold_rulebook([[0] * 3], (9, 9, 9), 2**21 + 1, d=3), "windows of 92233"),
        (lambda: rulebook([[0]], (2**40,), 2**32), "may be more than int32 can number"),
        (lambda: dense_rulebook([[0]], (2**31,)), "has 2147483648 cells, .* pool first"),
        (lambda: union_rulebooks([[0, 0]], [[0, 0]], (2**32, 2**31)), "too many cells"),
        (lambda: stack([SparseValue([[0]], [[1.0]], (2**62, 1))] * 2), "too many cells, 92233720"),
        (lambda: rulebook([[0]], (5.5,), 2), r"shape is \(5.5,\), expected"),
        (lambda: rulebook([[0]], (5,), True), "f is True, expected a positive integer"),
    ],
)
def test_what_int64_cannot_hold_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_ways_out_of_too_many_cells():
    """Larger cells, or a part of the grid: (2^32, 2^31) has one cell too many."""
    assert rulebook([[2**40]], (2**40 + 1,), 1, stride=2**30).sites.tolist() == [[2**10]]
    assert rulebook([[2**31, 5]], (2**32, 2**30), 1).sites.tolist() == [[2**31, 5]]
    assert rulebook([[2**31 - 1, 7]], (2**32, 2**31 - 1), 1).sites.tolist() == [[2**31 - 1, 7]]


def test_what_follows_the_kernels_size_has_a_name():
    """rulebook(s, g, 3, 2) was stride 2 and submanifold_rulebook(s, g, 3, 2) was d = 2."""
    seen = 0
    for module, public in ((sparse_conv, sparse_conv.__all__), (graph, vars(graph))):
        for name in public:
            function = getattr(module, name)
            parameters = list(signature(function).parameters.values()) if callable(function) else []
            names = [p.name for p in parameters]
            for p in parameters[names.index("f") + 1 :] if "f" in names else []:
                seen += 1
                assert p.kind is p.KEYWORD_ONLY or p.default is p.empty, (name, p.name)
    assert seen >= 8
    for make in (rulebook, submanifold_rulebook, transposed_rulebook):
        with pytest.raises(TypeError, match="positional argument"):
            make([[0, 0, 0]], (4, 4, 4), 3, 2)


X = SparseValue([[0, 1], [2, 3], [4, 4]], np.ones((3, 2)), (6, 6, 2))
W, B, POINTS = np.ones((18, 3)), np.zeros(3), point_map(np.ones((3, 2)), 1, (6, 6))
RULES, AT_POINTS = submanifold_rulebook(X.sites, X.grid, 3), voxel_means(np.ones((3, 2)), POINTS)
TAKEN = {  # arguments that are taken, and then one of them is of another kind
    SparseValue: (X.sites, X.values, X.shape, X.ground_state),
    rulebook: (X.sites, X.grid, 3),
    submanifold_rulebook: (X.sites, X.grid, 3),
    transposed_rulebook: (X.sites, X.grid, 3),
    inverse_rulebook: (RULES, X.sites, X.grid),
    dense_rulebook: (X.sites, X.grid),
    union_rulebooks: (X.sites, X.sites, X.grid),
    sparse_conv.build_q: (X.values, X.ground_state, RULES),
    sparse_conv.grad_q: (np.ones((3, 18)), RULES),
    sparse_conv.conv_without_q: (X.values, X.ground_state, W, RULES),
    sparse_conv.conv_without_q_grad: (X.values, X.ground_state, W, np.ones((3, 3)), RULES),
    next_ground_state: (W, X.ground_state, 3),
    sparse_conv.sparse_conv: (X, W, B, RULES),
    sparse_conv.sparse_conv_grad: (X, W, RULES, np.ones((3, 3)), B),
    sparse_conv_2d: (X, W, B, 3),
    sparse_conv.sparse_conv_2d_grad: (X, W, 3, np.ones((12, 3)), B),
    sparse_conv.sparse_add: (X, X),
    sparse_conv.sparse_relu: (X,),
    sparse_max_pool: (X, 2),
    sparse_conv.sparse_max_pool_2d: (X, 2),
    stack: ([X],),
    point_map: (np.ones((3, 2)), 1.0, (6, 6)),
    voxel_means: (np.ones((3, 2)), POINTS),
    sparse_conv.voxel_means_grad: (np.ones((1, 2)), POINTS),
    sparse_conv.to_points: (AT_POINTS, POINTS),
    sparse_conv.to_points_grad: (np.ones((3, 2)), POINTS),
    graph.conv: (X, W, B, RULES),
    graph.conv_with_q: (X, W, B, RULES),
    graph.max_pool: (X, RULES),
    graph.mean_pool: (X, RULES),
    graph.to_dense: (X, dense_rulebook(X.sites, X.grid)),
    graph.add: (X, X, *union_rulebooks(X.sites, X.sites, X.grid)),
    graph.relu: (X,),
    graph.moments: (X,),
    graph.normalise: (X, np.ones(2), np.ones(2)),
    graph.rule_arrays: (X, RULES),
    graph.to_points: (AT_POINTS, POINTS.voxel),
}
KINDS = (SparseValue, sparse_conv.Rulebook, sparse_conv.PointMap)


@pytest.mark.parametrize("function", TAKEN, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_an_argument_of_another_kind_is_refused_by_its_name(function):
    """An image, a rulebook, a map of points or a number in the place of another of them."""
    given = TAKEN[function]
    function(*given)
    plain = function.__module__ == graph.__name__  # arrays there are for PyTensor to refuse
    for k, argument in enumerate(given):
        for wrong in (X, RULES, POINTS, 2, None):
            if isinstance(wrong, type(argument)) or (
                not isinstance(argument, KINDS) and (plain or not isinstance(wrong, KINDS))
            ):
                continue
            if function is graph.rule_arrays and k == 0 and wrong is RULES:
                continue  # it stands for the image that its layer makes
            with pytest.raises(TypeError, match=r"is of type \w+, expected "):
                function(*given[:k], wrong, *given[k + 1 :])


def test_kinds_of_rulebooks_and_of_numbers_are_refused():
    dense, other = dense_rulebook(X.sites, X.grid), rulebook(X.sites, X.grid, 2)
    text = np.array([["a", "b"]] * 3)
    for call, error, message in (
        (lambda: sparse_conv_2d(X, W, B, RULES), TypeError, "sparse_conv and graph.max_pool take"),
        (lambda: graph.max_pool(X, 2), TypeError, "expected Rulebook or SymbolicRules"),
        (lambda: graph.to_points(AT_POINTS, POINTS), TypeError, "its voxel"),
        (lambda: stack(X), TypeError, "expected Sequence of SparseValue"),
        (lambda: stack([X, RULES]), TypeError, "image 1 is of type Rulebook"),
        (lambda: sparse_conv.build_q(text, X.ground_state, RULES), ValueError, "not an array of"),
        (lambda: graph.to_dense(X, RULES), ValueError, "dense_rulebook"),
        (lambda: graph.to_dense(X, rulebook(X.sites, X.grid, 1)), ValueError, "dense_rulebook"),
        (lambda: graph.add(X, X, RULES, RULES), ValueError, "union_rulebooks"),
        (lambda: graph.add(X, X, dense, other), ValueError, "union_rulebooks"),
    ):
        with pytest.raises(error, match=message):
            call()
    np.testing.assert_array_equal(graph.to_dense(X, dense).eval(), X.to_dense().reshape(36, 2))
