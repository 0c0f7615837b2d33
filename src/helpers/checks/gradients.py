"""Gradients by complex steps and differences, and the record of what was checked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Reference(np.ndarray):
    """An array that knows what it was computed by, for :func:`verify` to read.

    :func:`complex_step`, :func:`finite_difference` and :attr:`StepSweep.value` are references.
    What comes from elsewhere is signed where it is computed:
    ``Reference(results.llf_obs, "statsmodels")``.

    The source stays with slices and single entries (0-d arrays), with reshaped and transposed
    arrays, with arithmetic whose other operands have no source, and with what ``np.concatenate``,
    ``np.stack`` and their like, ``np.r_`` among them, make of parts that all have it.  It is lost
    where two sources meet, where a part of a concatenation has none, once an entry is overwritten,
    and in integers, booleans, Python floats and whatever ``np.asarray`` or ``np.array`` returns;
    ``verify`` then asks for ``against=``.

    Parameters
    ----------
    values : array (any shape)
    source : str
        What computed them: ``"complex step"``, ``"autodiff"``, ``"statsmodels"``, ...

    Examples
    --------
    >>> slope = Reference([3.0, 4.0], "central differences")
    >>> (2 * slope[1]).source
    'central differences'
    >>> print(getattr(slope + Reference([1.0, 1.0], "complex step"), "source", None))
    None
    """

    source: str | None

    def __new__(cls, values, source: str) -> Reference:
        array = np.asarray(values).view(cls)
        array.source = source
        return array

    def __array_finalize__(self, template):
        self.source = getattr(template, "source", None)

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **kwargs):
        source = _only(_sources(inputs) - {None})
        if out:
            kwargs["out"] = tuple(map(_unsigned, out))
        found = getattr(ufunc, method)(*map(_unsigned, inputs), **kwargs)
        if not isinstance(found, tuple):
            return _signed(found, source, *out)
        return tuple(map(_signed, found, [source] * len(found), out or [None] * len(found)))

    def __array_function__(self, func, types, args, kwargs):
        result = super().__array_function__(func, types, args, kwargs)
        if func in _JOINS:
            parts = args[:2] if func is np.append else args[:1]
            return _signed(_unsigned(result), _only(_sources(parts)))
        if func in _BLANKS or len(_sources([*args, *kwargs.values()]) - {None}) > 1:
            return _unsigned(result)
        return result

    def __getitem__(self, key):
        return _signed(super().__getitem__(key), self.source)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        if _sources(value) != {self.source}:
            self.source = None


# Functions whose result is as good as the worst of its parts, and those that copy a shape alone.
_STACKS = (np.stack, np.column_stack, np.hstack, np.vstack, np.dstack)
_JOINS = frozenset((np.append, np.block, np.concatenate, *_STACKS))
_BLANKS = frozenset((np.empty_like, np.full_like, np.ones_like, np.zeros_like))


def _sources(values) -> set[str | None]:
    """The sources of an array, or of all arrays in nested lists; None for one that has none."""
    if isinstance(values, list | tuple):
        return set().union(*map(_sources, values))
    return {values.source if isinstance(values, Reference) else None}


def _only(sources: set[str | None]) -> str | None:
    return next(iter(sources)) if len(sources) == 1 else None


def _unsigned(x):
    return x.view(np.ndarray) if isinstance(x, Reference) else x


def _signed(x, source: str | None, out: np.ndarray | None = None):
    """x as a reference, if it is a plain array or scalar of real or complex numbers.

    Where x was written into the array `out`, that array itself: signed if it can hold a signature.
    """
    if out is not None:
        if isinstance(out, Reference):
            out.source = source
        return out
    plain = type(x) is np.ndarray or isinstance(x, np.generic)
    return Reference(x, source) if source and plain and x.dtype.kind in "fc" else x


def symmetrize(G: np.ndarray) -> np.ndarray:
    """Symmetric part of the last two axes.

    Parameters
    ----------
    G : array (..., k, k)

    Returns
    -------
    array (..., k, k)
        ``(G + G') / 2``: the gradient for a symmetric matrix, from one that ignores the symmetry.
    """
    return (G + np.swapaxes(G, -1, -2)) / 2


def entry_by_entry(
    along: Callable[[np.ndarray], float], x: np.ndarray, symmetric: bool, most: int | None = None
) -> np.ndarray:
    """The gradient at x from the derivative along each direction; of `most` entries, NaN elsewhere.

    A symmetric matrix moves along (E_ij + E_ji)/2, so that it stays symmetric; the derivative
    along it is the (i, j) entry, and the (j, i) entry, of the symmetric gradient.
    """
    gradient, entries = np.full(x.shape, np.nan), list(np.ndindex(x.shape))
    if most is not None and x.size > most and not symmetric:
        some = np.random.default_rng(0).choice(x.size, most, replace=False)
        entries = [entries[flat] for flat in some]
    for index in entries:
        mirrored = (*index[:-2], *index[:-3:-1]) if symmetric else index
        if index <= mirrored:
            E = np.zeros(x.shape)
            E[index] += 0.5
            E[mirrored] += 0.5
            gradient[index] = gradient[mirrored] = along(E)
    return gradient


def _as_point(x, symmetric: bool) -> np.ndarray:
    x = np.asarray(x, dtype=float)
    if symmetric and (x.ndim < 2 or x.shape[-1] != x.shape[-2]):
        raise ValueError(f"symmetric=True needs square matrices (..., k, k); x has shape {x.shape}")
    return x


def complex_step(
    f: Callable[[np.ndarray], complex], x, *, symmetric: bool = False, step: float = 1e-30
) -> Reference:
    r"""Gradient of a scalar function by the complex step, entry by entry.

    .. math:: \frac{\partial f}{\partial x_i} = \frac{\operatorname{Im} f(x + i h e_i)}{h} + O(h^2)

    There is no difference of near-equal numbers, so ``step`` can be tiny and the result is exact
    to rounding, provided that ``f`` is analytic as written: no ``abs``, no conjugate transpose,
    no comparison with a complex number, and no cast to real.

    Parameters
    ----------
    f : function of an array of x's shape, to a scalar
        It is called with complex arrays.
    x : array (any shape)
        The point.
    symmetric : bool
        The last two axes of ``x`` are a symmetric matrix: move it symmetrically and return the
        symmetric gradient.
    step : float
        The imaginary step h.

    Returns
    -------
    Reference, of x's shape
        Signed ``"complex step"``.

    Raises
    ------
    TypeError
        If ``f`` returns a real number for a complex argument: it dropped the imaginary part, and
        the result would be a plausible zero.
    ValueError
        If ``symmetric`` is set and ``x`` is not square.

    References
    ----------
    Squire and Trapp (1998), Using complex variables to estimate derivatives of real functions,
    SIAM Review 40(1), doi:10.1137/S003614459631241X.
    """
    x = _as_point(x, symmetric)

    def along(E):
        value = f(x + 1j * step * E)
        if not np.iscomplexobj(value):
            raise TypeError(
                "f returned a real number for a complex argument, so the complex step "
                "sees no derivative; f must carry complex numbers through to its value"
            )
        return np.imag(value) / step

    return Reference(entry_by_entry(along, x, symmetric), "complex step")


class StepSweep(NamedTuple):
    """Central differences of a function along one direction, over a range of steps.

    Parameters
    ----------
    steps : array (k,)
        The steps h, from the largest to the smallest.
    estimates : array (k,)
        :math:`(f(x + h v) - f(x - h v)) / (2 h)` for each step.
    best : int
        Index of the step at which neighbouring estimates agree best.
    """

    steps: np.ndarray
    estimates: np.ndarray
    best: int

    @property
    def value(self) -> Reference:
        """The estimate at the best step (0-d), signed ``"central differences"``."""
        return Reference(self.estimates[self.best], "central differences")

    @property
    def uncertainty(self) -> float:
        """How far the best estimate is from its two neighbours (the larger of the two)."""
        near = self.estimates[max(self.best - 1, 0) : self.best + 2]
        return float(np.max(np.abs(near - self.value)))


def step_sweep(f: Callable[[np.ndarray], float], x, v, *, steps=None) -> StepSweep:
    r"""Directional derivative by central differences, over a range of steps.

    The truncation error of :math:`(f(x+hv) - f(x-hv))/2h` falls as :math:`h^2` and its rounding
    error grows as :math:`\epsilon/h`: somewhere between lies a best step, which depends on the
    scale of ``f`` and of ``x``.  The sweep finds it without knowing either, as the place where
    an estimate and its two neighbours agree best, up to the rounding of ``f``.

    Parameters
    ----------
    f : function of an array of x's shape, to a real scalar
    x : array (any shape)
        The point.
    v : array of x's shape
        The direction.
    steps : array (k,), optional
        Steps to try, k >= 3.  Default: 10^-1 to 10^-10 in half decades, times the size of ``x``
        (or one, if that is larger).

    Returns
    -------
    StepSweep

    Raises
    ------
    ValueError
        If shapes differ, there are fewer than three steps, or no step gives finite values.
    """
    x, v = np.asarray(x, dtype=float), np.asarray(v, dtype=float)
    if x.shape != v.shape:
        raise ValueError(f"the direction has shape {v.shape}, expected the point's {x.shape}")
    if steps is None:
        steps = np.logspace(-1, -10, 19) * max(1.0, np.max(np.abs(x), initial=0.0))
    steps = np.sort(np.asarray(steps, dtype=float))[::-1]
    if len(steps) < 3:
        raise ValueError(f"a sweep needs at least three steps, got {len(steps)}")
    estimates, rounding = np.full((2, len(steps)), np.nan)
    for k, h in enumerate(steps):
        after, before = x + h * v, x - h * v
        if np.array_equal(after, before):
            continue  # so small a step does not move the point
        try:
            with np.errstate(all="ignore"):
                f_after, f_before = f(after), f(before)
        except (ArithmeticError, np.linalg.LinAlgError, ValueError):
            continue  # so large a step has left the domain of f
        estimates[k] = (f_after - f_before) / (2 * h)
        rounding[k] = np.finfo(float).eps * max(abs(f_after), abs(f_before)) / h
    jump = np.abs(np.diff(estimates))
    # Rounded values may agree by chance, so what rounding alone can do counts as disagreement too.
    disagreement = np.maximum(jump[:-1], jump[1:]) + rounding[1:-1]
    if not np.isfinite(disagreement).any():
        raise ValueError(f"f is not finite around the point at any step in {steps.tolist()}")
    best = np.nanargmin(np.where(np.isfinite(disagreement), disagreement, np.nan))
    return StepSweep(steps, estimates, int(best) + 1)


def finite_difference(
    f: Callable[[np.ndarray], float], x, *, symmetric: bool = False, steps=None
) -> Reference:
    """Gradient of a scalar function by central differences, each entry at its own best step.

    Expect eight to ten correct digits where ``f`` is smooth and well scaled: use it where the
    complex step cannot go.

    Parameters
    ----------
    f : function of an array of x's shape, to a real scalar
    x : array (any shape)
    symmetric : bool
        As in :func:`complex_step`.
    steps : array (k,), optional
        As in :func:`step_sweep`.

    Returns
    -------
    Reference, of x's shape
        Signed ``"central differences"``.

    Raises
    ------
    ValueError
        As :func:`step_sweep`; or if ``symmetric`` is set and ``x`` is not square.
    """
    x = _as_point(x, symmetric)
    slopes = entry_by_entry(lambda E: step_sweep(f, x, E, steps=steps).value, x, symmetric)
    return Reference(slopes, "central differences")


def adjoint_gap(
    jvp: Callable[[np.ndarray], np.ndarray],
    vjp: Callable[[np.ndarray], np.ndarray],
    x_shape: tuple[int, ...],
    y_shape: tuple[int, ...],
    rng: np.random.Generator,
    trials: int = 5,
) -> float:
    r"""Adjoint (dot-product) test of a linear map and its transpose.

    If ``vjp`` really is the transpose of ``jvp``, then
    :math:`\langle \bar y, J \dot x\rangle = \langle J^\top \bar y, \dot x\rangle` for every pair.

    Parameters
    ----------
    jvp : function (x_shape) -> (y_shape)
        Jacobian-vector product.
    vjp : function (y_shape) -> (x_shape)
        Vector-Jacobian product.
    x_shape, y_shape : tuples of int
    rng : numpy.random.Generator
    trials : int
        Number of random pairs.

    Returns
    -------
    float
        The largest difference over the trials, relative to the product of the vectors' norms
        (not to the inner product, which can be near zero by chance).

    Raises
    ------
    ValueError
        If a product comes back in the wrong shape.
    """
    worst = 0.0
    for _ in range(trials):
        x_dot, y_bar = rng.standard_normal(x_shape), rng.standard_normal(y_shape)
        y_dot, x_bar = np.asarray(jvp(x_dot)), np.asarray(vjp(y_bar))
        if y_dot.shape != y_bar.shape or x_bar.shape != x_dot.shape:
            raise ValueError(
                f"jvp returned shape {y_dot.shape}, expected {y_bar.shape}; "
                f"vjp returned shape {x_bar.shape}, expected {x_dot.shape}"
            )
        pairs = (y_bar, y_dot), (x_bar, x_dot)
        sizes = (np.linalg.norm(a) * np.linalg.norm(b) for a, b in pairs)
        size = max(*sizes, np.finfo(float).tiny)
        worst = max(worst, abs(np.vdot(y_bar, y_dot) - np.vdot(x_bar, x_dot)) / size)
    return float(worst)


def relative_error(value, reference) -> float:
    """Largest difference, relative to the largest entry of the reference.

    Parameters
    ----------
    value, reference : arrays of one shape

    Returns
    -------
    float
        ``max|value - reference| / max|reference|``.  Where the reference is exactly zero: 0 if
        the value is too, else infinity.  NaN anywhere gives infinity.

    Raises
    ------
    ValueError
        If the shapes differ (nothing is broadcast), or the arrays are empty.
    """
    value, reference = np.asarray(value), np.asarray(reference)
    if value.shape != reference.shape:
        raise ValueError(f"value has shape {value.shape}, the reference has {reference.shape}")
    if value.size == 0:
        raise ValueError("nothing to compare: the arrays are empty")
    difference, size = np.max(np.abs(value - reference)), np.max(np.abs(reference))
    if not np.isfinite(difference):
        return np.inf
    if size == 0:
        return 0.0 if difference == 0 else np.inf
    return float(difference / size)


@dataclass(frozen=True, repr=False)
class Check:
    """One executed check of one equation: see :func:`verify`. It shows as a line without digits."""

    label: str
    against: str
    rtol: float
    error: float

    @property
    def error_power(self) -> int:
        """The power of ten just above the error, not below that of float64's rounding."""
        return int(np.ceil(np.log10(max(self.error, np.finfo(float).eps))))

    def __repr__(self) -> str:
        return f"{self.label}: agrees with {self.against} to {self.rtol:.0e}"


_record: list[Check] = []


def checked() -> tuple[Check, ...]:
    """All checks that this process has passed, in order."""
    return tuple(_record)


def verify(
    label: str, value, reference, rtol: float = 1e-10, *, against: str | None = None
) -> Check:
    """Check an equation of the book, say so in one line, and record it.

    The line holds the promised tolerance and no measured number, so that it is the same on every
    machine.  In a notebook the error reached is stored with the cell's output, as a power of ten,
    where the equation index finds it.

    Parameters
    ----------
    label : str
        The equation's label, ``eq-<page>-<name>``.
    value, reference : arrays of one shape, or lists of arrays
        What the equation gives, and what something independent gives.
    rtol : float
        Bound on :func:`relative_error`.
    against : str, optional
        What the reference is, where it does not say so itself: ``"autodiff"``,
        ``"statsmodels"``, ...  A :class:`Reference` does, and so does a list of them.

    Returns
    -------
    Check

    Raises
    ------
    AssertionError
        If the error is above ``rtol``, with both figures and where the worst entry is.
    ValueError
        If the label does not start with ``eq-``, the shapes differ, nothing says what the reference
        is, or ``against`` says something else than the reference itself.
    """
    if not label.startswith("eq-"):
        raise ValueError(f"the label {label!r} is not an equation's: expected 'eq-<page>-<name>'")
    source = _only(_sources(reference))
    if source is None and not against:
        raise ValueError(
            f"{label}: nothing says what the reference is. Hand over what complex_step or "
            "finite_difference returned, sign it with Reference(values, source) where it is "
            "computed, or say against='...'"
        )
    if source and against and source != against:
        raise ValueError(f"{label}: the reference is signed {source!r}, not {against!r}")
    against = source or against
    value, reference = np.asarray(value), np.asarray(reference)
    error = relative_error(value, reference)
    if not error <= rtol:
        gap = np.abs(value - reference)
        worst = np.unravel_index(np.argmax(np.where(np.isnan(gap), np.inf, gap)), gap.shape)
        where = tuple(int(i) for i in worst)
        raise AssertionError(
            f"{label} disagrees with {against}: relative error {error:.1e} > {rtol:.0e}; "
            f"worst at {where}: {value[worst]!r} against {reference[worst]!r}"
        )
    check = Check(label, against, rtol, error)
    _record.append(check)
    ipython = sys.modules.get("IPython")  # which a notebook has imported
    if ipython is None or getattr(ipython.get_ipython(), "kernel", None) is None:
        print(check)
        return check
    from IPython.display import publish_display_data

    facts = {name: getattr(check, name) for name in ("label", "against", "rtol", "error_power")}
    publish_display_data({"text/plain": str(check)}, metadata={"verify": facts})
    return check
