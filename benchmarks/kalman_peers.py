"""The gradient of the Kalman likelihood, ours and everybody's: time, compile time, memory, error.

    python benchmarks/kalman_peers.py [--only PART ...] [--quick] [--record FILE]

Contenders take turns in one process, in float64 and on one thread. They are the compiled pass of
`helpers.kalman` and its PyTensor Op; pymc-extras' StandardFilter and ConvergentFilter in Numba, and
the former in C; JAX (a scan, and dynamax); PyTorch; statsmodels. What is not installed is named and
left out (``pip install jax dynamax torch`` adds what the book itself does not need).

Parts: ``random`` (dense models of seven sizes, also without steady state and with a gap), ``real``
(models that people fit), ``whole`` (log-density and gradient of whole PyMC models), ``scaling``,
``limits`` (of the machine), ``memory`` and ``compile``. Parts that are not named keep their
place in the record, results/kalman_peers.json, which the chapter "Benchmarks" draws, unless another
processor made it. All together take about twenty minutes on a quiet machine once PyTensor's caches
are warm, a third of it ``compile``; the first time, some fifteen more.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from time import perf_counter

import numpy as np
from peers import jax_filters, models, ours, pytensor_filters, statsmodels_filter, torch_filter
from threadpoolctl import threadpool_limits

from helpers.checks import complex_step, relative_error, symmetrize
from helpers.kalman import StateSpace, loglike, loglike_and_grad
from helpers.statespace import SYMMETRIC
from helpers.timing import Timings, compare, machine, progress, write_record

RECORD = Path(__file__).parent / "results" / "kalman_peers.json"
OURS = "ours"
ROUNDS = 7, 101  # a median needs no more, and the record stays small
BLOCK = 2e-3  # seconds that calls in a row take at least

# Value and gradients: name -> (package it needs, function of y, model and the requested names).
# The order is that of the turns. JAX computes in a thread of its own, and who comes next pays for
# the change: that is Standard, which takes milliseconds and hardly feels it. Ours and its Op stand
# apart, or the second would find the compiled pass in the caches.
QUICK = {
    OURS: ("numba", ours.contender),
    "JAX": ("jax", jax_filters.contender),
    "dynamax": ("dynamax", partial(jax_filters.contender, loglike=jax_filters.dynamax_loglike)),
    "Standard": (
        "pymc_extras", partial(pytensor_filters.contender, kind="Standard", backend="Numba")
    ),
    "ours, PyTensor": (
        "pytensor", partial(pytensor_filters.contender, kind="ours", backend="Numba")
    ),
    "Convergent": (
        "pymc_extras", partial(pytensor_filters.contender, kind="Convergent", backend="Numba")
    ),
}  # fmt: skip
SLOW = {
    "Standard, C": (
        "pymc_extras", partial(pytensor_filters.contender, kind="Standard", backend="C")
    ),
    "PyTorch": ("torch", torch_filter.contender),
}  # fmt: skip
# The complex step for each entry of each array takes as many filters: small models only.
SCORES = {
    "statsmodels score": ("statsmodels", partial(statsmodels_filter.score, method="approx")),
    "statsmodels score, Harvey": (
        "statsmodels",
        partial(statsmodels_filter.score, method="harvey"),
    ),
}
SCORE_ENTRIES, STEP_ENTRIES = 60, 350  # up to which there are scores, and complex steps as truth


# --- the contenders of a problem ------------------------------------------------------------------


def available(contenders: dict) -> dict:
    return {name: make for name, (package, make) in contenders.items() if find_spec(package)}


def alone(y: np.ndarray, model: StateSpace) -> dict[str, Callable]:
    """The value alone, and what the pass takes without a steady state."""
    return {
        "ours, value": ours.value_alone(y, model),
        "ours, value, every step": ours.value_alone(y, model, tol=0.0),
        "ours, every step": ours.contender(y, model, tol=0.0),
        "statsmodels, value": statsmodels_filter.forward(y, model),
    }


def truth(y: np.ndarray, model: StateSpace) -> tuple[str, dict[str, np.ndarray]]:
    """The gradients by complex steps, where there are few entries, else by the NumPy reference."""
    if sum(X.size for X in model.asdict().values()) > STEP_ENTRIES:
        return "reference", loglike_and_grad(y, model)[2].asdict()

    def value(name, X):
        return loglike(y, StateSpace(**(model.asdict() | {name: X})))

    found = {
        name: complex_step(partial(value, name), X, symmetric=name in SYMMETRIC)
        for name, X in model.asdict().items()
    }
    return "complex step", found


def errors_of(contenders: dict[str, Callable], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """The largest relative error of each; ArithmeticError if the package's own is large."""
    found = {name: float(f"{error(call()[1], expected):.1e}") for name, call in contenders.items()}
    if not found[OURS] < 1e-9:
        raise ArithmeticError(f"the package's gradients are off by {found[OURS]} of their largest")
    return found


