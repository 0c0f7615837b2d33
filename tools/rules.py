"""The rules that the book holds itself to: each takes what it judges and returns its complaints."""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import nbformat
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import book, reading, symbols

MOST_CELLS = 34
# What the machine decides: its vectors, cores, clock, paths and environment.
MACHINE = {
    "LANES", "WIDEST", "cpu_count", "cwd", "environ", "getcwd", "getpid", "gettempdir", "lay_out",
    "machine", "monotonic", "perf_counter", "platform", "process_time", "thread_time",
}  # fmt: skip
# Letters on white are read at this contrast (WCAG 2, level AA).
CONTRAST = 4.5
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
PRINTED = re.compile(rf"({NUMBER.pattern})?\$?<!--printed(?:: (.*?))?-->")
LABEL = re.compile(r"(eq|def|fig)(-[A-Za-z0-9]+){2,}")
PREFIXES = {"equation": ("eq", "def"), "figure": ("fig",)}


# --- one notebook ---------------------------------------------------------------------------------


def notebook(name: str, nb: nbformat.NotebookNode) -> list[str]:
    """It ran from top to bottom, without an error or a word on stderr; figures are described."""
    code = [(n, cell) for n, cell in enumerate(nb.cells, 1) if cell.cell_type == "code"]
    counts = [cell.execution_count for _, cell in code]
    complaints = []
    if counts != list(range(1, len(code) + 1)):
        complaints.append(f"{name}: not executed from top to bottom in one run: {counts}")
    shown = sum("hide-input" not in cell.metadata.get("tags", []) for cell in nb.cells)
    if shown > MOST_CELLS:
        complaints.append(f"{name}: {shown} cells; a chapter shows at most {MOST_CELLS}")
    for n, cell in code:
        complaints += [f"{name}: cell {n} {trouble}" for trouble in _code_cell(cell)]
    complaints += [f"{name}: {trouble}" for trouble in _of_the_machine(nb)]
    return complaints


def _code_cell(cell: nbformat.NotebookNode) -> Iterator[str]:
    if not cell.source.strip():
        yield "is empty"
    may_raise = "raises-exception" in cell.metadata.get("tags", [])
    for output in cell.outputs:
        if output.output_type == "error" and not may_raise:
            yield f"ends in {output.ename}"
        if output.get("name") == "stderr":
            yield f"prints to stderr: {output.text.strip()[:80]!r}"
    kinds = {kind for output in cell.outputs for kind in output.get("data", {})}
    drawings = [output.get("data", {}).get("image/svg+xml", "") for output in cell.outputs]
    if any("<dc:date>" in drawing for drawing in drawings):
        yield "shows an SVG that holds its date; call helpers.figures.use_style()"
    inks = {ink for drawing in drawings for ink in re.findall(r'<g style="fill: (#\w{6})', drawing)}
    yield from (f"writes words in {ink}, too pale to read" for ink in sorted(inks) if _pale(ink))
    if kinds & {"image/png", "image/svg+xml"}:
        mystnb = cell.metadata.get("mystnb", {})
        for block, field in (("image", "alt"), ("figure", "caption"), ("figure", "name")):
            if not mystnb.get(block, {}).get(field, "").strip():
                yield f"shows a figure without mystnb: {block}: {field}"


