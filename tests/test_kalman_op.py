"""The whole-series Ops: every mode, what is computed, batches, second derivatives, bad input."""

from importlib.util import find_spec

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from attack_cases import KALMAN
from kalman_models import make
from pytensor.gradient import NullType, pushforward
from pytensor.graph.basic import equal_computations
from pytensor.graph.replace import graph_replace, vectorize_graph
from tiers import thorough

from helpers.checks import relative_error
from helpers.kalman import kalman_loglike
from helpers.kalman.ops import likelihood
from helpers.kalman.ops.diffuse import kalman_diffuse_loglike
from helpers.kalman.ops.draws import kalman_draw, kalman_smooth
from helpers.kalman.ops.likelihood import KalmanLoglike, KalmanLoglikeGrad, kalman_filter_outputs
from helpers.kalman.ops.panel import kalman_loglike_panel
from helpers.kalman.reference import FilterOutputs, kalman_filter, reverse, smoother_form
from helpers.kalman.scan import kalman_step, symbolic_model

PLAIN = pytensor.compile.mode.Mode(linker="py", optimizer="fast_compile")
PYTHON = pytensor.compile.mode.Mode(linker="py", optimizer="fast_run")
MODES = [
    pytest.param("NUMBA", id="numba"),
    pytest.param(PYTHON, id="python"),
    pytest.param("JAX", id="jax", marks=pytest.mark.skipif(not find_spec("jax"), reason="no JAX")),
]


def values_of(y, model):
    return [y, *model.asdict().values()]


VARYING = "time-varying with gaps"


@pytest.mark.parametrize(
    ("mode", "name"),
    [pytest.param(*x.values, "gaps", marks=x.marks) for x in MODES]
    + [pytest.param(*x.values, VARYING, marks=x.marks) for x in MODES[1:]]
    + [thorough("NUMBA", VARYING)],  # compiles for a quarter of a minute
)
def test_value_and_gradient(mode, name):
    y, model = make(name)
    symbols = list(symbolic_model(model.time_varying).values())
    total = kalman_loglike(*symbols).sum()
    evaluate = pytensor.function(symbols, [total, *pt.grad(total, symbols)], mode=mode)
    value, *gradients = (np.asarray(x) for x in evaluate(*values_of(y, model)))
    filtered = kalman_filter(y, model)
    dy, expected = smoother_form(model, filtered)
    assert relative_error(value, filtered.out.l.sum()) < 1e-12
    for G, X in zip(gradients, [dy, *expected.asdict().values()], strict=True):
        assert relative_error(G, X) < 1e-11
    evaluate(*values_of(y, model))  # nothing was overwritten
    assert relative_error(np.asarray(evaluate(*values_of(y, model))[0]), value) == 0


@pytest.mark.parametrize("mode", MODES)
def test_cotangents_on_every_output(mode):
    y, model = make("gaps")
    filtered = kalman_filter(y, model)
    rng = np.random.default_rng(3)
    bar = FilterOutputs(*(rng.standard_normal(X.shape) for X in filtered.out))
    symbols = list(symbolic_model().values())
    out = kalman_filter_outputs(*symbols)
    loss = sum((w * X).sum() for w, X in zip(bar, out, strict=True))
    evaluate = pytensor.function(symbols, [*out, *pt.grad(loss, symbols)], mode=mode)
    values = [np.asarray(x) for x in evaluate(*values_of(y, model))]
    for name, X, expected in zip(FilterOutputs._fields, values, filtered.out, strict=False):
        assert relative_error(X, expected) < 1e-12, name
    dy, gradients = reverse(model, filtered, bar)
    for G, X in zip(values[7:], [dy, *gradients.asdict().values()], strict=True):
        assert relative_error(G, X) < 1e-10


def test_some_cotangents():
    y, model = make("two shocks")
    filtered = kalman_filter(y, model)
    symbols = list(symbolic_model().values())
    loss = (kalman_filter_outputs(*symbols).P_filt ** 2).sum()
    evaluate = pytensor.function(symbols, pt.grad(loss, symbols[1:]), mode=PYTHON)
    _, expected = reverse(model, filtered, FilterOutputs(P_filt=2 * filtered.out.P_filt))
    for name, G in zip(expected.asdict(), evaluate(*values_of(y, model)), strict=True):
        X = getattr(expected, name)
        assert np.abs(G - X).max() <= 1e-11 * max(np.abs(X).max(), 1), name


