"""pymc-extras' own tests of its state space models, with our filter in the standard one's place.

    python -m tools.upstream_suite SOURCES [--theirs] [--smoother] [options of pytest]

SOURCES is an unpacked source distribution of pymc-extras, of the version that is installed (the
tests are in it, not in the wheel; `pip download --no-binary :all: --no-deps pymc-extras==...`).
Wherever a test or pymc-extras itself asks for StandardFilter or for the filter type "standard", it
gets ours; with ``--smoother`` the disturbance smoother is ours, too. ``--theirs`` replaces nothing:
what fails then is no fault of ours. Nothing is fetched.
"""

import importlib.metadata
import os
import re
import sys
from pathlib import Path

import pytest

USAGE = __doc__.split("\n\n")[1].strip()


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


def main(arguments: list[str]) -> int:
    if not arguments or not Path(arguments[0], "tests", "statespace").is_dir():
        raise SystemExit(f"usage: {USAGE}")
    sources, *options = Path(arguments[0]).resolve(), *arguments[1:]
    check_version(sources)
    flags = {x: x in options for x in ("--theirs", "--smoother")}
    options = [x for x in options if x not in flags]

    # The installed package, before the folder of the sources comes first on the path.
    from pymc_extras.statespace.filters import DisturbanceSmoother, StandardFilter

    from helpers.kalman.pymc import ClosedFormFilter, ClosedFormSmoother

    plugins = []
    if not flags["--theirs"]:
        plugins.append(InPlace(StandardFilter, ClosedFormFilter))
        if flags["--smoother"]:
            plugins.append(InPlace(DisturbanceSmoother, ClosedFormSmoother))
    os.chdir(sources)
    sys.path.insert(0, str(sources))
    if not any(Path(x.split("::")[0]).exists() for x in options):
        options.append("tests/statespace")
    # Their settings make errors of warnings, which a newer pandas or PyTensor gives.
    settings = ["-q", "--rootdir", str(sources)]
    settings += ["-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning"]
    return pytest.main([*settings, *options], plugins=plugins)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
