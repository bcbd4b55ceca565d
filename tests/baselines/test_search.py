"""Searching placers and their moves: never worse than where they start, and the best is what they return."""

import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
from drawn import chain, machine, moirai_example
from drawn import problem as drawn_problem
from test_list_schedulers import problem_of

from simdev.baselines import _climb, _guided, _order, _search, _units, _walk
from simdev.baselines._critical import critical
from simdev.baselines._payoff import Payoff
from simdev.baselines._units import capacities, choices, fitting_placements
from simdev.baselines.rl._edits import Edits, first_placements
from simdev.baselines.rl._grouped import group_problem
from simdev.baselines.rl._groups import (
    LEAST_LAYERS,
    chain_groups,
    coarse_groups,
    fine_groups,
    forward_groups,
    layer_groups,
)
from simdev.bench.objective import parse_objective
from simdev.errors import InvalidInput, Unsupported
from simdev.placers.budget import Budget
from simdev.placers.registry import find_placer, graph_path, load_workload
from simdev.placers.testing import random_placement, random_problem
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Link, Topology, load_topology
from simdev.sim import simulate, simulate_many

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
    found = []
    for evaluations in (1, 30, 300):  # the median of five seeds: a short search may be lucky once
        values = [value(problem, search(entry, problem, evaluations, seed)[0]) for seed in range(5)]
        found.append(sorted(values)[2])
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


def test_portfolio_begins_with_contiguous_stages_if_microbatches_count():
    """Six ops in a chain on three devices: the best stages take 200 ns for each microbatch. They are the first
    placement that is tried; for the time of one step, this is a single device."""
    problem, objective = drawn_problem(chain(*[1] * 6), machine(3), [100] * 6), parse_objective("throughput/1f1b/32")
    spec, params = find_placer("portfolio")
    for microbatches, expected in ((0, 600), (32, 200)):
        simulated = objective.simulate_many if microbatches else None
        budget = Budget(problem, evaluations=1, simulate=simulated, microbatches=microbatches)
        spec.place(problem, rng=np.random.default_rng(0), budget=budget, **params)
        assert (budget.used, budget.best_step_ns) == (1, expected)


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


def test_a_start_has_room_for_parameters():
    """Four tables that take no time, and layers that take all of it: equal times put all tables on one device."""
    b, looked_up = GraphBuilder("tables"), []
    for i in range(4):
        table = b.op(f"table{i}", "lookup", outputs=[10], persistent_bytes=600, layer=f"table{i}")
        looked_up += b.outputs(table)
    for i in range(4):
        looked_up = b.outputs(b.op(f"mlp{i}", "mm", inputs=looked_up, outputs=[10], layer=f"mlp{i}"))
    problem = drawn_problem(b, machine(4, memory=1000), [1] * 4 + [1000] * 4)
    allowed, held = choices(problem), problem.unit_persistent_bytes
    one, even = _search.starts(problem, allowed)
    same, roomy = _search.starts(problem, allowed, room=True)
    assert np.array_equal(one, same)
    assert np.bincount(even, held, 4).max() == 2400
    assert np.bincount(roomy, held, 4).max() == 600
    spacious = replace(problem, topology=machine(4, memory=3000))
    assert np.array_equal(even, _search.starts(spacious, allowed, room=True)[1])


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


@pytest.mark.parametrize("entry", ["local-search", "portfolio", "learned-search", "long-search"])
@pytest.mark.parametrize("drawn", [3, 6, 7, 13, 14, 16])
def test_no_search_is_behind_single_random_moves(entry, drawn):
    """Control: ``climb``. On 6 and 14 nothing fits; the others are the first drawn problems of 20 units on which the
    climb finds a placement that fits with every seed."""
    problem = random_problem(np.random.default_rng(drawn), max_ops=60, rules=Rules())
    assert value(problem, search(entry, problem, 600)[0]) <= value(problem, search("climb", problem, 600)[0])


