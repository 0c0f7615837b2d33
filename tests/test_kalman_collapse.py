"""More series than states: the rotation of each step's observations, in Python and compiled."""

from dataclasses import replace

import numpy as np
import pytest
from kalman_oracle import true_gradient, true_hessian

from helpers.checks import relative_error
from helpers.datasets import random_model, simulate
from helpers.kalman import (
    StateSpace,
    compiled,
    diffuse,
    loglike,
    loglike_and_grad,
    panel,
    reference,
    smoothing,
)
from helpers.kalman.compiled import arrays_of, collapse
from helpers.kalman.compiled.building import load  # what is imported compiles
from helpers.kalman.compiled.inputs import Arrays, Wanted
from helpers.kalman.hessian import hessian, hessian_vector
from helpers.kalman.recursions import LOG_2PI
from helpers.kalman.reference import FilterOutputs, kalman_filter, reverse
from helpers.statespace import NAMES, STATIC

# name: p, m, steps, whether H is full, share of gaps, arrays that vary
CASES = {
    "diagonal H, gaps": (14, 2, 40, False, 0.4, ()),
    "full H, gaps": (12, 3, 70, True, 0.4, ()),
    "diagonal H, every step": (14, 2, 30, False, 0.1, ()),
    "full H, complete": (12, 3, 30, True, 0, ()),
    "diagonal H, complete": (12, 2, 30, False, 0, ()),
    "one state": (12, 1, 20, True, 0.5, ()),
    "two series more": (6, 4, 15, True, 0.02, ()),
    "H varies": (12, 2, 12, True, 0.2, ("H",)),
    "Z varies": (12, 2, 12, True, 0.2, ("Z",)),
    "all vary": (12, 2, 10, False, 0.2, ("c", "d", "T", "Z", "R", "H", "Q")),
}
WEIGHTS = "equal", "unequal", "negative"


def make(name, weights="equal", cases=CASES):
    p, m, n, full, gaps, varying = cases[name]
    rng = np.random.default_rng(len(name))
    n_or_none = {"n": n, "time_varying": varying} if varying else {}
    model = StateSpace(**random_model(m, p, rng=rng, **n_or_none))
    root = rng.standard_normal((p, p))
    H = root @ root.T / p + np.eye(p) if full else np.diag(rng.uniform(0.5, 2, p))
    if "H" in varying:
        H = H * np.linspace(1, 2, n)[:, None, None]
    model = replace(model, H=H)
    y, _ = simulate(n, rng, **model.asdict())
    if gaps:
        y[rng.random(y.shape) < gaps] = np.nan
        if "every step" not in name:
            y[3], y[4, 1:] = np.nan, np.nan  # nothing, and a single one
    g = {"equal": np.ones(n), "negative": -np.ones(n)}
    return y, model, g.get(weights, rng.uniform(0.5, 2, n))


def rotated(y, model, g=None):
    """The patterns of y, and what `rotate` makes of them, for a way back."""
    *_, d, _, Z, H, _ = arrays_of(y, model)
    o, g = (~np.isnan(y)).astype(float), np.ones(len(y)) if g is None else g
    patterns = collapse.patterns_of(o, max(len(Z), len(H)) > 1)
    return patterns, *collapse.rotate(y, o, d, Z, H, g, patterns, True)


