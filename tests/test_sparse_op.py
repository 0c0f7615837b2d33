"""The PyTensor Ops and layers: against NumPy, complex step, and finite differences of gradients.

Compiling is what takes time here, so Numba compiles one function only, of every Op; a network runs
in PyTensor's Python mode, where an Op runs the same kernel.
"""

import warnings
from functools import partial
from itertools import chain

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given, settings
from pytensor.compile.mode import Mode
from sparse_cases import dense_conv, layers, random_layer

from helpers.checks import complex_step, relative_error
from helpers.sparse_conv import (
    SparseValue,
    dense_rulebook,
    graph,
    inverse_rulebook,
    op,
    rulebook,
    sparse_conv,
    sparse_conv_2d,
    sparse_conv_2d_grad,
    sparse_conv_grad,
    stack,
    submanifold_rulebook,
    transposed_rulebook,
    union_rulebooks,
)
from helpers.sparse_conv.pool import max_pool_grad, max_pool_winners

PY = Mode(linker="py", optimizer="fast_compile")
A_IN, N_IN, N_OUT, POSITIONS = 7, 2, 3, 4
RULES = rulebook(random_layer(A_IN, (2, 4, 5, N_IN), 2, N_OUT)[0].sites, (2, 4, 5), 2, d=2)
A_OUT = len(RULES.sites)
WINNER = np.random.default_rng(1).integers(0, A_IN + 1, (A_OUT, N_IN)).astype(np.int32)

M, WEIGHTS, Y, Q = (
    (A_IN, N_IN),
    (POSITIONS * N_IN, N_OUT),
    (A_OUT, N_OUT),
    (A_OUT, POSITIONS * N_IN),
)
T, D, P = (N_IN,), (POSITIONS, N_OUT), (A_OUT, N_IN)
RULEBOOK, WINNERS = (RULES.src, RULES.dst), (WINNER, RULES.dst)
# Every Op: shapes of its floating inputs, its integer inputs, shapes of its outputs.
OPS = {
    op.build_q: ((M, T), RULEBOOK, (Q,)),
    op.grad_q: ((Q,), RULEBOOK, (M, T)),
    op.conv_pairs: ((M, WEIGHTS, D), RULEBOOK, (Y,)),
    op.conv_grad_values: ((Y, WEIGHTS), RULEBOOK, (M,)),
    op.conv_grad_weights: ((M, Y), RULEBOOK, (WEIGHTS,)),
    op.conv_grads: ((M, WEIGHTS, Y), RULEBOOK, (M, WEIGHTS)),
    op.spread_ground: ((D,), RULEBOOK, (Y,)),
    op.sum_ground: ((Y,), RULEBOOK, (D,)),
    op.pool_winners: ((M, T), RULEBOOK, (P,)),
    op.take: ((M, T), WINNERS, (P,)),
    op.put_back: ((P,), WINNERS, (M, T)),
}
LINEAR = [o for o in OPS if o not in (op.conv_grads, op.pool_winners)]


def name(o):
    return type(o).__name__


