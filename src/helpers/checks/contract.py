"""Does this Op keep PyTensor's contract?  Functions that attack it from every side.

:func:`attack` calls them all.  Each is named like its line in the :class:`Report`, takes a
:class:`Point`, an example of the inputs of one graph, returns what it has to say, and raises
:class:`Found` where something is wrong or missing:

>>> import numpy as np
>>> import pytensor.tensor as pt
>>> from helpers.checks import contract
>>> at = contract.point(pt.exp, np.array([0.5, 1.0]))
>>> contract.pullback(at)
'against central differences'
"""

from __future__ import annotations

import inspect
import pickle
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import combinations, permutations, product
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
from pytensor.graph.replace import clone_replace, vectorize_graph
from pytensor.graph.traversal import applys_between
from pytensor.link.c.op import COp
from pytensor.link.vm import VMLinker
from pytensor.scalar.basic import get_scalar_type

from helpers.checks.gradients import StepSweep, complex_step, entry_by_entry, step_sweep, symmetrize

__all__ = ["Attack", "Report", "attack"]

AS_WRITTEN = Mode(linker="py", optimizer=None)  # compiles nothing, and rewrites nothing
SHAPES = Mode(linker="py", optimizer="fast_compile")  # asks infer_shape
REWRITTEN = Mode(linker="py", optimizer="fast_run").excluding("fusion", "BlasOpt")
# This linker runs C where there is any, and Python elsewhere.
IN_C = Mode(VMLinker(use_cloop=True, c_thunks=True), "fast_compile")
BACKENDS = {"numba": ("Numba", "NUMBA"), "jax": ("JAX", "JAX"), "c": ("C", IN_C)}
DIFFERENCES = 1e-5  # what central differences can be trusted to
SINGLE = 1e-3  # float32, after a short computation
FEWER = np.finfo("float32").eps / np.finfo("float64").eps
SINGLE_DIFFERENCES = 1e-2  # differences of float32
SINGLE_STEPS = np.logspace(0, -3, 13)  # that they take
JUMP = 1e-5  # of the values: more is no rounding
TREMBLE = 1e7  # the same of what inputs do that move by rounding, in units of that
MANY = 200  # entries of an array, of which each is moved alone
OUTSIDE = 8  # entries on each side of an input that must not matter
ELSEWHERE = (-1.0, 1e-3, 10.0, 100.0)  # times the example


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
) -> Report:
    """Attack an Op, or a function that builds a graph, and say what breaks.

    One example of valid inputs is enough to attack

    - the types: integers for floats, float32, another number of dimensions, axes of length 0 and
      1, arrays that are not contiguous, declared against returned dtypes and shapes, those of known
      lengths too; Ops that differ in a number and are equal, copies that answer otherwise;
    - the memory: inputs overwritten or handed back, but as ``destroy_map`` and ``view_map`` say,
      two outputs in one array, an answer overwritten by the next call, entries beyond the ends of
      an input that change the answer, a generator of random numbers that other code shares;
    - the derivatives: ``pullback`` and ``pushforward`` against complex steps through `truth` (or
      central differences) and against each other, their linearity, disconnected tangents and
      cotangents, inputs and cotangents that are computed from other inputs, integer inputs, the
      second order;
    - the values, memory and derivatives where inputs have another sign or size, and where one of
      them is broadcast;
    - the shapes without the values (``infer_shape``), PyTensor's rewrites, and batches of all
      inputs and of each one, made by ``vectorize_graph``, against a loop, inputs that are
      constants, and one variable for two inputs;
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
        backends.  Where there is no answer, `truth` should return NaN, as it should beyond the Op's
        domain: other signs and sizes are tried, too.
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

    An Op with a ``destroy_map`` is given copies of its inputs.
    """
    if unknown := set(backends) - set(BACKENDS):
        raise ValueError(f"unknown backends {sorted(unknown)}, expected {sorted(BACKENDS)}")
    _examples(inputs)
    at, cases, refused = None, dict(cases or {}), dict(refused or {})

    def example():
        nonlocal at
        at = point(op, *inputs, truth=truth, rtol=rtol)
        runs(at)

    found = [_attempt("runs in Python", example)]
    if found[0].status != "FAULT":
        found += _in_python(at, cases, refused)
        for backend in backends:
            found += _in_backend(at, backend, cases, refused)
    report = Report(str(op) if isinstance(op, Op) else getattr(op, "__name__", str(op)), found)
    if raises and report.faults:
        raise AssertionError(str(report))
    return report


class Found(Exception):  # noqa: N818 (it ends an attack and is not an error)
    """Ends an attack that has something to say."""

    def __init__(self, says: str, status: str = "FAULT"):
        super().__init__(says)
        self.says, self.status = says, status


def ensure(right, says: str, status: str = "FAULT") -> None:
    """End the attack with this sentence, unless it is right."""
    if not right:
        raise Found(says, status)


