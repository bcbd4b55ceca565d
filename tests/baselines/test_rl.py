"""Learned placers: groups, n_problems, policies on disk, training that resumes bit for bit, and learns."""

import json
import shutil

import numpy as np
import pytest

from simdev.baselines.rl._grouped import FEATURES, bucket, group_problem
from simdev.baselines.rl._groups import coarse_groups, colocation_groups
from simdev.baselines.rl._train import Learner, search
from simdev.bench.objective import parse_objective
from simdev.errors import InvalidInput
from simdev.placers import policy_file as policy
from simdev.placers.budget import Budget
from simdev.placers.registry import find_placer, graph_path, load_workload
from simdev.placers.testing import random_problem, training_graph
from simdev.problem.graph import GraphBuilder
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Link, Topology, load_topology

SMALL = {"groups": 16, "hidden": 8, "samples": 8}


def two_devices(memory=1 << 34, rate=10**9):
    kind = DeviceKind("k", memory, {"f32": 1e9}, 1e12)
    return Topology("two", (Device("a", kind), Device("b", kind)), (Link(("a", "b"), rate, 1000),))


def chains(count=6, length=3):
    """Independent chains of 1 ms ops: the best placement halves them, the worst has all on one device."""
    b = GraphBuilder("chains")
    for chain in range(count):
        tensors = []
        for op in range(length):
            tensors = b.outputs(b.op(f"c{chain}.{op}", "relu", inputs=tensors, flops=10**6, outputs=[4000]))
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["colocrl", "doppler", "giph", "hdp", "hsdag", "post"])
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
