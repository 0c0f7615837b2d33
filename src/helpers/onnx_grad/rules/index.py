r"""Operators that pick entries: the cotangent goes back to where each entry came from, and adds up
where one was picked more than once."""

import numpy as np

from helpers.onnx_grad.rules.table import register_gradient, written_out
from helpers.onnx_grad.tensor import is_static, same_dim

SCATTER_ND = "none or add; ScatterElements, with an index for each entry, has max and min too"


@register_gradient("Slice")
def slice_(g, node, dy):
    """dX = dY at the places of the slice, zero elsewhere."""
    x = node.x[0]
    starts, ends, axes, steps = (node.input(i) for i in range(1, 5))
    pads = _slice_as_pads(x, starts, ends, axes, steps)
    if pads is not None:
        reverse, pads = pads
        if reverse:
            low = [-(2**62)] * len(reverse)
            dy = g.op("Slice", dy, [-1] * len(reverse), low, reverse, [-1] * len(reverse))
        return g.op("Pad", dy, pads, shape=x.shape) if any(pads) else dy
    # Number the entries of X, slice the numbers, and put dY where they say.
    numbers = g.range_of(g.op("Reshape", _count(g, x), g.ints()))
    places = g.op("Slice", g.reshape(numbers, g.shape_of(x)), starts, ends, axes, steps)
    flat = g.op("Reshape", g.filled(x, 0.0), [-1])
    flat = g.op(
        "ScatterElements", flat, g.op("Reshape", places, [-1]), g.op("Reshape", dy, [-1]), axis=0
    )
    return g.reshape_like(flat, x)


def _slice_as_pads(x, starts, ends, axes, steps):
    """A slice with steps of 1 or -1 along static axes leaves out so many entries on either side:
    (axes to reverse, pads); or None."""
    known = [t is None or t.value is not None for t in (starts, ends, axes, steps)]
    if not all(known) or x.shape is None:
        return None
    starts, ends = starts.value.tolist(), ends.value.tolist()
    axes = list(range(len(starts))) if axes is None else axes.value.tolist()
    steps = [1] * len(starts) if steps is None else steps.value.tolist()
    rank = len(x.shape)
    pads, reverse = [0] * (2 * rank), []
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis %= rank
        length = x.shape[axis]
        if step == 1 and start == 0 and end >= 2**31 - 1:
            continue  # all of the axis, whatever its length
        if not isinstance(length, int) or abs(step) != 1:
            return None
        taken = range(length)[as_slice(start, end, step, length)]
        if len(taken) == 0:
            return None
        low, high = min(taken), max(taken)
        if step == -1:
            reverse.append(axis)
        pads[axis], pads[axis + rank] = low, length - 1 - high
    return reverse, pads


def as_slice(start: int, end: int, step: int, length: int) -> slice:
    """Of static numbers: ONNX clamps what Python's slices read as counting from the end."""
    start = start + length if start < 0 else start
    end = end + length if end < 0 else end
    if step > 0:
        return slice(min(max(start, 0), length), min(max(end, 0), length), step)
    start, end = min(max(start, 0), length - 1), min(max(end, -1), length - 1)
    return slice(start, None if end < 0 else end, step)


def _count(g, t):
    """The number of entries, as a vector of one."""
    if is_static(t.shape):
        return g.ints(int(np.prod(t.shape)))
    return g.op("Reshape", g.op("Size", t), [1])


@register_gradient("Gather", ranked=[0, 1])
def gather(g, node, dy):
    """dX[i] = the sum of dY[k] over all k with indices[k] = i."""
    x, indices = node.x
    axis = node.attr("axis") % x.rank
    # One axis of indices: dY (before, K, after) for X (before, n, after).
    if indices.rank == 0:
        dy = g.unsqueeze(dy, [axis])
    elif indices.rank > 1:
        around = [range(axis), range(axis + 1, x.rank)]
        before, after = ([g.dims_of(x, axes)] if axes else [] for axes in around)
        dy = g.reshape(dy, g.joined(*before, _count(g, indices), *after))
    flat = indices if indices.rank == 1 else g.op("Reshape", indices, [-1])
    if g.opset < 16:
        return _scatter_by_product(g, x, axis, flat, dy)
    aligned = g.reshape(flat, [-1 if a == axis else 1 for a in range(x.rank)])
    everywhere = g.op("Expand", aligned, g.shape_of(dy))
    return g.scatter_add(g.zeros_like(x), everywhere, dy, axis)


def _scatter_by_product(g, x, axis, indices, dy):
    """Before opset 16 nothing adds up where indices repeat, but a product with a one-hot matrix."""
    length = g.length(x, axis)
    numbers = g.range_of(length)
    indices = indices.cast(7)
    indices = g.where(indices < 0, indices + length, indices)
    hits = g.unsqueeze(numbers, [1]).equals(g.unsqueeze(indices, [0])).cast(dy.dtype)  # (n, K)
    last = [*range(axis), *range(axis + 1, x.rank), axis]
    # (before, after, K) times (K, n).
    summed = g.op("MatMul", g.transpose(dy, last), g.transpose(hits, [1, 0]))
    return g.transpose(summed, np.argsort(last))


@register_gradient("Compress", ranked=[0])
@written_out
def compress(g, node):
    """The entries where a condition holds, by a Gather: see there."""
    (x, condition), axis = node.x, node.attr("axis")
    x = g.op("Reshape", x, [-1]) if axis is None else x
    places = g.op("Reshape", g.op("NonZero", condition), [-1])
    return (g.op("Gather", x, places, axis=axis or 0),)


