"""Second derivatives in closed form: against complex steps of the gradient, in every engine."""

import re
from dataclasses import replace

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from kalman_models import NAMES_OF_CASES, VECTORS, make, moving_vectors, season
from kalman_oracle import true_hessian
from pytensor.gradient import NullTypeGradError
from pytensor.graph.replace import vectorize_graph
from pytensor.scan.op import Scan
from tiers import thorough

from helpers.checks import relative_error
from helpers.datasets import random_model, simulate
from helpers.kalman import StateSpace, compiled, reference
from helpers.kalman.compiled import building
from helpers.kalman.hessian import hessian, hessian_vector
from helpers.kalman.information import expected_information, outer_product
from helpers.kalman.ops.likelihood import (
    INPUTS,
    KalmanLoglikeGrad,
    KalmanLoglikeTangent,
    KalmanLoglikeTangents,
    kalman_loglike,
    loglike_from_W,
)
from helpers.kalman.scan import symbolic_model
from helpers.statespace import NAMES, SYMMETRIC

PYTHON = pytensor.compile.mode.Mode("py", "fast_run")
STEP = 1e-40


def directions_for(y, model, k, seed=0, names=("y", *NAMES)):
    rng = np.random.default_rng(seed)
    arrays = {"y": y, **model.asdict()}
    found = {x: rng.standard_normal((k, *arrays[x].shape)) for x in names}
    return {x: (X + np.swapaxes(X, -1, -2)) / 2 if x in SYMMETRIC else X for x, X in found.items()}


def moved(y, model, directions, i):
    """y and the model, a complex step along direction i."""
    arrays = {"y": y, **model.asdict()}
    arrays |= {x: arrays[x] + 1j * STEP * X[i] for x, X in directions.items()}
    return arrays.pop("y"), StateSpace(**arrays)


def close(X, expected, rtol, floor=0.0):
    """X against a reference, relative to its largest entry, or to `floor` where that is less."""
    X, expected = np.asarray(X), np.asarray(expected)
    return np.abs(X - expected).max() <= rtol * max(np.abs(expected).max(), floor)


@pytest.mark.parametrize("name", NAMES_OF_CASES)
@pytest.mark.parametrize("method", ["reference", "fused"])
def test_against_complex_steps_of_the_gradient(name, method):
    y, model = make(name)
    k = 3
    directions = directions_for(y, model, k)
    weights = np.random.default_rng(1).random(len(y))
    for w in (None, weights):
        slopes, dy, gradients = hessian_vector(y, model, directions, method, w)
        for i in range(k):
            y_moved, model_moved = moved(y, model, directions, i)
            _, dy_moved, expected = reference.loglike_and_grad(y_moved, model_moved, w)
            l = reference.kalman_filter(y_moved, model_moved).out.l
            assert relative_error(slopes[i], l.imag / STEP) < 1e-10
            assert relative_error(dy[i], dy_moved.imag / STEP) < 1e-10
            for x, X in expected.asdict().items():
                assert close(getattr(gradients, x)[i], X.imag / STEP, 1e-10), (x, i)


@pytest.mark.parametrize("k", [1, 2, 8, 9, 17])
def test_any_number_of_directions(k):
    """Eight go through at once; one alone goes another way."""
    y, model = make("gaps")
    directions = directions_for(y, model, k)
    expected = hessian_vector(y, model, directions, "reference")
    found = hessian_vector(y, model, directions)
    assert relative_error(found[0], expected[0]) < 1e-11
    assert relative_error(found[1], expected[1]) < 1e-11
    for x, X in expected[2].asdict().items():
        assert close(getattr(found[2], x), X, 1e-11), x


@pytest.mark.parametrize(("m", "p", "k"), [(10, 5, 20), (33, 2, 9), (14, 2, 28)])
def test_the_steady_state_of_tangents(m, p, k):
    """With gaps, and directions in several groups; with many states in several passes, too."""
    model = StateSpace(**random_model(m, p, 2, rng=1, radius=0.6))
    y = simulate(160, 1, **model.asdict())[0]
    y[70, 0], y[100:102] = np.nan, np.nan
    directions = directions_for(y, model, k)
    found = hessian_vector(y, model, directions)
    every_step = hessian_vector(y, model, directions, tol=0.0)
    assert not np.array_equal(found[2].H, every_step[2].H)
    _, dy, expected = reference.loglike_and_grad(*moved(y, model, directions, k - 1))
    for slopes, dy_found, gradients in (found, every_step):
        assert relative_error(slopes, every_step[0]) < 1e-10
        assert relative_error(dy_found[-1], dy.imag / STEP) < 1e-10
        for x, X in expected.asdict().items():
            assert close(getattr(gradients, x)[-1], X.imag / STEP, 1e-10), x
    few = {x: X for x, X in directions.items() if x in ("H", "Q")}
    assert relative_error(hessian(y, model, few), hessian(y, model, few, "reference")) < 1e-10


