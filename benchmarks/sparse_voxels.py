"""The residual network on voxels, sparse and dense: accuracy over five seeds, and time per step.

Data, network and sparse training are those of the chapter "A residual network on voxels", taken
from its page. The dense network is the same function with arrays of all cells and a mask, here in
PyTorch (channels last) and, as on the page, in JAX. For each seed the sparse network and PyTorch's
start from the same weights, see the same 120 batches of 16 clouds, and are tested on the same 320
new ones. Then all take turns at single steps, of 4 and of 16 clouds; the sparse side makes its
rulebooks in that time, the dense side its arrays. Everything runs on one thread
and is kept to one core.

    python benchmarks/sparse_voxels.py [--seeds 5] [--seconds 20] [--record FILE]

It takes about five minutes and writes ``results/sparse_voxels.json``, in an environment that has
``torch`` and ``jax``. Without PyTorch its part is left out, and nothing is written unless
``--record`` says where.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from statistics import quantiles
from types import SimpleNamespace

import numpy as np
from one_core import keep_to_one_core
from sparse_crossover import keep_memory, short, use_the_processor
from threadpoolctl import threadpool_limits

from helpers.checks import relative_error
from helpers.timing import compare, machine, progress, write_record

HERE = Path(__file__).parent
RECORD = HERE / "results" / "sparse_voxels.json"
PAGE = HERE.parent / "notebooks" / "sparse" / "06-a-residual-network-on-voxels.md"
TESTS = 10, 32  # batches, clouds in each
OURS = "sparse"


def chapter() -> SimpleNamespace:
    """What the page defines: its functions, and the names in capitals."""
    cells = re.findall(r"^```\{code-cell\}.*?\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    kept = []
    for cell in cells:
        source = re.sub(r"\A(---\n.*?---\n|(:[^\n]*\n)+)", "", cell, flags=re.S)
        kept += [node for node in ast.parse(source).body if _defines(node)]
    names = {"__name__": "chapter"}
    exec(compile(ast.Module(kept, []), PAGE.name, "exec"), names)
    return SimpleNamespace(**names)


def _defines(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef):
        return True
    if isinstance(node, ast.For):
        return all(map(_defines, node.body))
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    names = [n.id for t in targets if t is not None for n in ast.walk(t) if isinstance(n, ast.Name)]
    return bool(names) and all(name.isupper() for name in names)


# --- contenders: functions of weights, batch and labels -------------------------------------------


class Sparse:
    """The chapter's network; `step` gives loss, gradients and moments, `scores` is for testing."""

    def __init__(self, page):
        self.page = page
        self._step, self._scores = page.training("float32"), page.testing("float32")

    def step(self, weights, x, label):
        loss, *rest = self._step(*weights, *self.page.arguments(x), label)
        return loss, rest[: len(weights)], rest[len(weights) :]

    def scores(self, weights, x, images, moments):
        return self._scores(*weights, *self.page.arguments(x), images, *moments)


