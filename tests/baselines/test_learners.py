"""Learned placers: the loop that they share, and the network of each."""

import json
import shutil

import numpy as np
import pytest
from drawn import chain, machine, problem

from simdev.baselines import _lessons, _proposals, learned_search
from simdev.baselines._proposals import FEATURES as MOVE_FEATURES
from simdev.baselines._proposals import HIDDEN, Network, Proposed
from simdev.baselines._units import choices
from simdev.baselines.rl._grouped import FEATURES, bucket, group_problem
from simdev.baselines.rl._groups import chain_groups, coarse_groups, colocation_groups
from simdev.baselines.rl._hsdag import NODE_FEATURES, HsdagPolicy, fractal_dimension, parsed, speeds, structured
from simdev.baselines.rl._jax import eqx, jax
from simdev.baselines.rl._post import cross_entropy, elite, learner_functions
from simdev.baselines.rl._train import Episodes, Learner, search
from simdev.bench.objective import parse_objective
from simdev.errors import InvalidInput, UnknownName
from simdev.placers import policy_file as policy
from simdev.placers.budget import Budget
from simdev.placers.policy_file import save_policy
from simdev.placers.registry import find_placer, graph_path, load_workload
from simdev.placers.testing import random_problem, training_graph
from simdev.problem.graph import GraphBuilder
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Link, Topology, load_topology

# learned placers: groups, n_problems, policies on disk, training that resumes bit for bit, and learns


SMALL = {"groups": 16, "hidden": 8, "samples": 8}


def two_devices(memory=1 << 34, rate=10**9):
    kind = DeviceKind("k", memory, {"f32": 1e9}, 1e12)
    return Topology("two", (Device("a", kind), Device("b", kind)), (Link(("a", "b"), rate, 1000),))


def chains(count=6, length=3):
    """Independent chains of 1 ms ops: the best placement halves them, the worst has all on one device."""
    b = GraphBuilder("chains")
    for number in range(count):
        tensors = []
        for op in range(length):
            tensors = b.outputs(b.op(f"c{number}.{op}", "relu", inputs=tensors, flops=10**6, outputs=[4000]))
    return Problem.build(b.build(), two_devices())


# groups


def test_an_op_goes_with_its_only_reader_and_gradients_follow():
    b = GraphBuilder("g")
    big = {"flops": 10**6}
    x = b.op("x", "mm", outputs=[4000], layer="one", **big)
    y = b.op("y", "relu", inputs=b.outputs(x), outputs=[4000], layer="one")
    z = b.op("z", "mm", inputs=b.outputs(y), outputs=[4000], layer="two", **big)
    w = b.op("w", "mm", inputs=b.outputs(y), outputs=[4000], layer="three", **big)
    out = b.op("out", "add", inputs=[*b.outputs(z), *b.outputs(w)], outputs=[4000], layer="four", **big)
    b.op("dw", "mm_backward", inputs=[*b.outputs(out), *b.outputs(w)], layer="three", phase="backward", **big)
    b.op("dx", "relu_backward", inputs=[*b.outputs(out), *b.outputs(x)], layer="one", phase="backward", **big)
    problem = Problem.build(b.build(), two_devices())
    group = colocation_groups(problem)  # in the order of ops: x y z w out dw dx
    assert group[5] == group[3] and group[6] == group[1], "gradients follow"
    assert group[0] < group[2] != group[3] and group[3] < group[4], "x, z, w and out take too much together"
    coarse = coarse_groups(problem, 2)
    assert set(coarse) == {0, 1}


@pytest.mark.parametrize("seed", range(30))
def test_groups_are_few_numbered_without_gaps_and_the_same_again(seed):
    problem = random_problem(np.random.default_rng(seed), rules=Rules())
    fine = colocation_groups(problem)
    for most in (1, 3, 8):
        group = coarse_groups(problem, most)
        assert len(group) == problem.graph.n_units
        assert sorted(set(group)) == list(range(group.max() + 1)) and group.max() < most
        assert (group == coarse_groups(problem, most)).all()
        assert (coarse_groups(problem, most, layers=False).max() < most) and len(set(fine)) == fine.max() + 1


def test_a_long_graph_has_groups_of_about_equal_weight():
    problem = Problem.build(training_graph(np.random.default_rng(0), 60), load_topology("p100x4"))
    time = np.bincount(coarse_groups(problem, 16), problem.unit_op_ns[1])
    assert len(time) == 16 and time.max() < 4 * time.mean()


# n_problems


@pytest.mark.parametrize("seed", range(20))
def test_a_case_is_padded_and_every_action_is_a_valid_placement(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, rules=Rules())
    grouped = group_problem(problem, coarse_groups(problem, 16))
    inputs, rows = grouped.inputs, bucket(grouped.n_groups)
    assert inputs.nodes.shape == (rows, FEATURES) and inputs.real.sum() == grouped.n_groups
    assert inputs.allowed.shape[1] == 8 and inputs.allowed.any(axis=1).all()
    assert np.isfinite(inputs.nodes).all() and not inputs.nodes[~inputs.real].any()
    assert inputs.devices[:, 0].sum() == len(grouped.devices) and not inputs.allowed[:, len(grouped.devices) :].any()
    actions = np.stack([[rng.choice(np.flatnonzero(row)) for row in inputs.allowed] for _ in range(3)])
    Budget(problem, evaluations=3).evaluate_many(grouped.placements(actions))  # raises where one is not valid


def test_edges_join_groups_once_with_all_their_bytes():
    b = GraphBuilder("e")
    x = b.op("x", "mm", outputs=[1 << 20, 3 << 20])
    y = b.op("y", "mm", inputs=b.outputs(x), outputs=[8])
    b.op("z", "mm", inputs=[b.outputs(x)[0], b.outputs(y)[0]])
    problem = Problem.build(b.build(), two_devices())
    inputs = group_problem(problem, np.array([0, 1, 1])).inputs
    assert inputs.edge_real.sum() == 1 and (inputs.source[0], inputs.target[0]) == (0, 1)
    assert inputs.edge[0, 0] == pytest.approx(np.log1p(4.0)), "a tensor goes to a group once"


def test_rewards_by_hand():
    grouped = group_problem(chains(), np.zeros(18, np.int64))
    half, full = grouped.scale_ns // 2, grouped.scale_ns
    rewards = grouped.rewards(np.array([half, full, full]), np.array([0, 0, 1 << 35]))
    assert rewards == pytest.approx([-np.sqrt(0.5), -1.0, -np.sqrt(20.0)], rel=1e-6)


# policies on disk


def toy_policy(scale=1.0):
    return {"a": np.full((2, 3), scale, np.float32), "b": (np.int32(4), np.arange(3, dtype=np.uint32))}


HEADER = {"placer": "toy", "version": 1, "settings": {}}


