"""helpers.kalman.smoothing: a draw is linear in its standard normal numbers, so its mean and its
covariance are compared with the joint law without sampling; gradients with complex steps."""

from dataclasses import replace
from importlib.util import find_spec

import mpmath
import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from kalman_oracle import joint_of as joint
from tiers import thorough

from helpers.checks import complex_step, relative_error
from helpers.kalman import StateSpace, drawing, smoothing
from helpers.kalman.drawing import pull_root
from helpers.kalman.ops.draws import (
    CovarianceRoot,
    CovarianceRootGrad,
    KalmanDraw,
    NormalMarginals,
    covariance_root,
    kalman_draw,
    kalman_smooth,
)
from helpers.statespace import NAMES, SYMMETRIC

PYTHON = pytensor.compile.mode.Mode(linker="py", optimizer="fast_run")
JAX = pytest.param("JAX", marks=pytest.mark.skipif(not find_spec("jax"), reason="needs JAX"))
N, M, P, SHOCKS = 8, 4, 2, 2


def a_model(varying=False, H=None, seed=1):
    """Singular P0 and Q, stable T."""
    rng = np.random.default_rng(seed)
    time = (N,) if varying else ()
    T = rng.normal(size=(*time, M, M))
    T *= 0.9 / np.abs(np.linalg.eigvals(T)).max()
    q = rng.normal(size=(*time, SHOCKS, 1))
    H = np.array([[1.0, 0.4], [0.4, 0.7]]) if H is None else H
    return StateSpace(
        rng.normal(size=M), np.diag([1.0, 0.5, 2.0, 0.0]), rng.normal(size=(*time, M)),
        rng.normal(size=(*time, P)), T, rng.normal(size=(*time, P, M)),
        rng.normal(size=(*time, M, SHOCKS)), H, q @ q.swapaxes(-1, -2),
    )  # fmt: skip


def a_series(n=N, seed=2):
    y = np.random.default_rng(seed).normal(size=(n, P))
    y[2, 1] = y[3] = np.nan
    return y


def posterior(y, model, A):
    """Mean and covariance of the states' path given y, from the joint law, delta flat."""
    mean, V, G, Z, d, H = joint(model, len(y))
    o = ~np.isnan(y.ravel())
    E = G @ A
    V = V + E @ E.T  # room on the span of A, which changes nothing
    Z, miss = Z[o], (y.ravel() - d)[o] - Z[o] @ mean
    inverse = np.linalg.inv(Z @ V @ Z.T + H[np.ix_(o, o)])
    gain = V @ Z.T @ inverse
    left = E - gain @ Z @ E
    mean, V = mean + gain @ miss, V - gain @ Z @ V
    if A.shape[1]:
        S_inv = np.linalg.inv(E.T @ Z.T @ inverse @ Z @ E)
        mean += left @ S_inv @ E.T @ Z.T @ inverse @ miss
        V += left @ S_inv @ left.T
    return mean, V


