"""Machine code on disk, where there is a disk: Numba's `njit` and `cfunc` that keep it.

Numba keeps machine code where the package lies, or in the user's home, and PyTensor in the latter.
A file of it that is cut short ends in an error deep inside of them, and so does a machine on which
neither place can be written. Here such a file is thrown away and its function compiled anew; and
where nothing can be written a temporary folder, which is gone with the process, has to do.
"""

import atexit
import contextlib
import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numba
from numba.core import caching, sigutils
from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.targetconfig import TargetConfig
from numba.extending import register_jitable
from numba.np import arrayobj

__all__ = ["cfunc", "for_pytensor", "njit", "watching"]

# Numba's own level of optimisation, 3, makes twice the machine code where there are expressions of
# arrays, takes twice the time, and wins nothing: what has to be fast is written as instructions.
OPT = type(numba.config.OPT)(2)

# Who wants to know of each function: called with whether it has to be compiled now.
watching: list = []


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _File(IndexDataCacheFile):
    """The index and the data of a function: what cannot be read, or written, is not there."""

    def load(self, key):
        try:
            return super().load(key)
        except Exception as error:  # a broken pickle raises whatever its bytes happen to ask for
            return self.discard(error)

    def _load_index(self):
        try:
            return super()._load_index()
        except Exception as error:
            self.discard(error)
            return {}

    def save(self, key, data):
        try:
            super().save(key, data)
        except OSError as error:  # the disk is full, or no longer there
            _say(f"Machine code is compiled, but not kept on disk for the next time: {error}.")

    def discard(self, error) -> None:
        """Throw the index away, without which the data are written anew."""
        with contextlib.suppress(OSError):
            os.unlink(self._index_path)
        _say(
            f"Machine code on disk is damaged ({self._index_path}: {error or type(error)}): it is "
            "thrown away and compiled anew."
        )


class _Cache(FunctionCache):
    """Numba's cache of a function, with a `_File`, that tells `watching` what is compiled."""

    def __init__(self, function):
        super().__init__(function)
        self._cache_file.__class__ = _File

    def load_overload(self, sig, target_context):
        try:
            found = super().load_overload(sig, target_context)
        except Exception as error:  # a whole pickle, but not of machine code
            found = self._cache_file.discard(error)
        for hear in watching:
            hear(found is None)
        return found


def _cache(function):
    """A cache for a function: where Numba has it, else in a temporary folder, else none."""
    try:
        return _Cache(function)
    except RuntimeError:  # "no locator available": nothing can be written
        folder = temporary_folder()
    if folder is None:
        return NullCache()
    numba.config.CACHE_DIR = folder
    return _Cache(function)


@functools.cache
def temporary_folder() -> str | None:
    """Where machine code goes that has no other place, until the process ends. None if nowhere."""
    why = (
        "neither the package's folder nor the user's home can be written. To keep it, let "
        "NUMBA_CACHE_DIR name a folder that can, and for PyTensor "
        "PYTENSOR_FLAGS=base_compiledir=FOLDER."
    )
    try:
        folder = tempfile.mkdtemp(prefix="kalman-by-hand-")
    except OSError:
        _say(f"Machine code is not kept at all: {why}")
        return None
    owner = os.getpid()  # a fork of it leaves the folder alone

    def remove():
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    _say(f"Machine code is kept in {folder} and lost when this process ends: {why}")
    return folder


@register_jitable
def _other_shape(source, target):
    raise ValueError("cannot assign an array of another shape")


_defaults = functools.cache(lambda kind: {x: it.default for x, it in kind.options.items()})


def _values(flags):
    """`TargetConfig.values`: what it asks of forty properties, from two dictionaries."""
    return _defaults(type(flags)) | flags._values


@contextlib.contextmanager
def _optimized():
    """Numba compiles with `OPT`; what other threads compile waits.

    Nor is a sentence put together from two shapes wherever one array is assigned to another, which
    takes longer to compile than what assigns it. And the flags of two compilations are compared,
    as they are for each call that is typed, in a tenth of the time: a seventh of all.
    """
    with (
        global_compiler_lock,
        mock.patch.object(numba.config, "OPT", OPT),
        mock.patch.object(arrayobj, "raise_with_shape_context", _other_shape),
        mock.patch.object(TargetConfig, "values", _values),
    ):
        yield


def njit(*signature, **options):
    """:func:`numba.njit` that keeps its machine code on disk."""

    def decorate(function):
        made = numba.njit(**options)(function)
        made._cache = _cache(function)
        made.compile = _optimized()(made.compile)
        for one in signature:
            made.compile(one)
        if signature:
            made.disable_compile()
        return made

    return decorate


def cfunc(signature, **options):
    """:func:`numba.cfunc` that keeps its machine code on disk."""

    def decorate(function):
        kind = sigutils.normalize_signature(signature)
        made = CFunc(function, kind, locals={}, options=options)
        made._cache = _cache(function)
        with _optimized():
            made.compile()
        return made

    return decorate


def for_pytensor() -> None:
    """Let PyTensor compile in the temporary folder, where it cannot in its own, and compile anew
    what is damaged there.

    To be called before the first function is compiled: PyTensor makes the folder then.
    """
    import pytensor

    caching.IndexDataCacheFile = _File
    setting = type(pytensor.config).base_compiledir
    try:
        path = pytensor.config.base_compiledir
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError:
        folder = temporary_folder()
        if folder is not None:
            setting.val = Path(folder)
