"""The readable text for compiled code: what Numba needs to know of its modules."""

import inspect

import numpy as np
from numba import types
from numba.extending import overload

from helpers.kalman import recursions, square_root
from helpers.kalman.compiled import registers  # noqa: F401 (what it takes, is not asked for here)
from helpers.kalman.compiled.tiles import PART, jitable


@overload(recursions.cholesky, jit_options=PART)
def _cholesky(F):
    if not isinstance(F, types.Array):
        return None

    def factor(F):
        C, logdet = np.zeros_like(F), 0.0
        for j in range(len(F)):
            x = F[j, j] - np.sum(C[j, :j] ** 2)
            if not x > 0.0:
                return np.full_like(F, np.nan), np.nan
            logdet += np.log(x)
            C[j, j] = np.sqrt(x)
            for i in range(j + 1, len(F)):
                C[i, j] = (F[i, j] - np.sum(C[i, :j] * C[j, :j])) / C[j, j]
        return C, logdet

    return factor


@overload(recursions.unless_singular, jit_options=PART)
def _unless_singular(logdet, inflated):
    most = recursions.most_inflated(float)
    return lambda logdet, inflated: logdet if inflated < most else np.nan


@overload(recursions.solve, jit_options=PART)
def _solve(C, B):
    if not isinstance(C, types.Array):
        return None
    return recursions.solve.dispatch(object)


@overload(recursions.rows, jit_options=PART)
def _rows(X, o):
    if not isinstance(X, types.Array):
        return None

    def rows(X, o):
        kept = np.zeros(X.shape)
        for i in range(len(o)):
            if o[i] != 0.0:
                kept[i] = X[i]
        return kept

    return rows


KNOWN = "cholesky", "unless_singular", "solve", "rows", "at_step"
for _module in (recursions, square_root):
    for _name, _function in vars(_module).items():
        local = inspect.isfunction(_function) and _function.__module__ == _module.__name__
        if local and _name not in KNOWN:
            of_arrays = _function.dispatch(object) if hasattr(_function, "dispatch") else None
            jitable(_function, of_arrays)
