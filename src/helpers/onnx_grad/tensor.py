"""What is known of a tensor, and the handles that a gradient rule works with.

A shape is a tuple with an int for a known dimension, a string for a named one (the same name is
the same length) and None for an unknown one; or None where not even the rank is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from onnx import NodeProto, TensorProto, TypeProto, defs, helper

if TYPE_CHECKING:
    from helpers.onnx_grad.builder import Graph

REAL = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
# Reals that are only stored: a cotangent passes them in the type that they are cast to.
STORED = tuple(t for n, t in TensorProto.DataType.items() if n.startswith(("FLOAT8", "FLOAT4")))
HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
# Integer constants up to this size are kept at hand, for shapes, axes, pads and indices.
SMALL = 4096

Shape = tuple[int | str | None, ...] | None


class NoGradientError(NotImplementedError, ValueError):
    """An operator of the model cannot be differentiated; the message says which and where."""


class Info(NamedTuple):
    """Element type (None: unknown, or not a tensor) and static shape of a tensor."""

    dtype: int | None = None
    shape: Shape = None

    @classmethod
    def of(cls, proto: TypeProto) -> Info:
        """Read a type proto."""
        tensor = proto.tensor_type  # without fields, if it is of something else
        if not tensor.HasField("shape"):
            return cls(tensor.elem_type or None)
        dims = (d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor.shape.dim)
        return cls(tensor.elem_type or None, tuple(None if d == "" else d for d in dims))

    def proto(self) -> TypeProto:
        """Write a type proto."""
        return helper.make_tensor_type_proto(self.dtype or TensorProto.UNDEFINED, self.shape)


def same_dim(a, b) -> bool:
    """Whether two dimensions are equal for certain."""
    return a is not None and a == b


def same_shape(a: Shape, b: Shape) -> bool:
    """Whether two shapes are equal for certain."""
    return a is not None and b is not None and len(a) == len(b) and all(map(same_dim, a, b))


def compatible(a: Shape, b: Shape) -> bool:
    """Whether two shapes, as far as they are known, may be of one tensor."""
    if a is None or b is None:
        return True
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(
        m == n or not isinstance(m, int) or not isinstance(n, int) for m, n in pairs
    )


def is_static(shape: Shape) -> bool:
    """Whether every dimension is a number."""
    return shape is not None and all(isinstance(d, int) for d in shape)


def _binary(op_type: str, swapped: bool = False) -> Callable[[Tensor, object], Tensor]:
    """A method of Tensor that emits an elementwise operator of two operands."""

    def method(self, other):
        return self.graph.broadcast(op_type, *((other, self) if swapped else (self, other)))

    return method


class Tensor:
    """A value of the graph. Arithmetic on it emits nodes; numbers take its element type.

    Attributes
    ----------
    name : str
    graph : Graph
    dtype : int
        A ``TensorProto`` element type.
    shape : tuple or None
    """

    __slots__ = ("graph", "name")

    def __init__(self, name: str, graph: Graph):
        self.name, self.graph = name, graph

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, shape={self.shape})"

    @property
    def dtype(self) -> int | None:
        return self.graph.info(self.name).dtype

    @property
    def shape(self) -> Shape:
        return self.graph.info(self.name).shape

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    @property
    def value(self) -> np.ndarray | None:
        """The value, where it is a constant known now."""
        return self.graph.constants.get(self.name)

    __add__, __radd__ = _binary("Add"), _binary("Add", swapped=True)
    __sub__, __rsub__ = _binary("Sub"), _binary("Sub", swapped=True)
    __mul__, __rmul__ = _binary("Mul"), _binary("Mul")
    __truediv__, __rtruediv__ = _binary("Div"), _binary("Div", swapped=True)
    __gt__, __ge__ = _binary("Greater"), _binary("GreaterOrEqual")
    __lt__, __le__ = _binary("Less"), _binary("LessOrEqual")

    def __neg__(self) -> Tensor:
        return self.graph.op("Neg", self)

    def equals(self, other) -> Tensor:
        """Elementwise equality (``==`` keeps its Python meaning)."""
        return self.graph.broadcast("Equal", self, other)

    def cast(self, dtype: int) -> Tensor:
        """The same numbers in another element type."""
        return self if self.dtype == dtype else self.graph.op("Cast", self, to=dtype)

    def cast_like(self, x: Tensor) -> Tensor:
        """In the type of x; as it is, if x stands for real numbers that it only stores."""
        return self.cast(x.dtype) if x.dtype in REAL else self

    def wide(self) -> Tensor:
        """In single precision, where it is in half."""
        return self.cast(TensorProto.FLOAT) if self.dtype in HALF else self


class Node:
    """A node of the model, as a rule sees it.

    Attributes
    ----------
    x, y : tuple of Tensor or None
        Inputs and outputs; None where an optional one is absent.
    graph : Graph
    """

    def __init__(self, proto: NodeProto, graph: Graph, index: int, needs: Callable[[str], bool]):
        self.proto, self.graph, self.index, self._needs = proto, graph, index, needs
        self.op_type, self.domain = proto.op_type, canonical(proto.domain)
        self._attributes = {a.name: a for a in proto.attribute}

    def __str__(self) -> str:
        name = f"node {self.proto.name!r}" if self.proto.name else f"unnamed node {self.index}"
        made = ", ".join(repr(y) for y in self.proto.output if y)
        domain = self.domain or "ai.onnx"
        return f"operator {self.op_type} of domain {domain} ({name}, which makes {made})"

    @property
    def x(self) -> tuple[Tensor | None, ...]:
        return tuple(Tensor(name, self.graph) if name else None for name in self.proto.input)

    @property
    def y(self) -> tuple[Tensor | None, ...]:
        return tuple(Tensor(name, self.graph) if name else None for name in self.proto.output)

    @property
    def subgraphs(self) -> bool:
        """Whether it is control flow."""
        return any(a.type in (a.GRAPH, a.GRAPHS) for a in self.proto.attribute)

    def input(self, i: int) -> Tensor | None:
        """Input i, or None where the node does not have it."""
        return self.x[i] if i < len(self.proto.input) else None

    def needs(self, i: int) -> bool:
        """Whether anything asks for the gradient with respect to input i."""
        return i < len(self.proto.input) and self._needs(self.proto.input[i])

    def attr(self, name: str, default=None):
        """An attribute; where it is absent, the operator's own default, else ``default``."""
        if name in self._attributes:
            return value_of_attribute(self._attributes[name])
        schema = self.graph.schema(self.op_type, self.domain)
        if schema is None or name not in schema.attributes:
            return default
        return default_of(schema.attributes[name], default)

    def extra_output(self, i: int) -> Tensor:
        """Output i; where the node leaves it out, it is asked for from now on."""
        while len(self.proto.output) <= i:
            self.proto.output.append("")
        if not self.proto.output[i]:
            self.proto.output[i] = self.graph.fresh(f"{self.proto.output[0]}_output{i}")
            self.graph.infer(self.proto)
        return self.y[i]

    def replace(self, i: int, tensor: Tensor) -> None:
        """Compute output i by what the rule has emitted; with all replaced, the node goes."""
        name = tensor.name
        if name in self.graph.replaced.values():  # what two nodes of the model both compute
            name = self.graph.fresh(f"{name}_copy")
            self.graph.nodes.append(helper.make_node("Identity", [tensor.name], [name], name))
        self.graph.replaced[self.proto.output[i]] = name

    def refuse(self, reason: str) -> NoGradientError:
        """The error to raise where the rule does not reach."""
        return NoGradientError(f"no gradient for {self}: {reason}")


def canonical(domain: str) -> str:
    """The domain of standard operators has two names."""
    return "" if domain == "ai.onnx" else domain


def schema_of(op_type: str, version: int, domain: str = ""):
    """The operator's schema at a version of its domain, or None."""
    known = op_type, version, domain
    return defs.get_schema(*known) if defs.has(*known) else None


def default_of(attribute, otherwise=None):
    """The default of an attribute of a schema."""
    default = attribute.default_value
    return value_of_attribute(default) if default.name else otherwise


def value_of_attribute(attribute):
    """Its value; bytes are text."""
    value = helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value
