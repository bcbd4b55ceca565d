"""Accelerate: the parallelism, FSDP2 and accumulation of an ``Accelerator``."""

from __future__ import annotations

from collections.abc import Mapping

from simdev.errors import Unsupported
from simdev.integrations.configs.settings import (
    block_classes,
    header,
    hub_model,
    refuse,
    refuse_parts,
    refuse_precision,
    settings_of,
    torchrun,
)
from simdev.planners import Choice, Job

RELEASE = "Accelerate 1.15"


def write(job: Job, choice: Choice) -> str:
    """A module with a function ``accelerator()``. FSDP2 wraps each block, by the name of its class where simdev knows
    Hugging Face's implementation, else by the model's own ``_no_split_modules``."""
    settings, mesh = settings_of(job, choice), choice.mesh
    refuse(settings, "Accelerate", "pp", "ep")
    refuse_parts(settings, "Accelerate", "torch.compile", "reshard_after_forward")
    refuse_precision(settings, "Accelerate", "mixed", "mixed-float16", "float32")
    if settings.recompute == "selective":
        raise Unsupported("Accelerate recomputes whole blocks, and this plan recomputes parts (selective)")
    if settings.recompute == "full" and mesh["dp_shard"] == 1:
        raise Unsupported("Accelerate recomputes blocks that FSDP wraps only, and this plan shards nothing (recompute)")
    replicated = mesh["dp_shard"] == 1 and mesh["dp_replicate"] > 1  # plain DDP: one replica on each rank
    if replicated and (mesh["tp"] > 1 or mesh["cp"] > 1):
        raise Unsupported("Accelerate replicates no tensor- or context-parallel model without sharding (dp_replicate)")
    model = hub_model(job)
    if mesh["tp"] > 1 and (model is None or not model.divides):
        raise Unsupported(
            "Accelerate divides models by the plan of their class in transformers, which has none here (tp)"
        )
    blocks = block_classes(job)
    mixed = settings.precision == "mixed"  # gradients are reduced in float32; Accelerate's "bf16" reduces in bfloat16
    sharding = {
        "fsdp_version": 2,
        "auto_wrap_policy": "transformer_based_wrap",
        **({"transformer_cls_names_to_wrap": blocks} if blocks else {}),
        "reshard_after_forward": settings.reshard_after_forward,
        "activation_checkpointing": settings.recompute == "full",
        "cpu_offload": False,
        **({"mixed_precision_policy": _Code("MixedPrecisionPolicy(torch.bfloat16, torch.float32)")} if mixed else {}),
    }
    accumulation = {"num_steps": settings.microbatches, "sync_each_batch": settings.reduce_each}
    sizes = {f"{axis}_size": mesh[axis] for axis in ("dp_replicate", "dp_shard", "tp", "cp")}
    precision = {"mixed": "bf16", "mixed-float16": "fp16", "float32": "no"}[settings.precision]
    sharded = mesh["dp_shard"] > 1
    names = ["Accelerator", *["FullyShardedDataParallelPlugin"] * sharded, *["ParallelismConfig"] * (not replicated)]
    lines = [
        *["import torch"] * (sharded and mixed),
        f"from accelerate import {', '.join(names)}",
        "from accelerate.utils import GradientAccumulationPlugin",
        *["from torch.distributed.fsdp import MixedPrecisionPolicy"] * (sharded and mixed),
        "",
        f"MICROBATCH = {settings.microbatch}  # sequences on each replica, for the data loader",
        f"LENGTH = {settings.length}  # tokens of a sequence",
        "",
        "",
        "def accelerator():",
        "    return Accelerator(",
        f"        mixed_precision={precision!r},",
        f"        dynamo_backend={'inductor' if settings.compiled else 'no'!r},",
        *([] if replicated else _call("        parallelism_config=ParallelismConfig", sizes)),
        *_call("        gradient_accumulation_plugin=GradientAccumulationPlugin", accumulation),
        *(_call("        fsdp_plugin=FullyShardedDataParallelPlugin", sharding) if sharded else []),
        "    )",
    ]
    run = torchrun(job, "train.py") + ", where train.py imports this file"
    return header(job, choice, RELEASE, run) + "\n".join(lines) + "\n"


class _Code(str):
    """A value that the file computes."""

    def __repr__(self) -> str:
        return str(self)


def _call(begin: str, values: Mapping[str, object]) -> list[str]:
    inner = [f"            {name}={value!r}," for name, value in values.items()]
    return [f"{begin}(", *inner, "        ),"]
