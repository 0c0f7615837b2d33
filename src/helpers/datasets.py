r"""Real series that come with statsmodels, and simulated ones with known truth; no downloads.

A model is a dict of its nine arrays, in the order ``a0, P0, c, d, T, Z, R, H, Q``:

.. math::

    \alpha_1 &\sim N(a_0, P_0), \\
    y_t &= Z_t \alpha_t + d_t + \varepsilon_t, \\
    \alpha_{t+1} &= T_t \alpha_t + c_t + R_t \eta_t, \\
    \varepsilon_t &\sim N(0, H_t), \quad \eta_t \sim N(0, Q_t).

>>> from helpers.datasets import random_model, simulate
>>> y, states = simulate(50, 1, **random_model(m=3, p=2, rng=0))
>>> y.shape, states.shape
((50, 2), (50, 3))
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from helpers.statespace import SHAPES as AXES
from helpers.statespace import STATIC, StateSpace

MAY_VARY = tuple(name for name in AXES if name not in STATIC)


@dataclass(frozen=True, eq=False)
class Series:
    """Observed series.

    Parameters
    ----------
    y : array (n, p)
        Float; NaN marks a gap.
    index : array (n,)
        datetime64[D], the first day of each period.
    names, units : tuple of p str
    source : str
        Who to cite.
    """

    y: np.ndarray
    index: np.ndarray
    names: tuple[str, ...]
    units: tuple[str, ...]
    source: str


def nile() -> Series:
    """Annual flow of the Nile at Aswan, 1871-1970, in 10^8 m^3: n = 100, p = 1, no gaps.

    Source: Cobb (1978), The problem of the Nile: conditional solution to a changepoint problem,
    Biometrika 65(2), doi:10.1093/biomet/65.2.243.
    """
    from statsmodels.datasets import nile as dataset

    data = dataset.load_pandas().data
    return Series(
        y=data[["volume"]].to_numpy(float, copy=True),  # pandas lends read-only views
        index=(data["year"].to_numpy(int) - 1970).astype("datetime64[Y]").astype("datetime64[D]"),
        names=("flow",),
        units=("10^8 m^3",),
        source="Cobb (1978), Biometrika 65(2), 243-251",
    )


def macro() -> Series:
    """Quarterly growth of the economy of the United States, in percent: n = 202, p = 3, no gaps.

    100 times the difference of logarithms, from one quarter to the next, of real gross domestic
    product, real personal consumption and real gross private domestic investment (seasonally
    adjusted, chained 2005 dollars), 1959Q2-2009Q3.

    Source: FRED, Federal Reserve Bank of St. Louis, compiled for statsmodels by S. Seabold (2009).
    """
    from statsmodels.datasets import macrodata as dataset

    data = dataset.load_pandas().data
    levels = data[["realgdp", "realcons", "realinv"]].to_numpy(float)
    months = 12 * (data["year"].to_numpy(int) - 1970) + 3 * (data["quarter"].to_numpy(int) - 1)
    return Series(
        y=100 * np.diff(np.log(levels), axis=0),
        index=months[1:].astype("datetime64[M]").astype("datetime64[D]"),
        names=("GDP", "consumption", "investment"),
        units=("percent per quarter",) * 3,
        source="FRED, Federal Reserve Bank of St. Louis (2009), by way of statsmodels",
    )


def co2() -> Series:
    """Carbon dioxide in the air at Mauna Loa, monthly means in ppm, March 1958 - December 2001.

    n = 526, p = 1, seasonal with period 12. Five months have no observation and are NaN: June and
    October 1958, February to April 1964. A month is the mean of the weekly values dated in it.

    Source: Keeling and Whorf (2004), Atmospheric CO2 concentrations derived from flask air samples
    at sites in the SIO network, Carbon Dioxide Information Analysis Center, Oak Ridge.
    """
    from statsmodels.datasets import co2 as dataset

    monthly = dataset.load_pandas().data.resample("MS").mean()
    return Series(
        y=monthly.to_numpy(float, copy=True),
        index=monthly.index.to_numpy().astype("datetime64[D]"),
        names=("CO2",),
        units=("ppm",),
        source="Keeling and Whorf (2004), CDIAC, Oak Ridge National Laboratory",
    )


def local_level_arrays(
    sigma_eps2: float = 15099.0, sigma_eta2: float = 1469.1, a0: float = 0.0, P0: float = 1e7
) -> dict[str, np.ndarray]:
    """Local level model, m = p = r = 1: a random walk observed with noise.

    By default with the variances that Durbin and Koopman (2012, section 2.2) estimate for
    :func:`nile`, in (10^8 m^3)^2, and their near-diffuse start.

    Returns
    -------
    dict of the nine arrays
    """
    for name, value in {"sigma_eps2": sigma_eps2, "sigma_eta2": sigma_eta2, "P0": P0}.items():
        if not value >= 0:
            raise ValueError(f"{name} is a variance, it cannot be {value}")
    values = {"a0": a0, "P0": P0, "T": 1.0, "Z": 1.0, "R": 1.0, "H": sigma_eps2, "Q": sigma_eta2}
    return {name: np.full((1,) * len(AXES[name]), values.get(name, 0.0)) for name in AXES}


def seasonal_arrays(
    variances=(0.5, 0.1, 0.01, 0.05), period: int = 12, level: float = 0.0, P0=5.0
) -> dict[str, np.ndarray]:
    """Level, slope, a season of dummies, and noise: m = period + 1, p = 1, r = 3.

    Harvey's basic structural model (1989, Forecasting, Structural Time Series Models and the Kalman
    Filter, section 2.3.4). The states are the level, the slope and the last period - 1 seasonal
    effects; each new one is minus the sum of those, plus a shock. T has 2 period + 1 entries that
    are not zero.

    Parameters
    ----------
    variances : array (4,)
        Of the noise and of the shocks of level, slope and season, in that order; real or complex.
    period : int
        Number of seasons, 2 or more.
    level : float
        The first entry of a0; the others are zero.
    P0 : float or array (m,)
        Variances of the first state.

    Returns
    -------
    dict of the nine arrays
    """
    if period < 2:
        raise ValueError(f"period is {period}, expected 2 seasons or more")
    variances, m = np.asarray(variances), period + 1
    if variances.shape != (4,):
        raise ValueError(
            f"variances has shape {variances.shape}, expected (4,): noise, level, slope, season"
        )
    T, Z, R = np.zeros((m, m)), np.zeros((1, m)), np.eye(m, 3)
    T[:2, :2], T[2, 2:], T[3:, 2:-1] = [[1, 1], [0, 1]], -1, np.eye(period - 2)
    Z[0, [0, 2]] = 1
    a0 = np.zeros(m)
    a0[0] = level
    return {
        "a0": a0, "P0": P0 * np.eye(m), "c": np.zeros(m), "d": np.zeros(1), "T": T, "Z": Z, "R": R,
        "H": variances[:1, None], "Q": np.diag(variances[1:]),
    }  # fmt: skip


def random_model(
    m: int,
    p: int = 1,
    r: int | None = None,
    rng: np.random.Generator | int | None = None,
    *,
    radius: float = 0.9,
    time_varying: Collection[str] = (),
    n: int | None = None,
    H_zero: bool = False,
    singular_P0: bool = False,
    singular_Q: bool = False,
) -> dict[str, np.ndarray]:
    """Draw a model whose gradients are hard to get right by luck: full, asymmetric, well scaled.

    Parameters
    ----------
    m, p, r : int
        Numbers of states, of series, and of shocks (m if None).
    rng : Generator or seed
    radius : float
        Spectral radius of T, of every T_t if it varies.
    time_varying : names out of c, d, T, Z, R, H, Q
        These get a leading axis of length `n`, and each step is drawn anew.
    n : int
        Number of steps, needed if anything varies.
    H_zero : bool
        No measurement error: H = 0.
    singular_P0, singular_Q : bool
        Rank one less than full. Otherwise the eigenvalues of P0, H and Q lie in [1/2, 2].

    Returns
    -------
    dict
        a0 (m,), P0 (m, m), c (m,), d (p,), T (m, m), Z (p, m), R (m, r), H (p, p), Q (r, r).

    Raises
    ------
    ValueError
        If an argument is out of range, or the model would have a singular F = Z P Z' + H.
    """
    rng = np.random.default_rng(rng)
    sizes = {"m": m, "p": p, "r": m if r is None else r}
    varying = {time_varying} if isinstance(time_varying, str) else set(time_varying)
    for name, size in (sizes | ({"n": n} if varying else {})).items():
        if not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"{name} is {size!r}, expected a positive integer")
    if not (np.isfinite(radius) and radius > 0):
        raise ValueError(f"radius is {radius}, expected a positive number")
    if unknown := varying - set(MAY_VARY):
        raise ValueError(f"{sorted(unknown)} cannot vary in time, only {', '.join(MAY_VARY)} can")
    ranks = m - singular_P0, min(m, sizes["r"] - singular_Q)
    if H_zero and p > min(ranks):
        raise ValueError(
            f"with H = 0 the p = {p} series need P0 and R Q R' of rank {p} or more, or F becomes "
            f"singular; they have rank {ranks[0]} and {ranks[1]}"
        )

    def draw(name: str) -> np.ndarray:
        shape = tuple(sizes[axis] for axis in AXES[name])
        if name == "T":
            T = _matrix(rng, *shape)
            return T * (radius / np.abs(np.linalg.eigvals(T)).max())
        if name in ("Z", "R"):
            return _matrix(rng, *shape)
        if name == "H" and H_zero:
            return np.zeros(shape)
        if name in ("P0", "H", "Q"):
            singular = (name == "P0" and singular_P0) or (name == "Q" and singular_Q)
            return _covariance(rng, shape[0], singular)
        return rng.standard_normal(shape)

    return {
        name: np.stack([draw(name) for _ in range(n)]) if name in varying else draw(name)
        for name in AXES
    }


def _matrix(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Full rank by far: orthonormal rows or columns, disturbed so that nothing cancels."""
    tall = max(rows, columns), min(rows, columns)
    frame, _ = np.linalg.qr(rng.standard_normal(tall))
    frame += 0.3 / np.sqrt(tall[0]) * rng.standard_normal(tall)
    return np.ascontiguousarray(frame if rows >= columns else frame.T)


