"""Resize: every axis by itself is a linear map, so the gradient multiplies with its transpose;
and GridSample, whose places are data."""

from itertools import product

import numpy as np

from helpers.onnx_grad.lengths import resized_length
from helpers.onnx_grad.rules.table import register_gradient, written_out
from helpers.onnx_grad.tensor import same_dim

TIE = 1e-6
"""How near to the middle between two entries onnxruntime takes a place to be there."""


@register_gradient(
    "Resize",
    settings=[1, 2],
    ranked=[0],
    limits={
        "X": "of a static length along the axes that are resized",
        "scales": "a constant, or sizes is one (but for axes that are not resized)",
    },
)
def resize(g, node, dy):
    """Y = X with each resized axis multiplied by a matrix A: dX = dY with each by A'."""
    x = node.x[0]
    scales, sizes = (t and t.value for t in (node.input(2), node.input(3)))
    stretched = node.attr("keep_aspect_ratio_policy", "stretch") == "stretch"
    if sizes is None and node.input(3) is not None and node.y[0].shape is not None and stretched:
        axes = node.attr("axes") or range(x.rank)
        sizes = np.array([node.y[0].shape[a] for a in axes], dtype=object)
    for axis, A in interpolations(node.attr, node.refuse, x.shape, scales, sizes):
        dy = along(g, dy, g.constant(A, x.dtype), axis, x.rank)
    return dy


def interpolations(attr, refuse, shape, scales, sizes):
    """The axes that Resize changes, each with its matrix A (length after, length before).

    ``attr`` gives an attribute or its default, ``refuse`` makes an error of a reason. Scales and
    sizes are None where they are no constants; sizes may be dimensions, open ones among them, like
    those of X's ``shape``.
    """
    by_scale = scales is not None and scales.size > 0
    if not by_scale and (sizes is None or not sizes.size):
        raise refuse("its scales or sizes must be constants")
    axes = [a % len(shape) for a in attr("axes") or range(len(shape))]
    policy = attr("keep_aspect_ratio_policy") or "stretch"
    found = []
    for axis, given in zip(axes, (scales if by_scale else sizes).tolist(), strict=True):
        n = shape[axis]
        if policy == "stretch" and (given == 1 if by_scale else same_dim(given, n)):
            continue
        if not isinstance(n, int) or given is None or isinstance(given, str):
            raise refuse(
                f"the length of axis {axis}, which is resized, is not static: declare the size of "
                "the image in the model's inputs, or export the model without dynamic axes there"
            )
        m = resized_length(n, given) if by_scale else given
        found.append((axis, n, m, given if by_scale else m / n))
    if policy != "stretch" and not by_scale:
        choose = min if policy == "not_larger" else max
        one = choose(np.float32(m) / np.float32(n) for _, n, m, _ in found)
        found = [(axis, n, int(np.floor(one * n + 0.5)), float(one)) for axis, n, _, _ in found]
    if all(n == m for _, n, m, _ in found):
        return  # the runtime hands X on, whatever the scale
    for axis, n, m, scale in found:
        yield axis, _matrix(attr, n, m, scale)


def along(g, dy, matrix, axis, rank):
    """dY times the matrix (length after, length before) along one axis."""
    if axis == rank - 2:
        return g.op("MatMul", g.transpose(matrix, [1, 0]), dy)
    swap = list(range(rank))
    swap[axis], swap[-1] = rank - 1, axis
    return g.transpose(g.op("MatMul", g.transpose(dy, swap), matrix), swap)


