"""Operators that reduce: sums and their kin, softmax, normalisations, losses, orderings."""

from functools import partial
from math import prod

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import disconnected_grad

from helpers.onnx_grad.translation.node import counted, number, select, size, sizes, translates


def _nonzero_sqrt(x):
    """Square root with derivative 0 at 0, as a norm at the origin has in onnxruntime-training."""
    zero = pt.eq(x, number(x, 0))
    return select(zero, x, pt.sqrt(select(zero, number(x, 1), x)))


def _or_value(x, axis, value):
    """x, with one such value along each axis that has length 0 and is to be reduced."""
    for a in range(x.ndim) if axis is None else {a % x.ndim for a in axis}:
        if not x.type.shape[a]:  # open, or 0
            added = [1 - pt.minimum(n, 1) if i == a else n for i, n in enumerate(sizes(x))]
            x = pt.concatenate([x, pt.full(added, number(x, value))], axis=a)
    return x


def bounds(x):
    """The smallest and the largest of all values of x's type."""
    if x.dtype.startswith("float"):
        return -np.inf, np.inf
    return (0, 1) if x.dtype == "bool" else (np.iinfo(x.dtype).min, np.iinfo(x.dtype).max)


def _of_nothing(function, value):
    """A reduction that of nothing has this value, as in onnxruntime."""
    return lambda x, axis, keepdims: function(
        _or_value(x, axis, value(x)), axis=axis, keepdims=keepdims
    )


_mean = _of_nothing(pt.mean, lambda x: 0)
_max = _of_nothing(pt.max, lambda x: bounds(x)[0])
_min = _of_nothing(pt.min, lambda x: bounds(x)[1])


def _log_sum_exp(x, axis, keepdims: bool):
    top = disconnected_grad(_max(x, axis, keepdims=True))
    top = select(pt.isinf(top), number(x, 0), top)
    sums = pt.log(pt.sum(pt.exp(x - top), axis=axis, keepdims=keepdims))
    return sums + (top if keepdims else top.reshape(sizes(sums), ndim=sums.ndim))


def extremum(function, x, axis, keepdims: bool):
    """Max or Min; entries that share the extremum share its derivative."""
    if not x.dtype.startswith("float"):
        return function(x, axis=axis, keepdims=keepdims)
    best = disconnected_grad(function(x, axis=axis, keepdims=True))
    at = pt.eq(x, best)
    share = at / pt.sum(at, axis=axis, keepdims=True).astype(x.dtype)
    # Where x is the extremum the difference is 0 and only its derivative counts; infinities and NaN
    # stand outside of it.
    change = select(at & ~pt.isinf(x), x - disconnected_grad(x), number(x, 0))
    added = pt.sum(share.astype(x.dtype) * change, axis=axis, keepdims=keepdims)
    return disconnected_grad(function(x, axis=axis, keepdims=keepdims)) + added


REDUCTIONS = {
    "ReduceSum": pt.sum,
    "ReduceMean": _mean,
    "ReduceProd": pt.prod,
    "ReduceMax": partial(extremum, _max),
    "ReduceMin": partial(extremum, _min),
    "ReduceL1": lambda x, axis, keepdims: pt.sum(pt.abs(x), axis=axis, keepdims=keepdims),
    "ReduceL2": lambda x, axis, keepdims: _nonzero_sqrt(pt.sum(x * x, axis, keepdims=keepdims)),
    "ReduceSumSquare": lambda x, axis, keepdims: pt.sum(x * x, axis=axis, keepdims=keepdims),
    "ReduceLogSum": lambda x, axis, keepdims: pt.log(pt.sum(x, axis=axis, keepdims=keepdims)),
    "ReduceLogSumExp": _log_sum_exp,
}


@translates(*REDUCTIONS)
def _reduce(node, x, axes=None):
    axis = node.axes(axes)
    if axis is None and node.attr("noop_with_empty_axes"):
        axis = ()  # each entry by itself: a sum is the entry, a sum of squares its square
    return REDUCTIONS[node.op_type](x, axis=axis, keepdims=bool(node.attr("keepdims")))


