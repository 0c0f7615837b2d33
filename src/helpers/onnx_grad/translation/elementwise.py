"""Operators that act entry by entry, with NumPy's broadcasting.

Where a function has a kink the derivative is onnxruntime-training's: 0 for Relu and Abs at 0, 1 for
Clip at its bounds, equal shares to equal arguments of Max and Min.
"""

from __future__ import annotations

from functools import reduce
from operator import add

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import disconnected_grad

from helpers.onnx_grad.translation.node import TRANSLATIONS, Node, clip, number, select, translates

SAME = {  # the operators that PyTensor has under another name, or the same
    "Add": pt.add,
    "Sub": pt.sub,
    "Mul": pt.mul,
    "Neg": pt.neg,
    "Abs": pt.abs,
    "Sign": pt.sign,
    "Floor": pt.floor,
    "Ceil": pt.ceil,
    "Exp": pt.exp,
    "Log": pt.log,
    "Sqrt": pt.sqrt,
    "Reciprocal": pt.reciprocal,
    "Erf": pt.erf,
    "Sigmoid": pt.sigmoid,
    "Softplus": pt.softplus,
    "Sin": pt.sin,
    "Cos": pt.cos,
    "Tan": pt.tan,
    "Sinh": pt.sinh,
    "Cosh": pt.cosh,
    "Tanh": pt.tanh,
    "Asin": pt.arcsin,
    "Acos": pt.arccos,
    "Atan": pt.arctan,
    "Asinh": pt.arcsinh,
    "Acosh": pt.arccosh,
    "Atanh": pt.arctanh,
    "IsNaN": pt.isnan,
    "And": pt.and_,
    "Or": pt.or_,
    "Xor": pt.xor,
    "Not": pt.invert,
    "BitwiseAnd": pt.and_,
    "BitwiseOr": pt.or_,
    "BitwiseXor": pt.xor,
    "BitwiseNot": pt.invert,
    "Where": select,
}


COMPARISONS = {
    "Equal": pt.eq,
    "Less": pt.lt,
    "LessOrEqual": pt.le,
    "Greater": pt.gt,
    "GreaterOrEqual": pt.ge,
}


@translates(*COMPARISONS)
def _compare(node: Node, x, y):
    return disconnected_grad(COMPARISONS[node.operator](x, y))  # see `select`


def _plain(node: Node, *inputs):
    return SAME[node.operator](*inputs)


for operator in SAME:
    TRANSLATIONS["", operator] = _plain


@translates("Identity")
def _identity(node, x):
    return x


@translates("Div")
def _div(node, x, y):
    if x.dtype.startswith(("int", "uint")):  # towards zero, as in C
        quotient = pt.int_div(pt.abs(x), pt.abs(y))
        return (quotient * pt.sign(x) * pt.sign(y)).astype(x.dtype)
    return x / y


@translates("Mod")
def _mod(node, x, y):
    if not node.attribute("fmod", 0):
        return pt.mod(x, y)
    towards_zero = pt.abs(x) - pt.abs(y) * pt.floor(pt.abs(x) / pt.abs(y))
    return (pt.sign(x) * towards_zero).astype(x.dtype)


@translates("Pow")
def _pow(node, x, y):
    return pt.pow(x, y).astype(x.dtype)


@translates("Round")
def _round(node, x):
    return pt.round(x, mode="half_to_even")


@translates("IsInf")
def _isinf(node, x):
    positive, negative = node.attribute("detect_positive", 1), node.attribute("detect_negative", 1)
    if positive and negative:
        return pt.isinf(x)
    infinity = number(x, np.inf if positive else -np.inf)
    return pt.eq(x, infinity) if positive or negative else pt.zeros_like(x, dtype="bool")


@translates("Sum")
def _sum(node, *terms):
    return reduce(add, terms)


@translates("Mean")
def _mean(node, *terms):
    return reduce(add, terms) / number(terms[0], len(terms))


