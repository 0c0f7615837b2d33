"""The Ops in PyTensor's JAX mode, which knows them once this module is imported.

The Op of the value becomes the function behind :func:`helpers.kalman.jax.loglike`: samplers that
run on JAX (NumPyro's and BlackJAX's in PyMC) let JAX differentiate the value, and get the closed
form.
"""

from __future__ import annotations

from functools import singledispatch

import jax.numpy as jnp
import numpy as np
import pytensor.tensor as pt
from jax import ShapeDtypeStruct, custom_vjp, pure_callback, vjp
from pytensor.graph import FunctionGraph
from pytensor.link.jax.dispatch import jax_funcify

from helpers.kalman import jax
from helpers.kalman.jax import calls, parallel, scans
from helpers.kalman.ops import likelihood
from helpers.kalman.ops.declared import Declared, in_python
from helpers.kalman.ops.diffuse import KalmanIntegrated, KalmanIntegratedGrad
from helpers.kalman.ops.likelihood import INPUTS
from helpers.kalman.ops.panel import KalmanPanel, KalmanPanelGrad
from helpers.kalman.shapes import PANEL


@jax_funcify.register(Declared)
def funcify(op, **kwargs):
    """A function of the inputs that looks at their shapes, and returns the outputs."""

    def function(*inputs):
        inputs = [jnp.asarray(X) for X in inputs]
        dtype = jnp.result_type(jnp.float32, *inputs)
        X = {x: V.astype(dtype) for x, V in zip(op.inputs, inputs, strict=True)}
        op.check({x: V.shape for x, V in X.items()})
        found = run(op, X)
        if isinstance(found, dict):
            found = tuple(found[x] for x in op.outputs)
            return found if len(found) > 1 else found[0]
        return found

    return function


@singledispatch
def run(op, X: dict):
    """The outputs of an Op, by name or in order, from its inputs by name: here by Python."""
    shapes = op.infer_shape(None, [V.shape for V in X.values()])
    dtype = next(iter(X.values())).dtype

    def in_turn(*inputs):
        with np.errstate(all="ignore"):
            found = in_python(op)(*map(np.asarray, inputs))
        return [np.asarray(V, dtype) for V in (found if isinstance(found, tuple) else (found,))]

    @custom_vjp
    def called(*inputs):
        of = [ShapeDtypeStruct(shape, dtype) for shape in shapes]
        return pure_callback(in_turn, of, *inputs, vmap_method="sequential")

    def pulled(inputs, bars):
        if op.pull is None:
            raise NotImplementedError(op.missing)
        xs, ys = ([pt.tensor(shape=V.shape, dtype=str(dtype)) for V in Vs] for Vs in (inputs, bars))
        found = op.pull(*(dict(zip(of, V, strict=True)) for of, V in
                          ((op.inputs, xs), (op.outputs, ys))))  # fmt: skip
        return jax_funcify(FunctionGraph(xs + ys, [found[x] for x in op.inputs]))(*inputs, *bars)

    called.defvjp(lambda *inputs: (called(*inputs), inputs), pulled)
    return dict(zip(op.outputs, called(*X.values()), strict=True))


@run.register
def _(op: likelihood.Product, X):
    return X["A"] @ X["B"]


@run.register
def _(op: likelihood.KalmanLoglike, X):
    return jax._per_step(None, op.tol, [*X.values()])


@run.register
def _(op: likelihood.KalmanFilter, X):
    return tuple(scans.outputs(*X.values()))


def derivatives(op) -> tuple[str, ...]:
    """The outputs that are requested but for the value."""
    return tuple(x for x in op.requested if x not in ("l", "value"))


@run.register
def _(op: likelihood.KalmanLoglikeGrad, X):
    *inputs, l_bar = X.values()
    if jax._is_compiled(None, inputs):
        l, found = calls.gradient(derivatives(op), op.tol, tuple(inputs), l_bar, None)
    else:
        engine = parallel if jax._at_once(None, inputs) else scans
        l, found = engine.gradient(derivatives(op), tuple(inputs), l_bar)
    return found | {"l": l}


@run.register
def _(op: likelihood.KalmanLoglikeTangent, X):
    model, l_bar = tuple(X[x] for x in INPUTS), X["l_bar"]
    dots = {x: X[f"{x}_dot"] if op.many else X[f"{x}_dot"][None] for x in op.along}
    engine = calls if jax._is_compiled("fused", model) else scans
    tol = (op.tol,) if engine is calls else ()
    l, found = engine.tangents(derivatives(op), *tol, model, l_bar, dots)
    found |= {"l": l}
    return found if op.many else {x: V[0] for x, V in found.items()}


@run.register
def _(op: likelihood.KalmanFilterGrad, X):
    inputs = [X[x] for x in INPUTS]
    out = scans.filter_scan(inputs, ("l", "a_pred", "P_pred"))
    bars = {x: X[f"{x}_bar"] for x in op.given}
    return scans.reverse_scan(inputs, out["a_pred"], out["P_pred"], bars)


@run.register
def _(op: KalmanPanel, X):
    compiled = jax._is_compiled("fused", X.values())
    return (calls.panel(op.tol) if compiled else scans.panel)(*X.values())


@run.register
def _(op: KalmanPanelGrad, X):
    *inputs, l_bar = X.values()
    if jax._is_compiled("fused", inputs):
        names = derivatives(op)
        l, found = calls.panel_gradient(names, op.tol, tuple(inputs), l_bar, None)
    else:
        l, found = calls.panel_by_scans(tuple(PANEL), inputs, l_bar, None)
    return found | {"l": l}


@run.register
def _(op: KalmanIntegrated, X):
    return jax.integrated(**X, tol=op.tol)


@run.register
def _(op: KalmanIntegratedGrad, X):
    wanted = {x: X[x] for x in derivatives(op)}
    value, pull = vjp(lambda some: jax.integrated(**X | some, tol=op.tol)[0], wanted)
    return pull(jnp.ones_like(value))[0] | {"value": value}
