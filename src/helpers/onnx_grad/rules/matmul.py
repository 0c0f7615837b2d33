r"""Products of matrices: :math:`Y = AB` gives :math:`\bar A = \bar Y B^\top` and
:math:`\bar B = A^\top \bar Y`."""

from helpers.onnx_grad.rules.table import register_gradient


@register_gradient(
    "MatMul", limits={"rank": "known of A and B (of B alone, where it is a static matrix)"}
)
def matmul(g, node, dy):
    """dA = dY B', dB = A' dY over the last two axes, each un-broadcast over the others."""
    a, b = node.x
    if a.rank == b.rank == 2:
        return g.op("Gemm", dy, b, transB=1), g.op("Gemm", a, dy, transA=1)
    static = b.rank == 2 and all(isinstance(n, int) and n > 0 for n in b.shape)
    if static and a.rank != 1:  # a stack of matrices times one is one tall matrix times it
        da = g.op("MatMul", dy, _transposed(g, b), shape=a.shape)
        tall, wide = ([-1, n] for n in b.shape)
        return da, g.op("Gemm", g.reshape(a, tall), g.reshape(dy, wide), transA=1)
    if a.rank is None or b.rank is None:
        raise node.refuse("the rank of an operand is unknown; declare the shapes of the inputs")
    # A vector is a matrix with one row (a) or one column (b): dY gets that axis back.
    if a.rank == 1:
        dy = g.unsqueeze(dy, [-2 if b.rank > 1 else -1])
    if b.rank == 1:
        dy = g.unsqueeze(dy, [-1])
    left = g.unsqueeze(a, [0]) if a.rank == 1 else a
    right = g.unsqueeze(b, [1]) if b.rank == 1 else b
    da = g.reduce_to(g.op("MatMul", dy, _transposed(g, right)), left)
    db = g.reduce_to(g.op("MatMul", _transposed(g, left), dy), right)
    da = g.squeeze(da, [0]) if a.rank == 1 else da
    return da, g.squeeze(db, [1]) if b.rank == 1 else db


def _transposed(g, t):
    """The last two axes swapped."""
    perm = list(range(t.rank))
    perm[-2:] = perm[-1], perm[-2]
    return g.transpose(t, perm)


@register_gradient("Gemm")
def gemm(g, node, dy):
    """Y = alpha A' B' + beta C: dA' = alpha dY B'', dB' = alpha A'' dY, dC = beta dY un-broadcast,
    where a prime is a transposition or none, as the attributes say."""
    a, b, c = node.x[0], node.x[1], node.input(2)
    alpha, beta = node.attr("alpha"), node.attr("beta")
    ta, tb = node.attr("transA"), node.attr("transB")
    if ta:
        da = g.op("Gemm", b, dy, alpha=alpha, transA=tb, transB=1)
    else:
        da = g.op("Gemm", dy, b, alpha=alpha, transB=1 - tb)
    if tb:
        db = g.op("Gemm", dy, a, alpha=alpha, transA=1, transB=ta)
    else:
        db = g.op("Gemm", a, dy, alpha=alpha, transA=1 - ta)
    if c is None:
        return da, db
    dc = g.reduce_to(dy, c)
    return da, db, dc if beta == 1.0 else dc * beta