STARTS = {
    "proper": np.zeros((M, 0)),
    "partly diffuse": np.random.default_rng(3).normal(size=(M, 2)),
    "wholly diffuse": np.eye(M),
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kind", ["fixed", "varying", "H = 0"])
def test_means_covariances_and_draws_have_the_joint_law(kind, start):
    A = STARTS[start]
    model = a_model(kind == "varying", H=np.zeros((P, P)) if kind == "H = 0" else None)
    if kind == "H = 0":  # with a singular P0 too, nothing would be uncertain
        model = replace(model, P0=model.P0 + 0.3, Q=np.eye(SHOCKS))
    y, given = a_series(), A if A.shape[1] else None
    if kind == "H = 0":
        y[:, 1] = np.nan
    mean, V = posterior(y, model, A)
    blocks = np.array([V[k : k + M, k : k + M] for k in range(0, N * M, M)])
    k = smoothing.normals_of_a_draw(N, model)
    for method in ("reference", "fused"):
        assert relative_error(smoothing.means(y, model, given, method).ravel(), mean) < 1e-12
        assert relative_error(smoothing.covariances(y, model, given, method), blocks) < 1e-11
        units = np.eye(k + 1, k)  # the last one: all zero
        paths = smoothing.draw(y, model, A=given, method=method, normals=units)
        paths = paths.reshape(k + 1, -1)
        assert relative_error(paths[-1], mean) < 1e-12
        spread = paths[:-1] - paths[-1]
        assert relative_error(spread.T @ spread, V) < 1e-11


def test_draws_are_the_same_whatever_their_number():
    y, model = a_series(), a_model()
    many = smoothing.draw(y, model, smoothing.CHUNK + 5, rng=7)
    assert many.shape == (smoothing.CHUNK + 5, N, M)
    assert relative_error(smoothing.draw(y, model, 3, rng=7), many[:3]) < 1e-13
    k = smoothing.normals_of_a_draw(N, model)
    normals = np.random.default_rng(7).standard_normal((len(many), k))
    assert relative_error(smoothing.draw(y, model, normals=normals), many) < 1e-13


def test_an_empty_series_is_drawn_from_the_model():
    model = a_model()
    y = np.full((N, P), np.nan)
    mean, V, *_ = joint(model, N)
    k = smoothing.normals_of_a_draw(N, model)
    paths = smoothing.draw(y, model, normals=np.eye(k + 1, k)).reshape(k + 1, -1)
    spread = paths[:-1] - paths[-1]
    assert relative_error(paths[-1], mean) < 1e-12
    assert relative_error(spread.T @ spread, V) < 1e-12


@pytest.mark.parametrize("start", ["proper", "wholly diffuse"])
def test_forecasts_have_the_joint_law(start):
    A, model, y, ahead = STARTS[start], a_model(), a_series(N - 3), 3
    longer = np.concatenate([y, np.full((ahead, P), np.nan)])
    mean, V = posterior(longer, model, A)
    _, _, _, Z, d, H = joint(model, N)
    last = slice((N - ahead) * P, None)
    Z, d, H = Z[last], d[last], H[last, last]
    k = smoothing.normals_of_a_draw(N, model)
    out = smoothing.forecast(
        y, model, ahead, A=A if A.shape[1] else None, normals=np.eye(k + 1, k)
    )  # fmt: skip
    assert out.states.shape == (k + 1, ahead, M)
    assert relative_error(out.mean.ravel(), Z @ mean + d) < 1e-12
    assert relative_error(out.states[-1].ravel(), mean[-ahead * M :]) < 1e-12
    of_y = Z @ V @ Z.T + H
    blocks = np.array([of_y[k : k + P, k : k + P] for k in range(0, ahead * P, P)])
    assert relative_error(out.covariance, blocks) < 1e-11
    ys = out.y.reshape(k + 1, -1)
    spread = ys[:-1] - ys[-1]
    assert relative_error(spread.T @ spread, of_y) < 1e-11


def test_against_statsmodels_exact_diffuse_smoother():
    sm = pytest.importorskip("statsmodels.api")
    rng = np.random.default_rng(5)
    y = np.cumsum(rng.normal(size=60)) + rng.normal(size=60)
    y[[0, 1, 17, 30]] = np.nan
    mod = sm.tsa.UnobservedComponents(y, "lltrend", seasonal=4, use_exact_diffuse=True)
    mod.update(np.array([0.7, 0.3, 0.05, 0.2]))
    mod.ssm.tolerance = 0  # its own steady state costs digits
    theirs = mod.ssm.smooth()
    names = {"T": "transition", "Z": "design", "R": "selection", "H": "obs_cov", "Q": "state_cov"}
    arrays = {x: mod.ssm[X] for x, X in names.items()}
    m = len(arrays["T"])
    model = StateSpace(np.zeros(m), np.zeros((m, m)), np.zeros(m), np.zeros(1), **arrays)
    means = smoothing.means(y[:, None], model, np.eye(m))
    V = smoothing.covariances(y[:, None], model, np.eye(m))
    assert relative_error(means, theirs.smoothed_state.T) < 1e-11
    assert relative_error(V, np.moveaxis(theirs.smoothed_state_cov, -1, 0)) < 1e-10


@pytest.mark.parametrize("method", ["reference", "fused"])
def test_a_vague_start_against_sixty_digits(method):
    rng, n, kappa = np.random.default_rng(6), 6, 1e10
    T = np.array([[1.0, 1.0], [0.0, 1.0]])
    model = StateSpace(
        np.zeros(2), kappa * np.eye(2), np.zeros(2), np.zeros(1), T, np.eye(1, 2), np.eye(2),
        np.eye(1), 0.1 * np.eye(2),
    )  # fmt: skip
    y = rng.normal(size=(n, 1))
    y[3] = np.nan
    with mpmath.workdps(60):
        # The joint law has integer entries but for Q: exact in floats, and 60 digits from there on.
        _, V, _, Z, _, H = joint(replace(model, P0=0 * model.P0), n)
        G = np.concatenate([np.linalg.matrix_power(T, t) for t in range(n)])
        o = ~np.isnan(y.ravel())
        V, G, Z, H, miss = map(mpmath.matrix, (V, G, Z[o], H[np.ix_(o, o)], y[o]))
        V = V + mpmath.mpf(kappa) * G * G.T
        gain = V * Z.T * (Z * V * Z.T + H) ** -1
        mean, V = gain * miss, V - gain * Z * V
        mean = np.array([float(x) for x in mean]).reshape(n, 2)
        V = np.array([[[float(V[t + i, t + j]) for j in (0, 1)] for i in (0, 1)]
                      for t in range(0, 2 * n, 2)])  # fmt: skip
    assert relative_error(smoothing.means(y, model, method=method), mean) < 1e-10
    assert relative_error(smoothing.covariances(y, model, method=method), V) < 1e-10
    zero = np.zeros((1, smoothing.normals_of_a_draw(n, model)))
    drawn = smoothing.draw(y, model, method=method, normals=zero)
    assert relative_error(drawn[0], mean) < 1e-10


def regular(varying, rng, n, m):
    time = (n,) if varying else ()

    def definite(k, time=time):
        X = rng.normal(size=(*time, k, k))
        return X @ X.swapaxes(-1, -2) + 0.1 * np.eye(k)

    return StateSpace(
        rng.normal(size=m), definite(m, ()), rng.normal(size=(*time, m)),
        rng.normal(size=(*time, P)), 0.5 * rng.normal(size=(*time, m, m)),
        rng.normal(size=(*time, P, m)), rng.normal(size=(*time, m, SHOCKS)), definite(P),
        definite(SHOCKS),
    )  # fmt: skip


KINDS = "draws", "draws, diffuse", "draws, varying", "means, diffuse"


@pytest.mark.parametrize(
    ("kind", "mode"),
    [*((x, PYTHON) for x in KINDS), pytest.param(KINDS[1], "JAX", marks=JAX.marks)],
)
def test_gradients_against_complex_steps(kind, mode):
    rng, n, m = np.random.default_rng(11), 5, 3
    model = regular("varying" in kind, rng, n, m)
    y = rng.normal(size=(n, P))
    y[1, 1] = y[3] = np.nan
    arrays = {"y": y} | model.asdict()
    if "diffuse" in kind:
        arrays["A"] = np.eye(m, 2) + 0.1 * rng.normal(size=(m, 2))
    symbols = {x: pt.tensor(x, shape=X.shape) for x, X in arrays.items()}
    given, A = [symbols[x] for x in ("y", *NAMES)], symbols.get("A")
    draws = "draws" in kind
    normals = rng.normal(size=(2 if draws else 1, smoothing.normals_of_a_draw(n, model))) * draws
    out = kalman_draw(*given, normals, A=A) if draws else kalman_smooth(*given, A=A)[None]
    g = rng.normal(size=(len(normals), n, m))
    wrt = list(symbols.values())
    evaluate = pytensor.function(wrt, [out, *pt.grad((out * g).sum(), wrt)], mode=mode)
    value, *bars = evaluate(*arrays.values())

    def reference(**moved):
        X = arrays | moved
        y = np.where(np.isnan(arrays["y"]), np.nan, X["y"])
        model = StateSpace(**{x: X[x] for x in NAMES})
        return smoothing.draw(y, model, A=X.get("A"), method="reference", normals=normals)

    assert relative_error(value, reference()) < 1e-12
    for (x, X), bar in zip(arrays.items(), bars, strict=True):
        expected = complex_step(
            lambda moved, x=x: (reference(**{x: moved}) * g).sum(), np.nan_to_num(X),
            symmetric=x in SYMMETRIC,
        )  # fmt: skip
        assert np.abs(bar - expected).max() < 1e-10 * max(1, np.abs(expected).max()), x


@pytest.mark.thorough
def test_the_compiled_functions_are_the_text():
    """What Numba's mode calls; a whole PyTensor function in that mode takes minutes to compile."""
    rng, n, m, J = np.random.default_rng(12), 5, 3, 2
    y = rng.normal(size=(n, P))
    y[1] = np.nan
    given = [y, rng.normal(size=(J, m)), rng.normal(size=(n, J, m)), rng.normal(size=(n, J, P))]
    given += [np.eye(m), rng.normal(size=(1, m, m)) / 2, rng.normal(size=(1, P, m))]
    given += [np.eye(P)[None], np.eye(m)[None], np.eye(m, 1)]
    compiled = drawing.compiled()
    drawn = compiled["draws"](*given, 1e-13)
    assert relative_error(drawn, drawing.draws(*given, 1e-13)) < 1e-12
    given.append(rng.normal(size=(n, J, m)))
    found, expected = (pull(*given, 1e-13) for pull in
                       (compiled["pull_draws"], drawing.pull_draws))  # fmt: skip
    for X, Y in zip(found, expected, strict=True):
        assert relative_error(X, Y) < 1e-12


def test_gradient_of_singular_covariances_at_their_rank():
    """P0, Q and H of rank one or zero, scaled: the draw moves with the square root."""
    model, y = a_model(), a_series()
    model = replace(model, H=np.array([[1.0, 1.0], [1.0, 1.0]]))
    normals = np.random.default_rng(8).normal(size=(1, smoothing.normals_of_a_draw(N, model)))
    s = pt.dvector("s")
    scaled = {"P0": s[0] * model.P0, "H": s[1] * model.H, "Q": s[2] * model.Q}
    arrays = model.asdict() | scaled
    total = (kalman_draw(y, *arrays.values(), normals) ** 2).sum()
    bar = pytensor.function([s], pt.grad(total, s), mode=PYTHON)(np.ones(3))

    def reference(x):
        arrays = {X: x[i] * getattr(model, X) for i, X in enumerate(scaled)}
        moved = replace(model, **arrays)
        return (smoothing.draw(y, moved, method="reference", normals=normals) ** 2).sum()

    assert relative_error(bar, complex_step(reference, np.ones(3))) < 1e-10


def test_the_root_and_its_gradient():
    rng = np.random.default_rng(9)
    L, g = np.tril(rng.normal(size=(4, 4))), rng.normal(size=(4, 4))
    for P0 in (L @ L.T, L[:, :2] @ L[:, :2].T, np.diag([0.0, 2.0, 0.0, 1.0]), np.zeros((4, 4))):
        B = smoothing.roots(P0[None])[0]
        assert np.abs(B @ B.T - P0).max() < 1e-14 * max(1, np.abs(P0).max())
        bar = pull_root(P0, g)
        assert np.array_equal(bar, bar.T)
        k = np.linalg.matrix_rank(P0)
        for _ in range(3):  # along D P0 + P0 D', which leaves the rank as it is
            D = rng.normal(size=(4, 4))
            moved = [
                (np.eye(4) + 1e-5 * s * D) @ P0 @ (np.eye(4) + 1e-5 * s * D).T for s in (1, -1)
            ]
            ahead, behind = (smoothing.roots(X[None])[0] * g for X in moved)
            slope = (ahead - behind).sum() / 2e-5
            assert abs((bar * (D @ P0 + P0 @ D.T)).sum() - slope) < 1e-6 * (1 + abs(slope)), k


def test_what_does_not_fit_is_refused():
    y, model = a_series(), a_model()
    k = smoothing.normals_of_a_draw(N, model)
    with pytest.raises(ValueError, match=rf"normals has shape \(2, 3\), expected .* = \(J, {k}\)"):
        smoothing.draw(y, model, normals=np.zeros((2, 3)))
    for count in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="expected a number of draws, 1 or more"):
            smoothing.draw(y, model, count)
    with pytest.raises(ValueError, match="ahead is 0, expected a number of steps, 1 or more"):
        smoothing.forecast(y, model, 0)
    with pytest.raises(ValueError, match="c has 8 steps, expected those of y .*, 8 \\+ 2"):
        smoothing.forecast(y, a_model(varying=True), 2)
    with pytest.raises(ValueError, match=r"A has shape \(3, 1\), expected \(m, q\) = \(4, q\)"):
        smoothing.means(y, model, np.ones((3, 1)))
    with pytest.raises(ValueError, match="'slow', expected 'fused' or 'reference'"):
        smoothing.means(y, model, method="slow")
    with pytest.raises(ValueError, match=r"y has shape"):
        smoothing.draw(y[:, :1], model)
    blind = replace(model, Z=np.array([[1.0, 0, 0, 0]] * 2), T=np.eye(M))
    for method in ("reference", "fused"):
        with pytest.raises(ValueError, match="the data say nothing about .*state 1"):
            smoothing.means(y, blind, np.eye(M)[:, 1:2], method)
    certain = replace(model, P0=0 * model.P0, Q=0 * model.Q, H=0 * model.H)
    for method in ("reference", "fused"):
        with pytest.raises(np.linalg.LinAlgError, match="not positive definite at step 0"):
            smoothing.draw(y, certain, method=method)
    arrays = [y, *model.asdict().values()]
    with pytest.raises(ValueError, match="normals has 1 dimensions, expected 2"):
        kalman_draw(*arrays, np.zeros(k))
    with pytest.raises(ValueError, match="A has 1 dimensions, expected 2"):
        kalman_smooth(*arrays, A=np.zeros(M))
    with pytest.raises(ValueError, match=r"A has shape \(3, 1\), expected \(m, q\) = \(4, q\)"):
        kalman_smooth(*arrays, A=np.zeros((3, 1)))
    with pytest.raises(TypeError, match="A complex, expected real arrays"):
        kalman_smooth(*arrays, A=np.zeros((M, 1)) + 0j)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        a0 = pt.dvector("a0")
        first = pt.grad((kalman_smooth(y, a0, *arrays[2:]) ** 2).sum(), a0)
        pt.grad(first.sum(), a0)
    assert CovarianceRoot() == CovarianceRoot()
    assert covariance_root(pt.dmatrix()).ndim == 2


