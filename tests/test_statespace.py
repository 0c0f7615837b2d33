"""A wrong model is refused at the door, in words that say what to mend."""

import numpy as np
import pytest
from kalman_models import VARYING

from helpers.datasets import random_model
from helpers.kalman import StateSpace, loglike
from helpers.statespace import check_data

ARRAYS = random_model(3, 1, 2, rng=0)


def with_(**changed):
    return StateSpace(**(ARRAYS | changed))


def test_sizes_and_time_axes():
    model = StateSpace(**random_model(3, 2, 1, rng=0, n=7, time_varying=VARYING))
    assert (model.m, model.p, model.r, model.n) == (3, 2, 1, 7)
    assert model.time_varying == VARYING
    fixed = with_()
    assert (fixed.n, fixed.time_varying) == (None, ())
    assert fixed.over_time("T", 5).shape == (5, 3, 3)
    assert list(fixed.asdict()) == ["a0", "P0", "c", "d", "T", "Z", "R", "H", "Q"]


def test_one_precision_for_all():
    single = {name: X.astype("float32") for name, X in ARRAYS.items()}
    assert StateSpace(**single).T.dtype == np.float32
    assert StateSpace(**single | {"Q": ARRAYS["Q"]}).T.dtype == np.float64
    assert with_(a0=[1, 2, 3]).a0.dtype == np.float64


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"Z": np.ones((2, 3))}, r"Z has shape \(2, 3\), expected \(p, m\) = \(1, 3\)"),
        ({"T": np.ones((3, 2))}, r"T has shape \(3, 2\), expected \(m, m\) = \(3, 3\)"),
        ({"c": np.ones((3, 1, 1))}, r"c has shape \(3, 1, 1\), expected \(m,\) = \(3,\)"),
        ({"P0": np.ones((4, 3, 3))}, r"P0 has shape \(4, 3, 3\), expected \(m, m\) = \(3, 3\)$"),
        ({"a0": np.ones((3, 1))}, r"a0 has shape \(3, 1\), expected \(m,\)"),
        ({"a0": np.ones(0)}, r"a0 has shape \(0,\)"),
        ({"Q": np.eye(3)}, r"Q has shape \(3, 3\), expected \(r, r\) = \(2, 2\)"),
        ({"Q": np.array([[1.0, 0.5], [0.4, 1.0]])}, r"Q is not symmetric: 0.5 at \(0, 1\), 0.4"),
        ({"T": np.full((3, 3), np.nan)}, r"T is not finite at \(0, 0\): nan"),
        ({"H": [["a"]]}, "H is not an array of numbers"),
        (
            {"T": np.zeros((5, 3, 3)), "Z": np.zeros((4, 1, 3))},
            "differ in their number of steps: T 5, Z 4",
        ),
    ],
)
def test_wrong_models(changed, message):
    with pytest.raises(ValueError, match=message):
        with_(**changed)


@pytest.mark.parametrize(
    "y, message",
    [
        (np.zeros(5), r"y has shape \(5,\), expected \(n, p\) = \(n, 1\); use y\[:, np.newaxis\]"),
        (np.zeros((5, 2)), r"y has shape \(5, 2\), expected \(n, p\) = \(n, 1\)"),
        (np.zeros((0, 1)), "y is empty"),
        (np.array([[0.0], [np.inf]]), "y is infinite at step 1, series 0"),
    ],
)
def test_wrong_data(y, message):
    with pytest.raises(ValueError, match=message):
        check_data(y, with_())


@pytest.mark.skipif(np.dtype(np.longdouble) == float, reason="a long double is a double here")
def test_no_more_than_double_precision():
    with pytest.raises(ValueError, match=r"y is .*, expected double precision at most: use y.ast"):
        check_data(np.zeros((5, 1), np.longdouble), with_())
    with pytest.raises(ValueError, match=r"T is an array of .*: use T.astype\(complex\)"):
        with_(T=np.eye(3, dtype=np.clongdouble))


def test_data_and_model_of_different_length():
    model = with_(T=np.zeros((4, 3, 3)))
    with pytest.raises(ValueError, match="y has 5 steps, but T has 4"):
        loglike(np.zeros((5, 1)), model)


def test_nothing_known_in_advance():
    """H = 0 and P0 = 0: the first observation has no variance, and the message names the step."""
    model = with_(H=np.zeros((1, 1)), P0=np.zeros((3, 3)))
    with pytest.raises(np.linalg.LinAlgError, match="not positive definite at step 0"):
        loglike(np.zeros((5, 1)), model)
    bad_later = np.ones((5, 1, 1))
    bad_later[3] = -100.0
    with pytest.raises(np.linalg.LinAlgError, match="at step 3"):
        loglike(np.zeros((5, 1)), with_(H=bad_later))
