"""The models that every Kalman gradient is held to, easy and hard."""

import numpy as np

from helpers.datasets import local_level_arrays, nile, random_model, seasonal_arrays, simulate
from helpers.kalman import StateSpace
from helpers.kalman.compiled.inputs import Arrays
from helpers.kalman.stationary import Stationary
from helpers.statespace import STATIC

VARYING = ("c", "d", "T", "Z", "R", "H", "Q")

# name: (n, arguments of random_model, share of missing entries)
CASES = {
    "one step": (1, {"m": 2, "p": 1}, 0),
    "one of each": (20, {"m": 1, "p": 1}, 0),
    "two shocks": (15, {"m": 4, "p": 2, "r": 2}, 0),
    "more observed than states": (12, {"m": 2, "p": 4, "r": 1}, 0),
    "H = 0": (15, {"m": 3, "p": 2, "H_zero": True}, 0),
    "singular P0": (15, {"m": 3, "p": 1, "r": 2, "singular_P0": True}, 0),
    "singular Q": (15, {"m": 3, "p": 1, "singular_Q": True}, 0),
    "H = 0, singular P0 and Q": (
        15,
        {"m": 3, "p": 1, "H_zero": True, "singular_P0": True, "singular_Q": True},
        0,
    ),
    "gaps": (20, {"m": 3, "p": 2, "r": 1}, 0.4),
    "all time-varying": (8, {"m": 2, "p": 2, "n": 8, "time_varying": VARYING}, 0),
    "time-varying with gaps": (8, {"m": 2, "p": 3, "n": 8, "time_varying": VARYING}, 0.4),
    "only Z varies": (10, {"m": 3, "p": 1, "n": 10, "time_varying": ("Z",)}, 0.2),
    "only c and d vary": (40, {"m": 3, "p": 2, "n": 40, "time_varying": VARYING[:2]}, 0.02),
    "H = 0 with gaps": (12, {"m": 3, "p": 3, "H_zero": True}, 0.4),
    "long": (200, {"m": 2, "p": 1, "radius": 0.99}, 0),
    "near a unit root": (60, {"m": 3, "p": 1, "radius": 1.0}, 0),
}


def make(name: str, seed: int = 0) -> tuple[np.ndarray, StateSpace]:
    """Observations (n, p) and model of a case."""
    if name == "Nile":
        return nile().y, StateSpace(**local_level_arrays())
    n, arguments, missing = CASES[name]
    rng = np.random.default_rng(seed)
    arrays = random_model(rng=rng, **arguments)
    y, _ = simulate(n, rng, **arrays)
    if missing:
        y[rng.random(y.shape) < missing] = np.nan
        y[n // 2] = np.nan  # a row with nothing in it
    return y, StateSpace(**arrays)


NAMES_OF_CASES = (*CASES, "Nile")


def season(period: int) -> StateSpace:
    """Level, trend and season: a transition that is nearly empty."""
    return StateSpace(**seasonal_arrays(period=period))


def of_lower_rank(seed: int, p: int, rank: int) -> tuple[np.ndarray, StateSpace]:
    """A series with an F of lower rank than p, but for rounding."""
    rng = np.random.default_rng(seed)
    m = int(rng.integers(1, rank + 1))
    Q, B = rng.standard_normal((m, m)), rng.standard_normal((p, rank - m))
    arrays = dict(a0=np.zeros(m), P0=np.eye(m), c=np.zeros(m), d=np.zeros(p), T=0.9 * np.eye(m))
    more = dict(Z=rng.standard_normal((p, m)), R=np.eye(m), H=B @ B.T, Q=Q @ Q.T)
    return rng.standard_normal((4, p)), StateSpace(**arrays, **more)


def exponential_smoothing(period: int) -> tuple[np.ndarray, StateSpace]:
    """P0 = W, H = 0, and variances that are the rounding of zeros; with a series."""
    m = period + 2
    T, R = np.zeros((m, m)), np.zeros((m, 1))
    T[1, 1] = T[2, -1] = 1
    T[range(3, m), range(2, m - 1)] = 1
    R[:3, 0] = 1.0, 0.3, 0.37
    Z, one = np.zeros((1, m)), np.eye(1)
    Z[0, [0, 1, -1]] = 1
    model = StateSpace(np.zeros(m), R @ R.T, np.zeros(m), [0.0], T=T, Z=Z, R=R, H=0 * one, Q=one)
    return np.random.default_rng(0).normal(size=(60, 1)).cumsum(axis=0), model


VECTORS = [("c",), ("d",), ("c", "d")]


def moving_vectors(m: int, p: int, names: tuple[str, ...]) -> tuple[np.ndarray, StateSpace]:
    """c and d, or one of them, vary, which no covariance sees: it settles between the gaps."""
    n = 200
    model = StateSpace(**random_model(m, p, rng=5, radius=0.3, time_varying=names, n=n))
    y = simulate(n, 5, **model.asdict())[0]
    y[[80, 140], 0] = np.nan
    return y, model


REPEATING = ("AR(3)", "VAR(2)", "VAR(3)")


def repeating(what: str) -> StateSpace:
    """Models some of whose states only repeat what others were; Z y = a is seen without error."""
    rng = np.random.default_rng(3)
    if what == "AR(3)":  # Harvey's form
        T = np.diag([1.0, 1.0], 1)
        T[:, 0] = 0.5, -0.3, 0.2
        R, p = np.eye(3)[:, :1], 1
    else:  # a vector autoregression and its lags
        p, lags = {"VAR(2)": (2, 2), "VAR(3)": (2, 3)}[what]
        T = np.diag(np.ones(p * (lags - 1)), -p)
        T[:p] = 0.4 / lags / p * rng.normal(size=(p, lags * p))
        T[:p, :p] += 0.3 * np.eye(p)
        R = np.eye(lags * p)[:, :p]
    m, Q = len(T), np.diag(10.0 ** np.arange(p))  # in different units
    P0 = Stationary(T, np.zeros(m), R @ Q @ R.T).covariance
    return StateSpace(np.zeros(m), P0, np.zeros(m), np.zeros(p), T=T, Z=np.eye(m)[:p], R=R,
                      H=np.zeros((p, p)), Q=Q)  # fmt: skip


def arrays_of(model):
    """A model's arrays as a pass takes them: with an axis for time, and W = R Q R'."""
    X = {
        x: np.array(A if x in (*STATIC, *model.time_varying) else A[np.newaxis])
        for x, A in model.asdict().items()
    }
    W = X.pop("R") @ X.pop("Q") @ np.swapaxes(model.R, -1, -2)
    return Arrays(**X, W=W)
