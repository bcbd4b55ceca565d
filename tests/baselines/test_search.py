"""Searching placers: never worse than where they start, and the best is what they return."""

import numpy as np
import pytest
from drawn import chain, machine
from drawn import problem as drawn_problem
from test_list_schedulers import problem_of

from simdev.baselines import _climb, _guided, _search, _sweep
from simdev.baselines._units import choices
from simdev.placers.budget import Budget
from simdev.placers.registry import find_placer, graph_path, load_workload
from simdev.placers.score import Score
from simdev.placers.testing import random_problem
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import load_topology
from simdev.sim import simulate_many

SEARCHES = ["local-search", "annealing", "genetic", "portfolio"]


def search(entry, problem, evaluations, seed=0):
    spec, params = find_placer(entry)
    budget = Budget(problem, evaluations=evaluations)
    return spec.place(problem, rng=np.random.default_rng(seed), budget=budget, **params).devices, budget


def value(problem, devices):
    outcome = simulate_many(problem, np.atleast_2d(devices))
    return int(outcome.overflow_bytes[0]), int(outcome.step_ns[0])


def start_value(problem):
    start = _search.starts(problem, choices(problem))[0]
    return value(problem, start[problem.graph.unit_of_op])


@pytest.mark.parametrize("entry", SEARCHES)
def test_never_worse_than_the_start(entry):
    for seed in range(8):
        problem = random_problem(np.random.default_rng(100 + seed), rules=Rules())
        devices, _ = search(entry, problem, 40, seed)
        assert value(problem, devices) <= start_value(problem)


@pytest.mark.parametrize("entry", SEARCHES)
def test_more_evaluations_are_not_worse(entry):
    problem = random_problem(np.random.default_rng(7), max_ops=60, rules=Rules())
    found = [value(problem, search(entry, problem, evaluations)[0]) for evaluations in (1, 30, 300)]
    if entry != "annealing":  # whose walks are as long as the budget says, so the runs differ from the start
        assert found[0] >= found[1] >= found[2]
    assert found[2] <= found[0]


@pytest.mark.parametrize("entry", SEARCHES)
def test_finds_the_best_of_independent_ops(entry):
    # Six equal ops without edges on three devices: two each.
    problem = problem_of([100] * 6, {}, 3)
    devices, budget = search(entry, problem, 400)
    assert value(problem, devices) == (0, 200)
    assert budget.best_step_ns == 200


@pytest.mark.parametrize("entry", SEARCHES)
def test_escapes_a_start_that_does_not_fit(entry):
    problem = problem_of(
        [10] * 4, {(op, op + 1): 3 for op in range(3)}, 2, memory_bytes=260, persistent={op: 100 for op in range(4)}
    )
    assert start_value(problem)[0] > 0
    assert value(problem, search(entry, problem, 200)[0])[0] == 0


def test_modules_are_nested():
    if not graph_path("inception-v3").is_file():
        pytest.skip("the graph of inception-v3 is not shipped")
    problem = Problem.build(load_workload("inception-v3"), load_topology("p100x2"))
    groups = _search.module_groups(problem)
    for coarse, fine in zip(groups, groups[1:], strict=False):
        assert len(np.unique(np.stack([coarse, fine], axis=1), axis=0)) == len(np.unique(fine))
    assert (
        len(np.unique(groups[0])) < 10 < len(np.unique(groups[1]))
    )  # stem, mixed, aux, ...; then mixed.0, mixed.1 ...


def test_a_neighbour_moves_units_of_one_device_to_one_other():
    problem = random_problem(np.random.default_rng(3), max_ops=60, rules=Rules())
    allowed, rng = choices(problem), np.random.default_rng(0)
    neighbourhood = _climb.Neighbourhood(problem, allowed)
    devices = _search.starts(problem, allowed)[1]
    for _ in range(200):
        neighbour = neighbourhood.draw(rng, devices)
        if neighbour is None:
            break
        moved = np.flatnonzero(neighbour != devices)
        assert len(moved) and len(set(devices[moved])) == 1 == len(set(neighbour[moved]))
        assert allowed[neighbour, np.arange(len(neighbour))].all()
        devices = neighbour


