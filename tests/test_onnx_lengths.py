"""Lengths and places are those of the runtime, whatever ONNX's shape inference says."""

import numpy as np
import onnx
import pytensor
import pytensor.tensor as pt
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_checks import run_onnxruntime

from helpers.onnx_grad import onnx_derivative, to_pytensor
from helpers.onnx_grad.lengths import resized_length
from helpers.onnx_grad.rules.resize import _matrix
from helpers.onnx_grad.simplify import simplify
from helpers.onnx_grad.tensor import NoGradientError

PLACES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners")
PLACES = (*PLACES, "asymmetric", "tf_half_pixel_for_nn")
NEAREST = ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")


def model_of(op, shape, opset, constants=(), open_batch=False, declared=None, **attributes):
    """Y = the operator's result, to which zeros of its shape are added: where shapes meet, a
    runtime trusts inference."""
    given = [numpy_helper.from_array(c, f"c{k}") for k, c in enumerate(constants) if c is not None]
    names = ["X", *("" if c is None else f"c{k}" for k, c in enumerate(constants))]
    nodes = [
        helper.make_node(op, names, ["R"], "the_node", **attributes),
        helper.make_node("Sub", ["R", "R"], ["Z"]),
        helper.make_node("Add", ["R", "Z"], ["Y"]),
    ]
    X = helper.make_tensor_value_info(
        "X", TensorProto.FLOAT, ["N" if open_batch else shape[0], *shape[1:]]
    )
    Y = helper.make_tensor_value_info("Y", TensorProto.FLOAT, declared)
    graph = helper.make_graph(nodes, "g", [X], [Y], given)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def check_linear(shape, model, rng, translated=False):
    """The gradient of a linear operator against what it makes of each unit vector."""
    size = int(np.prod(shape))
    columns = [
        run_onnxruntime(model, {"X": e.reshape(shape)})["Y"] for e in np.eye(size, dtype=np.float32)
    ]
    out = columns[0].shape
    if 0 in out:
        return
    Y = model.graph.output[0]
    batch = model.graph.input[0].type.tensor_type.shape.dim[0].dim_param or out[0]
    Y.CopyFrom(helper.make_tensor_value_info("Y", TensorProto.FLOAT, [batch, *out[1:]]))
    Y_bar = rng.standard_normal(out).astype(np.float32)
    expected = np.array([np.sum(c * Y_bar) for c in columns]).reshape(shape)
    X = rng.standard_normal(shape).astype(np.float32)
    gradient = onnx_derivative(model, weights=[])
    onnx.checker.check_model(gradient, full_check=True)
    feeds = {"X": X, "Y_grad": Y_bar}
    found = run_onnxruntime(gradient, {x.name: feeds[x.name] for x in gradient.graph.input})
    np.testing.assert_allclose(found["X_grad"], expected, atol=2e-4)
    assert run_onnxruntime(simplify(model), {"X": X})["Y"].shape == out
    if translated:
        symbols = to_pytensor(model, "float64")
        x, y = symbols.inputs["X"], symbols.outputs["Y"]
        G = pt.grad(pt.sum(y * Y_bar.astype(float)), x)
        y, G = pytensor.function([x], [y, G], mode="FAST_COMPILE")(X.astype(float))
        assert y.shape == out
        np.testing.assert_allclose(G, expected, atol=2e-4)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("opset", [13, 18, 21])
def test_resize_by_fractional_scales(opset, seed):
    """1.3 times 20 is 26 in single precision, and 25.99.. for inference."""
    rng = np.random.default_rng([seed, opset])
    for k in range(15):
        n = [20, 50, 60, int(rng.integers(2, 60))][k % 4]
        scale = np.float32(round(rng.uniform(0.3, 3.2), 1))
        if k == 0:
            n, scale = 20, np.float32(1.3)
        scales = np.array([1, 1, scale], np.float32)
        mode = "linear" if rng.integers(2) else "nearest"
        kind = {"mode": mode, "open_batch": bool(k % 2)}
        model = model_of("Resize", (1, 1, n), opset, [None, scales], **kind)
        plain = onnx.ModelProto.FromString(model.SerializeToString())
        del plain.graph.node[1:]
        plain.graph.node[0].output[0] = "Y"
        X = np.ones((1, 1, n), np.float32)
        assert run_onnxruntime(plain, {"X": X})["Y"].shape[-1] == resized_length(n, scale)
        exact = int(n * float(scale)) == resized_length(n, scale)
        if exact:  # else the runtime itself stumbles where the shapes meet
            check_linear((1, 1, n), model, rng, translated=k == 1)
            continue
        check_linear((1, 1, n), plain, rng, translated=k == 0)
        gradient = onnx_derivative(model, weights=[])
        G = run_onnxruntime(gradient, _feeds(gradient, X, resized_length(n, scale)))["X_grad"]
        np.testing.assert_allclose(G.sum(), resized_length(n, scale), rtol=1e-5)


