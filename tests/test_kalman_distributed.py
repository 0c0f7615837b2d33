"""helpers.kalman.distributed: pieces of a panel on two worker processes, one of which is killed."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from helpers.checks import relative_error
from helpers.datasets import random_model
from helpers.kalman import StateSpace, panel
from helpers.kalman.panel_fit import fit

distributed = pytest.importorskip("distributed")
from helpers.kalman.distributed import Panel  # noqa: E402

ONE = np.eye(1)
WALK = StateSpace([0.0], 10 * ONE, [0.0], [0.0], T=ONE, Z=ONE, R=ONE, H=ONE, Q=ONE)
MODEL = StateSpace(**random_model(3, 2, 2, rng=3))


def local_level(theta):
    variances = np.exp(theta)[:, :, np.newaxis, np.newaxis]
    return {"H": variances[:, 0], "Q": variances[:, 1]}


def series(J, n, p):
    rng = np.random.default_rng(J)
    Y = np.cumsum(rng.normal(size=(J, n, p)), axis=1) + rng.normal(size=(J, n, p))
    Y[::3, 2, 0] = np.nan
    return Y


def test_without_a_cluster():
    """First: the cluster of the other tests is not there yet."""
    with pytest.raises(ValueError, match="there is no cluster"):
        Panel(series(2, 3, 1))


@pytest.fixture(scope="module")
def client():
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with (
        distributed.LocalCluster(**options) as cluster,
        distributed.Client(cluster) as client,
    ):
        # Workers find `helpers` and the functions of this file as this process does.
        import cloudpickle

        cloudpickle.register_pickle_by_value(__import__("sys").modules[__name__])
        yield client


def test_a_panel_is_that_of_one_process(client):
    Y = series(25, 12, 2)
    spread = Panel(Y, client, chunk=7)
    c = np.random.default_rng(0).normal(size=(25, 3))
    Q = MODEL.Q * np.linspace(0.5, 2, 25)[:, None, None]
    for own in ({}, {"c": c}, {"Q": Q}):
        l, dY, gradients = panel.loglike_and_grad(Y, MODEL, **own)
        found = spread.loglike_and_grad(MODEL, **own)
        assert relative_error(spread.loglike(MODEL, **own), l) < 1e-13
        assert relative_error(found[0], l) < 1e-13 and relative_error(found[1], dY) < 1e-12
        for name, X in gradients.asdict().items():
            G = getattr(found[2], name)
            assert G.shape == X.shape and relative_error(G, X) < 1e-11, name
    models = [StateSpace(**(MODEL.asdict() | {"Q": X})) for X in Q]
    assert relative_error(spread.loglike(models), panel.loglike(Y, models)) < 1e-13
    ragged = [y[: 4 + 3 * (j == 20) + j % 3] for j, y in enumerate(Y)]
    varying = replace(MODEL, T=MODEL.T * np.linspace(0.5, 1, 9)[:, None, None])
    for model in (MODEL, varying):  # as long as the longest, which is in one piece alone
        _, dY, _ = Panel(ragged, client, chunk=10).loglike_and_grad(model)
        expected = panel.loglike_and_grad(ragged, model)[1]
        assert all(relative_error(a, b) < 1e-12 for a, b in zip(dY, expected, strict=True))


def test_a_worker_is_killed_and_nothing_is_lost(client):
    """kill -9 after the first piece: the pieces it held, and the one it was at, are made again."""
    Y = series(600, 30, 1)
    Y[123] = np.nan
    alone = fit(Y, WALK, local_level, [0.0, 0.0])
    spread = Panel(Y, client, chunk=25)
    distributed.wait(spread._pieces)
    before = client.run(os.getpid)
    victim, held = max(client.has_what().items(), key=lambda item: len(item[1]))
    assert held  # it has pieces that nobody else has
    counts = []

    def kill_once(done, J):
        if not counts:
            os.kill(before[victim], signal.SIGKILL)
        counts.append(done)

    found = spread.fit(WALK, local_level, [0.0, 0.0], progress=kill_once)
    assert counts[0] < 600 and counts[-1] == 600 and len(counts) == 24
    assert list(found.failed) == [123] and "no observation" in found.failed[123]
    others = np.arange(600) != 123
    assert np.abs(found.value - alone.value)[others].max() < 1e-9
    assert np.array_equal(found.converged, alone.converged)
    assert before[victim] not in client.run(os.getpid).values()


def test_errors_name_the_series_among_all(client):
    Y = series(9, 5, 2)
    Y[7] = np.nan
    with pytest.raises(ValueError, match="series 7 has no observation"):
        Panel(Y, client, chunk=2).loglike(MODEL)
    with pytest.raises(ValueError, match="arrays"):
        Panel(Y[:, :, :1], client, chunk=4).fit(WALK, lambda theta: None, [0.0])
    spread = Panel(Y, client)
    with pytest.raises(ValueError, match=r"c has shape \(3,\), expected a first axis for 9 series"):
        spread.loglike(MODEL, c=np.zeros(3))
    with pytest.raises(ValueError, match="2 models for 9 series"):
        spread.loglike([MODEL] * 2)
    c = np.ma.masked_less(np.zeros((9, 3)), 0)
    with pytest.raises(ValueError, match="c is a masked array"):
        spread.loglike(MODEL, c=c)
    with pytest.raises(ValueError, match=r"start has shape \(3, 2\), expected"):
        Panel(Y[:, :, :1], client, chunk=3).fit(WALK, local_level, np.zeros((3, 2)))
    Y = [*series(9, 5, 1)]
    Y[5] = np.zeros((5, 2))
    failed = Panel(Y, client, chunk=2).fit(WALK, local_level, [0.0, 0.0]).failed
    assert failed.keys() == {4, 5} and "series 5 has shape (5, 2)" in failed[4]
    with pytest.raises(ValueError, match="chunk is 0"):
        Panel(Y, client, chunk=0)
    with pytest.raises(ValueError, match="no series"):
        Panel([], client)


@pytest.mark.thorough
def test_a_piece_that_no_worker_finishes_is_reported(client):
    """Of the others nothing is lost."""
    Y = series(6, 8, 1)

    def arrays(theta):
        if (theta.real > 5).any():
            raise OverflowError("too much")
        return local_level(theta)

    start = np.zeros((6, 2))
    start[4] = 6
    found = Panel(np.nan_to_num(Y), client, chunk=2).fit(WALK, arrays, start)
    assert found.failed.keys() == {4, 5} and "OverflowError: too much" in found.failed[5]
