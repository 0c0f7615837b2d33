r"""Losses of class scores against labels."""

from onnx import TensorProto

from helpers.onnx_grad.rules.table import register_gradient


class Labels:
    """What a loss node does with its labels: which class, with which weight, and how it reduces.

    The classes are axis 1 of the scores (N, C, d1, ...), the labels have shape (N, d1, ...).
    An ignored label contributes nothing to a gradient, as torch documents it: where all labels are
    ignored the mean of nothing is NaN, and its gradient 0.
    """

    def __init__(self, g, node):
        scores, labels, self.weights = node.x[0], node.x[1], node.input(2)
        self.g, self.reduction, ignore = g, node.attr("reduction"), node.attr("ignore_index")
        self.plain = ignore is None and self.weights is None
        self.column, self.heeded = g.unsqueeze(labels, [1]), None
        across = [0, *range(2, scores.rank)]
        numbers = g.unsqueeze(g.range_of(g.length(scores, 1)), across)
        column = self.column.cast(TensorProto.INT64)
        # 1 at the label's class, and nothing for an ignored label.
        hit = column.equals(numbers)
        if ignore is not None:
            self.heeded = g.op("Not", column.equals(ignore))
            hit = g.op("And", hit, self.heeded)
        self.onehot = self.weighted = g.refine(hit.cast(scores.dtype).name, scores.shape)
        if self.weights is not None:
            self.weighted = self.onehot * g.unsqueeze(self.weights, across)
        heeded = g.sum(self.weighted, None, keepdims=False)
        self.total = g.size_of(labels, scores.dtype) if self.plain else heeded

    def spread(self, t, dloss):
        """t, of the scores' shape, times the cotangent of each label's own loss."""
        if self.reduction == "none":
            t = t * self.g.unsqueeze(dloss, [1])
        elif dloss.value is not None and dloss.value.size == 1 and dloss.value.item() == 1:
            t = t / self.total if self.reduction == "mean" else t
        else:
            t = t * (dloss / self.total if self.reduction == "mean" else dloss)
        return t if self.heeded is None else self.g.where(self.heeded, t, 0)

    def reduced(self, each):
        """The losses of the labels, with an axis of length one for the classes, reduced."""
        if self.reduction == "none":
            return self.g.squeeze(each, [1])
        op_type = {"mean": "ReduceMean", "sum": "ReduceSum"}[self.reduction]
        return self.g.reduce(op_type, each, None, keepdims=False)

    def weight_gradient(self, dloss, loss, log_prob):
        """dw_c = sum over the labels c of -log p (mean: of (-log p - L) / (sum of weights))."""
        g = self.g
        if self.weights is None:
            return None
        own = -log_prob
        if self.reduction == "mean":
            own = own - loss
        axes = [a for a in range(log_prob.rank) if a != 1]
        return g.sum(self.spread(self.onehot * own, dloss), axes, keepdims=False)


@register_gradient("SoftmaxCrossEntropyLoss", ranked=[0])
def softmax_cross_entropy(g, node, dloss, dlog_prob=None):
    """L = -sum w log p[label], p = softmax(scores) along axis 1 ("mean": over sum w):

    dscores = dL (p (sum over classes of w onehot) - w onehot); and for the second output,
    log p, as for LogSoftmax.
    """
    scores = node.x[0]
    log_prob = kept = node.y[1] if len(node.y) > 1 else None
    plain = node.input(2) is None and node.attr("ignore_index") is None and dloss is not None
    if log_prob is None or plain:
        log_prob = g.op("LogSoftmax", scores, axis=1)
    p = g.op("Exp", log_prob)
    dscores = dweights = None
    if dloss is not None:
        labels = Labels(g, node)
        chosen = p if labels.plain else p * g.sum(labels.weighted, [1])
        dscores = labels.spread(chosen - labels.weighted, dloss)
        if plain:
            # Runtimes put this operator together of many; what is here already needs few more.
            picked = g.op("GatherElements", log_prob, labels.column, axis=1)
            node.replace(0, -labels.reduced(picked))
            if kept is not None:
                node.replace(1, log_prob)
        dweights = labels.weight_gradient(dloss, node.y[0], log_prob)
    if dlog_prob is not None:
        term = dlog_prob - p * g.sum(dlog_prob, [1])
        dscores = term if dscores is None else dscores + term
    return dscores, None, dweights


@register_gradient("NegativeLogLikelihoodLoss", ranked=[0])
def negative_log_likelihood(g, node, dloss):
    """L = -sum w X[label] ("mean": over sum w): dX = -dL w onehot."""
    labels = Labels(g, node)
    dx = -labels.spread(labels.weighted, dloss)
    return dx, None, labels.weight_gradient(dloss, node.y[0], node.x[0])
