"""The Kalman filter and its reverse recursion as two scans of JAX.

The lines of a step stand in :mod:`helpers.kalman.recursions`, as for every engine.
"""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax, vmap
from jax.scipy.linalg import solve_triangular

from helpers.kalman.recursions import (
    LEAST,
    cholesky,
    mask,
    most_inflated,
    outer,
    predict,
    rows,
    solve,
    symmetric,
    unless_singular,
)
from helpers.kalman.reference import FilterOutputs, pull_step, update_step
from helpers.statespace import DIMENSIONS

INPUTS = tuple(DIMENSIONS)

# Up to this many series a factorization is written out, entry by entry, when JAX traces the step:
# calls of LAPACK for such matrices take longer than all else in a step (at 6 series three times as
# long). At 8 the compiler takes twice as long over the text, and the gain is gone.
WRITTEN_OUT = 6


def closed_form(names: tuple[str, ...], passes=None):
    """The function of INPUTS that returns these outputs, with the closed-form pullback.

    By the passes of an engine, such as :func:`filter_scan` and :func:`reverse_scan`.
    """

    @jax.custom_vjp
    def run(*inputs):
        out = (passes or (filter_scan, reverse_scan))[0](inputs, names)
        return tuple(out[x] for x in names)

    def forward(*inputs):
        out = (passes or (filter_scan, reverse_scan))[0](inputs, (*names, "a_pred", "P_pred"))
        return tuple(out[x] for x in names), (inputs, out["a_pred"], out["P_pred"])

    def backward(saved, bars):
        found = (passes or (filter_scan, reverse_scan))[1](
            *saved, dict(zip(names, bars, strict=True))
        )
        return tuple(found[x] for x in INPUTS)

    run.defvjp(forward, backward)
    return run


def panel(y, a0, P0, c, *matrices):
    """The log-likelihoods of series (J, n), as the Op for many has them, each by its own scan.

    a0 (J or 1, m) and c (J or 1, n or 1, m): of length 1 they are those of all.
    """

    def one(y, a0, c):
        d = jnp.zeros((1, y.shape[1]), y.dtype)
        model = [X if len(X) > 1 else X[0] for X in (c, d, *matrices)]
        return loglike(y, a0, P0, *model)[0]

    axes = [0 if len(X) > 1 else None for X in (a0, c)]
    a0, c = (X if axis == 0 else X[0] for X, axis in zip((a0, c), axes, strict=True))
    return vmap(one, (0, *axes))(y, a0, c)


def gradient(names, inputs, l_bar, passes=None):
    """l, and by name the gradients of these, of the sum of l weighted with l_bar."""
    forwards, backwards = passes or (filter_scan, reverse_scan)
    out = forwards(inputs, ("l", "a_pred", "P_pred"))
    found = backwards(inputs, out["a_pred"], out["P_pred"], {"l": l_bar})
    return out["l"], {x: found[x] for x in names}


def tangents(names, inputs, l_bar, moves):
    """What l, and the gradients of these names, move by along k directions, by JAX's derivative.

    ``moves`` (k, ...) are the directions by name, those of the inputs that move. Returns (k, n),
    and by name arrays (k, ...).
    """

    def along(moves):
        dots = tuple(moves.get(x, jnp.zeros_like(X)) for x, X in zip(INPUTS, inputs, strict=True))
        return jax.jvp(lambda *X: gradient(names, X, l_bar), inputs, dots)[1]

    return vmap(along)(moves)


def integrated(y, starts, c, P0, T, Z, H, W, precision):
    """:func:`helpers.kalman.jax.integrated` as JAX alone computes it."""
    missing = jnp.isnan(y[0])
    d = jnp.zeros(y.shape[2], y.dtype)
    if len(y) < len(starts):  # the columns are zeros
        q = len(starts) - 1
        zeros = jnp.where(missing, jnp.nan, jnp.zeros_like(y[0]))
        y = jnp.concatenate([y, jnp.broadcast_to(zeros, (q, *zeros.shape))])
        c = jnp.concatenate([c, jnp.zeros((q, *c.shape[1:]), c.dtype)])
    T, Z, H, W = (X if len(X) > 1 else X[0] for X in (T, Z, H, W))

    def seen(y, starts, c):
        """C^-1 v (n, p, q + 1), and the log-likelihood of the first."""
        c = c if c.shape[1] > 1 else c[:, 0]
        y_hat, F, l = vmap(lambda y, a0, c: _observed(y, a0, P0, c, d, T, Z, H, W))(y, starts, c)
        C = vmap(lambda F, o: cholesky(F + jnp.diag(o))[0])(F[0], missing.astype(y.dtype))
        v = jnp.where(missing, 0, y - y_hat)
        return vmap(solve)(C, jnp.moveaxis(v, 0, -1)), l[0].sum()

    def step(w, delta):
        """S = V'F^-1 V + precision, and the slope at delta."""
        S = precision + jnp.einsum("npi,npj->ij", w[..., 1:], w[..., 1:])
        return S, -jnp.einsum("npi,np->i", w[..., 1:], w[..., 0]) - precision @ delta

    # The series moves to where delta is most likely: from afar, its squares would hide the rest.
    S, s = step(seen(y, starts, c)[0], jnp.zeros(len(precision), y.dtype))
    delta = lax.stop_gradient(jnp.linalg.solve(S, s))
    y, starts, c = (
        jnp.concatenate([X[:1] + jnp.tensordot(delta, X[1:], 1)[None], X[1:]])
        for X in (y, starts, c)
    )
    w, l = seen(y, starts, c)
    S, s = step(w, delta)
    size = jnp.sqrt(jnp.diag(S))
    C = jnp.linalg.cholesky(S / outer(size, size))
    known = (jnp.diag(C) ** 2 > len(S) * LEAST).all()
    x = solve_triangular(C, s / size, lower=True)
    logdet = 2 * (jnp.log(jnp.diag(C)) + jnp.log(size)).sum()
    value = l + (x @ x - logdet - delta @ precision @ delta) / 2
    root = solve_triangular(C, jnp.diag(1 / size), lower=True).T
    return jnp.where(known, value, jnp.nan), delta + root @ x, root @ root.T


