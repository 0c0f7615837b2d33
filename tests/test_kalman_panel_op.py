"""Many series as one Op: against a loop over the series, in every mode, and its rewrites."""

from importlib.util import find_spec

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from kalman_models import make
from pytensor.gradient import pushforward
from pytensor.graph.replace import vectorize_graph
from test_kalman_panel import loop, series
from tiers import thorough

from helpers.checks import relative_error
from helpers.datasets import random_model, simulate
from helpers.kalman import StateSpace, kalman_loglike
from helpers.kalman.ops.diffuse import kalman_diffuse_loglike
from helpers.kalman.ops.panel import KalmanPanel, KalmanPanelGrad, kalman_loglike_panel
from helpers.kalman.scan import symbolic_model

PYTHON = pytensor.compile.mode.Mode(linker="py", optimizer="fast_run")
MODES = [
    pytest.param("NUMBA", id="numba"),
    pytest.param(PYTHON, id="python"),
    pytest.param("JAX", id="jax", marks=pytest.mark.skipif(not find_spec("jax"), reason="no JAX")),
]


def symbolic(model):
    """Y and the nine arrays."""
    symbols = symbolic_model(model.time_varying)
    return [pt.tensor3("Y"), *list(symbols.values())[1:]]


def every_mode(names, values, compiled, slowly=()):
    """``values`` in Python and JAX, and ``compiled``, some of them, in Numba, which takes long.

    ``slowly``, some others, are compiled in a thorough run.
    """
    return pytest.mark.parametrize(
        ("mode", names),
        [
            pytest.param(*mode.values, value, id=f"{mode.id}-{value}", marks=mode.marks)
            for mode in MODES
            for value in (compiled if mode.id == "numba" else values)
        ]
        + [thorough("NUMBA", value, id=f"numba-{value}") for value in slowly],
    )


@every_mode(
    "name", ["gaps", "time-varying with gaps", "one of each"], ["gaps"], ["time-varying with gaps"]
)
def test_value_and_gradient(mode, name):
    y, model = make(name)
    Y = series(y, 5)
    symbols = symbolic(model)
    l = kalman_loglike_panel(*symbols)
    evaluate = pytensor.function(symbols, [l, *pt.grad(l.sum(), symbols)], mode=mode)
    l, dY, *bars = (np.asarray(x) for x in evaluate(Y, *model.asdict().values()))
    values, expected, each = loop(Y, model)
    assert relative_error(l.sum(axis=1), values) < 1e-12
    assert relative_error(dY, np.array(expected)) < 1e-11
    for x, G in zip(model.asdict(), bars, strict=True):
        X = sum(getattr(G, x) for G in each)
        assert G.shape == X.shape and relative_error(G, X) < 1e-11, x


@every_mode("steps", [False, True], [])
def test_weights(mode, steps):
    """Of series: one pass for all. Of steps: each takes its own."""
    y, model = make("two shocks")
    Y = series(y, 4)
    symbols = symbolic(model)
    weights = np.random.default_rng(0).normal(size=Y.shape[:2] if steps else (4, 1))
    l = (kalman_loglike_panel(*symbols) * weights).sum()
    of_one = [
        (kalman_loglike(symbols[0][j], *symbols[1:]) * weights[j]).sum() for j in range(len(Y))
    ]
    values = Y, *model.asdict().values()
    found = pytensor.function(symbols, [l, *pt.grad(l, symbols)], mode=mode)(*values)
    outputs = [sum(of_one), *pt.grad(sum(of_one), symbols)]
    expected = pytensor.function(symbols, outputs, mode=PYTHON)(*values)
    for X, G in zip(expected, found, strict=True):
        assert relative_error(np.asarray(G), X) < 1e-10


