"""The gradient of the Kalman likelihood, ours and everybody's: time, compile time, memory, error.

    python benchmarks/kalman_peers.py [--only PART ...] [--quick] [--record FILE] [--cache FOLDER]

makes the whole record, results/kalman_peers.json, which the chapter "Benchmarks" draws. Every
contender (`peers.contenders`) has a process to itself, in float64 and on one thread. There are two
measures. *In a row*: the contenders take turns, and in its turn each is called again and again for
some milliseconds; a turn gives seconds per call. *Cold*: one call after more bytes were read than
the last cache holds, every contender alike. Beside every time stands the error of the gradients
against the reference solution, which is held to complex steps first. An error of the project's own
above 1e-9 stops the record. Who is not installed, refuses a model or does not compile in time is
left out, and the record says why.

Parts: ``compile`` (seconds to the first gradient, with empty caches and with full ones), ``random``
(dense models of seven sizes, each also with a gap), ``real`` (models that people fit), ``whole``
(log-density and gradient of whole PyMC models), ``scaling``, ``limits`` (of the machine) and
``memory``. Parts that are not named keep their place in the record, unless another processor made
it. ``results/kalman_peers_second.json`` is of another machine: its parts limits, real and whole.

Compilations run two at a time, measurements one at a time. ``--cache`` names a folder in which the
compiled functions are kept for the next run; without it every run compiles all anew. ``--python
NAME=EXECUTABLE`` runs a contender with another Python, for one that needs an environment of its
own (PyTorch), or, as a further contender, ``JAX 0.4.31=EXECUTABLE``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from time import perf_counter

import numpy as np
from measured import commit
from one_core import ONE_THREAD
from peers import limits, models, ours
from peers.contenders import CONTENDERS, OWN, missing
from threadpoolctl import threadpool_limits

from helpers.checks import complex_step, relative_error
from helpers.kalman import StateSpace, loglike, loglike_and_grad
from helpers.statespace import NAMES, SYMMETRIC
from helpers.timing import machine, write_record

HERE = Path(__file__).parent
RECORD = HERE / "results" / "kalman_peers.json"
OURS, UNIT = "ours", "statsmodels, value"
LARGEST_ERROR = 1e-9
TURN = 5e-3  # seconds that calls in a row take at least
TURNS = 7, 31  # a median and quartiles need no more, and the record stays small
AT_ONCE = 2  # compilations
PATIENCE = 600  # seconds that a contender may take to compile
MEMORY_SIZE, MEMORY_LENGTHS = (13, 1, 3), (1000, 10000)


# --- the processes --------------------------------------------------------------------------------


def folder_of(name: str, options) -> Path:
    """Where a contender keeps what it compiles; one folder for all that call our pass directly."""
    what = CONTENDERS.get(name)
    key = OURS if what and what.make.startswith("ours.") else name
    key = key.replace("every step", "").replace("not unrolled", "")
    return options.cache / "".join(x if x.isalnum() else "_" for x in key).strip("_")


class Process:
    """A contender in a process of its own (`peers.worker`)."""

    def __init__(self, name: str, options, cache: Path | None = None, **environment: str):
        cache = cache or folder_of(name, options)
        cache.mkdir(parents=True, exist_ok=True)
        path = [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
        flags = [os.environ.get("PYTENSOR_FLAGS"), f"base_compiledir={cache}", "blas__ldflags="]
        python = options.python.get(name, sys.executable)
        self.name = name
        self.process = subprocess.Popen(
            [python, "-m", "peers.worker", "JAX" if name.startswith("JAX 0") else name],
            env=os.environ | ONE_THREAD | {
                "PYTHONPATH": os.pathsep.join(filter(None, path)),
                "PYTENSOR_FLAGS": ",".join(filter(None, flags)),
                "NUMBA_CACHE_DIR": str(cache / "numba"),
                "TMPDIR": str(cache),  # or one would wait for another's compilation
                "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
            } | environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def do(self, what: str, patience: float = PATIENCE, **how) -> dict:
        """The answer to a job; {"failed": why} if there is none in time."""
        try:
            self.process.stdin.write(json.dumps({"do": what, **how}) + "\n")
            self.process.stdin.flush()
            with ThreadPoolExecutor(1) as reader:
                line = reader.submit(self.process.stdout.readline)
                try:
                    return json.loads(line.result(timeout=patience))
                except TimeoutError:
                    self.end()
                    return {"failed": f"not ready after {patience:.0f} s"}
        except (OSError, ValueError):
            return {"failed": "the process ended"}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Field:
    """Who takes part in something, each in its process, and whose turn it is."""

    def __init__(self, names, options, **environment: str):
        self.options, self.left_out = options, {}
        names = [name for name in names if self._can(name)]
        self.processes = {name: Process(name, options, **environment) for name in names}
        self.all(dict.fromkeys(names, {"what": "start"}))

    def _can(self, name: str) -> bool:
        elsewhere = name in self.options.python or name not in CONTENDERS
        if not elsewhere and (why := missing(name)):
            self.left_out[name] = why
            return False
        return True

    def all(self, jobs: dict[str, dict]) -> dict[str, dict]:
        """The answers to a job for each, some at a time; who fails is noted in `left_out`."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = pool.map(lambda name: self.processes[name].do(**jobs[name]), jobs)
            answers = dict(zip(jobs, found, strict=True))
        for name, answer in answers.items():
            if "failed" in answer:
                self.left_out[name] = answer["failed"]
        return {name: answer for name, answer in answers.items() if "failed" not in answer}

    def race(self, names, what: str, **how) -> dict[str, list[float]]:
        """Seconds per call of each, turn by turn."""
        if not names:
            return {}
        spent, times = 0.0, {name: [] for name in names}
        for turn in range(TURNS[1]):
            begin = perf_counter()
            for name in list(times):
                answer = self.processes[name].do(what, **how)
                if "failed" in answer:
                    self.left_out[name] = answer["failed"]
                    del times[name]
                else:
                    times[name].append(float(f"{answer['seconds']:.3e}"))
            longest = perf_counter() - begin
            spent += longest
            if turn + 1 >= TURNS[0] and spent + longest > self.options.seconds:
                break
        return times

    def measure(self, names) -> dict:
        """Both measures."""
        return {
            "rows": self.race(names, "row", seconds=TURN),
            "cold": self.race(names, "cold", flush=str(self.options.flush)),
        }

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.end()


