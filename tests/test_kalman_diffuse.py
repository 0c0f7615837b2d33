"""helpers.kalman.diffuse: against statsmodels' exact diffuse filter, against the dense formula of
generalised least squares, and the gradient against a complex step of the value."""

from dataclasses import replace

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from kalman_oracle import joint_of
from pytensor.graph.traversal import ancestors
from tiers import thorough

from helpers.checks import relative_error, symmetrize
from helpers.datasets import random_model, simulate
from helpers.kalman import StateSpace, diffuse, loglike_and_grad, reference
from helpers.kalman.ops import diffuse as diffuse_ops
from helpers.kalman.ops.diffuse import (
    KalmanIntegrated,
    kalman_diffuse_estimate,
    kalman_diffuse_loglike,
)
from helpers.kalman.scan import symbolic_model
from helpers.statespace import NAMES, SYMMETRIC

sm = pytest.importorskip("statsmodels.api")

N = 36
THEIRS = {"c": "state_intercept", "d": "obs_intercept", "T": "transition", "Z": "design",
          "R": "selection", "H": "obs_cov", "Q": "state_cov"}  # fmt: skip
SLOW = "seasonal ARIMA", "level, coefficients as states"


def series(gaps):
    rng = np.random.default_rng(3)
    y = np.cumsum(np.cumsum(rng.normal(size=N)) * 0.1) + rng.normal(size=N)
    y += 2 * np.sin(np.arange(N) * np.pi / 2)
    if gaps:
        y[[0, 1, 17, 18, 30]] = np.nan
    return y


def regressors():
    return np.random.default_rng(5).normal(size=(N, 2))


def components(*args, **kwargs):
    return lambda y: sm.tsa.UnobservedComponents(y, *args, use_exact_diffuse=True, **kwargs)


def arima(**kwargs):
    return lambda y: sm.tsa.SARIMAX(y, use_exact_diffuse=True, **kwargs)


MODELS = {
    "level": (components("llevel"), [0.7, 0.3]),
    "trend": (components("lltrend"), [0.7, 0.3, 0.05]),
    "smooth trend": (components("strend"), [0.7, 0.05]),
    "trend, season 4": (components("lltrend", seasonal=4), [0.7, 0.3, 0.05, 0.2]),
    "trend, season 4, H = 0": (components("lltrend", seasonal=4), [0.0, 0.3, 0.05, 0.2]),
    "level, season 12": (components("llevel", seasonal=12), [0.7, 0.3, 0.05]),
    "level, cycle": (
        components("llevel", cycle=True, stochastic_cycle=True, damped_cycle=True),
        [0.7, 0.3, 0.2, 0.5, 0.9],
    ),
    "level, autoregression": (components("llevel", autoregressive=1), [0.7, 0.3, 0.2, 0.5]),
    "level, coefficients as states": (
        lambda y: components("llevel", exog=regressors(), mle_regression=False)(y), [0.7, 0.3],
    ),
    "ARIMA": (arima(order=(1, 1, 1)), [0.5, 0.3, 0.9]),
    "ARIMA, twice integrated": (arima(order=(1, 2, 1)), [0.5, 0.3, 0.9]),
    "seasonal ARIMA": (
        arima(order=(1, 1, 1), seasonal_order=(0, 1, 1, 4)), [0.5, 0.3, -0.4, 0.9],
    ),
    "ARIMA with regressors": (arima(order=(1, 1, 0), exog=regressors()), [1.0, -0.5, 0.5, 0.9]),
}  # fmt: skip


def build(name, y):
    make, params = MODELS[name]
    mod = make(y)
    mod.update(np.array(params))
    mod.ssm.tolerance = 0  # its own steady state costs digits
    a0, P_inf, P0 = mod.ssm.initialization(model=mod.ssm)
    A = np.eye(len(a0))[:, np.diag(P_inf) > 0]
    arrays = {x: np.moveaxis(getattr(mod.ssm, X), -1, 0) for x, X in THEIRS.items()}
    arrays = {x: X[0] if len(X) == 1 else X for x, X in arrays.items()}
    return mod, StateSpace(a0=a0, P0=P0, **arrays), A


def assert_gradients(y, model, A, bound, method="fused"):
    """All eleven gradients."""
    _, dy, gradients, A_bar, *_ = diffuse.loglike_and_grad(y, model, A, method)
    found = gradients.asdict() | {"A": A_bar, "y": dy}

    def value(y=y, A=A, **moved):
        return diffuse.loglike(y, replace(model, **moved), A)

    assert_slopes(value, found, model.asdict() | {"A": A, "y": y}, bound)


