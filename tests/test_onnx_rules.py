"""Every rule of the table against finite differences: static shapes, dynamic shapes, edge cases."""

from typing import NamedTuple

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx_checks import (
    gradient_feeds,
    node_model,
    numeric_gradients,
    run_onnxruntime,
    run_reference,
    single,
)
from onnxruntime.capi.onnxruntime_pybind11_state import (
    Fail,
    InvalidGraph,
    NotImplemented,
    RuntimeException,
)
from tiers import thorough

from helpers.onnx_grad import onnx_derivative
from helpers.onnx_grad.attributes import default_of, known_attributes
from helpers.onnx_grad.prepare import NEWEST
from helpers.onnx_grad.rules import RULES
from helpers.onnx_grad.rules.table import no_gradient

ML = "ai.onnx.ml"


class Case(NamedTuple):
    """One node, and how to build it. Real inputs are differentiated by, the others given."""

    op: str
    inputs: dict
    attributes: dict = {}
    outputs: int = 1
    opset: int = 21
    domain: str = ""
    constants: tuple = ()
    modes: tuple = ("static", "named", "runtime")
    note: str = ""
    step: float = 1e-6
    tolerance: float = 1e-5
    forward: str = "onnx.reference"


CASES: list[Case] = []
rng = np.random.default_rng(7)


def case(op, *arrays, outputs=1, opset=21, domain="", **arguments):
    """Add a case; what is no field of it is an attribute of the node."""
    inputs = {f"x{i}": a for i, a in enumerate(arrays)}
    fields = {k: arguments.pop(k) for k in Case._fields if k in arguments}
    CASES.append(Case(op, inputs, arguments, outputs, opset, domain, **fields))


# The reference evaluator computes these in single precision.
SINGLE = {"step": 1e-2, "tolerance": 1e-3}


def normal(*shape):
    return rng.standard_normal(shape)


