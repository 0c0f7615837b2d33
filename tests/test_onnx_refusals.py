"""Every limit that the table of rules states is refused, by name."""

import re

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_checks import run_onnxruntime
from test_onnx_derivative import model_of

from helpers.onnx_grad import attributes, onnx_derivative, register_gradient
from helpers.onnx_grad.attributes import known_attributes
from helpers.onnx_grad.builder import Graph
from helpers.onnx_grad.prepare import NEWEST, OLDEST
from helpers.onnx_grad.rules import ABOUT, RULES
from helpers.onnx_grad.rules.coverage import coverage
from helpers.onnx_grad.rules.quantize import straight_through
from helpers.onnx_grad.rules.table import gradients
from helpers.onnx_grad.tensor import Node, NoGradientError
from helpers.onnx_grad.translation.node import TRANSLATIONS, translated
from helpers.onnx_grad.translation.node import Node as TranslatedNode

ML = "ai.onnx.ml"
# X is an image of known size, Z one of unknown size, R of unknown rank, T a sequence of known
# length, U one of unknown length, M a matrix; S and F are known at run time only.
MODEL = """m (float[2, 3, 4, 4] X, float[2, C, H, V] Z, float[3, 2, 2] T, float[L, 2, 2] U,
    float[2, 3] M, int64[K] S, float[4] F, int64[2, D] J, bool[2] B,
    float[2, 5, 5, 2] V) => (float[a, b, c, d] Y)
    <float[6, 1, 2, 2] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8,9,1,2,3,4,5,6},
     float[2, 3, 2, 2] k = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8,9,1,2,3,4,5,6},
     float[3] s = {1, 2, 3}, float[4] ones = {1, 1, 2, 2}, float pad = {0}, int64[2] i = {0, 1},
     int64[8] pads = {0,0,0,0,0,0,1,1}, int64[2] end = {0, 1}, int64[4] sizes = {2,3,8,8},
     float[1, 8, 2] W4 = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}> {
        R = Reshape(X, S) G = Reshape(w, S) Q8 = Cast<to = 3>(X) """
LABELLED = "coefficients = [1.0, 2.0, 3.0], intercepts = [0.5]"

