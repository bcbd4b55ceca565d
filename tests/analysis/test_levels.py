"""Levels, critical paths, and the steady state of a pipeline."""

import networkx as nx
import numpy as np
import pytest
from drawn import chain, machine, problem

from simdev.analysis.bounds import lower_bound, lower_bounds
from simdev.analysis.coarsen import joined
from simdev.analysis.levels import (
    average_durations,
    average_transfers,
    b_level,
    critical_path,
    fastest_durations,
    levels,
    t_level,
)
from simdev.analysis.steady import steady_bound
from simdev.placers.testing import random_graph, random_placement, random_problem
from simdev.problem.costs import CostTable
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.sim import simulate
from simdev.sim.pipeline import simulate_pipeline

# levels, critical paths and lower bounds


def diamond():
    """a -> b, c -> d, with a tensor of 4 bytes from a (read by b and c), 1 from b, 9 from c."""
    g = GraphBuilder("diamond")
    a = g.op("a", "op", outputs=[4])
    b = g.op("b", "op", inputs=g.outputs(a), outputs=[1])
    c = g.op("c", "op", inputs=g.outputs(a), outputs=[9])
    g.op("d", "op", inputs=g.outputs(b) + g.outputs(c))
    return g


def test_levels_of_a_diamond():
    graph, time = diamond().build(), np.array([1, 5, 2, 3])
    assert levels(graph).tolist() == [0, 1, 1, 2]
    assert b_level(graph, time).tolist() == [9, 8, 5, 3]
    assert t_level(graph, time).tolist() == [0, 1, 1, 6]
    assert critical_path(graph, time).tolist() == [0, 1, 3]
    transfer = np.array([0, 0, 10])
    assert b_level(graph, time, transfer).tolist() == [16, 8, 15, 3]
    assert t_level(graph, time, transfer).tolist() == [0, 1, 1, 13]
    assert critical_path(graph, time, transfer).tolist() == [0, 2, 3]


@pytest.mark.parametrize("seed", range(10))
def test_levels_agree_with_networkx(seed):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, 40)
    duration, transfer = rng.integers(1, 9, graph.n_ops), rng.integers(0, 9, graph.n_tensors)
    dag = nx.DiGraph()
    for op in range(graph.n_ops):
        dag.add_edge((op, "in"), (op, "out"), weight=int(duration[op]))
    for tensor, source, target in zip(graph.edge_tensor, graph.edge_source, graph.consumers, strict=True):
        weight = int(transfer[tensor])
        if dag.has_edge((source, "out"), (target, "in")):
            weight = max(weight, dag[source, "out"][target, "in"]["weight"])
        dag.add_edge((int(source), "out"), (int(target), "in"), weight=weight)
    longest = nx.dag_longest_path_length(dag)
    below, above = b_level(graph, duration, transfer), t_level(graph, duration, transfer)
    assert below.max() == longest == (above + duration).max()
    assert np.all(above + below <= longest)
    path = critical_path(graph, duration, transfer)
    assert np.all((above + below)[path] == longest) and above[path[0]] == 0 and below[path[-1]] == duration[path[-1]]


def test_averages_leave_out_devices_without_a_kernel():
    p = problem(chain(5, 5), machine(3), [1, 1])
    costs = CostTable(
        np.array([[4, 7], [9, -1]]), np.array([0, 0, 1]), p.costs.transfer_ns, p.costs.pair_class, p.costs.dispatch_ns
    )
    p = Problem(p.graph, p.topology, costs)
    assert average_durations(p).tolist() == [5, 7]  # (4 + 4 + 9) // 3, (7 + 7) // 2
    assert fastest_durations(p).tolist() == [4, 7]
    assert average_transfers(p).tolist() == [15, 15]


def independent(durations, persistent=0):
    g = GraphBuilder("independent")
    for i in range(len(durations)):
        g.op(f"o{i}", "op", persistent_bytes=persistent)
    return g


def test_bound_of_a_chain_is_its_critical_path():
    bound = lower_bound(problem(chain(5, 5, 5), machine(), [3, 4, 5]))
    assert (bound.ns, bound.method, bound.fits) == (12, "critical path", True)


