"""Twenty fits of statsmodels' models to its own data: ``mod.fit()`` against ``fit(mod)``.

Both use the same optimiser, L-BFGS, and the same starting values; what differs is the likelihood's
value and score, and the end, which ours looks for more closely.  Fits are timed in turn, theirs,
ours, theirs, ours, from the model to its results with standard errors, in seconds of the processor:
all is in one thread, and other work on the machine counts for less than in seconds of the clock.
Scores are timed a few in a row, as an optimiser asks for them.  ``results/statsmodels_fits.json``
holds the seconds, and the iterations, evaluations and maxima of both and of Newton's method.

With ``--study N`` there are no times: N random models, well specified or not, are fitted by
``mod.fit()`` and by three methods of ours, and those that end lower than another one are printed.

    python benchmarks/statsmodels_fits.py [--repeats 3] [--only NAME ...] [--record FILE]
    python benchmarks/statsmodels_fits.py --study 200
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from time import process_time

import numpy as np
import statsmodels.api as sm
from scipy import signal
from statsmodels.tools.sm_exceptions import ConvergenceWarning
from statsmodels.tsa.statespace.dynamic_factor import DynamicFactor
from statsmodels.tsa.statespace.exponential_smoothing import ExponentialSmoothing
from statsmodels.tsa.statespace.mlemodel import MLEModel
from statsmodels.tsa.statespace.sarimax import SARIMAX
from statsmodels.tsa.statespace.structural import UnobservedComponents
from statsmodels.tsa.statespace.varmax import VARMAX
from threadpoolctl import threadpool_limits

from helpers.kalman import compiled
from helpers.kalman.statsmodels import fit, loglike, score
from helpers.timing import machine, write_record

RECORD = Path(__file__).parent / "results" / "statsmodels_fits.json"
MOST = 1000  # iterations
NEWTON = 50  # of Newton's method
IN_A_ROW = 5  # scores, as an optimiser asks for them: the first one finds the caches cold
WHO = ("theirs", "lbfgs", "bfgs", "newton")  # of the study of random models
LOWER = 1e-3  # log-likelihood by which a fit may end below another one and still be as good


def load(name: str, *columns: str) -> np.ndarray:
    """Columns of one of the data sets that come with statsmodels."""
    frame = getattr(sm.datasets, name).load_pandas().data
    found = frame[list(columns)].to_numpy(float)
    return found[:, 0] if len(columns) == 1 else found


def growth(*columns: str) -> np.ndarray:
    """Quarterly growth rates of the United States, in per cent."""
    return 100 * np.diff(np.log(load("macrodata", *columns)), axis=0)


def carbon_dioxide() -> np.ndarray:
    """Monthly means, 1958 to 2001, with gaps."""
    return sm.datasets.co2.load_pandas().data.co2.resample("MS").mean().to_numpy()


def consumption() -> SARIMAX:
    return SARIMAX(
        growth("realcons"), exog=growth("realdpi", "realinv"), order=(2, 0, 1), trend="c"
    )


def inflation_and_rate() -> np.ndarray:
    return load("interest_inflation", "Dp", "R") * 100


MODELS: dict[str, Callable] = {
    "Nile: level": lambda: UnobservedComponents(load("nile", "volume"), "llevel"),
    "Nile: ARMA(1, 1)": lambda: SARIMAX(load("nile", "volume"), order=(1, 0, 1), trend="c"),
    "Nile: level, AR(2)": lambda: UnobservedComponents(
        load("nile", "volume"), "llevel", autoregressive=2
    ),
    "sunspots: AR(9)": lambda: SARIMAX(
        load("sunspots", "SUNACTIVITY"), order=(9, 0, 0), trend="c"
    ),
    "sunspots: cycle": lambda: UnobservedComponents(
        load("sunspots", "SUNACTIVITY"), "rwalk", cycle=True, stochastic_cycle=True,
        damped_cycle=True, autoregressive=1,
    ),
    "CO2: trend, season": lambda: UnobservedComponents(carbon_dioxide(), "lltrend", seasonal=12),
    "CO2: harmonics": lambda: UnobservedComponents(
        carbon_dioxide(), "lltrend", freq_seasonal=[{"period": 12, "harmonics": 3}]
    ),
    "CO2: airline": lambda: SARIMAX(
        carbon_dioxide(), order=(0, 1, 1), seasonal_order=(0, 1, 1, 12)
    ),
    "CO2: SARIMA": lambda: SARIMAX(
        carbon_dioxide()[:240], order=(1, 1, 1), seasonal_order=(1, 1, 1, 12)
    ),
    "CO2: smoothing": lambda: ExponentialSmoothing(
        carbon_dioxide()[76:316], trend=True, seasonal=12, initialization_method="simple"
    ),
    "consumption: ARMAX": consumption,
    "prices: level, AR(2)": lambda: UnobservedComponents(
        load("macrodata", "infl"), "llevel", autoregressive=2
    ),
    "unemployment: cycle": lambda: UnobservedComponents(
        load("macrodata", "unemp"), "rwalk", cycle=True, stochastic_cycle=True, damped_cycle=True
    ),
    "macro: VAR(1), 3 series": lambda: VARMAX(
        growth("realgdp", "realcons", "realinv"), order=(1, 0)
    ),
    "macro: VAR(2), 3 series": lambda: VARMAX(
        growth("realgdp", "realcons", "realinv"), order=(2, 0)
    ),
    "macro: VAR(2), 4 series": lambda: VARMAX(
        growth("realgdp", "realcons", "realinv", "realdpi"), order=(2, 0)
    ),
    "macro: VAR(1), errors": lambda: VARMAX(
        growth("realgdp", "realcons"), order=(1, 0), measurement_error=True
    ),
    "Germany: VAR(4)": lambda: VARMAX(inflation_and_rate(), order=(4, 0)),
    "macro: factor, AR errors": lambda: DynamicFactor(
        growth("realgdp", "realcons", "realinv", "realdpi"), k_factors=1, factor_order=2,
        error_order=1,
    ),
    "macro: two factors": lambda: DynamicFactor(
        growth("realgdp", "realcons", "realinv", "realdpi"), k_factors=2, factor_order=1
    ),
}  # fmt: skip


class Autoregression(MLEModel):
    """AR(2) from its stationary distribution, in coefficients that nothing keeps inside."""

    param_names, start_params = ["ar.L1", "ar.L2", "sigma2"], [0.0, 0.0, 1.0]  # noqa: RUF012

    def __init__(self, y):
        super().__init__(y, k_states=2, k_posdef=1, initialization="stationary")
        self["design"], self["selection"] = [[1.0, 0.0]], [[1.0], [0.0]]
        self["transition"] = [[0.0, 1.0], [0.0, 0.0]]

    def update(self, params, **kwargs):
        params = super().update(params, **kwargs)
        self["transition", :, 0], self["state_cov", 0, 0] = params[:2], params[2]


def random_model(seed: int) -> Callable:
    """A model and data of its kind or not: in units of any size, with gaps or without."""
    rng = np.random.default_rng(seed)
    n, p = int(rng.integers(60, 200)), int(rng.integers(2, 4))
    noise, kind = rng.normal(size=(n, p)), rng.integers(6)
    steps = signal.lfilter([1, rng.uniform(-0.9, 0.9)], [1, *-rng.uniform(-0.5, 0.95, 1)], noise, 0)
    level = steps + rng.uniform(0, 0.5) * steps.cumsum(axis=0)
    season = np.sin(2 * np.pi * np.arange(n) / 4)[:, np.newaxis]
    y = 10 ** rng.uniform(-3, 3) * (level + rng.uniform(0, 3) * season + rng.normal())
    if rng.uniform() < 0.3:
        y[rng.uniform(size=y.shape) < 0.1] = np.nan
    yes, order = (lambda: bool(rng.uniform() < 0.5)), (lambda most: int(rng.integers(most + 1)))
    if kind == 0:
        return lambda: Autoregression(y[:, 0])
    if kind == 1:
        arima, seasonal = (order(3), order(1), order(2)), (order(1), order(1), order(1), 4)
        how = {"enforce_stationarity": yes(), "use_exact_diffuse": yes()}
        trend = ["n", "c"][order(1)]
        return lambda: SARIMAX(y[:, 0], order=arima, seasonal_order=seasonal, trend=trend, **how)
    if kind in (2, 3):
        how = {"cycle": True, "stochastic_cycle": True, "damped_cycle": yes()} if yes() else {}
        how |= {"seasonal": 4} if yes() else {}
        how |= {"autoregressive": 1} if yes() else {}
        trend = ["llevel", "lltrend", "rwdrift", "ntrend", "rtrend"][order(4)]
        return lambda: UnobservedComponents(y[:, 0], trend, use_exact_diffuse=kind == 3, **how)
    z = steps / steps.std(axis=0)
    if kind == 4:
        how = {"measurement_error": yes(), "trend": ["n", "c"][order(1)]}
        return lambda: VARMAX(z, order=(1 + order(1), 0), **how)
    how = {"factor_order": 1 + order(1), "error_order": order(1)}
    return lambda: DynamicFactor(z, k_factors=1, **how)


def end(who: str, make: Callable) -> dict:
    """Where a fit ends by what it maximised, and whether it warns."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        mod = make()
        try:
            if who == "theirs":
                found = mod.fit(disp=False, cov_type="none")
                value = loglike(mod, found.params)
            else:
                found = fit(mod, method=who, disp=False, cov_type="none")
                value = -found.mle_retvals["fopt"] * len(mod.endog)
        except (ValueError, np.linalg.LinAlgError) as error:
            return {"value": -np.inf, "warned": True, "raised": str(error)}
    warned = any(issubclass(x.category, ConvergenceWarning) for x in said)
    return {"value": value, "warned": warned}


