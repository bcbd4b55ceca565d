"""A script for a plain module of the user's own: tensor parallelism, recomputation and FSDP2 (or replication) around
each block and the model, accumulation or a pipeline, the step's own optimizer.

A pipeline stage runs the model's own code with the blocks of the stage. What other stages compute is computed on
PyTorch's device ``meta``: it has shapes and no values."""

from __future__ import annotations

import re
import textwrap
from itertools import accumulate
from pathlib import Path

from simdev.errors import Unsupported
from simdev.integrations.configs.pytorch.pieces import LOOPED, MAIN, POLICY, SCHEDULES, refuse_schedule, render
from simdev.integrations.configs.settings import Settings, header, torchrun
from simdev.parallel.plain import PlainModel
from simdev.planners import Choice, Job

RELEASE = "PyTorch 2.13"
INPUT = re.compile(r"input (\d+) of (\d+)")  # a style of simdev.parallel.capture.tensor_rule


def write(job: Job, choice: Choice, settings: Settings) -> str:
    """The script, which imports the ``make_step`` that was planned. The user replaces ``batches``."""
    refuse_schedule(settings)
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
    axes = ("pp", "dp_replicate", "dp_shard", "tp")
    sizes = {axis: settings.mesh[axis] for axis in axes if settings.mesh[axis] > 1}
    data = tuple(axis for axis in sizes if axis.startswith("dp_"))
    flags = {
        "recompute": settings.recompute != "none",
        "selective": settings.recompute == "selective",
        "shard": settings.mesh["dp_shard"] > 1,
        "gathered": settings.mesh["dp_shard"] > 1 and settings.gathered,
        "replicate": settings.mesh["dp_shard"] == 1 and settings.mesh["dp_replicate"] > 1,
        "data": settings.mesh.replicas > 1,
        "tp": settings.mesh["tp"] > 1,
        "pp": settings.mesh["pp"] > 1,
    }
    flags["blocks"] = flags["recompute"] or flags["data"]
    styles = _styles(built) if flags["tp"] else ""
    flags["inputs"] = "PrepareModuleInput" in styles
    values = {
        "MODULE": Path(path).stem,
        "FUNCTION": function,
        "MESH": sizes or {"dp_shard": 1},
        "DATA": repr(data[0] if len(data) == 1 else data),
        "STYLES": styles,
        "REPLICA": _replica(settings),
        "LISTS": list(built.lists),
        "MICROBATCH": settings.microbatch,
        "MICROBATCHES": settings.microbatches,
        "EACH": settings.reduce_each,
        "RESHARD": settings.reshard_after_forward and not settings.gathered,
        "RANKS": "(dist.get_world_size() // MESH['pp'])" if flags["pp"] else "dist.get_world_size()",
        **(_stages(built, settings) if flags["pp"] else {}),
    }
    spread = SPREAD * (flags["recompute"] or flags["data"] or flags["tp"])
    step = STAGE + PREPARE + STAGES if flags["pp"] else PREPARE + STEP
    text = "".join([HEAD, POLICY * flags["selective"], spread, step, MAIN])
    run = f"As train.py beside {Path(path).name}: {command}"
    return header(job, choice, RELEASE, run) + render(text, {**flags, "spread": "def spread" in text}, values)


def _replica(settings: Settings) -> str:
    """The number of the rank's replica, as code: ranks of ``tp`` lie beside each other, stages furthest apart."""
    mesh = settings.mesh
    stage = f" % {mesh.stage_ranks}" if mesh["pp"] > 1 and mesh.stage_ranks > 1 else ""
    if mesh["pp"] > 1 and mesh.stage_ranks == 1:
        return "0"
    return f"dist.get_rank(){stage}" + (f" // {mesh['tp']}" if mesh["tp"] > 1 else "")


def _stages(built: PlainModel, settings: Settings) -> dict[str, object]:
    """What a pipeline adds to the script. Raises :class:`Unsupported` for a parameter that both ends would hold."""
    ends = built.ends
    assert ends is not None, "a pipeline is planned where the ends are known"
    if both := sorted(ends.before & ends.after):
        raise Unsupported(f"the script cannot keep tied parameters equal on two stages ({', '.join(both)}): pp")
    computes = "torch.bfloat16" if built.precision(settings.mesh) == "mixed" else str(ends.dtype)
    bounds = [0, *accumulate(settings.stage_layers)]
    return {
        "STAGES": list(zip(bounds, bounds[1:], strict=False)),
        "BEFORE": _wrapped(sorted(ends.before)),
        "AFTER": _wrapped(sorted(ends.after)),
        "HIDDEN": f"({ends.shape[0] * settings.microbatch}, {', '.join(map(str, ends.shape[1:]))})",
        "COMPUTED": computes,
        "LIST": repr(built.blocks),
        "SCHEDULE": SCHEDULES[settings.schedule],
        "STAGE": "pipelined" if settings.schedule in LOOPED else "pipelined[0]",
    }


