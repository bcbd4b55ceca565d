"""Rows of planners: written, resumed, verified, and found out if they were changed."""

import json
from dataclasses import replace

import pytest

from simdev.errors import InvalidInput

MODEL = "gpt-3.6b[width=256,layers=4,heads=4,length=256,vocabulary=1024]"


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    pytest.importorskip("torch")
    from simdev.bench.plan_bench import Task, bench_plans

    folder = tmp_path_factory.mktemp("board")
    tasks = [Task(MODEL, "dgx-a100", 16, "eager", '{"microbatches": [1], "recomputes": ["none"]}')]
    rows = bench_plans(tasks, ["ddp", "fsdp", "search"], folder, evaluations=8)
    return folder, tasks, rows


def test_rows_hold(board):
    from simdev.bench.plan_bench import verify_plans
    from simdev.bench.plan_rows import read_plan_rows

    folder, _, rows = board
    by_name = {row.planner: row for row in rows}
    assert by_name["fsdp"].status == "skipped" and "dp_shard" in by_name["fsdp"].error
    assert by_name["search"].step_ns <= by_name["ddp"].step_ns
    assert 0 < by_name["ddp"].bound_ns <= by_name["search"].step_ns
    assert read_plan_rows(folder) == rows
    assert verify_plans(folder) == []
    assert "search" in (folder / "plans.md").read_text()


def test_finished_runs_are_kept(board):
    from simdev.bench.plan_bench import bench_plans

    folder, tasks, rows = board
    messages = []
    assert bench_plans(tasks, ["ddp", "search"], folder, evaluations=8, tell=messages.append) == rows
    assert messages == []  # nothing was planned again


def test_a_row_of_several_meshes_gets_the_bound_of_all_plans(board, tmp_path):
    from simdev.bench.plan_bench import _differences, bench_plans, score_plan
    from simdev.bench.plan_rows import write_plan_rows
    from simdev.parallel.mesh import Mesh
    from simdev.planners import Choice, Evaluator

    _, tasks, rows = board
    row = next(row for row in rows if row.planner == "search")
    evaluator = Evaluator(tasks[0].job())
    own = Choice(Mesh({"pp": 2}), 4, stage_meshes=(Mesh({"dp_replicate": 4}), Mesh({"tp": 2, "dp_replicate": 2})))
    scored = score_plan(replace(row, plan=json.dumps(own.to_json(), sort_keys=True)), evaluator)
    assert 0 < scored.bound_ns <= row.bound_ns and (row.bounded, scored.bounded) == ("one mesh", "any meshes")
    without = replace(scored, bound_ns=None)
    assert [text for text in _differences(without, {tasks[0]: evaluator}, "fast") if "bound_s: empty" in text]
    write_plan_rows(tmp_path, [without])
    (again,) = bench_plans(tasks, ["search"], tmp_path, evaluations=8)
    assert again == replace(scored, torch=again.torch, commit=again.commit, utc=again.utc)
    assert _differences(again, {tasks[0]: evaluator}, "fast") == []


def test_a_changed_row_is_found_out(board, tmp_path):
    from simdev.bench.plan_bench import verify_plans
    from simdev.bench.plan_rows import read_plan_rows, write_plan_rows

    _, _, rows = board
    better = [replace(row, step_ns=row.step_ns - 1) if row.planner == "search" else row for row in rows]
    write_plan_rows(tmp_path, better)  # its digest is right, its time is not
    assert [text for text in verify_plans(tmp_path, engine="fast") if "step_time_s" in text]
    path = tmp_path / "plans.csv"
    path.write_text(path.read_text().replace(",ok,", ",error,", 1))
    with pytest.raises(InvalidInput, match="digest"):
        read_plan_rows(tmp_path)


def test_rows_of_an_older_planner_hold_until_they_are_made_again(board, tmp_path):
    from simdev.bench.plan_bench import bench_plans, verify_plans
    from simdev.bench.plan_rows import write_plan_rows

    _, tasks, rows = board
    ddp = next(row for row in rows if row.planner == "ddp")
    write_plan_rows(tmp_path, [replace(ddp, version=0)])
    assert verify_plans(tmp_path, engine="fast") == []
    assert [row.version for row in bench_plans(tasks, ["ddp"], tmp_path, evaluations=8)] == [ddp.version]
    write_plan_rows(tmp_path, [replace(ddp, version=9)])
    assert "version 9" in verify_plans(tmp_path, engine="fast")[0]


def test_a_row_executes_no_file(board, tmp_path):
    from simdev.bench.plan_bench import verify_plans
    from simdev.bench.plan_rows import write_plan_rows

    _, _, rows = board
    mine = [replace(row, model="evil.py:model") for row in rows if row.planner == "search"]
    write_plan_rows(tmp_path, mine)
    assert "not executed" in verify_plans(tmp_path)[0]


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"cluster": "/etc/passwd"}, "unknown cluster '/etc/passwd'"),
        ({"cluster": "../../secret.toml[nodes=2]"}, "unknown cluster"),
        ({"model": "nosuch-3b"}, "unknown parallel model"),
    ],
)
def test_a_row_opens_no_file(board, tmp_path, changes, reason):
    from simdev.bench.plan_bench import verify_plans
    from simdev.bench.plan_rows import write_plan_rows

    _, _, rows = board
    write_plan_rows(tmp_path, [replace(row, **changes) for row in rows if row.planner == "search"])
    (text,) = verify_plans(tmp_path)
    assert reason in text


@pytest.mark.parametrize(
    "column, cell", [("batch", "9" * 5000), ("step_time_s", "1e400"), ("error", "\x1b[2J"), ("plan_seconds", "nan")]
)
def test_cells_that_no_planner_writes_are_refused(board, tmp_path, column, cell):
    from simdev.bench.plan_rows import COLUMNS, FILE, read_plan_rows
    from simdev.bench.rows import read_csv, write_csv

    folder, _, _ = board
    lines = [{**line, column: cell} for _, line in read_csv(folder / FILE, COLUMNS)]
    write_csv(tmp_path / FILE, COLUMNS, lines)
    with pytest.raises(InvalidInput, match="line 2"):
        read_plan_rows(tmp_path, check_digest=False)
