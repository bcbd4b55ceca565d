"""Import an ONNX model as an inference graph with the inferred shape of every value and the FLOPs and bytes of every
node.

* An initializer becomes an op of the kind ``parameter`` with persistent bytes, colocated with its first reader. A node
  that depends only on initializers and constants becomes an op of the kind ``constant``, as if its result had been
  computed beforehand. A graph input becomes an op of the kind ``input``. The kind of every other op is its ONNX name.
* Reshape, Flatten, Squeeze, Unsqueeze, Identity and Dropout change no data during inference: readers of their output
  read their input.
* Dynamic axes of inputs (a batch called ``N``) have the sizes that the caller gives; a missing one is an error. Sizes
  that the graph computes (``Shape``, ``Gather``,
  ``Concat``) are evaluated; a node whose result follows from shapes alone becomes a ``constant``, or nothing if only
  other sizes are computed from it. Values whose shape still cannot be inferred count as 0 bytes, and
  ``meta["values_without_shape"]`` lists them; a product, convolution, attention or recurrent layer among their makers
  or readers is refused.
* A multiplication and an addition count as two FLOPs. The FLOPs of convolutions, matrix products, attention, Einsum and
  recurrent layers follow from their shapes; any other op has one for each element of its outputs. A subgraph (If, Loop,
  Scan) is one op. Functions of the model are inlined. Weights are not read, neither in the file nor in other files.
"""

from __future__ import annotations

import math
import os

from simdev.errors import InvalidInput, UnknownName, Unsupported
from simdev.graphs.importers import Imported, importer
from simdev.graphs.importers.onnx_payload import read_model
from simdev.graphs.importers.onnx_shapes import propagate, shape_of
from simdev.graphs.importers.reading import name_of
from simdev.problem.graph import GraphBuilder

VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"})
# Operators whose FLOPs are more than one for each element of their output: how many of their inputs decide the FLOPs
# (None: all), and whether the output does.
PRODUCTS = {
    "Conv": (2, True), "ConvInteger": (2, True), "QLinearConv": (4, True), "ConvTranspose": (2, False),
    "Gemm": (2, True), "MatMul": (2, True), "MatMulInteger": (2, True), "QLinearMatMul": (4, True),
    "Einsum": (None, False), "Attention": (3, False), "MultiHeadAttention": (3, False), "LSTM": (3, False),
    "GRU": (3, False), "RNN": (3, False),
}  # fmt: skip
# By number of the ONNX data type (TensorProto.DataType): the short name in signatures, and the bits of an element.
DTYPES = {
    1: ("f32", 32), 2: ("u8", 8), 3: ("i8", 8), 4: ("u16", 16), 5: ("i16", 16), 6: ("i32", 32), 7: ("i64", 64),
    8: ("str", 64), 9: ("b8", 8), 10: ("f16", 16), 11: ("f64", 64), 12: ("u32", 32), 13: ("u64", 64), 14: ("c64", 64),
    15: ("c128", 128), 16: ("bf16", 16), 17: ("f8", 8), 18: ("f8", 8), 19: ("f8", 8), 20: ("f8", 8), 21: ("u4", 4),
    22: ("i4", 4), 23: ("f4", 4), 24: ("f8", 8), 25: ("u2", 2), 26: ("i2", 2),
}  # fmt: skip


class _Value:
    """The dtype and the shape of one value; an unknown shape is ``None``."""

    def __init__(self, dtype: int, shape: list[int] | None):
        self.dtype, self.bits = DTYPES.get(dtype, ("?", 32))
        self.shape = shape

    @property
    def elements(self) -> int:
        return math.prod(self.shape) if self.shape is not None else 0

    @property
    def bytes(self) -> int:
        return -(-self.elements * self.bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape)) if self.shape is not None else '?'}]"


_NOTHING = _Value(0, None)


def _detects(data: bytes, path: str) -> bool:
    return data.startswith(b"\x08") or path.endswith(".onnx")  # protobuf: field 1, the version of a model


