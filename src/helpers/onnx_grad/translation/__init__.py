"""The same model as a PyTensor graph, so that `pytensor.grad` can differentiate it.

>>> import pytensor.tensor as pt
>>> from onnx.parser import parse_model
>>> from helpers.onnx_grad import to_pytensor
>>> model = to_pytensor(parse_model('''<ir_version: 10, opset_import: ["" : 21]>
... affine (double[N, 2] X) => (double[N] Y) <double[2] w = {1.0, 3.0}> { Y = MatMul(X, w) }'''))
>>> gradient = pt.grad(model.outputs["Y"].sum(), model.weights["w"])
>>> print(gradient.eval({model.inputs["X"]: [[1.0, 2.0], [3.0, 4.0]]}, mode="FAST_COMPILE"))
[4. 6.]
"""

from copy import deepcopy
from importlib import import_module
from typing import NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt
from onnx import ModelProto, ValueInfoProto
from onnx.inliner import inline_local_functions
from onnx.numpy_helper import to_array
from pytensor.tensor import TensorVariable
from pytensor.tensor.sharedvar import TensorSharedVariable

from helpers.onnx_grad.builder import Graph
from helpers.onnx_grad.lengths import state_lengths
from helpers.onnx_grad.prepare import check_known
from helpers.onnx_grad.simplify import take_constant_branches, tensor_infos
from helpers.onnx_grad.storage import loaded_model, name_domains_alike
from helpers.onnx_grad.tensor import Info, Shape
from helpers.onnx_grad.translation.node import Node, numpy_dtype, translated

__all__ = ["PyTensorModel", "to_pytensor"]

for family in "elementwise ml recurrent reductions shapes windows".split():
    import_module(f"{__name__}.{family}")  # which enters its translations into the table


class PyTensorModel(NamedTuple):
    """Symbols of a model by their names in it.

    Weights are shared variables: they have the model's values until `set_value`, and are
    differentiated with respect to like any other symbol.
    """

    inputs: dict[str, TensorVariable]
    outputs: dict[str, TensorVariable]
    weights: dict[str, TensorSharedVariable]


def to_pytensor(model: ModelProto, dtype: str | None = None) -> PyTensorModel:
    """Translate a model operator by operator.

    Parameters
    ----------
    model : onnx.ModelProto
    dtype : "float32" or "float64", optional
        What all real numbers are computed in.  None: as the model says.

    Returns
    -------
    PyTensorModel
        Real initializers (but the scales of Resize) are shared variables, all others constants.  A
        dimension that the model leaves open is one that any length fits; PyTensor does not
        broadcast along it.

    Raises
    ------
    NotImplementedError
        If there is no translation for an operator (it names operator, domain and node), for a
        subgraph (but the one that an If with a constant condition takes), or for a parameter that
        the graph computes where PyTensor needs a constant.
    ValueError
        If an input has no shape, or a type that PyTensor does not have, numbers of the model are
        not loaded, or the installed onnx does not know its opset.
    TypeError
        If ``model`` is not a model; the message says how to get one of a path or of bytes.

    Notes
    -----
    Derivatives at kinks are onnxruntime-training's, not PyTensor's, see
    :mod:`helpers.onnx_grad.translation.elementwise`.  Entries that share a maximum share its
    derivative in Max, Min, ReduceMax, ReduceMin and GlobalMaxPool, in MaxPool the first has it all.
    """
    dtype = None if dtype is None else np.dtype(dtype)
    check_known(loaded_model(model))
    model = inline_local_functions(model) if model.functions else deepcopy(model)
    name_domains_alike(model)
    take_constant_branches(model)
    graph, opsets = model.graph, {o.domain: o.version for o in model.opset_import}
    g = Graph({"": 0} | opsets, {}, {}, ())
    if graph.sparse_initializer:
        names = ", ".join(repr(x.values.name) for x in graph.sparse_initializer)
        raise NotImplementedError(f"sparse initializers are not translated: {names}")

    weights, symbols = {}, {"": None}
    scales = {name for x in graph.node if x.op_type == "Resize" for name in x.input[1:3]}
    for initializer in graph.initializer:
        name = initializer.name
        kind = numpy_dtype(initializer.data_type, f"initializer {name!r}", dtype)
        value = np.array(to_array(initializer), kind)
        if value.dtype.kind == "f" and name not in scales:
            symbols[name] = weights[name] = pytensor.shared(value, name, shape=value.shape)
        else:
            symbols[name] = pt.constant(value, name=name)
    inputs = {x.name: _input(x, dtype) for x in graph.input if x.name not in symbols}
    symbols |= inputs

    stated = deepcopy(model)
    state_lengths(stated)
    infos = tensor_infos(stated)
    for proto in graph.node:
        node = Node(proto, g, dtype)
        results = translated(node, [symbols[name] for name in proto.input])
        for name, result in zip(proto.output, results, strict=False):
            if name:
                symbols[name] = _as_declared(result, infos.get(name, Info()), node)
                symbols[name].name = symbols[name].name or name  # for pytensor.dprint
    return PyTensorModel(inputs, {x.name: symbols[x.name] for x in graph.output}, weights)


def _input(x: ValueInfoProto, dtype: np.dtype | None) -> TensorVariable:
    if not x.type.HasField("tensor_type"):
        raise ValueError(f"input {x.name!r} is no tensor")
    kind = numpy_dtype(x.type.tensor_type.elem_type, f"input {x.name!r}", dtype)
    shape = _static(Info.of(x.type).shape)
    if shape is None:
        raise ValueError(f"input {x.name!r} has no shape: PyTensor needs the number of dimensions")
    return pt.tensor(x.name, dtype=kind.name, shape=shape)


def _static(shape: Shape) -> tuple[int | None, ...] | None:
    return shape and tuple(n if n and isinstance(n, int) else None for n in shape)


def _as_declared(result: TensorVariable, info: Info, node: Node):
    """A result with the type that ONNX gives it, and the lengths that ONNX could infer."""
    code, shape = info.dtype, _static(info.shape)
    if code and result.dtype != node.onnx_dtype(code):
        result = result.astype(node.onnx_dtype(code))
    if shape is None:
        return result
    if len(shape) != result.ndim:
        raise node.refuse(f"the result has {result.ndim} axes, by ONNX's rules {len(shape)}")
    pairs = zip(shape, result.type.shape, strict=True)
    known_to_onnx_alone = any(n is not None and m is None for n, m in pairs)
    return pt.specify_shape(result, shape) if known_to_onnx_alone else result
