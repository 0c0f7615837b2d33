"""PyTensor: our Op, and the filters of pymc-extras, whose gradients are autodiff of a scan."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytensor
import pytensor.tensor as pt

from helpers.kalman import StateSpace
from helpers.statespace import NAMES, SHAPES

# A PyTensor from pip has no BLAS to link C code to: say so beforehand, and it neither looks for
# one nor warns.
pytensor.config.blas__ldflags = ""

MODES = {"Numba": "NUMBA", "C": "CVM"}


def loglikelihoods(kind: str, arguments: list) -> pt.TensorVariable:
    """The log-likelihood of each step as a graph, by our Op or by a filter of pymc-extras."""
    if kind == "ours":
        from helpers.kalman import kalman_loglike

        return kalman_loglike(*arguments)
    from pymc_extras.statespace.filters import kalman_filter

    # Without jitter, so that all compute the same function and errors are errors.
    filters = {"Standard": "StandardFilter", "Convergent": "ConvergentFilter"}
    chosen = getattr(kalman_filter, filters[kind])(cov_jitter=0.0)
    return chosen.build_graph(*arguments)[-1]


@cache
def compiled(kind: str, backend: str, requested: tuple[str, ...]) -> Callable:
    """Function of y and the nine arrays, of any size: the value, then the `requested` gradients."""
    y = pt.matrix("y")
    model = {name: pt.tensor(name, shape=(None,) * len(dims)) for name, dims in SHAPES.items()}
    value = loglikelihoods(kind, [y, *model.values()]).sum()
    gradients = pt.grad(value, [model[name] for name in requested]) if requested else []
    return pytensor.function(
        [y, *model.values()], [value, *gradients], mode=MODES[backend], trust_input=True
    )


def contender(
    y: np.ndarray, model: StateSpace, requested: tuple[str, ...] = NAMES, *, kind: str, backend: str
) -> Callable:
    function, arguments = compiled(kind, backend, requested), [y, *model.asdict().values()]

    def call():
        value, *gradients = function(*arguments)
        return value, dict(zip(requested, gradients, strict=True))

    return call
