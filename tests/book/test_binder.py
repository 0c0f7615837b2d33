"""What Binder installs is pinned as everywhere, and is what the chapters import."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tools import binder, book

PINS = (book.ROOT / binder.TARGET).read_text(encoding="utf-8").splitlines()


def test_pins():
    every = (book.ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert PINS[0] == "-e ."
    stale = [pin for pin in PINS[2:] if pin not in every]
    assert not stale, "run python -m tools.binder"
    assert (book.ROOT / ".binder/runtime.txt").read_text() == (
        book.ROOT / "runtime.txt"
    ).read_text()


def test_repo2docker_finds_both_files_and_nothing_that_goes_before_them():
    # It reads one folder, `binder` or `.binder` and not both, in it a Dockerfile, environment.yml
    # or Pipfile before requirements.txt. Of Python it takes a major and a minor version, no patch.
    folder = book.ROOT / ".binder"
    assert not (book.ROOT / "binder").exists()
    assert {path.name for path in folder.iterdir()} == {"requirements.txt", "runtime.txt"}
    runtime = (folder / "runtime.txt").read_text(encoding="utf-8")
    assert re.fullmatch(r"python-3\.\d+\n?", runtime)
    project = tomllib.loads((book.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert runtime.strip().removeprefix("python-") in SpecifierSet(project["requires-python"])


def test_the_chapters_find_what_they_import():
    names = {pin.split("==")[0] for pin in PINS if "==" in pin}
    owners, missing = packages_distributions(), set()
    for page in book.notebook_names():
        for cell in book.read_cells(page):
            if cell.cell_type == "code" and not cell.source.lstrip().startswith("%"):
                for module in imported(cell.source) - set(sys.stdlib_module_names) - {"helpers"}:
                    if not names & {canonicalize_name(name) for name in owners.get(module, ())}:
                        missing.add((page, module))
    assert not missing


def imported(source):
    """The packages that a cell imports at its top level."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found


def test_what_typesets_and_tests_the_book_stays_away():
    names = {pin.split("==")[0] for pin in PINS}
    assert {"numpy", "jupyterlab", "pymc", "jaxlib"} <= names
    assert not {"sphinx", "jupyter-book", "ruff", "pytest", "hypothesis"} & names
    assert {"numpy", "llvmlite"} <= binder.closure(["numba"])
