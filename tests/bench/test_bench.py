import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simdev.bench import rows, score, verify, workers
from simdev.bench.bench import Observer, locked
from simdev.bench.bench import bench as execute_all
from simdev.bench.journal import Results, journal_line
from simdev.bench.matrix import BUDGETS, Run, parse_budget, plan, repeatable, time_limit
from simdev.bench.run import Instance, execute, load_problem
from simdev.bench.workers import Limits
from simdev.errors import InvalidInput, UnknownName
from simdev.files import TEMPORARY
from simdev.placers import registry
from simdev.problem.graph import GraphBuilder
from simdev.problem.graph_file import save_graph
from simdev.problem.placement_file import holds_placement, packed_keys, stored_placement
from simdev.problem.topology import topology_names

SUM = re.compile(r', "sum": "[0-9a-f]{16}"\}')
ODD = str(Path(__file__).with_name("odd_placers.py"))
LIMITS = Limits(seconds=300, memory_bytes=2 << 30)


def make_graph(path, n_ops=12, seed=0, persistent=1 << 20):
    rng = np.random.default_rng(seed)
    builder, tensors = GraphBuilder(path.stem), []
    for number in range(n_ops):
        inputs = {tensors[i] for i in rng.integers(max(0, number - 4), number, 2)} if number else set()
        op = builder.op(
            f"op{number}",
            "mm",
            inputs=sorted(inputs),
            flops=int(rng.integers(1, 1 << 30)),
            outputs=[int(rng.integers(1, 1 << 20))],
            persistent_bytes=persistent,
        )
        tensors += builder.outputs(op)
    save_graph(builder.build(), path)
    return str(path)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    return [make_graph(folder / "small.npz"), make_graph(folder / "huge.npz", persistent=2 << 30)]


def odd(*names):
    return [f"{ODD}:{name}" for name in names]


def run(graphs, placers, out, **settings):
    planned = {key: settings.pop(key) for key in ("budget", "seeds") if key in settings}
    runs = plan(graphs, ["p100x2"], placers, **{"budget": "evaluations=10", **planned})
    return execute_all(runs, out, **{"jobs": 2, "limits": LIMITS, **settings})


@pytest.fixture(scope="module")
def folder(graphs, tmp_path_factory):
    """A finished bench, not to be altered."""
    out = tmp_path_factory.mktemp("results")
    run(graphs, ["single-gpu", "single-cpu", *odd("walk", "shy")], out, seeds=2)
    return out


# plan


def test_plan_is_sorted_complete_and_free_of_repetitions(graphs):
    runs = plan(graphs * 2, ["p100x2", "p100x4"], ["single-gpu", "single-cpu", "single-gpu"], seeds=2)
    assert runs == sorted(set(runs)) and len(runs) == 2 * 2 * 2 * 2
    assert {r.budget for r in runs} == {BUDGETS["quick"].budget}


def test_plan_expands_all(graphs):
    runs = plan(graphs[:1], ["all"], ["all"])
    assert {r.placer for r in runs} == set(registry.placers())
    assert {r.topology for r in runs} == set(topology_names())


def test_plan_keeps_only_parameters_that_are_given(graphs):
    found = plan(graphs[:1], ["p100x2"], [f"{ODD}:walk[worst=true]", f"{ODD}:walk"])
    assert sorted(r.params for r in found) == ['{"worst": true}', "{}"]
    assert {r.entry for r in found} == {f"{ODD}:walk", f"{ODD}:walk[worst=true]"}


@pytest.mark.parametrize(
    "settings, error",
    [
        ({"workloads": ["inception-v4"]}, UnknownName),
        ({"topologies": ["p100x3"]}, UnknownName),
        ({"placers": ["single-gpuu"]}, UnknownName),
        ({"placers": ["single-gpu[speed=3]"]}, UnknownName),
        ({"placers": ["single-gpu@7"]}, InvalidInput),
        ({"placers": ["no_such_file.py:x"]}, InvalidInput),
        ({"placers": [f"{ODD}:none"]}, UnknownName),
        ({"budget": "quik"}, UnknownName),
        ({"budget": "evaluations=-1"}, InvalidInput),
        ({"budget": "seconds=nan"}, UnknownName),
        ({"seeds": 0}, InvalidInput),
        ({"rules": "fifo/fifo/lazy"}, UnknownName),
        ({"rules": "fifo"}, InvalidInput),
    ],
)
def test_plan_refuses_what_does_not_exist(graphs, settings, error):
    with pytest.raises(error):
        plan(**{"workloads": graphs, "topologies": ["p100x2"], **settings})


