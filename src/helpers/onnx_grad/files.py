"""Models in files: the gradient of one as another file, and trained weights back into the first.

A file above two gigabytes keeps its weights beside it, as ONNX's external data.  A gradient graph
does not hold the weights it differentiates by, so they are not read to make it.

>>> import numpy as np
>>> from onnx.parser import parse_model
>>> from helpers.onnx_grad import with_weights
>>> model = parse_model('''<ir_version: 10, opset_import: ["" : 21]>
... line (float[N, 2] X) => (float[N, 2] Y) <float[2] b = {1.0, 1.0}> { Y = Add(X, b) }''')
>>> trained = with_weights(model, {"b": np.array([3.0, 4.0], "float32")})
>>> onnx.numpy_helper.to_array(trained.graph.initializer[0]).tolist()
[3.0, 4.0]
"""

import os
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from errno import EISDIR, ENOENT
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from helpers.onnx_grad import storage
from helpers.onnx_grad.constants import set_apart
from helpers.onnx_grad.derivative import onnx_derivative
from helpers.onnx_grad.interface import DerivativeOptions, Interface, checked_options

__all__ = ["file_derivative", "read_structure", "save_model", "with_weights"]

# Tensors beside a file that are read with it: shapes, axes, bounds, and whatever else is small.
SMALL_BYTES = 1 << 16
# What protobuf can write as one message is a byte less than two gigabytes; the rest needs room.
LARGEST_FILE = (1 << 31) - (1 << 20)


def file_derivative(
    path: str | Path,
    out: str | Path,
    weights: list[str] | None = None,
    inputs: list[str] | None = None,
    options: DerivativeOptions = DerivativeOptions.Zero,
    loss: str | None = None,
    label: str | None = None,
    verbose: int = 0,
) -> ModelProto:
    """Write the gradient of the model in one file into another file.

    Parameters
    ----------
    path : path
        The model; its weights may be beside it, as external data, and of any size.
    out : path
        Where the gradient goes. The file is written completely or not at all.
    weights, inputs, options, loss, label, verbose
        As of :func:`~helpers.onnx_grad.derivative.onnx_derivative`.

    Returns
    -------
    ModelProto
        What was written.

    Raises
    ------
    OSError
        If a file cannot be read or written, those beside the model included.
    ValueError
        If ``path`` holds no ONNX model, and what
        :func:`~helpers.onnx_grad.derivative.onnx_derivative` raises.

    Notes
    -----
    The chosen weights are inputs of the gradient, so their numbers are not needed; without
    ``weights`` they are read once, piece by piece, since a mask is recognised by its infinities.
    Large constants that stay are set aside while the graph is made, for ONNX's shape inference
    takes models of up to two gigabytes only, and put back before it is written.
    """
    model, folder, out = read_structure(path), Path(path).parent, _place(out)
    options = checked_options(options, loss, label)
    constants = set_apart(model, weights, folder)
    interface = Interface(model, constants, weights, inputs, options, loss, label)
    aside = {t.name: t for t in model.graph.initializer if uses_external_data(t)}
    aside = {name: t for name, t in aside.items() if name not in interface.weights}
    light = deepcopy(model)
    storage.as_inputs(light, [*aside, *interface.weights])
    gradient = onnx_derivative(light, [], interface.targets, options, loss, label, verbose=verbose)
    # What was set aside is a constant again, where the gradient uses it.
    used = {x for node in gradient.graph.node for x in node.input}
    for value in [v for v in gradient.graph.input if v.name in aside]:
        gradient.graph.input.remove(value)
    for tensor in (aside[name] for name in aside if name in used):
        storage.load_numbers(tensor, folder)
        gradient.graph.initializer.append(tensor)
    save_model(gradient, out)
    return gradient


def read_structure(path: str | Path) -> ModelProto:
    """The model in a file, without the numbers of large tensors that are beside it.

    Raises
    ------
    OSError
        If a file cannot be read.
    ValueError
        If it holds no ONNX model.
    """
    path = _path(path)
    data = path.read_bytes()
    try:
        model = ModelProto.FromString(data)
    except DecodeError as error:
        raise ValueError(f"{path} is not an ONNX file: {error}") from error
    if not model.HasField("graph"):
        raise ValueError(f"{path} is not an ONNX file: it holds no graph")
    storage.name_domains_alike(model)
    large = {t.name for t in model.graph.initializer if storage.size_of(t) > SMALL_BYTES}
    for tensor in storage.all_tensors(model.graph):
        if uses_external_data(tensor) and tensor.name not in large:
            storage.load_numbers(tensor, path.parent)
    return model


def _path(path) -> Path:
    if isinstance(path, ModelProto):
        raise TypeError("expected the path of a file, got a model; onnx_derivative takes a model")
    return Path(path)


def save_model(model: ModelProto, path: str | Path) -> None:
    """Write a model completely or not at all; above 2 GB its weights go to ``<path>.data``.

    The files are made and checked in a folder beside the place where they go, and then moved.

    Raises
    ------
    OSError
        If the folder is not there or cannot be written to.
    ValueError
        If it is not a valid model; nothing is written then.
    """
    model, path = storage.checked_model(model), _place(path)
    beside = sum(storage.size_of(t) for t in model.graph.initializer) > LARGEST_FILE
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
            made = Path(folder) / path.name
            if beside:
                copy = deepcopy(model)  # saving empties the tensors that it moves
                onnx.save(copy, str(made), save_as_external_data=True, location=f"{path.name}.data")
            else:
                made.write_bytes(model.SerializeToString())
            try:
                onnx.checker.check_model(str(made), full_check=True)
            except onnx.checker.ValidationError as error:
                message = str(error).replace(folder, str(path.parent))
                raise ValueError(f"not a valid model, so not written: {message}") from error
            for file in sorted(Path(folder).iterdir(), reverse=True):  # the data before the model
                os.replace(file, path.parent / file.name)
    except OSError as error:  # which names the folder that is gone again
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _place(path) -> Path:
    """Where a file may go: the folder is there, and the name is not that of a folder."""
    path = _path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(ENOENT, "no such folder", str(path.parent))
    if path.is_dir():
        raise IsADirectoryError(EISDIR, "is a folder, expected the name of a file", str(path))
    return path


def with_weights(model: ModelProto, weights: Mapping[str, np.ndarray]) -> ModelProto:
    """A copy of a model with other numbers in its weights.

    Parameters
    ----------
    model : ModelProto
    weights : mapping of name -> array
        Each of the type and shape of the initializer that has its name; the others stay.  The name
        of what a Constant node makes stands for that node, which becomes an initializer.

    Raises
    ------
    ValueError
        If a name is not an initializer, or an array has another shape or type.
    """
    copy = deepcopy(storage.checked_model(model))
    storage.as_initializers(copy, storage.constant_nodes(copy).intersection(weights))
    held = {t.name: t for t in copy.graph.initializer}
    for name, value in weights.items():
        if name not in held:
            known = ", ".join(map(repr, held)) or "none"
            raise ValueError(f"weight {name!r} is no initializer of the model; these are {known}")
        value, tensor, doc = np.asarray(value), held[name], held[name].doc_string
        shape, dtype = tuple(tensor.dims), helper.tensor_dtype_to_np_dtype(tensor.data_type)
        if value.shape != shape:
            raise ValueError(f"weight {name!r} has shape {value.shape}, expected {shape}")
        if value.dtype != dtype:
            raise ValueError(f"weight {name!r} has type {value.dtype}, expected {dtype}")
        tensor.CopyFrom(numpy_helper.from_array(value, name))
        tensor.doc_string = doc
    return copy
