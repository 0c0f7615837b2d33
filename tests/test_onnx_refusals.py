"""Every limit that the table of rules states is refused, by name."""

import numpy as np
import pytest
from onnx_checks import run_onnxruntime
from test_onnx_derivative import model_of

from helpers.onnx_grad import onnx_derivative, register_gradient
from helpers.onnx_grad.rules import ABOUT, RULES
from helpers.onnx_grad.rules.coverage import coverage
from helpers.onnx_grad.tensor import NoGradientError

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
        R = Reshape(X, S) G = Reshape(w, S) """
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
    ("CDist", "metric"): ('Y = com.microsoft.CDist<metric = "cosine">(M, M)', "metric 'cosine'"),
    ("Col2Im", "block_shape"): ("Y = Col2Im(T, end, S)", "its block_shape must be a constant"),
    ("Conv", "auto_pad"): (
        'Y = Conv<strides = [2, 2], auto_pad = "SAME_LOWER">(Z, k)',
        "auto_pad=SAME_LOWER with stride 2 needs a static image size; declare",
    ),
    ("Conv", "group"): ("Y = Conv<group = 3>(Z, w)", "groups need a static number of channels"),
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
    ("DepthToSpace", "mode"): (
        'Y = DepthToSpace<blocksize = 2, mode = "CRD">(Z)',
        "mode CRD needs static channels",
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
    ("LinearRegressor", "post_transform"): (
        f'Y = {ML}.LinearRegressor<{LABELLED}, targets = 1, post_transform = "LOGISTIC">(M)',
        "post_transform 'LOGISTIC'",
    ),
    ("GridSample", "mode"): (
        'Y = GridSample<mode = "cubic">(X, V)',
        "mode='cubic', padding_mode='zeros'",
    ),
    ("GridSample", "padding_mode"): (
        'Y = GridSample<padding_mode = "reflection">(X, V)',
        "padding_mode='reflection'",
    ),
    ("LinearClassifier", "post_transform"): (
        f"l, Y = {ML}.LinearClassifier<{LABELLED}, classlabels_ints = [0], "
        'post_transform = "PROBIT">(M)',
        "post_transform 'PROBIT'",
    ),
    ("LinearClassifier", "coefficients"): (
        f"l, Y = {ML}.LinearClassifier<{LABELLED}, classlabels_ints = [0, 1]>(M)",
        "1 rows for 2 classes",
    ),
    ("Normalizer", "norm"): (f'Y = {ML}.Normalizer<norm = "MAX">(M)', "norm 'MAX' of a tensor"),
    ("MatMul", "rank"): ("Y = MatMul(R, R)", "the rank of an operand is unknown; declare"),
    ("MaxPool", "auto_pad"): (
        'Y = MaxPool<kernel_shape = [2, 2], strides = [2, 2], auto_pad = "SAME_UPPER">(Z)',
        "auto_pad=SAME_UPPER with stride 2 needs a static image size; declare",
    ),
    ("MaxPool", "storage_order"): (
        "Y = MaxPool<kernel_shape = [2, 2], storage_order = 1>(X)",
        "storage_order=1",
    ),
    ("Pad", "X"): (
        'Y = Pad<mode = "reflect">(Z, pads)',
        "axis ., which is padded in mode 'reflect'",
    ),
    ("Pad", "pads"): ("Y = Pad(X, S)", "its pads and axes must be constants"),
    ("Pad", "axes"): ("Y = Pad(X, end, pad, S)", "its pads and axes must be constants"),
    ("Resize", "X"): ("Y = Resize(Z, , ones)", "the length of axis 2, which is resized, is not st"),
    ("Resize", "antialias"): ("Y = Resize<antialias = 1>(X, , ones)", "antialias=1"),
    ("Resize", "coordinate_transformation_mode"): (
        'Y = Resize<coordinate_transformation_mode = "tf_crop_and_resize">(X, F, ones)',
        "'tf_crop_and_resize'",
    ),
    ("Resize", "keep_aspect_ratio_policy"): (
        'Y = Resize<keep_aspect_ratio_policy = "not_larger">(X, , , sizes)',
        "keep_aspect_ratio_policy; give the sizes that come out",
    ),
    ("Resize", "scales"): ("Y = Resize(X, , F)", "its scales or sizes must be constants"),
    ("ScatterElements", "reduction"): (
        'Y = ScatterElements<reduction = "mul">(X, sizes, ones)',
        "reduction='mul'",
    ),
    ("ScatterND", "reduction"): ('Y = ScatterND<reduction = "max">(X, J, M)', "reduction='max'"),
    ("LSTM", "input_forget"): (
        "Y = LSTM<hidden_size = 2, input_forget = 1>(T, W4, W4)",
        "input_forget=1",
    ),
}
for name in ("LSTM", "GRU", "RNN"):
    REFUSALS[name, "X"] = (f"Y = {name}<hidden_size = 2>(U, W4, W4)", "number of steps.*is open")
    REFUSALS[name, "clip"] = (f"Y = {name}<hidden_size = 2, clip = 3.0>(T, W4, W4)", "clip=3.0")
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


def test_every_limit_is_tested():
    stated = {(row.operator, what) for row in coverage() for what in row.limits}
    assert set(REFUSALS) == stated


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


QUANTISED = """m (float[2, 3] X) => (float[2, 3] Y) <float s = {0.5}, uint8 z = {3}> {
    Q = QuantizeLinear(X, s, z) Y = DequantizeLinear(Q, s, z) }"""


def test_a_quantised_model_has_no_gradient_of_zeros():
    with pytest.raises(NoGradientError, match="DequantizeLinear .* before it is quantised; or"):
        onnx_derivative(model_of(QUANTISED))


def test_a_quantised_model_may_be_taken_straight_through(monkeypatch):
    for op in ("QuantizeLinear", "DequantizeLinear"):  # as the message says
        monkeypatch.setitem(RULES, ("", op), None)
        monkeypatch.setitem(ABOUT, ("", op), None)
        register_gradient(op, lambda g, node, dy, *_: dy)
    gradient = onnx_derivative(model_of(QUANTISED))
    X, Y_bar = np.float32([[1, -2, 3], [4, 0, 0.3]]), np.float32([[1, 2, 3], [4, 5, 6]])
    known = {"X": X, "Y_grad": Y_bar}
    found = run_onnxruntime(gradient, {x.name: known[x.name] for x in gradient.graph.input})
    np.testing.assert_array_equal(found["X_grad"], Y_bar)


def test_an_index_of_unknown_rank_is_named():
    model = model_of(f"{MODEL} I = Reshape(J, S) Y = Gather(X, I) }}")
    with pytest.raises(NoGradientError, match="rank of its input 'I' is unknown"):
        onnx_derivative(model)
