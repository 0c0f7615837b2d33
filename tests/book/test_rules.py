"""Each rule of the book passes what is right and says what is wrong."""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools import book, equation_index, notebooks, rules

FIGURE = {"figure": {"caption": "A line.", "name": "fig-page-line"}, "image": {"alt": "A line."}}


def code(source="1", count=1, outputs=(), **metadata):
    return new_code_cell(source, execution_count=count, outputs=list(outputs), metadata=metadata)


def verified(label, power=-13, against="complex step"):
    facts = {"label": label, "against": against, "rtol": 1e-10, "error_power": power}
    return new_output(
        "display_data", {"text/plain": f"{label}: agrees"}, metadata={"verify": facts}
    )


def picture(kind="image/png", data="aGk="):
    return new_output("display_data", {kind: data})


def stream(name):
    return new_output("stream", name=name, text="careful\n")


def error():
    return new_output("error", ename="ValueError", evalue="no", traceback=[])


def complaint_of(complaints, words):
    assert len(complaints) == 1, complaints
    assert words in complaints[0]


# --- one notebook ---------------------------------------------------------------------------------


def test_a_good_notebook():
    cells = [
        new_markdown_cell("# Title"),
        code(count=1, outputs=[stream("stdout")]),
        code(count=2, outputs=[error()], tags=["raises-exception"]),
        code(count=3, outputs=[picture()], mystnb=FIGURE),
        code(count=4, outputs=[picture("image/svg+xml", "<svg/>")], mystnb=FIGURE),
    ]
    assert rules.notebook("page", new_notebook(cells=cells)) == []


def test_what_of_the_machine_may_be_shown():
    cells = [
        code("n = LANES\nprint(n < 9, len({1, 2}), sorted({1, 2}), {1} == {1})"),
        code("print(LANES)", count=2, tags=["nbval-ignore-output"]),
        code("n = 3\nprint(n)", count=3),
    ]
    assert rules.notebook("page", new_notebook(cells=cells)) == []


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([code(count=None)], "not executed"),
        ([code(count=2)], "not executed"),
        ([code(count=2), code(count=1)], "not executed"),
        ([code(count=1), code(count=3)], "not executed"),
        ([code(source=" ")], "cell 1 is empty"),
        ([code(outputs=[error()])], "cell 1 ends in ValueError"),
        ([code(outputs=[stream("stderr")])], "stderr: 'careful'"),
        ([new_markdown_cell("x") for _ in range(35)], "35 cells"),
        ([code(outputs=[picture()], mystnb={"figure": FIGURE["figure"]})], "image: alt"),
        ([code(outputs=[picture()], mystnb={**FIGURE, "image": {"alt": " "}})], "image: alt"),
        (
            [code(outputs=[picture()], mystnb={**FIGURE, "figure": {"name": "fig-a-b"}})],
            "figure: caption",
        ),
        (
            [code(outputs=[picture()], mystnb={**FIGURE, "figure": {"caption": "A."}})],
            "figure: name",
        ),
        (
            [code(outputs=[picture("image/svg+xml")], mystnb={"figure": FIGURE["figure"]})],
            "image: alt",
        ),
        (
            [code(outputs=[picture("image/svg+xml", "<dc:date>2026</dc:date>")], mystnb=FIGURE)],
            "its date",
        ),
        (
            [code(outputs=[picture("image/svg+xml", '<g style="fill: #d55e00"')], mystnb=FIGURE)],
            "words in #d55e00, too pale",
        ),
        ([code("print(tiles.LANES)")], "cell 1 prints LANES"),
        ([code("start = perf_counter()"), code("start", 2)], "cell 2 prints start"),
        ([code("def rows():\n    return LANES"), code("print(f'{rows()}')", 2)], "prints rows"),
        ([code("for x in (LANES, 1):\n    kept.append(x)\nkept")], "prints kept"),
        ([code("print(', '.join({'a', 'b'}))")], "cell 1 prints {'a', 'b'}, a set"),
        ([code("f'{set(names)}'")], "prints set(names), a set"),
    ],
)
def test_a_bad_notebook(cells, words):
    complaint_of(rules.notebook("page", new_notebook(cells=cells)), words)


