"""One gradient in three engines: ours in onnxruntime, PyTensor's, and onnxruntime-training's.

The loss of a small network on scikit-learn's digits and its gradients with respect to the weights,
at batches of 1 to 4096 rows, all in float32, on one thread and one core.  onnxruntime-training
takes the name of onnxruntime, so it runs in an environment of its own, whose interpreter the
command line names:

    python benchmarks/onnx_engines.py --ort-training PYTHON [--rounds 200] [--record FILE]

where PYTHON has ``onnxruntime-training-cpu==1.19.2 onnx cerberus h5py``.  That interpreter
serves blocks of calls, which take turns with those of the others, so that all see the machine in
the same state; it also runs our graph, which tells the graph from the runtime.  It takes about
five minutes and writes ``results/onnx_engines.json``.  Without the other interpreter, its part is
left out and nothing is written unless ``--record`` says where.

At the end it looks into onnxruntime-training alone, at all 1797 digits: the share of each operator
in the time of its gradient graph, by its own profile, and the time of its ReluGrad on random signs
against the same on positive numbers, in turns.  With ``--relu-grad`` it does nothing else, and the
rest of the record stays.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from time import perf_counter

import numpy as np
import onnx
import onnxruntime
from one_core import keep_to_one_core

RECORD = Path(__file__).parent / "results" / "onnx_engines.json"
BATCHES = (1, 8, 64, 256, 1024, 1797, 4096)  # above 1797 the digits are repeated
BLOCK = 4e-3  # seconds that a block of calls lasts at least
WARM = 3  # calls at the beginning of a block that are not counted: the others have used the caches

# Layers of 64, 64 and 32 numbers; the weights are inputs, as in any training.
NETWORK = """<ir_version: 10, opset_import: ["" : 21]>
network (float[N, 64] X, {label} label, float[64, 64] W1, float[64] b1, float[64, 32] W2,
         float[32] b2, float[32, {outputs}] W3, float[{outputs}] b3) => (float loss) {{
    a1 = MatMul(X, W1)   z1 = Add(a1, b1)   h1 = Relu(z1)
    a2 = MatMul(h1, W2)  z2 = Add(a2, b2)   h2 = Relu(z2)
    a3 = MatMul(h2, W3)  scores = Add(a3, b3)
    {loss}
}}"""
NETWORKS = {
    "regressor": {
        "outputs": 1,
        "label": "float[N, 1]",
        "loss": "e = Sub(scores, label) s = Mul(e, e) loss = ReduceMean<keepdims = 0>(s)",
    },
    "classifier": {
        "outputs": 10,
        "label": "int64[N]",
        "loss": "loss, log_prob = SoftmaxCrossEntropyLoss(scores, label)",
    },
}
WEIGHTS = ("W1", "b1", "W2", "b2", "W3", "b3")


# --- in either interpreter ------------------------------------------------------------------------


def network(name: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(NETWORK.format(**NETWORKS[name]))


def session_of(model: bytes, profile: str = "") -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def runner(model: bytes, feed: dict[str, np.ndarray]) -> Callable[[], list[np.ndarray]]:
    """Function without arguments: the loss, then its gradients with respect to the weights."""
    session = session_of(model)
    feed = {x.name: feed[x.name] for x in session.get_inputs()}
    names = ["loss", *(f"{name}_grad" for name in WEIGHTS)]
    return lambda: session.run(names, feed)


def seconds_per_call(function: Callable[[], object], calls: int) -> float:
    """Of a block of calls, after the first few, with the garbage collector off."""
    for _ in repeat(None, WARM):
        function()
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = perf_counter()
        for _ in repeat(None, calls):
            function()
        return (perf_counter() - start) / calls
    finally:
        if collecting:
            gc.enable()


def serve() -> None:
    """Answer requests, a line of JSON each, until there are no more."""
    keep_to_one_core()
    functions, arrays = {}, {}
    for line in sys.stdin:
        request = json.loads(line)
        what, key = request["what"], request.get("key")
        if what == "feed":
            arrays = dict(np.load(request["path"]))
            answer = onnxruntime.__version__
        elif what == "load":
            model = Path(request["path"]).read_bytes()
            if request["differentiate"]:
                model = their_gradient(model)
            functions[key] = runner(model, arrays)
            answer = len(onnx.load_from_string(model).graph.node)
        elif what == "relu_grad":
            model = their_gradient(Path(request["path"]).read_bytes())
            answer = relu_grad(model, arrays, request["folder"], request["rounds"])
        elif what == "values":
            np.savez(request["path"], *functions[key]())
            answer = None
        else:
            answer = seconds_per_call(functions[key], request["calls"])
        print(json.dumps(answer), flush=True)


def relu_grad(model: bytes, feed: dict[str, np.ndarray], folder: str, rounds: int) -> dict:
    """Shares of the operators in their gradient; seconds of ReluGrad by the signs of its input."""
    session = session_of(model, f"{folder}/profile")
    given = {x.name: feed[x.name] for x in session.get_inputs()}
    for _ in range(rounds):
        session.run(["loss", *(f"{name}_grad" for name in WEIGHTS)], given)
    times = {}
    for event in json.loads(Path(session.end_profiling()).read_text(encoding="utf-8")):
        if event["name"].endswith("_kernel_time"):
            op = event["args"]["op_name"]
            times[op] = times.get(op, 0) + event["dur"]
    whole = sum(times.values())
    shares = {op: round(t / whole, 4) for op, t in sorted(times.items(), key=lambda x: -x[1])}

    kind = onnx.TensorProto.FLOAT
    values = [onnx.helper.make_tensor_value_info(n, kind, ["N", 64]) for n in ("dY", "Y", "dX")]
    node = onnx.helper.make_node("ReluGrad", ["dY", "Y"], ["dX"], domain="com.microsoft")
    graph = onnx.helper.make_graph([node], "alone", values[:2], values[2:])
    opsets = [onnx.helper.make_opsetid("", 19), onnx.helper.make_opsetid("com.microsoft", 1)]
    alone = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
    session = session_of(alone.SerializeToString())
    Y = np.random.default_rng(0).standard_normal((1797, 64)).astype("float32")
    calls = {
        signs: lambda y=y: session.run(None, {"dY": Y, "Y": y})
        for signs, y in {"random": np.maximum(Y, 0), "positive": np.abs(Y)}.items()
    }
    seconds = {signs: [] for signs in calls}
    for _ in range(rounds):
        for signs, call in calls.items():
            seconds[signs].append(float(f"{seconds_per_call(call, 10):.3e}"))
    return {"shares": shares, "seconds": seconds}


def their_gradient(model: bytes) -> bytes:
    from onnxruntime.capi._pybind_state import GradientGraphBuilder

    onnxruntime.set_default_logger_severity(4)
    builder = GradientGraphBuilder(model, {"loss"}, set(WEIGHTS), "loss")
    builder.build()
    return builder.get_model()


# --- in the first one -----------------------------------------------------------------------------


class Elsewhere:
    """The other interpreter, and what it can be asked."""

    def __init__(self, python: str, folder: Path):
        self.folder = folder
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        self.log = (folder / "log").open("w")  # it says at length what it optimises
        self.process = subprocess.Popen(
            [python, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
        )

    def ask(self, what: str, **more):
        self.process.stdin.write(json.dumps({"what": what, **more}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            log = (self.folder / "log").read_text(encoding="utf-8")
            raise RuntimeError(f"the other interpreter ended when asked to {what} {more}\n{log}")
        return json.loads(answer)

    def feed(self, arrays: dict[str, np.ndarray]) -> str:
        path = self.folder / "feed.npz"
        np.savez(path, **arrays)
        return self.ask("feed", path=str(path))

    def load(self, key: str, model: bytes, differentiate: bool) -> int:
        path = self.folder / f"{key}.onnx"
        path.write_bytes(model)
        return self.ask("load", key=key, path=str(path), differentiate=differentiate)

    def values(self, key: str) -> list[np.ndarray]:
        path = self.folder / "values.npz"
        self.ask("values", key=key, path=str(path))
        with np.load(path) as found:
            return [found[name] for name in found.files]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.log.close()


def data(name: str) -> dict[str, np.ndarray]:
    """All 1797 digits, their labels, and weights of a network that is not trained yet."""
    from sklearn.datasets import load_digits

    rng = np.random.default_rng(0)
    digits = load_digits()
    outputs = NETWORKS[name]["outputs"]
    y = digits.target[:, np.newaxis].astype("float32") if outputs == 1 else digits.target
    feed = {"X": (digits.data / 16).astype("float32"), "label": y}
    for i, (n_in, n_out) in enumerate([(64, 64), (64, 32), (32, outputs)], start=1):
        W = rng.standard_normal((n_in, n_out)) * np.sqrt(2 / n_in)
        feed |= {f"W{i}": W.astype("float32"), f"b{i}": np.zeros(n_out, "float32")}
    return feed


def in_pytensor(model: onnx.ModelProto, feed: dict[str, np.ndarray], dtype=None, **arguments):
    """The same by to_pytensor; `arguments` are of pytensor.function."""
    import pytensor
    import pytensor.tensor as pt

    from helpers.onnx_grad import to_pytensor

    symbols = to_pytensor(model, dtype)
    x = symbols.inputs
    loss = symbols.outputs["loss"]
    function = pytensor.function(
        list(x.values()), [loss, *pt.grad(loss, [x[name] for name in WEIGHTS])], **arguments
    )
    values = [feed[name].astype(x[name].dtype) for name in x]
    return lambda: function(*values)


def errors(found: dict[str, list], model, feed) -> dict[str, float]:
    """Largest relative error of the gradients of each engine, against PyTensor in float64."""
    from pytensor.compile.mode import Mode

    from helpers.checks import relative_error

    exact = in_pytensor(model, feed, "float64", mode=Mode(linker="py", optimizer=None))()
    return {
        engine: max(relative_error(G, E) for G, E in zip(gradients, exact, strict=True))
        for engine, gradients in found.items()
    }


def measure(name: str, batch: int, rounds: int, elsewhere: Elsewhere | None) -> dict:
    """Sizes of the graphs, errors of the gradients, seconds per call of each engine."""
    from helpers.onnx_grad import DerivativeOptions, onnx_derivative

    model, feed = network(name), data(name)
    feed |= {key: np.resize(feed[key], (batch, *feed[key].shape[1:])) for key in ("X", "label")}
    ours = onnx_derivative(
        model, inputs=list(WEIGHTS), options=DerivativeOptions.Loss, loss="loss", label="label"
    )
    functions = {
        "ours": runner(ours.SerializeToString(), feed),
        "PyTensor": in_pytensor(model, feed, trust_input=True),
    }
    nodes = {"the network": len(model.graph.node), "ours": len(ours.graph.node)}
    blocks = {
        engine: lambda calls, function=function: seconds_per_call(function, calls)
        for engine, function in functions.items()
    }
    values = {engine: function() for engine, function in functions.items()}
    if elsewhere is not None:
        elsewhere.feed(feed)
        for engine, graph in {"onnxruntime-training": model, "ours there": ours}.items():
            theirs = engine == "onnxruntime-training"
            count = elsewhere.load(engine, graph.SerializeToString(), differentiate=theirs)
            nodes |= {engine: count} if theirs else {}
            values[engine] = elsewhere.values(engine)
            blocks[engine] = lambda calls, key=engine: elsewhere.ask("time", key=key, calls=calls)
    found = {"nodes": nodes, "errors": errors(values, model, feed)}
    if elsewhere is not None:
        pairs = zip(values["ours there"], values["onnxruntime-training"], strict=True)
        found["bit for bit"] = all(np.array_equal(a, b) for a, b in pairs)
    return found | {"seconds": take_turns(blocks, rounds)}


def take_turns(blocks: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Seconds per call of each engine in each round; every round begins with another engine."""
    from helpers.timing import progress

    calls = {}
    for engine, block in blocks.items():
        block(20)
        calls[engine] = max(1, int(BLOCK / block(20)))
    seconds = {engine: [] for engine in blocks}
    order = list(blocks)
    for i in progress(range(rounds), "rounds"):
        k = i % len(order)
        for engine in order[k:] + order[:k]:
            seconds[engine].append(blocks[engine](calls[engine]))
    return seconds


