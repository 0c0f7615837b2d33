"""Three derivations of one gradient, held to each other and to what is independent of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kalman_models import NAMES_OF_CASES, VARYING, make
from kalman_oracle import law_of_data
from scipy.stats import multivariate_normal
from tiers import thorough

from helpers.checks import complex_step, relative_error
from helpers.datasets import random_model, simulate
from helpers.kalman import StateSpace
from helpers.kalman.reference import (
    FilterOutputs,
    forward_sensitivities,
    kalman_filter,
    loglike,
    loglike_and_grad,
    reverse,
    sensitivity_gradient,
)
from helpers.statespace import NAMES, SYMMETRIC


def by_complex_step(y, model, scalar):
    """Gradients of scalar(y, model) with respect to y and each array, by name."""
    filled = np.where(np.isnan(y), 0, y)
    gradients = {"y": complex_step(lambda x: scalar(np.where(np.isnan(y), y, x), model), filled)}
    for name in NAMES:
        gradients[name] = complex_step(
            lambda X, name=name: scalar(y, replace(model, **{name: X})),
            getattr(model, name),
            symmetric=name in SYMMETRIC,
        )
    return gradients


def assert_same(dy, gradients, reference, rtol=1e-10):
    for name, G in {"y": dy, **gradients.asdict()}.items():
        error = relative_error(G, reference[name])
        assert error <= rtol, f"{name}: {error:.1e}"


def weighted(weights):
    def scalar(y, model):
        out = kalman_filter(y, model).out
        return sum((w * X).sum() for w, X in zip(weights, out, strict=True))

    return scalar


@pytest.mark.parametrize("case", [thorough(x) if x == "long" else x for x in NAMES_OF_CASES])
def test_three_forms_and_complex_step(case):
    y, model = make(case)
    truth = by_complex_step(y, model, loglike)
    value, dy, smoother = loglike_and_grad(y, model)
    assert value == loglike(y, model)
    assert_same(dy, smoother, truth)

    filtered = kalman_filter(y, model)
    dy, reversed_ = reverse(model, filtered, FilterOutputs(l=np.ones(len(y))))
    assert_same(dy, reversed_, truth)

    _, dy, forward = sensitivity_gradient(y, model)
    assert_same(dy, forward, truth)


@pytest.mark.parametrize("case", NAMES_OF_CASES)
def test_reverse_takes_cotangents_on_every_output(case):
    y, model = make(case)
    y, rng = y[:40], np.random.default_rng(1)
    filtered = kalman_filter(y, model)
    bar = FilterOutputs(*(rng.standard_normal(X.shape) for X in filtered.out))
    dy, gradients = reverse(model, filtered, bar)
    assert_same(dy, gradients, by_complex_step(y, model, weighted(bar)))


@pytest.mark.parametrize("output", FilterOutputs._fields)
def test_each_output_alone(output):
    y, model = make("gaps")
    filtered = kalman_filter(y, model)
    zeros = {name: np.zeros_like(X) for name, X in filtered.out._asdict().items()}
    w = np.random.default_rng(2).standard_normal(zeros[output].shape)
    dy, gradients = reverse(model, filtered, FilterOutputs(**{output: w}))
    truth = by_complex_step(y, model, weighted(FilterOutputs(**zeros | {output: w})))
    for name, G in {"y": dy, **gradients.asdict()}.items():
        scale = max(1.0, np.abs(truth[name]).max())
        assert np.abs(G - truth[name]).max() <= 1e-12 * scale, name


def test_gradients_of_covariances_are_symmetric_and_gaps_have_none():
    y, model = make("gaps")
    _, dy, gradients = loglike_and_grad(y, model)
    for name in SYMMETRIC:
        G = getattr(gradients, name)
        assert np.array_equal(G, G.T), name
    assert np.all(dy[np.isnan(y)] == 0)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**20),
    m=st.integers(1, 4),
    p=st.integers(1, 3),
    r=st.integers(1, 3),
    n=st.integers(1, 10),
    varying=st.sets(st.sampled_from(VARYING)),
    missing=st.sampled_from([0.0, 0.3, 1.0]),
    singular=st.booleans(),
)
def test_random_models(seed, m, p, r, n, varying, missing, singular):
    rng = np.random.default_rng(seed)
    arrays = random_model(
        m, p, r, rng, n=n, time_varying=varying, singular_P0=singular, singular_Q=singular
    )
    y, _ = simulate(n, rng, **arrays)
    y[rng.random(y.shape) < missing] = np.nan
    model = StateSpace(**arrays)
    filtered = kalman_filter(y, model)
    forms = [
        loglike_and_grad(y, model)[1:],
        reverse(model, filtered, FilterOutputs(l=np.ones(n))),
        sensitivity_gradient(y, model)[1:],
    ]
    for name in ("y", *NAMES):
        first, *others = (dy if name == "y" else getattr(G, name) for dy, G in forms)
        scale = max(1.0, np.abs(first).max())  # a gradient may be zero, up to rounding
        for other in others:
            assert np.abs(other - first).max() <= 1e-10 * scale, name


def test_likelihood_is_the_density_of_the_whole_series():
    """No filter: the mean and covariance of all observations at once, missing ones left out."""
    y, model = make("time-varying with gaps")
    seen = ~np.isnan(y).ravel()
    over_time = (model.over_time(name, len(y)) for name in NAMES[2:])
    mean, cov = law_of_data(len(y), model.a0, model.P0, *over_time)
    truth = multivariate_normal(mean[seen], cov[np.ix_(seen, seen)]).logpdf(y.ravel()[seen])
    assert loglike(y, model) == pytest.approx(truth, rel=1e-12)


def test_likelihood_and_score_of_statsmodels_on_the_nile():
    from statsmodels.tsa.statespace.structural import UnobservedComponents

    y, model = make("Nile")
    peer = UnobservedComponents(y[:, 0], "llevel", loglikelihood_burn=0)
    peer.initialize_known(model.a0, model.P0)
    variances = np.array([model.H[0, 0], model.Q[0, 0]])
    assert loglike(y, model) == pytest.approx(peer.loglike(variances), rel=1e-12)
    _, _, gradients = loglike_and_grad(y, model)
    score = peer.score(variances)
    mine = np.array([gradients.H[0, 0], gradients.Q[0, 0]])
    assert relative_error(mine, score) < 1e-7


def test_single_precision_stays_single():
    y, model = make("gaps")
    single = StateSpace(**{k: X.astype("float32") for k, X in model.asdict().items()})
    _, dy, gradients = loglike_and_grad(y.astype("float32"), single)
    _, dy64, gradients64 = loglike_and_grad(y, model)
    assert dy.dtype == gradients.T.dtype == np.float32
    assert relative_error(gradients.T, gradients64.T) < 1e-4
    assert relative_error(dy, dy64) < 1e-4
    vague = replace(single, P0=1e7 * np.eye(model.m, dtype="float32"))  # steps in roots
    for weights in (None, np.ones(len(y), np.float32)):
        _, dy, gradients = loglike_and_grad(y.astype("float32"), vague, weights)
        assert {dy.dtype, *(X.dtype for X in gradients)} == {np.dtype("float32")}


def test_a_data_frame_is_an_array():
    frame = pytest.importorskip("pandas").DataFrame
    y, model = make("gaps")
    value, dy, gradients = loglike_and_grad(frame(y), model)
    expected = loglike_and_grad(y, model)
    assert value == expected[0] and np.array_equal(dy, expected[1])
    assert all(map(np.array_equal, gradients, expected[2]))


@pytest.mark.parametrize("name", SYMMETRIC)
def test_a_direction_of_a_covariance_counts_by_its_symmetric_part(name):
    """One entry above the diagonal, which a covariance cannot move along by itself."""
    y, model = make("gaps")
    one = np.zeros((1, *getattr(model, name).shape))
    one[0, 0, -1] = 1.0
    _, found = forward_sensitivities(y, model, {name: one})
    gradient = getattr(loglike_and_grad(y, model)[2], name)
    assert found[0] == pytest.approx(gradient[0, -1], rel=1e-10)


def test_wrong_cotangents_and_directions():
    y, model = make("gaps")
    filtered = kalman_filter(y, model)
    with pytest.raises(ValueError, match=r"cotangent of l has shape \(3,\), expected \(20,\)"):
        reverse(model, filtered, FilterOutputs(l=np.ones(3)))
    with pytest.raises(ValueError, match="no array is called 'W'"):
        forward_sensitivities(y, model, {"W": np.zeros((1, 3, 3))})
    with pytest.raises(ValueError, match=r"directions of T have shape \(3, 3\), expected"):
        forward_sensitivities(y, model, {"T": np.zeros((3, 3))})
