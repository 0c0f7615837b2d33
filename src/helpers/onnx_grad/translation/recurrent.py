"""Recurrent layers: written out step by step, as for their gradients, and that is translated."""

import pytensor.tensor as pt
from onnx import helper
from onnx.numpy_helper import to_array

from helpers.onnx_grad.builder import Graph
from helpers.onnx_grad.rules.recurrent import gru, lstm, rnn
from helpers.onnx_grad.tensor import Info
from helpers.onnx_grad.translation.node import Node, translated, translates

LAYERS = {"LSTM": lstm, "GRU": gru, "RNN": rnn}


@translates(*LAYERS)
def _layer(node: Node, *inputs):
    names = dict(zip(node.proto.input, inputs, strict=True))
    kinds, dtype = ((n, x.type) for n, x in names.items() if n), helper.np_dtype_to_tensor_dtype
    infos = {name: Info(dtype(kind.numpy_dtype), kind.shape) for name, kind in kinds}
    g = Graph({"": node.version}, infos, {}, names)
    layer = Node(node.proto, g, node.dtype)
    ys, protos = g.recorded(LAYERS[node.op_type].__wrapped__, layer)
    symbols = names | {t.name: pt.constant(to_array(t)) for t in g.initializers}
    for proto in protos:
        given = [symbols.get(name) for name in proto.input]
        symbols |= zip(proto.output, translated(Node(proto, g, node.dtype), given), strict=False)
    return tuple(symbols[y.name] for y in ys)
