"""A simulated step of a training job as a trace for Perfetto: a process for each rank, a track for each of its streams,
arrows along collectives and sends, and a counter of the memory in use."""

from __future__ import annotations

import re

import numpy as np

from simdev.parallel import PlanReport
from simdev.report.perfetto import Process, arrow

OWNER = re.compile(r"rank \d+ (copy \d+ )?")  # at the begin of a stream's name: the process says it


def plan_trace_events(report: PlanReport) -> list[dict]:
    """The events of all ranks that were simulated: one of each pipeline stage, or every rank if unfolded. A collective
    is drawn on its first member."""
    found, schedule = report.unrolled, report.schedule
    graph, devices = found.problem.graph, found.problem.topology.devices
    ranks = sorted(set(found.rank.tolist()))
    processes = {rank: Process(f"rank {rank}: {graph.name}", rank) for rank in ranks}
    where: list[tuple[int, int]] = []
    placed, layer = found.placement.devices.tolist(), graph.op_layer.tolist()
    start, finish, rank = schedule.op_start.tolist(), schedule.op_finish.tolist(), found.rank.tolist()
    for op, title in enumerate(graph.op_names):
        stream = OWNER.sub("", devices[placed[op]].name)
        args = {"op": op, "action": graph.layers[layer[op]]}
        where.append(processes[rank[op]].span(stream, start[op], finish[op], title, args))
    source, target = graph.edge_source, graph.consumers
    across = np.flatnonzero(found.is_communication[source] | found.is_communication[target])
    arrows = []
    for number, edge in enumerate(across.tolist()):
        a, b = int(source[edge]), int(target[edge])
        arrows += arrow(str(number), graph.op_names[b], where[a], start[a], where[b], start[b])
    _memory(report, processes)
    return [event for process in processes.values() for event in process.events] + arrows


def _memory(report: PlanReport, processes: dict[int, Process]) -> None:
    """During an action the counter shows the most that it needs, after it what remains."""
    found, schedule = report.unrolled, report.schedule
    number = {action: place for place, action in enumerate(found.actions)}
    for pipeline_rank, steps in enumerate(report.memory):
        process = processes[int(found.first[pipeline_rank])]
        for action, most, after in steps:
            mine = (found.action == number[action]) & found.is_compute & (found.rank == process.number)
            if mine.any():
                process.count("memory", int(schedule.op_start[mine].min()), most)
                process.count("memory", int(schedule.op_finish[mine].max()), after)
