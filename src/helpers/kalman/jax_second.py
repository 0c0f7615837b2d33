"""Second derivatives of the compiled pass for JAX: one linear map, which is its own transpose.

When inputs move along ``moves`` and the weights of the steps along ``g``, l moves by J moves and
the gradient by H moves + J'g, with the Jacobian J of l and the Hessian H of the weighted sum. Its
transpose takes what comes of l for g, and what comes of the gradient for moves: it is the same map
with these two, and with those two, in each other's places. So a primitive of JAX with a rule for
that serves ``jax.hessian`` in any of its forms, forwards over backwards or backwards twice, where
machine code alone could not be transposed. Third derivatives are JAX's, of the scans.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from helpers.kalman import jax_scans
from helpers.kalman.jax_scans import INPUTS

_moved = Primitive("kalman_gradient_moved")
_moved.multiple_results = True
_STATIC = "engine", "tol", "moving", "names", "weighted", "sloped"


def moved_gradient(engine, names, tol, inputs, l_bar, moves, g):
    """What l and the gradients of these names move by along k directions.

    ``engine`` are the compiled pass's functions for gradients and for their tangents, ``moves``
    (k, ...) the directions by name, those of the inputs that move, and ``g`` (k, n) those of the
    weights l_bar, None if they stay. Returns (k, n), and by name arrays (k, ...).
    """
    given = [*moves.values()] if g is None else [g, *moves.values()]
    slopes, *found = _moved.bind(
        *inputs, l_bar, *given, engine=engine, tol=tol, moving=tuple(moves), names=names,
        weighted=g is not None, sloped=True,
    )  # fmt: skip
    return slopes, dict(zip(names, found, strict=True))


def _taken_apart(operands, moving, weighted):
    """The inputs, l_bar, the directions by name, and g (None if there is none)."""
    size = len(INPUTS)
    inputs, l_bar, given = operands[:size], operands[size], operands[size + 1 :]
    g, given = (given[0], given[1:]) if weighted else (None, given)
    return inputs, l_bar, dict(zip(moving, given, strict=True)), g


def _computed(gradient, tangents, *operands, moving, names, weighted, sloped):
    """The map from a function for gradients and one for their tangents."""
    inputs, l_bar, moves, g = _taken_apart(operands, moving, weighted)
    if moving:
        slopes, found = tangents(inputs, l_bar, moves)
    else:  # the weights alone move
        slopes, found = jnp.zeros_like(g), dict.fromkeys(names, 0)
    if weighted:
        more = jax.vmap(lambda one: gradient(inputs, one))(g)
        found = {x: found[x] + more[x] for x in names}
    return [slopes] * sloped + [found[x] for x in names]


def _by_the_pass(*operands, engine, tol, names, **how):
    def gradient(inputs, l_bar):
        return engine[0](names, tol, inputs, l_bar, None)[1]

    return _computed(gradient, partial(engine[1], names, tol), *operands, names=names, **how)


def _by_scans(*operands, engine, tol, names, **how):
    def gradient(inputs, l_bar):
        return jax_scans.gradient(names, inputs, l_bar)[1]

    return _computed(gradient, partial(jax_scans.tangents, names), *operands, names=names, **how)


def _shapes(*operands, names, sloped, **how):
    k, l_bar = operands[-1].shape[0], operands[len(INPUTS)]
    shapes = {x: X.shape for x, X in zip(INPUTS, operands, strict=False)}
    results = [l_bar.shape] * sloped + [shapes[x] for x in names]
    return [jax.core.ShapedArray((k, *shape), l_bar.dtype) for shape in results]


def _derivative(primals, dots, **how):
    """Along directions alone the map itself; of the inputs, JAX's own derivative of the scans."""
    fixed = len(INPUTS) + 1
    found = _moved.bind(*primals, **how)
    if all(type(X) is ad.Zero for X in dots[:fixed]):
        given = map(ad.instantiate_zeros, dots[fixed:])
        return found, _moved.bind(*primals[:fixed], *given, **how)
    dots = tuple(map(ad.instantiate_zeros, dots))
    return found, jax.jvp(partial(_by_scans, **how), tuple(primals), dots)[1]


def _transposed(bars, *operands, moving, names, weighted, sloped, **how):
    fixed = operands[: len(INPUTS) + 1]
    weighting = sloped and type(bars[0]) is not ad.Zero
    given = list(map(ad.instantiate_zeros, bars[0 if weighting else int(sloped) :]))
    found = _moved.bind(
        *fixed, *given, moving=names, names=moving, weighted=weighting, sloped=weighted, **how
    )
    return [None] * len(fixed) + found


def _batched(operands, axes, **how):
    """Batches of directions are more directions; of models, one after the other."""
    fixed = len(INPUTS) + 1
    size = next(X.shape[a] for X, a in zip(operands, axes, strict=True) if a is not None)
    first = [X if a is None else jnp.moveaxis(X, a, 0) for X, a in zip(operands, axes, strict=True)]
    there = [a is not None for a in axes]
    if not any(there[:fixed]):
        given = [
            X if many else jnp.broadcast_to(X, (size, *X.shape))
            for X, many in zip(first[fixed:], there[fixed:], strict=True)
        ]
        given = [X.reshape(-1, *X.shape[2:]) for X in given]
        found = _moved.bind(*first[:fixed], *given, **how)
        return [X.reshape(size, -1, *X.shape[1:]) for X in found], [0] * len(found)

    def one(mapped):
        mapped = iter(mapped)
        given = [next(mapped) if many else X for X, many in zip(first, there, strict=True)]
        return _moved.bind(*given, **how)

    found = jax.lax.map(one, [X for X, many in zip(first, there, strict=True) if many])
    return found, [0] * len(found)


_moved.def_impl(jax.jit(_by_the_pass, static_argnames=_STATIC))
_moved.def_abstract_eval(_shapes)
mlir.register_lowering(_moved, mlir.lower_fun(_by_the_pass, multiple_results=True))
ad.primitive_jvps[_moved] = _derivative
ad.primitive_transposes[_moved] = _transposed
batching.primitive_batchers[_moved] = _batched
