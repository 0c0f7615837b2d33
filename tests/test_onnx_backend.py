"""The ONNX backend's node tests of every operator with a rule, differentiated.

Each model is one node (or what the node expands into), in float32.  Its gradient graph, run by
onnxruntime, is held against two independent gradients in float64: PyTensor's of the translated
model, in every entry, and central differences of that model's outputs along a random direction.
"""

import re

import numpy as np
import onnx
import onnxruntime
import pytensor
import pytensor.tensor as pt
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_cases import node_cases, with_constants
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

from helpers.onnx_grad import onnx_derivative, to_pytensor
from helpers.onnx_grad.rules import RULES

PLAIN = pytensor.compile.mode.Mode(linker="py", optimizer=None)
# onnxruntime goes to 26.  We go back to 13, but repeated indices can only be added up from 16 on.
OLDEST, NEWEST, NEWEST_IR = 16, 26, 13
ROUNDING = 2e-5  # of float32, relative to the largest entry of all gradients of a model


def real(x) -> bool:
    return x.dtype in (np.float32, np.float64)


# Node tests that are left out, by a regular expression for their names, and why.
SKIPPED = {
    "dropout_(default|random)_old": "Dropout has changed since that operator set",
    "reduce_(max|min|log_sum_exp)_empty_set": "the maximum of nothing: NumPy has none",
    "spacetodepth_(crd|dcr)_mode": "the attribute is of a later operator set",
    "training_dropout": "another mask in each run: test_dropout_in_training",
    "col2im|compress|dequantizelinear|gridsample": "no translation to PyTensor: test_onnx_rules",
    "einsum_batch_diagonal": "PyTensor takes seconds to build a diagonal in an einsum",
    "mod_float.*_fmod_0": "onnxruntime has no kernel for it",
    "(rnn|gru|lstm)_batchwise": "onnxruntime has no kernel: test_onnx_recurrent",
    "scatter_elements_with_reduction_(max|min)": "PyTensor has no such scatter: test_onnx_rules",
    "rnn_(seq_length|bidirectional)": "1 - tanh^2 has lost its digits in float32",
}
# What has no rule, and says so.
REFUSED = {
    "maxpool_with_argmax_2d_precomputed_strides": "storage_order=1",
    "scatter_elements_with_reduction_mul|scatternd_m": "reduction='m",
}
# Where central differences do not give the derivative: the example is at a jump, a kink or a tie,
# or where the function ends (a negative number to a real power), or it holds infinities and NaN.
KINKS = (
    "(floor|elu|selu|leakyrelu|thresholdedrelu)_example|hardmax_one_hot|round|sign$"
    "|maxpool_3d_dilations|reduce_min_default_axes_keepdims_example|pow$|acosh_example|cast(like)?_"
    "|reduce_log_sum_empty_set|l[12]normalization_axis_0|onehot_with"
)
# Sums of tens of thousands of terms that nearly cancel.
LOOSE = "NCd1d2d3d4d5_mean_weight"
# Operators with a rule and without a node test in real numbers that is not left out.
WITHOUT = {
    "CDist",
    "Col2Im",
    "Compress",
    "DequantizeLinear",
    "EyeLike",
    "GridSample",
    "RandomNormalLike",
    "RandomUniformLike",
}
WITHOUT |= {"Trilu", "LinearClassifier", "LinearRegressor", "Normalizer", "Scaler", "Imputer"}


# Its translation multiplies with the matrices of the rule: it has a test of its own.
SHARED = {("", "Resize")}


def reason_to_skip(case) -> str | None:
    arrays = [*case.feed.values(), *case.outputs.values()]
    if any(x.dtype == np.float16 for x in arrays):
        return "half precision"
    if not any(map(real, case.feed.values())) or not any(map(real, case.outputs.values())):
        return "no real input or no real output"
    return next((why for pattern, why in SKIPPED.items() if re.search(pattern, case.name)), None)


def at_supported_opset(model) -> None:
    """Say that the model is of an operator set that our rules and onnxruntime know.

    Most node tests say the set in which their operator was last changed.  Whether it still means
    the same, the outputs show.
    """
    for imported in model.opset_import:
        if imported.domain in ("", "ai.onnx"):
            imported.version = min(max(imported.version, OLDEST), NEWEST)
    if all(imported.domain == "ai.onnx.ml" for imported in model.opset_import):
        model.opset_import.append(helper.make_opsetid("", OLDEST))
    model.ir_version = min(max(model.ir_version, 8), NEWEST_IR)


def run(model, names, feed):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1  # others would wait busily for a node that takes no time
    feed = {x.name: feed[x.name] for x in model.graph.input}
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    except NoKernel:  # onnxruntime does not have every operator in every type
        session = ReferenceEvaluator(model)
    return dict(zip(names, session.run(names, feed), strict=True))