@pytest.mark.parametrize("entry", ["local-search", "portfolio", "learned-search"])
def test_no_search_is_behind_single_random_moves_on_a_long_chain(entry):
    """Large moves gain most at first, and lead to placements that nothing improves."""
    if not graph_path("transformer-xl-2").is_file():
        pytest.skip("the graph of transformer-xl-2 is not shipped")
    problem = Problem.build(load_workload("transformer-xl-2"), load_topology("v100x8-dgx1"))
    overflow, step_ns = value(problem, search("climb", problem, 500)[0])
    assert value(problem, search(entry, problem, 500)[0]) <= (overflow, int(1.01 * step_ns))


def test_a_search_of_few_units_simulates_each_placement_once_and_ends():
    problem, seen = problem_of([100] * 4, {}, 2), []

    def simulate_and_note(problem, devices, **given):
        seen.extend(map(tuple, devices.tolist()))
        return simulate_many(problem, devices, **given)

    budget = Budget(problem, evaluations=1000, simulate=simulate_and_note)
    search = _guided.Guided(problem, choices(problem), budget, np.random.default_rng(0))
    best = search.improve(search.state(np.zeros(4, np.int32)), budget.share(1))
    assert best.score.step_ns == 200 and len(seen) == len(set(seen)) == 2**4


def test_single_moves_draw_every_unit_before_any_comes_again_and_long_ones_early():
    problem = problem_of([1000] * 5 + [10] * 15, {}, 2)
    search = _guided.Guided(problem, choices(problem), Budget(problem), np.random.default_rng(0))
    rounds = np.array([[search._next_unit() for _ in range(20)] for _ in range(200)])
    assert (np.sort(rounds, axis=1) == np.arange(20)).all()
    assert (rounds[:, :5] < 5).mean() > 0.5 > (rounds[:, 5:] < 5).mean()


def test_placements_whose_parameters_do_not_fit_are_drawn_again():
    """Two devices hold two of four ops each: a single move never fits, and only exchanges are simulated."""
    persistent = {op: 100 for op in range(4)}
    problem, seen = problem_of([10] * 4, {}, 2, memory_bytes=210, persistent=persistent), []

    def simulate_and_note(problem, devices, **given):
        seen.extend(np.bincount(row, minlength=2).tolist() for row in devices)
        return simulate_many(problem, devices, **given)

    budget = Budget(problem, evaluations=4, simulate=simulate_and_note)
    search = _guided.Guided(problem, choices(problem), budget, np.random.default_rng(0))
    search.improve(search.state(np.array([0, 0, 1, 1], np.int32)), budget.share(1))
    assert seen == [[2, 2]] * 4


# edits of grouped placements, the groups that they move, and the climb without learning


def devices(count=2):
    kind = DeviceKind("k", 1 << 34, {"f32": 1e9}, 1e12)
    names = "abcd"[:count]
    links = tuple(Link((one, other), 10**9, 1000) for one in names for other in names if one < other)
    return Topology("few", tuple(Device(name, kind) for name in names), links)


def unrolled(layers=2, steps=12):
    """An unrolled recurrent network: a chain of steps for each layer, and an edge from each layer to the next."""
    b = GraphBuilder("unrolled")
    before = [None] * steps
    for layer in range(layers):
        last = None
        for step in range(steps):
            inputs = [tensor for tensor in (last, before[step]) if tensor is not None]
            op = b.op(f"l{layer}.{step}", "mm", inputs=inputs, flops=10**6, outputs=[4000], layer=f"layer{layer}")
            last = before[step] = b.outputs(op)[0]
    return Problem.build(b.build(), devices())


def layers_of_groups(problem, group):
    graph = problem.graph
    pairs = zip(group[graph.unit_of_op].tolist(), graph.op_layer.tolist(), strict=True)
    found = {}
    for number, layer in pairs:
        found.setdefault(number, set()).add(layer)
    return [found[number] for number in sorted(found)]


def test_groups_of_a_graph_with_few_layers_stay_within_a_layer():
    problem = unrolled()
    assert len(problem.graph.layers) < LEAST_LAYERS
    across = layers_of_groups(problem, coarse_groups(problem, 4))
    inside = layers_of_groups(problem, layer_groups(problem, 4))
    assert any(len(layers) > 1 for layers in across), "the control: groups by traffic alone mix layers"
    assert len(inside) == 4 and all(len(layers) == 1 for layers in inside)
    assert layer_groups(problem, 1).max() == 0, "with fewer groups than layers, layers merge"