def in_python(y, model, g, read_off):
    """Value and gradients by the lines of the module, with the readable filter in their middle."""
    _, *arrays = arrays_of(y, model)
    given = Arrays(*arrays)
    patterns, x, invertible, good = rotated(y, model, g)
    assert good
    read_off = read_off or not invertible
    Y, inner = collapse.rotated_model(x, patterns, given, read_off)  # noqa: N806
    m = model.m
    over_time = {name: X[0] if len(X) == 1 else X for name, X in
                 {"Z": inner.Z, "H": inner.H, "d": inner.d}.items()}  # fmt: skip
    small = replace(model, **over_time)
    l = kalman_filter(Y, small).out.l
    l[patterns.order] += x.l + (0.5 * (LOG_2PI + 1) if read_off else 0.0)
    _, Y_bar, bars = reference.loglike_and_grad(Y, small, g)  # noqa: N806
    stars = given._replace(**{
        name: getattr(bars, name).reshape(getattr(inner, name).shape) for name in ("Z", "H")
    })  # fmt: skip
    out = Arrays(*(np.zeros(X.shape) for X in given))
    y_bar = np.zeros(y.shape)
    if read_off:
        h = np.ascontiguousarray(bars.Z[:, m])
    else:
        h = collapse.smoothed(x, patterns, g, Y_bar)
    wanted = Wanted(True, True, True, True, np.arange(m))
    collapse.expand(x, patterns, g, wanted, h, y_bar, Y_bar, stars, out, False)
    found = {name: getattr(out, name) for name in ("d", "Z", "H")}
    shapes = {name: getattr(model, name).shape for name in found}
    found = {name: X.reshape(shapes[name]) for name, X in found.items()}
    return l, y_bar, replace_all(bars, found)


def replace_all(bars, found):
    return {name: found.get(name, getattr(bars, name)) for name in NAMES}


def assert_same(found, y, model, g, bound=1e-12):
    l, y_bar, bars = found
    expected_l = kalman_filter(y, model).out.l
    value, expected_y, expected = reference.loglike_and_grad(y, model, g)
    assert relative_error(g @ l, value) < 1e-13
    assert relative_error(l, expected_l) < 1e-12
    assert relative_error(y_bar, expected_y) < bound
    assert (y_bar[np.isnan(y)] == 0).all()
    for name in NAMES:
        assert relative_error(bars[name], getattr(expected, name)) < bound, name


@pytest.mark.parametrize("read_off", [False, True])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", CASES)
def test_the_lines_in_python(name, weights, read_off):
    y, model, g = make(name, weights)
    assert_same(in_python(y, model, g, read_off), y, model, g)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", CASES)
def test_the_compiled_pass(name, weights):
    y, model, g = make(name, weights)
    assert compiled._door().collapses(y, model.m, True, 1)
    value, y_bar, bars = compiled.loglike_and_grad(y, model, tol=0, weights=g)
    l = compiled._door().loglike(*arrays_of(y, model), 0.0)
    assert relative_error(value, g @ l) < 1e-13
    assert_same((l, y_bar, bars.asdict()), y, model, g, 1e-11)


def cotangents(out, given=FilterOutputs._fields):
    """Random ones of the outputs `given`, of length zero for the others."""
    rng = np.random.default_rng(3)
    bars = {x: rng.standard_normal(X.shape) for x, X in out._asdict().items()}
    return FilterOutputs(**{x: X if x in given else X[:0] for x, X in bars.items()})


def pulled_back(y, model, bar):
    """The gradients, by name, for cotangents of the filter's outputs; that of y with them."""
    found, dy = load("pulled_outputs").reverse(*arrays_of(y, model), *bar)
    R, Q = (X.reshape(-1, *X.shape[-2:]) for X in (model.R, model.Q))
    bars = compiled.gradients_in_time(R, Q, found, (*STATIC, *model.time_varying))
    return bars.asdict() | {"y": dy}


@pytest.mark.parametrize("given", ["all", *FilterOutputs._fields])
@pytest.mark.parametrize("name", CASES)
def test_all_outputs_and_any_cotangents(name, given):
    y, model, _ = make(name)
    assert compiled._door().collapses(y, model.m, True, 1)
    filtered = kalman_filter(y, model)
    for X, expected in zip(
        load("outputs").filter_outputs(*arrays_of(y, model)), filtered.out, strict=True
    ):
        assert relative_error(X, expected) < 1e-12
    bar = cotangents(filtered.out, FilterOutputs._fields if given == "all" else (given,))
    dy, bars = reverse(model, filtered, FilterOutputs(*(X if len(X) else None for X in bar)))
    expected = bars.asdict() | {"y": dy}
    for x, X in pulled_back(y, model, bar).items():
        if np.abs(expected[x]).max() > 0:
            assert relative_error(X, expected[x]) < 1e-12, x
        else:
            assert np.abs(X).max() < 1e-12, x


