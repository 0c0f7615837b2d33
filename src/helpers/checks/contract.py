"""Does this Op keep PyTensor's contract?  Functions that attack it from every side.

:func:`attack` calls them all.  Each takes a :class:`Point`, an example of the inputs of one graph,
returns what it has to say, and raises :class:`Found` where something is wrong or missing:

>>> import numpy as np
>>> import pytensor.tensor as pt
>>> from helpers.checks import contract
>>> at = contract.point(pt.exp, np.array([0.5, 1.0]))
>>> contract.pullback(at)
'against central differences'
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import pytensor
import pytensor.gradient as pg
import pytensor.tensor as pt
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.mode import Mode
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.null_type import NullType
from pytensor.graph.op import Op
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import applys_between
from pytensor.link.c.op import COp
from pytensor.link.vm import VMLinker
from pytensor.scalar.basic import get_scalar_type

from helpers.checks.gradients import _directions, complex_step, step_sweep, symmetrize

__all__ = ["Attack", "Report", "attack"]

AS_WRITTEN = Mode(linker="py", optimizer=None)  # compiles nothing, and rewrites nothing
SHAPES = Mode(linker="py", optimizer="fast_compile")  # asks infer_shape
REWRITTEN = Mode(linker="py", optimizer="fast_run").excluding("fusion", "BlasOpt")
BACKENDS = {"numba": "Numba", "jax": "JAX", "c": "C"}
# This linker runs C where there is any, and Python elsewhere.
IN_C = Mode(VMLinker(use_cloop=True, c_thunks=True), "fast_compile")
MODES = {"numba": "NUMBA", "jax": "JAX", "c": IN_C}
DIFFERENCES = 1e-5  # what central differences can be trusted to
SINGLE = 1e-3  # float32, after a short computation
SINGLE_DIFFERENCES = 1e-2  # differences of float32
MANY = 200  # entries of an array, of which each is moved alone
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
    backends: Sequence[str] = ("numba", "jax", "c"),
    rtol: float = 1e-9,
    raises: bool = True,
    seed: int = 0,
) -> Report:
    """Attack an Op, or a function that builds a graph, and say what breaks.

    One example of valid inputs is enough to attack

    - the types: integers for floats, float32, another number of dimensions, axes of length 0 and
      1, arrays that are not contiguous, declared against returned dtypes and shapes;
    - the memory: inputs overwritten or handed back, two outputs in one array, an answer overwritten
      by the next call, entries beyond the ends of an input that change the answer;
    - the derivatives: ``pullback`` and ``pushforward`` against complex steps through `truth` (or
      central differences) and against each other, their linearity, disconnected tangents and
      cotangents, integer inputs, the second order;
    - the shapes without the values (``infer_shape``), PyTensor's rewrites, and batches of all
      inputs and of each one, made by ``vectorize_graph``, against a loop;
    - each backend against Python, its memory, and JAX's own derivative.

    Parameters
    ----------
    op : Op, or function of symbols to a variable or a list of them
    *inputs : arrays of real numbers or integers
        A valid example, away from kinks and from the ends of the domain.  Take sizes that differ
        where they may: a wrong ``infer_shape`` that swaps two equal sizes cannot be seen.  Real
        numbers are taken as float64, or as float32 where the Op refuses float64.
    truth : function of arrays to an array or a list of them, optional
        NumPy code that is independent of the Op.  If it carries complex numbers, derivatives are
        compared with complex steps.
    cases : dict of name -> inputs, optional
        Further inputs of the same types (sizes may differ), for values, shapes, derivatives and
        backends.  Where there is no answer, `truth` should return NaN.
    refused : dict of name -> inputs, optional
        Inputs that must raise an error in every backend, such as labels out of range.
    backends : sequence of ``"numba"``, ``"jax"``, ``"c"``
        What is compared with Python, where the Op supports it.  Compiling takes seconds; ``()``
        compiles nothing.
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
    ValueError
        If a backend is unknown.
    AssertionError
        If there is a fault: the report's table.

    Notes
    -----
    A derivative that is declared missing (``grad_not_implemented``, ``grad_undefined``) is skipped,
    and the other inputs are attacked.  At a kink each slope between those of the two sides is
    right.  Of a matrix that is symmetric in the example, and whose gradient is symmetric or
    triangular, the gradient may be that of a symmetric matrix.  What cannot be mended in an Op,
    because it is PyTensor's own, is a note.

    PyTensor compiles no graph that contains an Op with a ``destroy_map``: attack the twin of such
    an Op that copies.
    """
    if unknown := set(backends) - set(BACKENDS):
        raise ValueError(f"unknown backends {sorted(unknown)}, expected {sorted(BACKENDS)}")
    at, found = None, []

    def example():
        nonlocal at
        at = point(op, *inputs, truth=truth, rtol=rtol, seed=seed)
        return runs(at)

    _examples(inputs)
    found.append(_attempt("runs in Python", example))
    if found[-1].status != "FAULT":
        found += _in_python(at, dict(cases or {}), dict(refused or {}))
        for backend in backends:
            found += _in_backend(at, backend, dict(cases or {}), dict(refused or {}))
    report = Report(_name(op), found)
    if raises and report.faults:
        raise AssertionError(str(report))
    return report


class Found(Exception):  # noqa: N818 (it ends an attack and is not an error)
    """Ends an attack that has something to say."""

    def __init__(self, says: str, status: str = "FAULT"):
        super().__init__(says)
        self.says, self.status = says, status


def _attempt(name: str, what: Callable[[], str | None]) -> Attack:
    """Run one attack and record how it ended."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return Attack(name, "ok", what() or "")
    except Found as found:
        return Attack(name, found.status, found.says)
    except Exception as error:
        return Attack(name, "FAULT", f"unexpected {_brief(error)}")


# --- the order of the attacks ---------------------------------------------------------------------


def _in_python(at: Point, cases: dict, refused: dict) -> list[Attack]:
    checks = {"value": value} if at.of.truth else {}
    checks |= {
        "repeated call": repeated,
        "memory of the inputs": memory,
        "shape alone": shape_alone,
        "integers for floats": integers,
        "float32": single,
        "number of dimensions": dimensions,
        "empty": cut,
        "not contiguous": strided,
    }
    found = [_attempt(name, lambda check=check: check(at)) for name, check in checks.items()]
    found += _derivatives(at)
    found += [
        _attempt("rewritten", lambda: rewritten(at)),
        _attempt("batched", lambda: batched(at)),
    ]
    found += [_case(f"case: {name}", at, case) for name, case in cases.items()]
    for name, case in refused.items():
        found.append(_attempt(f"refused: {name}", lambda case=case: refuses(at, case)))
    return found


def _derivatives(at: Point) -> list[Attack]:
    """The attacks on derivatives.  A wrong pullback leaves nothing to compare for some of them."""
    of = at.of
    if not of.moving or not of.smooth:
        return [Attack("derivatives", "skipped", "no real input or no real output")]
    if not all(np.all(np.isfinite(at.values[j])) for j in of.smooth):
        return [Attack("derivatives", "skipped", "the answer is not finite")]
    found = [_attempt("pullback", lambda: pullback(at))]
    right, exists = found[0].status != "FAULT" and of.has_pull, of.has_pull
    if exists:
        for k, why in of.nulls.items():
            found.append(Attack(f"gradient for {of.labels[k]}", "skipped", f"declared: {why}"))
    if right and not of.free:
        right = exists = False
    checks = {"pullback is linear": pull_linear} if exists and at.has_shapes else {}
    if right:
        checks |= {"disconnected cotangents": pull_partly} if len(of.ys) > 1 else {}
        checks |= {"empty gradient": pull_empty, "pullback in float32": pull_single,
                   "second order": second}  # fmt: skip
    if any(x.dtype.kind in "iu" for x in at.arrays):
        checks["gradient for integers"] = for_integers
    found += [_attempt(name, lambda check=check: check(at)) for name, check in checks.items()]
    found.append(_attempt("pushforward", lambda: pushforward(at)))
    if of.has_push and found[-1].says != NO_TANGENT:
        good = found[-1].status != "FAULT"
        found.append(_attempt("pushforward is linear", lambda: push_linear(at)))
        if good and len(of.moving) > 1:
            found.append(_attempt("disconnected tangents", lambda: push_partly(at)))
    if right:
        found.append(_attempt("pushforward by two pulls", lambda: default_push(at)))
    return found


