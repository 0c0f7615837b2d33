"""The readable text, run once on matrices that only know their shapes: its lines as calls of tiles.

:mod:`helpers.kalman.recursions` says what a step does. Run on the ``Matrix`` of this module it says
so to a ``Writer``, which writes each line out as calls of :mod:`helpers.kalman.fused.tiles`: sums
of products at once, what is symmetric from its lower half, products with a matrix of many zeros by
lists, numbers where p = 1. Layout, size and sparsity are rules here; there is no second formula.

What comes out is a function in Python, which Numba compiles, and which runs as it stands over
checked memory. ``python -m helpers.kalman.fused.writing`` prints all of them, each line beside the
line of the text that it does.
"""

import contextlib
import linecache
import re
import sys

from helpers.kalman import recursions, tangents

_TEXTS = recursions.__file__, tangents.__file__
_SHORT = "symmetric", "outer", "with_transposed"  # of which a reader needs not to be told


def _text_line():
    """The line of the readable text that is being run."""
    frame = sys._getframe(1)
    while frame:
        code = frame.f_code
        if code.co_filename in _TEXTS and code.co_name not in _SHORT:
            return linecache.getline(code.co_filename, frame.f_lineno).strip()
        frame = frame.f_back
    return ""


class Number:
    """A number that is not known yet: the source of what computes it."""

    def __init__(self, source):
        self.source = str(source)

    def _with(self, sign, other, turned=False):
        other = other.source if isinstance(other, Number) else repr(float(other))
        pair = (other, self.source) if turned else (self.source, other)
        return Number(f"({pair[0]} {sign} {pair[1]})")

    def __add__(self, other):
        return self._with("+", other)

    def __sub__(self, other):
        return self._with("-", other)

    def __mul__(self, other):
        return self._with("*", other) if isinstance(other, (Number, int, float)) else other * self

    def __truediv__(self, other):
        return self._with("/", other)

    def __radd__(self, other):
        return self._with("+", other, True)

    def __rmul__(self, other):
        return self._with("*", other, True)

    def __neg__(self):
        return Number(f"-{self.source}")


def _times(x, y):
    """The product of two factors, numbers or sources of some."""
    if isinstance(x, float) and isinstance(y, float):
        return x * y
    if 1.0 in (x, y):
        return y if x == 1.0 else x
    return f"{x} * {y}"


class Sum:
    """Terms (factor, A) and (factor, A, B) for factor A B, which nobody has computed yet.

    Dimensions are "m", "p", "q" or 1; a vector is a row. It is computed when it is a factor of a
    product, or when it is kept.
    """

    def __init__(self, e, rows, cols, terms, vector=False):
        self.e, self.rows, self.cols, self.terms, self.vector = e, rows, cols, terms, vector
        self.line, self.symmetric, self.sum_with_transposed = _text_line(), False, None

    def key(self):
        """The same for what is the same."""
        parts = [(t[0], *((A.base.at, A.turned, A.change) for A in t[1:])) for t in self.terms]
        return self.symmetric, tuple(parts)

    def force(self):
        """The matrix, computed once."""
        return self.e.known.get(self.key()) or self.e.compute(self)

    @property
    def T(self):  # noqa: N802
        """The transposed; a vector is its own."""
        if self.e.known.get(self.key()):
            return self.force().T
        turned = Sum(
            self.e, self.cols, self.rows, [(t[0], *(A.T for A in t[:0:-1])) for t in self.terms]
        )
        turned.sum_with_transposed = self
        return turned

    def _plus(self, other, sign):
        if self.e.known.get(other.key()):
            other = other.force()
        mine = self.force() if self.e.known.get(self.key()) else self
        more = [(_times(sign, t[0]), *t[1:]) for t in other.terms]
        found = Sum(self.e, self.rows, self.cols, mine.terms + more, self.vector)
        if sign == 1.0 and other.sum_with_transposed is self:
            found.sum_with_transposed = self
        return found

    def __add__(self, other):
        return self if other is AS_LOADED else self._plus(other, 1.0)

    def __sub__(self, other):
        return self._plus(other, -1.0)

    def __mul__(self, other):
        if isinstance(other, Sum):  # a column times a row
            return Sum(self.e, self.rows, other.cols, [(1.0, self.force(), other.force())])
        factor = other.source if isinstance(other, Number) else float(other)
        terms = [(_times(factor, t[0]), *t[1:]) for t in self.terms]
        return Sum(self.e, self.rows, self.cols, terms, self.vector)

    __rmul__ = __mul__

    def __neg__(self):
        return -1.0 * self

    def __truediv__(self, other):
        if other == 2 and self.sum_with_transposed is not None:
            # (X + X') / 2 is X but for rounding; X + X' alone is what it says.
            found = Sum(self.e, self.rows, self.cols, self.sum_with_transposed.terms)
            found.symmetric = True
            return found
        return self * (1.0 / other)

    def by_one(self):
        """P with the change x'x to come, where this is P + factor x'x; else None."""
        [first, *rest] = self.terms
        if len(first) == 2 and len(rest) == 1 and len(rest[0]) == 3 and rest[0][1].cols == 1:
            found = self.e.matrix(first[1].at, self.rows, self.cols)
            found.change = f"{rest[0][0]}, {rest[0][2].at}.at"
            return found
        return None

    def __matmul__(self, other):
        A = self.force()
        B = (A.listed() and other.by_one()) or other.force()
        if A.vector and B.vector:
            return self.e.dot_of(A, B)
        if B.vector:  # M v is the row v M'
            return Sum(self.e, 1, A.rows, [(1.0, B, A.T)], True)
        assert A.cols == B.rows, f"a product of {A.rows, A.cols} and {B.rows, B.cols}"
        found = Sum(self.e, A.rows, B.cols, [(1.0, A, B)], A.vector)
        return self.e.known.get(found.key(), found)

    def __getitem__(self, index):  # x[:, None] and x[None, :]
        row = self.force()
        matrix = row.base if row.base.vector is False else row.base.as_matrix()
        return matrix if index[0] is None else matrix.T