def kalman_nodes(function):
    ops = [getattr(node.op, "core_op", node.op) for node in function.maker.fgraph.toposort()]
    return [op for op in ops if isinstance(op, KalmanLoglike | KalmanLoglikeGrad)]


def test_one_op_gives_value_and_only_the_gradients_asked_for():
    symbols = symbolic_model()
    total = kalman_loglike(*symbols.values()).sum()
    wrt = [symbols["H"], symbols["Q"]]
    evaluate = pytensor.function(list(symbols.values()), [total, *pt.grad(total, wrt)], mode=PYTHON)
    (op,) = kalman_nodes(evaluate)
    assert op.requested == ("l", "H", "W")
    y, model = make("two shocks")
    value, H_bar, Q_bar = evaluate(*values_of(y, model))
    filtered = kalman_filter(y, model)
    expected = smoother_form(model, filtered)[1]
    assert relative_error(H_bar, expected.H) < 1e-12
    assert relative_error(Q_bar, expected.Q) < 1e-12
    assert relative_error(value, filtered.out.l.sum()) < 1e-13

    value_alone = pytensor.function(list(symbols.values()), total, mode=PYTHON)
    (op,) = kalman_nodes(value_alone)
    assert isinstance(op, KalmanLoglike)


def test_weights_that_depend_on_the_value():
    """A robust loss: the weight of a step depends on its own log-likelihood."""
    y, model = make("two shocks")
    symbols = symbolic_model()
    l = kalman_loglike(*symbols.values())
    loss = pt.log1p(pt.exp(-l)).sum()
    evaluate = pytensor.function(
        list(symbols.values()), [loss, pt.grad(loss, symbols["T"])], mode=PYTHON
    )
    value, T_bar = evaluate(*values_of(y, model))
    filtered = kalman_filter(y, model)
    weights = -1 / (1 + np.exp(filtered.out.l))
    expected = reverse(model, filtered, FilterOutputs(l=weights))[1]
    assert relative_error(T_bar, expected.T) < 1e-11
    assert relative_error(value, np.log1p(np.exp(-filtered.out.l)).sum()) < 1e-13


@pytest.mark.parametrize("mode", [thorough("NUMBA", id="numba"), MODES[1]])
def test_many_series_at_once(mode):
    y, model = make("gaps")
    many = np.stack([y, y + 1, 2 * y])
    symbols = symbolic_model()
    total = kalman_loglike(*symbols.values()).sum()
    batch = pt.tensor("batch", shape=(None, None, None))
    Q_many = pt.tensor("Q_many", shape=(None, None, None))
    totals = vectorize_graph(total, replace={symbols["y"]: batch, symbols["Q"]: Q_many})
    others = [x for name, x in symbols.items() if name not in ("y", "Q")]
    gradients = pt.grad(totals.sum(), [batch, Q_many, symbols["T"]])
    evaluate = pytensor.function([batch, Q_many, *others], [totals, *gradients], mode=mode)
    if mode != "NUMBA":  # there Blockwise has its core inside another Op
        assert [op.requested for op in kalman_nodes(evaluate)] == [("l", "y", "T", "W")]
    arrays = model.asdict()
    Qs = np.stack([model.Q, 2 * model.Q, 3 * model.Q])
    l, dy, dQ, dT = evaluate(many, Qs, *(X for x, X in arrays.items() if x != "Q"))
    T_sum = 0
    for k in range(3):
        one = type(model)(**(arrays | {"Q": Qs[k]}))
        filtered = kalman_filter(many[k], one)
        dy_k, expected = smoother_form(one, filtered)
        assert relative_error(l[k], filtered.out.l.sum()) < 1e-12
        assert relative_error(dy[k], dy_k) < 1e-12
        assert relative_error(dQ[k], expected.Q) < 1e-12
        T_sum = T_sum + expected.T
    assert relative_error(dT, T_sum) < 1e-12


@pytest.mark.parametrize("mode", [PYTHON, thorough("NUMBA")])
def test_float32_in_float32_out(mode):
    y, model = make("two shocks")
    symbols = symbolic_model(dtype="float32")
    total = kalman_loglike(*symbols.values()).sum()
    T_bar = pt.grad(total, symbols["T"])
    assert total.dtype == T_bar.dtype == "float32"
    evaluate = pytensor.function(list(symbols.values()), [total, T_bar], mode=mode)
    value, G = evaluate(*(np.float32(X) for X in values_of(y, model)))
    filtered = kalman_filter(y, model)
    assert G.dtype == np.float32
    assert relative_error(value, filtered.out.l.sum()) < 1e-5
    assert relative_error(G, smoother_form(model, filtered)[1].T) < 1e-4


