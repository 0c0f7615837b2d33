r"""Is this gradient right?  Independent ways to find out, and the book's record of each answer.

A gradient :math:`G` of a scalar function :math:`L` at an array :math:`X` is the array of
:math:`X`'s shape with :math:`dL = \langle G, dX\rangle` for every small change :math:`dX`.
Where :math:`X` is symmetric, so are its changes, and :math:`G` is the symmetric one.

>>> import numpy as np
>>> from helpers.checks import complex_step, verify
>>> A = np.array([[2.0, 1.0], [1.0, 3.0]])
>>> def half_quadratic(x):
...     return x @ A @ x / 2
>>> x = np.array([1.0, -1.0])
>>> _ = verify("eq-doc-quadratic", A @ x, complex_step(half_quadratic, x), 1e-12)
eq-doc-quadratic: agrees with complex step to 1e-12

The line says "complex step" because :func:`complex_step` signed its result: see
:class:`Reference`.

:func:`attack` asks a PyTensor Op everything that can be asked without knowing what it computes.
"""

from helpers.checks.gradients import (
    Check,
    Reference,
    StepSweep,
    adjoint_gap,
    checked,
    complex_step,
    finite_difference,
    relative_error,
    step_sweep,
    symmetrize,
    verify,
)

__all__ = [
    "Attack",
    "Check",
    "Reference",
    "Report",
    "StepSweep",
    "adjoint_gap",
    "attack",
    "checked",
    "complex_step",
    "finite_difference",
    "relative_error",
    "step_sweep",
    "symmetrize",
    "verify",
]

_FROM_CONTRACT = ("Attack", "Report", "attack")  # PyTensor takes seconds to import: only on demand


def __getattr__(name: str):
    if name in _FROM_CONTRACT:
        from helpers.checks import contract

        return getattr(contract, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM_CONTRACT})
