"""The gradient of the log-likelihood in as many digits as one likes, from a filter of its own.

Nothing of the package is in it: missing entries are deleted, F is eliminated by Gauss and Jordan,
and each derivative is a complex step in the arithmetic of mpmath.
"""

import mpmath
import numpy as np

from helpers.kalman import StateSpace

SYMMETRIC = ("P0", "H", "Q")


def loglike_in_any_arithmetic(y, observed, weights, arrays):
    """The weighted log-likelihood; arrays of objects, whatever numbers they hold."""
    at = {
        name: X if X.ndim == 1 + (name not in ("a0", "c", "d")) else X for name, X in arrays.items()
    }
    a, P, value = at["a0"], at["P0"], mpmath.mpf(0)
    log_2pi = mpmath.log(2 * mpmath.pi)
    for t, (o, g) in enumerate(zip(observed, weights, strict=True)):
        c, d, T, Z, R, H, Q = (
            arrays[x][t] if arrays[x].ndim > (1 if x in "cd" else 2) else arrays[x]
            for x in "cdTZRHQ"
        )
        Z, H, k = Z[o], H[np.ix_(o, o)], int(o.sum())
        X = np.column_stack([Z @ P @ Z.T + H, y[t][o] - d[o] - Z @ a, Z @ P])
        v = X[:, k].copy()
        for j in range(k):
            value = value - g * (mpmath.log(X[j, j]) + log_2pi) / 2
            X[j] = X[j] / X[j, j]
            for i in set(range(k)) - {j}:
                X[i] = X[i] - X[i, j] * X[j]
        value, K = value - g * (v @ X[:, k]) / 2, X[:, k + 1 :].T
        J = np.eye(len(a), dtype=int) - K @ Z
        a = T @ (a + K @ v) + c
        P = T @ (J @ P @ J.T + K @ H @ K.T) @ T.T + R @ Q @ R.T
    return value


def true_gradient(y, model: StateSpace, names=None, weights=None, digits=80) -> dict:
    """Value and gradients ("l", "y" and the model's names) of the weighted log-likelihood.

    As float arrays, each entry right to the last digit; those of symmetric arrays symmetric.
    """
    observed = ~np.isnan(y)
    arrays = model.asdict() | {"y": np.where(observed, y, 0)}
    with mpmath.workdps(digits):
        weights = [mpmath.mpf(float(x)) for x in (np.ones(len(y)) if weights is None else weights)]
        exact = {
            name: np.vectorize(lambda x: mpmath.mpc(float(x)), otypes=[object])(X)
            for name, X in arrays.items()
        }

        def evaluate(**changed):
            moved = exact | changed
            return loglike_in_any_arithmetic(
                moved["y"], observed, weights, {x: moved[x] for x in model.asdict()}
            )

        step = mpmath.mpf(10) ** (-digits // 2)
        out = {"l": float(evaluate().real)}
        for name in names or arrays:
            G = np.zeros(arrays[name].shape)
            for i in np.ndindex(G.shape):
                if name == "y" and not observed[i]:
                    continue
                mirror = (*i[:-2], i[-1], i[-2]) if name in SYMMETRIC else i
                if mirror < i:
                    G[i] = G[mirror]
                    continue
                X = exact[name].copy()
                for index in (i, mirror):
                    X[index] = X[index] + mpmath.mpc(0, step / 2)
                G[i] = float(evaluate(**{name: X}).imag / step)
            out[name] = G
    return out
