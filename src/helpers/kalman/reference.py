r"""The Kalman filter and three ways to its gradient, in NumPy: readable before fast.

1. :func:`reverse`: the reverse recursion (Parellier, Barrau and Bonnabel 2023, Speeding-up
   backpropagation of gradients through the Kalman filter via closed-form expressions,
   doi:10.1109/TAC.2023.3297879), extended to all arrays and to every output of the filter.
2. :func:`smoother_form`: for the log-likelihood alone, the disturbance smoother (de Jong 1988,
   doi:10.1093/biomet/75.3.594; Koopman and Shephard 1992, doi:10.1093/biomet/79.4.823).
3. :func:`forward_sensitivities`: the filter differentiated forwards (Gupta and Mehra 1974,
   doi:10.1109/TAC.1974.1100714).

They share nothing but the filter, and the tests hold them to each other.  The lines of the step
itself stand in :mod:`helpers.kalman.recursions`, for every engine.  All of it also takes complex
arrays, for the complex step.

:func:`loglike_and_grad` puts the square-root start (:mod:`helpers.kalman.square_root`) in front
where P0 calls for it.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from helpers.kalman import recursions, square_root
from helpers.kalman.recursions import symmetric
from helpers.statespace import (
    STATIC,
    SYMMETRIC,
    Gradients,
    StateSpace,
    _as_numbers,
    _check_finite,
    check_data,
    check_weights,
)


class FilterOutputs(
    namedtuple("FilterOutputs", "a_filt a_pred y_hat P_filt P_pred F l", defaults=[None] * 7)
):
    """The outputs of the filter, or their cotangents (None for zero).

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


# What a step's update starts from and computes; Z has zeros in the rows that are missing.
Step = namedtuple("Step", "o a P Z y_hat F l w u C_inv S Kf G a_filt P_filt")
# What one step gives to the gradients of y and of c, d, T, Z, H and W = R Q R'.
StepGradients = namedtuple("StepGradients", "y c d T Z H W")


class Filtered(namedtuple("Filtered", "out w u C_inv S Kf G Z observed")):
    """The filter's outputs, and what its backward passes need.

    Parameters
    ----------
    out : FilterOutputs
    w, u : array (n, p)
        C^-1 v and F^-1 v, with v the innovation and C C' = F.
    C_inv : array (n, p, p)
        C^-1; zero in the rows and columns of missing components.
    S : array (n, p, m)
        C^-1 Z.
    Kf : array (n, m, p)
        Filter gain P Z' F^-1.
    G : array (n, p, m)
        C^-1 Z P.
    Z : array (n, p, m)
        Design, its rows zero where y is missing.
    observed : array (n, p) of bool
    """

    @property
    def F_inv(self) -> np.ndarray:  # noqa: N802
        """F^-1 (n, p, p); zero in the rows and columns of missing components."""
        return np.swapaxes(self.C_inv, -1, -2) @ self.C_inv

    @property
    def J(self) -> np.ndarray:  # noqa: N802
        """I - Kf Z (n, m, m)."""
        return np.eye(self.S.shape[-1]) - np.swapaxes(self.G, -1, -2) @ self.S

    def at(self, t: int) -> Step:
        """Step t, as its pullback takes it."""
        out, Z, o = self.out, self.Z, self.observed
        first = o, out.a_pred, out.P_pred, Z, out.y_hat, out.F, out.l, self.w, self.u
        last = self.C_inv, self.S, self.Kf, self.G, out.a_filt, out.P_filt
        return Step(*(X[t] for X in (*first, *last)))


