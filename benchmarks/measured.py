"""What several records need: the time of a call among calls in a row, and which commit it was."""

from __future__ import annotations

import gc
import subprocess
from itertools import repeat
from pathlib import Path
from time import perf_counter


def in_a_row(call, seconds: float) -> float:
    """Seconds a call takes, called again and again for so many seconds, at least once."""
    begin = perf_counter()
    call()
    times = max(1, int(seconds / (perf_counter() - begin)))
    gc.disable()
    begin = perf_counter()
    for _ in repeat(None, times):
        call()
    found = (perf_counter() - begin) / times
    gc.enable()
    return found


def commit() -> str | None:
    """The commit that was measured; None outside a repository."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
