"""``multilevel``: what it finds on merged graphs is worth its evaluations on the graph."""

import math
import time

import numpy as np
import pytest

from simdev import Problem
from simdev.baselines import multilevel as module
from simdev.placers.budget import Budget
from simdev.placers.registry import find_placer
from simdev.placers.testing import random_problem
from simdev.problem.placement import Placement
from simdev.problem.problem import Rules
from simdev.sim import simulate


def search(name, problem, seed=0, **given):
    spec, params = find_placer(name)
    budget = Budget(problem, **given)
    spec.place(problem, rng=np.random.default_rng(seed), budget=budget, **params)
    return budget


@pytest.mark.parametrize("order", ["fifo", "priority"])
def test_merged_graphs_save_evaluations(order):
    problem = Problem.build("amoebanet-d-small", "k80x4", rules=Rules(order))
    budgets = {name: search(name, problem, evaluations=300) for name in ("multilevel", "late-acceptance")}
    assert all(budget.used <= 300 for budget in budgets.values())
    assert budgets["multilevel"].best_step_ns < 0.98 * budgets["late-acceptance"].best_step_ns


def test_each_level_is_finer_and_its_placement_means_the_same_on_the_graph():
    problem = Problem.build("nmt", "p100x2")
    levels = list(module._levels(problem))
    assert [int(numbers.max()) + 1 for _, numbers in levels] == [merged.graph.n_ops for merged, _ in levels]
    sizes = [merged.graph.n_ops for merged, _ in levels] + [problem.graph.n_ops]
    assert len(sizes) > 2 and all(module.FEWER * a <= b for a, b in zip(sizes, sizes[1:], strict=False))
    one = Placement(np.full(problem.graph.n_ops, problem.topology.accelerators[0], np.int32))
    for merged, numbers in levels:
        coarse = module._merged(problem, merged, numbers, one)
        assert (coarse.devices[numbers] == one.devices).all()
        assert simulate(merged, coarse).step_ns == simulate(problem, one).step_ns  # one device is always busy


def test_levels_take_a_share_of_the_seconds(monkeypatch):
    problem = Problem.build("amoebanet-d-small", "k80x4")
    granted = []
    apart = Budget.apart
    monkeypatch.setattr(Budget, "apart", lambda *given: granted.append(apart(*given)) or granted[-1])
    budget = search("multilevel", problem, evaluations=math.inf, seconds=4.0, clock=time.process_time)
    assert budget.used > 0 and len(granted) > 1
    assert all(level.used > 0 and level.seconds < 2.0 for level in granted)


def test_without_compiled_code_there_are_no_levels(monkeypatch):
    monkeypatch.setattr(module, "_levels", None)
    problem = random_problem(np.random.default_rng(2), max_ops=40)
    assert search("multilevel", problem, evaluations=50, microbatches=4).used <= 50