@pytest.mark.parametrize("name", BUDGETS)
def test_named_budgets_name_what_exists(name):
    assert plan(budget=name, placers=["single-gpu"])


def test_a_budget_in_seconds_leaves_time_to_end():
    assert time_limit("seconds=300") > 300
    assert time_limit("quick") == BUDGETS["quick"].seconds


def test_a_budget_may_limit_evaluations_and_seconds():
    assert parse_budget("evaluations=100,seconds=2.5") == (100, 2.5, False)
    assert parse_budget("evaluations=100,processor=2.5") == (100, 2.5, True)
    assert time_limit("evaluations=100,seconds=300") > 300
    assert repeatable("evaluations=100") and not repeatable("evaluations=100,seconds=2.5")
    for wrong in (
        "seconds=2,evaluations=1,seconds=3",
        "seconds=2,processor=3",
        "evaluations=1,evaluations=2",
        "evaluations=1,",
        "hours=1",
    ):
        with pytest.raises(UnknownName, match="budget"):
            parse_budget(wrong)


@pytest.mark.slow
def test_a_budget_in_processor_seconds_does_not_count_waiting(graphs, tmp_path):
    found = {}
    for budget in ("seconds=0.5", "processor=0.5"):
        (row,) = run(graphs[:1], odd("napper"), tmp_path, budget=budget)
        found[budget] = row.proof
    assert found == {"seconds=0.5": "used up", "processor=0.5": "open"}


def test_seed_comes_from_the_key():
    first = Run("w", "t", "r", "p", "{}", "evaluations=1", 0)
    assert first.entropy == Run(*first.key).entropy
    others = [replace(first, **{name: 1 if name == "seed" else "x"}) for name in rows.KEY]
    assert len({run.entropy for run in [first, *others]}) == len(others) + 1


# execute


def test_rows_tell_what_happened(graphs, tmp_path):
    names = ("shy", "broken", "wrong", "suicidal", "needy", "glutton", "leaver", "walk", "spendthrift")
    limits = Limits(seconds=300, memory_bytes=1 << 30)
    found = run(graphs[:1], odd(*names), tmp_path, limits=limits)
    by_name = {row.placer.partition(":")[2]: row for row in found}
    outcome = {name: (row.status, row.error) for name, row in by_name.items()}
    assert outcome["shy"] == ("skipped", "not today")
    assert outcome["needy"] == ("skipped", "needs the package no_such_package: pip install no_such_package")
    assert outcome["broken"] == ("error", "ZeroDivisionError: one line and another")
    assert outcome["leaver"] == ("error", "SystemExit: good bye")
    assert outcome["wrong"][0] == "error" and "device 99" in outcome["wrong"][1]
    assert outcome["suicidal"][0] == "memory" and "signal 9" in outcome["suicidal"][1]
    assert outcome["glutton"][0] == "memory" and "Unable to allocate" in outcome["glutton"][1]
    assert outcome["walk"] == outcome["spendthrift"] == ("ok", "")
    assert by_name["walk"].evaluations == 10 and by_name["walk"].step_ns > 0
    assert all(row.step_ns is None for name, row in by_name.items() if outcome[name][0] != "ok")


RAISED = {
    "interrupter": ("error", "KeyboardInterrupt: "),
    "generator": ("error", "GeneratorExit: not a generator"),
    "surrogate": ("error", r"RuntimeError: \udcff\x00\x1b[31m"),
    "speechless": ("error", "Unspeakable: "),
    "quitter": ("error", "the process ended with exit code 0 and without an answer"),
    "vandal": ("error", "the placer altered the problem that it was given"),
    "twins": ("ok", ""),
    "closer": ("error", "the process ended with exit code 1 and without an answer"),
    "parricide": ("memory", "the process was killed (signal 9): probably no memory was left"),
    "crasher": ("error", "the process died of signal 11"),
    "locked": ("error", "Locked: cannot be pickled"),
    "lingerer": ("ok", ""),
    "outsider": ("ok", ""),
    "single-gpu": ("ok", ""),
}


