r"""Normalisation: with :math:`\hat x = (x - \mu) / \sigma`, the mean and the standard deviation
depend on every entry that they were taken over."""

from helpers.onnx_grad.rules.table import register_gradient
from helpers.onnx_grad.tensor import HALF


@register_gradient("LayerNormalization")
def layer_normalization(g, node, dy, dmean=None, dinv=None):
    r"""Y = scale xhat + bias over the last axes, xhat = (X - mean) r, r = 1 / sqrt(var + eps).

    With u = dY scale: dX = r (u - mean(u) - xhat mean(u xhat)), dscale = sum dY xhat,
    dbias = sum dY.  The optional outputs add dmean / n and -dr r^2 xhat / n.
    """
    x, scale, bias = node.x[0], node.x[1], node.input(2)
    axis = node.attr("axis")
    if x.rank is not None:
        axes = list(range(axis % x.rank, x.rank))
    elif axis < 0:
        axes = list(range(axis, 0))
    else:
        raise node.refuse("the rank of its input is unknown")
    kind = x.dtype
    wide = 1 if kind in HALF else kind  # half precision is normalised in single precision
    x_wide = x.cast(wide)
    centred = x_wide - g.reduce("ReduceMean", x_wide, axes)
    variance = g.reduce("ReduceMean", centred * centred, axes)
    r = 1.0 / g.op("Sqrt", variance + node.attr("epsilon"))
    xhat = centred * r
    dx = dscale = dbias = None
    if dy is not None:
        u = (dy * scale).cast(wide)
        shift, tilt = g.reduce("ReduceMean", u, axes), g.reduce("ReduceMean", u * xhat, axes)
        dx = r * (u - shift - xhat * tilt)
        dscale = g.reduce_to((dy.cast(wide) * xhat).cast(kind), scale)
        dbias = None if bias is None else g.reduce_to(dy, bias)
    for d, direction in ((dmean, None), (dinv, -(r * r * xhat))):
        if d is not None:
            part = d.cast(wide) / g.reduce("ReduceSum", g.filled(x_wide, 1.0), axes)
            term = g.expand_like(part, x_wide) if direction is None else part * direction
            dx = term if dx is None else dx + term
    return dx.cast(kind), dscale, dbias


@register_gradient("BatchNormalization")
def batch_normalization(g, node, dy, *running):
    """Inference: Y = scale (X - mean) r + B with r = 1 / sqrt(var + eps), one of each a channel.

    dX = dY scale r, dscale = sum dY (X - mean) r, dB = sum dY, dmean = -scale r sum dY,
    dvar = -scale r^3 / 2 sum dY (X - mean), the sums over all axes but the channels'.
    """
    x, scale, bias, mean, var = node.x
    if node.attr("training_mode", 0) or len([y for y in node.y if y is not None]) > 1:
        raise node.refuse("training_mode=1; only inference has a rule")
    if x.rank is None:
        raise node.refuse("the rank of its input is unknown")
    others = [a for a in range(x.rank) if a != 1]
    after = range(1, x.rank - 1)
    r = 1.0 / g.op("Sqrt", var + node.attr("epsilon"))
    centred = x - g.unsqueeze(mean, after)
    gain = scale * r
    total = g.sum(dy, others, keepdims=False)
    slope = g.sum(dy * centred, others, keepdims=False)
    return (
        dy * g.unsqueeze(gain, after),
        slope * r,
        total,
        -(gain * total).cast(mean.dtype),
        (gain * r * r * slope * -0.5).cast(var.dtype),
    )


@register_gradient("InstanceNormalization")
def instance_normalization(g, node, dy):
    """As layer normalisation, over the spatial axes, with a scale and a bias for each channel."""
    x, scale, bias = node.x
    if x.rank is None:
        raise node.refuse("the rank of its input is unknown")
    axes, after = list(range(2, x.rank)), range(1, x.rank - 1)
    centred = x - g.reduce("ReduceMean", x, axes)
    r = 1.0 / g.op("Sqrt", g.reduce("ReduceMean", centred * centred, axes) + node.attr("epsilon"))
    xhat = centred * r
    u = dy * g.unsqueeze(scale, after)
    shift, tilt = g.reduce("ReduceMean", u, axes), g.reduce("ReduceMean", u * xhat, axes)
    everywhere = [0, *axes]
    return (
        r * (u - shift - xhat * tilt),
        g.sum(dy * xhat, everywhere, keepdims=False),
        g.sum(dy, everywhere, keepdims=False),
    )


@register_gradient("MeanVarianceNormalization")
def mean_variance_normalization(g, node, dy):
    """Y = (X - mean) / std: dX = (dY - mean(dY) - Y mean(dY Y)) / std, the means over the axes."""
    (x,), (y,), axes = node.x, node.y, node.attr("axes")
    centred = x - g.reduce("ReduceMean", x, axes)
    std = g.op("Sqrt", g.reduce("ReduceMean", centred * centred, axes)) + 1e-9
    part = dy - g.reduce("ReduceMean", dy, axes) - y * g.reduce("ReduceMean", dy * y, axes)
    return part / std


@register_gradient("LpNormalization")
def lp_normalization(g, node, dy):
    """Y = X / n along an axis: dX = (dY - dn/dX sum(dY Y)) / n; dn/dX = Y (p = 2), sign X (p = 1);
    0 where n = 0."""
    (x,), (y,) = node.x, node.y
    axes = [node.attr("axis")]
    norm = g.reduce("ReduceL2" if node.attr("p") == 2 else "ReduceL1", x, axes)
    slope = y if node.attr("p") == 2 else g.op("Sign", x)
    part = dy - slope * g.sum(dy * y, axes)
    zero = norm.equals(0.0)
    return g.where(zero, 0.0, part / g.where(zero, 1.0, norm))