def test_an_op_says_nan_where_the_data_leave_a_direction_open():
    model, y = a_model(), a_series()
    blind = replace(model, Z=np.array([[1.0, 0, 0, 0]] * 2), T=np.eye(M))
    out = kalman_smooth(y, *blind.asdict().values(), A=np.eye(M)[:, 1:2])
    assert np.isnan(out.eval(mode=PYTHON)).all()


@pytest.mark.skipif(not find_spec("jax"), reason="needs JAX")
def test_jax_maps_and_differentiates_draws():
    """As its samplers and what they do after sampling: by its own rules, from one draw to many."""
    import jax
    from pytensor.graph import FunctionGraph
    from pytensor.link.jax.dispatch import jax_funcify

    from helpers.kalman.ops import in_jax  # noqa: F401 (learns the Ops)

    jax.config.update("jax_enable_x64", True)
    rng, n, m = np.random.default_rng(3), 3000, 4
    eye, start = np.eye(m)[None], pt.tensor(shape=(1, m), dtype="float64")
    numbers = [rng.normal(size=shape) for shape in ((n, m), (n, 1, m), (n, 1, m))]
    y, shocks, noise = numbers
    drawn = KalmanDraw()(y, start, shocks, noise, eye[0], eye / 2, eye, eye, eye, np.eye(m, 1))
    whole = jax_funcify(FunctionGraph([start], [drawn], clone=True))
    starts = rng.normal(size=(3, 1, m))
    found = jax.jit(jax.vmap(lambda x: whole(x)[0]))(starts)
    bars = jax.jit(jax.vmap(jax.grad(lambda x: whole(x)[0].sum())))(starts)
    both = pytensor.function([start], [drawn, pt.grad(drawn.sum(), start)], mode=PYTHON)
    for k, (value, bar) in enumerate(map(both, starts)):
        assert relative_error(found[k], value) < 1e-12
        assert relative_error(bars[k], bar) < 1e-12


