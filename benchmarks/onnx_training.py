"""Epochs of training in four engines: onnxruntime, with arrays bound or not, PyTensor, PyTorch.

The network of chapter "Training with nothing but an inference runtime" on scikit-learn's digits,
float32, one thread: an epoch is 22 batches of 64 rows, cut, fed and stepped along by stochastic
gradient descent.  The engines take turns, an epoch each, and start from the same weights; their
weights after the first epoch are compared.  The times are those of the processor, in which other
work on the machine counts little.  PyTorch runs in an interpreter of its own, which the
command line names (it needs torch and numpy):

    python benchmarks/onnx_training.py [--torch PYTHON] [--rounds 200] [--record FILE]

Without PyTorch its part is left out, and nothing is written unless ``--record`` says where.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time

import numpy as np

RECORD = Path(__file__).parent / "results" / "onnx_training.json"
DIMS, BATCH, ROWS, RATE = (64, 64, 32, 10), 64, 1408, 0.1
NAMES = [f"{kind}{k}" for k in (1, 2, 3) for kind in "Wb"]
STARTS = range(0, ROWS, BATCH)

Epoch = Callable[[], float]


def timed(epoch: Epoch) -> float:
    start = process_time()
    epoch()
    return process_time() - start


# --- PyTorch, in its own interpreter --------------------------------------------------------------


def serve(path: str) -> None:
    """Train with what a file holds; a line of JSON for each line that asks for an epoch."""
    import torch

    torch.set_num_threads(1)
    with np.load(path) as held:
        X, label = torch.from_numpy(held["X"]), torch.from_numpy(held["label"])
        weights = [torch.from_numpy(held[name]).requires_grad_() for name in NAMES]
    optimiser = torch.optim.SGD(weights, lr=RATE)

    def epoch() -> float:
        total = 0.0
        for start in STARTS:
            H = X[start : start + BATCH]
            for k in (0, 2, 4):
                H = torch.addmm(weights[k + 1], H, weights[k])
                H = torch.relu(H) if k < 4 else H
            loss = torch.nn.functional.cross_entropy(H, label[start : start + BATCH])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.item()
        return total / len(STARTS)

    print(json.dumps(torch.__version__), flush=True)
    for line in sys.stdin:
        if line.strip() == "weights":
            answer = [w.detach().numpy().tolist() for w in weights]
        else:
            answer = timed(epoch)
        print(json.dumps(answer), flush=True)


class Torch:
    """PyTorch in the other interpreter."""

    def __init__(self, python: str, data: dict[str, np.ndarray], folder: str):
        path = Path(folder) / "data.npz"
        np.savez(path, **data)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        self.process = subprocess.Popen(
            [python, __file__, "--serve", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.version = json.loads(self.process.stdout.readline())

    def ask(self, what: str):
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def weights(self) -> dict[str, np.ndarray]:
        return {n: np.array(w, "f") for n, w in zip(NAMES, self.ask("weights"), strict=True)}


# --- the others -----------------------------------------------------------------------------------


def data() -> dict[str, np.ndarray]:
    """Digits, shuffled, and weights to start from."""
    from sklearn.datasets import load_digits

    rng, digits = np.random.default_rng(0), load_digits()
    order = rng.permutation(len(digits.target))[:ROWS]
    found = {"X": (digits.data[order] / 16).astype("f"), "label": digits.target[order]}
    for k, (n, m) in enumerate(zip(DIMS[:-1], DIMS[1:], strict=True), 1):
        found[f"W{k}"] = (rng.standard_normal((n, m)) * np.sqrt(2 / n)).astype("f")
        found[f"b{k}"] = np.zeros(m, "f")
    return found


def with_loss(weights: dict[str, np.ndarray]):
    """The network and its loss."""
    from onnx import numpy_helper, parser

    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        digits (float[N, 64] X, int64[N] label) => (float loss) {
            a1 = MatMul(X, W1)   z1 = Add(a1, b1)  h1 = Relu(z1)
            a2 = MatMul(h1, W2)  z2 = Add(a2, b2)  h2 = Relu(z2)
            a3 = MatMul(h2, W3)  scores = Add(a3, b3)
            loss, log_prob = SoftmaxCrossEntropyLoss(scores, label) }""")
    for name, W in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(W, name))
    return model


def step_session(model):
    """A session that takes a batch and weights, and gives new weights and the loss."""
    import onnxruntime as ort
    from onnx import helper, numpy_helper

    from helpers.onnx_grad import DerivativeOptions, onnx_derivative

    gradient = onnx_derivative(model, NAMES, [], DerivativeOptions.Loss, loss="loss", label="label")
    graph = gradient.graph
    graph.initializer.append(numpy_helper.from_array(np.array(RATE, "f"), "rate"))
    values = {v.name: v.type.tensor_type for v in graph.input}
    loss = next(y for y in graph.output if y.name == "loss")
    del graph.output[:]
    for name in NAMES:
        graph.node.append(helper.make_node("Mul", ["rate", f"{name}_grad"], [f"{name}_move"]))
        graph.node.append(helper.make_node("Sub", [name, f"{name}_move"], [f"{name}_new"]))
        shape = [d.dim_value for d in values[name].shape.dim]
        graph.output.append(helper.make_tensor_value_info(f"{name}_new", 1, shape))
    graph.output.append(loss)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return ort.InferenceSession(gradient.SerializeToString(), options)


