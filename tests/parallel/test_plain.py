"""A plain module without parallel code: its blocks are found, sharded, recomputed."""

import pytest

from simdev.errors import InvalidInput
from simdev.parallel import Plan, find_model, load_cluster, parse_mesh, simulate_plan
from simdev.parallel.capture.stage import capture_stage

PLAIN = """
import torch
from torch import nn
from simdev import TrainingStep

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(512, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(64, 512, bias=False)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def loss(model, x):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())

def make_step():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return TrainingStep(model, (torch.zeros(4, 32, dtype=torch.int64),), loss, optimizer)

def nothing():
    return 3
"""
BLOCK = 2 * 64 + 2 * 64 * 256 + 256 + 64
PARAMETERS = 6 * BLOCK + 2 * 512 * 64


@pytest.fixture
def entry(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "my_model.py").write_text(PLAIN, encoding="utf-8")
    return f"{tmp_path}/my_model.py:make_step"


def captured(entry, mesh):
    model, parameters = find_model(entry)
    return capture_stage(model, parameters, parse_mesh(mesh), model.part(parameters, parameters["layers"]))


def count(program, kind):
    return sum(call.kind == kind for call in (*program.forward.calls, *program.backward[2].calls))


def test_blocks_and_the_rest_are_sharded(entry):
    program = captured(entry, "dp_shard=2")
    assert program.parameters == PARAMETERS // 2
    assert program.resident_bytes == PARAMETERS // 2 * 8  # SGD keeps the momentum
    assert count(program, "all_gather") == 2 * 6 + 1 and count(program, "reduce_scatter") == 6 + 1


def test_parameters_may_stay_gathered(entry):
    assert count(captured(f"{entry}[reshard_after_forward=false]", "dp_shard=2"), "all_gather") == 6 + 1


def test_replicas_reduce_gradients(entry):
    program = captured(entry, "dp_replicate=2")
    assert program.parameters == PARAMETERS and count(program, "all_reduce") == 6 + 1


def test_blocks_are_recomputed(entry):
    kept, again = captured(entry, "dp_shard=2"), captured(f"{entry}[recompute=full]", "dp_shard=2")
    assert again.forward.live_bytes < kept.forward.live_bytes
    assert count(again, "addmm") == count(kept, "addmm") + 6  # the block's last product is not needed again


def test_a_plan_and_its_figures(entry):
    model, parameters = find_model(f"{entry}[length=32]")
    tokens = 32
    assert model.flops(parameters) == 6 * tokens * (6 * 2 * 64 * 256 + 512 * 64)
    report = simulate_plan(Plan(model, parameters, load_cluster("dgx-h100"), parse_mesh("dp_shard=8")))
    assert report.fits and report.step_ns > 0
    assert any("no pipeline" in note for note in model.notes)


def test_what_is_no_training_step_is_named(entry):
    with pytest.raises(InvalidInput, match="expected a TrainingStep, got int"):
        find_model(entry.replace("make_step", "nothing"))
    with pytest.raises(InvalidInput, match="no such function"):
        find_model(entry.replace("make_step", "missing"))
