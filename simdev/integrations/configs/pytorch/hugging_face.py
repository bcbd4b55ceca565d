"""A script for a model of Hugging Face's transformers: tensor, expert and sharded data parallelism by the plans of its
class (``maybe_distribute_model``), pipeline stages by ``torch.distributed.pipelining``."""

from __future__ import annotations

import json
import textwrap
from itertools import accumulate

from simdev.errors import Unsupported
from simdev.integrations.configs.pytorch.pieces import (
    LOOPED,
    MAIN,
    POLICY,
    SCHEDULES,
    STAGES_STEP,
    refuse_schedule,
    render,
)
from simdev.integrations.configs.settings import Settings, header, torchrun
from simdev.parallel.capture.packages import plan_of_blocks
from simdev.parallel.hugging_face import TransformersModel
from simdev.planners import Choice, Job

RELEASE = "PyTorch 2.13, transformers 5.24"
OWN = ("transformers_version", "architectures", "dtype")  # of a configuration, which say nothing of the model


def write(job: Job, choice: Choice, settings: Settings) -> str:
    """The script. Its parameters are random: the user loads trained ones in ``build``."""
    built = job.model.function
    assert isinstance(built, TransformersModel)
    whole, facts = built.build(), dict(built.facts)
    if not ("CausalLM" in built.name or "LMHead" in built.name):
        raise Unsupported(f"the script feeds language models with tokens, and {built.name} takes other inputs")
    if settings.ranks > 1 and getattr(whole, "all_tied_weights_keys", None):
        tied = ", ".join(sorted(whole.all_tied_weights_keys))
        raise Unsupported(f"the script cannot divide tied weights ({tied}); give the model [tie_word_embeddings=false]")
    refuse_schedule(settings)
    command = torchrun(job, "train.py")
    return header(job, choice, RELEASE, f"As train.py: {command}") + _script(built, whole, facts, settings)


def _script(built: TransformersModel, whole, facts: dict, settings: Settings) -> str:
    mesh = settings.mesh
    ranks = {axis: mesh[axis] for axis in ("pp", "dp_replicate", "dp_shard", "tp")}
    ranks["fsdp"] = mesh["dp_shard"] * mesh["ep"]  # transformers' name; experts take their ranks from these and tp's
    ranks["ep"] = mesh["ep"] * mesh["tp"] if mesh["ep"] > 1 else 1
    ranks["efsdp"] = ranks["fsdp"] * mesh["tp"] // ranks["ep"]
    blocks = plan_of_blocks(whole) if mesh.replicas > 1 else {}
    config = _configuration(built, whole)
    # FSDP moves each block to the device when it shards it; tensor and expert parallelism expect it there.
    by_block = mesh.replicas > 1 and mesh["tp"] * mesh["ep"] == 1
    prefix = f"{whole.base_model_prefix}."
    bounds = [0, *accumulate(settings.stage_layers)]
    flags = {
        "pp": mesh["pp"] > 1,
        "divided": mesh.replicas * mesh["tp"] > 1,
        "sharded": mesh.replicas > 1,
        "once": mesh.replicas > 1 and settings.microbatches > 1 and not settings.reduce_each,
        "gathered": mesh["dp_shard"] > 1 and settings.gathered,
        "recompute": settings.recompute != "none",
        "selective": settings.recompute == "selective",
        "lists": any(isinstance(value, list) and len(value) == facts["layers"] for value in config.values()),
    }
    values = {
        "CLASS": built.name,
        "CONFIG": _wrapped(config),
        "VOCABULARY": whole.config.get_text_config().vocab_size,
        "MESH": {axis: ranks[axis] for axis in ("pp", "dp_replicate", "fsdp", "tp")},
        "EXPERTS": {axis: ranks[axis] for axis in ("pp", "dp_replicate", "efsdp", "ep")},
        "EP": ranks["ep"],
        "BLOCKS": blocks or None,
        "MICROBATCH": settings.microbatch,
        "MICROBATCHES": settings.microbatches,
        "BATCH": settings.batch,
        "LENGTH": settings.length,
        "PLACE": "" if by_block else "device, ",
        "STAGED": "" if by_block else "mesh.device_type, ",
        "MOVES": "  # on the host" * by_block,
        "STORED": "torch.float32" if flags["sharded"] else "torch.bfloat16",
        "STAGES": list(zip(bounds, bounds[1:], strict=False)),
        "STAGE": "stages" if settings.schedule in LOOPED else "stages[0]",
        "SCHEDULE": SCHEDULES.get(settings.schedule, ""),
        "LAYERS": next((name for name in whole.pp_plan or {} if _is_list(whole, name)), "").removeprefix(prefix),
        "BEFORE": list(facts["before"]),
        "AFTER": list(facts["after"]),
        "RANKS": "(dist.get_world_size() // MESH['pp'])" if flags["pp"] else "dist.get_world_size()",
        "WIDTH": facts["width"],
    }
    stage = STAGE.replace("@SPREAD@\n", textwrap.indent(SPREAD, "    "))
    build = BUILD.replace("@SPREAD@", "" if flags["pp"] else SPREAD)
    parts = [HEAD, POLICY * flags["selective"], stage * flags["pp"], build, STAGES_STEP if flags["pp"] else STEP, MAIN]
    return render("".join(parts), flags, values)