# (operator, what): the nodes, and how the message goes on; a third entry is the opset.
REFUSALS = {
    ("AveragePool", "auto_pad"): (
        'Y = AveragePool<kernel_shape = [2, 2], strides = [2, 2], auto_pad = "SAME_UPPER">(Z)',
        "auto_pad=SAME_UPPER with stride 2 needs a static image size; declare",
    ),
    ("BatchNormalization", "training_mode"): (
        "Y, m1, v1, m2, v2 = BatchNormalization(X, s, s, s, s)",
        "in training before opset 14",
        13,
    ),
    ("Col2Im", "block_shape"): ("Y = Col2Im(T, end, S)", "its block_shape must be a constant"),
    ("Conv", "auto_pad"): (
        'Y = Conv<strides = [2, 2], auto_pad = "SAME_LOWER">(Z, k)',
        "auto_pad=SAME_LOWER with stride 2 needs a static image size; declare",
    ),
    ("Conv", "group"): (
        "Y = Conv<group = 3>(Z, w)",
        "groups need a static number of channels: declare it",
    ),
    ("Conv", "kernel_shape"): ("Y = Conv(X, G)", "shape of its kernel is unknown"),
    ("ConvTranspose", "auto_pad"): (
        'Y = ConvTranspose<strides = [2, 2], auto_pad = "SAME_UPPER">(Z, k)',
        "auto_pad and output_shape need a static image size",
    ),
    ("ConvTranspose", "output_shape"): (
        "Y = ConvTranspose<output_shape = [9, 9]>(Z, k)",
        "auto_pad and output_shape need a static image size",
    ),
    ("ConvTranspose", "kernel_shape"): ("Y = ConvTranspose(X, G)", "shape of its kernel"),
    ("DequantizeLinear", "block_size"): (
        "q = Cast<to = 3>(Z) Y = DequantizeLinear<axis = 2, block_size = 2>(q, X)",
        "block_size, where its axis has an open length",
    ),
    ("GatherElements", "opset"): (
        "Y = GatherElements(X, S)",
        "needs opset 16, the model has 13",
        13,
    ),
    ("GatherND", "opset"): ("Y = GatherND(X, S)", "needs opset 16, the model has 15", 15),
    ("GatherND", "indices"): (
        "A = GatherND(X, J) Y = Neg(A)",
        "last dimension of its indices is unknown",
    ),
    ("LayerNormalization", "axis"): (
        "Y = LayerNormalization<axis = 1>(R, s)",
        "axis=1 where its input has unknown rank; count it from the end",
    ),
    ("RMSNormalization", "axis"): (
        "Y = RMSNormalization<axis = 1>(R, s)",
        "axis=1 where its input has unknown rank",
        23,
    ),
    ("LinearClassifier", "coefficients"): (
        f"l, Y = {ML}.LinearClassifier<{LABELLED}, classlabels_ints = [0, 1]>(M)",
        "1 rows for 2 classes",
    ),
    ("MatMul", "rank"): ("Y = MatMul(R, R)", "the rank of an operand is unknown; declare"),
    ("MaxPool", "auto_pad"): (
        'Y = MaxPool<kernel_shape = [2, 2], strides = [2, 2], auto_pad = "SAME_UPPER">(Z)',
        "auto_pad=SAME_UPPER with stride 2 needs a static image size; declare",
    ),
    ("Pad", "axes"): (
        'Y = Pad<mode = "edge">(X, end, pad, S)',
        "its axes must be a constant in mode 'edge'",
    ),
    ("MaxPool", "dilations"): (
        'Y = MaxPool<kernel_shape = [2, 2], dilations = [2, 1], auto_pad = "SAME_UPPER">(Z)',
        "auto_pad=SAME_UPPER with dilations is padded .* write the attribute pads",
    ),
    ("AveragePool", "dilations"): (
        'Y = AveragePool<kernel_shape = [2, 2], dilations = [2, 1], auto_pad = "SAME_UPPER">(Z)',
        "auto_pad=SAME_UPPER with dilations is padded .* write the attribute pads",
    ),
    ("Resize", "X"): ("Y = Resize(Z, , ones)", "the length of axis 2, which is resized, is not st"),
    ("Resize", "scales"): ("Y = Resize(X, , F)", "its scales or sizes must be constants"),
    ("Split", "outputs"): (
        "Y, , Y2 = Split<axis = 3, num_outputs = 3>(X)",
        "an output has no name; give it one",
    ),
    ("ScatterND", "reduction"): (
        'Y = ScatterND<reduction = "max">(X, J, M)',
        "reduction='max' is not supported; .*ScatterElements, with an index",
    ),
}
for name in ("LSTM", "GRU", "RNN"):
    REFUSALS[name, "X"] = (f"Y = {name}<hidden_size = 2>(U, W4, W4)", "number of steps.*is open")
    REFUSALS[name, "hidden_size"] = (f"Y = {name}(T, G, G)", "hidden_size is not given")
    REFUSALS[name, "activations"] = (
        f'Y = {name}<hidden_size = 2, activations = ["Affine"]>(T, W4, W4)',
        "the activation Affine; there are Relu, Sigmoid",
    )
OF_RANK = {
    "ArrayFeatureExtractor": "(R, end)",
    "AveragePool": "<kernel_shape = [2]>(R)",
    "BatchNormalization": "(R, s, s, s, s)",
    "CDist": '<metric = "euclidean">(R, R)',
    "Compress": "(R, B)",
    "Conv": "(R, k)",
    "ConvTranspose": "(R, k)",
    "DequantizeLinear": "(Q8, R)",
    "Einsum": '<equation = "ij->ji">(R)',
    "GRU": "<hidden_size = 2>(R, W4, W4)",
    "Gather": "(R, i)",
    "GridSample": "(R, V)",
    "GatherND": "(R, J)",
    "GlobalAveragePool": "(R)",
    "GlobalMaxPool": "(R)",
    "InstanceNormalization": "(R, s, s)",
    "LSTM": "<hidden_size = 2>(R, W4, W4)",
    "MaxPool": "<kernel_shape = [2]>(R)",
    "NegativeLogLikelihoodLoss": "(R, S)",
    "Pad": "(R, pads)",
    "RNN": "<hidden_size = 2>(R, W4, W4)",
    "Resize": "(R, , ones)",
    "SoftmaxCrossEntropyLoss": "(R, S)",
    "Tile": "(R, S)",
}
for name, arguments in OF_RANK.items():
    domain = {"ArrayFeatureExtractor": f"{ML}.", "CDist": "com.microsoft."}.get(name, "")
    message = "rank of its input 'R' is unknown; declare"
    REFUSALS[name, "rank"] = (f"Y = {domain}{name}{arguments}", message)


