r"""Second derivatives of the log-likelihood in closed form: the Hessian times any directions.

The gradient comes from the filter and a recursion backwards. When the model moves along a direction
V, every quantity in both recursions moves by its tangent, and the tangent of the gradient is
:math:`\nabla^2 \mathcal L \, V`, for y and all nine arrays at once. It takes one more pass forwards
and one backwards, whatever the number of parameters, without a step size and without autodiff.

>>> import numpy as np
>>> from helpers.kalman import StateSpace
>>> from helpers.kalman.hessian import hessian
>>> one, y = np.eye(1), np.array([[1.0], [2.0]])
>>> walk = StateSpace([0.0], one, [0.0], [0.0], T=one, Z=one, R=one, H=one, Q=one)
>>> units = np.array([[[1.0]], [[0.0]]]), np.array([[[0.0]], [[1.0]]])
>>> print(hessian(y, walk, {"H": units[0], "Q": units[1]}).round(3))
[[ 0.18  -0.02 ]
 [-0.02  -0.064]]

It runs the lines of :mod:`helpers.kalman.recursions`, on the matrices of
:mod:`helpers.kalman.tangents`.
"""

from __future__ import annotations

import numpy as np

from helpers.kalman import _passes, _takes_reference, recursions, reference
from helpers.kalman.reference import _symmetric as symmetric
from helpers.kalman.tangents import Moving
from helpers.statespace import DIMENSIONS, NAMES, STATIC, Gradients, StateSpace, check_weights

__all__ = ["hessian", "hessian_vector"]


def hessian_vector(
    y, model: StateSpace, directions: dict[str, np.ndarray], method: str = "fused", weights=None,
    tol: float = recursions.TOLERANCE,
) -> tuple[np.ndarray, np.ndarray, Gradients]:  # fmt: skip
    """The Hessian of the log-likelihood times several directions.

    Parameters
    ----------
    y : array (n, p)
        NaN marks a gap.
    model : StateSpace
    directions : dict of arrays (k, ...)
        For ``"y"`` and each of the model's arrays that moves, k changes of it, each of its shape;
        what is not named stays as it is. Of those of P0, H and Q only the symmetric parts count.
    method : "fused" or "reference"
        The compiled pass, or the readable loop on :class:`helpers.kalman.tangents.Moving`, which
        takes complex arrays too.
    weights : array (n,), optional
        Weights of the steps in the log-likelihood; ones if None.
    tol : float
        As :func:`helpers.kalman.loglike_and_grad`; that of the tangents is a hundred times as much.

    Returns
    -------
    slopes : array (k, n)
        The derivative of each step's log-likelihood along each direction.
    dy : array (k, n, p)
        The derivative of the gradient of y; zero in the gaps.
    gradients : Gradients
        The derivatives of the other gradients, each of shape (k, ...).

    Raises
    ------
    ValueError
        If there is no direction, or one has an unknown name or a wrong shape or is not finite;
        ``weights`` has a wrong shape, ``tol`` is negative or not a number, or ``y`` does not fit
        the model.
    numpy.linalg.LinAlgError
        If F is not positive definite at some step, which the message names.
    MemoryError
        If memory runs out.
    """
    given = reference.check_directions(y, model, directions)
    slopes, dy, gradients = _moved(y, model, given, method, weights, tol)
    return slopes, dy, Gradients(**gradients)


def _moved(y, model: StateSpace, given, method: str, weights, tol, along_alone: bool = False):
    """`hessian_vector` for directions that `check_directions` has seen, the gradients by name.

    With ``along_alone`` those may be missing of arrays that do not move.
    """
    weights = check_weights(weights, len(y))
    if _takes_reference(y, model, method, tol, weights, *given.values()):
        W_bar, slopes, dy, bars = _one_by_one(
            y, model, reference.moves_in_time(y, model, given), weights
        )
        bars |= _of_R_and_Q(model, given, W_bar, bars.pop("W"))
        return slopes, dy, _over_time(model, bars)
    return _compiled(y, model, given, weights, tol, along_alone)


def _of_R_and_Q(model: StateSpace, given, W_bar, dW_bar) -> dict:  # noqa: N802
    """What the gradients of R and Q move by, over time, from that of W = R Q R'."""
    R, Q = model.in_time["R"], symmetric(model.in_time["Q"])
    dWR = dW_bar @ R
    dWRQ, dQ_bar = dWR @ Q, np.swapaxes(R, -1, -2) @ dWR
    if "Q" in given:
        dWRQ = dWRQ + W_bar @ R @ reference.with_time(model, "Q", given["Q"])
    if "R" in given:
        dR = reference.with_time(model, "R", given["R"])
        dWRQ = dWRQ + W_bar @ dR @ Q
        dQ_bar = dQ_bar + 2 * symmetric(np.swapaxes(dR, -1, -2) @ W_bar @ R)
    return {"R": 2 * dWRQ, "Q": symmetric(dQ_bar)}


def _over_time(model: StateSpace, over_time: dict) -> dict:
    """Gradients (k, t, ...) summed over t where arrays do not vary; a0's and P0's have no t."""
    kept = (*STATIC, *model.time_varying)
    return {x: X if x in kept else X.sum(axis=1) for x, X in over_time.items()}


