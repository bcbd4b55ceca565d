"""Predict peak memory: from the allocations of a trace by the memory rules of the simulator (R7), and of one rank of a
transformer's training step with sharded data parallelism (FSDP) from its shapes.

Each allocation is an op with one output, and the op of its release reads that output. The ops run on one device in the
order of the trace. The first event of the trace gives the bytes that were allocated before it.

:func:`peak_bytes` counts the rank's shard of f32 weights, gradients and two Adam moments; the gathered bf16 weights of
two layers and the gathered f32 gradient of one; the tensors that each layer keeps for its backward pass; and the loss.
The bf16 logits, f32 logits, log-probabilities and f32 gradient of the loss are in memory at the same time, and they are
the peak of models with a large vocabulary. Sizes are rounded up to the granularity of the allocator. Fragmentation is
not modelled: an eager step reserves some per cent more than it allocates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simdev.calibrate.traces import Trace
from simdev.calibrate.whole_steps import Transformer
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


HALF, FULL = 2, 4
STATES = 4  # weight, gradient, two moments, in f32
RESERVED_BYTES = 1 << 30  # CUDA context, libraries and NCCL's buffers


def _rounded(size: int) -> int:
    return -(-size // GRANULE) * GRANULE


def layer_bytes(model: Transformer, tokens: int, recompute: str) -> int:
    """The bytes that one layer keeps for its backward pass. ``recompute`` is ``none``, ``selective`` (attention and
    every second product are kept, as in torchtitan) or ``full`` (only the input of the layer is kept)."""
    head = model.width // model.heads
    wide, groups = HALF * tokens * model.inner, HALF * tokens * model.kv_heads * head
    narrow, row = HALF * tokens * model.width, FULL * tokens * model.heads
    ups = [wide] * (2 if model.gated else 1)
    products = [narrow, groups, groups, narrow, *ups, narrow]  # q, k, v, projection, up, down
    if recompute == "full":
        return _rounded(narrow)
    if recompute == "selective":
        return sum(map(_rounded, (narrow, *products[::2], narrow, row)))
    norms = [narrow, narrow, narrow, narrow]  # two norms' inputs and results
    return sum(map(_rounded, (*norms, *products[:3], narrow, row, *ups, wide)))


def peak_bytes(
    model: Transformer, batch: int, sequence: int, *, shards: int, recompute: str, embeddings: int = 1
) -> int:
    """The peak of one rank in bytes. ``embeddings`` is 2 if the output layer has weights of its own."""
    tokens = batch * sequence
    table = model.vocabulary * model.width
    parameters = model.parameters + (embeddings - 1) * table
    layer = (model.parameters - table) // model.layers
    states = STATES * FULL * parameters // shards
    gathered = HALF * 2 * layer + FULL * layer + HALF * table
    kept = model.layers * layer_bytes(model, tokens, recompute)
    logits = tokens * model.vocabulary
    loss = _rounded(HALF * logits) + 3 * _rounded(FULL * logits)
    return states + gathered + kept + loss + RESERVED_BYTES
