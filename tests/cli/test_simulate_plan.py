"""``simdev simulate-plan`` and ``simdev plan``: figures, JSON, files, and mistakes that are named."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from simdev.cli.app import app
from simdev.errors import InvalidInput
from simdev.parallel.typed_plan import TypedPlan

MODEL = "llama3-8b[width=64,layers=4,heads=4,kv_heads=2,hidden=128,vocabulary=256,length=32]"


def run(*arguments):
    import simdev.cli.main  # noqa: F401  (registers the commands)

    return CliRunner().invoke(app, list(arguments))


def test_a_plan_prints_its_figures_and_writes_trace_and_picture(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trace, picture = tmp_path / "trace.json", tmp_path / "pipeline.svg"
    arguments = ["simulate-plan", MODEL, "dgx-h100", "--mesh", "dp_shard=2,pp=2", "--microbatches", "2"]
    done = run(*arguments, "--json", "--trace", str(trace), "--picture", str(picture))
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["ranks"] == 4 and found["step_ns"] > 0 and len(found["pipeline_ranks"]) == 2
    shares = found["pipeline_ranks"][1]["kernel_shares"]
    assert sum(shares.values()) == pytest.approx(1) and {"gemm", "attention", "norm"} <= {*shares}
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "M"]
    names = {(event["pid"], event["args"].get("name")) for event in events}
    assert {(0, "compute"), (0, "dp_shard"), (1, "compute"), (0, "host")} <= names
    assert any(process == 1 and (text or "").startswith("rank 1") for process, text in names)
    assert picture.read_text().startswith("<?xml") and "F0.0" in picture.read_text()
    text = run(*arguments)
    assert "tokens/s/GPU" in text.output and "pipeline rank" in text.output
    last = text.output.splitlines()[-1]
    assert re.fullmatch(r"kernels, rank [01] +\w+ \d+\.\d%(, \w+ \d+\.\d%)+", last), last


def test_stages_with_meshes_of_their_own(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = "gpt-3.6b[width=64,layers=3,heads=4,length=32,vocabulary=128,microbatch=2]"
    arguments = ["simulate-plan", model, "dgx-a100", "--mesh", "tp=2/1", "--microbatches", "4"]
    done = run(*arguments, "--layers", "2/1", "--recompute", "full/none", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["mesh"] == "tp=2 / 1 rank" and found["ranks"] == 3 and found["global_batch"] == 8


def test_the_recomputation_of_a_whole_job_is_a_parameter_of_its_model():
    typed = TypedPlan("gpt-3.6b", "dgx-a100", "tp=2", recompute="none").plan
    assert typed == TypedPlan("gpt-3.6b[recompute=none]", "dgx-a100", "tp=2").plan
    assert typed != TypedPlan("gpt-3.6b", "dgx-a100", "tp=2").plan
    with pytest.raises(InvalidInput, match="says how it recomputes"):
        _ = TypedPlan("gpt-3.6b[recompute=none]", "dgx-a100", "tp=2", recompute="full").plan


def test_a_pipeline_of_a_placement(tmp_path):
    done = run("simulate", "gpt2-medium", "p100x4", "--placer", "expert", "--pipeline", "4", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["microbatches"] == 4 and 0 <= found["bubble_fraction"] < 1


def test_a_pipeline_with_a_replicated_stage(tmp_path):
    from simdev.problem.graph import GraphBuilder
    from simdev.problem.graph_file import save_graph
    from simdev.problem.placement import Placement
    from simdev.problem.problem import Problem
    from simdev.problem.topology import load_topology

    builder = GraphBuilder("one")
    builder.op("matmul", "mm", outputs=[64], flops=10**10, layer="only")
    graph, placement = tmp_path / "one.npz", tmp_path / "placement.json"
    save_graph(builder.build(), graph)
    problem = Problem.build(builder.build(), load_topology("p100x2"))
    first, second = problem.topology.accelerators
    found = {}
    for name, original in (("alone", second), ("team", first)):
        replica_of = np.arange(problem.topology.n_devices, dtype=np.int32)
        replica_of[second] = original
        placement.write_text(Placement(np.array([first]), None, replica_of).to_json(problem))
        arguments = ["simulate", str(graph), "p100x2", "--placement", str(placement), "--pipeline", "8"]
        found[name] = json.loads(run(*arguments, "--json").stdout)
        text = run(*arguments).output
    assert found["alone"]["stage_devices"] == [["gpu0"]] and found["team"]["stage_devices"] == [["gpu0", "gpu1"]]
    assert found["team"]["total_ns"] * 2 == found["alone"]["total_ns"] and "stages gpu0 + gpu1" in text


def test_an_op_without_a_layer_that_spoils_the_pipeline_is_reported(tmp_path):
    from simdev.problem.graph import GraphBuilder
    from simdev.problem.graph_file import save_graph

    builder = GraphBuilder("masked")
    embedding = builder.outputs(builder.op("embedding", "mm", outputs=[64], flops=10, layer="first"))
    mask = builder.outputs(builder.op("mask", "mul", outputs=[64], flops=10))
    first = builder.op("first", "mm", inputs=embedding + mask, outputs=[1 << 20], flops=10**10, layer="first")
    builder.op("second", "mm", inputs=builder.outputs(first), outputs=[64], flops=10**10, layer="second")
    graph, placement = tmp_path / "masked.npz", tmp_path / "placement.json"
    save_graph(builder.build(), graph)
    places = {"embedding": "gpu0", "mask": "gpu1", "first": "gpu0", "second": "gpu1"}
    placement.write_text(json.dumps({"graph": "masked", "topology": "p100x2", "devices": places}))
    done = run("simulate", str(graph), "p100x2", "--placement", str(placement), "--pipeline", "8")
    assert done.exit_code == 0, done.output
    assert "warning: op 'mask' (no layer, forward) is on stage 1 (gpu1), but stage 0 (gpu0) reads it" in done.output


def test_plans_that_cannot_be_are_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    from simdev.cli import main as cli

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for options, words in (
        (["--mesh", "dp_shard=12"], "do not fill nodes"),
        (["--mesh", "tp=3,dp_shard=8"], "do not fill nodes|does not divide"),
        (["--mesh", "pp=8"], "leave a stage without work"),
        (["--mesh", "dp_shrad=8"], "mesh axis"),
        (["--mesh", "pp=2", "--schedule", "zbv"], "two stages"),
        (["--mesh", "pp=2", "--schedule", "zb"], "schedule"),
        (["--mesh", "pp=2", "--slowdown", "0.5"], "slowdown"),
        (["--mesh", "dp_shard=2/tp=2"], "do not divide among 2 replicas of stage 0"),
        (["--mesh", "pp=2", "--recompute", "full/none"], "expected a mesh for each"),
        (["--mesh", "tp=2/1", "--layers", "2/x"], "expected whole numbers with / between"),
        (["--mesh", "tp=2/1", "--layers", "2/1"], "do not spread 4 layers"),
    ):
        monkeypatch.setattr("sys.argv", ["simdev", "simulate-plan", MODEL, "dgx-h100", *options])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        shown = capsys.readouterr().err
        assert stop.value.code == 2 and re.search(words, shown), (options, shown)
        assert len(shown.strip().splitlines()) == 1


def test_linear_layers_in_fp8_make_a_step_of_large_products_shorter(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    large = "llama3-8b[width=4096,layers=2,vocabulary=256,length=4096]"
    times = {}
    for options in ([], ["--float8", "delayed"]):
        done = run(
            "simulate-plan", large, "dgx-h100", "--mesh", "dp_shard=2", "--framework", "compiled", "--json", *options
        )
        assert done.exit_code == 0, done.output
        times[bool(options)] = json.loads(done.output)["step_ns"]
    assert 0.5 < times[True] / times[False] < 0.95
    assert run("simulate-plan", MODEL, "dgx-h100", "--mesh", "tp=2", "--float8", "guessed").exit_code != 0


GPT = "gpt-3.6b[width=256,layers=4,heads=4,length=256,vocabulary=1024]"


def test_the_best_plans_and_a_configuration(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "run.sh"
    common = ["plan", GPT, "dgx-a100", "--batch", "16", "--microbatch", "1", "--recompute", "none", "-j", "1"]
    done = run(*common, "--json", "--price", "2", "--write", "megatron", "--out", str(out))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    best = found["plans"][0]
    assert found["ranks"] == 8 and found["simulated"] > 3
    assert all(row["step_time_s"] >= best["step_time_s"] for row in found["plans"])
    assert 0 < best["bound_s"] <= best["step_time_s"] and 0 < best["mfu"] < 1
    tokens = 3600 * best["tokens_per_s_per_gpu"]  # that one GPU processes for two dollars
    assert best["dollars_per_million_tokens"] == pytest.approx(2e6 / tokens) and found["plans"][1]["why"]
    sizes, written = best["plan"]["mesh"], out.read_text()
    assert f"--tensor-model-parallel-size {sizes.get('tp', 1)} " in written
    assert f"--pipeline-model-parallel-size {sizes.get('pp', 1)} " in written
    chart, mesh = tmp_path / "plans.svg", best["name"].split()[0]
    text = run(*common, "--chart", str(chart))
    drawn = chart.read_text()
    assert f"<!-- {mesh} -->" in drawn and f"<!-- {GPT} on dgx-a100: {mesh} is fastest, " in drawn
    meshes = {row["name"].split()[0] for row in found["plans"]}
    assert len(meshes) <= drawn.count(" GiB, microbatch=") <= found["simulated"]
    assert "tokens/s/GPU" in text.stdout and "What would help" in text.stdout
    assert best["name"] in text.stdout


SLOW = """
from simdev.parallel import Mesh
from simdev.planners import Choice, planner


