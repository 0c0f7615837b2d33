"""Record the gradients of onnxruntime-training, for `tests/test_onnx_oracle.py`.

It needs an environment of its own, since onnxruntime-training takes the name of onnxruntime (and
was discontinued after this version):

    pip install onnxruntime-training-cpu==1.19.2 onnx==1.17 numpy cerberus h5py
    python tests/data/onnx/record_ort_training.py

What it writes, `ort_training.npz`, holds everything that a comparison needs: the models, the
arrays that were fed, the cotangent of each output, the outputs and the gradients; and for the
models that onnxruntime-training refuses, what it said.

Its builder differentiates a scalar, so to each model the sum of its outputs times their cotangents
is added: the gradients of that sum are the vector-Jacobian products.
"""

from __future__ import annotations

import json
import re
from multiprocessing import Pipe, Process
from pathlib import Path
from signal import Signals

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.parser import parse_model

HERE = Path(__file__).parent
RECORD = HERE / "ort_training.npz"
BATCH = 4
SEED = 19

# Graphs in ONNX's textual form, at operator set 21 unless the name says another.  N is the batch.
# An input whose name begins with P is fed with positive numbers; kinks and ties are met exactly,
# because the numbers that have to be equal are computed to be.
MODELS = {
    # entry by entry
    "Add": "(float[N,3] X, float[3] Y) => (float[N,3] Z) { Z = Add(X, Y) }",
    "Add, scalar": "(float[N,3] X, float Y) => (float[N,3] Z) { Z = Add(X, Y) }",
    "Sub": "(float[N,3] X, float[N,1] Y) => (float[N,3] Z) { Z = Sub(X, Y) }",
    "Mul": "(float[2,N,3] X, float[N,1] Y) => (float[2,N,3] Z) { Z = Mul(X, Y) }",
    "Mul, square": "(float[N,3] X) => (float[N,3] Z) { Z = Mul(X, X) }",
    "Div": "(float[N,3] X, float[1,3] P) => (float[N,3] Z) { Z = Div(X, P) }",
    "Neg": "(float[N,3] X) => (float[N,3] Z) { Z = Neg(X) }",
    "Pow": "(float[N,3] P) => (float[N,3] Z) <float[1] e = {2.5}> { Z = Pow(P, e) }",
    "Pow, square": "(float[N,3] X) => (float[N,3] Z) <float e = {2.0}> { Z = Pow(X, e) }",
    "Pow, exponent": "(float[N,3] P, float[3] e) => (float[N,3] Z) { Z = Pow(P, e) }",
    "Exp": "(float[N,3] X) => (float[N,3] Z) { Z = Exp(X) }",
    "Log": "(float[N,3] P) => (float[N,3] Z) { Z = Log(P) }",
    "Sqrt": "(float[N,3] P) => (float[N,3] Z) { Z = Sqrt(P) }",
    "Reciprocal": "(float[N,3] P) => (float[N,3] Z) { Z = Reciprocal(P) }",
    "Erf": "(float[N,3] X) => (float[N,3] Z) { Z = Erf(X) }",
    "Sin": "(float[N,3] X) => (float[N,3] Z) { Z = Sin(X) }",
    "Cos": "(float[N,3] X) => (float[N,3] Z) { Z = Cos(X) }",
    "Tan": "(float[N,3] X) => (float[N,3] Z) { Z = Tan(X) }",
    "Sigmoid": "(float[N,3] X) => (float[N,3] Z) { Z = Sigmoid(X) }",
    "Tanh": "(float[N,3] X) => (float[N,3] Z) { Z = Tanh(X) }",
    "Relu": "(float[N,3] X) => (float[N,3] Z) { Z = Relu(X) }",
    "LeakyRelu": "(float[N,3] X) => (float[N,3] Z) { Z = LeakyRelu<alpha = 0.2>(X) }",
    "Elu": "(float[N,3] X) => (float[N,3] Z) { Z = Elu(X) }",
    "Selu": "(float[N,3] X) => (float[N,3] Z) { Z = Selu(X) }",
    "PRelu": "(float[N,3] X, float[3] s) => (float[N,3] Z) { Z = PRelu(X, s) }",
    "Softplus": "(float[N,3] X) => (float[N,3] Z) { Z = Softplus(X) }",
    "Gelu": "(float[N,3] X) => (float[N,3] Z) { Z = Gelu(X) }",
    "Gelu, tanh": '(float[N,3] X) => (float[N,3] Z) { Z = Gelu<approximate = "tanh">(X) }',
    "Abs": "(float[N,3] X) => (float[N,3] Z) { Z = Abs(X) }",
    "Clip": "(float[N,3] X) => (float[N,3] Z) <float l = {-0.5}, float h = {0.7}>"
    " { Z = Clip(X, l, h) }",
    "Max": "(float[N,3] X, float[N,3] Y) => (float[N,3] Z) { Z = Max(X, Y) }",
    "Min": "(float[N,3] X, float[3] Y) => (float[N,3] Z) { Z = Min(X, Y) }",
    "Sum": "(float[N,3] X, float[3] Y) => (float[N,3] Z) { Z = Sum(X, Y, X) }",
    "Mean": "(float[N,3] X, float[3] Y) => (float[N,3] Z) { Z = Mean(X, Y) }",
    "Where": "(float[N,3] X, float[N,3] Y) => (float[N,3] Z)"
    " <float o = {0}> { c = Greater(X, o) Z = Where(c, X, Y) }",
    "Identity": "(float[N,3] X) => (float[N,3] Z) { Z = Identity(X) }",
    "Cast": "(float[N,3] X) => (double[N,3] Z) { Z = Cast<to = 11>(X) }",
    "Relu, kink": "(float[N,3] X) => (float[N,3] Z)"
    " <float o = {0}> { x = Mul(X, o) y = Add(x, X) d = Sub(y, X) Z = Relu(d) }",
    "Abs, kink": "(float[N,3] X) => (float[N,3] Z)"
    " <float o = {0}> { x = Mul(X, o) y = Add(x, X) d = Sub(y, X) Z = Abs(d) }",
    "LeakyRelu, kink": "(float[N,3] X) => (float[N,3] Z)"
    " <float o = {0}> { x = Mul(X, o) y = Add(x, X) d = Sub(y, X) Z = LeakyRelu(d) }",
    "Max, ties": "(float[N,3] X, float[N,3] Y) => (float[N,3] Z)"
    " <float o = {0}> { x = Mul(X, o) y = Mul(Y, o) a = Add(x, Y) b = Add(y, Y) Z = Max(a, b) }",
    "Min, ties": "(float[N,3] X, float[N,3] Y) => (float[N,3] Z)"
    " <float o = {0}> { x = Mul(X, o) y = Mul(Y, o) a = Add(x, Y) b = Add(y, Y) Z = Min(a, b) }",
    # matrices
    "MatMul": "(float[N,3] X, float[3,2] W) => (float[N,2] Z) { Z = MatMul(X, W) }",
    "MatMul, batches": "(float[2,N,3] X, float[2,3,5] W) => (float[2,N,5] Z) { Z = MatMul(X, W) }",
    "MatMul, one matrix": "(float[2,N,3] X, float[3,5] W) => (float[2,N,5] Z) { Z = MatMul(X, W) }",
    "MatMul, broadcast": "(float[1,N,3] X, float[2,3,5] W) => (float[2,N,5] Z)"
    " { Z = MatMul(X, W) }",
    "MatMul, vector": "(float[N,3] X, float[3] w) => (float[N] Z) { Z = MatMul(X, w) }",
    "Gemm": "(float[N,3] X, float[3,2] W, float[2] b) => (float[N,2] Z) { Z = Gemm(X, W, b) }",
    "Gemm, transposed": "(float[3,N] X, float[2,3] W, float[1,2] b) => (float[N,2] Z)"
    " { Z = Gemm<transA = 1, transB = 1, alpha = 0.5, beta = 2.0>(X, W, b) }",
    "Einsum": "(float[N,3] X, float[3,2] W) => (float[N,2] Z)"
    ' { Z = Einsum<equation = "ij,jk->ik">(X, W) }',
    # shapes
    "Reshape": "(float[N,6] X) => (float[M,3] Z) <int64[2] s = {-1, 3}> { Z = Reshape(X, s) }",
    "Transpose": "(float[N,2,3] X) => (float[3,N,2] Z) { Z = Transpose<perm = [2, 0, 1]>(X) }",
    "Flatten": "(float[N,2,3] X) => (float[N,6] Z) { Z = Flatten(X) }",
    "Squeeze": "(float[N,1,3] X) => (float[N,3] Z) <int64[1] a = {1}> { Z = Squeeze(X, a) }",
    "Unsqueeze": "(float[N,3] X) => (float[N,1,3] Z) <int64[1] a = {1}> { Z = Unsqueeze(X, a) }",
    "Expand": "(float[N,1] X) => (float[2,N,3] Z) <int64[3] s = {2, 1, 3}> { Z = Expand(X, s) }",
    "Concat": "(float[N,3] X, float[N,2] Y) => (float[N,5] Z) { Z = Concat<axis = 1>(X, Y) }",
    "Split": "(float[N,5] X) => (float[N,3] Z, float[N,2] V) <int64[2] s = {3, 2}>"
    " { Z, V = Split<axis = 1>(X, s) }",
    "Slice": "(float[N,6] X) => (float[N,3] Z) <int64[1] a = {1}, int64[1] b = {0},"
    " int64[1] e = {6}, int64[1] k = {2}> { Z = Slice(X, b, e, a, k) }",
    "Gather": "(float[5,3] X) => (float[4,3] Z) <int64[4] i = {0, 2, 2, -1}> { Z = Gather(X, i) }",
    "GatherElements": "(float[3,3] X) => (float[2,3] Z) <int64[2,3] i = {0, 2, 2, 1, 0, 2}>"
    " { Z = GatherElements(X, i) }",
    "GatherND": "(float[3,4] X) => (float[2] Z) <int64[2,2] i = {0, 1, 2, 3}>"
    " { Z = GatherND(X, i) }",
    "ScatterElements": "(float[3,3] X, float[1,3] U) => (float[3,3] Z) <int64[1,3] i = {0, 2, 1}>"
    " { Z = ScatterElements(X, i, U) }",
    "Tile": "(float[2,3] X) => (float[4,3] Z) <int64[2] r = {2, 1}> { Z = Tile(X, r) }",
    "Pad": "(float[2,3] X) => (float[3,5] Z) <int64[4] p = {1, 0, 0, 2}> { Z = Pad(X, p) }",
    "Trilu": "(float[3,3] X) => (float[3,3] Z) { Z = Trilu<upper = 0>(X) }",
    "CumSum": "(float[N,3] X) => (float[N,3] Z) <int64 a = {1}> { Z = CumSum(X, a) }",
    # reductions
    "ReduceSum": "(float[N,3] X) => (float[N] Z) <int64[1] a = {1}>"
    " { Z = ReduceSum<keepdims = 0>(X, a) }",
    "ReduceSum, all": "(float[N,3] X) => (float Z) { Z = ReduceSum<keepdims = 0>(X) }",
    "ReduceMean": "(float[N,3] X) => (float[N,1] Z) <int64[1] a = {-1}> { Z = ReduceMean(X, a) }",
    "ReduceMean @13": "(float[N,3] X) => (float[N,1] Z) { Z = ReduceMean<axes = [1]>(X) }",
    "ReduceL2": "(float[N,3] X) => (float[N] Z) <int64[1] a = {1}>"
    " { Z = ReduceL2<keepdims = 0>(X, a) }",
    "ReduceL1": "(float[N,3] X) => (float[N,1] Z) <int64[1] a = {1}> { Z = ReduceL1(X, a) }",
    "ReduceLogSumExp": "(float[N,3] X) => (float[N,1] Z) <int64[1] a = {1}>"
    " { Z = ReduceLogSumExp(X, a) }",
    "ReduceMax": "(float[N,3] X) => (float[N,1] Z) <int64[1] a = {1}> { Z = ReduceMax(X, a) }",
    "ReduceMin": "(float[N,3] X) => (float[N,1] Z) <int64[1] a = {1}> { Z = ReduceMin(X, a) }",
    "ReduceProd": "(float[N,3] X) => (float[N,1] Z) <int64[1] a = {1}> { Z = ReduceProd(X, a) }",
    "ReduceSumSquare": "(float[N,3] X) => (float[N,1] Z) <int64[1] a = {1}>"
    " { Z = ReduceSumSquare(X, a) }",
    "Softmax": "(float[N,3] X) => (float[N,3] Z) { Z = Softmax(X) }",
    "Softmax, axis": "(float[2,N,3] X) => (float[2,N,3] Z) { Z = Softmax<axis = 1>(X) }",
    "LogSoftmax": "(float[N,3] X) => (float[N,3] Z) { Z = LogSoftmax(X) }",
    "LayerNormalization": "(float[N,5] X, float[5] s, float[5] b) => (float[N,5] Z)"
    " { Z, m, v = LayerNormalization(X, s, b) }",
    "LayerNormalization, one output": "(float[N,5] X, float[5] s) => (float[N,5] Z)"
    " { Z = LayerNormalization(X, s) }",
    "BatchNormalization": "(float[N,2,3] X, float[2] s, float[2] b, float[2] m, float[2] P)"
    " => (float[N,2,3] Z) { Z = BatchNormalization(X, s, b, m, P) }",
    "SoftmaxCrossEntropyLoss": "(float[4,3] X) => (float Z) <int64[4] label = {0, 2, 1, 2}>"
    " { Z, p = SoftmaxCrossEntropyLoss(X, label) }",
    "SoftmaxCrossEntropyLoss, one output": "(float[4,3] X) => (float Z)"
    " <int64[4] label = {0, 2, 1, 2}> { Z = SoftmaxCrossEntropyLoss(X, label) }",
    "SoftmaxCrossEntropyLoss, weights": "(float[4,3] X) => (float Z)"
    " <int64[4] label = {0, 2, 1, 2}, float[3] w = {0.5, 1.0, 2.0}>"
    " { Z, p = SoftmaxCrossEntropyLoss<ignore_index = 1>(X, label, w) }",
    # windows
    "Conv": "(float[N,2,6,5] X, float[3,2,3,3] W, float[3] b) => (float[N,3,6,5] Z)"
    " { Z = Conv<pads = [1, 1, 1, 1]>(X, W, b) }",
    "Conv, strides": "(float[N,2,7,6] X, float[3,2,3,2] W) => (float[N,3,3,3] Z)"
    " { Z = Conv<strides = [2, 2]>(X, W) }",
    "Conv, groups": "(float[N,4,5] X, float[6,2,3] W) => (float[N,6,3] Z)"
    " { Z = Conv<group = 2, dilations = [1]>(X, W) }",
    "ConvTranspose": "(float[N,2,4] X, float[2,3,3] W) => (float[N,3,6] Z)"
    " { Z = ConvTranspose(X, W) }",
    "MaxPool": "(float[N,2,6,4] X) => (float[N,2,3,2] Z)"
    " { Z = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(X) }",
    "MaxPool, overlapping": "(float[N,1,6,5] X) => (float[N,1,6,5] Z)"
    " { Z = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(X) }",
    "AveragePool": "(float[4,2,6,4] X) => (float[4,2,3,2] Z)"
    " { Z = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(X) }",
    "AveragePool, padded": "(float[4,1,6,5] X) => (float[4,1,6,5] Z)"
    " { Z = AveragePool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(X) }",
    "AveragePool, ceil": "(float[4,1,4,5] X) => (float[4,1,2,3] Z)"
    " { Z = AveragePool<kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1>(X) }",
    "AveragePool, global": "(float[4,1,2,2] X) => (float[4,1,1,1] Z)"
    " { Z = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(X) }",
    "AveragePool, open batch": "(float[N,2,6,4] X) => (float[N,2,3,2] Z)"
    " { Z = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(X) }",
    "GlobalAveragePool": "(float[N,2,3,4] X) => (float[N,2,1,1] Z) { Z = GlobalAveragePool(X) }",
    "GlobalMaxPool": "(float[N,2,3,4] X) => (float[N,2,1,1] Z) { Z = GlobalMaxPool(X) }",
    # several nodes
    "X + cst": "(float[N,10] X) => (float[N,10] Y) <float[1] cst = {1.5}> { Y = Add(X, cst) }",
    "shared and reused": "(float[N,3] X, float[3,3] W) => (float[N,3] Y, float[N,3] Z)"
    " { a = MatMul(X, W) b = Tanh(a) c = MatMul(b, W) Y = Add(c, b) d = Mul(Y, X) Z = Sub(d, a) }",
    "digits MLP": "(float[N,64] X, float[64,16] W1, float[16] b1, float[16,8] W2, float[8] b2,"
    " float[8,1] W3, float[1] b3) => (float[N,1] Y) { a = MatMul(X, W1) c = Add(a, b1) d = Relu(c)"
    " e = MatMul(d, W2) f = Add(e, b2) g = Relu(f) h = MatMul(g, W3) Y = Add(h, b3) }",
    "digits classifier": "(float[4,64] X, float[64,16] W1, float[16] b1, float[16,10] W2,"
    " float[10] b2) => (float loss, float[4,10] scores) <int64[4] label = {3, 1, 4, 1}>"
    " { a = Gemm(X, W1, b1) c = Relu(a) scores = Gemm(c, W2, b2)"
    " loss, p = SoftmaxCrossEntropyLoss(scores, label) }",
    "conv net": "(float[N,1,8,8] X, float[3,1,3,3] W1, float[3] b1, float[4,3,3,3] W2,"
    " float[16,10] W3, float[10] b3) => (float[N,10] scores)"
    " { a = Conv<pads = [1, 1, 1, 1]>(X, W1, b1) b = Relu(a)"
    " c = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(b)"
    " d = Conv<pads = [1, 1, 1, 1]>(c, W2) e = LeakyRelu<alpha = 0.1>(d)"
    " f = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(e) g = Flatten(f)"
    " h = Gemm(g, W3, b3) scores = LogSoftmax(h) }",
    "squared loss": "(float[N,5] X, float[5,1] W, float[1] b, float[N,1] y) => (float loss)"
    " { p = Gemm(X, W, b) e = Sub(p, y) s = Mul(e, e) loss = ReduceMean<keepdims = 0>(s) }",
}
FILES = ["skl_linear_core", "skl_mlp_regressor", "torch_mlp", "torch_conv", "torch_attention"]


