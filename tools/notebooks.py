"""Run the notebooks of the book from their .md text and write the pairs: `make notebooks`.

The .md of a pair is the source. A notebook that fails leaves both its files as they were.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from jupytext.config import load_jupytext_config
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from tools import (
    book,
    equation_index,
    onnx_operators,
    pytensor_coverage,
    reading,
    records,
    rules,
)

TEXT = "md:myst"
SECONDS_PER_CELL = 1200

# The book says that it times on one thread, and more of them change the last digits of a result.
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

# Versions and display names of the machine that ran the notebook stay out of the file.
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {"file_extension": ".py", "name": "python", "pygments_lexer": "ipython3"}
KEPT_OF_NOTEBOOK = ("mystnb",)
KEPT_OF_CELL = ("mystnb", "tags")


def normalised(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook with metadata and cell ids that depend on its content alone."""
    notebook = nbformat.from_dict(notebook)
    kept = {key: notebook.metadata[key] for key in KEPT_OF_NOTEBOOK if key in notebook.metadata}
    notebook.metadata = nbformat.from_dict(
        {**kept, "kernelspec": KERNELSPEC, "language_info": LANGUAGE}
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict(
            {key: cell.metadata[key] for key in KEPT_OF_CELL if key in cell.metadata}
        )
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    return notebook


def from_text(text: str) -> nbformat.NotebookNode:
    """The notebook, without outputs, that a .md says."""
    return normalised(jupytext.reads(text, fmt=TEXT))


def to_text(notebook: nbformat.NotebookNode, path: Path) -> str:
    """The .md of a notebook, by the settings of pyproject.toml that hold at `path`."""
    # Through JSON, which sorts the keys: the text is the same whoever built the notebook.
    plain = nbformat.reads(nbformat.writes(normalised(notebook)), as_version=4)
    return jupytext.writes(plain, fmt=TEXT, config=load_jupytext_config(str(path)))


def edited_elsewhere(path: Path) -> bool:
    """Whether the .ipynb was changed after the .md, so that running the .md would lose it."""
    pair = path.with_suffix(".ipynb")
    if not pair.exists() or pair.stat().st_mtime <= path.stat().st_mtime:
        return False
    text = to_text(nbformat.read(pair, as_version=4), path)
    return text != to_text(from_text(path.read_text(encoding="utf-8")), path)


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run every cell in a fresh kernel of this environment that starts in `folder`."""
    NotebookClient(
        notebook,
        timeout=SECONDS_PER_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--log-level=ERROR"],
        record_timing=False,
        coalesce_streams=True,
    ).execute(env=os.environ | dict.fromkeys(THREADS, "1"))


def run(name: str, root: Path = book.ROOT) -> str | None:
    """Run one notebook and write its pair. Returns what went wrong, if anything did."""
    path = root / f"{name}.md"
    if edited_elsewhere(path):
        return (
            f"{name}.ipynb is newer than its .md and says something else. Bring that into the .md "
            f"with `jupytext --sync {name}.ipynb`, or throw it away with `touch {name}.md`."
        )
    notebook = from_text(path.read_text(encoding="utf-8"))
    try:
        execute(notebook, path.parent)
    except CellExecutionError as error:
        return str(error)
    except (CellTimeoutError, DeadKernelError) as error:
        return f"{type(error).__name__}: {error}"
    reading.say(notebook)
    notebook = normalised(notebook)
    text = to_text(notebook, path)
    nbformat.write(notebook, path.with_suffix(".ipynb"))
    path.write_text(text, encoding="utf-8")
    return None


def chosen(wanted: list[str], names: list[str]) -> list[str]:
    """The notebooks whose names contain one of `wanted`; all of them when nothing is wanted."""
    wanted = [part.removesuffix(".md").removesuffix(".ipynb") for part in wanted]
    for part in wanted:
        if not any(part in name for name in names):
            sys.exit(f"No notebook is named like {part!r}. There are:\n  " + "\n  ".join(names))
    return [name for name in names if not wanted or any(part in name for part in wanted)]


def main(wanted: list[str]) -> int:
    names = chosen(wanted, book.notebook_names())
    failed = 0
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {name}", end=" ", flush=True)
        start = time.perf_counter()
        trouble = run(name)
        seconds = time.perf_counter() - start
        if trouble:
            failed += 1
            print(f"FAILED after {seconds:.0f} s, files left as they were\n{trouble}", flush=True)
            continue
        notebook = book.read_notebook(name)
        checks = len(list(book.checks_of(name, notebook.cells)))
        print(f"{seconds:.0f} s, {checks} checks", flush=True)
        for complaint in rules.notebook(name, notebook):
            print(f"  {complaint}")
    equation_index.write()
    pytensor_coverage.write()
    onnx_operators.write()
    records.write()
    if failed:
        print(f"{failed} of {len(names)} notebooks failed.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
