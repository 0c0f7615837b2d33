"""Matrix products, and the operators that slide a window: convolution, pooling and
resizing.

PyTensor has no convolution with strides, dilations and groups, and no pooling.  Both are built
here from strided slices, one for each position in the window: the slices side by side are the
matrix that a convolution multiplies, and pooling reduces over them.
"""

from itertools import product as positions
from math import prod
from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt

from helpers.onnx_grad.lengths import parsed_equation
from helpers.onnx_grad.rules.conv import kernel_of, transposed_windows, windows
from helpers.onnx_grad.rules.resize import interpolations
from helpers.onnx_grad.translation.node import (
    known,
    larger,
    number,
    of_inputs,
    select,
    size,
    sizes,
    translates,
)
from helpers.onnx_grad.translation.reductions import bounds, extremum

of_inputs(
    {
        "MatMul": pt.matmul,
        "GlobalAveragePool": lambda x: pt.mean(x, axis=tuple(range(2, x.ndim)), keepdims=True),
        "GlobalMaxPool": lambda x: extremum(pt.max, x, tuple(range(2, x.ndim)), keepdims=True),
    }
)


@translates("Gemm")
def _gemm(node, a, b, c=None):
    a = a.T if node.attr("transA") else a
    b = b.T if node.attr("transB") else b
    alpha, beta = node.attr("alpha"), node.attr("beta")
    y = a @ b if alpha == 1 else number(a, alpha) * (a @ b)
    if c is None:
        return y
    return y + c if beta == 1 else y + number(c, beta) * c


@translates("Einsum")
def _einsum(node, *operands):
    terms, result = parsed_equation(node.attr("equation"), [x.ndim for x in operands])
    return pt.einsum(f"{','.join(terms)}->{result}", *operands)


# --- windows --------------------------------------------------------------------------------------


