"""Plans run for real on two cores; their simulation adds up what was measured."""

import os

import numpy as np
import pytest

from simdev.errors import InvalidInput, SimdevError
from simdev.parallel import Cluster, Host, Plan, find_model, parse_mesh
from simdev.problem.topology import Device, DeviceKind, Link, Topology

pytest.importorskip("torch")
from simdev.measure.plans import collectives_of, execute_plan, serial, simulate_runs, write_report  # noqa: E402
from simdev.parallel.plan import capture_stages  # noqa: E402

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs Linux and two cores")
TINY = "small[width=32,layers=2,heads=2,vocabulary=64,length=16,microbatch=1]"
CORE = DeviceKind("core", 1 << 32, {"f32": 1e10}, 1e10)


def here():
    names = [f"cpu{core}" for core in CORES[:2]]
    return Topology("here", tuple(Device(name, CORE) for name in names), (Link(tuple(names), 10**9, 1000),))


@pytest.fixture(autouse=True)
def captures(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@two_cores
@pytest.mark.parametrize(
    "mesh, schedule, stages",
    [("dp_replicate=2", "1f1b", 1), ("dp_shard=2", "1f1b", 1), ("tp=2", "1f1b", 1), ("pp=2", "1f1b", 1)]
    + [("pp=2", "zero-bubble", 1)],
)
def test_a_plan_runs_for_real_and_is_simulated(mesh, schedule, stages):
    found = execute_plan(TINY, here(), parse_mesh(mesh), 2, schedule, stages, repeats=2)
    assert found["sequences"] == (4 if mesh.startswith("dp") else 2)
    assert found["measured_p10_ns"] <= found["measured_ns"] <= found["measured_p90_ns"]
    assert found["simulated_ns"] > 0 and found["error"] > -1
    assert found["amid_work_ns"] > 0 and found["added_ms"].keys() == found["collective_ms"].keys()


def runs_of(plan, programs, kernel_ns=1000.0, gap_ns=10.0, send_ns=500.0):
    """Every kernel takes ``kernel_ns``, Python ``gap_ns`` a call, each collective ``send_ns``."""
    from simdev.measure.execute.clock import Kernels
    from simdev.measure.execute.ranks import RankRuns

    calls = [c for p in programs for s in (p.forward, *p.backward, *p.split, p.finish) for c in s.calls]
    gap, scale = (dict.fromkeys(("forward", "backward", "finish"), value) for value in (gap_ns, 1.0))
    kernels = Kernels({c.signature: kernel_ns for c in calls}, gap, scale)
    table = dict.fromkeys(collectives_of(programs), send_ns)
    return RankRuns(np.array([1]), 1.0, dict.fromkeys(range(plan.mesh["pp"]), kernels), table, table)


@pytest.mark.parametrize("mesh", ["dp_shard=2", "tp=2"])
def test_a_rank_without_stages_takes_the_sum_of_its_calls(mesh):
    spec, parameters = find_model(TINY)
    plan = Plan(spec, parameters, Cluster("here", CORE, 2, 1, 1, 0, 0, 0), parse_mesh(mesh), 1, host=Host())
    programs = tuple(map(serial, capture_stages(plan)))
    (program,) = programs
    calls = [*program.forward.calls, *program.backward[program.ONLY].calls, *program.finish.calls]
    collectives = sum(call.is_collective for call in calls)
    expected = (len(calls) - collectives) * 1010 + collectives * 510
    report = simulate_runs(plan, programs, runs_of(plan, programs))
    assert collectives and expected <= report.step_ns <= expected + 4 * len(calls)  # hops of 1 ns between streams


def test_kernels_and_gaps_add_up_to_what_a_segment_takes_without_a_clock():
    from collections import Counter

    from simdev.measure.execute.clock import Samples, kernels_of

    quick, slow = Samples(), Samples()
    for samples, wall in ((quick, 500), (slow, 50)):
        samples.wall_ns, samples.kernel_ns = {(0, "forward"): [wall]}, {"a": [10, 30, 20]}
        samples.calls = {(0, "forward"): Counter({"a": 4, "": 1})}
    found = kernels_of(quick)
    assert found.ns == {"a": 20} and found.scale["forward"] == 1 and found.gap_ns["forward"] == (500 - 80) / 5
    found = kernels_of(slow)
    assert found.gap_ns["forward"] == 0 and found.scale["forward"] == 50 / 80
    quick.add(slow)
    assert quick.wall_ns == {(0, "forward"): [500, 50]} and len(quick.kernel_ns["a"]) == 6


@two_cores
def test_execute_mesh_prints_both_times(monkeypatch):
    from typer.testing import CliRunner

    import simdev.cli.main  # noqa: F401  (registers the commands)
    from simdev.cli.app import app

    monkeypatch.setattr("simdev.problem.topology.load_topology", lambda text: here())
    arguments = ["execute", TINY, "here", "--mesh", "tp=2"]
    done = CliRunner().invoke(app, [*arguments, "--microbatches", "2", "--repeats", "2"])
    assert done.exit_code == 0, done.output
    assert "small, tp=2, 1f1b, 2 microbatches" in done.output and "of it computing" in done.output
    refused = CliRunner().invoke(app, [*arguments, "--placer", "expert"])
    assert refused.exit_code and "no placement, placer or trace" in str(refused.exception)
    refused = CliRunner().invoke(app, ["execute", TINY, "here", "--microbatches", "2"])
    assert refused.exit_code and "need --mesh" in str(refused.exception)


def test_the_report_holds_every_plan_and_how_well_they_are_ordered(tmp_path):
    rows = [
        {"plan": name, "measured_ns": measured, "simulated_ns": simulated, "amid_work_ns": measured, "disturbed": 0.0}
        | {"error": simulated / measured - 1, "measured_compute_ns": 5 * 10**6, "simulated_compute_ns": 4 * 10**6}
        for name, measured, simulated in (("a", 100, 110), ("b", 200, 190), ("c", 300, 150))
    ]
    found = write_report(rows, tmp_path)
    assert found["mean error"] == pytest.approx((0.1 + 0.05 + 0.5) / 3)
    assert found["mean error with collectives amid work"] == 0
    assert found["Kendall's tau"] == pytest.approx(1 / 3) and found["regret"] == 0
    assert "| c | 0.0 (5.0) | 0.0 (4.0) | -50.0% | +0.0% | 0.0% |" in (tmp_path / "report.md").read_text()


@two_cores
def test_what_cannot_run_is_one_clear_error(monkeypatch):
    for mesh, words in (("dp_replicate=4", "between 2 and 2"), ("pp=1", "between 2 and 2")):
        with pytest.raises(InvalidInput, match=words):
            execute_plan(TINY, here(), parse_mesh(mesh))
    with pytest.raises(InvalidInput, match="leave a stage without work"):
        execute_plan(TINY, here(), parse_mesh("pp=2"), 2, "interleaved", 4)

    from simdev.measure.execute import ranks

    def broken(self):
        raise ValueError("broken step")

    monkeypatch.setattr(ranks._Steps, "run", broken)
    with pytest.raises(SimdevError, match="rank [01]: .*broken step"):
        execute_plan(TINY, here(), parse_mesh("dp_replicate=2"), repeats=1)


PLAIN = """
import torch
from torch import nn
from simdev.graphs.workload import TrainingStep

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(4)))

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))

def loss(model, tokens):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

def make_step():
    model = Model()
    return TrainingStep(model, (torch.arange(8).view(2, 4),), loss, torch.optim.SGD(model.parameters(), lr=0.1))
"""


def test_the_last_stage_of_a_plain_module_looks_no_arbitrary_tokens_up(tmp_path):
    """The stage runs the model's own code, with the embedding that it does not hold. PyTorch fills new tensors with the
    largest number here, which is no token."""
    import torch

    from simdev.measure.execute.clock import time_kernels

    (tmp_path / "my_model.py").write_text(PLAIN, encoding="utf-8")
    spec, parameters = find_model(f"{tmp_path}/my_model.py:make_step")
    plan = Plan(spec, parameters, Cluster("here", CORE, 2, 1, 1, 0, 0, 0), parse_mesh("pp=2"), 2, host=Host())
    torch.use_deterministic_algorithms(True)
    try:
        found = time_kernels(spec, dict(plan.parameters), plan.mesh, plan.parts[1], False, 1, warm_up=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert any("mm" in signature for signature in found.kernel_ns)


@two_cores
@pytest.mark.parametrize(
    "mesh, schedule, script", [("dp_shard=2", "1f1b", True), ("pp=2", "1f1b", True), ("pp=2", "zero-bubble", False)]
)
def test_the_script_of_a_plan_runs_beside_it(tmp_path, mesh, schedule, script):
    from simdev.integrations.configs import find_writer

    text = PLAIN.replace("model = Model()", "model = Model().double()")  # with or without data axes
    (tmp_path / "my_model.py").write_text(text, encoding="utf-8")
    model = f"{tmp_path}/my_model.py:make_step[microbatch=2]"
    found = execute_plan(model, here(), parse_mesh(mesh), 2, schedule, repeats=2, write=find_writer("pytorch"))
    if script:
        assert 0 < found["script_p10_ns"] <= found["script_ns"] <= found["script_p90_ns"]
    else:
        assert "zero-bubble" in found["no_script"] and "script_ns" not in found
    rows = [{"plan": "a", **found}, {"plan": "b", **found}]
    figures = write_report(rows, tmp_path)
    assert ("mean error against the scripts' steps" in figures) == script
    assert ("step of the script" in (tmp_path / "report.md").read_text()) == script


@two_cores
def test_plans_run_once_on_a_computer_that_stays_busy(monkeypatch):
    from simdev.measure import plans

    shares = iter([0.2, 0.01, 0.3, 0.2, 0.1, *[0.5] * 8])
    asked = []

    def executed(entry, topology, mesh, *_):
        asked.append(str(mesh))
        return {"disturbed": next(shares)}

    monkeypatch.setattr(plans, "execute_plan", executed)
    rows = list(plans.compare("small", here()))
    assert [row["disturbed"] for row in rows] == [0.01, 0.1, *[0.5] * 8]  # two tries, three tries, then one each
    assert len(asked) == 13 and len(rows) == len(plans.PLANS)


@two_cores
def test_the_command_runs_the_scripts_too(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    import simdev.cli.main  # noqa: F401  (registers the commands)
    from simdev.cli.app import app
    from simdev.integrations.configs import find_writer
    from simdev.measure import plans

    asked = []

    def executed(model, topology, mesh, microbatches, schedule, stages, repeats, write):
        asked.append((model, write))
        row = {"measured_ns": 200, "simulated_ns": 220, "amid_work_ns": 210, "error": 0.1, "disturbed": 0.0}
        row |= {"measured_compute_ns": 100, "simulated_compute_ns": 100, "model": "my_model.py:make_step"}
        return row | ({"no_script": "no schedule"} if schedule == "zero-bubble" else {"script_ns": 200})

    monkeypatch.setattr(plans, "execute_plan", executed)
    monkeypatch.setattr("simdev.problem.topology.load_topology", lambda text: here())
    command = ["study", "compare-plans", "here", "--model", "my_model.py:make_step", "-o", str(tmp_path / "plans")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert asked[0] == ("my_model.py:make_step[microbatch=2]", find_writer("pytorch"))
    assert len(asked) == len(plans.PLANS)
    report = (tmp_path / "plans" / "report.md").read_text(encoding="utf-8")
    assert "of the model `my_model.py:make_step`" in report
    assert report.count("| 0.0 | +10.0% |") == len(plans.PLANS) - 1 and "none: no schedule" in report
