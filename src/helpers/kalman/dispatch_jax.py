"""The Ops of `helpers.kalman.op` in JAX: the filter and the reverse recursion as pure JAX scans.

Imported by `helpers.kalman.op` where JAX is installed. The recursions are those of
`helpers.kalman.reference` (forms and labels there), so that jit, vmap and devices work as JAX has
them; there is no callback.
"""

import jax
import jax.numpy as jnp
from pytensor.link.jax.dispatch.basic import jax_funcify

from helpers.kalman.model import NAMES, SHAPES
from helpers.kalman.op import (
    INPUTS,
    OUTPUTS,
    KalmanFilter,
    KalmanFilterGrad,
    KalmanLoglike,
    KalmanLoglikeGrad,
)

LOG_2PI = jnp.log(2 * jnp.pi)
STEPWISE = NAMES[2:]


def symmetric(X):
    return (X + jnp.swapaxes(X, -1, -2)) / 2


def at_each_step(arrays: dict):
    """(moving, now): what a scan runs over, and the function that adds what does not vary."""
    moving = {x: arrays[x] for x in STEPWISE if arrays[x].ndim > len(SHAPES[x])}
    fixed = {x: arrays[x] for x in STEPWISE if x not in moving}
    return moving, lambda slices: fixed | slices


def masked(y, d, Z, H):
    """One step's y, d, Z, H with zeros for what is missing, and which entries are observed."""
    observed = ~jnp.isnan(y)
    y, d = jnp.where(observed, y, 0.0), d * observed
    return y, d, Z * observed[:, None], H * jnp.outer(observed, observed), observed


def filter_scan(y, a0, P0, c, d, T, Z, R, H, Q):
    """The seven outputs of the filter by name, with u, F_inv and Kf for the way back."""
    moving, now = at_each_step({"c": c, "d": d, "T": T, "Z": Z, "R": R, "H": H, "Q": Q})

    def step(state, slices):
        a, P = state
        y_t, slices = slices
        X = now(slices)
        y_t, d_t, Z_t, H_t, observed = masked(y_t, X["d"], X["Z"], symmetric(X["H"]))
        missing = jnp.diag((~observed).astype(P.dtype))
        y_hat = Z_t @ a + d_t
        v = y_t - y_hat
        F = symmetric(Z_t @ P @ Z_t.T + H_t)
        C = jnp.linalg.cholesky(F + missing)
        C_inv = jax.scipy.linalg.solve_triangular(C, jnp.eye(len(F), dtype=P.dtype), lower=True)
        F_inv = C_inv.T @ C_inv - missing
        u = F_inv @ v
        Kf = P @ Z_t.T @ F_inv
        a_filt = a + Kf @ v
        J = jnp.eye(len(a), dtype=P.dtype) - Kf @ Z_t
        P_filt = symmetric(J @ P @ J.T + Kf @ H_t @ Kf.T)
        l = -(observed.sum() * LOG_2PI + 2 * jnp.log(jnp.diag(C)).sum() + v @ u) / 2
        a_next = X["T"] @ a_filt + X["c"]
        P_next = symmetric(X["T"] @ P_filt @ X["T"].T + X["R"] @ symmetric(X["Q"]) @ X["R"].T)
        out = {
            "a_filt": a_filt, "a_pred": a, "y_hat": y_hat, "P_filt": P_filt, "P_pred": P, "F": F,
            "l": l, "u": u, "F_inv": F_inv, "Kf": Kf,
        }  # fmt: skip
        return (a_next, P_next), out

    return jax.lax.scan(step, (a0, symmetric(P0)), (y, moving))[1]


