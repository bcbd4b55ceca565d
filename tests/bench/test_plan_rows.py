"""Rows of planners: written, resumed, verified, and found out if they were changed."""

import json
import shutil
from dataclasses import replace

import pytest

from simdev.errors import InvalidInput

MODEL = "gpt-3.6b[width=256,layers=4,heads=4,length=256,vocabulary=1024]"
CHOICES = '{"microbatches": [1], "recomputes": ["none"]}'


def bench_plans(planners, folder, evaluations=8, **settings):
    from simdev.bench.bench import bench
    from simdev.bench.plan_matrix import plan_jobs
    from simdev.bench.plan_run import PLANNING
    from simdev.bench.workers import Limits

    runs = plan_jobs([(MODEL, "dgx-a100", 16)], planners, evaluations=evaluations)
    runs = [replace(run, choices=CHOICES) for run in runs]
    return bench(runs, folder, work=PLANNING, **{"jobs": 1, "limits": Limits(1800, 8 << 30), **settings})


def verify_plans(folder, engine="fast", **settings):
    from simdev.bench.verify import verify

    return [str(one) for one in verify(folder, engine=engine, jobs=1, **settings)]


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("board")
    return folder, bench_plans(["ddp", "fsdp", "search"], folder)


def by_name(rows):
    return {row.planner: row for row in rows}


def test_rows_hold(board):
    from simdev.bench.plan_rows import read_plan_rows

    folder, rows = board
    found = by_name(rows)
    assert found["fsdp"].status == "skipped" and "dp_shard" in found["fsdp"].error
    assert found["search"].step_ns <= found["ddp"].step_ns
    assert 0 < found["ddp"].bound_ns <= found["search"].step_ns
    assert read_plan_rows(folder) == rows
    notes = []
    assert verify_plans(folder, engine="reference", rerun=True, on_note=notes.append) == []
    assert any("plan_seconds" in note for note in notes) and any("plan_curves.csv" in note for note in notes)
    assert "search" in (folder / "plans.md").read_text()


def test_a_search_is_a_curve_that_falls_to_its_plan(board):
    from simdev.bench.journal import read_curves

    folder, rows = board
    curve = read_curves(folder / "plan_curves.csv")[by_name(rows)["search"].key]
    assert [used for used, _, _ in curve] == sorted({used for used, _, _ in curve}) and curve[-1][0] <= 8
    assert curve[-1][2] == by_name(rows)["search"].step_ns


def test_every_command_reads_rows_of_planners(board, tmp_path, monkeypatch, capsys):
    from simdev.cli import main as cli

    def answer(*words):
        monkeypatch.setattr("sys.argv", ["simdev", *map(str, words), "--json"])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert left.value.code in (None, 0)
        return json.loads(capsys.readouterr().out)

    folder, rows = board
    found, case = by_name(rows), ("-w", f"{MODEL}, batch 16", "-t", "dgx-a100")
    ranking = answer("leaderboard", folder)["ranking"]
    assert {line["placer"]: line["solved"] for line in ranking} == {"ddp": "1", "fsdp": "0", "search": "1"}
    (gap,) = answer("gaps", folder)
    best = found["search"]
    assert float(gap["best ms"]) == pytest.approx(best.step_ns / 1e6, abs=1e-3)
    assert float(gap["bound ms"]) == pytest.approx(best.bound_ns / 1e6, abs=1e-3)
    (points,) = [run["points"] for run in answer("curve", folder, *case) if run["placer"] == "search"]
    assert points[-1][2] == best.step_ns
    seconds = pytest.approx(best.step_ns / 1e9)
    said = answer("explain", folder, *case)
    assert said["step_time_s"] == seconds and "kernels" in " ".join(said["findings"])
    slower = answer("explain", folder, *case, "-p", "ddp")
    assert slower["step_time_s"] == pytest.approx(found["ddp"].step_ns / 1e9)
    for picture in (tmp_path / "plan.svg", tmp_path / "plan.json"):
        assert answer("view", folder, *case, "-o", picture) == {"written": [str(picture)], "step_time_s": seconds}
        assert picture.stat().st_size > 200
    assert answer("compare", folder, folder) == []
    other = tmp_path / "other"
    other.mkdir()
    write(other, [row for row in rows if row.planner != "search"])
    (line,) = answer("compare", folder, other)
    assert "search" in line["placer"] and answer("compare", other, folder) != [line]
    assert answer("submit", folder, "-o", tmp_path / "plans.zip")["rows"] == 3
    assert answer("verify", tmp_path / "plans.zip", "--jobs", 1) == []


