r"""The Kalman filter in JAX: a plain function whose gradient is the closed form.

:func:`loglike` is what a JAX model uses (NumPyro, BlackJAX, Optax): ``jax.grad``, ``jax.jit`` and
``jax.vmap`` work as they do everywhere, and the backward pass is the reverse recursion of the
chapter "All ten gradients" instead of JAX's own derivative of a scan.  Forward mode over the
function itself (``jax.jvp``, ``jax.jacfwd``) is what a ``jax.custom_vjp`` cannot give: JAX says so.

There are two engines.  On a CPU a program of JAX calls the compiled pass of
:mod:`helpers.kalman.fused`, without a way back to Python (:mod:`helpers.kalman.fused.xla`).
Everywhere else, and for second derivatives, there are two scans over the lines of a step, which
stand in :mod:`helpers.kalman.recursions` as for every engine.  PyTensor's JAX mode runs the same
functions (:func:`register_ops`).
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from types import SimpleNamespace

from helpers.kalman.fused.building import load
from helpers.kalman.recursions import (
    LEAST,
    TOLERANCE,
    cholesky,
    factor,
    mask,
    outer,
    predict,
    pull_observed,
    pull_predict,
    pull_update,
    solve,
    symmetric,
    update,
)
from helpers.kalman.reference import FilterOutputs
from helpers.statespace import NAMES, SHAPES, STATIC

try:
    import jax
except ModuleNotFoundError as error:
    raise ImportError(
        f"{__name__} needs JAX, which is not installed: pip install jax (a release for GPUs is "
        'another line, see JAX\'s own page), or pip install "kalman-by-hand[jax]"'
    ) from error

import jax.numpy as jnp
from jax import lax, vjp, vmap
from jax.scipy.linalg import solve_triangular

__all__ = ["filter_outputs", "integrated", "loglike", "register_ops"]

DIMS = {"y": ("n", "p"), **SHAPES, "W": ("m", "m"), "l_bar": ("n",)}
# What the scans take, with W = R Q R' in place of R and Q.
INPUTS = ("y", "a0", "P0", "c", "d", "T", "Z", "H", "W")

# Up to this many series a factorization is written out, entry by entry, when JAX traces the step:
# calls of LAPACK for such matrices take longer than all else in a step (at 6 series three times as
# long). At 8 the compiler takes twice as long over the text, and the gain is gone.
WRITTEN_OUT = 6


def loglike(y, a0, P0, c, d, T, Z, R, H, Q, *, method="fused", tol=TOLERANCE):
    r"""Log-likelihood of each step of a linear Gaussian state space model, as a JAX function.

    Parameters
    ----------
    y : array (n, p)
        Observations; NaN marks a gap.
    a0, P0, c, d, T, Z, R, H, Q : array
        The model, as in :class:`helpers.statespace.StateSpace`: any but a0 and P0 may carry a
        leading time axis of length n.  P0, H and Q count by their symmetric part, and their
        gradients are symmetric.
    method : {"fused", "scan"}
        "fused" is the compiled pass where JAX's default device is a CPU, and "scan" elsewhere: the
        filter and the reverse recursion as two scans of JAX.
    tol : float
        For the compiled pass: what a covariance that is taken to be in its steady state may miss,
        by estimate, relative to its own size; 0 for no steady state.

    Returns
    -------
    jax.Array (n,)
        NaN throughout where some F is not positive definite; then the gradient is NaN too.  The
        type is that of the arguments together, float32 at least.

    Raises
    ------
    ValueError
        If an argument has the wrong number of dimensions, or shapes do not fit each other, or
        method or tol is none of the above: when JAX traces the function.
    TypeError
        If an argument is complex.
    jax.errors.JaxRuntimeError
        If the compiled pass runs out of memory: "RESOURCE_EXHAUSTED".

    Notes
    -----
    The compiled pass is :func:`helpers.kalman.loglike_and_grad`, square-root start and steady state
    included; it computes in float64 whatever the type of the arrays.  Where JAX differentiates the
    function, value and gradient come from one call, and gradients that nobody asks for are left
    out.  Second derivatives come from the scans: correct, and slow.

    ``jax.vmap`` makes the compiled pass a loop over models, or over series.  The scans take all of
    a batch through each step at once, which is faster for hundreds of series of a single state, and
    about as fast with two; with thirteen states the loop wins.

    The scans run the reverse recursion of Parellier, Barrau and Bonnabel (2023),
    doi:10.1109/TAC.2023.3297879, extended to all arrays.  They keep m^2 + m numbers of each step,
    the predicted mean and covariance, and compute the rest of the step again on the way back.
    There a vague start P0 = kappa I costs the gradients about eps kappa of their size, as it costs
    JAX's own derivative of the filter.

    JAX computes in float32, whatever it is given, unless it is told otherwise before:
    ``jax.config.update("jax_enable_x64", True)``.  A likelihood wants float64.

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
    if method not in ("fused", "scan"):
        raise ValueError(f'method is {method!r}, expected "fused" or "scan"')
    if not tol >= 0:
        raise ValueError(f"tol is {tol!r}, expected a number that is not negative")
    inputs = _with_W(y, a0, P0, c, d, T, Z, R, H, Q)
    return _per_step(method, float(tol))(*inputs)


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
    return FilterOutputs(*_outputs(*_with_W(y, a0, P0, c, d, T, Z, R, H, Q)))