def test_a_policy_comes_back_as_it_was(tmp_path):
    policy.save_policy(tmp_path / "p", HEADER, toy_policy(2.5))
    back = policy.load_policy(tmp_path / "p", toy_policy(), placer="toy", version=1)
    assert (back["a"] == 2.5).all() and back["b"][0] == 4 and back["b"][0].shape == ()
    assert (back["b"][1] == [0, 1, 2]).all()


def test_what_is_no_whole_policy_is_refused(tmp_path):
    folder = tmp_path / "p"

    def load(like=None, placer="toy", version=1):
        policy.load_policy(folder, toy_policy() if like is None else like, placer=placer, version=version)

    def refused(match, *args, **kwargs):
        with pytest.raises(InvalidInput, match=match):
            load(*args, **kwargs)

    refused("No such file")
    policy.save_policy(folder, HEADER, toy_policy())
    refused("a policy of toy version 1, not of other", placer="other")
    refused("not of toy version 2", version=2)
    refused("a.*float32.*expected float32", {**toy_policy(), "a": np.zeros((3, 3), np.float32)})
    refused("c.*missing", {**toy_policy(), "c": np.zeros(1)})
    refused("b.*not an array of this policy", {"a": toy_policy()["a"]})
    policy.save_policy(folder, HEADER, toy_policy(np.nan))
    refused("not finite")
    policy.save_policy(folder, HEADER, toy_policy())
    blob = (folder / policy.ARRAYS).read_bytes()
    (folder / policy.ARRAYS).write_bytes(blob[:-1])
    refused("truncated")
    header = json.loads((folder / policy.HEADER).read_text())
    for field, value in (("format", 2), ("settings", []), ("sha256", None), ("placer", 3)):
        (folder / policy.HEADER).write_text(json.dumps({**header, field: value}))
        refused(field)
    for text in ("[1]", "{", "\xff" * 9, "[" * 100000):
        (folder / policy.HEADER).write_text(text)
        refused("policy.json")


@pytest.mark.parametrize("blob", [b"", b"\xff" * 40, b"\0" * 7 + b"\x10{}", b"\x02" + bytes(7) + b"{}"])
def test_arrays_that_are_no_safetensors_are_refused(blob):
    with pytest.raises(InvalidInput):
        policy.unpack(blob, toy_policy(), "x")
    with pytest.raises(InvalidInput):
        policy.notes_of(blob, "x")


# training


def train(name, problems, out, evaluations, seed=1, how=None, **params):
    spec, _ = find_placer(name)
    given = {key: value for key, value in spec.defaults.items() if key != "policy"}
    rows = []
    learner = spec.learner(problems, **{**given, **SMALL, **params})
    learner.train(problems, seed=seed, evaluations=evaluations, out=out, progress=rows.append, **(how or {}))
    return rows


@pytest.mark.parametrize("name", ["colocrl", pytest.param("hdp", marks=pytest.mark.slow)])
def test_training_learns_and_its_policy_places_zero_shot(name, tmp_path):
    graph = training_graph(np.random.default_rng(0), 6)
    problem = Problem.build(graph, two_devices(rate=10**5))  # where scattered placements are far too slow
    rows = train(name, [problem], tmp_path, 400, rate=0.01)
    rewards = [row["mean_reward"] for row in rows]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1
    spec, _ = find_placer(name)
    budget = Budget(problem, evaluations=1)
    spec.place(problem, rng=np.random.default_rng(0), budget=budget, policy=str(tmp_path))
    random = Budget(problem, evaluations=200)
    scores = random.evaluate_many(np.random.default_rng(0).integers(0, 2, (200, problem.graph.n_ops)))
    assert budget.best_step_ns < np.quantile([score.step_ns for score in scores], 0.05)


@pytest.mark.parametrize("name", ["colocrl", pytest.param("hdp", marks=pytest.mark.slow)])
def test_training_resumes_bit_for_bit(name, tmp_path):
    problems = [chains(), chains(3, 4)]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(name, problems, whole, 200)
    for evaluations in (40, 77, 200):
        train(name, problems, parts, evaluations)
    for file in ("policy.safetensors", "policy.json", "checkpoint.safetensors", "progress.csv"):
        assert (whole / file).read_bytes() == (parts / file).read_bytes(), file
    with pytest.raises(InvalidInput, match="another training"):
        train(name, problems, parts, 300, seed=2)
    (parts / "checkpoint.safetensors").write_bytes((parts / "checkpoint.safetensors").read_bytes()[:-5])
    with pytest.raises(InvalidInput, match="safetensors"):
        train(name, problems, parts, 300)


def test_training_stops_on_budget_and_tells_how_it_goes(tmp_path):
    rows = train("colocrl", [chains()], tmp_path, 77)
    assert rows[-1]["samples"] == 72 and len(rows) == 9  # whole batches of 8
    assert all(row["best_step_ns"] > 0 and 0 <= row["entropy"] <= np.log(2) + 1e-6 for row in rows)
    lines = (tmp_path / "progress.csv").read_text().splitlines()
    assert lines[0] == "samples,case,best_step_ns,mean_reward,entropy" and len(lines) == 10
    best = [row["best_step_ns"] for row in rows]
    assert best == sorted(best, reverse=True)


def test_colocrl_uses_the_cpu_if_it_may():
    cpu = DeviceKind("cpu", 1 << 34, {"f32": 4e9}, 1e12)  # four times as fast as the GPU
    gpu = DeviceKind("gpu", 1 << 34, {"f32": 1e9}, 1e12)
    topology = Topology(
        "odd", (Device("cpu0", cpu, host=True), Device("gpu0", gpu)), (Link(("cpu0", "gpu0"), 10**9, 1),)
    )
    problem = Problem.build(chains().graph, topology)
    spec, _ = find_placer("colocrl")
    for hosts, devices in ((False, {1}), (True, {0})):
        budget = Budget(problem, evaluations=120)
        spec.place(problem, rng=np.random.default_rng(0), budget=budget, hosts=hosts, **SMALL)
        assert set(budget.best.tolist()) >= devices and (hosts or set(budget.best.tolist()) == devices)


@pytest.mark.slow
@pytest.mark.parametrize("attention", [True, False])
def test_colocrl_attends_to_groups_unless_it_is_told_not_to(attention, tmp_path):
    problem, (spec, _) = chains(), find_placer("colocrl")
    params = {**{key: value for key, value in spec.defaults.items() if key != "policy"}, **SMALL}
    learner = spec.learner([problem], **{**params, "attention": attention})
    policy = learner.init(0, 1)["policy"]
    blind = eqx.tree_at(lambda policy: policy.place.keys.weight, policy, 0 * policy.place.keys.weight)
    inputs = learner.grouped(problem).inputs
    chances = [
        np.asarray(one.place.decode(one.embed(inputs), inputs.real, inputs.allowed, 0.0 * inputs.allowed, draw=True)[0])
        for one in (policy, blind)
    ]
    assert (chances[0] == chances[1]).all() != attention
    assert ("attention" in learner.settings) != attention, "a policy says that it lacks it"