def assert_slopes(value, found, at, bound):
    """Gradients along a few directions each, against complex steps of the value."""
    rng = np.random.default_rng(0)
    for x, X in at.items():
        for _ in range(3):
            V = rng.normal(size=X.shape)
            V = symmetrize(V) if x in SYMMETRIC else V
            slope, terms = value(**{x: X + 1e-30j * V}).imag / 1e-30, found[x] * V
            assert abs(terms.sum() - slope) < bound * max(1, np.linalg.norm(terms)), x


@pytest.mark.parametrize("gaps", [thorough(False), True])
@pytest.mark.parametrize("name", [thorough(x) if x in SLOW else x for x in MODELS])
def test_statsmodels_models(name, gaps):
    y = series(gaps)
    mod, model, A = build(name, y)
    for method in ("fused", "reference"):
        value = diffuse.loglike(y[:, None], model, A, method)
        assert relative_error(value, mod.ssm.loglike()) < 1e-10
    if name not in ("level, season 12", "ARIMA with regressors"):  # slow here, and no other case
        assert_gradients(y[:, None], model, A, 1e-10)


@pytest.mark.parametrize(
    "name",
    [
        "level", "trend, season 4, H = 0",
        thorough("seasonal ARIMA"),
    ],
)  # fmt: skip
def test_a_level_of_a_million(name):
    y = series(True) + 1e6
    mod, model, A = build(name, y)
    assert relative_error(diffuse.loglike(y[:, None], model, A), mod.ssm.loglike()) < 1e-10
    assert_gradients(y[:, None], model, A, 5e-9)
    _, dy, gradients, *_ = diffuse.loglike_and_grad(y[:, None], model, A)
    assert abs(dy.sum() + gradients.d.item()) < 1e-12  # d is subtracted from each y
    for method in ("fused", "reference"):
        found = diffuse.loglike_and_grad(y[:, None], model, A, method)
        # Where delta is at its mean the slope along it is zero; in standard deviations.
        deviations = np.sqrt(np.diag(found.estimate.covariance).clip(0))
        assert np.abs(A.T @ found.gradients.a0 * deviations).max() < 1e-12, method


def several(seed=0):
    """Several series, three directions that are no single states, gaps, time-varying Z."""
    rng = np.random.default_rng(seed)
    arrays = random_model(4, 2, 2, rng=rng)
    y, _ = simulate(12, rng, **arrays)
    y[2, 0], y[5], y[8, 1] = np.nan, np.nan, np.nan
    arrays["Z"] = arrays["Z"] * (1 + 0.1 * rng.normal(size=(12, 1, 1)))
    return y, StateSpace(**arrays), rng.normal(size=(4, 3))


def dense(y, model, A):
    """Log-likelihood, mean and covariance of delta by generalised least squares on all of y."""
    mean, V, G, Z, d, H = joint_of(model, len(y))
    seen = ~np.isnan(y).ravel()
    sigma = (Z @ V @ Z.T + H)[np.ix_(seen, seen)]
    v, X = (y.ravel() - Z @ mean - d)[seen], (Z @ G @ A)[seen]
    inverse = np.linalg.inv(sigma)
    covariance = np.linalg.inv(X.T @ inverse @ X)
    delta = covariance @ X.T @ inverse @ v
    rest = v - X @ delta
    value = -0.5 * (
        seen.sum() * np.log(2 * np.pi)
        + np.linalg.slogdet(sigma)[1]
        + np.linalg.slogdet(X.T @ inverse @ X)[1]
        + rest @ inverse @ rest
    )
    return value, delta, covariance


STARTS = {  # states, series; what is changed; after how many of 60 steps the columns may end
    "one series": ((4, 1), {}, (3, 12)),
    "two series": ((5, 2), {}, (2, 8)),
    "without noise": ((4, 2), {"H": 0.0}, (2, 8)),
    "more series than states": ((2, 3), {}, (1, 2)),
    "the first steps missing": ((4, 1), {"missing": slice(0, 25)}, (28, 30)),
    "not seen at first": ((2, 1), {"Z": 0.0}, (60, 60)),
    "hardly seen at first": ((2, 1), {"Z": 1e-3}, (60, 60)),
    "a normal prior": ((3, 1), {"precision": 1.0}, (2, 8)),
    "varying over time": ((3, 2), {"time": True}, (1, 8)),
}


