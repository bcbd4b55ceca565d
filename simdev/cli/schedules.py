"""A schedule in a few lines, or as JSON."""

from __future__ import annotations

from simdev.cli.tables import print_json


def print_schedule(problem, placement, schedule, as_json: bool) -> None:
    from simdev.bench.run import overflow_text

    names = [device.name for device in problem.topology.devices]
    counts = [int((placement.devices == number).sum()) for number in range(len(names))]
    report = {
        "graph": problem.graph.name,
        "fingerprint": problem.graph.fingerprint,
        "topology": problem.topology.name,
        "cost_hash": problem.costs.hash,
        "placement": placement.hash,
        "feasible": bool(schedule.feasible),
        "step_time_s": schedule.step_ns / 1e9,
        "step_ns": int(schedule.step_ns),
        "comm_bytes": int(schedule.comm_bytes),
        "overflow": overflow_text(problem, schedule),
        "devices": {
            name: {"ops": count, "peak_memory_bytes": int(peak), "capacity_bytes": int(capacity)}
            for name, count, peak, capacity in zip(
                names, counts, schedule.peak_bytes, problem.topology.memory_bytes, strict=True
            )
        },
    }
    if as_json:
        print_json(report)
        return
    verdict = "" if schedule.feasible else f"  OUT OF MEMORY by bytes {report['overflow']}"
    print(f"{problem.graph.name} on {problem.topology.name}: {schedule.step_ns / 1e6:.3f} ms{verdict}")
    print(f"transfers {schedule.comm_bytes / 2**20:.1f} MiB")
    for name, device in report["devices"].items():
        peak, capacity = device["peak_memory_bytes"] / 2**30, device["capacity_bytes"] / 2**30
        print(f"  {name:8} {device['ops']:7} ops  peak {peak:8.3f} of {capacity:.3f} GiB")