@translates("Max", "Min")
def _extremum(node, *inputs):
    def larger(one, other):
        (x, n), (y, m) = one, other  # values, and how many arguments have them
        first, second = (x > y, y > x) if node.operator == "Max" else (x < y, y < x)
        both = x
        if x.dtype.startswith("float"):
            # Equal arguments, and a NaN, fall through to the mean, which shares the derivative.
            both = select(pt.isinf(x), x, x + m / (n + m) * (y - x))
        return tuple(
            select(first, a, select(second, b, c)) for a, b, c in ((x, y, both), (n, m, n + m))
        )

    return reduce(larger, [(x, number(x, 1)) for x in inputs])[0]


@translates("Clip")
def _clip(node, x, low=None, high=None):
    if low is None and "min" in node.attributes:  # attributes before operator set 11
        low = number(x, node.attributes["min"])
    if high is None and "max" in node.attributes:
        high = number(x, node.attributes["max"])
    return clip(x, low, high)


# --- activations ----------------------------------------------------------------------------------


@translates("Relu")
def _relu(node, x):
    return select(x <= number(x, 0), number(x, 0), x)


@translates("LeakyRelu")
def _leaky_relu(node, x):
    return select(x > number(x, 0), x, number(x, node.attribute("alpha", 0.01)) * x)


@translates("PRelu")
def _prelu(node, x, slope):
    return select(x > number(x, 0), x, slope * x)


@translates("ThresholdedRelu")
def _thresholded_relu(node, x):
    return select(x > number(x, node.attribute("alpha", 1.0)), x, number(x, 0))


@translates("Elu")
def _elu(node, x):
    return _exponential_unit(x, node.attribute("alpha", 1.0), 1.0)


@translates("Selu")
def _selu(node, x):
    alpha = node.attribute("alpha", 1.67326319217681884765625)
    return _exponential_unit(x, alpha, node.attribute("gamma", 1.05070102214813232421875))


def _exponential_unit(x, alpha: float, gamma: float):
    # The exponential of the negative part alone: where x is large it would overflow unseen, and
    # infinity times the switch's 0 is NaN in the gradient.
    below = number(x, alpha) * pt.expm1(select(x > number(x, 0), number(x, 0), x))
    return number(x, gamma) * select(x > number(x, 0), x, below)


@translates("Celu")
def _celu(node, x):
    alpha = number(x, node.attribute("alpha", 1.0))
    below = alpha * pt.expm1(select(x > number(x, 0), number(x, 0), x) / alpha)
    return select(x > number(x, 0), x, below)


def _hard_sigmoid(x, alpha: float, beta: float):
    return clip(number(x, alpha) * x + number(x, beta), number(x, 0), number(x, 1))


@translates("HardSigmoid")
def _hard_sigmoid_of_node(node, x):
    return _hard_sigmoid(x, node.attribute("alpha", 0.2), node.attribute("beta", 0.5))


@translates("HardSwish")
def _hard_swish(node, x):
    return x * _hard_sigmoid(x, 1 / 6, 0.5)


@translates("Softsign")
def _softsign(node, x):
    return x / (number(x, 1) + pt.abs(x))


@translates("Mish")
def _mish(node, x):
    return x * pt.tanh(pt.softplus(x))


@translates("Swish")
def _swish(node, x):
    return x * pt.sigmoid(number(x, node.attribute("alpha", 1.0)) * x)


@translates("Gelu")
def _gelu(node, x):
    half, one = number(x, 0.5), number(x, 1)
    if node.attribute("approximate", "none") == "tanh":
        inner = number(x, np.sqrt(2 / np.pi)) * (x + number(x, 0.044715) * x**3)
        return half * x * (one + pt.tanh(inner))
    return half * x * (one + pt.erf(x * number(x, np.sqrt(0.5))))


@translates("Shrink")
def _shrink(node, x):
    bias, lambd = (number(x, node.attribute(k, v)) for k, v in (("bias", 0.0), ("lambd", 0.5)))
    return select(x < -lambd, x + bias, select(x > lambd, x - bias, number(x, 0)))