def _case(name: str, at: Point, case: Sequence) -> Attack:
    """Values, shapes and derivatives at further inputs, as one line."""

    def what():
        there = at.moved(case)
        runs(there)
        found = [_attempt("value", lambda: value(there))] if at.of.truth else []
        found += [_attempt("shape alone", lambda: shape_alone(there)), *_derivatives(there)]
        if faults := [f"{a.name}: {a.says}" for a in found if a.status == "FAULT"]:
            raise Found("; ".join(faults))

    return _attempt(name, what)


def _in_backend(at: Point, backend: str, cases: dict, refused: dict) -> list[Attack]:
    name, mode = BACKENDS[backend], MODES[backend]
    compiled = {}

    def agrees():
        if backend != "c" and find_spec(backend) is None:
            raise Found(f"{name} is not installed", "skipped")
        if backend == "c" and not _has_c(at.of):
            raise Found("no C code, or no compiler", "skipped")
        try:
            f, g, in_objects = in_mode(at.of, mode)
        except NotImplementedError as error:
            raise Found(f"not registered ({_brief(error)})", "skipped") from None
        compiled.update(f=f, g=g)
        same_answers(at, f, g, name)
        if in_objects:
            raise Found("no kernel: compiled code calls perform in object mode", "note")

    found = [_attempt(name, agrees)]
    if not compiled or found[0].status in ("FAULT", "skipped"):
        return found
    f, g = compiled["f"], compiled["g"]

    def case_agrees(case):
        there = at.moved(case)
        says = alike(there, f)
        if says or not all(np.all(np.isfinite(there.values[j])) for j in at.of.smooth):
            return says
        same_answers(there, f, g, name)
        if backend == "jax":
            jax_rule(there)

    for case_name, case in cases.items():
        found.append(_attempt(f"{name}: {case_name}", lambda case=case: case_agrees(case)))
    if backend == "jax":  # its arrays are copies, and traced code cannot refuse a value
        return [*found, _attempt("JAX: derivative", lambda: jax_rule(at))]
    for case_name, case in refused.items():
        found.append(_attempt(f"{name}: {case_name}", lambda case=case: refuses(at, case, mode, f)))
    checks = {
        "repeated call": lambda: repeated(at, f),
        "empty": lambda: empty_alike(at, f),
        "memory": lambda: memory(at, f),
        "not contiguous": lambda: strided(at, f),
        "float32": lambda: single(at, mode),
        "integers": lambda: integers(at, mode),
    }
    return found + [_attempt(f"{name}: {what}", check) for what, check in checks.items()]


# --- the graph, and an example --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Graph:
    """The graph of an Op or function, with unknown lengths, and what is compiled of it once."""

    op: Callable
    labels: list[str]
    xs: list
    ys: list
    truth: Callable | None
    rtol: float
    seed: int

    @cached_property
    def run(self):
        return compiled(self.xs, self.ys)

    @cached_property
    def shapes(self):
        with pytensor.config.change_flags(on_shape_error="raise"):
            return compiled(self.xs, [y.shape for y in self.ys], SHAPES)

    @cached_property
    def moving(self) -> list[int]:
        return [k for k, x in enumerate(self.xs) if x.type.dtype.startswith("float")]

    @cached_property
    def smooth(self) -> list[int]:
        return [j for j, y in enumerate(self.ys) if y.type.dtype.startswith("float")]

    @cached_property
    def is_single(self) -> bool:
        return any(v.type.dtype == "float32" for v in (*self.xs, *self.ys))

    @property
    def is_op(self) -> bool:
        return isinstance(self.op, Op)

    @cached_property
    def owned(self) -> bool:
        """Whether it can be mended here: it is not PyTensor's own."""
        where = type(self.op) if self.is_op else self.op
        module = getattr(where, "__module__", None) or ""
        return where is OpFromGraph or module.split(".")[0] != "pytensor"

    @cached_property
    def inherited(self) -> str:
        """Of what is wrong in the graph: a note, if all its Ops are PyTensor's own."""
        ops = [node.op for node in applys_between(self.xs, self.ys)]
        return "FAULT" if any(map(_is_brought, ops)) else "note"

    def severity(self) -> str:
        """Of what a function inherits from its Ops, or PyTensor's own Op has."""
        return "FAULT" if self.is_op and self.owned else "note"

    @cached_property
    def y_bars(self) -> list:
        return [self.ys[j].type(f"cotangent {j}") for j in self.smooth]

    @cached_property
    def all_x_bars(self) -> list:
        """The cotangents of the real inputs, some of a null type."""
        return gradients(self, self.y_bars, self.smooth)

    @cached_property
    def has_pull(self) -> bool:
        return bool(_outcome_of(lambda: self.all_x_bars))

    @cached_property
    def nulls(self) -> dict[int, str]:
        """The inputs whose gradient is declared missing, and why."""
        pairs = zip(self.moving, self.all_x_bars, strict=True)
        return {k: _first_line(x.type.why_null) for k, x in pairs if isinstance(x.type, NullType)}

    @cached_property
    def free(self) -> list[int]:
        """The real inputs that have a gradient."""
        return [k for k in self.moving if k not in self.nulls] if self.has_pull else self.moving

    @cached_property
    def x_bars(self) -> list:
        return [x for x in self.all_x_bars if not isinstance(x.type, NullType)]

    @cached_property
    def pull(self):
        return compiled([*self.xs, *self.y_bars], self.x_bars)

    @cached_property
    def push(self):
        return pushed_graph(self, self.moving, own=True)

    @cached_property
    def has_push(self) -> bool:
        return bool(_outcome_of(lambda: self.push))


@dataclass(frozen=True, eq=False)
class Point:
    """An example of inputs of a :class:`Graph`, and what is computed there once."""

    of: Graph
    arrays: list[np.ndarray]

    @cached_property
    def values(self) -> list[np.ndarray]:
        return [np.array(y) for y in self.of.run(*self.arrays)]

    @cached_property
    def y_bars(self) -> list[np.ndarray]:
        rng = np.random.default_rng(self.of.seed)
        return [
            np.asarray(rng.standard_normal(self.values[j].shape), dtype=self.of.ys[j].type.dtype)
            for j in self.of.smooth
        ]

    @cached_property
    def x_dots(self) -> dict[int, np.ndarray]:
        """A tangent of each real input; symmetric where only symmetric matrices have a gradient."""
        rng = np.random.default_rng(self.of.seed + 1)
        dots = {}
        for k in self.of.moving:
            x = self.arrays[k]
            dots[k] = np.asarray(rng.standard_normal(x.shape), dtype=x.dtype)
            if k in self.slopes and self.slopes[k].symmetric:
                dots[k] = symmetrize(dots[k])
        return dots

    @cached_property
    def pulled(self) -> dict[int, np.ndarray]:
        found = self.of.pull(*self.arrays, *self.y_bars)
        return {k: np.array(x) for k, x in zip(self.of.free, found, strict=True)}

    @cached_property
    def has_shapes(self) -> bool:
        """Whether there are gradients, and each has its input's shape."""
        pulled = _outcome(lambda: self.pulled)
        return not isinstance(pulled, Exception) and all(
            x.shape == self.arrays[k].shape for k, x in pulled.items()
        )

    @cached_property
    def slopes(self) -> dict[int, Slope]:
        """What the gradients should be."""
        return {k: slope(self, k) for k in self.of.free}

    @property
    def nearby(self) -> list[np.ndarray]:
        """The inputs moved a little; symmetric matrices stay symmetric."""
        return [
            (x * (1 + 1e-3)).astype(x.dtype) if k in self.of.moving else x
            for k, x in enumerate(self.arrays)
        ]

    def moved(self, case) -> Point:
        arrays = [np.asarray(x).astype(s.type.dtype)
                  for x, s in zip(case, self.of.xs, strict=True)]  # fmt: skip
        return Point(self.of, arrays)

    def cost(self, k: int, of: Callable) -> Callable:
        """The sum of cotangents times real outputs, as a function of input k."""

        def total(x):
            outputs = _many(of(*(x if i == k else a for i, a in enumerate(self.arrays))))
            return sum((b * outputs[j]).sum()
                       for b, j in zip(self.y_bars, self.of.smooth, strict=True))  # fmt: skip

        return total


