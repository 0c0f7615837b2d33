"""The log-likelihood of a whole series and its closed-form gradient, compiled.

A pass filters (`helpers.kalman.forward`) and, where a gradient is asked for, runs the disturbance
smoother backwards (`helpers.kalman.backward`). It computes what `helpers.kalman.reference`
computes, and tests hold the two together. What makes it fast:

- products of small matrices in registers (`helpers.kalman.products`), in one block of memory;
- rows of T that are nearly empty are followed by their non-zeros, in larger models;
- what is not asked for is neither computed nor kept (`Asked`);
- once the predicted covariance has settled, a step forwards or backwards is one product of a row
  with a matrix, and the sums over the settled steps come by doubling.
"""

from hashlib import sha256
from pathlib import Path

import numpy as np
from numba import carray, cfunc, njit, types

from helpers.kalman.backward import backward, gather_vectors
from helpers.kalman.forward import forward
from helpers.kalman.products import jit
from helpers.kalman.workspace import (
    Arrays,
    Asked,
    Sizes,
    non_zeros,
    seen,
    varies,
    workspace,
)

SPARSE_BELOW = 0.4  # share of non-zeros in T; near it two dense products begin to take less time


def digest() -> str:
    """A digest of the source of all compiled code here, which names what is kept of it on disk."""
    folder = Path(__file__).parent
    names = "products workspace forward backward kernels compiled general dispatch_numba"
    return sha256(b"".join((folder / f"{x}.py").read_bytes() for x in names.split())).hexdigest()


@jit
def all_equal(x):
    for t in range(x.size):
        if x[t] != x[0]:
            return False
    return True


@jit
def fill(place, size, value):
    X = carray(place, size)
    for i in range(size):
        X[i] = value


# Put into its one caller: apart, all that it calls would be optimised once more.
@njit(error_model="numpy", inline="always")
def whole_pass(y, model, backwards, asked, l_bar, tol, l, y_bar, out):
    """Filter into l and, if `backwards`, write the gradient into y_bar and out (zeros before).

    Returns the first settled step, n if there is none; -1 where some F is not positive definite.
    """
    n, p = y.shape
    sizes = Sizes(n, p, model.a0.shape[0], model.Q.shape[1])
    equal = not backwards or all_equal(l_bar)
    memory, w, s = workspace(sizes, backwards, asked)
    observed, complete_from = seen(y)
    varying = varies(model)
    start, index = non_zeros(model.T, False)
    start_t, index_t = non_zeros(model.T, True)
    sparse = index.size < SPARSE_BELOW * sizes.m**2
    k, failed = forward(
        w, s, y, observed, complete_from, varying, sparse, start, index, model, sizes,
        backwards, asked, 0.0 if varying or not equal else tol, l,
    )  # fmt: skip
    if failed >= 0:
        k = -1
    elif backwards:
        backward(
            w, s, k, observed, varying, sparse, start_t, index_t, model, sizes, asked, l_bar, equal,
            out,
        )  # fmt: skip
        gather_vectors(w, s, sizes, l_bar[0] if equal else 1.0, out.c, out.d, y_bar)
    memory[0] = 0.0  # the address w was good until here
    return k


PASS = types.void(*[types.CPointer(types.float64)] * 22, types.CPointer(types.int64))


def _pass_by_address(
    y,
    a0,
    P0,
    c,
    d,
    T,
    Z,
    R,
    H,
    Q,
    l_bar,
    l,
    y_bar,
    a0_bar,
    P0_bar,
    c_bar,
    d_bar,
    T_bar,
    Z_bar,
    R_bar,
    H_bar,
    Q_bar,
    numbers,
):
    """`whole_pass` with arrays by their addresses.

    `numbers` are n, p, m, r, the lengths over time of c, d, T, Z, R, H, Q, then `backwards` and the
    four of `Asked` as 0 or 1; the tolerance lies at l[0] on entry, the first settled step returns
    as the first of the numbers. Where some F is not positive definite all is NaN, and that is -1.
    """
    num = carray(numbers, 16)
    n, p, m, r = num[0], num[1], num[2], num[3]
    c_k, d_k, T_k, Z_k, R_k, H_k, Q_k = num[4], num[5], num[6], num[7], num[8], num[9], num[10]
    model = Arrays(
        carray(a0, m), carray(P0, (m, m)), carray(c, (c_k, m)), carray(d, (d_k, p)),
        carray(T, (T_k, m, m)), carray(Z, (Z_k, p, m)), carray(R, (R_k, m, r)),
        carray(H, (H_k, p, p)), carray(Q, (Q_k, r, r)),
    )  # fmt: skip
    out = Arrays(
        carray(a0_bar, m), carray(P0_bar, (m, m)), carray(c_bar, (c_k, m)), carray(d_bar, (d_k, p)),
        carray(T_bar, (T_k, m, m)), carray(Z_bar, (Z_k, p, m)), carray(R_bar, (R_k, m, r)),
        carray(H_bar, (H_k, p, p)), carray(Q_bar, (Q_k, r, r)),
    )  # fmt: skip
    ls = carray(l, n)
    asked = Asked(num[12] != 0, num[13] != 0, num[14] != 0, num[15] != 0)
    k = whole_pass(
        carray(y, (n, p)),
        model,
        num[11] != 0,
        asked,
        carray(l_bar, n),
        ls[0],
        ls,
        carray(y_bar, (n, p)),
        out,
    )
    if k < 0:
        fill(l, n, np.nan)
        if num[11] != 0:
            places = y_bar, a0_bar, P0_bar, c_bar, d_bar, T_bar, Z_bar, R_bar, H_bar, Q_bar
            lengths = (
                n * p, out.a0.size, out.P0.size, out.c.size, out.d.size, out.T.size, out.Z.size,
                out.R.size, out.H.size, out.Q.size,
            )  # fmt: skip
            for place, length in zip(places, lengths):  # noqa: B905 (Numba knows no strict)
                fill(place, length, np.nan)
    num[0] = k


# Numba keeps the compiled code on disk under this name, and looks at no file but this one to see
# whether it is still good: so the name changes with the others.
_pass_by_address.__qualname__ += f"_{digest()[:16]}"
pass_by_address = cfunc(PASS, cache=True, error_model="numpy")(_pass_by_address)
