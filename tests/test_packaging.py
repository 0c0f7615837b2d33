"""The wheel `kalman_by_hand`: what it holds, and that it works where this repository is not.

The last two tests install it into an environment of its own. Without a network they are skipped,
but not in CI; the one with PyMC takes minutes and waits for INSTALL_PYMC=1.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distributions, requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from helpers.kalman import _install

ROOT = Path(__file__).parents[1]
PROJECT = "packaging/kalman"
README = (ROOT / PROJECT / "README.md").read_text(encoding="utf-8")
WITH_PYMC, WITH_NUMPY, WITH_JAX, WITH_STATSMODELS = re.findall(
    r"```python\n(.*?)```", README, re.DOTALL
)
NO_NETWORK = re.compile(
    "NewConnectionError|ConnectTimeoutError|ProxyError|name resolution|dns error"
    "|error sending request"
)


def run(command, **options):
    """The finished process; its output and errors are one text, for failures to show."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    kept["PYTHONIOENCODING"] = "utf-8"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(
        [str(word) for word in command], env=kept, encoding="utf-8", **streams, **options
    )


def succeed(command, **options):
    done = run(command, **options)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def read_toml(folder):
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def make_environment(tmp_path_factory):
    """A function: a Python of its own that has what is asked for, and nothing else."""
    folders = []

    def make(requirements, pins=()):
        folder = tmp_path_factory.mktemp("environment")
        folders.append(folder)
        python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        if uv := shutil.which("uv"):
            succeed([uv, "venv", "--python", sys.executable, folder])
            install = [uv, "pip", "install", "--python", python]
        else:
            succeed([sys.executable, "-m", "venv", folder])
            # Compiling all of SciPy takes longer than installing it, and little of it is imported.
            install = [python, "-m", "pip", "install", "--no-compile", "--retries", "1"]
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(pins))
        done = run([*install, "--constraint", constraints, *requirements])
        if done.returncode and NO_NETWORK.search(done.stdout) and "CI" not in os.environ:
            pytest.skip("the package registry cannot be reached")
        assert done.returncode == 0, done.stdout[-4000:]
        return python

    yield make
    # pytest keeps the folders of three runs, and each of these takes half a gigabyte.
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def hatchling(make_environment):
    """The command that builds: of this environment, or where it has none, of a new one."""
    if find_spec("hatchling"):
        python = sys.executable
    else:
        python = make_environment(read_toml(PROJECT)["build-system"]["requires"])
    return [python, "-m", "hatchling", "build"]


