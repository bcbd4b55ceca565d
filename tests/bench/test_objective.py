"""Rows of the objective throughput: scored by the pipeline, bounded by the load, verified; older folders stay valid."""

import math
from dataclasses import replace

import numpy as np
import pytest
from small_board import MACHINE, small_board

from simdev.analysis.steady import each_microbatch_ns, steady_bound
from simdev.bench import rows
from simdev.bench.bench import bench
from simdev.bench.matrix import Run, plan
from simdev.bench.objective import parse_objective
from simdev.bench.verify import verify
from simdev.errors import InvalidInput, UnknownName
from simdev.placers.testing import training_graph
from simdev.problem.graph_file import save_graph
from simdev.problem.placement import Placement
from simdev.problem.placement_file import stored_placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import load_topology
from simdev.sim.pipeline import simulate_pipeline


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A training step and a machine of two devices as files, and their problem."""
    folder = tmp_path_factory.mktemp("small")
    graph = training_graph(np.random.default_rng(3), 40)
    save_graph(graph, folder / "mine.npz")
    (folder / "mine.toml").write_text(MACHINE, encoding="utf-8")
    return folder, Problem.build(graph, load_topology(folder / "mine.toml"))


def test_a_bench_for_throughput_ranks_by_the_steady_time(small, tmp_path):
    folder, problem = small
    runs = plan(
        [str(folder / "mine.npz")],
        [str(folder / "mine.toml")],
        ["dpl", "single-gpu"],
        budget="evaluations=5",
        objective="throughput/1f1b/6",
    )
    found = {row.placer: row for row in bench(runs, tmp_path / "out", jobs=1)}
    for row in found.values():
        placement = stored_placement(tmp_path / "out", row.placement)
        report = simulate_pipeline(problem, placement, 6, "1f1b")
        assert row.objective == "throughput/1f1b/6" and row.step_ns == math.ceil(report.steady_ns)
        assert row.bound_method == "load" and row.lower_bound_ns == steady_bound(problem).ns <= row.step_ns
    assert found["dpl"].step_ns <= found["single-gpu"].step_ns
    assert verify(tmp_path / "out", jobs=1) == []
    text = (tmp_path / "out" / "results.csv").read_text(encoding="utf-8")
    (tmp_path / "out" / "results.csv").write_text(text.replace("1f1b/6", "1f1b/7"), encoding="utf-8")
    assert {difference.column for difference in verify(tmp_path / "out", jobs=1)} >= {"digest"}


def test_replicas_are_part_of_a_row_and_verified(small, tmp_path):
    folder, problem = small
    runs = plan(
        [str(folder / "mine.npz")],
        [str(folder / "mine.toml")],
        ["single-gpu", "single-gpu[replicas=true]", "pipedream", "pipedream[replicas=false]"],
        budget="evaluations=5",
        objective="throughput/1f1b/6",
    )
    found = {row.entry: row for row in bench(runs, tmp_path / "out", jobs=1)}
    copied = stored_placement(tmp_path / "out", found["single-gpu[replicas=true]"].placement)
    assert len(np.unique(copied.devices)) == 1 and (copied.replica_of == copied.devices[0]).sum() == 2
    assert found["single-gpu[replicas=true]"].step_ns < found["single-gpu"].step_ns
    assert found["pipedream"].step_ns <= found["pipedream[replicas=false]"].step_ns
    assert all(row.lower_bound_ns <= row.step_ns for row in found.values())
    assert verify(tmp_path / "out", jobs=1, rerun=True) == []
    runs = [replace(run, objective="step") for run in runs if run.entry == "single-gpu[replicas=true]"]
    row = bench(runs, tmp_path / "step", jobs=1)[0]
    assert row.status == "skipped" and "replicas need microbatches" in row.error


def test_no_placement_beats_the_bound():
    for seed in range(30):
        rng = np.random.default_rng(seed)
        problem = Problem.build(training_graph(rng, 12), load_topology("p100x4"))
        bound = steady_bound(problem).ns
        placement = Placement.of_units(problem, 1 + rng.integers(2, size=problem.graph.n_units))
        report = simulate_pipeline(problem, placement, 8, "1f1b")
        load = np.bincount(
            placement.devices, each_microbatch_ns(problem)[placement.devices, np.arange(problem.graph.n_ops)]
        )
        assert bound <= load.max() <= report.steady_ns


def test_a_budget_for_throughput_evaluates_pipelines(small):
    _, problem = small
    objective = parse_objective("throughput/gpipe/4")
    devices = np.zeros((2, problem.graph.n_ops), np.int32)
    devices[1] = Placement.of_units(problem, np.arange(problem.graph.n_units) % 2).devices
    found = objective.simulate_many(problem, devices)
    steady = [simulate_pipeline(problem, Placement(row), 4, "gpipe").steady_ns for row in devices]
    assert found.step_ns.tolist() == [math.ceil(ns) for ns in steady]
    assert parse_objective("step").simulate_many is None


def test_folders_without_the_column_hold_steps(tmp_path):
    small_board(tmp_path)
    for name in ("results.csv", "leaderboard.csv", "ranking.csv", "curves.csv"):
        path = tmp_path / name
        lines = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]
        assert not any('"' in cell for cell in lines[0])
        assert "objective" in lines[0]
        table = list(rows.read_csv(path, lines[0]))
        older = [column for column in lines[0] if column not in ("objective", "proof")]
        rows.write_csv(path, older, [cells for _, cells in table])
    (tmp_path / "journal.jsonl").unlink()
    found = rows.read_rows(tmp_path / "results.csv")
    assert {row.objective for row in found} == {"step"}
    assert verify(tmp_path, jobs=1) == []


def test_the_digest_covers_the_objective(tmp_path):
    row = small_board(tmp_path)[0]
    assert replace(row, objective="throughput/1f1b/8").digest != row.digest
    run = Run(*row.key)
    assert run.entropy != replace(run, objective="throughput/1f1b/8").entropy


def test_rows_of_an_older_placer_hold_and_are_not_run_again(tmp_path):
    small_board(tmp_path / "old", version=0)
    assert verify(tmp_path / "old", jobs=1) == []
    reasons = []
    assert verify(tmp_path / "old", jobs=1, rerun=True, on_skip=lambda title, reason: reasons.append(reason)) == []
    assert reasons == ["made by version 0 of its placer, which is at version 1"] * 2
    small_board(tmp_path / "new", version=9)
    assert {difference.column for difference in verify(tmp_path / "new", jobs=1)} == {"version"}


def test_rows_say_what_the_placer_proved(small, tmp_path):
    folder, _ = small
    runs = plan([str(folder / "mine.npz")], [str(folder / "mine.toml")], ["dp", "dp[ideals=2]", "dpl", "single-gpu"])
    runs = [replace(run, budget="evaluations=5") for run in runs]
    found = {row.entry: row.proof for row in bench(runs, tmp_path / "out", jobs=1)}
    assert found["dpl"] == "linear" and found["single-gpu"] == ""
    assert found["dp"] == "optimal" and found["dp[ideals=2]"] == "linear"
    assert verify(tmp_path / "out", jobs=1, rerun=True) == []


@pytest.mark.parametrize("text", ["speed", "throughput", "throughput/zero-bubble/8", "throughput/1f1b/-3", "step/1"])
def test_unknown_objectives_are_refused(text):
    with pytest.raises(UnknownName):
        parse_objective(text)


def test_impossible_objectives_are_refused():
    with pytest.raises(InvalidInput, match="3 to 1024 microbatches"):
        parse_objective("throughput/1f1b/2")
    with pytest.raises(InvalidInput, match="has the order of its schedule"):
        parse_objective("throughput/1f1b/8").check(Rules(order="program"))
