r"""The Kalman filter over a whole series as one Op, with its gradient in closed form.

:func:`kalman_loglike` is what a model uses: the log-likelihood of each step.  Its pullback is one
Op more, `KalmanLoglikeGrad`, which filters and then runs the disturbance smoother backwards
where all steps weigh the same, and the reverse recursion where they do not.  When PyTensor
compiles a function, two rewrites leave of it what the function uses: gradients that nobody reads
are not computed, and the log-likelihood comes with the gradient instead of from a filter of its
own.  :func:`kalman_filter_outputs` gives all seven outputs of the filter, with a pullback as well.

The Ops take W = R Q R' in the place of R and Q, whose gradients are PyTensor's business.  They run
in Numba, in C and Python modes (which call the same compiled code), and in JAX mode, which calls it
on a CPU and is pure JAX elsewhere.
Second derivatives of the log-likelihood are in closed form too (`KalmanLoglikeTangent`, the lines
of :mod:`helpers.kalman.tangents`); those of the filter's other outputs fall back to the scan of
:mod:`helpers.kalman.scan`.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.mode import optdb
from pytensor.gradient import DisconnectedType, disconnected_type, grad_not_implemented
from pytensor.graph import Apply, Op, Variable
from pytensor.graph.replace import _vectorize_node
from pytensor.graph.rewriting.basic import GraphRewriter, node_rewriter
from pytensor.graph.traversal import ancestors
from pytensor.raise_op import CheckAndRaise
from pytensor.scan.op import Scan
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.rewriting.basic import register_specialize

from helpers.kalman.fused.building import load
from helpers.kalman.hessian import laid_out
from helpers.kalman.linear import merge, one_map_around
from helpers.kalman.numba_backend import (
    compile_numba_function_src,
    numba_njit,
    register_funcify_and_cache_key,
)
from helpers.kalman.products import fold_constants_into, sandwich
from helpers.kalman.recursions import TOLERANCE
from helpers.kalman.reference import FilterOutputs
from helpers.kalman.scan import filter_graph_W
from helpers.statespace import DIMENSIONS, SHAPES, STATIC, check_tolerance

INPUTS = tuple(DIMENSIONS)
OUTPUTS = {
    "a_filt": "nm", "a_pred": "nm", "y_hat": "np",
    "P_filt": "nmm", "P_pred": "nmm", "F": "npp", "l": "n",
}  # fmt: skip


def kalman_loglike(y, a0, P0, c, d, T, Z, R, H, Q, tol=TOLERANCE):
    r"""Log-likelihood of each step of a linear Gaussian state space model, symbolically.

    Parameters
    ----------
    y : tensor (n, p)
        Observations; NaN marks a gap.
    a0, P0, c, d, T, Z, R, H, Q : tensor
        The model, as in :class:`helpers.statespace.StateSpace`: any but a0 and P0 may carry a
        leading time axis of length n.  P0, H and Q count by their symmetric part.
    tol : float
        What a covariance that is taken to be in its steady state may miss, by estimate, relative to
        its own size; 0 for no steady state.

    Returns
    -------
    TensorVariable (n,)
        NaN throughout where some F is not positive definite.  In float32 if all arguments are,
        else in float64; the computation is in float64 either way (in JAX mode on other devices than
        a CPU: in the type of the inputs).

    Raises
    ------
    ValueError
        If an argument has the wrong number of dimensions, a shape that is known does not fit, or
        tol is negative or NaN.
    TypeError
        If an argument is complex, or tol is symbolic.
    MemoryError
        When the compiled function is called and memory runs out.

    Notes
    -----
    The pullback is the closed form of the chapters "All ten gradients" and "The adjoint is the
    smoother" (de Jong 1988, doi:10.1093/biomet/75.3.594; Koopman and Shephard 1992,
    doi:10.1093/biomet/79.4.823; Parellier, Barrau and Bonnabel 2023,
    doi:10.1109/TAC.2023.3297879).  Where P0 is vague, the first steps are taken in square-root
    coordinates, so that no digit is lost to it (not in JAX mode on other devices than a CPU, which
    has no steady state either).

    Memory grows linearly with n: a gradient keeps p m + p^2 + 2 m + 3 p numbers of each step, and
    where those of T or Z are asked for m^2 + 2 m more, with m and p rounded up to whole vectors of
    the processor, multiples of four or eight; the value alone keeps m + 2 p.

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
    return loglike_from_W(*_from_model(y, a0, P0, c, d, T, Z, R, H, Q), tol=tol)


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
    return filter_outputs_from_W(*_from_model(y, a0, P0, c, d, T, Z, R, H, Q))