# In Numba test_a_batch_of_series_is_a_panel takes own means, too.
@pytest.mark.parametrize("mode", [thorough("NUMBA", id="numba"), *MODES[1:]])
def test_own_means(mode):
    y, model = make("gaps")
    Y, rng = series(y, 4), np.random.default_rng(3)
    own = {x: rng.normal(size=(4, k)) for x, k in (("a0", 3), ("c", 3), ("d", 2))}
    symbols = dict(zip(["y", *model.asdict()], symbolic(model), strict=True))
    symbols |= {x: pt.matrix(x) for x in own}
    arguments = symbols | {x: symbols[x][:, None] for x in "cd"}
    total = kalman_loglike_panel(*arguments.values()).sum()
    evaluate = pytensor.function(
        [*symbols.values()], [total, *pt.grad(total, [*symbols.values()])], mode=mode
    )
    found = evaluate(Y, *(model.asdict() | own).values())
    models = [StateSpace(**(model.asdict() | {x: X[j] for x, X in own.items()})) for j in range(4)]
    values, dY, each = loop(Y, models)
    assert relative_error(np.asarray(found[0]), values.sum()) < 1e-12
    assert relative_error(np.asarray(found[1]), np.array(dY)) < 1e-11
    for x, G in zip(model.asdict(), found[2:], strict=True):
        X = np.array([getattr(gradients, x) for gradients in each])
        assert relative_error(np.asarray(G), X if x in own else X.sum(axis=0)) < 1e-11, x


def panel_nodes(function):
    ops = [node.op for node in function.maker.fgraph.toposort()]
    return [op for op in ops if isinstance(op, KalmanPanel | KalmanPanelGrad)], ops


@every_mode("batched", [("y",), ("y", "d"), ("y", "a0", "c")], [("y", "a0", "c")])
def test_a_batch_of_series_is_a_panel(mode, batched):
    """vectorize_graph: one Op, value and gradient at once, and what is summed comes out summed."""
    y, model = make("gaps")
    Y, rng = series(y, 4), np.random.default_rng(3)
    symbols = symbolic_model()
    many = {x: pt.tensor(x, shape=(None,) * (symbols[x].ndim + 1)) for x in batched}
    total = vectorize_graph(
        kalman_loglike(*symbols.values()).sum(), {symbols[x]: X for x, X in many.items()}
    )
    inputs = symbols | many
    wrt = [inputs["T"], inputs["Q"], *many.values()]
    evaluate = pytensor.function([*inputs.values()], [total, *pt.grad(total.sum(), wrt)], mode=mode)
    kalman, ops = panel_nodes(evaluate)
    assert [type(op) for op in kalman] == [KalmanPanelGrad]
    assert set(kalman[0].requested) == {"l", "y", "T", "W"} | (set(batched) - {"d"})
    assert not any("Blockwise" in str(op) and "Kalman" in str(op) for op in ops)
    own = {x: rng.normal(size=(4, *getattr(model, x).shape)) for x in batched if x != "y"}
    values = {"y": Y} | model.asdict() | own
    found = evaluate(*values.values())
    models = [StateSpace(**(model.asdict() | {x: X[j] for x, X in own.items()})) for j in range(4)]
    l, dY, each = loop(Y, models)
    assert relative_error(np.asarray(found[0]), l) < 1e-12
    assert relative_error(np.asarray(found[1]), sum(G.T for G in each)) < 1e-11
    assert relative_error(np.asarray(found[2]), sum(G.Q for G in each)) < 1e-11
    for x, G in zip(batched, found[3:], strict=True):
        expected = np.array(dY if x == "y" else [getattr(gradients, x) for gradients in each])
        assert relative_error(np.asarray(G), expected) < 1e-11, x


def test_a_batch_of_models_is_no_panel():
    symbols = symbolic_model()
    Y, Q = pt.tensor3("Y"), pt.tensor3("Q")
    l = kalman_loglike(*symbols.values())
    for batch in ({"y": Y, "Q": Q}, {"Q": Q}, {"y": pt.tensor4("Y")}):
        found = vectorize_graph(l, {symbols[x]: X for x, X in batch.items()})
        assert "Blockwise" in str(found.owner.op)
    two = vectorize_graph(l, {symbols["y"]: Y})
    assert isinstance(two.owner.op, KalmanPanel)


