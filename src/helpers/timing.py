"""How fast is it? Interleaved timings, the ratios they give, and a record of the machine.

Wall-clock times say as much about the machine as about the code, and a busy machine slows
whatever happens to run at that moment. So contenders take turns (A B C A B C ...), and what is
reported is a ratio of medians, with the spread of the ratios seen round by round.

>>> from helpers.timing import compare
>>> timings = compare({"loop": f, "matrix": g}, label="outer products")  # doctest: +SKIP
>>> print(timings.table(reference="matrix"))                             # doctest: +SKIP
"""

import gc
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from itertools import repeat
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

__all__ = ["Ratio", "Timings", "compare", "machine", "progress"]

MIN_ROUNDS, MAX_ROUNDS = 5, 500  # past 500 rounds a median gains nothing, and the record only grows
FAST, ENOUGH = 50e-6, 200e-6  # seconds: below the first, calls are repeated up to the second
QUIET = 2.0  # seconds before a progress bar shows

PACKAGES = (
    "numpy scipy numba llvmlite pytensor pymc pymc-extras nutpie statsmodels jax jaxlib onnx "
    "onnxruntime distributed"
).split()


class Ratio(NamedTuple):
    """How many times longer: the ratio of medians, and the extremes of the per-round ratios.

    Always ``low <= median <= high``: an inequality that holds in every round holds for medians.
    """

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Timings:
    """Seconds per call of each contender, and where and when (ISO 8601, UTC) they were measured.

    Entry ``i`` of every tuple is from round ``i``. ValueError if there is nothing in it, if the
    numbers of rounds differ, or if a time is not a positive number.
    """

    seconds: dict[str, tuple[float, ...]]
    label: str = ""
    machine: dict = field(default_factory=dict)
    date: str = ""

    def __post_init__(self):
        if not self.seconds:
            raise ValueError("there are no contenders in these timings")
        rounds = {name: len(times) for name, times in self.seconds.items()}
        if len(set(rounds.values())) > 1 or 0 in rounds.values():
            raise ValueError(f"every contender needs the same number of rounds, got {rounds}")
        for name, times in self.seconds.items():
            if not all(math.isfinite(t) and t > 0 for t in times):
                raise ValueError(f"a time of {name!r} is not a positive number of seconds")

    def _times(self, name: str) -> tuple[float, ...]:
        if name not in self.seconds:
            raise KeyError(f"no contender {name!r}, only {', '.join(map(repr, self.seconds))}")
        return self.seconds[name]

    def median(self, name: str) -> float:
        """Median seconds per call of one contender."""
        return median(self._times(name))

    def ratio(self, slow: str, fast: str) -> Ratio:
        """How many times longer `slow` takes than `fast`."""
        per_round = [s / f for s, f in zip(self._times(slow), self._times(fast), strict=True)]
        return Ratio(self.median(slow) / self.median(fast), min(per_round), max(per_round))

    def table(self, reference: str | None = None) -> str:
        """Times relative to `reference` (the first contender if None), a line for each."""
        reference = next(iter(self.seconds)) if reference is None else reference
        rounds = len(self._times(reference))
        rows = [(f"time relative to {reference}", "", f"range over {rounds} rounds")]
        for name in self.seconds:
            middle, low, high = map(_short, self.ratio(name, reference))
            rows.append((name, middle, f"{low} to {high}"))
        names, middles = (max(len(row[k]) for row in rows) for k in (0, 1))
        return "\n".join(f"{row[0]:{names}}  {row[1]:>{middles}}  {row[2]}" for row in rows)

    def to_json(self, path: str | os.PathLike) -> None:
        """Write the record to `path` as JSON: all of it or, if something fails, nothing."""
        write_record(asdict(self), path)

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> "Timings":
        """Read a record that :meth:`to_json` wrote; ValueError if `path` holds something else."""
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
            record["seconds"] = {name: tuple(t) for name, t in record["seconds"].items()}
            return cls(**record)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is not a record of timings: {error}") from error