def say(options, text: str) -> None:
    print(f"{perf_counter() - options.began:5.0f} s  {text}", flush=True)


def over_ours(rows: dict, *names: str) -> str:
    """How many times longer than ours, for the progress line."""
    middle = {name: np.median(times) for name, times in rows.items()}
    shown = [f"{x} {middle[x] / middle[OURS]:.3g}" for x in names if x in middle and OURS in middle]
    return "over ours: " + ", ".join(shown)


# --- a problem, its truth and its races -----------------------------------------------------------


def truth(y: np.ndarray, model: StateSpace) -> tuple[dict, float]:
    """Value and gradients of the reference solution, and how far complex steps are from them.

    Along three random directions for each array, which knows nothing of any derivation.
    """
    rng = np.random.default_rng(0)
    value, _, gradients = loglike_and_grad(y, model, method="reference")
    worst = 0.0
    for name, G in gradients.asdict().items():
        X = getattr(model, name)
        for _ in range(3):
            D = rng.standard_normal(X.shape)
            D = (D + D.T) / 2 if name in SYMMETRIC else D

            def along(step, name=name, X=X, D=D):
                return loglike(y, StateSpace(**(model.asdict() | {name: X + step[0] * D})))

            slope = complex_step(along, np.zeros(1))[0]
            worst = max(worst, abs(slope - np.sum(G * D)) / np.sum(abs(G * D)))
    if not worst < LARGEST_ERROR:
        raise ArithmeticError(f"the reference is off by {worst:.1e} from complex steps")
    return {"value": value} | {f"bar {x}": G for x, G in gradients.asdict().items()}, worst


def job_of(y, model, requested, expected: dict, options) -> dict:
    """What tells a contender to build and compile its gradient."""
    problem = options.cache / "problem.npz"
    np.savez(problem, y=y, **model.asdict(), **expected)
    return {"what": "load", "problem": str(problem), "requested": list(requested)}


def contest(field: Field, y, model, requested, label: str, only=None) -> dict:
    """Errors and times of a field on one problem; raises if one of the project's own is wrong."""
    expected, checked = truth(y, model)
    field.left_out.clear()
    chosen = [name for name in field.processes if only is None or name in only]
    job = job_of(y, model, requested, expected, field.options)
    loaded = field.all(dict.fromkeys(chosen, job))
    errors = {name: float(f"{answer['error']:.1e}") for name, answer in loaded.items()}
    if OURS not in errors:
        raise RuntimeError(f"{label}: {OURS} did not run: {field.left_out[OURS]}")
    for name in OWN:
        if not errors.get(name, 0.0) < LARGEST_ERROR:
            raise ArithmeticError(f"{label}: {name} is off by {errors[name]} of the largest entry")
    found = {
        "size": [model.m, model.p, model.r, len(y)],
        "requested": list(requested),
        "reference off complex steps": float(f"{checked:.1e}"),
        "errors": errors,
        "notes": {name: answer["note"] for name, answer in loaded.items() if answer["note"]},
        **field.measure(list(loaded)),
        "left out": dict(field.left_out),
    }
    peers = ("Standard", "Convergent", "JAX", "plain Numba", "statsmodels, smoother")
    say(field.options, f"{label}: {over_ours(found['rows'], 'ours, every step', *peers)}")
    return found


