"""Steps of a user's own, with each of PyTorch's parallel libraries, on tiny models."""

import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from simdev.cli import main as cli
from simdev.errors import InvalidInput, SimdevError
from simdev.parallel import load_cluster, parse_mesh

pytest.importorskip("torch")

STEPS = """
import torch
from torch import nn

WIDTH = 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (f(x).view(*x.shape[:2], -1, 16).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(*x.shape[:2], -1))
        return x + self.down(nn.functional.gelu(self.up(x)))


def blocks(count=2):
    return nn.Sequential(*[Block() for _ in range(count)])


def adam(model):
    return torch.optim.AdamW(model.parameters(), fused=True)


def trained(model, optimizer, run):
    def step():
        run().float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(mesh):
    model = blocks(4).to("cuda")
    group = mesh["dp_replicate"].get_group()
    model = nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.2)
    x = torch.randn(2, 8, WIDTH, device="cuda")
    return trained(model, adam(model), lambda: model(x))


def fsdp_tp(mesh):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with torch.device("meta"):
        model = blocks()
    columns, rows = dict.fromkeys("qkv", ColwiseParallel()), {"o": RowwiseParallel(), "down": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh["tp"], {**columns, **rows, "up": ColwiseParallel()})
        fully_shard(block, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    model.to_empty(device="cuda")
    x = torch.randn(2, 8, WIDTH, device="cuda")
    return trained(model, adam(model), lambda: model(x))


def own_mesh(mesh):
    from torch.distributed.device_mesh import init_device_mesh

    return fsdp_tp(init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp_shard", "tp")))


def launched(mesh):
    import os

    torch.distributed.init_process_group("nccl")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    assert (rank, ranks) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = nn.parallel.DistributedDataParallel(blocks(4).to("cuda"), bucket_cap_mb=0.2)
    x = torch.randn(2, 8, WIDTH, device="cuda")
    return trained(model, adam(model), lambda: model(x))


def norms(mesh):
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    with torch.device("meta"):
        model = nn.Sequential(nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH))
    parallelize_module(model, mesh["tp"], {"0": SequenceParallel(), "1": SequenceParallel()})
    model.to_empty(device="cuda")
    x = torch.randn(2, 8, WIDTH, device="cuda")
    return trained(model, adam(model), lambda: model(x))


def context(mesh):
    from torch.distributed.tensor.experimental import context_parallel

    model = blocks()
    optimizer = adam(model)

    def step():
        x = torch.randn(2, 32, WIDTH)
        with context_parallel(mesh["cp"], buffers=(x,), buffer_seq_dims=(1,)):
            model(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def experts(mesh):
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    group, ways = mesh["ep"].get_group(), mesh["ep"].size()
    model = blocks(1)
    expert = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW([*model.parameters(), *expert.parameters()], fused=True)

    def run():
        x = model(torch.randn(1, 8 * ways, WIDTH)).view(-1, WIDTH)
        y = expert(all_to_all_single_autograd(x, [8] * ways, [8] * ways, group))
        return all_to_all_single_autograd(y, [8] * ways, [8] * ways, group)

    return trained(model, optimizer, run)


def pipeline(mesh, kind="Schedule1F1B", chunks=1):
    from torch.distributed.pipelining import PipelineStage, schedules

    rank, ranks = mesh["pp"].get_local_rank(), mesh["pp"].size()
    models = nn.ModuleList([blocks(1) for _ in range(chunks)])
    optimizer = adam(models)
    group, device = mesh["pp"].get_group(), torch.device("cuda")
    stages = [PipelineStage(m, rank + i * ranks, chunks * ranks, device, group=group) for i, m in enumerate(models)]
    loss = lambda y, target: (y - target).pow(2).mean()
    schedule = getattr(schedules, kind)(stages if chunks > 1 else stages[0], n_microbatches=4, loss_fn=loss)
    x = torch.randn(8, 8, WIDTH)

    def step():
        if rank == 0:
            schedule.step(x)
        elif rank == ranks - 1:
            schedule.step(target=x)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    return step


def zero_bubble(mesh):
    return pipeline(mesh, "ScheduleInterleavedZeroBubble", 2)


def uneven_pipeline(mesh, microbatches=lambda rank: 4, more=0, idle=None):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, ranks = mesh["pp"].get_local_rank(), mesh["pp"].size()
    model = nn.Identity() if rank == idle else nn.Linear(WIDTH, WIDTH)
    stage = PipelineStage(model, rank, ranks + more, torch.device("cuda"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, microbatches(rank), loss_fn=lambda y, target: (y - target).pow(2).mean())
    x = torch.randn(8, WIDTH)
    return lambda: schedule.step(x) if rank == 0 else schedule.step(target=x) if rank == ranks - 1 else schedule.step()


def a_stage_too_many(mesh):
    return uneven_pipeline(mesh, more=1)


def an_idle_stage(mesh):
    return uneven_pipeline(mesh, idle=1)


def other_microbatches(mesh):
    return uneven_pipeline(mesh, microbatches=lambda rank: 4 * (rank + 1))


def exits(mesh):
    raise SystemExit(0)


def exits_late(mesh):
    return lambda: exits(mesh)


def swapped(mesh):
    import torch.distributed as dist

    groups = [mesh["tp"].get_group(), mesh["dp_shard"].get_group()]
    if dist.get_rank():
        groups.reverse()
    return lambda: [dist.all_reduce(torch.ones(8) * 2, group=group) for group in groups]


def half_an_axis(mesh):
    import torch.distributed as dist

    group = dist.new_group([0, 1])
    return lambda: dist.all_reduce(torch.ones(8), group=group)


def sends(mesh):
    import torch.distributed as dist

    return lambda: (torch.ones(8) + 1, dist.send(torch.ones(8), 1))


def fails(mesh):
    return lambda: torch.ones(2) @ torch.ones(3)


def first_fsdp(mesh):
    from torch.distributed.fsdp import FullyShardedDataParallel

    group = mesh["dp_shard"].get_group()
    model = blocks()
    for name, block in list(model.named_children()):
        setattr(model, name, FullyShardedDataParallel(block, process_group=group, device_id=torch.device("cpu")))
    x = torch.randn(2, 8, WIDTH)
    return trained(model, adam(model), lambda: model(x))


def fails_to_build(mesh):
    return mesh["tp"]


def no_step(mesh):
    return 3


def nothing(mesh):
    return lambda: None
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("steps") / "steps.py"
    path.write_text(STEPS)
    return path


@pytest.fixture(scope="module")
def captured(file):
    from simdev.parallel.capture.step import capture_step_file

    known = {}

    def capture(function, mesh):
        if (function, mesh) not in known:
            known[function, mesh] = capture_step_file(f"{file}:{function}", parse_mesh(mesh), batch=2, length=8)
        return known[function, mesh]

    return capture


def collectives(program, rank=0):
    calls = [call for piece in program.pieces[rank] for call in program.segments[piece.segment].calls]
    return Counter((call.kind, call.axes) for call in calls if call.is_collective)


def test_ddp_reduces_each_bucket_during_the_backward_pass(captured):
    program = captured("ddp", "dp_replicate=4")
    calls = program.segments[0].calls
    reduced = [n for n, call in enumerate(calls) if call.is_collective]
    assert collectives(program) == {("all_reduce", ("dp_replicate",)): len(reduced)} and len(reduced) > 2
    assert sum(calls[n].payload_bytes for n in reduced) == 4 * 4 * (4 + 8) * 64 * 64
    assert max(calls[n].payload_bytes for n in reduced) < 0.2 * 2**20 + 4 * 256 * 64
    assert any(call.kind == "mm" and call.in_backward for call in calls[reduced[0] : reduced[-1]])
    waiting = [n for n, call in enumerate(calls) if "dp_replicate" in dict(call.waits)]
    assert waiting[0] > reduced[-1]  # nothing waits before the end of the backward pass
    assert calls[waiting[-1]].kind == "copy_" and dict(calls[waiting[-1]].waits)["dp_replicate"] == 0


def test_fsdp_and_tensor_parallelism(captured):
    program = captured("fsdp_tp", "dp_shard=4,tp=2")
    found = collectives(program)
    assert found["reduce_scatter", ("dp_shard",)] == 2 and found["all_gather", ("dp_shard",)] == 4
    assert found["all_reduce", ("tp",)] == 2 * 2 + 4 + 1  # forward, and of inputs that need a gradient: not the first
    gathered = {c.payload_bytes for c in program.segments[0].calls if c.kind == "all_gather"}
    assert gathered == {4 * 12 * 64 * 64 // 2}


def test_a_step_may_build_its_own_mesh(captured):
    assert captured("own_mesh", "dp_shard=2,tp=2").segments == captured("fsdp_tp", "dp_shard=2,tp=2").segments


def test_a_step_may_make_its_own_process_group(captured):
    assert (
        captured("launched", "dp_replicate=4").segments[0].calls == captured("ddp", "dp_replicate=4").segments[0].calls
    )
    assert "RANK" not in os.environ


def test_the_first_fsdp_gathers_and_scatters(captured):
    found = collectives(captured("first_fsdp", "dp_shard=4"))
    assert found == {("all_gather", ("dp_shard",)): 2, ("reduce_scatter", ("dp_shard",)): 2}


def test_context_parallelism_exchanges_keys_and_values(captured):
    program = captured("context", "cp=4")
    assert {axes for _, axes in collectives(program)} == {("cp",)}
    kinds = Counter(call.kind for call in program.segments[0].calls)
    assert kinds["_scaled_dot_product_flash_attention"] == 2 * 4


def test_a_norm_is_one_kernel_each_way(captured):
    """On a part of the sequence, by a weight of which each rank has all."""
    calls = captured("norms", "tp=2").segments[0].calls
    found = [call.signature.split("->")[0] for call in calls if "norm" in call.kind]
    assert [text.split("(")[0] for text in found] == ["_fused_rms_norm"] * 2 + ["_fused_rms_norm_backward"] * 2
    assert all("(f32[2,8,64]," in text and "f32[64]" in text for text in found)


def test_expert_parallelism_exchanges_tokens(captured):
    assert collectives(captured("experts", "ep=4")) == {("all_to_all", ("ep",)): 4}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_pipeline_has_pytorchs_own_order(captured, ranks):
    from simdev.parallel.orders import pipeline_order

    program = captured("pipeline", f"pp={ranks}")
    order = tuple(tuple(p.action for p in pieces if p.action[0] != "U") for pieces in program.pieces)
    assert order == pipeline_order("1f1b", ranks, 4)
    sent = {piece.action: piece.sent_bytes for pieces in program.pieces for piece in pieces}
    assert sent["F", 0, 0] == sent["B", ranks - 1, 0] == 2 * 8 * 64 * 4
    assert sent["F", ranks - 1, 0] == sent["B", 0, 0] == 0


def test_a_zero_bubble_schedule_splits_backward_passes(captured):
    program = captured("zero_bubble", "pp=2")
    letters = Counter(piece.action[0] for pieces in program.pieces for piece in pieces)
    assert letters["F"] == letters["W"] == 16 and letters["I"] == 12  # stage 0 needs no gradient of its input


@pytest.mark.parametrize(
    "function, mesh, cluster",
    [
        ("ddp", "dp_replicate=4", "dgx-h100"),
        ("fsdp_tp", "dp_shard=4,tp=2", "dgx-h100"),
        ("context", "cp=4", "dgx-h100"),
        ("pipeline", "pp=4", "dgx-a100"),
        ("zero_bubble", "pp=2", "dgx-h100"),
    ],
)
def test_a_program_runs_folded_and_unfolded_alike(captured, function, mesh, cluster):
    from simdev.parallel.replay import ProgramPlan, simulate_rank_program

    plan = ProgramPlan(captured(function, mesh), load_cluster(cluster))
    report = simulate_rank_program(plan)
    assert simulate_rank_program(plan, unfolded=True).step_ns == report.step_ns
    assert simulate_rank_program(plan, engine="reference").step_ns == report.step_ns
    assert np.array_equal(
        report.compute_ns + report.exposed_ns + report.bubble_ns, [report.step_ns] * len(report.peak_bytes)
    )
    assert report.plan.sequences == 2 * plan.mesh.replicas and report.mfu > 0


def test_a_program_is_read_as_it_was_written(captured, tmp_path):
    from simdev.parallel.rank_program import load_rank_program, save_rank_program

    program = captured("pipeline", "pp=2")
    save_rank_program(program, tmp_path / "p.rank.json.gz")
    again = load_rank_program(tmp_path / "p.rank.json.gz")
    assert (again.segments, again.pieces, again.resident_bytes) == (
        program.segments,
        program.pieces,
        program.resident_bytes,
    )
    assert [c.live_bytes for c in again.segments[0].calls] == [c.live_bytes for c in program.segments[0].calls]


@pytest.mark.parametrize(
    "function, mesh, message",
    [
        ("fails", "tp=2", r"steps.py: line \d+, in <lambda>: the model was built, but running its step failed on tp=2"),
        (
            "fails_to_build",
            "dp_shard=2",
            r"line \d+, in fails_to_build: building the model failed on dp_shard=2: KeyError",
        ),
        ("no_step", "tp=2", "make_step returned int"),
        ("absent", "tp=2", "no such function"),
        ("nothing", "tp=2", "executes nothing"),
        ("half_an_axis", "tp=4", "all_reduce among 2 ranks .* is not along whole axes of tp=4"),
        ("sends", "tp=2", "sends to other ranks outside of torch.distributed.pipelining"),
        ("fsdp_tp", "dp_shard=2,tp=3", "building the model failed on dp_shard=2,tp=3|running its step failed"),
        ("exits", "tp=2", "building the model failed on tp=2: SystemExit: 0"),
        ("exits_late", "tp=2", "running its step failed on tp=2: SystemExit: 0"),
        ("swapped", "dp_shard=2,tp=2", "ranks 0 and 3 take communicators in different orders, and may wait for each"),
        ("a_stage_too_many", "pp=2", "of the 3 pipeline stages, stage 2 has no work on any rank"),
        ("an_idle_stage", "pp=3", "of the 3 pipeline stages, stage 1 has no work on any rank"),
        ("ddp", "data=2", "unknown mesh axis 'data'"),
        ("ddp", "dp_replicate=0", "expected a whole number from 1 on"),
    ],
)
def test_mistakes_are_one_sentence(file, tmp_path, monkeypatch, capsys, function, mesh, message):
    out = str(tmp_path / "p.rank.json.gz")
    monkeypatch.setattr("sys.argv", ["simdev", "capture", f"{file}:{function}", "--mesh", mesh, "--out", out])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capsys.readouterr().err
    assert stop.value.code == 2 and printed.count("\n") == 1
    assert re.search(message, printed), printed


def test_an_older_pytorch_captures_all_but_pipelines(file, monkeypatch):
    from torch.distributed.pipelining import PipelineStage

    from simdev.parallel.capture.step import capture_step_file

    monkeypatch.delattr(PipelineStage, "_warmup_forward_vote")  # as in PyTorch 2.9
    program = capture_step_file(f"{file}:ddp", parse_mesh("dp_replicate=2"), batch=2, length=8)
    assert collectives(program)["all_reduce", ("dp_replicate",)] > 1
    with pytest.raises(SimdevError, match="a stage of torch.distributed.pipelining is captured under PyTorch 2.13"):
        capture_step_file(f"{file}:pipeline", parse_mesh("pp=2"), batch=2, length=8)


def test_ranks_with_other_numbers_of_microbatches_wait_for_each_other(captured):
    from simdev.parallel.replay import ProgramPlan, simulate_rank_program

    plan = ProgramPlan(captured("other_microbatches", "pp=2"), load_cluster("dgx-h100"))
    words = "the pipeline ranks wait for each other: rank 1 at F1.4 waits for F0.4, which no rank executes"
    with pytest.raises(InvalidInput, match=words):
        simulate_rank_program(plan)


def test_a_program_has_its_own_mesh_and_has_to_fit(captured, tmp_path, monkeypatch, capsys):
    from simdev.parallel.rank_program import save_rank_program
    from simdev.parallel.replay import ProgramPlan

    path = str(tmp_path / "p.rank.json.gz")
    save_rank_program(captured("experts", "ep=4"), path)
    monkeypatch.setattr("sys.argv", ["simdev", "simulate-plan", path, "dgx-h100", "--mesh", "tp=2"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and "has its mesh" in capsys.readouterr().err
    with pytest.raises(InvalidInput, match="4 ranks, the cluster 16 accelerators"):
        ProgramPlan(captured("experts", "ep=4"), load_cluster("dgx-h100[nodes=2]"))


def test_the_step_of_the_docs_is_captured(tmp_path):
    from simdev.parallel.capture.step import capture_step_file

    page = (Path(__file__).parents[2] / "docs" / "pages" / "parallel.md").read_text()
    (tmp_path / "my_step.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    program = capture_step_file(f"{tmp_path}/my_step.py:make_step", parse_mesh("dp_shard=8,tp=8"))
    found = collectives(program)
    assert found["all_gather", ("dp_shard",)] == 2 * 4  # forward and backward
    assert found["all_reduce", ("tp",)] == 4 + 3


FIELDS = "num_hidden_layers=2,hidden_size=64,intermediate_size=192,num_attention_heads=4"
LLAMA = f"transformers:LlamaForCausalLM[{FIELDS},num_key_value_heads=2,head_dim=16,vocab_size=256]"


def test_a_model_of_transformers_brings_its_own_plan():
    pytest.importorskip("transformers")
    from simdev.parallel.capture.step import capture_package_step

    program = capture_package_step(LLAMA, parse_mesh("dp_shard=2,tp=2"), batch=2, length=16)
    found = collectives(program)
    # transformers shards each layer, the embedding, and norm and head together, which stay gathered
    assert found["all_gather", ("dp_shard",)] == 2 * (2 + 1) + 1 and found["reduce_scatter", ("dp_shard",)] == 2 + 2
    assert found["all_reduce", ("tp",)] >= 2 * 2 * 2  # after attention and feed-forward, in both directions
    signatures = {c.signature for c in program.segments[0].calls if c.kind in ("mm", "addmm")}
    assert any("[64,32]" in text for text in signatures) and not any("192" in text for text in signatures)


@pytest.mark.parametrize(
    "target, mesh, message",
    [
        (LLAMA, "cp=2", "cp: it is not parallelised along it"),
        (f"transformers:BertModel[{FIELDS}]", "tp=2", "BertModel brings no plan for it"),
        ("timm:resnet50", "dp_shard=2", "only models of transformers"),
    ],
)
def test_models_of_packages_that_cannot_be_spread(target, mesh, message):
    pytest.importorskip("transformers")
    from simdev.parallel.capture.step import capture_package_step

    with pytest.raises(InvalidInput, match=message):
        capture_package_step(target, parse_mesh(mesh))


TITAN = """
import importlib
from types import SimpleNamespace

