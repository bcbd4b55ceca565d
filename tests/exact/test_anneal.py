"""Annealing of free splits: the optimum of most small problems, memory kept, the same arguments give the same split."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from test_dp import load_problem

from simdev.exact.anneal import anneal
from simdev.exact.dp import best_contiguous
from simdev.exact.load import processor_loads, read_load_problem
from simdev.exact.throughput import colour_classes

DATA = Path(os.environ.get("SIMDEV_DATA", Path(__file__).parents[3] / "shared" / "data")) / "dnn-partitioning"
published = pytest.mark.skipif(not DATA.is_dir(), reason="SIMDEV_DATA names no folder with dnn-partitioning")


def small(seed):
    rng = np.random.default_rng(seed)
    n = 7
    edges = [(a, b) for a in range(n) for b in range(a + 1, n) if rng.random() < 0.4]
    return load_problem(
        rng.integers(1, 20, n).tolist(),
        edges,
        cost=rng.integers(0, 6, n).tolist(),
        k=2,
        cpus=1,
        cpu_times=rng.integers(5, 60, n).tolist(),
        size=rng.integers(1, 5, n).tolist(),
        memory=12,
    )


def test_finds_the_optimum_of_most_small_problems():
    found, best = [], []
    for seed in range(25):
        problem = small(seed)
        start = np.full(problem.n_nodes, 2)
        split = anneal(problem, colour_classes(problem), start, moves=30_000, seed=seed)
        loads = processor_loads(problem, split)
        assert not loads.overfull
        every = (processor_loads(problem, np.array(s)) for s in itertools.product(range(3), repeat=problem.n_nodes))
        found.append(loads.largest)
        best.append(min(one.largest for one in every if not one.overfull))
    same = [one == pytest.approx(two) for one, two in zip(found, best, strict=True)]
    assert sum(same) >= 23 and max(one / two for one, two in zip(found, best, strict=True)) < 1.1


def test_the_same_arguments_give_the_same_split_and_never_a_worse_one():
    problem = small(3)
    start = np.array([0, 1, 0, 1, 2, 2, 2])
    twice = [anneal(problem, colour_classes(problem), start, moves=30, seed=5) for _ in range(2)]
    assert (twice[0] == twice[1]).all()
    assert processor_loads(problem, twice[0]).largest <= processor_loads(problem, start).largest


@published
def test_a_free_split_of_operators_improves_on_the_contiguous_one():
    problem = read_load_problem(DATA / "throughput-inputs" / "OperatorGraphs" / "bert_l-3_inference.json")
    start = best_contiguous(problem)
    split = anneal(problem, colour_classes(problem), start.processor, moves=900_000)
    assert processor_loads(problem, split).largest < 0.85 * start.largest