def loglike_from_W(y, a0, P0, c, d, T, Z, H, W, tol=TOLERANCE):  # noqa: N802
    """:func:`kalman_loglike` with W = R Q R' (m, m) or (n, m, m) in the place of R and Q."""
    inputs = _as_floats(DIMENSIONS, (y, a0, P0, c, d, T, Z, H, W))
    return KalmanLoglike(_varying(inputs), tol)(*inputs)


def filter_outputs_from_W(y, a0, P0, c, d, T, Z, H, W) -> FilterOutputs:  # noqa: N802
    """:func:`kalman_filter_outputs` with W = R Q R' in the place of R and Q."""
    inputs = _as_floats(DIMENSIONS, (y, a0, P0, c, d, T, Z, H, W))
    return FilterOutputs(*KalmanFilter(_varying(inputs))(*inputs))


def _from_model(*arrays) -> list:
    """The Ops' inputs from y and the nine arrays of a model: W = R Q R' for R and Q."""
    dims = {"y": ("n", "p")} | SHAPES
    given = dict(zip(dims, _as_floats(dims, arrays), strict=True))
    R, Q = given.pop("R"), given.pop("Q")
    if None in (*R.type.shape, *Q.type.shape):  # those that are known have been looked at
        fits = pt.eq(Q.shape[-2], R.shape[-1]) & pt.eq(Q.shape[-1], R.shape[-1])
        message = "Q does not have shape (r, r), with r the number of columns of R"
        Q = CheckAndRaise(ValueError, message)(Q, fits)
    Q = (Q + Q.mT) / 2  # so that its gradient comes out symmetric to the last bit
    return [*given.values(), sandwich(R, Q)]


def tolerance(tol) -> float:
    """A tolerance for an Op, which is compiled for this one number."""
    if isinstance(tol, Variable):
        raise TypeError(f"tol is symbolic ({tol}), expected a number that is not negative")
    return check_tolerance(tol)


def real_tensors(arrays: dict) -> dict:
    """Tensors, by name, none of which is complex."""
    tensors = {x: pt.as_tensor_variable(X) for x, X in arrays.items()}
    complex_ones = [x for x, X in tensors.items() if X.dtype.startswith("complex")]
    if complex_ones:
        raise TypeError(f"{', '.join(complex_ones)} complex, expected real arrays")
    return tensors


def of_one_float_type(arrays: dict) -> dict:
    """The same, of the one float type that holds them all."""
    tensors = real_tensors(arrays)
    dtype = np.result_type(np.float32, *(X.type.numpy_dtype for X in tensors.values()))
    return {x: X.astype(dtype.name) for x, X in tensors.items()}


def _as_floats(dims: dict, arrays) -> list:
    """Tensors of one float type whose dimensions, and shapes where known, fit each other."""
    inputs = list(of_one_float_type(dict(zip(dims, arrays, strict=True))).values())
    for name, X in zip(dims, inputs, strict=True):
        may_vary = name != "y" and name not in STATIC
        if X.ndim - len(dims[name]) not in ((0, 1) if may_vary else (0,)):
            also = " or with a leading time axis" if may_vary else ""
            tail = "," if len(dims[name]) == 1 else ""
            raise ValueError(
                f"{name} has {X.ndim} dimensions, expected {len(dims[name])}: "
                f"({', '.join(dims[name])}{tail}){also}"
            )
    _check_shapes(dims, {name: X.type.shape for name, X in zip(dims, inputs, strict=True)})
    return inputs


def less(y, d):
    """y - d, infinite where d is NaN and nothing is missing: a gap is where y is NaN, not d."""
    return y - pt.switch(pt.isnan(d), np.inf, d)


def _varying(inputs) -> tuple[str, ...]:
    """Names of the inputs with a leading time axis."""
    return tuple(x for x, X in zip(INPUTS, inputs, strict=True) if X.ndim > len(DIMENSIONS[x]))


def _letters(name: str, varying: tuple[str, ...]) -> tuple[str, ...]:
    """The dimensions of an input."""
    return ("n", *DIMENSIONS[name]) if name in varying else DIMENSIONS[name]


def check_lengths(dims: dict, shapes: dict, sizes: dict) -> None:
    """Raise if shapes (None where a length is not known) are not those of `dims`.

    A shape with one axis more than `dims` has one for time first. `sizes` holds the lengths that
    are known, by letter, and is given those that are met on the way.
    """
    for name, shape in shapes.items():
        letters = dims[name] if len(shape) == len(dims[name]) else ("n", *dims[name])
        for length, letter in zip(shape, letters, strict=True):
            if length is None:
                continue
            if sizes.get(letter) is None:
                sizes[letter] = length
            if length != sizes[letter]:
                expected = ", ".join(str(sizes.get(k) or k) for k in letters)
                tail = "," if len(letters) == 1 else ""
                raise ValueError(
                    f"{name} has shape {tuple(shape)}, expected "
                    f"({', '.join(letters)}{tail}) = ({expected}{tail})"
                )


