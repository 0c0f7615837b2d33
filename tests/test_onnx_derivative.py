"""The graph transform: options, names, errors, opsets, batches, tensors used more than once."""

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytensor
import pytest
from onnx import helper, numpy_helper, parser
from onnx_checks import (
    gradient_feeds,
    numeric_gradients,
    run_onnxruntime,
    run_reference,
)

from helpers.checks import complex_step
from helpers.onnx_grad import (
    DerivativeOptions,
    onnx_derivative,
    register_gradient,
    save_model,
    to_pytensor,
    with_weights,
)
from helpers.onnx_grad.constants import constants_by_use
from helpers.onnx_grad.rules import ABOUT, COMPOSED, RULES
from helpers.onnx_grad.simplify import simplify
from helpers.onnx_grad.tensor import Info, NoGradientError

Zero, KeepYieldOp, KeepOutputs, FillGrad, Loss = (
    DerivativeOptions[n] for n in ("Zero", "KeepYieldOp", "KeepOutputs", "FillGrad", "Loss")
)


def model_of(text, opset=21, ir=10, domains=()):
    imports = ", ".join([f'"" : {opset}', *(f'"{d}" : 1' for d in domains)])
    return parser.parse_model(f"<ir_version: {ir}, opset_import: [{imports}]>\n{text}")


def line():
    """The seed's X + cst."""
    return model_of("""line (float[N, 10] X) => (float[N, 10] Y) <float[1] cst = {1.0}>
        { Y = Add(X, cst) }""")


def mlp(opset=21, sizes=(4, 5, 3, 1), activation="Relu", kind=np.float64, batch="N"):
    """A perceptron with Gemm in the first layer and MatMul, Add in the others."""
    rng = np.random.default_rng(0)
    nodes, weights, h = [], [], "X"
    for i, (m, n) in enumerate(itertools.pairwise(sizes)):
        weights.append(numpy_helper.from_array(rng.standard_normal((m, n)).astype(kind), f"W{i}"))
        weights.append(numpy_helper.from_array(rng.standard_normal(n).astype(kind), f"b{i}"))
        out = "Y" if i == len(sizes) - 2 else f"a{i}"
        if i == 0:
            nodes.append(helper.make_node("Gemm", [h, "W0", "b0"], [out]))
        else:
            nodes.append(helper.make_node("MatMul", [h, f"W{i}"], [f"m{i}"]))
            nodes.append(helper.make_node("Add", [f"m{i}", f"b{i}"], [out]))
        if out != "Y":
            nodes.append(helper.make_node(activation, [out], [f"h{i}"]))
            h = f"h{i}"
    dtype = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("X", dtype, [batch, sizes[0]])],
        [helper.make_tensor_value_info("Y", dtype, [batch, sizes[-1]])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def names(values):
    return [v.name for v in values]


def weights_of(model):
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def as_inputs(model):
    """The same model with its real initializers as inputs, for finite differences in them."""
    free = onnx.ModelProto()
    free.CopyFrom(model)
    del free.graph.initializer[:]
    for t in model.graph.initializer:
        if t.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE):
            free.graph.input.append(helper.make_tensor_value_info(t.name, t.data_type, t.dims))
        else:
            free.graph.initializer.append(t)
    return free


def check(model, feeds, run=run_onnxruntime, rtol=1e-5, options=Zero, **arguments):
    """Every gradient of a float64 model against finite differences, in both runtimes."""
    rng = np.random.default_rng(3)
    gradient = onnx_derivative(model, options=options, **arguments)
    everything = {**weights_of(model), **feeds}
    outputs = run(as_inputs(model), {n: everything[n] for n in names(as_inputs(model).graph.input)})
    cotangents = {
        y: rng.standard_normal(np.shape(v)) for y, v in outputs.items() if v.dtype == np.float64
    }
    wrt = [n.removesuffix("_grad") for n in names(gradient.graph.output)]
    free = as_inputs(model)
    given = {n: everything[n] for n in names(free.graph.input)}
    expected = numeric_gradients(run_reference, free, given, wrt, cotangents)
    for runtime in (run_reference, run_onnxruntime):
        found = runtime(gradient, gradient_feeds(gradient, everything, cotangents))
        for name in wrt:
            G = found[f"{name}_grad"]
            assert G.shape == everything[name].shape
            np.testing.assert_allclose(G, expected[name], rtol=rtol, atol=1e-6, err_msg=name)
    return gradient


# Interface


def test_names_types_and_order():
    gradient = onnx_derivative(line())
    assert names(gradient.graph.input) == ["X", "cst", "Y_grad"]
    assert names(gradient.graph.output) == ["X_grad", "cst_grad"]
    assert not {"X", "cst"} & set(names(gradient.graph.initializer))
    of = {v.name: v.type for v in (*gradient.graph.input, *gradient.graph.output)}
    assert of["Y_grad"] == of["X_grad"] == of["X"]
    assert of["cst_grad"] == of["cst"]


def test_seed_example():
    model, X = line(), np.arange(20, dtype=np.float32).reshape(2, 10)
    dY = np.linspace(-1, 1, 20, dtype=np.float32).reshape(2, 10)
    feeds = {"X": X, "cst": np.ones(1, np.float32), "Y_grad": dY}
    for run in (run_onnxruntime, run_reference):
        found = run(onnx_derivative(model), feeds)
        np.testing.assert_array_equal(found["X_grad"], dY)
        np.testing.assert_allclose(found["cst_grad"], [dY.sum()], atol=1e-6)


def test_keep_outputs():
    gradient = onnx_derivative(line(), options=KeepOutputs)
    assert names(gradient.graph.output) == ["X_grad", "cst_grad", "Y"]
    feeds = {"X": np.ones((2, 10), np.float32), "cst": np.full(1, 3, np.float32)}
    feeds["Y_grad"] = np.ones((2, 10), np.float32)
    assert run_onnxruntime(gradient, feeds)["Y"].tolist() == [[4.0] * 10] * 2


def test_none_is_no_option():
    assert onnx_derivative(line(), options=None) == onnx_derivative(line())


@pytest.mark.parametrize("options", [FillGrad, FillGrad | KeepOutputs])
def test_fill_grad(options):
    gradient = onnx_derivative(line(), options=options)
    assert names(gradient.graph.input) == ["X", "cst"]
    kept = ["Y"] if options & KeepOutputs else []
    assert names(gradient.graph.output) == ["X_grad", "cst_grad", *kept]
    assert any("Y_grad" in node.output for node in gradient.graph.node)
    feeds = {"X": np.zeros((3, 10), np.float32), "cst": np.zeros(1, np.float32)}
    assert run_onnxruntime(gradient, feeds)["cst_grad"].tolist() == [30.0]


def test_an_output_that_is_an_input():
    model = model_of("m (double[2] X) => (double[2] Y, double[2] X) { Y = Exp(X) }")
    with pytest.raises(ValueError, match="'X' is an output and to be differentiated by"):
        onnx_derivative(model)
    X = np.array([0.5, -1.0])
    for options in (FillGrad, FillGrad | KeepOutputs):
        found = run_onnxruntime(onnx_derivative(model, options=options), {"X": X})
        np.testing.assert_allclose(found["X_grad"], np.exp(X) + 1)


def test_keep_yield_op():
    gradient = onnx_derivative(line(), options=KeepYieldOp)
    assert names(gradient.graph.input) == ["X", "cst"]
    (node,) = [n for n in gradient.graph.node if n.op_type == "YieldOp"]
    assert (list(node.input), list(node.output)) == (["Y"], ["Y_grad"])
    assert (node.domain, node.attribute[0].name) == ("com.microsoft", "full_shape_outputs")
    assert list(node.attribute[0].ints) == [0]
    # The two halves: what makes Y, and the gradient graph that starts from Y_grad.
    plain = onnx_derivative(line())
    after = [n.op_type for n in gradient.graph.node if n.op_type not in ("YieldOp", "Add")]
    assert after == [n.op_type for n in plain.graph.node]


def loss_model(output="float"):
    return model_of(f"""sgd (float[N, 3] X, float[N, 1] label) => (float[N, 1] P, {output} L)
        <float[3, 1] W = {{1.0, -2.0, 0.5}}, float[1] b = {{0.1}}> {{
            P0 = MatMul(X, W)
            P = Add(P0, b)
            E = Sub(P, label)
            S = Mul(E, E)
            L = ReduceMean<keepdims = 0>(S)
        }}""")


def test_loss():
    gradient = onnx_derivative(loss_model(), options=Loss, loss="L", label="label")
    assert names(gradient.graph.input) == ["X", "label", "W", "b"]
    assert names(gradient.graph.output) == ["X_grad", "W_grad", "b_grad", "P", "L"]
    rng = np.random.default_rng(0)
    X, label, W = (rng.standard_normal(s).astype(np.float32) for s in ((7, 3), (7, 1), (3, 1)))
    feeds = {"X": X, "label": label, "W": W, "b": np.zeros(1, np.float32)}
    for run in (run_onnxruntime, run_reference):
        found = run(gradient, feeds)
        E = X @ W - label
        np.testing.assert_allclose(found["L"], np.mean(E**2), rtol=1e-5)
        np.testing.assert_allclose(found["W_grad"], 2 * X.T @ E / 7, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found["X_grad"], 2 * E @ W.T / 7, rtol=1e-4, atol=1e-6)


