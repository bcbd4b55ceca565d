"""Step time by constraint programming, under the execution model's own rules (MODEL.md), with a proven bound.

Optional intervals stand for an op on the device that runs it and for a transfer on the route that carries it. Two
intervals never overlap on a one-slot device (R1) or, with ``fifo`` contention, on a channel (R4). The model relaxes the
rules: the solver may order ops and transfers freely, which the queues of R2 and R4 may not; memory is the sum of
persistent bytes; and under ``eager`` (R11) an op only waits for its dispatch. Every schedule that the rules allow is
therefore a solution, and the proven bound is below every feasible step time. The solver is OR-Tools CP-SAT; times are
rounded down to whole ticks, so that bounds stay valid.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from simdev.analysis.levels import b_level, fastest_durations, t_level
from simdev.analysis.transfers import NEVER_NS, least_transfers
from simdev.errors import InvalidInput, Unsupported
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem

TICKS = 1 << 22  # of the horizon; finer times slow the solver down and do not improve its results


@dataclass(frozen=True)
class Makespan:
    """The solutions and the proven bound of a run.

    ``found``: devices per unit, int ``(k, units)``, of the solutions, best last. ``bound_ns`` holds for every placement
    that satisfies the given constraints. ``status`` is CP-SAT's.
    """

    found: np.ndarray
    model_ns: int
    bound_ns: int
    status: str


def solve_makespan(
    problem: Problem,
    *,
    allowed: np.ndarray | None = None,
    tie: np.ndarray | None = None,
    size: np.ndarray | None = None,
    hint: np.ndarray | None = None,
    upper_ns: int | None = None,
    seconds: float = 10.0,
    wall_seconds: float = math.inf,
    seed: int = 0,
) -> Makespan:
    """Minimise the step time of ``problem`` over placements.

    ``allowed`` bool ``(D, units)`` (default: wherever there is a kernel); units of equal ``tie`` int ``(units,)`` share
    a device (default: none); ``size`` int ``(units,)`` bytes that add up within each memory (default: persistent).
    ``hint`` int ``(units,)`` is a start, ``upper_ns`` a step time that the model must not exceed. ``seconds`` is
    CP-SAT's deterministic time, which is the same on every host. ``wall_seconds`` is a safety net that depends on the
    host; it includes the time to build the model. Raises :class:`Unsupported` if nothing fits.
    """
    began = time.monotonic()
    from ortools.sat.python import cp_model

    graph, durations = problem.graph, problem.costs.device_op_ns
    supported = problem.unit_op_ns >= 0
    allowed = supported if allowed is None else allowed & supported
    tie = np.arange(graph.n_units) if tie is None else np.unique(tie, return_inverse=True)[1]
    together = np.ones((len(allowed), int(tie.max()) + 1), bool)
    np.logical_and.at(together.T, tie, allowed.T)
    if not together.any(axis=0).all():
        raise Unsupported(f"{graph.name}: no device supports all ops that must stay together")
    horizon = int(upper_ns) if upper_ns is not None else _serial(problem, together[:, tie])
    tick = max(1, -(-horizon // TICKS))
    builder = _Builder(cp_model, problem, together, tie[graph.unit_of_op], tick, -(-horizon // tick))
    builder.memory(tie, problem.unit_persistent_bytes if size is None else size)
    if hint is not None:
        home = np.zeros(together.shape[1], np.int64)
        home[tie] = hint
        for (device, cluster), variable in builder.on.items():
            if len(builder.places[cluster]) > 1:  # a cluster with one possible device is a shared constant
                builder.model.add_hint(variable, int(home[cluster] == device))
        builder.hint_starts = _starts(problem, hint)
    builder.minimise(durations)
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers, parameters.random_seed = 1, seed
    parameters.symmetry_level = parameters.cp_model_probing_level = 0
    parameters.linearization_level = 0  # the linear relaxation of such models is slow and gives weak bounds
    parameters.max_deterministic_time = seconds
    if math.isfinite(wall_seconds):
        parameters.max_time_in_seconds = max(0.1, wall_seconds - (time.monotonic() - began))
    seen: list[np.ndarray] = []

    class Watch(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self):
            home = np.zeros(together.shape[1], np.int64)
            for (device, cluster), variable in builder.on.items():
                if self.boolean_value(variable):
                    home[cluster] = device
            seen.append(home[tie])

    status = solver.solve(builder.model, Watch())
    if status == cp_model.MODEL_INVALID:
        raise InvalidInput(builder.model.validate(), source=graph.name, field="cp-sat model")
    if status == cp_model.INFEASIBLE and upper_ns is None:
        raise Unsupported(f"{graph.name}: the persistent bytes fit in no placement")
    found = np.array(seen, np.int64).reshape(-1, graph.n_units)
    solved = bool(len(found))
    # No solution within upper_ns: every placement takes longer.
    bound = horizon if status == cp_model.INFEASIBLE else int(max(0, solver.best_objective_bound)) * tick
    model_ns = int(solver.objective_value) * tick if solved else horizon
    return Makespan(found, model_ns, bound, solver.status_name(status).lower())


def _serial(problem: Problem, allowed: np.ndarray) -> int:
    """The duration if all ops run in sequence on their slowest allowed device and every tensor is sent everywhere."""
    graph = problem.graph
    slowest = np.where(allowed[:, graph.unit_of_op], problem.costs.device_op_ns, 0).max(axis=0)
    least = least_transfers(problem)
    slow = np.maximum(problem.costs.transfer_ns, np.where(least < NEVER_NS, least, 0))
    sends = slow.max(axis=0, initial=0).sum() * problem.topology.n_devices
    return int(slowest.sum() + sends + problem.costs.dispatch_ns.sum()) + 1


def _starts(problem: Problem, unit_devices: np.ndarray) -> np.ndarray:
    """int64 ``(n,)``: the start of each op in the simulator, ns."""
    from simdev.sim import simulate

    return simulate(problem, Placement.of_units(problem, unit_devices)).op_start


class _Builder:
    """Builds the model: ``on[d, c]`` says that cluster ``c`` (ops tied together) is on device ``d``."""

    def __init__(self, cp_model, problem: Problem, together: np.ndarray, cluster: np.ndarray, tick: int, horizon: int):
        self.problem, self.cluster, self.tick, self.horizon = problem, cluster.tolist(), tick, horizon
        self.model = model = cp_model.CpModel()
        self.hint_starts: np.ndarray | None = None
        self.on = {}
        for c in range(together.shape[1]):
            places = np.flatnonzero(together[:, c]).tolist()
            for d in places:
                self.on[d, c] = model.new_bool_var("") if len(places) > 1 else model.new_constant(1)
            if len(places) > 1:
                model.add_exactly_one(self.on[d, c] for d in places)
        self.places = [np.flatnonzero(together[:, c]).tolist() for c in range(together.shape[1])]

    def memory(self, tie: np.ndarray, size: np.ndarray) -> None:
        need = np.bincount(tie, size, len(self.places))
        for d, capacity in enumerate(self.problem.topology.memory_bytes.tolist()):
            unit = max(1, capacity >> 30)  # sizes rounded down: no placement that fits is lost
            terms = [(self.on[d, c], int(need[c]) // unit) for c in range(len(self.places)) if (d, c) in self.on]
            if sum(size for _, size in terms) > capacity // unit:
                self.model.add(sum(size * on for on, size in terms) <= capacity // unit)

    def minimise(self, durations: np.ndarray) -> None:
        self._ops(durations)
        if self.hint_starts is not None:  # cut to ticks they still keep every rule, as ends are cut as well
            for start, at in zip(self.start, self.hint_starts.tolist(), strict=True):
                self.model.add_hint(start, at // self.tick)
        self._transfers()
        self._resources(durations)
        self.model.minimize(self.makespan)

    def _ops(self, durations: np.ndarray) -> None:
        model, problem, tick = self.model, self.problem, self.tick
        graph = problem.graph
        fastest = fastest_durations(problem)
        head, below = t_level(graph, fastest), b_level(graph, fastest)
        if problem.rules.runtime == "eager":
            head = np.maximum(head, np.cumsum(problem.costs.dispatch_ns))
        chain = int((head + below).max()) // tick
        self.makespan = model.new_int_var(min(chain, self.horizon), self.horizon, "")
        self.start, self.end = [], []
        self.busy: dict[int, list] = {d: [] for d in range(len(durations))}
        floor = durations // tick
        tail = (below - fastest) // tick
        for op in range(graph.n_ops):
            earliest, latest = int(head[op]) // tick, max(0, self.horizon - int(tail[op]))
            start = model.new_int_var(min(earliest, latest), latest, "")
            end = model.new_int_var(min(earliest, latest), latest, "")
            places = self.places[self.cluster[op]]
            for d in places:
                on, length = self.on[d, self.cluster[op]], int(floor[d, op])
                if length:
                    interval = (
                        model.new_interval_var(start, length, end, "")
                        if len(places) == 1
                        else model.new_optional_interval_var(start, length, end, on, "")
                    )
                    self.busy[d].append(interval)
                else:
                    model.add(end >= start).only_enforce_if(on)
            model.add(end + int(tail[op]) <= self.makespan)
            self.start.append(start)
            self.end.append(end)

    def _transfers(self) -> None:
        graph = self.problem.graph
        self.channel: dict[int, list] = {}
        ptr, consumers = graph.consumer_ptr.tolist(), graph.consumers.tolist()
        # Tensors of one op with the same readers leave and are needed together: they are one transfer. It lasts
        # as long as all of them in sequence on their common route, or as the longest if they share the route.
        alike: dict[tuple[int, ...], list[int]] = {}
        for tensor, producer in enumerate(graph.tensor_producer.tolist()):
            alike.setdefault((producer, *consumers[ptr[tensor] : ptr[tensor + 1]]), []).append(tensor)
        in_turn, least = self.problem.rules.contention == "fifo", least_transfers(self.problem)
        for (producer, *reading), tensors in alike.items():
            floor = least[:, tensors]
            length = (floor.sum(axis=1) if in_turn else floor.max(axis=1)) // self.tick
            readers: dict[int, list[int]] = {}
            for consumer in reading:
                self.model.add(self.start[consumer] >= self.end[producer])
                if self.cluster[consumer] != self.cluster[producer]:
                    readers.setdefault(self.cluster[consumer], []).append(consumer)
            for target in sorted({d for c in readers for d in self.places[c]}):
                self._arrivals(producer, readers, target, length)

    def _arrivals(self, producer: int, readers: dict[int, list[int]], target: int, lengths: np.ndarray) -> None:
        """The transfers to device ``target``, one for each possible device of ``producer``; ticks per pair class."""
        model, home = self.model, self.cluster[producer]
        pair_class, routes = self.problem.costs.pair_class, self.problem.topology.routes
        reading = [(self.on[target, c], ops) for c, ops in readers.items() if (target, c) in self.on]
        for source in self.places[home]:
            if source == target:
                continue
            made = self.on[source, home]
            if pair_class[source, target] < 0:
                for read, _ in reading:
                    model.add_bool_or(made.negated(), read.negated())
                continue
            length = int(lengths[pair_class[source, target]])
            sent = model.new_bool_var("")
            model.add_implication(sent, made)
            for read, _ in reading:
                model.add_bool_or(made.negated(), read.negated(), sent)
            begin = model.new_int_var(0, self.horizon, "")
            arrive = model.new_int_var(0, self.horizon, "")
            interval = model.new_optional_interval_var(begin, length, arrive, sent, "")
            model.add(begin >= self.end[producer]).only_enforce_if(sent)
            for read, ops in reading:
                for op in ops:
                    model.add(self.start[op] >= arrive).only_enforce_if([sent, read])
            if length and self.problem.rules.contention == "fifo":
                for channel in routes[source, target]:
                    self.channel.setdefault(channel, []).append(interval)

    def _resources(self, durations: np.ndarray) -> None:
        model, topology = self.model, self.problem.topology
        slots = np.ones_like(topology.slots) if self.problem.rules.runtime == "eager" else topology.slots
        work = np.zeros((len(durations), len(self.places)), np.int64)
        np.add.at(work.T, self.cluster, np.maximum(durations.T, 0) // self.tick)
        for d, intervals in self.busy.items():
            if slots[d] == 1:
                model.add_no_overlap(intervals)
            elif len(intervals) > slots[d]:
                model.add_cumulative(intervals, [1] * len(intervals), int(slots[d]))
            terms = [int(work[d, c]) * self.on[d, c] for c in range(len(self.places)) if (d, c) in self.on]
            if terms:
                model.add(sum(terms) <= int(slots[d]) * self.makespan)
        for intervals in self.channel.values():
            model.add_no_overlap(intervals)
