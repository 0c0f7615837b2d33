"""The closed-form gradient in pymc-extras: a filter type for its state space models.

>>> from helpers.kalman import register_filter
>>> register_filter()

and then, for any model of pymc-extras whose likelihood runs through the Kalman filter,
``.build(filter_type="closed_form")``. (For purely autoregressive models with a stationary start
pymc-extras has a form of its own, which it uses whatever the filter type.) With
``smoother_type="closed_form"`` beside it ``sample_conditional_posterior`` draws the states by the
simulation smoother of :mod:`helpers.kalman.smoothing`.
"""

import functools
import inspect
import warnings

import numpy as np

from helpers.kalman import _needing

with _needing(__name__, "pymc pymc-extras", "[pymc]"):
    import pymc as pm
    import pymc_extras
    from pymc.logprob.abstract import _logprob
    from pymc.pytensorf import normalize_rng_param
    from pymc_extras.statespace.core import forward_sampling, statespace
    from pymc_extras.statespace.filters import distributions
    from pymc_extras.statespace.filters.kalman_filter import StandardFilter
    from pymc_extras.statespace.filters.kalman_smoother import DisturbanceSmoother
    from pymc_extras.statespace.filters.utilities import missing_mask
    from pymc_extras.statespace.utils.constants import (
        FILTER_OUTPUT_NAMES,
        LONG_MATRIX_NAMES,
        OBSERVED_LIKELIHOOD_NAME,
    )

import pytensor
import pytensor.tensor as pt
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors, explicit_graph_inputs

from helpers.kalman.ops.diffuse import OneStepTerms, posterior, predictions
from helpers.kalman.ops.draws import NormalMarginals, draw_from_W, smooth_from_W
from helpers.kalman.ops.likelihood import filter_outputs_from_W, loglike_from_W, product, sandwich

SUPPORTED = "0.15"


class ClosedFormFilter(StandardFilter):
    """`StandardFilter` as one Op over the whole series, with the gradient in closed form.

    Takes what StandardFilter takes: missing data (NaN or the fill value), time-varying matrices, no
    measurement error, and returns the same outputs. The jitter enters as there, F and the filtered
    covariance of every step, except for one term of its own size: StandardFilter takes the jitter
    out of H in Joseph's form, which lowers the filtered covariance by jitter * Kf Kf'.
    """

    def build_graph(self, data, a0, P0, c, d, T, Z, R, H, Q):
        """The graph of the filter's outputs.

        Parameters
        ----------
        data : TensorVariable (n, p)
            NaN or the fill value marks a gap.
        a0, P0, c, d, T, Z, R, H, Q : TensorVariable
            The model, as in :func:`helpers.kalman.ops.likelihood.kalman_loglike`; the arrays that
            were named to vary over time carry a leading axis.

        Returns
        -------
        list of TensorVariable
            Filtered, predicted and observed means, their covariances, and the log-likelihood of
            each step.
        """
        given = self.check_params(data, a0, P0, c, d, T, Z, R, H, Q)
        given = [*map(pt.as_tensor_variable, given)]
        y, *model = _with_jitter(given, self.missing_fill_value, self.cov_jitter)
        a0, d, missing = model[0], model[3], pt.isnan(y)
        loglike = loglike_from_W(y, *model)
        loglike.name = "loglike_obs"
        out = filter_outputs_from_W(y, *model)
        P_filt = out.P_filt + self.cov_jitter * pt.eye(a0.shape[0])
        F = out.F + self.cov_jitter * missing[:, :, None] * pt.eye(d.shape[-1])
        outputs = [out.a_filt, out.a_pred, out.y_hat, P_filt, out.P_pred, F]
        for output, name in zip(outputs, FILTER_OUTPUT_NAMES_IN_ORDER, strict=True):
            output.name = name
        out.a_filt.tag.missing_fill_value = self.missing_fill_value
        return self._declare_covariance_structure([*outputs, loglike])


# StandardFilter returns means before covariances; the constant lists them in pairs.
FILTER_OUTPUT_NAMES_IN_ORDER = [FILTER_OUTPUT_NAMES[k] for k in (0, 1, 4, 2, 3, 5)]


