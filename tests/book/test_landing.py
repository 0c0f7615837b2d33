"""The numbers of the landing page and of the page of records are those measured or computed."""

import json
import re

import numpy as np

from helpers.datasets import local_level_arrays, nile
from helpers.kalman import StateSpace
from helpers.kalman.reference import kalman_filter
from tools import book, headline, reading, records

TEXT = " ".join((book.ROOT / "book/index.md").read_text(encoding="utf-8").split())
RECORD = json.loads((book.ROOT / "benchmarks/results/kalman_peers.json").read_text())


def over_their_value(rows):
    return np.median(rows["ours"]) / np.median(rows["statsmodels, value"])


def test_the_claim():
    ratios = [over_their_value(x["rows"]) for x in RECORD["real"]["found"].values()]
    assert "five models that people fit, the log-likelihood" in TEXT and len(ratios) == 5
    readme = " ".join((book.ROOT / "README.md").read_text(encoding="utf-8").split())
    for text in (TEXT.replace("*", ""), readme):
        assert f"take {min(ratios):.2f} to {max(ratios):.2f} of the time" in text


def test_where_it_does_not_hold():
    """The number of states where the two lines cross, between two that were measured."""
    curve = {int(m): over_their_value(x) for m, x in RECORD["scaling"]["found"]["m"].items()}
    crossing = np.exp(np.interp(0, np.log([*curve.values()]), np.log([*curve])))
    said = int(re.search(r"more than about (\d+) states", TEXT)[1])
    assert abs(crossing - said) < 1


def test_the_sum_of_1899():
    series, model = nile(), StateSpace(**local_level_arrays())
    filtered = kalman_filter(series.y, model)
    t = 1899 - 1871
    mean, variance = filtered.out.a_pred[t, 0], filtered.out.P_pred[t, 0, 0]
    slope = headline.adjoints(model, filtered)[t, 0]
    whole = f"{mean:.0f} + {variance:.0f} \\times ({slope:.4f}) = {mean + variance * slope:.0f}"
    assert whole in TEXT


def test_two_hours():
    names = re.search(r"Two hours to spend\?.*?\{length\}`([^`]*)`", TEXT)[1].split()
    chapters = [x for x in book.notebook_names() if x.startswith(tuple(names))]
    assert len(chapters) == len(names)
    assert abs(sum(reading.minutes(book.read_cells(x)) for x in chapters) - 120) < 15


def test_the_page_of_records_is_fresh():
    text = (book.ROOT / records.PAGE).read_text(encoding="utf-8")
    assert text == records.make(), f"{records.PAGE} is stale: run make notebooks"
