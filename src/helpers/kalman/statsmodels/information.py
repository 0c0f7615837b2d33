"""Second derivatives of the log-likelihood, information matrices and standard errors."""

from __future__ import annotations

import numpy as np
from statsmodels.tsa.statespace.mlemodel import MLEModel

from helpers.kalman import diffuse
from helpers.kalman import hessian as arrays_hessian
from helpers.kalman import information as arrays
from helpers.kalman.information import _inner
from helpers.kalman.recursions import symmetric
from helpers.kalman.statsmodels.arrays import _arrays, _checked, _first, _free, _names
from helpers.kalman.statsmodels.climbing import SINGULAR
from helpers.kalman.statsmodels.score import SCALED, _Point, _reach, _score, _without_fixed
from helpers.kalman.statsmodels.updates import (
    STEP,
    _derivatives,
    _transformation,
    second_derivatives,
)

# Along a ridge, where there should be none, what is left of the score gives some curvature.
RIDGE = 1e-6

# A variance that counts as zero, relative to the largest of the model's. Optimisers work with its
# square root, and leave that at 1e-7 or so where the variance is to be zero.
BOUNDARY = 1e-12

OF_ARRAYS = {"expected": arrays.expected_information, "opg": arrays.outer_product}


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
    found = _hessian(point)
    if not transformed:
        free = mod.handle_params(params, True, False)
        both = found, _score(mod, full)
        found, slopes = (_without_fixed(mod, X, mod._has_fixed_params) for X in both)
        map = _transformation(mod, free)
        J = map.dense(free)
        found = symmetric(J.T @ found @ J + second_derivatives(map, free, slopes))
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
        If ``kind`` is not one of these; if it is not "observed" and the start is exact diffuse; if
        G is singular for "sandwich". Or as :func:`loglike`.
    numpy.linalg.LinAlgError
        As :func:`loglike`.
    """
    _check_kind(kind)
    params = _checked(mod, params)
    point = _Point(mod, mod.handle_params(params, transformed=True))
    if not params.size:
        return np.zeros((0, 0))
    if kind == "observed":
        return _free(mod, -_hessian(point))
    if kind in OF_ARRAYS:
        return _free(mod, _information(point, OF_ARRAYS[kind]))
    observed, G, names = _observed_and_opg(mod, point)
    found = observed @ _inverse(G, names, "outer product of the gradients") @ observed
    return symmetric(_without_last(found) if len(names) > len(_names(mod)) else found)


def _observed_and_opg(mod: MLEModel, point: _Point):
    """I and G of the free parameters and, where it is concentrated, of the log scale; the names."""
    observed = _free(mod, -_hessian(point, with_scale=True))
    G = _free(mod, _information(point, OF_ARRAYS["opg"], with_scale=True))
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
        return np.zeros(0)
    full = mod.handle_params(params, transformed=True)
    _refuse_boundary(mod, full)
    if kind == "sandwich":
        observed, G, names = _observed_and_opg(mod, _Point(mod, full))
        inverse = _inverse(observed, names, "observed information")
        return np.sqrt(np.diag(inverse @ G @ inverse))[: len(_names(mod))]
    covariance = _inverse(information(mod, params, kind), _names(mod), f"{kind} information")
    return np.sqrt(np.diag(covariance))


def _moves(point: _Point) -> dict[str, np.ndarray]:
    """The derivatives of the arrays in each parameter (k, ...), a stationary start included."""
    found = _derivatives(point.mod, point.params).moves(point.params)
    _arrays(point.mod, point.params)  # leaves the model real
    here = _first(point.arrays)
    for states, block, solved in point.start.stationary:
        R, Q = here["R"][states], here["Q"]
        first = _first(found, 1)
        for j in range(len(point.params)):
            dT, dR = first["T"][j][block], first["R"][j][states]
            E = dT @ solved.covariance @ here["T"][block].T + dR @ Q @ R.T
            found["a0"][j, states], found["P0"][j][block] = solved.solve(
                dT @ solved.mean + first["c"][j][states], E + E.T + R @ first["Q"][j] @ R.T
            )
    return found


def _directions(point: _Point, moves: dict) -> dict[str, np.ndarray]:
    """The same for the arrays of `model`; where a scale is concentrated, its log comes last."""
    if not point.mod.ssm.filter_concentrated:
        return moves
    last = {x: getattr(point.model, x)[np.newaxis] * (x in SCALED) for x in moves}
    first = {x: point.scale * dX if x in SCALED else dX for x, dX in moves.items()}
    return {x: np.concatenate([dX, last[x]]) for x, dX in first.items()}


def _hessian(point: _Point, with_scale: bool = False) -> np.ndarray:
    """For all of the model's parameters, fixed ones included.

    Where a scale is concentrated, it is at its best for each value of the parameters, or its
    logarithm comes last, if `with_scale`.
    """
    moves = _moves(point)
    directions = _directions(point, moves)
    if point.A.size:
        found = diffuse.hessian(point.y, point.model, point.A, directions)
    else:
        found = arrays_hessian.hessian(point.y, point.model, directions, weights=point.weights)
    if point.mod.ssm.filter_concentrated:
        # In the log scale and in another parameter, an array has for its second derivative its
        # first in that other.
        bars = {x: getattr(point.raw, x) for x in SCALED}
        mixed = sum(np.tensordot(directions[x], X, X.ndim) for x, X in bars.items())
        found[-1] += mixed
        found[:-1, -1] += mixed[:-1]
        found = found if with_scale else _without_last(found)
    k, moved = len(point.params), _derivatives(point.mod, point.params)
    found[:k, :k] += _products_in_a_stationary_start(point, moves)
    found[:k, :k] += second_derivatives(moved, point.params, moved.pack(point.gradient))
    _arrays(point.mod, point.params)  # leaves the model real, and where it was
    if point.A.shape != point.start.A.shape:
        found[:k, :k] -= _turns_of_the_unseen(point, moves)
    return symmetric(found)


def _turns_of_the_unseen(point: _Point, moves: dict) -> np.ndarray:
    """What second derivatives lose where the numbers that are never seen turn with parameters.

    |S| on those that are seen is that on the numbers that are seen here, over the square of the
    cosine of the angle between the two. From O N = 0, with O what reaches the observations and N
    the numbers that do not: along a direction N turns by -O^+ dO N.
    """
    y, A, (T, Z) = point.y, point.start.A, (point.model.T, point.model.Z)
    seen = A.T @ point.A
    unseen = np.linalg.qr(seen, mode="complete")[0][:, seen.shape[1] :]
    back = np.linalg.pinv(_reach(y, T, Z, A) @ seen)
    moved = zip(1j * STEP * moves["T"], 1j * STEP * moves["Z"], strict=True)
    turns = np.stack([back @ _reach(y, T + dT, Z + dZ, A).imag @ unseen for dT, dZ in moved]) / STEP
    return np.einsum("iab,jab->ij", turns, turns)


def _products_in_a_stationary_start(point: _Point, moves: dict):
    """What products of first derivatives add to the second ones of a stationary a0 and P0.

    d2P = T d2P T' + E, and <P_bar, d2P> = <S, E>. What second derivatives of T, R, Q and c give
    to E is in the gradients of those arrays already.
    """
    here, bar, total = _first(point.arrays), point.raw, 0.0
    for states, block, solved in point.start.stationary:
        T, R, Q, P = here["T"][block], here["R"][states], here["Q"], solved.covariance
        s, S = solved.adjoints(bar.a0[states], point.scale * bar.P0[block])
        dT, dR, dQ = (_first(moves, 1)[x] for x in "TRQ")
        dT, dR, da = dT[:, *block], dR[:, states], moves["a0"][:, states]
        # E is X + X' in each pair of parameters, so <S, E> = 2 <S, X>.
        one = _inner(S @ dT, T @ moves["P0"][:, *block]) + _inner(S @ dR, R @ dQ)
        both = _inner(S @ dT @ P, dT) + _inner(S @ dR @ Q, dR)
        mean = np.einsum("a,iab,jb->ij", s, dT, da)
        total = total + 2 * (one + one.T + both) + mean + mean.T
    return total


def _information(point: _Point, of_arrays, with_scale: bool = False) -> np.ndarray:
    """That of the arrays, in all of the model's parameters, as `hessian` has them."""
    if point.A.size:
        states = ", ".join(map(str, np.flatnonzero(point.A.any(axis=1))))
        raise ValueError(
            f"the states {states} of this {type(point.mod).__name__} have an exact diffuse "
            "start, which has the observed information alone: kind='observed'"
        )
    found = of_arrays(point.y, point.model, _directions(point, _moves(point)), point.weights)
    concentrated = point.mod.ssm.filter_concentrated and not with_scale
    return symmetric(_without_last(found)) if concentrated else found


