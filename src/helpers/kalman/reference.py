r"""The Kalman filter and three ways to its gradient, in NumPy: readable before fast.

1. :func:`reverse`: the reverse recursion (Parellier, Barrau and Bonnabel 2023, Speeding-up
   backpropagation of gradients through the Kalman filter via closed-form expressions,
   doi:10.1109/TAC.2023.3297879), extended to all arrays and to every output of the filter.
2. :func:`smoother_form`: for the log-likelihood alone, the disturbance smoother (de Jong 1988,
   doi:10.1093/biomet/75.3.594; Koopman and Shephard 1992, doi:10.1093/biomet/79.4.823).
3. :func:`forward_sensitivities`: the filter differentiated forwards (Gupta and Mehra 1974,
   doi:10.1109/TAC.1974.1100714).

They share nothing but the filter, and the tests hold them to each other.  Everything but the
check for positive definiteness also takes complex arrays, for the complex step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from helpers.checks import symmetrize
from helpers.kalman.model import NAMES, SHAPES, SYMMETRIC, StateSpace, check_data

LOG_2PI = np.log(2 * np.pi)


class FilterOutputs(NamedTuple):
    """What the filter tells its user; or the cotangents of all that (None for zero).

    Where a component of y is missing, its entry of ``y_hat`` and its row and column of ``F`` are
    zero: nothing was predicted for it.

    Parameters
    ----------
    a_filt : array (n, m)
        Filtered mean, given y up to and including step t.
    a_pred : array (n, m)
        Predicted mean, given y before step t; the first is a0.
    y_hat : array (n, p)
        Predicted observation.
    P_filt : array (n, m, m)
        Filtered covariance.
    P_pred : array (n, m, m)
        Predicted covariance; the first is P0.
    F : array (n, p, p)
        Covariance of the innovation.
    l : array (n,)
        Log-likelihood of each step.
    """

    a_filt: np.ndarray | None = None
    a_pred: np.ndarray | None = None
    y_hat: np.ndarray | None = None
    P_filt: np.ndarray | None = None
    P_pred: np.ndarray | None = None
    F: np.ndarray | None = None
    l: np.ndarray | None = None


class Filtered(NamedTuple):
    """The filter's outputs, and what its backward passes need.

    Parameters
    ----------
    out : FilterOutputs
    u : array (n, p)
        F^-1 v, with v the innovation.
    F_inv : array (n, p, p)
        F^-1; zero in the rows and columns of missing components.
    Kf : array (n, m, p)
        Filter gain P Z' F^-1.
    Z : array (n, p, m)
        Design, its rows zero where y is missing.
    observed : array (n, p) of bool
    """

    out: FilterOutputs
    u: np.ndarray
    F_inv: np.ndarray
    Kf: np.ndarray
    Z: np.ndarray
    observed: np.ndarray


def kalman_filter(y, model: StateSpace) -> Filtered:
    """Run the filter over a series, gaps and time-varying arrays included.

    Parameters
    ----------
    y : array (n, p)
        NaN marks a gap.
    model : StateSpace

    Returns
    -------
    Filtered

    Raises
    ------
    ValueError
        If ``y`` does not fit the model.
    numpy.linalg.LinAlgError
        If F is not positive definite at some step, which the message names.
    """
    y = check_data(y, model)
    n, m, p = len(y), model.m, model.p
    observed = ~np.isnan(y)
    c, d, T, Z, R, H, Q = (model.over_time(name, n) for name in NAMES[2:])
    # A missing component predicts nothing and is worth nothing: zero its row of Z, d, H and y.
    Z = Z * observed[:, :, np.newaxis]
    d = d * observed
    H = H * _pairs(observed)
    y = np.where(observed, y, 0)
    W = R @ Q @ np.swapaxes(R, -1, -2)

    dtype = y.dtype
    a_filt, a_pred = np.empty((n, m), dtype), np.empty((n, m), dtype)
    P_filt, P_pred = np.empty((n, m, m), dtype), np.empty((n, m, m), dtype)
    y_hat, u, l = np.empty((n, p), dtype), np.empty((n, p), dtype), np.empty(n, dtype)
    F, F_inv, Kf = (np.empty((n, *shape), dtype) for shape in [(p, p), (p, p), (m, p)])

    a, P = model.a0, symmetrize(model.P0)
    for t in range(n):
        a_pred[t], P_pred[t] = a, P
        y_hat[t] = Z[t] @ a + d[t]  # eq-filter-update
        v = y[t] - y_hat[t]
        F[t] = symmetrize(Z[t] @ P @ Z[t].T + H[t])
        F_inv[t], logdet_F = _invert(F[t], observed[t], t)
        u[t] = F_inv[t] @ v
        Kf[t] = P @ Z[t].T @ F_inv[t]
        a_filt[t] = a + Kf[t] @ v
        # Joseph's form of P - Kf Z P: a sum of squares, not a difference of large numbers.
        I_KZ = np.eye(m) - Kf[t] @ Z[t]  # in float64, whatever the model: it is what loses digits
        P_filt[t] = symmetrize(I_KZ @ P @ I_KZ.T + Kf[t] @ H[t] @ Kf[t].T)
        l[t] = -(observed[t].sum() * LOG_2PI + logdet_F + v @ u[t]) / 2  # eq-filter-loglik
        a = T[t] @ a_filt[t] + c[t]  # eq-filter-predict
        P = symmetrize(T[t] @ P_filt[t] @ T[t].T + W[t])
    out = FilterOutputs(a_filt, a_pred, y_hat, P_filt, P_pred, F, l)
    return Filtered(out, u, F_inv, Kf, Z, observed)


def _invert(F: np.ndarray, observed: np.ndarray, t: int) -> tuple[np.ndarray, np.ndarray]:
    """F^-1 (zero for missing components) and log|F| (of the observed ones)."""
    missing = np.diag(~observed)
    F = F + missing
    if np.iscomplexobj(F):
        phase, log_size = np.linalg.slogdet(F)  # Cholesky would conjugate
        return np.linalg.inv(F) - missing, log_size + np.log(phase)
    try:
        C_inv = np.linalg.inv(np.linalg.cholesky(F))
    except np.linalg.LinAlgError:
        raise np.linalg.LinAlgError(
            f"F = Z P Z' + H is not positive definite at step {t} (counted from 0); "
            "is a covariance negative, or an observation known exactly in advance (H = P = 0)?"
        ) from None
    return C_inv.T @ C_inv - missing, -2 * np.log(np.diag(C_inv)).sum()


def loglike(y, model: StateSpace) -> float:
    """Log-likelihood of a series.

    Parameters
    ----------
    y : array (n, p)
        NaN marks a gap.
    model : StateSpace

    Returns
    -------
    float

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError
        As :func:`kalman_filter`.
    """
    return kalman_filter(y, model).out.l.sum()


def loglike_and_grad(y, model: StateSpace) -> tuple[float, np.ndarray, StateSpace]:
    """Log-likelihood of a series and its gradient with respect to everything.

    Parameters
    ----------
    y : array (n, p)
        NaN marks a gap.
    model : StateSpace

    Returns
    -------
    value : float
    dy : array (n, p)
        Zero in the gaps.
    gradients : StateSpace
        One array for each of the model's, of the same shape: per step where the model's array
        varies with time.  Those of P0, H and Q are symmetric.

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError
        As :func:`kalman_filter`.
    """
    filtered = kalman_filter(y, model)
    dy, gradients = smoother_form(model, filtered)
    return filtered.out.l.sum(), dy, gradients


def reverse(
    model: StateSpace, filtered: Filtered, bar: FilterOutputs
) -> tuple[np.ndarray, StateSpace]:
    r"""Form 1: the reverse recursion, for any scalar function of the filter's outputs.

    Parameters
    ----------
    model : StateSpace
    filtered : Filtered
        Of :func:`kalman_filter` on this model.
    bar : FilterOutputs
        Cotangents: the gradient of the scalar with respect to each output of the filter.  For the
        log-likelihood, ``FilterOutputs(l=np.ones(n))``.

    Returns
    -------
    dy : array (n, p)
    gradients : StateSpace
        As in :func:`loglike_and_grad`.

    Raises
    ------
    ValueError
        If a cotangent's shape is not its output's.
    """
    out, u, F_inv, Kf, Z, observed = filtered
    bar = _complete(bar, out)
    (n, p), dtype = u.shape, u.dtype
    T = model.over_time("T", n)

    per_step = _per_step(model, n, dtype)
    dy = np.empty((n, p), dtype)
    a_bar, P_bar = np.zeros(model.m, dtype), np.zeros((model.m, model.m), dtype)
    for t in reversed(range(n)):
        per_step["c"][t], per_step["W"][t] = a_bar, P_bar  # eq-ten-c
        per_step["T"][t] = np.outer(a_bar, out.a_filt[t]) + 2 * P_bar @ T[t] @ out.P_filt[t]
        a_filt_bar = T[t].T @ a_bar + bar.a_filt[t]  # eq-backprop-predict-a
        P_filt_bar = symmetrize(T[t].T @ P_bar @ T[t]) + bar.P_filt[t]  # eq-backprop-predict-P

        w, I_KZ = Kf[t].T @ a_filt_bar, np.eye(model.m) - Kf[t] @ Z[t]
        v_bar = w - bar.l[t] * u[t]
        dl_dF = bar.l[t] * (np.outer(u[t], u[t]) - F_inv[t]) / 2
        per_step["H"][t] = (  # eq-backprop-H
            dl_dF + bar.F[t] + symmetrize(Kf[t].T @ P_filt_bar @ Kf[t] - np.outer(w, u[t]))
        )
        dy[t], per_step["d"][t] = v_bar, bar.y_hat[t] - v_bar
        per_step["Z"][t] = (  # eq-ten-Z-filtered
            np.outer(u[t], out.P_filt[t] @ a_filt_bar)
            - 2 * Kf[t].T @ P_filt_bar @ out.P_filt[t]
            - bar.l[t] * Kf[t].T
            - np.outer(v_bar, out.a_filt[t])
            + np.outer(bar.y_hat[t], out.a_pred[t])
            + 2 * bar.F[t] @ Z[t] @ out.P_pred[t]
        )
        # Products with I - Kf Z, not their expansion: its terms cancel where P_pred is large.
        # And symmetric at every step: an antisymmetric part, once there, can grow without bound.
        a_filt_bar = I_KZ.T @ a_filt_bar
        a_bar = a_filt_bar + Z[t].T @ (bar.l[t] * u[t] + bar.y_hat[t]) + bar.a_pred[t]
        P_bar = bar.P_pred[t] + symmetrize(  # eq-backprop-update-P
            I_KZ.T @ P_filt_bar @ I_KZ
            + np.outer(a_filt_bar, Z[t].T @ u[t])
            + Z[t].T @ (dl_dF + bar.F[t]) @ Z[t]
        )
    return dy * observed, _gather(model, a_bar, P_bar, per_step, observed)


def smoother_form(model: StateSpace, filtered: Filtered) -> tuple[np.ndarray, StateSpace]:
    r"""Form 2: the gradient of the log-likelihood by the disturbance smoother's recursions.

    With equal weights on all steps the adjoints of the predicted mean and covariance are
    :math:`\bar a_t = r_{t-1}` and :math:`\bar P_t = \tfrac12 (r_{t-1} r_{t-1}^\top - N_{t-1})`.

    Parameters
    ----------
    model : StateSpace
    filtered : Filtered
        Of :func:`kalman_filter` on this model.

    Returns
    -------
    dy : array (n, p)
    gradients : StateSpace
        As in :func:`loglike_and_grad`.
    """
    out, u, F_inv, Kf, Z, observed = filtered
    (n, _), dtype = u.shape, u.dtype
    T = model.over_time("T", n)

    per_step = _per_step(model, n, dtype)
    r, N = np.zeros(model.m, dtype), np.zeros((model.m, model.m), dtype)
    for t in reversed(range(n)):
        K = T[t] @ Kf[t]
        L = T[t] - K @ Z[t]
        e = u[t] - K.T @ r
        D = symmetrize(F_inv[t] + K.T @ N @ K)
        r_next, r = r, Z[t].T @ e + T[t].T @ r  # eq-adjoint-r-recursion
        N_next, N = N, symmetrize(Z[t].T @ F_inv[t] @ Z[t] + L.T @ N @ L)  # eq-adjoint-N
        # a_pred + P_pred r, and L P_pred below, but from the filtered moments: a vague P0 makes the
        # predicted ones large, and their difference would lose digits.
        a_smooth = out.a_filt[t] + out.P_filt[t] @ (T[t].T @ r_next)

        per_step["c"][t], per_step["d"][t] = r_next, e
        per_step["W"][t] = (np.outer(r_next, r_next) - N_next) / 2  # eq-adjoint-W
        per_step["H"][t] = (np.outer(e, e) - D) / 2  # eq-adjoint-H
        per_step["T"][t] = np.outer(r_next, a_smooth) - N_next @ T[t] @ out.P_filt[t]
        per_step["Z"][t] = np.outer(e, a_smooth) + K.T @ N_next @ T[t] @ out.P_filt[t] - Kf[t].T
    dy = -per_step["d"] * observed
    return dy, _gather(model, r, (np.outer(r, r) - N) / 2, per_step, observed)


def forward_sensitivities(
    y, model: StateSpace, directions: dict[str, np.ndarray]
) -> tuple[float, np.ndarray]:
    """Form 3: the filter differentiated forwards, along several directions at once.

    Parameters
    ----------
    y : array (n, p)
        NaN marks a gap.
    model : StateSpace
    directions : dict of arrays (k, ...)
        For ``"y"`` and each of the model's arrays that moves, k changes of it, each of its shape;
        what is not named stays as it is.

    Returns
    -------
    value : float
        The log-likelihood.
    slopes : array (k,)
        Its derivative along each direction.

    Raises
    ------
    ValueError
        If a direction has an unknown name or a wrong shape; or as :func:`kalman_filter`.
    """
    out, u, F_inv, Kf, Z, observed = kalman_filter(y, model)
    n = len(u)
    dot = _dots(y, model, directions)
    T, R, Q = (model.over_time(name, n) for name in "TRQ")
    both = _pairs(observed)

    def at(name, t):
        """Changes of an array at step t (k, ...), or zero."""
        return dot[name][:, t] if name in dot else 0.0

    da, dP = dot["a0"], dot["P0"]
    slopes = np.zeros(len(da), u.dtype)
    for t in range(n):
        a, P, P_filt = out.a_pred[t], out.P_pred[t], out.P_filt[t]
        dZ = at("Z", t) * observed[t][:, np.newaxis] + np.zeros_like(Z[t])
        dM = dP @ Z[t].T + P @ np.swapaxes(dZ, -1, -2)
        dF = symmetrize(2 * dZ @ P @ Z[t].T + Z[t] @ dP @ Z[t].T + at("H", t) * both[t])
        dv = (at("y", t) - at("d", t)) * observed[t] - dZ @ a - da @ Z[t].T
        du = (dv - dF @ u[t]) @ F_inv[t]
        slopes += (dF @ u[t] / 2 - dv) @ u[t] - np.einsum("ij,kji->k", F_inv[t], dF) / 2
        da_filt = da + dM @ u[t] + du @ (P @ Z[t].T).T
        dP_filt = dP + Kf[t] @ dF @ Kf[t].T - 2 * symmetrize(dM @ Kf[t].T)

        dT, dR = at("T", t) + np.zeros_like(T[t]), at("R", t) + np.zeros_like(R[t])
        da = dT @ out.a_filt[t] + da_filt @ T[t].T + at("c", t)
        dP = 2 * symmetrize(dT @ P_filt @ T[t].T + dR @ Q[t] @ R[t].T)
        dP = dP + T[t] @ dP_filt @ T[t].T + R[t] @ (at("Q", t) + np.zeros_like(Q[t])) @ R[t].T
    return out.l.sum(), slopes


def sensitivity_gradient(y, model: StateSpace) -> tuple[float, np.ndarray, StateSpace]:
    """The whole gradient by form 3: one direction for every entry of every array.

    Parameters and returns as in :func:`loglike_and_grad`.  The cost grows with the number of
    entries: this is a check, not a method.
    """
    y = check_data(y, model)
    gradients = {}
    for name, X in {"y": y, **model.asdict()}.items():
        units = np.eye(X.size, dtype=X.dtype).reshape(X.size, *X.shape)
        units = symmetrize(units) if name in SYMMETRIC else units
        value, slopes = forward_sensitivities(y, model, {name: units})
        gradients[name] = slopes.reshape(X.shape)
    dy = gradients.pop("y")
    return value, dy, StateSpace(**gradients)


def _per_step(model: StateSpace, n: int, dtype) -> dict[str, np.ndarray]:
    """Room for the gradient of each step, by array; W = R Q R' stands for R and Q."""
    dims = {name: SHAPES[name] for name in "cdTZH"} | {"W": ("m", "m")}
    return {
        name: np.empty((n, *(getattr(model, dim) for dim in letters)), dtype)
        for name, letters in dims.items()
    }