def _unknown_values():
    """Of every operator at every opset that is accepted, each attribute with a value that is not
    known: (domain, operator, version, attribute, value)."""
    bogus = {"STRING": "no_such_value", "INT": 7, "FLOAT": 7.5, "INTS": [7], "FLOATS": [7.5]}
    bogus |= {"STRINGS": ["no_such_value"]}
    for schema in onnx.defs.get_all_schemas_with_history():
        key = schema.domain, schema.name
        standard = schema.domain == ""
        if key not in RULES or (standard and schema.since_version > NEWEST):
            continue
        if standard and schema.since_version < OLDEST:
            if onnx.defs.get_schema(schema.name, OLDEST).since_version != schema.since_version:
                continue
        for name, attribute in schema.attributes.items():
            known = known_attributes(*key).get(name)
            if known is None or known:
                yield *key, schema.since_version, name, bogus[attribute.type.name]


UNKNOWN = list(_unknown_values())


@pytest.mark.parametrize("key", UNKNOWN, ids=lambda key: "-".join(map(str, key)))
def test_what_no_rule_knows_of_an_attribute_is_refused(key):
    domain, operator, version, attribute, value = key
    proto = helper.make_node(operator, ["X"], ["Y"], domain=domain, **{attribute: value})
    g = Graph({"": OLDEST, domain: version}, {}, {}, [])
    node = Node(proto, g, 0, lambda name: True)
    message = re.escape(f"{attribute}={value!r} is not supported; ")
    with pytest.raises(NoGradientError, match=f"operator {operator} of .*{message}"):
        gradients(node, [None])
    if (domain, operator) in TRANSLATIONS:
        read = TranslatedNode(proto, g, None)
        with pytest.raises(NotImplementedError, match=f"{operator} .*{message}"):
            translated(read, [])


@pytest.fixture
def read_up_to_20(monkeypatch):
    """As if only the opsets up to 20 had been gone through."""
    monkeypatch.setitem(attributes.READ_UP_TO, "", 20)
    attributes._of_standard.cache_clear()
    yield known_attributes("", "DequantizeLinear")
    attributes._of_standard.cache_clear()


def test_an_attribute_that_is_newer_than_what_is_known_is_named_as_such(read_up_to_20, monkeypatch):
    """The installed onnx may know opsets that these rules were never held against."""
    about = ABOUT["", "DequantizeLinear"]._replace(attributes=read_up_to_20)
    monkeypatch.setitem(ABOUT, ("", "DequantizeLinear"), about)
    text = f"{MODEL} Y = DequantizeLinear<axis = 2%s>(Q8, X) }}"
    message = r"block_size=2 is not supported \(opset 21 changed it; those up to 20 are known\); "
    with pytest.raises(NoGradientError, match=f"{message}it has to be left out or 0"):
        onnx_derivative(model_of(text % ", block_size = 2"))
    assert "block_size" not in read_up_to_20
    onnx_derivative(model_of((text % "").replace("<axis = 2>(Q8, X)", "(Q8, pad)")))


@pytest.mark.parametrize("operator", ["Add", "Mul"])
def test_broadcasting_along_an_axis_was_before_opset_7(operator):
    """It is no attribute of the forms that are translated, and would be left out of account."""
    proto = helper.make_node(operator, ["A", "B"], ["C"], broadcast=1, axis=0)
    with pytest.raises(NotImplementedError, match="axis=0 is not supported"):
        translated(TranslatedNode(proto, Graph({"": 6}, {}, {}, []), None), [])


def test_a_rule_of_the_user_decides_for_itself(monkeypatch):
    for rules in (RULES, ABOUT):
        monkeypatch.setitem(rules, ("", "Resize"), rules["", "Resize"])
    register_gradient("Resize", lambda g, node, dy: g.zeros_like(node.x[0]))
    nodes = 'Y = Resize<antialias = 1, mode = "linear">(X, , ones)'
    assert onnx_derivative(model_of(f"{MODEL}{nodes} }}"), weights=[], inputs=["X"])
    register_gradient("Resize", lambda g, node, dy: dy, attributes={"mode": ("linear",)})
    with pytest.raises(NoGradientError, match="antialias=1 is not supported; it has to be left ou"):
        onnx_derivative(model_of(f"{MODEL}{nodes} }}"))


def test_every_limit_is_tested():
    stated = {(row.operator, what) for row in coverage() for what in row.limits}
    attributes = {(operator, what) for _, operator, _, what, _ in UNKNOWN}
    assert set(REFUSALS) <= stated
    assert stated - set(REFUSALS) <= attributes


@pytest.mark.parametrize("key", sorted(REFUSALS), ids="-".join)
def test_refusal(key):
    nodes, message, opset = (*REFUSALS[key], 21)[:3]
    model = model_of(f"{MODEL}{nodes} }}", opset, domains=[ML, "com.microsoft"])
    with pytest.raises(NoGradientError, match=f"no gradient for operator {key[0]} of.*{message}"):
        onnx_derivative(model)