def test_static_shapes():
    y, model = make("two shocks")
    l = kalman_loglike(*values_of(y, model))
    assert l.type.shape == (15,)
    symbols = list(symbolic_model().values())
    total = kalman_loglike(*symbols)
    length = pytensor.function(symbols, total.shape, mode=PYTHON)
    assert length(*values_of(y, model)) == (15,)
    assert not kalman_nodes(length)  # the shape does not need the filter


def test_agrees_with_the_scan_away_from_symmetry():
    """P0, H and Q count by their symmetric part, and their gradients are symmetric."""
    y, model = make("two shocks")
    symbols = symbolic_model()
    total = kalman_loglike(*symbols.values()).sum()
    wrt = [symbols["P0"], symbols["H"], symbols["Q"]]
    evaluate = pytensor.function(list(symbols.values()), [total, *pt.grad(total, wrt)], mode=PYTHON)
    arrays = values_of(y, model)
    skew = np.triu(np.ones(model.P0.shape), 1) * 1e-3
    bent = [X + (skew - skew.T if k == 2 else 0) for k, X in enumerate(arrays)]
    for straight, crooked in zip(evaluate(*arrays), evaluate(*bent), strict=True):
        assert relative_error(crooked, straight) < 1e-13
        if np.ndim(straight):
            assert (straight == straight.T).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Z": np.zeros((2, 3))}, r"Z has shape \(2, 3\), expected \(p, m\) = \(2, 4\)"),
        ({"T": np.zeros(4)}, r"T has 1 dimensions, expected 2: \(m, m\) or with a leading time"),
        ({"c": np.zeros((7, 4))}, r"c has shape \(7, 4\), expected \(n, m\) = \(15, 4\)"),
        ({"P0": np.zeros((4, 4, 4))}, r"P0 has 3 dimensions, expected 2: \(m, m\)"),
        ({"y": np.zeros((0, 2))}, "n = 0: there is no step"),
    ],
)
def test_bad_input_when_the_graph_is_built(change, message):
    y, model = make("two shocks")
    arrays = {"y": y} | model.asdict() | change
    with pytest.raises(ValueError, match=message):
        kalman_loglike(**arrays)


def test_complex_input():
    y, model = make("two shocks")
    with pytest.raises(TypeError, match="Q complex, expected real"):
        kalman_loglike(**({"y": y} | model.asdict() | {"Q": model.Q + 1j}))


DOORS = {
    "loglike": kalman_loglike,
    "panel": lambda y, *model, tol: kalman_loglike_panel(y[None], *model, tol=tol),
    "diffuse": lambda *arrays, tol: kalman_diffuse_loglike(*arrays, A=np.eye(4), tol=tol),
    "smooth": kalman_smooth,
    "draw": lambda *arrays, tol: kalman_draw(*arrays, pt.matrix(), tol=tol),
}


@pytest.mark.parametrize("door", DOORS)
def test_no_such_tolerance(door):
    given = values_of(*make("two shocks"))
    assert DOORS[door](*given, tol=0).ndim < 4
    for tol in (-1, np.nan, np.inf):
        with pytest.raises(ValueError, match=f"tol is {tol}, expected a finite number that is"):
            DOORS[door](*given, tol=tol)
    with pytest.raises(TypeError, match=r"tol is symbolic \(tol\), expected a number"):
        DOORS[door](*given, tol=pt.scalar("tol"))


