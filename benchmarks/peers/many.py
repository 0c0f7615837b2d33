"""Many series: the package's panel, loops over its pass for one, dynamax under jax.vmap, PyMC."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from helpers.kalman import StateSpace
from helpers.statespace import NAMES


def factors(J: int) -> np.ndarray:  # noqa: N803
    """What the series' own Q are, in units of the model's."""
    return np.linspace(0.5, 2, J)


def shared(Y, model: StateSpace, requested: tuple[str, ...] = NAMES) -> Callable:  # noqa: N803
    """One model for all series."""
    from helpers.kalman import panel

    def call():
        l, _, gradients = panel.loglike_and_grad(Y, model)
        return l.sum(), {x: getattr(gradients, x) for x in requested}

    return call


def loop(Y, model: StateSpace, requested: tuple[str, ...] = NAMES) -> Callable:  # noqa: N803
    """The package's call for one series, with its checks."""
    from helpers.kalman import loglike_and_grad

    def call():
        parts = [loglike_and_grad(y, model) for y in Y]
        value = sum(value for value, _, _ in parts)
        return value, {x: sum(getattr(bars, x) for _, _, bars in parts) for x in requested}

    return call


def kernel(Y, model: StateSpace, requested: tuple[str, ...] = NAMES) -> Callable:  # noqa: N803
    """The compiled pass for one series, all arrays ready: nothing is checked or converted."""
    from peers import ours

    calls = [ours.contender(y, model, requested) for y in Y]

    def call():
        parts = [each() for each in calls]
        value = sum(value for value, _ in parts)
        return value, {x: sum(bars[x] for _, bars in parts) for x in requested}

    return call


def vmapped(Y, model: StateSpace, requested: tuple[str, ...] = NAMES, *, kind: str) -> Callable:  # noqa: N803
    """jax.vmap of a filter over the series, under value_and_grad of the sum."""
    from functools import partial

    from peers import jax_filters

    jax = jax_filters.start()
    one = {
        "dynamax": jax_filters.dynamax_loglike,
        "scan": partial(jax_filters.scan_loglike, unroll=1, gaps=bool(np.isnan(Y).any())),
    }[kind]
    batch = jax.vmap(one, in_axes=(0, *[None] * len(NAMES)))
    return jax_filters.contender(
        Y, model, requested, loglike=lambda *arguments: batch(*arguments).sum()
    )


def own(Y, model: StateSpace, requested: tuple[str, ...] = NAMES, *, threads: int) -> Callable:  # noqa: N803
    """A Q for each series: nothing is shared."""
    from helpers.kalman import panel

    shapes = {"T": model.T, "Q": model.Q}  # an own T too, so that all gradients are asked for
    J = len(Y)
    arrays = {x: np.repeat(X[np.newaxis], J, axis=0) for x, X in shapes.items()}
    arrays["Q"] *= factors(J)[:, None, None]

    def call():
        l, _, gradients = panel.loglike_and_grad(Y, model, threads=threads, **arrays)
        return l.sum(), {x: getattr(gradients, x) for x in requested}

    return call


def models_of(model: StateSpace, J: int) -> list[StateSpace]:  # noqa: N803
    """The series' own models."""
    return [replace(model, Q=factor * model.Q) for factor in factors(J)]


def own_loop(Y, model: StateSpace, requested: tuple[str, ...] = NAMES, *, bare: bool) -> Callable:  # noqa: N803
    """The same, one series after the other."""
    from helpers.kalman import loglike_and_grad
    from peers import ours

    models = models_of(model, len(Y))
    if bare:
        calls = [ours.contender(y, each, requested) for y, each in zip(Y, models, strict=True)]

        def call():
            parts = [one() for one in calls]
            return sum(value for value, _ in parts), {
                x: np.array([bars[x] for _, bars in parts]) for x in requested
            }

        return call

    def call():
        parts = [loglike_and_grad(y, each) for y, each in zip(Y, models, strict=True)]
        return sum(value for value, _, _ in parts), {
            x: np.array([getattr(bars, x) for _, _, bars in parts]) for x in requested
        }

    return call


# --- a hierarchical local level -------------------------------------------------------------------


def point(J: int) -> np.ndarray:  # noqa: N803
    """Where the log-density is taken: mean, log sd, log H, log Q, and the drifts."""
    return np.concatenate([[0.2, np.log(0.1), 0.1, -1.3], 0.2 + 0.1 * np.sin(np.arange(J))])


def hierarchical(Y, model: StateSpace, requested=(), *, kind: str) -> Callable:  # noqa: N803
    """Log-density and gradient of a PyMC model: local levels whose drifts have a common law.

    ``kind`` is "ours", one Op for all series; "filters", a filter of pymc-extras for each series;
    "vectorized", one such filter that PyTensor vectorizes over them.
    """
    import pymc as pm
    import pytensor.tensor as pt
    from pytensor.graph.replace import vectorize_graph

    from peers import pytensor_filters

    J, one = len(Y), np.eye(1)
    with pm.Model() as whole:
        mean, log_sd, log_H, log_Q = (
            pm.Normal(x) for x in ("mean", "log_sd", "log_H", "log_Q")
        )  # fmt: skip
        drift = pm.Normal("drift", mean, pt.exp(log_sd), shape=J)
        H, Q = pt.exp(log_H)[None, None], pt.exp(log_Q)[None, None]

        def filtered(y, c):
            # A variable for each array: the filters of pymc-extras take none twice.
            a0, P0, d, T, Z, R = map(
                pt.as_tensor, (np.zeros(1), model.P0, np.zeros(1), one, one.copy(), one.copy())
            )
            arguments = [y, a0, P0, c, d, T, Z, R, H, Q]
            name = "ours" if kind == "ours" else "Standard"
            return pytensor_filters.loglikelihoods(name, arguments)

        if kind == "filters":
            l = sum(filtered(pt.as_tensor(y), drift[j : j + 1]).sum() for j, y in enumerate(Y))
        else:
            y, c = pt.matrix("y", shape=Y.shape[1:]), pt.vector("c", shape=(1,))
            l = vectorize_graph(filtered(y, c), {y: pt.as_tensor(Y), c: drift[:, None]}).sum()
        pm.Potential("series", l)
    function = whole.logp_dlogp_function(ravel_inputs=True, mode="NUMBA")
    function.set_extra_values({})
    function._pytensor_function.trust_input = True
    at = point(J)

    def call():
        value, slope = function(at)
        return value, {"theta": slope}

    return call
