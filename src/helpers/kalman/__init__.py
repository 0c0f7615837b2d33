"""The Kalman filter's log-likelihood and its gradient in closed form.

- ``loglike``, ``loglike_and_grad``: for NumPy arrays. Compiled; ``method="reference"`` is
  the loop that one can read.
- ``kalman_loglike``: for PyTensor and PyMC, a symbolic log-likelihood with its pullback.
- ``register_filter``: for the state space models of pymc-extras, ``filter_type="closed_form"``.
- ``helpers.kalman.jax.loglike``: for JAX.
- ``helpers.kalman.diffuse``: an exact diffuse start, regression coefficients integrated out.
- ``helpers.kalman.panel``: many series that share a model, or have arrays of their own.
- ``helpers.kalman.panel_fit``: many maximum likelihood fits at once.
- ``helpers.kalman.distributed``: many series over the workers of a Dask cluster.
- ``helpers.kalman.smoothing``: smoothed states, draws of their paths, forecasts.
- ``helpers.kalman.hessian``, ``helpers.kalman.information``: second derivatives, information.
- ``helpers.kalman.statsmodels``: score, Hessian and standard errors for statsmodels' models.
- ``warmup``: compile now what the first call would compile.

>>> import numpy as np
>>> from helpers.kalman import StateSpace, loglike_and_grad
>>> one, y = np.eye(1), np.array([[1.0], [np.nan], [0.5]])
>>> walk = StateSpace([0.0], one, [0.0], [0.0], T=one, Z=one, R=one, H=one, Q=one)
>>> value, dy, gradients = loglike_and_grad(y, walk)
>>> print(round(float(value), 3), gradients.H.shape, dy.shape)
-3.061 (1, 1) (3, 1)
"""

import sys
from contextlib import contextmanager

import numpy as np

from helpers.kalman import reference
from helpers.kalman.recursions import TOLERANCE
from helpers.statespace import Gradients, StateSpace, check_model, check_tolerance

__all__ = [
    "Gradients",
    "StateSpace",
    "kalman_loglike",
    "loglike",
    "loglike_and_grad",
    "register_filter",
    "warmup",
]


def loglike(y, model: StateSpace, method: str = "fused", tol: float = TOLERANCE) -> float:
    """Log-likelihood of a series.

    Parameters
    ----------
    y : array (n, p)
        NaN marks a gap.
    model : StateSpace
    method, tol
        As :func:`loglike_and_grad`.

    Returns
    -------
    float

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError, MemoryError, ImportError
        As :func:`loglike_and_grad`.
    """
    if _takes_reference(y, model, method, tol):
        return reference.loglike(y, model)
    return _passes().loglike(y, model, tol)


def loglike_and_grad(
    y, model: StateSpace, method: str = "fused", tol: float = TOLERANCE
) -> tuple[float, np.ndarray, Gradients]:
    """Log-likelihood of a series and its gradient with respect to everything.

    Parameters
    ----------
    y : array (n, p)
        NaN marks a gap.
    model : StateSpace
    method : "fused" or "reference"
        The compiled pass over the whole series, in float64, or the readable loop in NumPy, in the
        precision of the arrays. Complex arrays, as in a complex step, always take the loop.
    tol : float
        In the compiled pass the covariance counts as steady when its estimated distance from its
        limit, relative to its own size, is at most this; 0 switches the steady state off. The loop
        runs every step in full.

    Returns
    -------
    value : float
    dy : array (n, p)
        Zero in the gaps.
    gradients : Gradients
        One array for each of the model's, of the same shape: per step where the model's array
        varies with time. Those of P0, H and Q are symmetric.

    Raises
    ------
    ValueError
        If ``y`` does not fit the model, or ``method`` or ``tol`` is not one of the above.
    numpy.linalg.LinAlgError
        If F is not positive definite at some step, which the message names, or singular up to
        rounding: the others leave less than 16 eps of the variance of one of its observations.
    MemoryError
        If memory runs out.
    ImportError
        If the compiled pass is requested and Numba is missing.
    """
    if _takes_reference(y, model, method, tol):
        return reference.loglike_and_grad(y, model)
    return _passes().loglike_and_grad(y, model, tol)


def _takes_reference(y, model: StateSpace, method: str, tol, *others) -> bool:
    """Whether the loop is asked for, or one of the arrays is complex."""
    if method not in ("fused", "reference"):
        raise ValueError(f"method is {method!r}, expected 'fused' or 'reference'")
    check_model(model)
    check_tolerance(tol)
    return method == "reference" or any(map(np.iscomplexobj, (model.a0, y, *others)))


def _passes():
    return _imported("helpers.kalman.compiled", "numba", "")


# Where pip finds the package under its own name: it is in no index.
_SOURCE = "git+https://github.com/gradients-by-hand/gradients-by-hand#subdirectory=packaging/kalman"


def _install(extra: str) -> str:
    """The line that installs the package with an extra, such as "[jax]"."""
    return f'pip install "kalman-by-hand{extra} @ {_SOURCE}"'


@contextmanager
def _needing(module: str, needs: str, extra: str):
    """Where an import fails, the error says what the module lacks and how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        own = error.name is None or error.name.partition(".")[0] == __name__.partition(".")[0]
        if own or _install(extra) in str(error):
            raise
        raise ModuleNotFoundError(
            f"{module} needs {error.name}, which is not installed: pip install {needs}, "
            f"or {_install(extra)}",
            name=error.name,
        ) from error


def _imported(module: str, needs: str, extra: str):
    """A module, or an error that says what is missing and how to install it."""
    there = sys.modules.get(module)
    if there is not None and not getattr(there.__spec__, "_initializing", False):
        return there
    from importlib import import_module

    with _needing(module, needs, extra):
        return import_module(module)


# What needs more than NumPy is imported when it is first asked for: that takes seconds.
_LATER = {
    "kalman_loglike": ("helpers.kalman.ops.likelihood", "pytensor", ""),
    "register_filter": ("helpers.kalman.pymc", "pymc pymc-extras", "[pymc]"),
    "warmup": ("helpers.kalman.compiled", "numba", ""),
}


def __getattr__(name):
    if name in _LATER:
        return getattr(_imported(*_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