class Torch:
    """The dense network with a mask."""

    def __init__(self, page):
        import torch

        torch.set_num_threads(1)
        self.page, self.torch = page, torch

    def _forward(self, weights, x, known=None):
        """Scores (images, 5), and mean and variance of each layer; `known` ones replace them."""
        torch, page = self.torch, self.page
        X, mask = (self._tensor(array) for array in page.dense_arguments(x))
        weights, used = iter(weights), []

        def layer(X, mask, f, stride):
            W, gamma, beta = next(weights), next(weights), next(weights)
            kernel = W.reshape(f, f, f, X.shape[1], -1).permute(4, 3, 0, 1, 2)
            kernel = kernel.contiguous(memory_format=torch.channels_last_3d)
            Y = torch.nn.functional.conv3d(X, kernel, None, stride, f // 2 if stride == 1 else 0)
            if known is None:
                a, axes = mask.sum(), (0, 2, 3, 4)
                mean = (Y * mask).sum(axes) / a
                Y = Y - mean.view(-1, 1, 1, 1)
                variance = (Y * Y * mask).sum(axes) / a
            else:
                mean, variance = known[len(used)]
                Y = Y - mean.view(-1, 1, 1, 1)
            used.append((mean, variance))
            factor = gamma / torch.sqrt(variance + 1e-5)
            return (Y * factor.view(-1, 1, 1, 1) + beta.view(-1, 1, 1, 1)) * mask

        for level in range(len(page.CHANNELS)):
            if level:
                mask = torch.nn.functional.max_pool3d(mask, 2)
            X = torch.relu(layer(X, mask, *((2, 2) if level else (3, 1))))
            Y = layer(torch.relu(layer(X, mask, 3, 1)), mask, 3, 1)
            X = torch.relu(X + Y)
        return X.mean(dim=(2, 3, 4)) @ next(weights) + next(weights), used

    def _tensor(self, array):
        return self.torch.from_numpy(array).movedim(-1, 1)  # channels last in memory

    def step(self, weights, x, label):
        torch = self.torch
        weights = [torch.from_numpy(W).requires_grad_() for W in weights]
        z, used = self._forward(weights, x)
        loss = torch.nn.functional.cross_entropy(z, torch.from_numpy(label))
        gradients = torch.autograd.grad(loss, weights)
        moments = [v.detach().numpy() for pair in used for v in pair]
        return loss.item(), [G.numpy() for G in gradients], moments

    def scores(self, weights, x, images, moments):
        torch = self.torch
        moments = list(map(torch.from_numpy, moments))
        known = list(zip(moments[::2], moments[1::2], strict=True))
        with torch.no_grad():
            return self._forward(list(map(torch.from_numpy, weights)), x, known)[0].numpy()


class Jax:
    """The dense network with a mask, as on the page: for the time of a step."""

    def __init__(self, page):
        import jax

        jax.config.update("jax_enable_x64", True)  # as there
        self.page, self.jax = page, jax
        self._step = jax.jit(jax.value_and_grad(page.masked_loss))

    def step(self, weights, x, label):
        result = self._step(weights, *self.page.dense_arguments(x), label)
        loss, gradients = self.jax.block_until_ready(result)
        return float(loss), list(map(np.asarray, gradients)), None


# --- what is measured -----------------------------------------------------------------------------


def trained(page, engine, seed: int) -> float:
    """The share of new clouds that is right, after the chapter's training."""
    batches, weights = np.random.default_rng(7 + seed), page.start(1 + seed)
    mean, square = ([np.zeros_like(W) for W in weights] for _ in range(2))
    running = None
    for k in progress(range(1, page.STEPS + 1), f"seed {seed}"):
        x, label = page.draw_batch(page.BATCH, batches)
        _, gradients, used = engine.step(weights, x, label)
        running = (
            used if k == 1 else [0.9 * r + 0.1 * u for r, u in zip(running, used, strict=True)]
        )
        rate = 0.02 * (1 - (k - 1) / page.STEPS)
        for W, G, m, v in zip(weights, gradients, mean, square, strict=True):
            m += 0.1 * (G - m)
            v += 0.01 * (G**2 - v)
            W -= rate * (m / (1 - 0.9**k)) / (np.sqrt(v / (1 - 0.99**k)) + 1e-8)
    running, right = [np.asarray(r, "float32") for r in running], 0
    for _ in range(TESTS[0]):
        x, label = page.draw_batch(TESTS[1], batches)
        z = engine.scores(weights, x, TESTS[1], running)
        right += int((z.argmax(axis=1) == label).sum())
    return right / (TESTS[0] * TESTS[1])


def agree(page, engines: dict) -> dict[str, float]:
    """Largest relative error of each engine's gradients against the sparse ones."""
    x, label = page.draw_batch(4, np.random.default_rng(3))
    weights = [W + np.float32(0.05) for W in page.start(1)]
    expected = np.concatenate([G.ravel() for G in engines[OURS].step(weights, x, label)[1]])
    found = {}
    for name, engine in engines.items():
        G = np.concatenate([g.ravel() for g in engine.step(weights, x, label)[1]])
        found[name] = relative_error(G, expected)
        assert found[name] < 1e-3, f"{name} computes another gradient: {found[name]:.0e}"
    return found


def timed(page, engines: dict, images: int, seconds: float) -> dict:
    x, label = page.draw_batch(images, np.random.default_rng(3))
    weights = page.start(1)
    calls: dict[str, Callable] = {
        name: lambda engine=engine: engine.step(weights, x, label)
        for name, engine in engines.items()
    }
    times = compare(calls, seconds=seconds, label=f"a step of {images} clouds")
    print(times.table(OURS), flush=True)
    rounds = {name: np.array(t) for name, t in times.seconds.items()}
    return {
        "rounds": len(times.seconds[OURS]),
        "seconds": {name: short(quantiles(t)) for name, t in times.seconds.items()},
        "ratio_quartiles": {name: short(quantiles(t / rounds[OURS])) for name, t in rounds.items()},
    }


def main(seeds: int, seconds: float, path: Path | None) -> None:
    threadpool_limits(1)
    keep_to_one_core()  # before the frameworks start their threads
    keep_memory()
    page = chapter()
    engines = {OURS: Sparse(page), "JAX": Jax(page)}
    try:
        engines["PyTorch"] = Torch(page)
    except ImportError as error:
        print(f"PyTorch is left out: {error}")
    errors = agree(page, engines)
    print("gradients against ours:", {name: f"{error:.0e}" for name, error in errors.items()})
    accuracy = {name: [] for name in (OURS, "PyTorch") if name in engines}
    for seed in range(seeds):
        for name, found in accuracy.items():
            found.append(trained(page, engines[name], seed))
        print(
            f"seed {seed}: { ({name: found[-1] for name, found in accuracy.items()}) }", flush=True
        )
    steps = {str(n): timed(page, engines, n, seconds) for n in (4, page.BATCH)}
    if path is None and "PyTorch" not in engines:
        return
    packages = {d.name.lower(): d.version for d in metadata.distributions() if d.name}
    record = {
        "machine": machine(),
        "frameworks": {name: packages[name] for name in ("torch", "jax") if name in packages},
        "threads": 1,
        "training": {"steps": page.STEPS, "batch": page.BATCH, "tested": TESTS[0] * TESTS[1]},
        "errors": {name: float(f"{error:.1e}") for name, error in errors.items()},
        "accuracy": accuracy,
        "steps": steps,
    }
    write_record(record, path or RECORD)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="trainings (default 5)")
    parser.add_argument("--seconds", type=float, default=20, help="budget of each comparison")
    parser.add_argument("--record", type=Path, help="file to write")
    arguments = parser.parse_args()
    use_the_processor()
    main(arguments.seeds, arguments.seconds, arguments.record)
