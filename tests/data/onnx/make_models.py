"""Make the small models of this folder that other libraries export.

Two environments, because the frameworks need not share one with the tests:

    python tests/data/onnx/make_models.py sklearn      # scikit-learn, skl2onnx
    python tests/data/onnx/make_models.py torch        # torch, onnx, onnxscript

The files are named by what made them; their numbers depend on its version a little.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx

HERE = Path(__file__).parent
IR_VERSION, OPSET = 10, 21


def save(model: onnx.ModelProto, name: str) -> None:
    model.ir_version = IR_VERSION
    graph = model.graph
    named = (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer)
    for proto in (model, graph, *named):
        del proto.metadata_props[:]  # an exporter writes the places of its source there
        proto.ClearField("doc_string")
    model.ClearField("producer_version")
    onnx.checker.check_model(model, full_check=True)
    path = HERE / f"{name}.onnx"
    path.write_bytes(model.SerializeToString(deterministic=True))
    operators = " ".join(node.op_type for node in model.graph.node)
    print(f"{path.name}: {path.stat().st_size} bytes: {operators}")


# --- scikit-learn ---------------------------------------------------------------------------------


def from_sklearn() -> None:
    from skl2onnx import to_onnx
    from sklearn.datasets import load_diabetes, load_digits
    from sklearn.linear_model import LinearRegression
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    X, y = load_diabetes(return_X_y=True)
    # By default one operator of the domain ai.onnx.ml; without it, matrices.
    for name, options in {"ml": {}, "core": {"black_op": {"LinearRegressor"}}}.items():
        linear = LinearRegression().fit(X, y)
        model = to_onnx(linear, X[:1].astype(np.float32), target_opset=OPSET, **options)
        save(model, f"skl_linear_{name}")

    X, y = load_digits(return_X_y=True)
    X = X / 16
    digits = X[:1].astype(np.float32)
    regressor = MLPRegressor(
        hidden_layer_sizes=(8,), activation="tanh", random_state=1, max_iter=20
    )
    save(to_onnx(regressor.fit(X, y), digits, target_opset=OPSET), "skl_mlp_regressor")
    classifier = MLPClassifier(hidden_layer_sizes=(8,), random_state=1, max_iter=20).fit(X, y)
    options = {"zipmap": False}
    model = to_onnx(classifier, digits, target_opset=OPSET, options={MLPClassifier: options})
    save(model, "skl_mlp_classifier")


# --- torch ----------------------------------------------------------------------------------------


def from_torch() -> None:
    import torch
    from torch import nn

    class Attention(nn.Module):
        """One head, with a residual and layer norm: products of rank 3, softmax, transposition."""

        def __init__(self, width=6):
            super().__init__()
            self.qkv, self.norm = nn.Linear(width, 3 * width), nn.LayerNorm(width)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
            return self.norm(x + weights @ v)

    mlp = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 4), nn.Softplus(), nn.Linear(4, 2))
    conv = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False),
        nn.LeakyReLU(0.1),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(4, 10),
        nn.LogSoftmax(dim=-1),
    )
    torch.manual_seed(1)
    for name, module, x in (
        ("torch_mlp", mlp, torch.randn(3, 5)),
        ("torch_conv", conv, torch.randn(3, 1, 8, 8)),
        ("torch_attention", Attention(), torch.randn(2, 4, 6)),
    ):
        for parameter in module.parameters():  # no layer with special values of its own
            parameter.data = torch.randn_like(parameter) / 2
        program = torch.onnx.export(
            module.eval(),
            (x,),
            input_names=["x"],
            output_names=["y"],
            opset_version=OPSET,
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
        )
        save(program.model_proto, name)


if __name__ == "__main__":
    makers = {"sklearn": from_sklearn, "torch": from_torch}
    if len(sys.argv) != 2 or sys.argv[1] not in makers:
        sys.exit(f"expected one argument, {' or '.join(makers)}\n\n{__doc__}")
    makers[sys.argv[1]]()
