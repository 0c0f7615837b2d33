r"""Many series at once: one covariance recursion for all that share a model and their gaps.

P, F, the gain and, on the way back, N and D depend on the model and on *where* y is missing, not on
y. So series with one model and the same gaps share them, and for each series only a column remains
to be computed: with :math:`a, r` (m, J) and :math:`v, u, e` (p, J)

.. math::

   v &= y_t - Z a - d, \\
   u &= F^{-1} v, \\
   a_{t|t} &= a + K^f v, \\
   a_{t+1} &= T a_{t|t} + c, \\
   e &= u - K^{f\top} T^\top r, \\
   \hat\alpha &= a_{t|t} + P_{t|t} T^\top r, \\
   r_{t-1} &= Z^\top e + T^\top r ,

and the gradients of the summed log-likelihood are sums over steps and columns, less J times a term
of the covariances, for instance

.. math::

   \bar W &= \tfrac12 \sum_t \Bigl(\sum_j r_j r_j^\top - J N\Bigr), \\
   \bar T &= \sum_t \Bigl(\sum_j r_j \hat\alpha_j^\top - J N T P_{t|t}\Bigr) .

The second part is the gradient of a series that never surprises, y = 0 with a0 = c = d = 0: then r
and e are zero. So the pass for a single series computes it.

Series of different lengths have gaps after their ends, where r and N are zero. Each pattern of gaps
is a group of its own.

The smoother's recursions: de Jong 1988, doi:10.1093/biomet/75.3.594; Koopman and Shephard 1992,
doi:10.1093/biomet/79.4.823.

>>> import numpy as np
>>> from helpers.kalman import StateSpace
>>> from helpers.kalman.panel import loglike_and_grad
>>> one = np.eye(1)
>>> walk = StateSpace([0.0], one, [0.0], [0.0], T=one, Z=one, R=one, H=one, Q=one)
>>> Y = np.array([[1.0, np.nan, 0.5], [2.0, 1.0, 0.0]])[:, :, np.newaxis]
>>> l, dY, gradients = loglike_and_grad(Y, walk)
>>> l.shape, dY.shape, gradients.H.shape
((2,), (2, 3, 1), (1, 1))
"""

from __future__ import annotations

import os
from collections import namedtuple

import numpy as np

from helpers.kalman import _passes, _takes_reference, reference
from helpers.kalman.recursions import TOLERANCE
from helpers.statespace import (
    NAMES,
    SHAPES,
    STATIC,
    SYMMETRIC,
    Gradients,
    StateSpace,
    _as_numbers,
    _check_symmetric,
)

__all__ = ["loglike", "loglike_and_grad"]

MEANS = {"a0", "c", "d"}  # own ones leave the covariances shared

PIECES = 8  # for each thread: with fewer, one waits for another at the end


def loglike(Y, model, method: str = "fused", tol: float = TOLERANCE, *, threads=None, **own):
    """Log-likelihood of each of many series.

    Parameters
    ----------
    Y, model, method, tol, threads, **own
        As :func:`loglike_and_grad`.

    Returns
    -------
    array (J,)

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError, MemoryError, ImportError
        As :func:`loglike_and_grad`.
    """
    return _evaluate(Y, model, method, tol, threads, own, gradient=False)[0]


def loglike_and_grad(
    Y, model, method: str = "fused", tol: float = TOLERANCE, *, threads=None, **own
):
    """Log-likelihood of each of many series, and the gradient of their sum.

    Parameters
    ----------
    Y : array (J, n, p), or list of J arrays (n_j, p)
        NaN marks a gap. Series of a list begin at the same step and may end at different ones.
    model : StateSpace, or list of J StateSpace
        The model of all series, or one for each, with arrays of the same shapes: then nothing is
        shared, and gradients are not summed.
    method : "fused" or "reference"
        As :func:`helpers.kalman.loglike_and_grad`; complex arrays take the reference.
    tol : float
        As there.
    threads : int, optional
        Number of threads for series with models of their own; as many as Numba may use
        (NUMBA_NUM_THREADS) if None.
    **own : arrays (J, ...) or (J, n, ...)
        Any of a0, P0, c, d, T, Z, R, H, Q: the series' own, in place of the model's. With their own
        a0, c or d the series still share the covariances; with any other array they share nothing
        but time.

    Returns
    -------
    l : array (J,)
    dY : array (J, n, p), or list of J arrays (n_j, p)
        Of each log-likelihood with respect to its own series; zero in the gaps.
    gradients : Gradients
        Of the sum of l, one array for each of the model's, of the same shape. Those of own arrays
        have the shape of what was given; with a list of models all have a leading axis J.

    Raises
    ------
    ValueError
        If Y, the model and own arrays do not fit each other, a series has no observation, or
        ``method``, ``tol`` or ``threads`` is invalid: the message names the series.
    TypeError
        If ``own`` names none of the nine arrays.
    numpy.linalg.LinAlgError
        If F is not positive definite at some step, which the message names.
    MemoryError
        If Y and its gradient need more memory than the machine has, or memory runs out.
    ImportError
        If the compiled pass is requested and Numba is missing.
    """
    return _evaluate(Y, model, method, tol, threads, own, gradient=True)