def test_sequences_are_refused_with_what_to_do():
    """What PyTorch makes of an EmbeddingBag; its types are no tensors', also for inference."""
    model = model_of(
        """m (float[3, 2] X) => (float[3, 2] Y, float[N] Z) {
        E = SequenceEmpty() S = SequenceInsert(E, X) Y = ConcatFromSequence<axis = 0>(S)
        C = ConcatFromSequence<axis = 0>(E) Z = Neg(C) }"""
    )
    with pytest.raises(NoGradientError, match="ConcatFromSequence .* with Concat, Split and Gath"):
        onnx_derivative(model)


def quantised(nodes, z="uint8 z = {3}"):
    """A model of quantised operators; s is a scale, w is a weight of eight bits."""
    return model_of(
        f"""m (float[2, 3] X) => (float[2, 3] Y) <float[1] s = {{0.5}}, {z}, uint8[3, 3] w =
        {{1, 2, 3, 4, 5, 6, 7, 8, 9}}, float[1] s2 = {{0.25}}> {{ {nodes} }}""",
        ir=11,
    )


QUANTISED = "Q = QuantizeLinear(X, s, z) Y = DequantizeLinear(Q, s, z)"
OF_INTEGERS = {  # integers that stand for real numbers, by all that hands them on
    "QuantizeLinear": QUANTISED,
    "DynamicQuantizeLinear": "Q, a, b = DynamicQuantizeLinear(X) Y = DequantizeLinear(Q, a, b)",
    "QLinearMatMul": """Q = QuantizeLinear(X, s, z)
        P = QLinearMatMul(Q, s, z, w, s2, z, s, z) Y = DequantizeLinear(P, s, z)""",
    "MatMulInteger": "Q = QuantizeLinear(X, s, z) P = MatMulInteger(Q, w) Y = Cast<to = 1>(P)",
}


@pytest.mark.parametrize("op_type", OF_INTEGERS)
def test_a_quantised_model_has_no_gradient_of_zeros(op_type):
    model = quantised(OF_INTEGERS[op_type])
    with pytest.raises(NoGradientError, match=f"{op_type} .* it rounds.*weights=.. for none"):
        onnx_derivative(model, weights=[])


def test_integers_that_stand_for_real_numbers_are_handed_on():
    """Between two quantised operators; a gradient of zeros would say that nothing depends on X."""
    nodes = """Q = QuantizeLinear(X, s, z) a = Transpose(Q) b = Transpose(a)
        Y = DequantizeLinear(b, s, z)"""
    with pytest.raises(NoGradientError, match="QuantizeLinear .* it rounds"):
        onnx_derivative(quantised(nodes), weights=[])


def test_what_is_not_rounded_has_its_gradient():
    """Weights of eight bits, dequantised: by the input, and by the scales of each column."""
    model = model_of(
        """m (float[2, 3] X) => (float[2, 4] Y) <float[4] s = {0.5, 1, 2, 0.25}, int8[3, 4] w =
        {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}, int8[4] z = {1, 0, -1, 2}>
        { W = DequantizeLinear(w, s, z) Y = MatMul(X, W) }"""
    )
    s, z = np.float32([0.5, 1, 2, 0.25]), np.array([1, 0, -1, 2])
    steps = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 1, 2, 3]]) - z
    X, bar = np.float32([[1, -2, 3], [0, 4, 1]]), np.float32([[1, 0, 2, 1], [3, 1, -1, 2]])
    found = run_onnxruntime(onnx_derivative(model), {"X": X, "s": s, "Y_grad": bar})
    np.testing.assert_allclose(found["X_grad"], bar @ (steps * s).T, rtol=1e-6)
    np.testing.assert_allclose(found["s_grad"], (steps * (X.T @ bar)).sum(0), rtol=1e-6)
    alone = onnx_derivative(model, weights=[])
    np.testing.assert_array_equal(
        run_onnxruntime(alone, {"X": X, "Y_grad": bar})["X_grad"], found["X_grad"]
    )


FAKE = {  # scales, zero points and attributes of X, (2, 3)
    "one": ([0.5], [3], ""),
    "each row": ([0.5, 0.3], [3, 0], "<axis = 0>"),
    "each column": ([0.5, 0.3, 1.0], [0, -3, 1], "<axis = -1>"),
}


