"""Mixtral (Jiang et al. 2024): Mistral's layers with a mixture of eight experts in place of the feed-forward part, two
for each token; FSDP2 around each layer, expert parallelism along ``ep``, tensor and sequence parallelism along ``tp``,
activation checkpointing by layer if asked for (``recompute="full"``).

Weights and gradients are bfloat16 in computation and float32 in storage; AdamW is fused. ``imbalance`` says how
unevenly routers spread tokens over the ranks of ``ep`` (see ``_moe.py``). The sliding window of attention is longer
than the sequences here.
"""

from __future__ import annotations

from functools import partial

from simdev.errors import UnknownName
from simdev.graphs.parallel_model import Part, Stage, parallel_model
from simdev.workloads.models._data import adam, axis_size, last_gradient, over_data, recomputed
from simdev.workloads.models._decoder import (
    check_heads,
    check_tensors,
    decoder,
    decoder_inputs,
    decoder_layer,
    grouped_attention,
    grouped_attention_plan,
    loss_over_tensors,
    over_tensors,
)
from simdev.workloads.models._moe import check_balance, mixture

SIZES = {
    "8x7b": {"width": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocabulary": 32_000},
    "8x22b": {"width": 6144, "layers": 56, "heads": 48, "kv_heads": 8, "hidden": 16384, "vocabulary": 32_768},
}
DEFAULTS = {
    **SIZES["8x7b"], "experts": 8, "active": 2, "length": 4096, "microbatch": 1, "recompute": "none", "imbalance": 1.0
}  # fmt: skip


def mixtral_flops(p) -> float:
    """Model FLOPs of one sequence, forward and backward: 6 per parameter that a token meets, and causal attention in
    full."""
    key_value = p["width"] * p["kv_heads"] // p["heads"]
    layer = 2 * p["width"] ** 2 + 2 * p["width"] * key_value + 3 * p["active"] * p["width"] * p["hidden"]
    parameters = p["layers"] * (layer + p["width"] * p["experts"]) + p["width"] * p["vocabulary"]
    return p["length"] * (6.0 * parameters + 12.0 * p["layers"] * p["width"] * p["length"])


def mixtral_checks(p, mesh) -> None:
    """Raise :class:`InvalidInput` where heads, experts or tokens do not divide."""
    check_heads(p, "mixtral")
    if p["recompute"] not in ("none", "full"):
        raise UnknownName("recompute", str(p["recompute"]), ("none", "full"), source="mixtral")
    check_tensors(p, mesh, "mixtral", ("heads", "kv_heads", "hidden", "length", "vocabulary"))
    check_balance(p, mesh, "mixtral")


@parallel_model(
    "mixtral",
    sizes=SIZES,
    defaults=DEFAULTS,
    axes=("dp_replicate", "dp_shard", "ep", "tp"),
    flops=mixtral_flops,
    source="Jiang et al., Mixtral of Experts, 2024; pytorch/torchtitan",
    checks=mixtral_checks,
)
def mixtral(
    mesh, part: Part, *, width, layers, heads, kv_heads, hidden, vocabulary, experts, active, length, microbatch,
    recompute, imbalance,
):  # fmt: skip
    import torch
    from torch import nn

    ways = axis_size(mesh, "tp")

    def layer():
        mixed = mixture(width, hidden, experts, active, 0, mesh, imbalance)
        return decoder_layer(width, grouped_attention(width, heads, kv_heads, ways), mixed, nn.RMSNorm)

    with torch.device("meta"):
        model = decoder(part, [layer() for _ in range(part.layers)], width, vocabulary, nn.RMSNorm)
    mixed = [layer.feed_forward for layer in model.layers]
    over_tensors(model, mesh, part, lambda _: grouped_attention_plan())
    recomputed(model, recompute)
    over_data(model, model.layers, mesh, experts=[one.experts for one in mixed])
    inputs = decoder_inputs(part, microbatch, length, width, width // heads, ways)
    return Stage(model, inputs, adam, last_gradient, context=partial(loss_over_tensors, mesh, part))