def _attempt(name: str, what: Callable[..., str | None], *args) -> Attack:
    """Run one attack and record how it ended."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return Attack(name, "ok", what(*args) or "")
    except Found as found:
        return Attack(name, found.status, found.says)
    except Exception as error:
        return Attack(name, "FAULT", f"unexpected {_brief(error)}")


@contextmanager
def _told(says: str, status: str = "FAULT", of: type[Exception] = Exception):
    """An error inside ends the attack with this sentence, where {} stands for the error.

    With ``of=Found`` it is what is found inside, and at fault, that is told in other words.
    """
    try:
        yield
    except Found as found:
        if of is Found and found.status == "FAULT":
            raise Found(says.replace("{}", found.says), status) from None
        raise
    except of as error:
        raise Found(says.replace("{}", _brief(error)), status) from None


# --- the order of the attacks ---------------------------------------------------------------------


def _each(at: Point, *checks: Callable | bool | None) -> list[Attack]:
    """Run these attacks, but for those that do not apply.  Each is called what it is named."""
    return [_attempt(check.__name__.replace("_", " "), check, at) for check in checks if check]


def _in_python(at: Point, cases: dict, refused: dict) -> list[Attack]:
    found = _each(at, at.of.truth and value, repeated_call)
    found += [_attempt("equal Ops", equal, at)]
    found += _each(at, memory_of_the_inputs, shape_alone, integers_for_floats, float32, float64)
    found += _each(at, number_of_dimensions, empty, not_contiguous)
    found += _derivatives(at)
    found += _each(at, elsewhere, broadcast, constants, rewritten, batched)
    found += _each(at, _alike(at.arrays) and one_variable_twice)
    found += [_attempt(f"case: {name}", _case, at, case) for name, case in cases.items()]
    return found + [_attempt(f"refused: {x}", refuses, at, case) for x, case in refused.items()]


def _derivatives(at: Point) -> list[Attack]:
    """The attacks on derivatives.  A wrong pullback leaves nothing to compare for some of them."""
    of = at.of
    if not of.moving or not of.smooth:
        return [Attack("derivatives", "skipped", "no real input or no real output")]
    if not at.is_finite:
        return [Attack("derivatives", "skipped", "the answer is not finite")]
    found = _each(at, pullback)
    right = of.x_bars and found[0].status != "FAULT"
    for k, why in of.nulls.items():
        found.append(Attack(f"gradient for {of.labels[k]}", "skipped", f"declared: {why}"))
    if at.has_shapes:
        found += _each(at, gradient_alone, pullback_is_linear)
    if right:
        found += _each(at, len(of.ys) > 1 and disconnected_cotangents, inputs_of_one_another)
        found += _each(at, short_gradient, pullback_in_float32, second_order)
    found += _each(at, of.integers and gradient_for_integers, pushforward)
    if not isinstance(of.push, Exception):
        partly = found[-1].status != "FAULT" and len(of.moving) > 1
        found += _each(at, pushforward_is_linear, partly and disconnected_tangents)
    return found + _each(at, right and pushforward_by_two_pulls)


def _case(at: Point, case: Sequence) -> None:
    """Values, shapes and derivatives at further inputs, as one line."""
    there = at.moved(case)
    runs(there)
    found = _each(there, at.of.truth and value, repeated_call, shape_alone) + _derivatives(there)
    if faults := [f"{a.name}: {a.says}" for a in found if a.status == "FAULT"]:
        raise Found("; ".join(faults))


def _in_backend(at: Point, backend: str, cases: dict, refused: dict) -> list[Attack]:
    name, mode = BACKENDS[backend]
    f = g = None

    def agrees():
        nonlocal f, g
        ensure(backend == "c" or find_spec(backend), f"{name} is not installed", "skipped")
        if backend == "c":
            in_c = pytensor.config.cxx and any(map(_brings_c, applys_between(at.of.xs, at.of.ys)))
            ensure(in_c, "no C code, or no compiler", "skipped")
        try:
            f, g, in_objects = in_mode(at.of, mode)
        except NotImplementedError as error:
            raise Found(f"not registered ({_brief(error)})", "skipped") from None
        same_answers(at, f, g, name)
        ensure(not in_objects, "no kernel: compiled code calls perform in object mode", "note")

    def case_agrees(case):
        there = at.moved(case)
        says = alike(there, f)
        if says or not there.is_finite:
            return says
        same_answers(there, f, g, name)
        jax_rule(there) if backend == "jax" else repeated_call(there, f)
        return None

    found = [_attempt(name, agrees)]
    if f is None or found[0].status == "FAULT":
        return found
    found += [_attempt(f"{name}: {x}", case_agrees, case) for x, case in cases.items()]
    if backend == "jax":  # its arrays are copies, and traced code cannot refuse a value
        found.append(_attempt("JAX: empty", cut_alike, at, f))
        return [*found, _attempt("JAX: derivative", jax_rule, at)]
    found += [_attempt(f"{name}: {x}", refuses, at, case, mode, f) for x, case in refused.items()]
    checks = {"repeated call": repeated_call, "empty": empty_alike, "memory": memory_of_the_inputs}
    checks |= {"not contiguous": not_contiguous, "float32": float32}
    checks |= {"integers": integers_for_floats, "elsewhere": elsewhere}
    for what, check in checks.items():
        how = mode if check in (float32, integers_for_floats) else f  # compiled for the example
        found.append(_attempt(f"{name}: {what}", check, at, how))
    return found


# --- the graph, and an example --------------------------------------------------------------------


@dataclass(eq=False)
class Graph:
    """The graph of an Op or function, with unknown lengths, and what is compiled of it once."""

    op: Callable
    labels: list[str]
    xs: list
    ys: list
    truth: Callable | None
    rtol: float
    fresh: Callable | None = None  # a copy from before the first call, or why there is none
    seed: int = 0  # of cotangents
    names: list[str] | None = None  # of the outputs

    def __post_init__(self):
        self.names = self.names or [f"output {j}" for j in range(len(self.ys))]
        self.moving, self.smooth = (  # the real inputs, and the real outputs
            [k for k, v in enumerate(every) if v.type.dtype.startswith("float")]
            for every in (self.xs, self.ys)
        )
        self.integers = [k for k, x in enumerate(self.xs) if "int" in x.type.dtype]  # inputs
        self.is_single = any(v.type.dtype == "float32" for v in (*self.xs, *self.ys))
        self.is_op, self.owned = isinstance(self.op, Op), _is_brought(self.op)
        # What is wrong is a note if it cannot be mended here: in PyTensor's own, in what a function
        # inherits from its Ops, or where all Ops of the graph (what an Elemwise or a Blockwise
        # applies to each entry) are PyTensor's own.
        ops = [node.op for node in applys_between(self.xs, self.ys)]
        self.severity = "FAULT" if self.is_op and self.owned else "note"
        self.inherited = "FAULT" if any(map(_is_brought, ops)) else "note"
        self.forwards = "FAULT" if any(_is_brought(op, forwards=True) for op in ops) else "note"
        self.y_bars = [self.ys[j].type(f"cotangent {j}") for j in self.smooth]
        # They come into the pullback as they are; of copies, for an output may be made of another.
        ends = [pt.tensor_copy(self.ys[j]) for j in self.smooth]
        bars = dict(zip(ends, self.y_bars, strict=True))
        found = _outcome(self.gradients, None, self.moving, bars)
        self.no_pull = found if isinstance(found, Exception) else None
        self.x_bars, self.nulls = ({}, {}) if self.no_pull else found
        self.bar_names = [f"the gradient for {self.labels[k]}" for k in self.x_bars]
        # The real inputs that have a gradient.
        self.free = self.moving if self.no_pull else list(self.x_bars)

    def like(self, xs, ys) -> Graph:
        """Another graph of the Op, of which no truth is known."""
        return replace(self, xs=xs, ys=ys, truth=None)

    def gradients(self, cost, which, cotangents=None) -> tuple[dict, dict]:
        """The gradients for inputs, and why those of others are declared missing."""
        xs = pytensor.grad(
            cost, [self.xs[k] for k in which], known_grads=cotangents,
            disconnected_inputs="ignore", return_disconnected="zero", null_gradients="return",
        )  # fmt: skip
        found = dict(zip(which, xs, strict=True))
        nulls = {k: x.type for k, x in found.items() if isinstance(x.type, NullType)}
        free = {k: x for k, x in found.items() if k not in nulls}
        return free, {k: _first_line(null.why_null) for k, null in nulls.items()}

    @cached_property
    def run(self):
        return compiled(self.xs, self.ys)

    @cached_property
    def shapes(self):
        with pytensor.config.change_flags(on_shape_error="raise"):
            return compiled(self.xs, [y.shape for y in self.ys], SHAPES)

    @cached_property
    def pull(self):
        return compiled([*self.xs, *self.y_bars], [*self.x_bars.values()])

    @cached_property
    def backwards(self) -> Graph:
        """The gradients as outputs, of inputs that are these and the cotangents."""
        labels = [*self.labels, *(y_bar.name for y_bar in self.y_bars)]
        xs, ys = [*self.xs, *self.y_bars], [*self.x_bars.values()]
        return Graph(None, labels, xs, ys, None, self.rtol, seed=2, names=self.bar_names)

    @cached_property
    def push(self):
        """The pushforward, or the error that building it raises."""
        return _outcome(pushed_graph, self, self.moving, True)


@dataclass(frozen=True, eq=False)
class Point:
    """An example of inputs of a :class:`Graph`, and what is computed there once."""

    of: Graph
    arrays: list[np.ndarray]

    @cached_property
    def values(self) -> list[np.ndarray]:
        return [np.array(y) for y in self.of.run(*(x.copy() for x in self.arrays))]

    @property
    def is_finite(self) -> bool:
        """Whether all real outputs are."""
        return all(_is_finite(self.values[j]) for j in self.of.smooth)

    @property
    def is_valid(self) -> bool:
        """Whether there is an answer, and it is finite."""
        return not isinstance(_outcome(getattr, self, "values"), Exception) and self.is_finite

    @property
    def has_few_digits(self) -> bool:
        """Whether no real input has more than those of float32."""
        return self.of.is_single or all(_is_short(self.arrays[k]) for k in self.of.moving)

    @cached_property
    def narrow(self) -> list[str]:
        """What is of float64, and has the digits of float32 alone."""
        of = self.of
        if self.has_few_digits:
            return []
        found = [(of.names[j], self.values[j]) for j in of.smooth]
        if self.has_shapes:
            found += zip(of.bar_names, self.pulled.values(), strict=True)
        return [name for name, x in found if _is_narrow(x)]

    @property
    def is_single(self) -> bool:
        """Whether answers or gradients have the digits of float32, whatever their type."""
        return self.of.is_single or bool(self.narrow)

    @property
    def tolerance(self) -> float:
        return SINGLE if self.is_single else self.of.rtol

    @property
    def coarse(self) -> float:
        """What central differences are trusted to, and answers far from the example, which a truth
        may not have in full."""
        return SINGLE_DIFFERENCES if self.is_single else DIFFERENCES

    @cached_property
    def eps(self) -> float:
        return float(np.finfo("float32" if self.is_single else "float64").eps)

    @cached_property
    def left(self) -> list[float]:
        """What rounding may leave of each output, all of it where its parts cancel: by how much it
        moves where inputs do by so little."""
        rng, found = np.random.default_rng(0), np.zeros(len(self.values))
        most = max(1, _largest(*self.arrays))
        for _ in range(8):
            near = _outcome(self.of.run, *self.trembling(rng))
            for j in self.of.smooth if not isinstance(near, Exception) else ():
                y = self.values[j]
                gap = np.max(np.abs(near[j] - y), initial=0.0) if near[j].shape == y.shape else 0
                if gap <= TREMBLE * self.eps * max(most, _largest(y)):
                    found[j] = max(found[j], 64 * gap)  # else it jumps
        return [*found]

    @cached_property
    def rounding(self) -> float:
        """What it may leave, where parts cancel, of how a cost moves if an input doubles."""
        return sum(
            64 * self.eps * np.abs(b * self.values[j]).sum() + np.abs(b).sum() * self.left[j]
            for j, b in zip(self.of.smooth, self.y_bars, strict=True)
        )

    def lost(self, k: int, moves=1.0) -> float:
        """The same where real input k moves by so much; by one: what it may leave of a gradient."""
        size = _largest(self.arrays[k])
        return self.rounding * _largest(moves) / size if size else 0.0

    @property
    def tangent_lost(self) -> float:
        """The same where all move by their tangents."""
        return sum(self.lost(k, x_dot) for k, x_dot in self.x_dots.items())

    @cached_property
    def y_bars(self) -> list[np.ndarray]:
        rng, dtypes = np.random.default_rng(self.of.seed), [y.type.dtype for y in self.of.ys]
        values = self.values
        return [rng.standard_normal(values[j].shape).astype(dtypes[j]) for j in self.of.smooth]

    @cached_property
    def x_dots(self) -> dict[int, np.ndarray]:
        """A tangent of each real input; symmetric where only symmetric matrices have a gradient."""
        rng, xs = np.random.default_rng(1), self.arrays
        dots = {k: rng.standard_normal(xs[k].shape).astype(xs[k].dtype) for k in self.of.moving}
        symmetric = [k for k, known in self.slopes.items() if known.symmetric]
        return dots | {k: symmetrize(dots[k]) for k in symmetric}

    @cached_property
    def pulled(self) -> dict[int, np.ndarray]:
        found = self.of.pull(*(x.copy() for x in (*self.arrays, *self.y_bars)))
        return {k: np.array(x) for k, x in zip(self.of.x_bars, found, strict=True)}

    @cached_property
    def has_shapes(self) -> bool:
        """Whether there are gradients, and each has its input's shape."""
        pulled = _outcome(getattr, self, "pulled") if self.of.x_bars else None
        return isinstance(pulled, dict) and all(
            x.shape == self.arrays[k].shape for k, x in pulled.items()
        )

    @cached_property
    def backwards(self) -> Point:
        return Point(self.of.backwards, [*self.arrays, *self.y_bars])

    @cached_property
    def slopes(self) -> dict[int, Slope]:
        """What the gradients should be."""
        return {k: slope(self, k) for k in self.of.free}

    def moved(self, case) -> Point:
        """Other inputs, in the types of the graph."""
        pairs = zip(case, self.of.xs, strict=True)
        return Point(self.of, [np.asarray(x).astype(s.type.dtype) for x, s in pairs])

    def other(self, k: int, x, shape=None) -> Point | Exception:
        """A graph of the Op for another input k, of this shape if it is known; or why not."""
        arrays = self.but(k, x)
        shapes = [(None,) * z.ndim for z in arrays]
        shapes[k] = shape or shapes[k]
        graph = _outcome(built, self.of.op, self.of.labels, arrays, shapes)
        return graph if isinstance(graph, Exception) else Point(self.of.like(*graph), arrays)

    def but(self, k: int, x) -> list[np.ndarray]:
        """The inputs with another one in the place of input k."""
        return [*self.arrays[:k], x, *self.arrays[k + 1 :]]

    def nearby(self, change: Callable = lambda x: (x * (1 + 1e-3)).astype(x.dtype)) -> list:
        """The inputs, the real ones changed: if it is not said how, so little that symmetric
        matrices stay symmetric."""
        return [change(x) if k in self.of.moving else x for k, x in enumerate(self.arrays)]

    def inferred(self) -> list[tuple[int, ...]]:
        """The shapes of the outputs, without the values."""
        return [tuple(map(int, shape)) for shape in self.of.shapes(*self.arrays)]

    def trembling(self, rng) -> list[np.ndarray]:
        """The inputs, the real ones moved by some units of rounding."""
        return self.nearby(
            lambda x: (x * (1 + self.eps * rng.integers(-4, 5, x.shape))).astype(x.dtype)
        )

    def sweep(self, f: Callable, x, v) -> StepSweep:
        """Central differences of a function of x along v."""
        steps = SINGLE_STEPS * max(1, _largest(x)) if self.is_single else None
        return step_sweep(f, x, v, steps=steps)

    def total(self, outputs):
        """The sum of cotangents times real outputs."""
        return _along(self.y_bars, [outputs[j] for j in self.of.smooth])

    def cost(self, k: int, f: Callable) -> Callable:
        """That of the outputs of f, as a function of input k."""
        return lambda x: self.total(_many(f(*self.but(k, x))))


