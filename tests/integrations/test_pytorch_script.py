"""``simdev plan --write pytorch``: the script runs for real, and executes what was planned.

Weights are float64, so that losses agree to the last digits however the sums are divided."""

import importlib.util
import math
import subprocess
import sys

import pytest

from simdev.errors import Unsupported
from simdev.integrations.configs import find_writer
from simdev.parallel import Mesh
from simdev.planners import Choice
from simdev.planners.plan_file import make_job

pytest.importorskip("torch")
MODEL = """
import torch
from torch import nn
from simdev import TrainingStep

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def loss(model, x):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())

def make_step():
    model = Model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return TrainingStep(model, (torch.arange(16 * 8).view(16, 8) % 64,), loss, optimizer)
"""
BATCHES = {"arange", "remainder", "index"}  # the script's own: samples of a microbatch


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes the script of a plan beside the model; returns its path, the job and the choice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_model.py").write_text(MODEL, encoding="utf-8")

    def written(microbatch, recompute="none", reduce_each=False, **sizes):
        choice = Choice(Mesh(sizes), microbatch, recompute, reduce_each=reduce_each)
        job = make_job(f"{tmp_path}/my_model.py:make_step", "dgx-a100", 16, ranks=math.prod(sizes.values()))
        text = find_writer("pytorch")(job, choice)
        assert len(text.splitlines()) <= 120
        path = tmp_path / "train.py"
        path.write_text(text, encoding="utf-8")
        return path, job, choice

    yield written
    sys.modules.pop("my_model", None)


def losses(path, ranks):
    launcher = ["-m", "torch.distributed.run", "--standalone"]  # on a free port: other tests may run such a job, too
    command = [sys.executable, *launcher, "--nproc-per-node", str(ranks), path.name]
    for _ in range(2):  # gloo's threads may abort an interpreter that is leaving (pytorch/pytorch, pull request 179291)
        done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, timeout=300)
        if "SIGABRT" not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        {"microbatch": 4, "dp_shard": 2},
        {"microbatch": 2, "recompute": "full", "dp_shard": 2},
        {"microbatch": 2, "recompute": "selective", "reduce_each": True, "dp_shard": 2},
        {"microbatch": 2, "recompute": "full", "dp_replicate": 2, "dp_shard": 2},
    ],
    ids=str,
)
def test_losses_are_those_of_one_process(write, plan):
    one = losses(write(microbatch=16, dp_shard=1)[0], 1)
    path, job, _ = write(**plan)
    assert losses(path, job.ranks) == pytest.approx(one, rel=1e-11) and one[2] < one[1] < one[0]


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_the_script_executes_the_program_that_was_planned(write, recompute):
    """Two microbatches on two ranks, op by op, collectives included."""
    from simdev.parallel.capture.stage import capture_stage
    from simdev.parallel.capture.step import capture_step

    path, job, choice = write(4, recompute, dp_shard=2)
    spec = importlib.util.spec_from_file_location("written_script", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def make(mesh):
        parts = script.build()
        return lambda: script.train_step(*parts)

    program = capture_step(make, choice.mesh, "script", source=str(path))
    calls = [call for piece in program.pieces[0] for call in program.segments[piece.segment].calls]
    plan = job.plan(choice)
    stage = capture_stage(job.model, plan.parameters, choice.mesh, job.model.part(plan.parameters, job.layers))
    first, _, last, _ = stage.backward
    order = (stage.forward, first, stage.forward, last, stage.finish)
    planned = [(call.kind, call.signature, call.axes) for segment in order for call in segment.calls]
    done = [(call.kind, call.signature, call.axes) for call in calls if call.kind not in BATCHES]
    added = ("add_", "add_(f64[],f64[])->f64[]", ())  # the second microbatch's loss, to be printed
    done.remove(added)
    assert done == planned and any(axes == ("dp_shard",) for *_, axes in planned)


def test_apply_does_what_the_script_does(write):
    """On a fake process group of two ranks: the same wrapped modules and sharded sizes."""
    import simdev
    from simdev.parallel.capture.stage import fake_process_group

    path, _, choice = write(8, "full", dp_shard=2)
    spec = importlib.util.spec_from_file_location("written_script", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    import my_model

    with fake_process_group(choice.mesh, 0):
        theirs = script.build()[0]
        ours = my_model.Model().double()
        simdev.apply(ours, choice, device="cpu")
        shapes = [{name: tuple(p.to_local().shape) for name, p in model.named_parameters()} for model in (ours, theirs)]
        kinds = [[type(module).__name__ for module in model.modules()] for model in (ours, theirs)]
    assert shapes[0] == shapes[1] and kinds[0] == kinds[1]
    assert kinds[0].count("FSDPCheckpointWrapper") == 3 and kinds[0][0] == "FSDPModel"
    with pytest.raises(Unsupported, match="tp=2"):
        simdev.apply(my_model.Model(), Choice(Mesh({"tp": 2})))
