"""The filter in JAX: under JAX's own transformations, and in PyTensor's JAX mode."""

import ctypes
import importlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from kalman_models import NAMES_OF_CASES, make
from kalman_oracle import true_gradient
from pytensor.graph.replace import vectorize_graph
from tiers import thorough

from helpers.checks import complex_step, relative_error
from helpers.datasets import local_level_arrays, random_model, simulate
from helpers.kalman import StateSpace, _install, compiled, kalman_loglike, reference
from helpers.kalman.compiled.building import load
from helpers.kalman.hessian import hessian_vector
from helpers.kalman.recursions import cholesky, solve
from helpers.kalman.reference import FilterOutputs, kalman_filter, reverse, smoother_form
from helpers.kalman.scan import symbolic_model
from helpers.statespace import NAMES

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from helpers.kalman.jax import _with_W, calls, filter_outputs, integrated, loglike, scans  # noqa: E402  # noqa: E402

ALL = ("y", *NAMES)


@pytest.fixture(autouse=True)
def float64():
    """On, whatever a test before left: PyTensor turns it on once and relies on it from then on."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", True)


def values_of(y, model):
    return [jnp.asarray(X) for X in (y, *model.asdict().values())]


@pytest.fixture(params=["fused", "scan", thorough("parallel")], name="total")
def fixture_total(request):
    """The log-likelihood of a series by each engine."""
    return lambda *arrays: loglike(*arrays, method=request.param).sum()


by_scans = pytest.mark.parametrize("total", ["scan"], indirect=True)
mostly_fused = pytest.mark.parametrize(
    "total", ["fused", thorough("scan"), thorough("parallel")], indirect=True
)


def total_by_autodiff(*arrays):
    """The same filter, for JAX to differentiate."""
    return scans.filter_scan(_with_W(*arrays), ("l",))["l"].sum()


def gradient(f, *names):
    return jax.jit(jax.grad(f, argnums=tuple(ALL.index(name) for name in names or ALL)))


def assert_close(found, dy, expected, bound):
    for name, G, X in zip(ALL, found, [dy, *expected.asdict().values()], strict=True):
        assert G.shape == X.shape, name
        assert relative_error(np.asarray(G), X) < bound, name


BY_SCANS = "gaps", "time-varying with gaps", "H = 0, singular P0 and Q", "Nile"


@pytest.mark.parametrize(
    ("name", "method"),
    [(x, "fused") for x in NAMES_OF_CASES]
    + [(x, "scan") if x in BY_SCANS else thorough(x, "scan") for x in NAMES_OF_CASES],
)
def test_value_and_gradient_for_any_weights(name, method):
    y, model = make(name)
    # The Nile's start is vague, and it stands near its optimum: the terms of H_bar cancel.
    bound = 1e-10 if name == "Nile" else 1e-12

    def weighted(weights, *arrays):
        return weights @ loglike(*arrays, method=method, tol=0.0)

    evaluate = jax.jit(jax.value_and_grad(weighted, argnums=tuple(range(1, 11))))
    for weights in (None, np.random.default_rng(2).standard_normal(len(y))):
        g = np.ones(len(y)) if weights is None else weights
        value, found = evaluate(g, *values_of(y, model))
        expected_value, dy, expected = reference.loglike_and_grad(y, model, weights)
        l = kalman_filter(y, model).out.l
        assert abs(value - expected_value) < 1e-13 * np.abs(g * l).sum()
        assert_close(found, dy, expected, bound)


@pytest.mark.parametrize("name", ["gaps", "time-varying with gaps"])
def test_all_outputs_and_cotangents_on_each(name):
    y, model = make(name)
    filtered = kalman_filter(y, model)
    rng = np.random.default_rng(3)
    bar = FilterOutputs(*(rng.standard_normal(X.shape) for X in filtered.out))
    out, pullback = jax.vjp(jax.jit(filter_outputs), *values_of(y, model))
    for x, X, expected in zip(FilterOutputs._fields, out, filtered.out, strict=True):
        assert relative_error(np.asarray(X), expected) < 1e-13, x
    found = jax.jit(pullback)(FilterOutputs(*(jnp.asarray(X) for X in bar)))
    assert_close(found, *reverse(model, filtered, bar), 1e-12)


@pytest.mark.parametrize("p", [scans.WRITTEN_OUT, scans.WRITTEN_OUT + 1])
@by_scans
def test_factorization_written_out_and_by_lapack(p, total):
    rng = np.random.default_rng(p)
    model = StateSpace(**random_model(3, p, 2, rng=rng))
    y, _ = simulate(5, rng, **model.asdict())
    y[rng.random(y.shape) < 0.3] = np.nan
    found = gradient(total)(*values_of(y, model))
    assert_close(found, *smoother_form(model, kalman_filter(y, model)), 1e-12)


@pytest.mark.parametrize("p", [2, scans.WRITTEN_OUT + 1])
def test_factorization_of_arrays_that_are_not_traced(p):
    rng = np.random.default_rng(p)
    A, B = rng.standard_normal((p, p)), rng.standard_normal((p, 3))
    C, logdet = cholesky(jnp.asarray(A @ A.T))
    assert relative_error(np.asarray(C), np.linalg.cholesky(A @ A.T)) < 1e-13
    assert abs(logdet - np.linalg.slogdet(A @ A.T)[1]) < 1e-12
    assert relative_error(np.asarray(C @ solve(C, jnp.asarray(B))), B) < 1e-13
    assert jnp.isnan(cholesky(jnp.asarray(A @ A.T) - 100 * jnp.eye(p))[1])  # NumPy would raise


@by_scans
@pytest.mark.parametrize("size", [(3, 2), *(thorough(x) for x in ((5, 2), (5, 3)))])
def test_a_vague_start_costs_no_more_than_autodiff(size, total):
    """Against 60 digits; a gain from a formed F^-1 would lose eps kappa^2, here all of T."""
    m, p = size
    arrays = random_model(m, p, 2, rng=np.random.default_rng(0))
    y = np.random.default_rng(100).standard_normal((5, p))
    ours, autodiff = gradient(total, "T"), gradient(total_by_autodiff, "T")
    for kappa in (1e7, 1e10):
        model = StateSpace(**(arrays | {"P0": kappa * np.eye(m)}))
        true = true_gradient(y, model, names=("T",), digits=60)["T"]
        error, theirs = (
            relative_error(np.asarray(f(*values_of(y, model))[0]), true) for f in (ours, autodiff)
        )
        assert error < np.finfo(float).eps * kappa
        assert error < 10 * theirs


def test_many_series_and_many_models(total):
    y, model = make("gaps")
    arrays = values_of(y, model)
    series = jnp.stack([arrays[0], arrays[0] + 1, 2 * arrays[0]])
    Qs = jnp.stack([arrays[-1], 2 * arrays[-1], 3 * arrays[-1]])
    axes = (0, *[None] * 8, 0)
    names = ("y", "P0", "T", "Z", "Q")
    places = tuple(ALL.index(x) for x in names)
    each = jax.jit(jax.vmap(jax.value_and_grad(total, argnums=places), in_axes=axes))
    values, found = each(series, *arrays[1:-1], Qs)

    def of_all(*arrays):
        return jax.vmap(total, in_axes=axes)(*arrays).sum()

    of_sum = gradient(of_all, *names)(series, *arrays[1:-1], Qs)
    for k in range(3):
        one = StateSpace(**(model.asdict() | {"Q": np.asarray(Qs[k])}))
        value, dy, expected = reference.loglike_and_grad(np.asarray(series[k]), one)
        assert relative_error(np.asarray(values[k]), value) < 1e-13
        for name, G in zip(names, found, strict=True):
            X = dy if name == "y" else getattr(expected, name)
            assert relative_error(np.asarray(G[k]), X) < 1e-12, name
    for name, G, X in zip(names, of_sum, found, strict=True):
        X = X if name in ("y", "Q") else X.sum(axis=0)
        assert relative_error(np.asarray(G), np.asarray(X)) < 1e-12, name


def test_parameters_that_reach_the_likelihood_through_a_stationary_start(total):
    y, _ = make("one of each")

    def arrays_of(theta, np):
        T = np.stack([np.stack([theta[0], theta[1]]), np.array([1.0, 0.0]) + 0 * theta])
        R, Q, I = np.array([[1.0], [0.0]]), theta[:1, None] ** 2 + theta[1], np.eye(4)
        P0 = np.linalg.solve(I - np.kron(T, T), (R @ Q @ R.T).reshape(4)).reshape(2, 2)
        zero, Z = np.zeros(2), np.array([[1.0, 0.0]])
        return zero, P0, zero, np.zeros(1), T, Z, R, np.zeros((1, 1)), Q

    theta = np.array([0.5, 0.3])
    found = jax.jit(jax.grad(lambda x: total(jnp.asarray(y), *arrays_of(x, jnp))))(theta)

    def exact(x):
        return reference.loglike(y, StateSpace(*arrays_of(x, np)))

    assert relative_error(np.asarray(found), complex_step(exact, theta)) < 1e-12


def equations_of(jaxpr):
    """The equations of a program and of all programs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations_of(inner)


