"""Machine code on disk that is damaged, or has no disk, and what is said while it is made."""

import errno
import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numba
import pytest
from numba import types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Flags
from tiers import thorough

from helpers.kalman import compiled, on_disk
from helpers.kalman.compiled import building

TEXT = """
from numba import types
from helpers.kalman.on_disk import cfunc, njit

def twice(x):
    return 2.0 * x

def thrice(x):
    return 3.0 * x
"""
DAMAGES = {
    "cut short": lambda data: data[: len(data) // 2],
    "one byte": lambda data: data[:1],
    "empty": lambda data: b"",
    "garbage": lambda data: bytes(range(256)) * 40,
    "another pickle": lambda data: b"\x80\x04\x95\x02\x00\x00\x00\x00\x00\x00\x00K\x07.",
    "zeros, as after a crash": lambda data: bytes(len(data)),
}
ALIKE = "one byte", "empty", "zeros, as after a crash"  # cut short, or garbage, too


@pytest.fixture
def module(tmp_path, monkeypatch):
    path = tmp_path / "two_functions.py"
    path.write_text(TEXT)
    spec = importlib.util.spec_from_file_location("two_functions", path)
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "two_functions", found)  # Numba imports it by its name
    spec.loader.exec_module(found)
    gc.freeze()  # what others left is not looked through at each collection: that takes seconds
    yield found
    gc.unfreeze()


def both_compiled(module):
    """Both functions, from disk where they are there: their values and what came from disk."""
    gc.collect()  # what an earlier call made is gone, as in another process
    lazy = on_disk.njit()(module.twice)
    assert lazy(1.0) == 2.0
    at_once = on_disk.njit((types.float64,))(module.twice)
    assert at_once(1.0) == 2.0 and not at_once._can_compile
    code = on_disk.cfunc(types.float64(types.float64))(module.thrice)
    assert code.ctypes(1.0) == 3.0
    return sum(lazy.stats.cache_hits.values()), code.cache_hits


def files_of(module):
    return sorted((Path(module.__file__).parent / "__pycache__").glob("two_functions.*.nb?"))


def test_a_function_comes_from_disk(module, capfd):
    assert both_compiled(module) == (0, 0)
    assert both_compiled(module) == (1, 1)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("damage", [thorough(x) if x in ALIKE else x for x in DAMAGES])
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_damaged_files_are_thrown_away_and_the_functions_compiled_anew(module, kind, damage, capfd):
    both_compiled(module)
    damaged = [path for path in files_of(module) if path.suffix == f".{kind}"]
    assert len(damaged) == 2
    for path in damaged:
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert both_compiled(module) == (0, 0)
    said = capfd.readouterr().err
    # An index of another version of Numba is none, for Numba itself.
    count = 0 if (kind, damage) == ("nbi", "another pickle") else 2
    assert said.count("is damaged") == said.count("thrown away and compiled anew") == count
    assert both_compiled(module) == (1, 1)
    assert capfd.readouterr().err == ""


def test_machine_code_is_optimised_at_its_own_level(module, monkeypatch):
    """And what others compile at theirs."""
    levels, optimize = [], JITCodeLibrary._optimize_final_module
    monkeypatch.setattr(
        JITCodeLibrary, "_optimize_final_module",
        lambda library: (levels.append(numba.config.OPT), optimize(library))[1],
    )  # fmt: skip
    before = numba.config.OPT
    both_compiled(module)
    assert len(levels) >= 2 and set(levels) == {on_disk.OPT}  # the first compilation brings its own
    assert numba.njit(module.twice)(1.0) == 2.0 and levels[-1] == before == numba.config.OPT


def test_flags_of_a_compilation_are_those_that_numba_reads():
    flags = Flags()
    assert on_disk._values(flags) == flags.values()
    flags.nrt, flags.error_model = True, "numpy"
    assert on_disk._values(flags) == flags.values() != Flags().values()


def test_a_full_disk_costs_the_next_process_its_time_and_nothing_else(module, monkeypatch, capfd):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(on_disk.IndexDataCacheFile, "_save_data", full)
    assert both_compiled(module) == (0, 0)
    said = capfd.readouterr().err
    assert "not kept on disk for the next time: [Errno 28] No space left on device" in said


# A folder that is a file cannot be written by root either, to whom no permission is denied.
READ_ONLY = """
import os, sys
sys.path.insert(0, sys.argv[1])
import two_functions as module
made = module.njit()(module.twice), module.njit()(module.thrice)
code = module.cfunc(module.types.float64(module.types.float64))(module.thrice)
assert (made[0](1.0), made[1](1.0), code.ctypes(1.0)) == (2.0, 3.0, 3.0)
folder = made[0]._cache.cache_path
print(folder and os.path.dirname(folder), bool(folder) and len(os.listdir(folder)))
"""


def where_nothing_can_be_written(module, script, **variables):
    folder = Path(module.__file__).parent
    # Importing the module has left its bytecode, unless Python was told to write none.
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    for name in ("__pycache__", "home"):
        (folder / name).write_text("")
    variables = {"HOME": str(folder / "home" / "user"), "PYTHONDONTWRITEBYTECODE": "1"} | variables
    kept = {x: X for x, X in os.environ.items() if x not in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR")}
    return subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        env=kept | variables, capture_output=True, text=True, check=True,
    )  # fmt: skip


