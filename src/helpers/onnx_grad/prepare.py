"""What comes before: is this a model that can be differentiated, and in which form?"""

from copy import deepcopy

import onnx
from onnx import ModelProto, NodeProto, TensorProto
from onnx.inliner import inline_selected_functions

from helpers.onnx_grad.attributes import NEWEST, OLDEST
from helpers.onnx_grad.constants import inlined, set_apart
from helpers.onnx_grad.lengths import state_lengths
from helpers.onnx_grad.rules import COMPOSED, RULES
from helpers.onnx_grad.simplify import fold_all_shapes, take_constant_branches, tensor_infos
from helpers.onnx_grad.storage import loaded_model
from helpers.onnx_grad.tensor import REAL, Info, NoGradientError, canonical, compatible


def prepared(
    onx: ModelProto, weights: list[str] | None = None
) -> tuple[ModelProto, dict[str, str]]:
    """A checked copy: one opset, local functions inlined, static shape arithmetic folded, and all
    that may be a weight an initializer; and which of these are constants, with the reason."""
    model = deepcopy(loaded_model(onx))
    for named in (*model.opset_import, *model.graph.node):
        named.domain = canonical(named.domain)
    _check_dictionaries(model)
    _check_opset(model)
    state_lengths(model)
    declare_outputs(model)
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise ValueError(f"onx is not a valid model: {error}") from error
    constants = set_apart(model, weights)
    model = inlined(model)
    state_lengths(model)
    _correct_shapes(model)
    take_constant_branches(model)
    written_out = sorted({("", n.op_type) for n in model.graph.node if _has_body(n, model)})
    # ONNX's own inference stumbles over the body of the last one without its axes.
    _write_defaults(model, {*COMPOSED, "MeanVarianceNormalization"})
    if written_out:
        model = _written_out(model, written_out)
    real = {t.name for t in model.graph.initializer if t.data_type in REAL}
    fold_all_shapes(model, constants if weights is None else real.difference(weights))
    return model, constants


def _written_out(model: ModelProto, operators: list[tuple[str, str]]) -> ModelProto:
    """The model with these operators replaced by their definitions."""
    # The inliner asks for types, and looks for them nowhere but among the declared values.
    declared = {v.name for v in (*model.graph.input, *model.graph.output, *model.graph.value_info)}
    for name, info in tensor_infos(model).items():
        if name not in declared and info.dtype is not None:
            model.graph.value_info.add(name=name, type=info.proto())
    # An optional input that is left out has no name, and no type, which it asks for all the same.
    model.graph.value_info.add(name="", type=Info(TensorProto.FLOAT, None).proto())
    try:
        made = inline_selected_functions(model, operators, inline_schema_functions=True)
    except RuntimeError as error:
        names = ", ".join(sorted(name for _, name in operators))
        raise NoGradientError(
            f"no gradient: the definition of {names} cannot be written out, because the type of an "
            f"input is unknown ({str(error).strip().splitlines()[-1]}); declare the types and "
            "shapes of their inputs in graph.value_info"
        ) from error
    named = [value for value in made.graph.value_info if value.name]
    del made.graph.value_info[:]
    made.graph.value_info.extend(named)
    return made


def _has_body(node: NodeProto, model: ModelProto) -> bool:
    """Whether a standard operator without a rule is a composition of operators by its definition.

    Those of real results only: the others, like comparisons and Range, need no rule.
    """
    if canonical(node.domain) or ("", node.op_type) in RULES:
        return False
    version = next(o.version for o in model.opset_import if not canonical(o.domain))
    schema = onnx.defs.get_schema(node.op_type, version)
    return node.op_type in COMPOSED and (
        schema.has_function or schema.has_context_dependent_function
    )


def _write_defaults(model: ModelProto, op_types: set[str]) -> None:
    """Say attributes that are left to their defaults, which the bodies do not know."""
    version = next(o.version for o in model.opset_import if not canonical(o.domain))
    for node in model.graph.node:
        if node.op_type in op_types and not canonical(node.domain):
            given = {a.name for a in node.attribute}
            for name, attribute in onnx.defs.get_schema(node.op_type, version).attributes.items():
                if name not in given and attribute.default_value.name:
                    node.attribute.append(attribute.default_value)