def names_of_calls(jaxpr):
    return (equation.primitive.name for equation in equations_of(jaxpr))


def test_it_is_the_closed_form_that_jax_runs_backwards(monkeypatch):
    y, model = make("two shocks")
    by_scans = partial(loglike, method="scan")
    for f in (loglike, jax.jit(loglike), by_scans, filter_outputs):
        program = jax.make_jaxpr(f)(*values_of(y, model))
        assert any("custom_vjp" in name for name in names_of_calls(program.jaxpr))
    traced = []
    monkeypatch.setattr(scans, "reverse_scan", _spy(scans.reverse_scan, traced))
    f = jax.grad(lambda *arrays: by_scans(*arrays).sum())
    jax.make_jaxpr(f)(*values_of(y, model))
    jax.make_jaxpr(jax.jit(jax.vmap(f, (0, *[None] * 9))))(
        jnp.stack([y, y]), *values_of(y, model)[1:]
    )
    assert len(traced) == 2


def test_on_a_cpu_the_compiled_pass_runs_and_no_scan():
    y, model = make("two shocks")
    arrays = values_of(y, model)

    def total(*arrays):
        return loglike(*arrays).sum()

    of_one = jax.value_and_grad(total, argnums=(ALL.index("H"), ALL.index("Q")))
    of_many = jax.vmap(of_one, (0, *[None] * 9))
    for f, data in ((of_one, y), (of_many, jnp.stack([y, y]))):
        program = jax.make_jaxpr(f)(data, *arrays[1:]).jaxpr
        calls = list(names_of_calls(program))
        assert calls.count("ffi_call") == 2 and "scan" not in calls