def kalman_filter(y, model: StateSpace, first: int = 0) -> Filtered:
    """Run the filter over a series, gaps and time-varying arrays included.

    Parameters
    ----------
    y : array (n, p)
        NaN marks a gap.
    model : StateSpace
    first : int
        The number of the first step, for messages.

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
    n, dtype, observed = len(y), y.dtype, ~np.isnan(y)
    y, o = np.where(observed, y, 0), observed.astype(dtype)
    c, d, T, Z, H, W = (model.over_time(name, n) for name in "cdTZHW")
    d, Z = np.where(observed, d, 0), np.where(observed[:, :, np.newaxis], Z, 0)
    H, I_p = np.where(_pairs(observed), _symmetric(H), 0), np.eye(model.p, dtype=dtype)
    a, P, steps = model.a0, symmetric(model.P0), []
    for t in range(n):
        try:
            steps.append(update_step(y[t], o[t], a, P, d[t], Z[t], H[t], I_p))
        except np.linalg.LinAlgError:
            raise _not_positive_definite(first + t) from None
        a, P = recursions.predict(steps[t].a_filt, steps[t].P_filt, c[t], T[t], W[t])
    x = Step(*(np.stack(X).astype(dtype, copy=False) for X in zip(*steps, strict=True)))
    out = FilterOutputs(x.a_filt, x.a, x.y_hat, x.P_filt, x.P, x.F, x.l)
    return Filtered(out, x.w, x.u, x.C_inv, x.S, x.Kf, x.G, x.Z, observed)


def update_step(y, o, a, P, d, Z, H, I_p) -> Step:
    """A step's update, in any engine, from the predicted mean and covariance.

    y, d, Z and H have zeros where a component is missing, ``o`` (p,) has ones where it is not.
    """
    F, logdet, C_inv, S, Kf, G, P_filt = recursions.factor(o, P, Z, H, I_p)
    y_hat, w, u, a_filt, l = recursions.update(y, o, a, d, Z, logdet, C_inv, G)
    return Step(o, a, P, Z, y_hat, F, l, w, u, C_inv, S, Kf, G, a_filt, P_filt)


def pull_step(x: Step, T, a_bar, P_bar, bar: FilterOutputs):
    """A step's pullback, in any engine: its gradients, and the cotangents of its a and P.

    From those of the next step's and ``bar``, those of the step's outputs, symmetric where they
    are: numbers will do for zeros, and None for that of y_hat if F has none either.
    """
    T_bar, s, Pt = recursions.pull_predict(a_bar, P_bar, T, x.a_filt, P_bar @ T @ x.P_filt)
    s, Pt = s + bar.a_filt, Pt + bar.P_filt
    e, Z_bar, H_bar, a_before, P_before = recursions.pull_update(
        s, Pt, bar.l, x.w, x.u, x.C_inv, x.S, x.Kf, x.G, x.a_filt, x.P_filt @ s, Pt @ x.P_filt
    )
    d_bar, a_before, P_before = e, a_before + bar.a_pred, P_before + bar.P_pred
    if bar.y_hat is not None:
        F_bar = recursions.outer(x.o, x.o) * bar.F
        more = recursions.pull_observed(x.o * bar.y_hat, F_bar, x.a, x.P, x.Z)
        d_bar, Z_bar, H_bar = e + more[0], Z_bar + more[1], H_bar + more[2]
        a_before, P_before = a_before + more[3], P_before + more[4]
    # eq-ten-c: c and W have the cotangents of the next mean and covariance.
    return StepGradients(-e, a_bar, d_bar, T_bar, Z_bar, H_bar, P_bar), a_before, P_before


def _not_positive_definite(t: int) -> np.linalg.LinAlgError:
    return np.linalg.LinAlgError(
        f"F = Z P Z' + H is not positive definite at step {t} (counted from 0); "
        "is a covariance negative, or an observation known in advance (H = P = 0) or by the others?"
    )


def loglike(y, model: StateSpace) -> float:
    """Log-likelihood of a series: :func:`helpers.kalman.loglike` with ``method="reference"``.

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError
        As :func:`kalman_filter`.
    """
    return _filter_in_parts(check_data(y, model), model)[0].sum()


def loglike_and_grad(y, model: StateSpace, weights=None) -> tuple[float, np.ndarray, Gradients]:
    """Log-likelihood of a series and its gradient with respect to everything.

    Parameters
    ----------
    y : array (n, p)
        NaN marks a gap.
    model : StateSpace
    weights : array (n,), optional
        Weights of the steps in the log-likelihood; ones if None.

    Returns
    -------
    value, dy, gradients
        As :func:`helpers.kalman.loglike_and_grad`.

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError
        As :func:`kalman_filter`.
    """
    y = check_data(y, model)
    l, (steps, B_t), filtered = _filter_in_parts(y, model)
    n, k = len(l), len(steps)
    g = np.ones_like(l) if weights is None else check_weights(weights, n)
    T = model.over_time("T", n)
    r, Pi = np.zeros(model.m, l.dtype), np.zeros((model.m, model.m), l.dtype)
    per_step = []
    if filtered and weights is None:
        r, Pi, per_step = _pull_smoother(T[k:], filtered)
    elif filtered:
        bar = _complete(FilterOutputs(l=g[k:]), filtered.out)
        r, Pi, per_step = _pull_outputs(T[k:], filtered, bar)
    if k:
        columns = np.arange(model.m)
        carried = square_root.carry(r, Pi, B_t, columns)
        for t in reversed(range(k)):
            c_bar, W_bar = carried.r, carried.Pi
            T_t = square_root.listed(np.ascontiguousarray(T[t].T))
            e, *bars, carried = square_root.pull_step(steps[t], carried, g[t], T_t, columns)
            per_step.insert(0, StepGradients(-e, c_bar, e, *bars, W_bar))
        r, Pi = square_root.at_the_start(carried, symmetric(model.P0))
    return (g * l).sum(), *_accumulate(model, r, Pi, per_step)


def _filter_in_parts(y, model: StateSpace):
    """The log-likelihood of each step (n,), the steps in roots, and the filter over the others.

    The steps in roots come with the root that follows them: ([], None) where P0 is not vague. The
    filter is None where they are all the steps there are.
    """
    try:
        filtered = kalman_filter(y, model)
    except np.linalg.LinAlgError:  # F of several series is singular, too, where P0 is too vague
        if model.p == 1 or np.iscomplexobj(model.P0):
            raise
    else:
        if not _loses_digits(filtered, model):
            return filtered.out.l, ([], None), filtered
    y = check_data(y, model)
    n, observed = len(y), ~np.isnan(y)
    arrays, l = (model.over_time(name, n) for name in "cdTZHW"), np.empty(n, y.dtype)
    steps, a, P, B_t, good = square_root.filter_roots(
        np.where(observed, y, 0), observed.astype(y.dtype), model.a0, symmetric(model.P0),
        *arrays, l, np.arange(model.m),
    )  # fmt: skip
    k = len(steps)
    if not good:
        raise _not_positive_definite(k)
    if k == n:
        return l, (steps, B_t), None
    later = {name: X[k:] if name in model.time_varying else X for name, X in model.asdict().items()}
    filtered = kalman_filter(y[k:], StateSpace(**(later | {"a0": a, "P0": P})), k)
    l[k:] = filtered.out.l
    return l, (steps, B_t), filtered


def _loses_digits(filtered: Filtered, model: StateSpace) -> bool:
    """Whether the first steps took nearly all of some predicted variance: P0 was vague."""
    if np.iscomplexobj(filtered.w):  # the root of a singular matrix admits no complex step
        return False
    before = np.diagonal(filtered.out.P_pred, axis1=1, axis2=2)
    after = np.concatenate([before[1:], np.diagonal(filtered.out.P_filt[-1:], axis1=1, axis2=2)])
    first = np.roll(np.cumsum(filtered.observed.sum(axis=1)), 1)
    first[0] = 0
    watched = first < square_root.WATCHED * before.shape[1]
    fell = (after < square_root.LOST * np.maximum.accumulate(before))[watched].any(axis=0)
    P0, T, W = filtered.out.P_pred[0], model.in_time["T"], model.in_time["W"]
    past = [square_root.is_past(i, P0, T, W) for i in np.flatnonzero(fell)]
    return not all(past) and not square_root.was_known(P0, symmetric(W[0]))


def reverse(
    model: StateSpace, filtered: Filtered, bar: FilterOutputs
) -> tuple[np.ndarray, Gradients]:
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
    gradients : Gradients
        As in :func:`loglike_and_grad`.

    Raises
    ------
    ValueError
        If a cotangent's shape is not its output's.
    """
    T = model.over_time("T", len(filtered.u))
    return _accumulate(model, *_pull_outputs(T, filtered, _complete(bar, filtered.out)))


