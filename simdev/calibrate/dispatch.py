"""What issuing an op costs the host, per op kind, and how an allocator rounds: from profiler traces."""

from __future__ import annotations

from math import gcd

import numpy as np

from simdev.calibrate.traces import Trace

PREFIX = "aten::"
ENOUGH = 3  # an op seen more rarely gives no figure


def dispatch_ns(trace: Trace) -> dict[str, float]:
    """``{op kind: ns}``: the median time that the host spends in an ATen op, its launches and inner ops included.

    A profiler slows the host down; the figures are as the trace has them.
    """
    times: dict[str, list[int]] = {}
    for name, duration in zip(trace.ops.name.tolist(), trace.ops.duration.tolist(), strict=True):
        if trace.names[name].startswith(PREFIX):
            times.setdefault(trace.names[name].removeprefix(PREFIX), []).append(duration)
    return {kind: float(np.median(found)) for kind, found in sorted(times.items()) if len(found) >= ENOUGH}


def granularity(trace: Trace) -> int:
    """The largest size in bytes of which every allocation on a device is a multiple; 0 without memory events."""
    sizes = np.abs(trace.memory.size[trace.memory.device >= 0])
    return gcd(*sizes.tolist()) if len(sizes) else 0
