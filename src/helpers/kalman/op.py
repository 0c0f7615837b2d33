r"""The Kalman filter over a whole series as one Op, with its gradient in closed form.

:func:`kalman_loglike` is what a model uses: the log-likelihood of each step.  Its pullback is one
Op more, `KalmanLoglikeGrad`, which filters and then runs the disturbance smoother backwards
where all steps weigh the same, and the reverse recursion where they do not.  When PyTensor
compiles a function, two rewrites leave of it what the function uses: gradients that nobody reads
are not computed, and the log-likelihood comes with the gradient instead of from a filter of its
own.  :func:`kalman_filter_outputs` gives all seven outputs of the filter, with a pullback as well.

The Ops run in Numba, in C and Python modes (which call the same compiled code), and in JAX mode as
pure JAX.  A second derivative falls back to the scan of :mod:`helpers.kalman.graph`.
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType, disconnected_type
from pytensor.graph import Apply, Op
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.graph.traversal import ancestors
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.rewriting.basic import register_specialize

from helpers.kalman.graph import filter_graph
from helpers.kalman.model import NAMES, SHAPES, STATIC
from helpers.kalman.reference import FilterOutputs

INPUTS = ("y", *NAMES)
OUTPUTS = {
    "a_filt": "nm", "a_pred": "nm", "y_hat": "np",
    "P_filt": "nmm", "P_pred": "nmm", "F": "npp", "l": "n",
}  # fmt: skip

# Relative error of the settled covariance that the fast kernels allow themselves.
TOLERANCE = 1e-13


def kalman_loglike(y, a0, P0, c, d, T, Z, R, H, Q):
    r"""Log-likelihood of each step of a linear Gaussian state space model, symbolically.

    Parameters
    ----------
    y : tensor (n, p)
        Observations; NaN marks a gap.
    a0, P0, c, d, T, Z, R, H, Q : tensor
        The model, as in :class:`helpers.kalman.model.StateSpace`: any but a0 and P0 may carry a
        leading time axis of length n.  P0, H and Q count by their symmetric part.

    Returns
    -------
    TensorVariable (n,)
        NaN throughout where some F is not positive definite.  In float32 if all arguments are,
        else in float64; the computation is in float64 either way.

    Raises
    ------
    ValueError
        If an argument has the wrong number of dimensions, or a shape that is known does not fit.
    TypeError
        If an argument is complex.

    Notes
    -----
    The pullback is the closed form of the chapters "All ten gradients" and "The adjoint is the
    smoother" (de Jong 1988, doi:10.1093/biomet/75.3.594; Koopman and Shephard 1992,
    doi:10.1093/biomet/79.4.823; Parellier, Barrau and Bonnabel 2023,
    doi:10.1109/TAC.2023.3297879).  Where the predicted covariance settles, it is taken as settled
    once what is left to come is below 1e-13 of it.

    Memory grows linearly with n: a gradient keeps p m + p^2 + 2 m + 3 p numbers of each step, and
    where those of T or Z are asked for m^2 + 2 m more, with m and p rounded up to multiples of
    eight; the value alone keeps m + 2 p.

    Examples
    --------
    >>> import numpy as np
    >>> from helpers.kalman import kalman_loglike
    >>> one, zero = np.eye(1), np.zeros(1)
    >>> y = np.array([[1.0], [np.nan], [0.5]])
    >>> l = kalman_loglike(y, zero, one, zero, zero, one, one, one, one, one)
    >>> l.type.shape
    (3,)
    """
    inputs, varying = _as_inputs(y, a0, P0, c, d, T, Z, R, H, Q)
    return KalmanLoglike(varying)(*inputs)


def kalman_filter_outputs(y, a0, P0, c, d, T, Z, R, H, Q) -> FilterOutputs:
    """All outputs of the filter, symbolically, with a closed-form pullback for any cotangents.

    Parameters
    ----------
    y, a0, P0, c, d, T, Z, R, H, Q : tensor
        As :func:`kalman_loglike`.

    Returns
    -------
    FilterOutputs of TensorVariable

    Raises
    ------
    ValueError, TypeError
        As :func:`kalman_loglike`.
    """
    inputs, varying = _as_inputs(y, a0, P0, c, d, T, Z, R, H, Q)
    return FilterOutputs(*KalmanFilter(varying)(*inputs))


def _as_inputs(*arrays):
    """The ten inputs as tensors of one float type, and the names of those that vary over time."""
    inputs = [pt.as_tensor_variable(X) for X in arrays]
    dtype = np.result_type(np.float32, *(X.type.numpy_dtype for X in inputs))
    if dtype.kind != "f":
        complex_ones = [n for n, X in zip(INPUTS, inputs, strict=True) if X.dtype[0] == "c"]
        raise TypeError(f"{', '.join(complex_ones)} complex, expected real arrays")
    inputs = [X.astype(dtype.name) for X in inputs]
    varying = []
    for name, X in zip(INPUTS, inputs, strict=True):
        dims = ("n", "p") if name == "y" else SHAPES[name]
        may_vary = name != "y" and name not in STATIC
        if X.ndim == len(dims) + 1 and may_vary:
            varying.append(name)
        elif X.ndim != len(dims):
            also = " or with a leading time axis" if may_vary else ""
            raise ValueError(
                f"{name} has {X.ndim} dimensions, expected {len(dims)}: "
                f"({', '.join(dims)}{',' if len(dims) == 1 else ''}){also}"
            )
    _check_shapes(tuple(varying), {n: X.type.shape for n, X in zip(INPUTS, inputs, strict=True)})
    return inputs, tuple(varying)


def _letters(name: str, varying: tuple[str, ...]) -> tuple[str, ...]:
    """The dimensions of an input: ("n", "p") for y."""
    if name == "y":
        return ("n", "p")
    return ("n", *SHAPES[name]) if name in varying else SHAPES[name]


def _check_shapes(varying: tuple[str, ...], shapes: dict) -> None:
    """Raise if shapes (None where a length is not known) do not fit each other.

    y gives n and p, a0 gives m and R gives r.
    """
    (n, p), m, r = shapes["y"], shapes["a0"][-1], shapes["R"][-1]
    sizes = {"n": n, "p": p, "m": m, "r": r}
    for name, shape in shapes.items():
        letters = _letters(name, varying)
        for length, letter in zip(shape, letters, strict=True):
            if length is None:
                continue
            if sizes[letter] is None:
                sizes[letter] = length
            if length != sizes[letter]:
                expected = ", ".join(str(sizes[k]) if sizes[k] else k for k in letters)
                tail = "," if len(letters) == 1 else ""
                raise ValueError(
                    f"{name} has shape {tuple(shape)}, expected "
                    f"({', '.join(letters)}{tail}) = ({expected}{tail})"
                )
    for letter, what in (("n", "step"), ("p", "series"), ("m", "state"), ("r", "shock")):
        if sizes[letter] == 0:
            raise ValueError(f"{letter} = 0: there is no {what}")


class _KalmanOp(Op):
    """What the four Ops share: ten inputs, of which some vary over time."""

    def _signature(self, extra: tuple[str, ...], outputs: tuple[str, ...]) -> str:
        """For batching: (n,p),(m),(m,m),...->(n)."""
        inputs = ["".join(_letters(name, self.varying)) for name in INPUTS] + list(extra)
        return "->".join(",".join(f"({','.join(x)})" for x in side) for side in (inputs, outputs))

    def _shapes(self, inputs) -> dict:
        return {n: X.shape for n, X in zip(INPUTS, inputs[: len(INPUTS)], strict=True)}

    def _outputs_like(self, letters: str, inputs):
        """A tensor type for an output with these dimensions."""
        known = {}
        for name, X in zip(INPUTS, inputs, strict=False):
            for letter, length in zip(_letters(name, self.varying), X.type.shape, strict=True):
                known[letter] = known.get(letter) or length
        return pt.tensor(dtype=inputs[0].dtype, shape=tuple(known[k] for k in letters))

    def _kernel_inputs(self, inputs):
        """y and the nine arrays as the kernels take them: contiguous float64, with a time axis."""
        arrays = [np.ascontiguousarray(X, dtype=np.float64) for X in inputs[: len(INPUTS)]]
        return [
            X if n in ("y", *STATIC) or n in self.varying else X[np.newaxis]
            for n, X in zip(INPUTS, arrays, strict=True)
        ]

    def _store(self, output_storage, values, dtype) -> None:
        for storage, value in zip(output_storage, values, strict=True):
            storage[0] = np.asarray(value, dtype=dtype)


class KalmanLoglike(_KalmanOp):
    """y, a0, P0, c, d, T, Z, R, H, Q -> l (n,)."""

    __props__ = ("varying",)

    def __init__(self, varying: tuple[str, ...] = ()):
        self.varying = varying
        self.gufunc_signature = self._signature((), ("n",))

    def make_node(self, *inputs):
        inputs, varying = _as_inputs(*inputs)
        if varying != self.varying:
            raise ValueError(f"{varying} vary over time, expected {self.varying}")
        return Apply(self, inputs, [self._outputs_like("n", inputs)])

    def perform(self, node, inputs, output_storage):
        from helpers.kalman import compiled

        _check_shapes(self.varying, self._shapes(inputs))
        l = compiled.loglike(*self._kernel_inputs(inputs), TOLERANCE)
        self._store(output_storage, [l], node.outputs[0].dtype)

    def infer_shape(self, node, shapes):
        return [(shapes[0][0],)]

    def pullback(self, inputs, outputs, cotangents):
        (l_bar,) = cotangents
        if isinstance(l_bar.type, DisconnectedType):
            return [disconnected_type() for _ in inputs]
        return KalmanLoglikeGrad(self.varying)(*inputs, l_bar)[1:]


class KalmanLoglikeGrad(_KalmanOp):
    """The ten inputs and l_bar (n,) -> those of `asked`: l, and gradients of sum l_bar l."""

    __props__ = ("varying", "asked")

    def __init__(self, varying: tuple[str, ...] = (), asked: tuple[str, ...] = ("l", *INPUTS)):
        self.varying = varying
        self.asked = asked
        letters = tuple("n" if x == "l" else "".join(_letters(x, varying)) for x in asked)
        self.gufunc_signature = self._signature(("n",), letters)

    def make_node(self, *inputs):
        *model, l_bar = inputs
        model, varying = _as_inputs(*model)
        if varying != self.varying:
            raise ValueError(f"{varying} vary over time, expected {self.varying}")
        l_bar = pt.as_tensor_variable(l_bar).astype(model[0].dtype)
        outputs = [
            self._outputs_like("n" if x == "l" else _letters(x, varying), model) for x in self.asked
        ]
        return Apply(self, [*model, l_bar], outputs)

    def flags(self) -> tuple[bool, bool, bool, bool]:
        """What the kernel is asked for: matrices at all, T, Z, R or Q."""
        T, Z, W = "T" in self.asked, "Z" in self.asked, "R" in self.asked or "Q" in self.asked
        return T or Z or W or "P0" in self.asked or "H" in self.asked, T, Z, W

    def perform(self, node, inputs, output_storage):
        from helpers.kalman import compiled

        _check_shapes(self.varying, self._shapes(inputs))
        l_bar = np.ascontiguousarray(inputs[-1], dtype=np.float64)
        if l_bar.shape != inputs[0].shape[:1]:
            raise ValueError(
                f"l_bar has shape {l_bar.shape}, expected (n,) = {inputs[0].shape[:1]}"
            )
        l, out, y_bar, _ = compiled.loglike_and_grad(
            *self._kernel_inputs(inputs), l_bar, *self.flags(), TOLERANCE
        )
        values = {"l": l, "y": y_bar}
        for name in NAMES:
            X = getattr(out, name)
            values[name] = X if name in STATIC or name in self.varying else X[0]
        self._store(output_storage, [values[x] for x in self.asked], node.outputs[0].dtype)

    def infer_shape(self, node, shapes):
        shape_of = dict(zip(INPUTS, shapes, strict=False)) | {"l": (shapes[0][0],)}
        return [shape_of[x] for x in self.asked]

    def pullback(self, inputs, outputs, cotangents):
        *model, l_bar = inputs
        return _differentiable_pullback(
            model, {"l": l_bar}, dict(zip(self.asked, cotangents, strict=True))
        )


class KalmanFilter(_KalmanOp):
    """y, a0, P0, c, d, T, Z, R, H, Q -> the seven outputs of FilterOutputs."""

    __props__ = ("varying",)

    def __init__(self, varying: tuple[str, ...] = ()):
        self.varying = varying
        self.gufunc_signature = self._signature((), tuple(OUTPUTS.values()))

    def make_node(self, *inputs):
        inputs, varying = _as_inputs(*inputs)
        if varying != self.varying:
            raise ValueError(f"{varying} vary over time, expected {self.varying}")
        return Apply(self, inputs, [self._outputs_like(x, inputs) for x in OUTPUTS.values()])

    def perform(self, node, inputs, output_storage):
        from helpers.kalman import general

        _check_shapes(self.varying, self._shapes(inputs))
        outputs = general.filter_outputs(*self._kernel_inputs(inputs))[: len(OUTPUTS)]
        self._store(output_storage, outputs, node.outputs[0].dtype)

    def infer_shape(self, node, shapes):
        size = {"n": shapes[0][0], "p": shapes[0][1], "m": shapes[1][0]}
        return [tuple(size[k] for k in letters) for letters in OUTPUTS.values()]

    def pullback(self, inputs, outputs, cotangents):
        given = tuple(
            name
            for name, bar in zip(OUTPUTS, cotangents, strict=True)
            if not isinstance(bar.type, DisconnectedType)
        )
        if not given:
            return [disconnected_type() for _ in inputs]
        bars = [bar for bar in cotangents if not isinstance(bar.type, DisconnectedType)]
        return KalmanFilterGrad(self.varying, given)(*inputs, *bars)


class KalmanFilterGrad(_KalmanOp):
    """The ten inputs and the cotangents of the outputs `given` -> the gradients of all inputs."""

    __props__ = ("varying", "given")

    def __init__(self, varying: tuple[str, ...] = (), given: tuple[str, ...] = ("l",)):
        self.varying = varying
        self.given = given
        letters = tuple("".join(_letters(x, varying)) for x in INPUTS)
        self.gufunc_signature = self._signature(tuple(OUTPUTS[x] for x in given), letters)

    def make_node(self, *inputs):
        model, bars = inputs[: len(INPUTS)], inputs[len(INPUTS) :]
        model, varying = _as_inputs(*model)
        if varying != self.varying:
            raise ValueError(f"{varying} vary over time, expected {self.varying}")
        bars = [pt.as_tensor_variable(bar).astype(model[0].dtype) for bar in bars]
        outputs = [self._outputs_like(_letters(x, varying), model) for x in INPUTS]
        return Apply(self, [*model, *bars], outputs)

    def perform(self, node, inputs, output_storage):
        from helpers.kalman import general

        _check_shapes(self.varying, self._shapes(inputs))
        given = dict(zip(self.given, inputs[len(INPUTS) :], strict=True))
        bars = [
            np.ascontiguousarray(given.get(x, np.zeros((0,) * len(letters))), dtype=np.float64)
            for x, letters in OUTPUTS.items()
        ]
        _, out, y_bar = general.reverse(*self._kernel_inputs(inputs), *bars)
        values = [y_bar] + [
            X if name in STATIC or name in self.varying else X[0]
            for name, X in zip(NAMES, out, strict=True)
        ]
        self._store(output_storage, values, node.outputs[0].dtype)

    def infer_shape(self, node, shapes):
        return shapes[: len(INPUTS)]

    def pullback(self, inputs, outputs, cotangents):
        model, bars = inputs[: len(INPUTS)], inputs[len(INPUTS) :]
        return _differentiable_pullback(
            model,
            dict(zip(self.given, bars, strict=True)),
            dict(zip(INPUTS, cotangents, strict=True)),
        )


def _differentiable_pullback(model, bars: dict, cotangents: dict) -> list:
    """The pullback of a gradient: autodiff, twice, of the scan.

    Parameters
    ----------
    model : list of TensorVariable
        The ten inputs.
    bars : dict
        Cotangents of the filter's outputs, by name.
    cotangents : dict
        Cotangents of the gradients (by the input's name) and of l.

    Returns
    -------
    list of TensorVariable
        For the ten inputs and then for each of `bars`.
    """
    by_name = dict(zip(INPUTS, model, strict=True))
    symmetric = {x: (by_name[x] + by_name[x].mT) / 2 for x in ("P0", "H", "Q")}
    outputs = filter_graph(**(by_name | symmetric))
    loss = sum((getattr(outputs, x) * bar).sum() for x, bar in bars.items())
    connected = {
        x: bar for x, bar in cotangents.items() if not isinstance(bar.type, DisconnectedType)
    }
    wrt = [x for x in connected if x != "l"]
    gradients = pt.grad(loss, [by_name[x] for x in wrt], disconnected_inputs="ignore")
    total = sum((connected[x] * G).sum() for x, G in zip(wrt, gradients, strict=True))
    if "l" in connected:
        total = total + (connected["l"] * outputs.l).sum()
    if not connected:
        return [disconnected_type() for _ in (*model, *bars)]
    return pt.grad(total, [*model, *bars.values()], disconnected_inputs="ignore")


def _core(op):
    """The Op itself, also where it runs over a batch."""
    return op.core_op if isinstance(op, Blockwise) else op


def _asking(node, asked: tuple[str, ...]) -> dict:
    """The outputs, by name, of a node like this one that computes those of `asked`."""
    op = KalmanLoglikeGrad(_core(node.op).varying, asked)
    if isinstance(node.op, Blockwise):
        op = Blockwise(op)
    return dict(zip(asked, op(*node.inputs, return_list=True), strict=True))


@register_specialize
@node_rewriter([KalmanLoglikeGrad, Blockwise])
def local_only_asked_gradients(fgraph, node):
    """Compute only the outputs that something reads."""
    if not isinstance(_core(node.op), KalmanLoglikeGrad):
        return None
    old = dict(zip(_core(node.op).asked, node.outputs, strict=True))
    used = tuple(x for x, out in old.items() if fgraph.clients[out])
    if used == tuple(old) or not used:
        return None
    return {old[x]: new for x, new in _asking(node, used).items()}


@register_specialize
@node_rewriter([KalmanLoglike, Blockwise])
def local_value_with_gradient(fgraph, node):
    """Take the log-likelihood from the Op that computes its gradient, if there is one."""
    if not isinstance(_core(node.op), KalmanLoglike):
        return None
    for client, _ in fgraph.clients[node.inputs[0]]:
        op = _core(client.op)
        if not isinstance(op, KalmanLoglikeGrad) or op.varying != _core(node.op).varying:
            continue
        if client.inputs[: len(INPUTS)] != node.inputs:
            continue
        if node.outputs[0] in ancestors(client.inputs[-1:]):
            continue  # the weights depend on the value: no common Op can give both
        old = dict(zip(op.asked, client.outputs, strict=True))
        new = old if "l" in old else _asking(client, ("l", *old))
        if new["l"].type.ndim != node.outputs[0].type.ndim:
            continue  # one of them runs over a batch of weights
        return {node.outputs[0]: new["l"]} | {
            out: new[x] for x, out in old.items() if new is not old
        }
    return None


# Each backend learns the Ops where its package is installed.
import helpers.kalman.dispatch_numba  # noqa: E402, F401

if find_spec("jax"):
    import helpers.kalman.dispatch_jax  # noqa: E402, F401
