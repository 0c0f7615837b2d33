"""Sphinx: the checks of a cell as one box, and a mark at each formula that is checked.

``helpers.checks.verify`` leaves a line as an output. The lines of a cell become a list, one item an
equation, with its number; under the equation stands what it was held against, with a link to the
list. Notebooks are not touched: in JupyterLab the lines stay as they are.
"""

import re
from collections import defaultdict

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

LINE = re.compile(r"(eq-[\w-]+): agrees with (.+) to (\d)e-0*(\d+)")


def fact(text: str) -> tuple[str, str, float] | None:
    """(label, reference, bound) of a line that ``verify`` printed."""
    found = LINE.fullmatch(text.strip())
    return found and (found[1], found[2], float(f"{found[3]}e-{found[4]}"))


def summary(checks: list[tuple[str, float]]) -> str:
    """The references with their bounds; the loosest bound where one was used several times."""
    bounds = defaultdict(list)
    for against, bound in checks:
        bounds[against].append(bound)
    parts = []
    for against, of in bounds.items():
        power = f"{max(of):.0e}".replace("e-0", "e-").replace("-", "\N{NON-BREAKING HYPHEN}")
        parts.append(f"{against}, ≤ {power}" + (f" ({len(of)} checks)" if len(of) > 1 else ""))
    return "; ".join(parts)


def make_boxes(app, doctree):
    """Replace the lines of each cell by one list, and remember which equation stands in which."""
    docname, marks = app.env.docname, defaultdict(list)
    for number, output in enumerate(parts(doctree, "cell_code_output"), 1):
        bundles = parts(output, "mime_bundle")
        found = [(node, facts) for node in bundles if (facts := fact(node.astext()))]
        if not found:
            continue
        anchor, by_label = f"checks-{number}", defaultdict(list)
        for _, (label, against, bound) in found:
            by_label[label].append((against, bound))
            marks[label].append((anchor, against, bound))
        box = nodes.bullet_list(classes=["checks"], ids=[anchor])
        for label, checks in by_label.items():
            number_of = addnodes.pending_xref(
                "", nodes.literal(text=label), refdoc=docname, refdomain="math", reftype="eq",
                reftarget=label, refexplicit=False, refwarn=True,
            )  # fmt: skip
            text = nodes.paragraph("", "✓ ", number_of, nodes.Text(f" {summary(checks)}"))
            box += nodes.list_item("", text)
        found[0][0].replace_self(box)
        for node, _ in found[1:]:
            node.parent.remove(node)
    checks_of(app.env)[docname] = dict(marks)


def parts(tree, kind: str) -> list[nodes.container]:
    """The parts of a notebook that myst-nb has marked so."""
    return [node for node in tree.findall(nodes.container) if node.get("nb_element") == kind]


def checks_of(env) -> dict[str, dict[str, list]]:
    """The checks of each page, as the environment keeps them from one build to the next."""
    if not hasattr(env, "book_checks"):
        env.book_checks = {}
    return env.book_checks


class MarkFormulas(SphinxPostTransform):
    """Under a checked formula: the references and bounds, with links to the checks."""

    default_priority = 5  # before references are resolved

    def run(self, **kwargs):
        here = self.env.docname
        for formula in list(self.document.findall(nodes.math_block)):
            label = formula.get("label")
            mark = nodes.paragraph("", "✓ ", classes=["check-mark"])
            for page, marks in checks_of(self.env).items():
                by_anchor = defaultdict(list)
                for anchor, against, bound in marks.get(label, ()):
                    by_anchor[anchor].append((against, bound))
                for anchor, checks in by_anchor.items():
                    text = nodes.Text(summary(checks))
                    builder = self.app.builder
                    if len(mark) > 1:
                        mark += nodes.Text("; ")
                    mark += make_refnode(builder, here, page, anchor, text, f"The check of {label}")
            if len(mark) > 1:
                formula.parent.insert(formula.parent.index(formula) + 1, mark)


def purge(app, env, docname):
    checks_of(env).pop(docname, None)


def merge(app, env, docnames, other):
    checks_of(env).update({name: checks_of(other).get(name, {}) for name in docnames})


def setup(app):
    app.connect("doctree-read", make_boxes)
    app.connect("env-purge-doc", purge)
    app.connect("env-merge-info", merge)
    app.add_post_transform(MarkFormulas)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
