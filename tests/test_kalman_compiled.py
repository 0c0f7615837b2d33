"""The compiled pass: against the reference on every case, against 80 digits, and at its door.

What its text computes is tested without a compiler in test_kalman_twin.py; here: machine code.
"""

import ast
import platform
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from kalman_models import (
    CASES,
    NAMES_OF_CASES,
    REPEATING,
    exponential_smoothing,
    make,
    of_lower_rank,
    repeating,
    season,
)
from kalman_oracle import true_gradient
from numba import njit
from numba.core.errors import TypingError
from numba.core.runtime import _nrt_python as counts
from numba.core.runtime import rtsys
from statsmodels.tsa.statespace.sarimax import SARIMAX
from tiers import thorough

from helpers.checks import relative_error
from helpers.datasets import local_level_arrays, nile, random_model, simulate
from helpers.kalman import (
    StateSpace,
    compiled,
    diffuse,
    loglike,
    loglike_and_grad,
    panel,
    reference,
)
from helpers.kalman.compiled import door, outputs, pulled_outputs, tiles
from helpers.kalman.compiled.inputs import NonZeros, listed
from helpers.kalman.hessian import hessian
from helpers.kalman.recursions import TOLERANCE
from helpers.kalman.reference import FilterOutputs, kalman_filter, reverse
from helpers.kalman.smoothing import means
from helpers.statespace import STATIC

ALL = (True, True, True, True)


def over_time(model: StateSpace) -> list[np.ndarray]:
    """a0, P0, c, d, T, Z, H, W with an axis for time."""
    return compiled.arrays_of(np.zeros((model.n or 1, model.p)), model)[1:]


def assert_same(found, expected, rtol):
    """Value, dy and gradients of two engines."""
    assert abs(found[0] / expected[0] - 1) < rtol
    pairs = {"y": (found[1], expected[1])}
    pairs |= {x: (getattr(found[2], x), X) for x, X in expected[2].asdict().items()}
    for name, (G, X) in pairs.items():
        assert G.shape == X.shape
        assert relative_error(G, X) < rtol if X.any() else np.abs(G).max() < rtol, name


@pytest.mark.parametrize("name", NAMES_OF_CASES)
@pytest.mark.parametrize("tol", [0.0, TOLERANCE])
def test_both_methods_agree(name, tol):
    y, model = make(name)
    expected = loglike_and_grad(y, model, method="reference")
    # The gradient of H on the Nile is near zero at these values: its terms cancel.
    assert_same(loglike_and_grad(y, model, tol=tol), expected, 1e-9 if name == "Nile" else 1e-11)
    assert abs(loglike(y, model, tol=tol) / expected[0] - 1) < 1e-12


@pytest.mark.parametrize("name", [name for name in CASES if name != "one step"])
def test_unequal_weights(name):
    y, model = make(name)
    weights = np.random.default_rng(1).standard_normal(len(y))
    found = compiled.loglike_and_grad(y, model, weights=weights)
    assert_same(found, reference.loglike_and_grad(y, model, weights), 1e-11)


def test_equal_weights_other_than_one():
    y, model = make("gaps")
    weights = np.full(len(y), -2.5)
    found = compiled.loglike_and_grad(y, model, weights=weights)
    assert_same(found, reference.loglike_and_grad(y, model, weights), 1e-12)


@pytest.mark.parametrize("m", [3, 4, 5, 8, 9, 17, 33])
@pytest.mark.parametrize("p", [1, 2, 4, 9])
@pytest.mark.parametrize("r", [1, 9])
def test_sizes_around_whole_vectors(m, p, r):
    rng = np.random.default_rng(m * 100 + p * 10 + r)
    arrays = random_model(m=m, p=p, r=r, rng=rng)
    y, _ = simulate(15, rng, **arrays)
    y[3, 0] = np.nan
    model = StateSpace(**arrays)
    assert_same(compiled.loglike_and_grad(y, model), reference.loglike_and_grad(y, model), 1e-10)


@pytest.mark.parametrize("period", [4, 12, 18, 26, 39])
def test_a_transition_that_is_nearly_empty(period):
    model = season(period)
    y, _ = simulate(60, np.random.default_rng(0), **model.asdict())
    y[20:23] = np.nan
    assert_same(compiled.loglike_and_grad(y, model), reference.loglike_and_grad(y, model), 1e-10)


# Vague starts, levels and variances far apart, against 80 digits.
HARD = {
    f"m = {m}, p = {p}, kappa = {kappa:.0e}{', level' * level}": (m, p, kappa, level)
    for m, p in ((1, 1), (3, 2), (5, 2), (5, 3), (3, 1), (2, 4))
    for kappa, level in ((1e7, 0), (1e10, 0), (1e10, 1))
}