def _evaluate(Y, models, method, tol, threads, own, gradient: bool):
    """Log-likelihoods (J,) and, for a gradient, dY and Gradients."""
    own = _named(own)
    _check_threads(threads)
    alone = isinstance(models, StateSpace)
    given, template = _checked(Y, models, own)
    if _takes_reference(given.y, template, method, tol, *given.arrays.values()):
        l, dY, bars = _by_loop(given, gradient)
    else:
        engine = _shared if alone and own.keys() <= MEANS else _own
        l, failed, dY, bars = engine(given, tol, gradient, threads)
        for j in np.flatnonzero(failed >= 0):
            error = reference._not_positive_definite(int(failed[j]))
            raise np.linalg.LinAlgError(f"series {j}: {error}")
    if not gradient:
        return (l,)
    if alone:
        bars = {x: X if x in own else X.sum(axis=0) for x, X in bars.items()}
    if given.lengths is not None:
        dY = [x[:n] for x, n in zip(dY, given.lengths, strict=True)]
    return l, dY, Gradients(**bars)


class _Given(namedtuple("_Given", "y ends arrays varying lengths", defaults=[None])):
    """What is asked, checked: y (J, n, p), where series end (J,), the nine arrays by name.

    Those have a first axis of length J or 1, the `varying` ones the steps behind it. Of a list of
    series, their lengths.
    """

    def model(self, j: int) -> StateSpace:
        """That of a series, up to its end, in double precision at least."""
        arrays = {x: X[j if len(X) > 1 else 0] for x, X in self.arrays.items()}
        arrays |= {x: arrays[x][: self.ends[j]] for x in self.varying}
        return StateSpace(**{x: X.astype(np.result_type(X, float)) for x, X in arrays.items()})

    def in_time(self) -> dict[str, np.ndarray]:
        """The arrays (J or 1, 1 or n, ...) as doubles, with W = R Q R'; no time for a0 and P0."""
        kept = (*STATIC, *self.varying)
        X = {x: A.astype(float) if x in kept else A[:, np.newaxis].astype(float)
             for x, A in self.arrays.items()}  # fmt: skip
        return X | {"W": X["R"] @ X["Q"] @ np.swapaxes(X["R"], -1, -2)}

    def without_time(self, bars: dict) -> dict:
        """Gradients of arrays in time, of the shape of what was given."""
        kept = (*STATIC, *self.varying)
        return {x: bars[x] if x in kept else bars[x].sum(axis=1) for x in NAMES}


def _check_threads(threads) -> None:
    if threads is not None and not (isinstance(threads, int | np.integer) and threads > 0):
        raise ValueError(f"threads is {threads!r}, expected a positive number")


def _named(own: dict) -> dict:
    """Own arrays that are given, by name."""
    for name in own:
        if name not in NAMES:
            raise TypeError(f"{name!r} is none of the arrays of a model: {', '.join(NAMES)}")
    return {name: X for name, X in own.items() if X is not None}


def _checked(Y, models, own: dict) -> tuple[_Given, StateSpace]:
    """What the engines take, and a model, or an error in the words of the caller."""
    alone = isinstance(models, StateSpace)
    if not alone:
        models = _checked_models(models)
        if own:
            raise ValueError(f"{', '.join(own)} of the series: part of their own models")
    template = models if alone else models[0]
    y, lengths = _stacked(Y, template)
    J, n, _ = y.shape
    if alone:
        arrays, varying = _with_own(template, own, J, n)
    else:
        if len(models) != J:
            raise ValueError(f"there are {len(models)} models for {J} series")
        arrays = {x: np.stack([getattr(model, x) for model in models]) for x in NAMES}
        varying = template.time_varying
    if np.isinf(y).any():
        j, t, i = np.argwhere(np.isinf(y))[0]
        raise ValueError(f"series {j} is infinite at step {t}, component {i}; NaN marks a gap")
    observed = ~np.isnan(y)
    blank = ~observed.any(axis=(1, 2))
    if blank.any():
        raise ValueError(f"series {blank.argmax()} has no observation at all: leave it out")
    _refuse_lengths(n, template, lengths)
    return _Given(y, _ends(observed), arrays, varying, lengths), template