def test_a_tolerance_that_is_none():
    y, model = make("gaps")
    for tol in (-1.0, "1e-13", np.nan):
        with pytest.raises((ValueError, TypeError), match="tol"):
            hessian_vector(y, model, directions_for(y, model, 1), tol=tol)


@pytest.mark.parametrize("names", [("H",), ("a0", "Q"), ("T",), ("Z",), ("y", "c", "d")])
def test_what_does_not_move(names):
    y, model = make("two shocks")
    directions = directions_for(y, model, 2, names=names)
    found = hessian_vector(y, model, directions)
    full = {x: np.zeros((2, *X.shape)) for x, X in {"y": y, **model.asdict()}.items()}
    expected = hessian_vector(y, model, full | directions, "reference")
    for x, X in expected[2].asdict().items():
        assert close(getattr(found[2], x), X, 1e-11, floor=1e-3), x


@pytest.mark.parametrize("k", [1, 3, 11])
def test_directions_of_a_few_entries_of_the_transition(k):
    """As parameters move it; the pass has products of the rows and columns that move alone."""
    model = StateSpace(**random_model(14, 2, 2, rng=3, radius=0.6))
    y = simulate(160, 1, **model.asdict())[0]
    y[70, 0] = np.nan
    rng = np.random.default_rng(k)
    directions = directions_for(y, model, k, names=("H", "T"))
    directions["T"] = np.zeros_like(directions["T"])
    directions["T"][np.arange(k), rng.integers(3, 6, k), rng.integers(9, 14, k)] = 1.0
    expected = hessian_vector(y, model, directions, "reference")
    found = hessian_vector(y, model, directions)
    for x, X in expected[2].asdict().items():
        assert close(getattr(found[2], x), X, 1e-10), x
    assert close(hessian(y, model, directions), hessian(y, model, directions, "reference"), 1e-10)


def test_a_season_with_hundreds_of_steps():
    """The transition is nearly empty, and the covariance has long settled."""
    model = season(12)
    rng = np.random.default_rng(5)
    y = rng.standard_normal((300, 1)).cumsum(axis=0)
    y[100:110] = np.nan
    directions = directions_for(y, model, 2, names=("H", "Q", "P0"))
    _, _, found = hessian_vector(y, model, directions)
    for i in range(2):
        y_moved, model_moved = moved(y, model, directions, i)
        _, _, expected = reference.loglike_and_grad(y_moved, model_moved)
        for x, X in expected.asdict().items():
            assert close(getattr(found, x)[i], X.imag / STEP, 1e-10), x


@pytest.mark.parametrize(
    ("m", "p", "gaps"), [(1, 3, False), (1, 3, True), (5, 2, False), (2, 2, True)]
)
@pytest.mark.parametrize("method", ["reference", "fused"])
def test_a_vague_start_with_several_series(m, p, gaps, method):
    """It costs eps kappa, not the eps kappa^2 that the gain's tangent loses to a formed F^-1.

    One series does not show it, nor do as many states as series without gaps.
    """
    kappa, rng = 1e8, np.random.default_rng(2)
    arrays = random_model(m, p, m, rng=rng)
    y = simulate(12, rng, **arrays)[0]
    if gaps:
        y[[0, 5], [0, 1]] = np.nan
    model = StateSpace(**(arrays | {"P0": kappa * np.eye(m)}))
    for name in ("Z", "T"):
        directions = directions_for(y, model, 2, names=(name,))
        found, expected = hessian(y, model, directions, method), true_hessian(y, model, directions)
        assert close(found, expected, 10 * np.finfo(float).eps * kappa), name