def test_training_with_the_loss_graph():
    """Gradient descent on an inference runtime finds the least squares solution."""
    gradient = onnx_derivative(loss_model(), inputs=[], options=Loss, loss="L", label="label")
    session = onnx.reference.ReferenceEvaluator(gradient)
    rng = np.random.default_rng(0)
    X, W = (rng.standard_normal(s).astype(np.float32) for s in ((50, 3), (3, 1)))
    feeds = {"X": X, "label": X @ W + 2, "W": 0 * W, "b": np.zeros(1, np.float32)}
    for _ in range(200):
        dW, db, _, value = session.run(None, feeds)
        feeds |= {"W": feeds["W"] - 0.2 * dW, "b": feeds["b"] - 0.2 * db}
    assert value < 1e-6
    np.testing.assert_allclose(feeds["W"], W, atol=1e-3)


def test_loss_of_size_one_and_integer_label():
    model = model_of("""nll (float[N, 3] X, int64[N] label) => (float[1, 1] L)
        <float[3, 4] W = {1,2,3,4,5,6,7,8,9,8,7,6}, int64[2] shape = {1, 1}> {
            S = MatMul(X, W)
            L0 = SoftmaxCrossEntropyLoss(S, label)
            L = Reshape(L0, shape)
        }""")
    gradient = onnx_derivative(model, options=Loss, loss="L", label="label")
    assert names(gradient.graph.output) == ["X_grad", "W_grad", "L"]


