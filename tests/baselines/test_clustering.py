"""Dominant sequence clustering on forks, joins and chains, where its answer is optimal and easy to work out."""

import numpy as np
from test_list_schedulers import place, problem_of

from simdev.baselines import _list, critical_path
from simdev.sim import simulate_many


def clusters(durations, edges):
    problem = problem_of(durations, edges, 2)
    table = _list.tables(problem, forward_only=False)
    return critical_path.dominant_sequence_clusters(
        problem.graph, table, problem.costs.op_ns[0], problem.costs.transfer_ns[0]
    ).tolist()


def test_chain_is_one_cluster():
    assert clusters([1, 2, 3], {(0, 1): 1, (1, 2): 1}) == [0, 0, 0]


def test_fork_keeps_the_longer_child():
    # The first child starts at 2 at home. The second would start there at 7, elsewhere at 2 + 4 = 6.
    assert clusters([2, 5, 3], {(0, 1): 4, (0, 2): 4}) == [0, 0, 1]


def test_fork_with_slow_transfers_is_one_cluster():
    assert clusters([2, 5, 3], {(0, 1): 6, (0, 2): 6}) == [0, 0, 0]


def test_join_follows_the_later_parent():
    assert clusters([3, 10, 1], {(0, 2): 4, (1, 2): 4}) == [1, 0, 0]


def test_group_stays_in_one_cluster():
    problem = problem_of([2, 5, 3], {(0, 1): 4, (0, 2): 4}, 2, groups={1: "g", 2: "g"})
    table = _list.tables(problem, forward_only=False)
    found = critical_path.dominant_sequence_clusters(
        problem.graph, table, problem.costs.op_ns[0], problem.costs.transfer_ns[0]
    )
    assert found[1] == found[2]


def test_clusters_are_spread_over_devices():
    edges = {(2 * chain, 2 * chain + 1): 50 for chain in range(4)}
    devices = place("critical-path", problem_of([10] * 8, edges, 2)).reshape(4, 2)
    assert (devices[:, 0] == devices[:, 1]).all()
    assert np.bincount(devices[:, 0]).tolist() == [2, 2]


def test_memory_moves_clusters():
    # Ops tied by dear transfers would all go to one device; it holds two of the four.
    problem = problem_of([10] * 4, {}, 2, memory_bytes=250, persistent={op: 100 for op in range(4)})
    devices = place("critical-path", problem)
    assert simulate_many(problem, devices[None]).overflow_bytes[0] == 0