def test_training_for_throughput_is_another_training(tmp_path):
    problem = Problem.build(training_graph(np.random.default_rng(0), 6), two_devices())
    steady = parse_objective("throughput/1f1b/4")
    how = {"objective": "throughput/1f1b/4", "simulate": steady.simulate_many}
    rows = train("colocrl", [problem], tmp_path, 16, how=how)
    one = np.zeros((1, problem.graph.n_ops), np.int32)
    assert 0 < rows[-1]["best_step_ns"] < steady.simulate_many(problem, one).step_ns[0]
    with pytest.raises(InvalidInput, match="another training"):
        train("colocrl", [problem], tmp_path, 32)


@pytest.mark.parametrize("every, used", [(1, 20), (50, 20), (51, 1)])
def test_a_search_ends_after_fifty_updates_in_a_row_that_simulate_nothing(every, used):
    problem = chains()
    grouped = group_problem(problem, coarse_groups(problem, 16))

    def step(state, index, evaluate):
        if state["updates"] % every == 0:
            evaluate(np.zeros((1, 16), int))
        return {"updates": state["updates"] + 1}, {}

    learner = Learner("toy", 1, {}, lambda _: grouped, lambda *_: {"updates": 0}, step, lambda *_: np.zeros(16, int))
    budget = Budget(problem, evaluations=20)
    search(learner, problem, rng=np.random.default_rng(0), budget=budget)
    assert budget.used == used


def test_a_policy_is_used_with_the_settings_of_its_training(tmp_path):
    train("colocrl", [chains()], tmp_path, 16)
    spec, _ = find_placer("colocrl")
    found = [
        spec.place(chains(), rng=np.random.default_rng(seed), budget=Budget(chains()), policy=str(tmp_path)).hash
        for seed in (0, 1)
    ]
    assert found[0] == found[1], "zero-shot does not depend on the seed"
    header = json.loads((tmp_path / "policy.json").read_text())
    header["settings"]["hidden"] = 9
    (tmp_path / "policy.json").write_text(json.dumps(header))
    with pytest.raises(InvalidInput, match="expected"):
        spec.place(chains(), rng=np.random.default_rng(0), budget=Budget(chains()), policy=str(tmp_path))
    shutil.rmtree(tmp_path)
    with pytest.raises(InvalidInput, match="No such file"):
        spec.place(chains(), rng=np.random.default_rng(0), budget=Budget(chains()), policy=str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("colocrl", "hsdag", "post")),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("doppler", "giph", "hdp")),
    ],
)
def test_a_graph_of_50_000_ops_is_placed(name):
    if not graph_path("gnmt-8").is_file():
        pytest.skip("the graph of gnmt-8 is not shipped")
    problem = Problem.build(load_workload("gnmt-8"), load_topology("p100x4"))
    budget = Budget(problem, evaluations=20)
    find_placer(name)[0].place(problem, rng=np.random.default_rng(0), budget=budget)
    assert budget.used == 20


def test_first_groupings_of_hdp_are_runs_of_neighbours_in_large_graphs_too():
    problem = chains(count=1, length=900)
    spec, _ = find_placer("hdp")
    learner = spec.learner([problem], **{name: value for name, value in spec.defaults.items() if name != "policy"})
    grouped = group_problem(problem, np.arange(problem.graph.n_units))
    policy = learner.init(0, 1)["policy"]
    chance = np.exp(np.asarray(policy.grouping(grouped.inputs)))[:900]
    group = chance.argmax(axis=1)
    assert chance.max(axis=1).mean() > 0.4, "samples are far from uniform"
    assert (np.diff(group) < 0).mean() < 0.05 and len(set(group)) > 32


# doppler: critical paths, ready groups, what PLC knows of the devices and what the teacher does, worked by hand


def dag_of(problem):
    from simdev.baselines.rl._doppler import with_dag

    return with_dag(group_problem(problem, np.arange(problem.graph.n_units), columns=2)).inputs


def two_devices_of_doppler(memory=1 << 20):
    kind = DeviceKind("k", memory, {"f32": 1e9}, 1e12)
    return Topology("two", (Device("a", kind), Device("b", kind)), (Link(("a", "b"), 10**6, 0),))


def diamond(memory=1 << 20, held=0):
    """0 -> 1, 2 -> 3, and 4 apart; 2 ms each (2: 4 ms); 1000 bytes take 1 ms. The mean time of a group is 2.4 ms."""
    b = GraphBuilder("diamond")
    work = {"flops": 2 * 10**6, "persistent_bytes": held}
    top = b.op("0", "mm", outputs=[1000], **work)
    left = b.op("1", "mm", inputs=b.outputs(top), outputs=[1000], **work)
    right = b.op("2", "mm", inputs=b.outputs(top), outputs=[1000], flops=4 * 10**6, persistent_bytes=held)
    b.op("3", "mm", inputs=[*b.outputs(left), *b.outputs(right)], **work)
    b.op("4", "mm", **work)
    return Problem.build(b.build(), two_devices_of_doppler(memory))


def small(**given):
    from simdev.baselines.rl._doppler import learner_functions

    settings = {
        "hidden": 8,
        "rounds": 1,
        "episodes": 8,
        "imitation": 30,
        "imitation_rate": 0.01,
        "rate": 0.001,
        "epsilon": 0.2,
        "epsilon_updates": 10,
        "history": 16,
    }
    return learner_functions(**{**settings, **given})


def at(*numbers):
    return np.array(numbers, np.int32)


def test_critical_paths_and_levels_by_hand():
    dag = dag_of(diamond())
    # from 0 over 2: 2 + 1 + 4 + 1 + 2 = 10 ms
    assert np.allclose(dag.b_level[:5] * 2.4, [10, 5, 7, 2, 2], rtol=0.02)
    assert np.allclose(dag.nodes[:5, 3], [0, 0.3, 0.3, 0.8, 0], atol=0.01), "t-levels over the longest path"
    assert np.allclose(dag.nodes[:5, 4], [1, 0.5, 0.7, 0.2, 0.2], atol=0.01)
    below = {group: np.flatnonzero(dag.below[group]).tolist() for group in range(5)}
    above = {group: np.flatnonzero(dag.above[group]).tolist() for group in range(5)}
    assert below == {0: [0, 2, 3], 1: [1, 3], 2: [2, 3], 3: [3], 4: [4]}
    assert above == {0: [0], 1: [0, 1], 2: [0, 2], 3: [0, 2, 3], 4: [4]}
    assert np.allclose(dag.below.sum(axis=1), 1) and np.allclose(dag.above.sum(axis=1), 1)


def test_groups_are_ready_when_all_parents_are_placed():
    from simdev.baselines.rl._doppler import Schedules

    schedules = Schedules(dag_of(diamond()), 2)

    def ready():
        return [np.flatnonzero(row).tolist() for row in schedules.ready()]

    assert ready() == [[0, 4], [0, 4]]
    schedules.place(at(0, 4), at(0, 1))
    assert ready() == [[1, 2, 4], [0]]
    schedules.place(at(1, 0), at(0, 0))
    assert ready() == [[2, 4], [1, 2]]
    schedules.place(at(2, 2), at(1, 0))
    assert ready() == [[3, 4], [1]]


