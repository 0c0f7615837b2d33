"""Compile the Kalman passes before the tests, in two processes at once.

Every worker of pytest imports all modules to look for tests, and would compile all of them for
itself. Where the machine code is on disk this takes two seconds.
"""

import subprocess
import sys
import time

# Halves that take about as long: the second compiles the pass for many series, and small ones.
HALVES = (
    ("entry", "integrated", "outputs", "roots", "tangents", "own", "xla_integrated"),
    ("panel", "small", "xla"),
)
LOAD = """
import importlib
for name in {}:
    module = importlib.import_module("helpers.kalman.fused." + name)
    if name == "small":
        module.compile_all()
"""


def main() -> None:
    start = time.perf_counter()
    halves = [subprocess.Popen([sys.executable, "-c", LOAD.format(half)]) for half in HALVES]
    if any([half.wait() for half in halves]):
        sys.exit("the Kalman passes do not compile; the message stands above")
    print(f"The Kalman passes are compiled: {time.perf_counter() - start:.0f} s.")


if __name__ == "__main__":
    main()