def test_groups_of_a_graph_with_many_layers_are_the_layers():
    problem = unrolled(layers=LEAST_LAYERS)
    assert (layer_groups(problem, 64) == coarse_groups(problem, 64)).all()


@pytest.mark.parametrize("groups", [coarse_groups, layer_groups, fine_groups, chain_groups, forward_groups])
def test_groups_are_numbered_in_running_order_whether_or_not_they_hold_parameters(groups):
    b = GraphBuilder("mixed")
    layers = (1, 3, 5, 7)
    weights = {layer: b.outputs(b.op(f"w{layer}", "parameter", outputs=[4000], layer=f"l{layer}")) for layer in layers}
    x = b.outputs(b.op("x", "input", outputs=[4000]))
    for layer in range(10):
        inputs = [*x, *weights.get(layer, [])]
        op = b.op(f"op{layer}", "mm", inputs=inputs, flops=10**6, outputs=[4000, 4000], layer=f"l{layer}")
        b.op(f"side{layer}", "relu", inputs=[b.outputs(op)[1]], flops=10**6, layer=f"l{layer}")  # ends chains
        x = b.outputs(op)[:1]
    problem = Problem.build(b.build(), devices())
    graph = problem.graph
    group = groups(problem, 64)[graph.unit_of_op] if groups is not forward_groups else groups(problem)[graph.unit_of_op]
    runs = group[[graph.op_names.index(f"op{layer}") for layer in range(10)]]
    assert runs.tolist() == sorted(runs) and len(set(runs)) == 10
    mean = np.bincount(group, np.arange(graph.n_ops)) / np.bincount(group)
    assert (np.diff(mean[runs]) < 0).any(), "the control: the mean number of all ops gives another order"


