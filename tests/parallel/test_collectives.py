import numpy as np
import pytest

from simdev.errors import InvalidInput
from simdev.parallel.cluster import load_cluster
from simdev.parallel.costs.collectives import collective_ns, send_ns

MIB = 1 << 20


def test_measured_sizes_come_back():
    cluster = load_cluster("dgx-a100")
    assert collective_ns("all_reduce", 64 * MIB, np.arange(8), cluster) == 579_900
    assert collective_ns("all_reduce", 16 * MIB, np.arange(4), cluster) == 179_600


def test_gathers_and_scatters_are_measured_too():
    cluster = load_cluster("dgx-h100")
    assert collective_ns("all_gather", 256 * MIB, np.arange(8), cluster) == 730_400
    assert collective_ns("reduce_scatter", 16 * MIB, np.arange(2), load_cluster("dgx-a100")) == 82_300
    whole = collective_ns("all_reduce", 256 * MIB, np.arange(8), cluster)
    assert 0.5 < collective_ns("broadcast", 256 * MIB, np.arange(8), cluster) / whole < 0.7


def test_the_same_accelerators_over_pcie_are_priced_by_their_links(tmp_path):
    on_pcie = _cluster(tmp_path, "a100-pcie-80gb", [("pcie0", "cpu0", 25.6), ("pcie1", "cpu0", 25.6)])
    times = {n: collective_ns("all_reduce", 512 * MIB, np.arange(n), on_pcie) / 1e3 for n in (2, 4)}
    # vidur's a100_pairwise_nvlink, four boards joined by PCIe 4: 33,902 us for 512 MiB less 1 %
    assert times[4] == pytest.approx(33_902 * 512 * MIB / 536_373_250, rel=0.03)
    assert times[2] == pytest.approx(times[4] * (1 / 2) / (3 / 4), rel=0.01)
    over_nvswitch = collective_ns("all_reduce", 512 * MIB, np.arange(4), load_cluster("dgx-a100")) / 1e3
    assert times[4] > 8 * over_nvswitch


def test_groups_that_cross_a_shared_link_share_it(tmp_path):
    slow_uplink = _cluster(tmp_path, "a100-pcie-80gb", [("pcie0", "cpu0", 25.6), ("pcie1", "cpu0", 25.6)])
    assert slow_uplink.ring_bytes_per_s(np.array([0, 1])) == 25.6e9
    assert slow_uplink.ring_bytes_per_s(np.array([2, 3])) == 25.6e9
    assert slow_uplink.ring_bytes_per_s(np.array([0, 2])) == 12.8e9  # beside (1, 3), over the same uplinks
    assert slow_uplink.ring_bytes_per_s(np.arange(4)) == 25.6e9


def test_rings_take_the_fast_links_of_a_hybrid_cube_mesh():
    assert load_cluster("v100x8-dgx1").ring_bytes_per_s(np.arange(8)) == 48.4e9


def _cluster(folder, kind: str, uplinks: list[tuple[str, str, float]]):
    """Four accelerators, two to a PCIe switch."""
    links = [([f"gpu{n}", f"pcie{n // 2}"], 25.6) for n in range(4)] + [([a, b], rate) for a, b, rate in uplinks]
    text = f"""name = "four"
nodes = 1
switches = ["pcie0", "pcie1"]
[[device]]
name = "cpu0"
kind = "epyc-7742"
host = true
[[device]]
names = ["gpu0", "gpu1", "gpu2", "gpu3"]
kind = "{kind}"
"""
    text += "".join(
        f"[[link]]\nends = {list(ends)}\ngb_per_s = {rate}\nlatency_us = 1.0\n".replace("'", '"')
        for ends, rate in links
    )
    path = folder / "four.toml"
    path.write_text(text, encoding="utf-8")
    return load_cluster(str(path))


def test_across_nodes_the_adapters_decide():
    cluster = load_cluster("dgx-h100")
    inside = collective_ns("all_reduce", 1024 * MIB, np.arange(8), cluster)
    across = collective_ns("all_reduce", 1024 * MIB, np.arange(16), cluster)
    one_each = collective_ns("all_reduce", 1024 * MIB, np.array([0, 8]), cluster)
    assert inside < across < one_each
    assert one_each == pytest.approx(1024 * MIB / (50e9 * 0.85) * 1e9, rel=0.05)


def test_a_send_between_nodes_takes_longer():
    cluster = load_cluster("dgx-h100")
    assert send_ns(MIB, 0, 1, cluster) < send_ns(MIB, 0, 8, cluster)


def test_nodes_and_networks_are_checked():
    with pytest.raises(InvalidInput, match="the mesh has 16 ranks, the cluster 32 accelerators"):
        load_cluster("dgx-h100[nodes=4]").check(16)
    with pytest.raises(InvalidInput, match="do not fill nodes"):
        load_cluster("dgx-h100").check(12)
    with pytest.raises(InvalidInput, match="the cluster 8 accelerators"):
        load_cluster("a100x8-nvswitch").check(16)