def _with_W(*arrays):  # noqa: N802
    """The ten arguments, checked, as the scans take them."""
    *others, R, H, Q = _as_arrays(("y", *NAMES), arrays)
    return *others, H, R @ ((Q + Q.mT) / 2) @ R.mT


def _as_arrays(names, arrays):
    """JAX arrays of one float type whose shapes fit each other."""
    arrays = dict(zip(names, (jnp.asarray(X) for X in arrays), strict=True))
    complex_ones = [x for x, X in arrays.items() if jnp.iscomplexobj(X)]
    if complex_ones:
        raise TypeError(f"{', '.join(complex_ones)} complex, expected real arrays")
    dtype = jnp.result_type(*arrays.values())
    if not jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.result_type(float)  # float64 where JAX has it
    dtype = jnp.result_type(jnp.float32, dtype)  # no half precision: it has no factorization
    _check_shapes({name: X.shape for name, X in arrays.items()})
    return [X.astype(dtype) for X in arrays.values()]


def _check_shapes(shapes: dict) -> None:
    """Raise if the shapes do not fit each other; y gives n and p, a0 gives m and R gives r."""
    sizes = {}
    for name, shape in shapes.items():
        dims, may_vary = DIMS[name], name not in ("y", *STATIC)
        if may_vary and len(shape) == len(dims) + 1:
            dims = ("n", *dims)
        tail = "," if len(dims) == 1 else ""
        if len(shape) != len(dims):
            also = " or with a leading time axis" if may_vary else ""
            raise ValueError(
                f"{name} has {len(shape)} dimensions, expected {len(dims)}: "
                f"({', '.join(dims)}{tail}){also}"
            )
        expected = tuple(
            sizes.setdefault(dim, length) for dim, length in zip(dims, shape, strict=True)
        )
        if shape != expected:
            raise ValueError(
                f"{name} has shape {shape}, expected ({', '.join(dims)}{tail}) = {expected}"
            )
    for dim, what in (("n", "step"), ("p", "series"), ("m", "state"), ("r", "shock")):
        if sizes.get(dim) == 0:
            raise ValueError(f"{dim} = 0: there is no {what}")


def _closed_form(names: tuple[str, ...]):
    """The function of INPUTS that returns these outputs, with the closed-form pullback."""

    @jax.custom_vjp
    def run(*inputs):
        out = _filter(inputs, names)
        return tuple(out[x] for x in names)

    def forward(*inputs):
        out = _filter(inputs, (*names, "a_pred", "P_pred"))
        return tuple(out[x] for x in names), (inputs, out["a_pred"], out["P_pred"])

    def backward(saved, bars):
        gradients = _pull(*saved, dict(zip(names, bars, strict=True)))
        return tuple(gradients[x] for x in INPUTS)

    run.defvjp(forward, backward)
    return run


_loglike = _closed_form(("l",))
_outputs = _closed_form(FilterOutputs._fields)


_observed = _closed_form(("y_hat", "F", "l"))


def _gradient_by_scans(names, inputs, l_bar):
    """l, and by name the gradients of these, of the sum of l weighted with l_bar."""
    out = _filter(inputs, ("l", "a_pred", "P_pred"))
    found = _pull(inputs, out["a_pred"], out["P_pred"], {"l": l_bar})
    return out["l"], {x: found[x] for x in names}


def _per_step(method: str, tol: float):
    """The log-likelihood of each step as a function of INPUTS."""
    if method == "fused" and _on_cpu():
        return _fused(tol)
    return lambda *inputs: _loglike(*inputs)[0]