@cache  # for both methods: the digits take seconds, and a method does not
def hard(case):
    """(y, model, truth)"""
    m, p, kappa, level = HARD[case]
    arrays = random_model(m, p, 2, rng=7)
    y, _ = simulate(6, 7, **arrays)
    y[1, 0] = np.nan
    y = y + level * np.sqrt(kappa)
    model = StateSpace(**(arrays | {"P0": kappa * np.eye(m)}))
    return y, model, true_gradient(y, model)


@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("method", ["fused", "reference"])
def test_vague_start_against_eighty_digits(case, method):
    level = HARD[case][-1]
    y, model, truth = hard(case)
    value, dy, gradients = loglike_and_grad(y, model, method=method)
    assert abs(value / truth["l"] - 1) < (1e-12 if level else 1e-13)
    # With a level eps |y| / sigma remains, times what the first steps make of a: a filter moves by
    # up to 1.1e-9 if y does by its last bit, and by 1.4e-9 with sums in another order.
    bound = 3e-9 if level else 3e-11
    for name, X in (gradients.asdict() | {"y": dy}).items():
        assert relative_error(X, truth[name]) < bound, name


def test_vague_start_with_weights():
    arrays = random_model(5, 2, 2, rng=3)
    y, _ = simulate(7, 3, **arrays)
    model = StateSpace(**(arrays | {"P0": 1e9 * np.eye(5)}))
    weights = np.random.default_rng(0).normal(size=7)
    truth = true_gradient(y, model, weights=weights)
    for engine in (compiled, reference):
        _, dy, gradients = engine.loglike_and_grad(y, model, weights=weights)
        for name, X in (gradients.asdict() | {"y": dy}).items():
            assert relative_error(X, truth[name]) < 1e-11, (engine, name)


def difficult():
    """(y, model, bound, names) of starts and scales that are hard in other ways."""
    y = nile().y[:12]
    yield "Nile, P0 = 1e15", y, StateSpace(**local_level_arrays(P0=1e15)), 1e-11, ("P0", "H", "Q")
    arrays = random_model(3, 2, 2, rng=1)
    apart = arrays | {"H": np.diag([1, 1e-8]), "Q": np.diag([1e-8, 1])}
    y, _ = simulate(12, 1, **apart)
    yield "variances 1e8 apart", y, StateSpace(**apart), 1e-11, None
    yield "a level of a million", y + 1e6, StateSpace(**apart), 1e-11, None
    gap = random_model(2, 2, 2, rng=1, radius=1.0)
    y, _ = simulate(310, 1, **gap)
    y[4:304] = np.nan
    model = StateSpace(**(gap | {"P0": 1e7 * np.eye(2)}))
    yield "a gap of 300", y, model, 1e-11, ("T", "P0", "H")
    y[:304] = np.nan
    yield "a start without data", y[290:], model, 1e-11, ("T", "Z", "P0")
    # P0 is vague, beside the noise, in a state that only repeats another.
    y, Q = np.random.default_rng(0).normal(size=(6, 3)), np.diag([1.0, 0])
    Z = np.array([[1, 1], [1, -0.5], [0.3, 0.8]])
    for small, P0 in ((1.0, np.diag([1, 1e10])), (1e-6, np.eye(2))):
        T, units = [[0.5, 0.3 / small], [small, 0]], [1, 1 / small]
        lag = StateSpace(np.zeros(2), P0, np.zeros(2), np.zeros(3), T=T, Z=Z * units, R=np.eye(2),
                         H=np.eye(3), Q=Q)  # fmt: skip
        yield f"vague in a lag, {small:.0e}", y, lag, 1e-12, None
    wide = random_model(2, 5, 2, rng=1) | {"H": 1e-6 * np.eye(5)}
    y, _ = simulate(6, 1, **wide)
    yield "p > m, small H", y, StateSpace(**wide), 1e-7, None


@pytest.mark.parametrize("case", difficult(), ids=lambda case: case[0])
def test_hard_scales_against_eighty_digits(case):
    _, y, model, bound, names = case
    truth = true_gradient(y, model, names=names)
    for method in ("fused", "reference"):
        value, dy, gradients = loglike_and_grad(y, model, method=method)
        assert abs(value / truth["l"] - 1) < max(bound, 1e-12), method
        for name in names or ("y", *gradients._fields):
            X = dy if name == "y" else getattr(gradients, name)
            assert relative_error(X, truth[name]) < bound, (method, name)


def test_roots_become_narrow_again():
    """A vague start that lasts: roots grow by a column for each shock, and are cut back."""
    arrays = random_model(2, 1, 2, rng=4, radius=1.0)
    y, _ = simulate(30, 4, **arrays)
    y[:24] = np.nan
    model = StateSpace(**(arrays | {"P0": 1e9 * np.eye(2)}))
    steps = reference._filter_in_parts(y, model)[1][0]
    assert any(len(step.narrow.top) for step in steps)
    report = door.loglike_and_grad(y, *over_time(model), np.ones(30), *ALL, 0.0)[3]
    assert report[1] == len(steps) > 20
    truth = true_gradient(y, model, names=["T", "Z", "P0"])
    _, _, gradients = loglike_and_grad(y, model)
    for name in ("T", "Z", "P0"):
        assert relative_error(getattr(gradients, name), truth[name]) < 1e-11, name