@pytest.mark.parametrize("k", [4, 14])
def test_directions_of_a_long_series(k):
    """They go through several passes, that each of them keeps less; as if each were alone."""
    model = StateSpace(**random_model(5, 2, 2, rng=1, radius=0.5))
    y = simulate(12_000, 1, **model.asdict())[0]
    directions = directions_for(y, model, k)
    slopes, dy, found = hessian_vector(y, model, directions)
    for i in range(k):
        alone = hessian_vector(y, model, {x: X[i : i + 1] for x, X in directions.items()})
        assert relative_error(slopes[i], alone[0][0]) < 1e-11
        assert relative_error(dy[i], alone[1][0]) < 1e-11
        for x, X in alone[2].asdict().items():
            assert close(getattr(found, x)[i], X[0], 1e-10), x


def test_directions_of_a_long_series_of_few_states():
    """What they need for gains has a block of its own; weights that differ take another pass."""
    model = StateSpace(**random_model(4, 4, 4, rng=1, radius=0.5))
    y = np.random.default_rng(1).standard_normal((24_000, 4))
    directions = directions_for(y, model, 2)
    slopes, dy, found = hessian_vector(y, model, directions)
    weights, others = np.ones(len(y)), []
    for first in (0.0, 2.0):
        weights[0] = first
        others.append(hessian_vector(y, model, directions, weights=weights))
    assert relative_error(slopes, others[0][0]) < 1e-11
    assert relative_error(dy, (others[0][1] + others[1][1]) / 2) < 1e-11
    for x, X in found.asdict().items():
        assert close(X, (getattr(others[0][2], x) + getattr(others[1][2], x)) / 2, 1e-10), x


def assert_steady_tangents(y, model, directions):
    """There is a steady state, and the tangents are those of a pass that looks for none."""
    found, expected = (hessian_vector(y, model, directions, tol=x) for x in (1e-13, 0.0))
    assert not np.array_equal(found[2].T, expected[2].T)
    assert relative_error(found[0], expected[0]) < 1e-10
    assert relative_error(found[1], expected[1]) < 1e-10
    for x, X in expected[2].asdict().items():
        assert close(getattr(found[2], x), X, 1e-10), x


@pytest.mark.parametrize("names", VECTORS)
@pytest.mark.parametrize("of", ["few states", "a dense model", "a model of lags"])
def test_vectors_that_vary_leave_the_steady_state(of, names):
    """Gradient and tangents as without one, but for the steps that it spares."""
    y, model = moving_vectors(*((3, 2) if of == "few states" else (6, 1)), names)
    if of == "a model of lags":  # whose transition is followed by its non-zeros
        T = np.eye(6, k=-1)
        T[0] = 0.3, -0.2, 0.1, 0.1, -0.1, 0.1
        model = replace(model, T=T)
    for k in (1, 4):
        assert_steady_tangents(y, model, directions_for(y, model, k))
    found, expected = (compiled.loglike_and_grad(y, model, tol=x) for x in (1e-13, 0.0))
    assert not np.array_equal(found[2].T, expected[2].T)
    assert relative_error(found[1], expected[1]) < 1e-11
    for x, X in expected[2].asdict().items():
        assert close(getattr(found[2], x), X, 1e-10), x


@pytest.mark.parametrize(("m", "p"), [(1, 1), (3, 2), (4, 4)])
def test_few_states_whose_tangents_settle(m, p):
    model = StateSpace(**random_model(m, p, 1, rng=1, radius=0.9))
    y = simulate(400, 1, **model.asdict())[0]
    y[150, 0] = np.nan
    assert_steady_tangents(y, model, directions_for(y, model, 3))


def test_a_pass_in_registers_that_cannot_be_compiled(monkeypatch, capsys):
    door = building.load("door")
    y, model = make("gaps")
    directions = directions_for(y, model, 1)
    hessian(y, model, directions)
    known = door._addresses.copy()
    try:
        door._addresses[:, door.TANGENTS + 1 :] = 0
        monkeypatch.setattr(door, "compile_later", lambda *size: 1 / 0)
        with pytest.raises(RuntimeError, match="second derivatives were not compiled; why not, a"):
            hessian(y, model, directions)
    finally:
        door._addresses[:] = known
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert np.isfinite(hessian(y, model, directions)).all()


@pytest.mark.parametrize("method", ["reference", "fused"])
def test_the_hessian_is_symmetric_and_that_of_the_likelihood(method):
    y, model = make("gaps")
    directions = directions_for(y, model, 4)
    H = hessian(y, model, directions, method)
    assert np.array_equal(H, H.T)
    for i in range(4):
        y_moved, model_moved = moved(y, model, directions, i)
        _, dy, G = reference.loglike_and_grad(y_moved, model_moved)
        bars = G.asdict() | {"y": dy}
        for j in range(4):
            expected = sum((bars[x].imag * X[j]).sum() for x, X in directions.items()) / STEP
            assert abs(H[i, j] - expected) <= 1e-11 * np.abs(H).max()


