r"""Training with a runtime that only executes graphs: a loss and an optimiser's step as graphs.

>>> import numpy as np
>>> import onnxruntime
>>> from onnx.parser import parse_model
>>> from helpers.onnx_grad import add_loss, initial_state, sgd, training_step
>>> model = parse_model('''<ir_version: 10, opset_import: ["" : 21]>
... line (float[N, 1] X) => (float[N, 1] Y) <float[1] b = {1.0}> { Y = Add(X, b) }''')
>>> step = training_step(add_loss(model, "mse"), sgd())
>>> [x.name for x in step.graph.input], [y.name for y in step.graph.output]
(['X', 'label', 'b', 'rate'], ['b_new', 'Y', 'loss'])
>>> session = onnxruntime.InferenceSession(step.SerializeToString())
>>> batch = {"X": np.zeros((1, 1), "f"), "label": np.full((1, 1), 3, "f"), "rate": np.array(0.5)}
>>> b, loss = session.run(["b_new", "loss"], batch | initial_state(step, model))
>>> b.tolist(), float(loss)
([3.0], 4.0)
"""

import inspect
from collections.abc import Callable
from copy import deepcopy

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from helpers.onnx_grad.builder import Graph, name_results
from helpers.onnx_grad.derivative import onnx_derivative
from helpers.onnx_grad.interface import DerivativeOptions
from helpers.onnx_grad.prepare import declare_outputs
from helpers.onnx_grad.simplify import all_names, free_name, rename, tensor_infos
from helpers.onnx_grad.storage import as_initializers, checked_model, constant_nodes, loaded_model
from helpers.onnx_grad.tensor import REAL, Info, Tensor, canonical, compatible

Step = Callable[..., Tensor | tuple[Tensor, ...]]

# y is the output, t the label, l what is reduced to the loss.
ENTRYWISE = {
    "mse": "e = Sub(y, t) l = Mul(e, e)",
    "l1": "e = Sub(y, t) l = Abs(e)",
    "bce_with_logits": "a = Softplus(y) b = Mul(y, t) l = Sub(a, b)",
}
# Softplus for a runtime that has it in single precision only: log(1 + e^-|y|) + (y + |y|) / 2.
IN_DOUBLE = """one = Constant<value = double {1.0}>() half = Constant<value = double {0.5}>()
    q = Abs(y) n = Neg(q) e = Exp(n) f = Add(one, e) c = Log(f) d = Add(y, q) p = Mul(half, d)
    a = Add(p, c)"""
OF_CLASSES = {"cross_entropy": "SoftmaxCrossEntropyLoss", "nll": "NegativeLogLikelihoodLoss"}


