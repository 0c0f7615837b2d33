"""Each row of book/pytensor-surprises.md is still true of the PyTensor that is installed.

A test fails when PyTensor has mended what its row describes: then the row leaves the page, and the
chapter that the row names has a paragraph to change. The remedy of each row is run as well, and
must give the right value.
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
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.mode import Mode
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors
from pytensor.graph.utils import MissingInputError

PAGE = Path(__file__).parents[1] / "book" / "pytensor-surprises.md"
ROWS = [f"S{k}" for k in range(1, 27)]
SURPRISES, REMEDIES = {}, {}
AS_WRITTEN, REWRITTEN = Mode("py", None), Mode("py", "fast_run")


def surprise(row):
    """Register a function that returns whether the surprise of this row is still there."""

    def register(is_there):
        SURPRISES[row] = is_there
        return is_there

    return register


def remedy(row):
    """Register a function that returns whether what the row advises gives the right value."""

    def register(helps):
        REMEDIES[row] = helps
        return helps

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


@pytest.mark.parametrize("row", [row for row in ROWS if row not in ("S19", "S21")])
def test_the_remedy_of_a_surprise_gives_the_right_value(row):
    with pytensor.config.change_flags(mode="FAST_COMPILE", cxx=""):
        assert REMEDIES[row](), f"the remedy of row {row} of book/{PAGE.name} does not help"


def test_the_page_has_a_row_for_every_test():
    rows = re.findall(r"^\* - \*\*(S\d+)\*\* ", PAGE.read_text(encoding="utf-8"), re.M)
    assert sorted(rows, key=lambda row: int(row[1:])) == list(SURPRISES) == ROWS


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
    return value(held, at).tolist() == [3, 2]


@remedy("S1")
def a_disconnected_first_part_or_a_copy():
    x, cost, _, at = split_product(pg.disconnected_grad)
    cut = pg.grad(cost, x)
    y = pt.dvector("y")
    first, second = pt.split(y, [1, 1], n_splits=2)
    copy = first.copy()
    held = pg.grad((copy * second).sum(), y, consider_constant=[copy])
    return all(value(slope, {v: at[x]}).tolist() == [0, 2] for slope, v in ((cut, x), (held, y)))


@surprise("S2")
def subgraph_grad_passes_its_end():
    x, cost, first, at = split_product()
    (x_bar,), _ = pg.subgraph_grad(wrt=[x], end=[first], cost=cost)
    return value(x_bar, at).tolist() == [3, 2]


@remedy("S2")
def an_end_at_all_outputs_or_at_a_copy():
    x = pt.dvector("x")
    first, second = pt.split(x, [1, 1], n_splits=2)
    copy, at = first.copy(), {x: np.array([2.0, 3.0])}
    _, every = pg.subgraph_grad(wrt=[], end=[first, second], cost=(first * second).sum())
    _, ends = pg.subgraph_grad(wrt=[x], end=[copy], cost=(copy * second).sum())
    return [float(value(e, at)[0]) for e in (*every, *ends)] == [3, 2, 3]


@surprise("S3")
def set_with_a_repeated_index():
    s, weight = pt.dvector("s"), np.array([1.0, 2.0, 3.0, 4.0])
    cost = (weight * pt.zeros(4)[np.array([2, 0, 2])].set(s)).sum()
    return np.array_equal(value(pg.grad(cost, s), {s: np.ones(3)}), [3, 1, 3])  # right: [0, 1, 3]


@remedy("S3")
def index_what_is_written_last():
    s, weight = pt.dvector("s"), np.array([1.0, 2.0, 3.0, 4.0])
    cost = (weight * pt.zeros(4)[np.array([0, 2])].set(s[np.array([1, 2])])).sum()
    return np.array_equal(value(pg.grad(cost, s), {s: np.ones(3)}), [0, 1, 3])


@surprise("S4")
def reading_what_was_set_at_a_repeated_index():
    s, place = pt.dvector("s"), np.array([2, 0, 2])
    read, at = pt.zeros(4)[place].set(s)[place], {s: np.array([1.0, 2.0, 3.0])}
    as_written, rewritten = value(read, at), value(read, at, REWRITTEN)
    return as_written.tolist() == [3, 2, 3] and rewritten.tolist() == [1, 2, 3]


@remedy("S4")
def write_each_place_once():
    s = pt.dvector("s")
    written = pt.zeros(4)[np.array([0, 2])].set(s[np.array([1, 2])])
    read, at = written[np.array([2, 0, 2])], {s: np.array([1.0, 2.0, 3.0])}
    return all(value(read, at, mode).tolist() == [3, 2, 3] for mode in (AS_WRITTEN, REWRITTEN))


@surprise("S5")
def outputs_that_use_each_other():
    q, u1, u2 = pt.dscalars("q", "u1", "u2")
    at = {q: 3.0, u1: 1.0, u2: 10.0}
    y = q**2
    pulls = [value(pg.pullback(pair, q, [u1, u2]), at) for pair in ([y, y], [q, y], [y, y * 1])]
    return pulls == [60, 1, 6]  # right: 66, 61, 66


@remedy("S5")
def copies_of_the_outputs():
    q, u1, u2 = pt.dscalars("q", "u1", "u2")
    at, y = {q: 3.0, u1: 1.0, u2: 10.0}, q**2
    pairs = [[a.copy(), b.copy()] for a, b in ([y, y], [q, y], [y, y * 1])]
    return [value(pg.pullback(pair, q, [u1, u2]), at) for pair in pairs] == [66, 61, 66]


def pushes(**options):
    """Of (q, q^2) at 3 along 1: 1 and 6. Of a + b along (10, 1): 11. Of x - m along ones: 0."""
    q, a, b, one = *pt.dscalars("q", "a", "b"), pt.constant(1.0)
    x, m, ones = *pt.dvectors("x", "m"), pt.constant([1.0, 1.0])
    of_list = pg.pushforward([q, q**2], q, one, **options)
    tangents, copies = [pt.constant(10.0), one], (a.copy() + b.copy()).copy()
    total = pg.pushforward(a + b, [a, b], tangents, **options)
    copied = pg.pushforward(copies, [a, b], tangents, **options)
    gap = pg.pushforward(x - m, [x, m], [ones, ones], **options)
    at = {q: 3.0, a: 2.0, b: 3.0, x: np.ones(2), m: np.ones(2)}
    return [value(push, at).tolist() for push in (*of_list, total, copied, gap)]


@surprise("S6")
def a_push_of_lists_that_use_each_other():
    return pushes() == [1, 0, 1, 1, [1, 1]]


@remedy("S6")
def the_ops_own_push():
    """Or one input at a time, and copies of the outputs where it is the outputs that share."""
    q, a, b = pt.dscalars("q", "a", "b")
    y, one = q**2, pt.constant(1.0)
    copies = pg.pushforward([q.copy(), y.copy()], q, one)
    parts = [pg.pushforward(a + b, v, v_dot) for v, v_dot in ((a, pt.constant(10.0)), (b, one))]
    at = {q: 3.0, a: 2.0, b: 3.0}
    return (
        pushes(use_op_pushforward=True) == [1, 6, 11, 11, [0, 0]]
        and [value(push, at) for push in copies] == [1, 6]
        and value(sum(parts), at) == 11
    )


@surprise("S7")
def a_sparse_push():
    S, T = pt.dmatrices("S", "T")
    diagonal = ps.csr_from_dense(pt.as_tensor(np.diag([1.0, 2.0])))
    product = ps.dense_from_sparse(ps.multiply(diagonal, S))
    at = {S: np.ones((2, 2)), T: np.ones((2, 2))}
    pushes = [pg.pushforward(y, S, T) for y in (product, ps.sp_sum(ps.csr_from_dense(S), axis=1))]
    return not any(value(push, at).any() for push in pushes)  # right: the diagonal, and (2, 2)


@remedy("S7")
def a_pull_of_a_pull_at_ones():
    S, T, U = pt.dmatrices("S", "T", "U")
    u, ones = pt.dvector("u"), np.ones((2, 2))
    product = ps.dense_from_sparse(
        ps.multiply(ps.csr_from_dense(pt.as_tensor(np.diag([1.0, 2.0]))), S)
    )
    total = ps.sp_sum(ps.csr_from_dense(S), axis=1)
    first = pg.grad((pg.pullback(product, S, U) * T).sum(), U)
    second = pg.grad((pg.pullback(total, S, u) * T).sum(), u)
    first = value(first, {S: ones, T: ones, U: ones})
    second = value(second, {S: ones, T: ones, u: np.ones(2)})
    return first.tolist() == [[1, 0], [0, 2]] and second.tolist() == [2, 2]


@surprise("S8")
def zero_grad_pushes_a_scalar():
    v, v_dot = pt.dvectors("v", "v_dot")
    return pg.pushforward(pg.zero_grad(v), v, v_dot, use_op_pushforward=True).ndim == 0


@remedy("S8")
def the_default_push_of_zero_grad():
    v, v_dot = pt.dvectors("v", "v_dot")
    push = pg.pushforward(pg.zero_grad(v), v, v_dot)
    return value(push, {v: np.ones(2), v_dot: np.ones(2)}).tolist() == [0, 0]


@surprise("S9")
def undefined_grad_pushes_a_silent_zero():
    v, v_dot = pt.dvectors("v", "v_dot")
    push = pg.pushforward(
        pg.undefined_grad(v), v, v_dot, use_op_pushforward=True, disconnected_outputs="ignore"
    )
    return not value(push, {v: np.ones(2), v_dot: np.ones(2)}).any()


@remedy("S9")
def the_default_push_of_undefined_grad():
    v, v_dot = pt.dvectors("v", "v_dot")
    return raises(pg.NullTypeGradError, lambda: pg.pushforward(pg.undefined_grad(v), v, v_dot))


def three_steps(x, bound, clip=lambda h, bound: pg.grad_clip(h, -bound, bound)):
    clip = pytensor.scan(
        lambda h: 3 * clip(h, bound), outputs_info=[x], n_steps=3, return_updates=False
    )
    return pg.grad(clip[-1], x)


@surprise("S10")
def the_first_clip_wins_in_a_scan():
    x = pt.dscalar("x")
    first, second = three_steps(x, 1.0), three_steps(x, 5.0)  # right: 1 and 5
    same = pg.GradClip(-1, 1) == pg.GradClip(-2, 2) and pg.GradScale(2.0) == pg.GradScale(-1.0)
    return same and [value(g, {x: 1.0}) for g in (first, second)] == [1, 1]


@remedy("S10")
def a_clip_with_props():
    class Clip(pg.GradClip):
        __props__ = ("clip_lower_bound", "clip_upper_bound")

    x = pt.dscalar("x")
    slopes = [three_steps(x, bound, lambda h, b: Clip(-b, b)(h)) for bound in (1.0, 5.0)]
    return [value(g, {x: 1.0}) for g in slopes] == [1, 5]


@surprise("S11")
def a_symbolic_scale_in_a_scan():
    x, s = pt.dscalars("x", "s")

    class Scale(pg.GradScale):  # the factor named, so that S10 does not put an older one here
        __props__ = ("multiplier",)

    steps = {"outputs_info": [x], "n_steps": 2, "return_updates": False}
    scaled = pytensor.scan(lambda h: 3 * Scale(s)(h), **steps)[-1]
    return raises(MissingInputError, lambda: value(pg.grad(scaled, x), {x: 1.0, s: 2.0}))


@remedy("S11")
def a_scale_outside_the_scan():
    x, s = pt.dscalars("x", "s")
    plain = pytensor.scan(lambda h: 3 * h, outputs_info=[x], n_steps=2, return_updates=False)[-1]
    scaled = pg.grad_scale(plain, s)
    return value(pg.grad(scaled, x), {x: 1.0, s: 2.0}) == 18


@surprise("S12")
def a_clip_passes_nan():
    x, y_bar = pt.dscalars("x", "y_bar")
    y = pg.grad_clip(x, -1, 1)
    return np.isnan(value(pg.grad(None, x, known_grads={y: y_bar}), {x: 0.0, y_bar: np.nan}))


@remedy("S12")
def mend_the_nan_where_it_begins():
    """Chapter 8 finds the place. Here it is a root, and two switches take the NaN away."""
    x = pt.dscalar("x")
    y = pg.grad_clip(x, -1, 1)
    root = pt.switch(y > 0, pt.sqrt(pt.switch(y > 0, y, 1.0)), 0.0)
    return value(pg.grad(3 * root, x), {x: 0.0}) == 0 and value(pg.grad(3 * root, x), {x: 1.0}) == 1


@surprise("S13")
def a_switch_and_an_index():
    x, order = pt.dvector("x"), np.array([1, 0])
    cost = pt.switch(x[order] > 0, pt.sqrt(x)[order], 0.0).sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.isnan(value(pg.grad(cost, x), {x: np.array([0.0, 4.0])}, REWRITTEN)).any()


@remedy("S13")
def two_switches():
    x, order = pt.dvector("x"), np.array([1, 0])
    root = pt.sqrt(pt.switch(x > 0, x, 1.0))[order]
    slope = pg.grad(pt.switch(x[order] > 0, root, 0.0).sum(), x)
    at = {x: np.array([0.0, 4.0])}
    return all(value(slope, at, mode).tolist() == [0, 0.25] for mode in (AS_WRITTEN, REWRITTEN))


# --- errors, and errors that are missing ----------------------------------------------------------


@surprise("S14")
def the_gradient_of_qr():
    A = pt.dmatrix("A")
    known = pg.grad(pt.linalg.qr(pt.specify_shape(A, (2, 2)))[1].sum(), A)
    return known.ndim == 2 and raises(TypeError, lambda: pg.grad(pt.linalg.qr(A)[1].sum(), A))


@remedy("S14")
def a_shape_that_is_known():
    """The diagonal of R is that of the Cholesky factor of A'A, but for signs."""
    A, at = pt.dmatrix("A"), np.array([[2.0, 1.0], [1.0, 3.0]])
    R = pt.linalg.qr(pt.specify_shape(A, (2, 2)))[1]
    slope = value(pg.grad(pt.log(abs(pt.diagonal(R))).sum(), A), {A: at})
    return np.allclose(slope, np.linalg.inv(at).T)  # the sum is log |det A|