def test_only_the_value():
    y, model = make("gaps")
    symbols = symbolic(model)
    evaluate = pytensor.function(symbols, kalman_loglike_panel(*symbols), mode=PYTHON)
    assert [type(op) for op in panel_nodes(evaluate)[0]] == [KalmanPanel]
    Y = series(y, 3)
    Y[1] = np.nan  # nothing is observed: nothing is learned
    l = evaluate(Y, *model.asdict().values())
    assert relative_error(l[[0, 2]].sum(axis=1), loop(Y[[0, 2]], model)[0]) < 1e-12
    assert not l[1].any()


def test_vague_start():
    arrays = random_model(5, 2, 2, rng=7) | {"P0": 1e8 * np.eye(5)}
    y, _ = simulate(12, 7, **arrays)
    model, Y = StateSpace(**arrays), series(y, 5)
    symbols = symbolic(model)
    total = kalman_loglike_panel(*symbols).sum()
    evaluate = pytensor.function(symbols, pt.grad(total, symbols[1:]), mode=PYTHON)
    found = evaluate(Y, *model.asdict().values())
    _, _, each = loop(Y, model)
    for x, G in zip(model.asdict(), found, strict=True):
        assert relative_error(G, sum(getattr(gradients, x) for gradients in each)) < 1e-10, x


@pytest.mark.parametrize("mode", [thorough("NUMBA", id="numba"), MODES[1]])
def test_not_positive_definite_is_nan(mode):
    """Only for the series with those gaps, and in all gradients."""
    one = np.eye(1)
    Y = np.array([[[0.0], [np.nan]], [[np.nan], [np.nan]], [[np.nan], [1.0]]])
    model = StateSpace([0.0], 0 * one, [0.0], [0.0], T=one, Z=one, R=one, H=0 * one, Q=one)
    symbols = symbolic(model)
    l = kalman_loglike_panel(*symbols)
    evaluate = pytensor.function(symbols, [l, pt.grad(l.sum(), symbols[-1])], mode=mode)
    l, Q_bar = evaluate(Y, *model.asdict().values())
    assert np.isnan(l[0]).all() and not l[1].any() and np.isfinite(l[2]).all()
    assert np.isnan(Q_bar).all()


def test_what_is_refused():
    y, model = make("gaps")
    Y, X = series(y, 4), model.asdict()
    with pytest.raises(ValueError, match="Y has 2 dimensions"):
        kalman_loglike_panel(y, *X.values())
    with pytest.raises(ValueError, match=r"a0 has shape \(3, 3\), expected \(J, m\) = \(4, m\)"):
        kalman_loglike_panel(Y, *(X | {"a0": np.zeros((3, 3))}).values())
    with pytest.raises(ValueError, match="Z has shape"):
        kalman_loglike_panel(Y, *(X | {"Z": np.zeros((3, 3))}).values())
    with pytest.raises(TypeError, match="complex"):
        kalman_loglike_panel(Y, *(X | {"Z": X["Z"] * 1j}).values())


@every_mode("of", ["value", "gradient"], ["gradient"], ["value"])
def test_what_is_refused_when_the_function_is_called(mode, of):
    y, model = make("gaps")
    Y, X, symbols = series(y, 4), model.asdict(), symbolic(model)
    total = kalman_loglike_panel(*symbols).sum()
    wanted = total if of == "value" else pt.grad(total, symbols[0])
    evaluate = pytensor.function(symbols, wanted, mode=mode)
    with pytest.raises(ValueError, match="Z (does not have|has) shape"):
        evaluate(Y, *(X | {"Z": np.zeros((2, 4))}).values())
    with pytest.raises(ValueError, match="no series"):
        evaluate(Y[:0], *X.values())