@pytest.mark.parametrize("name", STARTS)
def test_the_columns_end_when_delta_is_known(name):
    """An ordinary pass goes on from there: the gradients are those of columns to the end."""
    (m, p), change, (least, most) = STARTS[name]
    n, rng = 60, np.random.default_rng(len(name))
    model = StateSpace(**random_model(m, p, rng=rng))
    A, precision = rng.normal(size=(m, max(1, m - 1))), None
    if "H" in change:
        model = replace(model, H=0 * model.H)
    if "time" in change:
        varied = {x: getattr(model, x) * rng.uniform(0.9, 1.1, (n, 1, 1)) for x in "TZRHQ"}
        model = replace(model, c=rng.normal(size=(n, m)), d=rng.normal(size=(n, p)), **varied)
    if "Z" in change:  # little or no trace of the second number until half of the steps
        Z = np.ones((n, 1, 2))
        Z[: n // 2 + 3, 0, 1] = change["Z"] * rng.normal(size=n // 2 + 3)
        model, A = replace(model, T=np.eye(m), Z=Z), np.eye(m)
    if "precision" in change:
        L = rng.normal(size=(A.shape[1],) * 2)
        precision = L @ L.T + np.eye(len(L))
    y, _ = simulate(n, rng, **model.asdict())
    y[rng.random(y.shape) < 0.1] = np.nan
    y[change.get("missing", slice(0, 0))] = np.nan
    columns = diffuse._Columns(y, model, A, None, None, precision)
    assert least <= columns._compiled(True, 0.0)[-1][1] <= most
    found, expected = (
        diffuse.loglike_and_grad(y, model, A, method, precision=precision)
        for method in ("fused", "reference")
    )
    assert relative_error(found.value, expected.value) < 1e-12
    assert relative_error(found.dy, expected.dy) < 1e-10
    largest = max(np.abs(G).max() for G in expected.gradients.asdict().values())
    for x, G in expected.gradients.asdict().items():
        error = np.abs(getattr(found.gradients, x) - G).max()
        assert error < 1e-10 * max(np.abs(G).max(), 1e-3 * largest), x
    assert np.abs(found.A_bar - expected.A_bar).max() < 1e-10 * largest
    for a, b in zip(found.estimate, expected.estimate, strict=True):
        assert relative_error(a, b) < 1e-9
    if precision is not None:
        assert relative_error(found.precision_bar, expected.precision_bar) < 1e-10


def test_columns_that_are_nearly_the_same_go_on():
    """What a later observation moves delta by would be the difference of two large numbers."""
    model = StateSpace(**random_model(2, 2, 2, rng=0))
    y, _ = simulate(30, 0, **model.asdict())
    A = np.array([[1.0, 1.0], [0.5, 0.5 + 1e-4]])
    found, expected = (diffuse.loglike_and_grad(y, model, A, x) for x in ("fused", "reference"))
    assert relative_error(found.dy, expected.dy) < 1e-11


def test_several_series_against_least_squares():
    y, model, A = several()
    value, delta, covariance = dense(y, model, A)
    for method in ("fused", "reference"):
        found = diffuse.loglike_and_grad(y, model, A, method)
        assert relative_error(found.value, value) < 1e-11
        assert relative_error(found.estimate.mean, delta) < 1e-10
        assert relative_error(found.estimate.covariance, covariance) < 1e-10
        assert_gradients(y, model, A, 1e-10, method)


def with_regressors(seed=0):
    """Regressors in the observations and in the states, beside a diffuse start; gaps."""
    y, model, A = several(seed)
    rng = np.random.default_rng(seed + 9)
    n, (p, m) = len(y), model.Z.shape[-2:]
    A = np.column_stack([A[:, :2], np.zeros((m, 2))])
    X, B = rng.normal(size=(n, p, 4)) * [0, 1, 1, 0], rng.normal(size=(n, m, 4)) * [0, 0, 1, 1]
    return y, model, {"A": A, "X": X, "B": B}


def stacked(model, n, A, X, B):
    """delta below the state, for a normal prior with the identity for a covariance."""
    m, q, p = model.m, A.shape[1], model.p
    T, Z, R = np.zeros((n, m + q, m + q)), np.zeros((n, p, m + q)), np.zeros((m + q, model.r))
    T[:, :m, :m], T[:, :m, m:], T[:, m:, m:] = model.T, B, np.eye(q)
    Z[:, :, :m], Z[:, :, m:], R[:m] = model.Z, X, model.R
    first = np.vstack([A, np.eye(q)])
    P0 = first @ first.T
    P0[:m, :m] += model.P0
    c = np.concatenate([model.c, np.zeros(q)])
    return StateSpace(np.r_[model.a0, np.zeros(q)], P0, c, model.d, T, Z, R, model.H, model.Q)


@pytest.mark.parametrize("method", ["fused", "reference"])
def test_a_normal_prior_is_a_larger_state(method):
    y, model, columns = with_regressors()
    precision = np.eye(4)
    found = diffuse.loglike_and_grad(y, model, **columns, precision=precision, method=method)
    larger = stacked(model, len(y), **columns)
    value, dy, expected = loglike_and_grad(y, larger, tol=0.0)
    m = model.m
    assert relative_error(found.value, value) < 1e-11
    assert relative_error(found.dy, dy) < 1e-10
    for x in ("c", "d", "H", "Q"):
        theirs = getattr(expected, x)
        assert (
            relative_error(getattr(found.gradients, x), theirs[: m if x == "c" else None]) < 1e-10
        )
    assert relative_error(found.gradients.T, expected.T[:, :m, :m].sum(axis=0)) < 1e-10
    assert relative_error(found.gradients.Z, expected.Z[:, :, :m]) < 1e-10
    assert relative_error(found.X_bar, expected.Z[:, :, m:]) < 1e-10
    assert relative_error(found.B_bar, expected.T[:, :m, m:]) < 1e-10
    filtered = reference.kalman_filter(y, larger)
    last = filtered.out.a_filt[-1, m:], filtered.out.P_filt[-1, m:, m:]
    assert relative_error(found.estimate.mean, last[0]) < 1e-10
    assert relative_error(found.estimate.covariance, last[1]) < 1e-10


@pytest.mark.parametrize("prior", ["flat", "normal", "marginal"])
@pytest.mark.parametrize("method", ["fused", thorough("reference")])
def test_gradients_of_what_delta_enters(method, prior):
    y, model, columns = with_regressors(1)
    more = {"normal": {"precision": np.diag([1.0, 2, 3, 4]) + 0.5}, "marginal": {"marginal": True}}
    more = more.get(prior, {})
    found = diffuse.loglike_and_grad(y, model, **columns, **more, method=method)
    assert relative_error(found.value, diffuse.loglike(y, model, **columns, **more)) < 1e-12
    bars = {x: getattr(found, f"{x}_bar") for x in "AXB"} | found.gradients.asdict()

    def value(**moved):
        given = {x: moved.pop(x, M) for x, M in columns.items()}
        return diffuse.loglike(y, replace(model, **moved), **given, **more)

    assert_slopes(value, bars, columns | model.asdict(), 1e-10)
    if prior == "normal":
        h = 1e-6
        E = np.diag([1.0, 0, 0, 0])
        ends = [
            diffuse.loglike(y, model, **columns, precision=more["precision"] + s * E)
            for s in (h, -h)
        ]
        assert abs((ends[0] - ends[1]) / (2 * h) - found.precision_bar[0, 0]) < 1e-7


@pytest.mark.parametrize("method", ["fused", "reference"])
def test_the_marginal_likelihood_does_not_know_the_scale_of_the_columns(method):
    y, model, columns = with_regressors(2)
    C = np.random.default_rng(0).normal(size=(4, 4))
    other = {x: M @ C for x, M in columns.items()}
    value = diffuse.loglike(y, model, **columns, method=method, marginal=True)
    assert relative_error(
        diffuse.loglike(y, model, **other, method=method, marginal=True), value
    ) < 1e-11  # fmt: skip
    plain = diffuse.loglike(y, model, **columns, method=method)
    assert abs(diffuse.loglike(y, model, **other, method=method) - plain) > 0.1
    # A contrast of the data that delta does not reach: its density is the marginal likelihood.
    one = np.eye(1)
    walk = StateSpace([0.0], 0 * one, [0.0], [0.0], T=one, Z=one, R=one, H=2 * one, Q=3 * one)
    found = diffuse.loglike(np.array([[1.0], [4.0]]), walk, one, method=method, marginal=True)
    variance = 2 + 2 + 3
    # y2 - y1 over the root of 2, a unit vector orthogonal to (1, 1)
    expected = -(np.log(2 * np.pi * variance / 2) + (3**2 / 2) / (variance / 2)) / 2
    assert relative_error(found, expected) < 1e-12


def test_what_makes_no_difference_and_the_scale_of_the_columns():
    """P0 and a0 on diffuse states; A C lowers the likelihood by log |det C|."""
    y, model, A = several(1)
    value = diffuse.loglike(y, model, A)
    moved = [replace(model, P0=model.P0 + M * A @ A.T) for M in (0.01, 100.0)]
    moved.append(replace(model, a0=model.a0 + A @ [3.0, -5, 2]))
    for other in moved:
        assert relative_error(diffuse.loglike(y, other, A), value) < 1e-11
    C = np.random.default_rng(0).normal(size=(3, 3))
    lower = value - np.linalg.slogdet(C)[1]
    assert relative_error(diffuse.loglike(y, model, A @ C), lower) < 1e-11


def test_the_covariance_of_delta_beside_vague_states():
    """The first observations are all theirs, and what they say of delta is lost in rounding."""
    T, P0 = np.eye(3) + np.diag([1.0, 1.0], 1), np.diag([1e9, 0.0, 1e9])
    model = StateSpace(np.zeros(3), P0, np.zeros(3), [0.0], T=T, Z=np.ones((1, 3)), R=np.eye(3),
                       H=[[1.0]], Q=np.eye(3) / 10)  # fmt: skip
    y = np.random.default_rng(0).normal(size=(30, 1)).cumsum(axis=0)
    flat = diffuse.loglike_and_grad(y, replace(model, P0=0 * P0), np.eye(3))  # the limit
    for method in ("reference", "fused"):
        found = diffuse.loglike_and_grad(y, model, np.ones((3, 1)), method).estimate
        assert relative_error(found.covariance, flat.estimate.covariance[1:2, 1:2]) < 1e-6


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("prior", [False, True])
def test_gradients_where_only_the_first_observations_tell(prior, seed):
    """A random walk seen without error: what comes later says nothing about where it started."""
    I, rng = np.eye(2), np.random.default_rng(seed)  # noqa: E741
    Z, A, y = rng.normal(size=(1, 2)), rng.normal(size=(2, 1 + prior)), rng.normal(size=(20, 1))
    model = StateSpace(np.zeros(2), I, np.zeros(2), [0.0], T=I, Z=Z, R=I, H=[[0.0]], Q=I)
    precision = I if prior else None
    loop, compiled = (
        diffuse.loglike_and_grad(y, model, A, x, precision=precision)
        for x in ("reference", "fused")
    )
    assert relative_error(compiled.value, loop.value) < 1e-12
    for name in NAMES:
        G, expected = getattr(compiled.gradients, name), getattr(loop.gradients, name)
        assert np.abs(G - expected).max() < 1e-9 * (1 + np.abs(expected).max()), name
    assert np.abs(compiled.A_bar - loop.A_bar).max() < 1e-9


@pytest.mark.parametrize("seed", [80, 152, 309, 380])
def test_what_follows_the_columns_in_roots_begins_with_zeros(seed):
    """Where all other steps are a square-root start, which adds to what is there."""
    rng = np.random.default_rng(seed)
    m, p, q, n = (int(rng.integers(*ends)) for ends in ((1, 8), (1, 6), (1, 3), (2, 8)))
    vague = 10.0 ** rng.choice([0, 0, 6, 10])
    T, Z, A = (rng.normal(size=shape) for shape in ((m, m), (p, m), (m, q)))
    y, P0 = rng.normal(size=(n, p)), np.diag(vague * (rng.random(m) < 0.6) + 1)
    I = np.eye(m)  # noqa: E741
    model = StateSpace(np.zeros(m), P0, np.zeros(m), np.zeros(p), T=T, Z=Z, R=I, H=np.eye(p), Q=I)
    precision = np.eye(q) if seed % 2 else None
    calls = []
    for _ in range(4):
        found = diffuse.loglike_and_grad(y, model, A, precision=precision)
        arrays = found.dy, *found.gradients.asdict().values()
        calls.append(np.hstack([np.ravel(X) for X in arrays]))
        [np.full(k, np.nan) for k in range(1, 9) for _ in range(50)]  # what the next call may find
    assert all((x == calls[0]).all() for x in calls)
    loop = diffuse.loglike_and_grad(y, model, A, "reference", precision=precision)
    assert relative_error(calls[0][: y.size], loop.dy.ravel()) < 1e-4


def test_a_quarter_that_was_never_observed():
    y = series(False)
    y[2::4] = np.nan
    _, model, A = build("trend, season 4", y)
    with pytest.raises(ValueError, match=r"the data say nothing about one direction of delta, \("):
        diffuse.loglike(y[:, None], model, A)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"A": np.ones((3, 1))}, r"A has shape \(3, 1\), expected \(m, q\) = \(4, q\)"),
        ({"A": np.ones(4)}, r"A has shape \(4,\), expected"),
        ({"A": np.ones((4, 5))}, r"q from 1 to 4"),
        ({"A": np.full((4, 1), np.nan)}, "A is not finite"),
        ({"A": np.array([["a"]] * 4)}, "A is not an array of numbers"),
        ({"A": np.eye(4)[:, :2] * [1, 0]}, r"nothing about delta\[1\], a column of zeros"),
        ({"A": np.ones((4, 2))}, "nothing about one direction of delta"),
        ({}, "delta enters nowhere: give A, X or B"),
        (
            {"X": np.ones((3, 2))},
            r"X has shape \(3, 2\), expected \(p, q\) or \(n, p, q\) = \(2, q\)",
        ),
        ({"B": np.full((4, 1), np.inf)}, "B is not finite"),
        ({"A": np.eye(4)[:, :2], "X": np.ones((2, 1))}, "the columns differ in number: A has 2, X"),
        ({"X": np.ones((2, 2))}, "nothing about one direction of delta, .* regressors alone"),
        ({"A": np.eye(4), "precision": -np.eye(4)}, "precision is not positive definite"),
        ({"A": np.eye(4), "precision": np.eye(3)}, r"precision has shape \(3, 3\), expected"),
        ({"A": np.eye(4), "precision": np.eye(4), "marginal": True}, "is for a flat prior"),
        ({"A": np.eye(4), "precision": np.eye(4) + 1e-3 * np.eye(4, k=1)}, "is not symmetric"),
        ({"A": np.eye(4), "precision": np.full((4, 4), np.nan)}, "precision is not finite"),
        ({"A": np.eye(4), "precision": np.eye(4) + 0j}, "precision is complex, expected real"),
        ({"X": np.ma.masked_less(np.ones((2, 1)), 0)}, "X is a masked array, and its mask would"),
        ({"B": np.ma.masked_less(np.ones((4, 1)), 0)}, "B is a masked array, and its mask would"),
    ],
)
def test_bad_columns(columns, message):
    y, model, _ = several()
    with pytest.raises(ValueError, match=message):
        diffuse.loglike(y, model, **columns)


