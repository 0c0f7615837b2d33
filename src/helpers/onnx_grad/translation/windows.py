"""Matrix products, and the operators that slide a window: convolution, pooling and
resizing.

PyTensor has no convolution with strides, dilations and groups, and no pooling.  Both are built
here from strided slices, one for each position in the window: the slices side by side are the
matrix that a convolution multiplies, and pooling reduces over them.
"""

from __future__ import annotations

import string
from itertools import product as positions
from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt
from onnx.defs import get_schema
from onnx.helper import get_attribute_value

from helpers.onnx_grad.lengths import no_window, same_pads
from helpers.onnx_grad.rules.conv import OWN_WAYS
from helpers.onnx_grad.rules.resize import interpolations
from helpers.onnx_grad.translation.node import (
    known,
    larger,
    number,
    product,
    select,
    size,
    sizes,
    translates,
)
from helpers.onnx_grad.translation.reductions import extremum


@translates("MatMul")
def _matmul(node, x, y):
    return pt.matmul(x, y)


@translates("Gemm")
def _gemm(node, a, b, c=None):
    a = a.T if node.attribute("transA", 0) else a
    b = b.T if node.attribute("transB", 0) else b
    alpha, beta = node.attribute("alpha", 1.0), node.attribute("beta", 1.0)
    y = a @ b if alpha == 1 else number(a, alpha) * (a @ b)
    if c is None:
        return y
    return y + c if beta == 1 else y + number(c, beta) * c


@translates("Einsum")
def _einsum(node, *operands):
    equation = node.attribute("equation").replace(" ", "")
    terms, arrow, result = equation.partition("->")
    if not arrow:  # what occurs once, in alphabetical order, after the ellipsis
        single = sorted(k for k in set(terms) - set(",.") if terms.count(k) == 1)
        result = ("..." if "..." in terms else "") + "".join(single)
    if "..." in equation:
        spare = [k for k in string.ascii_letters if k not in equation]
        counts = [
            x.ndim - len(term.replace("...", ""))
            for term, x in zip(terms.split(","), operands, strict=True)
            if "..." in term
        ]
        if len(set(counts)) > 1:
            raise node.refuse(f"the ellipsis in {equation!r} stands for {counts} axes")
        terms, result = (
            side.replace("...", "".join(spare[: counts[0]])) for side in (terms, result)
        )
    return pt.einsum(f"{terms}->{result}", *operands)


# --- windows --------------------------------------------------------------------------------------