def _is_list(whole, name: str) -> bool:
    from torch import nn

    return isinstance(whole.get_submodule(name), nn.ModuleList)


def _configuration(built: TransformersModel, whole) -> dict:
    """The fields of the configuration that differ from those that its class gives, or all of them if transformers does
    not make the same configuration of these again."""
    kind, config = type(whole.config), json.loads(built.config)
    usual = json.loads(json.dumps(kind().to_dict(), default=str))
    found = {name: value for name, value in config.items() if name not in OWN and usual.get(name, OWN) != value}
    made = json.loads(json.dumps(kind.from_dict(found).to_dict(), default=str))
    if any(made.get(name) != value for name, value in config.items() if name not in OWN):
        found = {name: value for name, value in config.items() if name not in OWN}
    return found


def _wrapped(config: dict) -> str:
    return "\n    ".join(textwrap.wrap(repr(config), 110, break_long_words=False, break_on_hyphens=False))


HEAD = """import itertools  #? selective
import time

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, @SCHEDULE@  #? pp
from transformers import @CLASS@
from transformers.distributed import DistributedConfig  #? divided
from transformers.distributed.utils import TransformersDeviceMesh  #? divided

# The fields of the configuration that @CLASS@ does not have anyway.
CONFIG = @CONFIG@
MESH = @MESH@
EXPERTS = @EXPERTS@  # the same ranks, as layers with experts have them  #? divided
STAGES = @STAGES@  # layers of the pipeline stages: the first one, and the one after the last  #? pp
BATCH, LENGTH = @BATCH@, @LENGTH@  # samples on all ranks, tokens of a sample
MICROBATCH, MICROBATCHES = @MICROBATCH@, @MICROBATCHES@  # samples on each replica, how often
STORED, COMPUTED = @STORED@, torch.bfloat16  # data types of the parameters


"""
# Recomputes layers and divides `model` over `mesh`, in place.
SPREAD = """    options = {"use_reentrant": False}  #? recompute !selective
    options = {"use_reentrant": False, "context_fn": kept_results}  #? selective
    model.activation_checkpointing_enable(options)  #? recompute
    moe = dist.init_device_mesh(mesh.device_type, tuple(EXPERTS.values()), mesh_dim_names=tuple(EXPERTS))  #? divided
    sizes = {"dp_replicate_size": MESH["dp_replicate"], "fsdp_size": MESH["fsdp"], "tp_size": MESH["tp"]}  #? divided
    sizes |= {"ep_size": @EP@, "fsdp_plan": @BLOCKS@, "fsdp_mixed_precision": STORED != COMPUTED}  #? divided
    type(model).maybe_distribute_model(model, DistributedConfig(**sizes), TransformersDeviceMesh(mesh, moe))  #? divided
    model.set_reshard_after_forward(False)  #? gathered
"""
STAGE = '''class Stage(torch.nn.Module):
    """Layers of the model, with the embedding on the first stage, the norm, the head and the loss on the last."""

    def __init__(self, number, mesh):
        super().__init__()
        torch.manual_seed(0)  # the same parameters on all ranks
        config = @CLASS@.config_class.from_dict(CONFIG)
        model = @CLASS@(config).to(@STAGED@STORED).train()@MOVES@
        base, (begin, end) = model.base_model, STAGES[number]
        self.number, self.first, self.last, self.backward_passes = number, begin == 0, number == len(STAGES) - 1, 0
        for name, value in list(vars(model.config).items()):  # lists with a value for each layer  #? lists
            if isinstance(value, list) and len(value) == len(base.@LAYERS@):  #? lists
                setattr(model.config, name, value[begin:end])  #? lists
        base.@LAYERS@, model.config.num_hidden_layers = base.@LAYERS@[begin:end], end - begin
        for name in [*([] if self.first else @BEFORE@), *([] if self.last else @AFTER@)]:
            setattr(base, name, torch.nn.Identity())
        self.model = model = model if self.last else base
@SPREAD@

    def forward(self, x, labels=None):
        inputs = {"input_ids" if self.first else "inputs_embeds": x, "use_cache": False}
        output = self.model(**inputs, labels=labels).loss if self.last else self.model(**inputs).last_hidden_state
        output.register_hook(self.begin_backward)  #? sharded
        return output

    def pipelined(self, mesh):
        tokens = torch.empty(MICROBATCH, LENGTH, dtype=torch.int64, device="meta")
        hidden = torch.empty(MICROBATCH, LENGTH, @WIDTH@, dtype=COMPUTED, device="meta", requires_grad=True)
        ends = tokens if self.first else hidden, torch.empty((), device="meta") if self.last else hidden
        device, group = torch.device(mesh.device_type), mesh["pp"].get_group()
        return PipelineStage(self, self.number, len(STAGES), device, *ends, group=group)
  #? sharded
    def begin_backward(self, gradient):  #? sharded
        self.backward_passes += 1  # FSDP reduces gradients with the last one  #? sharded
        self.model.set_is_last_backward(self.backward_passes % MICROBATCHES == 0)  #? sharded
        self.model.set_requires_gradient_sync(self.backward_passes % MICROBATCHES == 0)  #? sharded


'''
BUILD = """def build():  # this rank's schedule and stages, their optimizer, and the samples of a step  #? pp
def build():  # this rank's model, its optimizer, and the samples of a step  #? !pp
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = dist.init_device_mesh(device, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    torch.manual_seed(0)  # the same parameters on all ranks  #? !pp
    config = @CLASS@.config_class.from_dict(CONFIG)  #? !pp
    model = @CLASS@(config).to(@PLACE@STORED).train()@MOVES@  #? !pp
@SPREAD@    modules = [model]  #? !pp
    modules = [Stage(number, mesh) for number in range(mesh["pp"].get_local_rank(), len(STAGES), MESH["pp"])]  #? pp
    stages = [module.pipelined(mesh) for module in modules]  #? pp
    schedule = @SCHEDULE@(@STAGE@, MICROBATCHES, lambda loss, _: loss / MICROBATCHES, scale_grads=False)  #? pp
    groups = {}  # for each module, and each mesh that its parameters are divided over
    for module, p in ((module, p) for module in modules for p in module.parameters() if p.requires_grad):
        groups.setdefault((module, getattr(p, "device_mesh", None), p.dtype), []).append(p)
    optimizer = torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-4, fused=True)
    replica = mesh["dp_replicate"].get_local_rank() * MESH["fsdp"] + mesh["fsdp"].get_local_rank()
    data = torch.randint(@VOCABULARY@, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))  # yours instead
    data = data.to(device).split(MICROBATCH * MICROBATCHES)[replica]
    return model, optimizer, data  #? !pp
    return schedule, modules, optimizer, data  #? pp


"""
STEP = """def train_step(model, optimizer, data):  # returns this rank's mean loss
    total = 0.0
    for number, tokens in enumerate(data.split(MICROBATCH)):
        last = number == MICROBATCHES - 1  # which reduces gradients  #? once
        model.set_is_last_backward(last)  #? once
        model.set_requires_gradient_sync(last)  #? once
        model.set_reshard_after_backward(number == MICROBATCHES - 1)  # gathered once in a step  #? gathered
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / MICROBATCHES
        loss.backward()
        total += loss.detach().double()
    optimizer.step()
    optimizer.zero_grad()
    return total


"""
