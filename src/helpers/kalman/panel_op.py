r"""Many series that share a model as one Op, whose gradients are summed over the series inside it.

:func:`kalman_loglike_panel` is the log-likelihood of each step of each series.  Where PyTensor
vectorizes :func:`helpers.kalman.op.kalman_loglike` over a batch of series, and of a0, c or d
perhaps, the same Op comes out: P, F, the gains and N do not see the data, so one pass of the
covariances is enough for all series with the same gaps (:mod:`helpers.kalman.panel`).  A batch of
any other array
shares nothing, and stays a loop over the Op of one series.

The Op's inputs are y with d taken off, and everything but P0 with all axes that it may have:
y (J, n, p), a0 (J or 1, m), P0 (m, m), c (J or 1, n or 1, m), and T, Z, H and W = R Q R' with an
axis of length n or 1 for time.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType, disconnected_type
from pytensor.graph import Apply, Op
from pytensor.graph.replace import graph_replace
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.tensor.blockwise import Blockwise, vectorize_node_fallback
from pytensor.tensor.rewriting.basic import register_specialize

from helpers.kalman.fused.building import load
from helpers.kalman.numba_backend import (
    compile_numba_function_src,
    numba_njit,
    register_funcify_and_cache_key,
)
from helpers.kalman.op import (
    DIMENSIONS,
    KalmanLoglike,
    _connected,
    _from_model,
    as_compiled,
    beside,
    less,
    of_one_float_type,
    only_what_is_read,
    tolerance,
    value_with_gradient,
)
from helpers.kalman.op import INPUTS as INPUTS_OF_ONE
from helpers.kalman.recursions import TOLERANCE

INPUTS = ("y", "a0", "P0", "c", "T", "Z", "H", "W")
_NDIM = {"a0": 2, "P0": 2}  # of the others 3


def kalman_loglike_panel(Y, a0, P0, c, d, T, Z, R, H, Q, tol=TOLERANCE):  # noqa: N803
    r"""Log-likelihood of each step of many series that share a model, symbolically.

    Parameters
    ----------
    Y : tensor (J, n, p)
        J series; NaN marks a gap. A series that ends early is filled with NaN after its end, and
        one without any observation counts as zero.
    a0 : tensor (m,) or (J, m)
        For all series, or one for each.
    P0, T, Z, R, H, Q : tensor
        As :func:`helpers.kalman.op.kalman_loglike` has them, for all series.
    c, d : tensor
        So too, or with two leading axes: (J, n, m) or c[:, None, :], and (J, n, p) or
        d[:, None, :].
    tol : float
        As there.

    Returns
    -------
    TensorVariable (J, n)
        NaN for the series with whose gaps some F is not positive definite.

    Raises
    ------
    ValueError
        If an argument has the wrong number of dimensions, or a shape that is known does not fit;
        where shapes become known when the compiled function is called, then.
    TypeError
        If an argument is complex.
    MemoryError
        When the compiled function is called and memory runs out.

    Notes
    -----
    Its pullback gives gradients summed over the series, as the smoother's sums over steps and
    series (:mod:`helpers.kalman.panel`); weights that vary over the steps of a series, or that do
    where its log-likelihoods are not simply summed, take a pass for each series.  Second
    derivatives are those of :func:`helpers.kalman.op.kalman_loglike`, one series after the other.

    Examples
    --------
    >>> import numpy as np
    >>> from helpers.kalman.panel_op import kalman_loglike_panel
    >>> one, zero = np.eye(1), np.zeros(1)
    >>> Y = np.array([[[1.0], [np.nan]], [[0.0], [0.5]], [[2.0], [1.0]]])
    >>> kalman_loglike_panel(Y, zero, one, zero, zero, one, one, one, one, one).type.shape
    (3, 2)
    """
    Y, a0, c, d = (pt.as_tensor_variable(X) for X in (Y, a0, c, d))  # noqa: N806
    if Y.ndim != 3:
        raise ValueError(f"Y has {Y.ndim} dimensions, expected 3: (J, n, p)")
    own = {"a0": a0.ndim == 2, "c": c.ndim == 3, "d": d.ndim == 3}
    series = {"a0": a0, "c": c, "d": d}
    for name, X in series.items():
        rows, expected = X.type.shape[:1], Y.type.shape[:1]
        if own[name] and None not in (*rows, *expected) and rows != expected:
            raise ValueError(f"{name} is that of {rows[0]} series, expected {expected[0]}")
    # One series and its model, looked at and put together as they always are.
    first = {x: X[(0,) * (X.ndim - 1)] if own[x] else X for x, X in series.items()}
    one = _from_model(Y[0], first["a0"], P0, first["c"], first["d"], T, Z, R, H, Q)
    inputs = dict(zip(INPUTS_OF_ONE, one, strict=True)) | {"y": Y}
    inputs |= {x: X for x, X in series.items() if own[x]}
    inputs = {x: X.astype(one[0].dtype) for x, X in inputs.items()}
    return _panel(inputs, own, tol)


def _panel(inputs: dict, own: dict, tol):
    """The Op on the inputs of one series, some of which have an axis for series."""
    full = dict(inputs)
    for name in ("c", "d", "T", "Z", "H", "W"):
        X, core = full[name], len(DIMENSIONS[name])
        series = own.get(name, False)
        if X.ndim == core + series:  # no axis for time
            X = pt.expand_dims(X, int(series))
        full[name] = X if series or name not in ("c", "d") else X[np.newaxis]
    if not own["a0"]:
        full["a0"] = full["a0"][np.newaxis]
    full["y"] = less(full["y"], full.pop("d"))
    return KalmanPanel(tol)(*(full[x] for x in INPUTS))


def vectorize(op, node, *inputs):
    """A batch of series with one model becomes a panel; any other batch a loop over the Op."""
    core = dict(zip(INPUTS_OF_ONE, node.inputs, strict=True))
    given = dict(zip(INPUTS_OF_ONE, inputs, strict=True))
    batched = [x for x in given if given[x].type.ndim > core[x].type.ndim]
    own = {x: x in batched for x in ("a0", "c", "d")}
    shared = set(batched) <= {"y", *own}
    one_axis = all(given[x].type.ndim == core[x].type.ndim + 1 for x in batched)
    # A batch of length 1 would be stretched to that of the others.
    long = all(given[x].type.shape[0] != 1 for x in batched)
    if "y" not in batched or not (shared and one_axis and long):
        return vectorize_node_fallback(op, node, *inputs)
    return [_panel(given, own, op.tol)]


def with_all_axes(inputs, names, ndim: dict) -> list:
    """Tensors of one float type; each has as many axes as `ndim` says, or 3."""
    tensors = of_one_float_type(dict(zip(names, inputs, strict=True)))
    for name, X in tensors.items():
        if X.ndim != ndim.get(name, 3):
            raise ValueError(f"{name} has {X.ndim} dimensions, expected {ndim.get(name, 3)}")
    return list(tensors.values())


class _PanelOp(Op):
    """What both Ops share: the eight inputs, and how compiled code is called."""

    def perform(self, node, inputs, output_storage):
        weights = [] if len(inputs) > len(INPUTS) else [np.ones(inputs[0].shape[:2])]
        code = load("panel").loglike_and_grad
        arrays = as_compiled([*inputs, *weights])
        l, y_bar, a0_bar, c_bar, out, _ = code(*arrays, *self._flags(), self.tol)
        found = out._asdict() | {"l": l, "y": y_bar, "a0": a0_bar, "c": c_bar}
        for storage, name in zip(output_storage, self.requested, strict=True):
            storage[0] = np.asarray(found[name], dtype=node.outputs[0].dtype)

    def numba_function(self, node):
        """A function of the Op's inputs for Numba, and a key under which it is kept on disk."""
        dtype, given = node.inputs[0].dtype, [f"x{i}" for i in range(len(node.inputs))]
        weights = [] if len(given) > len(INPUTS) else ["np.ones(x0.shape[:2])"]
        doubles = [f"entry.doubles({x})" for x in given]
        arguments = ", ".join([*doubles, *weights, *map(repr, (*self._flags(), self.tol))])
        cast = "" if dtype == "float64" else f".astype(np.{dtype})"
        local = {"l": "l", "y": "y_bar", "a0": "a0_bar", "c": "c_bar"}
        name = type(self).__name__
        source = "\n".join(
            [
                f"def {name}({', '.join(given)}):",
                "    l, y_bar, a0_bar, c_bar, out, _ = "
                f"panel.linked_loglike_and_grad(({arguments}))",
                f"    return {', '.join(local.get(x, f'out.{x}') + cast for x in self.requested)}",
            ]
        )
        key = sha256(f"{source} {load('entry').DIGEST}".encode()).hexdigest()
        known = {"np": np, "entry": load("entry"), "panel": load("panel")}
        return numba_njit(compile_numba_function_src(source, name, global_env=known)), key


