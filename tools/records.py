"""Make the page "Records": everything that the race of the Kalman filters measured, as tables.

The chapter "Benchmarks" tells what follows from it.
"""

import json
from collections.abc import Iterable

import numpy as np

from tools import book

PAGE = "book/records.md"
RESULTS = book.ROOT / "benchmarks/results"
UNIT = "statsmodels, value"
OURS = ("ours", "ours, every step")
PARTS = ("limits", "compile", "random", "real", "whole", "scaling", "memory")

HEAD = """\
(records)=
# Records of the Kalman benchmarks

% Made by `make notebooks` from benchmarks/results, not by hand.

{doc}`../notebooks/kalman/14-benchmarks` says how these measurements were made, and what follows
from them. Every number is a ratio of medians unless a unit is named. Where a cell has two numbers,
the first divides by the time of *ours* with its steady state, which is what a user gets from a
model that settles; the second divides by the time of *ours* with every step in full, which is what
remains for a model that does not. *In a row* means that each contender, in its turn, is called
repeatedly; *cold* means one call after more bytes were read than the last cache holds. A random
model is named by its numbers of states, series, shocks and steps. "All gradients" means the value
and the gradients for the nine arrays. An error is the largest error of the gradients, relative to
the largest entry of the reference solution; it is infinite where a gradient is not finite.
"""


def short(x: float | None) -> str:
    return "–" if x is None or np.isnan(x) else f"{float(f'{x:.3g}'):g}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---", *["---:"] * (len(lines[0]) - 1)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ratio(rows: dict, slow: str, fast: str) -> float | None:
    if rows and slow in rows and fast in rows:
        return float(np.median(rows[slow]) / np.median(rows[fast]))
    return None


def both(rows: dict, slow: str, ours: tuple[str, str] = OURS) -> str:
    found = [short(r) for fast in ours if (r := ratio(rows, slow, fast)) is not None]
    return " / ".join(found) or "–"


def all_contenders(models: dict, rows_of) -> str:
    """Each contender's time on each model, over ours."""
    rows = {label: rows_of(entry) for label, entry in models.items()}
    rows = {label: found for label, found in rows.items() if found}
    names = dict.fromkeys(x for found in rows.values() for x in found)
    names = [x for x in names if x not in OURS and "value" not in x]
    lines = [[name, *(both(found, name) for found in rows.values())] for name in names]
    return table(["time over ours", *rows], lines)


def contenders(record: dict) -> str:
    where = record["machine"]
    parts = [name for name in PARTS if "commit" in record[name]]
    packages = sorted((where["packages"] | where["peers"]).items())
    lines = [
        f"{where['processor']}, {where['generation']}, {where.get('vectors', '')}, one thread; "
        f"recorded {record['random']['date'][:10]}. Commits: "
        + ", ".join(f"{name} {record[name]['commit']}" for name in parts) + ".",
        "",
        *(f"- *{name}*: {why}" for name, why in record["contenders"].items()),
        "",
        "Versions: "
        + "; ".join(f"{x} {v}".removesuffix(" python") for x, v in packages)
        + ".",
    ]  # fmt: skip
    absent = {}
    models = record["random"]["found"] | record["real"]["found"]
    for entry in [*models.values(), *record["whole"]["found"].values()]:
        absent |= entry.get("left out", {})
        absent |= {f"{x}, with a gap": why
                   for x, why in entry.get("gap", {}).get("left out", {}).items()}  # fmt: skip
    if absent:
        lines += ["", "Left out:", ""]
        lines += [f"- {name}: {' '.join(str(why).split())}" for name, why in absent.items()]
    return "\n".join(lines)


def values(models: dict) -> str:
    lines = []
    for label, entry in models.items():
        rows, counts = entry["rows"], entry["counts, every step"]
        lines.append([
            label, short(entry["steady"]),
            short(counts["total"] / entry["counts"]["total"]),
            short(ratio(rows, "ours, every step", "ours, value, every step")),
            short(counts["total"] / counts["forward"]),
            short(ratio(rows, "ours, value", UNIT)),
        ])  # fmt: skip
    counted = "multiply-adds, every step / steady"
    timed = "time, all / value, every step"
    work = "multiply-adds, all / value"
    head = ["model", "steady at", counted, timed, work, "our value / statsmodels' value"]
    return table(head, lines)


def of_value(models: dict) -> str:
    names = ("ours, value", "ours", "ours, every step")
    lines = [
        [label, f"{entry['steady']} of {entry['size'][3]}"]
        + [short(ratio(entry["rows"], name, UNIT)) for name in names]
        + [short(ratio(entry["cold"], "ours", UNIT))]
        for label, entry in models.items()
    ]
    head = ["over statsmodels' value", "steady at", *names, "ours, cold"]
    return table(head, lines)


def whole_models(models: dict) -> str:
    lines = []
    for label, entry in models.items():
        pair = ("closed form", "closed form, every step")
        for name in entry["rows"]:
            if name not in pair:
                cells = [both(entry.get(kind), name, pair) for kind in ("rows", "cold")]
                lines.append([label, name, *cells])
    return table(["model", "contender", "in a row", "cold"], lines)