def point(op, *inputs, truth=None, rtol=1e-9) -> Point:
    """The graph of an Op or function, at an example of its inputs."""
    arrays = _examples(inputs)
    labels, error = _labels(op, len(arrays)), None
    fresh = _outcome(deepcopy, op) if isinstance(op, Op) else op
    # There are Ops that take float32 alone, and gradients that need lengths which are known.
    for dtype, known in product(("float64", "float32"), (False, True)):
        given = [x.astype(dtype) if x.dtype.kind == "f" else x for x in arrays]
        try:
            xs, ys = built(op, labels, given, [x.shape for x in given] if known else None)
            at = Point(Graph(op, labels, xs, ys, truth, rtol, fresh), given)
            _ = at.values if dtype == "float64" else None
        except Exception as refusal:
            error = error or refusal
            continue
        of, no_pull = at.of, at.of.no_pull
        fine = not (no_pull and of.moving and of.smooth) or of.owned
        if known or fine or isinstance(no_pull, NotImplementedError):
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
    rows = zip(labels, arrays, shapes, strict=True)
    symbols = [pt.tensor(name, dtype=str(x.dtype), shape=shape) for name, x, shape in rows]
    return symbols, applied(op, symbols)


def applied(op, symbols) -> list:
    """The outputs of the Op, which is given copies if it overwrites its inputs."""
    return _listed(
        op(*map(pt.tensor_copy, symbols) if getattr(op, "destroy_map", None) else symbols)
    )


def compiled(inputs, outputs, mode=AS_WRITTEN):
    # In Python, constants would still be folded by C code, behind a lock that processes share.
    flags = {"cxx": ""} if mode in (AS_WRITTEN, SHAPES, REWRITTEN) else {}
    with pytensor.config.change_flags(**flags):
        return pytensor.function(
            inputs, outputs, mode=mode, on_unused_input="ignore", accept_inplace=True
        )


# --- values and memory ----------------------------------------------------------------------------


def runs(at: Point) -> None:
    """The inputs are left alone, and the outputs are what make_node declares."""
    _ = at.values  # of the first call, with which `repeated_call` compares later ones
    with _untouched(at.of.labels, at.arrays, "{} is overwritten: copy it, or declare it in "
                    "destroy_map"), _undisturbed():  # fmt: skip
        values = at.of.run(*at.arrays)
    as_declared(at.of, values)
    overwritten(at)
    known = _outcome(built, at.of.op, at.of.labels, at.arrays, [x.shape for x in at.arrays])
    if not isinstance(known, Exception):
        with _told("with known lengths it fails: {}", at.of.inherited):
            as_declared(at.of, values, known[1])


@contextmanager
def _untouched(labels, arrays, says: str):
    """What is done inside writes to none of these arrays, or there is this to say."""
    before = [x.copy() for x in arrays]
    yield
    for label, x, old in zip(labels, arrays, before, strict=True):
        ensure(np.array_equal(x, old, equal_nan=True), says.replace("{}", label))


@contextmanager
def _undisturbed():
    """What is done inside leaves alone what all code of the process shares."""

    def shared():
        return random.getstate(), np.random.get_state(), np.geterr()  # noqa: NPY002

    before = shared()
    try:
        random.seed(0.27182)
        np.random.seed(27182)  # noqa: NPY002
        with np.errstate(all="ignore"):
            started = pickle.dumps(shared())
            yield
            says = "it draws from, or seeds, the generator of random numbers that all code shares, "
            says += "or changes how NumPy treats errors: use np.random.default_rng and np.errstate"
            ensure(pickle.dumps(shared()) == started, says)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002


def overwritten(at: Point) -> None:
    """An Op with a destroy_map overwrites, and hands back, no other inputs than it says."""
    node = at.of.ys[0].owner
    if not (at.of.is_op and node.op.destroy_map):
        return
    inputs = [np.array(x) for x in compiled(at.of.xs, node.inputs)(*at.arrays)]
    before, storage = [x.copy() for x in inputs], [[None] for _ in node.outputs]
    node.op.perform(node, inputs, storage)
    declared = [{*node.op.destroy_map.get(j, ()), *node.op.view_map.get(j, ())}
                for j in range(len(storage))]  # fmt: skip
    for k, (label, x, old) in enumerate(zip(at.of.labels, inputs, before, strict=True)):
        said = np.array_equal(x, old, equal_nan=True) or any(k in those for those in declared)
        ensure(said, f"{label} is overwritten, and destroy_map does not say so")
        for j, (y,) in enumerate(storage):
            if np.shares_memory(y, x) and k not in declared[j]:
                raise Found(f"output {j} is a view of {label}, and no map says so")


def as_declared(of: Graph, values, ys: list | None = None) -> None:
    """The outputs are of the types and shapes of these symbols, or those of the graph."""
    for name, y, value in zip(of.names, ys or of.ys, values, strict=True):
        of_type(name, y, value)
        declared, shape = y.type.shape, getattr(value, "shape", ())
        pairs = zip(shape, declared, strict=False)
        fits = len(shape) == len(declared) and all(m in (n, None) for n, m in pairs)
        ensure(fits, f"{name} is declared with shape {declared}, but has {shape}")


def of_type(what: str, symbol, value, status: str = "FAULT") -> None:
    returned, declared = getattr(value, "dtype", type(value).__name__), symbol.type.dtype
    says = f"{what} is declared {declared} and returned as {returned}"
    ensure(str(returned) == declared, says, status)


def value(at: Point) -> None:
    """The values are those of the truth."""
    agree(at, at.values, _many(at.of.truth(*at.arrays)), "the truth")


RANDOM = (
    "two calls with the same inputs give different answers: it draws at random, or returns memory "
    "that it has not written"
)


def repeated_call(at: Point, f: Callable | None = None) -> None:
    """A second call must not reach the answer of the first, nor do two arrays share memory."""
    f = f or at.of.run
    first = _many(f(*at.arrays))
    apart(at.of, at.arrays, first)
    kept = [y.copy() for y in first]
    ensure(_same(f(*at.arrays), kept) and (f is not at.of.run or _same(at.values, kept)), RANDOM)
    _outcome(f, *at.nearby())
    for name, y, old in zip(at.of.names, first, kept, strict=True):
        says = f"the next call overwrites {name}: return a new array each time"
        ensure(_same([y], [old]), says)
    says = "the same inputs give another answer after a call with other inputs"
    ensure(_same(f(*at.arrays), kept), says)


def equal(at: Point) -> None:
    """Ops that differ in a number, and so in their answers, are not equal; a copy is, and answers
    as the Op does, and so does the Op where it is applied again."""
    of = at.of
    if isinstance(of.fresh, Exception):
        raise Found(f"it can be neither copied nor pickled: {_brief(of.fresh)}", "note")
    with _told("a copy, as pickling makes one, cannot be compared with it ({})", of.severity):
        hashes = {hash(op) for op in (of.fresh, of.op)} if of.fresh == of.op else ()
    ensure(len(hashes) < 2, "it is equal to its copy, and has another hash", of.severity)
    there = Point(of, at.nearby())
    for op, says in () if not there.is_valid else (
        (of.op, "applied again, it answers otherwise ({}): it keeps something between its calls"),
        (of.fresh, "a copy from before the first call, as pickling makes one, answers otherwise "
         "({}): it loses a part of the Op, or the Op keeps something between its calls"),
    ):  # fmt: skip
        with _told(says, of.inherited, Found), _told("it fails: {}"):
            xs, ys = built(op, of.labels, at.arrays, [x.type.shape for x in of.xs])
            again = of.like(xs, ys)
            same_answers(there, again.run, again.pull if again.x_bars else None, "it")
    for name, number in vars(of.op).items() if of.is_op else ():
        if (another := _other(number)) is None:
            continue
        other = copy(of.op)
        vars(other)[name] = another  # of a frozen dataclass, too
        if _outcome(lambda other=other: other == of.op) is not True:
            continue
        found = _outcome(lambda op: compiled(*built(op, of.labels, at.arrays))(*at.arrays), other)
        if not (isinstance(found, Exception) or _same(found, at.values)):
            raise Found(
                f"one with another {name} has another answer, and is equal, so that PyTensor's "
                f"rewrites may take it in the place of this one: name {name} in __props__",
                of.severity,
            )


def _other(x):
    """Another number, or as many of them; None if it is none."""
    if isinstance(x, bool):
        return not x
    if isinstance(x, tuple) and x:
        others = tuple(map(_other, x))
        return None if None in others else others
    is_number = isinstance(x, int | float) or isinstance(x, np.ndarray) and x.dtype.kind in "fiu"
    return x + 1 if is_number else None


