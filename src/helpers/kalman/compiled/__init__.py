"""The log-likelihood of a whole series and its closed-form gradient, compiled, behind one door.

A pass filters (:mod:`~helpers.kalman.compiled.forward`) and, where a gradient is wanted, runs the
disturbance smoother backwards (:mod:`~helpers.kalman.compiled.backward`). It computes what
:mod:`helpers.kalman.reference` computes, and tests hold the two together. What makes it fast:

- the lines of the readable text, written out (:mod:`~helpers.kalman.compiled.writing`,
  :mod:`~helpers.kalman.compiled.step`) as products of small matrices in registers
  (:mod:`~helpers.kalman.compiled.tiles`), in one block of memory
  (:mod:`~helpers.kalman.compiled.layout`);
- rows of T that are nearly empty are followed by their non-zeros;
- what is not wanted is neither computed nor kept;
- in a steady state a step forwards or backwards is one product of a row with a matrix, and the sums
  over its steps come by doubling;
- with up to four states and series the readable text itself is compiled for the size at hand, its
  matrices in registers (:mod:`~helpers.kalman.compiled.small`).

:func:`loglike` and :func:`loglike_and_grad` are for NumPy, :mod:`~helpers.kalman.compiled.door` is
what compiled code calls. Importing this package compiles nothing; the first call does, once for
each machine and version, and says so: :func:`warmup` does it at a time of one's own choosing.
"""

import itertools
import time

import numpy as np

from helpers.kalman.compiled import building
from helpers.kalman.recursions import TOLERANCE
from helpers.kalman.reference import _not_positive_definite, pull_shocks
from helpers.statespace import (
    STATIC,
    Gradients,
    StateSpace,
    check_data,
    check_tolerance,
    check_weights,
)

__all__ = ["loglike", "loglike_and_grad", "warmup"]

SMALL_SIZES = 16  # up to four states and series: `door.LARGEST`, which is not imported here
_FILTERED = ("a0", "P0", "c", "d", "T", "Z", "H")  # in this order, W = R Q R' after them


def loglike(y, model: StateSpace, tol: float = TOLERANCE) -> float:
    """Log-likelihood of a series.

    Parameters
    ----------
    y : array (n, p)
        NaN marks a gap.
    model : StateSpace
        Real; the computation is in float64.
    tol : float
        What a covariance that is taken to be in its steady state may miss, relative to its own
        size; 0 for no steady state.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If ``y`` does not fit the model or ``tol`` is negative.
    numpy.linalg.LinAlgError
        If F is not positive definite at some step, which the message names.
    MemoryError
    """
    l = values(arrays_of(y, model), check_tolerance(tol))
    if np.isnan(l).any():
        loglike_and_grad(y, model, tol)  # raises, and names the step
    return float(l.sum())


def loglike_and_grad(
    y, model: StateSpace, tol: float = TOLERANCE, weights=None
) -> tuple[float, np.ndarray, Gradients]:
    """Log-likelihood of a series and its gradient with respect to everything.

    Parameters
    ----------
    y, model, tol
        As :func:`loglike`.
    weights : array (n,), optional
        Weights of the steps in the log-likelihood; ones if None.

    Returns
    -------
    value, dy, gradients
        As :func:`helpers.kalman.loglike_and_grad`.

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError, MemoryError
        As :func:`loglike`.
    """
    arrays = arrays_of(y, model)
    plain, weights = weights is None, check_weights(weights, len(arrays[0]), real=True)
    l, dy, out = evaluate(arrays, weights.astype(float, copy=False), check_tolerance(tol))
    return float(l.sum() if plain else weights @ l), dy, gradients_of(model, out)


def values(arrays, tol: float = TOLERANCE):
    """Each step's log-likelihood (n,) for the arrays of :func:`arrays_of`; NaN where one fails."""
    return _door().loglike(*arrays, tol)


def evaluate(arrays, weights, tol: float = TOLERANCE, columns=None):
    """Each step's log-likelihood (n,), y's gradient, and what :func:`gradients_of` takes.

    For the arrays of :func:`arrays_of`, read-only as those are: of them nothing is checked here.
    With `columns`, ascending, the gradients of T and Z are right in those alone.
    """
    if columns is None:
        found = _door().loglike_and_grad(*arrays, weights, True, True, True, True, tol)
    else:
        found = _door().gradient_in_columns(*arrays, weights, columns, tol)
    l, out, dy, report = found
    if report[0] < len(l) and np.isnan(l).all():
        raise _not_positive_definite(report[0])
    return l, dy, out


def gradients_of(model: StateSpace, out) -> Gradients:
    """The gradients of the model's arrays, from what a compiled pass writes."""
    X = model.in_time
    return gradients_in_time(X["R"], X["Q"], out, (*STATIC, *model.time_varying))


def gradients_in_time(R, Q, out, kept) -> Gradients:  # noqa: N803
    """:func:`gradients_of` for R and Q with an axis of length 1 or n; those `kept` have theirs."""
    bars = dict(zip((*_FILTERED, "W"), out, strict=True))
    bars |= pull_shocks(R, Q, bars.pop("W"))
    return Gradients(**{x: bars[x] if x in kept else _total(bars[x]) for x in Gradients._fields})


def _total(X):
    """The sum over the steps of X, of which there is mostly one."""
    return X[0] if len(X) == 1 else X.sum(axis=0)


def warmup(progress: bool = True, everything: bool = False) -> float:
    """Compile the pass, or load it from disk where that was done before.

    Parameters
    ----------
    progress : bool
        Say on stderr how far it is, and how long it took.
    everything : bool
        Compile what second derivatives, diffuse starts, many series, JAX and each number of states
        and series up to four need, too: some minutes.

    Returns
    -------
    float
        Seconds.
    """
    start = time.perf_counter()
    modules = ["door", "whole", "roots", "outputs", *(building.PURPOSE if everything else ())]
    count = building.functions(*modules) + 1
    # With all sizes the pass of the smallest model is among them, and each has one of tangents.
    count += 2 * SMALL_SIZES - 1 if everything else 0
    with building.told("Kalman filter", count, progress):
        door = _door()
        one = np.eye(1)
        model = StateSpace([0.0], one, [0.0], [0.0], T=one / 2, Z=one, R=one, H=one, Q=one)
        loglike(one, model)
        loglike_and_grad(one, model)
        for name in modules:
            building.load(name)
        if everything:
            for m, p in itertools.product(range(1, door.LARGEST + 1), repeat=2):
                door.compile_later(m, p)
                door.compile_later(m, p, tangents=True)
    return time.perf_counter() - start


def arrays_of(y, model: StateSpace) -> list[np.ndarray]:
    """y, a0, P0, c, d, T, Z, H and W = R Q R', the last six with a time axis of length 1 or n."""
    if np.iscomplexobj(y) or np.iscomplexobj(model.a0):
        raise TypeError(
            'complex arrays need method="reference": the compiled filter takes real ones'
        )
    y = check_data(y, model)
    return [np.asarray(X, float) for X in (y, *map(model.in_time.get, (*_FILTERED, "W")))]


def _door(announce: bool | None = None):
    """The compiled functions. Compiling takes long: whoever waits for it is told how far it is."""
    return building.load("door", announce)
