"""Write the series and the model of the landing page's live figure: `python -m tools.nile_data`."""

import json

from helpers.datasets import local_level_arrays, nile
from tools import book

SCRIPT = "book/_static/nile-data.js"


def make() -> str:
    """The script: one constant."""
    series, arrays = nile(), local_level_arrays()
    first = int(series.index[0].astype("datetime64[Y]").astype(int)) + 1970
    data = {"first": first, "y": series.y[:, 0].tolist()}
    data["model"] = {name: arrays[name].item() for name in ("a0", "P0", "H", "Q")}
    return f"/* Made by tools/nile_data.py. */\nconst NILE = {json.dumps(data)};\n"


if __name__ == "__main__":
    (book.ROOT / SCRIPT).write_text(make(), encoding="utf-8")
