"""The placers with graph networks: what they see, Placeto's episodes, GDP's network, and that they learn."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from simdev import Budget, GraphBuilder, Placement, Problem, load_topology, simulate, simulate_many
from simdev.baselines.rl import gdp
from simdev.baselines.rl._grouped import group_problem
from simdev.baselines.rl._groups import fine_groups, forward_groups
from simdev.errors import InvalidInput, Unsupported
from simdev.graphs.random_graphs import family_graph
from simdev.placers.registry import find_placer, load_workload
from simdev.placers.testing import training_graph
from simdev.problem.topology import Device, DeviceKind, Link, Topology

TINY = {
    "doppler": {"groups": 16, "hidden": 8, "rounds": 2, "episodes": 8, "imitation": 3, "history": 16},
    "gdp": {"groups": 16, "hidden": 8, "sages": 1, "blocks": 1, "neighbours": 2, "samples": 8, "entropy_updates": 10},
    "giph": {"groups": 16, "hidden": 8, "episodes": 2, "every": 4},
    "placeto": {"groups": 16, "hidden": 8, "rounds": 2, "episodes": 2, "entropy_updates": 5},
    "hsdag": {"nodes": 16, "hidden": 16, "rate": 0.01},
}
ALL = {**TINY, "post": {"groups": 16, "pool": 50}}
JOINT = {"placeto-joint": {"nodes": 16, "hidden": 8, "rounds": 1, "episodes": 2, "rate": 0.001}}


def two_devices(memory=1 << 34):
    kind = DeviceKind("k", memory, {"f32": 1e9}, 1e12)
    return Topology("two", (Device("a", kind), Device("b", kind)), (Link(("a", "b"), 10**9, 1000),))


def chains(count=6, length=3, memory=1 << 34):
    """Independent chains of 1 ms ops: the best placement halves them, the worst has all on one device."""
    b = GraphBuilder("chains")
    for chain in range(count):
        tensors = []
        for op in range(length):
            tensors = b.outputs(b.op(f"c{chain}.{op}", "relu", inputs=tensors, flops=10**6, outputs=[4000]))
    return Problem.build(b.build(), two_devices(memory))


def diamond():
    """0 -> 1, 2 -> 3, and 4 apart."""
    b = GraphBuilder("diamond")
    top = b.op("0", "relu", flops=10**6, outputs=[4000])
    left = b.op("1", "relu", inputs=b.outputs(top), flops=10**6, outputs=[4000])
    right = b.op("2", "relu", inputs=b.outputs(top), flops=10**6, outputs=[8000])
    b.op("3", "relu", inputs=[*b.outputs(left), *b.outputs(right)], flops=10**6)
    b.op("4", "relu", flops=10**6)
    return Problem.build(b.build(), two_devices())


# what they see


def test_forward_groups_are_single_forward_ops_with_what_follows():
    b = GraphBuilder("g")
    weight = b.op("w", "parameter", persistent_bytes=400, group="w")
    value = b.tensor(weight, 400, persistent=True)
    x = b.op("x", "mm", inputs=[value], flops=10**6, outputs=[4000], layer="a")
    y = b.op("y", "relu", inputs=b.outputs(x), flops=10**6, outputs=[4000], layer="b")
    back = b.op(
        "dx", "mm", inputs=[*b.outputs(y), *b.outputs(x)], outputs=[400], phase="backward", layer="a", group="w"
    )
    b.op("u", "sgd", inputs=[value, *b.outputs(back)], phase="update", layer="a", group="w")
    problem = Problem.build(b.build(), two_devices())
    names = problem.graph.op_names
    group = dict(zip(names, forward_groups(problem)[problem.graph.unit_of_op], strict=True))
    assert group["x"] == group["w"] == group["dx"] == group["u"] == 0 and group["y"] == 1


@pytest.mark.parametrize("family", ["nmt", "nasnet", "inception"])
def test_fine_groups_are_as_many_as_asked_for(family):
    problem = Problem.build(family_graph(family, 1), load_topology("p100x4"))
    group = fine_groups(problem, 48)
    assert group.max() + 1 == 48 and len(np.unique(group)) == 48


def test_sight_lists_the_dearest_neighbours_and_even_shares():
    from simdev.baselines.rl._sight import with_sight

    sight = with_sight(group_problem(diamond(), np.arange(5)), 1).inputs
    assert sight.parent_real[:5, 0].tolist() == [False, True, True, True, False]
    assert sight.parents[3, 0] == 2, "the larger tensor"
    assert sight.children[1, 0] == sight.children[2, 0] == 3 and not sight.child_real[3:5].any()
    assert not sight.parent_real[5:].any() and not sight.nodes[5:].any()
    assert sight.shares[:5].argmax(axis=1).tolist() == [0, 0, 0, 1, 1]


def test_view_knows_ancestors_descendants_and_parallel_groups():
    from simdev.baselines.rl._placeto import with_view

    view = with_view(group_problem(diamond(), np.arange(5))).inputs
    expected = {
        "before": {1: [0], 2: [0], 3: [1, 2]},
        "behind": {0: [1, 2], 1: [3], 2: [3]},
        "ancestors": {1: [0], 2: [0], 3: [0, 1, 2]},
        "descendants": {0: [1, 2, 3], 1: [3], 2: [3]},
        "parallel": {0: [4], 1: [2, 4], 2: [1, 4], 3: [4], 4: [0, 1, 2, 3]},
    }
    for name, rows in expected.items():
        table = getattr(view, name)
        assert {row: np.flatnonzero(table[row]).tolist() for row in range(16) if table[row].any()} == rows, name
        assert np.allclose(table.sum(axis=1)[list(rows)], 1.0)


def test_nodes_join_the_partner_that_they_exchange_most_with_and_groups_are_a_graph_again():
    from simdev.baselines.rl._placeto_joint import labels, pooled, with_nodes

    nodes = with_nodes(group_problem(diamond(), np.arange(5))).inputs
    assert nodes.partner[:5].tolist() == [0, 0, 0, 2, 4] and (nodes.cost[1:4] > 0).all() and nodes.cost[4] == 0
    joins = np.zeros(16, bool)
    joins[[2, 3]] = True  # 3 joins 2, which joins 0
    label = np.asarray(labels(nodes.partner, joins))
    assert label[:5].tolist() == [0, 1, 0, 0, 4]
    view = pooled(nodes.view, label)
    assert np.flatnonzero(view.sight.real).tolist() == [0, 1, 4]
    assert np.allclose(view.sight.nodes[0, 0], nodes.view.sight.nodes[[0, 2, 3], 0].sum())
    assert np.asarray(view.before)[0, 1] == np.asarray(view.before)[1, 0] == 1.0, "1 is before and behind the group"
    assert not np.asarray(view.parallel)[:2, :2].any() and np.asarray(view.parallel)[4, :2].tolist() == [0.5, 0.5]
    alone = pooled(nodes.view, np.arange(16))
    for name in ("before", "behind", "ancestors", "descendants", "parallel"):
        assert np.allclose(getattr(alone, name), getattr(nodes.view, name), atol=1e-6), name
    assert np.allclose(alone.sight.nodes, nodes.view.sight.nodes, atol=1e-5)
    assert np.allclose(alone.sight.shares[:5], nodes.view.sight.shares[:5], atol=1e-5)


def test_a_group_on_several_devices_stays_unless_another_device_is_chosen():
    from simdev.baselines.rl._placeto import _moved

    now, label = np.array([[0, 1, 1, 0]]), np.array([[0, 0, 0, 3]])
    before = np.array([[1, 9, 9, 0]])  # most of the first group is on device 1
    moved, after = _moved(now, label, before, before)
    assert not moved.any() and (after == now).all()
    moved, after = _moved(now, label, before, np.array([[0, 9, 9, 0]]))
    assert moved.all() and after.tolist() == [[0, 0, 0, 0]]


# episodes


def test_returns_are_discounted_sums_of_improvements():
    from simdev.baselines.rl._placeto import VisitLearner

    episodes = VisitLearner.__new__(VisitLearner)
    episodes.rows, episodes.discount = 4, 0.5
    returns = episodes._returns(np.array([[3.0, 3.0, 1.0, 2.0]], np.float32))
    assert returns[0].tolist() == [0.0 + 0.5 * (2.0 - 0.5), 2.0 - 0.5, -1.0, 0.0]


@pytest.mark.slow
def test_episode_simulates_only_what_moved():
    problem = chains(5)
    spec, _ = find_placer("placeto")
    budget = Budget(problem, evaluations=1 + 2 * 4)  # the start, and every fourth of 15 groups and the last, twice
    spec.place(problem, rng=np.random.default_rng(0), budget=budget, **TINY["placeto"])
    assert budget.used == 9 and budget.curve[0][0] == 1 and 15e6 <= budget.curve[0][2] < 15.1e6


def test_costs_of_what_does_not_fit_slope_towards_what_fits():
    from simdev.baselines.rl._placeto import LONGEST, _costs
    from simdev.baselines.rl._train import Episodes

    problem = heavy()
    evaluate = Episodes(group_problem(problem, np.arange(8)), Budget(problem, evaluations=10))
    costs = _costs(evaluate, (np.arange(9)[:, None] > np.arange(16)).astype(int))  # 0 to 8 on the second device
    assert (np.diff(costs[:4]) < 0).all() and costs[2] > LONGEST >= costs[3:6].max() and (np.diff(costs[5:]) > 0).all()


# networks


def test_first_policies_of_placeto_stay_or_go_anywhere():
    from simdev.baselines.rl import placeto
    from simdev.baselines.rl._jax import eqx, jax
    from simdev.baselines.rl._placeto import first_placement

    problem = Problem.build(family_graph("inception", 1), load_topology("p100x4"))
    learner = placeto.learner([problem], **{key: value for key, value in placeto.DEFAULTS.items() if key != "policy"})
    grouped = learner.grouped(problem)
    placed, visited = first_placement(grouped), np.arange(grouped.n_groups)

    @eqx.filter_jit
    def chances(policy, view):
        embedded = policy.embed(view, placed, 0, 4)
        return jax.nn.softmax(jax.vmap(policy, (None, None, None, 0))(view, embedded, placed, visited))

    for seed in range(30):
        drawn = np.asarray(chances(learner.init(seed, 1)["policy"], grouped.inputs))[:, :4]
        assert 0.5 < drawn[:, 0].min() and drawn[:, 0].max() < 0.9 and drawn[:, 1:].min() > 0.02, seed


def test_gdp_names_allowed_devices_only_and_ignores_padding():
    from simdev.baselines.rl._gdp import GdpPolicy
    from simdev.baselines.rl._jax import eqx, jax
    from simdev.baselines.rl._sight import with_sight

    policy = eqx.filter_jit(GdpPolicy(8, 8, 1, 2, key=jax.random.PRNGKey(0)))
    small = with_sight(group_problem(diamond(), np.arange(5)), 2).inputs
    large = with_sight(group_problem(diamond(), np.arange(5), rows=256), 2).inputs
    logits, padded = np.asarray(policy(small)), np.asarray(policy(large))
    assert np.allclose(logits[:5], padded[:5], atol=1e-4), "two segments more of padding change nothing"
    assert (logits[:5, 2:] < -1e8).all() and (np.abs(logits[:5, :2]) < 100).all()


def test_gdp_remembers_the_segment_before():
    from simdev.baselines.rl._gdp import Block
    from simdev.baselines.rl._gdp_net import SEGMENT
    from simdev.baselines.rl._jax import eqx, jax, jnp
    from simdev.baselines.rl._sight import SUMMARY_FEATURES

    block = eqx.filter_jit(Block(8, key=jax.random.PRNGKey(1)))
    h = jax.random.normal(jax.random.PRNGKey(2), (3 * SEGMENT, 8))
    real, graph = jnp.ones(3 * SEGMENT, bool), jnp.zeros(8 + SUMMARY_FEATURES)
    changed = block(h.at[0, 0].add(3.0), real, graph) - block(h, real, graph)
    moved = np.abs(np.asarray(changed)).max(axis=1) > 1e-7
    assert moved[1 : 2 * SEGMENT].any() and moved[SEGMENT : 2 * SEGMENT].any() and not moved[2 * SEGMENT :].any()


def test_gdp_hears_by_attention_and_knows_the_graph_by_superposition():
    from simdev.baselines.rl import _gdp_net
    from simdev.baselines.rl._gdp import Block
    from simdev.baselines.rl._jax import jax, jnp
    from simdev.baselines.rl._layers import Jax
    from simdev.baselines.rl._sight import SUMMARY_FEATURES

    layer = Block(8, key=jax.random.PRNGKey(1))
    h, real = jax.random.normal(jax.random.PRNGKey(2), (16, 8)), jnp.ones(16, bool)
    graph = jnp.zeros(8 + SUMMARY_FEATURES)
    for attention in (True, False):
        for superposition in (True, False):

            def block(h, graph, parts={"attention": attention, "superposition": superposition}):  # noqa: B006
                return np.asarray(_gdp_net.block(Jax, layer, h, real, graph, **parts))

            near = np.abs(block(h.at[0, 0].add(3.0), graph) - block(h, graph)).max(axis=1)
            assert near[0] > 0.1 and (near[1:] > 1e-6).all() == attention and near[1:].any() == attention
            assert (np.abs(block(h, graph + 1) - block(h, graph)).max() > 1e-3) == superposition


@pytest.mark.parametrize("part", [pytest.param("attention", marks=pytest.mark.slow), "superposition"])
def test_a_policy_of_gdp_without_a_part_is_applied_without_it(tmp_path, part):
    from simdev.baselines.rl._jax import jax
    from simdev.placers.policy_file import save_policy

    problem, found = chains(20, 4), {}
    spec, zero = find_placer("gdp")[0], find_placer("gdp-zero-shot")[0]
    for value in (True, False):
        params = {**{k: v for k, v in spec.defaults.items() if k != "policy"}, **TINY["gdp"], part: value}
        learner = gdp.learner([problem], **params)
        policy = jax.tree.map(lambda leaf: 5 * leaf, learner.init(0, 1)["policy"])  # so that both parts count
        folder, header = tmp_path / str(value), {"placer": "gdp", "version": gdp.NETWORK, "settings": learner.settings}
        save_policy(folder, header, policy)
        place = {"rng": np.random.default_rng(0), "budget": Budget(problem, evaluations=0), "policy": str(folder)}
        found[value] = zero.place(problem, **place).hash
        assert found[value] == spec.place(problem, **place).hash
    assert found[True] != found[False]


@pytest.mark.slow
def test_gdp_computes_large_graphs_in_parts_with_the_same_result_and_gradient(monkeypatch):
    from simdev.baselines.rl import _gdp, _gdp_net
    from simdev.baselines.rl._jax import eqx, jax
    from simdev.baselines.rl._sight import with_sight

    sight = with_sight(group_problem(diamond(), np.arange(5), rows=4 * _gdp_net.SEGMENT), 2).inputs
    policy, found = _gdp.GdpPolicy(8, 8, 1, 2, key=jax.random.PRNGKey(0)), []
    for at_once in (4, 1):
        monkeypatch.setattr(_gdp_net, "AT_ONCE", at_once)

        def total(policy):
            return (jax.nn.log_softmax(policy(sight))[:5, :2] ** 2).sum()

        value, gradient = eqx.filter_jit(eqx.filter_value_and_grad(total))(policy)
        found.append([np.asarray(value), *map(np.asarray, jax.tree.leaves(gradient))])
    assert max(np.abs(leaf).max() for leaf in found[0][1:]) > 0.01
    for whole, parts in zip(*found, strict=True):
        assert np.allclose(whole, parts, atol=1e-4)


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("superposition", [True, False])
def test_gdp_computes_the_same_in_numpy_as_in_jax(monkeypatch, attention, superposition):
    from simdev.baselines.rl import _gdp, _gdp_net
    from simdev.baselines.rl._jax import eqx, jax
    from simdev.baselines.rl._sight import with_sight
    from simdev.placers.policy_file import _named

    sight = with_sight(group_problem(chains(40, 4), np.arange(160), rows=4 * _gdp_net.SEGMENT), 2).inputs
    parts = {"attention": attention, "superposition": superposition}
    policy = _gdp.GdpPolicy(8, 8, 2, 2, **parts, key=jax.random.PRNGKey(0))
    arrays = dict(_named(policy))
    shapes = _gdp_net.shapes(hidden=8, devices=8, sages=2, blocks=2)
    assert {name: array.shape for name, array in arrays.items()} == shapes
    in_jax = np.asarray(eqx.filter_jit(policy)(sight))[:160, :2]
    assert np.ptp(in_jax) > 0.1
    for at_once in (4, 1):
        monkeypatch.setattr(_gdp_net, "AT_ONCE", at_once)
        in_numpy = _gdp_net.logits(_gdp_net.NumPy, _gdp_net.policy_of(arrays), sight, **parts)[:160, :2]
        assert in_numpy.dtype == np.float32 and np.allclose(in_numpy, in_jax, atol=1e-4)


def test_gdp_finds_the_maximum_over_neighbours_as_the_paper_writes_it():
    from simdev.baselines.rl._gdp import Sage
    from simdev.baselines.rl._jax import eqx, jax, jnp
    from simdev.baselines.rl._layers import normalised
    from simdev.baselines.rl._sight import with_sight

    sight = with_sight(group_problem(diamond(), np.arange(5)), 2).inputs
    layer = Sage(8, key=jax.random.PRNGKey(0))
    h = jax.random.normal(jax.random.PRNGKey(1), (len(sight.real), 8))

    def naive(layer, h):
        heard = jnp.zeros(h.shape)
        sides = (
            (sight.parents, sight.parent_real, sight.parent_cost),
            (sight.children, sight.child_real, sight.child_cost),
        )
        for side, (number, real, cost) in enumerate(sides):
            for slot in range(number.shape[1]):
                edge = jnp.stack([cost[:, slot], jnp.full(len(h), float(side))], axis=1)
                value = jax.nn.sigmoid(layer.pool(jnp.concatenate([h[number[:, slot]], edge], axis=1)))
                heard = jnp.maximum(heard, value * real[:, slot, None])
        return normalised(h + jax.nn.relu(layer.join(jnp.concatenate([h, heard], axis=1))))

    assert np.allclose(layer(h, sight), naive(layer, h), atol=1e-5)
    one, other = (
        eqx.filter_grad(lambda layer, f=f: (f(layer, h) ** 3).sum())(layer) for f in (lambda a, b: a(b, sight), naive)
    )
    assert np.allclose(one.pool.weight, other.pool.weight, atol=1e-3)


def test_gdp_without_a_rate_learns_nothing_and_edits_learn_for_their_groups_alone():
    from simdev.baselines.rl._gdp import Batch
    from simdev.baselines.rl._train import Episodes

    problem = diamond()
    spec, _ = find_placer("gdp")
    learner = spec.learner(
        [problem], **{**{k: v for k, v in spec.defaults.items() if k != "policy"}, **TINY["gdp"], "rate": 0.0}
    )
    grouped = learner.grouped(problem)
    first = learner.init(0, 1)
    state, _ = learner.step(first, 0, Episodes(grouped, Budget(problem, evaluations=100)))
    assert (np.asarray(state["policy"].name.weight) == np.asarray(first["policy"].name.weight)).all()
    assert state["step_ns"][0] > 0 and first["step_ns"][0] == -1

    batch = Batch(Episodes(grouped, Budget(problem, evaluations=9)), 4, state["best"][0], state["step_ns"][0], 0)
    group, before = int(np.flatnonzero(grouped.inputs.allowed.sum(axis=1) > 1)[0]), batch.best.copy()
    batch.edit(np.array([group]), 1 - int(before[group]))
    actions, moved, advantage = batch.tried()
    assert moved[0].nonzero()[0].tolist() == [group] and actions[0, group] == 1 - before[group]
    assert (batch.best[group] == before[group]) == (advantage[0] < 0), (
        "a worse edit is undone and teaches against itself"
    )


def test_gdp_stays_finite_where_an_update_turns_a_sure_policy_around():
    """A device of probability e^-200 became likely within the epochs of one update, its ratio infinite and all weights
    nan; a training of 100,000 evaluations ended so after 11,340."""
    from simdev.baselines.rl._jax import eqx, jax

    problem = diamond()
    spec, _ = find_placer("gdp")
    given = {k: v for k, v in spec.defaults.items() if k != "policy"} | TINY["gdp"] | {"rate": 100.0}
    learner = spec.learner([problem], **given)
    sight, state, functions = learner.grouped(problem).inputs, learner.init(0, 1), learner.step.__self__
    sure = eqx.tree_at(lambda policy: policy.name.bias, state["policy"], replace_fn=lambda bias: bias.at[0].add(200.0))
    logp = np.asarray(functions._draw(sure, sight, state["key"])[2])
    likely, unlikely = (
        np.where(sight.allowed, sign * logp, -np.inf).argmax(axis=1).astype(np.int32) for sign in (1, -1)
    )
    assert logp[0, unlikely[0]] < -100
    actions = np.stack([likely, unlikely] * (given["samples"] // 2))
    advantage = np.array([0.0, 3.0] * (len(actions) // 2), np.float32)
    tried = actions, np.ones(actions.shape, bool), advantage
    policy, *_ = functions._update(sure, state["optimizer"], sight, tried, unlikely, np.float32(0.05))
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(policy))


# learning


SLOW_TO_LEARN = {"doppler", "gdp", "giph", "hsdag", "placeto", "placeto-joint"}  # measured: over four seconds
SLOW_TO_FIT = {"doppler", "giph", "hsdag", "placeto"}
SLOW_TO_TRAIN = {"doppler", "giph", "hsdag", "placeto"}
SLOW_TO_RESUME = {"doppler", "giph", "hsdag", "placeto", "placeto-joint"}


def marked(names, slow):
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in names]


@pytest.mark.parametrize("name", marked(ALL | JOINT, SLOW_TO_LEARN))
def test_learns_and_repeats(name):
    problem, found = chains(), []
    spec, _ = find_placer(name)
    for _ in range(2):
        budget = Budget(problem, evaluations=400)
        placement = spec.place(problem, rng=np.random.default_rng(3), budget=budget, **(ALL | JOINT)[name])
        found.append(placement.devices.tolist())
    assert found[0] == found[1]
    assert budget.used == 400
    assert simulate(problem, placement).step_ns <= 10.1e6, "9 ms are the least, 18 on one device"


def heavy():
    """Eight ops of a MB, and two devices that hold five."""
    b = GraphBuilder("heavy")
    for number in range(8):
        b.op(f"{number}", "relu", flops=10**6, persistent_bytes=1 << 20)
    return Problem.build(b.build(), two_devices(memory=5 << 20))


@pytest.mark.parametrize("name", marked(ALL, SLOW_TO_FIT))
def test_finds_what_fits(name):
    problem = heavy()
    spec, _ = find_placer(name)
    budget = Budget(problem, evaluations=300)
    placement = spec.place(problem, rng=np.random.default_rng(0), budget=budget, **ALL[name])
    assert simulate(problem, placement).feasible


@pytest.mark.parametrize("name", marked(TINY, SLOW_TO_TRAIN))
def test_policy_is_trained_saved_and_used_on_another_graph_and_machine(name, tmp_path):
    spec, _ = find_placer(name)
    problems = [chains(), Problem.build(training_graph(np.random.default_rng(0), 30), load_topology("p100x4"))]
    params = {**spec.defaults, **TINY[name]}
    del params["policy"]
    spec.learner(problems, **params).train(problems, seed=0, evaluations=120, out=tmp_path)
    other = Problem.build(family_graph("inception", 3), load_topology("v100x8-dgx1"))
    zero = [
        spec.place(other, rng=np.random.default_rng(seed), budget=Budget(other), policy=str(tmp_path))
        for seed in range(2)
    ]
    assert zero[0].hash == zero[1].hash, "without a budget nothing is drawn"
    budget = Budget(other, evaluations=1)
    placement = spec.place(other, rng=np.random.default_rng(0), budget=budget, policy=str(tmp_path))
    assert placement.hash == zero[0].hash


@pytest.mark.parametrize("name", marked(TINY | JOINT, SLOW_TO_RESUME))
def test_training_resumes_bit_for_bit(name, tmp_path):
    spec, _ = find_placer(name)
    params = {**spec.defaults, **(TINY | JOINT)[name]}
    del params["policy"]
    problems = [chains(), chains(3, 4)]
    for folder, stops in (("whole", [150]), ("parts", [33, 90, 150])):
        for evaluations in stops:
            spec.learner(problems, **params).train(problems, seed=1, evaluations=evaluations, out=tmp_path / folder)
    for file in ("policy.safetensors", "policy.json", "checkpoint.safetensors", "progress.csv"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes(), file


def test_shipped_policy_places_held_out_graphs_far_better_than_at_random():
    header = json.loads((Path(gdp.__file__).parent / "policies" / "gdp" / "policy.json").read_text())
    assert "transformer-xl-2" not in {case["workload"] for case in header["trained_on"]}
    spec, _ = find_placer("gdp-batch")
    for machine in ("p100x4", "p100x2", "v100x8-dgx1"):
        problem = Problem.build(load_workload("transformer-xl-2"), load_topology(machine))
        zero = spec.place(problem, rng=np.random.default_rng(0), budget=Budget(problem))
        drawn = np.random.default_rng(0).choice(problem.topology.accelerators, (20, problem.graph.n_units))
        at_random = simulate_many(problem, drawn[:, problem.graph.unit_of_op]).step_ns
        assert simulate(problem, zero).step_ns < at_random.min() / 2


WITHOUT_JAX = """
import sys
sys.modules.update(jax=None, equinox=None, optax=None)  # importing them fails
import numpy as np
from simdev import Budget, Problem
from simdev.placers.registry import find_placer
problem = Problem.build("transformer-xl-2", "p100x4")
spec, _ = find_placer("gdp-zero-shot")
print(spec.place(problem, rng=np.random.default_rng(0), budget=Budget(problem)).hash)
"""


def test_shipped_policy_is_applied_without_jax():
    done = subprocess.run([sys.executable, "-c", WITHOUT_JAX], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    problem = Problem.build(load_workload("transformer-xl-2"), load_topology("p100x4"))
    tuned, zero = find_placer("gdp-batch")[0], find_placer("gdp-zero-shot")[0]
    place = {"rng": np.random.default_rng(0), "budget": Budget(problem)}
    assert done.stdout.strip() == tuned.place(problem, **place).hash == zero.place(problem, **place).hash
    assert place["budget"].used == 0
    with pytest.raises(InvalidInput, match="No such file"):
        zero.place(problem, **place, policy="no-such-folder")


def test_shipped_policy_is_refused_where_it_does_not_know_the_machine():
    problem = Problem.build(load_workload("transformer-xl-2"), load_topology("h100x16"))
    spec, _ = find_placer("gdp-batch")
    with pytest.raises(Unsupported, match="8 accelerators"):
        spec.place(problem, rng=np.random.default_rng(0), budget=Budget(problem))


def test_policy_of_another_placer_and_damaged_weights_are_refused(tmp_path):
    problem, shipped = chains(), Path(gdp.__file__).parent / "policies" / "gdp"
    with pytest.raises(InvalidInput, match="a policy of gdp"):
        spec, _ = find_placer("placeto")
        spec.place(
            problem, rng=np.random.default_rng(0), budget=Budget(problem), policy=str(shipped), **TINY["placeto"]
        )
    for name, value in (("hidden", "64"), ("hidden", 1 << 40), ("hidden", -1), ("layers", 3), ("sages", True)):
        document = json.loads((shipped / "policy.json").read_text())
        document["settings"][name] = value
        (tmp_path / "policy.json").write_text(json.dumps(document))
        with pytest.raises(InvalidInput, match=f"settings: {name}"):
            spec, _ = find_placer("gdp")
            spec.place(problem, rng=np.random.default_rng(0), budget=Budget(problem), policy=str(tmp_path))
    shutil.copytree(shipped, tmp_path / "cut")
    weights = tmp_path / "cut" / "policy.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InvalidInput, match="policy.safetensors"):
        spec, _ = find_placer("gdp")
        spec.place(problem, rng=np.random.default_rng(0), budget=Budget(problem), policy=str(tmp_path / "cut"))


@pytest.mark.long
def test_gdp_places_fifty_thousand_ops_one_by_one():
    problem = Problem.build(load_workload("gnmt-8"), load_topology("p100x4"))
    spec, _ = find_placer("gdp")
    budget = Budget(problem, evaluations=8)
    placement = spec.place(problem, rng=np.random.default_rng(0), budget=budget, **{**TINY["gdp"], "groups": 0})
    assert isinstance(placement, Placement) and problem.graph.n_ops > 50_000
