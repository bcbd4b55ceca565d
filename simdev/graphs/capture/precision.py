"""In which number formats a captured step computes."""

from __future__ import annotations

import numpy as np

from simdev.graphs.capture.trace import DTYPES, storage_bytes
from simdev.problem.costs import FREE_KINDS, op_class
from simdev.problem.graph import ComputationGraph
from simdev.problem.opcost.signature import parse_signature

NUMBERS = ("f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2", "c64", "c128")


def precision_of_parameters(parameters) -> str:
    """The dtype that most parameter bytes have; f32 without parameters."""
    total: dict[str, int] = {}
    for parameter in parameters:
        dtype = DTYPES.get(parameter.dtype, str(parameter.dtype))
        total[dtype] = total.get(dtype, 0) + storage_bytes(parameter)
    return max(sorted(total), key=lambda dtype: total[dtype]) if total else "f32"


def precision_of_classes(graph: ComputationGraph) -> dict[str, dict[str, int]]:
    """How many ops of each cost class (``gemm``, ``norm``, ``reduction`` ...) read which dtype first. Casts and ops on
    whole numbers are left out."""
    found: dict[str, dict[str, int]] = {}
    counts = np.bincount(graph.op_signature, minlength=len(graph.signatures))
    for signature, count in zip(graph.signatures, counts.tolist(), strict=True):
        parsed = parse_signature(signature)
        dtypes = [tensor.dtype for tensor in parsed.inputs if tensor.dtype in NUMBERS]
        if parsed.kind in FREE_KINDS or parsed.kind == "_to_copy" or not dtypes:
            continue
        of_class = found.setdefault(op_class(parsed.kind), {})
        of_class[dtypes[0]] = of_class.get(dtypes[0], 0) + count
    return {name: dict(sorted(dtypes.items())) for name, dtypes in sorted(found.items())}


def precision_text(classes: dict[str, dict[str, int]]) -> str:
    """``gemm bf16, norm f32, elementwise bf16 (212) f32 (31)``: the formats of each class, with counts if several."""
    parts = []
    for name, dtypes in classes.items():
        order = sorted(dtypes, key=lambda dtype: -dtypes[dtype])
        text = order[0] if len(order) == 1 else " ".join(f"{dtype} ({dtypes[dtype]:,})" for dtype in order)
        parts.append(f"{name} {text}")
    return ", ".join(parts)
