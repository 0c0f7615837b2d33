r"""The log-likelihood with unknown numbers integrated out, as an Op with its closed-form gradient.

:func:`kalman_diffuse_loglike` is :func:`helpers.kalman.diffuse.loglike` for PyTensor and PyMC: an
exact diffuse start, regression coefficients, or both.  The Op's inputs are the q + 1 series of
:mod:`helpers.kalman.diffuse`, the data and a column for each number (the data alone where delta
enters the first state alone); PyTensor puts them together, and takes their gradients apart.

It runs in Numba, C and Python modes, and in JAX mode by :func:`helpers.kalman.jax.integrated`.
"""

from __future__ import annotations

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType, disconnected_grad, disconnected_type
from pytensor.graph import Apply, Op
from pytensor.graph.replace import _vectorize_node
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.math import Sum
from pytensor.tensor.rewriting.basic import register_canonicalize, register_specialize

from helpers.kalman.diffuse import room
from helpers.kalman.ops.declared import Declared, asked, real_tensors
from helpers.kalman.ops.likelihood import filter_outputs_from_W, from_model, less
from helpers.kalman.recursions import LEAST, LOG_2PI, TOLERANCE
from helpers.kalman.shapes import INTEGRATED, NEEDED, check

ENTERS = {"A": "m q", "X": "p q", "B": "m q", "precision": "q q"}


def kalman_diffuse_loglike(
    y, a0, P0, c, d, T, Z, R, H, Q, A=None, X=None, B=None, precision=None, tol=TOLERANCE
):
    """Log-likelihood of a series with delta integrated out, symbolically.

    Parameters
    ----------
    y, a0, P0, c, d, T, Z, R, H, Q : tensor
        As :func:`helpers.kalman.ops.likelihood.kalman_loglike`; a0, c and d without delta. What P0
        is on the span of A makes no difference under a flat prior.
    A, X, B, precision : tensor (m, q), (p, q) or (n, p, q), (m, q) or (n, m, q), (q, q), optional
        What delta adds to the first state, to each observation and to each next state, and the
        precision of its prior, as :func:`helpers.kalman.diffuse.loglike` has them.
    tol : float
        As there.

    Returns
    -------
    TensorVariable, a scalar
        NaN where some F is not positive definite, or the data leave a direction of delta open.

    Raises
    ------
    ValueError
        If an argument has the wrong number of dimensions, a shape that is known does not fit, or
        tol is negative or NaN.
    TypeError
        If an argument is complex, or tol is symbolic.
    NotImplementedError
        Where a second derivative is asked for.

    Examples
    --------
    >>> import numpy as np
    >>> from helpers.kalman.ops.diffuse import kalman_diffuse_loglike
    >>> one, zero, y = np.eye(1), np.zeros(1), np.array([[1.0], [np.nan], [3.0]])
    >>> l = kalman_diffuse_loglike(y, zero, 0 * one, zero, zero, one, one, one, one, one, A=one)
    >>> print(l.eval().round(3))
    -3.031
    """
    return posterior(*from_model(y, a0, P0, c, d, T, Z, R, H, Q), A, X, B, precision, tol)[0]


def kalman_diffuse_estimate(
    y, a0, P0, c, d, T, Z, R, H, Q, A=None, X=None, B=None, precision=None, tol=TOLERANCE
):
    """Mean (q,) and covariance (q, q) of delta given the data, symbolically; without a gradient.

    Parameters and errors as :func:`kalman_diffuse_loglike`. The covariance is that of delta given
    P0: what P0 says of the span of A is not counted twice.
    """
    return posterior(*from_model(y, a0, P0, c, d, T, Z, R, H, Q), A, X, B, precision, tol)[1:]