def _pull_outputs(T, filtered: Filtered, bar: FilterOutputs):
    """The cotangents of a0 and P0, and the gradients of each step, from those of all outputs."""
    m = T.shape[-1]
    a_bar, P_bar, per_step = np.zeros(m, T.dtype), np.zeros((m, m), T.dtype), []
    for t in reversed(range(len(T))):
        of_step = FilterOutputs(*(X[t] for X in bar))
        found, a_bar, P_bar = pull_step(filtered.at(t), T[t], a_bar, P_bar, of_step)
        per_step.append(found)
    return a_bar, P_bar, per_step[::-1]


def smoother_form(model: StateSpace, filtered: Filtered) -> tuple[np.ndarray, Gradients]:
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
    gradients : Gradients
        As in :func:`loglike_and_grad`.
    """
    T = model.over_time("T", len(filtered.u))
    return _accumulate(model, *_pull_smoother(T, filtered))


def _pull_smoother(T, filtered: Filtered):
    """The gradients of a0, of P0, and of each step."""
    m, dtype, per_step = T.shape[-1], filtered.u.dtype, []
    r, N = np.zeros(m, dtype), np.zeros((m, m), dtype)
    for t in reversed(range(len(T))):
        x, c_bar = filtered.at(t), r
        e, *bars, r, N = recursions.pull_smooth(
            r, N, T[t], x.Z, x.u, x.C_inv, x.Kf, x.a_filt, T[t] @ x.P_filt
        )
        per_step.append(StepGradients(-e, c_bar, e, *bars))
    return r, (np.outer(r, r) - N) / 2, per_step[::-1]


def forward_sensitivities(
    y, model: StateSpace, directions: dict[str, np.ndarray]
) -> tuple[float, np.ndarray]:
    """Form 3: the filter differentiated forwards, along several directions at once.

    Parameters
    ----------
    y, model, directions
        As :func:`helpers.kalman.hessian.hessian_vector`.

    Returns
    -------
    value : float
        The log-likelihood.
    slopes : array (k,)
        Its derivative along each direction.

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError
        As there.
    """
    filtered = kalman_filter(y, model)
    dot = moves_in_time(y, model, check_directions(y, model, directions))
    T, F_inv = model.over_time("T", len(filtered.u)), filtered.F_inv
    da, dP, both = dot["a0"], dot["P0"], _pairs(filtered.observed)
    slopes = np.zeros(len(da), F_inv.dtype)
    for t in range(len(T)):
        o, a, P, Z, *_, u, _, _, Kf, _, a_filt, P_filt = filtered.at(t)
        # Changes of the step's arrays (k, ...).
        dy, dc, dd, dT, dZ, dH, dW = (
            dot[x][:, t if dot[x].shape[1] > 1 else 0] for x in StepGradients._fields
        )
        dZ = dZ * o[:, np.newaxis]
        dM = dP @ Z.T + P @ dZ.mT
        dF = _symmetric(2 * dZ @ P @ Z.T + Z @ dP @ Z.T + dH * both[t])
        dv = (dy - dd) * o - dZ @ a - da @ Z.T
        du = (dv - dF @ u) @ F_inv[t]
        slopes += (dF @ u / 2 - dv) @ u - np.einsum("ij,kji->k", F_inv[t], dF) / 2
        da_filt = da + dM @ u + du @ (P @ Z.T).T
        dP_filt = dP + Kf @ dF @ Kf.T - 2 * _symmetric(dM @ Kf.T)
        da = dT @ a_filt + da_filt @ T[t].T + dc
        dP = 2 * _symmetric(dT @ P_filt @ T[t].T) + T[t] @ dP_filt @ T[t].T + dW
    return filtered.out.l.sum(), slopes


def sensitivity_gradient(y, model: StateSpace) -> tuple[float, np.ndarray, Gradients]:
    """The whole gradient by form 3: one direction for every entry of every array.

    Parameters and returns as in :func:`loglike_and_grad`.  The cost grows with the number of
    entries: this is a check, not a method.
    """
    y = check_data(y, model)
    gradients = {}
    for name, X in {"y": y, **model.asdict()}.items():
        units = np.eye(X.size, dtype=X.dtype).reshape(X.size, *X.shape)
        value, slopes = forward_sensitivities(y, model, {name: units})
        gradients[name] = slopes.reshape(X.shape)
    dy = gradients.pop("y")
    return value, dy, Gradients(**gradients)


def _symmetric(X: np.ndarray) -> np.ndarray:
    """The symmetric part of the last two axes."""
    return (X + X.mT) / 2


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
        arrays.append(_symmetric(given) if X.ndim == 3 else given)
    return FilterOutputs(*arrays)


def _accumulate(model: StateSpace, a0_bar, P0_bar, per_step) -> tuple[np.ndarray, Gradients]:
    """dy and the gradients of the model's arrays, from those of the steps."""
    X = StepGradients(*(np.stack(X) for X in zip(*per_step, strict=True)))._asdict()
    X |= pull_shocks(model.in_time["R"], model.in_time["Q"], X.pop("W"))
    sums = {x: G if x in ("y", *model.time_varying) else G.sum(axis=0) for x, G in X.items()}
    return sums.pop("y"), Gradients(a0=a0_bar, P0=P0_bar, **sums)