@pytest.mark.skipif(os.name == "nt", reason="the home of a user is not in HOME there")
def test_where_nothing_can_be_written_a_temporary_folder_has_to_do(module, tmp_path):
    found = where_nothing_can_be_written(module, READ_ONLY)
    folder, count = found.stdout.split()
    assert int(count) >= 4 and not Path(folder).exists()  # it is gone with the process
    assert found.stderr.count("lost when this process ends") == 1
    assert "NUMBA_CACHE_DIR" in found.stderr and "base_compiledir" in found.stderr
    # What it says keeps the code.
    (kept := tmp_path / "kept").mkdir()
    for _ in range(2):
        found = where_nothing_can_be_written(module, READ_ONLY, NUMBA_CACHE_DIR=str(kept))
        assert found.stdout.split()[0] == str(kept) and found.stderr == ""
    # Nor is there a temporary folder: then in memory alone.
    nowhere = f"import tempfile\ntempfile.tempdir = '{tmp_path / 'home' / 'none'}'\n{READ_ONLY}"
    found = where_nothing_can_be_written(module, nowhere)
    assert found.stdout.split()[0] == "None" and "not kept at all" in found.stderr


BACKEND = """
import sys
import time
import pytensor
import helpers.kalman.numba_backend
from pytensor.link.numba.cache import NUMBA_CACHE_PATH
print(NUMBA_CACHE_PATH, pytensor.config.compiledir, NUMBA_CACHE_PATH.exists())
"""


@pytest.mark.skipif(os.name == "nt", reason="the home of a user is not in HOME there")
def test_pytensor_compiles_there_too(module, tmp_path):
    found = where_nothing_can_be_written(module, BACKEND)
    ours, theirs, exists = found.stdout.split()
    assert exists == "True" and not Path(ours).exists() and not Path(theirs).exists()
    assert found.stderr.count("lost when this process ends") == 1
    flags = f"base_compiledir={tmp_path / 'kept'}"
    found = where_nothing_can_be_written(module, BACKEND, PYTENSOR_FLAGS=flags)
    assert found.stdout.startswith(str(tmp_path / "kept")) and found.stderr == ""


IN_PYTENSOR = """
import helpers.kalman.numba_backend
import pytensor
import pytensor.tensor as pt
x = pt.dscalar()
print(pytensor.function([x], pt.tanh(x) + 1, mode="NUMBA")(0.0))
"""


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_what_pytensor_keeps_may_be_damaged_too(tmp_path, kind):
    """A process that is killed while it compiles leaves a file that is cut short."""
    flags = os.environ | {"PYTENSOR_FLAGS": f"base_compiledir={tmp_path}"}
    for damaged in (False, True, False):
        for path in tmp_path.rglob(f"*.{kind}") if damaged else ():
            path.write_bytes(path.read_bytes()[:40])
        found = subprocess.run(
            [sys.executable, "-c", IN_PYTENSOR], env=flags, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        assert found.stdout == "1.0\n"
        assert ("thrown away and compiled anew" in found.stderr) == damaged


def test_what_compiles_says_how_far_it_is_and_what_is_there_says_nothing(
    module, monkeypatch, capfd
):
    monkeypatch.setattr(building, "SILENT", 0)
    for expected in (4, 0):
        with building.told("filter of a test", 2, announce=True):
            both_compiled(module)
            if expected:
                said, end = "", time.monotonic() + 60
                while "of" not in said and time.monotonic() < end:
                    said += capfd.readouterr().err
                with building.waiting("part of it", 1):  # its functions count with the others
                    on_disk.njit()(module.thrice)(1)
                said += capfd.readouterr().err
        said = (said if expected else "") + capfd.readouterr().err
        last = f"Compiling the filter of a test, once on this machine: function {expected} of 4"
        assert (last in said) if expected else not said


COUNTED = """
import sys
import time
from helpers.kalman import on_disk
from helpers.kalman.compiled import building
heard = []
on_disk.watching.append(heard.append)
expected = building.functions(sys.argv[1])
building.load(sys.argv[1])
print(len(heard), expected)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("name", building.FUNCTIONS)
def test_as_many_functions_as_are_told(name):
    command = [sys.executable, "-c", COUNTED, name]
    found, expected = subprocess.check_output(command, text=True).split()
    assert found == expected


def test_all_sizes_that_a_warmup_counts():
    assert compiled.SMALL_SIZES == compiled._door().LARGEST ** 2


FIRST_CALLS = """
import sys
import numpy as np
from helpers.kalman import StateSpace, loglike, loglike_and_grad
for m, scale in ((2, 1), (2, 1e9), (5, 1)):
    I, y = np.eye(m), np.arange(40.0).reshape(20, 2)
    model = StateSpace(I[0], scale * I, 0 * I[0], I[0, :2], 0.9 * I, I[:2], I, I[:2, :2], I)
    loglike(y, model)
    loglike_and_grad(y, model)
    there = {name.rpartition(".")[2] for name in sys.modules if "kalman.compiled." in name}
    print(*(name for name in ("whole", "roots") if name in there))
"""


def test_only_what_a_model_needs_is_compiled_for_it():
    """A few states go through registers; a vague P0 needs roots, more states the pass for any."""
    found = subprocess.check_output([sys.executable, "-c", FIRST_CALLS], text=True)
    assert found.splitlines() == ["", "roots", "whole roots"]