@translates("CumSum")
def _cumsum(node, x, axis):
    axis = int(node.parameter("axis", axis)) % x.ndim
    backwards = (slice(None),) * axis + (slice(None, None, -1),)
    x = x[backwards] if node.attr("reverse") else x
    total = pt.cumsum(x if x.dtype.startswith("float") else x.astype("int64"), axis=axis)
    total = total - x if node.attr("exclusive") else total
    return (total[backwards] if node.attr("reverse") else total).astype(x.dtype)


@translates("ArgMax", "ArgMin")
def _arg_extremum(node, x):
    axis = node.attr("axis") % x.ndim
    function = pt.argmax if node.op_type == "ArgMax" else pt.argmin
    last = node.attr("select_last_index")
    x = x[(slice(None),) * axis + (slice(None, None, -1),)] if last else x
    index = function(x, axis=axis, keepdims=bool(node.attr("keepdims")))
    return size(x, axis) - 1 - index if last else index


@translates("TopK")
def _top_k(node, x, k=None):
    if not node.attr("sorted", 1):
        raise node.refuse("with sorted=0 the order is the runtime's own: set it to 1 in the file")
    axis = node.attr("axis") % x.ndim
    k = node.attr("k") if k is None else k.reshape(())
    first, rest, last, top = ((slice(None),) * axis + (slice(*ends),)
                              for ends in ((0, 1), (1, None), (None, -1), (None, k)))  # fmt: skip
    # The runtime's order: NaN is larger than any number, and of equals the first one is the first.
    # Not each backend has a stable sort, so what is sorted then has no equals.
    order = pt.argsort(x, axis=axis)
    values = pt.take_along_axis(x, order, axis=axis)
    both = pt.isnan(values[rest]) & pt.isnan(values[last])
    more = pt.neq(values[rest], values[last]) & ~both
    rank = pt.cumsum(pt.concatenate([order[first] * 0, more], axis=axis), axis=axis)
    rank = -rank if node.attr("largest") != 0 else rank  # all were before operator set 11
    places = pt.argsort(rank * x.shape[axis] + order, axis=axis)
    order = pt.take_along_axis(order, places, axis=axis)[top]
    return pt.take_along_axis(x, order, axis=axis), order


# --- softmax and losses ---------------------------------------------------------------------------


# PyTensor's own are graphs of their own, which it compiles whatever the mode.


def softmax(x, axis: int):
    e = pt.exp(x - disconnected_grad(_max(x, [axis % x.ndim], keepdims=True)))
    return e / pt.sum(e, axis=axis, keepdims=True)


def _log_softmax(x, axis: int):
    shifted = x - disconnected_grad(_max(x, [axis % x.ndim], keepdims=True))
    return shifted - pt.log(pt.sum(pt.exp(shifted), axis=axis, keepdims=True))


@translates("Softmax", "LogSoftmax")
def _softmax_of_node(node, x):
    function = softmax if node.op_type == "Softmax" else _log_softmax
    axis = node.attr("axis") % x.ndim
    if node.version >= 13:
        return function(x, axis=axis)
    # Before: over all axes from this one on.
    flat = x.reshape((prod(sizes(x)[:axis]), prod(sizes(x)[axis:])))
    return function(flat, axis=-1).reshape(sizes(x), ndim=x.ndim)


@translates("NegativeLogLikelihoodLoss")
def _negative_log_likelihood(node, log_prob, labels, weight=None):
    ignored = node.attr("ignore_index")
    heeded = pt.ones_like(labels, dtype="bool") if ignored is None else pt.neq(labels, ignored)
    label = pt.expand_dims(select(heeded, labels, 0), 1)
    hit = pt.eq(label, counted(size(log_prob, 1), 1, log_prob.ndim))
    loss = -pt.sum(select(hit, log_prob, number(log_prob, 0)), axis=1)
    w = number(log_prob, 1) if weight is None else weight[label[:, 0]]
    w = select(heeded, w, number(log_prob, 0))
    loss = select(heeded, loss * w, number(log_prob, 0))
    reduction = node.attr("reduction")
    if reduction == "none":
        return loss
    if reduction == "mean" and ignored is None and weight is None:
        return _mean(loss, None, keepdims=False)
    return pt.sum(loss) if reduction == "sum" else pt.sum(loss) / pt.sum(w)


@translates("SoftmaxCrossEntropyLoss")
def _softmax_cross_entropy(node, scores, labels, weight=None):
    log_prob = _log_softmax(scores, axis=1)
    return _negative_log_likelihood(node, log_prob, labels, weight), log_prob


