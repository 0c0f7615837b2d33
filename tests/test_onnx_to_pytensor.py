"""An ONNX model as a PyTensor graph: the same outputs as two runtimes, and the right gradients."""

import re

import numpy as np
import onnxruntime
import pytensor
import pytensor.tensor as pt
import pytest
from onnx import TensorProto, helper
from onnx.parser import parse_model
from onnx.reference import ReferenceEvaluator
from onnx_cases import load, node_cases, with_constants
from onnx_checks import run_onnxruntime
from packaging.version import Version

from helpers.checks import finite_difference, relative_error
from helpers.onnx_grad import DerivativeOptions, onnx_derivative, random_feed, to_pytensor
from helpers.onnx_grad.translation.node import TRANSLATIONS
from helpers.onnx_grad.translation.reductions import REDUCTIONS

PLAIN = pytensor.compile.mode.Mode(linker="py", optimizer=None)  # nothing is compiled

# Node tests that cannot be run, by a regular expression for their names.
REFUSED = {
    "training_dropout": "dropout in training mode is random",
    "maxpool_with_argmax_2d_precomputed_strides": "storage_order=1 is not supported",
    "scatter_elements_with_reduction_m(ax|in)": "only 'none' and 'add'",
    "scatter_elements_with_reduction_mul": "reduction='mul' is not supported",
    "scatternd_m": "reduction='m.*' is not supported; supported are 'none', 'add'$",
    "resize_.*antialias": "antialias=1",
    "resize_tf_crop": "tf_crop_and_resize",
}
SKIPPED = {
    "einsum_batch_diagonal": "PyTensor takes seconds to build a diagonal in an einsum",
    "resize_downsample_scales_.*_align_corners": "fractions of a length: onnxruntime takes none",
}
WITHOUT_NODE_TEST = {"LinearClassifier", "LinearRegressor", "Normalizer", "Scaler", "Imputer"}


def run(model, feed, dtype=None):
    symbols = to_pytensor(model, dtype)
    function = pytensor.function(
        list(symbols.inputs.values()),
        list(symbols.outputs.values()),
        mode=PLAIN,
        on_unused_input="ignore",
    )
    return dict(
        zip(symbols.outputs, function(*(feed[name] for name in symbols.inputs)), strict=True)
    )


def translated(model) -> bool:
    return all(
        (node.domain.replace("ai.onnx", "", node.domain == "ai.onnx"), node.op_type) in TRANSLATIONS
        for node in model.graph.node
    )


@pytest.mark.parametrize("operator", sorted(TRANSLATIONS), ids="/".join)
def test_node_tests(operator):
    """Every test of the ONNX backend for the operator, and what it expands into."""
    cases = [case for case in node_cases()[operator] if translated(case.model)]
    assert bool(cases) != (operator[1] in WITHOUT_NODE_TEST)
    for case in map(with_constants, cases):
        if any(re.search(pattern, case.name) for pattern in SKIPPED):
            continue
        if reasons := [why for pattern, why in REFUSED.items() if re.search(pattern, case.name)]:
            with pytest.raises(NotImplementedError, match=reasons[0]):
                to_pytensor(case.model)
            continue
        found = run(case.model, case.feed)
        for name, expected in case.outputs.items():
            half = np.float16 in [x.dtype for x in (*case.feed.values(), expected)]
            rtol, atol = (5e-3, 1e-3) if half else (1e-4, 1e-4)
            np.testing.assert_allclose(
                found[name], expected, rtol, atol, err_msg=f"{case.name}: {name}", strict=True
            )


# --- whole models ---------------------------------------------------------------------------------