def apart(of: Graph, arrays, found) -> None:
    """No output shares memory with an input or another output."""
    for j, y in enumerate(found):
        for label, x in zip(of.labels, arrays, strict=True):
            says = f"{of.names[j]} is a view of {label}: copy it, or declare view_map"
            ensure(not np.shares_memory(y, x), says)
        for i in range(j):
            ensure(not np.shares_memory(y, found[i]), f"outputs {i} and {j} share memory: what is "
                   "written to one changes the other; return two arrays")  # fmt: skip


def memory_of_the_inputs(at: Point, f: Callable | None = None) -> None:
    """Neighbours in memory of the inputs neither matter nor change."""
    answers = []
    for wall in (np.nan, 7.0, 7.0):
        walled, buffers = zip(*(_walled(x, wall) for x in at.arrays), strict=True)
        with _untouched(at.of.labels, buffers, "writes to {} or beyond its ends"):
            answers.append([np.array(y) for y in (f or at.of.run)(*walled)])
    ensure(_same(answers[1], answers[2]), RANDOM)
    says = "the answer depends on memory beyond the ends of an input"
    ensure(_same(answers[0], answers[1]), says)


def not_contiguous(at: Point, f: Callable | None = None) -> None:
    """Views that run backwards with gaps, and columns first, are answered as contiguous arrays."""
    for layout in (_strided, lambda x: np.array(x, order="F")):
        arrays = [layout(x) for x in at.arrays]
        found = _many((f or at.of.run)(*arrays))
        apart(at.of, arrays, found)
        agree(at, found, at.values, "contiguous", "{} of views with strides")


def elsewhere(at: Point, f: Callable | None = None) -> None:
    """Inputs of another sign or size are answered as the example is.

    Where they, or the truth, have no answer, nothing is said.  At zeros, ones and whole numbers,
    where an answer may be an input, no derivative is looked at.
    """
    of = at.of
    for who, there in _others(at):
        if not there.is_valid:
            continue
        trues = there.values if f or not of.truth else _outcome(of.truth, *there.arrays)
        if isinstance(trues, Exception) or not all(map(_is_finite, _many(trues))):
            continue
        says = f"{{}}, with {who}; if there is no answer there, let there be an error, or NaN"
        with _told(says, of.inherited, Found):
            with _untouched(of.labels, there.arrays, "{} is overwritten"):
                found = _many((f or of.run)(*there.arrays))
            apart(of, there.arrays, found)
            against = "Python" if f else "the truth"
            agree(there, found, _many(trues), against, rtol=there.coarse)
            if not f and " all " not in who:
                with _told("pullback fails: {}"):
                    _ = of.no_pull or there.pulled
                differentiated(there)


def _others(at: Point):
    """The real inputs, all and each alone, times numbers; and all of simple numbers.

    Bounds stay in order, and so does what increases, such as knots.
    """
    every, xs = at.of.moving, at.arrays

    def below(x, y):
        return bool(np.all(x < y))

    def times(scale, x):
        rises = scale < 0 and x.ndim == 1 and x.size > 2 and (np.diff(x) > 0).all()
        return (scale * (x[::-1] if rises else x)).astype(x.dtype)

    pairs = [(i, k) for i, k in permutations(every, 2) if _outcome(below, xs[i], xs[k]) is True]
    for scale in ELSEWHERE if every else ():
        for which in (every, *([k] for k in every if len(every) > 1)):
            moved = [times(scale, x) if k in which else x for k, x in enumerate(xs)]
            if all(below(moved[i], moved[k]) for i, k in pairs):
                who = at.of.labels[which[0]] if len(which) == 1 else "all real inputs"
                yield f"{who} times {scale:g}", Point(at.of, moved)
    for who, simple in (("0", np.zeros_like), ("1", np.ones_like), ("whole", np.rint)):
        yield f"real inputs all {who}", Point(at.of, at.nearby(simple))


def broadcast(at: Point) -> None:
    """An input of length 1 along an axis, or without it, is refused, or has a gradient as long.

    Where it has not, it is a fault if the Op knows what it broadcasts, as the shapes tell that it
    infers, or declares.  Else it is one for such inputs alone.
    """
    of, says, known = at.of, [], []
    for k, x in enumerate(at.arrays):
        shorter = [np.take(x, [0], axis) for axis, n in enumerate(x.shape) if n > 1]
        shorter += [x[(slice(0, 1),) * x.ndim]] * (len(shorter) > 1)
        for short in [*shorter, *([x[0]] if x.ndim and len(x) else [])]:
            there = at.other(k, short, tuple(1 if n == 1 else None for n in short.shape))
            if isinstance(there, Exception) or not there.is_valid:
                continue
            known.append(_knows(there))
            if there.of.no_pull or isinstance(_outcome(getattr, there, "pulled"), Exception):
                continue
            if isinstance(found := _outcome(differentiated, there), Found):
                says.append(f"{found.says}, where {of.labels[k]} has shape {short.shape}")
    ensure(known, "refused", "ok")
    ensure(
        not says, f"{''.join(says[:1])}: refuse it, or sum", of.inherited if all(known) else "note"
    )


def _knows(at: Point) -> bool:
    """Whether the shapes of the outputs are inferred, or declared, as they are."""
    of, lengths = at.of, [x.shape for x in at.arrays]
    ways = [lambda: [y.type.shape for y in built(of.op, of.labels, at.arrays, lengths)[1]]]
    ways += [at.inferred] if hasattr(of.op, "infer_shape") else []
    return [y.shape for y in at.values] in map(_outcome, ways)


def constants(at: Point) -> None:
    """An input that is a constant is answered as any other, and so are the gradients."""
    of = at.of
    for k, label in enumerate(of.labels):
        symbols = [*of.xs[:k], pt.constant(at.arrays[k]), *of.xs[k + 1 :]]
        says = f"if {label} is a constant, {{}}"
        with _told(says, of.inherited, Found), _told("it fails: {}"):
            ys = applied(of.op, symbols)
            there = Point(of.like(of.xs, ys), at.arrays)
            as_declared(there.of, there.values)
            agree(at, there.values, at.values, "a symbol")
            for i in of.free if at.has_shapes else ():
                if i != k:
                    what = f"the gradient for {of.labels[i]}"
                    compare(what, there.pulled[i], at.pulled[i], "a symbol", at.tolerance)


def rewritten(at: Point) -> None:
    """PyTensor's rewrites change neither values nor gradients, nor do they harm the inputs."""
    f, g, _ = in_mode(at.of, REWRITTEN)
    same_answers(at, f, g, "after PyTensor's rewrites,", at.of.severity)


# --- shapes and types -----------------------------------------------------------------------------


def shape_alone(at: Point) -> None:
    """infer_shape agrees with the values."""
    of = at.of
    if of.is_op and hasattr(of.op, "infer_shape"):  # PyTensor passes over what does not fit
        node = of.ys[0].owner
        said = _outcome(of.op.infer_shape, node, [tuple(x.shape) for x in node.inputs])
        said = [] if isinstance(said, Exception) else said
        if said and len(said) != len(of.ys):
            raise Found(f"infer_shape gives {len(said)} shapes for {len(of.ys)} outputs")
        for j, (shape, y) in enumerate(zip(said, of.ys, strict=False)):
            if shape is not None and len(shape) != y.ndim:
                raise Found(f"infer_shape gives output {j} {len(shape)} axes, it has {y.ndim}")
            for n in shape or ():
                if "int" not in str(dtype := getattr(n, "dtype", type(n).__name__)):
                    raise Found(f"infer_shape gives output {j} a length of {dtype}, not an integer")
    same_shapes(at, at.values)
    if of.is_op and any(node.op == of.op for node in of.shapes.maker.fgraph.toposort()):
        raise Found("no infer_shape: to know a shape, the Op has to run", "note")


def same_shapes(at: Point, values) -> None:
    for name, shape, found in zip(at.of.names, at.inferred(), values, strict=True):
        says = f"infer_shape gives {name} the shape {shape}, it has {found.shape}"
        ensure(shape == found.shape, says)


def empty(at: Point) -> str | None:
    """Axes of length 0 and 1, all, those that are alike and one by one, have the right shapes."""
    of, says = at.of, None
    ensure(any(x.ndim for x in at.arrays), "all inputs are scalars", "skipped")
    for number, arrays in enumerate(_cuts(at)):
        values = _outcome(of.run, *arrays)
        if isinstance(values, Exception):
            says = f"refused: {_brief(values)}" if number == 0 else says
            continue
        with _told(f"{{}}, where {_shapes(of.labels, arrays)}", of.inherited, Found):
            as_declared(of, values)
            with _told("infer_shape: {}"):
                same_shapes(Point(of, arrays), values)
    return says


def integers_for_floats(at: Point, mode=AS_WRITTEN) -> str:
    """Integers are answered like the floats of the same values, or refused when built."""
    of, refused = at.of, []
    for k in of.moving:
        errors, answered, who = [], False, f"with integers for {of.labels[k]},"
        x = at.arrays[k]
        for near in (np.rint(x), np.rint(3 * x) + 1, np.abs(np.rint(x))):  # and further away
            whole = np.where((near != 0) & (np.abs(near) < 2**53), near, 1).astype(x.dtype)
            there = at.other(k, whole.astype("int64"))
            if isinstance(there, Exception):
                refused.append(of.labels[k])
                break
            by_floats = _outcome(of.run, *at.but(k, whole))
            if isinstance(by_floats, Exception) or not all(map(_is_finite, by_floats)):
                continue
            by_ints = _outcome(compiled(there.of.xs, there.of.ys, mode), *there.arrays)
            if isinstance(by_ints, Exception):
                errors.append(f"{who} {_brief(by_ints)}; with floats, an answer")
                continue
            answered = True
            for j, (y, left, right) in enumerate(zip(there.of.ys, by_ints, by_floats, strict=True)):
                dtype, what = y.type.dtype, f"{who} output {j}"
                says = f"{what} is declared {dtype}, which truncates real numbers"
                says += ": turn inputs into floats in make_node"
                real = not np.array_equal(right, np.rint(right))  # as those of sums are not
                ensure(not real or dtype not in pt.type.integer_dtypes, says, of.inherited)
                rtol = SINGLE if "float32" in (dtype, str(right.dtype)) else of.rtol
                compare(what, left, right, "that of floats", rtol, of.inherited)
            as_declared(there.of, by_ints)
        ensure(answered or not errors, "".join(errors[:1]), of.inherited)
    return f"refused for {', '.join(refused)}" if refused else ""


