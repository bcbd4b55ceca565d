"""Pipelined microbatches (R10): the graph of a step is unrolled over microbatches and run by the same engines.

The problem describes one microbatch. Forward and backward ops are copied per microbatch. Parameters, other ops without
inputs that hold persistent bytes, and the ops of the update phase exist once on each device of their stage; updates
wait for every microbatch. Gradients are accumulated in place: the first microbatch's tensor is the buffer. For each
further microbatch, an ``accumulate`` op of 1 ns reads that microbatch's gradient, after which it is freed; the update
waits for this op. The replicas of a stage take the microbatches in turn, and add up their gradients before the update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from simdev.analysis.steady import each_microbatch_ns
from simdev.errors import InvalidInput, UnknownName
from simdev.problem.costs import FREE_KINDS
from simdev.problem.graph import ComputationGraph
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.sim.schedule import Schedule
from simdev.sim.unroll import BACKWARD, FORWARD, UnrolledPipeline, stage_devices, teams_of, unroll

ORDERS = ("gpipe", "1f1b")


@dataclass(frozen=True, eq=False)
class PipelineReport:
    """The result of a run of M microbatches.

    * ``total_ns``: from the start to the last completion, update included.
    * ``steady_ns``: ns per microbatch once the pipeline is full: the average distance between completions of successive
      microbatches over the later half of them. For ``gpipe``, this distance of the forward parts plus that of the
      backward parts, because the two pass through the pipeline apart. With fewer than three microbatches, ``total_ns``.
      It is at least the largest load per slot: the last microbatches drain, which can make their distances shorter.
      With replicas, it includes each microbatch's share of ``exchange_ns``.
    * ``exchange_ns``: how long the replicas still add up gradients after the last backward op; 0 without replicas.
    * ``bubble_fraction``: the share of the stages' slot time until ``total_ns`` in which they were idle.
    * ``stages``: the first device of each stage, in pipeline order. ``peak_bytes``, ``overflow_bytes`` int64 ``(D,)``.
    * ``problem``, ``placement``, ``schedule``: the unrolled run, as :func:`simdev.sim.validate` takes them;
      ``microbatch`` int32 per unrolled op, -1 for ops that exist once.
    """

    total_ns: int
    steady_ns: float
    exchange_ns: int
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
    forward work), each with its replicas, in the order of their first forward op. A stage with ``r - 1`` replicas
    (:attr:`Placement.replica_of`) takes the microbatches in turn on its ``r`` devices; under ``1f1b``, at most
    ``w / r`` (rounded up) are then in progress on each, where ``w`` devices belong to this and later stages. Raises
    :class:`InvalidInput` for fewer than one microbatch, the runtime ``eager``, or a graph in which forward work waits
    for backward work or backward work for updates.
    """
    from simdev.sim import simulate

    if order not in ORDERS:
        raise UnknownName("pipeline order", str(order), ORDERS)
    if not isinstance(microbatches, (int, np.integer)) or microbatches < 1:
        raise InvalidInput(f"expected a whole number of at least 1, got {microbatches!r}", source="microbatches")
    if problem.rules.runtime != "dataflow":
        raise InvalidInput("pipelines need the runtime 'dataflow'", source="rules", field="runtime")
    placement.check(problem)
    stages = _stages(problem.graph, stage_devices(placement))
    run = unroll(problem, placement, int(microbatches), order, stages)
    schedule = simulate(run.problem, run.placement, engine=engine)
    teams = teams_of(placement, problem.topology.n_devices, int(microbatches))
    holders = placement.devices[np.isin(stage_devices(placement), stages)]
    used = np.unique([*holders, *(device for stage in stages for device in teams[stage])]).astype(int)
    busy = schedule.busy_ns(run.placement.devices, problem.topology.n_devices)[used].sum()
    slot_ns = schedule.step_ns * problem.topology.slots[used].sum()
    shared = np.unique(placement.devices[placement.has_copies])
    period = math.lcm(*(len(teams[device]) for device in shared))
    apart = _steady_ns(schedule, run, int(microbatches), order, period)
    load = float(_load_ns(problem, placement, teams).max(initial=0.0))
    exchange_ns = _exchange_ns(schedule, run)
    return PipelineReport(
        total_ns=schedule.step_ns,
        steady_ns=max(apart, load) + exchange_ns / int(microbatches),
        exchange_ns=exchange_ns,
        bubble_fraction=float(1 - busy / slot_ns) if slot_ns else 0.0,
        stages=stages,
        peak_bytes=schedule.peak_bytes,
        overflow_bytes=schedule.overflow_bytes,
        problem=run.problem,
        placement=run.placement,
        schedule=schedule,
        microbatch=run.microbatch,
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


def _load_ns(problem: Problem, placement: Placement, teams: list[np.ndarray]) -> np.ndarray:
    """float ``(D,)``: work of one microbatch per slot of each device; the devices of a team share that of ops with
    copies equally."""
    durations, load = each_microbatch_ns(problem), np.zeros(problem.topology.n_devices)
    for first in np.unique(placement.devices).tolist():
        mine = placement.devices == first
        team, shared = teams[first], mine & placement.has_copies
        load[team] += durations[team][:, shared].sum(axis=1) / len(team)
        load[first] += durations[first, mine & ~shared].sum()
    return load / problem.topology.slots


def _exchange_ns(schedule: Schedule, run: UnrolledPipeline) -> int:
    """From the last backward op until all sums of gradients have arrived at the updates."""
    if not run.exchange.any():
        return 0
    sums = run.exchange[run.problem.graph.tensor_producer[schedule.transfer_tensor]]
    end = schedule.transfer_finish[sums].max(initial=int(schedule.op_finish[run.exchange].max()))
    return max(0, int(end) - int(schedule.op_finish[run.microbatch >= 0].max()))


def _steady_ns(schedule: Schedule, run: UnrolledPipeline, count: int, order: str, period: int) -> float:
    """The average distance between completions over the later half of the microbatches: as many whole periods as
    possible, in which each replica of each stage has the same number of microbatches."""
    if count < 3:
        return float(schedule.step_ns)
    done = np.zeros((2, count), np.int64)
    for phase in (FORWARD, BACKWARD):
        mine = (run.microbatch >= 0) & (run.problem.graph.op_phase == phase)
        np.maximum.at(done[phase], run.microbatch[mine], schedule.op_finish[mine])
    half = count - 1 - count // 2
    length = half // period * period or half
    per = (done[:, -1] - done[:, -1 - length]) / length
    if not done[BACKWARD].any():
        return float(per[FORWARD])
    return float(per.sum() if order == "gpipe" else per[BACKWARD])