def test_finished_runs_are_kept_and_a_shipped_table_is_taken_over(board, tmp_path):
    from simdev.bench.bench import Observer

    class Nothing(Observer):
        def row(self, done, total, row):
            raise AssertionError(f"{row.entry} is planned again")

    folder, rows = board
    for name in ("plans.csv", "plans.md", "plan_curves.csv"):
        shutil.copy(folder / name, tmp_path / name)
    assert bench_plans(["ddp", "fsdp", "search"], tmp_path, observer=Nothing()) == rows
    assert (tmp_path / "plan_curves.csv").read_text() == (folder / "plan_curves.csv").read_text()
    assert verify_plans(tmp_path) == []


def test_a_planner_that_exceeds_its_budget_keeps_its_best(board, tmp_path):
    from test_planners_run import ODD

    (row,) = bench_plans([f"{ODD}:spendthrift"], tmp_path, evaluations=2)
    assert (row.status, row.evaluations) == ("ok", 2) and row.step_ns >= row.bound_ns
    (row,) = bench_plans([f"{ODD}:spendthrift"], tmp_path, evaluations=0)
    assert (row.status, row.evaluations, row.plan) == ("skipped", 0, "")


def test_a_row_of_several_meshes_gets_the_bound_of_all_plans(board):
    from simdev.bench.plan_matrix import job_of
    from simdev.bench.plan_run import score_plan
    from simdev.parallel.mesh import Mesh
    from simdev.planners import Choice, Evaluator

    row = by_name(board[1])["search"]
    evaluator = Evaluator(job_of(MODEL, "dgx-a100", 16, "eager", CHOICES))
    own = Choice(Mesh({"pp": 2}), 4, stage_meshes=(Mesh({"dp_replicate": 4}), Mesh({"tp": 2, "dp_replicate": 2})))
    scored = score_plan(replace(row, plan=json.dumps(own.to_json(), sort_keys=True)), evaluator)
    assert 0 < scored.bound_ns <= row.bound_ns and (row.bounded, scored.bounded) == ("one mesh", "any meshes")
    assert scored.with_bound(row.bound_ns, "one mesh") == scored  # which is none of its plan
    assert replace(row, bound_ns=None).with_bound(7, "one mesh").bound_ns == 7


def write(folder, rows):
    """A folder that holds these rows only, with digests and derived tables that fit."""
    from simdev.bench.plan_rows import write_plan_rows

    write_plan_rows(folder, rows)
    return folder


def test_a_changed_row_is_found_out(board, tmp_path):
    from simdev.bench.plan_rows import read_plan_rows

    rows = by_name(board[1])
    write(tmp_path, [replace(rows["search"], step_ns=rows["search"].step_ns - 1)])
    assert [text for text in verify_plans(tmp_path) if "step_time_s" in text]
    path = tmp_path / "plans.csv"
    path.write_text(path.read_text().replace(",ok,", ",error,", 1))
    with pytest.raises(InvalidInput, match="digest"):
        read_plan_rows(tmp_path)