def hessian(
    y, model: StateSpace, directions: dict[str, np.ndarray], method: str = "fused", weights=None,
    tol: float = recursions.TOLERANCE,
) -> np.ndarray:  # fmt: skip
    """The second derivatives of the log-likelihood along pairs of directions.

    Parameters
    ----------
    y, model, directions, method, weights, tol
        As :func:`hessian_vector`.

    Returns
    -------
    array (k, k)
        Symmetric. Where the model's arrays are functions of parameters, this is the Hessian with
        respect to the parameters, without the terms of the arrays' own second derivatives.

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError, MemoryError
        As :func:`hessian_vector`.
    """
    directions = reference.check_directions(y, model, directions)
    _, dy, gradients = _moved(y, model, directions, method, weights, tol, along_alone=True)
    moved = gradients | {"y": dy}
    k = len(dy)
    return symmetric(
        sum(X.reshape(k, -1) @ moved[x].reshape(k, -1).T for x, X in directions.items())
    )


def _one_by_one(y, model: StateSpace, dot: dict, weights):
    """The readable loop: W_bar, slopes, and the tangents of the gradients, over all n steps."""
    o, k = reference.kalman_filter(y, model).observed.astype(float), len(dot["y"])
    found = [_along(y, model, o, {x: X[i] for x, X in dot.items()}, weights) for i in range(k)]
    slopes, W_bars, bars = zip(*found, strict=True)
    names = "a0", "P0", *reference.StepGradients._fields
    bars = {x: np.stack(X) for x, X in zip(names, zip(*bars, strict=True), strict=True)}
    return W_bars[0], np.stack(slopes), bars.pop("y"), bars


def _along(y, model: StateSpace, o, dot: dict, weights):
    """The filter's loop and the pullback's, on matrices that move along one direction."""
    at_step = recursions.at_step

    def at(x, t):
        """The array of step t, and what it moves by."""
        return Moving(at_step(model.in_time[x], t), at_step(dot[x], t))

    a, P = Moving(model.a0, dot["a0"]), Moving(symmetric(model.P0), dot["P0"])
    steps, I_p = [], np.eye(model.p)
    for t in range(len(y)):
        masked = recursions.mask(o[t], at("d", t), at("Z", t), at("H", t))
        y_t = recursions.rows(Moving(y[t], dot["y"][t]), o[t])
        steps.append(reference.update_step(y_t, o[t], a, P, *masked, I_p))
        a, P = recursions.predict(
            steps[t].a_filt, steps[t].P_filt, at("c", t), at("T", t), at("W", t)
        )
    r, Pi, per_step = 0 * a, 0 * P, []
    for t in reversed(range(len(y))):
        bar = reference.FilterOutputs(0.0, 0.0, None, 0.0, 0.0, None, weights[t])
        found, r, Pi = reference.pull_step(steps[t], at("T", t), r, Pi, bar)
        per_step.insert(0, found)
    moved = (np.stack([X.dX for X in of_all]) for of_all in zip(*per_step, strict=True))
    W_bars = np.stack([found.W.X for found in per_step])
    return np.array([x.l.dX for x in steps]), W_bars, (r.dX, Pi.dX, *moved)


def _compiled(y, model: StateSpace, given, weights, tol, along_alone: bool):
    """What `_moved` returns, compiled; several directions at once."""
    passes, k = _passes(), len(next(iter(given.values())))
    arrays = [np.asarray(X, float) for X in passes.arrays_of(y, model)]
    names = given if along_alone else NAMES
    shapes = {x: (k, *laid_out(x, X.shape)) for x, X in zip(DIMENSIONS, arrays, strict=True)}
    moves = (
        given | {"W": reference.moves_of_W(model, given)} if reference.of_shocks(given) else given
    )
    dots = [
        np.ascontiguousarray(moves[x], float).reshape(shape) if x in moves else np.zeros(shape)
        for x, shape in shapes.items()
    ]
    compiled = passes.building.load("tangents").hessian_vector
    try:
        W_bar, slopes, bars = compiled(
            *arrays, np.asarray(weights, float), *dots, "T" in names, "Z" in names, not along_alone,
            True, float(tol),
        )  # fmt: skip
    except MemoryError:
        raise MemoryError(
            "the second derivatives ran out of memory; of several directions at once, each needs "
            "about n m (m + 3 p) doubles"
        ) from None
    if np.isnan(slopes[0, 0]):  # as all are then
        passes.loglike_and_grad(y, model, tol=0.0)  # raises, and names the step
        # The tangents' covariances always come from Joseph's form, those of the pass need not.
        raise np.linalg.LinAlgError(
            "F is positive definite for the gradient, but not for the Hessian, whose covariances "
            "are rounded otherwise: the model is singular up to rounding"
        )
    bars = dict(zip(DIMENSIONS, bars, strict=True))
    if reference.of_shocks(names):
        bars |= _over_time(model, _of_R_and_Q(model, given, W_bar, bars["W"]))
    found = {x: bars[x].reshape(k, *X.shape) for x, X in model.asdict().items() if x in names}
    return slopes, bars["y"].reshape(k, *arrays[0].shape), found


def laid_out(x: str, shape) -> tuple:
    """(time, rows, columns) of a direction of x, as the compiled pass takes it, from its shape."""
    if x in STATIC:
        shape = (1, *shape)
    return (*shape, 1) if len(shape) == 2 else tuple(shape)