def study(seeds: range) -> None:
    """Which fits of random models end lower than another one by more than 0.01, and what they say.

    A fit that does not warn ends at a maximum, but where there are several it may not be the
    highest.
    """
    silent, warned = dict.fromkeys(WHO, 0), dict.fromkeys(WHO, 0)
    for seed in seeds:
        ends = {who: end(who, random_model(seed)) for who in WHO}
        best = max(x["value"] for x in ends.values())
        for who, x in ends.items():
            lower = not x["value"] > best - 0.01
            warned[who] += x["warned"]
            silent[who] += lower and not x["warned"]
            if lower or "raised" in x:
                said = x.get("raised", "warns" if x["warned"] else "does not warn")
                text = f"{seed}: {who} ends at {x['value']:.3f}, the best at {best:.3f}; {said}"
                print(text[:200], flush=True)
    print(f"{len(seeds)} fits each; warn: {warned}; lower without a warning: {silent}")


def told(results) -> dict:
    """What a fit says of itself."""
    about = results.mle_retvals
    return {
        "likelihood": float(results.llf),
        "iterations": int(about.get("iterations", 0)),
        "evaluations": int(about.get("fcalls", 0)),
        "converged": bool(about.get("converged", False)),
        "params": len(results.params),
    }


def measure(name: str, repeats: int) -> dict:
    """Times and ends of both fits of a model, and of both trust-region methods."""
    mod, ends = MODELS[name](), {}

    def run(who: str, function: Callable, **kwargs):
        def once():
            ends[who] = told(function(mod, disp=False, **{"maxiter": MOST} | kwargs))

        return once

    def theirs(mod, **kwargs):
        return mod.fit(**kwargs)

    times = in_turn({"theirs": run("theirs", theirs), "ours": run("ours", fit)}, repeats)
    start = np.asarray(mod.start_params, float)
    both = {
        "theirs": lambda: [mod.score(start) for _ in range(IN_A_ROW)],
        "ours": lambda: [score(mod, start) for _ in range(IN_A_ROW)],
    }
    begin = process_time()
    run("newton", fit, method="newton", maxiter=NEWTON)()
    ends["newton"]["seconds"] = process_time() - begin
    return {"ends": ends, "seconds": times, "score": in_turn(both, 7)}