def test_bound_of_independent_ops_is_the_load():
    assert lower_bound(problem(independent([5] * 5), machine(2), [5] * 5)).ns == 13  # 25 / 2, rounded up
    bound = lower_bound(problem(independent([5] * 8), machine(2, slots=2), [5] * 8))
    assert (bound.ns, bound.method) == (10, "load")


def test_memory_keeps_work_on_the_slow_device():
    # 8 ops of 10 persistent bytes; 1 ns on the small device, 10 ns on the large one; 40 bytes fit on the small one.
    p = problem(independent([1] * 8, persistent=10), machine(2, memory=40), [1] * 8)
    assert lower_bound(p).ns == 4
    costs = CostTable(
        np.array([[1] * 8, [10] * 8]), np.array([0, 1]), p.costs.transfer_ns, p.costs.pair_class, p.costs.dispatch_ns
    )
    assert lower_bound(Problem(p.graph, p.topology, costs)).ns == 40


def test_more_persistent_bytes_than_memory_fit_nowhere():
    p = problem(independent([5] * 4, persistent=30), machine(2, memory=40), [5] * 4)
    assert not lower_bound(p).fits and lower_bound(p).ns >= 10  # the work of two ops on each device, or more


def test_eager_bound_counts_the_issues():
    p = problem(chain(5, 5), machine(2, host=True), [3, 4], rules=Rules(runtime="eager"), dispatch=100)
    bound = lower_bound(p)
    assert (bound.ns, bound.method) == (204, "issue")


@pytest.mark.slow
def test_no_feasible_placement_beats_the_bound():
    tight = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        p = random_problem(rng)
        bound = lower_bound(p)
        for _ in range(3):
            schedule = simulate(p, random_placement(rng, p))
            if schedule.feasible:
                assert bound.fits and schedule.step_ns >= bound.ns
                tight += schedule.step_ns == bound.ns
    assert tight > 5


def test_bound_of_a_bundle_between_two_ops_is_path_and_load():
    g = GraphBuilder("bundle")
    first = g.outputs(g.op("first", "op", outputs=[1]))
    made = [g.outputs(g.op(f"o{i}", "op", inputs=first, outputs=[1]))[0] for i in range(16)]
    g.op("last", "op", inputs=made)
    bound = lower_bound(problem(g, machine(2), [10] * 18))
    assert (bound.ns, bound.method) == (100, "path and load")  # 10, 16 * 10 on two devices, 10


def test_large_bounds_from_loads_keep_24_bits():
    p = problem(independent([5] * 3), machine(2), [2**40 + 2**39 + 12345] * 3)
    bound = next(bound for bound in lower_bounds(p) if bound.method == "load")
    assert bound.ns % 2**17 == 0
    assert 0 <= 3 * (2**40 + 2**39 + 12345) / 2 - bound.ns < 2**18


def test_of_equal_paths_the_critical_one_has_the_lowest_numbers():
    b = GraphBuilder("fork")
    made = b.outputs(b.op("o0", "op", outputs=[0]))
    b.op("o1", "op", inputs=made)
    b.op("o2", "op", inputs=made)
    assert critical_path(b.build(), np.array([1, 2, 2])).tolist() == [0, 1]


# the bound of a saturated pipeline, beside steady times that are no whole numbers


def one_op(ns, n_devices):
    b = GraphBuilder("one")
    b.op("o", "op")
    return problem(b, machine(n_devices), [ns])


@pytest.mark.parametrize("ns, n_devices, bound", [(3, 2, 1), (4, 2, 2), (10, 3, 3), (11, 3, 3), (5, 1, 5)])
def test_the_bound_is_rounded_down(ns, n_devices, bound):
    p = one_op(ns, n_devices)
    placement = Placement(np.zeros(1, int), replica_of=np.zeros(n_devices, int))
    report = simulate_pipeline(p, placement, 8 * n_devices)
    assert report.steady_ns == ns / n_devices
    assert steady_bound(p).ns == bound <= report.steady_ns


def test_joined_numbers_go_by_the_smallest_of_their_set():
    pairs = [(4, 2), (5, 4), (3, 3), (7, 9), (1, 8)]  # 8 and 9 are not among the numbers
    assert joined([1, 2, 3, 4, 5, 7], pairs) == {1: 1, 2: 2, 3: 3, 4: 2, 5: 2, 7: 7}
