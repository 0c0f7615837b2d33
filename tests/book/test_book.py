"""The book obeys its rules; test_rules.py shows that each of them can be broken."""

import subprocess
from pathlib import Path

import pytest

from tools import book, equation_index, notebooks, rules

NOTEBOOKS = book.notebook_names()
PAGES = [name for name in book.page_names() if (book.ROOT / f"{name}.md").exists()]


def text_of(name):
    return (book.ROOT / name).read_text(encoding="utf-8")


def accept(complaints):
    assert not complaints, "\n".join(complaints)


def labels():
    return [label for page in PAGES for label in book.labels_of(page, book.read_cells(page))]


def checks():
    return [check for name in NOTEBOOKS for check in book.checks_of(name, book.read_cells(name))]


def test_contents():
    accept(rules.contents())


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook(name):
    accept(rules.notebook(name, book.read_notebook(name)))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_is_shown_can_be_pasted(name):
    accept(rules.can_be_pasted(name, book.read_notebook(name)))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_numbers_are_as_printed(name):
    accept(rules.as_printed(name, book.read_notebook(name)))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_pair(name):
    path = book.ROOT / f"{name}.md"
    fresh = notebooks.to_text(book.read_notebook(name), path)
    accept(rules.pair(name, fresh, path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES)
def test_images(page):
    cells = book.read_cells(page)
    texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
    accept([complaint for text in texts for complaint in rules.images(page, text)])


def test_labels():
    every = labels()
    accept(rules.labels_unique(every) + rules.labels_named(every))


def test_results_are_checked():
    accept(rules.results_are_checked(labels(), checks()))


def test_equation_index():
    assert text_of(equation_index.PAGE) == equation_index.make(), (
        f"{equation_index.PAGE} is stale: run make notebooks"
    )


def test_own_paths():
    """In every file that git has, or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    found = subprocess.run(command, cwd=book.ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("not a git checkout")
    complaints = []
    for name in found.stdout.split("\0")[:-1]:
        path = book.ROOT / name
        if path.is_file() and b"\0" not in (data := path.read_bytes()):
            complaints += rules.own_paths(name, data.decode(), [book.ROOT, Path.home()])
    accept(complaints)


def test_requirements():
    lock, project = text_of("requirements.txt"), text_of("pyproject.toml")
    accept(rules.lock_fits(lock, project))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_versions(name):
    accept(rules.ran_with(name, book.read_notebook(name), text_of("requirements.txt")))


def test_python_versions():
    """pyenv, Binder and pyproject.toml are told of the same Python."""
    version = text_of(".python-version").strip()
    assert text_of("runtime.txt").strip() == f"python-{version}"
    assert f'requires-python = ">={version}"' in text_of("pyproject.toml")


@pytest.mark.parametrize("name", ["README.md", "CITATION.cff", "pyproject.toml"])
def test_repository(name):
    slug = rules.repository(text_of("_config.yml"))
    accept(rules.names_repository(name, text_of(name), slug))