def test_a_level_of_a_million():
    """The tangents of the means are differences, whatever the level."""
    y, model = make("gaps")
    high = StateSpace(**(model.asdict() | {"d": model.d + 1e6}))
    directions = directions_for(y, model, 2, names=("H", "Q", "T"))
    low = hessian_vector(y, model, directions)[2]
    found = hessian_vector(y + 1e6, high, directions)[2]
    for x, X in low.asdict().items():
        assert close(getattr(found, x), X, 1e-8), x


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        thorough("NUMBA", "only Z varies"),
        (PYTHON, "gaps"),
        (PYTHON, "only Z varies"),
        ("JAX", "gaps"),
        ("JAX, by scans", "gaps"),
    ],
)
def test_the_gradient_differentiated(mode, name, monkeypatch):
    if mode in ("JAX", "JAX, by scans"):
        pytest.importorskip("jax")
        from helpers.kalman import jax as functions
        from helpers.kalman.jax import calls, scans

        monkeypatch.setattr(functions, "_is_compiled", lambda *_, m=mode: m == "JAX")
        monkeypatch.setattr(scans if mode == "JAX" else calls, "tangents", None)
        mode = "JAX"
    y, model = make(name)
    varying = model.time_varying
    symbols = symbolic_model(varying)
    weights = pt.vector("weights")
    l = kalman_loglike(*symbols.values(), tol=0.0)
    inputs = list(symbols.values())
    gradients = pt.grad((weights * l).sum(), inputs)
    directions = directions_for(y, model, 1)
    along = [directions[x][0] for x in symbols]
    total = sum((V * G).sum() for V, G in zip(along, gradients, strict=True))
    wrt = dict(zip(["y", *NAMES, "weights"], [*inputs, weights], strict=True))
    if mode == "NUMBA":  # which compiles for a minute where it compiles them all
        wrt = {x: wrt[x] for x in ("Z", "Q", "weights")}
    products = pt.grad(total, [*wrt.values()])
    evaluate = pytensor.function([*inputs, weights], products, mode=mode)
    g = np.random.default_rng(3).random(len(y))
    found = dict(zip(wrt, evaluate(y, *model.asdict().values(), g), strict=True))
    slopes, dy, expected = hessian_vector(y, model, directions, "reference", g)
    assert relative_error(found.pop("weights"), slopes[0]) < 1e-10
    if "y" in found:
        assert relative_error(np.where(np.isnan(y), 0, found.pop("y")), dy[0]) < 1e-10
    for x, X in found.items():
        assert close(X, getattr(expected, x)[0], 1e-10), x


@pytest.mark.parametrize("name", ["gaps", "only Z varies"])
def test_the_rows_of_a_hessian_need_no_loop(name):
    """As PyMC puts a Hessian together: for each parameter on its own, row by row."""
    y, model = make(name)
    arrays = model.asdict()
    directions = directions_for(y, model, 4)

    def at(parameters, tensor=np.asarray, exp=np.exp):
        """The model's arrays, in parameters that enter them as variances and coefficients do."""
        scale, shift = parameters
        found = {x: tensor(X) for x, X in arrays.items()}
        found |= {"H": exp(scale[0]) * found["H"], "Q": exp(scale[1]) * found["Q"]}
        for x, by in (("T", shift[0]), ("Z", shift[1] * scale[0]), ("a0", scale[1])):
            found[x] = found[x] + by * directions[x][0]
        return found

    def gradient(parameters):
        """By the chain rule, from the reference."""
        _, _, G = reference.loglike_and_grad(y, StateSpace(**at(parameters)))
        scale, shift = parameters
        dots = {x: np.vdot(directions[x][0], getattr(G, x)) for x in ("T", "Z", "a0")}
        dots |= {
            x: np.exp(s) * np.vdot(arrays[x], getattr(G, x))
            for x, s in zip("HQ", scale, strict=True)
        }
        first = [dots["H"] + shift[1] * dots["Z"], dots["Q"] + dots["a0"]]
        return np.array([*first, dots["T"], scale[0] * dots["Z"]])

    point = np.array([0.2, -0.3, 0.01, 0.05])
    expected = np.stack(
        [gradient((point + 1j * STEP * e).reshape(2, 2)).imag / STEP for e in np.eye(4)]
    )
    parameters = [pt.dvector("scale"), pt.dvector("shift")]
    l = kalman_loglike(y, *at(parameters, pt.as_tensor, pt.exp).values(), tol=0.0).sum()
    rows = pt.concatenate([pt.grad(l, X) for X in parameters])
    found = [pytensor.gradient.jacobian(rows, X) for X in parameters]
    evaluate = pytensor.function(parameters, pt.concatenate(found, axis=1), mode=PYTHON)
    assert close(evaluate(*point.reshape(2, 2)), expected, 1e-10)
    ops = [node.op for node in evaluate.maker.fgraph.toposort()]
    assert not {Scan, KalmanLoglikeTangent} & {type(op) for op in ops}
    tangents = [op.along for op in ops if isinstance(op, KalmanLoglikeTangents)]
    assert ("a0", "T", "Z", "H", "W") in tangents  # both gradients' at once