def point(op, *inputs, truth=None, rtol=1e-9, seed=0) -> Point:
    """The graph of an Op or function, at an example of its inputs."""
    arrays = _examples(inputs)
    labels = _labels(op, len(arrays))
    error = None
    for dtype in ("float64", "float32"):  # there are Ops that take float32 alone
        given = [x.astype(dtype) if x.dtype.kind == "f" else x for x in arrays]
        for known in (False, True):  # and gradients that need lengths which are known
            try:
                xs, ys = built(op, labels, given, [x.shape for x in given] if known else None)
            except Exception as refusal:
                error = error or refusal
                continue
            at = Point(Graph(op, labels, xs, ys, truth, rtol, seed), given)
            if isinstance(_outcome(lambda at=at: at.values), Exception) and dtype == "float64":
                error = error or _outcome(lambda at=at: at.values)
                continue
            if known or at.of.owned or not (at.of.moving and at.of.smooth):
                return at
            pulled = _outcome(lambda at=at: at.of.all_x_bars)
            if not isinstance(pulled, Exception) or isinstance(pulled, NotImplementedError):
                return at
    raise error


def _examples(inputs) -> list[np.ndarray]:
    arrays = [np.asarray(x) for x in inputs]
    if not arrays:
        raise TypeError("attack needs an example of inputs: attack(op, x, ...)")
    for k, x in enumerate(arrays):
        if x.dtype.kind not in "fiub":
            raise TypeError(f"input {k} has dtype {x.dtype}, expected real numbers or integers")
    return arrays


def built(op, labels, arrays, shapes=None):
    """Symbols for these arrays, and the outputs of the Op as a list."""
    shapes = shapes or [(None,) * x.ndim for x in arrays]
    symbols = [
        pt.tensor(name, dtype=str(x.dtype), shape=shape)
        for name, x, shape in zip(labels, arrays, shapes, strict=True)
    ]
    outputs = op(*symbols)
    return symbols, list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def compiled(inputs, outputs, mode=AS_WRITTEN):
    # In Python, constants would still be folded by C code, behind a lock that processes share.
    in_python = mode in (AS_WRITTEN, SHAPES, REWRITTEN)
    flags = {"cxx": ""} if in_python else {}
    with pytensor.config.change_flags(**flags):
        return pytensor.function(inputs, outputs, mode=mode, on_unused_input="ignore")


def gradients(of: Graph, y_bars, which) -> list:
    """The cotangents of the real inputs; of a null type where they are declared missing."""
    # One scalar cost: pullback(list) takes the cotangent of each entry for its total.
    cost = sum((b * of.ys[j]).sum() for b, j in zip(y_bars, which, strict=True))
    return pytensor.grad(
        cost, [of.xs[k] for k in of.moving], disconnected_inputs="ignore",
        return_disconnected="zero", null_gradients="return",
    )  # fmt: skip


# --- values and memory ----------------------------------------------------------------------------


def runs(at: Point) -> None:
    """The inputs are left alone, and the outputs are what make_node declares."""
    before = [x.copy() for x in at.arrays]
    values = at.of.run(*at.arrays)
    for label, x, old in zip(at.of.labels, at.arrays, before, strict=True):
        if not np.array_equal(x, old, equal_nan=x.dtype.kind == "f"):
            raise Found(f"{label} is overwritten: copy it, or declare it in destroy_map")
    as_declared(at.of.ys, values)


def as_declared(ys, values) -> None:
    for j, (y, value) in enumerate(zip(ys, values, strict=True)):
        returned = getattr(value, "dtype", type(value).__name__)
        if str(returned) != y.type.dtype:
            raise Found(f"output {j} is declared {y.type.dtype} and returned as {returned}")
        shape = getattr(value, "shape", ())
        fits = len(shape) == y.type.ndim and all(
            s in (None, n) for s, n in zip(y.type.shape, shape, strict=True)
        )
        if not fits:
            raise Found(f"output {j} is declared with shape {y.type.shape}, but has {shape}")


def value(at: Point) -> None:
    """The values are those of the truth."""
    expected = _many(at.of.truth(*at.arrays))
    for j, (found, true) in enumerate(zip(at.values, expected, strict=True)):
        compare(f"output {j}", found, true, "the truth", _tolerance(at.of))


RANDOM = (
    "two calls with the same inputs give different answers: it draws at random, or returns memory "
    "that it has not written"
)


def repeated(at: Point, f: Callable | None = None) -> None:
    """A second call must not reach the answer of the first, nor do two arrays share memory."""
    f = f or at.of.run
    first = [np.asarray(y) for y in f(*at.arrays)]
    for j, y in enumerate(first):
        for label, x in zip(at.of.labels, at.arrays, strict=True):
            if np.shares_memory(y, x):
                raise Found(f"output {j} is a view of {label}: copy it, or declare view_map")
        for i in range(j):
            if np.shares_memory(y, first[i]):
                raise Found(f"outputs {i} and {j} share memory: what is written to one changes "
                            "the other; return two arrays")  # fmt: skip
    kept = [y.copy() for y in first]
    if not all(map(_same, f(*at.arrays), kept)):
        raise Found(RANDOM)
    _outcome(lambda: f(*at.nearby))
    for j, (y, old) in enumerate(zip(first, kept, strict=True)):
        if not _same(y, old):
            raise Found(f"the next call overwrites output {j}: return a new array each time")
    if not all(map(_same, f(*at.arrays), kept)):
        raise Found("the same inputs give another answer after a call with other inputs")


def memory(at: Point, f: Callable | None = None) -> None:
    """Neighbours in memory of the inputs neither matter nor change."""
    f, answers = f or at.of.run, []
    for wall in (np.nan, 7.0, 7.0):
        walled, buffers = zip(*(_walled(x, wall) for x in at.arrays), strict=True)
        before = [b.copy() for b in buffers]
        answers.append([np.array(y) for y in f(*walled)])
        for label, b, old in zip(at.of.labels, buffers, before, strict=True):
            if not np.array_equal(b, old, equal_nan=b.dtype.kind == "f"):
                raise Found(f"writes to {label} or beyond its ends")
    if not all(map(_same, answers[1], answers[2])):
        raise Found(RANDOM)
    if not all(map(_same, answers[0], answers[1])):
        raise Found("the answer depends on memory beyond the ends of an input")


def strided(at: Point, f: Callable | None = None) -> None:
    """Views that run backwards with gaps, and columns first, are answered as contiguous arrays."""
    f = f or at.of.run
    for layout in (_strided, lambda x: np.array(x, order="F")):
        views = [layout(x) for x in at.arrays]
        for j, (found, true) in enumerate(zip(f(*views), at.values, strict=True)):
            compare(f"output {j} of views with strides", found, true, "contiguous",
                    _tolerance(at.of))  # fmt: skip


def rewritten(at: Point) -> None:
    """PyTensor's rewrites change neither values nor gradients, nor do they harm the inputs."""
    f, g, _ = in_mode(at.of, REWRITTEN)
    same_answers(at, f, g, "after PyTensor's rewrites,", at.of.severity())


# --- shapes and types -----------------------------------------------------------------------------


def shape_alone(at: Point) -> None:
    """infer_shape agrees with the values."""
    of = at.of
    same_shapes(of.shapes(*at.arrays), at.values)
    if of.is_op and any(node.op == of.op for node in of.shapes.maker.fgraph.toposort()):
        raise Found("no infer_shape: to know a shape, the Op has to run", "note")


