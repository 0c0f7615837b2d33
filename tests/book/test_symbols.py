"""One letter, one meaning: the displayed equations against the notation page and the tables."""

import pytest
from nbformat.v4 import new_markdown_cell

from tools import book, rules, symbols

KALMAN = [name for name in book.notebook_names() if "/kalman/" in name]


def test_kalman():
    notation = (book.ROOT / "book/notation.md").read_text(encoding="utf-8")
    pages = {name: book.read_cells(name) for name in KALMAN}
    complaints = rules.one_meaning(notation, pages)
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(
    ("tex", "found"),
    [
        (r"\bar a_{t|t} = T^\top \bar a_{t+1} + d - dP\, z", {"a", "T", "d", "P", "z"}),
        (r"K^{f\top}_t F_t^{-1} = J", {"K^f_t", "F_t", "J"}),
        (r"\hat\alpha_t + \tilde N^f_t W^{1/2}", {r"\alpha^_t", "N~^f_t", "W"}),
        (r"\mathcal L_{\text{start}} \mathcal N_{t-1}", {r"\mathcal L_i", r"\mathcal N_t"}),
        (r"\operatorname{Var}(e_t) \begin{aligned} q \end{aligned}", {"e_t", "q"}),
        (r"\widehat{\operatorname{cov}}(\hat\theta) + d\ell_t", {r"\theta^", r"\ell_t"}),
        (r"L^{s\top} G L^s \le y^*_t - \gamma^s_t", {"L", "G", "y^*_t", r"\gamma^s_t"}),
    ],
)
def test_symbols_of(tex, found):
    assert symbols.symbols_of(tex) == found


NOTATION = r"""
| Symbol | Name |
|---|---|
| $a_t$, $w_t = K_t v_t$ | known |

## Letters without a fixed meaning

| Letters | Stand for |
|---|---|
| $X$ | matrices |

## Next

| $\hat y_t$ | prediction |
"""


def page(formula, *rows, text=""):
    table = "\n".join(["| symbol | shape |", "|---|---|", *rows])
    table = f":::{{dropdown}} Symbols of this page\n{table}\n:::\n"
    return [new_markdown_cell(f"{table}\n{text}\n\n$$\n{formula}\n$$ (def-a-b)\n")]


def complaints(**pages):
    return rules.one_meaning(NOTATION, pages)


def test_what_a_page_lets_a_shared_symbol_be():
    assert not complaints(one=page("w_t", text=r"Let $w_t = K_t\, v_t$ and $A_t = 1$ be."))
    assert complaints(one=page("w_t", text="Let $w_t = K_t$ be.")) == [
        "one: lets w_t be K_t; it is '$a_t$, $w_t = K_t v_t$, known'"
    ]


def test_all_is_declared():
    masked = r"| $\tilde Z_t$, $\dots$: masked | |"
    one = page(
        r"w_t + \hat y_t + S_t X + w = \tilde v_t - \tilde Z_t", "| $S_t$: a sum | |", masked
    )
    other = page(r"\tilde Z_t S_t", "| $S_t$: a sum | |", masked)
    assert not complaints(one=one, other=other)


@pytest.mark.parametrize(
    ("pages", "says"),
    [
        ({"one": page("S_t")}, "one: S_t is not declared"),
        (
            {"one": page("w_t", "| $w_t$: another | |")},
            "one: declares w_t, which the notation page",
        ),
        ({"one": page("X", "| $S_t$: a sum | |")}, "one: declares S_t, and does not use it"),
        (
            {"one": page("S_t", "| $S_t$: a sum | |"), "two": page("S_t", "| $S_t$: a root | |")},
            "two: S_t is 'a root'; in one, 'a sum'",
        ),
        (
            {"one": page("w_t", "| $S_t = A_t$ | `S` |"), "two": page("Y + 1")},
            "two: Y is not declared",
        ),
    ],
)
def test_what_is_wrong(pages, says):
    assert any(complaint.startswith(says) for complaint in complaints(**pages))