def test_only_what_is_asked_for_is_computed():
    symbols = symbolic_model()
    inputs = list(symbols.values())
    total = kalman_loglike(*inputs).sum()
    H_bar = pt.grad(total, symbols["H"])
    second = pt.grad(H_bar.sum(), [symbols["H"]])
    evaluate = pytensor.function(inputs, second, mode=PYTHON)
    ops = [node.op for node in evaluate.maker.fgraph.toposort()]
    (op,) = [op for op in ops if isinstance(op, KalmanLoglikeTangent)]
    assert (op.along, op.requested) == (("H",), ("H",))
    assert not any(isinstance(op, KalmanLoglikeGrad) for op in ops)


@pytest.mark.parametrize("along", [("T", "Z"), ("Z",), ("H", "W")])
def test_what_is_not_asked_for_changes_nothing(along):
    """Without the gradients of T and Z less is kept of each step."""
    y, model = make("gaps")
    arrays = {"y": y, **model.asdict()} | {"W": model.R @ model.Q @ model.R.T}
    arrays = {x: arrays[x] for x in INPUTS}
    symbols = {x: pt.tensor(x, shape=X.shape) for x, X in arrays.items()}
    moves = {x: pt.constant(X[0]) for x, X in directions_for(y, model, 1).items()}
    moves["W"] = pt.constant(np.eye(model.m))
    found = []
    for requested in (("l", *INPUTS), ("l", "a0", "H")):
        op = KalmanLoglikeTangent(along=along, requested=requested, tol=0.0)
        outputs = op(*symbols.values(), pt.ones(len(y)), *(moves[x] for x in along))
        evaluate = pytensor.function(list(symbols.values()), outputs, mode=PYTHON)
        found.append(dict(zip(requested, evaluate(*arrays.values()), strict=True)))
    for x in ("l", "a0", "H"):
        assert np.array_equal(found[0][x], found[1][x])


def test_the_value_and_the_gradient_pushed_forward():
    """The Ops alone: PyTensor's products of matrices have no pushforward."""
    y, model = make("gaps")
    arrays = {"y": y, **model.asdict()}
    W = model.R @ model.Q @ model.R.T
    arrays = {x: arrays.get(x, W) for x in INPUTS}
    inputs = [pt.tensor(x, shape=X.shape) for x, X in arrays.items()]
    weights = pt.vector("weights")
    l = loglike_from_W(*inputs)
    H_bar = pt.grad((weights * l).sum(), inputs[INPUTS.index("H")])
    directions = directions_for(y, model, 1)
    directions["R"][:], dQ = 0.0, directions["Q"][0]
    moves = {x: directions[x][0] if x != "W" else model.R @ dQ @ model.R.T for x in INPUTS}
    g, dg = np.random.default_rng(3).random((2, len(y)))
    pushed = pytensor.gradient.pushforward(
        [l, H_bar],
        [*inputs, weights],
        [pt.constant(X) for X in (*moves.values(), dg)],
        use_op_pushforward=True,
    )
    evaluate = pytensor.function([*inputs, weights], pushed, mode=PYTHON)
    dl, dH = evaluate(*arrays.values(), g)
    slopes, _, expected = hessian_vector(y, model, directions, "reference", g)
    assert relative_error(dl, slopes[0]) < 1e-10
    linear = reference.loglike_and_grad(y, model, dg)[2].H
    assert relative_error(dH, expected.H[0] + linear) < 1e-10