@pytest.mark.skipif(not find_spec("jax"), reason="no JAX")
@pytest.mark.parametrize("what", ["panel", "integrated"])
def test_what_xla_calls_is_compiled_before(what, monkeypatch):
    """Within its call nothing is compiled, and nothing said that could not be."""
    from helpers.kalman.compiled import building

    door, seen = building.load("door"), []
    known = door.compile_later
    monkeypatch.setattr(door, "compile_later", lambda *size: (seen.append(size), known(*size))[1])
    y, model = make("gaps")
    arrays, T = model.asdict(), pt.matrix("T", shape=model.T.shape)
    arrays["T"] = T
    if what == "panel":
        l = kalman_loglike_panel(series(y, 2), *arrays.values()) * np.arange(len(y))
    else:
        l = kalman_diffuse_loglike(y, *arrays.values(), A=np.eye(model.m, 1))
    pytensor.function([T], pt.grad(l.sum(), T), mode="JAX")(model.T)
    assert {(0, door.ROOTS), (0, door.WHOLE), (model.m, model.p)} <= set(seen)


VAGUE = {
    "P0": np.diag([1e8, 1.0, 1e8]), "c": np.zeros(3), "d": np.zeros(2), "T": np.eye(3),
    "Z": np.eye(3)[:2], "R": np.eye(3), "H": np.eye(2), "Q": 0.1 * np.eye(3),
}  # fmt: skip


def test_weights_of_steps_with_a_start_in_roots():
    """One series after the other: none begins where the way back of the last one ended."""
    y, w = np.array([[1.0, 2.0], [0.5, 1.5]]), np.array([[1.0, 2.0]])
    a0 = pt.matrix("a0")
    l = kalman_loglike_panel(np.tile(y, (2, 1, 1)), a0, **VAGUE) * w
    found = pytensor.function([a0], pt.grad(l.sum(), a0), mode=PYTHON)(np.zeros((2, 3)))
    a = pt.vector("a")
    alone = pt.grad((kalman_loglike(y, a, **VAGUE) * w[0]).sum(), a)
    expected = pytensor.function([a], alone, mode=PYTHON)(np.zeros(3))
    assert all(relative_error(G, expected) < 1e-12 for G in found)


def test_a_vague_covariance_counts_by_its_symmetric_part():
    P0 = np.array([[1e8, 0, 0], [0, 1, 0.8], [0, 0, 1.0]])
    a, P = pt.vector("a"), pt.matrix("P")
    y = np.random.default_rng(0).normal(size=(4, 3))
    all_seen = {"d": np.zeros(3), "Z": np.eye(3), "H": np.eye(3)}
    l = kalman_loglike_panel(y[None], a, **(VAGUE | all_seen | {"P0": P})).sum()
    slopes = pytensor.function([a, P], pt.grad(l, [a, P]), mode=PYTHON)
    for X, G in zip(slopes(np.zeros(3), P0), slopes(np.zeros(3), (P0 + P0.T) / 2), strict=True):
        assert relative_error(X, G) < 1e-13


@pytest.mark.parametrize("mode", [thorough("NUMBA", id="numba"), *MODES[1:]])
def test_a_mean_that_is_not_a_number_is_no_gap(mode):
    y, model = make("gaps")
    symbols = symbolic(model)
    d = model.asdict() | {"d": np.array([np.nan, 0.0])}
    l = kalman_loglike_panel(*symbols)
    found = pytensor.function(symbols, l.sum(axis=1), mode=mode)(series(y, 3), *d.values())
    assert not np.isfinite(np.asarray(found)).any()


def test_series_beside_one_whose_covariance_fails():
    """Their own gradients do not depend on it."""
    Y, z, one, nothing = pt.tensor3("Y"), np.zeros(1), np.eye(1), np.zeros((1, 1))
    l = kalman_loglike_panel(Y, z, nothing, z, z, one, one, one, nothing, one)
    values = np.array([[[0.0], [np.nan]], [[np.nan], [1.0]]])
    found = pytensor.function([Y], pt.grad(l[1].sum(), Y), mode=PYTHON)(values)
    assert np.isnan(found[0]).all() and found[1].ravel().tolist() == [0.0, -1.0]