def _with_jitter(given, fill_value, jitter):
    """y with NaN for what is missing, and the Ops' arrays with the jitter."""
    data, a0, P0, c, d, T, Z, R, H, Q = given
    dtype = np.result_type(np.float32, data.type.numpy_dtype)  # whole numbers have no NaN
    y = pt.switch(missing_mask(data, fill_value), pt.constant(np.nan, dtype=dtype.name), data)
    H, W = H + jitter * pt.eye(H.shape[-1]), sandwich(R, Q)
    if jitter:  # that of a filtered covariance is T (jitter I) T' in what it predicts
        W = W + jitter * product(T, T.mT)
    return y, a0, P0, c, d, T, Z, H, W


class ClosedFormSmoother(DisturbanceSmoother):
    """`DisturbanceSmoother` whose means are one Op, with its gradient in closed form.

    The covariances, where something asks for them, are DisturbanceSmoother's. A model with this
    smoother draws states by :func:`helpers.kalman.ops.draws.kalman_draw`. The jitter enters what
    is smoothed, not what is simulated, as in pymc-extras.
    """

    def build_graph(self, data, matrices, filter_outputs):
        """Smoothed means (n, m) and covariances (n, m, m), as `DisturbanceSmoother` has them."""
        # pymc-extras tells its fill value to its own smoother alone; ClosedFormFilter passes it on.
        of_filter = getattr(filter_outputs[0].tag, "missing_fill_value", self.missing_fill_value)
        self.missing_fill_value = of_filter
        data, *matrices = map(pt.as_tensor_variable, (data, *matrices))
        _, covariances = super().build_graph(data, matrices, filter_outputs)
        states = smooth_from_W(*_with_jitter((data, *matrices), of_filter, self.cov_jitter))
        states = pt.specify_shape(states, filter_outputs[0].type.shape)
        states.name = "smoothed_states"
        return states, covariances


class ClosedFormDraws(distributions.SimulationSmoother):
    """pymc-extras' simulation smoother, by one Op: paths of the states given the data."""

    @classmethod
    def rv_op(
        cls, data, *matrices, kalman_filter, sequence_names=(), size=None, rng=None, **unused
    ):
        """A draw; x0, P0, c, d, T, Z, R, H, Q as there."""
        rng = normalize_rng_param(rng)
        inputs = [X.type() for X in (data, *matrices)]
        y, a0, _, _, _, _, _, R, H, Q = inputs
        count = a0.shape[0] + y.shape[0] * (y.shape[1] + R.shape[-1])
        next_rng, normals = pt.random.normal(size=(1, count), rng=rng, return_next_rng=True)
        fill_value, jitter = kalman_filter.missing_fill_value, kalman_filter.cov_jitter
        smoothed = _with_jitter(inputs, fill_value, jitter)
        path = draw_from_W(*smoothed, R, Q, H, normals)[0]
        path = pt.specify_shape(path, (y.type.shape[0], a0.type.shape[0]))
        op = distributions.SimulationSmootherRV(
            inputs=[*inputs, rng],
            outputs=[next_rng, path],
            extended_signature=distributions._simulation_smoother_signature(sequence_names),
            inline=True,
        )
        return op(data, *matrices, rng)


def _marginals(kind, mus, covs, logp, rng):
    """Draws (n, k) from means (n, k) and covariances (n, k, k), by one Op for all steps."""
    rng = normalize_rng_param(rng)
    inputs = [X.type() for X in (mus, covs, logp)]
    next_rng, normals = pt.random.normal(size=inputs[0].shape, rng=rng, return_next_rng=True)
    drawn = NormalMarginals()(inputs[0], inputs[1], normals)
    op = kind(inputs=[*inputs, rng], outputs=[next_rng, drawn], ndim_supp=2)
    return op(mus, covs, logp, rng)


class ClosedFormMarginals(distributions.SequenceMvNormal):
    """pymc-extras' independent normal vectors of each step, by one Op for all steps.

    By a Cholesky root of a covariance of any rank, whatever ``method`` says.
    """

    @classmethod
    def rv_op(cls, mus, covs, logp, method=None, size=None, rng=None):
        """Draws (n, k) from means (n, k) and covariances (n, k, k)."""
        return _marginals(distributions.KalmanFilterRV, mus, covs, logp, rng)


