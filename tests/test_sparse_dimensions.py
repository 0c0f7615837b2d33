"""Every kind of layer in one, two and three dimensions, against dense arrays.

The references see the dense form alone: no site, no rulebook. Gradients are their complex steps.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytensor.compile.mode import Mode
from sparse_cases import dense_conv, dense_transposed, is_gradient, layers, random_layer

from helpers.checks import relative_error
from helpers.sparse_conv import (
    SparseValue,
    build_q,
    conv_without_q,
    conv_without_q_grad,
    dense_rulebook,
    grad_q,
    graph,
    inverse_rulebook,
    rulebook,
    sparse_add,
    sparse_conv,
    sparse_conv_2d,
    sparse_conv_2d_grad,
    sparse_conv_grad,
    sparse_max_pool,
    sparse_max_pool_2d,
    stack,
    submanifold_rulebook,
    transposed_rulebook,
    union_rulebooks,
)

PY = Mode(linker="py", optimizer="fast_compile")
SIDES = {1: (9,), 2: (6, 5), 3: (5, 4, 5)}


def image(d, images=0, a=8, n_in=2, n_out=3, f=3, seed=0):
    grid = (images, *SIDES[d]) if images else SIDES[d]
    return random_layer(a * max(images, 1), (*grid, n_in), f, n_out, seed, d=d)


def each(function, dense, d):
    """A function of one dense image, of each image of a batch."""
    return np.stack([function(X) for X in dense]) if dense.ndim == d + 2 else function(dense)


def strided(x, **more):
    return rulebook(x.sites, x.grid, 3, d=x.d, **({"stride": 2, "pad": 1} | more))


def submanifold(x, **more):
    return submanifold_rulebook(x.sites, x.grid, 3, d=x.d, **more)


def transposed(x, f=3, **more):
    return transposed_rulebook(x.sites, x.grid, f, stride=2, pad=1, d=x.d, **more)


def dense_strided(stride=2, pad=1, dilation=1):
    def dense(X, t, W, b, x):
        return each(lambda X: dense_conv(X, W, b, 3, stride, pad, t, dilation), X, x.d)

    return dense


def dense_submanifold(dilation=1):
    def dense(X, t, W, b, x):
        same = dense_strided(1, dilation, dilation)(X, t, W, b, x)
        y = np.zeros_like(same) + (np.tile(t, 3**x.d) @ W + b)
        y[tuple(x.sites.T)] = same[tuple(x.sites.T)]
        return y

    return dense


def dense_up(f=3, dilation=1, more=0):
    def dense(X, t, W, b, x):
        return each(lambda X: dense_transposed(X - t, W, b, f, 2, 1, dilation, more), X, x.d)

    return dense


def fine_sites(x):
    """Sites on twice the grid and one cell more, whose strided layer has the sites of x."""
    corner = 0 if len(x.grid) == x.d else 1
    factor = np.array([1] * corner + [2] * x.d)
    sites = x.sites * factor
    more = sites[::2].copy()
    more[:, -1] += 1
    grid = tuple(h if c < corner else 2 * h + 1 for c, h in enumerate(x.grid))
    return np.concatenate([sites, more]), grid


def inverse(x):
    sites, grid = fine_sites(x)
    down = rulebook(sites, grid, 2, stride=2, d=x.d)
    np.testing.assert_array_equal(down.sites, x.sites)
    return inverse_rulebook(down, sites, grid)


def dense_inverse(X, t, W, b, x):
    sites, grid = fine_sites(x)
    up = each(lambda X: dense_transposed(X - t, W, b, 2, 2), X, x.d)
    y = np.zeros((*grid, len(b)), up.dtype) + b
    y[tuple(sites.T)] = up[tuple(sites.T)]
    return y


# The rulebook of an image, its dense form, and the window.
KINDS = {
    "strided": (strided, dense_strided(), 3),
    "submanifold": (submanifold, dense_submanifold(), 3),
    "transposed": (transposed, dense_up(), 3),
    "inverse": (inverse, dense_inverse, 2),
    "dilated": (partial(strided, pad=2, dilation=2), dense_strided(2, 2, 2), 3),
    "dilated submanifold": (partial(submanifold, dilation=2), dense_submanifold(2), 3),
    "dilated transposed, output padded": (
        partial(transposed, f=2, dilation=3, output_pad=2), dense_up(2, 3, 2), 2),
}  # fmt: skip
EVERY = [(kind, d, images) for kind in KINDS for d, images in [(1, 2), (2, 0), (3, 0), (3, 2)]]


def dense_form(values, t, x):
    X = np.zeros(x.shape, np.result_type(values, t)) + t
    X[tuple(x.sites.T)] = values
    return X


def at_sites(C, sites):
    """A cotangent of the dense form, as cotangents of the values and of the ground state."""
    dY = C[tuple(sites.T)]
    return dY, C.reshape(-1, C.shape[-1]).sum(axis=0) - dY.sum(axis=0)


@pytest.mark.parametrize(("kind", "d", "images"), EVERY)
def test_a_layer_and_its_gradients_are_those_of_the_dense_form(kind, d, images):
    make, dense, f = KINDS[kind]
    x, W, b = image(d, images, f=f)
    rules = make(x)
    y = sparse_conv(x, W, b, rules)

    def reference(M=x.values, t=x.ground_state, W=W, b=b):
        return dense(dense_form(M, t, x), t, W, b, x)

    expected = reference()
    assert y.shape == expected.shape and y.d == d
    assert relative_error(y.to_dense(), expected) < 1e-14
    C = np.random.default_rng(1).standard_normal(expected.shape)
    found = sparse_conv_grad(x, W, rules, *at_sites(C, y.sites))
    arrays = {"M": x.values, "t": x.ground_state, "W": W, "b": b}
    Q = build_q(x.values, x.ground_state, rules)
    assert relative_error(Q @ W + b, y.values) < 1e-14
    Y = conv_without_q(x.values, x.ground_state, W, rules)
    assert relative_error(Y + b, y.values) < 1e-14
    dY = C[tuple(y.sites.T)]
    without_q = conv_without_q_grad(x.values, x.ground_state, W, dY, rules)
    zero = sparse_conv_grad(x, W, rules, dY, np.zeros(len(b)))
    for gradient, expected in zip(without_q, zero, strict=False):
        assert relative_error(gradient, expected) < 1e-13
    for gradient, expected in zip(grad_q(dY @ W.T, rules), zero, strict=False):
        assert relative_error(gradient, expected) < 1e-14
    for (name, at), gradient in zip(arrays.items(), found, strict=True):
        loss = partial(lambda name, X: (C * reference(**{name: X})).sum(), name)
        assert is_gradient(gradient, loss, at), name


def layer_function(layer):
    """Y, t', gradients of the loss sum C Y^3, and those of their slope along four directions."""
    x, W, b, rules = graph.symbolic_value(), pt.dmatrix(), pt.dvector(), graph.symbolic_rules()
    C, c = pt.dmatrix(), pt.dvector()
    y = layer(x, W, b, rules)
    inputs = [*x, W, b]
    loss = (C * y.values**3).sum() + (c * y.ground_state**3).sum()
    first = pt.grad(loss, inputs)
    directions = [v.type() for v in inputs]
    slope = sum((v * g).sum() for v, g in zip(directions, first, strict=True))
    outputs = [*y, *first, *pt.grad(slope, inputs, disconnected_inputs="ignore")]
    return pytensor.function([*inputs, *rules, C, c, *directions], outputs, mode=PY)


