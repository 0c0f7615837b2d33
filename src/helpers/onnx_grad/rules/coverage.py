"""Which operators have a gradient, and within which limits: the table of rules as data.

>>> from helpers.onnx_grad.rules.coverage import coverage
>>> row = next(row for row in coverage() if row.operator == "GridSample")
>>> row.since, row.attributes["padding_mode"], row.limits
(22, ('zeros', 'border'), {'rank': 'known, of X'})
"""

import inspect
from typing import NamedTuple

import onnx

from helpers.onnx_grad.prepare import NEWEST, OLDEST
from helpers.onnx_grad.rules.table import ABOUT, COMPOSED, RULES, About, Rule, no_gradient
from helpers.onnx_grad.tensor import default_of, schema_of


class Coverage(NamedTuple):
    """What is known of one operator."""

    domain: str
    operator: str
    since: int | None
    """The version of its domain that it has in this form since; None: no standard operator."""
    kind: str
    """"rule"; "zero" (the gradient is zero everywhere); "definition" (the standard defines it by
    other operators, and these are differentiated)."""
    formula: str
    """The first paragraph of the rule's docstring."""
    attributes: dict[str, tuple]
    """Its attributes that are heeded, and the values that are known: all, if there are none."""
    limits: dict[str, str]
    """What is refused: an attribute, an input or a circumstance, and what it has to be."""
    settings: tuple[str, ...]
    """Inputs that are settings: an initializer that is used so alone is no weight by default."""


def coverage() -> list[Coverage]:
    """One row for each operator with a gradient, sorted by domain and name."""
    ruled = [_row(*key, rule, ABOUT[key]) for key, rule in RULES.items()]
    return sorted(ruled + [_row("", name, None, About()) for name in COMPOSED])


def _row(domain: str, name: str, rule: Rule | None, about: About) -> Coverage:
    schema = schema_of(name, onnx.defs.onnx_opset_version() if domain else NEWEST, domain)
    limits, formula, kind = dict(about.limits), inspect.getdoc(rule) or "", "rule"
    inputs = [] if schema is None else [x.name for x in schema.inputs]
    if rule is None:
        everything = dict.fromkeys(schema.attributes, ())
        about = about._replace(settings=frozenset(COMPOSED[name]), attributes=everything)
        formula = "Differentiated through its definition in the standard, operator by operator."
        kind = "definition"
    if about.ranked:
        shown = [inputs[i] for i in about.ranked if i < len(inputs)]
        limits["rank"] = f"known, of {' and '.join(shown) or 'its inputs'}"
    known = about.attributes or {}
    given = {} if schema is None else schema.attributes
    for attribute in sorted(given.keys() - known.keys()):
        limits[attribute] = str(default_of(given[attribute], "left out"))
    if about.opset > OLDEST:
        limits["opset"] = f"{about.opset} or newer"
    return Coverage(
        domain,
        name,
        None if schema is None else schema.since_version,
        "zero" if rule is no_gradient else kind,
        " ".join(formula.partition("\n\n")[0].split()),
        {k: known[k] for k in sorted(known) if schema is None or k in given},
        limits,
        tuple(inputs[i] for i in sorted(about.settings)),
    )