def same_shapes(shapes, values) -> None:
    for j, (shape, found) in enumerate(zip(shapes, values, strict=True)):
        said = tuple(map(int, shape))
        if said != found.shape:
            raise Found(f"infer_shape gives output {j} the shape {said}, it has {found.shape}")


def cut(at: Point) -> str | None:
    """Axes of length 0 and 1, all, those that are alike and one by one, have the right shapes."""
    if not any(x.ndim for x in at.arrays):
        raise Found("all inputs are scalars", "skipped")
    says = None
    for number, arrays in enumerate(_cuts(at)):
        values = _outcome(lambda arrays=arrays: at.of.run(*arrays))
        if isinstance(values, Exception):
            says = f"refused: {_brief(values)}" if number == 0 else says
            continue
        try:
            as_declared(at.of.ys, values)
            same_shapes(at.of.shapes(*arrays), values)
        except Exception as error:
            shapes = ", ".join(f"{label} {x.shape}"
                               for label, x in zip(at.of.labels, arrays, strict=True))  # fmt: skip
            says = error.says if isinstance(error, Found) else f"infer_shape: {_brief(error)}"
            severity = "FAULT" if at.of.owned else "note"
            raise Found(f"{says}, where {shapes}", severity) from None
    return says


def integers(at: Point, mode=AS_WRITTEN) -> str:
    """Integers are answered like the floats of the same values, or refused when built."""
    of, refused = at.of, []
    for k in of.moving:
        errors, answered = [], False
        for whole in _whole_numbers(at.arrays[k]):
            floats = [whole if i == k else x for i, x in enumerate(at.arrays)]
            ints = [whole.astype("int64") if i == k else x for i, x in enumerate(at.arrays)]
            try:
                xs, ys = built(of.op, of.labels, ints)
            except Exception:
                refused.append(of.labels[k])
                break
            by_floats = _outcome(lambda floats=floats: of.run(*floats))
            if isinstance(by_floats, Exception) or not _finite(by_floats):
                continue
            f = compiled(xs, ys, mode)
            by_ints = _outcome(lambda f=f, ints=ints: f(*ints))
            who = f"with integers for {of.labels[k]},"
            if isinstance(by_ints, Exception):
                errors.append(f"{who} {_brief(by_ints)}; with floats, an answer")
                continue
            answered = True
            for j, (y, left, right) in enumerate(zip(ys, by_ints, by_floats, strict=True)):
                whole_answer = np.array_equal(right, np.rint(right))  # as sums and products have
                if y.type.dtype in pt.type.integer_dtypes and not whole_answer:
                    raise Found(
                        f"{who} output {j} is declared {y.type.dtype}, which "
                        "truncates real numbers: turn inputs into floats in make_node",
                        of.inherited,
                    )
                is_single = "float32" in (y.type.dtype, str(right.dtype))
                compare(f"{who} output {j}", left, right, "that of floats",
                        SINGLE if is_single else of.rtol)  # fmt: skip
            as_declared(ys, by_ints)
        if errors and not answered:
            raise Found(errors[0])
    refused = list(dict.fromkeys(refused))
    return f"refused for {', '.join(refused)}" if refused else ""


def single(at: Point, mode=AS_WRITTEN) -> None:
    """float32 is answered in float32, as near as it can be."""
    of = at.of
    if not of.moving:
        raise Found("no input is real", "skipped")
    arrays = _to_single(at)
    try:
        xs, ys = built(of.op, of.labels, arrays)
    except Exception as error:
        raise Found(f"refused: {_brief(error)}", "note") from None
    found = compiled(xs, ys, mode)(*arrays)
    as_declared(ys, found)
    rounded = [x.astype(s.type.dtype) for x, s in zip(arrays, of.xs, strict=True)]
    for j, (y, true) in enumerate(zip(found, of.run(*rounded), strict=True)):
        compare(f"output {j}", y, true, "float64", SINGLE)


def dimensions(at: Point) -> None:
    """An axis too many or too few is refused when the graph is built, or answered."""
    of = at.of
    for k, x in enumerate(at.arrays):
        for changed, shape in _other_ndims(x):
            arrays = [changed if i == k else a for i, a in enumerate(at.arrays)]
            shapes = [shape if i == k else (None,) * a.ndim for i, a in enumerate(at.arrays)]
            try:
                xs, ys = built(of.op, of.labels, arrays, shapes)
            except Exception:
                continue
            values = _outcome(lambda xs=xs, ys=ys, a=arrays: compiled(xs, ys)(*a))
            given = f"{of.labels[k]} with {changed.ndim} dimensions instead of {x.ndim}"
            if isinstance(values, Exception):
                raise Found(
                    f"{given} is accepted when the graph is built and fails when it runs "
                    f"({_brief(values)})" + ": check ndim in make_node" * of.is_op,
                    of.severity(),
                )
            try:
                as_declared(ys, values)
            except Found as found:
                raise Found(f"{given}: {found.says}: check ndim in make_node") from None


# --- what a gradient should be --------------------------------------------------------------------


class Slope(NamedTuple):
    """What the gradient for an input should be, from where, how well known, and of what."""

    value: np.ndarray  # NaN where there is no derivative to be found
    against: str
    rtol: float
    symmetric: bool  # the symmetric gradient of a symmetric matrix


def slope(at: Point, k: int) -> Slope:
    """The gradient for input k by complex steps through the truth, or differences.

    Where that disagrees with what the pullback gives, differences are asked as well: the truth may
    carry complex numbers wrongly, and the gradient may be that of a symmetric matrix.
    """
    x, pulled = at.arrays[k], at.pulled.get(k) if at.has_shapes else None
    f = at.of.truth or at.of.run

    def agrees(candidate):
        return pulled is not None and not _wrong(candidate, pulled, at, k)

    first = None
    if at.of.truth:
        steps = _outcome(lambda: _complex_steps(at.cost(k, f), x))
        if not isinstance(steps, Exception) and np.isfinite(steps).any():
            first = Slope(steps, "complex step", _tolerance(at.of), False)
            if agrees(first) or pulled is None:
                return first
    plain = differences(at, k, f, symmetric=False)
    if agrees(plain):
        # Differences that both agree with leave no doubt about the complex steps, which see more.
        return first if first and not _wrong(plain, first.value, at, k) else plain
    # Nor is there another gradient where a function reads one triangle alone.
    if _is_symmetric(x) and (
        pulled is None or _is_for_symmetric(pulled) or _is_for_symmetric(plain.value)
    ):
        symmetric = differences(at, k, f, symmetric=True)
        if agrees(symmetric) or (pulled is None and not np.any(np.isfinite(plain.value))):
            return symmetric
    return first or plain


def differences(at: Point, k: int, f: Callable, symmetric: bool) -> Slope:
    """Central differences entry by entry; NaN where f has no values on both sides."""
    x, cost = at.arrays[k], at.cost(k, f)
    is_single = at.of.is_single
    steps = np.logspace(0, -3, 13) * max(1, np.max(np.abs(x), initial=0)) if is_single else None
    rounded = (
        (lambda z: float(cost(z.astype(x.dtype)))) if is_single else (lambda z: float(cost(z)))
    )
    found = np.full(x.shape, np.nan)
    for entries, E in _some_directions(x, symmetric):
        try:
            estimate = float(step_sweep(rounded, x, E, steps=steps).value)
        except ValueError:  # not finite around the point
            continue
        for entry in entries:
            found[entry] = estimate
    rtol = SINGLE_DIFFERENCES if is_single else DIFFERENCES
    return Slope(found, "central differences", rtol, symmetric)


def _some_directions(x, symmetric: bool):
    """Each entry's direction, or those of some entries of a long array."""
    x = np.asarray(x, dtype=float)
    if symmetric or x.size <= MANY:
        yield from _directions(x, symmetric)
        return
    for flat in np.random.default_rng(0).choice(x.size, MANY, replace=False):
        E = np.zeros(x.shape)
        E.flat[flat] = 1
        yield [np.unravel_index(flat, x.shape)], E


