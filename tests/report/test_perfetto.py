"""Traces follow the Trace Event Format: every box is on a named track, every arrow begins and ends in a box."""

import json

import numpy as np
import pytest

from simdev.placers.testing import random_placement, random_problem
from simdev.report.explain import Explanation
from simdev.report.perfetto import trace_events, write_trace
from simdev.sim import simulate

NEEDED = {
    "M": {"pid", "name", "args"},
    "X": {"pid", "tid", "ts", "dur", "name", "args"},
    "s": {"pid", "tid", "ts", "name", "cat", "id"},
    "f": {"pid", "tid", "ts", "name", "cat", "id", "bp"},
    "C": {"pid", "ts", "name", "args"},
}


def check(events):
    """Every event has the fields of its phase; boxes are on named tracks; arrows connect boxes, forwards in time."""
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    boxes = {}
    for event in events:
        assert event.keys() >= NEEDED[event["ph"]]
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in named
            boxes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    ends = {phase: {e["id"]: e for e in events if e["ph"] == phase} for phase in "sf"}
    assert ends["s"].keys() == ends["f"].keys()
    assert len(ends["s"]) == sum(e["ph"] == "s" for e in events)
    for label, first in ends["s"].items():
        assert first["ts"] <= ends["f"][label]["ts"]
        for end in (first, ends["f"][label]):
            assert any(a <= end["ts"] <= b for a, b in boxes[end["pid"], end["tid"]])
    return boxes


def test_transfers_have_arrows_and_devices_have_memory(tmp_path):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng)
        placement = random_placement(rng, problem)
        schedule = simulate(problem, placement)
        if len(schedule.transfer_tensor) > 3:
            break
    found = Explanation(problem, placement, schedule)
    memory = {device.name: found.memory(number) for number, device in enumerate(problem.topology.devices)}
    events = trace_events(problem.graph, problem.topology, placement.devices, schedule, "drawn", memory=memory)
    other = trace_events(problem.graph, problem.topology, placement.devices, schedule, "again", 1)
    write_trace(tmp_path / "trace.json", events, other)
    check(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    transfers = len(schedule.transfer_tensor)
    assert transfers > 3
    assert sum(e["ph"] == "s" for e in events) == 2 * transfers
    assert sum(e["ph"] == "X" for e in events) == problem.graph.n_ops + transfers
    for number, device in enumerate(problem.topology.devices):
        values = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == f"memory of {device.name}"]
        assert max(values) == schedule.peak_bytes[number]


@pytest.mark.parametrize("unfolded", [False, True])
def test_a_plan_has_a_process_for_each_rank_and_arrows_along_communication(unfolded, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from simdev.parallel import Host, Plan, find_model, load_cluster, parse_mesh, simulate_plan
    from simdev.report.plan_trace import plan_trace_events

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiny = "llama3-8b[width=64,layers=2,heads=4,kv_heads=2,hidden=128,vocabulary=256,length=32]"
    spec, parameters = find_model(tiny)
    mesh = parse_mesh("dp_shard=2,pp=2")
    plan = Plan(spec, parameters, load_cluster("dgx-h100"), mesh, 2, host=Host(3000, 2000, 1000, 9000))
    report = simulate_plan(plan, unfolded=unfolded)
    events = plan_trace_events(report)
    boxes = check(json.loads(json.dumps(events)))
    assert {process for process, _ in boxes} == set(range(4 if unfolded else 2))
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(names & {"compute", "host", "send to 1"}) >= 2 and any("dp_shard" in name for name in names)
    first = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert max(first) == report.peak_bytes[0]
    assert first[-1] == report.memory[0][-1][2]
    for span in (span for spans in boxes.values() for span in [sorted(spans)]):
        assert all(a[1] <= b[0] + 1e-6 for a, b in zip(span, span[1:], strict=False))  # a stream runs one at a time
