"""A script for a plain module of the user's own: tensor parallelism, recomputation and FSDP2 (or replication) around
each block and the model, accumulation, the step's own optimizer."""

from __future__ import annotations

import re
from pathlib import Path

from simdev.errors import Unsupported
from simdev.integrations.configs.pytorch.pieces import MAIN, POLICY, render
from simdev.integrations.configs.settings import Settings, header, refuse, torchrun
from simdev.parallel.plain import PlainModel
from simdev.planners import Choice, Job

RELEASE = "PyTorch 2.13"
INPUT = re.compile(r"input (\d+) of (\d+)")  # a style of simdev.parallel.capture.tensor_rule


def write(job: Job, choice: Choice, settings: Settings) -> str:
    """The script, which imports the ``make_step`` that was planned. The user replaces ``batches``."""
    refuse(settings, "the script for a plain module", "pp")
    built = job.model.function
    assert isinstance(built, PlainModel)
    path, colon, function = built.name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise Unsupported(f"a script needs the model's own code (my_model.py:make_step), and this is {built.name}")
    if built.outside:
        message = "whose parameters are read while it does not run: the script cannot shard it"
        raise Unsupported(f"{built.name}: {built.outside[0]} is a block {message}")
    if built.optimizers > 1:
        message = "the script builds one; simdev.apply() spreads the model in a script of your own"
        raise Unsupported(f"{built.name}: its step has {built.optimizers} optimizers, and {message}")
    command = torchrun(job, "train.py")
    sizes = {axis: settings.mesh[axis] for axis in ("dp_replicate", "dp_shard", "tp") if settings.mesh[axis] > 1}
    data = tuple(axis for axis in sizes if axis != "tp")
    flags = {
        "recompute": settings.recompute != "none",
        "selective": settings.recompute == "selective",
        "shard": settings.mesh["dp_shard"] > 1,
        "replicate": settings.mesh["dp_shard"] == 1 and settings.mesh["dp_replicate"] > 1,
        "data": settings.mesh.replicas > 1,
        "tp": settings.mesh["tp"] > 1,
    }
    flags["blocks"] = flags["recompute"] or flags["data"]
    values = {
        "MODULE": Path(path).stem,
        "FUNCTION": function,
        "MESH": sizes or {"dp_shard": 1},
        "DATA": repr(data[0] if len(data) == 1 else data),
        "STYLES": _styles(built) if settings.mesh["tp"] > 1 else "",
        "REPLICA": f"dist.get_rank() // {settings.mesh['tp']}" if settings.mesh["tp"] > 1 else "dist.get_rank()",
        "LISTS": list(built.lists),
        "MICROBATCH": settings.microbatch,
        "MICROBATCHES": settings.microbatches,
        "EACH": settings.reduce_each,
        "RESHARD": bool(job.parameters.get("reshard_after_forward", True)),
        "RANKS": "dist.get_world_size()",
    }
    text = "".join(
        [HEAD, POLICY * flags["selective"], SPREAD * (flags["recompute"] or flags["data"] or flags["tp"]), STEP, MAIN]
    )
    run = f"As train.py beside {Path(path).name}: {command}"
    return header(job, choice, RELEASE, run) + render(text, {**flags, "spread": "def spread" in text}, values)


def _styles(built: PlainModel) -> str:
    """The tensor-parallel plan with PyTorch's styles, as code. Raises :class:`Unsupported` for styles of the user's."""
    lines = ["{"]
    for name, style in built.tp_plan.items():
        found = INPUT.fullmatch(style) if isinstance(style, str) else None
        if found:
            layouts = ", ".join("Replicate()" if n + 1 == int(found[1]) else "None" for n in range(int(found[2])))
            code = f"PrepareModuleInput(input_layouts=({layouts},), desired_input_layouts=({layouts},))"
        elif style in STYLES:
            code = STYLES[style]
        else:
            raise Unsupported(f"the script cannot write the style of {name} (tp): it knows {', '.join(STYLES)}")
        lines.append(f"    {name!r}: {code},")
    return "\n".join([*lines, "}"])


