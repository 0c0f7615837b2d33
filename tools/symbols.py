r"""The symbols of displayed equations, and the tables that say what each of them means.

A symbol is a letter with what belongs to its name: a hat or a tilde, a name above (the f of
:math:`K^f`), and whether it has an index of time, so that :math:`J` and :math:`J_t` are two. What
is done to it is not part of it: a bar (its cotangent), a dot or a d (its tangent), a power, a
transpose. The nine arrays of the model are one symbol with and without an index.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import nbformat

GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi pi varpi rho "
    "varrho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma "
    "Upsilon Phi Psi Omega ell"
).split()
ALPHABETS = ("mathcal", "mathbb", "mathbf", "boldsymbol")
# Their argument is a word, or the name of an environment.
WORD = re.compile(r"\\(?:operatorname\*?|text|mathrm|texttt|begin|end)\s*\{[^{}]*\}")
ACCENTS = {"hat": "^", "widehat": "^", "tilde": "~", "bar": "", "overline": "", "dot": ""}
"""Hats and tildes make another symbol; bars and dots are done to one."""
NAMES = ("f", "o", "g", "a", "y", "P", "F", "r", "+", "-", "*", "0", "1")
NAMES += (r"\omega", r"\ell", r"\leftarrow")
NAMES_OF_INDEXED = ("s",)  # else the number of steps in a power
MODEL = ("a", "P", "c", "d", "T", "Z", "R", "H", "Q", "W", "y", r"\alpha", r"\varepsilon", r"\eta")

TOKEN = re.compile(r"\\[A-Za-z]+\*?|\\.|[A-Za-z]|\d+|\S")
GAP = re.compile(r"\\[,;:! ]|\\q?quad(?![a-z])|~|&")
DISPLAY = re.compile(r"\$\$(.*?)\$\$", re.DOTALL)
TABLE = re.compile(r"^:{3,}\{dropdown\} Symbols[^\n]*\n(.*?)^:{3,}$", re.DOTALL | re.MULTILINE)
FREE = "Letters without a fixed meaning"
VARIES = "as each page defines it"
LET = re.compile(r"\b[Ll]et \$([^$=]+)=([^$]+)\$")


def symbols_of(tex: str) -> set[str]:
    """The symbols of one formula: ``J_t`` with an index of time, ``J`` without, ``K^f_t``."""
    return set(_symbols(_nested(GAP.sub(" ", WORD.sub(r"\\word ", tex)))))


def _nested(tex: str) -> list:
    """The tokens, with each {group} as a list of its own."""
    top: list = []
    stack = [top]
    for token in TOKEN.findall(tex):
        if token == "{":
            stack[-1].append(inner := [])
            stack.append(inner)
        elif token == "}" and len(stack) > 1:
            stack.pop()
        else:
            stack[-1].append(token)
    return top


def _flat(node) -> list[str]:
    return [node] if isinstance(node, str) else [token for part in node for token in _flat(part)]


def _command(token) -> str:
    return token[1:] if isinstance(token, str) and token.startswith("\\") else ""


def _is_letter(token) -> bool:
    plain = isinstance(token, str) and len(token) == 1 and token.isascii() and token.isalpha()
    return plain or _command(token) in GREEK


def _symbols(tokens: list) -> Iterator[str]:
    at, accent = 0, ""
    while at < len(tokens):
        token = tokens[at]
        at += 1
        command = _command(token)
        if command in ACCENTS:
            accent += ACCENTS[command]
            if at < len(tokens) and isinstance(tokens[at], list):
                tokens = [*tokens[:at], *tokens[at], *tokens[at + 1 :]]
        elif isinstance(token, list):
            yield from _symbols(token)
            accent = ""
        elif command in ALPHABETS or _is_letter(token):
            letter = token
            if command in ALPHABETS:
                letter = f"{token} {''.join(_flat(tokens[at]))}"
                at += 1
            below = above = ()
            while at + 1 < len(tokens) and tokens[at] in ("_", "^"):
                if tokens[at] == "_":
                    below = _flat(tokens[at + 1])
                else:
                    above = _flat(tokens[at + 1])
                at += 2
            if letter == "d" and not below and not above and _moves(tokens[at : at + 1]):
                continue
            yield _name(letter + accent, below, above)
            accent = ""
        elif token in ("_", "^"):
            at += 1  # an index or a power of a bracket
        else:
            accent = ""


def _moves(follows: list) -> bool:
    """Whether a d before this is that of a differential, and not the intercept."""
    token = follows[0] if follows else ""
    known = (*ACCENTS, *ALPHABETS, "log", "bigl", "Bigl", "left", "operatorname")
    return isinstance(token, list) or _is_letter(token) or _command(token) in known


def _name(letter: str, below: Iterable[str], above: list[str] | tuple) -> str:
    timed = "t" in below
    names = NAMES + (NAMES_OF_INDEXED if timed else ())
    power = above[:1] == ["-"] and len(above) > 1
    if above and not power and above[0] in names and {*above[1:]} <= {r"\top", ",", "o"}:
        letter += "^" + above[0]
    if letter in MODEL or not below:
        return letter
    return letter + ("_t" if timed else "_i")


def displayed(cells: Iterable[nbformat.NotebookNode]) -> dict[str, str]:
    """Each symbol of a page's displayed equations, with the first formula that has it."""
    first: dict[str, str] = {}
    for cell in cells:
        if cell.cell_type == "markdown":
            for tex in DISPLAY.findall(cell.source):
                for symbol in symbols_of(tex):
                    first.setdefault(symbol, " ".join(tex.split()))
    return first


