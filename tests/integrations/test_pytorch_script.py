"""``simdev plan --write pytorch``: the script runs for real, and executes what was planned.

Weights are float64, so that losses agree to the last digits however the sums are divided."""

import contextlib
import importlib
import importlib.util
import inspect
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from simdev.errors import Unsupported
from simdev.integrations.configs import find_writer
from simdev.integrations.configs.pytorch.pieces import SCHEDULES
from simdev.integrations.configs.settings import Settings, settings_of
from simdev.parallel import Mesh
from simdev.parallel.orders import SCHEDULES as ORDERS
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
        self.blocks = nn.ModuleList(Block() for _ in range(4))
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
SIZES = (
    "num_hidden_layers=2,hidden_size=32,head_dim=8,num_attention_heads=4,num_key_value_heads=4,vocab_size=64,length=8"
)
LLAMA = f"transformers:LlamaForCausalLM[{SIZES},intermediate_size=64]"
MIXTRAL = f"transformers:MixtralForCausalLM[{SIZES},intermediate_size=32,num_local_experts=4]"
DRIVER = """
import os, runpy, sys
import torch.distributed as dist
dist.init_process_group()
dist.init_process_group = end = lambda: None
dist.destroy_process_group, end = end, dist.destroy_process_group
for path in sys.argv[1:]:
    print("script", path, flush=True)
    runpy.run_path(path, run_name="__main__")
end()
sys.stdout.flush()
os._exit(0)  # PyTorch's caches keep groups, whose threads may abort an interpreter that ends before them
"""

KEPT = """
from torch.distributed.pipelining.stage import _PipelineStageBase as stages
clear = stages.clear_runtime_states

def clear_and_tell(stage):
    rows = *stage.args_recv_info.values(), *stage.grad_recv_info.values()
    held = sum(info.buffer.nbytes for row in rows for info in row if info.buffer is not None)
    print("kept", stage.stage_index, held, flush=True)
    clear(stage)

stages.clear_runtime_states = clear_and_tell
"""


def most_lines(model, choice):
    """How long a script may be: the stages of a plain module's pipeline run the module's own code."""
    return 90 if choice.mesh["pp"] == 1 and not model.startswith("transformers:") else 120


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes the script of a plan beside the model; returns its path, the job and the choice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_model.py").write_text(MODEL, encoding="utf-8")

    def written(
        microbatch, recompute="none", reduce_each=False, model="", schedule="1f1b", stages_per_rank=1, reshard="always",
        framework="eager", **sizes,
    ):  # fmt: skip
        times = {"reduce_each": reduce_each, "reshard": reshard}
        choice = Choice(Mesh(sizes), microbatch, recompute, schedule, stages_per_rank, **times)
        ids = model or f"{tmp_path}/my_model.py:make_step", "dgx-a100"
        job = make_job(*ids, 16, framework, ranks=math.prod(sizes.values()))
        text = find_writer("pytorch")(job, choice)
        assert len(text.splitlines()) <= most_lines(model, choice)
        assert max(len(line) for line in text.splitlines() if not line.startswith("# ")) <= 120
        path = tmp_path / f"train{len(list(tmp_path.glob('train*.py')))}.py"
        path.write_text(text, encoding="utf-8")
        return path, job, choice

    yield written
    sys.modules.pop("my_model", None)


def losses(paths, ranks):
    """The losses that each script prints, all in one job of ``ranks`` processes, which import PyTorch once."""
    return [
        [float(line.partition("loss ")[2].partition(",")[0]) for line in lines if "loss" in line]
        for lines in printed_by(paths, ranks)
    ]