def _complex_steps(cost: Callable, x) -> np.ndarray:
    """The gradient by complex steps; NaN in the entries of a long array that are left out."""
    if x.size <= MANY:
        return np.asarray(complex_step(cost, x))
    found = np.full(x.shape, np.nan)
    for (entry,), E in _some_directions(x, symmetric=False):
        found[entry] = np.imag(cost(x + 1e-30j * E)) / 1e-30
    return found


def _wrong(known: Slope, pulled, at: Point, k: int) -> str:
    """How a gradient differs from what it should be; empty if it does not."""
    true, by_steps = known.value, known.against == "complex step"
    pulled = symmetrize(pulled) if known.symmetric else pulled
    there = np.isfinite(true)
    if not there.any():
        return "cannot be compared" if true.size else ""
    if by_steps:
        return _difference(np.where(there, pulled, 0), np.where(there, true, 0), known.rtol)
    # An entry that is small beside another gradient, or beside the cost, is lost in rounding.
    size = max(np.max(np.abs(x[np.isfinite(x)]), initial=0) for x in at.pulled.values())
    lost = 1e-3 * (np.finfo(np.float32).eps if at.of.is_single else 1e-6)
    cost = abs(float(at.cost(k, at.of.run)(at.arrays[k])))
    floor = max(1e-3 * size, lost * cost / known.rtol)
    return _difference(np.where(there, pulled, 0), np.where(there, true, 0), known.rtol, floor)


def _at_a_kink(at: Point, k: int) -> bool:
    """Whether each wrong entry of a gradient lies between the slopes to its left and right."""
    cost, x, pulled = at.cost(k, at.of.run), at.arrays[k], at.pulled[k]
    known = at.slopes[k].value
    size, kinks = np.max(np.abs(pulled), initial=0), 0
    for entry in np.ndindex(x.shape):
        if abs(pulled[entry] - known[entry]) <= DIFFERENCES * size:
            continue
        E = np.zeros(x.shape)
        E[entry] = 1
        low, high = sorted(one_sided(cost, x, E))
        slack = 1e-4 * max(abs(low), abs(high))
        if not (high - low > 10 * slack and low - slack <= pulled[entry] <= high + slack):
            return False
        kinks += 1
    return kinks > 0


def one_sided(f: Callable, x, v) -> tuple[float, float]:
    """Slopes of f along v, to the left and to the right of x."""
    h = 1e-6 * max(1.0, np.max(np.abs(x), initial=0.0))
    here, before, after = (_outcome(lambda z=z: float(f(z))) for z in (x, x - h * v, x + h * v))
    if any(isinstance(z, Exception) for z in (here, before, after)):
        return np.nan, np.nan
    return (here - before) / h, (after - here) / h


# --- derivatives, backwards -----------------------------------------------------------------------


def pullback(at: Point) -> str:
    """The cotangents of the inputs are right."""
    of = at.of
    try:
        _ = of.all_x_bars
    except NotImplementedError:
        raise Found("no pullback: the Op has no gradient", "note") from None
    except Exception as error:
        if "connection_pattern" in str(error):
            raise Found(
                "pullback and connection_pattern disagree: an input is said to be connected, "
                "and gets a DisconnectedType, or the other way round"
            ) from None
        raise Found(f"pullback cannot be built: {_brief(error)}",
                    "FAULT" if of.owned else "note") from None  # fmt: skip
    if not of.free:
        raise Found("all gradients are declared missing", "skipped")
    given = [*at.arrays, *at.y_bars]
    before = [x.copy() for x in given]
    _ = at.pulled
    if not all(map(np.array_equal, before, given)):
        raise Found("pullback overwrites an input or a cotangent")
    wrong, remarks = [], []
    for k, x_bar in at.pulled.items():
        who = f"for {of.labels[k]}"
        if x_bar.shape != at.arrays[k].shape:
            wrong.append(f"{who} it has shape {x_bar.shape}, expected {at.arrays[k].shape}")
        elif says := _wrong(at.slopes[k], x_bar, at, k):
            if says == "cannot be compared":
                remarks.append(f"{who} there are no differences")
            elif _at_a_kink(at, k):
                remarks.append(f"{who} it is at a kink, between the slopes of both sides")
            else:
                wrong.append(f"{who} {says} ({at.slopes[k].against})")
        elif at.slopes[k].symmetric:
            remarks.append(f"{who} it is that of a symmetric matrix")
    if wrong:
        raise Found("; ".join(wrong))
    if remarks:
        raise Found("; ".join(remarks), "note")
    return f"against {next(iter(at.slopes.values())).against}"


def pull_linear(at: Point) -> None:
    """Twice the cotangent gives twice the answer."""
    doubled = at.of.pull(*at.arrays, *(-2 * b for b in at.y_bars))
    for (k, once), x_bar in zip(at.pulled.items(), doubled, strict=True):
        if says := _difference(x_bar, -2 * once, _tolerance(at.of)):
            raise Found(
                f"for {at.of.labels[k]}, -2 times the cotangent does not give -2 times the "
                f"answer ({says}): every term must contain the cotangent once"
            )


def pull_partly(at: Point) -> None:
    """With some outputs unused, as with zeros for their cotangents."""
    of = at.of
    for n, j in enumerate(of.smooth):
        try:
            y_bar = of.y_bars[n]
            x_bars = dict(zip(of.moving, gradients(of, [y_bar], [j]), strict=True))
            x_bars = {k: x for k, x in x_bars.items() if not isinstance(x.type, NullType)}
            found = compiled([*of.xs, y_bar], list(x_bars.values()))(*at.arrays, at.y_bars[n])
        except Exception as error:
            raise Found(
                f"if the cost uses output {j} alone, pullback fails ({_brief(error)}): a "
                "cotangent may be of DisconnectedType, which has no arithmetic"
            ) from None
        zeros = [b if i == n else 0 * b for i, b in enumerate(at.y_bars)]
        full = dict(zip(of.free, of.pull(*at.arrays, *zeros), strict=True))
        for k, x_bar in zip(x_bars, found, strict=True):
            if k in full:
                compare(f"if the cost uses output {j} alone, the gradient for {of.labels[k]}",
                        x_bar, full[k], "zero cotangents", _tolerance(of))  # fmt: skip


def pull_empty(at: Point) -> None:
    """The gradient of an empty input is empty."""
    of, arrays = at.of, _emptied(at.arrays)
    values = _outcome(lambda: of.run(*arrays))
    if isinstance(values, Exception) or not any(x.ndim for x in arrays):
        raise Found("no empty inputs", "skipped")
    y_bars = [np.zeros(values[j].shape, of.ys[j].type.dtype) for j in of.smooth]
    x_bars = _outcome(lambda: of.pull(*arrays, *y_bars))
    if isinstance(x_bars, Exception):
        raise Found(f"where the value has an answer, it fails: {_brief(x_bars)}")
    for k, x_bar in zip(of.free, x_bars, strict=True):
        if x_bar.shape != arrays[k].shape:
            raise Found(f"for {of.labels[k]} of shape {arrays[k].shape} it has shape {x_bar.shape}")


def pull_single(at: Point) -> None:
    """The gradient of float32 is the same, and of float32."""
    of, arrays = at.of, _to_single(at)
    try:
        xs, ys = built(of.op, of.labels, arrays, [x.type.shape for x in of.xs])
    except Exception:
        raise Found("float32 is refused", "skipped") from None
    narrow = Graph(of.op, of.labels, xs, ys, None, of.rtol, of.seed)
    given = [b.astype(s.type.dtype) for b, s in zip(at.y_bars, narrow.y_bars, strict=True)]
    rounded = [x.astype(s.type.dtype) for x, s in zip(arrays, of.xs, strict=True)]
    trues = of.pull(*rounded, *(b.astype(s.type.dtype)
                                for b, s in zip(given, of.y_bars, strict=True)))  # fmt: skip
    found = narrow.pull(*arrays, *given)
    for k, symbol, x_bar, true in zip(narrow.free, narrow.x_bars, found, trues, strict=True):
        who = f"for {of.labels[k]}"
        if x_bar.dtype != symbol.type.dtype:
            raise Found(f"{who} it is declared {symbol.type.dtype}, returned as {x_bar.dtype}")
        if symbol.type.dtype != "float32":
            raise Found(f"{who} of float32 it is {symbol.type.dtype}", "note")
        compare(who, x_bar, true, "float64", SINGLE)