def float32(at: Point, mode=AS_WRITTEN) -> None:
    """float32 is answered in float32, as near as it can be."""
    of, arrays = at.of, at.nearby(lambda x: x.astype("float32"))
    ensure(of.moving, "no input is real", "skipped")
    with _told("refused: {}", "note"):
        xs, ys = built(of.op, of.labels, arrays)
    found = compiled(xs, ys, mode)(*arrays)
    as_declared(of, found, ys)
    agree(at, found, at.moved(arrays).values, "float64", rtol=SINGLE, severity=of.inherited)


def float64(at: Point) -> None:
    """What is declared float64 is not computed in float32."""
    ensure(not at.has_few_digits, "no input has more digits than float32", "skipped")
    says = f"{next(iter(at.narrow), '')} is of float64, and has the digits of float32 alone"
    ensure(not at.narrow, says, at.of.inherited)


def number_of_dimensions(at: Point) -> None:
    """An axis too many or too few is refused when the graph is built, or answered."""
    of, hint = at.of, "check ndim in make_node"
    for k, x in enumerate(at.arrays):
        fewer = [(x[0], None)] if x.ndim and len(x) else []
        for changed, shape in [(x[None], (1, *(None,) * x.ndim)), *fewer]:
            there = at.other(k, changed, shape)
            if isinstance(there, Exception):
                continue
            given = f"{of.labels[k]} with {changed.ndim} dimensions instead of {x.ndim}"
            late = "is accepted when the graph is built and fails when it runs"
            with _told(f"{given} {late} ({{}})" + f": {hint}" * of.is_op, of.severity):
                values = there.of.run(*there.arrays)
            with _told(f"{given}: {{}}: {hint}", of.inherited, Found):
                as_declared(there.of, values)


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
    x, pulled, truth = at.arrays[k], at.pulled[k] if at.has_shapes else None, at.of.truth

    def agrees(candidate):
        return pulled is not None and not _wrong(candidate, pulled, at, k)

    def by_steps(E):
        return complex_step(lambda t: at.cost(k, truth)(x + t * E), 0.0)

    first, f = None, truth or at.of.run
    if truth:
        steps = _outcome(entry_by_entry, by_steps, x, False, MANY)
        if not isinstance(steps, Exception) and np.isfinite(steps).any():
            first = Slope(steps, "complex step", at.tolerance, False)
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
    """Central differences entry by entry; NaN where f has no values on both sides, or jumps, as
    vectors do that are known but for their signs."""
    x, cost = at.arrays[k], at.cost(k, f)
    scale = _along(map(np.abs, at.y_bars), [1 + np.abs(at.values[j]) for j in at.of.smooth])

    def by_differences(E):
        try:
            sweep = at.sweep(lambda z: float(cost(z.astype(x.dtype))), x, E)
        except ValueError:  # not finite around the point
            return np.nan
        smaller = np.abs(sweep.estimates[sweep.best :])  # steps than the best
        steep = smaller > 2 * abs(sweep.value)
        jumps = steep & (smaller * sweep.steps[sweep.best :] > JUMP * scale)
        lost = abs(sweep.value) <= sweep.uncertainty  # of x^3 at 0 a step leaves its square
        return np.nan if jumps.any() else 0.0 if lost else sweep.value

    found = entry_by_entry(by_differences, x, symmetric, MANY)
    return Slope(found, "central differences", at.coarse, symmetric)


def _wrong(known: Slope, pulled, at: Point, k: int) -> str:
    """How a gradient differs from what it should be; empty if it does not."""
    true, left = known.value, 0.0
    there = np.isfinite(true)
    if not there.any():
        return "cannot be compared" if true.size else ""
    if known.against != "complex step":
        # An entry that is small beside another gradient, or beside the cost, is lost in rounding.
        of_cost = 1e-3 * (np.finfo(np.float32).eps if at.is_single else 1e-6)
        cost = abs(float(at.cost(k, at.of.run)(at.arrays[k])))
        beside = 1e-3 * known.rtol * _largest(*at.pulled.values())
        left = max(beside, of_cost * cost, at.lost(k))
    pulled = symmetrize(pulled) if known.symmetric else pulled
    return _difference(np.where(there, pulled, 0), np.where(there, true, 0), known.rtol, left)


def _at_a_kink(at: Point, k: int) -> bool:
    """Whether each wrong entry of a gradient lies between the slopes to its left and right."""
    x, pulled, known = at.arrays[k], at.pulled[k], at.slopes[k].value
    close = np.abs(pulled - known) <= DIFFERENCES * _largest(pulled)
    wrong = [tuple(entry) for entry in np.argwhere(~close)]

    def between(entry):
        E = np.zeros(x.shape)
        E[entry] = 1
        return _is_between(at.cost(k, at.of.run), x, E, pulled[entry])

    return bool(wrong) and all(map(between, wrong))


def _is_between(f: Callable, x, v, along: float) -> bool:
    """Whether a slope along v lies between those of f to the left and to the right of x."""
    h = 1e-6 * max(1.0, _largest(x))
    values = [_outcome(lambda z=z: float(f(z))) for z in (x - h * v, x, x + h * v)]
    if any(isinstance(z, Exception) for z in values):
        return False
    low, high = sorted(np.diff(values) / h)
    slack = 1e-4 * max(abs(low), abs(high))
    return high - low > 10 * slack and low - slack <= along <= high + slack


# --- derivatives, backwards -----------------------------------------------------------------------


def pullback(at: Point) -> str:
    """The cotangents of the inputs are right."""
    of, error = at.of, at.of.no_pull
    missing = isinstance(error, NotImplementedError)
    ensure(not missing, "no pullback: the Op has no gradient", "note")
    # PyTensor's own check of the one way round has no words.
    disagree = "connection_pattern" in str(error) or isinstance(error, AssertionError)
    ensure(not disagree, "pullback and connection_pattern disagree: an input is said to be "
           "connected, and gets a DisconnectedType, or the other way round")  # fmt: skip
    ensure(not error, f"pullback cannot be built: {_brief(error)}", of.inherited)
    ensure(of.free, "all gradients are declared missing", "skipped")
    wrong, remarks = [], []
    for k, x_bar in at.pulled.items():
        who, expected = f"for {of.labels[k]}", at.arrays[k].shape
        if x_bar.shape != expected:
            wrong.append(f"{who} it has shape {x_bar.shape}, expected {expected}")
        elif says := _wrong(at.slopes[k], x_bar, at, k):
            if says == "cannot be compared":
                remarks.append(f"{who} there are no differences")
            elif _at_a_kink(at, k):
                remarks.append(f"{who} it is at a kink, between the slopes of both sides")
            else:
                wrong.append(f"{who} {says} ({at.slopes[k].against})")
        elif at.slopes[k].symmetric:
            remarks.append(f"{who} it is that of a symmetric matrix")
    ensure(not (wrong or remarks), "; ".join(wrong or remarks), "FAULT" if wrong else "note")
    return f"against {next(iter(at.slopes.values())).against}"


def gradient_alone(at: Point) -> None:
    """The graph of the gradients, whose Ops may be others, keeps to memory, types and shapes."""
    with _told("{}", at.of.backwards.inherited, Found):
        for check in (runs, repeated_call, memory_of_the_inputs, not_contiguous, shape_alone):
            check(at.backwards)


def differentiated(at: Point, forwards: bool = True) -> None:
    """Pullback and pushforward are right, as far as one direction tells; where it does not, they
    are looked at entry by entry."""
    of, rng = at.of, np.random.default_rng(3)
    if not of.free or not of.smooth or isinstance(of.no_pull, NotImplementedError):
        return
    v = {}
    for k in of.moving:  # as each entry is large
        x = at.arrays[k]
        size = np.where(np.isfinite(x), np.where(x == 0, 1, np.abs(x)), 0)
        v[k] = (size * rng.standard_normal(x.shape)).astype(x.dtype)
        v[k] = symmetrize(v[k]) if _is_symmetric(x) else v[k]

    def cost(t):
        moved = {k: (at.arrays[k] + t * d).astype(d.dtype) for k, d in v.items() if k in of.free}
        return float(at.total(of.run(*(moved.get(k, x) for k, x in enumerate(at.arrays)))))

    sweep = _outcome(at.sweep, cost, 0.0, 1.0)
    if isinstance(sweep, Exception) or at.has_shapes and _lost(at):
        return  # there are no differences, or nothing but rounding
    slack = 10 * sweep.uncertainty + 1e-9 * abs(cost(0.0))
    terms = [at.pulled[k] * v[k] for k in of.free] if at.has_shapes else [np.array(np.nan)]
    checks = [] if _is_sum(float(sweep.value), terms, at.coarse, slack) else [pullback]
    if forwards and not (checks or of.nulls or isinstance(of.push, Exception)):
        pushed = _outcome(of.push, *at.arrays, *v.values())
        along = np.nan if isinstance(pushed, Exception) else float(_along(at.y_bars, pushed))
        checks = [] if _is_sum(along, terms, at.coarse, slack) else [pushforward]
    for check in checks:
        found = _outcome(check, at)
        if isinstance(found, Found) and found.status == "FAULT":
            raise Found(f"{check.__name__}: {found.says}")


def _lost(at: Point) -> bool:
    """Whether the last bits of the inputs move a value, or a gradient, by what differences see."""
    known, near = [*at.values, *at.pulled.values()], at.trembling(np.random.default_rng(0))
    found = [*at.of.run(*near), *at.of.pull(*near, *at.y_bars)]
    return bool(any(map(_difference, found, known, [at.coarse / 100] * len(known))))


def pullback_is_linear(at: Point) -> None:
    """The answers to two parts of the cotangent add up to the answer."""
    who = [f"for {at.of.labels[k]}, the answers to two parts of the cotangent" for k in at.pulled]
    hint = ": every term must contain the cotangent once"
    left = [at.lost(k) for k in at.pulled]
    _add_up(at, at.of.pull, at.y_bars, at.pulled.values(), who, left, hint)