@planner("slow", version=1, family="test", source="the tests")
def slow(job, *, rng, budget):
    return Choice(Mesh({"pp": 2, "dp_replicate": 4}), 1)
"""


@pytest.mark.parametrize("error", [KeyboardInterrupt, "lost"])
def test_a_proof_that_ends_early_keeps_the_best_plan(error, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from simdev.planners import PlanBudget
    from simdev.planners.evaluate import WorkersLost

    job = ["plan", GPT, "dgx-a100", "--batch", "16", "--microbatch", "1,2", "--recompute", "none", "-j", "1", "--json"]
    best = json.loads(run(*job, "--prove", "0").stdout)["plans"][0]
    evaluate = PlanBudget.evaluate_many

    def until_better(self, choices):
        found = evaluate(self, choices)
        if any(one.fits and one.time_ns / 1e9 == best["step_time_s"] for one in found):
            raise WorkersLost("a worker has ended") if error == "lost" else KeyboardInterrupt
        return found

    monkeypatch.setattr(PlanBudget, "evaluate_many", until_better)
    (tmp_path / "mine.py").write_text(SLOW)
    done = run(*job, "-p", f"{tmp_path}/mine.py:slow", "--prove", "0")
    found = json.loads(done.stdout)
    assert found["plans"][0]["name"] == best["name"] and "proof" not in found
    assert "nothing is proven of the best plan so far" in done.stderr


def test_it_is_proven_that_no_plan_is_quicker():
    pytest.importorskip("torch")
    job = ["plan", GPT, "dgx-a100", "--batch", "16", "--microbatch", "1,2", "--recompute", "none", "-j", "1"]
    proven, grid = (json.loads(run(*job, "--json", *more).stdout) for more in (["--prove", "0"], ["-p", "grid"]))
    assert proven["plans"][0]["step_time_s"] == grid["plans"][0]["step_time_s"] and "proof" not in grid
    assert proven["proof"]["plans"] == grid["simulated"] > proven["simulated"]
    rule = run(*job, "-p", "ddp", "--prove", "0.02", "--evaluations", "1").stdout
    assert re.search(r"Not proven: \d+ of the \d+ plans of this space may take more than 2% less time \(", rule)
    rule = run(*job, "-p", "ddp", "--prove", "0.02").stdout
    assert re.search(r"Proven: none of the \d+ plans of this space takes more than 2% less time \(", rule)


@pytest.mark.parametrize(
    "more, message",
    [
        (["--planner", "megaton"], "megatron"),
        (["--prove", "1"], "--prove: expected a share from 0 to less than 1, got 1"),
        (["--write", "titan"], "torchtitan"),
        (["--microbatch", "two"], "--microbatch"),
        (["--microbatch", "0"], "--microbatch: expected whole numbers from 1 on, got '0'"),
        (["--tokens", "-1"], "--tokens: -1.0 is not positive"),
        (["--batch", "0"], "batch"),
        (["--framework", "fast"], "framework"),
        (["--recompute", "half"], "gpt knows none, selective, full, not 'half'"),
        (["--recompute", "none,fulll"], "gpt knows none, selective, full, not 'fulll'"),
        (["--evaluations", "-3"], "--evaluations: expected a whole number from 1 on, got -3"),
        (["--top", "-1"], "--top: expected a whole number from 1 on, got -1"),
        (["--jobs", "0"], "--jobs: expected a whole number from 1 on, got 0"),
    ],
)
def test_mistakes_are_named(more, message):
    pytest.importorskip("torch")  # two of them are found after the first capture
    from simdev.errors import SimdevError

    done = run("plan", GPT, "dgx-a100", *more)
    assert done.exit_code != 0
    assert isinstance(done.exception, SimdevError) and message in str(done.exception)


@pytest.mark.parametrize(
    "command, remedy",
    [
        (["plan", "{}", "dgx-a100"], "pass --microbatch 4"),
        (["bench", "--planner", "ddp", "-w", "{}", "-t", "dgx-a100"], "leave it out"),
    ],
)
def test_what_planners_choose_is_no_parameter_of_their_model(command, remedy, tmp_path):
    """It would be ignored."""
    from simdev.errors import InvalidInput

    model = GPT.replace("[", "[microbatch=4,")
    done = run(*(word.format(model) for word in command), *(["-o", str(tmp_path)] if command[0] == "bench" else []))
    assert isinstance(done.exception, InvalidInput)
    assert str(done.exception) == f"{model}: microbatch: a planner chooses it; {remedy}"


def test_a_job_that_divides_by_nothing_is_refused():
    pytest.importorskip("torch")
    from simdev.errors import SimdevError

    done = run("plan", GPT, "dgx-a100", "--planner", "ddp", "--batch", "7")
    assert isinstance(done.exception, SimdevError) and "7 sequences" in str(done.exception)


def test_sizes_that_contradict_each_other_are_named():
    done = run("plan", "llama3-8b[heads=30]", "dgx-h100")
    assert "4096 does not divide by 30 heads" in str(done.exception)
    done = run("plan", "llama3-8b", "dgx-h100", "--batch", "7")
    # Without PyTorch, the plans that are packed have two microbatches of a sequence on each GPU.
    assert re.search(
        r"8 GPUs divides 7 sequences; pass a multiple of (2,.*--batch 8|16,.*--batch 16)", str(done.exception)
    )
    done = run("plan", GPT, "dgx-a100[nodes=-1]")
    assert "nodes: expected a whole number from 1 to 1048576" in str(done.exception)


TINY = """
import torch
from simdev import TrainingStep


