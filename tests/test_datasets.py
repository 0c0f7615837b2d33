"""Known values of the real series; the made ones against their own definition."""

import numpy as np
import pytest
import statsmodels.api as sm
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.datasets import (
    co2,
    local_level_arrays,
    macro,
    nile,
    random_model,
    seasonal_arrays,
    simulate,
    structural_example,
)

NAMES = ["a0", "P0", "c", "d", "T", "Z", "R", "H", "Q"]


def shapes(m, p, r):
    return dict(
        zip(NAMES, [(m,), (m, m), (m,), (p,), (m, m), (p, m), (m, r), (p, p), (r, r)], strict=True)
    )


@pytest.mark.parametrize(
    ("load", "n", "p", "first_day", "last_day", "step"),
    [
        (nile, 100, 1, "1871-01-01", "1970-01-01", "Y"),
        (macro, 202, 3, "1959-04-01", "2009-07-01", "M"),
        (co2, 526, 1, "1958-03-01", "2001-12-01", "M"),
    ],
)
def test_series_are_well_formed(load, n, p, first_day, last_day, step):
    series = load()
    assert series.y.shape == (n, p)
    assert series.y.dtype == np.float64
    assert len(series.names) == len(series.units) == p
    assert series.source
    assert series.y.flags.writeable and series.index.flags.writeable
    assert series.index.dtype == np.dtype("datetime64[D]")
    assert series.index[[0, -1]].astype(str).tolist() == [first_day, last_day]
    steps = np.diff(series.index.astype(f"datetime64[{step}]")).astype(int)
    assert len(steps) == n - 1
    assert np.all(steps == {nile: 1, macro: 3, co2: 1}[load])


def test_nile():
    series = nile()
    assert series.y[[0, 1, -1], 0].tolist() == [1120.0, 1160.0, 740.0]
    assert series.y.mean() == pytest.approx(919.35)
    assert series.units == ("10^8 m^3",)
    series.y[0] = 0.0  # a reader's change stays the reader's
    assert nile().y[0, 0] == 1120.0


def test_macro():
    series = macro()
    np.testing.assert_allclose(series.y[0, 0], 100 * np.log(2778.801 / 2710.349))
    assert series.names == ("GDP", "consumption", "investment")
    assert not np.isnan(series.y).any()
    assert series.y[:, 2].std() > 3 * series.y[:, 1].std()  # investment is the volatile one


def test_co2():
    series = co2()
    assert series.y[0, 0] == pytest.approx(316.1)
    assert series.y[-1, 0] == pytest.approx(371.02)
    assert series.y[1, 0] == pytest.approx((317.3 + 317.6 + 317.5 + 316.4) / 4)
    gaps = series.index[np.isnan(series.y[:, 0])].astype("datetime64[M]").astype(str)
    assert gaps.tolist() == ["1958-06", "1958-10", "1964-02", "1964-03", "1964-04"]


def test_local_level():
    model = local_level_arrays()
    assert list(model) == NAMES
    assert {name: array.shape for name, array in model.items()} == shapes(1, 1, 1)
    values = {name: array.item() for name, array in model.items()}
    assert (values["H"], values["Q"], values["P0"], values["a0"]) == (15099.0, 1469.1, 1e7, 0.0)
    assert (values["T"], values["Z"], values["R"], values["c"], values["d"]) == (1, 1, 1, 0, 0)
    assert local_level_arrays(a0=1120.0)["a0"].tolist() == [1120.0]
    with pytest.raises(ValueError, match="sigma_eta2 is a variance, it cannot be -1"):
        local_level_arrays(sigma_eta2=-1)


