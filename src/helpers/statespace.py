r"""The linear Gaussian state space model: nine arrays, checked once on entry.

.. math::

   y_t &= Z \alpha_t + d + \varepsilon_t, \\
   \alpha_{t+1} &= T \alpha_t + c + R \eta_t, \\
   \varepsilon_t &\sim N(0, H), \quad \eta_t \sim N(0, Q), \\
   \alpha_1 &\sim N(a_0, P_0)

for :math:`t = 1, \dots, n`.  :math:`a_0` and :math:`P_0` are *predictions* for the first step.
Notation of Durbin and Koopman (2012), Time Series Analysis by State Space Methods, 2nd ed.,
doi:10.1093/acprof:oso/9780199641178.001.0001.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import cached_property
from numbers import Real

import numpy as np

# The dimensions of each array, without a leading time axis.
SHAPES = {
    "a0": ("m",),
    "P0": ("m", "m"),
    "c": ("m",),
    "d": ("p",),
    "T": ("m", "m"),
    "Z": ("p", "m"),
    "R": ("m", "r"),
    "H": ("p", "p"),
    "Q": ("r", "r"),
}
NAMES = tuple(SHAPES)

# The same for what an engine takes: the data, and W = R Q R' in the place of R and Q.
DIMENSIONS = {
    "y": ("n", "p"), **{x: dims for x, dims in SHAPES.items() if x not in "RQ"}, "W": ("m", "m")
}  # fmt: skip
STATIC = ("a0", "P0")
SYMMETRIC = ("P0", "H", "Q")


@dataclass(frozen=True, eq=False)
class StateSpace:
    """A model: nine arrays that fit each other, as read-only copies of what was given.

    Any of c, d, T, Z, R, H, Q may carry a leading time axis of length n; entry t of T, R, Q and c
    takes step t to step t + 1.

    Parameters
    ----------
    a0 : array (m,)
        Mean of the first state.
    P0 : array (m, m)
        Covariance of the first state; symmetric, may be singular.
    c : array (m,) or (n, m)
        State intercept.
    d : array (p,) or (n, p)
        Observation intercept.
    T : array (m, m) or (n, m, m)
        Transition.
    Z : array (p, m) or (n, p, m)
        Design.
    R : array (m, r) or (n, m, r)
        Selection of the shocks.
    H : array (p, p) or (n, p, p)
        Covariance of the measurement error; symmetric, may be zero.
    Q : array (r, r) or (n, r, r)
        Covariance of the shocks; symmetric, may be singular.

    Raises
    ------
    ValueError
        If an argument is not an array of numbers, is masked, or has an entry that is not finite; if
        shapes do not fit each other, a covariance is not symmetric, or time axes differ in length.

    Examples
    --------
    >>> import numpy as np
    >>> one = np.eye(1)
    >>> walk = StateSpace([0.0], one, [0.0], [0.0], T=one, Z=one, R=one, H=one, Q=one / 10)
    >>> walk.m, walk.p, walk.r, walk.n
    (1, 1, 1, None)
    """

    a0: np.ndarray
    P0: np.ndarray
    c: np.ndarray
    d: np.ndarray
    T: np.ndarray
    Z: np.ndarray
    R: np.ndarray
    H: np.ndarray
    Q: np.ndarray

    def __post_init__(self):
        arrays = {name: _as_numbers(name, getattr(self, name)) for name in NAMES}
        dtype = np.result_type(np.float32, *arrays.values())
        for name, X in arrays.items():
            X = X.astype(dtype)  # a copy: the caller's array stays the caller's
            X.flags.writeable = False
            object.__setattr__(self, name, X)
        self._check_shapes()
        for name in NAMES:
            _check_finite(name, getattr(self, name))
        for name in SYMMETRIC:
            _check_symmetric(name, getattr(self, name))

    def _check_shapes(self) -> None:
        for name, ndim in (("a0", 1), ("d", 1), ("R", 2)):  # these give m, p and r
            X = getattr(self, name)
            if X.ndim not in (ndim, ndim + (name not in STATIC)) or 0 in X.shape:
                dims = ", ".join(SHAPES[name]) + ("," if ndim == 1 else "")
                raise ValueError(f"{name} has shape {X.shape}, expected ({dims})")
        sizes = {"m": self.m, "p": self.p, "r": self.r}
        for name, dims in SHAPES.items():
            X, expected = getattr(self, name), tuple(sizes[dim] for dim in dims)
            if X.shape == expected or (name not in STATIC and X.shape[1:] == expected):
                continue
            letters = ", ".join(dims) + ("," if len(dims) == 1 else "")
            also = "" if name in STATIC else ", with or without a leading time axis"
            raise ValueError(f"{name} has shape {X.shape}, expected ({letters}) = {expected}{also}")
        lengths = {name: len(getattr(self, name)) for name in self.time_varying}
        if len(set(lengths.values())) > 1:
            steps = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ValueError(f"time-varying arrays differ in their number of steps: {steps}")

    @property
    def m(self) -> int:
        """Number of states."""
        return self.a0.shape[0]

    @property
    def p(self) -> int:
        """Number of observed series."""
        return self.d.shape[-1]

    @property
    def r(self) -> int:
        """Number of shocks."""
        return self.R.shape[-1]

    @cached_property
    def time_varying(self) -> tuple[str, ...]:
        """Names of the arrays with a leading time axis."""
        return tuple(name for name in NAMES if getattr(self, name).ndim > len(SHAPES[name]))

    @property
    def n(self) -> int | None:
        """Number of steps where an array varies with time, else None (any number)."""
        varying = self.time_varying
        return len(getattr(self, varying[0])) if varying else None

    def over_time(self, name: str, n: int) -> np.ndarray:
        """The array ``name``, or "W", with a time axis of length n: a read-only view."""
        X = self.in_time[name]
        return np.broadcast_to(X, (n, *X.shape[1:]))

    @cached_property
    def in_time(self) -> dict[str, np.ndarray]:
        """The arrays and W = R Q R', each but a0 and P0 with a time axis of length 1 or n."""
        whole = (*STATIC, *self.time_varying)
        X = {x: A if x in whole else A[np.newaxis] for x, A in self.asdict().items()}
        return X | {"W": X["R"] @ X["Q"] @ np.swapaxes(X["R"], -1, -2)}

    def asdict(self) -> dict[str, np.ndarray]:
        """The nine arrays by name, in order (not copied)."""
        return {name: getattr(self, name) for name in NAMES}


