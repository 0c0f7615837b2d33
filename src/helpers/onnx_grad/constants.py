"""Which initializers are weights, and which are constants of the model.

A file does not say: an exporter stores the weights, an exponent, an epsilon, the bounds of a Clip
and the running statistics of a batch normalisation alike. How they are used decides.
"""

from collections import defaultdict
from copy import deepcopy
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto
from onnx.inliner import inline_selected_functions

from helpers.onnx_grad import simplify
from helpers.onnx_grad.rules import ABOUT, COMPOSED, RULES
from helpers.onnx_grad.rules.table import no_gradient
from helpers.onnx_grad.storage import as_initializers, is_finite, name_domains_alike
from helpers.onnx_grad.tensor import REAL, Info, canonical, schema_of

# What hands its first input on, and Concat each: it is used as the output is.
HANDED_ON = {
    *("Cast", "CastLike", "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice"),
    *("Squeeze", "Transpose", "Unsqueeze"),
}
# What a small number is added in front of, to stay away from a pole.
POLES = {"Sqrt", "Log", "Reciprocal"}
# Queries and keys are scaled, multiplied, and their product is masked in front of a Softmax.
SCALED, PRODUCTS = {"Mul", "Div", *HANDED_ON}, {"MatMul", "Einsum"}
ON_SCORES = {"Add", "Sub", "Tanh", "Where", *SCALED}


def constants_by_use(model: ModelProto, folder: str | Path | None = None) -> dict[str, str]:
    """The real initializers that are not weights, and why.

    They are those that no gradient should step along,

    - without axes (exponents, factors and epsilons are written so; a weight hardly ever is, and
      one that is, like a temperature, has to be named),
    - with an entry that is not finite, or the largest number of its type (masks),
    - used only as settings of operators: the exponent of Pow, the bounds of Clip, the ratio of
      Dropout, the running statistics of BatchNormalization, ... (``settings`` in the rules);
      also through operators that hand them on, like Identity, Cast and Reshape,
    - used only where no gradient comes back: in comparisons, shapes and roundings,
    - with one entry that is added in front of a root, a logarithm or a reciprocal, or that scales
      the scores of an attention,
    - not used.

    How an initializer is stored makes no difference: in the file or beside it, dense or sparse,
    used directly or through Identity.  What a Constant node makes is a constant, as exporters mean
    it, unless it is named.  A table that the model only reads, like the sines of positions that are
    written out as a product, looks like a weight; name the weights in a model that has one.

    Parameters
    ----------
    model : ModelProto
    folder : path, optional
        Where tensors are that are not in the model but beside its file; each is read.
    """
    plain = _written_alike(model)
    graph, infos = plain.graph, simplify.tensor_infos(plain)
    versions = {canonical(o.domain): o.version for o in plain.opset_import}
    uses, captured = _uses(plain)
    outputs = {value.name for value in graph.output} | captured
    scores = _scores(plain)

    def why(name: str, size: int) -> str | None:
        """What a tensor is used as, if it is a constant in every use."""
        reasons = [] if name not in outputs else [None]
        for node, i in uses[name]:
            reasons.append(_as_setting(node, i, infos, versions))
            first = i == 0 or node.op_type == "Concat"
            if reasons[-1] is None and first and _standard(node) in HANDED_ON:
                reasons[-1] = why(node.output[0], size)
            if reasons[-1] is None and size == 1 and _standard(node) == "Add":
                after = [_standard(n) for n, k in uses[node.output[0]] if k == 0]
                if after and POLES.issuperset(after) and node.output[0] not in outputs:
                    reasons[-1] = f"added in front of {after[0]}"
            if reasons[-1] is None and size == 1 and _standard(node) in ("Mul", "Div"):
                reasons[-1] = "a scale of attention" if node.output[0] in scores else None
        return None if None in reasons else next(iter(reasons), "not used")

    found = {}
    for tensor in graph.initializer:
        if tensor.data_type in REAL:
            reason = "a scalar" if not tensor.dims else why(tensor.name, int(np.prod(tensor.dims)))
            if reason is None and not is_finite(tensor, folder):
                reason = "not finite"
            if reason is not None:
                found[tensor.name] = reason
    return found