def _stacked(Y, model: StateSpace) -> tuple[np.ndarray, list[int] | None]:
    """Y (J, n, p), filled with NaN after the end of series that are shorter; and their lengths."""
    p = model.p
    if isinstance(Y, np.ndarray) and Y.dtype != object:
        Y = _as_numbers("Y", Y, "; NaN marks a gap")
        if Y.ndim != 3 or Y.shape[2] != p:
            hint = "; use Y[:, :, np.newaxis]" if Y.ndim == 2 and p == 1 else ""
            raise ValueError(
                f"Y has shape {Y.shape}, expected J series of n steps, "
                f"(J, n, p) = (J, n, {p}){hint}"
            )
        if Y.size == 0:
            raise ValueError("Y is empty: it has no " + ("step" if len(Y) else "series"))
        _refuse_size(2 * Y.size, len(Y), "series and their gradient")
        return Y.astype(np.result_type(Y, model.a0), copy=False), None
    try:
        series = list(Y)
    except TypeError:
        raise ValueError(
            f"Y is {Y!r}, expected an array (J, n, {p}) or a list of J arrays (n_j, {p})"
        ) from None
    if not series:
        raise ValueError("Y is empty: it has no series")
    for j, y in enumerate(series):
        series[j] = y = _as_numbers(f"series {j}", y, "; NaN marks a gap")
        if y.ndim != 2 or y.shape[1] != p:
            hint = "; use y[:, np.newaxis]" if y.ndim == 1 and p == 1 else ""
            raise ValueError(
                f"series {j} has shape {y.shape}, expected (n, p) = (n, {p}), as the model has it"
                + hint
            )
        if len(y) == 0:
            raise ValueError(f"series {j} is empty: it has no step")
    lengths = [len(y) for y in series]
    _refuse_size(2 * len(series) * max(lengths) * p, len(series), "series, filled to one length,")
    dtype = np.result_type(model.a0, *series)
    filled = np.full((len(series), max(lengths), p), np.nan, dtype)
    for y, out in zip(series, filled, strict=True):
        out[: len(y)] = y
    return filled, lengths


def _own_array(name: str, X, J: int, shape: tuple, n: int) -> np.ndarray:
    """The series' own array, (J, *shape) or, but for a0 and P0, (J, n, *shape)."""
    X = _as_numbers(name, X)
    per_step = None if name in STATIC else (J, n, *shape)
    if X.shape not in ((J, *shape), per_step):
        letters = ", ".join(SHAPES[name])
        also = "" if per_step is None else f" or (J, n, {letters}) = {per_step}"
        raise ValueError(
            f"{name} has shape {X.shape}, expected one for each series, "
            f"(J, {letters}) = {(J, *shape)}{also}"
        )
    if not np.isfinite(X).all():
        raise ValueError(f"{name} is not finite for series {np.argwhere(~np.isfinite(X))[0][0]}")
    return X.astype(np.result_type(X, float))


def _ends(observed) -> np.ndarray:
    """The step after the last observation of each series."""
    return observed.shape[1] - observed.any(axis=2)[:, ::-1].argmax(axis=1)


def _with_own(model: StateSpace, own: dict, J: int, n: int) -> tuple[dict, tuple]:
    """The nine arrays, the series' own among them, and which vary over time."""
    arrays, sizes = model.asdict(), {"m": model.m, "p": model.p, "r": model.r}
    varying = set(model.time_varying) - own.keys()
    for name, X in own.items():
        shape = tuple(sizes[x] for x in SHAPES[name])
        own[name] = X = _own_array(name, X, J, shape, n)
        if X.ndim > len(shape) + 1:
            varying.add(name)
        if name in SYMMETRIC:
            _check_symmetric(name, X)
    arrays = {x: own[x] if x in own else X[np.newaxis] for x, X in arrays.items()}
    return arrays, tuple(x for x in NAMES if x in varying)


def _by_loop(given: _Given, gradient: bool):
    """The readable engine: one series after the other."""
    y, ends = given.y, given.ends
    parts = [(x[:end], given.model(j)) for j, (x, end) in enumerate(zip(y, ends, strict=True))]
    if not gradient:
        return np.array([reference.loglike(*part) for part in parts]), None, None
    values, dys, gradients = zip(
        *(reference.loglike_and_grad(*part) for part in parts), strict=True
    )
    l = np.array(values)
    dY = np.zeros(y.shape, l.dtype)
    bars = {x: np.zeros((len(y), *X.shape[1:]), l.dtype) for x, X in given.arrays.items()}
    for j, end in enumerate(ends):
        dY[j, :end] = dys[j]
        for name, X in gradients[j].asdict().items():
            bars[name][j, : end if name in given.varying else None] = X
    return l, dY, bars


