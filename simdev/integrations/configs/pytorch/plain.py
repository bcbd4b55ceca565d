"""A script for a plain module of the user's own: tensor parallelism, recomputation and FSDP2 (or replication) around
each block and the model, accumulation or a pipeline, the step's own optimizer.

A pipeline stage runs the model's own code with the blocks of the stage. What other stages compute is computed on
PyTorch's device ``meta``: it has shapes and no values."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
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
    """The script, which imports the ``make_step`` that was planned. The user replaces the inputs of ``build``."""
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
    flags["mixes"] = flags["pp"] and built.mixes
    flags["mixed"] = flags["data"] and settings.precision == "mixed"
    flags["once"] = flags["data"] and settings.microbatches > 1 and not settings.reduce_each
    flags["renewed"] = flags["data"] or flags["tp"]  # parameters are other objects then
    flags["owned"] = not flags["tp"] and (flags["data"] or flags["pp"])
    styles = _styles(built) if flags["tp"] else ""
    flags["inputs"] = "PrepareModuleInput" in styles
    parts = ["fsdp"] * (flags["shard"] or flags["mixed"]) + ["pipelining as pipe"] * flags["pp"]
    flags["parts"] = bool(parts)
    options = []
    if flags["mixed"]:
        options.append('"mp_policy": fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)')
    if flags["shard"] and (settings.gathered or not settings.reshard_after_forward):
        options.append('"reshard_after_forward": False')
    flags["options"] = bool(options)
    values = {
        "MODULE": Path(path).stem,
        "FUNCTION": function,
        "MESH": sizes or {"dp_shard": 1},
        "DATA": ", ".join(map(repr, data)),
        "OPTIONS": "{" + ", ".join(options) + "}",
        "SHARD": "fsdp.fully_shard" if flags["shard"] else "replicate",
        "HOW": ", **OPTIONS" if options else "",
        "PARTS": ", ".join(parts),
        "APPEND": APPEND,
        "ABSENT": ABSENT,
        "CUT": CUT,
        "TENSOR": "experimental, parallel" if not flags["inputs"] else "Replicate, experimental, parallel",
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
    prepare, build = PREPARE.replace("@SPREAD@\n", SPREAD), BUILD
    if flags["pp"]:
        prepare, build = STAGE.replace("@SPREAD@\n", textwrap.indent(SPREAD, "    ")), ""
    elif not flags["spread"]:
        prepare = ""
    text = "".join([HEAD, POLICY * flags["selective"], prepare, build, MAIN])
    run = f"As train.py beside {Path(path).name}: {command}"
    return header(job, choice, RELEASE, run) + render(text, flags, values)


def _doc(flags: dict[str, bool]) -> str:
    """What ``prepare`` does."""
    parts = {word: word for word in ("recompute", "shard", "replicate")}
    parts = {"divide": "tp", "recompute": "recompute", "compile": "compiled", **parts}
    words = [word for word, flag in parts.items() if flags[flag]]
    listed = ", ".join(words[:-1]) + " and " * (len(words) > 1) + "".join(words[-1:])
    renewed = "; its optimizer gets the new parameters" if flags["renewed"] else ""
    return f"{listed.capitalize()} the model of `step`, in place{renewed}."


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
        "ENDS": _ends(_paired(ends.before), _paired(ends.after)),
        "HIDDEN": f"({ends.shape[0] * settings.microbatch}, {', '.join(map(str, ends.shape[1:]))})",
        "COMPUTED": computes,
        "SCHEDULE": f"pipe.{SCHEDULES[settings.schedule]}",
        "STAGE": "stages" if settings.schedule in LOOPED else "stages[0]",
    }


def _paired(names: Iterable[str]) -> list[tuple[str, str]]:
    """The module and the name in it of each parameter."""
    return [(part, own) for part, _, own in (name.rpartition(".") for name in sorted(names))]


def _ends(before: list[tuple[str, str]], after: list[tuple[str, str]]) -> str:
    if len(line := f"ONLY_FIRST, ONLY_LAST = {before}, {after}  # parameters of these stages") <= 120:
        return line
    return f"ONLY_FIRST = {_wrapped(repr(before))}\nONLY_LAST = {_wrapped(repr(after))}"


def _wrapped(code: str) -> str:
    """Code in lines of at most 120 columns, of which the first follows a name."""
    return "\n    ".join(textwrap.wrap(code, 100, break_long_words=False, break_on_hyphens=False))


def _styles(built: PlainModel) -> str:
    """The tensor-parallel plan with PyTorch's styles, as code. Raises :class:`Unsupported` for styles of the user's."""
    names: dict[str, list[str]] = {}
    for name, style in built.tp_plan.items():
        found = INPUT.fullmatch(style) if isinstance(style, str) else None
        if found:
            layouts = ", ".join("Replicate()" if n + 1 == int(found[1]) else "None" for n in range(int(found[2])))
            code = f"parallel.PrepareModuleInput(input_layouts=({layouts},), desired_input_layouts=({layouts},))"
        elif style in STYLES:
            code = STYLES[style]
        else:
            raise Unsupported(f"the script cannot write the style of {name} (tp): it knows {', '.join(STYLES)}")
        names.setdefault(code, []).append(name)
    lines = [_wrapped(f"dict.fromkeys({listed}, {code})") for code, listed in names.items()]
    return "TENSOR_PARALLEL = " + "\nTENSOR_PARALLEL |= ".join(lines)


STYLES = {"colwise": "parallel.ColwiseParallel(use_local_output=False)", "rowwise": "parallel.RowwiseParallel()"}
HEAD = """import itertools  #? selective
import time
from functools import partial  #? pp

