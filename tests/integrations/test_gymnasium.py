"""The Gymnasium environment: its checker, rewards by hand, masks, and the vectorised form against the single one."""

import subprocess
import sys
import warnings

import numpy as np
import pytest

from simdev.errors import InvalidInput, UnknownName
from simdev.placers.testing import random_problem
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.problem.topology import Device, DeviceKind, Link, Topology
from simdev.sim import simulate

gym = pytest.importorskip("gymnasium", reason="needs gymnasium (extra env)")
env_module = pytest.importorskip("simdev.integrations.gymnasium")
from gymnasium.utils.env_checker import check_env  # noqa: E402

GIB = 1 << 30


def two_branches(memory_bytes=4 * GIB, weight=0, group=None):
    """Two independent ops of one work each on two equal devices: apart they take half as long."""
    b = GraphBuilder("branches")
    for name in "ab":
        b.op(name, "mm", flops=10**9, persistent_bytes=weight, outputs=[8], group=group)
    kind = DeviceKind("gpu", memory_bytes, {"f32": 1e12}, 1e12)
    machine = Topology("pair", (Device("x", kind), Device("y", kind)), (Link(("x", "y"), 10**9, 1000),))
    return Problem.build(b.build(), machine)


@pytest.mark.parametrize("name", list(env_module.IDS))
@pytest.mark.parametrize("nodes", [6, "units", "ops"])
def test_gymnasium_accepts_it(name, nodes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make(name, workload="transformer-xl-2", nodes=nodes, start="random").unwrapped)


