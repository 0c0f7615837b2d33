"""Every public name of PyTensor's gradients is executed in the book, and the page says where."""

import pytest
from docutils.nodes import make_id
from nbformat.v4 import new_code_cell, new_markdown_cell
from pytensor import gradient

from tools import book, pytensor_coverage
from tools.pytensor_coverage import Use, installed, names_used, uses

PAGE = "notebooks/pytensor/01-page"


# --- the book -------------------------------------------------------------------------------------


def test_every_name_has_a_cell():
    missing = pytensor_coverage.uncovered()
    assert not missing, "no cell of notebooks/pytensor uses " + ", ".join(missing)


def test_every_name_is_explained():
    names = {*pytensor_coverage.installed(), *pytensor_coverage.options()}
    known = {*pytensor_coverage.KNOW}
    assert names <= known, f"say in KNOW what {sorted(names - known)} do"
    gone = known - names - {*pytensor_coverage.REFERENCE}
    assert not gone, f"KNOW explains {sorted(gone)}, which PyTensor does not have"


def test_options_of_all_functions_and_not_of_deprecated_ones():
    owners = {option.split("(")[0] for option in pytensor_coverage.options()}
    assert {"grad", "verify_grad", "numeric_grad", "jacobian"} <= owners
    assert not owners & {*pytensor_coverage.DEPRECATED}


def test_the_page_is_fresh():
    text = (book.ROOT / pytensor_coverage.PAGE).read_text(encoding="utf-8")
    assert text == pytensor_coverage.make(), (
        f"{pytensor_coverage.PAGE} is stale: run make notebooks"
    )


# --- what there is --------------------------------------------------------------------------------


def test_installed_names_are_those_of_the_module():
    for name in installed():
        owner, _, member = name.partition(".")
        value = getattr(gradient, owner)
        assert not member or member in vars(value)
    here = {
        name
        for name, value in vars(gradient).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == gradient.__name__
    }
    assert here - set(installed()) == {"V"}  # a TypeVar


def test_every_name_of_the_reference_is_there_or_has_a_successor():
    for name in pytensor_coverage.REFERENCE:
        successor = pytensor_coverage.SUCCESSORS.get(name, name)
        assert successor in (*installed(), *pytensor_coverage.options()), name
    for name in pytensor_coverage.SUCCESSORS:
        assert name not in installed(), f"{name} is back: it needs no successor"


# --- what a cell uses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from pytensor.gradient import grad", set()),
        ("from pytensor.gradient import grad\ngrad(c, x)", {"grad"}),
        ("from pytensor.gradient import grad as g\ng(c, x)", {"grad"}),
        ("import pytensor\npytensor.grad(c, x)", {"grad"}),
        ("import pytensor\npytensor.gradient.jacobian(y, x)", {"jacobian"}),
        ("import pytensor.gradient as pg\npg.hessian(c, x)", {"hessian"}),
        ("import pytensor.gradient\npytensor.gradient.hessian(c, x)", {"hessian"}),
        ("from pytensor import gradient\nprint(gradient.grad_time)", {"grad_time"}),
        ("import pytensor.tensor as pt\npt.grad(c, x)", {"grad"}),
        ("from pytensor.gradient import grad\nprint('grad(c, x)')  # grad", set()),
        ("from pytensor.gradient import grad\ngrad = 1\nprint(grad)", set()),
        ("from jax import grad\ngrad(f)", set()),
        ("import pytensor\npytensor.grad(c, x, add_names=False)", {"grad", "grad(add_names)"}),
        ("import pytensor\nf(pytensor.grad, add_names=False)", {"grad"}),
        (
            "import pytensor.gradient as pg\npg.jacobian(y, x, vectorize=True)",
            {"jacobian", "jacobian(vectorize)"},
        ),
        ("grad(c, x)", set()),
        ("x.grad", set()),
    ],
)
def test_a_name_counts_where_it_is_used(source, names):
    assert names_used(source, {}) == names


def test_imports_hold_in_later_cells():
    known = {}
    names_used("from pytensor.gradient import Lop", known)
    assert names_used("Lop(y, x, u)", known) == {"Lop"}
    names_used("Lop = 1", known)
    assert names_used("Lop", known) == set()


@pytest.mark.parametrize(
    ("source", "method"),
    [
        ("ZeroGrad().pullback([x], [y], [g])", True),
        ("zero_grad_.pullback([x], [y], [g])", True),
        ("for op in (zero_grad_,):\n    op.pullback([x], [y], [g])", True),
        ("op.pullback([x], [y], [g])", False),
        ("zero_grad_(x)", False),
        ("zero_grad_(x), gradient.pullback(y, x, u)", False),
    ],
)
def test_a_method_counts_beside_its_class(source, method):
    imports = "from pytensor import gradient\nfrom pytensor.gradient import ZeroGrad, zero_grad_\n"
    assert ("ZeroGrad.pullback" in names_used(imports + source, {})) == method


def test_a_use_is_found_under_its_heading():
    cells = [
        new_markdown_cell("# Title"),
        new_code_cell("from pytensor.gradient import grad, jacobian"),
        new_markdown_cell("## First\n\n```python\n# no heading\n```"),
        new_code_cell("grad(c, x)"),
        new_code_cell("grad(c, y)"),
        new_markdown_cell("Words.\n\n### Second: `jacobian`"),
        new_code_cell("jacobian(y, x)"),
    ]
    assert uses(cells, PAGE) == {
        "grad": [Use(PAGE, "First")] * 2,
        "jacobian": [Use(PAGE, "Second: `jacobian`")],
    }


def test_links_lead_to_sections_that_are_there():
    links = (book.ROOT / pytensor_coverage.PAGE).read_text(encoding="utf-8").split('href="../')
    for page in book.notebook_names():
        texts = [cell.source for cell in book.read_cells(page) if cell.cell_type == "markdown"]
        lines = (line for text in texts for line in book.prose_lines(text))
        ids = {make_id(match[2]) for line in lines if (match := book.HEADING.fullmatch(line.text))}
        for link in links:
            if link.startswith(f"{page}.html#"):
                assert link.split('"')[0].split("#")[1] in ids
