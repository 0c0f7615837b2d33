"""statsmodels: the likelihood in Cython, the gradient from its smoother, and its own score."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from helpers.kalman import StateSpace
from helpers.statespace import NAMES

LONG_NAMES = {
    "c": "state_intercept", "d": "obs_intercept", "T": "transition", "Z": "design",
    "R": "selection", "H": "obs_cov", "Q": "state_cov",
}  # fmt: skip


def bound(representation, y: np.ndarray, model: StateSpace):
    """Their representation (a filter or a smoother) with our arrays in it."""
    theirs = representation(model.p, model.m, model.r)
    theirs.bind(np.array(y, order="C"))
    for name, long_name in LONG_NAMES.items():
        X = getattr(model, name)
        theirs[long_name] = X[:, np.newaxis] if X.ndim == 1 else X
    theirs.initialize_known(np.array(model.a0), np.array(model.P0))
    return theirs


def forward(y: np.ndarray, model: StateSpace, requested: tuple[str, ...] = ()) -> Callable:
    """The log-likelihood alone: the filter in Cython, which Python sets up at each call."""
    from statsmodels.tsa.statespace.kalman_filter import KalmanFilter

    kf = bound(KalmanFilter, y, model)
    return lambda: (kf.loglike(), {})


def smoothed(y: np.ndarray, model: StateSpace, requested: tuple[str, ...] = NAMES) -> Callable:
    """The gradients from what their smoother returns, r and N and the smoothing error, by sums.

    For complete data. The formulas are those of the disturbance smoother (de Jong 1988; Koopman and
    Shephard 1992), as in :func:`helpers.kalman.recursions.pull_smooth`, for all steps at once.
    """
    from statsmodels.tsa.statespace.kalman_smoother import (
        SMOOTHER_DISTURBANCE,
        SMOOTHER_DISTURBANCE_COV,
        SMOOTHER_STATE,
        KalmanSmoother,
    )

    if np.isnan(y).any():
        raise NotImplementedError("the sums are written for complete data")
    states = not {"T", "Z"}.isdisjoint(requested)
    ks = bound(KalmanSmoother, y, model)
    wanted = SMOOTHER_DISTURBANCE | SMOOTHER_DISTURBANCE_COV | (SMOOTHER_STATE if states else 0)
    T, Z, R, Q = model.T, model.Z, model.R, model.Q

    def call():
        out = ks.smooth(smoother_output=wanted)
        # theirs after each step; those before the first stand apart
        r, N = out.scaled_smoothed_estimator.T, out.scaled_smoothed_estimator_cov.transpose(2, 0, 1)
        r_0, N_0 = (
            out.scaled_smoothed_estimator_presample,
            out.scaled_smoothed_estimator_cov_presample,
        )
        e = out.smoothing_error.T
        found = {"a0": r_0, "c": r.sum(axis=0), "d": e.sum(axis=0)}
        found["P0"] = (np.outer(r_0, r_0) - N_0) / 2
        if not {"R", "Q"}.isdisjoint(requested):
            W = (r.T @ r - N.sum(axis=0)) / 2
            found |= {"R": 2 * W @ R @ Q, "Q": R.T @ W @ R}
        if states or "H" in requested:
            F_inv = np.linalg.inv(out.forecasts_error_cov.transpose(2, 0, 1))
            P = out.predicted_state_cov.transpose(2, 0, 1)[:-1]
            K = P @ Z.T @ F_inv
        if "H" in requested:
            TK = T @ K
            D = F_inv + TK.transpose(0, 2, 1) @ N @ TK
            found["H"] = (e.T @ e - D.sum(axis=0)) / 2
        if states:
            Y = N @ T @ out.filtered_state_cov.transpose(2, 0, 1)
            smooth = out.smoothed_state.T
            found["T"] = r.T @ smooth - Y.sum(axis=0)
            Kt = K.transpose(0, 2, 1)
            found["Z"] = e.T @ smooth + (Kt @ T.T @ Y - Kt).sum(axis=0)
        return out.llf_obs.sum(), {name: found[name] for name in requested}

    return call


def score(
    y: np.ndarray, model: StateSpace, requested: tuple[str, ...] = NAMES, *, method: str
) -> Callable:
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
