"""HSDAG: chains, fractal dimension and the parsing of small graphs by hand, and what its network reads."""

import numpy as np
import pytest

from simdev.baselines.rl._groups import chain_groups
from simdev.baselines.rl._hsdag import NODE_FEATURES, HsdagPolicy, fractal_dimension, parsed, speeds, structured
from simdev.baselines.rl._jax import eqx, jax
from simdev.problem.graph import GraphBuilder
from simdev.problem.problem import Problem
from simdev.problem.topology import Device, DeviceKind, Link, Topology

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