class Window(NamedTuple):
    """How a window slides over the spatial axes; one number each per axis."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    before: list  # padding: ints, or symbols when it depends on an unknown length
    after: list
    out: list  # how many positions the window takes

    @property
    def positions(self):
        return positions(*map(range, self.kernel))

    def slices(self, position) -> tuple[slice, ...]:
        """Where, in the padded array, the entries are that this position of the window meets."""
        return tuple(
            slice(k * d, k * d + (n - 1) * s + 1, s)
            for k, d, s, n in zip(position, self.dilations, self.strides, self.out, strict=True)
        )

    @property
    def ends(self) -> list:
        """Where the last window ends, along each axis."""
        return [s.stop for s in self.slices([k - 1 for k in self.kernel])]


def _window(node, x, kernel) -> Window:
    if len(kernel) != x.ndim - 2:
        raise node.refuse(f"a window of shape {kernel} on an input of {x.ndim - 2} spatial axes")
    lengths, out = sizes(x)[2:], []
    w = windows(node.attr, node.refuse, lengths, kernel, node.op_type != "Conv")
    of_axes = zip(lengths, w.extents, w.strides, w.before, w.after, strict=True)
    for n, extent, stride, *pad in of_axes:
        room = n + sum(pad) - extent
        count = room // stride + 1
        if node.attr("ceil_mode"):
            # One more, if it begins within the array or the padding before it.
            begins = (count * stride < n + pad[0]) & (room % stride > 0)
            count = count + (int(begins) if isinstance(begins, bool) else begins)
        out.append(count)
    return Window(*w, out)


def _padded(x, window: Window, fill):
    """x in the middle of an array that all positions of the window fit into."""
    lengths = []
    for i, (low, end) in enumerate(zip(window.before, window.ends, strict=True)):
        # Past what the window reaches there can be entries, and with ceil_mode the other way round.
        lengths.append(larger(low + size(x, 2 + i) + window.after[i], end))
    here = tuple(slice(low, low + size(x, 2 + i)) for i, low in enumerate(window.before))
    empty = pt.full([size(x, 0), size(x, 1), *lengths], number(x, fill))
    return pt.set_subtensor(empty[(slice(None), slice(None), *here)], x)


def _slices(x, window: Window, fill=0) -> list:
    """For each position of the window: what it meets, (N, C, *out)."""
    unpadded = all(isinstance(p, int) and p == 0 for p in (*window.before, *window.after))
    pairs = list(zip(window.ends, sizes(x)[2:], strict=True))
    # With ceil_mode the last window can end outside of x.
    inside = all(isinstance(k, int) for pair in pairs for k in pair)
    inside = inside and all(end <= n for end, n in pairs)
    x = x if unpadded and inside else _padded(x, window, fill)
    return [x[(slice(None), slice(None), *window.slices(p))] for p in window.positions]


# --- convolution ----------------------------------------------------------------------------------


@translates("Conv")
def _conv(node, x, w, b=None):
    kernel = kernel_of(node.attr, node.refuse, w.type.shape)
    window, groups = _window(node, x, kernel), node.attr("group")
    n, channels = size(x, 0), size(x, 1)
    met = pt.stack(_slices(x, window), axis=2)  # (N, C, K, *out)
    columns = channels // groups * int(np.prod(kernel))
    met = met.reshape((n, groups, columns, prod(window.out)))
    rows = w.reshape((groups, size(w, 0) // groups, columns))
    y = pt.matmul(rows, met).reshape((n, size(w, 0), *window.out))
    return y if b is None else y + b.reshape((1, -1, *(1,) * len(kernel)))


@translates("ConvTranspose")
def _conv_transpose(node, x, w, b=None):
    groups, n_axes, lengths = node.attr("group"), x.ndim - 2, sizes(x)[2:]
    kernel = kernel_of(node.attr, node.refuse, w.type.shape)
    met = transposed_windows(node.attr, node.refuse, lengths, kernel)
    window = Window(*met[:3], [0] * n_axes, [0] * n_axes, lengths)
    whole, before, out = window.ends, met.before, node.attr("output_shape")
    if not out:  # of auto_pad too: with a stride longer than the window that is not n times it
        extra = node.attr("output_padding") or [0] * n_axes
        out = [n + e - sum(p) for n, e, *p in zip(whole, extra, *met[3:], strict=True)]
    n, channels, per_group = size(x, 0), size(x, 1), size(w, 1)
    rows = w.reshape((groups, channels // groups, per_group, *kernel))
    flat = x.reshape((n, groups, channels // groups, prod(lengths)))
    room = [larger(a, p + o) for a, p, o in zip(whole, before, out, strict=True)]
    y = pt.zeros((n, groups * per_group, *room), dtype=x.dtype)
    for p in window.positions:
        tap = rows[(slice(None), slice(None), slice(None), *p)].dimshuffle(0, 2, 1)
        added = pt.matmul(tap, flat).reshape((n, groups * per_group, *lengths))
        y = pt.inc_subtensor(y[(slice(None), slice(None), *window.slices(p))], added)
    crop = tuple(slice(low, low + count) for low, count in zip(before, out, strict=True))
    y = y[(slice(None), slice(None), *crop)]
    return y if b is None else y + b.reshape((1, -1, *(1,) * n_axes))


# --- pooling --------------------------------------------------------------------------------------


@translates("MaxPool")
def _max_pool(node, x):
    window = _window(node, x, node.attr("kernel_shape"))
    lowest, _ = bounds(x)
    places = pt.arange(prod(sizes(x)), dtype="int64").reshape(sizes(x), ndim=x.ndim)
    pairs = list(zip(_slices(x, window, lowest), _slices(places, window, -1), strict=True))
    while len(pairs) > 1:  # a tournament: a graph as deep as a window is large is too deep
        winners = [  # of equal ones the first, with its derivative
            (select(wins := y > x, y, x), select(wins, j, i))
            for (x, i), (y, j) in zip(pairs[::2], pairs[1::2], strict=False)
        ]
        pairs = winners + pairs[2 * len(winners) :]
    return pairs[0]


@translates("AveragePool")
def _average_pool(node, x):
    window = _window(node, x, node.attr("kernel_shape"))
    total, lengths = pt.sum(pt.stack(_slices(x, window)), axis=0), sizes(x)[2:]
    if node.attr("count_include_pad"):
        # The padding that was asked for counts, what ceil_mode adds does not.
        lengths = [sum(n) for n in zip(window.before, lengths, window.after, strict=True)]
        window = window._replace(before=[0] * len(lengths), after=[0] * len(lengths))
    ones = pt.ones((1, 1, *lengths), dtype=x.dtype)
    return total / pt.sum(pt.stack(_slices(ones, window)), axis=0)


@translates("LpPool")
def _lp_pool(node, x):
    window, p = _window(node, x, node.attr("kernel_shape")), node.attr("p")
    power = pt.sum(pt.abs(pt.stack(_slices(x, window))) ** number(x, p), axis=0)
    return power ** number(x, 1 / p)


@translates("LRN")
def _local_response_normalization(node, x):
    span, n = node.attr("size"), size(x, 1)
    before, after = (span - 1) // 2, span // 2  # neighbours among the channels
    empty = pt.zeros([size(x, 0), n + before + after, *sizes(x)[2:]], dtype=x.dtype)
    squares = pt.set_subtensor(empty[:, before : before + n], x * x)
    total = pt.sum(pt.stack([squares[:, i : i + n] for i in range(span)]), axis=0)
    alpha, beta = node.attr("alpha"), node.attr("beta")
    divisor = number(x, node.attr("bias")) + number(x, alpha / span) * total
    return x / divisor ** number(x, beta)


@translates("Resize")
def _resize(node, x, roi=None, scales=None, lengths=None):
    if node.version < 11:
        raise node.refuse(f"opset 11 or newer expected, the model has {node.version}")
    if x.dtype.startswith(("int", "uint")) and node.attr("mode") != "nearest":
        raise node.refuse(f"mode={node.attr('mode')!r} of integers is not translated")

    for axis, A in interpolations(
        node.attr, node.refuse, x.type.shape, known(scales), known(lengths)
    ):
        moved = pt.moveaxis(x, axis, -1)
        x = pt.moveaxis(pt.matmul(moved, pt.constant(A.T.astype(x.dtype))), -1, axis)
    return x
