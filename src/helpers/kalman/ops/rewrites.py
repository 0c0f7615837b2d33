"""What PyTensor does with the Ops when it compiles a function.

- Outputs that nothing reads are not computed, and a value comes with its gradient.
- The rows of a Hessian are one call. PyTensor's and PyMC's Jacobians differentiate a gradient row
  by row, in a `Scan`: of a model with k parameters the filter and its tangents are run k times, one
  after the other. The compiled code (``helpers.kalman.compiled.tangents``) takes k
  directions, and filters once for a handful of them. So a graph of `KalmanLoglikeTangent` that runs
  over a batch of directions is one `KalmanLoglikeTangents`, and a rewrite makes a batch of the
  `Scan`.
- Of a structural model most arrays are constant, but put together anew in each call, as PyTensor
  folds no `Alloc`. Whatever constant leads to an Op of the filter is folded.
- JAX learns the Ops.
"""

from __future__ import annotations

import pytensor.tensor as pt
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.mode import optdb
from pytensor.graph import Apply
from pytensor.graph.basic import Constant
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.replace import _vectorize_node, graph_replace
from pytensor.graph.rewriting.basic import MergeOptimizer, graph_rewriter, node_rewriter
from pytensor.graph.traversal import ancestors, toposort
from pytensor.raise_op import CheckAndRaise
from pytensor.scan.op import Scan
from pytensor.tensor.blockwise import Blockwise, vectorize_node_fallback
from pytensor.tensor.rewriting.basic import register_specialize, unconditional_constant_folding

from helpers.kalman.ops.declared import Declared
from helpers.kalman.ops.diffuse import KalmanIntegrated, KalmanIntegratedGrad
from helpers.kalman.ops.likelihood import INPUTS, KalmanLoglike, KalmanLoglikeGrad
from helpers.kalman.ops.likelihood import KalmanLoglikeTangent as Tangent
from helpers.kalman.ops.likelihood import KalmanLoglikeTangents as Tangents
from helpers.kalman.ops.panel import KalmanPanel, KalmanPanelGrad

# The Op that computes a gradient, and with it the first output of another.
WITH_GRADIENT = {KalmanLoglike: KalmanLoglikeGrad, KalmanPanel: KalmanPanelGrad}
WITH_GRADIENT[KalmanIntegrated] = KalmanIntegratedGrad
ALL = "l", *INPUTS  # what a gradient and its tangent give
SHARED = len(ALL)  # so many inputs are those of the gradient: the directions come after them


def _core(op):
    """The Op itself, also where it runs over a batch."""
    return op.core_op if isinstance(op, Blockwise) else op


def _requesting(node, requested: tuple[str, ...]) -> dict:
    """The outputs, by name, of a node like this one that computes those of `requested`."""
    op = _core(node.op).requesting(requested)
    if isinstance(node.op, Blockwise):
        op = Blockwise(op)
    return dict(zip(requested, op(*node.inputs, return_list=True), strict=True))


@register_specialize
@node_rewriter([Declared, Blockwise])
def local_only_requested_gradients(fgraph, node):
    """Compute only the outputs that something reads."""
    old = getattr(_core(node.op), "requested", None)
    if not isinstance(_core(node.op), Declared) or old is None:
        return None
    old = dict(zip(old, node.outputs, strict=True))
    used = tuple(x for x, out in old.items() if fgraph.clients[out])
    if used == tuple(old) or not used:
        return None
    return {old[x]: new for x, new in _requesting(node, used).items()}


@register_specialize
@node_rewriter([*WITH_GRADIENT, Blockwise])
def local_value_with_gradient(fgraph, node):
    """Take the first output from an Op of its gradient, whose weights come after its inputs."""
    core, (value, *others), given = _core(node.op), node.outputs, len(node.inputs)
    kind = WITH_GRADIENT.get(type(core))
    if kind is None or any(fgraph.clients[out] for out in others) or not fgraph.clients[value]:
        return None
    name = next(iter(core.gives))
    for client, _ in fgraph.clients[node.inputs[0]]:
        op = _core(client.op)
        if not isinstance(op, kind) or client.inputs[:given] != node.inputs:
            continue
        if op.tol != core.tol or getattr(op, "varying", ()) != getattr(core, "varying", ()):
            continue
        if value in ancestors(client.inputs[given:]):
            continue  # the weights depend on the value: no common Op can give both
        old = dict(zip(op.requested, client.outputs, strict=True))
        new = old if name in old else _requesting(client, (name, *old))
        if new[name].type.ndim != value.type.ndim:
            continue  # one of them runs over a batch of weights
        return {value: new[name]} | {out: new[x] for x, out in old.items() if new is not old}
    return None