def written(cells: Iterable[nbformat.NotebookNode]) -> set[str]:
    """The symbols of a page outside its table, in text and displays."""
    text = "\n".join(TABLE.sub("", c.source) for c in cells if c.cell_type == "markdown")
    inline = re.findall(r"(?<!\$)\$([^$]+)\$(?!\$)", DISPLAY.sub("", text))
    return {symbol for tex in [*DISPLAY.findall(text), *inline] for symbol in symbols_of(tex)}


def rows(table: str) -> Iterator[tuple[set[str], str]]:
    """The symbols that each row of a Markdown table declares, and the words that say what they are.

    A symbol is declared on the left of the first cell: before its "=", and before the colon after
    which the meaning follows, if it does not stand in the last cell.
    """
    for line in table.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if not line.strip().startswith("|") or "$" not in cells[0]:
            continue
        head, colon, meaning = _split(cells[0])
        formulas = re.findall(r"\$([^$]+)\$", head)
        formulas = [tex.split("=")[0] for tex in formulas]
        declared = {symbol for tex in formulas for symbol in symbols_of(tex)}
        if any(r"\dots" in tex for tex in formulas):
            declared |= {family(symbol) for symbol in declared}
        yield declared, meaning.strip() if colon else f"{cells[0]}, {cells[-1]}"


def ways_to_declare(symbol: str) -> set[str]:
    """What declares this symbol: itself; without an index of time, also the one that has it."""
    letter = symbol.removesuffix("_i")
    same = {symbol} if symbol.endswith("_t") else {symbol, letter, f"{letter}_t"}
    return same | {family(symbol)}


def family(symbol: str) -> str:
    """What a row that ends in dots declares: this accent and name, on any letter."""
    return "*" + "".join(re.findall(r"[~^].*", symbol)).removesuffix("_t").removesuffix("_i")


def _split(cell: str) -> tuple[str, str, str]:
    """At the first colon that stands outside a formula."""
    inside = False
    for at, sign in enumerate(cell):
        inside ^= sign == "$"
        if sign == ":" and not inside:
            return cell[:at], ":", cell[at + 1 :]
    return cell, "", ""


class Contract(NamedTuple):
    """What the notation page declares: meanings, letters for any use, and formulas."""

    fixed: dict[str, str]
    free: set[str]
    formulas: dict[str, str]


def contract(markdown: str) -> Contract:
    """The symbols of the notation page; those under `FREE` may be given a meaning by a page."""
    fixed: dict[str, str] = {}
    head, _, rest = markdown.partition(f"## {FREE}\n")
    passing, _, tail = rest.partition("\n## ")
    for declared, meaning in rows(head + tail):
        fixed |= dict.fromkeys(declared, meaning)
    free = {symbol for declared, _ in rows(passing) for symbol in declared}
    formulas = dict(definitions(re.findall(r"\$([^$=]+)=([^$]+)\$", head + tail)))
    return Contract(fixed, free, formulas)


def definitions(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The symbols that stand alone on the left of an equation, with its right side."""
    for left, right in pairs:
        if len(found := symbols_of(left)) == 1:
            right = GAP.sub("", right.split("=")[0]).replace(r"\mid", "|")
            yield found.pop(), re.sub(r"[\s{}]", "", right)


def let(cells: Iterable[nbformat.NotebookNode]) -> Iterator[tuple[str, str]]:
    """What the text of a page introduces with "Let ...": symbol and formula."""
    for cell in cells:
        if cell.cell_type == "markdown":
            yield from definitions(LET.findall(cell.source))


def declared(cells: Iterable[nbformat.NotebookNode]) -> dict[str, str]:
    """The symbols of a page's own table, with their meanings."""
    found: dict[str, str] = {}
    for cell in cells:
        if cell.cell_type == "markdown":
            for table in TABLE.findall(cell.source):
                for names, meaning in rows(table):
                    found |= dict.fromkeys(names, meaning)
    return found
