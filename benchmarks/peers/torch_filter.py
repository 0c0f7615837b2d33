"""PyTorch: a Python loop and autograd, the comparison of the paper (arXiv 2303.16846)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from helpers.kalman import StateSpace
from helpers.statespace import NAMES


def contender(y: np.ndarray, model: StateSpace, requested: tuple[str, ...] = NAMES) -> Callable:
    import torch

    torch.set_num_threads(1)
    y = torch.tensor(y)
    tensors = {
        name: torch.tensor(X, requires_grad=name in requested) for name, X in model.asdict().items()
    }
    p = y.shape[1]

    def loglike(a, P, c, d, T, Z, R, H, Q):
        W, total = R @ Q @ R.T, torch.zeros((), dtype=y.dtype)
        for y_t in y:
            v = y_t - Z @ a - d
            M = P @ Z.T
            C = torch.linalg.cholesky(Z @ M + H)
            u = torch.cholesky_solve(v[:, None], C)[:, 0]
            total = total - (p * math.log(2 * math.pi) + 2 * C.diagonal().log().sum() + v @ u) / 2
            P_filt = P - M @ torch.cholesky_solve(M.T, C)
            a, P = T @ (a + M @ u) + c, T @ P_filt @ T.T + W
        return total

    def call():
        value = loglike(*tensors.values())
        gradients = torch.autograd.grad(value, [tensors[name] for name in requested])
        return value.detach(), dict(zip(requested, gradients, strict=True))

    return call
