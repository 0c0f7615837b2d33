"""The compiled kernels as functions of arrays, called by address.

A function that calls a kernel by its symbol does not carry the kernel's code: PyTensor compiles
each of its functions in a second or two, and the kernels are compiled once for each machine, on
their first use, and kept on disk.
"""

import llvmlite.binding
import numpy as np
from numba import njit, types

from helpers.kalman import kernels
from helpers.kalman.workspace import Arrays

llvmlite.binding.add_symbol("helpers_kalman_pass", kernels.pass_by_address.address)
_pass = types.ExternalFunction("helpers_kalman_pass", kernels.PASS)

jit = njit(cache=True, error_model="numpy", nogil=True)


@jit
def loglike(y, a0, P0, c, d, T, Z, R, H, Q, tol):
    """The log-likelihood of each step, (n,); NaN throughout where some F is not positive definite.

    y (n, p) with NaN for what is missing; c (k, m), d (k, p), T, Z, R, H, Q with k = 1 or n in
    front; `tol` bounds, by estimate, what the settled covariance misses: max |P - P*|_ij /
    sqrt(P_ii P_jj); 0 for none. All contiguous.
    """
    l = np.empty(y.shape[0])
    l[0] = tol
    numbers = np.array(
        [*y.shape, a0.shape[0], Q.shape[1], c.shape[0], d.shape[0], T.shape[0], Z.shape[0],
         R.shape[0], H.shape[0], Q.shape[0], 0, 0, 0, 0, 0]
    )  # fmt: skip
    _pass(
        y.ctypes, a0.ctypes, P0.ctypes, c.ctypes, d.ctypes, T.ctypes, Z.ctypes, R.ctypes, H.ctypes,
        Q.ctypes, l.ctypes, l.ctypes, l.ctypes, l.ctypes, l.ctypes, l.ctypes, l.ctypes, l.ctypes,
        l.ctypes, l.ctypes, l.ctypes, l.ctypes, numbers.ctypes,
    )  # fmt: skip
    return l


@jit
def loglike_and_grad(
    y, a0, P0, c, d, T, Z, R, H, Q, l_bar, matrices, T_too, Z_too, W_too, tol
):  # fmt: skip
    """`loglike`, the gradient of its sum weighted with l_bar (n,), that of y, and the settled step.

    The gradient is an array for each of the model's, of the same shape, symmetric for P0, H and Q.
    The flags say what is asked for: any of P0, T, Z, R, H, Q (`matrices`), T, Z, any of R and Q
    (`W_too`); the others come back as zeros. The settled step is the index of the first whose
    covariance counts as settled, n where there is none, -1 where some F is not positive definite.
    """
    n, p = y.shape
    l = np.empty(n)
    l[0] = tol
    y_bar = np.zeros((n, p))
    out = Arrays(
        np.zeros(a0.shape), np.zeros(P0.shape), np.zeros(c.shape), np.zeros(d.shape),
        np.zeros(T.shape), np.zeros(Z.shape), np.zeros(R.shape), np.zeros(H.shape),
        np.zeros(Q.shape),
    )  # fmt: skip
    numbers = np.array(
        [n, p, a0.shape[0], Q.shape[1], c.shape[0], d.shape[0], T.shape[0], Z.shape[0],
         R.shape[0], H.shape[0], Q.shape[0], 1, int(matrices), int(T_too), int(Z_too), int(W_too)]
    )  # fmt: skip
    _pass(
        y.ctypes, a0.ctypes, P0.ctypes, c.ctypes, d.ctypes, T.ctypes, Z.ctypes, R.ctypes, H.ctypes,
        Q.ctypes, l_bar.ctypes, l.ctypes, y_bar.ctypes, out.a0.ctypes, out.P0.ctypes,
        out.c.ctypes, out.d.ctypes, out.T.ctypes, out.Z.ctypes, out.R.ctypes, out.H.ctypes,
        out.Q.ctypes, numbers.ctypes,
    )  # fmt: skip
    return l, out, y_bar, numbers[0]