@pytest.mark.parametrize("seed", range(10))
def test_an_edit_moves_groups_of_one_device_to_another_that_they_may_use(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    grouped = group_problem(problem, coarse_groups(problem, 8))
    edits, actions = Edits(grouped), first_placements(grouped)[1]
    for _ in range(50):
        edit = edits.draw(rng, actions)
        if edit is None:
            assert not len(edits.free)
            return
        groups, device = edit
        assert len(set(actions[groups])) == 1 and device != actions[groups[0]]
        assert grouped.inputs.allowed[groups, device].all() and groups.max() < grouped.n_groups
        actions = actions.copy()
        actions[groups] = device


def test_whole_layers_move_unless_edits_are_narrow():
    problem = unrolled()
    grouped = group_problem(problem, layer_groups(problem, 8))
    rng, actions = np.random.default_rng(0), np.zeros(16, np.int32)
    of_layer = np.array([next(iter(found)) for found in layers_of_groups(problem, grouped.group)])
    layers = {frozenset(np.flatnonzero(of_layer == layer)) for layer in (0, 1)}
    assert len(of_layer) == 8 and all(len(layer) > 1 for layer in layers)
    wide = [Edits(grouped).draw(rng, actions)[0] for _ in range(60)]
    assert layers <= {frozenset(groups) for groups in wide}
    narrow = [Edits(grouped, wide=False).draw(rng, actions)[0] for _ in range(60)]
    assert {len(groups) for groups in narrow} == {1}


def test_edits_follow_the_preference_of_a_policy():
    problem = Problem.build(unrolled().graph, devices(4))
    grouped = group_problem(problem, layer_groups(problem, 8))
    preference = np.full((16, 8), -5.0)
    preference[:, 2] = -0.02
    rng, edits, actions = np.random.default_rng(0), Edits(grouped), np.zeros(16, np.int32)
    drawn = np.bincount([edits.draw(rng, actions, preference)[1] for _ in range(300)], minlength=4)
    even = np.bincount([edits.draw(rng, actions)[1] for _ in range(300)], minlength=4)
    assert drawn[0] == even[0] == 0, "an edit leaves the device"
    assert drawn[2] > 200 and drawn[[1, 3]].min() > 10 and even[1:].min() > 70


def test_first_placements_are_one_device_and_even_shares():
    problem = unrolled()
    grouped = group_problem(problem, layer_groups(problem, 8))
    single, even = first_placements(grouped)[:, :8]
    assert len(set(single)) == 1 and even.tolist() == sorted(even)
    assert np.bincount(even[grouped.group]).min() >= 9, "of 24 equal ops"


@pytest.mark.parametrize("by", ["layers", "coarse", "fine"])
def test_the_climb_repeats_and_improves_on_one_device(by):
    problem = unrolled()
    spec, _ = find_placer("group-climb")
    found = []
    for _ in range(2):
        budget = Budget(problem, evaluations=200)
        spec.place(problem, rng=np.random.default_rng(1), budget=budget, by=by)
        found.append((budget.best_step_ns, budget.used))
    alone = Budget(problem, evaluations=1)
    alone.evaluate(np.zeros(problem.graph.n_ops, np.int32))
    assert found[0] == found[1] and found[0][1] == 200 and found[0][0] < 0.7 * alone.best_step_ns


# placements that bring their order of ops: keys, starts from the order ``fifo``, the searches of devices and order


BY_PRIORITY = Rules("priority")


def urgent_last(rules=BY_PRIORITY):
    """On one device, ``b0`` should run before ``a``, so that its tensor travels while ``a`` runs; ``a`` has the lower
    number and the longer path."""
    builder = GraphBuilder("urgent")
    builder.op("a", "op")
    first = builder.op("b0", "op", outputs=[40])
    builder.op("b1", "op", inputs=builder.outputs(first))
    return drawn_problem(builder, machine(2), [120, 10, 20], rules=rules)


def random_ordered(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, rules=BY_PRIORITY)
    return problem, random_placement(rng, problem), rng


def test_keys_are_longest_paths_under_the_placement():
    problem = drawn_problem(chain(30, 50, 0), machine(2), [100, 200, 300], rules=BY_PRIORITY)
    assert _order.path_keys(problem, np.array([0, 0, 0], np.int32)).tolist() == [600, 500, 300]
    assert _order.path_keys(problem, np.array([0, 1, 1], np.int32)).tolist() == [640, 500, 300]


def test_priorities_follow_keys_and_then_op_numbers():
    assert _order.priority_of(np.array([5, 9, 5, -3])).tolist() == [2, 3, 1, 0]


def test_priorities_of_a_batch_equal_those_of_single_runs():
    for seed in range(20):
        problem, placement, rng = random_ordered(seed)
        n = problem.graph.n_ops
        priority = np.stack([rng.permutation(n), rng.integers(-9, 9, n), np.arange(n)])
        found = simulate_many(problem, np.tile(placement.devices, (3, 1)), priority=priority)
        for row in range(3):
            alone = simulate(problem, Placement(placement.devices, priority[row]), engine="reference")
            assert (found.step_ns[row], found.overflow_bytes[row]) == (alone.step_ns, alone.overflow_bytes.sum())


def test_priorities_of_another_shape_are_refused():
    problem = urgent_last()
    with pytest.raises(InvalidInput, match="priorities: expected whole numbers of shape"):
        simulate_many(problem, np.zeros((2, 3), int), priority=np.zeros((1, 3), int))


def test_the_starts_of_fifo_as_priorities_repeat_its_schedule():
    met = 0
    for seed in range(120):
        problem, placement, _ = random_ordered(seed)
        if (problem.topology.slots > 1).any() or problem.costs.gap_ns.any():
            continue
        met += 1
        fifo = simulate(replace(problem, rules=Rules()), placement)
        starts = _order.fifo_starts(problem, placement.devices)
        again = simulate(problem, Placement(placement.devices, _order.priority_of(-starts)))
        assert np.array_equal(again.op_start, fifo.op_start) and again.step_ns == fifo.step_ns
    assert met > 30


def test_a_critical_path_ends_with_the_last_op_and_each_step_explains_the_wait():
    for seed in range(60):
        problem, placement, _ = random_ordered(seed)
        schedule = simulate(problem, placement)
        found = critical(problem, placement.devices, schedule)
        assert schedule.op_finish[found.ops[0]] == schedule.op_finish.max()
        assert (np.diff(schedule.op_start[found.ops]) < 0).all()
        for op, before in found.queued.tolist():
            assert placement.devices[op] == placement.devices[before]
            assert schedule.op_start[op] == schedule.op_finish[before]
        for tensor, there in found.sends.tolist():
            assert placement.devices[problem.graph.tensor_producer[tensor]] != there


@pytest.mark.parametrize("name", ["local-search", "portfolio", "long-search"])
def test_searches_find_the_order_that_hides_a_transfer(name):
    """Two devices: a (120), b0 (10) -> b1 (20), 50 ns between. By paths, ``a`` and ``b0`` are apart and 120 is best."""
    problem, (spec, params) = urgent_last(), find_placer(name)
    budget = Budget(problem, evaluations=200)
    placement = spec.place(problem, rng=np.random.default_rng(0), budget=budget, **params)
    assert simulate(problem, placement).step_ns == 120 == budget.best_step_ns


def test_moves_of_order_beat_every_default_order():
    """``c`` is on the other device and reads from ``b``; but ``a`` has the longer path and goes first by default."""
    builder = GraphBuilder("late")
    first = builder.op("b", "op", outputs=[40], group="here")
    long = builder.op("a", "op", outputs=[1], group="here")
    builder.op("a1", "op", inputs=builder.outputs(long), group="here")
    builder.op("c", "op", inputs=builder.outputs(first))
    problem = drawn_problem(builder, machine(2), [10, 100, 5, 30], rules=BY_PRIORITY)
    devices = np.array([0, 0, 0, 1], np.int32)
    default = simulate(problem, Placement(devices)).step_ns
    search = _guided.Guided(problem, choices(problem), Budget(problem, evaluations=1000), np.random.default_rng(0))
    unit_devices = np.zeros(problem.graph.n_units, np.int32)
    unit_devices[problem.graph.unit_of_op[3]] = 1
    best = search.improve(search.state(unit_devices), search.budget.share(1))
    assert default == 190 and best.score.step_ns == 115
    assert simulate(problem, search.placement(best)).step_ns == 115


@pytest.mark.parametrize("rules", [Rules(), BY_PRIORITY], ids=["fifo", "priority"])
def test_a_guided_search_never_gets_worse_and_its_score_is_the_simulators(rules):
    for seed in range(12):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, max_ops=40, rules=rules)
        spec, params = find_placer("long-search")
        budget = Budget(problem, evaluations=150)
        placement = spec.place(problem, rng=rng, budget=budget, **params)
        found = simulate(problem, placement)
        assert budget.used <= 150
        if budget.best is not None:
            assert found.feasible and found.step_ns == budget.best_step_ns  # of equal placements, the last


