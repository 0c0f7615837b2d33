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

# What has changed about a name that is still there.
NOTES = {
    "Lop": "deprecated, now `pullback`",
    "Rop": "deprecated, now `pushforward`",
    "grad_sources_inputs": "gone: `grad` with `known_grads`",
    "hessian": "beside it, `hessian_vector_product`",
    "jacobian": "any number of dimensions; can be vectorised",
    "subgraph_grad": "no longer `pytensor.subgraph_grad`",
}

HEAD = """\
(pytensor-coverage)=
# PyTensor coverage

% Made by `make notebooks` from the executed notebooks, not by hand.

The toolbox part executes every public name of `pytensor.gradient`: those that the page on it
in [PyTensor's documentation](https://pytensor.readthedocs.io/en/latest/library/gradient.html)
listed before Ops had `pullback` and `pushforward` (the reference page, below), and those of the
PyTensor that is installed. Here each of these names leads to the sections whose code uses it; a
name that is only imported does not count. A method counts where a cell uses it and names its class
or an instance of it. The book's tests fail when a name has no cell. Of the {reference} names of the
reference page {kept} are still there, {gone} have gone or have another name, and {new} have come
since then.

The reference page also lists the operations that can be pushed through and those that cannot;
{{doc}}`../notebooks/pytensor/02-pushing-and-pulling` tries every one of them.
"""

TABLE = """\
## {title}

:::{{list-table}}
:header-rows: 1
:widths: 45 55

* - Name
  - Executed in
{rows}
:::
"""

# A backslash at the end of a line breaks the line inside a cell.
BREAK = " \\\n    "


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
    """The options of grad, each written as ``grad(option)``."""
    parameters = inspect.signature(gradient.grad).parameters.values()
    return tuple(f"grad({p.name})" for p in parameters if p.default is not inspect.Parameter.empty)


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
        if isinstance(node, ast.Call) and _public_name(node.func, known) == "grad":
            names |= {f"grad({keyword.arg})" for keyword in node.keywords} & set(options())
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
    """The public names, and the options of grad, that no cell uses."""
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
        ("Options of grad", options()),
    ]
    rows = {title: "\n".join(_row(name, cells) for name in names) for title, names in tables}
    return "\n".join([head, *(TABLE.format(title=t, rows=text) for t, text in rows.items())])


def _row(name: str, cells: dict[str, list[Use]]) -> str:
    now = f"now `{SUCCESSORS[name].split('.')[-1]}`" if name in SUCCESSORS else ""
    says = BREAK.join(filter(None, [f"`{name}`", NOTES.get(name, now)]))
    return f"* - {says}\n  - {_links(_cells(name, cells))}"


def _cells(name: str, cells: dict[str, list[Use]]) -> list[Use]:
    return cells[name if name in cells else SUCCESSORS[name]]


def _links(where: list[Use]) -> str:
    """A link to the first section of every chapter, and how many more cells there are."""
    links = []
    for page in dict.fromkeys(use.page for use in where):
        here = [use for use in where if use.page == page]
        # MyST checks links to whole pages only; the section's id is the one that Sphinx gives it.
        href = f"../{page}.html#{make_id(here[0].section)}"
        number = page.removeprefix(CHAPTERS).split("-")[0]
        more = f" and {len(here) - 1} more" if len(here) > 1 else ""
        links.append(f'<a href="{href}">{number}: {here[0].section}</a>{more}')
    return BREAK.join(links) or "nothing"


def write(root: Path = book.ROOT) -> None:
    """Write the page."""
    (root / PAGE).write_text(make(root), encoding="utf-8")


if __name__ == "__main__":
    write()
