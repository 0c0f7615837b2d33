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

__all__ = ["StateSpace", "loglike", "loglike_and_grad"]