def taking_part(part: str, options) -> list[str]:
    names = [
        name for name, what in CONTENDERS.items()
        if part in what.parts and (what.quick or not options.quick)
    ]  # fmt: skip
    return names + [name for name in options.python if name not in CONTENDERS]


# --- the parts ------------------------------------------------------------------------------------


def measure_compile(options) -> dict:
    """Seconds to the first gradient of all arrays, with empty caches, then with full ones.

    Two contenders compile at once, on a core each.
    """
    names = [name for name, what in CONTENDERS.items() if what.compiles]
    names = [name for name in names if CONTENDERS[name].quick or not options.quick]
    y, model = models.random_problem(*models.ONCE)
    problem = options.cache / "first.npz"
    np.savez(problem, y=y, **model.asdict(), **truth(y, model)[0])
    left_out = {name: why for name in names if (why := missing(name))}

    def first(name):
        found = {}
        with tempfile.TemporaryDirectory() as empty:
            # What is compiled here serves the races, unless the folder was kept and is not empty.
            folder = folder_of(name, options)
            folder = Path(empty) if folder.exists() and any(folder.iterdir()) else folder
            for when in ("cold", "warm"):
                process = Process(name, options, folder)
                answer = process.do("start")
                if "failed" not in answer:
                    answer = process.do("load", problem=str(problem), requested=list(NAMES))
                process.end()
                if "failed" in answer:
                    return name, {"failed": answer["failed"]}
                found[when] = round(answer["seconds"], 3)
        say(options, f"compile {name}: {found}")
        return name, found

    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = dict(pool.map(first, [name for name in names if name not in left_out]))
    return {name: results.get(name, {"failed": left_out.get(name)}) for name in names}


def measure_random(options) -> dict:
    """Dense models; each also with a gap near the end, where a steady state ends."""
    found = {}
    sizes = (models.SIZES[1], models.SIZES[2]) if options.quick else models.SIZES
    with Field([*taking_part("r", options), *taking_part("1", options)], options) as field:
        absent = dict(field.left_out)
        for m, p, r, n in sizes:
            label = f"({m}, {p}, {r}, {n})"
            y, model = models.random_problem(m, p, r, n)
            once = (m, p, r, n) == models.ONCE
            only = None if once else taking_part("r", options)
            entry = contest(field, y, model, NAMES, label, only)
            steady = ours.steady_step(y, model)
            entry |= {
                "steady": steady,
                "counts": ours.counts(y, model, steady=steady),
                "counts, every step": ours.counts(y, model, steady=n),
            }
            gap = y.copy()
            gap[-3, 0] = np.nan
            entry["gap"] = contest(
                field, gap, model, NAMES, f"{label}, a gap", taking_part("r", options)
            )
            for each in (entry, entry["gap"]):
                each["left out"] |= absent
            found[label] = entry
    return found


def measure_real(options) -> dict:
    """Value and the gradients that the model's parameters need, filter against filter."""
    found = {}
    problems = models.real_problems()
    with Field(taking_part("m", options), options) as field:
        absent = dict(field.left_out)
        for label in list(problems)[:2] if options.quick else problems:
            y, model, requested = problems[label]
            entry = contest(field, y, model, requested, label)
            steady = ours.steady_step(y, model)
            entry |= {"steady": steady, "counts": ours.counts(y, model, requested, steady=steady)}
            entry["left out"] |= absent
            found[label] = entry
    return found


WHOLE = {
    "closed form": ("closed_form", "NUMBA"),
    "closed form, every step": ("every_step", "NUMBA"),
    "closed form, JAX": ("closed_form", "JAX"),
    "Standard": ("standard", "NUMBA"),
    "Standard, JAX": ("standard", "JAX"),
}


AGAIN = "model: closed form", "model: Standard"


def again(name: str, job: dict, options) -> dict:
    """Seconds by phase of building, compiling and calling a model in a process with full caches."""
    process = Process(name, options)
    process.do("start")
    answer = process.do(job["what"], **{x: how for x, how in job.items() if x != "what"})
    process.end()
    return answer.get("phases", answer)