def test_gradients_that_nobody_asks_for_are_left_out():
    y, model = make("two shocks")
    f = jax.grad(lambda Z: loglike(y, **(model.asdict() | {"Z": Z})).sum())
    program = jax.make_jaxpr(f)(model.Z)
    calls = [e for e in equations_of(program.jaxpr) if e.primitive.name == "ffi_call"]
    (shapes,) = {tuple(X.shape for X in e.params["result_avals"][1:]) for e in calls}
    sizes = dict(zip(scans.INPUTS, map(np.prod, shapes), strict=True))
    assert {x for x, size in sizes.items() if size} == {"Z"}


def test_weights_and_series_of_a_batch_within_a_batch():
    """Equal weights multiply what is ready, others call the pass: both in one batch."""
    y, model = make("gaps")
    arrays = values_of(y, model)
    n = len(y)
    weights = jnp.stack([jnp.ones(n), 3 * jnp.ones(n), jnp.arange(n) / n])
    scales = jnp.array([1.0, 2.0])

    def weighted(weights, scale, method="fused"):
        changed = [*arrays[:-1], scale * arrays[-1]]
        return weights @ loglike(*changed, method=method, tol=0.0)

    for axes in ((None, 0), (0, None)):
        both = []
        for method in ("fused", "scan"):
            f = jax.value_and_grad(partial(weighted, method=method), argnums=(0, 1))
            inner, outer = axes, axes[::-1]
            both.append(jax.jit(jax.vmap(jax.vmap(f, inner), outer))(weights, scales))
        for X, expected in zip(*map(jax.tree.leaves, both), strict=True):
            assert relative_error(np.asarray(X), np.asarray(expected)) < 1e-12


def test_several_threads_at_once():
    y, model = make("two shocks")
    f = jax.jit(jax.grad(lambda *arrays: loglike(*arrays).sum(), argnums=8))
    expected = f(*values_of(y, model))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: f(*values_of(y, model)), range(40)))
    assert all((G == expected).all() for G in found)


@pytest.mark.parametrize("size", [(3, 2), (5, 2), (5, 3)])
def test_a_vague_start_costs_the_compiled_pass_nothing(size):
    m, p = size
    arrays = random_model(m, p, 2, rng=np.random.default_rng(0)) | {"P0": 1e10 * np.eye(m)}
    y, model = np.random.default_rng(100).standard_normal((5, p)), StateSpace(**arrays)
    true = true_gradient(y, model, names=("T", "Z"), digits=60)
    f = jax.grad(lambda *arrays: loglike(*arrays).sum(), argnums=(5, 6))
    for x, G in zip("TZ", f(*values_of(y, model)), strict=True):
        assert relative_error(np.asarray(G), true[x]) < 1e-12


def test_what_is_asked_for_may_change_between_uses_of_one_program():
    """JAX keeps one structure for what a forward pass saves, whatever is asked for."""
    y, model = make("two shocks")
    arrays = values_of(y, model)
    f = jax.jit(lambda T, P0: loglike(*arrays[:2], P0, *arrays[3:5], T, *arrays[6:]).sum())
    T, P0 = arrays[5], arrays[2]
    _, by_T = jax.vjp(lambda T: f(T, P0), T)
    _, by_P0 = jax.vjp(lambda P0: f(T, P0), P0)
    expected = reference.loglike_and_grad(y, model)[2]
    assert relative_error(np.asarray(by_T(1.0)[0]), expected.T) < 1e-12
    assert relative_error(np.asarray(by_P0(1.0)[0]), expected.P0) < 1e-12


def test_a_cotangent_that_is_no_array():
    y, model = make("two shocks")

    @jax.custom_vjp
    def without_gradient(x):
        return x

    without_gradient.defvjp(lambda x: (x, None), lambda saved, bar: (None,))
    f = jax.grad(lambda T: without_gradient(loglike(y, **(model.asdict() | {"T": T}))).sum())
    assert not f(jnp.asarray(model.T)).any()


@mostly_fused
def test_second_derivatives_of_a_batch(total):
    y, model = make("gaps")
    arrays = values_of(y, model)
    moved = jnp.stack([arrays[-1], 2 * arrays[-1]])

    def value(Q, scale):
        return total(*arrays[:-1], scale * Q)

    of_scale = jax.jit(jax.vmap(jax.grad(jax.grad(value, argnums=1), argnums=1), (0, None)))
    for Q, found in zip(moved, of_scale(moved, 1.0), strict=True):
        expected = complex_step(
            lambda x, Q=Q: _slope_in_scale(y, model, np.asarray(Q), x[0]), [1.0]
        )
        assert abs(found - expected[0]) < 1e-11 * abs(expected[0])


def _slope_in_scale(y, model, Q, scale):
    scaled = StateSpace(**(model.asdict() | {"Q": scale * Q}))
    return (smoother_form(scaled, kalman_filter(y, scaled))[1].Q * Q).sum()


