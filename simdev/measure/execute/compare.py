"""Simulated against measured: many placements of one step, and what the difference is made of."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from simdev.measure.execute.host import execute
from simdev.measure.execute.measure import step_schedule
from simdev.measure.execute.program import Program
from simdev.problem.costs import CostTable
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.sim import Schedule, simulate


@dataclass(frozen=True)
class Costs:
    """Measured costs of a step on each device of a problem: int64 ``(D, n)`` ns of ops that run ``alone``, and while
    another runs the same step (``loaded``)."""

    alone: np.ndarray
    loaded: np.ndarray


def with_costs(problem: Problem, op_ns: np.ndarray, transfer_ns: np.ndarray | None = None) -> Problem:
    """``problem`` with ``op_ns`` int64 ``(D, n)`` per device, and ``transfer_ns`` int64 ``(m,)`` on every route."""
    old = problem.costs
    moves = old.transfer_ns if transfer_ns is None else np.tile(transfer_ns, (len(old.transfer_ns), 1))
    rows = np.where(old.device_op_ns < 0, -1, np.maximum(op_ns, 1))
    table = CostTable(rows, np.arange(len(rows), dtype=np.int32), moves, old.pair_class, old.dispatch_ns)
    return replace(problem, costs=table)


def simulate_machine(problem: Problem, placement: Placement, loaded: np.ndarray) -> Schedule:
    """The step under the execution model, with what CPU workers have and the model has not.

    Cores of one machine hold each other up: where more than one device has work, ops cost what they cost beside a busy
    neighbour, ``loaded`` int64 ``(D, n)``. And a worker has no copy engine: the time of a copy is the sender's, at the
    end of the op, so that only the latency of the channel is left to the transfer.
    """
    op_ns = problem.costs.device_op_ns
    if len(np.unique(placement.devices)) > 1:
        op_ns = np.where(op_ns < 0, -1, loaded)
    graph, old, devices = problem.graph, problem.costs, placement.devices
    away = devices[graph.edge_source] != devices[graph.consumers]
    tensor, target = np.unique(np.stack([graph.edge_tensor[away], devices[graph.consumers[away]]]), axis=1)
    maker = graph.tensor_producer[tensor]
    copy = np.zeros(graph.n_ops, np.int64)
    latency = max(int(problem.topology.pair_latency_ns.max()), 1)
    np.add.at(copy, maker, old.transfer_ns[old.pair_class[devices[maker], target], tensor] - latency)
    moves = np.full(graph.n_tensors, latency, np.int64)
    calm = replace(problem, rules=replace(problem.rules, contention="none"))
    return simulate(with_costs(calm, np.where(op_ns < 0, -1, op_ns + copy), moves), placement)


@contextmanager
def others(cores: list[int]):
    """Yields a list that on leaving has one number: the share of the time of ``cores`` that other processes, and
    whoever shares the machine, took meanwhile (Linux counts in 10 ms)."""
    found: list[float] = []
    begin, busy, own = time.monotonic(), _busy_s(cores), sum(os.times()[:4])
    yield found
    busy, own = _busy_s(cores) - busy, sum(os.times()[:4]) - own
    found.append(max(0.0, busy - own) / ((time.monotonic() - begin) * len(cores)) if cores else 0.0)


def _busy_s(cores: list[int]) -> float:
    """Seconds since the start of the system that the cores were not idle (``man 5 proc_stat``; guests count as
    user)."""
    lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
    times = {line[0]: [int(word) for word in line[1:]] for line in lines if line[0].startswith("cpu")}
    rows = [times[f"cpu{core}"] for core in cores]
    return sum(sum(row[:3]) + sum(row[5:8]) for row in rows) / os.sysconf("SC_CLK_TCK")


def run_case(program: Program, problem: Problem, units, name: str, devices, **options) -> dict:
    """Execute one placement; the measured part of a row of the journal. Times in ns, memory in bytes.

    The times that end in ``_ns`` besides ``measured_ns`` are simulations with measured things in place of predicted
    ones, one after the other, all from the step of median length: ``ops_ns`` has its op times, ``channel_ns`` its
    transfer times too, in ``copies_ns`` the copies are the sender's time, in ``gaps_ns`` every op has the time between
    ops, too. ``disturbed`` is the share of the workers' cores that :func:`others` took.
    """
    cores = [int(unit[4:]) for unit in units if unit.startswith("cpu")]
    with others(cores) as taken:
        execution = execute(program, devices, units, policy=problem.rules.order, **options)
    schedule = step_schedule(program, execution, devices, problem.topology)
    placement = Placement(devices)
    order = np.zeros(program.graph.n_units, np.int64)
    order[program.graph.unit_of_op] = devices
    return {
        "name": name,
        "unit_devices": "".join(np.base_repr(device, 36) for device in order),
        "samples_ns": execution.step_ns.tolist(),
        "disturbed": round(taken[0], 4),
        "measured_ns": int(schedule.step_ns),
        **replays(program, problem, schedule, placement),
        "op_sum_ns": int((schedule.op_finish - schedule.op_start).sum()),
        "sent_sum_ns": int((schedule.transfer_finish - schedule.transfer_start).sum()),
        "comm_bytes": int(schedule.comm_bytes),
        "transfers": len(schedule.transfer_tensor),
        "peak_bytes": schedule.peak_bytes.tolist(),
    }


def predict(problem: Problem, placement: Placement, costs: Costs) -> dict:
    """The simulated part of a row: ``simulated_ns`` by the execution model, ``machine_ns`` by
    :func:`simulate_machine`."""
    schedule = simulate(problem, placement)
    return {
        "simulated_ns": int(schedule.step_ns),
        "machine_ns": int(simulate_machine(problem, placement, costs.loaded).step_ns),
        "simulated_peak_bytes": schedule.peak_bytes.tolist(),
    }


def replays(program: Program, problem: Problem, schedule: Schedule, placement: Placement) -> dict[str, int]:
    """Simulated step times with ever more of a measured step put in (see :func:`run_case`)."""
    graph, d = program.graph, problem.topology.n_devices
    work = np.array([bool(calls) for calls in program.calls])
    lengths = schedule.op_finish - schedule.op_start
    sent = np.maximum(schedule.transfer_finish - schedule.transfer_start, 1)
    moves = np.ones(graph.n_tensors, np.int64)
    moves[schedule.transfer_tensor] = sent
    copy = np.zeros(graph.n_ops, np.int64)
    np.add.at(copy, graph.tensor_producer[schedule.transfer_tensor], sent)
    gaps = []
    for number in range(d):
        ops = np.flatnonzero((placement.devices == number) & work)
        order = ops[np.argsort(schedule.op_start[ops], kind="stable")]
        gaps.append(schedule.op_start[order][1:] - schedule.op_finish[order][:-1])
    gap = int(np.percentile(np.concatenate(gaps), 25)) if len(np.concatenate(gaps)) else 0  # of those that do not wait
    calm = replace(problem, rules=replace(problem.rules, contention="none"))
    at_once = np.ones(graph.n_tensors, np.int64)

    def step(base, ops, transfers=None):
        return int(simulate(with_costs(base, np.tile(ops, (d, 1)), transfers), placement).step_ns)

    return {
        "ops_ns": step(problem, lengths),
        "channel_ns": step(problem, lengths, moves),
        "copies_ns": step(calm, lengths + copy, at_once),
        "gaps_ns": step(calm, lengths + copy + gap * work, at_once),
    }
