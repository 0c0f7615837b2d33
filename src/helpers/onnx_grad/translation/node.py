"""What a translation is given, the table they are in, and what most of them need.

A translation is a function of a :class:`Node` and of the symbols of its inputs (None, or nothing at
the end, for an optional one that is left out); it returns the symbol of the output, or a tuple.
"""

from collections.abc import Callable, Mapping

import numpy as np
import pytensor.tensor as pt
from onnx import NodeProto, TensorProto
from onnx.helper import tensor_dtype_to_np_dtype
from pytensor.compile.mode import Mode
from pytensor.gradient import disconnected_grad
from pytensor.tensor import TensorConstant, TensorVariable

from helpers.onnx_grad import tensor
from helpers.onnx_grad.attributes import known_attributes, unsupported
from helpers.onnx_grad.builder import Graph

TRANSLATIONS: dict[tuple[str, str], Callable] = {}  # (domain, operator) -> translation
PLAIN = Mode(linker="py", optimizer=None)  # for constants: nothing to compile
SUBGRAPHS = {"If", "Loop", "Scan", "SequenceMap"}


def translates(*operators: str, domain: str = "") -> Callable[[Callable], Callable]:
    """Enter the decorated function into the table, for each of the operators."""

    def enter(translation: Callable) -> Callable:
        for operator in operators:
            TRANSLATIONS[domain, operator] = translation
        return translation

    return enter


def of_node(functions: Mapping[str, Callable], domain: str = "") -> None:
    """Enter translations by the names of their operators."""
    TRANSLATIONS.update({(domain, operator): f for operator, f in functions.items()})


def of_inputs(functions: Mapping[str, Callable]) -> None:
    """Enter functions of an operator's inputs, which need nothing else of the node."""
    of_node({name: lambda node, *inputs, f=f: f(*inputs) for name, f in functions.items()})


class Node(tensor.Node):
    """One node of a model, and what real numbers are computed in; None: as the model says."""

    def __init__(self, proto: NodeProto, graph: Graph, dtype: np.dtype | None):
        super().__init__(proto, graph, 0, lambda name: True)
        self.dtype = dtype

    @property
    def version(self) -> int:
        """Of the operator set, which decides what the operator means."""
        return self.graph.opsets.get(self.domain, 0)

    def __str__(self) -> str:
        name = self.proto.name or next((f"-> {o}" for o in self.proto.output if o), "")
        return f"{self.op_type} (domain '{self.domain or 'ai.onnx'}', node '{name}')"

    def refuse(self, why: str) -> NotImplementedError:
        return NotImplementedError(f"{self}: {why}")

    def parameter(self, name: str, given: TensorVariable | None = None):
        """A parameter that older operator sets have as an attribute, newer ones as an input.

        Its value as an array: what an input computes is not known when the graph is built.
        """
        if given is None:
            value = self.attr(name)
            return None if value is None else np.asarray(value)
        value = known(given)
        if value is None:
            raise self.refuse(f"{name!r} must be a constant, here the graph computes it")
        return value

    def axes(self, given: TensorVariable | None = None) -> tuple[int, ...] | None:
        """Parameter ``axes``; None if there is none or it is empty."""
        axes = self.parameter("axes", given)
        return None if axes is None or axes.size == 0 else tuple(int(a) for a in axes.ravel())

    def onnx_dtype(self, code: int) -> np.dtype:
        return numpy_dtype(code, str(self), self.dtype)


def numpy_dtype(code: int, what: str, real: np.dtype | None) -> np.dtype:
    """NumPy's type for one of ONNX, and `real`, if there is one, for real numbers; ValueError for
    those that NumPy and PyTensor do not have."""
    dtype = np.dtype(tensor_dtype_to_np_dtype(code)) if code else np.dtype(object)
    if not (dtype.isbuiltin == 1 and dtype.kind in "fiub"):
        raise ValueError(
            f"{what} has type {TensorProto.DataType.Name(code)}, which PyTensor does not have"
        )
    return dtype if real is None or dtype.kind != "f" else real


def known(x: TensorVariable | None) -> np.ndarray | None:
    """The value of a symbol that does not depend on inputs and weights; None if it does."""
    return x.data if isinstance(x, TensorConstant) else None


def translated(node: Node, inputs: list) -> tuple[TensorVariable, ...]:
    """The symbols of a node's outputs; constants if its inputs are."""
    if node.op_type in SUBGRAPHS and node.domain == "":
        raise node.refuse(
            "operators with subgraphs are not translated, but an If whose condition is a constant"
        )
    if (node.domain, node.op_type) not in TRANSLATIONS:
        raise node.refuse("there is no translation to PyTensor")
    why = unsupported(node.proto, node.version, known_attributes(node.domain, node.op_type))
    if why is not None:
        raise node.refuse(why)
    results = TRANSLATIONS[node.domain, node.op_type](node, *inputs)
    results = results if isinstance(results, tuple) else (results,)
    made = node.proto.output
    if len([name for name in made if name]) > len(results):
        raise node.refuse(f"only {len(results)} of its {len(made)} outputs are translated")
    if all(x is None or known(x) is not None for x in inputs):
        values = [x if known(x) is not None else x.eval(mode=PLAIN) for x in results]
        results = tuple(map(pt.as_tensor, values))
    return results


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


def counted(length, axis: int, ndim: int) -> TensorVariable:
    """0, 1, ..., length - 1 along one axis of `ndim`."""
    return pt.arange(length).reshape([-1 if i == axis else 1 for i in range(ndim)])


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