def second(at: Point) -> str | None:
    """The gradient of the pullback is right."""
    of = at.of
    us = [of.xs[k].type(f"u {k}") for k in of.free]
    cost = sum((u * x_bar).sum() for u, x_bar in zip(us, of.x_bars, strict=True))
    try:
        bends = pytensor.grad(
            cost, [of.xs[k] for k in of.free], disconnected_inputs="ignore",
            return_disconnected="zero", null_gradients="return",
        )  # fmt: skip
    except NotImplementedError as error:
        raise Found(
            f"none, and no default pushforward: the pullback has no pullback ({_brief(error)})",
            "note",
        ) from None
    except Exception as error:
        raise Found(f"it cannot be built: {_brief(error)}", of.severity()) from None
    bends = dict(zip(of.free, bends, strict=True))
    nulls = {k: x for k, x in bends.items() if isinstance(x.type, NullType)}
    bends = {k: x for k, x in bends.items() if k not in nulls}
    rng = np.random.default_rng(of.seed + 2)
    weights = [np.asarray(rng.standard_normal(at.arrays[k].shape), at.arrays[k].dtype)
               for k in of.free]  # fmt: skip
    f = compiled([*of.xs, *of.y_bars, *us], list(bends.values()))
    found = f(*at.arrays, *at.y_bars, *weights)
    for k, bend in zip(bends, found, strict=True):
        x, v = at.arrays[k], at.x_dots[k]

        def moved(z, k=k, x=x):
            z = np.asarray(z, x.dtype)
            pulled = of.pull(*(z if i == k else a for i, a in enumerate(at.arrays)), *at.y_bars)
            return float(sum((u * p).sum() for u, p in zip(weights, pulled, strict=True)))

        steps = np.logspace(0, -3, 13) if of.is_single else None
        try:
            sweep = step_sweep(moved, x, v, steps=steps)
        except ValueError:
            continue
        along, true = float((bend * v).sum()), float(sweep.value)
        rtol = 5 * SINGLE_DIFFERENCES if of.is_single else DIFFERENCES
        size = max(abs(true), 1e-3 * np.abs(bend * v).sum(), 1e-3 * abs(moved(x)))
        if not abs(along - true) <= rtol * size + 10 * sweep.uncertainty:
            low, high = sorted(one_sided(moved, x, v))
            if high - low > 1e-3 * max(abs(low), abs(high)) and low <= along <= high:
                continue  # at a kink of the gradient
            says = _difference(np.array(along), np.array(true), rtol)
            raise Found(f"the gradient of the pullback for {of.labels[k]} {says}", of.inherited)
    if nulls:
        who = ", ".join(of.labels[k] for k in nulls)
        why = _first_line(next(iter(nulls.values())).type.why_null)
        raise Found(f"declared missing for {who}: {why}", "skipped")


def for_integers(at: Point) -> None:
    """The gradient for integers is missing, or a number that is not zero."""
    of, notes = at.of, []
    for k, x in enumerate(at.arrays):
        if x.dtype.kind not in "iu":
            continue
        who = of.labels[k]
        cost = sum((of.ys[j] ** 2).sum() for j in of.smooth)
        try:
            found = pytensor.grad(cost, of.xs[k])
        except (pg.DisconnectedInputError, pg.NullTypeGradError, NotImplementedError):
            continue
        except Exception as error:
            raise Found(f"the gradient for {who} fails: {_brief(error)}") from None
        if np.any(compiled(of.xs, found)(*at.arrays)):
            notes.append(f"{who}, of integers, has a real gradient")
            continue
        says = f"{who}, of integers, gets zeros, as if it had a derivative and that were zero"
        if of.severity() == "FAULT":
            raise Found(f"{says}: return disconnected_type() or grad_undefined()")
        notes.append(says)
    if notes:
        raise Found("; ".join(notes), "note")


# --- derivatives, forwards ------------------------------------------------------------------------

NO_TANGENT = "none of its own; the default is made from the pullback"


def pushed_graph(of: Graph, which, own: bool):
    """The pushforward where only these inputs move and no derivative reaches the others."""
    dots = [of.xs[k].type(f"tangent {k}") for k in which]
    still = [x if k in which or k not in of.moving else pg.disconnected_grad(x)
             for k, x in enumerate(of.xs)]  # fmt: skip
    ys = of.ys
    if len(which) < len(of.moving):
        outputs = of.op(*still)
        ys = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y_dots = pg.pushforward(
            [ys[j] for j in of.smooth], [of.xs[k] for k in which], dots,
            use_op_pushforward=own, disconnected_outputs="ignore",
        )  # fmt: skip
    return compiled([*of.xs, *dots], y_dots)


def pushforward(at: Point) -> str:
    """The tangents of the outputs are right."""
    of = at.of
    try:
        push = of.push
    except NotImplementedError:
        raise Found(NO_TANGENT, "note") from None
    except Exception as error:
        raise Found(f"it cannot be built: {_brief(error)}", of.severity()) from None
    if of.nulls if of.has_pull else False:
        raise Found("some gradients are declared missing", "skipped")
    pushed = push(*at.arrays, *at.x_dots.values())
    for j, y_dot in zip(of.smooth, pushed, strict=True):
        if y_dot.shape != at.values[j].shape:
            raise Found(
                f"the tangent of output {j} has shape {y_dot.shape}, expected {at.values[j].shape}"
            )
    forwards = _along(at.y_bars, pushed)
    terms = {k: (known.value * at.x_dots[k]).sum() for k, known in at.slopes.items()}
    methods = {known.against for known in at.slopes.values()}
    right = at.has_shapes and not any(_wrong(s, at.pulled[k], at, k) for k, s in at.slopes.items())
    backwards = [(at.pulled[k] * at.x_dots[k]).sum() for k in terms] if right else []
    if np.all(np.isfinite(list(terms.values()))):
        rtol = max(s.rtol for s in at.slopes.values())
        size = max(np.abs(s.value * at.x_dots[k]).sum() for k, s in at.slopes.items())
        cost = abs(float(_along(at.y_bars, [at.values[j] for j in of.smooth])))
        true = sum(terms.values())
        if not abs(forwards - true) <= rtol * size + 1e-9 * cost:
            says = _difference(np.array(forwards), np.array(true), rtol)
            if not _kink_along(at, forwards):
                raise Found(f"the pushforward {says} ({', '.join(sorted(methods))})", of.inherited)
            return "at a kink, between the slopes of both sides"
    if not right:
        return f"against {', '.join(sorted(methods))}"
    size = max(np.abs(at.pulled[k] * at.x_dots[k]).sum() for k in terms)
    if not abs(forwards - sum(backwards)) <= _tolerance(of) * size:
        raise Found("pushforward and pullback are not transposes of each other")
    return f"against {', '.join(sorted(methods))} and pullback"


def _kink_along(at: Point, forwards: float) -> bool:
    """Whether a pushed tangent lies between the slopes of both sides."""

    def cost(t):
        arrays = [x + t * at.x_dots[k] if k in at.x_dots else x for k, x in enumerate(at.arrays)]
        return _along(at.y_bars, [_many(at.of.run(*arrays))[j] for j in at.of.smooth])

    low, high = sorted(one_sided(cost, np.array(0.0), np.array(1.0)))
    slack = 1e-4 * max(abs(low), abs(high))
    return high - low > 10 * slack and low - slack <= forwards <= high + slack


