"""The table of rules, and how a rule gets into it.

A rule is a function ``rule(g, node, dy, ...)`` of the :class:`~helpers.onnx_grad.builder.Graph`
that it emits into, the :class:`~helpers.onnx_grad.tensor.Node` that it differentiates, and one
cotangent for each output of the node (None where nothing depends on that output).  It returns the
gradient with respect to each input: a tensor for the only one, or a tuple with one entry for each,
None where there is no gradient.  A gradient that nothing asks for is removed later, so a rule need
not ask.
"""

from __future__ import annotations

from collections.abc import Callable

from helpers.onnx_grad.builder import Graph
from helpers.onnx_grad.tensor import Node, Tensor, canonical

Rule = Callable[..., Tensor | tuple[Tensor | None, ...] | None]

RULES: dict[tuple[str, str], Rule] = {}


def register_gradient(op_type: str, rule: Rule | None = None, *, domain: str = ""):
    """Add the gradient rule of an operator, or replace it.

    Parameters
    ----------
    op_type : str
    rule : function ``rule(g, node, *cotangents)``
        Its cotangents come one for each output of the node, None where nothing depends on that
        output.  It returns the gradient with respect to each input, None where there is none;
        a tensor alone stands for the first.  Leave it out to use this function as a decorator.
    domain : str
        The operator's domain; "" and "ai.onnx" are the standard one.

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
        RULES[canonical(domain), op_type] = function
        return function

    return add if rule is None else add(rule)


def no_gradient(g: Graph, node: Node, *dys: Tensor | None) -> None:
    """Piecewise constant, or a function of its inputs' shapes alone: the gradient is zero."""