def reverse_scan(inputs: dict, filtered: dict, bars: dict) -> dict:
    """The gradients of all inputs, by name, from cotangents of some of the filter's outputs."""
    y = inputs["y"]
    moving, now = at_each_step(inputs)
    m, p = len(inputs["a0"]), y.shape[1]

    def step(state, slices):
        a_bar, P_bar = state
        y_t, slices, out, bar = slices
        X = now(slices)
        _, _, Z, _, observed = masked(y_t, X["d"], X["Z"], X["H"])
        T, R, Q, Kf, u = X["T"], X["R"], symmetric(X["Q"]), out["Kf"], out["u"]
        l_bar = bar.get("l", 0.0)
        y_hat_bar = bar.get("y_hat", jnp.zeros(p, y.dtype)) * observed
        F_bar = symmetric(bar.get("F", jnp.zeros((p, p), y.dtype)))
        g = {"c": a_bar, "R": 2 * P_bar @ R @ Q, "Q": symmetric(R.T @ P_bar @ R)}
        g["T"] = jnp.outer(a_bar, out["a_filt"]) + 2 * P_bar @ T @ out["P_filt"]
        a_filt_bar = T.T @ a_bar + bar.get("a_filt", 0.0)
        P_filt_bar = symmetric(T.T @ P_bar @ T + bar.get("P_filt", 0.0))

        w, J = Kf.T @ a_filt_bar, jnp.eye(m, dtype=y.dtype) - Kf @ Z
        v_bar = w - l_bar * u
        F_all = l_bar * (jnp.outer(u, u) - out["F_inv"]) / 2 + F_bar
        H_bar = F_all + symmetric(Kf.T @ P_filt_bar @ Kf - jnp.outer(w, u))
        Z_bar = (
            jnp.outer(u, out["P_filt"] @ a_filt_bar)
            - 2 * Kf.T @ P_filt_bar @ out["P_filt"]
            - l_bar * Kf.T
            - jnp.outer(v_bar, out["a_filt"])
            + jnp.outer(y_hat_bar, out["a_pred"])
            + 2 * F_bar @ Z @ out["P_pred"]
        )
        g |= {
            "y": v_bar * observed,
            "d": (y_hat_bar - v_bar) * observed,
            "Z": Z_bar * observed[:, None],
            "H": H_bar * jnp.outer(observed, observed),
        }
        a_filt_bar = J.T @ a_filt_bar
        a_bar = a_filt_bar + Z.T @ (l_bar * u + y_hat_bar) + bar.get("a_pred", 0.0)
        P_bar = symmetric(
            J.T @ P_filt_bar @ J
            + jnp.outer(a_filt_bar, Z.T @ u)
            + Z.T @ F_all @ Z
            + bar.get("P_pred", 0.0)
        )
        return (a_bar, P_bar), g

    start = jnp.zeros(m, y.dtype), jnp.zeros((m, m), y.dtype)
    (a0_bar, P0_bar), g = jax.lax.scan(step, start, (y, moving, filtered, bars), reverse=True)
    summed = {x: g[x] if x in moving or x == "y" else g[x].sum(axis=0) for x in g}
    return summed | {"a0": a0_bar, "P0": P0_bar}


@jax_funcify.register(KalmanLoglike)
def jax_funcify_kalman_loglike(op, **kwargs):
    return lambda *inputs: filter_scan(*inputs)["l"]


@jax_funcify.register(KalmanLoglikeGrad)
def jax_funcify_kalman_loglike_grad(op, **kwargs):
    def gradients(*inputs):
        *model, l_bar = inputs
        filtered = filter_scan(*model)
        bars = {"l": jnp.broadcast_to(l_bar, filtered["l"].shape)}
        found = reverse_scan(dict(zip(INPUTS, model, strict=True)), filtered, bars)
        found["l"] = filtered["l"]
        out = tuple(found[x] for x in op.asked)
        return out if len(out) > 1 else out[0]

    return gradients


@jax_funcify.register(KalmanFilter)
def jax_funcify_kalman_filter(op, **kwargs):
    def outputs(*inputs):
        filtered = filter_scan(*inputs)
        return tuple(filtered[x] for x in OUTPUTS)

    return outputs


@jax_funcify.register(KalmanFilterGrad)
def jax_funcify_kalman_filter_grad(op, **kwargs):
    def gradients(*inputs):
        model, bars = inputs[: len(INPUTS)], inputs[len(INPUTS) :]
        found = reverse_scan(
            dict(zip(INPUTS, model, strict=True)),
            filter_scan(*model),
            dict(zip(op.given, bars, strict=True)),
        )
        return tuple(found[x] for x in INPUTS)

    return gradients
