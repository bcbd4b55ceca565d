import numpy as np
import pytest

from simdev.analysis import coarsen
from simdev.errors import InvalidInput
from simdev.placers.testing import random_graph, random_placement, random_problem
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import load_topology


def diamond_with_tail(groups=None):
    """0 -> 1, 2 -> 3 -> 4 -> 5: a diamond, then a chain."""
    b = GraphBuilder("diamond with tail")
    ops = [
        b.op(f"op{i}", "relu", flops=10 * i, persistent_bytes=i, workspace_bytes=i, group=(groups or {}).get(i))
        for i in range(6)
    ]
    for source, target in [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (4, 5)]:
        b.connect(b.tensor(ops[source], 100 + source), ops[target])
    return b.build()


def is_acyclic(graph, cluster):
    try:
        coarsen.coarse_numbers(graph, cluster)
    except InvalidInput:
        return False
    return True


def test_chains_are_fused():
    assert coarsen.fuse_chains(diamond_with_tail()).tolist() == [0, 1, 2, 3, 3, 3]


def test_two_groups_are_not_fused():
    assert coarsen.fuse_chains(diamond_with_tail({3: "a", 5: "b"})).tolist() == [0, 1, 2, 3, 3, 4]


def test_contract_merges_down_to_k():
    graph = diamond_with_tail()
    cluster = coarsen.contract(graph, np.ones(6), 2)
    assert cluster.max() + 1 == 2 and is_acyclic(graph, cluster)


def test_cut_makes_runs_of_equal_weight():
    assert coarsen.cut(diamond_with_tail(), np.ones(6), 3).tolist() == [0, 0, 1, 1, 2, 2]
    assert coarsen.cut(diamond_with_tail(), np.array([9, 1, 1, 1, 1, 1]), 2).tolist() == [0, 1, 1, 1, 1, 1]


def test_units_are_grouped_along_the_heaviest_traffic():
    graph = diamond_with_tail()
    assert coarsen.group_units(graph, np.ones(6), 6).tolist() == [0, 1, 2, 3, 4, 5]
    assert coarsen.group_units(graph, np.ones(6), 3).tolist() == [0, 0, 1, 1, 2, 2]  # 4-5, 2-3, 0-1
    assert coarsen.group_units(graph, np.ones(6), 1).tolist() == [0] * 6
    with pytest.raises(InvalidInput, match="0 is not a number of groups"):
        coarsen.group_units(graph, np.ones(6), 0)


@pytest.mark.parametrize("seed", range(5))
def test_groups_hold_whole_units_and_are_at_most_k(seed):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, 60)
    for k in (1, 2, 7, 200):
        group = coarsen.group_units(graph, rng.random(graph.n_ops), k)
        assert group.max() + 1 == min(k, graph.n_units)
        assert all(len(set(group[graph.unit_of_op == unit])) == 1 for unit in range(graph.n_units))


def test_coarse_graph_by_hand():
    coarse = coarsen.coarse_graph(diamond_with_tail(), np.array([0, 1, 1, 1, 2, 2]))
    assert coarse.op_flops.tolist() == [0, 60, 90]
    assert coarse.op_persistent_bytes.tolist() == [0, 6, 9]
    assert coarse.op_workspace_bytes.tolist() == [0, 3, 5]
    assert coarse.tensor_bytes.tolist() == [100, 100, 103]  # both reads of op 0's outputs, and 3 -> 4
    assert coarse.consumers.tolist() == [1, 1, 2]


def test_clusters_sharing_a_group_are_colocated():
    coarse = coarsen.coarse_graph(diamond_with_tail({0: "g", 5: "g"}), np.array([0, 1, 1, 1, 2, 2]))
    assert coarse.op_group[0] == coarse.op_group[2] >= 0 > coarse.op_group[1]


def test_cyclic_clusters_are_refused():
    with pytest.raises(InvalidInput, match="cyclic"):
        coarsen.coarse_numbers(diamond_with_tail(), np.array([0, 1, 2, 0, 3, 3]))


def test_wrong_length_is_refused():
    with pytest.raises(InvalidInput, match="cluster"):
        coarsen.coarse_graph(diamond_with_tail(), np.zeros(5, int))


@pytest.mark.parametrize("seed", range(40))
def test_clusterings_of_random_graphs(seed):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, 60)
    k = int(rng.integers(1, 10))
    weight = rng.random(graph.n_ops)
    fused, merged, runs = coarsen.fuse_chains(graph), coarsen.contract(graph, weight, k), coarsen.cut(graph, weight, k)
    for cluster in (fused, merged, runs):
        assert is_acyclic(graph, cluster)
        assert (
            coarsen.coarse_graph(graph, coarsen.coarse_numbers(graph, cluster)).op_flops.sum() == graph.op_flops.sum()
        )
    assert runs.max() < k
    for cluster in (fused, merged):
        tied = graph.op_group >= 0
        pairs = np.unique(np.stack([cluster[tied], graph.op_group[tied]], axis=1), axis=0)
        assert len(pairs) == len(np.unique(pairs[:, 0])), "a cluster holds two colocation groups"


@pytest.mark.parametrize("seed", range(40))
def test_a_coarse_placement_is_a_placement(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, max_ops=40, rules=Rules())
    clustering = coarsen.contract(problem.graph, np.ones(problem.graph.n_ops), 5)
    coarse, numbers = coarsen.coarse_problem(problem, clustering)
    kernels = problem.costs.op_ns
    for kind in range(len(kernels)):
        for number in range(coarse.graph.n_ops):
            parts = kernels[kind, numbers == number]
            assert coarse.costs.op_ns[kind, number] == (-1 if (parts < 0).any() else parts.sum())
    placement = random_placement(rng, coarse)
    Placement(coarsen.expand(numbers, placement.devices)).check(problem)
    # What travels between clusters is what travels between their ops, at the same cost.
    kept = coarsen.outer_tensors(problem.graph, numbers)
    assert sorted(problem.costs.transfer_ns[:, kept].T.tolist()) == sorted(coarse.costs.transfer_ns.T.tolist())
    assert np.array_equal(np.sort(problem.graph.tensor_bytes[kept]), np.sort(coarse.graph.tensor_bytes))


def test_coarse_costs_follow_their_tensors():
    problem = Problem.build(diamond_with_tail(), load_topology("p100x2"))
    coarse, _ = coarsen.coarse_problem(problem, np.array([0, 1, 1, 1, 2, 2]))
    expected = {
        int(b): t for b, t in zip(problem.graph.tensor_bytes, problem.costs.transfer_ns.T.tolist(), strict=True)
    }
    for size, times in zip(coarse.graph.tensor_bytes, coarse.costs.transfer_ns.T.tolist(), strict=True):
        assert times == expected[int(size)]