@importer("onnx", detects=_detects, general=True, suffix=".onnx", read=read_model)
def parse(
    data: bytes, path: str | os.PathLike, *, format: str, device_kind: str, sizes: dict[str, int] | None = None
) -> Imported:
    model = _load(data, path, sizes or {})
    graph = model.graph
    if not graph.node:
        raise InvalidInput("the model has no nodes", source=path, field="graph: node")
    values, computed = _values(model, path)
    builder = GraphBuilder(graph.name or name_of(path))
    tensors: dict[str, int] = {}  # tensor by name of the value
    readers: dict[str, str] = {}  # first node that reads a value, by name of the value
    names = [node.name or f"{node.op_type}_{number}" for number, node in enumerate(graph.node)]
    results = {value.name for value in graph.output}
    aliases = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type in VIEWS and node.domain in ("", "ai.onnx") and node.input and node.output
    }
    kept = {_home(name, aliases) for name in results}
    sized = [bool(node.output) and computed.issuperset(filter(None, node.output)) for node in graph.node]
    for name, node, is_size in zip(names, graph.node, sized, strict=True):
        if not is_size and not (node.output and node.output[0] in aliases):
            for value in node.input:
                readers.setdefault(_home(value, aliases), name)
    needed = kept.union(readers)  # sizes that only views and other sizes read are no ops
    for initializer in graph.initializer:
        if initializer.name in computed and initializer.name not in needed:
            continue
        value = values[initializer.name]
        op = builder.op(
            initializer.name,
            "parameter",
            signature=f"parameter()->{value}",
            persistent_bytes=value.bytes,
            bytes_written=0,
            group=readers.get(initializer.name),
        )
        tensors[initializer.name] = builder.tensor(op, value.bytes, persistent=True)
    for value in graph.input:
        if value.name not in tensors and value.name not in computed:
            shape = values[value.name]
            op = builder.op(value.name, "input", signature=f"input()->{shape}", bytes_written=0)
            tensors[value.name] = builder.tensor(op, shape.bytes)
    constants = {initializer.name for initializer in graph.initializer}
    handles = []
    for name, node, is_size in zip(names, graph.node, sized, strict=True):
        constant = is_size or (constants.issuperset(node.input) and not node.op_type.startswith("Random"))
        if constant:
            constants.update(node.output)
        if (node.output and node.output[0] in aliases) or (is_size and needed.isdisjoint(node.output)):
            continue
        ins, outs = [values.get(value, _NOTHING) for value in node.input if value], _outputs(node, values)
        size = sum(out.bytes for out in outs)
        op = builder.op(
            name,
            "constant" if constant else node.op_type,
            flops=0 if constant else _flops(node, values),
            signature=f"{node.op_type}({','.join(map(str, ins))}{_attributes(node)})->{','.join(map(str, outs))}",
            group=readers.get(node.output[0]) if constant and node.output else name,
            layer=name.rpartition("/")[0],
            persistent_bytes=size if constant else 0,
            bytes_written=0 if constant else None,
        )
        for value in node.output:
            if value in tensors:
                raise InvalidInput(f"value {value!r} has two producers", source=path, field=f"node {name!r}")
            if value:
                made = values.get(value, _NOTHING).bytes
                tensors[value] = builder.tensor(op, made, result=value in kept, persistent=constant)
        if not is_size:  # sizes read the shape of a tensor, not the tensor
            handles.append((op, name, node))
    for op, name, node in handles:
        for value in node.input:
            home = _home(value, aliases)
            if home and home not in tensors:
                raise InvalidInput(
                    f"reads {value!r}, which nothing makes (dangling edge)", source=path, field=f"node {name!r}"
                )
            if home:
                builder.connect(tensors[home], op)
    unknown = sorted(name for name in tensors if values.get(name, _NOTHING).shape is None)
    opsets = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    builder.meta |= {"source": "ONNX model", "opsets": opsets, "values_without_shape": unknown}
    built = builder.build()
    for name, node in zip(names, graph.node, strict=True):
        open_value = _open_value(node, values)
        if open_value:
            raise InvalidInput(
                f"the FLOPs of this {node.op_type} are unknown, because the shape of {open_value!r} cannot be "
                "inferred; export the model with inputs of fixed sizes",
                source=path,
                field=f"node {name!r}",
            )
    return Imported(built)


def _load(data: bytes, path, sizes: dict[str, int]):
    try:
        import onnx
        import onnx.inliner
    except ImportError:
        raise Unsupported("reading ONNX models needs the package onnx: pip install 'simdev[onnx]'") from None
    try:
        model = onnx.load_from_string(data)
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        _set_sizes(model.graph, sizes, path)
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except InvalidInput:
        raise
    except Exception as error:  # protobuf and onnx raise their own exceptions for malformed files
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise InvalidInput(f"not an ONNX model ({reason})", source=path) from None
    return inferred if len(inferred.graph.node) == len(model.graph.node) else model


def _set_sizes(graph, sizes: dict[str, int], path) -> None:
    """Give the dynamic axes of the inputs their sizes; shape inference computes what follows from them.

    An axis without a name is called after its input: ``x.0``. Raises :class:`InvalidInput` naming the axes that have no
    size, and those that do not exist.
    """
    weights = {tensor.name for tensor in graph.initializer}
    found: set[str] = set()
    for value in graph.input:
        if value.name in weights:
            continue
        for number, axis in enumerate(value.type.tensor_type.shape.dim):
            if not axis.HasField("dim_value"):
                name = axis.dim_param or f"{value.name}.{number}"
                found.add(name)
                if name in sizes:
                    axis.dim_value = sizes[name]
    missing = sorted(found.difference(sizes))
    if missing:
        options = " ".join(f"--size {name}=..." for name in missing)
        message = f"the axes {', '.join(missing)} have no size; give them: simdev import {path} {options} -o GRAPH.npz"
        raise InvalidInput(message, source=path)
    for name in sizes:
        if name not in found:
            raise UnknownName("dynamic axis", name, found, source=path)
    for value in graph.output:
        if not all(axis.HasField("dim_value") for axis in value.type.tensor_type.shape.dim):
            value.type.tensor_type.ClearField("shape")
    inner = [value for value in graph.value_info if found and shape_of(value.type) is None]
    for value in inner:
        graph.value_info.remove(value)


