"""The convolution and its gradients in NumPy: against loops, dense convolution, complex step."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from sparse_cases import dense_conv, is_gradient, layers, random_layer
from sparse_loops import loop_build_q, loop_grad_q, loop_next_ground_state

from helpers.checks import complex_step, relative_error
from helpers.sparse_conv import (
    SparseValue,
    build_q,
    conv_without_q,
    conv_without_q_grad,
    grad_q,
    next_ground_state,
    rulebook,
    sparse_conv_2d,
    sparse_conv_2d_grad,
    sparse_max_pool_2d,
    sparse_relu,
    stack,
)
from helpers.sparse_conv.pool import max_pool_grad, max_pool_winners


@given(layers())
def test_q_and_its_gradient_are_those_of_the_loops(layer):
    x, f, W, _ = layer
    rules = rulebook(x.sites, x.shape, f)
    sites_out, Q = loop_build_q(x.sites, x.values, x.shape, f, x.ground_state)
    np.testing.assert_array_equal(rules.sites, sites_out)
    assert rules.grid == tuple(h - f + 1 for h in x.grid)
    np.testing.assert_array_equal(build_q(x.values, x.ground_state, rules), Q)
    dQ = np.random.default_rng(0).standard_normal(Q.shape)
    dM, dt = grad_q(dQ, rules)
    dM_loop, dt_loop = loop_grad_q(dQ, x.sites, x.values, x.shape, f)
    np.testing.assert_allclose(dM, dM_loop, atol=1e-14)
    np.testing.assert_allclose(dt, dt_loop, atol=1e-12)
    np.testing.assert_allclose(
        next_ground_state(W, x.ground_state, f),
        loop_next_ground_state(W, x.ground_state, f),
        atol=1e-13,
    )


@given(layers())
def test_dense_form_of_the_output_is_the_dense_convolution(layer):
    x, f, W, b = layer
    y = sparse_conv_2d(x, W, b, f)
    np.testing.assert_allclose(y.to_dense(), dense_conv(x.to_dense(), W, b, f), atol=1e-12)


@given(layers(images=True))
def test_a_batch_gives_what_its_images_give(layer):
    x, f, W, b = layer
    y = sparse_conv_2d(x, W, b, f).to_dense()
    for image, dense in zip(y, x.to_dense(), strict=True):
        np.testing.assert_allclose(image, dense_conv(dense, W, b, f), atol=1e-12)


def test_float32_against_float64():
    x, W, b = random_layer(40, (12, 13, 8), 3, 16)
    single = SparseValue(x.sites, x.values.astype("f4"), x.shape, x.ground_state.astype("f4"))
    y = sparse_conv_2d(single, W.astype("f4"), b.astype("f4"), 3)
    assert relative_error(y.values, sparse_conv_2d(x, W, b, 3).values) < 1e-6


@given(layers())
def test_without_q_is_with_q(layer):
    x, f, W, _ = layer
    rules = rulebook(x.sites, x.shape, f)
    Q = build_q(x.values, x.ground_state, rules)
    Y = conv_without_q(x.values, x.ground_state, W, rules)
    np.testing.assert_allclose(Y, Q @ W, atol=1e-12)
    dY = np.random.default_rng(0).standard_normal(Y.shape)
    dM, dt, dW = conv_without_q_grad(x.values, x.ground_state, W, dY, rules)
    expected_dM, expected_dt = grad_q(dY @ W.T, rules)
    np.testing.assert_allclose(dM, expected_dM, atol=1e-12)
    np.testing.assert_allclose(dt, expected_dt, atol=1e-12)
    np.testing.assert_allclose(dW, Q.T @ dY, atol=1e-12)


def two_layers(seed=0):
    """The notebook's example: 4 by 4, three sites, f = 2 twice, 2 to 4 to 8 channels."""
    rng = np.random.default_rng(seed)
    x = SparseValue(
        [[0, 0], [2, 2], [2, 3]], [[1.7, 0.7], [7.9, 0.9], [4.8, 0.8]], (4, 4, 2), rng.random(2)
    )
    first = rng.random((8, 4)), rng.random(4), 2
    second = rng.random((16, 8)), rng.random(8), 2
    return x, first, second