def _check_dictionaries(model: ModelProto) -> None:
    """By default, skl2onnx makes dictionaries of a classifier's probabilities."""
    maps = [node for node in model.graph.node if node.op_type == "ZipMap"]
    if maps and all(v.type.tensor_type.elem_type not in REAL for v in model.graph.output):
        raise NoGradientError(
            f"no gradient: ZipMap makes dictionaries of {maps[0].input[0]!r}, and no other output "
            "is real; convert the classifier with options={'zipmap': False}"
        )


def check_known(model: ModelProto) -> None:
    """Is there such an opset?"""
    for domain, version in ((canonical(o.domain), o.version) for o in model.opset_import):
        known = [s.since_version for s in onnx.defs.get_all_schemas() if s.domain == domain]
        newest = onnx.defs.onnx_opset_version() if not domain else max(known, default=version)
        if version > newest:
            raise ValueError(
                f"opset {version} of domain {domain or 'ai.onnx'} is unknown: onnx "
                f"{onnx.__version__} knows them up to {newest}"
            )


def _check_opset(model: ModelProto) -> None:
    check_known(model)
    versions = [o for o in model.opset_import if not canonical(o.domain)]
    if not versions:
        raise ValueError("the model imports no opset of the domain ai.onnx: 13 to 26 expected")
    if len({o.version for o in versions}) > 1:
        given = " and ".join(str(o.version) for o in versions)
        raise ValueError(f"the model imports opsets {given} of the domain ai.onnx, expected one")
    version = versions[0].version
    if version < OLDEST:
        raise ValueError(
            f"opset {version} of domain ai.onnx is too old: {OLDEST} to {NEWEST} expected; "
            f"onnx.version_converter.convert_version(model, {OLDEST}) may raise it"
        )
    if version <= NEWEST:
        return
    # No runtime knows so new an opset; but a model may use nothing that is new in it.
    for index, node in enumerate(model.graph.node):
        if not canonical(node.domain):
            schema = onnx.defs.get_schema(node.op_type, version)
            if schema.since_version > NEWEST:
                name = node.name or f"unnamed, number {index}"
                raise ValueError(
                    f"opset {version} of domain ai.onnx is too new: {OLDEST} to {NEWEST} expected, "
                    f"and operator {node.op_type} (node {name}) has changed since"
                )
    versions[0].version = NEWEST


def _correct_shapes(model: ModelProto) -> None:
    """Declared shapes that inference contradicts, as of the exporter that takes each label's own
    loss for a scalar, become the inferred ones: a rule would sum over the wrong axes."""
    bare = deepcopy(model)
    del bare.graph.value_info[:]
    for value in bare.graph.output:
        value.type.tensor_type.ClearField("shape")
    infos = tensor_infos(bare)
    for value in (*model.graph.value_info, *model.graph.output):
        declared, found = Info.of(value.type).shape, infos.get(value.name, Info(None, None)).shape
        if not compatible(declared, found):
            value.type.CopyFrom(Info(value.type.tensor_type.elem_type, found).proto())


def declare_outputs(model: ModelProto) -> None:
    """Outputs declared without a shape get the inferred one: the checker insists on one."""
    bare = [v for v in model.graph.output if not v.type.tensor_type.HasField("shape")]
    if any(v.type.HasField("tensor_type") for v in bare):
        infos = tensor_infos(model)
        for value in bare:
            info = infos[value.name]
            if not value.type.HasField("tensor_type"):
                continue
            if info.shape is None:
                raise ValueError(
                    f"output {value.name!r} has no declared shape, and inference does not find it; "
                    "declare it, with open dimensions if need be: onnx.helper."
                    f"make_tensor_value_info({value.name!r}, onnx.TensorProto.FLOAT, [None, None])"
                )
            value.type.CopyFrom(info.proto())