# What draws with our smoother take instead of the names that pymc-extras has for them.
OUR_DRAWS = {"SimulationSmoother": ClosedFormDraws, "SequenceMvNormal": ClosedFormMarginals}


def _with_our_draws(sample_conditional):
    """`forward_sampling._sample_conditional`, with our distributions for models of our smoother."""

    @functools.wraps(sample_conditional)
    def sample(ss_mod, *args, **kwargs):
        if statespace.SMOOTHER_FACTORY[ss_mod.smoother_type] is not ClosedFormSmoother:
            return sample_conditional(ss_mod, *args, **kwargs)
        theirs = {name: getattr(forward_sampling, name) for name in OUR_DRAWS}
        vars(forward_sampling).update(OUR_DRAWS)
        try:
            return sample_conditional(ss_mod, *args, **kwargs)
        finally:
            vars(forward_sampling).update(theirs)

    sample.draws_in_closed_form = True
    return sample


class _Registration:
    """What a pickled model carries with it: whoever unpickles it knows its filter, or smoother."""

    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return register_filter, (self.name,)


def _with_registration(built):
    """`PyMCStateSpace.__getstate__`: models name filters, which other processes have to know."""
    filters, smoothers = statespace.FILTER_FACTORY, statespace.SMOOTHER_FACTORY
    found = {x for x in [built.filter_type] if filters.get(x) is ClosedFormFilter}
    found |= {x for x in [built.smoother_type] if smoothers.get(x) is ClosedFormSmoother}
    _forget_rules([built.ssm[name] for name in LONG_MATRIX_NAMES])
    return vars(built) | {"_registrations": [_Registration(name) for name in sorted(found)]}


def _forget_rules(outputs):
    """The gradients that PyTensor has made of graphs in boxes: it keeps them beside these, as
    functions that cannot be pickled, and makes them anew."""
    for X in ancestors(outputs):
        op = X.owner and getattr(X.owner.op, "core_op", X.owner.op)
        if isinstance(op, OpFromGraph):
            vars(op).update(_lop_op_cache={}, _rop_op_cache=None)
            _forget_rules(op.fgraph.outputs)


def register_filter(name: str = "closed_form") -> None:
    """Make the closed-form filter and smoother known to pymc-extras.

    Parameters
    ----------
    name : str
        The ``filter_type`` under which models find the filter, and the ``smoother_type`` under
        which they find the smoother. Models with that smoother, and they alone, draw in
        ``sample_conditional_prior`` and ``sample_conditional_posterior`` by
        :mod:`helpers.kalman.smoothing`. A pickled model that has one of the two registers it where
        it is unpickled.

    Raises
    ------
    ImportError
        If the installed pymc-extras does not have the interface that these were written for.
    ValueError
        If another filter or smoother has that name already.

    Notes
    -----
    The log-likelihood of a step at which nothing is observed is zero, here as in pymc-extras. In
    ``pm.compute_log_likelihood`` it is a term like the others, and a comparison that counts the
    terms, such as ``az.loo``, should leave it out: ``log_likelihood.isel(time=seen)``, where seen
    is ``~np.isnan(y).all(axis=1)``.

    A sampler calls a model often enough to make compiling it worthwhile. An optimiser does not:
    with ``find_MAP(..., compile_kwargs={"mode": Mode("py", "fast_run")})``, where ``Mode`` is from
    ``pytensor.compile.mode``, Python runs all Ops but the filter, which is compiled in any mode,
    and the result takes seconds.

    Examples
    --------
    >>> register_filter()
    >>> from pymc_extras.statespace import structural as st
    >>> model = st.LevelTrend(order=1) + st.MeasurementError(name="noise")
    >>> both = {"filter_type": "closed_form", "smoother_type": "closed_form"}
    >>> built = model.build(**both, verbose=False)
    """
    expected = ["data", "a0", "P0", "c", "d", "T", "Z", "R", "H", "Q"]
    filters = getattr(statespace, "FILTER_FACTORY", None)
    smoothers = getattr(statespace, "SMOOTHER_FACTORY", None)
    found = list(inspect.signature(StandardFilter.build_graph).parameters)[1:]
    draws = [getattr(forward_sampling, x, None) for x in (*OUR_DRAWS, "_sample_conditional")]
    known = found == expected and hasattr(StandardFilter, "_declare_covariance_structure")
    if not known or None in (filters, smoothers, *draws):
        raise ImportError(
            f"the closed-form filter supports pymc-extras {SUPPORTED}; found "
            f"{pymc_extras.__version__}, whose filters have another interface"
        )
    if name != name.lower():
        raise ValueError(f"name is {name!r}, expected lower case: pymc-extras looks it up so")
    for what, factory, ours in (
        ("filter", filters, ClosedFormFilter), ("smoother", smoothers, ClosedFormSmoother)
    ):  # fmt: skip
        if factory.get(name, ours) is not ours:
            raise ValueError(f"pymc-extras has a {what} {name!r} already: {factory[name].__name__}")
    filters[name], smoothers[name] = ClosedFormFilter, ClosedFormSmoother
    statespace.PyMCStateSpace.__getstate__ = _with_registration
    if not hasattr(draws[-1], "draws_in_closed_form"):
        forward_sampling._sample_conditional = _with_our_draws(draws[-1])