def _check_shapes(dims: dict, shapes: dict) -> None:
    """Raise if shapes (None where a length is not known) do not fit each other.

    y gives n and p, a0 gives m and, where it is there, R gives r.
    """
    sizes = dict(zip("np", shapes["y"], strict=True)) | {"m": shapes["a0"][-1]}
    if "R" in shapes:
        sizes["r"] = shapes["R"][-1]
    check_lengths(dims, shapes, sizes)
    for letter, what in (("n", "step"), ("p", "series"), ("m", "state"), ("r", "shock")):
        if sizes.get(letter) == 0:
            raise ValueError(f"{letter} = 0: there is no {what}")


THIRD = (
    "third derivatives of the log-likelihood have no closed form here: take it from "
    "helpers.kalman.scan.filter_graph, which PyTensor differentiates as often as you like"
)


def as_compiled(arrays) -> list:
    """Arrays such as the passes are compiled for.

    For those of another type, of another layout or read-only, as a batch's are, Numba would compile
    the passes' entries anew, for seconds.
    """
    return [np.require(X, np.float64, "CW") for X in arrays]


class _KalmanOp(Op):
    """What the four Ops share: nine inputs, of which some vary over time."""

    def _signature(self, extra: tuple[str, ...], outputs: tuple[str, ...]) -> str:
        """For batching: (n,p),(m),(m,m),...->(n)."""
        inputs = ["".join(_letters(name, self.varying)) for name in INPUTS] + list(extra)
        return "->".join(",".join(f"({','.join(x)})" for x in side) for side in (inputs, outputs))

    def _model_inputs(self, inputs) -> list:
        """The nine inputs, of one float type, varying as this Op has them."""
        inputs = _as_floats(DIMENSIONS, inputs)
        if _varying(inputs) != self.varying:
            raise ValueError(f"{_varying(inputs)} vary over time, expected {self.varying}")
        return inputs

    def _output(self, letters, inputs):
        """A tensor for an output with these dimensions."""
        known = {}
        for name, X in zip(INPUTS, inputs, strict=True):
            for letter, length in zip(_letters(name, self.varying), X.type.shape, strict=True):
                known[letter] = known.get(letter) or length
        return pt.tensor(dtype=inputs[0].dtype, shape=tuple(known[k] for k in letters))

    def over_time(self, inputs) -> list:
        """The nine inputs with a time axis, of length 1 where they do not vary."""
        _check_shapes(DIMENSIONS, {x: X.shape for x, X in zip(INPUTS, inputs, strict=True)})
        return [
            X if x in ("y", *STATIC, *self.varying) else X[np.newaxis]
            for x, X in zip(INPUTS, inputs, strict=True)
        ]

    def _gradient(self, name: str, out, y_bar):
        """The gradient of an input, among what the compiled pass returns."""
        if name == "y":
            return y_bar
        return getattr(out, name) if name in (*STATIC, *self.varying) else getattr(out, name)[0]

    def _store(self, output_storage, values, dtype) -> None:
        for storage, value in zip(output_storage, values, strict=True):
            storage[0] = np.asarray(value, dtype=dtype)

    def _numba_function(self, node, call: str, extra: tuple[str, ...], results: list[str]):
        """A function of the Op's inputs for Numba, and a key under which it is kept on disk."""
        # What is called compiles itself when it is imported, once for each machine.
        known = {"np": np, "entry": load("entry")}
        for module in ("outputs", "tangents"):
            if f"{module}." in call:
                known[module] = load(module)
        cast = "" if node.inputs[0].dtype == "float64" else f".astype(np.{node.inputs[0].dtype})"
        fixed = [x for x in INPUTS if x not in ("y", *STATIC, *self.varying)]
        name = type(self).__name__
        source = "\n".join(
            [
                f"def {name}({', '.join((*INPUTS, *extra))}):",
                # What is called would take an axis of length 1 for that of an array that is fixed.
                *(
                    f"    if {x}.shape[0] != y.shape[0]: raise ValueError("
                    f"'{x} varies over time, but not over as many steps as y has')"
                    for x in self.varying
                ),
                *(f"    {x} = np.expand_dims({x}, 0)" for x in fixed),
                *(f"    {x} = entry.doubles({x})" for x in (*INPUTS, *extra)),
                f"    {call}",
                f"    return {', '.join(f'{x}{cast}' for x in results)}",
            ]
        )
        key = sha256(f"{source} {known['entry'].DIGEST}".encode()).hexdigest()
        return numba_njit(compile_numba_function_src(source, name, global_env=known)), key

    def _numba_results(self, names) -> list[str]:
        """Expressions of the gradients that the compiled pass returns as out and y_bar."""
        special = {"l": "l", "y": "y_bar"}
        return [
            special.get(x) or (f"out.{x}" if x in (*STATIC, *self.varying) else f"out.{x}[0]")
            for x in names
        ]


