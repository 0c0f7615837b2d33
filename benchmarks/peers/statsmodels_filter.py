"""statsmodels: the likelihood in Cython, and what its models offer for the gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import numpy as np

from helpers.kalman import StateSpace
from helpers.statespace import NAMES

LONG_NAMES = {
    "c": "state_intercept", "d": "obs_intercept", "T": "transition", "Z": "design",
    "R": "selection", "H": "obs_cov", "Q": "state_cov",
}  # fmt: skip


def forward(y: np.ndarray, model: StateSpace) -> Callable:
    """The log-likelihood alone, no more than the filter in Cython."""
    from statsmodels.tsa.statespace.kalman_filter import KalmanFilter

    kf = KalmanFilter(model.p, model.m, model.r)
    kf.bind(np.array(y, order="C"))
    for name, long_name in LONG_NAMES.items():
        X = getattr(model, name)
        kf[long_name] = X[:, np.newaxis] if X.ndim == 1 else X
    kf.initialize_known(np.array(model.a0), np.array(model.P0))
    return lambda: (kf.loglike(), {})


def score(y: np.ndarray, model: StateSpace, *, method: str) -> Callable:
    """The gradient of a model whose parameters are the entries of all nine arrays."""
    from statsmodels.tsa.statespace.mlemodel import MLEModel

    shapes = {name: X.shape for name, X in model.asdict().items()}
    sizes = [int(np.prod(shape)) for shape in shapes.values()]

    def arrays(params):
        pieces = np.split(params, np.cumsum(sizes)[:-1])
        return {n: x.reshape(shapes[n]) for n, x in zip(NAMES, pieces, strict=True)}

    class Entries(MLEModel):
        start_params = np.concatenate([X.ravel() for X in model.asdict().values()])

        def update(self, params, **kwargs):
            params = super().update(params, **kwargs)
            given = arrays(params)
            for name, long_name in LONG_NAMES.items():
                X = given[name]
                self.ssm[long_name] = X[:, np.newaxis] if X.ndim == 1 else X
            self.ssm.initialize_known(given["a0"], given["P0"])

    entries = Entries(np.array(y, order="C"), k_states=model.m, k_posdef=model.r)
    point = entries.start_params
    options = {"approx_complex_step": True} if method == "approx" else {}

    def call():
        slopes = entries.score(point, method=method, transformed=True, **options)
        return None, arrays(slopes)

    return call


def natural_scores(label: str, y: np.ndarray, model: StateSpace) -> dict[str, Callable]:
    """The scores of statsmodels' own version of a model, with respect to its own few parameters."""
    from statsmodels.tsa.statespace.structural import UnobservedComponents
    from statsmodels.tsa.statespace.varmax import VARMAX

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a VARMA may not be identified
        if label.startswith("VARMAX"):
            theirs = VARMAX(y, order=(1, 1), trend="n")
            params = theirs.start_params
        elif label.startswith("local level"):
            theirs = UnobservedComponents(y[:, 0], "local level")
            params = np.array([model.H[0, 0], model.Q[0, 0]])
        else:
            theirs = UnobservedComponents(y[:, 0], "local linear trend", seasonal=model.m - 1)
            params = np.array([model.H[0, 0], *np.diag(model.Q)])
    if not label.startswith("VARMAX"):
        theirs.ssm.initialize_known(np.array(model.a0), np.array(model.P0))
    return {
        "statsmodels score": partial(theirs.score, params, approx_complex_step=True),
        "statsmodels score, Harvey": partial(
            theirs.score, params, method="harvey", approx_complex_step=True
        ),
        "statsmodels, own value": partial(theirs.loglike, params),
    }
