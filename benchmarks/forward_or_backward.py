"""What do k derivatives of a log-likelihood cost, forwards and backwards?

    python benchmarks/forward_or_backward.py

times, in one interleaved run of a few minutes: the filter alone; all gradients backwards, by the
package and in closed loop; and along k directions of H and Q, the sensitivities in closed loop,
those of `helpers.kalman.reference`, the complex step and central differences. It writes
results/forward_or_backward.json, which the chapter "Forward or backward?" draws.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from helpers.checks import symmetrize
from helpers.datasets import random_model, simulate
from helpers.kalman import StateSpace, loglike, loglike_and_grad
from helpers.kalman.reference import forward_sensitivities, kalman_filter
from helpers.timing import compare

RECORD = Path(__file__).parent / "results" / "forward_or_backward.json"
SIZES = ((4, 100), (16, 100), (64, 50))  # m and n; p = 1 and r = m
DIRECTIONS = (1, 3, 10, 30, 100)
FEWER = 30  # complex steps and differences take a filter each: their line needs no hundred
LENGTHS = (100, 200, 400, 800, 1600)  # for m = 4 and 10 directions


def linearised(u, F_inv, Kf, Z, T):
    """K, L, gamma and Gamma of one step: what both ways need (def-forward-gamma)."""
    K, gamma = T @ Kf, Z.T @ u
    return K, T - K @ Z, gamma, (np.outer(gamma, gamma) - Z.T @ F_inv @ Z) / 2


def forward(y, model: StateSpace, dH: np.ndarray, dQ: np.ndarray) -> np.ndarray:
    """Derivatives (k,) along k directions of H and Q, by eq-forward-closed-loop.

    Parameters
    ----------
    y : array (n, p)
        Without gaps.
    model : StateSpace
        Static.
    dH, dQ : array (k, p, p), (k, r, r)
    """
    filtered = kalman_filter(y, model)
    k, m = len(dH), model.m
    dW, dH_rows = model.R @ dQ @ model.R.T, dH.reshape(k, -1)
    da, dP, slopes = np.zeros((k, m)), np.zeros((k, m, m)), np.zeros(k)
    steps = filtered.u, filtered.F_inv, filtered.Kf, filtered.Z
    for u, F_inv, Kf, Z in zip(*steps, strict=True):
        K, L, gamma, Gamma = linearised(u, F_inv, Kf, Z, model.T)
        slopes += da @ gamma + dP.reshape(k, -1) @ Gamma.ravel()
        slopes += dH_rows @ (np.outer(u, u) - F_inv).ravel() / 2
        da = (da + dP @ gamma) @ L.T - dH @ u @ K.T
        dP = L @ dP @ L.T + K @ dH @ K.T + dW
    return slopes


def backward(y, model: StateSpace) -> dict[str, np.ndarray]:
    """Gradients of all arrays, by eq-forward-transpose and eq-forward-gradients; as forward."""
    filtered = kalman_filter(y, model)
    out, F_inv, T = filtered.out, filtered.F_inv, model.T
    a_bar, P_bar = np.zeros(model.m), np.zeros_like(T)
    total = {name: np.zeros_like(X) for name, X in model.asdict().items()} | {"W": P_bar}
    for t in reversed(range(len(y))):
        u, Kf = filtered.u[t], filtered.Kf[t]
        K, L, gamma, Gamma = linearised(u, F_inv[t], Kf, filtered.Z[t], T)
        TP, Ka = T @ out.P_filt[t], K.T @ a_bar
        e, X = u - Ka, np.outer(a_bar, out.a_filt[t]) + 2 * P_bar @ TP
        total["c"] += a_bar
        total["d"] += e
        total["T"] += X
        total["Z"] += np.outer(u, out.a_filt[t] + TP.T @ a_bar) - Kf.T - K.T @ X
        total["H"] += (np.outer(e, e) - F_inv[t]) / 2
        total["H"] += K.T @ (P_bar @ K - np.outer(a_bar, Ka) / 2)
        total["W"] = total["W"] + P_bar
        back = L.T @ a_bar
        P_bar = symmetrize(L.T @ P_bar @ L + np.outer(back, gamma)) + Gamma
        a_bar = back + gamma
    W_bar = total.pop("W")
    total["R"], total["Q"] = 2 * W_bar @ model.R @ model.Q, model.R.T @ W_bar @ model.R
    return total | {"a0": a_bar, "P0": P_bar}


def moved(model: StateSpace, dH: np.ndarray, dQ: np.ndarray, h: complex) -> StateSpace:
    return replace(model, H=model.H + h * dH, Q=model.Q + h * dQ)


def complex_steps(y, model, dH, dQ, h=1e-30):
    pairs = zip(dH, dQ, strict=True)
    return np.array([np.imag(loglike(y, moved(model, *dX, 1j * h))) / h for dX in pairs])


def central_differences(y, model, dH, dQ, h=1e-5):
    return np.array(
        [
            (loglike(y, moved(model, *dX, h)) - loglike(y, moved(model, *dX, -h))) / (2 * h)
            for dX in zip(dH, dQ, strict=True)
        ]
    )


def sensitivities(y, model, dH, dQ):
    return forward_sensitivities(y, model, {"H": dH, "Q": dQ})[1]


def problem(m: int, n: int, k: int):
    """A random stable model, data drawn from it, and k symmetric directions of H and Q."""
    rng = np.random.default_rng(0)
    arrays = random_model(m, rng=rng)
    y, _ = simulate(n, rng, **arrays)
    dH, dQ = (symmetrize(rng.standard_normal((k, size, size))) for size in (1, m))
    return y, StateSpace(**arrays), dH, dQ


def contenders() -> dict:
    along = {
        "forward": forward,
        "forward, package": sensitivities,
        "complex step": complex_steps,
        "central differences": central_differences,
    }
    found = {}
    for m, n in SIZES:
        for k in DIRECTIONS:
            args = problem(m, n, k)
            reference = sensitivities(*args)
            for name, derivatives in along.items():
                if k > FEWER and not name.startswith("forward"):
                    continue
                rtol = 1e-5 if name == "central differences" else 1e-8
                scale = np.abs(reference).max()
                np.testing.assert_allclose(derivatives(*args), reference, rtol=0, atol=rtol * scale)
                found[f"{name}, m={m}, n={n}, k={k}"] = partial(derivatives, *args)
    for m, n in dict.fromkeys([*SIZES, *((4, n) for n in LENGTHS)]):
        y, model, dH, dQ = problem(m, n, 10)
        gradients = loglike_and_grad(y, model)[2].asdict()
        for name, G in backward(y, model).items():
            reference = gradients[name]
            atol = 1e-8 * np.abs(reference).max()
            np.testing.assert_allclose(G, reference, rtol=0, atol=atol)
        found[f"filter, m={m}, n={n}"] = partial(loglike, y, model)
        found[f"backward, m={m}, n={n}"] = partial(backward, y, model)
        found[f"backward, package, m={m}, n={n}"] = partial(loglike_and_grad, y, model)
        found.setdefault(f"forward, m={m}, n={n}, k=10", partial(forward, y, model, dH, dQ))
    return found


if __name__ == "__main__":
    timings = compare(contenders(), repeats=15, warmup=1, label="forward or backward")
    timings.to_json(RECORD)
    for m, n in SIZES:
        of_size = {name: t for name, t in timings.seconds.items() if f"m={m}, n={n}" in name}
        print(replace(timings, seconds=of_size).table(f"filter, m={m}, n={n}"), end="\n\n")
