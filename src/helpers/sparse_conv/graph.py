"""Sparse networks as PyTensor graphs: layers that take and give values and ground state.

Rulebooks are made outside the graph (:mod:`helpers.sparse_conv.rules`); a layer takes one as
numbers, a :class:`~helpers.sparse_conv.rules.Rulebook`, or as symbols, :func:`symbolic_rules`, and
then one compiled function serves every set of sites, batches of any size too. A graph sees values
and not where they are: :func:`rule_arrays` hands rulebooks to a function and refuses those of other
sites.
"""

from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor import TensorVariable

from helpers.sparse_conv import op
from helpers.sparse_conv.rules import (
    DENSE,
    NOT_OF_TRANSPOSED,
    TRANSPOSED,
    UNION,
    WINDOWS,
    Rulebook,
    integer,
)
from helpers.sparse_conv.value import SparseValue, expect_kind, plain

POOLED = WINDOWS, DENSE, UNION  # the kinds that a pooling takes


class SymbolicValue(NamedTuple):
    """values (a, n) and ground_state (n,) of a sparse image; its sites are in the rulebook."""

    values: TensorVariable
    ground_state: TensorVariable


class SymbolicRules(NamedTuple):
    """src (a_out, f^d) and dst (a_in, f^d) of a Rulebook, int32, and its kind."""

    src: TensorVariable
    dst: TensorVariable
    kind: TensorVariable | int


def symbolic_value(name: str = "x", dtype: str = "float64") -> SymbolicValue:
    """Inputs of a function: values and ground state."""
    values = pt.matrix(f"{name}_values", dtype=dtype)
    return SymbolicValue(values, pt.vector(f"{name}_ground", dtype=dtype))


def symbolic_rules(name: str = "rules") -> SymbolicRules:
    """Inputs of a function: give it ``rule_arrays(x, rules)``, which looks at the sites.

    Given ``rules.src``, ``rules.dst`` and ``rules.kind`` by hand, the function cannot know of
    which sites they are, and computes for any other image of as many sites.
    """
    arrays = pt.imatrix(f"{name}_src"), pt.imatrix(f"{name}_dst")
    return SymbolicRules(*arrays, pt.scalar(f"{name}_kind", dtype="int64"))


def rule_arrays(x, *rules: Rulebook) -> list[np.ndarray]:
    """What a function of symbolic rulebooks takes: src, dst and kind of each, in turn.

    Parameters
    ----------
    x : SparseValue or Rulebook, or a list of them
        The images that come into the network; a Rulebook stands for the image that its layer makes.
    rules : Rulebook
        In the order of the layers.

    Raises
    ------
    ValueError
        If a rulebook was made of sites that are neither those of an image that comes in nor the
        outputs of a rulebook before it.
    """
    known = list(x) if isinstance(x, list) else [x]
    for y in known:
        expect_kind("x", y, SparseValue, Rulebook)
    arrays = []
    for k, book in enumerate(rules):
        expect_kind(f"rulebook {k}", book, Rulebook)
        if not any(
            book.grid_in == y.grid and np.array_equal(book.sites_in, y.sites) for y in known
        ):
            raise ValueError(
                f"rulebook {k} was made of {len(book.sites_in)} sites on a grid {book.grid_in}, "
                "which neither an input nor a rulebook before it has: make it of the sites and the "
                "grid of the layer before"
            )
        known.append(book)
        arrays += [book.src, book.dst, np.array(book.kind)]
    return arrays


def conv(x: SymbolicValue, W, b, rules) -> SymbolicValue:
    """Convolution without Q, of the kind that the rulebook says, transposed too.

    A transposed or an inverse convolution acts on what differs from the ground state, and its own
    ground state is b.

    Parameters
    ----------
    x : SymbolicValue (a_in, n_in), or a SparseValue
        If the sites of a SparseValue are not those of a Rulebook, it is refused.
    W : TensorVariable (f^d*n_in, n_out)
    b : TensorVariable (n_out,)
    rules : Rulebook or SymbolicRules

    Returns
    -------
    SymbolicValue (a_out, n_out)
    """
    x, src, dst = _acted_on(x, rules)
    W = pt.as_tensor_variable(W)
    positions, n_in = dst.shape[1], x.values.shape[1]
    # Row k of tW is W_k' t.
    tW = (W.reshape((positions, n_in, W.shape[1])) * x.ground_state[:, None]).sum(axis=1)
    return SymbolicValue(op.conv_pairs(x.values, W, tW, src, dst) + b, tW.sum(axis=0) + b)


