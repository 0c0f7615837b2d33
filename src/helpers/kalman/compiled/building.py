"""The first compilation: told, and done once by several processes that start together."""

import contextlib
import importlib
import os
import sys
import tempfile
import threading
import time
from hashlib import sha256
from pathlib import Path

PATIENCE = 600  # seconds without a sign of life after which a process no longer waits for another
SILENT = 3  # seconds that need no word
PURPOSE = {
    "whole": "for any number of states and series",
    "collapsed": "for more series than states",
    "tangents": "for second derivatives",
    "rotated_tangents": "for second derivatives of more series than states",
    "pulled_outputs": "for gradients of its outputs",
    "integrated": "for diffuse starts",
    "panel": "for many series of one model",
    "per_series": "for many series, each with its model",
    "xla": "for JAX",
    "xla_integrated": "for diffuse starts in JAX",
    "xla_panel": "for many series in JAX",
    "xla_tangents": "for second derivatives in JAX",
}
# How many functions each module compiles or finds on disk, and the modules that it imports for it.
FUNCTIONS = {
    "door": 3, "whole": 1, "roots": 3, "outputs": 1, "pulled_outputs": 1, "tangents": 2,
    "collapsed": 3, "rotated_tangents": 1, "integrated": 1, "panel": 3, "per_series": 1, "xla": 4,
    "xla_integrated": 2, "xla_panel": 2, "xla_tangents": 2,
}  # fmt: skip
NEEDS = {
    "rotated_tangents": ("tangents",),
    "panel": ("roots",),
    "xla_integrated": ("integrated", "xla"),
    "xla_panel": ("panel", "roots", "xla"),
    "xla_tangents": ("tangents", "xla"),
}


def functions(*names: str) -> int:
    """How many functions are compiled, or found on disk, when these modules are imported now."""
    wanted = {"door", *names, *(x for name in names for x in NEEDS.get(name, ()))}
    new = (x for x in wanted if f"{__package__}.{x}" not in sys.modules)
    return sum(FUNCTIONS.get(x, 0) for x in new)


def load(name: str, announce: bool | None = None):
    """Import the module ``name`` of this package, whose import compiles, one process at a time.

    A process that finds another one at it waits, and then finds the machine code on disk. Lines on
    stderr say what takes so long and how far it is, unless ``announce`` is False; None says so only
    where somebody may read it: on a terminal, and in a notebook.
    """
    whole = f"{__package__}.{name}"
    there = sys.modules.get(whole)
    if there is not None and not getattr(there.__spec__, "_initializing", False):
        return there
    what = f"Kalman filter {PURPOSE.get(name, '')}".rstrip()
    with waiting(what, functions(name), announce):
        return importlib.import_module(whole)


_compiled = {}  # machine code that must not be forgotten while its address is in use


def address(compiled, m: int, p: int, what: str, announce: bool | None) -> int:
    """Where the machine code that `compiled` makes for m states and p series begins."""
    with waiting(what, 1, announce):
        _compiled[compiled, m, p], place = compiled(m, p)
    return place


@contextlib.contextmanager
def waiting(what: str, count: int, announce: bool | None = None):
    """Compile alone among the processes of this user, and say how far it is where it takes long."""
    with told(what, count, announce) as progress, _alone(progress):
        yield


class _Progress:
    """How many of `count` functions are there, said from `SILENT` seconds on.

    The count is that of a process which starts with nothing: some may be there already.
    """

    def __init__(self, what: str, count: int, announce: bool):
        self.what, self.count, self.announce = what, count, announce
        self.start, self.done, self.said = time.perf_counter(), 0, False
        self.waited, self.lock = False, None
        self.timer = threading.Timer(SILENT, self._late)
        self.timer.daemon = True

    def waits(self):
        """Another process compiles."""
        if self.announce and not self.waited:
            _say(f"Another process compiles the {self.what}: waiting for it.")
            self.waited = True

    def hear(self, missing: bool):
        """The next function, and whether it has to be compiled."""
        self.done += 1
        if self.lock:
            with contextlib.suppress(OSError):
                os.utime(self.lock)  # a sign of life
        if not (missing and self.announce):
            return
        if self.said:
            self._say()
        elif not self.timer.is_alive():
            self.timer.start()

    def _late(self):
        self.said = True
        self._say()

    def _say(self):
        took = time.perf_counter() - self.start
        _say(
            f"Compiling the {self.what}, once on this machine: function {self.done} of "
            f"{max(self.count, self.done)}, {took:.0f} s so far."
        )


_current: list[_Progress] = []


@contextlib.contextmanager
def told(what: str, count: int, announce: bool | None = None):
    """Say how far the compilation of `count` functions is, if it is no part of a longer one."""
    if _current:
        yield _current[0]
        return
    from helpers.kalman import on_disk

    if announce is None:
        stderr = sys.stderr
        notebook = type(stderr).__module__.startswith("ipykernel")
        announce = stderr is not None and (notebook or stderr.isatty())
    progress = _Progress(what, count, announce)
    _current.append(progress)
    on_disk.watching.append(progress.hear)
    try:
        yield progress
    finally:
        on_disk.watching.remove(progress.hear)
        _current.clear()
        progress.timer.cancel()
        if progress.said:
            took = time.perf_counter() - progress.start
            _say(f"The {what} is compiled: {took:.0f} s.")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _alone(progress: _Progress):
    """Hold a lock among the processes of this user, or go on without one where there is none."""
    # One lock for each copy of the package: others compile for themselves.
    copy = sha256(str(Path(__file__).parent).encode()).hexdigest()[:16]
    handle, start = None, time.monotonic()
    try:
        progress.lock = path = Path(tempfile.gettempdir()) / f"kalman-by-hand-{copy}.lock"
        while handle is None:
            try:
                handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
                os.write(handle, str(os.getpid()).encode())
            except FileExistsError:
                if _abandoned(path):
                    path.unlink(missing_ok=True)
                    continue
                if time.monotonic() - start > SILENT:
                    progress.waits()
                time.sleep(0.2)
    except OSError:  # no folder for it, or the lock of another user, who is gone
        pass
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)
            with contextlib.suppress(OSError):
                path.unlink()


def _abandoned(path: Path) -> bool:
    """Whether the process that holds the lock is gone, or has shown no life for too long."""
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
