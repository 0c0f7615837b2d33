"""The attributes that rules and translations know, and which of their values.

An attribute that is not here has to be left out, or at its default; a value that is not here is
refused, whatever a rule would make of it.  Both doors, that of the gradient and that of the
translation to PyTensor, ask :func:`unsupported`.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import NodeProto, defs, helper

from helpers.onnx_grad.tensor import canonical

ML = "ai.onnx.ml"
ANY = ()
"""All values that the standard allows."""
FLAG = (0, 1)

# What several operators have.
AXIS = {"axis": ANY}
ALPHA = {"alpha": ANY}
WINDOWS = {
    "auto_pad": ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"),
    **dict.fromkeys(("dilations", "kernel_shape", "pads", "strides"), ANY),
}
REDUCTION = {"axes": ANY, "keepdims": FLAG, "noop_with_empty_axes": FLAG}
ARG = {**AXIS, "keepdims": FLAG, "select_last_index": FLAG}
EPSILON = {"epsilon": ANY}
LOSS = {"ignore_index": ANY, "reduction": ("none", "sum", "mean")}
LAYER = {
    "activations": ANY,
    "direction": ("forward", "reverse", "bidirectional"),
    "hidden_size": ANY,
    "layout": FLAG,
}
BLOCKS = {"blocksize": ANY, "mode": ("DCR", "CRD")}
RANDOM = dict.fromkeys(("dtype", "seed"), ANY)

STANDARD: dict[str, dict[str, tuple]] = {
    **dict.fromkeys(("ArgMax", "ArgMin"), ARG),
    "AveragePool": {**WINDOWS, "ceil_mode": FLAG, "count_include_pad": FLAG},
    "BatchNormalization": {**EPSILON, "momentum": ANY, "training_mode": FLAG},
    "Cast": {"to": ANY},
    **dict.fromkeys(("Celu", "Elu", "LeakyRelu", "Swish", "ThresholdedRelu"), ALPHA),
    "Clip": dict.fromkeys(("max", "min"), ANY),
    "Col2Im": dict.fromkeys(("dilations", "pads", "strides"), ANY),
    "Constant": dict.fromkeys(
        ("value", "value_float", "value_floats", "value_int", "value_ints"), ANY
    ),
    "ConstantOfShape": {"value": ANY},
    "Conv": {**WINDOWS, "group": ANY},
    "ConvTranspose": {**WINDOWS, **dict.fromkeys(("group", "output_padding", "output_shape"), ANY)},
    "CumSum": {"exclusive": FLAG, "reverse": FLAG},
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), BLOCKS),
    "DequantizeLinear": dict.fromkeys(("axis", "block_size", "output_dtype"), ANY),
    "Dropout": {"ratio": ANY, "seed": ANY},
    "Einsum": {"equation": ANY},
    "EyeLike": {"dtype": ANY, "k": ANY},
    "GRU": {**LAYER, "linear_before_reset": FLAG},
    "GatherND": {"batch_dims": ANY},
    "Gelu": {"approximate": ("none", "tanh")},
    "Gemm": {"alpha": ANY, "beta": ANY, "transA": FLAG, "transB": FLAG},
    "GridSample": {
        "align_corners": FLAG,
        "mode": ("linear", "bilinear", "nearest"),
        "padding_mode": ("zeros", "border"),
    },
    "GroupNormalization": {**EPSILON, "num_groups": ANY},
    "HardSigmoid": {**ALPHA, "beta": ANY},
    "InstanceNormalization": EPSILON,
    "IsInf": {"detect_negative": FLAG, "detect_positive": FLAG},
    "LRN": dict.fromkeys(("alpha", "beta", "bias", "size"), ANY),
    **dict.fromkeys(("LSTM", "RNN"), LAYER),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), {**AXIS, **EPSILON}),
    "LpNormalization": {**AXIS, "p": (1, 2)},
    "LpPool": {**WINDOWS, "ceil_mode": FLAG, "p": ANY},
    "MaxPool": {**WINDOWS, "ceil_mode": FLAG},
    "MeanVarianceNormalization": {"axes": ANY},
    "Mod": {"fmod": FLAG},
    **dict.fromkeys(("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"), LOSS),
    "Pad": {"mode": ("constant", "reflect", "edge", "wrap"), "pads": ANY, "value": ANY},
    "RandomNormalLike": {**RANDOM, "mean": ANY, "scale": ANY},
    "RandomUniformLike": {**RANDOM, "high": ANY, "low": ANY},
    **{
        f"Reduce{name}": REDUCTION
        for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum")
    },
    "ReduceSumSquare": REDUCTION,
    "Reshape": {"allowzero": FLAG},
    "Resize": {
        "axes": ANY,
        "coordinate_transformation_mode": (
            "half_pixel",
            "half_pixel_symmetric",
            "pytorch_half_pixel",
            "align_corners",
            "asymmetric",
            "tf_half_pixel_for_nn",
        ),
        "cubic_coeff_a": ANY,
        "exclude_outside": FLAG,
        "extrapolation_value": ANY,  # of tf_crop_and_resize alone
        "keep_aspect_ratio_policy": ("stretch", "not_larger", "not_smaller"),
        "mode": ("nearest", "linear", "cubic"),
        "nearest_mode": ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
    },
    "ReverseSequence": {"batch_axis": FLAG, "time_axis": FLAG},
    "ScatterElements": {**AXIS, "reduction": ("none", "add", "max", "min")},
    "ScatterND": {"reduction": ("none", "add")},
    "Selu": {**ALPHA, "gamma": ANY},
    "Shape": {"end": ANY, "start": ANY},
    "Shrink": {"bias": ANY, "lambd": ANY},
    "Slice": dict.fromkeys(("axes", "ends", "starts"), ANY),
    "Split": {**AXIS, "num_outputs": ANY, "split": ANY},
    **dict.fromkeys(("Squeeze", "Unsqueeze"), {"axes": ANY}),
    "TopK": {**AXIS, "k": ANY, "largest": FLAG, "sorted": FLAG},
    "Transpose": {"perm": ANY},
    "Trilu": {"upper": FLAG},
    **dict.fromkeys(
        ("Compress", "Concat", "Flatten", "Gather", "GatherElements", "Hardmax", "LogSoftmax"), AXIS
    ),
    **dict.fromkeys(("OneHot", "Scatter", "Softmax"), AXIS),
}
OF_CONVERTERS: dict[tuple[str, str], dict[str, tuple]] = {
    (ML, "Binarizer"): {"threshold": ANY},
    (ML, "Imputer"): dict.fromkeys(("imputed_value_floats", "replaced_value_float"), ANY),
    (ML, "LinearClassifier"): {
        **dict.fromkeys(("classlabels_ints", "classlabels_strings"), ANY),
        **dict.fromkeys(("coefficients", "intercepts"), ANY),
        "multi_class": FLAG,
        "post_transform": ("NONE", "LOGISTIC", "SOFTMAX"),
    },
    (ML, "LinearRegressor"): {
        **dict.fromkeys(("coefficients", "intercepts", "targets"), ANY),
        "post_transform": ("NONE",),
    },
    (ML, "Normalizer"): {"norm": ("L1", "L2")},
    (ML, "Scaler"): {"offset": ANY, "scale": ANY},
    ("com.microsoft", "CDist"): {"metric": ("euclidean", "sqeuclidean")},
}


def known_attributes(domain: str, operator: str) -> dict[str, tuple]:
    """The attributes of an operator that are heeded, and their values: all, if there are none."""
    found = OF_CONVERTERS if domain else {("", name): known for name, known in STANDARD.items()}
    return found.get((domain, operator), {})


def unsupported(node: NodeProto, version: int, known: Mapping[str, tuple]) -> str | None:
    """The first attribute that a node has and nothing knows, or whose value nothing knows.

    Parameters
    ----------
    node : NodeProto
    version : int
        Of the operator set of its domain, which has the defaults.
    known : dict of tuples
        The attributes that are heeded, and their values: all, if there are none.

    Returns
    -------
    str or None
        What is met and what is supported.
    """
    domain, defaults = canonical(node.domain), {}
    if defs.has(node.op_type, version, domain):
        attributes = defs.get_schema(node.op_type, version, domain).attributes
        defaults = {name: default_of(a) for name, a in attributes.items()}
    given = {a.name: _text(helper.get_attribute_value(a)) for a in node.attribute}
    for name, value in given.items():
        if name not in known and value != [] and value != defaults.get(name):
            default = defaults.get(name)
            only = "" if default is None else f" or {default!r}"
            return f"{name}={value!r} is not supported; it has to be left out{only}"
    for name, values in known.items():
        value = given.get(name, defaults.get(name))
        if values and value is not None and value not in values:
            choice = ", ".join(map(repr, values))
            return f"{name}={value!r} is not supported; supported are {choice}"
    return None


def default_of(attribute, otherwise=None):
    """The default of an attribute of a schema."""
    default = attribute.default_value
    return _text(helper.get_attribute_value(default)) if default.name else otherwise


def _text(value):
    return value.decode() if isinstance(value, bytes) else value
