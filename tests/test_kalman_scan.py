"""The PyTensor filter and both of its gradients against the NumPy reference."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from kalman_models import VARYING, make
from tiers import thorough

from helpers.checks import relative_error, symmetrize
from helpers.kalman import scan
from helpers.kalman.reference import FilterOutputs, kalman_filter, reverse
from helpers.kalman.scan import closed_form_step, filter_graph, kalman_step, symbolic_model
from helpers.statespace import SYMMETRIC

# No C or Numba compilation: the graph is what is tested here; the chapters compile it.
PLAIN = pytensor.compile.mode.Mode(linker="py", optimizer="fast_compile")


@pytest.fixture(scope="module", params=["gaps", thorough("time-varying with gaps")])
def case(request):
    y, model = make(request.param)
    filtered = kalman_filter(y, model)
    rng = np.random.default_rng(3)
    bar = FilterOutputs(*(rng.standard_normal(X.shape) for X in filtered.out))
    dy, gradients = reverse(model, filtered, bar)
    return y, model, filtered.out, bar, {"y": dy, **gradients.asdict()}


@pytest.mark.parametrize("step", ["autodiff", "closed form"])
def test_outputs_and_gradients(case, step):
    y, model, outputs, bar, truth = case
    op = {"autodiff": kalman_step, "closed form": closed_form_step()}[step]
    symbols = symbolic_model(model.time_varying)
    out = filter_graph(*symbols.values(), step=op)
    loss = sum((w * X).sum() for w, X in zip(bar, out, strict=True))
    gradients = pt.grad(loss, list(symbols.values()))
    evaluate = pytensor.function(list(symbols.values()), [*out, *gradients], mode=PLAIN)
    values = evaluate(y, *model.asdict().values())
    for name, X, expected in zip(FilterOutputs._fields, values, outputs, strict=False):
        assert relative_error(X, expected) < 1e-12, name
    for name, G in zip(symbols, values[len(outputs) :], strict=True):
        G = symmetrize(G) if name in SYMMETRIC else G
        assert relative_error(G, truth[name]) < 1e-10, name


def test_a_wrong_pullback_is_noticed(monkeypatch):
    """The override is really used: a factor 2 in it comes out."""
    y, model = make("one of each")

    def twice(inputs, outputs, cotangents):
        zeros = [pt.zeros_like(X) for X in inputs]
        return [*zeros[:3], 2 * outputs[0], *zeros[4:]]

    monkeypatch.setattr(scan, "step_pullback", twice)
    op = closed_form_step()
    symbols = symbolic_model()
    l_sum = filter_graph(*symbols.values(), step=op).l.sum()
    evaluate = pytensor.function(list(symbols.values()), pt.grad(l_sum, symbols["c"]), mode=PLAIN)
    a_filt = kalman_filter(y, model).out.a_filt
    assert relative_error(evaluate(y, *model.asdict().values()), 2 * a_filt.sum(axis=0)) < 1e-12


def test_wrong_arguments():
    symbols = symbolic_model()
    with pytest.raises(ValueError, match="Z has 1 dimensions, expected 2"):
        filter_graph(**symbols | {"Z": pt.vector("Z")})
    with pytest.raises(ValueError, match="y has 1 dimensions, expected 2"):
        filter_graph(**symbols | {"y": pt.vector("y")})
    with pytest.raises(ValueError, match="'a0' cannot vary with time"):
        symbolic_model(("a0",))
    assert symbolic_model(VARYING)["T"].ndim == 3


def test_what_stands_at_a_gap_does_not_count():
    y, model = make("time-varying with gaps")
    symbols = symbolic_model(model.time_varying)
    l_sum = filter_graph(*symbols.values(), step=kalman_step).l.sum()
    wanted = [l_sum, *pt.grad(l_sum, list(symbols.values()))]
    evaluate = pytensor.function(list(symbols.values()), wanted, mode=PLAIN)
    arrays = {x: X.copy() for x, X in model.asdict().items()}
    expected = evaluate(y, *arrays.values())
    at_gaps = np.isnan(y)
    for x in {"d", "Z", "H"} & set(model.time_varying):
        arrays[x][at_gaps] = np.nan
    for found, X in zip(evaluate(y, *arrays.values()), expected, strict=True):
        np.testing.assert_array_equal(found, X)
