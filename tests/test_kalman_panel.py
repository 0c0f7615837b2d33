"""helpers.kalman.panel: many series in one covariance recursion, against a loop over the series."""

from dataclasses import replace

import numpy as np
import pytest
from kalman_models import CASES, arrays_of, make, season
from numba import njit

from helpers.checks import complex_step, relative_error
from helpers.datasets import random_model, simulate
from helpers.kalman import StateSpace, reference
from helpers.kalman.compiled import layout, one_pass, sweep, tiles
from helpers.kalman.compiled.forward import DONE, Steps
from helpers.kalman.compiled.inputs import (
    Arrays,
    Wanted,
    indices_in,
    look,
    room_for_indices,
    varies,
)
from helpers.kalman.compiled.layout import Saved, Sizes
from helpers.kalman.compiled.tiles import LANES, Mat, Memory
from helpers.kalman.panel import loglike, loglike_and_grad
from helpers.statespace import NAMES, SYMMETRIC

METHODS = ("fused", "reference")


def series(y, count, seed=1):
    """Series about y (n, p) in three groups: y's gaps, a gap more, and an early end."""
    rng = np.random.default_rng(seed)
    Y = y + np.nanstd(y) * rng.normal(size=(count, *y.shape))
    Y[1::3, len(y) // 3, 0] = np.nan
    if len(y) > 3:
        Y[2::3, -2:] = np.nan
    Y[:, 0, -1] = np.where(np.isnan(Y).all(axis=(1, 2)), 0.5, Y[:, 0, -1])
    return Y


def loop(Y, models):
    """The readable reference, series by series: values, dY and a list of gradients."""
    models = [models] * len(Y) if isinstance(models, StateSpace) else models
    parts = zip(*(reference.loglike_and_grad(*x) for x in zip(Y, models, strict=True)), strict=True)
    values, dY, gradients = parts
    return np.array(values), dY, gradients


def assert_is_the_loop(found, Y, models, bound=1e-11, own=(), least=0.0):
    """Value, dY and gradients: summed over the series, or their own; relative to their largest.

    Where that is below `least`, its terms cancel, and that is what the error is relative to.
    """
    values, dY, each = loop(Y, models)
    assert np.abs(found[0] / values - 1).max() < bound
    assert relative_error(np.array(found[1]), np.array(dY)) < bound
    for name in NAMES:
        X = np.array([getattr(gradients, name) for gradients in each])
        X, G = X if name in own else X.sum(axis=0), getattr(found[2], name)
        assert G.shape == X.shape, name
        size = max(np.abs(X).max(), least) or 1.0
        assert np.abs(G - X).max() < bound * size, name


@pytest.mark.parametrize("name", CASES)
def test_every_case_against_the_loop(name):
    y, model = make(name)
    Y = series(y, 7)
    found = loglike_and_grad(Y, model)
    assert_is_the_loop(found, Y, model)
    assert np.abs(loglike(Y, model) / found[0] - 1).max() < 1e-13


@pytest.mark.parametrize("count", [1, 4 * LANES - 1, 4 * LANES, 9 * LANES + 1])
@pytest.mark.parametrize("period", [4, 12])
def test_chunks_of_series_and_a_transition_that_is_nearly_empty(count, period):
    model = season(period)
    y, _ = simulate(40, np.random.default_rng(0), **model.asdict())
    Y = y + np.random.default_rng(1).normal(size=(count, *y.shape))
    Y[:, 20:22] = np.nan
    found = loglike_and_grad(Y, model)
    assert_is_the_loop(found, Y, model, 1e-10)


def test_steady_stretches():
    """Gains that are kept once for many steps, between gaps and before the end."""
    rng = np.random.default_rng(5)
    arrays = random_model(m=3, p=2, r=2, rng=rng, radius=0.5)
    y, _ = simulate(160, rng, **arrays)
    Y = y + rng.normal(size=(6, *y.shape))
    Y[:, 50, 0] = Y[:, 52] = Y[3:, 100:, 1] = np.nan
    for tol in (1e-13, 0.0):
        assert_is_the_loop(
            loglike_and_grad(Y, StateSpace(**arrays), tol=tol), Y, StateSpace(**arrays)
        )


@pytest.mark.parametrize("m", [1, 4, 5, 9, 17])
@pytest.mark.parametrize("p", [1, 2, 5, 9])
def test_sizes_around_whole_vectors(m, p):
    rng = np.random.default_rng(m * 10 + p)
    arrays = random_model(m=m, p=p, r=min(m, 2), rng=rng)
    y, _ = simulate(20, rng, **arrays)
    Y = series(y, 5)
    assert_is_the_loop(loglike_and_grad(Y, StateSpace(**arrays)), Y, StateSpace(**arrays), 1e-10)


@pytest.mark.parametrize("n", [2, 6, 30])
@pytest.mark.parametrize(("m", "p", "kappa"), [(3, 2, 1e7), (5, 2, 1e7), (5, 3, 1e10), (2, 4, 1e7)])
def test_vague_start(m, p, kappa, n):
    """The first steps in roots, all of them or some."""
    arrays = random_model(m, p, 2, rng=7)
    y, _ = simulate(n, 7, **arrays)
    Y = series(y, 7)
    model = StateSpace(**(arrays | {"P0": kappa * np.eye(m)}))
    assert_is_the_loop(loglike_and_grad(Y, model), Y, model, 1e-10)


@pytest.mark.parametrize("P0", [5.0, 1e9])
def test_levels_of_a_million(P0):
    model = replace(season(4), P0=P0 * np.eye(5), a0=np.array([1e6, 0, 0, 0, 0]))
    y, _ = simulate(40, np.random.default_rng(0), **model.asdict() | {"P0": np.eye(5)})
    Y = series(y, 6)
    assert_is_the_loop(loglike_and_grad(Y, model), Y, model, 1e-8, least=1.0)


@pytest.mark.parametrize("name", ["gaps", "only Z varies", "all time-varying", "H = 0"])
def test_against_the_complex_step(name):
    y, model = make(name)
    Y = series(y, 4)
    found = [loglike_and_grad(Y, model, method) for method in METHODS]
    for x, X in model.asdict().items():

        def total(new, x=x):
            return loglike(Y, StateSpace(**(model.asdict() | {x: new}))).sum()

        expected = complex_step(total, X, symmetric=x in SYMMETRIC)
        for method, (_, _, gradients) in zip(METHODS, found, strict=True):
            error = np.abs(getattr(gradients, x) - expected).max()
            assert error < 1e-10 * max(1, np.abs(expected).max()), (method, x)
    filled = np.where(np.isnan(Y), 0, Y)
    step = complex_step(lambda X: loglike(np.where(np.isnan(Y), np.nan, X), model).sum(), filled)
    for method, (_, dY, _) in zip(METHODS, found, strict=True):
        assert relative_error(dY, step) < 1e-10, method


@pytest.mark.parametrize("P0", [1.0, 1e8])
@pytest.mark.parametrize("method", METHODS)
def test_own_means(method, P0):
    """Own a0, c and d: as own models that differ in these alone."""
    rng = np.random.default_rng(2)
    arrays = random_model(3, 2, 2, rng=rng)
    arrays["P0"] = P0 * arrays["P0"]
    y, _ = simulate(12, rng, **arrays)
    Y = series(y, 5)
    model = StateSpace(**arrays)
    a0, c, d = rng.normal(size=(5, 3)), rng.normal(size=(5, 3)), rng.normal(size=(5, 2))
    ct, dt = rng.normal(size=(5, 12, 3)), rng.normal(size=(5, 12, 2))
    for own in ({"a0": a0}, {"c": c}, {"d": d}, {"a0": a0, "c": ct, "d": dt}):
        models = [replace(model, **{x: X[j] for x, X in own.items()}) for j in range(5)]
        assert_is_the_loop(loglike_and_grad(Y, model, method, **own), Y, models, 1e-10, own=own)


def test_own_means_where_the_models_vary():
    y, model = make("time-varying with gaps")
    Y = series(y, 4)
    c = np.random.default_rng(0).normal(size=(4, model.m))
    models = [replace(model, c=x) for x in c]
    assert_is_the_loop(loglike_and_grad(Y, model, c=c), Y, models, own=("c",))


@pytest.mark.parametrize("name", CASES)
def test_own_models(name):
    y, model = make(name)
    Y = series(y, 19)
    models = [replace(model, T=model.T * (1 - j / 100), Q=model.Q * (1 + j)) for j in range(19)]
    found = loglike_and_grad(Y, models)
    assert_is_the_loop(found, Y, models, own=NAMES)
    assert np.abs(loglike(Y, models) / found[0] - 1).max() < 1e-13


OWN = {
    "Q": lambda X, f: X * f,
    "T": lambda X, f: X * (1 - f / 100),
    "P0": lambda X, f: X * f,
    "H": lambda X, f: X * f,
    "R": lambda X, f: X + f,
    "Z": lambda X, f: X * f,
    "c": lambda X, f: X + f,
}


@pytest.mark.parametrize("name", ["gaps", "time-varying with gaps", "more observed than states"])
@pytest.mark.parametrize("method", METHODS)
def test_own_arrays_in_the_place_of_the_models(name, method):
    """As a list of models that differ in these; the others' gradients are summed."""
    y, model = make(name)
    Y = series(y, 11)
    factors = np.linspace(0.5, 2, 11)
    for chosen in (("Q",), ("T", "c"), tuple(OWN)):
        own = {
            x: np.array([OWN[x](getattr(model, x), f) for f in factors]) for x in chosen
        }  # fmt: skip
        models = [replace(model, **{x: X[j] for x, X in own.items()}) for j in range(11)]
        found = loglike_and_grad(Y, model, method, **own)
        assert_is_the_loop(found, Y, models, 1e-10, own=chosen)
        assert np.abs(loglike(Y, model, method, **own) / found[0] - 1).max() < 1e-13


def test_own_arrays_for_each_step():
    y, model = make("gaps")
    Y, rng = series(y, 9), np.random.default_rng(4)
    n = len(y)
    own = {
        "Q": model.Q * rng.uniform(0.5, 2, (9, n, 1, 1)),
        "Z": model.Z + rng.normal(size=(9, n, 1, 1)),
    }
    models = [replace(model, **{x: X[j] for x, X in own.items()}) for j in range(9)]
    assert_is_the_loop(loglike_and_grad(Y, model, **own), Y, models, 1e-10, own=("Q", "Z"))


@pytest.mark.parametrize("m", [1, 3, 13])
def test_a_vague_start_among_known_ones(m):
    """It alone has a square-root start; a series in other units is as good as the others."""
    model = StateSpace(**random_model(m, 1, 1, rng=m))
    y, _ = simulate(15, m, **model.asdict())
    Y = y + np.random.default_rng(0).normal(size=(12, *y.shape))
    P0 = np.repeat(model.P0[np.newaxis], 12, axis=0)
    P0[2], P0[5:7] = 1e8 * np.eye(m), 1e7 * np.eye(m)
    models = [replace(model, P0=X) for X in P0]
    found = loglike_and_grad(Y, model, P0=P0)
    assert_is_the_loop(found, Y, models, 1e-10, own=("P0",))
    units = np.ones((12, 1, 1))
    units[4] = 1e50
    H, Q = units**2 * model.H, units**2 * model.Q
    models = [replace(model, H=h, Q=q, P0=q[0] * np.eye(m)) for h, q in zip(H, Q, strict=True)]
    Y = Y * units
    l = loglike(Y, models)
    assert np.abs(l / loop(Y, models)[0] - 1).max() < 1e-12


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_blocks_of_threads_do_not_meet(threads):
    y, model = make("two shocks")
    Y = series(y, 70)
    Q = model.Q * np.linspace(0.5, 2, 70)[:, None, None]
    found = loglike_and_grad(Y, model, Q=Q, threads=threads)
    models = [replace(model, Q=X) for X in Q]
    assert_is_the_loop(found, Y, models, own=("Q",))


@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        ({"X": 1}, TypeError, "'X' is none of the arrays of a model: a0, P0"),
        ({"Q": np.ones((4, 3, 3))}, ValueError, r"Q has shape \(4, 3, 3\), expected one for each"),
        ({"P0": np.ones((4, 20, 3, 3))}, ValueError, r"\(J, m, m\) = \(4, 3, 3\)"),
        ({"T": np.full((4, 3, 3), np.inf)}, ValueError, "T is not finite for series 0"),
        ({"P0": np.tile(np.triu(np.ones((3, 3))), (4, 1, 1))}, ValueError, "P0 is not symmetric"),
        ({"T": np.zeros((4, 3, 3)), "threads": 0}, ValueError, "threads is 0, expected a positive"),
        (
            {"a0": np.zeros(3)},
            ValueError,
            r"a0 has shape \(3,\), expected one for each series, \(J, m",
        ),
        ({"c": np.zeros((4, 5, 3))}, ValueError, r"c has .* or \(J, n, m\) = \(4, 20, 3\)"),
        ({"d": np.full((4, 2), np.nan)}, ValueError, "d is not finite for series 0"),
        ({"d": [["a", "b"]] * 4}, ValueError, "d is not an array of numbers"),
    ],
)
def test_own_arrays_that_are_refused(own, error, message):
    y, model = make("gaps")
    for function in (loglike, loglike_and_grad):
        with pytest.raises(error, match=message):
            function(series(y, 4), model, **own)
    if own.keys() <= {"a0", "c", "d"}:
        with pytest.raises(ValueError, match="part of their own models"):
            loglike_and_grad(series(y, 4), [model] * 4, **own)