def look_into_relu_grad(python: str, rounds: int, path: Path) -> None:
    """Add the field ``relu grad`` to a record."""
    import tempfile
    from datetime import UTC, datetime

    from helpers.timing import machine, write_record

    found = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = Elsewhere(python, Path(folder))
        for name in NETWORKS:
            elsewhere.feed(data(name))
            model = Path(folder) / "model.onnx"
            model.write_bytes(network(name).SerializeToString())
            found[name] = elsewhere.ask("relu_grad", path=str(model), folder=folder, rounds=rounds)
            random, positive = (np.array(found[name]["seconds"][k]) for k in ("random", "positive"))
            quarters = np.quantile(random / positive, (0.25, 0.5, 0.75))
            print(f"{name}: {found[name]['shares']}")
            print(f"ReluGrad, random over positive signs, quartiles: {quarters.round(2)}")
        elsewhere.close()
    record = json.loads(path.read_text(encoding="utf-8"))
    write_record(record | {"relu grad": found}, path)


def main(python: str | None, rounds: int, path: Path | None) -> None:
    import tempfile
    from datetime import UTC, datetime

    from threadpoolctl import threadpool_limits

    from helpers.timing import Timings, machine, write_record

    keep_to_one_core()
    found = {}
    with tempfile.TemporaryDirectory() as folder, threadpool_limits(1):
        record = {"machine": machine(), "onnxruntime-training": None}
        elsewhere = None if python is None else Elsewhere(python, Path(folder))
        if elsewhere is not None:
            record["onnxruntime-training"] = elsewhere.feed({})
        for name in NETWORKS:
            for batch in BATCHES:
                label = f"{name}, batch {batch}"
                part = measure(name, batch, rounds, elsewhere)
                timings = Timings({k: tuple(v) for k, v in part["seconds"].items()}, label)
                reference = "ours" if elsewhere is None else "onnxruntime-training"
                print(f"\n{label}: {part['nodes']}\n\n{timings.table(reference)}\n", flush=True)
                for engine, error in part["errors"].items():
                    milliseconds = 1e3 * timings.median(engine)
                    print(f"{engine:22}{milliseconds:8.4f} ms, relative error {error:.1e}")
                # Four digits are more than a clock gives, and keep the record small.
                part["seconds"] = {
                    k: [float(f"{s:.3e}") for s in v] for k, v in part["seconds"].items()
                }
                found[label] = part | {"date": datetime.now(UTC).isoformat(timespec="seconds")}
        if elsewhere is not None:
            elsewhere.close()
    if path is not None:
        write_record(record | {"networks": found}, path)
    if path is not None and python is not None:
        look_into_relu_grad(python, rounds, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ort-training", metavar="PYTHON", help="interpreter that has it")
    parser.add_argument("--rounds", type=int, default=200, help="rounds to time (default 200)")
    parser.add_argument("--record", type=Path, help="file to write")
    parser.add_argument("--relu-grad", action="store_true", help="look into ReluGrad alone")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
    elif arguments.relu_grad:
        if arguments.ort_training is None:
            parser.error("--relu-grad needs --ort-training")
        look_into_relu_grad(arguments.ort_training, arguments.rounds, arguments.record or RECORD)
    else:
        record = arguments.record or (RECORD if arguments.ort_training else None)
        main(arguments.ort_training, arguments.rounds, record)
