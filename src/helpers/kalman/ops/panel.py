r"""Many series that share a model as one Op, whose gradients are summed over the series inside it.

:func:`kalman_loglike_panel` is the log-likelihood of each step of each series. Where PyTensor
vectorizes :func:`helpers.kalman.ops.likelihood.kalman_loglike` over a batch of series, and of a0, c
or d perhaps, the same Op comes out: P, F, the gains and N do not depend on the data, so one pass of
the covariances is enough for all series with the same gaps (:mod:`helpers.kalman.panel`). A batch
of any other array shares nothing, and stays a loop over the Op of one series.

The Op's inputs are y minus d, and every array except P0 with all axes that it may have.
"""

from __future__ import annotations

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.replace import _vectorize_node
from pytensor.tensor.blockwise import Blockwise, vectorize_node_fallback

from helpers.kalman.ops.declared import Declared, asked, pulled_twice
from helpers.kalman.ops.likelihood import INPUTS as OF_ONE
from helpers.kalman.ops.likelihood import KalmanLoglike, from_model, less
from helpers.kalman.recursions import TOLERANCE
from helpers.kalman.shapes import PANEL, check
from helpers.statespace import DIMENSIONS


def kalman_loglike_panel(Y, a0, P0, c, d, T, Z, R, H, Q, tol=TOLERANCE):
    r"""Log-likelihood of each step of many series that share a model, symbolically.

    Parameters
    ----------
    Y : tensor (J, n, p)
        J series; NaN marks a gap. A series that ends early is filled with NaN after its end, and
        one without any observation counts as zero.
    a0 : tensor (m,) or (J, m)
        For all series, or one for each.
    P0, T, Z, R, H, Q : tensor
        As :func:`helpers.kalman.ops.likelihood.kalman_loglike` has them, for all series.
    c, d : tensor
        So too, or with two leading axes: (J, n, m) or c[:, None, :], and (J, n, p) or
        d[:, None, :].
    tol : float
        As there.

    Returns
    -------
    TensorVariable (J, n)
        NaN for the series with whose gaps some F is not positive definite.

    Raises
    ------
    ValueError
        If an argument has the wrong number of dimensions, or a shape that is known does not fit;
        where shapes become known when the compiled function is called, then.
    TypeError
        If an argument is complex.
    MemoryError
        When the compiled function is called and memory runs out.

    Notes
    -----
    Its pullback gives gradients summed over the series, as the smoother's sums over steps and
    series (:mod:`helpers.kalman.panel`); weights that vary over the steps of a series, or that do
    where its log-likelihoods are not simply summed, take a pass for each series.  Second
    derivatives are those of :func:`helpers.kalman.ops.likelihood.kalman_loglike`, one series after
    the other.

    Examples
    --------
    >>> import numpy as np
    >>> from helpers.kalman.ops.panel import kalman_loglike_panel
    >>> one, zero = np.eye(1), np.zeros(1)
    >>> Y = np.array([[[1.0], [np.nan]], [[0.0], [0.5]], [[2.0], [1.0]]])
    >>> kalman_loglike_panel(Y, zero, one, zero, zero, one, one, one, one, one).type.shape
    (3, 2)
    """
    Y, a0, c, d = (pt.as_tensor_variable(X) for X in (Y, a0, c, d))
    own = {"a0": a0.ndim == 2, "c": c.ndim == 3, "d": d.ndim == 3}
    series = {"a0": a0, "c": c, "d": d}
    dims = {"Y": "J n p", "a0": "J m", "c": "J n? m", "d": "J n? p"}
    given = {"Y": Y} | {x: X for x, X in series.items() if own[x]}
    check(dims, {x: X.type.shape for x, X in given.items()})
    # One series and its model, looked at and put together as they always are.
    first = {x: X[(0,) * (X.ndim - 1)] if own[x] else X for x, X in series.items()}
    one = from_model(Y[0], first["a0"], P0, first["c"], first["d"], T, Z, R, H, Q)
    inputs = dict(zip(OF_ONE, one, strict=True)) | {"y": Y}
    inputs |= {x: X for x, X in series.items() if own[x]}
    inputs = {x: X.astype(one[0].dtype) for x, X in inputs.items()}
    return _panel(inputs, own, tol)


