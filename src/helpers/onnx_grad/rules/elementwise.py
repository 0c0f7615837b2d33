r"""Elementwise operators and activations: :math:`\bar X = \bar Y \odot f'(X)`, summed over the
broadcast axes."""

import functools
import math

import numpy as np

from helpers.onnx_grad.rules.table import no_gradient, register_gradient
from helpers.onnx_grad.tensor import REAL

CONSTANT = "Floor Ceil Round Sign Hardmax EyeLike RandomNormalLike RandomUniformLike"
for name in CONSTANT.split():
    register_gradient(name, no_gradient)


# How dX follows from dY, X and Y, where Y is a function of X entry by entry; a is for attributes.
ENTRYWISE = {
    "Identity": ("dX = dY.", lambda g, dy, x, y, a: dy),
    "Neg": ("dX = -dY.", lambda g, dy, x, y, a: -dy),
    "Abs": ("dX = dY sign(X), with sign(0) = 0.", lambda g, dy, x, y, a: dy * g.op("Sign", x)),
    "Reciprocal": ("Y = 1 / X: dX = -dY Y^2.", lambda g, dy, x, y, a: -(dy * (y * y))),
    "Sqrt": ("dX = dY / (2 Y).", lambda g, dy, x, y, a: dy / (y + y)),
    "Exp": ("dX = dY Y.", lambda g, dy, x, y, a: dy * y),
    "Log": ("dX = dY / X.", lambda g, dy, x, y, a: dy / x),
    "Sin": ("dX = dY cos X.", lambda g, dy, x, y, a: dy * g.op("Cos", x)),
    "Cos": ("dX = -dY sin X.", lambda g, dy, x, y, a: -(dy * g.op("Sin", x))),
    "Tan": ("dX = dY (1 + Y^2).", lambda g, dy, x, y, a: dy * (1.0 + y * y)),
    "Sinh": ("dX = dY cosh X.", lambda g, dy, x, y, a: dy * g.op("Cosh", x)),
    "Cosh": ("dX = dY sinh X.", lambda g, dy, x, y, a: dy * g.op("Sinh", x)),
    "Asin": ("dX = dY / sqrt(1 - X^2).", lambda g, dy, x, y, a: dy / g.op("Sqrt", 1.0 - x * x)),
    "Acos": ("dX = -dY / sqrt(1 - X^2).", lambda g, dy, x, y, a: -(dy / g.op("Sqrt", 1.0 - x * x))),
    "Atan": ("dX = dY / (1 + X^2).", lambda g, dy, x, y, a: dy / (1.0 + x * x)),
    "Asinh": ("dX = dY / sqrt(X^2 + 1).", lambda g, dy, x, y, a: dy / g.op("Sqrt", x * x + 1.0)),
    "Acosh": ("dX = dY / sqrt(X^2 - 1).", lambda g, dy, x, y, a: dy / g.op("Sqrt", x * x - 1.0)),
    "Atanh": ("dX = dY / (1 - X^2).", lambda g, dy, x, y, a: dy / (1.0 - x * x)),
    "Erf": (
        "dX = dY (2 / sqrt(pi)) exp(-X^2).",
        lambda g, dy, x, y, a: dy * (g.op("Exp", -(x * x)) * (2.0 / math.sqrt(math.pi))),
    ),
    # A product with a mask takes less time than Where does in onnxruntime.
    "Relu": (
        "dX = dY [Y > 0]: the derivative at 0 is 0.",
        lambda g, dy, x, y, a: dy * (y > 0.0).cast(dy.dtype),
    ),
    "LeakyRelu": (
        "dX = dY where X > 0, else alpha dY.",
        lambda g, dy, x, y, a: g.where(x > 0.0, dy, dy * a("alpha")),
    ),
    "ThresholdedRelu": (
        "dX = dY where X > alpha.",
        lambda g, dy, x, y, a: g.where(x > a("alpha"), dy, 0.0),
    ),
    "Shrink": (
        "Y = X less or plus the bias where abs X > lambd, else 0: dX = dY there.",
        lambda g, dy, x, y, a: g.where(g.op("Abs", x) > a("lambd"), dy, 0.0),
    ),
    "Elu": (
        "dX = dY where X > 0, else dY alpha exp(X) = dY (Y + alpha).",
        lambda g, dy, x, y, a: g.where(x > 0.0, dy, dy * (y + a("alpha"))),
    ),
    "Celu": (
        "dX = dY where X > 0, else dY exp(X / alpha) = dY (Y / alpha + 1).",
        lambda g, dy, x, y, a: g.where(x > 0.0, dy, dy * (y / a("alpha") + 1.0)),
    ),
    "Selu": (
        "dX = gamma dY where X > 0, else dY gamma alpha exp(X) = dY (Y + gamma alpha).",
        lambda g, dy, x, y, a: g.where(
            x > 0.0, dy * a("gamma"), dy * (y + a("alpha") * a("gamma"))
        ),
    ),
    "Sigmoid": ("dX = dY Y (1 - Y).", lambda g, dy, x, y, a: dy * (y * (1.0 - y))),
    "Tanh": ("dX = dY (1 - Y^2).", lambda g, dy, x, y, a: dy * (1.0 - y * y)),
    "HardSigmoid": (
        "dX = alpha dY where 0 < Y < 1.",
        lambda g, dy, x, y, a: g.where(g.op("And", y > 0.0, y < 1.0), dy * a("alpha"), 0.0),
    ),
    "Softplus": ("dX = dY sigmoid(X).", lambda g, dy, x, y, a: dy * g.op("Sigmoid", x)),
}
# Their slope is not finite at some X.
POLES = set("Reciprocal Sqrt Exp Log Sinh Cosh Asin Acos Acosh Atanh".split())


