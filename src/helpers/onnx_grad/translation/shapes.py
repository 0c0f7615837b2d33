"""Operators that make, move, select and join entries, and the arithmetic of shapes.

Shapes are computed with while the graph is built as far as they are known: :func:`entries` takes a
vector of lengths apart into the ones that are numbers and the ones that are symbols.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
import pytensor.tensor as pt
from onnx import TensorProto, helper
from onnx.numpy_helper import to_array
from pytensor.tensor.basic import MakeVector

from helpers.onnx_grad.rules.index import as_slice
from helpers.onnx_grad.storage import value_of
from helpers.onnx_grad.translation.node import (
    counted,
    known,
    larger,
    number,
    of_inputs,
    of_node,
    select,
    size,
    sizes,
    translates,
)

MAX_NDIM = 64  # of a NumPy array


def entries(x) -> list | None:
    """Entries of a vector of integers, or the one entry of a scalar; None if x is neither.

    Known ones are ints, others are symbols.  A vector that is too long for a shape is data: None.
    """
    if not x.dtype.startswith("int") or x.ndim > 1:
        return None
    if x.ndim == 1 and (x.type.shape[0] is None or x.type.shape[0] > MAX_NDIM):
        return None
    if (value := known(x)) is not None:
        return [int(v) for v in value.ravel()]
    if x.ndim == 0:
        return [x]
    if x.owner is not None and isinstance(x.owner.op, MakeVector):
        return [int(v.data) if known(v) is not None else v for v in x.owner.inputs]
    return [x[i] for i in range(x.type.shape[0])]


def vector(lengths: Sequence):
    """The inverse of :func:`entries`."""
    if all(isinstance(n, int) for n in lengths):
        return pt.constant(np.array(lengths, dtype="int64"))
    return pt.stack([pt.as_tensor(n, dtype="int64") for n in lengths])


def target_shape(node, shape) -> list:
    lengths = entries(shape)
    if lengths is None:
        raise node.refuse("how many dimensions the result has is computed by the graph")
    return lengths


of_inputs(
    {
        "CastLike": lambda x, like: x.astype(like.dtype),
        "Range": lambda start, limit, delta: pt.arange(start, limit, delta, dtype=start.dtype),
        "Size": lambda x: pt.as_tensor(prod(sizes(x)), dtype="int64"),
    }
)
of_node(
    {
        "Cast": lambda node, x: x.astype(node.onnx_dtype(node.attr("to"))),
        "GatherElements": lambda node, x, indices: x[_elements(node, x, indices)],
        "GatherND": lambda node, x, indices: x[_points(node, x, indices)],
        "ScatterND": lambda node, x, at, new: _scatter(node, x[_points(node, x, at)], new),
        "Shape": lambda node, x: vector(sizes(x)[node.attr("start") : node.attr("end")]),
        "Tile": lambda node, x, repeats: pt.tile(x, target_shape(node, repeats)),
        "Transpose": lambda node, x: x.transpose(node.attr("perm") or tuple(range(x.ndim))[::-1]),
        **dict.fromkeys(
            ("Scatter", "ScatterElements"),
            lambda node, x, at, new: _scatter(node, x[_elements(node, x, at)], new),
        ),
    }
)


# --- making ---------------------------------------------------------------------------------------


@translates("Constant")
def _constant(node):
    value = value_of(node.proto)
    return pt.constant(to_array(value).astype(node.onnx_dtype(value.data_type)))


@translates("ConstantOfShape")
def _constant_of_shape(node, shape):
    value = node.attr("value") or helper.make_tensor("", TensorProto.FLOAT, [1], [0.0])
    dtype = node.onnx_dtype(value.data_type)
    return pt.full(target_shape(node, shape), to_array(value).ravel()[0], dtype=dtype)


@translates("EyeLike")
def _eye_like(node, x):
    code = node.attr("dtype")
    dtype = x.dtype if code is None else node.onnx_dtype(code)
    return pt.eye(*sizes(x), node.attr("k"), dtype=dtype)


@translates("OneHot")
def _one_hot(node, indices, depth, values):
    depth = depth.reshape(()).astype("int64")
    axis = node.attr("axis")
    axis += indices.ndim + 1 if axis < 0 else 0
    indices = pt.expand_dims(indices.astype("int64"), axis)
    index = counted(depth, axis, indices.ndim)
    hit = pt.eq(indices, index) | pt.eq(indices + depth, index)
    return select(hit, values[1], values[0])


@translates("Dropout")
def _dropout(node, x, ratio=None, training=None):
    training = False if training is None else known(training)
    if training is None or (training and (ratio is None or known(ratio) != 0)):
        raise node.refuse("dropout in training mode is random")
    return x, pt.ones_like(x, dtype="bool")


# --- moving ---------------------------------------------------------------------------------------


@translates("Reshape")
def _reshape(node, x, shape):
    lengths = target_shape(node, shape)
    for axis, n in enumerate(lengths) if not node.attr("allowzero") else ():  # 0 copies the length
        if isinstance(n, int):
            lengths[axis] = n or size(x, axis)
        elif axis < x.ndim:
            lengths[axis] = pt.switch(pt.eq(n, 0), x.shape[axis], n)
    return x.reshape(lengths, ndim=len(lengths))


@translates("Flatten")
def _flatten(node, x):
    axis = node.attr("axis")
    axis += x.ndim if axis < 0 else 0
    return x.reshape((prod(sizes(x)[:axis]), prod(sizes(x)[axis:])))


@translates("DepthToSpace", "SpaceToDepth")
def _blocks(node, x):
    k, (n, channels, h, w) = node.attr("blocksize"), sizes(x)
    depth_first = node.attr("mode") != "CRD"
    if node.op_type == "SpaceToDepth":
        order = (0, 3, 5, 1, 2, 4) if depth_first else (0, 1, 3, 5, 2, 4)
        blocks = x.reshape((n, channels, h // k, k, w // k, k)).transpose(order)
        return blocks.reshape((n, channels * k**2, h // k, w // k))
    parts = (k, k, channels // k**2) if depth_first else (channels // k**2, k, k)
    order = (0, 3, 4, 1, 5, 2) if depth_first else (0, 1, 4, 2, 5, 3)
    blocks = x.reshape((n, *parts, h, w)).transpose(order)
    return blocks.reshape((n, channels // k**2, h * k, w * k))


@translates("Squeeze")
def _squeeze(node, x, axes=None):
    axes = node.axes(axes)
    if axes is None:
        if None in x.type.shape:
            raise node.refuse(f"which axes have length 1 is not known from shape {x.type.shape}")
        axes = tuple(axis for axis, n in enumerate(x.type.shape) if n == 1)
    axes = {axis % x.ndim for axis in axes}
    return x.reshape([n for axis, n in enumerate(sizes(x)) if axis not in axes])


@translates("Unsqueeze")
def _unsqueeze(node, x, axes=None):
    axes = node.axes(axes) or ()
    if x.ndim == 0 and len(axes) == 1 and x.dtype == "int64":
        return vector(entries(x))
    return pt.expand_dims(x, axes)


@translates("Expand")
def _expand(node, x, shape):
    wanted = target_shape(node, shape)
    ndim = max(x.ndim, len(wanted))
    wanted = [1] * (ndim - len(wanted)) + wanted
    present = [1] * (ndim - x.ndim) + sizes(x)
    for axis, (n, m) in enumerate(zip(present, wanted, strict=True)):
        if (isinstance(m, int) and m == 1) or (isinstance(n, int) and n != 1):
            wanted[axis] = n
        elif not (isinstance(m, int) or isinstance(n, int)):
            wanted[axis] = pt.switch(pt.eq(m, 1), n, m)
    return pt.broadcast_to(x, wanted)


@translates("Pad")
def _pad(node, x, pads=None, value=None, axes=None):
    pads = node.parameter("pads").tolist() if pads is None else target_shape(node, pads)
    axes = range(x.ndim) if axes is None else node.axes(axes) or ()
    before, after = [0] * x.ndim, [0] * x.ndim
    for k, axis in enumerate(axes):
        before[axis], after[axis] = pads[k], pads[k + len(axes)]
    fill = number(x, node.attr("value") or 0) if value is None else value.reshape(())
    mode = node.attr("mode")
    for axis, (low, high) in enumerate(zip(before, after, strict=True)):
        if all(isinstance(k, int) and k == 0 for k in (low, high)):
            continue
        at = (slice(None),) * axis
        cut, end = larger(-low, 0), size(x, axis) - larger(-high, 0)
        x, low, high = x[(*at, slice(cut, end))], larger(low, 0), larger(high, 0)
        n = size(x, axis)
        if mode == "constant":
            around = [
                pt.full([*sizes(x)[:axis], k, *sizes(x)[axis + 1 :]], fill, dtype=x.dtype)
                for k in (low, high)
            ]
            x = pt.join(axis, around[0], x, around[1])
            continue
        index = pt.arange(-low, n + high)
        if mode == "edge":
            index = pt.clip(index, 0, n - 1)
        elif mode == "wrap":
            index = pt.mod(index, n)
        else:  # reflect: ... 2 1 0 1 2 ... n-2 n-1 n-2 ...
            index = pt.mod(index, 2 * (n - 1))
            index = pt.minimum(index, 2 * (n - 1) - index)
        x = x[(*at, index)]
    return x


@translates("Concat")
def _concat(node, *parts):
    taken = [entries(part) if part.ndim == 1 and part.dtype == "int64" else None for part in parts]
    if all(lengths is not None for lengths in taken):
        return vector(sum(taken, []))
    return pt.join(node.attr("axis") % parts[0].ndim, *parts)


@translates("Split")
def _split(node, x, lengths=None):
    axis = node.attr("axis") % x.ndim
    lengths = node.parameter("split", lengths)
    if lengths is None:
        n, parts = x.type.shape[axis], node.attr("num_outputs") or len(node.proto.output)
        if n is None:
            raise node.refuse(f"the length of axis {axis}, to be split evenly, is not known")
        each = -(-n // parts)
        lengths = [each] * (n // each) + [n % each] * (n % each > 0)
    ends = np.cumsum(lengths).tolist()
    at = (slice(None),) * axis
    pairs = zip([0, *ends], ends, strict=False)
    return tuple(x[(*at, slice(start, end))] for start, end in pairs)


@translates("Trilu")
def _trilu(node, x, k=None):
    k = 0 if k is None else k.reshape(())
    rows, columns = pt.arange(size(x, -2)).dimshuffle(0, "x"), pt.arange(size(x, -1))
    kept = columns - rows >= k if node.attr("upper") else columns - rows <= k
    return select(kept, x, number(x, 0))


# --- selecting ------------------------------------------------------------------------------------


@translates("Slice")
def _slice(node, x, starts=None, ends=None, axes=None, steps=None):
    if starts is None:  # attributes before operator set 10
        starts, ends = (pt.constant(np.array(node.attr(k))) for k in ("starts", "ends"))
    starts, ends = target_shape(node, starts), target_shape(node, ends)
    axes = node.axes(axes) or range(len(starts))
    steps = np.ones(len(starts), int) if steps is None else node.parameter("steps", steps)
    index = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps.tolist(), strict=True):
        n = x.type.shape[axis]
        if n is not None and isinstance(start, int) and isinstance(end, int):
            index[axis] = as_slice(start, end, step, n)
            continue
        far = isinstance(end, int) and abs(end) >= 2**31 - 1  # the usual "to the end"
        index[axis] = slice(start, None if far else end, step)
    lengths = entries(x) if x.ndim == 1 else None
    return x[tuple(index)] if lengths is None else vector(lengths[index[0]])


@translates("ReverseSequence")
def _reverse_sequence(node, x, lengths):
    time, batch = node.attr("time_axis"), node.attr("batch_axis")
    order = [time, batch, *(axis for axis in range(x.ndim) if axis not in (time, batch))]
    t = pt.arange(size(x, time)).dimshuffle(0, "x")
    source = pt.switch(t < lengths, lengths - 1 - t, t)
    turned = x.transpose(order)[source, pt.arange(size(x, batch))]
    return turned.transpose([order.index(axis) for axis in range(x.ndim)])


@translates("Gather")
def _gather(node, x, indices):
    axis = node.attr("axis") % x.ndim
    lengths = entries(x) if x.ndim == 1 else None
    where = known(indices)
    if lengths is not None and where is not None and where.ndim <= 1:
        chosen = [lengths[int(i)] for i in where.ravel()]
        return vector(chosen) if where.ndim else pt.as_tensor(chosen[0], dtype=x.dtype)
    return x[(slice(None),) * axis + (indices,)]


def _elements(node, x, indices) -> tuple:
    """Index that picks along one axis; along the others each entry stays where it is."""
    axis = node.attr("axis") % x.ndim
    own = [counted(size(indices, i), i, x.ndim) for i in range(x.ndim)]
    return (*own[:axis], indices, *own[axis + 1 :])


def _points(node, x, indices) -> tuple:
    """Index of x by the vectors along the last axis of `indices`."""
    depth = indices.type.shape[-1]
    if depth is None:
        raise node.refuse("the length of the last axis of the indices is not known")
    batch = node.attr("batch_dims") or 0
    own = [counted(size(indices, i), i, indices.ndim - 1) for i in range(batch)]
    return (*own, *(indices[..., i] for i in range(depth)))


def _scatter(node, place, updates):
    reduction = node.attr("reduction")
    if reduction not in (None, "none", "add"):
        raise node.refuse(f"reduction {reduction!r} is not translated, only 'none' and 'add'")
    return (pt.inc_subtensor if reduction == "add" else pt.set_subtensor)(place, updates)