FOLDED = code("import numpy as np\nfrom a.b import c as d\nx = {}\n\ndef f(y):\n    return y")


@pytest.mark.parametrize(
    ("shown", "missing"),
    [
        ("np.ones(1)", ["np"]),
        ("import numpy as np\nnp.ones(1)", []),
        ("from e import d\nd()", []),
        ("x[1] = d", ["d", "x"]),
        ("x += 1", ["x"]),
        ("x = x + 1", ["x"]),
        ("x = [f for f in range(3)]", []),
        ("f", ["f"]),
        ("def g(x, np):\n    d = np\n    return x, d, y", []),
        ("def g(z):\n    return f(z)", ["f"]),
        ("for x in range(3):\n    print(x)", []),
        ("try:\n    f = 1\nexcept E as x:\n    print(x)", []),
    ],
)
def test_what_is_shown_can_be_pasted(shown, missing):
    FOLDED.metadata["tags"] = ["hide-input"]
    cells = [code("x = 1"), FOLDED, code(shown), FOLDED]
    complaints = rules.can_be_pasted("page", new_notebook(cells=cells))
    assert [complaint.split()[7].strip(",") for complaint in complaints] == missing
    cells[2].metadata["tags"] = ["hide-input"]
    assert rules.can_be_pasted("page", new_notebook(cells=cells)) == []


def test_pair():
    assert rules.pair("page", "a\nb\n", "a\nb\n") == []
    complaint_of(rules.pair("page", "a\nb\n", "a\nc\n"), "line 2")
    complaint_of(rules.pair("page", "a\nb\n", "a\n"), "line 2")


# --- pages ----------------------------------------------------------------------------------------

PAGE = r"""
(the-page)=
# Title

````{prf:proposition} The gradient of $\log|F|$
:label: prop-page-logdet

$$
\bar F = F^{-\top}
$$ (eq-page-logdet)

```{math}
:label: eq-page-inside
x
```
````

## Below

$$ x = 1 $$ (def-page-x)

:::{figure} image.png
:name: fig-page-image
:alt: An image
:::

```python
# (not-a-label)=
```

```{exercise-start} The inverse
:label: ex-page-inverse
```
$$ x $$ (eq-page-exercise)
```{exercise-end}
```

````md
$$ x $$ (eq-page-shown)
````
"""


def test_labels_of_a_page():
    cells = [new_markdown_cell(PAGE), code(mystnb=FIGURE)]
    assert [label[:2] + label[3:] for label in book.labels_of("page", cells)] == [
        ("the-page", "place", ""),
        ("prop-page-logdet", "place", r"The gradient of $\log|F|$"),
        ("eq-page-logdet", "equation", r"The gradient of $\log|F|$"),
        ("eq-page-inside", "equation", r"The gradient of $\log|F|$"),
        ("def-page-x", "equation", "Below"),
        ("fig-page-image", "figure", "Below"),
        ("ex-page-inverse", "place", "The inverse"),
        ("eq-page-exercise", "equation", "The inverse"),
        ("fig-page-line", "figure", "Below"),
    ]
    assert book.title_of(cells) == "Title"


def test_formulas_of_a_page():
    text = "$$ a $$ and\n\n> $$\n> b\n> = c\n> $$ (eq-page-b)\n\n$$ d $$ (def-page-d)\n"
    found = book.formulas_of([new_markdown_cell(text), code("$$ no $$ (eq-page-no)")])
    assert found == {"eq-page-b": "b\n= c", "def-page-d": "d"}


def label(name, kind="equation", page="page"):
    return book.Label(name, kind, page, "")


