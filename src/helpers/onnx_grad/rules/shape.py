r"""Operators that move entries about: each is a linear map, and its rule is the adjoint map."""

import numpy as np

from helpers.onnx_grad.rules.table import register_gradient, written_out


@register_gradient("Reshape")
@register_gradient("Flatten")
def reshape(g, node, dy):
    """dX = dY in the shape of X."""
    return g.reshape_like(dy, node.x[0])


@register_gradient("Squeeze")
@register_gradient("Unsqueeze")
def squeeze(g, node, dy):
    """dX = dY with the axes of length one back, or without those that were inserted."""
    x, axes = node.x[0], node.input(1)
    if axes is None or axes.value is None:
        return g.reshape_like(dy, x)
    back = g.unsqueeze if node.op_type == "Squeeze" else g.squeeze
    return back(dy, map(int, axes.value.flat))


@register_gradient("Transpose")
def transpose(g, node, dy):
    """dX = dY, permuted back."""
    perm = node.attr("perm")
    # Without, the axes are in reverse: it undoes itself.
    return g.transpose(dy, np.argsort(perm)) if perm else g.op("Transpose", dy)


@register_gradient("Expand")
def expand(g, node, dy):
    """dX = dY, un-broadcast."""
    return g.reduce_to(dy, node.x[0])


@register_gradient("Tile", ranked=[0])
def tile(g, node, dy):
    """dX = dY with each axis split into (repeats, length), summed over the repeats."""
    x, repeats = node.x
    if x.rank == 0:
        return dy
    # [r0, r1, ...] and [d0, d1, ...] interleaved: [r0, d0, r1, d1, ...].
    pairs = g.op("Concat", g.unsqueeze(repeats, [1]), g.unsqueeze(g.shape_of(x), [1]), axis=1)
    apart = g.reshape(dy, g.op("Reshape", pairs, [-1]))
    return g.sum(apart, range(0, 2 * x.rank, 2), keepdims=False)


@register_gradient("Concat")
def concat(g, node, dy):
    """dX_i = the part of dY that X_i became."""
    axis = node.attr("axis")
    if len(node.x) == 1:
        return dy
    sizes = g.joined(*(g.dims_of(x, [axis]) for x in node.x))
    return g.op("Split", dy, sizes, outputs=len(node.x), axis=axis)


@register_gradient("Split", limits={"outputs": "named, all of them"})
def split(g, node, *dys):
    """dX = the dY_i one after the other, zeros for those that nothing depends on."""
    if None in node.y:  # its length is known to nobody, and onnxruntime 1.32 crashes
        raise node.refuse("an output has no name; give it one, though nothing uses it")
    parts = [g.zeros_like(y) if dy is None else dy for y, dy in zip(node.y, dys, strict=True)]
    if len(parts) == 1:
        return parts[0]
    return g.op("Concat", *parts, axis=node.attr("axis"))


@register_gradient("CumSum")
def cumsum(g, node, dy):
    """dX = the cumulative sum of dY from the other end."""
    how = {"exclusive": node.attr("exclusive"), "reverse": 1 - node.attr("reverse")}
    return g.op("CumSum", dy, node.x[1], **how)


@register_gradient("DepthToSpace")
def depth_to_space(g, node, dy):
    """dX = dY with the blocks moved back into the channels."""
    size, (x,) = node.attr("blocksize"), node.x
    if node.attr("mode") == "DCR":
        return g.op("SpaceToDepth", dy, blocksize=size)
    # SpaceToDepth has that order in the newest opsets alone.
    n, c, h, w = (g.dims_of(x, [axis]) for axis in range(4))
    apart = g.joined(n, g.op("Div", c, g.ints(size**2)), h, size, w, size)
    apart = g.reshape(dy, apart)
    return g.reshape_like(g.transpose(apart, [0, 1, 3, 5, 2, 4]), x)


@register_gradient("SpaceToDepth")
def space_to_depth(g, node, dy):
    """dX = dY with the channels moved back into blocks."""
    return g.op("DepthToSpace", dy, blocksize=node.attr("blocksize"), mode=node.attr("mode"))