@pytest.fixture
def extras(monkeypatch):
    from pymc_extras.statespace.core import forward_sampling, statespace

    for factory in ("FILTER_FACTORY", "SMOOTHER_FACTORY"):
        monkeypatch.setattr(statespace, factory, dict(getattr(statespace, factory)))
    monkeypatch.setattr(
        forward_sampling, "_sample_conditional", forward_sampling._sample_conditional
    )
    return forward_sampling, statespace


def test_pymc_extras_draws_are_ours(extras):
    """Its random variables, given the same normal numbers, are the draws whose law is proven."""
    from helpers.kalman import pymc as ours

    model, y = a_model(), a_series()
    arrays = [pt.as_tensor_variable(X) for X in (np.where(np.isnan(y), -9999.0, y),
                                                 *model.asdict().values())]  # fmt: skip
    rng = pytensor.shared(np.random.default_rng(4))
    kalman_filter = ours.ClosedFormFilter(cov_jitter=0.0)
    drawn = ours.ClosedFormDraws.rv_op(*arrays, kalman_filter=kalman_filter, rng=rng)
    k = smoothing.normals_of_a_draw(N, model)
    normals = np.random.default_rng(4).standard_normal((1, k))
    expected = smoothing.draw(y, model, normals=normals)[0]
    assert relative_error(pytensor.function([], drawn, mode=PYTHON)(), expected) < 1e-12

    V, mean = smoothing.covariances(y, model), smoothing.means(y, model)
    marginal = ours.ClosedFormMarginals.rv_op(
        *map(pt.as_tensor_variable, (mean, V, 0 * mean)), rng=rng
    )
    normals = np.random.default_rng(4).standard_normal((N, M))
    expected = drawing.marginals(mean, V, normals)
    assert relative_error(pytensor.function([], marginal, mode=PYTHON)(), expected) < 1e-12


