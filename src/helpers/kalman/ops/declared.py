"""Every Op of the filter is a declaration, and one class makes an Op of it.

A declaration says what an Op is for: the dimensions of its inputs and outputs, what compiled code
it calls, and its pullback.  What PyTensor wants of an Op follows from that, here and once: checks
of types and shapes, when a graph is built and when it runs, `infer_shape`, the connection pattern,
the signature for batches, and the function for Python and for Numba with a key to keep it on disk.
The functions for JAX stand in :mod:`helpers.kalman.ops.in_jax`.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType, disconnected_type
from pytensor.graph import Apply, Op, Variable
from pytensor.graph.replace import graph_replace

from helpers.kalman.compiled.building import load
from helpers.kalman.numba_backend import (
    compile_numba_function_src,
    numba_njit,
    register_funcify_and_cache_key,
)
from helpers.kalman.recursions import TOLERANCE
from helpers.kalman.shapes import axes, check, said, shown
from helpers.statespace import check_tolerance


class Declared(Op):
    """An Op as its subclass declares it.

    ``inputs``, ``outputs``
        Names and dimensions (:mod:`helpers.kalman.shapes`). Inputs called ``x_bar`` or ``x_dot``,
        cotangents and tangents, are of the type of the others.
    ``gives``
        All outputs, where an Op computes those that are ``requested``.
    ``needed``
        Letters that may not be zero, and what there is none of then.
    ``looked_at``
        Inputs whose shapes compiled code looks at itself: to do so again costs time to compile.
    ``unconnected``
        Pairs of an input and an output that does not depend on it.
    ``code``, ``found``, ``results``
        What is called, ``"module.function"`` of :mod:`helpers.kalman.compiled`; the names of what
        it returns, as in an assignment; and an expression for each output that is not one of them.
    ``prepare``, ``arguments``
        Lines before the call, and its arguments, if they are not the inputs and the tolerance.
    ``pull``, ``push``
        Pullback and pushforward, in the names: from the inputs, and the cotangents or tangents that
        are connected, to what is connected among the gradients or tangents. Where there is no
        ``pull``, ``missing`` says what to do instead.

    Its options are its ``__props__``, by position or by name, with ``defaults``.
    """

    __props__ = ()
    defaults = {"tol": TOLERANCE}
    inputs: dict = {}
    gives: dict = {}
    results: dict = {}
    needed: dict = {}
    looked_at: tuple = ()
    unconnected: frozenset = frozenset()
    code = found = ""
    pull = push = None
    missing = "there is no gradient"

    def __init__(self, *values, **named):
        options = dict(zip(self.__props__[: len(values)], values, strict=True)) | named
        for x in self.__props__:
            value = options.pop(x) if x in options else self.defaults.get(x)
            setattr(self, x, tolerance(value) if x == "tol" else value)
        if options:
            raise TypeError(f"{type(self).__name__} has no option {', '.join(options)}")
        if "requested" in self.__props__ and self.requested is None:
            self.requested = tuple(self.gives)

    @property
    def outputs(self) -> dict:
        gives, requested = self.gives, getattr(self, "requested", None)
        return gives if requested is None else {x: gives[x] for x in requested}

    def requesting(self, requested: tuple[str, ...]) -> Declared:
        """The Op that computes these of its outputs."""
        return type(self)(**self._props_dict() | {"requested": requested})

    def named(self, *inputs) -> dict:
        """The outputs, by name."""
        return dict(zip(self.outputs, self(*inputs, return_list=True), strict=True))

    @property
    def gufunc_signature(self) -> str:
        """For batching: (n,p),(m),(m,m),...->(n)."""
        sides = (self.inputs, self.outputs)
        return "->".join(",".join(f"({','.join(axes(*x))})" for x in X.items()) for X in sides)

    def make_node(self, *inputs):
        given = dict(zip(self.inputs, inputs, strict=True))
        own = {x: X for x, X in given.items() if not x.endswith(("_bar", "_dot"))}
        own = of_one_float_type(own)
        dtype = next(iter(own.values())).dtype
        more = real_tensors({x: X for x, X in given.items() if x not in own})
        given = own | {x: X.astype(dtype) for x, X in more.items()}
        self.check({x: X.type.shape for x, X in given.items()})
        shapes = self.infer_shape(None, [X.type.shape for X in given.values()])
        return Apply(self, list(given.values()), [pt.tensor(dtype=dtype, shape=k) for k in shapes])

    def check(self, shapes: dict) -> None:
        """Raise if shapes (None where a length is not known) are not those of the inputs."""
        check(self.inputs, shapes, self.needed)

    def infer_shape(self, node, shapes):
        size = {}
        for (x, dims), shape in zip(self.inputs.items(), shapes, strict=True):
            for axis, length in zip(axes(x, dims), shape, strict=True):
                if size.get(axis) is None:
                    size[axis] = length
        return [tuple(size[axis] for axis in axes(*x)) for x in self.outputs.items()]

    def connection_pattern(self, node):
        return [[(x, out) not in self.unconnected for out in self.outputs] for x in self.inputs]

    def pullback(self, inputs, outputs, cotangents):
        if self.pull is None:
            raise NotImplementedError(self.missing)
        bars = connected(self.outputs, cotangents)
        found = self.pull(dict(zip(self.inputs, inputs, strict=True)), bars) if bars else {}
        reached = {x for x in self.inputs if any((x, out) not in self.unconnected for out in bars)}
        return [found[x] if x in found and x in reached else disconnected_type()
                for x in self.inputs]  # fmt: skip

    def pushforward(self, inputs, outputs, tangents):
        if self.push is None:
            return super().pushforward(inputs, outputs, tangents)
        dots = connected(self.inputs, tangents)
        found = self.push(dict(zip(self.inputs, inputs, strict=True)), dots) if dots else {}
        return [found.get(x, disconnected_type()) for x in self.outputs]

    def prepare(self) -> list[str]:
        return [f"{x} = doubles({x})" for x in self.inputs]

    def arguments(self) -> list[str]:
        return [*self.inputs, *([repr(self.tol)] if "tol" in self.__props__ else [])]

    def source(self, dtype: str = "float64", linked: bool = False) -> str:
        """The function of the inputs; `linked` as Numba calls it, with all arguments in a tuple."""
        cast = "" if dtype == "float64" else f".astype(np.{dtype})"
        arguments = ", ".join(self.arguments())
        lines = [
            *misfits(self.inputs, self.looked_at, self.needed),
            *self.prepare(),
            f"{self.found} = code({f'({arguments},)' if linked else arguments})",
            f"return {', '.join(self.results.get(x, x) + cast for x in self.outputs)}",
        ]
        head = f"def {type(self).__name__}({', '.join(self.inputs)}):"
        return "\n    ".join([head, *lines])

    def called(self, compiled: bool):
        """What `code` is: in Python, and for Numba that which is linked with compiled code."""
        module, name = self.code.split(".")
        return getattr(load(module), f"linked_{name}" if compiled else name)

    def numba_function(self, node):
        """The function for Numba, and a key under which it is kept on disk."""
        door, name = load("door"), type(self).__name__
        source = self.source(node.outputs[0].dtype, linked=bool(self.code))
        known = {"np": np, "code": self.called(True)}
        known |= {"doubles": door.doubles, "contiguous": door.contiguous}
        key = sha256(f"{source} {self.digest()}".encode()).hexdigest()
        return numba_njit(compile_numba_function_src(source, name, global_env=known)), key

    def digest(self) -> str:
        """What the machine code that is called was made of."""
        return load("door").DIGEST

    def perform(self, node, inputs, output_storage):
        self.check({x: np.shape(X) for x, X in zip(self.inputs, inputs, strict=True)})
        with np.errstate(all="ignore"):  # what is no number is NaN
            found = in_python(self)(*inputs)
        found = found if isinstance(found, tuple) else (found,)
        for storage, X, out in zip(output_storage, found, node.outputs, strict=True):
            storage[0] = np.asarray(X, dtype=out.dtype)


@register_funcify_and_cache_key(Declared)
def numba_funcify_declared(op, node, **kwargs):
    return op.numba_function(node)


@cache
def in_python(op: Declared):
    """The function of an Op's inputs, in Python."""
    known = {"np": np, "code": op.called(False), "doubles": as_compiled, "contiguous": as_compiled}
    exec(op.source(), known)
    return known[type(op).__name__]


