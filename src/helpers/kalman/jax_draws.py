"""Draws of the states as JAX computes them: what :mod:`helpers.kalman.drawing` is there.

The lines are those of :mod:`helpers.kalman.smoothing`. What goes back over the series, the
gradients of the log-likelihood, comes from the filter of :mod:`helpers.kalman.jax`; the derivatives
are JAX's own.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax, vmap

from helpers.kalman.drawing import FULL_RANK
from helpers.kalman.recursions import LEAST, outer, symmetric
from helpers.kalman.square_root import INDEFINITE


def draws(gradient, y, start, shocks, noise, P0, T, Z, H, W, A):  # noqa: N803
    """What :class:`helpers.kalman.ops.draws.KalmanDraw` says, (n, J, m).

    ``gradient`` takes a series and its model, and returns by name the gradients of y, a0 and c.
    """
    n, J, m = shocks.shape
    p, q = y.shape[1], A.shape[1]
    plus = path(start, T, shocks)
    misses = y[:, None] - plus @ Z.mT - noise
    nothing = jnp.broadcast_to(jnp.where(jnp.isnan(y), jnp.nan, 0), (q, n, p))
    series = jnp.concatenate([jnp.moveaxis(misses, 1, 0), nothing.astype(y.dtype)])
    starts = jnp.concatenate([jnp.zeros((J, m), y.dtype), A.T])
    c, d = jnp.zeros((n, m), y.dtype), jnp.zeros(p, y.dtype)
    model = [X if len(X) > 1 else X[0] for X in (T, Z, H, W)]

    def residuals(y, a0):
        found = gradient(y, a0, P0, c, d, *model)
        return found["a0"], found["c"]

    r_0, r = vmap(residuals)(series, starts)
    delta = _most_likely(symmetric(-r_0[J:] @ A), r_0[:J] @ A)
    r_0 = r_0[:J] + delta @ r_0[J:]
    r = jnp.moveaxis(r[:J] + jnp.tensordot(delta, r[J:], 1), 0, 1)
    return path(start + delta @ A.T + r_0 @ P0, T, shocks + r @ W.mT)


def path(start, T, shocks):  # noqa: N803
    """Paths of the states (n, J, m) from where they start (J, m) and what each step adds."""

    def step(x, now):
        T, shock = now  # noqa: N806
        return x @ T.T + shock, x

    T = jnp.broadcast_to(T, (len(shocks), *T.shape[1:]))  # noqa: N806
    return lax.scan(step, start, (T, shocks))[1]


def _most_likely(S, s):  # noqa: N803
    """S^-1 s for each row of s (J, q); NaN where the data leave a direction open."""
    if len(S) == 0:
        return s
    size = jnp.sqrt(jnp.diag(S))
    C = jnp.linalg.cholesky(S / outer(size, size))  # noqa: N806
    known = (jnp.diag(C) ** 2 > len(S) * LEAST).all()
    return jnp.where(known, jnp.linalg.solve(S, s.T).T, jnp.nan)


def root(P):  # noqa: N803
    """B with B B' = P (m, m) of any rank: :func:`helpers.kalman.square_root.root`, transposed."""
    m, least = len(P), len(P) * jnp.finfo(P.dtype).eps * jnp.diag(P)

    def step(state, _):
        left, taken = state
        variances = jnp.where(taken, 0, jnp.diag(left))
        some = variances > jnp.maximum(least, 0)
        pivot = jnp.argmax(jnp.where(some, variances, 0))
        here = (jnp.arange(m) == pivot) & some
        column = jnp.where(taken | ~some.any(), 0, left[:, pivot])
        column = column / jnp.sqrt(jnp.where(some.any(), left[pivot, pivot], 1))
        return (left - outer(column, column), taken | here), column

    (left, _), columns = lax.scan(step, (P, jnp.zeros(m, bool)), length=m)
    is_one = (jnp.diag(left) >= -INDEFINITE * jnp.abs(P).max()).all()
    return jnp.where(is_one, columns.T, jnp.nan)


def marginals(mean, P, z):  # noqa: N803
    """mean + B z for each step, B B' = P (n, m, m) of any rank; mean and z (n, m)."""

    def one(mean, P, z):  # noqa: N803
        P = symmetric(P)  # noqa: N806
        C = jnp.linalg.cholesky(P)  # noqa: N806
        full = (jnp.diag(C) ** 2 > FULL_RANK * jnp.diag(P)).all()
        return mean + jnp.where(full, C, root(P)) @ z

    return vmap(one)(mean, P, z)
