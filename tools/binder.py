"""Make .binder/requirements.txt: what a reader of the chapters needs, of all that is pinned.

Binder installs it in place of requirements.txt, which also holds what builds and tests the book.
Run it as ``python -m tools.binder`` in the environment of the book, after ``make lock``.
"""

import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import book

TARGET = ".binder/requirements.txt"
# Of the extras "book" and "test", what a chapter runs with; the others typeset and test the pages.
RUNS = ("ipykernel", "jupyterlab", "jupyterlab-myst", "jupytext", "jax", "mpmath")
HEAD = """\
-e .
# What the chapters run with, of requirements.txt: for Binder. Made by `python -m tools.binder`.
"""


def roots(project: dict) -> list[str]:
    """What the package, its chapters and JupyterLab ask for."""
    extras = project["optional-dependencies"]
    names = [*project["dependencies"], *extras["onnx"], *RUNS]
    return [canonicalize_name(Requirement(name).name) for name in names]


def closure(names: list[str]) -> set[str]:
    """These packages, with all that they need on this system."""
    found: set[tuple[str, frozenset[str]]] = set()
    todo: list[tuple[str, frozenset[str]]] = [(name, frozenset()) for name in names]
    while todo:
        name, extras = todo.pop()
        if (name, extras) in found:
            continue
        found.add((name, extras))
        for need in map(Requirement, requires(name) or []):
            if need.marker is None or any(
                need.marker.evaluate({"extra": extra}) for extra in (*extras, "")
            ):
                todo.append((canonicalize_name(need.name), frozenset(need.extras)))
    return {name for name, _ in found}


def make(root: Path = book.ROOT) -> str:
    """The text of the file."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    kept = closure(roots(project))
    pins = (root / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return HEAD + "".join(f"{pin}\n" for pin in pins if pin.split("==")[0] in kept)


if __name__ == "__main__":
    path = book.ROOT / TARGET
    path.parent.mkdir(exist_ok=True)
    path.write_text(make(), encoding="utf-8")
    (path.parent / "runtime.txt").write_text((book.ROOT / "runtime.txt").read_text())
    print(f"{TARGET} pins {path.read_text().count('==')} packages.")