def numbers(shapes, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def as_list(x):
    return list(x) if isinstance(x, list | tuple) else [x]


def symbols(shapes, dtype="float64"):
    return [pt.tensor(dtype=dtype, shape=(None,) * len(shape)) for shape in shapes]


@pytest.mark.parametrize("o", OPS, ids=name)
def test_shapes_are_known_without_computing(o):
    floats, integers, outputs = OPS[o]
    inputs = symbols(floats)
    y = as_list(o(*inputs, *integers))
    f = pytensor.function(inputs, [out.shape for out in y], mode=PY.including("ShapeOpt"))
    assert not any(node.op == o for node in f.maker.fgraph.apply_nodes)
    assert [tuple(shape) for shape in f(*numbers(floats))] == [*outputs]
    computed = pytensor.function(inputs, y, mode=PY)(*numbers(floats))
    assert [out.shape for out in computed] == [*outputs]


@pytest.mark.parametrize("o", LINEAR, ids=name)
def test_pullback_of_every_op(o):
    """Against the complex step of the Op's NumPy function, which takes complex numbers."""
    floats, integers, outputs = OPS[o]
    inputs, at, weights = symbols(floats), numbers(floats), numbers(outputs, seed=1)
    y = as_list(o(*inputs, *integers))
    loss = sum((w * out).sum() for w, out in zip(weights, y, strict=True))
    found = pytensor.function(inputs, pt.grad(loss, inputs), mode=PY)(*at)
    for k, gradient in enumerate(found):

        def value(X, k=k):
            results = o.numpy(*(X if j == k else x for j, x in enumerate(at)), *integers)
            results = results if isinstance(results, tuple) else (results,)
            return sum((w * r).sum() for w, r in zip(weights, results, strict=True))

        assert relative_error(gradient, complex_step(value, at[k])) < 1e-14


def test_integers_are_not_connected():
    src, dst = pt.imatrices("src", "dst")
    x, t = symbols((M, T))
    loss = op.build_q(x, t, src, dst).sum()
    with pytest.raises(pytensor.gradient.DisconnectedInputError):
        pt.grad(loss, src)
    with pytest.raises(pytensor.gradient.DisconnectedInputError):
        pt.grad(op.pool_winners(x, t, src, dst).sum(), x)


def arguments(o, dtype="float64"):
    return numbers(OPS[o][0], dtype=dtype) + list(OPS[o][1])


@pytest.fixture(scope="module")
def all_ops():
    """A Numba function of every Op's inputs that gives every Op's outputs."""
    every, outs = [], []
    for o, (floats, integers, _) in OPS.items():
        inputs = symbols(floats) + [pt.as_tensor_variable(i).type() for i in integers]
        every += inputs
        outs += as_list(o(*inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # object mode warns
        f = pytensor.function(every, outs, mode="NUMBA", trust_input=True)
        f(*(x for o in OPS for x in arguments(o)))
    return f


def test_numba_gives_what_numpy_gives(all_ops):
    given = [arguments(o) for o in OPS]
    found = all_ops(*(x for arrays in given for x in arrays))
    expected = [y for o, arrays in zip(OPS, given, strict=True) for y in as_list(o.numpy(*arrays))]
    for value, reference in zip(found, expected, strict=True):
        assert value.dtype == reference.dtype
        assert relative_error(value, reference) <= 1e-14


@pytest.mark.parametrize("o", OPS, ids=name)
def test_kernels_in_float32(o):
    given = arguments(o, "float32")
    found, expected = as_list(o.kernel(*given)), as_list(o.numpy(*given))
    for value, reference in zip(found, expected, strict=True):
        assert value.dtype == reference.dtype
        assert relative_error(value, reference) <= 1e-6


@pytest.mark.parametrize("o", [op.conv_pairs, op.conv_grads], ids=name)
def test_kernels_take_arrays_in_any_layout(o):
    given = arguments(o)
    strided = [np.asfortranarray(x) for x in given[:-2]] + given[-2:]
    for value, reference in zip(
        as_list(o.kernel(*strided)), as_list(o.kernel(*given)), strict=True
    ):
        assert relative_error(value, reference) <= 1e-14


def test_numba_without_a_site(all_ops):
    sizes = {A_IN: 0, A_OUT: 0}
    empty = rulebook(np.zeros((0, 2), int), (4, 5), 2)

    def emptied(shapes):
        return [(sizes.get(s[0], s[0]), *s[1:]) for s in shapes]

    given = []
    for floats, integers, _ in OPS.values():
        given += numbers(emptied(floats))
        given += (WINNER[:0], empty.dst) if integers is WINNERS else (empty.src, empty.dst)
    found = all_ops(*given)
    assert [y.shape for y in found] == emptied(s for *_, outputs in OPS.values() for s in outputs)
    assert all(not y.any() for y in found)


def test_a_rulebook_of_other_sites_is_refused_or_harmless(all_ops):
    given = [arguments(o) for o in OPS]
    first = given[0][0]
    given[0][0] = first[1:]
    with pytest.raises(ValueError, match="one row for each input site"):
        all_ops(*(x for arrays in given for x in arrays))
    given[0][0] = first
    for o, arrays in zip(OPS, given, strict=True):
        k = next((k for k, x in enumerate(o.inputs) if x == "a n"), None)
        if k is not None:
            with pytest.raises(ValueError, match="one row for each input site"):
                o.kernel(*arrays[:k], arrays[k][1:], *arrays[k + 1 :])
    for arrays in given:
        arrays[-2:] = [np.full_like(arrays[-2], 10**6), np.full_like(arrays[-1], -5)]
    assert all(np.isfinite(y).all() for y in all_ops(*(x for arrays in given for x in arrays)))


@pytest.mark.parametrize("columns", [N_OUT - 1, N_OUT + 2])
def test_cotangents_of_other_columns_are_refused(all_ops, columns):
    """They were written past the end of a buffer, or left a part of it as it was."""
    message = (
        rf"cotangents have shape \({A_OUT}, {columns}\) and W has \({POSITIONS * N_IN}, {N_OUT}"
    )
    x, W, dY = numbers((M, WEIGHTS, (A_OUT, columns)))
    for call in (
        lambda: op.conv_grad_values.kernel(dY, W, *RULEBOOK),
        lambda: op.conv_grads.kernel(x, W, dY, *RULEBOOK),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    given = [arguments(o) for o in OPS]
    given[list(OPS).index(op.conv_grad_values)][0] = dY
    with pytest.raises(ValueError, match=message):
        all_ops(*(x for arrays in given for x in arrays))


@pytest.mark.parametrize("function", ["kernel", "numpy"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_only_windows_that_see_the_ground_state_have_what_is_not_finite(function, bad):
    """The sum of a row times zeros and ones made NaN of every 0 * inf."""
    rules = rulebook([[0], [1]], (4,), 2)  # window 0 sees both sites, window 1 the second alone
    arrays = (rules.src, rules.dst)
    D = np.array([[1.0], [bad]])
    np.testing.assert_array_equal(getattr(op.spread_ground, function)(D, *arrays), [[0], [bad]])
    values, W = np.array([[1.0], [2.0]]), np.ones((2, 1))
    found = getattr(op.conv_pairs, function)(values, W, np.full((2, 1), bad), *arrays)
    np.testing.assert_array_equal(found, [[3], [bad]])
    for dY, sums in (([[bad], [5.0]], [[0], [5]]), ([[5.0], [bad]], [[0], [bad]])):
        found = getattr(op.sum_ground, function)(np.array(dY), *arrays)
        np.testing.assert_array_equal(found, sums)
    rules = rulebook([[1], [4]], (7,), 3)  # more windows than positions, unlike
    unseen = rules.src == len(rules.dst)
    X = np.arange(1.0, 1 + unseen.size).reshape(unseen.shape)
    X[1, 0] = bad
    for name, seen, rows in (("spread_ground", unseen, X.T), ("sum_ground", unseen.T, X)):
        found = getattr(getattr(op, name), function)(rows, rules.src, rules.dst)
        expected = [sum(rows[line], np.zeros(rows.shape[1])) for line in seen]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("linker", ["py", "vm", "cvm"])
def test_other_modes(linker):
    inputs = symbols((M, WEIGHTS, D))
    f = pytensor.function(inputs, op.conv_pairs(*inputs, *RULEBOOK), mode=Mode(linker, None))
    at = numbers((M, WEIGHTS, D))
    assert relative_error(f(*at), op.conv_pairs.numpy(*at, *RULEBOOK)) < 1e-14


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        (lambda: (pt.vector(), pt.vector()), ValueError, "has 1 dimensions, expected 2"),
        (lambda: (pt.zmatrix(), pt.vector()), TypeError, "takes float32 or float64"),
    ],
)
def test_wrong_types_are_refused(arrays, error, message):
    with pytest.raises(error, match=message):
        op.build_q(*arrays(), *RULEBOOK)
    with pytest.raises(ValueError, match="expected a matrix of int32 or int64"):
        op.build_q(pt.matrix(), pt.vector(), pt.matrix(), RULES.dst)
    with pytest.raises(ValueError, match="takes 2 arrays and 2 of a rulebook"):
        op.build_q(pt.matrix(), RULES.dst)


def test_mixed_dtypes_meet_in_the_wider_one():
    rules = graph.SymbolicRules(RULES.src, RULES.dst, RULES.kind)
    y = graph.conv((pt.fmatrix(), pt.fvector()), pt.dmatrix(), pt.dvector(), rules)
    assert y.values.dtype == y.ground_state.dtype == "float64"


# --- layers and networks --------------------------------------------------------------------------


def layer_symbols():
    return graph.symbolic_value(), pt.dmatrix("W"), pt.dvector("b"), graph.symbolic_rules()


def gradients_of(layer, mode):
    """Function of values, t, W, b, src, dst and the output's cotangents."""
    x, W, b, rules = layer_symbols()
    y = layer(x, W, b, rules)
    dY, dt_out = pt.dmatrix("dY"), pt.dvector("dt_out")
    loss = (dY * y.values).sum() + (dt_out * y.ground_state).sum()
    outputs = [*y, *pt.grad(loss, [*x, W, b])]
    return pytensor.function([*x, W, b, *rules, dY, dt_out], outputs, mode=mode)


BY_LAYER = {layer: gradients_of(layer, PY) for layer in (graph.conv, graph.conv_with_q)}


@pytest.mark.parametrize("layer", BY_LAYER, ids=lambda layer: layer.__name__)
@settings(max_examples=25, deadline=None)
@given(layers(images=True))
def test_layers_are_those_of_numpy(layer, drawn):
    x, f, W, b = drawn
    y = sparse_conv_2d(x, W, b, f)
    rules = rulebook(x.sites, x.shape, f, d=2)
    rng = np.random.default_rng(0)
    dY, dt_out = rng.standard_normal(y.values.shape), rng.standard_normal(len(b))
    found = BY_LAYER[layer](
        x.values, x.ground_state, W, b, *graph.rule_arrays(x, rules), dY, dt_out
    )
    expected = (y.values, y.ground_state, *sparse_conv_2d_grad(x, W, f, dY, dt_out))
    for value, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, reference, atol=1e-12)


def network(x, W1, b1, W2, b2, rules):
    """Two layers and a pooling between them, as features (images, cells * n)."""
    y = graph.relu(graph.conv(x, W1, b1, rules[0]))
    y = graph.conv_with_q(graph.max_pool(y, rules[1]), W2, b2, rules[2])
    return graph.to_dense(y, rules[3])


def network_rules(x):
    first = rulebook(x.sites, x.grid, 3, d=2)
    pooled = rulebook(first.sites, first.grid, 2, stride=2, d=2)
    second = rulebook(pooled.sites, pooled.grid, 2, d=2)
    return first, pooled, second, dense_rulebook(second.sites, second.grid)


def network_arrays():
    x, W1, b1 = random_layer(9, (9, 8, 2), 3, 3, seed=1)
    other = SparseValue([[4, 4]], [[1.0, -2.0]], x.shape, x.ground_state)
    nothing = SparseValue(np.zeros((0, 2), int), np.zeros((0, 2)), x.shape, x.ground_state)
    x = stack([x, other, nothing])
    W2, b2 = random_layer(1, (3, 3, 3), 2, 2, seed=2)[1:]
    return x, [W1, b1, W2, b2]


def network_function(mode, second):
    """Function of values, t, weights, directions and rules: loss, its gradients and, if asked for,
    the gradients of their inner product with the directions."""
    x = graph.symbolic_value()
    weights = [pt.dmatrix("W1"), pt.dvector("b1"), pt.dmatrix("W2"), pt.dvector("b2")]
    rules = [graph.symbolic_rules(f"rules{k}") for k in range(4)]
    inputs = [*x, *weights]
    loss = (network(x, *weights, rules) ** 3).mean()
    outputs = [loss, *pt.grad(loss, inputs)]
    directions = [v.type() for v in inputs] if second else []
    if second:
        slope = sum((d * g).sum() for d, g in zip(directions, outputs[1:], strict=True))
        outputs += pt.grad(slope, inputs)
    flat = [array for r in rules for array in r]
    return pytensor.function([*inputs, *directions, *flat], outputs, mode=mode)


def slope_along(f, x, v, h=1e-3):
    """Directional derivative by central differences, with one step of Richardson extrapolation."""

    def central(h):
        return (f(x + h * v) - f(x - h * v)) / (2 * h)

    return (4 * central(h / 2) - central(h)) / 3


def test_a_network_to_its_second_derivative():
    function = network_function(PY, second=True)
    x, weights = network_arrays()
    flat = graph.rule_arrays(x, *network_rules(x))
    at = [x.values, x.ground_state, *weights]
    directions = numbers([X.shape for X in at], seed=5)

    def run(k=None, X=None):
        return function(*(X if j == k else v for j, v in enumerate(at)), *directions, *flat)

    def slope(k, X):
        return sum((d * g).sum() for d, g in zip(directions, run(k, X)[1:7], strict=True))

    y = sparse_conv_2d(x, *weights[:2], 3)
    assert np.abs(y.values).min() > 1e-3  # no kink is near
    out = run()
    assert all(np.isfinite(X).all() for X in out)
    for k, v in enumerate(numbers([X.shape for X in at], seed=6)):
        for gradient, function_of in (
            (out[1 + k], lambda X, k=k: float(run(k, X)[0])),
            (out[7 + k], lambda X, k=k: slope(k, X)),
        ):
            difference = slope_along(function_of, at[k], v)
            size = np.linalg.norm(gradient) * np.linalg.norm(v)
            assert abs((gradient * v).sum() - difference) < 1e-10 * size


def test_a_network_and_its_gradients_are_those_of_the_dense_network():
    x, weights = network_arrays()
    flat = graph.rule_arrays(x, *network_rules(x))
    at = [x.values, x.ground_state, *weights]
    found, *gradients = network_function(PY, second=False)(*at, *flat)

    def loss(values, t, W1, b1, W2, b2):
        dense = np.zeros(x.shape, np.result_type(values, t)) + t
        dense[tuple(x.sites.T)] = values
        total = 0
        for X in dense:
            y = dense_conv(X, W1, b1, 3)
            y = np.where(y.real > 0, y, 0)[:6, :6]
            windows = y.reshape(3, 2, 3, 2, 3).transpose(0, 2, 4, 1, 3).reshape(3, 3, 3, 4)
            first = windows.real.argmax(axis=-1)[..., np.newaxis]
            y = np.take_along_axis(windows, first, axis=-1)[..., 0]
            total += (dense_conv(y, W2, b2, 2) ** 3).mean() / 3
        return total

    assert relative_error(found, loss(*at)) < 1e-12
    for k, gradient in enumerate(gradients):
        step = complex_step(lambda X, k=k: loss(*at[:k], X, *at[k + 1 :]), at[k])
        assert relative_error(gradient, step) < 1e-12


def test_submanifold_layers_stack():
    x, W1, b1 = random_layer(9, (6, 7, 2), 3, 2, seed=3)
    rules = submanifold_rulebook(x.sites, x.grid, 3)
    y = graph.SymbolicValue(*(pt.as_tensor_variable(v) for v in (x.values, x.ground_state)))
    for _ in range(2):
        y = graph.relu(graph.conv(y, W1, b1, rules))
    f = pytensor.function([], [*y], mode=PY)
    assert f()[0].shape == (9, 2)


def test_relu_has_slope_zero_at_zero_and_keeps_nan():
    x = pt.dvector()
    y = graph.relu(graph.SymbolicValue(x, x)).values
    values, slopes = pytensor.function([x], [y, pt.grad(y.sum(), x)], mode=PY)(
        [-1.0, 0.0, 2.0, np.nan]
    )
    np.testing.assert_array_equal(values, [0, 0, 2, np.nan])
    np.testing.assert_array_equal(slopes[:3], [0, 0, 1])


def ops_in(f):
    return {type(node.op).__name__ for node in f.maker.fgraph.apply_nodes}


def test_one_gather_serves_both_gradients():
    x, W, b, rules = layer_symbols()
    y = graph.conv(x, W, b, rules)
    inputs = [*x, W, b, *rules]
    loss = (y.values**2).sum()
    mode = Mode("py", "fast_run")
    both = ops_in(pytensor.function(inputs, pt.grad(loss, [x.values, W]), mode=mode))
    assert "ConvGrads" in both and not both & {"ConvGradValues", "ConvGradWeights"}
    first = ops_in(pytensor.function(inputs, pt.grad(loss, [W]), mode=mode))
    assert "ConvGradWeights" in first and not first & {"ConvGradValues", "ConvGrads"}


def test_gradients_that_need_each_other_stay_apart():
    x, W, b, rules = layer_symbols()
    dY = pt.dmatrix("dY")
    arrays = rules[:2]
    dM = op.conv_grad_values(dY, W, *arrays)
    dW = op.conv_grad_weights(dM**2, dY, *arrays)
    mode = Mode("py", "fast_run")
    f = pytensor.function([W, dY, *arrays], [dM, dW], mode=mode)
    assert "ConvGrads" not in ops_in(f)
    assert f(*numbers((WEIGHTS, Y)), *RULEBOOK)[1].shape == (POSITIONS * N_IN, N_OUT)


# --- a rulebook says what it is -------------------------------------------------------------------


def backwards(x):
    """A transposed rulebook of x, and an inverse one."""
    down = rulebook(x.sites * 2, [2 * h for h in x.grid], 2, stride=2)
    assert np.array_equal(down.sites, x.sites)
    inverse = inverse_rulebook(down, x.sites * 2, [2 * h for h in x.grid])
    return transposed_rulebook(x.sites, x.grid, 2, stride=2, pad=1), inverse


@pytest.mark.parametrize("layer", [graph.conv, graph.conv_with_q], ids=lambda f: f.__name__)
@pytest.mark.parametrize("k", [0, 1])
def test_a_convolution_of_symbols_does_what_the_rulebook_says(layer, k):
    """Taken for an ordinary one, its error was 0.77 where the ground state is not zero."""
    x, W, b = random_layer(7, (4, 5, 2), 2, 3)
    rules = backwards(x)[k]
    y, function = sparse_conv(x, W, b, rules), gradients_of(layer, PY)
    given = np.ones_like(y.values), np.ones(3)
    values, t_out, *_ = function(
        x.values, x.ground_state, W, b, rules.src, rules.dst, rules.kind, *given
    )
    numbers = [v.eval(mode=PY) for v in layer(x, W, b, rules)]
    for found in ((values, t_out), numbers):
        assert relative_error(found[0], y.values) < 1e-14
        assert relative_error(found[1], y.ground_state) < 1e-14


@pytest.mark.parametrize(
    ("what", "k", "mode"),
    [("max_pool", 0, PY), ("mean_pool", 1, PY), ("to_dense", 0, PY), ("max_pool", 1, "NUMBA")],
)
def test_what_has_no_meaning_for_a_transposed_rulebook_refuses_it(what, k, mode):
    x, *_ = random_layer(7, (4, 5, 2), 2, 3)
    rules, layer = backwards(x)[k], getattr(graph, what)
    message = "takes no rulebook of a transposed or an inverse convolution"
    with pytest.raises(ValueError, match=message):
        layer(x, rules)
    symbols, z = graph.symbolic_rules(), graph.symbolic_value()
    y = layer(z, symbols)
    f = pytensor.function([*z, *symbols], y if what == "to_dense" else y.values, mode=mode)
    with pytest.raises(ValueError, match=message):
        f(x.values, x.ground_state, *graph.rule_arrays(x, rules))
    # That the message names:
    way_out = (dense_rulebook if what == "to_dense" else partial(rulebook, f=2))(x.sites, x.grid)
    assert len(f(x.values, x.ground_state, *graph.rule_arrays(x, way_out))) == len(way_out.sites)
    with pytest.raises(ValueError, match=message):
        max_pool_winners(x.values, x.ground_state, rules)


def test_a_dense_form_and_a_sum_of_symbols_refuse_the_rulebooks_of_other_layers():
    """A pooling's came through without a word, and the dense form had its rows."""
    x, *_ = random_layer(7, (4, 5, 2), 2, 3)
    z, first, second = graph.symbolic_value(), *map(graph.symbolic_rules, "ab")
    dense = pytensor.function([*z, *first], graph.to_dense(z, first), mode=PY)
    total = graph.add(z, z, first, second).values
    total = pytensor.function([*z, *first, *second], total, mode=PY)
    one, union = dense_rulebook(x.sites, x.grid), union_rulebooks(x.sites, x.sites, x.grid)
    cells = dense(x.values, x.ground_state, *graph.rule_arrays(x, one))
    np.testing.assert_array_equal(cells, x.to_dense().reshape(-1, 2))
    twice = total(x.values, x.ground_state, *graph.rule_arrays(x, *union))
    np.testing.assert_array_equal(twice, 2 * x.values)
    kept, strided = submanifold_rulebook(x.sites, x.grid, 1), rulebook(x.sites, x.grid, 1, stride=2)
    for other in (kept, strided, *backwards(x)):
        for f, right in ((dense, []), (total, union[:1])):
            with pytest.raises(ValueError, match="needs a rulebook of dense|not of one call of un"):
                f(x.values, x.ground_state, *graph.rule_arrays(x, *right, other))
    for f, wrong in ((dense, union[:1]), (total, (one, one))):
        with pytest.raises(ValueError, match="needs a rulebook of dense|not of one call of un"):
            f(x.values, x.ground_state, *graph.rule_arrays(x, *wrong))


@pytest.mark.parametrize("symbols", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_sum_refuses_halves_of_two_unions_of_as_many_sites(symbols):
    """Their arrays alone do not tell them apart, and the sum had values at wrong sites."""
    x, y, z = (SparseValue(np.array([[0, k]]), [[10.0**k]], (1, 3, 1)) for k in range(3))
    unions = [union_rulebooks(x.sites, other.sites, x.grid) for other in (y, z)]
    np.testing.assert_array_equal(unions[0][1].src, unions[1][1].src)
    np.testing.assert_array_equal(unions[0][1].dst, unions[1][1].dst)

    def total(*books):
        rules = [graph.symbolic_rules() if s else r for s, r in zip(symbols, books, strict=True)]
        made = [r for r in rules if isinstance(r, graph.SymbolicRules)]
        added = graph.add((x.values, x.ground_state), (y.values, y.ground_state), *rules)
        f = pytensor.function(list(chain(*made)), added.values, mode=PY)
        given = [r for s, r in zip(symbols, books, strict=True) if s]
        return f(*chain(*((r.src, r.dst, r.kind) for r in given)))  # by hand

    np.testing.assert_array_equal(total(*unions[0]), [[1], [10]])
    for first, second in (unions, unions[::-1]):
        with pytest.raises(ValueError, match="not of one call of union_rulebooks"):
            total(first[0], second[1])


def test_a_rulebook_of_as_many_other_sites_is_refused_by_the_graph():
    x, W, b = random_layer(7, (4, 5, 2), 2, 3)
    other = rulebook(np.roll(x.sites, 1, axis=0), x.grid, 2)
    for layer in (graph.conv, graph.conv_with_q):
        with pytest.raises(ValueError, match="but in the rulebook"):
            layer(x, W, b, other)
    for pool in (graph.max_pool, graph.mean_pool, graph.to_dense):
        with pytest.raises(ValueError, match="but in the rulebook"):
            pool(x, other)
    first = rulebook(x.sites, x.grid, 2)
    second = rulebook(first.sites, first.grid, 2)
    assert len(graph.rule_arrays(x, first, second)) == 6
    for rules in ((other,), (first, other), (second, first)):
        with pytest.raises(ValueError, match="make it of the sites and the grid of the layer"):
            graph.rule_arrays(x, *rules)
    assert len(graph.rule_arrays([x, first], second)) == 3


@pytest.mark.parametrize("function", ["kernel", "numpy"])
def test_sums_over_all_sites_are_accumulated_in_float64(function):
    """Half a million terms of 0.1: in float32 a loop's sum is 0.4 % off."""
    m, tenth = 500_000, np.float32(0.1)
    none, site = np.full((m, 1), 1, np.int32), np.zeros((1, 1), np.int32)
    each = np.arange(m, dtype=np.int32)[:, None]
    # Of two columns: NumPy adds up one alone in pairs, which loses nothing.
    ones, dY, winner = np.ones((m, 1), np.float32), np.full((m, 2), tenth), np.full((m, 2), 1)
    sums = [
        getattr(op.grad_q, function)(dY, none, site)[1],
        getattr(op.sum_ground, function)(dY, none, site),
        getattr(op.put_back, function)(dY, winner.astype(np.int32), site)[1],
    ]
    W = np.ones((1, 2), np.float32)
    sums.append(getattr(op.conv_grad_weights, function)(ones, dY, each, each))
    sums.append(getattr(op.conv_grads, function)(ones, W, dY, each, each)[1])
    for total in sums:
        assert total.dtype == np.float32
        assert np.ravel(total)[0] == pytest.approx(m * tenth, rel=1e-6)


def test_biases_and_ground_states_of_half_a_million_sites():
    m, tenth = 500_000, np.float32(0.1)
    x = SparseValue(np.arange(m)[:, None], np.ones((m, 2), np.float32), (m, 2))
    dY, W, none = np.full((m, 2), tenth), np.eye(2, dtype=np.float32), np.zeros(2, np.float32)
    one, up = rulebook(x.sites, x.grid, 1), transposed_rulebook(x.sites, x.grid, 1)
    b = pt.fvector()
    loss = (graph.conv(x, W, b, one).values * dY).sum()
    by_graph = pytensor.function([b], pt.grad(loss, b), mode=PY)(none)
    totals = [sparse_conv_grad(x, W, one, dY, none)[3], -sparse_conv_grad(x, W, up, dY, none)[1]]
    totals += [max_pool_grad(dY, np.full((m, 2), 0), 1)[0], by_graph]
    for total in totals:
        assert np.ravel(total)[0] == pytest.approx(m * tenth, rel=1e-6)
