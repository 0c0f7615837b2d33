"""The Hessian of the log-likelihood times many directions, as one Op and one compiled call.

PyTensor's and PyMC's Jacobians differentiate a gradient row by row, in a `Scan`: of a model with k
parameters the filter and its tangents are run k times, one after the other.  The compiled code
(:func:`helpers.kalman.fused.tangents.hessian_vector`) takes k directions, and filters once for a
handful of them.  So a graph of `KalmanLoglikeTangent` that runs over a batch of directions is one
:class:`KalmanLoglikeTangents`, and a rewrite makes a batch of the `Scan`.
"""

from __future__ import annotations

import pytensor.tensor as pt
from pytensor.compile.builders import OpFromGraph
from pytensor.graph import Apply
from pytensor.graph.replace import _vectorize_node, graph_replace
from pytensor.graph.traversal import toposort
from pytensor.scan.op import Scan
from pytensor.tensor.blockwise import vectorize_node_fallback

from helpers.kalman.numba_backend import register_funcify_and_cache_key
from helpers.kalman.op import (
    INPUTS,
    THIRD,
    KalmanLoglikeGrad,
    KalmanLoglikeTangent,
    _letters,
    numba_funcify_kalman,
)
from helpers.kalman.recursions import TOLERANCE


class KalmanLoglikeTangents(KalmanLoglikeTangent):
    """`KalmanLoglikeTangent` for k directions: each tangent, and each output, has k in front."""

    directions = 1

    def __init__(self, varying=(), along=INPUTS, requested=("l", *INPUTS), tol=TOLERANCE):
        super().__init__(varying, along, requested, tol)
        extra = ("n", *("k" + "".join(_letters(x, varying)) for x in along))
        letters = tuple(
            "k" + ("n" if x == "l" else "".join(_letters(x, varying))) for x in requested
        )
        self.gufunc_signature = self._signature(extra, letters)

    def requesting(self, requested: tuple[str, ...]) -> KalmanLoglikeTangents:
        return KalmanLoglikeTangents(self.varying, self.along, requested, self.tol)

    def make_node(self, *inputs):
        node = super().make_node(*inputs)
        k = next((X.type.shape[0] for X in node.inputs[len(INPUTS) + 1 :]), None)
        outputs = [pt.tensor(dtype=X.dtype, shape=(k, *X.type.shape)) for X in node.outputs]
        return Apply(self, node.inputs, outputs)

    def many(self, given) -> tuple:
        if any(len(X) != len(given[0]) for X in given):
            raise ValueError("the tangents are not of one number of directions")
        return (len(given[0]),)

    @property
    def _many_in_numba(self) -> str:
        return f"len({self.along[0]}_moves)"

    def infer_shape(self, node, shapes):
        k = shapes[len(INPUTS) + 1][0]
        return [(k, *shape) for shape in super().infer_shape(node, shapes)]

    def pullback(self, inputs, outputs, cotangents):
        raise NotImplementedError(THIRD)


register_funcify_and_cache_key(KalmanLoglikeTangents)(numba_funcify_kalman)


def vectorize(op, node, *inputs):
    """A batch of directions, and of nothing else, is one Op."""
    first = len(INPUTS) + 1
    batched = [X.ndim - old.ndim for X, old in zip(inputs, node.inputs, strict=True)]
    lengths = {X.type.shape[0] for X, more in zip(inputs, batched, strict=True) if more}
    # A batch of length 1 would be stretched to that of the others.
    stretched = 1 in lengths and len(lengths) > 1
    one_axis = not any(batched[:first]) and max(batched) == 1
    if type(op) is not KalmanLoglikeTangent or not one_axis or stretched:
        return vectorize_node_fallback(op, node, *inputs)
    moves = list(zip(inputs[first:], batched[first:], strict=True))
    k = next(X.shape[0] for X, more in moves if more)
    moves = [X if more else pt.broadcast_to(X, (k, *X.shape)) for X, more in moves]
    return KalmanLoglikeTangents(op.varying, op.along, op.requested, op.tol).make_node(
        *inputs[:first], *moves
    )


def in_batches(outputs: list, batches: dict) -> list:
    """The outputs where some variables are batches.

    Unlike `vectorize_graph`, which makes a `Blockwise` of every node, it leaves those alone that
    depend on no batch: they are the nodes of the value and the gradient, and computed once.
    """
    new = dict(batches)
    for node in toposort(outputs, blockers=list(batches)):
        if not any(X in new for X in node.inputs):
            continue
        if isinstance(node.op, OpFromGraph):
            inner = node.op.fgraph.unfreeze()
            given = dict(zip(inner.inputs, node.inputs, strict=True))
            outside = graph_replace(inner.outputs, given, strict=False)
            found = in_batches(outside, {X: new[X] for X in node.inputs if X in new})
        else:
            found = _vectorize_node(node.op, node, *(new.get(X, X) for X in node.inputs))
            found = found.outputs if isinstance(found, Apply) else found
        new |= zip(node.outputs, found, strict=True)
    return [new.get(X, X) for X in outputs]


