"""Simulated against measured: many placements of one step, and what the difference is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from simdev.costs import CostTable
from simdev.execute.host import execute
from simdev.execute.measure import step_schedule
from simdev.execute.program import Program
from simdev.placement import Placement
from simdev.problem import Problem
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


def run_case(program: Program, problem: Problem, units, name: str, devices, **options) -> dict:
    """Execute one placement; the measured part of a row of the journal. Times in ns, memory in bytes.

    The times that end in ``_ns`` besides ``measured_ns`` are simulations with measured things in place of predicted
    ones, one after the other, all from the step of median length: ``ops_ns`` has its op times, ``channel_ns`` its
    transfer times too, in ``copies_ns`` the copies are the sender's time, in ``gaps_ns`` every op has the time between
    ops, too.
    """
    execution = execute(program, devices, units, policy=problem.rules.policy, **options)
    schedule = step_schedule(program, execution, devices, problem.topology)
    placement = Placement(devices)
    order = np.zeros(program.graph.n_units, np.int64)
    order[program.graph.unit_of_op] = devices
    return {
        "name": name,
        "unit_devices": "".join(np.base_repr(device, 36) for device in order),
        "samples_ns": execution.step_ns.tolist(),
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


def figures(rows: list[dict], predictor: str = "simulated_ns") -> dict:
    """How well ``predictor`` tells ``measured_ns``.

    ``error``: mean of \\|predicted / measured - 1\\|, ``worst`` its maximum, ``bias`` the mean with sign; ``tau``:
    Kendall's, ties counted (tau-b); ``pairs``: share of the pairs whose measured times are over 5 % apart that are
    ordered right; ``regret``: measured time of the placement predicted to be fastest over the fastest measured, less 1;
    ``tau_p10`` is the tau with the 10th percentile of the repeats, which other work on the machine disturbs less, and
    ``tau_noise`` that between the medians of the even and of the odd rounds (of one round: repeats): what noise
    leaves of it. ``noise``: mean over placements of (p90 - p10) / median of the repeats. Memory: ``peak_error`` mean
    relative error of the largest peak, and over capacities at each measured peak ``missed`` (predicted with 5 % in hand
    to fit, and does not) and ``false_alarms`` (the reverse), as shares of all cases.
    """
    from scipy.stats import kendalltau

    measured = np.array([row["measured_ns"] for row in rows], float)
    predicted = np.array([row[predictor] for row in rows], float)
    error = predicted / measured - 1
    a, b = np.triu_indices(len(rows), 1)
    apart = np.maximum(measured[a], measured[b]) > 1.05 * np.minimum(measured[a], measured[b])
    right = (measured[a] < measured[b]) == (predicted[a] < predicted[b])
    noise = [np.subtract(*np.percentile(row["samples_ns"], [90, 10])) / row["measured_ns"] for row in rows]
    halves = [[_half(row, half) for row in rows] for half in (0, 1)]
    peak = np.array([max(row["peak_bytes"]) for row in rows], float)
    told = np.array([max(row["simulated_peak_bytes"]) for row in rows], float)
    fits, said = peak[:, None] <= peak[None], 1.05 * told[:, None] <= peak[None]
    return {
        "placements": len(rows),
        "error": float(np.abs(error).mean()),
        "worst": float(np.abs(error).max()),
        "bias": float(error.mean()),
        "tau": float(kendalltau(measured, predicted).statistic),
        "tau_p10": float(kendalltau([np.percentile(row["samples_ns"], 10) for row in rows], predicted).statistic),
        "tau_noise": float(kendalltau(*halves).statistic),
        "pairs": float(right[apart].mean()) if apart.any() else 1.0,
        "regret": float(measured[np.argmin(predicted)] / measured.min() - 1),
        "noise": float(np.mean(noise)),
        "peak_error": float(np.abs(told / peak - 1).mean()),
        "missed": float((said & ~fits).mean()),
        "false_alarms": float((~said & fits).mean()),
    }


def _half(row: dict, half: int) -> float:
    rounds = row.get("rounds_ns", ())
    return float(np.median((rounds if len(rounds) > 1 else row["samples_ns"])[half::2]))


def error_parts(rows: list[dict]) -> dict[str, float]:
    """What the signed error of ``simulated_ns`` is made of: mean shares of the measured step that add up to the bias.

    ``ops``: the ops took another time than alone on one device (busy neighbours, tensors that lie in the other core's
    cache, noise); ``channel``: transfers took another time than alpha + bytes / beta; ``copies``: the sender's core
    makes the copies; ``dispatch``: the time between ops that is not in their costs; ``rest``: waking up, order.
    """
    names = ("simulated_ns", "ops_ns", "channel_ns", "copies_ns", "gaps_ns", "measured_ns")
    stages = [np.array([row[name] for row in rows], float) for name in names]
    parts = ("ops", "channel", "copies", "dispatch", "rest")
    return {
        part: float(((before - after) / stages[-1]).mean())
        for part, before, after in zip(parts, stages[:-1], stages[1:], strict=True)
    }