def test_our_smoother_is_theirs(extras):
    from pymc_extras.statespace.filters.kalman_filter import StandardFilter
    from pymc_extras.statespace.filters.kalman_smoother import DisturbanceSmoother

    from helpers.kalman import pymc as ours

    model, y = a_model(), a_series()
    arrays = [pt.as_tensor_variable(X) for X in model.asdict().values()]
    for fill in (-5.0,):
        data = pt.as_tensor_variable(np.where(np.isnan(y), fill, y))
        found = []
        for one, two in ((ours.ClosedFormFilter, ours.ClosedFormSmoother),
                         (StandardFilter, DisturbanceSmoother)):  # fmt: skip
            how = {"cov_jitter": 0.0}
            outputs = one(**how, missing_fill_value=fill).build_graph(data, *arrays)
            more = {} if two is ours.ClosedFormSmoother else {"missing_fill_value": fill}
            found += two(**how, **more).build_graph(data, arrays, outputs)[:1]
            assert found[-1].name == "smoothed_states"
        means, expected = pytensor.function([], found, mode=PYTHON)()
        assert relative_error(means, expected) < 1e-11


def test_only_models_with_our_smoother_draw_in_our_way(extras, monkeypatch):
    from helpers.kalman import pymc as ours
    from helpers.kalman import register_filter

    forward_sampling, statespace = extras
    seen = []

    def sample(ss_mod, *args):
        seen.append(forward_sampling.SimulationSmoother)
        if args:
            raise RuntimeError
        return "drawn"

    theirs = forward_sampling.SimulationSmoother
    monkeypatch.setattr(forward_sampling, "_sample_conditional", sample)
    register_filter()
    register_filter()  # twice is once
    assert statespace.SMOOTHER_FACTORY["closed_form"] is ours.ClosedFormSmoother

    class Model:
        smoother_type = "disturbance"

    assert forward_sampling._sample_conditional(Model()) == "drawn"
    Model.smoother_type = "closed_form"
    assert forward_sampling._sample_conditional(Model()) == "drawn"
    assert seen == [theirs, ours.ClosedFormDraws]
    with pytest.raises(RuntimeError):
        forward_sampling._sample_conditional(Model(), 1)
    assert forward_sampling.SimulationSmoother is theirs
    with pytest.raises(ValueError, match="has a filter 'standard' already"):
        register_filter("standard")
    with pytest.raises(ValueError, match="has a smoother 'rts' already: RTSSmoother"):
        register_filter("rts")


