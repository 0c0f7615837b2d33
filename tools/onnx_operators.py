"""Make the page "ONNX operators": each operator with a gradient, its limits, and what tests it."""

from collections.abc import Iterable
from pathlib import Path

from helpers.onnx_grad.attributes import FLAG
from helpers.onnx_grad.prepare import NEWEST, OLDEST
from helpers.onnx_grad.rules.coverage import Coverage, coverage
from tools import book

PAGE = "book/onnx-operators.md"

HEAD = """\
(onnx-operators)=
# ONNX operators

% Made by `make notebooks` from the table of rules, not by hand.

These are the operators that `onnx_derivative` differentiates: {rules} by a rule, {definitions} by
the definition that the standard gives them in other operators, and {zero} whose gradient is zero
everywhere. Opsets {oldest} to {newest} are accepted. An operator that is not listed is refused by
name if it lies between a chosen weight or input and an output; comparisons, shapes and other
operators with integer or boolean results need no rule.
{{func}}`~helpers.onnx_grad.rules.table.register_gradient` adds a rule, and
{{doc}}`../notebooks/onnx/02-rules` and {{doc}}`../notebooks/onnx/03-rules-of-layers` derive the
main ones. For a model in a file, `python -m helpers.onnx_grad model.onnx` lists what has no rule.

The number after a name is the version of the domain in which the operator got its present form;
older forms are accepted too. An attribute is followed by the values that are supported, unless it
is a number, a flag or a list, which may have any value. *Limits* are further conditions on an
attribute or an input. Any other attribute or value is refused, and the message names the node. An
initializer that is used only as a *setting* is a constant unless `weights` names it.

The branch that a Where or an Imputer does not choose has no influence on a gradient, even if its
slope is infinite or NaN. Examples are the branches of an exported PowerTransformer, and a row of
attention whose mask allows nothing.

In a quantised model the scales have gradients, and so has everything that passes through
DequantizeLinear without being rounded, such as the input of a model with 8-bit weights. The
gradient of a rounding is zero, so QuantizeLinear is refused.
{{func}}`~helpers.onnx_grad.rules.quantize.straight_through` is a rule, to be registered by hand,
that treats the rounding as the identity.

LSTM, GRU and RNN are unrolled step by step, forwards and backwards, so the number of nodes grows
with the number of steps: a GRU with all its gradients has more than 40 nodes for each step, layer
and direction, which is about 18,000 for two layers of 100 steps in both directions.

A runtime needs kernels for the operators of the gradient, in the type of the model. onnxruntime's
CPU provider has no float64 kernels for {no_float64}: run networks with these operators in float32.
"""

# Tried in tests/book/test_onnx_operators.py.
NO_FLOAT64 = ("Conv", "ConvTranspose", "AveragePool", "InstanceNormalization", "OneHot")

SECTIONS = {
    ("", "rule"): "Operators with a rule",
    ("", "definition"): "Operators that are differentiated through their definition",
    ("ai.onnx.ml", "rule"): "Operators of the domain ai.onnx.ml",
    ("com.microsoft", "rule"): "Operators of the domain com.microsoft",
    ("", "zero"): "Operators whose gradient is zero",
    ("ai.onnx.ml", "zero"): "Operators of the domain ai.onnx.ml whose gradient is zero",
}

SECTION = """\
## {title}

{tests}
{plain}{table}"""

TABLE = """
:::{{list-table}}
:header-rows: 1
:widths: 24 32 44

* - Operator
  - Attributes
  - Limits and settings
{rows}
:::
"""

# A backslash at the end of a line breaks the line inside a cell.
BREAK = " \\\n    "


def make(rows: Iterable[Coverage] | None = None) -> str:
    """The text of the page, from the table of rules."""
    rows = coverage() if rows is None else list(rows)
    parts = {key: [row for row in rows if (row.domain, row.kind) == key] for key in SECTIONS}
    left = [row for row in rows if not any(row in part for part in parts.values())]
    if left:
        raise ValueError(f"no section of the page takes {left[0].domain} {left[0].operator}")
    counts = {
        kind: sum(row.kind == kind for row in rows) for kind in ("rule", "definition", "zero")
    }
    head = HEAD.format(
        rules=counts["rule"],
        definitions=counts["definition"],
        zero=counts["zero"],
        oldest=OLDEST,
        newest=NEWEST,
        no_float64=", ".join(NO_FLOAT64[:-1]) + f" and {NO_FLOAT64[-1]}",
    )
    sections = [_section(SECTIONS[key], part) for key, part in parts.items() if part]
    return "\n".join([head, *sections])


def _section(title: str, rows: list[Coverage]) -> str:
    patterns = {}
    for row in rows:
        patterns.setdefault(tested_by(row, "NAME"), []).append(row.operator)
    largest = max(patterns, key=lambda pattern: len(patterns[pattern]))
    tests = [f"Tested by `pytest {_quoted(largest)}`, NAME being that of the operator."]
    for pattern, names in patterns.items():
        if pattern != largest:
            tests.append(f"{', '.join(names)}: `pytest {_quoted(pattern)}`.")
    bare = [row for row in rows if not (row.attributes or row.limits or row.settings)]
    plain = f"\nWithout attributes and limits: {', '.join(map(_name, bare))}.\n" if bare else ""
    shown = [_row(row) for row in rows if row not in bare]
    table = TABLE.format(rows="\n".join(shown)) if shown else ""
    return SECTION.format(title=title, tests="\n".join(tests), plain=plain, table=table)


def tested_by(row: Coverage, name: str) -> str:
    """What tests an operator: a file and a name that pytest's option -k selects by."""
    if row.kind == "definition":
        return f"tests/test_onnx_derivative.py -k test_defined_by_others[{name}"
    if row.operator in ("GRU", "LSTM", "RNN"):
        return f"tests/test_onnx_recurrent.py -k test_layer[{name}-"
    return f"tests/test_onnx_rules.py -k test_rule[{name}-"


def _quoted(test: str) -> str:
    file, name = test.split(" -k ")
    return f'{file} -k "{name}"'


def _name(row: Coverage) -> str:
    return f"`{row.operator}`" + ("" if row.since is None else f" ({row.since})")


def _row(row: Coverage) -> str:
    limits = [f"`{what}`: {must}" for what, must in row.limits.items()]
    limits += [f"settings: {_code(row.settings)}"] if row.settings else []
    attributes = ", ".join(f"`{name}`{_values(known)}" for name, known in row.attributes.items())
    cells = [_name(row), attributes, BREAK.join(limits)]
    return "\n".join(
        f"{'* -' if k == 0 else '  -'} {cell}".rstrip() for k, cell in enumerate(cells)
    )


def _values(known: tuple) -> str:
    return f" ({', '.join(map(str, known))})" if known and known != FLAG else ""


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def write(root: Path = book.ROOT) -> None:
    """Write the page."""
    (root / PAGE).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    write()
