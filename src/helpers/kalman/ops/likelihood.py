r"""The Kalman filter over a whole series as one Op, with its gradient in closed form.

:func:`kalman_loglike` is what a model uses: the log-likelihood of each step. Its pullback is one Op
more, `KalmanLoglikeGrad`, which filters and then runs the disturbance smoother backwards where all
steps weigh the same, and the reverse recursion where they do not. When PyTensor compiles a
function, two rewrites leave of it what the function uses: gradients that are not used are not
computed, and the log-likelihood comes with the gradient, without a second run of the filter.
:func:`kalman_filter_outputs` gives all seven outputs of the filter, with a pullback too.

The Ops take W = R Q R' in place of R and Q; PyTensor derives the gradients of these two. They run
in Numba, in C and Python modes (which call the same compiled code), and in JAX mode, which calls it
on a CPU and is pure JAX elsewhere. Second derivatives of the log-likelihood are in closed form too
(`KalmanLoglikeTangent`, the lines of :mod:`helpers.kalman.tangents`); those of the filter's other
outputs fall back to the scan of :mod:`helpers.kalman.scan`.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import grad_not_implemented
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.blockwise import Blockwise

from helpers.kalman.hessian import laid_out
from helpers.kalman.numba_backend import numba_njit
from helpers.kalman.ops.declared import Declared, asked, of_one_float_type, pulled_twice
from helpers.kalman.recursions import TOLERANCE
from helpers.kalman.reference import FilterOutputs
from helpers.kalman.scan import filter_graph_W
from helpers.kalman.shapes import FIXED, NEEDED, check_model
from helpers.statespace import DIMENSIONS, NAMES

INPUTS = tuple(DIMENSIONS)
OUTPUTS = {
    "a_filt": "n m", "a_pred": "n m", "y_hat": "n p",
    "P_filt": "n m m", "P_pred": "n m m", "F": "n p p", "l": "n",
}  # fmt: skip
BARS = f"({', '.join(f'{x}_bar' for x in INPUTS[1:])})"  # the gradients of a model's arrays

THIRD = (
    "third derivatives of the log-likelihood have no closed form here: take it from "
    "helpers.kalman.scan.filter_graph, which PyTensor differentiates as often as you like"
)


def kalman_loglike(y, a0, P0, c, d, T, Z, R, H, Q, tol=TOLERANCE):
    r"""Log-likelihood of each step of a linear Gaussian state space model, symbolically.

    Parameters
    ----------
    y : tensor (n, p)
        Observations; NaN marks a gap.
    a0, P0, c, d, T, Z, R, H, Q : tensor
        The model, as in :class:`helpers.statespace.StateSpace`: any but a0 and P0 may carry a
        leading time axis of length n.  Only the symmetric parts of P0, H and Q count.
    tol : float
        As :func:`helpers.kalman.loglike_and_grad`.

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
    doi:10.1093/biomet/79.4.823; Parellier, Barrau and Bonnabel 2023, doi:10.1109/TAC.2023.3297879).
    Where P0 is vague, the first steps are taken in square-root coordinates, so that no digits are
    lost to it (not in JAX mode on other devices than a CPU, which has no steady state either).

    Memory grows linearly with n: a gradient keeps p m + p^2 + 2 m + 3 p numbers of each step, and
    m^2 + 2 m more if those of T or Z are requested, with m and p rounded up to whole vectors of the
    processor, multiples of four or eight; the value alone keeps m + 2 p.

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
    return loglike_from_W(*from_model(y, a0, P0, c, d, T, Z, R, H, Q), tol=tol)


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
    return filter_outputs_from_W(*from_model(y, a0, P0, c, d, T, Z, R, H, Q))


def loglike_from_W(y, a0, P0, c, d, T, Z, H, W, tol=TOLERANCE):  # noqa: N802
    """:func:`kalman_loglike` with W = R Q R' (m, m) or (n, m, m) in the place of R and Q."""
    inputs = [*map(pt.as_tensor_variable, (y, a0, P0, c, d, T, Z, H, W))]
    return KalmanLoglike(varying_of(inputs), tol)(*inputs)


def filter_outputs_from_W(y, a0, P0, c, d, T, Z, H, W) -> FilterOutputs:  # noqa: N802
    """:func:`kalman_filter_outputs` with W = R Q R' in the place of R and Q."""
    inputs = [pt.as_tensor_variable(X) for X in (y, a0, P0, c, d, T, Z, H, W)]
    return FilterOutputs(*KalmanFilter(varying_of(inputs))(*inputs))


def varying_of(inputs) -> tuple[str, ...]:
    """Names of the inputs with a leading time axis."""
    ranks = zip(DIMENSIONS.items(), inputs, strict=True)
    return tuple(x for (x, dims), X in ranks if x not in FIXED and X.ndim == len(dims) + 1)


