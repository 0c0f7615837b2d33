"""How Numba runs the Ops of :mod:`helpers.sparse_conv.op`, and one rewrite.

Imported for its effects.
"""

import zlib
from pathlib import Path

from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.graph.traversal import variable_depends_on
from pytensor.tensor.rewriting.basic import register_specialize

from helpers.kalman.numba_backend import numba_njit, register_funcify_default_op_cache_key
from helpers.sparse_conv import kernels, op

# Compiled graphs are kept on disk: other kernels, other key.
VERSION = zlib.crc32(Path(kernels.__file__).read_bytes())


def _numba(sparse_op, node=None, **kwargs):
    kernel = sparse_op.kernel

    @numba_njit
    def call(*arrays):
        return kernel(*arrays)

    return call, VERSION


for op_type in op.RulebookOp.__subclasses__():
    register_funcify_default_op_cache_key(op_type)(_numba)


@register_specialize
@node_rewriter([op.ConvGradValues])
def both_gradients_at_once(fgraph, node):
    """Gradients to values and to W of one layer: one gather in place of two."""
    dY, W, *rules = node.inputs
    for client, _ in fgraph.clients[dY]:
        if not isinstance(client.op, op.ConvGradWeights) or client.inputs[1:] != [dY, *rules]:
            continue
        # In a second derivative the one may need the other first.
        if variable_depends_on(client.inputs[0], node.outputs) or variable_depends_on(
            W, client.outputs
        ):
            continue
        dM, dW = op.conv_grads(client.inputs[0], W, dY, *rules)
        return {node.outputs[0]: dM, client.outputs[0]: dW}
    return None