def as_compiled(X):
    """An array such as the passes are compiled for.

    For those of another type, of another layout or read-only, as a batch's are, Numba would compile
    the functions of draws anew, for seconds.
    """
    return np.require(X, np.float64, "CW")


def misfits(dims: dict, looked_at, needed: dict) -> list[str]:
    """The same checks as lines for Numba, whose errors are constant texts, where code has none."""
    at = {x: [(f"{x}.shape[{i}]", k) for i, k in enumerate(letters.split())]
          for x, letters in dims.items()}  # fmt: skip
    first = {}
    for pairs in at.values():
        for size, letter in pairs:
            first.setdefault(letter, size)
    lines = []
    for x, pairs in at.items():
        wrong = []
        for size, letter in pairs:
            fixed = first.get(letter.removesuffix("?"), size)
            if size != fixed:
                wrong.append(f"{size} != {fixed}" + f" and {size} != 1" * (letter[-1] == "?"))
        if wrong and x not in looked_at:
            says = f"{said(x)} does not have shape {shown(letter for _, letter in pairs)}"
            lines.append(f"if {' or '.join(wrong)}: raise ValueError({says!r})")
    for letter, what in needed.items():
        if letter in first and not looked_at:
            says = f"{letter} = 0: there is no {what}"
            lines.append(f"if {first[letter]} == 0: raise ValueError({says!r})")
    return lines


