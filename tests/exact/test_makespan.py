"""Constraint programming: step times by hand, the proven bound against enumeration, blocks and the placer cp-sat."""

import itertools

import numpy as np
import pytest
from test_exact_placers import machine, place, training_chain

from simdev.errors import InvalidInput, Unsupported
from simdev.exact.blocks import blocks
from simdev.exact.makespan import solve_makespan
from simdev.placers.testing import random_problem
from simdev.problem.costs import CostTable
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Link, Topology
from simdev.sim import simulate


def two_chains(flops, size, count=2):
    """Two chains of two ops each from one source, joined at the end."""
    b = GraphBuilder("two")
    root = b.op("root", "mm", outputs=[size], flops=10)
    ends = []
    for name in "ab":
        first = b.op(f"{name}0", "mm", inputs=b.outputs(root), outputs=[size], flops=flops)
        ends += b.outputs(b.op(f"{name}1", "mm", inputs=b.outputs(first), outputs=[size], flops=flops))
    b.op("join", "mm", inputs=ends, flops=10)
    return Problem.build(b.build(), machine(count))


def test_parallel_chains_are_split_when_transfers_are_cheap():
    cheap = two_chains(flops=1000, size=1)
    found = solve_makespan(cheap, seconds=2)
    assert found.status == "optimal"
    step = simulate(cheap, Placement.of_units(cheap, found.found[-1])).step_ns
    # One chain waits 1 ns for the root's tensor; the other is done by then and sends its end while the first finishes.
    assert step == found.model_ns == found.bound_ns == 10 + 1 + 2000 + 10
    dear = two_chains(flops=1000, size=5000)
    stay = solve_makespan(dear, seconds=2)
    assert stay.bound_ns == 4020 and len(set(stay.found[-1].tolist())) == 1


def test_ties_memory_and_what_is_allowed_are_kept():
    problem = two_chains(flops=1000, size=1)
    tied = solve_makespan(problem, tie=np.zeros(6, int), seconds=2)
    assert tied.bound_ns == 4020 and len(set(tied.found[-1].tolist())) == 1
    allowed = np.ones((2, 6), bool)
    allowed[1, 3] = False
    assert solve_makespan(problem, allowed=allowed, seconds=2).found[-1][3] == 0
    sizes = np.full(6, 300_000)  # three fit on a device of 1 MiB
    assert np.bincount(solve_makespan(problem, size=sizes, seconds=2).found[-1]).tolist() == [3, 3]
    with pytest.raises(Unsupported, match="two: the persistent bytes fit in no placement"):
        solve_makespan(problem, size=np.full(6, 400_000), seconds=2)
    with pytest.raises(Unsupported, match="no device supports all ops"):
        solve_makespan(problem, allowed=np.zeros((2, 6), bool), seconds=2)


def test_nothing_within_a_step_time_is_a_bound():
    problem = two_chains(flops=1000, size=1)
    found = solve_makespan(problem, upper_ns=2000, seconds=2)
    assert not len(found.found) and found.bound_ns == 2000


def best_by_enumeration(problem):
    best = None
    for devices in itertools.product(range(problem.topology.n_devices), repeat=problem.graph.n_units):
        placement = Placement.of_units(problem, np.array(devices))
        try:
            placement.check(problem)
        except InvalidInput:
            continue
        run = simulate(problem, placement)
        if run.feasible and (best is None or run.step_ns < best):
            best = run.step_ns
    return best


def test_the_bound_is_below_every_feasible_placement():
    rng, met, exact = np.random.default_rng(0), 0, 0
    while met < 40:
        problem = random_problem(rng, max_ops=6)
        if problem.topology.n_devices**problem.graph.n_units > 700:
            continue
        best = best_by_enumeration(problem)
        try:
            found = solve_makespan(problem, seconds=0.3, wall_seconds=2)
        except Unsupported:
            assert best is None
            continue
        met += 1
        if best is not None:
            assert found.bound_ns <= best, problem.rules
            exact += found.bound_ns >= 0.999 * best
    assert exact > 10


