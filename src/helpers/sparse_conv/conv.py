r"""The convolution and its gradients in NumPy, each in a few lines; any dtype, complex too.

With :math:`Q` of shape (a_out, f*f*n_in), whose row o holds what output site o sees, position by
position,

.. math:: Y = Q W + b, \qquad t_\text{out} = \sum_k W_k^\top t + b,

where :math:`W_k` (n_in, n_out) is block k of W. Graham (2015), Sparse 3D convolutional neural
networks, arXiv:1505.02890.
"""

from __future__ import annotations

import numpy as np

from helpers.sparse_conv.rules import Rulebook, rulebook
from helpers.sparse_conv.value import SparseValue

__all__ = [
    "build_q",
    "grad_q",
    "next_ground_state",
    "sparse_conv_2d",
    "sparse_conv_2d_grad",
    "sparse_relu",
]


def build_q(values, ground_state, rules: Rulebook) -> np.ndarray:
    """Q: one gather.

    Parameters
    ----------
    values : array (a_in, n_in)
    ground_state : array (n_in,)
    rules : Rulebook

    Returns
    -------
    array (a_out, f*f*n_in)
        Column k n_in + c is channel c at position k of the window.
    """
    values, ground_state = np.asarray(values), np.asarray(ground_state)
    expect("values", values, "(a_in, n_in)", (len(rules.dst), ground_state.size))
    expect("ground_state", ground_state, "(n_in,)", (ground_state.size,))
    seen = np.concatenate([values, ground_state[np.newaxis]])  # row a_in is the ground state
    return seen[rules.src].reshape(len(rules.src), rules.src.shape[1] * ground_state.size)


def grad_q(dQ, rules: Rulebook) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of a loss with respect to values and ground state, from that to Q: a gather too.

    An input site is at each position of at most one window, so its gradient is a sum of f*f
    entries that dst finds. The ground state's is the sum over all positions without a site.

    Parameters
    ----------
    dQ : array (a_out, f*f*n_in)
    rules : Rulebook

    Returns
    -------
    dM : array (a_in, n_in)
    dt : array (n_in,)
    """
    dQ = np.asarray(dQ)
    (a_out, positions), a = rules.src.shape, len(rules.dst)
    if dQ.ndim != 2 or len(dQ) != a_out or dQ.shape[1] % positions:
        raise ValueError(
            f"dQ has shape {dQ.shape}, expected (a_out, f*f*n_in) = ({a_out}, {positions} n_in)"
        )
    blocks = dQ.reshape(a_out, positions, dQ.shape[1] // positions)
    reached = np.concatenate([blocks, np.zeros_like(blocks, shape=(1, *blocks.shape[1:]))])
    dM = reached[rules.dst, np.arange(positions)].sum(axis=1)  # row a_out is zero
    dt = blocks[rules.src == a].sum(axis=0)
    return dM, dt


def next_ground_state(W, ground_state, f: int, b=0.0) -> np.ndarray:
    """What a window without active sites gives: W' tile(t, f*f) + b.

    Parameters
    ----------
    W : array (f*f*n_in, n_out)
    ground_state : array (n_in,)
    f : int
    b : array (n_out,), optional

    Returns
    -------
    array (n_out,)
    """
    W, t = np.asarray(W), np.asarray(ground_state)
    expect("ground_state", t, "(n_in,)", (t.size,))
    if W.ndim != 2 or len(W) != f * f * t.size:
        raise ValueError(
            f"W has shape {W.shape}, expected (f*f*n_in, n_out) = ({f * f * t.size}, n_out)"
        )
    return np.tile(t, f * f) @ W + b


def sparse_conv_2d(x: SparseValue, W, b, f: int) -> SparseValue:
    """Valid convolution with stride 1 of a sparse image, or of each image of a batch.

    Parameters
    ----------
    x : SparseValue (h, w, n_in)
    W : array (f*f*n_in, n_out)
        Row (p f + q) n_in + c belongs to row p and column q of the window and channel c.
    b : array (n_out,)
    f : int
        The window is f by f.

    Returns
    -------
    SparseValue (h - f + 1, w - f + 1, n_out)
        Active is each site whose window holds an active site, in first-seen order.

    Raises
    ------
    ValueError
        If f is larger than the grid, or W or b do not fit.
    """
    W, b = check_weights(W, b, f, x.shape[-1])
    rules = rulebook(x.sites, x.grid, f)
    values = build_q(x.values, x.ground_state, rules) @ W + b
    t = next_ground_state(W, x.ground_state, f, b)
    return SparseValue._trusted(rules.sites, values, (*rules.grid, len(b)), t)


def sparse_conv_2d_grad(x: SparseValue, W, f: int, dY, dt_out) -> tuple[np.ndarray, ...]:
    """Gradients with respect to what goes into :func:`sparse_conv_2d`.

    Parameters
    ----------
    x : SparseValue (h, w, n_in)
    W : array (f*f*n_in, n_out)
    f : int
    dY : array (a_out, n_out)
        Gradient with respect to the output's values.
    dt_out : array (n_out,)
        Gradient with respect to the output's ground state.

    Returns
    -------
    dM (a_in, n_in), dt (n_in,), dW (f*f*n_in, n_out), db (n_out,)
    """
    n_in = x.shape[-1]
    dY, dt_out = np.asarray(dY), np.asarray(dt_out)
    W, _ = check_weights(W, dt_out, f, n_in)
    rules = rulebook(x.sites, x.grid, f)
    expect("dY", dY, "(a_out, n_out)", (len(rules.src), W.shape[1]))
    dM, dt = grad_q(dY @ W.T, rules)
    dt = dt + (W @ dt_out).reshape(f * f, n_in).sum(axis=0)
    Q = build_q(x.values, x.ground_state, rules)
    dW = Q.T @ dY + np.outer(np.tile(x.ground_state, f * f), dt_out)
    return dM, dt, dW, dY.sum(axis=0) + dt_out


def sparse_relu(x: SparseValue) -> SparseValue:
    """Rectifier of the values and of the ground state; what is active stays active."""
    return SparseValue._trusted(x.sites, _relu(x.values), x.shape, _relu(x.ground_state))


def _relu(x: np.ndarray) -> np.ndarray:
    return np.where(x.real <= 0, x.dtype.type(0), x)  # a NaN stays one


def check_weights(W, b, f: int, n_in: int) -> tuple[np.ndarray, np.ndarray]:
    """W and b as arrays; ValueError if their shapes do not fit f and n_in."""
    W, b = np.asarray(W), np.asarray(b)
    for name, X in (("W", W), ("b", b)):
        if X.dtype.kind not in "biufc":
            raise ValueError(f"{name} is not an array of numbers: {X!r}")
    if W.ndim != 2 or len(W) != f * f * n_in or W.shape[1] == 0:
        raise ValueError(
            f"W has shape {W.shape}, expected (f*f*n_in, n_out) = ({f * f * n_in}, n_out)"
        )
    expect("b", b, "(n_out,)", (W.shape[1],))
    return W, b


def expect(name: str, X: np.ndarray, letters: str, shape: tuple[int, ...]) -> None:
    if X.shape != shape:
        raise ValueError(f"{name} has shape {X.shape}, expected {letters} = {shape}")
