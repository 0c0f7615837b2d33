"""Gradients and weights in files: the command line, external data, and nothing half-written."""

import os
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper
from onnx.parser import parse_model

from helpers.onnx_grad import (
    DerivativeOptions,
    file_derivative,
    files,
    onnx_derivative,
    save_model,
    with_weights,
)
from helpers.onnx_grad.__main__ import main

EXPORTED = Path(__file__).parent / "data" / "onnx"
rng = np.random.default_rng(3)
W, V = (rng.normal(size=shape).astype("f") for shape in ((4, 3), (3, 2)))


def network():
    """Two layers and a loss, with a shape and a slope that no one trains."""
    model = parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N, 4] X, float[N, 2] label) => (float loss) {
            a = MatMul(X, W)  flat = Reshape(a, shape)  h = PRelu(flat, slope)
            Y = MatMul(h, V)  e = Sub(Y, label)  s = Mul(e, e)
            loss = ReduceMean<keepdims = 0>(s) }"""
    )
    held = {"W": W, "V": V, "shape": np.array([-1, 3]), "slope": np.array([0.25], "f")}
    model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in held.items())
    return model


@pytest.fixture
def beside(tmp_path):
    """The network in a file, with every tensor beside it as external data."""
    path = tmp_path / "there" / "model.onnx"
    path.parent.mkdir()
    onnx.save(network(), str(path), save_as_external_data=True, location="w", size_threshold=0)
    return path


BY_LOSS = {"options": DerivativeOptions.Loss, "loss": "loss", "label": "label"}


def run(path, feeds):
    session = onnxruntime.InferenceSession(str(path))
    names = [y.name for y in session.get_outputs()]
    found = session.run(names, {x.name: feeds[x.name] for x in session.get_inputs()})
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("small", [16, 1 << 16])  # bytes of the shape; more than anything here
@pytest.mark.parametrize("weights", [None, ["W"], ["V", "W"]])
def test_external_data_changes_nothing(beside, tmp_path, monkeypatch, small, weights):
    """Neither the interface nor the numbers, with larger constants set aside or not."""
    monkeypatch.setattr(files, "SMALL_BYTES", small)
    out = tmp_path / "grad.onnx"
    written = file_derivative(beside, out, weights, [], **BY_LOSS)
    direct = onnx_derivative(network(), weights, [], **BY_LOSS)
    assert onnx.load(out) == written
    assert [v.name for v in written.graph.input] == [v.name for v in direct.graph.input]
    assert [v.name for v in written.graph.output] == [v.name for v in direct.graph.output]
    direct_path = tmp_path / "direct.onnx"
    onnx.save(direct, str(direct_path))
    feeds = {
        "X": rng.normal(size=(5, 4)).astype("f"),
        "label": np.ones((5, 2), "f"),
        "W": W,
        "V": V,
        "slope": np.array([0.25], "f"),
    }
    for name, G in run(direct_path, feeds).items():
        np.testing.assert_array_equal(run(out, feeds)[name], G)


def test_a_weight_above_two_gigabytes_need_not_be_read(tmp_path):
    """Nor a constant that is no part of the gradient: a file with a hole holds both."""
    rows = {"table": 9 << 16, "other": 1 << 14}  # of 1024 numbers of four bytes
    model = parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (int64[N] k) => (float[N, 1024] Y, float[N, 1024] Z)
        { Y = Gather(table, k)  Z = Gather(other, k) }"""
    )
    for name, n in rows.items():
        tensor = TensorProto(name=name, data_type=1, dims=[n, 1024], data_location=1)
        tensor.external_data.add(key="location", value=name)
        model.graph.initializer.append(tensor)
        with (tmp_path / name).open("wb") as hole:
            os.truncate(hole.fileno(), n * 4096)
    assert (tmp_path / "table").stat().st_size > 1 << 31
    (tmp_path / "huge.onnx").write_bytes(model.SerializeToString())
    out = tmp_path / "grad.onnx"
    gradient = file_derivative(tmp_path / "huge.onnx", out, ["table"])
    assert [v.name for v in gradient.graph.output] == ["table_grad"]
    assert out.stat().st_size < 10_000


