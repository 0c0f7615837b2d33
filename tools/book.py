"""What the book is made of: its pages in order, their Markdown, labels and recorded checks."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import nbformat
import yaml

ROOT = Path(__file__).resolve().parent.parent

FENCE = re.compile(r"(?P<marks>`{3,}|~{3,}|:{3,})\s*(\{(?P<directive>[^}]+)\})?\s*(?P<title>[^`]*)")
HEADING = re.compile(r"(#+)\s+(.*)")
EQUATION = re.compile(r"\$\$\s*\(([^()\s]+)\)$")
FORMULA = re.compile(r"\$\$(.*?)\$\$(?:[ ]*\(([^()\s]+)\))?", re.DOTALL)
TARGET = re.compile(r"\(([^()\s]+)\)=$")
OPTION = re.compile(r":(label|name):\s*(\S+)$")
# What stands inside these is shown to the reader, not read by the book.
LITERAL = ("code", "code-block", "code-cell", "literalinclude", "eval-rst", "raw")

# Their titles say what the equations inside are.
TITLED = (
    "prf:proposition",
    "prf:theorem",
    "prf:lemma",
    "prf:corollary",
    "prf:property",
    "exercise",
)


class Label(NamedTuple):
    """A name that the book can refer to."""

    name: str
    kind: str
    """``equation``, ``figure``, or ``place`` (a page, a heading, a proposition)."""
    page: str
    says: str
    """The title of the proposition or exercise around it, else the heading above it."""

    @property
    def is_result(self) -> bool:
        """Whether it names an equation that a cell has to verify."""
        return self.kind == "equation" and self.name.startswith("eq-")


class Check(NamedTuple):
    """One run of ``helpers.checks.verify``, as an executed notebook records it."""

    label: str
    against: str
    error_power: int
    page: str


def page_names(root: Path = ROOT) -> list[str]:
    """Every page of _toc.yml, without suffix, in book order."""

    return list(_files(_contents(root)))


def parts(root: Path = ROOT) -> list[tuple[str, list[str]]]:
    """The caption of each part of _toc.yml, with its pages.

    What has no caption belongs to the part before it: the numbered chapters after a page that
    opens a part, and has no number.
    """
    found: list[tuple[str, list[str]]] = []
    for part in _contents(root)["parts"]:
        if "caption" in part:
            found.append((part["caption"], []))
        found[-1][1].extend(_files(part))
    return found


def _contents(root: Path) -> dict:
    return yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))


def _files(entry: dict | list) -> Iterator[str]:
    if isinstance(entry, dict):
        yield from (entry[key] for key in ("root", "file") if key in entry)
        for key in ("parts", "chapters", "sections", "subtrees", "entries"):
            yield from _files(entry.get(key, []))
    else:
        for item in entry:
            yield from _files(item)


def notebook_names(root: Path = ROOT) -> list[str]:
    """The pages of _toc.yml that are notebooks, in book order."""
    return [name for name in page_names(root) if name.startswith("notebooks/")]


def read_notebook(name: str, root: Path = ROOT) -> nbformat.NotebookNode:
    """The executed notebook of a page."""
    return nbformat.read(root / f"{name}.ipynb", as_version=4)


def read_cells(name: str, root: Path = ROOT) -> list[nbformat.NotebookNode]:
    """The cells of a page; a page that is no notebook is one Markdown cell."""
    if (root / f"{name}.ipynb").exists():
        return read_notebook(name, root).cells
    text = (root / f"{name}.md").read_text(encoding="utf-8")
    return [nbformat.v4.new_markdown_cell(text)]


class Line(NamedTuple):
    """A line of Markdown that is not literal code, and what stands around it."""

    text: str
    directives: tuple[tuple[str, str], ...]
    """(name, title) of the directives that are open, outermost first."""


def prose_lines(markdown: str) -> Iterator[Line]:
    """The lines outside literal blocks, each with the directives around it."""
    gates: list[tuple[str, str]] = []  # {exercise-start} ... {exercise-end} hold what lies between
    fences: list[tuple[str, str, str]] = []
    for raw in markdown.splitlines():
        text = raw.strip()
        if fences:
            marks, directive, _ = fences[-1]
            if len(text) >= len(marks) and text == marks[0] * len(text):
                fences.pop()
                continue
            if directive in LITERAL:
                continue
        if fence := FENCE.fullmatch(text):
            directive = fence["directive"] or ("code" if fence["marks"][0] != ":" else "")
            fences.append((fence["marks"], directive, fence["title"]))
            if directive.endswith("-start"):
                gates.append((directive.removesuffix("-start"), fence["title"]))
            elif directive.endswith("-end") and gates:
                gates.pop()
            continue
        yield Line(text, (*gates, *((directive, title) for _, directive, title in fences)))


def title_of(cells: Iterable[nbformat.NotebookNode]) -> str:
    """The first heading of a page."""
    lines = (
        line for cell in cells if cell.cell_type == "markdown" for line in prose_lines(cell.source)
    )
    return next(heading[2] for line in lines if (heading := HEADING.fullmatch(line.text)))


def labels_of(page: str, cells: Iterable[nbformat.NotebookNode]) -> Iterator[Label]:
    """Every label that a page defines, in order."""
    above = ""
    for cell in cells:
        if cell.cell_type == "code":
            figure = cell.metadata.get("mystnb", {}).get("figure", {})
            if "name" in figure:
                yield Label(figure["name"], "figure", page, above)
        if cell.cell_type != "markdown":
            continue
        for line in prose_lines(cell.source):
            if heading := HEADING.fullmatch(line.text):
                above = heading[2]
            titles = [title for name, title in line.directives if name in TITLED and title]
            says = titles[-1] if titles else above
            if found := EQUATION.search(line.text):
                yield Label(found[1], "equation", page, says)
            elif found := TARGET.fullmatch(line.text):
                yield Label(found[1], "place", page, says)
            elif line.directives and (found := OPTION.fullmatch(line.text)):
                kinds = {"math": "equation", "figure": "figure", "image": "figure"}
                yield Label(found[2], kinds.get(line.directives[-1][0], "place"), page, says)


def formulas_of(cells: Iterable[nbformat.NotebookNode]) -> dict[str, str]:
    """The TeX of every labelled equation of a page, by its label."""
    formulas = {}
    for cell in cells:
        if cell.cell_type == "markdown":
            for tex, label in FORMULA.findall(cell.source):
                lines = [line.strip() for line in tex.splitlines()]
                if lines[-1] == ">":  # in a quotation each line begins so
                    lines = [line.removeprefix(">").strip() for line in lines]
                if label:
                    formulas[label] = "\n".join(line for line in lines if line)
    return formulas


def checks_of(page: str, cells: Iterable[nbformat.NotebookNode]) -> Iterator[Check]:
    """Every check that a page's cells recorded when they ran, in order."""
    for cell in cells:
        for output in cell.get("outputs", []):
            if fact := output.get("metadata", {}).get("verify"):
                yield Check(fact["label"], fact["against"], fact["error_power"], page)
