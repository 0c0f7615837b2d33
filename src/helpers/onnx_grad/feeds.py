"""Random arrays to feed a model with.

>>> from onnx.parser import parse_model
>>> from helpers.onnx_grad import random_feed
>>> model = parse_model('''<ir_version: 10, opset_import: ["" : 21]>
... plus (float[N, 10] X, int64[M] label) => (float[N, 10] Y) { Y = Identity(X) }''')
>>> {name: (x.shape, str(x.dtype)) for name, x in random_feed(model.graph.input).items()}
{'X': ((10, 10), 'float32'), 'label': ((10,), 'int64')}
"""

from collections.abc import Iterable
from operator import index

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, helper

from helpers.onnx_grad.tensor import Info, Shape

__all__ = ["random_feed"]


def random_feed(
    inputs: Iterable | ModelProto | GraphProto,
    batch: int = 10,
    empty_dimension: int = 1,
    *,
    rng: np.random.Generator | int | None = None,
) -> dict[str, np.ndarray]:
    """Make a random array for every input of a model.

    Parameters
    ----------
    inputs : iterable of onnx.ValueInfoProto or onnxruntime.NodeArg, or a model or graph
        ``model.graph.input`` or ``session.get_inputs()``.  Of a whole model or graph, those inputs
        that have no initializer.
    batch : int
        Size of a first dimension that the model leaves open.
    empty_dimension : int
        Size of any other dimension that the model leaves open.
    rng : numpy.random.Generator or seed, optional
        None: different numbers at every call.

    Returns
    -------
    dict of name -> array
        Standard normal for real and complex types, 0 or 1 for integers (so that they can be
        labels of at least two classes), False or True for booleans.

    Raises
    ------
    ValueError
        If an input is not a dense tensor, has no shape or a type that NumPy does not have, or a
        size is negative.

    Notes
    -----
    A dimension is open if it is a name, unknown or 0.  A name has one size wherever it occurs:
    `batch` if it is the first dimension of any input, a vector included, `empty_dimension`
    otherwise.
    """
    for what, size in {"batch": batch, "empty_dimension": empty_dimension}.items():
        if index(size) < 0:
            raise ValueError(f"{what} is {size}, expected a size of at least 0")
    rng = np.random.default_rng(rng)
    inputs = inputs.graph if isinstance(inputs, ModelProto) else inputs
    if isinstance(inputs, GraphProto):
        given = {x.name for x in inputs.initializer}
        inputs = [x for x in inputs.input if x.name not in given]
    described = dict(map(_described, inputs))
    shapes = [shape for _, shape in described.values()]
    batch_names = {shape[0] for shape in shapes if shape and isinstance(shape[0], str)}

    def size(axis: int, dim: int | str | None) -> int:
        if isinstance(dim, int) and dim > 0:
            return dim
        return batch if axis == 0 or dim in batch_names else empty_dimension

    return {
        name: _draw(rng, dtype, tuple(size(axis, dim) for axis, dim in enumerate(shape)))
        for name, (dtype, shape) in described.items()
    }


def _described(x) -> tuple[str, tuple[np.dtype, Shape]]:
    """Name, type and shape, from ONNX's description of an input or from onnxruntime's."""
    if not isinstance(x, ValueInfoProto):
        x = _as_onnx_says_it(x)
    kind = x.type.WhichOneof("value")
    if kind != "tensor_type":
        kind = kind.removesuffix("_type").replace("_", " ") if kind else "value without a type"
        raise ValueError(f"input {x.name!r} is a {kind}, expected a tensor")
    code, shape = x.type.tensor_type.elem_type, Info.of(x.type).shape
    if shape is None:
        raise ValueError(f"input {x.name!r} has no shape: how many dimensions to make is unknown")
    if code in (TensorProto.UNDEFINED, TensorProto.STRING):
        found = TensorProto.DataType.Name(code)
        raise ValueError(f"input {x.name!r} has type {found}, expected numbers")
    return x.name, (np.dtype(helper.tensor_dtype_to_np_dtype(code)), shape)


def _as_onnx_says_it(x) -> ValueInfoProto:
    if not all(hasattr(x, what) for what in ("name", "type", "shape")):
        raise ValueError(
            f"cannot make data for a {type(x).__name__}: expected the inputs of a model, "
            "such as model.graph.input or session.get_inputs()"
        )
    kind = x.type.removeprefix("tensor(").removesuffix(")").upper()  # tensor(float) and the like
    if x.type != f"tensor({kind.lower()})" or kind not in TensorProto.DataType.keys():
        raise ValueError(f"input {x.name!r} is a {x.type}, expected a tensor")
    return helper.make_tensor_value_info(x.name, TensorProto.DataType.Value(kind), x.shape)


def _draw(rng: np.random.Generator, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if dtype.kind in "iub" or dtype.name.startswith(("int", "uint")):  # int4 is not NumPy's own
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype.kind == "c":
        real, imaginary = rng.standard_normal((2, *shape))
        return np.asarray(real + 1j * imaginary, dtype)
    return np.asarray(rng.standard_normal(shape)).astype(dtype)