def _wrapped(names: list[str]) -> str:
    return "\n    ".join(textwrap.wrap(repr(names), 110, break_long_words=False, break_on_hyphens=False))


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

import time

import torch
import torch.distributed as dist
from torch.distributed._composable.replicate_with_fsdp import replicate  #? replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  #? recompute
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  #? shard
from torch.distributed.fsdp import MixedPrecisionPolicy  #? replicate
from torch.distributed.pipelining import PipelineStage, @SCHEDULE@  #? pp
from torch.distributed.tensor import Replicate  #? inputs
from torch.distributed.tensor.experimental import implicit_replication  #? tp
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  #? tp
from torch.distributed.tensor.parallel import PrepareModuleInput  #? inputs
from torch.overrides import TorchFunctionMode  #? pp
from torch.utils._pytree import tree_leaves, tree_map_only  #? pp
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts  #? selective

from @MODULE@ import @FUNCTION@

MESH = @MESH@
BLOCKS = @LISTS@  # the lists whose members repeat
TENSOR_PARALLEL = @STYLES@  #? tp
MICROBATCH, MICROBATCHES = @MICROBATCH@, @MICROBATCHES@  # samples on each rank, how often
STAGES = @STAGES@  # blocks of the pipeline stages: the first one, and the one after the last  #? pp
BEFORE = @BEFORE@  # parameters of the first stage  #? pp
AFTER = @AFTER@  # parameters of the last stage  #? pp
REDUCE_EACH = @EACH@  # reduce gradients after each microbatch, not with the last one only  #? data !pp
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
PREPARE = '''def prepare(step, mesh):
    """Spread the model of `step` in place; returns the parameters of its optimizer as they are then."""  #? spread
    """Return the parameters of the optimizer of `step`."""  #? !spread
    names = {id(p): name for name, p in step.model.named_parameters()}
    own = [(group, [names[id(p)] for p in group["params"] if id(p) in names]) for group in step.optimizer.param_groups]
    spread(step.model, mesh)  #? spread
    now = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in step.model.named_parameters()}
    groups = [{**group, "params": [now[name] for name in some]} for group, some in own if some]  #? tp
    meshes = dict.fromkeys(getattr(p, "device_mesh", None) for p in now.values())  # one kernel takes one mesh  #? tp
    own = [(g, [p for p in g["params"] if getattr(p, "device_mesh", None) == m]) for g in groups for m in meshes]  #? tp
    return [{**group, "params": part} for group, part in own if part]  #? tp
    return [{**group, "params": [now[name] for name in some]} for group, some in own if some]  #? !tp


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
    step = @FUNCTION@()  # on the host: each block moves to the device when it is sharded  #? shard
    step = @FUNCTION@()  #? !shard
    step.model.to(device)  #? !shard
    groups = prepare(step, mesh)
    return step.model, step.loss, type(step.optimizer)(groups), [x.to(device) for x in step.inputs]


def train_step(model, loss, optimizer, inputs):
    """One step; returns the mean loss over the samples of this rank."""
    total = 0.0
    for number, microbatch in enumerate(batches(inputs)):
        last = number == MICROBATCHES - 1 or REDUCE_EACH  #? data
        model.set_is_last_backward(last)  #? data
        model.set_requires_gradient_sync(last)  #? data
        model.set_reshard_after_backward(number == MICROBATCHES - 1)  # gathered once in a step  #? gathered
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
STAGE = '''def absent(values):
    """The tensors among `values` on `meta`: shapes, of which nothing is computed."""
    return tree_map_only(torch.Tensor, lambda x: x.to("meta"), values)