def test_blocks_cover_the_graph_and_go_there_and_back():
    problem = Problem.build(training_chain(6), machine(3), rules=Rules())
    made = blocks(problem, 3)
    assert made.count == 3 and made.problem.graph.n_ops >= 2 * made.count
    per_block = np.array([2, 0, 1])
    devices = made.expand(per_block[made.tie])
    Placement(devices).check(problem)
    assert np.array_equal(devices, per_block[made.block_of])
    assert np.array_equal(made.project(problem, devices), per_block[made.tie])
    assert made.size.sum() == 6 * 1000 + 6 * 100


def test_cp_sat_is_no_worse_than_its_starts_and_repeats():
    problem = Problem.build(training_chain(6), machine(3, memory=6000))
    first, budget = place("cp-sat[rounds=1,effort=0.1]", problem, evaluations=60)
    again, _ = place("cp-sat[rounds=1,effort=0.1]", problem, evaluations=60)
    assert np.array_equal(first.devices, again.devices)
    run = simulate(problem, first)
    other, _ = place("dp", problem)
    assert run.feasible and run.step_ns == budget.best_step_ns <= simulate(problem, other).step_ns
    with pytest.raises(Unsupported, match="no evaluations"):
        place("cp-sat", problem, evaluations=0)


# The example of Moirai (Zhang et al. 2023): task: (readers, ms on three devices, bytes); (task, reader): ms between
# devices 0 and 1, 0 and 2, 1 and 2. Its virtual source and sink, which cost nothing, are left out.
TASKS = {
    1: ([5], (8, 9, 7), 5), 2: ([5], (7, 6, 8), 2), 5: ([11], (8, 5, 6), 4), 6: ([11], (5, 8, 6), 5),
    7: ([11], (5, 4, 3), 3), 11: ([14], (3, 3, 5), 4), 13: ([19], (6, 7, 8), 2), 14: ([19, 23], (1, 2, 4), 1),
    18: ([22], (7, 9, 6), 4), 19: ([22], (2, 5, 4), 6), 22: ([], (7, 5, 8), 5), 23: ([], (6, 7, 5), 3),
}  # fmt: skip
SENDS = {
    (1, 5): (3, 4, 2), (2, 5): (1, 3, 2), (5, 11): (2, 4, 2), (6, 11): (1, 3, 2), (7, 11): (2, 1, 1),
    (11, 14): (4, 3, 1), (13, 19): (4, 2, 3), (14, 19): (1, 2, 4), (14, 23): (3, 2, 3),
    (18, 22): (2, 2, 4), (19, 22): (1, 3, 2),
}  # fmt: skip


@pytest.mark.parametrize("contention", ["fifo", "none"])
def test_example_of_moirai(contention):
    kinds = [DeviceKind(f"p{i}", bytes_, {"f32": 1e9}, 1e12, granularity=1) for i, bytes_ in enumerate((14, 14, 16))]
    links = tuple(Link((f"d{i}", "switch"), 10**9, 0) for i in range(3))  # one transfer leaves or enters at a time
    topology = Topology("moirai", tuple(Device(f"d{i}", kind) for i, kind in enumerate(kinds)), links, ("switch",))
    b, handle = GraphBuilder("moirai"), {}
    for task, (_, _, size) in TASKS.items():
        handle[task] = b.op(str(task), "op", persistent_bytes=size)
    for task, reader in SENDS:
        b.connect(b.tensor(handle[task], 0), handle[reader])
    graph = b.build()
    op_ns = np.array([[1000 * TASKS[int(name)][1][d] for name in graph.op_names] for d in range(3)])
    names = [int(name) for name in graph.op_names]
    sends = [
        SENDS[names[graph.tensor_producer[t]], names[graph.consumers[graph.consumer_ptr[t]]]]
        for t in range(graph.n_tensors)
    ]
    pair = np.array([[-1, 0, 1], [0, -1, 2], [1, 2, -1]])
    costs = CostTable(op_ns, np.arange(3), 1000 * np.array(sends).T, pair, np.zeros(graph.n_ops, np.int64))
    found = solve_makespan(Problem(graph, topology, costs, Rules(contention=contention)), seconds=20)
    assert found.status == "optimal" and found.model_ns == found.bound_ns == 30_000
