"""Compare costs with TrioSim's operator tables: training steps of ResNet-50 and VGG-13 on H100, batch 128, f32 tensors.

The tables (sarchlab/triosim, MIT) list every operator with its device time in microseconds (taken here without the
time in which another operator's kernel ran, too), and every tensor with its shape. They hold the only public times of
convolutions, pooling and batch norm with backward on a board of today.
Convolutions may use TF32, which is PyTorch's default. ``memory_efficiency`` of the H100 kinds for norms and pooling is
taken from the ResNet-50 table, so those cases are no test.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from simdev.files import open_text, table_errors
from simdev.problem.costs import CostModel
from simdev.problem.graph import GraphBuilder
from simdev.problem.topology import load_kinds

KIND = "h100-sxm5-80gb"
NAME = re.compile(r"h100_bs128_(?P<model>\w+?)\.csv(\.gz)?")
GRADIENT = "autograd::engine::evaluate_function: {}0"
KINDS = {  # operator -> (kind of op in a graph, name of the case)
    "aten::conv2d": ("convolution", "convolutions"),
    GRADIENT.format("ConvolutionBackward"): ("convolution_backward", "convolutions, backward"),
    "aten::batch_norm": ("native_batch_norm", "batch norm"),
    GRADIENT.format("CudnnBatchNormBackward"): ("native_batch_norm_backward", "batch norm, backward"),
    "aten::max_pool2d": ("max_pool2d_with_indices", "max pooling"),
    GRADIENT.format("MaxPool2DWithIndicesBackward"): ("max_pool2d_with_indices_backward", "max pooling, backward"),
    "aten::relu_": ("relu_", "ReLU"),
    GRADIENT.format("ReluBackward"): ("threshold_backward", "ReLU, backward"),
    "aten::linear": ("addmm", "linear"),
}
CHOSEN = ("batch norm", "max pooling")  # on the ResNet-50 table
MOST_OPERATORS = 1 << 16
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operator:
    kind: str
    case: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    measured_s: float

    @property
    def signature(self) -> str:
        """As captured graphs have it; empty if only bytes matter."""
        sides = [f"f32[{','.join(map(str, shape))}]" for shape in self.inputs]
        if self.kind == "convolution":
            image, weight, result = self.inputs[0], self.inputs[1], self.outputs[0]
            how = f"stride={_strides(image, result)},groups={_groups(image, weight)}"
            return f"convolution({','.join(sides[:2])},{how})->f32[{','.join(map(str, result))}]"
        if self.kind == "convolution_backward":
            gradient, image, weight = self.inputs[:3]
            mask = f"[{bool(prod(self.outputs[0]))},True,False]"
            return (
                f"convolution_backward({','.join(sides[:3])},stride={_strides(image, gradient)},"
                f"groups={_groups(image, weight)},output_mask={mask})->f32[1]"
            )
        if self.kind == "addmm":
            image, weight = self.inputs[0], self.inputs[1]
            return f"addmm(f32[{image[0]},{weight[1]}],f32[{weight[1]},{weight[0]}])->f32[{image[0]},{weight[0]}]"
        return self.kind

    @property
    def flops(self) -> int:
        if self.kind == "convolution":
            return 2 * prod(self.outputs[0]) * prod(self.inputs[1][1:])
        if self.kind == "convolution_backward":
            return 2 * prod(self.inputs[0]) * prod(self.inputs[2][1:]) * (1 + bool(prod(self.outputs[0])))
        return 2 * self.inputs[0][0] * prod(self.inputs[1]) if self.kind == "addmm" else 0


def _strides(image: Shape, result: Shape) -> str:
    step = max(1, round(image[-1] / result[-1]))
    return f"[{step},{step}]"


def _groups(image: Shape, weight: Shape) -> int:
    return image[1] // weight[1]


def read_operators(path: Path) -> list[Operator]:
    """The operators of a table that :data:`KINDS` knows. Raises :class:`InvalidInput` for a damaged table."""
    tensors = path.with_name(path.name.replace(".csv", "_tensors.csv"))
    with table_errors(tensors), open_text(tensors) as file:
        shapes = {row["TensorID"]: _numbers(row["TensorShape"]) for row in csv.DictReader(file)}
    found: list[Operator] = []
    with table_errors(path), open_text(path) as file:
        for row in csv.DictReader(file):
            if row["OperatorName"] not in KINDS or len(found) >= MOST_OPERATORS:
                continue
            kind, case = KINDS[row["OperatorName"]]
            inputs = tuple(shapes[name] for name in re.findall(r"\d+", row["Operator_input"]))
            outputs = tuple(
                shapes.get(name, ()) if int(size) else (0,)
                for name, size in zip(
                    re.findall(r"\d+", row["Operator_output"]), re.findall(r"\d+", row["OutputSize"]), strict=True
                )
            )
            operator = Operator(kind, case, inputs, outputs, 1e-6 * float(row["Operator_cudatimenooverlap"]))
            if not _fits(operator):
                raise ValueError(f"shapes of operator {row['OperatorName']!r}")
            found.append(operator)
    return found


def _fits(op: Operator) -> bool:
    """Whether the shapes have the dimensions that the operator needs."""
    forward = op.kind == "convolution"
    if forward or op.kind == "convolution_backward":
        tensors = [*op.inputs[:2], *op.outputs[:1]] if forward else op.inputs[:3]
        return len(tensors) == 3 and all(len(shape) == 4 and all(shape) for shape in tensors)
    return bool(op.inputs and op.outputs) and (op.kind != "addmm" or [len(s) > 1 for s in op.inputs[:2]] == [True] * 2)


def _numbers(text: str) -> Shape:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def predicted_s(operators: list[Operator]) -> np.ndarray:
    """float64 ``(n,)``: the seconds of the operators, costed as in a captured graph."""
    builder = GraphBuilder("operators")
    for number, op in enumerate(operators):
        sizes = [4 * sum(map(prod, side)) for side in (op.inputs, op.outputs)]
        builder.op(
            str(number), op.kind, signature=op.signature, flops=op.flops, bytes_read=sizes[0], bytes_written=sizes[1]
        )
    graph = builder.build()
    ns = CostModel().op_durations(graph, load_kinds()[KIND])
    order = np.argsort([int(name) for name in graph.op_names])
    return ns[order] / 1e9


def convolution_cases(data: Path) -> Iterator[dict]:
    """A case for each class of operators in each table under ``data``."""
    for path in sorted(data.rglob("h100_bs128_*.csv*")):
        found = NAME.fullmatch(path.name)
        if found is None or found["model"].endswith("_tensors"):
            continue
        operators = read_operators(path)
        predicted = predicted_s(operators)
        for case in dict.fromkeys(op.case for op in operators):
            mine = [number for number, op in enumerate(operators) if op.case == case]
            measured = np.array([operators[number].measured_s for number in mine])
            chosen = found["model"] == "resnet50" and case.startswith(CHOSEN)
            yield {
                "group": f"H100, {case} (TrioSim)",
                "case": f"{found['model']}: {len(mine)} operators",
                "measured_s": float(measured.sum()),
                "predicted_s": float(predicted[mine].sum()),
                "left_out": "bandwidth shares were taken from it" if chosen else "",
            }