def test_more_series_than_memory():
    """Said before anything is allocated: these arrays take no memory themselves."""
    one = np.eye(1)
    walk = StateSpace([0.0], one, [0.0], [0.0], T=one, Z=one, R=one, H=one, Q=one)
    Y = np.broadcast_to(0.0, (10**8, 10**6, 1))
    with pytest.raises(MemoryError, match=r"100000000 series and their gradient take \d+ GiB"):
        loglike(Y, walk)
    ragged = [np.zeros((1, 1)), np.broadcast_to(0.0, (10**13, 1))]
    with pytest.raises(MemoryError, match="2 series, filled to one length, take"):
        loglike(ragged, walk)


@pytest.mark.parametrize("models", ["one", "own"])
@pytest.mark.parametrize("method", METHODS)
def test_different_lengths(models, method):
    """A list, as long as each series is; the longest one comes in the middle."""
    y, model = make("gaps")
    Y = [y[:7], y + 1, y[:1] + np.arange(2), y[:7] - 1]
    Y[2][0, 0] = 1
    models = model if models == "one" else [model] * 4
    l, dY, gradients = loglike_and_grad(Y, models, method)
    values, expected, each = loop(Y, model)
    assert np.abs(l / values - 1).max() < 1e-12
    for dy, x in zip(dY, expected, strict=True):
        assert relative_error(dy, x) < 1e-12
    for name in NAMES:
        X = np.array([getattr(G, name) for G in each])
        X = X.sum(axis=0) if models is model else X
        assert relative_error(getattr(gradients, name), X) < 1e-12