def _feeds(gradient, X, length):
    feeds = {"X": X, "Y_grad": np.ones((1, 1, length), np.float32)}
    return {x.name: feeds[x.name] for x in gradient.graph.input}


def test_a_declared_length_that_inference_contradicts_stays():
    scales = np.array([1, 1, 1.3], np.float32)
    model = model_of("Resize", (1, 1, 20), 18, [None, scales], declared=[1, 1, 26], mode="linear")
    gradient = onnx_derivative(model, weights=[])
    (Y_grad,) = (x for x in gradient.graph.input if x.name == "Y_grad")
    assert [d.dim_value for d in Y_grad.type.tensor_type.shape.dim] == [1, 1, 26]
    G = run_onnxruntime(gradient, _feeds(gradient, np.ones((1, 1, 20), np.float32), 26))["X_grad"]
    assert G[0, 0, -1] > 1


@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
@pytest.mark.parametrize("opset", [13, 18])
def test_a_scale_beside_one_that_sizes_stand_for_is_kept(mode, opset):
    """5 times 1.8 is 9 in single precision and less for inference; 2.49 is not 7 / 3."""
    scales = np.array([1, 1, 1.8, 2.49], np.float32)
    model = model_of("Resize", (1, 2, 5, 3), opset, [None, scales], mode=mode)
    del model.graph.node[1:]
    model.graph.node[0].output[0] = "Y"
    check_linear((1, 2, 5, 3), model, np.random.default_rng(1), translated=True)


def test_a_scale_that_sizes_do_not_say_is_refused():
    """One unit in the last place under 11 / 3: the runtime makes 11 entries of 3 all the same."""
    scale = np.nextafter(np.float32(11) / np.float32(3), np.float32(0))
    model = model_of("Resize", (1, 1, 3), 18, [None, np.array([1, 1, scale], np.float32)])
    with pytest.raises(NoGradientError, match="3 entries 11 in the runtime and 10 by ONNX's rules"):
        onnx_derivative(model)
    near = np.array([1, 1, np.float32(11) / np.float32(3)], np.float32)  # as the message says
    onnx_derivative(model_of("Resize", (1, 1, 3), 18, [None, near]))


def pool_cases(seed, count=25):
    rng = np.random.default_rng(seed)

    def draw(low, high):
        return rng.integers(low, high + 1, 2).tolist()

    for k in range(count):
        opset = int(rng.choice([13, 19, 21, 22]))
        size, kernel, strides = draw(4, 9), draw(1, 4), draw(1, 4)
        op = ("MaxPool", "AveragePool")[k % 2]
        kind = {"kernel_shape": kernel, "strides": strides, "ceil_mode": int(rng.integers(2))}
        if op == "MaxPool" or opset >= 19:
            kind["dilations"] = draw(1, 2)
        if op == "AveragePool":
            kind["count_include_pad"] = int(rng.integers(2))
        if any(
            (e - 1) * d >= n
            for e, d, n in zip(kernel, kind.get("dilations", [1, 1]), size, strict=True)
        ):
            continue
        auto = rng.choice(["NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"])
        if auto == "NOTSET":
            kind["pads"] = [int(rng.integers(0, n)) for n in kernel * 2]
        elif auto == "VALID" or all(s <= e for s, e in zip(strides, kernel, strict=True)):
            if auto != "VALID":  # with dilations each runtime has its own way
                kind.pop("dilations", None)
            kind["auto_pad"] = str(auto)
        yield op, (1, 1, *size), opset, kind