class Gradients(namedtuple("Gradients", NAMES)):
    """The gradient of a scalar with respect to a model: an array for each of the model's nine.

    Each has its array's shape: per step where that varies with time. Those of P0, H and Q are
    symmetric. Nothing is checked: a gradient may overflow where its model is a good one.
    """

    __slots__ = ()

    def asdict(self) -> dict[str, np.ndarray]:
        """The nine arrays by name, in order."""
        return self._asdict()


def check_data(y, model: StateSpace) -> np.ndarray:
    """Observations as an array that fits the model.

    Parameters
    ----------
    y : array (n, p)
        NaN marks a gap.
    model : StateSpace

    Returns
    -------
    array (n, p)
        Of the model's precision, or of y's where that is the higher one.

    Raises
    ------
    TypeError
        If ``model`` is not a StateSpace.
    ValueError
        If ``y`` is not an array of numbers, is masked or empty, does not have the model's shape or
        length, or holds an infinity.
    """
    check_model(model)
    y = _as_numbers("y", y, "; NaN marks a gap")
    if y.ndim != 2 or y.shape[1] != model.p:
        hint = "; use y[:, np.newaxis]" if y.ndim == 1 and model.p == 1 else ""
        raise ValueError(f"y has shape {y.shape}, expected (n, p) = (n, {model.p}){hint}")
    if len(y) == 0:
        raise ValueError("y is empty: it has no step")
    if model.n not in (None, len(y)):
        raise ValueError(f"y has {len(y)} steps, but {model.time_varying[0]} has {model.n}")
    if np.isinf(y).any():
        t, i = np.argwhere(np.isinf(y))[0]
        raise ValueError(f"y is infinite at step {t}, series {i}; NaN marks a gap")
    return y.astype(np.result_type(y, model.a0), copy=False)


def check_model(model) -> None:
    """TypeError if this is not a StateSpace."""
    if not isinstance(model, StateSpace):
        kind = type(model).__name__
        hint = ": StateSpace(**model)" if isinstance(model, dict) else ""
        raise TypeError(f"model is of type {kind}, expected a StateSpace{hint}")


def _as_numbers(name: str, X, hint: str = "") -> np.ndarray:
    """An array of numbers, or an error that says what it is instead."""
    if isinstance(X, np.ma.MaskedArray):
        advice = "a model has no gaps"
        if name in ("y", "Y") or name.startswith("series "):
            advice = f"use {'Y' if name == 'Y' else 'y'}.filled(np.nan)"
        raise ValueError(f"{name} is a masked array, and its mask would be lost: {advice}")
    array = np.asarray(X)
    if array.dtype.kind not in "biufc":
        found = f"an array of {array.dtype}" if array.ndim else repr(X)
        raise ValueError(f"{name} is not an array of numbers but {found}{hint}")
    widest = complex if array.dtype.kind == "c" else float
    if array.dtype.itemsize > np.dtype(widest).itemsize:
        raise ValueError(
            f"{name} is an array of {array.dtype}, expected double precision at most: "
            f"use {name}.astype({widest.__name__})"
        )
    return array


def check_weights(weights, n: int, real: bool = False) -> np.ndarray:
    """The weights of n steps, ones if None; ValueError if they do not fit."""
    if weights is None:
        return np.ones(n)
    weights = _as_numbers("weights", weights)
    if weights.shape != (n,):
        raise ValueError(f"weights has shape {weights.shape}, expected (n,) = ({n},)")
    if real and np.iscomplexobj(weights):
        raise ValueError("weights are complex, expected real numbers")
    _check_finite("weights", weights)
    return weights


def check_tolerance(tol) -> float:
    """The tolerance of the steady state, a float; ValueError if it is negative or no number."""
    if not isinstance(tol, (float, Real)) or not 0 <= tol < np.inf:
        raise ValueError(f"tol is {tol!r}, expected a finite number that is not negative")
    return float(tol)


def _check_finite(name: str, X: np.ndarray) -> None:
    if not np.isfinite(X).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(X))[0])
        raise ValueError(f"{name} is not finite at {where}: {X[where]}")


def _check_symmetric(name: str, X: np.ndarray) -> None:
    gap = np.abs(X - np.swapaxes(X, -1, -2))
    if gap.max() > np.sqrt(np.finfo(X.dtype).eps) * np.abs(X).max():
        where = tuple(int(i) for i in np.unravel_index(gap.argmax(), gap.shape))
        mirror = (*where[:-2], where[-1], where[-2])
        raise ValueError(f"{name} is not symmetric: {X[where]} at {where}, {X[mirror]} at {mirror}")
