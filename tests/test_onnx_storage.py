"""What is a weight does not depend on how a file stores it; and numbers that are not there."""

import re

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx_checks import run_onnxruntime
from test_onnx_derivative import model_of, names

from helpers.onnx_grad import (
    file_derivative,
    initial_state,
    onnx_derivative,
    to_pytensor,
    with_weights,
)
from helpers.onnx_grad.constants import constants_by_use

STORED = np.array([[0, -np.inf, 0], [1, 2, 3], [0.5, 0, 0]], np.float32)
ROLES_STORED = {  # the body, w, and why it is no weight
    "a weight": ("Y = Mul(X, w)", STORED[1], None),
    "a matrix with zeros": ("Y = MatMul(X, w)", np.diag(STORED[1]), None),
    "a mask": ("Y = Add(X, w)", STORED[0], "not finite"),
    "a mask of the lowest number": (
        "Y = Add(X, w)",
        np.array([0, np.finfo("f").min, 0], "f"),
        "not finite",
    ),
    "an exponent": ("Y = Pow(X, w)", STORED[1], "Y of Pow"),
    "a scalar": ("Y = Mul(X, w)", np.float32(2), "a scalar"),
    "an epsilon": ("A = Add(X, w) B = Identity(A) Y = Sqrt(B)", np.float32([1e-5]), "added in"),
    "scales": (
        "s = Concat<axis = 0>(w, w) A = Unsqueeze(X, i) B = Unsqueeze(A, i) Y0 = "
        'Resize<mode = "nearest">(B, , s) Y1 = Squeeze(Y0, i) Y = Squeeze(Y1, i)',
        np.float32([1, 1]),
        "scales of Resize",
    ),  # fmt: skip
}


def sparse(value, name, flat):
    places = np.argwhere(value) if not flat else np.flatnonzero(value)
    made = helper.make_sparse_tensor(
        numpy_helper.from_array(value[value != 0], name),
        numpy_helper.from_array(np.asarray(places, np.int64), f"{name}_places"),
        value.shape,
    )
    return made


def stored(body, w, how):
    """The model with w stored in one of the ways that there are."""
    text = "m (float[2, 3] X) => (float[2, 3] Y) <int64[1] i = {0}> { "
    if how == "chain":
        body = "v = Identity(w) u = Identity(v) " + re.sub(r"\bw\b", "u", body)
    model = model_of(f"{text}{body} }}")
    graph, tensor = model.graph, numpy_helper.from_array(np.asarray(w), "w")
    if how == "numbers":
        graph.initializer.append(helper.make_tensor("w", 1, w.shape, np.ravel(w).tolist()))
    elif how == "node":
        graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=tensor))
    elif how == "floats":
        numbers = {"value_floats": w.tolist()} if w.ndim else {"value_float": float(w)}
        graph.node.insert(0, helper.make_node("Constant", [], ["w"], **numbers))
    elif how == "sparse":
        graph.sparse_initializer.append(sparse(w, "w", True))
    elif how == "sparse node":
        node = helper.make_node("Constant", [], ["w"], sparse_value=sparse(w, "w", w.ndim < 2))
        graph.node.insert(0, node)
    else:
        graph.initializer.append(tensor)
    return model


@pytest.mark.parametrize(
    "how", ["bytes", "numbers", "beside", "node", "floats", "chain", "sparse", "sparse node"]
)
@pytest.mark.parametrize("role", ROLES_STORED)
def test_what_is_a_weight_does_not_depend_on_how_it_is_stored(role, how, tmp_path, monkeypatch):
    body, w, reason = ROLES_STORED[role]
    if ("sparse" in how and not w.ndim) or (how == "floats" and w.ndim > 1):
        pytest.skip("there is no such form")
    model = stored(body, w, how)
    node = how in ("node", "floats", "sparse node")  # a constant, unless it is named
    expected = ["X_grad"] if reason or node else ["X_grad", "w_grad"]
    monkeypatch.setattr("helpers.onnx_grad.storage.PIECE", 8)
    monkeypatch.setattr("helpers.onnx_grad.files.SMALL_BYTES", 8)
    path, out = tmp_path / "m.onnx", tmp_path / "g.onnx"
    beside = {"save_as_external_data": True, "size_threshold": 0} if how == "beside" else {}
    onnx.save(model, str(path), **beside, location="data")
    written = file_derivative(path, out)
    assert names(written.graph.output) == expected
    model = onnx.load(path)
    gradient = onnx_derivative(model)
    assert names(gradient.graph.output) == expected
    if role != "scales":  # which have to be constants
        assert names(onnx_derivative(model, weights=["w"]).graph.output) == ["X_grad", "w_grad"]
    if not node:
        assert constants_by_use(model).get("w", "").startswith(reason or "\0") is bool(reason)
    X, bar = np.float32([[1, 2, 3], [0.5, 1, 4]]), np.ones((2, 3), np.float32)
    known = {"X": X, "w": w, "Y_grad": bar}
    plain = onnx_derivative(stored(body, w, "bytes"))
    right = run_onnxruntime(plain, {x.name: known[x.name] for x in plain.graph.input})
    for made in (gradient, written):
        found = run_onnxruntime(made, {x.name: known[x.name] for x in made.graph.input})
        for name in expected:
            np.testing.assert_array_equal(found[name], right[name])


@pytest.mark.parametrize("how", ["node", "floats", "sparse", "bytes"])
def test_a_trained_weight_goes_back_however_it_was_stored(how):
    model = stored("Y = Mul(X, w)", STORED[1], how)
    trained = with_weights(model, {"w": np.float32([4, 5, 6])})
    found = run_onnxruntime(trained, {"X": np.ones((2, 3), np.float32)})["Y"]
    np.testing.assert_array_equal(found, [[4, 5, 6]] * 2)


@pytest.mark.parametrize("door", [onnx_derivative, to_pytensor, lambda m: initial_state(m, m)])
def test_numbers_that_are_not_loaded(tmp_path, door):
    model = stored("Y = Mul(X, w)", STORED[1], "bytes")
    path = tmp_path / "m.onnx"
    onnx.save(model, str(path), save_as_external_data=True, location="w", size_threshold=0)
    with pytest.raises(ValueError, match=r"'w' are not in the model.*onnx.load\(path\) reads them"):
        door(onnx.load(path, load_external_data=False))
    door(onnx.load(path))
    assert names(onnx_derivative(onnx.load(path)).graph.output) == ["X_grad", "w_grad"]