def test_cross_entropy_is_computed_once():
    """Two equal losses, one used inside: their values and gradients stay what they were."""
    model = model_of("""nll (float[N, 3] X, int64[N] t) => (float L, float K, float[N, 3] p) {
            L = SoftmaxCrossEntropyLoss(X, t)
            K0, p = SoftmaxCrossEntropyLoss(X, t)
            S = ReduceSumSquare<keepdims = 0>(X)
            K = Add(K0, S) }""")
    gradient = onnx_derivative(model, options=KeepOutputs)
    assert "SoftmaxCrossEntropyLoss" not in [n.op_type for n in gradient.graph.node]
    rng = np.random.default_rng(0)
    X, p_bar = (rng.standard_normal((4, 3)).astype(np.float32) for _ in range(2))
    feeds = {"X": X, "t": np.array([0, 2, 1, 1])}
    cotangents = {"L": np.array(0.5, np.float32), "K": np.array(-2, np.float32), "p": p_bar}
    expected = run_onnxruntime(model, feeds)
    G = numeric_gradients(run_onnxruntime, model, feeds, ["X"], cotangents, 1e-2)
    for run in (run_onnxruntime, run_reference):
        found = run(gradient, gradient_feeds(gradient, feeds, cotangents))
        np.testing.assert_allclose(found["X_grad"], G["X"], atol=2e-3)
        for y, value in expected.items():
            np.testing.assert_allclose(found[y], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_in_loss_mode(reduction):
    model = model_of(f"""nll (float[N, 3] X, int64[N] t) => (float L, float K)
        <float[3, 4] W = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6}}> {{
            S = MatMul(X, W)
            K = SoftmaxCrossEntropyLoss<reduction = "{reduction}">(S, t)
            R = ReduceSumSquare<keepdims = 0>(W)
            L = Add(K, R) }}""")
    gradient = onnx_derivative(model, options=Loss, loss="L", label="t")
    W = weights_of(model)["W"] / 5
    X = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    t = np.array([0, 3, 1, 1, 2])
    S = (X @ W).astype(np.float64)
    p = np.exp(S) / np.exp(S).sum(1, keepdims=True)
    count = 5 if reduction == "mean" else 1
    dS = (p - np.eye(4)[t]) / count
    K = -np.log(p[np.arange(5), t]).sum() / count
    for run in (run_onnxruntime, run_reference):
        found = run(gradient, {"X": X, "t": t, "W": W})
        np.testing.assert_allclose(found["W_grad"], X.T @ dS + 2 * W, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found["X_grad"], dS @ W.T, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found["L"], K + (W**2).sum(), rtol=1e-5)
        np.testing.assert_allclose(found["K"], K, rtol=1e-5)


def test_path_name(tmp_path):
    path = tmp_path / "gradient.onnx"
    gradient = onnx_derivative(line(), path_name=path)
    assert onnx.load(path) == gradient


def test_verbose(capsys):
    onnx_derivative(line())
    assert capsys.readouterr().out == ""
    onnx_derivative(line(), verbose=2)
    assert "operator Add" in capsys.readouterr().out


def test_the_model_is_left_alone():
    model = mlp()
    before = model.SerializeToString()
    onnx_derivative(model)
    assert model.SerializeToString() == before


def test_some_weights_and_inputs():
    model = mlp()
    gradient = onnx_derivative(model, weights=["W1", "W0"], inputs=[])
    assert names(gradient.graph.output) == ["W1_grad", "W0_grad"]
    assert names(gradient.graph.input) == ["X", "W1", "W0", "Y_grad"]
    assert {"b0", "b1", "W2"} <= set(names(gradient.graph.initializer))
    gradient = onnx_derivative(model, weights=[], inputs=["X"])
    assert names(gradient.graph.input) == ["X", "Y_grad"]


def test_integers_are_no_targets():
    model = model_of("""ints (float[N, 6] X, int64[K] I) => (float[A, B] Y, int64[2] S)
        <int64[2] shape = {-1, 3}, int64 one = {1}> {
            R = Reshape(X, shape)
            Y = Gather(R, I)
            S = Shape(Y)
        }""")
    gradient = onnx_derivative(model, options=KeepOutputs)
    assert names(gradient.graph.input) == ["X", "I", "Y_grad"]
    assert names(gradient.graph.output) == ["X_grad", "Y", "S"]


# Weights and constants


def exported():
    """Layer normalisation written out, ReLU6 and dropout, as an exporter stores them: everything
    real is an initializer."""
    return model_of("""m (double[N, 4] X) => (double[N, 4] Y)
        <double two = {2}, double[1] eps = {1e-5}, double[4] gamma = {1, 2, -1, 3},
         double[4] beta = {1, 0, 2, -1}, double lo = {0}, double hi = {6}, double ratio = {0.5},
         int64[1] axis = {-1}> {
            M = ReduceMean(X, axis) C = Sub(X, M) S = Pow(C, two) V = ReduceMean(S, axis)
            E = Add(V, eps) D = Sqrt(E) H = Div(C, D) G = Mul(H, gamma) B = Add(G, beta)
            R = Clip(B, lo, hi) Y = Dropout(R, ratio) }""")


def test_the_constants_of_an_exported_model_are_no_weights(capsys):
    X = np.random.default_rng(0).standard_normal((5, 4))
    gradient = check(exported(), {"X": X}, verbose=1)
    assert names(gradient.graph.output) == ["X_grad", "gamma_grad", "beta_grad"]
    assert names(gradient.graph.input) == ["X", "gamma", "beta", "Y_grad"]
    assert capsys.readouterr().out.splitlines()[-1] == (
        "onnx_derivative: constants, not weights: two (a scalar), eps (added in front of Sqrt), "
        "lo (a scalar), hi (a scalar), ratio (a scalar)"
    )


def test_a_constant_is_a_weight_where_it_is_asked_for():
    gradient = onnx_derivative(exported(), weights=["eps", "hi", "two"])
    assert names(gradient.graph.output) == ["X_grad", "eps_grad", "hi_grad", "two_grad"]


# What is done with w, float[3]; whether it is a weight, or what it is.
ROLES = [
    ("Y = Mul(X, w)", True),
    ("Y = Pow(X, w)", "Y of Pow"),
    ("Y = Pow(w, X)", True),
    ("P = Pow(X, w) Y = Add(P, w)", True),
    ("I = Identity(w) F = Unsqueeze(I, zero) Y = Pow(X, F)", "Y of Pow"),
    ("I = Identity(w) Y = Mul(X, I)", True),
    ("C = Cast<to = 7>(w) D = Cast<to = 1>(C) Y = Mul(X, D)", "without a gradient in Cast"),
    ("c = Less(X, w) Z = Neg(X) Y = Where(c, X, Z)", "without a gradient in Less"),
    ("F = Floor(w) Y = Mul(X, F)", "without a gradient in Floor"),
    ("Y = Neg(X)", "not used"),
    ("Y = BatchNormalization(X, w, w, k, k)", True),
    ("Y = BatchNormalization(X, k, k, w, k)", "input_mean of BatchNormalization"),
    ("Y = BatchNormalization(X, k, k, k, w)", "input_var of BatchNormalization"),
    ("A = Add(X, w) Y = Sqrt(A)", True),
    ("Y = Attention(X, X, X, w)", "attn_mask of Attention"),
    ("Y = Pad(X, pads, w)", "constant_value of Pad"),
    ("I = Cast<to = 7>(X) Y = OneHot(I, zero, w)", "values of OneHot"),
    ("Y = mine.Op(X, w)", True),
]


@pytest.mark.parametrize("text, expected", ROLES, ids=[text for text, _ in ROLES])
def test_weights_by_use(text, expected):
    model = model_of(
        f"""m (float[2, 3] X) => (float[2, 3] Y) <float[3] w = {{1, 2, 3}},
        float[3] k = {{1, 1, 1}}, int64[1] zero = {{0}}, int64[4] pads = {{0, 0, 0, 0}}>
        {{ {text} }}""",
        opset=23,
        domains=["mine"],
    )
    assert constants_by_use(model).get("w", True) == expected


@pytest.mark.parametrize(
    "op, expected", [("Sqrt", "added in front of Sqrt"), ("Exp", True), ("Mul", True)]
)
def test_a_number_that_is_added(op, expected):
    """An epsilon in front of a root; a bias in front of anything else, or if it goes there too."""
    arguments = {"Mul": "A, A"}.get(op, "A")
    model = model_of(f"""m (float[2] X) => (float[2] Y) <float[1] e = {{1}}>
        {{ A = Add(X, e) Y = {op}({arguments}) }}""")
    assert constants_by_use(model).get("e", True) == expected
    model.graph.node.append(helper.make_node("Exp", ["A"], ["Z"]))
    assert "e" not in constants_by_use(model)


ATTENTIONS = {  # s, of one entry, in front of a Softmax
    "scores": "k = Transpose<perm = [1, 0]>(K) P = MatMul(Q, k) A = Div(P, s) M = Add(A, m)",
    "queries": """q = Mul(s, Q) r = Reshape(q, i) k = Transpose<perm = [1, 0]>(K)
        P = MatMul(r, k) M = Where(b, P, m)""",
    "keys": 'k = Mul(K, s) M = Einsum<equation = "ij,kj->ik">(Q, k)',
    "capped": """k = Transpose<perm = [1, 0]>(K) P = MatMul(Q, k) D = Div(P, s) T = Tanh(D)
        M = Mul(T, s)""",
}
NO_ATTENTIONS = {
    "a temperature of logits": "P = MatMul(Q, w) M = Mul(P, s)",
    "a branch that is weighted": "q = Mul(Q, s) h = Add(q, K) M = MatMul(h, w)",
    "a transposed weight": "q = Mul(Q, s) k = Transpose<perm = [1, 0]>(w) M = MatMul(q, k)",
}


@pytest.mark.parametrize("shape", ["1", "1, 1"])
@pytest.mark.parametrize("name", [*ATTENTIONS, *NO_ATTENTIONS])
def test_what_scales_an_attention_is_no_weight(name, shape):
    """Exporters store it with axes too; a factor of one entry elsewhere is a weight."""
    model = model_of(f"""m (float[2, 2] X, float[2, 2] Z, bool[2, 2] b) => (float[2, 2] Y)
        <float[{shape}] s = {{0.5}}, float[2, 2] w = {{1, 2, 3, 4}}, int64[2] i = {{2, 2}},
        float[2, 2] m = {{0, 1, 0, 1}}> {{ Q = MatMul(X, w) K = MatMul(Z, w)
        {(ATTENTIONS | NO_ATTENTIONS)[name]} Y = Softmax(M) }}""")
    expected = "a scale of attention" if name in ATTENTIONS else True
    assert constants_by_use(model).get("s", True) == expected


def test_a_mask_with_infinities_is_no_weight():
    model = mlp()
    mask = np.array([0.0, -np.inf, 0.0], np.float64)
    model.graph.initializer.append(numpy_helper.from_array(mask, "mask"))
    model.graph.node.append(helper.make_node("Add", ["Y", "mask"], ["Z"]))
    assert constants_by_use(model) == {"mask": "not finite"}


def test_only_constants_are_nothing_to_differentiate_by():
    with pytest.raises(ValueError, match=r"no real weight; 'two' is a constant \(a scalar\)"):
        onnx_derivative(
            model_of("m (float[2] X) => (float[2] Y) <float two = {2}> { Y = Pow(X, two) }"),
            inputs=[],
        )


def test_an_unused_weight_that_is_asked_for_has_the_gradient_zero():
    model = model_of(TEXTS["unused weight"])
    gradient = check(model, {"X": np.ones((2, 3))}, weights=["w", "unused"])
    assert names(gradient.graph.output) == ["X_grad", "w_grad", "unused_grad"]


# Structure


@pytest.mark.parametrize("opset", range(13, 27))
def test_every_opset(opset):
    gradient = check(mlp(opset), {"X": np.random.default_rng(1).standard_normal((6, 4))})
    assert gradient.opset_import[0].version == opset
    assert gradient.ir_version <= 13


def test_newer_opset_without_anything_new_is_taken_for_26():
    model = mlp()
    model.opset_import[0].version, model.ir_version = 28, 14
    gradient = onnx_derivative(model)
    assert (gradient.opset_import[0].version, gradient.ir_version) == (26, 13)


TEXTS = {
    "tensor used three times": """m (double[N, 3] X) => (double[N, 3] Y)
        <double[3] w = {1.0, 2.0, -1.0}> { A = Mul(X, w) B = Exp(X)
          C = Mul(A, B) Y = Sub(C, X) }""",
    "weight used twice": """m (double[N, 3] X) => (double[N, 3] Y)
        <double[3, 3] W = {1, 2, 3, 4, 5, 6, 7, 8, 9}>
        { A = MatMul(X, W) B = Tanh(A) Y = MatMul(B, W) }""",
    "same input twice": """m (double[N, 3] X) => (double[N, 3] Y)
        { A = Mul(X, X) B = Add(A, A) C = Div(B, X) Y = Sub(C, C) }""",
    "output used inside": """m (double[N, 3] X) => (double[N, 3] Y, double[N, 3] Z, double[N, 3] U)
        { Y = Exp(X) Z = Mul(Y, X) U = Add(Z, Y) }""",
    "an output that nothing depends on": """m (double[N, 3] X) => (double[N, 3] Y, double[2] Z)
        <double[3] w = {1, 2, 3}> { Y = Mul(X, w) Z = Constant<value = double[2] {1.0, 2.0}>() }""",
    "unused weight": """m (double[N, 3] X) => (double[N, 3] Y)
        <double[3] w = {1, 2, 3}, double[2, 2] unused = {1, 2, 3, 4}> { Y = Mul(X, w) }""",
    "input behind a comparison": """m (double[N, 3] X, double[3] limit) => (double[N, 3] Y)
        { C = Greater(X, limit) Z = Neg(X) Y = Where(C, X, Z) }""",
    "through integers": """m (double[N, 3] X) => (double[N, 3] Y)
        { I = Cast<to = 7>(X) R = Cast<to = 11>(I) Y = Mul(R, X) }""",
    "shape arithmetic": """m (double[N, 2, 3] X) => (double[N, 6] Y)
        <int64[1] zero = {0}, int64[1] minus = {-1}> {
            S = Shape(X) n = Gather(S, zero) T = Concat<axis = 0>(n, minus)
            R = Reshape(X, T) Y = Sin(R) }""",
    "a weight that is an output": """m (double[N, 3] X) => (double[N, 3] Y, double[3] v)
        <double[3] w = {1, 2, 3}> { Y = Mul(X, w) v = Identity(w) }""",
    "split in part": """m (double[N, 6] X) => (double[N, 2] Y)
        { A, B, C = Split<axis = 1, num_outputs = 3>(X) Y = Mul(A, C) }""",
    "vector times matrix": """m (double[3] X) => (double Y)
        <double[3, 3] W = {1, 2, 3, 4, 5, 6, 7, 8, 9}> { A = MatMul(X, W) Y = MatMul(A, X) }""",
    "attention": """m (double[N, 4, 6] X) => (double[N, 4, 6] Y)
        <double[6, 6] Wq = {1,0,0,1,0,0, 0,1,0,0,0,1, 1,0,1,0,0,0,
                            0,0,0,1,1,0, 1,1,0,0,0,0, 0,0,0,0,1,1}>
        { Q = MatMul(X, Wq) T = Transpose<perm = [0, 2, 1]>(Q) S = MatMul(Q, T)
          P = Softmax(S) Y = MatMul(P, X) }""",
    "no names for the batch": """m (double[?, 3] X, double[?, 3] Z) => (double[?, 3] Y)
        { Y = Mul(X, Z) }""",
}


@pytest.mark.parametrize("name", TEXTS)
def test_structure(name):
    model = model_of(TEXTS[name])
    rng = np.random.default_rng(5)
    feeds = {}
    for value in model.graph.input:
        dims = [d.dim_value or 2 for d in value.type.tensor_type.shape.dim]
        feeds[value.name] = rng.uniform(0.2, 0.9, dims)
    check(model, feeds)


def test_gradients_that_are_zero_have_the_right_shape():
    gradient = onnx_derivative(model_of(TEXTS["input behind a comparison"]))
    X, limit, dY = np.ones((2, 3)), np.zeros(3), np.ones((2, 3))
    found = run_onnxruntime(gradient, {"X": X, "limit": limit, "Y_grad": dY})
    assert found["limit_grad"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("batch", [0, 1, 5])
@pytest.mark.parametrize("run", [run_onnxruntime, run_reference])
@pytest.mark.parametrize("opset", [13, 21])
def test_dynamic_batch(batch, run, opset):
    model = model_of(
        """m (float[N, 2, 6] X, float[N, 1] Z) => (float[N, 4] Y, float[N, 3] R)
        <float[6, 2] W = {1,2,3,4,5,6,7,8,9,1,2,3}, float[4] b = {1, 2, 3, 4},
         int64[2] flat = {0, 4}, int64[1] axes = {1}> {
            A = MatMul(X, W) F = Reshape(A, flat) G = Relu(F) H = Add(G, b) Y = Mul(H, Z)
            T = Transpose<perm = [0, 2, 1]>(X) S = ReduceSum<keepdims = 0>(X, axes)
            U, V = Split<axis = 1>(S) R = Softmax(U) }"""
        if opset < 18
        else """m (float[N, 2, 6] X, float[N, 1] Z) => (float[N, 4] Y, float[N, 3] R)
        <float[6, 2] W = {1,2,3,4,5,6,7,8,9,1,2,3}, float[4] b = {1, 2, 3, 4},
         int64[2] flat = {0, 4}, int64[1] axes = {1}> {
            A = MatMul(X, W) F = Reshape(A, flat) G = Relu(F) H = Add(G, b) Y = Mul(H, Z)
            S = ReduceSum<keepdims = 0>(X, axes)
            U, V = Split<axis = 1, num_outputs = 2>(S) R = Softmax(U) }""",
        opset,
    )
    gradient = onnx_derivative(model)
    rng = np.random.default_rng(0)
    shapes = {"X": (batch, 2, 6), "Z": (batch, 1), "Y_grad": (batch, 4), "R_grad": (batch, 3)}
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    feeds |= {n: w for n, w in weights_of(model).items() if w.dtype == np.float32}
    found = run(gradient, feeds)
    assert found["X_grad"].shape == (batch, 2, 6)
    assert found["Z_grad"].shape == (batch, 1)
    assert found["W_grad"].shape == (6, 2)
    if batch == 0:
        assert not found["W_grad"].any() and not found["b_grad"].any()
    else:
        assert np.isfinite(found["W_grad"]).all() and found["W_grad"].any()


def test_second_derivative():
    """The gradient of a gradient graph: its outputs take names that its inner tensors had."""
    model = model_of("""m (double[3] X) => (double[3] Y) { A = Mul(X, X) Y = Mul(A, X) }""")
    once = onnx_derivative(model)
    twice = onnx_derivative(once)
    assert names(twice.graph.input) == ["X", "Y_grad", "X_grad_grad"]
    assert names(twice.graph.output) == ["X_grad", "Y_grad_grad"]
    X, dY, v = np.array([[1.0, -2.0, 0.5], [1.0, 2.0, 3.0], [0.3, 0.2, 1.0]])
    found = run_onnxruntime(twice, {"X": X, "Y_grad": dY, "X_grad_grad": v})
    np.testing.assert_allclose(found["X_grad"], 6 * X * dY * v)
    np.testing.assert_allclose(found["Y_grad_grad"], 3 * X**2 * v)


def test_local_functions_are_inlined():
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21, "local" : 1]>
        m (double[3] X) => (double[3] Y) { Y = local.cube(X) }
        <domain: "local", opset_import: ["" : 21]>
        cube (a) => (c) { b = Mul(a, a) c = Mul(a, b) }""")
    check(model, {"X": np.array([1.0, -2.0, 0.5])})


HEADS = {"X": (1, 4, 3, 4), "k": (1, 2, 5, 4), "v": (1, 2, 5, 4)}
TOKENS = {n: (2, 3, 8) for n in "Xkv"}
ANGLES = {"c": (2, 3, 2), "s": (2, 3, 2)}
TABLES = {"c": (5, 2), "s": (5, 2)}
# Operator, arguments, opset, shapes; its definition is in the standard.
DEFINED = [
    ("Attention", "(X, k, v)", 23, {"X": (1, 2, 3, 4), "k": (1, 2, 5, 4), "v": (1, 2, 5, 4)}),
    ("Attention", "<softcap = 2.0, scale = 0.3>(X, k, v, m)", 23, {**HEADS, "m": (3, 5)}),
    ("Attention", "<is_causal = 1, q_num_heads = 2, kv_num_heads = 2>(X, k, v)", 23, TOKENS),
    ("Attention", "(X, k, v, , p, q)", 23, {**HEADS, "p": (1, 2, 2, 4), "q": (1, 2, 2, 4)}),
    ("CenterCropPad", "<axes = [0]>(X, size)", 21, {"X": (4, 3)}),
    (
        "GroupNormalization",
        "<num_groups = 2, stash_type = 11>(X, s, b)",
        21,
        {"X": (2, 4, 3), "s": (4,), "b": (4,)},
    ),
    ("RotaryEmbedding", "(X, c, s)", 23, {"X": (2, 2, 3, 4), **ANGLES}),
    (
        "RotaryEmbedding",
        "<interleaved = 1, num_heads = 2>(X, c, s)",
        23,
        {"X": (2, 3, 8), **ANGLES},
    ),
    ("RotaryEmbedding", "(X, c, s, ids)", 23, {"X": (2, 2, 3, 4), **TABLES}),
]


@pytest.mark.parametrize(
    "op, arguments, opset, shapes", DEFINED, ids=[f"{d[0]}-{d[1]}" for d in DEFINED]
)
def test_defined_by_others(op, arguments, opset, shapes):
    """Differentiated through its definition; the other inputs as inputs, and as initializers."""
    rng = np.random.default_rng(0)
    values = {n: rng.standard_normal(s) for n, s in shapes.items()}
    model = model_of(
        f"""m ({", ".join(f"double[{', '.join(map(str, s))}] {n}" for n, s in shapes.items())})
        => (double[{", ".join(map(str, shapes["X"]))}] Y)
        <int64[1] size = {{4}}, int64[2, 3] ids = {{0, 2, 1, 3, 3, 0}}>
        {{ E = Exp(X) Y = {op}{arguments.replace("X", "E")} }}""",
        opset,
    )
    check(model, values, run=run_reference, rtol=1e-4)
    for value in list(model.graph.input)[1:]:  # as an exporter writes it
        model.graph.input.remove(value)
        model.graph.initializer.append(numpy_helper.from_array(values[value.name], value.name))
    weights = [n for n in shapes if n != "X"]
    check(model, {"X": values["X"]}, run=run_reference, rtol=1e-4, weights=weights)


def test_all_that_are_defined_by_others_are_tested():
    assert {d[0] for d in DEFINED} == set(COMPOSED)


def test_a_definition_whose_types_are_unknown_is_refused_by_name():
    model = model_of(
        """m (float[2, 4] X) => (float[2, 4] Y) <float[4] s = {1, 2, 3, 4}>
        { E = mine.Unknown(X) Y = GroupNormalization<num_groups = 2>(E, s, s) }""",
        domains=["mine"],
    )
    with pytest.raises(NoGradientError, match="definition of GroupNormalization.*value_info"):
        onnx_derivative(model)


MASKED = {
    "attention, true or false": "(Q, K, V, M) { Y = Attention(Q, K, V, M) }",
    "attention, added": "(Q, K, V, A) { Y = Attention(Q, K, V, A) }",
    "as PyTorch exports it": """(Q, K, V, A) {
        T = Transpose<perm = [0, 1, 3, 2]>(K) S = MatMul(Q, T) B = Add(S, A) P = Softmax(B)
        N = IsNaN(P) zero = Constant<value_float = 0.0>() z = CastLike(zero, P)
        W = Where(N, z, P) Y = MatMul(W, V) }""",
}


@pytest.mark.parametrize("name", MASKED)
def test_a_row_that_is_masked_has_no_influence(name):
    """Its softmax is NaN, and a product with a cotangent of 0 would be NaN as well."""
    used, body = MASKED[name].split(")", 1)
    types = {"M": "bool[3, 5]", "A": "double[3, 5]", "Q": "double[1, 2, 3, 4]"}
    types |= dict.fromkeys("KV", "double[1, 2, 5, 4]")
    inputs = ", ".join(f"{types[n]} {n}" for n in used[1:].split(", "))
    model = model_of(f"m ({inputs}) => (double[1, 2, 3, 4] Y) {body}", 23)
    rng = np.random.default_rng(0)
    mask = rng.random((3, 5)) < 0.6
    mask[1] = False
    known = {"M": mask, "A": np.where(mask, 0.0, -np.inf)}
    known |= {n: rng.standard_normal((1, 2, 3 if n == "Q" else 5, 4)) for n in "QKV"}
    feeds = {x.name: known[x.name] for x in model.graph.input}
    gradient = onnx_derivative(model, inputs=list("QKV"), options=KeepOutputs)
    cotangents = {"Y": rng.standard_normal((1, 2, 3, 4))}
    found = run_reference(gradient, gradient_feeds(gradient, feeds, cotangents))
    assert not found["Y"][:, :, 1].any() and not found["Q_grad"][:, :, 1].any()
    expected = numeric_gradients(run_reference, model, feeds, "QKV", cotangents)
    for n, G in expected.items():
        np.testing.assert_allclose(found[f"{n}_grad"], G, atol=1e-7)
    once = onnx_derivative(model, inputs=list("QKV"))
    twice = onnx_derivative(once, inputs=list("QKV"), weights=[])
    feeds |= {"Y_grad": cotangents["Y"], **{f"{n}_grad_grad": known[n] for n in "QKV"}}
    second = run_reference(twice, {x.name: feeds[x.name] for x in twice.graph.input})
    assert all(np.isfinite(x).all() and x.any() for x in second.values())


def test_a_row_of_nan_that_is_used_is_not_hidden():
    model = model_of("""m (double[2, 3] X, bool[2, 3] C) => (double[2, 3] Y)
        { P = Softmax(X) N = Neg(P) Y = Where(C, N, P) }""")
    X = np.array([[-np.inf] * 3, [1.0, 2.0, 3.0]])
    feeds = {"X": X, "C": np.array([[True, True, False]] * 2), "Y_grad": X[1:] + np.zeros((2, 1))}
    X_grad = run_reference(onnx_derivative(model), feeds)["X_grad"]
    assert np.isnan(X_grad[0]).all() and np.isfinite(X_grad[1]).all()


POLES = {  # where X is not positive, or large, or the second entry of an axis: nothing to be had
    "Sqrt": "R = Sqrt(X)",
    "Log": "R = Log(X)",
    "Reciprocal": "P = Relu(X) R = Reciprocal(P)",
    "Exp": "e = Mul(X, big) m = Neg(e) R = Exp(m)",
    "Div": "P = Relu(X) R = Div(w, P)",
    "Pow": "R = Pow(X, w)",
    "Pow by a number": "h = Constant<value_float = 0.5>() c = CastLike(h, X) R = Pow(X, c)",
    "Mul": "L = Log(X) M = Neg(L) R = Mul(M, w)",
    "the square": "L = Log(X) R = Mul(L, L)",
    "behind factors and a sum": "L = Log(X) S = Sqrt(L) T = Add(S, w) R = Mul(T, w)",
    "Acosh": "R = Acosh(X)",
    **{f: f"I = Div(one, X) R = {f}(I)" for f in ("Asin", "Acos", "Atanh")},
    **{f: f"n = Neg(X) P = Relu(n) e = Mul(P, big) R = {f}(e)" for f in ("Sinh", "Cosh")},
    "broadcast": "E = Unsqueeze(X, k) L = Log(E) R = Squeeze(L, k)",
}


@pytest.mark.parametrize("name", POLES)
def test_what_a_where_does_not_choose_has_no_influence(name):
    """Its slope is infinite or NaN, and the cotangent 0; twice differentiated too."""
    model = model_of(f"""m (double[3, 2] X) => (double[3, 2] Y)
        <double[2] w = {{1.5, 2.5}}, double one = {{1.0}}, double big = {{1000.0}},
         int64[1] k = {{0}}>
        {{ C = Greater(X, one) {POLES[name]} Y = Where(C, R, X) }}""")
    X = np.array([[-2.0, 1.2], [0, 3], [1.7, -1]])
    feeds = {"X": X, "w": np.array([1.5, 2.5])}
    cotangents = {"Y": np.array([[0.3, -0.7], [0.9, 2], [0, 0.1]])}
    gradient = onnx_derivative(model, weights=["w"] if " w)" in POLES[name] else None)
    wrt = [y.name.removesuffix("_grad") for y in gradient.graph.output]
    found = run_reference(gradient, gradient_feeds(gradient, feeds, cotangents))
    expected = numeric_gradients(run_reference, model_by_w(model), feeds, wrt, cotangents)
    for n in wrt:
        np.testing.assert_allclose(found[f"{n}_grad"], expected[n], rtol=1e-7, atol=1e-9)

    # J dX, from the gradient by its cotangent, does not depend on the cotangent: not at 0 either.
    forward = onnx_derivative(gradient, weights=[], inputs=["Y_grad"])
    feeds |= {f"{n}_grad_grad": np.ones_like(feeds[n]) for n in wrt}
    feeds["Y_grad"] = np.zeros((3, 2))
    pushed = run_reference(forward, {x.name: feeds[x.name] for x in forward.graph.input})
    total = sum(G.sum() for G in expected.values())
    assert (pushed["Y_grad_grad"] * cotangents["Y"]).sum() == pytest.approx(total, rel=1e-7)


def test_a_nan_that_is_chosen_is_not_hidden():
    model = model_of("""m (double[3] X, bool[3] C) => (double[3] Y)
        { L = Log(X) R = Sqrt(L) Y = Where(C, R, X) }""")
    feeds = {"X": np.array([-1.0, 0.5, -1]), "C": np.array([True, True, False])}
    X_grad = run_reference(onnx_derivative(model), feeds | {"Y_grad": np.ones(3)})["X_grad"]
    assert np.isnan(X_grad).tolist() == [True, True, False]


def model_by_w(model):
    """The same with w as an input."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    kept = [t for t in model.graph.initializer if t.name != "w"]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    model.graph.input.append(helper.make_tensor_value_info("w", onnx.TensorProto.DOUBLE, [2]))
    return model


TRAINING = {"constant": "<bool t = {1}>", "at run time": ""}


@pytest.mark.parametrize("ratio", ["0.4", "0.0"])
@pytest.mark.parametrize("flag", TRAINING)
@pytest.mark.parametrize("opset", [13, 21])
def test_dropout_in_training(flag, ratio, opset):
    """The mask that the outputs were made with is the one in the gradient."""
    weights = TRAINING[flag].replace("<", f"<float r = {{{ratio}}}, ") or f"<float r = {{{ratio}}}>"
    given = "" if TRAINING[flag] else ", bool t"
    text = f"m (float[20, 10] X{given}) => (float[20, 10] Y) {weights} {{ Y = Dropout(X, r, t) }}"
    gradient = onnx_derivative(model_of(text, opset), options=KeepOutputs)
    assert names(gradient.graph.output) == ["X_grad", "Y"]
    rng = np.random.default_rng(0)
    X, dY = rng.uniform(0.5, 1, (2, 20, 10)).astype(np.float32)
    for run in (run_onnxruntime, run_reference):
        for t in (True, False):
            known = {"X": X, "Y_grad": dY, "t": np.array(t)}
            found = run(gradient, {n: known[n] for n in names(gradient.graph.input)})
            np.testing.assert_allclose(found["X_grad"], dY * found["Y"] / X, rtol=1e-5)
            dropped = float(ratio) if t or not given else 0.0
            assert abs(np.mean(found["Y"] == 0) - dropped) < 0.15


def test_register_gradient():
    """A custom operator: the gradient graph emits what the rule says."""
    text = "m (float[3] X) => (float[3] Y) { A = Exp(X) B = mine.Cube(A) Y = Neg(B) }"
    model = model_of(text, domains=["mine"])
    with pytest.raises(NoGradientError, match=r"Cube of domain mine.*'B'.*register_gradient"):
        onnx_derivative(model)
    try:

        @register_gradient("Cube", domain="mine")
        def cube(g, node, dy):
            (x,) = node.x
            return dy * 3.0 * x * x

        gradient = onnx_derivative(model)
    finally:
        RULES.pop(("mine", "Cube"), None)
    assert "Cube" not in [n.op_type for n in gradient.graph.node]
    X, dY = np.array([0.1, -0.2, 0.3], np.float32), np.ones(3, np.float32)
    found = run_onnxruntime(gradient, {"X": X, "Y_grad": dY})["X_grad"]
    np.testing.assert_allclose(found, -3 * np.exp(X) ** 3, rtol=1e-5)


# Size


def test_graph_size():
    """An MLP's gradient graph has no shape arithmetic, and a few nodes a layer."""
    gradient = onnx_derivative(mlp(kind=np.float32, sizes=(64, 64, 32, 1)))
    kinds = {n.op_type for n in gradient.graph.node}
    assert not kinds & {"Shape", "Gather", "Concat", "Expand", "Reshape", "Transpose", "Identity"}
    # onnxruntime-training's own has 22 for such a model (23 with its YieldOp).
    assert len(gradient.graph.node) <= 22


def test_static_shapes_need_no_shape_arithmetic():
    model = model_of(TEXTS["shape arithmetic"].replace("N", "4"))
    gradient = onnx_derivative(model)
    assert [n.op_type for n in gradient.graph.node] == ["Reshape", "Cos", "Mul", "Reshape"]


@pytest.mark.parametrize("domain", ["", "ai.onnx"])
def test_simplify(domain):
    model = model_of("""m (float[N, 2, 3] X) => (float[N, 6] Y)
        <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] minus = {-1}> {
            S = Shape(X) a = Gather(S, one) b = Gather(S, two) n = Gather(S, zero)
            k = Mul(a, b) T = Concat<axis = 0>(minus, k) I = Identity(X)
            dead = Exp(I) Y = Reshape(I, T) }""")
    for named in (*model.opset_import, *model.graph.node):
        named.domain = domain
    small = simplify(model)
    assert [n.op_type for n in small.graph.node] == ["Reshape"]
    X = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    np.testing.assert_array_equal(
        run_onnxruntime(small, {"X": X})["Y"], run_onnxruntime(model, {"X": X})["Y"]
    )


# Conventions at edges


@pytest.mark.parametrize(
    "text, x, expected",
    [
        ("Y = Relu(X)", [0.0, -1.0, 2.0], [0.0, 0.0, 1.0]),
        ("Y = Abs(X)", [0.0, -1.0, 2.0], [0.0, -1.0, 1.0]),
        ("Y = Clip(X, m, p)", [-1.0, 1.0, 2.0], [1.0, 1.0, 0.0]),
        ("Y = Max(X, p)", [1.0, 0.0, 2.0], [0.5, 0.0, 1.0]),
        ("Y = Min(X, p)", [1.0, 0.0, 2.0], [0.5, 1.0, 0.0]),
        ("Z = Pow(X, two) Y = Identity(Z)", [0.0, -1.0, 3.0], [0.0, -2.0, 6.0]),
        ("Y = Pow(X, nil)", [0.0, -1.0, 3.0], [0.0, 0.0, 0.0]),
        ("N = ReduceL2(X) Y = Identity(N)", [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
        ("N = ReduceMax(X) Y = Identity(N)", [2.0, 1.0, 2.0], [0.5, 0.0, 0.5]),
    ],
)
@pytest.mark.parametrize("weights", [None, []])
def test_conventions(text, x, expected, weights):
    shape = "float[1]" if "Reduce" in text else "float[3]"
    model = model_of(f"""m (float[3] X) => ({shape} Y)
        <float m = {{-1}}, float p = {{1}}, float two = {{2}}, float nil = {{0}}> {{ {text} }}""")
    gradient = onnx_derivative(model, options=FillGrad, weights=weights)
    feeds = {"X": np.array(x, np.float32)}
    feeds |= {n: w for n, w in weights_of(model).items() if n in names(gradient.graph.input)}
    for run in (run_onnxruntime, run_reference):
        np.testing.assert_allclose(run(gradient, feeds)["X_grad"], expected)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize(
    "operator", ["LpNormalization<p = {}>", 'ai.onnx.ml.Normalizer<norm = "L{}">']
)
def test_a_row_of_zeros_divided_by_its_norm_has_gradient_zero(operator, p):
    made = operator.format(p)
    text = f"m (float[2, 3] X) => (float[2, 3] Y) {{ Y = {made}(X) }}"
    gradient = onnx_derivative(model_of(text, domains=["ai.onnx.ml"]))
    Y_grad = np.array([[1, 2, 3], [1, 0, 0]], np.float32)
    feeds = {"X": np.array([[0, 0, 0], [3, 0, 4]], np.float32), "Y_grad": Y_grad}
    G = run_onnxruntime(gradient, feeds)["X_grad"]
    assert not G[0].any() and G[1].any()


HALF = [
    ("A = RMSNormalization<axis = 1>(X, s)", "s"),
    ("A = LayerNormalization<axis = 1>(X, s, b)", "sb"),
    ("A, M, V = BatchNormalization<training_mode = 1>(X, s, b, b, s)", "sb"),
    ("T = Transpose(X) S = Unsqueeze(T, one) A, H = GRU<hidden_size = 1>(S, W, R)", "WR"),
]


@pytest.mark.parametrize("text, weights", HALF, ids=[text for text, _ in HALF])
def test_half_precision(text, weights):
    """The gradients are of the type of what they are the gradient of, and near the exact ones."""
    found, rng = {}, np.random.default_rng(0)
    shapes = {"s": 3, "b": 3, "W": (1, 3, 1), "R": (1, 3, 1), "X": (4, 3)}
    values = {n: rng.standard_normal(s).astype(np.float16) for n, s in shapes.items()}
    for kind, dtype in (("float16", np.float16), ("double", np.float64)):
        model = model_of(
            f"""m ({kind}[4, 3] X) => ({kind}{"[3, 1, 4, 1]" if "GRU" in text else "[4, 3]"} Y)
            <int64[1] one = {{2}}> {{ {text} B = Mul(A, A) Y = Mul(A, B) }}""",
            opset=23,
        )
        for name in weights:
            value = numpy_helper.from_array(values[name].astype(dtype), name)
            model.graph.initializer.append(value)
        gradient = onnx_derivative(model, options=FillGrad)
        assert names(gradient.graph.input) == ["X", *weights]
        feeds = {x.name: values[x.name].astype(dtype) for x in gradient.graph.input}
        found[kind] = run_reference(gradient, feeds)
        assert {G.dtype for G in found[kind].values()} == {np.dtype(dtype)}
    for name, G in found["double"].items():
        np.testing.assert_allclose(found["float16"][name], G, atol=0.02 * np.max(np.abs(G)))


@pytest.mark.parametrize("kind", ["float8e4m3fn", "float8e5m2", "float4e2m1", "float16"])
def test_a_cast_to_few_bits_is_the_identity_to_its_gradient(kind):
    """It was for float16, and zero without a word for less."""
    to = onnx.TensorProto.DataType.Value(kind.upper())
    text = f"""m (float[2, 3] X) => (float[3, 2] Y) <int64[2] s = {{3, 2}}>
        {{ Q = Cast<to = {to}>(X) R = Reshape(Q, s) Z = Cast<to = 1>(R) Y = Mul(Z, Z) }}"""
    model, X = model_of(text, opset=23), np.array([[1, -0.7, 0.3], [2, 3.1, 0]], np.float32)
    Y = run_reference(model, {"X": X})["Y"]
    found = run_reference(onnx_derivative(model, options=FillGrad), {"X": X})["X_grad"]
    np.testing.assert_array_equal(abs(found), 2 * np.sqrt(Y).reshape(2, 3))


# Errors


def branches(condition="c", constants=""):
    """The branches share names with each other and with what is outside."""
    return model_of(
        f"""m (bool c, double[2, 3] X) => (double[2, 3] Y)
        <{constants} double[3] w = {{1, 2, -1}}, int64[1] two = {{2}}, int64[1] zero = {{0}}> {{
        S = Shape(X) n = Gather(S, zero) e = Equal(n, two) yes = Squeeze(e) no = Not(yes)
        Z = Mul(X, w)
        U = If ({condition}) <
            then_branch = a () => (double[2, 3] u) {{ z = Sin(Z) u = Mul(z, w) }},
            else_branch = b () => (double[2, 3] u) {{ z = Exp(Z) u = Mul(z, X) }} >
        V = If ({condition}) <
            then_branch = a2 () => (double[2, 3] u) {{ z = Neg(U) u = Add(z, X) }},
            else_branch = b2 () => (double[2, 3] u) {{ z = Neg(U) u = Sub(z, X) }} >
        k = Neg(V) Y = Add(k, X) }}"""
    )


@pytest.mark.parametrize("condition, then", [("yes", 1), ("no", 0), ("t", 1), ("f", 0)])
def test_a_branch_with_a_constant_condition_is_taken(condition, then):
    model = branches(condition, "bool t = {1}, bool f = {0},")
    gradient = onnx_derivative(model)
    assert "If" not in [n.op_type for n in gradient.graph.node]
    X, dY = np.random.default_rng(2).standard_normal((2, 2, 3))
    w = np.array([1.0, 2, -1])
    Z = X * w
    # Y = U + (1 - 1 or 1 + 1) X.
    dx = w * w * np.cos(Z) if then else np.exp(Z) * (1 + X * w) + 2
    dw = X * np.cos(Z) * w + np.sin(Z) if then else X * X * np.exp(Z)
    feeds = {"c": np.array(True), "X": X, "w": w, "Y_grad": dY}
    for run in (run_reference, run_onnxruntime):
        found = run(gradient, feeds)
        np.testing.assert_allclose(found["X_grad"], dY * dx, rtol=1e-12)
        np.testing.assert_allclose(found["w_grad"], (dY * dw).sum(0), rtol=1e-12)
    before, symbols = model.SerializeToString(), to_pytensor(model)
    assert model.SerializeToString() == before
    for name, expected in (("X", dY * dx), ("w", (dY * dw).sum(0))):
        x = (symbols.inputs | symbols.weights)[name]
        G = pytensor.grad((symbols.outputs["Y"] * dY).sum(), x)
        np.testing.assert_allclose(G.eval({symbols.inputs["X"]: X}), expected, rtol=1e-12)


def test_a_condition_that_takes_several_rounds_of_folding():
    """The length of a Reshape is known after the shape that it is given is."""
    model = model_of("""m (double[2, 3] X) => (double[n] Y) <int64[1] six = {6}> {
        s = Shape(X) length = ReduceProd<keepdims = 1>(s) R = Reshape(X, length)
        t = Shape(R) c = Equal(t, six)
        Y = If (c) <then_branch = a () => (double[n] u) { u = Mul(R, R) },
                    else_branch = b () => (double[n] v) { v = Neg(R) }> }""")
    X, bar = np.arange(6.0).reshape(2, 3), np.ones(6)
    (G,) = run_reference(onnx_derivative(model), {"X": X, "Y_grad": bar}).values()
    np.testing.assert_allclose(G, 2 * X)
    symbols = to_pytensor(model)
    G = pytensor.grad(symbols.outputs["Y"].sum(), symbols.inputs["X"])
    np.testing.assert_allclose(G.eval({symbols.inputs["X"]: X}), 2 * X)


RESIZED = {
    "scales that are joined": """m (float[N, 1, 2, 2] X) => (float[N, 1, 4, 4] Y) {
        one = Constant<value = float[2] {1, 1}>() two = Constant<value = float[2] {2, 2}>()
        scales = Concat<axis = 0>(one, two) Y = Resize<mode = "nearest">(X, , scales) }""",
    "sizes with an open batch": """m (float[N, 1, 2, 2] X) => (float[M, 1, 4, 4] Y)
        <int64[1] start = {0}, int64[1] end = {2}, int64[2] size = {4, 4}> {
        shape = Shape(X) head = Slice(shape, start, end) sizes = Concat<axis = 0>(head, size)
        Y = Resize<mode = "nearest">(X, , , sizes) }""",
}


@pytest.mark.parametrize("name", RESIZED)
def test_scales_and_sizes_as_exporters_write_them(name):
    gradient = onnx_derivative(model_of(RESIZED[name], opset=17))
    X = np.ones((3, 1, 2, 2), np.float32)
    bar = np.random.default_rng(0).standard_normal((3, 1, 4, 4)).astype(np.float32)
    (G,) = run_onnxruntime(gradient, {"X": X, "Y_grad": bar}).values()
    np.testing.assert_allclose(G, bar.reshape(3, 1, 2, 2, 2, 2).sum((3, 5)), rtol=1e-5)


def test_a_name_does_not_come_through_arithmetic_on_it():
    model = model_of("""m (float[N, 1, 2] X) => (float[A, B, C] Y) <int64[1] first = {0},
        int64[2] rest = {1, 2}, int64[1] two = {2}> {
        shape = Shape(X) N = Gather(shape, first) double = Mul(N, two)
        sizes = Concat<axis = 0>(double, rest) Y = Resize<mode = "nearest">(X, , , sizes) }""")
    with pytest.raises(NoGradientError, match="the length of axis 0, which is resized"):
        onnx_derivative(model)


def test_a_declared_shape_that_is_wrong_is_not_believed():
    """An exporter declares that each label's own loss is a scalar."""
    model = model_of("""m (float[N, 3] X, int64[N] label) => (float L) <float two = {2.0}>
        { each = SoftmaxCrossEntropyLoss<reduction = "none">(X, label)
          square = Pow(each, two) L = ReduceMean<keepdims = 0>(square) }""")
    expected = onnx_derivative(model, inputs=["X"])
    model.graph.value_info.add(name="each", type=Info(1, ()).proto())
    X = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    feeds = {"X": X, "label": np.array([0, 2, 1, 0]), "L_grad": np.array(1, np.float32)}
    found, known = (
        run_onnxruntime(m, feeds)["X_grad"]
        for m in (onnx_derivative(model, inputs=["X"]), expected)
    )
    np.testing.assert_allclose(found, known, rtol=1e-6)


def test_an_output_that_is_declared_wrongly_has_the_inferred_shape():
    model = model_of("""m (float[N, 3] X, int64[N] label) => (float L)
        { L = SoftmaxCrossEntropyLoss<reduction = "none">(X, label) }""")
    gradient = onnx_derivative(model)
    (bar,) = (x for x in gradient.graph.input if x.name == "L_grad")
    assert [d.dim_param for d in bar.type.tensor_type.shape.dim] == ["N"]
    with pytest.raises(ValueError, match="loss 'L' is not a scalar"):
        onnx_derivative(model, options=DerivativeOptions.Loss, loss="L", label="label")


def test_control_flow_off_the_path_stays():
    """It uses tensors of the graph around it, one of which has a promised name."""
    model = model_of("""m (bool c, double[3] X, double[3] Z) => (double[3] Y)
        <double[3] w = {1, 2, 3}> {
        X_grad = Exp(Z)
        V = If (c) <then_branch = a () => (double[3] u) { u = Neg(X_grad) },
                    else_branch = b () => (double[3] u) { u = Mul(X_grad, Z) }>
        A = Mul(X, V) Y = Mul(A, w) }""")
    gradient = onnx_derivative(model, inputs=["X"])
    assert "If" in [n.op_type for n in gradient.graph.node]
    X, Z, dY, w = np.random.default_rng(0).standard_normal((4, 3))
    for c, V in ((True, -np.exp(Z)), (False, np.exp(Z) * Z)):
        for run in (run_reference, run_onnxruntime):
            found = run(gradient, {"c": np.array(c), "X": X, "Z": Z, "w": w, "Y_grad": dY})
            np.testing.assert_allclose(found["X_grad"], dY * V * w)
            np.testing.assert_allclose(found["w_grad"], dY * V * X)
    with pytest.raises(NoGradientError, match="operator If.*makes 'V'.*control flow"):
        onnx_derivative(model, inputs=["Z"])


def without_shape(model):
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


ERRORS = {
    "no rule": (
        lambda: model_of("m (float[2] X) => (float[2] Y) { A = Neg(X) Y = Det2(A) }"),
        {},
        "Det2|No Op registered",
    ),
    "no rule for a standard operator": (
        lambda: model_of("m (float[2, 2] X) => (float Y) { [the_det] Y = Det(X) }"),
        {},
        "Det of domain ai.onnx .*the_det.*'Y'",
    ),
    "subgraph": (branches, {}, "operator If of domain ai.onnx .*subgraph.*condition is a constant"),
    "a loop": (
        lambda: model_of("""m (int64 n, bool c, float[3] X) => (float[3] Y) {
            Y = Loop (n, c, X) <body = b (int64 i, bool k, float[3] h) => (bool l, float[3] g)
                { l = Identity(k) g = Exp(h) }> }"""),
        {},
        "operator Loop of domain ai.onnx .*subgraph.*unrolled",
    ),
    "an operator of the optimiser": (
        lambda: model_of(
            """m (float[2, 2] X) => (float[2, 2] Y)
            { Y = com.microsoft.FusedMatMul<alpha = 2.0>(X, X) }""",
            domains=["com.microsoft"],
        ),
        {},
        "FusedMatMul of domain com.microsoft.*differentiate the model as it was exported.*"
        r"register_gradient\('FusedMatMul', ..., domain='com.microsoft'\)",
    ),
    "an output without a shape": (
        lambda: without_shape(
            model_of("m (float[2] X) => (float[2] Y) { Y = mine.Op(X) }", domains=["mine"])
        ),
        {},
        "output 'Y' has no declared shape.*make_tensor_value_info",
    ),
    "probabilities in dictionaries": (
        lambda: model_of(
            """m (float[N, 2] X) => (seq(map(int64, float)) Y) { P = Softmax(X)
            Y = ai.onnx.ml.ZipMap<classlabels_int64s = [0, 1]>(P) }""",
            opset=9,
            domains=["ai.onnx.ml"],
        ),
        {},
        "ZipMap makes dictionaries of 'P'.*options={'zipmap': False}",
    ),
    "types that contradict each other": (
        lambda: model_of(
            """m (float[2] X) => (float[2] Y)
            { B = Constant<value = double[2] {1.0, 2.0}>() Y = Mul(X, B) }"""
        ),
        {},
        "types or shapes of the model contradict each other",
    ),
    "unknown weight": (mlp, {"weights": ["V"]}, "weight 'V' is no initializer.*'W0'"),
    "weight that is an input": (mlp, {"weights": ["X"]}, "weight 'X' is no initializer"),
    "unknown input": (mlp, {"inputs": ["V"]}, "input 'V' is no input.*'X'"),
    "a string": (mlp, {"weights": "W0"}, "expected a list"),
    "nothing": (mlp, {"weights": [], "inputs": []}, "nothing to differentiate by"),
    "loss unknown": (
        loss_model,
        {"options": Loss, "loss": "Q", "label": "label"},
        "loss 'Q' is no output.*'L'",
    ),
    "label unknown": (
        loss_model,
        {"options": Loss, "loss": "L", "label": "t"},
        "label 't' is no input.*'label'",
    ),
    "loss not a scalar": (
        loss_model,
        {"options": Loss, "loss": "P", "label": "label"},
        r"loss 'P' is not a scalar.*\['N', 1\]",
    ),
    "by the label": (
        loss_model,
        {"options": Loss, "loss": "L", "label": "label", "inputs": ["label"]},
        "'label'.*it is the label",
    ),
    "no loss": (loss_model, {"options": Loss, "label": "label"}, "needs loss"),
    "no label": (loss_model, {"options": Loss, "loss": "L"}, "needs label.*FillGrad . KeepOutputs"),
    "loss without the option": (loss_model, {"loss": "L"}, "options=DerivativeOptions.Loss"),
    "yield and outputs": (line, {"options": KeepYieldOp | KeepOutputs}, "KeepYieldOp excludes"),
    "yield and fill": (line, {"options": KeepYieldOp | FillGrad}, "KeepYieldOp excludes"),
    "loss and fill": (
        loss_model,
        {"options": Loss | FillGrad, "loss": "L", "label": "label"},
        "Loss excludes",
    ),
    "unknown option": (line, {"options": 64}, "64"),
    "option by name": (
        line,
        {"options": "Loss"},
        "options is 'Loss', expected DerivativeOptions.Loss; the options are Zero, Keep",
    ),
    "no option": (
        line,
        {"options": [1]},
        r"options is \[1\], expected DerivativeOptions.Zero; the options are Z",
    ),
    "opset too old": (lambda: mlp(12), {}, "opset 12 of domain ai.onnx is too old"),
    "opset unknown": (lambda: mlp(99), {}, "opset 99 of domain ai.onnx is unknown: onnx .* to 28"),
    "opset of another domain unknown": (
        lambda: parser.parse_model(
            """<ir_version: 10, opset_import: ["" : 21, "ai.onnx.ml" : 99]>
            m (float[2] X) => (float[2] Y) { Y = Neg(X) }"""
        ),
        {},
        "opset 99 of domain ai.onnx.ml is unknown",
    ),
    "no real output": (
        lambda: model_of("m (float[2] X) => (int64[1] Y) { Y = Shape(X) }"),
        {},
        "no output is a real tensor",
    ),
    "no real input": (
        lambda: model_of("m (int64[2] X) => (float[2] Y) { Y = Cast<to = 1>(X) }"),
        {},
        "no real input and no real weight",
    ),
    "integer weight": (
        lambda: model_of("m (float[2] X) => (float[2] Y) <int64[1] s = {2}> { Y = Reshape(X, s) }"),
        {"weights": ["s"]},
        "'s'.*not real",
    ),
    "name taken": (
        lambda: model_of("m (float[2] X, float[2] X_grad) => (float[2] Y) { Y = Add(X, X_grad) }"),
        {},
        "'X_grad'.*already",
    ),
    "not valid": (
        lambda: model_of("m (float[2] X) => (float[2] Y) { Y = Add(X, nowhere) }"),
        {},
        "not a valid model",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    make, arguments, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        onnx_derivative(make(), **arguments)


@pytest.mark.parametrize(
    "onx, message",
    [
        (
            "model.onnx",
            r"onx is a str.*onnx.load\(path\) reads one, and file_derivative\(path, out",
        ),
        (Path("model.onnx"), r"Path, expected an onnx.ModelProto; onnx.load\(path\)"),
        (b"", r"bytes, expected an onnx.ModelProto; onnx.load_from_string\(data\)"),
        (onnx.GraphProto(), r"GraphProto, expected an onnx.ModelProto; onnx.helper.make_model"),
        (None, "NoneType, expected an onnx.ModelProto"),
    ],
)
@pytest.mark.parametrize(
    "function",
    [onnx_derivative, to_pytensor, lambda x: with_weights(x, {}), lambda x: save_model(x, "x")],
)
def test_not_a_model(function, onx, message):
    with pytest.raises(TypeError, match=message):
        function(onx)


@pytest.mark.parametrize("domain", ["", "ai.onnx", "ai.onnx.ml"])
def test_an_opset_that_nobody_knows_is_not_translated(domain):
    model = mlp(21)
    model.opset_import.append(helper.make_opsetid(domain, 99))
    with pytest.raises(ValueError, match="opset 99 of domain ai.onnx.* is unknown"):
        to_pytensor(model)


def test_an_operator_without_rule_off_the_path_is_no_error():
    model = model_of("""m (float[2, 2] X, float[2, 2] Z) => (float[2, 2] Y)
        { d = Det(Z) Y = Mul(X, d) }""")
    gradient = onnx_derivative(model, inputs=["X"])
    assert names(gradient.graph.output) == ["X_grad"]
    with pytest.raises(NotImplementedError, match="Det"):
        onnx_derivative(model)


# Functions of the model, and what a rule may return


def calling(shape="N, 3"):
    """A function that calls another one, with an attribute that is left to its default."""
    return model_of(
        f"""m (double[{shape}] X) => (double[{shape}] Y) {{ A = my.Outer(X) Y = my.Power(A) }}
        <domain: "my", opset_import: ["" : 21, "my" : 1]>
        Outer (x) => (y) {{ z = Neg(x) y = my.Power<by = 3.0>(z) }}
        <domain: "my", opset_import: ["" : 21, "my" : 1]>
        Power <by: float = 2.0> (x) => (y)
        {{ b = Constant<value_float: float = @by>() c = CastLike(b, x) y = my.Raised(x, c) }}
        <domain: "my", opset_import: ["" : 21]> Raised (x, b) => (y) {{ y = Pow(x, b) }}""",
        domains=["my"],
    )


@pytest.fixture
def rule_of(monkeypatch):
    """Register a rule that goes again after the test."""

    def register(op_type, rule, domain="my"):
        monkeypatch.setitem(RULES, (domain, op_type), None)
        monkeypatch.setitem(ABOUT, (domain, op_type), None)
        register_gradient(op_type, rule, domain=domain)

    return register


@pytest.mark.parametrize("op_type", ["Power", "Raised", "Outer", None])
def test_a_rule_for_a_function_of_the_model_holds(rule_of, op_type):
    """Where it is called, in another function too; the function itself still computes."""
    X = np.array([[1.0, -2.0, 0.5]])
    if op_type is None:
        expected = 2 * (-X) ** 3 * -3 * X**2
    elif op_type == "Outer":
        rule_of("Outer", lambda g, node, dy: dy * 7.0)
        expected = 7 * 2 * (-X) ** 3
    elif op_type == "Power":
        rule_of("Power", lambda g, node, dy: dy * (10.0 * node.attr("by")) * node.y[0])
        expected = 20 * (-X) ** 6 * -30 * (-X) ** 3
    else:
        rule_of("Raised", lambda g, node, dy: (dy * 5.0, None))
        expected = np.full((1, 3), -25.0)
    gradient = onnx_derivative(calling(), options=FillGrad | KeepOutputs)
    found = run_onnxruntime(gradient, {"X": X})
    np.testing.assert_allclose(found["X_grad"], expected, rtol=1e-12)
    np.testing.assert_allclose(found["Y"], X**6, rtol=1e-12)


@pytest.mark.parametrize(
    "shape, wrong, message",
    [
        ("2, 3", lambda g, dy: g.sum(dy, None), r"returned shape \[1, 1\] for 'X', .* \[2, 3\]"),
        ("N, 3", lambda g, dy: g.sum(dy, [1]), r"returned shape \['N', 1\] for 'X', .*'N', 3"),
        ("N, 3", lambda g, dy: g.sum(dy, None, False), r"returned shape \[\] for 'X'"),
        ("N, 3", lambda g, dy: g.sum(dy, [0]), r"returned shape \[1, 3\] for 'X', .*'N', 3"),
        ("2, 3", lambda g, dy: g.transpose(dy, [1, 0]), r"returned shape \[3, 2\] for 'X'"),
        ("N, 3", lambda g, dy: dy.cast(1), "returned type float for 'X', which is double"),
        ("N, 3", lambda g, dy: 0.0, "returned 0.0, expected a Tensor"),
    ],
)
def test_what_a_rule_returns_is_held_against_its_input(rule_of, shape, wrong, message):
    rule_of("Power", lambda g, node, dy: wrong(g, dy))
    rule_of("Outer", lambda g, node, dy: wrong(g, dy))
    with pytest.raises((ValueError, TypeError), match=f"gradient rule of .*Power .*{message[:9]}"):
        onnx_derivative(calling(shape))
    rule_of("Power", lambda g, node, dy: dy)
    with pytest.raises((ValueError, TypeError), match=f"rule of .*Outer .*lambda.*{message}"):
        onnx_derivative(calling(shape))


EINSUMS = [  # an equation, and the lengths of its operands as declared and as fed
    ("ij,ij->i", "1, 5", "4, 5"),
    ("ij,ij->i", "4, 5", "1, 5"),
    ("ij,jk", "3, 1", "5, 2"),
    ("ij,ij->", "1, 5", "4, 1"),
    ("ij,ij->ji", "1, 1", "N, 5"),
    ("i,ij->i", "1", "4, 5"),
]


@pytest.mark.parametrize("equation, a, b", EINSUMS)
def test_a_length_of_one_in_an_einsum_is_broadcast(equation, a, b):
    """As the runtime does, where ONNX's inference takes the length of the first operand."""
    rng = np.random.default_rng(0)
    A, B = (rng.normal(size=eval(f"({dims},)", {"N": 4})) for dims in (a, b))
    Y = np.einsum(equation, A, B)
    model = model_of(
        f"""m (double[{a}] A, double[{b}] B) => (double{list(Y.shape) if Y.ndim else ""} Y)
        {{ Z = Einsum<equation = "{equation}">(A, B) Y = Neg(Z) }}"""
    )
    bar = rng.normal(size=Y.shape)
    found = run_onnxruntime(onnx_derivative(model), {"A": A, "B": B, "Y_grad": bar})
    by_A = complex_step(lambda A: -np.sum(bar * np.einsum(equation, A, B)), A)
    by_B = complex_step(lambda B: -np.sum(bar * np.einsum(equation, A, B)), B)
    np.testing.assert_allclose(found["A_grad"], by_A, rtol=1e-12)
    np.testing.assert_allclose(found["B_grad"], by_B, rtol=1e-12)