def _add_up(at: Point, f: Callable, v, whole, who, left, hint: str = "") -> None:
    """f(v) = f(-2 m v) + f((1 + 2 m) v), where m is 1 at every other entry and 0 between.

    But for what is `left` of each by rounding.
    """
    m = [(np.arange(x.size) % 2 == 0).reshape(x.shape).astype(x.dtype) for x in v]
    parts = [-2 * a * x for a, x in zip(m, v, strict=True)]
    found = [np.array(y) for y in f(*at.arrays, *parts)]
    rest = f(*at.arrays, *(x - p for x, p in zip(v, parts, strict=True)))
    for what, once, y, z, least in zip(who, whole, found, rest, left, strict=True):
        added = np.where(np.isfinite(once), y + np.asarray(z), once)
        says = _difference(added, once, at.tolerance, least)
        ensure(not says, f"{what}, one with zeros, do not add up ({says}){hint}")


def disconnected_cotangents(at: Point) -> None:
    """With some outputs unused, as with zeros for their cotangents."""
    of = at.of
    for n, j in enumerate(of.smooth):
        y_bar, alone = of.y_bars[n], f"if the cost uses output {j} alone,"
        with _told(f"{alone} pullback fails {ABSENT.format('cotangent')}"):
            x_bars, _ = of.gradients((y_bar * of.ys[j]).sum(), of.moving)
            found = compiled([*of.xs, y_bar], [*x_bars.values()])(*at.arrays, at.y_bars[n])
        zeros = [b if i == n else 0 * b for i, b in enumerate(at.y_bars)]
        full = dict(zip(of.free, of.pull(*at.arrays, *zeros), strict=True))
        for k, x_bar in zip(x_bars, found, strict=True):
            if k in full:
                what = f"{alone} the gradient for {of.labels[k]}"
                compare(what, x_bar, full[k], "zero cotangents", at.tolerance)


def one_variable_twice(at: Point) -> None:
    """One variable for two inputs is answered as two equal ones; its gradient is the sum of theirs.

    Rewrites, and pullbacks that know variables by what they are, take the one for the other.
    """
    of, xs = at.of, at.arrays
    i, k = _alike(xs)
    there, who = Point(of, at.but(k, xs[i])), f"one variable as {of.labels[i]} and {of.labels[k]}"
    ensure(there.is_valid, f"there is no answer for {who}", "skipped")
    free = [x for x in of.free if x != k] if at.has_shapes else []
    with _told(f"{who} fails: {{}}", of.inherited):
        ys = clone_replace(of.ys, {of.xs[k]: of.xs[i]}, rebuild_strict=False)
        x_bars, _ = of.gradients(_along(of.y_bars, [ys[j] for j in of.smooth]), free)
        symbols = [*of.xs, *of.y_bars]
        found = compiled(symbols, [*ys, *x_bars.values()], REWRITTEN)(*xs, *there.y_bars)
    agree(at, found[: len(ys)], there.values, "two variables", f"{{}} for {who}")
    for x, x_bar in zip(x_bars, found[len(ys) :], strict=True):
        parts = [there.pulled[z] for z in ((i, k) if x == i else (x,)) if z in there.pulled]
        left = max(there.lost(x), at.tolerance * _largest(*parts))  # they may cancel
        says = _difference(x_bar, sum(parts), 10 * at.tolerance, 10 * left)
        what = f"the gradient for {of.labels[x]} for {who}"
        ensure(not says, f"{what} {says} (two variables)", of.inherited)


def inputs_of_one_another(at: Point) -> None:
    """Each input has its own gradient where the next one, and the cotangents, are made of it.

    Each moves with the mean of the one before it, and the cotangents with that of the first: their
    values stay, since what the mean is now is taken off.
    """
    of, inputs, moves, masks = at.of, list(at.of.xs), [0.0], {}
    for k in of.free:
        inputs[k] = X = of.xs[k] + pt.cast(moves[-1], of.xs[k].type.dtype)
        masks[k] = np.isfinite(at.arrays[k]) / max(at.arrays[k].size, 1)
        mean = (pt.switch(masks[k], X, 0.0) * masks[k]).sum()
        moves.append(mean - pg.disconnected_grad(mean))
    with _told("where one is computed from another, it fails: {}", of.inherited):
        ys = clone_replace(of.ys, dict(zip(of.xs, inputs, strict=True)), rebuild_strict=False)
        bars = [b + pt.cast(moves[1], b.type.dtype) for b in of.y_bars]
        x_bars, _ = of.gradients(_along(bars, [ys[j] for j in of.smooth]), of.free)
        found = compiled([*of.xs, *of.y_bars], [*x_bars.values()])(*at.arrays, *at.y_bars)
    # From the last input to the first, what comes through the next one; that may cancel.
    expected, more, sizes, size = {}, 0.0, {}, 0.0
    for k in reversed(of.free):
        expected[k] = at.pulled[k] + more * masks[k]
        more = expected[k].sum()
        size = sizes[k] = max(size, _largest(expected[k]))
    expected[of.free[0]] += masks[of.free[0]] * sum(at.values[j].sum() for j in of.smooth)
    for k, x_bar in zip(x_bars, found, strict=True):
        left = max(at.lost(k), at.tolerance * sizes[k])
        says = _difference(x_bar, expected[k], 10 * at.tolerance, 10 * left)
        what = f"if another input, or a cotangent, is made of {of.labels[k]}, its gradient {says}"
        ensure(not says, f"{what}: take gradients for symbols of your own", of.inherited)


ABSENT = "({{}}): a {} may be of DisconnectedType, which has no arithmetic"


def short_gradient(at: Point) -> None:
    """The gradient is right where axes have length 0 and 1."""
    ensure(any(x.ndim for x in at.arrays), "all inputs are scalars", "skipped")
    for number, arrays in enumerate(_cuts(at)):
        there, all_empty = Point(at.of, arrays), number == 0
        if not (all_empty or all(x.size for x in arrays)):
            continue  # what one empty axis means for the others is not known here
        if not there.is_valid:
            continue
        try:  # inputs that do not fit together may have a value, and no gradient
            with _told("it fails: {}", "FAULT" if all_empty else "skipped"):
                pullback(there)
        except Found as found:
            says = f"{found.says}, where {_shapes(at.of.labels, arrays)}"
            ensure(found.status != "FAULT", says, at.of.inherited)


def pullback_in_float32(at: Point) -> None:
    """The gradient of float32 is the same, and of float32."""
    of, arrays = at.of, at.nearby(lambda x: x.astype("float32"))
    with _told("float32 is refused", "skipped"):
        xs, ys = built(of.op, of.labels, arrays, [x.type.shape for x in of.xs])
    narrow = of.like(xs, ys)
    given = [b.astype(s.type.dtype) for b, s in zip(at.y_bars, narrow.y_bars, strict=True)]
    wide = [b.astype(s.type.dtype) for b, s in zip(given, of.y_bars, strict=True)]
    trues, found = of.pull(*at.moved(arrays).arrays, *wide), narrow.pull(*arrays, *given)
    alike = all(narrow.ys[j].type.dtype == "float32" for j in narrow.smooth)
    for (k, symbol), x_bar, true in zip(narrow.x_bars.items(), found, trues, strict=True):
        who, dtype = f"for {of.labels[k]}", symbol.type.dtype
        of_type(f"{who} it", symbol, x_bar)
        says = f"{who} of float32 it is {dtype}"
        ensure(dtype == "float32", says, of.inherited if alike else "note")
        compare(who, x_bar, true, "float64", SINGLE, of.inherited, FEWER * at.lost(k))


def second_order(at: Point) -> None:
    """The gradient of the pullback is right, for inputs and cotangents."""
    of, error = at.of.backwards, at.of.backwards.no_pull
    if isinstance(error, NotImplementedError):
        none = f"none, and no default pushforward: the pullback has no pullback ({_brief(error)})"
        raise Found(none, "note")
    if error:
        raise Found(f"it cannot be built: {_brief(error)}", at.of.severity)
    _ = at.backwards.pulled  # which may fail
    with _told("the gradient of the {}", at.of.inherited, Found):
        differentiated(at.backwards, forwards=False)
    nulls = {of.labels[k]: why for k, why in of.nulls.items() if k not in at.of.nulls}
    says = f"declared missing for {', '.join(nulls)}: {next(iter(nulls.values()), '')}"
    ensure(not nulls, says, "skipped")


def gradient_for_integers(at: Point) -> None:
    """The gradient for integers is missing, or a number that is not zero."""
    of, notes = at.of, []
    cost = sum((of.ys[j] ** 2).sum() for j in of.smooth)
    for k in of.integers:
        who, found = of.labels[k], _outcome(pytensor.grad, cost, of.xs[k])
        missing = pg.DisconnectedInputError, pg.NullTypeGradError, NotImplementedError
        if isinstance(found, missing):
            continue
        if isinstance(found, Exception):
            raise Found(f"the gradient for {who} fails: {_brief(found)}")
        if np.any(compiled(of.xs, found)(*at.arrays)):
            notes.append(f"{who}, of integers, has a real gradient")
            continue
        says = f"{who}, of integers, gets zeros, as if it had a derivative and that were zero"
        hint = f"{says}: return disconnected_type() or grad_undefined()"
        ensure(of.severity != "FAULT", hint)
        notes.append(says)
    ensure(not notes, "; ".join(notes), "note")


# --- derivatives, forwards ------------------------------------------------------------------------


