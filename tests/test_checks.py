"""The checks must find true gradients right and false ones wrong."""

import numpy as np
import pytest

from helpers import checks
from helpers.checks import (
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
    assert verify("eq-test-one", 1.0, 1.0).error_power == -15  # never below rounding


@pytest.mark.parametrize("wrong", [1 + 1e-9, np.nan, -1.0])
def test_verify_fails_and_does_not_record(wrong):
    before = checks.checked()
    with pytest.raises(AssertionError, match=r"eq-test-two disagrees with complex step.*\(1,\)"):
        verify("eq-test-two", [1.0, wrong], [1.0, 1.0], 1e-10)
    assert checks.checked() == before


def test_verify_wants_the_label_of_an_equation():
    with pytest.raises(ValueError, match="'def-x' is not an equation's"):
        verify("def-x", 1.0, 1.0)