def test_what_is_rounding_is_not_owed_to_a_vague_start():
    """Lags that repeat what was seen without noise are known: the rest is an ordinary pass."""
    y = np.random.default_rng(9).normal(size=16).cumsum()
    mod = SARIMAX(y, order=(1, 0, 0), seasonal_order=(0, 1, 1, 6))
    mod.loglike([0.5, -0.4, 1.2])
    names = {"d": "obs_intercept", "c": "state_intercept", "T": "transition", "Z": "design",
             "R": "selection", "H": "obs_cov", "Q": "state_cov"}  # fmt: skip
    arrays = {x: mod.ssm[name] for x, name in names.items()}
    P0 = mod.ssm.filter().predicted_state_cov[:, :, 0]
    assert P0.max() >= 1e6 and mod.k_states == 13
    arrays["d"], arrays["c"] = np.zeros(1), np.zeros(13)
    model, y = StateSpace(a0=np.zeros(13), P0=P0, **arrays), y[:, np.newaxis]
    report = door.loglike_and_grad(y, *over_time(model), np.ones(16), *ALL, 0.0)[3]
    assert len(reference._filter_in_parts(y, model)[1][0]) == report[1] == 6  # a season, not two
    names = ["T", "Z", "Q"]
    truth = true_gradient(y, model, names=names)
    for method in ("fused", "reference"):
        _, _, gradients = loglike_and_grad(y, model, method=method)
        for name in names:
            assert relative_error(getattr(gradients, name), truth[name]) < 1e-11, (method, name)


def test_steady_stretches():
    rng = np.random.default_rng(5)
    arrays = random_model(m=4, p=2, r=2, rng=rng)
    y, _ = simulate(600, rng, **arrays)
    y[200, 0] = y[590] = np.nan
    y[400:500, 1] = np.nan
    model = StateSpace(**arrays)
    report = door.loglike_and_grad(y, *over_time(model), np.ones(600), *ALL, TOLERANCE)[3]
    assert report[2] < 200
    assert_same(compiled.loglike_and_grad(y, model), reference.loglike_and_grad(y, model), 1e-10)


@pytest.mark.parametrize("tol", [1e-4, 1e-7, 1e-10])
def test_tolerance_bounds_the_steady_covariance(tol):
    """At the first steady step it is within tol of the fixed point, in units of its own."""
    rng = np.random.default_rng(2)
    for radius in (0.5, 0.9, 0.99):
        arrays = random_model(m=4, p=1, r=2, rng=rng, radius=radius)
        y, _ = simulate(2000, rng, **arrays)
        model = StateSpace(**arrays)
        k = door.loglike_and_grad(y, *over_time(model), np.ones(2000), *ALL, tol)[3][2]
        assert k < 2000
        P = kalman_filter(y, model).out.P_pred
        scale = np.sqrt(np.outer(np.diag(P[-1]), np.diag(P[-1])))
        assert (np.abs(P[k] - P[-1]) / scale).max() < 2 * tol


@pytest.mark.parametrize("kappa", [1.0, 1e6])
def test_a_burn_in_leaves_the_steady_state(kappa):
    """Weights of zero in front, as statsmodels has them for a vague start: the others are equal."""
    arrays = random_model(m=6, p=2, r=2, rng=5, radius=0.5)
    model = StateSpace(**(arrays | {"P0": kappa * arrays["P0"]}))
    y = simulate(300, 5, **arrays)[0]
    for weights in (np.repeat([0.0, 1.0], [8, 292]), np.repeat([1.0, 0.5], [150, 150])):
        found = door.loglike_and_grad(y, *over_time(model), weights, *ALL, 1e-13)
        assert np.flatnonzero(weights == weights[-1])[0] < found[3][2] < 300
        value, dy, bars = compiled.loglike_and_grad(y, model, weights=weights)
        assert_same((value, dy, bars), reference.loglike_and_grad(y, model, weights), 1e-11)


def test_repeated_calls_agree_to_the_bit():
    y, model = make("long")
    first = compiled.loglike_and_grad(y, model)
    assert first[0] == compiled.loglike(y, model)
    for _ in range(3):
        again = compiled.loglike_and_grad(y, model)
        assert all((a == b).all() for a, b in zip(first[2], again[2], strict=True))


