"""Static analysis of a graph: levels, critical path and lower bounds on the step time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from simdev.analysis.bounds import gathered, stay_or_send
from simdev.errors import Infeasible
from simdev.problem.graph import ComputationGraph
from simdev.problem.problem import Problem


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


def check_feasible(problem: Problem) -> None:
    """Raise :class:`Infeasible`, naming the ops and the memories, where it is certain that no placement exists.

    Ops that must share a device need one with kernels for all of them and memory for their persistent bytes; and all
    that only certain devices support must fit in the memories of those, whatever is put where.
    """
    graph, topology = problem.graph, problem.topology
    supported = problem.unit_op_ns >= 0
    for unit in np.flatnonzero(~supported.any(axis=0)):
        raise Infeasible(_contradiction(problem, int(unit)), source=graph.name)
    need, room = problem.unit_persistent_bytes, topology.memory_bytes
    most = np.where(supported, room[:, None], -1).max(axis=0)
    for unit in np.flatnonzero(need > most):
        where = [topology.devices[device].name for device in np.flatnonzero(supported[:, unit])]
        raise Infeasible(
            f"{_ops_of(graph, int(unit))} {_size(need[unit])} of persistent bytes: the largest memory among "
            f"{_listed(where)} holds {_size(most[unit])}",
            source=graph.name,
        )
    for devices in np.unique(supported, axis=1).T:
        inside = ~supported[~devices].any(axis=0)
        total, held = int(need[inside].sum()), int(room[devices].sum())
        if total > held:
            where = [topology.devices[device].name for device in np.flatnonzero(devices)]
            raise Infeasible(
                f"{int(inside[graph.unit_of_op].sum())} ops that only {_listed(where)} can run need "
                f"{_size(total)} of persistent bytes: those memories hold {_size(held)} together",
                source=graph.name,
            )


def _contradiction(problem: Problem, unit: int) -> str:
    """Two ops (or more) of a unit that no device supports together."""
    graph, topology = problem.graph, problem.topology
    ops = np.flatnonzero(graph.unit_of_op == unit)
    kernels = problem.costs.device_op_ns[:, ops] >= 0
    left, parts = np.ones(topology.n_devices, bool), []
    for number in np.argsort(kernels.sum(axis=0), kind="stable"):
        if (left & kernels[:, number]).sum() < left.sum():
            left &= kernels[:, number]
            where = [topology.devices[device].name for device in np.flatnonzero(kernels[:, number])]
            parts.append(f"{graph.op_names[ops[number]]!r} runs only on {_listed(where)}")
    return f"colocation contradicts itself: {' and '.join(parts)}, and they must share a device"


def _ops_of(graph: ComputationGraph, unit: int) -> str:
    ops = np.flatnonzero(graph.unit_of_op == unit)
    first = repr(graph.op_names[ops[0]])
    return f"op {first} needs" if len(ops) == 1 else f"{len(ops)} ops that share a device ({first} first) need"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _size(count: int) -> str:
    return f"{count / 2**30:,.4g} GiB" if count >= 2**20 else f"{count} bytes"


@dataclass(frozen=True)
class Bound:
    """A step time in ns that no placement beats, and the argument that gives it (one of
    :func:`lower_bounds`). ``fits`` is False where no placement can hold the persistent bytes, so that every
    run is infeasible."""

    ns: int
    method: str
    fits: bool = True


def lower_bound(problem: Problem) -> Bound:
    """The largest of :func:`lower_bounds`, the first of equals."""
    return max(lower_bounds(problem), key=lambda bound: bound.ns)


def lower_bounds(problem: Problem) -> list[Bound]:
    """Bounds on the step time (R12), each with its value and method.

    * *critical path*: an op cannot start before all ops of a chain above it are done, and no op is done faster than on
      its fastest device; transfers are taken as free.
    * *load*: a device with ``s`` slots does at most ``s`` ns of work in a ns. Let every colocation unit be divided over
      devices at will, the shares' persistent bytes within each device's memory (the relaxed max-load of Tarnawski et
      al. 2020). Any feasible placement is such a division, so the least possible largest load bounds it.
    * *path and transfers*: an op waits for what comes to its device, and what is too late to come is done there, one
      after the other (:func:`simdev.analysis.bounds.gathered`). The heads and tails that this gives serve the next two.
    * *path and load*: ops with a head of at least ``a`` and a tail of at least ``b`` do all their work between ``a``
      and the end less ``b``: a + b + their load alone, for the best of many ``a`` and ``b``.
    * *stay or send*: tensors too dear to send tie ops to one device, which then takes its time for all of them
      (:func:`simdev.analysis.bounds.stay_or_send`); at least the largest of the others.
    * *issue* (``eager`` only): op v starts no earlier than the sum of the dispatch times up to v, and the longest chain
      below it follows. These sums are heads, too.

    Valid although the linear program is solved in floating point: its dual prices are rounded to integers and weak
    duality is evaluated in whole numbers, so a poor price can only lower the bound. Bounds from loads keep 24
    significant bits, rounded down, to be the same with any version of the solver.
    """
    fastest = fastest_durations(problem)
    below, head = b_level(problem.graph, fastest), t_level(problem.graph, fastest)
    bounds = [(int(below.max()), "critical path")]
    if problem.rules.runtime == "eager":
        issued = np.cumsum(problem.costs.dispatch_ns)
        bounds.append((int((issued + below).max()), "issue"))
        head = np.maximum(head, issued)
    if (problem.unit_op_ns < 0).all(axis=0).any():  # colocated ops without a common device: there is no placement
        return [Bound(ns, method, False) for ns, method in bounds]
    load = _LoadModel.of(problem)
    prices = load.prices()
    fits = prices is not None
    if fits:
        bounds.append((_trimmed(load.dual_value(*prices)), "load"))
    if not fits or any(prices[1]):
        load = load.without_memory()
        prices = load.prices()
        bounds.append((_trimmed(load.dual_value(*prices)), "load"))
    head, tail = gathered(problem, head, below - fastest, fastest)
    bounds.append((int((head + fastest + tail).max()), "path and transfers"))
    bounds.append((_trimmed(_window_bound(problem, head, tail, load, prices[0])), "path and load"))
    known = max(ns for ns, _ in bounds)
    bounds.append((stay_or_send(problem, head, tail + fastest, fastest, known), "stay or send"))
    return [Bound(ns, method, fits) for ns, method in bounds]


def _trimmed(ns: int) -> int:
    """``ns`` rounded down to 24 significant bits."""
    return ns >> (drop := max(0, ns.bit_length() - 24)) << drop


def _window_bound(problem: Problem, head: np.ndarray, tail: np.ndarray, load: _LoadModel, price: list[int]) -> int:
    """Largest a + b + load of the ops with head >= a and tail >= b, over up to 256 values of each.

    The load is bounded by weak duality with the prices of the whole: each op costs at least its cheapest group's price.
    """
    durations = problem.costs.device_op_ns[[devices[0] for devices in load.groups]]
    # Prices with so few bits that no sum of priced work reaches 2**62.
    room = (1 << 62) // max(1, int(np.maximum(durations, 0).max(axis=0).astype(object).sum()))
    most = max(price)
    if not most or not room:
        return 0
    whole = np.array([unit * min(room, 1 << 40) // most for unit in price], np.int64)
    scale = sum(int(unit) * slots for unit, slots in zip(whole, load.slots, strict=True))
    never = np.iinfo(np.int64).max
    cost = np.where(durations >= 0, np.maximum(durations, 0) * whole[:, None], never).min(axis=0)
    a, b = _thresholds(head), _thresholds(tail)
    table = np.zeros((len(a), len(b)), np.int64)
    np.add.at(table, (np.searchsorted(a, head, "right") - 1, np.searchsorted(b, tail, "right") - 1), cost)
    table = table[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1]
    bound = a[:, None] + b[None, :] + -(-table // scale)
    return int(np.where(table > 0, bound, 0).max())


def _thresholds(values: np.ndarray) -> np.ndarray:
    """Up to 256 of the values, ascending, the least among them."""
    found = np.unique(values)
    return found[np.unique(np.linspace(0, len(found) - 1, 256).astype(np.int64))]


@dataclass(frozen=True, eq=False)
class _LoadModel:
    """The load relaxation: units that are alike as classes, devices that are alike as groups.

    int64 ``work (C, G)`` in ns (-1: no kernel), ``size (C, G)`` in persistent bytes, ``count (C,)``; per group the
    device numbers, all their slots and all their memory. Alike devices may share a group: averaging a division over
    them changes no largest load.
    """

    groups: list[list[int]]
    slots: list[int]
    memory: list[int]
    work: np.ndarray
    size: np.ndarray
    count: np.ndarray

    @classmethod
    def of(cls, problem: Problem) -> _LoadModel:
        graph, topology = problem.graph, problem.topology
        slots = np.ones_like(topology.slots) if problem.rules.runtime == "eager" else topology.slots
        alike: dict[tuple, list[int]] = {}
        for device in range(topology.n_devices):
            key = (problem.costs.device_row[device], topology.memory_bytes[device], slots[device],
                   topology.granularity[device])  # fmt: skip
            alike.setdefault(key, []).append(device)
        groups = list(alike.values())
        first = [devices[0] for devices in groups]
        size = np.zeros((graph.n_units, len(groups)), np.int64)
        for column, grain in enumerate(topology.granularity[first]):
            np.add.at(size[:, column], graph.unit_of_op, -(-graph.op_persistent_bytes // grain) * grain)
        rows = np.concatenate([problem.unit_op_ns[first].T, size], axis=1)
        rows, count = np.unique(rows, axis=0, return_counts=True)
        return cls(
            groups,
            [int(slots[devices].sum()) for devices in groups],
            [int(topology.memory_bytes[devices].sum()) for devices in groups],
            rows[:, : len(groups)],
            rows[:, len(groups) :],
            count,
        )

    def without_memory(self) -> _LoadModel:
        return replace(self, size=np.zeros_like(self.size))

    def prices(self) -> tuple[list[int], list[int]] | None:
        """Prices of load and of memory per group (whole numbers), or None where the memory does not suffice."""
        from scipy.optimize import linprog
        from scipy.sparse import coo_array, csr_array, vstack

        work, size, count = self.work, self.size, self.count
        n_classes, n_groups = work.shape
        row, column = np.nonzero(work >= 0)
        variable = np.arange(len(row))
        # Scaled to loads and memories near 1, as the solver's tolerances are absolute.
        unit_ns = max(1.0, float((np.where(work < 0, 0, work).max(axis=1) * count).sum()))
        unit_bytes = np.array([max(1.0, float(limit)) for limit in self.memory])
        shape = (n_groups, len(row) + 1)
        load = coo_array((work[row, column] * count[row] / unit_ns, (column, variable)), shape)
        share = coo_array((-np.array(self.slots, float), (np.arange(n_groups), np.full(n_groups, len(row)))), shape)
        need = coo_array((size[row, column] * count[row] / unit_bytes[column], (column, variable)), shape)
        whole = coo_array((np.ones(len(row)), (row, variable)), (n_classes, len(row) + 1))
        cost = np.zeros(len(row) + 1)
        cost[-1] = 1
        limits = np.concatenate([np.zeros(n_groups), np.array(self.memory, float) / unit_bytes])
        result = linprog(
            cost,
            A_ub=csr_array(vstack([load + share, need])),
            b_ub=limits,
            A_eq=csr_array(whole),
            b_eq=np.ones(n_classes),
        )
        if result.status == 2:
            return None
        prices = np.maximum(0, -result.ineqlin.marginals)
        load_price = [round(price * 2**60) for price in prices[:n_groups]]
        memory_price = [
            round(price * unit_ns / scale * 2**60) for price, scale in zip(prices[n_groups:], unit_bytes, strict=True)
        ]
        return load_price, memory_price

    def dual_value(self, load_price: list[int], memory_price: list[int]) -> int:
        """Weak duality, rounded up: each unit costs at least its cheapest price; less what the memory is worth."""
        groups = range(len(self.slots))
        scale = sum(price * slot for price, slot in zip(load_price, self.slots, strict=True))
        if scale <= 0:
            return 0
        total = -sum(price * limit for price, limit in zip(memory_price, self.memory, strict=True))
        rows = zip(self.work.tolist(), self.size.tolist(), self.count.tolist(), strict=True)
        for times, sizes, units in rows:
            total += units * min(load_price[g] * times[g] + memory_price[g] * sizes[g] for g in groups if times[g] >= 0)
        return max(0, -(-total // scale))
