"""Preparation: whether a model can be differentiated, and in which form."""

from copy import deepcopy

import onnx
from onnx import ModelProto, TensorProto
from onnx.inliner import inline_selected_functions

from helpers.onnx_grad.attributes import NEWEST, OLDEST
from helpers.onnx_grad.constants import inlined, set_apart
from helpers.onnx_grad.lengths import state_lengths
from helpers.onnx_grad.rules import COMPOSED, RULES
from helpers.onnx_grad.simplify import fold_all_shapes, take_constant_branches, tensor_infos
from helpers.onnx_grad.storage import loaded_model, name_domains_alike
from helpers.onnx_grad.tensor import REAL, Info, NoGradientError, canonical, compatible


def prepared(
    onx: ModelProto, weights: list[str] | None = None
) -> tuple[ModelProto, dict[str, str]]:
    """A checked copy: one opset, local functions inlined, static shape arithmetic folded, and all
    that may be a weight an initializer; and which of these are constants, with the reason."""
    model = deepcopy(loaded_model(onx))
    name_domains_alike(model)
    maps = [node for node in model.graph.node if node.op_type == "ZipMap"]
    if maps and all(v.type.tensor_type.elem_type not in REAL for v in model.graph.output):
        raise NoGradientError(  # by default, skl2onnx makes dictionaries of probabilities
            f"no gradient: ZipMap makes dictionaries of {maps[0].input[0]!r}, and no other output "
            "is real; convert the classifier with options={'zipmap': False}"
        )
    version = _checked_opset(model)
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
    written_out = set()
    for node in model.graph.node:
        # ONNX's own inference stumbles over the body of the last one without its axes.
        if canonical(node.domain) or node.op_type not in (*COMPOSED, "MeanVarianceNormalization"):
            continue
        # The bodies do not know attributes that are left to their defaults.
        schema = onnx.defs.get_schema(node.op_type, version)
        given = {a.name for a in node.attribute}
        defaults = (a.default_value for a in schema.attributes.values() if a.name not in given)
        node.attribute.extend(value for value in defaults if value.name)
        composed = schema.has_function or schema.has_context_dependent_function
        if composed and ("", node.op_type) not in RULES:
            written_out.add(("", node.op_type))
    if written_out:
        model = _written_out(model, sorted(written_out))
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
    nameless = model.graph.value_info.add(name="", type=Info(TensorProto.FLOAT).proto())
    try:
        made = inline_selected_functions(model, operators, inline_schema_functions=True)
    except RuntimeError as error:
        names = ", ".join(sorted(name for _, name in operators))
        raise NoGradientError(
            f"no gradient: the definition of {names} cannot be written out, because the type of an "
            f"input is unknown ({str(error).strip().splitlines()[-1]}); declare the types and "
            "shapes of their inputs in graph.value_info"
        ) from error
    made.graph.value_info.remove(nameless)
    return made


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


def _checked_opset(model: ModelProto) -> int:
    """The version of the standard operators, from now on one that runtimes know."""
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
        return version
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
    return NEWEST


def _correct_shapes(model: ModelProto) -> None:
    """Declared shapes that inference contradicts, as of the exporter that takes each label's own
    loss for a scalar, become the inferred ones: a rule would sum over the wrong axes."""
    bare = deepcopy(model)
    del bare.graph.value_info[:]
    for value in bare.graph.output:
        value.type.tensor_type.ClearField("shape")
    infos = tensor_infos(bare)
    for value in (*model.graph.value_info, *model.graph.output):
        declared, found = Info.of(value.type).shape, infos.get(value.name, Info()).shape
        if not compatible(declared, found):
            value.type.CopyFrom(Info(value.type.tensor_type.elem_type, found).proto())


def declare_outputs(model: ModelProto) -> None:
    """Outputs declared without a shape get the inferred one: the checker insists on one."""
    tensors = [v for v in model.graph.output if v.type.HasField("tensor_type")]
    bare = [v for v in tensors if not v.type.tensor_type.HasField("shape")]
    infos = tensor_infos(model) if bare else {}
    for value in bare:
        info = infos[value.name]
        if info.shape is None:
            raise ValueError(
                f"output {value.name!r} has no declared shape, and inference does not find it; "
                "declare it, with open dimensions if need be: onnx.helper."
                f"make_tensor_value_info({value.name!r}, onnx.TensorProto.FLOAT, [None, None])"
            )
        value.type.CopyFrom(info.proto())