@_vectorize_node.register(Tangent)
def vectorize(op, node, *inputs):
    """A batch of directions, and of nothing else, is one Op."""
    batched = [X.ndim - old.ndim for X, old in zip(inputs, node.inputs, strict=True)]
    lengths = {X.type.shape[0] for X, more in zip(inputs, batched, strict=True) if more}
    # A batch of length 1 would be stretched to that of the others.
    stretched = 1 in lengths and len(lengths) > 1
    one_axis = not any(batched[:SHARED]) and max(batched) == 1
    if type(op) is not Tangent or not one_axis or stretched:
        return vectorize_node_fallback(op, node, *inputs)
    moves = list(zip(inputs[SHARED:], batched[SHARED:], strict=True))
    k = next(X.shape[0] for X, more in moves if more)
    moves = [X if more else pt.broadcast_to(X, (k, *X.shape)) for X, more in moves]
    united = Tangents(op.varying, op.along, op.requested, op.tol)
    return united.make_node(*inputs[:SHARED], *moves)


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
    if not any(isinstance(inner.op, Tangent) for inner in op.fgraph.apply_nodes):
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
    if not has_several(fgraph):
        return
    made = {}
    for node in fgraph.toposort():
        if node.op != pt.add:
            continue
        groups = {}
        for X in node.inputs:
            if X.owner and isinstance(X.owner.op, Tangent):
                op, name = X.owner.op, X.owner.op.requested[X.owner.outputs.index(X)]
                key = type(op), op.varying, op.tol, name, tuple(X.owner.inputs[:SHARED])
                groups.setdefault(key, []).append(X)
        rest, found = list(node.inputs), []
        for (kind, varying, tol, name, shared), terms in groups.items():
            if len(terms) == 1:
                continue
            moves = {}
            for X in terms:
                rest.remove(X)
                for x, move in zip(X.owner.op.along, X.owner.inputs[SHARED:], strict=True):
                    moves[x] = moves[x] + move if x in moves else move
            moves = {x: moves[x] for x in INPUTS if x in moves}
            # All outputs, so that sums of others are this same node; what nothing reads goes later.
            same = kind, varying, tol, shared, tuple(moves.items())
            if same not in made:
                made[same] = kind(varying, tuple(moves), ALL, tol).named(*shared, *moves.values())
            found.append(made[same][name])
        if found:
            total = pt.add(*rest, *found) if len(rest) + len(found) > 1 else found[0]
            total = node.outputs[0].type.filter_variable(total, allow_convert=True)
            fgraph.replace(node.outputs[0], total, reason="helpers_kalman_unite")


def share(fgraph) -> None:
    """One node in the place of several that differ only in what of them is read."""
    if not has_several(fgraph):
        return
    groups = {}
    for node in fgraph.toposort():
        if isinstance(node.op, KalmanLoglikeGrad | Tangent):
            groups.setdefault((node.op.requesting(()), *node.inputs), []).append(node)
    for nodes in groups.values():
        if len(nodes) == 1:
            continue
        outputs = [
            (X, x) for node in nodes for x, X in zip(node.op.requested, node.outputs, strict=True)
        ]
        read = {x for _, x in outputs}
        new = _requesting(nodes[0], tuple(x for x in ALL if x in read))
        replaced = [(X, new[x]) for X, x in outputs]
        fgraph.replace_all(replaced, reason="helpers_kalman_share")


def has_several(fgraph) -> bool:
    """Whether there are several gradients or tangents, once equal ones are merged."""
    kinds = KalmanLoglikeGrad | Tangent
    several = sum(isinstance(node.op, kinds) for node in fgraph.apply_nodes) > 1
    if several:
        merge(fgraph)
    return several


def merge(fgraph) -> None:
    """One node in the place of equal ones.

    PyTensor's own rewrite looks at each node once, and forgets it if its twin goes meanwhile.
    """
    MergeOptimizer().rewrite(fgraph)
    seen = {}
    for node in fgraph.toposort():
        first = seen.setdefault((node.op, *node.inputs), node)
        if first is not node:
            fgraph.replace_all(
                list(zip(node.outputs, first.outputs, strict=True)), reason="helpers_kalman_merge"
            )


def fold_constants(fgraph) -> None:
    """Compute, once and for all, what leads from constants alone to an Op of the filter."""
    ours = [x for x in fgraph.apply_nodes if isinstance(_core(x.op), Declared)]
    for node in toposort([X for x in ours for X in x.inputs]):
        constant = all(isinstance(X, Constant) for X in node.inputs)
        if not constant or isinstance(node.op, HasInnerGraph | CheckAndRaise):
            continue
        folded = unconditional_constant_folding.transform(fgraph, node)
        if folded:
            pairs = zip(node.outputs, folded, strict=True)
            fgraph.replace_all(pairs, reason="helpers_kalman_fold_constants")


def teach_jax(fgraph) -> None:
    """JAX mode, and no other, begins with this: JAX learns the Ops, nothing changes."""
    from helpers.kalman.ops import in_jax  # noqa: F401 (learns when it is imported)


# Before the rewrites of Scan, which take it apart; where sums of sums are one; and where what
# nothing reads is gone.
for name, function, position, *modes in (
    ("jax", teach_jax, 0, "jax"),
    ("directions", unroll, 0.04, "fast_run"),
    ("fold_constants", fold_constants, 0.5, "fast_run", "fast_compile"),
    ("unite", unite, 1.25, "fast_run"),
    ("share", share, 2.9, "fast_run"),
):
    optdb.register(f"helpers_kalman_{name}", graph_rewriter(function), *modes, position=position)
