"""Communicators of one rank share its adapter to the network."""

import random

import numpy as np
import pytest
from drawn import beside_kernels

from simdev.parallel import load_cluster
from simdev.parallel.costs._adapter_kernel import shared_ns
from simdev.parallel.costs.collectives import NETWORK_SHARE, adapter_share, collective_ns, send_ns, send_share
from simdev.parallel.costs.overlap import _times, simulate_unrolled
from simdev.sim import simulate

MIB = 1 << 20
AXES = ("dp_replicate", "dp_shard", "tp")


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
