"""``multilevel``: what it finds on smaller problems is worth its evaluations on the graph."""

import math
import time

import numpy as np
import pytest

from simdev import Problem
from simdev.baselines import multilevel as module
from simdev.baselines._descent import descended
from simdev.baselines._search import layer_of_unit
from simdev.baselines._search import starts as simple_starts
from simdev.baselines._shortened import SHARE
from simdev.baselines._units import choices
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
@pytest.mark.parametrize(
    "workload, topology, evaluations, shorter", [("amoebanet-d-small", "k80x4", 300, 0.98), ("nmt", "p100x4", 500, 0.9)]
)
def test_smaller_problems_save_evaluations(workload, topology, evaluations, shorter, order):
    problem = Problem.build(workload, topology, rules=Rules(order))
    budgets = {name: search(name, problem, evaluations=evaluations) for name in ("multilevel", "late-acceptance")}
    assert all(budget.used <= evaluations for budget in budgets.values())
    assert budgets["multilevel"].best_step_ns < shorter * budgets["late-acceptance"].best_step_ns


def test_a_placement_of_the_merged_graph_means_the_same_on_the_graph():
    problem = Problem.build("amoebanet-d-small", "k80x4")
    merged, numbers, _ = module._smaller(problem)
    assert int(numbers.max()) + 1 == merged.graph.n_ops <= problem.graph.n_ops / module.FEWER
    one = Placement(np.full(problem.graph.n_ops, problem.topology.accelerators[0], np.int32))
    coarse = module._on_smaller(problem, merged, numbers, one)
    assert (coarse.devices[numbers] == one.devices).all()
    assert simulate(merged, coarse).step_ns == simulate(problem, one).step_ns  # one device is always busy


@pytest.mark.parametrize("workload", ["nmt", "gnmt-4", "rnnlm"])
def test_placements_of_layers_rank_alike_on_a_shortened_network(workload):
    problem, rng = Problem.build(workload, "p100x4"), np.random.default_rng(0)
    short, numbers, _ = module._smaller(problem)
    layer, steps = layer_of_unit(problem), []
    for _ in range(20):
        devices = rng.integers(1, 5, layer.max() + 1)[layer][problem.graph.unit_of_op]
        on_short = module._on_smaller(problem, short, numbers, Placement(devices.astype(np.int32)))
        whole = simulate(problem, Placement(on_short.devices[numbers])).step_ns
        steps.append((simulate(short, on_short).step_ns / SHARE, whole))
    ratio = np.log(steps) @ [1, -1]
    assert abs(ratio.mean()) < 0.05 and ratio.std() < 0.05
    assert np.corrcoef(np.log(steps).T)[0, 1] > 0.95


def test_a_shortened_network_keeps_a_quarter_of_its_ops_work_and_memory():
    problem = Problem.build("nmt", "p100x4")
    short, numbers, _ = module._smaller(problem)
    graph, twin = problem.graph, short.graph
    assert 0.2 < twin.n_ops / graph.n_ops < 0.3 and twin.n_units < 300
    for name in ("op_flops", "op_persistent_bytes"):
        assert getattr(twin, name).sum() / getattr(graph, name).sum() == pytest.approx(SHARE, rel=0.02)
    assert short.costs.op_ns[0].sum() / problem.costs.op_ns[0].sum() == pytest.approx(SHARE, rel=0.02)
    assert numbers.shape == (graph.n_ops,) and set(numbers) <= set(range(twin.n_ops))
    softmax = [layer == "softmax" for layer in graph.layers]
    forward = np.flatnonzero(np.array(softmax)[graph.op_layer] & (graph.op_phase == 0) & (graph.op_flops > 1e9))
    sets = twin.unit_of_op[numbers[forward]]  # the projections of time steps, neighbours in different sets
    assert len(forward) > 60 and len(set(sets)) == 8 and (sets[:-8] == sets[8:]).all()


def test_a_descent_moves_whole_layers_and_keeps_what_is_shorter():
    problem = Problem.build("nmt", "p100x2")
    budget, allowed, tried = Budget(problem, evaluations=200), choices(problem), []

    def score_of(devices):
        tried.append(devices)
        return budget.evaluate(devices[problem.graph.unit_of_op]) if budget.open else None

    begin = simple_starts(problem, allowed)[0]
    start = budget.evaluate(begin[problem.graph.unit_of_op])
    devices, score = descended(problem, allowed, begin, start, score_of)
    assert score < start and budget.evaluations == budget.used
    assert budget.best_step_ns == score.step_ns
    assert simulate(problem, Placement.of_units(problem, devices)).step_ns == score.step_ns
    layer = layer_of_unit(problem)
    assert all(len(set(one[layer == number])) == 1 for one in tried[:10] for number in range(layer.max() + 1))


def test_a_descent_ends_where_nothing_is_shorter():
    problem = Problem.build("rnnlm", "p100x2")
    budget, allowed = Budget(problem, evaluations=3000), choices(problem)

    def score_of(devices):
        return budget.evaluate(devices[problem.graph.unit_of_op])

    begin = simple_starts(problem, allowed)[0]
    once = descended(problem, allowed, begin, score_of(begin), score_of)
    spent = budget.used
    again = descended(problem, allowed, *once, score_of)
    assert spent < 1000 and again[1] == once[1] and (again[0] == once[0]).all()


def test_the_merged_graph_takes_a_share_of_the_seconds(monkeypatch):
    problem = Problem.build("amoebanet-d-small", "k80x4")
    granted = []
    apart = Budget.apart
    monkeypatch.setattr(Budget, "apart", lambda *given: granted.append(apart(*given)) or granted[-1])
    budget = search("multilevel", problem, evaluations=math.inf, seconds=4.0, clock=time.process_time)
    assert budget.used > 0 and len(granted) == 1
    assert granted[0].used > 0 and granted[0].seconds < 2.0


def test_without_compiled_code_there_is_no_smaller_problem(monkeypatch):
    monkeypatch.setattr(module, "_smaller", None)
    problem = random_problem(np.random.default_rng(2), max_ops=40)
    assert search("multilevel", problem, evaluations=50, microbatches=4).used <= 50
