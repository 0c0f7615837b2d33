"""The oracle of the sparse tests: the research notebook's loops, one value at a time.

They are slow and plain, and they define what the package computes: the order of the output sites,
the columns of Q, and gradients by running through the same loops again.
"""

import numpy as np


def filter_positions(row, col, height, width, f):
    """Windows, by their upper left corners, that hold the site; by rows, then by columns."""
    for i in range(max(row - f + 1, 0), min(row + 1, height - f + 1)):
        for j in range(max(col - f + 1, 0), min(col + 1, width - f + 1)):
            yield i, j


def position_in_filter(i, j, row, col, f, channel, n_in):
    return channel + (col - j) * n_in + (row - i) * f * n_in


def loop_output_sites(sites, height, width, f):
    """Number of each output site, in the order in which the loops first see it."""
    numbers = {}
    for row, col in sites:
        for i, j in filter_positions(row, col, height, width, f):
            if (i, j) not in numbers:
                numbers[i, j] = len(numbers)
    return numbers


def loop_build_q(sites, values, shape, f, ground_state):
    """Output sites (a_out, 2) and Q (a_out, f*f*n_in)."""
    height, width, n_in = shape
    numbers = loop_output_sites(sites, height, width, f)
    sites_out = np.empty((len(numbers), 2), dtype=sites.dtype)
    Q = np.empty((len(numbers), f * f, n_in), dtype=values.dtype)
    for channel, t in enumerate(ground_state):
        Q[:, :, channel] = t
    Q = Q.reshape(len(numbers), f * f * n_in)
    for s, (row, col) in enumerate(sites):
        for i, j in filter_positions(row, col, height, width, f):
            o = numbers[i, j]
            sites_out[o] = i, j
            for channel, value in enumerate(values[s]):
                Q[o, position_in_filter(i, j, row, col, f, channel, n_in)] = value
    return sites_out, Q


def loop_grad_q(dQ, sites, values, shape, f):
    """dM (a_in, n_in), and dt (n_in,) by subtraction from the sum over everything."""
    height, width, n_in = shape
    numbers = loop_output_sites(sites, height, width, f)
    dM = np.zeros_like(values)
    dt = dQ.reshape(len(numbers), f * f, n_in).sum(axis=(0, 1))
    for s, (row, col) in enumerate(sites):
        for i, j in filter_positions(row, col, height, width, f):
            o = numbers[i, j]
            for channel in range(n_in):
                d = dQ[o, position_in_filter(i, j, row, col, f, channel, n_in)]
                dM[s, channel] += d
                dt[channel] -= d
    return dM, dt


def loop_next_ground_state(W, ground_state, f):
    return W.T @ np.tile(ground_state, f * f)
