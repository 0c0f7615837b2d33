"""Numba kernels that find output sites; compiled on the first call, and kept on disk.

Sites are numbered as they are found, in a hash table that grows with the number of windows and
not with the grid: a few sites on a large canvas stay in the cache.
"""

from __future__ import annotations

import numba
import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: Fibonacci hashing

njit = numba.njit(cache=True, nogil=True)


@njit
def first_outside(sites, grid):
    """Index of the first site outside the grid, or -1."""
    for s in range(sites.shape[0]):
        for d in range(sites.shape[1]):
            if not 0 <= sites[s, d] < grid[d]:
                return s
    return -1


@njit
def _slot(table, keys, key):
    """Where `key` is in the hash table, or the free slot where it belongs (open addressing)."""
    mask = len(table) - 1
    slot = np.int64((np.uint64(key) * GOLDEN) >> np.uint64(32)) & mask
    while table[slot] > 0 and keys[table[slot] - 1] != key:
        slot = (slot + 1) & mask
    return slot


@njit
def _table(entries, cells):
    """An empty table of a power of two entries; as long as `cells`, it needs no hashing."""
    size = 16
    while size < min(2 * entries, cells):
        size *= 2
    return np.zeros(size, np.int32), size >= cells


@njit
def find_outputs(sites, images, h, w, f, stride):
    """Output sites in first-seen order, as cell numbers, and dst (a_in, f*f), -1 for none."""
    a, columns = sites.shape
    h_out, w_out = (h - f) // stride + 1, (w - f) // stride + 1
    cells = images * h_out * w_out
    entries = min(a * f * f, cells)
    table, direct = _table(entries, cells)
    keys = np.empty(entries, np.int64)
    dst = np.full((a, f * f), -1, np.int32)
    n = 0
    for s in range(a):
        row, col = sites[s, columns - 2], sites[s, columns - 1]
        top = sites[s, 0] * h_out if columns == 3 else 0
        for p in range(f - 1, -1, -1):
            i = row - p
            if stride > 1:  # else spare the division
                if i % stride:
                    continue
                i //= stride
            if i < 0 or i >= h_out:
                continue
            for q in range(f - 1, -1, -1):
                j = col - q
                if stride > 1:
                    if j % stride:
                        continue
                    j //= stride
                if j < 0 or j >= w_out:
                    continue
                key = (top + i) * w_out + j
                slot = key if direct else _slot(table, keys, key)
                number = table[slot]
                if number == 0:
                    keys[n] = key
                    n += 1
                    number = n
                    table[slot] = n
                dst[s, p * f + q] = number - 1
    return keys[:n], dst


@njit
def invert(keys, dst, h_out, w_out, sites):
    """Output sites, src (a_out, f*f), dst with a_out for "none", and a repeated site or -1.

    Two sites of the same place claim the same position of the same window.
    """
    a, columns = sites.shape
    a_out, positions = len(keys), dst.shape[1]
    sites_out = np.empty((a_out, columns), sites.dtype)
    for o in range(a_out):
        i = keys[o] // w_out
        sites_out[o, columns - 1] = keys[o] - i * w_out
        if columns == 3:
            sites_out[o, 0] = i // h_out
            i = i % h_out
        sites_out[o, columns - 2] = i
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
    return sites_out, src, repeated


@njit
def find_neighbours(sites, images, h, w, f):
    """src (a, f*f) and dst (a, f*f) when the outputs are the inputs, and a repeated site or -1."""
    a, columns = sites.shape
    table, direct = _table(a, images * h * w)
    keys = np.empty(a, np.int64)
    repeated = -1
    for s in range(a):
        top = sites[s, 0] * h if columns == 3 else 0
        keys[s] = (top + sites[s, columns - 2]) * w + sites[s, columns - 1]
        slot = keys[s] if direct else _slot(table, keys, keys[s])
        if table[slot] > 0:
            repeated = s
        table[slot] = s + 1
    src = np.full((a, f * f), a, np.int32)
    dst = np.full((a, f * f), a, np.int32)
    half = f // 2
    for s in range(a):
        row, col = sites[s, columns - 2], sites[s, columns - 1]
        for p in range(max(0, half - row), min(f, h + half - row)):
            for q in range(max(0, half - col), min(f, w + half - col)):
                key = keys[s] + (p - half) * w + q - half
                slot = key if direct else _slot(table, keys, key)
                if table[slot] > 0:
                    src[s, p * f + q] = table[slot] - 1
                    dst[table[slot] - 1, p * f + q] = s
    return src, dst, repeated
