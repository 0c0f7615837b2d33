"""Export small PyTorch models with both of its exporters, and record PyTorch's own gradients.

    python tests/data/onnx/make_exported.py       # needs torch, onnx, onnxscript and skl2onnx

Everything is in double precision, so that gradients can be compared to many digits.  A model
``<name>-<exporter>.onnx`` is as the exporter wrote it, but for the places of its source code; what
``<name>.npz`` holds is the inputs, the output y, and the gradients of sum(y * y_bar) by autograd.
Of the network in training it is the gradients of each output before the dropout, because the mask
is drawn anew in each run.

The dynamo exporter writes a batch normalisation for inference even of a model in training, and its
optimiser multiplies it into the convolution before; so it exports that network for inference and
unoptimised, and the other exporter for training.  The other one knows neither RMSNorm nor
causal attention, and gets them written out.

``pipeline-sklearn.onnx`` is a scaler and a perceptron of scikit-learn, in single precision, with
the gradients that its own training takes.  ``columns-sklearn.onnx`` scales some columns, takes the
products of others and classifies, in double precision, with the derivatives of the probabilities
along each column by differences of scikit-learn's own.  ``powers-sklearn.onnx`` is a
PowerTransformer, in single precision: it computes both branches for every entry, and what does not
apply is NaN and replaced; with the derivatives of its columns, by differences too.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn

HERE = Path(__file__).parent / "exported"
OPSET = {"dynamo": 23, "script": 17}


class Residual(nn.Module):
    """Convolutions with a way around, on one feature map, and a mean over the image."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.norm, self.head = nn.GroupNorm(2, 2), nn.Linear(2, 3)

    def forward(self, x):
        h = torch.relu(self.first(x))
        h = h + self.norm(self.second(h))
        h = nn.functional.interpolate(h, size=(8, 8), mode="nearest")
        return self.head(torch.relu(h).mean(dim=(2, 3)))


class Upsampling(nn.Module):
    """A transposed convolution and both kinds of interpolation."""

    def __init__(self):
        super().__init__()
        self.up, self.out = nn.ConvTranspose2d(1, 2, 2, stride=2), nn.Conv2d(2, 1, 2)

    def forward(self, x):
        h = nn.functional.interpolate(torch.tanh(self.up(x)), size=(5, 7), mode="bilinear")
        return self.out(h)


class Convolutional(nn.Module):
    """Batch normalisation and dropout as in training."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 2, 3),
            nn.BatchNorm2d(2, momentum=0.3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8, 3),
            nn.BatchNorm1d(3),
        )
        self.dropout = nn.Dropout(0.4)

    def forward(self, x):
        return self.dropout(self.body(x))


def rotated(x, cos, sin):
    """Rotary embedding: pairs (x_i, x_{i + d/2}) turned by the angle of their position."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class RootMeanSquare(nn.Module):
    """What nn.RMSNorm does, in operators that every exporter knows."""

    def __init__(self, like: nn.RMSNorm):
        super().__init__()
        self.weight, self.eps = like.weight, like.eps or torch.finfo(torch.float64).eps

    def forward(self, x):
        return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + self.eps) * self.weight