def by_our_graph(case, wrt, bars):
    gradient = onnx_derivative(case.model, weights=[], inputs=wrt)
    bars = {f"{y}_grad": bar.astype(case.outputs[y].dtype) for y, bar in bars.items()}
    found = run(gradient, [f"{x}_grad" for x in wrt], case.feed | bars)
    return {x: found[f"{x}_grad"] for x in wrt}


def by_pytensor(case, wrt, bars, step):
    """The gradients, and the slope along `step` by central differences."""
    symbols = to_pytensor(case.model, "float64")
    terms = [pt.sum(symbols.outputs[y] * bar) for y, bar in bars.items()]
    x = list(symbols.inputs.values())
    loss = pytensor.function(x, sum(terms), mode=PLAIN, on_unused_input="ignore")
    gradients = pt.grad(
        sum(terms),
        [symbols.inputs[name] for name in wrt],
        disconnected_inputs="ignore",
        null_gradients="return",
    )
    function = pytensor.function(x, gradients, mode=PLAIN, on_unused_input="ignore")
    values = {k: v.astype(symbols.inputs[k].dtype) for k, v in case.feed.items()}
    h = 1e-6
    there, back = (
        loss(*(v + s * h * step[k] if k in step else v for k, v in values.items())) for s in (1, -1)
    )
    return dict(zip(wrt, function(*values.values()), strict=True)), (there - back) / (2 * h)


@pytest.mark.parametrize("operator", sorted(set(RULES) - SHARED), ids="/".join)
def test_node_tests(operator):
    rng = np.random.default_rng(11)
    cases = [case for case in node_cases()[operator] if not reason_to_skip(case)]
    assert bool(cases) != (operator[1] in WITHOUT)
    for case in map(with_constants, cases):
        at_supported_opset(case.model)
        wrt = [name for name, x in case.feed.items() if real(x)]
        bars = {y: rng.standard_normal(v.shape) for y, v in case.outputs.items() if real(v)}
        if reasons := [why for pattern, why in REFUSED.items() if re.search(pattern, case.name)]:
            with pytest.raises(NotImplementedError, match=reasons[0]):
                by_our_graph(case, wrt, bars)
            continue
        for y, value in run(case.model, list(bars), case.feed).items():
            np.testing.assert_allclose(value, case.outputs[y], 1e-3, 1e-4, err_msg=case.name)

        step = {name: rng.standard_normal(case.feed[name].shape) for name in wrt}
        found = by_our_graph(case, wrt, bars)
        with np.errstate(all="ignore"):  # some examples hold infinities and NaN
            expected, slope = by_pytensor(case, wrt, bars, step)
        finite = [np.abs(G[np.isfinite(G)]) for G in expected.values()]
        scale = max(np.max(G, initial=0) for G in finite) or 1.0
        rtol = 25 * ROUNDING if re.search(LOOSE, case.name) else ROUNDING
        for x, G in expected.items():
            assert found[x].shape == G.shape and found[x].dtype == case.feed[x].dtype, case.name
            message = f"{case.name}: {x}"
            np.testing.assert_allclose(found[x], G, rtol, rtol * scale, err_msg=message)
        if not re.search(KINKS, case.name):
            along = sum(np.sum(expected[x] * step[x]) for x in wrt)
            assert slope == pytest.approx(along, rel=1e-6, abs=1e-6 * scale), case.name


RESIZE_REFUSED = {
    "antialias": "antialias",
    "tf_crop": "tf_crop",
}
# These divide by a length with a fraction, where onnxruntime and PyTorch take the whole length.
FRACTIONS = "downsample_scales_.*_align_corners"


def test_resize_node_tests():
    """It is linear: <y_bar, Y> = <x_bar, X> with the outputs that the standard expects."""
    rng, tried = np.random.default_rng(11), 0
    for case in node_cases()["", "Resize"]:
        model = onnx.ModelProto.FromString(case.model.SerializeToString())
        at_supported_opset(model)
        for x in list(model.graph.input)[1:]:
            model.graph.initializer.append(numpy_helper.from_array(case.feed[x.name], x.name))
            model.graph.input.remove(x)
        case = case._replace(model=model, feed={"X": case.feed["X"]})
        bars = {"Y": rng.standard_normal(case.outputs["Y"].shape).astype(np.float32)}
        if reasons := [w for p, w in RESIZE_REFUSED.items() if re.search(p, case.name)]:
            with pytest.raises(NotImplementedError, match=reasons[0]):
                by_our_graph(case, ["X"], bars)
            continue
        if re.search(FRACTIONS, case.name):
            continue
        found, tried = by_our_graph(case, ["X"], bars)["X"], tried + 1
        along = np.sum(found * case.feed["X"])
        expected = np.sum(bars["Y"] * case.outputs["Y"])
        scale = float(np.sum(np.abs(bars["Y"] * case.outputs["Y"])))
        assert along == pytest.approx(expected, abs=1e-5 * scale), case.name
    assert tried > 20