def add_loss(
    model: ModelProto,
    kind: str,
    output: str | None = None,
    *,
    label: str = "label",
    loss: str = "loss",
    reduction: str = "mean",
) -> ModelProto:
    r"""A copy of a model with a loss of one of its outputs as its last output.

    With the output :math:`y` and the label :math:`t`, the mean or the sum over all entries of

    - ``"mse"``: :math:`(y - t)^2`,
    - ``"l1"``: :math:`|y - t|`,
    - ``"bce_with_logits"``: :math:`\log(1 + e^y) - t y`, the cross-entropy of the probability
      :math:`1 / (1 + e^{-y})` with :math:`0 \le t \le 1`,

    or over all labels, which are integers and have the shape of :math:`y` without the classes, its
    axis 1, of

    - ``"cross_entropy"``: :math:`\log \sum_c e^{y_c} - y_t`,
    - ``"nll"``: :math:`-y_t`, for outputs that are logarithms of probabilities already.

    Parameters
    ----------
    model : ModelProto
    kind : str
    output : str, optional
        Which output; the only real one if it is left out.
    label, loss : str
        The names of the new input and the new output.
    reduction : "mean" or "sum"

    Raises
    ------
    TypeError
        If ``model`` is not a model.
    ValueError
        If there is no such loss, reduction or real output, several outputs to choose from, a name
        that is taken, or a loss of classes of an output that has no axis 1.
    """
    made = deepcopy(checked_model(model))
    known = {"loss": (kind, ENTRYWISE | OF_CLASSES), "reduction": (reduction, ("mean", "sum"))}
    for what, (found, names) in known.items():
        if found not in names:
            raise ValueError(f"{what} {found!r} is unknown; there are {', '.join(names)}")
    declare_outputs(made)
    graph, taken = made.graph, all_names(made.graph)
    real = {v.name: v for v in graph.output if v.type.tensor_type.elem_type in REAL}
    if output not in real and (output is not None or len(real) != 1):
        given = "several real outputs" if output is None else f"output {output!r} is no real output"
        given = given if real else "no output is real"
        raise ValueError(f"{given}; the real ones are {', '.join(map(repr, real)) or 'none'}")
    output = output or next(iter(real))
    for name in (label, loss):
        if name in taken or label == loss:
            raise ValueError(f"the name {name!r} is taken; give another one for the label or loss")

    info = Info.of(real[output].type)
    if kind in OF_CLASSES:
        if len(info.shape) < 2:
            raise ValueError(f"{kind} takes scores (N, classes, ...); {output!r} has {info.shape}")
        classless = (info.shape[0], *info.shape[2:])
        graph.input.append(helper.make_tensor_value_info(label, TensorProto.INT64, classless))
        body = f'loss = {OF_CLASSES[kind]}<reduction = "{reduction}">(y, t)'
    else:
        graph.input.append(helper.make_tensor_value_info(label, info.dtype, info.shape))
        body = f"{ENTRYWISE[kind]} loss = Reduce{reduction.capitalize()}<keepdims = 0>(l)"
        if info.dtype == TensorProto.DOUBLE:
            body = body.replace("a = Softplus(y)", IN_DOUBLE)
    added = parser.parse_graph(f"g (float y, float t) => (float loss) {{ {body} }}")
    inner = (name for node in added.node for name in node.output if name != "loss")
    names = {name: free_name(f"{loss}_{name}", taken) for name in inner}
    rename(added.node, names | {"y": output, "t": label, "loss": loss})
    graph.node.extend(added.node)
    graph.output.append(helper.make_tensor_value_info(loss, info.dtype, []))
    return made


def sgd(momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False) -> Step:
    r"""Stochastic gradient descent, as a step for :func:`training_step`, with the scalar ``rate``.

    With weight decay :math:`\lambda` and momentum :math:`\mu`, as in PyTorch,

    .. math::

        g_t &= \bar\theta_t + \lambda \theta_{t-1} , \\
        u_t &= \mu u_{t-1} + g_t , \\
        \theta_t &= \theta_{t-1} - \eta\, u_t ,

    from :math:`u_0 = 0`, a state of each weight if :math:`\mu > 0`; and with ``nesterov``
    :math:`\theta_t = \theta_{t-1} - \eta\, (g_t + \mu u_t)`.

    Raises
    ------
    ValueError
        If a number is out of its range, or ``nesterov`` is without momentum.
    """
    _check(momentum=(momentum, 0 <= momentum < 1), weight_decay=(weight_decay, weight_decay >= 0))
    if nesterov and not momentum:
        raise ValueError("nesterov needs a momentum above 0")

    def plain(w, g, *, rate):
        return w - rate.cast(w.dtype) * (g + weight_decay * w if weight_decay else g)

    def heavy(w, g, u, *, rate):
        g = g + weight_decay * w if weight_decay else g
        u = momentum * u + g
        return w - rate.cast(w.dtype) * (g + momentum * u if nesterov else u), u

    return heavy if momentum else plain