def _on_cpu() -> bool:
    """Whether JAX computes there, unless it is told otherwise."""
    return jax.default_backend() == "cpu"


@cache
def _fused(tol: float):
    """The log-likelihood of each step as a function of INPUTS, by the compiled pass."""

    @jax.custom_vjp
    def run(*inputs):
        l = jax.ShapeDtypeStruct(inputs[0].shape[:1], inputs[0].dtype)
        return _call("value", tol, [l], inputs)[0]

    def forward(*inputs):
        names = tuple(x for x, X in zip(INPUTS, inputs, strict=True) if X.perturbed)
        inputs = tuple(X.value for X in inputs)
        l_bar = jnp.ones_like(inputs[0], shape=inputs[0].shape[:1])
        l, ready = _gradient(names, tol, inputs, l_bar, None)
        return l, (inputs, ready)

    def backward(saved, l_bar):
        inputs, ready = saved
        found = _gradient(tuple(ready), tol, inputs, l_bar, ready)[1]
        return tuple(found.get(x) for x in INPUTS)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gradient(names, tol, inputs, l_bar, ready):
    """:func:`_gradient_by_scans` by the compiled pass, which JAX can differentiate.

    ``ready`` are the gradients for weights of one, where they are known: then l is left out.
    """
    n, dtype = len(l_bar), l_bar.dtype
    l = jax.ShapeDtypeStruct((n if ready is None else 0,), dtype)
    arrays = [_over_time(x, X) for x, X in zip(INPUTS, inputs, strict=True)]
    none = [jnp.zeros((0,) * X.ndim, dtype) for X in arrays]
    results = [
        X if x in names else nothing for x, X, nothing in zip(INPUTS, arrays, none, strict=True)
    ]
    more = (
        []
        if ready is None
        else [
            _over_time(x, ready[x]) if x in names else nothing
            for x, nothing in zip(INPUTS, none, strict=True)
        ]
    )
    l, *found = _call("gradient", tol, [l, *results], inputs, l_bar, *more)
    found = zip(INPUTS, inputs, found, strict=True)
    return l, {x: G.reshape(X.shape) for x, X, G in found if x in names}


@_gradient.defjvp
def _(names, tol, primals, tangents):
    inputs, l_bar, ready = primals

    def scanned(inputs, l_bar):
        l, found = _gradient_by_scans(names, inputs, l_bar)
        return (l if ready is None else l[:0]), found

    dots = jax.jvp(scanned, (inputs, l_bar), tangents[:2])[1]
    return _gradient(names, tol, inputs, l_bar, ready), dots


def _over_time(name: str, X):
    """The array with an axis for time, of length 1 or n, as the compiled pass takes it."""
    fixed = name in ("y", *STATIC) or X.ndim > len(DIMS[name])
    return X if fixed else X[jnp.newaxis]


def _call(work: str, tol: float, results: list, inputs, *more):
    """A program's call of the compiled pass; results have a shape and a type."""
    y, a0 = inputs[:2]
    arrays = [_over_time(x, X) for x, X in zip(INPUTS, inputs, strict=True)]
    results = [jax.ShapeDtypeStruct(X.shape, X.dtype) for X in results]
    name = _targets()[work, y.dtype.name]
    _compile(len(a0), y.shape[1])
    call = jax.ffi.ffi_call(name, results, vmap_method="broadcast_all")
    return call(*arrays, jnp.full(1, tol, y.dtype), *more)


def _compile(m: int, p: int) -> None:
    """Compile what a call may need now, and not when XLA calls it."""
    load("roots")
    entry = load("entry")
    if max(m, p) <= entry.LARGEST:
        entry.compile_small(m, p)


@cache
def _targets() -> dict:
    """The names under which XLA knows the compiled pass, once it has been told."""
    names = {}
    for (work, dtype), code in load("xla").HANDLERS.items():
        names[work, dtype] = f"{__package__}.{work}.{dtype}"
        pointer = ctypes.cast(code.address, ctypes.c_void_p)
        jax.ffi.register_ffi_target(names[work, dtype], jax.ffi.pycapsule(pointer), platform="cpu")
    return names