@pytest.mark.parametrize("kappa", [1.0, 1e6])
def test_a_series_whose_gains_have_a_block_of_their_own(kappa):
    """Of 34 MB; under the vague start its first steps are taken in roots."""
    arrays = random_model(33, 2, 2, rng=1, radius=0.5)
    y = np.random.default_rng(1).standard_normal((2700, 2))
    model = StateSpace(**(arrays | {"P0": kappa * arrays["P0"]}))
    found = compiled.loglike_and_grad(y, model)
    # The readable loop loses eps kappa.
    assert_same(found, reference.loglike_and_grad(y, model), 1e-10 * kappa**0.5)
    assert found[0] == pytest.approx(compiled.loglike(y, model), rel=1e-12)


def test_few_states_whose_gains_have_a_block_of_their_own():
    """As the mean of two runs whose weights differ at one step: they take another pass."""
    model = StateSpace(**random_model(4, 4, 4, rng=1, radius=0.5))
    y = np.random.default_rng(1).standard_normal((45_000, 4))
    value, dy, G = compiled.loglike_and_grad(y, model)
    weights, others = np.ones(len(y)), []
    for first in (0.0, 2.0):
        weights[0] = first
        others.append(compiled.loglike_and_grad(y, model, weights=weights))
    (low, dy_low, G_low), (high, dy_high, G_high) = others
    assert value == pytest.approx((low + high) / 2, rel=1e-12)
    assert relative_error(dy, (dy_low + dy_high) / 2) < 1e-11
    for x, X in G.asdict().items():
        assert relative_error(X, (getattr(G_low, x) + getattr(G_high, x)) / 2) < 1e-10, x


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries keep other blocks")
@pytest.mark.parametrize(("m", "p", "n"), [(1, 1, 100_000), (4, 4, 50_000), (10, 5, 16_000)])
def test_a_long_series_is_not_given_new_pages_at_each_call(m, p, n):
    """What it needs for its gains is more than C's library keeps, and as good as untouched."""
    model = StateSpace(**random_model(m, p, 1, rng=1, radius=0.5))
    y = np.random.default_rng(1).standard_normal((n, p))
    direction = {"T": np.ones((1, m, m))}

    def pages(call):
        for _ in range(3):
            call()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        call()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    per_page = resource.getpagesize() // 8
    assert pages(lambda: compiled.loglike_and_grad(y, model)) < n * (m + p) / per_page / 2
    assert pages(lambda: hessian(y, model, direction)) < n * (m + p) / per_page / 2


@pytest.mark.parametrize("name", ["gaps", "time-varying with gaps", "H = 0, singular P0 and Q"])
def test_all_outputs_and_any_cotangents(name):
    y, model = make(name)
    filtered = kalman_filter(y, model)
    found = outputs.filter_outputs(y, *over_time(model))
    for x, X, expected in zip(FilterOutputs._fields, found, filtered.out, strict=True):
        assert relative_error(X, expected) < 1e-12, x
    rng = np.random.default_rng(3)
    bar = FilterOutputs(*(rng.standard_normal(X.shape) for X in filtered.out))
    out, y_bar = pulled_outputs.reverse(y, *over_time(model), *bar)
    dy, expected = reverse(model, filtered, bar)
    assert relative_error(y_bar, dy) < 1e-10
    for x in ("a0", "P0", "c", "d", "T", "Z", "H"):
        G = getattr(out, x)
        G = G if x in (*STATIC, *model.time_varying) else G[0]
        assert relative_error(G, getattr(expected, x)) < 1e-10, x


# At the door.


def layouts(X):
    """The same numbers in other memory orders and types."""
    yield np.asfortranarray(X)
    yield np.repeat(X, 2, axis=-1)[..., ::2]
    yield X[::-1].copy()[::-1]
    yield X.astype(object).astype(float)


@njit
def from_compiled_code(y, a0, P0, c, d, T, Z, H, W, l_bar):
    """As graphs and XLA call the pass."""
    return door.linked_loglike_and_grad(
        (y, a0, P0, c, d, T, Z, H, W, l_bar, True, True, True, True, 0.0)
    )


