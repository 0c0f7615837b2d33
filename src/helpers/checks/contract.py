"""Does this Op keep PyTensor's contract?  One function that attacks it from every side."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import Mode
from pytensor.gradient import (
    DisconnectedInputError,
    NullTypeGradError,
    disconnected_grad,
    pullback,
    pushforward,
)
from pytensor.graph.op import Op
from pytensor.graph.replace import vectorize_graph

from helpers.checks.gradients import complex_step, finite_difference, step_sweep

__all__ = ["Attack", "Report", "attack"]

PYTHON = Mode(linker="py", optimizer="fast_compile")  # compiles nothing
DIFFERENCES = 1e-5  # what central differences can be trusted to
SINGLE = 1e-3  # float32, after a short computation
OUTSIDE = 8  # entries on each side of an input that must not matter


@dataclass(frozen=True)
class Attack:
    """One line of a :class:`Report`.

    Parameters
    ----------
    name : str
    status : ``"ok"``, ``"note"``, ``"skipped"`` or ``"FAULT"``
    says : str
        What was found, in a sentence; may be empty where all is well.
    """

    name: str
    status: str
    says: str = ""


@dataclass(frozen=True)
class Report:
    """What :func:`attack` found.  It prints as a table.

    Parameters
    ----------
    target : str
        The Op or function attacked.
    attacks : list of Attack
    """

    target: str
    attacks: list[Attack] = field(default_factory=list)

    @property
    def faults(self) -> list[Attack]:
        """The attacks that found a fault."""
        return [a for a in self.attacks if a.status == "FAULT"]

    def __str__(self) -> str:
        wide = max((len(a.name) for a in self.attacks), default=0)
        lines = [f"{a.name:{wide}}  {a.status:7}  {a.says}".rstrip() for a in self.attacks]
        count = len(self.faults)
        found = "no fault" if not count else "1 fault" if count == 1 else f"{count} faults"
        return "\n".join([f"{self.target}: {found} found", *lines])

    __repr__ = __str__


def attack(
    op: Callable,
    *inputs,
    truth: Callable | None = None,
    cases: Mapping[str, Sequence] | None = None,
    refused: Mapping[str, Sequence] | None = None,
    backends: Sequence[str] = ("numba", "jax"),
    rtol: float = 1e-9,
    raises: bool = True,
    seed: int = 0,
) -> Report:
    """Attack an Op, or a function that builds a graph, and say what breaks.

    One example of valid inputs is enough to attack

    - the types: integers for floats, float32, another number of dimensions, empty arrays, arrays
      that are not contiguous, declared against returned dtypes and shapes;
    - the memory: inputs overwritten or handed back, an answer overwritten by the next call, entries
      beyond the ends of an input that change the answer;
    - the derivatives: ``pullback`` and ``pushforward`` against complex steps through `truth` (or
      central differences) and against each other, their linearity, disconnected tangents and
      cotangents, integer inputs, the second order;
    - the shapes without the values (``infer_shape``), batches made by ``vectorize_graph`` against
      a loop, and the backends against Python mode.

    Parameters
    ----------
    op : Op, or function of symbols to a variable or a list of them
    *inputs : arrays of real numbers or integers
        A valid example, away from kinks and from the ends of the domain.  Take sizes that differ
        where they may: a wrong ``infer_shape`` that swaps two equal sizes cannot be seen.
    truth : function of arrays to an array or a list of them, optional
        NumPy code that is independent of the Op.  If it carries complex numbers, derivatives are
        compared with complex steps.
    cases : dict of name -> inputs, optional
        Further inputs of the same types (sizes may differ), for values, shapes and backends.  Where
        there is no answer, `truth` should return NaN.
    refused : dict of name -> inputs, optional
        Inputs that must raise an error in every backend, such as labels out of range.
    backends : sequence of ``"numba"``, ``"jax"``
        What is compared with Python mode.  Compiling takes seconds; ``()`` compiles nothing.
    rtol : float
        Tolerance where float64 is compared with float64 or complex steps, relative to the largest
        entry.  Comparisons with central differences and of float32 have their own.
    raises : bool
        Raise if there is a fault.  Otherwise return the report, faults and all.
    seed : int
        For tangents and cotangents.

    Returns
    -------
    Report

    Raises
    ------
    TypeError
        If an input is neither real nor integer, or there is none.
    AssertionError
        If there is a fault: the report's table.

    Notes
    -----
    PyTensor compiles no graph that contains an Op with a ``destroy_map``: attack the twin of such
    an Op that copies.
    """
    arrays = [np.asarray(x) for x in inputs]
    if not arrays:
        raise TypeError("attack needs an example of inputs: attack(op, x, ...)")
    for k, x in enumerate(arrays):
        if x.dtype.kind not in "fiub":
            raise TypeError(f"input {k} has dtype {x.dtype}, expected real numbers or integers")
    unknown = set(backends) - {"numba", "jax"}
    if unknown:
        raise ValueError(f"unknown backends {sorted(unknown)}, expected 'numba' or 'jax'")
    arrays = [x.astype("float64") if x.dtype.kind == "f" else x for x in arrays]
    run = _Run(op, arrays, truth, rtol, np.random.default_rng(seed))
    run.all(dict(cases or {}), dict(refused or {}), tuple(backends))
    report = Report(_name(op), run.found)
    if raises and report.faults:
        raise AssertionError(str(report))
    return report


class _Found(Exception):  # noqa: N818 (it ends an attack and is not an error)
    """Ends an attack that has something to say."""

    def __init__(self, says: str, status: str = "FAULT"):
        super().__init__(says)
        self.says, self.status = says, status


class _Run:
    """The state of one call of :func:`attack`: the example, its graph, and what was found."""

    def __init__(self, op, arrays, truth, rtol, rng):
        self.op, self.arrays, self.truth, self.rtol, self.rng = op, arrays, truth, rtol, rng
        self.is_op = isinstance(op, Op)
        self.labels = _labels(op, len(arrays))
        self.found: list[Attack] = []

    # --- the order of the attacks ---

    def all(self, cases, refused, backends):
        if not self.attempt("runs in Python", self.example):
            return
        here = [("value", self.value)] if self.truth else []
        here += [
            ("repeated call", self.repeated),
            ("memory of the inputs", lambda: self.memory(self.by_python)),
            ("shape alone", lambda: self.shapes(cases)),
            ("integers for floats", lambda: self.integers(PYTHON)),
            ("float32", lambda: self.single(PYTHON)),
            ("number of dimensions", self.dimensions),
            ("empty", self.empty),
            ("not contiguous", lambda: self.strided(self.by_python)),
        ]
        for name, what in here:
            self.attempt(name, what)
        self.derivatives()
        self.attempt("batched", self.batched)
        for name, case in cases.items():
            self.attempt(f"case: {name}", lambda case=case: self.case(case))
        for name, case in refused.items():
            self.attempt(f"refused: {name}", lambda case=case: self.refuses(case, PYTHON))
        for backend in backends:
            self.backend(backend, cases, refused)

    def attempt(self, name, what) -> bool:
        """Run one attack and record how it ended; whether without a fault."""
        try:
            says, status = what() or "", "ok"
        except _Found as found:
            says, status = found.says, found.status
        except Exception as error:
            says, status = f"unexpected {_brief(error)}", "FAULT"
        self.found.append(Attack(name, status, says))
        return status != "FAULT"

    # --- building and running ---

    def build(self, arrays, dtypes=None, shapes=None):
        """Symbols for these arrays, and the outputs of the Op as a list."""
        dtypes = dtypes or [x.dtype for x in arrays]
        shapes = shapes or [(None,) * x.ndim for x in arrays]
        symbols = [
            pt.tensor(name, dtype=str(dtype), shape=shape)
            for name, dtype, shape in zip(self.labels, dtypes, shapes, strict=True)
        ]
        return symbols, self.outputs_of(symbols)

    def outputs_of(self, symbols):
        outputs = self.op(*symbols)
        return list(outputs) if isinstance(outputs, list | tuple) else [outputs]

    def compiled(self, inputs, outputs, mode=PYTHON):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pytensor.function(inputs, outputs, mode=mode, on_unused_input="ignore")

    def example(self):
        self.xs, self.ys = self.build(self.arrays)
        self.by_python = self.compiled(self.xs, self.ys)
        before = [x.copy() for x in self.arrays]
        self.values = [np.array(y) for y in self.by_python(*self.arrays)]
        self.unharmed(self.arrays, before)
        self.as_declared(self.ys, self.by_python(*self.arrays))
        self.moving = [k for k, x in enumerate(self.arrays) if x.dtype.kind == "f"]
        self.smooth = [j for j, y in enumerate(self.ys) if y.type.dtype.startswith("float")]

    def unharmed(self, arrays, before):
        for label, x, old in zip(self.labels, arrays, before, strict=True):
            if not np.array_equal(x, old, equal_nan=x.dtype.kind == "f"):
                raise _Found(f"{label} is overwritten: copy it, or declare it in destroy_map")

    def as_declared(self, ys, values):
        for j, (y, value) in enumerate(zip(ys, values, strict=True)):
            returned = getattr(value, "dtype", type(value).__name__)
            if str(returned) != y.type.dtype:
                raise _Found(f"output {j} is declared {y.type.dtype} and returned as {returned}")
            shape = getattr(value, "shape", ())
            fits = len(shape) == y.type.ndim and all(
                s in (None, n) for s, n in zip(y.type.shape, shape, strict=True)
            )
            if not fits:
                raise _Found(f"output {j} is declared with shape {y.type.shape}, but has {shape}")

    # --- values and memory ---

    def value(self):
        self.right(self.arrays, self.values)

    def right(self, arrays, values):
        expected = _many(self.truth(*arrays))
        for j, (value, true) in enumerate(zip(values, expected, strict=True)):
            self.compare(f"output {j}", value, true, "the truth", self.rtol)

    def case(self, case):
        case = self.checked_case(case)
        values = self.by_python(*case)
        self.as_declared(self.ys, values)
        if self.truth:
            self.right(case, values)

    def checked_case(self, case):
        return [np.asarray(x).astype(s.type.dtype) for x, s in zip(case, self.xs, strict=True)]

    def repeated(self):
        """A second call must not reach the answer of the first, nor the inputs."""
        first = self.by_python(*self.arrays)
        for j, y in enumerate(first):
            for label, x in zip(self.labels, self.arrays, strict=True):
                if np.shares_memory(y, x):
                    raise _Found(f"output {j} is a view of {label}: copy it, or declare view_map")
        kept = [y.copy() for y in first]
        other = [x * (1 + 1e-3) if k in self.moving else x for k, x in enumerate(self.arrays)]
        _outcome(lambda: self.by_python(*other))
        for j, (y, old) in enumerate(zip(first, kept, strict=True)):
            if not _same(y, old):
                raise _Found(f"the next call overwrites output {j}: return a new array each time")
        if not all(map(_same, self.by_python(*self.arrays), self.values)):
            raise _Found("the same inputs give another answer after a call with other inputs")

    def memory(self, f):
        """Neighbours in memory of the inputs neither matter nor change."""
        answers = []
        for wall in (np.nan, 7.0):
            walled, buffers = zip(*(_walled(x, wall) for x in self.arrays), strict=True)
            before = [b.copy() for b in buffers]
            answers.append([np.array(y) for y in f(*walled)])
            for label, b, old in zip(self.labels, buffers, before, strict=True):
                if not _same(b, old):
                    raise _Found(f"writes to {label} or beyond its ends")
        if not all(map(_same, *answers)):
            raise _Found("the answer depends on memory beyond the ends of an input")

    def shapes(self, cases):
        with pytensor.config.change_flags(on_shape_error="raise"):
            f = self.compiled(self.xs, [y.shape for y in self.ys])
        examples = [self.arrays, *(self.checked_case(c) for c in cases.values())]
        for arrays in examples:
            self.same_shapes(f(*arrays), self.by_python(*arrays))
        if self.is_op and any(node.op == self.op for node in f.maker.fgraph.toposort()):
            raise _Found("no infer_shape: to know a shape, the Op has to run", "note")

    def same_shapes(self, shapes, values):
        for j, (shape, value) in enumerate(zip(shapes, values, strict=True)):
            said = tuple(map(int, shape))
            if said != value.shape:
                raise _Found(f"infer_shape gives output {j} the shape {said}, it has {value.shape}")

    # --- types ---

    def integers(self, mode):
        """Integers are answered like the floats of the same values, or refused when built."""
        refused = []
        for k in self.moving:
            whole = np.rint(self.arrays[k])
            floats = [whole if i == k else x for i, x in enumerate(self.arrays)]
            ints = [whole.astype("int64") if i == k else x for i, x in enumerate(self.arrays)]
            try:
                xs, ys = self.build(ints)
            except Exception:
                refused.append(self.labels[k])
                continue
            f = self.compiled(xs, ys, mode)
            by_ints = _outcome(lambda f=f, ints=ints: f(*ints))
            by_floats = _outcome(lambda floats=floats: self.by_python(*floats))
            who = f"with integers for {self.labels[k]},"
            if isinstance(by_floats, Exception) and isinstance(by_ints, Exception):
                continue
            if isinstance(by_floats, Exception) or isinstance(by_ints, Exception):
                raise _Found(f"{who} {_or_error(by_ints)}; with floats, {_or_error(by_floats)}")
            for j, (y, left, right) in enumerate(zip(ys, by_ints, by_floats, strict=True)):
                if right.dtype.kind == "f" and y.type.dtype in pt.type.integer_dtypes:
                    raise _Found(
                        f"{who} output {j} is declared {y.type.dtype}, which "
                        "truncates real numbers: turn inputs into floats in make_node"
                    )
                tolerance = SINGLE if "float32" in y.type.dtype else self.rtol
                self.compare(f"{who} output {j}", left, right, "that of floats", tolerance)
            self.as_declared(ys, by_ints)
        return f"refused for {', '.join(refused)}" if refused else ""

    def single(self, mode):
        if not self.moving:
            raise _Found("no input is real", "skipped")
        arrays = [x.astype("float32") if k in self.moving else x for k, x in enumerate(self.arrays)]
        try:
            xs, ys = self.build(arrays)
        except Exception as error:
            raise _Found(f"refused: {_brief(error)}", "note") from None
        f = self.compiled(xs, ys, mode)
        values = f(*arrays)
        self.as_declared(ys, values)
        for j, (value, true) in enumerate(zip(values, self.values, strict=True)):
            self.compare(f"output {j}", value, true, "float64", SINGLE)

    def dimensions(self):
        """An axis too many or too few is refused when the graph is built, or answered."""
        for k, x in enumerate(self.arrays):
            for changed, shape in _other_ndims(x):
                arrays = [changed if i == k else a for i, a in enumerate(self.arrays)]
                shapes = [shape if i == k else (None,) * a.ndim for i, a in enumerate(self.arrays)]
                try:
                    xs, ys = self.build(arrays, shapes=shapes)
                except Exception:
                    continue
                values = _outcome(lambda xs=xs, ys=ys, a=arrays: self.compiled(xs, ys)(*a))
                given = f"{self.labels[k]} with {changed.ndim} dimensions instead of {x.ndim}"
                if isinstance(values, Exception):
                    raise _Found(
                        f"{given} is accepted when the graph is built and fails when it runs "
                        f"({_brief(values)})" + ": check ndim in make_node" * self.is_op,
                        "FAULT" if self.is_op else "note",
                    )
                try:
                    self.as_declared(ys, values)
                except _Found as found:
                    raise _Found(f"{given}: {found.says}: check ndim in make_node") from None

    def empty(self):
        if not any(x.ndim for x in self.arrays):
            raise _Found("all inputs are scalars", "skipped")
        arrays = self.emptied()
        values = _outcome(lambda: self.by_python(*arrays))
        if isinstance(values, Exception):
            return f"refused: {_brief(values)}"
        self.as_declared(self.ys, values)
        self.same_shapes(self.compiled(self.xs, [y.shape for y in self.ys])(*arrays), values)

    def emptied(self):
        return [x[tuple(slice(0, 0) for _ in x.shape)] if x.ndim else x for x in self.arrays]

    def strided(self, f):
        views = [_strided(x) for x in self.arrays]
        for j, (value, true) in enumerate(zip(f(*views), self.values, strict=True)):
            self.compare(f"output {j} of views with strides", value, true, "contiguous", self.rtol)

    # --- derivatives ---

    def derivatives(self):
        if not self.moving or not self.smooth:
            self.found.append(Attack("derivatives", "skipped", "no real input or no real output"))
            return
        self.y_bars = [
            np.asarray(self.rng.standard_normal(self.values[j].shape)) for j in self.smooth
        ]
        self.x_dots = [
            np.asarray(self.rng.standard_normal(self.arrays[k].shape)) for k in self.moving
        ]
        # A pullback that is wrong leaves nothing to compare for the attacks after it.
        self.attempt("pullback", self.pulls)
        self.pull_is_right = self.found[-1].status == "ok"
        if hasattr(self, "pulled"):
            self.attempt("pullback is linear", self.pull_linear)
        if self.pull_is_right:
            if len(self.ys) > 1:
                self.attempt("disconnected cotangents", self.pull_partly)
            self.attempt("empty gradient", self.pull_empty)
            self.attempt("pullback in float32", self.pull_single)
            self.attempt("second order", self.second)
        if any(x.dtype.kind in "iu" for x in self.arrays):
            self.attempt("gradient for integers", self.for_integers)
        self.attempt("pushforward", self.pushes)
        push_is_right = self.found[-1].status == "ok"
        if hasattr(self, "pushed"):
            self.attempt("pushforward is linear", self.push_linear)
            if push_is_right and len(self.moving) > 1:
                self.attempt("disconnected tangents", self.push_partly)
        self.attempt("pushforward by two pulls", self.default_push)

    def pull(self, xs, ys, of=None):
        """Symbols of the cotangents of real outputs, and the cotangents of the real inputs."""
        of = self.smooth if of is None else of
        y_bars = [ys[j].type.clone(shape=(None,) * ys[j].ndim)(f"cotangent {j}") for j in of]
        x_bars = pullback(
            [ys[j] for j in of],
            [xs[k] for k in self.moving],
            y_bars,
            disconnected_inputs="ignore",
            return_disconnected="zero",
        )
        return y_bars, x_bars

    def pulls(self):
        try:
            self.y_bars_, self.x_bars_ = self.pull(self.xs, self.ys)
        except NotImplementedError:
            raise _Found("no pullback: the Op has no gradient", "note") from None
        except Exception as error:
            if "connection_pattern" in str(error):
                raise _Found(
                    "pullback and connection_pattern disagree: an input is said to be connected, "
                    "and gets a DisconnectedType, or the other way round"
                ) from None
            raise _Found(f"pullback cannot be built: {_brief(error)}") from None
        self.f_pull = self.compiled([*self.xs, *self.y_bars_], self.x_bars_)
        before = [x.copy() for x in (*self.arrays, *self.y_bars)]
        pulled = [np.array(x) for x in self.f_pull(*self.arrays, *self.y_bars)]
        after = [*self.arrays, *self.y_bars]
        if not all(map(_same, before, after)):
            raise _Found("pullback overwrites an input or a cotangent")
        self.expected = [self.slope(k) for k in self.moving]
        size = max(np.max(np.abs(true), initial=0) for true, *_ in self.expected)
        wrong = []
        for k, x_bar, (true, against, rtol) in zip(self.moving, pulled, self.expected, strict=True):
            if x_bar.shape != self.arrays[k].shape:
                wrong.append(f"for {self.labels[k]} it has shape {x_bar.shape}, "
                             f"expected {self.arrays[k].shape}")  # fmt: skip
            else:
                floor = 1e-3 * size if rtol == DIFFERENCES else 0
                says = _difference(x_bar, true, rtol, floor)
                wrong += [f"for {self.labels[k]} {says} ({against})"] if says else []
        if all(
            x_bar.shape == self.arrays[k].shape
            for k, x_bar in zip(self.moving, pulled, strict=True)
        ):
            self.pulled = pulled
        if wrong:
            raise _Found("; ".join(wrong))
        return f"against {self.expected[0][1]}"

    def slope(self, k):
        """The cotangent of input k by complex steps or differences: value, method, tolerance."""

        def cost(x, of, keep=np.real):
            outputs = of(*(x if i == k else a for i, a in enumerate(self.arrays)))
            real = [_many(outputs)[j] for j in self.smooth]
            return sum((b * y).sum() for b, y in zip(self.y_bars, real, strict=True))

        if self.truth:
            try:
                steps = complex_step(lambda x: cost(x, self.truth), self.arrays[k])
                if np.all(np.isfinite(steps)):
                    return np.asarray(steps), "complex step", self.rtol
            except Exception:
                pass  # the truth does not carry complex numbers
        f = self.truth or (lambda *a: self.by_python(*a))
        differences = finite_difference(lambda x: float(cost(x, f)), self.arrays[k])
        return np.asarray(differences), "central differences", DIFFERENCES

    def pull_linear(self):
        doubled = self.f_pull(*self.arrays, *(-2 * b for b in self.y_bars))
        for k, x_bar, once in zip(self.moving, doubled, self.pulled, strict=True):
            if says := _difference(x_bar, -2 * once, self.rtol):
                raise _Found(
                    f"for {self.labels[k]}, -2 times the cotangent does not give -2 times the "
                    f"answer ({says}): every term must contain the cotangent once"
                )

    def pull_partly(self):
        """With some outputs unused, as with zeros for their cotangents."""
        for n, j in enumerate(self.smooth):
            try:
                (y_bar,), x_bars = self.pull(self.xs, self.ys, [j])
                f = self.compiled([*self.xs, y_bar], x_bars)
                alone = f(*self.arrays, self.y_bars[n])
            except Exception as error:
                raise _Found(
                    f"if the cost uses output {j} alone, pullback fails ({_brief(error)}): a "
                    "cotangent may be of DisconnectedType, which has no arithmetic"
                ) from None
            zeros = [b if i == n else 0 * b for i, b in enumerate(self.y_bars)]
            for k, x_bar, true in zip(
                self.moving, alone, self.f_pull(*self.arrays, *zeros), strict=True
            ):
                self.compare(
                    f"if the cost uses output {j} alone, the gradient for {self.labels[k]}",
                    x_bar, true, "zero cotangents", self.rtol,
                )  # fmt: skip

    def pull_empty(self):
        arrays = self.emptied()
        values = _outcome(lambda: self.by_python(*arrays))
        if isinstance(values, Exception) or not any(x.ndim for x in arrays):
            raise _Found("no empty inputs", "skipped")
        y_bars = [np.zeros(values[j].shape) for j in self.smooth]
        for k, x_bar in zip(self.moving, self.f_pull(*arrays, *y_bars), strict=True):
            if x_bar.shape != arrays[k].shape:
                raise _Found(
                    f"for {self.labels[k]} of shape {arrays[k].shape} it has shape {x_bar.shape}"
                )

    def pull_single(self):
        arrays = [x.astype("float32") if k in self.moving else x for k, x in enumerate(self.arrays)]
        try:
            xs, ys = self.build(arrays)
        except Exception:
            raise _Found("float32 is refused", "skipped") from None
        y_bars, x_bars = self.pull(xs, ys)
        given = [b.astype(s.type.dtype) for b, s in zip(self.y_bars, y_bars, strict=True)]
        pulled = self.compiled([*xs, *y_bars], x_bars)(*arrays, *given)
        for k, symbol, x_bar, true in zip(self.moving, x_bars, pulled, self.pulled, strict=True):
            who = f"for {self.labels[k]}"
            if x_bar.dtype != symbol.type.dtype:
                raise _Found(f"{who} it is declared {symbol.type.dtype}, returned as {x_bar.dtype}")
            if symbol.type.dtype != "float32":
                raise _Found(f"{who} of float32 it is {symbol.type.dtype}", "note")
            self.compare(who, x_bar, true, "float64", SINGLE)

    def second(self):
        us = [self.xs[k].type(f"u {k}") for k in self.moving]
        # One scalar cost: pullback(list) takes the cotangent of each entry for its total.
        cost = sum((u * x_bar).sum() for u, x_bar in zip(us, self.x_bars_, strict=True))
        try:
            bends = pytensor.grad(
                cost,
                [self.xs[k] for k in self.moving],
                disconnected_inputs="ignore",
                return_disconnected="zero",
            )
        except NotImplementedError as error:
            raise _Found(
                f"none, and no default pushforward: the pullback has no pullback ({_brief(error)})",
                "note",
            ) from None
        weights = [np.asarray(self.rng.standard_normal(x.shape)) for x in self.pulled]
        f = self.compiled([*self.xs, *self.y_bars_, *us], bends)
        found = f(*self.arrays, *self.y_bars, *weights)
        for k, bend, v in zip(self.moving, found, self.x_dots, strict=True):

            def cost(x, k=k):
                at = [x if i == k else a for i, a in enumerate(self.arrays)]
                pulled = self.f_pull(*at, *self.y_bars)
                return float(sum((u * p).sum() for u, p in zip(weights, pulled, strict=True)))

            sweep = step_sweep(cost, self.arrays[k], v)
            along, true = float((bend * v).sum()), float(sweep.value)
            size = max(abs(true), 1e-3 * abs(cost(self.arrays[k])))
            if not abs(along - true) <= DIFFERENCES * size + 10 * sweep.uncertainty:
                says = _difference(np.array(along), np.array(true), DIFFERENCES)
                raise _Found(f"the gradient of the pullback for {self.labels[k]} {says}")

    def for_integers(self):
        notes = []
        for k, x in enumerate(self.arrays):
            if x.dtype.kind not in "iu":
                continue
            who = self.labels[k]
            cost = sum((self.ys[j] ** 2).sum() for j in self.smooth)
            try:
                slope = pytensor.grad(cost, self.xs[k])
            except (DisconnectedInputError, NullTypeGradError):
                continue
            except Exception as error:
                raise _Found(f"the gradient for {who} fails: {_brief(error)}") from None
            value = self.compiled(self.xs, slope)(*self.arrays)
            if np.any(value):
                notes.append(f"{who}, of integers, has a real gradient")
                continue
            says = f"{who}, of integers, gets zeros, as if it had a derivative and that were zero"
            if self.is_op:
                raise _Found(f"{says}: return disconnected_type() or grad_undefined()")
            notes.append(says)
        if notes:
            raise _Found("; ".join(notes), "note")

    def push(self, which, own=True):
        """The pushforward where only these inputs move and no derivative reaches the others."""
        dots = [self.xs[k].type(f"tangent {k}") for k in which]
        still = [x if k in which or k not in self.moving else disconnected_grad(x)
                 for k, x in enumerate(self.xs)]  # fmt: skip
        ys = self.ys if len(which) == len(self.moving) else self.outputs_of(still)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y_dots = pushforward(
                [ys[j] for j in self.smooth],
                [self.xs[k] for k in which],
                dots,
                use_op_pushforward=own,
                disconnected_outputs="ignore",
            )
        return self.compiled([*self.xs, *dots], y_dots)

    def pushes(self):
        try:
            self.f_push = self.push(self.moving)
        except NotImplementedError:
            raise _Found("none of its own; the default is made from the pullback", "note") from None
        pushed = [np.array(y) for y in self.f_push(*self.arrays, *self.x_dots)]
        for j, y_dot in zip(self.smooth, pushed, strict=True):
            if y_dot.shape != self.values[j].shape:
                raise _Found(
                    f"the tangent of output {j} has shape {y_dot.shape}, "
                    f"expected {self.values[j].shape}"
                )
        self.pushed = pushed
        forwards = self.along(self.y_bars, self.pushed)
        if not hasattr(self, "expected"):
            self.expected = [self.slope(k) for k in self.moving]
        slopes, methods, rtols = zip(*self.expected, strict=True)
        size = max(abs((s * d).sum()) for s, d in zip(slopes, self.x_dots, strict=True))
        gap = forwards - self.along(slopes, self.x_dots)
        if not abs(gap) <= max(rtols) * size:
            says = _difference(np.array(forwards), np.array(forwards - gap), max(rtols))
            raise _Found(f"the pushforward {says} ({methods[0]})")
        if not self.pull_is_right:
            return f"against {methods[0]}"
        if not abs(forwards - self.along(self.pulled, self.x_dots)) <= self.rtol * size:
            raise _Found("pushforward and pullback are not transposes of each other")
        return f"against {methods[0]} and pullback"

    @staticmethod
    def along(xs, ys):
        return sum((x * y).sum() for x, y in zip(xs, ys, strict=True))

    def default_push(self):
        """PyTensor's default: pull back twice.  It takes each cotangent for finished."""
        if not self.pull_is_right:
            raise _Found("there is no right pullback", "skipped")
        try:
            pushed = self.push(self.moving, own=False)(*self.arrays, *self.x_dots)
        except NotImplementedError as error:
            raise _Found(f"the pullback has no pullback ({_brief(error)})", "note") from None
        forwards, backwards = self.along(self.y_bars, pushed), self.along(self.pulled, self.x_dots)
        size = max(abs((p * d).sum()) for p, d in zip(self.pulled, self.x_dots, strict=True))
        if not abs(forwards - backwards) <= self.rtol * size:
            raise _Found(
                "PyTensor's default pushforward is wrong, because it takes the cotangents that "
                "pullback returns for independent, and one is the same variable as another, or "
                "made from it: return a copy of it",
                "FAULT" if self.is_op else "note",
            )

    def push_linear(self):
        for y_dot, once in zip(
            self.f_push(*self.arrays, *(-2 * d for d in self.x_dots)), self.pushed, strict=True
        ):
            if says := _difference(y_dot, -2 * once, self.rtol):
                raise _Found(f"-2 times the tangents do not give -2 times the answer ({says})")

    def push_partly(self):
        for n, k in enumerate(self.moving):
            try:
                alone = self.push([k])(*self.arrays, self.x_dots[n])
            except Exception as error:
                raise _Found(
                    f"if {self.labels[k]} alone moves, pushforward fails ({_brief(error)}): a "
                    "tangent may be of DisconnectedType, which has no arithmetic"
                ) from None
            zeros = [d if i == n else 0 * d for i, d in enumerate(self.x_dots)]
            for y_dot, true in zip(alone, self.f_push(*self.arrays, *zeros), strict=True):
                self.compare(
                    f"the pushforward, if {self.labels[k]} alone moves,",
                    y_dot, true, "zero tangents", self.rtol,
                )  # fmt: skip

    # --- batches ---

    def batched(self):
        has_pull = hasattr(self, "pulled")
        given = self.y_bars if has_pull else []
        symbols = [*self.xs, *(self.y_bars_ if has_pull else [])]
        wanted = [*self.ys, *(self.x_bars_ if has_pull else [])]
        f = self.compiled(symbols, wanted)
        near = [x * (1 + 1e-3) if k in self.moving else x for k, x in enumerate(self.arrays)]
        batches = [list(range(len(self.xs)))] + ([[0]] if len(self.xs) > 1 else [])
        for which in batches:
            stacks = [
                np.stack([x, y]) if k in which else x
                for k, (x, y) in enumerate(zip(self.arrays, near, strict=True))
            ]
            new = {
                self.xs[k]: pt.tensor(dtype=stacks[k].dtype, shape=(None,) * stacks[k].ndim)
                for k in which
            }
            inputs = [new.get(x, x) for x in symbols]
            who = "a batch" if len(which) == len(self.xs) else f"a batch of {self.labels[0]} alone"
            try:
                many = vectorize_graph(wanted, new)
                found = self.compiled(inputs, many)(*stacks, *given)
                shapes = self.compiled(inputs, [y.shape for y in many])(*stacks, *given)
            except Exception as error:
                raise _Found(f"{who} fails: {_brief(error)}") from None
            second = [
                y if k in which else x
                for k, (x, y) in enumerate(zip(self.arrays, near, strict=True))
            ]
            loop = [f(*self.arrays, *given), f(*second, *given)]
            for n, (value, shape, *rows) in enumerate(zip(found, shapes, *loop, strict=True)):
                is_value = n < len(self.ys)
                what = f"output {n}" if is_value else f"gradient {n - len(self.ys)}"
                rows = np.stack(rows)
                if value.ndim < rows.ndim:  # it depends on nothing that was batched
                    value = np.broadcast_to(value, rows.shape)
                elif tuple(map(int, shape)) != value.shape:
                    raise _Found(f"{who}: the shape alone of {what} is {tuple(map(int, shape))}, "
                                 f"it has {value.shape}")  # fmt: skip
                self.compare(f"{who}: {what}", value, rows, "a loop", self.rtol)

    # --- backends ---

    def backend(self, backend, cases, refused):
        name = {"numba": "Numba", "jax": "JAX"}[backend]
        if find_spec(backend) is None:
            self.found.append(Attack(name, "skipped", f"{name} is not installed"))
            return
        mode = backend.upper()
        if not self.attempt(name, lambda: self.agrees(name, mode)):
            return
        if self.found[-1].status == "skipped":
            return
        f = self.compiled(self.xs, self.ys, mode)
        for case_name, case in cases.items():
            self.attempt(f"{name}: {case_name}", lambda case=case: self.alike(case, f))
        if backend == "jax":
            return  # its arrays are copies, and traced code cannot refuse a value
        for case_name, case in refused.items():
            self.attempt(f"{name}: {case_name}", lambda case=case: self.refuses(case, mode, f))
        self.attempt("Numba: empty", lambda: self.alike(self.emptied(), f))
        self.attempt("Numba: memory", lambda: self.memory(f))
        self.attempt("Numba: not contiguous", lambda: self.strided(f))
        self.attempt("Numba: float32", lambda: self.single(mode))
        self.attempt("Numba: integers", lambda: self.integers(mode))

    def agrees(self, name, mode):
        has_pull = hasattr(self, "pulled")
        inputs = [*self.xs, *(self.y_bars_ if has_pull else [])]
        outputs = [*self.ys, *(self.x_bars_ if has_pull else [])]
        given = [*self.arrays, *(self.y_bars if has_pull else [])]
        before = [x.copy() for x in given]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                f = pytensor.function(inputs, outputs, mode=mode, on_unused_input="ignore")
            except NotImplementedError as error:
                raise _Found(f"not registered ({_brief(error)})", "skipped") from None
            found = [np.asarray(y) for y in f(*given)]
        if not all(map(_same, before, given)):
            raise _Found(f"{name} overwrites an input")
        whats = [f"output {j}" for j in range(len(self.ys))]
        whats += [f"the gradient for {self.labels[k]}" for k in self.moving] if has_pull else []
        trues = [*self.values, *(self.pulled if has_pull else [])]
        for what, y, value, true in zip(whats, outputs, found, trues, strict=True):
            self.compare(what, value, true, "Python mode", self.rtol)
            if str(value.dtype) != y.type.dtype:
                raise _Found(f"{what} is declared {y.type.dtype} and returned as {value.dtype}")
        if any("object mode" in str(w.message) for w in caught):
            raise _Found("no kernel: compiled code calls perform in object mode", "note")

    def alike(self, case, f):
        """The backend answers as Python mode does, or both refuse."""
        case = self.checked_case(case)
        by_python, found = (_outcome(lambda g=g: g(*case)) for g in (self.by_python, f))
        if isinstance(found, Exception) and isinstance(by_python, Exception):
            return "refused, as in Python mode"
        if isinstance(found, Exception) or isinstance(by_python, Exception):
            raise _Found(f"{_or_error(found)}; in Python mode, {_or_error(by_python)}")
        for j, (value, true) in enumerate(zip(found, by_python, strict=True)):
            self.compare(f"output {j}", value, true, "Python mode", self.rtol)

    def refuses(self, case, mode, f=None):
        case = [np.asarray(x) for x in case]
        try:
            xs, ys = self.build(case)
        except Exception as error:
            return f"when built, {_brief(error)}"
        same = f is not None and all(x.type == s.type for x, s in zip(xs, self.xs, strict=True))
        run = f if same else self.compiled(xs, ys, mode)
        values = _outcome(lambda: run(*case))
        if not isinstance(values, Exception):
            raise _Found("there is an answer where an error was expected")
        return f"when run, {_brief(values)}"

    # --- comparing ---

    def compare(self, what, value, true, against, rtol):
        value, true = np.asarray(value), np.asarray(true)
        if value.shape != true.shape:
            raise _Found(f"{what} has shape {value.shape}, expected {true.shape} ({against})")
        if says := _difference(value, true, rtol):
            raise _Found(f"{what} {says} ({against})")


