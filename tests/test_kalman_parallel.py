"""All steps at once: the tree, and the filter's gradient by it."""

from functools import partial

import mpmath
import numpy as np
import pytest
from kalman_models import make, season
from tiers import thorough

from helpers.checks import relative_error
from helpers.datasets import random_model, simulate
from helpers.kalman import StateSpace, loglike_and_grad, reference
from helpers.statespace import NAMES

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from helpers.kalman import jax as package  # noqa: E402
from helpers.kalman.jax import _with_W, loglike, parallel, scans  # noqa: E402  # noqa: E402

ALL = ("y", *NAMES)
at_once = partial(loglike, method="parallel")


@pytest.fixture(autouse=True)
def float64():
    jax.config.update("jax_enable_x64", True)


@pytest.fixture(name="block")
def fixture_block(monkeypatch):
    """Sets the steps of a block: of short blocks a short series has a tree."""

    def set_to(steps):
        monkeypatch.setattr(parallel, "BLOCK", steps)
        jax.clear_caches()

    yield set_to
    jax.clear_caches()


def values_of(y, model):
    return [jnp.asarray(X) for X in (y, *model.asdict().values())]


@pytest.mark.parametrize("count", range(8))
def test_prefixes_of_the_tree_are_those_of_a_loop(count):
    maps = tuple(np.random.default_rng(count).standard_normal((2, count)))
    expected = [2.0]
    for slope, shift in zip(*maps, strict=True):
        expected.append(slope * expected[-1] + shift)
    (found,) = parallel.prefixes(
        lambda first, second: (second[0] * first[0], second[0] * first[1] + second[1]),
        lambda f, x: (f[0] * x[0] + f[1],),
        maps,
        (jnp.array(2.0),),
    )
    assert relative_error(found, expected) < 1e-14


def assert_gradient(y, model, weights, bound):
    def total(*arrays):
        return weights @ at_once(*arrays)

    value, found = jax.jit(jax.value_and_grad(total, argnums=range(10)))(*values_of(y, model))
    expected, dy, gradients = reference.loglike_and_grad(y, model, weights)
    assert abs(value - expected) < 1e-12 * np.abs(reference.kalman_filter(y, model).out.l).sum()
    for x, G, X in zip(ALL, found, [dy, *gradients.asdict().values()], strict=True):
        assert G.shape == X.shape and relative_error(G, X) < bound, x


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("time-varying with gaps", 2),
        *(thorough(x, 3) for x in ("gaps", "H = 0, singular P0 and Q", "only Z varies")),
        *(thorough(x, 8) for x in ("H = 0 with gaps", "near a unit root", "Nile")),
        *(thorough(x, 8) for x in ("more observed than states", "only c and d vary")),
    ],
)
def test_gradient_for_any_weights_is_that_of_the_pass(name, steps, block):
    block(steps)
    y, model = make(name)
    weights = np.random.default_rng(1).standard_normal(len(y))
    assert_gradient(y, model, weights, 1e-11 if name == "Nile" else 1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [(2, 3), (6, 2), (13, 1)])
def test_gradient_of_a_long_series(size):
    m, p = size
    rng = np.random.default_rng(m)
    model = season(12) if m == 13 else StateSpace(**random_model(m, p, rng=rng))
    y, _ = simulate(3001, rng, **model.asdict())
    y[rng.random(y.shape) < 0.1] = np.nan
    y[500:700] = np.nan
    # The sums of a season, whose roots lie on the unit circle, lose a digit.
    assert_gradient(y, model, np.ones(len(y)), 1e-10 if m == 13 else 1e-11)


@pytest.mark.thorough
@pytest.mark.parametrize("late", [0, 5])
def test_a_vague_start_costs_what_it_costs_the_scans(late):
    """The season has more states than a block has steps: some are vague where the tree begins."""
    model = season(12)
    y, _ = simulate(40, 0, **model.asdict())
    y[:late] = np.nan
    arrays = values_of(y, model)
    for kappa in (1e6, 1e9):
        arrays[2] = kappa * jnp.eye(13)
        expected = loglike_and_grad(y, StateSpace(*map(np.asarray, arrays[1:])))[2].T
        found = jax.grad(lambda *X: at_once(*X).sum(), argnums=5)(*arrays)
        assert relative_error(found, expected) < 100 * np.finfo(float).eps * kappa


def given(kappa=1e6):
    """P, vague in two directions of four, the information U of two steps, and (I + P U)^-1 P."""
    rng = np.random.default_rng(0)
    axes, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    P = axes @ np.diag([kappa, kappa, 1, 1]) @ axes.T
    z = rng.normal(size=(1, 4))
    Z = np.concatenate([z, z + 0.01 * rng.normal(size=(1, 4))])
    P, U = (P + P.T) / 2, Z.T @ Z
    with mpmath.workdps(50):
        known, seen = mpmath.matrix(P.tolist()), mpmath.matrix(U.tolist())
        G = (mpmath.eye(4) + known * seen) ** -1 * known
        return P, U, np.array(G.tolist(), float)


def test_a_vague_start_is_not_mixed_into_what_is_known():
    """A solution with I + P U rounded their covariance at the size of the vague variance."""
    P, U, G = given()
    variances, axes = np.linalg.eigh(G)
    error = axes.T @ (np.asarray(parallel._given(P, U)) - G) @ axes
    assert abs(error[0, -1]) < 1e-11 * np.sqrt(variances[0] * variances[-1])


