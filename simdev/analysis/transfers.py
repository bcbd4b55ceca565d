"""What transfers add to the bounds on the step time: ops whose tensors are too expensive to send share a device, and
that device needs its time for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simdev.analysis.alive import Alive
from simdev.analysis.doors import NEIGHBOURS, Crossings, Vicinity, doors, window
from simdev.problem.problem import Problem

STEPS = 24  # bisections: the bound is found to the relative accuracy of 2^-24 of the range
MOST = 256  # ops that are considered around each op; with fewer, the bound is weaker and still valid
LOOKS = 1 << 15  # ops whose devices are looked at in all choices of one time; the same holds
NEVER_NS = 1 << 60  # no route
MAX_FAIR_BYTES = 8 << 30  # bytes * 1e9 fits 63 bits (R4)


def least_transfers(problem: Problem) -> np.ndarray:
    """int64 ``(c, m)``: for each class of routes in the cost table, the least time in ns in which each tensor passes,
    whatever the placement.

    Under ``fifo`` and ``none`` (R4) these are the durations of the cost table. Under ``fair`` the cost table is not
    used: a transfer takes the summed latency of its route, and then its bytes at a rate that never exceeds the capacity
    of any channel of the route. If links have ``ranges``, the cost table can be slower than that.
    """
    if problem.rules.contention != "fair":
        return problem.costs.transfer_ns
    least = np.full_like(problem.costs.transfer_ns, NEVER_NS)
    for number, alone in times_alone(problem):
        least[number] = np.minimum(least[number], alone)
    return least


def times_alone(problem: Problem) -> Iterator[tuple[int, np.ndarray]]:
    """Under ``fair``: for each kind of route, its class in the cost table, and int64 ``(m,)`` the ns of a transfer of
    each tensor that shares no channel."""
    costs, topology = problem.costs, problem.topology
    ptr, route = topology.route_csr
    capacity = np.array([channel[3] for channel in topology.channels], np.int64)
    kinds = set()
    for pair in np.flatnonzero((costs.pair_class.ravel() >= 0) & (np.diff(ptr) > 0)):
        rate = int(capacity[route[ptr[pair] : ptr[pair + 1]]].min())
        kinds.add((int(costs.pair_class.flat[pair]), int(topology.pair_latency_ns.flat[pair]), rate))
    size = np.minimum(problem.graph.tensor_bytes, MAX_FAIR_BYTES)  # the simulator refuses larger tensors
    for number, latency, rate in sorted(kinds):
        yield number, np.maximum(latency - (-size * 10**9 // rate), 1)


def gathered(
    problem: Problem, head: np.ndarray, tail: np.ndarray, fastest: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Heads and tails, int64 ``(n,)`` in ns, that count transfers: no op starts before its head, and at least its tail
    passes between its end and the end of the step. ``head`` and ``tail`` are those without transfers
    (:func:`simdev.analysis.levels.t_level`); ``fastest`` are the durations on the fastest device.

    *Argument.* Suppose that op ``v`` starts by ``t``. Each ancestor of ``v`` is on ``v``'s device or on another one.
    For either case it has an earliest start and a least time from its end to ``v``'s start: a neighbour on the same
    side may follow at once, a neighbour on the other side follows after the quickest transfer at least (the ops that
    are not with ``v`` may be on one device or on many), and if the neighbour's side is open, the lesser of the two
    counts. If start, duration and rest exceed ``t`` for one side, the ancestor is on the other side. If they exceed
    ``t`` for both sides, ``v`` cannot start by ``t``. Nor can it if no device has kernels and memory for all ops that
    must be with ``v``, and time to run them, each between its earliest start and its rest; or if tensors that reach
    that device, or leave it, pass too few channels in that time (:func:`simdev.analysis.doors.doors`).

    If ``t`` is not refuted so, the search branches: it puts one op whose side is open on ``v``'s device, then on each
    named device, then on a device that has no name yet. That device gets a name, and it has to run its ops in turn as
    well. The search branches again in each case, and gives up when it has looked at :data:`LOOKS` ops. Bisection finds
    the least ``t`` that is refuted in no way, or a little less. In topological order this gives the heads, in the
    reversed graph the tails.

    The search considers the ancestors whose results would arrive too late from another device, and all ops on paths
    from these ancestors to ``v``. The result of such an op may be in time, but its inputs may not.

    After Papadimitriou and Yannakakis, "Towards an architecture-independent analysis of parallel algorithms", SIAM J.
    Comput. 1990, where all transfers have one delay.
    """
    model = _Alike(problem)
    source, target, tensor = problem.graph.edge_source, problem.graph.consumers, problem.graph.edge_tensor
    last, leave_reach = problem.graph.n_ops - 1, doors(problem, model.kind)
    heads = _gather(model, head, fastest, source, target, tensor, leave_reach[::-1], slice(None))
    tails = _gather(model, tail, fastest, last - target, last - source, tensor, leave_reach, slice(None, None, -1))
    return heads, tails


