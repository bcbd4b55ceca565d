"""Rows of other objectives than the step: scored, bounded and verified; older folders stay valid."""

import math
from dataclasses import replace

import numpy as np
import pytest
from drawn import problem
from small_board import MACHINE, small_board

from simdev.analysis.steady import each_microbatch_ns, steady_bound
from simdev.bench import rows
from simdev.bench.bench import bench
from simdev.bench.gaps import gap_parts
from simdev.bench.matrix import Run, plan
from simdev.bench.objective import parse_objective
from simdev.bench.verify import verify
from simdev.cli.main import app
from simdev.errors import InvalidInput, UnknownName
from simdev.placers.testing import training_graph
from simdev.problem.graph import GraphBuilder
from simdev.problem.graph_file import save_graph
from simdev.problem.placement import Placement
from simdev.problem.placement_file import stored_placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Link, Topology, load_topology
from simdev.report.page import page_data
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


@pytest.mark.slow
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
    runs = plan(
        [str(folder / "mine.npz")],
        [str(folder / "mine.toml")],
        ["dp", "dp[ideals=2]", "dp[pairs=1]", "dpl", "single-gpu"],
    )
    runs = [replace(run, budget="evaluations=5") for run in runs]
    found = {row.entry: row.proof for row in bench(runs, tmp_path / "out", jobs=1)}
    assert found["dpl"] == "linear" and found["single-gpu"] == ""
    assert found["dp"] == "optimal" and found["dp[ideals=2]"] == found["dp[pairs=1]"] == "linear"
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


def answers():
    """Forward ops a (10 ns) -> b (6 ns) with a weight of 100 bytes each, on two devices; a control edge takes 1 ns."""
    builder, durations = GraphBuilder("answers"), []

    def add(name, kind, ns, **rest):
        durations.append(ns)
        return builder.op(name, kind, **rest)

    weights = [add(name, "parameter", 1, persistent_bytes=100) for name in ("v", "w")]
    for weight in weights:
        builder.tensor(weight, 100, persistent=True)
    given = [builder.outputs(weight) for weight in weights]
    a = builder.outputs(add("a", "op", 10, inputs=given[0], outputs=[0]))
    add("b", "op", 6, inputs=a + given[1])
    kind = DeviceKind("toy", 10**9, {"f32": 1e9}, 1e9, granularity=1)
    hosts = (Device("d0", kind, host=True), Device("d1", kind, host=True))
    return problem(builder, Topology("pair", hosts, (Link(("d0", "d1"), 10**12, 1),)), durations)


def test_latency_and_rate_of_a_tiny_graph_by_hand():
    """On one device a query takes 10 + 6 ns, and so does each of a stream. On two devices a query also waits 1 ns for
    the link, but the stream takes only the 10 ns of the busier device each. Weights are there before the queries."""
    small, latency, serve = answers(), parse_objective("latency"), parse_objective("serve/8")
    weights = [name in ("v", "w") for name in small.graph.op_names]
    together, apart = Placement(np.zeros(4, np.int32)), Placement(np.array([0, 1, 0, 1]))
    assert sum(weights) == 2
    for engine in ("fast", "reference"):
        assert latency.simulate(small, together, engine=engine, valid=True).step_ns == 1 + 1 + 10 + 6
        assert latency.simulate(small, apart, engine=engine, valid=True).step_ns == 1 + 10 + 1 + 6
        assert serve.simulate(small, together, engine=engine, valid=True).step_ns == 10 + 6
        assert serve.simulate(small, apart, engine=engine, valid=True).step_ns == 10
    copies = Placement(np.zeros(4, np.int32), replica_of=np.array([0, 0]))
    assert serve.simulate(small, copies).step_ns == 8, "two replicas answer two queries in 16 ns"
    assert latency.lower_bound(small).ns <= 18
    assert serve.lower_bound(small).ns == 8, "half of the work each"
    assert serve.simulate(small, copies).peak_bytes.tolist() == [200, 200]


