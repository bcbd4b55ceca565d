"""DeepSpeed: ZeRO's configuration, and the blocks that are recomputed."""

from __future__ import annotations

import json

from simdev.errors import Unsupported
from simdev.integrations.configs.settings import (
    block_classes,
    header,
    refuse,
    refuse_parts,
    refuse_precision,
    settings_of,
)
from simdev.planners import Choice, Job

RELEASE = "DeepSpeed 0.19"


def write(job: Job, choice: Choice) -> str:
    """A module with ``CONFIG``, for ``deepspeed.initialize(model=prepare(model), config=CONFIG)``: ZeRO stage 3 where
    parameters are sharded, stage 0 where they are not. ``prepare`` wraps the blocks that the plan
    recomputes: DeepSpeed's configuration has no switch for that."""
    settings, mesh = settings_of(job, choice), choice.mesh
    refuse(settings, "a DeepSpeed configuration", "pp", "cp", "ep")
    refuse_parts(settings, "a DeepSpeed configuration")
    refuse_precision(settings, "a DeepSpeed configuration", "mixed", "mixed-float16", "float32")
    if mesh["dp_shard"] > 1 and settings.microbatches > 1 and not settings.reduce_each:
        raise Unsupported(f"ZeRO 3 reduces gradients after each microbatch, and the plan {choice} does not")
    if mesh["dp_shard"] == 1 and settings.reduce_each:
        raise Unsupported(f"ZeRO 0 reduces gradients with the last microbatch, and the plan {choice} with each")
    if settings.recompute == "selective":
        raise Unsupported("simdev writes no DeepSpeed code that recomputes parts of a block (selective)")
    if mesh["dp_shard"] > 1 and mesh["dp_replicate"] > 1:
        raise Unsupported(
            "DeepSpeed 0.19 no longer replicates groups of shards (MiCS), and this plan does: dp_replicate"
        )
    zero: dict[str, object] = {"stage": 3 if mesh["dp_shard"] > 1 else 0}
    document = {
        "train_batch_size": settings.batch,
        "train_micro_batch_size_per_gpu": settings.microbatch,
        "gradient_accumulation_steps": settings.microbatches,
        "bf16": {"enabled": settings.precision == "mixed"},
        "fp16": {"enabled": settings.precision == "mixed-float16"},
        "communication_data_type": "fp16" if settings.precision == "mixed-float16" else "fp32",  # of gradients
        **({"data_types": {"grad_accum_dtype": "fp32"}} if mesh["dp_shard"] > 1 else {}),  # stage 0 has no other
        "zero_optimization": zero,
        "tensor_parallel": {"autotp_size": mesh["tp"]},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    text = json.dumps(document, indent=4).replace("true", "True").replace("false", "False")
    lines = [f"LENGTH = {settings.length}  # tokens of a sequence", f"CONFIG = {text}", "", ""]
    if settings.recompute == "full":
        blocks = block_classes(job)
        if not blocks:
            raise Unsupported(f"simdev does not know the class of the blocks of {job.model.name}, to recompute them")
        lines += [
            f"RECOMPUTED = {blocks!r}  # the classes of the blocks that repeat",
            "",
            "",
            "def prepare(model):",
            '    """Keep the input of each block only, and compute the block again in its backward pass."""',
            "    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper",
            "",
            "    blocks = [module for module in model.modules() if type(module).__name__ in RECOMPUTED]",
            "    if not blocks:",
            '        raise ValueError(f"{type(model).__name__} has no block of a class among {RECOMPUTED}")',
            "    wrapper.apply_activation_checkpointing(model, check_fn=lambda module: module in blocks)",
            "    return model",
        ]
    else:
        lines += ["def prepare(model):", "    return model"]
    gpus = min(job.ranks, job.cluster.gpus)
    nodes = max(1, job.ranks // gpus)
    run = f"deepspeed --num_nodes {nodes} --num_gpus {gpus} train.py, where train.py imports this file"
    return header(job, choice, RELEASE, run) + "\n".join(lines) + "\n"
