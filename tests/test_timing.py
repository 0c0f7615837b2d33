"""Timings by a clock that the contenders move themselves: nothing here depends on real time."""

import gc
import io
import json
import math
import os
import platform
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import timing
from helpers.timing import Timings, compare, machine, progress


class Clock:
    """A perf_counter that moves only when a contender takes time."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def __call__(self):
        return self.now

    def contender(self, name, *durations):
        """Takes its durations in turn, the last one for ever after."""
        remaining = list(durations)

        def function():
            self.calls.append(name)
            self.now += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return function


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "perf_counter", clock)
    return clock


@pytest.fixture
def timings():
    return Timings(
        {"slow": (2.0, 4.0, 9.0), "fast": (1.0, 1.0, 3.0)},
        "hand-made",
        {"processor": "abacus"},
        "2024-02-29T00:00:00+00:00",
    )


def test_contenders_take_turns(clock):
    contenders = {name: clock.contender(name, 1e-3) for name in "ABC"}
    result = compare(contenders, repeats=3, warmup=2, label="turns")
    assert clock.calls == list("ABC") * 5
    assert list(result.seconds) == list("ABC")
    assert all(len(times) == 3 for times in result.seconds.values())
    assert result.label == "turns"


def test_warmup_is_not_counted(clock):
    cold = clock.contender("cold", 100.0, 50.0, 1e-3)
    result = compare({"cold": cold}, repeats=4, warmup=2)
    assert result.seconds["cold"] == pytest.approx([1e-3] * 4)


def test_fast_contender_is_called_in_an_inner_loop(clock):
    contenders = {"fast": clock.contender("fast", 1e-6), "slow": clock.contender("slow", 1e-3)}
    result = compare(contenders, repeats=2, warmup=1)
    runs = [(name, len(list(run))) for name, run in groupby(clock.calls)]
    assert runs[-4:] == [("fast", 256), ("slow", 1)] * 2  # the power of two past 200 microseconds
    assert result.seconds["fast"] == pytest.approx([1e-6] * 2)  # per call
    assert result.seconds["slow"] == pytest.approx([1e-3] * 2)


def test_contender_too_fast_for_the_clock_ends(clock, monkeypatch):
    monkeypatch.setattr(timing, "ENOUGH", 1e-6)
    nothing = clock.contender("nothing", 1e-12)
    assert compare({"nothing": nothing}, repeats=1).seconds["nothing"] == pytest.approx([1e-12])


@pytest.mark.parametrize(
    ("duration", "seconds", "rounds"),
    [(0.24, 5.0, 20), (0.3, 5.0, 16), (4.0, 5.0, 5), (0.001, 5.0, 500)],
)
def test_as_many_rounds_as_fit(clock, monkeypatch, duration, seconds, rounds):
    monkeypatch.delenv("TIMING_SECONDS")  # which is set for every test
    result = compare({"a": clock.contender("a", duration)}, seconds=seconds)
    assert len(result.seconds["a"]) == rounds


@pytest.mark.parametrize(("least", "rounds"), [("1.2", 5), ("2.5", 10), ("60", 20)])
def test_the_environment_shortens_what_is_timed(clock, monkeypatch, least, rounds):
    monkeypatch.setenv("TIMING_SECONDS", least)
    result = compare({"a": clock.contender("a", 0.24)}, seconds=5.0)
    assert len(result.seconds["a"]) == rounds


@pytest.mark.parametrize("was_on", [True, False])
def test_no_garbage_collection_during_calls(clock, was_on):
    seen, sleep = [], clock.contender("a", 1e-3)

    def contender():
        seen.append(gc.isenabled())
        sleep()
        if len(seen) == 3:
            raise RuntimeError("contender fails")

    before = gc.isenabled()
    try:
        gc.enable() if was_on else gc.disable()
        with pytest.raises(RuntimeError, match="contender fails"):
            compare({"a": contender}, repeats=5, warmup=1)
        assert seen == [False] * 3
        assert gc.isenabled() == was_on
    finally:
        gc.enable() if before else gc.disable()


@pytest.mark.parametrize(
    ("contenders", "options", "message"),
    [
        ({}, {}, "nothing to compare"),
        ({"a": 3.0}, {}, "contender 'a' is a float, expected a function"),
        ({"a": int}, {"repeats": 0}, "repeats=0"),
        ({"a": int}, {"warmup": 0}, "warmup=0"),
        ({"a": int}, {"seconds": 0}, "seconds=0"),
        ({"a": int}, {"seconds": math.nan}, "seconds=nan"),
    ],
)
def test_compare_refuses(contenders, options, message):
    with pytest.raises(ValueError, match=message):
        compare(contenders, **options)


def test_ratio_is_of_medians_with_extremes_of_rounds(timings):
    assert timings.median("slow") == 4.0
    assert timings.ratio("slow", "fast") == (4.0, 2.0, 4.0)
    assert timings.ratio("fast", "slow") == (0.25, 0.25, 0.5)
    with pytest.raises(KeyError, match="no contender 'quick', only 'slow', 'fast'"):
        timings.ratio("slow", "quick")


positive = st.floats(1e-9, 1e3)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=12))
def test_ratio_of_medians_lies_between_the_extremes(rounds):
    slow, fast = zip(*rounds, strict=True)
    middle, low, high = Timings({"slow": slow, "fast": fast}).ratio("slow", "fast")
    assert low * (1 - 1e-12) <= middle <= high * (1 + 1e-12)


def test_table(timings):
    assert timings.table(reference="fast").splitlines() == [
        "time relative to fast        range over 3 rounds",
        "slow                   4.00  2.00 to 4.00",
        "fast                   1.00  1.00 to 1.00",
    ]
    assert "relative to slow" in timings.table()


@pytest.mark.parametrize(
    ("x", "text"), [(12345.0, "12,345"), (12.34, "12.3"), (1.0, "1.00"), (0.00123, "0.00123")]
)
def test_short_numbers(x, text):
    assert timing._short(x) == text


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        ({}, "no contenders"),
        ({"a": ()}, "same number of rounds"),
        ({"a": (1.0,), "b": (1.0, 2.0)}, "same number of rounds"),
        ({"a": (1.0, 0.0)}, "time of 'a'"),
        ({"a": (math.nan,)}, "time of 'a'"),
    ],
)
def test_timings_refuse(seconds, message):
    with pytest.raises(ValueError, match=message):
        Timings(seconds)


def test_json_round_trip(tmp_path, clock):
    path = tmp_path / "results" / "record.json"
    record = compare({"µ": clock.contender("µ", 1 / 3)}, repeats=3, label='a "label"')
    record.to_json(path)
    assert Timings.from_json(path) == record
    assert os.listdir(path.parent) == ["record.json"]


@pytest.mark.parametrize("failing", ["write_text", "replace"])
def test_failed_write_leaves_the_old_record(tmp_path, monkeypatch, timings, failing):
    path = tmp_path / "record.json"
    path.write_text("old")

    def half_written(self, text, **options):
        with open(self, "w") as file:
            file.write(text[:10])
        raise OSError("disk full")

    def not_replaced(*paths):
        raise OSError("disk full")

    if failing == "write_text":
        monkeypatch.setattr(Path, "write_text", half_written)
    else:
        monkeypatch.setattr(os, "replace", not_replaced)
    with pytest.raises(OSError, match="disk full"):
        timings.to_json(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["record.json"]


def test_what_json_cannot_hold_writes_nothing(tmp_path):
    with pytest.raises(TypeError):
        Timings({"a": (1.0,)}, machine={"processor": object()}).to_json(tmp_path / "record.json")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2]",
        "{}",
        '{"seconds": [1]}',
        '{"seconds": {"a": "fast"}}',
        '{"seconds": {"a": 1}}',
        '{"seconds": {"a": [1, -1]}}',
        '{"seconds": {"a": [1]}, "colour": "red"}',
        '{"seconds": {"a": [1',
    ],
)
def test_from_json_refuses_other_files(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is not a record of timings"):
        Timings.from_json(path)


def test_from_json_of_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        Timings.from_json(tmp_path / "missing.json")


def test_machine_describes_hardware_and_versions():
    description = machine()
    assert json.loads(json.dumps(description)) == description
    assert description["processor"]
    assert description["cores"] == os.cpu_count()
    assert description["packages"]["numpy"] == sys.modules["numpy"].__version__
    assert "pymc-extras" in description["packages"]
    assert description["blas"]


def test_machine_names_no_one():
    text = json.dumps(machine())
    assert not re.search(rf"\b{re.escape(platform.node())}\b", text)
    assert str(Path.home()) not in text
    assert os.sep + "lib" not in text


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_silent_when_nobody_watches(capfd, monkeypatch):
    monkeypatch.setattr(timing, "QUIET", -1.0)
    assert list(progress(range(3), "steps")) == [0, 1, 2]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("iterable", [[1, 2, 3], iter([1, 2, 3])], ids=["sized", "unsized"])
def test_progress_shows_on_a_terminal_if_long(monkeypatch, clock, iterable):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for _ in progress(iterable, "steps [of 3]"):
        assert "steps" not in terminal.getvalue() or clock.now > timing.QUIET
        clock.now += 1.5
    assert "steps [of 3]" in terminal.getvalue()


def test_progress_stays_away_if_short(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress([1, 2], "steps")) == [1, 2]
    assert terminal.getvalue() == ""


def test_record_has_a_list_a_line(tmp_path):
    record = {"seconds": {"one": [1.5, 2.5], "none": []}, "name": "text [in] brackets"}
    path = tmp_path / "new" / "record.json"
    timing.write_record(record, path)
    text = path.read_text(encoding="utf-8")
    assert json.loads(text) == record
    assert '  "one": [ 1.5, 2.5 ],' in text.splitlines() and text.endswith("}\n")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux ties threads to cores")
def test_a_timed_process_keeps_to_one_core():
    """Threads that were there before as well as those to come."""
    program = """
import os, sys, threading
sys.path.insert(0, sys.argv[1])
import one_core
done, found = threading.Event(), []
def early():
    done.wait()
    found.append(len(os.sched_getaffinity(0)))
thread = threading.Thread(target=early)
thread.start()
one_core.keep_to_one_core()
done.set()
thread.join()
late = threading.Thread(target=lambda: found.append(len(os.sched_getaffinity(0))))
late.start()
late.join()
print(found + [len(os.sched_getaffinity(0))])
"""
    folder = Path(__file__).parents[1] / "benchmarks"
    done = subprocess.run(
        [sys.executable, "-c", program, folder], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[1, 1, 1]"


def test_a_contender_has_as_many_cores_as_it_says_threads():
    """Two threads on one core take longer than one, and a record would say so of the package."""
    program = """
import sys
sys.path.insert(0, sys.argv[1])
from peers.worker import Worker
print([Worker(name).threads for name in ("own: two threads", "own", "ours", "JAX")])
"""
    folder = Path(__file__).parents[1] / "benchmarks"
    done = subprocess.run(
        [sys.executable, "-c", program, folder], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[2, 1, 1, 1]"
