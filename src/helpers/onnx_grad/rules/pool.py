r"""Pooling: a maximum sends its cotangent to the entry that won, a mean to all of its window."""

import itertools
from math import prod

import numpy as np

from helpers.onnx_grad.rules.conv import POOL, Windows, scatter_windows, windows
from helpers.onnx_grad.rules.table import register_gradient


@register_gradient("MaxPool", ranked=[0], limits=POOL)
def max_pool(g, node, dy, dindices=None):
    """dX[i] = the sum of dY over the windows whose maximum (the first, if several) is entry i."""
    x = node.x[0]
    w = windows(node.attr, node.refuse, x.shape[2:], node.attr("kernel_shape"), pool=True)
    places = _winners(g, node, x, w)
    flat = g.op("Reshape", g.zeros_like(x), [-1])
    overlap = any(e > s for e, s in zip(w.extents, w.strides, strict=True))
    if g.opset >= 16 or not overlap:
        places, dy = g.op("Reshape", places, [-1]), g.op("Reshape", dy, [-1])
        if overlap:
            return g.reshape_like(g.scatter_add(flat, places, dy, 0), x)
        return g.reshape_like(g.op("ScatterElements", flat, places, dy, axis=0), x)
    # Before opset 16 nothing adds up where windows share a winner: take windows far enough apart
    # not to overlap, one class of them after the other.
    steps = [-(-e // s) for e, s in zip(w.extents, w.strides, strict=True)]
    terms = []
    for first in itertools.product(*map(range, steps)):
        axes = list(range(2, x.rank))
        some = (list(first), [2**62] * len(axes), axes, steps)
        i = g.op("Reshape", g.op("Slice", places, *some), [-1])
        d = g.op("Reshape", g.op("Slice", dy, *some), [-1])
        terms.append(g.op("ScatterElements", flat, i, d, axis=0))
    return g.reshape_like(g.add_all(terms), x)


def _winners(g, node, x, w: Windows):
    """Where each maximum was found, as the second output of MaxPool counts.

    With a stride of 1 everywhere, the reference evaluator counts it wrongly; not so in one more
    dimension, of length one, with a stride of 2.
    """
    if any(s > 1 for s in w.strides) or any(d > 1 for d in w.dilations) or x.rank > 4:
        return node.extra_output(1)
    how = {"strides": [*w.strides, 2], "pads": [*w.before, 0, *w.after, 0]}
    how |= {"kernel_shape": [*w.kernel, 1], "outputs": 2}
    return g.op("MaxPool", g.unsqueeze(x, [x.rank]), **how)[1]


@register_gradient("AveragePool", ranked=[0], limits=POOL)
def average_pool(g, node, dy):
    """dX[i] = the sum of dY / (entries of the window) over the windows that hold entry i."""
    x, (y,) = node.x[0], node.y
    w = windows(node.attr, node.refuse, x.shape[2:], node.attr("kernel_shape"), pool=True)
    if y.rank is None:
        g.refine(y.name, (*x.shape[:2], *[None] * (x.rank - 2)))
        g.refine(dy.name, y.shape)
    counts, kernel = _counts(g, node, x, y, w), np.ones([1, 1, *w.kernel])
    if isinstance(counts, float):
        part, kernel = dy, kernel / counts
    else:
        part = g.refine((dy / counts).name, dy.shape)
    # All images and channels alike: (N, C, ...) is a batch of N C images of one channel.
    image = g.reshape(part, g.joined(-1, 1, g.dims_of(part, range(2, x.rank))))
    return g.reshape_like(scatter_windows(g, node, image, g.constant(kernel, x.dtype), x, w, 1), x)


def _counts(g, node, x, y, w: Windows):
    """The number that each window's sum was divided by."""
    inside, ceil = not node.attr("count_include_pad"), node.attr("ceil_mode", 0)
    padded = any(w.before) or any(w.after)
    if not ceil and not (inside and padded):
        return float(prod(w.kernel))
    known, total = np.ones(()), None
    for i, (k, s, d, b, a) in enumerate(zip(*w, strict=True)):
        n, m = g.length(x, 2 + i), g.length(y, 2 + i)
        first, last = (0, n) if inside else (-b, n + a)
        others = [axis for axis in range(x.rank) if axis != 2 + i]
        # Entries of window o: o s - b + 0, d, 2d, ...; those in the image (and its padding) count.
        if isinstance(n, int) and isinstance(m, int):
            taken = (np.arange(m) * s - b)[:, None] + np.arange(k) * d
            count = ((taken >= first) & (taken < last)).sum(axis=1)
            known = known * np.expand_dims(np.maximum(count, 1), others)
        else:
            taken = g.unsqueeze(g.range_of(m) * g.ints(s) - g.ints(b), [1])
            taken = taken + g.constant(np.arange(k) * d)
            hits = g.op("And", taken >= first, taken < last).cast(x.dtype)
            count = g.unsqueeze(g.sum(hits, [1], keepdims=False), others)
            total = count if total is None else total * count
    if total is None and known.size and known.min() == known.max():
        return float(known.max())
    known = g.constant(known, x.dtype)
    return known if total is None else total * known
