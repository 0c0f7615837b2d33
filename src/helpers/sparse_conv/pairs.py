r"""The convolution without Q in NumPy: sums over the pairs of a site and a window that holds it.

:math:`Y = QW` has two parts, pairs and positions without a site:

.. math::

   Y_o &= \sum_{k:\ \text{src}(o,k) < a} W_k^\top M_{\text{src}(o,k)} \\
       &\quad + \sum_{k:\ \text{src}(o,k) = a} (tW)_k, \\
   (tW)_k &= W_k^\top t .

The first part is linear in M, in W and (as an inner product) in Y; the functions here are its three
gradients, and those of the second part. Of a transposed rulebook, M - t is in the place of M, and
the second part is absent.
"""

import numpy as np

from helpers.sparse_conv.rules import Rulebook, expect_rules
from helpers.sparse_conv.value import array, expect, total, transpose_times

__all__ = ["conv_without_q", "conv_without_q_grad"]


def conv_without_q(values, ground_state, W, rules: Rulebook) -> np.ndarray:
    """Q W without Q: multiply each active site by every block of W, then gather the products.

    Where few of a window's sites are active, this saves most of the products.

    Parameters
    ----------
    values : array (a_in, n_in)
    ground_state : array (n_in,)
    W : array (f^d*n_in, n_out)
    rules : Rulebook

    Returns
    -------
    array (a_out, n_out)
    """
    t, values = array("ground_state", ground_state), array("values", values)
    blocks = _blocks(W, rules)
    expect("ground_state", t, "(n_in,)", (blocks.shape[1],))
    if rules.transposed:
        return conv_pairs(values - t, W, np.zeros_like(t @ blocks), rules)
    return conv_pairs(values, W, t @ blocks, rules)


def conv_without_q_grad(
    values, ground_state, W, dY, rules: Rulebook
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of :func:`conv_without_q`: gather what each site reaches, then multiply.

    Parameters
    ----------
    values, ground_state, W, rules
        As in :func:`conv_without_q`.
    dY : array (a_out, n_out)

    Returns
    -------
    dM : array (a_in, n_in)
    dt : array (n_in,)
    dW : array (f^d*n_in, n_out)
    """
    t, values = array("ground_state", ground_state), array("values", values)
    blocks = _blocks(W, rules)
    expect("ground_state", t, "(n_in,)", (blocks.shape[1],))
    expect("values", values, "(a_in, n_in)", (len(rules.dst), len(t)))
    dM = pairs_grad_values(dY, W, rules)
    if rules.transposed:
        return dM, -total(dM), pairs_grad_weights(values - t, dY, rules)
    D = sum_ground(dY, rules)
    dt = np.einsum("kcn,kn->c", blocks, D)
    dW = pairs_grad_weights(values, dY, rules)
    return dM, dt, dW + (t[:, np.newaxis] * D[:, np.newaxis, :]).reshape(dW.shape)


def conv_pairs(values, W, tW, rules: Rulebook) -> np.ndarray:
    """Y (a_out, n_out) from values (a_in, n_in), W (f^d*n_in, n_out) and tW (f^d, n_out)."""
    values, blocks = array("values", values), _blocks(W, rules)
    positions, n_in, n_out = blocks.shape
    expect("values", values, "(a_in, n_in)", (len(rules.dst), n_in))
    expect("tW", np.asarray(tW), "(f^d, n_out)", (positions, n_out))
    products = values @ blocks.transpose(1, 0, 2).reshape(n_in, positions * n_out)
    products = np.concatenate([products, np.reshape(tW, (1, -1))])  # row a_in: the ground state
    return products.reshape(-1, positions, n_out)[rules.src, np.arange(positions)].sum(axis=1)


def pairs_grad_values(dY, W, rules: Rulebook) -> np.ndarray:
    """dM (a_in, n_in) from dY (a_out, n_out) and W (f^d*n_in, n_out)."""
    blocks = _blocks(W, rules)
    positions, n_in, n_out = blocks.shape
    return _reached(dY, n_out, rules) @ blocks.transpose(0, 2, 1).reshape(-1, n_in)


def pairs_grad_weights(values, dY, rules: Rulebook) -> np.ndarray:
    """dW (f^d*n_in, n_out) from values (a_in, n_in) and dY (a_out, n_out), pairs alone."""
    values, dY = np.asarray(values), np.asarray(dY)
    n_in, n_out = values.shape[-1], dY.shape[-1]
    expect("values", values, "(a_in, n_in)", (len(rules.dst), n_in))
    wide = transpose_times(values, _reached(dY, n_out, rules))
    return wide.reshape(n_in, -1, n_out).transpose(1, 0, 2).reshape(-1, n_out)  # blocks on top


def spread_ground(D, rules: Rulebook) -> np.ndarray:
    """Y (a_out, n_out): the sum of the rows of D (f^d, n_out) at positions without a site."""
    D, unseen = np.asarray(D), rules.src == len(rules.dst)
    if np.isfinite(D).all():
        return unseen.astype(D.dtype) @ D
    Y = np.zeros((len(unseen), D.shape[1]), D.dtype)  # in a product, 0 * inf would be NaN
    for rows, row in zip(unseen.T, D, strict=True):
        Y[rows] += row
    return Y


def sum_ground(dY, rules: Rulebook) -> np.ndarray:
    """D (f^d, n_out), the transpose: sum of the rows of dY (a_out, n_out) without a site at k."""
    dY, unseen = np.asarray(dY), rules.src == len(rules.dst)
    if np.isfinite(dY).all():
        return transpose_times(unseen, dY)
    return np.stack([total(dY[rows]) for rows in unseen.T])


def _blocks(W, rules: Rulebook) -> np.ndarray:
    """W (f^d*n_in, n_out) as blocks (f^d, n_in, n_out)."""
    expect_rules(rules)
    W, positions = array("W", W), rules.src.shape[1]
    if W.ndim != 2 or len(W) % positions:
        raise ValueError(
            f"W has shape {W.shape}, expected (f^d*n_in, n_out) = ({positions} n_in, n_out)"
        )
    return W.reshape(positions, len(W) // positions, W.shape[1])


def _reached(dY, n_out: int, rules: Rulebook) -> np.ndarray:
    """Rows of dY that each input site reaches, side by side (a_in, f^d*n_out); zero for none."""
    dY = array("dY", dY)
    expect("dY", dY, "(a_out, n_out)", (len(rules.src), n_out))
    padded = np.concatenate([dY, np.zeros_like(dY, shape=(1, n_out))])
    return padded[rules.dst].reshape(len(rules.dst), rules.dst.shape[1] * n_out)
