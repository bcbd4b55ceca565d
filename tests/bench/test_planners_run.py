"""Planners go through the runner of placers: each misbehaviour becomes a row, and nothing is left running."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_bench import alive, descendants, needs_proc, wait_until

from simdev.bench.bench import Observer
from simdev.bench.bench import bench as execute_all
from simdev.bench.plan_matrix import plan_jobs
from simdev.bench.plan_rows import read_plan_rows
from simdev.bench.plan_run import PLANNING
from simdev.bench.workers import Limits
from simdev.errors import InvalidInput, UnknownName

ODD = str(Path(__file__).with_name("odd_planners.py"))
HOLLOW = str(Path(__file__).with_name("odd_model.py")) + ":hollow"


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
    process.communicate(timeout=300)
    wait_until(lambda: not any(map(alive, left)))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "nonsense"])
def test_workers_may_be_spawned(tmp_path, method):
    process = start(
        tmp_path, *(word for name in ("broken", "shy", "quitter") for word in ("--planner", f"{ODD}:{name}")),
        SIMDEV_START_METHOD=method,
    )  # fmt: skip
    _, errors = process.communicate(timeout=600)
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