def test_device_features_by_hand():
    from simdev.baselines.rl._doppler import Schedules

    schedules, ms = Schedules(dag_of(diamond()), 1), 1 / 2.4
    for group, device in ((0, 0), (1, 0), (2, 1)):  # 0 and 1 on a: 0-2, 2-4; 2 on b, its input there at 3: 3-7
        schedules.place(at(group), at(device))
    assert np.allclose(schedules.start[0, :3], np.array([0, 2, 3]) * ms, rtol=0.02)
    assert np.allclose(schedules.outlook(at(3))[0], np.array([8, 7]) * ms, rtol=0.02)
    work, inputs, first, latest, late, filled = schedules.features(at(3))[0].T
    assert np.allclose(work, np.array([4, 4]) * ms / 2.5, rtol=0.02), "an even share is 2.5 mean groups"
    assert np.allclose(np.expm1(inputs), np.array([2, 4]) * ms, rtol=0.02)
    assert np.allclose(np.expm1(first), np.array([7 - 2, 7 - 3]) * ms, rtol=0.02)
    assert np.allclose(np.expm1(latest), np.array([7 - 4, 0]) * ms, atol=0.02)
    assert np.allclose(np.expm1(late), np.array([1, 0]) * ms, atol=0.02)
    assert np.allclose(filled, np.array([2000, 1000]) / 2**20)


def test_teacher_is_critical_path_list_scheduling():
    _, actions = small().run(None, dag_of(diamond()), 6, np.random.default_rng(0), 0.0)
    record, _ = small().run(None, dag_of(diamond()), 6, np.random.default_rng(0), 0.0)
    assert (record.group[:, :5] == [0, 2, 1, 3, 4]).all(), "by b-level: 10, 7, 5, then 2 and 2"
    assert (actions[:, 2] == actions[:, 0]).all() and (actions[:, 1] != actions[:, 0]).all()
    assert (actions[:, 3] == actions[:, 2]).all() and (actions[:, 4] != actions[:, 0]).all()
    assert len(set(actions[:, 0])) == 2, "ties are broken at random"


def test_teacher_passes_over_full_devices():
    _, actions = small().run(None, dag_of(diamond(1 << 20, 300_000)), 4, np.random.default_rng(0), 0.0)
    held = [np.bincount(row[:5], minlength=2).max() for row in actions]
    assert held == [3] * 4, "three fit on a device"


def test_choices_and_their_likelihood_agree():
    """The choices are made in NumPy; the loss, in JAX, is minus the mean of their log-probabilities."""
    from simdev.baselines.rl._doppler import _seen

    learner, dag = small(), dag_of(diamond())
    policy, state, key = learner._first(3)
    record, actions = learner.run(policy, dag, 8, np.random.default_rng(1), 0.0)
    into, out = ((np.asarray(x.weight), np.asarray(x.bias)) for x in (policy.place_device, policy.place_out))
    selected, own, there = map(np.asarray, learner._embed(policy, _seen(dag)))
    total = 0.0
    for row in range(8):
        device = {}
        for step in range(5):
            group, chosen = record.group[row, step], record.device[row, step]
            legal = np.flatnonzero(record.ready[row, step])
            assert group in legal and set(legal) == {
                g for g in range(5) if g not in device and all(p in device for p in dag.parents[g][dag.parent_real[g]])
            }
            total += selected[group] - np.log(np.exp(selected[legal]).sum())
            mean = np.zeros((2, 8), np.float32)
            for number in range(2):
                if number in device.values():
                    mean[number] = np.mean([there[g] for g in device if device[g] == number], axis=0)
            hidden = np.maximum(0, own[group] + mean + record.devices[row, step] @ into[0] + into[1])
            logits = (hidden @ out[0] + out[1])[:, 0]
            total += logits[chosen] - np.log(np.exp(logits).sum())
            device[group] = chosen
        assert [device[group] for group in range(5)] == actions[row, :5].tolist()
    (loss, _), _ = learner._gradient(policy, _seen(dag), record, np.ones(8, np.float32), np.float32(0.0))
    assert loss == pytest.approx(-total / 40, abs=1e-5)
    assert abs(np.ptp(selected[:5])) < 0.5, "nearly uniform at first"


def test_imitation_lowers_its_loss_and_the_policy_then_does_as_the_teacher():
    learner, dag = small(), dag_of(diamond())
    policy, losses = learner.imitate(learner._first(0)[0], dag, np.random.default_rng(0))
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    record, actions = learner.run(policy, dag, 1, None, 0.0)
    assert record.group[0, :3].tolist() == [0, 2, 1] and actions[0, 2] == actions[0, 0] != actions[0, 1]


def test_imitation_is_left_out_where_a_policy_is_given(tmp_path, monkeypatch):
    from simdev.baselines.rl import _train

    seen = []
    monkeypatch.setattr(_train, "search", lambda learner, *_, **__: seen.append(learner.step.__self__.imitation))
    save_policy(tmp_path, {"placer": "doppler", "version": 2, "settings": {}}, {"a": np.zeros(1, np.float32)})
    spec, _ = find_placer("doppler")
    for given in ("", str(tmp_path)):
        spec.function(diamond(), rng=None, budget=None, **{**spec.defaults, "imitation": 2, "policy": given})
    assert seen == [2, 0]


# giPH: gpNet, its features and messages, and the moves that are legal, worked by hand


def net_of(problem, group=None):
    from simdev.baselines.rl._giph import with_net

    group = np.arange(problem.graph.n_units) if group is None else np.array(group)
    return with_net(group_problem(problem, group, columns=2)).inputs


def two_devices_of_giph():
    slow, fast = DeviceKind("slow", 1 << 20, {"f32": 1e9}, 1e12), DeviceKind("fast", 1 << 21, {"f32": 2e9}, 1e12)
    return Topology("two", (Device("a", slow), Device("b", fast)), (Link(("a", "b"), 10**6, 0),))


def diamond_of_giph():
    """0 -> 1, 2 -> 3; ops of 2 ms on a and 1 ms on b; 1000 bytes take 1 ms, 2000 bytes 2 ms."""
    b = GraphBuilder("diamond")
    work = {"flops": 2 * 10**6}
    top = b.op("0", "mm", outputs=[1000], **work)
    left = b.op("1", "mm", inputs=b.outputs(top), outputs=[2000], **work)
    right = b.op("2", "mm", inputs=b.outputs(top), outputs=[1000], persistent_bytes=1 << 19, **work)
    b.op("3", "mm", inputs=[*b.outputs(left), *b.outputs(right)], **work)
    return Problem.build(b.build(), two_devices_of_giph())