def test_a_swap_leaves_a_problem_that_is_exactly_full():
    """Two devices hold two of four ops each. Only an exchange leads from the slow pairing to the fast one."""
    builder = GraphBuilder("full")
    for pair in "ab":
        first = builder.op(f"{pair}0", "op", outputs=[500], persistent_bytes=400)
        builder.op(f"{pair}1", "op", inputs=builder.outputs(first), persistent_bytes=400)
    problem = drawn_problem(builder, machine(2, memory=2000), [100] * 4)
    cut, whole = np.array([0, 1, 1, 0], np.int32), np.array([0, 0, 1, 1], np.int32)
    fast = simulate(problem, Placement(whole))
    search = _guided.Guided(problem, choices(problem), Budget(problem, evaluations=300), np.random.default_rng(1))
    best = search.improve(search.state(cut), search.budget.share(1))
    assert fast.feasible and best.score.fits and best.score.step_ns == fast.step_ns == 200


@pytest.mark.parametrize("entry", ["portfolio", "learned-search"])
@pytest.mark.parametrize("order, best_ns, seeds", [("fifo", 31_000, 24), ("priority", 33_000, 1)])
def test_searches_solve_an_example_whose_memories_are_exactly_full(entry, order, best_ns, seeds):
    """Of 531,441 placements 2,236 fit. All were simulated: 31.0 is the least step time under ``fifo`` and, with the
    default priorities, under ``priority``. 30.0 is the optimum of a model in which devices may be left idle."""
    problem, (spec, params) = moirai_example(Rules(order)), find_placer(entry)
    for seed in range(seeds):
        budget = Budget(problem, evaluations=1500)
        spec.place(problem, rng=np.random.default_rng(seed), budget=budget, **params)
        assert budget.best_step_ns is not None and budget.best_step_ns <= best_ns
        assert order == "priority" or budget.used < 100  # the bounds of the other placements show that it is the best


