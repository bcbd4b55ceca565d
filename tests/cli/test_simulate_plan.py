import json

import pytest
from typer.testing import CliRunner

from simdev.cli.app import app

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
    names = {
        event["args"]["name"]
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["ph"] == "M" and "name" in event["args"]
    }
    assert {"rank 0 compute", "rank 0 dp_shard", "rank 1 compute"} <= names
    assert picture.read_text().startswith("<svg") and "F0.0" in picture.read_text()
    text = run(*arguments)
    assert "tokens/s/GPU" in text.output and "pipeline rank" in text.output


def test_a_pipeline_of_a_placement(tmp_path):
    done = run("simulate", "gpt2-medium", "p100x4", "--placer", "expert", "--pipeline", "4", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["microbatches"] == 4 and 0 <= found["bubble_fraction"] < 1
