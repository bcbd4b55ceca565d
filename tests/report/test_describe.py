"""Summaries of graphs and topologies: figures counted by hand, and pictures that hold every name."""

import json

import numpy as np
import pytest

from simdev.errors import InvalidInput
from simdev.problem.costs import CostModel
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Link, Topology, load_topology, topology_names
from simdev.report.describe import (
    describe_topology,
    draw_topology,
    graph_text,
    peak_bytes,
    summarise_graph,
    topology_text,
)


def diamond():
    """x -> a, b -> c; a has a workspace, c is the update and keeps its result."""
    builder = GraphBuilder("diamond", meta={"batch": 2})
    x = builder.op("x", "input", outputs=[100])
    a = builder.op("a", "mm", inputs=builder.outputs(x), outputs=[40], flops=1000, workspace_bytes=500, group="g")
    b = builder.op("b", "relu", inputs=builder.outputs(x), outputs=[60], phase="backward", flops=10, group="g")
    c = builder.op("c", "sgd", inputs=builder.outputs(a) + builder.outputs(b), phase="update", persistent_bytes=1000)
    builder.tensor(c, 7, result=True)
    return builder.build()


def test_the_figures_of_a_graph():
    summary = summarise_graph(diamond())
    expected = dict(
        ops=4,
        tensors=4,
        edges=4,
        placement_units=3,
        colocation_groups=1,
        depth_ops=3,
        width_ops=2,
        flops=1010,
        bytes_read=300,
        bytes_written=207,
        persistent_bytes=1000,
        tensor_bytes=207,
        peak_bytes=1640,
    )
    assert {key: summary[key] for key in expected} == expected
    assert summary["phases"]["backward"] == {"ops": 1, "flops": 10, "bytes": 160}
    assert summary["classes"]["gemm"] == {"ops": 1, "flops": 1000, "bytes": 140}
    assert summary["kinds"] == {"input": 1, "mm": 1, "relu": 1, "sgd": 1}
    assert json.loads(json.dumps(summary)) == summary
    text = graph_text(summary)
    for part in (
        "diamond",
        "4 in 3 placement units",
        "3 ops on the longest path, 2 on one level",
        "1.01 kFLOP",
        "batch=2",
    ):
        assert part in text


def test_the_peak_is_the_simulator_s_on_one_device():
    from simdev.sim import simulate

    device = Device("d", DeviceKind("k", 2**40, {"f32": 1e12}, 1e11, granularity=1))
    rng = np.random.default_rng(3)
    for _ in range(20):
        builder = GraphBuilder("random")
        tensors = []
        for number in range(30):
            chosen = rng.choice(tensors, min(len(tensors), 2), replace=False).tolist() if tensors else []
            sizes = rng.integers(0, 1000, 3).tolist()
            op = builder.op(f"{number}", "add", inputs=chosen, persistent_bytes=sizes[0], workspace_bytes=sizes[1])
            tensors.append(
                builder.tensor(op, sizes[2], result=bool(rng.random() < 0.2), persistent=bool(rng.random() < 0.1))
            )
        graph = builder.build()
        problem = Problem.build(graph, Topology("one", (device,)), CostModel(), Rules(order="program"))
        schedule = simulate(problem, Placement(np.zeros(graph.n_ops, int)), engine="reference")
        assert peak_bytes(graph) == int(schedule.peak_bytes[0])


@pytest.mark.parametrize("name", topology_names())
def test_a_topology_in_words(name):
    topology = load_topology(name)
    summary = describe_topology(topology)
    assert json.loads(json.dumps(summary)) == summary
    assert len(summary["routes"]) == topology.n_devices * (topology.n_devices - 1)
    text = topology_text(summary)
    for device in topology.devices:
        assert device.name in text and device.kind.name in text


def test_routes_name_what_they_pass():
    routes = {(route["from"], route["to"]): route for route in describe_topology(load_topology("k80x4"))["routes"]}
    assert routes["gpu0", "gpu1"]["through"] == ["plx0"]
    assert routes["gpu0", "gpu3"]["through"] == ["plx0", "cpu0", "plx1"]
    assert routes["gpu0", "gpu3"]["gb_per_s"] == 7.8 and routes["gpu0", "gpu3"]["latency_us"] == 12


@pytest.mark.parametrize("name", ["p100x4", "v100x8-dgx1", "h100x16", "cpu-h200"])
def test_a_drawing_names_every_device_and_switch(tmp_path, name, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    topology = load_topology(name)
    draw_topology(topology, tmp_path / "t.svg")
    text = (tmp_path / "t.svg").read_text()
    for node in [device.name for device in topology.devices] + list(topology.switches):
        assert f">{node}<" in text
    for link in topology.links:
        assert f"{link.bytes_per_s / 1e9:g} GB/s" in text


def test_any_topology_can_be_drawn(tmp_path):
    kind = DeviceKind("k", 2**30, {"f32": 1e12}, 1e11)
    alone = Topology("alone", (Device("d", kind),))
    devices = tuple(Device(name, kind) for name in "abcd")
    ring = Topology("ring", devices, tuple(Link(ends, 10**9, 5) for ends in ("ab", "bc", "cd", "da")))
    star = Topology("star", devices, tuple(Link((name, "s"), 10**9, 5) for name in "abcd"), ("s", "unused"))
    hosts = Topology(
        "hosts", tuple(Device(name, kind, host=True) for name in "abc"), (Link("ab", 1, 0), Link("bc", 1, 0))
    )
    for topology in (alone, ring, star, hosts):
        draw_topology(topology, tmp_path / f"{topology.name}.png")
        assert (tmp_path / f"{topology.name}.png").read_bytes().startswith(b"\x89PNG")
        assert topology.name in topology_text(describe_topology(topology))
    with pytest.raises(InvalidInput, match="No such file"):
        draw_topology(alone, tmp_path / "no" / "t.png")
    with pytest.raises(InvalidInput, match="t.xyz: .*not supported"):
        draw_topology(alone, tmp_path / "t.xyz")