# One feature a model that the node tests, with their fixed shapes, do not have.
MODELS = {
    "a branch and a shared weight": """(float[N, 3] X) => (float[N, 3] Y, float[N, 3] Z)
        <float[3, 3] W = {1, 2, 3, 4, 5, 6, 7, 8, 9}> {
        a = MatMul(X, W) Y = Tanh(a) b = MatMul(Y, W) Z = Sub(b, a) }""",
    "shapes computed from an open batch": """(float[N, 2, 3] X) => (float[N, 6] Y, float[M, 3] Z)
        <int64[1] six = {6}, int64[1] zero = {0}, int64[1] one = {1}, int64[1] last = {-1},
         int64 first = {0}, int64[1] three = {3}, int64 two = {2}, int64[1] axis = {0}> {
        s = Shape(X) n = Slice(s, zero, one, zero) t = Concat<axis = 0>(n, six) Y = Reshape(X, t)
        k = Gather(s, first) d = Mul(k, two) e = Unsqueeze(d, axis) u = Concat<axis = 0>(e, three)
        Z = Reshape(X, u) }""",
    "expanding and filling": """(float[N, 1] X) => (float[N, 4] Y, float[N, 4] Z)
        <int64[1] four = {4}, int64[1] zero = {0}, int64[1] one = {1}> {
        s = Shape<start = 0, end = 1>(X) t = Concat<axis = 0>(s, four) Y = Expand(X, t)
        f = ConstantOfShape<value = float[1] {2.5}>(t) Z = Add(f, Y) }""",
    "convolution of an open size": """(float[N, 2, H, W] X)
        => (float[N, 3, H, W] Y, float[N, 3, P, Q] Z)
        <float[3, 2, 3, 3] K = {0.1, 0.2, -0.3, 0.4, 0.5, 0.6, -0.7, 0.8, 0.9, 1, 1.1, 1.2, -1.3,
         1.4, 1.5, 1.6, 1.7, 1.8, -1.9, 2, 2.1, 2.2, 2.3, -2.4, 2.5, 2.6, 2.7, 2.8, 2.9, 3, 3.1,
         3.2, 3.3, -3.4, 3.5, 3.6, 3.7, 3.8, 3.9, 4, 4.1, -4.2, 4.3, 4.4, 4.5, 4.6, 4.7, 4.8, 4.9,
         5, 5.1, -5.2, 5.3, 5.4}> {
        a = Conv<auto_pad = "SAME_UPPER">(X, K) Y = Relu(a)
        Z = MaxPool<kernel_shape = [3, 2], strides = [2, 2], ceil_mode = 1>(Y) }""",
    "integers": """(int64[N] i, int64[N] j) => (int64[N] q, int64[N] r, int64[N] m)
        { q = Div(i, j) r = Mod<fmod = 1>(i, j) m = Mod(i, j) }""",
    "a function of its own": """(float[N, 3] X) => (float[N, 3] Y) { Y = local.twice(X) }
        <domain: "local", opset_import: ["" : 21]> twice (x) => (y) { y = Add(x, x) }""",
}


def parsed(text, imports='"" : 21'):
    return parse_model(f"<ir_version: 10, opset_import: [{imports}]> {text}")


def model_of(name):
    imports = '"" : 21, "local" : 1' if "local" in MODELS[name] else '"" : 21'
    return parsed(f"g {MODELS[name]}", imports)


@pytest.mark.parametrize("batch", [0, 1, 5])
@pytest.mark.parametrize("name", MODELS)
def test_models_agree_with_two_runtimes(name, batch):
    model = model_of(name)
    feed = random_feed(model.graph.input, batch, empty_dimension=7, rng=3)
    if name == "integers":
        signs = np.resize([1, -1, -1], batch)
        feed = {"i": signs * np.arange(batch) * 3, "j": -signs + 4 * (np.arange(batch) % 2)}
    found = list(run(model, feed).values())
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for runtime in (session, ReferenceEvaluator(model)):
        for x, expected in zip(found, runtime.run(None, feed), strict=True):
            np.testing.assert_allclose(x, expected, 1e-5, 1e-5, strict=True)


FILES = "skl_linear_ml skl_linear_core skl_mlp_regressor skl_mlp_classifier".split()
FILES += "torch_mlp torch_conv torch_attention".split()


