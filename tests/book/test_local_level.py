"""The script of the landing page computes what helpers.kalman computes, from the same data."""

import json
import shutil
import subprocess

import numpy as np
import pytest

from helpers.datasets import local_level_arrays, nile
from helpers.kalman import StateSpace
from helpers.kalman.reference import FilterOutputs, kalman_filter, loglike_and_grad, reverse
from tools import book, nile_data

STATIC = book.ROOT / "book/_static"
CASES = [
    ({}, []),
    ({}, [0, 27, 28, 29, 99]),
    ({"sigma_eps2": 100.0, "sigma_eta2": 1e5}, [1]),
    ({"sigma_eps2": 1e6, "sigma_eta2": 1.0}, range(20, 70)),
]


def test_data():
    assert (STATIC / "nile-data.js").read_text(encoding="utf-8") == nile_data.make(), (
        "nile-data.js is stale: run python -m tools.nile_data"
    )


def in_javascript(y, arrays):
    node = shutil.which("node")
    if not node:
        pytest.skip("Node.js is not installed: the script of the landing page was not run")
    model = {name: arrays[name].item() for name in ("a0", "P0", "H", "Q")}
    y = [None if np.isnan(value) else value for value in y[:, 0]]
    code = (STATIC / "local-level.js").read_text(encoding="utf-8")
    code += f"console.log(JSON.stringify(localLevel({json.dumps(y)}, {json.dumps(model)})));"
    done = subprocess.run([node, "-e", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(("variances", "gaps"), CASES)
def test_local_level(variances, gaps):
    y, arrays = nile().y.copy(), local_level_arrays(**variances)
    y[list(gaps)] = np.nan
    ours = in_javascript(y, arrays)
    model = StateSpace(**arrays)
    filtered = kalman_filter(y, model)
    value, _, gradients = loglike_and_grad(y, model)
    # The gradient of an intercept at each step is the adjoint of the next prediction.
    each = StateSpace(**arrays | {"c": np.zeros((len(y), 1))})
    _, of_steps = reverse(each, filtered, FilterOutputs(l=np.ones(len(y))))
    adjoint = np.concatenate([of_steps.a0, of_steps.c[:-1, 0]])
    out = filtered.out
    wanted = {
        "loglik": value,
        "predicted": out.a_pred[:, 0],
        "filtered": out.a_filt[:, 0],
        "spread": out.P_pred[:, 0, 0],
        "variance": out.P_filt[:, 0, 0],
        "adjoint": adjoint,
        "smoothed": out.a_pred[:, 0] + out.P_pred[:, 0, 0] * adjoint,
    }
    for name, numbers in wanted.items():
        np.testing.assert_allclose(ours[name], numbers, rtol=1e-9, atol=1e-12, err_msg=name)
    score = [ours["score"]["H"], ours["score"]["Q"]]
    np.testing.assert_allclose(score, [gradients.H.item(), gradients.Q.item()], rtol=1e-9)
