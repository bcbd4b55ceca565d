import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from simdev.bench.rows import read_csv, write_csv
from simdev.cli import main as cli
from simdev.errors import InvalidInput
from simdev.parallel import find_model
from simdev.parallel.costs.float8 import Float8
from simdev.parallel.typed_plan import TypedPlan
from simdev.problem.opcost.device import load_calibration
from simdev.studies import training_runs as report
from simdev.studies.plan_rankings import CHOSEN, LARGER, WIDER
from simdev.studies.training_controls import START, constant_mfu, fit_formula, formula_left_out, formula_ns
from simdev.studies.training_runs import Prediction, TrainingRun, asked_step, predict, read_runs, report_lines

SHIPPED = Path(__file__).parents[2] / "leaderboard" / "fidelity" / "controls.csv"
HEADER = (
    "GPU numbers,data parallelism,pipeline parallelism,tensor parallelism,hidden size,# layers,attention heads,"
    "sequence length,MicroBatchSize,global batch,iteration time (ms)\n"
)


def run_of(width, *, source="vtrain-single", layers=4, microbatch=1, step_ms=100.0, mesh=None, peak_bytes=0.0):
    model = f"gpt[width={width},layers={layers},microbatch={microbatch}]"
    typed = TypedPlan(model, "dgx-a100", report.typed_mesh(**(mesh or {"tp": 2})), 4)
    return TrainingRun(source, f"width {width}", f"gpt {width}", typed, step_ms * 1e6, peak_bytes)


def cells(lines, source, group):
    (line,) = [dict(zip(report.HEADER, line, strict=True)) for line in lines if line[:2] == [source, group]]
    return line


def test_misses_are_bold_and_a_set_with_constants_of_its_own_models_meets_no_goal():
    good, bad = run_of(1024, source="llm-foundry"), run_of(2048, source="llm-foundry")
    lines = report_lines([Prediction(good, 102e6, 0.0), Prediction(bad, 150e6, 0.0)], [])
    found = cells(lines, "llm-foundry", "gpt 1024")
    assert (found["mean %"], found["met"]) == ("2.0", "not tried")
    missed = cells(lines, "llm-foundry", "gpt 2048")
    assert missed["mean %"] == "**50.0**" and missed["met"] == "**no**" and missed["bias %"] == "+50.0"
    assert {line[3] for line in lines} == {report.HERE}


def test_constants_of_other_models_may_meet_a_goal():
    (line,) = [line for line in report_lines([Prediction(run_of(1024), 102e6, 0.0)], []) if line[1] == "all"]
    assert line[3] == report.OTHERS and line[10] == "yes"


def test_a_run_asks_for_the_factor_that_makes_its_simulation_right():
    pytest.importorskip("torch", reason="captures a model")
    run = run_of(1024)
    file = load_calibration(run.plan.cluster.kind.calibrated)
    exact = replace(run, step_ns=predict(run).step_ns)
    assert asked_step(exact).factor == pytest.approx(file.steps["bf16"], rel=2e-3)
    assert asked_step(replace(run, step_ns=1.1 * exact.step_ns)).factor > 1.1


def test_jobs_that_ran_and_are_said_not_to_fit_are_named(monkeypatch):
    runs = [run_of(width) for width in (1024, 2048, 4096)]
    found = iter([(SimpleNamespace(total=10 << 30),), (SimpleNamespace(total=90 << 30),), None])  # None: not on record
    monkeypatch.setattr(report, "reserved_bytes", lambda plan, known: next(found))
    lines, judged = report.too_large(runs)
    assert judged == 2 and lines == ["vtrain-single width 2048: 90.0 GiB, the board has 78.6"]


def test_a_set_without_fitted_constants_is_held_out_unless_rules_were_chosen_on_it():
    for source, label, met in (("vtrain-multi", "held out", "yes"), ("torchtitan", "rules chosen here", "not tried")):
        run = run_of(1024, source=source, peak_bytes=1e9)
        line = cells(report_lines([Prediction(run, 101e6, 0.8e9)], [run]), source, "all")
        assert (line["constants"], line["met"], line["control %"]) == (label, met, "none")
        assert line["memory %"] == "**20.0**"