def measure_whole(options) -> dict:
    """Log-density and gradient of whole PyMC models: two filters, two backends.

    Beside them the unit of the other tables, statsmodels' likelihood alone, of a model of the same
    sizes.
    """
    problems = models.real_problems()
    labels = list(problems)
    kinds = [name for name in WHOLE if not options.quick or name == "closed form"]
    found = {}
    if missing("Standard"):
        return {}
    for label in labels[:1] if options.quick else labels:
        with Field([*(f"model: {name}" for name in kinds), UNIT], options) as field:
            units = {}
            y, model, requested = problems[label]
            if UNIT in field.processes:
                job = job_of(y, model, requested, {"value": loglike(y, model)}, options)
                units = field.all({UNIT: job})
            jobs = {
                f"model: {name}": {
                    "what": "model", "label": label, "filter_type": WHOLE[name][0],
                    "mode": WHOLE[name][1],
                } for name in kinds
            }  # fmt: skip
            loaded = field.all(jobs)
            if not loaded:
                found[label] = {"left out": dict(field.left_out)}
                continue
            first = next(iter(loaded.values()))
            slopes = np.array(first["slopes"])
            entry = field.measure([*loaded, *units]) | {
                "build and compile": {x: round(a["seconds"], 1) for x, a in loaded.items()},
                "again": {x: again(x, jobs[x], options) for x in loaded if x in AGAIN},
                "differences": {
                    name: {
                        "logp": float(f"{abs(a['value'] / first['value'] - 1):.1e}"),
                        "dlogp": float(f"{relative_error(np.array(a['slopes']), slopes):.1e}"),
                    }
                    for name, a in loaded.items()
                },
                "left out": dict(field.left_out),
            }  # fmt: skip
        # The names without the prefix that told the process what it is.
        found[label] = {
            what: {x.removeprefix("model: "): X for x, X in those.items()}
            for what, those in entry.items()
        }
        say(options, f"whole model, {label}: {found[label]['build and compile']}")
    return found


def measure_scaling(options) -> dict:
    """One length, one number of states and one season at a time; calls in a row."""
    lengths = (100, 1000) if options.quick else (100, 300, 1000, 3000, 10000)
    states = (2, 8) if options.quick else (2, 4, 8, 16, 32, 64)
    seasons = (4, 12) if options.quick else (4, 12, 24, 52, 104)
    problems = [("n", n, models.random_problem(13, 1, 3, n), NAMES) for n in lengths]
    problems += [("m", m, models.random_problem(m, 1, 2, 200), NAMES) for m in states]
    needed = ("a0", "P0", "H", "Q")
    problems += [("season", s, models.structural_problem(s, 200), needed) for s in seasons]
    names = [OURS, "ours, every step", "plain Numba", "JAX, not unrolled", "statsmodels, value"]
    names += [] if options.quick else ["Standard"]
    found = {"n": {}, "m": {}, "season": {}}
    with Field(names, options) as field:
        for axis, size, (y, model), requested in problems:
            problem = options.cache / "problem.npz"
            bars = {f"bar {x}": G for x, G in loglike_and_grad(y, model)[2].asdict().items()}
            np.savez(problem, y=y, **model.asdict(), value=loglike(y, model), **bars)
            job = {"what": "load", "problem": str(problem), "requested": list(requested)}
            chosen = [x for x in field.processes if axis != "season" or x != "Standard"]
            loaded = field.all(dict.fromkeys(chosen, job))
            found[axis][str(size)] = field.race(list(loaded), "row", seconds=TURN)
        say(options, "scaling is measured")
    return found


def measure_limits(options) -> dict:
    return limits.measure()


def measure_memory(options) -> dict:
    """Bytes that a call needs beyond what was there before it, for two lengths (Linux)."""
    if not Path("/proc/self/clear_refs").exists():
        return {}
    names = ["ours", "ours, every step", "ours, value", "plain Numba", "JAX", "JAX, closed form"]
    names += ["statsmodels, value", "statsmodels, smoother"]
    names += [] if options.quick else ["Standard", "Convergent"]
    # Large blocks go back to the system at once, so that the peak is the call's own.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    found = {}
    for name in [x for x in names if not missing(x)]:
        peaks = []
        for n in MEMORY_LENGTHS:
            y, model = models.random_problem(*MEMORY_SIZE, n)
            bars = {f"bar {x}": G for x, G in loglike_and_grad(y, model)[2].asdict().items()}
            problem = options.cache / "memory.npz"
            np.savez(problem, y=y, **model.asdict(), value=loglike(y, model), **bars)
            process = Process(name, options, **environment)
            process.do("start")
            process.do("load", problem=str(problem), requested=list(NAMES))
            peaks.append(process.do("peak").get("bytes"))
            process.end()
        found[name] = peaks if None not in peaks else None
    say(options, "memory is measured")
    return {"size": MEMORY_SIZE, "lengths": MEMORY_LENGTHS, "bytes": found}