def error(gradients: dict, expected: dict[str, np.ndarray]) -> float:
    """The largest relative error of any array's gradient."""
    errors = []
    for name, G in gradients.items():
        G = np.asarray(G, dtype=float)
        G = symmetrize(G) if name in SYMMETRIC else G
        errors.append(relative_error(G, expected[name]))
    return max(errors)


def race(
    contenders: dict[str, Callable], seconds: float, label: str, block: float = 0.0
) -> dict[str, list[float]]:
    """Interleaved times of contenders, one call a turn, or calls in a row for `block` seconds.

    One call a turn is the protocol: everybody finds the caches full of what others left there. A
    sampler calls one function again and again, and that is what a block of calls is like.
    """
    if not contenders:
        return {}
    calls = {}
    for name, call in contenders.items():
        call(), call()  # what compiles does it here; dynamax compiles twice
        start = perf_counter()
        call()
        calls[name] = max(1, round(block / (perf_counter() - start)))
    turns = {name: partial(in_a_row, call, calls[name]) for name, call in contenders.items()}
    start = perf_counter()
    for turn in turns.values():
        turn()
    fits = int(seconds / (perf_counter() - start))
    gc.collect()
    found = compare(turns, repeats=min(max(fits, ROUNDS[0]), ROUNDS[1]), warmup=1, label=label)
    # Four digits are more than a clock gives, and keep the record small.
    return {
        name: [float(f"{s / calls[name]:.3e}") for s in times]
        for name, times in found.seconds.items()
    }


def in_a_row(call: Callable, times: int) -> None:
    for _ in repeat(None, times):
        call()


def ratio(seconds: dict[str, list[float]], slow: str, fast: str = OURS) -> str:
    """How many times longer, with the range over the rounds; a dash where one did not run."""
    if slow not in seconds or fast not in seconds:
        return "-"
    middle, low, high = Timings(seconds).ratio(slow, fast)
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


# --- the parts ------------------------------------------------------------------------------------


def measure_random(options) -> dict:
    found = {}
    sizes = models.SIZES[:3] if options.quick else models.SIZES
    for m, p, r, n in progress(sizes, "random models"):
        label = f"({m}, {p}, {r}, {n})"
        y, model = models.random_problem(m, p, r, n)
        against, expected = truth(y, model)
        entries = sum(X.size for X in model.asdict().values())
        quick = {name: make(y, model) for name, make in available(QUICK).items()}
        slow = available(SLOW) | (available(SCORES) if entries <= SCORE_ENTRIES else {})
        slow = {name: make(y, model) for name, make in slow.items()}
        errors = errors_of(quick | slow, expected)

        gap = y.copy()
        gap[-3, 0] = np.nan  # near the end: the steady state ends there
        with_gap = {
            name: QUICK[name][1](gap, model) for name in (OURS, "Standard") if name in quick
        }
        steady = ours.steady_step(y, model)
        turns = race(quick, options.seconds, label)
        found[label] = {
            "size": [m, p, r, n],
            "steady": steady,
            "against": against,
            "errors": errors,
            "turns": turns,
            "rows": race(quick | alone(y, model), options.seconds, f"{label}, in a row", BLOCK),
            "slow": race(
                {OURS: quick[OURS]} | slow, options.seconds / 2, f"{label}, slow ones", BLOCK
            ),
            "gap": race(with_gap, options.seconds / 2, f"{label}, a gap"),
            "counts": ours.counts(y, model, steady=steady),
            "counts, every step": ours.counts(y, model, steady=n),
        }
        print(
            f"{label:18} steady at {steady}; over ours: Standard {ratio(turns, 'Standard')}, "
            f"Convergent {ratio(turns, 'Convergent')}, JAX {ratio(turns, 'JAX')}",
            flush=True,
        )
    return found


def measure_real(options) -> dict:
    """Value and the gradients that the model's parameters need, filter against filter."""
    found = {}
    problems = models.real_problems()
    for label in progress(list(problems)[:2] if options.quick else problems, "real models"):
        y, model, requested = problems[label]
        _, expected = truth(y, model)
        chosen = {name: QUICK[name] for name in (OURS, "JAX", "dynamax")} | {
            "PyTorch": SLOW["PyTorch"]
        }
        calls = {name: make(y, model, requested) for name, make in available(chosen).items()}
        errors = errors_of(calls, expected)
        torch = calls.pop("PyTorch", None)
        slow = {"PyTorch": torch} if torch else {}
        if find_spec("statsmodels"):
            slow |= statsmodels_filter.natural_scores(label, y, model)
        forwards = {"statsmodels, value": statsmodels_filter.forward(y, model)}
        turns = race(calls | forwards, options.seconds, label)
        everything = {"ours, all": ours.contender(y, model)} | alone(y, model)
        steady = ours.steady_step(y, model)
        found[label] = {
            "size": [model.m, model.p, model.r, len(y)],
            "requested": list(requested),
            "steady": steady,
            "errors": errors,
            "turns": turns,
            "rows": race(calls | everything, options.seconds, f"{label}, in a row", BLOCK),
            "slow": race(
                {OURS: calls[OURS]} | slow, options.seconds / 2, f"{label}, slow ones", BLOCK
            ),
            "counts": ours.counts(y, model, requested, steady=steady),
        }
        print(
            f"{label:22} steady at {steady}; over ours: JAX {ratio(turns, 'JAX')}; "
            f"ours over statsmodels' value {ratio(turns, OURS, 'statsmodels, value')}",
            flush=True,
        )
    return found


