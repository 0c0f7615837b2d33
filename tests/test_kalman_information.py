"""Expected information and outer products of gradients, against the stacked data's dense formula.

The dense formula takes the whole series as one Gaussian vector: mu_i' S^-1 mu_j
+ tr(S^-1 S_i S^-1 S_j) / 2, with derivatives by complex steps. It shares no line with the filter.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from kalman_models import CASES, make
from kalman_oracle import law_of_data
from test_kalman_hessian import directions_for

from helpers.checks import relative_error
from helpers.datasets import simulate
from helpers.kalman import StateSpace, reference
from helpers.kalman.hessian import hessian
from helpers.kalman.information import expected_information, outer_product
from helpers.statespace import NAMES

STEP = 1e-40
SHORT = [name for name in CASES if name != "long"]


def dense(y, model, directions):
    n, o = len(y), ~np.isnan(y).ravel()
    k = len(next(iter(directions.values())))

    def at(i):
        arrays = {
            x: X if i is None or x not in directions else X + 1j * STEP * directions[x][i]
            for x, X in model.asdict().items()
        }
        moved = StateSpace(**arrays)
        over = {x: moved.over_time(x, n) for x in NAMES[2:]}
        mean, S = law_of_data(n, moved.a0, moved.P0, **over)
        return mean[o], S[np.ix_(o, o)]

    S, slopes = at(None)[1].real, []
    for i in range(k):
        mean, S_i = at(i)
        shift = directions["y"][i].ravel()[o] if "y" in directions else 0
        slopes.append((mean.imag / STEP - shift, np.linalg.solve(S, S_i.imag / STEP)))
    return np.array(
        [[u @ np.linalg.solve(S, v) + np.trace(U @ V) / 2 for v, V in slopes] for u, U in slopes]
    )


@cache
def case(name):
    y, model = make(name)
    directions = directions_for(y, model, 4)
    return y, model, directions, dense(y, model, directions)


@pytest.mark.parametrize("name", SHORT)
def test_expected_information_is_that_of_the_stacked_data(name):
    y, model, directions, expected = case(name)
    found = expected_information(y, model, directions)
    assert relative_error(found, expected) < 1e-10
    assert np.array_equal(found, found.T)


@pytest.mark.parametrize("array", ["y", *NAMES])
@pytest.mark.parametrize("name", ["time-varying with gaps", "gaps"])
def test_each_array_alone(name, array):
    """A term that is small beside the others would be lost among them."""
    y, model = make(name)
    directions = directions_for(y, model, 2, names=(array,))
    found = expected_information(y, model, directions)
    assert relative_error(found, dense(y, model, directions)) < 1e-10


@pytest.mark.parametrize("pair", [("Z", "a0"), ("T", "c"), ("Z", "d"), ("T", "P0"), ("a0", "y")])
def test_pairs_of_arrays(pair):
    """What two directions of different arrays share."""
    y, model = make("gaps")
    directions = {}
    for i, x in enumerate(pair):
        X = directions_for(y, model, 2, names=(x,))[x]
        X[1 - i] = 0
        directions[x] = X
    found = expected_information(y, model, directions)
    assert relative_error(found[0, 1], dense(y, model, directions)[0, 1]) < 1e-9


def test_the_data_do_not_matter_but_their_gaps_do():
    y, model, directions, _ = case("gaps")
    other = y + np.random.default_rng(0).normal(size=y.shape)
    found = expected_information(y, model, directions)
    assert np.array_equal(found, expected_information(other, model, directions))
    full = expected_information(np.nan_to_num(y), model, directions)
    assert np.linalg.eigvalsh(full - found).min() > 0


def test_a_burn_in_takes_away_what_the_first_steps_say():
    """log p(y) - log p(first steps): so the information is a difference too."""
    y, model, directions, expected = case("near a unit root")
    burn = 5
    head = {x: X[:, :burn] if x == "y" else X for x, X in directions.items()}
    weights = (np.arange(len(y)) >= burn).astype(float)
    found = expected_information(y, model, directions, weights)
    assert relative_error(found, expected - dense(y[:burn], model, head)) < 1e-10


def test_it_is_the_mean_of_minus_the_hessian():
    """Over series drawn from the model; the outer product has the same mean."""
    _, model = make("two shocks")
    n, draws = 15, 400
    rng = np.random.default_rng(4)
    directions = directions_for(np.zeros((n, model.p)), model, 2, names=("H", "Q", "T", "d"))
    found = expected_information(np.zeros((n, model.p)), model, directions)
    curved, products = [], []
    for _ in range(draws):
        y, _ = simulate(n, rng, **model.asdict())
        curved.append(-hessian(y, model, directions))
        products.append(outer_product(y, model, directions))
    for sample in (curved, products):
        spread = np.std(sample, axis=0) / np.sqrt(draws)
        assert (np.abs(np.mean(sample, axis=0) - found) < 4 * spread).all()


@pytest.mark.parametrize("name", ["gaps", "time-varying with gaps", "H = 0"])
def test_outer_product(name):
    y, model = make(name)
    directions = directions_for(y, model, 3)
    weights = np.random.default_rng(1).random(len(y))
    slopes = []
    for i in range(3):
        arrays = {"y": y, **model.asdict()}
        arrays |= {x: arrays[x] + 1j * STEP * X[i] for x, X in directions.items()}
        moved = arrays.pop("y"), StateSpace(**arrays)
        slopes.append(reference.kalman_filter(*moved).out.l.imag / STEP)
    slopes = np.array(slopes)
    assert relative_error(outer_product(y, model, directions), slopes @ slopes.T) < 1e-10
    slopes *= weights
    found = outer_product(y, model, directions, weights)
    assert relative_error(found, slopes @ slopes.T) < 1e-10


@pytest.mark.parametrize("function", [expected_information, outer_product])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({},), "directions is empty"),
        (({"H": np.zeros((1, 3, 3))},), r"directions of H have shape \(1, 3, 3\), expected \(1, 2"),
        (({"H": np.ones((1, 2, 2))}, [1.0]), r"weights has shape \(1,\), expected \(n,\) = \(20,"),
    ],
)
def test_bad_arguments(function, arguments, message):
    y, model = make("gaps")
    with pytest.raises(ValueError, match=message):
        function(y, model, *arguments)


@pytest.mark.parametrize("function", [expected_information, outer_product])
def test_a_direction_of_y_has_the_gaps_of_y(function):
    y, model = make("gaps")
    directions = directions_for(y, model, 2)
    expected = function(y, model, directions)
    directions["y"] = np.where(np.isnan(y), np.nan, directions["y"])
    assert np.array_equal(function(y, model, directions), expected)


@pytest.mark.parametrize("function", [expected_information, outer_product])
def test_no_covariance(function):
    y, model = make("gaps")
    negative = StateSpace(**(model.asdict() | {"H": -100 * np.eye(2), "P0": 0 * model.P0}))
    with pytest.raises(np.linalg.LinAlgError, match="step 0"):
        function(y, negative, {"H": np.ones((1, 2, 2))})


def test_a_complex_step_goes_through_the_expected_information():
    y, model = make("gaps")
    directions = {"H": np.eye(model.p)[None], "T": np.ones((1, *model.T.shape))}

    def moved(h):
        H = model.H + h * np.eye(model.p)
        return expected_information(y, replace(model, H=H), directions)

    by_differences = (moved(1e-5) - moved(-1e-5)) / 2e-5
    assert relative_error(moved(1e-30j).imag / 1e-30, by_differences) < 1e-6
