"""Recurrent layers: a loop over the steps, which is written out."""

from __future__ import annotations

from functools import partial

import pytensor.tensor as pt

from helpers.onnx_grad.rules.recurrent import ACTIVATIONS, FIX_LENGTH
from helpers.onnx_grad.translation.node import TRANSLATIONS, number, select, size, translates

DEFAULT = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}


def _lstm(node, act, x, h, R, b, peepholes, c):
    """Gates i, o, f and the new cell, of (batch, n) each, from x = X W' + (bias of the input)."""
    i, o, f, new = (v + h @ r + k for v, r, k in zip(x, R, b, strict=True))
    p_i, p_o, p_f = peepholes
    c = act[0](f + p_f * c) * c + act[0](i + p_i * c) * act[1](new)
    return act[0](o + p_o * c) * act[2](c), c


def _gru(node, act, x, h, R, b, peepholes):
    """Gates z, r and the new state."""
    z, r = (act[0](v + h @ m + k) for v, m, k in zip(x[:2], R[:2], b[:2], strict=True))
    after = node.attribute("linear_before_reset", 0)
    inner = r * (h @ R[2] + b[2]) if after else (r * h) @ R[2] + b[2]
    return ((1 - z) * act[1](x[2] + inner) + z * h,)


def _rnn(node, act, x, h, R, b, peepholes):
    return (act[0](x[0] + h @ R[0] + b[0]),)


CELLS = {"LSTM": (_lstm, 4, 2), "GRU": (_gru, 3, 1), "RNN": (_rnn, 1, 1)}  # gates, states


@translates(*CELLS)
def _layer(node, x, w, r, b=None, lengths=None, *rest):
    initial, peepholes = rest[: CELLS[node.operator][2]], rest[2] if len(rest) > 2 else None
    batchwise = node.attribute("layout", 0)
    x = x.swapaxes(0, 1) if batchwise else x
    directions = 2 if node.attribute("direction") == "bidirectional" else 1
    names = node.attribute("activations") or DEFAULT[node.operator] * directions
    _refuse(node, size(x, 0), r.type.shape[2], names)
    ends = []
    for d in range(directions):
        start = [None if s is None else s[:, d] if batchwise else s[d] for s in initial]
        part = [None if t is None else t[d] for t in (b, peepholes)]
        share = len(DEFAULT[node.operator])
        act = [_activation(node, name) for name in names[d * share : (d + 1) * share]]
        backwards = d == 1 or node.attribute("direction") == "reverse"
        ends.append(_direction(node, act, x, w[d], r[d], *part, lengths, start, backwards))
    sequences, *states = zip(*ends, strict=True)
    y = pt.stack(sequences, axis=1)  # (steps, directions, batch, n)
    states = [pt.stack(s, axis=1 if batchwise else 0) for s in states]
    return (y.transpose(2, 0, 1, 3) if batchwise else y), *states


def _direction(node, act, x, w, r, b, peepholes, lengths, start, backwards: bool) -> list:
    """The outputs of all steps (steps, batch, n) and the last states (batch, n)."""
    cell, gates, states = CELLS[node.operator]
    steps, n = size(x, 0), r.type.shape[1]
    zero = pt.zeros((size(x, 1), n), dtype=x.dtype)
    bias = [number(x, 0)] * 2 * gates
    if b is not None:  # of the input, then of the state
        bias = [b[k * n : (k + 1) * n] for k in range(2 * gates)]
    p = [number(x, 0)] * 3
    if peepholes is not None:
        p = [peepholes[k * n : (k + 1) * n] for k in range(3)]
    W, R = ([m[k * n : (k + 1) * n].T for k in range(gates)] for m in (w, r))
    state = [*start, *[None] * states][:states]
    state = [zero if s is None else s for s in state]
    outputs = {}
    for t in reversed(range(steps)) if backwards else range(steps):
        seen = [x[t] @ W[k] + bias[k] for k in range(gates)]
        made = cell(node, act, seen, state[0], R, bias[gates:], p, *state[1:])
        outputs[t] = made[0]
        if lengths is not None:  # past its end a sequence keeps its state and gives zeros
            going = (lengths > t)[:, None]
            made = [select(going, new, old) for new, old in zip(made, state, strict=True)]
            outputs[t] = select(going, outputs[t], zero)
        state = made
    return [pt.stack([outputs[t] for t in range(steps)]), *state]


def _activation(node, name: str):
    name = ACTIVATIONS[name.lower()]
    return partial(TRANSLATIONS["", name], node._replace(operator=name, attributes={}))


def _refuse(node, steps, n, names) -> None:
    if not isinstance(steps, int):
        raise node.refuse(
            "the number of steps is open, and each step is written out; declare a static length, "
            + FIX_LENGTH
        )
    if n is None:
        raise node.refuse("the shape of R is not known")
    unknown = [name for name in names if name.lower() not in ACTIVATIONS]
    if unknown:
        known = ", ".join(ACTIVATIONS.values())
        raise node.refuse(f"the activation {unknown[0]} is not translated; there are {known}")
