"""A minimal simplifier: shape arithmetic on static shapes becomes constants, dead nodes go."""

from collections.abc import Container, Iterable
from copy import deepcopy
from itertools import chain, count

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.shape_inference import infer_shapes

from helpers.onnx_grad.storage import is_constant, name_domains_alike, subgraphs, value_of
from helpers.onnx_grad.tensor import SMALL, Info, canonical, is_static

# What shape arithmetic is made of; evaluated where all inputs are small constants.
FOLDABLE = {
    *("Add", "Sub", "Mul", "Div", "Mod", "Neg", "Abs", "Max", "Min", "Equal", "Where", "Cast"),
    *("Concat", "Gather", "Slice", "Squeeze", "Unsqueeze", "Reshape", "Range", "Expand"),
    *("ConstantOfShape", "ReduceProd", "ReduceSum", "Shape", "Size", "Split", "NonZero"),
    *("Greater", "Less", "Not", "And", "Or", "Transpose", "Flatten", "Identity", "Floor", "Ceil"),
}
INTEGER = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)
FOLDED = (*INTEGER, TensorProto.FLOAT)


def tensor_infos(model: ModelProto) -> dict[str, Info]:
    """Type and static shape of every tensor of the main graph that inference can tell.

    Unnamed dimensions of the inputs get a name first, so that what is equal is seen to be.
    """
    named = deepcopy(model)
    taken = {
        dim.dim_param
        for value in (*named.graph.input, *named.graph.output, *named.graph.value_info)
        for dim in value.type.tensor_type.shape.dim
    }
    for value in named.graph.input:
        for i, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value") and not dim.dim_param:
                dim.dim_param = free_name(f"{value.name}_dim{i}", taken)
    infos = _inferred(named)
    if not any(node.op_type == "Resize" and len(node.input) > 3 for node in named.graph.node):
        return infos
    # Inference loses a name on its way through arithmetic on shapes to the sizes of a Resize, but
    # no number: the names are tried as numbers that nothing else has; small ones, because inference
    # writes out some tensors of these lengths.
    numbers = {}
    for value in named.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                k = len(numbers)
                dim.dim_value = numbers.setdefault(dim.dim_param, 101 * (k + 1) + k * k)
    names = {number: name for name, number in numbers.items()}
    for tensor, (dtype, probe) in _inferred(named).items():
        info = infos.get(tensor, Info(dtype, None))
        if probe is not None:
            shape = (None,) * len(probe) if info.shape is None else info.shape
            pairs = zip(shape, probe, strict=False)
            named_too = (d if isinstance(d, int) else names.get(n, d) for d, n in pairs)
            infos[tensor] = Info(info.dtype, tuple(named_too))
    return infos


def _inferred(model: ModelProto) -> dict[str, Info]:
    graph = infer_shapes(model, data_prop=True).graph
    infos = {t.name: Info(t.data_type, tuple(t.dims)) for t in graph.initializer}
    for value in (*graph.value_info, *graph.output, *graph.input):
        infos[value.name] = Info.of(value.type)
    return infos


def small_constants(graph: GraphProto, real: bool = False) -> dict[str, np.ndarray]:
    """Small tensors that the graph fixes, integers only unless ``real`` is set.

    An initializer that is an input too is only a default.
    """
    inputs = {value.name for value in graph.input}
    found = {t.name: t for t in graph.initializer if t.name not in inputs}
    for node in graph.node:
        if is_constant(node) and (tensor := value_of(node)) is not None:
            found[node.output[0]] = tensor
    return {
        name: numpy_helper.to_array(t)
        for name, t in found.items()
        if np.prod(t.dims) <= SMALL
        and t.data_location != TensorProto.EXTERNAL
        and (t.data_type in INTEGER or (real and t.data_type != TensorProto.STRING))
    }


