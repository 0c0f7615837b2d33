"""Operators that act entry by entry, with NumPy's broadcasting.

Where a function has a kink the derivative is onnxruntime-training's: 0 for Relu and Abs at 0, 1 for
Clip at its bounds, equal shares to equal arguments of Max and Min.
"""

from functools import reduce
from operator import add

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import disconnected_grad

from helpers.onnx_grad.translation.node import Node, clip, number, of_inputs, select, translates

LIKEWISE = """Add Sub Mul Neg Abs Sign Floor Ceil Exp Log Sqrt Reciprocal Erf Sigmoid Softplus Sin
    Cos Tan Sinh Cosh Tanh IsNaN"""
LOGIC = {"And": pt.and_, "Or": pt.or_, "Xor": pt.xor, "Not": pt.invert}
COMPARISONS = {"Equal": pt.eq, "Less": pt.lt, "LessOrEqual": pt.le, "Greater": pt.gt}
COMPARISONS["GreaterOrEqual"] = pt.ge

# What an operator is of its inputs.
of_inputs(
    {name: getattr(pt, name.lower()) for name in LIKEWISE.split()}
    | {f"A{name}": getattr(pt, f"arc{name}") for name in "sin cos tan sinh cosh tanh".split()}
    | LOGIC
    | {f"Bitwise{name}": function for name, function in LOGIC.items()}
    | {
        "Identity": lambda x: x,
        "Mean": lambda *terms: reduce(add, terms) / number(terms[0], len(terms)),
        "Mish": lambda x: x * pt.tanh(pt.softplus(x)),
        "PRelu": lambda x, slope: select(x > number(x, 0), x, slope * x),
        "Pow": lambda x, y: pt.pow(x, y).astype(x.dtype),
        "Relu": lambda x: select(x <= number(x, 0), number(x, 0), x),
        "Round": lambda x: pt.round(x, mode="half_to_even"),
        "Softsign": lambda x: x / (number(x, 1) + pt.abs(x)),
        "Sum": lambda *terms: reduce(add, terms),
        "Where": select,
    }
)

# What an operator is of its input x and its attributes, constants of the type of x.
OF_ATTRIBUTES = {
    "Celu": lambda x, a: _exponential_unit(x, a("alpha"), number(x, 1), a("alpha")),
    "Elu": lambda x, a: _exponential_unit(x, a("alpha"), number(x, 1), number(x, 1)),
    "HardSigmoid": lambda x, a: _hard_sigmoid(x, a("alpha"), a("beta")),
    "HardSwish": lambda x, a: x * _hard_sigmoid(x, number(x, 1 / 6), number(x, 0.5)),
    "LeakyRelu": lambda x, a: select(x > number(x, 0), x, a("alpha") * x),
    "Selu": lambda x, a: _exponential_unit(x, a("alpha"), a("gamma"), number(x, 1)),
    "Shrink": lambda x, a: select(
        x < -a("lambd"), x + a("bias"), select(x > a("lambd"), x - a("bias"), number(x, 0))
    ),
    "Swish": lambda x, a: x * pt.sigmoid(a("alpha") * x),
    "ThresholdedRelu": lambda x, a: select(x > a("alpha"), x, number(x, 0)),
}


@translates(*OF_ATTRIBUTES)
def _of_attributes(node: Node, x):
    return OF_ATTRIBUTES[node.op_type](x, lambda name: number(x, node.attr(name)))


@translates(*COMPARISONS)
def _compare(node: Node, x, y):
    return disconnected_grad(COMPARISONS[node.op_type](x, y))  # see `select`


@translates("Div")
def _div(node, x, y):
    if x.dtype.startswith(("int", "uint")):  # towards zero, as in C
        quotient = pt.int_div(pt.abs(x), pt.abs(y))
        return (quotient * pt.sign(x) * pt.sign(y)).astype(x.dtype)
    return x / y


@translates("Mod")
def _mod(node, x, y):
    if not node.attr("fmod"):
        return pt.mod(x, y)
    towards_zero = pt.abs(x) - pt.abs(y) * pt.floor(pt.abs(x) / pt.abs(y))
    return (pt.sign(x) * towards_zero).astype(x.dtype)


@translates("IsInf")
def _isinf(node, x):
    positive, negative = node.attr("detect_positive"), node.attr("detect_negative")
    if positive and negative:
        return pt.isinf(x)
    infinity = number(x, np.inf if positive else -np.inf)
    return pt.eq(x, infinity) if positive or negative else pt.zeros_like(x, dtype="bool")


@translates("Max", "Min")
def _extremum(node, *inputs):
    def larger(one, other):
        (x, n), (y, m) = one, other  # values, and how many arguments have them
        first, second = (x > y, y > x) if node.op_type == "Max" else (x < y, y < x)
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
    if low is None and node.attr("min") is not None:  # attributes before operator set 11
        low = number(x, node.attr("min"))
    if high is None and node.attr("max") is not None:
        high = number(x, node.attr("max"))
    return clip(x, low, high)


# --- activations ----------------------------------------------------------------------------------


def _exponential_unit(x, alpha, gamma, width):
    # The exponential of the negative part alone: where x is large it would overflow unseen, and
    # infinity times the switch's 0 is NaN in the gradient.
    below = alpha * pt.expm1(select(x > number(x, 0), number(x, 0), x) / width)
    return gamma * select(x > number(x, 0), x, below)


def _hard_sigmoid(x, alpha, beta):
    return clip(alpha * x + beta, number(x, 0), number(x, 1))


@translates("Gelu")
def _gelu(node, x):
    half, one = number(x, 0.5), number(x, 1)
    if node.attr("approximate") == "tanh":
        inner = number(x, np.sqrt(2 / np.pi)) * (x + number(x, 0.044715) * x**3)
        return half * x * (one + pt.tanh(inner))
    return half * x * (one + pt.erf(x * number(x, np.sqrt(0.5))))