def test_a_parameter_moves_with_its_first_reader():
    builder = GraphBuilder("tied")
    weight = builder.op("w", "parameter", persistent_bytes=100)
    tensor = builder.tensor(weight, 100, persistent=True)
    ops = [builder.op(f"op{i}", "mm", inputs=[tensor], outputs=[10]) for i in range(3)]
    builder.op("update", "sgd", inputs=builder.outputs(ops[2]), group="w")
    problem = Problem.build(builder.build(), load_topology("p100x2"))
    label = _search.atoms(problem)
    unit = problem.graph.unit_of_op
    assert label[unit[0]] == label[unit[1]]
    assert len(np.unique(label)) == problem.graph.n_units - 1


def test_portfolio_is_not_worse_than_its_members():
    if not graph_path("inception-v3").is_file():
        pytest.skip("the graph of inception-v3 is not shipped")
    problem = Problem.build(load_workload("inception-v3"), load_topology("p100x4"))
    found = value(problem, search("portfolio", problem, 20)[0])
    for name in ("single-gpu", "expert", "m-topo", "m-etf", "m-sct", "critical-path", "peft", "heft"):
        assert found <= value(problem, search(name, problem, 0)[0]), name


def test_hosts_take_layers_of_many_bytes_and_little_time():
    """Two tables of 600 bytes and one accelerator of 1000: the table that is read briefly may go to the host, and must,
    because only one fits beside the accelerator's other table."""
    builder = GraphBuilder("tables")
    for name in ("brief", "slow"):
        table = builder.op(f"{name}.weight", "parameter", outputs=[1], layer=name, persistent_bytes=600)
        builder.op(f"{name}.read", "embedding", inputs=builder.outputs(table), outputs=[1], layer=name)
    builder.op("work", "mm", layer="work")
    problem = drawn_problem(builder, machine(2, host=True), [1, 1, 1, 500, 500])
    allowed = _search.with_spacious_hosts(problem, choices(problem))
    assert allowed[1].all() and allowed[0].tolist() == [True, True, False, False, False]
    given, budget = Placement(np.ones(5, np.int32)), Budget(problem, evaluations=100)
    found = _guided.search_from(problem, budget, np.random.default_rng(0), [given], 1)
    assert value(problem, given.devices)[0] > 200 and value(problem, found.devices)[0] == 0
    assert found.devices.tolist() == [0, 0, 1, 1, 1]


def test_a_sweep_of_single_moves_repeats_the_simulator():
    """After a sweep, the score is that of a full run, and no placement was taken that is slower or does not fit."""
    improved = 0
    for seed in range(50):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, max_ops=40, rules=Rules())
        allowed = choices(problem)
        search = _guided.Guided(problem, allowed, Budget(problem, evaluations=400), rng)
        start = search.state(_search.starts(problem, allowed)[0])
        if not start.score.fits:
            continue
        swept = _sweep.Sweep(problem, search.around, search.budget, rng).run(start, 400)
        assert value(problem, swept.devices[problem.graph.unit_of_op]) == (0, swept.score.step_ns)
        assert swept.score <= start.score and search.budget.used <= 400
        assert search.budget.best_step_ns == swept.score.step_ns
        improved += swept.score < start.score
    assert improved > 2


def test_sweeps_grow_while_they_gain_more_than_group_moves():
    problem = random_problem(np.random.default_rng(1), max_ops=40, rules=Rules())
    budget = Budget(problem, evaluations=10**6)
    sweep = _sweep.Sweep(problem, _climb.Neighbourhood(problem, choices(problem)), budget, np.random.default_rng(0))
    best = _search.SearchState(np.zeros(problem.graph.n_units, np.int32), np.zeros(0, np.int64), Score(1000, 0))
    assert not sweep.due(best)
    first = sweep.length
    for step_ns, swept_ns, length in ((1000, 900, 2 * first), (800, 800, first), (800, 700, 2 * first)):
        budget.used += _sweep.TURN
        assert sweep.due(best._replace(score=Score(step_ns, 0)))
        sweep.settle(best._replace(score=Score(swept_ns, 0)))
        assert sweep.length == length and not sweep.due(best)


def test_single_moves_are_swept_where_the_simulator_is_incremental():
    for rules, slots, pays in ((Rules(), 1, True), (Rules(), 2, False), (Rules("priority"), 1, False)):
        assert _sweep.pays(drawn_problem(chain(1, 1), machine(2, slots=slots), [1, 1], rules=rules)) == pays
    assert not _sweep.pays(drawn_problem(chain(1, 1), machine(2), [1, 1], rules=Rules("fifo", "fair")))