def test_no_placer_stops_the_bench_and_each_row_has_its_true_status(graphs, tmp_path):
    placers = ["single-gpu", *odd(*(name for name in RAISED if name != "single-gpu"))]
    found = run(graphs[:1], placers, tmp_path, limits=Limits(300, 2 << 30))
    assert {row.placer.rpartition(":")[2]: (row.status, row.error) for row in found} == RAISED
    assert run(graphs[:1], placers, tmp_path) == found == rows.read_rows(tmp_path / "results.csv")


def test_rows_come_while_other_placers_are_warming_up(graphs, tmp_path, monkeypatch):
    monkeypatch.setattr("simdev.bench.bench.WARM_UP_S", LIMITS.seconds)

    class Marker(Observer):
        def row(self, done, total, row):
            (tmp_path / "row").touch()

    found = run(graphs[:1], ["single-gpu", f"{ODD}:patient[folder={tmp_path}]"], tmp_path / "out", observer=Marker())
    assert [row.status for row in found] == ["ok", "ok"]
    assert (tmp_path / "seen").exists()


def alive(pid):
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(true, seconds=1800):
    for _ in range(10 * seconds):
        if true():
            return
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s")


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@needs_proc
def test_processes_that_a_placer_leaves_behind_end_with_its_run(graphs, tmp_path):
    log = tmp_path / "log"
    (row,) = run(graphs[:1], [f"{ODD}:forker[log={log}]"], tmp_path / "out", limits=Limits(300, 2 << 30))
    assert row.status == "ok"
    left = [int(pid) for pid in log.read_text().split()]
    assert len(left) == 2
    wait_until(lambda: not any(map(alive, left)))


@needs_proc
def test_no_process_outlives_a_bench_that_is_killed(graphs, tmp_path):
    log = tmp_path / "log"
    process = start(tmp_path / "out", graphs[0], f"forker[log={log},seconds=600]", seeds=1)
    wait_until(lambda: log.is_file() and len(log.read_text().split()) >= 2 or process.poll() is not None)
    left = descendants(process.pid) | {int(pid) for pid in log.read_text().split()}
    assert len(left) >= 5  # the fork server, a guard, its work, and what that has left
    process.kill()
    process.communicate(timeout=1800)  # returns when no process holds its pipes any more
    wait_until(lambda: not any(map(alive, left)))


