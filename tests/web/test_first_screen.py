"""The first screen of a chapter: question, picture, at most three sentences, reading time.

A visitor at 1400 x 900 sees all of it without scrolling.
"""

import re

import pytest

from tools import book

CHAPTERS = book.notebook_names()
TALLEST = 380

# What is still to be done; the list only shrinks.
NOT_YET = """
""".split()

MEASURE = """() => {
    const section = document.querySelector("article section");
    const parts = [...section.children];
    const end = parts.findIndex((node) => node.textContent.startsWith("Prerequisites: "));
    const head = parts.slice(0, end + 1).filter((node) => node.offsetHeight);
    const kind = (node) =>
        node.matches("h1") ? "title"
        : node.matches("p") && node.textContent.startsWith("Prerequisites: ") ? "time"
        : node.matches("p") && node.querySelector("strong")?.textContent === node.textContent
            ? "question"
        : node.matches("p") ? "answer"
        : node.querySelector("img, svg") && !node.querySelector("details") ? "picture"
        : node.tagName + "." + node.className;
    const image = section.querySelector("img, object, svg");
    return {
        order: head.map(kind).filter((now, i, all) => now !== all[i - 1]),
        answer: head.filter((node) => kind(node) === "answer")
            .map((node) => node.innerText).join(" "),
        picture: image.getBoundingClientRect().height,
        bottom: parts[end].getBoundingClientRect().bottom,
    };
}"""


def sentences(text):
    return len(re.findall(r"[.?!](?=\s+[A-Z(*]|\s*$)", text))


@pytest.mark.parametrize("name", CHAPTERS)
def test_first_screen(open_page, name):
    page = open_page(f"{name}.html")
    page.evaluate("() => document.fonts.ready")
    found = page.evaluate(MEASURE)
    troubles = []
    if found["order"] != ["title", "question", "picture", "answer", "time"]:
        troubles.append(f"the head is {found['order']}")
    if (many := sentences(found["answer"])) > 3:
        troubles.append(f"the answer has {many} sentences")
    if found["picture"] > TALLEST:
        troubles.append(f"the picture is {found['picture']:.0f} px high")
    if found["bottom"] > 900:
        troubles.append(f"the reading time ends at {found['bottom']:.0f} px")
    if name.removeprefix("notebooks/") in NOT_YET:
        if troubles:
            pytest.xfail("; ".join(troubles))
    else:
        assert not troubles, "; ".join(troubles)
