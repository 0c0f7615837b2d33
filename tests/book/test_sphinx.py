"""The small extensions of tools/sphinx, each on a tree of a few nodes."""

from types import SimpleNamespace

import pytest
from docutils import nodes
from pybtex.database import parse_string

from tools.sphinx import (
    author_year,
    dark_figures,
    first_screen,
    formula_spacing,
    page_head,
    search_prose,
)


def paragraph(*parts):
    made = [nodes.math(text=part[1:-1]) if part[0] == "$" else nodes.Text(part) for part in parts]
    return nodes.paragraph("", "", *made)


@pytest.mark.parametrize(
    ("parts", "held"),
    [
        (("so ", "$x$", ", and"), ["x,"]),
        (("so (", "$x$", "), and"), ["(x),"]),
        (("so ", "$x$", " and ", "$y$", "."), ["y."]),
        (("$x$", " is"), []),
        (("$x$",), []),
    ],
)
def test_a_comma_stays_with_its_formula(parts, held):
    tree = paragraph(*parts)
    text = tree.astext()
    formula_spacing.HoldTogether(SimpleNamespace(**transformed(tree))).run()
    assert [node.astext() for node in tree.findall(nodes.inline)] == held
    assert tree.astext() == text


def transformed(tree):
    settings = SimpleNamespace(language_code="en", env=None)
    tree.settings, tree.reporter = settings, None
    return {"settings": settings, "reporter": None, "findall": tree.findall}


def script(filename=None, body=None):
    return SimpleNamespace(filename=filename, attributes={"body": body} if body else {})


def test_scripts_once_and_none_of_thebe():
    theirs = [script("sphinx-thebe.js"), script(body='const THEBE_JS_URL = "there"')]
    formulas = [script(body="window.MathJax = {}"), script("mathjax/tex-chtml.js")]
    ours = [script("a.js"), script(body="let a = 1")]
    scripts = [*ours, *theirs, *formulas, script(body="let a = 1"), *theirs]
    assert page_head.needed(scripts, formulas=True) == ours + formulas
    assert page_head.needed(scripts, formulas=False) == ours


def test_description():
    long = "A sentence that goes on " + "and on " * 40 + "until it ends."
    tree = nodes.section("", paragraph("Let ", "$x$", " be one of these."), paragraph(long))
    found = page_head.description(tree)
    assert found.startswith("A sentence") and found.endswith(" on…") and len(found) <= 200
    assert page_head.description(nodes.section("", paragraph("Short."))) == ""


@pytest.mark.parametrize(
    ("authors", "label"),
    [
        ("Kalman, R. E.", "Kalman, 1960"),
        ("Durbin, J. and Koopman, S. J.", "Durbin and Koopman, 1960"),
        ("Bengio, Y. and Léonard, N. and Courville, A.", "Bengio et al., 1960"),
        ("de Jong, Piet", "de Jong, 1960"),
        (r"Mor{\'e}, J. and S{\"a}rkk{\"a}, S.", "Moré and Särkkä, 1960"),
    ],
)
def test_labels_of_the_bibliography(authors, label):
    entries = parse_string(f"@book{{a, author={{{authors}}}, year={{1960}}}}", "bibtex").entries
    assert list(author_year.AuthorYear().format_labels(entries.values())) == [label]


def cell(*parts, hidden=True):
    made = nodes.container("", nb_element="cell_code", **({"hide_mode": "input"} if hidden else {}))
    for kind, node in parts:
        made += nodes.container("", node, nb_element=kind)
    return made


def test_set_up_comes_below_the_head_in_its_order():
    code = [("cell_code_source", nodes.literal_block("", text)) for text in ("import", "draw")]
    drawn = ("cell_code_output", nodes.figure("", nodes.image(uri="picture.png")))
    parts = [nodes.title("", "T"), paragraph("Why?"), cell(code[0]), cell(code[1], drawn)]
    parts += [paragraph("So."), paragraph("Prerequisites: none."), paragraph("The body.")]
    tree = nodes.section("", *parts)
    document = nodes.document(None, None)
    document += tree
    first_screen.move(None, document)
    said = [node.astext() for node in tree]
    assert said == ["T", "Why?", "", "So.", "Prerequisites: none.", "import", "draw", "The body."]
    assert tree[2].next_node(nodes.image) and not tree[6].next_node(nodes.image)
    assert tree[6]["hide_mode"] == "input" and "hide_mode" not in tree[2]


def test_the_index_holds_prose():
    tree = nodes.document(None, None)
    tree += [paragraph("steady state"), nodes.literal_block("", "import statespace")]
    assert search_prose.prose(tree).astext().split() == ["steady", "state"]
    assert "statespace" in tree.astext()


@pytest.mark.parametrize(("caption", "drawn"), [("The pale sites.", True), ("A line.", False)])
def test_a_picture_has_a_box_to_scroll_in_and_its_caption_has_not(caption, drawn):
    tree = nodes.document(None, None)
    tree += nodes.figure("", nodes.image(uri="a.svg"), nodes.caption("", caption))
    dark_figures.mark(None, tree)
    box, text = tree[0]
    assert box["classes"] == ["picture"] and isinstance(box[0], nodes.image)
    assert text.astext() == caption and ("as-drawn" in tree[0]["classes"]) is drawn
