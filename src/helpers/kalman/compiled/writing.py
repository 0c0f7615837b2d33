"""The readable text, run once on matrices that only know their shapes: its lines as calls of tiles.

:mod:`helpers.kalman.recursions` says what a step does. Run on the `Matrix` of this module it says
so to a `Writer`, which writes each line out as calls of :mod:`~helpers.kalman.compiled.tiles`: sums
of products at once, what is symmetric from its lower half, products with a matrix of many zeros by
lists, numbers where p = 1. Layout, size and sparsity are rules here; there is no second formula.

What comes out is a function in Python, which Numba compiles, and which runs as it stands over
checked memory. ``python -m helpers.kalman.compiled.show 13 1`` prints those of a size, each line
beside the line of the text that it does.
"""

import contextlib
import linecache
import re
import sys

from helpers.kalman import recursions

_SHORT = "symmetric", "outer", "with_transposed"  # of which a reader needs not to be told
_TOKEN = re.compile(r"<\d+>")


def _text_line():
    """The line of the readable text that is being run."""
    frame = sys._getframe(1)
    while frame:
        code = frame.f_code
        if code.co_filename == recursions.__file__ and code.co_name not in _SHORT:
            return linecache.getline(code.co_filename, frame.f_lineno).strip()
        frame = frame.f_back
    return ""


def _binary(sign, swapped=False):
    def operator(x, y):
        if isinstance(y, Sum):
            return y * x
        x, y = (y, x) if swapped else (x, y)
        return Number(f"({x} {sign} {y})")

    return operator


class Number(str):
    """A number that is not known yet: the source of what computes it."""

    __add__, __radd__ = _binary("+"), _binary("+", True)
    __mul__, __rmul__ = _binary("*"), _binary("*", True)
    __sub__, __truediv__ = _binary("-"), _binary("/")

    def __neg__(self):
        return Number(f"-{self}")


def _times(x, y):
    """The product of two factors, numbers or sources of some."""
    if isinstance(x, float) and isinstance(y, float):
        return x * y
    parts = [part for z in (x, y) if z != 1.0 for part in str(z).split(" * ")]
    if parts.count("C_inv") > 1:  # of a number the inverse itself: M / F is exact where M is F
        parts.remove("C_inv")
        parts[parts.index("C_inv")] = "inverse"
    return " * ".join(parts)


class Sum:
    """Terms (factor, A) and (factor, A, B) for factor A B, which nobody has computed yet.

    Dimensions are "m", "p", "q" or 1; a vector is a row. It is computed when it is a factor of a
    product, or when it is kept.
    """

    def __init__(self, e, rows, cols, terms, vector=False, symmetric=False, transpose_of=None):
        self.e, self.rows, self.cols, self.terms, self.vector = e, rows, cols, terms, vector
        self.line, self.symmetric, self.transpose_of = _text_line(), symmetric, transpose_of

    def key(self):
        """The same for what is the same."""
        terms = [
            (factor, *((A.base.at, A.is_transposed, A.change) for A in factors))
            for factor, *factors in self.terms
        ]
        return self.symmetric, tuple(terms)

    def found(self):
        """The matrix that it was computed to, or itself."""
        return self.e.known.get(self.key(), self)

    def force(self):
        """The matrix, computed once."""
        return self.e.known.get(self.key()) or self.e.compute(self)

    @property
    def T(self):  # noqa: N802
        """The transposed."""
        if self.found() is not self:
            return self.found().T
        terms = [(t[0], *(A.T for A in t[:0:-1])) for t in self.terms]
        return Sum(self.e, self.cols, self.rows, terms, transpose_of=self)

    def __add__(self, other):
        terms = self.found().terms + other.found().terms
        both = self if other.transpose_of is self else None
        return Sum(self.e, self.rows, self.cols, terms, self.vector, transpose_of=both)

    def __sub__(self, other):
        return self + -1.0 * other.found()

    def __mul__(self, other):
        if isinstance(other, Sum):  # a column times a row
            return Sum(self.e, self.rows, other.cols, [(1.0, self.force(), other.force())])
        factor = other if isinstance(other, Number) else float(other)
        terms = [(_times(factor, t[0]), *t[1:]) for t in self.terms]
        return Sum(self.e, self.rows, self.cols, terms, self.vector)

    __rmul__ = __mul__

    def __neg__(self):
        return -1.0 * self

    def __truediv__(self, other):
        if other == 2 and self.transpose_of:
            # (X + X') / 2 is X but for rounding, where X + X' alone is what it says.
            return Sum(self.e, self.rows, self.cols, self.transpose_of.terms, symmetric=True)
        return self * (1.0 / other)

    def scaled(self):
        """A factor and a `Matrix` of which this is the product."""
        found = self.found()
        [factor, *factors] = found.terms[0]
        numbers = [A for A in factors if A.is_number]
        rest = [A for A in factors if not A.is_number] or [numbers.pop()] if numbers else factors
        if len(found.terms) > 1 or len(rest) > 1:
            return 1.0, found.force()
        for x in numbers:
            factor = _times(factor, x.at)
        return factor, rest[0]

    def changed_by_one(self):
        """P and what there is of x'x, where this is P + factor x'x; else None."""
        [P, *rest] = self.terms
        if len(P) == 2 and len(rest) == 1 and len(rest[0]) == 3 and rest[0][1].cols == 1:
            found = Matrix(self.e, P[1].at, self.rows, self.cols)
            found.change = f"{rest[0][0]}, {rest[0][2].at}.at"
            return found
        return None

    def __matmul__(self, other):
        x, A = self.scaled()
        B = other.changed_by_one() if A.listed() else None
        y, B = (1.0, B) if B else other.scaled()
        if self.vector and other.vector:
            return self.e.dot_of(_times(x, y), A, B)
        if other.vector:  # M v is the row v M'
            return Sum(self.e, 1, A.rows, [(_times(x, y), B, A.T)], True)
        assert A.cols == B.rows, f"a product of {A.rows, A.cols} and {B.rows, B.cols}"
        return Sum(self.e, A.rows, B.cols, [(_times(x, y), A, B)], self.vector).found()

    def __getitem__(self, index):  # x[:, None] and x[None, :] of a vector
        x = self.force()
        row = Matrix(self.e, x.at, x.rows, x.cols)
        return row if index[0] is None else row.T


