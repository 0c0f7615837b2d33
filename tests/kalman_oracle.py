"""What is independent of the package: the joint law of states and observations, by no filter, and
the gradient of the log-likelihood in as many digits as one likes, from a filter of its own.

Nothing of the package is in it: missing entries are deleted, F is eliminated by Gauss and Jordan,
and each derivative is a complex step in the arithmetic of FLINT, whose numbers are balls: each
carries a bound of its own error, so that the digits are not hoped for but known.
"""

import flint
import numpy as np

from helpers.kalman import StateSpace

SYMMETRIC = ("P0", "H", "Q")


def joint(n, a0, P0, c, d, T, Z, R, H, Q):
    """The law of n states and observations, stacked, from arrays over time, complex ones too.

    Mean and covariance of the states; what the first one adds to them; and Z, d and H of all steps
    in blocks. Covariances count by their symmetric part.
    """
    m, p, kind = len(a0), d.shape[-1], np.result_type(a0, P0, c, d, T, Z, R, H, Q)
    W = R @ ((Q + np.swapaxes(Q, 1, 2)) / 2) @ np.swapaxes(R, 1, 2)
    G, add = np.eye(n * m, dtype=kind), np.zeros(n * m, kind)
    noise, Z_all, H_all = (np.zeros(shape, kind) for shape in
                           ((n * m, n * m), (n * p, n * m), (n * p, n * p)))  # fmt: skip
    noise[:m, :m], add[:m] = (P0 + P0.T) / 2, a0
    for t in range(n):
        here, seen = slice(t * m, (t + 1) * m), slice(t * p, (t + 1) * p)
        Z_all[seen, here], H_all[seen, seen] = Z[t], (H[t] + H[t].T) / 2
        if t < n - 1:
            after = slice((t + 1) * m, (t + 2) * m)
            G[after] = T[t] @ G[here] + G[after]
            noise[after, after], add[after] = W[t], c[t]
    return G @ add, G @ noise @ G.T, G[:, :m], Z_all, d[:n].ravel(), H_all


def joint_of(model: StateSpace, n: int):
    """The same of a model."""
    over_time = (model.over_time(x, n) for x in "cdTZRHQ")
    return joint(n, model.a0, model.P0, *over_time)


def law_of_data(*arguments, **named):
    """Mean and covariance of the observations alone."""
    mean, V, _, Z, d, H = joint(*arguments, **named)
    return Z @ mean + d, Z @ V @ Z.T + H


def exact(X, number=flint.arb):
    """An array of FLINT's numbers: of floats, or of such numbers already."""
    take = np.vectorize(lambda x: number(x if isinstance(x, flint.arb) else float(x)), [object])
    return take(X)


def loglike_in_any_arithmetic(y, observed, weights, arrays, bars=()):
    """The weighted log-likelihood; arrays of FLINT's numbers, real or complex.

    With the filter's other outputs, each times what `bars` has for it: a_filt, a_pred, y_hat,
    P_filt, P_pred, F, over time.
    """
    a, P, value = arrays["a0"], arrays["P0"], flint.arb(0)
    log_2pi = (2 * flint.arb.pi()).log()
    for t, (o, g) in enumerate(zip(observed, weights, strict=True)):
        c, d, T, Z, R, H, Q = (
            arrays[x][t] if arrays[x].ndim > (1 if x in "cd" else 2) else arrays[x]
            for x in "cdTZRHQ"
        )
        Z, H, k = Z[o], H[np.ix_(o, o)], int(o.sum())
        X = np.column_stack([Z @ P @ Z.T + H, y[t][o] - d[o] - Z @ a, Z @ P])
        v = X[:, k].copy()
        for j in range(k):
            value = value - g * (X[j, j].log() + log_2pi) / 2
            X[j] = X[j] / X[j, j]
            for i in set(range(k)) - {j}:
                X[i] = X[i] - X[i, j] * X[j]
        value, K = value - g * (v @ X[:, k]) / 2, X[:, k + 1 :].T
        J = np.eye(len(a), dtype=int) - K @ Z
        a_filt, P_filt = a + K @ v, J @ P @ J.T + K @ H @ K.T
        outputs = a_filt, a, Z @ a + d[o], P_filt, P, Z @ P @ Z.T + H
        for X, bar in zip(outputs, bars, strict=bool(bars)):
            seen = bar[t] if len(X) == bar.shape[1] else bar[t][np.ix_(*[o] * X.ndim)]
            value = value + (seen * X).sum()
        a = T @ a_filt + c
        P = T @ P_filt @ T.T + R @ Q @ R.T
    return value