@pytest.mark.parametrize("kind, low, high", [("int8", -128, 127), ("uint8", 0, 255)])
@pytest.mark.parametrize("name", FAKE)
def test_a_quantised_model_may_be_taken_straight_through(monkeypatch, name, kind, low, high):
    """As the message says; against the formulas of learned step sizes."""
    monkeypatch.setitem(RULES, ("", "QuantizeLinear"), None)
    monkeypatch.setitem(ABOUT, ("", "QuantizeLinear"), None)
    register_gradient("QuantizeLinear", straight_through)
    s, z, how = FAKE[name]
    z = np.abs(z) if kind == "uint8" else np.array(z)
    held = [", ".join(map(str, numbers)) for numbers in (s, z)]
    text = f"""m (float[2, 3] X) => (float[2, 3] Y)
        <float[{len(s)}] s = {{{held[0]}}}, {kind}[{len(z)}] z = {{{held[1]}}}> {{
        Q = QuantizeLinear{how}(X, s, z) Y = DequantizeLinear{how}(Q, s, z) }}"""
    X, bar = np.float32([[1.1, -2, 300], [-400, 0.1, 0.3]]), np.float32([[1, 2, 3], [4, 5, 6]])
    s = np.float32(s)
    known = {"X": X, "s": s, "Y_grad": bar}
    found = run_onnxruntime(onnx_derivative(model_of(text)), known)
    shape = (2, 1) if "0" in how else (1, -1)
    S, Z = s.reshape(shape), z.reshape(shape)
    steps = np.round(X / S) + Z
    kept = (low <= steps) & (steps <= high)
    np.testing.assert_array_equal(found["X_grad"], np.where(kept, bar, 0))
    ds = bar * np.where(kept, steps - Z - X / S, np.clip(steps, low, high) - Z)
    ds = ds.sum(axis=0 if "-1" in how else 1 if how else None)
    np.testing.assert_allclose(found["s_grad"], np.reshape(ds, s.shape), rtol=1e-5, atol=1e-4)


SCALE, ROWS = [0.3, -0.4, 2.5], "0.3, -0.4, 2.5, 0.1, 0.2, 0.3"
LINEAR = {  # what scikit-learn's converters make of integers, and its Jacobian at C = round(X / s)
    "Scaler": (f"Y = {ML}.Scaler<offset = [0.0, 1.0, 0.0], scale = {SCALE}>(C)", np.diag(SCALE)),
    "LinearRegressor": (
        f"Y = {ML}.LinearRegressor<coefficients = [{ROWS}], targets = 2>(C)",
        np.reshape([float(w) for w in ROWS.split(", ")], (2, 3)),
    ),
    "LinearClassifier": (
        f"""l, Y = {ML}.LinearClassifier<coefficients = [{ROWS}], intercepts = [0.1, 0.2],
        classlabels_ints = [0, 1]>(C)""",
        np.reshape([float(w) for w in ROWS.split(", ")], (2, 3)),
    ),
    "Normalizer": (
        f'Y = {ML}.Normalizer<norm = "L2">(C)',
        (np.eye(3) - np.outer([1, -2, 2], [1, -2, 2]) / 9) / 3,
    ),
}


@pytest.mark.parametrize("name", LINEAR)
def test_integers_of_a_linear_model_stand_for_real_numbers(monkeypatch, name):
    """Their gradient is real: in the type of the integers, all of it would be cut off."""
    nodes, J = LINEAR[name]
    model = model_of(
        f"""m (float[1, 3] X) => (float[1, {len(J)}] Y) <float[1] s = {{0.5}}, int8[1] z = {{0}}>
        {{ Q = QuantizeLinear(X, s, z) C = Cast<to = 6>(Q) {nodes} }}""",
        domains=[ML],
    )
    with pytest.raises(NoGradientError, match="QuantizeLinear .* it rounds"):
        onnx_derivative(model, weights=[])
    monkeypatch.setitem(RULES, ("", "QuantizeLinear"), None)
    monkeypatch.setitem(ABOUT, ("", "QuantizeLinear"), None)
    register_gradient("QuantizeLinear", straight_through)
    bar = np.float32([[1.0, -2.0, 0.5]])[:, : len(J)]
    feeds = {"X": np.float32([[0.6, -1.1, 0.9]]), "Y_grad": bar}
    found = run_onnxruntime(onnx_derivative(model, weights=[]), feeds)
    np.testing.assert_allclose(found["X_grad"], bar @ J / 0.5, rtol=1e-6)


def test_an_index_of_unknown_rank_is_named():
    model = model_of(f"{MODEL} I = Reshape(J, S) Y = Gather(X, I) }}")
    with pytest.raises(NoGradientError, match="rank of its input 'I' is unknown"):
        onnx_derivative(model)
