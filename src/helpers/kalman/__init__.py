"""The Kalman filter's log-likelihood and its gradient in closed form.

>>> import numpy as np
>>> from helpers.kalman import StateSpace, loglike_and_grad
>>> one, y = np.eye(1), np.array([[1.0], [np.nan], [0.5]])
>>> walk = StateSpace([0.0], one, [0.0], [0.0], T=one, Z=one, R=one, H=one, Q=one)
>>> value, dy, gradients = loglike_and_grad(y, walk)
>>> print(round(float(value), 3), gradients.H.shape, dy.shape)
-3.061 (1, 1) (3, 1)
"""

from helpers.kalman.model import StateSpace
from helpers.kalman.reference import loglike, loglike_and_grad

__all__ = ["StateSpace", "kalman_loglike", "loglike", "loglike_and_grad", "register_filter"]

# What needs PyTensor or pymc-extras is imported when it is first asked for: that takes seconds.
_LATER = {"kalman_loglike": "op", "register_filter": "pymc_filter"}


def __getattr__(name):
    if name in _LATER:
        from importlib import import_module

        return getattr(import_module(f"helpers.kalman.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