def pull_shocks(R, Q, W_bar) -> dict:
    """The gradients of R and Q over time from that of W = R Q R', which is symmetric."""
    WR = W_bar @ R
    return {"R": WR @ (Q + Q.mT), "Q": _symmetric(R.mT @ WR)}


def check_directions(y, model: StateSpace, directions: dict[str, np.ndarray]) -> dict:
    """Directions as finite arrays (k, ...) of the shapes of y and the model's arrays, or an error.

    Those of covariances are their symmetric parts; in the gaps of y there is no direction.
    """
    arrays, found = {"y": check_data(y, model), **model.asdict()}, {}
    for name, X_dot in directions.items():
        if name not in arrays:
            raise ValueError(f"no array is called {name!r}: expected one of {', '.join(arrays)}")
        X_dot = _as_numbers(f"directions[{name!r}]", X_dot)
        k = len(next(iter(found.values()), X_dot[..., np.newaxis]))
        shape = (k, *arrays[name].shape)
        if X_dot.shape != shape:
            raise ValueError(f"directions of {name} have shape {X_dot.shape}, expected {shape}")
        if name == "y":
            X_dot = np.where(np.isnan(arrays["y"]), 0, X_dot)
        _check_finite(f"directions[{name!r}]", X_dot)
        found[name] = _symmetric(X_dot) if name in SYMMETRIC else X_dot
    if not found or not k:
        raise ValueError("directions is empty: there is nothing to move along")
    return found