def waiting(models: dict) -> str:
    lines = []
    for label, entry in models.items():
        for name, seconds in entry["build and compile"].items():
            again = entry["again"].get(name, {})
            lines.append([label, name, short(seconds), *(short(x) for x in again.values())])
    width = max(map(len, lines))
    lines = [line + ["–"] * (width - len(line)) for line in lines]
    head = ["model", "filter", "first time", "model again", "function", "first call"]
    return table(head[:width], lines)


def errors(models: dict) -> str:
    names = dict.fromkeys(x for e in models.values() for x in e["errors"] if "value" not in x)

    def power(x):
        return "–" if x is None else f"{np.ceil(np.log10(max(x, 1e-16))):.0f}"

    lines = [[x, *(power(e["errors"].get(x)) for e in models.values())] for x in names]
    return table(["log10 of the error", *models], lines)


def growth(scaling: dict) -> str:
    slopes = {"n": (1, "ours, every step"), "m": (3, "ours, every step"), "season": (2, "ours")}
    lines = []
    for axis, (slope, counted) in slopes.items():
        (x0, first), (x1, last) = list(scaling[axis].items())[-2:]
        for name in last.keys() & first.keys():
            times = np.median(last[name]) / np.median(first[name])
            power = np.log(times) / np.log(int(x1) / int(x0))
            expected = str(slope) if name == counted else "–"
            lines.append([f"{axis}, {x0} to {x1}", name, f"{power:.1f}", expected])
    return table(["from, to", "contender", "measured power", "expected power"], sorted(lines))


def bounds(limits: dict, models: dict) -> str:
    best = max(*limits["products"].values(), limits["blas"])
    lines = []
    for label, entry in models.items():
        seconds = np.median(entry["rows"]["ours"])
        touched = 2 * entry["steady"] * entry["counts"]["bytes per step"] / limits["copy"]
        arithmetic = entry["counts"]["total"] / best
        lines.append([label, f"{seconds / arithmetic:.1f}", f"{seconds / touched:.1f}"])
    rates = ", ".join(f"{m}: {rate / 1e9:.0f}" for m, rate in limits["products"].items())
    said = (f"Products in registers, 10⁹ multiply-adds a second by size: {rates}. BLAS "
            f"{limits['blas'] / 1e9:.0f}. Copy {limits['copy'] / 1e9:.0f} GB/s.")  # fmt: skip
    head = ["model", "measured / arithmetic at the best rate", "measured / memory"]
    return f"{said}\n\n{table(head, lines)}"


def memory(found: dict) -> str:
    short_, long = found["lengths"]
    lines = [[name, f"{(x[1] - x[0]) / (long - short_):.0f}"]
             for name, x in found["bytes"].items() if x]  # fmt: skip
    return table(["contender", "bytes a step"], lines)


def compiling(found: dict) -> str:
    lines = [[x, short(e["cold"]), short(e["warm"])] for x, e in found.items() if e.get("cold")]
    return table(["seconds to the first gradient", "empty caches", "full caches"], lines)


def behind(models: dict) -> str:
    """Every race in which ours is not the fastest."""
    lines = []
    for label, entry in models.items():
        for kind, rows in (("in a row", entry["rows"]), ("cold", entry["cold"]),
                           ("with a gap", entry.get("gap", {}).get("rows"))):  # fmt: skip
            for name in rows or {}:
                for fast in OURS:
                    r = None if name.startswith("ours") else ratio(rows, name, fast)
                    if r and r < 1:
                        lines.append([label, kind, name, fast, short(r)])
    return table(["model", "measure", "faster", "than", "its time / ours"], lines)


def make() -> str:
    record = json.loads((RESULTS / "kalman_peers.json").read_text(encoding="utf-8"))
    second = json.loads((RESULTS / "kalman_peers_second.json").read_text(encoding="utf-8"))
    part = {name: record[name]["found"] for name in PARTS}
    models = part["random"] | part["real"]
    sections = {
        "Machine and contenders": contenders(record),
        "Random models, in a row": all_contenders(part["random"], lambda x: x["rows"]),
        "Random models, cold": all_contenders(part["random"], lambda x: x["cold"]),
        "Random models, with a gap near the end":
            all_contenders(part["random"], lambda x: x["gap"]["rows"]),
        "A gradient in terms of values": values(part["random"]),
        "Models that people fit, over statsmodels' likelihood": of_value(part["real"]),
        "Models that people fit, in a row": all_contenders(part["real"], lambda x: x["rows"]),
        "The same on a second machine": of_value(second["real"]["found"]),
        "Whole PyMC models, over the closed form": whole_models(part["whole"]),
        "Whole PyMC models, seconds to build and compile": waiting(part["whole"]),
        "Where ours is not the fastest": behind(models),
        "Errors, random models": errors(part["random"]),
        "Errors, models that people fit": errors(part["real"]),
        "Growth of the time with a power of the size": growth(part["scaling"]),
        "Distance from the limits": bounds(part["limits"], part["random"]),
        "Compile time": compiling(part["compile"]),
        "Memory": memory(part["memory"]),
    }  # fmt: skip
    return HEAD + "".join(f"\n## {title}\n\n{text}\n" for title, text in sections.items())


def write() -> None:
    (book.ROOT / PAGE).write_text(make(), encoding="utf-8")