import torch
import torch.distributed as dist
from torch.distributed import @PARTS@  #? parts
from torch.distributed._composable.replicate_with_fsdp import replicate  #? replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  #? recompute
from torch.distributed.tensor import @TENSOR@  #? tp

from @MODULE@ import @FUNCTION@

MESH = @MESH@
@STYLES@  #? tp
MICROBATCH, MICROBATCHES = @MICROBATCH@, @MICROBATCHES@  # samples on each rank, how often
STAGES = @STAGES@  # blocks of the pipeline stages: the first one, and the one after the last  #? pp
@ENDS@  #? pp
OPTIONS = @OPTIONS@  #? options
@ABSENT@  #? pp


"""
# What a plan does to `model`, whose parameters before it are `before`, and to the optimizer of `step`.
SPREAD = """    parallel.parallelize_module(model, mesh["tp"], TENSOR_PARALLEL)  #? tp
    for name, block in list(blocks.named_children()):  #? recompute !lists
        setattr(blocks, name, checkpoint_wrapper(block@CONTEXT@))  #? recompute !lists
    for blocks in map(model.get_submodule, @LISTS@):  #? recompute lists
        for name, block in list(blocks.named_children()):  #? recompute lists
            setattr(blocks, name, checkpoint_wrapper(block@CONTEXT@))  #? recompute lists
    blocks = [block for name in @LISTS@ for block in model.get_submodule(name).children()]  #? listed lists
    for block in blocks:  #? compiled
        block.compile()  # by itself, and before it is sharded  #? compiled
    for module in [*blocks, model]:  #? data
        @SHARD@(module, mesh=mesh[@DATA@]@HOW@)  #? data
    now = dict(zip(before, model.parameters(), strict=True))  #? renewed !tp
    now = {p: p for p in model.parameters()}  #? pp !renewed
    now, groups = dict(zip(before, model.parameters(), strict=True)), {}  # parameters, and those of one mesh  #? tp
    for number, group in enumerate(step.optimizer.param_groups):  #? tp
        for p in [now[p] for p in group["params"] if p in now]:  #? tp
            @APPEND@  #? tp
    step.optimizer.param_groups = list(groups.values())  #? tp
    for group in step.optimizer.param_groups:  #? owned
        group["params"] = [now[p] for p in group["params"] if p in now]  #? owned
"""
APPEND = 'groups.setdefault((number, getattr(p, "device_mesh", 0)), {**group, "params": []})["params"].append(p)'
ABSENT = (
    'absent = partial(torch.utils._pytree.tree_map_only, torch.Tensor, lambda x: x.to("meta"))  # has shapes, no values'
)
CUT = 'setattr(model.get_submodule(part), name, model.get_submodule(part)._parameters.pop(name).data.to("meta"))'
PREPARE = """def prepare(step, mesh):
    @DOC@
    model, before = step.model, list(step.model.parameters())  #? renewed
    model = step.model  #? !renewed
    blocks = model.get_submodule(@LIST@)  #? blocks !lists
@SPREAD@