def compare(
    contenders: dict[str, Callable[[], object]],
    *,
    repeats: int | None = None,
    seconds: float = 5.0,
    warmup: int = 2,
    label: str = "",
) -> Timings:
    """Time contenders in turn, A B C A B C ..., with the garbage collector off during the calls.

    Parameters
    ----------
    contenders : dict of name -> callable without arguments
        A callable must also wait for what it starts in the background, as JAX does.
    repeats : int, optional
        Rounds to time. None: as many as fit in `seconds`, at least 5 and at most 500.
    seconds : float
        Time budget of the timed rounds when `repeats` is None. The environment variable
        TIMING_SECONDS makes it smaller, for tests, which do not compare times.
    warmup : int
        Rounds beforehand that are not counted (compilation, caches), at least 1. The last one also
        decides how often a fast contender (below 50 microseconds) is called per measurement: as
        often as makes it last 200 microseconds, far above the resolution of the clock.
    label : str
        What is compared, for the record.

    Returns
    -------
    Timings

    Raises
    ------
    ValueError
        If there is nothing to compare, a contender cannot be called, or a number is out of range.
    """
    if not contenders:
        raise ValueError("nothing to compare: contenders is empty")
    for name, function in contenders.items():
        if not callable(function):
            kind = type(function).__name__
            raise ValueError(f"contender {name!r} is a {kind}, expected a function to call")
    if warmup < 1 or (repeats is not None and repeats < 1) or not seconds > 0:
        raise ValueError(
            f"expected warmup >= 1, repeats >= 1 and seconds > 0, got {warmup=}, {repeats=}, "
            f"{seconds=}"
        )

    seconds = min(seconds, float(os.environ.get("TIMING_SECONDS", "inf")))
    for _ in range(warmup - 1):
        for function in contenders.values():
            function()
    calls = {name: _calls_per_measurement(function) for name, function in contenders.items()}

    times = {name: [] for name in contenders}
    begin, rounds, done = perf_counter(), 0, 0.0
    with _bar(label or "timing", total=1.0) as update:
        while done < 1:
            for name, function in contenders.items():
                times[name].append(_measure(function, calls[name]) / calls[name])
            rounds, elapsed = rounds + 1, perf_counter() - begin
            if repeats is not None:
                done = rounds / repeats
            else:  # one more round must still fit
                fits = elapsed * (1 + 1 / rounds) / seconds
                done = max(min(fits, rounds / MIN_ROUNDS), rounds / MAX_ROUNDS)
            update(done)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Timings({name: tuple(t) for name, t in times.items()}, label, machine(), now)


def _measure(function: Callable[[], object], calls: int) -> float:
    """Seconds that `calls` calls take together, without garbage collection."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = perf_counter()
        for _ in repeat(None, calls):
            function()
        return perf_counter() - start
    finally:
        if collecting:
            gc.enable()


def _calls_per_measurement(function: Callable[[], object]) -> int:
    """One call if it is slow enough to time alone, else a power of two that lasts long enough."""
    calls, elapsed = 1, _measure(function, 1)
    if elapsed >= FAST:
        return 1
    while elapsed < ENOUGH and calls < 2**20:
        calls *= 2
        elapsed = _measure(function, calls)
    return calls


def machine() -> dict:
    """The machine and the software that timings depend on; nothing that names its owner.

    Returns
    -------
    dict
        processor, cores, memory_gib, os, python, packages (name -> version, those installed), blas,
        blas_threads. What cannot be determined is None.
    """
    import numpy as np  # loads the BLAS that is asked about
    from threadpoolctl import threadpool_info

    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    built_with = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    installed = {d.name.lower(): d.version for d in metadata.distributions(path=sys.path) if d.name}
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "os": _system(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": {name: installed[name] for name in PACKAGES if name in installed},
        "blas": pools[0]["internal_api"] if pools else built_with,
        "blas_threads": max((pool["num_threads"] for pool in pools), default=None),
    }


def _processor() -> str | None:
    """Model name as the system tells it; the architecture where it tells none."""
    if sys.platform == "darwin":
        query = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(query, capture_output=True, text=True).stdout.strip() or None
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine() or None


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):  # Windows
        return None


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        version = platform.mac_ver()[0]
        return f"macOS {version}" if version else f"{platform.system()} {platform.release()}"


def write_record(record: dict, path: str | os.PathLike) -> None:
    """Write a record as JSON, a list a line: all of it or, if something fails, nothing.

    Parameters
    ----------
    record : dict
        What ``json`` can write.
    path : path
        Its folder is made if there is none.
    """
    path, text = Path(path), json.dumps(record, indent=1)
    text = re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside its destination, so that the renaming stays on one file system and is atomic.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def progress(iterable: Iterable, description: str = "") -> Iterator:
    """Yield from `iterable`, with a progress bar on a terminal if it takes long.

    The bar goes to an interactive terminal only, appears after two seconds and leaves no trace:
    notebooks, files and pipes get nothing.
    """
    total = len(iterable) if hasattr(iterable, "__len__") else None
    with _bar(description, total) as update:
        for done, item in enumerate(iterable, start=1):
            yield item
            update(done)


@contextmanager
def _bar(description: str, total: float | None) -> Iterator[Callable[[float], None]]:
    """Give a function to call with the amount done so far; it draws at most ten times a second."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    # No refreshing thread: it would run in the middle of what is being timed.
    bar = Progress(console=Console(stderr=True), transient=True, auto_refresh=False)
    task = bar.add_task(escape(description), total=total)
    drawn = perf_counter() + QUIET

    def update(done: float) -> None:
        nonlocal drawn
        if perf_counter() - drawn >= 0.1:
            bar.start()
            bar.update(task, completed=done, refresh=True)
            drawn = perf_counter()

    try:
        yield update
    finally:
        if bar.live.is_started:
            bar.stop()


def _short(x: float) -> str:
    """Three significant digits, never an exponent."""
    return f"{x:,.{max(0, 2 - math.floor(math.log10(x)))}f}"
