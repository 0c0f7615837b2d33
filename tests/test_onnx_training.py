"""Losses and optimisers' steps as graphs, against the formulas in NumPy and the complex step."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx_checks import run_onnxruntime
from test_onnx_derivative import model_of, names

from helpers.checks import complex_step
from helpers.onnx_grad import (
    DerivativeOptions,
    adamw,
    add_loss,
    add_step,
    initial_state,
    onnx_derivative,
    sgd,
    training_step,
    with_weights,
)

rng = np.random.default_rng(17)
X, W = rng.normal(size=(5, 4)), rng.normal(size=(4, 3))
T = rng.uniform(size=(5, 3))
LABELS = np.array([0, 2, 1, 1, 0])


def scores(kind="double", shape="N, 3"):
    model = model_of(f"m ({kind}[N, 4] X) => ({kind}[{shape}] Y) {{ Y = MatMul(X, W) }}")
    kind = {"double": np.float64, "float": np.float32, "float16": np.float16}[kind]
    model.graph.initializer.append(numpy_helper.from_array(W.astype(kind), "W"))
    return model


def log_softmax(Y):
    return Y - np.log(np.exp(Y).sum(axis=1, keepdims=True))


FORMULAS = {
    "mse": lambda Y, t: (Y - t) ** 2,
    "l1": lambda Y, t: np.where(Y.real > t, Y - t, t - Y),
    "bce_with_logits": lambda Y, t: np.log(1 + np.exp(Y)) - t * Y,
    "cross_entropy": lambda Y, t: -log_softmax(Y)[np.arange(len(Y)), t],
    "nll": lambda Y, t: -Y[np.arange(len(Y)), t],
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", FORMULAS)
def test_losses_and_their_gradients(kind, reduction):
    label = LABELS if kind in ("cross_entropy", "nll") else T
    model = add_loss(scores(), kind, reduction=reduction)
    gradient = onnx_derivative(model, ["W"], [], DerivativeOptions.Loss, loss="loss", label="label")

    def loss(W):
        return getattr(np, reduction)(FORMULAS[kind](X @ W, label))

    found = run_onnxruntime(gradient, {"X": X, "label": label, "W": W})
    np.testing.assert_allclose(found["loss"], loss(W), rtol=1e-13)
    np.testing.assert_allclose(found["W_grad"], complex_step(loss, W), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["float", "double"])
def test_logits_may_be_large(kind):
    model = add_loss(model_of(f"m ({kind}[N] X) => ({kind}[N] Y) {{ Y = Identity(X) }}"),
                     "bce_with_logits", reduction="sum")  # fmt: skip
    gradient = onnx_derivative(model, options=DerivativeOptions.Loss, loss="loss", label="label")
    Y, t = np.array([[1000, -1000, 1000, -1000, 0], [1, 0, 0, 1, 1]], kind[0])
    found = run_onnxruntime(gradient, {"X": Y, "label": t})
    np.testing.assert_allclose(found["loss"], 2000 + np.log(2), rtol=1e-6)
    np.testing.assert_allclose(found["X_grad"], [0, 0, 1, -1, -0.5], rtol=1e-6)


def test_classes_in_axis_1_of_images():
    model = model_of("m (float[N, 3, H] X) => (float[N, 3, H] Y) { Y = Identity(X) }")
    model = add_loss(model, "cross_entropy", "Y", label="t", loss="L")
    assert names(model.graph.output) == ["Y", "L"]
    S, t = rng.normal(size=(2, 3, 4)).astype("f"), np.array([[0, 1, 2, 2], [1, 1, 0, 2]])
    expected = -np.take_along_axis(log_softmax(S), t[:, None], 1).mean()
    np.testing.assert_allclose(run_onnxruntime(model, {"X": S, "t": t})["L"], expected, rtol=1e-6)


# --- steps ----------------------------------------------------------------------------------------


def sgd_in_numpy(momentum=0.0, weight_decay=0.0, nesterov=False):
    u = 0

    def step(w, g, t):
        nonlocal u
        g = g + weight_decay * w
        u = momentum * u + g
        return w - 0.1 * (g + momentum * u if nesterov else u)

    return step


def adamw_in_numpy(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01):
    m = v = 0

    def step(w, g, t):
        nonlocal m, v
        w = w - 0.1 * weight_decay * w
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        return w - 0.1 * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)

    return step


STEPS = [
    (sgd, sgd_in_numpy, {}),
    (sgd, sgd_in_numpy, {"weight_decay": 0.3}),
    (sgd, sgd_in_numpy, {"momentum": 0.8}),
    (sgd, sgd_in_numpy, {"momentum": 0.8, "weight_decay": 0.3, "nesterov": True}),
    (adamw, adamw_in_numpy, {}),
    (adamw, adamw_in_numpy, {"weight_decay": 0.0}),
    (adamw, adamw_in_numpy, {"beta1": 0.5, "beta2": 0.9, "eps": 0.1, "weight_decay": 0.5}),
]


@pytest.mark.parametrize("kind, close", [("double", 1e-12), ("float", 2e-6)])
@pytest.mark.parametrize("made, in_numpy, numbers", STEPS)
def test_steps(made, in_numpy, numbers, kind, close):
    dtype = np.dtype({"double": "d", "float": "f"}[kind])
    step = training_step(add_loss(scores(kind), "mse"), made(**numbers))
    state, w, hand = initial_state(step, scores(kind)), W.astype(dtype), in_numpy(**numbers)
    w = w.astype(float)
    for t in range(1, 8):
        batch = {"X": X[t % 3 :].astype(dtype), "label": T[t % 3 :].astype(dtype)}
        known = batch | state | {"rate": np.array(0.1), "count": np.array(float(t))}
        found = run_onnxruntime(step, {x.name: known[x.name] for x in step.graph.input})
        x, e = batch["X"].astype(float), batch["X"].astype(float) @ w - batch["label"]
        w = hand(w, 2 * x.T @ e / e.size, t)
        state = {name: found[f"{name}_new"] for name in state}
        np.testing.assert_allclose(state["W"], w, rtol=close, atol=close)


def test_the_first_step_of_adam_in_single_precision():
    """1 - 0.999 would have lost four of its digits."""
    step = training_step(add_loss(scores("float"), "mse"), adamw(eps=1e-12, weight_decay=0))
    known = initial_state(step, scores("float")) | {"X": X.astype("f"), "label": T.astype("f")}
    known |= {"rate": np.array(0.5), "count": np.array(1.0)}
    moved = run_onnxruntime(step, known)["W_new"].astype(float) - W.astype("f")
    np.testing.assert_allclose(np.abs(moved), 0.5, rtol=1e-6)


def test_names_types_and_what_else_comes_out():
    model = add_loss(scores("float"), "mse")
    plain, heavy = training_step(model, sgd()), training_step(model, sgd(momentum=0.5))
    assert names(plain.graph.input) == ["X", "label", "W", "rate"]
    assert names(plain.graph.output) == ["W_new", "Y", "loss"]
    assert names(heavy.graph.input) == ["X", "label", "W", "rate", "W_u"]
    assert names(heavy.graph.output) == ["W_new", "W_u_new", "Y", "loss"]
    state = initial_state(heavy, scores("float"))
    assert {k: (v.shape, v.dtype.name) for k, v in state.items()} == {
        "W": ((4, 3), "float32"),
        "W_u": ((4, 3), "float32"),
    }
    assert not state["W_u"].any()
    np.testing.assert_array_equal(state["W"], W.astype("f"))


def test_one_step_for_several_weights_of_two_types():
    model = model_of(
        """m (double[N, 2] X) => (double[N, 2] Y) <double[2] a = {1, 2}>
        { b = Constant<value = float[2] {3.0, 4.0}>() c = Cast<to = 11>(b)
          Z = Mul(X, a) Y = Mul(Z, c) }"""
    )
    loss = add_loss(model, "mse", reduction="sum")
    step = training_step(loss, adamw(), weights=["a", "b"])
    state = initial_state(step, model)
    assert {k: v.dtype.name for k, v in state.items() if "_" not in k} == {
        "a": "float64",
        "b": "float32",
    }
    known = state | {"rate": np.array(0.1), "count": np.array(1.0)}
    x = np.array([[1.0, -2.0]])
    found = run_onnxruntime(step, known | {"X": x, "label": np.zeros((1, 2))})
    for name in ("a", "b"):  # a first step of Adam goes by the sign, here +
        expected = state[name] * (1 - 0.1 * 0.01) - 0.1
        np.testing.assert_allclose(found[f"{name}_new"], expected, rtol=1e-6)
    trained = with_weights(model, {name: found[f"{name}_new"] for name in ("a", "b")})
    expected = x * found["a_new"] * found["b_new"]
    np.testing.assert_allclose(run_onnxruntime(trained, {"X": x})["Y"], expected, rtol=1e-12)


def test_a_step_of_ones_own():
    """With a scalar that the model has as an input already, and a second result of one tensor."""
    model = model_of(
        """m (float[N, 2] X, float scale) => (float[N, 2] Y) <float[2] w = {1, 2}>
        { A = Mul(X, w) Y = Mul(A, scale) }"""
    )

    def step(w, g, last, *, rate, scale):
        unscaled = g / scale
        return w - rate.cast(w.dtype) * unscaled, unscaled

    made = training_step(add_loss(model, "l1", reduction="sum"), step)
    assert names(made.graph.input) == ["X", "scale", "label", "w", "rate", "w_last"]
    known = {"X": np.float32([[1, 3]]), "scale": np.array(8, "f"), "label": np.zeros((1, 2), "f")}
    found = run_onnxruntime(made, known | initial_state(made, model) | {"rate": np.array(0.5)})
    np.testing.assert_array_equal(found["w_last_new"], [1, 3])
    np.testing.assert_array_equal(found["w_new"], [0.5, 0.5])


# --- bad input ------------------------------------------------------------------------------------


def two_outputs():
    return model_of("m (float[2] X) => (float[2] Y, float[2] Z) { Y = Neg(X) Z = Exp(X) }")


LOSS_ERRORS = [
    (scores, ("mean",), {}, "loss 'mean' is unknown; there are mse, l1, bce_with_logits, cross"),
    (scores, ("mse",), {"reduction": "none"}, "reduction 'none' is unknown; there are mean, sum"),
    (two_outputs, ("mse",), {}, "several real outputs; the real ones are 'Y', 'Z'"),
    (two_outputs, ("mse", "X"), {}, "output 'X' is no real output; the real ones are 'Y', 'Z'"),
    (two_outputs, ("nll", "Y"), {}, r"nll takes scores \(N, classes, ...\); 'Y' has \(2,\)"),
    (scores, ("mse",), {"label": "X"}, "the name 'X' is taken"),
    (scores, ("mse",), {"loss": "W"}, "the name 'W' is taken"),
    (scores, ("mse",), {"loss": "label"}, "the name 'label' is taken"),
    (lambda: "m.onnx", ("mse",), {}, r"onx is a str, expected an onnx.ModelProto; onnx.load"),
]


@pytest.mark.parametrize("make, given, named, message", LOSS_ERRORS)
def test_losses_that_are_refused(make, given, named, message):
    with pytest.raises((ValueError, TypeError), match=message):
        add_loss(make(), *given, **named)


NUMBERS = [
    (sgd, {"momentum": 1.0}, "momentum is 1.0, which is out of its range"),
    (sgd, {"momentum": -0.1}, "momentum is -0.1"),
    (sgd, {"weight_decay": np.nan}, "weight_decay is nan"),
    (sgd, {"nesterov": True}, "nesterov needs a momentum"),
    (adamw, {"beta1": 1.0}, "beta1 is 1.0"),
    (adamw, {"beta2": 1.5}, "beta2 is 1.5"),
    (adamw, {"eps": 0.0}, "eps is 0.0"),
    (adamw, {"weight_decay": -1.0}, "weight_decay is -1.0"),
]


@pytest.mark.parametrize("made, numbers, message", NUMBERS)
def test_numbers_out_of_range(made, numbers, message):
    with pytest.raises(ValueError, match=message):
        made(**numbers)


STEP_ERRORS = [
    (sgd(), "W", "weights is 'W'; the inputs that have a gradient are 'W'"),
    (sgd(), [], r"weights is \[\]"),
    (sgd(), ["X"], r"weights is \['X'\]"),
    ("sgd", ["W"], "step is 'sgd', expected a function"),
    (lambda w: w, ["W"], r"step takes \(w\), expected \(w, g, states"),
    (lambda w, g, u: w, ["W"], r"returned 1 results for 2 of \['W', 'W_u'\]"),
    (lambda w, g: 0.0, ["W"], "returned 0.0 for 'W', expected a Tensor"),
    (lambda w, g, *, rate: rate * g, ["W"], r"scalars need a cast: rate.cast\(w.dtype\)"),
    (lambda w, g: g.graph.sum(g, None), ["W"], r"for 'W' of shape \(4, 3\); it needs"),
    (lambda w, g, *, rate: rate, ["W"], "needs the type and shape of the weight"),
]


@pytest.mark.parametrize("step, weights, message", STEP_ERRORS)
def test_steps_that_are_refused(step, weights, message):
    model = add_loss(scores("float"), "mse")
    by_loss = {"options": DerivativeOptions.Loss, "loss": "loss", "label": "label"}
    gradient = onnx_derivative(model, ["W"], [], **by_loss)
    with pytest.raises((ValueError, TypeError), match=message):
        add_step(gradient, step, weights)


def test_a_weight_in_which_eps_is_zero():
    model = add_loss(scores("float16"), "mse")
    with pytest.raises(ValueError, match="eps=1e-08 is 0 in the type of weight 'W', float16"):
        training_step(model, adamw())
    assert "W_new" in names(training_step(model, adamw(eps=1e-4)).graph.output)


def test_names_that_are_taken():
    model = model_of(
        """m (float[N, 2] X, float[2] w_u) => (float[N, 2] Y) <float[2] w = {1, 2}>
        { A = Mul(X, w) Y = Mul(A, w_u) }"""
    )
    with pytest.raises(ValueError, match="the name 'w_u' is taken in the graph"):
        training_step(add_loss(model, "mse"), sgd(momentum=0.5))


# --- the page -------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[1] / "book" / "onnx-training.md"


def test_the_code_of_the_page_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    model = model_of("m (float[N, 4] x) => (float[N, 3] y) { y = MatMul(x, W) }")
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((4, 3), "f"), "W"))
    onnx.save(model, "model.onnx")
    data = {"x": X.astype("f"), "label": LABELS}
    exec(code, {"batches": [tuple(data.values())] * 300})
    before, after = (
        run_onnxruntime(add_loss(onnx.load(file), "cross_entropy"), data)["loss"]
        for file in ("model.onnx", "trained.onnx")
    )
    np.testing.assert_allclose(before, np.log(3), rtol=1e-6)
    assert after < 0.8 * before


def test_gradients_may_be_accumulated():
    """As the page says: a graph that has their sums as inputs and hands them on."""
    handed = model_of("m (float[2] w, float[2] G) => (float[2] w_grad) { w_grad = Identity(G) }")
    feed = {"w": np.float32([1, 2]), "G": np.float32([4, 8]), "rate": np.array(0.25)}
    found = run_onnxruntime(add_step(handed, sgd(), ["w"]), feed)
    np.testing.assert_array_equal(found["w_new"], [0, 0])