LAYERS = {layer: layer_function(layer) for layer in (graph.conv, graph.conv_with_q)}


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
@pytest.mark.parametrize(("kind", "d", "images"), EVERY)
def test_second_derivatives_of_the_graph(kind, d, images, layer):
    """One compiled function for every kind: what the rulebook is comes in with its arrays."""
    make, _, f = KINDS[kind]
    x, W, b = image(d, images, f=f)
    rules = make(x)
    rng = np.random.default_rng(2)
    at = [x.values, x.ground_state, W, b]
    C, c = rng.standard_normal((len(rules.sites), len(b))), rng.standard_normal(len(b))
    directions = [rng.standard_normal(v.shape) for v in at]
    arrays = graph.rule_arrays(x, rules)
    values, t_out, *found = LAYERS[layer](*at, *arrays, C, c, *directions)
    y = sparse_conv(x, W, b, rules)
    assert relative_error(values, y.values) < 1e-14
    assert relative_error(t_out, y.ground_state) < 1e-14

    def gradients(M, t, W, b):
        z = replace(x, values=M, ground_state=t)
        y = sparse_conv(z, W, b, rules)
        return sparse_conv_grad(z, W, rules, 3 * C * y.values**2, 3 * c * y.ground_state**2)

    moved = gradients(*(v + 1e-30j * u for v, u in zip(at, directions, strict=True)))
    for k, g in enumerate(moved):
        assert relative_error(found[k], g.real) < 1e-13
        assert relative_error(found[4 + k], g.imag / 1e-30) < 1e-12


