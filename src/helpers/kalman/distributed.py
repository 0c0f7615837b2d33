r"""Many series over the workers of a Dask cluster: as :mod:`helpers.kalman.panel`, piece by piece.

The log-likelihoods of series are independent and gradients of shared arrays are sums, so the
workers need not communicate. A :class:`Panel` hands out pieces of the series once; each call sends
the model, and adds up what comes back. If a worker dies, another one repeats its work: pieces are
tasks, which the scheduler can run again, and not data left with a worker.

Series with the same gaps are put into the same pieces where possible, because each piece computes
the covariances of the patterns in it. For example::

    from distributed import Client
    from helpers.kalman.distributed import Panel

    panel = Panel(Y, Client("scheduler:8786"))
    l, dY, gradients = panel.loglike_and_grad(model)
    fits = panel.fit(model, local_level, start=[0.0, 0.0])

The workers need this package, and compile its passes once on each machine. Its extra ``[dask]``
brings Dask's `distributed`.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable

import numpy as np

from helpers.kalman import _imported, panel
from helpers.kalman.panel_fit import Fits, _checked_start, fit
from helpers.kalman.recursions import TOLERANCE
from helpers.statespace import NAMES, Gradients, StateSpace, _as_numbers

__all__ = ["Panel"]


class Panel:
    """Many series, spread over a cluster.

    Parameters
    ----------
    Y : array (J, n, p), or list of J arrays (n_j, p)
        NaN marks a gap.
    client : distributed.Client, optional
        The current one if None.
    chunk : int
        Series in a piece, which is one task. A thousand short ones take some milliseconds; fits
        take some hundred times as long.

    Raises
    ------
    ValueError
        If Y holds no series, ``chunk`` is not a positive number, or there is no client.
    ImportError
        If `distributed` is missing.
    """

    def __init__(self, Y, client=None, chunk: int = 2000):
        self._dask = _imported("distributed", "distributed", "[dask]")
        if not isinstance(chunk, int) or chunk < 1:
            raise ValueError(f"chunk is {chunk!r}, expected a positive number of series")
        Y = Y if isinstance(Y, np.ndarray) and Y.dtype != object else list(Y)
        if len(Y) == 0:
            raise ValueError("Y is empty: it has no series")
        if client is None:
            try:
                client = self._dask.get_client()
            except ValueError:
                raise ValueError(
                    "there is no cluster: make one with distributed.Client(), or pass a client"
                ) from None
        self._client, self._Y = client, Y
        order = _by_pattern(Y)
        self._members = [order[i : i + chunk] for i in range(0, len(Y), chunk)]
        # Of a list the first of each piece is filled up: a model that varies has as many steps.
        listed = isinstance(Y, list)
        longest = max((len(y) for y in Y if np.ndim(y) == 2), default=0) if listed else 0
        pieces = ([Y[j] for j in some] if listed else Y[some] for some in self._members)
        self._pieces = [client.submit(_piece, Y, longest, pure=False) for Y in pieces]

    def loglike(self, model, method: str = "fused", tol: float = TOLERANCE, **own):
        """As :func:`helpers.kalman.panel.loglike`: array (J,)."""
        found = self._map(panel.loglike, model, own, method, tol)
        return _back(self._members, found)

    def loglike_and_grad(self, model, method: str = "fused", tol: float = TOLERANCE, **own):
        """As :func:`helpers.kalman.panel.loglike_and_grad`: l, dY and gradients."""
        parts = self._map(panel.loglike_and_grad, model, own, method, tol)
        l, dYs, bars = zip(*parts, strict=True)
        if isinstance(self._Y, list):
            of = dict(zip(np.concatenate(self._members), itertools.chain(*dYs), strict=True))
            dY = [of[j][: len(y)] for j, y in enumerate(self._Y)]
        else:
            dY = _back(self._members, dYs)
        each = [x for x in own if own[x] is not None] if isinstance(model, StateSpace) else NAMES
        bars = dict(zip(NAMES, zip(*bars, strict=True), strict=True))
        bars = {x: _back(self._members, G) if x in each else sum(G) for x, G in bars.items()}
        return _back(self._members, l), dY, Gradients(**bars)

    def fit(
        self, model: StateSpace, arrays: Callable, start, *, progress: Callable | None = None, **how
    ) -> Fits:
        """As :func:`helpers.kalman.panel_fit.fit`, which takes the remaining arguments.

        A piece that no worker can finish is reported series by series in `Fits.message`; an error
        is raised only if all pieces end in one.

        Parameters
        ----------
        model, arrays, start
            As there.
        progress : function, optional
            Called with the number of series that are done and that of all, after each piece. If
            None, a line on stderr says so when stderr is a terminal.
        """
        J, how = len(self._Y), {"threads": 1} | how | {"pure": False}
        start, tasks = _checked_start(start, J), {}
        for piece, members in zip(self._pieces, self._members, strict=True):
            tasks[self._client.submit(fit, piece, model, arrays, start[members], **how)] = members
        parts, errors, done = dict.fromkeys(tasks), [], 0
        for task in self._dask.as_completed(list(tasks)):
            try:
                parts[task] = task.result()
            except Exception as error:  # noqa: BLE001 (a worker's: the others go on)
                errors.append(_renumbered(error, tasks[task]))
                parts[task] = _not_done(errors[-1], start.shape[1], len(tasks[task]))
            task.release()
            done += len(tasks[task])
            (progress or _line)(done, J)
        if len(errors) == len(parts):
            raise errors[0]
        found = zip(*parts.values(), strict=True)
        return Fits(*(_back(self._members, each) for each in found))

    def _map(self, function, model, own, method, tol) -> list:
        J = len(self._Y)
        for name, X in own.items():
            if X is not None and np.shape(X)[:1] != (J,):
                raise ValueError(
                    f"{name} has shape {np.shape(X)}, expected a first axis for {J} series"
                )
        models = None if isinstance(model, StateSpace) else list(model)
        if models is not None and len(models) != J:
            raise ValueError(f"there are {len(models)} models for {J} series")
        tasks, found = [], []
        for piece, members in zip(self._pieces, self._members, strict=True):
            given = model if models is None else [models[j] for j in members]
            some = {x: _as_numbers(x, X)[members] for x, X in own.items() if X is not None}
            how = some | {"threads": 1, "pure": False}
            tasks.append(self._client.submit(function, piece, given, method, tol, **how))
        for task, members in zip(tasks, self._members, strict=True):
            try:
                found.append(task.result())
            except (ValueError, np.linalg.LinAlgError) as error:
                for other in tasks:
                    other.cancel()
                raise _renumbered(error, members) from None
        return found


def _piece(Y, longest: int):
    """The series, the first one of a list filled up to the longest of all."""
    first = Y[0]
    if np.ndim(first) == 2 and 0 < len(first) < longest and not np.ma.isMaskedArray(first):
        gap = np.full((longest - len(first), np.shape(first)[1]), np.nan)
        Y[0] = np.concatenate([first, gap])
    return Y


def _by_pattern(Y) -> np.ndarray:
    """The series' numbers, those with the same gaps one after the other."""
    if not isinstance(Y, np.ndarray) or Y.dtype.kind not in "fc":
        return np.arange(len(Y))
    gaps = np.packbits(np.isnan(Y).reshape(len(Y), -1), axis=1)
    return np.lexsort(gaps.T[::-1]) if gaps.any() else np.arange(len(Y))


def _back(members, parts) -> np.ndarray:
    """What belongs to the series, in their order."""
    return np.concatenate(parts)[np.argsort(np.concatenate(members))]


def _renumbered(error: Exception, members) -> Exception:
    """An error about series of a piece, with their numbers among all."""
    if not isinstance(error, ValueError | np.linalg.LinAlgError):
        return error
    return type(error)(
        re.sub(r"\b(series|model) (\d+)", lambda m: f"{m[1]} {members[int(m[2])]}", str(error))
    )


def _not_done(error, k: int, J: int) -> Fits:
    """The fits of a piece that ended with an error, k parameters each."""
    nothing, why = np.full((J, k), np.nan), " ".join(f"{type(error).__name__}: {error}".split())
    fewer = np.zeros(J, int), np.zeros(J, bool), np.full(J, why)
    return Fits(nothing, nothing[:, 0], nothing, *fewer)


def _line(done: int, J: int) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r{done} of {J} series are fitted", end="\n" if done == J else "", file=sys.stderr)
