r"""Activations and softmax."""

import math

from helpers.onnx_grad.rules.table import no_gradient, register_gradient

register_gradient("Hardmax", no_gradient)


@register_gradient("PRelu")
def prelu(g, node, dy):
    """dX = dY where X > 0, else s dY; ds = X dY where X < 0, un-broadcast."""
    x, slope = node.x
    dslope = g.where(x < 0.0, dy * x, 0.0)
    return g.where(x > 0.0, dy, dy * slope), g.reduce_to(dslope, slope)


@register_gradient("HardSwish")
def hard_swish(g, node, dy):
    """Y = X h, h = clip(X / 6 + 1/2, 0, 1): dX = dY (h + X / 6 where 0 < h < 1)."""
    (x,) = node.x
    h = x * (1 / 6) + 0.5
    inside = g.op("And", h > 0.0, h < 1.0)
    return dy * g.where(inside, h + x * (1 / 6), (x > 0.0).cast(x.dtype))


@register_gradient("Softsign")
def softsign(g, node, dy):
    """Y = X / (1 + abs X): dX = dY / (1 + abs X)^2."""
    width = 1.0 + g.op("Abs", node.x[0])
    return dy / (width * width)


@register_gradient("Mish")
def mish(g, node, dy):
    """Y = X t, t = tanh(softplus(X)): dX = dY (t + X (1 - t^2) sigmoid(X))."""
    (x,) = node.x
    t = g.op("Tanh", g.op("Softplus", x))
    return dy * (t + x * (1.0 - t * t) * g.op("Sigmoid", x))


@register_gradient("Swish")
def swish(g, node, dy):
    """Y = X s, s = sigmoid(alpha X): dX = dY (s + alpha Y (1 - s))."""
    (x,), (y,) = node.x, node.y
    alpha = node.attr("alpha")
    s = g.op("Sigmoid", x * alpha)
    return dy * (s + y * (1.0 - s) * alpha)


@register_gradient("Gelu")
def gelu(g, node, dy):
    """Y = X Phi(X): dX = dY (Phi(X) + X phi(X)).

    With approximate="tanh", Phi = (1 + t) / 2, t = tanh(c (X + a X^3)), c = sqrt(2 / pi):
    Phi' = (1 - t^2) c (1 + 3 a X^2) / 2.
    """
    (x,) = node.x
    if node.attr("approximate") == "tanh":
        c, a = math.sqrt(2 / math.pi), 0.044715
        square = x * x
        t = g.op("Tanh", x * (square * (c * a) + c))
        slope = (1.0 - t * t) * (square * (1.5 * c * a) + 0.5 * c)
        return dy * ((t * 0.5 + 0.5) + x * slope)
    cumulative = g.op("Erf", x * math.sqrt(0.5)) * 0.5 + 0.5
    density = g.op("Exp", x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    return dy * (cumulative + x * density)


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
