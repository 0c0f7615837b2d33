r"""The gradient of an ONNX graph as an ONNX graph, in standard operators alone.

Reverse mode on the graph itself: the nodes are visited from the last to the first, and each one's
rule turns the cotangents :math:`\bar y` of its outputs into nodes for those of its inputs,

.. math:: \bar x \mathrel{+}= \left(\frac{\partial y}{\partial x}\right)^{\top} \bar y ,

summed where a tensor is used more than once.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, ValueInfoProto, helper
from onnx.shape_inference import InferenceError

from helpers.onnx_grad import simplify
from helpers.onnx_grad.builder import Graph, name_results
from helpers.onnx_grad.interface import DerivativeOptions, Interface, checked_options
from helpers.onnx_grad.prepare import prepared
from helpers.onnx_grad.rules.ml import known_shape
from helpers.onnx_grad.rules.table import cotangent, dependents, sweep
from helpers.onnx_grad.storage import as_inputs
from helpers.onnx_grad.tensor import Info, Tensor, canonical

NEWEST_IR = 13


def onnx_derivative(
    onx: ModelProto,
    weights: list[str] | None = None,
    inputs: list[str] | None = None,
    options: DerivativeOptions = DerivativeOptions.Zero,
    loss: str | None = None,
    label: str | None = None,
    path_name: str | Path | None = None,
    verbose: int = 0,
) -> ModelProto:
    """The gradient of a model, as a model.

    Its inputs are those of the original, the weights (which are no longer constants), and the
    gradients ``<output>_grad`` of the real outputs.  Its outputs are the gradients
    ``<name>_grad`` with respect to the inputs and then the weights, each of the shape of what it
    is the gradient of; zeros where no real output depends on it, or through integers alone.

    Parameters
    ----------
    onx : ModelProto
        Opset 13 to 26, without control flow (If, Loop, Scan) between what is differentiated by and
        the outputs; an If whose condition is a constant is allowed.
    weights : list of str, optional
        Initializers to differentiate with respect to; a Constant node may be named too, by its
        output.  None for all real ones that are used as weights: not exponents,
        bounds, ratios, epsilons, masks, running statistics or anything else without axes, which an
        exporter stores in the same way.  A weight without axes has to be named.  ``verbose=1``
        prints what is left out and why;
        :func:`~helpers.onnx_grad.constants.constants_by_use` has the rule.
    inputs : list of str, optional
        Inputs to differentiate with respect to; None for all real ones (but the label).
    options : DerivativeOptions, optional
    loss : str, optional
        With ``DerivativeOptions.Loss``: the output that is the loss, a scalar or of size one.
    label : str, optional
        With ``DerivativeOptions.Loss``: the input that is the label, which gets no gradient.
    path_name : path, optional
        Save the model there as well.
    verbose : int
        1: print a summary; 2: print each node that is differentiated.

    Returns
    -------
    ModelProto
        In the opset of the original. ``onnx.checker.check_model(..., full_check=True)`` accepts
        it.

    Raises
    ------
    TypeError
        If ``onx`` is not a model; the message says how to get one of a path or of bytes.
    NoGradientError
        (a NotImplementedError and a ValueError) If an operator between the inputs or weights and
        the outputs has no rule, is control flow, or has a setting that its rule refuses.
        :func:`~helpers.onnx_grad.rules.table.register_gradient` adds rules.
    ValueError
        If the opset is too old or too new; numbers of the model are not loaded; a weight, input,
        loss or label is unknown or not real; the loss is not a scalar; options exclude each other;
        ``<name>_grad`` is the name of an input already; or a rule returns a gradient of another
        shape or type than its input's.
    """
    options = checked_options(options, loss, label)
    model, constants = prepared(onx, weights)
    interface = Interface(model, constants, weights, inputs, options, loss, label)
    try:
        gradient = _Sweep(model, interface, options, verbose).run()
        onnx.checker.check_model(gradient, full_check=True)
    except (onnx.checker.ValidationError, InferenceError) as error:
        try:
            onnx.checker.check_model(onx, full_check=True)
        except (onnx.checker.ValidationError, InferenceError) as own:
            raise ValueError(
                f"types or shapes of the model contradict each other: {str(own).strip()}"
            ) from own
        raise ValueError(
            "the model is valid, but its gradient is not: a rule is wrong, or ONNX infers a shape "
            f"that no runtime finds; {str(error).strip()}"
        ) from error
    if path_name is not None:
        onnx.save(gradient, str(path_name))
    if verbose:
        before, after = len(onx.graph.node), len(gradient.graph.node)
        targets = ", ".join(interface.targets)
        print(f"onnx_derivative: {before} nodes became {after}; gradients of {targets}")
        if interface.left_out:
            shown = ", ".join(f"{n} ({why})" for n, why in interface.left_out.items())
            print(f"onnx_derivative: constants, not weights: {shown}")
    return gradient


class _Sweep:
    """The reverse sweep over the nodes, and the model that it gives."""

    def __init__(self, model: ModelProto, interface: Interface, options, verbose: int):
        self.model, self.interface, self.options = model, interface, options
        self.verbose, graph = verbose, model.graph
        as_inputs(model, interface.weights)
        self._free_promised_names()
        constants = simplify.small_constants(graph, real=True)
        opsets = {canonical(o.domain): o.version for o in model.opset_import}
        names = {*self.infos, *interface.promised} | simplify.all_names(graph)
        self.g = Graph(opsets, self.infos, constants, names)
        self._infer_the_rest()
        self.dependent = dependents(self.infos, graph.node, interface.targets)
        self.terms: dict[str, list[Tensor]] = {}
        self.results: dict[str, Tensor] = {}

    def _infer_the_rest(self) -> None:
        """What ONNX's inference left open, as behind an operator that it does not know."""
        g = self.g
        for node in self.model.graph.node:
            before = {y: g.info(y) for y in node.output if y}
            if all(dtype is not None and shape is not None for dtype, shape in before.values()):
                continue
            g.infer(node)
            for y, (dtype, shape) in before.items():
                found = g.info(y)
                shape = found.shape if shape is None else shape
                shape = known_shape(node, g.infos) if shape is None else shape
                g.infos[y] = Info(dtype or found.dtype, shape)

    def _free_promised_names(self) -> None:
        """A tensor inside the model that has a promised name gets another one."""
        graph, interface = self.model.graph, self.interface
        self.infos = dict(interface.infos)
        inner = [y for node in graph.node for y in node.output if y]
        inner += [t.name for t in graph.initializer]
        inner = [name for name in inner if name not in interface.visible]
        wanted = {*interface.promised, *(f"{y}_grad" for y in interface.real_outputs)}
        taken = {*inner, *interface.infos, *wanted}
        renamed = [name for name in dict.fromkeys(inner) if name in wanted]
        free = (simplify.free_name(f"{name}_inner", taken) for name in renamed)
        self.renamed = names = dict(zip(renamed, free, strict=True))
        simplify.rename(graph.node, names)
        for t in graph.initializer:
            t.name = names.get(t.name, t.name)
        for old, new in names.items():
            if old in self.infos:
                self.infos[new] = self.infos.pop(old)

    def run(self) -> ModelProto:
        """The gradient model."""
        graph, g = self.model.graph, self.g
        self._start()
        tell = (lambda node: print(f"onnx_derivative: {node}")) if self.verbose > 1 else None
        sweep(g, list(graph.node), self.dependent, self.terms, tell)
        g.prefix = "grad"
        for target in self.interface.targets:
            dx = cotangent(g, self.terms, target)
            self.results[f"{target}_grad"] = g.zeros_like(Tensor(target, g)) if dx is None else dx
        name_results(g, self.results, [f"{y}_grad" for y in self.interface.real_outputs])
        return self._assembled()

    def _start(self) -> None:
        """Cotangents of the outputs: inputs of the new graph, ones, or what a YieldOp gives."""
        g, options = self.g, self.options
        g.prefix = "output"
        outputs = [self.renamed.get(y, y) for y in self.interface.real_outputs]
        promised = [f"{y}_grad" for y in self.interface.real_outputs]
        g.names.update(promised)
        self.cotangent_inputs: list[ValueInfoProto] = []
        for y, name, shown in zip(outputs, promised, self.interface.real_outputs, strict=True):
            if options & DerivativeOptions.Loss:
                seed = g.constant(np.ones(g.info(y).shape), g.info(y).dtype)
            elif options & DerivativeOptions.FillGrad:
                seed = g.filled(Tensor(y, g), 1.0)
                if name not in self.interface.visible:
                    self.results[name] = seed
            else:
                seed = Tensor(name, g)
                g.infos[name] = g.info(y)
                self.cotangent_inputs.append(self.interface.value(name, shown))
            self.terms.setdefault(y, []).append(seed)
        if options & DerivativeOptions.KeepYieldOp:
            self.cotangent_inputs = []
            how = {"domain": "com.microsoft", "full_shape_outputs": list(range(len(outputs)))}
            label = g.fresh("YieldOp")
            g.nodes.append(helper.make_node("YieldOp", outputs, promised, label, **how))

    def _assembled(self) -> ModelProto:
        old, g, interface = self.model.graph, self.g, self.interface
        inputs = [*old.input, *self.cotangent_inputs]
        outputs = [interface.value(f"{n}_grad", n) for n in interface.targets]
        if self.options & (DerivativeOptions.KeepOutputs | DerivativeOptions.Loss):
            outputs += old.output
        nodes = [*old.node, *g.nodes]
        if g.replaced:
            kept = [n for n in old.node if not set(g.replaced).issuperset(filter(None, n.output))]
            simplify.rename(g.nodes, {new: name for name, new in g.replaced.items()})
            nodes = simplify.in_order([*kept, *g.nodes])
        nodes = simplify.live_nodes(nodes, [v.name for v in outputs])
        initializers = [*old.initializer, *g.initializers]
        graph = helper.make_graph(
            nodes, old.name or "gradient", inputs, outputs, initializers, old.doc_string
        )
        domains = {canonical(node.domain) for node in nodes} | {""}
        opsets = {"com.microsoft": 1} | g.opsets
        imports = [helper.make_opsetid(d, opsets[d]) for d in sorted(domains)]
        version = min(max(self.model.ir_version, 8), NEWEST_IR)
        how = {"producer_name": "helpers.onnx_grad", "ir_version": version}
        model = helper.make_model(graph, opset_imports=imports, **how)
        used = {(node.domain, node.op_type) for node in nodes}
        if not used.isdisjoint((f.domain, f.name) for f in self.model.functions):
            model.functions.extend(self.model.functions)
        model.doc_string = self.model.doc_string
        model.metadata_props.extend(self.model.metadata_props)
        simplify.fold_shapes(model)
        simplify.drop_identities(model)
        simplify.drop_dead(model)
        return model