@by_scans
def test_what_stands_at_a_gap_does_not_count(total):
    y, model = make("time-varying with gaps")
    arrays = dict(zip(ALL, [y, *(np.array(X) for X in model.asdict().values())], strict=True))
    wanted = gradient(total)
    expected = wanted(*arrays.values())
    for x in ("d", "Z", "H"):
        arrays[x][np.isnan(y)] = np.nan
    for found, X in zip(wanted(*arrays.values()), expected, strict=True):
        np.testing.assert_array_equal(found, X)


def test_a_tolerance_in_float32():
    """It comes through: with a coarse one the pass does what it does in float64."""
    model = StateSpace(**local_level_arrays(1.0, 0.01, P0=1.0))  # is slow to settle
    y, _ = simulate(400, np.random.default_rng(2), **model.asdict())
    narrow = [jnp.asarray(X, jnp.float32) for X in values_of(y, model)]
    same = StateSpace(*(np.asarray(X, float) for X in narrow[1:]))
    for tol in (0.0, 0.3):
        expected = compiled.loglike(np.asarray(narrow[0], float), same, tol)
        found = float(loglike(*narrow, tol=tol).astype(jnp.float64).sum())
        assert abs(found - expected) < 1e-6 * abs(expected)
    steady, exact = (compiled.loglike(y, model, tol) for tol in (0.3, 0.0))
    assert abs(steady - exact) > 1e-5 * abs(exact)


def test_a_sharded_batch():
    y, model = make("two shocks")
    arrays = values_of(y, model)
    mesh = jax.make_mesh((1,), ("series",), axis_types=(jax.sharding.AxisType.Auto,))
    one = jax.sharding.PartitionSpec("series")

    def slopes(series, method):
        f = jax.grad(lambda y, Q: loglike(y, *arrays[1:-1], Q, method=method).sum())
        return jax.vmap(f, (0, None))(series, arrays[-1])

    def sharded(method, **how):
        f = partial(slopes, method=method)
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=one, out_specs=one, **how))(series)

    series = jnp.stack([y, y + 1])
    with pytest.raises(NotImplementedError, match='under shard_map take method="scan"'):
        sharded("fused")
    found = sharded("scan", check_vma=False)
    assert relative_error(np.asarray(found), np.asarray(slopes(series, "fused"))) < 1e-12


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("CallFrame", "struct_size extension_start api ctx stage args rets attrs"),
        ("Args", "struct_size extension_start size types args"),
        ("Rets", "struct_size extension_start size types rets"),
        ("Buffer", "struct_size extension_start dtype data rank dims"),
        ("Metadata", "struct_size api_version traits"),
        ("Api", "struct_size extension_start api_version internal_api XLA_FFI_Error_Create"),
        ("Error_Create_Args", "struct_size extension_start message errc"),
    ],
)
def test_xlas_structures_are_what_the_handlers_read(name, fields):
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    (body,) = re.findall(rf"struct XLA_FFI_{name} {{(.*?)\n}}", header, re.S)
    found = re.findall(r"(\w+)\)?;", re.sub("//.*", "", body))
    assert found[: len(fields.split())] == fields.split()


def test_a_handler_says_what_it_was_made_for():
    """Version 0 of the interface, whose structures it reads, and XLA's own minor one."""
    code = load("xla").HANDLERS["value", "float64"]
    metadata, api = np.zeros(6, np.int64), np.zeros(7, np.int64)
    api[4] = 5 << 32 | 1  # version 1.5
    extension = np.array([32, 1, 0, metadata.ctypes.data])
    frame = np.zeros(15, np.int64)
    frame[1], frame[2] = extension.ctypes.data, api.ctypes.data
    handle = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(code.address)
    assert handle(frame.ctypes.data) == 0
    assert list(metadata) == [0, 0, 0, 5 << 32, 0, 0]


def integral(rng):
    """Arguments of `integrated`: two numbers, in the start and in the observations; gaps."""
    m, p, n, q = 3, 2, 14, 2
    model = StateSpace(**random_model(m, p, rng=rng))
    y = rng.standard_normal((q + 1, n, p))
    y[:, [0, 5]] = np.nan
    y[:, 7, 1] = np.nan
    W = model.R @ model.Q @ model.R.T
    starts, c = rng.standard_normal((q + 1, m)), rng.standard_normal((q + 1, 1, m))
    arrays = y, starts, c, model.P0, model.T[None], model.Z[None], model.H[None], W[None]
    return [jnp.asarray(X) for X in (*arrays, np.diag([0.5, 0.0]))]


@pytest.mark.parametrize("what", ["value", thorough("mean and covariance, too")])
def test_the_integral_by_both_engines(what):
    arrays = integral(np.random.default_rng(1))
    rng = np.random.default_rng(2)
    weights = [jnp.asarray(rng.standard_normal(shape)) for shape in ((), (2,), (2, 2))]

    def value(*arrays, method):
        return 3 * integrated(*arrays, method=method, tol=0.0)[0]

    def of_all(*arrays, method):  # mean and covariance, too: by scans, whatever the method
        found = integrated(*arrays, method=method, tol=0.0)
        return sum((w * X).sum() for w, X in zip(weights, found, strict=True))

    f, places = (value, tuple(range(9))) if what == "value" else (of_all, (4, 8))
    both = []
    for method in ("fused", "scan"):
        g = jax.jit(jax.value_and_grad(partial(f, method=method), argnums=places))
        both.append(g(*arrays))
    for X, expected in zip(*map(jax.tree.leaves, both), strict=True):
        assert relative_error(np.asarray(X), np.asarray(expected)) < 1e-11


