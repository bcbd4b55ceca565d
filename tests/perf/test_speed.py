"""The speed of engines, dynamic programs and planning (run with --benchmark-only)."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from simdev.exact.dp import best_contiguous
from simdev.exact.load import read_load_problem
from simdev.parallel import Host, Plan, find_model, load_cluster, parse_mesh
from simdev.parallel.plan import prepare, simulate_program
from simdev.placers.budget import Budget
from simdev.placers.registry import find_placer
from simdev.placers.testing import training_graph
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import load_topology
from simdev.sim import simulate, simulate_many

# speed of the engines, side by side. Skipped unless asked for: ``pytest tests/perf --benchmark-only``


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


# speed of the dynamic program over ideals on published inputs. Skipped unless asked for: ``pytest tests/perf


DATA = Path(os.environ.get("SIMDEV_DATA", Path(__file__).parents[3] / "shared" / "data")) / "dnn-partitioning"


@pytest.mark.parametrize("order", ["fifo", "priority"])
def test_moves_of_a_compiled_search_beside_those_of_a_search_in_python(benchmark, order):
    """Processor seconds for each move of ``local-search`` and of ``late-acceptance``, in turns."""
    problem = Problem.build("inception-v3", "p100x4", rules=Rules(order))

    def moves(entry, evaluations):
        spec, params = find_placer(entry)
        budget = Budget(problem, evaluations=evaluations)
        began = time.process_time()
        spec.place(problem, rng=np.random.default_rng(0), budget=budget, **params)
        return (time.process_time() - began) / budget.used

    ratios = []

    def both():
        ratios.append(moves("local-search", 2_000) / moves("late-acceptance", 20_000))

    both()  # compiles
    ratios.clear()
    benchmark.pedantic(both, rounds=3)
    benchmark.extra_info["ratio"] = float(np.median(ratios))


@pytest.mark.skipif(not DATA.is_dir(), reason="SIMDEV_DATA names no folder with dnn-partitioning")
@pytest.mark.parametrize(
    "name, ideals",
    [
        ("LayerGraphs/gnmt_inference", 17914),
        ("OperatorGraphs/bert_l-6_training", 3776),
        ("LayerGraphs/inceptionv3_inference", 36596),
        ("LayerGraphs/inceptionv3_training", 36596),
    ],
)
def test_contiguous_optimum(benchmark, name, ideals):
    problem = read_load_problem(DATA / "throughput-inputs" / f"{name}.json")
    best_contiguous(read_load_problem(DATA / "throughput-inputs" / "LayerGraphs" / "bert24_inference.json"))  # compiles
    found = benchmark.pedantic(best_contiguous, (problem,), rounds=1, iterations=1)
    benchmark.extra_info.update(ideals=found.ideals, pairs=found.pairs, largest_load=found.largest)
    assert found.ideals == ideals


# speed of simulated training steps. Skipped unless asked for: ``pytest tests/perf --benchmark-only``


EAGER = Host(6_000, 5_000, 3_000, 25_000)


def program(mesh, microbatches, model="llama3-70b"):
    pytest.importorskip("torch")
    spec, parameters = find_model(model)
    return prepare(Plan(spec, parameters, load_cluster("dgx-h100"), parse_mesh(mesh), microbatches, host=EAGER))


def test_a_70b_plan_folded(benchmark):
    captured = program("dp_shard=8,tp=8", 1)
    report = benchmark.pedantic(simulate_program, (captured,), rounds=10, warmup_rounds=1)
    benchmark.extra_info["ops"] = report.unrolled.problem.graph.n_ops


def test_a_step_of_16384_gpus_folded(benchmark):
    captured = program("dp_replicate=64,dp_shard=4,tp=8,pp=8", 32)
    report = benchmark.pedantic(simulate_program, (captured,), rounds=3, warmup_rounds=1)
    benchmark.extra_info["ops"] = report.unrolled.problem.graph.n_ops


def test_a_step_of_64_ranks_unfolded(benchmark):
    captured = program("dp_shard=8,tp=8", 2)
    report = benchmark.pedantic(simulate_program, (captured,), {"unfolded": True}, rounds=5, warmup_rounds=1)
    benchmark.extra_info["ops"] = report.unrolled.problem.graph.n_ops


def test_the_engine_on_64_ranks_unfolded(benchmark):
    found = simulate_program(program("dp_shard=8,tp=8", 2), unfolded=True).unrolled
    benchmark.pedantic(simulate, (found.problem, found.placement), rounds=3, warmup_rounds=1)
    benchmark.extra_info["ops"] = found.problem.graph.n_ops