def _covariance(rng: np.random.Generator, k: int, singular: bool) -> np.ndarray:
    """Random (k, k) covariance matrix with eigenvalues in [1/2, 2], and one 0 if singular."""
    axes, _ = np.linalg.qr(rng.standard_normal((k, k)))
    eigenvalues = rng.uniform(0.5, 2.0, k)
    eigenvalues[0] *= not singular
    S = (axes * eigenvalues) @ axes.T
    return (S + S.T) / 2


def simulate(
    n: int, rng: np.random.Generator | int | None, a0, P0, c, d, T, Z, R, H, Q
) -> tuple[np.ndarray, np.ndarray]:
    """Draw states and observations from a model; its covariances may be singular.

    Parameters
    ----------
    n : int
        Number of steps.
    rng : Generator or seed
    a0, P0, c, d, T, Z, R, H, Q : array
        Shapes as in :func:`random_model`; all but a0 and P0 may have a leading axis n.

    Returns
    -------
    y : array (n, p)
    states : array (n, m)

    Raises
    ------
    ValueError
        If shapes do not fit together, or P0, H or Q is not a covariance matrix.
    """
    rng = np.random.default_rng(rng)
    if not isinstance(n, int | np.integer) or n < 1:
        raise ValueError(f"n is {n!r}, expected a positive integer")
    given = (a0, P0, c, d, T, Z, R, H, Q)
    model = StateSpace(*(np.asarray(array, dtype=float) for array in given))
    if model.n not in (None, n):
        raise ValueError(f"{model.time_varying[0]} has {model.n} steps, expected n = {n}")

    states = np.empty((n, model.m))
    states[0] = model.a0 + _square_root("P0", model.P0) @ rng.standard_normal(model.m)
    eps = (_square_root("H", model.H) @ rng.standard_normal((n, model.p, 1)))[..., 0]
    eta = _square_root("Q", model.Q) @ rng.standard_normal((n, model.r, 1))
    pushes, T = (model.R @ eta)[..., 0] + model.c, model.over_time("T", n)
    for t in range(n - 1):
        states[t + 1] = T[t] @ states[t] + pushes[t]
    return (model.Z @ states[..., None])[..., 0] + model.d + eps, states


