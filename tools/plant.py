"""Plant faults in the Kalman passes, one at a time, and see a unit test catch each.

A fault is a call left out, a sign turned, or a number changed. They are found in the functions
themselves, so no rewording of a line makes one stale, and new lines have theirs at once.

``python -m tools.plant`` copies the sources, changes one place, and runs the tests of the checked
Python twin (no compiler) against the copy, a few seconds each; a fault that goes unseen takes as
long as all of them. ``python -m tools.plant pull_mean 20`` plants twenty of those whose name
contains a word, by chance but always the same. What no test can see is a choice that costs time
alone: read those that go unseen.
"""

import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "src/helpers/kalman"
# What the tests in Python run. Files of a compiler's own, and those that call machine code, are
# not among them.
FILES = (
    "recursions", "square_root", "compiled/backward", "compiled/collapse", "compiled/directions",
    "compiled/forward", "compiled/inputs", "compiled/one_pass", "compiled/pull", "compiled/push",
    "compiled/small", "compiled/step", "compiled/sweep", "compiled/tiles", "compiled/writing",
)  # fmt: skip
# The tests that look at a function, where they are not those of the twin.
OF_DIFFUSE = "test_kalman_diffuse.py", "-k", "reference"
TESTS = {
    "collapse.": ("test_kalman_collapse.py", "-k", "python or patterns or sizes"),
    "recursions.factor_if_identified": OF_DIFFUSE,
    "recursions.pull_columns": ("test_kalman_panel.py", "-k", "vague"),  # in machine code
    "recursions.pull_observed": ("test_kalman_reference.py",),
    "recursions.update_columns": OF_DIFFUSE,
    "sweep.": ("test_kalman_panel.py", "-k", "guarded or sums"),
}


class Faults(ast.NodeVisitor):
    """The places of a file where a fault can be planted: (name, begin, end, what is planted)."""

    def __init__(self, text: str):
        self.text, self.lines, self.found, self.inside = text, text.splitlines(True), [], []
        starts = [0]
        for line in self.lines:
            starts.append(starts[-1] + len(line))
        self.starts = starts
        self.visit(ast.parse(text))

    def at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def fault(self, what: str, begin: int, end: int, planted: str) -> None:
        line = self.lines[self.text.count("\n", 0, begin)].strip()
        self.found.append((f"{'.'.join(self.inside)}: {what} in `{line}`", begin, end, planted))

    def visit_FunctionDef(self, node):  # noqa: N802
        if node.name == "machine":  # what writes machine code
            return
        self.inside.append(node.name)
        for child in node.body:
            self.visit(child)
        self.inside.pop()

    def visit_ClassDef(self, node):  # noqa: N802
        self.visit_FunctionDef(node)

    def visit_Expr(self, node):  # noqa: N802
        if isinstance(node.value, ast.Call) and self.inside:
            begin = self.at(node.lineno, node.col_offset)
            self.fault("left out", begin, self.at(node.end_lineno, node.end_col_offset), "pass")
            self.generic_visit(node)

    def visit_BinOp(self, node):  # noqa: N802
        if isinstance(node.op, (ast.Add, ast.Sub)) and self.inside:
            begin = self.at(node.left.end_lineno, node.left.end_col_offset)
            end = self.at(node.right.lineno, node.right.col_offset)
            between = self.text[begin:end]
            sign, other = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
            self.fault("sign turned", begin, end, between.replace(sign, other, 1))
        self.generic_visit(node)

    def visit_Constant(self, node):  # noqa: N802
        if isinstance(node.value, float) and self.inside:
            begin = self.at(node.lineno, node.col_offset)
            planted = "2.0" if node.value in (0.0, 1.0) else "1.0"
            self.fault(f"{planted} for {node.value}", begin, begin + len(str(node.value)), planted)


def all_faults() -> dict:
    """All faults, by name: (file, begin, end, what is planted)."""
    faults = {}
    for file in FILES:
        for name, *place in Faults(Path(ROOT, FOLDER, f"{file}.py").read_text()).found:
            name = f"{Path(file).name}.{name}"
            number = sum(x.startswith(name) for x in faults)
            faults[f"{name} ({number + 1})" if number else name] = (file, *place)
    return faults


def plant(name: str, file: str, begin: int, end: int, planted: str) -> tuple[bool, float, str]:
    """Whether a test fails with this fault in place, the seconds that took, and which one."""
    of_it = (x for start, x in TESTS.items() if name.startswith(start))
    tests, *chosen = next(of_it, ("test_kalman_twin.py",))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for part in ("src", "tests"):
            ignored = shutil.ignore_patterns("__pycache__", "data", "web", "book")
            shutil.copytree(ROOT / part, f"{folder}/{part}", ignore=ignored)
        path = Path(folder, FOLDER, f"{file}.py")
        text = path.read_text()
        path.write_text(text[:begin] + planted + text[end:])
        paths = f"{folder}/src{os.pathsep}{folder}/tests{os.pathsep}{folder}"
        command = [
            sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider",
            "-c", os.devnull, "--rootdir", folder, f"{folder}/tests/{tests}", *chosen,
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": paths}
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
            )
        except subprocess.TimeoutExpired:
            return True, time.perf_counter() - start, "never ends"
    seen = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    which = seen[0].split("::")[-1].split(" - ")[0] if seen else ""
    return done.returncode != 0, time.perf_counter() - start, which


def main() -> None:
    """Plant the faults that the command line asks for, all of them if it asks for none."""
    words = [x for x in sys.argv[1:] if not x.isdigit()]
    most = next((int(x) for x in sys.argv[1:] if x.isdigit()), None)
    faults = {k: x for k, x in all_faults().items() if not words or any(w in k for w in words)}
    names = list(faults)
    if most is not None:
        names = random.Random(0).sample(names, min(most, len(names)))
    unseen = []
    for i, name in enumerate(names):
        caught, seconds, which = plant(name, *faults[name])
        state = "caught" if caught else "UNSEEN"
        print(f"{i + 1}/{len(names)} {state} {seconds:5.1f} s  {name} | {which}", flush=True)
        if not caught:
            unseen.append(name)
    print(f"{len(names) - len(unseen)} of {len(names)} faults were seen", *unseen, sep="\n  ")


if __name__ == "__main__":
    main()