class Matrix(Sum):
    """A matrix that lies somewhere.

    ``at`` is the source of its `Mat`, or of a number where p = 1; ``twin`` that of the transposed,
    ``lists`` and ``lists_t`` those of the `Listed` of both.
    """

    def __init__(
        self, e, at, rows, cols, vector=False, twin=None, lists=None, lists_t=None, symmetric=False
    ):
        super().__init__(e, rows, cols, None, vector)
        self.at, self.twin, self.lists, self.lists_t = at, twin, lists, lists_t
        self.is_symmetric, self.turned, self.base = symmetric, False, self
        self.turned_too = self.change = None
        self.terms = [(1.0, self)]

    @property
    def is_number(self):
        """Whether it is a number where p = 1."""
        return self.rows == self.cols == 1

    def force(self):
        """Itself."""
        return self

    def same_as(self, other):
        """Whether it lies where another one does, and is as much turned."""
        return self.base.at == other.base.at and self.turned == other.turned

    def as_matrix(self):
        """A vector as a row of a matrix."""
        return Matrix(self.e, self.at, self.rows, self.cols)

    @property
    def T(self):  # noqa: N802
        """The transposed, without a copy."""
        if self.is_number:
            return self
        found = Matrix(self.e, self.at, self.cols, self.rows, self.vector)
        found.base, found.turned, found.is_symmetric = self.base, not self.turned, self.is_symmetric
        return found if found.turned else self.base

    def left(self):
        """The source of the `Mat` as a left factor, which may have any strides."""
        return f"transposed({self.base.at})" if self.turned else self.at

    def listed(self):
        """The sources of the `Mat` and of the lists of what is multiplied by them, or None."""
        base = self.base
        if self.turned:
            return (base.twin, base.lists_t) if base.lists_t else None
        return (base.at, base.lists) if base.lists else None


class _Seen:
    """1.0 where something is observed; `I_p * (1 - o)` is in H as it is loaded."""

    def __init__(self, e):
        self.e = e

    def __rsub__(self, _):
        return AS_LOADED

    def sum(self):
        """How many."""
        return Number("count")


class _Loaded:
    def __rmul__(self, _):
        return self

    __mul__ = __rmul__


AS_LOADED = _Loaded()


class _Factor:
    """The factor of F, of which only the inverse is ever written."""

    def __init__(self, F):
        self.F = F

    def __mul__(self, seen):
        return self.F.e.invert_factor(self.F)


