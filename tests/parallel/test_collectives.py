import numpy as np
import pytest

from simdev.errors import InvalidInput
from simdev.parallel.cluster import load_cluster
from simdev.parallel.collectives import collective_ns, send_ns

MIB = 1 << 20


def test_measured_sizes_come_back():
    cluster = load_cluster("dgx-a100")
    assert collective_ns("all_reduce", 64 * MIB, np.arange(8), cluster) == 579_900
    assert collective_ns("all_reduce", 16 * MIB, np.arange(4), cluster) == 179_600


def test_a_gather_moves_half_of_what_an_all_reduce_moves():
    cluster = load_cluster("dgx-h100")
    both = [collective_ns(kind, 256 * MIB, np.arange(8), cluster) for kind in ("all_gather", "reduce_scatter")]
    whole = collective_ns("all_reduce", 256 * MIB, np.arange(8), cluster)
    assert both[0] == both[1] and 0.45 < both[0] / whole < 0.6


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