@pytest.mark.parametrize("name", FILES)
def test_models_of_other_libraries(name):
    """The outputs, and the gradient of each weight along a random direction, in float64."""
    model = load(name)
    feed = random_feed(model.graph.input, 3, rng=4)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    runtimes = [session]
    if name != "skl_mlp_classifier":  # onnx.reference has a bug in ArrayFeatureExtractor
        runtimes.append(ReferenceEvaluator(model))
    for runtime in runtimes:
        pairs = zip(run(model, feed).values(), runtime.run(None, feed), strict=True)
        for x, expected in pairs:
            np.testing.assert_allclose(x, expected, 1e-4, 1e-5, strict=True)

    symbols = to_pytensor(model, "float64")
    rng = np.random.default_rng(5)
    name, y = next((k, y) for k, y in symbols.outputs.items() if y.dtype == "float64")
    loss = pt.sum(y * rng.standard_normal(session.run([name], feed)[0].shape))
    wrt = [*symbols.inputs.values(), *symbols.weights.values()]
    wrt = [x for x in wrt if x.ndim]
    gradients = pytensor.function(
        list(symbols.inputs.values()), pt.grad(loss, wrt, disconnected_inputs="ignore"), mode=PLAIN
    )(*feed.values())
    values = [*feed.values(), *(w.get_value() for w in wrt[len(feed) :])]
    steps = [rng.standard_normal(x.shape) for x in values]
    at = pt.scalar()
    moved = {x: x + at * step for x, step in zip(wrt, steps, strict=True)}
    along = pytensor.function(
        [at, *symbols.inputs.values()],
        pytensor.graph.replace.graph_replace(loss, moved, strict=False),
        mode=PLAIN,
    )
    slope = finite_difference(lambda t: along(float(t), *feed.values()), 0.0)
    expected = sum((g * s).sum() for g, s in zip(gradients, steps, strict=True))
    assert relative_error(slope, expected) < 1e-6


# --- derivatives ----------------------------------------------------------------------------------


def gradient(body, x, opset=21, **more):
    """Of the sum of Y with respect to X; `more` are further inputs, not differentiated."""
    kinds = {"float64": "double", "int64": "int64"}
    inputs = ", ".join(
        f"{kinds[v.dtype.name]}[{','.join(map(str, v.shape))}] {k}"
        for k, v in {"X": x, **more}.items()
    )
    text = f"g ({inputs}) => (double[] Y) {body}"
    symbols = to_pytensor(parsed(text, f'"" : {opset}'))
    function = pytensor.function(
        list(symbols.inputs.values()),
        pt.grad(symbols.outputs["Y"].sum(), symbols.inputs["X"]),
        mode=PLAIN,
        on_unused_input="ignore",
    )
    return function(x, *more.values())


@pytest.mark.parametrize(
    ("body", "x", "expected"),
    [
        ("{ Y = Relu(X) }", [-1, 0, 2], [0, 0, 1]),
        ("{ Y = Abs(X) }", [-1, 0, 2], [-1, 0, 1]),
        ("{ Y = LeakyRelu<alpha = 0.5>(X) }", [-1, 0, 2], [0.5, 0.5, 1]),
        ("<double l = {-1}, double h = {2}> { Y = Clip(X, l, h) }", [-2, -1, 2, 3], [0, 1, 1, 0]),
        ("<double[2] a = {1, 0}> { Y = Max(X, a) }", [1, 2], [0.5, 1]),
        ("<double[2] a = {1, 0}> { Y = Min(X, a) }", [1, 2], [0.5, 0]),
        ("<double[2] a = {1, 0}> { Y = Max(X, a, a) }", [1, 0], [1 / 3, 1 / 3]),
        ("<double[2] a = {1, 0}> { Y = Max(a, a, X) }", [1, -1], [1 / 3, 0]),
        ("<double[2] a = {1, 0}, double b = {0}> { Y = Min(a, X, b) }", [0, 0], [0.5, 1 / 3]),
        ("{ Y = ReduceMax(X) }", [1, 3, 3], [0, 0.5, 0.5]),
        ("{ Y = ReduceMin(X) }", [1, 1, 3], [0.5, 0.5, 0]),
        ("{ Y = ReduceL2(X) }", [0, 0], [0, 0]),
        ("{ Y = ReduceProd(X) }", [0, 2, 3], [6, 0, 0]),
        ("{ Y = ReduceSumSquare<noop_with_empty_axes = 1>(X) }", [-1, 0, 2], [-2, 0, 4]),
        ("{ Y = ReduceL1<noop_with_empty_axes = 1>(X) }", [-1, 0, 2], [-1, 0, 1]),
        ("{ Y = ReduceL2<noop_with_empty_axes = 1>(X) }", [-1, 0, 2], [-1, 0, 1]),
        ("{ Y = Elu(X) }", [-np.inf, 0, 1000], [0, 1, 1]),
        ("{ Y = Softplus(X) }", [-1000, 0, 1000], [0, 0.5, 1]),
        ("{ Y = ReduceLogSumExp(X) }", [1000, 1000], [0.5, 0.5]),
    ],
)
def test_kinks_and_extremes(body, x, expected):
    np.testing.assert_allclose(gradient(body, np.array(x, float)), expected)