def _scores(model: ModelProto) -> set[str]:
    """What an attention scales: the product of two computed tensors that goes into a Softmax by
    scaling, masks and rearrangement alone, and its factors."""
    nodes = list(model.graph.node)
    given = {t.name for t in model.graph.initializer}
    ahead, scores = set(), set()
    for node in reversed(nodes):
        onwards = _standard(node) in ON_SCORES and not ahead.isdisjoint(node.output)
        if onwards or _standard(node) == "Softmax":
            ahead.update(node.input)
    for node in nodes:
        if given.issuperset(node.input):
            given.update(node.output)
        computed = [x for x in node.input if x not in given]
        product = _standard(node) in PRODUCTS and len(computed) == 2
        if product or (_standard(node) in ON_SCORES and not scores.isdisjoint(computed)):
            scores.update(ahead.intersection(node.output))
    factors = set()
    for node in reversed(nodes):
        operator, made = _standard(node), set(node.output)
        if (operator in PRODUCTS and made & scores) or (operator in SCALED and made & factors):
            factors.update(node.input)
    return scores | factors


def users(model: ModelProto) -> dict[str, list[str]]:
    """For each initializer the operators that use it; a weight of several is shared by them."""
    plain = _written_alike(model)
    uses, _ = _uses(plain)
    return {t.name: [node.op_type for node, _ in uses[t.name]] for t in plain.graph.initializer}


def inlined(model: ModelProto) -> ModelProto:
    """The model without its local functions, but for those that have a rule of their own."""
    if not model.functions:
        return model
    copy, functions = deepcopy(model), {(f.domain, f.name): f for f in model.functions}
    for node in (n for body in (copy.graph, *copy.functions) for n in body.node):
        function = functions.get((node.domain, node.op_type))
        if function is not None:  # the inliner does not know defaults, and neither does a rule
            given = {a.name for a in node.attribute}
            node.attribute.extend(a for a in function.attribute_proto if a.name not in given)
    ruled = [(domain, name) for domain, name in functions if (canonical(domain), name) in RULES]
    return inline_selected_functions(copy, ruled, exclude=True)


def set_apart(
    model: ModelProto, weights: list[str] | None, folder: str | Path | None = None
) -> dict[str, str]:
    """The constants and why they are none of the weights, if these are not named; and, in place,
    each weight that is named becomes an initializer."""
    constants = constants_by_use(model, folder) if weights is None else {}
    as_initializers(model, weights or ())
    return constants


def _written_alike(model: ModelProto) -> ModelProto:
    """A copy without functions, constant branches and Identity, its constants stored alike."""
    plain = inlined(deepcopy(model))
    name_domains_alike(plain)
    simplify.take_constant_branches(plain)
    as_initializers(plain, ())
    simplify.drop_identities(plain)
    return plain


def _uses(model: ModelProto) -> tuple[dict[str, list[tuple[NodeProto, int]]], set[str]]:
    """The nodes that use each tensor, each with the position; and what subgraphs use."""
    uses, captured = defaultdict(list), set()
    for node in model.graph.node:
        captured |= simplify.captured_names(node)
        for i, name in enumerate(node.input):
            uses[name].append((node, i))
    return uses, captured


def _standard(node: NodeProto) -> str:
    return node.op_type if not canonical(node.domain) else ""


def _as_setting(node: NodeProto, i: int, infos, versions) -> str | None:
    """The setting that input i is, or where it has no gradient."""
    key = canonical(node.domain), node.op_type
    dtypes = [infos.get(y, Info()).dtype for y in node.output if y]
    if RULES.get(key) is no_gradient or all(d is not None and d not in REAL for d in dtypes):
        return f"without a gradient in {node.op_type}"
    settings = ABOUT[key].settings if key in ABOUT else ()
    settings = settings if key[0] else (*settings, *COMPOSED.get(node.op_type, ()))
    if i not in settings:
        return None
    schema = schema_of(node.op_type, versions.get(key[0], 1), key[0])
    known = schema is not None and i < len(schema.inputs)
    return f"{schema.inputs[i].name if known else f'input {i}'} of {node.op_type}"