@pytest.mark.parametrize("period", [2, 4, 12])
def test_seasonal_arrays_are_those_of_statsmodels(period):
    variances = [0.5, 0.1, 0.01, 0.05]
    model = sm.tsa.UnobservedComponents(np.zeros(30), "lltrend", seasonal=period)
    model.update(np.array(variances))
    ours = seasonal_arrays(variances, period, level=3.0, P0=2.0)
    theirs = {"T": "transition", "Z": "design", "R": "selection", "H": "obs_cov", "Q": "state_cov"}
    for name, of_statsmodels in theirs.items():
        np.testing.assert_array_equal(ours[name], model.ssm[of_statsmodels], name)
    np.testing.assert_array_equal(ours["a0"], [3.0] + [0.0] * period)
    np.testing.assert_array_equal(ours["P0"], 2.0 * np.eye(period + 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 1}, "period is 1, expected 2 seasons or more"),
        ({"variances": [1.0, 1.0]}, r"variances has shape \(2,\), expected \(4,\): noise"),
    ],
)
def test_seasonal_arrays_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        seasonal_arrays(**options)


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(1, 6),
    p=st.integers(1, 7),
    r=st.integers(1, 7),
    radius=st.floats(0.1, 1.2),
    seed=st.integers(0, 2**32),
)
def test_random_model(m, p, r, radius, seed):
    model = random_model(m, p, r, rng=seed, radius=radius)
    assert list(model) == NAMES
    assert {name: array.shape for name, array in model.items()} == shapes(m, p, r)
    assert np.abs(np.linalg.eigvals(model["T"])).max() == pytest.approx(radius)
    for name in ("P0", "H", "Q"):
        assert np.array_equal(model[name], model[name].T)
        eigenvalues = np.linalg.eigvalsh(model[name])
        assert eigenvalues.min() > 0.5 - 1e-9
        assert eigenvalues.max() < 2 + 1e-9
    assert all(a.dtype == np.float64 and a.flags.c_contiguous for a in model.values())


def test_random_model_repeats_with_its_seed():
    one, same, other = (random_model(3, rng=seed) for seed in (5, np.random.default_rng(5), 6))
    assert all(np.array_equal(one[name], same[name]) for name in NAMES)
    assert not np.array_equal(one["T"], other["T"])
    assert one["R"].shape == (3, 3)


def test_random_model_time_varying():
    varying = ("c", "d", "T", "Z", "R", "H", "Q")
    model = random_model(3, 2, 2, rng=0, time_varying=varying, n=7, radius=0.8)
    for name, shape in shapes(3, 2, 2).items():
        assert model[name].shape == ((7, *shape) if name in varying else shape)
    for name in varying:
        assert not np.array_equal(model[name][0], model[name][1])
    np.testing.assert_allclose(np.abs(np.linalg.eigvals(model["T"])).max(axis=1), 0.8)
    assert random_model(2, rng=0, time_varying="T", n=4)["T"].shape == (4, 2, 2)


def test_random_model_singular():
    model = random_model(4, 2, 3, rng=0, H_zero=True, singular_P0=True, singular_Q=True)
    assert not model["H"].any()
    for name, rank in (("P0", 3), ("Q", 2)):
        eigenvalues = np.linalg.eigvalsh(model[name])
        assert np.abs(eigenvalues[0]) < 1e-12
        assert np.sum(eigenvalues > 0.4) == rank


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"m": 0}, "m is 0, expected a positive integer"),
        ({"m": 2.5}, "m is 2.5, expected"),
        ({"m": 2, "p": -1}, "p is -1"),
        ({"m": 2, "r": 0}, "r is 0"),
        ({"m": 2, "radius": 0.0}, "radius is 0.0"),
        ({"m": 2, "radius": np.nan}, "radius is nan"),
        ({"m": 2, "time_varying": ("T",)}, "n is None, expected"),
        ({"m": 2, "time_varying": ("P0", "T"), "n": 3}, r"\['P0'\] cannot vary"),
        ({"m": 2, "time_varying": "HQ", "n": 3}, r"\['HQ'\] cannot vary"),
        ({"m": 2, "p": 3, "H_zero": True}, "the p = 3 series need .* have rank 2 and 2"),
        ({"m": 1, "H_zero": True, "singular_P0": True}, "have rank 0 and 1"),
        ({"m": 3, "p": 2, "r": 2, "H_zero": True, "singular_Q": True}, "have rank 3 and 1"),
    ],
)
def test_random_model_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        random_model(**options)


def test_without_noise_simulation_is_the_recursion():
    model = random_model(3, 2, rng=0, time_varying=("c", "d", "T", "Z"), n=6)
    for name in ("P0", "H", "Q"):
        model[name] = np.zeros_like(model[name])
    y, states = simulate(6, 0, **model)
    alpha = model["a0"]
    for t in range(6):
        np.testing.assert_allclose(states[t], alpha)
        np.testing.assert_allclose(y[t], model["Z"][t] @ alpha + model["d"][t])
        alpha = model["T"][t] @ alpha + model["c"][t]