@pytest.mark.thorough  # seconds of compilation
def test_the_integral_differentiated_twice_by_both_engines():
    arrays = integral(np.random.default_rng(1))
    twice = [
        jax.jit(jax.hessian(lambda *X, by=by: 3 * integrated(*X, method=by, tol=0.0)[0], argnums=8))
        for by in ("fused", "scan")
    ]
    assert relative_error(*(np.asarray(f(*arrays)) for f in twice)) < 1e-11


def test_an_integral_for_each_of_many_models():
    arrays = integral(np.random.default_rng(1))
    slope = jax.grad(lambda T: 3 * integrated(*arrays[:4], T, *arrays[5:])[0])
    many = jnp.stack([arrays[4], 0.5 * arrays[4]])
    for T, G in zip(many, jax.vmap(slope)(many), strict=True):
        assert (G == slope(T)).all()
    program = jax.make_jaxpr(slope)(arrays[4])
    assert "scan" not in set(names_of_calls(program.jaxpr))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("y", lambda y: y[0], r"y has 2 dimensions, expected 3: \(columns or 1, n, p\)"),
        ("y", lambda y: y[1:], r"y has shape .*, .* \(columns or 1, n, p\) = \(3 or 1, n, p\)"),
        ("starts", lambda x: x[1:], r"starts has shape \(2, 3\), .* \(columns, m\) = \(3, m\)"),
        ("c", lambda c: c[:1], "c has 1 columns, expected those of y, 3"),
        ("T", lambda T: T[0], r"T has 2 dimensions, expected 3: \(n or 1, m, m\)"),
        ("Z", lambda Z: Z[..., :2], r"Z has shape \(1, 2, 2\), .* = \(14 or 1, 2, 3\)"),
        ("H", lambda H: jnp.concatenate([H, H]), r"H has shape \(2, 2, 2\), expected"),
        ("precision", lambda X: X[:1], r"precision has shape \(1, 2\), .* = \(1, 1\)"),
    ],
)  # fmt: skip
def test_shapes_of_an_integral(name, change, message):
    names = ("y", "starts", "c", "P0", "T", "Z", "H", "W", "precision")
    arrays = dict(zip(names, integral(np.random.default_rng(1)), strict=True))
    if name == "precision":
        arrays |= {"y": arrays["y"][:2], "starts": arrays["starts"][:2], "c": arrays["c"][:2]}
    with pytest.raises(ValueError, match=message):
        integrated(**(arrays | {name: change(arrays[name])}))


OUT_OF_MEMORY = """
import resource
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
from helpers.kalman.jax import loglike
m, n = 60, 200_000
I, zero = jnp.eye(m), jnp.zeros(m)
def total(T):
    return loglike(jnp.zeros((n, 1)), zero, I, zero, zero[:1], T, I[:1], I, I[:1, :1], I).sum()
f = jax.jit(jax.value_and_grad(total)).lower(I / 2).compile()
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30),) * 2)
try:
    jax.block_until_ready(f(I / 2))
except jax.errors.JaxRuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_memory_that_runs_out_is_an_error_of_jax():
    command = [sys.executable, "-c", OUT_OF_MEMORY]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.stdout.startswith("RESOURCE_EXHAUSTED: ")
    assert "the Kalman filter ran out of memory" in run.stdout


NOT_COMPILED = """
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
from helpers.kalman.compiled import door
from helpers.kalman.jax import loglike
I = jnp.eye(5)
def total(P0):
    return loglike(I[:, :1], I[0], P0, I[0], I[0, :1], I / 2, I[:1], I, I[:1, :1], I).sum()
f = jax.jit(total).lower(I).compile()
door._addresses[0, 0], door.compile_later = 0, lambda m, p: 1 / 0
try:
    jax.block_until_ready(f(1e12 * I))
except jax.errors.JaxRuntimeError as error:
    print(error)