@surprise("S15")
def consider_constant_of_an_equal_expression():
    x = pt.dscalar("x")
    held = pg.grad(x**2 + 3 * x, x, consider_constant=[x**2])
    return value(held, {x: 2.0}) == 7  # 3, if the equal square were held


@remedy("S15")
def the_variable_itself():
    x = pt.dscalar("x")
    square = x**2
    return value(pg.grad(square + 3 * x, x, consider_constant=[square]), {x: 2.0}) == 3


@surprise("S16")
def subgraph_grad_of_a_stranger():
    a, stranger = pt.dscalars("a", "stranger")
    (zero,), _ = pg.subgraph_grad(wrt=[stranger], end=[], cost=a**2)
    return value(zero, {stranger: 1.0}) == 0


@remedy("S16")
def a_list_that_is_checked():
    a, stranger = pt.dscalars("a", "stranger")
    there = list(ancestors([a**2]))
    return a in there and stranger not in there


@surprise("S17")
def subgraph_grad_in_detail():
    a = pt.dscalar("a")
    b = a**2
    cost = b**2
    wrt, end, from_start, _ = pg.subgraph_grad(
        wrt=[a], end=[b], start={cost: pt.constant(1.0)}, cost=(a**2).sum(), details=True
    )
    return {id(v) for v in from_start} == {id(v) for v in wrt + end}