def test_of_equal_entries_in_a_window_the_first_is_the_maximum():
    body = "{ Y = MaxPool<kernel_shape = [2], strides = [2]>(X) }"
    x = np.array([[[3.0, 3.0, 1.0, 2.0]]])
    np.testing.assert_array_equal(gradient(body, x), [[[1, 0, 0, 1]]])


def test_equal_entries_share_the_maximum_of_an_image():
    x = np.array([[[3.0, 1.0, 3.0]]])
    np.testing.assert_array_equal(gradient("{ Y = GlobalMaxPool(X) }", x), [[[0.5, 0, 0.5]]])


def test_a_channel_without_variance():
    """The standard adds 1e-9 to the standard deviation; onnxruntime does not."""
    x = np.array([[[2.0, 2.0], [1.0, 3.0]]])
    normalised = "MeanVarianceNormalization<axes = [0, 2]>(X)"
    assert np.isfinite(gradient(f"{{ Y = {normalised} }}", x)).all()
    text = f"g (double[1, 2, 2] X) => (double[1, 2, 2] Y) {{ Y = {normalised} }}"
    model = parsed(text)
    np.testing.assert_allclose(run(model, {"X": x})["Y"], [[[0, 0], [-1, 1]]], rtol=1e-8)
    w = np.array([[[1.0, 3.0], [1.0, 3.0]]])
    found = gradient(f"{{ n = {normalised} Y = Mul(n, w) }}", x, w=w)
    np.testing.assert_allclose(found, [[[-1e9, 1e9], [0, 0]]], atol=1e-6)


NAN_IS_LARGEST = Version(onnxruntime.__version__) >= Version("1.32")  # before, it has no place


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("kind", ["float", "int64", "uint8"])
def test_the_order_of_the_largest_is_the_runtimes(kind, largest):
    """Of many equals, integers that cannot be negated, and NaN."""
    top = f"V, Y = TopK<axis = 0, largest = {largest}>(X, k)"
    text = f"g ({kind}[200, 2] X) => (int64[50, 2] Y) <int64[1] k = {{50}}> {{ {top} }}"
    X = np.random.default_rng(0).integers(0, 4, (200, 2)).astype(kind.replace("float", "float32"))
    X[7] = np.iinfo(X.dtype).min if kind != "float" else np.nan if NAN_IS_LARGEST else np.inf
    (expected,) = onnxruntime.InferenceSession(parsed(text).SerializeToString()).run(None, {"X": X})
    symbols = to_pytensor(parsed(text))
    for mode in (PLAIN, "NUMBA", "JAX"):  # whose sorts may take any of equals
        f = pytensor.function([symbols.inputs["X"]], symbols.outputs["Y"], mode=mode)
        np.testing.assert_array_equal(f(X), expected)


@pytest.mark.parametrize("arguments", [2, 3, 5])
@pytest.mark.parametrize("operator", ["Max", "Min"])
def test_equal_arguments_keep_their_value(operator, arguments):
    """A weighted mean of them would round, and be NaN of infinities."""
    names = ["X", "a", "b", "c", "d"][:arguments]
    values = np.array([0.1, 1 / 3, np.inf, -np.inf, np.nan, -0.7])
    feed = {name: values if k % 2 == 0 else values.copy() for k, name in enumerate(names)}
    inputs = ", ".join(f"double[6] {name}" for name in names)
    text = f"g ({inputs}) => (double[6] Y) {{ Y = {operator}({', '.join(names)}) }}"
    model = parsed(text)
    np.testing.assert_array_equal(run(model, feed)["Y"], values)