def _shared(given: _Given, tol, gradient: bool, threads=None):
    """:mod:`helpers.kalman.compiled.panel`: series with a0, c and d of their own at most.

    Returns what `_own` does, gradients of what is shared as sums.
    """
    X = given.in_time()
    y = np.asarray(given.y - X["d"] if X["d"].any() else given.y, float)
    arrays = X["a0"], X["P0"][0], X["c"], *(X[x][0] for x in "TZHW")
    compiled, weights = _passes(), np.ones((len(y), 1))
    l, dY, a0_bar, c_bar, out, report = compiled.building.load("panel").loglike_and_grad(
        y, *arrays, weights, *[gradient] * 5, float(tol)
    )
    failed = np.full(len(y), -1)
    if report[0] < y.shape[1]:
        failed[report[1]] = report[0]
    if not gradient or failed.max() >= 0:
        return l.sum(axis=1), failed, None, None
    bars = compiled.gradients_in_time(X["R"][0], X["Q"][0], out, (*STATIC, *NAMES)).asdict()
    bars = {x: G[np.newaxis] for x, G in bars.items()} | {"a0": a0_bar, "c": c_bar, "d": -dY}
    return l.sum(axis=1), failed, dY, given.without_time(bars)


def _own(given: _Given, tol, gradient: bool, threads=None):
    """:mod:`helpers.kalman.compiled.per_series`: series that share nothing, spread over threads.

    Returns l (J,), NaN for series that failed, and the step where they did (J,), -1 for the others,
    dY and the gradients by name.
    """
    from numba import config

    from helpers.kalman.compiled.inputs import Arrays

    code, y, J = _passes().building.load("per_series"), given.y, len(given.y)
    X = given.in_time()
    R, Q = X.pop("R"), X.pop("Q")
    for name in ("P0", "H", "W"):
        X[name] = (X[name] + np.swapaxes(X[name], -1, -2)) / 2
    model = Arrays(**{x: np.require(A, float, "CW") for x, A in X.items()})
    shapes = [(J if gradient else 1, *A.shape[1:]) for A in model]
    _refuse_size(y.size + sum(map(np.prod, shapes)), J, "series with their gradients")
    out = Arrays(*map(np.zeros, shapes))
    y = np.require(y, float, "CW")
    l, failed, dY = np.zeros(J), np.full(J, -1), np.zeros(y.shape)
    fixed = given.ends, y, model, gradient, float(tol), l, failed, dY, out
    _in_pieces(threads or config.NUMBA_NUM_THREADS, J, lambda *cut: code.passes(*cut, *fixed))
    if not gradient:
        return l, failed, None, None
    bars = _passes().gradients_in_time(R, Q, out, (*STATIC, *NAMES))
    return l, failed, dY, given.without_time(bars.asdict())


def _in_pieces(threads: int, count: int, work) -> None:
    """`work` on pieces from 0 to count, several for each thread: so none waits long for another."""
    from concurrent.futures import ThreadPoolExecutor

    pieces = min(count, PIECES * threads) if threads > 1 else 1
    cuts = np.linspace(0, count, pieces + 1).astype(int)
    if pieces == 1:
        return work(*cuts)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, cuts[:-1], cuts[1:]))  # errors are raised here


def _refuse_size(numbers, J: int, what: str) -> None:
    """MemoryError where so many doubles are more than the machine has."""
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not known on this system
        return
    if 8 * numbers > there:
        raise MemoryError(
            f"{J} {what} take {8 * numbers / 2**30:.0f} GiB and this machine has "
            f"{there / 2**30:.0f}: take fewer at once, or helpers.kalman.distributed"
        )


def _checked_models(models) -> list[StateSpace]:
    try:
        models = list(models)
    except TypeError:
        models = [models]
    if not models:
        raise ValueError("there is no model")
    for j, model in enumerate(models):
        if not isinstance(model, StateSpace):
            raise ValueError(f"model {j} is {model!r}, expected a StateSpace or a list of them")
        for name in NAMES:
            X, first = getattr(model, name), getattr(models[0], name)
            if X.shape != first.shape:
                raise ValueError(
                    f"{name} of model {j} has shape {X.shape}, that of model 0 {first.shape}: "
                    "models of many series have arrays of the same shapes"
                )
    return models


def _refuse_lengths(n: int, model: StateSpace, lengths) -> None:
    if model.n not in (None, n):
        longest = "the longest series has" if lengths is not None else "Y has"
        raise ValueError(f"{longest} {n} steps, but {model.time_varying[0]} has {model.n}")
