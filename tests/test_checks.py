"""The checks must find true gradients right and false ones wrong."""

import numpy as np
import pytest

from helpers import checks
from helpers.checks import (
    Reference,
    adjoint_gap,
    complex_step,
    finite_difference,
    relative_error,
    step_sweep,
    symmetrize,
    verify,
)

rng = np.random.default_rng(0)
A = rng.standard_normal((4, 3))
S = symmetrize(rng.standard_normal((3, 3))) + 4 * np.eye(3)


def logdet(X):
    return np.log(np.linalg.det(X))


def half_square(X):
    return ((A * X) ** 2).sum() / 2


@pytest.mark.parametrize("method, rtol", [(complex_step, 1e-14), (finite_difference, 1e-8)])
def test_gradient_of_known_functions(method, rtol):
    X = rng.standard_normal((4, 3))
    assert relative_error(method(half_square, X), A**2 * X) < rtol
    # S and S^-1 are symmetric: their gradient moves both (i, j) and (j, i)
    assert relative_error(method(logdet, S, symmetric=True), np.linalg.inv(S)) < rtol


def test_symmetric_gradient_of_an_unsymmetric_function():
    """x_12 alone has the gradient E_12; on symmetric matrices it is (E_12 + E_21)/2."""
    G = complex_step(lambda X: X[0, 1], S, symmetric=True)
    assert np.array_equal(G, [[0, 0.5, 0], [0.5, 0, 0], [0, 0, 0]])


def test_symmetric_works_on_a_stack_of_matrices():
    stack = np.stack([S, 2 * S])
    G = complex_step(lambda X: sum(logdet(x) for x in X), stack, symmetric=True)
    assert relative_error(G, np.linalg.inv(stack)) < 1e-14


@pytest.mark.parametrize("method", [complex_step, finite_difference])
def test_symmetric_needs_square_matrices(method):
    with pytest.raises(ValueError, match=r"square matrices .* shape \(4, 3\)"):
        method(half_square, A, symmetric=True)


def test_complex_step_refuses_a_function_that_drops_the_imaginary_part():
    with pytest.raises(TypeError, match="real number for a complex argument"):
        complex_step(lambda x: np.abs(x).sum(), np.ones(2))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e8])
def test_sweep_finds_a_good_step_at_any_scale_of_the_function(scale):
    x = np.array([0.3, -0.7])
    sweep = step_sweep(lambda x: scale * np.exp(x).sum(), x, np.array([1.0, 2.0]))
    truth = scale * (np.exp(x) @ [1.0, 2.0])
    errors = np.abs(sweep.estimates - truth)
    assert errors[sweep.best] < 1e-9 * truth
    assert errors[sweep.best] < 1e-3 * min(errors[0], errors[-1])  # it is the bottom of a V
    assert errors[sweep.best] <= 10 * sweep.uncertainty


def test_sweep_survives_steps_that_leave_the_domain():
    sweep = step_sweep(
        lambda x: np.sqrt(x[0] - 0.999).item() if x[0] > 0.999 else np.nan, [1.0], [1.0]
    )
    assert sweep.value == pytest.approx(0.5 / np.sqrt(0.001), rel=1e-6)


def test_sweep_is_not_fooled_by_steps_that_do_not_move_the_point():
    """Below rounding all estimates are zero, and agree perfectly."""
    sweep = step_sweep(lambda x: x[0] ** 2, [3.0], [1.0], steps=np.logspace(-2, -20, 19))
    assert sweep.value == pytest.approx(6.0, rel=1e-8)


def test_sweep_says_what_is_wrong():
    with pytest.raises(
        ValueError, match=r"direction has shape \(3,\), expected the point's \(2,\)"
    ):
        step_sweep(np.sum, np.ones(2), np.ones(3))
    with pytest.raises(ValueError, match="at least three steps, got 2"):
        step_sweep(np.sum, np.ones(2), np.ones(2), steps=[1e-2, 1e-3])
    with pytest.raises(ValueError, match="not finite around the point"):
        step_sweep(lambda x: np.nan, np.ones(2), np.ones(2))


def test_adjoint_gap_accepts_a_transpose_and_nothing_else():
    def jvp(x):
        return A @ x

    assert adjoint_gap(jvp, lambda y: A.T @ y, (3,), (4,), rng) < 1e-14
    assert adjoint_gap(jvp, lambda y: A.T @ y * 1.001, (3,), (4,), rng) > 1e-5
    with pytest.raises(ValueError, match=r"vjp returned shape \(4,\), expected \(3,\)"):
        adjoint_gap(jvp, lambda y: y, (3,), (4,), rng)


def test_relative_error_is_relative_to_the_largest_entry():
    assert relative_error([1e-30, 100.0], [0.0, 101.0]) == pytest.approx(1 / 101)
    assert relative_error([1e-9, 1e-9], [2e-9, 2e-9]) == pytest.approx(0.5)  # no absolute slack
    assert relative_error([0.0], [0.0]) == 0
    assert relative_error([1e-300], [0.0]) == np.inf
    assert relative_error([np.nan, 1.0], [1.0, 1.0]) == np.inf
    with pytest.raises(ValueError, match="shape"):
        relative_error(np.ones((2, 1)), np.ones(2))
    with pytest.raises(ValueError, match="empty"):
        relative_error([], [])


def test_verify_prints_a_stable_line_and_records(capsys):
    before = len(checks.checked())
    check = verify("eq-test-one", 1 + 3e-13, 1.0, 1e-10, against="autodiff")
    assert capsys.readouterr().out == "eq-test-one: agrees with autodiff to 1e-10\n"
    assert checks.checked()[before:] == (check,)
    assert repr(check) == "eq-test-one: agrees with autodiff to 1e-10"
    assert check.error_power == -12
    exact = verify("eq-test-one", 1.0, 1.0, against="itself")
    assert exact.error_power == -15  # never below rounding


