"""GiPH: gpNet, its features and messages, and the moves that are legal, worked by hand."""

import numpy as np
import pytest

from simdev import GraphBuilder, Problem
from simdev.baselines.rl._grouped import group_problem
from simdev.problem.topology import Device, DeviceKind, Link, Topology


def net_of(problem, group=None):
    from simdev.baselines.rl._giph import with_net

    group = np.arange(problem.graph.n_units) if group is None else np.array(group)
    return with_net(group_problem(problem, group, columns=2)).inputs


def two_devices():
    slow, fast = DeviceKind("slow", 1 << 20, {"f32": 1e9}, 1e12), DeviceKind("fast", 1 << 21, {"f32": 2e9}, 1e12)
    return Topology("two", (Device("a", slow), Device("b", fast)), (Link(("a", "b"), 10**6, 0),))


def diamond():
    """0 -> 1, 2 -> 3; ops of 2 ms on a and 1 ms on b; 1000 bytes take 1 ms, 2000 bytes 2 ms."""
    b = GraphBuilder("diamond")
    work = {"flops": 2 * 10**6}
    top = b.op("0", "mm", outputs=[1000], **work)
    left = b.op("1", "mm", inputs=b.outputs(top), outputs=[2000], **work)
    right = b.op("2", "mm", inputs=b.outputs(top), outputs=[1000], persistent_bytes=1 << 19, **work)
    b.op("3", "mm", inputs=[*b.outputs(left), *b.outputs(right)], **work)
    return Problem.build(b.build(), two_devices())


def test_net_joins_groups_both_ways_with_times_in_mean_group_times():
    net = net_of(diamond())
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
    net = net_of(diamond(), [0, 1, 1, 0])  # 0 and 3 together: tensors 1000 there (once), 2000 + 1000 back
    assert net.near_real.sum() == 2 and net.near[0, 1, 0] == 0
    assert net.size[0, 1, 0] == pytest.approx(np.log1p(4000 / 2**20))
    assert np.allclose(net.transfer[0, 1, 0], [[0, 2], [2, 0]], rtol=0.02), "4 ms, of 2 ms a group"


def test_expected_schedule_and_start_time_potential_by_hand():
    from simdev.baselines.rl._giph import expected_schedule, node_features

    net = net_of(diamond())
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

    net = net_of(diamond())
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
        net = with_net(group_problem(diamond(), np.arange(4), rows=rows, columns=columns)).inputs
        scores.append(np.asarray(policy(net, np.array([0, 0, 1, 0] + [0] * (rows - 4))))[:4, :2])
    assert np.allclose(scores[0], scores[1], atol=1e-5) and np.ptp(scores[0]) > 0


def test_legal_moves_move_something_and_not_the_same_group_again():
    from simdev.baselines.rl._giph import legal_moves

    net = net_of(diamond())
    placed = np.zeros(16, np.int32)
    assert np.argwhere(legal_moves(net, placed, -1)).tolist() == [[0, 1], [1, 1], [2, 1], [3, 1]]
    placed[2] = 1
    assert np.argwhere(legal_moves(net, placed, 2)).tolist() == [[0, 1], [1, 1], [3, 1]]
    alone = net_of(diamond(), [0, 0, 0, 0])
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

    net, placed = net_of(diamond()), np.zeros(16, np.int32)
    first = jax.jit(lambda seed: GiphPolicy(8, 10, key=jax.random.PRNGKey(seed))(net, placed))
    for seed in range(5):
        scores = np.asarray(first(seed))[:4]
        assert np.ptp(scores) < 0.5
