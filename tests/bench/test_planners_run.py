"""Planners go through the runner of placers, whatever they do; their rows are resumed, verified and checked."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from test_bench import alive, descendants, needs_proc, wait_until

from simdev.bench.bench import Observer
from simdev.bench.bench import bench as execute_all
from simdev.bench.plan_matrix import plan_jobs
from simdev.bench.plan_rows import choices_of, read_plan_rows
from simdev.bench.plan_run import PLANNING
from simdev.bench.workers import Limits
from simdev.errors import InvalidInput, UnknownName

ODD = str(Path(__file__).with_name("odd_planners.py"))
HOLLOW = str(Path(__file__).with_name("odd_planners.py")) + ":hollow"


def odd(*names):
    return [f"{ODD}:{name}" for name in names]


def run(planners, out, **settings):
    runs = plan_jobs([(HOLLOW, "dgx-a100", 16)], planners, evaluations=3, seeds=settings.pop("seeds", 1))
    return execute_all(runs, out, work=PLANNING, **{"jobs": 2, "limits": Limits(300, 2 << 30), **settings})


def outcomes(found):
    return {row.planner.rpartition(":")[2]: (row.status, row.error) for row in found}


RAISED = {
    "shy": ("skipped", "not today"),
    "broken": ("error", "ZeroDivisionError: one line and another"),
    "wrong": ("error", "planner wrong: returned dict, expected Choice"),
    "nothing": ("error", "planner nothing: returned NoneType, expected Choice"),
    "too-many": ("error", "plan: mesh: dp_replicate=24 has 24 ranks, the job 8"),
    "leaver": ("error", "SystemExit: good bye"),
    "interrupter": ("error", "KeyboardInterrupt: "),
    "generator": ("error", "GeneratorExit: not a generator"),
    "surrogate": ("error", r"RuntimeError: \udcff\x00\x1b[31m"),
    "speechless": ("error", "Unspeakable: "),
    "locked": ("error", "Locked: cannot be pickled"),
    "quitter": ("error", "the process ended with exit code 0 and without an answer"),
    "closer": ("error", "the process ended with exit code 1 and without an answer"),
    "suicidal": ("memory", "the process was killed (signal 9): probably no memory was left"),
    "parricide": ("memory", "the process was killed (signal 9): probably no memory was left"),
    "crasher": ("error", "the process died of signal 11"),
    "vandal": ("error", "the planner altered the job that it was given"),
    "twins": ("skipped", "one of two"),
    "lingerer": ("skipped", "a thread is left"),
    "outsider": ("skipped", "outside"),
}


def test_no_planner_stops_the_bench_and_each_row_has_its_true_status(tmp_path):
    found = run(odd(*RAISED), tmp_path)
    assert outcomes(found) == RAISED
    assert run(odd(*RAISED), tmp_path) == found == read_plan_rows(tmp_path)  # nothing is run again
    assert all((row.step_ns, row.bound_ns, row.peak_bytes, row.program) == (None, None, None, "") for row in found)
    assert all(row.machine and row.versions and row.utc for row in found)


@pytest.mark.slow
def test_a_planner_that_takes_too_much_memory_or_says_too_much_is_a_row(tmp_path):
    found = outcomes(run(odd("glutton", "talker"), tmp_path, limits=Limits(300, 1 << 30)))
    assert found["glutton"][0] == "memory" and "Unable to allocate" in found["glutton"][1]
    assert found["talker"][0] == "error" and len(found["talker"][1]) < 500


@pytest.mark.slow
def test_a_planner_that_never_ends_is_a_row(tmp_path):
    begin = time.monotonic()
    found = outcomes(run(odd("endless", "deaf", "sleeper"), tmp_path, limits=Limits(2, 2 << 30)))
    assert found == dict.fromkeys(("endless", "deaf", "sleeper"), ("timeout", "longer than 2 s"))
    assert time.monotonic() - begin < 300


@needs_proc
def test_processes_that_a_planner_leaves_behind_end_with_its_run(tmp_path):
    log = tmp_path / "log"
    (row,) = run([f"{ODD}:forker[log={log}]"], tmp_path / "out")
    assert (row.status, row.error) == ("skipped", "two processes are left")
    left = [int(pid) for pid in log.read_text().split()]
    assert len(left) == 2
    wait_until(lambda: not any(map(alive, left)))


def start(out, *options, **environment):
    """The command, as a process."""
    code = "import sys; from simdev.cli.main import main; sys.argv[0] = 'simdev'; main()"
    command = [sys.executable, "-c", code, "bench", "-w", HOLLOW, "-t", "dgx-a100", "-o", str(out), *options]
    settings = {**os.environ, **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=settings)


@pytest.mark.slow
@needs_proc
def test_no_process_outlives_a_bench_of_planners_that_is_killed(tmp_path):
    log = tmp_path / "log"
    process = start(tmp_path / "out", "--planner", f"{ODD}:forker[log={log},seconds=600]")
    wait_until(lambda: log.is_file() and len(log.read_text().split()) >= 2 or process.poll() is not None)
    left = descendants(process.pid) | {int(pid) for pid in log.read_text().split()}
    process.kill()
    process.communicate(timeout=1800)
    wait_until(lambda: not any(map(alive, left)))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "nonsense"])
def test_workers_may_be_spawned(tmp_path, method):
    process = start(
        tmp_path, *(word for name in ("broken", "shy", "quitter") for word in ("--planner", f"{ODD}:{name}")),
        SIMDEV_START_METHOD=method,
    )  # fmt: skip
    _, errors = process.communicate(timeout=1800)
    if method == "nonsense":
        assert process.returncode == 2 and "expected forkserver or spawn, got 'nonsense'" in errors
        return
    assert process.returncode == 0, errors
    assert outcomes(read_plan_rows(tmp_path)) == {name: RAISED[name] for name in ("broken", "shy", "quitter")}


def test_finished_rows_are_kept_and_only_failed_ones_are_tried_again(tmp_path):
    """A planner appends to a file when it is called; a plan of the hollow model cannot be simulated."""
    log, seen = tmp_path / "log", []

    class Watcher(Observer):
        def row(self, done, total, row):
            seen.append((done, total, row.workload, row.entry, row.status))

    entry = f"{ODD}:first[log={log}]"
    for retry, calls in ((False, 2), (False, 2), (True, 4)):
        found = run([entry], tmp_path / "out", seeds=2, retry=retry, observer=Watcher())
        assert [row.seed for row in found] == [0, 1] and len(log.read_text().split()) == calls
    assert len(set(log.read_text().split())) == 2  # the seed of a run follows from its key
    assert seen[0] == (1, 2, f"{HOLLOW}, batch 16", entry, found[0].status) and len(seen) == 4


@pytest.mark.parametrize(
    "jobs, planners, settings, error",
    [
        ([("llama3-8c", "dgx-a100", 8)], ["fsdp"], {}, UnknownName),
        ([("llama3-8b", "dgx-a200", 8)], ["fsdp"], {}, UnknownName),
        ([("llama3-8b", "dgx-a100", 0)], ["fsdp"], {}, InvalidInput),
        ([("llama3-8b", "dgx-a100", 8)], ["fsdpp"], {}, UnknownName),
        ([("llama3-8b", "dgx-a100", 8)], ["fsdp[speed=3]"], {}, UnknownName),
        ([("llama3-8b", "dgx-a100", 8)], ["no_such_file.py:x"], {}, InvalidInput),
        ([("llama3-8b", "dgx-a100", 8)], ["fsdp"], {"seeds": 0}, InvalidInput),
    ],
)
def test_a_plan_of_runs_refuses_what_does_not_exist(jobs, planners, settings, error):
    with pytest.raises(error):
        plan_jobs(jobs, planners, **settings)


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--placer", "heft"], "--placer: is for placers, not planners"),
        (["--order", "fifo"], "--order: is for placers, not planners"),
        (["--contention", "none"], "--contention: is for placers"),
        (["--runtime", "eager"], "--runtime: is for placers"),
        (["--objective", "throughput"], "--objective: is for placers"),
        (["--microbatches", "8"], "--microbatches: is for placers"),
        (["--schedule", "gpipe"], "--schedule: is for placers"),
        (["--budget", "standard"], "--budget: standard is a budget of placers; planners take evaluations=N"),
        (["--budget", "seconds=3"], "--budget: planners take evaluations=N, so that rows can be verified"),
        (["--seeds", "0"], "seeds: 0 is not a number of repetitions"),
        (["--time-limit", "-1"], "--time-limit"),
        (["--memory-limit", "0"], "--memory-limit"),
        (["--backend", "dask"], "--backend dask and --scheduler ADDRESS go together"),
    ],
)
def test_each_option_works_with_planners_or_is_refused_in_a_sentence(tmp_path, options, sentence):
    from typer.testing import CliRunner

    from simdev.cli.main import app

    command = [
        "bench",
        "--planner",
        f"{ODD}:shy",
        "-w",
        HOLLOW,
        "-t",
        "dgx-a100",
        "-o",
        str(tmp_path / "out"),
        *options,
    ]
    found = CliRunner().invoke(app, command)
    assert sentence in str(found.exception) and not (tmp_path / "out").exists()


def test_options_of_planners_are_refused_for_placers(tmp_path):
    from typer.testing import CliRunner

    from simdev.cli.main import app

    found = CliRunner().invoke(app, ["bench", "-p", "heft", "--batch", "8", "-o", str(tmp_path)])
    assert "--batch: is for planners; add --planner" in str(found.exception)
    found = CliRunner().invoke(app, ["bench", "--planner", "fsdp", "--batch", "8", "-o", str(tmp_path)])
    assert "--batch: goes with -w and -t" in str(found.exception)


MODEL = "gpt-3.6b[width=256,layers=2,heads=4,length=256,vocabulary=1024]"
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
    assert read_plan_rows(folder) == rows and found["search"].cpu_seconds > 0
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


def test_clusters_with_other_choices_than_nodes_are_kept_and_read_again(tmp_path):
    """A row names the whole id of its cluster; the file that the folder keeps is that of a node."""
    from simdev.bench.plan_matrix import job_of
    from simdev.bench.stored import keep_machine, kept_machine
    from simdev.problem.topology import DEVICES_DIR

    choices = "[nodes=2,oversubscription=4]"
    keep_machine(f"dgx-a100{choices}", tmp_path)
    assert not list(tmp_path.iterdir())  # it ships
    own = tmp_path / "own.toml"
    own.write_bytes((DEVICES_DIR / "dgx-a100.toml").read_bytes())
    keep_machine(f"{own}{choices}", tmp_path)
    run = "gpt-3.6b", f"{own}{choices}", 64, "eager", choices_of("gpt-3.6b")
    again = job_of(*run, machine=kept_machine(tmp_path, run[1]))
    assert again.cluster.network_bytes_per_s == job_of(*run).cluster.network_bytes_per_s > 0
    assert again.ranks == 16