@pytest.mark.parametrize("mode", [thorough("NUMBA"), PYTHON])
def test_marginals_of_any_rank(mode):
    """A draw is linear in its numbers: with unit vectors, its responses give the covariance."""
    rng, m = np.random.default_rng(5), 4
    roots = [rng.normal(size=(m, k)) for k in range(m + 1)]
    nearly = np.diag([1.0, 1.0, 1e-13, 1.0])
    P = np.array([*(B @ B.T for B in roots), nearly, 1e-20 * np.eye(m), np.diag([0, 2.0, 0, 1.0])])
    P = np.concatenate([P, 2 * P[3:]])
    mean = rng.normal(size=(len(P), m))
    z = pt.matrix("z")
    found = pytensor.function([z], NormalMarginals()(mean, P, z), mode=mode)
    assert np.array_equal(found(np.zeros_like(mean)), mean)
    centred = pytensor.function([z], NormalMarginals()(0 * mean, P, z), mode=mode)
    B = np.array([centred(np.tile(x, (len(P), 1))) for x in np.eye(m)])
    for V, expected in zip(np.einsum("kti,ktj->tij", B, B), P, strict=True):
        assert np.abs(V - expected).max() <= 1e-14 * np.abs(expected).max()


def test_normals_that_do_not_fit_are_named():
    arrays, k = (
        [a_series(), *a_model().asdict().values()],
        smoothing.normals_of_a_draw(N, a_model()),
    )
    says = rf"normals has shape \(2, 3\), expected \(J, m \+ n \(r \+ p\)\) = \(2, {k}\)"
    with pytest.raises(ValueError, match=says):
        kalman_draw(*arrays, np.zeros((2, 3)))
    with pytest.raises(TypeError, match="normals complex, expected real arrays"):
        kalman_draw(*arrays, np.zeros((2, k)) + 0j)


@pytest.mark.parametrize(
    "build, says",
    [
        (lambda: NormalMarginals()(np.zeros((3, 1)), np.ones((3, 1, 1)), np.ones((3, 2))),
         r"z has shape \(3, 2\), expected \(n, m\) = \(3, 1\)"),
        (lambda: CovarianceRoot()(np.eye(2)), "P has 2 dimensions, expected 3"),
        (lambda: CovarianceRoot()(np.ones((4, 2, 3))),
         r"P has shape \(4, 2, 3\), expected \(k, m, m\) = \(4, 2, 2\)"),
        (lambda: CovarianceRootGrad()(np.ones((2, 1, 1)), np.ones((1, 1, 1))),
         r"B_bar has shape \(1, 1, 1\), expected \(k, m, m\) = \(2, 1, 1\)"),
    ],
)  # fmt: skip
def test_shapes_that_are_known_are_looked_at_when_the_graph_is_built(build, says):
    with pytest.raises(ValueError, match=says):
        build()


