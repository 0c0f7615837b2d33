"""The gradient of a model in a file, as a file: python -m helpers.onnx_grad model.onnx -o grad.onnx

Without -o, or with --list, it shows what the model has: inputs, outputs, the weights that are
differentiated by (all that look like weights, or those that --weights names) and which operators
share one, the constants that stay and why, and the operators that have no rule.
"""

import argparse
import sys
from collections import Counter
from copy import deepcopy
from pathlib import Path

import onnx
from onnx import ModelProto, TensorProto
from onnx.external_data_helper import uses_external_data

from helpers.onnx_grad.constants import set_apart, users
from helpers.onnx_grad.files import file_derivative, read_structure
from helpers.onnx_grad.interface import DerivativeOptions, Interface, checked_options
from helpers.onnx_grad.prepare import prepared
from helpers.onnx_grad.rules import RULES
from helpers.onnx_grad.rules.table import dependents, inputs_of, may_be_real
from helpers.onnx_grad.simplify import live_nodes, tensor_infos
from helpers.onnx_grad.storage import as_inputs
from helpers.onnx_grad.tensor import REAL


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 0 if it went well, 1 with a sentence on stderr if not."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        if given.list or given.out is None:
            _show(given)
        else:
            _write(given)
    except OSError as error:
        print(f"{parser.prog}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except (ValueError, TypeError, onnx.checker.ValidationError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    first, rest = __doc__.split("\n", 1)
    parser = argparse.ArgumentParser(
        prog="python -m helpers.onnx_grad", description=first.split(":")[0] + ".", epilog=rest
    )
    add = parser.add_argument
    add("model", type=Path, help="an ONNX file; its weights may be beside it as external data")
    add("-o", "--out", type=Path, help="the file to write")
    add("--loss", help="the output that is the loss, a scalar: gradients of it")
    add("--label", help="the input that is the label, which gets no gradient")
    add("--weights", nargs="*", metavar="NAME", help="initializers to differentiate by")
    add("--inputs", nargs="*", metavar="NAME", help="inputs to differentiate by; all real ones")
    names = [option.name for option in DerivativeOptions if option.name != "Loss"]
    add("--options", nargs="+", default=[], choices=names, help="without --loss")
    add("--list", action="store_true", help="show the model, and write nothing")
    return parser


def _options(given: argparse.Namespace) -> DerivativeOptions:
    options = DerivativeOptions.Zero
    for name in given.options:
        options |= DerivativeOptions[name]
    return options | DerivativeOptions.Loss if given.loss is not None else options


def _write(given: argparse.Namespace) -> None:
    if given.out.exists() and given.out.samefile(given.model):
        raise ValueError(f"{given.out} is the model itself; the gradient goes into another file")
    model, constants = _read(given)
    choice = given.weights, given.inputs, _options(given), given.loss, given.label
    gradient = file_derivative(given.model, given.out, *choice)
    chosen = [y.name.removesuffix("_grad") for y in gradient.graph.output]
    _print_weights(model, chosen, constants)
    print(f"\n{given.out}: {len(model.graph.node)} nodes became {len(gradient.graph.node)}")
    _print_values("takes", gradient.graph.input)
    _print_values("gives", gradient.graph.output)


def _read(given: argparse.Namespace) -> tuple[ModelProto, dict[str, str]]:
    """The model, and its constants with the reason."""
    model = read_structure(given.model)
    return model, set_apart(model, given.weights, given.model.parent)


def _show(given: argparse.Namespace) -> None:
    model, constants = _read(given)
    opsets = ", ".join(f"{o.domain or 'ai.onnx'} {o.version}" for o in model.opset_import)
    lines = f"{given.model}: {len(model.graph.node)} nodes, {opsets}"
    chosen = [t.name for t in model.graph.initializer if t.name not in constants]
    if any(x is not None for x in (given.weights, given.inputs, given.loss, given.label)):
        options = checked_options(_options(given), given.loss, given.label)
        choice = given.weights, given.inputs, options, given.loss, given.label
        chosen = Interface(model, constants, *choice).targets
        lines += f"\n\ngradients of: {', '.join(chosen)}"
    print(lines)
    held = {t.name for t in model.graph.initializer}
    _print_values("inputs", [v for v in model.graph.input if v.name not in held])
    _print_values("outputs", model.graph.output)
    _print_weights(model, chosen, constants)
    _print_operators(model)


def _print_values(title: str, values) -> None:
    print(f"\n{title}:")
    for value in values:
        dims = [d.dim_value or d.dim_param or "?" for d in value.type.tensor_type.shape.dim]
        _print_line(value.name, value.type.tensor_type.elem_type, dims)


def _print_weights(model: ModelProto, chosen: list[str], reasons: dict[str, str]) -> None:
    real, used_by = [t for t in model.graph.initializer if t.data_type in REAL], users(model)
    for title, kept in (("weights", True), ("constants, left as they are", False)):
        print(f"\n{title}:")
        listed = [t for t in real if (t.name in chosen) is kept]
        for t in listed:
            why = reasons.get(t.name, "not chosen")
            if kept:
                uses = used_by.get(t.name, [])
                why = f"shared by {len(uses)}: {', '.join(uses)}" if len(uses) > 1 else ""
            _print_line(t.name, t.data_type, t.dims, why)
        if not listed:
            print("  none")


def _print_line(name: str, kind: int, dims, why: str = "") -> None:
    shape = f"[{', '.join(map(str, dims))}]"
    print(f"  {name:32} {TensorProto.DataType.Name(kind).lower():10} {shape:20} {why}".rstrip())


def without_rule(model: ModelProto) -> Counter[str]:
    """How often each operator without a rule stands between a real tensor and a real output."""
    graph, infos = model.graph, tensor_infos(model)

    def real(names) -> list[str]:
        return [name for name in names if name and may_be_real(infos, name)]

    held = (*graph.input, *graph.initializer)
    moving = dependents(infos, graph.node, real(v.name for v in held))
    lacking = (
        node
        for node in live_nodes(graph.node, real(v.name for v in graph.output))
        if moving & inputs_of(node) and real(node.output)
        if (node.domain, node.op_type) not in RULES
    )
    return Counter(f"{n.op_type} ({n.domain})" if n.domain else n.op_type for n in lacking)


def _print_operators(model: ModelProto) -> None:
    counts = Counter(node.op_type for node in model.graph.node)
    print("\noperators:")
    print(" ", ", ".join(f"{n} {name}" for name, n in counts.most_common()))
    try:
        light = deepcopy(model)
        as_inputs(light, [t.name for t in model.graph.initializer if uses_external_data(t)])
        missing = without_rule(prepared(light)[0])
    except ValueError as error:
        print(f"\n{error}")
        return
    print("\noperators with no rule, between inputs or weights and outputs:")
    print(" ", ", ".join(f"{n} {name}" for name, n in missing.most_common()) or "none")


if __name__ == "__main__":
    sys.exit(main())