def pushed_graph(of: Graph, which, own: bool):
    """The pushforward where only these inputs move and no derivative reaches the others."""
    dots, ys = [of.xs[k].type(f"tangent {k}") for k in which], of.ys
    if len(which) < len(of.moving):
        still = set(of.moving) - set(which)
        xs = [pg.disconnected_grad(x) if k in still else x for k, x in enumerate(of.xs)]
        ys = applied(of.op, xs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y_dots = pg.pushforward(
            [ys[j] for j in of.smooth], [of.xs[k] for k in which], dots,
            use_op_pushforward=own, disconnected_outputs="ignore",
        )  # fmt: skip
    return compiled([*of.xs, *dots], y_dots)


def pushforward(at: Point) -> str:
    """The tangents of the outputs are right."""
    of, push = at.of, at.of.push
    missing, failed = (isinstance(push, kind) for kind in (NotImplementedError, Exception))
    ensure(not missing, "none of its own; the default is made from the pullback", "note")
    ensure(not failed, f"it cannot be built: {_brief(push)}", of.severity)
    ensure(not of.nulls, "some gradients are declared missing", "skipped")
    with _told("it fails: {}", of.forwards):
        pushed = push(*at.arrays, *at.x_dots.values())
    for j, y_dot in zip(of.smooth, pushed, strict=True):
        says = f"the tangent of output {j} has shape {y_dot.shape}"
        ensure(y_dot.shape == (true := at.values[j].shape), f"{says}, expected {true}")
    forwards, slopes = _along(at.y_bars, pushed), at.slopes
    terms = [known.value * at.x_dots[k] for k, known in slopes.items()]
    methods = ", ".join(sorted({known.against for known in slopes.values()}))
    right = at.has_shapes and not any(_wrong(s, at.pulled[k], at, k) for k, s in slopes.items())
    rtol = max(known.rtol for known in slopes.values())
    slack = 1e-9 * abs(float(at.total(at.values))) + at.tangent_lost
    if _is_finite(sum(map(np.sum, terms))) and not _is_sum(forwards, terms, rtol, slack):

        def cost(t):
            moves = {k: x_dot * t for k, x_dot in at.x_dots.items()}
            moved = [x + moves.get(k, 0) for k, x in enumerate(at.arrays)]
            return at.total(_many(of.run(*moved)))

        if _is_between(cost, np.array(0.0), np.array(1.0), forwards):
            return "at a kink, between the slopes of both sides"
        says = _difference(np.array(forwards), np.array(sum(map(np.sum, terms))), rtol)
        raise Found(f"the pushforward {says} ({methods})", of.forwards)
    if not right:
        return f"against {methods}"
    terms = [at.pulled[k] * at.x_dots[k] for k in slopes]
    transposed = _is_sum(forwards, terms, at.tolerance, at.tangent_lost)
    ensure(transposed, "pushforward and pullback are not transposes of each other")
    return f"against {methods} and pullback"


def pushforward_is_linear(at: Point) -> None:
    """The answers to two parts of the tangents add up to the answer."""
    dots = [*at.x_dots.values()]
    with _told("it fails: {}", at.of.forwards):
        whole = at.of.push(*at.arrays, *dots)
        who = ["the answers to two parts of the tangents"] * len(whole)
        _add_up(at, at.of.push, dots, whole, who, [at.tangent_lost] * len(whole))


def disconnected_tangents(at: Point) -> None:
    """With some inputs still, as with zeros for their tangents."""
    of = at.of
    for k in of.moving:
        moves = f"if {of.labels[k]} alone moves,"
        with _told(f"{moves} pushforward fails {ABSENT.format('tangent')}", of.forwards):
            alone = pushed_graph(of, [k], own=True)(*at.arrays, at.x_dots[k])
        zeros = [d if i == k else 0 * d for i, d in at.x_dots.items()]
        for y_dot, true in zip(alone, of.push(*at.arrays, *zeros), strict=True):
            what = f"the pushforward, {moves}"
            compare(what, y_dot, true, "zero tangents", at.tolerance, of.forwards)


def pushforward_by_two_pulls(at: Point) -> None:
    """PyTensor's default: pull back twice.  It takes each cotangent for finished."""
    of, dots = at.of, [at.x_dots[k] for k in at.of.free]
    with (
        _told("the pullback has no pullback ({})", "note", NotImplementedError),
        _told("a second derivative is declared missing", "skipped", pg.NullTypeGradError),
    ):
        pushed = pushed_graph(of, of.free, own=False)
    terms = [at.pulled[k] * d for k, d in zip(of.free, dots, strict=True)]
    if not _is_sum(
        _along(at.y_bars, pushed(*at.arrays, *dots)), terms, at.tolerance, at.tangent_lost
    ):
        there = at.of.backwards
        found = there.pull(*at.arrays, *at.y_bars, *dots)
        back = [x for k, x in zip(there.free, found, strict=True) if k >= len(of.xs)]
        if not _is_sum(_along(at.y_bars, back), terms, at.tolerance, at.tangent_lost):
            raise Found("the pullback has a wrong gradient for the cotangents", of.inherited)
        raise Found(
            "PyTensor's default pushforward is wrong, because it takes the cotangents that "
            "pullback returns for independent, and one is the same variable as another, or "
            "made from it: return a copy of it",
            of.severity,
        )


# --- batches --------------------------------------------------------------------------------------


def batched(at: Point) -> None:
    """A batch of all inputs, and of each alone, gives what a loop gives."""
    of = at.of
    if of.is_op and of.op.destroy_map:
        raise Found("PyTensor makes no batches of an Op that overwrites its inputs", "skipped")
    given = at.y_bars if at.has_shapes else []
    symbols = [*of.xs, *(of.y_bars if at.has_shapes else [])]
    wanted = [*of.ys, *(of.x_bars.values() if at.has_shapes else [])]
    f, near = compiled(symbols, wanted), at.nearby()
    first, everything = f(*at.arrays, *given), list(range(len(of.xs)))
    for which in [everything, *([k] for k in everything if len(everything) > 1)]:
        second = [near[k] if k in which else x for k, x in enumerate(at.arrays)]
        stacks = [np.stack([x, second[k]]) if k in which else x for k, x in enumerate(at.arrays)]
        new = {of.xs[k]: pt.tensor(dtype=stacks[k].dtype, shape=(None,) * stacks[k].ndim)
               for k in which}  # fmt: skip
        inputs = [new.get(x, x) for x in symbols]
        who = "a batch" if which == everything else f"a batch of {of.labels[which[0]]} alone"
        with _told(f"{who} fails: {{}}", of.inherited):
            many = vectorize_graph(wanted, new)
            found = compiled(inputs, many)(*stacks, *given)
            shapes = compiled(inputs, [y.shape for y in many], SHAPES)(*stacks, *given)
        loop = zip(first, f(*second, *given), strict=True)
        for n, (y, shape, rows) in enumerate(zip(found, shapes, loop, strict=True)):
            what = f"output {n}" if n < len(of.ys) else f"gradient {n - len(of.ys)}"
            rows, shape = np.stack(rows), tuple(map(int, shape))
            if y.ndim < rows.ndim:  # it depends on nothing that was batched
                y = np.broadcast_to(y, rows.shape)
            elif shape != y.shape:
                raise Found(f"{who}: the shape alone of {what} is {shape}, it has {y.shape}")
            compare(f"{who}: {what}", y, rows, "a loop", at.tolerance)


# --- backends -------------------------------------------------------------------------------------


def in_mode(of: Graph, mode) -> tuple[Callable, Callable | None, bool]:
    """Functions of a backend, for the outputs and the gradients, and whether Python does it all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f, g = compiled(of.xs, of.ys, mode), None
        if of.x_bars:
            g = compiled([*of.xs, *of.y_bars], [*of.x_bars.values()], mode)
    return f, g, any("object mode" in str(w.message) for w in caught)


def same_answers(at: Point, f, g, name: str, severity: str = "FAULT") -> None:
    """Values and gradients are those of Python, and no input is overwritten."""
    of, has_g = at.of, bool(g and at.has_shapes)
    given = [*at.arrays, *(at.y_bars if has_g else [])]
    before = [x.copy() for x in given]
    found = [*f(*at.arrays), *(g(*given) if has_g else [])]
    ensure(_same(before, given), f"{name} overwrites an input")
    expected = [*zip(of.names, of.ys, at.values, at.left, strict=True)]
    if has_g:
        left = map(at.lost, of.x_bars)
        expected += zip(of.bar_names, of.x_bars.values(), at.pulled.values(), left, strict=True)
    for (what, symbol, true, left), one in zip(expected, map(np.asarray, found), strict=True):
        compare(what, one, true, "Python", at.tolerance, left=left)
        of_type(what, symbol, one, severity)


def alike(at: Point, f) -> str | None:
    """The backend answers as Python does, or both refuse."""
    found, by_python = (_outcome(g, *at.arrays) for g in (f, at.of.run))
    errors = [_brief(x) if isinstance(x, Exception) else "" for x in (found, by_python)]
    if all(errors):
        return "refused, as in Python"
    says = "; in Python, ".join(error or "an answer" for error in errors)
    ensure(not any(errors), says, at.of.inherited)
    return agree(at, found, by_python, "Python", severity=at.of.inherited)


def empty_alike(at: Point, f) -> str | None:
    """Empty inputs, and those cut that Python answers, are answered alike by a backend."""
    says = alike(Point(at.of, next(_cuts(at))), f)
    cut_alike(at, f)
    return says


def cut_alike(at: Point, f) -> None:
    """What Python refuses, a kernel need not check."""
    for arrays in _cuts(at):
        if not isinstance(_outcome(at.of.run, *arrays), Exception):
            alike(Point(at.of, arrays), f)


def refuses(at: Point, case, mode=AS_WRITTEN, f=None) -> str:
    """There is an error, when the graph is built or when it runs."""
    case = [np.asarray(x) for x in case]
    graph = _outcome(built, at.of.op, at.of.labels, case)
    if isinstance(graph, Exception):
        return f"when built, {_brief(graph)}"
    same = f is not None and all(x.type == s.type for x, s in zip(graph[0], at.of.xs, strict=True))
    values = _outcome(f if same else compiled(*graph, mode), *case)
    ensure(isinstance(values, Exception), "there is an answer where an error was expected")
    return f"when run, {_brief(values)}"


def jax_rule(at: Point) -> str | None:
    """JAX's own derivative of the function that it is given, which a sampler on JAX uses."""
    import jax
    from pytensor.link.jax.dispatch import jax_funcify

    of = at.of
    ensure(of.moving and of.smooth, "no real input or no real output", "skipped")
    whole = jax_funcify(FunctionGraph(of.xs, [of.ys[j] for j in of.smooth], clone=True))

    def f(*moving):
        given = dict(zip(of.free, moving, strict=True))
        return tuple(whole(*(given.get(k, x) for k, x in enumerate(at.arrays))))

    primals, dots = (tuple(these[k] for k in of.free) for these in (at.arrays, at.x_dots))
    try:
        found = jax.vjp(f, *primals)[1](tuple(at.y_bars))
    except Exception:  # there are rules that only go forwards
        with _told("JAX cannot differentiate it: {}", "note"):
            pushed = jax.jvp(f, primals, dots)[1]
        terms = [at.slopes[k].value * d for k, d in zip(of.free, dots, strict=True)]
        forwards, rtol = _along(at.y_bars, map(np.asarray, pushed)), at.slopes[of.free[0]].rtol
        ensure(_is_sum(forwards, terms, rtol), "JAX's own derivative is wrong", of.inherited)
        return "forwards alone"
    for k, x_bar in zip(of.free, map(np.asarray, found), strict=True):
        known = at.slopes[k]
        says = _wrong(known, x_bar, at, k)
        if says and at.has_shapes and not of.truth:  # the pullback, if right, is known better
            says = _difference(x_bar, at.pulled[k], at.tolerance)
        if says and _is_symmetric(at.arrays[k]) and _is_for_symmetric(x_bar):
            true, rtol = symmetrize(known.value), max(DIFFERENCES, known.rtol)
            says = _difference(symmetrize(x_bar), true, rtol)
        ensure(not says, f"JAX's own gradient for {of.labels[k]} {says}", of.inherited)
    return None


def _is_brought(op, forwards: bool = False) -> bool:
    """Whether an Op, or its pushforward, or a function is not PyTensor's own.

    Of a graph in a box PyTensor makes the rules that nobody gave it.
    """
    op = getattr(op, "scalar_op", getattr(op, "core_op", op))
    kind = type(op) if isinstance(op, Op) else op
    if isinstance(op, OpFromGraph) and (forwards or kind is OpFromGraph):
        given = [op.pushforward_overrides, None if forwards else op.pullback_overrides]
        own = kind.pushforward is not OpFromGraph.pushforward or any(x is not None for x in given)
        return own or any(_is_brought(node.op, forwards) for node in op.fgraph.apply_nodes)
    return (getattr(kind, "__module__", None) or "").split(".")[0] != "pytensor"


def _brings_c(node) -> bool:
    """Whether an Op has C code."""
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


def agree(at: Point, found, trues, against, what="{}", rtol=None, severity="FAULT") -> None:
    """All outputs are the true ones."""
    rtol = at.tolerance if rtol is None else rtol
    more = FEWER if rtol == SINGLE and not at.is_single else 1
    for name, one, true, left in zip(at.of.names, found, trues, at.left, strict=True):
        compare(what.format(name), one, true, against, rtol, severity, more * left)


def compare(what, found, true, against, rtol, severity="FAULT", left=0.0) -> None:
    """But for what is `left` by rounding."""
    found, true = np.asarray(found), np.asarray(true)
    if found.shape != true.shape:
        raise Found(f"{what} has shape {found.shape}, expected {true.shape} ({against})", severity)
    if says := _difference(found, true, rtol, left):
        raise Found(f"{what} {says} ({against})", severity)


def _difference(value, true, rtol: float, left: float = 0.0) -> str:
    """How a value differs from the true one by more than rtol, and what is left by rounding; empty
    if it does not."""
    value, true = np.asarray(value), np.asarray(true)
    if value.size == 0:
        return ""
    if value.dtype.kind != "f" and true.dtype.kind != "f":
        return "" if np.array_equal(value, true) else "is wrong"
    lost, missing = np.isnan(value), np.isnan(true)
    if not np.array_equal(lost, missing):
        return "is NaN where it should not be" if (lost & ~missing).any() else "should be NaN"
    if not np.array_equal(np.isinf(value), np.isinf(true)):
        return "is infinite where it should not be" if np.isinf(value).any() else "is finite"
    same = lost | (value == true)  # two infinities are
    value, true = (np.where(same, np.where(np.isfinite(true), true, 0), v) for v in (value, true))
    gap, size = np.max(np.abs(value - true)), max(np.max(np.abs(true)), left / rtol)
    if same.all() or gap <= rtol * size < np.inf:
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


def _same(xs, ys) -> bool:
    """All equal but for rounding, which may depend on where an array lies in memory."""
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(xs, ys, strict=True)]
    return all(
        x.shape == y.shape and not _difference(x, y, 1e-4 if x.dtype == np.float32 else 1e-10)
        for x, y in pairs
    )