def test_labels_unique():
    assert rules.labels_unique([label("eq-page-a"), label("eq-page-b")]) == []
    complaint_of(
        rules.labels_unique([label("eq-page-a"), label("eq-page-A", page="other")]),
        "other: the label eq-page-A is taken in page",
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("eq-page-Pbar", "equation"),
        ("def-page-v", "equation"),
        ("fig-page-loss", "figure"),
        ("anything", "place"),
    ],
)
def test_a_good_name(name, kind):
    assert rules.labels_named([label(name, kind)]) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("eq-page", "equation"),
        ("loss", "equation"),
        ("fig-page-loss", "equation"),
        ("eq-page-loss", "figure"),
        ("eq_page_loss", "equation"),
    ],
)
def test_a_bad_name(name, kind):
    complaint_of(rules.labels_named([label(name, kind)]), "should be")


def test_results_are_checked():
    labels = [label("eq-page-a"), label("def-page-b"), label("eq-page-c", kind="place")]
    check = book.Check("eq-page-a", "autodiff", -12, "page")
    assert rules.results_are_checked(labels, [check]) == []
    complaint_of(rules.results_are_checked(labels, []), "no cell verifies eq-page-a")
    stray = check._replace(label="def-page-b")
    complaint_of(rules.results_are_checked(labels, [check, stray]), "names no equation")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("![](a.png)", "![](a.png)"),
        ("```{figure} a.png\n:name: fig-a-b\n```", "{figure} a.png has no alternative"),
        (":::{image} a.png\n:::", "{image} a.png has no"),
    ],
)
def test_an_image_without_words(text, words):
    complaint_of(rules.images("page", text), words)


def test_images():
    described = "![A line](a.png)\n\n```{figure} a.png\n:alt: A line\n```\n"
    assert rules.images("page", described) == []


# --- a small book on disk -------------------------------------------------------------------------