@settings(max_examples=25)
@given(st.data(), st.integers(1, 3))
def test_any_stride_padding_and_dilation_of_a_batch(data, d):
    x, f, W, b = data.draw(layers(images=True, d=d))
    stride, dilation, pad = (data.draw(st.integers(least, 3)) for least in (1, 1, 0))
    pad = max(pad, (dilation * (f - 1) + 2 - min(x.grid[1:])) // 2)
    t, how = x.ground_state, {"stride": stride, "pad": pad, "dilation": dilation, "d": d}
    rules = rulebook(x.sites, x.grid, f, **how)
    expected = each(lambda X: dense_conv(X, W, b, f, stride, pad, t, dilation), x.to_dense(), d)
    y = sparse_conv(x, W, b, rules)
    np.testing.assert_allclose(y.to_dense(), expected, atol=1e-12)
    more = data.draw(st.integers(0, max(stride, dilation) - 1))
    up = transposed_rulebook(x.sites, x.grid, f, **how | {"pad": 0}, output_pad=more)
    expected = each(
        lambda X: dense_transposed(X - t, W, b, f, stride, 0, dilation, more), x.to_dense(), d
    )
    np.testing.assert_allclose(sparse_conv(x, W, b, up).to_dense(), expected, atol=1e-12)
    # Back at the sites: the transposed convolution of the outputs, in a grid with its rim.
    back = inverse_rulebook(rules, x.sites, x.grid)
    W = np.random.default_rng(0).standard_normal((f**d * len(b), 2))
    u = y.ground_state
    wide = np.zeros((x.grid[0], *(h + 2 * pad for h in x.grid[1:]), 2))
    full = each(
        lambda Y: dense_transposed(Y - u, W, np.zeros(2), f, stride, 0, dilation), y.to_dense(), d
    )
    wide[tuple(slice(0, size) for size in full.shape)] = full
    inner = x.sites + np.array([0] + [pad] * d)
    z = sparse_conv(y, W, np.ones(2), back)
    np.testing.assert_allclose(z.values, wide[tuple(inner.T)] + 1, atol=1e-11)
    np.testing.assert_array_equal(z.sites, x.sites)


def in_groups(dense, W, b, groups, *args):
    """The dense convolution of each group's channels, side by side."""
    parts = zip(*(np.split(X, groups, axis=-1) for X in (dense, W, b)), strict=True)
    return np.concatenate([dense_conv(*part, *args) for part in parts], axis=-1)


@pytest.mark.parametrize(("d", "groups", "n_out"), [(3, 2, 6), (2, 4, 4), (1, 4, 8)])
def test_groups_and_their_gradients(d, groups, n_out):
    """Of four channels: two groups, a depthwise convolution, and one with two outputs each."""
    x, *_ = image(d, 0 if d == 3 else 2, n_in=4)
    x = replace(x, ground_state=np.zeros(4))  # the rim of the dense form
    rng = np.random.default_rng(5)
    W, b = rng.standard_normal((3**d * 4 // groups, n_out)), rng.standard_normal(n_out)
    rules = rulebook(x.sites, x.grid, 3, stride=2, pad=1, d=d)
    at = {"M": x.values, "W": W, "b": b}

    def reference(M=x.values, W=W, b=b):
        X = dense_form(M, np.zeros(4), x)
        return each(lambda X: in_groups(X, W, b, groups, 3, 2, 1), X, d)

    y, expected = sparse_conv(x, W, b, rules, groups=groups), reference()
    assert relative_error(y.to_dense(), expected) < 1e-14
    C = rng.standard_normal(expected.shape)
    cotangents = at_sites(C, y.sites)
    dM, dt, dW, db = sparse_conv_grad(x, W, rules, *cotangents, groups=groups)
    for name, gradient in zip(at, (dM, dW, db), strict=True):
        loss = partial(lambda name, X: (C * reference(**{name: X})).sum(), name)
        assert is_gradient(gradient, loss, at[name]), name

    def in_ground_state(t):
        y = sparse_conv(replace(x, ground_state=t), W, b, rules, groups=groups)
        return (cotangents[0] * y.values).sum() + cotangents[1] @ y.ground_state

    assert is_gradient(dt, in_ground_state, x.ground_state)

    # The graph: the same, and the Hessian times a direction.
    z, W_, b_ = graph.symbolic_value(), pt.dmatrix(), pt.dvector()
    out = graph.conv_with_q(z, W_, b_, rules, groups=groups)
    inputs = [*z, W_, b_]
    first = pt.grad((cotangents[0] * out.values**3).sum() + out.ground_state.sum(), inputs)
    directions = [v.type() for v in inputs]
    slope = sum((v * g).sum() for v, g in zip(directions, first, strict=True))
    second = pt.grad(slope, inputs, disconnected_inputs="ignore")
    f = pytensor.function([*inputs, *directions], [*out, *first, *second], mode=PY)
    at = [x.values, x.ground_state, W, b]
    moves = [rng.standard_normal(v.shape) for v in at]
    values, t_out, *found = f(*at, *moves)
    assert relative_error(values, y.values) < 1e-14
    assert relative_error(t_out, y.ground_state) < 1e-14

    def gradients(M, t, W, b):
        z = replace(x, values=M, ground_state=t)
        y = sparse_conv(z, W, b, rules, groups=groups)
        dY = 3 * cotangents[0] * y.values**2
        return sparse_conv_grad(z, W, rules, dY, np.ones(n_out), groups=groups)

    moved = gradients(*(v + 1e-30j * u for v, u in zip(at, moves, strict=True)))
    for k, g in enumerate(moved):
        assert relative_error(found[k], g.real) < 1e-13
        assert relative_error(found[4 + k], g.imag / 1e-30) < 1e-12


def test_groups_of_transposed_layers_are_layers_of_their_own():
    x, *_ = image(2, n_in=4)
    rules, rng = transposed(x), np.random.default_rng(6)
    W, b = rng.standard_normal((9 * 2, 6)), rng.standard_normal(6)
    y = sparse_conv(x, W, b, rules, groups=2)
    parts = zip(
        *(np.split(X, 2, axis=-1) for X in (x.to_dense() - x.ground_state, W, b)), strict=True
    )
    expected = np.concatenate([dense_transposed(*part, 3, 2, 1) for part in parts], axis=-1)
    assert relative_error(y.to_dense(), expected) < 1e-14
    out = graph.conv_with_q(x, W, b, rules, groups=2)
    for value, reference in zip(out, (y.values, y.ground_state), strict=True):
        assert relative_error(value.eval(mode=PY), reference) < 1e-14


def test_windows_of_another_length_along_each_axis():
    """As for a scanner whose resolution in height is another one than across."""
    x = random_layer(9, (5, 4, 6, 2), 1, 3, d=3)[0]
    f, stride, pad, dilation, more = (1, 2, 3), (1, 2, 2), (0, 0, 1), (3, 2, 1), (2, 0, 1)
    b, rng, t = np.ones(3), np.random.default_rng(9), x.ground_state
    W = rng.standard_normal((6 * 2, 3))
    rules = {
        "strided": rulebook(x.sites, x.grid, f, stride=stride, pad=pad, dilation=dilation, d=3),
        "submanifold": submanifold_rulebook(x.sites, x.grid, (1, 3, 1), dilation=dilation, d=3),
        "transposed": transposed_rulebook(
            x.sites, x.grid, f, stride=stride, pad=pad, dilation=dilation, output_pad=more, d=3
        ),
    }

    def references(X, t, W):
        same = dense_conv(X, W[:6], b, (1, 3, 1), 1, (0, 2, 0), t, dilation)
        at = tuple(x.sites.T)
        kept = np.zeros_like(same) + np.tile(t, 3) @ W[:6] + b
        kept[at] = same[at]
        strided = dense_conv(X, W, b, f, stride, pad, t, dilation)
        up = dense_transposed(X - t, W, b, f, stride, pad, dilation, more)
        return {"strided": strided, "submanifold": kept, "transposed": up}

    for kind, expected in references(x.to_dense(), t, W).items():
        W_kind = W[:6] if kind == "submanifold" else W
        y = sparse_conv(x, W_kind, b, rules[kind])
        assert relative_error(y.to_dense(), expected) < 1e-14, kind
        C = rng.standard_normal(expected.shape)
        dM, dt, dW, _ = sparse_conv_grad(x, W_kind, rules[kind], *at_sites(C, y.sites))
        dW = np.concatenate([dW, np.zeros((len(W) - len(dW), 3))])

        def loss(M=x.values, t=t, W=W, kind=kind, C=C):
            return (C * references(dense_form(M, t, x), t, W)[kind]).sum()

        for name, gradient, at in (("M", dM, x.values), ("t", dt, t), ("W", dW, W)):
            of_one = partial(lambda name, loss, X: loss(**{name: X}), name, loss)
            assert is_gradient(gradient, of_one, at), (kind, name)
    back = inverse_rulebook(rules["strided"], x.sites, x.grid)
    np.testing.assert_array_equal(back.src, rules["strided"].dst)


def test_stride_and_padding_of_a_picture():
    x, W, b = image(2)
    y = sparse_conv_2d(x, W, b, 3, stride=2, pad=1)
    expected = dense_conv(x.to_dense(), W, b, 3, 2, 1, x.ground_state)
    assert relative_error(y.to_dense(), expected) < 1e-14
    dY, dt = np.ones_like(y.values), np.ones(3)
    for g, h in zip(
        sparse_conv_2d_grad(x, W, 3, dY, dt, stride=2, pad=1),
        sparse_conv_grad(x, W, strided(x), dY, dt),
        strict=True,
    ):
        np.testing.assert_array_equal(g, h)


def test_the_transposed_convolution_is_the_transpose():
    """<C, conv(X)> = <convT(C), X> without bias and ground state, W's blocks transposed."""
    rng = np.random.default_rng(3)
    W = rng.standard_normal((27 * 2, 3))
    turned = W.reshape(27, 2, 3).transpose(0, 2, 1).reshape(-1, 2)
    X, C = rng.standard_normal((5, 5, 5, 2)), rng.standard_normal((3, 3, 3, 3))
    X[rng.random(X.shape[:-1]) < 0.7], C[rng.random(C.shape[:-1]) < 0.5] = 0, 0
    x, c = SparseValue.from_dense(X, d=3), SparseValue.from_dense(C, d=3)
    y = sparse_conv(x, W, np.zeros(3), strided(x)).to_dense()
    z = sparse_conv(c, turned, np.zeros(2), transposed(c)).to_dense()
    assert relative_error((C * y).sum(), (z * X).sum()) < 1e-13


@pytest.mark.parametrize("stride", [None, 1])
@given(layers(images=True, d=1), layers(d=3))
@settings(max_examples=15)
def test_max_pooling_of_signals_and_volumes(stride, signals, volume):
    for x, f, *_ in (signals, volume):

        def pooled(X, f=f, d=x.d):
            windows = np.lib.stride_tricks.sliding_window_view(X, (f,) * d, axis=range(d))
            every = (slice(None, None, stride or f),) * d
            return windows[every].max(axis=tuple(range(d + 1, 2 * d + 1)))

        expected = each(pooled, x.to_dense(), x.d)
        np.testing.assert_array_equal(sparse_max_pool(x, f, stride=stride).to_dense(), expected)


def test_sums_of_images_with_different_sites():
    x, *_ = image(3, 2)
    y, *_ = image(3, 2, a=5, seed=4)
    z = sparse_add(x, y)
    assert len(x.sites) < len(z.sites) < len(x.sites) + len(y.sites)
    np.testing.assert_allclose(z.to_dense(), x.to_dense() + y.to_dense(), atol=1e-15)
    for first, second in (union_rulebooks(x.sites, x.sites[::-1], x.grid),):
        np.testing.assert_array_equal(first.sites, x.sites)
        np.testing.assert_array_equal(second.dst[::-1, 0], first.dst[:, 0])


def block(mode):
    """A residual sum, normalised, mean-pooled and made dense: value, gradients, second order."""
    x, y = graph.symbolic_value("x"), graph.symbolic_value("y")
    gamma, beta = pt.dvectors("gamma", "beta")
    rules = [graph.symbolic_rules(str(k)) for k in range(4)]
    z = graph.normalise(graph.add(x, y, *rules[:2]), gamma, beta)
    dense = graph.to_dense(graph.mean_pool(z, rules[2]), rules[3])
    C = pt.dmatrix("C")
    inputs = [*x, *y, gamma, beta]
    first = pt.grad((C * dense**3).sum(), inputs)
    directions = [v.type() for v in inputs]
    slope = sum((v * g).sum() for v, g in zip(directions, first, strict=True))
    outputs = [dense, *first, *pt.grad(slope, inputs)]
    flat = [array for r in rules for array in r]
    return pytensor.function([*inputs, C, *directions, *flat], outputs, mode=mode)


def test_addition_normalisation_and_mean_pooling_against_the_dense_form():
    function = block(PY)
    x, *_ = image(3, 2)
    y, *_ = image(3, 2, a=5, seed=4)
    union = union_rulebooks(x.sites, y.sites, x.grid)
    pooled = rulebook(union[0].sites, union[0].grid, 2, stride=2, d=3)
    rules = [*union, pooled, dense_rulebook(pooled.sites, pooled.grid)]
    flat = graph.rule_arrays([x, y], *rules)
    rng = np.random.default_rng(6)
    names = ("x", "t", "y", "u", "gamma", "beta")
    at = [x.values, x.ground_state, y.values, y.ground_state, *rng.standard_normal((2, 2))]

    def reference(x_values, t, y_values, u, gamma, beta):
        Z = dense_form(x_values, t, x) + dense_form(y_values, u, y)
        active = Z[tuple(union[0].sites.T)]
        mean = active.mean(axis=0)
        variance = ((active - mean) ** 2).mean(axis=0)
        Z = (Z - mean) / np.sqrt(variance + 1e-5) * gamma + beta
        Z = Z[:, :4, :4, :4].reshape(2, 2, 2, 2, 2, 2, 2, 2).mean(axis=(2, 4, 6))
        return Z.reshape(-1, 2)

    expected = reference(*at)
    C = rng.standard_normal(expected.shape)
    directions = [rng.standard_normal(v.shape) for v in at]

    def run(at):
        return function(*at, C, *directions, *flat)

    found = run(at)
    assert relative_error(found[0], expected) < 1e-13
    for k, name in enumerate(names):

        def loss(X, k=k):
            return (C * reference(*(X if j == k else v for j, v in enumerate(at))) ** 3).sum()

        assert is_gradient(found[1 + k], loss, at[k]), name

    def ahead(h):
        moved = run([v + h * u for v, u in zip(at, directions, strict=True)])
        return moved[1:7]

    h = 1e-3
    points = {s: ahead(s * h) for s in (-2, -1, 1, 2)}
    for k, name in enumerate(names):
        slope = (8 * (points[1][k] - points[-1][k]) - points[2][k] + points[-2][k]) / (12 * h)
        assert relative_error(found[7 + k], slope) < 1e-7, name


def test_statistics_of_no_site_at_all():
    x = graph.SymbolicValue(pt.zeros((0, 2)), pt.ones(2))
    y = graph.normalise(x, np.ones(2), np.zeros(2))
    mean, variance = graph.moments(x)
    values, t, mean, variance = pytensor.function([], [*y, mean, variance], mode=PY)()
    assert values.shape == (0, 2) and np.isfinite(t).all() and not mean.any() and not variance.any()


def test_points_become_voxels():
    points = np.array([[0.1, 0.2, 0.3], [1.9, 0.0, 0.0], [0.4, 0.4, 0.4]])
    x = SparseValue.from_points(points, [[1.0], [5.0], [3.0]], cell=0.5, grid=(4, 4, 4))
    np.testing.assert_array_equal(x.sites, [[0, 0, 0], [3, 0, 0]])
    np.testing.assert_array_equal(x.values, [[2], [5]])
    y = SparseValue.from_points(points, [[1.0], [5.0], [3.0]], (0.5, 0.5, 0.15), (4, 4, 4))
    np.testing.assert_array_equal(y.sites, [[0, 0, 2], [3, 0, 0]])
    assert stack([x, x]).grid == (2, 4, 4, 4)


@pytest.mark.parametrize("side", [1, 2])
def test_a_window_larger_than_the_grid_stays_on_its_sites(side):
    x, W, b = random_layer(side, (side, side, side, 2), 5, 3, d=3)
    y = sparse_conv(x, W, b, submanifold_rulebook(x.sites, x.grid, 5, d=3))
    dense = dense_conv(x.to_dense(), W, b, 5, 1, 2, x.ground_state)
    np.testing.assert_allclose(y.values, dense[tuple(x.sites.T)], rtol=1e-13)


def unet(x, weights, fine, down, coarse, up):
    """An encoder, a decoder back to the sites, and a way around: the classes of each site."""
    first, lower, bottom, back, last = zip(weights[::2], weights[1::2], strict=True)
    skip = graph.relu(graph.conv(x, *first, fine))
    h = graph.relu(graph.conv(skip, *lower, down))
    h = graph.relu(graph.conv(h, *bottom, coarse))
    h = graph.relu(graph.conv(h, *back, up))
    both = graph.SymbolicValue(*(pt.concatenate(v, axis=-1) for v in zip(skip, h, strict=True)))
    return graph.conv(both, *last, fine)


def dense_unet(X, weights, active, coarse):
    """The same on dense volumes (*grid, 1) with ground state 0, masks of the active cells given."""
    first, lower, bottom, back, last = zip(weights[::2], weights[1::2], strict=True)

    def kept(X, t, W, b, active):
        t_out = np.tile(t, 27) @ W + b
        return np.where(active[..., None], dense_conv(X, W, b, 3, 1, 1, t), t_out), t_out

    def relu(X, t):
        return [np.where(v.real > 0, v, 0) for v in (X, t)]

    skip, t_skip = relu(*kept(X, np.zeros(1), *first, active))
    t = np.tile(t_skip, 8) @ lower[0] + lower[1]
    h, t = relu(dense_conv(skip, *lower, 2, 2, 0, t_skip), t)
    h, t = relu(*kept(h, t, *bottom, coarse))
    h = np.where(active[..., None], dense_transposed(h - t, *back, 2, 2), back[1])
    h, t = relu(h, back[1])
    both = np.concatenate([skip, h], axis=-1), np.concatenate([t_skip, t])
    return kept(*both, *last, active)[0]


def test_a_u_net_of_point_clouds_and_its_gradients_are_those_of_the_dense_network():
    rng = np.random.default_rng(8)
    clouds = [
        SparseValue.from_points(rng.uniform(0, 2, (9, 3)), rng.uniform(1, 2, (9, 1)), 0.5, (4,) * 3)
        for _ in range(2)
    ]
    x = stack(clouds)
    fine = submanifold_rulebook(x.sites, x.grid, 3, d=3)
    down = rulebook(x.sites, x.grid, 2, stride=2, d=3)
    coarse = submanifold_rulebook(down.sites, down.grid, 3, d=3)
    rules = fine, down, coarse, inverse_rulebook(down, x.sites, x.grid)
    shapes = [(27, 2), 2, (16, 3), 3, (81, 3), 3, (24, 2), 2, (108, 2), 2]
    at = [rng.standard_normal(shape) / 3 for shape in shapes]
    weights = [pt.dmatrix() if np.ndim(w) == 2 else pt.dvector() for w in at]
    logits = unet(graph.SymbolicValue(x.values, x.ground_state), weights, *rules)
    C = rng.standard_normal((len(x.sites), 2))
    gradients = pt.grad((C * logits.values).sum(), weights)
    found, *gradients = pytensor.function(weights, [logits.values, *gradients], mode=PY)(*at)

    def reference(weights):
        images = []
        for cloud in clouds:
            X = cloud.to_dense()
            active = X[..., 0] != 0
            blocks = active.reshape(2, 2, 2, 2, 2, 2).any(axis=(1, 3, 5))
            images.append(dense_unet(X, weights, active, blocks)[tuple(cloud.sites.T)])
        return np.concatenate(images)

    assert relative_error(found, reference(at)) < 1e-13
    for k, gradient in enumerate(gradients):
        direction = rng.standard_normal(np.shape(at[k]))
        moved = [w + (1e-30j * direction if j == k else 0) for j, w in enumerate(at)]
        slope = (C * reference(moved)).sum().imag / 1e-30
        assert (gradient * direction).sum() == pytest.approx(slope, rel=1e-12, abs=1e-13), k


def test_a_volume_is_not_taken_for_a_batch():
    with pytest.raises(ValueError, match=r"may be a volume .* or a batch .*: say d=3 or d=2"):
        SparseValue([[0, 0, 0]], [[1.0]], (4, 4, 4, 1))
    with pytest.raises(ValueError, match="say d=3 or d=2"):
        SparseValue.from_dense(np.zeros((4, 4, 4, 1)))
    for make in (rulebook, submanifold_rulebook, transposed_rulebook):
        with pytest.raises(ValueError, match="say d=3 or d=2"):
            make([[0, 0, 0]], (4, 4, 4), 3)
    volume = SparseValue([[0, 0, 0]], [[1.0]], (4, 4, 4, 1), d=3)
    with pytest.raises(ValueError, match="x has 3 dimensions: use sparse_conv"):
        sparse_conv_2d(volume, np.ones((9, 1)), np.zeros(1), 3)
    with pytest.raises(ValueError, match="x has 3 dimensions: use sparse_max_pool"):
        sparse_max_pool_2d(volume, 2)


X3, W3, B3 = image(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SparseValue([[0, 0]], [[1.0]], (4, 4, 1), d=3), r"d is 3 and the shape \(4, 4, 1"),
        (lambda: SparseValue([[0]], [[1.0]], (4, 1), d=4), "d is 4"),
        (lambda: rulebook(X3.sites, X3.grid, 3, d=1), r"d is 1 and the shape \(5, 4, 5\)"),
        (lambda: rulebook(X3.sites, X3.grid, 3, pad=-1, d=3), "pad is -1, expected an integer"),
        (lambda: rulebook(X3.sites, X3.grid, 7, pad=1, d=3), r"f = 7 .* \(5, 4, 5\) padded by 1"),
        (lambda: rulebook(X3.sites, (5, 4), 2, d=3), "sites of 3 columns need 3 entries"),
        (
            lambda: rulebook(X3.sites, X3.grid, (3, 3), d=3),
            r"f is \(3, 3\), expected an integer, or one for each of 3 axes",
        ),
        (
            lambda: rulebook(X3.sites, X3.grid, 3, stride=(2, 0, 1), d=3),
            "stride is 0, expected a pos",
        ),
        (
            lambda: rulebook(X3.sites, X3.grid, (3, 7, 1), pad=(0, 1, 0), d=3),
            r"f = \(3, 7, 1\) is larger than the grid: \(5, 4, 5\) padded by \(0, 1, 0\)",
        ),
        (
            lambda: submanifold_rulebook(X3.sites, X3.grid, (3, 2, 3), d=3),
            r"f = \(3, 2, 3\) is even",
        ),
        (lambda: transposed_rulebook([[0]], (1,), 2, pad=1), "pad = 1 leaves no cell"),
        (lambda: transposed_rulebook([[0], [0]], (3,), 2), r"site \(0,\) occurs more than once"),
        (lambda: submanifold_rulebook([[1], [1]], (3,), 3), r"site \(1,\) occurs more than once"),
        (lambda: rulebook([[0] * 4], (2**20,) * 4, 1), "too many cells"),
        (
            lambda: inverse_rulebook(strided(X3), X3.sites[1:], X3.grid),
            "there are 7 sites, but the rulebook has 8",
        ),
        (
            lambda: inverse_rulebook(strided(X3), X3.sites[:, 1:] * 0, X3.grid[1:]),
            "occurs more than once",
        ),
        (lambda: sparse_conv(X3, W3[1:], B3, strided(X3)), r"W has shape \(53, 3\), expected \(f"),
        (
            lambda: sparse_conv(image(3, 1)[0], W3, B3, strided(X3)),
            r"sites are on a grid \(1, 5, 4, 5\), but the rulebook's on \(5, 4, 5\)",
        ),
        (
            lambda: sparse_conv(image(3, a=5)[0], W3, B3, strided(X3)),
            "there are 5 sites, but the rulebook has 8",
        ),
        (
            lambda: graph.max_pool((X3.values, X3.ground_state), transposed(X3)),
            "max pooling takes no rulebook of a transposed",
        ),
        (lambda: sparse_add(X3, image(3, 1)[0]), r"images of shapes \(5, 4, 5, 2\) \(d = 3\)"),
        (
            lambda: SparseValue.from_points([[0.0, 5.0]], [[1.0]], 1.0, (4, 4)),
            r"point 0, \(0.0, 5.0\), lies outside the grid \(4, 4\)",
        ),
        (
            lambda: SparseValue.from_points([[0.0, np.nan]], [[1.0]], 1.0, (4, 4)),
            "a coordinate that is not finite",
        ),
        (lambda: SparseValue.from_points([[0.0]], [[1.0]], 1.0, (4, 4)), r"expected \(m, d\)"),
        (
            lambda: SparseValue.from_points([[0.0]], [[1.0]] * 2, 1.0, (4,)),
            r"features has shape \(2, 1\), .* 1 points",
        ),
        (lambda: SparseValue.from_points([[0.0]], [[1.0]], 0.0, (4,)), "cell is 0.0"),
        (lambda: SparseValue.from_points([[0.0]], [[1.0]], (1, 2), (4,)), r"cell is \(1, 2\)"),
        (lambda: SparseValue.from_points([[0.0]], [1.0], 1.0, (4,)), r"features has shape \(1,\)"),
        (lambda: SparseValue.from_points([[0.0]], [[1.0]], 1.0, 4), "grid is 4, expected"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_rulebook_of_as_many_other_sites_is_refused():
    """The image that it gave had outputs where the rulebook saw sites, of another size."""
    x = SparseValue([[0, 0], [3, 3]], [[1.0], [2.0]], (4, 4, 1))
    W, b = np.ones((4, 1)), np.zeros(1)
    larger, other = rulebook([[1, 1], [2, 2]], (6, 6), 2), rulebook([[0, 0], [2, 2]], (4, 4), 2)
    swapped = rulebook(x.sites[::-1], x.grid, 2)
    for rules, message in (
        (larger, r"on a grid \(4, 4\), but the rulebook's on \(6, 6\)"),
        (other, r"site 1 is \(3, 3\), but in the rulebook \(2, 2\)"),
        (swapped, r"site 0 is \(0, 0\), but in the rulebook \(3, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            sparse_conv(x, W, b, rules)
        with pytest.raises(ValueError, match=message):
            sparse_conv_grad(x, W, rules, np.ones((len(rules.sites), 1)), np.ones(1))
        with pytest.raises(ValueError, match=message):
            inverse_rulebook(rules, x.sites, x.grid)
    down = rulebook(x.sites, x.grid, 2, stride=2)
    y = sparse_conv(x, W, b, down)
    back = inverse_rulebook(down, x.sites, x.grid)
    assert sparse_conv(y, W, b, back).shape == x.shape
    with pytest.raises(ValueError, match="but the rulebook's on"):
        sparse_conv(x, W, b, back)