def test_gymnasium_finds_it_by_a_name_alone():
    """A name with the module before it needs no import by the user."""
    code = """
import gymnasium
env = gymnasium.make("simdev.integrations.gymnasium:simdev/Placement-v0", workload="transformer-xl-2", nodes=2)
assert env.unwrapped.observation_space["visited"].n == 2
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("form", env_module.FORMS)
def test_gymnasium_accepts_random_problems(seed, form):
    problem = random_problem(np.random.default_rng(seed))
    try:
        env = env_module.PlacementEnv(problem=problem, form=form, nodes="ops", hosts=True)
    except env_module.Unsupported:
        pytest.skip("no device runs some op, or a pair has no route")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not having a spec.*")
        check_env(env)


def test_progressive_rewards_by_hand():
    problem = two_branches()
    env = env_module.PlacementEnv(problem=problem, nodes="ops")
    together = simulate(problem, Placement([0, 0])).step_ns
    apart = simulate(problem, Placement([1, 0])).step_ns
    _, info = env.reset(seed=0)
    assert info["step_time_s"] == together / 1e9
    observation, reward, done, truncated, info = env.step(1)
    assert reward == pytest.approx((together - apart) / together) and reward > 0.4
    assert info["step_time_s"] == apart / 1e9 and not done and not truncated
    assert observation["visited"].tolist() == [1, 0] and observation["current"] == 1
    _, reward, done, _, _ = env.step(1)
    assert reward < -0.4 and done
    assert env.best.devices.tolist() == [1, 0] and env.evaluations == 3


def test_one_shot_rewards_by_hand():
    problem = two_branches()
    env = env_module.PlacementEnv(problem=problem, form="one-shot", nodes="ops")
    env.reset(seed=0)
    work = 2 * problem.costs.op_ns[0, 0]
    for action in ([0, 0], [0, 1]):
        _, reward, done, _, _ = env.step(np.array(action))
        assert done and reward == pytest.approx(-np.sqrt(simulate(problem, Placement(action)).step_ns / work))


def test_memory_is_masked_and_priced():
    problem = two_branches(memory_bytes=3 * GIB, weight=2 * GIB)
    env = env_module.PlacementEnv(problem=problem, nodes="ops", memory_penalty_s_per_gib=1.0)
    observation, info = env.reset(seed=0)
    assert info["overflow_bytes"] >= GIB and observation["action_mask"].tolist() == [0, 1]
    observation, reward, *_ = env.step(1)
    assert reward > 1e9 / problem.costs.op_ns[0, 0] / 2  # at least a second, in units of the work
    assert observation["action_mask"].tolist() == [1, 0]
    assert env.action_masks().tolist() == [True, False]


def test_a_mask_is_never_empty():
    env = env_module.PlacementEnv(problem=two_branches(memory_bytes=GIB, weight=2 * GIB), nodes="ops")
    observation, _ = env.reset(seed=0)
    assert observation["action_mask"].sum() == 1


def test_colocated_nodes_follow_the_first():
    env = env_module.PlacementEnv(problem=two_branches(group="g"), nodes="ops")
    observation, _ = env.reset(seed=0)
    assert observation["colocation"].tolist() == [0, 0] and observation["action_mask"].tolist() == [1, 1]
    observation, *_ = env.step(1)
    assert observation["placement"].tolist() == [1, 1] and observation["action_mask"].tolist() == [0, 1]
    env.step(0)  # against the mask: nothing moves
    assert env.placement.devices.tolist() == [1, 1]


def test_every_placement_is_valid_whatever_the_actions():
    rng = np.random.default_rng(5)
    for _ in range(12):
        problem = random_problem(rng)
        for form in env_module.FORMS:
            try:
                env = env_module.PlacementEnv(problem=problem, form=form, nodes="ops", start="random", hosts=True)
            except env_module.Unsupported:
                continue
            env.action_space.seed(1)
            done = False
            env.reset(seed=2)
            while not done:
                _, _, done, _, info = env.step(env.action_space.sample())
                env.placement.check(problem)
                assert info["step_time_s"] == simulate(problem, env.placement).step_ns / 1e9


@pytest.mark.parametrize("name, form", env_module.IDS.items())
def test_vectorised_episodes_are_single_ones(name, form):
    arguments = dict(workload="transformer-xl-2", nodes=5)
    many = gym.make_vec(name, num_envs=3, **arguments)
    assert isinstance(many.unwrapped, env_module.PlacementVectorEnv)
    many.action_space.seed(3)
    observations, _ = many.reset(seed=0)
    assert many.observation_space.contains(observations)
    singles = [env_module.PlacementEnv(**arguments, form=form) for _ in range(3)]
    for single in singles:
        single.reset(seed=0)
    for _ in range(5 if form == "progressive" else 1):
        actions = many.action_space.sample()
        observations, rewards, ended, _, infos = many.step(actions)
        for number, single in enumerate(singles):
            last, reward, done, _, info = single.step(actions[number])
            seen = {key: value[number] for key, value in (infos["final_obs"] if done else observations).items()}
            assert reward == rewards[number] and done == ended[number]
            assert infos["step_time_s"][number] == info["step_time_s"]
            assert all(np.array_equal(seen[key], last[key]) for key in last)
    assert ended.all() and many.observation_space.contains(observations)
    assert observations["placement"].tolist() == [[0] * 5] * 3


def test_a_given_start():
    problem = two_branches()
    env = env_module.PlacementEnv(problem=problem, nodes="ops")
    observation, _ = env.reset(seed=0, options={"placement": Placement([1, 0])})
    assert observation["placement"].tolist() == [1, 0]
    grouped = env_module.PlacementEnv(problem=problem, nodes=1)
    with pytest.raises(InvalidInput, match="splits a node"):
        grouped.reset(options={"placement": Placement([1, 0])})


@pytest.mark.parametrize(
    "arguments, error, word",
    [
        (dict(nodes=0), InvalidInput, "nodes: 0 is neither"),
        (dict(nodes="op"), InvalidInput, "nodes: 'op' is neither"),
        (dict(form="two-shot"), UnknownName, "one-shot"),
        (dict(start="singel"), UnknownName, "single"),
        (dict(memory_penalty_s_per_gib=-1), InvalidInput, "memory_penalty_s_per_gib"),
        (dict(workload="nnt"), UnknownName, "nmt"),
    ],
)
def test_wrong_arguments(arguments, error, word):
    with pytest.raises(error, match=word):
        env_module.PlacementEnv(**({"workload": "transformer-xl-2"} | arguments))


def test_an_action_that_does_not_exist():
    env = env_module.PlacementEnv(problem=two_branches(), nodes="ops")
    env.reset(seed=0)
    with pytest.raises(InvalidInput, match="action: 7 is not in"):
        env.step(7)
