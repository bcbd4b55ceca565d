"""Hugging Face's transformers: the model's ``DistributedConfig`` and the arguments of its Trainer."""

from __future__ import annotations

from simdev.errors import Unsupported
from simdev.graphs.parallel_model import every_nth
from simdev.integrations.configs.settings import (
    header,
    hub_model,
    refuse,
    refuse_parts,
    refuse_precision,
    settings_of,
    torchrun,
)
from simdev.planners import Choice, Job

RELEASE = "transformers 5.24"


def write(job: Job, choice: Choice) -> str:
    """A module with ``distributed``, for ``Model.from_pretrained(..., distributed_config=distributed, dtype=DTYPE)``,
    and ``arguments``, for ``Trainer``. FSDP2 shards each block and the root by the plan that the model's class carries,
    with the model's list of blocks, which not every class names."""
    settings, mesh = settings_of(job, choice), choice.mesh
    refuse(settings, "transformers' Trainer", "pp", "cp")
    refuse_precision(settings, "transformers' Trainer", "mixed", "mixed-float16", "float32")
    model = hub_model(job)
    if model is None:
        raise Unsupported(f"transformers has no model {job.model.name}")
    if mesh["tp"] > 1 and not model.divides:
        raise Unsupported(f"transformers has no tensor-parallel plan of {model.name}, and this plan divides it (tp)")
    if settings.recompute == "selective":
        raise Unsupported("transformers recomputes whole layers, and this plan recomputes parts (selective)")
    if mesh["ep"] > 1 and mesh["tp"] > 1:
        raise Unsupported("transformers does not divide experts over tp, and this plan does (ep and tp)")
    refuse_parts(settings, "transformers' Trainer", "torch.compile", "every n-th layer")
    sharded = mesh["dp_shard"] * mesh["ep"]  # experts take their ranks from those that shard parameters
    if sharded == 1 and mesh["dp_replicate"] > 1 and mesh["tp"] > 1:
        raise Unsupported("transformers replicates no tensor-parallel model without sharding (dp_replicate and tp)")
    if sharded > 1 and mesh["dp_replicate"] > 1 and settings.microbatches > 1 and not settings.reduce_each:
        message = "transformers' Trainer shards gradients after each microbatch where groups of shards are replicated"
        raise Unsupported(f"{message}, and the plan {choice} does not (dp_replicate)")
    bf16 = settings.precision == "mixed"
    sizes = {
        "fsdp_size": sharded,
        "dp_replicate_size": mesh["dp_replicate"] if sharded > 1 else 1,
        "tp_size": mesh["tp"],
        "ep_size": mesh["ep"],
        "pp_size": 1,
        **({"fsdp_plan": {f"{model.blocks}.*": "free_full_weight"}} if sharded > 1 else {}),
        "fsdp_mixed_precision": bf16,
        "fsdp_cpu_offload": False,
        **({"ep_implementation": "all_to_all"} if mesh["ep"] > 1 else {}),
    }
    every = every_nth({"recompute": settings.recompute})
    arguments = {
        "per_device_train_batch_size": settings.microbatch,
        "gradient_accumulation_steps": settings.microbatches,
        "bf16": bf16,
        "fp16": settings.precision == "mixed-float16",
        "optim": "adamw_torch_fused",
        "torch_compile": settings.compiled,
        "activation_checkpointing": settings.recompute != "none",
        **({"activation_checkpointing_kwargs": {"every_n_layers": every or 1}} if settings.recompute != "none" else {}),
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": settings.reduce_each}},
    }
    lines = [
        "import torch",
        "from transformers import TrainingArguments",
        "from transformers.distributed import DistributedConfig",
        "",
        f"# model = {model.name}.from_pretrained(..., distributed_config=distributed, dtype=DTYPE)",
        "# Trainer(model, arguments, train_dataset=...).train()",
        "DTYPE = torch.float32  # of the stored parameters",
        f"LENGTH = {settings.length}  # tokens of a sequence",
        "distributed = DistributedConfig(",
        *(f"    {name}={value!r}," for name, value in sizes.items()),
        ")",
        "arguments = TrainingArguments(",
        '    output_dir="output",',
        *(f"    {name}={value!r}," for name, value in arguments.items()),
        ")",
    ]
    run = torchrun(job, "train.py") + ", where train.py imports this file"
    return header(job, choice, RELEASE, run) + "\n".join(lines) + "\n"
