"""The fidelity report: cases, groups, what is over a goal, and files that are not there."""

import csv
import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from simdev.errors import InvalidInput
from simdev.files import unguarded
from simdev.parallel import Mesh
from simdev.parallel.costs.timing import ODD_PRODUCT
from simdev.problem.opcost.device import calibration_names
from simdev.studies.fidelity import cases as fidelity
from simdev.studies.fidelity.cases import GOALS, Case, all_cases, bootstrap, groups
from simdev.studies.fidelity.constants import constants
from simdev.studies.fidelity.kept import PACKAGE, Kept
from simdev.studies.fidelity.report import markdown, write

SHIPPED = Path(__file__).parents[2] / "leaderboard" / "fidelity"
NAMES = [field.name for field in fields(Case)]


def case(goal, predicted, **more):
    return Case(goal, "g", f"{goal} {predicted}", "validate", "ms", 0.0, 100.0, predicted, **more)


def test_a_group_means_the_sizes_of_its_errors_and_leaves_out_what_is_left_out():
    rows = [case("F1", 101), case("F1", 97.5, sum_of_ops=50.0), case("F1", 150, left_out="noise")]
    (group,) = groups(rows)
    assert (group.cases, group.left_out, group.met) == (2, 1, "yes")
    assert group.error == pytest.approx(0.0175) and group.worst == pytest.approx(0.025)
    assert group.low == pytest.approx(0.01) and group.high == pytest.approx(0.025)
    assert group.sum_of_ops == pytest.approx(0.5) and np.isnan(group.roofline)


def test_a_goal_is_not_met_by_rows_that_constants_were_fitted_to():
    fitted = [replace(case("F8 FSDP", 101), role="calibrate")]
    assert groups(fitted)[0].met == "not tried" and groups([case("F8 FSDP", 101)])[0].met == "yes"
    assert groups([replace(case("F8 FSDP", 150), role="calibrate")])[0].met == "no"


def test_one_bad_case_misses_the_worst_and_is_listed():
    rows = [case("F1", 100)] * 9 + [case("F1", 106)]
    assert groups(rows)[0].met == "no"
    assert "F1 106: +6.0 %" in markdown(rows, [])
    assert not case("", 200).over and not case("F1", 200, left_out="x").over and case("F6", 103.1).over


def test_the_bootstrap_is_repeatable():
    errors = np.array([0.01, 0.02, 0.05, 0.1])
    assert bootstrap(errors) == bootstrap(errors)
    low, high = bootstrap(errors)
    assert low < errors.mean() < high
    assert np.isnan(bootstrap(errors[:1])[0])


def write_trace(path):
    events = []
    for number in range(3):
        start = 1000 * number
        events.append(
            dict(ph="X", cat="user_annotation", name=f"ProfilerStep#{number}", ts=start, dur=900, pid=1, tid=1)
        )
        for k in range(5):
            args, at = {"correlation": 10 * number + k}, start + 100 * k
            events.append(
                dict(ph="X", cat="cuda_runtime", name="cudaLaunchKernel", ts=at, dur=5, pid=1, tid=1, args=args)
            )
            work = args | {"device": 0, "stream": 7}
            events.append(dict(ph="X", cat="kernel", name="k", ts=at + 10, dur=50, pid=0, tid=7, args=work))
    path.write_text(json.dumps({"traceEvents": events}))


