"""Predict peak memory from the allocations of a trace by the memory rules of the simulator (R7).

Each allocation is an op with one output, and the op of its release reads that output. The ops run on one device in the
order of the trace. The first event of the trace gives the bytes that were allocated before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simdev.calibrate.traces import Trace
from simdev.problem.costs import CostTable
from simdev.problem.graph import ComputationGraph, GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Topology
from simdev.sim import simulate

GRANULE = 512  # PyTorch rounds every block on a GPU up to a multiple of this


@dataclass(frozen=True)
class Peak:
    """The measured and the predicted peak of one GPU.

    ``measured_bytes`` is the largest total that the allocator recorded, or -1 if it recorded none. ``before_bytes`` was
    allocated before the first event. ``predicted_bytes`` is the sum of ``before_bytes`` and the simulated peak of the
    events. ``unknown`` is the number of released blocks whose allocation is not in the trace.
    """

    device: int
    events: int
    measured_bytes: int
    before_bytes: int
    predicted_bytes: int
    unknown: int


def replay_memory(trace: Trace) -> list[Peak]:
    """One :class:`Peak` for each GPU with memory events, by device number."""
    return [_replay(trace, int(device)) for device in np.unique(trace.memory.device) if device >= 0]


def graph_peak(graph: ComputationGraph) -> int:
    """The peak bytes of one GPU that runs ``graph`` in program order, without persistent bytes (parameters and
    optimizer state)."""
    kind = DeviceKind("memory", 1 << 50, {"f32": 1.0}, 1.0, granularity=GRANULE)
    costs = _unit_costs(graph)
    problem = Problem(graph, Topology("memory", (Device("gpu", kind),)), costs, Rules(order="program"))
    persistent = int((-(-graph.op_persistent_bytes // GRANULE) * GRANULE).sum())
    return int(simulate(problem, Placement(np.zeros(graph.n_ops, np.int32))).peak_bytes[0]) - persistent


def _unit_costs(graph: ComputationGraph) -> CostTable:
    """A problem with one device on which every op takes 1 ns."""
    return CostTable(
        op_ns=np.ones((1, graph.n_ops), np.int64),
        device_row=np.zeros(1, np.int32),
        transfer_ns=np.zeros((0, graph.n_tensors), np.int64),
        pair_class=np.full((1, 1), -1, np.int32),
        dispatch_ns=np.zeros(graph.n_ops, np.int64),
    )


def _replay(trace: Trace, device: int) -> Peak:
    memory = trace.memory
    mine = memory.device == device
    size, address, total = memory.size[mine], memory.address[mine], memory.allocated[mine]
    recorded = total >= 0
    before = int(total[0] - size[0]) if recorded.any() and recorded[0] else 0
    blocks, unknown = _blocks(size.tolist(), address.tolist())
    known_before = sum(-bytes for _, _, bytes in blocks if bytes < 0)
    graph = GraphBuilder(trace.name)
    ops = [graph.op(str(number), "memory") for number in range(len(size) + 1)]
    for first, last, bytes in blocks:
        tensor = graph.tensor(ops[first], abs(bytes), result=last < 0)
        if last >= 0:
            graph.connect(tensor, ops[last])
    for first, second in zip(ops[:-1], ops[1:], strict=True):
        graph.control(first, second)
    built = graph.build()
    kind = DeviceKind("memory", 1 << 50, {"f32": 1.0}, 1.0, granularity=GRANULE)
    topology = Topology("memory", (Device("gpu", kind),))
    costs = _unit_costs(built)
    problem = Problem(built, topology, costs, Rules(order="program"))
    peak = int(simulate(problem, Placement(np.zeros(built.n_ops, np.int32))).peak_bytes[0])
    measured = int(total[recorded].max()) if recorded.any() else -1
    return Peak(device, len(size), measured, before, max(0, before - known_before) + peak, unknown)


def _blocks(size: list[int], address: list[int]) -> tuple[list[tuple[int, int, int]], int]:
    """``(allocating event + 1, releasing event + 1 or -1, bytes)`` of each block. A block that was allocated before the
    trace belongs to op 0 and has negative bytes. Blocks without addresses are matched by size, the latest first."""
    open_blocks: dict[object, list[int]] = {}
    blocks: list[tuple[int, int, int]] = []
    unknown = 0
    for event, (bytes, place) in enumerate(zip(size, address, strict=True)):
        key = place if place else ("size", abs(bytes))
        if bytes >= 0:
            open_blocks.setdefault(key, []).append(len(blocks))
            blocks.append((event + 1, -1, bytes))
        elif open_blocks.get(key):
            number = open_blocks[key].pop()
            blocks[number] = (blocks[number][0], event + 1, blocks[number][2])
        else:
            unknown += 1
            blocks.append((0, event + 1, bytes))
    return blocks, unknown
