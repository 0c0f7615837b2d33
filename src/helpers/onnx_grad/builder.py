"""The graph under construction: it emits standard ONNX operators for the rules, and knows the type
and static shape of each tensor, so that it need not emit arithmetic on shapes that are known.
"""

from collections.abc import Iterable

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.shape_inference import InferenceError, infer_node_outputs

from helpers.onnx_grad.simplify import free_name, rename
from helpers.onnx_grad.tensor import (
    REAL,
    Info,
    Shape,
    Tensor,
    canonical,
    is_static,
    same_dim,
    same_shape,
    schema_of,
)

# Zeros of a cotangent go through these: see Graph.has_chosen_zeros.
KEEPS_ZEROS = {
    *("Add", "Cast", "CastLike", "Div", "Expand", "Identity", "Mul", "Neg", "ReduceSum"),
    *("Reshape", "Squeeze", "Sub", "Sum", "Transpose", "Unsqueeze"),
}


class Graph:
    """The graph under construction: what is known of each tensor, and the nodes emitted so far.

    Parameters
    ----------
    opsets : dict
        Version of each domain that the model imports.
    infos : dict of Info
        What is known of the model's tensors.
    constants : dict of arrays
        The model's tensors whose value is known now.
    names : iterable of str
        Names that are taken.
    """

    def __init__(self, opsets: dict[str, int], infos: dict, constants: dict, names: Iterable[str]):
        self.opset, self.opsets = opsets[""], opsets
        self.infos, self.constants, self.names = infos, constants, set(names)
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.prefix = "grad"
        self.replaced: dict[str, str] = {}
        self._cache: dict[tuple, list[str]] = {}
        self._expanded: dict[str, Tensor] = {}
        self._chosen: set[str] = set()

    # What is known

    def info(self, name: str) -> Info:
        """Type and shape of a tensor."""
        return self.infos.get(name, Info())

    def schema(self, op_type: str, domain: str = ""):
        """The operator's schema at the model's opset, or None."""
        return schema_of(op_type, self.opsets.get(domain, 1), domain)

    def fresh(self, hint: str) -> str:
        """A name that nothing has yet."""
        return free_name(hint, self.names)

    def infer(self, node: NodeProto) -> None:
        """Record type and shape of a node's outputs."""
        schema = self.schema(node.op_type, canonical(node.domain))
        found = {}
        if schema is not None:
            types = {x: self.infos[x].proto() for x in node.input if x in self.infos}
            known = [x for x in node.input if x in self.constants]
            data = {x: numpy_helper.from_array(self.constants[x], x) for x in known}
            imports = [helper.make_opsetid(d, v) for d, v in self.opsets.items()]
            try:
                found = infer_node_outputs(schema, node, types, data, None, imports, 10)
            except (InferenceError, ValueError):  # the latter: sequences and the like
                found = {}
        first = next((self.info(x).dtype for x in node.input if self.info(x).dtype in REAL), None)
        for y in node.output:
            if y:
                self.infos[y] = Info.of(found[y]) if y in found else Info(first, None)

    # Emitting

    def constant(self, value, dtype: int | None = None) -> Tensor:
        """A constant of the graph: numbers take the element type ``dtype``."""
        if dtype is not None:
            value = np.asarray(value).astype(helper.tensor_dtype_to_np_dtype(dtype))
        value = np.asarray(value)
        key = ("constant", value.dtype.str, str(value.dtype), value.shape, value.tobytes())
        if key not in self._cache:
            name = self.fresh("const")
            self.initializers.append(numpy_helper.from_array(value, name))
            self.infos[name] = Info(helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            self.constants[name] = value
            self._cache[key] = [name]
        return Tensor(self._cache[key][0], self)

    def ints(self, *values: int) -> Tensor:
        """A constant vector of int64."""
        return self.constant(np.array(values, dtype=np.int64))

    def op(
        self,
        op_type: str,
        *inputs,
        outputs: int = 1,
        shape: Shape = None,
        **attributes,
    ):
        """Emit a node.

        Parameters
        ----------
        op_type : str
        *inputs : Tensor, None, number, array or list of ints
            Numbers take the element type of the first real input, lists of ints are int64.
        outputs : int
            How many outputs it makes.
        shape : tuple, optional
            The shape of the (first) output, where the rule knows more than inference can.
        **attributes
            Those that are None are left out.

        Returns
        -------
        Tensor, or a tuple of them where ``outputs`` is more than one
        """
        tensors = self._as_tensors(inputs)
        attributes = {k: v for k, v in attributes.items() if v is not None}
        names = [t.name if t is not None else "" for t in tensors]
        key = (op_type, outputs, *names, repr(sorted(attributes.items())))
        if key not in self._cache:
            made = [self.fresh(f"{self.prefix}_{op_type}") for _ in range(outputs)]
            node = helper.make_node(op_type, names, made, made[0], **attributes)
            self.nodes.append(node)
            self.infer(node)
            if op_type in KEEPS_ZEROS and not self._chosen.isdisjoint(names):
                self._chosen.update(made)
            self._cache[key] = made
        made = self._cache[key]
        if shape is not None:
            self.refine(made[0], shape)
        result = tuple(Tensor(name, self) for name in made)
        return result if outputs > 1 else result[0]

    def refine(self, name: str, shape: Shape) -> Tensor:
        """Record a shape that the rule knows, of the tensor that is returned."""
        if shape is not None:
            self.infos[name] = Info(self.info(name).dtype, tuple(shape))
        return Tensor(name, self)

    def _as_tensors(self, inputs) -> list[Tensor | None]:
        dtypes = [t.dtype for t in inputs if isinstance(t, Tensor)]
        dtype = next((d for d in dtypes if d in REAL), next(iter(dtypes), None))
        tensors = []
        for t in inputs:
            if not isinstance(t, Tensor | None):
                t = np.array(t, dtype=np.int64) if isinstance(t, list | tuple) else t
                t = self.constant(t, None if isinstance(t, np.ndarray) else dtype)
            tensors.append(t)
        return tensors

    def recorded(self, forward, *arguments):
        """The result of ``forward(g, *arguments)``, and all nodes that make it."""
        cache, start = self._cache, len(self.nodes)
        self._cache = {key: made for key, made in cache.items() if key[0] == "constant"}
        result = forward(self, *arguments)
        self._cache |= cache
        return result, self.nodes[start:]

    def broadcast(self, op_type: str, *inputs) -> Tensor:
        """An elementwise operator. It broadcasts by itself, so an Expand in front of it goes."""
        tensors = self._as_tensors(inputs)
        for i, t in enumerate(tensors):
            source = self._expanded.get(t.name)
            others = tensors[:i] + tensors[i + 1 :]
            if source is not None and any(same_shape(o.shape, t.shape) for o in others):
                tensors[i] = source
                return self.op(op_type, *tensors, shape=t.shape)
        return self.op(op_type, *tensors)

    # Shapes

    def shape_of(self, x: Tensor) -> Tensor:
        """The shape as an int64 vector: a constant where it is static."""
        return self.ints(*x.shape) if is_static(x.shape) else self.op("Shape", x)

    def dims_of(self, x: Tensor, axes: Iterable[int]) -> Tensor:
        """Some dimensions as an int64 vector: a constant where they are static."""
        axes = list(axes)
        if x.shape is not None and is_static(tuple(x.shape[a] for a in axes)):
            return self.ints(*(x.shape[a] for a in axes))
        return self.op("Gather", self.op("Shape", x), axes)

    def length(self, x: Tensor, axis: int) -> Tensor | int:
        """A dimension: a number where it is static, else a scalar that is known at run time."""
        if x.shape is not None and isinstance(x.shape[axis], int):
            return x.shape[axis]
        return self.op("Reshape", self.dims_of(x, [axis]), self.ints())

    def joined(self, *parts: Tensor | int) -> Tensor:
        """Numbers and int64 vectors one after the other: a constant where all are known."""
        parts = [self.ints(p) if isinstance(p, int) else p for p in parts]
        if all(p.value is not None for p in parts):
            return self.constant(np.concatenate([p.value for p in parts]))
        return self.op("Concat", *parts, axis=0) if len(parts) > 1 else parts[0]

    def size_of(self, x: Tensor, dtype: int) -> Tensor:
        """The number of entries, as a scalar of the element type."""
        if is_static(x.shape):
            return self.constant(int(np.prod(x.shape)), dtype)
        return self.op("Size", x).cast(dtype)

    def reshape(self, t: Tensor, shape) -> Tensor:
        """To a shape given as a list of ints (one of them may be -1) or as a tensor.

        From opset 14 a zero in the shape is a zero, which empty batches need; before, it copies
        the dimension of the input, which is the same wherever the two shapes line up.
        """
        known = shape.value if isinstance(shape, Tensor) else shape
        zero = known is None or (0 in known and -1 not in known)
        return self.op("Reshape", t, shape, allowzero=1 if zero and self.opset >= 14 else None)

    def reshape_like(self, t: Tensor, x: Tensor) -> Tensor:
        """To the shape of x, which has the same number of entries."""
        if same_shape(t.shape, x.shape):
            return t
        target = [d if isinstance(d, int) else -1 for d in x.shape or ()]
        if target.count(-1) != 1 or 0 in target:
            target = self.shape_of(x)
        return self.refine(self.reshape(t, target).name, x.shape)

    def expand_like(self, t: Tensor, x: Tensor) -> Tensor:
        """Broadcast to the shape of x."""
        if same_shape(t.shape, x.shape):
            return t
        wide = self.refine(self.op("Expand", t, self.shape_of(x)).name, x.shape)
        self._expanded[wide.name] = t
        return wide

    def filled(self, x: Tensor, value: float) -> Tensor:
        """A tensor of x's shape and type, with one value everywhere."""
        number = helper.make_tensor("value", x.dtype, [1], [value])
        return self.op("ConstantOfShape", self.shape_of(x), value=number, shape=x.shape)

    def zeros_like(self, x: Tensor) -> Tensor:
        """Zeros of x's shape and type."""
        return self.filled(x, 0.0)

    def range_of(self, length: Tensor | int) -> Tensor:
        """0, 1, ..., length - 1 as int64."""
        if isinstance(length, int):
            return self.constant(np.arange(length, dtype=np.int64))
        return self.op("Range", np.array(0, np.int64), length, np.array(1, np.int64))

    def squeeze(self, t: Tensor, axes: Iterable[int]) -> Tensor:
        """Remove axes of length one."""
        axes = list(axes)
        return self.op("Squeeze", t, axes) if axes else t

    def unsqueeze(self, t: Tensor, axes: Iterable[int]) -> Tensor:
        """Insert axes of length one."""
        axes = list(axes)
        return self.op("Unsqueeze", t, axes) if axes else t

    def transpose(self, t: Tensor, perm: Iterable[int]) -> Tensor:
        """Permute the axes."""
        perm = [int(p) for p in perm]
        return t if perm == sorted(perm) else self.op("Transpose", t, perm=perm)

    # Arithmetic

    def where(self, condition: Tensor, a, b) -> Tensor:
        """``a`` where the condition holds, else ``b``."""
        dtype = next(t.dtype for t in (a, b) if isinstance(t, Tensor))
        tensors = [t if isinstance(t, Tensor) else self.constant(t, dtype) for t in (a, b)]
        shape = None
        for i, t in enumerate(tensors):
            source = self._expanded.get(t.name)
            if source is not None and same_shape(condition.shape, t.shape):
                tensors[i], shape = source, condition.shape
                break
        chosen = self.op("Where", condition, *tensors, shape=shape)
        if any(not isinstance(t, Tensor) and t == 0 for t in (a, b)):
            self._chosen.add(chosen.name)
        return chosen

    def has_chosen_zeros(self, dy: Tensor) -> bool:
        """Whether a Where may have put zeros into a cotangent, for what it did not choose."""
        return dy.name in self._chosen

    def unless_hidden(self, dy: Tensor, product: Tensor) -> Tensor:
        """``product``, of dy and a slope entry by entry; 0 where a Where has made dy 0 and the
        slope has no finite value: what was not chosen has no influence, whatever it is."""
        if not self.has_chosen_zeros(dy):
            return product
        # Not wherever dy is 0: the product may be differentiated by dy again, at 0 too.
        hidden = self.op("And", dy.equals(0.0), self.op("IsNaN", product))
        return self.where(hidden, 0.0, product)

    def reduce(
        self, op_type: str, t: Tensor, axes: Iterable[int] | None, keepdims: bool = True
    ) -> Tensor:
        """A reduction over static axes, None for all: the axes are an input from opset 13
        (ReduceSum) or 18 (the others), an attribute before."""
        axes = None if axes is None else list(axes)
        if axes == []:
            return t
        if axes and (op_type == "ReduceSum" or self.opset >= 18):
            return self.op(op_type, t, axes, keepdims=int(keepdims))
        return self.op(op_type, t, axes=axes, keepdims=int(keepdims))

    def sum(self, t: Tensor, axes: Iterable[int] | None, keepdims: bool = True) -> Tensor:
        """Sum over static axes, None for all."""
        return self.reduce("ReduceSum", t, axes, keepdims)

    def add_all(self, terms: list[Tensor]) -> Tensor:
        """The sum of tensors of one shape."""
        if len(terms) == 1:
            return terms[0]
        return terms[0] + terms[1] if len(terms) == 2 else self.op("Sum", *terms)

    def scatter_add(self, t: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
        """t with the updates added where the indices say, along an axis.

        In single precision for half: onnxruntime adds up in no other way there, and a sum of many
        parts is better for it.
        """
        how = {"axis": axis, "reduction": "add"}
        summed = self.op("ScatterElements", t.wide(), indices, updates.wide(), **how)
        return summed.cast(t.dtype)

    def reduce_to(self, dy: Tensor, x: Tensor) -> Tensor:
        r"""Un-broadcast: the adjoint of broadcasting x to the shape of dy.

        .. math:: \bar X = \sum_{\text{repeated axes}} \bar Y

        Axes that are decided by static shapes cost one ReduceSum, or nothing; only where a
        dimension of x may or may not be 1 is it looked up at run time.
        """
        if same_shape(dy.shape, x.shape):
            return dy
        if dy.shape is None or x.shape is None:
            return self._reduce_to_unknown_rank(dy, x)
        lead = len(dy.shape) - len(x.shape)
        pairs = list(enumerate(zip(dy.shape[lead:], x.shape, strict=True), start=lead))
        ones = [i for i, (d, n) in pairs if n == 1 and d != 1]
        unsure = [i for i, (d, n) in pairs if isinstance(n, str | None) and not same_dim(d, n)]
        if not unsure:
            if not ones:
                return self.refine(self.sum(dy, range(lead), keepdims=False).name, x.shape)
            summed = self.sum(dy, [*range(lead), *ones])
            return self.refine(self.squeeze(summed, range(lead)).name, x.shape)
        repeated = self.op("NonZero", self.dims_of(x, [i - lead for i in unsure]).equals(1))
        repeated = self.op("Reshape", repeated, [-1])
        axes = self.op("Gather", self.ints(*unsure), repeated)
        if ones or lead:
            axes = self.op("Concat", self.ints(*range(lead), *ones), axes, axis=0)
        summed = self.op("ReduceSum", dy, axes, keepdims=1, noop_with_empty_axes=1)
        if summed.shape is None:
            self.refine(summed.name, (1,) * lead + x.shape)
        return self.refine(self.squeeze(summed, range(lead)).name, x.shape)

    def _reduce_to_unknown_rank(self, dy: Tensor, x: Tensor) -> Tensor:
        shape = self.op("Shape", x)
        lead = self.op("Size", self.op("Shape", dy)) - self.op("Size", shape)
        ones = self.op("Reshape", self.op("NonZero", shape.equals(1)), [-1])
        axes = self.op("Concat", self.range_of(lead), ones + lead, axis=0)
        summed = self.op("ReduceSum", dy, axes, keepdims=1, noop_with_empty_axes=1)
        return self.refine(self.reshape(summed, shape).name, x.shape)


def name_results(g: Graph, results: dict[str, Tensor], fixed: Iterable[str] = ()) -> None:
    """Give results their names: by renaming where a node of this graph makes one, and neither
    another result nor a name that is fixed has it; else by a copy."""
    made = {y for node in g.nodes for y in node.output}.difference(fixed)
    names, copies = {}, []
    for name, result in results.items():
        if result.name in made and result.name not in names:
            names[result.name] = name
        else:
            label = g.fresh(f"{name}_copy")
            copies.append(helper.make_node("Identity", [result.name], [name], label))
    g.nodes += copies
    rename(g.nodes, names)
