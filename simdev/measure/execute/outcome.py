"""Turns an execution into a schedule, and proves that the placement computed the right result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simdev.measure.execute.host import Execution
from simdev.measure.execute.program import Program
from simdev.problem.topology import Topology
from simdev.sim import Schedule

TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}  # of the largest entry


@dataclass(frozen=True)
class TensorDifference:
    """The largest differences between two first steps that started from the same state, in units of the tolerance.

    ``result`` covers the results of the step, and ``parameter`` the updated parameters and buffers. Each difference is
    relative to the tensor's largest entry and is divided by the tolerance of its dtype. Optimizer state is not
    compared: if gradients cancel, it holds nothing but rounding errors.
    """

    result: float
    parameter: float

    @property
    def same(self) -> bool:
        """Whether both steps computed the same within the tolerances."""
        return max(self.result, self.parameter) <= 1.0  # False for NaN


def step_schedule(program: Program, execution: Execution, devices: np.ndarray, topology: Topology) -> Schedule:
    """The measured step of median length, as a schedule.

    An op lasts from the moment when its worker starts it until its outputs exist. A transfer lasts as long as its copy.
    ``peak_bytes`` are measured; ``overflow_op`` is unknown (-1).
    """
    step = int(np.argsort(execution.step_ns, kind="stable")[(len(execution.step_ns) - 1) // 2])
    tensor, target = np.nonzero(execution.sent_finish[step])
    graph = program.graph
    overflow = np.maximum(execution.peak_bytes - topology.memory_bytes, 0)
    return Schedule(
        step_ns=int(execution.step_ns[step]),
        op_start=execution.op_start[step].copy(),
        op_finish=execution.op_finish[step].copy(),
        transfer_tensor=tensor.astype(np.int32),
        transfer_source=devices[graph.tensor_producer[tensor]].astype(np.int32),
        transfer_target=target.astype(np.int32),
        transfer_start=execution.sent_start[step][tensor, target],
        transfer_finish=execution.sent_finish[step][tensor, target],
        peak_bytes=execution.peak_bytes.copy(),
        overflow_bytes=overflow,
        overflow_op=np.full(len(overflow), -1, np.int32),
        comm_bytes=int(graph.tensor_bytes[tensor].sum()),
    )


def difference(program: Program, execution: Execution, other: Execution | None = None) -> TensorDifference:
    """Compare the first step with that of ``other``, or with PyTorch's own results if ``other`` is None."""
    results = program.results if other is None else other.results
    result = max(
        (_gap(execution.results[value], expected, program.layouts[value].dtype) for value, expected in results.items()),
        default=0.0,
    )
    parameter = 0.0
    for key in sorted(set(program.value_home.values()) & set(program.homes)):
        home = program.homes[key]
        expected = home.after if other is None else other.homes[key]
        if expected is None:
            raise ValueError("the program does not say what its step leaves in memory")
        parameter = max(parameter, _gap(execution.homes[key], expected, home.dtype))
    return TensorDifference(result, parameter)


def _gap(found: np.ndarray, expected: np.ndarray, dtype) -> float:
    import torch

    a, b = (torch.from_numpy(np.ascontiguousarray(x)).view(dtype).double() for x in (found, expected))
    if torch.isnan(a).any() or torch.isnan(b).any():
        return float("nan")
    scale = max(float(b.abs().max()), 1e-30) if b.numel() else 1.0
    gap = float((a - b).abs().max()) if b.numel() else 0.0
    return gap / scale / TOLERANCES.get(str(dtype).removeprefix("torch."), 1e-12)
