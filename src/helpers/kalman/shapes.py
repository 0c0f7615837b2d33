"""The dimensions of what Ops and engines take, and the one look at whether shapes fit them.

``"n p"`` is a matrix. A letter is one length throughout; ``"n?"`` is an axis of length n or 1, and
in an output the axis of the input of the same name.
"""

from __future__ import annotations

from helpers.statespace import SHAPES, STATIC

# Of many series.
PANEL = {
    "y": "J n p", "a0": "J? m", "P0": "m m", "c": "J? n? m",
    "T": "n? m m", "Z": "n? p m", "H": "n? p p", "W": "n? m m",
}  # fmt: skip
# Of the data and a column for each number; y and c may have the data alone.
INTEGRATED = {
    "y": "columns? n p", "starts": "columns m", "c": "columns? n? m", "P0": "m m",
    "T": "n? m m", "Z": "n? p m", "H": "n? p p", "W": "n? m m", "precision": "q q",
}  # fmt: skip

FIXED = ("y", *STATIC)  # without a further axis for time
NEEDED = {"n": "step", "p": "series", "m": "state"}
SAID = {"W": "W = R Q R'"}  # the names of inputs that a user does not know


def axes(x: str, dims: str) -> list[str]:
    """Names of the axes of a variable x; one of length n or 1 is x's own."""
    return [k if k[-1] != "?" else f"{k[:-1]}_{x}" for k in dims.split()]


def said(x: str) -> str:
    """What an input is called in an error."""
    return f"the tangent of {x[:-4]}" if x.endswith("_dot") else SAID.get(x, x)


def shown(words) -> str:
    """Dimensions, as Python shows a shape."""
    words = [f"{str(k)[:-1]} or 1" if str(k)[-1] == "?" else str(k) for k in words]
    return f"({', '.join(words)}{',' * (len(words) == 1)})"


def check_model(shapes: dict) -> None:
    """Raise if shapes of y and of the nine arrays are not those of a model and its data."""
    dims = {"y": "n p"} | {x: " ".join(letters) for x, letters in SHAPES.items()}
    check(dims, shapes, NEEDED | {"r": "shock"}, may_vary=dims.keys() - set(FIXED))


def check(dims: dict, shapes: dict, needed=(), sizes: dict | None = None, may_vary=()) -> None:
    """Raise if shapes (None where a length is not known) are not those of `dims`.

    Those that `may_vary` may have one axis more, the first, for time. Letters that are `needed` may
    not be zero: it says what there is none of then. `sizes` are the lengths that are known, by
    letter.
    """
    sizes = {} if sizes is None else dict(sizes)
    split = {x: list(k) if isinstance(k, tuple) else k.split() for x, k in dims.items()}
    for x, shape in shapes.items():
        letters, varies = split[x], x in may_vary
        if len(shape) - len(letters) not in ((0, 1) if varies else (0,)):
            raise ValueError(
                f"{said(x)} has {len(shape)} dimensions, expected {len(letters)}: {shown(letters)}"
                + " or with a leading time axis" * varies
            )
    for x, shape in shapes.items():
        letters = split[x] if len(shape) == len(split[x]) else ["n", *split[x]]
        for length, letter in zip(shape, letters, strict=True):
            base = letter.removesuffix("?")
            if length is None or (length == 1 and base != letter):
                continue
            if sizes.get(base) is None:
                sizes[base] = length
            if length != sizes[base]:
                known = [k if sizes.get(k.removesuffix("?")) is None
                         else f"{sizes[k.removesuffix('?')]}{'?' * (k[-1] == '?')}"
                         for k in letters]  # fmt: skip
                raise ValueError(
                    f"{said(x)} has shape {tuple(shape)}, expected "
                    f"{shown(letters)} = {shown(known)}"
                )
    for letter in needed:
        if sizes.get(letter) == 0:
            raise ValueError(f"{letter} = 0: there is no {needed[letter]}")
