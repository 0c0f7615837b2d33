"""Sphinx: a chapter begins with what it shows; its set-up comes below the reading time.

In a notebook the imports and the code of the first picture have to run before that picture. On a
page they are folded bars between the question and its answer, so they move below the head.
"""

from docutils import nodes

END = "Prerequisites: "
"""How the last paragraph of a chapter's head begins."""


def of_notebook(node, element: str) -> bool:
    return isinstance(node, nodes.container) and node.get("nb_element") == element


def move(app, doctree):
    section = doctree.next_node(nodes.section)
    children = section.children if section else []
    last = next((node for node in children if node.astext().startswith(END)), None)
    if last is None:
        return
    moved = []
    for cell in children[: section.index(last)]:
        if not of_notebook(cell, "cell_code") or not cell.get("hide_mode"):
            continue
        if not cell.next_node(nodes.image):
            section.remove(cell)
            moved.append(cell)
            continue
        code = cell.copy()
        for part in list(cell):
            if of_notebook(part, "cell_code_source"):
                cell.remove(part)
                code += part
        del cell["hide_mode"]
        moved.append(code)
    at = section.index(last) + 1
    section[at:at] = moved
    last["classes"].append("prerequisites")
    for picture in list(section.findall(nodes.figure))[:1]:
        picture["classes"].append("head-figure")


def setup(app):
    app.connect("doctree-read", move)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