def from_model(*arrays) -> list:
    """The Ops' inputs from y and the nine arrays of a model: W = R Q R' for R and Q."""
    given = of_one_float_type(dict(zip(("y", *NAMES), arrays, strict=True)))
    check_model({x: X.type.shape for x, X in given.items()})
    R, Q = given.pop("R"), given.pop("Q")
    if None in (*R.type.shape, *Q.type.shape):  # those that are known have been looked at
        fits = pt.eq(Q.shape[-2], R.shape[-1]) & pt.eq(Q.shape[-1], R.shape[-1])
        message = "Q does not have shape (r, r), with r the number of columns of R"
        Q = CheckAndRaise(ValueError, message)(Q, fits)
    Q = (Q + Q.mT) / 2  # so that its gradient comes out symmetric to the last bit
    return [*given.values(), sandwich(R, Q)]


def less(y, d):
    """y - d, infinite where d is NaN and nothing is missing: a gap is where y is NaN, not d."""
    return y - pt.switch(pt.isnan(d), np.inf, d)


class OfModel(Declared):
    """What the Ops of one series share: nine inputs, of which those `varying` have a time axis."""

    defaults = Declared.defaults | {"varying": (), "along": INPUTS, "given": ("l",)}
    needed = NEEDED
    weights: dict = {}
    many = ""  # an axis in front of each tangent and each output

    def dims(self, x: str) -> str:
        """The dimensions of an input, its gradient and its tangent; of the log-likelihoods."""
        if x == "l":
            return "n"
        return " ".join((*(["n"] if x in self.varying else []), *DIMENSIONS[x]))

    def has_time(self, x: str) -> bool:
        """Whether an input, for which compiled code wants an axis for time, has it."""
        return x in (*FIXED, *self.varying)

    @property
    def inputs(self):
        return {x: self.dims(x) for x in INPUTS} | self.weights

    @property
    def gives(self):
        return {x: self.many + self.dims(x) for x in ("l", *INPUTS)}

    @property
    def looked_at(self):
        # Compiled code takes an axis of length 1 for that of an array that is fixed.
        return tuple(x for x in INPUTS if x not in self.varying)

    def prepare(self):
        fixed = [f"{x} = np.expand_dims({x}, 0)" for x in INPUTS if not self.has_time(x)]
        return fixed + [f"{x} = doubles({x})" for x in self.inputs if not x.endswith("_dot")]

    @property
    def results(self):
        """The gradients, where there are some among the outputs."""
        return {x: f"{x}_bar" if self.has_time(x) else f"{x}_bar[0]" for x in INPUTS}


class KalmanLoglike(OfModel):
    """y, a0, P0, c, d, T, Z, H, W -> l (n,)."""

    __props__ = ("varying", "tol")
    gives = {"l": "n"}
    code, found = "door.loglike", "l"

    def pull(self, X, bars):
        G = KalmanLoglikeGrad(self.varying, INPUTS, self.tol)
        return G.named(*X.values(), bars["l"])

    def push(self, X, dots):
        op = KalmanLoglikeTangent(self.varying, tuple(dots), ("l",), self.tol)
        return op.named(*X.values(), pt.ones_like(X["y"][:, 0]), *dots.values())


class KalmanLoglikeGrad(OfModel):
    """The nine inputs and l_bar (n,) -> what is `requested`: l, and gradients of sum l_bar l."""

    __props__ = ("varying", "requested", "tol")
    unconnected = frozenset({("l_bar", "l")})
    weights, code, found = {"l_bar": "n"}, "door.loglike_and_grad", f"l, {BARS}, y_bar, _"

    def arguments(self):
        return [*self.inputs, *map(str, asked(self.requested)), repr(self.tol)]

    def pull(self, X, bars):
        """The Hessian is symmetric: what pulls back along V is what moves along V."""
        found = self.requesting(("l", *INPUTS)).push(X, of_l_bar(bars))
        return of_l_bar(found)

    def push(self, X, dots):
        along = {x: dot for x, dot in dots.items() if x != "l_bar"}
        found, linear = {}, tuple(x for x in self.requested if x != "l")
        if along:
            op = KalmanLoglikeTangent(self.varying, tuple(along), self.requested, self.tol)
            found = op.named(*X.values(), *along.values())
        if "l_bar" in dots and linear:
            op = KalmanLoglikeGrad(self.varying, linear, self.tol)
            more = op.named(*[X[x] for x in INPUTS], dots["l_bar"])
            found = found | {x: found[x] + G if x in found else G for x, G in more.items()}
        return found


