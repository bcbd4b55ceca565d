"""Hugging Face's transformers: the model's ``DistributedConfig`` and the arguments of its Trainer."""

from __future__ import annotations

from simdev.errors import Unsupported
from simdev.integrations.configs.settings import header, refuse, refuse_precision, settings_of, torchrun
from simdev.planners import Choice, Job

RELEASE = "transformers 5.23"


def write(job: Job, choice: Choice) -> str:
    """A module with ``distributed``, for ``Model.from_pretrained(..., distributed_config=distributed)``, and
    ``arguments``, for ``Trainer``. FSDP2 shards each block and the root by the plan that the model's class carries."""
    settings, mesh = settings_of(job, choice), choice.mesh
    refuse(settings, "transformers' Trainer", "pp", "cp")
    refuse_precision(settings, "transformers' Trainer", "mixed", "mixed-float16", "float32")
    if settings.recompute == "selective":
        raise Unsupported("transformers recomputes whole layers, and this plan recomputes parts (selective)")
    if mesh["ep"] > 1 and mesh["tp"] > 1:
        raise Unsupported("transformers does not divide experts over tp, and this plan does (ep and tp)")
    sharded = mesh["dp_shard"] * mesh["ep"]  # experts take their ranks from those that shard parameters
    if sharded == 1 and mesh["dp_replicate"] > 1 and mesh["tp"] > 1:
        raise Unsupported("transformers replicates no tensor-parallel model without sharding (dp_replicate and tp)")
    bf16 = settings.precision == "mixed"
    sizes = {
        "fsdp_size": sharded,
        "dp_replicate_size": mesh["dp_replicate"] if sharded > 1 else 1,
        "tp_size": mesh["tp"],
        "ep_size": mesh["ep"],
        "pp_size": 1,
        "fsdp_mixed_precision": bf16,
        "fsdp_cpu_offload": False,
    }
    arguments = {
        "per_device_train_batch_size": settings.microbatch,
        "gradient_accumulation_steps": settings.microbatches,
        "bf16": bf16,
        "fp16": settings.precision == "mixed-float16",
        "optim": "adamw_torch_fused",
        "activation_checkpointing": settings.recompute == "full",
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": settings.reduce_each}},
    }
    lines = [
        "from transformers import TrainingArguments",
        "from transformers.distributed import DistributedConfig",
        "",
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
