"""Speed of the engines, side by side. Skipped unless asked for: ``pytest tests/perf --benchmark-only``."""

import time

import numpy as np
import pytest

from simdev.placers.testing import training_graph
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import load_topology
from simdev.sim import simulate, simulate_many

pytestmark = pytest.mark.benchmark(timer=time.process_time)  # machines are shared

PLACEMENTS = 64  # cycled, as one placement repeated lets the branch predictor learn it
RULES = {
    "default": Rules(),
    "priority": Rules(order="priority"),
    "fair": Rules(contention="fair"),
    "eager": Rules(runtime="eager"),
}


def placements(rng, n, how):
    """Random ops on four GPUs, or contiguous parts of equal length with 5 % of the ops moved at random."""
    if how == "random":
        return rng.integers(1, 5, (PLACEMENTS, n)).astype(np.int32)
    cuts = np.sort(rng.integers(0, n, (PLACEMENTS, 3)), axis=1)
    rows = 1 + np.array([np.searchsorted(row, np.arange(n), side="right") for row in cuts])
    moved = rng.random(rows.shape) < 0.05
    rows[moved] = rng.integers(1, 5, moved.sum())
    return rows.astype(np.int32)


@pytest.fixture(scope="module")
def graph():
    return training_graph(np.random.default_rng(1), 620)


@pytest.mark.parametrize("how", ["random", "contiguous"])
@pytest.mark.parametrize("rules", RULES)
def test_fast_engine_on_a_batch(benchmark, graph, rules, how):
    problem = Problem.build(graph, load_topology("p100x4"), rules=RULES[rules])
    rows = placements(np.random.default_rng(2), graph.n_ops, how)[: 4 if rules == "fair" else PLACEMENTS]
    simulate_many(problem, rows[:1])
    benchmark.pedantic(simulate_many, (problem, rows), rounds=5)
    benchmark.extra_info["ns_per_op"] = benchmark.stats.stats.min / len(rows) / graph.n_ops * 1e9


@pytest.mark.parametrize("rules", ["default", "eager"])
def test_fast_engine_beside_the_reference(benchmark, graph, rules):
    """One reference run and a batch of the fast engine in each round; the ratio is taken round by round."""
    problem = Problem.build(graph, load_topology("p100x4"), rules=RULES[rules])
    rows = placements(np.random.default_rng(2), graph.n_ops, "random")
    simulate_many(problem, rows[:1])
    ratios = []

    def one_round():
        started = time.process_time()
        simulate_many(problem, rows)
        middle = time.process_time()
        simulate(problem, Placement(rows[len(ratios)]), engine="reference")
        ratios.append((time.process_time() - middle) / ((middle - started) / PLACEMENTS))

    benchmark.pedantic(one_round, rounds=3)
    benchmark.extra_info |= {"ops": graph.n_ops, "ratio": float(np.median(ratios))}
