"""What the benchmarks compute themselves: counts that stand beside the times in their records."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.checks import relative_error
from helpers.kalman import loglike_and_grad

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from peers import models, ours

    yield models, ours
    for name in [name for name in sys.modules if name.split(".")[0] == "peers"]:
        monkeypatch.delitem(sys.modules, name)


def test_our_contender_returns_what_the_package_does(peers):
    models, ours = peers
    y, model = models.random_problem(3, 2, 2, 20)
    expected, _, gradients = loglike_and_grad(y, model)
    value, found = ours.contender(y, model)()
    assert value == pytest.approx(expected, rel=1e-14)
    for name, G in gradients.asdict().items():
        assert relative_error(found[name], G) < 1e-13, name
    assert ours.value_alone(y, model)()[0] == pytest.approx(expected, rel=1e-13)
    assert 0 < ours.steady_step(y, model) <= 20


def test_a_pass_counts_what_the_model_and_the_request_need(peers):
    models, ours = peers
    y, model = models.structural_problem(12, 200)
    needed = ("a0", "P0", "H", "Q")
    seasonal = ours.counts(y, model, needed, steady=200)
    # The same sizes without a zero in T and Z.
    full = replace(model, T=np.ones_like(model.T), Z=np.ones_like(model.Z))
    dense = ours.counts(y, full, needed, steady=200)
    m, names = model.m, np.count_nonzero(model.Z)
    assert dense["forward"] - seasonal["forward"] == pytest.approx(
        200 * (1.5 * (m**2 - np.count_nonzero(model.T)) * m + (m - names) * m)
    )
    assert ours.counts(y, model, steady=200)["total"] > seasonal["total"]
    assert ours.counts(y, model, needed, steady=20)["total"] < seasonal["total"]