def test_every_set_says_what_was_chosen_on_it():
    assert set(report.FITTED) == set(report.CONTROLS) == set(report.GOALS) == set(report.SETS)
    assert all(name in text for name, text in zip(report.SETS, report.notes(report.SETS), strict=True))


def test_a_constant_mfu_comes_from_other_models_on_the_same_machine():
    mine, other = run_of(1024), run_of(2048, step_ms=300)
    elsewhere = replace(other, typed=replace(other.typed, cluster="dgx-h100"), step_ns=1.0)
    flops = [run.plan.model.flops(run.plan.parameters) for run in (mine, other)]
    assert constant_mfu([mine], [mine, other, elsewhere]) == {0: pytest.approx(300e6 * flops[0] / flops[1])}
    assert constant_mfu([mine], [mine, elsewhere]) == {}


def test_the_formula_is_fitted_to_other_models_alone():
    drawn = [
        run_of(width, layers=layers, microbatch=microbatch, mesh=mesh)
        for width in (1024, 2048)
        for layers in (4, 8, 16)
        for microbatch in (1, 4)
        for mesh in ({"tp": 2}, {"tp": 4}, {"pp": 2}, {"dp_replicate": 2})
    ]
    runs = [replace(run, step_ns=ns) for run, ns in zip(drawn, formula_ns(drawn, START).tolist(), strict=True)]
    small, large = runs[: len(runs) // 2], runs[len(runs) // 2 :]
    assert formula_ns(small, fit_formula(small)) == pytest.approx([run.step_ns for run in small], rel=1e-3)
    broken = [replace(run, step_ns=9 * run.step_ns) for run in large]
    assert formula_left_out(large, small + large) == formula_left_out(large, small + broken)
    assert formula_left_out(small, small) == {}


def test_a_compiled_run_has_fused_kernels_and_no_late_host(data_dir):
    runs, refused = read_runs(data_dir, "torchtitan")
    assert not refused and [run.typed.software.fused for run in runs] == [False, True]
    assert [run.plan.parameters["norm"] for run in runs] == ["composed", "fused"]
    assert [run.plan.host.idle for run in runs] == [False, True]
    assert {run.plan.cluster.kind.watts for run in runs} == {500} and runs[0].peak_bytes > 80e9


TITAN = "model,gpus,gpu,dp_shard,tp,pp,cp,local_batch,global_batch,sequence,recompute,compile,float8,"
NEMO = "model,gpus,system,precision,global_batch,micro_batch,sequence,tp,pp,cp,vp,tokens_per_s_per_gpu\n"


def runs_of(folder, source, text):
    (folder / "training-runs").mkdir()
    (folder / "training-runs" / report.FILES[source]).write_text(text)
    return read_runs(folder, source)


def test_rows_that_cannot_be_simulated_say_why(tmp_path):
    rows = "llama2-7b,8,dgx-b200,fp8,128,1,4096,1,1,1,1,9\nunheard-of,8,dgx-h100,fp8,128,1,4096,1,1,1,1,9\n"
    assert runs_of(tmp_path, "megatron-bridge", NEMO + rows) == (
        [],
        [
            "megatron-bridge row 1: fp8 on dgx-b200 is not costed",
            "megatron-bridge row 2: the shape of unheard-of is not known",
        ],
    )


def test_a_published_row_takes_what_its_authors_state_elsewhere(tmp_path):
    pytest.importorskip("torch")  # the model of the row is built for the layers of its stages
    cells = {
        "source": report.AUTOMODEL, "model": "deepseek-v3", "gpu": "H100 SXM", "gpus": "256", "dp_shard": "64",
        "ep": "64", "pp": "4", "vp": "8", "microbatch": "1", "global_batch": "512", "sequence": "4096",
        "software": "NeMo AutoModel 26.02", "step_s": "8.18",
    }  # fmt: skip
    others = ("width", "layers", "heads", "kv_heads", "hidden", "vocabulary", "dp_replicate", "cp", "tp", "recompute",
              "sequence_parallel", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "memory_gb")  # fmt: skip
    text = ",".join([*cells, *others]) + "\n" + ",".join([*cells.values(), *[""] * len(others)]) + "\n"
    (run,), refused = runs_of(tmp_path, "published-plans", text)
    model = "deepseek-v3[length=4096,microbatch=1,recompute=full]"
    assert not refused and run.typed == TypedPlan(
        model, "dgx-h100", "pp=4,ep=64", 8, "interleaved", 8, framework="automodel[experts]", reshard="never"
    )
    assert run.step_ns == 8.18e9 and run.group == "NVIDIA-NeMo/Automodel docs/performance-summary: deepseek-v3"


def test_a_run_in_fp8_keeps_the_vocabulary_in_16_bit(tmp_path):
    row = "llama3.1-8b,8,h100,8,1,1,1,2,16,8192,selective,yes,yes,5762,82.4"
    (run,), refused = runs_of(tmp_path, "torchtitan", f"{TITAN}tokens_per_s_per_gpu,memory_gib\n{row}\n")
    assert not refused and run.typed.scales == Float8("dynamic", keep=128_256) and run.typed.software.fused


def test_replicas_of_a_nemo_run_share_the_update(tmp_path):
    pytest.importorskip("torch")  # the second row asks the model for the layers of each stage
    rows = "gpt3-20b,64,dgx-h100,fp8,256,2,2048,2,1,1,1,5851\nllama2-13b,16,dgx-h100,bf16,128,1,4096,1,4,1,10,8646\n"
    (first, second), _ = runs_of(tmp_path, "megatron-bridge", NEMO + rows)
    assert first.plan.ranks == 64 and first.plan.shares_of_update == 32 and first.plan.microbatches == 4
    assert first.plan.captured_mesh(0).inner == (("tp", 2),)  # the program is that of one replica
    assert first.typed.scales == Float8("delayed", 25_600, 4096) and second.typed.scales is None
    assert (second.plan.schedule, second.plan.stages_per_rank, second.plan.microbatches) == ("interleaved", 10, 32)
    three_products = 3 * first.plan.parameters["hidden"] / (2 * 4 * 6144)
    assert three_products == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize(
    "release, factor", [("nemo-24.05", 1), ("nemo-24.07", 1), ("nemo-24.09", 0.6), ("bridge-25.09", 0.6), ("", 0.6)]
)
def test_nemo_has_the_vendors_attention_after_july_2024(tmp_path, release, factor):
    row = f"gpt3-20b,64,dgx-h100,fp8,256,2,2048,2,1,1,1,5851,{release}\n"
    (run,), _ = runs_of(tmp_path, "megatron-bridge", NEMO.replace("gpu\n", "gpu,release\n") + row)
    assert run.typed.software.scale.get("attention", 1) == factor


@pytest.mark.slow
@pytest.mark.parametrize(
    "cells, framework, reshard",
    [
        ("7b,2048,128,a100_40gb,bf16,FULL_SHARD", "llm-foundry", "always"),
        ("7b,2048,8,a100_80gb,amp_bf16,FULL_SHARD", "llm-foundry[2023.10]", "always"),
        ("7b,2048,128,h100_80gb,amp_bf16,FULL_SHARD", "llm-foundry[2023.10,flash]", "always"),
        ("30b,2048,128,h100_80gb,amp_bf16,FULL_SHARD", "llm-foundry[2023.10]", "always"),
        ("1b,2048,128,h100_80gb,amp_bf16,SHARD_GRAD_OP", "llm-foundry[2023.10,flash]", "never"),
    ],
)
def test_llm_foundrys_rows_have_the_software_of_their_table(tmp_path, cells, framework, reshard):
    (tmp_path / "training-runs").mkdir()
    header = "Model,SeqLen (T),# GPUs,GPU,Precision,Sharding Strategy"
    (tmp_path / "training-runs" / "llm_foundry.csv").write_text(
        f"{header},MicroBatchSize,GradAccum,Throughput (T/s/GPU),Activation Checkpointing\n{cells},4,1,9000,True\n"
    )
    ((run,), refused) = read_runs(tmp_path, "llm-foundry")
    assert not refused and (run.typed.framework, run.typed.reshard) == (framework, reshard)


def test_the_one_node_times_are_composed(data_dir):
    """What the notes of this set claim: with all else equal, they are linear in the number of microbatches."""
    runs, _ = read_runs(data_dir, "vtrain-single")
    series = {}
    for run in runs:
        key = run.group, str(run.plan.mesh), run.plan.parameters["microbatch"]
        series.setdefault(key, []).append((run.plan.microbatches, run.step_ns))
    long = [np.array(sorted(points)) for points in series.values() if len(points) > 2]
    assert len(long) > 100
    for points in long:
        line = np.polyval(np.polyfit(*points.T, 1), points[:, 0])
        assert np.abs(line / points[:, 1] - 1).max() < 1e-11


@pytest.mark.parametrize(
    "rows, message",
    [
        (None, "No such file"),
        ("GPU numbers\n8\n", "column 'hidden size' is missing"),
        (HEADER + "2,1,1,2,wide,4,4,128,1,4,10\n", "row 1.*wide"),
    ],
)
def test_files_of_runs_are_checked(tmp_path, rows, message):
    (tmp_path / "training-runs").mkdir()
    if rows is not None:
        (tmp_path / "training-runs" / "vtrain_single.csv").write_text(rows)
    with pytest.raises(InvalidInput, match=message):
        read_runs(tmp_path, "vtrain-single")


def test_the_command_prints_simulation_control_and_notes(data_dir, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "training-runs").mkdir()
    for name in ("vtrain_single.csv", "torchtitan.csv"):
        shutil.copy(data_dir / "training-runs" / name, tmp_path / "training-runs" / name)
    monkeypatch.setattr(
        "sys.argv", ["simdev", "study", "training-runs", str(tmp_path), "--set", "vtrain-single", "--most", "1"]
    )
    try:
        cli.main()
    except SystemExit as stop:
        assert not stop.code
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if re.match(r"vtrain-single +all +1 ", line))
    assert "other models" in line and "none" not in line
    assert "fitted to the rows of the other two models" in printed and "held out: no constant and no rule" in printed


