r"""Normalisation: with :math:`\hat x = (x - \mu) / \sigma`, the mean and the standard deviation
depend on every entry that they were taken over."""

from helpers.onnx_grad.rules.table import register_gradient
from helpers.onnx_grad.tensor import HALF


def _normalised(g, x, axes, epsilon, centred=True):
    """xhat = (x - mean) r and r = 1 / sqrt(mean square + eps); without the mean if not centred."""
    if centred:
        x = x - g.reduce("ReduceMean", x, axes)
    r = 1.0 / g.op("Sqrt", g.reduce("ReduceMean", x * x, axes) + epsilon)
    return x * r, r


def _through(g, u, xhat, r, axes, centred=True):
    """The adjoint of x -> xhat: r (u - mean(u) - xhat mean(u xhat)), without mean(u) if not
    centred."""
    tilt = xhat * g.reduce("ReduceMean", u * xhat, axes)
    return r * (u - g.reduce("ReduceMean", u, axes) - tilt if centred else u - tilt)


def _last_axes(node, x):
    """The axes from the attribute ``axis`` on."""
    axis = node.attr("axis")
    if x.rank is not None or axis < 0:
        return list(range(axis, 0) if x.rank is None else range(axis % x.rank, x.rank))
    raise node.refuse(f"axis={axis} where its input has unknown rank; count it from the end")


LAST_AXES = {"axis": "negative, where the rank of X is unknown"}
SINCE_14 = {"training_mode": "0, before opset 14"}


@register_gradient("LayerNormalization", limits=LAST_AXES)
def layer_normalization(g, node, dy, dmean=None, dinv=None):
    r"""Y = scale xhat + bias over the last axes, xhat = (X - mean) r, r = 1 / sqrt(var + eps).

    With u = dY scale: dX = r (u - mean(u) - xhat mean(u xhat)), dscale = sum dY xhat,
    dbias = sum dY.  The optional outputs add dmean / n and -dr r^2 xhat / n.
    """
    x, scale, bias = node.x[0], node.x[1], node.input(2)
    axes, kind = _last_axes(node, x), x.dtype
    wide = 1 if kind in HALF else kind  # half precision is normalised in single precision
    x_wide = x.cast(wide)
    xhat, r = _normalised(g, x_wide, axes, node.attr("epsilon"))
    dx = dscale = dbias = None
    if dy is not None:
        dx = _through(g, (dy * scale).cast(wide), xhat, r, axes)
        dscale = g.reduce_to((dy.cast(wide) * xhat).cast(kind), scale)
        dbias = None if bias is None else g.reduce_to(dy, bias)
    for d, direction in ((dmean, None), (dinv, -(r * r * xhat))):
        if d is not None:
            part = d.cast(wide) / g.reduce("ReduceSum", g.filled(x_wide, 1.0), axes)
            term = g.expand_like(part, x_wide) if direction is None else part * direction
            dx = term if dx is None else dx + term
    return dx.cast(kind), dscale, dbias


@register_gradient("RMSNormalization", limits=LAST_AXES)
def rms_normalization(g, node, dy):
    """Y = scale xhat over the last axes, xhat = X r, r = 1 / sqrt(mean(X^2) + eps).

    With u = dY scale: dX = r (u - xhat mean(u xhat)), dscale = sum dY xhat.
    """
    x, scale = node.x
    axes, kind = _last_axes(node, x), x.dtype
    wide = 1 if kind in HALF else kind
    xhat, r = _normalised(g, x.cast(wide), axes, node.attr("epsilon"), centred=False)
    dx = _through(g, dy.cast(wide) * scale.cast(wide), xhat, r, axes, centred=False)
    return dx.cast(kind), g.reduce_to((dy.cast(wide) * xhat).cast(scale.dtype), scale)


