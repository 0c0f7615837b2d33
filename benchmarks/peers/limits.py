"""What the machine can do at best, in one thread: multiply-adds and bytes in a second."""

from __future__ import annotations

from functools import partial
from time import perf_counter

import numpy as np
from numba import njit

from helpers.kalman.compiled.tiles import LANES, Mat, padded, product

SIZES = (4, 8, 16, 24, 32, 48, 64)


@njit
def many_products(w, size, times):
    """`times` products C += tiny A B of square matrices that lie at the address w."""
    ld = padded(size)
    A, B, C = Mat(0, ld, 1), Mat(size * ld, ld, 1), Mat(2 * size * ld, ld, 1)
    for _ in range(times):
        product(w, C, 1e-300, A, B, C, size, size, size)


def best_of(function, rounds: int = 7) -> float:
    """Seconds of the quickest call: what the machine can do, not what it usually does."""
    found = []
    for _ in range(rounds):
        start = perf_counter()
        function()
        found.append(perf_counter() - start)
    return min(found)


def product_rates() -> dict[int, float]:
    """Multiply-adds in a second by size, of products in registers as the pass uses them."""
    rates = {}
    for size in SIZES:
        memory = np.random.default_rng(0).standard_normal(3 * size * (size + LANES))
        times = 10**7 // size**3
        run = partial(many_products, memory.ctypes.data, size, times)
        run()
        rates[size] = times * size**3 / best_of(run)
    return rates


def blas_rate(size: int = 500) -> float:
    """Multiply-adds in a second of a large product by BLAS."""
    A = np.random.default_rng(0).standard_normal((size, size))
    out = np.empty_like(A)
    return size**3 / best_of(lambda: np.matmul(A, A, out=out))


def copy_rate(mebibytes: int = 256) -> float:
    """Bytes in a second, read and written, of a copy that no cache holds."""
    source = np.ones(mebibytes * 2**17)
    target = np.zeros_like(source)
    return 2 * source.nbytes / best_of(lambda: np.copyto(target, source))


def measure() -> dict:
    rates = product_rates()
    return {
        "products": {str(size): rate for size, rate in rates.items()},
        "blas": blas_rate(),
        "copy": copy_rate(),
    }
