"""JAX: the filter as a lax.scan under value_and_grad, the closed form in it, and dynamax."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import product
from time import perf_counter

import numpy as np

from helpers.kalman import StateSpace
from helpers.statespace import NAMES

# One thread, as for everyone. It must be said before JAX starts.
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
UNROLL = 1, 4, 16  # the best of them is kept
WRITTEN_OUT = 6  # up to so many series: a factor without LAPACK, whose calls cost more than it does


def start():
    """JAX with float64 on one thread, which computes before it returns."""
    flags = os.environ.get("XLA_FLAGS", "")
    if ONE_THREAD not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {ONE_THREAD}".strip()
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:  # keep all, however small or quick to compile
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.jit(lambda x: x + 1)(1.0)
    return jax


def scan_loglike(y, a0, P0, c, d, T, Z, R, H, Q, *, unroll: int, gaps: bool, written: bool = False):
    """Short update; for one series F is a number, and gaps are masked only where there are some.

    For several it is factored by LAPACK, or `written` out.
    """
    import jax.numpy as jnp
    from jax import lax

    W = R @ Q @ R.T
    o = (~jnp.isnan(y)).astype(float) if gaps else jnp.ones_like(y)
    y = jnp.where(jnp.isnan(y), 0.0, y) if gaps else y
    factors = _written_factors if written else _lapack_factors
    update = _update_one if y.shape[1] == 1 else partial(_update, factors)

    def step(state, now):
        a_filt, P_filt, l = update(*state, *now, d, Z, H, gaps)
        return (T @ a_filt + c, T @ P_filt @ T.T + W), l

    return lax.scan(step, (a0, P0), (y, o), unroll=unroll)[1].sum()


def _update_one(a, P, y_t, o_t, d, Z, H, gaps):
    import jax.numpy as jnp

    o = o_t[0]
    M = P @ Z[0]
    v, F = y_t[0] - Z[0] @ a - d[0], Z[0] @ M + H[0, 0]
    u = v / F
    l = -(jnp.log(2 * jnp.pi) + jnp.log(F) + v * u) / 2
    if gaps:
        u, M, l = o * u, o * M, o * l
    return a + M * u, P - jnp.outer(M, M) / F, l


def _lapack_factors(F, v, M):
    """log|F|, F^-1 v and F^-1 M'."""
    import jax.numpy as jnp
    from jax.scipy.linalg import cho_solve

    C = jnp.linalg.cholesky(F)
    return 2 * jnp.log(jnp.diag(C)).sum(), cho_solve((C, True), v), cho_solve((C, True), M.T)


def _written_factors(F, v, M):
    """The same without a call: every entry of the factor and of the solutions is an expression."""
    import jax.numpy as jnp

    p = len(v)
    C = [[None] * p for _ in range(p)]
    for j in range(p):
        C[j][j] = jnp.sqrt(F[j, j] - sum(C[j][k] ** 2 for k in range(j)))
        for i in range(j + 1, p):
            C[i][j] = (F[i, j] - sum(C[i][k] * C[j][k] for k in range(j))) / C[j][j]

    def solved(B):
        X = []
        for i in range(p):  # C X = B
            X.append((B[i] - sum(C[i][k] * X[k] for k in range(i))) / C[i][i])
        for i in reversed(range(p)):  # C' Y = X
            X[i] = (X[i] - sum(C[k][i] * X[k] for k in range(i + 1, p))) / C[i][i]
        return jnp.stack(X)

    return 2 * sum(jnp.log(C[j][j]) for j in range(p)), solved(v), solved(M.T)


def _update(factors, a, P, y_t, o_t, d, Z, H, gaps):
    import jax.numpy as jnp

    count = len(d)
    if gaps:
        d, Z, H = d * o_t, Z * o_t[:, None], H * jnp.outer(o_t, o_t) + jnp.diag(1 - o_t)
        count = o_t.sum()
    v = y_t - Z @ a - d
    M = P @ Z.T
    logdet, u, F_inv_M = factors(Z @ M + H, v, M)
    l = -(count * jnp.log(2 * jnp.pi) + logdet + v @ u) / 2
    return a + M @ u, P - M @ F_inv_M, l


def closed_form_loglike(y, *model, method: str):
    """The package's own: its compiled pass, or two scans, the second its closed-form pullback."""
    from helpers.kalman.jax import loglike

    return loglike(y, *model, method=method).sum()


def dynamax_loglike(y, a0, P0, c, d, T, Z, R, H, Q, *, parallel: bool = False):
    """dynamax's filter, or the one that is parallel in time."""
    import jax.numpy as jnp
    from dynamax.linear_gaussian_ssm import inference as lgssm

    no_inputs = jnp.zeros((len(a0), 0)), jnp.zeros((len(d), 0))
    parameters = lgssm.ParamsLGSSM(
        lgssm.ParamsLGSSMInitial(a0, P0),
        lgssm.ParamsLGSSMDynamics(T, c, no_inputs[0], R @ Q @ R.T),
        lgssm.ParamsLGSSMEmissions(Z, d, no_inputs[1], H),
    )
    if parallel:
        from dynamax.linear_gaussian_ssm import parallel_inference

        return parallel_inference.lgssm_filter(parameters, y).marginal_loglik
    return lgssm.lgssm_filter(parameters, y).marginal_loglik


def contender(
    y: np.ndarray, model: StateSpace, requested: tuple[str, ...] = NAMES, *, loglike: Callable
) -> Callable:
    jax = start()
    places = tuple(1 + NAMES.index(name) for name in requested)
    function = jax.jit(jax.value_and_grad(loglike, argnums=places))
    arguments = [jax.numpy.asarray(X) for X in (y, *model.asdict().values())]

    def call():
        value, gradients = jax.block_until_ready(function(*arguments))
        return value, dict(zip(requested, gradients, strict=True))

    return call


def scan(y: np.ndarray, model: StateSpace, requested: tuple[str, ...] = NAMES) -> Callable:
    """The scan, unrolled as far as pays, factors by LAPACK or written out; ``call.note`` says."""
    gaps = bool(np.isnan(y).any())
    tried = {}
    ways = (False, True) if 1 < model.p <= WRITTEN_OUT else (False,)
    for unroll, written in product(UNROLL, ways):
        call = contender(
            y, model, requested,
            loglike=partial(scan_loglike, unroll=unroll, gaps=gaps, written=written),
        )  # fmt: skip
        call(), call()
        seconds = []
        for _ in range(7):
            begin = perf_counter()
            call()
            seconds.append(perf_counter() - begin)
        tried[unroll, written] = min(seconds), call
    best = min(tried, key=lambda way: tried[way][0])
    tried[best][1].note = f"unroll = {best[0]}" + ", factors written out" * best[1]
    return tried[best][1]


def scan_once(y: np.ndarray, model: StateSpace, requested: tuple[str, ...] = NAMES) -> Callable:
    """The scan as it is, not unrolled: for the time to the first gradient."""
    return contender(y, model, requested, loglike=partial(scan_loglike, unroll=1, gaps=False))
