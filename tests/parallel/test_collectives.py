"""What collectives take, and what they take if communicators of one rank share its adapter to the network."""

import random

import numpy as np
import pytest
from drawn import beside_kernels

from simdev.errors import InvalidInput, SimdevError
from simdev.graphs.routing import Routing
from simdev.parallel.cluster import Cluster, load_cluster
from simdev.parallel.costs._adapter_kernel import shared_ns
from simdev.parallel.costs.collectives import (
    NETWORK_SHARE,
    RING_SHARE,
    adapter_share,
    collective_ns,
    send_ns,
    send_share,
)
from simdev.parallel.costs.overlap import _times, simulate_unrolled
from simdev.parallel.framework import find_framework
from simdev.problem.costs import CostModel
from simdev.problem.graph import GraphBuilder
from simdev.problem.topology import DeviceKind
from simdev.sim import simulate

MIB = 1 << 20
AXES = ("dp_replicate", "dp_shard", "tp")


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


def test_rings_take_all_links_where_each_pair_has_one():
    cluster = load_cluster("h200x4")
    assert cluster.ring_bytes_per_s(np.array([0, 2])) == 118e9
    assert cluster.ring_bytes_per_s(np.arange(4)) == 3 * 118e9


def test_a_cluster_with_fewer_adapters_and_an_oversubscribed_network():
    assert load_cluster("dgx-a100[network_gb_per_s=50]").network_bytes_per_s == 50e9 / 8
    both = load_cluster("dgx-a100[nodes=4,network_gb_per_s=50,oversubscription=2]")
    assert (both.nodes, both.network_bytes_per_s) == (4, 50e9 / 16)
    for text, message in (
        ("rails=2", "choice of a cluster"),
        ("oversubscription=0", "from 1 to"),
        ("nodes=0", "nodes"),
        ("watts=150", "from 200 to 400"),
        ("watts=500", "from 200 to 400"),
    ):
        with pytest.raises(SimdevError, match=message):
            load_cluster(f"dgx-a100[{text}]")


def test_a_power_limit_slows_products_and_no_passes_over_memory():
    b = GraphBuilder("two")
    b.op("mm", "mm", flops=2 << 39, signature="mm(bf16[8192,8192],bf16[8192,8192])->bf16[8192,8192]")
    b.op("add", "add", signature="add(bf16[67108864],bf16[67108864])->bf16[67108864]")
    graph = b.build()
    whole, limited = (
        CostModel().op_durations(graph, load_cluster(text).kind) for text in ("dgx-h100", "dgx-h100[nodes=2,watts=500]")
    )
    assert limited[0] / whole[0] == pytest.approx((700 / 500) ** (1 / 3), rel=0.01) and limited[1] == whole[1]
    assert load_cluster("l40sx8-pcie[watts=300]").kind.watts == 300  # a machine without a network
    for text in ("gb200-nvl72[watts=1000]", "v100x8-dgx1[watts=200]"):
        with pytest.raises(InvalidInput, match="no device file of its own chip"):
            load_cluster(text)


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


def test_an_exchange_between_nodes_goes_through_each_ranks_own_adapter():
    cluster, size = load_cluster("dgx-h100"), 1024 * MIB
    gather, exchange = (collective_ns(kind, size, np.arange(16), cluster) for kind in ("all_gather", "all_to_all"))
    # Half of what a rank sends leaves its node through one adapter; a gather uses all eight.
    assert exchange == pytest.approx(size / 2 / (50e9 * 0.85) * 1e9, rel=0.01) and exchange > 3 * gather
    pair = collective_ns("all_to_all", size, np.array([0, 8]), cluster)
    assert pair == pytest.approx(exchange, rel=0.01)
    # Seven of nine pieces stay in the node of the first eight, and one leaves it; the ninth rank sends all but its own.
    alone = collective_ns("all_to_all", size, np.arange(9), cluster)
    assert alone == pytest.approx(size * 8 / 9 / (50e9 * 0.85) * 1e9, rel=0.01)


