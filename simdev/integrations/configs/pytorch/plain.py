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
        message = f"a script needs the model's own code, and this is {built.name}"
        raise Unsupported(f"{message}: plan a function of your own that builds it (my_model.py:make_step)")
    if built.outside:
        message = "whose parameters are read while it does not run: the script cannot shard it"
        raise Unsupported(f"{built.name}: {built.outside[0]} is a block {message}")
    if settings.compiled and settings.mesh["pp"] > 1:
        raise Unsupported("the script compiles no stages of a pipeline, and this plan asks for torch.compile")
    if settings.compiled and not built.lists:
        raise Unsupported(f"the script compiles each block (torch.compile), and {built.name} has no repeated blocks")
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
    flags["compiled"] = settings.compiled
    flags["blocks"] = flags["recompute"] or flags["data"] or flags["compiled"]
    flags["spread"] = flags["blocks"] or flags["tp"]
    flags["listed"] = flags["data"] or flags["compiled"]
    flags["lists"] = len(built.lists) != 1
    flags["looped"] = settings.schedule in LOOPED
    flags["mixes"] = flags["pp"] and built.mixes
    flags["mixed"] = flags["data"] and settings.precision == "mixed"
    flags["reshard"] = settings.reshard_after_forward and not settings.gathered
    flags["once"] = flags["data"] and settings.microbatches > 1 and not settings.reduce_each
    styles = _styles(built) if flags["tp"] else ""
    flags["inputs"] = "PrepareModuleInput" in styles
    values = {
        "MODULE": Path(path).stem,
        "FUNCTION": function,
        "MESH": sizes or {"dp_shard": 1},
        "DATA": repr(data[0] if len(data) == 1 else data),
        "STYLES": styles,
        "OWN": f" + {replica} * MICROBATCHES * MICROBATCH" if (replica := _replica(settings)) else "",
        "LIST": repr(built.lists[0] if built.lists else ""),
        "LISTS": list(built.lists),
        "CONTEXT": ", context_fn=kept_results" if flags["selective"] else "",
        "MICROBATCH": settings.microbatch,
        "MICROBATCHES": settings.microbatches,
        "DOC": f'"""{_doc(flags)}"""',
        "RANKS": "(dist.get_world_size() // MESH['pp'])" if flags["pp"] else "dist.get_world_size()",
        **(_stages(built, settings) if flags["pp"] else {}),
    }
    step = STAGE + STAGES if flags["pp"] else STEP
    text = "".join([HEAD, POLICY * flags["selective"], PREPARE, step, MAIN])
    run = f"As train.py beside {Path(path).name}: {command}"
    return header(job, choice, RELEASE, run) + render(text, flags, values)


def _doc(flags: dict[str, bool]) -> str:
    """What ``prepare`` does."""
    parts = {word: word for word in ("recompute", "shard", "replicate")}
    parts = {"divide": "tp", "recompute": "recompute", "compile": "compiled", **parts}
    words = [word for word, flag in parts.items() if flags[flag]]
    if not words:
        return "Return the optimizer of `step` for the parameters of its model."
    listed = ", ".join(words[:-1]) + " and " * (len(words) > 1) + words[-1]
    return f"{listed.capitalize()} the model of `step`, in place; returns its optimizer for the new parameters."


