"""Second derivatives of the log-likelihood, information matrices and standard errors."""

from __future__ import annotations

import numpy as np
from statsmodels.tsa.statespace.mlemodel import MLEModel

from helpers.kalman import information as arrays_information
from helpers.kalman.recursions import symmetric
from helpers.kalman.statsmodels.arrays import _arrays, _checked, _first, _free, _names
from helpers.kalman.statsmodels.score import _Point, _score, _without_fixed, _without_last
from helpers.kalman.statsmodels.updates import _derivatives, _transformation, jacobian

# An eigenvalue of an information matrix, its diagonal scaled to ones, that counts as zero: that of
# a parameter without effect comes out as 1e-13 or so, and one of 1e-9 still has a digit or two.
SINGULAR = 1e-11


# A variance that counts as zero, relative to the largest of the model's. Optimisers work with its
# square root, and leave that at 1e-7 or so where the variance is to be zero.
BOUNDARY = 1e-12


def hessian(mod: MLEModel, params, *, transformed: bool = True) -> np.ndarray:
    """The second derivatives of the log-likelihood; ``mod.hessian(params)`` divides by ``nobs``.

    Parameters
    ----------
    mod, params, transformed
        As :func:`loglike`.  A concentrated scale and an exact diffuse start count here too.

    Returns
    -------
    array (k, k)
        Symmetric.  Exact but for the second derivatives of the arrays, which are differences of
        first ones that are exact: 1e-10 or better.

    Raises
    ------
    ValueError, numpy.linalg.LinAlgError
        As :func:`loglike`.
    """
    params = _checked(mod, params)
    full = mod.handle_params(params, transformed=transformed)
    point = _Point(mod, full)
    if not params.size:
        return np.zeros((0, 0))
    found = point.hessian()
    if not transformed:
        free = mod.handle_params(params, True, False)
        found, slopes = (
            _without_fixed(mod, X, mod._has_fixed_params) for X in (found, _score(mod, full))
        )
        map = _transformation(mod, free)
        J = map.dense(free)
        curved = jacobian(lambda x: map.pull(x, slopes), free)
        found = symmetric(J.T @ found @ J + curved)
    return _free(mod, found)


def information(mod: MLEModel, params, kind: str = "observed") -> np.ndarray:
    """The information matrix: its inverse estimates the covariance of the fitted parameters.

    Parameters
    ----------
    mod, params
        As :func:`loglike`; the parameters are those of the model.
    kind : "observed", "expected", "opg" or "sandwich"
        - "observed": minus the Hessian, I.
        - "expected": its mean over series from the model with gaps in the same places.  (With an
          approximate diffuse start these have a starting level of any size, and what they say about
          a parameter in T or Z that multiplies it has little to do with the series at hand.)
        - "opg": the outer product of the gradients of the steps, G.
        - "sandwich": I G^-1 I, so that its inverse is I^-1 G I^-1, the covariance of an estimate
          that does not need the model to be true (but does need its score to have mean zero).

        Where a scale is concentrated out, what is lost by not knowing it is taken off.

    Returns
    -------
    array (k, k)
        Symmetric, of the whole series: not divided by its length.

    Raises
    ------
    ValueError
        If ``kind`` is none of these; if it is not "observed" and the start is exact diffuse; if G
        is singular for "sandwich".  Or as :func:`loglike`.
    numpy.linalg.LinAlgError
        As :func:`loglike`.
    """
    _check_kind(kind)
    params = _checked(mod, params)
    point = _Point(mod, mod.handle_params(params, transformed=True))
    if not params.size:
        return np.zeros((0, 0))
    if kind == "observed":
        return _free(mod, -point.hessian())
    if kind == "expected":
        return _free(mod, point.information(arrays_information.expected_information))
    if kind == "opg":
        return _free(mod, point.information(arrays_information.outer_product))
    observed, G, names = _observed_and_opg(mod, point)
    found = observed @ _inverse(G, names, "outer product of the gradients") @ observed
    return symmetric(_without_last(found) if len(names) > len(_names(mod)) else found)


