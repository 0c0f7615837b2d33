"""Rules of differentiation, one file a family, in one table keyed by domain and operator."""

from helpers.onnx_grad.rules import (
    activation,
    conv,
    einsum,
    elementwise,
    index,
    loss,
    matmul,
    ml,
    norm,
    pool,
    reduce,
    shape,
)
from helpers.onnx_grad.rules.table import ABOUT, COMPOSED, RULES, register_gradient

__all__ = [
    "ABOUT",
    "COMPOSED",
    "RULES",
    "activation",
    "conv",
    "einsum",
    "elementwise",
    "index",
    "loss",
    "matmul",
    "ml",
    "norm",
    "pool",
    "reduce",
    "register_gradient",
    "shape",
]
