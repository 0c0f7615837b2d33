r"""The Kalman filter in JAX: a plain function whose gradient is the closed form.

:func:`loglike` is what a JAX model uses (NumPyro, BlackJAX, Optax): ``jax.grad``, ``jax.jit`` and
``jax.vmap`` work as they do everywhere, and the backward pass is the reverse recursion of the
chapter "All ten gradients" instead of JAX's own derivative of a scan. Forward mode over the
function itself (``jax.jvp``, ``jax.jacfwd``) is not available for a ``jax.custom_vjp``; JAX raises
an error that says so.

There are three engines. On a CPU a program of JAX calls the compiled pass of
:mod:`helpers.kalman.compiled`, without a way back to Python (:mod:`helpers.kalman.jax.calls`), and
for second derivatives that of the tangents. Everywhere else a long series is cut into blocks that
go side by side (:mod:`helpers.kalman.jax.parallel`), and short ones go through two scans
(:mod:`helpers.kalman.jax.scans`). Third derivatives, ``jax.shard_map`` and ``jax.export`` need the
scans on a CPU too. PyTensor's JAX mode runs the same functions (:mod:`helpers.kalman.ops.in_jax`),
and its second derivatives the compiled tangents (``helpers.kalman.compiled.tangents``).
"""

from __future__ import annotations

from helpers.kalman import _needing
from helpers.kalman.recursions import TOLERANCE
from helpers.kalman.reference import FilterOutputs
from helpers.kalman.shapes import INTEGRATED, check, check_model
from helpers.statespace import NAMES, check_tolerance

with _needing(__name__, "jax (a release for GPUs is another line: see JAX's page)", "[jax]"):
    import jax

import jax.numpy as jnp

from helpers.kalman.jax import calls, parallel, scans

__all__ = ["filter_outputs", "integrated", "loglike"]

METHODS = None, "fused", "scan", "parallel"

# From so many steps on a GPU takes all of them at once. benchmarks/results/parallel.json, on an
# H200: 1,024 series of 200 steps and four states take as long by scans, 256 with thirteen states
# 1.4 times as long, one series of 1,000 steps 10 to 15 times; but 10,000 series of 100 steps and
# two states take a third of the time by scans. How many series there are, jax.vmap does not tell.
LONG = 200