class KalmanLoglike(_KalmanOp):
    """y, a0, P0, c, d, T, Z, H, W -> l (n,)."""

    __props__ = ("varying", "tol")

    def __init__(self, varying: tuple[str, ...] = (), tol: float = TOLERANCE):
        self.varying, self.tol = varying, tolerance(tol)
        self.gufunc_signature = self._signature((), ("n",))

    def make_node(self, *inputs):
        inputs = self._model_inputs(inputs)
        return Apply(self, inputs, [self._output("n", inputs)])

    def perform(self, node, inputs, output_storage):
        l = load("entry").loglike(*as_compiled(self.over_time(inputs)), self.tol)
        self._store(output_storage, [l], node.outputs[0].dtype)

    def numba_function(self, node):
        call = f"l = entry.linked_loglike(({', '.join(INPUTS)}, {self.tol!r}))"
        return self._numba_function(node, call, (), ["l"])

    def infer_shape(self, node, shapes):
        return [(shapes[0][0],)]

    def pullback(self, inputs, outputs, cotangents):
        (l_bar,) = cotangents
        if isinstance(l_bar.type, DisconnectedType):
            return [disconnected_type() for _ in inputs]
        return KalmanLoglikeGrad(self.varying, tol=self.tol)(*inputs, l_bar)[1:]

    def pushforward(self, inputs, outputs, tangents):
        along = _connected(INPUTS, tangents)
        if not along:
            return [disconnected_type()]
        op = KalmanLoglikeTangent(self.varying, tuple(along), ("l",), self.tol)
        return [op(*inputs, pt.ones_like(outputs[0]), *along.values())]


class KalmanLoglikeGrad(_KalmanOp):
    """The nine inputs and l_bar (n,) -> what is `requested`: l, and gradients of sum l_bar l."""

    __props__ = ("varying", "requested", "tol")

    def __init__(
        self,
        varying: tuple[str, ...] = (),
        requested: tuple[str, ...] = ("l", *INPUTS),
        tol: float = TOLERANCE,
    ):
        self.varying, self.requested, self.tol = varying, requested, tol
        letters = tuple("n" if x == "l" else "".join(_letters(x, varying)) for x in requested)
        self.gufunc_signature = self._signature(("n",), letters)

    def make_node(self, *inputs):
        *model, l_bar = inputs
        model = self._model_inputs(model)
        (l_bar,) = beside(model, [l_bar], {"l_bar": 1})
        outputs = [
            self._output("n" if x == "l" else _letters(x, self.varying), model)
            for x in self.requested
        ]
        return Apply(self, [*model, l_bar], outputs)

    def flags(self) -> tuple[bool, bool, bool, bool]:
        """What the pass is asked for: matrices at all, T, Z, W."""
        T, Z, W = (x in self.requested for x in "TZW")
        return T or Z or W or "P0" in self.requested or "H" in self.requested, T, Z, W

    def perform(self, node, inputs, output_storage):
        *model, l_bar = inputs
        model = as_compiled(self.over_time(model))
        if l_bar.shape != model[0].shape[:1]:
            raise ValueError(f"l_bar has shape {l_bar.shape}, expected (n,) = ({len(model[0])},)")
        entry = load("entry")
        weights = as_compiled([l_bar])
        l, bars, y_bar, _ = entry.loglike_and_grad(*model, *weights, *self.flags(), self.tol)
        out = entry.Arrays(*bars)
        values = [l if x == "l" else self._gradient(x, out, y_bar) for x in self.requested]
        self._store(output_storage, values, node.outputs[0].dtype)

    def numba_function(self, node):
        flags = ", ".join(map(str, self.flags()))
        arguments = f"{', '.join(INPUTS)}, l_bar, {flags}, {self.tol!r}"
        call = (
            f"l, bars, y_bar, _ = entry.linked_loglike_and_grad(({arguments})); "
            "out = entry.Arrays(*bars)"
        )
        return self._numba_function(node, call, ("l_bar",), self._numba_results(self.requested))

    def infer_shape(self, node, shapes):
        shape_of = dict(zip(INPUTS, shapes, strict=False)) | {"l": (shapes[0][0],)}
        return [shape_of[x] for x in self.requested]

    def requesting(self, requested: tuple[str, ...]) -> KalmanLoglikeGrad:
        """The Op that computes these of its outputs."""
        return KalmanLoglikeGrad(self.varying, requested, self.tol)

    def pullback(self, inputs, outputs, cotangents):
        """The Hessian is symmetric: what pulls back along V is what moves along V."""
        *model, l_bar = inputs
        along = _connected(self.requested, cotangents)
        l_bar_bar = along.pop("l", None)
        found = [disconnected_type() for _ in inputs]
        if along:
            l_dot, *moved = KalmanLoglikeTangent(self.varying, tuple(along), tol=self.tol)(
                *inputs, *along.values(), return_list=True
            )
            found = [*moved, l_dot]
        if l_bar_bar is not None:
            more = KalmanLoglikeGrad(self.varying, INPUTS, self.tol)(*model, l_bar_bar)
            found[:-1] = [X + G for X, G in zip(found[:-1], more, strict=True)] if along else more
        return found

    def pushforward(self, inputs, outputs, tangents):
        *model, _ = inputs
        *moves, l_bar_dot = tangents
        along, more = _connected(INPUTS, moves), {}
        requested = tuple(x for x in self.requested if along)
        if along:
            more = dict(
                zip(
                    requested,
                    KalmanLoglikeTangent(self.varying, tuple(along), requested, self.tol)(
                        *inputs, *along.values(), return_list=True
                    ),
                    strict=True,
                )
            )
        if not isinstance(l_bar_dot.type, DisconnectedType):
            linear = tuple(x for x in self.requested if x != "l")
            op = KalmanLoglikeGrad(self.varying, linear, self.tol)
            for x, G in zip(linear, op(*model, l_bar_dot, return_list=True), strict=True):
                more[x] = more[x] + G if x in more else G
        return [more.get(x, disconnected_type()) for x in self.requested]