ODDITIES = [
    ('Einsum<equation = "ij->">(X)', "float"),
    ('Einsum<equation = "ij">(X)', "float[2, 2]"),
    ('Einsum<equation = "ij,ij->">(X, X)', "float"),
    ('Einsum<equation = "ji">(X)', "float[2, 2]"),
    *(
        (f"Reduce{name}<noop_with_empty_axes = 1, keepdims = {keep}>({x})", "float[2, 2]")
        for keep in (0, 1)
        for name, x in [("Sum", "X"), ("Mean", "X"), ("Prod", "X"), ("Max", "X"), ("Min", "X")]
        + [("SumSquare", "X"), ("L1", "X"), ("L2", "X"), ("LogSum", "P"), ("LogSumExp", "X")]
    ),
]


@pytest.mark.parametrize(("node", "kind"), ODDITIES)
def test_what_no_node_test_has(node, kind):
    constants = "<float[2, 2] P = {1, 2, 3, 0.5}>"
    model = parsed(f"g (float[2, 2] X) => ({kind} Y) {constants} {{ Y = {node} }}")
    feed = {"X": np.array([[1, 2], [3, -4]], "float32")}
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feed)
    np.testing.assert_allclose(run(model, feed)["Y"], expected, rtol=1e-6, strict=True)


@pytest.mark.parametrize("axis", [0, 1, -2])
@pytest.mark.parametrize("kind", ["float", "int32"])
@pytest.mark.parametrize("operator", REDUCTIONS)
def test_a_reduction_of_an_open_axis_is_the_runtimes(operator, kind, axis):
    """The mean of an empty batch is 0, its maximum the smallest number; rows of it are none."""
    model = parsed(f"g ({kind}[N, 3] X) => ({kind}[1] Y) {{ Y = {operator}<axes = [{axis}]>(X) }}")
    model.opset_import[0].version = 11 if operator == "ReduceSum" else 13
    model.graph.output[0].type.tensor_type.ClearField("shape")
    # Not of nothing: onnxruntime before 1.32 forgets keepdims for an axis counted from the end, and
    # PyTensor before 3.3.8 has no integer for the logarithm of zero.
    for rows in (2,) if axis < 0 or ("Log" in operator and kind == "int32") else (0, 2):
        X = np.arange(3 * rows).reshape(rows, 3) + 1
        feed = {"X": X.astype("float32" if kind == "float" else kind)}
        (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feed)
        np.testing.assert_allclose(run(model, feed)["Y"], expected, rtol=1e-6, strict=True)


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax", "Hardmax"])
def test_no_classes_at_all(operator):
    model = parsed(f"g (float[N, M] X) => (float[N, M] Y) {{ Y = {operator}(X) }}")
    feed = {"X": np.zeros((3, 0), "float32")}
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feed)
    np.testing.assert_array_equal(run(model, feed)["Y"], expected, strict=True)


@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        ("SoftmaxCrossEntropyLoss", (2, 2)),
        ("SoftmaxCrossEntropyLoss", (0, 2)),
        ("NegativeLogLikelihoodLoss", (2, 2)),
        ("NegativeLogLikelihoodLoss", (0, 2)),
        ("NegativeLogLikelihoodLoss", ()),  # of no batch, onnxruntime takes no cross-entropy
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weight", ["", ", w"])
def test_losses_without_a_label_that_counts(loss, labels, reduction, weight):
    """The loss is onnxruntime's, NaN included; an ignored label "does not contribute to the input
    gradient", as torch's documentation has it, even where all are ignored: the gradient is 0."""
    ignored = "ignore_index = 2," if labels else ""
    model = parsed(
        f"""g (double[N, 3] X, int64[N] c, double[3] w) => (double{"[N]" * (reduction == "none")} Y)
        {{ Y = {loss}<{ignored} reduction = "{reduction}">(X, c{weight}) }}"""
    )
    X = np.random.default_rng(6).standard_normal((len(labels), 3))
    feed = {"X": X, "c": np.array(labels, np.int64), "w": np.array([1.0, 2, 3])}
    (y,) = run_onnxruntime(model, feed).values()
    symbols = to_pytensor(model)
    np.testing.assert_array_equal(run(model, feed)["Y"], y)
    gradient = onnx_derivative(model, inputs=["X", "w"])
    found = run_onnxruntime(gradient, feed | {"Y_grad": np.ones_like(y)})
    wrt = [symbols.inputs[name] for name in (("X", "w") if weight else ("X",))]
    other = pytensor.function(
        list(symbols.inputs.values()),
        pt.grad(symbols.outputs["Y"].sum(), wrt),
        mode=PLAIN,
        on_unused_input="ignore",
    )(*feed.values())
    for x, G in zip(wrt, other, strict=True):
        np.testing.assert_allclose(found[f"{x.name}_grad"], G, rtol=1e-12, atol=1e-15)
        assert not G[np.equal(labels, 2)].any() if x.name == "X" else np.isfinite(G).all()


