r"""Reductions: the cotangent of what was reduced goes back to every entry that took part."""

from math import prod

from helpers.onnx_grad.rules.table import register_gradient
from helpers.onnx_grad.tensor import HALF, Tensor, is_static


class Reduction:
    """Which axes a reduction node removes, and how to put them back."""

    def __init__(self, g, node):
        self.g, self.node, self.x = g, node, node.x[0]
        whole = node.op_type.startswith("Global")  # a pool, over the image
        given, self.symbolic = node.input(1), None
        self.axes = list(range(2, self.x.rank)) if whole else node.attr("axes")
        if given is not None and given.value is not None:
            self.axes = [int(a) for a in given.value]
        elif given is not None:
            self.symbolic = given
        self.empty_is_none = node.attr("noop_with_empty_axes", 0)
        self.noop = not self.axes and self.symbolic is None and bool(self.empty_is_none)
        self.axes = [] if self.noop else self.axes or None
        self.keepdims = whole or bool(node.attr("keepdims"))

    def kept(self, t: Tensor) -> Tensor:
        """t, of the output's shape, with the reduced axes back as ones."""
        if self.keepdims or self.noop:
            return t
        if self.symbolic is not None:
            # The axes are known at run time only, and may be none, which means all.
            return self.g.reshape(t, self.g.op("Shape", self.reduce("ReduceSum", self.x)))
        if self.axes is not None:
            return self.g.unsqueeze(t, self.axes)
        if self.x.rank is None:
            return t  # a scalar, which broadcasts as it is
        return self.g.reshape(t, [1] * self.x.rank) if self.x.rank else t

    def reduce(self, op_type: str, t: Tensor) -> Tensor:
        """Reduce over the same axes, which stay as ones."""
        if self.symbolic is None:
            return self.g.reduce(op_type, t, self.axes)
        how = {"keepdims": 1, "noop_with_empty_axes": self.empty_is_none}
        return self.g.op(op_type, t, self.symbolic, **how)

    def count(self) -> Tensor | float:
        """How many entries went into each output."""
        shape, g, dtype = self.x.shape, self.g, self.x.dtype
        if self.noop:
            return 1.0
        if self.axes is None and self.symbolic is None:
            return g.size_of(self.x, dtype)
        if self.symbolic is not None or shape is None:
            return g.size_of(self.x, dtype) / g.size_of(self.node.y[0], dtype)
        dims = tuple(shape[a] for a in self.axes)
        if is_static(dims):
            return float(prod(dims))
        axes = [a % len(shape) for a in self.axes]
        sizes = g.dims_of(self.x, axes).cast(dtype)
        return sizes if len(axes) == 1 else g.reduce("ReduceProd", sizes, [0])


@register_gradient("ReduceSum")
def reduce_sum(g, node, dy):
    """dX = dY, repeated along the reduced axes."""
    return g.expand_like(Reduction(g, node).kept(dy), node.x[0])


@register_gradient("GlobalAveragePool", ranked=[0])
@register_gradient("ReduceMean")
def reduce_mean(g, node, dy):
    """dX = dY / (entries reduced), repeated along the reduced axes."""
    r = Reduction(g, node)
    count = r.count()
    part = r.kept(dy)
    if isinstance(count, float):
        part = part if count in (0.0, 1.0) else part * (1.0 / count)
    else:
        part = part / count
    return g.expand_like(part, r.x)


@register_gradient("GlobalMaxPool", ranked=[0])
@register_gradient("ReduceMax")
@register_gradient("ReduceMin")
def reduce_extremum(g, node, dy):
    """dX = dY [X = Y] / (number of entries equal to Y): ties share."""
    r = Reduction(g, node)
    x, y = r.x, r.kept(node.y[0])
    if x.dtype in HALF:  # onnxruntime may have X in single precision where it compares
        x = x.wide()
        y = r.reduce("ReduceMin" if node.op_type == "ReduceMin" else "ReduceMax", x)
    hits = x.equals(y).cast(r.x.dtype)
    return hits * (r.kept(dy) / r.reduce("ReduceSum", hits))


@register_gradient("ReduceProd")
def reduce_prod(g, node, dy):
    """dX_i = dY times the product of the others, which is zero where another entry is zero."""
    r = Reduction(g, node)
    zero = r.x.equals(0.0)
    is_zero = zero.cast(r.x.dtype)
    nonzero = g.where(zero, 1.0, r.x)
    other_zeros = r.reduce("ReduceSum", is_zero) - is_zero
    others = r.reduce("ReduceProd", nonzero) / nonzero
    return r.kept(dy) * g.where(other_zeros > 0.0, 0.0, others)


@register_gradient("ReduceL1")
def reduce_l1(g, node, dy):
    """dX = dY sign(X)."""
    return g.op("Sign", node.x[0]) * Reduction(g, node).kept(dy)


@register_gradient("ReduceL2")
def reduce_l2(g, node, dy):
    """dX = dY X / Y, 0 where Y = 0."""
    r = Reduction(g, node)
    (y,) = node.y
    return r.x * r.kept(dy / g.where(y.equals(0.0), 1.0, y))


@register_gradient("ReduceSumSquare")
def reduce_sum_square(g, node, dy):
    """dX = 2 dY X."""
    r = Reduction(g, node)
    return r.x * r.kept(dy * 2.0)


@register_gradient("ReduceLogSum")
def reduce_log_sum(g, node, dy):
    """dX = dY / sum(X) = dY exp(-Y), repeated along the reduced axes."""
    r = Reduction(g, node)
    return g.expand_like(r.kept(dy / g.op("Exp", node.y[0])), r.x)


@register_gradient("ReduceLogSumExp")
def reduce_log_sum_exp(g, node, dy):
    """dX = dY exp(X - Y)."""
    r = Reduction(g, node)
    return g.op("Exp", r.x - r.kept(node.y[0])) * r.kept(dy)
