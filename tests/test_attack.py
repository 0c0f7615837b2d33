"""`attack` passes an Op that keeps the contract, and names the faults planted in others."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.builders import OpFromGraph
from pytensor.gradient import (
    DisconnectedType,
    disconnected_type,
    grad_undefined,
    zero_grad,
)
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.link.numba.dispatch import basic as numba_basic
from pytensor.link.numba.dispatch.basic import register_funcify_default_op_cache_key
from test_sparse_op import OPS as SPARSE_OPS

from helpers.checks import attack

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


def test_without_truth_central_differences_stand_in():
    assert faults(Weigh()) == {}
    report = attack(Weigh(), x, w, labels, backends=())
    assert "central differences" in str(report)


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


def same_types(x, w):
    return [x.type(), x.type(), pt.lscalar()]


def three(x, w):
    return [x.type(), pt.tensor(dtype=x.dtype, shape=(3,)), pt.lscalar()]


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


PLANTED = {
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
        {"pullback is linear": "for x, -2 times the cotangent does not give -2 times the answer"},
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
    "a pullback that is right and not differentiable": (
        {"pullback": pull(lambda i, c, x, w, no: [zero_grad(x), w, no])},
        {"second order": "the gradient of the pullback for x is wrong"},
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
         "pushforward is linear": "-2 times the tangents do not give -2 times the answer"},
    ),
    "a tangent that may be absent": (
        {"pushforward": absent},
        {"disconnected tangents": "if x alone moves, pushforward fails"},
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


def test_an_override_of_an_op_from_graph_that_forgets_its_cotangent():
    a = pt.dvector("a")
    box = OpFromGraph([a], [a**2], pullback=lambda i, o, c: [2 * i[0]], inline=True)
    assert set(faults(box, (x,))) >= {"pullback", "pullback is linear"}


# Without positions a rulebook does not say how many channels Q had: its transpose cannot know.
KNOWN = {"BuildQ": {"empty gradient"}}


@pytest.mark.parametrize("op", SPARSE_OPS, ids=lambda op: type(op).__name__)
def test_the_sparse_ops_keep_the_contract(op):
    shapes, integers, _ = SPARSE_OPS[op]
    values = [rng.standard_normal(shape) for shape in shapes]
    assert set(faults(op, (*values, *integers))) == KNOWN.get(type(op).__name__, set())


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
    assert [a.status for a in report.attacks if a.name.startswith("Numba")] == ["ok"] * 7, report
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