def test_a_slice_backwards_from_before_the_beginning():
    """ONNX clamps its start to the first entry, where Python's slice is empty."""
    constants = "<int64[1] low = {-9}, int64[1] lower = {-20}, int64[1] a = {0}, int64[1] s = {-1}>"
    text = f"g (float[4] X) => (float[N] Y) {constants} {{ Y = Slice(X, low, lower, a, s) }}"
    model, feed = parsed(text), {"X": np.arange(1, 5, dtype="float32")}
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feed)
    assert expected.tolist() == [1]
    np.testing.assert_array_equal(run(model, feed)["Y"], expected)


def test_an_index_that_occurs_twice():
    body = "{ Y = Gather(X, i) }"
    np.testing.assert_array_equal(
        gradient(body, np.ones((3, 2)), i=np.array([0, 2, 2, -1])), [[1, 1], [0, 0], [3, 3]]
    )


@pytest.mark.parametrize(
    ("old", "opset", "new"),
    [
        ("{ Y = ReduceMean<axes = [1]>(X) }", 13, "<int64[1] a = {1}> { Y = ReduceMean(X, a) }"),
        ("{ Y = ReduceSum<axes = [1]>(X) }", 11, "<int64[1] a = {1}> { Y = ReduceSum(X, a) }"),
        ("{ Y = Clip<min = 0.0>(X) }", 7, "<double l = {0}> { Y = Clip(X, l) }"),
        ("{ Y = Softmax(X) }", 11, "{ a = Softmax(X) Y = Mul(a, a) }"),
        ("{ Y = Unsqueeze<axes = [0]>(X) }", 11, "{ Y = Identity(X) }"),
    ],
)
def test_older_operator_sets(old, opset, new):
    """What became an input is read from the attribute; Softmax had another axis by default."""
    x = np.random.default_rng(1).standard_normal((2, 3, 2))
    if "Softmax" in old:
        flat = "<int64[2] s = {2, 6}> { f = Reshape(X, s) a = Softmax(f) Y = Mul(a, a) }"
        old = "{ a = Softmax(X) Y = Mul(a, a) }"
        assert relative_error(gradient(old, x, opset), gradient(new, x)) > 0.1
        new = flat
    np.testing.assert_allclose(gradient(old, x, opset), gradient(new, x), rtol=1e-12, atol=1e-15)


def test_weights_are_shared_variables_and_integers_are_constants():
    symbols = to_pytensor(load("skl_mlp_regressor"))
    assert list(symbols.inputs) == ["X"] and len(symbols.outputs) == 1
    assert [w.get_value().dtype for w in symbols.weights.values()] == ["float32"] * 4
    y, w = next(iter(symbols.outputs.values())), next(iter(symbols.weights.values()))
    x = np.ones((2, 64), "float32")
    before = y.eval({symbols.inputs["X"]: x}, mode=PLAIN)
    w.set_value(w.get_value() * 2)
    assert not np.allclose(y.eval({symbols.inputs["X"]: x}, mode=PLAIN), before)


def test_the_standard_domain_by_its_other_name():
    text = """g (float[2] X) => (float[2] Y) <int64 i = {1}, int64 j = {2}> {
        c = ai.onnx.Less(i, j)
        Y = ai.onnx.If(c) <then_branch = t () => (float[2] A) { A = Neg(X) },
                           else_branch = e () => (float[2] B) { B = Abs(X) }> }"""
    symbols = to_pytensor(parsed(text, '"ai.onnx" : 21'))
    found = symbols.outputs["Y"].eval({symbols.inputs["X"]: [1, -2]}, mode=PLAIN)
    assert found.tolist() == [-1, 2]


