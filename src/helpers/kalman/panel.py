r"""Many series at once: one covariance recursion for all that share a model and their gaps.

P, F, the gain and, on the way back, N and D depend on the model and on *where* y is missing, not on
y. So series with one model and the same gaps share them, and what is left for each series is a
column: with :math:`a, r` (m, J) and :math:`v, u, e` (p, J)

.. math::

   v = y_t - Z a - d, \quad u = F^{-1} v, \quad a_{t|t} = a + K^f v, \quad
   a_{t+1} = T a_{t|t} + c, \\
   e = u - K^{f\top} T^\top r, \quad \hat\alpha = a_{t|t} + P_{t|t} T^\top r, \quad
   r_{t-1} = Z^\top e + T^\top r ,

and the gradients of the summed log-likelihood are sums over steps and columns, less J times what
the covariances give:

.. math::

   \bar W = \tfrac12 \sum_t \Bigl(\sum_j r_j r_j^\top - J N\Bigr), \qquad
   \bar T = \sum_t \Bigl(\sum_j r_j \hat\alpha_j^\top - J N T P_{t|t}\Bigr), \quad \dots

The second part is the gradient of a series that never surprises, y = 0 with a0 = c = d = 0: then r
and e are zero. So it comes from the pass that every single series takes.

Series of different lengths: the gaps after the end are gaps like others, and r and N are zero
there. Series with gaps of their own are a group each.

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

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from helpers.kalman import _fused, _takes_reference, reference
from helpers.kalman.recursions import TOLERANCE, pull_columns, update_columns
from helpers.kalman.square_root import columns_at_the_start, pull_step_columns
from helpers.statespace import NAMES, SHAPES, STATIC, Gradients, StateSpace, _as_numbers

__all__ = ["loglike", "loglike_and_grad"]


def loglike(Y, model, method: str = "fused", tol: float = TOLERANCE, *, a0=None, c=None, d=None):  # noqa: N803
    """Log-likelihood of each of many series.

    Parameters
    ----------
    Y, model, method, tol, a0, c, d
        As :func:`loglike_and_grad`.

    Returns
    -------
    array (J,)

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError, MemoryError, ImportError
        As :func:`loglike_and_grad`.
    """
    if not isinstance(model, StateSpace):
        return _own_models(Y, model, method, tol, (a0, c, d), gradient=False)[0]
    given = _checked(Y, model, a0, c, d)
    return _engine(given, method)(given, tol, gradient=False).l.sum(axis=1)


def loglike_and_grad(
    Y,  # noqa: N803
    model,
    method: str = "fused",
    tol: float = TOLERANCE,
    *,
    a0=None,
    c=None,
    d=None,
):
    """Log-likelihood of each of many series, and the gradient of their sum.

    Parameters
    ----------
    Y : array (J, n, p), or list of J arrays (n_j, p)
        NaN marks a gap. Series of a list begin at the same step and may end at different ones.
    model : StateSpace, or list of J StateSpace
        The model of all series, or one for each: then nothing is shared but the threads, the models
        have arrays of the same shapes, and gradients are not summed.
    method : "fused" or "reference"
        As :func:`helpers.kalman.loglike_and_grad`; complex arrays take the reference. Series with
        own models are spread over threads, as many as Numba is told to use (NUMBA_NUM_THREADS).
    tol : float
        As there.
    a0 : array (J, m), optional
        The series' own a0, in the place of the model's.
    c : array (J, m) or (J, n, m), optional
    d : array (J, p) or (J, n, p), optional
        The series' own c and d, in the place of the model's.

    Returns
    -------
    l : array (J,)
    dY : array (J, n, p), or list of J arrays (n_j, p)
        Of each log-likelihood with respect to its own series; zero in the gaps.
    gradients : Gradients
        Of the sum of l, one array for each of the model's, of the same shape. Those of own a0, c or
        d have the shape of what was given; with own models all have a leading axis J.

    Raises
    ------
    ValueError
        If Y, the model, a0, c and d do not fit each other, a series has no observation, or
        ``method`` or ``tol`` is none of those: the message names the series.
    numpy.linalg.LinAlgError
        If F is not positive definite at some step, which the message names.
    MemoryError
        If memory runs out.
    ImportError
        If the compiled pass is asked for where Numba is missing.
    """
    if not isinstance(model, StateSpace):
        return _own_models(Y, model, method, tol, (a0, c, d), gradient=True)
    given = _checked(Y, model, a0, c, d)
    found = _engine(given, method)(given, tol, gradient=True)
    own = {"a0": a0, "c": c, "d": d}
    bars = found.gradients.asdict() | {
        "a0": found.a0_bar, "c": found.c_bar, "d": -found.dY,
    }  # fmt: skip
    for name, X in own.items():
        varies = name != "a0" and (name in model.time_varying if X is None else np.ndim(X) == 3)
        if name != "a0" and not varies and bars[name].ndim == 3:
            bars[name] = bars[name].sum(axis=1)
        if X is None:  # one for all: where an engine has not summed them, here
            bars[name] = bars[name].sum(axis=0)
    return found.l.sum(axis=1), given.as_given(found.dY), Gradients(**bars)


class _Given(NamedTuple):
    """What is asked, checked: d is taken off y, and a0 and c are those of the series."""

    y: np.ndarray  # (J, n, p), NaN for what is missing
    observed: np.ndarray  # (J, n, p) of bool
    a0: np.ndarray  # (J or 1, m)
    c: np.ndarray  # (J or 1, n or 1, m)
    model: StateSpace  # with zeros for a0, c and d
    lengths: list[int] | None  # of the series of a list

    def as_given(self, X):
        """An array (J, n, p) as a list, if Y was one."""
        return X if self.lengths is None else [x[:n] for x, n in zip(X, self.lengths, strict=True)]


class _Found(NamedTuple):
    """What an engine answers."""

    l: np.ndarray  # (J, n)
    dY: np.ndarray | None = None  # (J, n, p)  # noqa: N815
    a0_bar: np.ndarray | None = None  # (J, m), or (1, m) for the sum
    c_bar: np.ndarray | None = None  # (J, n, m), with 1 for J or n where it is a sum
    gradients: Gradients | None = None  # those of a0, c and d are zeros


def _engine(given: _Given, method: str):
    complex_mean = np.iscomplexobj(given.a0) or np.iscomplexobj(given.c)
    loop = _takes_reference(given.y, given.model, method) or complex_mean
    return _by_loop if loop else _compiled


def _by_loop(given: _Given, tol, gradient: bool) -> _Found:
    """The readable engine: a loop over groups, and in each over steps."""
    y, observed, a0, c, model, _ = given
    (J, n, p), m = y.shape, model.m
    dtype = np.result_type(y, a0, c, model.a0)
    a0, c = np.broadcast_to(a0, (J, m)), np.broadcast_to(c, (J, n, m))
    l, dY = np.zeros((J, n), dtype), np.zeros((J, n, p), dtype)
    a0_bar, c_bar = np.zeros((J, m), dtype), np.zeros((J, n, m), dtype)
    total = Gradients(*(np.zeros(X.shape, dtype) for X in model.asdict().values()))
    patterns, group_of = np.unique(observed, axis=0, return_inverse=True)
    for g, pattern in enumerate(patterns):
        members = np.flatnonzero(group_of.ravel() == g)
        end = int(np.flatnonzero(pattern.any(axis=1))[-1]) + 1  # after it there are only gaps
        group = _Group(y[members, :end], a0[members], c[members, :end], _until(model, end))
        l[members, :end] = group.l
        if gradient:
            dY[members, :end], a0_bar[members], c_bar[members, :end], gradients = group.pull()
            for name, X in gradients.asdict().items():
                out = getattr(total, name)
                out[: end if name in model.time_varying else None] += X
    return _Found(l, dY, a0_bar, c_bar, total)


def _until(model: StateSpace, end: int) -> StateSpace:
    """The model of the first steps."""
    return replace(model, **{name: getattr(model, name)[:end] for name in model.time_varying})


class _Group:
    """Series (J, n, p) with the same gaps: the columns forwards, and what the way back needs."""

    def __init__(self, y, a0, c, model: StateSpace):
        self.model, self.n = model, y.shape[1]
        self.observed = ~np.isnan(y[0])
        # A series that never surprises: all that it gives comes from the covariances.
        self.nothing = np.where(self.observed, 0.0, np.nan)
        self.l_of_P, (self.steps, self.B_t), filtered = reference._filter_in_parts(
            self.nothing, model
        )
        self.gains = [(step.C_inv, step.S, step.Kf, step.J) for step in self.steps]
        self.P_filt = [None] * len(self.steps)
        if filtered:
            self.gains += zip(filtered.C_inv, filtered.S, filtered.Kf, filtered.J, strict=True)
            self.P_filt += list(filtered.out.P_filt)
        self.T = model.over_time("T", self.n)
        Z = model.over_time("Z", self.n) * self.observed[:, :, np.newaxis]
        y = np.where(self.observed, y, 0)
        a, self.w, self.a_filt = a0.T, [], []
        for t, (C_inv, _, Kf, _) in enumerate(self.gains):
            w, a_filt = update_columns(y[:, t].T, a, 0, Z[t], C_inv, Kf)
            self.w.append(w)
            self.a_filt.append(a_filt)
            a = self.T[t] @ a_filt + c[:, t].T
        self.l = self.l_of_P - (np.array(self.w) ** 2).sum(axis=1).T / 2

    def pull(self, times=None):
        """dy (J, n, p), those of a0 (J, m) and c (J, n, m), and the sum of all that is shared.

        What the covariances give counts as often as there are series, or as `times` says.
        """
        model, k = self.model, len(self.steps)
        r, Br, per_step, es, rs = 0 * self.a_filt[0], None, [], [], []
        for t in reversed(range(self.n)):
            T, w, a_filt = self.T[t], self.w[t], self.a_filt[t]
            if t >= k:
                e, smoothed, before = pull_columns(r, T, w, *self.gains[t], self.P_filt[t], -a_filt)
            else:
                Br = self.B_t @ r if Br is None else Br
                e, smoothed, before, Br = pull_step_columns(self.steps[t], r, Br, a_filt, w, T)
            per_step.append(
                reference.StepGradients(
                    -e.sum(axis=1), r.sum(axis=1), e.sum(axis=1), r @ smoothed.T, e @ smoothed.T,
                    e @ e.T / 2, r @ r.T / 2,
                )
            )  # fmt: skip
            es.append(e)
            rs.append(r)
            r = before
        if k:
            r = columns_at_the_start(r, Br, model.P0)
        nought = np.zeros(model.m)
        _, quadratic = reference._accumulate(
            model, nought, r @ r.T / 2, per_step[::-1], self.observed
        )
        covariances = reference.loglike_and_grad(self.nothing, model)[2]
        J = r.shape[1] if times is None else times
        total = Gradients(*(X + J * N for X, N in zip(quadratic, covariances, strict=True)))
        dy = -np.array(es[::-1]) * self.observed[:, :, np.newaxis]
        return dy.transpose(2, 0, 1), r.T, np.array(rs[::-1]).transpose(2, 0, 1), total


def _checked(Y, model: StateSpace, a0, c, d) -> _Given:  # noqa: N803
    """What the engines take, or an error in the words of the caller."""
    y, lengths = _stacked(Y, model)
    J, n, p = y.shape
    observed = ~np.isnan(y)
    _refuse(y, observed)
    _refuse_lengths(n, model, lengths)
    a0 = model.a0[np.newaxis] if a0 is None else _own("a0", a0, J, (model.m,))
    c, d = (
        (X if name in model.time_varying else X[np.newaxis])[np.newaxis]
        if given is None
        else _own(name, given, J, (size,), n)
        for name, given, X, size in (("c", c, model.c, model.m), ("d", d, model.d, p))
    )
    zero = replace(model, a0=0 * model.a0, c=np.zeros(model.m), d=np.zeros(p))
    return _Given(y - d, observed, a0, c, zero, lengths)


def _stacked(Y, model: StateSpace) -> tuple[np.ndarray, list[int] | None]:  # noqa: N803
    """Y (J, n, p), filled with NaN after the end of series that are shorter; and their lengths."""
    p = model.p
    if isinstance(Y, np.ndarray) and Y.dtype != object:
        Y = _as_numbers("Y", Y, "; NaN marks a gap")  # noqa: N806
        if Y.ndim != 3 or Y.shape[2] != p:
            hint = "; use Y[:, :, np.newaxis]" if Y.ndim == 2 and p == 1 else ""
            raise ValueError(
                f"Y has shape {Y.shape}, expected J series of n steps, "
                f"(J, n, p) = (J, n, {p}){hint}"
            )
        if Y.size == 0:
            raise ValueError("Y is empty: it has no " + ("step" if len(Y) else "series"))
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
    dtype = np.result_type(model.a0, *series)
    filled = np.full((len(series), max(lengths), p), np.nan, dtype)
    for y, out in zip(series, filled, strict=True):
        out[: len(y)] = y
    return filled, lengths


def _refuse(y, observed) -> None:
    """Infinities, and series of which nothing is known."""
    if np.isinf(y).any():
        j, t, i = np.argwhere(np.isinf(y))[0]
        raise ValueError(f"series {j} is infinite at step {t}, component {i}; NaN marks a gap")
    blank = ~observed.any(axis=(1, 2))
    if blank.any():
        raise ValueError(f"series {blank.argmax()} has no observation at all: leave it out")


def _own(name: str, X, J: int, shape: tuple, n: int | None = None) -> np.ndarray:  # noqa: N803
    """The series' own a0, c or d: c and d with an axis of length 1 or n for time."""
    X = _as_numbers(name, X)
    per_step = None if n is None else (J, n, *shape)
    if X.shape not in ((J, *shape), per_step):
        also = "" if n is None else f" or (J, n, {SHAPES[name][0]}) = {per_step}"
        raise ValueError(
            f"{name} has shape {X.shape}, expected one for each series, "
            f"(J, {SHAPES[name][0]}) = {(J, *shape)}{also}"
        )
    if not np.isfinite(X).all():
        raise ValueError(f"{name} is not finite for series {np.argwhere(~np.isfinite(X))[0][0]}")
    X = X.astype(np.result_type(X, float))
    return X if n is None or X.ndim == 3 else X[:, np.newaxis]


