"""Operators of the domain ai.onnx.ml that scikit-learn's converter writes for linear models."""

from functools import partial

import numpy as np
import pytensor.tensor as pt

from helpers.onnx_grad.translation.node import Node, number, of_node, select, translates
from helpers.onnx_grad.translation.reductions import over_norm, softmax

ML = "ai.onnx.ml"

of_node(
    {
        "ArrayFeatureExtractor": lambda node, x, indices: pt.atleast_2d(x[..., indices.ravel()]),
        "Binarizer": lambda node, x: select(
            x > number(x, node.attr("threshold")), number(x, 1), number(x, 0)
        ),
        "Normalizer": lambda node, x: over_norm(x, 1 if node.attr("norm") == "L1" else 2, axis=-1),
        "Scaler": lambda node, x: (
            (x - number(x, node.attr("offset"))) * number(x, node.attr("scale"))
        ),
    },
    domain=ML,
)


@translates("LinearRegressor", domain=ML)
def _linear_regressor(node: Node, x):
    targets = node.attr("targets")
    W = number(x, np.reshape(node.attr("coefficients"), (targets, -1)))
    b = number(x, node.attr("intercepts") or [0.0] * targets)
    return x @ W.T + b


@translates("LinearClassifier", domain=ML)
def _linear_classifier(node: Node, x):
    """The labels, and the scores."""
    labels, transform = node.attr("classlabels_ints"), node.attr("post_transform")
    intercepts = node.attr("intercepts")
    if not labels or len(intercepts or labels) != len(labels):
        raise node.refuse("only labels that are integers, with a score each, are translated")
    W = number(x, np.reshape(node.attr("coefficients"), (len(labels), -1)))
    scores = x @ W.T + number(x, intercepts or np.zeros(len(labels)))
    found = pt.constant(np.array(labels))[pt.argmax(scores, axis=-1)]
    transforms = {"NONE": lambda z: z, "LOGISTIC": pt.sigmoid, "SOFTMAX": partial(softmax, axis=-1)}
    return found, transforms[transform](scores)


@translates("Imputer", domain=ML)
def _imputer(node: Node, x):
    missing = node.attr("replaced_value_float")
    found = pt.isnan(x) if np.isnan(missing) else pt.eq(x, number(x, missing))
    return select(found, number(x, node.attr("imputed_value_floats")), x)