# What a model with a diffuse start remembers of each draw.
ESTIMATES = ("diffuse_mean", "diffuse_covariance")
# What of a state space model is its own again once the initial state is drawn.
REPLACED = ("make_likelihood", "make_filters", "_insert_random_variables")


class DiffuseRV(distributions.KalmanFilterRV):
    """The observations of a model with a diffuse start, each given those before it."""


@_logprob.register(DiffuseRV)
def diffuse_logp(op, values, mus, covs, logp, rng, **kwargs):
    """The terms as they are, for a sum of them to be found (:class:`OneStepTerms`)."""
    return logp


class DiffusePredictions(distributions.SequenceMvNormal):
    """`ClosedFormMarginals` of a model with a diffuse start."""

    @classmethod
    def rv_op(cls, mus, covs, logp, method=None, size=None, rng=None):
        return _marginals(DiffuseRV, mus, covs, logp, rng)


def _diffuse_likelihood(built, A, names, data, matrices, dims, missing):
    """`PyMCStateSpace.make_likelihood`, with the first state's unknown numbers integrated out."""
    within = pm.modelcontext(None)
    known = {within[name]: pt.zeros_like(within[name]) for name in names}
    given = [pt.as_tensor_variable(data), *graph_replace(matrices, known, strict=False)]
    given = [X.astype("float64") for X in given]  # a vague start needs the digits, whatever floatX
    y, *model = _with_jitter(given, built.missing_fill_value, built.cov_jitter)
    value, mean, covariance = posterior(y, *model, A=A)
    _warn_where_open(within, value, names)
    for name, X in zip(ESTIMATES, (mean, covariance), strict=True):
        pm.Deterministic(name, X)
    terms, expected, covariances = predictions(y, *model, A=A)
    return DiffusePredictions(
        OBSERVED_LIKELIHOOD_NAME, mus=expected, covs=covariances,
        logp=OneStepTerms()(value, terms), observed=data, dims=dims,
    )  # fmt: skip


def _warn_where_open(within, value, names):
    """PyMC itself says no more than that the initial evaluation failed."""
    mode = pytensor.compile.mode.Mode("py", "fast_compile")
    found = within.compile_fn(
        within.replace_rvs_by_values([value]), inputs=within.value_vars, mode=mode,
        on_unused_input="ignore",
    )  # fmt: skip
    if np.isnan(found(within.initial_point())).any():
        warnings.warn(
            f"the data do not tell all numbers of {', '.join(names)} apart, or F is not positive "
            "definite: at the initial point the log-likelihood is NaN, and no sampler starts. Give "
            "some a prior, and the others to diffuse_start(built, names); if all are one vector, "
            "give it a wide P0 in place of diffuse_start",
            stacklevel=4,
        )


