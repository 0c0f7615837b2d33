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


def start(mode: str) -> None:
    """What the first compilation of any function takes is not a filter's."""
    if mode == "JAX":
        from peers import jax_filters

        jax_filters.start()
    x = pt.vector("x")
    pytensor.function([x], x + 1, mode=mode)(np.ones(2))


def filters() -> dict[str, type]:
    """The filters of pymc-extras, and its standard one with the short update of the covariance."""
    from pymc_extras.statespace.filters import kalman_filter

    class PlainForm(kalman_filter.StandardFilter):
        """P_filt = P - Kf Z P in the place of Joseph's form, 6 m^3 a step with autodiff, not 14."""

        def update(self, a, P, y, d, Z, H, nan_mask):
            observed = pt.bitwise_not(nan_mask).astype(P.dtype)
            y_hat, PZt = d + Z @ a, P @ Z.mT
            v, F = y - y_hat, Z @ PZt + H
            C = pt.linalg.cholesky(F * pt.outer(observed, observed) + pt.diag(1 - observed))
            K = pt.linalg.cho_solve((C, True), PZt.mT).mT
            l = -(
                observed.sum() * kalman_filter.MVN_CONST
                + 2 * pt.log(pt.diag(C)).sum()
                + v @ pt.linalg.cho_solve((C, True), v)
            )
            return a + K @ v, P - K @ PZt.mT, y_hat, F, l / 2

    return {
        "Standard": kalman_filter.StandardFilter,
        "plain form": PlainForm,
        "Convergent": kalman_filter.ConvergentFilter,
        "Univariate": kalman_filter.UnivariateFilter,
        "Cholesky": kalman_filter.SquareRootFilter,
    }


def loglikelihoods(kind: str, arguments: list) -> pt.TensorVariable:
    """The log-likelihood of each step as a graph, by our Op or by a filter of pymc-extras."""
    if kind == "ours":
        from helpers.kalman import kalman_loglike

        return kalman_loglike(*arguments)
    # Without jitter, so that all compute the same function and errors are errors.
    return filters()[kind](cov_jitter=0.0).build_graph(*arguments)[-1]


@cache
def compiled(kind: str, mode: str, requested: tuple[str, ...], sizes: tuple = ()) -> Callable:
    """Function of y and the nine arrays: the value, then the `requested` gradients.

    Of arrays of any size, unless `sizes` names those of n, m, p and r.
    """
    dims = dict(zip("nmpr", sizes, strict=False))
    shape = {x: tuple(map(dims.get, axes)) for x, axes in {"y": ("n", "p"), **SHAPES}.items()}
    y, *model = (pt.tensor(name, shape=shape[name]) for name in shape)
    value = loglikelihoods(kind, [y, *model]).sum()
    chosen = dict(zip(NAMES, model, strict=True))
    gradients = pt.grad(value, [chosen[name] for name in requested]) if requested else []
    return pytensor.function([y, *model], [value, *gradients], mode=mode, trust_input=True)


def contender(
    y: np.ndarray, model: StateSpace, requested: tuple[str, ...] = NAMES, *, kind: str, mode: str
) -> Callable:
    # JAX needs sizes that it knows, and so does PyTensor for the gradient of a QR decomposition.
    known = mode == "JAX" or kind == "Cholesky"
    sizes = (len(y), model.m, model.p, model.r) if known else ()
    function = compiled(kind, mode, requested, sizes)
    arguments = [np.array(X, order="C") for X in (y, *model.asdict().values())]

    def call():
        value, *gradients = function(*arguments)
        if mode == "JAX":  # which hands out arrays of its own
            value, gradients = np.asarray(value), [np.asarray(G) for G in gradients]
        return value, dict(zip(requested, gradients, strict=True))

    return call
