"""Make the page "PyTensor coverage": each public name of pytensor.gradient, and who executes it."""

import ast
import importlib
import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import nbformat
from docutils.nodes import make_id
from pytensor import gradient

from tools import book

PAGE = "book/pytensor-coverage.md"
CHAPTERS = "notebooks/pytensor/"

# The names of the reference page that the book set out from: its functions, classes and methods.
REFERENCE = """
    grad_sources_inputs
    DisconnectedGrad DisconnectedGrad.R_op DisconnectedGrad.grad
    DisconnectedInputError
    DisconnectedType DisconnectedType.filter
    GradClip GradClip.grad
    GradScale GradScale.grad
    GradientError
    Lop
    NullTypeGradError
    Rop
    UndefinedGrad UndefinedGrad.R_op UndefinedGrad.grad
    ZeroGrad ZeroGrad.R_op ZeroGrad.grad
    as_list_or_tuple
    disconnected_grad
    grad
    grad_clip
    grad_not_implemented
    grad_scale
    grad_undefined
    hessian
    jacobian
    numeric_grad numeric_grad.abs_rel_err numeric_grad.abs_rel_errors numeric_grad.max_err
    subgraph_grad
    undefined_grad
    verify_grad
    zero_grad
""".split()

# What has gone, and what does its work now.
SUCCESSORS = {
    "grad_sources_inputs": "grad(known_grads)",
    "DisconnectedGrad.R_op": "DisconnectedGrad.pushforward",
    "DisconnectedGrad.grad": "DisconnectedGrad.pullback",
    "GradClip.grad": "GradClip.pullback",
    "GradScale.grad": "GradScale.pullback",
    "UndefinedGrad.R_op": "UndefinedGrad.pushforward",
    "UndefinedGrad.grad": "UndefinedGrad.pullback",
    "ZeroGrad.R_op": "ZeroGrad.pushforward",
    "ZeroGrad.grad": "ZeroGrad.pullback",
}

DEPRECATED = ("Rop", "Lop")  # their options are those of pushforward and pullback

