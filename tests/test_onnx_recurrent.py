"""LSTM, GRU and RNN against loops over single sequences, whose derivatives are complex steps.

The loops are held against onnxruntime first, in single precision, which is all it has for them.
"""

from typing import NamedTuple

import numpy as np
import pytensor
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_checks import gradient_feeds, numeric_gradients, run_onnxruntime, run_reference

from helpers.onnx_grad import DerivativeOptions, onnx_derivative, to_pytensor

PLAIN = pytensor.compile.mode.Mode(linker="py", optimizer=None)  # nothing is compiled
STEPS, BATCH, INPUT, HIDDEN = 3, 2, 2, 2
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
ACTIVATIONS = {
    "Sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "Tanh": np.tanh,
    "Relu": lambda z: np.where(z.real > 0, z, 0),
    "Softplus": lambda z: np.log(1 + np.exp(z)),
    "Softsign": lambda z: z / (1 + z * np.sign(z.real)),
}
DEFAULT = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}


class Setting(NamedTuple):
    """One layer; what is not said is left out."""

    op: str
    direction: str = "forward"
    bias: bool = True
    lengths: tuple = ()
    initial: bool = False
    peepholes: bool = False
    activations: tuple = ()
    reset_after: int = 0
    layout: int = 0
    steps: int = STEPS
    batch: int | str = BATCH

    @property
    def directions(self):
        return 2 if self.direction == "bidirectional" else 1


SETTINGS = [
    Setting("RNN"),
    Setting("RNN", "bidirectional", initial=True, activations=("Relu", "Softsign")),
    Setting("RNN", "reverse", lengths=(2, 3), bias=False),
    Setting("RNN", activations=("Softplus",), steps=1),
    Setting("GRU"),
    Setting("GRU", "reverse", initial=True, bias=False, batch="N"),
    Setting("GRU", "bidirectional", lengths=(1, 3), reset_after=1, initial=True),
    Setting("GRU", layout=1, initial=True),
    Setting("LSTM"),
    Setting("LSTM", "reverse", peepholes=True, initial=True, batch="N"),
    Setting("LSTM", "bidirectional", lengths=(3, 2), peepholes=True, initial=True),
    Setting("LSTM", "bidirectional", layout=1, activations=("Sigmoid", "Softsign", "Relu") * 2),
    Setting("LSTM", bias=False, steps=1),
]


def arrays(s: Setting) -> dict:
    rng = np.random.default_rng(5)
    D, G, n = s.directions, GATES[s.op], HIDDEN
    shapes = {"X": (s.steps, BATCH, INPUT), "W": (D, G * n, INPUT), "R": (D, G * n, n)}
    if s.bias:
        shapes["B"] = (D, 2 * G * n)
    if s.initial:
        shapes["h0"] = (D, BATCH, n)
        if s.op == "LSTM":
            shapes["c0"] = (D, BATCH, n)
    if s.peepholes:
        shapes["P"] = (D, 3 * n)
    values = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    if s.layout:
        values |= {k: values[k].swapaxes(0, 1) for k in ("X", "h0", "c0") if k in values}
    return values


