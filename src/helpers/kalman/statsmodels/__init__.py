r"""Likelihood, exact score and Hessian of statsmodels' state space models, in closed form.

statsmodels differentiates by running its filter once more for each parameter.  Here the
likelihood's gradient with respect to the arrays of the model, :math:`\bar T, \bar Z, \dots`, comes
from one pass; what the parameters :math:`\theta` do to the arrays is differentiated by a complex
step of ``mod.update``, which runs no filter; and the two meet in

.. math::

   \frac{\partial \mathcal L}{\partial \theta_j}
   = \sum_X \langle \bar X, \partial X / \partial \theta_j \rangle .

The sum is over the arrays :math:`X = a_0, P_0, c, d, T, Z, R, H, Q`. The Hessian has the arrays'
own, along their derivatives, and a term from their second derivatives:

.. math::

   \frac{\partial^2 \mathcal L}{\partial \theta_i\, \partial \theta_j}
   &= \sum_X \Bigl\langle \frac{\partial X}{\partial \theta_i} ,
     \frac{\partial \bar X}{\partial \theta_j} \Bigr\rangle \\
   &+ \sum_X \Bigl\langle \bar X, \frac{\partial^2 X}{\partial \theta_i\, \partial \theta_j}
     \Bigr\rangle .

>>> import statsmodels.api as sm
>>> from helpers.kalman.statsmodels import fit, score, standard_errors
>>> mod = sm.tsa.SARIMAX(sm.datasets.nile.data.load_pandas().data["volume"], order=(1, 0, 1))
>>> exact = score(mod, mod.start_params)
>>> results = fit(mod, disp=False)
>>> errors = standard_errors(mod, results.params, "expected")
"""

from helpers.kalman import _needing

with _needing(__name__, "statsmodels", "[statsmodels]"):
    from helpers.kalman.statsmodels.fit import fit, using
    from helpers.kalman.statsmodels.information import hessian, information, standard_errors
    from helpers.kalman.statsmodels.score import loglike, score

__all__ = ["fit", "hessian", "information", "loglike", "score", "standard_errors", "using"]