# What to know of a name: what it does, and the trap if there is one.
KNOW = {
    "grad_sources_inputs": "gone: `grad(None, wrt, known_grads=...)`",
    "grad_time": "seconds that calls of `grad` have taken so far",
    "as_list_or_tuple": "returns a list, a tuple or a single variable, as asked for",
    "grad_not_implemented": "for Ops: a null gradient, *not written yet*; it raises when used",
    "grad_undefined": "for Ops: a null gradient, *does not exist*; it raises when used",
    "DisconnectedType": "type of a missing path. No two are equal: test with `isinstance`",
    "DisconnectedType.filter": "refuses every value",
    "DisconnectedType.filter_variable": "refuses every variable",
    "DisconnectedType.value_eq": "refuses every comparison, but PyTensor calls `values_eq`",
    "disconnected_type": "the instance to return from a `pullback`",
    "pushforward_through_pullback": "a push made of two pulls, the default of `pushforward`",
    "pushforward": "$Jv$. Wrong for outputs that use each other, and for sums of inputs",
    "pullback": "$J^\\top u$. Wrong for outputs that use each other: pass copies",
    "Rop": "deprecated, now `pushforward`; `eval_points` are the tangents",
    "Lop": "deprecated, now `pullback`; `eval_points` are the cotangents",
    "grad": "gradient of a scalar, as a graph. Differentiate first, rewrite afterwards",
    "subgraph_grad": "one piece of a backward pass, with the cotangents on its `end`; "
    "no longer `pytensor.subgraph_grad`",
    "NullTypeGradError": "a null gradient was used: the message names the Op",
    "DisconnectedInputError": "no path from the cost to the variable",
    "numeric_grad": "forward differences with a fixed absolute step: some seven digits at best",
    "numeric_grad.type_eps": "the step for each type, $10^{-7}$ for float64",
    "numeric_grad.abs_rel_err": "absolute and relative error; the relative one is never above 1",
    "numeric_grad.abs_rel_errors": "the same, for a list of arrays",
    "numeric_grad.max_err": "array, position and size of the worst error",
    "mode_not_slow": "replaces `FAST_COMPILE` and `DebugMode` by `FAST_RUN`",
    "verify_grad": "compares `grad` with `numeric_grad`. Its projection is all positive",
    "GradientError": "raised by `verify_grad`; for a NaN it raises `ValueError`",
    "jacobian": "$m$ pulls, in a loop or vectorised; any number of dimensions",
    "hessian": "for a list of variables, the blocks on the diagonal only",
    "hessian_vector_product": "$Hp$ at the cost of a few gradients, mixed blocks included",
    "ZeroGrad": "the Op of `zero_grad`",
    "ZeroGrad.pullback": "zeros",
    "ZeroGrad.pushforward": "returns no list, so a vector comes out as a scalar",
    "zero_grad_": "the instance of `ZeroGrad` that `zero_grad` applies",
    "zero_grad": "stops with zeros, but a null gradient upstream still raises",
    "UndefinedGrad": "the Op of `undefined_grad`",
    "UndefinedGrad.pullback": "null",
    "UndefinedGrad.pushforward": 'disconnected: with `"ignore"` a silent zero',
    "UndefinedGrad.connection_pattern": "connected",
    "undefined_grad_": "the instance of `UndefinedGrad` that `undefined_grad` applies",
    "undefined_grad": "forbids a gradient: taking it raises",
    "DisconnectedGrad": "the Op of `disconnected_grad`",
    "DisconnectedGrad.pullback": "disconnected",
    "DisconnectedGrad.pushforward": "disconnected",
    "DisconnectedGrad.connection_pattern": "not connected",
    "disconnected_grad_": "the instance of `DisconnectedGrad` that `disconnected_grad` applies",
    "disconnected_grad": "the safest way to stop a gradient",
    "GradClip": "its Op. Two are equal whatever their bounds: in a scan the first wins",
    "GradClip.pullback": "clips the cotangent; no push of its own",
    "grad_clip": "clips the cotangent, entry by entry. NaN passes",
    "GradScale": "its Op. Two are equal whatever their factors: in a scan the first wins",
    "GradScale.pullback": "multiplies the cotangent; no push of its own",
    "grad_scale": "multiplies the cotangent; a symbolic factor fails inside a scan",
    "grad(consider_constant)": "holds these constant, unless their node has another output in use",
    "grad(disconnected_inputs)": '`"raise"`, `"warn"` or `"ignore"`; a misspelling is accepted',
    "grad(add_names)": "names a gradient after cost and variable; a shared one has the last name",
    "grad(known_grads)": "*finished* cotangents: what else would arrive there is dropped",
    "grad(return_disconnected)": '`"zero"`, `"none"` or `"disconnected"`',
    "grad(null_gradients)": '`"raise"` or `"return"`: shows which variables are affected',
    "subgraph_grad(start)": "cotangents to begin with; added to those of `cost`",
    "subgraph_grad(cost)": "a cost to begin with",
    "subgraph_grad(details)": "lists in no fixed order, the first with totals: call twice",
    "pushforward(disconnected_outputs)": "a missing path raises only with the Ops' own rules",
    "pushforward(return_disconnected)": "what is returned for an output without a path",
    "pushforward(use_op_pushforward)": "the Ops' own rules, independent of pullbacks: for tests",
    "pullback(consider_constant)": "as in `grad`",
    "pullback(disconnected_inputs)": "as in `grad`",
    "pullback(return_disconnected)": "as in `grad`",
    "pushforward_through_pullback(disconnected_outputs)": "as in `pushforward`",
    "pushforward_through_pullback(return_disconnected)": "as in `pushforward`",
    "jacobian(consider_constant)": "as in `grad`",
    "jacobian(disconnected_inputs)": 'as in `grad`; with `"ignore"` the rows are zeros',
    "jacobian(vectorize)": "all rows at once instead of a loop: faster, and takes more memory",
    "hessian(consider_constant)": "as in `grad`, in both derivatives",
    "hessian(disconnected_inputs)": "as in `grad`",
    "verify_grad(n_tests)": "number of projections, at the same point",
    "verify_grad(rng)": "draws the projections",
    "verify_grad(eps)": "step of the differences; raise it for large arguments",
    "verify_grad(out_type)": "type of the differences if it is complex; ignored otherwise",
    "verify_grad(abs_tol)": "an entry passes if *either* error is below its tolerance: "
    "set it below the gradient's size",
    "verify_grad(rel_tol)": "see `abs_tol`",
    "verify_grad(mode)": "compiles the gradient and, through `mode_not_slow`, the differences",
    "verify_grad(cast_to_output_type)": "makes the projection float32 where the output is",
    "verify_grad(no_debug_ref)": "with `False`, the differences run in `mode` itself",
    "numeric_grad(eps)": "the step of the differences",
    "numeric_grad(out_type)": "type of the result if it is complex; ignored otherwise",
    "grad_undefined(comment)": "added to the error's message",
    "grad_not_implemented(comment)": "added to the error's message",
}