def _pale(ink: str) -> bool:
    """Whether letters of a colour are too pale on white; white itself is for dark cells."""
    rgb = [int(ink[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    rgb = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb]
    light = sum(x * weight for x, weight in zip(rgb, (0.2126, 0.7152, 0.0722), strict=True))
    return light < 1 and 1.05 / (light + 0.05) < CONTRAST


def _of_the_machine(nb: nbformat.NotebookNode) -> Iterator[str]:
    """What a cell prints is compared, so it is the same on every machine and in every run.

    A name is the machine's while what was last assigned to it is. A comparison may be printed.
    """
    of_machine = set(MACHINE)
    for n, cell in enumerate(nb.cells, 1):
        if cell.cell_type != "code":
            continue
        tree = ast.parse(cell.source)
        for targets, value in map(_assigned, ast.walk(tree)):
            if _names([value]) & of_machine:
                of_machine |= _names(targets)
            else:
                of_machine -= _names(targets)
        if "nbval-ignore-output" in cell.metadata.get("tags", []):
            continue
        shown = [tree.body[-1].value] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            shown += node.args if getattr(node.func, "id", "") == "print" else []
        for name in sorted(_names(shown) & of_machine):
            yield f"cell {n} prints {name}, the machine's; tag the cell nbval-ignore-output"
        for value in _in_any_order(shown):
            yield f"cell {n} prints {ast.unparse(value)[:60]}, a set, which has no order; sort it"


def _assigned(node: ast.AST) -> tuple[list[ast.AST], ast.AST]:
    """What a node gives a value to (names, a function, the object of a method), and what value."""
    match node:
        case ast.Assign(targets, value):
            return targets, value
        case ast.AugAssign(target, _, value) | ast.NamedExpr(target, value):
            return [target], value
        case ast.For(target, iter) | ast.comprehension(target, iter):
            return [target], iter
        case ast.FunctionDef(name):
            return [ast.Name(name)], node
        case ast.Expr(ast.Call(ast.Attribute(owner)) as call):
            return [owner], call
    return [], node


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    """The names in these, but for what is only compared; an import gives names, but reads none."""
    todo, names = [*nodes], set()
    while todo:
        node = todo.pop()
        names |= {getattr(node, "id", getattr(node, "attr", ""))}
        if not isinstance(node, ast.Compare):
            todo += ast.iter_child_nodes(node)
    return names - {""}


def _in_any_order(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """Sets that are shown, or made a list or a string, as they come."""
    for node in nodes:
        match node:
            case ast.Starred(value) | ast.FormattedValue(value):
                yield from _in_any_order([value])
            case ast.JoinedStr(values):
                yield from _in_any_order(values)
            case ast.Call(ast.Name("list" | "tuple") | ast.Attribute(attr="join"), args):
                yield from _in_any_order(args)
            case ast.Set() | ast.SetComp() | ast.Call(ast.Name("set" | "frozenset")):
                yield node


def can_be_pasted(name: str, nb: nbformat.NotebookNode) -> list[str]:
    """What is shown runs without what is folded: a shown cell gives each name that one reads."""
    complaints, folded = [], set()  # names that a folded cell gave last
    for n, cell in enumerate(nb.cells, 1):
        if cell.cell_type != "code":
            continue
        hidden = reading.FOLDED & set(cell.metadata.get("tags", []))
        for statement in ast.parse(cell.source).body:
            if hidden:
                folded |= _gives(statement)
                continue
            complaints += [
                f"{name}: cell {n} is shown and reads {missing}, which a folded cell gives; "
                "import or define it in a cell that is shown"
                for missing in sorted(_reads(statement) & folded)
            ]
            folded -= _gives(statement)
    return list(dict.fromkeys(complaints))


def _gives(statement: ast.AST) -> set[str]:
    """The names that a statement of a cell leaves behind for the next."""
    inner = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    todo, names = [statement], set()
    while todo:
        match node := todo.pop():
            case ast.FunctionDef(name) | ast.ClassDef(name):
                names.add(name)
            case ast.Name(name, ast.Store()) | ast.alias(_, str(name)) | ast.alias(name):
                names.add(name.split(".")[0])
            case _ if not isinstance(node, inner):
                todo += ast.iter_child_nodes(node)
    return names


def _reads(statement: ast.AST) -> set[str]:
    """The names that a statement of a cell needs from before it."""
    changed = isinstance(statement, ast.Assign | ast.AugAssign)  # what it gives, it may read, too
    own: set[str] = set()
    for node in ast.walk(statement.value if changed else statement):
        match node:
            case ast.FunctionDef(name) | ast.ClassDef(name) | ast.arg(name):
                own.add(name)
            case ast.ExceptHandler(_, str(name)):
                own.add(name)
            case ast.Name(name, ast.Store()) | ast.alias(_, str(name)) | ast.alias(name):
                own.add(name.split(".")[0])
    read = [
        node for node in ast.walk(statement) if isinstance(getattr(node, "ctx", None), ast.Load)
    ]
    read += [statement.target] if isinstance(statement, ast.AugAssign) else []
    return {node.id for node in read if isinstance(node, ast.Name)} - own


def as_printed(name: str, nb: nbformat.NotebookNode) -> list[str]:
    """A number with ``<!--printed-->`` after it is one that a cell prints, rounded.

    ``<!--printed: words-->``: one in a line with these words. What changes from run to run does not
    count.
    """
    stays = [c for c in nb.cells if "nbval-ignore-output" not in c.metadata.get("tags", [])]
    text = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    complaints = []
    for mark in PRINTED.finditer(text):
        lines = [line for line in _printed(stays).splitlines() if (mark[2] or "") in line]
        if not any(_rounds_to(mark[1], number) for number in NUMBER.findall("\n".join(lines))):
            complaints.append(f"{name}: no cell prints {mark[0]}")
    return complaints


def _printed(cells: Iterable[nbformat.NotebookNode]) -> str:
    """What cells say in words, last lines included."""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "\n".join(
        out.get("text") or out.get("data", {}).get("text/plain", "") for out in outputs
    )


def _rounds_to(said: str | None, number: str) -> bool:
    """Compared in the digits that are said; "fell by 3" says -3."""
    if said is None:
        return False
    said, number = (abs(Decimal(text.replace(",", ""))) for text in (said, number))
    return abs(said - number) <= Decimal(5).scaleb(said.as_tuple().exponent - 1)


def pair(name: str, from_notebook: str, text: str) -> list[str]:
    """The .md of a pair is what its .ipynb says."""
    if from_notebook == text:
        return []
    ours, theirs = from_notebook.splitlines(), text.splitlines()
    both = enumerate(zip(ours, theirs, strict=False), 1)
    line = next((n for n, (a, b) in both if a != b), min(len(ours), len(theirs)) + 1)
    return [
        f"{name}: the .md says something else than the .ipynb from line {line} on; "
        "run `make notebooks`"
    ]


# --- pages ----------------------------------------------------------------------------------------


def images(page: str, markdown: str) -> list[str]:
    """An image in the text has an alternative text."""
    lines = [line.text for line in book.prose_lines(markdown)]
    bare = re.findall(r"!\[\s*\]\([^)]*\)", "\n".join(lines))
    blocks = re.findall(r"^[`:]{3,}(\{(?:figure|image)\}.*?)^[`:]{3,}$", markdown, re.M | re.S)
    bare += [block.splitlines()[0] for block in blocks if not re.search(r"^:alt: *\S", block, re.M)]
    return [f"{page}: {image} has no alternative text" for image in bare]


def labels_unique(labels: Iterable[book.Label]) -> list[str]:
    """A label names one thing in the book; HTML ids are lower case, so case does not tell apart."""
    complaints, seen = [], {}
    for label in labels:
        key = label.name.lower()
        if key in seen:
            complaints.append(f"{label.page}: the label {label.name} is taken in {seen[key]}")
        seen.setdefault(key, label.page)
    return complaints


def labels_named(labels: Iterable[book.Label]) -> list[str]:
    """eq-<page>-<name> is a result, def-... a definition or a step, fig-... a figure."""
    complaints = []
    for label in labels:
        prefixes = PREFIXES.get(label.kind, ())
        good = LABEL.fullmatch(label.name) and label.name.startswith(prefixes)
        if prefixes and not good:
            wanted = " or ".join(f"{prefix}-<page>-<name>" for prefix in prefixes)
            complaints.append(f"{label.page}: the {label.kind} {label.name} should be {wanted}")
    return complaints


def results_are_checked(labels: Iterable[book.Label], checks: Iterable[book.Check]) -> list[str]:
    """Every result has a check that ran, and every check names a result."""
    results = {label.name: label.page for label in labels if label.is_result}
    checked = {check.label: check.page for check in checks}
    unchecked = [name for name in results if name not in checked]
    unknown = [name for name in checked if name not in results]
    return [
        *(f"{results[name]}: no cell verifies {name}" for name in unchecked),
        *(f"{checked[name]}: verify({name!r}) names no equation of the book" for name in unknown),
    ]


def contents(root: Path = book.ROOT) -> list[str]:
    """_toc.yml names each notebook once, in the order of the files, and all its pages are there."""
    names = book.page_names(root)
    there = {
        path.relative_to(root).with_suffix("").as_posix()
        for path in (root / "notebooks").rglob("*")
        if path.suffix in (".md", ".ipynb") and ".ipynb_checkpoints" not in path.parts
    }
    files = [
        f"{name}{suffix}"
        for name in names
        for suffix in ([".ipynb", ".md"] if name.startswith("notebooks/") else [".md"])
    ]
    return [
        *(f"_toc.yml names {name} twice" for name, times in Counter(names).items() if times > 1),
        *(f"_toc.yml leaves out {name}" for name in sorted(there - set(names))),
        *(
            f"_toc.yml names {second} after {first}; number the files of a part as they are read"
            for first, second in pairwise(name for name in names if name.startswith("notebooks/"))
            if Path(first).parent == Path(second).parent and second < first
        ),
        *(f"_toc.yml needs {file}: there is none" for file in files if not (root / file).exists()),
    ]


# --- the repository -------------------------------------------------------------------------------


def own_paths(name: str, text: str, folders: Iterable[Path] = ()) -> list[str]:
    """No file speaks of one machine: no home or temporary folder, none of `folders`."""
    unix = r"(?<![\w.:/-])/(?:home|Users|root|tmp|var/folders)/[\w.]+"
    found = re.findall(unix + r"|\b[A-Z]:\\{1,2}Users\b", text)
    # A checkout straight under / has too common a name to look for.
    found += [str(folder) for folder in folders if len(folder.parts) > 2 and str(folder) in text]
    return [f"{name}: {path} is a path of one machine" for path in found]


def pins(lock: str) -> tuple[dict[str, str], list[str]]:
    """The versions that requirements.txt pins, and the lines of it that pin none."""
    versions, loose = {}, []
    for line in lock.splitlines():
        line = line.split(" #")[0].strip()
        if not line or line.startswith("#") or line == "-e .":
            continue
        if found := re.fullmatch(r"([\w.-]+)==([\w.!+]+)(?:\s*;.*)?", line):
            versions[canonicalize_name(found[1])] = found[2]
        else:
            loose.append(line)
    return versions, loose


def ran_with(name: str, nb: nbformat.NotebookNode, lock: str) -> list[str]:
    """The versions that a chapter prints, one a line, are those that requirements.txt pins."""
    versions, _ = pins(lock)
    line = r"^([A-Za-z][\w-]*) (\d+(?:\.\d+)+\w*)$"
    said = re.findall(line, _printed(nb.cells), re.MULTILINE)
    return [
        f"{name}: ran with {package} {version}, where {pinned} is pinned; run make notebooks"
        for package, version in said
        if (pinned := versions.get(canonicalize_name(package), version)) != version
    ]


def lock_fits(lock: str, pyproject: str) -> list[str]:
    """requirements.txt pins everything, as pyproject.toml allows, and installs the package too.

    All but the extra `peers`: what benchmarks measure against, no reader needs.
    """
    versions, loose = pins(lock)
    complaints = [f"requirements.txt: {line!r} is not pinned" for line in loose]
    if "-e ." not in lock.splitlines():
        complaints.append("requirements.txt: without `-e .` it does not install helpers")
    project = tomllib.loads(pyproject)["project"]
    extras = {**project.get("optional-dependencies", {}), "peers": []}
    for lines in (project["dependencies"], *extras.values()):
        for need in map(Requirement, lines):
            version = versions.get(canonicalize_name(need.name))
            if version is None or not need.specifier.contains(version, prereleases=True):
                trouble = f"{need} is not met by {version}; run `make lock`"
                complaints.append(f"requirements.txt: {trouble}")
    return complaints


def repository(config: str) -> str:
    """owner/name, from the one place that says it."""
    return yaml.safe_load(config)["repository"]["url"].removeprefix("https://github.com/")


def names_repository(name: str, text: str, slug: str) -> list[str]:
    """A file that must name the repository does, and names it as _config.yml does.

    Other people's repositories may be named; one of our name, and any page or Binder, is ours.
    """
    owner, project = slug.split("/")
    hub = [s.removesuffix(".git") for s in re.findall(r"github\.com/([\w.-]+/[\w.-]+)", text)]
    binder = re.findall(r"mybinder\.org/v2/gh/([\w.-]+/[\w.-]+)", text)
    owners = re.findall(rf"([\w-]+)\.github\.io/{re.escape(project)}", text)
    wrong = [s for s in hub if s.endswith(f"/{project}") and s != slug]
    wrong += [s for s in binder if s != slug]
    wrong += [f"{s}.github.io" for s in owners if s != owner.lower()]
    complaints = [f"{name}: {s} is not the {slug} of _config.yml" for s in dict.fromkeys(wrong)]
    if slug not in hub:
        complaints.append(f"{name}: does not name {slug}, the repository of _config.yml")
    return complaints


# --- symbols --------------------------------------------------------------------------------------


def one_meaning(notation: str, pages: dict[str, list[nbformat.NotebookNode]]) -> list[str]:
    """A symbol with an index of time means one thing on all pages, and each is declared.

    The notation page declares what several pages use, and the letters that each page may use as it
    likes; the table of a page declares the rest. Without its index a symbol means what it means
    with it, at a step that the text names.
    """
    shared = symbols.contract(notation)
    complaints: list[str] = []
    owners: dict[str, tuple[str, str]] = {}
    for page, cells in pages.items():
        own, written = symbols.declared(cells), symbols.written(cells)
        for symbol, meaning in own.items():
            first, words = owners.setdefault(symbol, (page, meaning))
            if symbol in shared.fixed and symbol not in shared.free:
                complaints.append(f"{page}: declares {symbol}, which the notation page does")
            elif not symbol.startswith("*") and symbol not in written:
                complaints.append(f"{page}: declares {symbol}, and does not use it")
            elif symbol.endswith("_t") and words != meaning:
                complaints.append(f"{page}: {symbol} is {meaning!r}; in {first}, {words!r}")
        known = {*shared.fixed, *shared.free, *own}
        for symbol, formula in symbols.let(cells):
            meaning = shared.fixed.get(symbol, symbols.VARIES)
            fits = symbol in shared.free or formula == shared.formulas.get(symbol)
            if symbol.endswith("_t") and symbols.VARIES not in meaning and not fits:
                complaints.append(f"{page}: lets {symbol} be {formula}; it is {meaning!r}")
        for symbol, tex in symbols.displayed(cells).items():
            if not known & symbols.ways_to_declare(symbol):
                complaints.append(f"{page}: {symbol} is not declared, in {tex}")
    return complaints