def _entrywise(op_type: str, formula: str, gradient) -> None:
    """Enter a rule; at a pole it is zero where a Where has chosen something else there."""

    def rule(g, node, dy):
        dx = gradient(g, dy, node.x[0], node.y[0], node.attr)
        return g.unless_hidden(dy, dx) if op_type in POLES else dx

    rule.__doc__ = formula
    register_gradient(op_type, rule)


__doc__ += "\n\n" + "\n".join(f"- {name}: {formula}" for name, (formula, _) in ENTRYWISE.items())
for name, row in ENTRYWISE.items():
    _entrywise(name, *row)


@register_gradient("Cast")
@register_gradient("CastLike")
def cast(g, node, dy):
    """dX = dY in the type of X, or as it is if X stores real numbers, in integers or 8 bits."""
    return dy.cast_like(node.x[0])


@register_gradient("Sub")
def sub(g, node, dy):
    """dA = dY, dB = -dY, each un-broadcast."""
    a, b = node.x
    return g.reduce_to(dy, a), -g.reduce_to(dy, b)


@register_gradient("Mul")
def mul(g, node, dy):
    """dA = dY B, dB = dY A, each un-broadcast."""
    a, b = node.x
    if a.name == b.name:
        return g.unless_hidden(dy, dy * (a + a)), None
    da, db = (dy * t if _is_finite(t) else g.unless_hidden(dy, dy * t) for t in (b, a))
    return g.reduce_to(da, a), g.reduce_to(db, b)


@register_gradient("Div")
def div(g, node, dy):
    """dA = dY / B, dB = -dY Y / B, each un-broadcast."""
    (a, b), (y,) = node.x, node.y
    da = dy / b
    if not (_is_finite(b) and b.value.all()):
        da = g.unless_hidden(dy, da)
    return g.reduce_to(da, a), -g.reduce_to(g.unless_hidden(da, da * y), b)


def _is_finite(t) -> bool:
    """Whether it is a constant of finite numbers."""
    return t.value is not None and bool(np.isfinite(t.value).all())