HEAD = """\
(pytensor-coverage)=
# PyTensor coverage

% Made by `make notebooks` from the executed notebooks, not by hand.

Every public name of `pytensor.gradient`, and every option of its functions: what it does, the trap
if there is one, and where a cell runs it. The first table has the names that the page on gradients
in [PyTensor's documentation](https://pytensor.readthedocs.io/en/latest/library/gradient.html)
listed before Ops had `pullback` and `pushforward` (the reference page): {kept} of {reference} are
still there, {gone} have gone or have another name, and {new} have come since. A name that is only
imported does not count, and a method counts where a cell uses it and names its class or an
instance. The book's tests fail when a name or an option has no cell.

{{doc}}`pytensor-surprises` has the faults of this version, and
{{doc}}`../notebooks/pytensor/02-pushing-and-pulling` tries every operation that the reference page
said can be pushed through.
"""

TABLE = """\
## {title}

:::{{list-table}}
:header-rows: 1
:widths: 27 40 33

* - Name
  - What to know
  - Executed in
{rows}
:::
"""


class Use(NamedTuple):
    """A code cell that uses a name: its page, and the heading above it."""

    page: str
    section: str


# --- what there is --------------------------------------------------------------------------------


@cache
def installed() -> tuple[str, ...]:
    """The public names that pytensor.gradient defines, and the public members of its classes."""
    names = []
    for node in ast.parse(inspect.getsource(gradient)).body:
        for name in _defined(node):
            if isinstance(getattr(gradient, name), TypeVar):  # it serves the annotations only
                continue
            names.append(name)
            if isinstance(node, ast.ClassDef):
                members = (member for part in node.body for member in _defined(part))
                names += [f"{name}.{member}" for member in members]
    return tuple(dict.fromkeys(names))


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        names = [node.name]
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
    else:
        names = []
    yield from (name for name in names if not name.startswith("_"))


@cache
def options() -> tuple[str, ...]:
    """The options of every function that is not deprecated, each written as ``grad(option)``."""
    functions = [name for name in installed() if inspect.isfunction(getattr(gradient, name, None))]
    return tuple(
        f"{name}({parameter.name})"
        for name in (*functions, "numeric_grad")
        if name not in DEPRECATED
        for parameter in inspect.signature(getattr(gradient, name)).parameters.values()
        if parameter.default is not inspect.Parameter.empty
    )


# --- what a cell uses -----------------------------------------------------------------------------


def uses(cells: Iterable[nbformat.NotebookNode], page: str) -> dict[str, list[Use]]:
    """Every name of `installed` and `options` that a page's code uses, with the cells that do."""
    found, section, known = defaultdict(list), "", {}
    for cell in cells:
        if cell.cell_type == "markdown":
            lines = book.prose_lines(cell.source)
            headings = [match[2] for line in lines if (match := book.HEADING.fullmatch(line.text))]
            section = headings[-1] if headings else section
        elif cell.cell_type == "code":
            for name in names_used(cell.source, known):
                found[name].append(Use(page, section))
    return found


