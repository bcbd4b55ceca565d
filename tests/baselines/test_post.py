"""Post: the elite, cross-entropy minimisation and proximal steps by hand, and that it has no policy."""

import numpy as np
import pytest

from simdev.baselines.rl._grouped import group_problem
from simdev.baselines.rl._post import cross_entropy, elite, learner_functions
from simdev.baselines.rl._train import Episodes
from simdev.errors import InvalidInput, UnknownName
from simdev.placers.budget import Budget
from simdev.placers.registry import find_placer
from simdev.problem.graph import GraphBuilder
from simdev.problem.problem import Problem
from simdev.problem.topology import Device, DeviceKind, Link, Topology

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