def test_a_small_problem_is_searched_to_its_shortest_step():
    rng, ended = np.random.default_rng(0), 0
    for _ in range(80):
        problem = random_problem(rng, max_ops=7)
        allowed = choices(problem, hosts=True)
        every = np.array(list(itertools.product(*(np.flatnonzero(allowed[:, unit]) for unit in range(len(allowed.T))))))
        if _order.ordered(problem) or len(every) > 700:
            continue
        held = [np.bincount(units, problem.unit_persistent_bytes, len(allowed)) for units in every]
        fits = (np.array(held) <= capacities(problem)).all(axis=1)
        found = fitting_placements(problem, allowed)
        assert sorted(found.tolist()) == sorted(every[fits].tolist())
        outcome = simulate_many(problem, every[:, problem.graph.unit_of_op])
        steps = outcome.step_ns[outcome.overflow_bytes == 0]
        budget = Budget(problem, evaluations=8 * len(every) + 8)
        guided = _guided.Guided(problem, allowed, budget, rng)
        start = guided.state(every[-1])
        best, shortest = _guided._least_bounds_first(guided, start, budget)
        assert shortest == bool(len(steps)) if start.score.fits or guided.tight else best is start
        if shortest:
            assert best.score.step_ns == steps.min() and best.score.fits
            ended += budget.used < len(every)
    assert ended > 10  # before all were simulated


def test_placements_are_listed_of_small_problems_only(monkeypatch):
    problem = drawn_problem(chain(*[0] * 15), machine(2), [100] * 15)
    allowed = choices(problem)
    assert fitting_placements(problem, allowed) is None  # of 32,768
    allowed[1, 1:] = False
    assert fitting_placements(problem, allowed).shape == (2, 15)
    search = _guided.Guided(problem, allowed, Budget(problem, evaluations=1), np.random.default_rng(0))
    start = search.state(np.zeros(15, np.int32))
    assert _guided._least_bounds_first(search, start, search.budget) == (start, True)  # no evaluation is left or needed
    monkeypatch.setattr(_units, "FEW_OPS", 14)
    assert fitting_placements(problem, allowed) is None  # many ops in few units: each bound takes long


@pytest.mark.parametrize("name", ["heft", "peft", "m-etf", "cp-sat"])
def test_list_schedulers_and_cp_sat_give_an_order_that_the_simulator_takes(name):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, max_ops=15, rules=BY_PRIORITY)
        spec, params = find_placer(name)
        budget = Budget(problem, evaluations=30)
        placement = spec.place(problem, rng=rng, budget=budget, **params)
        assert (placement.priority is not None) == (name in ("heft", "peft")) or name == "cp-sat"
        found = simulate(problem, placement)
        if found.feasible:
            assert found.step_ns == budget.best_step_ns


@pytest.mark.parametrize("name", ["group-climb", pytest.param("gdp[groups=8,hidden=8]", marks=pytest.mark.slow)])
def test_learned_placers_order_ops_by_their_paths_under_the_placement(name):
    spec, params = find_placer(name)
    if spec.missing:
        pytest.skip(f"{name} needs {', '.join(spec.missing)}")
    rng = np.random.default_rng(3)
    problem = drawn_problem(chain(30, 50, 0), machine(2), [100, 200, 300], rules=BY_PRIORITY)
    budget = Budget(problem, evaluations=40)
    found = spec.place(problem, rng=rng, budget=budget, **params)
    keys = _order.path_keys(problem, np.asarray(found.devices, np.int32))
    assert np.array_equal(found.priority, _order.priority_of(keys))
    assert simulate(problem, found).step_ns == budget.best_step_ns


