r"""All steps at once: the Kalman filter and its way back in O(log n) steps one after the other.

The series is cut into blocks of ``BLOCK`` steps, and all blocks go side by side:

1. every block runs the filter from a state that is known exactly, and notes on the way how its end
   depends on its start: a *map* of five arrays (Särkkä and García-Fernández 2021,
   doi:10.1109/TAC.2020.2976316);
2. maps of neighbours are composed in a tree, which gives mean and covariance at each block's start;
3. every block runs the filter of :mod:`helpers.kalman.jax.scans` from there.

The way back is the same in the other direction, and simpler: the cotangents of the predicted mean
and covariance before a block are *affine* in those after it, for any weights of the steps, so that
nothing is factored where two maps are composed (chapter "All steps at once").

Under ``jax.jit`` the steps of a block are two scans over BLOCK steps each way. JAX differentiates
both passes for second derivatives.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax, vmap
from jax.scipy.linalg import solve_triangular

from helpers.kalman.jax.scans import INPUTS, Scanned, closed_form, filter_scan, reverse_scan
from helpers.kalman.jax.scans import gradient as scans_gradient
from helpers.kalman.recursions import outer, predict, symmetric
from helpers.statespace import DIMENSIONS

# Counted in products of two m x m matrices, for each step of the series and both ways: the loop 8,
# blocks 12 and 22 / BLOCK in the tree, a part of these in factorizations. So with 8 the tree is a
# fifth of the work. Each step in a block takes the time of a step in a scan, though, whatever the
# number of blocks (25 to 50 microseconds both ways on an H200 for m = 4 to 13, and a block has
# two of them), and so longer blocks would lose what is saved.
BLOCK = 8

# What is added to a covariance before its root is taken, in roundings of its variances.
RIDGE = 10

# A pivot of F that is smaller than so many units in the last place of what F was added up from.
LOST = 1e4


def is_refused(inputs) -> bool:
    """Whether a step has no density, given the state before its block."""
    return not jax.jit(lambda *X: _starts(*_cut(X))[2])(*inputs)


# In float32 a GPU would multiply with ten bits: no covariance survives that.
@jax.jit
@jax.default_matmul_precision("highest")
def _filter(inputs):
    """l (n,), and the predicted mean and covariance of each step, in blocks (BLOCK, K, ...).

    NaN throughout where one F fails, or where that of a block's first steps does, given the state
    before the block.
    """
    blocks, axes = _cut(inputs)
    a, P, _ = _starts(blocks, axes)
    run = vmap(lambda *X: filter_scan(X, ("l", "a_pred", "P_pred")), axes, out_axes=1)
    out = run(blocks[0], a, P, *blocks[3:])
    l = _joined(out["l"], len(inputs[0]))
    return out | {"l": jnp.where(jnp.isnan(l).any(), jnp.nan, l)}


@jax.jit
@jax.default_matmul_precision("highest")
def _reverse(inputs, a_pred, P_pred, bars):
    """The gradients of INPUTS, by name, from the cotangent of l (n,)."""
    (y, _, _, *model), axes = _cut(inputs)
    l_bar = _blocks(bars["l"], fill=0)
    later = slice(1, None)
    maps = vmap(_map_back, (1, 1, 1, 1, *axes[3:]))(
        *(X[:, later] for X in (l_bar, y, a_pred, P_pred)), *_part(model, axes, later)
    )
    end = jnp.zeros_like(a_pred[0, 0]), jnp.zeros_like(P_pred[0, 0])
    from_the_end = tuple(X[::-1] for X in maps)
    after = tuple(X[::-1] for X in prefixes(_compose_back, _apply_back, from_the_end, end))

    def run(l_bar, a, P, after, *block):
        return reverse_scan(block, a, P, {"l": l_bar}, after)

    moving = {x: axis for x, axis in zip(INPUTS, axes, strict=True) if axis == 1}
    places = {x: 1 if x in moving else 0 for x in INPUTS}
    blocks = y, a_pred[0], P_pred[0], *model
    found = vmap(run, (1, 1, 1, 0, *axes), places)(l_bar, a_pred, P_pred, after, *blocks)
    first = {x: found.pop(x)[0] for x in ("a0", "P0")}
    n = len(inputs[0])
    return first | {x: _joined(X, n) if x in moving else X.sum(0) for x, X in found.items()}


PASSES = (lambda inputs, _: _filter(inputs)), _reverse
loglike = closed_form(("l",), PASSES)
gradient = partial(scans_gradient, passes=PASSES)


def _cut(inputs):
    """INPUTS with time in blocks (BLOCK, K, ...), and for each the axis of its blocks.

    Steps at which nothing is observed fill the last one: after the end they change nothing.
    """
    y, a0, P0, *model = inputs
    there = [X.ndim > len(DIMENSIONS[x]) for x, X in zip(INPUTS[3:], model, strict=True)]
    model = [_blocks(X) if moving else X for X, moving in zip(model, there, strict=True)]
    return (_blocks(y, jnp.nan), a0, symmetric(P0), *model), (
        1, 0, 0, *(1 if moving else None for moving in there),
    )  # fmt: skip


def _blocks(X, fill=None):
    """X (n, ...) as (BLOCK, K, ...): step t is at [t % BLOCK, t // BLOCK]."""
    size = min(BLOCK, len(X))
    more = [(0, -len(X) % size), *[(0, 0)] * (X.ndim - 1)]
    how = {"mode": "edge"} if fill is None else {"constant_values": fill}
    return jnp.pad(X, more, **how).reshape(-1, size, *X.shape[1:]).swapaxes(0, 1)


def _joined(X, n):
    """The first n steps of blocks, one after the other."""
    return X.swapaxes(0, 1).reshape(-1, *X.shape[2:])[:n]


def _part(model, axes, blocks):
    """Some of the blocks of a model's arrays; all of those that do not vary with time."""
    return [X[:, blocks] if axis else X for X, axis in zip(model, axes[3:], strict=True)]


def _starts(blocks, axes):
    """Mean (K, m) and covariance (K, m, m) at each block's start, and whether they are known.

    A block's own run starts from T alpha = 0, known exactly: there a is c, and P is W.
    """
    y, a0, P0, *model = blocks
    K = y.shape[1]
    if K == 1:
        return a0[None], P0[None], True
    c, W = (  # of the step before each block but the first
        X[-1, :-1] if X.ndim > len(DIMENSIONS[x]) else jnp.broadcast_to(X, (K - 1, *X.shape))
        for x, X in (("c", model[0]), ("W", model[-1]))
    )

    def after_first(start, X):
        return jnp.concatenate([start[None], X])

    y, model = y[:, :-1], _part(model, axes, slice(-1))
    *maps, known = vmap(_map, axes)(y, after_first(a0, c[:-1]), after_first(P0, W[:-1]), *model)
    # The first map starts where the series does, so its end is a prediction already.
    first, later = tuple(X[0] for X in maps[:2]), tuple(X[1:] for X in maps)
    a, P = prefixes(_compose, _apply, later, first)
    known = known[1:].all()
    a = jnp.where(known, c + a, jnp.nan)
    return after_first(a0, a), after_first(P0, W + P), known


def prefixes(compose, apply, maps, start):
    """What the first k of N maps make of a start, for k = 0, ..., N.

    ``maps`` is a tuple of arrays (N, ...), ``start`` one of arrays. Pairs are composed first, so
    their prefixes are every other one that is wanted; one map more gives those between them:
    2 log2 N calls, about 2 N maps.
    """
    count = len(maps[0])
    if count == 0:
        return tuple(X[None] for X in start)
    first, second = (tuple(X[k : count - count % 2 : 2] for X in maps) for k in (0, 1))
    even = prefixes(compose, apply, vmap(compose)(first, second), start)
    odd = vmap(apply)(tuple(X[::2] for X in maps), tuple(X[: (count + 1) // 2] for X in even))
    # One after the other; there may be one more of the even ones.
    more = len(even[0]) - len(odd[0])
    odd = (jnp.pad(X, [(0, more), *[(0, 0)] * (X.ndim - 1)]) for X in odd)
    both = (jnp.stack(X, 1) for X in zip(even, odd, strict=True))
    return tuple(X.reshape(-1, *X.shape[2:])[: count + 1] for X in both)


def _map(*block):
    """What a block does: T a and T P T' of its end, from the prediction (a, P) at its start.

    Returns (b, C, Phi, h, U) and whether the block's observations have a density. A start that
    is delta off ends Phi delta off, and its likelihood is exp(h'delta - delta'U delta / 2) times
    as large.
    """
    model = Scanned(block)
    p, zero = len(model.I_p), jnp.zeros_like(model.P0)

    def step(state, now):
        (a, P), _, _, Phi, h, U, known = state
        x = model.update(now, a, P)
        size = jnp.diag(abs(x.Z) @ abs(P) @ abs(x.Z.T) + abs(x.H))
        pivots = 1 / jnp.diag(x.C_inv) ** 2
        least = LOST * p * jnp.finfo(P.dtype).eps * size
        known &= ((now[1] == 0) | (pivots > least)).all()
        b, C = predict(x.a_filt, x.P_filt, 0, x.T, 0)
        Phi, seen = _passed(x, Phi)
        return ((b + x.c, C + x.W), b, C, Phi, h + x.w @ seen, U + seen.T @ seen, known), None

    a, P = model.a0, model.P0
    start = (a, P), a, P, model.I_m, jnp.zeros_like(a), zero, jnp.array(True)
    return lax.scan(step, start, model.sequences)[0][1:]


def _passed(x, Phi):
    """L Phi (m, m) and S Phi (p, m): what errors Phi are after a step, and in its w."""
    seen = x.S @ Phi
    return x.T @ (Phi - x.G.T @ seen), seen


def _compose(first, second):
    """The map of two neighbours."""
    b1, C1, Phi1, h1, U1 = first
    b2, C2, Phi2, h2, U2 = second
    m = len(b1)
    # The start of the second given its observations: the only factorization.
    given = jnp.linalg.solve(jnp.eye(m, dtype=C1.dtype) + C1 @ U2, jnp.concatenate([Phi1, C1], 1))
    X, Y, more = given[:, :m], given[:, m:], h2 - U2 @ b1
    return (
        Phi2 @ (b1 + Y @ more) + b2,
        symmetric(Phi2 @ Y @ Phi2.T + C2),
        Phi2 @ X,
        more @ X + h1,
        symmetric(X.T @ (U2 @ Phi1) + U1),
    )


def _apply(block, start):
    """Mean and covariance after a block from those before it, less c and W."""
    (b, C, Phi, h, U), (a, P) = block, start
    given = _given(P, U)
    # In (I + P U)^-1 (a + P h), which is the same, a vague P would cancel.
    return Phi @ (a + given @ (h - U @ a)) + b, symmetric(Phi @ given @ Phi.T + C)


@jax.custom_jvp
def _given(P, U):
    """(I + P U)^-1 P: the covariance P of a start, given observations with information U.

    From a root of P, which may hold vague states beside others that are known: a solution with
    I + P U rounds all of it at the size of the vague ones. Where rounding leaves P no root, as of
    states that were observed exactly, nothing is vague.
    """
    I_m, kind = jnp.eye(len(P), dtype=P.dtype), jnp.finfo(P.dtype)
    root = jnp.linalg.cholesky(P + jnp.diag(RIDGE * kind.eps * abs(jnp.diag(P)) + kind.tiny))
    X = solve_triangular(jnp.linalg.cholesky(I_m + root.T @ U @ root), root.T, lower=True)
    return jnp.where(jnp.isnan(X).any(), jnp.linalg.solve(I_m + P @ U, P), X.T @ X)


@_given.defjvp
def _given_jvp(at, moves):
    (_, U), (dP, dU) = at, moves
    given = _given(*at)
    rest = jnp.eye(len(U), dtype=U.dtype) - given @ U  # (I + P U)^-1
    return given, rest @ dP @ rest.T - given @ dU @ given


def _map_back(l_bar, y, a_pred, P_pred, *model):
    """How the cotangents before a block depend on those after it.

    Returns (Phi, q, s, S): a_bar becomes Phi'a_bar + q, and P_bar becomes Phi'P_bar Phi + S and
    the symmetric part of Phi'a_bar s'.
    """
    model = Scanned((y, a_pred[0], P_pred[0], *model))

    def step(state, now):
        (Phi, q, s, S), (slices, a, P, g) = state, now
        x = model.update(slices, a, P)
        Phi, seen = _passed(x, Phi)
        z = x.w @ seen
        S = S + g * (symmetric(outer(z, s + z / 2)) - seen.T @ seen / 2)
        return (Phi, q + g * z, s + z, S), None

    zeros = jnp.zeros_like(model.a0)
    start = model.I_m, zeros, zeros, jnp.zeros_like(model.P0)
    return lax.scan(step, start, (model.sequences, a_pred, P_pred, l_bar))[0]


def _compose_back(later, earlier):
    """The map of two neighbours, the later of which comes first on the way back."""
    Phi, q, s, S = earlier
    back = Phi.T @ later[1]
    return (
        later[0] @ Phi,
        back + q,
        Phi.T @ later[2] + s,
        symmetric(Phi.T @ later[3] @ Phi + outer(back, s)) + S,
    )


def _apply_back(block, after):
    """The cotangents before a block from those after it."""
    (Phi, q, s, S), (a_bar, P_bar) = block, after
    back = Phi.T @ a_bar
    return back + q, symmetric(Phi.T @ P_bar @ Phi + outer(back, s)) + S