class Scanned:
    """What a scan runs over: y with zeros in its gaps, what varies with time, what does not."""

    def __init__(self, inputs):
        arrays = dict(zip(INPUTS, inputs, strict=True))
        y, self.a0, self.P0 = (arrays.pop(x) for x in INPUTS[:3])
        missing = jnp.isnan(y)
        y, o = jnp.where(missing, 0, y), (1 - missing).astype(y.dtype)
        self.moving = {x: X for x, X in arrays.items() if X.ndim > len(DIMENSIONS[x])}
        self.fixed = {x: X for x, X in arrays.items() if x not in self.moving}
        self.sequences = y, o, self.moving
        self.I_p, self.I_m = (jnp.eye(k, dtype=y.dtype) for k in (y.shape[1], len(self.a0)))

    def update(self, now, a, P) -> SimpleNamespace:
        """A step's arrays, zeros where a component is missing, and what its update computes."""
        y, o, moving = now
        x = SimpleNamespace(**self.fixed | moving)
        x.d, x.Z, x.H = mask(o, x.d, x.Z, x.H)
        vars(x).update(update_step(y, o, a, P, x.d, x.Z, x.H, self.I_p)._asdict())
        return x


def filter_scan(inputs, names: tuple[str, ...]) -> dict:
    """The filter's outputs of these names, by name; l is NaN throughout where one F fails."""
    model = Scanned(inputs)

    def step(state, now):
        x = model.update(now, *state)
        x.a_pred, x.P_pred = state
        after = predict(x.a_filt, x.P_filt, x.c, x.T, x.W)
        return after, {name: getattr(x, name) for name in names}

    _, out = lax.scan(step, (model.a0, symmetric(model.P0)), model.sequences)
    return out | {"l": jnp.where(jnp.isnan(out["l"]).any(), jnp.nan, out["l"])}


def reverse_scan(inputs, a_pred, P_pred, bars: dict, after=None) -> dict:
    """The gradients of INPUTS, by name, from cotangents (by name) of some of the outputs.

    ``after`` are those of the mean and covariance after the last step, if steps follow.
    Those of arrays that do not vary with time are summed on the way: no stack of them is made.
    """
    model = Scanned(inputs)
    zeros = FilterOutputs(*[jnp.zeros((), a_pred.dtype)] * 7)
    if not {"y_hat", "F"} & bars.keys():
        zeros = zeros._replace(y_hat=None)

    def step(after, slices):
        now, a, P, given = slices
        given = {x: symmetric(X) if X.ndim == 2 else X for x, X in given.items()}
        x, (*after, sums) = model.update(now, a, P), after
        found, *before = pull_step(x, x.T, *after, zeros._replace(**given))
        found = found._asdict() | {"H": symmetric(found.H)}
        sums = {name: X_bar + found[name] for name, X_bar in sums.items()}
        return (*before, sums), (found["y"], {name: found[name] for name in model.moving})

    sums = {x: jnp.zeros_like(X) for x, X in model.fixed.items()}
    start = *(after or (jnp.zeros_like(X[0]) for X in (a_pred, P_pred))), sums
    (a_bar, P_bar, sums), (y_bar, stacked) = lax.scan(
        step, start, (model.sequences, a_pred, P_pred, bars), reverse=True
    )
    return {"y": y_bar, "a0": a_bar, "P0": P_bar} | sums | stacked


loglike = closed_form(("l",))
outputs = closed_form(FilterOutputs._fields)
_observed = closed_form(("y_hat", "F", "l"))


def _cholesky(F):
    """The lower factor of F and log|F|; NaN where F is not positive definite."""
    p = len(F)
    if p > WRITTEN_OUT:
        C = jnp.linalg.cholesky(F, symmetrize_input=False)
        return C, 2 * jnp.log(jnp.diag(C)).sum()
    C = [[jnp.zeros((), F.dtype)] * p for _ in range(p)]
    for j in range(p):
        C[j][j] = jnp.sqrt(F[j, j] - sum(C[j][k] ** 2 for k in range(j)))
        for i in range(j + 1, p):
            C[i][j] = (F[i, j] - sum(C[i][k] * C[j][k] for k in range(j))) / C[j][j]
    return jnp.array(C), 2 * sum(jnp.log(C[j][j]) for j in range(p))


def _unless_singular(logdet, inflated):
    """log|F|, or NaN where F is singular up to rounding."""
    return jnp.where(inflated < most_inflated(inflated.dtype), logdet, jnp.nan)


def _solve(C, B):
    """C^-1 B by forward substitution."""
    p = len(C)
    if p > WRITTEN_OUT:
        return solve_triangular(C, B, lower=True)
    X = []
    for i in range(p):
        X.append((B[i] - sum(C[i, k] * X[k] for k in range(i))) / C[i, i])
    return jnp.stack(X)


def _rows(X, o):
    """X with zeros in the rows in which o is zero."""
    return jnp.where((o if X.ndim == 1 else o[:, None]) != 0, X, 0)


for kind in (jax.Array, jax.core.Tracer):  # a tracer is no jax.Array to functools.singledispatch
    cholesky.register(kind, _cholesky)
    unless_singular.register(kind, _unless_singular)
    solve.register(kind, _solve)
    rows.register(kind, _rows)
