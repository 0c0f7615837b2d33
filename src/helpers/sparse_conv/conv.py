r"""The convolution and its gradients in NumPy, each in a few lines; any dtype, complex too.

With :math:`Q` of shape (a_out, f^d*n_in), whose row o holds what output site o sees, position by
position,

.. math:: Y = Q W + b, \qquad t_\text{out} = \sum_k W_k^\top t + b,

where :math:`W_k` (n_in, n_out) is block k of W. Of a transposed rulebook, Q holds what differs
from the ground state, and :math:`t_\text{out} = b`. Graham (2015), Sparse 3D convolutional neural
networks, arXiv:1505.02890.
"""

import math

import numpy as np

from helpers.sparse_conv.rules import (
    Rulebook,
    expect_rules,
    integer,
    per_axis,
    rulebook,
    union_rulebooks,
)
from helpers.sparse_conv.value import (
    SparseValue,
    array,
    expect,
    expect_kind,
    total,
    transpose_times,
)


def build_q(values, ground_state, rules: Rulebook) -> np.ndarray:
    """Q: one gather; of a transposed rulebook, of what differs from the ground state.

    Parameters
    ----------
    values : array (a_in, n_in)
    ground_state : array (n_in,)
    rules : Rulebook

    Returns
    -------
    array (a_out, f^d*n_in)
        Column k n_in + c is channel c at position k of the window.
    """
    expect_rules(rules)
    values, ground_state = array("values", values), array("ground_state", ground_state)
    expect("values", values, "(a_in, n_in)", (len(rules.dst), ground_state.size))
    expect("ground_state", ground_state, "(n_in,)", (ground_state.size,))
    if rules.transposed:
        values, ground_state = values - ground_state, np.zeros_like(ground_state)
    seen = np.concatenate([values, ground_state[np.newaxis]])  # row a_in is the ground state
    return seen[rules.src].reshape(len(rules.src), rules.src.shape[1] * ground_state.size)