def printed_by(paths, ranks, first=""):
    """The lines that each script prints, rank by rank, in a job that runs the code ``first`` and then the scripts."""
    driver = paths[0].with_name("driver.py")
    driver.write_text(first + DRIVER, encoding="utf-8")
    logs = driver.with_name("logs")  # a file for each rank: the ranks' lines would mix in one pipe
    shutil.rmtree(logs, ignore_errors=True)
    launcher = ["-m", "torch.distributed.run", "--standalone"]  # on a free port: other tests may run such a job, too
    launcher += ["--redirects", "1", "--log-dir", logs.name, "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, driver.name, *(path.name for path in paths)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=driver.parent, capture_output=True, text=True, timeout=3600, env=variables)
    printed = [path.read_text(encoding="utf-8") for path in sorted(logs.rglob("stdout.log"))]
    assert done.returncode == 0, "\n".join([*(text[-2000:] for text in printed), done.stderr[-6000:]])
    assert len(printed) == ranks
    found: dict[str, list[str]] = {path.name: [] for path in paths}
    for line in "".join(printed).splitlines():
        if line.startswith("script "):
            lines = found[line.removeprefix("script ")]
        else:
            lines.append(line)
    return [found[path.name] for path in paths]


@pytest.mark.slow
def test_a_pipeline_keeps_the_buffers_that_its_plan_counts(write):
    """What each stage of PyTorch's pipeline still holds of a step, when the next one begins."""
    from simdev.parallel.plan import prepare, received_bytes

    written = [
        write(microbatch=4, pp=2),
        write(microbatch=2, pp=2, schedule="interleaved", stages_per_rank=2),
    ]
    for (_, job, choice), lines in zip(written, printed_by([path for path, *_ in written], 2, KEPT), strict=True):
        made = job.plan(choice)
        program = prepare(made)
        found = {line for line in lines if line.startswith("kept")}
        counted = [made.microbatches * sum(received_bytes(program, stage)) for stage in range(made.stages)]
        assert found - {f"kept {stage} 0" for stage in range(made.stages)} == {
            f"kept {stage} {size}" for stage, size in enumerate(counted)
        }


@pytest.mark.long
def test_losses_are_those_of_one_process(write):
    """Data parallelism, sharded or not, tensor parallelism and pipelines, with accumulation and recomputation."""
    one = write(microbatch=16, dp_shard=1)[0]
    two = [
        write(microbatch=4, dp_replicate=2)[0],
        write(microbatch=4, tp=2)[0],
        write(microbatch=4, dp_shard=2)[0],
        write(microbatch=2, recompute="full", dp_shard=2)[0],
        write(microbatch=2, recompute="selective", reduce_each=True, dp_shard=2)[0],
        write(microbatch=4, pp=2)[0],
        write(microbatch=2, schedule="interleaved", stages_per_rank=2, pp=2)[0],
    ]
    four = [
        write(microbatch=2, recompute="full", dp_replicate=2, dp_shard=2)[0],
        write(microbatch=2, recompute="full", dp_shard=2, tp=2)[0],
        write(microbatch=4, dp_replicate=2, tp=2)[0],
        write(microbatch=2, pp=2, dp_shard=2)[0],
        write(microbatch=2, recompute="selective", pp=2, dp_replicate=2)[0],
        write(microbatch=2, recompute="full", schedule="gpipe", pp=2, tp=2)[0],
    ]
    (expected,) = losses([one], 1)
    assert expected[2] < expected[1] < expected[0]
    for found in losses(two, 2) + losses(four, 4):
        assert found == pytest.approx(expected, rel=1e-11)


@pytest.mark.slow
def test_recomputed_dropout_is_the_same_dropout(write, tmp_path):
    """The second loss follows from the gradients of the first step."""
    import torch

    code = MODEL.replace("torch.relu(self.up(self.norm(x)))", "nn.functional.dropout(self.up(self.norm(x)), 0.5)")
    (tmp_path / "dropping.py").write_text(code, encoding="utf-8")
    model, found = f"{tmp_path}/dropping.py:make_step", []
    for recompute in ("none", "full", "selective"):
        path = write(8, recompute, model=model, dp_shard=1)[0]
        with fake_ranks(1, 0):
            script = script_of(path)
            parts = script.build()
            torch.manual_seed(1)
            found.append([script.train_step(*parts).item() for _ in range(2)])
    assert found[1] == pytest.approx(found[0], rel=1e-11) and found[2] == pytest.approx(found[0], rel=1e-11)


DEEPER = LLAMA.replace("layers=2", "layers=4")
SPREAD = [
    (MIXTRAL, {"microbatch": 4, "dp_shard": 2, "ep": 2}),
    (MIXTRAL, {"microbatch": 4, "ep": 2, "tp": 2}),
    (MIXTRAL, {"microbatch": 4, "pp": 2, "ep": 2}),
    (LLAMA, {"microbatch": 2, "recompute": "full", "dp_shard": 2, "tp": 2}),
    (LLAMA, {"microbatch": 2, "recompute": "selective", "pp": 2, "dp_shard": 2}),
]
SPREAD_OTHERWISE = [
    (MIXTRAL, {"microbatch": 4, "ep": 2}),
    (MIXTRAL, {"microbatch": 2, "dp_replicate": 2, "ep": 2}),
    (LLAMA, {"microbatch": 4, "dp_replicate": 2, "dp_shard": 2}),
    (LLAMA, {"microbatch": 4, "dp_replicate": 2, "tp": 2}),
    (LLAMA, {"microbatch": 4, "schedule": "gpipe", "pp": 2, "dp_replicate": 2}),
    (DEEPER, {"microbatch": 2, "schedule": "interleaved", "stages_per_rank": 2, "pp": 2, "dp_shard": 2}),
]


@pytest.mark.long
@pytest.mark.parametrize("plans", [SPREAD, SPREAD_OTHERWISE], ids=["few", "others"])
def test_losses_of_transformers_models_are_those_of_one_process(write, plans):
    """Tensor, expert and pipeline parallelism beside sharding, in float32: the scripts with one line changed."""
    pytest.importorskip("transformers")

    def float32(model, plan):
        path, job, _ = write(model=model, **plan)
        text, changed = re.subn(
            r"(STORED, COMPUTED =) [^ ]+ [^ ]+", r"\1 torch.float32, torch.float32", path.read_text()
        )
        assert changed == 1
        path.write_text(text, encoding="utf-8")
        return path, job.ranks

    models = list(dict.fromkeys(model for model, _ in plans))
    one = losses([float32(model, {"microbatch": 16, "dp_shard": 1})[0] for model in models], 1)
    assert all(found[2] < found[1] < found[0] for found in one)
    expected, scripts = dict(zip(models, one, strict=True)), [(model, *float32(model, plan)) for model, plan in plans]
    for ranks in sorted({ranks for *_, ranks in scripts}):
        mine = [(model, path) for model, path, needed in scripts if needed == ranks]
        for (model, _), found in zip(mine, losses([path for _, path in mine], ranks), strict=True):
            assert found == pytest.approx(expected[model], rel=1e-6)


def script_of(path):
    spec = importlib.util.spec_from_file_location("written_script", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def calls_of(path, choice):
    """What each pipeline rank executes in a step of the script: kind, signature and axes of each call."""
    from simdev.parallel.capture.packages import unpacked
    from simdev.parallel.capture.step import capture_step

    script = script_of(path)

    def make(mesh):
        parts = script.build()
        return lambda: script.train_step(*parts)

    with unpacked():
        program = capture_step(make, choice.mesh, "script", source=str(path))
    found = []
    for pieces in program.pieces:
        calls = [call for piece in pieces for call in program.segments[piece.segment].calls]
        shown = [(call.kind, call.signature, call.axes) for call in calls]
        # the script also adds the losses of microbatches in order to print them
        sums = {f"{name}({kind}[],{kind}[])->{kind}[]" for name in ("add", "add_") for kind in ("f64", "f32")}
        found.append([call for call in shown if call[1] not in sums])
    return found


def planned_calls(job, choice):
    """The same of the plan, in the order of its schedule."""
    from simdev.parallel.orders import pipeline_order
    from simdev.parallel.plan import capture_stages

    plan = job.plan(choice, any_precision=True)
    stages = capture_stages(plan)
    found = []
    for actions in pipeline_order(plan.schedule, choice.mesh["pp"], plan.microbatches, plan.stages_per_rank):
        passes = {}
        for what, stage, _ in actions:
            passes[stage] = passes.get(stage, "") + what
        names = {stage: iter(stages[stage].named(order)) for stage, order in passes.items()}
        calls = [call for _, stage, _ in actions for call in stages[stage].passes[next(names[stage])].calls]
        calls += [call for stage in passes for call in stages[stage].finish.calls]
        found.append([(call.kind, call.signature, call.axes) for call in calls])
    return found


@contextlib.contextmanager
def fake_ranks(ranks, rank):
    """A fake process group, of which this process is ``rank``."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from simdev.parallel.capture.stage import forget_meshes

    forget_meshes()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def read_script(path, job):
    """The settings that a script has, and the parameters of its whole model: from what ``build`` makes on the first
    rank of each stage."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed._composable_state import _get_module_state

    script, meshes, counted, make_mesh = script_of(path), [], 0, dist.init_device_mesh

    def noted(*given, **named):
        meshes.append(make_mesh(*given, **named))
        return meshes[-1]

    ranks, pp = math.prod(script.MESH.values()), script.MESH.get("pp", 1)
    layers = [0] * len(getattr(script, "STAGES", ()))
    for stage in range(pp):
        meshes.clear()
        with fake_ranks(ranks, stage * ranks // pp), pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "init_device_mesh", noted)
            built = script.build()
            stages = built[1] if pp > 1 else []
            models = [one.step.model if hasattr(one, "step") else one.model for one in stages] or [built[0]]
            counted += sum(p.numel() for model in models for p in model.parameters() if not p.is_meta)
        for number, model in enumerate(models if pp > 1 else ()):
            layers[stage + number * pp] = len(next(m for m in model.modules() if isinstance(m, nn.ModuleList)))
    sizes = dict(zip(meshes[0].mesh_dim_names, meshes[0].shape, strict=True))
    if "fsdp" in sizes:  # the names of transformers, whose experts have a mesh of their own
        tp, shards = sizes["tp"], sizes.pop("fsdp")
        sizes["ep"] = max(1, meshes[1].size(3) // tp) if len(meshes) > 1 else 1
        sizes["dp_shard"] = shards // sizes["ep"]
        assert tuple(built[-1].shape) == (script.MICROBATCH * script.MICROBATCHES, script.LENGTH)
    mesh = Mesh({axis: size for axis, size in sizes.items() if size > 1})
    model = models[0]
    state = _get_module_state(model)
    assert (state is not None) == (mesh.replicas > 1)
    stored = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    computes = state and state._mp_policy.param_dtype
    precision = "mixed" if stored == {"float32"} and str(computes) == "torch.bfloat16" else stored.pop()
    compiled = [m._compiled_call_impl is not None for m in model.modules()]
    wraps = any("Checkpoint" in type(m).__name__ for m in model.modules())
    wraps |= any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    names = {one: name for name, one in SCHEDULES.items()}
    several = pp == 1 and mesh.replicas > 1 and script.MICROBATCHES > 1
    return Settings(
        ranks, mesh, script.MICROBATCH * script.MICROBATCHES * mesh.replicas, job.parameters["length"],
        script.MICROBATCH, built[0]._n_microbatches if pp > 1 else script.MICROBATCHES,
        names[type(built[0]).__name__] if pp > 1 else "", tuple(layers),
        ("selective" if hasattr(script, "kept_results") else "full") if wraps else "none",
        several and "last" not in inspect.unwrap(script.train_step).__code__.co_varnames, precision,
        compiled=any(compiled), gathered="set_reshard_after_backward(" in path.read_text(encoding="utf-8"),
    ), counted  # fmt: skip


@pytest.mark.slow
def test_two_hundred_scripts_say_their_plans(write, tmp_path):
    """Of plans drawn from all of three jobs, each is refused with a reason or its script has what the plan says."""
    pytest.importorskip("transformers")
    rng, ends = np.random.default_rng(2), Counter()
    (tmp_path / "mixed.py").write_text(MODEL.replace(".double()", ""), encoding="utf-8")
    deeper = [name.replace("layers=2", "layers=4") for name in (LLAMA, MIXTRAL)]
    jobs = [
        make_job(name, "dgx-a100", 16, ranks=ranks, schedules=ORDERS, wide=ranks == 8)
        for name, ranks in zip([f"{tmp_path}/my_model.py:make_step", f"{tmp_path}/mixed.py:make_step", *deeper] * 2,
                               [2, 4, 8, 4, 4, 8, 4, 8], strict=True)
    ]  # fmt: skip
    plans = [(job, list(job.choices())) for job in jobs]
    path = tmp_path / "train.py"
    whole = {}
    while ends["written"] < 200:
        job, choices = plans[rng.integers(len(plans))]
        choice = choices[rng.integers(len(choices))]
        try:
            path.write_text(find_writer("pytorch")(job, choice), encoding="utf-8")
        except Unsupported as error:
            ends[str(error)[:40]] += 1
            continue
        found, parameters = read_script(path, job)
        assert found == settings_of(job, choice), path.read_text(encoding="utf-8")
        assert whole.setdefault(job.model.name, parameters) == parameters, (job.name, choice)
        ends["written"] += 1
        ends[job.model.name] += 1
        ends[f"{found.recompute} {found.schedule}"] += 1
        ends["reduced each"] += found.reduce_each
        ends["gathered"] += found.gathered
    assert len(whole) == 4 and min(ends[name] for name in whole) > 20, ends
    assert all(ends[f"{recompute} {name}"] for recompute in ("none", "selective", "full") for name in SCHEDULES), ends
    assert ends["reduced each"] > 10 and ends["gathered"] > 10


@pytest.mark.parametrize(
    "plan",
    [
        {"microbatch": 4, "recompute": "none", "dp_shard": 2},
        {"microbatch": 4, "recompute": "full", "dp_shard": 2},
        {"microbatch": 4, "recompute": "selective", "dp_shard": 2},
        {"microbatch": 2, "dp_shard": 2, "reshard": "never"},
        pytest.param({"microbatch": 4, "dp_replicate": 2}, marks=pytest.mark.slow),
        pytest.param({"microbatch": 2, "dp_replicate": 2, "dp_shard": 2}, marks=pytest.mark.slow),
        pytest.param({"microbatch": 8, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"microbatch": 4, "dp_replicate": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"microbatch": 4, "dp_shard": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"microbatch": 4, "schedule": "gpipe", "pp": 2}, marks=pytest.mark.slow),
        pytest.param({"microbatch": 2, "recompute": "full", "pp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"microbatch": 2, "pp": 2, "dp_replicate": 2}, marks=pytest.mark.slow),
        pytest.param({"microbatch": 2, "pp": 2, "dp_shard": 2, "reshard": "never"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_script_executes_the_program_that_was_planned(write, plan):
    """Several microbatches on two or four ranks, op by op, collectives included."""
    path, job, choice = write(**plan)
    done, planned = calls_of(path, choice), planned_calls(job, choice)
    for executed, expected in zip(done, planned, strict=True):
        assert executed == expected
        assert {axes for *_, axes in expected if axes} == {(axis,) for axis, _ in choice.mesh.inner}


EVERY = {"microbatch": 1, "recompute": "selective"}
LOOPED = {**EVERY, "reshard": "never", "pp": 2, "schedule": "interleaved", "stages_per_rank": 2}


def test_scripts_of_plans_with_every_part_are_short(write):
    """``write`` counts their lines."""
    for sizes in (
        {"dp_shard": 2, "tp": 2, "reshard": "never"},
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
        {**LOOPED, "dp_replicate": 2, "dp_shard": 2, "tp": 2},
    ):
        text = write(**{**EVERY, **sizes})[0].read_text(encoding="utf-8")
        # What is sharded comes to the device block by block: a whole model may not fit there.
        assert "on the host" in text or "each block moves" in text
    assert "step.model.to(device)" in write(microbatch=1, tp=2)[0].read_text(encoding="utf-8")


@pytest.mark.slow
def test_scripts_of_transformers_models_with_every_part_are_short(write):
    pytest.importorskip("transformers")
    deeper = [name.replace("layers=2", "layers=4") for name in (LLAMA, MIXTRAL)]
    for model, axis in zip(deeper, ("tp", "ep"), strict=True):
        write(**EVERY, reshard="never", model=model, dp_replicate=2, dp_shard=2, **{axis: 2})
        write(**{**LOOPED, "reshard": "always"}, model=model, dp_replicate=2, dp_shard=2, **{axis: 2})


TABLE = "self.register_buffer('table', torch.randn(8, 32))\n        self.head ="


@pytest.mark.long
def test_stages_of_a_model_that_mixes_other_tensors_in(write, tmp_path):
    """What other stages compute is on ``meta``; so is what they mix with buffers, or with what they make themselves."""
    assert "TorchFunctionMode" not in write(2, pp=2, dp_shard=2)[0].read_text()
    ones = "torch.ones(32, device=self.blocks[0].up.weight.device)"
    added = {"buffered": "self.table[: x.size(1)]", "mixing": ones}
    written = [scripts_of_a_mixed_model(write, tmp_path, name, added[name]) for name in added]
    one, two = (losses(scripts, ranks) for ranks, scripts in enumerate(zip(*written, strict=True), 1))
    assert two == [pytest.approx(found, rel=1e-11) for found in one]


def scripts_of_a_mixed_model(write, tmp_path, name, added):
    """Scripts of the model ``name`` on one and on two ranks, after others of it were checked."""
    mixed = MODEL.replace("self.head =", TABLE).replace("x = self.embedding(x)", f"x = self.embedding(x) + {added}")
    (tmp_path / f"{name}.py").write_text(mixed, encoding="utf-8")
    path, job, choice = write(2, model=f"{tmp_path}/{name}.py:make_step", pp=2, dp_shard=2)
    assert "TorchFunctionMode" in path.read_text()
    assert calls_of(path, choice) == planned_calls(job, choice)
    ends = "self.stem, self.neck = (nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)) for _ in range(2))"
    wide = mixed.replace(".double()", "").replace("self.head =", f"{ends}\n        self.head =")
    wide = wide.replace("x = self.embedding(x)", "x = self.stem(self.embedding(x))").replace(
        "(x)\n\ndef", "(self.neck(x))\n\ndef"
    )
    (tmp_path / f"wide_{name}.py").write_text(wide, encoding="utf-8")
    write(**LOOPED, model=f"{tmp_path}/wide_{name}.py:make_step", dp_replicate=2, dp_shard=2, tp=2)  # is short, too
    model = f"{tmp_path}/{name}.py:make_step"
    return write(16, model=model, dp_shard=1)[0], write(4, model=model, pp=2)[0]


@pytest.mark.parametrize("plan", [{"tp": 2}, pytest.param({"pp": 2, "schedule": "gpipe"}, marks=pytest.mark.slow)])
def test_a_float32_module_has_a_script_on_a_mesh_without_data_axes(write, tmp_path, plan):
    """It trains in float32 there, where FSDP would compute in bfloat16: planners do not choose this, users may."""
    (tmp_path / "mixed.py").write_text(MODEL.replace(".double()", ""), encoding="utf-8")
    path, job, choice = write(microbatch=8, model=f"{tmp_path}/mixed.py:make_step", **plan)
    done, planned = calls_of(path, choice), planned_calls(job, choice)
    assert done == planned and any(signature.count("f32") > 1 for _, signature, _ in done[0])
    assert not any("bf16" in signature for calls in done for _, signature, _ in calls)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        {"model": LLAMA, "microbatch": 8, "recompute": "full", "dp_shard": 2, "tp": 2},
        {"model": MIXTRAL, "microbatch": 8, "ep": 2},
        {"model": MIXTRAL, "microbatch": 4, "dp_shard": 2, "ep": 2},
        {"model": MIXTRAL, "microbatch": 4, "dp_replicate": 2, "ep": 2},
        {"model": MIXTRAL, "microbatch": 8, "ep": 2, "tp": 2},
        {"model": MIXTRAL, "microbatch": 4, "pp": 2, "ep": 2},
        {"model": LLAMA, "microbatch": 2, "dp_shard": 2, "reshard": "never"},
        {"model": LLAMA, "microbatch": 4, "recompute": "selective", "dp_shard": 2},
        {"model": LLAMA, "microbatch": 8, "recompute": "selective", "dp_shard": 2, "tp": 2},
        {"model": LLAMA, "microbatch": 4, "recompute": "selective", "pp": 2, "dp_shard": 2},
    ],
    ids=[
        "fsdp x tp",
        "ep",
        "fsdp x ep",
        "replicas x ep",
        "ep x tp",
        "pp x ep",
        "gathered",
        "selective",
        "selective x tp",
        "selective x pp",
    ],
)
def test_the_script_of_a_transformers_model_executes_the_program(write, plan, monkeypatch):
    pytest.importorskip("transformers")
    from simdev.parallel.capture.record import RankRecorder

    path, job, choice = write(**plan)
    if choice.mesh["ep"] > 1:  # an even router: the tokens times the active experts, over the ranks that share them
        rows = plan["microbatch"] * 8 * 2 // (choice.mesh["ep"] * choice.mesh["tp"] ** 2)
        monkeypatch.setattr(RankRecorder.__init__, "__defaults__", (rows,))
    done, planned = calls_of(path, choice), planned_calls(job, choice)
    assert done == planned
    used = {axis for calls in planned for *_, axes in calls for axis in axes}
    assert used == {axis for axis, _ in choice.mesh.inner}


SCHEDULED = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "looped-bfs": 2}  # with the stages of a rank


@pytest.mark.parametrize(
    "schedule, model",
    [
        *(pytest.param(schedule, "plain", marks=pytest.mark.slow) for schedule in SCHEDULED),
        *(pytest.param(schedule, "transformers", marks=pytest.mark.slow) for schedule in ("1f1b", "interleaved")),
        *(pytest.param(schedule, "transformers", marks=pytest.mark.long) for schedule in ("gpipe", "looped-bfs")),
    ],
)
def test_the_pipeline_of_the_script_is_the_plans(write, schedule, model):
    """Op by op, the gathering of sharded parameters included, which depends on the order of the passes."""
    name, stages = "", SCHEDULED[schedule]
    if model == "transformers":
        pytest.importorskip("transformers")
        name = LLAMA.replace("layers=2", f"layers={2 * stages}")
    path, job, choice = write(2, model=name, schedule=schedule, stages_per_rank=stages, pp=2, dp_shard=2)
    done, planned = calls_of(path, choice), planned_calls(job, choice)
    assert done == planned and all(any(kind == "all_gather" for kind, *_ in calls) for calls in done)


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"dp_replicate": 2}, {"tp": 2}], ids=str)
def test_the_script_compiles_what_the_framework_compiles(write, sizes):
    """Each block by itself, with its recomputation."""
    path, job, choice = write(microbatch=8, recompute="full", framework="compiled", **sizes)
    found, _ = read_script(path, job)
    assert found == settings_of(job, choice, any_precision=True) and found.compiled
    with fake_ranks(2, 0):
        blocks = script_of(path).build()[0].blocks
    assert all(block._compiled_call_impl and "Checkpoint" in type(block).__name__ for block in blocks)


@pytest.mark.long
def test_losses_of_compiled_scripts_are_those_of_one_process(write):
    one = write(microbatch=16, dp_shard=1)[0]
    two = [write(4, recompute, framework="compiled", **sizes)[0] for recompute, sizes in (
        ("full", {"dp_shard": 2}), ("selective", {"dp_shard": 2}), ("none", {"dp_replicate": 2}), ("none", {"tp": 2})
    )]  # fmt: skip
    (expected,) = losses([one], 1)
    for found in losses(two, 2):
        assert found == pytest.approx(expected, rel=1e-11)


@pytest.mark.slow
def test_what_a_script_cannot_say_is_refused_by_name(write, tmp_path):
    pytest.importorskip("transformers")
    head = "self.head = nn.Linear(32, 64, bias=False)"
    tied = MODEL.replace(head, f"{head}; self.head.weight = self.embedding.weight")
    (tmp_path / "tied.py").write_text(tied, encoding="utf-8")
    refused = [
        ("tied weights .lm_head.weight", {"model": LLAMA.replace("[", "[tie_word_embeddings=true,"), "dp_shard": 2}),
        ("takes other inputs", {"model": "transformers:BertForMaskedLM[num_hidden_layers=2,length=8]", "dp_shard": 2}),
        ("zero-bubble", {"model": LLAMA, "pp": 2, "dp_shard": 2, "schedule": "zero-bubble"}),
        ("1 microbatches on 2 stages", {"model": LLAMA, "pp": 2, "dp_shard": 2, "microbatch": 8}),
        ("reshard=never", {"model": LLAMA, "pp": 2, "dp_shard": 2, "reshard": "never"}),
        ("own code", {"model": "small", "dp_shard": 2}),
        ("torch.compile", {"pp": 2, "framework": "compiled"}),
        ("torch.compile", {"model": LLAMA, "dp_shard": 2, "framework": "compiled"}),
        ("equal on two stages .embedding.weight", {"model": f"{tmp_path}/tied.py:make_step", "pp": 2}),
    ]  # fmt: skip
    for part, plan in refused:
        with pytest.raises(Unsupported, match=part):
            write(**{"microbatch": 2, **plan})


def spread_by(write, make, **plan):
    """Sizes of the local parameters and classes of all modules, as :func:`simdev.apply` and as the script leaves
    them on the first of several fake ranks."""
    import simdev
    from simdev.parallel.capture.stage import fake_process_group

    path, job, choice = write(**plan)
    script = script_of(path)
    with fake_process_group(choice.mesh, 0):
        theirs = script.build()[0]
        ours = make(job)
        simdev.apply(ours, choice, job, device="cpu")
        for model in (ours, theirs):
            local = [(n, tuple(getattr(p, "to_local", lambda p=p: p)().shape)) for n, p in model.named_parameters()]
            yield local, [type(module).__name__ for module in model.modules()]


@pytest.mark.slow
def test_apply_divides_what_the_script_divides(write):
    (tmp_model, script_model) = spread_by(write, lambda _: importlib.import_module("my_model").Model().double(),
                                          microbatch=4, recompute="full", dp_shard=2, tp=2)  # fmt: skip
    assert tmp_model == script_model and ("blocks.0._checkpoint_wrapped_module.up.weight", (32, 32)) in tmp_model[0]
    pytest.importorskip("transformers")
    for model, sizes in ((LLAMA, {"dp_shard": 2, "tp": 2}), (MIXTRAL, {"dp_shard": 2, "ep": 2})):
        ours, theirs = spread_by(write, lambda job: job.model.function.build(), model=model, microbatch=4, **sizes)
        assert ours == theirs and all(size for name, size in ours[0])


def test_apply_does_what_the_script_does(write):
    """On a fake process group of two ranks: the same wrapped modules and sharded sizes."""
    import simdev

    ours, theirs = spread_by(
        write, lambda _: importlib.import_module("my_model").Model().double(), microbatch=8, recompute="full",
        dp_shard=2,
    )  # fmt: skip
    kinds = ours[1], theirs[1]
    assert ours == theirs
    assert kinds[0].count("FSDPCheckpointWrapper") == 4 and kinds[0][0] == "FSDPModel"
    with pytest.raises(Unsupported, match="tp=2"):
        simdev.apply(importlib.import_module("my_model").Model(), Choice(Mesh({"tp": 2})))
    with pytest.raises(Unsupported, match="reshard=never"):
        simdev.apply(importlib.import_module("my_model").Model(), Choice(Mesh({"dp_shard": 2}), reshard="never"))
    with pytest.raises(Unsupported, match="recompute=every-2"):
        simdev.apply(importlib.import_module("my_model").Model(), Choice(Mesh({"dp_shard": 2}), recompute="every-2"))


def test_apply_compiles_what_the_framework_compiles(write):
    """Each block of a plain module, with its recomputation; a framework that divides updates is refused."""
    import simdev
    from simdev.parallel.capture.stage import fake_process_group

    _, job, choice = write(microbatch=8, recompute="full", framework="compiled", dp_shard=2)
    with fake_process_group(choice.mesh, 0):
        model = importlib.import_module("my_model").Model()
        simdev.apply(model, choice, job, device="cpu")
        assert all(block._compiled_call_impl and "Checkpoint" in type(block).__name__ for block in model.blocks)
        assert model._compiled_call_impl is None
    with pytest.raises(Unsupported, match="torch.compile.*has none"):
        simdev.apply(
            importlib.import_module("torch").nn.Linear(2, 2),
            choice,
            job.with_changes(model=make_job("small", "dgx-a100", 16).model),
        )
    with pytest.raises(Unsupported, match="distributed optimizer"):
        simdev.apply(model, Choice(Mesh({"dp_replicate": 2})), job.with_changes(framework="nemo"))


def test_apply_frees_gathered_parameters_as_the_job_says(write, tmp_path):
    import simdev
    from simdev.parallel.capture.stage import fake_process_group

    path, job, choice = write(microbatch=8, dp_shard=2)
    kept = make_job(f"{tmp_path}/my_model.py:make_step[reshard_after_forward=false]", "dgx-a100", 16, ranks=2)
    found = []
    for given in (job, kept):
        with fake_process_group(choice.mesh, 0):
            model = importlib.import_module("my_model").Model()
            simdev.apply(model, choice, given, device="cpu")
            (group,) = model.blocks[0]._get_fsdp_state()._fsdp_param_groups
            found.append(group._reshard_after_forward)
    assert found == [True, False]
