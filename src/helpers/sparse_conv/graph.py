"""Sparse networks as PyTensor graphs: layers that take and give values and ground state.

Rulebooks are made outside the graph (:mod:`helpers.sparse_conv.rules`); a layer takes one as
numbers, a :class:`~helpers.sparse_conv.rules.Rulebook`, or as symbols, :func:`symbolic_rules`, and
then one compiled function serves every set of sites, batches of any size too.
"""

from __future__ import annotations

from typing import NamedTuple

import pytensor.tensor as pt
from pytensor.tensor import TensorVariable

from helpers.sparse_conv import dispatch, op  # noqa: F401

__all__ = [
    "SymbolicRules",
    "SymbolicValue",
    "add",
    "conv",
    "conv_transposed",
    "conv_with_q",
    "max_pool",
    "mean_pool",
    "moments",
    "next_ground_state",
    "normalise",
    "relu",
    "symbolic_rules",
    "symbolic_value",
    "to_dense",
]


class SymbolicValue(NamedTuple):
    """values (a, n) and ground_state (n,) of a sparse image; its sites are in the rulebook."""

    values: TensorVariable
    ground_state: TensorVariable


class SymbolicRules(NamedTuple):
    """src (a_out, f^d) and dst (a_in, f^d) of a rulebook, int32."""

    src: TensorVariable
    dst: TensorVariable


def symbolic_value(name: str = "x", dtype: str = "float64") -> SymbolicValue:
    """Inputs of a function: values and ground state."""
    values = pt.matrix(f"{name}_values", dtype=dtype)
    return SymbolicValue(values, pt.vector(f"{name}_ground", dtype=dtype))


def symbolic_rules(name: str = "rules") -> SymbolicRules:
    """Inputs of a function: give it ``rules.src`` and ``rules.dst``."""
    return SymbolicRules(pt.imatrix(f"{name}_src"), pt.imatrix(f"{name}_dst"))


def conv(x: SymbolicValue, W, b, rules) -> SymbolicValue:
    """Convolution without Q, of the kind that the rulebook says; if it is symbolic, not transposed.

    Parameters
    ----------
    x : SymbolicValue (a_in, n_in)
    W : TensorVariable (f^d*n_in, n_out)
    b : TensorVariable (n_out,)
    rules : Rulebook or SymbolicRules

    Returns
    -------
    SymbolicValue (a_out, n_out)
    """
    if getattr(rules, "transposed", False):
        return conv_transposed(x, W, b, rules)
    x, W, src, dst = _arguments(x, W, rules)
    positions, n_in = dst.shape[1], x.values.shape[1]
    # Row k of tW is W_k' t.
    tW = (W.reshape((positions, n_in, W.shape[1])) * x.ground_state[:, None]).sum(axis=1)
    return SymbolicValue(op.conv_pairs(x.values, W, tW, src, dst) + b, tW.sum(axis=0) + b)


def conv_transposed(x: SymbolicValue, W, b, rules) -> SymbolicValue:
    """Transposed or inverse convolution, of what differs from the ground state.

    Parameters as :func:`conv`, with the rules of
    :func:`~helpers.sparse_conv.rules.transposed_rulebook` or
    :func:`~helpers.sparse_conv.rules.inverse_rulebook`. The result's ground state is b.
    """
    x, W, src, dst = _arguments(x, W, rules)
    nothing = pt.zeros((dst.shape[1], W.shape[1]), dtype=W.dtype)
    values = op.conv_pairs(x.values - x.ground_state, W, nothing, src, dst)
    return SymbolicValue(values + b, pt.as_tensor_variable(b))


def conv_with_q(x: SymbolicValue, W, b, rules) -> SymbolicValue:
    """The same with Q; parameters as :func:`conv`, but no transposed rulebook."""
    if getattr(rules, "transposed", False):
        raise ValueError("the rulebook is of a transposed convolution: use conv")
    x, W, src, dst = _arguments(x, W, rules)
    Q = op.build_q(*x, src, dst)
    return SymbolicValue(Q @ W + b, next_ground_state(W, x.ground_state, dst.shape[1]) + b)