def adamw(
    beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> Step:
    r"""Adam with decoupled weight decay, as a step for :func:`training_step`.

    With the scalars ``rate``, :math:`\eta`, and ``count``, :math:`t = 1, 2, \dots`, and two states
    of each weight, from :math:`m_0 = v_0 = 0`,

    .. math::

        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t , \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 , \\
        \theta_t &= (1 - \eta \lambda)\, \theta_{t-1} \\
        &\quad - \eta\,
        \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \varepsilon} .

    Without weight decay :math:`\lambda` it is Adam.  The factors that depend on t alone are
    computed in double precision.

    Raises
    ------
    ValueError
        If a number is out of its range; and later, if ``eps`` is 0 in the type of a weight, as
        1e-8 is in float16: keep such weights in float32, and Cast them in the model.
    """
    _check(beta1=(beta1, 0 <= beta1 < 1), beta2=(beta2, 0 <= beta2 < 1))
    _check(eps=(eps, eps > 0), weight_decay=(weight_decay, weight_decay >= 0))

    def step(w, g, m, v, *, rate, count):
        if not np.array(eps).astype(helper.tensor_dtype_to_np_dtype(w.dtype)):
            kind = TensorProto.DataType.Name(w.dtype).lower()
            raise ValueError(
                f"eps={eps} is 0 in the type of weight {w.name!r}, {kind}; keep the weight in "
                "float32, and Cast it in the model"
            )

        def unbiased(beta):  # 1 - beta^t, which single precision would round
            return 1.0 - g.graph.op("Pow", g.graph.constant(beta, TensorProto.DOUBLE), count)

        m = m + (1 - beta1) * (g - m)
        v = v + (1 - beta2) * (g * g - v)
        root = g.graph.op("Sqrt", v) / g.graph.op("Sqrt", unbiased(beta2)).cast(w.dtype)
        move = (rate / unbiased(beta1)).cast(w.dtype) * (m / (root + eps))
        if weight_decay:
            w = w * (1.0 - weight_decay * rate).cast(w.dtype)
        return w - move, m, v

    return step


def _check(**numbers: tuple[float, bool]) -> None:
    for name, (value, right) in numbers.items():
        if not right:
            raise ValueError(f"{name} is {value}, which is out of its range")


def training_step(
    model: ModelProto,
    step: Step,
    loss: str = "loss",
    label: str = "label",
    weights: list[str] | None = None,
) -> ModelProto:
    """A model with a loss, as one training step: a batch and weights in, new weights out.

    Parameters
    ----------
    model : ModelProto
        With the loss among its outputs, and the label among its inputs; see :func:`add_loss`.
    step : function
        :func:`sgd` or :func:`adamw`, or one as of :func:`add_step`.
    loss, label : str
    weights : list of str, optional
        As of :func:`~helpers.onnx_grad.derivative.onnx_derivative`; those it chooses by default.

    Returns
    -------
    ModelProto
        As of :func:`add_step`.

    Raises
    ------
    TypeError, NoGradientError, ValueError
        As of :func:`~helpers.onnx_grad.derivative.onnx_derivative` and :func:`add_step`.
    """
    gradient = onnx_derivative(model, weights, [], DerivativeOptions.Loss, loss, label)
    count = len(gradient.graph.output) - len(model.graph.output)
    chosen = [y.name.removesuffix("_grad") for y in gradient.graph.output[:count]]
    return add_step(gradient, step, chosen)


def add_step(gradient: ModelProto, step: Step, weights: list[str]) -> ModelProto:
    """A graph of gradients, as that of an optimiser's step.

    Parameters
    ----------
    gradient : ModelProto
        With inputs ``<name>`` and outputs ``<name>_grad`` for each weight, as
        :func:`~helpers.onnx_grad.derivative.onnx_derivative` and
        :func:`~helpers.onnx_grad.files.file_derivative` make it.
    step : function ``step(w, g, <states>, *, <scalars>)``
        Of a weight and its gradient as :class:`~helpers.onnx_grad.tensor.Tensor`, it returns the
        new weight, and with states a tuple of that and the new states.  Each weight has states of
        its own.  Scalars are keyword-only, and in double precision; cast them:
        ``w - rate.cast(w.dtype) * g``.  In the graph all have the names that they have here.
    weights : list of str

    Returns
    -------
    ModelProto
        Its inputs are those of the gradient, the states ``<name>_<state>`` and the scalars (a
        scalar that is an input of the gradient already is that one); its outputs are
        ``<name>_new``, the states ``<name>_<state>_new`` and all others of the gradient.

    Raises
    ------
    TypeError
        If ``gradient`` is not a model, or ``step`` no such function.
    ValueError
        If a weight is not an input with a gradient, a name is taken, or a result of ``step``
        does not have the type and shape of its weight.
    """
    made = deepcopy(checked_model(gradient))
    graph, infos = made.graph, tensor_infos(made)
    inputs, outputs = ({v.name: v for v in values} for values in (graph.input, graph.output))
    known = [name for name in inputs if f"{name}_grad" in outputs]
    if isinstance(weights, str) or not weights or not set(weights).issubset(known):
        listed = ", ".join(map(repr, known)) or "none"
        raise ValueError(f"weights is {weights!r}; the inputs that have a gradient are {listed}")
    states, scalars = _arguments(step)
    opsets = {canonical(o.domain): o.version for o in made.opset_import}
    g = Graph(opsets, infos, {}, all_names(graph))
    g.prefix, new = "step", {}
    added = {name: Info(TensorProto.DOUBLE, ()) for name in scalars if name not in inputs}
    added |= {f"{w}_{state}": infos[w] for w in weights for state in states}
    infos |= added
    for w in weights:
        held = [w, *(f"{w}_{state}" for state in states)]
        arguments = [Tensor(name, g) for name in (w, f"{w}_grad", *held[1:])]
        try:
            results = step(*arguments, **{name: Tensor(name, g) for name in scalars})
        except onnx.checker.ValidationError as error:
            raise ValueError(
                f"step does not fit {w!r}: {error}; scalars need a cast: rate.cast(w.dtype)"
            ) from error
        results = results if isinstance(results, tuple) else (results,)
        if len(results) != len(held):
            raise ValueError(f"step returned {len(results)} results for {len(held)} of {held}")
        for name, result in zip(held, results, strict=True):
            shape = infos[w].shape
            if not isinstance(result, Tensor):
                raise TypeError(f"step returned {result!r} for {name!r}, expected a Tensor")
            if result.dtype != infos[w].dtype or not compatible(result.shape, shape):
                raise ValueError(
                    f"step returned {result!r} for {name!r} of shape {shape}; it needs the type "
                    "and shape of the weight, and scalars a cast: rate.cast(w.dtype)"
                )
            new[f"{name}_new"] = result
    clash = sorted({*added, *new} & all_names(graph))
    if clash:
        raise ValueError(f"the name {clash[0]!r} is taken in the graph; rename what has it")
    name_results(g, new)
    graph.node.extend(g.nodes)
    graph.initializer.extend(g.initializers)
    graph.input.extend(helper.make_tensor_value_info(name, *infos[name]) for name in added)
    kept = [v for v in graph.output if v.name not in {f"{w}_grad" for w in weights}]
    del graph.output[:]
    shapes = {name: infos[name.removesuffix("_new")] for name in new}
    graph.output.extend(helper.make_tensor_value_info(name, *like) for name, like in shapes.items())
    graph.output.extend(kept)
    onnx.checker.check_model(made, full_check=True)
    return made


def _arguments(step: Step) -> tuple[list[str], list[str]]:
    """The names of its states and of its scalars."""
    if not callable(step):
        raise TypeError(f"step is {step!r}, expected a function like the one that sgd() returns")
    parameters = list(inspect.signature(step).parameters.values())
    scalars = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    states = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(states) < 2 or len(states) + len(scalars) < len(parameters):
        raise TypeError(
            f"step takes {inspect.signature(step)}, expected (w, g, states, *, scalars)"
        )
    return states[2:], scalars


def initial_state(training: ModelProto, model: ModelProto) -> dict[str, np.ndarray]:
    """What a training step starts from: the weights of the model, and zeros for all other states.

    Parameters
    ----------
    training : ModelProto
        As :func:`training_step` or :func:`add_step` makes it.
    model : ModelProto
        The model that has the weights.

    Returns
    -------
    dict of name -> array
        One for each input ``<name>`` that has an output ``<name>_new``, in the order of the
        inputs.  They are copies, and may be changed.
    """
    copy = deepcopy(loaded_model(model))
    as_initializers(copy, constant_nodes(copy))
    held = {t.name: numpy_helper.to_array(t).copy() for t in copy.graph.initializer}
    new = {y.name for y in checked_model(training).graph.output}
    moving = {v.name: Info.of(v.type) for v in training.graph.input if f"{v.name}_new" in new}
    for name, info in moving.items():
        if name not in held:
            held[name] = np.zeros(info.shape, helper.tensor_dtype_to_np_dtype(info.dtype))
    return {name: held[name] for name in moving}