class Window(NamedTuple):
    """How a window slides over the spatial axes; one number each per axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple  # padding: ints, or symbols when it depends on an unknown length
    after: tuple
    out: tuple  # how many positions the window takes

    @property
    def positions(self):
        return positions(*map(range, self.kernel))

    def slices(self, position) -> tuple[slice, ...]:
        """Where, in the padded array, the entries are that this position of the window meets."""
        return tuple(
            slice(k * d, k * d + (n - 1) * s + 1, s)
            for k, d, s, n in zip(position, self.dilations, self.strides, self.out, strict=True)
        )


def _window(node, x, kernel) -> Window:
    n_axes = x.ndim - 2
    kernel = tuple(int(k) for k in kernel)
    if len(kernel) != n_axes:
        raise node.refuse(f"a window of shape {kernel} on an input of {n_axes} spatial axes")
    strides = tuple(node.attribute("strides", (1,) * n_axes))
    dilations = tuple(node.attribute("dilations", (1,) * n_axes))
    auto_pad = node.attribute("auto_pad", "NOTSET")
    pool = node.operator != "Conv"
    if auto_pad.startswith("SAME") and pool and max(dilations) > 1:
        raise node.refuse(f"auto_pad={auto_pad} with dilations {OWN_WAYS}")
    pads = (
        node.attribute("pads", (0,) * (2 * n_axes)) if auto_pad == "NOTSET" else (0,) * 2 * n_axes
    )
    before, after, out = list(pads[:n_axes]), list(pads[n_axes:]), []
    for i in range(n_axes):
        n, extent, stride = size(x, 2 + i), (kernel[i] - 1) * dilations[i] + 1, strides[i]
        if auto_pad.startswith("SAME"):
            count = -(-n // stride)
            total = (count - 1) * stride + extent - n
            if pool and isinstance(total, int) and total < 0:
                raise node.refuse(
                    f"auto_pad={auto_pad} with a longer stride than window {OWN_WAYS}"
                )
            total = larger(total, 0)
            before[i], after[i] = same_pads(total, auto_pad)
        else:
            room, ceil = n + before[i] + after[i] - extent, node.attribute("ceil_mode", 0)
            why = isinstance(room, int) and no_window(room, extent, stride, ceil)
            if why:
                raise node.refuse(why)
            count = room // stride + 1
            if ceil:
                # One more, if it begins within the array or the padding before it.
                begins = (count * stride < n + before[i]) & (room % stride > 0)
                count = count + (int(begins) if isinstance(begins, bool) else begins)
        out.append(count)
    return Window(kernel, strides, dilations, tuple(before), tuple(after), tuple(out))


def _padded(x, window: Window, fill):
    """x in the middle of an array that all positions of the window fit into."""
    lengths = []
    for i, low in enumerate(window.before):
        extent = (window.kernel[i] - 1) * window.dilations[i] + 1
        reach = (window.out[i] - 1) * window.strides[i] + extent
        # Past what the window reaches there can be entries, and with ceil_mode the other way round.
        lengths.append(larger(low + size(x, 2 + i) + window.after[i], reach))
    here = tuple(slice(low, low + size(x, 2 + i)) for i, low in enumerate(window.before))
    empty = pt.full([size(x, 0), size(x, 1), *lengths], number(x, fill))
    return pt.set_subtensor(empty[(slice(None), slice(None), *here)], x)


def _slices(x, window: Window, fill=0) -> list:
    """For each position of the window: what it meets, (N, C, *out)."""
    unpadded = all(isinstance(p, int) and p == 0 for p in (*window.before, *window.after))
    x = x if unpadded and not _overhangs(x, window) else _padded(x, window, fill)
    return [x[(slice(None), slice(None), *window.slices(p))] for p in window.positions]


def _overhangs(x, window: Window) -> bool:
    """Whether the last window ends outside of x: with ceil_mode it can."""
    ends = (
        (n - 1) * s + (k - 1) * d + 1
        for k, s, d, n in zip(
            window.kernel, window.strides, window.dilations, window.out, strict=True
        )
    )
    return any(
        not isinstance(end, int) or not isinstance(size(x, 2 + i), int) or end > size(x, 2 + i)
        for i, end in enumerate(ends)
    )


# --- convolution ----------------------------------------------------------------------------------


def _kernel_of(node, w) -> tuple[int, ...]:
    kernel = node.attribute("kernel_shape") or w.type.shape[2:]
    if None in kernel:
        raise node.refuse(f"the kernel's shape {tuple(kernel)} is not known")
    return tuple(kernel)


@translates("Conv")
def _conv(node, x, w, b=None):
    kernel = _kernel_of(node, w)
    window, groups = _window(node, x, kernel), node.attribute("group", 1)
    n, channels = size(x, 0), size(x, 1)
    met = pt.stack(_slices(x, window), axis=2)  # (N, C, K, *out)
    columns = channels // groups * int(np.prod(kernel))
    met = met.reshape((n, groups, columns, product(window.out)))
    rows = w.reshape((groups, size(w, 0) // groups, columns))
    y = pt.matmul(rows, met).reshape((n, size(w, 0), *window.out))
    return y if b is None else y + b.reshape((1, -1, *(1,) * len(kernel)))


@translates("ConvTranspose")
def _conv_transpose(node, x, w, b=None):
    kernel, groups, n_axes = _kernel_of(node, w), node.attribute("group", 1), x.ndim - 2
    strides = tuple(node.attribute("strides", (1,) * n_axes))
    dilations = tuple(node.attribute("dilations", (1,) * n_axes))
    extra = tuple(node.attribute("output_padding", (0,) * n_axes))
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    lengths = [size(x, 2 + i) for i in range(n_axes)]
    whole = [(n - 1) * s + e for n, s, e in zip(lengths, strides, extents, strict=True)]
    before, out = _cropped(node, lengths, whole, strides, extra)
    window = Window(kernel, strides, dilations, (0,) * n_axes, (0,) * n_axes, tuple(lengths))
    n, channels, per_group = size(x, 0), size(x, 1), size(w, 1)
    rows = w.reshape((groups, channels // groups, per_group, *kernel))
    flat = x.reshape((n, groups, channels // groups, product(lengths)))
    room = [larger(a, p + o) for a, p, o in zip(whole, before, out, strict=True)]
    y = pt.zeros((n, groups * per_group, *room), dtype=x.dtype)
    for p in window.positions:
        tap = rows[(slice(None), slice(None), slice(None), *p)].dimshuffle(0, 2, 1)
        added = pt.matmul(tap, flat).reshape((n, groups * per_group, *lengths))
        y = pt.inc_subtensor(y[(slice(None), slice(None), *window.slices(p))], added)
    crop = tuple(slice(low, low + count) for low, count in zip(before, out, strict=True))
    y = y[(slice(None), slice(None), *crop)]
    return y if b is None else y + b.reshape((1, -1, *(1,) * n_axes))


def _cropped(node, lengths, whole, strides, extra) -> tuple[list, list]:
    """How much is cut off before, and what remains, along each axis of a transposed convolution."""
    n_axes = len(lengths)
    auto_pad, wanted = node.attribute("auto_pad", "NOTSET"), node.attribute("output_shape")
    if auto_pad.startswith("SAME") and wanted is None:
        wanted = [n * s for n, s in zip(lengths, strides, strict=True)]
    if wanted is None:
        pads = node.attribute("pads", (0,) * (2 * n_axes))
        out = [whole[i] + extra[i] - pads[i] - pads[n_axes + i] for i in range(n_axes)]
        return list(pads[:n_axes]), out
    wanted = wanted[-n_axes:]
    total = [larger(w + e - o, 0) for w, e, o in zip(whole, extra, wanted, strict=True)]
    # The odd one is cut off at the end for SAME_UPPER, at the beginning otherwise.
    before = [t // 2 if auto_pad == "SAME_UPPER" else t - t // 2 for t in total]
    return before, list(wanted)


# --- pooling --------------------------------------------------------------------------------------


@translates("MaxPool")
def _max_pool(node, x):
    window = _window(node, x, node.attributes["kernel_shape"])
    lowest = -np.inf if x.dtype.startswith("float") else np.iinfo(x.dtype).min
    places = pt.arange(product(sizes(x)), dtype="int64").reshape(sizes(x), ndim=x.ndim)
    pairs = list(zip(_slices(x, window, lowest), _slices(places, window, -1), strict=True))
    while len(pairs) > 1:  # a tournament: a graph as deep as a window is large is too deep
        winners = [_first_maximum(*two) for two in zip(pairs[::2], pairs[1::2], strict=False)]
        pairs = winners + pairs[2 * len(winners) :]
    return pairs[0]


def _first_maximum(first: tuple, second: tuple) -> tuple:
    """Of two values with their places, the larger; of equal ones the first, with its derivative."""
    larger = second[0] > first[0]
    return tuple(select(larger, b, a) for a, b in zip(first, second, strict=True))


@translates("AveragePool")
def _average_pool(node, x):
    window = _window(node, x, node.attributes["kernel_shape"])
    total = pt.sum(pt.stack(_slices(x, window)), axis=0)
    ones = pt.ones((1, 1, *sizes(x)[2:]), dtype=x.dtype)
    if node.attribute("count_include_pad", 0):
        # The padding that was asked for counts, what ceil_mode adds does not.
        ones = pt.ones(
            (1, 1, *(sum(n) for n in zip(window.before, sizes(x)[2:], window.after, strict=True))),
            dtype=x.dtype,
        )
        nothing = (0,) * (x.ndim - 2)
        window = window._replace(before=nothing, after=nothing)
    return total / pt.sum(pt.stack(_slices(ones, window)), axis=0)


@translates("LpPool")
def _lp_pool(node, x):
    window, p = _window(node, x, node.attributes["kernel_shape"]), node.attribute("p", 2)
    power = pt.sum(pt.abs(pt.stack(_slices(x, window))) ** number(x, p), axis=0)
    return power ** number(x, 1 / p)


@translates("GlobalAveragePool")
def _global_average_pool(node, x):
    return pt.mean(x, axis=tuple(range(2, x.ndim)), keepdims=True)


@translates("GlobalMaxPool")
def _global_max_pool(node, x):
    return extremum(pt.max, x, tuple(range(2, x.ndim)), keepdims=True)


@translates("LRN")
def _local_response_normalization(node, x):
    span, n = node.attributes["size"], size(x, 1)
    before, after = (span - 1) // 2, span // 2  # neighbours among the channels
    empty = pt.zeros([size(x, 0), n + before + after, *sizes(x)[2:]], dtype=x.dtype)
    squares = pt.set_subtensor(empty[:, before : before + n], x * x)
    total = pt.sum(pt.stack([squares[:, i : i + n] for i in range(span)]), axis=0)
    alpha, beta = node.attribute("alpha", 1e-4), node.attribute("beta", 0.75)
    divisor = number(x, node.attribute("bias", 1.0)) + number(x, alpha / span) * total
    return x / divisor ** number(x, beta)


@translates("Resize")
def _resize(node, x, roi=None, scales=None, lengths=None):
    if node.version < 11:
        raise node.refuse(f"opset 11 or newer expected, the model has {node.version}")
    defaults = get_schema("Resize", node.version).attributes
    if x.dtype.startswith(("int", "uint")) and node.attribute("mode", "nearest") != "nearest":
        raise node.refuse(f"mode={node.attribute('mode')!r} of integers is not translated")

    def attribute(name):
        default = defaults[name].default_value if name in defaults else None
        default = get_attribute_value(default) if default is not None and default.name else None
        value = node.attribute(name, default)
        return value.decode() if isinstance(value, bytes) else value

    for axis, A in interpolations(
        attribute, node.refuse, x.type.shape, known(scales), known(lengths)
    ):
        moved = pt.moveaxis(x, axis, -1)
        x = pt.moveaxis(pt.matmul(moved, pt.constant(A.T.astype(x.dtype))), -1, axis)
    return x
