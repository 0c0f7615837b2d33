r"""Convolution: its adjoint in the image is a transposed convolution, and its adjoint in the
weights is a convolution of the image with the cotangent, where batch and channels swap roles."""

from math import prod
from typing import NamedTuple

import numpy as np

from helpers.onnx_grad.lengths import no_window, same_pads
from helpers.onnx_grad.rules.table import register_gradient
from helpers.onnx_grad.tensor import is_static

PADS = "write the attribute pads in its place"
OWN_WAYS = f"is padded by each runtime in its own way; {PADS}"
AUTO_PAD = {"auto_pad": "NOTSET or VALID, where the image's size is open and the stride not 1"}
POOL = {**AUTO_PAD, "dilations": "1 with auto_pad, where the image's size is open"}
GROUPS = {"group": "1 where the number of channels is open"}
KERNEL = {"kernel_shape": "known, as an attribute or from the shape of the weights"}


class Windows(NamedTuple):
    """How windows slide: one entry of each for every spatial axis."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    before: list[int]
    after: list[int]

    @property
    def extents(self) -> list[int]:
        """What a window spans, with its holes."""
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]


def windows(attr, refuse, lengths, kernel, pool: bool = False) -> Windows:
    """Read the attributes of a convolution or a pool; ``auto_pad`` becomes numbers.

    ``attr`` and ``refuse`` are as of ``interpolations`` in
    :mod:`~helpers.onnx_grad.rules.resize`; a length of the image is an int, a symbol to compute
    with, or open where it is a str or None.
    """
    w, auto = _as_given(attr, kernel), attr("auto_pad")
    same = auto in ("SAME_UPPER", "SAME_LOWER")
    if same and pool and max(w.dilations) > 1:
        raise refuse(f"auto_pad={auto} with dilations {OWN_WAYS}")
    for i, (n, extent, stride) in enumerate(zip(lengths, w.extents, w.strides, strict=True)):
        if not same:
            room = n + w.before[i] + w.after[i] - extent if isinstance(n, int) else 0
            why = no_window(room, extent, stride, attr("ceil_mode"))
            if why:
                raise refuse(why)
            continue
        if stride > 1 and isinstance(n, str | None):
            raise refuse(
                f"auto_pad={auto} with stride {stride} needs a static image size; declare it, "
                f"or {PADS}"
            )
        total = extent - 1 if stride == 1 else (-(-n // stride) - 1) * stride + extent - n
        if pool and isinstance(total, int) and total < 0:
            raise refuse(f"auto_pad={auto} with a longer stride than window {OWN_WAYS}")
        w.before[i], w.after[i] = same_pads(total * (total > 0), auto)
    return w


def _as_given(attr, kernel) -> Windows:
    ones = [1] * len(kernel)
    strides, dilations = (list(attr(name) or ones) for name in ("strides", "dilations"))
    pads = attr("pads") if attr("auto_pad") in ("NOTSET", None) else None
    pads = list(pads or [0] * (2 * len(kernel)))
    return Windows(list(kernel), strides, dilations, pads[: len(kernel)], pads[len(kernel) :])


def transposed_windows(attr, refuse, lengths, kernel) -> Windows:
    """The windows of the convolution that a ConvTranspose transposes, likewise."""
    w, auto, shape = _as_given(attr, kernel), attr("auto_pad"), attr("output_shape")
    if auto not in ("SAME_UPPER", "SAME_LOWER") and not shape:
        return w
    fill = attr("output_padding") or [0] * len(kernel)
    for i, (n, extent, stride) in enumerate(zip(lengths, w.extents, w.strides, strict=True)):
        if isinstance(n, str | None):
            raise refuse(f"auto_pad and output_shape need a static image size; {PADS}")
        total = stride * (n - 1) + fill[i] + extent - (shape[i] if shape else n * stride)
        w.before[i], w.after[i] = same_pads(total * (total > 0), auto)
    return w


def kernel_of(attr, refuse, shape) -> tuple[int, ...]:
    """The spatial lengths of a kernel, from the attribute or the shape of the weights."""
    kernel = attr("kernel_shape") or (shape and shape[2:])
    if not kernel or not is_static(kernel):
        raise refuse("the shape of its kernel is unknown; write the attribute kernel_shape")
    return tuple(kernel)


def scatter_windows(g, node, dy, kernel, x, w: Windows, group: int):
    """The adjoint of sliding windows over x: each entry of dY spreads over its window."""
    common = {"strides": w.strides, "dilations": w.dilations, "group": group}
    common["kernel_shape"] = w.kernel
    spare = _spare(x, node.y[0], w)
    if spare is not None:
        # What the windows cover, from the start of the padding, is cropped or filled up to x.
        pads, fill = [*w.before, *(max(r, 0) for r in spare)], [max(-r, 0) for r in spare]
        return g.op("ConvTranspose", dy, kernel, pads=pads, output_padding=fill, **common)
    # The image's size is known at run time only: fill up generously, and cut.
    fill = [max(s - 1, 0) for s in w.strides]
    pads = [*w.before, *[0] * len(w.kernel)]
    wide = g.op("ConvTranspose", dy, kernel, pads=pads, output_padding=fill, **common)
    axes = list(range(2, x.rank))
    return g.op("Slice", wide, [0] * len(axes), g.dims_of(x, axes), axes)


def _spare(x, y, w: Windows) -> list[int] | None:
    """How far the last windows reach beyond the image; None where a length is open."""
    if y.shape is None or not is_static((*x.shape[2:], *y.shape[2:])):
        return None
    rows = zip(x.shape[2:], y.shape[2:], w.strides, w.extents, w.before, strict=True)
    return [(m - 1) * s + e - b - n for n, m, s, e, b in rows]


@register_gradient("Conv", ranked=[0], limits={**AUTO_PAD, **GROUPS, **KERNEL})
def conv(g, node, dy):
    """dX = the transposed convolution of dY with W; dB = sum dY over batch and space;

    dW[m, c, k] = sum over n, o of dY[n, m, o] X[n, c, o stride + k dilation - pad]: a convolution
    of X with dY whose strides and dilations have changed places.
    """
    x, weight = node.x[0], node.x[1]
    kernel = kernel_of(node.attr, node.refuse, weight.shape)
    w, group = windows(node.attr, node.refuse, x.shape[2:], kernel), node.attr("group")
    dx = _image_gradient(g, node, dy, x, weight, w, group) if node.needs(0) else None
    dw = _weight_gradient(g, node, dy, x, w, group) if node.needs(1) else None
    return dx, dw, _bias_gradient(g, node, dy)


def _bias_gradient(g, node, dy):
    if node.input(2) is not None:
        return g.sum(dy, [0, *range(2, node.x[0].rank)], keepdims=False)


@register_gradient(
    "ConvTranspose",
    ranked=[0],
    limits={
        "auto_pad": "NOTSET or VALID, where the image's size is open",
        "output_shape": "left out, where the image's size is open",
        **KERNEL,
    },
)
def conv_transpose(g, node, dy):
    """dX = the convolution of dY with W; dW = that of dY with X, as for a convolution whose image
    is Y; dB = sum dY over batch and space."""
    x, weight = node.x[0], node.x[1]
    kernel = kernel_of(node.attr, node.refuse, weight.shape)
    w, group = transposed_windows(node.attr, node.refuse, x.shape[2:], kernel), node.attr("group")
    pads = [*w.before, *w.after]
    common = {"strides": w.strides, "dilations": w.dilations, "pads": pads, "group": group}
    dx = g.op("Conv", dy, weight, **common)
    dw = None
    if node.needs(1):
        images, _, *lengths = dy.shape or (None,) * x.rank
        filters = weight.shape[1]
        channels = filters * group if isinstance(filters, int) else None
        g.refine(dy.name, (images, channels, *lengths))
        dw = _weight_gradient(g, node, x, dy, w, group)
    return dx, dw, _bias_gradient(g, node, dy)


def _image_gradient(g, node, dy, x, weight, w: Windows, group: int):
    channels, filters = x.shape[1], weight.shape[0]
    if group == 1 or channels == filters == group:
        return scatter_windows(g, node, dy, weight, x, w, group)
    # The reference evaluator gets other groups of a transposed convolution wrong: one by one.
    if not isinstance(filters, int):
        raise node.refuse("groups need a static number of filters: declare it")
    sizes = [filters // group] * group
    split = (g.op("Split", t, sizes, outputs=group, axis=a) for t, a in ((dy, 1), (weight, 0)))
    parts = zip(*split, strict=True)
    return g.op("Concat", *(scatter_windows(g, node, d, k, x, w, 1) for d, k in parts), axis=1)


def _weight_gradient(g, node, dy, x, w: Windows, group: int):
    spatial = list(range(2, x.rank))
    swap = [1, 0, *spatial]
    # Pad at the end just as far as the windows go, and no weights beyond the kernel come out.
    spare = _spare(x, dy, w)
    fits = spare is not None and min(spare, default=0) >= 0
    w = w._replace(after=spare) if fits else w
    if not isinstance(x.shape[0], int) and (any([*w.before, *w.after]) or max(w.dilations) > 1):
        # The batch becomes the channels, and onnxruntime never returns from a padded or strided
        # convolution of none: the padding is done beforehand, and one image of zeros added.
        more = int(max(w.dilations) > 1)
        x = g.op("Pad", x, [0, 0, *w.before, more, 0, *w.after])
        if more:
            dy = g.op("Pad", dy, [0] * len(swap) + [1] + [0] * (len(swap) - 1))
        w = w._replace(before=[0] * len(spatial), after=[0] * len(spatial))
    image, filters = g.transpose(x, swap), g.transpose(dy, swap)
    if group > 1:
        image = _group_images(g, node, x, group, spatial)
    pads = [*w.before, *w.after]
    dw = g.op(
        "Conv", image, filters, strides=w.dilations, dilations=w.strides, pads=pads, group=group
    )
    if not fits:  # rows that no window reached would give weights beyond the kernel
        dw = g.op("Slice", dw, [0] * len(spatial), list(w.kernel), spatial)
    return g.transpose(dw, swap)


def _group_images(g, node, x, group, spatial):
    """(N, group * c, ...) to (c, group * N, ...)."""
    channels = x.shape[1]
    if not isinstance(channels, int):
        raise node.refuse("groups need a static number of channels: declare it")
    dims = g.dims_of(x, spatial)
    c = channels // group
    apart = g.reshape(x, g.joined(-1, group, c, dims))
    turned = g.transpose(apart, [2, 1, 0, *[s + 1 for s in spatial]])
    return g.reshape(turned, g.joined(c, -1, dims))


@register_gradient("Col2Im", limits={"block_shape": "a constant"})
def col2im(g, node, dy):
    """Y adds up overlapping blocks of C channels, in columns (N, C block, L): dX is the blocks of
    dY, each entry of a block picked by a convolution of one channel."""
    x, _, block = node.x
    if block.value is None:
        raise node.refuse("its block_shape must be a constant")
    kernel, size = block.value.tolist(), prod(block.value.tolist())
    pick = g.constant(np.eye(size).reshape(size, 1, *kernel), x.dtype)
    settings = {name: node.attr(name) for name in ("strides", "dilations", "pads")}
    image = g.joined(-1, 1, node.x[1])
    return g.reshape_like(g.op("Conv", g.op("Reshape", dy, image), pick, **settings), x)