def _no_initial_state(*_):
    """`PyMCStateSpace.make_filters`, where there is no state to filter from."""
    raise ValueError(
        "the initial state is integrated out, and nothing stands in its place: draw it first, "
        "idata = helpers.kalman.pymc.draw_initial(built, idata). To build another PyMC model "
        "with it, call diffuse_start(built) there too, or build the model of pymc-extras anew"
    )


def _diffuse_matrices(built, names):
    """`PyMCStateSpace._insert_random_variables`, of the model that leaves these to the data."""
    within = pm.modelcontext(None)
    for X in map(within.named_vars.get, names):
        placeholder = X in within.deterministics and getattr(X.owner.inputs[0], "data", None)
        if placeholder is None or not np.isnan(placeholder).all():
            _no_initial_state()
    return type(built)._insert_random_variables(built)


def diffuse_start(built, names=None) -> tuple[str, ...]:
    """Leave the first state to the data: no priors for it, and no P0.

    Call it within the PyMC model, in place of those priors and before
    ``built.build_statespace_graph(data)``. The numbers of the initial state (``initial_level`` and
    the like) are integrated out under a flat prior, exactly; so the sampler only sees the model's
    parameters. :func:`draw_initial` draws the numbers afterwards; until then they are NaN in the
    posterior, and functions that use the state raise an error.

    ``pm.sample_posterior_predictive`` draws each observation given those before it, and
    ``pm.compute_log_likelihood`` gives the logarithms of these densities. In the diffuse steps, the
    first ones, which leave a direction of the numbers open, there is no such density, and both are
    NaN; so is the logarithm where nothing is observed. For a comparison leave these steps out:
    ``log_likelihood.dropna("time")``.

    Numbers that the data do not tell apart, such as a level and all seasons around it, have no
    likelihood; ``built.build_statespace_graph`` warns of them.

    The placeholders are the same for all draws, as a P0 is that does not depend on the parameters:
    ``pymc_extras.fit_laplace(vectorize_draws=False)`` takes them, and so does
    ``pymc_extras.fit(method="pathfinder", vectorize_postprocessing=False)``; by default both fail.
    The covariance of ``fit_laplace`` is what its BFGS estimates: a diffuse start has no second
    derivatives, and methods that ask for them refuse. Where floatX is float32, the likelihood is
    computed in float64 all the same.

    Parameters
    ----------
    built : PyMCStateSpace
        A state space model, of any filter type: its initial state is integrated out from now on,
        until :func:`draw_initial`.
    names : iterable of str, optional
        The parameters to integrate out. All that enter the initial state alone, if None; then P0 is
        left out too. Otherwise P0 is the model's, for the states that keep a prior.

    Returns
    -------
    tuple of str
        The parameters that no longer need a prior.

    Raises
    ------
    ValueError
        If a name is not one of these, one of them has a prior already, or the initial state is not
        linear in them.
    TypeError
        If there is no model context.

    Examples
    --------
    >>> import pymc as pm
    >>> from pymc_extras.statespace import structural as st
    >>> flow = np.array([[1120.0], [1160.0], [963.0], [1210.0], [1160.0]])
    >>> model = st.LevelTrend(order=1) + st.MeasurementError(name="noise")
    >>> built = model.build(verbose=False)
    >>> with pm.Model(coords=built.coords) as nile:
    ...     _ = pm.HalfNormal("sigma_level_trend", 100.0, dims="shock_level_trend")
    ...     _ = pm.HalfNormal("sigma_noise", 100.0)
    ...     print(diffuse_start(built))
    ...     built.build_statespace_graph(flow)
    ('initial_level_trend', 'P0')
    """
    model = pm.modelcontext(None)
    variables = built._name_to_variable
    x0, P0, *others = (built.ssm[name] for name in LONG_MATRIX_NAMES)
    in_x0, in_P0, in_others = (
        {name for name, X in variables.items() if X in set(ancestors(matrices))}
        for matrices in ([x0], [P0], others)
    )
    initial = [name for name in variables if name in in_x0 - in_P0 - in_others]
    chosen = list(initial if names is None else names)
    unknown = [name for name in chosen if name not in initial]
    if unknown or not chosen:
        raise ValueError(
            f"{', '.join(unknown) or 'nothing'} does not enter the initial state alone: expected "
            f"some of {', '.join(initial) or 'none, as this model has no such parameter'}"
        )
    kept = [variables[name] for name in initial if name not in chosen]
    A = _added_to(x0, [variables[name] for name in chosen], kept)
    if names is None:
        chosen += [name for name in variables if name in in_P0 - in_x0 - in_others]
    taken = [name for name in chosen if name in model.named_vars]
    if taken:
        raise ValueError(
            f"{', '.join(taken)} has a prior in the model, or from an earlier call: leave it out"
        )
    for name in chosen:
        shape, dtype = built.param_info[name]["shape"], variables[name].dtype
        empty = np.full(shape, np.nan if name in initial else 0.0, dtype)
        pm.Deterministic(name, pt.constant(empty), dims=built.param_dims.get(name))
    out = tuple(name for name in chosen if name in initial)
    likelihood = functools.partial(_diffuse_likelihood, built, A, out)
    ours = likelihood, _no_initial_state, functools.partial(_diffuse_matrices, built, out)
    vars(built).update(zip(REPLACED, ours, strict=True), _integrated_out=out)
    return tuple(chosen)