def load(name: str) -> onnx.ModelProto:
    if name in FILES:
        return onnx.load(HERE / f"{name}.onnx")
    opset = name.partition("@")[2] or 21
    return parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> g {MODELS[name]}')


def with_loss(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list]:
    """The model and the sum of its outputs times new inputs, the cotangents."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    graph, terms, cotangents = model.graph, [], []
    for y in list(graph.output):
        bar = onnx.ValueInfoProto.FromString(y.SerializeToString())
        bar.name = f"cotangent_{y.name}"
        cotangents.append(bar)
        nodes = [
            helper.make_node("Mul", [y.name, bar.name], [f"weighted_{y.name}"]),
            helper.make_node("ReduceSum", [f"weighted_{y.name}"], [f"term_{y.name}"], keepdims=0),
        ]
        terms.append(f"term_{y.name}")
        if y.type.tensor_type.elem_type == TensorProto.DOUBLE:
            nodes.append(helper.make_node("Cast", terms[-1:], [f"cast_{y.name}"], to=1))
            terms[-1] = f"cast_{y.name}"
        graph.node.extend(nodes)
    graph.input.extend(cotangents)
    total = terms[0]
    for term in terms[1:]:
        graph.node.append(helper.make_node("Add", [total, term], [f"{total}+{term}"]))
        total = f"{total}+{term}"
    graph.node.append(helper.make_node("Identity", [total], ["total_of_all"]))
    graph.output.append(helper.make_tensor_value_info("total_of_all", TensorProto.FLOAT, []))
    return model, cotangents


def complete(model: onnx.ModelProto) -> None:
    """Say what onnxruntime-training's gradients read: optional outputs, and the batch.

    Its gradient of AveragePool takes an open batch for one of 0, and divides by it.
    """
    for x in (*model.graph.input, *model.graph.output):
        for d in x.type.tensor_type.shape.dim:
            d.dim_value = d.dim_value or BATCH
    del model.graph.value_info[:]
    for node in model.graph.node:
        missing = {"LayerNormalization": 3}.get(node.op_type, 0) - len(node.output)
        node.output.extend(f"{node.output[0]}_optional_{i}" for i in range(missing))


def real(x) -> bool:
    return x.type.tensor_type.elem_type in (TensorProto.FLOAT, TensorProto.DOUBLE)


def draw(rng: np.random.Generator, x: onnx.ValueInfoProto, shape=None) -> np.ndarray:
    if shape is None:
        shape = [d.dim_value or BATCH for d in x.type.tensor_type.shape.dim]
    values = rng.standard_normal(shape)
    if x.name.startswith("P"):
        values = 0.5 + np.abs(values)
    return values.astype(helper.tensor_dtype_to_np_dtype(x.type.tensor_type.elem_type))


def run(model: onnx.ModelProto, feed: dict, names: list[str]) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feed = {x.name: feed[x.name] for x in session.get_inputs()}
    return dict(zip(names, session.run(names, feed), strict=True))


def as_bytes(model: onnx.ModelProto) -> np.ndarray:
    return np.frombuffer(model.SerializeToString(deterministic=True), np.uint8)


def record(name: str, rng: np.random.Generator) -> dict[str, dict[str, np.ndarray]]:
    """Arrays of one model by kind and name; RuntimeError if it has no gradient."""
    from onnxruntime.capi._pybind_state import GradientGraphBuilder  # the training build alone

    model = load(name)
    onnx.checker.check_model(model, full_check=True)
    graph = model.graph
    feed = {x.name: draw(rng, x) for x in graph.input}
    wanted = [x.name for x in graph.input if real(x)]
    if name in FILES:  # the scalars are bounds and thresholds, nothing to learn
        wanted += [x.name for x in graph.initializer if x.data_type == TensorProto.FLOAT and x.dims]
    outputs = run(model, feed, [y.name for y in graph.output])
    augmented, cotangents = with_loss(model)
    if name in FILES:
        complete(augmented)
    bars = {
        bar.name: draw(rng, bar, outputs[y.name].shape)
        for bar, y in zip(cotangents, graph.output, strict=True)
    }
    builder = GradientGraphBuilder(
        augmented.SerializeToString(), {"total_of_all"}, set(wanted), "total_of_all"
    )
    builder.build()
    gradient_model = onnx.load_from_string(builder.get_model())
    found = run(gradient_model, feed | bars, [f"{x}_grad" for x in wanted])
    return {
        "feed": feed,
        "cotangent": {y.name: bars[f"cotangent_{y.name}"] for y in graph.output},
        "output": outputs,
        "gradient": {x: found[f"{x}_grad"] for x in wanted},
        "model": {"onnx": as_bytes(model)},
    }


def record_apart(name: str, answers) -> None:
    """In a process of its own: on some models onnxruntime-training ends the process."""
    onnxruntime.set_default_logger_severity(4)
    try:
        # A generator of its own: another model more leaves the numbers of the others alone.
        answers.send(record(name, np.random.default_rng([SEED, *name.encode()])))
    except Exception as error:
        # The message ends with the reason; before it stand places in the source.
        answers.send(re.split(r" was false\. | const (?=\w)| : ", " ".join(str(error).split()))[-1])


def main() -> None:
    arrays, refused = {}, {}
    for name in [*MODELS, *FILES]:
        receive, send = Pipe(duplex=False)
        process = Process(target=record_apart, args=(name, send))
        process.start()
        send.close()
        try:
            found = receive.recv()
        except EOFError:
            process.join()
            found = f"the process ended with {Signals(-process.exitcode).name}"
        process.join()
        if isinstance(found, str):
            refused[name] = found
            arrays[f"{name}|model|onnx"] = as_bytes(load(name))
            print(f"{name}: refused: {refused[name]}")
            continue
        for kind, values in found.items():
            arrays |= {f"{name}|{kind}|{key}": value for key, value in values.items()}
    about = {
        "onnxruntime": onnxruntime.__version__,
        "onnx": onnx.__version__,
        "refused": refused,
    }
    np.savez_compressed(RECORD, about=np.array(json.dumps(about)), **arrays)
    print(f"{len(MODELS) + len(FILES) - len(refused)} models, {RECORD.stat().st_size} bytes")


if __name__ == "__main__":
    main()