@pytest.mark.parametrize("name", ["gaps", "time-varying with gaps"])
def test_second_derivatives_and_forward_mode(name):
    """Those of one series after the other."""
    y, model = make(name)
    Y = series(y, 3)
    symbols = symbolic(model)
    weights = np.random.default_rng(0).normal(size=Y.shape[:2])
    of_one = [(kalman_loglike(symbols[0][j], *symbols[1:]) * weights[j]).sum() for j in range(3)]
    wrt = [symbols[k] for k in (1, 3, 5, 9)]  # a0, c, T, Q
    rng, found = np.random.default_rng(1), []
    moves = [rng.normal(size=model.asdict()[x].shape) for x in ("a0", "c", "T", "Q")]
    moves[-1] = moves[-1] + moves[-1].swapaxes(-1, -2)
    panel = (kalman_loglike_panel(*symbols) * weights).sum()
    for total in (panel, sum(of_one)):
        gradients = pt.grad(total, wrt)
        slope = sum((G * V).sum() for G, V in zip(gradients, moves, strict=True))
        outputs = [slope, *pt.grad(slope, wrt)]
        if total is panel:
            outputs[0] = pushforward(total, wrt, [pt.as_tensor(V) for V in moves])
        found.append(pytensor.function(symbols, outputs, mode=PYTHON)(Y, *model.asdict().values()))
    for X, G in zip(*found, strict=True):
        assert relative_error(X, G) < 1e-10


@pytest.mark.skipif(not find_spec("jax"), reason="no JAX")
def test_in_jax_the_compiled_pass_keeps_the_digits():
    X = random_model(5, 2, 2, rng=0) | {"P0": 1e10 * np.eye(5)}
    Y = np.random.default_rng(100).standard_normal((2, 5, 2))
    T = pt.matrix("T", shape=(5, 5))
    slope = pt.grad(kalman_loglike_panel(Y, **(X | {"T": T})).sum(), T)
    found, expected = (
        np.asarray(pytensor.function([T], slope, mode=mode)(X["T"])) for mode in ("JAX", PYTHON)
    )
    assert relative_error(found, expected) < 1e-13


@pytest.mark.skipif(not find_spec("jax"), reason="no JAX")
def test_jax_differentiates_the_panel():
    """As its samplers do: by its own transformations of the value."""
    import jax
    from pytensor.link.jax.dispatch import jax_funcify

    jax.config.update("jax_enable_x64", True)
    y, model = make("gaps")
    Y = series(y, 4)
    symbols = symbolic(model)
    l = kalman_loglike_panel(*symbols)
    (fgraph,) = [pytensor.function(symbols, l, mode="JAX").maker.fgraph]
    run = jax_funcify(fgraph)
    weights = np.random.default_rng(0).normal(size=Y.shape[:2])
    given = [jax.numpy.asarray(X) for X in (Y, *model.asdict().values())]
    expected = pytensor.function(
        symbols, [l, *(pt.grad((l * w).sum(), symbols[5]) for w in (weights, 3.0))], mode=PYTHON
    )(Y, *model.asdict().values())

    def total(T, w):
        return (run(*given[:5], T, *given[6:])[0] * w).sum()

    assert relative_error(np.asarray(run(*given)[0]), expected[0]) < 1e-13
    for w, G in zip((weights, 3.0), expected[1:], strict=True):
        assert relative_error(np.asarray(jax.grad(total)(given[5], w)), G) < 1e-12
    V = np.random.default_rng(1).normal(size=model.T.shape)
    second = jax.jvp(jax.grad(lambda T: total(T, weights)), (given[5],), (V,))[1]
    slope = pt.grad((pt.grad((l * weights).sum(), symbols[5]) * V).sum(), symbols[5])
    G = pytensor.function(symbols, slope, mode=PYTHON)(Y, *model.asdict().values())
    assert relative_error(np.asarray(second), G) < 1e-9
