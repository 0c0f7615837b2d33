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

from helpers.kalman.recursions import (
    cholesky,
    mask,
    most_inflated,
    predict,
    rows,
    solve,
    symmetric,
    unless_singular,
)
from helpers.kalman.reference import FilterOutputs, pull_step, update_step
from helpers.kalman.shapes import check_model
from helpers.statespace import NAMES, SHAPES, STATIC


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
    x = _updated(y, a, P, d, Z, H)
    a_next, P_next = predict(x.a_filt, x.P_filt, c, T, W)
    return [x.a_filt, a_next, x.y_hat, x.P_filt, P_next, x.F, x.l]


def _updated(y, a, P, d, Z, H):
    missing = pt.isnan(y)
    y, o = pt.switch(missing, 0, y), (1 - missing).astype(y.dtype)
    return update_step(y, o, a, P, *mask(o, d, Z, H), pt.eye(d.shape[0], dtype=a.dtype))


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
    a_filt_bar, a_bar, y_hat_bar, P_filt_bar, P_bar, F_bar, l_bar = (
        pt.zeros_like(output) if isinstance(bar.type, DisconnectedType) else bar
        for bar, output in zip(cotangents, outputs, strict=True)
    )
    # What the update computed stands in the graph already: PyTensor merges the two.
    x = _updated(y, a, P, d, Z, H)._replace(a_filt=outputs[0], P_filt=outputs[3])
    bar = FilterOutputs(
        a_filt_bar, 0.0, y_hat_bar, symmetric(P_filt_bar), 0.0, symmetric(F_bar), l_bar
    )
    found, a_before, P_before = pull_step(x, T, a_bar, symmetric(P_bar), bar)
    return [found.y, a_before, P_before, *found[1:]]


def closed_form_step() -> OpFromGraph:
    """:func:`kalman_step` as an Op whose pullback is :func:`step_pullback`.

    Returns
    -------
    OpFromGraph
        Takes y, a, P, c, d, T, Z, H, W and returns what :func:`kalman_step` returns.
    """
    # Two vectors and a matrix hold the data and the state; the rest is the model's, static.
    ndims = {"y": 1, "a": 1, "P": 2, "c": 1, "d": 1, "T": 2, "Z": 2, "H": 2, "W": 2}
    inputs = [pt.tensor(name, shape=(None,) * ndim) for name, ndim in ndims.items()]
    return OpFromGraph(inputs, kalman_step(*inputs), pullback=step_pullback, name="KalmanStep")


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
        If an array has the wrong number of dimensions, or a shape that is known does not fit.
    """
    arrays = {"a0": a0, "P0": P0, "c": c, "d": d, "T": T, "Z": Z, "R": R, "H": H, "Q": Q}
    arrays = {name: pt.as_tensor_variable(X) for name, X in arrays.items()}
    y = pt.as_tensor_variable(y)
    check_model({x: X.type.shape for x, X in {"y": y, **arrays}.items()})
    R, Q = arrays.pop("R"), arrays.pop("Q")
    return filter_graph_W(y, **arrays, W=R @ Q @ R.mT, step=step)


def filter_graph_W(y, a0, P0, c, d, T, Z, H, W, step: Callable = kalman_step):  # noqa: N802
    """:func:`filter_graph` with W = R Q R' (m, m) or (n, m, m) in the place of R and Q."""
    stepwise = {"c": c, "d": d, "T": T, "Z": Z, "H": H, "W": W}
    moving = [name for name, X in stepwise.items() if X.ndim > len(SHAPES.get(name, "mm"))]
    fixed = [name for name in stepwise if name not in moving]

    def inner(y, *args):
        moving_args, (a, P, *fixed_args) = args[: len(moving)], args[len(moving) :]
        now = dict(zip(moving + fixed, (*moving_args, *fixed_args), strict=True))
        return step(y, a, P, *(now[name] for name in stepwise))

    a_filt, a_next, y_hat, P_filt, P_next, F, l = pytensor.scan(
        inner,
        sequences=[y, *(stepwise[name] for name in moving)],
        outputs_info=[None, a0, None, None, P0, None, None],
        non_sequences=[stepwise[name] for name in fixed],
        strict=True,
        return_updates=False,
    )
    a_pred = pt.concatenate([a0[None], a_next[:-1]])
    P_pred = pt.concatenate([P0[None], P_next[:-1]])
    return FilterOutputs(a_filt, a_pred, y_hat, P_filt, P_pred, F, l)


@cholesky.register(pt.TensorVariable)
def _(F):
    C = pt.linalg.cholesky(F)
    return C, 2 * pt.log(pt.diag(C)).sum()


@unless_singular.register(pt.TensorVariable)
def _(logdet, inflated):
    return pt.switch(pt.lt(inflated, most_inflated(inflated.dtype)), logdet, np.nan)


@solve.register(pt.TensorVariable)
def _(C, B):
    return pt.linalg.solve_triangular(C, B, lower=True)


@rows.register(pt.TensorVariable)
def _(X, o):
    return pt.switch(pt.neq(o if X.ndim == 1 else o[:, None], 0), X, 0)