def names_used(source: str, known: dict[str, object]) -> set[str]:
    """The names of `installed` and `options` that a cell uses.

    `known` holds what the cells so far imported; the imports of this one are added.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            known |= _imported(node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.pop(node.id, None)  # the cell gives the name another meaning
    names, attributes = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = _public_name(node, known)
            if name:
                names.add(name)
            elif isinstance(node, ast.Attribute):
                attributes.add(node.attr)
        if isinstance(node, ast.Call) and (called := _public_name(node.func, known)):
            names |= {f"{called}({keyword.arg})" for keyword in node.keywords} & set(options())
    for method in installed():
        owner, _, member = method.partition(".")
        if member in attributes and any(_stands_for(name, owner) for name in names):
            names.add(method)
    return names


def _imported(node: ast.Import | ast.ImportFrom) -> dict[str, object]:
    """What an import of PyTensor binds; the rest is not looked at."""
    bound = {}
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "pytensor":
                module = importlib.import_module(alias.name)
                top = importlib.import_module("pytensor")
                bound[alias.asname or "pytensor"] = module if alias.asname else top
    elif (node.module or "").split(".")[0] == "pytensor":
        try:
            module = importlib.import_module(node.module)
        except ImportError:  # a backend that is not installed: its cell does not run either
            return bound
        for alias in node.names:
            if hasattr(module, alias.name):
                bound[alias.asname or alias.name] = getattr(module, alias.name)
    return bound


def _public_name(node: ast.expr, known: dict[str, object]) -> str | None:
    """Which public name of pytensor.gradient an expression is, if it is one."""
    if isinstance(node, ast.Attribute) and _value(node.value, known) is gradient:
        return node.attr if node.attr in installed() else None
    value = _value(node, known)
    here = (name for name in installed() if "." not in name)
    return next((name for name in here if getattr(gradient, name) is value), None)


def _value(node: ast.expr, known: dict[str, object]) -> object:
    """What `a` or `a.b.c` is, by the imports; None if they do not say."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, known), node.attr, None)
    return None


def _stands_for(name: str, owner: str) -> bool:
    """Whether a name is a class, or a ready-made instance of it."""
    return name == owner or (
        inspect.isclass(getattr(gradient, owner, None))
        and isinstance(getattr(gradient, name, None), getattr(gradient, owner))
    )


# --- the page -------------------------------------------------------------------------------------


def coverage(root: Path = book.ROOT) -> dict[str, list[Use]]:
    """The names of `installed` and `options`, each with the cells of the part that use it."""
    cells_of = defaultdict(list)
    for page in book.notebook_names(root):
        if page.startswith(CHAPTERS):
            for name, cells in uses(book.read_cells(page, root), page).items():
                cells_of[name] += cells
    return {name: cells_of[name] for name in (*installed(), *options())}


def uncovered(root: Path = book.ROOT) -> list[str]:
    """The public names, and the options of functions, that no cell uses."""
    return [name for name, cells in coverage(root).items() if not cells]


def make(root: Path = book.ROOT) -> str:
    """The text of the page."""
    cells = coverage(root)
    renamed = SUCCESSORS.values()
    new = [name for name in installed() if name not in REFERENCE and name not in renamed]
    gone = [name for name in REFERENCE if name not in installed()]
    head = HEAD.format(
        reference=len(REFERENCE), kept=len(REFERENCE) - len(gone), gone=len(gone), new=len(new)
    )
    tables = [
        ("Names of the reference page", REFERENCE),
        ("Names that have come since", new),
        ("Options", options()),
    ]
    rows = {title: "\n".join(_row(name, cells) for name in names) for title, names in tables}
    return "\n".join([head, *(TABLE.format(title=t, rows=text) for t, text in rows.items())])


def _row(name: str, cells: dict[str, list[Use]]) -> str:
    if name in SUCCESSORS and name not in KNOW:
        successor = SUCCESSORS[name]
        know = f"now `{successor.split('.')[-1]}`: {KNOW[successor]}"
    else:
        know = KNOW[name]
    return f"* - `{name}`\n  - {know}\n  - {_links(_cells(name, cells))}"


def _cells(name: str, cells: dict[str, list[Use]]) -> list[Use]:
    return cells[name if name in cells else SUCCESSORS[name]]


def _links(where: list[Use]) -> str:
    """A link to the section that uses a name first, and the chapters that use it too."""
    if not where:
        return "nothing"
    first = where[0]
    # MyST checks links to whole pages only; the section's id is the one that Sphinx gives it.
    href = f"../{first.page}.html#{make_id(first.section)}"
    number, *others = dict.fromkeys(use.page.removeprefix(CHAPTERS).split("-")[0] for use in where)
    also = f", also in {', '.join(others)}" if others else ""
    return f'<a href="{href}">{number}: {first.section}</a>{also}'


def write(root: Path = book.ROOT) -> None:
    """Write the page."""
    (root / PAGE).write_text(make(root), encoding="utf-8")


if __name__ == "__main__":
    write()