def test_any_layout_gives_the_same_answer():
    y, model = make("gaps")
    arrays = [y, *over_time(model), np.linspace(1, 2, len(y))]
    l, out, y_bar, _ = door.loglike_and_grad(*arrays, *ALL, 0.0)
    expected = l, *out, y_bar
    # All at once: each kind of arrays is compiled for.
    for others in zip(*map(layouts, arrays), strict=True):
        l, out, y_bar, _ = from_compiled_code(*others)
        for found, right in zip((l, *out, y_bar), expected, strict=True):
            assert (found == right).all()
    arrays = arrays[:-1]
    expected = door.loglike(*arrays, 0.0)
    turned = [X[::-1][::-1] for X in map(np.asfortranarray, arrays)]
    assert (door.loglike(*turned, 0.0) == expected).all()
    for function in (door.loglike, door.loglike_and_grad):
        assert len(function.signatures) == 1  # Python takes what graphs do
    rounded = StateSpace(**{x: X.astype(np.float32) for x, X in model.asdict().items()})
    exact = StateSpace(**{x: X.astype(float) for x, X in rounded.asdict().items()})
    y = y.astype(np.float32)  # float64 at the door, whatever comes; W is rounded before
    found, expected = compiled.loglike(y, rounded), compiled.loglike(y.astype(float), exact)
    assert relative_error(found, expected) < 1e-6


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (0, (0, 2), "empty"), (2, (1, 3), "P0"), (3, (1, 4), "c does not"),
        (4, (1, 3), "d does not"),
        (5, (1, 3, 4), "T does not"), (6, (1, 1, 3), "Z does not"), (7, (1, 3, 3), "H does not"),
        (8, (1, 2, 2), "R Q R'"), (3, (7, 3), "c or d varies"), (6, (7, 2, 3), "varies over time"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit(index, shape, message):
    y, model = make("gaps")
    arrays = [y, *over_time(model)]
    arrays[index] = np.zeros(shape)
    with pytest.raises(ValueError, match=message):
        door.loglike(*arrays, 0.0)


def test_compiled_code_calls_the_pass_and_does_not_carry_it():
    """Errors come through, and what is no argument of the pass is refused when it is compiled."""
    y, model = make("gaps")
    arrays = [y, *over_time(model), np.ones(len(y))]
    from_compiled_code(*arrays)
    text = "\n".join(from_compiled_code.inspect_llvm().values())
    callee = door.loglike_and_grad.py_func.__qualname__
    lines = [x for x in text.splitlines() if callee in x and x.startswith(("declare", "define"))]
    assert lines and all(x.startswith("declare") for x in lines)
    for k, shape, message in ((2, (3, 2), "P0 does not have shape"), (9, (3,), "l_bar does not")):
        for _ in range(3):
            with pytest.raises(ValueError, match=message):
                from_compiled_code(*arrays[:k], np.ones(shape), *arrays[k + 1 :])
    counts.memsys_enable_stats()
    before = rtsys.get_allocation_stats()
    for _ in range(20):
        from_compiled_code(*arrays)
    after = rtsys.get_allocation_stats()
    counts.memsys_disable_stats()
    assert after.alloc - before.alloc == after.free - before.free > 0
    assert after.mi_alloc - before.mi_alloc == after.mi_free - before.mi_free > 0
    with pytest.raises(TypingError, match="loglike_and_grad.* takes"):
        from_compiled_code(*arrays[:2], np.ones(3), *arrays[3:])
    with pytest.raises(TypingError, match="loglike_and_grad.* takes"):
        from_compiled_code(arrays[0].astype(np.float32), *arrays[1:])


def test_bad_input_in_the_users_terms():
    y, model = make("two shocks")
    with pytest.raises(ValueError, match=r"y has shape \(15,\), expected \(n, p\)"):
        loglike(y[:, 0], model)
    with pytest.raises(ValueError, match="masked array"):
        loglike(np.ma.masked_invalid(y), model)
    with pytest.raises(ValueError, match="array of object; NaN marks a gap"):
        loglike([[1.0, None]] * 3, model)
    with pytest.raises(ValueError, match="method is 'fast', expected 'fused' or 'reference'"):
        loglike_and_grad(y, model, method="fast")
    for tol in (-1, None, "small", [1e-9], 1j):
        for call in (loglike, loglike_and_grad, compiled.loglike, compiled.loglike_and_grad):
            with pytest.raises(ValueError, match=re.escape(f"tol is {tol!r}, expected")):
                call(y, model, tol=tol)
    directions = {"H": np.eye(model.p)[None]}
    for method in ("fused", "reference"):
        for call in (
            partial(loglike, y), partial(loglike_and_grad, y), partial(means, y),
            partial(panel.loglike, y[None]), partial(panel.loglike_and_grad, y[None]),
            partial(panel.loglike, y[None], R=model.R[None]),
            partial(diffuse.loglike, y, A=np.eye(model.m)),
            partial(diffuse.loglike_and_grad, y, A=np.eye(model.m)),
            partial(hessian, y, directions=directions),
        ):  # fmt: skip
            with pytest.raises(ValueError, match="tol is -1, expected a finite number that is not"):
                call(model=model, method=method, tol=-1)
    for call in (loglike, loglike_and_grad, kalman_filter, hessian):
        with pytest.raises(TypeError, match=r"of type dict, expected a StateSpace: StateSpace\("):
            call(y, model.asdict(), *[{}] * (call is hessian))
    with pytest.raises(ValueError, match=r"weights has shape \(3,\), expected \(n,\) = \(15,\)"):
        compiled.loglike_and_grad(y, model, weights=np.ones(3))
    negative = StateSpace(**(model.asdict() | {"H": -100 * model.H}))
    for call in (loglike, loglike_and_grad):
        with pytest.raises(np.linalg.LinAlgError, match=r"not positive definite at step 0"):
            call(y, negative)
    l, out, y_bar, _ = door.loglike_and_grad(y, *over_time(negative), np.ones(15), *ALL, 0.0)
    assert all(np.isnan(X).all() for X in (l, *out, y_bar))


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
def test_an_F_that_is_singular_up_to_rounding_is_refused(p):  # noqa: N802
    """Of some no pivot is negative, and rounding alone would be answered."""
    factored = 0
    for seed in range(20):
        y, model = of_lower_rank(seed, p, p - 1)
        try:
            np.linalg.cholesky(model.Z @ model.P0 @ model.Z.T + model.H)
            factored += 1
        except np.linalg.LinAlgError:
            pass
        for call in (loglike, loglike_and_grad):
            for method in ("fused", "reference"):
                with pytest.raises(np.linalg.LinAlgError, match=r"step 0 .* or by the others"):
                    call(y, model, method=method)
        with pytest.raises(np.linalg.LinAlgError):
            hessian(y, model, {"H": np.eye(p)[None]})
        less = replace(model, H=model.H + 1e-11 * np.eye(p))  # what is small is no rounding
        for method in ("fused", "reference"):
            assert np.isfinite(loglike(y, less, method=method))
    assert factored > 0


@pytest.mark.parametrize("kappa", [1e7, 1e16, 1e20])
@pytest.mark.parametrize(("m", "p"), [(2, 3), (3, 6), (6, 7)])
def test_a_start_so_vague_that_F_is_singular(m, p, kappa):  # noqa: N802
    """As many series as states have an F that rounds to a singular one; not so in roots."""
    rng = np.random.default_rng(m)
    model = replace(StateSpace(**random_model(m, p, m, rng=1)), P0=kappa * np.eye(m))
    y = rng.standard_normal((10, p))
    truth = true_gradient(y, model, names := ["T", "Z", "H", "Q"])
    for method in ("fused", "reference"):
        _, _, gradients = loglike_and_grad(y, model, method=method)
        for x in names:
            assert relative_error(getattr(gradients, x), truth[x]) < 1e-12, (method, x)


def test_a_known_start_takes_no_roots():
    y, given = exponential_smoothing(3)
    before = np.diagonal(kalman_filter(y, given).out.P_pred, axis1=1, axis2=2)
    assert (before[1:20] < 1e-5 * np.maximum.accumulate(before)[:19]).any()  # it looks vague
    assert not reference._filter_in_parts(y, given)[1][0]
    _, _, _, report = door.loglike_and_grad(y, *over_time(given), np.ones(60), *ALL, 0.0)
    assert report[1] == 0
    found, expected = (loglike_and_grad(y, given, method=x) for x in ("fused", "reference"))
    assert relative_error(found[0], expected[0]) < 1e-12
    assert relative_error(found[2].T, expected[2].T) < 1e-9


@pytest.mark.parametrize("jitter", [0, 1e-8])
@pytest.mark.parametrize("what", [*REPEATING[:2], thorough(REPEATING[2])])
def test_states_that_repeat_others_take_no_roots(what, jitter):
    """Their variance falls to nothing though P0 is not vague; where it is, that is still seen."""
    model = repeating(what)
    n, m = 16, model.m
    if jitter:
        root = np.linalg.cholesky(model.R @ model.Q @ model.R.T + jitter * np.eye(m))
        model = replace(model, R=root, Q=np.eye(m), H=jitter * np.eye(model.p))
    y, _ = simulate(n, 4, **model.asdict())
    variances = np.diagonal(kalman_filter(y, model).out.P_pred, axis1=1, axis2=2)
    assert (variances[1:] < 1e-5 * variances[0]).any()  # it looks vague
    vague = replace(model, P0=1e7 * np.eye(m))
    for given, begins in ((model, False), (vague, True)):
        assert bool(reference._filter_in_parts(y, given)[1][0]) == begins
        report = door.loglike_and_grad(y, *over_time(given), np.ones(n), *ALL, 0.0)[3]
        assert (report[1] > 0) == begins
        names = ["a0", "T", "Z", "H"]
        truth = true_gradient(y, given, names=names)
        for method in ("fused", "reference"):
            _, _, gradients = loglike_and_grad(y, given, method=method)
            for name in names:
                assert relative_error(getattr(gradients, name), truth[name]) < 1e-10, (method, name)


def test_a_gradient_that_overflows_is_not_the_models_fault():
    y, model = make("two shocks")
    for method in ("fused", "reference"):
        with np.errstate(over="ignore", invalid="ignore"):
            _, _, gradients = loglike_and_grad(1e160 * y, model, method=method)
        assert not np.isfinite(gradients.P0).all()


OUT_OF_MEMORY = """
import resource, numpy as np
from helpers.datasets import random_model
from helpers.kalman import StateSpace, compiled
arrays = random_model(60, 1, rng=0)
model = StateSpace(**arrays)
compiled.warmup(progress=False)
y = np.zeros((200_000, 1))
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
try:
    print(compiled.loglike_and_grad(y, model)[0])
except MemoryError as error:
    print("MemoryError", error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits")
def test_memory_that_runs_out_is_an_error():
    found = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith("MemoryError"), found.stdout + found.stderr
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != 2 << 30


@pytest.mark.parametrize("size", [(2, 2), (5, 3)])
def test_what_stands_at_a_gap_does_not_count(size):
    """Regressors of a year in which nothing is observed may be NaN, whatever the size."""
    m, p = size
    rng, n = np.random.default_rng(4), 12
    arrays = random_model(m, p, 2, rng)
    y, _ = simulate(n, rng, **arrays)
    y[5, 1], y[8] = np.nan, np.nan
    whole = over_time(StateSpace(**arrays))
    whole[3], whole[5], whole[6] = (np.repeat(whole[k], n, axis=0) for k in (3, 5, 6))  # d, Z, H
    expected = door.loglike_and_grad(y, *whole, np.ones(n), *ALL, 0.0)
    at_gaps = np.isnan(y)
    whole[3][at_gaps], whole[5][at_gaps], whole[6][at_gaps] = np.nan, np.nan, np.nan
    np.swapaxes(whole[6], 1, 2)[at_gaps] = np.nan
    found = door.loglike_and_grad(y, *whole, np.ones(n), *ALL, 0.0)
    assert np.array_equal(found[0], expected[0]) and np.array_equal(found[2], expected[2])
    for X, A in zip(found[1], expected[1], strict=True):
        assert np.array_equal(X, A)


NOT_COMPILED = """
import numpy as np
from helpers.kalman.compiled import building
door, load = building.load("door"), building.load
def fails(name, announce=None):
    if name == "roots":
        raise OSError("no space left on device")
    return load(name, announce)
building.load = fails
I = np.eye(5)
try:
    door.loglike(np.ones((9, 1)), I[0], 1e12 * I, I[:1], I[:1, :1], I[None] / 2, I[None, :1],
                 I[None, :1, :1], I[None], 0.0)
except RuntimeError as error:
    print("RuntimeError:", error)
"""


def test_a_pass_that_cannot_be_compiled_is_an_error():
    """The reason is told; what Python raises must not come back to compiled code as an address."""
    found = subprocess.run([sys.executable, "-c", NOT_COMPILED], capture_output=True, text=True)
    assert found.stdout.startswith("RuntimeError: a pass was not compiled")
    assert "no space left on device" in found.stderr


def test_every_compiled_source_is_in_the_name_on_disk(tmp_path):
    """Editing any line of what is compiled changes the name under which machine code is kept."""
    folder = Path(compiled.__file__).parents[1]
    copy = tmp_path / "kalman"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
    other = "__init__.py", "building.py", "show.py"  # nothing in them is compiled
    files = [path for path in copy.glob("compiled/*.py") if path.name not in other]
    files += [copy / "recursions.py", copy / "square_root.py", copy / "tangents.py"]
    assert len(files) > 10
    before = door.source_digest(copy / "compiled")
    assert before == door.DIGEST
    for path in files:
        text = path.read_text()
        path.write_text(text + "\n# another line\n")
        assert door.source_digest(copy / "compiled") != before, path.name
        path.write_text(text)
    (copy / "compiled" / "new.py").write_text("")
    assert door.source_digest(copy / "compiled") != before
    for function in (door.loglike, door.loglike_and_grad, outputs.filter_outputs):
        assert function.py_func.__qualname__.endswith(before)


# The machine code of the tiles, against the Python that stands for it.


@njit(error_model="numpy")
def machine_product(w, out, alpha, A, B, C, rows, inner, cols, lower):
    tiles.product(w.ctypes.data, out, alpha, A, B, C, rows, inner, cols, lower)


def test_what_only_compiled_code_calls_has_no_machine_code():
    def square(x):
        return x * x

    def has_machine_code(options):
        part = njit(**options)(square)
        whole = njit(lambda x: part(x) + 1.0)
        assert whole(3.0) == 10.0
        [found] = part.overloads.values()
        return found.library.get_pointer_to_function(found.fndesc.llvm_func_name) != 0

    assert not has_machine_code(tiles.PART | {"no_cpython_wrapper": True})
    assert has_machine_code({})  # as Numba does it


@njit(error_model="numpy")
def machine_rows(w, out, A, B, C, index, start, size):
    at = w.ctypes.data
    tiles.row_product(at, out.at, 2.0, A.at, B, C.at, size, size)
    found = listed(NonZeros(start, index))
    tiles.sparse_product(at, tiles.below(out, size), A, found, B, C, size, size)
    tiles.transpose(at, tiles.below(out, 2 * size), B, size, size)
    more = tiles.below(out, 3 * size)
    rest = tiles.below(out, 4 * size)
    tiles.sparse_product_updated(at, more, rest, A, found, B, -0.3, B.at, C, size, size)
    tiles.sparse_product_transposed(at, out, rest, A, found, B, C, size, size)
    tiles.rank_two(at, rest, A.at, B.at, B, size)
    tiles.row_dots(at, more.at, -0.7, A.at, B, C.at, size, size)
    tiles.symmetrize(at, C, size)
    tiles.axpy(at, A.at, 0.5, B.at, A.at, size)
    return tiles.dot(at, B.at, A.at, size), tiles.largest_change(at, A.at, B.at, C.at, size)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 7, 9])
def test_machine_code_of_products(rows):
    rng = np.random.default_rng(rows)
    for inner in (1, 3, 8):
        for cols in (1, 4, 5, 9, 13, 17):
            for lower in (False, True):
                w = np.zeros(3000)
                w[: 4 * 28 * 20] = rng.normal(size=4 * 28 * 20)
                A, B, C, out = (tiles.Mat(560 * k, 20, 1) for k in range(4))
                w[B.at : B.at + 560].reshape(28, 20)[:, cols:] = 0
                twin = tiles.Memory(len(w))
                twin.data[:] = w
                machine_product(w, out, -0.7, A, B, C, rows, inner, cols, lower)
                tiles.product(twin, out, -0.7, A, B, C, rows, inner, cols, lower)
                assert np.abs(w - twin.data).max() < 1e-13


@pytest.mark.parametrize("size", [1, 3, 4, 7, 8, 9, 17])
def test_machine_code_of_helpers(size):
    rng = np.random.default_rng(size)
    w = np.zeros(6000)
    A, B, C, out = (tiles.Mat(1000 * k, 20, 1) for k in range(4))
    for X in (A, B, C):
        w[X.at : X.at + 400].reshape(20, 20)[:size, :size] = rng.normal(size=(size, size))
    start, index = np.arange(size + 1), np.arange(size)[::-1].copy()
    twin = tiles.Memory(len(w))
    twin.data[:] = w
    found = machine_rows(w, out, A, B, C, index, start, size)
    tiles.row_product(twin, out.at, 2.0, A.at, B, C.at, size, size)
    entries = listed(NonZeros(start, index))
    tiles.sparse_product(twin, tiles.below(out, size), A, entries, B, C, size, size)
    tiles.transpose(twin, tiles.below(out, 2 * size), B, size, size)
    more = tiles.below(out, 3 * size)
    rest = tiles.below(out, 4 * size)
    tiles.sparse_product_updated(twin, more, rest, A, entries, B, -0.3, B.at, C, size, size)
    tiles.sparse_product_transposed(twin, out, rest, A, entries, B, C, size, size)
    tiles.rank_two(twin, rest, A.at, B.at, B, size)
    tiles.row_dots(twin, more.at, -0.7, A.at, B, C.at, size, size)
    tiles.symmetrize(twin, C, size)
    tiles.axpy(twin, A.at, 0.5, B.at, A.at, size)
    largest = tiles.largest_change(twin, A.at, B.at, C.at, size)
    assert found == pytest.approx((tiles.dot(twin, B.at, A.at, size), largest))
    assert np.abs(w - twin.data).max() < 1e-13


# Functions that find out where arrays lie, and of how many of their arguments.
TOLD_BY_PLACES = {"indices_in": 1, "distance": 2}


def freed_too_early(text: str) -> list[str]:
    """A function's own arrays that it names for the last time where it takes their address."""
    found = []
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        last, addresses, own = {}, set(), set()
        for node in ast.walk(function):
            if isinstance(node, ast.Name):
                place = node.lineno, node.col_offset
                last[node.id] = max(last.get(node.id, place), place)
                if isinstance(node.ctx, ast.Store):
                    own.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node).endswith(".ctypes.data"):
                addresses.add((node.lineno, node.col_offset))
            elif isinstance(node, ast.Call):
                rooms = node.args[: TOLD_BY_PLACES.get(ast.unparse(node.func), 0)]
                addresses |= {(room.lineno, room.col_offset) for room in rooms}
        found += [f"{function.name}: {name}" for name in sorted(own) if last[name] in addresses]
    return found


def test_no_array_is_freed_while_its_address_is_in_use():
    """Compiled code frees an array of its own after the last line that names it.

    Then what was done at its address is done in memory that belongs to others.
    """
    early = "def f():\n    x = np.empty(3)\n    where = x.ctypes.data\n    work(where)\n"
    assert freed_too_early(early) == ["f: x"]
    assert freed_too_early(early + "    x[0] = 0.0\n") == []
    assert freed_too_early("def f():\n    x = np.empty(3)\n    work(distance(w, x))\n") == ["f: x"]
    folder = Path(compiled.__file__).parent
    for path in folder.glob("*.py"):
        assert freed_too_early(path.read_text()) == [], path.name