def test_a_token_goes_once_to_each_node():
    cluster, size = toy(), 1_600 * MIB
    # Eight ranks, four on each node, an expert on each. A token takes two that follow each other: two ranks, and always
    # one node. So half as much crosses the network as if each rank got a copy.
    near = Routing(8, 2, "consecutive")
    assert (near.parts_of_a_token(8), near.node_share(8, 2)) == (2, 1 / 2)
    plain = collective_ns("all_to_all", size, np.arange(8), cluster)
    once = collective_ns("all_to_all", size, np.arange(8), cluster, near)
    assert plain == pytest.approx(size / 2 / 8.5e9 * 1e9, rel=0.01)
    assert once == pytest.approx(size / 4 / 8.5e9 * 1e9, rel=0.01)
    share = adapter_share("all_to_all", size, np.arange(8), cluster, routing=near)
    assert share == pytest.approx(1, rel=0.01)  # still nothing but the adapter decides
    # Of eight experts drawn alike, two lie on 2 ranks and on 1 + 16/28 nodes.
    drawn = Routing(8, 2)
    assert drawn.node_share(8, 2) == pytest.approx((1 + 16 / 28) / 2)
    # Where links are slow, they decide: 3 of 8 pieces stay in the node, and 3 of 4 that came to it go on from there.
    slow = toy(1)
    crawl = collective_ns("all_to_all", size, np.arange(8), slow, near)
    assert crawl == pytest.approx(size * (3 / 8 + 1 / 2 * 3 / 4) / (RING_SHARE * 1e9) * 1e9, rel=0.01)
    for kind in ("all_gather", "all_reduce"):  # rings know no tokens
        assert collective_ns(kind, size, np.arange(8), cluster, near) == collective_ns(
            kind, size, np.arange(8), cluster
        )
    assert collective_ns("all_to_all", size, np.arange(4), cluster, near) == collective_ns(
        "all_to_all", size, np.arange(4), cluster
    )


def test_only_models_that_send_tokens_once_are_priced_so():
    software, cluster = find_framework("eager"), toy()
    routed = {"experts": 8, "active": 2, "gate": "uniform", "dispatch": "tokens"}
    assert software.prices(cluster, parameters=routed).routing == Routing(8, 2)
    assert software.prices(cluster, parameters={**routed, "dispatch": "pairs"}).routing is None
    assert software.prices(cluster, parameters={"layers": 2}).routing is None is software.prices(cluster).routing


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


def toy(node_gb_per_s=100):
    """Nodes of four accelerators without a measured table; adapters of 10 GB/s, of which 8.5 carry payload, and 4 us
    between nodes. A ring step between nodes takes 4 + 1 us, one inside a node 0.6 us; a collective begins in 10 us."""
    kind = DeviceKind("toy", 1 << 30, {"f32": 1e12}, 1e11)
    return Cluster("toy", kind, 4, 8, node_gb_per_s * 10**9, 1000, 10 * 10**9, 4000)


@pytest.mark.parametrize(
    "kind, members, size, ns",
    [
        # Three ranks and one: one ring; 1 step between nodes, 2 inside; 3/4 of the bytes at 8.5 bytes/ns.
        ("all_gather", [0, 1, 2, 4], 8_500_000, 10_000 + 5_000 + 2 * 600 + 750_000),
        ("reduce_scatter", [0, 4, 5, 6], 8_500_000, 10_000 + 5_000 + 2 * 600 + 750_000),
        # The same, reduced: twice the steps (2 of 6 between nodes), twice the bytes.
        ("all_reduce", [0, 1, 2, 4], 8_500_000, 10_000 + 2 * 5_000 + 4 * 600 + 1_500_000),
        # Two ranks in each node: two rings, 17 bytes/ns.
        ("all_gather", [0, 1, 4, 5], 17_000_000, 10_000 + 5_000 + 2 * 600 + 750_000),
        # Three nodes with 2, 2 and 1 ranks: one ring; 2 steps between nodes, 2 inside; 4/5 of the bytes.
        ("all_gather", [0, 1, 4, 5, 8], 8_500_000, 10_000 + 2 * 5_000 + 2 * 600 + 800_000),
        # Inside a node, over links that no table has: 2 * 3 steps, 6/4 of the bytes at 92 bytes/ns.
        ("all_reduce", [0, 1, 2, 3], 9_200_000, 10_000 + 6 * 600 + 150_000),
    ],
)
def test_rings_by_hand(kind, members, size, ns):
    assert collective_ns(kind, size, np.array(members), toy()) == ns


def test_slow_links_inside_the_nodes_limit_the_rings():
    """Four rings would carry 34 bytes/ns between the nodes, the links inside 9.2: 7/8 of the bytes."""
    ns = 10_000 + 5_000 + 6 * 600 + 875_000
    assert collective_ns("all_gather", 9_200_000, np.arange(8), toy(node_gb_per_s=10)) == ns