IMPOSSIBLE = {
    "an ok row without a plan": ("search", {"plan": "", "step_ns": 1, "bound_ns": None}, "there is no plan"),
    "an ok row without a time": ("search", {"step_ns": None}, "there is no step_ns"),
    "an ok row with an error": ("search", {"error": "well"}, "error: well"),
    "a failure without a reason": ("fsdp", {"error": ""}, "a reason"),
    "a failure with a time": ("fsdp", {"step_ns": 1}, "but step_ns is given"),
    "a timeout with a bound": ("fsdp", {"status": "timeout", "bound_ns": 5}, "but bound_ns is given"),
    "more evaluations than the budget": ("search", {"evaluations": 9}, "at most 8"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_row_that_no_run_gives_is_refused(board, tmp_path, name):
    planner, changes, text = IMPOSSIBLE[name]
    write(tmp_path, [replace(by_name(board[1])[planner], **changes)])
    assert any(text in line for line in verify_plans(tmp_path))


def test_rerun_finds_a_plan_that_another_planner_made(board, tmp_path):
    rows = by_name(board[1])
    own = replace(rows["search"], planner="ddp", version=rows["ddp"].version)
    write(tmp_path, [own])
    assert verify_plans(tmp_path) == []
    assert [text for text in verify_plans(tmp_path, rerun=True) if "plan:" in text or "evaluations:" in text]


def test_a_table_beside_the_plans_is_opened_and_an_empty_one_is_no_proof(board, tmp_path):
    from simdev.bench.plan_rows import PLANS
    from simdev.bench.rows import COLUMNS, write_csv

    PLANS.write(tmp_path / "plans.csv", [])
    assert "plans.csv: holds no row" in verify_plans(tmp_path)
    write_csv(tmp_path / "results.csv", COLUMNS, [])
    assert {"plans.csv: holds no row", "results.csv: holds no row"} <= set(verify_plans(tmp_path))
    (tmp_path / "results.csv").write_text("forged")
    with pytest.raises(InvalidInput, match="results.csv"):
        verify_plans(tmp_path)


def test_rows_of_an_older_planner_hold_until_they_are_made_again(board, tmp_path):
    ddp = by_name(board[1])["ddp"]
    write(tmp_path, [replace(ddp, version=0)])
    assert verify_plans(tmp_path) == []
    assert [row.version for row in bench_plans(["ddp"], tmp_path)] == [ddp.version]
    write(tmp_path, [replace(ddp, version=9)])
    (tmp_path / "journal.jsonl").unlink()
    (tmp_path / "plan_curves.csv").unlink()
    assert any("version 9" in text for text in verify_plans(tmp_path))


def test_the_plan_of_a_users_planner_is_verified_without_its_code(board, tmp_path):
    row = replace(by_name(board[1])["ddp"], planner="evil.py:planner")
    skipped = []
    write(tmp_path, [row])
    assert verify_plans(tmp_path, rerun=True, on_skip=lambda *given: skipped.append(given)) == []
    assert "its planner is not registered here" in skipped[0]


def test_a_row_executes_no_file(board, tmp_path):
    write(tmp_path, [replace(by_name(board[1])["search"], model="evil.py:model")])
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
    write(tmp_path, [replace(by_name(board[1])["search"], **changes)])
    (text,) = verify_plans(tmp_path)
    assert reason in text


@pytest.mark.parametrize(
    "column, cell",
    [
        ("batch", "9" * 5000),
        ("step_time_s", "1e400"),
        ("error", "\x1b[2J"),
        ("plan_seconds", "nan"),
        ("params", "[" * 100_000),
        ("params", "[1]"),
        ("params", '{"a": ' + "[" * 300 + "]" * 300 + "}"),
        ("params", '{"a": NaN}'),
        ("plan", "[" * 100_000),
        ("plan", '{"mesh": 3}'),
        ("choices", "{}"),
        ("choices", '{"microbatches": [0], "recomputes": []}'),
        ("status", "fine"),
    ],
)
def test_cells_that_no_planner_writes_are_refused(board, tmp_path, column, cell):
    from simdev.bench.plan_rows import COLUMNS, FILE, read_plan_rows
    from simdev.bench.rows import read_csv, write_csv

    folder, _ = board
    lines = [{**line, column: cell} for _, line in read_csv(folder / FILE, COLUMNS)]
    write_csv(tmp_path / FILE, COLUMNS, lines)
    with pytest.raises(InvalidInput, match="line 2"):
        read_plan_rows(tmp_path, check_digest=False)
