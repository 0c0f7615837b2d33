"""What a translation is given, the table they are in, and what most of them need.

A translation is a function of a :class:`Node` and of the symbols of its inputs (None, or nothing at
the end, for an optional one that is left out); it returns the symbol of the output, or a tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
from onnx import NodeProto, TensorProto
from onnx.helper import get_attribute_value, tensor_dtype_to_np_dtype
from onnx.numpy_helper import to_array
from pytensor.gradient import disconnected_grad
from pytensor.tensor import TensorConstant, TensorVariable

TRANSLATIONS: dict[tuple[str, str], Callable] = {}  # (domain, operator) -> translation


def translates(*operators: str, domain: str = "") -> Callable[[Callable], Callable]:
    """Enter the decorated function into the table, for each of the operators."""

    def enter(translation: Callable) -> Callable:
        for operator in operators:
            TRANSLATIONS[domain, operator] = translation
        return translation

    return enter


class Node(NamedTuple):
    """One node of an ONNX graph, its attributes as Python and NumPy values."""

    operator: str
    domain: str
    name: str
    version: int  # of the operator set, which decides what the operator means
    attributes: Mapping[str, Any]
    n_outputs: int
    dtype: np.dtype | None  # what real numbers are computed in; None: as the model says

    @classmethod
    def read(cls, proto: NodeProto, version: int, dtype: np.dtype | None) -> Node:
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        attributes = {a.name: _value(get_attribute_value(a)) for a in proto.attribute}
        name = proto.name or next((f"-> {o}" for o in proto.output if o), "")
        return cls(proto.op_type, domain, name, version, attributes, len(proto.output), dtype)

    def __str__(self) -> str:
        return f"{self.operator} (domain '{self.domain or 'ai.onnx'}', node '{self.name}')"

    def attribute(self, name: str, default=None):
        return self.attributes.get(name, default)

    def refuse(self, why: str) -> NotImplementedError:
        return NotImplementedError(f"{self}: {why}")

    def parameter(self, name: str, given: TensorVariable | None = None, default=None):
        """A parameter that older operator sets have as an attribute, newer ones as an input.

        Its value as an array: what an input computes is not known when the graph is built.
        """
        if given is None:
            value = self.attribute(name)
            return default if value is None else np.asarray(value)
        value = known(given)
        if value is None:
            raise self.refuse(f"{name!r} must be a constant, here the graph computes it")
        return value

    def axes(self, given: TensorVariable | None = None) -> tuple[int, ...] | None:
        """Parameter ``axes``; None if there is none or it is empty."""
        axes = self.parameter("axes", given)
        return None if axes is None or axes.size == 0 else tuple(int(a) for a in axes.ravel())

    def real(self, dtype) -> np.dtype:
        """The type to compute in, for a type of the model."""
        dtype = np.dtype(dtype)
        return self.dtype if self.dtype is not None and dtype.kind == "f" else dtype

    def onnx_dtype(self, code: int) -> np.dtype:
        return self.real(numpy_dtype(code, str(self)))


def _value(value):
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return [_value(v) for v in value]
    return to_array(value) if isinstance(value, TensorProto) else value


def numpy_dtype(code: int, what: str) -> np.dtype:
    """NumPy's type for one of ONNX; ValueError for those that NumPy and PyTensor do not have."""
    dtype = np.dtype(tensor_dtype_to_np_dtype(code)) if code else np.dtype(object)
    if not (dtype.isbuiltin == 1 and dtype.kind in "fiub"):
        raise ValueError(
            f"{what} has type {TensorProto.DataType.Name(code)}, which PyTensor does not have"
        )
    return dtype


def known(x: TensorVariable | None) -> np.ndarray | None:
    """The value of a symbol that does not depend on inputs and weights; None if it does."""
    return x.data if isinstance(x, TensorConstant) else None


def number(x: TensorVariable, value) -> TensorConstant:
    """A constant of x's type, so that it changes no type it is combined with."""
    return pt.constant(np.asarray(value, dtype=x.dtype))


def select(condition: TensorVariable, x, y) -> TensorVariable:
    """Entries of x where the condition holds, else of y.

    Comparing has no derivative.  PyTensor would send one back all the same, zeros in float64, and
    whatever they are added to would be float64 from there on.
    """
    return pt.switch(disconnected_grad(condition), x, y)


def size(x: TensorVariable, axis: int):
    """Length of an axis: an int where it is known, else a symbol."""
    static = x.type.shape[axis]
    return x.shape[axis] if static is None else static


def sizes(x: TensorVariable) -> list:
    return [size(x, axis) for axis in range(x.ndim)]


def product(lengths):
    """Product of ints and symbols."""
    total = 1
    for length in lengths:
        total = total * length
    return total


def larger(n, m):
    """The larger of two lengths, ints or symbols."""
    return max(n, m) if isinstance(n, int) and isinstance(m, int) else pt.maximum(n, m)


def clip(x: TensorVariable, low: TensorVariable | None, high: TensorVariable | None):
    """Between low and high; the derivative at a bound is 1, and NaN stays NaN."""
    if low is not None:
        x = select(x < low, low, x)
    if high is not None:
        x = select(x > high, high, x)
    return x