def _replica(settings: Settings) -> str:
    """The number of the rank's replica, as code (empty: there is one): ranks of ``tp`` lie beside each other, stages
    furthest apart."""
    mesh = settings.mesh
    stage = f" % {mesh.stage_ranks}" if mesh["pp"] > 1 and mesh.stage_ranks > 1 else ""
    if mesh["pp"] > 1 and mesh.stage_ranks == 1:
        return ""
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
        "SCHEDULE": SCHEDULES[settings.schedule],
        "STAGE": "staged" if settings.schedule in LOOPED else "stages[0].pipelined",
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
HEAD = """import time

import torch
import torch.distributed as dist
from torch.distributed._composable.replicate_with_fsdp import replicate  #? replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  #? recompute
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  #? shard mixed
from torch.distributed.fsdp import fully_shard  #? shard !mixed
from torch.distributed.fsdp import MixedPrecisionPolicy  #? replicate mixed
from torch.distributed.pipelining import PipelineStage, @SCHEDULE@  #? pp
from torch.distributed.tensor import Replicate  #? inputs
from torch.distributed.tensor.experimental import implicit_replication  #? tp
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  #? tp
from torch.distributed.tensor.parallel import PrepareModuleInput  #? inputs
from torch.overrides import TorchFunctionMode  #? mixes
from torch.utils._pytree import tree_leaves, tree_map_only  #? mixes
from torch.utils._pytree import tree_map_only  #? pp !mixes
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts  #? selective

from @MODULE@ import @FUNCTION@

MESH = @MESH@
TENSOR_PARALLEL = @STYLES@  #? tp
MICROBATCH, MICROBATCHES = @MICROBATCH@, @MICROBATCHES@  # samples on each rank, how often
STAGES = @STAGES@  # blocks of the pipeline stages: the first one, and the one after the last  #? pp
BEFORE = @BEFORE@  # parameters of the first stage  #? pp
AFTER = @AFTER@  # parameters of the last stage  #? pp


"""
PREPARE = """def prepare(step, mesh):
    @DOC@
    model, before = step.model, list(step.model.parameters())  #? spread
    parallelize_module(model, mesh["tp"], TENSOR_PARALLEL)  #? tp
    blocks = model.get_submodule(@LIST@)  #? blocks !lists
    for name, block in list(blocks.named_children()):  #? recompute !lists
        setattr(blocks, name, checkpoint_wrapper(block, preserve_rng_state=False@CONTEXT@))  #? recompute !lists
    for blocks in map(model.get_submodule, @LISTS@):  #? recompute lists
        for name, block in list(blocks.named_children()):  #? recompute lists
            setattr(blocks, name, checkpoint_wrapper(block, preserve_rng_state=False@CONTEXT@))  #? recompute lists
    blocks = [block for name in @LISTS@ for block in model.get_submodule(name).children()]  #? listed lists
    for block in blocks:  #? compiled
        block.compile()  # by itself, and before it is sharded  #? compiled
    options = {"mesh": mesh[@DATA@], "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}  #? mixed
    options = {"mesh": mesh[@DATA@]}  #? data !mixed
    for module in [*blocks, model]:  #? data
        fully_shard(module, **options)  #? shard reshard
        fully_shard(module, **options, reshard_after_forward=False)  #? shard !reshard
        replicate(module, **options)  #? replicate
    now = dict(zip(before, model.parameters(), strict=True))  #? spread
    now = {p: p for p in step.model.parameters()}  #? !spread
    groups = {}  #? tp
    for number, group in enumerate(step.optimizer.param_groups):  #? tp
        for p in [now[p] for p in group["params"] if p in now]:  #? tp
            alike = number, getattr(p, "device_mesh", None)  # one kernel takes one mesh  #? tp
            groups.setdefault(alike, {**group, "params": []})["params"].append(p)  #? tp
    return type(step.optimizer)(list(groups.values()))  #? tp
    groups = [(group, [now[p] for p in group["params"] if p in now]) for group in step.optimizer.param_groups]  #? !tp
    return type(step.optimizer)([{**group, "params": params} for group, params in groups if params])  #? !tp


"""
STEP = '''def build():
    """This rank's model, loss and optimizer, and the inputs of a step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.get_device_module(device).set_device(dist.get_node_local_rank(fallback_rank=0))
    mesh = init_device_mesh(device, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    torch.manual_seed(0)  # the same parameters on all ranks
    step = @FUNCTION@()  # on the host: each block moves to the device when it is sharded  #? shard
    step = @FUNCTION@()  #? !shard
    step.model.to(device)  #? !shard
    optimizer = prepare(step, mesh)
    samples = torch.arange(MICROBATCHES * MICROBATCH)@OWN@
    return step.model, step.loss, optimizer, [x[samples % len(x)].to(device) for x in step.inputs]  # or your data


def train_step(model, loss, optimizer, inputs):
    """One step; returns the mean loss over the samples of this rank."""
    total = 0.0
    for number, microbatch in enumerate(zip(*(x.split(MICROBATCH) for x in inputs), strict=True)):
        last = number == MICROBATCHES - 1  # which reduces gradients  #? once
        model.set_is_last_backward(last)  #? once
        model.set_requires_gradient_sync(last)  #? once
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
STAGE = '''def absent(values):  #? mixes
    """The tensors among `values` on `meta`: shapes, of which nothing is computed."""  #? mixes
    return tree_map_only(torch.Tensor, lambda x: x.to("meta"), values)  #? mixes
  #? mixes
  #? mixes
class Absent(TorchFunctionMode):  #? mixes
    """What follows from a tensor on `meta` is on `meta`."""  #? mixes
  #? mixes
    def __torch_function__(self, func, types, args=(), kwargs=None):  #? mixes
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs))):  #? mixes
            args, kwargs = absent((args, kwargs))  #? mixes
        return func(*args, **kwargs or {})  #? mixes
  #? mixes
  #? mixes
