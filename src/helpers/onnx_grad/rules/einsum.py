r"""Einsum: the gradient of one operand is an Einsum of the others and the cotangent."""

import string

import numpy as np

from helpers.onnx_grad.lengths import parsed_equation
from helpers.onnx_grad.rules.table import register_gradient


@register_gradient("Einsum", ranked=range(64))
def einsum(g, node, dy):
    """Y = einsum("a,b->c", A, B): dA = einsum("c,b->a", dY, B), and likewise for each operand.

    An index that stands twice in an operand (a diagonal) gets a second letter and a Kronecker
    delta; an index that stands in this operand alone (it was summed out) is broadcast.
    """
    terms, result = parsed_equation(node.attr("equation"), [x.rank for x in node.x])
    g.refine(dy.name, tuple(_lengths(terms, [x.shape for x in node.x])[c] for c in result))
    gradients = []
    for i, (x, term) in enumerate(zip(node.x, terms, strict=True)):
        if not node.needs(i):
            gradients.append(None)
            continue
        operands = [(result, dy)]
        operands += [(t, o) for k, (t, o) in enumerate(zip(terms, node.x, strict=True)) if k != i]
        target, spare = "", iter(sorted(set(string.ascii_letters) - set("".join(terms) + result)))
        for letter in term:
            if letter in target:
                twin = next(spare)
                operands.append((letter + twin, _identity(g, x, term.index(letter))))
                letter = twin
            target += letter
        have = _lengths([t for t, _ in operands], [o.shape for _, o in operands])
        found = "".join(letter for letter in target if letter in have)
        equation = ",".join(t for t, _ in operands) + "->" + found
        shape = tuple(have[letter] for letter in found)
        dx = g.op("Einsum", *(o for _, o in operands), equation=equation, shape=shape)
        dx = g.unsqueeze(dx, [k for k, letter in enumerate(target) if letter not in have])
        pairs = list(zip(target, x.shape, strict=True))
        wide = tuple(n if have.get(c, 1) == 1 else have[c] for c, n in pairs)
        if any(have.get(c, 1) == 1 and n != 1 for c, n in pairs):
            dx = g.op("Expand", dx, g.shape_of(x), shape=wide)
        gradients.append(g.reduce_to(dx, x))
    return tuple(gradients)


def _identity(g, x, axis):
    n = x.shape[axis]
    if isinstance(n, int):
        return g.constant(np.eye(n), x.dtype)
    length = g.dims_of(x, [axis])
    return g.op("EyeLike", g.op("ConstantOfShape", g.joined(length, length))).cast(x.dtype)


def _lengths(terms, shapes) -> dict:
    """Each letter's length: operands of length one broadcast, a number decides over a name."""
    lengths: dict = {}
    for term, shape in zip(terms, shapes, strict=True):
        for letter, n in zip(term, shape, strict=True):
            known = lengths.get(letter, 1)
            if known == 1 or known == n:
                lengths[letter] = n
            elif n != 1 and not isinstance(known, int):
                lengths[letter] = n if isinstance(n, int) else None
    return lengths