class Matrix(Sum):
    """A matrix that lies somewhere: ``at`` is the source of its `Mat`, or of a number where p = 1.

    ``twin`` is the source of its transposed, ``lists`` and ``lists_t`` those of the `Listed` of
    both. ``is_transposed`` says that it is read as the transposed of ``base``.
    """

    def __init__(
        self, e, at, rows, cols, vector=False, twin=None, lists=None, lists_t=None, symmetric=False
    ):
        super().__init__(e, rows, cols, [(1.0, self)], vector)
        self.at, self.twin, self.lists, self.lists_t = at, twin, lists, lists_t
        self.is_symmetric, self.is_transposed, self.base = symmetric, False, self
        self.is_number = rows == cols == 1
        self.change = self.transpose_too = None

    def found(self):
        """Itself."""
        return self

    force = found

    @property
    def T(self):  # noqa: N802
        """The transposed, without a copy."""
        if self.is_number or self.is_transposed:
            return self.base
        found = Matrix(self.e, self.at, self.cols, self.rows, self.vector)
        found.base, found.is_transposed, found.is_symmetric = self, True, self.is_symmetric
        return found

    def same_as(self, other):
        """Whether it lies where another one does, and is transposed if that one is."""
        return self.base.at == other.base.at and self.is_transposed == other.is_transposed

    def left(self):
        """The source of the `Mat` as a left factor, which may have any strides."""
        return f"transposed({self.base.at})" if self.is_transposed else self.at

    def listed(self):
        """The sources of the `Mat` and of the lists of what is multiplied by them, or None."""
        base = self.base
        at, lists = (base.twin, base.lists_t) if self.is_transposed else (base.at, base.lists)
        return lists and (at, lists)


class Seen:
    """The vector that is 1.0 where something is observed."""

    def sum(self):
        """How many are."""
        return Number("count")


@recursions.inverse_factor.register
def _inverse_factor(F: Sum, o, I_p):  # noqa: N803
    """Of an F which is loaded with the ones of what is missing; what follows needs an answer."""
    F, e = F.force(), F.e
    if F.is_number:
        e.line(f"if not {F.at} > 0.0:")
        e.line("    return np.nan")
        e.line(f"logdet, inverse = np.log({F.at}), count / {F.at}", F.line)
        return Matrix(e, "C_inv", 1, 1), Number("logdet")
    e.line(f"logdet = invert_factor(w, {F.at}, s.C_inv, s.o.at, p)", _text_line())
    e.line("if np.isnan(logdet):")
    e.line("    return logdet")
    return Matrix(e, "s.C_inv", "p", "p"), Number("logdet")