def fold_shapes(model: ModelProto, fixed: Container[str] = ()) -> int:
    """Replace shape arithmetic that is known now by constants, in place; how many nodes that was.

    Outputs of the graph keep their nodes. What is real, like the scales of a Resize, becomes a
    Constant, and is not made of initializers but those that are ``fixed``: these may be weights.
    """
    from helpers.onnx_grad.lengths import state_lengths  # it asks this module for shapes

    state_lengths(model)
    graph, infos = model.graph, tensor_infos(model)
    constants, outputs = small_constants(graph), {value.name for value in graph.output}
    weights = {t.name for t in graph.initializer if t.name not in fixed}
    reals = small_constants(graph, real=True).items()
    constants |= {name: value for name, value in reals if name not in weights}
    imports = list(model.opset_import)
    kept, folded = [], 0
    for node in graph.node:
        values = None
        if not canonical(node.domain) and not outputs.intersection(node.output):
            values = _value_of(node, infos, constants, graph, imports)
        if values is None:
            kept.append(node)
            continue
        folded += 1
        for name, value in zip(node.output, values, strict=True):
            constants[name], made = value, numpy_helper.from_array(value, name)
            if value.dtype.kind == "f":
                kept.append(helper.make_node("Constant", [], [name], value=made))
            else:
                graph.initializer.append(made)
    if folded:
        del graph.node[:]
        graph.node.extend(kept)
    return folded


def fold_all_shapes(model: ModelProto, fixed: Container[str] = ()) -> None:
    """:func:`fold_shapes` until nothing is left: what becomes known may make more known."""
    while fold_shapes(model, fixed):
        pass


def _value_of(node: NodeProto, infos, constants, graph, imports) -> list[np.ndarray] | None:
    """The outputs of a node, where they are small constants."""
    if node.op_type in ("Shape", "Size"):
        shape = infos.get(node.input[0], Info()).shape
        if not is_static(shape):
            return None
        if node.op_type == "Size":
            return [np.array(np.prod(shape), dtype=np.int64)]
        cut = {a.name: a.i for a in node.attribute}
        return [np.array(shape[cut.get("start", 0) : cut.get("end", None)], dtype=np.int64)]
    if node.op_type == "Gather" and node.input[1] in constants:
        value = _gathered_dims(node, infos, constants[node.input[1]], graph)
        if value is not None:
            return [value]
    if node.op_type not in FOLDABLE or not all(x in constants for x in node.input if x):
        return None
    dtype, shape = infos.get(node.output[0], Info())
    if dtype not in FOLDED or not is_static(shape) or np.prod(shape) > SMALL:
        return None
    given = {x: constants[x] for x in node.input if x}
    alone = helper.make_function("", "fold", list(given), node.output, [node], imports)
    results = ReferenceEvaluator(alone).run(None, given, attributes={})
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    return [np.asarray(r).astype(kind) for r in results]


def _gathered_dims(node, infos, indices, graph) -> np.ndarray | None:
    """Gather from a Shape: known dimensions are known, even beside an unknown batch."""
    maker = next((n for n in graph.node if node.input[0] in n.output), None)
    if maker is None or maker.op_type != "Shape" or maker.attribute:
        return None
    shape = infos.get(maker.input[0], Info()).shape
    if shape is None or not all(-len(shape) <= i < len(shape) for i in indices.reshape(-1)):
        return None
    dims = [shape[i] for i in indices.reshape(-1)]
    return np.array(dims, dtype=np.int64).reshape(indices.shape) if is_static(dims) else None


def take_constant_branches(model: ModelProto) -> None:
    """An If whose condition is a constant is the branch that it takes: replaced, in place.

    The condition may be the result of arithmetic on static shapes, as of an exporter that asks
    whether an axis has length one.
    """
    while any(map(_is_if, model.graph.node)):
        fold_all_shapes(model)
        constants = small_constants(model.graph)
        nodes, found, names = [], False, tensor_names(model.graph)
        for node in model.graph.node:
            value = constants.get(node.input[0]) if _is_if(node) else None
            if value is None:
                nodes.append(node)
                continue
            found = True
            wanted = "then_branch" if value.all() else "else_branch"
            (branch,) = (a.g for a in node.attribute if a.name == wanted)
            nodes += _taken(model.graph, node, branch, names)
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        if not found:
            return


def _is_if(node: NodeProto) -> bool:
    return node.op_type == "If" and not canonical(node.domain)


def _taken(graph: GraphProto, node: NodeProto, branch: GraphProto, taken: set[str]):
    """The branch's nodes, their tensors under names that are free, and its outputs as the If's."""
    inner = [t.name for t in branch.initializer]
    inner += [y for n in branch.node for y in n.output if y]
    names = {name: free_name(name, taken) for name in inner}
    for tensor in branch.initializer:
        graph.initializer.add().CopyFrom(tensor)
        graph.initializer[-1].name = names[tensor.name]
    nodes = [NodeProto.FromString(n.SerializeToString()) for n in branch.node]
    rename(nodes, names)
    for inner, outer in zip(branch.output, node.output, strict=True):
        if outer:
            nodes.append(helper.make_node("Identity", [names.get(inner.name, inner.name)], [outer]))
    return nodes