def test_rows_of_inference_are_written_compared_and_verified(tmp_path):
    graph = answers().graph
    save_graph(graph, tmp_path / "mine.npz")
    (tmp_path / "mine.toml").write_text(MACHINE, encoding="utf-8")
    names = [str(tmp_path / "mine.npz")], [str(tmp_path / "mine.toml")], ["single-gpu", "single-gpu[replicas=true]"]
    for text in ("latency", "serve/4"):
        bench(plan(*names, budget="evaluations=5", objective=text), tmp_path / "out", jobs=1)
    found = {(row.objective, row.entry): row for row in rows.read_rows(tmp_path / "out" / "results.csv")}
    assert len(found) == 4, "a folder holds the rows of both"
    assert found["latency", "single-gpu[replicas=true]"].status == "skipped"
    one, many = (found["serve/4", entry] for entry in names[2])
    assert many.step_ns < one.step_ns <= found["latency", "single-gpu"].step_ns
    assert all(row.lower_bound_ns <= row.step_ns for row in found.values() if row.status == "ok")
    assert verify(tmp_path / "out", jobs=1, rerun=True) == []
    assert {line["objective"]: line["gap"] != "" for line in gap_parts(tmp_path / "out")} == {
        "latency": True,
        "serve/4": True,
    }
    tracks = [track["label"] for track in page_data([tmp_path / "out"])["tracks"]]
    assert tracks == ["One query", "A stream of queries: 4 queries"]


def test_a_training_step_is_no_query(small, tmp_path):
    folder, problem = small
    for text in ("latency", "serve/4"):
        with pytest.raises(InvalidInput, match="forward ops only; op .* belongs to the phase 'backward'"):
            parse_objective(text).simulate(problem, Placement(np.zeros(problem.graph.n_ops, np.int32)))
        runs = plan(
            [str(folder / "mine.npz")], [str(folder / "mine.toml")], ["single-gpu"], budget="quick", objective=text
        )
        with pytest.raises(InvalidInput, match="forward ops only"):
            bench(runs, tmp_path / text.partition("/")[0], jobs=1)
    for text in ("serve", "serve/1f1b/4", "serve/2", "latency/4"):
        with pytest.raises(InvalidInput):
            parse_objective(text)


def test_a_folder_of_candidates_is_run_guarded(tmp_path, capfd):
    folder, out = tmp_path / "candidates", tmp_path / "out"
    folder.mkdir()
    head = "import numpy as np\nfrom simdev import Placement, placer\n\n"
    good = '@placer("{0}", version=1, family="mine")\ndef place(problem, *, rng, budget):\n    {1}\n'
    ones = "return Placement(np.full(problem.graph.n_ops, 1))"
    (folder / "ends.py").write_text("import os\nos._exit(3)\n")
    (folder / "wrong.py").write_text("def place(:\n")
    (folder / "good.py").write_text(head + good.format("second", ones))
    (folder / "fails.py").write_text(head + good.format("fails", "return 1 / 0"))
    (folder / "_helper.py").write_text("raise RuntimeError\n")
    save_graph(answers().graph, tmp_path / "mine.npz")
    (tmp_path / "mine.toml").write_text(MACHINE, encoding="utf-8")
    case = ["-w", str(tmp_path / "mine.npz"), "-t", str(tmp_path / "mine.toml")]
    app(["bench", *case, "-p", str(folder), "-p", "single-gpu", "-j", "1", "-o", str(out)], standalone_mode=False)
    printed = capfd.readouterr().err
    assert "ends.py is left out: the process ended with exit code 3" in printed and "wrong.py is left out" in printed
    found = {row.placer.rpartition(":")[2]: row for row in rows.read_rows(out / "results.csv")}
    assert {name: row.status for name, row in found.items()} == {"second": "ok", "fails": "error", "single-gpu": "ok"}
    with pytest.raises(InvalidInput, match="no file of it holds a placer"):
        app(["bench", *case, "-p", str(out), "-o", str(out)], standalone_mode=False)
