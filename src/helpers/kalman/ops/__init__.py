"""The filter's Ops for PyTensor: declared here, and known to its rewrites, Numba and JAX.

- :mod:`~helpers.kalman.ops.declared`: the one class that makes an Op of a declaration.
- :mod:`~helpers.kalman.ops.likelihood`: ``kalman_loglike``, ``kalman_filter_outputs``.
- :mod:`~helpers.kalman.ops.panel`: ``kalman_loglike_panel``.
- :mod:`~helpers.kalman.ops.diffuse`: ``kalman_diffuse_loglike``, ``kalman_diffuse_estimate``.
- :mod:`~helpers.kalman.ops.draws`: ``kalman_smooth``, ``kalman_draw``.
- :mod:`~helpers.kalman.ops.rewrites`: what PyTensor does with them; whichever module is imported,
  it is, too.
"""

from helpers.kalman.ops import diffuse, draws, likelihood, panel, rewrites  # noqa: F401