def push_linear(at: Point) -> None:
    """Twice the tangent gives twice the answer."""
    dots = at.x_dots.values()
    once = at.of.push(*at.arrays, *dots)
    for y_dot, y in zip(at.of.push(*at.arrays, *(-2 * d for d in dots)), once, strict=True):
        if says := _difference(y_dot, -2 * np.asarray(y), _tolerance(at.of)):
            raise Found(f"-2 times the tangents do not give -2 times the answer ({says})")


def push_partly(at: Point) -> None:
    """With some inputs still, as with zeros for their tangents."""
    of = at.of
    for k in of.moving:
        try:
            alone = pushed_graph(of, [k], own=True)(*at.arrays, at.x_dots[k])
        except Exception as error:
            raise Found(
                f"if {of.labels[k]} alone moves, pushforward fails ({_brief(error)}): a "
                "tangent may be of DisconnectedType, which has no arithmetic",
                of.inherited,
            ) from None
        zeros = [d if i == k else 0 * d for i, d in at.x_dots.items()]
        for y_dot, true in zip(alone, of.push(*at.arrays, *zeros), strict=True):
            compare(f"the pushforward, if {of.labels[k]} alone moves,", y_dot, true,
                    "zero tangents", _tolerance(of), of.inherited)  # fmt: skip


def default_push(at: Point) -> None:
    """PyTensor's default: pull back twice.  It takes each cotangent for finished."""
    of = at.of
    try:
        pushed = pushed_graph(of, of.free, own=False)
    except NotImplementedError as error:
        raise Found(f"the pullback has no pullback ({_brief(error)})", "note") from None
    except pg.NullTypeGradError:
        raise Found("a second derivative is declared missing", "skipped") from None
    dots = [at.x_dots[k] for k in of.free]
    forwards = _along(at.y_bars, pushed(*at.arrays, *dots))
    terms = [(at.pulled[k] * d).sum() for k, d in zip(of.free, dots, strict=True)]
    size = max(np.abs(at.pulled[k] * d).sum() for k, d in zip(of.free, dots, strict=True))
    if not abs(forwards - sum(terms)) <= _tolerance(of) * size:
        raise Found(
            "PyTensor's default pushforward is wrong, because it takes the cotangents that "
            "pullback returns for independent, and one is the same variable as another, or "
            "made from it: return a copy of it",
            of.severity(),
        )


# --- batches --------------------------------------------------------------------------------------


def batched(at: Point) -> None:
    """A batch of all inputs, and of each alone, gives what a loop gives."""
    of = at.of
    pulls = of.has_pull and at.has_shapes and bool(of.free)
    given = at.y_bars if pulls else []
    symbols = [*of.xs, *(of.y_bars if pulls else [])]
    wanted = [*of.ys, *(of.x_bars if pulls else [])]
    f = compiled(symbols, wanted)
    first, near = f(*at.arrays, *given), at.nearby
    everything = list(range(len(of.xs)))
    for which in [everything, *([k] for k in everything if len(everything) > 1)]:
        second = [near[k] if k in which else x for k, x in enumerate(at.arrays)]
        stacks = [np.stack([x, y]) if k in which else x
                  for k, (x, y) in enumerate(zip(at.arrays, second, strict=True))]  # fmt: skip
        new = {of.xs[k]: pt.tensor(dtype=stacks[k].dtype, shape=(None,) * stacks[k].ndim)
               for k in which}  # fmt: skip
        inputs = [new.get(x, x) for x in symbols]
        who = "a batch" if which == everything else f"a batch of {of.labels[which[0]]} alone"
        try:
            many = vectorize_graph(wanted, new)
            found = compiled(inputs, many)(*stacks, *given)
            shapes = compiled(inputs, [y.shape for y in many], SHAPES)(*stacks, *given)
        except Exception as error:
            raise Found(f"{who} fails: {_brief(error)}", "FAULT" if of.owned else "note") from None
        loop = zip(first, f(*second, *given), strict=True)
        for n, (y, shape, rows) in enumerate(zip(found, shapes, loop, strict=True)):
            what = f"output {n}" if n < len(of.ys) else f"gradient {n - len(of.ys)}"
            rows = np.stack(rows)
            if y.ndim < rows.ndim:  # it depends on nothing that was batched
                y = np.broadcast_to(y, rows.shape)
            elif tuple(map(int, shape)) != y.shape:
                raise Found(f"{who}: the shape alone of {what} is {tuple(map(int, shape))}, "
                            f"it has {y.shape}")  # fmt: skip
            compare(f"{who}: {what}", y, rows, "a loop", _tolerance(of))


# --- backends -------------------------------------------------------------------------------------


def in_mode(of: Graph, mode) -> tuple[Callable, Callable | None, bool]:
    """Functions of a backend, for the outputs and the gradients, and whether Python does it all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f, g = compiled(of.xs, of.ys, mode), None
        if of.moving and of.smooth and of.has_pull and of.free:
            g = compiled([*of.xs, *of.y_bars], of.x_bars, mode)
    return f, g, any("object mode" in str(w.message) for w in caught)


def same_answers(at: Point, f, g, name: str, severity: str = "FAULT") -> None:
    """Values and gradients are those of Python, and no input is overwritten."""
    of = at.of
    g = g if at.has_shapes else None
    given = [*at.arrays, *(at.y_bars if g else [])]
    before = [x.copy() for x in given]
    found = [*f(*at.arrays), *(g(*given) if g else [])]
    if not all(map(_same, before, given)):
        raise Found(f"{name} overwrites an input")
    whats = [f"output {j}" for j in range(len(of.ys))]
    whats += [f"the gradient for {of.labels[k]}" for k in of.free] if g else []
    symbols = [*of.ys, *(of.x_bars if g else [])]
    trues = [*at.values, *(at.pulled.values() if g else [])]
    for what, y, one, true in zip(whats, symbols, map(np.asarray, found), trues, strict=True):
        compare(what, one, true, "Python", _tolerance(of))
        if str(one.dtype) != y.type.dtype:
            raise Found(f"{what} is declared {y.type.dtype} and returned as {one.dtype}", severity)


def alike(at: Point, f) -> str | None:
    """The backend answers as Python does, or both refuse."""
    by_python, found = (_outcome(lambda g=g: g(*at.arrays)) for g in (at.of.run, f))
    if isinstance(found, Exception) and isinstance(by_python, Exception):
        return "refused, as in Python"
    if isinstance(found, Exception) or isinstance(by_python, Exception):
        raise Found(f"{_or_error(found)}; in Python, {_or_error(by_python)}")
    for j, (one, true) in enumerate(zip(found, by_python, strict=True)):
        compare(f"output {j}", one, true, "Python", _tolerance(at.of))
    return None


def empty_alike(at: Point, f) -> str | None:
    """Empty inputs, and those cut that Python answers, are answered alike by a backend."""
    says = alike(Point(at.of, _emptied(at.arrays)), f)
    for arrays in _cuts(at):  # a kernel need not check what Python refuses
        if not isinstance(_outcome(lambda arrays=arrays: at.of.run(*arrays)), Exception):
            alike(Point(at.of, arrays), f)
    return says


def refuses(at: Point, case, mode=AS_WRITTEN, f=None) -> str:
    """There is an error, when the graph is built or when it runs."""
    case = [np.asarray(x) for x in case]
    try:
        xs, ys = built(at.of.op, at.of.labels, case)
    except Exception as error:
        return f"when built, {_brief(error)}"
    same = f is not None and all(x.type == s.type for x, s in zip(xs, at.of.xs, strict=True))
    run = f if same else compiled(xs, ys, mode)
    values = _outcome(lambda: run(*case))
    if not isinstance(values, Exception):
        raise Found("there is an answer where an error was expected")
    return f"when run, {_brief(values)}"


def jax_rule(at: Point) -> str | None:
    """JAX's own derivative of the function that it is given, which a sampler on JAX uses."""
    import jax
    from pytensor.link.jax.dispatch import jax_funcify

    of = at.of
    if not of.moving or not of.smooth:
        raise Found("no real input or no real output", "skipped")
    fgraph = FunctionGraph(of.xs, [of.ys[j] for j in of.smooth], clone=True)
    whole = jax_funcify(fgraph)

    def f(*moving):
        given = dict(zip(of.free, moving, strict=True))
        return tuple(whole(*(given.get(k, x) for k, x in enumerate(at.arrays))))

    primals = [at.arrays[k] for k in of.free]
    severity = "FAULT" if of.owned else "note"
    try:
        found = jax.vjp(f, *primals)[1](tuple(at.y_bars))
    except Exception:
        dots = [at.x_dots[k] for k in of.free]
        try:  # there are rules that only go forwards
            pushed = jax.jvp(f, tuple(primals), tuple(dots))[1]
        except Exception as error:
            raise Found(f"JAX cannot differentiate it: {_brief(error)}", "note") from None
        terms = [(at.slopes[k].value * d).sum() for k, d in zip(of.free, dots, strict=True)]
        forwards, rtol = _along(at.y_bars, map(np.asarray, pushed)), at.slopes[of.free[0]].rtol
        if not abs(forwards - sum(terms)) <= rtol * max(map(abs, terms)):
            raise Found("JAX's own derivative is wrong", severity) from None
        return "forwards alone"
    for k, x_bar in zip(of.free, map(np.asarray, found), strict=True):
        known = at.slopes[k]
        says = _wrong(known, x_bar, at, k)
        if says and at.has_shapes and not of.truth:  # the pullback, if right, is known better
            says = says and _difference(x_bar, at.pulled[k], _tolerance(of))
        if says and _is_symmetric(at.arrays[k]) and _is_for_symmetric(x_bar):
            known = symmetrize(known.value)
            says = _difference(symmetrize(x_bar), known, max(DIFFERENCES, at.slopes[k].rtol))
        if says:
            raise Found(f"JAX's own gradient for {of.labels[k]} {says}", severity)
    return None