"""


def test_a_pass_that_cannot_be_compiled_is_no_lack_of_memory():
    run = subprocess.run([sys.executable, "-c", NOT_COMPILED], capture_output=True, text=True)
    assert run.stdout.startswith("INTERNAL: a pass was not compiled")


def _spy(function, calls):
    def spied(*args):
        calls.append(args)
        return function(*args)

    return spied


@mostly_fused
def test_second_derivatives(total):
    """Of both modes of JAX, against complex steps of the closed form in NumPy."""
    y, model = make("only Z varies")  # and has gaps
    rng = np.random.default_rng(0)
    directions = [rng.standard_normal(X.shape) for X in (model.T, model.Z, model.Q)]
    directions[2] = directions[2] @ directions[2].T

    def moved(theta):
        changed = zip("TZQ", directions, strict=True)
        return model.asdict() | {
            x: getattr(model, x) + theta[k] * D for k, (x, D) in enumerate(changed)
        }

    def value(theta):
        return total(jnp.asarray(y), *moved(theta).values())

    def slope(theta):
        shifted = StateSpace(**moved(theta))
        G = smoother_form(shifted, kalman_filter(y, shifted))[1]
        return np.array([(getattr(G, x) * D).sum() for x, D in zip("TZQ", directions, strict=True)])

    theta, h = np.zeros(3), 1e-30
    expected = np.stack([slope(theta + 1j * h * e).imag / h for e in np.eye(3)])
    for hessian in (jax.hessian(value), jax.jacrev(jax.grad(value))):
        assert relative_error(np.asarray(jax.jit(hessian)(theta)), expected) < 1e-11


def squashed(l):
    """A loss that weighs the steps as their likelihoods want it."""
    return (l / (1 + l * l)).sum()


def slope_of_squashed(l):
    return (1 - l * l) / (1 + l * l) ** 2


def parts(f, t, v):
    """The Hessian of f at t in each way in which JAX can be asked for it, times v at last."""
    many, unit = jnp.stack([t, 2 * t]), jnp.eye(len(t))
    gradient = jax.grad(f)

    def along(v):
        return jax.jvp(gradient, (t,), (v,))[1]

    def of_sum(T):
        return (jax.grad(lambda X: jax.vmap(f)(X).sum())(T) * v).sum()

    return {
        "forwards over backwards": jax.hessian(f)(t) @ v,
        "backwards twice": jax.jacrev(gradient)(t) @ v,
        "one direction": along(v),
        "several": jax.vmap(along)(unit) @ v,
        "transposed": jax.vjp(along, v)[1](v)[0],
        "of two models": jax.vmap(jax.hessian(f))(many)[0] @ v,
        "of two models, backwards": jax.vmap(jax.jacrev(gradient))(many)[0] @ v,
        "of the sum of two": jax.grad(of_sum)(many)[0],
    }


@pytest.mark.parametrize("loss", [jnp.sum, squashed])
def test_second_derivatives_in_every_way_are_those_of_the_pass(loss, monkeypatch):
    """Against complex steps in NumPy; JAX is not let near the scans."""
    y, model = make("gaps")
    rng = np.random.default_rng(0)
    directions = {x: rng.standard_normal(getattr(model, x).shape) for x in ("T", "Z", "H", "a0")}
    directions["H"] = directions["H"] @ directions["H"].T

    def moved(theta):
        changed = zip(theta, directions.items(), strict=True)
        return model.asdict() | {x: getattr(model, x) + t * D for t, (x, D) in changed}

    def slope(theta):
        shifted = StateSpace(**moved(theta))
        weights = np.ones(len(y))
        if loss is squashed:
            weights = slope_of_squashed(kalman_filter(y, shifted).out.l)
        G = reference.loglike_and_grad(y, shifted, weights)[2]
        return np.array([(getattr(G, x) * D).sum() for x, D in directions.items()])

    t, v = np.array([0.01, 0.02, 0.03, 0.01]), np.array([1.0, -2.0, 0.5, 3.0])
    expected = slope(t + 1e-30j * v).imag / 1e-30
    for name in ("gradient", "tangents", "filter_scan", "reverse_scan"):
        monkeypatch.setattr(scans, name, None)

    def f(theta):
        return loss(loglike(jnp.asarray(y), **moved(theta)))

    for name, found in jax.jit(partial(parts, f))(t, v).items():
        assert relative_error(np.asarray(found), expected) < 1e-10, name


@pytest.mark.thorough
def test_third_derivatives_are_those_of_the_scans():
    y, model = make("gaps")
    T, Z = (jnp.asarray(X) for X in (model.T, model.Z))

    def third(method):
        def f(t):
            arrays = model.asdict() | {"T": T * (1 + t), "Z": Z * (1 - t)}
            return loglike(jnp.asarray(y), **arrays, method=method).sum()

        return jax.jit(jax.grad(jax.grad(jax.grad(f))))(0.01)

    assert relative_error(np.asarray(third("fused")), np.asarray(third("scan"))) < 1e-9


def tangents_of_two(dtype):
    """Two models that differ in W, as arrays, and the tangents of both along three directions."""
    y, model = make("only Z varies")  # and has gaps
    rng = np.random.default_rng(4)
    inputs = _with_W(*(X.astype(dtype) for X in values_of(y, model)))
    inputs = {x: jnp.stack([X, X]) for x, X in zip(scans.INPUTS, inputs, strict=True)}
    inputs["W"] = jnp.array([0.5, 1], dtype)[:, None, None] * (inputs["W"] + inputs["W"].mT)
    moves = {x: rng.standard_normal((3, *inputs[x].shape[1:])) for x in ("c", "T", "H")}
    moves["H"] += moves["H"].swapaxes(1, 2)
    l_bar, names = rng.random(len(y)), ("y", "Z", "W")

    def tangents(engine, inputs):
        given = jax.tree.map(lambda X: jnp.asarray(X, dtype), (l_bar, moves))
        return jax.jit(jax.vmap(lambda *X: engine(X, *given)))(*inputs.values())

    return inputs, moves, l_bar, names, tangents


def by_the_pass(names):
    return lambda *given: calls.tangents(names, 0.0, *given)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_tangents_of_a_batch_of_models(dtype):
    """By the compiled pass, against those of the text in NumPy."""
    inputs, moves, l_bar, names, tangents = tangents_of_two(dtype)
    slopes, found = tangents(by_the_pass(names), inputs)
    bound = 1e-10 if dtype == jnp.float64 else 1e-3
    for i in range(2):
        y, *arrays, W = (np.asarray(X[i], float) for X in inputs.values())
        model = StateSpace(*arrays[:6], np.eye(len(W)), arrays[6], W)
        expected = hessian_vector(y, model, moves, "reference", l_bar)
        moved = {"y": expected[1], "Z": expected[2].Z, "W": expected[2].Q}
        assert slopes.dtype == dtype and relative_error(slopes[i], expected[0]) < bound
        for x in names:
            assert found[x].dtype == dtype and relative_error(found[x][i], moved[x]) < bound


@pytest.mark.thorough
def test_tangents_of_the_pass_differentiated():
    inputs, _, _, names, tangents = tangents_of_two(jnp.float64)

    def along_Z(engine):  # noqa: N802
        def of_Z(Z):  # noqa: N802
            return tangents(engine, inputs | {"Z": Z})

        return jax.jvp(of_Z, (inputs["Z"],), (inputs["Z"],))

    found, expected = map(along_Z, (by_the_pass(names), partial(scans.tangents, names)))
    for X, G in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(X, G) < 1e-10


def test_forward_mode_is_refused_in_words(total):
    y, model = make("one step")
    arrays = values_of(y, model)
    with pytest.raises(TypeError, match="forward-mode autodiff .* custom_vjp"):
        jax.jvp(total, arrays, arrays)


def test_float32(total):
    y, model = make("gaps")
    _, dy, expected = reference.loglike_and_grad(y, model)
    narrow = [X.astype(jnp.float32) for X in values_of(y, model)]
    for x64 in (True, False):  # as asked for by the arrays, and as JAX is without x64
        jax.config.update("jax_enable_x64", x64)
        value_and_grad = jax.jit(jax.value_and_grad(total, argnums=tuple(range(10))))
        value, found = value_and_grad(*(narrow if x64 else (y, *model.asdict().values())))
        assert value.dtype == jnp.float32 and {G.dtype for G in found} == {narrow[0].dtype}
        assert_close(found, dy, expected, 1e-4)


def test_integers_are_computed_with_as_floats():
    one, zero = np.eye(1, dtype=int), np.zeros(1, dtype=int)
    l = loglike(np.array([[1], [2]]), zero, one, zero, zero, one, one, one, one, one)
    model = StateSpace(zero, one, zero, zero, one, one, one, one, one)
    expected = reference.loglike(np.array([[1.0], [2.0]]), model)
    assert l.dtype == jnp.float64 and abs(l.sum() - expected) < 1e-14


def test_no_half_precision():
    y, model = make("one step")
    l = loglike(*(X.astype(jnp.bfloat16) for X in values_of(y, model)))
    assert l.dtype == jnp.float32 and jnp.isfinite(l).all()


@pytest.mark.parametrize("method", ["fused", "scan"])
@pytest.mark.parametrize("p", [2, scans.WRITTEN_OUT + 1])
def test_nan_throughout_where_an_innovation_covariance_is_not_positive_definite(p, method):
    rng = np.random.default_rng(p)
    n = 4
    arrays = random_model(2, p, rng=rng) | {"H": np.repeat(np.eye(p)[None], n, axis=0)}
    arrays["Z"] = np.repeat(arrays["Z"][None], n, axis=0)
    arrays["Z"][2] = 0
    y = rng.standard_normal((n, p))

    def per_step(*arrays):
        return loglike(*arrays, method=method)

    @jax.jit
    def evaluate(*arrays):
        total = jax.grad(lambda *X: per_step(*X).sum(), argnums=tuple(range(10)))
        return per_step(*arrays), total(*arrays)

    for variance in (0.0, -1.0):  # a pivot of zero would have an infinite logarithm
        arrays["H"][2] = variance * np.eye(p)
        l, found = evaluate(y, *arrays.values())
        assert jnp.isnan(l).all()
        assert all(jnp.isnan(G).any() for G in found)
    y[2] = np.nan  # nothing is observed there: all is well
    assert all(jnp.isfinite(X).all() for X in jax.tree.leaves(evaluate(y, *arrays.values())))


def test_covariances_count_by_their_symmetric_part(total):
    y, model = make("two shocks")
    straight = values_of(y, model)
    bent = list(straight)
    for x in ("P0", "H", "Q"):
        k = ALL.index(x)
        skew = jnp.triu(jnp.ones(straight[k].shape), 1) * 1e-2
        bent[k] = straight[k] + skew - skew.T
    f = gradient(total, "P0", "H", "Q", "T")
    for G, X in zip(f(*bent), f(*straight), strict=True):
        assert relative_error(np.asarray(G), np.asarray(X)) < 1e-13
    for G in f(*bent)[:3]:
        assert (G == G.T).all()


def test_gradient_of_a_covariance_is_symmetric_to_the_last_digit(total):
    """With so many series a product X' X is not."""
    arrays = random_model(4, 40, 2, rng=np.random.default_rng(0))
    y = np.random.default_rng(1).standard_normal((6, 40))
    (G,) = gradient(total, "H")(y, *arrays.values())
    assert (G == G.T).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Z": np.zeros((2, 3))}, r"Z has shape \(2, 3\), expected \(p, m\) = \(2, 4\)"),
        ({"d": np.zeros(1)}, r"d has shape \(1,\), expected \(p,\) = \(2,\)"),
        ({"T": np.zeros(4)}, r"T has 1 dimensions, expected 2: \(m, m\) or with a lead"),
        ({"c": np.zeros((7, 4))}, r"c has shape \(7, 4\), expected \(n, m\) = \(15, 4\)"),
        ({"P0": np.zeros((4, 4, 4))}, r"P0 has 3 dimensions, expected 2: \(m, m\)"),
        ({"Q": np.eye(3)}, r"Q has shape \(3, 3\), expected \(r, r\) = \(2, 2\)"),
        ({"y": np.zeros((0, 2))}, "n = 0: there is no step"),
        ({"y": np.zeros(15)}, r"y has 1 dimensions, expected 2: \(n, p\)"),
    ],
)  # fmt: skip
def test_bad_arguments_when_the_function_is_traced(change, message):
    y, model = make("two shocks")
    arrays = {"y": y} | model.asdict() | change
    for f in (loglike, jax.jit(loglike), filter_outputs):
        with pytest.raises(ValueError, match=message):
            f(**arrays)


