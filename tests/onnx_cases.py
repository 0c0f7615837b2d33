"""Models for the ONNX tests: the ONNX backend's own node tests, and the files in tests/data."""

from __future__ import annotations

import warnings
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper

FOLDER = Path(__file__).parent / "data" / "onnx"


class Case(NamedTuple):
    """A node test of the ONNX backend: a model, what it is fed, what it has to return."""

    name: str
    model: ModelProto
    feed: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]


def load(name: str) -> ModelProto:
    return onnx.load(FOLDER / f"{name}.onnx")


@cache
def node_cases() -> dict[tuple[str, str], list[Case]]:
    """All node tests with dense arrays of NumPy's types, by (domain, operator) of their first node.

    A test that expands an operator into others is listed under the operator that it expands.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their expected infinities and NaN come with warnings
        from onnx.backend.test.case.node import collect_testcases

        found = collect_testcases(None)
    operators = {}
    cases = defaultdict(list)
    for case in found:
        ((inputs, outputs),) = case.data_sets
        if "_expanded" not in case.name:
            node = case.model.graph.node[0]
            operators[case.name] = (
                node.domain.replace("ai.onnx", "", node.domain == "ai.onnx"),
                node.op_type,
            )
        arrays = [_array(x) for x in (*inputs, *outputs)]
        if any(x is None for x in arrays):
            continue
        graph = case.model.graph
        feed = dict(zip([x.name for x in graph.input], arrays, strict=False))
        expected = dict(zip([x.name for x in graph.output], arrays[len(inputs) :], strict=True))
        operator = operators[case.name.partition("_expanded")[0]]
        cases[operator].append(Case(case.name, case.model, feed, expected))
    return cases


def _array(x) -> np.ndarray | None:
    """A dense array of a type that NumPy has itself, or None."""
    if isinstance(x, onnx.TensorProto):
        x = numpy_helper.to_array(x)
    if not isinstance(x, np.ndarray | np.generic):
        return None
    x = np.asarray(x)
    return x if x.dtype.kind in "fiub" and x.dtype.isbuiltin == 1 else None


def with_constants(case: Case) -> Case:
    """The case with its integer parameters (axes, shapes, pads ...) as initializers.

    The node tests feed every input; in a model that a library exports these are constants, and a
    gradient or a translation may ask for that. Labels and indices stay inputs, and so does the
    first input, which is data whatever its type.
    """
    model, feed = ModelProto.FromString(case.model.SerializeToString()), dict(case.feed)
    graph = model.graph
    for x in list(graph.input)[1:]:
        value = feed[x.name]
        data = value.ndim > 1 or x.name in ("indices", "labels", "target")
        if (value.dtype.kind in "ib" and not data) or x.name in ("depth", "scales"):
            graph.initializer.append(numpy_helper.from_array(feed.pop(x.name), x.name))
            graph.input.remove(x)
    return Case(case.name, model, feed, case.outputs)
