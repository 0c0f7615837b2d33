"""Settings of every test run, so that plain `pytest --nbval` does what make's test commands do."""

import gc
import os
import sys
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

# More BLAS threads change the last digits of a result. The kernels that nbval starts inherit these.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

# Chapters that time something need not do it as long as for a reader: their times are not compared.
os.environ.setdefault("TIMING_SECONDS", "0.2")

# And nobody looks at their figures.
os.environ.setdefault("DRAFT_FIGURES", "1")

# What JAX took long to compile it finds on disk the next time.
cache = Path(__file__).parent / ".pytest_cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

# Graphs and compilers make many objects that stay: to look for garbage among them again and again
# takes a fortieth of the time.
gc.set_threshold(100_000)

# What is not compiled by Numba runs in Python: compiling it in C takes far longer than running it.
# And of the place where a variable was made PyTensor looks up one line for each, instead of eight.
flags = [flag for flag in os.environ.get("PYTENSOR_FLAGS", "").split(",") if flag]
for name, value in {"cxx": "", "traceback__limit": "1"}.items():
    if not any(flag.startswith(f"{name}=") for flag in flags):
        flags.append(f"{name}={value}")
os.environ["PYTENSOR_FLAGS"] = ",".join(flags)

# The doctests of jax.py need JAX. tests/data holds scripts, not tests.
collect_ignore = [] if find_spec("jax") else ["src/helpers/kalman/jax.py"]
collect_ignore += ["tests/data"]

# What takes longest begins first, so that two workers end together: a module or a notebook stays on
# one of them.
LONGEST = (
    "tests/test_kalman_draws", "tests/test_kalman_diffuse", "tests/test_kalman_jax",
    "tests/test_kalman_pymc", "notebooks/sparse/04-", "notebooks/kalman/13-",
    "tests/test_kalman_panel_op", "tests/test_kalman_op", "tests/test_onnx_backend",
    "notebooks/sparse/06-", "tests/test_attack", "tests/test_kalman_compiled",
    "tests/test_kalman_statsmodels", "tests/test_kalman_twin", "tests/test_sparse_op", "notebooks/",
)  # fmt: skip


def started(setup):
    """Set a notebook up; once more if its kernel died at once, as where its ports were taken."""
    with suppress(RuntimeError):
        return setup()
    return setup()


def pytest_collection_modifyitems(items):
    if "pytensor" in sys.modules:  # tests ask for that place even less than chapters do
        sys.modules["pytensor"].config.traceback__limit = 0
    for notebook in {item.parent for item in items if hasattr(item.parent, "skip_compare")}:
        notebook.skip_compare += ("image/svg+xml",)  # nbval compares no pictures, but this is text
        notebook.setup = partial(started, notebook.setup)
    items.sort(key=lambda item: next(
        (i for i, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST)
    ))  # fmt: skip
