"""What goes in and what comes out: the options, and the names of inputs, weights and outputs."""

from collections.abc import Iterable
from copy import deepcopy
from enum import IntFlag

from onnx import ModelProto, ValueInfoProto, helper

from helpers.onnx_grad.simplify import tensor_infos
from helpers.onnx_grad.tensor import REAL


class DerivativeOptions(IntFlag):
    """What the graph of :func:`~helpers.onnx_grad.derivative.onnx_derivative` looks like.

    ``KeepOutputs`` and ``FillGrad`` combine with ``|``; ``KeepYieldOp`` and ``Loss`` stand alone.
    """

    Zero = 0
    """Outputs ``<name>_grad``, an input ``<output>_grad`` for every real output."""
    KeepYieldOp = 1
    """The operator YieldOp stands between the outputs and their gradients. This graph shows where
    the two halves meet; no runtime executes it."""
    KeepOutputs = 2
    """The outputs of the original graph are outputs too."""
    FillGrad = 4
    """The gradient of every output is filled with ones instead of being an input."""
    Loss = 8
    """The gradients are those of a scalar loss in the graph, whose outputs stay."""


def checked_options(options, loss, label) -> DerivativeOptions:
    names = ", ".join(DerivativeOptions.__members__)
    try:
        options = DerivativeOptions(0 if options is None else options)
    except ValueError:
        like = options if str(options) in DerivativeOptions.__members__ else "Zero"
        raise ValueError(
            f"options is {options!r}, expected DerivativeOptions.{like}; the options are {names}"
        ) from None
    unknown = int(options) & ~sum(option.value for option in DerivativeOptions)
    if unknown:
        raise ValueError(f"options={int(options)}: no option has the value {unknown}")
    for alone in (DerivativeOptions.KeepYieldOp, DerivativeOptions.Loss):
        if alone in options and options != alone:
            others = options & ~alone
            raise ValueError(f"options: {alone.name} excludes every other option, got {others!r}")
    if DerivativeOptions.Loss in options:
        without = "; without a label: options=FillGrad | KeepOutputs, for the same gradients"
        for name, value, hint in (("loss", loss, ""), ("label", label, without)):
            if not value or not isinstance(value, str):
                raise ValueError(
                    f"options=Loss needs {name}, the name of a tensor; got {value!r}{hint}"
                )
    elif loss is not None or label is not None:
        raise ValueError("loss and label go with options=DerivativeOptions.Loss only")
    return options


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


class Interface:
    """Which names go in and out: targets to differentiate by, outputs to start from."""

    def __init__(self, model: ModelProto, constants, weights, inputs, options, loss, label):
        graph, self.infos = model.graph, tensor_infos(model)
        initializers = {t.name: t for t in graph.initializer}
        self.inputs = {v.name: v for v in graph.input if v.name not in initializers}
        self.outputs = {v.name: v for v in graph.output}
        real_weights = [n for n, t in initializers.items() if t.data_type in REAL]
        if label is not None and label not in self.inputs:
            raise ValueError(f"label {label!r} is no input; the inputs are {_listed(self.inputs)}")
        real_inputs = [n for n in self.inputs if self.is_real(n) and n != label]
        self.left_out = constants
        by_default = [n for n in real_weights if n not in constants]
        self.weights = self._chosen("weight", weights, real_weights, initializers, by_default)
        chosen = self._chosen("input", inputs, real_inputs, self.inputs, real_inputs)
        self.targets = [*chosen, *self.weights]
        if not self.targets:
            left_out = "".join(f"; {n!r} is a constant ({w})" for n, w in self.left_out.items())
            raise ValueError(
                f"nothing to differentiate by: no real input and no real weight{left_out}"
            )
        self.real_outputs = [n for n in self.outputs if self.is_real(n)]
        if loss is not None:
            if loss not in self.outputs:
                known = _listed(self.outputs)
                raise ValueError(f"loss {loss!r} is no output; the outputs are {known}")
            if not self.is_real(loss):
                raise ValueError(f"loss {loss!r} is not a real tensor")
            shape = self.infos[loss].shape
            if shape is None or any(d != 1 for d in shape):
                shown = "unknown" if shape is None else list(shape)
                raise ValueError(f"loss {loss!r} is not a scalar: its shape is {shown}")
            self.real_outputs = [loss]
        if not self.real_outputs:
            raise ValueError(
                f"nothing to differentiate: no output is a real tensor; "
                f"the outputs are {_listed(self.outputs)}"
            )
        self._check_names(options)

    def is_real(self, name: str) -> bool:
        return self.infos[name].dtype in REAL

    def value(self, name: str, like: str) -> ValueInfoProto:
        """A declaration with the type and shape of another tensor."""
        known = None if like in self.weights else self.inputs.get(like) or self.outputs[like]
        if known is None or not known.type.tensor_type.HasField("shape"):
            return helper.make_tensor_value_info(name, *self.infos[like])
        value = deepcopy(known)
        value.name, value.doc_string = name, ""
        return value

    def _chosen(self, kind: str, names, real: list[str], all_names, default) -> list[str]:
        if names is None:
            return default
        if isinstance(names, str):
            raise ValueError(f"{kind}s is the string {names!r}, expected a list of names")
        for name in names:
            if name in real:
                continue
            if name in all_names:
                why = "it is the label" if self.is_real(name) else "its type is not real"
                raise ValueError(f"{kind} {name!r} cannot be differentiated by: {why}")
            where = "initializer" if kind == "weight" else kind
            raise ValueError(f"{kind} {name!r} is no {where}; the real ones are {_listed(real)}")
        return list(dict.fromkeys(names))

    def _check_names(self, options) -> None:
        """The promised names must be free where the caller sees them."""
        self.promised = [f"{n}_grad" for n in self.targets]
        if not options & (DerivativeOptions.FillGrad | DerivativeOptions.Loss):
            self.promised += [f"{n}_grad" for n in self.real_outputs]
        both = [n for n in self.targets if n in self.real_outputs]
        if both and len(set(self.promised)) < len(self.promised):
            raise ValueError(
                f"{both[0]!r} is an output and to be differentiated by, so {both[0]}_grad would "
                f"name two things; put an Identity in front of the output"
            )
        visible = {*self.inputs, *self.weights}
        if options & (DerivativeOptions.KeepOutputs | DerivativeOptions.Loss):
            visible |= set(self.outputs)
        for name in self.promised:
            if name in visible:
                raise ValueError(
                    f"the gradient of {name.removesuffix('_grad')!r} would be named {name!r}, "
                    "which is an input, weight or output of the model already; rename that one"
                )
        self.visible = visible