def test_outputs_end_where_f_is_not_positive_definite():
    y, model, _ = make("full H, gaps")
    out = load("outputs").filter_outputs(*arrays_of(y, replace(model, Q=-1e3 * model.Q)))
    known, model = kalman_filter(y[:1], model).out, replace(model, Q=-1e3 * model.Q)
    for X, expected in zip(out, known, strict=True):
        assert relative_error(X[0], expected[0]) < 1e-12
        assert np.isnan(X[1:]).all()


def test_a_steady_state_is_found_where_no_pattern_changes():
    rng = np.random.default_rng(6)
    model = replace(StateSpace(**random_model(3, 40, rng=rng)), H=np.eye(40))
    y, _ = simulate(600, rng, **model.asdict())
    assert compiled._door().collapses(y, 3, False, 1)
    arrays = arrays_of(y, model)
    report = compiled._door().loglike_and_grad(
        *arrays, np.ones(len(y)), True, True, True, True, 1e-13
    )[3]
    assert report[2] < len(y) // 2
    value, _, bars = loglike_and_grad(y, model)
    expected, _, others = loglike_and_grad(y, model, method="reference")
    assert relative_error(value, expected) < 1e-12
    assert relative_error(bars.H, others.H) < 1e-10


def test_patterns_that_come_back_are_one():
    o = np.array([[1, 1], [1, 0], [1, 1], [0, 0], [1, 0]], float)
    patterns = collapse.patterns_of(o, False)
    parts = [sorted(part) for part in np.split(patterns.order, patterns.start[1:-1])]
    assert sorted(parts) == [[0, 2], [1, 4], [3]]
    assert len(collapse.patterns_of(o, True).start) == 6
    o = np.random.default_rng(0).integers(2, size=(60, 5)).astype(float)  # some keys are the same
    patterns = collapse.patterns_of(o, False)
    assert len(patterns.start) == 1 + len({*map(tuple, o)})
    for part in np.split(patterns.order, patterns.start[1:-1]):
        assert (o[part] == o[part[0]]).all()


@pytest.mark.parametrize("full", [False, True])
def test_the_bases_of_patterns(full):
    """B H B' = I and B Z = A, by what is seen: little or much, from a common basis or its own."""
    y, model, g = make("full H, gaps" if full else "diagonal H, gaps")
    patterns, x, _, good = rotated(y, model, g)
    assert good and {*map(bool, x.own)} == {False, True}
    for k, t in enumerate(patterns.order[patterns.start[:-1]]):
        B, seen = np.full((model.p, model.m), np.nan), ~np.isnan(y[t])
        for s in range(model.p):
            collapse.column(x, k, s, B[s])
        A, rank = x.A[k], min(seen.sum(), model.m)
        assert (B[~seen] == 0).all()
        assert relative_error(B.T @ model.Z, A) < 1e-13 or not rank
        there = np.diag(A) != 0  # with fewer observations than states some rows are zero
        assert there.sum() == rank
        assert np.allclose(B.T @ model.H @ B, np.diag(there), rtol=0, atol=1e-13)


def test_a_smoothed_state_is_read_off_only_where_something_is_left_of_y():
    """Not at steps with no more observations than states, unless they tell of fewer."""
    rng = np.random.default_rng(5)
    model = StateSpace(**random_model(3, 8, rng=rng))
    y, _ = simulate(9, rng, **model.asdict())
    y[2], y[4, 1:], y[6, 3:] = np.nan, np.nan, np.nan
    for Z, expected in ((model.Z, True), (model.Z[[0, 0, *range(1, 7)]], False)):
        _, _, found, good = rotated(y, replace(model, Z=Z))
        assert good and found == expected


