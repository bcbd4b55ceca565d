"""``simdev plan``: the table, JSON, the configuration, and mistakes that are named."""

import json
import re

import pytest
from typer.testing import CliRunner

from simdev.cli.app import app

MODEL = "gpt-3.6b[width=256,layers=4,heads=4,length=256,vocabulary=1024]"


def run(*arguments):
    import simdev.cli.main  # noqa: F401  (registers the commands)

    return CliRunner().invoke(app, list(arguments))


def test_the_best_plans_and_a_configuration(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "run.sh"
    common = ["plan", MODEL, "dgx-a100", "--batch", "16", "--microbatch", "1", "--recompute", "none", "-j", "1"]
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
    chart = tmp_path / "plans.svg"
    text = run(*common, "--chart", str(chart))
    drawn = chart.read_text()
    assert f"<!-- {best['name']} -->" in drawn and f"<!-- {MODEL} on dgx-a100 -->" in drawn
    bars = drawn.count(" GiB -->") - 1  # besides the axis
    assert len(found["plans"]) <= bars <= min(20, found["simulated"])
    assert "tokens/s/GPU" in text.stdout and "What would help" in text.stdout
    assert best["name"] in text.stdout


@pytest.mark.parametrize(
    "more, message",
    [
        (["--planner", "megaton"], "megatron"),
        (["--write", "titan"], "torchtitan"),
        (["--microbatch", "two"], "--microbatch"),
        (["--microbatch", "0"], "--microbatch: expected whole numbers from 1 on, got '0'"),
        (["--tokens", "-1"], "--tokens: -1.0 is not positive"),
        (["--batch", "0"], "batch"),
        (["--framework", "fast"], "framework"),
        (["--recompute", "half"], "gpt knows none, selective, full, not 'half'"),
        (["--evaluations", "-3"], "--evaluations: expected a whole number from 1 on, got -3"),
        (["--top", "-1"], "--top: expected a whole number from 1 on, got -1"),
        (["--jobs", "0"], "--jobs: expected a whole number from 1 on, got 0"),
    ],
)
def test_mistakes_are_named(more, message):
    pytest.importorskip("torch")  # two of them are found after the first capture
    from simdev.errors import SimdevError

    done = run("plan", MODEL, "dgx-a100", *more)
    assert done.exit_code != 0
    assert isinstance(done.exception, SimdevError) and message in str(done.exception)


def test_a_job_that_divides_by_nothing_is_refused():
    pytest.importorskip("torch")
    from simdev.errors import SimdevError

    done = run("plan", MODEL, "dgx-a100", "--planner", "ddp", "--batch", "7")
    assert isinstance(done.exception, SimdevError) and "7 sequences" in str(done.exception)


def test_sizes_that_contradict_each_other_are_named():
    done = run("plan", "llama3-8b[heads=30]", "dgx-h100")
    assert "4096 does not divide by 30 heads" in str(done.exception)
    done = run("plan", "llama3-8b", "dgx-h100", "--batch", "7")
    # Without PyTorch, the plans that are packed have two microbatches of a sequence on each GPU.
    assert re.search(
        r"8 GPUs divides 7 sequences; pass a multiple of (2,.*--batch 8|16,.*--batch 16)", str(done.exception)
    )
    done = run("plan", MODEL, "dgx-a100[nodes=-1]")
    assert "nodes: expected a whole number from 1 to 1048576" in str(done.exception)


def test_times_have_the_digits_that_tell_them_apart():
    from simdev.cli.commands.plan import told_apart

    assert told_apart([58.061, 62.74]) == ["58.06", "62.74"]
    assert told_apart([0.2212, 0.2214, 0.2701]) == ["0.2212", "0.2214", "0.2701"]
    assert told_apart([0.22, 0.22]) == ["0.22", "0.22"]
