"""The compiled kernels against the NumPy reference, on every case and with what they do apart."""

import numpy as np
import pytest
from kalman_models import CASES, NAMES_OF_CASES, make

from helpers.checks import relative_error
from helpers.datasets import random_model, simulate
from helpers.kalman import StateSpace, compiled, general
from helpers.kalman.model import NAMES, STATIC
from helpers.kalman.op import TOLERANCE
from helpers.kalman.reference import FilterOutputs, kalman_filter, reverse, smoother_form

ALL = (True, True, True, True)


def over_time(model: StateSpace) -> list[np.ndarray]:
    """The nine arrays with an axis for time, as kernels take them."""
    return [
        np.ascontiguousarray(X if name in (*STATIC, *model.time_varying) else X[np.newaxis])
        for name, X in model.asdict().items()
    ]


def leave_nan():
    """Fill memory that the next call is likely to be given."""
    for size in np.geomspace(64, 2**17, 60).astype(int):
        np.full(size, np.nan)


def assert_same(out, y_bar, dy, gradients, model, rtol):
    expected = gradients.asdict() | {"y": dy}
    found = dict(zip(NAMES, out, strict=True)) | {"y": y_bar}
    for name, X in expected.items():
        G = found[name]
        if name not in (*STATIC, *model.time_varying, "y"):
            G = G[0]
        if not X.any():
            assert np.abs(G).max() < rtol, name
        else:
            assert relative_error(G, X) < rtol, name


@pytest.mark.parametrize("name", NAMES_OF_CASES)
@pytest.mark.parametrize("tol", [0.0, TOLERANCE])
def test_value_and_gradient(name, tol):
    y, model = make(name)
    filtered = kalman_filter(y, model)
    arrays = over_time(model)
    l, out, y_bar, k = compiled.loglike_and_grad(y, *arrays, np.ones(len(y)), *ALL, tol)
    assert relative_error(l, filtered.out.l) < 1e-12
    assert relative_error(compiled.loglike(y, *arrays, tol), filtered.out.l) < 1e-12
    # The gradient of H on the Nile is near zero at these values: its terms cancel.
    rtol = 1e-9 if name == "Nile" else 1e-11
    assert_same(out, y_bar, *smoother_form(model, filtered), model, rtol)
    assert k == len(y) if tol == 0 else True


@pytest.mark.parametrize("name", [name for name in CASES if name != "one step"])
def test_unequal_weights(name):
    y, model = make(name)
    weights = np.random.default_rng(1).standard_normal(len(y))
    filtered = kalman_filter(y, model)
    truth = reverse(model, filtered, FilterOutputs(l=weights))
    _, out, y_bar, _ = compiled.loglike_and_grad(y, *over_time(model), weights, *ALL, TOLERANCE)
    assert_same(out, y_bar, *truth, model, 1e-11)


def test_equal_weights_other_than_one():
    y, model = make("gaps")
    filtered = kalman_filter(y, model)
    truth = reverse(model, filtered, FilterOutputs(l=np.full(len(y), -2.5)))
    weights = np.full(len(y), -2.5)
    _, out, y_bar, _ = compiled.loglike_and_grad(y, *over_time(model), weights, *ALL, 0.0)
    assert_same(out, y_bar, *truth, model, 1e-12)


@pytest.mark.parametrize("m", [7, 8, 9, 16, 17, 25, 33])
@pytest.mark.parametrize("p", [1, 3, 9])
def test_sizes_around_whole_vectors(m, p):
    rng = np.random.default_rng(m * 10 + p)
    arrays = random_model(m=m, p=p, r=2, rng=rng)
    y, _ = simulate(15, rng, **arrays)
    y[3, 0] = np.nan
    model = StateSpace(**arrays)
    filtered = kalman_filter(y, model)
    l, out, y_bar, _ = compiled.loglike_and_grad(y, *over_time(model), np.ones(15), *ALL, 0.0)
    assert relative_error(l, filtered.out.l) < 1e-12
    assert_same(out, y_bar, *smoother_form(model, filtered), model, 1e-10)


def season(period: int) -> StateSpace:
    """Level, trend and season: a transition that is nearly empty."""
    m = period + 1
    T = np.zeros((m, m))
    T[0, 0] = T[0, 1] = T[1, 1] = 1
    T[2, 2:] = -1
    T[np.arange(3, m), np.arange(2, m - 1)] = 1
    Z, R = np.zeros((1, m)), np.zeros((m, 3))
    Z[0, [0, 2]] = 1
    R[[0, 1, 2], [0, 1, 2]] = 1
    Q, H = np.diag([0.1, 0.01, 0.05]), np.array([[0.5]])
    return StateSpace(np.zeros(m), 5 * np.eye(m), np.zeros(m), np.zeros(1), T, Z, R, H, Q)


