"""The scripts of the live figures compute what they draw."""

import json
import shutil
import subprocess

import numpy as np
import pytest

from tools import book
from tools.sphinx.live_figures import LIVE

STATIC = book.ROOT / "book/_static"


def run(script, expression):
    node = shutil.which("node")
    if not node:
        pytest.skip("Node.js is not installed: the script was not run")
    code = (STATIC / script).read_text(encoding="utf-8")
    code += f"\nconsole.log(JSON.stringify({expression}));"
    done = subprocess.run([node, "-e", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("power", [-1, -5.5, -8, -12, -20])
@pytest.mark.parametrize(
    ("name", "function"), [("1 / (1 + t)", lambda t: 1 / (1 + t)), ("exp t", np.exp)]
)
def test_quotients(name, function, power):
    x, h = 0.7, 10.0**power
    found = run("step-size.js", f"quotients(STEP_FUNCTIONS[{name!r}], {x}, {h!r})")
    # A last digit of exp that differs is a last digit divided by h.
    noise = 4 * np.finfo(float).eps * abs(function(x)) / h
    assert found["forward"] == pytest.approx((function(x + h) - function(x)) / h, abs=noise)
    central = (function(x + h) - function(x - h)) / (2 * h)
    assert found["central"] == pytest.approx(central, abs=noise)
    assert found["complex"] == pytest.approx(np.imag(function(x + 1j * h)) / h, rel=1e-14)
    slope = {"1 / (1 + t)": -1 / (1 + x) ** 2, "exp t": np.exp(x)}[name]
    assert run("step-size.js", f"STEP_FUNCTIONS[{name!r}].slope({x})") == pytest.approx(slope)


def test_every_live_figure_is_in_the_book():
    names = {
        label.name
        for page in book.page_names()
        for label in book.labels_of(page, book.read_cells(page))
        if label.kind == "figure"
    }
    assert set(LIVE) <= names
    assert all((STATIC / script).exists() for scripts in LIVE.values() for script in scripts)
