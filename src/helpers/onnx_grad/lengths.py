"""Lengths that the runtime counts and ONNX's shape inference gets wrong, said so that both agree.

onnxruntime computes a length n s after a Resize in single precision, where inference takes the
whole part of the exact product: 26 and 25 for 20 entries and the scale 1.3.  Before opset 22
inference counts a pool's last window with ``ceil_mode`` also where it begins in the padding behind,
and the runtime does not; and the two differ in what ``auto_pad`` does beside dilations and
``output_padding``.  The runtime trusts inference too where shapes meet, and a gradient has more
such places than its model: these nodes get sizes for scales, and pads for ``auto_pad``.
"""

import string

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from helpers.onnx_grad.simplify import free_name, small_constants, tensor_infos, tensor_names
from helpers.onnx_grad.tensor import (
    Info,
    NoGradientError,
    canonical,
    is_static,
    value_of_attribute,
)


def resized_length(n: int, scale: float) -> int:
    """The length of n entries after a Resize, as the runtime rounds it."""
    return int(np.float32(n) * np.float32(scale))


def same_pads(total: int, auto_pad: str) -> tuple[int, int]:
    """A total padding before and after, the odd one after for SAME_UPPER."""
    small, large = total // 2, total - total // 2
    return (small, large) if auto_pad == "SAME_UPPER" else (large, small)


def no_window(room: int, extent: int, stride: int, ceil: int) -> str | None:
    """What is wrong if no window fits: the runtime's number of windows, which is rounded towards
    zero, may be one all the same, and hangs over the end.

    ``room`` is the length, padding included, less what a window spans.
    """
    if room > (-stride if ceil else -1):
        return None
    return f"its window spans {extent} entries, and there are {room + extent}, padding included"


def parsed_equation(equation: str, ranks) -> tuple[list[str], str]:
    """Terms and result of an Einsum as strings of letters, the ellipsis written out."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms, spare = left.split(","), sorted(set(string.ascii_letters) - set(left))
    pairs = zip(terms, ranks, strict=True)
    widths = [n - len(t.replace("...", "")) if "..." in t else 0 for t, n in pairs]
    dots = "".join(spare[: max(widths)])
    if not arrow:  # what occurs once, in alphabetical order, after the ellipsis
        result = "..." + "".join(c for c in sorted(set(left) - set(",.")) if left.count(c) == 1)
    terms = [t.replace("...", dots[len(dots) - w :]) for t, w in zip(terms, widths, strict=True)]
    return terms, result.replace("...", dots)


def state_lengths(model: ModelProto) -> None:
    """Change, in place, the nodes of the main graph whose lengths ONNX's inference gets wrong."""
    changes = {"Einsum": _squeeze_einsum, "Resize": _of_resize, "ConvTranspose": _of_conv_transpose}
    changes |= dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), _of_pool)
    opset = next((o.version for o in model.opset_import if not canonical(o.domain)), 0)
    infos = None
    for node in list(model.graph.node):
        change = changes.get(node.op_type)
        if change is None or canonical(node.domain):
            continue
        infos = tensor_infos(model) if infos is None else infos
        shape, *others = (infos.get(x, Info()).shape for x in node.input)
        attributes = {a.name: value_of_attribute(a) for a in node.attribute}
        if shape is not None and change(model, node, attributes, opset, shape, *others):
            infos = None  # what comes after has other lengths now


def _squeeze_einsum(model, node, attributes, opset: int, *shapes) -> bool:
    """Drop indices of length 1 that are longer in another operand: inference takes the first
    operand's length for all, where the runtime broadcasts."""
    equation = attributes["equation"]
    if "." in equation or equation.count(",") + 1 != len(shapes) or None in shapes:
        return False
    terms, result = parsed_equation(equation, map(len, shapes))
    before = list(terms)
    lengths = [list(zip(t, shape, strict=False)) for t, shape in zip(terms, shapes, strict=True)]
    wide = {c for operand in lengths for c, n in operand if n != 1}
    for i, operand in enumerate(lengths):
        gone = [a for a, (c, n) in enumerate(operand) if n == 1 and c in wide]
        if gone:
            inputs = [node.input[i], _constant(model, gone, f"{node.output[0]}_axes")]
            node.input[i] = _computed(model, node, "Squeeze", inputs, f"{node.output[0]}_operand")
            terms[i] = "".join(c for a, (c, _) in enumerate(operand) if a not in gone)
    if terms == before:
        return False
    _set(node, equation=f"{','.join(terms)}->{result}")
    return True