def build(hatchling, kind, root, out):
    succeed([*hatchling, "-t", kind, "-d", out], cwd=root)
    (found,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(hatchling, tmp_path_factory):
    return build(hatchling, "wheel", ROOT / PROJECT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def tree(tmp_path):
    """A copy of what the wheel is made from, to plant a fault in."""
    for name in (PROJECT, "src/helpers/kalman"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "src/helpers/statespace.py", tmp_path / "src/helpers")
    return tmp_path


def contents(wheel):
    """The files of the package itself: name -> bytes."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        return {name: archive.read(name) for name in names}


def expected_names(root):
    folder = root / "src/helpers/kalman"
    modules = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    return {f"kalman_by_hand/{name}" for name in modules | {"statespace.py", "py.typed"}}


def test_every_module_of_the_folder_is_in_the_wheel_and_nothing_else(wheel):
    assert set(contents(wheel)) == expected_names(ROOT)


def test_new_modules_and_folders_are_taken_and_renamed(hatchling, tree):
    planted = {
        "brand_new.py": ("import helpers.kalman.op as op\n", "import kalman_by_hand.op as op\n"),
        "deep/er.py": ('"""See :mod:`helpers.kalman`."""\n', '"""See :mod:`kalman_by_hand`."""\n'),
        "deep/__init__.py": (
            "from helpers.statespace import NAMES\n",
            "from kalman_by_hand.statespace import NAMES\n",
        ),
        # A process has this name once, and both packages may be in it.
        "symbol.py": (
            'NAMES = "helpers_kalman_pass", f"helpers_kalman{NUMBER}"\n',
            'NAMES = "kalman_by_hand_pass", f"kalman_by_hand{NUMBER}"\n',
        ),
        "deep/relative.py": ("from .. import op\nfrom . import er\n",) * 2,
        "deep/.ipynb_checkpoints/er-checkpoint.py": ("", None),
    }
    before = expected_names(tree)
    for name, (text, _) in planted.items():
        path = tree / "src/helpers/kalman" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    expected = {f"kalman_by_hand/{name}": text for name, (_, text) in planted.items() if text}
    found = contents(build(hatchling, "wheel", tree / PROJECT, tree / "out"))
    assert found.keys() == before | expected.keys()
    assert {name: found[name].decode() for name in expected} == expected


def test_no_module_of_the_wheel_names_helpers(wheel):
    for name, text in contents(wheel).items():
        assert not re.search(rb"\bhelpers(\b|_)", text), name


def test_another_part_of_helpers_stops_the_build(hatchling, tree):
    outside = "a relative import from outside the package"
    planted = {
        "from helpers.checks import complex_step": None,
        "from helpers import statespace": None,
        "import helpers": None,
        "import numpy, helpers.timing as timing": None,
        "CHECKS = __import__('helpers.checks')": None,
        "PART = 'helpers.' + 'checks'": None,
        "NAME = 'helpers_checks'": None,
        "NAME = 'helpers_kalmanfilter'": None,
        "from helpers.kalmanfilter import F": None,
        "from ..checks import complex_step": outside,
        "from .. import checks": outside,
        "# See helpers.checks.": None,
    }
    path = tree / "src/helpers/kalman/__init__.py"
    first = len(path.read_text(encoding="utf-8").splitlines()) + 1
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join(planted))
    done = run([*hatchling, "-t", "wheel", "-d", tree / "out"], cwd=tree / PROJECT)
    assert done.returncode
    assert not list((tree / "out").glob("*.whl"))
    for number, (line, said) in enumerate(planted.items(), first):
        assert f"src/helpers/kalman/__init__.py:{number}: {said or line}" in done.stdout


def test_two_modules_for_one_place_stop_the_build(hatchling, tree):
    shutil.copy(tree / "src/helpers/statespace.py", tree / "src/helpers/kalman")
    done = run([*hatchling, "-t", "wheel", "-d", tree / "out"], cwd=tree / PROJECT)
    assert done.returncode
    assert "would both be kalman_by_hand/statespace.py" in done.stdout


def test_a_build_without_the_repository_says_what_is_missing(hatchling, tree):
    shutil.rmtree(tree / "src")
    done = run([*hatchling, "-t", "wheel", "-d", tree / "out"], cwd=tree / PROJECT)
    assert done.returncode
    assert "build from a checkout of the whole repository" in done.stdout


def test_the_source_distribution_makes_the_same_wheel(hatchling, wheel, tmp_path):
    sdist = build(hatchling, "sdist", ROOT / PROJECT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / sdist.name.removesuffix(".tar.gz")
    again = build(hatchling, "wheel", root, tmp_path / "wheel")
    assert contents(again) == contents(wheel)


def test_only_what_is_declared_is_imported(wheel):
    """numpy, numba, llvmlite and pytensor, the extras, and modules that the wheel holds."""
    needs = read_toml(PROJECT)["project"]
    lines = sum(needs["optional-dependencies"].values(), needs["dependencies"])
    declared = {Requirement(line).name.replace("-", "_") for line in lines}
    files = contents(wheel)
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module]
            else:
                continue
            for module in modules:
                place = module.replace(".", "/")
                top = place.split("/")[0]
                own = {f"{place}.py", f"{place}/__init__.py"} & files.keys()
                assert own or top in declared | sys.stdlib_module_names, f"{name}: {module}"


def ranges(project):
    lines = sum(project["optional-dependencies"].values(), project["dependencies"])
    return {found.name: found.specifier for found in map(Requirement, lines)}


def test_the_same_ranges_python_and_licence_as_the_repository():
    ours, whole = read_toml(PROJECT)["project"], read_toml(".")["project"]
    assert ours["requires-python"] == whole["requires-python"]
    found, expected = ranges(ours), ranges(whole)
    # The repository leaves llvmlite to Numba.
    assert found.keys() - expected.keys() == {"llvmlite"}
    assert {name: found[name] for name in found.keys() & expected.keys()} == {
        name: expected[name] for name in found.keys() & expected.keys()
    }
    licences = [
        (ROOT / name).read_text(encoding="utf-8") for name in ("LICENSE", f"{PROJECT}/LICENSE")
    ]
    assert licences[0] == licences[1]


def test_no_release_of_pytensor_that_pymc_or_pymc_extras_refuses():
    """The weekly run, which has both, would never see it."""
    ours = ranges(read_toml(PROJECT)["project"])["pytensor"]
    for name in ("pymc", "pymc-extras"):
        (theirs,) = (need for need in map(Requirement, requires(name)) if need.name == "pytensor")
        (end,) = (part.version for part in theirs.specifier if part.operator == "<")
        assert end not in ours, f"{name} wants {theirs}, we take {ours}"


def test_both_readmes_install_and_use_it_alike():
    whole = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^pip install .*$", README, re.MULTILINE)
    assert line in whole.splitlines()
    assert line == _install("[pymc]")
    assert WITH_PYMC in whole


def test_no_line_installs_from_an_index_that_does_not_have_it():
    sources = [*ROOT.glob("src/helpers/kalman/**/*.py"), *ROOT.glob("book/**/*.md")]
    for path in [ROOT / "README.md", ROOT / PROJECT / "README.md", *sources]:
        text = path.read_text(encoding="utf-8")
        for line in re.findall(r"pip\s+install\s+\"?kalman-by-hand[^`\n]*", text):
            assert "@ git+" in line or "@ {_SOURCE}" in line, f"{path.relative_to(ROOT)}: {line}"


def test_helpers_kalman_needs_numpy_alone():
    code = """
import sys

class Others:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in {"numpy", "helpers", *sys.stdlib_module_names}:
            raise ModuleNotFoundError(f"{name} is not NumPy", name=name)

sys.meta_path.insert(0, Others())
sys.path.insert(0, "src")
import helpers.kalman
import helpers.kalman.reference
"""
    succeed([sys.executable, "-c", code], cwd=ROOT)


IN_THE_BARE_ENVIRONMENT = """
import importlib.metadata
import importlib.util

import kalman_by_hand
from kalman_by_hand import kalman_loglike, loglike

assert kalman_by_hand.__version__ == importlib.metadata.version("kalman-by-hand")
for name in ("pymc", "pymc_extras", "jax", "statsmodels", "pandas"):
    assert importlib.util.find_spec(name) is None, f"{name} is there: the environment is not bare"


def at(H):
    return loglike(y, StateSpace(**walk.asdict() | {"H": H * one}))


h = 1e-5
slope = (at(1 + h) - at(1 - h)) / (2 * h)
assert abs(gradients.H.item() - slope) < 1e-8, (gradients.H, slope)
assert kalman_loglike(y, *walk.asdict().values()).ndim == 1
"""

IN_THE_ENVIRONMENT_WITH_PYMC = """
import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc_extras.statespace.core import statespace

with pm.Model(coords=model.coords):
    pm.Deterministic("P0", pt.eye(model.k_states))
    pm.Normal("initial_level", dims="state_level")
    pm.Gamma("sigma_level", alpha=2, beta=2, dims="shock_level")
    pm.Gamma("sigma_noise", alpha=2, beta=2)
    model.build_statespace_graph(np.array([0.0, 1.0, 0.5, 2.0, 1.5])[:, None])
    draws = pm.sample(5, tune=5, chains=1, cores=1, random_seed=1, progressbar=False)

assert statespace.FILTER_FACTORY["closed_form"].__module__ == "kalman_by_hand.pymc"
sigma = draws.posterior["sigma_noise"].values
assert sigma.shape == (1, 5) and np.isfinite(sigma).all() and np.ptp(sigma) > 0, sigma
"""


def test_the_lines_for_statsmodels():
    """Under the package's name in this repository: what they call is the same text."""
    import statsmodels.api as sm

    y = sm.datasets.nile.data.load_pandas().data["volume"]
    scope = {"mod": sm.tsa.SARIMAX(y, order=(1, 0, 1))}
    exec(WITH_STATSMODELS.replace("kalman_by_hand", "helpers.kalman"), scope)
    assert scope["exact"].shape == (3,) and scope["results"].mle_retvals["converged"]


def test_the_lines_for_jax():
    pytest.importorskip("jax")
    scope = {}
    exec(WITH_NUMPY.replace("kalman_by_hand", "helpers.kalman"), scope)
    here = scope | scope["walk"].asdict()
    exec(WITH_JAX.replace("kalman_by_hand", "helpers.kalman"), here)
    assert abs(here["value"] - scope["value"]) < 1e-13
    assert abs(here["gradient"] - scope["gradients"].T).max() < 1e-13


def versions_here():
    """What is tested is the wheel with the versions of this environment, whichever they are."""
    return sorted({f"{found.name}=={found.version}" for found in distributions()})


def run_beside_a_users_helpers(python, folder, script):
    """Run a script where users have a helpers.py of their own, which Python finds first."""
    folder.mkdir()
    (folder / "helpers.py").write_text("raise SystemExit('the user\\'s helpers.py was imported')\n")
    (folder / "script.py").write_text(script, encoding="utf-8")
    succeed([python, "script.py"], cwd=folder)


@pytest.mark.thorough
def test_installed_alone_it_takes_a_gradient_beside_a_users_helpers(
    make_environment, wheel, tmp_path
):
    python = make_environment([wheel], versions_here())
    run_beside_a_users_helpers(python, tmp_path / "user", WITH_NUMPY + IN_THE_BARE_ENVIRONMENT)


@pytest.mark.thorough
@pytest.mark.skipif(os.environ.get("INSTALL_PYMC") != "1", reason="takes minutes: INSTALL_PYMC=1")
def test_installed_with_pymc_it_samples_beside_a_users_helpers(make_environment, wheel, tmp_path):
    need = f"kalman-by-hand[pymc] @ {wheel.as_uri()}"
    python = make_environment([need], versions_here())
    components = """
from pymc_extras.statespace import structural

components = structural.LevelTrend(order=1, innovations_order=1, name="level")
components = components + structural.MeasurementError(name="noise")
"""
    script = components + WITH_PYMC + IN_THE_ENVIRONMENT_WITH_PYMC
    run_beside_a_users_helpers(python, tmp_path / "user", script)
