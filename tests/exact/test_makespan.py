"""Constraint programming: step times by hand, the proven bound against enumeration, blocks and the placer cp-sat."""

import itertools

import numpy as np
import pytest
from drawn import moirai_example
from test_exact_placers import machine, place, training_chain

from simdev.errors import InvalidInput, Unsupported
from simdev.exact.blocks import blocks
from simdev.exact.makespan import solve_makespan
from simdev.placers.testing import random_problem
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
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


@pytest.mark.parametrize("contention", ["fifo", "none"])
def test_example_of_moirai(contention):
    found = solve_makespan(moirai_example(Rules(contention=contention)), seconds=20)
    assert found.status == "optimal" and found.model_ns == found.bound_ns == 30_000
