"""One text: every engine runs the lines of :mod:`helpers.kalman.recursions`, or what they say."""

import ast
import inspect
from dataclasses import replace
from functools import partial

import numpy as np
import pytensor.tensor as pt
import pytest
from jax import vjp
from test_kalman_twin import run

from helpers.datasets import random_model
from helpers.kalman import jax_scans, recursions, reference, scan
from helpers.kalman.fused import step as written
from helpers.statespace import StateSpace


class Flip(ast.NodeTransformer):
    """Turns the first sum of a function into a difference, or the other way."""

    done = False

    def visit_BinOp(self, node):  # noqa: N802
        if not self.done and isinstance(node.op, (ast.Add, ast.Sub)):
            self.done = True
            node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        return self.generic_visit(node)


FILTER, SMOOTHER = ("gains", "filtered", "update", "predict"), ("pull_predict", "pull_update")


@pytest.mark.parametrize(
    "name", [*FILTER, *SMOOTHER, "smooth_mean", "smooth_predicted", "smooth_observed", "joseph"]
)
def test_a_sign_of_the_text_changes_every_engine_that_runs_it(name, monkeypatch):
    """There is no second text that would go on being right."""
    model = StateSpace(**random_model(2, 1, rng=np.random.default_rng(0)))
    if name == "joseph":  # which compiled passes take where little is left of a variance
        model = replace(model, P0=1e6 * model.P0)
    y = np.array([[0.3], [-1.0], [0.7]])

    def numpy():
        return reference.loglike_and_grad(y, model)[1]

    def gradient(cotangents):
        filtered = reference.kalman_filter(y, model)
        return reference.reverse(model, filtered, reference.FilterOutputs(**cotangents))[0]

    def by_form_one():
        return gradient({"l": np.array([1.0, 2.0, 0.5])})

    def registers():
        return run(y, model, small=True)[3]

    def jax():
        value = partial(jax_scans.closed_form(("l",)), y)
        found, pull = vjp(value, *(getattr(model, x) for x in jax_scans.INPUTS[1:-1]), np.eye(2))
        return np.concatenate([np.ravel(x) for x in (found[0], *pull((np.ones(3),)))])

    def pytensor():
        inputs = [pt.as_tensor(x) for x in (y[0], model.a0, model.P0, model.c, model.d)]
        inputs += [pt.as_tensor(x) for x in (model.T, model.Z, model.H, np.eye(2))]
        step = scan.kalman_step(*inputs)
        pulled = scan.step_pullback(inputs, step, [pt.ones_like(x) for x in step])
        return np.concatenate([np.ravel(x.eval()) for x in (*step, *pulled)])

    def tiles():
        return written.write_all()

    engines = [tiles, numpy, registers]
    if name in (*FILTER, "joseph"):
        engines += [jax, pytensor]
    if name in SMOOTHER:
        engines = [by_form_one, jax, pytensor]
    before = [engine() for engine in engines]
    text = getattr(recursions, name)
    changed = ast.fix_missing_locations(Flip().visit(ast.parse(inspect.getsource(text))))
    there = {}
    exec(compile(changed, "", "exec"), vars(recursions) | {}, there)
    for module in (recursions, scan, jax_scans):
        if getattr(module, name, None) is text:
            monkeypatch.setattr(module, name, there[name])
    for engine, was in zip(engines, before, strict=True):
        now = engine()
        same = now == was if engine is tiles else np.allclose(now, was, 1e-9, 1e-9)
        assert not same, engine.__name__
