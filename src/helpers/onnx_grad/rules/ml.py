r"""Operators that scikit-learn's converters use: of the domain ai.onnx.ml for linear models and
what prepares their columns, and onnxruntime's CDist for Gaussian processes and neighbours."""

import numpy as np

from helpers.onnx_grad.rules.norm import through_norm
from helpers.onnx_grad.rules.table import no_gradient, register_gradient, written_out

ML = "ai.onnx.ml"

register_gradient("Binarizer", no_gradient, domain=ML)


@register_gradient("LinearRegressor", domain=ML)
def linear_regressor(g, node, dy):
    """Y = X W' + b, W of shape (targets, features) in an attribute: dX = dY W."""
    (x,) = node.x
    W = np.reshape(node.attr("coefficients"), (node.attr("targets"), -1))
    return g.reshape_like(g.op("MatMul", dy, g.constant(W, dy.dtype)).cast_like(x), x)


@register_gradient("Scaler", domain=ML)
def scaler(g, node, dy):
    """Y = (X - offset) scale: dX = dY scale."""
    (x,) = node.x
    return (dy * g.constant(node.attr("scale"), dy.dtype)).cast_like(x)


@register_gradient(
    "LinearClassifier",
    domain=ML,
    limits={"coefficients": "one row for each class (not one row for two classes)"},
)
def linear_classifier(g, node, dlabels, dscores):
    """Scores S = f(X W' + b): dX = (dS through f) W, with f the identity, logistic or softmax."""
    (x,), scores = node.x, node.y[1]
    classes = len(node.attr("classlabels_ints") or node.attr("classlabels_strings") or [])
    coefficients = node.attr("coefficients")
    transform = node.attr("post_transform", "NONE")
    rows = len(node.attr("intercepts") or []) or classes
    if rows != classes:
        raise node.refuse(f"{rows} rows for {classes} classes")
    if transform == "LOGISTIC":
        dscores = dscores * (scores * (1.0 - scores))
    elif transform == "SOFTMAX":
        weighted = dscores * scores
        dscores = weighted - scores * g.sum(weighted, [-1])
    W = np.reshape(coefficients, (classes, -1))
    return g.reshape_like(g.op("MatMul", dscores, g.constant(W, scores.dtype)).cast_like(x), x)


@register_gradient("Normalizer", domain=ML)
def normalizer(g, node, dy):
    """Y = X / n, each row by its norm n: dX = (dY - dn/dX sum(dY Y)) / n.

    n = sum abs X has dn/dX = sign X; n = sqrt(sum X^2) has dn/dX = X / n = Y. 0 where n = 0.
    """
    (x,), (y,), p = node.x, node.y, int(node.attr("norm")[1])
    return through_norm(g, dy, x.cast(dy.dtype), y, p, -1).cast_like(x)


@register_gradient("ArrayFeatureExtractor", domain=ML, ranked=[0])
@written_out
def array_feature_extractor(g, node):
    """Columns of X, by a Gather: see there."""
    x, indices = node.x
    y = g.op("Gather", x, g.reshape(indices, [-1]), axis=-1)
    return (g.unsqueeze(y, [0]) if x.rank == 1 else y,)


@register_gradient("Imputer", domain=ML)
def imputer(g, node, dy):
    """dX = dY, and 0 where an entry was missing and is replaced."""
    (x,), missing = node.x, node.attr("replaced_value_float")
    return g.where(g.op("IsNaN", x) if np.isnan(missing) else x.equals(missing), 0.0, dy)


METRICS = {"metric": ("euclidean", "sqeuclidean")}


@register_gradient("CDist", domain="com.microsoft", ranked=[0, 1], attributes=METRICS)
def cdist(g, node, dy):
    """Of squared distances D: dA = 2 (diag(dD 1) A - dD B), and dB likewise.

    For the distances themselves with dD / 2 D for dD, 0 where D = 0.
    """
    (a, b), (d,), metric = node.x, node.y, node.attr("metric")
    zero = d.equals(0.0)
    w = dy * 2.0 if metric == "sqeuclidean" else g.where(zero, 0.0, dy / g.where(zero, 1.0, d))
    da = a * g.sum(w, [1]) - g.op("Gemm", w, b)
    db = b * g.transpose(g.sum(w, [0]), [1, 0]) - g.op("Gemm", w, a, transA=1)
    return da, db


def known_shape(node, infos) -> tuple | None:
    """The shape of an output that ONNX's own inference leaves open."""
    if node.op_type == "CDist":
        shapes = [infos[x].shape if x in infos else None for x in node.input]
        return tuple(shape[0] if shape else None for shape in shapes)
    if node.domain != ML or node.op_type not in ("Scaler", "Normalizer", "LinearRegressor"):
        return None
    shape = infos[node.input[0]].shape if node.input[0] in infos else None
    if node.op_type != "LinearRegressor" or shape is None:
        return shape
    targets = next((a.i for a in node.attribute if a.name == "targets"), 1)
    return (shape[0] if len(shape) > 1 else 1, targets)
