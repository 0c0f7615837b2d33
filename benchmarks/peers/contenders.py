"""Who takes part: the package it needs, the function that makes its call, and where it runs."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple


class Contender(NamedTuple):
    """One contender; its name is its key in `CONTENDERS`.

    ``make`` is "module.function" in this folder, ``options`` its keyword arguments and ``loglike``
    the name of one that is a function of the module. ``value`` marks those that give no gradient.
    ``parts`` says where it runs: "r" on all random models, "1" on one of them only, "m" on the
    models that people fit. ``compiles`` marks those whose first gradient is timed, ``quick`` those
    of a trial run. ``why`` says what the record has to say of it in words.
    """

    package: str
    make: str
    options: dict = {}  # noqa: RUF012 (never written to)
    loglike: str = ""
    value: bool = False
    parts: str = "rm"
    compiles: bool = False
    quick: bool = True
    why: str = ""


def _filter(kind: str, mode: str, parts: str = "r", **rest) -> Contender:
    return Contender(
        "pymc_extras", "pytensor_filters.contender", {"kind": kind, "mode": mode},
        parts=parts, quick=False, **rest,
    )  # fmt: skip


def _jax(package: str, loglike: str, **rest) -> Contender:
    return Contender(package, "jax_filters.contender", loglike=loglike, **rest)


CONTENDERS = {
    "ours": Contender("numba", "ours.contender", compiles=True),
    "ours, every step": Contender(
        "numba", "ours.contender", {"tol": 0.0},
        why="runs every step in full, without a steady state",
    ),
    "ours, value": Contender("numba", "ours.value_alone", value=True),
    "ours, value, every step": Contender("numba", "ours.value_alone", {"tol": 0.0}, value=True),
    "ours, PyTensor": Contender(
        "pytensor", "pytensor_filters.contender", {"kind": "ours", "mode": "NUMBA"},
        parts="r", compiles=True, quick=False,
    ),
    "plain Numba": Contender(
        "numba", "plain_numba.contender", compiles=True, why="always computes all nine gradients"
    ),
    "ours, JAX": Contender(
        "jax", "jax_filters.contender", {"method": "fused"}, "closed_form_loglike", compiles=True,
        why="a program of JAX calls the compiled pass",
    ),
    "JAX, closed form": Contender(
        "jax", "jax_filters.contender", {"method": "scan"}, "closed_form_loglike", compiles=True
    ),
    "JAX": Contender(
        "jax", "jax_filters.scan",
        why="the fastest of unroll = 1, 4, 16 and, for 2 to 6 series, of F factored by LAPACK "
        "or in full",
    ),
    "JAX, not unrolled": Contender("jax", "jax_filters.scan_once", parts="", compiles=True),
    "dynamax": _jax(
        "dynamax", "dynamax_loglike", compiles=True,
        why="adds 1e-9 to the diagonal of F, so it computes another function",
    ),
    "dynamax, parallel": Contender(
        "dynamax", "jax_filters.contender", {"parallel": True}, "dynamax_loglike", parts="1m"
    ),
    "Standard": _filter("Standard", "NUMBA", compiles=True),
    "Standard, JAX": _filter("Standard", "JAX", compiles=True),
    "Standard, C": _filter("Standard", "CVM", compiles=True),
    "Standard, plain form": _filter(
        "plain form", "NUMBA",
        why="updates the covariance by the short formula instead of Joseph's form",
    ),
    "Convergent": _filter(
        "Convergent", "NUMBA", compiles=True,
        why="stops its covariance where it changes by less than 1e-10",
    ),
    "Univariate": _filter("Univariate", "NUMBA", parts="1"),
    "Cholesky": _filter("Cholesky", "NUMBA", parts="1"),
    "statsmodels, value": Contender(
        "statsmodels", "statsmodels_filter.forward", value=True,
        why="stops its covariance where it changes by less than 1e-19",
    ),
    "statsmodels, smoother": Contender(
        "statsmodels", "statsmodels_filter.smoothed",
        why="computes the gradients from sums of what its smoother returns",
    ),
    "statsmodels score": Contender(
        "statsmodels", "statsmodels_filter.score", {"method": "approx"}, parts="1"
    ),
    "statsmodels score, Harvey": Contender(
        "statsmodels", "statsmodels_filter.score", {"method": "harvey"}, parts="1"
    ),
    "PyTorch": Contender("torch", "torch_filter.contender", parts="1m", quick=False),
    # Of `panels.py`: many series.
    "panel": Contender("numba", "many.shared", parts=""),
    "panel: loop": Contender("numba", "many.loop", parts=""),
    "panel: loop, kernel": Contender("numba", "many.kernel", parts=""),
    "panel: dynamax": Contender("dynamax", "many.vmapped", {"kind": "dynamax"}, parts=""),
    "panel: JAX": Contender("jax", "many.vmapped", {"kind": "scan"}, parts=""),
    "own": Contender("numba", "many.own", {"threads": 1}, parts=""),
    "own: two threads": Contender("numba", "many.own", {"threads": 2}, parts=""),
    "own: loop": Contender("numba", "many.own_loop", {"bare": False}, parts=""),
    "own: loop, kernel": Contender("numba", "many.own_loop", {"bare": True}, parts=""),
    "PyMC: ours": Contender("pymc", "many.hierarchical", {"kind": "ours"}, parts=""),
    "PyMC: filters": Contender("pymc_extras", "many.hierarchical", {"kind": "filters"}, parts=""),
    "PyMC: vectorized": Contender(
        "pymc_extras", "many.hierarchical", {"kind": "vectorized"}, parts=""
    ),
}  # fmt: skip

# Of these the gradients are the project's own: an error stops the record.
OWN = (
    "ours", "ours, every step", "ours, PyTensor", "ours, JAX", "plain Numba", "JAX, closed form"
)  # fmt: skip


def missing(name: str) -> str | None:
    """What a record says of a contender that cannot run here; None if it can."""
    package = CONTENDERS[name].package
    return None if find_spec(package) else f"{package} is not installed"


def maker(name: str):
    """The function of y, model and requested names that makes the contender's call."""
    what = CONTENDERS[name]
    module, function = what.make.split(".")
    module, options = import_module(f"peers.{module}"), dict(what.options)
    if what.loglike:
        options = {"loglike": partial(getattr(module, what.loglike), **options)}
    return partial(getattr(module, function), **options)


def start(name: str) -> None:
    """Import the package and compile something small: what any first use of it costs."""
    what = CONTENDERS[name]
    if what.package in ("jax", "dynamax"):
        from peers import jax_filters

        jax_filters.start()
    elif what.make.startswith("pytensor_filters"):
        from peers import pytensor_filters

        pytensor_filters.start(what.options["mode"])
    import_module("pymc_extras.statespace" if what.package == "pymc_extras" else what.package)
    if what.package == "dynamax":
        import_module("dynamax.linear_gaussian_ssm")