def test_what_is_no_covariance_has_no_root():
    indefinite = [np.full((2, 2), np.nan), [[1.0, 2.0], [2.0, 1.0]], np.diag([1.0, -1.0])]
    for P in indefinite:
        assert np.isnan(smoothing.roots(np.array([P]))).all()
    nearly = np.diag([1.0, -1e-12])
    assert np.array_equal(smoothing.roots(nearly[None])[0], np.diag([1.0, 0.0]))
    arrays = pt.as_tensor(np.array([*indefinite, nearly]))
    B = CovarianceRoot()(arrays).eval(mode=PYTHON)
    assert np.isnan(B[:3]).all() and np.array_equal(B[3], np.diag([1.0, 0.0]))


def test_an_intercept_that_is_not_a_number_is_no_gap():
    one, zero = np.eye(1), np.zeros(1)
    y, d = np.array([[1.0], [2.0], [3.0]]), np.array([[0.0], [np.nan], [0.0]])
    found = kalman_smooth(y, zero, one, zero, d, *[one] * 5).eval(mode=PYTHON)
    assert not np.isfinite(found).any()


def walk(**more):
    """A random walk, observed with noise."""
    one, zero = np.eye(1), np.zeros(1)
    arrays = {"a0": zero, "P0": one, "c": zero, "d": zero, **dict.fromkeys("TZRHQ", one)}
    return StateSpace(**arrays | more)


@pytest.mark.parametrize("A", [None, np.eye(1)])
def test_what_is_no_covariance_is_not_drawn_from(A):
    """Noise of a variance below zero was NaN, as in a gap, and the data went unseen."""
    y = np.full((3, 1), 3.0)
    for name, X in (("H", [[-0.01]]), ("Q", [[-0.1]]), ("P0", [[-0.1]])):
        model = walk(**{name: np.array(X)})
        with pytest.raises(ValueError, match=f"{name} is no covariance, and nothing can be drawn"):
            smoothing.draw(y, model, A=A)
        with pytest.raises(ValueError, match=f"{name} is no covariance, and nothing can be drawn"):
            smoothing.forecast(y, model, 1, A=A)


@pytest.mark.parametrize("H", [-0.01, np.nan])
def test_an_op_draws_nan_where_there_is_no_covariance(H):
    y, arrays = np.full((3, 1), 3.0), walk().asdict() | {"H": np.full((1, 1), H)}
    out = kalman_draw(y, *arrays.values(), np.zeros((2, 7)))
    assert np.isnan(out.eval(mode=PYTHON)).all()


def test_normals_that_are_no_numbers_spoil_their_own_draw_alone():
    y, normals = np.ones((3, 1)), np.zeros((2, 7))
    with_gap = normals.copy()
    with_gap[0, -2] = np.nan
    xi = pt.matrix("xi")
    draws = pytensor.function([xi], kalman_draw(y, *walk().asdict().values(), xi), mode=PYTHON)
    found = draws(with_gap)
    assert np.isnan(found[0]).all() and relative_error(found[1], draws(normals)[1]) < 1e-14
    for wrong in (with_gap, normals + 0j):
        with pytest.raises(ValueError, match="normals is not finite and real"):
            smoothing.draw(y, walk(), normals=wrong)


def test_noise_of_which_there_is_no_observation_does_not_count():
    y, H = np.array([[1.0], [np.nan], [2.0]]), np.ones((3, 1, 1))
    model, normals = walk(H=H), np.random.default_rng(16).normal(size=(2, 7))
    H = np.where(np.isnan(y)[:, :, None], np.nan, H)
    out = kalman_draw(y, *(model.asdict() | {"H": H}).values(), normals)
    expected = smoothing.draw(y, model, normals=normals)
    assert relative_error(out.eval(mode=PYTHON), expected) < 1e-12


def test_a_mask_is_not_lost():
    y, model = np.ma.masked_less(np.ones((3, 1)), 0), walk()
    with pytest.raises(ValueError, match="y is a masked array"):
        smoothing.forecast(y, model, 1)
    with pytest.raises(ValueError, match="A is a masked array"):
        smoothing.means(np.ones((3, 1)), model, np.ma.masked_less(np.ones((1, 1)), 0))
    with pytest.raises(ValueError, match="normals is a masked array"):
        smoothing.draw(np.ones((3, 1)), model, normals=np.ma.masked_less(np.ones((1, 7)), 0))


def test_a_forecast_from_no_step_or_an_infinite_one_is_refused():
    """As of a model that does not vary, and with the steps that y has."""
    model = walk(c=np.zeros((3, 1)))
    with pytest.raises(ValueError, match="y is empty"):
        smoothing.forecast(np.ones((0, 1)), model, 3)
    with pytest.raises(ValueError, match=r"y has shape \(2, 2\), expected \(n, p\) = \(n, 1\)"):
        smoothing.forecast(np.ones((2, 2)), model, 1)
    with pytest.raises(ValueError, match="y is infinite at step 1"):
        smoothing.forecast(np.array([[1.0], [np.inf]]), model, 1)


