"""The two tiers of tests: what `make test` runs, and what it leaves to `make thorough`."""

import pytest


def thorough(*values, marks=(), id=None):
    """A parameter set that only `make thorough` runs: see the marker in pyproject.toml."""
    return pytest.param(*values, marks=[pytest.mark.thorough, *marks], id=id)
