"""The commands around the book: compiling its kernels, serving and printing it."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from nbformat.v4 import new_code_cell, new_notebook

from helpers.kalman import compiled
from tools import browser, compile_kernels, notebooks, pdf, plant

LOADED = """
import sys
from helpers.kalman import compiled
assert 0 < compiled.warmup(progress=False, everything={})
here = "helpers.kalman.compiled."
print(*(name.removeprefix(here) for name in sys.modules if name.startswith(here)))
"""


def loaded(everything):
    command = [sys.executable, "-c", LOADED.format(everything)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not found.stderr
    return set(found.stdout.split())


def passes():
    return [compile_kernels.FIRST, *compile_kernels.THEN]


def test_warmup_loads_what_it_says():
    """All that `make test` compiles beforehand, or only what a fit needs."""
    every = {name.split()[0] for name in passes()}
    assert every == {"door", "roots", "outputs", "small", *compiled.building.PURPOSE}
    assert every <= loaded(True)
    assert {"door", "outputs", "roots"} <= (some := loaded(False))
    assert not {"tangents", "integrated", "panel", "per_series"} & some


def test_kernels_that_are_compiled_beforehand(capsys, monkeypatch):
    folder = compiled.__path__[0]
    assert len(passes()) == len({*passes()})
    assert all((Path(folder) / f"{name.split()[0]}.py").exists() for name in passes())
    sizes = {int(name.split()[1]) for name in passes() if name.startswith("small")}
    assert sizes == {*range(1, compiled._door().LARGEST + 1)}
    assert all(map(find_spec, compile_kernels.READ))
    monkeypatch.setattr(compile_kernels, "READ", ("json",))
    monkeypatch.setattr(compile_kernels, "THEN", ("roots", "small 1"))
    compile_kernels.main()
    assert capsys.readouterr().out.startswith("The Kalman passes are compiled: ")
    monkeypatch.setattr(compile_kernels, "THEN", ("building", "no_such_pass"))
    with pytest.raises(ModuleNotFoundError, match="no_such_pass"):
        compile_kernels.main()


def test_every_fault_can_be_planted():
    """Each changes what a file says, and leaves it a program."""
    faults = plant.all_faults()
    assert {file for file, *_ in faults.values()} == set(plant.FILES)
    for i, (name, (file, begin, end, planted)) in enumerate(faults.items()):
        text = Path(plant.ROOT, plant.FOLDER, f"{file}.py").read_text(encoding="utf-8")
        assert text[begin:end] != planted, name
        if i % 20 == 0:
            before, after = ast.parse(text), ast.parse(text[:begin] + planted + text[end:])
            assert ast.dump(before) != ast.dump(after), name


def test_a_planted_fault_is_seen_and_a_clean_copy_passes(monkeypatch):
    chosen = "test_kalman_collapse.py", "-k", "patterns_that"
    monkeypatch.setitem(plant.TESTS, "collapse.", chosen)
    faults = plant.all_faults()
    name = "collapse.patterns_of: sign turned in `start[pattern[t] + 1] += 1`"
    seen = "test_patterns_that_come_back_are_one"
    assert plant.plant(name, *faults[name])[::2] == (True, seen)
    assert not plant.plant(name, faults[name][0], 0, 0, "")[0]


def test_a_served_folder(tmp_path):
    (tmp_path / "a.html").write_text("here")
    with browser.served(tmp_path) as address:
        assert urlopen(f"{address}a.html").read() == b"here"
    with pytest.raises(URLError):
        urlopen(f"{address}a.html", timeout=1)


def test_a_browser_that_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert browser.program() is None
    for name in browser.BROWSERS[1:3]:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert browser.program() == str(tmp_path / browser.BROWSERS[1])


def test_what_a_print_needs(tmp_path, monkeypatch):
    """One thing after the other is missing, and the message says which."""

    def refuses(why, *names):
        with pytest.raises(SystemExit, match=why):
            pdf.main([*names])

    monkeypatch.setitem(sys.modules, "pypdf", None)
    refuses("pypdf is not installed")
    monkeypatch.setitem(sys.modules, "pypdf", SimpleNamespace(PdfWriter=list))
    monkeypatch.setattr(browser, "program", lambda: None)
    refuses("no Chromium or Chrome")
    monkeypatch.setattr(browser, "program", lambda: "chromium")
    monkeypatch.setattr(browser, "SITE", tmp_path)
    refuses("not built: run make book")
    (tmp_path / "index.html").write_text("")
    refuses("no page of the book has nothing-like-it in its name", "nothing-like-it")


def test_a_notebook_runs_on_one_thread(tmp_path, monkeypatch):
    """Also where it is not make that runs it: the times of a chapter are those of one thread."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("MKL_NUM_THREADS")
    cell = "import os\n" + "".join(f"print(os.environ[{name!r}])\n" for name in notebooks.THREADS)
    notebook = new_notebook(cells=[new_code_cell(cell)])
    notebooks.execute(notebook, tmp_path)
    assert notebook.cells[0].outputs[0].text == "1\n1\n1\n"
