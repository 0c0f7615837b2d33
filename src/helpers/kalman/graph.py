r"""The Kalman filter as a PyTensor graph: a scan, for PyTensor to differentiate.

:func:`filter_graph` scans over :func:`kalman_step`.  With :func:`closed_form_step` in its place,
each step carries the closed-form pullback of Parellier, Barrau and Bonnabel (2023),
doi:10.1109/TAC.2023.3297879, equations 20-31, extended to all arrays: an ``OpFromGraph`` inside
the scan, as the research notebook behind this book had it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.builders import OpFromGraph
from pytensor.gradient import DisconnectedType

from helpers.kalman.model import NAMES, SHAPES, STATIC
from helpers.kalman.reference import FilterOutputs

LOG_2PI = np.log(2 * np.pi)


def symbolic_model(time_varying: tuple[str, ...] = (), dtype: str = "float64") -> dict:
    """Symbolic y and the nine arrays of a model, by name.

    Parameters
    ----------
    time_varying : tuple of str
        Names, among c, d, T, Z, R, H, Q, that carry a leading time axis.
    dtype : str

    Returns
    -------
    dict of TensorVariable
        In the order y, a0, P0, c, d, T, Z, R, H, Q.

    Raises
    ------
    ValueError
        If a name is not one of those that may vary with time.
    """
    for name in time_varying:
        if name not in SHAPES or name in STATIC:
            raise ValueError(f"{name!r} cannot vary with time; expected some of {NAMES[2:]}")
    ndims = {name: len(dims) + (name in time_varying) for name, dims in SHAPES.items()}
    return {
        name: pt.tensor(name, dtype=dtype, shape=(None,) * ndim)
        for name, ndim in {"y": 2, **ndims}.items()
    }


def kalman_step(y, a, P, c, d, T, Z, H, W) -> list:
    """One update and one prediction.

    Parameters
    ----------
    y : TensorVariable (p,)
        NaN marks a gap.
    a, P : TensorVariable (m,), (m, m)
        Predicted mean and covariance.
    c, d, T, Z, H, W : TensorVariable (m,), (p,), (m, m), (p, m), (p, p), (m, m)
        The model's arrays for this step; W = R Q R'.

    Returns
    -------
    list of TensorVariable
        a_filt (m,), a_next (m,), y_hat (p,), P_filt (m, m), P_next (m, m), F (p, p), l ().
    """
    y, d, Z, H, observed = _mask(y, d, Z, H)
    y_hat = Z @ a + d
    v = y - y_hat
    F = Z @ P @ Z.T + H
    F_chol = pt.linalg.cholesky(F + pt.diag(1 - observed))
    u = pt.linalg.cho_solve((F_chol, True), v)
    Kf = pt.linalg.cho_solve((F_chol, True), Z @ P.T).T
    a_filt = a + Kf @ v
    I_KZ = pt.eye(a.shape[0]) - Kf @ Z
    P_filt = I_KZ @ P @ I_KZ.T + Kf @ H @ Kf.T
    logdet_F = 2 * pt.log(pt.diag(F_chol)).sum()
    l = -(observed.sum() * LOG_2PI + logdet_F + v @ u) / 2
    return [a_filt, T @ a_filt + c, y_hat, P_filt, T @ P_filt @ T.T + W, F, l]


def step_pullback(inputs, outputs, cotangents) -> list:
    """Closed-form pullback of :func:`kalman_step`: its cotangents from those of its outputs.

    Parameters
    ----------
    inputs : list of TensorVariable
        y, a, P, c, d, T, Z, H, W.
    outputs : list of TensorVariable
        Of :func:`kalman_step`.
    cotangents : list of TensorVariable
        One for each output; disconnected ones count as zero.

    Returns
    -------
    list of TensorVariable
        One for each input; those of P, H and W are symmetric.
    """
    y, a, P, _, d, T, Z, H, _ = inputs
    a_filt, _, y_hat, P_filt, _, F, _ = outputs
    a_filt_bar, a_bar, y_hat_bar, P_filt_bar, P_bar, F_bar, l_bar = (
        pt.zeros_like(output) if isinstance(bar.type, DisconnectedType) else bar
        for bar, output in zip(cotangents, outputs, strict=True)
    )
    y, d, Z, H, observed = _mask(y, d, Z, H)
    missing = pt.diag(1 - observed)
    F_inv = pt.linalg.inv(F + missing) - missing
    u = F_inv @ (y - y_hat)
    Kf = P @ Z.T @ F_inv
    P_bar, P_filt_bar = _symmetrize(P_bar), _symmetrize(P_filt_bar)

    T_bar = pt.outer(a_bar, a_filt) + 2 * P_bar @ T @ P_filt
    a_filt_bar = T.T @ a_bar + a_filt_bar
    P_filt_bar = _symmetrize(T.T @ P_bar @ T) + P_filt_bar
    w, I_KZ = Kf.T @ a_filt_bar, pt.eye(a.shape[0]) - Kf @ Z
    v_bar = w - l_bar * u
    dl_dF = l_bar * (pt.outer(u, u) - F_inv) / 2
    F_bar = _symmetrize(F_bar)
    H_bar = dl_dF + F_bar + _symmetrize(Kf.T @ P_filt_bar @ Kf - pt.outer(w, u))
    Z_bar = (
        pt.outer(u, P_filt @ a_filt_bar)
        - 2 * Kf.T @ P_filt_bar @ P_filt
        - l_bar * Kf.T
        - pt.outer(v_bar, a_filt)
        + pt.outer(y_hat_bar, a)
        + 2 * F_bar @ Z @ P
    )
    a_filt_bar = I_KZ.T @ a_filt_bar  # what passes the update
    P_pred_bar = _symmetrize(
        I_KZ.T @ P_filt_bar @ I_KZ + pt.outer(a_filt_bar, Z.T @ u) + Z.T @ (dl_dF + F_bar) @ Z
    )
    return [
        v_bar * observed,
        a_filt_bar + Z.T @ (l_bar * u + y_hat_bar),
        P_pred_bar,
        a_bar,
        (y_hat_bar - v_bar) * observed,
        T_bar,
        Z_bar * observed[:, None],
        H_bar * pt.outer(observed, observed),
        P_bar,
    ]


def closed_form_step(
    pullback: Callable | list = step_pullback, *, inline: bool = False
) -> OpFromGraph:
    """:func:`kalman_step` as an Op with a hand-written pullback.

    Parameters
    ----------
    pullback : callable or list
        What ``OpFromGraph`` takes: one function for all inputs, or a list with a function (or
        None, for autodiff) for each.
    inline : bool
        Let PyTensor dissolve the Op into the graph around it when it compiles.

    Returns
    -------
    OpFromGraph
        Takes y, a, P, c, d, T, Z, H, W and returns what :func:`kalman_step` returns.
    """
    # Two vectors and a matrix hold the data and the state; the rest is the model's, static.
    ndims = {"y": 1, "a": 1, "P": 2, "c": 1, "d": 1, "T": 2, "Z": 2, "H": 2, "W": 2}
    inputs = [pt.tensor(name, shape=(None,) * ndim) for name, ndim in ndims.items()]
    return OpFromGraph(
        inputs, kalman_step(*inputs), pullback=pullback, inline=inline, name="KalmanStep"
    )


def filter_graph(y, a0, P0, c, d, T, Z, R, H, Q, step: Callable = kalman_step) -> FilterOutputs:
    """The filter over a whole series, as a scan.

    Parameters
    ----------
    y : TensorVariable (n, p)
        NaN marks a gap.
    a0, P0, c, d, T, Z, R, H, Q : TensorVariable
        The model; any but a0 and P0 may carry a leading time axis.
    step : callable
        :func:`kalman_step`, or an Op in its place.

    Returns
    -------
    FilterOutputs of TensorVariable

    Raises
    ------
    ValueError
        If an array has the wrong number of dimensions.
    """
    arrays = {"a0": a0, "P0": P0, "c": c, "d": d, "T": T, "Z": Z, "R": R, "H": H, "Q": Q}
    arrays = {name: pt.as_tensor_variable(X) for name, X in arrays.items()}
    y = pt.as_tensor_variable(y)
    if y.ndim != 2:
        raise ValueError(f"y has {y.ndim} dimensions, expected 2: (n, p)")
    for name, X in arrays.items():
        if X.ndim - len(SHAPES[name]) not in ((0,) if name in STATIC else (0, 1)):
            raise ValueError(f"{name} has {X.ndim} dimensions, expected {len(SHAPES[name])}")

    R, Q = arrays.pop("R"), arrays.pop("Q")
    stepwise = {name: arrays[name] for name in "cdTZH"}
    stepwise["W"] = R @ Q @ R.mT
    moving = [name for name, X in stepwise.items() if X.ndim > len(SHAPES.get(name, "mm"))]
    fixed = [name for name in stepwise if name not in moving]

    def inner(y, *args):
        moving_args, (a, P, *fixed_args) = args[: len(moving)], args[len(moving) :]
        now = dict(zip(moving + fixed, (*moving_args, *fixed_args), strict=True))
        return step(y, a, P, *(now[name] for name in stepwise))

    a_filt, a_next, y_hat, P_filt, P_next, F, l = pytensor.scan(
        inner,
        sequences=[y, *(stepwise[name] for name in moving)],
        outputs_info=[None, arrays["a0"], None, None, arrays["P0"], None, None],
        non_sequences=[stepwise[name] for name in fixed],
        strict=True,
        return_updates=False,
    )
    a_pred = pt.concatenate([arrays["a0"][None], a_next[:-1]])
    P_pred = pt.concatenate([arrays["P0"][None], P_next[:-1]])
    return FilterOutputs(a_filt, a_pred, y_hat, P_filt, P_pred, F, l)


def _mask(y, d, Z, H):
    """Zero what belongs to missing components; and a vector with a one for each observed one."""
    missing = pt.isnan(y)
    observed = (1 - missing).astype(y.dtype)
    y = pt.switch(missing, 0, y)
    return y, d * observed, Z * observed[:, None], H * pt.outer(observed, observed), observed


def _symmetrize(G):
    return (G + G.T) / 2
