"""The gradient of an ONNX model as an ONNX model, in standard operators alone.

>>> from onnx import parser
>>> from helpers.onnx_grad import onnx_derivative
>>> model = parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
... line (float[N, 10] X) => (float[N, 10] Y) <float[1] b = {1.0}> { Y = Add(X, b) }''')
>>> gradient = onnx_derivative(model)
>>> [x.name for x in gradient.graph.input], [y.name for y in gradient.graph.output]
(['X', 'b', 'Y_grad'], ['X_grad', 'b_grad'])
"""

from helpers.onnx_grad.derivative import DerivativeOptions, onnx_derivative
from helpers.onnx_grad.feeds import random_feed
from helpers.onnx_grad.files import file_derivative, save_model, with_weights
from helpers.onnx_grad.rules import register_gradient
from helpers.onnx_grad.training import adamw, add_loss, add_step, initial_state, sgd, training_step
from helpers.onnx_grad.translation import to_pytensor

__all__ = [
    "DerivativeOptions",
    "adamw",
    "add_loss",
    "add_step",
    "file_derivative",
    "initial_state",
    "onnx_derivative",
    "random_feed",
    "register_gradient",
    "save_model",
    "sgd",
    "to_pytensor",
    "training_step",
    "with_weights",
]