class KalmanLoglikeTangent(_KalmanOp):
    """What :class:`KalmanLoglikeGrad` moves by: a Hessian-vector product.

    The nine inputs, l_bar (n,), and the tangents of those inputs that move, `along` -> the tangents
    of what is `requested`: of l, and of the gradients of sum l_bar l.
    """

    __props__ = ("varying", "along", "requested", "tol")
    directions = 0  # axes in front of a tangent

    def __init__(
        self,
        varying: tuple[str, ...] = (),
        along: tuple[str, ...] = INPUTS,
        requested: tuple[str, ...] = ("l", *INPUTS),
        tol: float = TOLERANCE,
    ):
        self.varying, self.along, self.requested = varying, along, requested
        self.tol = tol
        letters = tuple("n" if x == "l" else "".join(_letters(x, varying)) for x in requested)
        extra = ("n", *("".join(_letters(x, varying)) for x in along))
        self.gufunc_signature = self._signature(extra, letters)

    def requesting(self, requested: tuple[str, ...]) -> KalmanLoglikeTangent:
        """The Op that computes these of its outputs."""
        return KalmanLoglikeTangent(self.varying, self.along, requested, self.tol)

    def make_node(self, *inputs):
        model = self._model_inputs(inputs[: len(INPUTS)])
        ranks = {f"the tangent of {x}": len(_letters(x, self.varying)) for x in self.along}
        ranks = {x: rank + self.directions for x, rank in ranks.items()}
        extra = beside(model, inputs[len(INPUTS) :], {"l_bar": 1} | ranks)
        outputs = [
            self._output("n" if x == "l" else _letters(x, self.varying), model)
            for x in self.requested
        ]
        return Apply(self, [*model, *extra], outputs)

    def flags(self) -> tuple[bool, bool, bool, bool]:
        """Which gradients' tangents are asked for: T's, Z's, T's everywhere, any."""
        return "T" in self.requested, "Z" in self.requested, True, self.requested != ("l",)

    def many(self, given) -> tuple:
        """The leading axes of tangents: none."""
        return ()

    def perform(self, node, inputs, output_storage):
        model = self.over_time(inputs[: len(INPUTS)])
        l_bar, *given = inputs[len(INPUTS) :]
        many = self.many(given)
        self.check_extra(model, l_bar, given, many)
        given, dots = dict(zip(self.along, given, strict=True)), []
        for x, X in zip(INPUTS, model, strict=True):
            shape = (*(many or (1,)), *laid_out(x, X.shape))
            dots.append(np.reshape(given[x], shape) if x in given else np.zeros(shape))
        arrays = as_compiled([*model, l_bar, *dots])
        _, l, bars = load("tangents").hessian_vector(*arrays, *self.flags(), self.tol)
        shapes = dict(zip(INPUTS, (X.shape for X in inputs), strict=False)) | {"l": l_bar.shape}
        found = dict(zip(INPUTS, bars, strict=True)) | {"l": l}
        values = [found[x].reshape(*many, *shapes[x]) for x in self.requested]
        self._store(output_storage, values, node.outputs[0].dtype)

    def check_extra(self, model, l_bar, given, many) -> None:
        if l_bar.shape != model[0].shape[:1]:
            raise ValueError(f"l_bar has shape {l_bar.shape}, expected (n,) = ({len(model[0])},)")
        shapes = dict(zip(INPUTS, (X.shape for X in model), strict=True))
        for x, X in zip(self.along, given, strict=True):
            expected = shapes[x] if x in ("y", *STATIC, *self.varying) else shapes[x][1:]
            if X.shape != (*many, *expected):
                raise ValueError(
                    f"the tangent of {x} has shape {X.shape}, expected {(*many, *expected)}"
                )

    def numba_function(self, node):
        def sizes(x, keep_time):
            """The sizes of x, whose time axis is there even where it does not vary."""
            rank = len(DIMENSIONS[x]) + (x not in ("y", *STATIC))
            return [f"{x}.shape[{i}]" for i in range(0 if keep_time else 1, rank)]

        many, moves, lines = self._many_in_numba, [], []
        for x in INPUTS:
            shape = ", ".join(map(str, (many or "1", *laid_out(x, sizes(x, True)))))
            given = f"entry.contiguous({x}_moves).reshape(({shape}))"
            moves.append(given if x in self.along else f"np.zeros(({shape}))")
        for x in self.along:
            shape = [many] if many else []
            shape += sizes(x, x in ("y", *STATIC, *self.varying))
            lines.append(
                f"if {x}_moves.shape != ({', '.join(shape)},): raise ValueError("
                f"'the tangent of {x} does not have the shape of {x}')"
            )
        lines.append(
            f"_, l, ({', '.join(f'{x}_moved' for x in INPUTS)},) = tangents.linked_hessian_vector(("
            f"{', '.join((*INPUTS, 'l_bar', *moves, *map(str, self.flags()), repr(self.tol)))}))"
        )
        results = []
        for x in self.requested:
            if x == "l":
                results.append("l" if many else "l[0]")
                continue
            keep = x in ("y", *STATIC, *self.varying)
            shape = [many, *sizes(x, keep)] if many else sizes(x, keep)
            results.append(f"{x}_moved.reshape(({', '.join(shape)},))")
        extra = ("l_bar", *(f"{x}_moves" for x in self.along))
        return self._numba_function(node, "\n    ".join(lines), extra, results)

    @property
    def _many_in_numba(self) -> str:
        """As `many`."""
        return ""

    def infer_shape(self, node, shapes):
        shape_of = dict(zip(INPUTS, shapes, strict=False)) | {"l": (shapes[0][0],)}
        return [shape_of[x] for x in self.requested]

    def pullback(self, inputs, outputs, cotangents):
        """In the tangents alone, in which it is linear; the Hessian is symmetric."""
        model, fixed = inputs[: len(INPUTS)], len(INPUTS) + 1
        bars = _connected(self.requested, cotangents)
        weights, found = bars.pop("l", None), [disconnected_type() for _ in self.along]
        if bars:
            op = KalmanLoglikeTangent(self.varying, tuple(bars), self.along, self.tol)
            found = op(*inputs[:fixed], *bars.values(), return_list=True)
        if weights is not None:
            op = KalmanLoglikeGrad(self.varying, self.along, self.tol)
            more = op(*model, weights, return_list=True)
            found = [X + G for X, G in zip(found, more, strict=True)] if bars else more
        return [
            grad_not_implemented(self, i, X, THIRD) for i, X in enumerate(inputs[:fixed])
        ] + found