@pytest.mark.parametrize("method", ["reference", "fused"])
@pytest.mark.parametrize("sizes", [(1e16, 1.0), (1e8, 1e-8), (1e12, 1.0)])
def test_what_only_a_vague_start_says_is_no_error(method, sizes):
    """Two levels, of which the data see the sum: their difference is what P0 says of it."""
    kappa, noise = sizes
    two, n = np.eye(2), 3
    model = StateSpace(
        np.zeros(2), kappa * two, np.zeros(2), np.zeros(1), two, np.ones((1, 2)), two,
        np.array([[noise]]), 0 * two,
    )  # fmt: skip
    V = smoothing.covariances(np.ones((n, 1)), model, method=method)
    difference, total = np.array([1.0, -1.0]), np.ones(2)
    assert relative_error(V @ difference @ difference, np.full(n, 2 * kappa)) < 1e-13
    expected = 1 / (1 / (2 * kappa) + n / noise)
    at_least = 4 * np.finfo(float).eps * kappa  # rounding of the entries, of the size of kappa
    assert np.abs(V @ total @ total - expected).max() < 1e-8 * expected + at_least


@pytest.mark.parametrize("method", ["reference", "fused"])
def test_a_vague_start_on_the_span_of_A_counts_once(method):  # noqa: N802
    y = np.array([[1.0], [2.0], [np.nan], [0.0]])
    expected = smoothing.covariances(y, walk(), np.eye(1), method)
    found = smoothing.covariances(y, walk(P0=np.array([[1e15]])), np.eye(1), method)
    assert relative_error(found, expected) < 1e-13
    # Beside a flat level, of which the data see the sum with a vague one alone.
    two = np.eye(2)
    model = StateSpace(
        np.zeros(2), 1e12 * np.array([[1.0, 0.5], [0.5, 1.0]]), np.zeros(2), np.zeros(1), two,
        np.ones((1, 2)), two, np.eye(1), np.zeros((2, 2)),
    )  # fmt: skip
    V = smoothing.covariances(y, model, two[:, :1], method)
    assert relative_error(V[:, 1, 1], np.full(4, 1e12)) < 1e-13


def test_the_ops_call_their_functions_with_their_tolerance(monkeypatch):
    """What Numba is given for a node, as Python runs it: it calls the compiled functions."""
    rng, n, m, J, tol = np.random.default_rng(14), 5, 2, 2, 1e-2
    given = [rng.normal(size=(n, P)), rng.normal(size=(J, m)), rng.normal(size=(n, J, m))]
    given += [rng.normal(size=(n, J, P)), np.eye(m), rng.normal(size=(1, m, m)) / 3]
    given += [rng.normal(size=(1, P, m)), np.eye(P)[None], np.eye(m)[None], np.eye(m, 1)]
    g, compiled, told = rng.normal(size=(n, J, m)), drawing.compiled(), []

    def watched(name):
        return lambda *arguments: (told.append(arguments[-1]), compiled[name](*arguments))[1]

    monkeypatch.setattr(drawing, "_READY", {x: watched(x) for x in compiled})
    draw = KalmanDraw(tol)
    bars = draw.pullback(draw(*given).owner.inputs, [], [pt.as_tensor(g)])
    for node, inputs, name in (
        (draw(*given).owner, given, "draws"),
        (bars[0].owner, [*given, g], "pull_draws"),
    ):
        function, _ = node.op.numba_function(node)
        found, expected = function.py_func(*inputs), compiled[name](*inputs, tol)
        found, expected = ((X,) if len(given) == len(inputs) else X for X in (found, expected))
        assert all(np.array_equal(X, Y) for X, Y in zip(found, expected, strict=True))
    assert told == [tol, tol]


def test_marginals_take_the_symmetric_part():
    rng = np.random.default_rng(15)
    P, z = np.tile([[2.0, 0.5], [0.1, 1.0]], (3, 1, 1)), rng.normal(size=(3, 2))
    half, mean = (P + P.swapaxes(1, 2)) / 2, np.zeros((3, 2))
    for functions in (drawing.PYTHON, drawing.compiled()):
        expected = functions["marginals"](mean, half, z)
        assert np.array_equal(functions["marginals"](mean, P, z), expected)


def test_a_call_that_was_interrupted_leaves_nothing_half_compiled(monkeypatch):
    from helpers.kalman import on_disk

    known, calls = on_disk.njit, []

    def at_the_second(**how):
        calls.append(how)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return known(**how)

    monkeypatch.setattr(drawing, "_READY", {})
    monkeypatch.setattr(on_disk, "njit", at_the_second)
    with pytest.raises(KeyboardInterrupt):
        drawing.compiled()
    assert drawing.compiled().keys() == drawing.PYTHON.keys()
