"""The tool that runs pymc-extras' own tests: whose fault a failure is."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest
from pymc_extras.statespace.filters import DisturbanceSmoother, StandardFilter

def test_needs_theirs():
    assert StandardFilter.__name__ == "StandardFilter"

@pytest.mark.parametrize("x", ["a", "a - b"])
def test_fails_anyhow(x):
    assert StandardFilter.__name__ == "StandardFilter" and x == "a"

def test_passes_with_ours():
    assert StandardFilter.__name__ == "ClosedFormFilter"
    assert DisturbanceSmoother.__name__ == "DisturbanceSmoother"

def test_make_filter_outputs_skips_the_smoother_and_more():
    assert StandardFilter.__name__ == "StandardFilter"
"""


def run(sources, *options):
    command = [sys.executable, "-m", "tools.upstream_suite", str(sources), "--python", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.thorough
def test_only_what_passes_without_us_is_our_fault(tmp_path):
    folder = tmp_path / "tests" / "statespace"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(TESTS)
    version = importlib.metadata.version("pymc-extras")
    (tmp_path / "PKG-INFO").write_text(f"Name: pymc-extras\nVersion: {version}\n")

    found = run(tmp_path)
    assert found.returncode == 1, found.stderr
    assert "3 failed, 1 passed, 1 xfailed" in found.stdout
    *_, counts, needed, first = found.stdout.splitlines()
    assert counts == "1 failed without us as well, 2 with us alone"
    assert needed == "tests/statespace/test_it.py::test_needs_theirs"
    assert first == "tests/statespace/test_it.py::test_fails_anyhow[a]"
    assert run(tmp_path, "-k", "b or with_ours").returncode == 0

    (tmp_path / "PKG-INFO").write_text("Name: pymc-extras\nVersion: 0.0\n")
    assert "holds pymc-extras 0.0" in run(tmp_path).stderr
