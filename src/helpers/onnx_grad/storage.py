"""How a file stores its tensors: as initializers, in Constant nodes, sparse, or beside the file."""

from collections.abc import Collection, Iterator
from errno import ENOENT
from pathlib import Path

import numpy as np
import onnx
from ml_dtypes import finfo
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

from helpers.onnx_grad.tensor import REAL, canonical

PIECE = 1 << 26  # bytes that are read at once


def checked_model(onx) -> ModelProto:
    """``onx`` itself, if it is a model in memory; a TypeError that says how to get one, if not."""
    if isinstance(onx, ModelProto):
        return onx
    known = {
        str | Path: "; onnx.load(path) reads one, and file_derivative(path, out) takes a path",
        bytes: "; onnx.load_from_string(data) makes one of the bytes of a file",
        GraphProto: "; onnx.helper.make_model(graph) makes one of a graph",
    }
    advice = next((says for kind, says in known.items() if isinstance(onx, kind)), "")
    raise TypeError(f"onx is a {type(onx).__name__}, expected an onnx.ModelProto{advice}")


def loaded_model(onx) -> ModelProto:
    """``onx`` itself, if it is a model all of whose numbers are in memory."""
    model = checked_model(onx)
    outside = [t.name for t in all_tensors(model.graph) if uses_external_data(t)]
    if outside:
        raise ValueError(
            f"the numbers of {outside[0]!r} are not in the model but beside its file: "
            "onnx.load(path) reads them, and file_derivative(path, out) needs no weights' numbers"
        )
    return model


def name_domains_alike(model: ModelProto) -> None:
    """Give the domain of standard operators, which has two names, one, in place."""
    for named in (*model.opset_import, *model.graph.node):
        named.domain = canonical(named.domain)


def size_of(tensor: TensorProto) -> int:
    """How many bytes a tensor takes; two numbers of four bits share one."""
    item = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return item * int(np.prod(tensor.dims, dtype=np.int64))


def all_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """The tensors of a graph and its subgraphs, the parts of sparse ones included."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for a in node.attribute:
            yield from (*([a.t] if a.HasField("t") else []), *a.tensors)
            if a.HasField("sparse_tensor"):
                yield from (a.sparse_tensor.values, a.sparse_tensor.indices)
        for inner in subgraphs(node):
            yield from all_tensors(inner)


def subgraphs(node: NodeProto) -> list[GraphProto]:
    """The bodies of control flow."""
    bodies = ([*([a.g] if a.HasField("g") else []), *a.graphs] for a in node.attribute)
    return [graph for some in bodies for graph in some]


def load_numbers(tensor: TensorProto, folder: str | Path) -> None:
    """Read a tensor that is beside its file, in place.

    Raises FileNotFoundError if that file is not there, ValueError if it does not hold the tensor.
    """
    (location,) = [e.value for e in tensor.external_data if e.key == "location"] or [""]
    try:
        load_external_data_for_tensor(tensor, str(folder))
        numpy_helper.to_array(tensor)
    except (onnx.checker.ValidationError, ValueError) as error:
        path = Path(folder) / location
        if location and not path.exists():
            raise FileNotFoundError(
                ENOENT, f"no such file, and the model keeps {tensor.name!r} there", str(path)
            ) from error
        raise ValueError(f"{path} does not hold the numbers of {tensor.name!r}: {error}") from error


def is_finite(tensor: TensorProto, folder: str | Path | None) -> bool:
    """Whether all numbers of a tensor are less than the largest of its type, up to sign.

    Those that are beside the file are read piece by piece.
    """
    if not uses_external_data(tensor):
        value = numpy_helper.to_array(tensor)
        return bool((np.abs(value) < finfo(value.dtype).max).all())
    given = {entry.key: entry.value for entry in tensor.external_data}
    item = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    for start in range(0, size_of(tensor), PIECE):
        length = min(PIECE, size_of(tensor) - start)
        piece = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[length // item])
        piece.data_location = TensorProto.EXTERNAL
        offset = int(given.get("offset", 0)) + start
        where = {"location": given.get("location", ""), "offset": offset, "length": length}
        for key, value in where.items():
            piece.external_data.add(key=key, value=str(value))
        load_numbers(piece, folder or "")
        if not is_finite(piece, None):
            return False
    return True


def constant_nodes(model: ModelProto) -> set[str]:
    """What the Constant nodes of the main graph make, but for the graph's own outputs."""
    made = {n.output[0] for n in model.graph.node if is_constant(n)}
    return made.difference(value.name for value in model.graph.output)


def as_initializers(model: ModelProto, names: Collection[str]) -> None:
    """Make initializers, in place, of sparse initializers, and of the real Constant nodes that
    make one of these names."""
    graph, kept = model.graph, []
    for sparse in graph.sparse_initializer:
        graph.initializer.append(_dense(sparse, sparse.values.name))
    del graph.sparse_initializer[:]
    for node in graph.node:
        tensor = value_of(node) if is_constant(node) and node.output[0] in names else None
        if tensor is None or tensor.data_type not in REAL:
            kept.append(node)
        else:
            graph.initializer.append(tensor)
    if len(kept) < len(graph.node):
        del graph.node[:]
        graph.node.extend(kept)


def as_inputs(model: ModelProto, names: Collection[str]) -> None:
    """Make inputs, in place, of these initializers, behind the others."""
    graph, held = model.graph, {t.name: t for t in model.graph.initializer}
    inputs = [v for v in graph.input if v.name not in names]
    inputs += [helper.make_tensor_value_info(n, held[n].data_type, held[n].dims) for n in names]
    initializers = [t for name, t in held.items() if name not in names]
    del graph.input[:], graph.initializer[:]
    graph.input.extend(inputs)
    graph.initializer.extend(initializers)


def is_constant(node: NodeProto) -> bool:
    """Whether it is a Constant of the standard domain."""
    return node.op_type == "Constant" and not canonical(node.domain)


def value_of(node: NodeProto) -> TensorProto | None:
    """What a Constant node makes, under the name of its output; None for strings."""
    (a,) = node.attribute
    if a.name == "value":
        tensor = TensorProto.FromString(a.t.SerializeToString())
        tensor.name = node.output[0]
        return tensor
    if a.name == "sparse_value":
        return _dense(a.sparse_tensor, node.output[0])
    if a.name not in ("value_int", "value_ints", "value_float", "value_floats"):
        return None
    kind = np.int64 if "int" in a.name else np.float32
    return numpy_helper.from_array(np.array(helper.get_attribute_value(a), kind), node.output[0])


def _dense(sparse, name: str) -> TensorProto:
    values, places = map(numpy_helper.to_array, (sparse.values, sparse.indices))
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    dense[np.unravel_index(places, dense.shape) if places.ndim == 1 else tuple(places.T)] = values
    return numpy_helper.from_array(dense, name)