def apart(*shape):
    """Numbers at least 0.1 from each other and from zero: away from kinks and ties."""
    n = int(np.prod(shape))
    values = (rng.permutation(n) + 0.5 - n // 2) * 0.13
    return values.reshape(shape)


def positive(*shape):
    return rng.uniform(0.3, 2.0, shape)


def inside(*shape):
    return rng.uniform(-0.8, 0.8, shape)


def ints(*values):
    return np.array(values, dtype=np.int64)


# Elementwise, one input
case("Erf", normal(3, 4), **SINGLE)
for op in ("Identity", "Neg", "Exp", "Sin", "Cos", "Sinh", "Cosh", "Atan", "Asinh"):
    case(op, normal(3, 4))
for op in ("Abs", "Reciprocal", "Floor", "Ceil", "Round", "Sign", "Relu", "LeakyRelu", "Elu"):
    case(op, apart(3, 4) + 0.03)
for op in ("Selu", "HardSigmoid", "HardSwish", "Softsign", "Softplus", "Mish", "Tan"):
    case(op, apart(3, 4) + 0.03)
for op in ("Sqrt", "Log"):
    case(op, positive(2, 3))
for op in ("Asin", "Acos", "Atanh"):
    case(op, inside(5))
case("Acosh", positive(4) + 1.1)
for op in ("Sigmoid", "Tanh"):
    case(op, normal(2, 3))
    case(op, normal())
case("ThresholdedRelu", apart(3, 4), alpha=0.4)
case("LeakyRelu", apart(6), alpha=-0.3)
case("Shrink", apart(3, 4), lambd=0.3, bias=0.2)
case("Elu", apart(6), alpha=0.7)
case("Celu", apart(6).astype(np.float32), alpha=1.7, **SINGLE)
case("Selu", apart(6), alpha=1.1, gamma=0.6)
case("HardSigmoid", apart(3, 4), alpha=0.31, beta=0.45)
case("Swish", normal(3, 4), alpha=0.8, opset=24)
case("Gelu", normal(3, 4), **SINGLE)
case("Gelu", normal(3, 4), approximate="tanh")
case("Cast", normal(2, 3), to=TensorProto.DOUBLE)
case("Cast", normal(2, 3), to=TensorProto.INT64, note="to int")
case("CastLike", normal(2, 3), normal(1))
case("Dropout", normal(2, 3))
case("Dropout", normal(2, 3), seed=3)
case("Dropout", normal(2, 3), np.float64(0.4), np.array(False), constants=["x1", "x2"])
case("EyeLike", normal(3, 3))
codes, scales = rng.integers(-9, 9, (2, 3, 4)).astype(np.int8), positive(12).astype(np.float32)
zeros = np.arange(-1, 11, dtype=np.int8)
LINEAR = {"step": 0.25, "tolerance": 1e-3}  # in its scales
case("DequantizeLinear", codes, scales[0], **LINEAR)
case("DequantizeLinear", codes.astype(np.uint8), scales[:1], np.uint8([3]), **LINEAR)
case("DequantizeLinear", codes, scales[:3], zeros[:3], **LINEAR)
case("DequantizeLinear", codes, scales[:4], zeros[:4], axis=-1, **LINEAR)
case("DequantizeLinear", codes.astype(np.int32), scales[:2], axis=0, **LINEAR)
for axis, size, shape in ((1, 3, (2, 1, 4)), (2, 2, (2, 3, 2)), (-3, 1, (2, 3, 4))):
    held = scales[: np.prod(shape)] if np.prod(shape) <= 12 else positive(24).astype(np.float32)
    blocked = np.resize(zeros, shape)
    case("DequantizeLinear", codes, held.reshape(shape), blocked, axis=axis, block_size=size,
         modes=["static"], **LINEAR)  # fmt: skip
case("RandomNormalLike", normal(3, 3), note="shape only")
case("RandomUniformLike", normal(3, 3), note="shape only")

# Elementwise, with broadcasting
PAIRS = [((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 3), ()), ((3,), (2, 1)), ((2, 1, 4), (3, 1))]
for a, b in PAIRS:
    for op in ("Add", "Sub", "Mul"):
        case(op, normal(*a), normal(*b))
    case("Div", normal(*a), positive(*b))
    case("Mod", 3 * normal(*a), positive(*b), fmod=1)
    case("Pow", positive(*a), normal(*b))
    both = apart(int(np.prod(a, dtype=int)) + int(np.prod(b, dtype=int)))
    u, v = both[: int(np.prod(a, dtype=int))], both[int(np.prod(a, dtype=int)) :]
    for op in ("Max", "Min"):
        case(op, u.reshape(a), v.reshape(b))
    case("Where", rng.uniform(size=a) > 0.5, normal(*a), normal(*b))
    for op in ("Sum", "Mean"):
        case(op, normal(*np.broadcast_shapes(a, b)), normal(*b), normal(*a))
case("Where", np.array([[True], [False]]), normal(3), normal(2, 1))
case("Where", np.array(True), normal(3), normal(2, 1))
case("Add", normal(1, 1), normal(1), note="ones")
case("Mul", normal(1, 3), normal(1))
for op in ("Sum", "Mean", "Max", "Min"):
    case(op, apart(2, 3))
for op in ("Max", "Min"):
    case(op, apart(2, 3, 2)[..., 0], apart(2, 3, 2)[..., 1] + 0.04, apart(3) + 0.06)
for exponent in (0, 1, 2, 3, -1):
    signed = apart(2, 3) if exponent < 0 else np.array([[0.0, -1.5, 0.4]])
    case("Pow", signed, np.int64(exponent), constants=["x1"], note=f"int {exponent}")
    case("Pow", signed, np.float64(exponent), constants=["x1"], note=f"float {exponent}")
    case("Pow", signed, np.int64([exponent, 1, 2]), note=f"vector {exponent}")
case("Pow", positive(2, 3), np.float64([0.5]), constants=["x1"])
case("Pow", positive(2, 3), np.float64(-1.5), constants=["x1"])
case("Clip", apart(3, 4), np.float64(-0.43), np.float64(0.5))
case("Clip", apart(3, 4), np.float64(-0.43))
case("Clip", apart(3, 4), None, np.float64(0.5))
case("Clip", apart(3, 4))
case("Clip", apart(3, 4), np.float64(0.5), np.float64(-0.43), note="bounds cross")
case("PRelu", apart(2, 3, 4), normal(3, 1))
case("PRelu", apart(2, 3), normal(1))
case("PRelu", apart(2, 3), normal(2, 3))

# Products
MATMULS = [
    ((2, 3), (3, 4)),
    ((3,), (3,)),
    ((3,), (3, 4)),
    ((2, 3), (3,)),
    ((5, 2, 3), (3, 4)),
    ((5, 2, 3), (3,)),
    ((3,), (5, 3, 2)),
    ((2, 3), (5, 3, 4)),
    ((5, 2, 3), (5, 3, 2)),
    ((2, 1, 2, 3), (4, 3, 2)),
    ((2, 1, 2, 3), (1, 4, 3, 2)),
]
for a, b in MATMULS:
    case("MatMul", normal(*a), normal(*b))
for ta in (0, 1):
    for tb in (0, 1):
        a, b = normal(*((3, 2) if ta else (2, 3))), normal(*((4, 3) if tb else (3, 4)))
        case("Gemm", a, b, transA=ta, transB=tb)
        case("Gemm", a, b, normal(4), transA=ta, transB=tb, alpha=0.5, beta=-1.5)
for shape in ((), (1,), (1, 4), (2, 1), (2, 4), (1, 1)):
    case("Gemm", normal(2, 3), normal(3, 4), normal(*shape), alpha=2.0)
case("Gemm", normal(2, 3), normal(3, 4), normal(4), beta=0.0)
EINSUMS = [
    ("ij,jk->ik", (2, 3), (3, 4)),
    ("ij,jk", (2, 3), (3, 4)),
    ("bij,bjk->bik", (2, 2, 3), (2, 3, 2)),
    ("i,j->ij", (2,), (3,)),
    ("ij,ij->", (2, 3), (2, 3)),
    ("ij->ji", (2, 3)),
    ("ij->i", (2, 3)),
    ("ij->", (2, 3)),
    ("ii->i", (3, 3)),
    ("ii->", (3, 3)),
    ("ii,i->", (3, 3), (3,)),
    ("...ij,...jk->...ik", (2, 2, 3), (3, 2)),
    ("...ij,...jk->...ik", (1, 2, 3), (4, 3, 2)),
    ("...i,...i", (2, 3), (2, 3)),
    ("bhid,bhjd->bhij", (1, 2, 3, 2), (1, 2, 4, 2)),
    ("ij,k->ik", (2, 3), (4,)),
    ("ab,bc,cd->ad", (2, 3), (3, 2), (2, 4)),
    ("iij,j->i", (2, 2, 3), (3,)),
    (" b n d , d -> b n ", (2, 3, 2), (2,)),
]
for equation, *shapes in EINSUMS:
    case("Einsum", *(normal(*s) for s in shapes), equation=equation, note=equation)

# Reductions
REDUCTIONS = ["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp"]
for name in REDUCTIONS:
    make = positive if name == "LogSum" else apart
    op = f"Reduce{name}"
    for keep in (0, 1):
        case(op, make(2, 3, 2), ints(1), keepdims=keep)
        case(op, make(2, 3, 2), ints(-1, 0), keepdims=keep)
        case(op, make(2, 3), keepdims=keep, note="all")
        case(op, make(2, 3), ints(), keepdims=keep, note="empty axes")
        if name != "Sum":
            case(op, make(2, 3, 2), keepdims=keep, axes=[-1, 0], opset=13)
            case(op, make(2, 3), keepdims=keep, opset=17, note="all")
    case(op, make(2, 3), ints(0))
    case(op, make(4))
case("ReduceSum", normal(2, 3), ints(), noop_with_empty_axes=1, keepdims=0)
case("ReduceMean", normal(2, 3), ints(), noop_with_empty_axes=1, keepdims=0)
case("ReduceSum", normal(2, 3), noop_with_empty_axes=1)
for name in REDUCTIONS:
    kind = {"noop_with_empty_axes": 1, "forward": "onnxruntime", "note": "no axes"}
    case(f"Reduce{name}", positive(2, 3), ints(), **kind)
for zeros in ([1.0, 0.0, 2.0], [0.0, 0.0, 2.0], [1.0, 3.0, 2.0]):
    case("ReduceProd", np.array([zeros, [1.0, 2.0, -3.0]]), ints(1), note=f"zeros {zeros}")

# Shapes
case("Reshape", normal(2, 6), ints(3, 4))
case("Reshape", normal(2, 6), ints(-1))
case("Reshape", normal(2, 3, 2), ints(0, -1))
case("Reshape", normal(2, 3), ints(3, 2), allowzero=1)
case("Reshape", normal(1), ints(), note="scalar")
for axis in (0, 1, 2, -1, 3):
    case("Flatten", normal(2, 3, 2), axis=axis)
case("Transpose", normal(2, 3, 4))
case("Transpose", normal(2, 3, 4), perm=[1, 2, 0])
case("Transpose", normal(2, 3), perm=[0, 1])
case("Squeeze", normal(2, 1, 3, 1), ints(1, -1))
case("Squeeze", normal(2, 1, 3, 1))
case("Unsqueeze", normal(2, 3), ints(0, -1))
case("Unsqueeze", normal(2, 3), ints(3, 1))
case("Unsqueeze", normal(2, 3), np.int64(-1), modes=("static",), note="axis without axes")
case("Expand", normal(3, 1), ints(2, 3, 4))
case("Expand", normal(3, 4), ints(3, 1))
case("Expand", normal(), ints(2, 3))
case("Tile", normal(2, 3), ints(3, 2))
case("Tile", normal(2), ints(1))
case("Concat", normal(2, 3), normal(2, 1), normal(2, 2), axis=1)
case("Concat", normal(2, 3), normal(1, 3), axis=-2)
case("Concat", normal(2, 3), axis=0)
case("Split", normal(2, 6), outputs=3, axis=1, num_outputs=3)
case("Split", normal(2, 7), outputs=3, axis=-1, num_outputs=3, note="uneven")
case("Split", normal(2, 6), ints(1, 3, 2), outputs=3, axis=1)
case("Split", normal(6), ints(6), outputs=1)
case("Split", normal(6), outputs=2, opset=13)
for reverse in (0, 1):
    for exclusive in (0, 1):
        flags = {"reverse": reverse, "exclusive": exclusive}
        case("CumSum", normal(2, 3), np.int64(1), **flags)
        case("CumSum", normal(2, 3), np.int64(-2), **flags)
case("DepthToSpace", normal(1, 8, 2, 3), blocksize=2)
case("DepthToSpace", normal(2, 8, 2, 3), blocksize=2, mode="CRD")
case("SpaceToDepth", normal(1, 2, 4, 6), blocksize=2)
case("Trilu", normal(3, 4))
case("Trilu", normal(3, 4), np.int64(-1), upper=0)
case("Pad", normal(2, 3), ints(0, 1, 2, 0))
case("Pad", normal(2, 3), ints(0, 1, 2, 0), opset=13)
case("Pad", normal(2, 3), ints(0, 1, 2, 0), np.float64(1.5))
case("Pad", normal(2, 3), ints(1, 2), np.float64(1.5), ints(-1))
for mode in ("reflect", "edge", "wrap"):
    kind = dict(mode=mode, constants=["x3"])
    case("Pad", normal(3, 4), ints(2, 1, 1, 3), **kind)
    case("Pad", normal(2, 4, 3), ints(2, 3), None, ints(-2), **kind)

case("ReverseSequence", normal(4, 3), ints(2, 4, 1), batch_axis=1, time_axis=0)
case("ReverseSequence", normal(3, 4), ints(2, 4, 1), batch_axis=0, time_axis=1)

# Indices
case("OneHot", ints(0, 2, -1), np.int64(3), normal(2))
case("OneHot", np.array([[0, 2], [1, 5]]), np.int64(3), normal(2), axis=0)
case("Slice", normal(4, 5), ints(1, 0), ints(3, 4), ints(0, 1))
case("Slice", normal(4, 5), ints(1), ints(-1), ints(-1))
case("Slice", normal(4, 5), ints(0, 1), ints(1000, 5), ints(0, 1), ints(2, 3))
case("Slice", normal(4, 5), ints(-1), ints(-1000), ints(1), ints(-1))
case("Slice", normal(4, 5), ints(3, 4), ints(0, -1000), ints(0, 1), ints(-2, -1))
case("Slice", normal(4, 5), ints(2), ints(2), ints(1), note="nothing")
case("Slice", normal(4, 5), ints(1, 1), ints(3, 2**62))
case("Slice", normal(4, 5), ints(0), ints(2**62), ints(1), note="everything")
for opset in (13, 21):
    case("Gather", normal(4, 3), ints(0, 2, 2, -1), opset=opset)
    case("Gather", normal(2, 4, 3), np.array([[1, 1], [-4, 3]]), axis=1, opset=opset)
    case("Gather", normal(2, 4), ints(3, 0, 3), axis=-1, opset=opset)
    case("Gather", normal(2, 4), np.int64(2), axis=1, opset=opset)
    case("Gather", normal(4), np.int64(-1), opset=opset)
    case("Gather", normal(4), np.array([[0, 0]], np.int32), opset=opset)
case("GatherElements", normal(3, 3), np.array([[0, 2, 0], [1, 2, -1]]), axis=0)
case("GatherElements", normal(3, 3), np.array([[0, 0], [2, 1], [-1, -1]]), axis=1)
case("GatherND", normal(2, 3), np.array([[0, 1], [0, 1], [1, 2]]))
case("GatherND", normal(2, 3, 2), np.array([[[0]], [[1]], [[0]]]))

case("Compress", normal(3, 2), np.array([False, True, True]), axis=0)
case("Compress", normal(2, 3, 2), np.array([True, False, True]), axis=-2)
case("Compress", normal(2, 3), np.array([False, True, True, False, True]))

batched = np.array([[[0], [2]], [[1], [1]]])
case("GatherND", normal(2, 3, 2), batched, batch_dims=1)
case("GatherND", normal(2, 2, 3), np.array([[[0], [2]], [[1], [1]]]), batch_dims=2)
case("TopK", apart(2, 5), ints(2), outputs=2, note="largest")
case("TopK", apart(5, 2), ints(3), outputs=2, axis=0, largest=0)
for reduction in ("none", "add"):
    kind = {"reduction": reduction}
    case("ScatterElements", normal(3, 3), np.array([[0, 2, 0], [1, 0, -1]]), normal(2, 3), **kind)
    case("ScatterElements", normal(2, 5), np.array([[1, -2]]), normal(1, 2), axis=1, **kind)
    case("ScatterND", normal(4, 2), np.array([[0], [3]]), normal(2, 2), **kind)
    case("ScatterND", normal(2, 3), np.array([[0, 1], [1, 2]]), normal(2), **kind)
case("ScatterElements", normal(3), ints(1, 1), normal(2), reduction="add", note="repeated")
for reduction in ("max", "min"):
    kind = {"reduction": reduction}
    case("ScatterElements", normal(3), ints(1, 1, -1), normal(3), note="repeated", **kind)
    case("ScatterElements", normal(2, 5), np.array([[1, -2, 1]]), normal(1, 3), axis=1, **kind)

# Softmax, normalisation, losses
for op in ("Softmax", "LogSoftmax", "Hardmax"):
    case(op, apart(2, 3, 2))
    case(op, apart(2, 3, 2), axis=1)
    case(op, apart(2, 3), axis=-2)
    case(op, apart(4), opset=13)
case("MeanVarianceNormalization", normal(2, 3, 2, 2).astype(np.float32), **SINGLE)
case("MeanVarianceNormalization", normal(2, 3).astype(np.float32), axes=[-1], **SINGLE)
case("LpNormalization", apart(2, 3))
case("LpNormalization", apart(3, 2), axis=0)
case("LpNormalization", positive(2, 3), p=1)  # the reference evaluator forgets the absolute value
for axis, shape in ((-1, (4,)), (1, (3, 4)), (-2, (3, 4)), (0, (2, 3, 4))):
    case("LayerNormalization", normal(2, 3, 4), normal(*shape), normal(*shape), axis=axis)
case("LayerNormalization", normal(2, 4), normal(4))
case("LayerNormalization", normal(2, 3, 4), normal(1), normal(3, 1), axis=1, epsilon=0.1)
case("LayerNormalization", normal(2, 4), normal(4), normal(4), outputs=3, stash_type=1)
for axis, shape in ((-1, (4,)), (1, (3, 4)), (-2, (4,))):
    kind = {"axis": axis, "opset": 23, "epsilon": 0.1}
    case("RMSNormalization", normal(2, 3, 4), normal(*shape), **kind)
for shape in ((2, 3), (2, 3, 4), (2, 3, 2, 2)):
    parameters = [normal(3), normal(3), normal(3), positive(3)]
    case("BatchNormalization", normal(*shape), *parameters, epsilon=0.01)
case("BatchNormalization", normal(2, 3, 2), *parameters, opset=13, forward="onnxruntime")
for shape, outputs in (((4, 3), 3), ((2, 3, 4), 3), ((2, 3, 2, 2), 1)):
    kind = {"training_mode": 1, "momentum": 0.7, "epsilon": 0.01, "outputs": outputs}
    case("BatchNormalization", normal(*shape), *parameters, **kind)
case("InstanceNormalization", normal(2, 3, 4), normal(3), normal(3), epsilon=0.01)
case("InstanceNormalization", normal(2, 3, 2, 2), normal(3), normal(3))
LABELS = np.array([0, 2, 1, 2])
for reduction in ("none", "sum", "mean"):
    spatial = rng.integers(0, 3, (2, 2))
    for op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
        kind = {"reduction": reduction}
        case(op, normal(4, 3), LABELS, **kind)
        case(op, normal(4, 3), LABELS, positive(3), **kind)
        case(op, normal(4, 3), LABELS.astype(np.int32), positive(3), ignore_index=2, **kind)
        some = np.array([0, -1, 1, -1])
        case(op, normal(4, 3), some, ignore_index=-1, forward="onnxruntime", **kind)
        case(op, normal(2, 3, 2), spatial, positive(3), **kind)
    case("SoftmaxCrossEntropyLoss", normal(4, 3), LABELS, outputs=2, **kind)
    case("SoftmaxCrossEntropyLoss", normal(2, 3, 2), spatial, positive(3), outputs=2, **kind)

# Convolutions and pools
CONVS = [
    dict(pads=[1, 0, 2, 1]),
    dict(strides=[2, 3]),
    dict(strides=[2, 2], pads=[1, 1, 0, 0]),
    dict(dilations=[2, 1]),
    dict(dilations=[2, 2], strides=[2, 1], pads=[1, 2, 1, 0]),
    dict(auto_pad="SAME_UPPER"),
    dict(auto_pad="SAME_LOWER"),
    dict(auto_pad="VALID"),
    dict(),
]
for attributes in CONVS:
    arrays = normal(2, 2, 5, 6), normal(3, 2, 2, 3), normal(3)
    case("Conv", *arrays, **attributes, kernel_shape=[2, 3])
case("Conv", *arrays, modes=("static",), note="kernel from the weights")
for pad in ("SAME_UPPER", "SAME_LOWER"):
    image, kernel = normal(1, 1, 5, 6), normal(1, 1, 2, 3)
    case("Conv", image, kernel, auto_pad=pad, strides=[2, 2], modes=("static",))
case("Conv", normal(2, 4, 5), normal(6, 2, 3), normal(6), group=2, strides=[2], modes=("static",))
case("Conv", normal(2, 3, 4, 4), normal(3, 1, 2, 2), group=3, pads=[1] * 4, modes=("static",))
line = dict(kernel_shape=[3], pads=[1, 2], strides=[2], dilations=[2])
case("Conv", normal(1, 2, 6), normal(2, 2, 3), **line)
case("Conv", normal(1, 1, 3, 3, 4), normal(2, 1, 2, 2, 2), kernel_shape=[2] * 3, strides=[1, 2, 2])
TRANSPOSED = [
    dict(),
    dict(strides=[2, 3], pads=[1, 0, 0, 1]),
    dict(strides=[2, 2], output_padding=[1, 0]),
    dict(dilations=[2, 1], pads=[0, 1, 1, 1]),
]
for attributes in TRANSPOSED:
    arrays = normal(2, 2, 3, 4), normal(2, 3, 2, 3), normal(3)
    case("ConvTranspose", *arrays, **attributes, kernel_shape=[2, 3])
same = dict(strides=[2, 2], modes=("static",))
for pad in ("SAME_UPPER", "SAME_LOWER", "VALID"):
    case("ConvTranspose", normal(1, 1, 3, 4), normal(1, 2, 3, 3), auto_pad=pad, **same)
case("ConvTranspose", normal(1, 1, 3, 4), normal(1, 2, 3, 3), output_shape=[7, 9], **same)
case("ConvTranspose", normal(1, 2, 4), normal(2, 1, 3), group=2, modes=("static",))
POOLS = [
    dict(kernel_shape=[2, 2]),
    dict(kernel_shape=[2, 2], strides=[2, 2]),
    dict(kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1]),
    dict(kernel_shape=[2, 3], strides=[1, 2]),
]
for attributes in POOLS:
    for opset in (13, 21):
        case("MaxPool", apart(2, 2, 5, 5), opset=opset, **attributes)
    case("AveragePool", normal(2, 2, 5, 5), count_include_pad=1, **attributes)
    case("AveragePool", normal(2, 2, 5, 5), **attributes, opset=13)
