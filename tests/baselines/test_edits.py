"""Edits of grouped placements, the groups that they move, and the climb without learning."""

import numpy as np
import pytest

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
from simdev.placers.budget import Budget
from simdev.placers.registry import find_placer
from simdev.placers.testing import random_problem
from simdev.problem.graph import GraphBuilder
from simdev.problem.problem import Problem
from simdev.problem.topology import Device, DeviceKind, Link, Topology


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