def measure_whole(options) -> dict:
    """Log-density and gradient of whole PyMC models, with either filter."""
    if not find_spec("pymc_extras"):
        return {}
    from peers.pymc_models import logp_dlogp

    labels = [f"season {season}, n = {n}" for season, n in models.STRUCTURAL] + ["VARMAX(1, 1)"]
    found = {}
    for label in progress(labels[:1] if options.quick else labels, "whole PyMC models"):
        calls, compiled = {}, {}
        for name, filter_type in {"closed form": "closed_form", "Standard": "standard"}.items():
            start = perf_counter()
            calls[name] = logp_dlogp(label, filter_type)
            calls[name]()
            compiled[name] = round(perf_counter() - start, 1)
        (value, slopes), (value_2, slopes_2) = (call() for call in calls.values())
        turns = race(calls, options.seconds, label)
        found[label] = {
            "turns": turns,
            "rows": race(calls, options.seconds, f"{label}, in a row", BLOCK),
            "build and compile": compiled,
            "differences": {
                "logp": float(f"{abs(value - value_2) / abs(value_2):.1e}"),
                "dlogp": float(f"{relative_error(slopes, slopes_2):.1e}"),
            },
        }
        print(
            f"{label:22} Standard over ours {ratio(turns, 'Standard', 'closed form')}",
            flush=True,
        )
    return found


def measure_scaling(options) -> dict:
    """One length and one number of states at a time; also models with a nearly empty T."""
    names = [name for name in (OURS, "Standard", "JAX") if name in available(QUICK)]
    lengths = (100, 300, 1000) if options.quick else (100, 300, 1000, 3000, 10000)
    states = (2, 4, 8) if options.quick else (2, 4, 8, 16, 32, 64)
    seasons = (4, 12) if options.quick else (4, 12, 24, 52, 104)

    def times(y, model, label):
        calls = {name: QUICK[name][1](y, model) for name in names}
        return race(calls | alone(y, model), options.seconds / 2, label, BLOCK)

    found = {"n": {}, "m": {}, "season": {}}
    for n in progress(lengths, "scaling in n"):
        found["n"][str(n)] = times(*models.random_problem(13, 1, 3, n), f"n = {n}")
    for m in progress(states, "scaling in m"):
        found["m"][str(m)] = times(*models.random_problem(m, 1, 2, 200), f"m = {m}")
    for season in progress(seasons, "scaling in the season"):
        y, model = models.structural_problem(season, 200)
        calls = {
            OURS: ours.contender(y, model, ("a0", "P0", "H", "Q")),
            "statsmodels, value": statsmodels_filter.forward(y, model),
        }
        found["season"][str(season)] = race(calls, options.seconds / 4, f"season {season}", BLOCK)
    return found


def measure_limits(options) -> dict:
    from peers import limits

    return limits.measure()


# --- in processes of their own --------------------------------------------------------------------

MEMORY_SIZE, MEMORY_LENGTHS = (13, 1, 3), (1000, 10000)
COMPILED = (OURS, "ours, PyTensor", "Standard", "Convergent", "Standard, C", "JAX", "dynamax")


def child(environment: dict, *arguments: str):
    """What this script prints, as JSON, when it runs with these arguments; None if it fails."""
    run = subprocess.run(
        [sys.executable, __file__, *arguments], env=os.environ | environment, stdout=subprocess.PIPE
    )
    if run.returncode:
        print(f"no figure: {' '.join(arguments)} failed", flush=True)
        return None
    return json.loads(run.stdout.splitlines()[-1])


def peak_of_a_call(name: str) -> list[float]:
    """Bytes that a call needs beyond what was there before it, for each length (Linux only)."""
    makers = QUICK | SLOW | {
        "ours, value": ("numba", ours.value_alone),
        "ours, every step": ("numba", partial(ours.contender, tol=0.0)),
        "ours, without T and Z": (
            "numba", partial(ours.contender, requested=("a0", "P0", "H", "Q"), tol=0.0)
        ),
        "statsmodels, value": ("statsmodels", statsmodels_filter.forward),
    }  # fmt: skip
    libc, peaks = ctypes.CDLL(None), []

    def resident(field):
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(rf"{field}:\s+(\d+)", status)[1])

    for n in MEMORY_LENGTHS:
        call = makers[name][1](*models.random_problem(*MEMORY_SIZE, n))
        call(), call()
        gc.collect()
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        before = resident("VmRSS")
        call()
        peaks.append(resident("VmHWM") - before)
    return peaks