def integrated(y, starts, c, P0, T, Z, H, W, precision):
    """The log-likelihood with delta integrated out, and delta's mean and covariance.

    The arrays are those of :mod:`helpers.kalman.diffuse_op`: y (q + 1, n, p), starts (q + 1, m) and
    c (q + 1, n or 1, m) of the series and of a column for each number, and precision (q, q). As
    there, the value is without the determinant of the precision, and NaN where the data leave a
    direction open. JAX differentiates it: the filter by its closed form, the algebra by itself.
    Every column goes through the covariances for itself, which the compiled pass spares.
    """
    missing = jnp.isnan(y[0])
    d = jnp.zeros(y.shape[2], y.dtype)
    T, Z, H, W = (X if len(X) > 1 else X[0] for X in (T, Z, H, W))  # noqa: N806

    def seen(y, starts, c):
        """C^-1 v (n, p, q + 1), and the log-likelihood of the first."""
        c = c if c.shape[1] > 1 else c[:, 0]
        y_hat, F, l = vmap(lambda y, a0, c: _observed(y, a0, P0, c, d, T, Z, H, W))(y, starts, c)
        C = vmap(lambda F, o: cholesky(F + jnp.diag(o))[0])(F[0], missing.astype(y.dtype))
        v = jnp.where(missing, 0, y - y_hat)
        return vmap(solve)(C, jnp.moveaxis(v, 0, -1)), l[0].sum()

    def step(w, delta):
        """S = V'F^-1 V + precision, and the slope at delta."""
        S = precision + jnp.einsum("npi,npj->ij", w[..., 1:], w[..., 1:])  # noqa: N806
        return S, -jnp.einsum("npi,np->i", w[..., 1:], w[..., 0]) - precision @ delta

    # The series moves to where delta is most likely: from afar, its squares would hide the rest.
    S, s = step(seen(y, starts, c)[0], jnp.zeros(len(precision), y.dtype))
    delta = lax.stop_gradient(jnp.linalg.solve(S, s))
    y, starts, c = (
        jnp.concatenate([X[:1] + jnp.tensordot(delta, X[1:], 1)[None], X[1:]])
        for X in (y, starts, c)
    )
    w, l = seen(y, starts, c)
    S, s = step(w, delta)
    size = jnp.sqrt(jnp.diag(S))
    C = jnp.linalg.cholesky(S / outer(size, size))
    known = (jnp.diag(C) ** 2 > len(S) * LEAST).all()
    x = solve_triangular(C, s / size, lower=True)
    logdet = 2 * (jnp.log(jnp.diag(C)) + jnp.log(size)).sum()
    value = l + (x @ x - logdet - delta @ precision @ delta) / 2
    root = solve_triangular(C, jnp.diag(1 / size), lower=True).T
    return jnp.where(known, value, jnp.nan), delta + root @ x, root @ root.T


class _Scanned:
    """What both scans run over: y with zeros in its gaps, what varies with time, what does not."""

    def __init__(self, inputs):
        arrays = dict(zip(INPUTS, inputs, strict=True))
        y, self.a0, self.P0 = (arrays.pop(x) for x in INPUTS[:3])
        missing = jnp.isnan(y)
        y, o = jnp.where(missing, 0, y), (1 - missing).astype(y.dtype)
        self.moving = {x: X for x, X in arrays.items() if X.ndim > len(DIMS[x])}
        self.fixed = {x: X for x, X in arrays.items() if x not in self.moving}
        self.sequences = y, o, self.moving
        self.I_p, self.I_m = (jnp.eye(k, dtype=y.dtype) for k in (y.shape[1], len(self.a0)))

    def update(self, now, a, P) -> SimpleNamespace:
        """A step's arrays, and all that its update computes from the predicted mean and covariance.

        d, Z and H have zeros where a component is missing.
        """
        y, o, moving = now
        x = SimpleNamespace(**self.fixed | moving)
        x.d, x.Z, x.H = mask(o, x.d, x.Z, x.H)
        x.F, logdet, x.C_inv, x.S, x.Kf, x.J, x.P_filt, G = factor(
            o, P, x.Z, x.H, self.I_p, self.I_m
        )
        x.y_hat, x.w, x.u, x.a_filt, x.l = update(y, o, a, x.d, x.Z, logdet, x.C_inv, G)
        return x


def _filter(inputs, names: tuple[str, ...]) -> dict:
    """The filter's outputs of these names, by name; l is NaN throughout where one F fails."""
    model = _Scanned(inputs)

    def step(state, now):
        x = model.update(now, *state)
        x.a_pred, x.P_pred = state
        after = predict(x.a_filt, x.P_filt, x.c, x.T, x.W)
        return after, {name: getattr(x, name) for name in names}

    _, out = lax.scan(step, (model.a0, symmetric(model.P0)), model.sequences)
    return out | {"l": jnp.where(jnp.isnan(out["l"]).any(), jnp.nan, out["l"])}