@register_gradient("GatherElements", opset=16)
def gather_elements(g, node, dy):
    """dX[.., indices[.., k, ..], ..] += dY[.., k, ..]."""
    x, indices = node.x
    return g.scatter_add(g.zeros_like(x), indices, dy, node.attr("axis"))


@register_gradient(
    "GatherND", ranked=[0, 1], opset=16, limits={"indices": "of a known last dimension"}
)
def gather_nd(g, node, dy):
    """dX[indices[k]] += dY[k].

    The indices are made into row numbers for ScatterElements: onnxruntime's ScatterND adds in
    several threads at once, and loses terms where indices repeat.
    """
    x, indices = node.x
    if node.y[0].rank is None:
        raise node.refuse("the last dimension of its indices is unknown; declare their shape")
    batch = node.attr("batch_dims")
    depth = indices.rank - 1 + x.rank - node.y[0].rank  # axes of X that are picked from
    if batch:
        indices = _with_batch(g, node, indices, batch)
    dims = g.dims_of(x, range(depth))
    places = g.op("Mod", indices, dims)  # counted from the end where negative
    first, *others = map(np.array, range(depth))  # indices that remove their axis
    rows = g.op("Gather", places, first, axis=-1)
    for k in others:
        rows = rows * g.op("Gather", dims, k) + g.op("Gather", places, k, axis=-1)
    rows = g.op("Reshape", rows, [-1, 1])
    tail = range(depth, x.rank)
    width = g.op("ReduceProd", g.dims_of(x, tail), keepdims=1) if len(tail) else g.ints(1)
    wide = g.joined(g.op("Shape", rows, end=1), width)
    flat = g.reshape(dy, wide)
    zeros = g.reshape(g.zeros_like(x), g.joined(g.op("ReduceProd", dims, keepdims=1), width))
    rows = g.op("Expand", rows, wide)
    return g.reshape_like(g.scatter_add(zeros, rows, flat, 0), x)


def _with_batch(g, node, indices, batch: int):
    """Indices that say the batch dimensions too, as ScatterND needs them."""
    last = indices.rank - 1
    one = [1] * indices.rank
    whole = g.joined(g.dims_of(indices, range(last)), 1)
    coordinates = []
    for axis in range(batch):
        shape = [*one[:axis], -1, *one[axis + 1 :]]
        numbers = g.reshape(g.range_of(g.length(indices, axis)), shape)
        coordinates.append(g.op("Expand", numbers, whole))
    return g.op("Concat", *coordinates, indices, axis=last)


@register_gradient("TopK")
def top_k(g, node, dvalues, dindices=None):
    """dX[indices[k]] = dY[k], zero elsewhere."""
    axis = node.attr("axis")
    return g.op("ScatterElements", g.zeros_like(node.x[0]), node.y[1], dvalues, axis=axis)


@register_gradient("ScatterElements")
def scatter_elements(g, node, dy):
    """Y = X but Y[indices[k]] = U[k] (or += U[k]): dU[k] = dY[indices[k]], and dX = dY, which is
    zero where X was overwritten; with a maximum or minimum, those that tie share dY."""
    axis, kind = node.attr("axis"), node.attr("reduction", "none")
    if kind not in ("max", "min"):
        return _scatter(g, node, dy, "ScatterElements", "GatherElements", axis=axis)
    (x, indices, updates), (y,) = node.x, node.y
    where = {"axis": axis}
    kept = x.equals(y).cast(dy.dtype)
    hits = updates.equals(_picked(g, y, x, indices, "GatherElements", where)).cast(dy.dtype)
    share = dy / g.scatter_add(kept, indices, hits, axis)
    return share * kept, None, _picked(g, share, x, indices, "GatherElements", where) * hits


@register_gradient("ScatterND", limits={"reduction": SCATTER_ND})
def scatter_nd(g, node, dy):
    """As ScatterElements, with whole slices for entries."""
    return _scatter(g, node, dy, "ScatterND", "GatherND")


def _scatter(g, node, dy, scatter: str, gather: str, **axis):
    x, indices, updates = node.x
    reduction = node.attr("reduction", "none")
    dx = dy
    if reduction == "none":
        dx = g.op(scatter, dy, indices, g.zeros_like(updates), **axis)
    return dx, None, _picked(g, dy, x, indices, gather, axis)


def _picked(g, t, x, indices, gather: str, axis: dict):
    """The entries of t, which has the shape of x, that the updates go to."""
    if axis and indices.rank is not None and x.shape is not None:
        # Only part of the other axes may be written to.
        others = [a for a in range(x.rank) if a != axis["axis"] % x.rank]
        others = [a for a in others if not same_dim(x.shape[a], indices.shape[a])]
        if others:
            t = g.op("Slice", t, [0] * len(others), g.dims_of(indices, others), others)
    return g.op(gather, t, indices, **axis)


@register_gradient("OneHot", settings=[2])
def one_hot(g, node, dy):
    """Y = off + (on - off) H with H of zeros and ones: d[off, on] = [sum dY (1 - H), sum dY H]."""
    indices, depth, values = node.x
    hits = g.op("OneHot", indices, depth, np.array([0, 1], np.int64), axis=node.attr("axis"))
    on = g.sum(dy * hits.cast(dy.dtype), None, keepdims=False)
    off = g.sum(dy, None, keepdims=False) - on
    return None, None, g.op("Concat", g.unsqueeze(off, [0]), g.unsqueeze(on, [0]), axis=0)