def measure_memory(options) -> dict:
    names = [*available(QUICK), "ours, every step", "ours, without T and Z", "ours, value"]
    names += ["statsmodels, value"]
    names += ["PyTorch"] if find_spec("torch") else []
    if not Path("/proc/self/clear_refs").exists():
        return {}
    # Large blocks go back to the system at once, so that the peak is the call's own.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    names = names[:2] if options.quick else names
    peaks = {
        name: child(environment, "--child", "memory", name) for name in progress(names, "memory")
    }
    return {"size": MEMORY_SIZE, "lengths": MEMORY_LENGTHS, "bytes": peaks}


def time_to_first_gradient(name: str) -> float:
    """Seconds to build, compile and call once; the package itself was started before."""
    y, model = models.random_problem(4, 1, 2, 100)
    if name in ("JAX", "dynamax"):
        jax_filters.start().jit(lambda x: x + 1)(1.0)
        if name == "dynamax":
            import dynamax.linear_gaussian_ssm  # noqa: F401
    elif name != OURS:
        import pytensor
        import pytensor.tensor as pt

        x, mode = pt.vector("x"), "CVM" if name.endswith("C") else "NUMBA"
        pytensor.function([x], x + 1, mode=mode)(np.ones(2))
        if not name.startswith(OURS):
            import pymc_extras.statespace  # noqa: F401
    start = perf_counter()
    (QUICK | SLOW)[name][1](y, model)()
    return perf_counter() - start


def measure_compile(options) -> dict:
    """Seconds to the first gradient of all arrays: with empty caches, then with filled ones."""
    names = [name for name in COMPILED if name in available(QUICK | SLOW)]
    found = {}
    for name in progress(names[:2] if options.quick else names, "compile time"):
        with tempfile.TemporaryDirectory() as folder:
            given = os.environ.get("PYTENSOR_FLAGS")
            environment = {
                "PYTENSOR_FLAGS": ",".join(filter(None, [given, f"base_compiledir={folder}"])),
                "NUMBA_CACHE_DIR": str(Path(folder) / "numba"),
            }
            found[name] = {
                when: child(environment, "--child", "compile", name) for when in ("cold", "warm")
            }
        print(f"compile {name:16} {found[name]}", flush=True)
    return found


PARTS = {
    "limits": measure_limits,
    "random": measure_random,
    "real": measure_real,
    "whole": measure_whole,
    "scaling": measure_scaling,
    "memory": measure_memory,
    "compile": measure_compile,
}


def versions() -> dict[str, str]:
    """Of the peers that `helpers.timing.machine` does not know."""
    installed = {d.name.lower(): d.version for d in metadata.distributions() if d.name}
    return {name: installed[name] for name in ("dynamax", "torch") if name in installed}


def write(path: Path, part: str, found: dict) -> None:
    """Put a part into the record; the others stay as they are, if they are of this machine."""
    record = json.loads(path.read_text("utf-8")) if path.exists() else {}
    here = machine() | {"peers": versions()}
    if record.get("machine", here)["processor"] != here["processor"]:
        print("the record is of another processor: its other parts are dropped")
        record = {}
    record[part] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "found": found}
    record["machine"] = here
    write_record(record, path)


def main(options) -> None:
    packages = {package for package, _ in (QUICK | SLOW | SCORES).values()}
    if missing := sorted(package for package in packages if not find_spec(package)):
        print(f"not installed, left out: {', '.join(missing)}")
    start = perf_counter()
    for name, measure in PARTS.items():
        if name in options.only:
            print(f"{perf_counter() - start:5.0f} s  {name}", flush=True)
            write(options.record, name, measure(options))
    print(f"{perf_counter() - start:5.0f} s  done")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--quick", action="store_true", help="few sizes and short runs (a trial)")
    parser.add_argument("--seconds", type=float, default=6.0, help="budget of each race")
    parser.add_argument("--record", type=Path, default=RECORD, help="file to write")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.seconds = min(options.seconds, 1.0)
        if options.record == RECORD:
            parser.error("a trial does not replace the record: say --record FILE")
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # of dynamax, at its first import
    threadpool_limits(1)  # JAX and PyTorch are told in their modules
    if options.child:
        what, name = options.child
        print(json.dumps({"memory": peak_of_a_call, "compile": time_to_first_gradient}[what](name)))
    else:
        main(options)
