"""Layers that the sparse tests run on, and what a dense convolution makes of their dense forms."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from scipy.signal import convolve

from helpers.checks import complex_step
from helpers.sparse_conv import SparseValue

# The first example of a test may wait for a kernel to be compiled.
settings.register_profile("sparse", deadline=None)
settings.load_profile("sparse")


def per_axis(number, d):
    return (number,) * d if np.ndim(number) == 0 else tuple(number)


def dense_conv(dense, W, b, f, stride=1, pad=0, ground_state=0.0, dilation=1):
    """Cross-correlation of an image (*grid, n_in), padded with the ground state: (*out, n_out).

    A dilated filter is one with zeros between its cells.
    """
    d, n_in, n_out = dense.ndim - 1, dense.shape[-1], W.shape[1]
    f, dilation = per_axis(f, d), per_axis(dilation, d)
    spans = [g * (w - 1) + 1 for w, g in zip(f, dilation, strict=True)]
    filters = np.zeros((*spans, n_in, n_out), W.dtype)
    filters[tuple(slice(None, None, g) for g in dilation)] = W.reshape((*f, n_in, n_out))
    rim = [(p, p) for p in per_axis(pad, d)]
    dense = np.pad(dense - ground_state, [*rim, (0, 0)]) + ground_state
    every = tuple(slice(None, None, s) for s in per_axis(stride, d))
    return np.stack(
        [
            sum(
                # Flipped, so a correlation; SciPy's would conjugate complex filters.
                convolve(dense[..., c], np.flip(filters[..., c, n]), "valid", method="direct")
                for c in range(n_in)
            )[every]
            + b[n]
            for n in range(n_out)
        ],
        axis=-1,
    )


def dense_transposed(dense, W, b, f, stride=1, pad=0, dilation=1, output_pad=0):
    """Transposed convolution of an image (*grid, n_in): every cell adds its window in its turn."""
    d, n_in, n_out = dense.ndim - 1, dense.shape[-1], W.shape[1]
    f, stride, pad, dilation, more = (
        per_axis(x, d) for x in (f, stride, pad, dilation, output_pad)
    )
    blocks = W.reshape((*f, n_in, n_out))
    spans = [g * (w - 1) + 1 for w, g in zip(f, dilation, strict=True)]
    sides = zip(dense.shape[:-1], stride, spans, more, strict=True)
    shape = (*((h - 1) * s + span + o for h, s, span, o in sides), n_out)
    full = np.zeros(shape, np.result_type(dense, W))
    for cell in np.ndindex(dense.shape[:-1]):
        starts = [i * s for i, s in zip(cell, stride, strict=True)]
        window = tuple(
            slice(i, i + span, g) for i, span, g in zip(starts, spans, dilation, strict=True)
        )
        full[window] += np.tensordot(blocks, dense[cell], axes=([d], [0]))
    sides = zip(pad, full.shape[:-1], strict=True)
    return full[tuple(slice(p, size - p) for p, size in sides)] + b


def is_gradient(gradient, f, at, rtol=1e-12, seed=11):
    """Whether it agrees with complex steps of f at `at` along three directions of all entries."""
    directions = np.random.default_rng(seed).standard_normal((3, *at.shape))
    terms = [gradient * v for v in directions]
    steps = [complex_step(lambda s, v=v: f(at + s * v), 0.0) for v in directions]
    return gradient.shape == at.shape and all(
        abs(term.sum() - step) <= rtol * np.abs(term).sum()
        for term, step in zip(terms, steps, strict=True)
    )


@st.composite
def layers(draw, dtype=np.float64, images=False, d=2):
    """A SparseValue with any sites in any order, f, W and b."""
    space = tuple(draw(st.integers(1, 7 if d < 3 else 4)) for _ in range(d))
    f = draw(st.integers(1, min(*space, 4)))
    n_in, n_out = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    grid = (draw(st.integers(1, 3)), *space) if images else space
    cells = draw(st.lists(st.integers(0, int(np.prod(grid)) - 1), unique=True, max_size=20))
    integers = draw(st.sampled_from([np.int32, np.int64]))
    sites = np.array(np.unravel_index(np.array(cells, dtype=int), grid), dtype=integers).T
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def numbers(*shape):
        return rng.standard_normal(shape).astype(dtype)

    t = numbers(n_in) * draw(st.sampled_from([0, 1]))
    x = SparseValue(sites, numbers(len(cells), n_in), (*grid, n_in), t.astype(dtype), d)
    return x, f, numbers(f**d * n_in, n_out), numbers(n_out)


def random_layer(a, shape, f, n_out, seed=0, dtype=np.float64, integers=np.int64, d=2):
    """The same, of a given size."""
    rng = np.random.default_rng(seed)
    *grid, n_in = shape
    cells = rng.choice(int(np.prod(grid)), size=a, replace=False)
    sites = np.array(np.unravel_index(cells, grid), dtype=integers).T
    values, t = rng.standard_normal((a, n_in)), rng.standard_normal(n_in)
    x = SparseValue(sites, values.astype(dtype), shape, t.astype(dtype), d)
    W, b = rng.standard_normal((f**d * n_in, n_out)), rng.standard_normal(n_out)
    return x, W.astype(dtype), b.astype(dtype)
