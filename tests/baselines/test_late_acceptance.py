"""``late-acceptance``: its compiled loop does what evaluations one by one do, and finds what is there."""

import itertools
import math

import numpy as np
import pytest
from drawn import chain, machine
from drawn import problem as drawn_problem

from simdev.baselines import _late as late
from simdev.baselines import _late_kernels as kernels
from simdev.errors import InvalidInput
from simdev.placers.budget import Budget
from simdev.placers.registry import find_placer, graph_path, load_workload
from simdev.placers.testing import random_problem
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import load_topology
from simdev.sim import simulate, simulate_many

ORDERS = ["fifo", "priority"]
COMPILED = [1, 2, 5, 6, 7, 8]  # seeds of drawn problems with several devices of one slot


def search(problem, evaluations=math.inf, seed=0, **given):
    spec, params = find_placer("late-acceptance")
    budget = Budget(problem, evaluations=evaluations, **given)
    placement = spec.place(problem, rng=np.random.default_rng(seed), budget=budget, **params)
    placement.check(problem)
    return placement, budget


def drawn(seed, order):
    return random_problem(np.random.default_rng(seed), max_ops=40, rules=Rules(order))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", COMPILED)
def test_the_compiled_loop_finds_what_evaluations_one_by_one_find(order, seed):
    problem = drawn(seed, order)
    assert walk(problem)._compiled() is not None
    compiled, spent = search(problem, 400)
    other, also_spent = search(problem, 400, simulate=simulate_many)
    assert (compiled.devices == other.devices).all() and spent.used == also_spent.used
    if order == "priority":
        assert (compiled.priority == other.priority).all()
    assert spent.best_step_ns == also_spent.best_step_ns


@pytest.mark.parametrize("order", ORDERS)
def test_the_answer_is_the_best_that_the_budget_knows(order):
    for seed in range(10):
        problem = drawn(seed, order)
        placement, budget = search(problem, 300)
        schedule = simulate(problem, placement)
        if budget.best_step_ns is not None:
            assert (schedule.step_ns, schedule.overflow_bytes.sum()) == (budget.best_step_ns, 0)


@pytest.fixture(scope="module", params=ORDERS)
def inception(request):
    if not graph_path("inception-v3").is_file():
        pytest.skip("the graph of inception-v3 is not shipped")
    return Problem.build(load_workload("inception-v3"), load_topology("p100x4"), rules=Rules(request.param))


def test_longer_walks_are_better(inception):
    few, some, many = (search(inception, evaluations)[1].best_step_ns for evaluations in (30, 600, 6000))
    assert few > 1.05 * some and some > 1.02 * many


def test_the_order_of_ops_is_searched_too(inception):
    """The same devices with the default order, by longest paths, take longer."""
    placement, budget = search(inception, 2000)
    usual = simulate(inception, Placement(placement.devices)).step_ns
    assert usual > budget.best_step_ns if inception.rules.order == "priority" else usual == budget.best_step_ns


def test_one_device_leaves_nothing_to_draw():
    problem = drawn_problem(chain(1, 1), machine(1), [1, 1], rules=Rules())
    placement, budget = search(problem, 400)
    assert (placement.devices == 0).all() and budget.used < 40


def walk(problem, seed=0, name="late-acceptance", **given):
    """A walk from the best start, after some 240 moves or the budget that is given."""
    spec, params = find_placer(name)
    found, budget = {}, Budget(problem, **(given or {"evaluations": 250}))
    run = late.LateWalk.run
    try:
        late.LateWalk.run = lambda self: found.setdefault("walk", self) and run(self)
        spec.place(problem, rng=np.random.default_rng(seed), budget=budget, **params)
    finally:
        late.LateWalk.run = run
    return found["walk"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", COMPILED)
def test_what_is_tried_is_what_is_accepted_between_two_moves(order, seed):
    state = walk(drawn(seed, order)).late
    n = len(state.rank)
    assert (state.devices == state.tried_devices).all() and (state.rank == state.tried_rank).all()
    assert (state.order == state.tried_order).all() and (state.rank[state.order] == np.arange(n)).all()


@pytest.mark.parametrize(
    "step_ns, overflow, ago, kept",
    [(100, 0, 110, True), (105, 0, 110, True), (110, 0, 110, True), (111, 0, 110, False), (50, 1, 110, False)]
    + [(103, 0, 101, True), (106, 0, 101, False)],
)
def test_a_move_is_kept_if_it_is_no_worse_than_now_or_than_some_moves_ago(step_ns, overflow, ago, kept):
    """The present placement costs 105, the one two moves ago ``ago``; what does not fit costs more."""
    found = walk(drawn(4, "fifo"))
    state = found.late._replace(history=np.array([ago, 107]))
    state.state[[kernels.STEP, kernels.COST, kernels.BEST]] = 4, 105, 104
    assert kernels.draw_move(late.problem_arrays(found.problem), found.moves, state)
    before, tried = state.devices.copy(), state.tried_devices.copy()
    assert (before != tried).any()
    kernels.settle_move(found.moves, state, step_ns, overflow)
    assert (state.devices == (tried if kept else before)).all() and (state.tried_devices == state.devices).all()
    cost = step_ns if kept else 105
    assert state.state[[kernels.STEP, kernels.COST, kernels.BEST]].tolist() == [5, cost, min(cost, 104)]
    assert state.history.tolist() == [min(ago, cost), 107]


def test_placements_that_do_not_fit_are_left_by_the_bytes_that_they_lack():
    found = walk(drawn(4, "fifo"))
    state = found.late._replace(history=np.array([kernels.UNFIT + 100]))
    state.state[[kernels.COST, kernels.BEST]] = kernels.UNFIT + 100
    for step_ns, overflow, cost in ((5, 101, 100), (500, 99, 99), (10**9, 0, None)):
        assert kernels.draw_move(late.problem_arrays(found.problem), found.moves, state)
        kernels.settle_move(found.moves, state, step_ns, overflow)
        assert state.state[kernels.COST] == (step_ns if cost is None else kernels.UNFIT + cost)


def test_no_cost_of_the_history_is_less_than_the_best():
    problem = drawn(6, "fifo")
    state = walk(problem).late
    assert state.state[kernels.BEST] <= state.history.min() and state.state[kernels.COST] >= state.state[kernels.BEST]


def test_seconds_shorten_the_history():
    """At each look at this clock a millisecond has passed, so the first 256 moves say that the time will not suffice
    for all evaluations."""
    clock = itertools.count(step=1e-3).__next__
    found = walk(drawn(7, "fifo"), evaluations=40_000, seconds=0.2, clock=clock)
    assert 10 < len(found.late.history) < 40_000 / late.MEMORY - 10
    best = Placement(found.late.best_devices.astype(np.int32))
    assert simulate(found.problem, best).step_ns == found.budget.best_step_ns


@pytest.mark.parametrize("given, said", [("memory=0", "0 is not positive")])
def test_a_history_that_cannot_be_is_refused(given, said):
    spec, params = find_placer(f"late-acceptance[{given}]")
    with pytest.raises(InvalidInput, match=said):
        spec.place(drawn(4, "fifo"), rng=np.random.default_rng(0), budget=Budget(drawn(4, "fifo")), **params)