# --- normalisations -------------------------------------------------------------------------------


def _standardized(x, axes, epsilon: float):
    """x with mean 0 and variance 1 along the axes; its mean; the inverse standard deviation."""
    mean = pt.mean(x, axis=axes, keepdims=True)
    centred = x - mean
    variance = pt.mean(centred * centred, axis=axes, keepdims=True)
    inverse = number(x, 1) / pt.sqrt(variance + number(x, epsilon))
    return centred * inverse, mean, inverse


def _along(parameter, axis: int, ndim: int):
    """A vector as an array of `ndim` dimensions that varies along one axis."""
    return parameter.dimshuffle(*(0 if i == axis else "x" for i in range(ndim)))


@translates("LayerNormalization")
def _layer_normalization(node, x, scale, bias=None):
    axes = tuple(range(node.attr("axis") % x.ndim, x.ndim))
    normal, mean, inverse = _standardized(x, axes, node.attr("epsilon"))
    y = normal * scale
    return y if bias is None else y + bias, mean, inverse


@translates("RMSNormalization")
def _rms_normalization(node, x, scale):
    axes = tuple(range(node.attr("axis") % x.ndim, x.ndim))
    square = pt.mean(x * x, axis=axes, keepdims=True)
    return x / pt.sqrt(square + number(x, node.attr("epsilon"))) * scale


@translates("InstanceNormalization")
def _instance_normalization(node, x, scale, bias):
    axes = tuple(range(2, x.ndim))
    normal, _, _ = _standardized(x, axes, node.attr("epsilon"))
    return normal * _along(scale, 1, x.ndim) + _along(bias, 1, x.ndim)


@translates("GroupNormalization")
def _group_normalization(node, x, scale, bias):
    groups, channels = node.attr("num_groups"), size(x, 1)
    grouped = x.reshape((size(x, 0), groups, -1))
    normal, _, _ = _standardized(grouped, (2,), node.attr("epsilon"))
    if node.version >= 21:  # scale and bias of each channel, before that of each group
        normal = normal.reshape((size(x, 0), channels, -1))
    y = normal * _along(scale, 1, 3) + _along(bias, 1, 3)
    return y.reshape(sizes(x), ndim=x.ndim)


@translates("BatchNormalization")
def _batch_normalization(node, x, scale, bias, mean, variance):
    scale, bias = _along(scale, 1, x.ndim), _along(bias, 1, x.ndim)
    if not node.attr("training_mode"):
        deviation = pt.sqrt(_along(variance, 1, x.ndim) + number(x, node.attr("epsilon")))
        return (x - _along(mean, 1, x.ndim)) / deviation * scale + bias
    axes = tuple(i for i in range(x.ndim) if i != 1)
    normal, _, _ = _standardized(x, axes, node.attr("epsilon"))
    keep = number(x, node.attr("momentum"))
    rest = number(x, 1) - keep
    means, variances = pt.mean(x, axis=axes), pt.var(x, axis=axes)
    return normal * scale + bias, keep * mean + rest * means, keep * variance + rest * variances


@translates("MeanVarianceNormalization")
def _mean_variance_normalization(node, x):
    axes = tuple(node.attr("axes"))
    centred = x - pt.mean(x, axis=axes, keepdims=True)
    deviation = _nonzero_sqrt(pt.mean(centred * centred, axis=axes, keepdims=True))
    return centred / (deviation + number(x, 1e-9))  # the number is the standard's


@translates("LpNormalization")
def _lp_normalization(node, x):
    return over_norm(x, node.attr("p"), node.attr("axis"))


def over_norm(x, p: int, axis: int):
    """x divided by its norm along an axis; 0 where that is 0."""
    norm = REDUCTIONS[f"ReduceL{p}"](x, axis=axis, keepdims=True)
    zero = pt.eq(norm, number(x, 0))
    return select(zero, number(x, 0), x / select(zero, number(x, 1), norm))


@translates("Hardmax")
def _hardmax(node, x):
    axis = node.attr("axis") % x.ndim
    where = pt.argmax(_or_value(x, [axis], bounds(x)[0]), axis=axis, keepdims=True)
    return pt.eq(where, counted(size(x, axis), axis, x.ndim)).astype(np.dtype(x.dtype))