def test_net_joins_groups_both_ways_with_times_in_mean_group_times():
    net = net_of(diamond_of_giph())
    before = {g: sorted(net.near[0, g][net.near_real[0, g]].tolist()) for g in range(4)}
    behind = {g: sorted((15 - net.near[1, 15 - g][net.near_real[1, 15 - g]]).tolist()) for g in range(4)}
    assert before == {0: [], 1: [0], 2: [0], 3: [1, 2]} and behind == {0: [1, 2], 1: [3], 2: [3], 3: []}
    assert np.allclose(net.time[:4], [[2, 1]] * 4, rtol=0.02), "in units of 1 ms"
    assert net.need[2] == pytest.approx([0.5 + 1000 / 2**20, 0.25 + 500 / 2**20])
    left = net.near[0, 3].tolist().index(1)
    assert np.allclose(net.transfer[0, 3, left], [[0, 2], [2, 0]], rtol=0.02)
    assert net.size[0, 3, left] == pytest.approx(np.log1p(2000 / 2**20))
    assert not net.near_real[:, 4:12].any() and not net.real[4:].any()


def test_groups_that_depend_on_each_other_are_one_edge_with_the_bytes_of_both_ways():
    net = net_of(diamond_of_giph(), [0, 1, 1, 0])  # 0 and 3 together: tensors 1000 there (once), 2000 + 1000 back
    assert net.near_real.sum() == 2 and net.near[0, 1, 0] == 0
    assert net.size[0, 1, 0] == pytest.approx(np.log1p(4000 / 2**20))
    assert np.allclose(net.transfer[0, 1, 0], [[0, 2], [2, 0]], rtol=0.02), "4 ms, of 2 ms a group"


def test_expected_schedule_and_start_time_potential_by_hand():
    from simdev.baselines.rl._giph import expected_schedule, node_features

    net = net_of(diamond_of_giph())
    placed = np.zeros(16, np.int32)
    placed[2] = 1  # 0, 1 and 3 on a: 0-2, 2-4, and 3 from 4; 2 on b from 2 + 1, to 4, back at 5
    ready, start, end = expected_schedule(net, placed)
    assert np.allclose(start[:4], [0, 2, 3, 5], atol=0.1) and end == pytest.approx(7, abs=0.15)
    assert np.allclose(ready[:4], [[0, 0], [2, 3], [2, 3], [5, 6]], atol=0.1), "on b, 1's tensor takes 2 ms"
    features = np.asarray(node_features(net, placed))
    assert features[:4, :, 3].tolist() == [[1, 0], [1, 0], [0, 1], [1, 0]]
    potential = np.sign(features[..., 2]) * np.expm1(2 * np.abs(features[..., 2]))
    assert np.allclose(potential[:4], [[0, 0], [0, 1], [-1, 0], [0, 1]], atol=0.1)


def test_messages_come_from_pivots_and_go_to_pivots():
    from simdev.baselines.rl._giph import EDGE_FEATURES, NODE_FEATURES, Passing
    from simdev.baselines.rl._jax import eqx, jax, jnp

    net = net_of(diamond_of_giph())
    passing = Passing(4, 2, key=jax.random.PRNGKey(0))
    assert passing.edge.weight.shape == (EDGE_FEATURES, 4)
    run = eqx.filter_jit(lambda nodes, placed: passing(nodes, placed, net.allowed, *(table[0] for table in net[4:])))
    nodes = jax.random.normal(jax.random.PRNGKey(1), (16, 2, NODE_FEATURES))
    placed = jnp.zeros(16, int).at[2].set(1)

    def heard_by(group, device):
        changed = np.abs(run(nodes.at[group, device].add(5.0), placed) - run(nodes, placed)).max(axis=2) > 1e-6
        return [tuple(node) for node in np.argwhere(changed).tolist()]

    # the pivot of 1 reaches all nodes of 3; its other node the pivot of 3 alone
    assert heard_by(1, 0) == [(1, 0), (3, 0), (3, 1)]
    assert heard_by(1, 1) == [(1, 1), (3, 0)]
    # the pivot of 0 reaches all of 1 and 2, and so all of 3; its other node the pivots of 1 and 2, and so all of 3
    assert heard_by(0, 0) == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert heard_by(0, 1) == [(0, 1), (1, 0), (2, 1), (3, 0), (3, 1)]


def test_scores_do_not_change_with_padding():
    from simdev.baselines.rl._giph import GiphPolicy, with_net
    from simdev.baselines.rl._jax import eqx, jax

    policy = eqx.filter_jit(GiphPolicy(8, 10, key=jax.random.PRNGKey(0)))
    scores = []
    for rows, columns in ((16, 2), (32, 8)):
        net = with_net(group_problem(diamond_of_giph(), np.arange(4), rows=rows, columns=columns)).inputs
        scores.append(np.asarray(policy(net, np.array([0, 0, 1, 0] + [0] * (rows - 4))))[:4, :2])
    assert np.allclose(scores[0], scores[1], atol=1e-5) and np.ptp(scores[0]) > 0


def test_legal_moves_move_something_and_not_the_same_group_again():
    from simdev.baselines.rl._giph import legal_moves

    net = net_of(diamond_of_giph())
    placed = np.zeros(16, np.int32)
    assert np.argwhere(legal_moves(net, placed, -1)).tolist() == [[0, 1], [1, 1], [2, 1], [3, 1]]
    placed[2] = 1
    assert np.argwhere(legal_moves(net, placed, 2)).tolist() == [[0, 1], [1, 1], [3, 1]]
    alone = net_of(diamond_of_giph(), [0, 0, 0, 0])
    assert np.argwhere(legal_moves(alone, placed, 0)).tolist() == [[0, 1]], "nothing else can move"


def test_advantages_are_discounted_improvements_beyond_the_mean():
    from simdev.baselines.rl._giph import MovePolicy

    moves = MovePolicy.__new__(MovePolicy)
    moves.discount = 0.5
    advantage = moves._advantage(np.array([[4.0], [4.0], [1.0]], np.float32))  # gains 0 and 3, less 1.5
    expected = np.array([-1.5 + 0.75, 1.5])
    assert np.allclose(advantage[:, 0], expected / expected.std())


def test_first_scores_are_nearly_equal_whatever_the_seed():
    from simdev.baselines.rl._giph import GiphPolicy
    from simdev.baselines.rl._jax import jax

    net, placed = net_of(diamond_of_giph()), np.zeros(16, np.int32)
    first = jax.jit(lambda seed: GiphPolicy(8, 10, key=jax.random.PRNGKey(seed))(net, placed))
    for seed in range(5):
        scores = np.asarray(first(seed))[:4]
        assert np.ptp(scores) < 0.5


# HSDAG: chains, fractal dimension and the parsing of small graphs by hand, and what its network reads


PARSED = jax.jit(parsed, static_argnums=3)