def _panel(inputs: dict, own: dict, tol):
    """The Op on the inputs of one series, some of which have an axis for series."""
    full = dict(inputs)
    for name in ("c", "d", "T", "Z", "H", "W"):
        X, core = full[name], len(DIMENSIONS[name])
        series = own.get(name, False)
        if X.ndim == core + series:  # no axis for time
            X = pt.expand_dims(X, int(series))
        full[name] = X if series or name not in ("c", "d") else X[np.newaxis]
    if not own["a0"]:
        full["a0"] = full["a0"][np.newaxis]
    full["y"] = less(full["y"], full.pop("d"))
    return KalmanPanel(tol)(*(full[x] for x in PANEL))


@_vectorize_node.register(KalmanLoglike)
def vectorize(op, node, *inputs):
    """A batch of series with one model becomes a panel; any other batch a loop over the Op."""
    core = dict(zip(OF_ONE, node.inputs, strict=True))
    given = dict(zip(OF_ONE, inputs, strict=True))
    batched = [x for x in given if given[x].type.ndim > core[x].type.ndim]
    own = {x: x in batched for x in ("a0", "c", "d")}
    shared = set(batched) <= {"y", *own}
    one_axis = all(given[x].type.ndim == core[x].type.ndim + 1 for x in batched)
    # A batch of length 1 would be stretched to that of the others.
    long = all(given[x].type.shape[0] != 1 for x in batched)
    if "y" not in batched or not (shared and one_axis and long):
        return vectorize_node_fallback(op, node, *inputs)
    return [_panel(given, own, op.tol)]


class KalmanPanel(Declared):
    """y, a0, P0, c, T, Z, H, W -> l (J, n)."""

    __props__ = ("tol",)
    inputs = PANEL
    gives = {"l": "J n"}
    needed = {"J": "series", "n": "step", "p": "series", "m": "state"}
    looked_at, code = tuple(PANEL), "panel.loglike_and_grad"
    found = "l, y, a0, c, (_, P0, _, _, T, Z, H, W), _"

    def arguments(self):
        return [*PANEL, "np.ones(y.shape[:2])", *["False"] * 5, repr(self.tol)]

    def pull(self, X, bars):
        return KalmanPanelGrad(tuple(PANEL), self.tol).named(*X.values(), bars["l"])


class KalmanPanelGrad(Declared):
    """The eight inputs and l_bar (J, n) -> what is `requested`: l, and gradients of sum l_bar l.

    Each of its input's shape: summed over the series where those share it.
    """

    __props__ = ("requested", "tol")
    inputs = PANEL | {"l_bar": "J n"}
    gives = {"l": "J n"} | PANEL
    needed, code, found = KalmanPanel.needed, KalmanPanel.code, KalmanPanel.found
    looked_at = tuple(inputs)
    unconnected = frozenset({("l_bar", "l")})

    def arguments(self):
        return [*self.inputs, "True", *map(str, asked(self.requested)), repr(self.tol)]

    def pull(self, X, bars):
        """By the Op for one series, in a loop: second derivatives share no covariances."""
        return pulled_twice(
            lambda own: {"l": _one_by_one([own[x] for x in PANEL], self.tol)}, X, bars
        )


def _repeated(X, length, axis=0):
    """X with an axis of this length, if it has length 1, which need not be known before it runs."""
    own = X.shape[axis]  # PyTensor would not stretch it then
    return pt.take(X, pt.arange(pt.maximum(length, own)) * pt.neq(own, 1), axis=axis)


def _one_by_one(inputs, tol):
    """The log-likelihoods (J, n) by a loop over the Op for one series, from the panel's inputs."""
    y, a0, P0, c, *matrices = inputs
    J, n, p = y.shape
    fixed = c.type.shape[1] == 1
    c = _repeated(c, J) if fixed else _repeated(_repeated(c, J), n, axis=1)
    over_time = [X[0] if X.type.shape[0] == 1 else _repeated(X, n) for X in matrices]
    of_all = [P0, pt.zeros((p,), dtype=y.dtype), *over_time]
    P0, d, *matrices = (X[np.newaxis] for X in of_all)
    a0 = _repeated(a0, J)
    varying = tuple(x for x, X in zip("TZHW", over_time, strict=True) if X.ndim == 3)
    op = KalmanLoglike(varying if fixed else ("c", *varying), tol)
    return Blockwise(op)(y, a0, P0, c[:, 0] if fixed else c, d, *matrices)