class KalmanFilter(_KalmanOp):
    """y, a0, P0, c, d, T, Z, H, W -> the seven outputs of FilterOutputs."""

    __props__ = ("varying",)

    def __init__(self, varying: tuple[str, ...] = ()):
        self.varying = varying
        self.gufunc_signature = self._signature((), tuple(OUTPUTS.values()))

    def make_node(self, *inputs):
        inputs = self._model_inputs(inputs)
        return Apply(self, inputs, [self._output(x, inputs) for x in OUTPUTS.values()])

    def perform(self, node, inputs, output_storage):
        values = load("outputs").filter_outputs(*as_compiled(self.over_time(inputs)))
        self._store(output_storage, values, node.outputs[0].dtype)

    def numba_function(self, node):
        call = f"{', '.join(OUTPUTS)} = outputs.linked_filter_outputs(({', '.join(INPUTS)}))"
        return self._numba_function(node, call, (), list(OUTPUTS))

    def infer_shape(self, node, shapes):
        size = {"n": shapes[0][0], "p": shapes[0][1], "m": shapes[1][0]}
        return [tuple(size[k] for k in letters) for letters in OUTPUTS.values()]

    def pullback(self, inputs, outputs, cotangents):
        bars = _connected(OUTPUTS, cotangents)
        if not bars:
            return [disconnected_type() for _ in inputs]
        return KalmanFilterGrad(self.varying, tuple(bars))(*inputs, *bars.values())