def moves_in_time(y, model: StateSpace, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Checked directions of all ten, and of W, with a time axis of length 1 or n behind k."""
    k, shapes = len(next(iter(given.values()))), {x: X.shape for x, X in model.asdict().items()}
    zeros = {x: np.zeros((k, *shape)) for x, shape in (shapes | {"y": np.shape(y)}).items()}
    dot = {x: with_time(model, x, dX) for x, dX in (zeros | given).items()}
    W = moves_of_W(model, given) if of_shocks(given) else np.zeros((k, 1, model.m, model.m))
    return dot | {"W": W}


def with_time(model: StateSpace, name: str, dX):
    """Directions of an array, with a time axis of length 1 where it does not vary."""
    return dX if name in ("y", *STATIC, *model.time_varying) else dX[:, np.newaxis]


def of_shocks(names) -> bool:
    """Whether R or Q is among them."""
    return "R" in names or "Q" in names


def moves_of_W(model: StateSpace, given):  # noqa: N802
    """Directions (k, t, m, m) of W = R Q R' from those of R or Q."""
    R, Q, moves = model.in_time["R"], _symmetric(model.in_time["Q"]), 0.0
    turned = np.swapaxes(R, -1, -2)
    if "Q" in given:
        moves = R @ with_time(model, "Q", given["Q"]) @ turned
    if "R" in given:
        moves = moves + 2 * _symmetric(with_time(model, "R", given["R"]) @ Q @ turned)
    return moves