"""
BUILD = """def build():  # this rank's model, loss and optimizer, and the inputs of a step
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = dist.init_device_mesh(device, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    torch.manual_seed(0)  # the same parameters on all ranks
    step = @FUNCTION@()  # on the host: each block moves to the device when it is sharded  #? shard
    step = @FUNCTION@()  #? !shard
    step.model.to(device)  #? !shard
    prepare(step, mesh)  #? spread
    samples = torch.arange(MICROBATCHES * MICROBATCH)@OWN@
    return step.model, step.loss, step.optimizer, [x[samples % len(x)].to(device) for x in step.inputs]  # or your data


@experimental.implicit_replication()  # of tensors that TENSOR_PARALLEL does not divide  #? tp
def train_step(model, loss, optimizer, inputs):  # returns this rank's mean loss
    total = 0.0
    for number, microbatch in enumerate(zip(*(x.split(MICROBATCH) for x in inputs), strict=True)):
        last = number == MICROBATCHES - 1  # which reduces gradients  #? once
        model.set_is_last_backward(last)  #? once
        model.set_requires_gradient_sync(last)  #? once
        model.set_reshard_after_backward(number == MICROBATCHES - 1)  # gathered once in a step  #? gathered
        part = loss(model, *microbatch) / MICROBATCHES
        part.backward()
        total += part.detach().double()
    optimizer.step()
    optimizer.zero_grad()
    return total


"""
STAGE = """class Stage(pipe.PipelineStage):  # blocks, and what runs around them  #? !mixes
class Stage(pipe.PipelineStage, torch.overrides.TorchFunctionMode):  # blocks, and what runs around them  #? mixes
    class Sent(Exception): ...  # takes the output of a stage out of the model's code

    def __init__(self, number, mesh):
        x = torch.empty(@HIDDEN@, dtype=@COMPUTED@, device="meta", requires_grad=True)
        super().__init__(torch.nn.Module(), number, len(STAGES), mesh.device_type, x, x, group=mesh.get_group("pp"))
        torch.manual_seed(0)  # the same parameters on all ranks
        self.step = step = @FUNCTION@()  # on the host: each block moves to the device when it is sharded  #? shard
        self.step = step = @FUNCTION@()  #? !shard
        model, blocks, (begin, end) = step.model, step.model.get_submodule(@LIST@), STAGES[number]
        del blocks[end:], blocks[:begin]
        for part, name in [*([] if self.is_first else ONLY_FIRST), *([] if self.is_last else ONLY_LAST)]:
            @CUT@
        model.to(mesh.device_type)  #? !shard
        before = list(model.parameters())  #? renewed
@SPREAD@
        blocks[0].register_forward_pre_hook(lambda _, args: (*(self.received or args[:1]), *args[1:]), prepend=True)
        for module in [] if self.is_last else [blocks[-1], model]:
            module.register_forward_hook(self.send)
        model.register_forward_pre_hook(lambda _, *given: given if self.is_first else absent(given), with_kwargs=True)
        model.forward = partial(self.until_sent, model.forward)

    def send(self, module, args, output):
        raise self.Sent(output)

    def until_sent(self, code, *args, **kwargs):
        try:
            return code(*args, **kwargs)
        except self.Sent as sent:
            return sent.args[0]

    def forward_maybe_with_nosync(self, *received, inputs):
        self.received = received
        return self.until_sent(self.step.loss, self.step.model, *inputs)  #? !mixes
        with self:  # which calls `__torch_function__`  #? mixes
            return self.until_sent(self.step.loss, self.step.model, *inputs)  #? mixes
  #? mixes
    def __torch_function__(self, func, types, args=(), kwargs=None):  # what follows from `meta` is on `meta`  #? mixes
        if any(getattr(leaf, "is_meta", False) for leaf in torch.utils._pytree.tree_leaves((args, kwargs))):  #? mixes
            args, kwargs = absent((args, kwargs))  #? mixes
        return func(*args, **kwargs or {})  #? mixes
  #? data
    def backward_maybe_with_nosync(self, *args, last_backward=False):  #? data
        self.step.model.set_is_last_backward(last_backward)  # which reduces gradients  #? data
        self.step.model.set_requires_gradient_sync(last_backward)  #? data
        self.step.model.set_reshard_after_backward(last_backward)  #? gathered
        return super().backward_maybe_with_nosync(*args)  #? data


def build():  # this rank's schedule and stages, and the inputs of a step
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = dist.init_device_mesh(device, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    stages = [Stage(number, mesh) for number in range(mesh["pp"].get_local_rank(), len(STAGES), MESH["pp"])]
    schedule = @SCHEDULE@(@STAGE@, MICROBATCHES, lambda x, _: x / MICROBATCHES, scale_grads=False)
    samples = torch.arange(MICROBATCHES * MICROBATCH)@OWN@
    return schedule, stages, [x[samples % len(x)].to(device) for x in stages[0].step.inputs]  # or your data


@experimental.implicit_replication()  # of tensors that TENSOR_PARALLEL does not divide  #? tp
def train_step(schedule, stages, inputs):  # returns this rank's mean loss, 0 before the last stage
    losses = [torch.zeros((), device=inputs[0].device)]
    schedule.step(inputs=inputs, target=inputs[0], losses=losses, return_outputs=False)
    for stage in stages:
        stage.step.optimizer.step()
        stage.step.optimizer.zero_grad()
    return sum(loss.detach().double() for loss in losses)


"""