def make_step():
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(2)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(64, 8))
    return TrainingStep(model, (torch.zeros(4, 64),), lambda model, x: model(x).square().mean(), torch.optim.SGD(
        model.parameters(), lr=0.1))
"""


def test_a_plain_module_is_planned_in_samples_and_gets_no_bad_advice(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "tiny.py").write_text(TINY)
    done = run("plan", f"{tmp_path}/tiny.py:make_step", "h200x4", "--batch", "32", "--planner", "ddp", "-j", "1")
    assert "samples/s/GPU" in done.output and "samples a day" in done.output and "tokens" not in done.output
    assert "fewer" not in done.output
    (seconds,) = re.findall(r"^dp_replicate=4\S*(?: \S+=\S+)* +(\d\.\d+) ", done.output, re.M)[:1]
    assert float(seconds) > 0 and len(seconds.lstrip("0.")) == 3  # a step of microseconds has three digits, too


def test_times_have_the_digits_that_tell_them_apart():
    from simdev.cli.commands.plan import told_apart

    assert told_apart([58.061, 62.74]) == ["58.06", "62.74"]
    assert told_apart([0.2212, 0.2214, 0.2701]) == ["0.2212", "0.2214", "0.2701"]
    assert told_apart([0.22, 0.22]) == ["0.22", "0.22"]
    assert told_apart([0.001638]) == ["0.00164"]


def test_small_throughputs_have_three_digits():
    from simdev.cli.commands.plan import _digits, _large

    assert [_digits(value) for value in (1.0652, 99.7, 8123.4)] == ["1.07", "100", "8,123"]
    assert [_large(value) for value in (2.5e9, 736_000.0)] == ["2.5 billion", "0.736 million"]