@pytest.mark.parametrize("wrong", [1 + 1e-9, np.nan, -1.0])
def test_verify_fails_and_does_not_record(wrong):
    before = checks.checked()
    with pytest.raises(AssertionError, match=r"eq-test-two disagrees with SciPy.*\(1,\)"):
        verify("eq-test-two", [1.0, wrong], Reference([1.0, 1.0], "SciPy"), 1e-10)
    assert checks.checked() == before


def test_verify_wants_the_label_of_an_equation():
    with pytest.raises(ValueError, match="'def-x' is not an equation's"):
        verify("def-x", 1.0, 1.0, against="itself")


def test_verify_does_not_take_a_bare_array_for_a_complex_step():
    X = np.ones((4, 3))
    before = checks.checked()
    for bare in (A**2, np.asarray(complex_step(half_square, X)), [complex_step(half_square, X), A]):
        with pytest.raises(ValueError, match="eq-test-four: nothing says what the reference is"):
            verify("eq-test-four", bare, bare)
    assert checks.checked() == before


def test_verify_says_what_the_reference_says_of_itself(capsys):
    X = np.ones((4, 3))
    step = complex_step(half_square, X)
    verify("eq-test-five", A**2, step)
    verify("eq-test-five", A**2, step, against="complex step")
    verify("eq-test-five", [A**2, 2 * A**2], [step, 2 * step])
    verify("eq-test-five", A**2, finite_difference(half_square, X), 1e-8)
    verify("eq-test-five", np.sum(A**2), step_sweep(half_square, X, X).value, 1e-8)
    verify("eq-test-five", A**2, Reference(A * A, "NumPy"))
    said = [line.split(" with ")[1] for line in capsys.readouterr().out.splitlines()]
    steps, differences = ["complex step to 1e-10"], ["central differences to 1e-08"]
    assert said == 3 * steps + 2 * differences + ["NumPy to 1e-10"]


def test_verify_refuses_another_name_for_a_signed_reference():
    step = complex_step(half_square, np.ones((4, 3)))
    with pytest.raises(ValueError, match="is signed 'complex step', not 'autodiff'"):
        verify("eq-test-six", A**2, step, against="autodiff")


ONE, OTHER = Reference(np.arange(6.0).reshape(2, 3), "one"), Reference(np.ones((2, 3)), "other")
PLAIN = np.full((2, 3), 2.0)


def source(x):
    return getattr(x, "source", None)


@pytest.mark.parametrize(
    "x",
    [
        ONE[0],
        ONE[1, 2],
        ONE[ONE > 2],
        ONE[:, ::2].T.reshape(-1),
        next(iter(ONE[0])),
        np.ravel(ONE),
        ONE.swapaxes(0, 1).copy(),
        -ONE / 3 + PLAIN,
        PLAIN.T @ ONE,
        PLAIN[0] @ (ONE[0] + 1j),
        np.float64(2) * ONE[0, 1],
        ONE + ONE[0],
        np.abs(ONE).max(),
        ONE.mean(axis=0),
        np.modf(ONE)[0],
        np.stack([ONE, ONE]),
        np.hstack([np.ravel(ONE), ONE[0]]),
        np.column_stack([row for row in ONE]),
        np.append(ONE, ONE[0, 0]),
        np.block([[ONE], [ONE]]),
        np.r_[ONE[0], ONE[1, 1]],
        np.linalg.solve(np.eye(2), ONE),
    ],
)
def test_a_source_stays_with(x):
    assert source(x) == "one"


@pytest.mark.parametrize(
    "x",
    [
        ONE + OTHER,
        ONE @ OTHER.T,
        np.dot(ONE, OTHER.T),
        np.concatenate([ONE, OTHER]),
        np.concatenate([ONE, PLAIN]),
        np.stack([PLAIN, ONE]),
        np.append(ONE, 1.0),
        np.r_[ONE[0], 1.0],
        np.block([[ONE], [PLAIN]]),
        np.where(PLAIN > 0, ONE, PLAIN),
        np.zeros_like(ONE),
        np.full_like(ONE, 3.0),
        np.empty_like(ONE),
        np.asarray(ONE),
        np.array([ONE[0], ONE[1]]),
        float(ONE[0, 0]),
        ONE[0, 0].item(),
        ONE > 2,
        ONE.argmax(),
    ],
)
def test_a_source_does_not_go_to(x):
    assert source(x) is None


def test_an_entry_written_by_hand_takes_the_source_away():
    x, y = ONE.copy(), ONE.copy()
    x[0] = 2 * ONE[1]
    x[1] += 1.0
    assert source(x) == "one"
    x[0, 0] = 7.0
    y[0] = OTHER[0]
    assert source(x) is None and source(y) is None
    y = ONE.copy()
    y += OTHER
    assert source(y) is None
    x *= 2
    assert np.array_equal(x[0], [14, 16, 20]) and source(x) is None


def test_a_signed_array_computes_as_a_plain_one():
    plain = np.asarray(ONE)
    assert f"{ONE[0, 1]:.1f}" == "1.0" and str(ONE) == str(plain)
    assert np.array_equal(np.add.outer(ONE[0], ONE[1]), np.add.outer(plain[0], plain[1]))
    total, same = np.zeros(3), np.zeros((2, 3))
    total += ONE[1]
    assert np.array_equal(total, plain[1]) and type(total) is np.ndarray
    whole, part = np.modf(ONE + 0.5, out=(None, same))[::-1]
    assert whole is same and np.array_equal(same, plain) and np.all(part == 0.5)
