"""An If whose condition is a constant is the branch that it takes."""

from __future__ import annotations

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper

from helpers.onnx_grad.simplify import (
    fold_all_shapes,
    free_name,
    rename,
    small_constants,
    tensor_names,
)
from helpers.onnx_grad.tensor import canonical


def take_constant_branches(model: ModelProto) -> None:
    """Replace, in place, each If with a constant condition by the nodes of its branch.

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
            wanted = "then_branch" if np.asarray(value).all() else "else_branch"
            (branch,) = (a.g for a in node.attribute if a.name == wanted)
            nodes += _inlined(model.graph, node, branch, names)
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        if not found:
            return


def _is_if(node: NodeProto) -> bool:
    return node.op_type == "If" and not canonical(node.domain)


def _inlined(graph: GraphProto, node: NodeProto, branch: GraphProto, taken: set[str]):
    """The branch's nodes, their tensors under names that are free, and its outputs as the If's."""
    inner = [t.name for t in branch.initializer]
    inner += [y for n in branch.node for y in n.output if y]
    names = {name: free_name(name, taken) for name in inner}
    for tensor in branch.initializer:
        graph.initializer.add().CopyFrom(tensor)
        graph.initializer[-1].name = names[tensor.name]
    nodes = [NodeProto.FromString(n.SerializeToString()) for n in branch.node]
    rename(nodes, names)
    outputs = zip(branch.output, node.output, strict=True)
    return nodes + [
        helper.make_node("Identity", [names.get(inner.name, inner.name)], [outer])
        for inner, outer in outputs
        if outer
    ]