@pytest.mark.parametrize("name", ["skl_mlp_regressor", "torch_mlp", "torch_conv"])
def test_a_gradient_graph_is_a_model_too(name):
    """Translated, it computes PyTensor's gradient; differentiated once more, the second one."""
    model = load(name)
    weights = [w.name for w in model.graph.initializer if w.dims and w.data_type == 1]
    direct = to_pytensor(model, "float64")
    graph = onnx_derivative(model, weights, options=DerivativeOptions.FillGrad)
    symbols = to_pytensor(graph, "float64")
    feed = random_feed(model, 3, rng=6)
    feed |= {w: direct.weights[w].get_value() for w in weights}
    wrt = weights[0]

    def both(loss, x, inputs):
        first = pt.grad(loss, x)
        second = pt.grad(pt.sum(first**2), x)
        return pytensor.function(list(inputs), [first, second], mode=PLAIN)

    (y,) = direct.outputs.values()
    expected = both(y.sum(), direct.weights[wrt], direct.inputs.values())(
        *(feed[x] for x in direct.inputs)
    )
    first = symbols.outputs[f"{wrt}_grad"]
    second = pt.grad(pt.sum(first**2), symbols.inputs[wrt])
    found = pytensor.function(
        list(symbols.inputs.values()), [first, second], mode=PLAIN, on_unused_input="ignore"
    )(*(feed[x] for x in symbols.inputs))
    for G, E in zip(found, expected, strict=True):
        assert relative_error(G, E) < 1e-7  # constants of the rules are in the model's float32


# --- errors ---------------------------------------------------------------------------------------


def test_errors_name_operator_domain_and_node():
    def build(text, opsets='"" : 21, "my.own" : 2'):
        return to_pytensor(parsed(f"g {text}", opsets))

    with pytest.raises(
        NotImplementedError, match=r"NonZero \(domain 'ai.onnx', node '-> Y'\): there is no"
    ):
        build("(float[3] X) => (int64[1, M] Y) { Y = NonZero(X) }")
    with pytest.raises(NotImplementedError, match=r"Add \(domain 'my.own', node 'sum'\)"):
        build("(float[3] X) => (float[3] Y) { [sum] Y = my.own.Add(X, X) }")
    with pytest.raises(NotImplementedError, match=r"If .*node 'either'\): operators with subgr"):
        build(
            "(bool c, float[3] X) => (float[3] Y) { [either] Y = If(c) <then_branch = t () =>"
            " (float[3] a) { a = Identity(X) }, else_branch = e () => (float[3] b)"
            " { b = Neg(X) }> }"
        )
    with pytest.raises(NotImplementedError, match=r"ReduceSum .*'axes' must be a constant"):
        build("(float[3] X, int64[1] a) => (float[1] Y) { Y = ReduceSum(X, a) }")
    with pytest.raises(NotImplementedError, match="TopK .* with sorted=0 the order is the runtime"):
        build(
            "(float[3] X) => (float[2] V, int64[2] Y) <int64[1] k = {2}>"
            " { V, Y = TopK<sorted = 0>(X, k) }"
        )
    with pytest.raises(NotImplementedError, match="how many dimensions the result has"):
        build("(float[3] X, int64[K] s) => (float[3] Y) { Y = Reshape(X, s) }")


def test_inputs_that_pytensor_has_no_symbol_for():
    def graph(x):
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
        node = helper.make_node("Identity", ["x"], ["y"])
        return helper.make_model(helper.make_graph([node], "g", [x], [y]))

    with pytest.raises(ValueError, match="input 'x' has no shape"):
        to_pytensor(graph(helper.make_tensor_value_info("x", TensorProto.FLOAT, None)))
    with pytest.raises(ValueError, match="input 'x' has type BFLOAT16"):
        to_pytensor(graph(helper.make_tensor_value_info("x", TensorProto.BFLOAT16, [1])))
    with pytest.raises(ValueError, match="input 'x' is no tensor"):
        to_pytensor(graph(helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None)))


def test_a_result_of_another_rank_than_declared_is_refused():
    model = parsed("g (float[2, 2] X) => (float[2] Y) { Y = Identity(X) }")
    with pytest.raises(NotImplementedError, match="result has 2 axes, by ONNX's rules 1"):
        to_pytensor(model)