def next_ground_state(W, ground_state, positions) -> TensorVariable:
    """W' tile(t, positions), of shape (n_out,); positions is f^d."""
    return pt.tile(ground_state, (positions,)) @ W


def relu(x: SymbolicValue) -> SymbolicValue:
    """Rectifier of values and ground state; its derivative at 0 is 0."""
    return SymbolicValue(*(pt.switch(v <= 0, pt.zeros((), v.dtype), v) for v in x))


def max_pool(x: SymbolicValue, rules) -> SymbolicValue:
    """Largest value of each window and channel, the first of equals; rules with a stride."""
    src, dst = pt.as_tensor_variable(rules.src), pt.as_tensor_variable(rules.dst)
    winner = op.pool_winners(*x, src, dst)
    return SymbolicValue(op.take(*x, winner, dst), pt.as_tensor_variable(x.ground_state))


def mean_pool(x: SymbolicValue, rules) -> SymbolicValue:
    """Mean value of each window and channel, ground state included."""
    x = SymbolicValue(*(pt.as_tensor_variable(v) for v in x))
    src = pt.as_tensor_variable(rules.src)
    Q = op.build_q(*x, src, rules.dst)
    blocks = Q.reshape((src.shape[0], src.shape[1], x.values.shape[1]))
    return SymbolicValue(blocks.mean(axis=1), x.ground_state)


def add(x: SymbolicValue, y: SymbolicValue, rules_x, rules_y) -> SymbolicValue:
    """The sum of two images of different sites.

    Parameters
    ----------
    x, y : SymbolicValue (a_x, n), (a_y, n)
    rules_x, rules_y : Rulebook or SymbolicRules
        Of :func:`~helpers.sparse_conv.rules.union_rulebooks`.

    Returns
    -------
    SymbolicValue (a_out, n)
        At the sites of both. Where one image has no site, its ground state is added.
    """
    values = to_dense(x, rules_x) + to_dense(y, rules_y)
    return SymbolicValue(values, pt.as_tensor_variable(x.ground_state) + y.ground_state)


def moments(x: SymbolicValue) -> tuple[TensorVariable, TensorVariable]:
    """Mean and variance (n,) of each channel over the active sites; 0 if there is none."""
    values = pt.as_tensor_variable(x.values)
    a = pt.maximum(values.shape[0], 1).astype(values.dtype)
    mean = values.sum(axis=0) / a
    return mean, ((values - mean) ** 2).sum(axis=0) / a


def normalise(x: SymbolicValue, gamma, beta, eps=1e-5, statistics=None) -> SymbolicValue:
    """Batch normalisation over the active sites; the ground state goes through the same map.

    Parameters
    ----------
    x : SymbolicValue (a, n)
    gamma, beta : TensorVariable (n,)
    eps : float
    statistics : tuple of mean (n,) and variance (n,), optional
        Default: those of x, :func:`moments`. Running means of these serve after training.

    Returns
    -------
    SymbolicValue (a, n)
        gamma (v - mean) / sqrt(variance + eps) + beta of values and ground state.

    References
    ----------
    Ioffe and Szegedy (2015), Batch normalization, arXiv:1502.03167.
    """
    mean, variance = moments(x) if statistics is None else statistics
    slope = gamma / pt.sqrt(variance + pt.as_tensor_variable(eps).astype(variance.dtype))
    return SymbolicValue(*((v - mean) * slope + beta for v in x))


def to_dense(x: SymbolicValue, rules) -> TensorVariable:
    """The dense form (cells, n), rows in row-major order of the grid.

    Parameters
    ----------
    x : SymbolicValue (a, n)
    rules : Rulebook or SymbolicRules
        Of :func:`~helpers.sparse_conv.rules.dense_rulebook`.

    Returns
    -------
    TensorVariable (cells, n)
        ``.reshape((images, -1))`` gives each image's feature vector.
    """
    return op.build_q(*x, rules.src, rules.dst)


def _arguments(x, W, rules):
    x = SymbolicValue(*(pt.as_tensor_variable(v) for v in x))
    src, dst = pt.as_tensor_variable(rules.src), pt.as_tensor_variable(rules.dst)
    return x, pt.as_tensor_variable(W), src, dst
