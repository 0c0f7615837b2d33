r"""Numbers of few bits: reading them is differentiated, rounding to them only if that is wanted.

DequantizeLinear is linear in the scale, whose gradient is an ordinary one.  QuantizeLinear rounds,
so its gradient is zero wherever it has one, and it has no rule.  :func:`straight_through` is one
that takes the rounding for the identity; it has to be registered by name::

    register_gradient("QuantizeLinear", straight_through)
"""

import numpy as np
from ml_dtypes import iinfo
from onnx import TensorProto, helper

from helpers.onnx_grad.rules.table import register_gradient


class Blocks:
    """How scales and zero points are spread over a tensor: one for all, or for each slice along an
    axis, or for each block of a slice."""

    def __init__(self, g, node, x):
        self.g, self.scale, self.rank = g, node.x[1], x.rank
        self.single = self.scale.rank == 0 or self.scale.shape == (1,)
        self.size = 0 if self.single else node.attr("block_size", 0)
        self.axis = node.attr("axis", 1) % max(x.rank, 1)
        self.length = None if self.single or not x.rank else x.shape[self.axis]
        if self.size and not isinstance(self.length, int):
            raise node.refuse("block_size, where its axis has an open length")

    def spread(self, t):
        """Scales or zero points, so that they broadcast against the tensor."""
        if self.size:
            return self.g.op("Gather", t, np.arange(self.length) // self.size, axis=self.axis)
        if self.single:
            return self.g.op("Reshape", t, self.g.ints())
        return self.g.unsqueeze(t, [a for a in range(self.rank) if a != self.axis])

    def gathered(self, t):
        """The adjoint of ``spread``: the sums over what shares a scale."""
        g, axis = self.g, self.axis
        if self.size:
            blocks = np.arange(self.length) // self.size
            member = (blocks[:, None] == np.arange(blocks[-1] + 1)).astype(np.float32)
            order = [a for a in range(self.rank) if a != axis] + [axis]
            sums = g.op("MatMul", g.transpose(t, order), g.constant(member, t.dtype))
            return g.transpose(sums, np.argsort(order))
        if self.single:
            return g.reshape_like(g.sum(t, None, keepdims=False), self.scale)
        slices = g.sum(t, [a for a in range(self.rank) if a != axis], keepdims=False)
        return g.reduce_to(slices, self.scale)  # of an open length, which may be 1


@register_gradient(
    "DequantizeLinear", ranked=[0, 1], limits={"block_size": "0, where the axis has an open length"}
)
def dequantize(g, node, dy):
    """y = (x - zero point) scale: dscale = sum of dy (x - zero point) over what shares the scale,
    dx = dy scale, where x stands for real numbers."""
    x, scale, zero = node.x[0], node.x[1], node.input(2)
    blocks, kind = Blocks(g, node, x), dy.dtype
    steps = x.cast(kind)
    if zero is not None:
        steps = steps - blocks.spread(zero.cast(kind))
    dx = dy * blocks.spread(scale).cast(kind)
    return dx, blocks.gathered(dy * steps).cast(scale.dtype), None


def straight_through(g, node, dq):
    """The gradient of QuantizeLinear as if it did not round, though it does clip.

    Where round(x / scale) + zero point is a number of the type, dx = dq / scale, and
    dscale = -sum of dq x / scale^2; 0 elsewhere.  Together with DequantizeLinear of the same scale,
    dx = dy, and dscale = sum of dy (round(x / scale) - x / scale).

    It is no derivative of what is computed, so it is not registered; see the module's example.
    """
    x, scale, zero = node.x[0], node.x[1], node.input(2)
    code = node.y[0].dtype or TensorProto.UNDEFINED
    name = TensorProto.DataType.Name(code)
    if "INT" not in name:
        raise node.refuse(f"its numbers are of type {name.lower()}, expected integers")
    blocks = Blocks(g, node, x)
    wide = blocks.spread(scale).cast(x.dtype)
    steps = x / wide
    rounded = g.op("Round", steps)
    if zero is not None:
        rounded = rounded + blocks.spread(zero.cast(x.dtype))
    whole = iinfo(helper.tensor_dtype_to_np_dtype(code))
    inside = g.op("And", rounded >= whole.min, rounded <= whole.max)
    dx = g.where(inside, dq.cast(x.dtype) / wide, 0.0)
    return dx, blocks.gathered(-(dx * steps)).cast(scale.dtype), None
