"""SparseValue and rulebooks, against the notebook's loops and against pictures of the grid."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_cases import layers, random_layer
from sparse_loops import loop_output_sites

from helpers.sparse_conv import (
    SparseValue,
    dense_rulebook,
    rulebook,
    sparse_conv_2d,
    stack,
    submanifold_rulebook,
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
    assert x.sites.dtype == y.sites.dtype == integers
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


@given(layers())
def test_output_sites_come_in_the_order_of_the_loops(layer):
    x, f, *_ = layer
    h, w, _ = x.shape
    rules = rulebook(x.sites, x.shape, f)
    expected = loop_output_sites(x.sites, h, w, f)
    assert [tuple(site) for site in rules.sites.tolist()] == [(int(i), int(j)) for i, j in expected]
    assert rules.grid == (h - f + 1, w - f + 1)
    assert rules.sites.dtype == x.sites.dtype


@settings(deadline=None)
@given(layers(images=True), st.integers(1, 3))
def test_rulebook_says_what_each_window_sees(layer, stride):
    x, f, *_ = layer
    *_, h, w, _ = x.shape
    rules = rulebook(x.sites, x.shape, f, stride, d=2)
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
        rulebook([[0, 0]], (5, 5), 3, 0)


def test_sites_that_no_window_holds_may_not_repeat_either():
    with pytest.raises(ValueError, match="more than once"):
        rulebook([[4, 4], [4, 4]], (5, 5), 2, stride=2)


@pytest.mark.parametrize("grid", [(5, 6), (3, 5, 6)])
def test_no_site_at_all(grid):
    sites = np.zeros((0, len(grid)), np.int32)
    for rules in (rulebook(sites, grid, 3, d=2), submanifold_rulebook(sites, grid, 3, d=2)):
        assert rules.sites.shape == (0, len(grid)) and rules.sites.dtype == np.int32
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
