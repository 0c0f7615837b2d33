"""Layers that the sparse tests run on, and what a dense convolution makes of their dense forms."""

import numpy as np
from hypothesis import strategies as st
from scipy.signal import correlate2d

from helpers.sparse_conv import SparseValue


def dense_conv(dense, W, b, f):
    """Valid cross-correlation (h - f + 1, w - f + 1, n_out) of an image (h, w, n_in)."""
    n_in, n_out = dense.shape[-1], W.shape[1]
    filters = W.reshape(f, f, n_in, n_out)
    return np.stack(
        [
            sum(correlate2d(dense[..., c], filters[..., c, n], "valid") for c in range(n_in)) + b[n]
            for n in range(n_out)
        ],
        axis=-1,
    )


@st.composite
def layers(draw, dtype=np.float64, images=False):
    """A SparseValue with any sites in any order, f, W and b."""
    h, w = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    f = draw(st.integers(1, min(h, w, 4)))
    n_in, n_out = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    grid = (draw(st.integers(1, 3)), h, w) if images else (h, w)
    cells = draw(st.lists(st.integers(0, int(np.prod(grid)) - 1), unique=True, max_size=20))
    integers = draw(st.sampled_from([np.int32, np.int64]))
    sites = np.array(np.unravel_index(np.array(cells, dtype=int), grid), dtype=integers).T
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def numbers(*shape):
        return rng.standard_normal(shape).astype(dtype)

    t = numbers(n_in) * draw(st.sampled_from([0, 1]))
    x = SparseValue(sites, numbers(len(cells), n_in), (*grid, n_in), t.astype(dtype))
    return x, f, numbers(f * f * n_in, n_out), numbers(n_out)


def random_layer(a, shape, f, n_out, seed=0, dtype=np.float64, integers=np.int64):
    """The same, of a given size."""
    rng = np.random.default_rng(seed)
    *grid, n_in = shape
    cells = rng.choice(int(np.prod(grid)), size=a, replace=False)
    sites = np.array(np.unravel_index(cells, grid), dtype=integers).T
    values, t = rng.standard_normal((a, n_in)), rng.standard_normal(n_in)
    x = SparseValue(sites, values.astype(dtype), shape, t.astype(dtype))
    W, b = rng.standard_normal((f * f * n_in, n_out)), rng.standard_normal(n_out)
    return x, W.astype(dtype), b.astype(dtype)
