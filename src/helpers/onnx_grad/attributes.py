"""The attributes that rules and translations heed, and which of their values.

They heed all attributes that the standard has up to an opset but the unheeded ones.  What they do
not heed has to be left out, or at its default; a value that is not here is refused, whatever a rule
would make of it.  Both doors, that of the gradient and that of the translation to PyTensor, ask
:func:`unsupported`.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import cache

from onnx import NodeProto, defs

from helpers.onnx_grad.tensor import canonical, default_of, schema_of, value_of_attribute

ML = "ai.onnx.ml"
OLDEST, NEWEST = 13, 26
"""The opsets that have a gradient."""
READ_UP_TO = {"": 28, ML: 5}
"""The opsets whose attributes have been gone through; one that is newer is refused."""
ANY = ()
"""All values that the standard allows."""
FLAG = (0, 1)

UNHEEDED = {
    *("activation_alpha", "activation_beta", "antialias", "broadcast", "clip", "consumed_inputs"),
    *("imputed_value_int64s", "input_forget", "is_test", "output_sequence", "paddings"),
    *("replaced_value_int64", "round_mode", "saturate", "shape", "sparse_value", "spatial"),
    *("stash_type", "storage_order", "value_string", "value_strings"),
}
FLAGS = """align_corners allowzero batch_axis ceil_mode count_include_pad detect_negative
    detect_positive exclude_outside exclusive fmod keepdims largest layout linear_before_reset
    multi_class noop_with_empty_axes reverse select_last_index sorted time_axis training_mode transA
    transB upper"""
# The values of the attributes that have not ANY: of those with a name, or of an operator's own.
CHOICES: dict[str, tuple] = {
    **dict.fromkeys(FLAGS.split(), FLAG),
    "approximate": ("none", "tanh"),
    "auto_pad": ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"),
    "coordinate_transformation_mode": (
        *("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners"),
        *("asymmetric", "tf_half_pixel_for_nn"),
    ),
    "direction": ("forward", "reverse", "bidirectional"),
    "keep_aspect_ratio_policy": ("stretch", "not_larger", "not_smaller"),
    "mode": ("DCR", "CRD"),
    "nearest_mode": ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
    "norm": ("L1", "L2"),
    "padding_mode": ("zeros", "border"),
    "reduction": ("none", "sum", "mean"),
    "GridSample.mode": ("linear", "bilinear", "nearest"),
    "LinearClassifier.post_transform": ("NONE", "LOGISTIC", "SOFTMAX"),
    "LinearRegressor.post_transform": ("NONE",),
    "LpNormalization.p": (1, 2),
    "Pad.mode": ("constant", "reflect", "edge", "wrap"),
    "Resize.mode": ("nearest", "linear", "cubic"),
    "ScatterElements.reduction": ("none", "add", "max", "min"),
    "ScatterND.reduction": ("none", "add"),
}


@cache
def _of_standard() -> dict[tuple[str, str], set[str]]:
    """The attributes of each operator in any of its forms."""
    found = defaultdict(set)
    for schema in defs.get_all_schemas_with_history():
        if schema.since_version <= READ_UP_TO.get(schema.domain, 0):
            found[schema.domain, schema.name].update(schema.attributes)
    return found


def known_attributes(domain: str, operator: str) -> dict[str, tuple]:
    """The attributes of an operator that are heeded, and their values: all, if there are none."""
    names = _of_standard().get((domain, operator), set())
    heeded = names - UNHEEDED - ({"axis"} if "broadcast" in names else set())
    return {a: CHOICES.get(f"{operator}.{a}", CHOICES.get(a, ANY)) for a in sorted(heeded)}


def unsupported(node: NodeProto, version: int, known: Mapping[str, tuple]) -> str | None:
    """The first attribute that a node has and nothing knows, or whose value nothing knows.

    `version` is that of its domain's operator set, which has the defaults; `known` is as of
    :func:`known_attributes`.
    """
    domain, defaults, newer = canonical(node.domain), {}, ""
    schema = schema_of(node.op_type, version, domain)
    if schema is not None:
        read = READ_UP_TO.get(domain, version)
        defaults = {name: default_of(a) for name, a in schema.attributes.items()}
        if schema.since_version > read:
            newer = f" (opset {schema.since_version} changed it; those up to {read} are known)"
    given = {a.name: value_of_attribute(a) for a in node.attribute}
    for name, value in given.items():
        if name not in known and value != [] and value != defaults.get(name):
            default = defaults.get(name)
            only = "" if default is None else f" or {default!r}"
            return f"{name}={value!r} is not supported{newer}; it has to be left out{only}"
    for name, values in known.items():
        value = given.get(name, defaults.get(name))
        if values and value is not None and value not in values:
            choice = ", ".join(map(repr, values))
            return f"{name}={value!r} is not supported{newer}; supported are {choice}"
    return None
