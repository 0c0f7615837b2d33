"""Recurrent layers: each step is written out in other operators, and these are differentiated.

With n numbers in a state, W holds the rows of the input's weights for each of the gates, R those of
the state's, B both kinds of biases, P the peepholes of an LSTM.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from onnx import helper

from helpers.onnx_grad.rules.table import register_gradient, written_out

ACTIVATIONS = {name.lower(): name for name in ("Relu", "Sigmoid", "Softplus", "Softsign", "Tanh")}
FIX_LENGTH = (
    "as by model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 100, and give "
    "sequence_lens where sequences are shorter"
)
LIMITS = {
    "X": "of a static number of steps (the batch may be open)",
    "activations": ", ".join(sorted(ACTIVATIONS.values())),
    "hidden_size": "given, or the shape of R known",
}


class Cell(NamedTuple):
    """One direction of a layer: its weights, and what a step needs of it."""

    n: int
    r: object  # the weights of the state, (n, gates n): transposed
    bias: object  # its bias (gates n), or None
    peepholes: tuple  # three of (n), or none
    act: list[Callable]  # the activations
    reset_after: bool

    def gates(self, g, t):
        """(batch, gates n), cut into the gates."""
        return _split(g, t, self.n, self.r.shape[1] // self.n, -1)

    def of_state(self, g, h):
        """The state's part of the gates before their activations."""
        t = g.op("MatMul", h, self.r)
        return t if self.bias is None else t + self.bias


def _lstm(g, cell, x, state):
    """i, o, f = s(..), C = f C + i tanh(..), H = o tanh(C); peepholes show them the old C, o the
    new one."""
    (h, c), (f_act, g_act, h_act) = state, cell.act
    i, o, f, new = cell.gates(g, x + cell.of_state(g, h))
    if cell.peepholes:
        i, f = i + cell.peepholes[0] * c, f + cell.peepholes[2] * c
    c = f_act(f) * c + f_act(i) * g_act(new)
    o = f_act(o + cell.peepholes[1] * c if cell.peepholes else o)
    return [o * h_act(c), c]


def _gru(g, cell, x, state):
    """z, r = s(..), H = (1 - z) tanh(x + U (r H) + b) + z H; or r (U H + b) with
    linear_before_reset."""
    (h,), (f_act, g_act) = state, cell.act
    if cell.reset_after:
        xz, xr, xh = cell.gates(g, x)
        hz, hr, hh = cell.gates(g, cell.of_state(g, h))
        new = g_act(xh + f_act(xr + hr) * hh)
        z = f_act(xz + hz)
    else:
        x = x if cell.bias is None else x + cell.bias
        xz, xr, xh = cell.gates(g, x)
        rz, rr, rh = cell.gates(g, cell.r)
        z, r = f_act(xz + g.op("MatMul", h, rz)), f_act(xr + g.op("MatMul", h, rr))
        new = g_act(xh + g.op("MatMul", r * h, rh))
    return [new - z * new + z * h]


def _rnn(g, cell, x, state):
    """H = f(x + U H + b)."""
    return [cell.act[0](x + cell.of_state(g, *state))]