@pytest.mark.parametrize("seed", range(8))
def test_pools_with_ceil_mode(seed):
    rng = np.random.default_rng(seed)
    for k, (op, shape, opset, kind) in enumerate(pool_cases(seed)):
        model = model_of(op, shape, opset, **kind)
        del model.graph.node[1:]
        model.graph.node[0].output[0] = "Y"
        if op == "AveragePool":
            try:
                run_onnxruntime(model, {"X": np.ones(shape, np.float32)})
            except Exception:  # pads that the runtime refuses
                continue
            check_linear(shape, model, rng, translated=k < 3)
            continue
        X = rng.permutation(int(np.prod(shape))).astype(np.float32).reshape(shape)
        try:
            Y = run_onnxruntime(model, {"X": X})["Y"]
        except Exception:  # pads that the runtime refuses
            continue
        if 0 in Y.shape or Y.min() < 0:
            continue  # a window that holds padding alone
        value = helper.make_tensor_value_info("Y", TensorProto.FLOAT, Y.shape)
        model.graph.output[0].CopyFrom(value)
        Y_bar = rng.standard_normal(Y.shape).astype(np.float32)
        expected = np.zeros(X.size)
        np.add.at(expected, np.argsort(X.ravel())[Y.astype(int).ravel()], Y_bar.ravel())
        gradient = onnx_derivative(model)
        onnx.checker.check_model(gradient, full_check=True)
        feeds = {"X": X, "Y_grad": Y_bar}
        found = run_onnxruntime(gradient, {x.name: feeds[x.name] for x in gradient.graph.input})
        np.testing.assert_allclose(found["X_grad"].ravel(), expected, atol=1e-5, err_msg=str(kind))


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_auto_pad_with_a_longer_stride_than_window_is_refused(op):
    kind = {"kernel_shape": [1], "strides": [3]}
    model = model_of(op, (1, 1, 6), 21, auto_pad="SAME_UPPER", **kind)
    with pytest.raises(NoGradientError, match="with a longer stride .* write the attribute pads"):
        onnx_derivative(model)
    with pytest.raises(NotImplementedError, match="with a longer stride .* write the attribute pa"):
        to_pytensor(model)
    onnx_derivative(model_of(op, (1, 1, 6), 21, pads=[0, 0], **kind))  # as the message says


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize(("kernel", "dilations"), [([5], [1]), ([3], [2])])
def test_a_window_that_does_not_fit(op, kernel, dilations):
    """The runtime rounds (4 - 5) / 3 towards zero, and averages over what the window hits."""
    kind = {"kernel_shape": kernel, "dilations": dilations, "strides": [3]}
    model = model_of(op, (1, 1, 4), 21, **kind)
    assert run_onnxruntime(model, {"X": np.ones((1, 1, 4), np.float32)})["Y"].shape == (1, 1, 1)
    with pytest.raises(NoGradientError, match="window spans 5 entries, and there are 4, padding"):
        onnx_derivative(model)
    with pytest.raises(NotImplementedError, match="window spans 5 entries, and there are 4, padd"):
        to_pytensor(model)
    rng = np.random.default_rng(8)
    if op == "AveragePool":  # which means what it does with either of these
        check_linear((1, 1, 4), model_of(op, (1, 1, 4), 21, ceil_mode=1, **kind), rng, True)
        check_linear((1, 1, 4), model_of(op, (1, 1, 4), 21, pads=[0, 1], **kind), rng, True)