@pytest.mark.parametrize(
    "members, size, ns",
    [
        # Eight nodes: 2 * 3 hops of 8 + 1 us, and 1,564 bytes at 7.82 bytes/ns. A ring would take 14 steps of 5 us.
        (range(0, 32, 4), 782, 10_000 + 6 * 9_000 + 200),
        # Two ranks in each node: 2 * 0.6 us more, and twice the rate.
        (sorted([*range(0, 32, 4), *range(1, 32, 4)]), 782, 10_000 + 6 * 9_000 + 1_200 + 100),
        # Three ranks in one node, one in the others: the largest chain inside a node counts.
        ([0, 1, 2, *range(4, 32, 4)], 782, 10_000 + 6 * 9_000 + 2_400 + 200),
    ],
)
def test_trees_by_hand(members, size, ns):
    assert collective_ns("all_reduce", size, np.array(list(members)), toy()) == ns


# communicators of one rank share its adapter to the network


def last(ops, schedule):
    return int(schedule.op_finish[ops].max())


def ends_by_hand(jobs):
    """When each of ``jobs`` (begin, ns alone, share) ends if all share one adapter: small steps of time."""
    left, ends, step, now = [ns for _, ns, _ in jobs], [0] * len(jobs), 10, 0
    while any(ns > 0 for ns in left):
        running = [n for n, (begin, *_) in enumerate(jobs) if begin <= now and left[n] > 0]
        rate = 1 / max(1.0, sum(jobs[n][2] for n in running))
        now += step
        for n in running:
            left[n] -= step * rate
            if left[n] <= 0:
                ends[n] = now
    return ends


@pytest.mark.parametrize("folded", [True, False])
def test_two_collectives_that_want_the_whole_adapter_have_half_of_it_each(folded):
    jobs = [("dp_replicate", 0, 60_000, 1.0), ("dp_shard", 0, 100_000, 1.0)]
    found, schedule = simulate_unrolled(beside_kernels(jobs, [1], folded))
    ends = [
        last(found.is_communication & (found.problem.costs.op_ns[0] < 140_000), schedule),
        last(found.is_communication, schedule),
    ]
    assert ends == pytest.approx([120_000, 160_000], rel=0.01)  # 40,000 ns are left for the longer one alone
    alone, before = simulate_unrolled(beside_kernels([(a, k, ns, 0.0) for a, k, ns, _ in jobs], [1], folded))
    assert before.step_ns == pytest.approx(100_000, abs=10) and not alone.adapter.any()


@pytest.mark.parametrize("seed", range(20))
def test_drawn_collectives_end_when_a_plain_simulation_of_the_shared_adapter_says(seed):
    draw = random.Random(seed)
    kernels = [draw.randrange(1, 40_000) for _ in range(3)]
    jobs = [
        (axis, after, draw.randrange(20_000, 100_000), draw.choice([1.0, 0.8, 0.5, 0.3]))
        for after, axis in enumerate(draw.sample(AXES, 3))
    ]
    begins = np.cumsum(kernels)
    expected = ends_by_hand([(begins[after], ns, share) for _, after, ns, share in jobs])
    for folded in (True, False):
        found, schedule = simulate_unrolled(beside_kernels(jobs, kernels, folded))
        assert last(found.is_communication, schedule) == pytest.approx(max(expected), rel=0.01)
        slowest = schedule.op_finish[found.is_communication & (found.rank == 0)]
        assert sorted(slowest.tolist()) == pytest.approx(sorted(expected), rel=0.02)


@pytest.mark.parametrize("seed", range(10))
def test_one_pass_over_the_ops_finds_the_times_of_the_engine(seed):
    draw = random.Random(seed)
    kernels = [draw.randrange(1, 40_000) for _ in range(draw.randrange(1, 5))]
    jobs = [(draw.choice(AXES), draw.randrange(len(kernels)), draw.randrange(1, 100_000), 1.0) for _ in range(6)]
    sends = [(draw.randrange(2), draw.randrange(1, 80_000), 1.0) for _ in range(draw.randrange(3))]
    for folded in (True, False):
        unrolled = beside_kernels(jobs, kernels, folded, sends)
        times, schedule = (
            _times(unrolled, unrolled.problem.costs.op_ns[0]),
            simulate(unrolled.problem, unrolled.placement, engine="reference"),
        )
        assert np.array_equal(times.op_start, schedule.op_start)
        assert np.array_equal(times.op_finish, schedule.op_finish)