def test_no_such_method_or_tolerance():
    y, model = make("one step")
    with pytest.raises(
        ValueError, match='is \'fast\', expected None, "fused", "scan" or "parallel"'
    ):
        loglike(*values_of(y, model), method="fast")
    with pytest.raises(ValueError, match="tol is -1, expected a finite number that is not neg"):
        loglike(*values_of(y, model), tol=-1)


def test_complex_arguments():
    y, model = make("two shocks")
    with pytest.raises(TypeError, match="T, Q complex, expected real arrays"):
        loglike(y, **(model.asdict() | {"T": 1j * model.T, "Q": 1j * model.Q}))


def test_without_jax_the_error_names_the_line_that_installs_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "helpers.kalman.jax")
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ImportError, match="needs jax, .* pip install jax ") as error:
        importlib.import_module("helpers.kalman.jax")
    assert _install("[jax]") in str(error.value)


# PyTensor's JAX mode

PROGRAM = """
import sys
import numpy as np, pytensor, pytensor.tensor as pt
from helpers.kalman import kalman_loglike
import helpers.kalman.ops
assert "jax" not in sys.modules, "JAX was imported for one who does not use it"
q, one, zero = pt.scalar("q"), np.eye(1), np.zeros(1)
y = np.array([[1.0], [np.nan], [0.5]])
l = kalman_loglike(y, zero, one, zero, zero, one, one, one, one, q * one).sum()
f = pytensor.function([q], [l, pt.grad(l, q)], mode=pytensor.compile.mode.MODE)
print(*(f"{float(x):.3f}" for x in f(1.0)))
"""


