"""The live figure of the landing page: by mouse, by keyboard, and what it says is true."""

import re

import numpy as np
import pytest

from helpers.datasets import local_level_arrays, nile
from helpers.kalman import StateSpace
from helpers.kalman.reference import loglike
from tools import book

PAGE = "book/index.html"


@pytest.fixture(params=[1400, 375])
def page(open_page, request):
    page = open_page(PAGE, request.param, reduced_motion="reduce")
    page.wait_for_selector(".live svg")
    yield page
    assert not page.troubles


def number(page, name):
    return float(page.inner_text(f"[data-value={name}]").replace("−", "-").replace(",", ""))


def score(page):
    return [float(x) for x in page.inner_text("[data-value=score]").replace("−", "-").split(",")]


def expected(gaps=()):
    y = nile().y.copy()
    y[list(gaps)] = np.nan
    return loglike(y, StateSpace(**local_level_arrays()))


def away(page):
    """Other variances than the estimates, by keyboard."""
    page.focus("[data-knob=Q]")
    page.keyboard.press("End")


def test_the_sum_of_1899_and_of_other_years(page):
    """Predicted + variance x derivative = smoothed, as the text above the figure says."""
    text = page.inner_text(".live-sum").replace("−", "-")
    assert re.findall(r"-?[\d.]+", text) == ["1899", "1133", "5501", "-0.0331", "951"]
    assert "1133 + 5501 \\times (-0.0331) = 951" in (book.ROOT / "book/index.md").read_text()
    page.locator(".live-series").scroll_into_view_if_needed()
    box = page.locator(".live-series").bounding_box()
    for share in (0.1, 0.5, 0.9):
        page.mouse.click(box["x"] + box["width"] * share, box["y"] + 100)
        text = page.inner_text(".live-sum").replace("−", "-")
        year, mean, variance, slope, smoothed = map(float, re.findall(r"-?[\d.]+", text))
        assert year != 1899
        assert mean + variance * slope == pytest.approx(smoothed, abs=1 + variance * 1e-4)


def test_the_climb_ends_at_the_estimates_of_the_literature(page):
    estimated = number(page, "loglik")
    away(page)
    before = number(page, "loglik")
    page.click("[data-do=climb]")
    assert number(page, "H") == pytest.approx(15099, rel=2e-3)
    assert number(page, "Q") == pytest.approx(1469.1, rel=2e-3)
    assert number(page, "loglik") == pytest.approx(expected(), abs=0.01)
    assert number(page, "loglik") > before
    assert score(page) == [0, 0]
    page.click("[data-do=reset]")
    assert number(page, "loglik") == estimated


def test_a_year_by_mouse(page):
    page.click("[data-do=climb]")
    observed = number(page, "loglik")
    page.locator(".live-series").scroll_into_view_if_needed()
    box = page.locator(".live-series").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.6, box["y"] + 120)
    assert number(page, "loglik") == observed
    page.click("[data-do=toggle]")
    text = page.get_attribute(".live-series", "aria-valuetext")
    assert text.endswith("removed")
    gap = int(text.split(":")[0]) - 1871
    assert number(page, "loglik") == pytest.approx(expected([gap]), abs=0.01)
    page.click("[data-do=toggle]")
    assert number(page, "loglik") == observed


def test_by_keyboard(page):
    page.click("[data-do=climb]")
    page.focus(".live-series")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.get_attribute(".live-series", "aria-valuetext") == "1872: 1160, removed"
    assert number(page, "loglik") == pytest.approx(expected([1]), abs=0.01)
    variance = number(page, "H")
    page.focus("[data-knob=H]")
    page.keyboard.press("ArrowRight")
    assert number(page, "H") == pytest.approx(variance * 10**0.01, rel=0.02)


def test_without_scripts_there_is_a_picture(browser, address):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address + PAGE)
    assert page.locator(".nile-live img").is_visible()
    context.close()
