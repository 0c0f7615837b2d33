"""helpers.kalman.panel_fit: many maximum likelihood fits at once, against one after the other."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize

from helpers.checks import complex_step, relative_error
from helpers.kalman import StateSpace, panel_fit, reference
from helpers.kalman.panel_fit import fit

ONE = np.eye(1)
WALK = StateSpace([0.0], 10 * ONE, [0.0], [0.0], T=ONE, Z=ONE, R=ONE, H=ONE, Q=ONE)


def local_level(theta):
    """Variances of the noise and of the level."""
    variances = np.exp(theta)[:, :, np.newaxis, np.newaxis]
    return {"H": variances[:, 0], "Q": variances[:, 1]}


def autoregression(theta):
    """A root, a variance and a mean: T, R Q R', c, d."""
    root = np.tanh(theta[:, 0])[:, np.newaxis, np.newaxis]
    return {"T": root, "Q": np.exp(theta[:, 1])[:, None, None], "d": theta[:, 2:]}


def levels(J, n=40, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.uniform(0.3, 2, (J, 1))
    Y = np.cumsum(sizes * rng.normal(size=(J, n)), axis=1) + rng.normal(size=(J, n))
    Y[::3, 5:8] = np.nan
    return Y[:, :, np.newaxis]


def one_by_one(y, model, arrays, start):
    """The maximum of one series: SciPy over the readable reference."""

    def down(theta):
        own = {name: X[0] for name, X in arrays(np.asarray(theta)[np.newaxis]).items()}
        return -reference.loglike(y, StateSpace(**(model.asdict() | own)))

    def slope(theta):
        return complex_step(down, theta)

    return minimize(down, start, jac=slope, method="BFGS", options={"gtol": 1e-7})


@pytest.mark.parametrize("arrays", [local_level, autoregression])
def test_the_maxima_are_those_of_one_fit_after_the_other(arrays):
    Y = levels(11)
    start = [0.0, 0.0, 0.5][: 2 if arrays is local_level else 3]
    fits = fit(Y, WALK, arrays, start)
    assert fits.converged.all() and not fits.failed
    for j in (0, 1, 4, 10):
        alone = one_by_one(Y[j], WALK, arrays, start)
        assert abs(fits.value[j] + alone.fun) < 1e-6
        inside = np.abs(alone.x) < 5  # else a variance is zero and the maximum flat
        assert np.abs(fits.params[j] - alone.x)[inside].max(initial=0) < 1e-3


def test_the_slope_is_the_complex_step_of_the_reference():
    """The chain through `arrays`, and a slope that does not belong to the series beside it."""
    Y, theta = levels(5), np.random.default_rng(1).normal(size=(5, 3))
    f, g, _ = panel_fit._Likelihood(Y, WALK, autoregression, 0.0, 1)(theta, np.arange(5))
    for j in range(5):

        def down(x, j=j):
            own = {name: X[0] for name, X in autoregression(x[np.newaxis]).items()}
            return -reference.loglike(Y[j], StateSpace(**(WALK.asdict() | own)))

        assert abs(f[j] / down(theta[j]) - 1) < 1e-12
        assert relative_error(g[j], complex_step(down, theta[j])) < 1e-10


def test_series_that_fail_are_reported_and_the_others_fitted():
    Y = levels(9)
    good = fit(Y, WALK, local_level, [0.0, 0.0])
    Y[2], Y[5, 3] = np.nan, np.inf
    start = np.zeros((9, 2))
    start[7] = -800  # no variance at all: F is zero after the first step
    fits = fit(Y, WALK, local_level, start)
    assert fits.failed.keys() == {2, 5, 7}
    assert "no observation" in fits.failed[2] and "infinite" in fits.failed[5]
    assert "F is not positive definite at step 1" in fits.failed[7]
    others = [0, 1, 3, 4, 6, 8]
    assert np.array_equal(fits.params[others], good.params[others])
    few = fit(Y[:1], WALK, local_level, [0.0, 0.0], most=2)
    assert few.failed == {0: "not converged after 2 rounds"}


def test_lists_of_different_lengths():
    Y = levels(6)
    Y[1, 25:] = np.nan
    fits = fit([Y[0], Y[1, :25], *Y[2:]], WALK, local_level, [0.0, 0.0])
    assert np.array_equal(fits.value, fit(Y, WALK, local_level, [0.0, 0.0]).value)


@pytest.mark.parametrize(
    ("arrays", "start", "message"),
    [
        (local_level, np.zeros((3, 2)), r"start has shape \(3, 2\), expected \(k,\) or \(J, k\)"),
        (local_level, [0.0, np.nan], "start is not finite and real"),
        (local_level, ["a"], "start is not an array of numbers"),
        (lambda theta: theta, [0.0], "expected a dict of arrays of the model"),
        (lambda theta: {"X": theta}, [0.0], "'X' is none of the arrays of a model"),
        (lambda theta: {"H": theta}, [0.0], r"H has shape \(4, 1\), expected one for each series"),
        (
            lambda theta: {"H": np.exp(theta.real)[:, :, None]},
            [0.0],
            "real where theta is complex",
        ),
    ],
)
def test_what_is_refused(arrays, start, message):
    with pytest.raises(ValueError, match=message):
        fit(levels(4), WALK, arrays, start)


@pytest.mark.parametrize("most", [-1, 2.5, None])
def test_a_number_of_rounds_that_is_none(most):
    with pytest.raises(ValueError, match=f"most is {most}, expected a number of rounds"):
        fit(np.zeros((1, 5, 1)), WALK, local_level, [0.0, 0.0], most=most)


@pytest.mark.parametrize("tol", [-1, np.inf, "small"])
def test_a_tolerance_that_is_none(tol):
    with pytest.raises(ValueError, match=f"tol is {tol!r}, expected a finite number"):
        fit(np.zeros((1, 5, 1)), WALK, local_level, [0.0, 0.0], tol=tol)


def test_a_model_of_another_length_is_refused():
    """Before compiled code reads and writes what is not there."""
    model = replace(WALK, c=np.zeros((5, 1)))
    for n in (4, 40):
        with pytest.raises(ValueError, match=f"Y has {n} steps, but c has 5"):
            fit(levels(2)[:, :n], model, lambda theta: {"H": np.exp(theta)[:, :, None]}, [0.0])


def test_arrays_of_another_shape_later_are_refused():
    def rows(theta):  # as many as there are series, not as theta has rows
        H = np.exp(np.zeros((4, 1, 1)) + theta.sum())
        return {"H": H}

    with pytest.raises(ValueError, match=r"'H'\] has shape \(4, 1, 1\) where theta has \d rows"):
        fit(levels(4) * np.array([1, np.nan, 1, 1])[:, None, None], WALK, rows, [0.0])
    masked = {"H": np.ma.masked_less(np.ones((4, 1, 1)), 0)}
    with pytest.raises(ValueError, match=r"arrays\(theta\)\['H'\] is a masked array"):
        fit(levels(4), WALK, lambda theta: masked, [0.0])


def test_parameters_of_other_units():
    """A climb along the steep one is not over because it is over there."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(3, 100, 2))
    noise -= noise.mean(axis=1, keepdims=True)
    units = np.array([1e3, 1e-2])
    nothing = StateSpace(
        [0.0], ONE, [0.0], [0.0, 0.0], T=0 * ONE, Z=np.zeros((2, 1)), R=ONE, H=np.eye(2), Q=ONE
    )
    fits = fit(noise + [1.0, 0.1], nothing, lambda theta: {"d": theta * units}, [0.0, 0.0])
    assert fits.converged.all()
    assert np.abs(fits.params * units - [1.0, 0.1]).max() < 1e-5


def test_a_start_that_overflows_stops_no_other_series():
    start = np.zeros((3, 2))
    start[1, 0] = 800
    Y = levels(3)
    fits = fit(Y, WALK, local_level, start)
    assert fits.failed.keys() == {1} and "at the start" in fits.failed[1]
    assert np.array_equal(fits.params[[0, 2]], fit(Y[[0, 2]], WALK, local_level, [0, 0]).params)


def test_no_series_that_could_be_fitted():
    fits = fit(np.full((2, 5, 1), np.nan), WALK, local_level, [0.0, 0.0])
    assert set(fits.failed.values()) == {"the series has no observation at all"}


def test_a_saddle_is_no_maximum():
    """Where a deviation is zero its slope is zero, and the likelihood may curve upwards."""
    Y = levels(6)

    def deviations(theta):
        return {"H": np.exp(theta[:, 0])[:, None, None], "Q": (theta[:, 1] ** 2)[:, None, None]}

    fits, best = fit(Y, WALK, deviations, [0.0, 0.0]), fit(Y, WALK, local_level, [0.0, 0.0])
    assert fits.converged.all()
    inside = best.params[:, 1] > -5
    assert inside.any() and np.abs(fits.value - best.value)[inside].max() < 1e-6


def test_a_curvature_that_is_not_finite_is_no_maximum():
    """Next to the start no likelihood can be had, and its slope there is zero."""

    def edge(theta):
        variance = np.where(theta.real == 0, 1 + theta**2, np.nan)
        return {"H": variance[:, :, None]}

    fits = fit(levels(2), WALK, edge, [0.0])
    assert set(fits.failed.values()) == {"the curvature is not finite where the slope is zero"}
