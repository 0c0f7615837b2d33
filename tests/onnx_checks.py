"""Models of one node, and their gradients held against finite differences."""

from functools import lru_cache

import numpy as np
import onnxruntime
from onnx import ModelProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun


def tensor_type(array) -> int:
    return helper.np_dtype_to_tensor_dtype(np.asarray(array).dtype)


def node_model(
    op_type, inputs, *, outputs=1, opset=21, domain="", shapes="static", constants=(), **attributes
) -> ModelProto:
    """A model of one node. ``inputs`` is a dict of arrays, an input called "" is left out.

    ``shapes`` is "static" or "named" (every dimension has its own name).
    ``constants`` names the inputs that are initializers.
    """
    values, initializers, names = [], [], []
    for name, array in inputs.items():
        absent = array is None
        names.append("" if absent else name)
        if absent:
            continue
        if name in constants:
            initializers.append(numpy_helper.from_array(array, name))
            continue
        named = [f"{name}_{i}" for i in range(array.ndim)]
        dims = array.shape if shapes == "static" else named
        values.append(helper.make_tensor_value_info(name, tensor_type(array), dims))
    y_names = [f"y{i}" for i in range(outputs)] if isinstance(outputs, int) else list(outputs)
    node = helper.make_node(op_type, names, y_names, "the_node", domain=domain, **attributes)
    imports = [helper.make_opsetid("", opset)]
    if domain:
        imports.append(helper.make_opsetid(domain, 1 if domain == "com.microsoft" else 3))
    real = next(a for a in inputs.values() if a is not None and a.dtype.kind == "f")
    made = [helper.make_tensor_value_info(y, tensor_type(real), None) for y in y_names if y]
    graph = helper.make_graph([node], "one_node", values, made, initializers)
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    results = run_reference(model, {v.name: inputs[v.name] for v in values})
    del model.graph.output[:]
    for y, result in results.items():
        dims = np.shape(result) if shapes == "static" else [None] * np.ndim(result)
        model.graph.output.append(helper.make_tensor_value_info(y, tensor_type(result), dims))
    return model


class CDist(OpRun):
    """onnxruntime's operator, which the reference evaluator does not have."""

    op_domain = "com.microsoft"

    def _run(self, a, b, metric):
        squares = np.sum((a[:, None] - b[None]) ** 2, axis=-1)
        return ({"euclidean": np.sqrt, "sqeuclidean": np.positive}[metric](squares),)


@lru_cache(maxsize=4)  # finite differences ask for the same one again and again
def _reference(model: bytes) -> ReferenceEvaluator:
    return ReferenceEvaluator(ModelProto.FromString(model), new_ops=[CDist])


@lru_cache(maxsize=4)
def _onnxruntime(model: bytes, optimise: bool) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimise:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run_reference(model, feeds) -> dict:
    session = _reference(model.SerializeToString())
    with np.errstate(all="ignore"):
        return dict(zip(session.output_names, session.run(None, feeds), strict=True))


def run_onnxruntime(model, feeds, optimise=False) -> dict:
    """In onnxruntime, by default without optimisations: they keep some scalars in float32."""
    session = _onnxruntime(model.SerializeToString(), optimise)
    names = [y.name for y in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def numeric_gradients(run, model, feeds, wrt, cotangents, step=1e-6) -> dict:
    """Central differences of the sum of <cotangent, output>, entry by entry."""

    def loss(changed):
        outputs = run(model, {**feeds, **changed})
        return sum(float(np.sum(outputs[y] * c)) for y, c in cotangents.items())

    gradients = {}
    for name in wrt:
        x = feeds[name]
        G = np.zeros(x.shape)
        for index in np.ndindex(x.shape):
            after, before = x.copy(), x.copy()
            after[index] += step
            before[index] -= step
            G[index] = (loss({name: after}) - loss({name: before})) / (after[index] - before[index])
        gradients[name] = G
    return gradients


def gradient_feeds(gradient, feeds, cotangents) -> dict:
    known = {**feeds, **{f"{y}_grad": c for y, c in cotangents.items()}}
    return {x.name: known[x.name] for x in gradient.graph.input}


def single(array):
    array = np.asarray(array)
    return array.astype(np.float32) if array.dtype == np.float64 else array