@register_gradient("Trilu")
def trilu(g, node, dy):
    """dX = dY, with the same triangle kept."""
    return g.op("Trilu", dy, *node.x[1:], upper=node.attr("upper"))


@register_gradient("Dropout", settings=[1])
def dropout(g, node, dy, *dmask):
    """In inference the identity; in training dX = dY / (1 - ratio) where the mask, which is an
    output of the node, holds."""
    ratio, training = node.input(1), node.input(2)
    if training is None or (training.value is not None and not training.value.any()):
        return dy
    ratio = g.constant(0.5, dy.dtype) if ratio is None else ratio.cast(dy.dtype)
    kept = 1.0 - ratio
    if training.value is None:  # whether it is training is known at run time only
        kept = g.where(training, kept, 1.0)
    return g.where(node.extra_output(1), dy / kept, 0.0)


@register_gradient(
    "Pad", settings=[2], ranked=[0], limits={"axes": "a constant, where mode is not constant"}
)
def pad(g, node, dy):
    """dX = the part of dY that X became; the constant's gradient is the sum of the rest.

    In the other modes Y repeats entries of X, and the cotangents of all copies are added up.
    """
    x, pads, value, axes = node.x[0], node.x[1], node.input(2), node.input(3)
    if node.attr("mode") != "constant":
        return _pad_with_copies(g, node, dy)
    # A negative pad crops; its adjoint pads, with zeros.
    if pads.value is None or (axes is not None and axes.value is None):
        axes = g.ints(*range(x.rank)) if axes is None else axes.cast(7)
        halves = {"axis": 0, "num_outputs": 2 if g.opset >= 18 else None}
        before, after = g.op("Split", g.op("Max", pads, 0), outputs=2, **halves)
        lengths = g.op("Gather", g.op("Shape", dy), axes)
        dx = g.op("Slice", dy, before, lengths - after, axes)
        given = [axes] if node.input(3) is not None else []
        dx = g.op("Pad", dx, g.op("Max", -pads, 0), *([None] if given else []), *given)
    else:
        axes = range(x.rank) if axes is None else [int(a) for a in axes.value]
        dx = _cropped(g, x, dy, pads.value, axes)
    dvalue = None
    if value is not None:
        dvalue = g.sum(dy, None, keepdims=False) - g.sum(dx, None, keepdims=False)
        dvalue = g.reshape_like(dvalue, value)
    return dx, None, dvalue


def _cropped(g, x, dy, pads, axes):
    full = np.zeros((2, x.rank), np.int64)
    full[:, axes] = pads.reshape(2, -1)
    crop, grow = np.maximum(full, 0), np.maximum(-full, 0)
    cut = np.flatnonzero(crop.any(axis=0))
    if len(cut):
        starts, ends = crop[:, cut]
        dy = g.op("Slice", dy, starts, np.where(ends > 0, -ends, 2**62), cut)
    return g.op("Pad", dy, grow.ravel()) if grow.any() else dy


@written_out
def _pad_with_copies(g, node):
    """By a Gather along each padded axis: see there."""
    y, pads, axes = node.x[0], node.x[1], node.input(3)
    if axes is not None and axes.value is None:
        raise node.refuse(f"its axes must be a constant in mode {node.attr('mode')!r}")
    axes = [int(a) % y.rank for a in (range(y.rank) if axes is None else axes.value)]
    for k, axis in enumerate(axes):
        if pads.value is not None and not pads.value[k :: len(axes)].any():
            continue
        ends = g.op("Gather", pads, [k, k + len(axes)])
        places = g.range_of(g.length(node.x[0], axis))
        places = g.op("Pad", places, ends, mode=node.attr("mode"))
        y = g.op("Gather", y, places, axis=axis)
    return (y,)


@register_gradient("ReverseSequence")
def reverse_sequence(g, node, dy):
    """It undoes itself: dX = dY, reversed again."""
    axes = {"batch_axis": node.attr("batch_axis"), "time_axis": node.attr("time_axis")}
    return g.op("ReverseSequence", dy, node.x[1], **axes)