class KalmanPanel(_PanelOp):
    """y, a0, P0, c, T, Z, H, W -> l (J, n)."""

    __props__ = ("tol",)
    requested = ("l",)

    def __init__(self, tol: float = TOLERANCE):
        self.tol = tolerance(tol)

    def make_node(self, *inputs):
        inputs = with_all_axes(inputs, INPUTS, _NDIM)
        y = inputs[0].type
        return Apply(self, inputs, [pt.tensor(dtype=y.dtype, shape=y.shape[:2])])

    def _flags(self):
        return (False,) * 5

    def infer_shape(self, node, shapes):
        return [shapes[0][:2]]

    def pullback(self, inputs, outputs, cotangents):
        (l_bar,) = cotangents
        if isinstance(l_bar.type, DisconnectedType):
            return [disconnected_type() for _ in inputs]
        return KalmanPanelGrad(tol=self.tol)(*inputs, l_bar)[1:]


class KalmanPanelGrad(_PanelOp):
    """The eight inputs and l_bar (J, n) -> what is `requested`: l, and gradients of sum l_bar l.

    Each of its input's shape: summed over the series where those share it.
    """

    __props__ = ("requested", "tol")

    def __init__(self, requested: tuple[str, ...] = ("l", *INPUTS), tol: float = TOLERANCE):
        self.requested, self.tol = requested, tol

    def make_node(self, *inputs):
        *model, l_bar = inputs
        model = with_all_axes(model, INPUTS, _NDIM)
        (l_bar,) = beside(model, [l_bar], {"l_bar": 2})
        shapes = {x: X.type.shape for x, X in zip(INPUTS, model, strict=True)}
        shapes["l"] = shapes["y"][:2]
        outputs = [pt.tensor(dtype=l_bar.dtype, shape=shapes[x]) for x in self.requested]
        return Apply(self, [*model, l_bar], outputs)

    def _flags(self):
        """Whether there is a way back, and what it is asked for: matrices at all, T, Z, W."""
        T, Z, W = (x in self.requested for x in "TZW")
        matrices = T or Z or W or "P0" in self.requested or "H" in self.requested
        return True, matrices, T, Z, W

    def requesting(self, requested: tuple[str, ...]) -> KalmanPanelGrad:
        """The Op that computes these of its outputs."""
        return KalmanPanelGrad(requested, self.tol)

    def infer_shape(self, node, shapes):
        shape_of = dict(zip(INPUTS, shapes, strict=False)) | {"l": shapes[0][:2]}
        return [shape_of[x] for x in self.requested]

    def pullback(self, inputs, outputs, cotangents):
        """By the Op for one series, in a loop: second derivatives share no covariances."""
        bars = _connected(self.requested, cotangents)
        if not bars:
            return [disconnected_type() for _ in inputs]
        # Of symbols of its own: an input may depend on another one.
        *model, l_bar = [X.type() for X in inputs]
        weights = {x: bar.type() for x, bar in bars.items()}
        l = _one_by_one(model, self.tol)
        wrt = [x for x in bars if x != "l"]
        slopes = pytensor.grad((l_bar * l).sum(), [model[INPUTS.index(x)] for x in wrt])
        found = dict(zip(wrt, slopes, strict=True)) | {"l": l}
        total = sum((weights[x] * found[x]).sum() for x in bars)
        moved = pytensor.grad(total, [*model, l_bar], disconnected_inputs="ignore")
        own = [*model, l_bar, *weights.values()]
        given = dict(zip(own, [*inputs, *bars.values()], strict=True))
        return graph_replace(moved, given, strict=False)