def test_order_of_the_series_does_not_matter():
    """Groups are found wherever their members are."""
    y, model = make("gaps")
    Y = series(y, 9)
    order = np.random.default_rng(0).permutation(9)
    l, dY, gradients = loglike_and_grad(Y, model)
    again = loglike_and_grad(Y[order], model)
    assert relative_error(again[0], l[order]) < 1e-14
    assert relative_error(again[1], dY[order]) < 1e-13
    assert relative_error(again[2].T, gradients.T) < 1e-12


def test_other_layouts_and_types():
    y, model = make("two shocks")
    Y = np.round(series(y, 4))
    Y[np.isnan(Y)] = 1
    expected = loglike_and_grad(Y, model)
    for other in (np.asfortranarray(Y), Y[:, ::-1][:, ::-1], Y.astype(int), list(Y)):
        found = loglike_and_grad(other, model)
        assert relative_error(found[0], expected[0]) < 1e-14
        assert relative_error(found[2].Q, expected[2].Q) < 1e-13


@pytest.mark.parametrize("method", METHODS)
def test_single_precision_is_that_of_the_numbers_alone(method):
    """As for one series: y - d is not rounded to it."""
    one = np.eye(1, dtype="float32")
    nothing, half = np.zeros(1, "float32"), np.full(1, 0.5, "float32")
    model = StateSpace(
        np.full(1, 2**24 - 1, "float32"), one, nothing, half, T=one, Z=one, R=one, H=one, Q=one
    )
    found = loglike(np.full((1, 1, 1), 2**24, "float32"), model, method)
    assert abs(found[0] + 0.5 * (np.log(2 * np.pi) + np.log(2) + 0.125)) < 1e-6