def grad_q(dQ, rules: Rulebook) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of a loss with respect to values and ground state, from that to Q: a gather too.

    An input site is at each position of at most one window, so its gradient is a sum of f^d
    entries that dst finds. The ground state's is the sum over all positions without a site; of a
    transposed rulebook, it is minus the sum of all dM.

    Parameters
    ----------
    dQ : array (a_out, f^d*n_in)
    rules : Rulebook

    Returns
    -------
    dM : array (a_in, n_in)
    dt : array (n_in,)
    """
    expect_rules(rules)
    dQ = array("dQ", dQ)
    (a_out, positions), a = rules.src.shape, len(rules.dst)
    if dQ.ndim != 2 or len(dQ) != a_out or dQ.shape[1] % positions:
        raise ValueError(
            f"dQ has shape {dQ.shape}, expected (a_out, f^d*n_in) = ({a_out}, {positions} n_in)"
        )
    blocks = dQ.reshape(a_out, positions, dQ.shape[1] // max(positions, 1))
    reached = np.concatenate([blocks, np.zeros_like(blocks, shape=(1, *blocks.shape[1:]))])
    dM = reached[rules.dst, np.arange(positions)].sum(axis=1)  # row a_out is zero
    return dM, -total(dM) if rules.transposed else total(blocks[rules.src == a])


def next_ground_state(W, ground_state, f, *, b=0.0, d: int = 2) -> np.ndarray:
    """What a window without active sites gives: W' tile(t, f^d) + b.

    That of a transposed convolution, which acts on what differs from the ground state, is b.

    Parameters
    ----------
    W : array (f^d*n_in, n_out)
    ground_state : array (n_in,)
    f : int, or tuple of d int
    b : array (n_out,), optional
    d : int, optional

    Returns
    -------
    array (n_out,)
    """
    W, t, b = array("W", W), array("ground_state", ground_state), array("b", b)
    expect("ground_state", t, "(n_in,)", (t.size,))
    positions = math.prod(per_axis("f", f, 1, integer("d", d, 1)))
    if W.ndim != 2 or len(W) != positions * t.size:
        raise ValueError(
            f"W has shape {W.shape}, expected (f^d*n_in, n_out) = ({positions * t.size}, n_out)"
        )
    return np.tile(t, positions) @ W + b


def sparse_conv(x: SparseValue, W, b, rules: Rulebook, *, groups: int = 1) -> SparseValue:
    """Convolution of a sparse image, or of each image of a batch, in one, two or three dimensions.

    Which convolution is for the rulebook to say: :func:`~helpers.sparse_conv.rules.rulebook` (with
    stride, padding and dilation), :func:`~helpers.sparse_conv.rules.submanifold_rulebook`,
    :func:`~helpers.sparse_conv.rules.transposed_rulebook` or
    :func:`~helpers.sparse_conv.rules.inverse_rulebook`. The last two act on what differs from the
    ground state, and their own ground state is b.

    Parameters
    ----------
    x : SparseValue (*grid, n_in)
    W : array (f^d*n_in, n_out), with groups (f^d*n_in/groups, n_out)
        Row k n_in + c belongs to position k of the window and channel c.
    b : array (n_out,)
    rules : Rulebook
        Made of ``x.sites``.
    groups : int
        Number of groups into which the channels are cut; each group of outputs sees one group of
        inputs: its columns of W are the weights of a layer of its own. n_in of them make a
        depthwise convolution.

    Returns
    -------
    SparseValue (*rules.grid, n_out)

    Raises
    ------
    ValueError
        If the rulebook was made of other sites than x's, W or b do not fit, or groups does not
        divide n_in and n_out.
    """
    expect_rules(rules, x)
    W, b = _weights(W, b, rules.src.shape[1], x.shape[-1], groups)
    values, t_out = [], []
    for M, t, W_g, b_g in _groups(groups, x.values, x.ground_state, W, b):
        values.append(build_q(M, t, rules) @ W_g + b_g)
        t_out.append(b_g if rules.transposed else np.tile(t, rules.src.shape[1]) @ W_g + b_g)
    return SparseValue._trusted(
        rules.sites, np.hstack(values), (*rules.grid, len(b)), np.hstack(t_out), x.d
    )


def sparse_conv_grad(
    x: SparseValue, W, rules: Rulebook, dY, dt_out, *, groups: int = 1
) -> tuple[np.ndarray, ...]:
    """Gradients with respect to what goes into :func:`sparse_conv`.

    Parameters
    ----------
    x, W, rules, groups
        As in :func:`sparse_conv`.
    dY : array (a_out, n_out)
        Gradient with respect to the output's values.
    dt_out : array (n_out,)
        Gradient with respect to the output's ground state.

    Returns
    -------
    dM (a_in, n_in), dt (n_in,), dW of the shape of W, db (n_out,)
    """
    expect_rules(rules, x)
    dY, dt_out = array("dY", dY), array("dt_out", dt_out)
    W, _ = _weights(W, dt_out, rules.src.shape[1], x.shape[-1], groups)
    expect("dY", dY, "(a_out, n_out)", (len(rules.src), W.shape[1]))
    parts = []
    for M, t, W_g, dY_g, dt_out_g in _groups(groups, x.values, x.ground_state, W, dY, dt_out):
        dM, dt = grad_q(dY_g @ W_g.T, rules)
        dW = transpose_times(build_q(M, t, rules), dY_g)
        if not rules.transposed:
            dt = dt + (W_g @ dt_out_g).reshape(-1, len(t)).sum(axis=0)
            dW = dW + np.outer(np.tile(t, rules.src.shape[1]), dt_out_g)
        parts.append((dM, dt, dW, total(dY_g) + dt_out_g))
    return tuple(np.concatenate(part, axis=-1) for part in zip(*parts, strict=True))


def _groups(groups: int, *arrays):
    """The columns of each group, of all arrays."""
    return zip(*(np.split(X, groups, axis=-1) for X in arrays), strict=True)


def sparse_conv_2d(x: SparseValue, W, b, f, *, stride=1, pad=0, dilation=1) -> SparseValue:
    """Convolution of a sparse image, or of each image of a batch, with its own search for outputs.

    Parameters
    ----------
    x : SparseValue (h, w, n_in)
    W : array (f*f*n_in, n_out)
        Row (p f + q) n_in + c belongs to row p and column q of the window and channel c.
    b : array (n_out,)
    f, stride, pad, dilation : int, or tuple of two int
        As in :func:`~helpers.sparse_conv.rules.rulebook`.

    Returns
    -------
    SparseValue ((h + 2 pad - f) // stride + 1, (w + 2 pad - f) // stride + 1, n_out)
        Active is each site whose window holds an active site, in first-seen order. (With dilation,
        dilation (f - 1) + 1 in the place of f.)

    Raises
    ------
    ValueError
        If x is no picture, f is larger than the padded grid, or W or b do not fit.
    """
    return sparse_conv(x, W, b, _rulebook_2d(x, f, stride, pad, dilation))


def sparse_conv_2d_grad(
    x: SparseValue, W, f, dY, dt_out, *, stride=1, pad=0, dilation=1
) -> tuple[np.ndarray, ...]:
    """Gradients with respect to what goes into :func:`sparse_conv_2d`: :func:`sparse_conv_grad`."""
    return sparse_conv_grad(x, W, _rulebook_2d(x, f, stride, pad, dilation), dY, dt_out)


def _rulebook_2d(x: SparseValue, f, stride, pad, dilation) -> Rulebook:
    expect_kind("x", x, SparseValue)
    if x.d != 2:
        raise ValueError(f"x has {x.d} dimensions: use sparse_conv, which takes a rulebook")
    return rulebook(x.sites, x.grid, f, stride=stride, pad=pad, dilation=dilation, d=2)


def sparse_add(x: SparseValue, y: SparseValue) -> SparseValue:
    """The sum of two images, of different sites too: active is what is active in one of them.

    Parameters
    ----------
    x, y : SparseValue (*grid, n)

    Returns
    -------
    SparseValue (*grid, n)
        The sites of x, then those of y that x lacks.

    Raises
    ------
    ValueError
        If shapes differ.
    """
    expect_kind("x", x, SparseValue)
    expect_kind("y", y, SparseValue)
    if (x.shape, x.d) != (y.shape, y.d):
        raise ValueError(f"images of shapes {x.shape} (d = {x.d}) and {y.shape} (d = {y.d})")
    rules = union_rulebooks(x.sites, y.sites, x.grid)
    values = sum(build_q(z.values, z.ground_state, r) for z, r in zip((x, y), rules, strict=True))
    t = x.ground_state + y.ground_state
    return SparseValue._trusted(rules[0].sites, values, x.shape, t, x.d)


def sparse_relu(x: SparseValue) -> SparseValue:
    """Rectifier of the values and of the ground state; what is active stays active."""
    expect_kind("x", x, SparseValue)
    return SparseValue._trusted(x.sites, _relu(x.values), x.shape, _relu(x.ground_state), x.d)


def _relu(x: np.ndarray) -> np.ndarray:
    return np.where(x.real <= 0, x.dtype.type(0), x)  # a NaN stays one


def _weights(W, b, positions: int, n_in: int, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """W and b as arrays; ValueError if their shapes do not fit positions = f^d, n_in and groups."""
    W, b = array("W", W), array("b", b)
    groups = integer("groups", groups, 1)
    if n_in % groups:
        raise ValueError(f"groups = {groups} does not divide the {n_in} channels of x")
    rows = positions * n_in // groups
    if W.ndim != 2 or len(W) != rows or W.shape[1] == 0 or W.shape[1] % groups:
        letters = "(f^d*n_in, n_out)" if groups == 1 else "(f^d*n_in/groups, n_out)"
        multiple = "" if groups == 1 else f", n_out a multiple of groups = {groups}"
        raise ValueError(f"W has shape {W.shape}, expected {letters} = ({rows}, n_out){multiple}")
    expect("b", b, "(n_out,)", (W.shape[1],))
    return W, b