def _repeated(X, length, axis=0):
    """X with an axis of this length, if it has length 1, which need not be known before it runs."""
    own = X.shape[axis]  # PyTensor would not stretch it then
    return pt.take(X, pt.arange(pt.maximum(length, own)) * pt.neq(own, 1), axis=axis)


def _one_by_one(inputs, tol):
    """The log-likelihoods (J, n) by a loop over the Op for one series, from the panel's inputs."""
    y, a0, P0, c, *matrices = inputs
    J, n, p = y.shape
    fixed = c.type.shape[1] == 1
    c = _repeated(c, J) if fixed else _repeated(_repeated(c, J), n, axis=1)
    over_time = [X[0] if X.type.shape[0] == 1 else _repeated(X, n) for X in matrices]
    of_all = [P0, pt.zeros((p,), dtype=y.dtype), *over_time]
    P0, d, *matrices = (X[np.newaxis] for X in of_all)
    a0 = _repeated(a0, J)
    varying = tuple(x for x, X in zip("TZHW", over_time, strict=True) if X.ndim == 3)
    op = KalmanLoglike(varying if fixed else ("c", *varying), tol)
    return Blockwise(op)(y, a0, P0, c[:, 0] if fixed else c, d, *matrices)


@register_funcify_and_cache_key(KalmanPanel)
@register_funcify_and_cache_key(KalmanPanelGrad)
def numba_funcify_panel(op, node, **kwargs):
    return op.numba_function(node)


@register_specialize
@node_rewriter([KalmanPanelGrad])
def local_only_requested_panel_gradients(fgraph, node):
    """Compute only the outputs that something reads."""
    return only_what_is_read(fgraph, node)


@register_specialize
@node_rewriter([KalmanPanel])
def local_panel_value_with_gradient(fgraph, node):
    """Take the log-likelihoods from the Op that computes their gradient, if there is one."""
    return value_with_gradient(fgraph, node, KalmanPanelGrad)
