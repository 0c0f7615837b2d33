"""The compiled pass as functions of JAX: what its programs call on a CPU.

XLA, JAX's compiler, calls machine code by its address (:mod:`helpers.kalman.compiled.xla`). The
derivative is a ``jax.custom_vjp``, whose forward pass computes value and gradient in one call.
Where JAX differentiates that, too, it takes the pass for second derivatives; of many series, and
with numbers integrated out, it takes the scans, since it cannot transpose machine code.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax import vjp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from helpers.kalman.compiled.building import load
from helpers.kalman.hessian import laid_out
from helpers.kalman.jax import scans
from helpers.kalman.jax.scans import INPUTS
from helpers.kalman.recursions import outer
from helpers.kalman.shapes import FIXED, INTEGRATED, PANEL
from helpers.statespace import DIMENSIONS


@cache
def loglike(tol: float):
    """The log-likelihood of each step as a function of INPUTS, by the compiled pass."""

    def value(*inputs):
        l = jax.ShapeDtypeStruct(inputs[0].shape[:1], inputs[0].dtype)
        return _call_pass("value", tol, [l], inputs)[0]

    return _with_pullback(value, INPUTS, partial(gradient, tol=tol))


def _with_pullback(value, arguments: tuple[str, ...], gradient_of):
    """A function whose gradients for weights of one come along, by :func:`gradient` or its like."""
    run = jax.custom_vjp(value)

    def forward(*inputs):
        names = tuple(x for x, X in zip(arguments, inputs, strict=True) if X.perturbed)
        inputs = tuple(X.value for X in inputs)
        l, ready = gradient_of(names, inputs=inputs, l_bar=_ones(inputs), ready=None)
        return l, (inputs, ready)

    def backward(saved, l_bar):
        if isinstance(l_bar, SymbolicZero):
            return (None,) * len(arguments)
        inputs, ready = saved
        names = _there(ready)
        found = gradient_of(names, inputs=inputs, l_bar=l_bar, ready=ready)[1]
        return tuple(found[x] if x in names else None for x in arguments)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _ones(inputs):
    """Weights of one for every step of the series, or of all."""
    return jnp.ones_like(inputs[0], shape=inputs[0].shape[:-1])


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def gradient(names, tol, inputs, l_bar, ready):
    """l and the gradients of these names by the compiled pass, in a form that JAX differentiates.

    The other gradients are there too, without entries: JAX wants one structure for all cases.
    ``ready`` are the gradients for weights of one, where they are known: then l is left out.
    """
    l = jax.ShapeDtypeStruct(l_bar.shape if ready is None else (0,), l_bar.dtype)
    results = [l, *_only(names, _in_time(inputs)).values()]
    more = [] if ready is None else _in_time(ready[x] for x in INPUTS).values()  # JAX sorts names
    l, *found = _call_pass("gradient", tol, results, inputs, l_bar, *more)
    given = zip(INPUTS, inputs, found, strict=True)
    return l, {x: G.reshape(X.shape) if x in names else G for x, X, G in given}


@partial(gradient.defjvp, symbolic_zeros=True)
def _(names, tol, primals, dots):
    inputs, l_bar, ready = primals
    # `ready` is a function of the inputs; their tangents already cover it.
    moves = zip(OPERANDS, (*dots[0], dots[1]), strict=True)
    moves = {x: dX[jnp.newaxis] for x, dX in moves if not isinstance(dX, SymbolicZero)}
    slopes, *found = _moved.bind(
        *inputs, l_bar, *moves.values(), tol=tol, moving=tuple(moves), names=("l", *names)
    )
    l, gradients = gradient(names, tol, inputs, l_bar, ready)
    moved = gradients | {x: X[0] for x, X in zip(names, found, strict=True)}
    return (l, gradients), (slopes[0] if ready is None else slopes[0, :0], moved)


# When inputs move, and the weights of the steps with them, l moves by J moves and the gradient by
# H moves + J'g, with g what the weights move by, the Jacobian J of l and the Hessian H of the
# weighted sum. The transpose takes what comes of l for g, and what comes of the gradient for moves:
# it is the same map with these two, and with those two, in each other's places. So a primitive of
# JAX with a rule for that serves `jax.hessian` in any of its forms, forwards over backwards or
# backwards twice, where machine code alone could not be transposed. Third derivatives are JAX's, of
# the scans.
_moved = Primitive("kalman_gradient_moved")
_moved.multiple_results = True
# INPUTS and the weights, whose name among what moves is that of l among what comes of it.
OPERANDS = *INPUTS, "l"


def _of_moves(gradient, tangents, *operands, moving, names):
    """What l and the gradients of these names move by (k, ...), by an engine's two functions.

    Of INPUTS, the weights and k directions (k, ...) of those that are moving.
    """
    inputs, l_bar = operands[: len(INPUTS)], operands[len(INPUTS)]
    moves = dict(zip(moving, operands[len(OPERANDS) :], strict=True))
    g, arrays = moves.pop("l", None), tuple(x for x in names if x != "l")
    if moves:
        slopes, found = tangents(arrays, inputs, l_bar, moves)
    else:  # the weights alone move
        slopes, found = jnp.zeros_like(g), dict.fromkeys(arrays, 0)
    if g is not None:
        more = jax.vmap(lambda one: gradient(arrays, inputs, one)[1])(g)
        found = {x: found[x] + more[x] for x in arrays}
    return [slopes if x == "l" else found[x] for x in names]


def _by_the_pass(*operands, tol, **how):
    return _of_moves(
        lambda names, *given: gradient(names, tol, *given, None),
        lambda names, *given: tangents(names, tol, *given),
        *operands, **how,
    )  # fmt: skip


def _by_scans(*operands, tol, **how):
    return _of_moves(scans.gradient, scans.tangents, *operands, **how)


def _shapes(*operands, names, **how):
    k, shapes = operands[-1].shape[0], dict(zip(OPERANDS, operands, strict=False))
    return [jax.core.ShapedArray((k, *shapes[x].shape), shapes[x].dtype) for x in names]


def _derivative(primals, dots, **how):
    """Along directions alone the map itself; of the inputs, JAX's own derivative of the scans."""
    fixed = len(OPERANDS)
    found = _moved.bind(*primals, **how)
    if all(type(X) is ad.Zero for X in dots[:fixed]):
        given = map(ad.instantiate_zeros, dots[fixed:])
        return found, _moved.bind(*primals[:fixed], *given, **how)
    dots = tuple(map(ad.instantiate_zeros, dots))
    return found, jax.jvp(partial(_by_scans, **how), tuple(primals), dots)[1]


