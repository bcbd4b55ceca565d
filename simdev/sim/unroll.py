"""The graph of all microbatches (R10), built from the graph of one by array operations.

Blocks of ops are appended with a sort key each; the keys make a topological order without a search. A *team* is a
device with its replicas, a device alone if there are none. Microbatch ``m`` runs on member ``m % r`` of a team of
``r``. Ops that exist once have a copy on every member. An op without copies is on a team of its device alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simdev.analysis.steady import held_before
from simdev.errors import InvalidInput
from simdev.problem.costs import CostTable
from simdev.problem.graph import PHASES, ComputationGraph
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules

FORWARD, BACKWARD, UPDATE = range(len(PHASES))
BARRIER = "barrier"  # no kernel: it takes 1 ns


@dataclass(frozen=True, eq=False)
class UnrolledPipeline:
    """The problem and the placement of all microbatches.

    ``microbatch`` int32 ``(n,)``, -1 for ops that do not belong to one; ``exchange`` bool ``(n,)``: the ops that add up
    the gradients of replicas.
    """

    problem: Problem
    placement: Placement
    microbatch: np.ndarray
    exchange: np.ndarray


def teams_of(placement: Placement, n_devices: int, microbatches: int) -> list[np.ndarray]:
    """The devices of each device's team, at most one for each microbatch; of a replica itself, the device alone."""
    if placement.replica_of is None:
        return [np.array([device]) for device in range(n_devices)]
    return [
        np.flatnonzero(placement.replica_of == device)[:microbatches]
        if placement.replica_of[device] == device
        else np.array([device])
        for device in range(n_devices)
    ]


def stage_devices(placement: Placement) -> np.ndarray:
    """int ``(n,)``: the device after which the stage of each op is called. A device and its replicas are one stage."""
    return placement.devices if placement.replica_of is None else placement.replica_of[placement.devices]


def unroll(
    problem: Problem, placement: Placement, microbatches: int, order: str, stages: tuple[int, ...]
) -> UnrolledPipeline:
    """The graph of ``microbatches`` microbatches under the schedule ``order``. ``stages`` are the first devices of the
    stages, in pipeline order."""
    parts = _Parts(problem, placement, microbatches, order)
    parts.copy_ops()
    if order == "1f1b":
        parts.limit_in_flight(stages)
    else:
        parts.flush(stages)
    parts.accumulate()
    return parts.build()