@remedy("S17")
def two_calls():
    a = pt.dscalar("a")
    b = a**2
    cost, at = b**2, {a: 3.0}
    _, (from_start,) = pg.subgraph_grad(wrt=[], end=[b], start={cost: pt.constant(1.0)})
    (from_cost,), _ = pg.subgraph_grad(wrt=[a], end=[], cost=a**2)
    return [value(v, at) for v in (from_start, from_cost)] == [18, 6]


@surprise("S18")
def outputs_that_depend_on_nothing():
    x, v, other = pt.dvectors("x", "v", "other")
    push = pg.pushforward([x**2, other], x, v, disconnected_outputs="raise")[1]
    return not value(push, {x: np.ones(2), v: np.ones(2), other: np.ones(2)}).any()


@remedy("S18")
def the_ops_own_push_of_another_input():
    x, v, other = pt.dvectors("x", "v", "other")
    options = {"disconnected_outputs": "raise", "use_op_pushforward": True}
    return raises(pg.DisconnectedInputError, lambda: pg.pushforward([x**2, other], x, v, **options))


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


@remedy("S20")
def the_second_is_about_a_placeholder():
    x, stray = pt.dscalars("x", "stray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return value(pg.grad(x**2, stray, disconnected_inputs="warn"), {stray: 1.0}) == 0


@surprise("S21")
def names_of_nothing():
    return hasattr(pg.DisconnectedType, "value_eq") and not hasattr(pg, "GradUndefinedError")


# --- products, repeats and ties -------------------------------------------------------------------


@surprise("S22")
def cumprod_at_a_zero():
    x = pt.dvector("x")
    with np.errstate(invalid="ignore", divide="ignore"):
        slope = value(pg.grad(pt.cumprod(x)[-1], x), {x: np.array([2.0, 0.0, 3.0])})
    return np.isnan(slope[1]) and slope[[0, 2]].tolist() == [0, 0]  # right: [0, 6, 0]


@remedy("S22")
def prod_of_each_beginning():
    x, weight = pt.dvector("x"), np.array([1.0, 10.0, 100.0])
    lower = np.tri(3, dtype=bool)
    products = pt.prod(pt.switch(lower, x[None, :], 1.0), axis=1)
    at = {x: np.array([2.0, 0.0, 3.0])}
    found = value(products, at), value(pg.grad((weight * products).sum(), x), at)
    return found[0].tolist() == [2, 0, 0] and found[1].tolist() == [1, 620, 0]


@surprise("S23")
def the_own_push_of_repeat():
    x, v = pt.dvectors("x", "v")
    return raises(
        TypeError, lambda: pg.pushforward(pt.repeat(x, 2), x, v, use_op_pushforward=True)
    ) and raises(
        NotImplementedError,
        lambda: pg.pushforward(pt.repeat(x, [1, 2]), x, v, use_op_pushforward=True),
    )


@remedy("S23")
def the_default_push_of_repeat():
    x, v = pt.dvectors("x", "v")
    at = {x: np.ones(2), v: np.array([1.0, 10.0])}
    pushes = [value(pg.pushforward(pt.repeat(x, k), x, v), at).tolist() for k in (2, [1, 2])]
    return pushes == [[1, 1, 10, 10], [1, 10, 10]]


@surprise("S24")
def the_second_derivative_of_a_product():
    A = pt.dmatrix("A")
    slope = pg.grad(pt.prod(A, axis=1).sum(), A)
    return raises(pg.NullTypeGradError, lambda: pg.grad((slope**2).sum(), A))


@remedy("S24")
def a_product_without_zeros_or_term_by_term():
    """Of x y the slope is (y, x), half its squared length has the gradient (x, y)."""
    A, at = pt.dmatrix("A"), np.array([[2.0, 3.0], [0.0, 5.0]])
    told = pt.prod(A, axis=1, no_zeros_in_input=True)
    terms = A[:, 0] * A[:, 1]
    bends = [pg.grad((pg.grad(y.sum(), A) ** 2).sum() / 2, A) for y in (told, terms)]
    return np.allclose(value(bends[0], {A: at[:1]}), at[:1]) and np.allclose(
        value(bends[1], {A: at}), at
    )


@surprise("S25")
def max_at_a_tie():
    x = pt.dvector("x")
    return value(pg.grad(pt.max(x), x), {x: np.array([2.0, 2.0, 1.0])}).tolist() == [1, 1, 0]


@remedy("S25")
def the_entry_of_argmax_or_a_mean_of_ties():
    x, at = pt.dvector("x"), np.array([2.0, 2.0, 1.0])
    ties = pt.eq(x, pg.disconnected_grad(pt.max(x)))
    shared = (x * ties).sum() / ties.sum()
    slopes = [pg.grad(y, x) for y in (x[pt.argmax(x)], shared)]
    return [value(g, {x: at}).tolist() for g in slopes] == [[1, 0, 0], [0.5, 0.5, 0]]


def largest_and_where(x):
    """The largest entry of a vector and its index, as two outputs of one node."""
    return OpFromGraph([x], [pt.max(x), pt.argmax(x)])(x)


@surprise("S26")
def a_batch_of_an_index_among_several_outputs():
    x, rows = pt.dvector("x"), pt.dmatrix("rows")
    _, k = largest_and_where(x)
    return raises(ValueError, lambda: vectorize_graph(x[k], {x: rows}))


@remedy("S26")
def an_index_that_is_a_copy():
    x, rows = pt.dvector("x"), pt.dmatrix("rows")
    _, k = largest_and_where(x)
    many = vectorize_graph(x[k.copy()], {x: rows})
    return value(many, {rows: np.array([[1.0, 3.0], [5.0, 2.0]])}).tolist() == [3, 5]