class KalmanFilterGrad(_KalmanOp):
    """The nine inputs and the cotangents of the outputs `given` -> the gradients of all inputs."""

    __props__ = ("varying", "given")

    def __init__(self, varying: tuple[str, ...] = (), given: tuple[str, ...] = ("l",)):
        self.varying = varying
        self.given = given
        letters = tuple("".join(_letters(x, varying)) for x in INPUTS)
        self.gufunc_signature = self._signature(tuple(OUTPUTS[x] for x in given), letters)

    def make_node(self, *inputs):
        model, bars = self._model_inputs(inputs[: len(INPUTS)]), inputs[len(INPUTS) :]
        bars = beside(model, bars, {f"the cotangent of {x}": len(OUTPUTS[x]) for x in self.given})
        outputs = [self._output(_letters(x, self.varying), model) for x in INPUTS]
        return Apply(self, [*model, *bars], outputs)

    def perform(self, node, inputs, output_storage):
        model = as_compiled(self.over_time(inputs[: len(INPUTS)]))
        given = dict(zip(self.given, inputs[len(INPUTS) :], strict=True))
        bars = as_compiled(given.get(x, np.zeros((0,) * len(k))) for x, k in OUTPUTS.items())
        out, y_bar = load("outputs").reverse(*model, *bars)
        values = [self._gradient(x, out, y_bar) for x in INPUTS]
        self._store(output_storage, values, node.outputs[0].dtype)

    def numba_function(self, node):
        bars = ", ".join(
            f"entry.contiguous({x}_bar)" if x in self.given else f"np.zeros({(0,) * len(letters)})"
            for x, letters in OUTPUTS.items()
        )
        call = f"out, y_bar = outputs.linked_reverse(({', '.join(INPUTS)}, {bars}))"
        extra = tuple(f"{x}_bar" for x in self.given)
        return self._numba_function(node, call, extra, self._numba_results(INPUTS))

    def infer_shape(self, node, shapes):
        return shapes[: len(INPUTS)]

    def pullback(self, inputs, outputs, cotangents):
        model, bars = inputs[: len(INPUTS)], inputs[len(INPUTS) :]
        along = _connected(INPUTS, cotangents)
        if not along:
            return [disconnected_type() for _ in inputs]
        return _differentiable_pullback(model, dict(zip(self.given, bars, strict=True)), along)


@register_funcify_and_cache_key(KalmanLoglike)
@register_funcify_and_cache_key(KalmanLoglikeGrad)
@register_funcify_and_cache_key(KalmanLoglikeTangent)
@register_funcify_and_cache_key(KalmanFilter)
@register_funcify_and_cache_key(KalmanFilterGrad)
def numba_funcify_kalman(op, node, **kwargs):
    return op.numba_function(node)


def beside(model, variables, ndims: dict) -> list:
    """Tensors of the model's type, each with its number of dimensions."""
    tensors = [pt.as_tensor_variable(X).astype(model[0].dtype) for X in variables]
    for (name, ndim), X in zip(ndims.items(), tensors, strict=True):
        if X.ndim != ndim:
            raise ValueError(f"{name} has {X.ndim} dimensions, expected {ndim}")
    return tensors


def _connected(names, variables) -> dict:
    """Those variables that are connected, by their names."""
    return {
        x: X
        for x, X in zip(names, variables, strict=True)
        if not isinstance(X.type, DisconnectedType)
    }


@_vectorize_node.register(KalmanLoglike)
def vectorize_loglike(op, node, *inputs):
    """A batch of series that share their model is one Op, which stands upon this module."""
    from helpers.kalman.panel_op import vectorize

    return vectorize(op, node, *inputs)


@_vectorize_node.register(KalmanLoglikeTangent)
def vectorize_tangent(op, node, *inputs):
    """A batch of directions is one Op, which stands upon this module, too."""
    from helpers.kalman.directions_op import vectorize

    return vectorize(op, node, *inputs)


def _differentiable_pullback(model, bars: dict, cotangents: dict) -> list:
    """The pullback of a gradient: autodiff, twice, of the scan.

    Parameters
    ----------
    model : list of TensorVariable
        The nine inputs.
    bars : dict
        Cotangents of the filter's outputs, by name.
    cotangents : dict
        Cotangents of the gradients, by the input's name.

    Returns
    -------
    list of TensorVariable
        For the nine inputs and then for each of `bars`.
    """
    by_name = dict(zip(INPUTS, model, strict=True))
    symmetric = {x: (by_name[x] + by_name[x].mT) / 2 for x in ("P0", "H", "W")}
    outputs = filter_graph_W(**(by_name | symmetric))
    loss = sum((getattr(outputs, x) * bar).sum() for x, bar in bars.items())
    gradients = pt.grad(loss, [by_name[x] for x in cotangents], disconnected_inputs="ignore")
    total = sum((bar * G).sum() for bar, G in zip(cotangents.values(), gradients, strict=True))
    return pt.grad(total, [*model, *bars.values()], disconnected_inputs="ignore")