@register_gradient("BatchNormalization", settings=[3, 4], ranked=[0], limits=SINCE_14)
def batch_normalization(g, node, dy, *running):
    """Y = scale (X - mean) r + B with r = 1 / sqrt(var + eps), one of each a channel.

    Inference: dX = dY scale r, dscale = sum dY (X - mean) r, dB = sum dY, dmean = -scale r sum dY,
    dvar = -scale r^3 / 2 sum dY (X - mean), the sums over all axes but the channels'.

    With training_mode=1 mean and var are those of X, as in layer normalisation over these axes;
    and the outputs M = m input_mean + (1 - m) mean and V = m input_var + (1 - m) var, m the
    momentum, add (1 - m) (dM + 2 dV (X - mean)) / n to dX, n entries a channel.
    """
    x, scale, bias, mean, var = node.x
    others = [a for a in range(x.rank) if a != 1]
    after = range(1, x.rank - 1)
    if node.attr("training_mode", 0):
        return _batch_normalization_in_training(g, node, dy, running, others, after)
    if len([y for y in node.y if y is not None]) > 1:
        raise node.refuse("in training before opset 14; its form since then has a rule")
    r = 1.0 / g.op("Sqrt", var + node.attr("epsilon"))
    centred = x - g.unsqueeze(mean, after)
    gain = scale * r
    total = g.sum(dy, others, keepdims=False)
    slope = g.sum(dy * centred, others, keepdims=False)
    dx, dscale = dy * g.unsqueeze(gain, after), slope * r
    dmean, dvar = -(gain * total).cast(mean.dtype), (gain * r * r * slope * -0.5).cast(var.dtype)
    return dx, dscale, total, dmean, dvar


def _batch_normalization_in_training(g, node, dy, running, others, after):
    x, scale, bias, mean, var = node.x
    keep, new = node.attr("momentum"), 1.0 - node.attr("momentum")
    wide = 1 if x.dtype in HALF else x.dtype
    xhat, r = _normalised(g, x.cast(wide), others, node.attr("epsilon"))
    terms, dscale, dbias, old = [], None, None, [None, None]
    if dy is not None:
        dy = dy.cast(wide)
        terms.append(_through(g, dy * g.unsqueeze(scale.cast(wide), after), xhat, r, others))
        dscale = g.sum(dy * xhat, others, keepdims=False).cast(scale.dtype)
        dbias = g.sum(dy, others, keepdims=False).cast(bias.dtype)
    # The derivatives of mean and var by each entry, times n; xhat / r is X - mean.
    for i, (d, slope) in enumerate(zip(running, (None, xhat / r * 2.0), strict=False)):
        if d is not None:
            old[i] = d * keep
            part = g.unsqueeze(d.cast(wide), after) * new
            part = part / (g.size_of(x, wide) / g.size_of(d, wide))
            terms.append(g.expand_like(part, xhat) if slope is None else part * slope)
    return g.add_all(terms).cast(x.dtype), dscale, dbias, *old


@register_gradient("InstanceNormalization", ranked=[0])
def instance_normalization(g, node, dy):
    """As layer normalisation, over the spatial axes, with a scale and a bias for each channel."""
    x, scale, bias = node.x
    axes, after = list(range(2, x.rank)), range(1, x.rank - 1)
    xhat, r = _normalised(g, x, axes, node.attr("epsilon"))
    everywhere = [0, *axes]
    dx = _through(g, dy * g.unsqueeze(scale, after), xhat, r, axes)
    dscale, dbias = (g.sum(t, everywhere, keepdims=False) for t in (dy * xhat, dy))
    return dx, dscale, dbias


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
    return through_norm(g, dy, node.x[0], node.y[0], node.attr("p"), node.attr("axis"))


def through_norm(g, dy, x, y, p: int, axis: int):
    """The adjoint of dividing by the p-norm along an axis; 0 where that is 0."""
    norm = g.reduce(f"ReduceL{p}", x, [axis])
    slope = y if p == 2 else g.op("Sign", x)
    part = dy - slope * g.sum(dy * y, [axis])
    zero = norm.equals(0.0)
    return g.where(zero, 0.0, part / g.where(zero, 1.0, norm))


@register_gradient("Softmax")
def softmax(g, node, dy):
    """dX = Y (dY - sum(dY Y)), the sum along the axis; zero for a row of NaN that nothing uses."""
    (y,) = node.y
    if g.has_chosen_zeros(dy):
        # Where all is masked, Y is NaN; attention puts zeros there, and 0 * NaN would not be 0.
        y = g.where(g.op("And", g.op("IsNaN", y), dy.equals(0.0)), 0.0, y)
    weighted = dy * y
    return weighted - y * g.sum(weighted, [node.attr("axis")])


@register_gradient("LogSoftmax")
def log_softmax(g, node, dy):
    """dX = dY - exp(Y) sum(dY), the sum along the axis."""
    (y,) = node.y
    return dy - g.op("Exp", y) * g.sum(dy, [node.attr("axis")])
