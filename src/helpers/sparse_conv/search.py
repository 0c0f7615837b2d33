"""Numba kernels that find output sites; compiled on the first call, and kept on disk.

Sites are numbered as they are found, in a hash table that grows with the number of windows and
not with the grid: a few sites on a large canvas stay in the cache.
"""

import numpy as np

from helpers.kalman import on_disk

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: Fibonacci hashing

njit = on_disk.njit(nogil=True)


@njit
def _slot(table, keys, key):
    """Where `key` is in the hash table, or the free slot where it belongs (open addressing)."""
    mask = len(table) - 1
    slot = np.int64((np.uint64(key) * GOLDEN) >> np.uint64(32)) & mask
    while table[slot] > 0 and keys[table[slot] - 1] != key:
        slot = (slot + 1) & mask
    return slot


@njit
def _reached(site, offset, size, sign, times, over):
    """Along one axis: the output whose window holds the site at a position, or -1.

    Of position p the offset is dilation p - pad. The output is (site - offset) / stride, and of a
    transposed convolution stride site + offset.
    """
    i = times * site + sign * offset
    if over > 1:  # else spare the division
        if i % over:
            return -1
        i //= over
    return i if 0 <= i < size else -1


@njit
def find_outputs(sites, size, window, stride, pad, dilation, transposed, given):
    """Output sites in first-seen order, as cell numbers, dst (a, f^d), and a repeated site or -1.

    `sites` is (a, 4), image and three coordinates; `size`, of the outputs, and `window`, `stride`,
    `pad` and `dilation`, of the three axes, are tuples. An axis that the image lacks has size,
    window and stride 1. With `given` cell numbers, if there are any, these are the outputs, and no
    others.
    """
    a, positions = len(sites), window[0] * window[1] * window[2]
    sign, times, over = (1, stride, (1, 1, 1)) if transposed else (-1, (1, 1, 1), stride)
    cells = size[0] * size[1] * size[2] * size[3]
    closed = len(given) > 0
    entries = len(given) if closed else min(a * positions, cells)
    length = 16  # a power of two; where it is as long as there are cells, it needs no hashing
    while length < min(2 * entries, cells):
        length *= 2
    table, direct = np.zeros(length, np.int32), length >= cells
    keys = np.empty(entries, np.int64)
    dst = np.full((a, positions), -1, np.int32)
    n, repeated = len(given), -1
    for o in range(n):
        slot = given[o] if direct else _slot(table, keys, given[o])
        if table[slot] > 0:
            repeated = o
        keys[o] = given[o]
        table[slot] = o + 1
    for s in range(a):
        image, x, y, z = sites[s, 0], sites[s, 1], sites[s, 2], sites[s, 3]
        for p in range(window[0] - 1, -1, -1):
            i = _reached(x, dilation[0] * p - pad[0], size[1], sign, times[0], over[0])
            if i < 0:
                continue
            for q in range(window[1] - 1, -1, -1):
                j = _reached(y, dilation[1] * q - pad[1], size[2], sign, times[1], over[1])
                if j < 0:
                    continue
                row = ((image * size[1] + i) * size[2] + j) * size[3]
                for r in range(window[2] - 1, -1, -1):
                    k = _reached(z, dilation[2] * r - pad[2], size[3], sign, times[2], over[2])
                    if k < 0:
                        continue
                    key = row + k
                    slot = key if direct else _slot(table, keys, key)
                    number = table[slot]
                    if number == 0:
                        if closed:
                            continue
                        keys[n] = key
                        n += 1
                        number = n
                        table[slot] = n
                    dst[s, (p * window[1] + q) * window[2] + r] = number - 1
    return keys[:n], dst, repeated


@njit
def invert(dst, a_out):
    """src (a_out, f^d), dst with a_out for "none", and a repeated site or -1.

    Two sites of the same place claim the same position of the same window.
    """
    a, positions = dst.shape
    src = np.full((a_out, positions), a, np.int32)
    repeated = -1
    for s in range(a):
        for k in range(positions):
            o = dst[s, k]
            if o < 0:
                dst[s, k] = a_out
            else:
                if src[o, k] != a:
                    repeated = s
                src[o, k] = s
    return src, dst, repeated
