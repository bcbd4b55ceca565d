"""A step of a profiler trace as a graph with measured costs: ``simdev import --format kineto``.

Each piece of GPU work is an op, of the kind of the operator that launched it; each call of the host that launches or
waits is an op of the kind ``host`` and takes the time since the call before, without what it waited for. Order is in
control edges: calls in turn, work in turn on its stream, work after its launch, waiting calls after what they wait for,
streams after events. The bytes of copies are known, those of other tensors are not.
"""

from __future__ import annotations

import numpy as np

from simdev.errors import InvalidInput
from simdev.graphs.importers import Imported
from simdev.measure.calibrate.replay import LAUNCH, MARK, RETURN, Line, host_costs, host_line
from simdev.measure.calibrate.traces import DEVICE_KINDS, STEP, Trace
from simdev.problem.graph import GraphBuilder

HOST_KIND = "host"  # the device kind that the host's times are filed under


def operators(trace: Trace) -> np.ndarray:
    """int64 ``(calls,)``: the row of the innermost operator around each call, -1 where there is none."""
    found = np.full(len(trace.calls), -1)
    for thread in np.unique(trace.calls.thread):
        ops, calls = (np.flatnonzero(events.thread == thread) for events in (trace.ops, trace.calls))
        open_ops: list[int] = []
        queue = iter(ops.tolist())
        following = next(queue, None)
        for call in calls.tolist():
            now = trace.calls.begin[call]
            while following is not None and trace.ops.begin[following] <= now:
                open_ops.append(following)
                following = next(queue, None)
            while open_ops and trace.ops.end[open_ops[-1]] < now:
                open_ops.pop()
            inside = [op for op in open_ops if trace.ops.end[op] >= now]
            found[call] = inside[-1] if inside else -1
            open_ops = inside
    return found


def trace_graph(trace: Trace, step: int | None = None, device_kind: str = "accelerator") -> Imported:
    """The graph of one step (the middle one; of all, where the trace has none), with the times of work filed under
    ``device_kind`` and those of calls under :data:`HOST_KIND`.

    Raises :class:`InvalidInput` where there is no such step.
    """
    line = host_line(trace)
    if trace.steps:
        step = len(trace.steps) // 2 if step is None else step
        if not 0 <= step < len(trace.steps):
            raise InvalidInput(f"has {len(trace.steps)} steps, not a step {step}", source=trace.name)
        rows = np.flatnonzero((line.step == step) & (line.kind != MARK))
    else:
        rows = np.flatnonzero(line.kind != MARK)
    return _imported(line, rows.tolist(), device_kind, step)


def _imported(line: Line, rows: list[int], device_kind: str, step: int | None) -> Imported:
    trace = line.trace
    gap, own = host_costs(line, leave_one_out=False)
    kinds = _kinds(trace)
    builder = GraphBuilder(
        trace.name.split(".")[0], meta={"source": "trace", "step": step, "device": trace.device_name}
    )
    measured: dict[str, dict[str, float]] = {device_kind: {}, HOST_KIND: {}}
    made: dict[int, int] = {}
    last: dict[object, int] = {}

    def add(name: str, kind: str, where: str, place: object, ns: int, after: list[int]) -> int:
        signature = f"{kind}:{name}"
        op = builder.op(name, kind, signature=signature)
        measured[where][signature] = max(1, int(ns))
        for cause in sorted({*after, *([last[place]] if place in last else [])}):
            builder.control(cause, op)
        last[place] = op
        return op

    for row in rows:
        waits = [made[item] for item in line.waits[row] if item in made]
        name = {LAUNCH: "launch", RETURN: "wait"}.get(int(line.kind[row]), "order")
        call = add(f"{row} {name}", "host", HOST_KIND, "host", gap[row] + own[row], waits)
        for item in line.work[row]:
            stream = int(trace.work.thread[item])
            causes = [call, *(made[other] for other in line.wait_for.get(item, ()) if other in made)]
            label = f"{item} {trace.names[trace.work.name[item]][:80]}"
            duration = trace.work.end[item] - trace.work.begin[item]
            made[item] = add(label, kinds[item], device_kind, stream, duration, causes)
    return Imported(builder.build(), measured)


def _kinds(trace: Trace) -> list[str]:
    """The kind of each piece of work: its operator without ``aten::``, or what it is."""
    rows = operators(trace)
    by_correlation = dict(zip(trace.calls.correlation.tolist(), rows.tolist(), strict=True))
    answer = []
    for item, correlation in enumerate(trace.work.correlation.tolist()):
        op = by_correlation.get(correlation, -1)
        name = trace.names[trace.ops.name[op]] if op >= 0 else ""
        known = name and not STEP.match(name)
        answer.append(name.removeprefix("aten::") if known else DEVICE_KINDS[trace.work_kind[item]])
    return answer
