"""The compiled half without a compiler: its text in Python, over memory that checks every access.

Each test here answers in seconds, and tools/plant.py plants the faults that they are there for.
"""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from kalman_models import (
    CASES,
    REPEATING,
    VECTORS,
    arrays_of,
    exponential_smoothing,
    make,
    moving_vectors,
    repeating,
    season,
)
from kalman_oracle import true_gradient

from helpers.checks import relative_error
from helpers.datasets import random_model, simulate
from helpers.kalman import hessian, recursions, reference, square_root
from helpers.kalman.compiled import (
    backward,
    directions,
    forward,
    layout,
    one_pass,
    pull,
    push,
    tiles,
)
from helpers.kalman.compiled.door import sizes_of_kept
from helpers.kalman.compiled.forward import DONE, NOT_POSITIVE_DEFINITE, VAGUE, Steps
from helpers.kalman.compiled.inputs import (
    Arrays,
    NonZeros,
    Observed,
    Wanted,
    find_non_zeros,
    indices_in,
    listed,
    look,
    look_at,
    room_for_indices,
    varies,
)
from helpers.kalman.compiled.layout import LAYOUT, Saved, Sizes
from helpers.kalman.compiled.registers import Along, moving
from helpers.kalman.compiled.small import (
    InTime,
    Kept,
    Like,
    small_pass,
)
from helpers.kalman.compiled.small import change as small_change
from helpers.kalman.compiled.steps import filter_steps
from helpers.kalman.compiled.tiles import LANES, Mat, Memory
from helpers.kalman.square_root import fill_shares, is_past
from helpers.statespace import STATIC, StateSpace

SIZES = range(1, 18)


def held(X):
    """An array of steps in memory that checks every access."""
    memory = Memory(X.size)
    memory.data[:] = X.ravel()
    return memory


def in_time(A, w):
    """An array that has one entry of A for each step, or one in all."""
    return InTime(w, A[0].size if len(A) > 1 and A.ndim > 1 else 0)


def held_in_time(arrays):
    """`Arrays`, a0 and P0 without time."""
    return Arrays(*(in_time(X[None] if i < 2 else X, held(X)) for i, X in enumerate(arrays)))


def run_small(y, arrays, backwards, wanted, weight, tol, watch):
    """`run` by the pass in registers."""
    (n, p), m = y.shape, len(arrays.a0)
    y_bar, l = Memory(n * p), Memory(n)
    model = held_in_time(arrays)
    out = held_in_time([np.zeros_like(X) for X in arrays])
    kept = Kept(*(Memory(n * size) for size in sizes_of_kept(m, p)))
    observed = Observed(np.empty((n, p), np.uint8), np.empty(n, np.int64))
    look_at(y, observed)
    shares = held(np.zeros(m))
    if watch:
        fill_shares(arrays.P0, arrays.T, arrays.W, shares.data)
    report = np.zeros(3, np.int64)
    how = small_pass(
        Like(np.eye(m), np.eye(p), np.zeros((p, m))), held(y), model, backwards, wanted, shares,
        tol, weight, l, y_bar, kept, np.empty(n, np.int64), observed.same_until, out, report,
    )  # fmt: skip
    G = Arrays(*(X.w.data.reshape(A.shape) for X, A in zip(out, arrays, strict=True)))
    return how, Steps(l.data, report), G, y_bar.data.reshape(y.shape)


def run(
    y, model, weights=None, wanted=(True, True, True, True), tol=0.0, watch=False, small=False,
    columns=None,
):  # fmt: skip
    """A pass in Python: how it ended, l, the gradients by name, y_bar, and the steady stretches.

    Of the pass in registers, `weights` one number, the report instead of the last.
    """
    arrays, (n, p), m = arrays_of(model), y.shape, model.m
    backwards = wanted is not None
    wanted = Wanted(*(wanted or (False,) * 4), np.arange(m) if columns is None else columns)
    if small:
        weight = 1.0 if weights is None else weights[0]
        return run_small(y, arrays, backwards, wanted, weight, tol, watch)
    saved = Saved(backwards, len(wanted.columns) if backwards and (wanted.T or wanted.Z) else 0)
    w, _ = layout.checked_memory(Sizes(n, p, m), saved)
    found = indices_in(np.empty(room_for_indices(n, p, m), np.int64), n, p, m)
    observed, pattern = look(y, arrays, np.empty((n, p), np.uint8), found)
    g = np.ones(n) if weights is None else weights
    out, y_bar = Arrays(*(np.zeros_like(A) for A in arrays)), np.zeros((n, p))
    steps = Steps(np.empty(n), found.steady_from)
    how, _ = one_pass.one_pass(
        w, y, arrays, saved, backwards, varies(arrays), pattern, wanted, g,
        tol, observed, watch, steps, y_bar, out,
    )  # fmt: skip
    return how, steps, out, y_bar


def assert_is_the_reference(y, model, rtol=1e-12, weights=None, **options):
    how, steps, out, y_bar = run(y, model, weights, **options)
    assert how == DONE
    filtered = reference.kalman_filter(y, model)
    weights = np.ones(len(y)) if weights is None else weights
    bar = reference.FilterOutputs(l=weights)
    dy, G = reference.reverse(model, filtered, bar)
    assert relative_error(steps.l, filtered.out.l) < rtol
    assert relative_error(y_bar, dy) < rtol
    for name, X in G.asdict().items():
        if name in ("R", "Q"):
            continue
        found = getattr(out, name)
        found = found if name in (*STATIC, *model.time_varying) else found[0]
        if name in "TZ" and options.get("columns") is not None:
            found, X = found[..., options["columns"]], X[..., options["columns"]]
        assert np.abs(found - X).max(initial=0) <= rtol * max(np.abs(X).max(initial=0), 1e-3), name
    R, Q = (model.over_time(x, len(out.W)) for x in "RQ")
    bars = {"R": 2 * out.W @ R @ Q, "Q": np.swapaxes(R, -1, -2) @ out.W @ R}
    for name, found in bars.items():
        found, X = found if name in model.time_varying else found.sum(axis=0), getattr(G, name)
        assert np.abs(found - X).max(initial=0) <= rtol * max(np.abs(X).max(initial=0), 1e-3), name
    return steps