def in_turn(contenders: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Seconds of the processor of each, interleaved, after a round that does not count."""
    found = {who: [] for who in contenders}
    contenders["ours"]()
    for _ in range(repeats):
        for who, function in contenders.items():
            begin = process_time()
            function()
            found[who].append(float(f"{process_time() - begin:.3e}"))
    return found


def main(repeats: int, only: list[str], path: Path) -> None:
    warnings.simplefilter("ignore")  # about starting values and frequencies
    threadpool_limits(1)  # threads that wait for work count as processor time
    compiled.warmup()
    found = {}
    print(f"{'':26}{'k':>3}{'score':>8}{'fit':>7}   evaluations    iterations     ours - theirs")
    for name in only or MODELS:
        found[name] = record = measure(name, repeats)
        theirs, ours, newton = (record["ends"][who] for who in ("theirs", "ours", "newton"))
        scores = {who: np.median(t) for who, t in record["score"].items()}
        seconds = {who: np.median(t) for who, t in record["seconds"].items()}
        print(
            f"{name:26}{ours['params']:3d}"
            f"{scores['theirs'] / scores['ours']:8.1f}"
            f"{seconds['theirs'] / seconds['ours']:7.1f}"
            f"{theirs['evaluations']:7d} {ours['evaluations']:4d}"
            f"{theirs['iterations']:8d} {ours['iterations']:4d} {newton['iterations']:3d} "
            f"{ours['likelihood'] - theirs['likelihood']:12.1e}"
            f"{newton['likelihood'] - theirs['likelihood']:9.1e}"
            f"  {seconds['theirs']:.2f} {seconds['ours']:.3f} {newton['seconds']:.3f}",
            flush=True,
        )
    total = {
        who: sum(np.median(record["seconds"][who]) for record in found.values())
        for who in ("theirs", "ours")
    }
    print(f"all: theirs {total['theirs']:.1f} s, ours {total['ours']:.1f} s")
    lower = [
        name
        for name, record in found.items()
        if record["ends"]["ours"]["likelihood"] < record["ends"]["theirs"]["likelihood"] - LOWER
    ]
    print("ours ends lower:", ", ".join(lower) or "nowhere")
    if not only:
        write_record({"machine": machine(), "fits": found}, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="rounds to time (default 3)")
    parser.add_argument("--only", nargs="*", default=[], help="fits to run; nothing is recorded")
    parser.add_argument("--record", type=Path, default=RECORD, help="file to write")
    parser.add_argument("--study", type=int, default=0, help="random models to fit; no times")
    options = parser.parse_args()
    if options.study:
        study(range(options.study))
    else:
        main(options.repeats, options.only, options.record)
