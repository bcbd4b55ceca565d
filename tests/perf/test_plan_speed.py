"""Speed of simulated training steps. Skipped unless asked for: ``pytest tests/perf --benchmark-only``.

Stages are captured before the clock starts; the time is that of unrolling a step and simulating it, or of the engine
alone.
"""

import time

import pytest

from simdev.parallel import Host, Plan, find_model, load_cluster, parse_mesh
from simdev.parallel.plan import prepare, simulate_program
from simdev.sim import simulate

pytest.importorskip("torch")
pytestmark = pytest.mark.benchmark(timer=time.process_time)  # machines are shared
EAGER = Host(6_000, 5_000, 3_000, 25_000)


def program(mesh, microbatches, model="llama3-70b"):
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