def _pull(inputs, a_pred, P_pred, bars: dict) -> dict:
    """The gradients of INPUTS, by name, from cotangents (by name) of some of the outputs.

    Those of arrays that do not vary with time are summed on the way: no stack of them is made.
    """
    model = _Scanned(inputs)
    m, p = len(model.I_m), len(model.I_p)
    shapes = (m,), (m,), (p,), (m, m), (m, m), (p, p), ()
    zeros = FilterOutputs(*(jnp.zeros(shape, a_pred.dtype) for shape in shapes))

    def step(after, slices):
        now, a, P, given = slices
        a_bar, P_bar, sums = after
        o, bar = now[1], zeros._replace(**given)
        x = model.update(now, a, P)
        found = {"c": a_bar, "W": P_bar}
        found["T"], s, Pt = pull_predict(a_bar, P_bar, x.T, x.a_filt, P_bar @ x.T @ x.P_filt)
        s, Pt = s + bar.a_filt, Pt + symmetric(bar.P_filt)
        e, Z_bar, H_bar, a_bar, P_bar = pull_update(
            s, Pt, bar.l, x.w, x.u, x.C_inv, x.S, x.Kf, x.J, x.a_filt, x.P_filt @ s, Pt @ x.P_filt
        )
        d_bar = e
        if "y_hat" in given or "F" in given:
            more = pull_observed(bar.y_hat, symmetric(bar.F), a, P, x.Z)
            d_bar, Z_bar, H_bar = d_bar + more[0], Z_bar + more[1], H_bar + more[2]
            a_bar, P_bar = a_bar + more[3], P_bar + more[4]
        found |= {"d": d_bar * o, "Z": Z_bar * o[:, None], "H": symmetric(H_bar) * outer(o, o)}
        sums = {name: X_bar + found[name] for name, X_bar in sums.items()}
        before = a_bar + bar.a_pred, P_bar + symmetric(bar.P_pred), sums
        return before, (-e * o, {name: found[name] for name in model.moving})

    start = zeros.a_pred, zeros.P_pred, {x: jnp.zeros_like(X) for x, X in model.fixed.items()}
    (a_bar, P_bar, sums), (y_bar, stacked) = lax.scan(
        step, start, (model.sequences, a_pred, P_pred, bars), reverse=True
    )
    return {"y": y_bar, "a0": a_bar, "P0": P_bar} | sums | stacked


def _cholesky(F):
    """The lower factor of F and log|F|; NaN where F is not positive definite."""
    p = len(F)
    if p > WRITTEN_OUT:
        C = jnp.linalg.cholesky(F, symmetrize_input=False)
        return C, 2 * jnp.log(jnp.diag(C)).sum()
    C = [[jnp.zeros((), F.dtype)] * p for _ in range(p)]
    for j in range(p):
        C[j][j] = jnp.sqrt(F[j, j] - sum(C[j][k] ** 2 for k in range(j)))
        for i in range(j + 1, p):
            C[i][j] = (F[i, j] - sum(C[i][k] * C[j][k] for k in range(j))) / C[j][j]
    return jnp.array(C), 2 * sum(jnp.log(C[j][j]) for j in range(p))


def _solve(C, B):
    """C^-1 B by forward substitution."""
    p = len(C)
    if p > WRITTEN_OUT:
        return solve_triangular(C, B, lower=True)
    X = []
    for i in range(p):
        X.append((B[i] - sum(C[i, k] * X[k] for k in range(i))) / C[i, i])
    return jnp.stack(X)


for kind in (jax.Array, jax.core.Tracer):  # a tracer is no jax.Array to functools.singledispatch
    cholesky.register(kind, _cholesky)
    solve.register(kind, _solve)


