"""Compile the Kalman passes before the tests, in two processes at a time.

Every worker of pytest imports all modules to look for tests, and would compile all of them for
itself. Where the machine code is on disk this takes seconds.
"""

import gc
import os
import time
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context

from helpers.kalman import compiled

FIRST = "door"  # which all others import
# What takes longest comes first, so that both processes end together.
THEN = (
    "tangents", "panel", "whole", "small 4", "per_series", "integrated", "small 3", "collapsed",
    "roots", "pulled_outputs", "outputs", "xla", "small 2", "small 1", "rotated_tangents",
    "xla_integrated", "xla_panel", "xla_tangents",
)  # fmt: skip
# Meanwhile the other process imports what the tests import, which writes its bytecode: else both
# workers of pytest do so, each for itself.
READ = (
    "bs4", "distributed", "hypothesis", "jax", "jupyter_server.serverapp",
    "matplotlib.backends.backend_pdf", "matplotlib.pyplot", "mpmath", "nbclient", "nbval.plugin",
    "onnxruntime", "pandas", "pymc_extras.statespace", "sphinx.application", "statsmodels.api",
)  # fmt: skip


def read(modules) -> None:
    for name in modules:
        import_module(name)


def compiles(what: str) -> None:
    gc.set_threshold(100_000)  # a compiler's objects stay
    start, (name, *states) = time.perf_counter(), what.split()
    module = import_module(f"helpers.kalman.compiled.{name}")
    if states:  # the passes in registers: machine code of its own for each size
        for p in range(1, compiled._door().LARGEST + 1):
            module.compiled(int(*states), p)
            module.compiled_tangents(int(*states), p)
    print(f"  {what}: {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    start = time.perf_counter()
    bytecode = (find_spec(name.partition(".")[0]).cached for name in READ)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        if not all(map(os.path.exists, bytecode)):
            pool.submit(read, READ)
        pool.submit(compiles, FIRST).result()
        list(pool.map(compiles, THEN))  # the list, to hear what went wrong
    print(f"The Kalman passes are compiled: {time.perf_counter() - start:.0f} s.")


if __name__ == "__main__":
    main()