@recursions.cholesky.register
def _cholesky(F: Sum):
    return _Factor(F.force()), Number("logdet")


@recursions.solve.register
def _solve(C: _Factor, B):
    return C


class Writer:
    """Writes one function: ``known`` what has been computed, ``scratch`` where there is room.

    Parameters
    ----------
    p : "p" or 1
    lower : source of whether a covariance is computed from its lower half
    scratch : names of places by their rows and columns
    """

    def __init__(self, p, lower, scratch):
        self.p, self.lower, self.scratch = p, lower, scratch
        self.lines, self.known, self.shapes, self.same, self.depth = [], {}, {}, {}, 1
        self.o, self.I_p, self.C_inv = _Seen(self), AS_LOADED, None

    # --- what there is -------------------------------------------------------------------------

    def matrix(self, at, rows, cols, **more):
        """A matrix that the function is given; a number where both dimensions are one."""
        rows, cols = (self.p if x == "p" else x for x in (rows, cols))
        at = f"get(w, {at}.at)" if rows == cols == 1 else at
        return Matrix(self, at, rows, cols, **more)

    def vector(self, at, length):
        """A vector: a row."""
        return self.matrix(at, 1, length, vector=True)

    # --- lines ---------------------------------------------------------------------------------

    def line(self, text, of=""):
        """Write a line, and the line of the text that it does."""
        self.lines.append(("    " * self.depth + text, of))

    @contextlib.contextmanager
    def only(self, condition):
        """Lines under a condition; what is computed there is known there alone."""
        before = dict(self.known)
        self.line(f"if {condition}:")
        self.depth += 1
        yield
        self.depth -= 1
        self.known = before

    def room(self, rows, cols):
        """A place for what is computed, which is found when all lines are there."""
        token = f"<{len(self.shapes)}>"
        self.shapes[token] = rows, cols
        return token

    # --- sums of products ----------------------------------------------------------------------

    def dot_of(self, A, B):
        """The product of two vectors, a `Number` that is computed."""
        key = "dot", A.at, B.at
        if key not in self.known:
            self.known[key] = Number(f"x{len(self.lines)}")
            self.line(f"{self.known[key].source} = {self.dot(A, B)}", _text_line())
        return self.known[key]

    def dot(self, A, B):
        """The source of that product."""
        if A.is_number:
            return f"{A.at} * {B.at}"
        return f"dot(w, {A.at}.at, {B.at}.at, {A.cols})"

    def compute(self, X, into=None, adding=False):
        """Write what computes X, to `into` or a room of its own; returns the `Matrix`."""
        if into is None and (X.rows, X.cols) in (("m", "p"), ("m", 1)):
            found = self.compute(X.T).T  # long rows are better than short ones
            self.known[X.key()] = found
            return found
        if X.rows == X.cols == 1:
            return self._number(X, into, adding)
        out = into or Matrix(self, self.room(X.rows, X.cols), X.rows, X.cols, X.vector)
        out.is_symmetric = X.symmetric or all(
            t[1].is_symmetric if len(t) == 2 else t[1].same_as(t[2].T) for t in X.terms
        )
        refs, products = [], []
        for factor, *factors in X.terms:
            numbers = [A for A in factors if A.is_number]
            rest = [A for A in factors if not A.is_number]
            for x in numbers:
                factor = _times(factor, x.at)
            (products if len(rest) == 2 else refs).append((factor, *rest))
        C = out if adding else None
        refs = [(factor, self._straight(A)) for factor, A in refs]
        first = next((t for t in refs if t[0] == 1.0 and t[1].cols == out.cols), None)
        if C is None and first:
            refs.remove(first)
            C = first[1]
            if not products:
                self._plain(out, C, refs.pop(0) if refs else None, X.line)
        elif C is None and not products:
            self._plain(out, None, refs.pop(0), X.line)
        while products:
            factor, A, B = products.pop(0)
            after = products[0] if products else (None,)
            pair = after[0] == factor and after[1].same_as(B.T) and after[2].same_as(A.T)
            self._product(out, factor, A, B, C, X, pair and A.cols == 1)
            if pair and A.cols == 1:
                products.pop(0)
            C = out
        for factor, A in refs:
            self._add(out, factor, A, X.line)
        if X.symmetric and X.rows == "m":
            if self.lower != "True":
                self.line(f"if {self.lower}:")
            indent = "" if self.lower == "True" else "    "
            self.line(f"{indent}symmetrize(w, {out.at}, m)")
        if not adding:
            self.known[X.key()] = out
        return out

    def _number(self, X, into, adding):
        name = into.at if into else f"x{len(self.lines)}"
        parts = [name] if adding else []
        for factor, *factors in X.terms:
            source = factors[0].at if len(factors) == 1 else None
            if source is None:
                A, B = factors
                source = f"{A.at} * {B.at}" if A.is_number else self.dot(A, B.T)
            parts.append(source if factor == 1.0 else f"{factor} * {source}")
        self.line(f"{name} = {' + '.join(parts)}", X.line)
        found = into or Matrix(self, name, 1, 1, X.vector)
        if not adding:
            self.known[X.key()] = found
        return found

    def _straight(self, A):
        """A row by row."""
        if not A.turned or A.rows == 1:
            return A
        base = A.base
        if base.is_symmetric:
            return base
        if base.twin is None:
            base.twin = self.known.get(("twin", base.at))
        if base.twin is None:
            twin = self.room(A.rows, A.cols)
            self.line(f"transpose(w, {twin}, {base.at}, {base.rows}, {base.cols})")
            self.known["twin", base.at] = twin
            return Matrix(self, twin, A.rows, A.cols)
        return Matrix(self, base.twin, A.rows, A.cols)

    def _plain(self, out, C, more, of):
        """out = C + factor A for `more` (factor, A); either may be missing."""
        factor, A = more or (None, None)
        size = out.cols if out.rows == 1 else f"{out.rows} * {out.at}.ld"
        if A is None:
            factor, A, c = 1.0, C, None
        else:
            c = C and C.at
        if A.cols != out.cols or (c is None and out.rows != 1):
            self.line(f"clear(w, {out.at}, {out.rows})" if c is None else f"copy(w, {out.at}, {c})")
            self._add(out, factor, A, of)
        else:
            self.line(f"axpy(w, {out.at}.at, {factor}, {A.at}.at, {c or 's.zero'}.at, {size})", of)

    def _add(self, out, factor, A, of):
        """out += factor A, whose columns are all of them or those of `out`."""
        name, more = ("add", "") if A.cols == out.cols else ("add_picked", ", wanted.columns")
        self.line(f"{name}(w, {out.at}, {factor}, {A.at}, {A.rows}{more})", of)

    def _product(self, out, factor, A, B, C, X, both):
        """out = C + factor A B, or with `both` C + factor (A B + B'A')."""
        c, (rows, inner, cols) = C.at if C else "s.zero", (A.rows, A.cols, B.cols)
        lower = f", {self.lower}" if X.symmetric and rows == "m" else ""
        if rows == 1 and not (A.listed() and not X.vector):
            if B.turned and inner == self.p and not B.base.is_symmetric:  # short rows
                text = f"row_dots(w, {out.at}.at, {factor}, {A.at}.at, {B.base.at}, {c}.at"
            else:
                B = self._straight(B)
                text = f"row_product(w, {out.at}.at, {factor}, {A.at}.at, {B.at}, {c}.at"
            self.line(f"{text}, {inner}, {cols})", X.line)
        elif inner == 1:
            name = "rank_two" if both else f"rank_one(w, {out.at}, {factor}"
            if both:
                assert factor == 1.0
                self.line(f"rank_two(w, {out.at}, {A.base.at}.at, {B.at}.at, {c}, {rows})", X.line)
            else:
                self.line(f"{name}, {A.base.at}.at, {B.at}.at, {c}, {rows}, {cols})", X.line)
        elif A.listed() and factor == 1.0 and c != out.at:
            left, lists = A.listed()
            name, turned, here = "from_left", "", self._straight(B).at
            if rows == cols:
                out.turned_too = self.room("m", "m")  # where A is multiplied by its lists
                name, turned = "from_left_turned", f", {out.turned_too}"
            if B.change:
                name, here = "from_left_changed", f"{here}, {B.change}"
            self.line(
                f"{name}(w, {out.at}{turned}, {left}, {lists}, {here}, {c}, {rows}, {inner}, "
                f"{cols})",
                X.line,
            )
        elif B.T.listed() and X.symmetric and A.base.turned_too and factor == 1.0:
            left, lists = B.T.listed()  # A B is (B'A')'
            self.line(
                f"times_listed(w, {out.at}, {A.left()}, {A.base.turned_too}, {left}, {lists}, "
                f"{self._straight(B).at}, {c}, m{lower})",
                X.line,
            )
        else:
            B = self._straight(B)
            self.line(
                f"product(w, {out.at}, {factor}, {A.left()}, {B.at}, {c}, {rows}, {inner}, {cols}"
                f"{lower})",
                X.line,
            )

    def invert_factor(self, F):
        """The inverse of F's factor, where it is observed; what follows needs one."""
        if F.is_number:
            self.line(f"if not {F.at} > 0.0:")
            self.line("    return np.nan")
            self.line(f"logdet = np.log({F.at})", "C, logdet = cholesky(F + I_p * (1 - o))")
            self.line(f"C_inv = count / np.sqrt({F.at})", "C_inv = solve(C, I_p) * o")
            return Matrix(self, "C_inv", 1, 1)
        self.line(f"logdet = invert_factor(w, {F.at}, s.C_inv, p)", "C_inv = solve(C, I_p) * o")
        self.line("if np.isnan(logdet):")
        self.line("    return logdet")
        self.line("drop_missing(w, s.C_inv, s.o.at, p)")
        return Matrix(self, "s.C_inv", self.p, self.p)

    # --- what is kept --------------------------------------------------------------------------

    def keep(self, at, X):
        """X at the place `at`."""
        found = X if isinstance(X, Matrix) else self.known.get(X.key())
        if (X.rows, X.cols) in (("m", "p"), ("m", 1)):
            found = self.known[X.key()] = self.keep(at, X.T if found is None else found.T).T
            return found
        if X.rows == X.cols == 1:
            source = (found or X.force()).at
            self.line(f"put_first(w, {at}.at, {source})")
            return found
        if found is None:
            return self.compute(X, Matrix(self, at, X.rows, X.cols, X.vector))
        found = self._straight(found)
        written = next((i for i, x in enumerate(self.lines) if found.at in x[0]), None)
        later = "".join(x[0] for x in self.lines[written:]) if written is not None else at
        if found.at in self.shapes and not re.search(rf"\b{re.escape(at)}\b", later):
            self.same[found.at] = at
        elif X.rows == 1:
            self.line(f"axpy(w, {at}.at, 1.0, {found.at}.at, s.zero.at, {X.cols})")
        else:
            self.line(f"copy(w, {at}, {found.at}, {X.rows})")
        return found

    def add(self, at, X):
        """Add X to what lies at the place `at`, or to a number of that name."""
        self.compute(X, Matrix(self, at, X.rows, X.cols, X.vector), adding=True)

    def source(self, name, arguments, begin, end):
        """The function; `begin` and `end` are lines before and after."""
        lines = [("    " + x, "") for x in begin] + self.lines + [("    " + x, "") for x in end]

        def named(x):
            return named(self.same[x]) if x in self.same else x

        text = [(re.sub(r"<\d+>", lambda k: named(k[0]), x), of) for x, of in lines]
        last = {t: i for i, (x, _) in enumerate(text) for t in re.findall(r"<\d+>", x)}
        places, free = {}, {k: list(v) for k, v in self.scratch.items()}
        written = [f"def {name}({arguments}):"]
        for i, (x, of) in enumerate(text):
            here = dict.fromkeys(re.findall(r"<\d+>", x))
            for token in here:
                if token not in places:
                    shape = self.shapes[token]
                    if not free.get(shape):
                        raise ValueError(f"no room for a matrix {shape} in {name}")
                    places[token] = free[shape].pop()
            for token in here:
                if last[token] == i:
                    free[self.shapes[token]].append(places[token])
            x = re.sub(r"<\d+>", lambda k: places[k[0]], x)
            written.append(f"{x}  # {of}" if of else x)
        return "\n".join(written) + "\n"


def function(source, name, known):
    """The function of this source, whose lines errors show."""
    file = f"<written: {name}>"
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    exec(compile(source, file, "exec"), known)
    return known[name]
