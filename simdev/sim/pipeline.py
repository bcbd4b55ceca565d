"""Pipelined microbatches (R10): the graph of a step is unrolled over microbatches and run by the same engines.

The problem describes one microbatch. Forward and backward ops are copied per microbatch. Parameters, other ops without
inputs that hold persistent bytes, and the ops of the update phase exist once; updates wait for every microbatch.
Gradients are accumulated in place: the first microbatch's tensor is the buffer. For each further microbatch, an
``accumulate`` op of 1 ns reads that microbatch's gradient, after which it is freed; the update waits for this op.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simdev.analysis.steady import each_microbatch_ns, held_before
from simdev.errors import InvalidInput, UnknownName
from simdev.problem.costs import FREE_KINDS, CostTable
from simdev.problem.graph import PHASES, ComputationGraph, GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.sim.schedule import Schedule

ORDERS = ("gpipe", "1f1b")
FORWARD, BACKWARD, UPDATE = range(len(PHASES))


@dataclass(frozen=True, eq=False)
class PipelineReport:
    """The result of a run of M microbatches.

    * ``total_ns``: from the start to the last completion, update included.
    * ``steady_ns``: ns per microbatch once the pipeline is full: the average distance between completions of successive
      microbatches over the later half of them. For ``gpipe``, this distance of the forward parts plus that of the
      backward parts, because the two pass through the pipeline apart. With fewer than three microbatches, ``total_ns``.
      It is at least the largest load per slot: the last microbatches drain, which can make their distances shorter.
    * ``bubble_fraction``: the share of the stages' slot time until ``total_ns`` in which they were idle.
    * ``stages``: device numbers in pipeline order. ``peak_bytes``, ``overflow_bytes`` int64 ``(D,)``.
    * ``problem``, ``placement``, ``schedule``: the unrolled run, as :func:`simdev.sim.validate` takes them;
      ``microbatch`` int32 per unrolled op, -1 for ops that exist once.
    """

    total_ns: int
    steady_ns: float
    bubble_fraction: float
    stages: tuple[int, ...]
    peak_bytes: np.ndarray
    overflow_bytes: np.ndarray
    problem: Problem
    placement: Placement
    schedule: Schedule
    microbatch: np.ndarray

    @property
    def feasible(self) -> bool:
        """True if the peak of every device fits in its memory."""
        return not self.overflow_bytes.any()


def simulate_pipeline(
    problem: Problem, placement: Placement, microbatches: int, order: str = "gpipe", *, engine: str = "fast"
) -> PipelineReport:
    """Send ``microbatches`` microbatches of ``problem`` through ``placement``.

    Under ``gpipe`` (Huang et al. 2019), each device does all forward work before any backward work. Under ``1f1b``
    (Narayanan et al. 2019), backward work comes first, and at most ``S - s`` microbatches are in progress on stage
    ``s`` of ``S``. The stages are the devices with forward and backward work (without backward work in the graph: with
    forward work), in the order of their first forward op. Raises :class:`InvalidInput` for fewer than one microbatch,
    the runtime ``eager``, or a graph in which forward work waits for backward work or backward work for updates.
    """
    from simdev.sim import simulate

    if order not in ORDERS:
        raise UnknownName("pipeline order", str(order), ORDERS)
    if not isinstance(microbatches, (int, np.integer)) or microbatches < 1:
        raise InvalidInput(f"expected a whole number of at least 1, got {microbatches!r}", source="microbatches")
    if problem.rules.runtime != "dataflow":
        raise InvalidInput("pipelines need the runtime 'dataflow'", source="rules", field="runtime")
    placement.check(problem)
    stages = _stages(problem.graph, placement.devices)
    unrolled = _Unrolled(problem, placement.devices, int(microbatches))
    if order == "1f1b":
        unrolled.limit_in_flight(stages)
    else:
        unrolled.forward_first(stages)
    run, devices, microbatch = unrolled.build(order)
    schedule = simulate(run, devices, engine=engine)
    busy = schedule.busy_ns(devices.devices, problem.topology.n_devices)[list(stages)].sum()
    slot_ns = schedule.step_ns * problem.topology.slots[list(stages)].sum()
    apart = _steady_ns(schedule, run.graph, microbatch, int(microbatches), order)
    return PipelineReport(
        total_ns=schedule.step_ns,
        steady_ns=max(apart, float(_load_ns(problem, placement.devices).max(initial=0.0))),
        bubble_fraction=float(1 - busy / slot_ns) if slot_ns else 0.0,
        stages=stages,
        peak_bytes=schedule.peak_bytes,
        overflow_bytes=schedule.overflow_bytes,
        problem=run,
        placement=devices,
        schedule=schedule,
        microbatch=microbatch,
    )


def _stages(graph: ComputationGraph, devices: np.ndarray) -> tuple[int, ...]:
    work = ~_is_free(graph)
    forward = devices[work & (graph.op_phase == FORWARD)]
    backward = devices[work & (graph.op_phase == BACKWARD)]
    found, first = np.unique(forward, return_index=True)
    both = np.isin(found, backward) if len(backward) else np.ones(len(found), bool)
    return tuple(found[both][np.argsort(first[both])].tolist())


def _is_free(graph: ComputationGraph) -> np.ndarray:
    return np.array([kind in FREE_KINDS for kind in graph.kinds])[graph.op_kind]


class _Unrolled:
    """The graph of all microbatches while it is built. Handles are those of the builder."""

    def __init__(self, problem: Problem, devices: np.ndarray, microbatches: int):
        self.problem, self.graph, self.microbatches = problem, problem.graph, microbatches
        graph = problem.graph
        self.builder = GraphBuilder(f"{graph.name} x {microbatches}")
        self.rows: list[tuple[int, int, int]] = []  # per handle: op or -1, microbatch or -1, device
        self.made: list[list[int]] = []  # per handle: tensor of each output, -1 for a control edge
        self.handle = np.full((microbatches, graph.n_ops), -1, np.int64)
        self.tensor = np.full((microbatches, graph.n_tensors), -1, np.int64)
        self.control: dict[int, int] = {}
        self.device = devices.tolist()
        phase, fixed = graph.op_phase, held_before(graph)
        self.once = fixed | (phase == UPDATE)
        for op in np.flatnonzero(fixed).tolist():
            self._copy(op, 0)
        for microbatch in range(microbatches):
            for op in np.flatnonzero(~self.once).tolist():
                self._copy(op, microbatch)
        for op in np.flatnonzero((phase == UPDATE) & ~fixed).tolist():
            self._update(op)

    def _add(self, name: str, kind: str, op: int, microbatch: int, device: int, **rest) -> int:
        self.rows.append((op, microbatch, device))
        self.made.append([])
        return self.builder.op(name, kind, bytes_read=0, bytes_written=0, **rest)

    def _copy(self, op: int, microbatch: int) -> int:
        graph, once = self.graph, bool(self.once[op])
        first, reads = microbatch == 0, [int(self.tensor[microbatch, t]) for t in self._reads(op)]
        if min(reads, default=0) < 0:
            raise InvalidInput(f"op {graph.op_names[op]!r} waits for an update", source=graph.name, field="op_phase")
        handle = self._add(
            graph.op_names[op] if once else f"{graph.op_names[op]}#{microbatch}",
            graph.kinds[graph.op_kind[op]],
            op,
            -1 if once else microbatch,
            self.device[op],
            inputs=reads,
            persistent_bytes=int(graph.op_persistent_bytes[op]) if first else 0,
            workspace_bytes=int(graph.op_workspace_bytes[op]),
            phase=PHASES[graph.op_phase[op]],
        )
        rows = slice(None) if once else slice(microbatch, microbatch + 1)
        self.handle[rows, op] = handle
        for tensor in range(graph.output_ptr[op], graph.output_ptr[op + 1]):
            self.tensor[rows, tensor] = self.builder.tensor(
                handle,
                int(graph.tensor_bytes[tensor]),
                # Only the first copy of an op carries its persistent bytes, in which these tensors live.
                persistent=bool(graph.tensor_persistent[tensor]),
                result=bool(graph.tensor_result[tensor]),
            )
            self.made[handle].append(tensor)
        return handle

    def _reads(self, op: int) -> list[int]:
        return self.graph.inputs[self.graph.input_ptr[op] : self.graph.input_ptr[op + 1]].tolist()

    def _update(self, op: int) -> None:
        """An update waits for its inputs from every microbatch; data is accumulated into the first microbatch's
        tensor."""
        handle = self._copy(op, 0)
        for tensor in self._reads(op):
            producer = int(self.graph.tensor_producer[tensor])
            if self.once[producer]:
                continue
            for microbatch in range(1, self.microbatches):
                if self.graph.tensor_bytes[tensor] == 0:
                    self.builder.connect(int(self.tensor[microbatch, tensor]), handle)
                else:
                    self.builder.connect(self._control(self._accumulate(tensor, microbatch)), handle)

    def _accumulate(self, tensor: int, microbatch: int) -> int:
        key = -1 - tensor * self.microbatches - microbatch
        if key not in self.control:
            producer = int(self.graph.tensor_producer[tensor])
            self.control[key] = self._add(
                f"{self.graph.op_names[producer]}#{microbatch}/accumulate",
                "barrier",
                -1,
                microbatch,
                self.device[producer],
                phase="backward",
                inputs=[int(self.tensor[0, tensor]), int(self.tensor[microbatch, tensor])],
            )
        return self.control[key]

    def _control(self, handle: int) -> int:
        """The control tensor of an op, created on first use."""
        if handle not in self.control:
            self.control[handle] = self.builder.tensor(handle, 0)
            self.made[handle].append(-1)
        return self.control[handle]

    def _barrier(self, name: str, device: int, before: list[int], after: list[int]) -> None:
        if before and after:
            barrier = self._add(name, "barrier", -1, -1, device, inputs=[self._control(handle) for handle in before])
            for handle in after:
                self.builder.connect(self._control(barrier), handle)

    def _ends(self, device: int, phase: int) -> tuple[list[int], list[int]]:
        """The first and last ops of a phase on a device: those without a predecessor, or successor, in the same set."""
        graph, microbatch_ops = self.graph, ~self.once
        inside = microbatch_ops & (np.array(self.device) == device) & (graph.op_phase == phase)
        source, target = graph.edge_source, graph.consumers
        both = inside[source] & inside[target]
        first, last = inside.copy(), inside.copy()
        first[target[both]] = False
        last[source[both]] = False
        return np.flatnonzero(first).tolist(), np.flatnonzero(last).tolist()

    def forward_first(self, stages: tuple[int, ...]) -> None:
        """GPipe: on each stage, all forward ops come before any backward op."""
        for device in stages:
            _, last = self._ends(device, FORWARD)
            first, _ = self._ends(device, BACKWARD)
            every = range(self.microbatches)
            self._barrier(
                f"flush {device}",
                device,
                [int(self.handle[m, op]) for m in every for op in last],
                [int(self.handle[m, op]) for m in every for op in first],
            )

    def limit_in_flight(self, stages: tuple[int, ...]) -> None:
        """1F1B: stage s begins microbatch m after it has finished microbatch m - (S - s)."""
        for number, device in enumerate(stages):
            first, _ = self._ends(device, FORWARD)
            _, last = self._ends(device, BACKWARD)
            depth = len(stages) - number
            for m in range(depth, self.microbatches):
                self._barrier(
                    f"in flight {device} {m}",
                    device,
                    [int(self.handle[m - depth, op]) for op in last],
                    [int(self.handle[m, op]) for op in first],
                )

    def build(self, order: str) -> tuple[Problem, Placement, np.ndarray]:
        numbering = self.builder._order()
        graph = self.builder.build()
        rows = np.array([self.rows[handle] for handle in numbering], np.int64)
        origin = np.array([tensor for handle in numbering for tensor in self.made[handle]], np.int64)
        op, microbatch, device = rows.T
        costs = _unrolled_costs(self.problem, op, origin)
        rules = Rules(order="priority", contention=self.problem.rules.contention)
        run = Problem(graph, self.problem.topology, costs, rules)
        return run, Placement(device, _priority(graph, op, microbatch, order)), microbatch.astype(np.int32)


def _unrolled_costs(problem: Problem, op: np.ndarray, origin: np.ndarray) -> CostTable:
    """The problem's costs for the unrolled ops and tensors; barriers take 1 ns, control edges the latency."""
    costs, latency = problem.costs, problem.topology.pair_latency_ns
    transfer_ns = (
        costs.transfer_ns[:, np.maximum(origin, 0)]
        if costs.transfer_ns.shape[1]
        else np.ones((len(costs.transfer_ns), len(origin)), np.int64)
    )
    for number in range(len(costs.transfer_ns)):
        pairs = latency[costs.pair_class == number]
        transfer_ns[number, origin < 0] = max(1, int(pairs.max(initial=1)))
    return CostTable(
        np.where(op < 0, 1, costs.op_ns[:, np.maximum(op, 0)]),
        costs.device_row,
        transfer_ns,
        costs.pair_class,
        np.zeros(len(op), np.int64),
    )