def _core(op):
    """The Op itself, also where it runs over a batch."""
    return op.core_op if isinstance(op, Blockwise) else op


def _requesting(node, requested: tuple[str, ...]) -> dict:
    """The outputs, by name, of a node like this one that computes those of `requested`."""
    op = _core(node.op).requesting(requested)
    if isinstance(node.op, Blockwise):
        op = Blockwise(op)
    return dict(zip(requested, op(*node.inputs, return_list=True), strict=True))


def only_what_is_read(fgraph, node):
    """A node that computes only those of its outputs that something reads, in the place of this."""
    old = dict(zip(_core(node.op).requested, node.outputs, strict=True))
    used = tuple(x for x, out in old.items() if fgraph.clients[out])
    if used == tuple(old) or not used:
        return None
    return {old[x]: new for x, new in _requesting(node, used).items()}


def value_with_gradient(fgraph, node, kind, name="l"):
    """The first output of this node from a node of this kind that computes its gradient, if any.

    Such a node has the same first inputs; its weights, if it has any, come after them.
    """
    core, (value, *_), given = _core(node.op), node.outputs, len(node.inputs)
    for client, _ in fgraph.clients[node.inputs[0]]:
        op = _core(client.op)
        if not isinstance(op, kind) or op.tol != core.tol:
            continue
        if getattr(op, "varying", ()) != getattr(core, "varying", ()):
            continue
        if client.inputs[:given] != node.inputs:
            continue
        if value in ancestors(client.inputs[given:]):
            continue  # the weights depend on the value: no common Op can give both
        old = dict(zip(op.requested, client.outputs, strict=True))
        new = old if name in old else _requesting(client, (name, *old))
        if new[name].type.ndim != value.type.ndim:
            continue  # one of them runs over a batch of weights
        return {value: new[name]} | {out: new[x] for x, out in old.items() if new is not old}
    return None


@register_specialize
@node_rewriter([KalmanLoglikeGrad, KalmanLoglikeTangent, Blockwise])
def local_only_requested_gradients(fgraph, node):
    """Compute only the outputs that something reads."""
    if not isinstance(_core(node.op), KalmanLoglikeGrad | KalmanLoglikeTangent):
        return None
    return only_what_is_read(fgraph, node)


@register_specialize
@node_rewriter([KalmanLoglike, Blockwise])
def local_value_with_gradient(fgraph, node):
    """Take the log-likelihood from the Op that computes its gradient, if there is one."""
    if not isinstance(_core(node.op), KalmanLoglike):
        return None
    return value_with_gradient(fgraph, node, KalmanLoglikeGrad)


class _TeachJAX(GraphRewriter):
    """JAX mode, and no other, begins with this rewrite: JAX learns the Ops, nothing changes."""

    def apply(self, fgraph):
        from helpers.kalman.jax import register_ops

        register_ops()


optdb.register("helpers_kalman_jax", _TeachJAX(), "jax", position=0)


class _ManyDirections(GraphRewriter):
    """The rows of a Hessian at once, where PyTensor would compute them one by one."""

    def apply(self, fgraph):
        if any(isinstance(node.op, Scan) for node in fgraph.apply_nodes):
            from helpers.kalman.directions_op import unroll

            unroll(fgraph)


class _OneNode(GraphRewriter):
    """Several gradients or tangents at once, where PyTensor would compute them one by one."""

    def __init__(self, rewrite: str):
        self.rewrite_name = rewrite

    def apply(self, fgraph):
        kinds = KalmanLoglikeGrad | KalmanLoglikeTangent
        if sum(isinstance(node.op, kinds) for node in fgraph.apply_nodes) > 1:
            from helpers.kalman import directions_op

            merge(fgraph)
            getattr(directions_op, self.rewrite_name)(fgraph)


# Before the rewrites of Scan, which take it apart; where sums of sums are one; and where what
# nothing reads is gone.
optdb.register("helpers_kalman_directions", _ManyDirections(), "fast_run", position=0.04)
optdb.register("helpers_kalman_unite", _OneNode("unite"), "fast_run", position=1.25)
optdb.register("helpers_kalman_share", _OneNode("share"), "fast_run", position=2.9)
fold_constants_into(_KalmanOp)
one_map_around(_KalmanOp)