def test_what_the_model_says_of_a_missing_component_does_not_count():
    y, model, g = make("full H, complete")
    y[:, 2] = np.nan
    H, Z, d = model.H.copy(), model.Z.copy(), model.d.copy()
    H[2], H[:, 2], Z[2], d[2] = np.nan, np.nan, np.nan, np.nan
    spoilt = replace(model)
    arrays = [X.copy() for X in arrays_of(y, spoilt)]
    arrays[4][0, 2], arrays[6][0, 2] = np.nan, np.nan
    arrays[7][0, 2], arrays[7][0, :, 2] = np.nan, np.nan
    l, bars, y_bar, _ = compiled._door().loglike_and_grad(*arrays, g, True, True, True, True, 0.0)
    value, expected_y, expected = reference.loglike_and_grad(y, model)
    assert relative_error(l.sum(), value) < 1e-13
    assert relative_error(y_bar, expected_y) < 1e-12
    assert relative_error(bars[5][0], expected.Z) < 1e-12
    assert relative_error(bars[6][0], expected.H) < 1e-12


def test_a_singular_h_takes_the_other_pass():
    """H = 0, a full H of less than full rank, and one that is singular where something is seen."""
    rng = np.random.default_rng(4)
    model = StateSpace(**random_model(4, 12, rng=rng))
    root = rng.standard_normal((12, 2))
    for H in (np.zeros((12, 12)), root @ root.T, np.diag([1.0, 0, *np.ones(10)])):
        one = replace(model, H=H)
        y, _ = simulate(10, rng, **one.asdict())
        y[:, 3:] = np.nan  # fewer than states are observed: F is regular
        assert compiled._door().collapses(y, 4, True, 1)
        assert not rotated(y, one)[-1]
        found, expected = loglike_and_grad(y, one), loglike_and_grad(y, one, method="reference")
        assert relative_error(found[0], expected[0]) < 1e-11
        assert relative_error(found[2].H, expected[2].H) < 1e-9


def hard(name, p=10):
    """Many series, two states, four steps."""
    rng = np.random.default_rng(8)
    model = StateSpace(**random_model(2, p, rng=rng))
    if name.startswith("H times"):
        model = replace(model, H=model.H * float(name.split(",")[0].split()[-1]))
    elif name == "rows of Z repeat":
        model = replace(model, Z=model.Z[[0] * (p - 1) + [1]])
    elif name == "Z of rank one":
        model = replace(model, Z=np.outer(rng.uniform(1, 2, p), model.Z[0]))
    elif name == "columns of Z nearly the same":
        model = replace(model, Z=model.Z[:, [0, 0]] + 1e-7 * rng.standard_normal((p, 2)))
    elif name == "noise of many sizes":
        model = replace(model, H=np.diag([1e-8, 1e-4, *np.logspace(0, 4, p - 2)]))
    elif name == "vague":
        model = replace(model, P0=1e7 * np.eye(2))
    y, _ = simulate(4, rng, **model.asdict())
    if name == "levels of a million":
        y, model = y + 1e6, replace(model, d=model.d + 1e6)
    elif name == "a mean of a million":
        y, model = y + model.Z @ [1e6, 1e6], replace(model, a0=model.a0 + 1e6, T=np.eye(2))
    if "complete" not in name:
        y[1, :2], y[2, 1:], y[3] = np.nan, np.nan, np.nan
    return y, model


HARD = (
    "H times 1e-8", "H times 1e-12", "H times 1e-12, complete", "rows of Z repeat",
    "Z of rank one", "columns of Z nearly the same", "noise of many sizes", "levels of a million",
    "a mean of a million", "vague",
)  # fmt: skip


@pytest.mark.parametrize("name", HARD)
def test_digits(name):
    """Against 80 digits: nearly as many as the readable filter, which factors F."""
    y, model = hard(name)
    assert compiled._door().collapses(y, 2, True, 1)
    true = true_gradient(y, model)
    value, y_bar, bars = loglike_and_grad(y, model, tol=0)
    other_value, other_y, other = loglike_and_grad(y, model, method="reference")
    errors = {"l": (value, other_value), "y": (y_bar, other_y)}
    errors |= {x: (getattr(bars, x), getattr(other, x)) for x in NAMES}
    for x, (found, by_reference) in errors.items():
        error, known = relative_error(found, true[x]), relative_error(by_reference, true[x])
        assert error < max(1e-13, 10 * known), (x, error, known)


