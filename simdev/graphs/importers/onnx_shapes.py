"""Shapes of the values of an ONNX model that ONNX's own inference leaves open.

ONNX infers the shape of a Reshape, Slice or Pad only if the sizes are constants. The older exporter of PyTorch computes
them in the graph: ``Shape -> Gather -> Concat -> Reshape``. :func:`propagate` passes over the nodes once, in order: it
infers the outputs of a node from the shapes and the small values of its inputs, and evaluates a node of small integer
arithmetic whose inputs are known. Both are done by the package onnx, node by node.
"""

from __future__ import annotations

import math

import numpy as np

MOST_ELEMENTS = 1024  # of a value that is computed: shapes, indices and paddings are far smaller
# The operators that exporters compute sizes with. None runs a subgraph, decodes a file or takes time beyond its sizes.
ARITHMETIC = frozenset(
    "Abs Add And Cast Ceil Concat Constant ConstantOfShape CumSum Div Equal Expand Flatten Floor Gather GatherElements"
    " GatherND Greater GreaterOrEqual Identity Less LessOrEqual Max Min Mod Mul Neg NonZero Not Or Range ReduceMax"
    " ReduceMin ReduceProd ReduceSum Reshape Round ScatterElements ScatterND Shape Sign Size Slice Split Squeeze Sub"
    " Tile Transpose Unsqueeze Where Xor".split()
)


def propagate(model, types: dict) -> dict[str, np.ndarray]:
    """Complete ``types`` (``TypeProto`` by name of the value) in place, and return the values that follow from shapes
    and constants alone, of at most :data:`MOST_ELEMENTS` elements each. What cannot be inferred stays as it is."""
    import onnx
    from onnx import numpy_helper

    opsets = {entry.domain: entry.version for entry in model.opset_import}
    values: dict[str, np.ndarray] = {}
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= MOST_ELEMENTS and tensor.data_location != onnx.TensorProto.EXTERNAL:
            _try(values, [tensor.name], lambda tensor=tensor: [numpy_helper.to_array(tensor)])
    for node in model.graph.node:
        if node.domain not in ("", "ai.onnx"):
            continue
        names = [name for name in node.output if name]
        if not all(shape_of(types.get(name)) is not None for name in names):
            _infer(node, types, values, opsets, model.ir_version)
        if node.op_type in ARITHMETIC and _is_small(node, names, types, values):
            _try(values, names, lambda node=node: _evaluate(node, types, values, opsets))
    return values


def shape_of(about) -> list[int] | None:
    """The sizes of a ``TypeProto``; None unless all are known."""
    if about is None or not about.tensor_type.HasField("shape"):
        return None
    axes = about.tensor_type.shape.dim
    return [axis.dim_value for axis in axes] if all(axis.HasField("dim_value") for axis in axes) else None


def _infer(node, types: dict, values: dict, opsets: dict, ir_version: int) -> None:
    import onnx
    from onnx import numpy_helper, shape_inference

    inputs = dict.fromkeys(name for name in node.input if name)
    try:
        found = shape_inference.infer_node_outputs(
            onnx.defs.get_schema(node.op_type, opsets.get("", opsets.get("ai.onnx", 1)), ""),
            node,
            {name: types[name] for name in inputs},
            {name: numpy_helper.from_array(values[name]) for name in inputs if name in values},
            opset_imports=[onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()],
            ir_version=ir_version,
        )
    except Exception:  # no such operator, an input without a type, or attributes that the operator does not allow
        return
    for name, about in found.items():
        if shape_of(about) is not None:
            types[name] = about


def _is_small(node, names: list[str], types: dict, values: dict) -> bool:
    """Whether the inputs of ``node`` are known, and its outputs small."""
    if node.op_type in ("Shape", "Size"):
        return shape_of(types.get(node.input[0])) is not None if node.input else False
    if any(name and name not in values for name in node.input):
        return False
    shapes = [shape_of(types.get(name)) for name in names]
    if node.op_type == "NonZero":  # at most as many as the input has
        return True
    return all(shape is not None and math.prod(shape) <= MOST_ELEMENTS for shape in shapes)


def _evaluate(node, types: dict, values: dict, opsets: dict) -> list[np.ndarray]:
    from onnx.reference import ReferenceEvaluator

    if node.op_type in ("Shape", "Size"):  # of an array that takes no memory
        shape = shape_of(types[node.input[0]])
        if shape is None:
            raise ValueError(f"the shape of {node.input[0]!r} is not known")
        given = {node.input[0]: np.broadcast_to(np.float32(0), shape)}
    else:
        given = {name: values[name] for name in node.input if name}
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(node, opsets=opsets).run(None, given)


def _try(values: dict, names: list[str], compute) -> None:
    """Add what ``compute`` returns, unless it fails: then the values stay unknown."""
    try:
        found = [np.asarray(value) for value in compute()]
    except Exception:
        return
    if all(value.size <= MOST_ELEMENTS for value in found):
        values.update(zip(names, found, strict=False))