def loglike(y, a0, P0, c, d, T, Z, R, H, Q, *, method=None, tol=TOLERANCE):
    r"""Log-likelihood of each step of a linear Gaussian state space model, as a JAX function.

    Parameters
    ----------
    y : array (n, p)
        Observations; NaN marks a gap.
    a0, P0, c, d, T, Z, R, H, Q : array
        The model, as in :class:`helpers.statespace.StateSpace`: any but a0 and P0 may carry a
        leading time axis of length n. Only the symmetric parts of P0, H and Q count, and their
        gradients are symmetric.
    method : {None, "fused", "scan", "parallel"}
        "scan" is the filter and the reverse recursion as two scans of JAX, "parallel" the same for
        all steps at once. None is the compiled pass where ``jax.default_backend()`` is "cpu";
        elsewhere "parallel" from 200 steps on, and "scan" for shorter series. "fused" is the
        compiled pass too, and "scan" where there is no CPU.
    tol : float
        As :func:`helpers.kalman.loglike_and_grad`; the scans run every step in full.

    Returns
    -------
    jax.Array (n,)
        NaN throughout where some F is not positive definite; then the gradient is NaN too.  The
        type is that of the arguments together, float32 at least.

    Raises
    ------
    ValueError
        If an argument has the wrong number of dimensions, or shapes do not fit each other, or
        method or tol is none of the above: when JAX traces the function.  With "parallel" also
        where Z W Z' + H, W = R Q R', is not positive definite on what is observed, so that a step
        has no density given the state before it; inside ``jax.jit`` or ``jax.grad`` such a result
        is NaN.
    TypeError
        If an argument is complex.
    NotImplementedError
        Under ``jax.shard_map``, whose programs take method="scan" (and check_vma=False).
    RuntimeError
        If the compiled pass runs out of memory: JAX's own, which begins with "RESOURCE_EXHAUSTED".

    Notes
    -----
    The compiled pass is :func:`helpers.kalman.loglike_and_grad`, square-root start and steady state
    included; it computes in float64 whatever the type of the arrays. Where JAX differentiates the
    function, value and gradient come from one call, and gradients that are not requested are not
    computed. Second derivatives, as of ``jax.hessian``, come from the compiled pass too, third ones
    from the scans.

    ``jax.vmap`` makes the compiled pass a loop over models, or over series, with a copy of all
    arrays for each.  The scans take all of
    a batch through each step at once, which is faster for hundreds of series of a single state, and
    about as fast with two; with thirteen states the loop wins.

    The scans run the reverse recursion of Parellier, Barrau and Bonnabel (2023),
    doi:10.1109/TAC.2023.3297879, extended to all arrays.  They keep m^2 + m numbers of each step,
    the predicted mean and covariance, and compute the rest of the step again on the way back.
    There a vague start P0 = kappa I costs the gradients about eps kappa of their size, as it costs
    JAX's own derivative of the filter.

    All steps at once (Särkkä and García-Fernández 2021, doi:10.1109/TAC.2020.2976316, with the way
    back of the chapter "All steps at once") do about twice the work of the scans, but for a
    thousand steps in some fifty rounds instead of two thousand: they are meant for a GPU. On a CPU
    they are far slower than the compiled pass. For second derivatives JAX differentiates both
    passes. In float64 values and gradients have the digits of the scans, or one or two fewer. In
    float32 the gradients of 400 steps kept three to five digits by the scans and two to five here,
    under a vague start of kappa = 1e4 at most four, and with 1e6 or more none by either in most
    models.

    By default JAX computes in float32, whatever the type of the arrays. A likelihood needs float64,
    so call ``jax.config.update("jax_enable_x64", True)`` first.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from helpers.kalman.jax import loglike
    >>> one, zero = jnp.eye(1), jnp.zeros(1)
    >>> y = jnp.array([[1.0], [jnp.nan], [0.5]])
    >>> def total(q):
    ...     return loglike(y, zero, one, zero, zero, one, one, one, one, q * one).sum()
    >>> value, slope = jax.value_and_grad(total)(1.0)
    >>> print(f"{value:.3f} {slope:.3f}")
    -3.061 -0.286
    """
    inputs = _with_W(y, a0, P0, c, d, T, Z, R, H, Q)
    return _per_step(_checked(method, tol), float(tol), inputs)


def filter_outputs(y, a0, P0, c, d, T, Z, R, H, Q) -> FilterOutputs:
    """All outputs of the filter as a JAX function, with the closed-form pullback of them all.

    Parameters
    ----------
    y, a0, P0, c, d, T, Z, R, H, Q : array
        As :func:`loglike`.

    Returns
    -------
    FilterOutputs of jax.Array
        All but l are NaN from the first step on at which F is not positive definite.

    Raises
    ------
    ValueError, TypeError
        As :func:`loglike`.
    """
    return FilterOutputs(*scans.outputs(*_with_W(y, a0, P0, c, d, T, Z, R, H, Q)))