def conv_with_q(x: SymbolicValue, W, b, rules, *, groups: int = 1) -> SymbolicValue:
    """The same with Q, and in groups: parameters as :func:`conv`.

    With `groups`, W is (f^d*n_in/groups, n_out), as in
    :func:`~helpers.sparse_conv.conv.sparse_conv`.  W's gradient is a product of matrices: in
    float32 it sums over the sites as BLAS does, which is a percent off for half a million equal
    terms of one channel.  :func:`conv` accumulates them in float64.
    """
    x, src, dst = _acted_on(x, rules)
    W, groups = pt.as_tensor_variable(W), integer("groups", groups, 1)
    Q, positions = op.build_q(*x, src, dst), dst.shape[1]
    t = pt.tile(x.ground_state, (positions,))[None]
    if groups == 1:
        return SymbolicValue(Q @ W + b, (t @ W)[0] + b)

    def grouped(Q):  # (a_out, f^d*n_in) times W, one product for each group
        blocks = Q.reshape((Q.shape[0], positions, groups, x.values.shape[1] // groups))
        blocks = blocks.transpose((2, 0, 1, 3)).reshape((groups, Q.shape[0], W.shape[0]))
        columns = W.reshape((W.shape[0], groups, W.shape[1] // groups)).transpose((1, 0, 2))
        return (blocks @ columns).transpose((1, 0, 2)).reshape((Q.shape[0], W.shape[1]))

    return SymbolicValue(grouped(Q) + b, grouped(t)[0] + b)


def next_ground_state(W, ground_state, positions) -> TensorVariable:
    """W' tile(t, positions), of shape (n_out,); positions is f^d."""
    return pt.tile(ground_state, (positions,)) @ W


def relu(x: SymbolicValue) -> SymbolicValue:
    """Rectifier of values and ground state; its derivative at 0 is 0."""
    return SymbolicValue(*(pt.switch(v <= 0, pt.zeros((), v.dtype), v) for v in _symbols(x)))


def max_pool(x: SymbolicValue, rules) -> SymbolicValue:
    """Largest value of each window and channel, the first of equals; rules with a stride."""
    x, src, dst = _seen(x, rules, POOLED, f"max pooling {NOT_OF_TRANSPOSED}")
    winner = op.pool_winners(*x, src, dst)
    return SymbolicValue(op.take(*x, winner, dst), x.ground_state)


def mean_pool(x: SymbolicValue, rules) -> SymbolicValue:
    """Mean value of each window and channel, ground state included."""
    x, src, dst = _seen(x, rules, POOLED, f"mean pooling {NOT_OF_TRANSPOSED}")
    blocks = op.build_q(*x, src, dst).reshape((*src.shape, x.values.shape[1]))
    return SymbolicValue(blocks.mean(axis=1), x.ground_state)


def add(x: SymbolicValue, y: SymbolicValue, rules_x, rules_y) -> SymbolicValue:
    """The sum of two images of different sites.

    Parameters
    ----------
    x, y : SymbolicValue (a_x, n), (a_y, n)
    rules_x, rules_y : Rulebook or SymbolicRules
        Of :func:`~helpers.sparse_conv.rules.union_rulebooks`; others are a ValueError, at the
        latest in a run.

    Returns
    -------
    SymbolicValue (a_out, n)
        At the sites of both. Where one image has no site, its ground state is added.
    """
    message = "rules_x and rules_y are not of one call of union_rulebooks"
    (x, src_x, dst_x), (y, src_y, dst_y) = (
        _seen(z, rules, (UNION,), message) for z, rules in ((x, rules_x), (y, rules_y))
    )
    kinds = rules_x.kind, rules_y.kind  # with a checksum of the sites of the sum
    numbers = all(isinstance(kind, int) for kind in kinds)
    src_x = _only_if(kinds[0] == kinds[1] if numbers else pt.eq(*kinds), src_x, message)
    values = op.build_q(*x, src_x, dst_x) + op.build_q(*y, src_y, dst_y)
    return SymbolicValue(values, x.ground_state + y.ground_state)


def moments(x: SymbolicValue) -> tuple[TensorVariable, TensorVariable]:
    """Mean and variance (n,) of each channel over the active sites; 0 if there is none."""
    values = _symbols(x).values
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
    return SymbolicValue(*((v - mean) * slope + beta for v in _symbols(x)))


def to_dense(x: SymbolicValue, rules) -> TensorVariable:
    """The dense form (cells, n), rows in row-major order of the grid.

    Parameters
    ----------
    x : SymbolicValue (a, n)
    rules : Rulebook or SymbolicRules
        Of :func:`~helpers.sparse_conv.rules.dense_rulebook`; others are a ValueError, at the
        latest in a run.

    Returns
    -------
    TensorVariable (cells, n)
        ``.reshape((images, -1))`` gives each image's feature vector.
    """
    message = (
        "the dense form needs a rulebook of dense_rulebook(x.sites, x.grid): it takes no rulebook "
        "of a transposed or an inverse convolution, nor of any other layer"
    )
    x, src, dst = _seen(x, rules, (DENSE,), message)
    return op.build_q(*x, src, dst)


def to_points(x: SymbolicValue, voxel) -> TensorVariable:
    """Values (m, n) at the points: each takes that of its voxel.

    Parameters
    ----------
    x : SymbolicValue (a, n)
        At the voxels of a :class:`~helpers.sparse_conv.points.PointMap`, in its order.
    voxel : int array (m,), or its symbol
        ``voxel`` of that map.
    """
    values, voxel = _symbols(x).values, plain("voxel", voxel, "its voxel")
    # Through float64, so that the gradient's sums over points are accumulated there.
    return values.astype("float64")[pt.as_tensor_variable(voxel)].astype(values.dtype)


def voxel_means(features, voxel, counts) -> SymbolicValue:
    """Means (a, n) of the features (m, n) of each voxel's points; the ground state is 0.

    Parameters
    ----------
    features : TensorVariable (m, n)
    voxel, counts : int arrays (m,) and (a,), or their symbols
        Of a :class:`~helpers.sparse_conv.points.PointMap`.
    """
    voxel = plain("voxel", voxel, "its voxel")
    features, counts = pt.as_tensor_variable(features), pt.as_tensor_variable(counts)
    sums = pt.zeros((counts.shape[0], features.shape[1]), dtype="float64")
    sums = sums[pt.as_tensor_variable(voxel)].inc(features.astype("float64"))
    means = (sums / counts[:, None]).astype(features.dtype)
    return SymbolicValue(means, pt.zeros(features.shape[1:], dtype=features.dtype))


def _symbols(x) -> SymbolicValue:
    """An image as symbols: a SymbolicValue, the pair of its arrays, or a SparseValue."""
    x = (x.values, x.ground_state) if isinstance(x, SparseValue) else x
    if not isinstance(x, tuple | list) or len(x) != 2:
        expect_kind("x", x, SymbolicValue, SparseValue)
    return SymbolicValue(*map(pt.as_tensor_variable, x))


def _seen(x, rules, kinds: tuple[int, ...] = (), message: str = ""):
    """x, src and dst; refused, at the latest in a run, are rulebooks of none of the `kinds`."""
    expect_kind("rules", rules, Rulebook, SymbolicRules)
    if isinstance(x, SparseValue) and isinstance(rules, Rulebook):
        rules.refuse_other(x.sites, x.grid)
    x, src, dst = _symbols(x), *map(pt.as_tensor_variable, (rules.src, rules.dst))
    if kinds and isinstance(rules.kind, int):
        src = _only_if(min(rules.kind, UNION) in kinds, src, message)
    elif kinds:
        src = _only_if(pt.eq(kinds, pt.minimum(rules.kind, UNION)).any(), src, message)
    return x, src, dst


def _only_if(holds, src, message: str):
    """src; ValueError unless the condition holds, in a run if that is a symbol."""
    if not isinstance(holds, bool):
        return CheckAndRaise(ValueError, message)(src, holds)
    if not holds:
        raise ValueError(message)
    return src


def _acted_on(x, rules):
    """What a convolution sees, as in :func:`~helpers.sparse_conv.conv.build_q`; src and dst."""
    x, src, dst = _seen(x, rules)
    if isinstance(rules.kind, int) and rules.kind != TRANSPOSED:  # nothing to be computed
        return x, src, dst
    transposed, zero = pt.eq(rules.kind, TRANSPOSED), pt.zeros_like(x.ground_state)
    values = x.values - pt.switch(transposed, x.ground_state, zero)
    return SymbolicValue(values, pt.switch(transposed, zero, x.ground_state)), src, dst