@pytest.fixture
def small_book(tmp_path):
    toc = """
        format: jb-book
        root: book/index
        parts:
          - caption: Chapters
            chapters:
              - file: notebooks/one
                sections:
                  - file: notebooks/two
    """
    (tmp_path / "_toc.yml").write_text(toc)
    for folder in ("book", "notebooks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "book/index.md").write_text("# Book\n")
    for name in ("one", "two"):
        text = f"# Chapter {name}\n\n$$ x $$ (eq-{name}-x)\n"
        outputs = [verified(f"eq-{name}-x", -13), verified(f"eq-{name}-x", -12)]
        outputs += [verified(f"eq-{name}-x", -9, "autodiff")]
        cells = [new_markdown_cell(text), code("x", outputs=outputs)]
        nb = notebooks.normalised(new_notebook(cells=cells))
        nbformat.write(nb, tmp_path / f"notebooks/{name}.ipynb")
        path = tmp_path / f"notebooks/{name}.md"
        path.write_text(notebooks.to_text(nb, path))
    return tmp_path


def test_contents(small_book):
    assert book.page_names(small_book) == ["book/index", "notebooks/one", "notebooks/two"]
    assert rules.contents(small_book) == []


def test_parts(small_book):
    assert book.parts(small_book) == [("Chapters", ["notebooks/one", "notebooks/two"])]
    more = "  - caption: More\n    chapters: [file: a]\n  - numbered: 1\n    chapters: [file: b]\n"
    (small_book / "_toc.yml").write_text(f"root: book/index\nparts:\n{more}")
    assert book.parts(small_book) == [("More", ["a", "b"])]


def test_contents_with_a_page_missing(small_book):
    (small_book / "notebooks/two.md").unlink()
    complaint_of(rules.contents(small_book), "needs notebooks/two.md")


def test_contents_with_a_notebook_left_out(small_book):
    (small_book / "notebooks/three.md").write_text("# Three\n")
    complaint_of(rules.contents(small_book), "leaves out notebooks/three")


def test_contents_in_another_order_than_the_files(small_book):
    toc = small_book / "_toc.yml"
    before, one, between, two, after = re.split("(notebooks/one|notebooks/two)", toc.read_text())
    toc.write_text(before + two + between + one + after)
    complaint_of(rules.contents(small_book), "names notebooks/one after notebooks/two")


def test_equation_index(small_book):
    page = equation_index.make(small_book)
    assert "2 results with their 6 checks" in page.replace("\n", " ")
    assert page.index("eq-one-x") < page.index("eq-two-x")
    # The worst of the two complex steps, and the autodiff beside it.
    assert page.count("- complex step, 10⁻¹²\n- autodiff, 10⁻⁹\n") == 2
    assert "10⁻¹³" not in page
    assert page.count("$$\nx\n$$") == 2
    equation_index.write(small_book)
    assert (small_book / equation_index.PAGE).read_text() == page


# --- the notebooks command ------------------------------------------------------------------------


def test_run_writes_the_pair(small_book):
    path = small_book / "notebooks/one.md"
    path.write_text("# T\n\n```{code-cell}\nprint(1 + 1)\n```\n")
    assert notebooks.run("notebooks/one", small_book) is None
    nb = book.read_notebook("notebooks/one", small_book)
    assert rules.notebook("one", nb) == []
    assert nb.cells[1].outputs[0].text == "2\n"
    assert rules.pair("one", notebooks.to_text(nb, path), path.read_text()) == []
    # A second run changes no byte.
    before = [path.read_bytes(), path.with_suffix(".ipynb").read_bytes()]
    assert notebooks.run("notebooks/one", small_book) is None
    assert [path.read_bytes(), path.with_suffix(".ipynb").read_bytes()] == before


def test_a_failing_run_writes_nothing(small_book):
    path = small_book / "notebooks/one.md"
    text = "# T\n\n```{code-cell}\nraise ValueError('on purpose')\n```\n"
    path.write_text(text)
    before = path.with_suffix(".ipynb").read_bytes()
    trouble = notebooks.run("notebooks/one", small_book)
    assert "raise ValueError('on purpose')" in trouble
    assert "Traceback" in trouble
    assert path.with_suffix(".ipynb").read_bytes() == before
    assert path.read_text() == text


def test_an_edited_notebook_is_not_lost(small_book):
    path = small_book / "notebooks/one.md"
    nb = book.read_notebook("notebooks/one", small_book)
    nb.cells[1].source = "edited_here = 1"
    nbformat.write(nb, path.with_suffix(".ipynb"))
    assert "newer than its .md" in notebooks.run("notebooks/one", small_book)


def test_metadata_of_a_machine_is_dropped():
    timed = code(tags=["hide-input"], execution={"iopub.status.busy": "2020"}, collapsed=True)
    nb = new_notebook(cells=[timed])
    nb.metadata.language_info = {"name": "python", "version": "3.12.1"}
    nb.metadata.kernelspec = {"name": "mine", "display_name": "Mine"}
    clean = notebooks.normalised(nb)
    assert dict(clean.cells[0].metadata) == {"tags": ["hide-input"]}
    assert "version" not in clean.metadata.language_info
    assert clean.metadata.kernelspec.name == "python3"


def test_cell_ids_follow_the_content():
    def ids(*sources):
        notebook = new_notebook(cells=[code(source) for source in sources])
        return [cell.id for cell in notebooks.normalised(notebook).cells]

    a, b = ids("a", "b")
    assert ids("new", "a", "b", "a")[1:] == [a, b, f"{a}-2"]


def test_chosen():
    names = ["notebooks/kalman/01-filter", "notebooks/kalman/02-calculus"]
    assert notebooks.chosen([], names) == names
    assert notebooks.chosen(["kalman/02"], names) == names[1:]
    assert notebooks.chosen(["notebooks/kalman/01-filter.md"], names) == names[:1]
    with pytest.raises(SystemExit, match="No notebook is named like 'sparse'"):
        notebooks.chosen(["sparse"], names)


# --- the repository -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["home", "Users", "root", "tmp"])
def test_a_path_of_a_machine(where):
    path = "/".join(["", where, "ann", "x.py"])
    complaint_of(rules.own_paths("page", f"File {path}, line 1"), f"/{where}/ann")
    assert rules.own_paths("page", f"https://example.org{path} and a/{where}/b") == []


def test_a_path_of_this_checkout():
    folder = Path("/checkouts", "ann", "book")
    complaint_of(rules.own_paths("page", f"in {folder}/x.py", [folder]), str(folder))
    # A checkout straight under / has too common a name to look for.
    assert rules.own_paths("page", "a/book/b", [Path("/book")]) == []


def test_a_path_of_windows():
    drive = "C:" + "\\" + "Users"
    complaint_of(rules.own_paths("page", f"in {drive}\\ann"), drive)
    assert rules.own_paths("page", r"$L:\mathbb{R} \to \mathbb{R}$") == []


PROJECT = """
[project]
dependencies = ["numpy>=2,<3"]
[project.optional-dependencies]
test = ["PyTest_x >=1"]
"""


def test_lock_fits():
    lock = "-e .\n# a remark\nnumpy==2.5.5\npytest-x==1.0 ; sys_platform == 'darwin'\n"
    assert rules.lock_fits(lock, PROJECT) == []


@pytest.mark.parametrize(
    ("lock", "words"),
    [
        ("numpy==2.5.5\npytest-x==1.0\n", "without `-e .`"),
        ("-e .\nnumpy==2.5.5\npytest-x==1.0\nscipy>=1\n", "'scipy>=1' is not pinned"),
        ("-e .\nnumpy==2.5.5\npytest-x==1.0\nscipy\n", "'scipy' is not pinned"),
        ("-e .\nnumpy==2.5.5\npytest-x==1.0\nscipy==1.*\n", "is not pinned"),
        ("-e .\nnumpy==2.5.5\npytest-x==1.0\nx @ https://example.org/x\n", "is not pinned"),
        ("-e .\nnumpy==3.0\npytest-x==1.0\n", "numpy<3,>=2 is not met by 3.0"),
        ("-e .\nnumpy==2.5.5\n", "PyTest_x>=1 is not met by None"),
    ],
)
def test_lock_does_not_fit(lock, words):
    complaint_of(rules.lock_fits(lock, PROJECT), words)


def test_ran_with():
    def chapter(printed):
        output = new_output("stream", name="stdout", text=printed)
        return new_notebook(cells=[code(outputs=[output])])

    lock = "-e .\nnumpy==2.5.5\npymc-extras==0.15.1\n"
    good = "python 3.12.1\nnumpy 2.5.5\npymc_extras 0.15.1\nnumpy 2.0 is another sentence\n"
    assert rules.ran_with("k", chapter(good), lock) == []
    complaint_of(rules.ran_with("k", chapter("a\nnumpy 2.5.4\n"), lock), "ran with numpy 2.5.4")


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("lower by 3.3<!--printed--> per cent, $c = -1,234$<!--printed-->", True),
        ("a quarter, 0.25<!--printed: ours-->", True),
        ("no less than 0.25<!--printed: theirs-->", False),
        ("lower by 3.2<!--printed-->", False),
        ("about 7<!--printed-->", False),
        ("a third<!--printed-->", False),
    ],
)
def test_numbers_are_as_printed(text, known):
    stays = code(outputs=[new_output("stream", name="stdout", text="ours 0.2465\ntheirs 1\n-3.31")])
    last = new_output("execute_result", data={"text/plain": "-1234.4"})
    clock = code(outputs=[new_output("stream", name="stdout", text="7 ms")])
    clock.metadata["tags"] = ["nbval-ignore-output"]
    cells = [new_markdown_cell(text), stays, code(outputs=[last]), clock]
    complaints = rules.as_printed("k", new_notebook(cells=cells))
    assert (complaints == []) == known


def test_names_repository():
    assert rules.repository("repository:\n  url: https://github.com/ann/book") == "ann/book"
    hub, binder = "https://github.com/", "https://mybinder.org/v2/gh/"
    good = f"{hub}ann/book.git {hub}pymc-devs/pytensor {binder}ann/book/main ann.github.io/book/"
    assert rules.names_repository("README", good, "ann/book") == []
    complaint_of(rules.names_repository("README", "", "ann/book"), "does not name ann/book")
    for wrong in (f"{hub}bob/book", f"{binder}bob/notes/main", "https://bob.github.io/book"):
        complaint_of(rules.names_repository("README", f"{good} {wrong}", "ann/book"), "is not the")