@pytest.mark.parametrize("mode", ["JAX", thorough("Mode('jax', optimizer=None)")])
def test_pytensor_imports_jax_for_its_jax_mode_alone(mode):
    """In a process of its own, as another test may have imported JAX here."""
    command = [sys.executable, "-c", PROGRAM.replace("MODE", mode)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "-3.061 -0.286\n"


def test_a_sampler_that_differentiates_the_jaxified_value_gets_the_closed_form():
    from pymc.sampling.jax import get_jaxified_graph

    y, model = make("only Z varies")
    symbols = list(symbolic_model(model.time_varying).values())
    value = get_jaxified_graph(symbols, [kalman_loglike(*symbols).sum()])
    program = jax.make_jaxpr(value)(*values_of(y, model))
    assert any("custom_vjp" in name for name in names_of_calls(program.jaxpr))
    found = gradient(lambda *arrays: value(*arrays)[0])(*values_of(y, model))
    assert_close(found, *smoother_form(model, kalman_filter(y, model)), 1e-12)


def test_pytensor_runs_a_batch_in_jax():
    y, model = make("gaps")
    symbols = symbolic_model()
    batch = pt.tensor("batch", shape=(None, None, None))
    totals = vectorize_graph(kalman_loglike(*symbols.values()).sum(), {symbols["y"]: batch})
    others = [X for name, X in symbols.items() if name != "y"]
    evaluate = pytensor.function(
        [batch, *others], [totals, *pt.grad(totals.sum(), [batch, symbols["T"]])], mode="JAX"
    )
    series = np.stack([y, 2 * y])
    values, dy, dT = evaluate(series, *model.asdict().values())
    each = [reference.loglike_and_grad(one, model) for one in series]
    assert relative_error(np.asarray(values), np.stack([e[0] for e in each])) < 1e-13
    assert relative_error(np.asarray(dy), np.stack([e[1] for e in each])) < 1e-12
    assert relative_error(np.asarray(dT), sum(e[2].T for e in each)) < 1e-12


def test_pytensor_in_jax_refuses_shapes_that_would_broadcast():
    y, model = make("two shocks")
    symbols = list(symbolic_model().values())
    evaluate = pytensor.function(symbols, kalman_loglike(*symbols), mode="JAX")
    arrays = {"y": y} | model.asdict() | {"d": np.zeros(1)}
    with pytest.raises(ValueError, match=r"d has shape \(1,\), expected \(p,\) = \(2,\)"):
        evaluate(*arrays.values())