@pytest.mark.parametrize("which", ["y", "the model", "A"])
def test_gradients_are_of_real_arrays(which):
    y, model, A = several()
    if which == "y":
        y = y + 0j
    elif which == "A":
        A = A + 0j
    else:
        model = replace(model, c=model.c + 0j)
    with pytest.raises(ValueError, match=f"{which} is complex, expected real numbers"):
        diffuse.loglike_and_grad(y, model, A)
    with pytest.raises(ValueError, match="is complex, expected real numbers"):
        diffuse.hessian(y, model, A, {"c": np.eye(4)})


def test_a_precision_that_rounding_left_not_quite_symmetric():
    """The inverse of a covariance: entries that are zero but for rounding differ by all of it."""
    y, model, _ = several()
    covariance = 0.9 ** np.abs(np.subtract.outer(np.arange(4), np.arange(4)))
    precision = np.linalg.inv(covariance)
    precision[0, 3] += 1e-16  # as some libraries leave it
    half = (precision + precision.T) / 2
    found = diffuse.loglike(y, model, np.eye(4), precision=precision)
    assert found == diffuse.loglike(y, model, np.eye(4), precision=half)


@pytest.mark.parametrize(
    "mode",
    [*(thorough(x) for x in ("NUMBA", "py, rewritten")), "py"],
)
def test_columns_that_differ_in_number_are_refused_by_the_op(mode):
    """One regressor entered all three numbers where the shape of A is not known beforehand."""
    y, model, _ = several()
    mode = {"py": PLAIN, "py, rewritten": PYTHON}.get(mode, mode)
    A, arrays = pt.matrix("A"), model.asdict().values()
    for more in ({"X": np.ones((2, 1))}, {"B": np.ones((4, 1))}):
        value = kalman_diffuse_loglike(y, *arrays, A=A, **more)
        evaluate = pytensor.function([A], value, mode=mode)
        assert np.isfinite(evaluate(np.eye(4, 1)))
        with pytest.raises(ValueError, match="columns"):
            evaluate(np.eye(4, 3))


