"""The page of ONNX operators is that of the table of rules, and what it says of tests is so."""

import os
import subprocess
import sys

import onnxruntime
import pytest
from onnx.parser import parse_model

from helpers.onnx_grad.rules import ABOUT, RULES
from helpers.onnx_grad.rules.coverage import coverage
from tools import book, onnx_operators


@pytest.fixture(autouse=True)
def rules_of_the_package_alone(monkeypatch):
    """The example in the docstring of register_gradient is a test, and leaves its operator."""
    for rules in (RULES, ABOUT):
        monkeypatch.delitem(rules, ("my.operators", "Cube"), raising=False)


def test_the_page_is_fresh():
    text = (book.ROOT / onnx_operators.PAGE).read_text(encoding="utf-8")
    assert text == onnx_operators.make(), f"{onnx_operators.PAGE} is stale: run make notebooks"


def test_every_operator_is_on_the_page_once():
    text = onnx_operators.make()
    for row in coverage():
        since = "" if row.since is None else f" ({row.since})"
        name = f"`{row.operator}`{since}"
        times = text.count(f"\n* - {name}\n") + text.count(f" {name},") + text.count(f" {name}.")
        assert times == 1, row.operator


def test_no_operator_is_left_out_for_want_of_a_section():
    row = coverage()[0]._replace(domain="my.own")
    with pytest.raises(ValueError, match="no section of the page takes my.own"):
        onnx_operators.make([row])


def test_the_named_tests_are_there():
    rows = coverage()
    tests = [onnx_operators.tested_by(row, row.operator).split(" -k ") for row in rows]
    files = sorted({file for file, _ in tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    plain = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}  # two -q list no names
    found = subprocess.run(
        [*command, *files], cwd=book.ROOT, env=plain, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout
    for file, name in tests:
        assert f"{file}::{name}" in found.stdout, f"no test {file}::{name}"


NO_FLOAT64 = {
    "Conv": "Y = Conv(X, X)",
    "ConvTranspose": "Y = ConvTranspose(X, X)",
    "AveragePool": "Y = AveragePool<kernel_shape = [1, 1]>(X)",
    "InstanceNormalization": "s = Constant<value = double[1] {1.0}>() "
    "Y = InstanceNormalization(X, s, s)",
    "OneHot": "k = Constant<value = int64[1] {0}>() d = Constant<value = int64 {2}>() "
    "v = Constant<value = double[2] {0.0, 1.0}>() Y = OneHot(k, d, v)",
}


@pytest.mark.parametrize("operator", onnx_operators.NO_FLOAT64)
def test_onnxruntime_has_no_kernel_in_float64(operator):
    text = '<ir_version: 10, opset_import: ["" : 21]> g (KIND[1, 1, 1, 1] X) => (KIND Y) { BODY }'
    text = text.replace("BODY", NO_FLOAT64[operator]).replace("KIND Y", "KIND[N] Y")

    def session(kind):
        model = parse_model(text.replace("double", kind).replace("KIND", kind))
        model.graph.output[0].type.tensor_type.ClearField("shape")
        return onnxruntime.InferenceSession(model.SerializeToString())

    session("float")
    with pytest.raises(Exception, match="NOT_IMPLEMENTED"):
        session("double")