def build(s: Setting, values: dict):
    order = ["X", "W", "R", "B", "lengths", "h0", "c0", "P"]
    known = {*values, *(["lengths"] if s.lengths else [])}
    names = [n if n in known else "" for n in order]
    while not names[-1]:
        names.pop()
    outputs = ["Y", "Y_h", *(["Y_c"] if s.op == "LSTM" else [])]
    attributes = {"hidden_size": HIDDEN, "direction": s.direction, "layout": s.layout}
    if s.activations:
        attributes["activations"] = list(s.activations)
    if s.op == "GRU":
        attributes["linear_before_reset"] = s.reset_after
    kind = helper.np_dtype_to_tensor_dtype(next(iter(values.values())).dtype)
    inputs = []
    for name, value in values.items():
        axis = {"X": 1, "h0": 1, "c0": 1}.get(name)
        dims = list(value.shape)
        if axis is not None:
            dims[1 - axis if s.layout else axis] = s.batch
        inputs.append(helper.make_tensor_value_info(name, kind, dims))
    lengths = numpy_helper.from_array(np.array(s.lengths, np.int32), "lengths")
    graph = helper.make_graph(
        [helper.make_node(s.op, names, outputs, "layer", **attributes)],
        "layer",
        inputs,
        [helper.make_tensor_value_info(y, kind, [None] * (4 if y == "Y" else 3)) for y in outputs],
        [lengths] if s.lengths else [],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def loops(s: Setting, values: dict) -> dict:
    """The layer, one sequence and one number of its state at a time."""
    v = dict(values)
    if s.layout:
        v |= {k: v[k].swapaxes(0, 1) for k in ("X", "h0", "c0") if k in v}
    T, N, _ = v["X"].shape
    D, n, G = s.directions, HIDDEN, GATES[s.op]
    dtype = np.result_type(*v.values())
    Y, H, C = np.zeros((T, D, N, n), dtype), np.zeros((D, N, n), dtype), np.zeros((D, N, n), dtype)
    names = s.activations or DEFAULT[s.op] * D
    per = len(DEFAULT[s.op])
    for d in range(D):
        act = [ACTIVATIONS[a] for a in names[d * per : (d + 1) * per]]
        W, R = v["W"][d].reshape(G, n, -1), v["R"][d].reshape(G, n, n)
        bw, br = v["B"][d].reshape(2, G, n) if s.bias else np.zeros((2, G, n))
        p = v["P"][d].reshape(3, n) if s.peepholes else np.zeros((3, n))
        for k in range(N):
            h = v["h0"][d, k] if s.initial else np.zeros(n)
            c = v["c0"][d, k] if s.initial and s.op == "LSTM" else np.zeros(n)
            times = range(s.lengths[k] if s.lengths else T)
            for t in reversed(times) if d == 1 or s.direction == "reverse" else times:
                a = [W[i] @ v["X"][t, k] + bw[i] for i in range(G)]
                u = [R[i] @ h + br[i] for i in range(G)]
                if s.op == "RNN":
                    h = act[0](a[0] + u[0])
                elif s.op == "GRU":
                    z, r = act[0](a[0] + u[0]), act[0](a[1] + u[1])
                    inner = r * u[2] if s.reset_after else R[2] @ (r * h) + br[2]
                    h = (1 - z) * act[1](a[2] + inner) + z * h
                else:
                    i, f = act[0](a[0] + u[0] + p[0] * c), act[0](a[2] + u[2] + p[2] * c)
                    c = f * c + i * act[1](a[3] + u[3])
                    h = act[0](a[1] + u[1] + p[1] * c) * act[2](c)
                Y[t, d, k] = h
            H[d, k], C[d, k] = h, c
    if s.layout:
        Y, H, C = Y.transpose(2, 0, 1, 3), H.swapaxes(0, 1), C.swapaxes(0, 1)
    return {"Y": Y, "Y_h": H, **({"Y_c": C} if s.op == "LSTM" else {})}


def single(values: dict) -> dict:
    return {n: v.astype(np.float32) for n, v in values.items()}


def by_complex_step(s, values, cotangents):
    found = {}
    for name, value in values.items():
        G = np.zeros(value.shape)
        for index in np.ndindex(value.shape):
            moved = value.astype(complex)
            moved[index] += 1e-30j
            outputs = loops(s, {**values, name: moved})
            G[index] = sum(np.sum(outputs[y].imag * c) for y, c in cotangents.items()) / 1e-30
        found[name] = G
    return found


@pytest.mark.parametrize("s", SETTINGS, ids=lambda s: "-".join(str(f) for f in s))
def test_layer(s):
    values = arrays(s)
    outputs = loops(s, values)
    if not s.layout:  # onnxruntime has the other one only
        for y, value in run_onnxruntime(build(s, single(values)), single(values)).items():
            np.testing.assert_allclose(value, outputs[y], atol=1e-6)
    rng = np.random.default_rng(0)
    cotangents = {y: rng.standard_normal(value.shape) for y, value in outputs.items()}
    expected = by_complex_step(s, values, cotangents)
    largest = max(np.max(np.abs(G)) for G in expected.values())
    runs = ((lambda v: v, 1e-12, run_reference), (single, 1e-5, run_onnxruntime))
    for kind, tolerance, run in runs:
        model = build(s, kind(values))
        gradient = onnx_derivative(model, options=DerivativeOptions.KeepOutputs)
        assert s.op not in [node.op_type for node in gradient.graph.node]
        feeds = gradient_feeds(gradient, kind(values), kind(cotangents))
        found = run(gradient, feeds)
        for y, value in outputs.items():
            np.testing.assert_allclose(found[y], value, atol=max(1e-12, tolerance / 10))
        for name, G in expected.items():
            assert np.max(np.abs(found[f"{name}_grad"] - G)) < tolerance * largest, name


# The rule writes the layer out: what is left out, open, of integers or batchwise may still differ.
TRANSLATED = [
    Setting("LSTM", "bidirectional", lengths=(3, 2), peepholes=True, initial=True),
    Setting("LSTM", layout=1),
    Setting("GRU", "reverse", initial=True, bias=False, batch="N"),
    Setting("RNN", "reverse", lengths=(2, 3), bias=False),
]


@pytest.mark.parametrize("s", TRANSLATED, ids=lambda s: "-".join(str(f) for f in s))
def test_layer_in_pytensor(s):
    """The translation and PyTensor's own gradient of it."""
    values = arrays(s)
    outputs = loops(s, values)
    rng = np.random.default_rng(0)
    cotangents = {y: rng.standard_normal(value.shape) for y, value in outputs.items()}
    expected = by_complex_step(s, values, cotangents)
    symbols = to_pytensor(build(s, values))
    loss = sum((symbols.outputs[y] * c).sum() for y, c in cotangents.items())
    gradients = pytensor.grad(loss, list(symbols.inputs.values()))
    results = [*symbols.outputs.values(), *gradients]
    found = pytensor.function(list(symbols.inputs.values()), results, mode=PLAIN)(*values.values())
    largest = max(np.max(np.abs(G)) for G in expected.values())
    for y, value in zip(symbols.outputs, found, strict=False):
        np.testing.assert_allclose(value, outputs[y], atol=1e-12)
    for name, G in zip(symbols.inputs, found[len(outputs) :], strict=True):
        assert np.max(np.abs(G - expected[name])) < 1e-12 * largest, name


def test_what_a_translation_cannot_write_out_is_refused():
    model = build(Setting("GRU"), arrays(Setting("GRU")))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "T"
    with pytest.raises(NotImplementedError, match="GRU .*number of steps .* is open"):
        to_pytensor(model)
    model = build(Setting("RNN", activations=("Affine",)), arrays(Setting("RNN")))
    with pytest.raises(NotImplementedError, match="activation Affine; .* Relu, Sigmoid, Softplus"):
        to_pytensor(model)
    model = build(Setting("LSTM"), arrays(Setting("LSTM")))
    model.graph.node[0].attribute.append(helper.make_attribute("clip", 3.0))
    with pytest.raises(NotImplementedError, match="LSTM .*clip=3.0 is not supported; .* left out$"):
        to_pytensor(model)


def test_the_layer_off_the_path_stays_as_it_is():
    """Only what is differentiated is written out."""
    s = Setting("GRU")
    model = build(s, single(arrays(s)))
    model.graph.node.append(helper.make_node("Mul", ["Y", "w"], ["Z"]))
    model.graph.initializer.append(numpy_helper.from_array(np.ones(HIDDEN, np.float32), "w"))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("Z", TensorProto.FLOAT, [None] * 4))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "T"
    gradient = onnx_derivative(model, inputs=[], weights=["w"])
    assert "GRU" in [node.op_type for node in gradient.graph.node]
    values = {**single(arrays(s)), "w": np.ones(HIDDEN, np.float32)}
    dZ = np.random.default_rng(0).standard_normal((STEPS, 1, BATCH, HIDDEN)).astype(np.float32)
    found = run_onnxruntime(gradient, gradient_feeds(gradient, values, {"Z": dZ}))
    expected = np.sum(dZ * loops(s, arrays(s))["Y"], axis=(0, 1, 2))
    np.testing.assert_allclose(found["w_grad"], expected, rtol=1e-5)


def test_second_derivative():
    """The gradient graph is standard operators, which are differentiated once more."""
    s = Setting("RNN", "reverse", steps=2, lengths=(1, 2))
    values, rng = arrays(s), np.random.default_rng(0)
    once = onnx_derivative(build(s, values))
    twice = onnx_derivative(once, inputs=["X", "R"], weights=[])
    feeds = {x.name: values.get(x.name) for x in once.graph.input}
    shapes = {f"{y}_grad": v.shape for y, v in loops(s, values).items()}
    feeds |= {y: rng.standard_normal(shape) for y, shape in shapes.items()}
    bars = {f"{n}_grad": rng.standard_normal(v.shape) for n, v in values.items()}
    expected = numeric_gradients(run_reference, once, feeds, ["X", "R"], bars)
    found = run_reference(twice, gradient_feeds(twice, feeds, bars))
    for name, G in expected.items():
        np.testing.assert_allclose(found[f"{name}_grad"], G, atol=1e-8)