def _matrix(attr, n: int, m: int, scale: float) -> np.ndarray:
    """A (m, n): entry o of the result is a mean, with these weights, of entries round a place."""
    mode = attr("mode")
    # onnxruntime looks for the nearest entry in single precision, which decides where two are about
    # as near; tests measure it.
    kind = np.float32 if mode == "nearest" else np.float64
    place = _places(attr, n, m, kind(scale), np.arange(m, dtype=kind))
    if mode == "nearest":
        low, part = np.floor(place), place - np.floor(place)
        first = {
            "floor": low,
            "ceil": low + (part > 0),
            "round_prefer_ceil": low + (part >= 0.5 - TIE),
            "round_prefer_floor": low + (part > 0.5 + TIE),
        }[attr("nearest_mode")]
        weights = np.ones((1, m))
    else:
        first = np.floor(place)
        weights = np.stack([1 - (place - first), place - first])
        if mode == "cubic":
            weights, first = _cubic(place - first, attr("cubic_coeff_a")), first - 1
    A = np.zeros((m, n))
    taps = first + np.arange(len(weights))[:, None]
    if attr("exclude_outside") and mode == "cubic":
        weights = np.where((taps >= 0) & (taps < n), weights, 0.0)
        weights = weights / weights.sum(axis=0)
    for tap, weight in zip(np.clip(taps, 0, n - 1).astype(int), weights, strict=True):
        np.add.at(A, (np.arange(m), tap), weight)
    return A


def _places(attr, n, m, scale, o):
    """Where entry o of the result lies on the old axis."""
    mode = attr("coordinate_transformation_mode")
    half = o.dtype.type(0.5)
    if mode == "align_corners":
        return o * o.dtype.type(n - 1) / o.dtype.type(m - 1) if m > 1 else o * 0
    if mode == "asymmetric":
        return o / scale
    if mode == "tf_half_pixel_for_nn":
        return (o + half) / scale
    if mode == "pytorch_half_pixel" and m == 1:
        return o * 0
    if mode == "half_pixel_symmetric":  # the sum is in double precision
        offset = o.dtype.type(n / 2) * (1 - o.dtype.type(m) / (scale * n))
        return (offset + (o + 0.5) / np.float64(scale) - 0.5).astype(o.dtype)
    return (o + half) / scale - half


def _cubic(t, a):
    """The weights of the four entries round a place, t after the second (Keys, 1981)."""
    s = np.stack([1 + t, t, 1 - t, 2 - t])
    near, far = ((a + 2) * s - (a + 3)) * s * s + 1, ((a * s - 5 * a) * s + 8 * a) * s - 4 * a
    return np.stack([far[0], near[1], near[2], far[3]])


@register_gradient("GridSample", ranked=[0])
@written_out
def grid_sample(g, node):
    """Y = sum over the corners of the cell round each place of (weight) X[corner], by a
    GatherElements: see there. The weights are products of the place's distances."""
    (x, grid), d = node.x, node.x[0].rank - 2
    mode, padding = node.attr("mode"), node.attr("padding_mode")
    lengths = g.dims_of(x, range(2, x.rank)).cast(grid.dtype)
    last = lengths - 1.0
    # A place is given from the last axis to the first.
    place = g.op("Gather", grid, list(range(d))[::-1], axis=-1) + 1.0
    place = place * last * 0.5 if node.attr("align_corners") else (place * lengths - 1.0) * 0.5
    if padding == "border":
        place = g.op("Max", g.op("Min", place, last), 0.0)
    low = g.op("Round" if mode == "nearest" else "Floor", place)
    above = place - low

    def along(t, k):
        return g.op("Gather", t, np.array(k, np.int64), axis=-1)

    flat, y = g.reshape(x, g.joined(g.dims_of(x, [0, 1]), -1)), None
    for corner in product((0, 1), repeat=0 if mode == "nearest" else d):
        at = low + g.constant(corner, grid.dtype) if corner else low
        weight = g.op("And", at >= 0.0, at <= last).cast(x.dtype)
        weight = g.reduce("ReduceMin", weight, [-1], keepdims=False)
        inside = g.op("Max", g.op("Min", at, last), 0.0)
        index = along(inside, 0)
        for k in range(d):
            index = index * along(lengths, k) + along(inside, k) if k else index
            if corner:
                weight = weight * (along(above, k) if corner[k] else 1.0 - along(above, k))
        rows = g.joined(g.dims_of(x, [0]), 1, -1)
        index, weight = (g.op("Reshape", t, rows) for t in (index.cast(7), weight))
        wide = g.joined(g.dims_of(x, [0, 1]), g.op("Shape", index, start=2))
        term = g.op("GatherElements", flat, g.op("Expand", index, wide), axis=2) * weight
        y = term if y is None else y + term
    places = g.op("Slice", g.op("Shape", grid), [1], [-1])
    return (g.op("Reshape", y, g.joined(g.dims_of(x, [0, 1]), places)),)