def _compiled(given: _Given, tol, gradient: bool) -> _Found:
    """The fast engine: :mod:`helpers.kalman.fused.panel`."""
    y, _, a0, c, model, _ = given
    fused = _fused()
    _, _, P0, _, _, T, Z, H, W = fused.arrays_of(y[0], model)
    # Copies: machine code is kept for arrays of one type, and those of a model are read-only.
    arrays = [np.array(M, dtype=float, order="C") for M in (a0, P0, c, T, Z, H, W)]
    weights, flags = np.ones(y.shape[:2]), [gradient] * 5
    l, dY, a0_bar, c_bar, out, report = fused.building.load("panel").loglike_and_grad(
        np.require(y, float, "CW"), *arrays, weights, *flags, fused._tolerance(tol)
    )
    if report[0] < y.shape[1]:
        raise np.linalg.LinAlgError(
            f"series {report[1]}: {reference._not_positive_definite(int(report[0]))}"
        )
    if not gradient:
        return _Found(l)
    return _Found(l, dY, a0_bar, c_bar, fused.gradients_of(model, out))


def _own_models(Y, models, method, tol, own, gradient: bool):  # noqa: N803
    """A model for each series: their log-likelihoods (J,) and, for a gradient, dY and Gradients."""
    models = _checked_models(models)
    if any(X is not None for X in own):
        raise ValueError("a0, c and d of the series are part of their own models")
    y, lengths = _stacked(Y, models[0])
    J, n, _ = y.shape
    if len(models) != J:
        raise ValueError(f"there are {len(models)} models for {J} series")
    observed = ~np.isnan(y)
    _refuse(y, observed)
    _refuse_lengths(n, models[0], lengths)
    ends = n - observed.any(axis=2)[:, ::-1].argmax(axis=1)
    dtype = np.result_type(y, *(model.a0 for model in models))
    loop = _takes_reference(y, models[0], method) or dtype.kind == "c"
    l, dY, bars = (_own_by_loop if loop else _own_compiled)(  # noqa: N806
        y, ends, models, tol, gradient
    )
    if not gradient:
        return (l,)
    given = _Given(y, observed, l, l, models[0], lengths)
    return l, given.as_given(dY), bars