def _set(node: NodeProto, **attributes) -> None:
    """Set attributes; those that are None go."""
    kept = [a for a in node.attribute if a.name not in attributes]
    del node.attribute[:]
    node.attribute.extend(kept)
    for name, value in attributes.items():
        if value is not None:
            node.attribute.append(helper.make_attribute(name, value))


def _constant(model: ModelProto, values, name: str) -> str:
    """A new initializer; its name."""
    name = free_name(name, tensor_names(model.graph))
    model.graph.initializer.append(numpy_helper.from_array(np.array(values), name))
    return name


def _computed(model: ModelProto, node: NodeProto, op_type, inputs, name, attributes=()) -> str:
    """What a new node in front of another one makes; its name."""
    name = free_name(name, tensor_names(model.graph))
    place = next(i for i, n in enumerate(model.graph.node) if n is node)
    made = helper.make_node(op_type, inputs, [name], name)
    made.attribute.extend(attributes)
    model.graph.node.insert(place, made)
    return name


def _of_resize(model, node, attributes, opset: int, shape, *others) -> bool:
    """Sizes in place of scales, where inference rounds a length to another whole number."""
    scales = small_constants(model.graph, real=True).get("".join(node.input[2:3]))
    if scales is None or not scales.size:
        return False
    axes = [a % len(shape) for a in attributes.get("axes") or range(len(shape))]
    scale = {a: s for a, s in zip(axes, scales.ravel(), strict=True) if s != 1}
    if not all(isinstance(shape[a], int) for a in scale):
        return False
    lengths = {a: resized_length(shape[a], s) for a, s in scale.items()}
    exact = {a: s for a, s in scale.items() if lengths[a] == int(shape[a] * float(s))}
    place = attributes.get("coordinate_transformation_mode")
    if exact == scale or (exact and place == "tf_crop_and_resize"):  # that would crop twice
        return False
    if exact:  # these keep their scales: sizes would stretch them to whole lengths
        kept = _constant(model, scales.dtype.type([exact.get(a, 1) for a in axes]), "scales")
        inputs = [*node.input[:2], kept]
        name = f"{node.output[0]}_by_scales"
        node.input[0] = _computed(model, node, "Resize", inputs, name, node.attribute)
        shape = [lengths[a] if a in exact else n for a, n in enumerate(shape)]
        scale = {a: s for a, s in scale.items() if a not in exact}
        lengths = {a: lengths[a] for a in scale}
    for a, s in scale.items():
        # Given sizes, a runtime divides the lengths in single precision to have the scale.
        near = np.float32(lengths[a]) / np.float32(shape[a])
        if near != s and attributes.get("mode", "nearest") == "nearest":
            raise NoGradientError(
                f"no gradient: the scale {s} in Resize (node {node.name!r}, which makes "
                f"{node.output[0]!r}) makes {shape[a]} entries {lengths[a]} in the runtime and "
                f"{int(shape[a] * float(s))} by ONNX's rules; write sizes, or the scale {near}"
            )
    out = [lengths.get(a, n) for a, n in enumerate(shape)]
    name = f"{node.output[0]}_sizes"
    if opset >= 18:
        _set(node, axes=list(lengths))
        sizes = _constant(model, list(lengths.values()), name)
    elif is_static(shape):
        sizes = _constant(model, out, name)
    else:
        of_input = _computed(model, node, "Shape", [node.input[0]], f"{name}_before")
        fixed = _constant(model, [a in lengths for a in range(len(shape))], f"{name}_fixed")
        given = _constant(model, [lengths.get(a, 0) for a in range(len(shape))], f"{name}_given")
        sizes = _computed(model, node, "Where", [fixed, given, of_input], name)
    inputs = [*node.input[:2], "", sizes]
    del node.input[:]
    node.input.extend(inputs)
    # Inference finds the lengths of open shapes no more than it did: they are declared.
    graph, name = model.graph, node.output[0]
    values = [v for v in (*graph.value_info, *graph.output) if v.name == name]
    dtype = tensor_infos(model).get(name, Info()).dtype
    for value in values or [graph.value_info.add(name=name)]:
        value.type.CopyFrom(Info(dtype, tuple(out)).proto())
    return True