def _square_root(name: str, S: np.ndarray) -> np.ndarray:
    """A with A A' = S (..., k, k), from the eigenvalues, so that S need not have full rank."""
    eigenvalues, vectors = np.linalg.eigh(S)
    if eigenvalues.min(initial=0.0) < -1e-10 * np.abs(S).max(initial=0.0):
        raise ValueError(
            f"{name} is not a covariance matrix: it has an eigenvalue {eigenvalues.min():.3g}"
        )
    return vectors * np.sqrt(np.maximum(eigenvalues, 0.0))[..., None, :]


def structural_example(
    n: int = 100, seed: int = 0
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Trend, autoregression and measurement error, as pymc-extras has them, and data drawn from it.

    The level starts at 10 and rises by about 0.1 a step; the slope is a random walk, and a
    first-order autoregression (coefficient 0.95) rides on top. The standard deviations of the two
    shocks and of the measurement error are 0.01. m = 3 (level, slope, autoregression), p = 1, r =
    2. The model's P0 is the identity, which is what a filter assumes; the data start exactly at a0,
    since a slope drawn from N(0.1, 1) would swamp the rest.

    Returns
    -------
    model : dict of the nine arrays
    y : array (n, 1)
    states : array (n, 3)
    """
    model = {
        "a0": np.array([10.0, 0.1, 0.0]),
        "P0": np.eye(3),
        "c": np.zeros(3),
        "d": np.zeros(1),
        "T": np.array([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.95]]),
        "Z": np.array([[1.0, 0.0, 1.0]]),
        "R": np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]),
        "H": np.array([[1e-4]]),
        "Q": 1e-4 * np.eye(2),
    }
    return model, *simulate(n, seed, **model | {"P0": np.zeros((3, 3))})