def _observed_and_opg(mod: MLEModel, point: _Point):
    """I and G of the free parameters and, where it is concentrated, of the log scale; the names."""
    observed = _free(mod, -point.hessian(with_scale=True))
    G = _free(mod, point.information(arrays_information.outer_product, with_scale=True))
    return observed, G, [*_names(mod), "log scale"][: len(G)]


def standard_errors(mod: MLEModel, params, kind: str = "observed") -> np.ndarray:
    """Standard errors of fitted parameters: roots of the diagonal of the inverse information.

    Parameters
    ----------
    mod, params, kind
        As :func:`information`.

    Returns
    -------
    array (k,)

    Raises
    ------
    ValueError
        If a variance is zero, the boundary of what it may be: the message says which.  If the
        information is singular, or the likelihood curves upwards somewhere: the message names the
        direction.  Or as :func:`information`.
    numpy.linalg.LinAlgError
        As :func:`loglike`.
    """
    _check_kind(kind)
    params = _checked(mod, params)
    if not params.size:
        return np.sqrt(np.diag(information(mod, params, kind)))
    _refuse_boundary(mod, mod.handle_params(params, transformed=True))
    if kind == "sandwich":
        full = mod.handle_params(params, transformed=True)
        observed, G, names = _observed_and_opg(mod, _Point(mod, full))
        inverse = _inverse(observed, names, "observed information")
        return np.sqrt(np.diag(inverse @ G @ inverse))[: len(_names(mod))]
    covariance = _inverse(information(mod, params, kind), _names(mod), f"{kind} information")
    return np.sqrt(np.diag(covariance))


def _check_kind(kind: str) -> None:
    if kind not in ("observed", "expected", "opg", "sandwich"):
        raise ValueError(f"kind is {kind!r}, expected 'observed', 'expected', 'opg' or 'sandwich'")


def _inverse(X: np.ndarray, names: list[str], what: str) -> np.ndarray:  # noqa: N803
    """The inverse of an information matrix, or a sentence that says what it leaves open."""
    size = np.sqrt(np.maximum(np.diag(X), 0))
    upwards = f"the {what} is not positive definite: the likelihood curves upwards along"
    blind = f"the {what} is singular: the data say nothing about"
    if not size.all():
        j = int(np.argmin(np.diag(X)))
        raise ValueError(f"{blind if X[j, j] == 0 else upwards} {names[j]}")
    values, vectors = np.linalg.eigh(X / size / size[:, np.newaxis])
    if values[0] <= SINGULAR:
        direction = vectors[:, 0] / size
        direction = direction / direction[np.abs(direction).argmax()]
        told = [
            f"{x:+.2g} {name}" for x, name in zip(direction, names, strict=True) if abs(x) > 1e-6
        ]
        sentence = f"{upwards if values[0] < -SINGULAR else blind} {' '.join(told)}"
        raise ValueError(sentence)
    scaled = vectors / size[:, np.newaxis]
    return scaled / values @ scaled.T


def _refuse_boundary(mod: MLEModel, params: np.ndarray) -> None:
    """A variance of zero has nowhere to go but up, and its estimate no standard error."""
    here, found, free = _first(_arrays(mod, params)), [], _names(mod)
    spectra = {x: np.linalg.eigh(here[x]) for x in ("H", "Q")}
    least = BOUNDARY * max(values.max() for values, _ in spectra.values())
    null = {x: vectors[:, values <= least] for x, (values, vectors) in spectra.items()}
    moves = _derivatives(mod, params).moves(params)
    for j, name in enumerate(mod.param_names):
        d = _first({x: moves[x][j] for x in null})
        # Where a covariance takes no room, a derivative would make it negative to one side.
        if name in free and any(
            np.abs(V.T @ d[x] @ V).max(initial=0) > 1e-10 * np.abs(d[x]).max()
            for x, V in null.items()
        ):
            found.append(name)
    _arrays(mod, params)  # leaves the model real
    if found:
        fixed = ", ".join(f"{name!r}: 0" for name in found)
        raise ValueError(
            f"{', '.join(found)}: a variance of zero, the least that it may be, has no standard "
            f"error; for those of the other parameters, fix it, mod.fix_params({{{fixed}}})"
        )
