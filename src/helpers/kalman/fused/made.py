"""The whole pass, made for one number of states and series.

The text is that of :mod:`helpers.kalman.fused.one_pass`. Where the compiler knows the sizes, loops
have a known length, and rows and most matrices lie in known places: a step takes a tenth to a
quarter less time, with the same results to the last bit. To compile it takes half as long as the
pass for any size, which has to be there too; so it is made for the sizes that were asked for, by
:func:`helpers.kalman.fused.warmup` or in the environment.
"""

from helpers.kalman.fused import building
from helpers.kalman.fused.entry import PASS, kept_on_disk, whole_pass
from helpers.kalman.fused.layout import of_size
from helpers.kalman.on_disk import cfunc


def address(m: int, p: int, announce: bool | None = None) -> int:
    """Where the pass for m states and p series begins, compiled if it was not before."""
    what = f"Kalman filter made for {m} states and {p} series"
    return building.address(compiled, m, p, what, announce)


def compiled(m: int, p: int):
    """The pass for m states and p series, as machine code."""

    def made(
        w, header, entries, indices, sizes, report, tol, l, l_bar, y, y_bar, a0, P0, c, d, T, Z, H,
        W, a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar,
    ):  # fmt: skip
        return whole_pass(
            of_size(w, m, p), header, entries, indices, sizes, report, tol, l, l_bar, y, y_bar, a0,
            P0, c, d, T, Z, H, W, a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, H_bar, W_bar,
        )  # fmt: skip

    return kept_on_disk(cfunc(PASS, error_model="numpy"))(made)