def test_what_is_too_large_for_one_file_goes_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGEST_FILE", 100)
    out = tmp_path / "grad.onnx"
    big = network()
    large = rng.normal(size=(4, 600)).astype("f")
    big.graph.initializer.append(numpy_helper.from_array(large, "unused"))
    before = big.SerializeToString()
    save_model(big, out)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == [
        "grad.onnx",
        "grad.onnx.data",
    ]
    read = {t.name: numpy_helper.to_array(t) for t in onnx.load(out).graph.initializer}
    for t in big.graph.initializer:
        np.testing.assert_array_equal(read.pop(t.name), numpy_helper.to_array(t))
    assert not read
    assert big.SerializeToString() == before  # saving has not emptied it


def test_nothing_is_half_written(tmp_path, monkeypatch):
    out = tmp_path / "grad.onnx"
    out.write_text("the file before")
    broken = network()
    broken.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(ValueError, match="not a valid model, so not written"):
        save_model(broken, out)
    monkeypatch.setattr(os, "replace", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_model(network(), out)
    assert out.read_text() == "the file before"
    assert [p.name for p in tmp_path.iterdir()] == ["grad.onnx"]


# --- weights back into a model --------------------------------------------------------------------


def test_weights_go_into_a_copy():
    model, new = network(), {"V": V + 1, "slope": np.array([0.5], "f")}
    trained = with_weights(model, new)
    held = {t.name: numpy_helper.to_array(t) for t in trained.graph.initializer}
    np.testing.assert_array_equal(held["V"], V + 1)
    np.testing.assert_array_equal(held["W"], W)
    assert [t.name for t in trained.graph.initializer] == ["W", "V", "shape", "slope"]
    assert model == network()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            {"U": V},
            "weight 'U' is no initializer of the model; these are 'W', 'V', 'shape', 'slope'",
        ),
        ({"V": V.T}, r"weight 'V' has shape \(2, 3\), expected \(3, 2\)"),
        ({"V": V.astype("d")}, "weight 'V' has type float64, expected float32"),
    ],
)
def test_weights_that_do_not_fit(weights, message):
    with pytest.raises(ValueError, match=message):
        with_weights(network(), weights)


# --- the command line -----------------------------------------------------------------------------


def test_the_command_writes_the_gradient(beside, tmp_path, capsys):
    out = tmp_path / "grad.onnx"
    command = [
        beside,
        "-o",
        out,
        "--loss",
        "loss",
        "--label",
        "label",
        "--weights",
        "W",
        "--inputs",
    ]
    assert main([str(word) for word in command]) == 0
    gradient = onnx.load(out)
    assert [v.name for v in gradient.graph.output] == ["W_grad", "loss"]
    said = capsys.readouterr().out.split("\n\n")
    assert said[0].split() == "weights: W float [4, 3]".split()
    assert said[1].split("\n")[0] == "constants, left as they are:"
    assert [line.split() for line in said[1].split("\n")[1:]] == [
        "V float [3, 2] not chosen".split(),
        "slope float [1] not chosen".split(),
    ]
    assert "W_grad" in said[-1]


def test_the_command_says_why_a_constant_stays(tmp_path, capsys):
    assert main([str(EXPORTED / "torch_attention.onnx"), "-o", str(tmp_path / "g.onnx")]) == 0
    left_out = capsys.readouterr().out.split("\n\n")[1]
    assert left_out.split() == "constants, left as they are: val_6 float [] a scalar".split()
    outputs = [v.name for v in onnx.load(tmp_path / "g.onnx").graph.output]
    assert outputs[0] == "x_grad"
    assert "val_6_grad" not in outputs