def posterior(
    y, a0, P0, c, d, T, Z, H, W, A=None, X=None, B=None, precision=None, tol=TOLERANCE
):  # fmt: skip
    """The log-likelihood, and the mean and covariance of delta; with W = R Q R' for R and Q."""
    given = {"A": A, "X": X, "B": B, "precision": precision}
    given = real_tensors({x: M for x, M in given.items() if M is not None})
    sizes = dict(zip("npm", (*y.type.shape, *a0.type.shape), strict=True))
    check(ENTERS, {x: M.type.shape for x, M in given.items()}, sizes=sizes, may_vary="XB")
    prior = given.pop("precision", None)
    if not given:
        raise ValueError("delta enters nowhere: give A, X or B")
    given = {x: M.astype(y.dtype) for x, M in given.items()}
    q = next(iter(given.values())).shape[-1]
    m = a0.shape[0]
    # A column for each number, first.
    A, X, B = (pt.moveaxis(given[x], -1, 0) if x in given else None for x in "AXB")
    starts = pt.concatenate([a0[None], pt.zeros((q, m)) if A is None else A])
    series = less(y, d if d.ndim == 2 else d[None])[None]
    c = c[None] if c.ndim == 2 else c[None, None]
    if X is not None or B is not None:  # else the columns of the series and of c are zeros
        # As many as X has: where A has others, they are not made to fit, and the Op refuses them.
        columns = pt.zeros((q if X is None else X.shape[0], *y.shape))
        if X is not None:
            columns -= X if X.ndim == 3 else X[:, None, :]
        series = pt.concatenate([series, columns])
        series = pt.switch(pt.isnan(y)[None], np.nan, series)
        B = pt.zeros((q, 1, m)) if B is None else B if B.ndim == 3 else B[:, None, :]
        steps = pt.maximum(c.shape[1], B.shape[1])
        c = pt.concatenate([pt.broadcast_to(M, (M.shape[0], steps, m)) for M in (c, B)])
    flat = pt.ones((q,), dtype="bool")
    for M in (X, B if "B" in given else None):
        if M is not None:
            flat &= pt.eq(pt.abs(M).reshape((M.shape[0], -1)).max(axis=1), 0)
    taken = pt.zeros((q,))
    if precision is None and A is not None:
        first = (M[0] if M.ndim == 3 else M for M in (Z, H, W))
        taken = pt.switch(flat, room(A.T, *first, pt), 0.0)
        wide = pt.sqrt(taken)[:, None] * A
        P0 = P0 + disconnected_grad(wide.T @ wide)
    T, Z, H, W = (M if M.ndim == 3 else M[None] for M in (T, Z, H, W))
    prior = pt.zeros((q, q)) if prior is None else prior
    inputs = (series, starts, c, (P0 + P0.mT) / 2, T, Z, H, W, prior)
    value, mean, covariance = KalmanIntegrated(tol)(*inputs)
    if precision is not None:
        definite = pt.all(pt.diagonal(pt.linalg.cholesky(prior)) > 0)
        value = value + pt.switch(definite, pt.linalg.slogdet(prior)[1] / 2, np.nan)
    return value, mean, covariance - pt.diag(taken)


def predictions(y, a0, P0, c, d, T, Z, H, W, A):
    """What a step's observation is, given those before it: one-step terms, symbolically.

    Parameters
    ----------
    y, a0, P0, c, d, T, Z, H, W : tensor
        As :func:`posterior`; what delta adds to the first state is A (m, q), its prior is flat.

    Returns
    -------
    terms : TensorVariable (n,)
        The logarithms of the predictive densities, whose sum is the log-likelihood but for the
        diffuse steps, those until which the data leave a direction of delta open: there it is NaN.
        So it is where nothing is observed.
    mean, covariance : TensorVariable (n, p), (n, p, p)
        Of each observation, missing or not; the mean is NaN in the diffuse steps.
    """
    A = pt.as_tensor_variable(A).astype(y.dtype)
    q, size = A.shape[1], y.shape[1]
    first = (M[0] if M.ndim == 3 else M for M in (Z, H, W))
    P0 = P0 + (A * room(A, *first, pt)) @ A.T
    out = filter_outputs_from_W(y, a0, P0, c, d, T, Z, H, W)
    T, Z = (pt.broadcast_to(M, (y.shape[0], *M.shape[-2:])) for M in (T, Z))
    # Of a missing observation, too, which has no innovation in the filter.
    y_hat = d + (Z @ out.a_pred[:, :, None])[:, :, 0]
    F = Z @ out.P_pred @ Z.mT + H
    seen = ~pt.isnan(y)
    pairs = seen[:, :, None] & seen[:, None, :]

    def of_the_seen(F):
        return pt.switch(pairs, F, pt.eye(size))

    Z_seen, F_seen = pt.switch(seen[:, :, None], Z, 0.0), of_the_seen(F)
    L = T - T @ out.P_pred @ Z_seen.mT @ pt.linalg.solve(F_seen, Z_seen, b_ndim=2)
    # One sequence alone: of several, JAX cannot know that they are equally long.
    _, columns = pytensor.scan(
        lambda L, columns: (L @ columns, columns), [L], [A, None], return_updates=False
    )
    E = Z @ columns
    E_seen = pt.switch(seen[:, :, None], E, 0.0)
    v = pt.switch(seen, y - y_hat, 0.0)
    told = E_seen.mT @ pt.linalg.solve(
        F_seen, pt.concatenate([E_seen, v[:, :, None]], axis=2), b_ndim=2
    )
    # Before each step: what the first say of delta, in units in which they say as much of each.
    told = pt.cumsum(told, axis=0) - told
    told = pt.switch(pt.isnan(told), 0.0, told)
    said = pt.diagonal(told[:, :, :-1], axis1=1, axis2=2)
    units = pt.switch(said > 0, said, 1.0) ** -0.5
    values, vectors = pt.linalg.eigh(told[:, :, :-1] * units[:, :, None] * units[:, None, :])
    known = values[:, 0] > q * LEAST
    values = pt.switch(known[:, None], values, 1.0)
    root = units[:, :, None] * vectors / pt.sqrt(values)[:, None, :]
    delta = root @ (root.mT @ told[:, :, -1:])
    mean = y_hat + (E @ delta)[:, :, 0]
    covariance = F + (E @ root) @ (E @ root).mT
    error = pt.switch(seen, y - mean, 0.0)[:, :, None]
    spread = of_the_seen(covariance)
    squares = (error.mT @ pt.linalg.solve(spread, error, b_ndim=2))[:, 0, 0]
    terms = -(squares + pt.linalg.slogdet(spread)[1] + seen.sum(axis=1) * LOG_2PI) / 2
    terms = pt.switch(known & seen.any(axis=1), terms, np.nan)
    return terms, pt.switch(known[:, None], mean, np.nan), covariance