def test_a_start_given_a_block_is_differentiated_and_needs_no_root():
    P, U, _ = given(kappa=10.0)
    dP, dU = np.random.default_rng(1).normal(size=(2, 4, 4))
    moves = dP + dP.T, dU + dU.T

    def solved(P, U):
        return jnp.linalg.solve(jnp.eye(len(P)) + P @ U, P)

    for found, expected in zip(
        *(jax.jvp(f, (P, U), moves) for f in (parallel._given, solved)), strict=True
    ):
        assert relative_error(found, expected) < 1e-12
    for rounding in (np.zeros((2, 2)), 1e-17 * np.array([[1.0, 2.0], [2.0, 1.0]])):
        assert np.allclose(parallel._given(rounding, np.eye(2)), rounding, rtol=1e-9, atol=1e-30)


def errors(y, model, dtype, method):
    """Of value and gradients, against the readable loop in float64 on the same arrays."""
    arrays = [X.astype(dtype) for X in values_of(y, model)]
    y, *model = (np.asarray(X, float) for X in arrays)
    value, dy, bars = reference.loglike_and_grad(y, StateSpace(*model))
    f = jax.jit(jax.value_and_grad(lambda *X: loglike(*X, method=method).sum(), range(10)))
    l, found = f(*arrays)
    expected = [dy, *bars.asdict().values()]
    lost = max(relative_error(np.asarray(G), X) for G, X in zip(found, expected, strict=True))
    return abs(float(l) / value - 1), lost


def four_states(model="trend and cycle", kappa=10.0):
    T, Z, Q = np.eye(4), [[1.0, 0.0, 1.0, 0.0]], [0.1, 0.001, 0.2, 0.2]
    T[0, 1] = 1
    T[2:, 2:] = 0.95 * np.array([[np.cos(0.5), np.sin(0.5)], [-np.sin(0.5), np.cos(0.5)]])
    if model == "hardly told apart":
        T = 0.999 * np.eye(4)
        T[0, 1], Z, Q = 1, [[1.0, 0.3, 0.2, 0.1]], [0.01, 0.0001, 0.02, 0.03]
    z, one = np.zeros(4), np.eye(4)
    model = StateSpace(z, kappa * one, z, [0.0], T=T, Z=Z, R=one, H=[[1.0]], Q=np.diag(Q))
    return simulate(400, 1, **(model.asdict() | {"P0": one}))[0], model


@pytest.mark.thorough
@pytest.mark.parametrize("kappa", [1e4, 1e6])
def test_a_vague_start_of_states_that_the_data_hardly_tell_apart(kappa):
    y, model = four_states("hardly told apart", kappa)
    (value, lost), (by_scan, theirs) = (
        errors(y, model, float, method) for method in ("parallel", "scan")
    )
    assert value < 10 * by_scan and lost < 100 * theirs


@pytest.mark.thorough
def test_float32_has_the_digits_of_a_scan_or_one_fewer():
    y, model = four_states()
    (value, lost), (by_scan, theirs) = (
        errors(y, model, np.float32, method) for method in ("parallel", "scan")
    )
    assert value < 10 * by_scan and lost < 30 * theirs and lost < 1e-2


def singular(value):
    """A trend whose level has no shock of its own, seen without error, or with this variance."""
    T, zero = np.array([[1.0, 1.0], [0.0, 1.0]]), np.zeros(2)
    R, Z = np.array([[0.3], [0.1]]), np.array([[1.0, -3.0]])
    return StateSpace(zero, np.eye(2), zero, [0.0], T=T, Z=Z, R=R, H=[[value]], Q=[[1.0]])


def test_an_element_without_a_density_is_refused_and_scans_take_it():
    y = np.random.default_rng(0).standard_normal((20, 1))
    arrays = values_of(y, singular(0.0))
    with pytest.raises(
        ValueError, match=r"not positive definite on what is observed.*take method=\"scan\""
    ):
        at_once(*arrays)
    l, slope = jax.jit(jax.value_and_grad(lambda *X: at_once(*X).sum(), argnums=5))(*arrays)
    assert jnp.isnan(l) and jnp.isnan(slope).any()
    expected = reference.loglike(y, singular(0.0))
    assert abs(loglike(*arrays, method="scan").sum() - expected) < 1e-11 * abs(expected)
    seen_with_error = singular(1e-6)
    l = at_once(*values_of(y, seen_with_error)).sum()
    assert abs(l - reference.loglike(y, seen_with_error)) < 1e-9 * abs(l)


def test_who_takes_all_steps_at_once(monkeypatch):
    """Elsewhere than on a CPU a long series, and nobody who asks for something else."""
    taken = []
    monkeypatch.setattr(scans, "loglike", lambda *X: (taken.append("scan") or X[0][:, 0],))
    monkeypatch.setattr(parallel, "loglike", lambda *X: taken.append("parallel") or X[0][:, 0])
    _, model = make("one of each")
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        for n in (package.LONG - 1, package.LONG):
            for method in package.METHODS:
                before = len(taken)
                y = jnp.zeros((n, 1))
                jax.make_jaxpr(partial(loglike, method=method))(*values_of(y, model))
                engine = taken[-1] if len(taken) > before else "fused"
                expected = method
                if backend == "gpu" and method in (None, "fused"):
                    long = method is None and n == package.LONG
                    expected = "parallel" if long else "scan"
                assert engine == (expected or "fused"), (backend, n, method)


def test_float32_is_not_multiplied_with_fewer_digits():
    y, model = make("two shocks")
    arrays = [X.astype(jnp.float32) for X in values_of(y, model)]
    gradient = jax.grad(lambda *X: parallel.loglike(*X)[0].sum(), argnums=range(9))
    text = str(jax.make_jaxpr(gradient)(*_with_W(*arrays)))
    assert text.count("dot_general[") == text.count("(Precision.HIGHEST, Precision.HIGHEST)") > 20