@cache
def register_ops() -> None:
    """Tell PyTensor's JAX backend how it runs the Ops of :mod:`helpers.kalman.op`.

    That module calls this when the first function is compiled in JAX mode.  The Op of the value
    becomes the function behind :func:`loglike`: samplers that run on JAX (NumPyro's and BlackJAX's
    in PyMC) let JAX differentiate the value, and get the closed form.
    """
    from pytensor.link.jax.dispatch import jax_funcify

    from helpers.kalman import diffuse_op, directions_op, panel_op, products
    from helpers.kalman import op as ops

    @jax_funcify.register(products.Product)
    def _(op, **kwargs):
        return jnp.matmul

    @jax_funcify.register(ops.KalmanLoglike)
    def _(op, **kwargs):
        return lambda *inputs: _per_step("fused", op.tol)(*_as_arrays(INPUTS, inputs))

    @jax_funcify.register(ops.KalmanFilter)
    def _(op, **kwargs):
        return lambda *inputs: _outputs(*_as_arrays(INPUTS, inputs))

    def chosen(found, names):
        """What an Op returns: the arrays of these names, or the only one."""
        return tuple(found[x] for x in names) if len(names) > 1 else found[names[0]]

    @jax_funcify.register(ops.KalmanLoglikeGrad)
    def _(op, **kwargs):
        names = tuple(x for x in op.requested if x != "l")

        def gradients(*inputs):
            *inputs, l_bar = _as_arrays((*INPUTS, "l_bar"), inputs)
            if _on_cpu():
                l, found = _gradient(names, op.tol, tuple(inputs), l_bar, None)
            else:
                l, found = _gradient_by_scans(names, inputs, l_bar)
            return chosen(found | {"l": l}, op.requested)

        return gradients

    def tangent_of(op):
        def tangent(*inputs):
            model = _as_arrays(INPUTS, inputs[: len(INPUTS)])
            l_bar, *moves = inputs[len(INPUTS) :]
            moves = dict(zip(op.along, moves, strict=True))
            dots = [moves.get(x, jnp.zeros_like(X)) for x, X in zip(INPUTS, model, strict=True)]
            names = tuple(x for x in op.requested if x != "l")
            l, found = jax.jvp(lambda *X: _gradient_by_scans(names, X, l_bar), model, dots)[1]
            return chosen(found | {"l": l}, op.requested)

        return tangent

    @jax_funcify.register(ops.KalmanLoglikeTangent)
    def _(op, **kwargs):
        return tangent_of(op)

    @jax_funcify.register(directions_op.KalmanLoglikeTangents)
    def _(op, **kwargs):
        axes = [None] * (len(INPUTS) + 1) + [0] * len(op.along)
        return vmap(tangent_of(op), axes)

    @jax_funcify.register(ops.KalmanFilterGrad)
    def _(op, **kwargs):
        def gradients(*inputs):
            inputs, bars = inputs[: len(INPUTS)], inputs[len(INPUTS) :]
            inputs = _as_arrays(INPUTS, inputs)
            out = _filter(inputs, ("l", "a_pred", "P_pred"))
            bars = dict(zip(op.given, bars, strict=True))
            return chosen(_pull(inputs, out["a_pred"], out["P_pred"], bars), INPUTS)

        return gradients

    def panel(y, a0, P0, c, *matrices):
        """The log-likelihoods of series: a0 and c of length 1 are those of all."""

        def one(y, a0, c):
            model = [X if len(X) > 1 else X[0] for X in (c, jnp.zeros((1, y.shape[1])), *matrices)]
            return _loglike(*_as_arrays(INPUTS, [y, a0, P0, *model]))[0]

        axes = [0 if len(X) > 1 else None for X in (a0, c)]
        a0, c = (X if axis == 0 else X[0] for X, axis in zip((a0, c), axes, strict=True))
        return vmap(one, (0, *axes))(y, a0, c)

    @jax_funcify.register(panel_op.KalmanPanel)
    def _(op, **kwargs):
        return panel

    @jax_funcify.register(panel_op.KalmanPanelGrad)
    def _(op, **kwargs):
        def gradients(*inputs):
            l, pull = vjp(panel, *inputs[:-1])
            found = dict(zip(panel_op.INPUTS, pull(inputs[-1]), strict=True)) | {"l": l}
            return chosen(found, op.requested)

        return gradients

    @jax_funcify.register(diffuse_op.KalmanIntegrated)
    def _(op, **kwargs):
        return integrated

    @jax_funcify.register(diffuse_op.KalmanIntegratedGrad)
    def _(op, **kwargs):
        def gradients(*inputs):
            value, pull = vjp(lambda *X: integrated(*X)[0], *inputs)
            found = dict(zip(diffuse_op.INPUTS, pull(jnp.ones_like(value)), strict=True))
            return chosen(found | {"value": value}, op.requested)

        return gradients
