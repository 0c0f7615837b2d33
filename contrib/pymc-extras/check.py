"""Apply the patches of this folder to pymc-extras and run the tests that they bring.

    python contrib/pymc-extras/check.py [--checkout FOLDER] [--without]

Without a checkout the installed package is copied, which has no tests of its own. Works in a
temporary copy in either case. ``--without`` applies the tests and leaves the code as it was: then
those that the patches are about have to fail.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def copy(checkout: Path | None, target: Path) -> None:
    """The package (and its tests, if it has some) in `target`."""
    if checkout is None:
        found = importlib.util.find_spec("pymc_extras")
        if found is None:
            sys.exit("pymc-extras is not installed, and no --checkout was given")
        checkout = Path(found.origin).parents[1]
    if not (checkout / "pymc_extras").is_dir():
        sys.exit(f"{checkout} holds no folder pymc_extras")
    clean = shutil.ignore_patterns("__pycache__")
    shutil.copytree(checkout / "pymc_extras", target / "pymc_extras", ignore=clean)
    if (checkout / "tests" / "statespace").is_dir():
        shutil.copytree(checkout / "tests", target / "tests", ignore=clean)


def main(options) -> int:
    patches = sorted(HERE.glob("*.patch"))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder)
        copy(options.checkout, target)
        only = ["--include=tests/*"] if options.without else []
        for patch in patches:
            apply = ["git", "apply", *only, str(patch)]
            if subprocess.run(apply, cwd=target).returncode:
                print(f"{patch.name} does not apply")
                return 1
            print(f"{patch.name} applies", flush=True)
        text = "".join(patch.read_text() for patch in patches)
        tests = [line[6:] for line in text.splitlines() if line.startswith("+++ b/tests/")]
        # Small graphs, run once: what compiles them takes longer than what runs them.
        flags = "floatX=float64,cxx=,linker=py,optimizer=fast_compile"
        environment = os.environ | {
            "PYTHONPATH": str(target),
            "PYTENSOR_FLAGS": f"{flags},base_compiledir={target / 'compiled'}",
        }
        run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=."]
        return subprocess.run([*run, *tests], cwd=target, env=environment).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", type=lambda x: Path(x).resolve(), help="a clone of it")
    parser.add_argument("--without", action="store_true", help="the tests without the patches")
    sys.exit(main(parser.parse_args()))
