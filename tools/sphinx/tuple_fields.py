"""Sphinx: leave out the fields of a named tuple, whose own docstring describes them better."""


def skip(app, what, name, obj, skip, options):
    """Python's docstring of such a field is "Alias for field number 0"."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field") else None


def setup(app):
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}