ceil = dict(kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
case("MaxPool", apart(1, 1, 6, 6), **ceil)
case("AveragePool", normal(1, 1, 6, 6), **ceil)
case("AveragePool", normal(1, 1, 6, 6), pads=[1] * 4, **ceil)
case("AveragePool", normal(1, 1, 6, 6), pads=[1] * 4, count_include_pad=1, **ceil)
case("MaxPool", apart(1, 2, 6, 6), kernel_shape=[2, 2], dilations=[2, 3])
case("MaxPool", apart(1, 2, 6, 6), kernel_shape=[2, 2], dilations=[2, 2], opset=13)
case("MaxPool", apart(1, 2, 7), kernel_shape=[3], strides=[2])
case("MaxPool", apart(1, 1, 4, 4, 4), kernel_shape=[2, 2, 2], strides=[2, 2, 2])
case("AveragePool", normal(1, 2, 7), kernel_shape=[2], dilations=[2], strides=[2])
case("AveragePool", normal(1, 1, 4, 4, 4), kernel_shape=[2, 2, 2])
for pad in ("SAME_UPPER", "SAME_LOWER", "VALID"):
    kind = dict(kernel_shape=[2, 2], auto_pad=pad)
    case("MaxPool", apart(1, 1, 5, 5), **kind)
    case("AveragePool", normal(1, 1, 5, 5), strides=[2, 2], **kind, modes=("static",))
for op in ("GlobalAveragePool", "GlobalMaxPool"):
    case(op, apart(2, 2, 3, 4))
case("GlobalAveragePool", normal(2, 2, 5))

# A linear map, so that long steps are exact; onnxruntime, in single precision, has its own ties.
RESIZES = [dict(mode="nearest"), dict(mode="linear"), dict(mode="cubic", cubic_coeff_a=-0.5)]
RESIZES += [dict(mode="nearest", nearest_mode=m) for m in ("floor", "ceil", "round_prefer_ceil")]
PLACES = ("align_corners", "asymmetric", "pytorch_half_pixel", "half_pixel_symmetric")
RESIZES += [dict(mode="linear", coordinate_transformation_mode=m) for m in PLACES]
RESIZES += [dict(mode="nearest", coordinate_transformation_mode=m) for m in PLACES]
RESIZES += [dict(mode="cubic", exclude_outside=1), dict(mode="linear", extrapolation_value=7.5)]
for attributes in RESIZES:
    kind = {"step": 0.5, "modes": ("static",), "constants": ["x2"], **attributes}
    scales = np.array([1, 1, 2.6, 0.5], np.float32)
    whole = np.array([1, 1, 2, 0.5], np.float32)  # the reference takes fractions of a length there
    corners = "align_corners" in attributes.values()
    case("Resize", normal(1, 2, 3, 4), None, whole if corners else scales, **kind)
    image = normal(1, 1, 3, 5).astype(np.float32)
    case("Resize", image, None, scales, forward="onnxruntime", tolerance=3e-5, **kind)
    image = normal(1, 1, 3, 4)
    case("Resize", image, None, None, ints(1, 1, 1, 7), **kind | {"constants": []})
TIES = [("asymmetric", "floor", 1.6), ("asymmetric", "round_prefer_ceil", 2.4)]
TIES += [("half_pixel", "round_prefer_floor", 0.7), ("half_pixel", "ceil", 2.6)]
for place, nearest, scale in TIES:
    kind = dict(mode="nearest", coordinate_transformation_mode=place, nearest_mode=nearest)
    kind |= {"forward": "onnxruntime", "step": 0.5, "tolerance": 3e-5, "modes": ("static",)}
    line = normal(1, 11).astype(np.float32)
    case("Resize", line, None, np.array([1, scale], np.float32), constants=["x2"], **kind)
for policy in ("stretch", "not_larger", "not_smaller"):
    kind = {"mode": "linear", "keep_aspect_ratio_policy": policy, "modes": ("static",)}
    kind |= {"forward": "onnxruntime", "step": 0.5, "tolerance": 3e-5}
    case("Resize", normal(2, 3, 4).astype(np.float32), None, None, ints(7, 5), axes=[1, 2], **kind)
kind = {"step": 0.5, "modes": ("static",), "mode": "linear"}
case("Resize", normal(2, 3, 4), None, None, ints(5, 2), axes=[2, 0], **kind)
case(
    "Resize",
    normal(3, 2, 2),
    None,
    np.array([2.0], np.float32),
    axes=[0],
    constants=["x2"],
    **kind,
)
case("Resize", normal(2, 3), None, np.ones(2, np.float32), constants=["x2"], **kind)
case(
    "Resize", normal(2, 3), None, np.array([1, 1.6], np.float32), constants=["x2"], opset=13, **kind
)

case("Col2Im", normal(2, 8, 6), ints(3, 4), ints(2, 2), modes=("static", "named"))
kind = {"pads": [1, 0, 0, 2], "strides": [2, 1], "dilations": [1, 2]}
case("Col2Im", normal(1, 6, 6), ints(4, 3), ints(3, 2), modes=("static", "named"), **kind)


def places(lengths, shape, corners=0):
    """Of GridSample, in the middle of a cell or of half a cell, some beyond the edge."""
    n = np.array(lengths[::-1])
    place = rng.integers(-1, n, (*shape, len(n))) + rng.uniform(0.2, 0.4, (*shape, len(n)))
    return 2 * place / (n - 1) - 1 if corners else (2 * place + 1) / n - 1


for attributes in (
    {"mode": "linear"},
    {"mode": "linear", "align_corners": 1, "padding_mode": "border"},
    {"mode": "nearest"},
    {"mode": "nearest", "align_corners": 1},
):
    points = places((3, 4), (2, 3, 2), attributes.get("align_corners", 0))
    case("GridSample", normal(2, 2, 3, 4), points, opset=20, **attributes, **SINGLE)
case("GridSample", normal(1, 1, 3, 2, 4), places((3, 2, 4), (1, 2, 1, 2)), opset=20, **SINGLE)

# Of scikit-learn's converters
for metric in ("euclidean", "sqeuclidean"):
    case("CDist", normal(3, 2), normal(4, 2), domain="com.microsoft", metric=metric)
case(
    "LinearRegressor",
    normal(2, 3).astype(np.float32),
    domain=ML,
    coefficients=[1.0, -2.0, 0.5, 3.0, 1.5, -1.0],
    intercepts=[0.5, 1.0],
    targets=2,
    post_transform="NONE",
    **SINGLE,
)
case(
    "Scaler",
    normal(2, 3).astype(np.float32),
    domain=ML,
    offset=[0.5, 1.0, 2.0],
    scale=[2.0, 0.5, 3.0],
    **SINGLE,
)
for multi_class, transform in enumerate(("NONE", "LOGISTIC", "SOFTMAX")):
    case(
        "LinearClassifier",
        normal(2, 3).astype(np.float32),
        domain=ML,
        outputs=2,
        coefficients=[1.0, -2.0, 0.5, 3.0, 1.5, -1.0, 0.5, 0.2, 0.1],
        intercepts=[0.5, 1.0, -1.0],
        classlabels_ints=[3, 4, 5],
        post_transform=transform,
        multi_class=multi_class % 2,
        **SINGLE,
    )
for norm in ("L1", "L2"):
    case("Normalizer", 4 * apart(2, 3).astype(np.float32), domain=ML, norm=norm, **SINGLE)
case("Binarizer", apart(2, 3).astype(np.float32), domain=ML, threshold=0.3, **SINGLE)
FILLED = dict(domain=ML, imputed_value_floats=[0.5, 1.5, 2.5], replaced_value_float=-7.0)
case("Imputer", normal(2, 3).astype(np.float32), **FILLED, **SINGLE)
kind = dict(domain=ML, forward="onnxruntime", constants=["x1"], step=0.5, tolerance=3e-5)
case("ArrayFeatureExtractor", normal(2, 4).astype(np.float32), ints(3, 0, 3), **kind)
case("ArrayFeatureExtractor", normal(2, 3, 4).astype(np.float32), ints(1), **kind)


@pytest.mark.parametrize("missing", [np.nan, -7.0])
def test_what_is_replaced_has_no_influence(missing):
    X = np.float32([[1, missing, 3], [-2, 0.5, missing]])
    model = node_model("Imputer", {"X": X}, **FILLED | {"replaced_value_float": missing})
    dY = np.ones((2, 3), np.float32)
    found = run_onnxruntime(onnx_derivative(model), {"X": X, "y0_grad": dY})
    assert found["X_grad"].tolist() == [[1, 0, 1], [1, 1, 0]]


def test_the_older_name_of_linear():
    """The reference evaluator does not know it."""
    X, points = normal(1, 2, 4, 3).astype(np.float32), rng.uniform(-1, 1, (1, 2, 2, 2))
    feeds = {"X": X, "points": points.astype(np.float32)}
    model = node_model("GridSample", feeds, opset=20, mode="linear")
    feeds["y0_grad"] = np.ones((1, 2, 2, 2), np.float32)
    expected = run_onnxruntime(onnx_derivative(model), feeds)
    model.graph.node[0].attribute[0].s = b"bilinear"
    model.opset_import[0].version = 16
    for name, G in run_onnxruntime(onnx_derivative(model), feeds).items():
        np.testing.assert_allclose(G, expected[name], rtol=1e-6)


def test_every_rule_has_a_case():
    elsewhere = {("", "LSTM"), ("", "GRU"), ("", "RNN")}  # test_onnx_recurrent
    ours = {key for key in RULES if not key[0].startswith("my.")}  # those are of doctests
    assert ours - {(c.domain, c.op) for c in CASES} == elsewhere


def ids(c):
    shapes = "-".join("x".join(map(str, a.shape)) for a in c.inputs.values() if a is not None)
    return f"{c.op}-{shapes}-{c.note or '-'.join(map(str, c.attributes.values()))}-{c.opset}"


def build(c: Case, mode: str, kind=np.asarray):
    inputs = {n: None if a is None else kind(a) for n, a in c.inputs.items()}
    fixed = [n for n, a in inputs.items() if a is not None and a.dtype in (np.int64, np.int32)]
    constants = set(c.constants) | (set(fixed) if mode != "runtime" else set())
    attributes = dict(c.attributes)
    if c.op == "Cast" and kind is single and attributes["to"] == TensorProto.DOUBLE:
        attributes["to"] = TensorProto.FLOAT
    outputs = c.outputs
    model = node_model(
        c.op,
        inputs,
        outputs=outputs,
        opset=c.opset,
        domain=c.domain,
        shapes="static" if mode == "static" else "named",
        constants=constants,
        **attributes,
    )
    feeds = {x.name: inputs[x.name] for x in model.graph.input}
    return model, feeds


def expected_gradients(c, model, feeds, cotangents):
    real = [n for n, a in feeds.items() if a.dtype in (np.float32, np.float64)]
    if c.note == "shape only":
        return {n: np.zeros_like(feeds[n]) for n in real}
    run = {"onnx.reference": run_reference, "onnxruntime": run_onnxruntime}[c.forward]
    return numeric_gradients(run, model, feeds, real, cotangents, c.step)


@pytest.mark.parametrize("c", CASES, ids=ids)
def test_rule(c):
    model, feeds = build(c, "static")
    outputs = run_reference(model, feeds)
    draw = np.random.default_rng(1)
    cotangents = {
        y: draw.standard_normal(np.shape(v)).astype(np.asarray(v).dtype)
        for y, v in outputs.items()
        if np.asarray(v).dtype in (np.float32, np.float64)
    }
    if not cotangents:
        with pytest.raises(ValueError, match="no output is a real tensor"):
            onnx_derivative(model)
        return
    expected = expected_gradients(c, model, feeds, cotangents)
    close = {"rtol": c.tolerance, "atol": c.tolerance / 10}
    loose = {"rtol": max(c.tolerance, 2e-4), "atol": max(c.tolerance, 2e-4)}
    for mode in c.modes:
        model, feeds = build(c, mode)
        gradient = onnx_derivative(model, weights=[])
        found = run_reference(gradient, gradient_feeds(gradient, feeds, cotangents))
        assert set(found) == {f"{n}_grad" for n in expected}
        for n, G in expected.items():
            assert found[f"{n}_grad"].dtype == feeds[n].dtype
            np.testing.assert_allclose(found[f"{n}_grad"], G, **close, err_msg=f"{n} {mode}")
        for n, G in in_onnxruntime(c, mode, gradient, feeds, cotangents).items():
            np.testing.assert_allclose(G, expected[n], **loose, err_msg=f"{n} {mode}")


def in_onnxruntime(c, mode, gradient, feeds, cotangents):
    """In float64; where onnxruntime has no such kernel, in float32."""
    try:
        found = run_onnxruntime(gradient, gradient_feeds(gradient, feeds, cotangents))
    except NotImplemented:
        model, feeds = build(c, mode, single)
        gradient = onnx_derivative(model, weights=[])
        cotangents = {y: single(v) for y, v in cotangents.items()}
        found = run_onnxruntime(gradient, gradient_feeds(gradient, feeds, cotangents))
    return {n.removesuffix("_grad"): G for n, G in found.items()}


@pytest.mark.parametrize("mode", ["constant", "edge"])
def test_pads_that_crop_and_are_known_at_run_time(mode):
    """The reference evaluator has no negative pads."""
    X = normal(4, 3).astype(np.float32)
    value = {"v": np.array(1.5, np.float32)} if mode == "constant" else {"v": None}
    feeds = {"X": X, "pads": ints(0, 0, 0, 0), **value}
    model = node_model("Pad", feeds, shapes="named", mode=mode)
    feeds = {x.name: feeds[x.name] for x in model.graph.input} | {"pads": ints(2, -1, -1, 2)}
    cotangents = {"y0": normal(5, 4).astype(np.float32)}
    gradient = onnx_derivative(model)
    found = run_onnxruntime(gradient, gradient_feeds(gradient, feeds, cotangents))
    real = [name for name in ("X", "v") if f"{name}_grad" in found]
    expected = numeric_gradients(run_onnxruntime, model, feeds, real, cotangents, 0.5)
    for name in real:
        np.testing.assert_allclose(found[f"{name}_grad"], expected[name], atol=1e-4)


@pytest.mark.parametrize("run", [run_reference, run_onnxruntime])
@pytest.mark.parametrize("of_scale", [np.float16, np.float32])
def test_dequantised_numbers_of_another_type_than_the_scale(of_scale, run):
    """Their cotangent has the type of output_dtype, the scale's gradient that of the scale."""
    scale, of_output = positive(4).astype(of_scale), {np.float16: "FLOAT", np.float32: "FLOAT16"}
    steps, zero = np.int8([[[-9, 8, 0, 3]] * 3, [[5, -7, 2, -1]] * 3]), np.int8([-1, 0, 1, 2])
    feeds = {"x": steps, "s": scale, "z": zero}
    kind = {"axis": 2, "output_dtype": TensorProto.DataType.Value(of_output[of_scale])}
    model = node_model("DequantizeLinear", feeds, opset=23, **kind)
    dy = normal(2, 3, 4).astype(run(model, feeds)["y0"].dtype)
    assert dy.dtype != of_scale
    gradient = onnx_derivative(model)
    found = run(gradient, gradient_feeds(gradient, feeds, {"y0": dy}))["s_grad"]
    expected = np.einsum("abc,abc->c", dy.astype(float), steps.astype(float) - zero)
    assert found.dtype == of_scale
    np.testing.assert_allclose(found, expected, rtol=5e-3, atol=5e-2)


def half(array):
    array = np.asarray(array)
    return array.astype(np.float16) if array.dtype == np.float64 else array


FIRST = {(c.domain, c.op): c for c in reversed(CASES)}
HALVES = [c if c is FIRST[c.domain, c.op] else thorough(c, id=ids(c)) for c in CASES]


@pytest.mark.parametrize("c", HALVES, ids=ids)
def test_half_precision_runs(c):
    """Where onnxruntime runs an operator in half precision it runs the gradient too."""
    mode = c.modes[-1]
    try:
        model, feeds = build(c, mode, half)
        outputs = run_onnxruntime(model, feeds)
    except (Fail, InvalidGraph, NotImplemented, RuntimeException, TypeError) as error:
        pytest.skip(f"no kernel in half precision, or no reference: {error}")
    real = {y: v for y, v in outputs.items() if v.dtype.kind == "f"}
    if not real:
        return
    cotangents = {y: np.full_like(v, 0.5) for y, v in real.items()}
    gradient = onnx_derivative(model, weights=[])
    found = run_onnxruntime(gradient, gradient_feeds(gradient, feeds, cotangents))
    model, feeds = build(c, mode, single)
    gradient = onnx_derivative(model, weights=[])
    cotangents = {y: v.astype(np.float32) for y, v in cotangents.items()}
    expected = run_onnxruntime(gradient, gradient_feeds(gradient, feeds, cotangents))
    for name, G in found.items():
        size = max(1.0, np.abs(expected[name]).max(initial=0))
        np.testing.assert_allclose(G, expected[name], atol=2e-2 * size, err_msg=name)


def test_every_known_value_of_an_attribute_has_a_case():
    """Of attributes with a choice, each choice; of the others that a rule heeds, one value."""
    tried = {(c.domain, c.op, a): set() for c in CASES for a in c.attributes}
    for c in CASES:
        for name, value in c.attributes.items():
            tried[c.domain, c.op, name].add(str(value))
    missing = set()
    for key in RULES.keys() & {(c.domain, c.op) for c in CASES}:
        zero = RULES[key] is no_gradient
        for name, known in () if zero else known_attributes(*key).items():
            found = tried.get((*key, name), set())
            newest = onnx.defs.get_schema(key[1], NEWEST) if not key[0] else None
            if newest is not None and name not in newest.attributes:
                continue
            default = newest and default_of(newest.attributes[name])
            left = {str(v) for v in known} - found - {str(default)}
            if left or not (known or found):
                missing.add((key[1], name, *sorted(left)))
    elsewhere = {
        ("DequantizeLinear", "output_dtype"),
        ("GridSample", "mode", "bilinear"),
        ("LinearClassifier", "classlabels_strings"),
        ("Resize", "coordinate_transformation_mode", "tf_half_pixel_for_nn"),
        ("TopK", "sorted", "0"),  # the order is the runtime's affair
    }
    assert missing == elsewhere