class OneStepTerms(Op):
    """The log-likelihood and its terms (n,) -> the terms, whose sum is the log-likelihood.

    Both may have leading axes, those of a batch. A model's log density adds the terms up, and then
    they are not computed: a rewrite leaves the first input. It has the gradient, too, for terms of
    equal weight.
    """

    __props__ = ()

    def make_node(self, value, terms):
        return Apply(self, [value, terms], [terms.type()])

    def perform(self, node, inputs, output_storage):
        raise NotImplementedError(
            "rewrites tell the terms of a diffuse start from their sum: compile it with some, "
            "optimizer='fast_compile' or 'fast_run'"
        )

    def do_constant_folding(self, fgraph, node):
        return False

    def infer_shape(self, node, shapes):
        return [shapes[1]]

    def pullback(self, inputs, outputs, cotangents):
        (bar,) = cotangents
        if isinstance(bar.type, DisconnectedType):
            return [disconnected_type(), disconnected_type()]
        message = "terms of a diffuse start have a gradient together, each with the same weight"
        same = pt.all(pt.eq(bar, bar[..., :1]))
        return [CheckAndRaise(NotImplementedError, message)(bar[..., 0], same), disconnected_type()]

    def connection_pattern(self, node):
        return [[True], [False]]


@_vectorize_node.register(OneStepTerms)
def batch_of_one_step_terms(op, node, value, terms):
    """The Op itself, whose sum is still found, on a batch of both."""
    if value.ndim + 1 != terms.ndim:
        value, terms = pt.broadcast_arrays(value[..., None], terms)
        value = value[..., 0]
    return op.make_node(value, terms)


@register_canonicalize("fast_compile")
@node_rewriter([Sum])
def local_sum_of_one_step_terms(fgraph, node):
    """The sum over the steps is what the terms came with."""
    (terms,) = node.inputs
    if terms.owner is None or not isinstance(terms.owner.op, OneStepTerms):
        return None
    steps, value = terms.ndim - 1, terms.owner.inputs[0]
    axes = set(range(terms.ndim) if node.op.axis is None else node.op.axis)
    if steps not in axes:
        return None
    more = tuple(axes - {steps})
    return [(value.sum(axis=more) if more else value).astype(node.outputs[0].dtype)]


@register_specialize("fast_compile")
@node_rewriter([OneStepTerms])
def local_terms_of_steps(fgraph, node):
    """What is not added up is the terms."""
    return [node.inputs[1]]


class KalmanIntegrated(Declared):
    """The q + 1 series, their starts and c, P0, T, Z, H, W and the precision -> the log-likelihood
    (without the precision's determinant), and delta's mean (q,) and covariance (q, q)."""

    __props__ = ("tol",)
    inputs, needed, looked_at = INTEGRATED, NEEDED, tuple(INTEGRATED)
    gives = {"value": "", "mean": "q", "covariance": "q q"}
    code = "integrated.integrated"
    found = "_, value, mean, root, _, y, starts, c, (_, P0, _, _, T, Z, H, W), _"
    results = {
        "value": "np.asarray(value)", "covariance": "(root @ root.T)",
        "precision": "(-(root @ root.T + np.outer(mean, mean)) / 2)",
    }  # fmt: skip

    def arguments(self):
        return [*INTEGRATED, *["False"] * 5, repr(self.tol)]

    def pull(self, X, bars):
        if bars.keys() != {"value"}:
            raise NotImplementedError("the mean and covariance of delta have no gradient here")
        gradients = KalmanIntegratedGrad(tuple(INTEGRATED), self.tol).named(*X.values())
        return {x: bars["value"] * G for x, G in gradients.items()}


class KalmanIntegratedGrad(Declared):
    """The same inputs -> what is `requested`: the value, and its gradients."""

    __props__ = ("requested", "tol")
    inputs, needed, looked_at = INTEGRATED, NEEDED, tuple(INTEGRATED)
    gives = {"value": ""} | INTEGRATED
    code, found, results = KalmanIntegrated.code, KalmanIntegrated.found, KalmanIntegrated.results
    missing = (
        "second derivatives with delta integrated out are not there: give delta a normal prior "
        "in P0 and take kalman_loglike, which has them"
    )

    def arguments(self):
        return [*INTEGRATED, "True", *map(str, asked(self.requested)), repr(self.tol)]