def attention(q, k, v, is_causal):
    """Scaled dot products, each position with itself and those before it."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1) @ v


class Transformer(nn.Module):
    """One block: root mean square norm, rotary embedding, causal attention, gated layer."""

    def __init__(self, words=7, width=4, heads=2, length=3):
        super().__init__()
        self.heads, self.attention = heads, nn.functional.scaled_dot_product_attention
        self.embedding = nn.Embedding(words, width)
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(3)])
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 5, bias=False), nn.Linear(width, 5, bias=False)
        self.down, self.head = nn.Linear(5, width, bias=False), nn.Linear(width, words, bias=False)
        half = width // heads // 2
        angle = torch.arange(length)[:, None] / 100.0 ** (torch.arange(half) / half)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens):
        x = self.embedding(tokens)
        n, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).reshape(n, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = rotated(q, self.cos, self.sin), rotated(k, self.cos, self.sin)
        y = self.attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, length, width))
        h = self.norms[1](x)
        x = x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return self.head(self.norms[2](x))


class Bordered(nn.Module):
    """Paddings that copy, depthwise convolution, pooling that counts its padding or overhangs."""

    def __init__(self):
        super().__init__()
        self.depthwise = nn.Conv2d(2, 4, 2, groups=2, padding=1, padding_mode="circular")
        self.pointwise, self.norm = nn.Conv2d(4, 3, 1), nn.InstanceNorm2d(3, affine=True)

    def forward(self, x):
        h = nn.functional.hardswish(self.pointwise(self.depthwise(x)))
        h = nn.functional.pad(self.norm(h), (1, 2, 2, 1), mode="reflect")
        h = nn.functional.avg_pool2d(h, 3, 2, 1, ceil_mode=True, count_include_pad=True)
        h = nn.functional.pad(h, (1, 0, 0, 1), mode="replicate")
        return nn.functional.max_pool2d(h, 2, 2, ceil_mode=True)


class Masked(nn.Module):
    """Attention that may look at nothing in one of its rows."""

    def __init__(self, width=4):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, 2)
        self.register_buffer("mask", torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 1]]).bool())

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return self.out(y[:, 0]).fmod(0.25)


class Recurrent(nn.Module):
    """A recurrent layer of either kind, and a linear one on all of its outputs."""

    def __init__(self, kind, **arguments):
        super().__init__()
        self.cell = kind(2, 3, batch_first=True, **arguments)
        self.head = nn.Linear(3 * (1 + self.cell.bidirectional), 1)

    def forward(self, x):
        return self.head(self.cell(x)[0])


def models() -> dict:
    tokens = torch.tensor([[1, 0, 4], [6, 4, 4]])
    mlp = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 2))
    mlp.append(nn.LogSoftmax(dim=-1))
    return {
        "mlp": (mlp, torch.randn(5, 3)),
        "cnn": (Convolutional(), torch.randn(4, 1, 6, 6)),
        "cnn_inference": (Convolutional().eval(), torch.randn(2, 1, 6, 6)),
        "residual": (Residual(), torch.randn(2, 1, 4, 4)),
        "upsampling": (Upsampling(), torch.randn(1, 1, 2, 3)),
        "transformer": (Transformer(), tokens),
        "lstm": (Recurrent(nn.LSTM), torch.randn(2, 4, 2)),
        "gru": (Recurrent(nn.GRU, bidirectional=True), torch.randn(2, 3, 2)),
        "bordered": (Bordered(), torch.randn(1, 2, 4, 3)),
        "masked": (Masked(), torch.randn(2, 3, 4)),
    }


def without_places(model: onnx.ModelProto) -> onnx.ModelProto:
    """The exporters write where in the source a node came from: paths of this machine."""
    graph = model.graph
    named = [*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer]
    for function in model.functions:
        named += [function, *function.node, *function.value_info]
    for proto in (model, graph, *named):
        del proto.metadata_props[:]
        proto.ClearField("doc_string")
    model.ClearField("producer_version")
    return model


def exported(module, x, exporter: str) -> onnx.ModelProto:
    common = dict(input_names=["x"], output_names=["y"], opset_version=OPSET[exporter])
    if exporter == "dynamo":
        optimise = not isinstance(module, Convolutional)
        program = torch.onnx.export(
            module, (x,), dynamo=True, verbose=False, optimize=optimise, **common
        )
        return without_places(program.model_proto)
    if isinstance(module, Transformer):
        module.norms = nn.ModuleList(map(RootMeanSquare, module.norms))
        module.attention = attention
    file = io.BytesIO()
    training = torch.onnx.TrainingMode.PRESERVE
    torch.onnx.export(module, (x,), file, dynamo=False, training=training, **common)
    return without_places(onnx.load_from_string(file.getvalue()))


def gradients(name: str, module, x) -> dict[str, np.ndarray]:
    """By autograd; batch normalisation as in training, without dropout."""
    forward = module.body if name == "cnn" else module
    x = x.clone().requires_grad_(x.is_floating_point())
    wrt = {n: p for n, p in module.named_parameters() if p.requires_grad}
    wrt |= {"x": x} if x.requires_grad else {}
    y = forward(x)
    bars = torch.randn_like(y)[None]
    if name == "cnn":
        bars = torch.eye(y.numel(), dtype=y.dtype).reshape(-1, *y.shape)
    found = [torch.autograd.grad(y, list(wrt.values()), b, retain_graph=True) for b in bars]
    stacked = [torch.stack(g) if name == "cnn" else g[0] for g in zip(*found, strict=True)]
    record = {f"{n}_grad": g.numpy() for n, g in zip(wrt, stacked, strict=True)}
    record |= {n: p.detach().numpy() for n, p in module.named_parameters()}
    record |= {"x": x.detach().numpy(), "y": y.detach().numpy()}
    return record | ({} if name == "cnn" else {"y_bar": bars[0].numpy()})


def from_sklearn() -> None:
    """The gradients of the mean of (prediction - y)^2 / 2, as the training takes them."""
    from skl2onnx import to_onnx
    from sklearn.neural_network import MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(3)
    X, y = (rng.standard_normal(s).astype(np.float32) for s in ((6, 3), 6))
    settings = dict(hidden_layer_sizes=(4,), activation="tanh", alpha=0.0, max_iter=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = make_pipeline(StandardScaler(), MLPRegressor(**settings, random_state=1)).fit(
            X, y
        )
    scaler, mlp = (step for _, step in pipeline.steps)
    model = without_places(to_onnx(pipeline, X[:1], target_opset=21))
    (HERE / "pipeline-sklearn.onnx").write_bytes(model.SerializeToString(deterministic=True))

    activations = [scaler.transform(X), None, None]
    activations = mlp._forward_pass(activations)
    spare = [[np.empty_like(a) for a in kind] for kind in (mlp.coefs_, mlp.intercepts_)]
    deltas = [np.empty_like(a) for a in activations[1:]]
    target = y[:, None], None  # no weights of the samples
    _, coefs, intercepts = mlp._backprop(activations[0], *target, activations, deltas, *spare)
    record = {"x": X, "target": y[:, None], "y": pipeline.predict(X)[:, None]}
    for i in range(2):
        record |= {f"coef{i}": mlp.coefs_[i], f"coef{i}_grad": coefs[i]}
        record |= {f"intercept{i}": mlp.intercepts_[i], f"intercept{i}_grad": intercepts[i]}
    np.savez_compressed(HERE / "pipeline.npz", **record)


def columns_from_sklearn() -> None:
    from skl2onnx import to_onnx
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler, StandardScaler

    rng = np.random.default_rng(5)
    X, label = rng.standard_normal((30, 4)), rng.integers(3, size=30)
    columns = [("some", StandardScaler(), [3, 0]), ("others", MinMaxScaler(), [1])]
    model = make_pipeline(ColumnTransformer(columns), LogisticRegression()).fit(X, label)
    plain = to_onnx(model, X[:1], target_opset=21, options={"zipmap": False})
    path = HERE / "columns-sklearn.onnx"
    path.write_bytes(without_places(plain).SerializeToString(deterministic=True))
    X, h = X[:5], 1e-4
    steps = h * np.eye(4)[:, np.newaxis]

    def central(h):
        return (model.predict_proba((X + h * steps).reshape(-1, 4))
                - model.predict_proba((X - h * steps).reshape(-1, 4))) / (2e-4 * h)  # fmt: skip

    slopes = (4 * central(1) - central(2)) / 3  # of fourth order
    slopes = slopes.reshape(4, 5, 3).transpose(1, 2, 0)
    np.savez_compressed(HERE / "columns.npz", x=X, y=model.predict_proba(X), slopes=slopes)


def powers_from_sklearn() -> None:
    from skl2onnx import to_onnx
    from sklearn.preprocessing import PowerTransformer

    rng = np.random.default_rng(6)
    X = np.exp(rng.standard_normal((50, 3))) * [1, -1, rng.choice([-1, 1])]
    X[::2, 2] *= -1
    model = PowerTransformer().fit(X)
    plain = to_onnx(model, X[:1].astype(np.float32), target_opset=18)
    path = HERE / "powers-sklearn.onnx"
    path.write_bytes(without_places(plain).SerializeToString(deterministic=True))
    X, h = np.float32([[0.5, 1.5, -0.5], [-3, -1.5, 3], [2, -0.25, -1.5]]), 1e-4
    wide = X.astype(float)
    slopes = (model.transform(wide + h) - model.transform(wide - h)) / (2 * h)
    np.savez_compressed(HERE / "powers.npz", x=X, y=model.transform(wide), slopes=slopes)


def main() -> None:
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    HERE.mkdir(exist_ok=True)
    for name, (module, x) in models().items():
        for parameter in module.parameters():  # no layer with special values of its own
            parameter.data = torch.randn_like(parameter) / 2
        if name != "cnn_inference":
            module.train()
        for key, statistic in module.named_buffers():
            if "running" in key:
                statistic.uniform_(0.5, 2)
        state = {k: v.clone() for k, v in module.state_dict().items()}
        for exporter in {"cnn": ["script"], "cnn_inference": ["dynamo"]}.get(name, OPSET):
            module.load_state_dict(state)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = exported(module, x, exporter)
            path = HERE / f"{name}-{exporter}.onnx"
            path.write_bytes(model.SerializeToString(deterministic=True))
            operators = " ".join(node.op_type for node in model.graph.node)
            print(f"{path.name}: {path.stat().st_size} bytes: {operators}")
        module.load_state_dict(state)
        np.savez_compressed(HERE / f"{name}.npz", **gradients(name, module, x))
    from_sklearn()
    columns_from_sklearn()
    powers_from_sklearn()


if __name__ == "__main__":
    main()