def test_all_missing():
    y, model, A = several()
    with pytest.raises(ValueError, match="nothing about delta"):
        diffuse.loglike(np.full_like(y, np.nan), model, A)


PYTHON = pytensor.compile.mode.Mode("py", "fast_run")
PLAIN = pytensor.compile.mode.Mode("py", "fast_compile")


THOROUGH = thorough("NUMBA", "normal")  # a minute of compilation


@pytest.mark.parametrize(
    ("mode", "prior"), [THOROUGH, (PYTHON, "flat"), (PYTHON, "normal"), ("JAX", "normal")]
)
def test_the_op(mode, prior):
    if mode == "JAX":
        pytest.importorskip("jax").config.update("jax_enable_x64", True)
    y, model, columns = with_regressors(3)
    precision = None if prior == "flat" else np.diag([1.0, 2, 3, 4])
    given = [y, *model.asdict().values(), *columns.values()]
    given += [] if precision is None else [precision]
    # JAX has to know every shape beforehand.
    shapes = [X.shape if mode == "JAX" else (None,) * X.ndim for X in given]
    wrt = [pt.tensor(dtype=float, shape=shape) for shape in shapes]
    value = kalman_diffuse_loglike(*wrt)
    evaluate = pytensor.function(wrt, [value, *pt.grad(value, wrt)], mode=mode)
    found = [np.asarray(G) for G in evaluate(*given)]
    expected = diffuse.loglike_and_grad(y, model, **columns, precision=precision)
    assert relative_error(found[0], expected.value) < 1e-12
    names = ("dy", *NAMES, "A_bar", "X_bar", "B_bar", "precision_bar")
    bars = expected._asdict() | expected.gradients.asdict()
    for x, G in zip(names, found[1:], strict=False):
        theirs = bars[x]
        assert np.abs(G - theirs).max() <= 1e-10 * max(1, np.abs(theirs).max()), x
    ops = [node.op for node in evaluate.maker.fgraph.toposort()]
    assert sum(isinstance(op, KalmanIntegrated) for op in ops) == 0  # the value comes along