def _transposed(bars, *operands, moving, names, tol):
    fixed = operands[: len(OPERANDS)]
    given = {x: X for x, X in zip(names, bars, strict=True) if type(X) is not ad.Zero}
    found = _moved.bind(*fixed, *given.values(), moving=tuple(given), names=moving, tol=tol)
    return [None] * len(fixed) + found


def _batched(operands, axes, **how):
    """Batches of directions are more directions; of models, one after the other."""
    fixed, there = len(OPERANDS), [a is not None for a in axes]
    first = [X if a is None else jnp.moveaxis(X, a, 0) for X, a in zip(operands, axes, strict=True)]
    size = len(first[there.index(True)])
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


_moved.def_impl(jax.jit(_by_the_pass, static_argnames=("tol", "moving", "names")))
_moved.def_abstract_eval(_shapes)
mlir.register_lowering(_moved, mlir.lower_fun(_by_the_pass, multiple_results=True))
ad.primitive_jvps[_moved] = _derivative
ad.primitive_transposes[_moved] = _transposed
batching.primitive_batchers[_moved] = _batched


def _differentiated_as(scanned):
    """A call of the pass (names, tol, ...) that JAX differentiates as scans (names, ...)."""

    def decorate(call):
        run = jax.custom_jvp(call, nondiff_argnums=(0, 1))

        @run.defjvp
        def _(names, tol, primals, dots):
            moved = jax.jvp(partial(scanned, names), primals, dots)[1]
            return run(names, tol, *primals), moved

        return run

    return decorate


