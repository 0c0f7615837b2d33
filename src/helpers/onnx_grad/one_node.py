"""One operator, and the gradient that its rule gives: by itself, and held against an equation.

>>> import numpy as np
>>> from helpers.onnx_grad.one_node import value, vjp
>>> inputs = {"A": np.array([1.0, 2.0]), "B": np.array(3.0)}
>>> value("Mul", inputs).tolist()
[3.0, 6.0]
>>> {name: G.tolist() for name, G in vjp("Mul", inputs, np.array([1.0, 10.0])).items()}
{'A': [3.0, 30.0], 'B': 21.0}
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from onnx import ModelProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from helpers.checks import Check, complex_step, verify
from helpers.onnx_grad.derivative import onnx_derivative

OPSET, IR_VERSION = 21, 10
SINGLE = 2e-5
"""What float32 may lose in one operator, relative to the largest entry of a gradient."""
RTOL = 1e-12

Inputs = Mapping[str, np.ndarray | None]


def one_node(
    op: str, inputs: Inputs, attributes: Mapping | None = None, outputs: Sequence[str] = ("Y",)
) -> ModelProto:
    """A model of one node.

    Real arrays are its inputs; integers (axes, indices, lengths) are constants of the model, and an
    input that is None is left out.
    """
    real = {name: x for name, x in inputs.items() if _is_real(x)}
    if not real:
        raise ValueError(f"{op} has no real input that could be differentiated by")
    kind = helper.np_dtype_to_tensor_dtype(next(iter(real.values())).dtype)
    ins = [helper.make_tensor_value_info(name, kind, x.shape) for name, x in real.items()]
    fixed = {name: x for name, x in inputs.items() if x is not None and name not in real}
    constants = [numpy_helper.from_array(x, name) for name, x in fixed.items()]
    names = ["" if x is None else name for name, x in inputs.items()]
    node = helper.make_node(op, names, list(outputs), "the_node", **(attributes or {}))
    outs = [helper.make_tensor_value_info(name, kind, None) for name in outputs]
    graph = helper.make_graph([node], "one_node", ins, outs, constants)
    imports = [helper.make_opsetid("", OPSET)]
    return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION)


def session(model: ModelProto):
    """onnxruntime on one thread, without graph optimisations: they keep some scalars in float32."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    providers = ["CPUExecutionProvider"]
    return ort.InferenceSession(model.SerializeToString(), options, providers=providers)


def value(op: str, inputs: Inputs, **attributes) -> np.ndarray:
    """The first output of the operator, by ``onnx.reference``."""
    evaluator = ReferenceEvaluator(one_node(op, inputs, attributes))
    return evaluator.run(None, {name: inputs[name] for name in evaluator.input_names})[0]


def gradients(
    model: ModelProto, feeds: Inputs, engine: Callable = session
) -> dict[str, np.ndarray]:
    """The gradient of a model by the names of its inputs, as ``engine`` computes it.

    ``feeds`` holds the inputs, and under ``<output>_grad`` the cotangents of the outputs.
    """
    gradient = onnx_derivative(model)
    names = [y.name for y in gradient.graph.output]
    found = engine(gradient).run(names, {x.name: feeds[x.name] for x in gradient.graph.input})
    return {name.removesuffix("_grad"): G for name, G in zip(names, found, strict=True)}


def vjp(
    op: str, inputs: Inputs, bars: np.ndarray | Mapping[str, np.ndarray], **attributes
) -> dict[str, np.ndarray]:
    """What the rule of an operator makes of the cotangents of its outputs, by input.

    ``bars`` is the cotangent of the first output, or those of all outputs by their names in order.
    The gradient is computed in float64 by ``onnx.reference``, after a look at float32 in
    onnxruntime: where the two differ by more than float32 explains, an AssertionError names the
    operator and the input.
    """
    bars = bars if isinstance(bars, Mapping) else {"Y": bars}
    feeds = {**inputs, **{f"{name}_grad": np.asarray(bar) for name, bar in bars.items()}}
    results = []
    for kind, engine in ((np.float32, session), (np.float64, ReferenceEvaluator)):
        double = [name for name, x in feeds.items() if x is not None and x.dtype == np.float64]
        given = feeds | {name: feeds[name].astype(kind) for name in double}
        model = one_node(op, {name: given[name] for name in inputs}, attributes, list(bars))
        results.append(gradients(model, given, engine))
    single, double = results
    for name, G in double.items():
        size = np.abs(G).max(initial=1e-3)
        if np.abs(single[name] - G).max(initial=0) > SINGLE * size:
            raise AssertionError(f"{op}: float32 in onnxruntime has another gradient for {name}")
    return double


def steps(inputs: Inputs, twin: Callable, Y_bar: np.ndarray) -> list[np.ndarray]:
    """The complex step of <Y_bar, twin> in each real input."""
    return [
        complex_step(lambda v, name=name: np.sum(Y_bar * twin(**{**inputs, name: v})), x)
        for name, x in inputs.items()
        if _is_real(x)
    ]


def check_rule(label: str, cases: Iterable[tuple], rng: np.random.Generator) -> Check:
    """Verify an equation against the complex step of a twin, and the rule against the equation.

    ``cases`` are tuples of an operator, its inputs by name, a twin (the operator in NumPy, for
    complex numbers too: its output of the inputs by name), the equation (the cotangents of the real
    inputs, of Y_bar and the inputs by name) and the attributes.  The twin is first held against the
    operator itself.
    """
    by_equation, by_rule, by_steps = [], [], []
    for op, inputs, twin, equation, attributes in cases:
        Y = twin(**inputs)
        if not np.allclose(value(op, inputs, **attributes), Y):
            raise AssertionError(f"the twin of {op} has another value")
        Y_bar = rng.normal(size=np.shape(Y))
        by_equation += equation(Y_bar, **inputs)
        by_rule += vjp(op, inputs, Y_bar, **attributes).values()
        by_steps += steps(inputs, twin, Y_bar)
    verify(label, flat(by_equation), flat(by_steps), RTOL)
    return verify(label, flat(by_rule), flat(by_equation), RTOL, against="the equation in NumPy")


def _is_real(x: np.ndarray | None) -> bool:
    return x is not None and x.dtype.kind == "f"


def flat(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """All entries of some arrays, one after the other."""
    return np.concatenate([np.ravel(G) for G in arrays])