def test_numba_calls_what_python_calls():
    """The two Ops alone: what PyTensor puts around them it compiles itself."""
    y, model, columns = with_regressors(3)
    given = [y, *model.asdict().values(), *columns.values(), np.diag([1.0, 2, 3, 4])]
    symbols = [pt.tensor(dtype=float, shape=(None,) * X.ndim) for X in given]
    value = kalman_diffuse_loglike(*symbols)
    nodes = (x.owner for x in ancestors([value]) if x.owner)
    node = next(node for node in nodes if isinstance(node.op, KalmanIntegrated))
    arrays = pytensor.function(symbols, node.inputs, mode=PYTHON)(*given)
    inputs = [x.type() for x in node.inputs]
    outputs = [*KalmanIntegrated()(*inputs), *diffuse_ops.KalmanIntegratedGrad()(*inputs)]
    found, expected = (
        pytensor.function(inputs, outputs, mode=mode)(*arrays) for mode in ("NUMBA", PYTHON)
    )
    for X, Y in zip(found, expected, strict=True):
        assert relative_error(X, Y) < 1e-12


def test_the_op_with_single_diffuse_states():
    y = series(True)[:, None]
    _, model, A = build("trend, season 4", y[:, 0])
    symbols = symbolic_model()
    value = kalman_diffuse_loglike(*symbols.values(), A=A)
    mean, covariance = kalman_diffuse_estimate(*symbols.values(), A=A)
    grads = pt.grad(value, [symbols["H"], symbols["Q"]])
    outputs = [value, *grads, mean, covariance]
    evaluate = pytensor.function(list(symbols.values()), outputs, mode=PYTHON)
    found = evaluate(y, *model.asdict().values())
    expected = diffuse.loglike_and_grad(y, model, A)
    theirs = [expected.value, expected.gradients.H, expected.gradients.Q, *expected.estimate]
    for ours, other in zip(found, theirs, strict=True):
        assert relative_error(ours, other) < 1e-11