def _added_to(x0, parameters, others) -> np.ndarray:
    """What the parameters add to the first state (m, q), whatever the others are: linearly."""
    sizes, numbers = [int(np.prod(X.type.shape)) for X in parameters], pt.vector("numbers")
    ends, q = np.cumsum(sizes), sum(sizes)
    moves = {X: pt.ones(X.type.shape) for X in others}
    for X, size, end in zip(parameters, sizes, ends, strict=True):
        moves[X] = numbers[end - size : end].reshape(X.type.shape)
    (replaced,) = graph_replace([x0], moves, strict=False)
    rest = [X for X in explicit_graph_inputs([replaced]) if X is not numbers]
    if rest:
        raise ValueError(f"the initial state depends on {', '.join(map(str, rest))} as well")
    at = pytensor.function(
        [numbers],
        replaced,
        mode="FAST_COMPILE",
        on_unused_input="ignore",
        allow_input_downcast=True,
    )
    nought, some = at(np.zeros(q)), np.arange(1.0, q + 1)
    A = np.column_stack([at(unit) - nought for unit in np.eye(q)])
    if not np.allclose(at(some), nought + A @ some):
        raise ValueError("the initial state is not linear in its parameters")
    return A


def draw_initial(built, idata, random_seed=None):
    """Draw the numbers that :func:`diffuse_start` integrated out, one for each posterior draw.

    With them, forecasts, smoothing and whatever else pymc-extras does after sampling starts from a
    known first state, as it does where the numbers were sampled.

    Parameters
    ----------
    built : PyMCStateSpace
        That of :func:`diffuse_start`. Its filter is its own again.
    idata : DataTree
        What ``pm.sample`` returned.
    random_seed : int or numpy.random.Generator, optional

    Returns
    -------
    DataTree
        A copy, with draws in place of the NaNs.

    Raises
    ------
    ValueError
        If the model was not built by :func:`diffuse_start`, or ``idata`` is not of that model.
    """
    names = getattr(built, "_integrated_out", None)
    if names is None:
        raise ValueError("this model has no diffuse start: call diffuse_start first")
    missing = [name for name in (*ESTIMATES, *names) if name not in idata.posterior]
    if missing:
        raise ValueError(f"idata has no {', '.join(missing)}: is it of another model?")
    rng = np.random.default_rng(random_seed)
    mean, covariance = (idata.posterior[name].values for name in ESTIMATES)
    values, vectors = np.linalg.eigh(covariance)
    z = rng.standard_normal(mean.shape) * np.sqrt(np.maximum(values, 0))
    numbers = mean + np.einsum("...ij,...j->...i", vectors, z)
    out, first = idata.copy(deep=True), 0
    for name in names:
        old = out.posterior[name]
        end = first + int(np.prod(old.shape[2:]))
        out.posterior[name] = old.copy(data=numbers[..., first:end].reshape(old.shape))
        first = end
    for name in REPLACED:
        vars(built).pop(name, None)
    return out
