"""Each row of book/pytensor-surprises.md is still true of the PyTensor that is installed.

A test fails when PyTensor has mended what its row describes: then the row leaves the page, and the
chapter that the row names has a paragraph to change.
"""

import re
import warnings
from pathlib import Path

import numpy as np
import pytensor
import pytensor.gradient as pg
import pytensor.sparse as ps
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode
from pytensor.graph.utils import MissingInputError

PAGE = Path(__file__).parents[1] / "book" / "pytensor-surprises.md"
ROWS = [f"S{k}" for k in range(1, 22)]
SURPRISES = {}
AS_WRITTEN, REWRITTEN = Mode("py", None), Mode("py", "fast_run")


def surprise(row):
    """Register a function that returns whether the surprise of this row is still there."""

    def register(is_there):
        SURPRISES[row] = is_there
        return is_there

    return register


def judge(row, is_there):
    advice = f"mended in PyTensor {pytensor.__version__}? Change row {row} of book/{PAGE.name}"
    try:
        there = is_there()
    except Exception as error:
        pytest.fail(f"{advice}: it now raises {type(error).__name__}: {error}")
    assert there, f"{advice}, and what its chapter says."


def value(graph, at=None, mode=AS_WRITTEN):
    return graph.eval(at or {}, mode=mode, on_unused_input="ignore")


def raises(error, call):
    try:
        call()
    except error:
        return True
    return False


@pytest.mark.parametrize("row", ROWS)
def test_a_surprise_is_still_there(row):
    with pytensor.config.change_flags(mode="FAST_COMPILE", cxx=""):
        judge(row, SURPRISES[row])


def test_the_page_has_a_row_for_every_test():
    rows = re.findall(r"^\* - \*\*(S\d+)\*\* ", PAGE.read_text(encoding="utf-8"), re.M)
    assert rows == list(SURPRISES) == ROWS


def test_the_page_speaks_of_the_version_that_is_installed():
    assert f"PyTensor {pytensor.__version__}" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("mended", [lambda: False, lambda: 1 / 0])
def test_a_mended_surprise_names_its_row(mended):
    with pytest.raises((AssertionError, pytest.fail.Exception), match="Change row S7 of book/"):
        judge("S7", mended)


# --- wrong numbers --------------------------------------------------------------------------------


def split_product(stop=lambda first: first):
    """The variable, x1 x2, x1 and the point (2, 3). With x1 held the gradient is (0, 2)."""
    x = pt.dvector("x")
    first, second = pt.split(x, [1, 1], n_splits=2)
    return x, (stop(first) * second).sum(), first, {x: np.array([2.0, 3.0])}


@surprise("S1")
def consider_constant_with_a_second_output():
    x, cost, first, at = split_product()
    held = pg.grad(cost, x, consider_constant=[first])
    x, cost, _, cut_at = split_product(pg.disconnected_grad)
    cut = pg.grad(cost, x)
    return value(held, at).tolist() == [3, 2] and value(cut, cut_at).tolist() == [0, 2]


@surprise("S2")
def subgraph_grad_passes_its_end():
    x, cost, first, at = split_product()
    (x_bar,), _ = pg.subgraph_grad(wrt=[x], end=[first], cost=cost)
    return value(x_bar, at).tolist() == [3, 2]


@surprise("S3")
def set_with_a_repeated_index():
    s, weight = pt.dvector("s"), np.array([1.0, 2.0, 3.0, 4.0])
    cost = (weight * pt.zeros(4)[np.array([2, 0, 2])].set(s)).sum()
    return np.array_equal(value(pg.grad(cost, s), {s: np.ones(3)}), [3, 1, 3])  # right: [0, 1, 3]


@surprise("S4")
def reading_what_was_set_at_a_repeated_index():
    s, place = pt.dvector("s"), np.array([2, 0, 2])
    read, at = pt.zeros(4)[place].set(s)[place], {s: np.array([1.0, 2.0, 3.0])}
    as_written, rewritten = value(read, at), value(read, at, REWRITTEN)
    return as_written.tolist() == [3, 2, 3] and rewritten.tolist() == [1, 2, 3]


@surprise("S5")
def outputs_that_use_each_other():
    q, u1, u2 = pt.dscalars("q", "u1", "u2")
    at = {q: 3.0, u1: 1.0, u2: 10.0}
    y = q**2
    pulls = [value(pg.pullback(pair, q, [u1, u2]), at) for pair in ([y, y], [q, y], [y, y * 1])]
    return pulls == [60, 1, 6]  # right: 66, 61, 66


@surprise("S6")
def a_push_of_outputs_that_use_each_other():
    q, q_dot = pt.dscalars("q", "q_dot")
    at, y = {q: 3.0, q_dot: 1.0}, q**2
    outputs = [float(value(part, at)) for part in pg.pushforward([q, y], q, q_dot)]
    a, b = pt.dscalars("a", "b")
    inputs = pg.pushforward(a + b, [a, b], [pt.constant(10.0), pt.constant(1.0)])
    return outputs == [1, 0] and value(inputs, {a: 2.0, b: 3.0}) == 1


