"""`attack` passes an Op that keeps the contract, and names the faults planted in others."""

import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which

import numpy as np
import pytensor
import pytensor.gradient as pg
import pytensor.scalar as ps
import pytensor.tensor as pt
import pytest
from attack_cases import KALMAN, OURS
from pytensor.compile.builders import OpFromGraph
from pytensor.gradient import (
    DisconnectedType,
    disconnected_type,
    grad_undefined,
    zero_grad,
)
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.graph.replace import _vectorize_node
from pytensor.link.numba.dispatch import basic as numba_basic
from pytensor.link.numba.dispatch.basic import register_funcify_default_op_cache_key
from pytensor.raise_op import assert_op
from pytensor.tensor.elemwise import Elemwise
from tiers import thorough

import helpers
from helpers.checks import attack, contract
from helpers.kalman.ops.declared import Declared, in_python

rng = np.random.default_rng(0)
x, w = rng.uniform(0.5, 2.0, 5), np.array(1.7)
labels = np.array([2, 0, 1, 2, 2])


class Weigh(Op):
    """y_i = w x_i^2 sums over a label to s, and the labels' largest is m: all that can go wrong."""

    __props__ = ()

    def make_node(self, x, w, labels):
        x, w, labels = map(pt.as_tensor, (x, w, labels))
        if (x.ndim, w.ndim, labels.ndim) != (1, 0, 1):
            raise TypeError("expected a vector x, a scalar w and a vector of labels")
        if labels.dtype not in pt.type.integer_dtypes:
            raise TypeError(f"labels are {labels.dtype}, expected integers")
        dtype = pytensor.scalar.upcast("float32", x.dtype, w.dtype)
        x, w, labels = x.astype(dtype), w.astype(dtype), labels.astype("int64")
        outputs = [x.type(), pt.tensor(dtype=dtype, shape=(3,)), pt.scalar(dtype="int64")]
        return Apply(self, [x, w, labels], outputs)

    def infer_shape(self, node, shapes):
        return [shapes[0], (pt.constant(3),), ()]

    def connection_pattern(self, node):
        return [[True, True, False], [True, True, False], [False, False, False]]

    def perform(self, node, inputs, outputs):
        x, w, labels = inputs
        if x.shape != labels.shape or np.any((labels < 0) | (labels > 2)):
            raise ValueError("a label is out of range, or there are too few")
        y = w * x * x
        outputs[0][0] = y
        outputs[1][0] = np.bincount(labels, weights=y, minlength=3).astype(y.dtype)
        outputs[2][0] = np.array(labels.max(initial=0))

    def pullback(self, inputs, outputs, cotangents):
        x, w, labels = inputs
        y_bar = self.both(inputs, outputs, cotangents)
        return [2 * w * x * y_bar, (x**2 * y_bar).sum(), disconnected_type()]

    def both(self, inputs, outputs, cotangents):
        first, second = (
            out.zeros_like() if isinstance(bar.type, DisconnectedType) else bar
            for out, bar in zip(outputs[:2], cotangents[:2], strict=True)
        )
        return first + second[inputs[2]]

    def pushforward(self, inputs, outputs, tangents):
        x, w, labels = inputs
        x_dot, w_dot = (
            z.zeros_like() if isinstance(dot.type, DisconnectedType) else dot
            for z, dot in zip(inputs[:2], tangents[:2], strict=True)
        )
        y_dot = x**2 * w_dot + 2 * w * x * x_dot
        return [y_dot, pt.stack([y_dot[pt.eq(labels, k)].sum() for k in range(3)]),
                disconnected_type()]  # fmt: skip


def truth(x, w, labels):
    y = w * x * x
    return [y, np.array([y[labels == k].sum() for k in range(3)]), labels.max(initial=0)]


BAD = {"label 3": (x, w, labels + 1), "too few labels": (x, w, labels[:3])}


def faults(op, inputs=(x, w, labels), **options):
    options.setdefault("backends", ())
    report = attack(op, *inputs, raises=False, **options)
    return {a.name: a.says for a in report.faults}


def test_a_clean_op_passes():
    case = {"other sizes": (x[:3], w, labels[:3])}
    report = attack(Weigh(), x, w, labels, truth=truth, cases=case, refused=BAD, backends=())
    assert {a.status for a in report.attacks} == {"ok"}, report
    assert len(report.attacks) >= 23
    assert str(report).startswith("Weigh: no fault found\n")


def test_an_error_that_differences_cannot_see_is_seen_by_complex_steps():
    op = planted(pullback=pull(lambda i, c, x, w, no: [x * (1 + 1e-7), w, no]))
    found = faults(op, truth=truth)
    assert found["pullback"].startswith("for x is wrong: relative error 1e-07 (complex step)")


def test_a_gradient_that_fails_for_an_empty_axis_is_told():
    op = planted(pullback=pull(lambda i, c, x, w, no: [x + 0 * x[0], w, no]))
    found = faults(op)
    assert found["short gradient"].startswith("it fails: IndexError")


def test_without_truth_central_differences_stand_in():
    assert "central differences" in str(attack(Weigh(), x, w, labels, backends=()))


def test_a_function_that_builds_a_graph_is_attacked_too():
    report = attack(
        lambda A, b: pt.linalg.solve(A, b, b_ndim=1), np.eye(3) + 0.1, x[:3], backends=()
    )
    says = {a.name: a.status for a in report.attacks}
    assert says["pullback"] == says["second order"] == says["batched"] == "ok"


def test_faults_are_raised_with_the_whole_table():
    class Wrong(Weigh):
        def infer_shape(self, node, shapes):
            return [(shapes[0][0] + 1,), (pt.constant(3),), ()]

    with pytest.raises(AssertionError, match=r"3 faults found\n[^@]*FAULT .* \(6,\), it has"):
        attack(Wrong(), x, w, labels, backends=())


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda: attack(Weigh()), TypeError, "needs an example of inputs"),
        (lambda: attack(pt.exp, np.ones(2) + 1j), TypeError, "input 0 has dtype complex128"),
        (lambda: attack(pt.exp, x, backends=["mlx"]), ValueError, r"unknown backends \['mlx'\]"),
    ],
)
def test_bad_calls_are_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()


def planted(**methods):
    return type("Planted", (Weigh,), methods)()


def make_node(declare):
    """make_node that leaves the types of its inputs as they come."""

    def method(self, x, w, labels):
        x, w, labels = map(pt.as_tensor, (x, w, labels))
        return Apply(self, [x, w, labels], declare(x, w))

    return method


def perform(change):
    """perform of a clean Op, and then something else."""

    def method(self, node, inputs, outputs):
        Weigh.perform(self, node, inputs, outputs)
        change(self, inputs, outputs)

    return method


def pull(change):
    def method(self, inputs, outputs, cotangents):
        x_bar, w_bar, no = Weigh.pullback(self, inputs, outputs, cotangents)
        return change(inputs, cotangents, x_bar, w_bar, no)

    return method


def push(change):
    def method(self, inputs, outputs, tangents):
        y_dot, s_dot, no = Weigh.pushforward(self, inputs, outputs, tangents)
        return [*change(inputs, tangents, y_dot, s_dot), no]

    return method


def overwrite(self, inputs, outputs):
    inputs[0] *= 2


def view(self, inputs, outputs):
    outputs[0][0] = inputs[0][:]


def beyond(self, inputs, outputs):
    x = inputs[0]
    if x.flags.c_contiguous and x.base is not None:  # one entry more than there is
        longer = np.lib.stride_tricks.as_strided(x, (x.size + 1,))
        outputs[1][0] = outputs[1][0] + 0 * longer[-1]


