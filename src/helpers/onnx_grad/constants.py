"""Which initializers are weights, and which are constants of the model.

A file says nothing of that: an exporter stores the weights, an exponent, an epsilon, the bounds of
a Clip and the running statistics of a batch normalisation alike.  How they are used tells.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, defs, numpy_helper

from helpers.onnx_grad.rules import ABOUT, COMPOSED, RULES
from helpers.onnx_grad.rules.table import no_gradient
from helpers.onnx_grad.simplify import captured_names, tensor_infos
from helpers.onnx_grad.tensor import REAL, Info, canonical

# What hands its first input on: it is used as the output is.
HANDED_ON = {
    *("Cast", "CastLike", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose"),
    "Unsqueeze",
}
# What a small number is added in front of, to stay away from a pole.
POLES = {"Sqrt", "Log", "Reciprocal"}


def constants_by_use(model: ModelProto) -> dict[str, str]:
    """The real initializers that are no weights, and why.

    They are those that no gradient should step along,

    - without axes (exponents, factors and epsilons are written so; a weight hardly ever is),
    - with an entry that is not finite (masks),
    - used as settings of operators alone: the exponent of Pow, the bounds of Clip, the ratio of
      Dropout, the running statistics of BatchNormalization, ... (``settings`` in the rules);
      also through operators that hand them on, like Identity, Cast and Reshape,
    - used where no gradient comes back alone: in comparisons, shapes and roundings,
    - with one entry that is added in front of a root, a logarithm or a reciprocal,
    - not used.

    A table that the model only reads, like the sines of positions that are written out as a
    product, looks like a weight; name the weights in a model that has one.
    """
    graph, infos = model.graph, tensor_infos(model)
    versions = {canonical(o.domain): o.version for o in model.opset_import}
    uses, captured = defaultdict(list), set()
    for node in graph.node:
        captured |= captured_names(node)
        for i, name in enumerate(node.input):
            uses[name].append((node, i))
    outputs = {value.name for value in graph.output} | captured

    def why(name: str, size: int) -> str | None:
        """What a tensor is used as, if it is a constant in every use."""
        reasons = [] if name not in outputs else [None]
        for node, i in uses[name]:
            reasons.append(_as_setting(node, i, infos, versions))
            if reasons[-1] is None and i == 0 and _standard(node) in HANDED_ON:
                reasons[-1] = why(node.output[0], size)
            if reasons[-1] is None and size == 1 and _standard(node) == "Add":
                after = [_standard(n) for n, k in uses[node.output[0]] if k == 0]
                if after and POLES.issuperset(after) and node.output[0] not in outputs:
                    reasons[-1] = f"added in front of {after[0]}"
        return None if None in reasons else next(iter(reasons), "not used")

    found = {}
    for tensor in graph.initializer:
        if tensor.data_type in REAL:
            reason = "a scalar" if not tensor.dims else _not_finite(tensor)
            reason = reason or why(tensor.name, int(np.prod(tensor.dims)))
            if reason is not None:
                found[tensor.name] = reason
    return found


def _standard(node: NodeProto) -> str:
    return node.op_type if not canonical(node.domain) else ""


def _as_setting(node: NodeProto, i: int, infos, versions) -> str | None:
    """The setting that input i is, or where it has no gradient."""
    key = canonical(node.domain), node.op_type
    dtypes = [infos.get(y, Info(None, None)).dtype for y in node.output if y]
    if RULES.get(key) is no_gradient or all(d is not None and d not in REAL for d in dtypes):
        return f"without a gradient in {node.op_type}"
    settings = ABOUT[key].settings if key in ABOUT else ()
    settings = settings if key[0] else (*settings, *COMPOSED.get(node.op_type, ()))
    if i not in settings:
        return None
    known = node.op_type, versions.get(key[0], 1), key[0]
    names = defs.get_schema(*known).inputs if defs.has(*known) else ()
    return f"{names[i].name if i < len(names) else f'input {i}'} of {node.op_type}"


def _not_finite(tensor: TensorProto) -> str | None:
    if tensor.data_location == TensorProto.EXTERNAL:
        return None
    finite = np.isfinite(numpy_helper.to_array(tensor).astype(np.float64)).all()
    return None if finite else "not finite"
