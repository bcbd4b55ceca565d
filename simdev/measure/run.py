"""Executes one placement on this computer and compares it with its simulation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from simdev.measure.programs import workers_of
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem

if TYPE_CHECKING:
    from simdev.measure.execute.program import Program


def execute_placement(program: Program, problem: Problem, placement: Placement, repeats: int):
    """Execute and simulate a placement: ``(report, measured schedule, simulated schedule)``.

    The step also runs on one device alone, whose results the placement must reproduce. ``report`` is a dictionary that
    :func:`report_text` prints.
    """
    from simdev.measure.execute.host import execute
    from simdev.measure.execute.outcome import difference, step_schedule
    from simdev.sim import simulate

    workers = workers_of(problem.topology)
    devices = placement.devices
    order, priority = problem.rules.order, placement.priority
    if order == "priority" and priority is None:
        from simdev.analysis.levels import b_level

        priority = b_level(problem.graph, np.maximum(problem.costs.device_op_ns, 0).mean(axis=0).astype(int))
    execution = execute(program, devices, workers, repeats=repeats, order=order, priority=priority)
    alone = execute(program, np.zeros_like(devices), workers[:1], repeats=1, warmup=0)
    measured, simulated = (
        step_schedule(program, execution, devices, problem.topology),
        simulate(problem, placement),
    )
    same, theirs = difference(program, execution, alone), difference(program, execution)
    low, median, high = np.percentile(execution.step_ns, [0, 50, 95])
    report = {
        "graph": problem.graph.name,
        "machine": problem.topology.name,
        "step_time_s": {"min": low / 1e9, "median": median / 1e9, "p95": high / 1e9, "repeats": repeats},
        "simulated_step_time_s": simulated.step_ns / 1e9,
        "same_as_one_device": same.same,
        "same_as_pytorch": theirs.same,
        "difference_in_tolerances": {
            "one_device": [same.result, same.parameter],
            "pytorch": [theirs.result, theirs.parameter],
        },
        "comm_bytes": measured.comm_bytes,
        "transfer_s": float((measured.transfer_finish - measured.transfer_start).sum() / 1e9),
        "devices": {
            device.name: {
                "ops": int((devices == number).sum()),
                "busy_s": float((measured.op_finish - measured.op_start)[devices == number].sum() / 1e9),
                "peak_bytes": int(measured.peak_bytes[number]),
                "simulated_peak_bytes": int(simulated.peak_bytes[number]),
            }
            for number, device in enumerate(problem.topology.devices)
        },
    }
    return report, measured, simulated


def write_trace_of_both(path: Path, problem: Problem, placement: Placement, measured, simulated) -> None:
    """Write both schedules to one Perfetto trace, as two processes."""
    from simdev.report.perfetto import trace_events, write_trace

    parts = [
        trace_events(problem.graph, problem.topology, placement.devices, schedule, name, number)
        for number, (name, schedule) in enumerate([("measured", measured), ("simulated", simulated)])
    ]
    write_trace(path, *parts)


def report_text(report: dict) -> list[str]:
    """The report of an execution as lines of text."""
    times, simulated = report["step_time_s"], report["simulated_step_time_s"]
    lines = [
        f"{report['graph']} on {report['machine']}: {times['median'] * 1e3:.2f} ms "
        f"(min {times['min'] * 1e3:.2f}, p95 {times['p95'] * 1e3:.2f}, {times['repeats']} steps); "
        f"simulated {simulated * 1e3:.2f} ms ({simulated / times['median'] - 1:+.1%})",
        f"results: {'the same as' if report['same_as_one_device'] else 'DIFFERENT from'} those of one device, "
        f"{'the same as' if report['same_as_pytorch'] else 'DIFFERENT from'} PyTorch's",
        f"transfers {report['comm_bytes'] / 2**20:.1f} MiB, {report['transfer_s'] * 1e3:.2f} ms",
    ]
    for name, device in report["devices"].items():
        lines.append(
            f"  {name:8} {device['ops']:6} ops  busy {device['busy_s'] * 1e3:9.2f} ms  peak "
            f"{device['peak_bytes'] / 2**20:8.1f} MiB  simulated {device['simulated_peak_bytes'] / 2**20:8.1f} MiB"
        )
    return lines