def buffered(self, inputs, outputs):
    y = outputs[0][0]
    if getattr(self, "buffer", None) is None or self.buffer.shape != y.shape:
        self.buffer = np.empty_like(y)
    self.buffer[...] = y
    outputs[0][0] = self.buffer


def drawn(self, inputs, outputs):
    outputs[0][0] = outputs[0][0] + np.random.default_rng().uniform(size=inputs[0].shape)


def later(self, inputs, outputs):
    outputs[0][0] *= 1.01 if hasattr(self, "called") else 1.0
    self.called = True


def same_types(x, w):
    return [x.type(), x.type(), pt.lscalar()]


def three(x, w):
    return [x.type(), pt.tensor(dtype=x.dtype, shape=(3,)), pt.lscalar()]


def longer(node):
    """Where the length of x is known, an output of one more is declared."""
    (n,) = node.inputs[0].type.shape
    y = pt.tensor(dtype=node.outputs[0].dtype, shape=(n and n + 1,))
    return Apply(node.op, node.inputs, [y, *(y.type() for y in node.outputs[1:])])


def as_if_contiguous(self, inputs, outputs):
    x, w, _ = inputs
    if x.strides[0] < 0:  # the view runs backwards: start at its last entry, and read forwards
        outputs[0][0] = w * x[::-1] ** 2


def forgetful(self, inputs, outputs, cotangents):
    x, w, labels = inputs
    y_bar = cotangents[0] + cotangents[1][labels]  # either may be of DisconnectedType
    return [2 * w * x * y_bar, (x**2 * y_bar).sum(), disconnected_type()]


def absent(self, inputs, outputs, tangents):
    x, w, labels = inputs
    y_dot = x**2 * tangents[1] + 2 * w * x * tangents[0]  # either may be of DisconnectedType
    s_dot = pt.stack([y_dot[pt.eq(labels, k)].sum() for k in range(3)])
    return [y_dot, s_dot, disconnected_type()]


def of_constants(self, x, w, labels):
    w = pt.as_tensor(w)
    return Weigh.make_node(self, x, 2 * w if isinstance(w, pt.TensorConstant) else w, labels)