class Writer:
    """Writes one function: ``known`` is what has been computed, and where.

    Parameters
    ----------
    p : "p" or 1
    lower : source of whether a covariance is computed from its lower half
    scratch : names of places with room, by their rows and columns
    """

    def __init__(self, p, lower, scratch):
        self.p, self.lower, self.scratch = p, lower, scratch
        self.lines, self.known, self.shapes, self.same, self.depth = [], {}, {}, {}, 1

    def matrix(self, at, rows, cols, **more):
        """A matrix that the function is given; a number where both dimensions are one."""
        rows, cols = (self.p if x == "p" else x for x in (rows, cols))
        at = f"get(w, {at}.at)" if rows == cols == 1 else at
        return Matrix(self, at, rows, cols, **more)

    def vector(self, at, length):
        """A vector: a row."""
        return self.matrix(at, 1, length, vector=True)

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

    def dot(self, A, B):
        """The source of the product of two rows."""
        if A.is_number:
            return f"{A.at} * {B.at}"
        return f"dot(w, {A.at}.at, {B.at}.at, {A.cols})"

    def dot_of(self, factor, A, B):
        """The product of two vectors, computed once."""
        source = _times(factor, self.dot(A, B))
        if source not in self.known:
            self.known[source] = Number(f"x{len(self.lines)}")
            self.line(f"{self.known[source]} = {source}", _text_line())
        return self.known[source]

    def compute(self, X, into=None, adding=False):
        """Write what computes X, to `into` or a room of its own; returns the `Matrix`."""
        if (X.rows, X.cols) in (("m", "p"), ("m", 1)):  # long rows are better than short ones
            out = self.compute(X.T, into, adding).T
        elif X.rows == X.cols == 1:
            out = self._number(X, into, adding)
        else:
            out = into or Matrix(self, self.room(X.rows, X.cols), X.rows, X.cols, X.vector)
            out.is_symmetric = X.symmetric or all(
                t[1].is_symmetric if len(t) == 2 else t[1].same_as(t[2].T) for t in X.terms
            )
            self._sum(X, out, adding)
        if not adding:
            self.known[X.key()] = out
        return out

    def _number(self, X, into, adding):
        out = into or Matrix(self, f"x{len(self.lines)}", 1, 1, X.vector)
        parts = [out.at] if adding else []
        for factor, A, *B in X.terms:
            parts.append(_times(factor, self.dot(A, B[0].T) if B else A.at))
        self.line(f"{out.at} = {' + '.join(parts)}", X.line)
        return out

    def _sum(self, X, out, adding):
        """Write what makes `out` the sum X, or adds it."""
        refs, products = [], []
        for factor, *factors in X.terms:
            rest = [A for A in factors if not A.is_number]
            for x in (A for A in factors if A.is_number):
                factor = _times(factor, x.at)
            if len(rest) == 2:
                products.append((factor, *rest))
            else:
                refs.append((factor, self._straight(rest[0])))
        C = out if adding else None  # what the next one is added to
        first = next((t for t in refs if t[0] == 1.0 and t[1].cols == out.cols), None)
        if not adding and first:
            refs.remove(first)
            C = first[1]
        if not products and C is not out:
            factor, A = refs.pop(0)
            here = f"{out.rows} * {out.at}.ld" if out.rows != 1 else out.cols
            zero = C.at if C else "s.zero"
            self.line(f"axpy(w, {out.at}.at, {factor}, {A.at}.at, {zero}.at, {here})", X.line)
        while products:
            term = products.pop(0)
            pair = bool(products) and term[2].cols != 1 and self._mirrored(term, products[0])
            if pair:
                products.pop(0)
            self._product(out, *term, C, X, pair)
            C = out
        for factor, A in refs:
            name, more = ("add", "") if A.cols == out.cols else ("add_picked", ", wanted.columns")
            self.line(f"{name}(w, {out.at}, {factor}, {A.at}, {A.rows}{more})", X.line)
        if X.symmetric and X.rows == "m":
            with self.only(self.lower) if self.lower != "True" else contextlib.nullcontext():
                self.line(f"symmetrize(w, {out.at}, m)")

    def _mirrored(self, term, other):
        """Whether two terms are x'y and y'x."""
        (factor, A, B), (same, C, D) = term, other
        return A.cols == 1 and factor == same == 1.0 and C.same_as(B.T) and D.same_as(A.T)

    def _straight(self, A):
        """A row by row."""
        if not A.is_transposed or A.rows == 1:
            return A
        base = A.base
        at = base.at if base.is_symmetric else base.twin or self.known.get(("twin", base.at))
        if at is None:
            at = self.known["twin", base.at] = self.room(A.rows, A.cols)
            self.line(f"transpose(w, {at}, {base.at}, {base.rows}, {base.cols})")
        return Matrix(self, at, A.rows, A.cols)

    def _product(self, out, factor, A, B, C, X, both):
        """out = C + factor A B, or with `both` C + A B + B'A'."""
        c, sizes = C.at if C else "s.zero", f"{A.rows}, {A.cols}, {B.cols}"
        lower = f", {self.lower}" if X.symmetric and A.rows == "m" else ""
        short = A.rows == 1 and B.is_transposed and A.cols == self.p and not B.is_symmetric
        straight = B.base.at if short else self._straight(B).at
        if A.listed() and factor == 1.0 and C is not out and not A.vector:
            name, out_t, (at, lists) = "from_left", "", A.listed()
            if A.rows == A.cols:  # what goes by lists leaves the transposed as well
                out.transpose_too = self.room("m", "m")
                name, out_t = "from_left_transposing", f", {out.transpose_too}"
            if B.change:
                name, straight = "from_left_changed", f"{straight}, {B.change}"
            text = f"{name}(w, {out.at}{out_t}, {at}, {lists}, {straight}, {c}, {sizes})"
        elif B.T.listed() and X.symmetric and A.transpose_too and factor == 1.0:
            at, lists = B.T.listed()  # A B is (B'A')'
            text = (
                f"times_listed(w, {out.at}, {A.at}, {A.transpose_too}, {at}, {lists}, {straight}, "
                f"{c}, m{lower})"
            )
        elif A.rows == 1:
            name = "row_dots" if short else "row_product"  # by short rows of B'
            text = (
                f"{name}(w, {out.at}.at, {factor}, {A.at}.at, {straight}, {c}.at, {A.cols}, "
                f"{B.cols})"
            )
        elif both:
            text = f"rank_two(w, {out.at}, {A.base.at}.at, {B.at}.at, {c}, {A.rows})"
        elif A.cols == 1:
            text = (
                f"rank_one(w, {out.at}, {factor}, {A.base.at}.at, {B.at}.at, {c}, {A.rows}, "
                f"{B.cols})"
            )
        else:
            text = f"product(w, {out.at}, {factor}, {A.left()}, {straight}, {c}, {sizes}{lower})"
        self.line(text, X.line)

    def keep(self, at, X):
        """X at the place `at`."""
        found = X.found()
        if (X.rows, X.cols) in (("m", "p"), ("m", 1)):
            self.known[X.key()] = self.keep(at, found.T).T
        elif X.rows == X.cols == 1:
            found = found.force()
            self.line(f"put_first(w, {at}.at, {found.at})")
        elif not isinstance(found, Matrix):
            found = self.compute(X, Matrix(self, at, X.rows, X.cols, X.vector))
        else:
            found = self._straight(found)
            written = [i for i, x in enumerate(self.lines) if found.at in x[0]][:1] or [0]
            later = "".join(x for x, _ in self.lines[written[0] :])
            if found.at in self.shapes and not re.search(rf"\b{re.escape(at)}\b", later):
                self.same[found.at] = at  # it is computed there
            elif X.rows == 1:
                self.line(f"axpy(w, {at}.at, 1.0, {found.at}.at, s.zero.at, {X.cols})")
            else:
                self.line(f"copy(w, {at}, {found.at}, {X.rows})")
        return found

    def add(self, at, X):
        """Add X to what lies at the place `at`, or to a number of that name."""
        self.compute(X, Matrix(self, at, X.rows, X.cols, X.vector), adding=True)

    def source(self, name, arguments, begin, end=()):
        """The function; `begin` and `end` are lines before and after."""

        def named(token):
            return named(self.same[token]) if token in self.same else token

        lines = [*(("    " + x, "") for x in begin), *self.lines, *(("    " + x, "") for x in end)]
        lines = [(_TOKEN.sub(lambda k: named(k[0]), x), of) for x, of in lines]
        last = {token: i for i, (x, _) in enumerate(lines) for token in _TOKEN.findall(x)}
        places, free = {}, {shape: list(names) for shape, names in self.scratch.items()}
        written = [f"def {name}({arguments}):"]
        for i, (x, of) in enumerate(lines):
            here = dict.fromkeys(_TOKEN.findall(x))
            for token in here:
                shape = self.shapes[token]
                if token not in places and not free.get(shape):
                    raise ValueError(f"no room for a matrix {shape} in {name}: {x.strip()}")
                places[token] = places.get(token) or free[shape].pop()
            for token in here:
                if last[token] == i:
                    free[self.shapes[token]].append(places[token])
            x = _TOKEN.sub(lambda k: places[k[0]], x)
            written.append(f"{x}  # {of}" if of else x)
        return "\n".join(written) + "\n"


def function(source, name, known):
    """The function of this source, whose lines errors show."""
    file = f"<written: {name}>"
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    exec(compile(source, file, "exec"), known)
    return known[name]
