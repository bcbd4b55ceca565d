"""What a step of a parallel plan spends its time on, in sentences."""

from __future__ import annotations

import numpy as np

from simdev.parallel import PlanReport

ADVICE = {
    "kernels": "less recomputation, other kernels or more devices would shorten it",
    "communication that no kernel hides": "a mesh with smaller groups or faster links would shorten it",
    "idle (waiting for other pipeline ranks or the host)": "more microbatches or even stages would shorten it",
}


def explain_plan(report: PlanReport) -> list[str]:
    """What the step of a plan consists of, the largest part first, then how full the fullest pipeline rank is."""
    idle = report.step_ns - report.compute_ns - report.exposed_ns
    parts = dict(zip(ADVICE, (report.compute_ns, report.exposed_ns, idle), strict=True))
    found = []
    for name, ns in sorted(parts.items(), key=lambda part: -part[1].mean()):
        share, most = float(ns.mean()) / report.step_ns, int(np.argmax(ns))
        where = f", most on pipeline rank {most} ({ns[most] / report.step_ns:.1%})" if len(ns) > 1 else ""
        advice = f": {ADVICE[name]}" if share >= 0.05 else ""
        found.append(f"{share:.1%} of the step, {ns.mean() / 1e6:,.1f} ms, {name}{where}{advice}")
    full, capacity = int(np.argmax(report.peak_bytes)), report.plan.cluster.kind.memory_bytes
    peak = report.peak_bytes[full]
    rank = f" of pipeline rank {full}" if len(idle) > 1 else ""
    found.append(f"memory{rank} is filled to {peak / capacity:.1%}: {peak / 2**30:.1f} of {capacity / 2**30:.1f} GiB")
    return found
