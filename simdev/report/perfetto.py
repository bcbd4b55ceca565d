"""Write simulated or measured schedules as trace files for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

The files follow Google's Trace Event Format: complete events (``X``) on named tracks, flow events (``s`` and ``f``) for
arrows, counter events (``C``) for memory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping

import numpy as np

from simdev.files import write_text
from simdev.parallel import PlanReport
from simdev.problem.graph import PHASES, ComputationGraph
from simdev.problem.topology import Topology
from simdev.sim import Schedule


class Process:
    """Collects the events of one process of a trace in :attr:`events`. Times are given in ns."""

    def __init__(self, name: str, number: int = 0):
        self.number = number
        self.events: list[dict] = [{"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}}]
        self.events.append({"ph": "M", "pid": number, "name": "process_sort_index", "args": {"sort_index": number}})
        self._tracks: dict[str, int] = {}

    def track(self, label: str) -> int:
        """The number of the track of this name."""
        if label not in self._tracks:
            self._tracks[label] = len(self._tracks)
            where = {"ph": "M", "pid": self.number, "tid": self._tracks[label]}
            self.events.append({**where, "name": "thread_name", "args": {"name": label}})
            self.events.append({**where, "name": "thread_sort_index", "args": {"sort_index": self._tracks[label]}})
        return self._tracks[label]

    def span(self, label: str, start: int, finish: int, title: str, args: dict) -> tuple[int, int]:
        """Draw a box; returns its process and track."""
        where = {"pid": self.number, "tid": self.track(label)}
        times = {"ts": int(start) / 1e3, "dur": int(finish - start) / 1e3}
        self.events.append({"ph": "X", **where, **times, "name": title, "args": args})
        return self.number, where["tid"]

    def count(self, name: str, time: int, value: int) -> None:
        """Let the counter ``name`` have ``value`` from ``time`` on."""
        where = {"ph": "C", "pid": self.number, "name": name, "ts": int(time) / 1e3}
        self.events.append({**where, "args": {"bytes": int(value)}})


def arrow(label: str, name: str, source: tuple[int, int], start: int, target: tuple[int, int], end: int) -> list[dict]:
    """An arrow between two boxes on tracks ``(process, track)``: from the box that covers ``start`` to the one that
    begins at ``end`` (ns). No other arrow of the file has this ``label``."""
    common = {"cat": "flow", "name": name, "id": label}
    (process, track), (other, place) = source, target
    return [
        {"ph": "s", **common, "pid": process, "tid": track, "ts": int(start) / 1e3},
        {"ph": "f", "bp": "e", **common, "pid": other, "tid": place, "ts": int(end) / 1e3},
    ]


def trace_events(
    graph: ComputationGraph,
    topology: Topology,
    devices: np.ndarray,
    schedule: Schedule,
    name: str,
    process: int = 0,
    memory: Mapping[str, tuple[np.ndarray, np.ndarray]] | None = None,
) -> list[dict]:
    """The events of one process of a trace: a track for each compute slot in use and for each pair of devices, arrows
    from an op to each transfer of its tensor and from there to the first op that reads the copy, and a counter for each
    entry of ``memory``.

    ``devices`` int ``(n,)`` is the placement. ``memory`` maps the name of a device to times in ns and the bytes in use
    from each of them on. Times in the events are in microseconds. Ops that overlap on one device, and transfers that
    overlap on one pair of devices, are on separate tracks. The event of an op holds its number, layer and phase; the
    event of a transfer holds the number and the bytes of its tensor.
    """
    made = Process(name, process)
    where: dict[int, tuple[int, int]] = {}
    starts = schedule.op_start
    for number, device in enumerate(topology.devices):
        ops = np.flatnonzero(devices == number)
        for op, lane in _lanes(ops, schedule.op_start[ops], schedule.op_finish[ops]):
            args = {"op": int(op), "layer": graph.layers[graph.op_layer[op]], "phase": PHASES[graph.op_phase[op]]}
            label = device.name if lane == 0 else f"{device.name} ({lane + 1})"
            start, finish = schedule.op_start[op], schedule.op_finish[op]
            where[int(op)] = made.span(label, start, finish, graph.op_names[op], args)
    pairs = sorted(set(zip(schedule.transfer_source.tolist(), schedule.transfer_target.tolist(), strict=True)))
    for source, target in pairs:
        rows = np.flatnonzero((schedule.transfer_source == source) & (schedule.transfer_target == target))
        for row, lane in _lanes(rows, schedule.transfer_start[rows], schedule.transfer_finish[rows]):
            tensor = int(schedule.transfer_tensor[row])
            label = f"{topology.devices[source].name} to {topology.devices[target].name}"
            args = {"tensor": tensor, "bytes": int(graph.tensor_bytes[tensor])}
            producer = int(graph.tensor_producer[tensor])
            title = graph.op_names[producer]
            begin, end = int(schedule.transfer_start[row]), int(schedule.transfer_finish[row])
            place = made.span(label if lane == 0 else f"{label} ({lane + 1})", begin, end, title, args)
            readers = graph.consumers[graph.consumer_ptr[tensor] : graph.consumer_ptr[tensor + 1]]
            readers = readers[devices[readers] == target]
            first = int(readers[np.argmin(starts[readers])])
            made.events += arrow(
                f"{process} s{row}", "send", where[producer], schedule.op_start[producer], place, begin
            )
            made.events += arrow(f"{process} r{row}", "receive", place, begin, where[first], starts[first])
    for label, (times, values) in (memory or {}).items():
        for time, value in zip(times.tolist(), values.tolist(), strict=True):
            made.count(f"memory of {label}", time, value)
    return made.events


def write_trace(path: str | os.PathLike, *processes: list[dict]) -> None:
    """Write the events of one or more processes (:func:`trace_events`, each with its own ``process``) into one file."""
    text = json.dumps({"traceEvents": [event for events in processes for event in events], "displayTimeUnit": "ms"})
    write_text(path, text + "\n")


def _lanes(rows: np.ndarray, start: np.ndarray, finish: np.ndarray):
    """Yield ``(row, lane)`` with the first lane that is free when the row starts."""
    ends: list[int] = []
    for position in np.lexsort((finish, start)):
        lane = next((number for number, end in enumerate(ends) if end <= start[position]), len(ends))
        ends[lane : lane + 1] = [int(finish[position])]
        yield rows[position], lane


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