@pytest.mark.parametrize("period", [4, 12, 18, 26, 39])  # one to five vectors: each kind of tile
def test_a_transition_that_is_nearly_empty(period):
    model = season(period)
    y, _ = simulate(60, np.random.default_rng(0), **model.asdict())
    y[20:23] = np.nan
    filtered = kalman_filter(y, model)
    leave_nan()
    l, out, y_bar, _ = compiled.loglike_and_grad(y, *over_time(model), np.ones(60), *ALL, TOLERANCE)
    assert relative_error(l, filtered.out.l) < 1e-12
    assert_same(out, y_bar, *smoother_form(model, filtered), model, 1e-10)


@pytest.mark.parametrize("name", ["gaps", "one step", "more observed than states"])
def test_memory_that_others_left_full_of_nan(name):
    """What lies in the padding of rows, or beyond a matrix's last row, reaches no result."""
    y, model = make(name)
    filtered = kalman_filter(y, model)
    leave_nan()
    l, out, y_bar, _ = compiled.loglike_and_grad(
        y, *over_time(model), np.ones(len(y)), *ALL, TOLERANCE
    )
    assert relative_error(l, filtered.out.l) < 1e-12
    assert_same(out, y_bar, *smoother_form(model, filtered), model, 1e-11)


def test_settles_after_the_last_gap():
    rng = np.random.default_rng(5)
    arrays = random_model(m=3, p=1, r=1, rng=rng)
    y, _ = simulate(300, rng, **arrays)
    y[100] = np.nan
    model = StateSpace(**arrays)
    filtered = kalman_filter(y, model)
    l, out, y_bar, k = compiled.loglike_and_grad(
        y, *over_time(model), np.ones(300), *ALL, TOLERANCE
    )
    assert 100 < k < 300
    assert_same(out, y_bar, *smoother_form(model, filtered), model, 1e-10)


@pytest.mark.parametrize("tol", [1e-4, 1e-7, 1e-10])
def test_tolerance_bounds_the_settled_covariance(tol):
    """The covariance at the settled step is within tol of the fixed point, in units of its own."""
    rng = np.random.default_rng(2)
    for radius in (0.5, 0.9, 0.99):
        arrays = random_model(m=4, p=1, r=2, rng=rng, radius=radius)
        y, _ = simulate(2000, rng, **arrays)
        model = StateSpace(**arrays)
        k = compiled.loglike_and_grad(y, *over_time(model), np.ones(2000), *ALL, tol)[3]
        assert k < 2000
        P = kalman_filter(y, model).out.P_pred
        scale = np.sqrt(np.outer(np.diag(P[-1]), np.diag(P[-1])))
        assert (np.abs(P[k] - P[-1]) / scale).max() < 2 * tol


def test_only_what_is_asked():
    y, model = make("gaps")
    arrays, ones = over_time(model), np.ones(len(y))
    l, full, y_bar, _ = compiled.loglike_and_grad(y, *arrays, ones, *ALL, 0.0)
    l_vectors, vectors, y_vectors, _ = compiled.loglike_and_grad(
        y, *arrays, ones, False, False, False, False, 0.0
    )
    assert relative_error(y_vectors, y_bar) < 1e-13 and relative_error(l_vectors, l) < 1e-13
    for name in ("a0", "c", "d"):
        assert relative_error(getattr(vectors, name), getattr(full, name)) < 1e-13
    assert not vectors.T.any() and not vectors.H.any()
    _, some, _, _ = compiled.loglike_and_grad(y, *arrays, ones, True, False, True, False, 0.0)
    assert relative_error(some.Z, full.Z) < 1e-13 and not some.T.any() and not some.Q.any()


def test_not_positive_definite_is_nan():
    y, model = make("two shocks")
    arrays = over_time(model)
    arrays[7] = -100 * arrays[7]
    l, out, y_bar, _ = compiled.loglike_and_grad(y, *arrays, np.ones(len(y)), *ALL, 0.0)
    assert np.isnan(l).all() and np.isnan(out.a0).all() and np.isnan(y_bar).all()
    assert np.isnan(compiled.loglike(y, *arrays, 0.0)).all()


def test_repeated_calls_agree_to_the_bit():
    y, model = make("long")
    arrays, ones = over_time(model), np.ones(len(y))
    first = compiled.loglike_and_grad(y, *arrays, ones, *ALL, TOLERANCE)
    for _ in range(3):
        again = compiled.loglike_and_grad(y, *arrays, ones, *ALL, TOLERANCE)
        assert all((a == b).all() for a, b in zip(first[1], again[1], strict=True))


@pytest.mark.parametrize("name", ["gaps", "time-varying with gaps", "H = 0, singular P0 and Q"])
def test_all_outputs_and_any_cotangents(name):
    y, model = make(name)
    filtered = kalman_filter(y, model)
    outputs = general.filter_outputs(y, *over_time(model))
    for x, X, expected in zip(FilterOutputs._fields, outputs, filtered.out, strict=False):
        assert relative_error(X, expected) < 1e-12, x
    rng = np.random.default_rng(3)
    bar = FilterOutputs(*(rng.standard_normal(X.shape) for X in filtered.out))
    _, out, y_bar = general.reverse(y, *over_time(model), *bar)
    assert_same(out, y_bar, *reverse(model, filtered, bar), model, 1e-10)