def integrated(y, starts, c, P0, T, Z, H, W, precision, *, method="fused", tol=TOLERANCE):
    """The log-likelihood with delta integrated out, and delta's mean and covariance.

    Parameters
    ----------
    y : array (q + 1, n, p)
        The series minus d, and for each number minus what it adds to d, with the same gaps.
    starts, c : array (q + 1, m), (q + 1, n or 1, m)
        a0 and c, and what each number adds to them. Where that is nothing, to c and to d, y and c
        may have the series alone, (1, n, p) and (1, n or 1, m), which takes less time.
    P0 : array (m, m)
    T, Z, H, W : array
        With an axis of length n or 1 for time; W = R Q R'.
    precision : array (q, q)
        Of the prior of delta; zeros for a flat one.
    method, tol
        As :func:`loglike`.

    Returns
    -------
    value : jax.Array ()
        Without the determinant of the precision; NaN where the data leave a direction open.
    mean, covariance : jax.Array (q,), (q, q)

    Raises
    ------
    ValueError
        If shapes do not fit each other, or method or tol is none of the above.
    RuntimeError
        If the compiled pass runs out of memory, as :func:`loglike`.

    Notes
    -----
    :mod:`helpers.kalman.ops.diffuse` makes these arrays of a model and its columns. The gradient of
    the value comes with it from the compiled pass. By scans, and where a gradient of mean or
    covariance or a second one is asked for, the filter is differentiated in closed form and the
    algebra by JAX; and each column computes the covariances anew, where the compiled pass computes
    them once.
    """
    inputs = tuple(map(jnp.asarray, (y, starts, c, P0, T, Z, H, W, precision)))
    dtype = jnp.result_type(jnp.float32, *inputs)
    inputs = tuple(X.astype(dtype) for X in inputs)
    shapes = {x: X.shape for x, X in zip(INTEGRATED, inputs, strict=True)}
    check(INTEGRATED, {"precision": shapes["precision"]})
    check(INTEGRATED, shapes, sizes={"columns": len(precision) + 1})
    if len(y) != len(c):
        raise ValueError(f"c has {len(c)} columns, expected those of y, {len(y)}")
    if _is_compiled(_checked(method, tol, ("fused", "scan")), inputs):
        return calls.integrated(float(tol))(*inputs)
    return scans.integrated(*inputs)


def _checked(method: str | None, tol: float, methods=METHODS) -> str | None:
    if method not in methods:
        *some, last = (f'"{x}"' if x else "None" for x in methods)
        raise ValueError(f"method is {method!r}, expected {', '.join(some)} or {last}")
    check_tolerance(tol)
    return method


def _with_W(*arrays):  # noqa: N802
    """The ten arguments, checked, as the scans take them."""
    arrays = dict(zip(("y", *NAMES), map(jnp.asarray, arrays), strict=True))
    complex_ones = [x for x, X in arrays.items() if jnp.iscomplexobj(X)]
    if complex_ones:
        raise TypeError(f"{', '.join(complex_ones)} complex, expected real arrays")
    dtype = jnp.result_type(*arrays.values())
    if not jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.result_type(float)  # float64 where JAX has it
    dtype = jnp.result_type(jnp.float32, dtype)  # no half precision: it has no factorization
    check_model({x: X.shape for x, X in arrays.items()})
    *others, R, H, Q = (X.astype(dtype) for X in arrays.values())
    return *others, H, R @ ((Q + Q.mT) / 2) @ R.mT


def _per_step(method: str | None, tol: float, inputs):
    """The log-likelihood of each step, from INPUTS."""
    if _is_compiled(method, inputs):
        return calls.loglike(tol)(*inputs)
    if _at_once(method, inputs):
        l = parallel.loglike(*inputs)[0]
        known = not isinstance(l, jax.core.Tracer)
        if known and jnp.isnan(l).any() and parallel.is_refused(inputs):
            raise ValueError(
                "Z W Z' + H with W = R Q R' is not positive definite on what is observed: a step "
                "has no density given the state before it, and cannot go before its turn; take "
                'method="scan"'
            )
        return l
    return scans.loglike(*inputs)[0]


def _at_once(method: str | None, inputs) -> bool:
    """Whether all steps go at once, where the compiled pass is not called."""
    return method == "parallel" or (method is None and len(inputs[0]) >= LONG)


def _is_compiled(method: str | None, inputs) -> bool:
    """Whether the compiled pass is to be called."""
    if method not in (None, "fused") or jax.default_backend() != "cpu":
        return False
    if any(map(_varies_over_devices, inputs)):
        raise NotImplementedError('under shard_map take method="scan", and check_vma=False there')
    return True


def _varies_over_devices(X) -> bool:
    """Whether X is one device's part of an array, under ``shard_map``."""
    kind = jax.typeof(X)
    axes = getattr(kind, "vma", None) or getattr(kind, "manual_axis_type", None)
    return bool(getattr(axes, "varying", axes))