def _gather(model: _Alike, head, fastest, source, target, tensor, reach_leave, way: slice) -> np.ndarray:
    from simdev.analysis.arrivals import Devices, Lengths, Sends, raise_heads

    order = np.lexsort((source, target))
    first = np.searchsorted(target[order], np.arange(len(head) + 1)).astype(np.int64)
    sending, tensor = model.quickest[tensor[order]].astype(np.int64), tensor[order].astype(np.int64)
    ops = (np.ascontiguousarray(array[..., way]) for array in (fastest, model.unit, model.op_work, model.op_size))
    head = head[way].copy()
    raise_heads(
        head,
        Lengths(*(array.astype(np.int64) for array in ops)),
        Sends(first, source[order].astype(np.int64), tensor, sending),
        Devices(model.n_devices, model.slots, model.memory, np.ascontiguousarray(reach_leave)),
        MOST,
        LOOKS,
    )
    return head[way].copy()


def stay_or_send(problem: Problem, head: np.ndarray, below: np.ndarray, fastest: np.ndarray, known: int) -> int:
    """A bound on the step time in ns, at least ``known``, which is a bound already proven.

    ``head`` int64 ``(n,)``: no op starts earlier. ``below``: at least so much passes from an op's start to the end of
    the step. ``fastest``: durations on the fastest device.

    *Argument.* Suppose that a placement takes at most ``T``. If op ``v`` reads a tensor of op ``u`` on another device,
    the tensor arrives no sooner than ``head(u) + fastest(u) + its least transfer``, and ``below(v)`` follows. If the
    sum exceeds ``T``, ``u`` and ``v`` share a device, as the ops of a colocation group do. Let ``C`` be a set of ops
    that are tied together in this way. Its device runs those with ``head >= a`` and ``tail >= b`` between ``a`` and ``T
    - b``; so ``a + b`` plus their work there, divided by the slots, is at most ``T``. The placement does not exist if
    this fails on every device with kernels and memory for all of ``C``, or if more sets than
    there are slots take more than half of ``T`` each. What ``C`` exchanges with the sets beside it takes time, too,
    wherever they are (:class:`simdev.analysis.doors.Vicinity`). A larger ``T`` ties less and allows more, so
    bisection finds a ``T`` that is refuted, and next to one that is not.

    The memory of a set is its persistent bytes and, for the worst of some moments, the bytes that must be alive on its
    device then (:class:`simdev.analysis.alive.Alive`). At each moment, the devices must hold all sets: at most as many
    sets as there are devices need more than half of the largest memory each.
    """
    alternatives = _Refuter(problem, head, below, fastest)
    low, high = known, alternatives.serial_ns
    if high <= low or not alternatives.refutes(low):
        return low
    for _ in range(STEPS):
        middle = (low + high) // 2
        if middle == low:
            break
        if alternatives.refutes(middle):
            low = middle
        else:
            high = middle
    return low + 1  # low is refuted