@_differentiated_as(scans.tangents)
def tangents(names, tol, inputs, l_bar, moves):
    """What l, and the gradients of these names, move by along k directions; by the compiled pass.

    ``moves`` (k, ...) are the directions by name, those of the inputs that move. Returns (k, n),
    and by name arrays (k, ...).
    """
    dtype, k = l_bar.dtype, len(next(iter(moves.values())))
    shapes = {x: (k, *laid_out(x, X.shape)) for x, X in _in_time(inputs).items()}
    dots = {
        x: moves[x].reshape(shape) if x in moves else jnp.zeros(shape, dtype)
        for x, shape in shapes.items()
    }
    l = jax.ShapeDtypeStruct((k, *l_bar.shape), dtype)
    results, more = [l, *_only(names, dots).values()], dots.values()
    load("door").compile_later(inputs[1].shape[-1], inputs[0].shape[-1], tangents=True)
    l, *found = _call_pass("tangents", tol, results, inputs, l_bar, *more, module="xla_tangents")
    given = zip(INPUTS, inputs, found, strict=True)
    return l, {x: G.reshape(k, *X.shape) for x, X, G in given if x in names}


def _only(names, arrays: dict) -> dict:
    """The arrays of these names, and for the others arrays with axes of length 0."""
    return {x: X if x in names else jnp.zeros((0,) * X.ndim, X.dtype) for x, X in arrays.items()}


def _there(arrays: dict) -> tuple[str, ...]:
    """The names of those that have entries."""
    return tuple(x for x, X in arrays.items() if X.size)


def _in_time(inputs) -> dict:
    """INPUTS with an axis for time, of length 1 or n, as the compiled pass takes them."""
    arrays = dict(zip(INPUTS, inputs, strict=True))
    there = [x for x, X in arrays.items() if x in FIXED or X.ndim > len(DIMENSIONS[x])]
    return {x: X if x in there else X[jnp.newaxis] for x, X in arrays.items()}


def _call_pass(work: str, tol: float, results: list, inputs, *more, module="xla"):
    """A program's call of a pass for one series; results have a shape and a type."""
    return _call(module, work, tol, results, [*_in_time(inputs).values()], *more)


def _call(module: str, work: str, tol: float, results: list, arrays, *more):
    """A program's call of compiled code; arrays begin with y and a0, or the starts."""
    m, p = arrays[1].shape[-1], arrays[0].shape[-1]
    door = load("door")
    # What a call needs is compiled now. What nobody knows of here waits until XLA calls it: a vague
    # P0 and, with few states, weights that differ.
    sizes = [(m, p)]
    if max(m, p) > door.LARGEST:
        sizes.append((0, door.WHOLE))
    if module not in ("xla", "xla_tangents"):  # many series, or starts
        sizes += [(0, door.WHOLE), (0, door.ROOTS)]
    if door.may_collapse(p, m):  # series that may be rotated, into one of these sizes
        sizes += [(0, door.COLLAPSE), (m, m), (m, m + 1)]
        if module == "xla_tangents":
            sizes.append((0, door.TURNED))
    for size in sizes:
        door.compile_later(*size)
    dtype = arrays[0].dtype
    results = [jax.ShapeDtypeStruct(X.shape, X.dtype) for X in results]
    name = _targets(module)[work, dtype.name]
    call = jax.ffi.ffi_call(name, results, vmap_method="broadcast_all")
    return call(*arrays, jnp.full(1, tol, dtype), *more)