def _is_brought(op) -> bool:
    """Whether an Op is not PyTensor's own."""
    op = getattr(op, "scalar_op", getattr(op, "core_op", op))
    return type(op) is OpFromGraph or type(op).__module__.split(".")[0] != "pytensor"


def _has_c(of: Graph) -> bool:
    """Whether there is a compiler, and an Op in the graph has C code."""
    return bool(pytensor.config.cxx) and any(
        _brings_c(node) for node in applys_between(of.xs, of.ys)
    )


def _brings_c(node) -> bool:
    op = getattr(node.op, "scalar_op", node.op)
    if op is node.op:
        return isinstance(op, COp) and type(op).c_code is not COp.c_code
    try:  # every scalar Op has the method, and few that are not PyTensor's write something
        single = op.make_node(*(get_scalar_type(x.type.dtype)() for x in node.inputs))
        names = (["x"] * len(node.inputs), ["z"] * len(single.outputs))
        return bool(op.c_code(single, "n", *names, {"fail": ""}))
    except Exception:
        return False


# --- comparing ------------------------------------------------------------------------------------


def compare(what, found, true, against, rtol, severity="FAULT") -> None:
    found, true = np.asarray(found), np.asarray(true)
    if found.shape != true.shape:
        raise Found(f"{what} has shape {found.shape}, expected {true.shape} ({against})", severity)
    if says := _difference(found, true, rtol):
        raise Found(f"{what} {says} ({against})", severity)


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
    same = lost | (value == true)  # two infinities are
    value, true = (np.where(same, np.where(np.isfinite(true), true, 0), v) for v in (value, true))
    if same.all():
        return ""
    gap, size = np.max(np.abs(value - true)), max(np.max(np.abs(true)), floor)
    if gap <= rtol * size < np.inf:
        return ""
    square = (true * true).sum()
    factor = (value * true).sum() / square if square > 0 and np.isfinite(square) else np.nan
    close = np.max(np.abs(value - factor * true)) <= 100 * rtol * size
    if not np.any(value):
        return "is zero"
    if close and abs(factor + 1) < 1e-6:
        return "has the wrong sign"
    if close and abs(factor - 1) > 0.005 and value.size > 1:
        return f"is {factor:.3g} times the true one"
    return f"is wrong: relative error {gap / size if size else np.inf:.0e}"


def _tolerance(of: Graph) -> float:
    return SINGLE if of.is_single else of.rtol


def _same(a, b) -> bool:
    """Equal but for rounding, which may depend on where an array lies in memory."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        return False
    return not _difference(a, b, 1e-4 if a.dtype == np.float32 else 1e-10)


def _along(xs, ys) -> float:
    return sum((x * y).sum() for x, y in zip(xs, ys, strict=True))


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


def _first_line(text) -> str:
    text = str(text).removeprefix("This variable is Null because ")
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return first if len(first) <= 90 else first[:87] + "..."


def _brief(error: Exception) -> str:
    """The kind of the error and the first line that it says."""
    first = _first_line(error)
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _outcome(call):
    """What a call returns, or the exception that it raises."""
    try:
        return call()
    except Exception as error:
        return error


def _outcome_of(call) -> bool:
    return not isinstance(_outcome(call), Exception)


def _or_error(outcome) -> str:
    return _brief(outcome) if isinstance(outcome, Exception) else "an answer"


def _finite(values) -> bool:
    return all(np.all(np.isfinite(y)) for y in values)


def _is_symmetric(x: np.ndarray) -> bool:
    """Whether the last two axes are a symmetric matrix of more than one entry."""
    square = x.ndim >= 2 and x.shape[-1] == x.shape[-2] > 1
    return square and np.array_equal(x, np.swapaxes(x, -1, -2))


def _is_for_symmetric(x_bar: np.ndarray) -> bool:
    """Whether a gradient is symmetric or triangular, as those of symmetric matrices are."""
    close = np.max(np.abs(x_bar - np.swapaxes(x_bar, -1, -2))) <= 1e-9 * np.max(np.abs(x_bar))
    return close or not np.any(np.tril(x_bar, -1)) or not np.any(np.triu(x_bar, 1))


def _to_single(at: Point) -> list[np.ndarray]:
    return [x.astype("float32") if k in at.of.moving else x for k, x in enumerate(at.arrays)]


def _whole_numbers(x: np.ndarray):
    """Whole numbers near x and further away, none of them zero."""
    for whole in (np.rint(x), np.rint(3 * x) + 1):
        yield np.where(whole == 0, 1, whole).astype(x.dtype)
    yield np.abs(np.where(np.rint(x) == 0, 1, np.rint(x))).astype(x.dtype)


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


def _emptied(arrays) -> list[np.ndarray]:
    return [x[tuple(slice(0, 0) for _ in x.shape)] if x.ndim else x for x in arrays]


def _cuts(at: Point):
    """All axes empty; then all axes of one length, of length 0 and 1, and each axis alone."""
    arrays = at.arrays
    yield _emptied(arrays)
    every = [(k, axis) for k, x in enumerate(arrays) for axis in range(x.ndim)]
    lengths = dict.fromkeys(arrays[k].shape[axis] for k, axis in every)
    groups = [[(k, a) for k, a in every if arrays[k].shape[a] == n] for n in lengths]
    for group in groups:
        for n in (0, 1):
            yield _shortened(arrays, group, n)
    for group in groups:
        for one in group if len(group) > 1 else ():  # if it need not be as long as the others
            shorter = _shortened(arrays, [one], arrays[one[0]].shape[one[1]] - 1)
            if _outcome_of(lambda shorter=shorter: at.of.run(*shorter)):
                yield _shortened(arrays, [one], 0)


def _shortened(arrays, group, n: int) -> list[np.ndarray]:
    """The arrays with the first n along these axes, (array, axis) each."""
    arrays = list(arrays)
    for k, axis in group:
        arrays[k] = np.take(arrays[k], range(min(n, arrays[k].shape[axis])), axis=axis)
    return arrays


def _other_ndims(x: np.ndarray):
    """The array with an axis more and, if it has one, an axis less; with the shapes to declare."""
    yield x[None], (1, *(None,) * x.ndim)
    if x.ndim and x.shape[0]:
        yield x[0], (None,) * (x.ndim - 1)