def problem_of(edges, backward=()):
    """Ops of 1 ms named by letters, with these edges; ``backward`` as (name, the op whose gradient it is)."""
    kind = DeviceKind("k", 1 << 34, {"f32": 1e9}, 1e12)
    two = Topology("two", (Device("a", kind), Device("b", kind)), (Link(("a", "b"), 10**9, 1000),))
    b, made = GraphBuilder("g"), {}
    for name in sorted({name for edge in edges for name in edge}):
        inputs = [made[source] for source, target in edges if target == name]
        made[name] = b.outputs(b.op(name, "relu", inputs=inputs, flops=10**6, outputs=[4000], layer=name))[0]
    for name, of in backward:
        b.op(name, "relu_backward", inputs=[made[of]], flops=10**6, phase="backward", layer=of)
    return Problem.build(b.build(), two)


LADDER = [("a", "b"), ("b", "c"), ("b", "d"), ("c", "f"), ("d", "e"), ("e", "f"), ("f", "g")]


def test_chains_end_where_paths_fork_or_meet():
    problem = problem_of(LADDER, backward=[("z", "d")])
    group = dict(zip(problem.graph.op_names, chain_groups(problem, 16)[problem.graph.unit_of_op], strict=True))
    assert group["a"] == group["b"] and group["d"] == group["e"] == group["z"] and group["f"] == group["g"]
    assert len(set(group.values())) == 4 and group["a"] == 0


def test_more_chains_than_wanted_are_merged():
    problem = problem_of([(letter, "z") for letter in "abcdefgh"])
    assert chain_groups(problem, 16).max() + 1 == 9 and chain_groups(problem, 4).max() + 1 == 4


def test_fractal_dimension_by_hand():
    path = np.array([[0, 1], [1, 2]])
    # From an end: 1 node within one step and 2 within two, slope 1. From the middle there is one distance only.
    assert fractal_dimension(4, path) == pytest.approx([1.0, 0.0, 1.0, 0.0])
    star_and_tail = np.array([[0, 1], [0, 2], [0, 3], [3, 4]])
    # From 1: 1, 3, 4 others within 1, 2, 3 steps.
    x, y = np.log([1, 2, 3]), np.log([1, 3, 4])
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    assert fractal_dimension(5, star_and_tail)[1] == pytest.approx(slope)


def test_parsing_by_hand():
    #   0 -.9- 1 -.2- 2 -.8- 3 -.7- 4    5 (alone)    6 -.5- 7 -.5- 8
    ends = np.array([[0, 1], [1, 2], [2, 3], [3, 4], [6, 7], [7, 8], [5, 5]])
    score = np.array([0.9, 0.2, 0.8, 0.7, 0.5, 0.5, 1.0], np.float32)
    real = np.array([True] * 6 + [False])  # the last is padding
    label = np.asarray(PARSED(score, ends, real, 9)).tolist()
    assert label[0] == label[1] and label[1] != label[2], ".2 is the best of neither end"
    assert label[2] == label[3] == label[4], "4 keeps its only edge, though 3 keeps another"
    assert label[5] == 5 and label[6] == label[7] == label[8] and len(set(label)) == 4
    assert all(label[name] == name for name in label), "a group is named by a member"


@pytest.mark.parametrize("seed", range(10))
def test_parsed_groups_are_components_of_the_kept_edges(seed):
    import networkx

    rng = np.random.default_rng(seed)
    count = 40
    graph = networkx.gnm_random_graph(count, int(rng.integers(10, 120)), seed=seed)
    ends = np.array(sorted(graph.edges)).reshape(-1, 2)
    score = rng.integers(0, 5, len(ends)) / 4  # with many equals
    kept = networkx.empty_graph(count)
    for node in graph:
        mine = np.flatnonzero((ends == node).any(axis=1))
        if len(mine):
            kept.add_edge(*ends[mine[np.argmax(score[mine])]])
    padded, real = np.zeros((128, 2), np.int32), np.arange(128) < len(ends)
    padded[: len(ends)] = ends
    label = np.asarray(PARSED(np.resize(score, 128).astype(np.float32), padded, real, count))
    expected = {frozenset(group) for group in networkx.connected_components(kept)}
    assert {frozenset(np.flatnonzero(label == name).tolist()) for name in set(label.tolist())} == expected


def test_structure_has_each_pair_once():
    grouped = structured(problem_of(LADDER), 16, 8)
    seen = grouped.inputs
    assert seen.nodes.shape == (16, NODE_FEATURES) and seen.real.sum() == 4 and not seen.nodes[4:].any()
    assert seen.ends[seen.edge_real].tolist() == [[0, 1], [0, 2], [1, 3], [2, 3]], "ab-c, ab-de, c-fg, de-fg"
    degrees = np.expm1(seen.nodes[:4, NODE_FEATURES - 14 : NODE_FEATURES - 12])
    assert degrees == pytest.approx(np.array([[0, 2], [1, 1], [1, 1], [2, 0]])), "predecessors, successors"


def test_heavy_nodes_stay_alone():
    kind = DeviceKind("k", 1600, {"f32": 1e9}, 1e12)
    two = Topology("two", (Device("a", kind), Device("b", kind)), (Link(("a", "b"), 10**9, 1000),))
    b = GraphBuilder("star")
    ids = b.outputs(b.op("ids", "relu", flops=10**6, outputs=[8]))
    tables = [
        b.outputs(b.op(f"table{held}", "relu", inputs=ids, flops=10**6, persistent_bytes=held, outputs=[8]))[0]
        for held in (100, 101, 700)
    ]
    b.op("all", "add", inputs=tables, flops=10**6)
    seen = structured(Problem.build(b.build(), two), 16, 8).inputs
    assert seen.ends[seen.edge_real].tolist() == [[0, 1], [0, 2], [0, 3], [1, 4], [2, 4], [3, 4]]
    assert seen.ends[seen.joins].tolist() == [[0, 1], [1, 4]], "100 of 1,600 bytes is no more than a sixteenth"
    label = PARSED(np.ones(len(seen.ends), np.float32), seen.ends, seen.joins, 16)[:5].tolist()
    assert label[0] == label[1] == label[4] and label[2:4] == [2, 3]


def test_network_ignores_padding_and_gives_a_group_one_device():
    policy = HsdagPolicy(8, 8, key=jax.random.PRNGKey(0))
    run = eqx.filter_jit(lambda seen: policy(seen.nodes, seen, None))
    problem = problem_of(LADDER)
    small, large = (run(structured(problem, nodes, 8).inputs) for nodes in (16, 32))
    assert (small[0][:4] == large[0][:4]).all()
    groups = np.unique(small[0][:4])
    assert np.allclose(small[2][groups], large[2][groups], atol=1e-4)
    assert (small[2][groups, 2:] < -1e8).all() and (np.abs(small[2][groups, :2]) < 100).all()


def test_gradient_reaches_the_scores_that_parse():
    policy = HsdagPolicy(8, 8, key=jax.random.PRNGKey(1))
    seen = structured(problem_of(LADDER), 16, 8).inputs

    def total(policy, seen):
        label, _, logits = policy(seen.nodes, seen, jax.random.PRNGKey(2))
        return jax.nn.log_softmax(logits)[label[0], 0]

    gradient = jax.jit(jax.grad(total))(policy, seen)
    assert all(np.abs(layer.weight).max() > 0 for layer in (*gradient.score, *gradient.convolve, *gradient.enter))