def test_the_tolerance_is_the_same_in_every_derivative():
    symbols = symbolic_model()
    move = pt.matrix("move")
    l = kalman_loglike(*symbols.values(), tol=0.0)
    slope = pytensor.gradient.pushforward(l.sum(), symbols["H"], move)
    again = pt.grad(slope, move)
    second = pytensor.gradient.pushforward(again.sum(), symbols["H"], move)
    ops = [X.owner.op for X in pytensor.graph.traversal.ancestors([second]) if X.owner]
    ops += [KalmanLoglikeTangents(tol=0.0).requesting(("l",))]
    tols = [op.tol for op in ops if hasattr(op, "tol")]
    assert len(tols) > 3 and not any(tols)


@pytest.mark.parametrize("which", ["H first", "Z first"])
def test_a_batch_of_one_direction_is_stretched_to_the_others(which):
    y, model = make("gaps")
    arrays = symbolic_model()
    l = kalman_loglike(*arrays.values()).sum()
    names = ("H", "Z") if which == "H first" else ("Z", "H")
    moves = {x: pt.matrix(x) for x in names}
    slopes = pt.grad(l, [arrays["H"], arrays["Z"]])
    total = sum(
        pytensor.gradient.pushforward(slope, [arrays[x] for x in names], [moves[x] for x in names])
        .sum()
        for slope in slopes
    )  # fmt: skip
    rng = np.random.default_rng(3)
    one, three = rng.standard_normal((1, 2, 2)), rng.standard_normal((3, *model.Z.shape))
    batches = {"H": pt.constant(one), "Z": pt.constant(three)}
    found = vectorize_graph(total, {moves[x]: batches[x] for x in names})
    inputs = list(arrays.values())
    evaluate = pytensor.function(inputs, found, mode=PYTHON)
    single = pytensor.function([*inputs, *moves.values()], total, mode=PYTHON)
    values = {"H": one[[0, 0, 0]], "Z": three}
    given = [y, *model.asdict().values()]
    expected = [single(*given, *(values[x][i] for x in names)) for i in range(3)]
    assert relative_error(evaluate(*given), np.array(expected)) < 1e-11


def test_a_third_derivative_is_refused_with_advice():
    symbols = symbolic_model()
    total = kalman_loglike(*symbols.values()).sum()
    second = pt.grad(pt.grad(total, symbols["H"]).sum(), symbols["H"]).sum()
    with pytest.raises(NullTypeGradError, match="filter_graph"):
        pt.grad(second, symbols["H"])


@pytest.mark.parametrize(
    ("directions", "message"),
    [
        ({}, "directions is empty"),
        ({"F": np.zeros((1, 2, 2))}, "no array is called 'F'"),
        ({"H": np.zeros((1, 3, 3))}, r"directions of H have shape \(1, 3, 3\), expected \(1, 2, 2"),
        ({"H": np.full((1, 2, 2), np.nan)}, r"directions\['H'\] is not finite"),
        ({"H": np.ma.masked_less(np.ones((1, 2, 2)), 0)}, r"directions\['H'\] is a masked array"),
        ({"H": 1.0}, r"directions of H have shape \(\), expected \(1, 2, 2"),
        ({"H": np.zeros((0, 2, 2))}, "directions is empty"),
    ],
)
def test_bad_directions(directions, message):
    y, model = make("gaps")
    with pytest.raises(ValueError, match=message):
        hessian_vector(y, model, directions)


@pytest.mark.parametrize("mode", [PYTHON, "JAX", thorough("NUMBA")])
@pytest.mark.parametrize("kind", [KalmanLoglikeTangent, KalmanLoglikeTangents])
def test_tangents_that_do_not_fit(kind, mode):
    if mode == "JAX":
        pytest.importorskip("jax")
    y, model = make("gaps")
    *arrays, R, H, Q = model.asdict().values()
    many = (2,) if kind is KalmanLoglikeTangents else ()
    moves = [pt.tensor(dtype="float64", shape=(None,) * (len(many) + k)) for k in (1, 2)]
    l_bar, op = pt.dvector("l_bar"), kind((), ("c", "T"), ("l", "H"))
    outputs = op(y, *arrays, H, R @ Q @ R.T, l_bar, *moves, return_list=True)
    evaluate = pytensor.function([l_bar, *moves], outputs, mode=mode)
    m = model.m
    given = [np.ones(len(y)), np.ones((*many, m)), np.ones((*many, m, m))]
    assert all(np.isfinite(X).all() for X in evaluate(*given))
    wrong = {"tangent of c": (1, (*many, m + 1)), "tangent of T": (2, (*many, 1, m * m))}
    wrong["l_bar"] = 0, 3
    if many:
        wrong["number of directions|tangent of T"] = 2, (3, m, m)
    for message, (i, shape) in wrong.items():
        with pytest.raises(ValueError, match=message):
            evaluate(*given[:i], np.ones(shape), *given[i + 1 :])