@pytest.mark.parametrize("choice", [[], ["--weights", "gain"], ["--weights"]])
def test_the_list_shows_what_is_shared_chosen_and_left_out(tmp_path, capsys, choice):
    """Two normalisations whose gains are one initializer, as exporters write equal ones."""
    model = parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N, 2] X) => (float[N, 2] Y) <float[2] gain = {1.0, 1.0}, float two = {2.0},
            float[2] b = {0.0, 0.0}>
        { same = Identity(gain) a = LayerNormalization(X, gain) c = Add(a, b)
          d = Pow(c, two) Y = LayerNormalization(d, same) }"""
    )
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    assert main([str(path), "--list", *choice]) == 0
    said = {
        part.split(":")[0]: part.split("\n")[1:] for part in capsys.readouterr().out.split("\n\n")
    }
    weights, constants = said["weights"], said["constants, left as they are"]
    shared = "gain float [2] shared by 2: LayerNormalization, LayerNormalization".split()
    if choice == ["--weights"]:
        assert [line.split() for line in weights] == [["none"]]
    else:
        assert weights[0].split() == shared
        assert len(weights) == 2 - len(choice) // 2
    if not choice:
        assert [line.split() for line in constants] == ["two float [] a scalar".split()]
    else:
        assert all(line.endswith("not chosen") for line in constants)


def test_a_model_is_no_path(tmp_path):
    with pytest.raises(TypeError, match="path of a file, got a model; onnx_derivative takes a mod"):
        file_derivative(network(), tmp_path / "g.onnx")


def test_the_command_lists_operators_without_a_rule(tmp_path, monkeypatch, capsys):
    model = parse_model(
        """<ir_version: 10, opset_import: ["" : 21, "my.own" : 1]>
        g (float[2, 2] X, int64[1] axes, bool pick) => (float[2, 2] Y, int64 n)
        { a = Det(W)  b = my.own.Thing(X)  d = Mul(X, a)  flag = Less(X, d)
          c = Cast<to = 1>(flag)  e = Mul(d, c)  f = Add(e, b)
          Y = If(pick)<then_branch = t () => (float[2, 2] u) { u = Add(f, d) },
                       else_branch = o () => (float[2, 2] v) { v = Sub(f, d) }>
          unused = Det(X)  m = Mod(axes, axes)  n = Squeeze(m) }"""
    )
    model.graph.initializer.append(numpy_helper.from_array(np.eye(2, dtype=np.float32), "W"))
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    for beside in (False, True):
        if beside:
            monkeypatch.setattr(files, "SMALL_BYTES", 0)  # so that W is not read
            onnx.save(model, str(path), save_as_external_data=True, location="w", size_threshold=0)
        assert main([str(path), "--list"]) == 0
        said = capsys.readouterr().out
        assert "2 Det" in said
        assert said.split("\n\n")[-1].split("\n")[1] == "  1 Det, 1 Thing (my.own), 1 If"
    assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", "w"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.onnx"], "nowhere.onnx: No such file or directory"),
        (["text.onnx"], "text.onnx is not an ONNX file"),
        (["empty.onnx"], "empty.onnx is not an ONNX file: it holds no graph"),
        (["torch_mlp.onnx", "-o", "no/g.onnx"], "no: no such folder"),
        (["torch_mlp.onnx", "-o", "torch_mlp.onnx"], "torch_mlp.onnx is the model itself"),
        (["torch_mlp.onnx", "-o", "g.onnx", "--weights", "W"], "weight 'W' is no initializer"),
        (["torch_mlp.onnx", "-o", "g.onnx", "--loss", "y", "--label", "x"], "is not a scalar"),
        (["alone.onnx", "-o", "g.onnx"], "w: no such file, and the model keeps 'W' there"),
        (["alone.onnx", "--list"], "w: no such file, and the model keeps 'W' there"),
        (["torch_mlp.onnx", "-o", "."], r"\.: is a folder, expected the name of a file"),
        (["torch_mlp.onnx", "--list", "--weights", "W"], "weight 'W' is no initializer"),
        (["torch_mlp.onnx", "--list", "--inputs", "z"], "input 'z' is no input"),
        (["torch_mlp.onnx", "--list", "--loss", "y", "--label", "x"], "options=Loss|not a scalar"),
    ],
)
def test_bad_input_gets_a_sentence(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    Path("text.onnx").write_text("# Not a model\n")
    Path("empty.onnx").touch()
    Path("torch_mlp.onnx").write_bytes((EXPORTED / "torch_mlp.onnx").read_bytes())
    onnx.save(network(), "alone.onnx", save_as_external_data=True, location="w", size_threshold=0)
    Path("w").unlink()
    before = {path.name for path in tmp_path.iterdir()}
    assert main(words) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    assert re.search(message, said.err), said.err
    assert {path.name for path in tmp_path.iterdir()} == before
