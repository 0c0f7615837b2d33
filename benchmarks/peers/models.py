"""The models that the contenders run on: random dense ones, and those that people fit."""

from __future__ import annotations

import numpy as np

from helpers.datasets import (
    local_level_arrays,
    macro,
    nile,
    random_model,
    seasonal_arrays,
    simulate,
)
from helpers.kalman import StateSpace

SIZES = (  # m, p, r, n
    (2, 1, 1, 100), (4, 1, 2, 100), (3, 8, 2, 200), (10, 5, 5, 200), (13, 1, 3, 1000),
    (20, 3, 5, 500), (50, 5, 5, 500),
)  # fmt: skip
ONCE = (4, 1, 2, 100)  # where those run that run once
STRUCTURAL = ((12, 200), (12, 1000), (52, 500))  # season, n


def random_problem(m: int, p: int, r: int, n: int) -> tuple[np.ndarray, StateSpace]:
    """A dense stable model, spectral radius 0.9, and data drawn from it."""
    arrays = random_model(m, p, r, rng=m)
    return simulate(n, m, **arrays)[0], StateSpace(**arrays)


def structural_problem(season: int, n: int) -> tuple[np.ndarray, StateSpace]:
    """Level, trend, season and noise: m = season + 1, r = 3, and a T that is nearly empty."""
    variances = np.array([0.5, 0.2, 0.02, 0.1]) ** 2
    model = StateSpace(**seasonal_arrays(variances, season))
    return simulate(n, season, **model.asdict())[0], model


def varmax_problem() -> tuple[np.ndarray, StateSpace]:
    """VARMA(1, 1) of three macroeconomic series: m = 6, p = r = 3, no measurement error."""
    y = macro().y - macro().y.mean(axis=0)
    A, M, eye = 0.4 * np.eye(3) + 0.05, -0.2 * np.eye(3), np.eye(3)
    T, R = np.block([[A, M], [np.zeros((3, 6))]]), np.vstack([eye, eye])
    model = StateSpace(
        a0=np.zeros(6), P0=5 * np.eye(6), c=np.zeros(6), d=np.zeros(3), T=T,
        Z=np.eye(3, 6), R=R, H=np.zeros((3, 3)), Q=np.cov(y.T) * 0.8,
    )  # fmt: skip
    return y, model


def real_problems() -> dict:
    """name -> (y, model, the arrays that hold parameters)."""
    level = nile().y, StateSpace(**local_level_arrays())
    found = {"local level, Nile": (*level, ("a0", "P0", "H", "Q"))}
    for season, n in STRUCTURAL:
        problem = structural_problem(season, n)
        found[f"season {season}, n = {n}"] = (*problem, ("a0", "P0", "H", "Q"))
    found["VARMAX(1, 1)"] = (*varmax_problem(), ("a0", "P0", "T", "Q"))
    return found