def descendants(pid):
    found = set()
    for children in Path("/proc").glob(f"{pid}/task/*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for child in map(int, children.read_text().split()):
                found |= {child} | descendants(child)
    return found


def test_a_very_long_message_is_shortened(graphs, tmp_path):
    (row,) = run(graphs[:1], odd("talker"), tmp_path, limits=Limits(300, 2 << 30))
    assert row.error.startswith("RuntimeError: word word") and len(row.error) < 500


def test_names_that_no_row_can_hold_are_refused(graphs, tmp_path):
    for name in ("a\nb.npz", "a\x1b[2J.npz", os.fsdecode(b"a\xff.npz"), "a\u202e.npz"):
        (tmp_path / name).write_bytes(Path(graphs[0]).read_bytes())
        with pytest.raises(InvalidInput, match="cannot be printed"):
            plan([str(tmp_path / name)], ["p100x2"], ["single-gpu"])


def test_a_search_that_never_ends_keeps_its_best(graphs, tmp_path):
    (row,) = run(graphs[:1], odd("spendthrift"), tmp_path, budget="evaluations=5")
    assert row.evaluations == 5 and row.feasible
    (row,) = run(graphs[:1], odd("spendthrift"), tmp_path, budget="evaluations=0")
    assert row.status == "error" and "0 evaluations" in row.error


@pytest.mark.parametrize("name", ["slow[seconds=600]", "sleeper"])
def test_a_run_that_takes_too_long_is_a_row(graphs, tmp_path, name):
    (row,) = run(graphs[:1], [f"{ODD}:{name}"], tmp_path, limits=Limits(1, 2 << 30))
    assert (row.status, row.error) == ("timeout", "longer than 1 s")


def test_out_of_memory_keeps_its_time_but_has_no_score(folder):
    row = next(r for r in rows.read_rows(folder / "results.csv") if r.placer == "single-gpu" and "huge" in r.workload)
    assert (row.status, row.feasible, row.step_ns) == ("ok", False, None)
    assert row.simulated_ns > 0
    device, _, excess = row.overflow.partition(":")
    assert device == "gpu0" and int(excess) > 8 << 30


def test_two_benches_give_the_same_exact_columns(graphs, folder, tmp_path):
    run(graphs, ["single-gpu", "single-cpu", *odd("walk", "shy")], tmp_path, seeds=2, jobs=1)
    left, right = (rows.read_rows(where / "results.csv") for where in (folder, tmp_path))
    assert [row.digest for row in left] == [row.digest for row in right] and len(left) == 16
    for name in ("leaderboard.csv", "ranking.csv"):
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes()


MACHINE = """
name = "small"
[kind.gpu]
memory_gib = 1
peak_tflops = { f32 = 1.0 }
memory_gb_per_s = 100
unsupported = ["host_only", "nowhere"]
[kind.host]
memory_gib = 1
peak_tflops = { f32 = 0.1 }
memory_gb_per_s = 10
unsupported = ["gpu_only", "nowhere"]
[[device]]
name = "cpu"
kind = "host"
host = true
[[device]]
names = ["gpu0", "gpu1"]
kind = "gpu"
[[link]]
ends = [["cpu", "gpu0"], ["cpu", "gpu1"]]
gb_per_s = 10
latency_us = 1
"""


IMPOSSIBLE = [
    (("mm", "nowhere", "mm"), 0, None, "op 'op1' of kind 'nowhere' is supported by no device of small"),
    (("gpu_only", "host_only", "mm"), 0, 0, "'op1' runs only on cpu and 'op0' runs only on gpu0, gpu1, and they must"),
    (("mm", "mm", "mm"), 2 << 30, None, "op 'op0' needs 2 GiB of persistent bytes: the largest memory among cpu"),
    (("mm", "mm"), 600 << 20, 0, "2 ops that share a device ('op0' first) need 1.172 GiB of persistent bytes"),
    (("mm",) * 7, 500 << 20, None, "7 ops that only cpu, gpu0, gpu1 can run need 3.418 GiB"),
    (("host_only",) * 3, 500 << 20, None, "3 ops that only cpu can run need 1.465 GiB"),
]


def test_what_no_placement_can_do_is_a_row_with_the_reason(tmp_path):
    paths = []
    for case, (kinds, persistent, group, _) in enumerate(IMPOSSIBLE):
        builder, tensors = GraphBuilder("bad"), []
        for number, kind in enumerate(kinds):
            op = builder.op(f"op{number}", kind, inputs=tensors, outputs=[4], persistent_bytes=persistent, group=group)
            tensors = builder.outputs(op)
        paths.append(tmp_path / f"bad{case}.npz")
        save_graph(builder.build(), paths[-1])
    (tmp_path / "small.toml").write_text(MACHINE)
    runs = plan(map(str, paths), [str(tmp_path / "small.toml")], ["dp", "ip-throughput"], budget="evaluations=5")
    found = execute_all(runs, tmp_path / "out", jobs=2, limits=LIMITS)
    assert len(found) == 2 * len(IMPOSSIBLE)
    for row in found:
        reason = IMPOSSIBLE[int(row.workload[-5])][3]
        assert row.status == "infeasible" and reason in row.error and row.step_ns is None
    assert verify.verify(tmp_path / "out", jobs=2) == []


def test_seeds_differ(folder):
    found = [row for row in rows.read_rows(folder / "results.csv") if row.placer.endswith("walk")]
    assert len({row.placement for row in found}) > len({row.workload for row in found})


def test_a_row_can_be_made_alone(folder, graphs):
    row = next(r for r in rows.read_rows(folder / "results.csv") if r.placer.endswith("walk"))
    problem = load_problem(row.workload, row.topology, row.rules)
    instance = Instance(
        row.workload,
        row.topology,
        row.rules,
        problem.graph.fingerprint,
        problem.costs.hash,
        12,
        None,
        row.lower_bound_ns,
        row.bound_method,
    )
    assert execute(Run(*row.key), instance).row.digest == row.digest


# resume


def test_seconds_end_a_search_too(graphs, tmp_path):
    (row,) = run(graphs[:1], odd("walk"), tmp_path, budget="seconds=0.5")
    assert row.status == "ok" and row.evaluations >= 1 and row.place_seconds > 0.4
    assert verify.verify(tmp_path, engine="fast", rerun=True) == []  # not run again: seconds are not repeatable


def test_processor_seconds_count_children_and_no_rest(graphs, tmp_path):
    """Any worker rests for half a second, which the clock on the wall counts; the child's processor seconds are its
    parent's, too."""
    (row,) = run(graphs[:1], odd("delegating"), tmp_path)
    assert row.cpu_seconds > 0.29 and row.place_seconds >= 0.5 and row.cpu_seconds < row.place_seconds


def test_a_second_bench_runs_only_what_is_missing(graphs, tmp_path):
    log = tmp_path / "log"
    placers = [f"{ODD}:slow[log={log},seconds=0]"]
    run(graphs[:1], placers, tmp_path / "out", seeds=2)
    found = run(graphs[:1], placers, tmp_path / "out", seeds=3)
    assert len(found) == 3 and len(log.read_text().split()) == 3
    (tmp_path / "out" / "journal.jsonl").unlink()  # a shipped board comes without its journal
    assert len(run(graphs[:1], placers, tmp_path / "out", seeds=3)) == 3
    assert len(log.read_text().split()) == 3


def test_failed_runs_run_again_only_when_asked(graphs, tmp_path):
    first = run(graphs[:1], odd("shy"), tmp_path)
    assert run(graphs[:1], odd("shy"), tmp_path) == first
    assert run(graphs[:1], odd("shy"), tmp_path, retry=True)[0].status == "skipped"
    entries = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert sum(entry["kind"] == "row" for entry in entries) == 2


def test_a_changed_graph_runs_again(tmp_path):
    graph = make_graph(tmp_path / "g.npz", seed=1)
    first = run([graph], ["single-gpu"], tmp_path / "out")
    make_graph(tmp_path / "g.npz", seed=2)
    second = run([graph], ["single-gpu"], tmp_path / "out")
    assert len(second) == 1 and first[0].fingerprint != second[0].fingerprint


def test_a_missing_placement_runs_again(graphs, tmp_path):
    (row,) = run(graphs[:1], ["single-gpu"], tmp_path)
    (tmp_path / "placements.jsonl").unlink()
    assert run(graphs[:1], ["single-gpu"], tmp_path)[0].digest == row.digest
    assert holds_placement(tmp_path, row.placement)


def test_a_finished_bench_keeps_its_placements_in_one_file(graphs, tmp_path):
    first = run(graphs[:1], ["single-gpu"], tmp_path)
    assert not (tmp_path / "placements").exists() and packed_keys(tmp_path) == [first[0].placement]
    before = (tmp_path / "placements.jsonl").read_bytes()
    both = run(graphs[:1], ["single-gpu", "single-cpu"], tmp_path)
    assert packed_keys(tmp_path) == sorted(row.placement for row in both)
    assert before in (tmp_path / "placements.jsonl").read_bytes(), "lines that were there stay as they are"
    assert stored_placement(tmp_path, both[0].placement).hash == both[0].placement


def test_an_interrupted_bench_keeps_each_placement_in_a_file_of_its_own(graphs, tmp_path):
    class Listener(Observer):
        def row(self, done, total, row):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(graphs[:1], ["single-gpu", "single-cpu"], tmp_path, observer=Listener())
    (row,) = rows.read_rows(tmp_path / "results.csv")
    assert (tmp_path / "placements" / f"{row.placement}.npz").is_file()
    assert packed_keys(tmp_path) == []


def start(out, graph, placer, seeds=16):
    """A bench in a process of its own, which Ctrl-C interrupts even if this test run ignores it (in the background)."""
    command = [
        sys.executable, "-m", "simdev", "bench", "-w", graph, "-t", "p100x2", "-p", f"{ODD}:{placer}", "-j", "2",
        "-b", "evaluations=0", "--seeds", str(seeds), "-o", str(out),
    ]  # fmt: skip
    return subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for_rows(out, count, process):
    journal = out / "journal.jsonl"

    def enough():
        assert process.poll() is None, process.stderr.read()
        return journal.is_file() and journal.read_text().count('"kind": "row"') >= count

    wait_until(enough)


def test_rows_that_are_kept_take_a_bound_found_later(graphs, tmp_path):
    (before,) = run(graphs[:1], ["single-gpu"], tmp_path)
    journal = tmp_path / "journal.jsonl"
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    for entry in entries:
        if entry["kind"] == "bound":
            entry["ns"], entry["method"] = 1, "another"
    journal.write_text(
        "".join(map(journal_line, ({key: entry[key] for key in entry if key != "sum"} for entry in entries)))
    )
    (after,) = run(graphs[:1], ["single-gpu"], tmp_path)
    assert after == replace(before, lower_bound_ns=1, bound_method="another")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_stopped_bench_loses_nothing_and_goes_on(graphs, tmp_path, how):
    """Three runs end; all others wait for a file, which comes after the interruption."""
    out, log, gate = tmp_path / "out", tmp_path / "log", tmp_path / "gate"
    process = start(out, graphs[0], f"slow[gate={gate},log={log}]")
    wait_for_rows(out, 3, process)
    process.send_signal(how)
    _, errors = process.communicate(timeout=1800)  # returns when no process holds its pipes any more
    assert process.returncode == (-9 if how == signal.SIGKILL else 130)
    if how != signal.SIGKILL:
        assert "Traceback" not in errors and "interrupted" in errors
        assert len(rows.read_rows(out / "results.csv")) == 3
    entries = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    kept = [entry["row"]["seed"] for entry in entries if entry["kind"] == "row"]
    assert len(kept) == 3
    called = len(log.read_text().split())
    gate.touch()
    found = run(graphs[:1], [f"{ODD}:slow[gate={gate},log={log}]"], out, budget="evaluations=0", seeds=16)
    assert sorted(row.seed for row in found) == list(range(16)) and all(row.status == "ok" for row in found)
    entries = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    again = [entry["row"]["seed"] for entry in entries if entry["kind"] == "row"]
    assert again[: len(kept)] == kept and sorted(again) == list(range(16))
    assert len(log.read_text().split()) - called == 16 - len(kept)


def test_a_row_whose_line_is_being_flushed_stands_in_the_tables(graphs, tmp_path, monkeypatch):
    """An interruption may arrive when the line is in the journal and ``fsync`` has not returned."""

    def fsync(_):
        raise KeyboardInterrupt

    (row,) = run(graphs[:1], ["single-gpu"], tmp_path / "board")
    (tmp_path / "out").mkdir()
    results = Results(tmp_path / "out")
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(KeyboardInterrupt):
        results.add(row, None, [(0, 0.5, row.step_ns)])
    monkeypatch.undo()
    results.write()
    results.close()
    assert rows.read_rows(tmp_path / "out" / "results.csv") == [row] == Results(tmp_path / "out").rows


def test_a_torn_journal_line_is_dropped(graphs, tmp_path):
    first = run(graphs[:1], ["single-gpu", "single-cpu"], tmp_path)
    journal = tmp_path / "journal.jsonl"
    data = journal.read_bytes()
    journal.write_bytes(data[:-20])
    again = run(graphs[:1], ["single-gpu", "single-cpu"], tmp_path)
    assert [row.digest for row in again] == [row.digest for row in first]
    assert len(journal.read_bytes().splitlines()) == len(data.splitlines())


def test_workers_load_the_same_package_as_the_bench(graphs, tmp_path):
    (tmp_path / "simdev").mkdir()
    (tmp_path / "simdev" / "__init__.py").write_text("raise SystemExit('the wrong package')")
    code = "import sys; sys.path[0] = sys.argv.pop(1); from simdev.cli.main import main; main()"
    command = [sys.executable, "-c", code, str(Path(__file__).parents[2]), "bench", "-w", graphs[0], "-t", "p100x2"]
    done = subprocess.run([*command, "-p", "single-gpu"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "1 run (1 ok)" in done.stdout, done.stderr


def test_a_corrupt_journal_is_named(graphs, tmp_path):
    (tmp_path / "journal.jsonl").write_text('{"kind": "row"\n')
    with pytest.raises(InvalidInput, match=r"journal.jsonl: line 1: not a journal entry"):
        run(graphs[:1], ["single-gpu"], tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('"seed": 0', '"seed": "x"', "seed: 'x' is not int"),
        ('"status": "ok"', '"status": null', "status: None is not str"),
        ('"curve": [', '"curve": [[1]], "rest": [', "an entry is damaged"),
        ('"ns":', '"nanoseconds":', "an entry is damaged"),
        ('"kind": "row", "row"', '"kind": "row", "rows"', "an entry is damaged"),
    ],
)
def test_wrong_types_in_a_journal_are_named(graphs, folder, tmp_path, old, new, what):
    journal = SUM.sub("}", (folder / "journal.jsonl").read_text())  # as versions without checksums wrote it
    assert old in journal
    (tmp_path / "journal.jsonl").write_text(journal.replace(old, new))
    with pytest.raises(InvalidInput, match=f"journal.jsonl: .*{what}"):
        run(graphs[:1], ["single-gpu"], tmp_path)


def test_one_bench_at_a_time_in_a_folder(graphs, tmp_path):
    with locked(tmp_path), pytest.raises(InvalidInput, match="another bench is writing"):
        run(graphs[:1], ["single-gpu"], tmp_path)
    assert run(graphs[:1], ["single-gpu"], tmp_path)


def test_a_dirty_tree_is_a_warning_and_unfinished_files_are_removed(graphs, tmp_path, monkeypatch):
    monkeypatch.setattr("simdev.bench.provenance.commit", lambda: "abc-dirty")
    (tmp_path / "placements").mkdir()
    left = [tmp_path / ".results.csv.abcdefgh", tmp_path / "placements" / ".x.npz.12345678"]
    left = [path.with_name(path.name + TEMPORARY) for path in left]
    for path in left:
        path.write_text("unfinished")
    notes = []

    class Listener(Observer):
        note = staticmethod(notes.append)

    run(graphs[:1], ["single-gpu"], tmp_path, observer=Listener())
    assert "uncommitted changes (abc-dirty)" in notes[0]
    assert not any(path.exists() for path in left) and (tmp_path / "results.csv").is_file()


def test_a_file_in_place_of_the_folder(graphs, tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(InvalidInput, match="cannot be written"):
        run(graphs[:1], ["single-gpu"], tmp_path / "out")


def test_threads_of_workers_leave_the_environment_as_it_was(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("NUMBA_NUM_THREADS", raising=False)
    with workers.environment():
        assert os.environ["OMP_NUM_THREADS"] == os.environ["NUMBA_NUM_THREADS"] == "1"
    assert os.environ["OMP_NUM_THREADS"] == "7" and "NUMBA_NUM_THREADS" not in os.environ


# verify


def alter(folder, tmp_path, which, column, value, *, forge):
    """A copy of ``folder`` with one cell altered; ``forge`` also makes digest and tables fit."""
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(folder), str(copy)], check=True)
    (copy / "journal.jsonl").unlink()  # which would tell
    path = copy / "results.csv"
    table = [cells for _, cells in rows.read_csv(path, rows.COLUMNS)]
    table[which][column] = value
    if forge:
        table[which]["digest"] = rows.RESULTS.parse(table[which], path, 0).digest
    rows.write_csv(path, rows.COLUMNS, table)
    if forge:
        score.write(copy, rows.read_rows(path))
    return copy


def position(folder, placer, workload):
    found = rows.read_rows(folder / "results.csv")
    return next(i for i, row in enumerate(found) if row.placer.endswith(placer) and workload in row.workload)


@pytest.mark.parametrize("engine", ["reference", "fast"])
def test_verify_accepts_what_the_bench_wrote(folder, engine):
    assert verify.verify(folder, engine=engine, rerun=engine == "fast", placers=odd("walk", "shy")) == []


ALTERED = {
    "workload": "w", "fingerprint": "0" * 16, "topology": "p100x4", "cost_hash": "0" * 16,
    "rules": "program/fifo/dataflow", "placer": "single-cpu@1", "version": "2", "params": '{"worst": true}',
    "budget": "evaluations=11", "seed": "9", "status": "timeout", "error": "x", "feasible": "false",
    "step_time_s": "0.000000001", "simulated_s": "0.000000001", "overflow": "gpu0:1", "lower_bound_s": "0.000000002",
    "bound_method": "guess", "peak_memory_bytes": "1", "comm_bytes": "1", "evaluations": "3", "placement": "0" * 16,
    "objective": "throughput/1f1b/4", "proof": "optimal",
}  # fmt: skip


@pytest.mark.parametrize("column", rows.EXACT)
def test_an_altered_cell_is_found_by_its_digest(folder, tmp_path, column):
    copy = alter(folder, tmp_path, position(folder, "walk", "small"), column, ALTERED[column], forge=False)
    assert [difference.column for difference in verify.digest_differences(copy)] == ["digest"]
    with pytest.raises(InvalidInput, match="altered"):
        rows.read_rows(copy / "results.csv")


HISTORY = ("rules", "placer", "version", "params", "budget", "seed", "evaluations", "proof")


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("column", [name for name in rows.EXACT if name not in HISTORY or name == "version"])
def test_a_forged_cell_is_found_by_recomputing(folder, tmp_path, column):
    # which version a file of one's own has is known only by running it: with --rerun, below
    which = position(folder, "single-gpu" if column == "version" else "walk", "small")
    copy = alter(folder, tmp_path, which, column, ALTERED[column], forge=True)
    differences = verify.verify(copy, engine="fast", jobs=1)
    assert differences


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("column", HISTORY)
def test_a_forged_history_is_found_by_running_again(folder, tmp_path, column):
    copy = alter(folder, tmp_path, position(folder, "walk", "small"), column, ALTERED[column], forge=True)
    assert verify.verify(copy, engine="fast", rerun=True, placers=odd("walk"), jobs=2)


def test_verify_names_an_altered_table(folder, tmp_path):
    copy = alter(folder, tmp_path, 0, "machine", "x", forge=False)
    path = copy / "ranking.csv"
    path.write_text(path.read_text().replace("walk,,1", "walk,,2", 1))
    assert [d.column for d in verify.verify(copy, engine="fast")] == ["version"]


def test_verify_names_missing_and_altered_placements(folder, tmp_path):
    copy = alter(folder, tmp_path, 0, "machine", "x", forge=False)
    found = {row.placer: row.placement for row in rows.read_rows(copy / "results.csv") if row.placement}
    gone, swapped = found["single-gpu"], found["single-cpu"]
    kept = next(key for name, key in found.items() if name.endswith("walk"))
    path = copy / "placements.jsonl"
    lines = {line[10:26]: line for line in path.read_text().splitlines()}
    lines[swapped] = lines[kept].replace(kept, swapped)
    del lines[gone]
    path.write_text("".join(f"{line}\n" for line in lines.values()))
    outcome = "\n".join(map(str, verify.verify(copy, engine="fast")))
    assert f"{gone}.npz: No such file" in outcome
    assert "placements.jsonl: holds placement" in outcome


def test_verify_does_not_need_the_users_graph_file(tmp_path):
    graph = make_graph(tmp_path / "g.npz")
    run([graph], ["single-gpu"], tmp_path / "out")
    Path(graph).unlink()
    assert verify.verify(tmp_path / "out", engine="fast") == []


def test_verify_a_sample(folder):
    seen = []
    verify.verify(folder, engine="fast", sample=3, on_row=lambda done, total, *_: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    with pytest.raises(InvalidInput):
        verify.verify(folder, sample=0)