@register_gradient("Mod", settings=[1])
def mod(g, node, dy):
    """Y = A - k B, k whole: dA = dY, dB = -k dY = dY (Y - A) / B, each un-broadcast."""
    (a, b), (y,) = node.x, node.y
    return g.reduce_to(dy, a), g.reduce_to(dy * (y - a) / b, b)


@register_gradient("Pow", settings=[1])
def power(g, node, dy):
    """dX = dY p X^(p - 1), 0 where p = 0; dp = dY Y log X, 0 where X = 0."""
    (x, p), (y,) = node.x, node.y
    if p.value is not None and p.value.size == 1:
        n = float(p.value.item())
        slope = n if n in (0, 1) else x + x if n == 2 else g.op("Pow", x, n - 1.0) * n
        dx = dy * slope
    else:
        p_real = p.cast(x.dtype)
        slope = g.op("Pow", x, p_real - 1.0)
        dx = dy * g.where(p_real.equals(0.0), 0.0, p_real * slope)
    dx = g.unless_hidden(dy, dx)
    if p.dtype not in REAL:
        return g.reduce_to(dx, x), None
    log_x = g.op("Log", g.where(x.equals(0.0), 1.0, x))
    dp = g.unless_hidden(dy, dy * y * log_x)
    return g.reduce_to(dx, x), g.reduce_to(dp.cast(p.dtype), p)


@register_gradient("Add")
@register_gradient("Sum")
def sum_(g, node, dy):
    """dX_i = dY, un-broadcast."""
    return tuple(g.reduce_to(dy, x) for x in node.x)


@register_gradient("Mean")
def mean(g, node, dy):
    """dX_i = dY / k for k inputs, un-broadcast."""
    part = dy * (1.0 / len(node.x)) if len(node.x) > 1 else dy
    return tuple(g.reduce_to(part, x) for x in node.x)


@register_gradient("Max")
@register_gradient("Min")
def extremum(g, node, dy):
    """dX_i = dY [X_i = Y] / (number of inputs equal to Y): two that tie share half and half."""
    if len(node.x) == 1:
        return dy
    # Held against each other and not against Y: where onnxruntime computes with half precision in
    # single, X may be what Y was rounded from.
    hits = []
    for i, x in enumerate(node.x):
        others = [z for k, z in enumerate(node.x) if k != i]
        wins = [x >= z if node.op_type == "Max" else x <= z for z in others]
        hits.append(functools.reduce(functools.partial(g.op, "And"), wins).cast(dy.dtype))
    share = dy / g.op("Sum", *hits)
    return tuple(g.reduce_to(share * h, x) for h, x in zip(hits, node.x, strict=True))


@register_gradient("Where")
def where(g, node, dy):
    """dA = dY where the condition holds, dB = dY where it does not."""
    condition, a, b = node.x
    da, db = g.where(condition, dy, 0.0), g.where(condition, 0.0, dy)
    return None, g.reduce_to(da, a), g.reduce_to(db, b)


@register_gradient("Clip", settings=[1, 2])
def clip(g, node, dy):
    """Y = min(max(X, l), u): dX = dY where l <= X <= u; dl, du sum dY where the bound decides."""
    x, low, high = node.x[0], node.input(1), node.input(2)
    raised = x if low is None else g.op("Max", x, low)
    above = None if high is None else raised > high
    dlow = dhigh = None
    dx = dy
    if low is not None:
        below = x < low
        dx = g.where(below, 0.0, dx)
        dlow = g.where(below, dy, 0.0)
        dlow = dlow if above is None else g.where(above, 0.0, dlow)
        dlow = g.reduce_to(dlow, low)
    if high is not None:
        dx = g.where(above, 0.0, dx)
        dhigh = g.reduce_to(g.where(above, dy, 0.0), high)
    return dx, dlow, dhigh


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