def _of_pool(model, node, attributes, opset: int, shape) -> bool:
    """Pads that give the runtime's number of windows."""
    kernel, spatial = attributes["kernel_shape"], shape[2:]
    strides, dilations = (attributes.get(k) or [1] * len(kernel) for k in ("strides", "dilations"))
    ceil, auto = attributes.get("ceil_mode", 0), attributes.get("auto_pad", "NOTSET")
    same = auto.startswith("SAME") and any(d > 1 for d in dilations)
    if not is_static(spatial) or not (same or (ceil and opset < 22)):
        return False
    n, k, s, d = map(np.array, (spatial, kernel, strides, dilations))
    pads = attributes.get("pads") if auto == "NOTSET" else None
    before, after = np.reshape(pads or [0] * 2 * len(kernel), (2, -1))
    if auto.startswith("SAME"):
        total = (-(-n // s) - 1) * s + k - n  # the runtime forgets the dilations here
        if total.min() < 0:
            return False
        before, after = same_pads(total, auto)
    room = n + before + after - (k - 1) * d - 1
    rest = room % s
    kept = (rest > 0) & ((room // s + 1) * s < n + before) if ceil else np.zeros(n.shape, bool)
    if not (same or (ceil and rest[~kept].any())):
        return False
    if not kept.any():
        _set(node, ceil_mode=None, auto_pad=None, pads=[*before, *after])
        return True
    # As far as the last window goes, which need not reach the end.
    end = after - np.where(kept, 0, rest)
    short, whole = np.maximum(end, 0), (n + np.minimum(end, 0)).tolist()
    _set(node, auto_pad=None, pads=[*before, *short])
    if whole != list(spatial):
        name = f"{node.output[0]}_reached"
        axes = range(2, len(shape))
        bounds = [[0] * len(axes), whole, list(axes)]
        given = [_constant(model, b, f"{name}_{k}") for k, b in enumerate(bounds)]
        node.input[0] = _computed(model, node, "Slice", [node.input[0], *given], name)
    return True


def _of_conv_transpose(model, node, attributes, opset: int, shape, weight, *bias) -> bool:
    """Pads in place of auto_pad and of an output_shape, of which inference makes nothing where it
    is shorter than the image; without it the runtime's result is that times the stride."""
    auto, fill = attributes.get("auto_pad", ""), attributes.get("output_padding")
    kernel = attributes.get("kernel_shape") or (weight and weight[2:])
    known = kernel and is_static((*kernel, *shape[2:]))
    wanted = attributes.get("output_shape")
    if not known or not (wanted or (fill and auto.startswith("SAME"))):
        return False
    strides, dilations = (attributes.get(k) or [1] * len(kernel) for k in ("strides", "dilations"))
    fill = fill or [0] * len(kernel)
    lengths = wanted or [n * s for n, s in zip(shape[2:], strides, strict=True)]
    of_axes = zip(shape[2:], kernel, strides, dilations, fill, lengths, strict=True)
    totals = [(n - 1) * s + (k - 1) * d + 1 + f - m for n, k, s, d, f, m in of_axes]
    if wanted and min(totals) < 0:
        return False
    before, after = zip(*(same_pads(max(total, 0), auto) for total in totals), strict=True)
    _set(node, auto_pad=None, output_shape=None, pads=[*before, *after])
    return True