def test_noise_has_the_moments_of_the_model():
    n = 40_000
    model = random_model(3, 2, 2, rng=1, singular_Q=True)
    y, states = simulate(n, 2, **model)
    eps = y - states @ model["Z"].T - model["d"]
    push = states[1:] - states[:-1] @ model["T"].T - model["c"]
    expected = {"H": model["H"], "W": model["R"] @ model["Q"] @ model["R"].T}
    for name, noise in (("H", eps), ("W", push)):
        sd = np.sqrt(np.diag(expected[name]))
        assert np.all(np.abs(noise.mean(axis=0)) < 5 * sd / np.sqrt(n))
        # the standard error of a sample covariance is at most sqrt(2 / n) sd sd'
        error = np.abs(noise.T @ noise / n - expected[name])
        assert np.all(error < 5 * np.sqrt(2 / n) * np.outer(sd, sd))
    assert np.linalg.matrix_rank(push, tol=1e-8) == 1  # singular noise stays in its subspace
    lagged = eps[1:].T @ eps[:-1] / n
    assert np.all(np.abs(lagged) < 5 / np.sqrt(n) * model["H"].max())


def test_first_state_has_the_moments_of_the_model():
    draws, rng = 4000, np.random.default_rng(3)
    model = random_model(2, rng=4, singular_P0=True)
    first = np.array([simulate(1, rng, **model)[1][0] for _ in range(draws)])
    deviation = first - model["a0"]
    sd = np.sqrt(np.diag(model["P0"]))
    assert np.all(np.abs(deviation.mean(axis=0)) < 5 * sd / np.sqrt(draws))
    error = np.abs(deviation.T @ deviation / draws - model["P0"])
    assert np.all(error < 5 * np.sqrt(2 / draws) * np.outer(sd, sd))


def test_time_varying_noise_takes_its_own_step():
    model = random_model(2, 1, 1, rng=0, time_varying=("R", "H", "Q"), n=5)
    model["H"][[0, 1, 3, 4]] = 0.0
    model["Q"][[0, 2, 3]] = 0.0
    y, states = simulate(5, 0, **model)
    eps = y - states @ model["Z"].T - model["d"]
    push = states[1:] - states[:-1] @ model["T"].T - model["c"]
    assert (np.abs(eps[:, 0]) > 1e-9).tolist() == [False, False, True, False, False]
    assert (np.abs(push).max(axis=1) > 1e-9).tolist() == [False, True, False, False]
    np.testing.assert_allclose(push[1, 0] / push[1, 1], model["R"][1, 0, 0] / model["R"][1, 1, 0])


def test_simulation_repeats_with_its_seed():
    model = local_level_arrays()
    one, same, other = (simulate(9, seed, **model)[0] for seed in (1, np.random.default_rng(1), 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Z": np.ones((2, 3))}, r"Z has shape \(2, 3\), expected \(p, m\) = \(1, 2\)"),
        ({"c": np.ones(3)}, r"c has shape \(3,\), expected \(m,\) = \(2,\)"),
        ({"T": np.ones((3, 2, 2))}, "T has 3 steps, expected n = 4"),
        ({"P0": np.ones((4, 2, 2))}, r"P0 has shape \(4, 2, 2\)"),
        ({"H": -np.eye(1)}, "H is not a covariance matrix: it has an eigenvalue -1"),
        ({"P0": np.array([[1.0, 0.5], [0.0, 1.0]])}, r"P0 is not symmetric: 0.5 at \(0, 1\), 0"),
        ({"a0": np.float64(1.0)}, r"a0 has shape \(\), expected \(m,\)"),
        ({"Q": np.float64(1.0)}, r"Q has shape \(\), expected \(r, r\) = \(2, 2\)"),
    ],
)
def test_simulate_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        simulate(4, 0, **random_model(2, rng=0) | change)


def test_simulate_refuses_no_steps():
    with pytest.raises(ValueError, match="n is 0, expected a positive integer"):
        simulate(0, 0, **local_level_arrays())


def test_structural_example():
    model, y, states = structural_example(n=100, seed=1)
    assert list(model) == NAMES
    for name in NAMES:
        assert model[name].dtype == np.float64
    assert (y.shape, states.shape) == ((100, 1), (100, 3))
    np.testing.assert_allclose(states[0], [10, 0.1, 0])
    assert np.abs(y - states @ model["Z"].T).max() < 0.05  # five standard deviations
    assert np.array_equal(y, structural_example(n=100, seed=1)[1])
    assert structural_example(n=7, seed=2)[1].shape == (7, 1)
