"""One text: every engine runs the lines of :mod:`helpers.kalman.recursions`, or what they say."""

import ast
import inspect
import subprocess
import sys
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytensor.tensor as pt
import pytest
from jax import config, disable_jit, vjp
from kalman_models import of_lower_rank
from pytensor import function
from test_kalman_twin import run

from helpers.datasets import random_model
from helpers.kalman import recursions, reference, scan
from helpers.kalman.compiled import show
from helpers.kalman.compiled import step as written
from helpers.kalman.jax import scans
from helpers.statespace import StateSpace


class Flip(ast.NodeTransformer):
    """Turns a sum of a function into a difference, or the other way, after some others."""

    def __init__(self, after):
        self.after = after

    def visit_BinOp(self, node):  # noqa: N802
        if isinstance(node.op, (ast.Add, ast.Sub)):
            self.after -= 1
        if self.after == -1 and isinstance(node.op, (ast.Add, ast.Sub)):
            node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        return self.generic_visit(node)


MODEL = StateSpace(**random_model(2, 1, rng=np.random.default_rng(0)))
Y = np.array([[0.3], [-1.0], [0.7]])
ARRAYS = [getattr(MODEL, x) for x in scans.INPUTS[1:-1]]


def numpy():
    filtered = reference.kalman_filter(Y, MODEL)
    dy, bars = reference.smoother_form(MODEL, filtered)
    return np.concatenate([np.ravel(x) for x in (dy, filtered.out.l, *bars)])


def by_form_one():
    filtered = reference.kalman_filter(Y, MODEL)
    weights = reference.FilterOutputs(l=np.array([1.0, 2.0, 0.5]))
    dy, bars = reference.reverse(MODEL, filtered, weights)
    return np.concatenate([np.ravel(x) for x in (dy, *bars)])


def registers():
    _, steps, bars, y_bar = run(Y, MODEL, small=True)
    return np.concatenate([np.ravel(x) for x in (y_bar, steps.l, *bars)])


def jax():
    inputs = [jnp.asarray(x) for x in (Y, *ARRAYS, np.eye(2))]
    with disable_jit():
        found, pull = vjp(scans.closed_form(("l",)), *inputs)
        return np.concatenate([np.ravel(x) for x in (found[0], *pull((np.ones(3),)))])


def pytensor():
    inputs = [pt.as_tensor(x) for x in (Y[0], *ARRAYS, np.eye(2))]
    step = scan.kalman_step(*inputs)
    pulled = scan.step_pullback(inputs, step, [pt.ones_like(x) for x in step])
    run_both = function([], [*step, *pulled], mode="FAST_COMPILE")
    return np.concatenate([np.ravel(x) for x in run_both()])


def tiles():
    return written.write_all()


@cache
def as_it_is(engine):
    return engine()


FILTER, SMOOTHER = ("gains", "filtered", "update", "predict"), ("pull_predict", "pull_update")


@pytest.mark.parametrize(
    "name", [*FILTER, *SMOOTHER, "smooth_mean", "smooth_predicted", "smooth_observed", "joseph"]
)
def test_a_sign_of_the_text_changes_every_engine_that_runs_it(name, monkeypatch):
    """There is no second text that would go on being right."""
    engines = [tiles, numpy, registers]
    if name == "joseph":  # compiled passes take it where little is left of a variance
        engines.remove(registers)
    if name in (*FILTER, "joseph"):
        engines += [jax, pytensor]
    if name in SMOOTHER:
        engines = [by_form_one, jax, pytensor]
    before = [as_it_is(engine) for engine in engines]
    text = getattr(recursions, name)
    changed = ast.fix_missing_locations(
        Flip(name == "joseph").visit(ast.parse(inspect.getsource(text)))
    )
    there = {}
    exec(compile(changed, "", "exec"), vars(recursions) | {}, there)
    for module in (recursions, scan, scans):
        if getattr(module, name, None) is text:
            monkeypatch.setattr(module, name, there[name])
    for engine, was in zip(engines, before, strict=True):
        now = engine()
        same = now == was if engine is tiles else np.allclose(now, was, 1e-9, 1e-9)
        assert not same, engine.__name__


@pytest.mark.parametrize("tiny", [0.0, 1e-13])
def test_scans_answer_nan_where_F_is_singular_up_to_rounding(tiny):  # noqa: N802
    """As the compiled pass refuses it, and by no more: what is small is no rounding."""
    config.update("jax_enable_x64", True)
    for seed in range(10):
        y, model = of_lower_rank(seed, 3, 2)
        model = replace(model, H=model.H + tiny * np.eye(3))
        arrays = [getattr(model, x) for x in scans.INPUTS[1:-1]]
        W = model.R @ model.Q @ model.R.T
        by_jax = scans.closed_form(("l",))(*(jnp.asarray(x) for x in (y, *arrays, W)))[0]
        step = scan.kalman_step(*(pt.as_tensor(x) for x in (y[0], *arrays, W)))
        for l in (by_jax[0], step[-1].eval()):
            assert np.isfinite(l) == (tiny > 0)


def test_what_is_computed_under_a_condition_is_known_there_alone():
    e = written.writing.Writer("p", "lower", {})
    A, B = e.matrix("A", "m", "m"), e.matrix("B", "m", "m")
    with e.only("some"):
        there = (A @ B).force()
        assert (A @ B).force() is there
    assert (A @ B).force() is not there


def test_a_step_without_room_is_told_by_name():
    e = written.writing.Writer("p", "lower", {})
    e.keep("out", (e.matrix("A", "m", "m") @ e.matrix("B", "m", "m")) @ e.matrix("C", "m", "m"))
    with pytest.raises(ValueError, match="no room for a matrix .'m', 'm'. in step"):
        e.source("step", "w", [])


def shown(m, p):
    command = [sys.executable, "-m", show.__name__, str(m), str(p)]
    return subprocess.run(command, capture_output=True, text=True)


def test_what_is_written_out_can_be_read():
    """One series has functions of its own, few states the text itself; labels are those of both."""
    for m, p, names in (
        (13, 1, ["update_one", "predict", "predict_changed", "step_back_one"]),
        (13, 2, ["update", "predict", "step_back"]),
        (3, 40, ["update", "predict", "step_back"]),
        (4, 4, [*show.FORWARDS, *show.BACKWARDS]),
    ):
        text = show.lines(m, p)
        assert [x.name for x in ast.walk(ast.parse(text)) if hasattr(x, "decorator_list")] == names
        assert "# eq-filter-loglik" in text and "# eq-adjoint-r-recursion" in text
        assert ("40 series are rotated into 3" in text) == (p == 40)
    assert shown(13, 1).stdout == show.lines(13, 1) + "\n"
    assert "0 states and 1 series, expected at least one of each" in shown(0, 1).stderr
