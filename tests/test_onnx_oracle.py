"""Gradients against a record of onnxruntime-training's own, float32 for float32.

The record is made by `tests/data/onnx/record_ort_training.py`, in an environment of its own.
"""

import json
from functools import partial

import numpy as np
import onnx
import onnxruntime
import pytensor
import pytensor.tensor as pt
import pytest
from onnx_cases import FOLDER

from helpers.checks import relative_error
from helpers.onnx_grad import onnx_derivative, random_feed, to_pytensor

RECORD = np.load(FOLDER / "ort_training.npz")
ABOUT = json.loads(str(RECORD["about"]))
REFUSED = sorted(ABOUT["refused"])
RECORDED = sorted({key.split("|")[0] for key in RECORD.files if "|feed|" in key})
PLAIN = pytensor.compile.mode.Mode(linker="py", optimizer=None)

# Where the record itself is wrong, and how.
WRONG = {
    "Gelu, tanh": "the gradient of the other form, with erf, whatever the attribute says",
    "AveragePool, open batch": "an open batch is taken for one of length 0",
}
ROUNDING = 1e-6  # of float32, relative to the largest entry; its unit is 6e-8


def arrays(name, kind):
    start = f"{name}|{kind}|"
    return {key.removeprefix(start): RECORD[key] for key in RECORD.files if key.startswith(start)}


def model_of(name):
    return onnx.load_from_string(arrays(name, "model")["onnx"].tobytes())


def by_our_graph(model, wrt, feed, bars, level="ORT_DISABLE_ALL"):
    """The vector-Jacobian products of the gradient graph, by a runtime without training."""
    given = {x.name for x in model.graph.input}
    gradient = onnx_derivative(model, weights=[x for x in wrt if x not in given])
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(gradient.SerializeToString(), options)
    weights = {x.name: onnx.numpy_helper.to_array(x) for x in model.graph.initializer}
    values = weights | feed | {f"{y}_grad": bar for y, bar in bars.items()}
    values = {x.name: values[x.name] for x in session.get_inputs()}
    return dict(zip(wrt, session.run([f"{x}_grad" for x in wrt], values), strict=True))


def by_pytensor(model, wrt, feed, bars, dtype=None):
    symbols = to_pytensor(model, dtype)
    loss = sum(pt.sum(symbols.outputs[y] * bar) for y, bar in bars.items())
    known = symbols.inputs | symbols.weights
    gradients = pytensor.function(
        [symbols.inputs[x] for x in feed],
        pt.grad(loss, [known[x] for x in wrt]),
        mode=PLAIN,
        on_unused_input="ignore",
    )(*feed.values())
    return dict(zip(wrt, gradients, strict=True))


def recorded(name):
    """What the gradients are computed from, and the gradients."""
    gradient = arrays(name, "gradient")
    given = model_of(name), list(gradient), arrays(name, "feed"), arrays(name, "cotangent")
    return given, gradient


@pytest.mark.parametrize("name", [name for name in RECORDED if name not in WRONG])
@pytest.mark.parametrize(
    "engine", [by_our_graph, partial(by_our_graph, level="ORT_ENABLE_ALL"), by_pytensor],
    ids=["graph", "optimised graph", "PyTensor"],
)  # fmt: skip
def test_agrees_within_rounding(engine, name):
    given, expected = recorded(name)
    found = engine(*given)
    for x, G in expected.items():
        assert found[x].shape == G.shape, x
        assert relative_error(found[x], G) < ROUNDING, x


@pytest.mark.parametrize("name", WRONG)
def test_where_the_record_is_wrong(name):
    given, expected = recorded(name)
    truth = by_pytensor(*given, "float64")
    found = by_our_graph(*given)
    for x in expected:
        assert found[x].shape == truth[x].shape
        assert relative_error(found[x], truth[x]) < ROUNDING
    assert any(
        G.shape != truth[x].shape or relative_error(G, truth[x]) > 100 * ROUNDING
        for x, G in expected.items()
    )


def test_most_are_equal_bit_for_bit():
    """The same operators in the same order: only what each runtime's kernels do inside differs."""
    exact = 0
    for name in RECORDED:
        given, expected = recorded(name)
        if name not in WRONG:
            found = by_our_graph(*given)
            exact += all(np.array_equal(found[x], G) for x, G in expected.items())
    assert exact > len(RECORDED) / 2


@pytest.mark.parametrize("name", REFUSED)
def test_what_onnxruntime_training_cannot_differentiate(name):
    """Operators it has no gradient for, and models that it fails on: here they work."""
    model = model_of(name)
    feed = random_feed(model.graph.input, batch=4, rng=1)
    feed = {x: abs(v) + 0.1 if x.startswith("P") else v for x, v in feed.items()}
    session = onnxruntime.InferenceSession(model.SerializeToString())
    rng = np.random.default_rng(2)
    bars = {
        y.name: rng.standard_normal(value.shape).astype("float32")
        for y, value in zip(session.get_outputs(), session.run(None, feed), strict=True)
    }
    wrt = list(feed)
    wrt += [
        x.name for x in model.graph.initializer if x.data_type == onnx.TensorProto.FLOAT and x.dims
    ]
    found = by_our_graph(model, wrt, feed, bars)
    for x, G in by_pytensor(model, wrt, feed, bars, "float64").items():
        assert found[x].shape == G.shape, x
        assert relative_error(found[x], G) < 10 * ROUNDING, x