@pytest.mark.parametrize("method", ["reference", "fused"])
def test_a_direction_of_y_has_the_gaps_of_y(method):
    """A regressor is often missing where y is."""
    y, model = make("gaps")
    directions = directions_for(y, model, 2)
    expected = hessian(y, model, directions, method)
    directions["y"] = np.where(np.isnan(y), np.nan, directions["y"])
    assert np.array_equal(hessian(y, model, directions, method), expected)
    assert np.isfinite(expected).all()


def test_other_types_of_numbers():
    """Single precision and integers are numbers, too: the compiled pass is handed doubles."""
    y, model = make("two shocks")
    directions = {x: np.round(X) for x, X in directions_for(y, model, 2, names=("T", "c")).items()}
    expected = hessian(y, model, directions)
    given = {x: X.astype(int) for x, X in directions.items()}
    assert np.array_equal(hessian(y, model, given, weights=np.ones(len(y), int)), expected)
    single = StateSpace(**{x: X.astype(np.float32) for x, X in model.asdict().items()})
    for series in (y, y.astype(np.float32)):
        assert relative_error(hessian(series, single, given), expected) < 1e-4


def test_bad_weights_and_a_model_that_is_none():
    y, model = make("gaps")
    directions = directions_for(y, model, 1)
    with pytest.raises(ValueError, match=r"weights has shape \(2,\), expected \(n,\) = \(20,\)"):
        hessian_vector(y, model, directions, weights=[1.0, 2.0])
    masked, gap = np.ma.masked_less(np.arange(20.0), 3), np.where(np.arange(20) == 7, np.nan, 1.0)
    refused = {"masked array": masked, "not finite at (7,)": gap, "not an array of numbers": ["a"]}
    doors = (
        lambda w: compiled.loglike_and_grad(y, model, weights=w),
        lambda w: reference.loglike_and_grad(y, model, w),
        lambda w: hessian_vector(y, model, directions, weights=w),
        lambda w: expected_information(y, model, directions, w),
        lambda w: outer_product(y, model, directions, w),
    )
    for message, w in refused.items():
        for door in doors:
            with pytest.raises(ValueError, match=re.escape(message)):
                door(w)
    for k in (0, 3, 4):
        with pytest.raises(ValueError, match="weights are complex"):
            doors[k](1j * np.ones(20))
    turned = hessian(y, model, directions, weights=1j * np.ones(20))
    assert relative_error(turned, 1j * hessian(y, model, directions)) < 1e-12
    negative = StateSpace(**(model.asdict() | {"H": -100 * np.eye(2), "P0": 0 * model.P0}))
    for method in ("fused", "reference"):
        with pytest.raises(np.linalg.LinAlgError, match="step 0"):
            hessian_vector(y, negative, directions, method)


def test_too_many_steps_for_the_memory(monkeypatch):
    def too_large(*arguments):
        raise MemoryError("Allocation failed (probably too large).")

    y, model = make("two shocks")
    monkeypatch.setattr(building.load("tangents"), "hessian_vector", too_large)
    with pytest.raises(MemoryError, match=r"each needs about n m \(m \+ 3 p\) doubles"):
        hessian(y, model, directions_for(y, model, 2))


def test_a_hessian_that_rounding_made_impossible_is_no_array_of_nan(monkeypatch):
    """The gradient's pass ended well, that of the tangents did not."""
    y, model = make("two shocks")
    compiled = building.load("tangents").hessian_vector

    def not_positive_definite(*arguments):
        W_bar, slopes, bars = compiled(*arguments)
        return W_bar, np.nan * slopes, bars

    monkeypatch.setattr(building.load("tangents"), "hessian_vector", not_positive_definite)
    with pytest.raises(np.linalg.LinAlgError, match="not for the Hessian"):
        hessian(y, model, directions_for(y, model, 2))