@pytest.mark.parametrize("mode", MODES[:2])
def test_bad_input_when_the_function_is_called(mode):
    y, model = make("two shocks")
    symbols = list(symbolic_model().values())
    total = kalman_loglike(*symbols).sum()
    evaluate = pytensor.function(symbols, [total, pt.grad(total, symbols[5])], mode=mode)
    arrays = {"y": y} | model.asdict()
    for name, X in {
        "Z": np.zeros((2, 5)), "T": np.zeros((3, 3)), "d": np.zeros(3), "Q": np.zeros((1, 1)),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            evaluate(*(arrays | {name: X}).values())


@pytest.mark.parametrize("mode", [thorough("NUMBA", id="numba"), MODES[1]])
def test_one_step_is_not_all_steps(mode):
    """An axis for time has n entries, if it is there: one is not taken for all of them."""
    y, model = make("two shocks")
    symbols = list(symbolic_model(("Z", "d")).values())
    evaluate = pytensor.function(symbols, kalman_loglike(*symbols), mode=mode)
    arrays = {"y": y} | model.asdict()
    full = {x: np.repeat(arrays[x][None], len(y), axis=0) for x in "Zd"}
    assert np.isfinite(evaluate(*(arrays | full).values())).all()
    for name in "Zd":
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            evaluate(*(arrays | full | {name: arrays[name][None]}).values())


def test_forward_mode_of_the_gradient():
    """PyTensor pulls back twice for it, the second time in what the product is linear in."""
    y, model = make("two shocks")
    symbols = symbolic_model()
    T, V = symbols["T"], pt.matrix("V")
    gradient = pt.grad(kalman_loglike(*symbols.values()).sum(), T)
    pushed = pushforward(gradient, T, V)
    pulled = pt.grad((gradient * V).sum(), T)
    evaluate = pytensor.function([*symbols.values(), V], [pushed, pulled], mode=PLAIN)
    direction = np.random.default_rng(0).standard_normal(model.T.shape)
    found, expected = evaluate(*values_of(y, model), direction)
    assert relative_error(found, expected) < 1e-12


def step_by_step(y, a0, P0, c, d, T, Z, H, W):
    """What the scan gives, of two steps, without its loop, which takes minutes to compile."""
    a, P, found = a0, P0, []
    for t in range(2):
        a_filt, a_next, y_hat, P_filt, P_next, F, l = kalman_step(y[t], a, P, c, d, T, Z, H, W)
        found.append((a_filt, a, y_hat, P_filt, P, F, l))
        a, P = a_next, P_next
    return FilterOutputs(*map(pt.stack, zip(*found, strict=True)))


LOSSES = {
    "linear": lambda out: out.a_filt.sum() + out.P_pred[:, 0].sum(),
    "curved": lambda out: (out.a_filt**2).sum() + (pt.tanh(out.l) * out.P_pred[:, 0, 0]).sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_second_derivatives_where_inputs_depend_on_each_other(loss, monkeypatch):
    """The gradient moves with each input alone: a0 and P0 come from T, cotangents from all."""
    monkeypatch.setattr(likelihood, "filter_graph_W", step_by_step)
    theta, I = pt.scalar("theta"), np.eye(2)
    T = pt.stack([pt.stack([theta, 0.3]), pt.stack([-0.2, theta**2])])
    model = (T[0], T @ T.T + I, 0 * T[0], np.zeros(1), T, I[:1], I, pt.exp(theta) * I[:1, :1], I)
    out = kalman_filter_outputs(np.array([[1.0], [-0.5]]), *model)
    slope = pt.grad(LOSSES[loss](out), theta)
    evaluate = pytensor.function([theta], [slope, pt.grad(slope, theta)], mode=PLAIN)
    above, below, at = (np.array(evaluate(x)) for x in (0.6 + 1e-5, 0.6 - 1e-5, 0.6))
    assert relative_error(at[1], (above[0] - below[0]) / 2e-5) < 1e-8


@pytest.mark.parametrize("name", [x for x, (op, _) in KALMAN.items() if op.pull is not None])
def test_a_pullback_is_the_same_graph_where_inputs_depend_on_each_other(name):
    """Of no Op it goes through what inputs and cotangents are made of: nothing is compiled here."""
    op, inputs = KALMAN[name]
    symbols = {x: pt.as_tensor(X).type() for x, X in zip(op.inputs, inputs, strict=True)}
    outputs = list(op.named(*symbols.values()).items())[: 1 if name == "KalmanIntegrated" else None]
    bars = {x: out.type() for x, out in outputs}
    mixed, before = ({}, {}), 0
    for given, chain in zip((symbols, bars), mixed, strict=True):
        for x, X in given.items():  # each of all that come before it
            chain[x] = X + before
            before = before + chain[x].sum()
    found, alone = op.pull(*mixed), op.pull(symbols, bars)
    names = [x for x, G in alone.items() if not isinstance(G.type, NullType)]
    new = dict(zip(symbols.values(), mixed[0].values(), strict=True))
    new |= zip(bars.values(), mixed[1].values(), strict=True)
    expected = graph_replace([alone[x] for x in names], new, strict=False)
    assert names and equal_computations([found[x] for x in names], expected)
