"""Find two properties of a device in a profiler trace: the host time to issue each kind of op, and the allocator's
rounding.

The host times are ``dispatch_ns`` of the eager runtime (R11), by the kinds of captured graphs
(:mod:`simdev.calibrate.trace_ops`): an op is what launches work, the update of an optimizer is one for each parameter.
Its host time is the time from the last launch of the previous op to its own last launch, without
waiting. The times include the overhead of the profiler.
"""

from __future__ import annotations

from collections import Counter
from math import gcd

import numpy as np

from simdev.calibrate.replay import MARK, host_costs, host_line
from simdev.calibrate.trace_ops import TracedOp, ops_of_calls
from simdev.calibrate.traces import Trace

LEAST = 5  # least number of ops of a kind
EVERY = "(all)"  # the kind that stands for all ops


def dispatch_ns(trace: Trace) -> dict[str, tuple[int, int, int]]:
    """``{kind: (count, median ns, mean ns)}`` of the kinds with at least :data:`LEAST` ops, sorted by total time,
    longest first. The kind :data:`EVERY` covers all ops."""
    line = host_line(trace)
    gap, own = host_costs(line, leave_one_out=False)
    of_call = ops_of_calls(trace)
    call_of = {correlation: row for row, correlation in enumerate(trace.calls.correlation.tolist())}
    times: dict[str, list[int]] = {}
    updates: dict[str, int] = {}
    tensors: dict[str, Counter] = {}
    current: tuple[TracedOp | None, str] = (None, "")  # the op or optimizer
    spent = 0  # its host time so far

    def close() -> None:
        op, update = current
        if update:
            updates[update] = updates.get(update, 0) + spent
        elif op is not None:
            times.setdefault(op.kind, []).append(spent)

    lane = 0
    for row in np.argsort(line.lane, kind="stable").tolist():
        if line.kind[row] == MARK or line.lane[row] != lane:
            close()
            spent, current = 0, (None, "")  # the time between steps belongs to no op
            lane = line.lane[row]
            if line.kind[row] == MARK:
                continue
        if line.work[row]:
            op, update = of_call[call_of[int(trace.work.correlation[line.work[row][0]])]]
            if update and op is not None:
                tensors.setdefault(update, Counter())[op.kind] += op.tensors
            if (None if update else op, update) != current or (op is None and not update):
                close()
                spent, current = 0, (None if update else op, update)
        spent += int(gap[row] + own[row])
    close()
    for update, ns in updates.items():  # a graph has one update for each parameter
        count = max(tensors.get(update, {"": 1}).values())
        times[update] = [ns // count] * count
    every = [value for values in times.values() for value in values]
    rows = {kind: values for kind, values in times.items() if len(values) >= LEAST}
    ordered = sorted(rows.items(), key=lambda entry: -sum(entry[1]))
    answer = [(EVERY, every)] if every else []
    return {kind: (len(v), int(np.median(v)), int(np.mean(v))) for kind, v in [*answer, *ordered]}


def granularity(trace: Trace) -> int:
    """The largest number of bytes that divides every allocation on a device; 0 if there are no memory events."""
    sizes = np.abs(trace.memory.size[trace.memory.device >= 0])
    return gcd(*sizes.tolist()) if len(sizes) else 0
