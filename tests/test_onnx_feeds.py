"""Random arrays for the inputs of a model: shapes, types, and what cannot be drawn."""

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.parser import parse_model

from helpers.onnx_grad import random_feed

MODEL = parse_model(
    """<ir_version: 10, opset_import: ["" : 21]>
    g (float[N, 10] X, double[N] y, int64[2, N, M] k, bool flag, float W, float[3, M] V)
    => (float[N, 10] Z) <float W = {2.0}> { Z = Mul(X, W) }"""
)


def tensor(shape, code=TensorProto.FLOAT):
    return [helper.make_tensor_value_info("x", code, shape)]


@pytest.mark.parametrize("source", ["model", "graph", "runtime"])
def test_shapes_and_types(source):
    session = onnxruntime.InferenceSession(MODEL.SerializeToString())
    inputs = {"model": MODEL, "graph": MODEL.graph, "runtime": session.get_inputs()}[source]
    feed = random_feed(inputs, batch=4, empty_dimension=2)
    assert {name: (x.shape, x.dtype.name) for name, x in feed.items()} == {
        "X": ((4, 10), "float32"),
        "y": ((4,), "float64"),
        "k": ((2, 4, 2), "int64"),  # N is the batch wherever it stands
        "flag": ((), "bool"),
        "V": ((3, 2), "float32"),
    }
    session.run(None, feed)


def test_the_inputs_alone_include_initializers():
    assert "W" in random_feed(MODEL.graph.input)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (["N"], (10,)),
        ([None], (10,)),
        ([0], (10,)),
        ([], ()),
        ([5], (5,)),
        (["N", "M", 3], (10, 1, 3)),
        ([2, 0, None], (2, 1, 1)),
        (["N", "N"], (10, 10)),
    ],
)
def test_open_dimensions(shape, expected):
    assert random_feed(tensor(shape))["x"].shape == expected


def test_no_rows():
    assert random_feed(tensor(["N", "M"]), batch=0, empty_dimension=0)["x"].shape == (0, 0)


@pytest.mark.parametrize("kind", "FLOAT DOUBLE FLOAT16 INT32 UINT8 BOOL COMPLEX64".split())
def test_every_draw_varies_and_keeps_its_type(kind):
    code = TensorProto.DataType.Value(kind)
    x = random_feed(tensor([500], code), rng=1)["x"]
    assert x.dtype == helper.tensor_dtype_to_np_dtype(code)
    assert len(np.unique(x)) == (2 if x.dtype.kind in "iub" else pytest.approx(500, abs=60))


def test_a_seed_repeats_and_no_seed_does_not():
    first, second = (random_feed(tensor([3, 3]), rng=7)["x"] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(random_feed(tensor([3, 3]))["x"], random_feed(tensor([3, 3]))["x"])


def test_errors():
    with pytest.raises(ValueError, match="input 'x' has no shape"):
        random_feed(tensor(None))
    with pytest.raises(ValueError, match="'x' has type STRING, expected numbers"):
        random_feed(tensor([1], TensorProto.STRING))
    with pytest.raises(ValueError, match="input 's' is a sequence, expected a tensor"):
        random_feed([helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)])
    with pytest.raises(ValueError, match="batch is -1"):
        random_feed(tensor([1]), batch=-1)
    with pytest.raises(ValueError, match=r"data for a str.*model.graph.input"):
        random_feed(["x"])
