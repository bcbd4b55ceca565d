"""Qwen 3 with experts (Qwen Team 2025): a mixture of 128 small experts in each layer, eight for each token; heads of
128 numbers whatever the width, whose queries and keys pass an RMSNorm. FSDP2 around each layer, expert parallelism
along ``ep``, tensor and sequence parallelism along ``tp``, activation checkpointing by layer if asked for
(``recompute="full"``).

Weights and gradients are bfloat16 in computation and float32 in storage; AdamW is fused. ``imbalance`` says how
unevenly routers spread tokens over the ranks of ``ep``, ``dispatch`` and ``gate`` what is exchanged (see ``_moe.py``).
"""

from __future__ import annotations

from functools import partial

from simdev.graphs.parallel_model import Part, parallel_model
from simdev.workloads.models._moe import mixture_checks, mixture_decoder, mixture_flops

SIZES = {  # config.json of Qwen/Qwen3-30B-A3B and Qwen/Qwen3-235B-A22B
    "30b-a3b": {"width": 2048, "layers": 48, "heads": 32, "kv_heads": 4, "hidden": 768},
    "235b-a22b": {"width": 4096, "layers": 94, "heads": 64, "kv_heads": 4, "hidden": 1536},
}
DEFAULTS = {
    **SIZES["30b-a3b"], "head": 128, "experts": 128, "active": 8, "vocabulary": 151_936, "length": 4096,
    "microbatch": 1, "recompute": "none", "imbalance": 1.0, "dispatch": "pairs", "gate": "uniform",
}  # fmt: skip


@parallel_model(
    "qwen3-moe",
    sizes=SIZES,
    defaults=DEFAULTS,
    axes=("dp_replicate", "dp_shard", "ep", "tp"),
    flops=mixture_flops,
    source="Qwen Team, Qwen3 Technical Report, 2025; pytorch/torchtitan",
    checks=partial(mixture_checks, "qwen3-moe"),
)
def qwen3_moe(mesh, part: Part, **parameters):
    return mixture_decoder(mesh, part, **parameters, normed=True)