class KalmanLoglikeTangent(OfModel):
    """What :class:`KalmanLoglikeGrad` moves by: a Hessian-vector product.

    The nine inputs, l_bar (n,), and the tangents of those inputs that move, `along` -> the tangents
    of what is `requested`: of l, and of the gradients of sum l_bar l.
    """

    __props__ = ("varying", "along", "requested", "tol")
    looked_at = ()  # tangents are reshaped to what code wants before it looks
    unconnected = frozenset({("l_bar", "l")})
    weights, code = {"l_bar": "n"}, "tangents.hessian_vector"
    found = f"_, l, ({', '.join(f'{x}_bar' for x in INPUTS)})"

    @property
    def inputs(self):
        return super().inputs | {f"{x}_dot": self.many + self.dims(x) for x in self.along}

    def arguments(self):
        many = f"len({self.along[0]}_dot)" if self.many else "1"
        directions = []
        for x in INPUTS:
            shape = ", ".join((many, *map(str, laid_out(x, self.sizes(x)))))
            given = f"contiguous({x}_dot).reshape(({shape}))"
            directions.append(given if x in self.along else f"np.zeros(({shape}))")
        # Those of T and Z, T's everywhere, any gradient's.
        of = "T" in self.requested, "Z" in self.requested, True, self.requested != ("l",)
        return [*INPUTS, "l_bar", *directions, *map(str, of), repr(self.tol)]

    def sizes(self, x: str) -> list[str]:
        """The sizes of an input, with an axis for time, as expressions."""
        return [f"{x}.shape[{i}]" for i in range(len(DIMENSIONS[x]) + (x not in FIXED))]

    @property
    def results(self):
        many = [f"len({self.along[0]}_dot)"] if self.many else []
        shapes = {x: [*many, *self.sizes(x)[not self.has_time(x) :]] for x in INPUTS}
        found = {x: f"{x}_bar.reshape(({', '.join(k)},))" for x, k in shapes.items()}
        return found | {"l": "l" if many else "l[0]"}

    def pull(self, X, bars):
        """In the tangents alone, in which it is linear; the Hessian is symmetric."""
        shared = {x: X[x] for x in (*INPUTS, "l_bar")}
        op = KalmanLoglikeGrad(self.varying, self.along, self.tol)
        found = op.push(shared, of_l_bar(bars))
        third = enumerate(shared.items())
        third = {x: grad_not_implemented(self, i, V, THIRD) for i, (x, V) in third}
        return third | {f"{x}_dot": G for x, G in found.items()}


class KalmanLoglikeTangents(KalmanLoglikeTangent):
    """`KalmanLoglikeTangent` for k directions: each tangent, and each output, has k in front."""

    many = "k "
    pull, missing = None, THIRD


class KalmanFilter(OfModel):
    """y, a0, P0, c, d, T, Z, H, W -> the seven outputs of FilterOutputs."""

    __props__ = ("varying",)
    gives, results = OUTPUTS, {}
    code, found = "outputs.filter_outputs", ", ".join(OUTPUTS)

    def pull(self, X, bars):
        return KalmanFilterGrad(self.varying, tuple(bars)).named(*X.values(), *bars.values())


class KalmanFilterGrad(OfModel):
    """The nine inputs and the cotangents of the outputs `given` -> the gradients of all inputs."""

    __props__ = ("varying", "given")
    code, found = "pulled_outputs.reverse", f"{BARS}, y_bar"

    @property
    def inputs(self):
        return super().inputs | {f"{x}_bar": OUTPUTS[x] for x in self.given}

    @property
    def gives(self):
        return {x: self.dims(x) for x in INPUTS}

    def arguments(self):
        nothing = {x: f"np.zeros({(0,) * len(dims.split())})" for x, dims in OUTPUTS.items()}
        return [*INPUTS, *(f"contiguous({x}_bar)" if x in self.given else nothing[x]
                           for x in OUTPUTS)]  # fmt: skip

    def pull(self, X, bars):
        """Autodiff, twice, of the scan."""

        def outputs(own):
            model = {x: own[x] for x in INPUTS}
            symmetric = {x: (model[x] + model[x].mT) / 2 for x in ("P0", "H", "W")}
            found = filter_graph_W(**(model | symmetric))
            return {x: getattr(found, x) for x in self.given}

        return pulled_twice(outputs, X, bars)


class Product(Declared):
    """A (i, k), B (k, j) -> A B, without BLAS.

    PyTensor's `Dot` calls BLAS for the few products around a filter, from code that Numba compiles
    for half a minute where it is not on disk yet, many times what they are worth.
    """

    inputs = {"A": "i k", "B": "k j"}
    gives = {"C": "i j"}
    found = "C"

    def called(self, compiled):
        return numba_njit(three_loops) if compiled else np.matmul

    def digest(self):
        return f"{super().digest()} {DIGEST}"

    def pull(self, X, bars):
        return {"A": self(bars["C"], X["B"].mT), "B": self(X["A"].mT, bars["C"])}

    def push(self, X, dots):
        moves = [self(*(X | {x: dot}).values()) for x, dot in dots.items()]
        return {"C": sum(moves[1:], moves[0])}


def three_loops(A, B):
    """A B."""
    out = np.zeros((A.shape[0], B.shape[1]))
    for i in range(A.shape[0]):
        for k in range(A.shape[1]):
            for j in range(B.shape[1]):
                out[i, j] += A[i, k] * B[k, j]
    return out


DIGEST = sha256(Path(__file__).read_bytes()).hexdigest()
_product = Product()
_products = Blockwise(_product)


def product(A, B):
    """A B, of matrices or of stacks of them."""
    A, B = pt.as_tensor(A), pt.as_tensor(B)
    return (_product if A.ndim == B.ndim == 2 else _products)(A, B)


def sandwich(R, Q):
    """R Q R'."""
    return product(product(R, Q), R.mT)


def of_l_bar(found: dict) -> dict:
    """The same with l_bar's name for that of l, which is what pulls back to it."""
    return {"l_bar" if x == "l" else x: G for x, G in found.items()}