@pytest.mark.parametrize("what", ["dM1/dM0", "dM1/dt0", "dM2/dM0", "dM2/dt0", "dt1/dt0", "dt2/dt0"])
def test_the_six_jacobians_of_the_notebook(what):
    x, first, second = two_layers()
    of, wrt = what.replace("d", "").split("/")

    def run(x):
        y = sparse_conv_2d(x, *first)
        return y, sparse_conv_2d(y, *second)

    def pick(X):  # one entry at a time: the complex step needs a scalar
        x_new = replace(x, **{"values" if wrt == "M0" else "ground_state": X})
        y = run(x_new)[int(of[1]) - 1]
        return y.values if of[0] == "M" else y.ground_state

    at = x.values if wrt == "M0" else x.ground_state
    y1, y2 = run(x)
    out = pick(at)
    assert out.shape == {"M1": (5, 4), "M2": (4, 8), "t1": (4,), "t2": (8,)}[of]
    for index in np.ndindex(out.shape):
        E = np.zeros(out.shape)
        E[index] = 1
        dY2 = E if of == "M2" else np.zeros_like(y2.values)
        dt2 = E if of == "t2" else np.zeros_like(y2.ground_state)
        dY1, dt1, *_ = sparse_conv_2d_grad(y1, second[0], 2, dY2, dt2)
        dY1, dt1 = dY1 + (E if of == "M1" else 0), dt1 + (E if of == "t1" else 0)
        dM, dt, *_ = sparse_conv_2d_grad(x, first[0], 2, dY1, dt1)
        reference = complex_step(lambda X, index=index: pick(X)[index], at)
        gradient = dM if wrt == "M0" else dt
        if not reference.any():
            assert not gradient.any()
        else:
            assert relative_error(gradient, reference) < 1e-13


@settings(max_examples=20)
@given(layers(images=True))
def test_all_gradients_of_a_layer(layer):
    x, f, W, b = layer
    y = sparse_conv_2d(x, W, b, f)
    rng = np.random.default_rng(0)
    dY, dt_out = rng.standard_normal(y.values.shape), rng.standard_normal(y.ground_state.shape)

    def loss(**change):
        arrays = {"values": x.values, "ground_state": x.ground_state, "W": W, "b": b} | change
        image = replace(x, values=arrays["values"], ground_state=arrays["ground_state"])
        y = sparse_conv_2d(image, arrays["W"], arrays["b"], f)
        return (dY * y.values).sum() + (dt_out * y.ground_state).sum() + 0j

    found = sparse_conv_2d_grad(x, W, f, dY, dt_out)
    arrays = {"values": x.values, "ground_state": x.ground_state, "W": W, "b": b}
    for (name, X), gradient in zip(arrays.items(), found, strict=True):
        reference = complex_step(lambda X, name=name: loss(**{name: X}), X)
        np.testing.assert_allclose(
            gradient, reference, atol=1e-12 * max(1, np.abs(reference).max(initial=0))
        )


def test_where_no_window_sees_the_ground_state_its_gradient_is_exactly_zero():
    """By subtraction it is not: what the loops leave is rounding."""
    x, W, _ = random_layer(36, (6, 6, 3), 3, 2)
    rules = rulebook(x.sites, x.shape, 3)
    dQ = np.random.default_rng(0).standard_normal((16, 27))
    assert not grad_q(dQ, rules)[1].any()
    assert loop_grad_q(dQ, x.sites, x.values, x.shape, 3)[1].any()
    assert not conv_without_q_grad(x.values, x.ground_state, W, dQ[:, :2], rules)[1].any()


@pytest.mark.parametrize("shape", [(5, 6, 2), (3, 5, 6, 2)])
def test_no_active_site_at_all(shape):
    x, W, b = random_layer(0, shape, 3, 4)
    y = sparse_conv_2d(x, W, b, 3)
    assert y.sites.shape == (0, len(shape) - 1) and y.values.shape == (0, 4)
    assert y.shape == (*shape[:-3], 3, 4, 4)
    np.testing.assert_allclose(
        y.to_dense()[..., 0, 0, :], np.broadcast_to(y.ground_state, (*shape[:-3], 4))
    )
    dM, dt, dW, db = sparse_conv_2d_grad(x, W, 3, np.zeros((0, 4)), np.ones(4))
    assert dM.shape == (0, 2) and dW.shape == W.shape
    np.testing.assert_allclose(dt, W.reshape(9, 2, 4).sum(axis=(0, 2)))
    np.testing.assert_allclose(db, 1)
    assert sparse_max_pool_2d(sparse_relu(y), 2).values.shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"W": np.ones((17, 4))}, r"W has shape \(17, 4\), expected \(f\^d\*n_in, n_out\) = \(18,"),
        ({"W": np.ones(18)}, r"W has shape \(18,\)"),
        ({"W": np.full((18, 4), "a")}, "W is not an array of numbers"),
        ({"b": np.ones(3)}, r"b has shape \(3,\), expected \(n_out,\) = \(4,\)"),
        ({"b": 1.0}, r"b has shape \(\)"),
        ({"f": 7, "W": np.ones((98, 4))}, r"f = 7 is larger than the grid: \(5, 6\)"),
    ],
)
def test_bad_layers_are_refused(change, message):
    x, W, b = random_layer(3, (5, 6, 2), 3, 4)
    with pytest.raises(ValueError, match=message):
        sparse_conv_2d(**({"x": x, "W": W, "b": b, "f": 3} | change))


