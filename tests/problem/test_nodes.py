import pytest

from simdev.errors import InvalidInput
from simdev.problem.topology import load_topology

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
