"""The table of rules, and how a rule gets into it.

A rule is a function ``rule(g, node, dy, ...)`` of the :class:`~helpers.onnx_grad.builder.Graph`
that it emits into, the :class:`~helpers.onnx_grad.tensor.Node` that it differentiates, and one
cotangent for each output of the node (None where nothing depends on that output). It returns the
gradient with respect to each input: a tensor for the only one, or a tuple with one entry for each,
None where there is no gradient. A gradient that is not requested is removed later, so a rule may
always emit it.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from onnx import NodeProto, TensorProto

from helpers.onnx_grad.attributes import unsupported
from helpers.onnx_grad.builder import Graph
from helpers.onnx_grad.simplify import captured_names
from helpers.onnx_grad.tensor import REAL, STORED, Info, Node, Tensor, canonical, compatible

Rule = Callable[..., Tensor | tuple[Tensor | None, ...] | None]


class About(NamedTuple):
    """What is known of a rule beside its formula."""

    settings: frozenset[int] = frozenset()
    """Inputs that say how the operator works, such as an exponent or a bound."""
    ranked: tuple[int, ...] = ()
    """Inputs whose number of axes the rule has to know."""
    opset: int = 0
    """The oldest opset whose operators can express the gradient."""
    limits: Mapping[str, str] = {}
    """What else it refuses: an attribute, an input or a circumstance, and what that has to be."""
    attributes: Mapping[str, tuple] | None = None
    """The attributes that it heeds, and their values; see `helpers.onnx_grad.attributes`."""


RULES: dict[tuple[str, str], Rule] = {}
ABOUT: dict[tuple[str, str], About] = {}
# Operators that the standard defines by others, which have rules; and which of their inputs are
# settings (masks, tables of angles).
COMPOSED: dict[str, tuple[int, ...]] = {"Attention": (3,), "RotaryEmbedding": (1, 2)}
COMPOSED |= dict.fromkeys(("CenterCropPad", "GroupNormalization"), ())
# Their integers stand for real numbers. A gradient of zero would be right and of no use to anyone.
QUANTIZED = {
    *("QuantizeLinear", "DynamicQuantizeLinear", "ConvInteger", "MatMulInteger", "QLinearConv"),
    "QLinearMatMul",
}


def register_gradient(
    op_type: str,
    rule: Rule | None = None,
    *,
    domain: str = "",
    settings: Iterable[int] = (),
    ranked: Iterable[int] = (),
    opset: int = 0,
    limits: Mapping[str, str] | None = None,
    attributes: Mapping[str, tuple] | None = None,
):
    """Add the gradient rule of an operator, or replace it.

    Parameters
    ----------
    op_type : str
    rule : function ``rule(g, node, *cotangents)``
        Its cotangents come one for each output of the node, None where nothing depends on that
        output.  It returns the gradient with respect to each input, None where there is none;
        a tensor alone stands for the first.  Each has to have the type and shape of its input, as
        far as these are known.  Leave it out to use this function as a decorator.
    domain : str
        The operator's domain; "" and "ai.onnx" are the standard one.  A function of the model is an
        operator too: where it has a rule, it is not replaced by its body.
    settings : ints
        Positions of the inputs that are settings of the operator, such as an exponent: an
        initializer that is used so alone is no weight, unless it is asked for by name.
    ranked : ints
        Positions of the inputs whose number of axes has to be known; refused where it is not.
    opset : int
        The oldest opset that has what the rule emits; older ones are refused.
    limits : dict, optional
        What the rule itself refuses, by :meth:`Node.refuse <helpers.onnx_grad.tensor.Node.refuse>`:
        the name of an attribute or an input, or a circumstance, and in a few words what it has to
        be.  :func:`~helpers.onnx_grad.rules.coverage.coverage` shows it.
    attributes : dict of tuples, optional
        The attributes that the rule heeds, and the values that it knows, ``()`` for all: any other
        is refused before the rule is asked.  None: the rule knows them all.

    Returns
    -------
    The rule; without one, a decorator.

    Examples
    --------
    >>> from helpers.onnx_grad import register_gradient
    >>> @register_gradient("Cube", domain="my.operators")
    ... def cube(g, node, dy):
    ...     return dy * 3.0 * node.x[0] * node.x[0]
    """
    if not op_type or not isinstance(op_type, str):
        raise TypeError(f"op_type is {op_type!r}, expected the name of an operator")

    def add(function: Rule) -> Rule:
        if not callable(function):
            raise TypeError(f"the rule of {op_type} is {function!r}, expected a function")
        key = canonical(domain), op_type
        RULES[key] = function
        ABOUT[key] = About(
            frozenset(settings), tuple(ranked), opset, dict(limits or {}), attributes
        )
        return function

    return add if rule is None else add(rule)


def gradients(node: Node, dys: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
    """What the node's rule returns, one entry for each input at most.

    Raises NoGradientError where there is no rule, or where it does not reach.
    """
    rule, about = RULES.get((node.domain, node.op_type)), ABOUT.get((node.domain, node.op_type))
    if rule is None:
        raise node.refuse(without_rule(node))
    if about.attributes is not None:
        why = unsupported(node.proto, node.graph.opsets.get(node.domain, 1), about.attributes)
        if why is not None:
            limit = about.limits.get(why.partition("=")[0])
            raise node.refuse(why if limit is None else f"{why} ({limit})")
    for i in about.ranked:
        if node.input(i) is not None and node.input(i).rank is None:
            raise node.refuse(
                f"the rank of its input {node.proto.input[i]!r} is unknown; declare that tensor's "
                "shape in graph.value_info (its dimensions may stay open)"
            )
    if node.graph.opset < about.opset:
        raise node.refuse(
            f"its gradient needs opset {about.opset}, the model has {node.graph.opset}; "
            f"onnx.version_converter.convert_version(model, {about.opset}) may raise it"
        )
    result = rule(node.graph, node, *dys)
    result = result if isinstance(result, tuple | list) else (result,)
    if any(dx is not None for dx in result[len(node.proto.input) :]):
        raise ValueError(
            f"the gradient rule of {node} returned {len(result)} gradients "
            f"for {len(node.proto.input)} inputs"
        )
    for x, dx in zip(node.x, result, strict=False):
        if dx is None:
            continue
        of = f"the gradient rule of {node}, {getattr(rule, '__qualname__', rule)},"
        if not isinstance(dx, Tensor):
            raise TypeError(f"{of} returned {dx!r}, expected a Tensor")
        if x is None or x.dtype not in REAL:
            continue
        if dx.dtype not in (None, x.dtype):
            found, wanted = (TensorProto.DataType.Name(t.dtype).lower() for t in (dx, x))
            raise ValueError(f"{of} returned type {found} for {x.name!r}, which is {wanted}")
        # A length of 1 where the input's is open: the rules of this package know that it is 1, of
        # others it is most often what has still to be repeated.
        theirs = not getattr(rule, "__module__", "").startswith(__package__)
        lengths = zip(dx.shape or (), x.shape or (), strict=False)
        one = theirs and any(m == 1 != n for m, n in lengths)
        if one or not compatible(dx.shape, x.shape):
            raise ValueError(
                f"{of} returned shape {list(dx.shape)} for {x.name!r}, which has {list(x.shape)}; "
                "g.reduce_to(dx, node.x[i]) sums over what was repeated, g.expand_like repeats, "
                "g.reshape_like says that it has that shape in every run"
            )
    return tuple(result[: len(node.proto.input)])


def without_rule(node: Node) -> str:
    """What to do about an operator that has no rule."""
    named = "" if not node.domain else f", domain={node.domain!r}"
    advice = f"it has no rule; register_gradient({node.op_type!r}, ...{named}) adds one"
    if node.subgraphs:
        distances = "; scikit-learn's distances with options={'optim': 'cdist'}"
        return (
            "it has a subgraph, and control flow is not differentiated (but an If whose condition "
            "is a constant): export the model with the branch taken, or with the loop unrolled"
            + (distances if node.op_type == "Scan" else "")
        )
    if not node.domain and node.op_type in QUANTIZED:
        given = node.input(0).name
        return (
            "it rounds, or computes with what is rounded: by what its integers are made of, like "
            f"{given!r}, the gradient is zero wherever there is one, which trains nothing. "
            "Differentiate the model before it is quantised, or name in weights and inputs what is "
            "not rounded (weights=[] for none); to take the rounding for the identity, write "
            "QuantizeLinear in its place and register_gradient('QuantizeLinear', straight_through) "
            "of helpers.onnx_grad.rules.quantize"
        )
    if not node.domain and "Sequence" in node.op_type:
        return (
            "sequences of tensors are not differentiated: export the model with Concat, Split and "
            "Gather in their place, which torch.onnx.export does with optimize=True (but for the "
            "loops of an EmbeddingBag: Gather and ReduceMean, or ReduceSum, say the same)"
        )
    if node.domain.startswith("com.microsoft"):
        return (
            "operators of this domain are written by onnxruntime's optimiser: differentiate the "
            f"model as it was exported, and optimise the gradient afterwards (or {advice})"
        )
    return advice


def sweep(g: Graph, nodes, dependent: set[str], terms: dict[str, list[Tensor]], tell=None) -> None:
    """Reverse mode: from the last node to the first, add what each gives to its inputs.

    To ``terms``, the parts of each tensor's cotangent, for those tensors that are ``dependent``;
    ``tell`` is called with each node that is differentiated.
    """
    for index in range(len(nodes) - 1, -1, -1):
        node = Node(nodes[index], g, index, dependent.__contains__)
        dys = [cotangent(g, terms, y) if y else None for y in node.proto.output]
        if all(dy is None for dy in dys) or not dependent.intersection(inputs_of(node.proto)):
            continue
        if tell is not None:
            tell(node)
        g.prefix = f"{node.proto.name or node.op_type}_grad"
        for name, dx in zip(node.proto.input, gradients(node, dys), strict=False):
            if dx is not None and name in dependent:
                g.refine(dx.name, g.info(name).shape)
                terms.setdefault(name, []).append(dx)


def cotangent(g: Graph, terms: dict[str, list[Tensor]], name: str) -> Tensor | None:
    """The sum of the parts of a tensor's cotangent, None where nothing depends on it."""
    parts = terms.get(name)
    if not parts:
        return None
    if len(parts) > 1:
        terms[name] = [g.refine(g.add_all(parts).name, g.info(name).shape)]
    return terms[name][0]


