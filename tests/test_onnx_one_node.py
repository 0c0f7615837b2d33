"""What holds a rule against an equation must see a wrong one, and wrong twins and engines too."""

import numpy as np
import pytest

from helpers.onnx_grad import one_node as tools
from helpers.onnx_grad.one_node import check_rule, gradients, one_node, value, vjp
from helpers.onnx_grad.rules import RULES, register_gradient

X = np.random.default_rng(3).normal(size=(2, 3))
Z = np.random.default_rng(4).uniform(0.5, 1, size=3)


def product(A, B):
    return A * B


def right(Y_bar, A, B):
    return [Y_bar * B, (Y_bar * A).sum(axis=0)]


def try_it(twin=product, equation=right):
    cases = [("Mul", {"A": X, "B": Z}, twin, equation, {})]
    return check_rule("eq-test-product", cases, np.random.default_rng(5))


def test_a_right_equation_passes():
    assert try_it().against == "the equation in NumPy"


def test_a_wrong_equation_is_seen():
    with pytest.raises(AssertionError, match="complex step"):
        try_it(equation=lambda Y_bar, A, B: [Y_bar * B, Y_bar.sum(axis=0)])


def test_a_wrong_twin_is_seen():
    with pytest.raises(AssertionError, match="the twin of Mul has another value"):
        try_it(twin=lambda A, B: A + B)


@pytest.fixture
def wrong_rule():
    old = RULES["", "Mul"]
    register_gradient("Mul", lambda g, node, dy: (dy, dy))
    yield
    register_gradient("Mul", old)


def test_a_wrong_rule_is_seen(wrong_rule):
    with pytest.raises(AssertionError, match="the equation in NumPy"):
        check_rule(
            "eq-test-product",
            [("Mul", {"A": X, "B": X}, product, lambda Y_bar, A, B: [Y_bar * B, Y_bar * A], {})],
            np.random.default_rng(5),
        )


def test_a_wrong_runtime_is_seen(monkeypatch):
    class Off(tools.ReferenceEvaluator):
        def run(self, *args):
            return [1.001 * G for G in super().run(*args)]

    monkeypatch.setattr(tools, "session", Off)
    with pytest.raises(AssertionError, match="Mul: float32 .* gradient for A"):
        vjp("Mul", {"A": X, "B": Z}, X)


def test_outputs_constants_and_inputs_that_are_left_out():
    inputs = {
        "X": X[:, None],
        "W": np.ones((1, 4, 3)),
        "R": np.zeros((1, 4, 1)),
        "B": None,
        "lengths": np.array([1], np.int32),
        "h_0": np.full((1, 1, 1), 0.5),
    }
    model = one_node("LSTM", inputs, {"hidden_size": 1}, ["Y", "Y_h"])
    assert [x.name for x in model.graph.input] == ["X", "W", "R", "h_0"]
    assert list(model.graph.node[0].input) == ["X", "W", "R", "", "lengths", "h_0"]
    bars = {"Y": np.ones((2, 1, 1, 1)), "Y_h": np.ones((1, 1, 1))}
    found = vjp("LSTM", inputs, bars, hidden_size=1)
    assert list(found) == ["X", "W", "R", "h_0"]
    assert found["X"][0].any() and not found["X"][1].any()  # the sequence has one step
    once = vjp("LSTM", inputs, bars["Y"], hidden_size=1)
    np.testing.assert_allclose(found["X"], 2 * once["X"])  # Y and Y_h are the same number


def test_value_and_gradient_of_a_maximum():
    axes = {"X": X, "axes": np.array([1])}
    np.testing.assert_array_equal(value("ReduceMax", axes, keepdims=0), X.max(axis=1))
    model = one_node("ReduceMax", axes, {"keepdims": 0})
    found = gradients(model, {"X": X, "Y_grad": np.array([1.0, 2.0])})
    assert found["X"].max(axis=1).tolist() == [1, 2]


def test_nothing_to_differentiate_by():
    with pytest.raises(ValueError, match="Shape has no real input"):
        one_node("Shape", {"X": np.arange(3)})