@pytest.mark.parametrize("name", HARD)
def test_digits_of_outputs(name):
    """The gradient of the filtered states and their covariances, likewise."""
    y, model = hard(name)
    filtered = kalman_filter(y, model)
    bar = cotangents(filtered.out, ("a_filt", "P_filt", "l"))
    bar = bar._replace(l=np.abs(bar.l))
    full = [X if len(X) else np.zeros(Y.shape) for X, Y in zip(bar, filtered.out, strict=True)]
    true = true_gradient(y, model, weights=bar.l, bars=full[:6])
    dy, bars = reverse(model, filtered, FilterOutputs(*full))
    others = bars.asdict() | {"y": dy}
    for x, X in pulled_back(y, model, bar).items():
        error, known = relative_error(X, true[x]), relative_error(others[x], true[x])
        assert error < max(1e-13, 10 * known), (x, error, known)


def test_h_of_many_sizes_takes_the_other_pass():
    """Its gradient would be a difference of much larger numbers."""
    y, model = hard("noise of many sizes")
    for some, expected in ((model.H, False), (np.mean(model.H) * np.eye(10), True)):
        for g in (np.ones(len(y)), -np.ones(len(y))):
            patterns, x, _, good = rotated(y, replace(model, H=some), g)
            assert good and collapse.keeps_digits(x, patterns, g) == expected


def test_the_largest_entry_of_the_inverse_need_not_keep_its_digits():
    """The most precise series is explained, and the next one not, or no other is as precise."""
    y, model = hard("vague", 10)
    root = np.eye(10) + 0.1 * np.tri(10, k=-1)  # of a full H
    for full in (False, True):
        for variance, expected in ((2e-8, True), (1.0, False)):
            H = np.diag([1e-8, variance, *np.ones(8)])
            H = root @ H @ root.T if full else H
            Z = model.Z.copy()
            Z[0], Z[1] = [1.0, 0.0], root[1, 0] * full * np.array([1.0, 0.0])
            patterns, x, _, good = rotated(y, replace(model, H=H, Z=Z))
            whole, rest = np.zeros((10, 10)), np.zeros((10, 10))
            for k, t in enumerate(patterns.order):
                B, seen = np.zeros((2, 10)), np.flatnonzero(~np.isnan(y[t]))
                for i in range(10):
                    collapse.column(x, np.searchsorted(patterns.start, k, "right") - 1, i, B[:, i])
                inverse = np.zeros((10, 10))
                inverse[np.ix_(seen, seen)] = np.linalg.inv(H[np.ix_(seen, seen)])
                whole, rest = whole + inverse, rest + inverse - B.T @ B
            true = np.diag(rest).max() >= collapse.LEAST_LEFT * np.diag(whole).max()
            assert good and collapse.keeps_digits(x, patterns, np.ones(4)) == true
            assert true == expected or full


def test_what_is_known_of_a_series_may_be_missing_with_another():
    """Two series have nearly the same noise and tell much of it, unless one of them is missing."""
    _, model = hard("vague", 10)
    model = replace(model, Z=model.Z[[0, 0, *range(2, 10)]])
    H, n = np.eye(10), 2000
    H[0, 1] = H[1, 0] = np.sqrt(1 - 1e-5)
    y = np.zeros((n, 10))
    y[1:, 1] = np.nan
    for known, expected in ((y, False), (np.zeros((n, 10)), True)):
        patterns, x, _, good = rotated(known, replace(model, H=H))
        assert good and collapse.keeps_digits(x, patterns, np.ones(n)) == expected


# name: p, m, steps, whether H is full, share of gaps, arrays that vary
MORE = {
    "diagonal H, gaps": (24, 2, 12, False, 0.4, ()),
    "full H, gaps": (24, 3, 10, True, 0.4, ()),
    "full H, complete": (30, 1, 10, True, 0, ()),
    "Z and H vary": (24, 2, 8, True, 0.2, ("Z", "H")),
    "all vary": (24, 2, 8, False, 0.2, ("c", "d", "T", "Z", "R", "H", "Q")),
}
ALL, NONE = 7, 3  # directions that move all series, and none of them