def _priority(graph: ComputationGraph, op: np.ndarray, microbatch: np.ndarray, order: str) -> np.ndarray:
    """Barriers come first; then forward before backward ops (gpipe) or backward before forward ops (1f1b), each by
    microbatch and op number; updates come last."""
    rank = {"gpipe": {FORWARD: 1, BACKWARD: 2, UPDATE: 3}, "1f1b": {BACKWARD: 1, FORWARD: 2, UPDATE: 3}}[order]
    turn = np.array([rank[phase] for phase in graph.op_phase.tolist()])
    turn[op < 0] = 0
    priority = np.empty(len(op), np.int64)
    priority[np.lexsort((op, microbatch, turn))] = -np.arange(len(op))
    return priority


def _load_ns(problem: Problem, devices: np.ndarray) -> np.ndarray:
    """float ``(D,)``: work of one microbatch per slot of each device."""
    own = each_microbatch_ns(problem)[devices, np.arange(problem.graph.n_ops)]
    return np.bincount(devices, own, problem.topology.n_devices) / problem.topology.slots


def _steady_ns(schedule: Schedule, graph: ComputationGraph, microbatch: np.ndarray, count: int, order: str) -> float:
    if count < 3:
        return float(schedule.step_ns)
    done = np.zeros((2, count), np.int64)
    for phase in (FORWARD, BACKWARD):
        mine = (microbatch >= 0) & (graph.op_phase == phase)
        np.maximum.at(done[phase], microbatch[mine], schedule.op_finish[mine])
    middle = count // 2
    per = (done[:, -1] - done[:, middle]) / (count - 1 - middle)
    if not done[BACKWARD].any():
        return float(per[FORWARD])
    return float(per.sum() if order == "gpipe" else per[BACKWARD])