def _values(model, path) -> tuple[dict[str, _Value], set[str]]:
    """Dtype and shape of every value, and the names of the values that follow from shapes and constants alone."""
    from onnx.helper import make_tensor_type_proto

    graph = model.graph
    types = {info.name: info.type for info in (*graph.input, *graph.value_info, *graph.output)}
    for tensor in graph.initializer:
        types[tensor.name] = make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    computed = propagate(model, types)
    values = {name: _Value(about.tensor_type.elem_type, shape_of(about)) for name, about in types.items()}
    for name, value in values.items():
        if value.shape is not None and (min(value.shape, default=0) < 0 or value.bytes > 1 << 50):
            raise InvalidInput(f"shape {value.shape} is not possible", source=path, field=f"value {name!r}")
    return values, set(computed)


def _outputs(node, values) -> list[_Value]:
    return [values.get(name, _NOTHING) for name in node.output if name]


def _home(value: str, aliases: dict[str, str]) -> str:
    """The value that ``value`` is a view of, or ``value`` itself."""
    seen = set()
    while value in aliases and value not in seen:
        seen.add(value)
        value = aliases[value]
    return value


def _attributes(node) -> str:
    """The attributes that affect the time of a kernel and do not follow from the shapes."""
    kept = ("strides", "dilations", "group", "transA", "transB", "axis", "direction", "kernel_shape", "pads")
    parts = []
    for attribute in sorted(node.attribute, key=lambda one: one.name):
        if attribute.name in kept:
            value = list(attribute.ints) or (attribute.s.decode(errors="replace") if attribute.s else attribute.i)
            parts.append(f"{attribute.name}={value}".replace(" ", ""))
    return "".join(f",{part}" for part in parts)


def _open_value(node, values) -> str | None:
    """A value of unknown shape that the FLOPs of a product, convolution, attention or recurrent layer depend on."""
    if node.op_type not in PRODUCTS:
        return None
    n_inputs, output = PRODUCTS[node.op_type]
    operands = [*node.input[:n_inputs], *(node.output[:1] if output else ())]
    return next((name for name in operands if name and values.get(name, _NOTHING).shape is None), None)


def _flops(node, values) -> int:
    shapes = [values.get(name, _NOTHING).shape for name in node.input]
    outputs = _outputs(node, values)
    made = outputs[0].elements if outputs else 0
    kind = node.op_type
    first, second = (shapes + [None] * 4)[: 4 : 3 if kind.startswith("QLinear") else 1][:2]  # QLinear: scales between
    if kind in ("Conv", "ConvInteger", "QLinearConv") and len(second or ()) > 2:
        return 2 * made * math.prod(second[1:])
    if kind == "ConvTranspose" and first and second:
        return 2 * math.prod(first) * math.prod(second[1:])
    if kind == "Gemm" and first and len(first) == 2:
        transposed = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
        return 2 * made * first[0 if transposed else 1]
    if kind in ("MatMul", "MatMulInteger", "QLinearMatMul") and first:
        return 2 * made * first[-1]
    if kind == "Einsum":
        return _einsum_flops(node, shapes)
    if kind in ("Attention", "MultiHeadAttention") and None not in (shapes + [None, None])[:3]:
        return _attention_flops(node, shapes)
    if kind in ("LSTM", "GRU", "RNN") and first and len(first) == 3 and second and shapes[2]:
        steps, batch, _ = first  # for each step and sequence: inputs and states times their weights
        return 2 * steps * batch * (math.prod(second) + math.prod(shapes[2]))
    return sum(output.elements for output in outputs)


def _einsum_flops(node, shapes) -> int:
    """A multiplication and an addition for each combination of the indices; a copy has none."""
    equation = next(attribute.s.decode() for attribute in node.attribute if attribute.name == "equation")
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    if len(terms) == 1 or None in shapes or len(terms) != len(shapes):
        return 0
    size: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        before, dots, behind = term.partition("...")
        free = len(shape) - len(before) - len(behind)
        indices = [*before, *(f"...{free - number}" for number in range(free if dots else 0)), *behind]
        for index, length in zip(indices, shape, strict=False):
            size[index] = max(length, size.get(index, 1))
    return 2 * (len(terms) - 1) * math.prod(size.values())


def _attention_flops(node, shapes) -> int:
    """The products of queries with keys and of the scores with the values, for tensors ``[batch, heads, length,
    width]`` or ``[batch, length, heads * width]``; keys of the past (opset 23: the fifth input) count, too."""
    query, key, value = shapes[:3]
    past = shapes[4] if node.op_type == "Attention" and len(shapes) > 4 else None
    keys = key[-2] + (past[-2] if past and node.input[4] else 0)
    if len(query) == 4:
        return 2 * math.prod(query[:3]) * keys * (query[3] + value[3])
    numbers = {attribute.name: attribute.i for attribute in node.attribute}
    heads = numbers.get("q_num_heads") or numbers.get("num_heads") or 1
    shared = numbers.get("kv_num_heads") or heads
    return 2 * query[0] * query[1] * keys * (query[2] + value[2] // shared * heads)