def directions_for(model, k, seed=0):
    """Those of all arrays but y: each moves one or two series, one all of them, one none."""
    rng = np.random.default_rng(seed)
    found = {x: rng.standard_normal((k, *X.shape)) for x, X in model.asdict().items()}
    for q in range(k):
        seen = np.isin(np.arange(model.p), rng.choice(model.p, 1 + q % 2)) & (q != NONE)
        seen |= q == ALL
        found["d"][q][..., ~seen] = 0
        found["Z"][q][..., ~seen, :] = 0
        found["H"][q][..., ~(seen[:, None] & seen)] = 0
    return {
        x: (X + np.swapaxes(X, -1, -2)) / 2 if x in ("P0", "H", "Q") else X
        for x, X in found.items()
    }


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", MORE)
def test_second_derivatives(name, weights):
    """Directions of few series, in several rotations, and one of all series between them."""
    y, model, g = make(name, weights, MORE)
    assert compiled._door().collapses(y, model.m, True, load("tangents").WORTH_IT)
    directions = directions_for(model, 15)
    slopes, dy, found = hessian_vector(y, model, directions, weights=g, tol=0.0)
    others, other_dy, expected = hessian_vector(y, model, directions, "reference", g)
    assert relative_error(slopes, others) < 1e-12
    assert relative_error(dy, other_dy) < 1e-12
    assert (dy[:, np.isnan(y)] == 0).all()
    for x in NAMES:
        assert relative_error(getattr(found, x), getattr(expected, x)) < 1e-12, x
    second = hessian(y, model, directions, "reference", g)
    assert relative_error(hessian(y, model, directions, weights=g), second) < 1e-12
    diagonal = directions | {"H": directions["H"] * np.eye(model.p)}
    second = hessian(y, model, diagonal, "reference", g)
    assert relative_error(hessian(y, model, diagonal, weights=g), second) < 1e-12


def test_second_derivatives_with_a_singular_h():
    rng = np.random.default_rng(4)
    model = replace(StateSpace(**random_model(10, 24, rng=rng)), H=np.zeros((24, 24)))
    y, _ = simulate(6, rng, **model.asdict())
    y[:, 9:] = np.nan
    directions = directions_for(model, 4)
    found, expected = (hessian(y, model, directions, method) for method in ("fused", "reference"))
    assert relative_error(found, expected) < 1e-9


@pytest.mark.parametrize("name", HARD)
def test_digits_of_second_derivatives(name):
    y, model = hard(name, 30)
    directions = {x: X for x, X in directions_for(model, 4).items() if x in ("d", "Z", "H", "T")}
    true = true_hessian(y, model, directions)
    found, other = (hessian(y, model, directions, method) for method in ("fused", "reference"))
    error, known = relative_error(found, true), relative_error(other, true)
    assert error < max(1e-13, 10 * known), (error, known)


def test_every_interface():
    """PyTensor's Op and JAX call the same pass."""
    import jax
    import pytensor

    from helpers.kalman import kalman_loglike
    from helpers.kalman.jax import loglike as in_jax

    y, model, _ = make("full H, gaps")
    value, _, expected = loglike_and_grad(y, model)
    arrays = list(model.asdict().values())
    inputs = [pytensor.tensor.as_tensor(X).type() for X in arrays]
    total = kalman_loglike(y, *inputs).sum()
    function = pytensor.function(inputs, [total, pytensor.grad(total, inputs[7])])
    found, H_bar = function(*arrays)  # noqa: N806
    assert relative_error(found, value) < 1e-13
    assert relative_error(H_bar, expected.H) < 1e-12
    jax.config.update("jax_enable_x64", True)
    Z_bar = jax.grad(lambda *X: in_jax(y, *X).sum(), argnums=5)(*arrays)  # noqa: N806
    assert relative_error(np.asarray(Z_bar), expected.Z) < 1e-11
    assert relative_error(loglike(y, model), value) < 1e-13


