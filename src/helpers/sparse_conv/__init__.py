"""Convolution of images that are the same nearly everywhere, and its gradients.

An image, a signal or a volume is its active sites, their values and the ground state of all other
sites. NumPy functions take a :class:`~helpers.sparse_conv.value.SparseValue`, and
:mod:`helpers.sparse_conv.graph` has the same layers for PyTensor. The kind of a convolution (with
stride, padding or dilation, submanifold, transposed, inverse) is that of its rulebook,
:mod:`helpers.sparse_conv.rules`. :mod:`helpers.sparse_conv.points` takes points to voxels and
values of voxels back to points. An argument of another kind, a rulebook in the place of an image
say, is a TypeError.

>>> import numpy as np
>>> from helpers.sparse_conv import SparseValue, sparse_conv_2d
>>> x = SparseValue(sites=[[1, 2]], values=[[5.0]], shape=(4, 4, 1))
>>> y = sparse_conv_2d(x, W=np.ones((9, 1)), b=np.array([0.5]), f=3)
>>> y.shape, y.ground_state
((2, 2, 1), array([0.5]))
>>> y.to_dense()[..., 0]
array([[5.5, 5.5],
       [5.5, 5.5]])

A volume of voxels says that it is no batch of pictures; a submanifold layer keeps its site:

>>> from helpers.sparse_conv import sparse_conv, submanifold_rulebook
>>> v = SparseValue(sites=[[0, 1, 2]], values=[[5.0]], shape=(4, 4, 4, 1), d=3)
>>> rules = submanifold_rulebook(v.sites, v.grid, f=3, d=3)
>>> sparse_conv(v, W=np.ones((27, 1)), b=np.array([0.5]), rules=rules).values
array([[5.5]])
"""

from helpers.sparse_conv import graph
from helpers.sparse_conv.conv import (
    build_q,
    grad_q,
    next_ground_state,
    sparse_add,
    sparse_conv,
    sparse_conv_2d,
    sparse_conv_2d_grad,
    sparse_conv_grad,
    sparse_relu,
)
from helpers.sparse_conv.pairs import conv_without_q, conv_without_q_grad
from helpers.sparse_conv.points import (
    PointMap,
    point_map,
    to_points,
    to_points_grad,
    voxel_means,
    voxel_means_grad,
)
from helpers.sparse_conv.pool import sparse_max_pool, sparse_max_pool_2d
from helpers.sparse_conv.rules import (
    Rulebook,
    dense_rulebook,
    inverse_rulebook,
    rulebook,
    submanifold_rulebook,
    transposed_rulebook,
    union_rulebooks,
)
from helpers.sparse_conv.value import SparseValue, stack

__all__ = [
    "PointMap",
    "Rulebook",
    "SparseValue",
    "build_q",
    "conv_without_q",
    "conv_without_q_grad",
    "dense_rulebook",
    "grad_q",
    "graph",
    "inverse_rulebook",
    "next_ground_state",
    "point_map",
    "rulebook",
    "sparse_add",
    "sparse_conv",
    "sparse_conv_2d",
    "sparse_conv_2d_grad",
    "sparse_conv_grad",
    "sparse_max_pool",
    "sparse_max_pool_2d",
    "sparse_relu",
    "stack",
    "submanifold_rulebook",
    "to_points",
    "to_points_grad",
    "transposed_rulebook",
    "union_rulebooks",
    "voxel_means",
    "voxel_means_grad",
]