class Sent(Exception):
    """Takes the output of a stage out of the model's code."""


class Stage(torch.nn.Module):
    """Blocks of the model, with what runs before them on the first stage, and what runs after them on the last one."""

    def __init__(self, number, mesh):
        super().__init__()
        torch.manual_seed(0)  # the same parameters on all ranks
        self.step = step = @FUNCTION@()  # on the host: each block moves to the device when it is sharded  #? shard
        self.step = step = @FUNCTION@()  #? !shard
        self.model, self.backward_passes = step.model, 0  #? data
        self.model = step.model  #? !data
        self.first, self.last, (begin, end) = number == 0, number == len(STAGES) - 1, STAGES[number]
        blocks = step.model.get_submodule(@LIST@)
        del blocks[end:], blocks[:begin]
        for name in [*([] if self.first else BEFORE), *([] if self.last else AFTER)]:
            holder, name = step.model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            shape = getattr(holder, name).detach().to("meta")
            delattr(holder, name)
            setattr(holder, name, shape)
        step.model.to(mesh.device_type)  #? !shard
        self.optimizer = prepare(step, mesh)
        self.code, step.model.forward = step.model.forward, self.run
        if not self.first:
            blocks[0].register_forward_pre_hook(lambda _, args: (self.received, *args[1:]), prepend=True)
        if not self.last:
            blocks[-1].register_forward_hook(self.send)
            step.model.register_forward_hook(self.send)
        hidden = torch.empty(@HIDDEN@, dtype=@COMPUTED@, device="meta", requires_grad=True)
        output = torch.empty((), device="meta") if self.last else hidden
        device, group = torch.device(mesh.device_type), mesh["pp"].get_group()
        self.pipelined = PipelineStage(self, number, len(STAGES), device, hidden, output, group=group)

    def send(self, module, args, output):
        raise Sent(output)

    def run(self, *args, **kwargs):
        if not self.first:  # what other stages compute has shapes and no values
            args, kwargs = tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, kwargs))  #? !mixes
            args, kwargs = absent((args, kwargs))  #? mixes
        try:
            return self.code(*args, **kwargs)  #? !mixes
            with Absent():  #? mixes
                return self.code(*args, **kwargs)  #? mixes
        except Sent as sent:
            return sent.args[0]

    def forward(self, received=None, *, inputs):
        self.received = received
        try:
            output = self.step.loss(self.model, *inputs)
        except Sent as sent:
            output = sent.args[0]
        output.register_hook(self.begin_backward)  #? data
        return output
  #? data
    def begin_backward(self, gradient):  #? data
        self.backward_passes += 1  #? data
        last = self.backward_passes % MICROBATCHES == 0  # which reduces gradients  #? data
        self.model.set_is_last_backward(last)  #? data
        self.model.set_requires_gradient_sync(last)  #? data
        self.model.set_reshard_after_backward(last)  #? gathered


'''
STAGES = '''def build():
    """This rank's schedule and stages, and the inputs of a step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.get_device_module(device).set_device(dist.get_node_local_rank(fallback_rank=0))
    mesh = init_device_mesh(device, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    stages = [Stage(number, mesh) for number in range(mesh["pp"].get_local_rank(), len(STAGES), MESH["pp"])]
    staged = [stage.pipelined for stage in stages]  #? looped
    schedule = @SCHEDULE@(@STAGE@, MICROBATCHES, lambda loss, _: loss / MICROBATCHES, scale_grads=False)
    samples = torch.arange(MICROBATCHES * MICROBATCH)@OWN@
    return schedule, stages, [x[samples % len(x)].to(device) for x in stages[0].step.inputs]  # or your data


def train_step(schedule, stages, inputs):
    """One step; returns the mean loss over the samples of this rank, 0 on ranks without the last stage."""
    losses = [torch.zeros((), device=inputs[0].device)]
    with implicit_replication():  # of tensors that TENSOR_PARALLEL does not divide  #? tp
        schedule.step(inputs=inputs, target=inputs[0], losses=losses, return_outputs=False)  #? tp
    schedule.step(inputs=inputs, target=inputs[0], losses=losses, return_outputs=False)  #? !tp
    for stage in stages:
        stage.optimizer.step()
        stage.optimizer.zero_grad()
    return sum(loss.detach() for loss in losses).double()


'''
