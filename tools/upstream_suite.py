"""pymc-extras' own tests of its state space models, with our filter in the standard one's place.

    python -m tools.upstream_suite SOURCES [--theirs] [--smoother] [--python] [options of pytest]

SOURCES is an unpacked source distribution of pymc-extras, of the version that is installed (the
tests are in it, not in the wheel; `pip download --no-binary :all: --no-deps pymc-extras==...`).
Wherever a test or pymc-extras itself asks for StandardFilter or for the filter type "standard", it
gets ours; with ``--smoother`` the disturbance smoother is ours, too. What fails is run once more
with nothing replaced: what fails then as well is no fault of ours, and only the rest counts.
``--theirs`` replaces nothing from the start. With ``--python`` PyTensor runs its Ops in Python
where a test does not say how: the same graphs in minutes, as all but a few tests call what they
compile once or twice (our Ops are compiled in any case). Nothing is fetched.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

USAGE = __doc__.split("\n\n")[1].strip()
ROOT = Path(__file__).resolve().parents[1]
FLAGS = "--theirs", "--smoother", "--python"
IN_PYTHON = "cxx=,linker=py"
COMPILED = "TestSimulationSmoother"  # calls what it compiles some 20,000 times
# Tests of how the standard filter is made, by what their names begin with, and why we fail them.
NOT_OURS = {
    "test_make_filter_outputs_skips_the_smoother": "counts Scans; our filter is an Op without one",
}


class Failures:
    """A plugin of pytest: which tests failed, and which are not for our filter."""

    def __init__(self, not_ours: dict[str, str]):
        self.not_ours, self.failed = not_ours, []

    def pytest_collection_modifyitems(self, items) -> None:
        for item in items:
            for name, reason in self.not_ours.items():
                if item.name.startswith(name):
                    item.add_marker(pytest.mark.xfail(reason=reason))

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)


class InPython:
    """A plugin of pytest: the few tests that are too slow in Python are compiled after all."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        from pytensor import config

        with config.change_flags(mode="NUMBA" if COMPILED in item.nodeid else config.mode):
            return (yield)


class InPlace:
    """A plugin of pytest: one class of pymc-extras instead of another, under every name."""

    def __init__(self, theirs: type, ours: type):
        self.theirs, self.ours, self.built = theirs, ours, 0

    def replace(self) -> None:
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] in ("pymc_extras", "tests"):
                self._in(vars(module))

    def _in(self, names: dict) -> None:
        for name, value in list(names.items()):
            if value is self.theirs:
                names[name] = self.ours
            elif isinstance(value, dict) and name.endswith("_FACTORY"):
                self._in(value)

    def pytest_sessionstart(self) -> None:
        self.replace()
        build = self.ours.build_graph

        def counted(*arguments, **named):
            self.built += 1
            return build(*arguments, **named)

        self.ours.build_graph = counted

    def pytest_terminal_summary(self, terminalreporter) -> None:
        line = f"{self.ours.__name__} for {self.theirs.__name__}: {self.built} graphs built"
        terminalreporter.write_line(line)


def check_version(sources: Path) -> None:
    """The tests must be those of the version that they test."""
    found = re.search(r"^Version: (.*)$", (sources / "PKG-INFO").read_text(), re.MULTILINE)
    installed = importlib.metadata.version("pymc-extras")
    if found is None or found[1] != installed:
        raise SystemExit(
            f"{sources} holds pymc-extras {found and found[1]}, but {installed} is installed"
        )


def fail_without_us(sources: Path, failed: list[str], options: list[str]) -> list[str]:
    """Which of the tests fail in pymc-extras as it is."""
    command = [sys.executable, "-m", "tools.upstream_suite", str(sources), "--theirs", *options]
    run = subprocess.run(
        [*command, "--tb=no", "-rfE", *failed], cwd=ROOT, capture_output=True, text=True
    )
    lines = [line + " - " for line in run.stdout.splitlines()]
    names = {test: (f"FAILED {test} - ", f"ERROR {test} - ") for test in failed}
    return [test for test in failed if any(line.startswith(names[test]) for line in lines)]


def main(arguments: list[str]) -> int:
    if not arguments or not Path(arguments[0], "tests", "statespace").is_dir():
        raise SystemExit(f"usage: {USAGE}")
    sources, *options = Path(arguments[0]).resolve(), *arguments[1:]
    check_version(sources)
    theirs, smoother, python = (flag in options for flag in FLAGS)
    options = [x for x in options if x not in FLAGS]
    if python:  # before anything imports PyTensor
        given = os.environ.get("PYTENSOR_FLAGS")
        os.environ["PYTENSOR_FLAGS"] = f"{given},{IN_PYTHON}" if given else IN_PYTHON

    # The installed package, before the folder of the sources comes first on the path.
    from pymc_extras.statespace.filters import DisturbanceSmoother, StandardFilter

    from helpers.kalman.pymc import ClosedFormFilter, ClosedFormSmoother

    failures = Failures({} if theirs else NOT_OURS)
    plugins = [failures] + [InPython()] * python
    if not theirs:
        plugins.append(InPlace(StandardFilter, ClosedFormFilter))
        if smoother:
            plugins.append(InPlace(DisturbanceSmoother, ClosedFormSmoother))
    os.chdir(sources)
    sys.path.insert(0, str(sources))
    if not any(Path(x.split("::")[0]).exists() for x in options):
        options.append("tests/statespace")
    # Their settings make errors of warnings, which a newer pandas or PyTensor gives.
    settings = ["-q", "--rootdir", str(sources)]
    settings += ["-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning"]
    code = pytest.main([*settings, *options], plugins=plugins)
    if theirs or code != pytest.ExitCode.TESTS_FAILED:
        return code
    as_they_are = fail_without_us(sources, failures.failed, ["--python"] * python)
    ours = [test for test in failures.failed if test not in as_they_are]
    counts = f"{len(as_they_are)} failed without us as well, {len(ours)} with us alone"
    print(counts, *ours, sep="\n")
    return code if ours else pytest.ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
