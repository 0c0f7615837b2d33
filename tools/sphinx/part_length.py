"""Sphinx: the role {length}`notebooks/kalman/` says how many chapters that is, and how long.

It takes the beginnings of several names, too, with spaces between them.
"""

import sys
from pathlib import Path

from docutils import nodes

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tools import book, reading  # noqa: E402


def say(chapters: int, minutes: float) -> str:
    """A reader plans by five minutes, or by the hour."""
    if minutes < 90:
        time = f"{reading.rounded(minutes)} minutes"
    else:
        time = f"{round(minutes / 60)} hours"
    return f"{chapters} chapters, {time}" if chapters > 1 else time


def length(name, rawtext, text, lineno, inliner, options=None, content=None):
    names = [name for name in book.notebook_names() if name.startswith(tuple(text.split()))]
    if not names:
        return [], [inliner.reporter.error(f"no chapter is named like {text!r}", line=lineno)]
    times = [reading.minutes(book.read_cells(name)) for name in names]
    return [nodes.inline("", say(len(names), sum(times)), classes=["length"])], []


def setup(app):
    app.add_role("length", length)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