# --- small parts ----------------------------------------------------------------------------------


def _name(op) -> str:
    return str(op) if isinstance(op, Op) else getattr(op, "__name__", str(op))


def _labels(op, count: int) -> list[str]:
    """What the user calls the inputs: the arguments of make_node, or of the function."""
    try:
        of = type(op).make_node if isinstance(op, Op) else op
        names = [
            p.name
            for p in inspect.signature(of).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "self"
        ]
    except (TypeError, ValueError):
        names = []
    return names if len(names) == count else [f"input {k}" for k in range(count)]


def _many(outputs) -> list:
    many = outputs if isinstance(outputs, list | tuple) else [outputs]
    return [np.asarray(y) for y in many]


def _same(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def _brief(error: Exception) -> str:
    """The kind of the error and the first line that it says."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    first = first if len(first) <= 90 else first[:87] + "..."
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _outcome(call):
    """What a call returns, or the exception that it raises."""
    try:
        return call()
    except Exception as error:
        return error


def _or_error(outcome) -> str:
    return _brief(outcome) if isinstance(outcome, Exception) else "an answer"


def _difference(value, true, rtol: float, floor: float = 0.0) -> str:
    """How a value differs from the true one by more than rtol; empty if it does not."""
    value, true = np.asarray(value), np.asarray(true)
    if value.size == 0:
        return ""
    if value.dtype.kind != "f" and true.dtype.kind != "f":
        return "" if np.array_equal(value, true) else "is wrong"
    lost, missing = np.isnan(value), np.isnan(true)
    if not np.array_equal(lost, missing):
        return "is NaN where it should not be" if (lost & ~missing).any() else "should be NaN"
    value, true = np.where(lost, 0.0, value), np.where(lost, 0.0, true)
    if np.array_equal(value, true):
        return ""
    gap, size = np.max(np.abs(value - true)), max(np.max(np.abs(true)), floor)
    if gap <= rtol * size:
        return ""
    square = (true * true).sum()
    factor = (value * true).sum() / square if square > 0 and np.isfinite(square) else np.nan
    close = np.max(np.abs(value - factor * true)) <= 100 * rtol * size
    if not np.any(value):
        return "is zero"
    if close and abs(factor + 1) < 1e-6:
        return "has the wrong sign"
    if close and np.isfinite(factor) and value.size > 1:
        return f"is {factor:.3g} times the true one"
    return f"is wrong: relative error {gap / size if size else np.inf:.0e}"


def _walled(x: np.ndarray, wall: float):
    """A contiguous copy of x inside a longer buffer, and the buffer."""
    if x.dtype.kind != "f":  # indices beyond the ends must stay indices
        wall = x.max(initial=0) if wall == 7.0 else x.min(initial=0)
    buffer = np.full(x.size + 2 * OUTSIDE, wall, dtype=x.dtype)
    buffer[OUTSIDE : OUTSIDE + x.size] = x.ravel()
    return buffer[OUTSIDE : OUTSIDE + x.size].reshape(x.shape), buffer


def _strided(x: np.ndarray) -> np.ndarray:
    """The same entries, every second one of a longer array, the last axis backwards."""
    if not x.ndim:
        return x
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype)
    view = wide[..., ::-2]
    view[...] = x
    return view


def _other_ndims(x: np.ndarray):
    """The array with an axis more and, if it has one, an axis less; with the shapes to declare."""
    yield x[None], (1, *(None,) * x.ndim)
    if x.ndim and x.shape[0]:
        yield x[0], (None,) * (x.ndim - 1)