def handed_over(session, X, label, weights: dict[str, np.ndarray]) -> Epoch:
    names = [*(f"{name}_new" for name in NAMES), "loss"]

    def epoch() -> float:
        total = 0.0
        for start in STARTS:
            rows = slice(start, start + BATCH)
            *new, loss = session.run(names, {"X": X[rows], "label": label[rows], **weights})
            weights.update(zip(NAMES, new, strict=True))
            total += float(loss)
        return total / len(STARTS)

    return epoch


def bound(session, X, label, weights: dict[str, np.ndarray]) -> Epoch:
    """The weights go to and fro between two places; after an epoch they are in the first."""
    import onnxruntime as ort

    batch = {"X": X[:BATCH].copy(), "label": label[:BATCH].copy()}
    places = weights, {name: W.copy() for name, W in weights.items()}
    loss, bindings = np.zeros((), "f"), []
    for here, there in (places, places[::-1]):
        binding = session.io_binding()
        for name, array in (batch | here).items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        for name, array in ({f"{k}_new": v for k, v in there.items()} | {"loss": loss}).items():
            binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
        bindings.append(binding)
    assert len(STARTS) % 2 == 0

    def epoch() -> float:
        total = 0.0
        for t, start in enumerate(STARTS):
            batch["X"][...] = X[start : start + BATCH]
            batch["label"][...] = label[start : start + BATCH]
            session.run_with_iobinding(bindings[t % 2])
            total += float(loss)
        return total / len(STARTS)

    return epoch


def in_pytensor(model, X, label) -> tuple[Epoch, Callable[[], dict[str, np.ndarray]]]:
    import pytensor
    import pytensor.tensor as pt

    from helpers.onnx_grad import to_pytensor

    symbols = to_pytensor(model)
    loss, weights = symbols.outputs["loss"], [symbols.weights[name] for name in NAMES]
    gradients = pt.grad(loss, weights)
    updates = {W: W - np.float32(RATE) * G for W, G in zip(weights, gradients, strict=True)}
    inputs = [symbols.inputs["X"], symbols.inputs["label"]]
    step = pytensor.function(inputs, loss, updates=updates, trust_input=True)

    def epoch() -> float:
        total = 0.0
        for start in STARTS:
            total += float(step(X[start : start + BATCH], label[start : start + BATCH]))
        return total / len(STARTS)

    return epoch, lambda: {n: W.get_value() for n, W in zip(NAMES, weights, strict=True)}


def main(python: str | None, rounds: int, path: Path | None) -> None:
    from datetime import UTC, datetime

    from threadpoolctl import threadpool_limits

    from helpers.checks import relative_error
    from helpers.timing import Timings, machine, progress, write_record

    held = data()
    X, label = held["X"], held["label"]
    start = {name: held[name] for name in NAMES}
    with tempfile.TemporaryDirectory() as folder, threadpool_limits(1):
        model = with_loss(start)
        session = step_session(model)
        state, places = ({n: W.copy() for n, W in start.items()} for _ in range(2))
        by_pytensor, theirs = in_pytensor(model, X, label)
        epochs = {
            "onnxruntime": partial(timed, handed_over(session, X, label, state)),
            "arrays bound": partial(timed, bound(session, X, label, places)),
            "PyTensor": partial(timed, by_pytensor),
        }
        weights = {"arrays bound": lambda: places, "PyTensor": theirs}
        torch = None if python is None else Torch(python, held, folder)
        if torch is not None:
            epochs["PyTorch"] = lambda: torch.ask("epoch")
            weights["PyTorch"] = torch.weights
        for epoch in epochs.values():
            epoch()
        errors = {}
        for engine, get in weights.items():
            found = get()
            errors[engine] = max(relative_error(found[n], state[n]) for n in NAMES if n[0] == "W")
            assert errors[engine] < 1e-4, (engine, errors)
        seconds = {engine: [] for engine in epochs}
        order = list(epochs)
        for i in progress(range(rounds), "rounds"):
            for engine in order[i % len(order) :] + order[: i % len(order)]:
                seconds[engine].append(float(f"{epochs[engine]():.3e}"))
    timings = Timings({k: tuple(v) for k, v in seconds.items()}, "SGD")
    print(timings.table("onnxruntime"))
    print("weights after an epoch, against onnxruntime:", errors)
    if path is not None:
        record = {"machine": machine(), "PyTorch": None if torch is None else torch.version}
        record |= {"date": datetime.now(UTC).isoformat(timespec="seconds")}
        write_record(record | {"errors": errors, "seconds": seconds}, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", metavar="PYTHON", help="interpreter that has PyTorch")
    parser.add_argument("--rounds", type=int, default=200, help="rounds to time (default 200)")
    parser.add_argument("--record", type=Path, help="file to write")
    parser.add_argument("--serve", metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
    else:
        record = arguments.record or (RECORD if arguments.torch else None)
        main(arguments.torch, arguments.rounds, record)
