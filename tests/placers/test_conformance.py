"""Every registered placer keeps the rules, on awkward random problems and on a real graph."""

import numpy as np
import pytest

from simdev.errors import BudgetExhausted, InvalidInput
from simdev.placers.budget import Budget
from simdev.placers.placer import PlacerSpec
from simdev.placers.registry import graph_path, load_workload, placers
from simdev.placers.testing import check_placer, random_placement, random_problem
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import load_topology

SPECS = placers()
# Measured: all problems take over eight seconds, mostly to compile for every size of a graph. One of them is tried at
# once; all are slow. Two placers take that long to compile for one. Of the learned placers, giph is tried on Inception.
LONG_ON_ONE = {"hdp", "placeto-joint"}
LONG_ON_RANDOM = {"hdp", "hsdag", "ip-throughput", "learned-search", "placeto", "placeto-joint"}
LONG_ON_INCEPTION = {"colocrl", "cp-sat", "doppler", "dp", "gdp", "hdp", "placeto", "placeto-joint"}


def marked(names, long):
    return [pytest.param(name, marks=pytest.mark.slow if name in long else ()) for name in names]


@pytest.mark.parametrize("name", sorted(LONG_ON_RANDOM - LONG_ON_ONE))
def test_conformance_on_a_random_problem(name):
    problem = random_problem(np.random.default_rng(4), rules=Rules())  # that of the searching placers below
    assert check_placer(SPECS[name], problem, evaluations=10) is not None


@pytest.mark.parametrize("name", marked(SPECS, LONG_ON_RANDOM))
def test_conformance_on_random_problems(name):
    placed = 0
    for seed in range(5 if SPECS[name].family == "learned" else 25):  # they compile for every size
        problem = random_problem(np.random.default_rng(seed), rules=Rules())
        placed += check_placer(SPECS[name], problem, evaluations=(0, 1, 30)[seed % 3], seed=seed) is not None
    assert placed or name == "expert"  # which knows none of these families


@pytest.mark.parametrize("name", marked(SPECS, LONG_ON_INCEPTION))
def test_conformance_on_inception(name):
    if not graph_path("inception-v3").is_file():
        pytest.skip("the graph of inception-v3 is not shipped")
    problem = Problem.build(load_workload("inception-v3"), load_topology("p100x2"))
    assert check_placer(SPECS[name], problem, evaluations=40) is not None


@pytest.mark.parametrize("name", marked([name for name, spec in SPECS.items() if spec.searches], LONG_ON_ONE))
def test_searching_placers_report_what_they_return(name):
    problem = random_problem(np.random.default_rng(4), rules=Rules())
    budget = Budget(problem, evaluations=60)
    placement = SPECS[name].place(problem, rng=np.random.default_rng(0), budget=budget)
    assert 0 < budget.used <= 60
    if budget.best is not None:
        assert np.array_equal(budget.best, placement.devices)


def test_what_a_placer_returns_is_checked_and_the_end_of_the_budget_is_no_loss():
    problem = random_problem(np.random.default_rng(5))

    def wrong(problem, *, rng, budget):
        return [0] * problem.graph.n_ops

    def endless(problem, *, rng, budget):
        while True:
            budget.evaluate(random_placement(rng, problem).devices)

    def place(function, evaluations):
        budget = Budget(problem, evaluations=evaluations)
        return PlacerSpec("mine", 1, "test", function).place(
            problem, rng=np.random.default_rng(0), budget=budget
        ), budget

    with pytest.raises(InvalidInput, match="placer mine: returned list, expected Placement"):
        place(wrong, 5)
    found, budget = place(endless, 5)
    assert budget.used == 5 and (found.devices == budget.best).all()
    with pytest.raises(BudgetExhausted, match="used up after 0 evaluations"):
        place(endless, 0)