def _pairs(observed: np.ndarray) -> np.ndarray:
    """Where both components of a pair are observed: (n, p) -> (n, p, p)."""
    return observed[:, :, np.newaxis] & observed[:, np.newaxis, :]


def _complete(bar: FilterOutputs, out: FilterOutputs) -> FilterOutputs:
    """Cotangents with zeros for None, symmetric where the output is."""
    arrays = []
    for name, given, X in zip(FilterOutputs._fields, bar, out, strict=True):
        given = np.zeros_like(X) if given is None else np.asarray(given)
        if given.shape != X.shape:
            raise ValueError(f"the cotangent of {name} has shape {given.shape}, expected {X.shape}")
        arrays.append(symmetrize(given) if X.ndim == 3 else given)
    return FilterOutputs(*arrays)


def _gather(model, a0_bar, P0_bar, per_step, observed) -> StateSpace:
    """Gradients of the model's arrays from the per-step ones of c, d, T, Z, H and W = R Q R'."""
    n = len(observed)
    R, Q, W_bar = model.over_time("R", n), model.over_time("Q", n), per_step["W"]
    per_step = {
        "c": per_step["c"],
        "d": per_step["d"] * observed,
        "T": per_step["T"],
        "Z": per_step["Z"] * observed[:, :, np.newaxis],
        "R": 2 * W_bar @ R @ Q,
        "H": per_step["H"] * _pairs(observed),
        "Q": symmetrize(np.swapaxes(R, -1, -2) @ W_bar @ R),
    }
    varying = model.time_varying
    sums = {name: X if name in varying else X.sum(axis=0) for name, X in per_step.items()}
    return StateSpace(a0=a0_bar, P0=P0_bar, **sums)


def _dots(y, model: StateSpace, directions: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Directions with a time axis (k, n, ...), those of a0 and P0 always there (k, ...)."""
    y = check_data(y, model)
    arrays, dot = {"y": y, **model.asdict()}, {}
    k = len(next(iter(directions.values()), ()))
    for name, X_dot in directions.items():
        if name not in arrays:
            raise ValueError(f"no array is called {name!r}: expected one of {', '.join(arrays)}")
        X_dot, shape = np.asarray(X_dot), (k, *arrays[name].shape)
        if X_dot.shape != shape:
            raise ValueError(f"directions of {name} have shape {X_dot.shape}, expected {shape}")
        if name in ("y", "a0", "P0") or name in model.time_varying:
            dot[name] = X_dot
        else:
            dot[name] = np.broadcast_to(X_dot[:, np.newaxis], (k, len(y), *shape[1:]))
    dot.setdefault("a0", np.zeros((k, model.m)))
    dot.setdefault("P0", np.zeros((k, model.m, model.m)))
    return dot
