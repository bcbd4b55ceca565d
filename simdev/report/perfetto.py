"""Write simulated or measured schedules as trace files for Perfetto (https://ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
import os

import numpy as np

from simdev.files import write_text
from simdev.problem.graph import PHASES, ComputationGraph
from simdev.problem.topology import Topology
from simdev.sim import Schedule


def trace_events(
    graph: ComputationGraph, topology: Topology, devices: np.ndarray, schedule: Schedule, name: str, process: int = 0
) -> list[dict]:
    """The events of one process of a trace: a track for each compute slot in use and for each pair of devices.

    ``devices`` int ``(n,)`` is the placement. Times are in microseconds. Ops that overlap on one device, and transfers
    that overlap on one pair of devices, are on separate tracks. The event of an op holds its number, layer and phase;
    the event of a transfer holds the number and the bytes of its tensor.
    """
    events = [{"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}]
    tracks: dict[str, int] = {}

    def track(label: str) -> int:
        if label not in tracks:
            tracks[label] = len(tracks)
            where = {"ph": "M", "pid": process, "tid": tracks[label]}
            events.append({**where, "name": "thread_name", "args": {"name": label}})
            events.append({**where, "name": "thread_sort_index", "args": {"sort_index": tracks[label]}})
        return tracks[label]

    def add(label, start, finish, title, args):
        begin, length = start / 1e3, (finish - start) / 1e3
        events.append(
            {"ph": "X", "pid": process, "tid": track(label), "ts": begin, "dur": length, "name": title, "args": args}
        )

    for number, device in enumerate(topology.devices):
        ops = np.flatnonzero(devices == number)
        for op, lane in _lanes(ops, schedule.op_start[ops], schedule.op_finish[ops]):
            args = {"op": int(op), "layer": graph.layers[graph.op_layer[op]], "phase": PHASES[graph.op_phase[op]]}
            label = device.name if lane == 0 else f"{device.name} ({lane + 1})"
            add(label, int(schedule.op_start[op]), int(schedule.op_finish[op]), graph.op_names[op], args)
    pairs = sorted(set(zip(schedule.transfer_source.tolist(), schedule.transfer_target.tolist(), strict=True)))
    for source, target in pairs:
        rows = np.flatnonzero((schedule.transfer_source == source) & (schedule.transfer_target == target))
        for row, lane in _lanes(rows, schedule.transfer_start[rows], schedule.transfer_finish[rows]):
            tensor = int(schedule.transfer_tensor[row])
            label = f"{topology.devices[source].name} to {topology.devices[target].name}"
            args = {"tensor": tensor, "bytes": int(graph.tensor_bytes[tensor])}
            title = graph.op_names[graph.tensor_producer[tensor]]
            begin, end = int(schedule.transfer_start[row]), int(schedule.transfer_finish[row])
            add(label if lane == 0 else f"{label} ({lane + 1})", begin, end, title, args)
    return events


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
