"""PyTorch alone: a script that trains the user's own model by the plan."""

from __future__ import annotations

from pathlib import Path

from simdev.errors import Unsupported
from simdev.integrations.configs.settings import Settings, header, refuse, settings_of, torchrun
from simdev.planners import Choice, Job

RELEASE = "PyTorch 2.13"


def write(job: Job, choice: Choice) -> str:
    """A script for ``torchrun`` that builds the model with the ``make_step`` that was planned, and trains one step: the
    device mesh, recomputation, FSDP2 or replication around each block and the model, accumulation, the step's own
    optimizer. It needs nothing of simdev but what ``make_step`` itself imports. The user replaces ``batches``."""
    settings = settings_of(job, choice)
    refuse(settings, "the script for a plain module", "pp", "cp", "ep", "tp")
    path, colon, function = job.model.name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise Unsupported(f"a script needs the model's own code (my_model.py:make_step), and this is {job.model.name}")
    if settings.mesh["dp_shard"] > 1 and settings.reduce_each != (choice.reduce_each and settings.microbatches > 1):
        raise Unsupported(f"the plan {choice} leaves open when gradients are reduced")
    command = torchrun(job, "train.py")
    return header(job, choice, RELEASE, f"As train.py beside {Path(path).name}: {command}") + _script(
        settings, Path(path).stem, function, bool(job.parameters.get("reshard_after_forward", True))
    )


def _script(settings: Settings, module: str, function: str, reshard: bool) -> str:
    sizes = {axis: settings.mesh[axis] for axis in ("dp_replicate", "dp_shard") if settings.mesh[axis] > 1}
    constants = [
        f"MESH = {sizes or {'dp_shard': 1}}",
        f"MICROBATCH, MICROBATCHES = {settings.microbatch}, {settings.microbatches}  # samples on each rank, how often",
        f"REDUCE_EACH = {settings.reduce_each}  # reduce gradients after each microbatch, not with the last one only",
        f"RESHARD = {reshard}  # free the gathered parameters of a block after its forward pass",
    ]
    wrapped, policy, recompute = RECOMPUTE[settings.recompute]
    return "\n".join(
        [
            '"""One training step on all ranks."""',
            "",
            "import os",
            "",
            "import torch",
            "import torch.distributed as dist",
            "from torch import nn",
            "from torch.distributed._composable.replicate_with_fsdp import replicate",
            *wrapped,
            "from torch.distributed.device_mesh import init_device_mesh",
            "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
            *(
                ["from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts"]
                * bool(policy)
            ),
            "",
            f"from {module} import {function}",
            "",
            *constants,
            "",
            "",
            *policy,
            BLOCKS,
            SPREAD.replace("@RECOMPUTE@\n", recompute),
            MAIN.replace("make_step()", f"{function}()"),
        ]
    )


CONTEXTS = "from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts"
WRAPPER = "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper"
POLICY = '''def kept_results():
    """Keep attention and the first of every two products, recompute the rest."""
    aten = torch.ops.aten
    attention = {aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default}
    products = {False: 0, True: 0}

    def policy(context, op, *_, **__):
        products[context.is_recompute] += op == aten.mm.default
        keep = op in attention or (op == aten.mm.default and products[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


'''.splitlines()
WRAP = """    for holder in lists_of_blocks(model):
        for name, block in list(holder.named_children()):
            setattr(holder, name, checkpoint_wrapper(block, preserve_rng_state=False{more}))
"""
RECOMPUTE: dict[str, tuple[list[str], list[str], str]] = {
    "none": ([], [], ""),
    "full": ([WRAPPER], [], WRAP.format(more="")),
    "selective": ([WRAPPER], POLICY, WRAP.format(more=", context_fn=kept_results")),
}
BLOCKS = '''def lists_of_blocks(model):
    """The lists whose members repeat: at least half of them are of one class, and each has several parts."""
    found, inside = [], set()
    for module in model.modules():
        if module in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        owners = [sum(bool(list(part.parameters(False))) for part in block.modules()) for block in module]
        kinds = {type(block) for block in module}
        if min(owners) > 1 and len(kinds) <= len(module) // 2 + 1 and len(kinds) < len(module):
            found.append(module)
            inside |= {part for block in module for part in block.modules()}
    return found

'''
SPREAD = '''def spread(model, mesh):
    """Recompute and shard (or replicate) each block and the model, in place."""
@RECOMPUTE@
    axes = tuple(axis for axis in MESH if mesh[axis].size() > 1)
    mixed = any(parameter.dtype == torch.float32 for parameter in model.parameters())
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    blocks = [block for holder in lists_of_blocks(model) for block in holder.children()]
    for module in [*blocks, model] if axes else []:
        if "dp_shard" in axes:
            keep = RESHARD if module is not model else None
            fully_shard(module, mesh=mesh[axes], mp_policy=policy, reshard_after_forward=keep)
        else:
            replicate(module, mesh=mesh["dp_replicate"], mp_policy=policy)


def batches(inputs):
    """The microbatches of this rank, out of the samples of ``inputs``. Replace it by a data loader."""
    for number in range(MICROBATCHES):
        first = (dist.get_rank() * MICROBATCHES + number) * MICROBATCH
        yield [x[torch.arange(first, first + MICROBATCH) % len(x)] for x in inputs]

'''
MAIN = '''def build():
    """This rank's model, loss and optimizer, and the inputs of a step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    torch.manual_seed(0)  # the same parameters on all ranks
    step = make_step()
    model = step.model.to(device)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in step.optimizer.param_groups]
    spread(model, mesh)
    now = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    groups = [{**group, "params": [now[name] for name in group["params"]]} for group in groups]
    return model, step.loss, type(step.optimizer)(groups), [x.to(device) for x in step.inputs]


def train_step(model, loss, optimizer, inputs):
    """One step; returns the mean loss over the samples of this rank."""
    total = 0.0
    for number, microbatch in enumerate(batches(inputs)):
        if hasattr(model, "set_requires_gradient_sync"):
            last = number == MICROBATCHES - 1
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last or REDUCE_EACH)
        part = loss(model, *microbatch) / MICROBATCHES
        part.backward()
        total += part.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


if __name__ == "__main__":
    dist.init_process_group()
    parts = build()
    for number in range(3):
        value = train_step(*parts)
        dist.all_reduce(value)
        if dist.get_rank() == 0:
            print(f"step {number}: loss {value.item() / dist.get_world_size():.12g}")
    del parts, value  # before the interpreter ends: gloo's threads must not be the last to hold a tensor
    dist.barrier()
    dist.destroy_process_group()
'''