def test_an_unknown_set_is_named(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["simdev", "study", "training-runs", ".", "--set", "vtrain"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and "did you mean 'vtrain-" in capsys.readouterr().err


SMALL = HEADER + "2,1,1,2,256,2,4,256,1,4,30.0\n4,1,1,4,256,2,4,256,1,4,20.0\n"  # four sequences on 2 and 4 GPUs


@pytest.mark.slow
def test_search_beside_a_plan_that_ran(tmp_path, monkeypatch, capsys):
    """It sees the job and not the plan; rows in the table are kept, and a row that it chose is simulated."""
    pytest.importorskip("torch")
    (tmp_path / "training-runs").mkdir()
    (tmp_path / "training-runs" / "vtrain_single.csv").write_text(SMALL)
    table = tmp_path / "chosen.csv"
    kept = ["row 2", *"4abcdefghij", ""][: len(CHOSEN)]
    write_csv(table, CHOSEN, [dict(zip(CHOSEN, kept, strict=True))])
    command = ["study", "training-runs", str(tmp_path), "--set", "vtrain-single", "--search", "3", "--json"]
    monkeypatch.setattr("sys.argv", ["simdev", *command, "--table", str(table)])
    try:
        cli.main()
    except SystemExit as stop:
        assert not stop.code
    shown = capsys.readouterr()
    found, other = sorted(json.loads(shown.out)["rows"], key=lambda row: row["row"])
    assert other["plan that ran"] == "a" and "row 2" not in shown.err and "row 1" in shown.err
    (run,), _ = (read_runs(tmp_path, "vtrain-single")[0][:1], None)
    assert found["plan that ran"] == "tp=2 microbatch=1" and found["measured s"] == 0.03
    assert found["simulated s"] == pytest.approx(report.predict(run).step_ns / 1e9, abs=5e-4)
    assert found["plan of search"] == "dp_replicate=2 microbatch=2"  # no collective in a layer, and fewer kernels
    assert found["simulated s of search"] < found["simulated s"] and found["quicker %"] > 1
    assert found["differs"] == "dp_replicate 1 -> 2; tp 2 -> 1; microbatch 1 -> 2"
    assert found["left out of the simulation"] == f"{WIDER}; {LARGER}"
    rows = {line["row"]: line for _, line in read_csv(table, CHOSEN)}
    assert set(rows) == {"row 1", "row 2"} and rows["row 1"]["plan of search"] == found["plan of search"]


def printed_step_ns(typed):
    """What the command answers for the arguments of a row."""
    from typer.testing import CliRunner

    from simdev.cli.app import app

    done = CliRunner().invoke(app, ["simulate-plan", *typed.arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["step_ns"]


@pytest.mark.parametrize("source", report.SETS)
def test_a_row_of_each_set_is_what_the_command_prints(data_dir, source):
    """A row with few layers and microbatches; the test below takes all rows as they are."""
    pytest.importorskip("torch")
    runs = [run for run in read_runs(data_dir, source)[0] if run.plan.stages == 1]
    run = min(runs, key=lambda run: run.plan.microbatches * run.plan.parameters["width"])
    known = find_model(run.typed.model)[1]["layers"]
    few = run.typed.model.replace(f"layers={known},", "").replace("[", "[layers=3,")
    run = replace(run, typed=replace(run.typed, model=few, microbatches=min(2, run.typed.microbatches)))
    assert report.predict(run).step_ns == printed_step_ns(run.typed)


@pytest.mark.long
@pytest.mark.parametrize("source", report.SETS)
def test_every_row_is_what_the_command_prints(data_dir, source):
    pytest.importorskip("torch")
    predictions, _ = report.predict_all(read_runs(data_dir, source)[0])
    assert {p.run.name: p.step_ns for p in predictions} == {
        p.run.name: printed_step_ns(p.run.typed) for p in predictions
    }


@pytest.mark.slow
def test_the_errors_of_the_controls_are_those_of_the_data(data_dir, tmp_path, monkeypatch):
    """Pages show them beside the errors of simulations; --controls simulates nothing."""
    path = tmp_path / "controls.csv"
    monkeypatch.setattr("sys.argv", ["simdev", "study", "training-runs", str(data_dir), "--controls", str(path)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    kept = [line for _, line in read_csv(SHIPPED, report.CONTROL_TABLE)]
    made = [line for _, line in read_csv(path, report.CONTROL_TABLE)]
    assert [{**line, "error": ""} for line in made] == [{**line, "error": ""} for line in kept]
    for mine, other in zip(made, kept, strict=True):
        assert float(mine["error"]) == pytest.approx(float(other["error"]), abs=2e-3), mine["source"]


def test_a_table_of_controls_has_only_models_with_a_control(tmp_path):
    runs = [run_of(1024, source="llm-foundry"), run_of(2048, source="llm-foundry", step_ms=400.0)]
    report.write_controls(tmp_path / "controls.csv", [*runs, run_of(1024, source="torchtitan")])
    lines = [line for _, line in read_csv(tmp_path / "controls.csv", report.CONTROL_TABLE)]
    assert [(line["set"], line["source"], line["rows"]) for line in lines] == [
        ("llm-foundry", "gpt 1024", "1"),
        ("llm-foundry", "gpt 2048", "1"),
    ]
