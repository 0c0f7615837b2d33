"""The process of one contender, which calls when it is told to: ``python -m peers.worker NAME``.

Jobs come as lines of JSON and are answered by lines of JSON. A contender that has a process to
itself brings its own threads, allocator and environment, is compiled beside others, and can be
ended when it takes too long; the turns are given by `kalman_peers.py`, so that one runs at a time.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import sys
import warnings
from pathlib import Path
from time import perf_counter

import numpy as np
from measured import in_a_row
from one_core import keep_to


class Worker:
    """A contender and the problem that it has in hand."""

    def __init__(self, name: str):
        from peers.contenders import CONTENDERS

        self.name = name
        # As many processors as the contender says that it has threads: one, if it says nothing.
        self.threads = CONTENDERS[name].options.get("threads", 1) if name in CONTENDERS else 1

    def start(self) -> dict:
        """Imports, and what any first use of a package costs."""
        from peers import contenders

        if self.name.startswith("model: "):
            from peers import pymc_models  # noqa: F401

            contenders.start("ours, PyTensor")
        else:
            contenders.start(self.name)
        return {}

    def load(self, problem: str, requested: list[str]) -> dict:
        """Build, compile and call once; the largest relative error of the gradients."""
        from helpers.checks import relative_error, symmetrize
        from helpers.kalman import StateSpace
        from helpers.statespace import NAMES, SYMMETRIC
        from peers.contenders import maker

        with np.load(problem) as file:
            arrays = dict(file)
        model = StateSpace(**{name: arrays[name] for name in NAMES})
        begin = perf_counter()
        self.call = maker(self.name)(arrays["y"], model, tuple(requested))
        value, gradients = self.call()
        seconds = perf_counter() - begin
        errors = [0.0]
        for name, G in gradients.items():
            G = np.asarray(G, dtype=float)
            errors.append(
                relative_error(symmetrize(G) if name in SYMMETRIC else G, arrays[f"bar {name}"])
            )
        if value is not None:
            errors.append(abs(float(value) / float(arrays["value"]) - 1))
        note = getattr(self.call, "note", "")
        return {"seconds": seconds, "error": float(max(errors)), "note": note}

    def model(self, label: str, filter_type: str, mode: str) -> dict:
        """Log-density and gradient of a whole PyMC model, built, compiled and called once."""
        from peers import pytensor_filters
        from peers.pymc_models import logp_dlogp

        pytensor_filters.start(mode)
        begin = perf_counter()
        self.call, phases = logp_dlogp(label, filter_type, mode)
        value, slopes = self.call()
        seconds = perf_counter() - begin
        slopes = np.asarray(slopes).tolist()
        return {"seconds": seconds, "value": float(value), "slopes": slopes, "phases": phases}

    def row(self, seconds: float) -> dict:
        """Seconds a call takes, called again and again for so many seconds, at least once."""
        keep_to(self.threads)
        return {"seconds": in_a_row(self.call, seconds)}

    def cold(self, flush: str) -> dict:
        """Seconds of one call after more bytes were read than the caches hold."""
        keep_to(self.threads)
        np.memmap(flush, dtype=np.float64, mode="r").sum()
        gc.disable()
        begin = perf_counter()
        self.call()
        found = perf_counter() - begin
        gc.enable()
        return {"seconds": found}

    def peak(self) -> dict:
        """Bytes that a call needs beyond what was there before it (Linux)."""
        status = Path("/proc/self/status")

        def resident(field):
            return 1024 * int(re.search(rf"{field}:\s+(\d+)", status.read_text())[1])

        self.call()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        before = resident("VmRSS")
        self.call()
        return {"bytes": resident("VmHWM") - before}


def serve(name: str) -> None:
    # Answers go to what was stdout; whatever else is printed goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    worker = Worker(name)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = getattr(worker, job.pop("do"))(**job)
        except Exception as error:  # noqa: BLE001 (whatever it is, the record says it)
            text = " ".join(str(error).split())
            answer = {"failed": f"{type(error).__name__}: {text[:160]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