class _Parts:
    """Blocks of ops, tensors and edges. Handles number ops and tensors in the order in which they were added."""

    def __init__(self, problem: Problem, placement: Placement, microbatches: int, order: str):
        self.problem, self.graph, self.order, self.count = problem, problem.graph, order, microbatches
        graph, self.home = problem.graph, placement.devices
        self.teams = teams_of(placement, problem.topology.n_devices, microbatches)
        self.copies, self.stage = placement.has_copies, stage_devices(placement)
        self.width = np.where(self.copies, np.array([len(team) for team in self.teams])[self.home], 1)  # of op's teams
        self.member = np.zeros((len(self.teams), max(map(len, self.teams))), np.int64)
        for device, team in enumerate(self.teams):
            self.member[device, : len(team)] = team
        fixed = held_before(graph)
        self.update = (graph.op_phase == UPDATE) & ~fixed
        self.once, self.fixed = fixed | self.update, fixed
        self._check_order()
        self.ops: list[dict] = []
        self.tensors: list[dict] = []
        self.edges: list[tuple[np.ndarray, np.ndarray]] = []  # tensor, reader
        self.waits: list[tuple[np.ndarray, np.ndarray]] = []  # op, and the op that waits for it
        self.n_ops = self.n_tensors = 0

    def _check_order(self) -> None:
        """Refuse graphs whose phases contradict the order of a pipeline."""
        graph = self.graph
        made, read = graph.edge_source, graph.consumers
        late = np.flatnonzero(self.update[made] & ~self.once[read])
        if len(late):
            raise InvalidInput(
                f"op {graph.op_names[read[late[0]]]!r} waits for an update", source=graph.name, field="op_phase"
            )
        moving = ~self.once[made] & ~self.once[read]
        late = np.flatnonzero(moving & (graph.op_phase[made] == BACKWARD) & (graph.op_phase[read] == FORWARD))
        if len(late) and self.order == "gpipe":
            raise InvalidInput(
                f"op {graph.op_names[read[late[0]]]!r} waits for backward work", source=graph.name, field="op_phase"
            )

    # -- blocks ---------------------------------------------------------------------------------------------------

    def _device(self, op, index) -> np.ndarray:
        """The device of copy ``index`` of an op."""
        return np.where(self.copies[op], self.member[self.home[op], index], self.home[op])

    def _add_ops(self, op, microbatch, device, key, names, *, phase=FORWARD, exchange=False) -> np.ndarray:
        """Handles of a block of ops. ``op`` is -1 for barriers; ``key`` ``(3, k)`` sorts all ops."""
        size = len(device)
        columns = {"op": op, "microbatch": microbatch, "device": device, "phase": phase, "exchange": exchange}
        block = {name: np.broadcast_to(np.asarray(value, np.int64), size) for name, value in columns.items()}
        block["key"] = np.stack([np.broadcast_to(np.asarray(part, np.int64), size) for part in key])
        block["names"] = names
        self.ops.append(block)
        self.n_ops += size
        return np.arange(self.n_ops - size, self.n_ops)

    def _add_tensors(self, producer, place, origin, parts=1) -> np.ndarray:
        """Handles of a block of tensors: each is one of ``parts`` equal parts of the tensor ``origin`` of the graph."""
        size = len(producer)
        columns = {"producer": producer, "place": place, "origin": origin, "parts": parts}
        self.tensors.append(
            {name: np.broadcast_to(np.asarray(value, np.int64), size) for name, value in columns.items()}
        )
        self.n_tensors += size
        return np.arange(self.n_tensors - size, self.n_tensors)

    def _turn(self, microbatch, phase, after: int = 0) -> tuple:
        """The first two sort keys of a microbatch's ops: gpipe has all forward before all backward work."""
        backward = 2 * (np.asarray(phase) == BACKWARD) * (self.order == "gpipe")
        return 1 + backward, 3 * np.asarray(microbatch) + 1 + after

    def copy_ops(self) -> None:
        """The copies of all ops, their tensors, and the edges between them, except those into updates."""
        graph, every = self.graph, np.arange(self.count)
        self.first = np.full(graph.n_ops, -1)  # the first copy of an op that exists once
        self._copy_once(np.flatnonzero(self.fixed), 0)
        moving = np.flatnonzero(~self.once)
        self.of = np.full((self.count, graph.n_ops), -1)  # the copy of an op in a microbatch
        op, m = np.tile(moving, self.count), np.repeat(every, len(moving))
        base = [graph.op_names[i] for i in moving.tolist()]
        names = [name + number for number in (f"#{m}" for m in every) for name in base]
        device = self._device(op, m % self.width[op])
        phase = graph.op_phase[op]
        self.of[:, moving] = self._add_ops(op, m, device, (*self._turn(m, phase), op), names, phase=phase).reshape(
            self.count, -1
        )
        self._copy_once(np.flatnonzero(self.update), 6)
        self._copy_tensors()
        self._join_copies()

    def _copy_once(self, ops: np.ndarray, key: int) -> None:
        width = self.width[ops]
        op, index = np.repeat(ops, width), _counted(width)
        given = self.graph.op_names
        names = [given[i] if j == 0 else f"{given[i]}~{j}" for i, j in zip(op, index, strict=True)]
        phase = self.graph.op_phase[op]
        handles = self._add_ops(op, -1, self._device(op, index), (key, op, index), names, phase=phase)
        self.first[ops] = handles[np.cumsum(width) - width]

    def _copy_tensors(self) -> None:
        graph = self.graph
        place = np.arange(graph.n_tensors) - graph.output_ptr[graph.tensor_producer]
        moving = np.flatnonzero(~self.once[graph.tensor_producer])
        self.tensor = np.full((self.count, graph.n_tensors), -1)  # by microbatch
        producer = self.of[:, graph.tensor_producer[moving]].ravel()
        self.tensor[:, moving] = self._add_tensors(
            producer, np.tile(place[moving], self.count), np.tile(moving, self.count)
        ).reshape(self.count, -1)
        kept = np.flatnonzero(self.once[graph.tensor_producer])
        width = self.width[graph.tensor_producer[kept]]
        t, index = np.repeat(kept, width), _counted(width)
        handles = self._add_tensors(self.first[graph.tensor_producer[t]] + index, place[t], t)
        self.tensor_first = np.full(graph.n_tensors, -1)
        self.tensor_first[kept] = handles[np.cumsum(width) - width]

    def _join_copies(self) -> None:
        """Edges between copies. Copy ``j`` of an op reads the copy ``j`` (modulo the team) of what exists once."""
        graph, every = self.graph, np.arange(self.count)[:, None]
        made, read, tensor = graph.edge_source, graph.consumers, graph.edge_tensor
        inner = ~self.once[made] & ~self.once[read]
        self.edges.append((self.tensor[:, tensor[inner]].ravel(), self.of[:, read[inner]].ravel()))
        given = self.once[made] & ~self.once[read]
        source = self.tensor_first[tensor[given]] + every % self.width[made[given]]
        self.edges.append((source.ravel(), self.of[:, read[given]].ravel()))
        after = np.flatnonzero(self.once[made] & self.update[read])
        width = self.width[read[after]]
        edge, index = np.repeat(after, width), _counted(width)
        source = self.tensor_first[tensor[edge]] + index % self.width[made[edge]]
        self.edges.append((source, self.first[read[edge]] + index))

    # -- schedules ------------------------------------------------------------------------------------------------

    def _ends(self, device: int, phase: int) -> tuple[np.ndarray, np.ndarray]:
        """The first and last ops of a phase on a stage: those without a predecessor, or successor, in the same set."""
        graph = self.graph
        inside = ~self.once & (self.stage == device) & (graph.op_phase == phase)
        source, target = graph.edge_source, graph.consumers
        both = inside[source] & inside[target]
        first, last = inside.copy(), inside.copy()
        first[target[both]] = False
        last[source[both]] = False
        return np.flatnonzero(first), np.flatnonzero(last)

    def _barriers(self, names: list[str], device: np.ndarray, key, before: np.ndarray, after: np.ndarray) -> None:
        """A barrier for each row of ``before`` and ``after``, handles int ``(k, ...)``."""
        if not before.size or not after.size:
            return
        barrier = self._add_ops(-1, -1, device, key, names)
        self.waits.append((before.ravel(), np.repeat(barrier, before.shape[1])))
        self.waits.append((np.repeat(barrier, after.shape[1]), after.ravel()))

    def flush(self, stages: tuple[int, ...]) -> None:
        """GPipe: on each device of a stage, all forward ops come before any backward op."""
        for stage in stages:
            (_, last), (first, _) = self._ends(stage, FORWARD), self._ends(stage, BACKWARD)
            for index, device in enumerate(self.teams[stage]):
                mine = np.arange(index, self.count, len(self.teams[stage]))
                before, after = (self.of[np.ix_(mine, ops)].reshape(1, -1) for ops in (last, first))
                self._barriers([f"flush {device}"], np.array([device]), (2, 0, device), before, after)

    def limit_in_flight(self, stages: tuple[int, ...]) -> None:
        """1F1B: a device begins a microbatch after it has finished the one that it began ``depth`` microbatches
        before."""
        behind = np.cumsum([len(self.teams[stage]) for stage in stages[::-1]])[::-1]  # devices from the stage on
        for stage, devices in zip(stages, behind, strict=True):
            (first, _), (_, last) = self._ends(stage, FORWARD), self._ends(stage, BACKWARD)
            width = len(self.teams[stage])
            m = np.arange(-(-int(devices) // width) * width, self.count)
            lag = -(-int(devices) // width) * width
            device = self.teams[stage][m % width]
            names = [f"in flight {d} {number}" for d, number in zip(device, m, strict=True)]
            self._barriers(names, device, (1, 3 * m, device), self.of[np.ix_(m - lag, last)], self.of[np.ix_(m, first)])

    # -- gradients ------------------------------------------------------------------------------------------------

    def accumulate(self) -> None:
        """Updates wait for every microbatch. Gradients are added up in the first tensor on each device of a team, and
        then, if the team has several, among them."""
        graph = self.graph
        into = ~self.once[graph.edge_source] & self.update[graph.consumers]
        readers: dict[int, list[np.ndarray]] = {}
        for edge in np.flatnonzero(into).tolist():
            update = graph.consumers[edge]
            copies = self.first[update] + np.arange(self.width[update])
            readers.setdefault(int(graph.edge_tensor[edge]), []).append(copies)
        for tensor, found in readers.items():
            waiting = np.concatenate(found)
            if graph.tensor_bytes[tensor] == 0:
                self._join(self.tensor[:, tensor], waiting)
            else:
                self._accumulate(tensor, waiting)

    def _join(self, tensors: np.ndarray, readers: np.ndarray) -> None:
        """All of ``readers`` read all of ``tensors``."""
        self.edges.append((np.repeat(tensors, len(readers)), np.tile(readers, len(tensors))))

    def _accumulate(self, gradient: int, readers: np.ndarray) -> None:
        maker = self.graph.tensor_producer[gradient]
        width, name = int(self.width[maker]), self.graph.op_names[maker]
        m = np.arange(width, self.count)
        key = (*self._turn(m, BACKWARD, 1), gradient)
        names = [f"{name}#{number}/accumulate" for number in m]
        added = self._add_ops(-1, m, self._device(maker, m % width), key, names, phase=BACKWARD)
        self.edges += [(self.tensor[m % width, gradient], added), (self.tensor[m, gradient], added)]
        if width > 1:
            self._exchange(gradient, width, added, m % width, readers)
        else:
            self._join(self.tensor[:1, gradient], readers)
            self.waits.append((np.repeat(added, len(readers)), np.tile(readers, len(added))))

    def _exchange(self, gradient: int, width: int, added: np.ndarray, index: np.ndarray, readers: np.ndarray) -> None:
        """Reduce and scatter, then gather: each member of a team adds up one part of the gradient and sends it to all
        readers. A member sends ``2 (r - 1) / r`` of the gradient's bytes, as in a ring."""
        maker = self.graph.tensor_producer[gradient]
        name, team = self.graph.op_names[maker], self.member[self.home[maker], :width]
        every, own = np.arange(width), self.tensor[:width, gradient]
        barrier = {"phase": BACKWARD, "exchange": True}
        split = self._add_ops(-1, -1, team, (4, gradient, every), [f"{name}~{i}/split" for i in every], **barrier)
        total = self._add_ops(-1, -1, team, (5, gradient, every), [f"{name}~{i}/sum" for i in every], **barrier)
        self.edges += [(own, split), (own, total)]
        self.waits += [(added, split[index]), (split, total)]
        source, target = (part.ravel() for part in np.meshgrid(every, every, indexing="ij"))
        source, target = source[source != target], target[source != target]
        parts = self._add_tensors(split[source], target, gradient, width)
        self.edges.append((parts, total[target]))
        self._join(self._add_tensors(total, 0, gradient, width), readers)

    # -- the graph ------------------------------------------------------------------------------------------------

    def build(self) -> UnrolledPipeline:
        ops = {name: np.concatenate([block[name] for block in self.ops]) for name in self.ops[0] if name not in LISTS}
        key = np.concatenate([block["key"] for block in self.ops], axis=1)
        names = [name for block in self.ops for name in block["names"]]
        sorted_ops = np.lexsort(key[::-1])
        rank = np.empty(self.n_ops, np.int64)
        rank[sorted_ops] = np.arange(self.n_ops)
        self._add_signals()
        tensors = {name: np.concatenate([block[name] for block in self.tensors]) for name in self.tensors[0]}
        sorted_tensors = np.lexsort([tensors["place"], rank[tensors["producer"]]])
        tensor_rank = np.empty(self.n_tensors, np.int64)
        tensor_rank[sorted_tensors] = np.arange(self.n_tensors)
        tensor, reader = (np.concatenate(side) for side in zip(*self.edges, strict=True))
        pair = np.sort(tensor_rank[tensor] * self.n_ops + rank[reader])  # np.unique hashes, which takes longer
        pair = pair[np.diff(pair, prepend=-1) > 0]
        graph = self._graph(
            {name: column[sorted_ops] for name, column in ops.items()},
            [names[handle] for handle in sorted_ops.tolist()],
            {name: column[sorted_tensors] for name, column in tensors.items()},
            rank,
            pair,
        )
        op, microbatch = ops["op"][sorted_ops], ops["microbatch"][sorted_ops]
        costs = self._costs(op, tensors["origin"][sorted_tensors], tensors["parts"][sorted_tensors])
        rules = Rules(order="priority", contention=self.problem.rules.contention)
        run = Problem(graph, self.problem.topology, costs, rules)
        placement = Placement(ops["device"][sorted_ops], _priority(graph, op, microbatch, self.order))
        return UnrolledPipeline(run, placement, microbatch.astype(np.int32), ops["exchange"][sorted_ops].astype(bool))

    def _add_signals(self) -> None:
        """A control tensor for every op that others wait for, behind its other tensors."""
        before, after = (np.concatenate(side) for side in zip(*self.waits, (NONE, NONE), strict=True))
        source, which = np.unique(before, return_inverse=True)
        last = max(self.graph.n_tensors, self.member.shape[1])  # a split has a part for each device of its team
        signal = self._add_tensors(source, last, -1)
        self.edges.append((signal[which], after))

    def _graph(self, ops, names, tensors, rank, pair) -> ComputationGraph:
        graph, op = self.graph, ops["op"]
        kinds = graph.kinds if BARRIER in graph.kinds else (*graph.kinds, BARRIER)
        layers = graph.layers if "" in graph.layers else (*graph.layers, "")
        real = np.maximum(op, 0)
        # Only the first copy of an op on a device carries its persistent bytes, in which its persistent tensors live.
        carries = (op >= 0) & (ops["microbatch"] < self.width[real])
        origin, zeros = tensors["origin"], np.zeros(len(op), np.int64)
        data = np.maximum(origin, 0)
        whole = (origin >= 0) & (tensors["parts"] == 1)
        size = -(-graph.tensor_bytes[data] // tensors["parts"]) if graph.n_tensors else np.zeros(len(origin), np.int64)
        tensor, reader = pair // len(op), pair % len(op)
        return ComputationGraph(
            name=f"{graph.name} x {self.count}",
            kinds=kinds,
            signatures=kinds,
            layers=layers,
            op_names=names,
            op_kind=(kind := np.where(op < 0, kinds.index(BARRIER), graph.op_kind[real])),
            op_signature=kind,
            op_layer=np.where(op < 0, layers.index(""), graph.op_layer[real]),
            op_phase=ops["phase"],
            op_flops=zeros,
            op_bytes_read=zeros,
            op_bytes_written=zeros,
            op_persistent_bytes=np.where(carries, graph.op_persistent_bytes[real], 0),
            op_workspace_bytes=np.where(op < 0, 0, graph.op_workspace_bytes[real]),
            op_group=zeros - 1,
            tensor_producer=rank[tensors["producer"]],
            tensor_bytes=np.where(origin < 0, 0, size),
            tensor_persistent=whole & _at(graph.tensor_persistent, data),
            tensor_result=whole & _at(graph.tensor_result, data),
            consumer_ptr=np.searchsorted(tensor, np.arange(len(origin) + 1)),
            consumers=reader,
        )

    def _costs(self, op: np.ndarray, origin: np.ndarray, parts: np.ndarray) -> CostTable:
        """The problem's costs for the copies; barriers take 1 ns, control edges the latency of the route, and a part of
        a tensor the latency and its part of the rest."""
        costs, latency = self.problem.costs, self.problem.topology.pair_latency_ns
        transfer_ns = np.ones((len(costs.transfer_ns), len(origin)), np.int64)
        for number, row in enumerate(costs.transfer_ns):
            least = max(1, int(latency[costs.pair_class == number].max(initial=1)))
            whole = _at(row, np.maximum(origin, 0))
            part = np.where(parts > 1, np.minimum(least, whole) + -(-np.maximum(whole - least, 0) // parts), whole)
            transfer_ns[number] = np.where(origin < 0, least, part)
        op_ns = np.where(op < 0, 1, costs.op_ns[:, np.maximum(op, 0)])
        return CostTable(op_ns, costs.device_row, transfer_ns, costs.pair_class, np.zeros(len(op), np.int64))


LISTS = ("key", "names")
NONE = np.zeros(0, np.int64)


def _at(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """``values[index]``; zeros if there are no values, so that all of them stand for nothing."""
    return values[index] if len(values) else np.zeros(len(index), values.dtype)


def _counted(width: np.ndarray) -> np.ndarray:
    """0 .. w - 1 for each width, in one array."""
    return np.arange(width.sum()) - np.repeat(np.cumsum(width) - width, width)


def _priority(graph: ComputationGraph, op: np.ndarray, microbatch: np.ndarray, order: str) -> np.ndarray:
    """Barriers come first; then forward before backward ops (gpipe) or backward before forward ops (1f1b), each by
    microbatch and op number; updates come last."""
    rank = {"gpipe": (1, 2, 3), "1f1b": (2, 1, 3)}[order]
    turn = np.where(op < 0, 0, np.array(rank)[graph.op_phase])
    priority = np.empty(len(op), np.int64)
    priority[np.lexsort((op, microbatch, turn))] = -np.arange(len(op))
    return priority