PARTS = {
    "limits": measure_limits,
    "compile": measure_compile,
    "random": measure_random,
    "real": measure_real,
    "whole": measure_whole,
    "scaling": measure_scaling,
    "memory": measure_memory,
}


# --- the record -----------------------------------------------------------------------------------


def cpuinfo() -> dict[str, str]:
    """What Linux says of the first processor; nothing elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    told = (line.split(":", 1) for line in lines if ":" in line)
    return {key.strip(): value.strip() for key, value in told}


def generation() -> str:
    """Family and model of the processor, where the system tells: one name may stand for several."""
    told = cpuinfo()
    found = [f"{key} {told[key]}" for key in ("cpu family", "model") if key in told]
    return ", ".join(found) or "unknown"


def vector_width() -> str:
    """What the processor says of its vectors."""
    told = cpuinfo()
    if "flags" not in told:
        return "unknown"
    flags = told["flags"].split()
    known = {"avx512f": "AVX-512, 512 bit", "avx2": "AVX2, 256 bit", "asimd": "NEON, 128 bit"}
    return next((width for flag, width in known.items() if flag in flags), "128 bit")


def last_cache() -> int:
    """Bytes of the largest cache; 64 MiB where the system does not tell."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(file.read_text().strip()[:-1]) << 10 for file in sizes), default=64 << 20)


def here(options) -> dict:
    installed = {d.name.lower(): d.version for d in metadata.distributions() if d.name}
    peers = {name: installed[name] for name in ("dynamax", "torch") if name in installed}
    for name, python in options.python.items():
        peers[f"{name} in an environment of its own"] = Path(python).name
    return machine() | {
        "generation": generation(),
        "peers": peers,
        "vectors": vector_width(),
        "last cache": last_cache(),
    }


def write(path: Path, part: str, found: dict, where: dict) -> None:
    """Put a part into the record; the others stay as they are, if they are of this machine."""
    record = json.loads(path.read_text("utf-8")) if path.exists() else {}
    old = record.get("machine", where)
    same = all(old.get(x, where[x]) == where[x] for x in ("processor", "generation"))
    if record.get("format") != 2 or not same:
        record = {}
    record["format"] = 2
    record[part] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "OPENBLAS_CORETYPE": os.environ.get("OPENBLAS_CORETYPE"),
        "found": found,
    }
    record["machine"] = where
    record["contenders"] = {name: what.why for name, what in CONTENDERS.items() if what.why}
    write_record(record, path)


def main(options) -> None:
    where = here(options)
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if busy > 0.5:
        say(options, f"the machine is busy (load {busy:.1f}): its times are no record")
    # The parts' flush: every process maps the same file, so it is in memory once.
    options.flush = options.cache / "flush"
    np.ones(max(64 << 20, last_cache() * 5 // 4) // 8).tofile(options.flush)
    for name, measure in PARTS.items():
        if name in options.only:
            say(options, f"-- {name}")
            write(options.record, name, measure(options), where)
    say(options, "done")


def named_python(text: str) -> tuple[str, str]:
    name, _, executable = text.partition("=")
    if name not in CONTENDERS and not name.startswith("JAX 0"):
        raise argparse.ArgumentTypeError(f"no contender {name!r}, only {', '.join(CONTENDERS)}")
    return name, executable


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--quick", action="store_true", help="few sizes and contenders (a trial)")
    parser.add_argument("--seconds", type=float, default=3.0, help="budget of each race")
    parser.add_argument("--record", type=Path, default=RECORD, help="file to write")
    parser.add_argument("--cache", type=Path, help="folder that keeps what is compiled")
    parser.add_argument(
        "--python", type=named_python, nargs="+", action="extend", default=[], metavar="NAME=FILE"
    )
    options = parser.parse_args()
    options.began, options.python = perf_counter(), dict(options.python)
    if options.quick:
        options.seconds = min(options.seconds, 0.5)
        if options.record == RECORD:
            parser.error("a trial does not replace the record: say --record FILE")
    threadpool_limits(1)
    with tempfile.TemporaryDirectory() as folder:
        options.cache = (options.cache or Path(folder)).resolve()
        options.cache.mkdir(parents=True, exist_ok=True)
        main(options)
