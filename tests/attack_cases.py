"""An example of inputs for every Op of the package, for `attack`."""

import numpy as np
from test_sparse_op import OPS as SPARSE_OPS

from helpers.datasets import random_model, simulate
from helpers.kalman.ops.diffuse import KalmanIntegrated, KalmanIntegratedGrad
from helpers.kalman.ops.draws import (
    CovarianceRoot,
    CovarianceRootGrad,
    KalmanDraw,
    KalmanDrawGrad,
    NormalMarginals,
)
from helpers.kalman.ops.likelihood import (
    KalmanFilter,
    KalmanFilterGrad,
    KalmanLoglike,
    KalmanLoglikeGrad,
    KalmanLoglikeTangent,
    KalmanLoglikeTangents,
    Product,
)
from helpers.kalman.ops.panel import KalmanPanel, KalmanPanelGrad

rng = np.random.default_rng(46)
N, M, P, J, K = 4, 2, 3, 5, 6  # steps, states, series, members of a panel, directions
arrays = random_model(rng=rng, m=M, p=P)
y, _ = simulate(N, rng, **arrays)
R, Q = arrays.pop("R"), arrays.pop("Q")
W = R @ Q @ R.T
MODEL = [y, *(arrays[x] for x in ("a0", "P0", "c", "d", "T", "Z", "H")), (W + W.T) / 2]
_, a0, P0, c, d, T, Z, H, W = MODEL
EACH = [X[None] for X in (T, Z, H, W)]


def numbers(*shape):
    return rng.standard_normal(shape)


def symmetric(*shape):
    X = numbers(*shape)
    return X + np.swapaxes(X, -1, -2)


def positive(*shape):
    X = numbers(*shape)
    return X @ np.swapaxes(X, -1, -2) + np.eye(shape[-1])


ALONG = ("a0", "T", "H")
TANGENTS = [numbers(M), numbers(M, M), symmetric(P, P)]
MANY = [numbers(K, M), numbers(K, M, M), symmetric(K, P, P)]
PANEL = [numbers(J, N, P), numbers(J, M), P0, numbers(1, 1, M), *EACH]
SERIES = [
    np.stack([y, numbers(N, P)]),
    numbers(2, M),
    np.stack([c, 0 * c])[:, None],
    P0,
    *EACH,
    np.eye(1),
]
# Two steps of one state, where second derivatives are loops in Python.
ONE = np.eye(1)
SMALL = [numbers(2, 1), numbers(1), ONE, numbers(1), numbers(1), 0.5 * ONE, ONE, ONE, ONE]
SMALL_PANEL = [
    numbers(2, 2, 1),
    numbers(2, 1),
    ONE,
    numbers(1, 1, 1),
    *(X[None] for X in SMALL[5:]),
]
DRAW = [y, numbers(J, M), numbers(N, J, M), numbers(N, J, P), P0, *EACH, np.zeros((M, 0))]

# The Op, and its inputs.
KALMAN = {
    "KalmanLoglike": (KalmanLoglike(), MODEL),
    "KalmanLoglikeGrad": (KalmanLoglikeGrad(), [*MODEL, numbers(N)]),
    "KalmanLoglikeTangent": (KalmanLoglikeTangent((), ALONG), [*MODEL, numbers(N), *TANGENTS]),
    "KalmanLoglikeTangents": (KalmanLoglikeTangents((), ALONG), [*MODEL, numbers(N), *MANY]),
    "KalmanFilter": (KalmanFilter(), SMALL),
    "KalmanFilterGrad": (KalmanFilterGrad((), ("l",)), [*SMALL, numbers(2)]),
    "KalmanPanel": (KalmanPanel(), PANEL),
    "KalmanPanelGrad": (KalmanPanelGrad(), [*SMALL_PANEL, numbers(2, 2)]),
    "KalmanIntegrated": (KalmanIntegrated(), SERIES),
    "KalmanIntegratedGrad": (KalmanIntegratedGrad(), SERIES),
    "KalmanDraw": (KalmanDraw(), DRAW),
    "KalmanDrawGrad": (KalmanDrawGrad(), [*DRAW, numbers(N, J, M)]),
    "CovarianceRoot": (CovarianceRoot(), [positive(N, M, M)]),
    "CovarianceRootGrad": (CovarianceRootGrad(), [positive(N, M, M), numbers(N, M, M)]),
    "NormalMarginals": (NormalMarginals(), [numbers(N, M), positive(N, M, M), numbers(N, M)]),
    "Product": (Product(), [numbers(2, 3), numbers(3, 4)]),
}
SPARSE = {
    type(op).__name__: (op, [*(numbers(*shape) for shape in floats), *integers])
    for op, (floats, integers, _) in SPARSE_OPS.items()
}
OURS = KALMAN | SPARSE