def batch_of_scan(node) -> list | None:
    """The outputs of a `Scan` that only maps, and holds a `KalmanLoglikeTangent`, without a loop.

    None where it is another one, or something in it knows no batches.
    """
    op, info = node.op, node.op.info
    recurrent = info.n_mit_mot + info.n_mit_sot + info.n_sit_sot + info.n_untraced_sit_sot
    if recurrent or info.as_while or not info.n_seqs:
        return None
    if not any(isinstance(inner.op, KalmanLoglikeTangent) for inner in op.fgraph.apply_nodes):
        return None
    steps = node.inputs[0]
    inner, first = op.fgraph.unfreeze(), info.n_seqs
    fixed = dict(zip(inner.inputs[first:], op.outer_non_seqs(node.inputs), strict=True))
    outputs = graph_replace(inner.outputs, fixed, strict=False)
    batches = [X[:steps] for X in op.outer_seqs(node.inputs)]
    try:
        found = in_batches(outputs, dict(zip(inner.inputs[:first], batches, strict=True)))
    except NotImplementedError:
        return None
    answer = []
    for old, new in zip(node.outputs, found, strict=True):
        if new.ndim < old.ndim:  # the same in every step
            new = pt.broadcast_to(new, (steps, *new.shape))
        answer.append(old.type.filter_variable(new, allow_convert=True))
    return answer


def unroll(fgraph) -> None:
    """Put a batch in the place of each such `Scan`."""
    for node in fgraph.toposort():
        if isinstance(node.op, Scan) and (found := batch_of_scan(node)) is not None:
            fgraph.replace_all(
                zip(node.outputs, found, strict=True), reason="helpers_kalman_directions"
            )


def unite(fgraph) -> None:
    """One Op in the place of several whose outputs are added: a tangent is linear in directions.

    PyMC differentiates with respect to each parameter on its own, and the gradient of each moves
    along it alone.
    """
    first, made = len(INPUTS) + 1, {}
    for node in fgraph.toposort():
        if node.op != pt.add:
            continue
        groups = {}
        for X in node.inputs:
            if X.owner and isinstance(X.owner.op, KalmanLoglikeTangent):
                op = X.owner.op
                name = op.requested[X.owner.outputs.index(X)]
                key = type(op), op.varying, op.tol, name, tuple(X.owner.inputs[:first])
                groups.setdefault(key, []).append(X)
        rest, found = list(node.inputs), []
        for (kind, varying, tol, name, shared), terms in groups.items():
            if len(terms) == 1:
                continue
            moves = {}
            for X in terms:
                rest.remove(X)
                for x, move in zip(X.owner.op.along, X.owner.inputs[first:], strict=True):
                    moves[x] = moves[x] + move if x in moves else move
            moves = {x: moves[x] for x in INPUTS if x in moves}
            # All outputs, so that sums of others are this same node; what nothing reads goes later.
            same = kind, varying, tol, shared, tuple(moves.items())
            if same not in made:
                united = kind(varying, tuple(moves), ("l", *INPUTS), tol)
                made[same] = united(*shared, *moves.values(), return_list=True)
            found.append(made[same][("l", *INPUTS).index(name)])
        if found:
            total = pt.add(*rest, *found) if len(rest) + len(found) > 1 else found[0]
            total = node.outputs[0].type.filter_variable(total, allow_convert=True)
            fgraph.replace(node.outputs[0], total, reason="helpers_kalman_unite")


def share(fgraph) -> None:
    """One node in the place of several that differ only in what of them is read."""
    groups = {}
    for node in fgraph.toposort():
        if isinstance(node.op, KalmanLoglikeGrad | KalmanLoglikeTangent):
            key = node.op.requesting(()), tuple(node.inputs)
            groups.setdefault(key, []).append(node)
    for nodes in groups.values():
        if len(nodes) == 1:
            continue
        read = {x for node in nodes for x in node.op.requested}
        requested = tuple(x for x in ("l", *INPUTS) if x in read)
        op = nodes[0].op.requesting(requested)
        new = dict(zip(requested, op(*nodes[0].inputs, return_list=True), strict=True))
        fgraph.replace_all(
            [
                (old, new[x])
                for node in nodes
                for x, old in zip(node.op.requested, node.outputs, strict=True)
            ],
            reason="helpers_kalman_share",
        )