@pytest.mark.parametrize("columns", [[0], [1, 5], [], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("how", ["every step", "steady", "unequal weights", "sparse T", "p = 1"])
def test_gradients_of_some_columns(how, columns):
    """Of T and Z; those of the other arrays are what they were."""
    m, p, n, steady = 6, 1 if how == "p = 1" else 2, 60, how == "steady"
    rng = np.random.default_rng(3)
    model = StateSpace(**random_model(m, p, rng=rng))
    if how == "sparse T":
        model = replace(model, T=np.roll(np.eye(m), 1, axis=0) * 0.9)
    if steady:
        model = replace(model, T=0.5 * model.T)
    y = simulate(n, rng, **model.asdict())[0]
    y[3:5, 0] = np.nan
    weights = rng.uniform(0.5, 2, n) if how == "unequal weights" else None
    some = len(columns) > 0
    steps = assert_is_the_reference(
        y, model, 1e-6 if steady else 1e-11, weights, columns=np.array(columns, np.int64),
        wanted=(True, some, some, True), tol=1e-9 if steady else 0.0,
    )  # fmt: skip
    assert steady == (steps.steady_from >= 0).any()


@pytest.mark.parametrize("columns", [[0], [1, 4], []])
@pytest.mark.parametrize("T", ["dense", "a season"])
def test_some_columns_of_a_start_in_roots(columns, T):  # noqa: N803
    """What the way back gives in them, and all that has none, is what it gives with all columns."""
    m, n, rng = 7, 9, np.random.default_rng(5)
    model = StateSpace(**random_model(m, 1, 1, rng=rng))
    if T == "a season":
        model = replace(model, T=np.roll(np.eye(m), 1, axis=0))
    y = simulate(n, rng, **model.asdict())[0]
    given = arrays_of(model)
    T_t = square_root.listed(np.ascontiguousarray(model.T.T))
    assert (len(T_t.index) > 0) == (T == "a season")
    vague = replace(model, P0=1e6 * np.eye(m))
    truth, (_, _, G) = true_gradient(y, vague), reference.loglike_and_grad(y, vague)
    assert all(relative_error(getattr(G, x), truth[x]) < 1e-9 for x in "TZH")
    answers = []
    columns = np.array(columns, np.int64)
    for chosen in (np.arange(m), columns):
        l = np.empty(n)
        steps, _, _, B_t, good = square_root.filter_roots(
            y, np.ones((n, 1)), given.a0, 1e6 * np.eye(m), given.c, given.d, given.T, given.Z,
            given.H, given.W, l, chosen,
        )  # fmt: skip
        assert good and len(steps) > 2
        carried = square_root.carry(np.ones(m), np.eye(m), B_t, chosen)
        found = [l[: len(steps)]]
        for step in reversed(steps):
            *bars, carried = square_root.pull_step(step, carried, 1.0, T_t, chosen)
            e, T_bar, Z_bar, H_bar = bars
            T_bar = T_bar if chosen is columns else T_bar[:, columns]
            found += [e, T_bar, Z_bar[:, columns], H_bar]
        answers.append([*found, *carried[:-1], *([carried.BPi] if len(columns) else [])])
    for every, some in zip(*answers, strict=True):
        np.testing.assert_allclose(
            some, every, rtol=1e-11, atol=1e-11 * np.abs(every).max(initial=1)
        )


SMALL_CASES = (
    "easy", "gaps", "nothing observed", "varying", "H = 0", "P0 = 0", "level", "singular Q",
)  # fmt: skip


def small_case(name, m, p):
    """Few states and series: easy and hard."""
    rng = np.random.default_rng(11)
    n, moving = 20, ("c", "d", "T", "Z", "R", "H", "Q") if name == "varying" else ()
    kind = {"n": n if moving else None, "time_varying": moving, "singular_Q": name == "singular Q"}
    model = StateSpace(**random_model(m, p, rng=rng, **kind))
    y = simulate(n, rng, **model.asdict())[0]
    if name in ("gaps", "varying"):
        y[rng.random(y.shape) < 0.2] = np.nan
        y[[0, 9, 19]] = np.nan
    if name == "nothing observed":
        y[:] = np.nan
    if name == "H = 0":
        model = replace(model, H=np.eye(p) if p > m else np.zeros((p, p)))
    if name == "P0 = 0":
        model = replace(model, P0=np.zeros((m, m)))
    if name == "level":
        model, y = replace(model, a0=model.a0 + 1e6, d=-1e6 * model.Z.sum(axis=-1)), y
    return y, model


@pytest.mark.parametrize(("m", "p"), [(1, 1), (2, 1), (3, 2), (1, 4), (4, 4)])
@pytest.mark.parametrize("name", SMALL_CASES)
def test_few_states_and_series(name, m, p):
    y, model = small_case(name, m, p)
    rtol = 1e-8 if name == "level" else 1e-11
    assert_is_the_reference(y, model, rtol, small=True)
    if name == "gaps":
        assert_is_the_reference(y, model, rtol, weights=np.full(len(y), -2.5), small=True)


@pytest.mark.parametrize(("m", "p"), [(1, 1), (3, 2)])
def test_few_states_settle(m, p):
    model = StateSpace(**random_model(m, p, rng=5, radius=0.7))
    y = simulate(150, 5, **model.asdict())[0]
    y[80, 0] = np.nan
    steps = assert_is_the_reference(y, model, 1e-11, small=True, tol=1e-13)
    first = steps.steady_from[2]
    assert 0 < first < 60
    assert run(y, model, small=True)[1].steady_from[2] == len(y)
    assert run(y, model, tol=1e-13)[1].steady_from[first + 1 :].max() >= first


@pytest.mark.parametrize("names", VECTORS)
@pytest.mark.parametrize(("m", "p", "small"), [(1, 1, True), (3, 2, True), (3, 2, False)])
def test_vectors_that_vary_leave_the_steady_state(m, p, small, names):
    y, model = moving_vectors(m, p, names)
    how = {"small": small, "tol": 1e-13, "rtol": 1e-11}
    steps = assert_is_the_reference(y, model, **how)
    weights = np.full(len(y), -2.5)
    assert_is_the_reference(y, model, weights=weights, **how)
    if small:
        assert 0 < steps.steady_from[2] < 60
    else:
        assert list(np.flatnonzero(steps.steady_from >= 0)) == [79, 139, 199]


def test_the_gain_of_a_steady_state_is_not_used_after_a_gap():
    """The two halves of a series, one gap between them, are filtered alike."""
    model = StateSpace(**random_model(2, 1, rng=5, radius=0.7))
    y = simulate(150, 5, **model.asdict())[0]
    y[80] = np.nan
    np.testing.assert_allclose(
        run(y, model, small=True, tol=1e-13)[1].l, run(y, model, small=True)[1].l, rtol=1e-11
    )


def test_what_is_not_wanted_of_few_states_stays_zero():
    y, model = small_case("gaps", 2, 1)
    _, _, everything, _ = run(y, model, small=True)
    _, _, few, _ = run(y, model, wanted=(False,) * 4, small=True)
    assert not any(X.any() for X in (few.P0, few.T, few.Z, few.H, few.W))
    for name in ("a0", "c", "d"):
        np.testing.assert_array_equal(getattr(few, name), getattr(everything, name))
    for i, name in enumerate("TZW", start=1):
        _, _, one, _ = run(y, model, wanted=(True, *(i == j for j in (1, 2, 3))), small=True)
        np.testing.assert_array_equal(getattr(one, name), getattr(everything, name))
        assert not any(getattr(one, other).any() for other in "TZW" if other != name)
    how, steps, *_ = run(y, model, wanted=None, small=True)
    assert how == DONE
    np.testing.assert_array_equal(steps.l, run(y, model, small=True)[1].l)


def test_a_vague_start_of_few_states_is_seen():
    y, model = small_case("easy", 3, 2)
    assert run(y, model, small=True, watch=True)[0] == DONE
    vague = replace(model, P0=1e7 * np.eye(3))
    assert run(y, vague, small=True, watch=True)[0] == VAGUE
    assert run(y[:2], vague, small=True, watch=True)[0] == VAGUE
    assert run(y, vague, small=True)[0] == DONE
    I = np.eye(3)
    noisy = replace(vague, P0=1e9 * I, d=np.zeros(3), Z=I, H=I, R=I, Q=1e6 * I)
    # Shocks hide it in every prediction, but after the last step there is none.
    assert run(np.zeros((1, 3)), noisy, small=True, watch=True)[0] == VAGUE
    y[:9] = np.nan  # nothing to be learnt
    assert run(y[:9], vague, small=True, watch=True)[0] == DONE
    assert run(y, vague, small=True, watch=True)[0] == VAGUE


def outputs(y, model):
    """The seven outputs of the filter, by its steps in Python."""
    arrays, (n, p), m = arrays_of(model), y.shape, model.m
    w, _ = layout.checked_memory(Sizes(n, p, m), Saved(False, 0))
    one_pass.clean(w)
    found = indices_in(np.empty(room_for_indices(n, p, m), np.int64), n, p, m)
    observed, pattern = look(y, arrays, np.empty((n, p), np.uint8), found)
    shapes = (m,), (m,), (p,), (m, m), (m, m), (p, p), ()
    out = reference.FilterOutputs(*(np.full((n, *shape), np.inf) for shape in shapes))
    filter_steps(w, y, observed, arrays, varies(arrays), pattern, out)
    return out


@pytest.mark.parametrize("name", [*CASES, "season"])
def test_all_outputs_of_every_case(name):
    if name == "season":
        model = season(4)
        y = simulate(30, 4, **model.asdict())[0]
        y[9:12] = np.nan
    else:
        y, model = make(name)
    expected, found = reference.kalman_filter(y, model).out, outputs(y, model)
    for field, X in zip(found._fields, found, strict=True):
        assert relative_error(X, getattr(expected, field)) < 1e-12, field
    for P in (found.P_filt, found.P_pred, found.F):
        np.testing.assert_array_equal(P, P.swapaxes(1, 2))


def test_outputs_end_where_f_is_not_positive_definite():
    one, zero = np.eye(1), np.zeros(1)
    model = StateSpace(zero, one, zero, zero, T=one, Z=one, R=one, H=-3 * one, Q=one)
    found = outputs(np.ones((3, 1)), model)
    assert all(np.isnan(X).all() for X in found)


@pytest.mark.parametrize("apart", [0, 10**6], ids=["one block", "two blocks"])
@pytest.mark.parametrize("filtered", [-1, 0, 1, 17])
def test_no_two_matrices_overlap_and_each_has_its_room(filtered, apart):
    saved = Saved(filtered >= 0, max(filtered, 0))
    letters = {"any": 1, "1": 1, "2p": None, "widest": None}
    sizes = (1, 4, 9, 17) if apart else SIZES
    for m in sizes:
        for p in sizes:
            n = 3
            header = np.zeros(layout.HEADER, np.int64)
            total = layout.lay_out_together(Sizes(n, p, m), saved, header)
            near = header[2 * layout.GAINS_FROM]
            if apart:
                near, total = layout.lay_out(Sizes(n, p, m), saved, header, apart)
                assert near < apart == header[2 * layout.GAINS_FROM]
            places = list(header[: 2 * len(LAYOUT) : 2])
            ends = [*places[1:], total]
            ends[layout.GAINS_FROM - 1] = near
            for k, (name, (rows, cols)) in enumerate(LAYOUT.items()):
                # What the matrix must hold, counted here from the words of the layout.
                needed = letters.get(rows) or {"m": m, "p": p, "2p": 2 * p}.get(rows)
                if needed is None:
                    kept = n
                    if "gains" in rows:
                        kept = n if saved.gains else 1
                    if "filtered" in rows:
                        kept = n if saved.filtered else 1
                    each = p if rows.endswith(" p") else m if rows.endswith(" m") else 1
                    needed = kept * each + ("+ 1" in rows)
                width = {"m": m, "p": p, "widest": max(m, p), "columns": saved.filtered or m}[cols]
                ld = header[2 * k + 1] or width
                assert places[k] % LANES == 0 and ld >= width and (rows == "any" or ld % LANES == 0)
                assert ends[k] - places[k] >= needed * ld, (name, m, p)
                if rows in ("m", "p"):  # whole blocks are read
                    assert ends[k] - places[k] >= -(-needed // LANES) * LANES * ld, (name, m, p)
            assert places[0] >= layout.HEADER


def matrix(w, at, X):
    """X in the workspace from ``at`` on, its rows padded to whole vectors with zeros."""
    rows, cols = X.shape
    ld = -(-cols // LANES) * LANES
    padded = np.zeros((-(-rows // LANES) * LANES, ld))
    padded[:rows, :cols] = X
    w.data[at : at + padded.size] = padded.ravel()
    return Mat(at, ld, 1), at + padded.size


def read(w, A, rows, cols):
    return np.array([w.data[A.at + i * A.ld : A.at + i * A.ld + cols] for i in range(rows)])


@pytest.mark.parametrize("rows", SIZES)
def test_products_of_every_size(rows):
    rng = np.random.default_rng(rows)
    for inner in (1, 2, 5):
        for cols in SIZES:
            w = Memory(4000)
            A, B, C = rng.normal(size=(rows, inner)), rng.normal(size=(inner, cols)), None
            C = rng.normal(size=(rows, cols))
            a, at = matrix(w, 0, A)
            a_t, at = matrix(w, at, A.T)
            b, at = matrix(w, at, B)
            c, at = matrix(w, at, C)
            out, end = matrix(w, at, np.full((rows, cols), np.nan))
            w.data[end:] = 7.0
            for left in (a, tiles.transposed(a_t)):
                tiles.product(w, out, -0.5, left, b, c, rows, inner, cols)
                assert np.abs(read(w, out, rows, cols) - (C - 0.5 * A @ B)).max() < 1e-14
            tiles.row_product(w, out.at, 2.0, a.at, b, c.at, inner, cols)
            assert np.abs(read(w, out, 1, cols) - (C[:1] + 2 * A[:1] @ B)).max() < 1e-14
            assert (w.data[end:] == 7.0).all()


@pytest.mark.parametrize("size", SIZES)
def test_square_helpers_of_every_size(size):
    rng = np.random.default_rng(size)
    A = rng.normal(size=(size, size)) * (rng.random((size, size)) < 0.3)
    B, C = rng.normal(size=(size, size)), rng.normal(size=(size, size))
    w = Memory(6000)
    a, at = matrix(w, 0, A)
    b, at = matrix(w, at, B)
    c, at = matrix(w, at, C)
    out, at = matrix(w, at, np.zeros((size, size)))
    entries = NonZeros(np.empty(size + 1, np.int64), np.empty(size * size, np.int64))
    find_non_zeros(A[np.newaxis], False, entries)
    tiles.sparse_product(w, out, a, listed(entries), b, c, size, size)
    assert np.abs(read(w, out, size, size) - (C + A @ B)).max() < 1e-14
    x, at = matrix(w, at, np.zeros((size, size)))
    given = (w, out, x, a, listed(entries), b)
    for alpha, compute in (
        (0.0, lambda: tiles.sparse_product_transposed(*given, c, size, size)),
        (-0.5, lambda: tiles.sparse_product_updated(*given, -0.5, c.at, c, size, size)),
    ):
        compute()
        expected = C + A @ (B + alpha * np.outer(C[0], C[0]))
        assert np.abs(read(w, x, size, size) - expected).max() < 1e-14
        assert np.abs(read(w, out, size, size) - expected.T).max() < 1e-14
    weights, at = matrix(w, at, np.abs(C[:1]))
    moved = ((B[0] - A[0]) ** 2 * np.abs(C[0])).max()
    assert tiles.largest_change(w, a.at, b.at, weights.at, size) == moved
    tiles.transpose(w, out, b, size, size)
    assert (read(w, out, size, size) == B.T).all()
    S = A @ A.T
    s, at = matrix(w, at, np.where(np.tri(size, dtype=bool), S, np.nan))
    block = np.arange(size) // LANES
    full = np.where(block[:, None] >= block[None, :], S, np.nan)  # garbage above the blocks
    s, _ = matrix(w, s.at, full)
    tiles.symmetrize(w, s, size)
    assert np.abs(read(w, s, size, size) - S).max() < 1e-14
    lower, _ = matrix(w, out.at, np.zeros((size, size)))
    tiles.product(w, lower, 1.0, a, tiles.Mat(b.at, b.ld, 1), c, size, size, size, True)
    seen = read(w, lower, size, size)
    assert np.abs(np.tril(seen - (C + A @ B))).max() < 1e-14
    assert tiles.dot(w, a.at, b.at, size) == pytest.approx(A[0] @ B[0], abs=1e-14)


@pytest.mark.parametrize("name", [x for x in CASES if x not in ("long", "near a unit root")])
def test_every_case(name):
    y, model = make(name)
    assert_is_the_reference(y, model)


def burn_in(n, first):
    """Weights that are equal from step `first` on."""
    return np.append(np.random.default_rng(1).normal(size=first), np.full(n - first, -0.7))


@pytest.mark.parametrize("name", ["gaps", "time-varying with gaps", "two shocks"])
def test_unequal_weights(name):
    y, model = make(name)
    n = len(y)
    for first in (1, n // 2, n - 1, n):
        weights = burn_in(n, first)
        assert_is_the_reference(y, model, weights=weights)
        assert one_pass.equal_from(weights) == min(first, n - 1)


@pytest.mark.parametrize("m", [1, 4, 5, 8, 9])
@pytest.mark.parametrize("p", [1, 2, 4, 5, 9])
def test_sizes_around_whole_vectors(m, p):
    rng = np.random.default_rng(m * 10 + p)
    arrays = random_model(m=m, p=p, r=min(m, 2), rng=rng)
    y, _ = simulate(4, rng, **arrays)
    y[1, 0] = np.nan
    assert_is_the_reference(y, StateSpace(**arrays), rtol=1e-11)


@pytest.mark.parametrize("where", [[0], [7], [3], [6, 7], [0, 1, 4]])
def test_gaps_wherever_they_are(where):
    """The first step, the last, both ends of a stretch."""
    rng = np.random.default_rng(3)
    arrays = random_model(m=3, p=2, r=2, rng=rng)
    y, _ = simulate(8, rng, **arrays)
    y[where, 1] = np.nan
    assert_is_the_reference(y, StateSpace(**arrays))


@pytest.mark.parametrize("m", [2, 5])
def test_covariances_stay_symmetric_where_states_explode(m):
    """What is not symmetric in P grows by |T| = 1.69 a step, 1e20 times in 90 steps."""
    turn = np.array([[0.8, 0.6], [-0.6, 0.8]])
    T = np.zeros((5, 5))  # of the five states' entries so few are not zero that they are followed
    T[:2, :2], T[2:4, 2:4] = 1.3 * turn, 0.5 * turn
    arrays = random_model(m=m, p=1, rng=np.random.default_rng(2))
    arrays |= {"T": T[:m, :m], "Q": np.eye(arrays["R"].shape[1])}
    y = 1e-9 * simulate(90, np.random.default_rng(3), **arrays)[0]
    assert_is_the_reference(y, StateSpace(**arrays), rtol=1e-9)


@pytest.mark.parametrize("period", [4, 9])
def test_a_transition_that_is_nearly_empty(period):
    model = season(period)
    y, _ = simulate(6, np.random.default_rng(0), **model.asdict())
    y[2] = np.nan
    assert_is_the_reference(y, model, rtol=1e-10)


@pytest.mark.parametrize(
    ("first", "expected"), [(0, [49, 99, 159]), (13, [49, 99, 159]), (70, [99, 159]), (159, [])]
)
def test_steady_stretches_between_gaps(first, expected):
    """It settles, a gap unsettles it, it settles again: the gradient is the plain one.

    But where weights differ until later.
    """
    rng = np.random.default_rng(5)
    arrays = random_model(m=2, p=2, r=2, rng=rng, radius=0.5)
    y, _ = simulate(160, rng, **arrays)
    y[50, 0] = np.nan
    y[52] = np.nan
    y[100:, 1] = np.nan
    steps = assert_is_the_reference(
        y, StateSpace(**arrays), rtol=1e-11, tol=1e-13, weights=burn_in(160, first)
    )
    assert list(np.flatnonzero(steps.steady_from >= 0)) == expected


@pytest.mark.parametrize("p", [1, 2])
def test_a_surprise_where_a_steady_state_begins_costs_later_steps_no_digits(p):
    """What the steps share is no difference of numbers as large as it."""
    rng = np.random.default_rng(5)
    model = StateSpace(**random_model(m=2, p=p, r=2, rng=rng, radius=0.3))
    y, _ = simulate(200, rng, **model.asdict())
    first = run(y, model, tol=1e-13)[1].steady_from.max()
    y[first] = 1e7
    l = run(y, model, tol=1e-13)[1].l
    assert relative_error(l[-50:], reference.kalman_filter(y, model).out.l[-50:]) < 1e-10


def slow(variance=1e-4, transition=0.99):
    """A covariance that takes long to settle: hardly any noise, a weak gain."""
    one = np.eye(1)
    return StateSpace(
        [0.0], 0.1 * one, [0.0], [0.0], T=transition * one, Z=one, R=one, H=one, Q=variance * one
    )


def test_tolerance_bounds_what_a_slow_covariance_misses(tol=1e-4):
    """It changes by little at a step and has far to go: the geometric tail counts it."""
    model, y = slow(), np.zeros((700, 1))
    _, steps, _, _ = run(y, model, wanted=None, tol=tol)
    (end,) = np.flatnonzero(steps.steady_from >= 0)
    P = reference.kalman_filter(y, model).out.P_pred[:, 0, 0]
    assert abs(P[steps.steady_from[end]] / P[-1] - 1) < 2 * tol


def test_variances_that_are_rounding_do_not_hide_what_moves():
    """A look found a change of 1e17, the next one of 0.01: steady, if that was a rate."""
    assert forward.is_steady(1e-12, 1e-6, 4, 1e-13)
    for now, before in ((0.01, 1e17), (1e-12, 1.0), (1e-12, 2.0), (0.1, 0.1), (1e-12, -1.0)):
        assert not forward.is_steady(now, before, 4, 1e-13)
    one, other = np.diag([1.0, 1e-33]), np.diag([1.01, 0.0])
    w, _ = layout.checked_memory(Sizes(1, 1, 2), Saved(False, 0))
    w.data[:] = 0.0
    for first, then in ((one, other), (other, one)):
        for X, at in ((first, w.space.P), (then, w.space.P_next)):
            for i, j in np.ndindex(2, 2):
                tiles.put(w, at.at + i * at.ld + j, X[i, j])
        assert forward.change(w, w.space.P, w.space.P_next) == pytest.approx(1.0)
        assert small_change(first, then, 0.0, 9.0)[0] == pytest.approx(1.0)


def test_no_steady_state_without_tolerance():
    model, y = slow(0.1, 0.5), np.zeros((60, 1))
    assert (run(y, model, wanted=None, tol=1e-13)[1].steady_from >= 0).any()
    assert (run(y, model, wanted=None, tol=0.0)[1].steady_from == -1).all()


@pytest.mark.parametrize("first", [1e-6, 1e-3])
def test_small_noise_takes_josephs_form(first):
    """H is a millionth of P: P - G'G alone would lose six digits of P_filt, and miss by 5e-10."""
    rng = np.random.default_rng(1)
    arrays = random_model(m=3, p=3, rng=rng) | {
        "H": np.diag([first, 1e-6, 1e-6]),
        "Q": np.zeros((3, 3)),
    }
    y, _ = simulate(6, rng, **arrays)
    model = StateSpace(**arrays)
    how, _, out, _ = run(y, model)
    truth = true_gradient(y, model, names=["T", "Z"])
    assert how == DONE
    assert relative_error(out.T[0], truth["T"]) < 1e-11
    assert relative_error(out.Z[0], truth["Z"]) < 1e-11


def test_ends_are_told_apart():
    y, model = make("two shocks")
    arrays = model.asdict()
    assert run(y, StateSpace(**(arrays | {"H": -100 * model.H})))[0] == NOT_POSITIVE_DEFINITE
    vague = StateSpace(**(arrays | {"P0": 1e8 * np.eye(model.m)}))
    assert run(y, vague, watch=True)[0] == VAGUE
    assert run(y, vague, watch=False)[0] == DONE
    assert run(y, model, watch=True)[0] == DONE


def test_only_what_is_wanted():
    y, model = make("gaps")
    _, steps, full, y_bar = run(y, model)
    _, again, vectors, y_again = run(y, model, wanted=(False,) * 4)
    assert relative_error(again.l, steps.l) == 0 and relative_error(y_again, y_bar) < 1e-14
    assert relative_error(vectors.d, full.d) < 1e-14 and not vectors.T.any() and not vectors.H.any()
    _, _, some, _ = run(y, model, wanted=(True, False, True, False))
    assert relative_error(some.Z, full.Z) < 1e-14 and not some.T.any() and not some.W.any()


def test_memory_is_guarded():
    w, _ = layout.checked_memory(Sizes(2, 1, 3), Saved(True, 3))
    with pytest.raises(IndexError, match="workspace"):
        tiles.get(w, len(w.data))
    with pytest.raises(IndexError, match="two matrices"):
        tiles.axpy(w, w.space.Z.at - LANES, 1.0, w.space.T.at, w.space.T.at, 2 * LANES)


def test_lyapunov_sums():
    """total = sum of L'^i X L^i and the sum of its parts, for every number of steps to 9."""
    rng = np.random.default_rng(0)
    m = 3
    L, X = 0.9 * random_model(m, rng=rng)["T"], np.eye(m)
    for count in range(1, 10):
        w, _ = layout.checked_memory(Sizes(1, 1, m), Saved(False, 0))
        one_pass.clean(w)
        s = w.space
        for A, place in ((L, s.L), (X, s.X2)):
            for i in range(m):
                w.data[place.at + i * place.ld : place.at + i * place.ld + m] = A[i]
        A = backward.lyapunov(w, s.X2, s.N_k, s.S, True, count)
        total, totals, power = np.zeros((m, m)), np.zeros((m, m)), np.eye(m)
        for _ in range(count):
            totals += total
            total += power.T @ X @ power
            power = power @ L
        assert np.abs(read(w, s.N_k, m, m) - total).max() < 1e-13
        assert np.abs(read(w, s.S, m, m) - totals).max() < 1e-12
        assert np.abs(read(w, A, m, m) - power).max() < 1e-14


@pytest.mark.parametrize("period", [2, 3])
def test_a_known_start_is_not_watched(period):
    y, model = exponential_smoothing(period)
    moving = replace(model, T=np.repeat(model.T[np.newaxis], len(y), axis=0))
    for small, given in product((False, True), (model, moving)):
        assert run(y, given, watch=True, small=small)[0] == DONE


@pytest.mark.parametrize("what", REPEATING)
def test_states_that_repeat_others_are_not_watched(what):
    """By the pass of any size and, up to four states, by that in registers."""
    model = repeating(what)
    y, _ = simulate(30, 4, **model.asdict())
    vague = replace(model, P0=1e7 * np.eye(model.m))
    for small in (False, True):
        assert run(y, model, watch=True, small=small)[0] == DONE
        assert run(y, vague, watch=True, small=small)[0] == VAGUE


def test_which_states_repeat_others():
    """Chains end at states with noise; circles, and states that stay as they are, do not end."""

    def past(T, noise, P0=1.0):
        T, W = np.array([T], float), np.diag(np.array(noise, float))[np.newaxis]
        start = np.diag(np.broadcast_to(P0, len(noise)))
        return [is_past(i, start, T, W) for i in range(len(noise))]

    lags = [[0.5, 0.2, 0.1], [1, 0, 0], [0, 1, 0]]
    assert past(lags, [1, 0, 0]) == [False, True, True]
    assert past(lags, [1, 0, 1]) == [False, True, False]
    assert past(lags, [1, 0, 0], P0=1e7) == [False] * 3  # P0 is more than the noise can hide
    assert past(lags, [1, 0, 0], P0=[1, 1e3, 1e7]) == [False, True, False]  # vague in a lag
    assert past([[0.5, 1, 0], [1e-3, 0, 0], [0, 1, 0]], [1, 0, 0]) == [False] * 3  # hardly made
    assert past([[0.5, 1, 0], [1, 0, 0], [0, 1e-3, 0]], [1, 0, 0]) == [False, True, False]
    assert past(lags, [1, 0, 0], P0=[1e7, 1, 1]) == [False] * 3  # vague in what they repeat
    assert past(lags, [1, 0, 0], P0=[0, 1, 1]) == [False, True, True]
    assert past(lags, [0, 0, 0]) == [False] * 3
    assert past([[0, 1, 0], [1, 0, 0], [0, 1, 0]], [0, 0, 1]) == [False] * 3  # a circle
    assert past([[1, 0], [1, 0]], [0, 0]) == [False] * 2  # a constant, and its lag
    assert past([[1, 1, 0], [0, 1, 0], [0, 0, 0]], [1, 0, 0]) == [False, False, True]  # nothing
    made_of_two = [[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0.5]]  # one is a constant
    assert past(made_of_two, [0, 0, 0, 1]) == [False, False, True, False]
    T, W = np.array(2 * [lags], float), np.diag([1.0, 0, 0])[np.newaxis]
    assert not is_past(1, np.eye(3), T, W)


def run_small_tangents(y, arrays, dots, bars, weight, tol):
    """`run_tangents` by the pass in registers, one direction after the other.

    Instead of the stretches, the steps whose gains have settled with their tangents.
    """
    (n, p), m = y.shape, len(arrays.a0)
    like = Like(*(moving(X) for X in (np.eye(m), np.eye(p), np.zeros((p, m)))))
    observed = Observed(np.empty((n, p), np.uint8), np.empty(n, np.int64))
    look_at(y, observed)
    wanted = Wanted(True, True, True, True, np.empty(0, np.int64))
    slopes, settled = np.empty((len(dots.y), n)), np.ones(n, bool)
    for q in range(len(slopes)):
        kept = Kept(*(Along(*(Memory(n * size) for _ in "ab")) for size in sizes_of_kept(m, p)))
        still = held_in_time(arrays)
        model = Arrays(*(
            InTime(Along(A.w, held(X[q])), A.step)
            for A, X in zip(still, dots[1:], strict=True)
        ))  # fmt: skip
        out = [InTime(held(X[q]), A.step) for A, X in zip(still, bars[1:], strict=True)]
        W_bar = held(np.zeros(arrays.W.size))
        out = Arrays(*out[:-1], InTime(Along(W_bar, out[-1].w), out[-1].step))
        l, y_bar, gain_of = Memory(n), Memory(n * p), np.full(n, -1)
        how = small_pass(
            like, Along(held(y), held(dots.y[q])), model, True, wanted, held(np.zeros(m)), tol,
            weight, l, y_bar, kept, gain_of, observed.same_until, out, np.zeros(3, np.int64),
        )  # fmt: skip
        assert how == DONE
        slopes[q], settled = l.data, settled & (gain_of != np.arange(n))
        found = [y_bar, *(X.w for X in out[:-1]), out.W.w.dw]
        for memory, bar in zip(found, bars, strict=True):
            bar[q] = memory.data.reshape(bar[q].shape)
    return slopes, W_bar.data.reshape(arrays.W.shape), bars, settled


def run_tangents(y, model, dot, weights, groups, tol, everywhere):
    """Tangents in Python: the slopes, the gradient of W, the bars, and the steady stretches.

    Each group is (first, count, k); of few states and series, FEW instead of groups.
    """
    arrays, (n, p), m = arrays_of(model), y.shape, model.m
    dots = {x: X.reshape(len(X), *hessian.laid_out(x, X.shape[1:])) for x, X in dot.items()}
    dots = directions.Directions(*(dots[x] for x in hessian.DIMENSIONS))
    bars = directions.Directions(*(np.zeros(X.shape) for X in dots))
    if groups is FEW:
        return run_small_tangents(y, arrays, dots, bars, weights[0], tol)
    groups = [
        directions.Group(i, n, k, directions.block_of(dots.T[i : i + n])) for i, n, k in groups
    ]
    T_wanted = directions.Block(0, m, 0, m) if everywhere else directions.block_of(dots.T)
    plan, shape = np.zeros(layout.HEADER, np.int64), Sizes(n, p, m)
    headers = np.zeros((len(groups), directions.TANGENT_HEADER), np.int64)
    near, _ = directions.lay_out_all(shape, groups, True, plan, headers, 0)
    _, end = directions.lay_out_all(shape, groups, True, plan, headers, near)

    def mats(header, fields):
        return [Mat(int(header[2 * i]), int(header[2 * i + 1]), 1) for i in range(fields)]

    space = mats(plan, len(LAYOUT))
    x = [
        directions.TangentSpace(*mats(header, len(directions.TANGENT_LAYOUT))) for header in headers
    ]
    w = Memory(end, [*space, *(mat for moved in x for mat in moved)], shape)
    w.space, x = layout.Space(*space), [SimpleNamespace(space=moved) for moved in x]
    one_pass.clean(w)
    for header in headers:
        w.data[header[0] : header[2 * directions.FIRST_OF_STEPS]] = 0.0
    found = indices_in(np.empty(room_for_indices(n, p, m), np.int64), n, p, m)
    observed, pattern = look(y, arrays, np.empty((n, p), np.uint8), found)
    slopes, out = np.empty((len(dots.y), n)), Arrays(*arrays[:-1], np.zeros_like(arrays.W))
    varying, first = varies(arrays), one_pass.equal_from(weights)
    how = push.push(
        w, x, groups, y, arrays, dots, observed, pattern, slopes, found.steady_from, varying,
        dots.Z.any(), True, tol, first,
    )  # fmt: skip
    assert how == DONE
    stretches = [(k, t) for t, k in enumerate(found.steady_from) if k >= 0]
    pull.pull(
        w, x, groups, arrays, dots, observed, pattern, weights, found.steady_from, varying, first,
        dots.Z.any(), T_wanted, True, out, bars,
    )  # fmt: skip
    return slopes, out.W, bars, stretches


ALONE, SIDE_BY_SIDE = [(0, 1, 1)], [(0, 2, LANES)]
BOTH = [(0, 2, LANES), (2, 1, 1)]
FEW = [(0, 3, 3)]


def assert_tangents(
    y, model, groups, weights=None, tol=0.0, names=None, rtol=1e-11, given=None, everywhere=True
):
    """Against the readable loop, T's where a direction moves T or everywhere.

    Returns the last of what `run_tangents` does.
    """
    rng, count = np.random.default_rng(8), sum(n for _, n, _ in groups)
    arrays = {"y": y, **model.asdict()}
    if given is None:
        given = {x: rng.standard_normal((count, *arrays[x].shape)) for x in names or arrays}
    dot = reference.moves_in_time(y, model, reference.check_directions(y, model, given))
    weights = np.ones(len(y)) if weights is None else weights
    W_bar, slopes, dy, expected = hessian._one_by_one(y, model, dot, weights)
    found = run_tangents(y, model, dot, weights, groups, tol, everywhere)
    assert relative_error(found[0], slopes) < rtol
    fixed = len(found[1]) == 1
    assert relative_error(found[1], W_bar.sum(axis=0)[None] if fixed else W_bar) < rtol
    for x, X in (expected | {"y": dy}).items():
        bar = getattr(found[2], x)
        if x not in ("y", *STATIC) and bar.shape[1] == 1:
            X = X.sum(axis=1)
        if x == "T" and not everywhere:
            somewhere = np.any(given["T"] != 0, axis=0)
            bar, X = bar.reshape(X.shape)[:, somewhere], X[:, somewhere]
        assert np.abs(bar.reshape(X.shape) - X).max() <= rtol * max(np.abs(X).max(), 1e-3), x
    return found[3]


@pytest.mark.parametrize("name", [x for x in CASES if x not in ("long", "near a unit root")])
@pytest.mark.parametrize("groups", [ALONE, SIDE_BY_SIDE], ids=["alone", "side by side"])
def test_tangents_of_every_case(name, groups):
    y, model = make(name)
    n = len(y)
    for first in (0, n // 2, n):
        assert_tangents(y, model, groups, burn_in(n, first))


@pytest.mark.parametrize("names", [("T",), ("Z",), ("H", "Q"), ("y", "a0", "c", "d")])
def test_tangents_of_what_moves_alone(names):
    y, model = make("gaps")
    assert_tangents(y, model, BOTH, names=names)


@pytest.mark.parametrize("entries", [[(0, 0)], [(15, 15)], [(2, 9), (5, 10)], [(3, 1), (1, 8)]])
def test_tangents_of_a_few_entries_of_the_transition(entries):
    """Blocks of every place: a corner, one column, columns that begin within a vector."""
    model = StateSpace(**random_model(16, 2, rng=4))  # rows are whole vectors
    y = simulate(5, 1, **model.asdict())[0]
    y[3, 0] = np.nan
    given = {"T": np.zeros((3, 16, 16)), "H": np.zeros((3, 2, 2))}
    given["H"][1] = np.eye(2)  # a direction that leaves T as it is
    for k, (i, j) in enumerate(entries):
        given["T"][2 * k, i, j] = 1.0
    assert_tangents(y, model, BOTH, given=given)
    weights = np.random.default_rng(4).random(len(y))
    assert_tangents(y, model, BOTH, weights, given=given, everywhere=False)


@pytest.mark.parametrize(("m", "p"), [(1, 4), (3, 1), (8, 2), (9, 9), (17, 1)])
def test_tangents_of_sizes_around_whole_vectors(m, p):
    """With more states than a tile is wide, a triangle leaves out entries above the diagonal."""
    model = StateSpace(**random_model(m, p, rng=m + p))
    y = simulate(7, 1, **model.asdict())[0]
    y[3, 0] = np.nan
    assert_tangents(y, model, BOTH)


def test_tangents_of_a_transition_that_is_nearly_empty():
    model, y = season(6), np.random.default_rng(3).standard_normal((30, 1)).cumsum(axis=0)
    y[11:13] = np.nan
    assert_tangents(y, model, BOTH, rtol=1e-9)


@pytest.mark.parametrize("first", [0, 30, 75])
@pytest.mark.parametrize("p", [1, 2])
def test_tangents_settle(p, first):
    """Between gaps in the steady state, and after it; N is far from its own where r begins.

    But where weights differ until later.
    """
    model = StateSpace(**random_model(3, p, rng=2, radius=0.6))
    y = simulate(170, 5, **model.asdict())[0]
    y[70] = np.nan
    y[130:132] = np.nan
    for groups in (ALONE, BOTH):
        weights = burn_in(170, first)
        stretches = assert_tangents(y, model, groups, weights, tol=1e-13, rtol=1e-10)
        assert [end for _, end in stretches] == [69, 129, 169][first > 70 :]
        assert all(end - start > 8 for start, end in stretches)
    assert not assert_tangents(y, model, ALONE)


@pytest.mark.parametrize("names", VECTORS)
@pytest.mark.parametrize("groups", [ALONE, BOTH, FEW], ids=["alone", "several", "few states"])
def test_tangents_settle_where_vectors_vary(groups, names):
    y, model = moving_vectors(3, 2, names)
    settled = assert_tangents(y, model, groups, tol=1e-13, rtol=1e-10)
    if groups is FEW:
        assert settled[[45, 110, 170]].all()
    else:
        assert [end for _, end in settled] == [79, 139, 199]


def test_tangents_of_a_stretch_too_short_for_n_to_settle():
    """A stationary start, along a direction in which it stays one, before anything is observed.

    All is steady at once, and N is what later steps left of it. (Where the steady state comes late,
    what is amiss in N before a stretch makes up for what is amiss in its sum.)
    """
    one, T = np.eye(1), 0.9
    model = StateSpace([0], one / (1 - T**2), [0], [0], T=T * one, Z=one, R=one, H=one, Q=one)
    y = np.random.default_rng(0).standard_normal((45, 1))
    y[:33] = np.nan
    given = {"T": one[None], "P0": 2 * T * one[None] / (1 - T**2) ** 2}
    assert len(assert_tangents(y, model, ALONE, tol=1e-13, given=given)) == 1


def test_tangents_where_n_has_no_steady_state():
    """A state that is known and stays as it is: P is zero from the first step on, and N grows."""
    one = np.eye(1)
    model = StateSpace([0.3], 0 * one, [0.0], [0.0], T=one, Z=one, R=one, H=one, Q=0 * one)
    y = np.random.default_rng(0).standard_normal((40, 1))
    stretches = assert_tangents(y, model, ALONE, tol=1e-13, names=("a0", "H", "Z"))
    assert stretches


def test_a_direction_that_never_settles_keeps_the_tangents_from_it():
    """The same state, with a little noise along the direction: its variance grows at every step."""
    one = np.eye(1)
    model = StateSpace([0.3], 0 * one, [0.0], [0.0], T=one, Z=one, R=one, H=one, Q=0 * one)
    y = np.random.default_rng(0).standard_normal((40, 1))
    assert not assert_tangents(y, model, ALONE, tol=1e-13, names=("Q",))


@pytest.mark.parametrize("groups", [ALONE, BOTH, FEW], ids=["alone", "several", "few states"])
def test_tangents_along_a_start_settle_though_they_fade(groups):
    """They shrink by the same factor at every step: never little of what they have become."""
    model = StateSpace(**random_model(3, 2, rng=2, radius=0.6))
    y = simulate(150, 5, **model.asdict())[0]
    settled = assert_tangents(y, model, groups, tol=1e-13, names=("P0",), rtol=1e-12)
    assert np.count_nonzero(settled) > (50 if groups is FEW else 0)


@pytest.mark.parametrize(("m", "p"), [(1, 1), (2, 1), (3, 2), (1, 4), (4, 4)])
@pytest.mark.parametrize("name", SMALL_CASES)
def test_tangents_of_few_states_and_series(name, m, p):
    y, model = small_case(name, m, p)
    rtol = 1e-8 if name == "level" else 1e-10
    assert_tangents(y, model, FEW, np.full(len(y), 0.7), rtol=rtol)


@pytest.mark.parametrize(("m", "p"), [(1, 1), (2, 1), (3, 2), (1, 3)])
def test_tangents_of_few_states_settle(m, p, monkeypatch):
    """Between gaps, where the steady state begins anew; N comes to its own from the other end."""
    model = StateSpace(**random_model(m, p, rng=5, radius=0.3))
    y = simulate(250, 5, **model.asdict())[0]
    y[[80, 140], 0] = np.nan
    smooth, taken = recursions.smooth_covariance, []
    monkeypatch.setattr(
        recursions, "smooth_covariance", lambda *args: taken.append(1) or smooth(*args)
    )
    settled = assert_tangents(y, model, FEW, tol=1e-13, rtol=1e-10)
    assert settled[[45, 110, 200]].all() and not settled[[0, 80, 81, 140, 141]].any()
    assert len(taken) < 3 * 180  # of three directions
    assert not assert_tangents(y, model, FEW, rtol=1e-10).any()


def test_tangents_of_few_states_do_not_settle_where_a_direction_does_not():
    """A state that is known and stays as it is, with a little noise along the direction."""
    one = np.eye(1)
    model = StateSpace([0.3], 0 * one, [0.0], [0.0], T=one, Z=one, R=one, H=one, Q=0 * one)
    y = np.random.default_rng(0).standard_normal((40, 1))
    assert not assert_tangents(y, model, FEW, tol=1e-13, names=("Q",)).any()
    assert_tangents(y, model, FEW, tol=1e-13, names=("a0", "H", "Z"))


def test_tangents_of_few_states_settle_after_a_start_that_has_settled():
    """The gain is the same from the first look on; along a direction of P0 it is not."""
    one = np.eye(1)
    T, H, Q = 0.9, 4.0, 0.1
    b = Q - (1 - T**2) * H  # P^2 = b P + Q H
    P = (b + np.sqrt(b**2 + 4 * Q * H)) / 2
    model = StateSpace([0], P * one, [0], [0], T=T * one, Z=one, R=one, H=H * one, Q=Q * one)
    y = np.random.default_rng(0).standard_normal((200, 1))
    settled = assert_tangents(y, model, FEW, tol=1e-13, rtol=1e-10)
    assert settled[80:110].all() and not settled[:40].any()