def _layer(g, node, step, gates: int, states: int, activations: tuple[str, ...]):
    """The outputs Y and the last states, as ``step`` makes each state from the one before."""
    x, r = node.x[0], node.x[2]
    batchwise, direction = bool(node.attr("layout", 0)), node.attr("direction")
    directions = 2 if direction == "bidirectional" else 1
    x = g.transpose(x, [1, 0, 2]) if batchwise else x
    steps = x.shape[0]
    n = node.attr("hidden_size") or (r.shape and r.shape[2])
    names = [a.decode() for a in node.attr("activations") or ()] or [*activations] * directions
    if not isinstance(steps, int):
        raise node.refuse(
            "the number of steps in the shape of X is open, and each step is written out; declare "
            f"a static length, {FIX_LENGTH}"
        )
    if not isinstance(n, int):
        raise node.refuse("hidden_size is not given, and the shape of R not known")
    for name in names:
        if name.lower() not in ACTIVATIONS:
            raise node.refuse(f"the activation {name}; there are {LIMITS['activations']}")
    lengths = node.input(4)
    sequences, last = [], []
    for d in range(directions):
        w, u, b, p = (_part(g, node.input(i), d, directions) for i in (1, 2, 3, 7))
        bx, bh = (None, None) if b is None else _split(g, b, gates * n, 2, 0)
        count = len(activations)
        act = [partial(g.op, ACTIVATIONS[a.lower()]) for a in names[d * count : (d + 1) * count]]
        u = g.refine(g.transpose(u, [1, 0]).name, (n, gates * n))
        peepholes = () if p is None else _split(g, p, n, 3, 0)
        cell = Cell(n, u, bh, peepholes, act, bool(node.attr("linear_before_reset", 0)))
        reverse = d == 1 or direction == "reverse"
        state = [
            _initial(g, node.input(5 + k), x, n, d, directions, batchwise) for k in range(states)
        ]
        projected = g.op("MatMul", x, g.transpose(w, [1, 0]))
        projected = projected if bx is None else projected + bx
        projected = _split(g, projected, 1, steps, 0)
        ys = {}
        for t in reversed(range(steps)) if reverse else range(steps):
            state, ys[t] = _step(g, cell, step, g.squeeze(projected[t], [0]), state, lengths, t)
        y = g.op("Concat", *(g.unsqueeze(ys[t], [0]) for t in range(steps)), axis=0)
        sequences.append(g.unsqueeze(y, [1]))
        last.append([g.unsqueeze(s, [0]) for s in state])
    y = g.op("Concat", *sequences, axis=1)
    ends = [g.op("Concat", *end, axis=0) for end in zip(*last, strict=True)]
    if batchwise:
        return g.transpose(y, [2, 0, 1, 3]), *(g.transpose(end, [1, 0, 2]) for end in ends)
    return y, *ends


def _step(g, cell, step, x, state, lengths, t: int):
    """The new state and the output; past its end a sequence keeps its state and gives zeros."""
    new = step(g, cell, x, state)
    if lengths is None:
        return new, new[0]
    going = g.unsqueeze(lengths > t, [1])
    kept = [g.where(going, after, before) for after, before in zip(new, state, strict=True)]
    return kept, g.where(going, new[0], 0.0)


def _split(g, t, size: int, parts: int, axis: int):
    if parts == 1:
        return (t,)
    return g.op("Split", t, [size] * parts, outputs=parts, axis=axis)


def _part(g, t, d: int, directions: int):
    """What belongs to one direction."""
    return None if t is None else g.squeeze(_split(g, t, 1, directions, 0)[d], [0])


def _initial(g, t, x, n: int, d: int, directions: int, batchwise: bool):
    """A state before the first step, (batch, n): zeros where it is left out."""
    if t is not None:
        return _part(g, g.transpose(t, [1, 0, 2]) if batchwise else t, d, directions)
    shape = g.joined(g.dims_of(x, [1]), n)
    zero = helper.make_tensor("value", x.dtype, [1], [0.0])
    return g.op("ConstantOfShape", shape, value=zero, shape=(x.shape[1], n))


@register_gradient("LSTM", settings=[5, 6], ranked=[0], limits=LIMITS)
@written_out
def lstm(g, node):
    """i, o, f = sigmoid(..), C = f C + i tanh(..), H = o tanh(C), step by step backwards."""
    return _layer(g, node, _lstm, 4, 2, ("Sigmoid", "Tanh", "Tanh"))


@register_gradient("GRU", settings=[5], ranked=[0], limits=LIMITS)
@written_out
def gru(g, node):
    """z, r = sigmoid(..), H = (1 - z) tanh(..) + z H, step by step backwards."""
    return _layer(g, node, _gru, 3, 1, ("Sigmoid", "Tanh"))


@register_gradient("RNN", settings=[5], ranked=[0], limits=LIMITS)
@written_out
def rnn(g, node):
    """H = tanh(..), step by step backwards."""
    return _layer(g, node, _rnn, 1, 1, ("Tanh",))