def test_sizes_that_an_exporter_computes():
    """What PyTorch's older exporter makes of recompute_scale_factor=True."""
    nodes = """f = Floor(length) u = Unsqueeze(f, zero) c = Cast<to = 7>(u) s = Shape(X)
        b = Slice(s, zero, two) sizes = Concat<axis = 0>(b, c)
        R = Resize<mode = "linear">(X, , , sizes) Y = Neg(R) }"""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]> m (float[1, 1, 11] X) => (float[1, 1, N] Y)
        <int64[1] zero = {0}, int64[1] two = {2}> {
        length = Constant<value = float {15.07}>() """
        + nodes
    )
    check_linear((1, 1, 11), model, np.random.default_rng(9))


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("fill", [0, 1])
@pytest.mark.parametrize("stride", [2, 4, 5])
def test_a_transposed_convolution_whose_padding_is_filled(auto_pad, fill, stride):
    """With a stride longer than the kernel of three the result is not that times the image."""
    _check_transposed(strides=[stride], output_padding=[fill], auto_pad=auto_pad)


def _check_transposed(**kind):
    kernel = np.float32([[[1, 2, 3]]])
    model = model_of("ConvTranspose", (1, 1, 5), 21, [kernel], **kind)
    del model.graph.node[1:]
    model.graph.node[0].output[0] = "Y"
    check_linear((1, 1, 5), model, np.random.default_rng(0), translated=True)


@pytest.mark.parametrize("auto_pad", ["NOTSET", "SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("length", [3, 4, 6, 7])
def test_a_transposed_convolution_of_any_length(length, auto_pad):
    """Of a length below the image's inference makes a shape without batch and channels."""
    _check_transposed(output_shape=[length], auto_pad=auto_pad)
    _check_transposed(output_shape=[length], auto_pad=auto_pad, dilations=[2], strides=[2])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("nearest", [*NEAREST, "linear", "cubic"])
def test_places_are_those_of_the_runtime(place, nearest):
    """Where each entry of the result is taken from, for many lengths and scales."""
    rng = np.random.default_rng(1)
    opset = {"tf_half_pixel_for_nn": 11, "half_pixel_symmetric": 19}.get(place, 13)
    mode = "nearest" if nearest in NEAREST else nearest
    kind = {"mode": mode, "coordinate_transformation_mode": place}
    kind |= {"nearest_mode": nearest} if mode == "nearest" else {}
    attributes = {"cubic_coeff_a": -0.75, "exclude_outside": 0, **kind}
    for k in range(60):
        n = int(rng.integers(1, 70))
        scale = [rng.uniform(0.2, 4), round(rng.uniform(0.2, 4), 1), rng.integers(1, 100) / n]
        scale = np.float32(min(scale[k % 3], 4))
        m = resized_length(n, scale)
        if m in (0, n):  # the runtime hands on what keeps its length
            continue
        scales = [np.zeros(0, np.float32), np.array([1, 1, 1, scale], np.float32)]
        model = model_of("Resize", (n, 1, 2, n), opset, scales, **kind)
        del model.graph.node[1:]
        model.graph.node[0].output[0] = "Y"
        units = np.repeat(np.eye(n, dtype=np.float32)[:, None, None], 2, axis=2)
        A = run_onnxruntime(model, {"X": units})["Y"][:, 0, 0].T
        ours = _matrix(attributes.get, n, m, float(scale))
        np.testing.assert_allclose(
            ours, A, atol=0 if mode == "nearest" else 2e-3, err_msg=f"{n} {scale}"
        )


def test_the_places_of_tf_half_pixel_for_nn():
    """The counts of what a doubling takes: two of each."""
    kind = {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": "floor"}
    model = model_of("Resize", (1, 1, 4), 11, [None, np.float32([1, 1, 2])], **kind)
    model = onnx.version_converter.convert_version(_named_roi(model), 13)
    X = np.arange(4, dtype=np.float32).reshape(1, 1, 4)
    gradient = onnx_derivative(model, weights=[])
    G = run_onnxruntime(gradient, _feeds(gradient, X, 8))["X_grad"]
    assert G.tolist() == [[[2, 2, 2, 2]]]
    symbols = to_pytensor(model)
    y = symbols.outputs["Y"].eval({symbols.inputs["X"]: X}, mode="FAST_COMPILE")
    assert y.tolist() == [[[0, 0, 1, 1, 2, 2, 3, 3]]]


def _named_roi(model):
    roi = numpy_helper.from_array(np.zeros(0, np.float32), "roi")
    model.graph.initializer.append(roi)
    model.graph.node[0].input[1] = "roi"
    return model


def test_what_keeps_its_length_is_handed_on():
    """By onnxruntime, also where the scale is not 1."""
    kind = {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}
    model = model_of("Resize", (1, 1, 11), 21, [None, np.float32([1, 1, 1.02])], **kind)
    del model.graph.node[1:]
    model.graph.node[0].output[0] = "Y"
    check_linear((1, 1, 11), model, np.random.default_rng(0), translated=True)
