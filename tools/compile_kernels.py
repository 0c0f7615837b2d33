"""Compile the Kalman passes before the tests, by two processes at a time.

Every worker of pytest imports all modules to look for tests, and would compile all of them for
itself. Where the machine code is on disk this takes seconds.
"""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

FIRST = "entry"  # which all others import
# What takes longest comes first, so that both processes end together.
THEN = (
    "small 4", "tangents", "panel", "own", "integrated", "small 3", "roots", "outputs", "xla",
    "small 2", "small 1", "xla_integrated", "xla_panel",
)  # fmt: skip
# Meanwhile the other process imports what the tests import, which writes its bytecode: else both
# workers of pytest do so, each for itself.
READ = (
    "jax", "matplotlib.pyplot", "nbclient", "nbformat.v4", "onnxruntime", "pandas",
    "pymc_extras.statespace", "statsmodels.api",
)  # fmt: skip
LOAD = """
import gc, importlib, sys, time
gc.set_threshold(100_000)  # a compiler's objects stay
start, (name, *states) = time.perf_counter(), sys.argv[1].split()
module = importlib.import_module("helpers.kalman.fused." + name)
for m in states:  # the passes in registers: machine code of its own for each size
    for p in range(1, module.LARGEST + 1):
        module.compiled(int(m), p)
print(f"  {sys.argv[1]}: {time.perf_counter() - start:.0f} s", flush=True)
"""


def compiles(what: str) -> bool:
    return subprocess.run([sys.executable, "-c", LOAD, what]).returncode == 0


def main() -> None:
    start = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        _ = pool.submit(subprocess.run, [sys.executable, "-c", f"import {', '.join(READ)}"])
        if not (compiles(FIRST) and all(list(pool.map(compiles, THEN)))):
            sys.exit("the Kalman passes do not compile; the message stands above")
    print(f"The Kalman passes are compiled: {time.perf_counter() - start:.0f} s.")


if __name__ == "__main__":
    main()