def test_after_an_exact_diffuse_start():
    """A value alone is rotated too, and says the same of delta as one with a gradient."""
    y, model, _ = make("diagonal H, gaps", cases=MORE)
    y[3:5] = y[5:7]  # no step observes little
    _, a0, P0, c, _, T, Z, H, W = arrays_of(y, model)
    starts, given = np.vstack([a0, np.eye(2)]), (P0, T, Z, H, W, np.zeros((2, 2)))
    run = load("integrated").integrated
    alone, found = (
        run((y - model.d)[None], starts, c[None], *given, *[back] * 5, 0.0)
        for back in (False, True)
    )
    assert alone[-1][1] == found[-1][1] < len(y)
    for x, expected in zip(alone[1:4], found[1:4], strict=True):
        assert relative_error(x, expected) < 1e-12
    assert relative_error(diffuse.loglike(y, model, np.eye(2)), alone[1]) < 1e-13
    expected = diffuse.loglike(y, model, np.eye(2), method="reference")
    assert relative_error(alone[1], expected) < 1e-12


@pytest.mark.parametrize("name", MORE)
def test_outputs_of_so_many_series_that_they_are_rotated(name):
    y, model, _ = make(name, cases=MORE)
    outputs = load("outputs")
    assert outputs.collapses(y, model.m, True, outputs.WORTH_IT)
    found, expected = outputs.filter_outputs(*arrays_of(y, model)), kalman_filter(y, model).out
    for x, X, right in zip(FilterOutputs._fields, found, expected, strict=True):
        assert relative_error(X, right) < 1e-12, x


def test_series_of_a_panel():
    """Each is rotated alone where that takes less time than a pass that they share."""
    y, model, _ = make("diagonal H, gaps", cases=MORE)
    passes = load("panel")
    assert passes.go_alone(y, 2, 2, True) and not passes.go_alone(y, 2, 1000, True)
    Y = np.stack([y, y + 1, np.where(np.arange(24) < 9, np.nan, y)])
    l, dY, bars = panel.loglike_and_grad(Y, model)
    assert relative_error(panel.loglike(Y, model), l) < 1e-13
    values, ys, expected = zip(*(reference.loglike_and_grad(one, model) for one in Y), strict=True)
    assert relative_error(l, np.array(values)) < 1e-13
    assert relative_error(dY, np.array(ys)) < 1e-12
    for x in NAMES:
        total = sum(getattr(one, x) for one in expected)
        assert relative_error(getattr(bars, x), total) < 1e-12, x
    lost = replace(model, P0=-1e3 * model.P0)
    with pytest.raises(np.linalg.LinAlgError, match="step 0"):
        panel.loglike(Y, lost)


@pytest.mark.parametrize("name", ["diagonal H, gaps", "Z varies"])
def test_smoothed_states_and_draws(name):
    y, model, _ = make(name)
    normals = np.random.default_rng(0).standard_normal(
        (2, smoothing.normals_of_a_draw(len(y), model))
    )
    for of in (
        smoothing.means, smoothing.covariances,
        lambda *given, **how: smoothing.draw(*given, normals=normals, **how),
    ):  # fmt: skip
        assert relative_error(of(y, model), of(y, model, method="reference")) < 1e-11


def test_what_xla_calls_is_compiled_before(monkeypatch):
    """Within its call nothing is compiled: the rotation, and the sizes that it leads to."""
    import jax

    from helpers.kalman.jax import loglike as in_jax

    jax.config.update("jax_enable_x64", True)
    door, seen = compiled._door(), []
    known = door.compile_later
    monkeypatch.setattr(door, "compile_later", lambda *size: (seen.append(size), known(*size))[1])
    y, model, _ = make("diagonal H, gaps")
    jax.eval_shape(lambda *X: in_jax(y, *X), *model.asdict().values())
    assert {(0, door.WHOLE), (0, door.COLLAPSE), (2, 2), (2, 3)} <= set(seen)