def test_a_folder_becomes_cases_and_notes(tmp_path):
    (tmp_path / "kineto").mkdir()
    write_trace(tmp_path / "kineto" / "a.json")
    (tmp_path / "kineto" / "b.json").write_text("{}")
    (tmp_path / "links").mkdir()
    rows = "".join(f"{size},1,float,{1000 + size},1,1,1\n" for size in range(1000, 101_000, 1000))
    (tmp_path / "links" / "x_2gpu.txt").write_text(
        "size(B),count,type,time(ns),busbw(GB/s),time(ns),busbw(GB/s)\n" + rows
    )
    cases, notes = all_cases(tmp_path)
    table = {(group.goal, group.group): group for group in groups(cases)}
    assert table["F1", "median step of a trace"].error < 1e-3
    assert table["F1", "median step of a trace"].sum_of_ops == pytest.approx(1 - 250 / 900)
    assert table["F6", "all_reduce"].error < 1e-6
    assert any("b.json: not a trace" in note for note in notes)
    assert not any(str(tmp_path) in note for note in notes), "names within the folder"
    assert all(row.role == "validate" for row in cases)
    write(cases, notes, tmp_path / "out")
    names = {"cases.csv", "groups.csv", "README.md", "scatter.png"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names


def test_a_trace_of_one_step_is_replayed_with_its_own_host_times_and_a_cut_one_is_left_out(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    write_trace(folder / "a.json")
    text = (folder / "a.json").read_text()
    events = json.loads(text)["traceEvents"]
    (folder / "b.json").write_text(
        json.dumps([e for e in events if "Step#1" not in e["name"] and "#2" not in e["name"]])
    )
    (folder / "c.json").write_text(json.dumps([e for e in events if "Step" not in e["name"]]))
    (folder / "d.json").write_text(text[:-300])
    cases, _ = all_cases(tmp_path)
    rows = {row.case: row for row in cases if " step " not in row.case}
    assert rows["traces/b.json"].goal == "F1" and rows["traces/b.json"].group == "one step, its own host times"
    assert rows["traces/b.json"].measured == 0.9 and abs(rows["traces/b.json"].error) < 0.01
    assert rows["traces/c.json"].goal == "" and abs(rows["traces/c.json"].error) < 0.05
    assert rows["traces/d.json"].left_out == "the file is cut off" and not rows["traces/a.json"].left_out


def test_no_folder_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("SIMDEV_DATA", raising=False)
    with pytest.raises(InvalidInput, match="--data"):
        fidelity.data_folder(None)
    with pytest.raises(InvalidInput, match="no such folder"):
        all_cases(tmp_path / "nothing")


def test_cases_are_kept_until_a_file_changes(tmp_path):
    data, calls = tmp_path / "data.csv", []

    def make(notes):
        calls.append(1)
        notes.append("a note")
        return [case("F1", 100.0 + len(calls))]

    data.write_text("1")
    found = []
    for _ in range(2):
        notes = []
        found.append(Kept(tmp_path / "kept", Case, ["errors.py"]).cases("name", [data], make, notes))
        assert notes == ["a note"]
    assert len(calls) == 1 and found[0][0].predicted == found[1][0].predicted == 101.0
    data.write_text("2")
    assert Kept(tmp_path / "kept", Case, ["errors.py"]).cases("name", [data], make, [])[0].predicted == 102.0
    for path in (tmp_path / "kept").iterdir():
        path.write_text("{")  # a damaged file is made again
    assert Kept(tmp_path / "kept", Case, ["errors.py"]).cases("name", [data], make, [])[0].predicted == 103.0


def test_training_runs_are_cases_with_their_memory(tmp_path, monkeypatch):
    from simdev.studies import training_runs as study

    cluster = SimpleNamespace(kind=SimpleNamespace(name="a board"), gpus=8)
    plan = SimpleNamespace(mesh=Mesh({"tp": 2}), parameters={"microbatch": 1}, cluster=cluster)
    runs = [study.TrainingRun(source, "row 1", "model", SimpleNamespace(plan=plan), 2e6, 3e9) for source in study.SETS]
    monkeypatch.setattr(study, "read_runs", lambda data, source: ([run for run in runs if run.source == source], []))
    monkeypatch.setattr(study, "predict_all", lambda mine: ([study.Prediction(r, 1e6, 3e9) for r in mine], ["a note"]))
    (tmp_path / "training-runs").mkdir()
    (tmp_path / "training-runs" / "torchtitan.csv").write_text("a\n")
    cases, notes = all_cases(tmp_path)
    step_cases = [case for case in cases if case.goal.startswith("F8")]
    goals = [*fidelity.TRAINING.values(), "F8 host"]
    assert {case.goal: case.error for case in step_cases} == dict.fromkeys(goals, -0.5)
    assert {case.role for case in step_cases if case.goal == "F8 FSDP"} == {"calibrate"}
    assert [case.error for case in cases if case.goal == "F9 reserved"] == [0] * len(study.SETS) and "a note" in notes
    assert [(case.group, case.error) for case in cases if case.goal == "F7 unseen"] == [("a board", -0.5)]


def test_steps_on_one_node_are_judged_by_the_factor_of_the_others(monkeypatch):
    from simdev.calibrate.given_steps import GivenStep
    from simdev.studies import training_runs as study

    def run(number, ranks, measured):
        kind = SimpleNamespace(name="h100-sxm5-80gb", calibrated="h100")
        plan = SimpleNamespace(mesh=SimpleNamespace(ranks=ranks), cluster=SimpleNamespace(kind=kind, gpus=8))
        return SimpleNamespace(name=f"row {number}", plan=plan, typed=SimpleNamespace(model="m"), step_ns=measured)

    # 100 ns, of which the factor multiplies 80: the steps ask for 1.1, 1.2 and 1.5; the last one is on two nodes
    runs = [run(1, 8, 108), run(2, 8, 116), run(3, 8, 140), run(5, 16, 1000)]
    monkeypatch.setattr(study, "asked_step", lambda run: GivenStep("m", "bf16", run.step_ns, 100.0, 80.0))
    notes = []
    cases = fidelity._factor_cases(runs, notes)
    judged = [case for case in cases if case.goal == "F7 bf16"]
    assert [1e6 * case.predicted for case in judged] == pytest.approx([128, 124, 112])
    assert [1e6 * case.measured for case in judged] == [108, 116, 140]
    assert [1e6 * case.predicted for case in cases if not case.goal] == [100] * 3
    (note,) = notes
    assert "h100: 2 rows" in note and "ask for a factor of 1.300" in note  # rows 1 and 3


def test_every_goal_is_printed_and_every_fitted_constant_says_its_rows():
    text = markdown([case("F1", 101)], [])
    assert all(f"* {goal} (" in text for goal in fidelity.GOALS if goal != "F1") and "* F1 (" not in text
    rows = constants()
    assert all(len(row) == 4 and all(row) for row in rows) and f"{ODD_PRODUCT:g}" in {row[1] for row in rows}
    named = " ".join(row[0] for row in rows)
    assert all(f"device file {name}:" in named for name in calibration_names())


def test_kept_cases_do_not_depend_on_files_that_cannot_change_them():
    few, many = (Kept(None, Case, sources).code for sources in (fidelity.MEASURED, fidelity.PLANS))
    assert len(few) == 64 and few != many
    names = {*fidelity.MEASURED, *fidelity.PLANS}
    assert not any(name.startswith(("cli", "report", "bench")) for name in names)
    assert all((PACKAGE / name).exists() for name in names)


def test_runs_are_shared_by_what_they_capture():
    from simdev.studies import training_runs as study

    plans = [
        SimpleNamespace(mesh=Mesh({"tp": tensor, "pp": pipe}), parameters={"microbatch": micro})
        for tensor in (1, 2)
        for micro in (1, 2, 4)
        for pipe in (1, 2)
    ]
    runs = [
        study.TrainingRun("vtrain-single", str(n), "model", SimpleNamespace(plan=plan), 1e6)
        for n, plan in enumerate(plans)
    ]
    parts = [study.share(runs, number, 3) for number in range(3)]
    assert sorted(int(run.name) for part in parts for run in part) == list(range(len(runs)))
    keys = [{(run.plan.mesh["tp"], run.plan.parameters["microbatch"]) for run in part} for part in parts]
    assert sum(map(len, keys)) == len(set().union(*keys)) == 6


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path):
    (tmp_path / "kineto").mkdir()
    for name in "ab":
        write_trace(tmp_path / "kineto" / f"{name}.json")
    (tmp_path / "kineto" / "c.json").write_text("{}")
    alone, notes = all_cases(tmp_path)
    both, same = all_cases(tmp_path, jobs=2)
    assert [case.case for case in both] == [case.case for case in alone] != []
    assert [case.error for case in both] == [case.error for case in alone] and notes == same


def read_shipped():
    """The cases and groups of ``leaderboard/fidelity`` as they are stored: fractions of six digits."""
    cells = {}
    for name in ("cases", "groups"):
        with (SHIPPED / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            cells[name] = [{key: unguarded(cell) for key, cell in line.items()} for line in csv.DictReader(file)]
    numbers = {field.name for field in fields(Case) if field.type in (float, "float")}
    cases = [
        Case(**{key: (float(cell or "nan") if key in numbers else cell) for key, cell in line.items() if key in NAMES})
        for line in cells["cases"]
    ]
    return cases, cells


def test_the_shipped_tables_follow_from_the_measured_and_predicted_figures():
    cases, cells = read_shipped()
    assert len(cases) > 1000
    for row, line in zip(cases, cells["cases"], strict=True):
        assert row.error == pytest.approx(float(line["error"]), abs=1e-5), row.case
        assert abs(abs(row.error) - GOALS.get(row.goal, ("", 1.0))[1]) < 1e-5 or row.over == (line["over"] == "1")
    found = groups(cases)
    assert [(group.goal, group.group) for group in found] == [(x["goal"], x["group"]) for x in cells["groups"]]
    for group, line in zip(found, cells["groups"], strict=True):
        assert (str(group.cases), str(group.left_out), group.met) == (line["cases"], line["left_out"], line["met"])
        for name in ("error", "low", "high", "worst", "limit", "sum_of_ops", "roofline", "no_host"):
            expected = float(line[name] or "nan")
            assert getattr(group, name) == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True), (group.group, name)