STYLES = {"colwise": "ColwiseParallel(use_local_output=False)", "rowwise": "RowwiseParallel()"}
HEAD = '''"""One training step on all ranks."""

import torch
import torch.distributed as dist
from torch.distributed._composable.replicate_with_fsdp import replicate  #? replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  #? recompute
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  #? shard
from torch.distributed.fsdp import MixedPrecisionPolicy  #? replicate
from torch.distributed.tensor import Replicate  #? tp
from torch.distributed.tensor.experimental import implicit_replication  #? tp
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel  #? tp
from torch.distributed.tensor.parallel import parallelize_module  #? tp
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts  #? selective

from @MODULE@ import @FUNCTION@

MESH = @MESH@
BLOCKS = @LISTS@  # the lists whose members repeat
TENSOR_PARALLEL = @STYLES@  #? tp
MICROBATCH, MICROBATCHES = @MICROBATCH@, @MICROBATCHES@  # samples on each rank, how often
REDUCE_EACH = @EACH@  # reduce gradients after each microbatch, not with the last one only  #? data
RESHARD = @RESHARD@  # free the gathered parameters of a block after its forward pass  #? shard


'''
SPREAD = '''def spread(model, mesh):
    """Recompute and shard each block, and shard the model, in place."""  #? recompute shard
    """Recompute and replicate each block, and replicate the model, in place."""  #? recompute replicate
    """Shard each block and the model, in place."""  #? !recompute shard
    """Replicate each block and the model, in place."""  #? !recompute replicate
    """Recompute each block, in place."""  #? recompute !data
    """Divide products among the tensor-parallel ranks, in place."""  #? !recompute !data
    parallelize_module(model, mesh["tp"], TENSOR_PARALLEL)  #? tp
    lists = [model.get_submodule(name) for name in BLOCKS]  #? blocks
    for holder in lists:  #? recompute
        for name, block in list(holder.named_children()):  #? recompute
            wrapped = checkpoint_wrapper(block, preserve_rng_state=False)  #? recompute !selective
            wrapped = checkpoint_wrapper(block, preserve_rng_state=False, context_fn=kept_results)  #? selective
            setattr(holder, name, wrapped)  #? recompute
    mixed = any(parameter.dtype == torch.float32 for parameter in model.parameters())  #? data
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()  #? data
    for module in [*(block for holder in lists for block in holder.children()), model]:  #? data
        keep = RESHARD if module is not model else None  #? shard
        fully_shard(module, mesh=mesh[@DATA@], mp_policy=policy, reshard_after_forward=keep)  #? shard
        replicate(module, mesh=mesh[@DATA@], mp_policy=policy)  #? replicate


'''
STEP = '''def batches(inputs):
    """The microbatches of this rank, out of the samples of ``inputs``. Replace it by a data loader."""
    for number in range(MICROBATCHES):
        first = (@REPLICA@ * MICROBATCHES + number) * MICROBATCH
        yield [x[torch.arange(first, first + MICROBATCH) % len(x)] for x in inputs]


def build():
    """This rank's model, loss and optimizer, and the inputs of a step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.get_device_module(device).set_device(dist.get_node_local_rank(fallback_rank=0))
    mesh = init_device_mesh(device, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    torch.manual_seed(0)  # the same parameters on all ranks
    step = @FUNCTION@()
    model = step.model.to(device)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in step.optimizer.param_groups]
    spread(model, mesh)  #? spread
    now = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    groups = [{**group, "params": [now[name] for name in group["params"]]} for group in groups]
    meshes = dict.fromkeys(getattr(p, "device_mesh", None) for p in now.values())  # one kernel takes one mesh  #? tp
    own = [(g, [p for p in g["params"] if getattr(p, "device_mesh", None) == m]) for g in groups for m in meshes]  #? tp
    groups = [{**group, "params": part} for group, part in own if part]  #? tp
    return model, step.loss, type(step.optimizer)(groups), [x.to(device) for x in step.inputs]


def train_step(model, loss, optimizer, inputs):
    """One step; returns the mean loss over the samples of this rank."""
    total = 0.0
    for number, microbatch in enumerate(batches(inputs)):
        last = number == MICROBATCHES - 1  #? data
        model.set_is_last_backward(last)  #? data
        model.set_requires_gradient_sync(last or REDUCE_EACH)  #? data
        with implicit_replication():  # of tensors that TENSOR_PARALLEL does not divide  #? tp
            part = loss(model, *microbatch) / MICROBATCHES  #? tp
            part.backward()  #? tp
        part = loss(model, *microbatch) / MICROBATCHES  #? !tp
        part.backward()  #? !tp
        total += part.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


'''
