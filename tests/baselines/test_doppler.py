"""Doppler: critical paths, ready groups, what PLC knows of the devices and what the teacher does, worked by hand."""

import numpy as np
import pytest

from simdev import GraphBuilder, Problem
from simdev.baselines.rl._grouped import group_problem
from simdev.placers.policy_file import save_policy
from simdev.placers.registry import find_placer
from simdev.problem.topology import Device, DeviceKind, Link, Topology


def dag_of(problem):
    from simdev.baselines.rl._doppler import with_dag

    return with_dag(group_problem(problem, np.arange(problem.graph.n_units), columns=2)).inputs


def two_devices(memory=1 << 20):
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
    return Problem.build(b.build(), two_devices(memory))


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
    for policy in ("", str(tmp_path)):
        spec.function(diamond(), rng=None, budget=None, **{**spec.defaults, "imitation": 2, "policy": policy})
    assert seen == [2, 0]