def test_a_communicator_alone_and_shares_that_add_up_to_one_lose_nothing():
    for jobs in (
        [("dp_shard", 0, 50_000, 1.0), ("dp_shard", 1, 50_000, 1.0)],
        [("dp_shard", 0, 50_000, 0.6), ("tp", 0, 70_000, 0.4)],
        [("dp_shard", 0, 50_000, 1.0), ("tp", 0, 70_000, 0.0)],  # tensor parallelism inside a node
    ):
        unrolled = beside_kernels(jobs, [10, 10], True)
        same, _ = simulate_unrolled(unrolled)
        assert np.array_equal(same.problem.costs.op_ns, unrolled.problem.costs.op_ns)


@pytest.mark.parametrize("folded", [True, False])
def test_a_send_shares_the_adapters_of_both_its_ends_in_one_direction(folded):
    def ends(collective_share, *sends):
        jobs = [("dp_shard", 0, 80_000, collective_share)]
        found, schedule = simulate_unrolled(beside_kernels(jobs, [1], folded, sends))
        sent = found.problem.graph.op_kind == found.problem.graph.kinds.index("send")
        return sorted({round(int(end), -3) for end in schedule.op_finish[sent]})

    assert ends(1.0, (0, 80_000, 1.0)) == [160_000]  # the collectives of both stages
    assert ends(1.0, (0, 80_000, 0.0)) == ends(0.0, (0, 80_000, 1.0)) == [80_000]
    assert ends(0.0, (0, 80_000, 1.0), (1, 60_000, 1.0)) == [60_000, 80_000]  # one way each


def test_ops_of_a_communicator_wait_for_each_other_and_share_with_others():
    def taken(*ops):  # start, alone, share, communicator
        start, alone, share, queue = map(np.array, zip(*ops, strict=True))
        return shared_ns(start, alone, share, queue).tolist()

    assert taken((0, 10, 1.0, 0), (5, 10, 1.0, 1)) == [15, 15]  # 5 at full rate, 10 at half of it
    assert taken((0, 10, 0.5, 0), (5, 10, 0.5, 1)) == [10, 10]
    assert taken((0, 10, 1.0, 0), (10, 10, 1.0, 1)) == [10, 10]  # the second begins when the first has ended
    assert taken((0, 10, 1.0, 0), (0, 10, 0.5, 1)) == pytest.approx([15, 15])
    assert taken((0, 10, 1.0, 0), (0, 20, 1.0, 1), (8, 5, 1.0, 0)) == [20, 35, 10]  # the third begins at 20
    assert taken((0, 10, 1.0, 0), (0, 10, 1.0, 1), (0, 10, 1.0, 2)) == pytest.approx([30, 30, 30])


def test_shares_follow_from_bytes_and_time():
    cluster = load_cluster("dgx-h100")
    rate = cluster.network_bytes_per_s * NETWORK_SHARE
    assert adapter_share("all_reduce", 1024 * MIB, np.arange(8), cluster) == send_share(MIB, 0, 1, cluster) == 0
    one_each = np.array([0, 8])
    assert adapter_share("all_gather", 1024 * MIB, one_each, cluster) == pytest.approx(1, rel=0.01)
    small = adapter_share("all_gather", 4096, one_each, cluster)
    assert small == pytest.approx(2048 / rate * 1e9 / collective_ns("all_gather", 4096, one_each, cluster))
    # A ring over whole nodes has an adapter of each of their ranks: 15/16 of the buffer, divided by eight.
    ring = adapter_share("all_gather", 1024 * MIB, np.arange(16), cluster)
    taken = collective_ns("all_gather", 1024 * MIB, np.arange(16), cluster)
    assert ring == pytest.approx(1024 * MIB * 15 / 16 / 8 / rate * 1e9 / taken)
    exchange = adapter_share("all_to_all", 1024 * MIB, np.arange(16), cluster)
    assert exchange == pytest.approx(1, rel=0.01)
    assert send_share(MIB, 0, 8, cluster) == pytest.approx(MIB / rate * 1e9 / send_ns(MIB, 0, 8, cluster))
