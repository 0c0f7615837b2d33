"""Exported models: PyTorch's, by both of its exporters, have the gradients of its autograd, and one
of scikit-learn's those of its training.

The exporters transpose, permute, join and rename parameters.  All their entries are random numbers
in double precision, and so each entry of an initializer is found by its value.
"""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx_cases import FOLDER
from onnx_checks import run_onnxruntime, run_reference

from helpers.onnx_grad import DerivativeOptions, onnx_derivative
from helpers.onnx_grad.tensor import REAL

EXPORTED = FOLDER / "exported"
FILES = sorted(path.stem for path in EXPORTED.glob("*.onnx") if "sklearn" not in path.stem)
# What looks like a weight and is none: the tables of the rotary embedding, which are multiplied.
# What is in single precision there: Erf in the reference evaluator, what says stash_type=1, the
# factor 1/6 of HardSwish, the scale of Attention.
SINGLE = ("mlp", "residual", "transformer-dynamo", "bordered", "masked-dynamo")
TABLES = {"transformer-dynamo": {"cos", "sin"}, "transformer-script": {"cos", "sin"}}


def load(name):
    model = onnx.load(EXPORTED / f"{name}.onnx")
    with np.load(EXPORTED / f"{name.partition('-')[0]}.npz") as file:
        return model, dict(file)


def weights_of(model):
    return {
        t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.data_type in REAL
    }


def by_value(weights, record):
    """For each initializer that is made of parameters, which entries of their gradients it has."""
    found = {}
    parameters = [n.removesuffix("_grad") for n in record if n.endswith("_grad") and n != "x_grad"]
    entries = {}
    for name in parameters:
        grad = record[f"{name}_grad"]
        grad = grad.reshape(-1, record[name].size) if record.get("y_bar") is None else grad.ravel()
        for i, value in enumerate(record[name].ravel()):
            entries[value] = grad[..., i]
    for name, value in weights.items():
        if value.size and all(v in entries for v in value.ravel()):
            columns = np.stack([entries[v] for v in value.ravel()], axis=-1)
            found[name] = columns.reshape(*columns.shape[:-1], *value.shape)
    assert sum(weights[n].size for n in found) == len(entries), "not every parameter is there"
    return found


@pytest.mark.parametrize("name", FILES)
def test_exported_model(name):
    model, record = load(name)
    weights = weights_of(model)
    expected = by_value(weights, record)
    assert expected
    gradient = onnx_derivative(model, options=DerivativeOptions.KeepOutputs)
    wrt = [y.name.removesuffix("_grad") for y in gradient.graph.output if y.name != "y"]
    assert set(wrt) - {"x"} == set(expected) | TABLES.get(name, set())
    if "x_grad" in record:
        expected["x"] = record["x_grad"]
    feeds = {"x": record["x"], **{n: weights[n] for n in wrt if n != "x"}}
    tolerance = 1e-5 if name.startswith(SINGLE) else 1e-10
    y_bar = record.get("y_bar")
    if y_bar is None:
        y_bar = np.random.default_rng(0).standard_normal(record["y"].shape)
    found = run_reference(gradient, {**feeds, "y_grad": y_bar})
    if "y_bar" not in record:  # behind a dropout: a new mask each time, which the output shows
        mask = found["y"] / record["y"]
        assert 0 < np.mean(mask == 0) < 1
        np.testing.assert_allclose(mask[mask != 0], 1 / 0.6, rtol=1e-6)
        factors = (y_bar * mask).ravel()
        expected = {n: np.tensordot(factors, columns, 1) for n, columns in expected.items()}
        record["y"] = record["y"] * mask
        tolerance = 1e-6  # the ratio is in single precision
    largest = max(np.max(np.abs(G)) for G in expected.values())
    expected = {f"{n}_grad": G for n, G in expected.items()} | {"y": record["y"]}
    for n, G in expected.items():
        assert found[n].shape == G.shape
        scale = np.max(np.abs(G)) if n == "y" else largest
        assert np.max(np.abs(found[n] - G)) < tolerance * scale, n


def test_exported_pipeline():
    """Scaler, cast and perceptron; the loss of the training is mean((y - target)^2) / 2."""
    model, record = load("pipeline-sklearn")
    weights, expected = weights_of(model), {}
    for name, value in weights.items():  # a vector there is a row here
        (n,) = [n for n in record if record[n].size == value.size and (record[n] == value).all()]
        expected[name] = record[f"{n}_grad"]
    assert len(expected) == 4
    gradient = onnx_derivative(model, inputs=[], options=DerivativeOptions.KeepOutputs)
    y = model.graph.output[0].name
    bar = (record["y"] - record["target"]).astype(np.float32) / len(record["y"])
    feeds = {model.graph.input[0].name: record["x"], f"{y}_grad": bar, **weights}
    for run in (run_onnxruntime, run_reference):
        found = run(gradient, feeds)
        np.testing.assert_allclose(found[y], record["y"], rtol=1e-5, atol=1e-6)
        for name, G in expected.items():
            np.testing.assert_allclose(
                found[f"{name}_grad"], np.reshape(G, weights[name].shape), atol=1e-6
            )


def test_exported_columns():
    """Columns that are chosen, scaled and joined; one is dropped."""
    model, record = load("columns-sklearn")
    gradient = onnx_derivative(model, options=DerivativeOptions.KeepOutputs)
    weights = weights_of(model)
    (bar_name,) = (x.name for x in gradient.graph.input if x.name.endswith("_grad"))
    for k in range(3):
        bar = np.zeros((5, 3))
        bar[:, k] = 1
        known = {model.graph.input[0].name: record["x"], bar_name: bar, **weights}
        feeds = {x.name: known[x.name] for x in gradient.graph.input}
        for run in (run_onnxruntime, run_reference):
            found = run(gradient, feeds)
            np.testing.assert_allclose(found[bar_name[:-5]], record["y"], atol=1e-14)
            np.testing.assert_allclose(found["X_grad"], record["slopes"][:, k], atol=1e-10)
            assert not found["X_grad"][:, 2].any()


def test_exported_powers():
    """Of both branches that are computed one is NaN, replaced, and has no influence."""
    model, record = load("powers-sklearn")
    gradient = onnx_derivative(model, options=DerivativeOptions.KeepOutputs)
    y = model.graph.output[0].name
    known = {model.graph.input[0].name: record["x"], f"{y}_grad": np.ones((3, 3), np.float32)}
    known |= weights_of(model)
    for run in (run_onnxruntime, run_reference):
        found = run(gradient, {x.name: known[x.name] for x in gradient.graph.input})
        np.testing.assert_allclose(found[y], record["y"], rtol=1e-5)
        np.testing.assert_allclose(found["X_grad"], record["slopes"], rtol=1e-5)
        assert all(np.isfinite(G).all() for G in found.values())