def _own_by_loop(y, ends, models, tol, gradient):
    """One series after the other."""
    parts = [(x[:end], _until(model, end)) for x, end, model in zip(y, ends, models, strict=True)]
    if not gradient:
        return np.array([reference.loglike(*part) for part in parts]), None, None
    each = [reference.loglike_and_grad(*part) for part in parts]
    l = np.array([value for value, _, _ in each])
    dY = np.zeros(y.shape, l.dtype)  # noqa: N806
    bars = {x: np.zeros((len(y), *X.shape), l.dtype) for x, X in models[0].asdict().items()}
    for j, (_, dy, gradients) in enumerate(each):
        dY[j, : ends[j]] = dy
        for name, X in gradients.asdict().items():
            bars[name][j, : ends[j] if name in models[0].time_varying else None] = X
    return l, dY, Gradients(**bars)


def _own_compiled(y, ends, models, tol, gradient):
    """:mod:`helpers.kalman.fused.own`, its series spread over threads."""
    from concurrent.futures import ThreadPoolExecutor

    from numba import config

    from helpers.kalman.fused.inputs import Arrays

    fused, kept = _fused(), (*STATIC, *models[0].time_varying)
    code = fused.building.load("own")
    X = {x: np.stack([getattr(model, x) for model in models]).astype(float) for x in NAMES}
    X = {x: A if x in kept else A[:, np.newaxis] for x, A in X.items()}
    R, Q = X.pop("R"), X.pop("Q")
    given = Arrays(**X, W=R @ Q @ np.swapaxes(R, -1, -2))
    out = Arrays(*(np.zeros(A.shape) for A in given))
    y = np.ascontiguousarray(y, dtype=float)
    J, threads = len(y), config.NUMBA_NUM_THREADS
    l, dY = np.zeros(y.shape[:2]), np.zeros(y.shape)  # noqa: N806
    fixed = ends, y, given, gradient, fused._tolerance(tol), l, dY, out
    # Several pieces for each thread, so that none waits long for the last one.
    cuts = np.unique(np.linspace(0, J, min(J, 8 * threads) + 1).astype(int))
    with ThreadPoolExecutor(threads) as pool:
        pieces = pool.map(lambda cut: code.passes(*cut, *fixed), zip(cuts, cuts[1:], strict=False))
    for j, t in pieces:
        if j >= 0:
            raise np.linalg.LinAlgError(f"series {j}: {reference._not_positive_definite(int(t))}")
    Q_bar = np.swapaxes(R, -1, -2) @ out.W @ R
    bars = out._asdict() | {
        "R": 2 * out.W @ R @ ((Q + np.swapaxes(Q, -1, -2)) / 2),
        "Q": (Q_bar + np.swapaxes(Q_bar, -1, -2)) / 2,
    }
    bars = {x: bars[x] if x in kept else bars[x].sum(axis=1) for x in NAMES}
    return l.sum(axis=1), dY, Gradients(**bars)


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