# partition


CLUSTERS, SIZE = 4, 40


def planted(seed=0):
    """Four clusters of chained, equally heavy ops with heavy tensors; light tensors join the clusters."""
    builder, rng = GraphBuilder("planted"), np.random.default_rng(seed)
    ops = [[] for _ in range(CLUSTERS)]
    for step in range(SIZE):
        for cluster in range(CLUSTERS):
            inputs = [builder.outputs(op)[0] for op in rng.permutation(ops[cluster])[:2]]
            if step and step % 10 == 0:
                inputs.append(builder.outputs(ops[(cluster + 1) % CLUSTERS][-1])[1])
            ops[cluster].append(
                builder.op(f"c{cluster}.{step}", "mm", inputs=inputs, flops=10**9, outputs=[1 << 20, 1 << 8])
            )
    return builder.build()


def place(entry, problem, seed=0):
    spec, params = find_placer(entry)
    return spec.place(problem, rng=np.random.default_rng(seed), budget=Budget(problem), **params).devices


def cluster_of(graph):
    return np.array([int(name[1]) for name in graph.op_names])


@pytest.mark.parametrize("entry", ["min-cut", "min-cut[tool=metis]", "min-cut[tool=kahip]"])
def test_finds_planted_clusters(entry):
    if "kahip" in entry:
        pytest.importorskip("kahip")
    graph = planted()
    devices = place(entry, Problem.build(graph, load_topology("p100x4")))
    for cluster in range(CLUSTERS):
        assert np.bincount(devices[cluster_of(graph) == cluster]).max() >= SIZE - 1
    assert sorted(set(devices)) == [1, 2, 3, 4]  # the host takes nothing


@pytest.mark.parametrize("entry", ["scotch", "min-cut", "min-cut[tool=metis]"])
def test_same_seed_same_partition(entry):
    problem = Problem.build(planted(), load_topology("p100x4"))
    assert np.array_equal(place(entry, problem, 3), place(entry, problem, 3))


def test_heavy_weights_are_still_balanced():
    # Scotch 7.0 puts everything on one processor once vertex weights sum beyond 32 bits.
    builder = GraphBuilder("heavy")
    for number in range(64):
        builder.op(f"op{number}", "mm", flops=10**13, outputs=[1 << 20])
    devices = place("min-cut", Problem.build(builder.build(), load_topology("p100x4")))
    assert np.bincount(devices, minlength=5).tolist() == [0, 16, 16, 16, 16]


def test_scotch_weighs_processors_by_speed():
    builder = GraphBuilder("independent")
    for number in range(400):
        builder.op(f"op{number}", "mm", flops=10**10, outputs=[64])
    counts = np.bincount(place("scotch", Problem.build(builder.build(), load_topology("p100x4"))), minlength=5)
    assert 0 < counts[0] < counts[1:].min() / 3  # the host is slower by an order of magnitude, but takes part
    assert counts[1:].max() - counts[1:].min() <= 4


def test_unknown_tool():
    with pytest.raises(InvalidInput, match="tool"):
        place("min-cut[tool=chaco]", Problem.build(planted(), load_topology("p100x4")))


@pytest.mark.parametrize(
    "entry, package", [("scotch", "pyscotch"), ("min-cut[tool=metis]", "pymetis"), ("min-cut[tool=kahip]", "kahip")]
)
def test_missing_package_is_unsupported(entry, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Unsupported, match=package):
        place(entry, Problem.build(planted(), load_topology("p100x4")))


@pytest.mark.parametrize("entry", ["scotch", "min-cut", "min-cut[tool=metis]"])
def test_ops_without_tensors(entry):
    builder = GraphBuilder("no tensors")
    for number in range(8):
        builder.op(f"op{number}", "mm", flops=10**9)
    assert len(set(place(entry, Problem.build(builder.build(), load_topology("p100x4"))))) >= 4