@pytest.mark.parametrize(
    "more, says",
    [
        ({"A": np.ones((3, 1))}, r"A has shape \(3, 1\), expected \(m, q\) = \(4, q\)"),
        ({"A": np.eye(4)[0]}, "A has 1 dimensions, expected 2"),
        ({"A": np.eye(4), "X": np.ones((2, 3))},
         r"X has shape \(2, 3\), expected \(p, q\) = \(2, 4\)"),
        ({"X": np.ones((9, 2, 1))},
         r"X has shape \(9, 2, 1\), expected \(n, p, q\) = \(12, 2, q\)"),
        ({"X": np.ones((2, 1)), "B": np.ones((2, 1))},
         r"B has shape \(2, 1\), expected \(m, q\) = \(4, 1\)"),
        ({"A": np.eye(4), "precision": np.eye(3)},
         r"precision has shape \(3, 3\), expected \(q, q\) = \(4, 4\)"),
    ],
)  # fmt: skip
def test_the_op_names_the_argument_that_does_not_fit(more, says):
    y, model, _ = several()
    with pytest.raises(ValueError, match=says):
        kalman_diffuse_loglike(y, *model.asdict().values(), **more)


def test_the_op_takes_no_complex_columns():
    y, model, _ = several()
    with pytest.raises(TypeError, match="A, X complex, expected real arrays"):
        kalman_diffuse_loglike(
            y, *model.asdict().values(), A=1j * np.eye(4), X=np.ones((2, 4)) + 0j
        )


