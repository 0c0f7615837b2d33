"""JAX: a filter as one would write it with lax.scan, and dynamax, both under value_and_grad."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from helpers.kalman import StateSpace
from helpers.statespace import NAMES

# One thread, as for everyone. It must be said before JAX starts.
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


def start():
    """JAX with float64 on one thread."""
    flags = os.environ.get("XLA_FLAGS", "")
    if ONE_THREAD not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {ONE_THREAD}".strip()
    import jax

    jax.config.update("jax_enable_x64", True)
    return jax


def scan_loglike(y, a0, P0, c, d, T, Z, R, H, Q):
    import jax.numpy as jnp
    from jax import lax
    from jax.scipy.linalg import cho_solve

    p, W = y.shape[1], R @ Q @ R.T

    def step(state, y_t):
        a, P = state
        v = y_t - Z @ a - d
        M = P @ Z.T
        C = jnp.linalg.cholesky(Z @ M + H)
        u = cho_solve((C, True), v)
        l = -(p * jnp.log(2 * jnp.pi) + 2 * jnp.log(jnp.diag(C)).sum() + v @ u) / 2
        P_filt = P - M @ cho_solve((C, True), M.T)
        return (T @ (a + M @ u) + c, T @ P_filt @ T.T + W), l

    return lax.scan(step, (a0, P0), y)[1].sum()


def dynamax_loglike(y, a0, P0, c, d, T, Z, R, H, Q):
    import jax.numpy as jnp
    from dynamax.linear_gaussian_ssm import inference as lgssm

    no_inputs = jnp.zeros((len(a0), 0)), jnp.zeros((len(d), 0))
    parameters = lgssm.ParamsLGSSM(
        lgssm.ParamsLGSSMInitial(a0, P0),
        lgssm.ParamsLGSSMDynamics(T, c, no_inputs[0], R @ Q @ R.T),
        lgssm.ParamsLGSSMEmissions(Z, d, no_inputs[1], H),
    )
    return lgssm.lgssm_filter(parameters, y).marginal_loglik


def contender(
    y: np.ndarray, model: StateSpace, requested: tuple[str, ...] = NAMES, *, loglike=scan_loglike
) -> Callable:
    jax = start()
    places = tuple(1 + NAMES.index(name) for name in requested)
    function = jax.jit(jax.value_and_grad(loglike, argnums=places))
    arguments = [jax.numpy.asarray(X) for X in (y, *model.asdict().values())]

    def call():
        value, gradients = jax.block_until_ready(function(*arguments))
        return value, dict(zip(requested, gradients, strict=True))

    return call
