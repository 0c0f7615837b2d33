"""One core for a process that is timed: JAX starts a thread for each, whatever its flags say."""

from __future__ import annotations

import os
from pathlib import Path

# What tells the libraries of a process to come the same; JAX does not ask.
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def keep_to_one_core() -> None:
    """Move all threads of the process to one core, and those to come (Linux; elsewhere nothing)."""
    keep_to(1)


def keep_to(count: int) -> None:
    """The same for so many of what the system calls processors."""
    tasks = Path("/proc/self/task")
    if hasattr(os, "sched_setaffinity") and tasks.exists():
        chosen = sorted(os.sched_getaffinity(0))[-count:]
        for task in tasks.iterdir():
            os.sched_setaffinity(int(task.name), chosen)
