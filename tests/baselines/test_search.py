"""Searching placers: never worse than where they start, and the best is what they return."""

import numpy as np
import pytest
from drawn import chain, machine
from drawn import problem as drawn_problem
from test_list_schedulers import problem_of

from simdev.baselines import _climb, _guided, _search, _walk
from simdev.baselines._payoff import Payoff
from simdev.baselines._units import choices
from simdev.placers.budget import Budget
from simdev.placers.registry import find_placer, graph_path, load_workload
from simdev.placers.testing import random_problem
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import load_topology
from simdev.sim import simulate_many

SEARCHES = ["climb", "local-search", "annealing", "genetic", "portfolio"]


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
    assert value(problem, found.devices) <= value(problem, np.array([0, 0, 1, 1, 1]))  # other layers may go there, too


def test_a_walk_repeats_the_simulator():
    """After each accepted move the score is that of a full run, and after each undone move nothing has changed."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        rules = Rules() if seed % 2 else Rules("priority")
        problem = random_problem(rng, max_ops=40, rules=rules)
        allowed, budget = choices(problem), Budget(problem, evaluations=60)
        devices = _search.starts(problem, allowed)[0]
        unit = problem.graph.unit_of_op
        walk = _walk.Walk(problem, budget, devices, budget.evaluate(devices[unit]))
        while budget.open:
            units = rng.integers(problem.graph.n_units, size=2)
            targets = np.array([rng.choice(np.flatnonzero(allowed[:, one])) for one in units])
            before, score = walk.score, walk.move(units, targets)
            if rng.random() < 0.5:
                walk.accept()
                assert walk.score == score
            else:
                walk.undo()
                assert walk.score == before
            assert value(problem, walk.devices[unit]) == (walk.score.overflow_bytes, walk.score.step_ns)
        assert budget.used == 60


def test_moves_are_cheap_where_the_simulator_is_incremental():
    for rules, slots, cheap in ((Rules(), 1, True), (Rules(), 2, False), (Rules("priority"), 1, False)):
        assert _walk.cheap(drawn_problem(chain(1, 1), machine(2, slots=slots), [1, 1], rules=rules)) == cheap
    assert not _walk.cheap(drawn_problem(chain(1, 1), machine(2), [1, 1], rules=Rules("fifo", "fair")))


def test_the_kind_of_move_that_gains_is_drawn_more_often():
    payoff, rng = Payoff(np.array([1.0, 1.0, 0.0])), np.random.default_rng(0)
    for _ in range(400):
        kind = payoff.draw(rng)
        payoff.note(kind, 0.1 if kind == 1 else 0.0)
    drawn = np.bincount([payoff.draw(rng) for _ in range(2000)], minlength=3) / 2000
    assert drawn[2] == 0 and 0.7 < drawn[1] < 0.85  # at most 1 - 0.4 / 2 = 0.8, as two fifths stay shared evenly


BEHIND = pytest.mark.xfail(strict=True, reason="climb is 5 % faster here, and long-search was made for long runs")


@pytest.mark.parametrize(
    ("entry", "seed"),
    [
        pytest.param(entry, seed, marks=[BEHIND] if (entry, seed) == ("long-search", 3) else [])
        for entry in ("local-search", "portfolio", "long-search")
        for seed in range(4)
    ],
)
def test_no_search_is_behind_single_random_moves(entry, seed):
    """Control: on four small cases, ``climb`` finds nothing that is more than 2 % faster."""
    problem = random_problem(np.random.default_rng((5, 6, 14, 22)[seed]), max_ops=60, rules=Rules())
    overflow, step_ns = value(problem, search("climb", problem, 600, seed)[0])
    assert value(problem, search(entry, problem, 600, seed)[0]) <= (overflow, int(1.02 * step_ns))