PLANTED = {
    "a constant that is taken for something else": (
        {"make_node": of_constants},
        {"constants": "if w is a constant, output 0 is 2 times the true one (a symbol)"},
    ),
    "a gradient that is another one beside a constant": (
        {"pullback": pull(lambda i, c, x, w, no: [
            x * (1 + isinstance(i[2], pt.TensorConstant)), w, no])},
        {"constants": "if labels is a constant, the gradient for x is 2 times the true one"},
    ),
    "a seed of the generator that all code shares": (
        {"perform": perform(lambda s, i, o: np.random.seed(1))},  # noqa: NPY002
        {"runs in Python": "it draws from, or seeds, the generator of random numbers that all"},
    ),
    "a number of the generator of Python": (
        {"perform": perform(lambda s, i, o: random.random())},
        {"runs in Python": "it draws from, or seeds, the generator of random numbers that all"},
    ),
    "errors of NumPy that are raised from then on": (
        {"perform": perform(lambda s, i, o: np.seterr(under="raise"))},
        {"runs in Python": "or changes how NumPy treats errors"},
    ),
    "an integer output, M.type()": (
        {"make_node": make_node(three)},
        {"integers for floats": "with integers for x, output 0 is declared int64, which truncates"},
    ),
    "no check of dimensions": (
        {"make_node": make_node(three)},
        {"number of dimensions": "x with 2 dimensions instead of 1 is accepted when"},
    ),
    "a dtype other than declared": (
        {"perform": perform(lambda s, i, o: o[0].__setitem__(0, o[0][0].astype("float32")))},
        {"runs in Python": "output 0 is declared float64 and returned as float32"},
    ),
    "a shape other than declared": (
        {"perform": perform(lambda s, i, o: o[1].__setitem__(0, np.zeros(4)))},
        {"runs in Python": r"output 1 is declared with shape (3,), but has (4,)"},
    ),
    "float64 inside float32": (
        {"perform": perform(lambda s, i, o: o[0].__setitem__(0, o[0][0].astype("float64")))},
        {"float32": "output 0 is declared float32 and returned as float64"},
    ),
    "an input is overwritten": (
        {"perform": perform(overwrite)},
        {"runs in Python": "x is overwritten: copy it, or declare it in destroy_map"},
    ),
    "an input is handed back": (
        {"perform": perform(view)},
        {"repeated call": "output 0 is a view of x: copy it, or declare view_map"},
    ),
    "one buffer for all answers": (
        {"perform": perform(buffered)},
        {"repeated call": "the next call overwrites output 0"},
    ),
    "an entry beyond the end is read": (
        {"perform": perform(beyond)},
        {"memory of the inputs": "the answer depends on memory beyond the ends"},
    ),
    "an input is overwritten, and already is when it is looked at": (
        {"perform": perform(lambda s, i, o: i[0].__setitem__(0, 0.0))},
        {"runs in Python": "x is overwritten: copy it, or declare it in destroy_map"},
    ),
    "an input is handed back where it is no contiguous one": (
        {"perform": perform(lambda s, i, o: i[2].flags.c_contiguous or o[2].__setitem__(
            0, i[2][:1].reshape(())))},
        {"not contiguous": "output 2 is a view of labels"},
    ),
    "a destroy_map of another input": (
        {"perform": perform(overwrite), "destroy_map": {2: [2]}},
        {"runs in Python": "x is overwritten, and destroy_map does not say so"},
    ),
    "an input handed back beside a destroy_map": (
        {"perform": perform(lambda s, i, o: o[0].__setitem__(0, i[0])), "destroy_map": {2: [2]}},
        {"runs in Python": "output 0 is a view of x, and no map says so"},
    ),
    "lengths that are declared wrong where they are known": (
        {"make_node": lambda self, *inputs: longer(Weigh.make_node(self, *inputs))},
        {"runs in Python": "output 0 is declared with shape (6,), but has (5,)"},
    ),
    "a parameter that __props__ does not name": (
        {"__init__": lambda self: setattr(self, "power", 1),
         "perform": perform(lambda s, i, o: o[0].__setitem__(0, o[0][0] ** s.power))},
        {"equal Ops": "one with another power has another answer, and is equal"},
    ),
    "an infer_shape of two axes for one": (
        {"infer_shape": lambda self, node, shapes: [(*shapes[0], 1), (pt.constant(3),), ()]},
        {"shape alone": "infer_shape gives output 0 2 axes, it has 1"},
    ),
    "an infer_shape of real lengths": (
        {"infer_shape": lambda self, node, shapes: [(shapes[0][0] * 1.0,), (pt.constant(3),), ()]},
        {"shape alone": "infer_shape gives output 0 a length of float64, not an integer"},
    ),
    "an infer_shape of fewer outputs": (
        {"infer_shape": lambda self, node, shapes: [shapes[0], (pt.constant(3),)]},
        {"shape alone": "infer_shape gives 2 shapes for 3 outputs"},
    ),
    "a wrong infer_shape": (
        {"infer_shape": lambda self, node, shapes: [(shapes[0][0] + 1,), (pt.constant(3),), ()]},
        {"shape alone": "infer_shape gives output 0 the shape (6,), it has (5,)"},
    ),
    "contiguous memory is taken for granted": (
        {"perform": perform(as_if_contiguous)},
        {"not contiguous": "output 0 of views with strides"},
    ),
    "the wrong sign": (
        {"pullback": pull(lambda i, c, x, w, no: [-x, w, no])},
        {"pullback": "for x has the wrong sign"},
    ),
    "a factor too many": (
        {"pullback": pull(lambda i, c, x, w, no: [3 * x, w, no])},
        {"pullback": "for x is 3 times the true one"},
    ),
    "a scalar's cotangent not summed": (
        {"pullback": pull(lambda i, c, x, w, no: [x, (x * i[0] / (2 * i[1]))[0], no])},
        {"pullback": "for w is wrong"},
    ),
    "the cotangent is forgotten": (
        {"pullback": pull(lambda i, c, x, w, no: [2 * i[0] * i[1], w, no])},
        {"pullback": "for x is wrong"},
    ),
    "a term without the cotangent": (
        {"pullback": pull(lambda i, c, x, w, no: [x + 1e-7 * i[0], w, no])},
        {"pullback is linear": "for x, the answers to two parts of the cotangent, one with zeros"},
    ),
    "another answer from the second call on": (
        {"perform": perform(later)},
        {"repeated call": "two calls with the same inputs give different answers"},
    ),
    "a term that is NaN where a cotangent is zero": (
        {"pullback": pull(lambda i, c, x, w, no: [x * c[0] / c[0], w, no])},
        {"pullback is linear": "do not add up (is NaN where it should not be)"},
    ),
    "a gradient that is wrong for one entry alone": (
        {"pullback": pull(lambda i, c, x, w, no: [x * (1 + pt.eq(i[0].size, 1)), w, no])},
        {"short gradient": "for x is wrong: relative error 1e+00"},
    ),
    "a cotangent that may be absent": (
        {"pullback": forgetful},
        {"disconnected cotangents": "if the cost uses output 0 alone, pullback fails"},
    ),
    "a pattern that contradicts the pullback": (
        {"connection_pattern": lambda self, node: [[True] * 3] * 3},
        {"pullback": "pullback and connection_pattern disagree"},
    ),
    "zeros for integers": (
        {"pullback": pull(lambda i, c, x, w, no: [x, w, i[2].zeros_like(dtype="float64")]),
         "connection_pattern": lambda s, n: [[True, True, False]] * 3},
        {"gradient for integers": "labels, of integers, gets zeros, as if it had a derivative"},
    ),
    "a pattern that forgets an input": (
        {"connection_pattern": lambda self, node: [[True, True, False], *[[False] * 3] * 2]},
        {"pullback": "pullback and connection_pattern disagree"},
    ),
    "a pullback that is right and not differentiable": (
        {"pullback": pull(lambda i, c, x, w, no: [zero_grad(x), w, no])},
        {"second order": "the gradient of the pullback: for x is wrong"},
    ),
    "one cotangent made from another": (
        {"pullback": pull(lambda i, c, x, w, no: [x, (x * i[0] / (2 * i[1])).sum(), no])},
        {"pushforward by two pulls": "one is the same variable as another, or made from it"},
    ),
    "a pushforward of the wrong sign": (
        {"pushforward": push(lambda i, d, y, s: [-y, -s])},
        {"pushforward": "the pushforward has the wrong sign"},
    ),
    "a pushforward that is not linear": (
        {"pushforward": push(lambda i, d, y, s: [y * (1 + 1e-7 * pt.abs(y)), s])},
        {"pushforward": "not transposes",
         "pushforward is linear": "the answers to two parts of the tangents, one with zeros, do n"},
    ),
    "a pushforward that is NaN where a tangent is zero": (
        {"pushforward": push(lambda i, d, y, s: [y * d[0] / d[0], s])},
        {"pushforward is linear": "do not add up (is NaN where it should not be)"},
    ),
    "a tangent that may be absent": (
        {"pushforward": absent},
        {"disconnected tangents": "if x alone moves, pushforward fails"},
    ),
    "two outputs in one array": (
        {"perform": perform(lambda s, i, o: o[1].__setitem__(0, o[0][0][:3]))},
        {"repeated call": "outputs 0 and 1 share memory"},
    ),
    "another answer in each call": (
        {"perform": perform(drawn)},
        {"repeated call": "two calls with the same inputs give different answers"},
    ),
    "float32 inside float64": (
        {"perform": perform(lambda s, i, o: o[0].__setitem__(
            0, o[0][0].astype("float32").astype(i[0].dtype)))},
        {"float64": "output 0 is of float64, and has the digits of float32 alone"},
    ),
    "a gradient with the digits of float32": (
        {"pullback": pull(lambda i, c, x, w, no: [x.astype("float32").astype(x.dtype), w, no])},
        {"float64": "the gradient for x is of float64, and has the digits of float32 alone"},
    ),
    "a gradient of another type": (
        {"pullback": pull(lambda i, c, x, w, no: [x.astype("float64"), w, no])},
        {"pullback in float32": "for x of float32 it is float64"},
    ),
    "a shape that is wrong for an empty axis": (
        {"infer_shape": lambda self, node, shapes: [
            (pt.switch(pt.eq(shapes[0][0], 0), 1, shapes[0][0]),), (pt.constant(3),), ()]},
        {"empty": "infer_shape gives output 0 the shape (1,), it has (0,), where x (0,)"},
    ),
    "an input that is handed back where its numbers are 0 or 1": (
        {"perform": perform(lambda s, i, o: np.array_equal(i[0] ** 2, i[0])
                            and o[0].__setitem__(0, i[0]))},
        {"elsewhere": "output 0 is a view of x: copy it, or declare view_map, with real inputs a"},
    ),
    "an input that is overwritten where it is negative": (
        {"perform": perform(lambda s, i, o: (i[0] < 0).any() and overwrite(s, i, o))},
        {"elsewhere": "x is overwritten, with all real inputs times -1"},
    ),
    "a gradient that fails for negative numbers": (
        {"pullback": pull(lambda i, c, x, w, no: [assert_op(x, pt.all(i[0] > 0)), w, no])},
        {"elsewhere": "pullback fails: AssertionError"},
    ),
    "a gradient that is wrong for negative numbers": (
        {"pullback": pull(lambda i, c, x, w, no: [x * pt.switch(i[1] < 0, 3, 1), w, no])},
        {"elsewhere": "pullback: for x is 3 times the true one (central differences), with all "},
    ),
    "a gradient that is wrong for large numbers": (
        {"pullback": pull(lambda i, c, x, w, no: [x * pt.switch(i[0] > 40, 3, 1), w, no])},
        {"elsewhere": "pullback: for x is 3 times the true one"},
    ),
    "a gradient that is NaN for small numbers": (
        {"pullback": pull(lambda i, c, x, w, no: [
            x * pt.switch(pt.abs(i[0]) < 0.01, np.nan, 1), w, no])},
        {"elsewhere": "pullback: for x is NaN where it should not be"},
    ),
    "a pushforward that is wrong for negative numbers": (
        {"pushforward": push(lambda i, d, y, s: [y * pt.switch(i[0] < 0, 3, 1), s])},
        {"elsewhere": "pushforward: the pushforward is"},
    ),
    "a signature that is not the Op's": (
        {"gufunc_signature": "(n),(),(n)->(n),(),()"},
        {"batched": "a batch"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named(fault):
    methods, expected = PLANTED[fault]
    found = faults(planted(**methods))
    for name, says in expected.items():
        assert says in found.get(name, "nothing"), (fault, found)


def test_an_op_that_says_what_it_overwrites_passes():
    """PyTensor compiles it for inputs that nothing else needs, and so is it attacked."""

    def in_place(self, node, inputs, outputs):
        _, _, labels = inputs
        Weigh.perform(self, node, inputs, outputs)
        labels.sort()
        outputs[2][0] = labels[-1:].reshape(()) if labels.size else np.array(0)

    op = planted(perform=in_place, destroy_map={2: [2]})
    report = attack(op, x, w, labels, truth=truth, backends=(), raises=False)
    assert not report.faults, report


def only_where(condition):
    """A pullback that is three times too large where a condition holds."""
    return pull(lambda i, c, x, w, no: [x * pt.switch(condition(i[0]), 3, 1), w, no])


@pytest.mark.parametrize(
    "condition, case",
    [
        (lambda x: x < -200, (-200 * x, w, labels)),
        (lambda x: pt.eq(x.size, 3), (x[:3], w, labels[:3])),
    ],
    ids=["of numbers far away", "of three entries"],
)
def test_a_derivative_that_is_wrong_in_a_case_alone_is_seen(condition, case):
    found = faults(planted(pullback=only_where(condition)), cases={"there": case})
    assert "pullback: for x is" in found["case: there"]
    assert set(found) == {"case: there"}


def test_a_value_that_is_not_the_truth_elsewhere():
    op = planted(perform=perform(lambda s, i, o: o[0].__setitem__(0, np.abs(o[0][0]))))
    assert (
        "output 0 has the wrong sign (the truth), with all" in faults(op, truth=truth)["elsewhere"]
    )

    def nowhere_else(x, w, labels):  # where the truth says nothing, nor does the attack
        y, s, m = truth(x, w, labels)
        return [y if np.all(x > 0.1) and 0.1 < w < 2 and np.all(x < 3) else np.nan * y, s, m]

    assert "elsewhere" not in faults(op, truth=nowhere_else)


def test_bounds_and_knots_stay_in_order():
    """Beyond its domain an Op may answer with anything."""

    def slopes(x, low, high, knots):
        inside = pt.lt(low, x) & pt.lt(x, high)
        return pt.switch(inside & pt.all(pt.diff(knots) > 0), 1.0, 0.0)

    def only_for(x, low, high, knots):
        whole = pt.clip(x, low, high) + 0 * knots.sum()
        return OpFromGraph(
            [x, low, high, knots], [whole],
            pullback=lambda i, o, c: [
                slopes(*i) * c[0], (pt.le(i[0], i[1]) * c[0]).sum(),
                (pt.ge(i[0], i[2]) * c[0]).sum(), pt.zeros_like(i[3])],
        )(x, low, high, knots)  # fmt: skip

    given = [rng.uniform(-2, 2, 5), np.array(-0.5), np.array(0.7), np.arange(1.0, 4.0)]
    assert faults(only_for, given) == {}


class Stretched(Op):
    """x y, as NumPy broadcasts them, with gradients that are summed, or not."""

    __props__ = ("sums",)

    def __init__(self, sums):
        self.sums = sums

    def make_node(self, x, y):
        x, y = (pt.as_tensor(z).astype("float64") for z in (x, y))
        return Apply(self, [x, y], [(x * y).type()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = np.asarray(inputs[0] * inputs[1])

    def pullback(self, inputs, outputs, cotangents):
        x, y = inputs
        terms = [y * cotangents[0], x * cotangents[0]]
        return list(map(self.to, terms, inputs)) if self.sums else terms

    def to(self, term, z):
        ones = tuple(k for k, n in enumerate(z.type.shape) if n == 1)
        return term.sum(tuple(range(term.ndim - z.ndim))).sum(ones, keepdims=True)


@pytest.mark.parametrize("sums", [True, False])
def test_a_gradient_of_what_is_broadcast(sums):
    found = faults(Stretched(sums), rng.uniform(1, 2, (2, 3, 4)))
    assert "broadcast" not in found if sums else "expected (1, 4), where" in found["broadcast"]


def test_what_numpy_broadcasts_unasked_is_a_note():
    def make_node(self, x, y):
        return Apply(self, [pt.as_tensor(x), pt.as_tensor(y)], [pt.matrix()])

    op = type("Unasked", (Stretched,), {"make_node": make_node})(False)
    report = attack(op, *rng.uniform(1, 2, (2, 3, 4)), raises=False, backends=())
    told = {a.name: a for a in report.attacks}["broadcast"]
    assert told.status == "note" and "expected (1, 4), where x has shape (1, 4)" in told.says


def test_memory_that_is_shared_in_a_case_alone_is_seen():
    """The labels' largest, one of them: the array itself, where there is but one."""
    handed_on = perform(lambda s, i, o: o[2].__setitem__(0, i[2].reshape(())) if i[2].size == 1
                        else None)  # fmt: skip
    found = faults(planted(perform=handed_on), cases={"one": (x[:1], w, labels[:1])})
    assert set(found) == {"case: one"} and "output 2 is a view of labels" in found["case: one"]


class Sine(Op):
    """sin x, with a gradient that is an Op of its own and may be at fault."""

    __props__ = ("fault",)

    def __init__(self, fault):
        self.fault = fault

    def make_node(self, *inputs):
        inputs = [pt.as_tensor(x) for x in inputs]
        if any(x.ndim != 1 for x in inputs):
            raise TypeError("expected vectors")
        dtype = pytensor.scalar.upcast("float32", *(x.dtype for x in inputs))
        inputs = [x.astype(dtype) for x in inputs]
        return Apply(self, inputs, [inputs[0].type()])

    def infer_shape(self, node, shapes):
        return shapes[:1]

    def perform(self, node, inputs, outputs):
        outputs[0][0] = np.sin(inputs[0])

    def pullback(self, inputs, outputs, cotangents):
        return [SineGrad(self.fault)(*inputs, *cotangents)]


class SineGrad(Sine):
    def infer_shape(self, node, shapes):
        return [(shapes[0][0] + 1,)] if self.fault == "shape" else shapes[:1]

    def perform(self, node, inputs, outputs):
        x, bar = inputs
        y = np.cos(x) * bar
        if self.fault == "overwritten":
            bar *= 2
        elif self.fault == "handed back":
            bar[...] = y
            bar[...], y = bar / np.cos(x), bar  # what was there is there again
        elif self.fault == "kept":
            self.buffer = getattr(self, "buffer", np.zeros(0))
            if self.buffer.shape != y.shape or self.buffer.dtype != y.dtype:
                self.buffer = y
            self.buffer[...], y = y, self.buffer
        elif self.fault == "strides" and not bar.flags.c_contiguous:
            y = y[::-1].copy()
        elif self.fault == "type":
            y = y.astype("float32")
        outputs[0][0] = y

    def pullback(self, inputs, outputs, cotangents):
        x, bar = inputs
        return [-pt.sin(x) * bar * cotangents[0], pt.cos(x) * cotangents[0]]


ALONE = {
    "shape": "infer_shape gives the gradient for x the shape (6,), it has (5,)",
    "overwritten": "cotangent 0 is overwritten",
    "handed back": "the gradient for x is a view of cotangent 0",
    "kept": "the next call overwrites the gradient for x",
    "strides": "the gradient for x of views with strides is wrong",
    "type": "the gradient for x is declared float64 and returned as float32",
}


@pytest.mark.parametrize("fault", [None, *ALONE])
def test_a_gradient_that_is_an_op_is_attacked_as_one(fault):
    def sine(x):
        return Sine(fault)(x)

    says = faults(sine, (x,)).get("gradient alone", "")
    assert says.startswith(ALONE[fault]) if fault else says == ""


def test_a_gradient_of_the_gradient_that_fails_is_told():
    class Fails(SineGrad):
        def pullback(self, inputs, outputs, cotangents):
            x, bar = inputs
            return [assert_op(bar, pt.all(x < 0)), bar]

    pullback = {"pullback": lambda s, inputs, outputs, bars: [Fails(None)(*inputs, *bars)]}
    assert "AssertionError" in faults(type("Sine", (Sine,), pullback)(None), (x,))["second order"]


@pytest.mark.parametrize("where", ["output", "gradient"])
def test_float32_inside_float64_is_one_fault(where):
    """Differences of such numbers are rounding errors, and no slopes that are wrong."""

    def narrow(x):
        return x.astype("float32").astype(x.dtype)

    def cube(self, node, inputs, outputs):
        y = inputs[0] ** 3
        outputs[0][0] = narrow(y) if where == "output" else y

    def slope(self, inputs, outputs, cotangents):
        g = 3 * inputs[0] ** 2 * cotangents[0]
        return [narrow(g) if where == "gradient" else g]

    found = faults(type("Cube", (Sine,), {"perform": cube, "pullback": slope})(None), (x,))
    assert set(found) == {"float64"} and "digits of float32" in found["float64"]


class CubeGrad(Sine):
    """3 x^2 times a cotangent, and wrong where that is differentiated."""

    def perform(self, node, inputs, outputs):
        outputs[0][0] = 3 * inputs[0] ** 2 * inputs[1]

    def pullback(self, inputs, outputs, cotangents):
        x, bar = inputs
        return [6 * x * bar * cotangents[0], 3 * x * cotangents[0]]


def test_a_wrong_gradient_for_the_cotangents_is_not_called_something_else():
    def pullback(self, inputs, outputs, cotangents):
        return [CubeGrad(None)(inputs[0], cotangents[0])]

    cubed = {"perform": lambda s, n, i, o: o[0].__setitem__(0, i[0] ** 3), "pullback": pullback}
    found = faults(type("Cube", (Sine,), cubed)(None), (x,))
    assert found["pushforward by two pulls"] == (
        "the pullback has a wrong gradient for the cotangents"
    )


def test_an_infinite_value_that_should_be_is_named():
    def inverse(self, node, inputs, outputs):
        outputs[0][0] = 1 / np.where(inputs[0] == 0, 1e-300, inputs[0])

    op = type("Inverse", (Sine,), {"perform": inverse})(None)
    at = contract.point(op, np.array([0.0, 1.0]), truth=lambda x: 1 / x)
    with np.errstate(divide="ignore"), pytest.raises(contract.Found, match="output 0 is finite"):
        contract.value(at)


def test_a_number_beyond_all_integers_is_not_taken_for_one():
    bounded = {
        "perform": lambda s, n, i, o: o[0].__setitem__(0, np.minimum(i[0], 1)),
        "pullback": lambda s, i, o, c: [pt.lt(i[0], 1) * c[0]],
    }
    assert faults(type("Bounded", (Sine,), bounded)(None), (np.array([np.inf, 1e300, 0.5]),)) == {}


@pytest.mark.parametrize("declared", [pg.grad_not_implemented, pg.grad_undefined])
def test_a_gradient_that_is_declared_missing_is_skipped_and_the_others_are_not(declared):
    def missing(factor):
        return pull(lambda i, c, x, w, no: [factor * x, declared(Weigh(), 1, i[1], "ours"), no])

    report = attack(planted(pullback=missing(1)), x, w, labels, backends=(), raises=False)
    says = {a.name: (a.status, a.says) for a in report.attacks}
    assert not report.faults and "ours" in str(says["gradient for w"])
    assert says["gradient for w"][0] == "skipped" and says["second order"][0] == "ok"
    assert "for x is 3 times" in faults(planted(pullback=missing(3)))["pullback"]


def test_the_check_of_one_kind_can_be_called_alone():
    at = contract.point(Weigh(), x, w, labels, truth=truth)
    assert contract.pullback(at) == "against complex step" and contract.second_order(at) is None
    with pytest.raises(contract.Found, match="wrong sign"):
        wrong = planted(pullback=pull(lambda i, c, x, w, no: [-x, w, no]))
        contract.pullback(contract.point(wrong, x, w, labels))


def test_a_value_that_a_rewrite_changes_is_seen():
    place = np.array([2, 0, 2])
    found = faults(lambda s: pt.zeros(4)[place].set(s)[place], (np.array([1.0, 2.0, 3.0]),))
    assert "output 0 is wrong" in found["rewritten"]


class Second(Op):
    """x + w, with a shape that forgets a batch of w alone."""

    __props__ = ()
    gufunc_signature = "(n),()->(n)"

    def make_node(self, x, w):
        x, w = pt.as_tensor(x), pt.as_tensor(w)
        if (x.ndim, w.ndim) != (1, 0):
            raise TypeError("expected a vector and a scalar")
        return Apply(self, [x.astype("float64"), w.astype("float64")], [pt.dvector()])

    def infer_shape(self, node, shapes):
        return shapes[:1]

    def perform(self, node, inputs, outputs):
        outputs[0][0] = np.asarray(inputs[0] + inputs[1])


@_vectorize_node.register(Second)
def first_of_the_batch(op, node, x, w):
    if x.ndim == 1:  # of w alone: the fault
        return [pt.stack([op(x, w[0]), op(x, w[0])])]
    return [x + (w[..., None] if w.ndim else w)]


def test_a_batch_of_the_second_input_alone_is_tried():
    assert "a batch of w alone: output 0 is" in faults(Second(), (x, w))["batched"]


def test_a_label_out_of_range_must_be_refused():
    def careless(self, node, inputs, outputs):
        x, w, labels = inputs
        y = w * x * x
        outputs[0][0], outputs[2][0] = y, np.array(labels.max(initial=0))
        outputs[1][0] = np.zeros(3, y.dtype)
        np.add.at(outputs[1][0], labels % 3, y)

    found = faults(planted(perform=careless), refused=BAD)
    assert found["refused: label 3"] == "there is an answer where an error was expected"


def test_a_value_that_is_not_the_truth():
    assert faults(Weigh(), truth=lambda *a: [2 * y for y in truth(*a)])["value"] == (
        "output 0 is 0.5 times the true one (the truth)"
    )


def test_undefined_gradients_for_integers_are_right():
    op = planted(
        pullback=pull(lambda i, c, x, w, no: [x, w, grad_undefined(Weigh(), 2, i[2])]),
        connection_pattern=lambda s, n: [[True, True, False]] * 3,
    )
    assert "gradient for integers" not in faults(op)


def test_what_an_op_lacks_is_a_note():
    class Bare(Op):
        __props__ = ()
        make_node, perform = Weigh.make_node, Weigh.perform
        connection_pattern = Weigh.connection_pattern

    report = attack(Bare(), x, w, labels, backends=())
    notes = {a.name: a.says for a in report.attacks if a.status == "note"}
    assert notes["pullback"].startswith("no pullback")
    assert notes["shape alone"].startswith("no infer_shape")


NOTHING_LEFT = {
    "softmax": (lambda a: pt.special.softmax(a).sum(), x),
    "cos and sin": (lambda a: pt.cos(a) ** 2 + pt.sin(a) ** 2, x),
    "one factor": (lambda a, b: a * b / b, x, x**2 + 1),
    "inverse": (lambda A: pt.linalg.inv(A) @ A, np.eye(3) + 0.1 * np.arange(9.0).reshape(3, 3)),
    # And nothing else of the value.
    "deviations": (lambda a: (a - a.mean()).sum(), x),
    "softmax less one": (lambda a: pt.special.softmax(a).sum() - 1, x),
    "there and back": (lambda a: pt.log(pt.exp(a)) - a, x),
    "commutator": (lambda A, B: (A @ B - B @ A).trace(), np.cos(np.arange(9.0).reshape(3, 3)),
                   np.sin(np.arange(9.0).reshape(3, 3))),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING_LEFT)
def test_a_gradient_of_which_rounding_alone_is_left(name):
    op, *inputs = NOTHING_LEFT[name]
    report = attack(op, *inputs, backends=(), raises=False)
    assert not report.faults, report
    assert {a.name: a.status for a in report.attacks}["pullback in float32"] == "ok"


@pytest.mark.parametrize("factor", [0.0, 1e-6])
def test_a_wrong_gradient_of_what_rounding_alone_is_left_of(factor):
    a = pt.dvector("a")
    box = OpFromGraph(
        [a], [(a - a.mean()).sum()], pullback=lambda i, o, c: [factor * c[0] + 0 * i[0]]
    )
    assert ("pullback" in faults(box, (x,))) == bool(factor)


class OfItsInputs(Op):
    """a b, whose pullback asks autodiff for the gradient of what it is given."""

    itypes, otypes = [pt.dvector, pt.dvector], [pt.dvector]

    def perform(self, node, inputs, storage):
        storage[0][0] = inputs[0] * inputs[1]

    def infer_shape(self, node, shapes):
        return shapes[:1]

    def pullback(self, inputs, outputs, cotangents):
        return pytensor.grad((inputs[0] * inputs[1] * cotangents[0]).sum(), inputs)


def test_a_pullback_by_autodiff_of_the_inputs_themselves():
    """Right as long as no input, and no cotangent, is computed from another input."""
    found = faults(OfItsInputs(), (x, x**2))
    assert set(found) == {"inputs of one another", "one variable twice"}
    assert "2 times the true one" in found["one variable twice"]


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_pullback_that_looks_gradients_up_by_variable(by_variable):
    """Of two inputs that are one variable it finds the last gradient twice."""

    def pullback(self, inputs, outputs, cotangents):
        a, b = inputs
        found = [cotangents[0] * b * a, cotangents[0] * a**2 / 2]
        return [dict(zip(inputs, found, strict=True))[x] for x in inputs] if by_variable else found

    def perform(self, node, inputs, storage):
        storage[0][0] = inputs[0] ** 2 * inputs[1] / 2

    kind = type("OfVariables", (OfItsInputs,), {"pullback": pullback, "perform": perform})
    assert set(faults(kind(), (x, x**2))) == ({"one variable twice"} if by_variable else set())


def test_an_override_of_an_op_from_graph_that_forgets_its_cotangent():
    a = pt.dvector("a")
    box = OpFromGraph([a], [a**2], pullback=lambda i, o, c: [2 * i[0]], inline=True)
    assert set(faults(box, (x,))) >= {"pullback", "pullback is linear"}


@pytest.mark.parametrize("rule", [None, lambda i, o, c: [c[0] * i[1], c[0] * i[0]]])
def test_rules_that_pytensor_makes_for_a_graph_in_a_box(rule):
    """They take no tangent that is absent, and the one of a power is NaN below zero."""
    a, b = pt.dvectors("a", "b")
    assert faults(OpFromGraph([a, b], [a * b], pullback=rule), (x, -x)) == {}
    assert faults(OpFromGraph([a, b], [a**2]), (-x, x)) == {}
    wrong = OpFromGraph([a, b], [a * b], pullback=rule, pushforward=lambda i, d: [d[0] * i[1]])
    assert "pushforward" in faults(wrong, (x, x**2))


class Times(Op):
    """k x, of which subclasses lose k, or remember too much."""

    __props__ = ("k",)
    itypes, otypes = [pt.dvector], [pt.dvector]

    def __init__(self, k):
        self.k = k

    def perform(self, node, inputs, storage):
        storage[0][0] = np.asarray(self.k) * inputs[0]

    def infer_shape(self, node, shapes):
        return shapes

    def pullback(self, inputs, outputs, cotangents):
        return [self.k * cotangents[0]]


def remembers(self, node, inputs, storage):
    if not hasattr(self, "first"):
        self.first = inputs[0].sum()
    storage[0][0] = self.k * inputs[0] + self.first


def forgets(self, inputs, outputs, cotangents):
    self.before = getattr(self, "before", 0) + 1
    return [self.k * cotangents[0] * self.before]


def unready(self):
    raise TypeError("it holds a lock")


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        ({}, None),
        ({"__setstate__": lambda self, state: setattr(self, "k", 1.0)}, "it loses a part of"),
        ({"__getstate__": lambda self: {"j": 1}}, "as pickling makes one, cannot be compared"),
        ({"perform": remembers}, "the Op keeps something between its calls"),
        ({"pullback": forgets}, "applied again, it answers otherwise (the gradient for"),
        ({"__hash__": lambda self: id(self)}, "is equal to its copy, and has another hash"),
        ({"__reduce__": unready}, "can be neither copied nor pickled: TypeError: it holds a lock"),
    ],
)
def test_a_copy_of_an_op_is_the_op(methods, says):
    report = attack(type("Told", (Times,), methods)(3.0), x, backends=(), raises=False)
    told = {a.name: a for a in report.attacks}["equal Ops"]
    assert says in told.says if says else not report.faults
    assert told.status == ("ok" if not says else "note" if "lock" in says else "FAULT")


@pytest.mark.parametrize("k", [(1.0, 2.0, 3.0, 4.0, 5.0), np.arange(5.0), 2.0])
def test_numbers_that_an_op_does_not_name_among_its_properties(k):
    told = faults(type("Unnamed", (Times,), {"__props__": ()})(k), (x,))["equal Ops"]
    assert "name k in __props__" in told


@pytest.mark.parametrize("compare", [True, False])
def test_an_op_that_is_a_frozen_dataclass(compare):
    @dataclass(frozen=True)
    class Frozen(Times):
        k: float = field(compare=compare)

    told = faults(Frozen(2.0), (x,))
    assert told == {} if compare else "name k in __props__" in told["equal Ops"]


# --- the Ops of the package -----------------------------------------------------------------------

# By PyTensor's scan, in Python: second derivatives take half a minute, and third ones, or nine of
# the second, take many.
SLOW_OURS = {"KalmanFilter", "KalmanFilterGrad"}
# ConvGrads is three of these at once, and takes a quarter of their time.
SLOW_OURS |= {"Conv", "ConvGradValues", "ConvGradWeights", "KalmanPanelGrad"}
LEFT_OUT = {
    "KalmanFilterGrad": ("second_order", "pushforward_by_two_pulls", "disconnected_cotangents")
}


def takes_minutes(at):
    raise contract.Found("by scans in Python it takes many minutes", "skipped")


@pytest.mark.parametrize("name", [thorough(x, id=x) if x in SLOW_OURS else x for x in OURS])
def test_an_op_of_the_package_keeps_the_contract(name, monkeypatch):
    for check in LEFT_OUT.get(name, ()):
        monkeypatch.setattr(contract, check, takes_minutes)
    op, inputs = OURS[name]
    assert faults(op, inputs) == {}


def test_the_gradient_of_a_value_beside_outputs_that_have_none():
    op, inputs = OURS["KalmanIntegrated"]
    report = attack(lambda *X: op(*X)[0], *inputs, raises=False, backends=())
    says = {a.name: a.status for a in report.attacks}
    assert not report.faults and says["pullback"] == "ok", report


def test_every_op_of_the_package_is_attacked():
    """A class of Ops is found by its bases, in the text: some modules need packages to import."""
    texts = [file.read_text("utf-8") for file in Path(helpers.__file__).parent.rglob("*.py")]
    bases = dict(re.findall(r"^class (\w+)\((\w+)\):", "\n".join(texts), re.M))
    ops, found = {"Op"}, set()
    while found != ops:
        found, ops = ops, ops | {name for name, base in bases.items() if base in ops}
    # OneStepTerms is taken away by rewrites, and its gradient is that of a sum.
    shared = {"Op", "RulebookOp", "OneStepTerms", "Declared", "OfModel", "OfText"}
    shared |= {x for x in ops if x.startswith("_")}
    assert ops - shared == set(OURS)


SAYS = (
    "has shape .*, expected|does not have (shape|length)|not that of as many series"
    "|varies over time|a row for each series|neither the series and its columns"
    "|not as many or as long"
)
DECLARED = {name: x for name, x in KALMAN.items() if isinstance(x[0], Declared)}


def doors(op, arrays):
    """The three places that look at shapes: building a graph, Python's call, and the function that
    Numba compiles, which leaves some of it to the code that it calls."""
    shapes = [(None,) * np.ndim(X) for X in arrays]
    node = op.make_node(*(pt.tensor(shape=shape, dtype="float64") for shape in shapes))
    return (
        lambda: op(*arrays),
        lambda: op.perform(node, arrays, [[None] for _ in node.outputs]),
        lambda: in_python(op)(*arrays),
    )


@pytest.mark.parametrize("name", DECLARED)
def test_what_does_not_fit_is_refused_at_every_door(name):
    """Compiled code reads where it is told to: an axis that is longer is named before it is run."""
    op, arrays = DECLARED[name]
    axes = [(k, i, letter.removesuffix("?"), letter[-1] != "?" or arrays[k].shape[i] != 1)
            for k, dims in enumerate(op.inputs.values())
            for i, letter in enumerate(dims.split())]  # fmt: skip
    for k, i, letter, _ in axes:
        told = [arrays[at].shape[axis] for at, axis, x, tells in axes
                if tells and x == letter and (at, axis) != (k, i)]  # fmt: skip
        if not told:
            continue  # nothing else says how long it is
        wrong, shape = [*arrays], [*arrays[k].shape]
        shape[i] = max(*told, shape[i]) + 1
        wrong[k] = np.zeros(shape)
        for door in doors(op, wrong):
            with pytest.raises(ValueError, match=SAYS):
                door()


@pytest.mark.parametrize("name", [x for x in DECLARED if DECLARED[x][0].needed])
def test_what_must_be_there_is_asked_for_at_every_door(name):
    op, arrays = DECLARED[name]
    for letter, what in op.needed.items():
        cut = [X[tuple(slice(0 if k.strip("?") == letter else None) for k in dims.split())]
               for X, dims in zip(arrays, op.inputs.values(), strict=True)]  # fmt: skip
        for door in doors(op, cut):
            with pytest.raises(
                ValueError, match=f"{letter} = 0: there is no {what}|is empty|no ser"
            ):
                door()


def test_an_op_takes_the_options_that_it_declares():
    op = KALMAN["KalmanPanelGrad"][0].requesting(("l", "T"))
    assert type(op)(("l", "T"), tol=op.tol) == op != type(op)(("l", "T"), tol=0.0)
    assert str(op) == f"KalmanPanelGrad{{requested=('l', 'T'), tol={op.tol!r}}}"
    with pytest.raises(TypeError, match="KalmanPanelGrad has no option varying"):
        type(op)(varying=("T",))
    with pytest.raises(ValueError, match="expected a finite number that is"):
        type(op)(tol=-1.0)


# --- Numba: two small kernels, one of them wrong --------------------------------------------------


class Double(Op):
    __props__ = ("upcasts",)

    def __init__(self, upcasts):
        self.upcasts = upcasts

    def make_node(self, x):
        x = pt.as_tensor(x)
        if x.ndim != 1:
            raise TypeError("expected a vector")
        if self.upcasts:
            x = x.astype(pytensor.scalar.upcast("float32", x.dtype))
        return Apply(self, [x], [x.type()])

    def infer_shape(self, node, shapes):
        return shapes

    def perform(self, node, inputs, outputs):
        outputs[0][0] = np.asarray(2.5 * inputs[0], dtype=node.outputs[0].dtype)

    def pullback(self, inputs, outputs, cotangents):
        return [2.5 * cotangents[0]]


@register_funcify_default_op_cache_key(Double)
def double_in_numba(op, node, **kwargs):
    wrong = not op.upcasts

    @numba_basic.numba_njit
    def double(x):
        y = np.empty_like(x)
        for i in range(x.size):
            y[i] = 2.5 * x[i]
        if wrong and x.size > 3:
            x[0] = 0.0
        return y

    return double, 1


def test_numba_agrees_and_a_wrong_kernel_is_found():
    report = attack(Double(True), x, backends=("numba",))
    assert [a.status for a in report.attacks if a.name.startswith("Numba")] == ["ok"] * 8, report
    found = faults(Double(False), (x,), backends=("numba",))
    assert found["Numba"] == "Numba overwrites an input"
    assert "truncates" in found["integers for floats"]


def test_jax_is_compared_where_the_op_is_registered():
    pytest.importorskip("jax")
    report = attack(pt.exp, x, backends=("jax",))
    says = {a.name: a.status for a in report.attacks}
    assert says["JAX"] == says["JAX: derivative"] == "ok", report
    report = attack(Double(True), x, backends=("jax",))
    assert report.attacks[-1].status == "skipped" and "not registered" in report.attacks[-1].says


class Aliased(Double):
    """Doubled; compiled by Numba, the input or one array twice."""

    __props__ = ("how",)

    def __init__(self, how):
        self.how = how

    def make_node(self, x):
        x = pt.as_tensor(x).astype("float64")
        if x.ndim != 1:
            raise TypeError("expected a vector")
        return Apply(self, [x], [x.type(), x.type()])

    def infer_shape(self, node, shapes):
        return shapes * 2

    def perform(self, node, inputs, outputs):
        outputs[0][0], outputs[1][0] = inputs[0].copy(), inputs[0].copy()

    def pullback(self, inputs, outputs, cotangents):
        raise NotImplementedError


@register_funcify_default_op_cache_key(Aliased)
def aliased_in_numba(op, node, **kwargs):
    if op.how == "the input":

        @numba_basic.numba_njit
        def alias(x):
            return x, x.copy()
    elif op.how == "the input where it is whole":

        @numba_basic.numba_njit
        def alias(x):
            return x if x.size and x[0] == np.rint(x[0]) else x.copy(), x.copy()
    else:

        @numba_basic.numba_njit
        def alias(x):
            y = x.copy()
            return y, y

    return alias, 1


@pytest.mark.parametrize(
    "how, says",
    [
        ("the input", "a view of"),
        ("one array twice", "share memory"),
        ("the input where it is whole", "a view of"),
    ],
)
def test_memory_that_a_compiled_kernel_shares_is_seen(how, says):
    found = faults(Aliased(how), (x,), backends=("numba",))
    names = ["Numba: repeated call", "Numba: not contiguous"] * ("whole" not in how)
    assert set(found) == {"Numba: elsewhere", *names}
    assert all(says in x for x in found.values())


def test_a_wrong_rule_of_jax_is_seen():
    jax = pytest.importorskip("jax")
    from pytensor.link.jax.dispatch import jax_funcify

    class ForJAX(Double):
        pass

    @jax.custom_jvp
    def double(x):
        return 2.5 * x

    @double.defjvp
    def rule(primals, tangents):
        return double(*primals), 3.5 * tangents[0]

    jax_funcify.register(ForJAX)(lambda op, **kwargs: double)
    found = faults(ForJAX(True), (x,), backends=("jax",))
    assert set(found) == {"JAX: derivative"} and "1.4 times" in found["JAX: derivative"]

    class OfLengthOne(Double):
        pass

    jax_funcify.register(OfLengthOne)(
        lambda op, **kwargs: lambda x: 2.5 * x if x.size else jax.numpy.zeros(1)
    )
    found = faults(OfLengthOne(True), (x,), backends=("jax",))
    assert set(found) == {"JAX: empty"} and "shape (1,), expected (0,)" in found["JAX: empty"]


def test_a_rule_of_jax_is_compared_where_there_is_no_pullback_or_no_way_back():
    jax = pytest.importorskip("jax")
    from pytensor.link.jax.dispatch import jax_funcify

    class NoPullback(Double):
        def pullback(self, inputs, outputs, cotangents):
            raise NotImplementedError

    class ByLoop(Double):
        pass

    def looped(x):  # of unknown length: JAX pushes through it, and pulls through none
        return jax.lax.while_loop(lambda z: z.max() < 3, lambda z: 2.5 * x, 0 * x)

    jax_funcify.register(NoPullback)(lambda op, **kwargs: lambda x: 2.5 * x)
    jax_funcify.register(ByLoop)(lambda op, **kwargs: lambda x: looped(x) if x.size else 2.5 * x)
    for op, says in (NoPullback(True), ""), (ByLoop(True), "forwards alone"):
        report = attack(op, np.array([1.2, 1.5]), backends=("jax",), raises=False)
        assert not report.faults, report
        assert report.attacks[-1].says == says


class InC(ps.UnaryScalarOp):
    def __init__(self, code, name=None):
        super().__init__(ps.upgrade_to_float, name)
        self.code = code

    def impl(self, x):
        return 2.5 * x

    def pullback(self, inputs, outputs, cotangents):
        return [2.5 * cotangents[0]]

    def c_code(self, node, name, inputs, outputs, sub):
        return f"{outputs[0]} = {self.code} * {inputs[0]};"

    def c_code_cache_version(self):
        return (self.code,)


@pytest.mark.skipif(not which("g++"), reason="no compiler")
def test_wrong_c_code_is_seen():
    with pytensor.config.change_flags(cxx=which("g++")):  # conftest.py switches it off
        right, wrong = (faults(Elemwise(InC(c)), (x,), backends=("c",)) for c in ("2.5", "3.0"))
    assert right == {} and "1.2 times" in wrong["C"]


# --- PyTensor's own -------------------------------------------------------------------------------

linalg = pt.linalg
v, u, M = rng.uniform(0.3, 0.8, 5), rng.uniform(0.2, 0.9, 5), rng.uniform(0.2, 0.9, (3, 4))
G = rng.standard_normal((3, 3)) + 3 * np.eye(3)
S, three, picked = G @ G.T, rng.uniform(0.3, 0.8, 3), np.array([2, 0])
OWN = {
    "exp": (pt.exp, v), "log": (pt.log, v), "sqrt": (pt.sqrt, v), "tanh": (pt.tanh, v),
    "sigmoid": (pt.sigmoid, v), "abs": (pt.abs, -v), "floor": (pt.floor, 3 * v),
    "add": (pt.add, v, u), "sub": (pt.sub, v, u), "mul": (pt.mul, v, u),
    "true_div": (pt.true_div, v, u), "pow": (pt.pow, v, -u), "maximum": (pt.maximum, v, u),
    "switch": (pt.switch, np.array([1, 0, 1, 1, 0]), v, u), "arctan2": (pt.arctan2, v, u),
    "clip": (pt.clip, v, np.array(0.2), np.array(0.6)), "mod": (pt.mod, 5 * v, u + 1),
    "erf": (pt.erf, v), "erfinv": (pt.erfinv, v), "gammaln": (pt.gammaln, v), "psi": (pt.psi, v),
    "i0": (pt.i0, v), "jv": (pt.jv, np.array(1.0), v), "logaddexp": (pt.logaddexp, v, u),
    "gammainc": (pt.gammainc, v[:2] + 1, u[:2] + 1),
    "sum": (lambda x: pt.sum(x, axis=0), M), "mean": (lambda x: pt.mean(x, axis=1), M),
    "var": (pt.var, M), "prod": (lambda x: pt.prod(x, axis=1), M),
    "max": (lambda x: pt.max(x, axis=0), M), "min": (pt.min, M), "argmax": (pt.argmax, v),
    "max at a tie": (pt.max, np.array([2.0, 2.0, 1.0])), "logsumexp": (pt.logsumexp, M),
    "cumsum": (pt.cumsum, v), "cumprod": (pt.cumprod, v), "sort": (pt.sort, v),
    "argsort": (pt.argsort, v), "reshape": (lambda x: x.reshape((4, 3)), M),
    "transpose": (lambda x: x.T, M), "concatenate": (lambda x, y: pt.concatenate([x, y]), v, u),
    "slice": (lambda x: x[1:3], v), "take": (lambda x, i: x[i], v, picked),
    "inc": (lambda x, y: x[picked].inc(y), v, u[:2]), "diag": (pt.diag, v),
    "diagonal": (pt.diagonal, M), "repeat": (lambda x: pt.repeat(x, 2), v),
    "tile": (lambda x: pt.tile(x, 2), v), "alloc": (lambda x: pt.alloc(x, 3), np.array(1.5)),
    "diff": (pt.diff, v), "roll": (lambda x: pt.roll(x, 2), v), "searchsorted":
    (pt.searchsorted, np.sort(v), u), "dot": (pt.dot, M, M.T.copy()), "outer": (pt.outer, v, u),
    "kron": (linalg.kron, M, G), "inv": (linalg.inv, G), "det": (linalg.det, G),
    "slogdet": (linalg.slogdet, G), "cholesky": (linalg.cholesky, S), "qr": (linalg.qr, G),
    "solve": (lambda A, b: linalg.solve(A, b, b_ndim=1), G, three),
    "solve_triangular": (
        lambda A, b: linalg.solve_triangular(A, b, lower=True, b_ndim=1), np.tril(G), three),
    "solve of symmetric": (
        lambda A, b: linalg.solve(A, b, assume_a="pos", b_ndim=1), S, three),
    "eigenvalues": (lambda A: linalg.eigh(A)[0], S),
    "singular values": (lambda x: linalg.svd(x, full_matrices=False)[1], G),
    "expm": (linalg.expm, G / 4), "softmax": (pt.special.softmax, v),
    "log_softmax": (pt.special.log_softmax, v),
    "cast to float32": (lambda x: x.astype("float32"), v),
    # What only PyTensor could mend, and vectors that are known but for their signs.
    "norm of rows": (lambda x: linalg.norm(x, axis=1), M), "median": (pt.median, v),
    "squeeze": (lambda x: pt.squeeze(x, axis=0), M[None]), "lu": (lambda A: list(linalg.lu(A)), G),
    "increment of integers": (lambda x, y: x[::2].inc(y), v, u[:3]), "eigenvectors":
    (pt.linalg.Eigh(), S), "schur": (lambda A: list(linalg.schur(A)), S),
    "cube at 0": (lambda x: x**3, np.array([0.0, 0.5])), "cube of 0": (lambda x: x**3, np.zeros(2)),
    "scan": (lambda x, A: pytensor.scan(
        lambda a, s, A: pt.tanh(A @ s + a), sequences=[x], outputs_info=[pt.zeros(3)],
        non_sequences=[A], return_updates=False), M.T.copy(), G / 5),
    "float32 alone": (lambda x: pt.fvector().type.filter_variable(x, allow_convert=False) * 2, v),
}  # fmt: skip


SLOW = {"gammainc", "kron", "logaddexp", "expm", "scan"}


@pytest.mark.parametrize("name", [thorough(x, id=x) if x in SLOW else x for x in OWN])
def test_an_op_of_pytensor_raises_no_false_alarm(name):
    op, *inputs = OWN[name]
    assert faults(op, inputs) == {}


def test_a_batch_of_an_op_of_the_filter_compiles_nothing_anew():
    """A batch of one input alone hands on the others read-only: a type of its own for Numba."""
    from helpers.kalman.compiled.building import load

    op, inputs = OURS["KalmanLoglike"]
    code = load("door").loglike
    op.perform(op(*inputs).owner, inputs, [[None]])
    known, out = set(code.signatures), [[None]]
    views = [np.broadcast_to(x[None], (2, *x.shape))[0].astype(x.dtype, copy=False) for x in inputs]
    assert not any(x.flags.writeable for x in views)
    op.perform(op(*views).owner, views, out)
    op.perform(op(*inputs).owner, [np.array(x, "float32", order="F") for x in inputs], out)
    assert set(code.signatures) == known
