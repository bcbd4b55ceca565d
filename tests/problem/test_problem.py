"""A problem, and machines of several nodes."""

from dataclasses import replace

import numpy as np
import pytest

from simdev.errors import InvalidInput, UnknownName
from simdev.problem.graph import GraphBuilder
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Link, Topology, load_topology

# A problem: shapes agree, rules are known, and sums per placement unit are right


GPU = DeviceKind("gpu", 2**30, {"f32": 1e12}, 1e11, launch_ns=100, unsupported=("rare",))
CPU = DeviceKind("cpu", 2**30, {"f32": 1e11}, 1e10, launch_ns=1)
PAIR = Topology("pair", (Device("cpu", CPU, host=True), Device("gpu", GPU)), (Link(("cpu", "gpu"), 10**9, 50),))


def graph():
    builder = GraphBuilder("g")
    builder.op("a", "mm", group="u", persistent_bytes=10)
    builder.op("b", "rare", persistent_bytes=3)
    builder.op("c", "mm", group="u", persistent_bytes=5, bytes_read=1000)
    return builder.build()


def test_units_sum_their_ops():
    problem = Problem.build(graph(), PAIR)
    assert problem.unit_op_ns.tolist() == [[1 + 101, 1], [100 + 110, -1]]
    assert problem.unit_persistent_bytes.tolist() == [15, 3]
    assert problem.costs.device_op_ns.tolist() == [[1, 1, 101], [100, -1, 110]]


def test_costs_of_another_graph_are_refused():
    problem = Problem.build(graph(), PAIR)
    builder = GraphBuilder("h")
    builder.op("a", "mm")
    other = builder.build()
    with pytest.raises(InvalidInput, match=r"costs: op_ns: shape \(2, 3\), expected \(2, 1\)"):
        Problem(other, PAIR, problem.costs)
    for name, value in (("dispatch_ns", np.zeros(2, int)), ("pair_class", np.zeros((1, 1), int))):
        with pytest.raises(InvalidInput, match=f"costs: {name}: shape"):
            Problem(graph(), PAIR, replace(problem.costs, **{name: value}))


@pytest.mark.parametrize("field", ["order", "contention", "runtime"])
def test_unknown_rules(field):
    with pytest.raises(UnknownName, match=f"rules: unknown {field} 'fif'"):
        Rules(**{field: "fif"})


def test_the_eager_runtime_needs_a_host():
    alone = Topology("alone", (Device("d", CPU),))
    with pytest.raises(InvalidInput, match="alone: device: host: the eager runtime needs a host device"):
        Problem.build(graph(), alone, rules=Rules(runtime="eager"))


@pytest.mark.parametrize("value", [0, -2])
def test_durations_below_one_are_refused(value):
    costs = Problem.build(graph(), PAIR).costs
    with pytest.raises(InvalidInput, match="negative or zero duration"):
        replace(costs, op_ns=np.full(costs.op_ns.shape, value))
    with pytest.raises(InvalidInput, match="op_ns: expected whole nanoseconds, got dtype float64"):
        replace(costs, op_ns=costs.op_ns.astype(float))


# nodes


NODE = """
name = "pair"
switches = ["network"]
nodes = {nodes}
[[device]]
names = ["gpu0", "gpu1"]
kind = "p100-pcie"
[[link]]
ends = ["gpu0", "gpu1"]
gb_per_s = 10
latency_us = 2
[[link]]
ends = [["gpu0", "network"], ["gpu1", "network"]]
gb_per_s = 1
latency_us = 5
"""


def load(tmp_path, nodes):
    path = tmp_path / "pair.toml"
    path.write_text(NODE.format(nodes=nodes), encoding="utf-8")
    return load_topology(path)


def test_nodes_are_copies_joined_by_the_network(tmp_path):
    topology = load(tmp_path, 3)
    assert [device.name for device in topology.devices] == [f"n{n}.gpu{g}" for n in range(3) for g in range(2)]
    assert [device.node for device in topology.devices] == [0, 0, 1, 1, 2, 2]
    assert topology.pair_bytes_per_s[0, 1] == 10**10 and topology.pair_bytes_per_s[0, 2] == 10**9
    assert topology.pair_latency_ns[0, 5] == 10_000


def test_one_node_keeps_its_names(tmp_path):
    assert [device.name for device in load(tmp_path, 1).devices] == ["gpu0", "gpu1"]


@pytest.mark.parametrize("nodes", [0, -1, 10**6])
def test_impossible_numbers_of_nodes_are_refused(tmp_path, nodes):
    with pytest.raises(InvalidInput, match="nodes"):
        load(tmp_path, nodes)


def test_shipped_nodes_take_a_number():
    topology = load_topology("dgx-h100[nodes=2]")
    assert len(topology.accelerators) == 16 and topology.devices[-1].node == 1