def _along(xs, ys):
    """The sum of the products of all entries, of arrays or of symbols."""
    return sum((x * y).sum() for x, y in zip(xs, ys, strict=True))


def _is_sum(total: float, terms, rtol: float, slack: float = 0.0) -> bool:
    """Whether the entries of all terms add up to the total."""
    size = max(np.abs(term).sum() for term in terms)
    return abs(total - sum(map(np.sum, terms))) <= rtol * size + slack


# --- small parts ----------------------------------------------------------------------------------


def _labels(op, count: int) -> list[str]:
    """What the user calls the inputs: the arguments of make_node, or of the function."""
    try:
        parameters = inspect.signature(op.make_node if isinstance(op, Op) else op).parameters
    except (TypeError, ValueError):
        parameters = {}
    by_position = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [name for name, p in parameters.items() if p.kind in by_position]
    return names if len(names) == count else [f"input {k}" for k in range(count)]


def _shapes(labels, arrays) -> str:
    return ", ".join(f"{label} {x.shape}" for label, x in zip(labels, arrays, strict=True))


def _listed(outputs) -> list:
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def _many(outputs) -> list[np.ndarray]:
    return [np.asarray(y) for y in _listed(outputs)]


def _first_line(text) -> str:
    text = str(text).removeprefix("This variable is Null because ")
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return first if len(first) <= 90 else first[:87] + "..."


def _brief(error: Exception) -> str:
    """The kind of the error and the first line that it says."""
    first = _first_line(error)
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _outcome(call, *args):
    """What a call returns, or the exception that it raises."""
    try:
        return call(*args)
    except Exception as error:
        return error


def _is_short(x: np.ndarray) -> bool:
    """Whether all entries are numbers of float32."""
    return np.array_equal(x, x.astype("float32"), equal_nan=True)


def _is_narrow(x: np.ndarray) -> bool:
    """Whether there are the digits of float32, and no more."""
    whole = np.ldexp(np.frexp(x)[0], 11)  # few digits may be an answer, such as 0.25
    return _is_short(x) and bool(np.any((whole != np.rint(whole)) & (x != np.rint(x))))


def _is_finite(x) -> bool:
    return bool(np.all(np.isfinite(x)))


def _largest(*arrays) -> float:
    """The largest of all finite entries, by their absolute values; 0 if there is none."""
    every = np.concatenate([np.ravel(x) for x in arrays] or [[]])
    return float(np.max(np.abs(every[np.isfinite(every)]), initial=0.0))


def _is_symmetric(x: np.ndarray) -> bool:
    """Whether the last two axes are a symmetric matrix of more than one entry."""
    square = x.ndim >= 2 and x.shape[-1] == x.shape[-2] > 1
    return square and np.array_equal(x, np.swapaxes(x, -1, -2))


def _is_for_symmetric(x_bar: np.ndarray) -> bool:
    """Whether a gradient is symmetric or triangular, as those of symmetric matrices are."""
    close = np.max(np.abs(x_bar - np.swapaxes(x_bar, -1, -2))) <= 1e-9 * np.max(np.abs(x_bar))
    return close or not np.any(np.tril(x_bar, -1)) or not np.any(np.triu(x_bar, 1))


def _walled(x: np.ndarray, wall: float):
    """A contiguous copy of x inside a longer buffer, and the buffer."""
    if x.dtype.kind != "f":  # indices beyond the ends must stay indices
        wall = x.max(initial=0) if wall == 7.0 else x.min(initial=0)
    buffer = np.pad(x.ravel(), OUTSIDE, constant_values=wall)
    return buffer[OUTSIDE : OUTSIDE + x.size].reshape(x.shape), buffer


def _strided(x: np.ndarray) -> np.ndarray:
    """The same entries, every second one of a longer array, the last axis backwards."""
    if not x.ndim:
        return x
    view = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype)[..., ::-2]
    view[...] = x
    return view


def _cuts(at: Point):
    """All axes empty; then all axes of one length, of length 0 and 1, and each axis alone."""
    arrays = at.arrays
    every = [(k, axis) for k, x in enumerate(arrays) for axis in range(x.ndim)]
    yield _shortened(arrays, every, 0)
    lengths = dict.fromkeys(arrays[k].shape[axis] for k, axis in every)
    groups = [[(k, a) for k, a in every if arrays[k].shape[a] == n] for n in lengths]
    for group in groups:
        for n in (0, 1):
            yield _shortened(arrays, group, n)
    for group in groups:
        for k, axis in group if len(group) > 1 else ():  # if it need not be as long as the others
            shorter = _shortened(arrays, [(k, axis)], arrays[k].shape[axis] - 1)
            if not isinstance(_outcome(at.of.run, *shorter), Exception):
                yield _shortened(arrays, [(k, axis)], 0)


def _alike(arrays) -> tuple[int, int] | None:
    """The first two of one type and shape."""
    kinds = [(x.dtype, x.shape) for x in arrays]
    return next((pair for pair in combinations(range(len(kinds)), 2)
                 if kinds[pair[0]] == kinds[pair[1]]), None)  # fmt: skip


def _shortened(arrays, group, n: int) -> list[np.ndarray]:
    """The arrays with the first n along these axes, (array, axis) each."""
    return [
        np.array(x[tuple(slice(n if (k, axis) in group else None) for axis in range(x.ndim))])
        for k, x in enumerate(arrays)
    ]