def test_arrays_that_do_not_fit_the_rulebook_are_refused():
    x, W, _ = random_layer(3, (5, 6, 2), 3, 4)
    rules = rulebook(x.sites, x.shape, 3)
    dY = np.ones((len(rules.sites), 4))
    for call, message in (
        (lambda: build_q(x.values[1:], x.ground_state, rules), "values has shape"),
        (lambda: build_q(x.values, x.ground_state[1:], rules), "values has shape"),
        (lambda: build_q(x.values, x.values, rules), "values has shape"),
        (lambda: grad_q(dY, rules), "dQ has shape"),
        (lambda: next_ground_state(W[1:], x.ground_state, 3), "W has shape"),
        (lambda: conv_without_q(x.values, x.ground_state, W[1:], rules), "W has shape"),
        (lambda: conv_without_q(x.values[1:], x.ground_state, W, rules), "values has shape"),
        (
            lambda: conv_without_q_grad(x.values, x.ground_state, W, dY[1:], rules),
            "shape",
        ),
        (lambda: sparse_conv_2d_grad(x, W, 3, dY[1:], np.ones(4)), "dY has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def dense_pool(dense, f, stride):
    h, w, n = dense.shape
    return np.array(
        [
            [
                dense[i : i + f, j : j + f].reshape(f * f, n).max(axis=0)
                for j in range(0, h_or_w, stride)
            ]
            for h_or_w in [w - f + 1]
            for i in range(0, h - f + 1, stride)
        ]
    )


@pytest.mark.parametrize("stride", [None, 1, 3])
@settings(max_examples=30)
@given(layers())
def test_max_pooling_is_that_of_the_dense_form(stride, layer):
    x, f, *_ = layer
    y = sparse_max_pool_2d(x, f, stride=stride)
    np.testing.assert_array_equal(y.to_dense(), dense_pool(x.to_dense(), f, stride or f))


def test_pooling_gradient_goes_to_the_first_of_equals():
    values, t = np.array([[1.0, 0.0], [1.0, -1.0]]), np.zeros(2)
    rules = rulebook([[0, 1], [1, 1]], (2, 2), 2, stride=2)
    winner = max_pool_winners(values, t, rules)
    np.testing.assert_array_equal(winner, [[0, 2]])  # the ground state at (0, 0) is first
    dM, dt = max_pool_grad(np.array([[5.0, 7.0]]), winner, 2)
    np.testing.assert_array_equal(dM, [[5, 0], [0, 0]])
    np.testing.assert_array_equal(dt, [0, 7])


def test_a_small_network_by_complex_steps():
    x, W1, b1 = random_layer(9, (9, 9, 2), 3, 3, seed=1)
    x = stack([x, x])
    W2, b2 = random_layer(1, (3, 3, 3), 2, 2, seed=2)[1:]

    def network(values):
        y = sparse_conv_2d(replace(x, values=values), W1, b1, 3)
        y = sparse_max_pool_2d(sparse_relu(y), 2)
        return sparse_conv_2d(y, W2, b2, 2).to_dense().sum()

    y = sparse_conv_2d(x, W1, b1, 3)
    z = sparse_relu(y)
    p = sparse_max_pool_2d(z, 2)
    q = sparse_conv_2d(p, W2, b2, 2)
    inactive = q.to_dense()[..., 0].size - len(q.sites)
    dP, dt_p, *_ = sparse_conv_2d_grad(
        p, W2, 2, np.ones(q.values.shape), np.full(2, float(inactive))
    )
    rules = rulebook(z.sites, z.grid, 2, stride=2, d=2)
    dZ, dt_z = max_pool_grad(dP, max_pool_winners(z.values, z.ground_state, rules), len(z.sites))
    dt_z = dt_z + dt_p  # the pooled ground state is the ground state
    dM, *_ = sparse_conv_2d_grad(x, W1, 3, dZ * (y.values > 0), dt_z * (y.ground_state > 0))
    assert is_gradient(dM, network, x.values)