class _Alike:
    """Devices that are alike as types, the work and persistent bytes of each op on them, and the least transfer of each
    tensor."""

    def __init__(self, problem: Problem):
        graph, costs, topology = problem.graph, problem.costs, problem.topology
        classes = np.unique(costs.pair_class[~np.eye(topology.n_devices, dtype=bool)])
        classes, least = classes[classes >= 0], least_transfers(problem)
        self.quickest = least[classes].min(axis=0) if len(classes) else np.full(graph.n_tensors, NEVER_NS)
        slots = np.ones_like(topology.slots) if problem.rules.runtime == "eager" else topology.slots
        alike = np.stack([costs.device_row, topology.memory_bytes, slots, topology.granularity], axis=1)
        first, kind = np.unique(alike, axis=0, return_index=True, return_inverse=True)[1:]
        self.kind, self.slots, self.memory = kind, slots[first].astype(np.int64), topology.memory_bytes[first]
        self.all_slots, self.n_devices = int(slots.sum()), topology.n_devices
        self.all_memory = int(topology.memory_bytes.sum())
        self.granularity = topology.granularity[first]
        self.op_work, self.work = costs.device_op_ns[first], problem.unit_op_ns[first]
        grain = topology.granularity[first][:, None]
        self.op_size = -(-graph.op_persistent_bytes // grain) * grain
        self.unit, self.n_units = graph.unit_of_op, graph.n_units


class _Refuter(_Alike):
    def __init__(self, problem: Problem, head: np.ndarray, below: np.ndarray, fastest: np.ndarray):
        super().__init__(problem)
        self.alive = Alive(problem, self.granularity)
        graph, unit = problem.graph, self.unit
        source, target = graph.edge_source, graph.consumers
        ready, quickest = head[source] + fastest[source], self.quickest[graph.edge_tensor]
        self.edges = Crossings(source, target, graph.edge_tensor, ready, below[target], quickest)
        self.doors = doors(problem, self.kind)
        sent = ready + quickest + below[target]
        apart = unit[source] != unit[target]
        self.source, self.target, self.sent = unit[source[apart]], unit[target[apart]], sent[apart]
        order = np.argsort(-self.sent, kind="stable")
        self.source, self.target, self.sent = self.source[order], self.target[order], self.sent[order]
        self.size = np.zeros((len(self.slots), graph.n_units), np.int64)
        for row, sizes in enumerate(self.op_size):
            np.add.at(self.size[row], unit, sizes)
        self.head, self.tail = head, below - fastest
        self.unit_head = np.full(graph.n_units, np.iinfo(np.int64).max)
        self.unit_tail = self.unit_head.copy()
        np.minimum.at(self.unit_head, unit, self.head)
        np.minimum.at(self.unit_tail, unit, self.tail)
        # Beyond this T nothing is tied.
        self.serial_ns = int(self.sent.max(initial=0)) + int(np.maximum(self.work, 0).max(axis=0).sum())

    def refutes(self, limit: int) -> bool:
        """Whether no placement takes at most ``limit`` ns."""
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        tied = int(np.searchsorted(-self.sent, -limit, side="left"))  # the edges with sent > limit come first
        shape = (self.n_units, self.n_units)
        arcs = coo_array((np.ones(tied, np.int8), (self.source[:tied], self.target[:tied])), shape)
        count, label = connected_components(arcs, directed=False)
        least = np.full(count, np.iinfo(np.int64).max)  # time of each set on its best device, per slot
        first = least.copy()
        last = least.copy()
        np.minimum.at(first, label, self.unit_head)
        np.minimum.at(last, label, self.unit_tail)
        possible = np.zeros(count, bool)
        size, crowded = self._sizes(label, count)
        if crowded:
            return True
        for row in range(len(self.slots)):
            time = np.zeros(count, np.int64)
            np.add.at(time, label, np.maximum(self.work[row], 0))
            barred = size[row] > self.memory[row]
            barred[label[self.work[row] < 0]] = True
            share = -(-time // self.slots[row])
            least[~barred] = np.minimum(least[~barred], share[~barred])
            possible |= ~barred & (share + first + last <= limit)
        if not possible.all():
            return True
        whole = self.slots.max() == 1
        if whole and np.count_nonzero(2 * least > limit) > self.all_slots:
            return True
        largest = np.argsort(-least, kind="stable")[:4]
        at = label[self.unit]
        return any(self._late(np.flatnonzero(at == number), size[:, number], limit) for number in largest) or any(
            self._exchanges_too_much(at, number, least, size[:, number], limit) for number in largest
        )

    def _sizes(self, label: np.ndarray, count: int) -> tuple[np.ndarray, bool]:
        """int64 ``(k, count)``: the memory that each set of tied units needs on each type of device, and whether the
        memories cannot hold all sets: more sets than devices need over half of the largest memory, or all together
        need more than all memories."""
        persistent = np.zeros((len(self.slots), count), np.int64)
        for row in range(len(self.slots)):
            np.add.at(persistent[row], label, self.size[row])
        size, crowded = persistent, False
        for moment in self.alive.moments:
            needed = persistent + self.alive.bytes_of(moment, label, count)
            least = needed.min(axis=0)
            crowded |= bool(np.count_nonzero(2 * least > self.memory.max()) > self.n_devices)
            crowded |= int(least.sum()) > self.all_memory
            size = np.maximum(size, needed)
        return size, bool(crowded)

    def _late(self, ops: np.ndarray, size: np.ndarray, limit: int) -> bool:
        """Whether ``ops`` on one device take longer than ``limit`` on every device, for the best ``a`` or ``b``.
        ``size`` int64 ``(k,)``: the memory that they need."""
        for row in range(len(self.slots)):
            work = self.op_work[row][ops]
            if (work < 0).any() or size[row] > self.memory[row]:
                continue
            if window(self.head[ops], self.tail[ops], work, int(self.slots[row])) <= limit:
                return False
        return True

    def _exchanges_too_much(self, at: np.ndarray, number: int, least: np.ndarray, size: np.ndarray, limit: int) -> bool:
        """Whether set ``number`` and what it sends or receives take longer than ``limit`` on every device. ``at`` int
        ``(n,)``: the set of each op. ``least`` int64 ``(count,)``: the work of each set."""
        if not self.doors.any():  # a neighbour elsewhere costs nothing
            return False
        ends = at[self.edges.maker], at[self.edges.reader]
        beside = np.unique(np.concatenate([ends[1][ends[0] == number], ends[0][ends[1] == number]]))
        beside = beside[beside != number]
        beside = beside[np.argsort(-least[beside], kind="stable")[:NEIGHBOURS]]
        place_of = np.full(len(least), -1)
        place_of[number], place_of[beside] = 0, np.arange(1, len(beside) + 1)
        place = place_of[at]
        for row in range(len(self.slots)):
            if size[row] > self.memory[row] or (self.op_work[row][place == 0] < 0).any():
                continue
            near = Vicinity(
                place, self.op_work[row], self.head, self.tail, self.edges, int(self.slots[row]), self.doors[:, row]
            )
            if not near.refutes(limit):
                return False
        return True
