"""Static analysis of a graph: levels, critical path and lower bounds on the step time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simdev.graph import ComputationGraph
from simdev.problem import Problem


def average_durations(problem: Problem) -> np.ndarray:
    """int64 ``(n,)``: duration of each op averaged over the devices that support it, rounded down."""
    durations = problem.costs.device_op_ns
    supported = durations > 0
    return np.where(supported, durations, 0).sum(axis=0) // np.maximum(supported.sum(axis=0), 1)


def fastest_durations(problem: Problem) -> np.ndarray:
    """int64 ``(n,)``: duration of each op on the device that runs it fastest."""
    durations = problem.costs.device_op_ns
    return np.where(durations > 0, durations, np.iinfo(np.int64).max).min(axis=0)


def average_transfers(problem: Problem) -> np.ndarray:
    """int64 ``(m,)``: transfer time of each tensor averaged over the ordered pairs of distinct devices that have a
    route, rounded down; 0 where no pair has."""
    pair_class = problem.costs.pair_class
    classes, counts = np.unique(pair_class[~np.eye(len(pair_class), dtype=bool)], return_counts=True)
    counts, classes = counts[classes >= 0], classes[classes >= 0]
    if not len(classes):
        return np.zeros(problem.graph.n_tensors, np.int64)
    return (problem.costs.transfer_ns[classes] * counts[:, None]).sum(axis=0) // counts.sum()


def b_level(graph: ComputationGraph, duration: np.ndarray, transfer: np.ndarray | None = None) -> np.ndarray:
    """int64 ``(n,)``: longest path from the start of each op to the end of the graph, its own duration included.

    ``duration`` int64 ``(n,)`` ns; ``transfer`` int64 ``(m,)`` ns charged on every edge of a tensor (default: free).
    """
    ptr, starts = graph.consumer_ptr.tolist(), graph.output_ptr.tolist()
    consumers, level = graph.consumers.tolist(), duration.tolist()
    delay = [0] * graph.n_tensors if transfer is None else transfer.tolist()
    for op in range(graph.n_ops - 1, -1, -1):
        longest = 0
        for tensor in range(starts[op], starts[op + 1]):
            for consumer in consumers[ptr[tensor] : ptr[tensor + 1]]:
                if level[consumer] + delay[tensor] > longest:
                    longest = level[consumer] + delay[tensor]
        level[op] += longest
    return np.array(level, np.int64)


def t_level(graph: ComputationGraph, duration: np.ndarray, transfer: np.ndarray | None = None) -> np.ndarray:
    """int64 ``(n,)``: longest path from the start of the graph to the start of each op (arguments as
    :func:`b_level`)."""
    ptr, inputs = graph.input_ptr.tolist(), graph.inputs.tolist()
    producer, length = graph.tensor_producer.tolist(), duration.tolist()
    delay = [0] * graph.n_tensors if transfer is None else transfer.tolist()
    level = [0] * graph.n_ops
    for op in range(graph.n_ops):
        for tensor in inputs[ptr[op] : ptr[op + 1]]:
            source = producer[tensor]
            level[op] = max(level[op], level[source] + length[source] + delay[tensor])
    return np.array(level, np.int64)


def levels(graph: ComputationGraph) -> np.ndarray:
    """int32 ``(n,)``: number of ops before each op on the longest chain to it; sources are at 0."""
    return t_level(graph, np.ones(graph.n_ops, np.int64)).astype(np.int32)


def critical_path(graph: ComputationGraph, duration: np.ndarray, transfer: np.ndarray | None = None) -> np.ndarray:
    """int32: the ops of a longest path in order (arguments as :func:`b_level`; the lowest op numbers on ties)."""
    below = b_level(graph, duration, transfer)
    op, path = int(np.argmax(below)), []
    while op >= 0:
        path.append(op)
        rest, op_next = below[op] - duration[op], -1
        for tensor in range(graph.output_ptr[op], graph.output_ptr[op + 1]):
            delay = 0 if transfer is None else transfer[tensor]
            for consumer in graph.consumers[graph.consumer_ptr[tensor] : graph.consumer_ptr[tensor + 1]]:
                if below[consumer] + delay == rest and (op_next < 0 or consumer < op_next):
                    op_next = int(consumer)
        op = op_next
    return np.array(path, np.int32)


@dataclass(frozen=True)
class Bound:
    """A step time in ns that no placement beats, and the argument that gives it (``critical path``, ``load`` or
    ``issue``). ``fits`` is False where no placement can hold the persistent bytes: every run is infeasible."""

    ns: int
    method: str
    fits: bool = True


def lower_bound(problem: Problem) -> Bound:
    """The largest of three bounds on the step time (R12).

    * *critical path*: an op cannot start before all ops of a chain above it are done, and no op is done faster than on
      its fastest device; transfers are taken as free.
    * *load*: a device with ``s`` slots does at most ``s`` ns of work in a ns. Let every colocation unit be divided over
      devices at will, the shares' persistent bytes within each device's memory (the relaxed max-load of Tarnawski et
      al. 2020). Any feasible placement is such a division, so the least possible largest load bounds it.
    * *issue* (``eager`` only): op v starts no earlier than the sum of the dispatch times up to v, and the longest chain
      below it follows.

    Exact although the linear program is solved in floating point: its dual prices are rounded to integers and weak
    duality is evaluated in whole numbers, so a poor price can only lower the bound.
    """
    below = b_level(problem.graph, fastest_durations(problem))
    bounds = [(int(below.max()), "critical path")]
    load, fits = _load_bound(problem)
    bounds.append((load, "load"))
    if problem.rules.runtime == "eager":
        bounds.append((int((np.cumsum(problem.costs.dispatch_ns) + below).max()), "issue"))
    ns, method = max(bounds, key=lambda bound: bound[0])
    return Bound(ns, method, fits)


def _load_bound(problem: Problem) -> tuple[int, bool]:
    """The fractional load bound in ns, and whether the persistent bytes fit when divided at will."""
    groups, work, size, count = _load_classes(problem)
    slots = [len(devices) * _slots(problem, devices[0]) for devices in groups]
    memory = [len(devices) * int(problem.topology.memory_bytes[devices[0]]) for devices in groups]
    duals = _load_duals(work, size, count, slots, memory)
    fits = duals is not None
    if not fits:
        size = np.zeros_like(size)
        duals = _load_duals(work, size, count, slots, memory)
    return _dual_value(work, size, count, slots, memory, *duals), fits


def _slots(problem: Problem, device: int) -> int:
    return 1 if problem.rules.runtime == "eager" else int(problem.topology.slots[device])


def _load_classes(problem: Problem) -> tuple[list[list[int]], np.ndarray, np.ndarray, np.ndarray]:
    """Devices that are alike as groups, and units that are alike as classes.

    Returns the groups, then int64 ``work (C, G)`` in ns (-1: no kernel), ``size (C, G)`` in persistent bytes and
    ``count (C,)``. Alike devices may share a group: averaging a division over them changes no largest load.
    """
    graph, topology = problem.graph, problem.topology
    alike: dict[tuple, list[int]] = {}
    for device in range(topology.n_devices):
        key = (problem.costs.device_row[device], topology.memory_bytes[device], topology.slots[device],
               topology.granularity[device])  # fmt: skip
        alike.setdefault(key, []).append(device)
    groups = list(alike.values())
    first = [devices[0] for devices in groups]
    size = np.zeros((graph.n_units, len(groups)), np.int64)
    for column, grain in enumerate(topology.granularity[first]):
        np.add.at(size[:, column], graph.unit_of_op, -(-graph.op_persistent_bytes // grain) * grain)
    rows = np.concatenate([problem.unit_op_ns[first].T, size], axis=1)
    rows, count = np.unique(rows, axis=0, return_counts=True)
    return groups, rows[:, : len(groups)], rows[:, len(groups) :], count


def _load_duals(work, size, count, slots, memory) -> tuple[list[int], list[int]] | None:
    """Prices of load and of memory per group (whole numbers), or None where the memory does not suffice."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_array, csr_array, vstack

    n_classes, n_groups = work.shape
    row, column = np.nonzero(work >= 0)
    variable = np.arange(len(row))
    # Scaled to loads and memories near 1, as the solver's tolerances are absolute.
    unit_ns = max(1.0, float((np.where(work < 0, 0, work).max(axis=1) * count).sum()))
    unit_bytes = np.array([max(1.0, float(limit)) for limit in memory])
    shape = (n_groups, len(row) + 1)
    load = coo_array((work[row, column] * count[row] / unit_ns, (column, variable)), shape)
    share = coo_array((-np.array(slots, float), (np.arange(n_groups), np.full(n_groups, len(row)))), shape)
    need = coo_array((size[row, column] * count[row] / unit_bytes[column], (column, variable)), shape)
    whole = coo_array((np.ones(len(row)), (row, variable)), (n_classes, len(row) + 1))
    cost = np.zeros(len(row) + 1)
    cost[-1] = 1
    limits = np.concatenate([np.zeros(n_groups), np.array(memory, float) / unit_bytes])
    result = linprog(
        cost, A_ub=csr_array(vstack([load + share, need])), b_ub=limits, A_eq=csr_array(whole), b_eq=np.ones(n_classes)
    )
    if result.status == 2:
        return None
    prices = np.maximum(0, -result.ineqlin.marginals)
    load_price = [round(price * 2**60) for price in prices[:n_groups]]
    memory_price = [
        round(price * unit_ns / scale * 2**60) for price, scale in zip(prices[n_groups:], unit_bytes, strict=True)
    ]
    return load_price, memory_price


def _dual_value(work, size, count, slots, memory, load_price, memory_price) -> int:
    """Weak duality: every unit costs at least its cheapest group's price, less what the memory is worth; rounded up."""
    groups = range(len(slots))
    scale = sum(price * slot for price, slot in zip(load_price, slots, strict=True))
    if scale <= 0:
        return 0
    total = -sum(price * limit for price, limit in zip(memory_price, memory, strict=True))
    for times, sizes, units in zip(work.tolist(), size.tolist(), count.tolist(), strict=True):
        total += units * min(load_price[g] * times[g] + memory_price[g] * sizes[g] for g in groups if times[g] >= 0)
    return max(0, -(-total // scale))