import torch
from torchtitan.config.configs import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend

BACKEND = "partial_dtensor"


def make_step(mesh, name="llama3"):
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape))
    shard, tp = sizes.get("dp_shard", 1), sizes.get("tp", 1)
    degrees = dict(dp_replicate=1, dp_shard=shard, cp=1, tp=tp, pp=1, ep=1, world_size=shard * tp)
    dims = ParallelDims(**degrees, spmd_backend=BACKEND)
    set_spmd_backend(BACKEND)
    config = SimpleNamespace(
        parallelism=ParallelismConfig(
            data_parallel_shard_degree=shard, tensor_parallel_degree=tp, spmd_backend=BACKEND
        ),
        training=TrainingConfig(seq_len=256),
        compile=CompileConfig(enable=False),
        debug=SimpleNamespace(moe_force_load_balance=False),
    )
    spec = importlib.import_module(f"torchtitan.models.{name}").model_registry("debugmodel")
    spec.model.update_from_config(config=config)
    model = spec.model.build()
    spec.parallelize_fn(
        model, parallel_dims=dims, training=config.training, parallelism=config.parallelism,
        compile_config=config.compile, ac_config=None, dump_folder="",
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens, positions = torch.randint(0, 2048, (2, 256)), torch.arange(256).expand(2, 256)

    def step():
        logits = model(tokens, attention_masks=model.get_attention_masks(positions), positions=positions)
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def qwen3(mesh):
    return make_step(mesh, "qwen3")


def deepseek_v3(mesh):
    return make_step(mesh, "deepseek_v3")
"""


@pytest.mark.parametrize(
    "function",
    [pytest.param("make_step", marks=pytest.mark.slow)]
    + [pytest.param(name, marks=pytest.mark.long) for name in ("qwen3", "deepseek_v3")],
)
def test_models_of_torchtitan(tmp_path, function):
    """Their attention is FlexAttention, with a mask of documents that is computed from positions."""
    pytest.importorskip("torchtitan.distributed.parallel_dims")
    from simdev.parallel.capture.step import capture_step_file

    (tmp_path / "titan.py").write_text(TITAN)
    one, two = (
        capture_step_file(f"{tmp_path}/titan.py:{function}", parse_mesh(text)) for text in ("dp_shard=2", "tp=2")
    )
    calls = [call for segment in one.segments for call in segment.calls if "_scaled_dot_product" in call.kind]
    assert len(calls) > 1 and all("is_causal=True" in call.signature for call in calls)
    assert two.flops == pytest.approx(one.flops / 2, rel=0.03)  # half of the sequences; routers on all ranks
    assert {axes for _, axes in collectives(one)} == {("dp_shard",)}
    assert collectives(two)["all_reduce", ("tp",)] + collectives(two)["reduce_scatter", ("tp",)] > 4


@pytest.mark.slow
def test_the_default_of_torchtitan_is_refused_with_the_remedy(tmp_path):
    pytest.importorskip("torchtitan.distributed.parallel_dims")
    from simdev.parallel.capture.step import capture_step_file

    (tmp_path / "titan.py").write_text(TITAN.replace("partial_dtensor", "spmd_types"))
    with pytest.raises(InvalidInput, match="pass spmd_backend='partial_dtensor' to ParallelDims"):
        capture_step_file(f"{tmp_path}/titan.py:make_step", parse_mesh("dp_shard=2"))


def test_ranks_without_a_collective_are_refused(tmp_path):
    from simdev.parallel.capture.step import capture_step_file

    (tmp_path / "alone.py").write_text(
        "import torch\n"
        "def make_step(mesh):\n"
        "    model = torch.nn.Linear(8, 8)\n"
        "    return lambda: model(torch.ones(2, 8)).sum().backward()\n"
    )
    with pytest.raises(InvalidInput, match=r"alone.py: no rank calls a collective.*fully_shard"):
        capture_step_file(f"{tmp_path}/alone.py:make_step", parse_mesh("dp_replicate=8"))
    assert capture_step_file(f"{tmp_path}/alone.py:make_step", parse_mesh("dp_replicate=1")).flops > 0


def test_integers_are_counted_as_an_accelerator_does():
    torch = pytest.importorskip("torch")
    from simdev.parallel.capture.libraries import Chunks, recordable

    with recordable(Chunks()):
        found = torch.histc(torch.tensor([0, 1, 1, 3]), bins=4, min=0, max=3)
    assert found.dtype == torch.int64 and found.tolist() == [1, 2, 0, 1]
    with pytest.raises(RuntimeError):
        torch.histc(torch.tensor([0, 1]), bins=2, min=0, max=1)


@pytest.mark.parametrize("known", [True, False], ids=["decomposed by PyTorch", "as in PyTorch 2.9"])
def test_a_norm_computes_what_its_parts_compute(known, monkeypatch):
    torch = pytest.importorskip("torch")
    from torch._decomp import decomposition_table

    from simdev.graphs.capture.rewrites import fused_norms

    if not known:
        monkeypatch.delitem(decomposition_table, torch.ops.aten._fused_rms_norm.default, raising=False)

    def run():
        x, weight = (torch.linspace(-2, 3, 12).view(3, 4).requires_grad_(), torch.linspace(1, 2, 4).requires_grad_())
        y = torch.nn.functional.rms_norm(x, (4,), weight, 1e-5)
        y.square().sum().backward()
        return y.grad_fn.name(), y.detach(), x.grad, weight.grad

    apart = run()
    with fused_norms():
        name, *whole = run()
    assert (apart[0], name) == ("MulBackward0", "FusedRmsNormBackward0") and run()[0] == "MulBackward0"
    for one, other in zip(whole, apart[1:], strict=True):
        torch.testing.assert_close(one, other)