@cache
def _targets(module: str) -> dict:
    """The names under which XLA knows the machine code of a module, once it has been told."""
    names, digest = {}, load("door").DIGEST
    for (work, dtype), code in load(module).HANDLERS.items():
        names[work, dtype] = f"{__package__}.{work}.{dtype}.{digest}"
        pointer = ctypes.cast(code.address, ctypes.c_void_p)
        jax.ffi.register_ffi_target(names[work, dtype], jax.ffi.pycapsule(pointer), platform="cpu")
    return names


@cache
def panel(tol: float):
    """The log-likelihoods (J, n) of many series as a function of PANEL, by the compiled pass."""

    def value(*inputs):
        return panel_gradient((), tol, inputs, _ones(inputs), None)[0]

    return _with_pullback(value, tuple(PANEL), partial(panel_gradient, tol=tol))


def panel_by_scans(names, inputs, l_bar, ready):
    l, pull = vjp(scans.panel, *inputs)
    found = _only(names, dict(zip(PANEL, pull(l_bar), strict=True)))
    return (l if ready is None else l[:0, :0]), found


@_differentiated_as(panel_by_scans)
def panel_gradient(names, tol, inputs, l_bar, ready):
    """l (J, n) and gradients of sum l_bar l, of PANEL's arrays, as :func:`gradient` has them."""
    l = jax.ShapeDtypeStruct(l_bar.shape if ready is None else (0, 0), l_bar.dtype)
    results = _only(names, dict(zip(PANEL, inputs, strict=True)))
    more = () if ready is None else [ready[x] for x in PANEL]  # JAX sorts the names
    l, *found = _call("xla_panel", "panel", tol, [l, *results.values()], (*inputs, l_bar), *more)
    return l, dict(zip(PANEL, found, strict=True))


@cache
def integrated(tol: float):
    """What :func:`helpers.kalman.jax.integrated` returns, as a function of INTEGRATED."""

    @jax.custom_vjp
    def run(*inputs):
        return integrated_gradient((), tol, inputs)[0]

    def forward(*inputs):
        names = tuple(x for x, X in zip(INTEGRATED, inputs, strict=True) if X.perturbed)
        inputs = tuple(X.value for X in inputs)
        found, ready = integrated_gradient(names, tol, inputs)
        return found, (inputs, ready)

    def backward(saved, bars):
        inputs, ready = saved
        given = [not isinstance(X, SymbolicZero) for X in bars]
        names = _there(ready) if any(given) else ()
        if not any(given[1:]):
            return tuple(bars[0] * ready[x] if x in names else None for x in INTEGRATED)
        bars = [jnp.zeros(X.shape, X.dtype) if isinstance(X, SymbolicZero) else X for X in bars]
        found = vjp(scans.integrated, *inputs)[1](tuple(bars))
        return tuple(G if x in names else None for x, G in zip(INTEGRATED, found, strict=True))

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _integrated_by_scans(names, inputs):
    found, pull = vjp(scans.integrated, *inputs)
    one = jnp.ones_like(found[0]), *(jnp.zeros_like(X) for X in found[1:])
    return found, _only(names, dict(zip(INTEGRATED, pull(one), strict=True)))


@_differentiated_as(_integrated_by_scans)
def integrated_gradient(names, tol, inputs):
    """What :func:`integrated` returns, and the value's gradients as :func:`gradient` has them."""
    q, dtype = inputs[-1].shape[0], inputs[0].dtype
    wanted = _only(names, dict(zip(INTEGRATED, inputs, strict=True)))
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((1,), (q,), (q, q))]
    results += [X for x, X in wanted.items() if x != "precision"]
    value, mean, covariance, *found = _call("xla_integrated", "integrated", tol, results, inputs)
    slope = -(covariance + outer(mean, mean)) / 2 if "precision" in names else wanted["precision"]
    return (value[0], mean, covariance), dict(zip(INTEGRATED, [*found, slope], strict=True))
