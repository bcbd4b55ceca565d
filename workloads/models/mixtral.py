"""Mixtral (Jiang et al. 2024): Mistral's layers with a mixture of eight experts in place of the feed-forward part, two
for each token; FSDP2 around each layer, expert parallelism along ``ep``, tensor and sequence parallelism along ``tp``,
activation checkpointing by layer if asked for (``recompute="full"``).

Weights and gradients are bfloat16 in computation and float32 in storage; AdamW is fused. ``imbalance`` says how
unevenly routers spread tokens over the ranks of ``ep``, ``dispatch`` and ``gate`` what is exchanged (see ``_moe.py``).
The sliding window of attention is longer than the sequences here.
"""

from __future__ import annotations

from functools import partial

from simdev.graphs.parallel_model import Part, parallel_model
from simdev.workloads.models._moe import mixture_checks, mixture_decoder, mixture_flops

SIZES = {
    "8x7b": {"width": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocabulary": 32_000},
    "8x22b": {"width": 6144, "layers": 56, "heads": 48, "kv_heads": 8, "hidden": 16384, "vocabulary": 32_768},
}
DEFAULTS = {
    **SIZES["8x7b"], "experts": 8, "active": 2, "length": 4096, "microbatch": 1, "recompute": "none", "imbalance": 1.0,
    "dispatch": "pairs", "gate": "uniform",
}  # fmt: skip


@parallel_model(
    "mixtral",
    sizes=SIZES,
    defaults=DEFAULTS,
    axes=("dp_replicate", "dp_shard", "ep", "tp"),
    flops=mixture_flops,
    source="Jiang et al., Mixtral of Experts, 2024; pytorch/torchtitan",
    checks=partial(mixture_checks, "mixtral"),
)
def mixtral(mesh, part: Part, **parameters):
    return mixture_decoder(mesh, part, **parameters)