def test_the_callers_arrays_are_not_written_to():
    y, model = make("gaps")
    Y = series(y, 4)
    before = Y.copy()
    loglike_and_grad(Y, model)
    assert np.array_equal(Y, before, equal_nan=True)


WRONG = {
    "no series": (lambda Y, model: (Y[:0], model), "no series"),
    "no series in a list": (lambda Y, model: ([], model), "no series"),
    "no steps": (lambda Y, model: (Y[:, :0], model), "no step"),
    "an empty series": (lambda Y, model: ([Y[0], Y[1, :0]], model), "series 1 is empty"),
    "nothing observed": (
        lambda Y, model: ([Y[0], np.nan * Y[1]], model),
        "series 1 has no observation at all: leave it out",
    ),
    "one series": (lambda Y, model: (Y[0], model), r"expected J series of n steps, \(J, n, p\)"),
    "p differs": (
        lambda Y, model: ([Y[0], Y[1, :, :1]], model),
        r"series 1 has shape \(20, 1\), expected \(n, p\) = \(n, 2\)",
    ),
    "p is not the model's": (lambda Y, model: (Y[:, :, :1], model), r"\(J, n, p\) = \(J, n, 2\)"),
    "words": (
        lambda Y, model: ([Y[0], [["a", "b"]]], model),
        "series 1 is not an array of numbers",
    ),
    "a number": (lambda Y, model: (3.0, model), "Y is 3.0, expected an array"),
    "masked": (
        lambda Y, model: (np.ma.masked_invalid(Y), model),
        r"Y is a masked array, .* use Y.filled\(np.nan\)",
    ),
    "one masked": (
        lambda Y, model: ([Y[0], np.ma.masked_invalid(Y[1])], model),
        r"series 1 is a masked array, .* use y.filled\(np.nan\)",
    ),
    "infinite": (
        lambda Y, model: (np.where(np.arange(20)[:, None] == 3, np.inf, Y), model),
        "series 0 is infinite at step 3, component 0",
    ),
    "another number of steps": (
        lambda Y, model: (Y, replace(model, T=np.tile(model.T, (7, 1, 1)))),
        "Y has 20 steps, but T has 7",
    ),
    "another longest series": (
        lambda Y, model: (list(Y[:, :6]), replace(model, T=np.tile(model.T, (7, 1, 1)))),
        "the longest series has 6 steps, but T has 7",
    ),
    "too few models": (lambda Y, model: (Y, [model]), "there are 1 models for 4 series"),
    "no model": (lambda Y, model: (Y, []), "there is no model"),
    "something else for a model": (lambda Y, model: (Y, [model, 3]), "model 1 is 3, expected"),
    "models of two sizes": (
        lambda Y, model: (Y, [model, season(4)]),
        r"a0 of model 1 has shape \(5,\), that of model 0 \(3,\)",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_refused(what, method):
    y, model = make("gaps")
    arguments, message = WRONG[what]
    for function in (loglike, loglike_and_grad):
        with pytest.raises(ValueError, match=message):
            function(*arguments(series(y, 4), model), method)


def test_method_and_tolerance_are_refused():
    y, model = make("gaps")
    for models in (model, [model] * 4):
        with pytest.raises(ValueError, match="method"):
            loglike(series(y, 4), models, method="fast")
        with pytest.raises(ValueError, match="tol"):
            loglike(series(y, 4), models, tol=-1)
        with pytest.raises(ValueError, match="threads is -3, expected a positive number"):
            loglike(series(y, 4), models, threads=-3)
    one_thread = loglike(series(y, 4), [model] * 4, threads=np.int64(1))
    assert np.array_equal(one_thread, loglike(series(y, 4), [model] * 4))


@pytest.mark.parametrize("method", METHODS)
def test_a_covariance_that_is_not_positive_definite_is_named(method):
    y, model = make("gaps")
    bad = replace(model, H=-100 * model.H)
    Y = series(np.nan_to_num(y), 4)
    with pytest.raises(np.linalg.LinAlgError, match="at step 0"):
        loglike_and_grad(Y, bad, method)
    with pytest.raises(np.linalg.LinAlgError, match="at step 0"):
        loglike_and_grad(Y, [model, model, bad, model], method)


# The sweep's text in Python, over memory that checks every access.


def run_twin(Y, model):
    """l, y_bar, c_bar, r before the first step (m, J) and the gradients by a sweep in Python."""
    (J, n, p), m = Y.shape, model.m
    without_mean = {"a0": np.zeros(m), "c": np.zeros((1, m)), "d": np.zeros((1, p))}
    arrays = arrays_of(model)._replace(**without_mean)
    saved, wanted = Saved(True, m), Wanted(True, True, True, True, np.arange(m))
    w, _ = layout.checked_memory(Sizes(n, p, m), saved)
    at = -(-len(w.data) // LANES) * LANES
    x, end = sweep.lay_out_columns(at, n, p, m, tiles.padded(min(J, sweep.WIDTH)), False)
    memory = Memory(end, w.space, w.sizes)
    memory._bounds = np.sort([*(mat.at for mat in (*w.space, *x)), end])
    found = indices_in(np.empty(room_for_indices(n, p, m), np.int64), n, p, m)
    observed, pattern = look(Y[0], arrays, np.empty((n, p), np.uint8), found)
    steps = Steps(np.empty(n), found.steady_from)
    nothing = np.where(np.isnan(Y[0]), np.nan, 0.0)
    covariances = Arrays(*(np.zeros_like(A) for A in arrays))
    how, _ = one_pass.one_pass(
        memory, nothing, arrays, saved, True, varies(arrays), pattern, wanted, np.ones(n),
        1e-13, observed, False, steps, np.zeros((n, p)), covariances,
    )  # fmt: skip
    assert how == DONE
    gains = np.empty(n, np.int64)
    sweep.gain_of_each_step(steps.steady_from, gains)
    group = sweep.Series(
        np.arange(J), Y, np.zeros((1, 1, m)), np.ones(J), np.zeros((J, n)), np.zeros(Y.shape),
        np.zeros((1, 1, m)),
    )  # fmt: skip
    out, a = Arrays(*(np.zeros_like(A) for A in arrays)), np.zeros((m, J))
    sweep.sweep(
        memory, at, 0, arrays, observed, varies(arrays), pattern, gains, steps.l, wanted, True,
        group, a, out,
    )  # fmt: skip
    total = Arrays(*(A + J * B for A, B in zip(out, covariances, strict=True)))
    return group, a, total


@pytest.mark.parametrize("name", ["gaps", "time-varying with gaps", "more observed than states"])
@pytest.mark.parametrize("count", [2, sweep.WIDTH + 3])
def test_the_sweep_in_guarded_memory(name, count):
    y, model = make(name)
    model = replace(model, a0=0 * model.a0, c=np.zeros(model.m), d=np.zeros(model.p))
    Y = y + np.random.default_rng(0).normal(size=(count, *y.shape))
    Y[:, -1, 0] = np.nan  # the way back begins with a row of Z that other steps do see
    group, r, out = run_twin(Y, model)
    values, dY, each = loop(Y, model)
    assert np.abs(group.l.sum(axis=1) / values - 1).max() < 1e-12
    assert relative_error(group.y_bar, np.array(dY)) < 1e-12
    assert relative_error(r.T, np.array([G.a0 for G in each])) < 1e-12
    for x in "TZH":
        G, X = getattr(out, x), sum(getattr(G, x) for G in each)
        assert relative_error(G if x in model.time_varying else G[0], X) < 1e-12, x


def test_the_sweep_in_guarded_memory_with_steady_stretches():
    model = StateSpace(**random_model(m=2, p=1, rng=5, radius=0.5))
    model = replace(model, a0=np.zeros(2), c=np.zeros(2), d=np.zeros(1))
    y, _ = simulate(60, 5, **model.asdict())
    y[40] = np.nan
    Y = np.stack([y, 2 * y])
    _, _, out = run_twin(Y, model)
    _, _, each = loop(Y, model)
    assert relative_error(out.T[0], sum(G.T for G in each)) < 1e-11
    assert relative_error(out.H[0], sum(G.H for G in each)) < 1e-11


@njit(error_model="numpy")
def machine_gram(w, out, A, leap_A, B, leap_B, g, blocks, length, rows, cols, lower):
    at = w.ctypes.data
    tiles.gram(at, out, A, leap_A, B, leap_B, g, blocks, length, rows, cols, lower)


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("cols", [1, 3, 4, 8])
def test_sums_of_products_over_columns(rows, cols):
    """gram in machine code and in Python, against NumPy."""
    rng = np.random.default_rng(rows + cols)
    blocks, length = 3, 2 * LANES
    A, B = rng.normal(size=(blocks, rows, length)), rng.normal(size=(blocks, cols, length))
    g, start = rng.normal(size=length), rng.normal(size=(rows, cols))
    w = np.concatenate([start.ravel(), A.ravel(), B.ravel(), g])
    mats = [Mat(0, cols, 1), Mat(start.size, length, 1), Mat(start.size + A.size, length, 1)]
    expected = start + np.einsum("bij,bkj,j->ik", A, B, g)
    for lower in (False, True):
        twin, real = Memory(len(w)), w.copy()
        twin.data[:] = w
        arguments = (
            mats[0], mats[1], rows * length, mats[2], cols * length, len(w) - length, blocks,
            length, rows, cols, lower,
        )  # fmt: skip
        machine_gram(real, *arguments)
        tiles.gram(twin, *arguments)
        sure = np.tri(rows, cols, dtype=bool) | (not lower)
        for memory in (real, twin.data):
            assert np.abs(memory[: start.size].reshape(rows, cols) - expected)[sure].max() < 1e-13
            assert np.array_equal(memory[start.size :], w[start.size :])