def dependents(infos: dict[str, Info], nodes, start: Iterable[str]) -> set[str]:
    """The real tensors that depend on those of the start, and the integers that stand for some:
    those that are quantised, and what is made of them."""
    found = set(start)
    for node in nodes:
        used = found.intersection(inputs_of(node))
        if used:
            integers = node.op_type in QUANTIZED or not all(may_be_real(infos, x) for x in used)
            found.update(y for y in node.output if y and (integers or may_be_real(infos, y)))
    return found


def may_be_real(infos: dict[str, Info], name: str) -> bool:
    """Whether a tensor is real, or of an unknown type."""
    return name not in infos or infos[name].dtype in (None, *REAL, *STORED)


def inputs_of(node: NodeProto) -> set[str]:
    """The tensors that a node uses, its subgraphs included."""
    return {x for x in node.input if x} | captured_names(node)


def written_out(forward: Callable[[Graph, Node], tuple[Tensor, ...]]) -> Rule:
    """The rule of an operator that ``forward`` computes by others: these are differentiated.

    They compute the outputs too, so that what both directions need is there once.
    """

    @functools.wraps(forward)
    def rule(g, node, *dys):
        ys, nodes = g.recorded(forward, node)
        needed = {x for i, x in enumerate(node.proto.input) if node.needs(i)}
        terms: dict[str, list[Tensor]] = {}
        for i, (name, y, dy) in enumerate(zip(node.proto.output, ys, dys, strict=False)):
            if name:
                node.replace(i, y)
                if dy is not None:
                    terms.setdefault(y.name, []).append(dy)
        sweep(g, nodes, dependents(g.infos, nodes, needed), terms)
        return tuple(cotangent(g, terms, x) if x in needed else None for x in node.proto.input)

    return rule


def no_gradient(g: Graph, node: Node, *dys: Tensor | None) -> None:
    """Piecewise constant, or a function of its inputs' shapes alone: the gradient is zero."""