class TooFewDigitsError(ArithmeticError):
    """Errors have grown until nothing is known of a result."""


def true_gradient(y, model: StateSpace, names=None, weights=None, digits=80, bars=()) -> dict:
    """Value and gradients ("l", "y" and the model's names) of the weighted log-likelihood.

    Or of `loglike_in_any_arithmetic` with bars. As float arrays, right to the last digit of their
    largest entry; those of symmetric arrays symmetric. Where so many digits do not prove that,
    twice as many are taken.
    """
    try:
        with flint.ctx.workdps(digits):
            return _gradient(y, model, names, weights, flint.arb(10) ** (-digits // 2), bars)
    except TooFewDigitsError:
        return true_gradient(y, model, names, weights, 2 * digits, bars)


def _gradient(y, model, names, weights, step, bars):
    observed = ~np.isnan(y)
    arrays = model.asdict() | {"y": np.where(observed, y, 0)}
    weights = exact(np.ones(len(y)) if weights is None else weights)
    bars = [*map(exact, bars)]
    numbers = {name: exact(X, flint.acb) for name, X in arrays.items()}

    def evaluate(**changed):
        moved = numbers | changed
        return loglike_in_any_arithmetic(
            moved["y"], observed, weights, {x: moved[x] for x in model.asdict()}, bars
        )

    out = {"l": rounded(np.array(evaluate().real, object)).item()}
    for name in names or arrays:
        G = exact(np.zeros(arrays[name].shape))
        for i in np.ndindex(G.shape):
            if name == "y" and not observed[i]:
                continue
            mirror = (*i[:-2], i[-1], i[-2]) if name in SYMMETRIC else i
            if mirror < i:
                G[i] = G[mirror]
                continue
            X = numbers[name].copy()
            for index in (i, mirror):
                X[index] = X[index] + flint.acb(0, step / 2)
            G[i] = evaluate(**{name: X}).imag / step
        out[name] = rounded(G)
    return out


def true_hessian(y, model: StateSpace, directions: dict) -> np.ndarray:
    """The second derivatives of the log-likelihood along pairs of directions, as floats.

    Each by a complex step along one of them, and the difference of two steps along the other.
    """
    observed, k = ~np.isnan(y), len(next(iter(directions.values())))
    H = exact(np.zeros((k, k)))
    with flint.ctx.workdps(240):
        numbers = {name: exact(X) for name, X in model.asdict().items()}
        directions = {name: exact(X) for name, X in directions.items()}
        series, weights = exact(np.where(observed, y, 0)), exact(np.ones(len(y)))
        step, imaginary = flint.arb(10) ** -60, flint.acb(0, flint.arb(10) ** -90)

        def slope(i, j, step):
            """Along j, a step along i from the model, in units of the imaginary step."""
            moved = {x: numbers[x] + step * V[i] + imaginary * V[j] for x, V in directions.items()}
            return loglike_in_any_arithmetic(series, observed, weights, numbers | moved).imag

        for i, j in zip(*np.tril_indices(k), strict=True):
            second = (slope(i, j, step) - slope(i, j, -step)) / (2 * step * imaginary.imag)
            H[i, j] = H[j, i] = second
        return rounded(H)


def rounded(balls):
    """The floats in the middle of balls, which are too small to matter."""
    radii = np.array([float(x.rad()) for x in balls.flat])
    middles = np.array([float(x.mid()) for x in balls.flat])
    if not radii.max() <= 2.0**-60 * np.abs(middles).max():
        raise TooFewDigitsError
    return middles.reshape(balls.shape)