def test_rewards_are_speeds():
    assert speeds(np.array([-np.sqrt(0.5), -1.0, -np.sqrt(20.0)])) == pytest.approx([2.0, 1.0, 0.05])


# post: the elite, cross-entropy minimisation and proximal steps by hand, and that it has no policy


SETTINGS = {
    "groups": 4,
    "devices": 8,
    "samples": 4,
    "pool": 8,
    "share": 0.25,
    "mix": 0.2,
    "epochs": 3,
    "rate": 0.5,
    "penalty": 0.1,
}


def apart(count=4):
    """Ops of 1 ms that nothing joins, on two devices."""
    kind = DeviceKind("k", 1 << 34, {"f32": 1e9}, 1e12)
    two = Topology("two", (Device("a", kind), Device("b", kind)), (Link(("a", "b"), 10**9, 1000),))
    b = GraphBuilder("apart")
    for number in range(count):
        b.op(f"{number}", "relu", flops=10**6)
    return Problem.build(b.build(), two)


def test_elite_is_the_best_share_and_what_equals_it():
    step_ns, overflow = np.array([5, 3, 9, 3, 1, 7]), np.array([0, 0, 0, 0, 8, 2])
    assert np.flatnonzero(elite(step_ns, overflow, 0.17)).tolist() == [1, 3], "one of six, and its equal"
    assert np.flatnonzero(elite(step_ns, overflow, 0.5)).tolist() == [0, 1, 3]
    assert np.flatnonzero(elite(step_ns, overflow, 0.0)).tolist() == [1, 3], "one at least"
    assert np.flatnonzero(elite(step_ns, overflow, 0.84)).tolist() == [0, 1, 2, 3, 5], "lacks 2 bytes, not 8"


def test_cross_entropy_is_how_often_each_device_is_named():
    actions = np.array([[0, 1, 0], [0, 1, 2], [1, 1, 2], [0, 1, 2]])
    allowed = np.array([[True, True, True], [True, True, False], [True, True, True]])
    found = np.exp(cross_entropy(actions, allowed, 0.0))
    assert found == pytest.approx(np.array([[0.75, 0.25, 0], [0, 1, 0], [0.25, 0, 0.75]]), abs=1e-9)
    mixed = np.exp(cross_entropy(actions, allowed, 0.3))
    assert mixed[0] == pytest.approx([0.625, 0.275, 0.1]) and mixed[1, :2] == pytest.approx([0.15, 0.85])
    assert mixed[1, 2] < 1e-9, "not allowed"


def test_one_proximal_step_is_the_policy_gradient():
    learner = learner_functions(**{**SETTINGS, "epochs": 1})
    grouped = group_problem(apart(), np.arange(4), rows=4)
    actions = np.zeros((4, len(grouped.inputs.real)), np.int64)
    actions[:2, 0] = 1  # group 0 goes to device 1 in the two better samples
    advantage = np.array([1.0, 1.0, -1.0, -1.0], np.float32)
    logits = np.zeros((len(grouped.inputs.real), 8), np.float32)
    after = np.asarray(learner._proximal(logits, (grouped.inputs.allowed, grouped.inputs.real), actions, advantage))
    assert after[0, :2] == pytest.approx([-0.25, 0.25]), "0.5 times the mean of advantage times (named - 1/2)"
    assert after[1:] == pytest.approx(0.0, abs=1e-6), "no difference, no gradient"


def test_a_penalty_keeps_the_distribution_near_the_old_one():
    grouped = group_problem(apart(), np.arange(4), rows=4)
    actions = np.zeros((4, len(grouped.inputs.real)), np.int64)
    actions[:2] = 1
    advantage, logits = np.array([1, 1, -1, -1], np.float32), np.zeros((len(grouped.inputs.real), 8), np.float32)
    free, held = (
        np.asarray(
            learner_functions(**{**SETTINGS, "epochs": 50, "penalty": penalty})._proximal(
                logits, (grouped.inputs.allowed, grouped.inputs.real), actions, advantage
            )
        )[0, 1]
        for penalty in (0.0, 2.0)
    )
    assert 0.1 < held < 1.0 < free


def test_minimises_cross_entropy_once_the_pool_is_full():
    learner = learner_functions(**SETTINGS)
    problem = apart()
    grouped = group_problem(problem, np.arange(4), rows=4)
    evaluate = Episodes(grouped, Budget(problem, evaluations=100))
    state = learner.init(1, 1)
    first, _ = learner.step(state, 0, evaluate)
    assert len(first["drawn"]) == 4
    second, _ = learner.step(first, 0, evaluate)
    assert len(second["drawn"]) == len(second["step_ns"]) == 0
    probability = np.exp(second["policy"][:4, :2])
    assert probability.sum(axis=1) == pytest.approx(1.0) and probability.min() >= 0.1 - 1e-6, "half of mix"


def test_has_no_policy():
    problem, (spec, _) = apart(), find_placer("post")
    with pytest.raises(InvalidInput, match="placer post.*there is no policy to train"):
        spec.learner([problem], **spec.defaults)
    with pytest.raises(UnknownName, match="policy"):
        spec.place(problem, rng=np.random.default_rng(0), budget=Budget(problem, evaluations=4), policy="x")


def proposals(given, *, choice="uniform", network=None, width=400, evaluations=1000):
    budget = Budget(given, evaluations=evaluations)
    rng = np.random.default_rng(0)
    return Proposed(given, choices(given), budget, rng, network=network, choice=choice, width=width)


def drawn_moves(search, devices):
    """Move -> features: a move as the tuple of devices after it."""
    state = search.state(np.array(devices, np.int32))
    count = search.draw(state)
    assert count > 0
    return {
        tuple(search.moved(state.devices, row).tolist()): dict(zip(MOVE_FEATURES, search.features[row], strict=True))
        for row in range(count)
    }


def test_the_features_of_a_move_by_hand():
    # o0 (100 ns) -> o1 (200 ns) -> o2 (300 ns), tensors of 30 and 50 bytes: transfers of 40 and 60 ns.
    given = problem(chain(30, 50, 1), machine(2), [100, 200, 300])
    moves = drawn_moves(proposals(given), [0, 1, 0])  # o1 alone is away: the step is 100 + 40 + 200 + 60 + 300 = 700
    back = moves[0, 0, 0]
    assert back["transfers saved"] == pytest.approx(np.sqrt(100 / 700)) and back["transfers added"] == 0
    assert back["number saved"] == pytest.approx(2 / 3)  # its input and its output are touched
    assert back["load here"] == pytest.approx(200 / 700) and back["load there"] == pytest.approx(400 / 700)
    assert back["time on critical paths"] == pytest.approx(np.sqrt(200 / 700))
    away = moves[1, 1, 0]  # o0 follows o1: its tensor stays at home
    assert away["transfers saved"] == pytest.approx(np.sqrt(40 / 700)) and away["transfers added"] == 0
    spread = moves[0, 1, 1]
    assert spread["transfers saved"] == pytest.approx(np.sqrt(60 / 700)) and spread["transfers added"] == 0
    assert spread["idle time there"] > 0.4