class Absent(TorchFunctionMode):
    """What follows from a tensor on `meta` is on `meta`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(leaf, torch.Tensor) and leaf.device.type == "meta" for leaf in leaves):
            args, kwargs = absent((args, kwargs))
        return func(*args, **kwargs or {})


class Stage(torch.nn.Module):
    """Blocks of the model, with what runs before them on the first stage, and what runs after them on the last one."""

    def __init__(self, step, number):
        super().__init__()
        self.model, self.loss, self.received, self.backward_passes = step.model, step.loss, None, 0
        self.first, self.last, (begin, end) = number == 0, number == len(STAGES) - 1, STAGES[number]
        left = {*([] if self.first else BEFORE), *([] if self.last else AFTER)}
        left = {id(p) for name, p in step.model.named_parameters() if name in left}
        for module in step.model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                if id(p) in left:
                    delattr(module, name)
                    setattr(module, name, absent(p.detach()))
        blocks = step.model.get_submodule(@LIST@)
        del blocks[end:], blocks[:begin]

    def pipelined(self, number, x, mesh):
        blocks, self.code, self.model.forward = list(self.model.get_submodule(@LIST@)), self.model.forward, self.run
        if not self.first:  # the first block reads what was received
            take = lambda _, args, kwargs: ((self.received, *args[1:]), kwargs)
            blocks[0].register_forward_pre_hook(take, prepend=True, with_kwargs=True)
        if not self.last:
            blocks[-1].register_forward_hook(self.send)
            self.model.register_forward_hook(lambda *_: self.rest)
        hidden = torch.empty(@HIDDEN@, dtype=@COMPUTED@, device="meta", requires_grad=True)
        first = torch.empty(MICROBATCH, *x.shape[1:], dtype=x.dtype, device="meta")
        ends = first if self.first else hidden, torch.empty((), device="meta") if self.last else hidden
        device, group = torch.device(mesh.device_type), mesh["pp"].get_group()
        return PipelineStage(self, number, len(STAGES), device, *ends, group=group)

    def send(self, block, args, output):
        self.sent = output
        return absent(output)

    def run(self, *args, **kwargs):  # the model's own code
        self.rest = self.code(*(args if self.first else absent(args)), **(kwargs if self.first else absent(kwargs)))
        return self.rest if self.last else self.sent

    def forward(self, x, inputs):
        self.received = x
        with Absent():
            loss = self.loss(self.model, *inputs)
        output = loss if self.last else self.sent
        output.register_hook(self.begin_backward)  #? data
        return output
  #? data
    def begin_backward(self, gradient):  #? data
        self.backward_passes += 1  # gradients are reduced with the last one  #? data
        self.model.set_is_last_backward(self.backward_passes % MICROBATCHES == 0)  #? data
        self.model.set_requires_gradient_sync(self.backward_passes % MICROBATCHES == 0)  #? data
        self.model.set_reshard_after_backward(self.backward_passes % MICROBATCHES == 0)  #? gathered


'''
STAGES = '''def build():
    """This rank's schedule and stages, their optimizer, and the inputs of a step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.get_device_module(device).set_device(dist.get_node_local_rank(fallback_rank=0))
    mesh = init_device_mesh(device, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    stages, pipelined, groups = [], [], []
    for number in range(mesh["pp"].get_local_rank(), len(STAGES), MESH["pp"]):
        torch.manual_seed(0)  # the same parameters on all ranks
        step = @FUNCTION@()
        stages.append(Stage(step, number))  # each block moves to the device when it is sharded  #? shard
        stages.append(Stage(step, number).to(device))  #? !shard
        groups += prepare(step, mesh)
        pipelined.append(stages[-1].pipelined(number, step.inputs[0], mesh))
    schedule = @SCHEDULE@(@STAGE@, MICROBATCHES, lambda loss, _: loss / MICROBATCHES, scale_grads=False)
    return schedule, stages, type(step.optimizer)(groups), [x.to(device) for x in step.inputs]


def train_step(schedule, stages, optimizer, inputs):
    """One step; returns the mean loss over the samples of this rank, 0 on ranks without the last stage."""
    first = @REPLICA@ * MICROBATCHES * MICROBATCH
    samples = torch.arange(first, first + MICROBATCHES * MICROBATCH)
    inputs = [x[samples % len(x)] for x in inputs]  # replace it by a data loader
    losses = [torch.zeros((), device=inputs[0].device)]
    given, target = [inputs[0]] if stages[0].first else [], {"target": inputs[0]} if stages[-1].last else {}
    with implicit_replication():  # of tensors that TENSOR_PARALLEL does not divide  #? tp
        schedule.step(*given, inputs=inputs, **target, losses=losses, return_outputs=False)  #? tp
    schedule.step(*given, inputs=inputs, **target, losses=losses, return_outputs=False)  #? !tp
    optimizer.step()
    optimizer.zero_grad()
    return sum(loss.detach() for loss in losses).double()


'''
