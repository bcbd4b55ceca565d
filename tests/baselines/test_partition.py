import sys

import numpy as np
import pytest

from simdev.errors import InvalidInput, Unsupported
from simdev.placers.budget import Budget
from simdev.placers.registry import find_placer
from simdev.problem.graph import GraphBuilder
from simdev.problem.problem import Problem
from simdev.problem.topology import load_topology

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
