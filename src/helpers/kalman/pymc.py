"""The closed-form gradient in pymc-extras: a filter type for its state space models.

>>> from helpers.kalman import register_filter
>>> register_filter()

and then, for any model of pymc-extras, ``.build(filter_type="closed_form")``.
"""

import inspect

import pymc_extras
import pytensor.tensor as pt
from pymc_extras.statespace.core import statespace
from pymc_extras.statespace.filters.kalman_filter import StandardFilter
from pymc_extras.statespace.filters.utilities import missing_mask
from pymc_extras.statespace.utils.constants import FILTER_OUTPUT_NAMES

from helpers.kalman.op import filter_outputs_from_W, loglike_from_W

SUPPORTED = "0.15"


class ClosedFormFilter(StandardFilter):
    """`StandardFilter` as one Op over the whole series, with the gradient in closed form.

    Takes what StandardFilter takes: missing data (NaN or the fill value), time-varying matrices,
    no measurement error, and returns the same outputs. The jitter enters as there, F and the
    filtered covariance of every step, but for one term of its own size: StandardFilter takes the
    jitter out of H in Joseph's form, which lowers the filtered covariance by jitter * Kf Kf'.
    """

    def build_graph(self, data, a0, P0, c, d, T, Z, R, H, Q):
        """The graph of the filter's outputs.

        Parameters
        ----------
        data : TensorVariable (n, p)
            NaN or the fill value marks a gap.
        a0, P0, c, d, T, Z, R, H, Q : TensorVariable
            The model, as in :func:`helpers.kalman.op.kalman_loglike`; the arrays that were named to
            vary over time carry a leading axis.

        Returns
        -------
        list of TensorVariable
            Filtered, predicted and observed means, their covariances, and the log-likelihood of
            each step.
        """
        data, a0, P0, c, d, T, Z, R, H, Q = (
            pt.as_tensor_variable(X) for X in self.check_params(data, a0, P0, c, d, T, Z, R, H, Q)
        )
        missing = missing_mask(data, self.missing_fill_value)
        y = pt.switch(missing, pt.constant(float("nan"), dtype=data.dtype), data)
        H = H + self.cov_jitter * pt.eye(H.shape[-1])
        W = _shocks(T, R, Q, self.cov_jitter)

        model = (a0, P0, c, d, T, Z, H, W)
        loglike = loglike_from_W(y, *model)
        loglike.name = "loglike_obs"
        out = filter_outputs_from_W(y, *model)
        jitter_where_missing = self.cov_jitter * missing[:, :, None] * pt.eye(d.shape[-1])
        outputs = [
            out.a_filt,
            out.a_pred,
            out.y_hat,
            out.P_filt + self.cov_jitter * pt.eye(a0.shape[0]),
            out.P_pred,
            out.F + jitter_where_missing,
        ]
        for output, name in zip(outputs, FILTER_OUTPUT_NAMES_IN_ORDER, strict=True):
            output.name = name
        return self._declare_covariance_structure([*outputs, loglike])


# StandardFilter returns means before covariances; the constant lists them in pairs.
FILTER_OUTPUT_NAMES_IN_ORDER = [FILTER_OUTPUT_NAMES[k] for k in (0, 1, 4, 2, 3, 5)]


def _shocks(T, R, Q, jitter):
    """W = R Q R' with the jitter of each filtered covariance, T (jitter I) T' in what it predicts.

    As one product: PyTensor 3.3.7 takes T T' apart by the blocks of a structural model's T, and
    stumbles over an empty one.
    """
    if not jitter:
        return R @ Q @ R.mT
    RQ = R @ Q
    steps = [X.shape[0] for X in (T, RQ) if X.ndim == 3]
    if steps:
        T, R, RQ = (
            X if X.ndim == 3 else pt.broadcast_to(X, (steps[0], *X.shape)) for X in (T, R, RQ)
        )
    return pt.concatenate([RQ, jitter * T], axis=-1) @ pt.concatenate([R, T], axis=-1).mT


def register_filter(name: str = "closed_form") -> None:
    """Make the closed-form filter known to pymc-extras.

    Parameters
    ----------
    name : str
        The ``filter_type`` under which models find it.

    Raises
    ------
    ImportError
        If the installed pymc-extras does not have the interface that this filter was written for.
    ValueError
        If another filter has that name already.

    Examples
    --------
    >>> register_filter()
    >>> from pymc_extras.statespace import structural as st
    >>> model = st.LevelTrend(order=1) + st.MeasurementError(name="noise")
    >>> built = model.build(filter_type="closed_form", verbose=False)
    """
    expected = ["data", "a0", "P0", "c", "d", "T", "Z", "R", "H", "Q"]
    factory = getattr(statespace, "FILTER_FACTORY", None)
    found = list(inspect.signature(StandardFilter.build_graph).parameters)[1:]
    if (
        factory is None
        or found != expected
        or not hasattr(StandardFilter, "_declare_covariance_structure")
    ):
        raise ImportError(
            f"the closed-form filter supports pymc-extras {SUPPORTED}; found "
            f"{pymc_extras.__version__}, whose filters have another interface"
        )
    if name != name.lower():
        raise ValueError(f"name is {name!r}, expected lower case: pymc-extras looks it up so")
    if factory.get(name, ClosedFormFilter) is not ClosedFormFilter:
        raise ValueError(f"pymc-extras has a filter {name!r} already: {factory[name].__name__}")
    factory[name] = ClosedFormFilter
