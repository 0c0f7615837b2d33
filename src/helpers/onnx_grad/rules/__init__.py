"""Rules of differentiation, one file a family, in one table keyed by domain and operator."""

from importlib import import_module

from helpers.onnx_grad.attributes import known_attributes
from helpers.onnx_grad.rules.table import ABOUT, COMPOSED, RULES, register_gradient

FAMILIES = """conv einsum elementwise index loss matmul ml norm pool quantize recurrent
    reduce resize shape"""
for family in FAMILIES.split():
    import_module(f"{__name__}.{family}")
for key, about in ABOUT.items():
    if about.attributes is None:
        ABOUT[key] = about._replace(attributes=known_attributes(*key))

__all__ = ["ABOUT", "COMPOSED", "RULES", "register_gradient"]