def live_nodes(nodes: Iterable[NodeProto], outputs: Iterable[str]) -> list[NodeProto]:
    """The nodes that the outputs depend on, in order."""
    wanted, kept = set(outputs), []
    for node in reversed(list(nodes)):
        if wanted.intersection(y for y in node.output if y):
            kept.append(node)
            wanted.update(node.input)
            wanted.update(captured_names(node))
    return kept[::-1]


def in_order(nodes: Iterable[NodeProto]) -> list[NodeProto]:
    """The nodes so that each comes after what it uses, otherwise as they were."""
    waiting, ordered = list(nodes), []
    missing = {y for node in waiting for y in node.output if y}
    while waiting:
        left = []
        for node in waiting:
            if missing.isdisjoint({*node.input, *captured_names(node)}):
                ordered.append(node)
                missing.difference_update(node.output)
            else:
                left.append(node)
        if len(left) == len(waiting):
            raise ValueError("the graph has a cycle")
        waiting = left
    return ordered


def tensor_names(graph: GraphProto) -> set[str]:
    """The names of tensors outside of subgraphs."""
    found = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    return found | {x for node in graph.node for x in (*node.input, *node.output)}


def all_names(graph: GraphProto) -> set[str]:
    """The names of tensors, in subgraphs too, and of nodes."""
    inner = (captured_names(node) for node in graph.node)
    return tensor_names(graph).union({node.name for node in graph.node}, *inner)


def free_name(name: str, taken: set[str]) -> str:
    """A name that is not taken, with a number where it is; from now on it is."""
    numbered = (f"{name}_{k}" for k in count(1))
    free = next(n for n in chain([name], numbered) if n not in taken)
    taken.add(free)
    return free


def rename(nodes: Iterable[NodeProto], names: dict[str, str]) -> None:
    """Give tensors other names, in place, in subgraphs too."""
    for node in nodes:
        for field in (node.input, node.output):
            field[:] = [names.get(name, name) for name in field]
        for graph in subgraphs(node):
            rename(graph.node, names)
            for value in graph.output:
                value.name = names.get(value.name, value.name)


def captured_names(node: NodeProto) -> set[str]:
    """The names that a node's subgraphs use."""
    found = set()
    for graph in subgraphs(node):
        for inner in graph.node:
            found.update(inner.input)
            found |= captured_names(inner)
        found.update(value.name for value in graph.output)
    return found


def drop_dead(model: ModelProto) -> None:
    """Remove, in place, nodes and initializers that no output depends on."""
    graph = model.graph
    kept = live_nodes(graph.node, [value.name for value in graph.output])
    used = {x for node in kept for x in (*node.input, *captured_names(node))}
    used |= {value.name for value in (*graph.output, *graph.input)}
    initializers = [t for t in graph.initializer if t.name in used]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(kept)
    graph.initializer.extend(initializers)


def drop_identities(model: ModelProto) -> None:
    """Remove, in place, Identity nodes whose output is no output of the graph."""
    graph = model.graph
    outputs = {value.name for value in graph.output}
    if any(map(subgraphs, graph.node)):
        return  # a subgraph may use the names
    alias, kept = {}, []
    for node in graph.node:
        node.input[:] = [alias.get(name, name) for name in node.input]
        plain = node.op_type == "Identity" and not canonical(node.domain)
        if plain and node.output[0] not in outputs:
            alias[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    if alias:
        del graph.node[:]
        graph.node.extend(kept)


def simplify(model: ModelProto) -> ModelProto:
    """A smaller copy of a model (ModelProto) that computes the same.

    Shapes that are static are constants, and so is integer arithmetic on them; Identity nodes,
    dead nodes and dead initializers are gone.  Inputs and outputs stay as they are.
    """
    small = deepcopy(model)
    name_domains_alike(small)
    drop_identities(small)
    while fold_shapes(small):
        del small.graph.value_info[:]  # what becomes known may make more known
    drop_dead(small)
    return small