def test_the_op_where_the_data_leave_a_direction_open():
    y, model, _ = several()
    value = kalman_diffuse_loglike(y, *model.asdict().values(), A=np.ones((4, 2)))
    assert np.isnan(value.eval(mode=PYTHON))
    with pytest.raises(ValueError, match="delta enters nowhere"):
        kalman_diffuse_loglike(y, *model.asdict().values())
    with pytest.raises(ValueError, match=r"X has 1 dimensions, expected 2: \(p, q\) or with"):
        kalman_diffuse_loglike(y, *model.asdict().values(), X=np.ones(2))
    A = pt.as_tensor(np.eye(4))
    grad = pt.grad(kalman_diffuse_loglike(y, *model.asdict().values(), A=A), A)
    with pytest.raises(NotImplementedError, match="normal prior"):
        pt.grad(grad.sum(), A)


@pytest.mark.parametrize("method", ["fused", "reference"])
@pytest.mark.parametrize("names", [NAMES, ("H", "Q"), ("a0", "T")])
def test_hessian(names, method):
    """Of the value for complex arrays, by Cauchy's formula on a circle; and it is symmetric."""
    rng = np.random.default_rng(7)
    arrays = random_model(3, 2, rng=rng)
    y, _ = simulate(15, rng, **arrays)
    y[rng.random(y.shape) < 0.3] = np.nan
    model, A = StateSpace(**arrays), rng.normal(size=(3, 2))
    directions = {x: rng.normal(size=(3, *arrays[x].shape)) / 10 for x in names}
    for x in set(SYMMETRIC) & set(names):
        directions[x] = directions[x] + np.swapaxes(directions[x], 1, 2)
    found = diffuse.hessian(y, model, A, directions, method)
    circle = np.exp(2j * np.pi * np.arange(32) / 32)
    for v in np.eye(3)[[0, 1, 2, 0, 1, 2]] + np.eye(3)[[0, 1, 2, 1, 2, 0]]:
        values = [
            diffuse.loglike(
                y,
                replace(
                    model,
                    **{
                        x: arrays[x] + 0.1 * z * np.tensordot(v, X, 1)
                        for x, X in directions.items()
                    },
                ),
                A,
            )
            for z in circle
        ]
        expected = (2 * (values / circle**2).mean() / 0.1**2).real
        assert abs(v @ found @ v - expected) < 1e-9 * np.abs(found).max()


def test_a_hessian_along_nothing_is_refused():
    y, model, A = several()
    with pytest.raises(ValueError, match="directions is empty"):
        diffuse.hessian(y, model, A, {})


@pytest.mark.parametrize("how", ["NumPy", "the Op"])
def test_numbers_of_very_different_units(how):
    """The covariance of each, and not the rounding of that of the other one."""
    I, z = np.eye(2), np.zeros(2)  # noqa: E741
    H = np.diag([1e16, 1e-4])
    y = np.random.default_rng(0).normal(size=(5, 2)) * [1e8, 1e-2]
    given = (z, 0 * I, z, z, I, I, I, H, 0 * I)
    if how == "NumPy":
        covariance = diffuse.loglike_and_grad(y, StateSpace(*given), I).estimate.covariance
    else:
        covariance = diffuse_ops.kalman_diffuse_estimate(y, *given, A=I)[1].eval(mode=PYTHON)
    assert np.abs(np.diag(covariance) / np.diag(H) * 5 - 1).max() < 1e-12


def test_a_precision_that_is_none_gives_no_likelihood():
    one, zero = np.eye(1), np.zeros(1)
    y, model = np.array([[1.0], [np.nan], [3.0]]), (zero, 0 * one, zero, zero, *[one] * 5)
    for precision, finite in ((0.1, True), (-0.1, False), (0.0, False)):
        value = kalman_diffuse_loglike(y, *model, A=one, precision=precision * one)
        assert np.isfinite(value.eval(mode=PYTHON)) == finite


def test_an_intercept_that_is_not_a_number_is_no_gap():
    one, zero = np.eye(1), np.zeros(1)
    y, d = np.array([[1.0], [2.0], [3.0]]), np.array([[0.0], [np.nan], [0.0]])
    value = kalman_diffuse_loglike(y, zero, 0 * one, zero, d, *[one] * 5, A=one)
    assert not np.isfinite(value.eval(mode=PYTHON))
