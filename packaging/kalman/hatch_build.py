"""Build `kalman_by_hand` from `helpers.kalman`: the same text under another name.

The repository's own package is called `helpers`, a name that others have too. The wheel holds every
module of src/helpers/kalman, and src/helpers/statespace.py, with `helpers.kalman` replaced by
`kalman_by_hand` in code, docstrings and messages. A source distribution carries the two as they
stand, so that a wheel can be built from it where the rest of the repository is not.
"""

import ast
import re
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "kalman_by_hand"
FOLDER, SINGLE = Path("src/helpers/kalman"), Path("src/helpers/statespace.py")

# The last is for names that a process has once, such as the symbols given to LLVM: the two packages
# may be loaded side by side.
RENAMED = (
    (re.compile(r"(?<!\w)helpers\.kalman(?!\w)"), PACKAGE),
    (re.compile(r"(?<!\w)helpers\.statespace(?!\w)"), f"{PACKAGE}.statespace"),
    (re.compile(r"(?<!\w)helpers_kalman(?![^\W_])"), PACKAGE),
)
LEFT = re.compile(r"(?<!\w)helpers(?![^\W_])")


def find_base(root):
    """The folder that holds src/: the source distribution's own, else the repository's."""
    root = Path(root)
    for base in (root, root.parent.parent):
        if (base / SINGLE).is_file() and (base / FOLDER / "__init__.py").is_file():
            return base
    raise FileNotFoundError(
        f"neither {root} nor {root.parent.parent} holds {FOLDER.as_posix()} and "
        f"{SINGLE.as_posix()}: build from a checkout of the whole repository"
    )


def find_sources(base):
    """The modules of the package: path inside the wheel -> path inside `base`."""
    found = {}
    for path in sorted((base / FOLDER).rglob("*.py")):
        inside = path.relative_to(base / FOLDER)
        if not any(part.startswith(".") for part in inside.parts):
            found[f"{PACKAGE}/{inside.as_posix()}"] = path.relative_to(base)
    target = f"{PACKAGE}/{SINGLE.name}"
    if target in found:
        raise ValueError(
            f"{found[target].as_posix()} and {SINGLE.as_posix()} would both be {target}"
        )
    return found | {target: SINGLE}


def rename(text, source, depth):
    """The text of a module under its new name.

    Parameters
    ----------
    text : str
    source : str
        What to call the module in an error.
    depth : int
        How many packages the module is in: 1 for a module of `kalman_by_hand` itself.

    Returns
    -------
    str

    Raises
    ------
    ValueError
        If the module needs, or names, a part of `helpers` that the wheel does not hold.
    """
    for old, new in RENAMED:
        text = old.sub(new, text)
    wrong = [
        f"{source}:{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if LEFT.search(line)
    ]
    wrong += [
        f"{source}:{node.lineno}: a relative import from outside the package"
        for node in ast.walk(ast.parse(text, source))
        if isinstance(node, ast.ImportFrom) and node.level > depth
    ]
    if wrong:
        raise ValueError(
            f"{PACKAGE} holds helpers.kalman and helpers.statespace and nothing else of helpers, "
            "so its modules may name no other part:\n" + "\n".join(wrong)
        )
    return text


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version, build_data):
        if version == "editable":
            raise ValueError(
                f"{PACKAGE} is written when it is built, so it cannot be installed in place: "
                "install the repository itself and import helpers.kalman"
            )
        base = find_base(self.root)
        sources = find_sources(base)
        include = build_data["force_include"]
        if self.target_name == "sdist":
            include.update({str(base / path): path.as_posix() for path in sources.values()})
            return

        self.folder = tempfile.TemporaryDirectory()
        files = {
            target: rename(
                (base / path).read_text(encoding="utf-8"), path.as_posix(), target.count("/")
            )
            for target, path in sources.items()
        }
        files[f"{PACKAGE}/__init__.py"] += f'\n__version__ = "{self.metadata.version}"\n'
        files[f"{PACKAGE}/py.typed"] = ""
        for target, text in files.items():
            path = Path(self.folder.name, target)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
            include[str(path)] = target

    def finalize(self, version, build_data, artifact_path):
        if self.target_name == "wheel":
            self.folder.cleanup()
