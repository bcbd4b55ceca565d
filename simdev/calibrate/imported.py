"""Import one step of a profiler trace as a graph with measured costs (``simdev import --format kineto``).

Each piece of GPU work is an op; its kind is the operator that launched it. Each call of the host that launches work or
waits is an op of the kind ``host``. Its time is the time since the previous call, without waiting. Control edges keep
the order: calls of a host thread in order, work in order on its stream, work after its launch, waiting calls after the
work that they wait for, and streams after events. The time between the last call and the end of the step is an op of
the host, too. The bytes of copies are known, those of other tensors are not.

The graph holds the work that one step launches, and begins with an idle GPU. A step of the trace may begin while the
GPU is still busy with earlier steps, and end before its own work is done; :func:`against_measured` says by how much.
"""

from __future__ import annotations

import numpy as np

from simdev.calibrate.replay import LAUNCH, MARK, RETURN, Line, host_costs, host_line
from simdev.calibrate.trace_ops import open_operators
from simdev.calibrate.traces import DEVICE_KINDS, STEP, Trace
from simdev.errors import InvalidInput
from simdev.graphs.importers import Imported
from simdev.problem.graph import GraphBuilder

HOST_KIND = "host"  # the device kind under which the times of the host are stored


def operators(trace: Trace) -> np.ndarray:
    """int64 ``(calls,)``: the row of the innermost operator around each call, or -1 if there is none."""
    found = np.full(len(trace.calls), -1)
    for call, inside in open_operators(trace):
        found[call] = inside[-1] if inside else -1
    return found


def trace_graph(trace: Trace, step: int | None = None, device_kind: str = "accelerator") -> Imported:
    """The graph of one step, by default the middle one; without steps in the trace, the graph of the whole trace.

    The times of GPU work are stored under ``device_kind``, those of calls under :data:`HOST_KIND`. Raises
    :class:`InvalidInput` if the trace does not have the step.
    """
    line = host_line(trace)
    if trace.steps:
        step = len(trace.steps) // 2 if step is None else step
        if not 0 <= step < len(trace.steps):
            raise InvalidInput(f"has {len(trace.steps)} steps, not a step {step}", source=trace.name)
        begins = np.array([key[0] == "begin" for key in line.key]) & (line.kind == MARK)
        rows = np.flatnonzero((line.step == step) & ~begins)
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
    calls: dict[int, int] = {}
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
        if line.kind[row] == MARK:
            if gap[row] > 0:
                after = [calls[other] for other in (int(line.after[row]),) if other in calls]
                add(f"{row} end of step", "host", HOST_KIND, ("host", int(line.lane[row])), gap[row], after)
            continue
        waits = [made[item] for item in line.waits[row] if item in made]
        waits += [calls[other] for other in (int(line.after[row]),) if other in calls]
        name = {LAUNCH: "launch", RETURN: "wait"}.get(int(line.kind[row]), "order")
        place = "host", int(line.lane[row])
        call = calls[row] = add(f"{row} {name}", "host", HOST_KIND, place, gap[row] + own[row], waits)
        for item in line.work[row]:
            stream = int(trace.work.thread[item])
            causes = [call, *(made[other] for other in line.wait_for.get(item, ()) if other in made)]
            label = f"{item} {trace.names[trace.work.name[item]][:80]}"
            duration = trace.work.end[item] - trace.work.begin[item]
            made[item] = add(label, kinds[item], device_kind, stream, duration, causes)
    return Imported(builder.build(), measured)


def played_ns(found: Imported) -> int:
    """How long the graph of a trace takes: its longest path, with the measured times."""
    graph, times = found.graph, dict[str, float]()
    for table in (found.measured or {}).values():
        times |= table
    own = [round(times.get(graph.signatures[number], 0)) for number in graph.op_signature.tolist()]
    ready = [0] * graph.n_ops
    ends = [0] * graph.n_ops
    followers: list[list[int]] = [[] for _ in range(graph.n_ops)]
    for cause, op in zip(graph.edge_source.tolist(), graph.consumers.tolist(), strict=True):
        followers[cause].append(op)
    for op in range(graph.n_ops):  # ops are numbered after their causes
        ends[op] = ready[op] + own[op]
        for follower in followers[op]:
            ready[follower] = max(ready[follower], ends[op])
    return max(ends, default=0)


AGREES = 0.02  # relative difference between the graph and the measured step that needs no reason


def against_measured(trace: Trace, found: Imported) -> str:
    """One sentence: the time of the graph beside the measured step and, if they differ, why. Empty without steps."""
    step = (found.graph.meta or {}).get("step")
    if not trace.steps or step is None:
        return ""
    _, begin, end = trace.steps[step]
    played, measured = played_ns(found), int(end - begin)
    line = host_line(trace)
    mine = [item for row in np.flatnonzero(line.step == step).tolist() for item in line.work[row]]
    text = f"step {step} took {measured / 1e6:.2f} ms; its graph takes {played / 1e6:.2f} ms"
    if abs(played / measured - 1) <= AGREES or not mine:
        return text
    late = max(0, int(trace.work.end[mine].max()) - int(end))
    others = np.setdiff1d(np.arange(len(trace.work)), mine)
    queued = max(0, int(trace.work.end[others[trace.work.begin[others] < begin]].max(initial=begin)) - int(begin))
    reasons = []
    if late > 0.01 * measured:
        reasons.append(f"its own GPU work ended {late / 1e6:.2f} ms after the step")
    if queued > 0.01 * measured:
        reasons.append(f"the GPU was busy with earlier work until {queued / 1e6:.2f} ms after its begin")
    return f"{text}: {' and '.join(reasons) or 'the trace shows no reason'}"


def _kinds(trace: Trace) -> list[str]:
    """The kind of each piece of work: its operator without ``aten::``, or its own kind if no operator launched it."""
    rows = operators(trace)
    by_correlation = dict(zip(trace.calls.correlation.tolist(), rows.tolist(), strict=True))
    answer = []
    for item, correlation in enumerate(trace.work.correlation.tolist()):
        op = by_correlation.get(correlation, -1)
        name = trace.names[trace.ops.name[op]] if op >= 0 else ""
        known = name and not STEP.match(name)
        answer.append(name.removeprefix("aten::") if known else DEVICE_KINDS[trace.work_kind[item]])
    return answer
