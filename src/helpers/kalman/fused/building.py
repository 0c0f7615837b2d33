"""The first compilation: announced, and done once by several processes that start together."""

import contextlib
import importlib
import os
import sys
import tempfile
import threading
import time
from hashlib import sha256
from pathlib import Path

PATIENCE = 600  # seconds after which a process no longer waits for another one
SILENT = 3  # seconds that need no word
PURPOSE = {
    "tangents": "for second derivatives",
    "integrated": "for diffuse starts",
    "panel": "for many series of one model",
    "own": "for many series, each with its model",
    "xla": "for JAX",
    "xla_integrated": "for diffuse starts in JAX",
    "xla_panel": "for many series in JAX",
    "xla_tangents": "for second derivatives in JAX",
}


def load(name: str, announce: bool | None = None):
    """Import the module ``name`` of this package, whose import compiles, one process at a time.

    A process that finds another one at it waits, and then finds the machine code on disk. A line on
    stderr says what takes so long, unless ``announce`` is False; None says so only where somebody
    may read it, on a terminal.
    """
    what = f"Kalman filter {PURPOSE.get(name, '')}".rstrip()
    name = f"{__package__}.{name}"
    there = sys.modules.get(name)
    if there is not None and not getattr(there.__spec__, "_initializing", False):
        return there
    with waiting(what, "half a minute", announce):
        return importlib.import_module(name)


_compiled = {}  # machine code that must not be forgotten while its address is in use


def address(compiled, m: int, p: int, what: str, time_needed: str, announce: bool | None) -> int:
    """Where the machine code that `compiled` makes for m states and p series begins."""
    with waiting(what, time_needed, announce):
        code = _compiled[compiled, m, p] = compiled(m, p)
    return code.address


@contextlib.contextmanager
def waiting(what: str, time_needed: str, announce: bool | None = None):
    """Compile alone among the processes of this user, and say so where it takes long."""
    if announce is None:
        announce = sys.stderr is not None and sys.stderr.isatty()
    with _alone(), _told(what, time_needed, announce, time.perf_counter()):
        yield


@contextlib.contextmanager
def _told(what: str, time_needed: str, announce: bool, start: float):
    def say():
        print(
            f"Compiling the {what}: about {time_needed}, once on this machine.",
            file=sys.stderr,
            flush=True,
        )

    timer = threading.Timer(SILENT, say)
    if announce:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        took = time.perf_counter() - start
        if announce and took > SILENT:
            print(f"The {what} is compiled: {took:.0f} s.", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _alone():
    """Hold a lock among the processes of this user, or go on without one where there is none."""
    # One lock for each copy of the package: others compile for themselves.
    copy = sha256(str(Path(__file__).parent).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"kalman-by-hand-{copy}.lock"
    handle, end = None, time.monotonic() + PATIENCE
    while handle is None and time.monotonic() < end:
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            os.write(handle, str(os.getpid()).encode())
        except FileExistsError:
            if _abandoned(path):
                with contextlib.suppress(OSError):
                    path.unlink()
            time.sleep(0.2)
        except OSError:
            break
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)
            with contextlib.suppress(OSError):
                path.unlink()


def _abandoned(path: Path) -> bool:
    """Whether the process that holds the lock is gone, or has held it for too long."""
    try:
        if time.time() - path.stat().st_mtime > PATIENCE:
            return True
        if os.name != "nt":  # there, asking for a process by its number would end it
            os.kill(int(path.read_text() or os.getpid()), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):  # the lock is gone, or its owner another user's: look again
        return False
    return False
