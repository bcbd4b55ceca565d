"""Find two properties of a device in a profiler trace: the host time to issue each kind of op, and the allocator's
rounding.

The host times are ``dispatch_ns`` of the eager runtime (R11). An op is an outermost operator (``aten::...``) that
launches work. Its host time is the time from the last launch of the previous op to its own last launch, without
waiting. The times include the overhead of the profiler.
"""

from __future__ import annotations

from math import gcd

import numpy as np

from simdev.calibrate.replay import MARK, host_costs, host_line
from simdev.calibrate.traces import Trace

LEAST = 5  # least number of ops of a kind
EVERY = "(all)"  # the kind that stands for all ops


def dispatch_ns(trace: Trace) -> dict[str, tuple[int, int, int]]:
    """``{kind: (count, median ns, mean ns)}`` of the kinds with at least :data:`LEAST` ops, sorted by total time,
    longest first. The kind :data:`EVERY` covers all ops."""
    line = host_line(trace)
    gap, own = host_costs(line, leave_one_out=False)
    outer = _outermost(trace)
    call_of = {correlation: row for row, correlation in enumerate(trace.calls.correlation.tolist())}
    times: dict[str, list[int]] = {}
    spent, current = 0, -1  # host time of the current op, and the row of its operator

    def close() -> None:
        if current >= 0:
            kind = trace.names[trace.ops.name[current]].removeprefix("aten::")
            times.setdefault(kind, []).append(spent)

    lane = 0
    for row in np.argsort(line.lane, kind="stable").tolist():
        if line.kind[row] == MARK or line.lane[row] != lane:
            close()
            spent, current = 0, -1  # the time between steps belongs to no op
            lane = line.lane[row]
            if line.kind[row] == MARK:
                continue
        if line.work[row]:
            op = int(outer[call_of[int(trace.work.correlation[line.work[row][0]])]])
            if op != current or op < 0:
                close()
                spent, current = 0, op
        spent += int(gap[row] + own[row])
    close()
    every = [value for values in times.values() for value in values]
    rows = {kind: values for kind, values in times.items() if len(values) >= LEAST}
    ordered = sorted(rows.items(), key=lambda entry: -sum(entry[1]))
    answer = [(EVERY, every)] if every else []
    return {kind: (len(v), int(np.median(v)), int(np.mean(v))) for kind, v in [*answer, *ordered]}


def granularity(trace: Trace) -> int:
    """The largest number of bytes that divides every allocation on a device; 0 if there are no memory events."""
    sizes = np.abs(trace.memory.size[trace.memory.device >= 0])
    return gcd(*sizes.tolist()) if len(sizes) else 0


def _outermost(trace: Trace) -> np.ndarray:
    """int64 ``(calls,)``: the row of the outermost ``aten::`` operator around each call, or -1 if there is none."""
    found = np.full(len(trace.calls), -1)
    operator = np.array([name.startswith("aten::") for name in trace.names])
    for thread in np.unique(trace.calls.thread):
        ops = np.flatnonzero((trace.ops.thread == thread) & operator[trace.ops.name])
        latest = -1
        outermost = []  # operators: each begins after the previous one has ended
        for op in ops.tolist():
            if trace.ops.begin[op] >= latest:
                outermost.append(op)
                latest = int(trace.ops.end[op])
        tops = np.array(outermost, np.int64)
        calls = np.flatnonzero(trace.calls.thread == thread)
        if len(tops):
            place = np.searchsorted(trace.ops.begin[tops], trace.calls.begin[calls], side="right") - 1
            inside = (place >= 0) & (trace.calls.begin[calls] < trace.ops.end[tops[np.maximum(place, 0)]])
            found[calls[inside]] = tops[place[inside]]
    return found
