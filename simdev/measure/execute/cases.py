"""One case of a comparison: a placement executed and simulated, and the parts of the difference."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from simdev.measure.execute.host import execute
from simdev.measure.execute.outcome import step_schedule
from simdev.measure.execute.program import Program
from simdev.problem.costs import CostTable
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.sim import Schedule, simulate


@dataclass(frozen=True)
class Costs:
    """Measured costs of the ops of a step, int64 ``(D, n)`` ns each.

    ``alone`` is the duration while the other cores are idle, ``loaded`` while another core runs the same step.
    """

    alone: np.ndarray
    loaded: np.ndarray


def with_costs(problem: Problem, op_ns: np.ndarray, transfer_ns: np.ndarray | None = None) -> Problem:
    """``problem`` with other durations in ns.

    ``op_ns`` int64 ``(D, n)`` replaces those of the ops, and ``transfer_ns`` int64 ``(m,)`` those of every route.
    """
    old = problem.costs
    moves = old.transfer_ns if transfer_ns is None else np.tile(transfer_ns, (len(old.transfer_ns), 1))
    rows = np.where(old.device_op_ns < 0, -1, np.maximum(op_ns, 1))
    table = CostTable(rows, np.arange(len(rows), dtype=np.int32), moves, old.pair_class, old.dispatch_ns)
    return replace(problem, costs=table)


def simulate_workers(problem: Problem, placement: Placement, loaded: np.ndarray) -> Schedule:
    """Simulate the step with two effects of CPU workers that the execution model does not have.

    First, the cores of one computer slow each other down: if more than one device has work, each op takes its duration
    beside a busy neighbour, ``loaded`` int64 ``(D, n)``. Second, a worker has no copy engine: the sender makes each
    copy itself at the end of the op, and the transfer takes only the latency of the channel.
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
    """Measure how much of the time of ``cores`` other processes take while the context is open.

    Yields a list; when the context closes, the share is appended to it. Linux counts in steps of 10 ms.
    """
    found: list[float] = []
    begin, busy, own = time.monotonic(), _busy_s(cores), sum(os.times()[:4])
    yield found
    busy, own = _busy_s(cores) - busy, sum(os.times()[:4]) - own
    found.append(max(0.0, busy - own) / ((time.monotonic() - begin) * len(cores)) if cores else 0.0)


def _busy_s(cores: list[int]) -> float:
    """Seconds since the start of the system in which the cores were not idle (``man 5 proc_stat``)."""
    lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
    times = {line[0]: [int(word) for word in line[1:]] for line in lines if line[0].startswith("cpu")}
    rows = [times[f"cpu{core}"] for core in cores]
    return sum(sum(row[:3]) + sum(row[5:8]) for row in rows) / os.sysconf("SC_CLK_TCK")


def run_case(program: Program, problem: Problem, workers, name: str, devices, **options) -> dict:
    """Execute one placement and return the measured part of its row. Times are in ns, memory in bytes.

    ``measured_ns`` is the step of median length. The other ``_ns`` values are simulations in which more and more
    predicted times are replaced by those of this step: op times in ``ops_ns``; transfer times too in ``channel_ns``;
    in ``copies_ns`` the copies also take the sender's time; in ``gaps_ns`` every op also takes the time between ops.
    ``disturbed`` is the share of the cores' time that other processes took (:func:`others`).
    """
    cores = [int(worker[4:]) for worker in workers if worker.startswith("cpu")]
    with others(cores) as taken:
        execution = execute(program, devices, workers, order=problem.rules.order, **options)
    schedule = step_schedule(program, execution, devices, problem.topology)
    placement = Placement(devices)
    order = np.zeros(program.graph.n_units, np.int64)
    order[program.graph.unit_of_op] = devices
    return {
        "name": name,
        "unit_devices": "".join(np.base_repr(device, 36) for device in order.tolist()),
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
    """The simulated part of a row.

    ``simulated_ns`` follows the execution model, and ``machine_ns`` follows :func:`simulate_workers`.
    """
    schedule = simulate(problem, placement)
    return {
        "simulated_ns": int(schedule.step_ns),
        "machine_ns": int(simulate_workers(problem, placement, costs.loaded).step_ns),
        "simulated_peak_bytes": schedule.peak_bytes.tolist(),
    }


def replays(program: Program, problem: Problem, schedule: Schedule, placement: Placement) -> dict[str, int]:
    """Step times of simulations that take more and more times from a measured step (see :func:`run_case`)."""
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
    between = np.concatenate(gaps)
    gap = int(np.percentile(between, 25)) if len(between) else 0  # low: only ops that did not wait for an input
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