def _without_last(X: np.ndarray) -> np.ndarray:
    """Second derivatives where the last parameter is at its best for each value of the others."""
    return X[:-1, :-1] - np.outer(X[:-1, -1], X[-1, :-1]) / X[-1, -1]


def _check_kind(kind: str) -> None:
    if kind not in ("observed", "expected", "opg", "sandwich"):
        raise ValueError(f"kind is {kind!r}, expected 'observed', 'expected', 'opg' or 'sandwich'")


def _inverse(X: np.ndarray, names: list[str], what: str) -> np.ndarray:
    """The inverse of an information matrix, or a sentence that says what it leaves open."""
    size = np.sqrt(np.maximum(np.diag(X), 0))
    upwards = f"the {what} is not positive definite: the likelihood curves upwards along"
    blind = f"the {what} is singular: the data say nothing about"
    if not size.all():
        j = int(np.argmin(np.diag(X)))
        raise ValueError(f"{blind if X[j, j] == 0 else upwards} {names[j]}")
    values, vectors = np.linalg.eigh(X / size / size[:, np.newaxis])
    if values[0] <= SINGULAR:
        along = _combination(vectors[:, 0] / size, names)
        raise ValueError(f"{upwards if values[0] < -RIDGE else blind} {along}")
    scaled = vectors / size[:, np.newaxis]
    return scaled / values @ scaled.T


def _combination(direction: np.ndarray, names) -> str:
    """A direction in words, its largest part one."""
    direction = direction / direction[np.abs(direction).argmax()]
    told = zip(direction, names, strict=True)
    return " ".join(f"{x:+.2g} {name}" for x, name in told if abs(x) > 1e-6)


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