def connected(names, variables) -> dict:
    """Those variables that are connected, by their names."""
    pairs = zip(names, variables, strict=True)
    return {x: X for x, X in pairs if not isinstance(X.type, DisconnectedType)}


def pulled_twice(outputs, X: dict, bars: dict) -> dict:
    """The pullback, by autodiff, of an Op that gives outputs and the gradients of them, weighted.

    ``outputs`` gives those with weights among the inputs X, as graphs of the inputs, by name. The
    graphs are of symbols: a gradient with respect to inputs that depend on each other would go
    through what they depend on as well.
    """
    # Of unknown lengths: a scan wants those of its states known everywhere, or nowhere.
    own, weights = (
        {x: pt.tensor(dtype=V.dtype, shape=(None,) * V.ndim) for x, V in given.items()}
        for given in (X, bars)
    )
    found = outputs(own)
    loss = sum((own[f"{x}_bar"] * V).sum() for x, V in found.items())
    wrt = [x for x in bars if x not in found]
    slopes = pt.grad(loss, [own[x] for x in wrt], disconnected_inputs="ignore")
    found |= zip(wrt, slopes, strict=True)
    total = sum((weights[x] * found[x]).sum() for x in bars)
    moved = pt.grad(total, [*own.values()], disconnected_inputs="ignore")
    symbols = dict(
        zip([*own.values(), *weights.values()], [*X.values(), *bars.values()], strict=True)
    )
    moved = zip(X.items(), graph_replace(moved, symbols, strict=False), strict=True)
    return {x: G.astype(V.dtype) for (x, V), G in moved}


def asked(requested) -> tuple[bool, ...]:
    """What a way back is asked for: matrices at all, T, Z, W."""
    T, Z, W = (x in requested for x in "TZW")
    return T or Z or W or "P0" in requested or "H" in requested, T, Z, W


def tolerance(tol) -> float:
    """A tolerance for an Op, which is compiled for this one number."""
    if isinstance(tol, Variable):
        raise TypeError(f"tol is symbolic ({tol}), expected a number that is not negative")
    return check_tolerance(tol)


def real_tensors(arrays: dict) -> dict:
    """Tensors, by name, none of which is complex."""
    tensors = {x: pt.as_tensor_variable(X) for x, X in arrays.items()}
    complex_ones = [said(x) for x, X in tensors.items() if X.dtype.startswith("complex")]
    if complex_ones:
        raise TypeError(f"{', '.join(complex_ones)} complex, expected real arrays")
    return tensors


def of_one_float_type(arrays: dict) -> dict:
    """The same, of the one float type that holds them all."""
    tensors = real_tensors(arrays)
    dtype = np.result_type(np.float32, *(X.type.numpy_dtype for X in tensors.values()))
    return {x: X.astype(dtype.name) for x, X in tensors.items()}