@surprise("S7")
def a_sparse_push():
    S, T = pt.dmatrices("S", "T")
    diagonal = ps.csr_from_dense(pt.as_tensor(np.diag([1.0, 2.0])))
    product = ps.dense_from_sparse(ps.multiply(diagonal, S))
    at = {S: np.ones((2, 2)), T: np.ones((2, 2))}
    pushes = [pg.pushforward(y, S, T) for y in (product, ps.sp_sum(ps.csr_from_dense(S), axis=1))]
    return not any(value(push, at).any() for push in pushes)  # right: the diagonal, and (2, 2)


@surprise("S8")
def zero_grad_pushes_a_scalar():
    v, v_dot = pt.dvectors("v", "v_dot")
    return pg.pushforward(pg.zero_grad(v), v, v_dot, use_op_pushforward=True).ndim == 0


@surprise("S9")
def undefined_grad_pushes_a_silent_zero():
    v, v_dot = pt.dvectors("v", "v_dot")
    push = pg.pushforward(
        pg.undefined_grad(v), v, v_dot, use_op_pushforward=True, disconnected_outputs="ignore"
    )
    return not value(push, {v: np.ones(2), v_dot: np.ones(2)}).any()


def three_steps(x, bound):
    clip = pytensor.scan(
        lambda h: 3 * pg.grad_clip(h, -bound, bound), outputs_info=[x], n_steps=3,
        return_updates=False,
    )  # fmt: skip
    return pg.grad(clip[-1], x)


@surprise("S10")
def the_first_clip_wins_in_a_scan():
    x = pt.dscalar("x")
    first, second = three_steps(x, 1.0), three_steps(x, 5.0)  # right: 1 and 5
    same = pg.GradClip(-1, 1) == pg.GradClip(-2, 2) and pg.GradScale(2.0) == pg.GradScale(-1.0)
    return same and [value(g, {x: 1.0}) for g in (first, second)] == [1, 1]


@surprise("S11")
def a_symbolic_scale_in_a_scan():
    x, s = pt.dscalars("x", "s")

    class Scale(pg.GradScale):  # the factor named, so that S10 does not put an older one here
        __props__ = ("multiplier",)

    steps = {"outputs_info": [x], "n_steps": 2, "return_updates": False}
    scaled = pytensor.scan(lambda h: 3 * Scale(s)(h), **steps)[-1]
    return raises(MissingInputError, lambda: value(pg.grad(scaled, x), {x: 1.0, s: 2.0}))


@surprise("S12")
def a_clip_passes_nan():
    x, y_bar = pt.dscalars("x", "y_bar")
    y = pg.grad_clip(x, -1, 1)
    return np.isnan(value(pg.grad(None, x, known_grads={y: y_bar}), {x: 0.0, y_bar: np.nan}))


@surprise("S13")
def a_switch_and_an_index():
    x, order = pt.dvector("x"), np.array([1, 0])
    cost = pt.switch(x[order] > 0, pt.sqrt(x)[order], 0.0).sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.isnan(value(pg.grad(cost, x), {x: np.array([0.0, 4.0])}, REWRITTEN)).any()


# --- errors, and errors that are missing ----------------------------------------------------------


@surprise("S14")
def the_gradient_of_qr():
    A = pt.dmatrix("A")
    known = pg.grad(pt.linalg.qr(pt.specify_shape(A, (2, 2)))[1].sum(), A)
    return known.ndim == 2 and raises(TypeError, lambda: pg.grad(pt.linalg.qr(A)[1].sum(), A))


@surprise("S15")
def consider_constant_of_an_equal_expression():
    x = pt.dscalar("x")
    held = pg.grad(x**2 + 3 * x, x, consider_constant=[x**2])
    return value(held, {x: 2.0}) == 7  # 3, if the equal square were held


@surprise("S16")
def subgraph_grad_of_a_stranger():
    a, stranger = pt.dscalars("a", "stranger")
    (zero,), _ = pg.subgraph_grad(wrt=[stranger], end=[], cost=a**2)
    return value(zero, {stranger: 1.0}) == 0


@surprise("S17")
def subgraph_grad_in_detail():
    a = pt.dscalar("a")
    b = a**2
    cost = b**2
    wrt, end, from_start, _ = pg.subgraph_grad(
        wrt=[a], end=[b], start={cost: pt.constant(1.0)}, cost=(a**2).sum(), details=True
    )
    return {id(v) for v in from_start} == {id(v) for v in wrt + end}


@surprise("S18")
def outputs_that_depend_on_nothing():
    x, v, other = pt.dvectors("x", "v", "other")
    push = pg.pushforward([x**2, other], x, v, disconnected_outputs="raise")[1]
    return not value(push, {x: np.ones(2), v: np.ones(2), other: np.ones(2)}).any()


@surprise("S19")
def a_misspelt_option():
    x = pt.dscalar("x")
    return value(pg.grad(x**2, x, disconnected_inputs="rais"), {x: 1.0}) == 2


@surprise("S20")
def two_warnings():
    x, stray = pt.dscalars("x", "stray")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pg.grad(x**2, stray, disconnected_inputs="warn")
    return len(caught) == 2


@surprise("S21")
def names_of_nothing():
    return hasattr(pg.DisconnectedType, "value_eq") and not hasattr(pg, "GradUndefinedError")