def test_the_slack_of_an_op_by_hand():
    from simdev.problem.graph import GraphBuilder

    b = GraphBuilder("diamond")  # o0 -> o1 (500 ns) and o2 (100 ns) -> o3; o2 on a device of its own
    start = b.outputs(b.op("o0", "op", outputs=[10]))
    long = b.outputs(b.op("o1", "op", inputs=start, outputs=[10]))
    short = b.outputs(b.op("o2", "op", inputs=start, outputs=[10]))
    b.op("o3", "op", inputs=[*long, *short])
    given = problem(b, machine(2), [50, 500, 100, 50])
    search = proposals(given)
    sight = search.see(search.state(np.array([0, 0, 1, 0], np.int32)))
    assert sight.step == 600 and sight.slack.tolist() == [0, 0, 360, 0]  # 500 - 100 less two transfers of 20
    assert sight.wait.tolist() == [0, 0, 0, 0] and sight.load.tolist() == [600, 100]


def test_no_placement_is_simulated_twice():
    given = _lessons.drawn_problem(7, 3)
    search = proposals(given, width=1, evaluations=200)
    search._cheap = False  # so that each is a call of evaluate()
    seen, evaluate = [], search.budget.evaluate

    def noted(devices, **options):
        seen.append(devices.tobytes())
        return evaluate(devices, **options)

    search.budget.evaluate = noted
    start = search.state(np.zeros(given.graph.n_units, np.int32) + choices(given).argmax(axis=0)[0].astype(np.int32))
    search.improve(start, search.budget.share(1))
    assert len(seen) > 150 and len(set(seen)) == len(seen)


def test_the_compiled_network_is_the_trained_one():
    rng = np.random.default_rng(0)
    network = _proposals.random_network(rng)
    given = _lessons.drawn_problem(7, 0)
    search = proposals(given, choice="learned", network=network, width=20)
    count = search.draw(search.state(np.full(given.graph.n_units, choices(given).argmax(axis=0)[0], np.int32)))
    x = np.clip((search.features[:count] - network.mean) * network.scale, -5, 5)
    assert np.allclose(search.rate(count), _lessons._scores(network[2:], x)[0])


def test_what_ships_chooses_better_moves_than_chance_on_problems_it_never_saw():
    network = _proposals.read_network(learned_search.WEIGHTS)
    features, gains = _lessons.collect(99, range(4), 20, None)
    valid = ~np.isnan(features[..., 0])
    x = np.clip((np.nan_to_num(features) - network.mean) * network.scale, -5, 5)
    scores = np.where(valid, _lessons._scores(network[2:], x)[0], -np.inf)
    chosen = np.take_along_axis(gains, scores.argmax(axis=1)[:, None], 1).mean()
    assert chosen > 2 * (gains.sum(axis=1) / valid.sum(axis=1)).mean()


def test_the_training_is_reproducible_and_its_gradient_right():
    first, again = (_lessons.collect(5, range(2), 6, None, note=lambda line: None) for _ in range(2))
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, again, strict=True))
    fits = [_lessons.fit(*first, seed=seed, epochs=2, batch=4)[0] for seed in (0, 0, 1)]
    assert all(np.array_equal(a, b) for a, b in zip(fits[0], fits[1], strict=True))
    assert not np.array_equal(fits[0].first, fits[2].first)
    weights = [array.copy() for array in _proposals.random_network(np.random.default_rng(0))[2:]]
    features, gains = first
    valid, wanted = ~np.isnan(features[..., 0]), gains / gains.sum(axis=1, keepdims=True)
    x = np.nan_to_num(features).astype(np.float64)
    gradient = _lessons._gradient(weights, x, valid, wanted)[1]
    for number, where in ((0, (2, 3)), (1, 4), (2, (5, 6)), (4, 7)):
        losses = []
        for shift in (1e-5, -1e-5):
            shifted = [array.copy() for array in weights]
            shifted[number][where] += shift
            losses.append(_lessons._gradient(shifted, x, valid, wanted)[0])
        assert gradient[number][where] == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-3, abs=1e-7)


def test_drawn_problems_differ_and_are_no_workload():
    problems = [_lessons.drawn_problem(0, number) for number in range(4)]
    assert len({given.graph.fingerprint for given in problems}) == 4
    assert _lessons.drawn_problem(0, 1).graph.fingerprint == problems[1].graph.fingerprint
    assert {given.topology.name for given in problems} == {"drawn"}


def weights(path, **changed):
    arrays = {**_proposals.random_network(np.random.default_rng(0))._asdict(), **changed}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"first": None}, "first: missing"),
        ({"mean": np.zeros(3)}, "mean: expected finite float64"),
        ({"last": np.full(HIDDEN, np.nan)}, "last: expected finite"),
        ({"last": np.array([print], dtype=object)}, "last: .*holds a pickle, which is never loaded"),
    ],
)
def test_wrong_weights_are_refused(tmp_path, changed, message):
    path = weights(tmp_path / "weights.npz", **changed)
    with pytest.raises(InvalidInput, match=message):
        _proposals.read_network(path)


def test_weights_of_ones_own_and_wrong_parameters(tmp_path):
    given = _lessons.drawn_problem(7, 1)
    assert isinstance(_proposals.read_network(weights(tmp_path / "mine.npz")), Network)
    spec, params = find_placer(f"learned-search[weights={tmp_path / 'mine.npz'}]")
    budget = Budget(given, evaluations=40)
    spec.place(given, rng=np.random.default_rng(0), budget=budget, **params)
    assert budget.used == 40
    for wrong in ({"choice": "best"}, {"width": 0}, {"width": "wide"}):
        with pytest.raises(InvalidInput, match="placer learned-search"):
            spec.place(given, rng=np.random.default_rng(0), budget=Budget(given, evaluations=9), **wrong)


@pytest.mark.parametrize("choice", _proposals.CHOICES)
def test_every_choice_searches(choice):
    given = _lessons.drawn_problem(7, 2)
    spec, _ = find_placer("learned-search")
    budget = Budget(given, evaluations=120)
    spec.place(given, rng=np.random.default_rng(0), budget=budget, choice=choice)
    assert budget.used == 120 and len(budget.curve) > 1


def test_other_rules_are_served_too():
    given = _lessons.drawn_problem(7, 2)
    spec, _ = find_placer("learned-search")
    for rules in (Rules("priority"), Rules("program"), Rules(contention="fair")):
        changed = type(given)(given.graph, given.topology, given.costs, rules)
        budget = Budget(changed, evaluations=30)
        spec.place(changed, rng=np.random.default_rng(0), budget=budget)
        assert budget.used == 30
