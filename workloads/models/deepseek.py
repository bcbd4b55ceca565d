"""DeepSeek-V2 and V3 (DeepSeek-AI 2024): latent attention, whose keys and values come from a small vector for each
token; a few dense layers, then layers of many small experts with shared ones. FSDP2 around each layer, expert
parallelism along ``ep``, tensor and sequence parallelism along ``tp``, activation checkpointing by layer if asked for
(``recompute="full"``).

``layers`` counts the layers with experts; the ``dense`` ones before them are part of the first pipeline stage. The
second token that V3 predicts is left out. Values are padded to the width of keys, as flash-attention kernels want them.
Weights and gradients are bfloat16 in computation and float32 in storage (V3 itself trained in FP8). ``imbalance`` says
how unevenly routers spread tokens over the ranks of ``ep``, ``dispatch`` and ``gate`` what is exchanged (see
``_moe.py``).
"""

from __future__ import annotations

from functools import partial

from simdev.errors import UnknownName
from simdev.graphs.parallel_model import Part, Stage, parallel_model
from simdev.workloads.models._data import adam, axis_size, last_gradient, over_data, recomputed
from simdev.workloads.models._decoder import (
    check_tensors,
    decoder,
    decoder_inputs,
    decoder_layer,
    everywhere,
    gated,
    gated_plan,
    loss_over_tensors,
    on_rank,
    over_tensors,
    rotate,
)
from simdev.workloads.models._moe import check_balance, mixture

SIZES = {  # config.json of deepseek-ai/DeepSeek-V2-Lite, -V2 and -V3
    "v2lite": {
        "width": 2048, "layers": 26, "dense": 1, "heads": 16, "query_rank": 0, "hidden": 1408, "dense_hidden": 10944,
        "experts": 64, "active": 6, "shared": 2, "vocabulary": 102_400,
    },
    "v2": {
        "width": 5120, "layers": 59, "dense": 1, "heads": 128, "query_rank": 1536, "hidden": 1536,
        "dense_hidden": 12288, "experts": 160, "active": 6, "shared": 2, "vocabulary": 102_400,
    },
    "v3": {
        "width": 7168, "layers": 58, "dense": 3, "heads": 128, "query_rank": 1536, "hidden": 2048,
        "dense_hidden": 18432, "experts": 256, "active": 8, "shared": 1, "vocabulary": 129_280,
    },
}  # fmt: skip
LATENT = {"rank": 512, "head": 128, "rotated": 64}  # of keys and values: the same in all sizes
DEFAULTS = {
    **SIZES["v3"], **LATENT, "length": 4096, "microbatch": 1, "recompute": "none", "imbalance": 1.0,
    "dispatch": "pairs", "gate": "uniform",
}  # fmt: skip


def deepseek_flops(p) -> float:
    """Model FLOPs of one sequence, forward and backward: 6 per parameter that a token meets, and causal attention in
    full."""
    w, heads, key = p["width"], p["heads"], p["head"] + p["rotated"]
    query = p["query_rank"] * (w + heads * key) if p["query_rank"] else w * heads * key
    latent = w * (p["rank"] + p["rotated"]) + p["rank"] * heads * 2 * p["head"]
    attention = query + latent + heads * p["head"] * w
    mixed = 3 * w * p["hidden"] * (p["active"] + p["shared"]) + w * p["experts"]
    layers = p["layers"] + p["dense"]
    parameters = layers * attention + p["layers"] * mixed + p["dense"] * 3 * w * p["dense_hidden"] + w * p["vocabulary"]
    return p["length"] * (6.0 * parameters + 6.0 * layers * heads * (key + p["head"]) * p["length"])


def deepseek_checks(p, mesh) -> None:
    """Raise :class:`InvalidInput` where experts or tokens do not divide."""
    if p["recompute"] not in ("none", "full"):
        raise UnknownName("recompute", str(p["recompute"]), ("none", "full"), source="deepseek")
    check_tensors(p, mesh, "deepseek", ("heads", "hidden", "dense_hidden", "length", "vocabulary"))
    check_balance(p, mesh, "deepseek")


@parallel_model(
    "deepseek",
    sizes=SIZES,
    defaults=DEFAULTS,
    axes=("dp_replicate", "dp_shard", "ep", "tp"),
    flops=deepseek_flops,
    source="DeepSeek-AI, DeepSeek-V3 Technical Report, 2024; pytorch/torchtitan",
    checks=deepseek_checks,
)
def deepseek(
    mesh, part: Part, *, width, layers, dense, heads, query_rank, hidden, dense_hidden, experts, active, shared,
    vocabulary, rank, head, rotated, length, microbatch, recompute, imbalance,
    dispatch, gate,
):  # fmt: skip
    import torch
    from torch import nn
    from torch.nn import functional as F

    key, ways = head + rotated, axis_size(mesh, "tp")

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            if query_rank:
                self.q_down, self.q_norm = nn.Linear(width, query_rank, bias=False), nn.RMSNorm(query_rank)
            self.q = nn.Linear(query_rank or width, heads * key, bias=False)
            self.down, self.norm = nn.Linear(width, rank + rotated, bias=False), nn.RMSNorm(rank)
            self.up = nn.Linear(rank, heads * 2 * head, bias=False)
            self.o = nn.Linear(heads * head, width, bias=False)

        def forward(self, x, rotation):
            batch, tokens, _ = x.shape
            here = heads // ways
            q = self.q(self.q_norm(self.q_down(x)) if query_rank else x).view(batch, tokens, here, key)
            q = torch.cat([q[..., :head], rotate(q[..., head:], rotation)], dim=-1)
            small, turned = self.down(x).split([rank, rotated], dim=-1)
            turned = rotate(on_rank(turned).unsqueeze(2), rotation).expand(-1, -1, here, -1)
            k, v = self.up(self.norm(small)).view(batch, tokens, here, 2 * head).chunk(2, dim=-1)
            k, v = torch.cat([k, turned], dim=-1), F.pad(v, [0, rotated])
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., :head]
            return self.o(y.transpose(1, 2).reshape(batch, tokens, here * head))

    def layer(mixed):
        rest = (
            mixture(width, hidden, experts, active, shared, mesh, imbalance, dispatch, gate, sigmoid=True)
            if mixed
            else gated(width, dense_hidden)
        )
        return decoder_layer(width, Attention(), rest, nn.RMSNorm)

    kinds = [False] * (dense if part.first else 0) + [True] * part.layers
    with torch.device("meta"):
        model = decoder(part, [layer(mixed) for mixed in kinds], width, vocabulary, nn.RMSNorm)
    parts = [layer.feed_forward.experts for layer, mixed in zip(model.layers, kinds, strict=True) if mixed]
    over_tensors(model, mesh, part, _styles)
    recomputed(model, recompute)
    over_data(model, model.layers, mesh, experts=parts)
    inputs = decoder_inputs(part, microbatch, length, width, rotated, ways)
    return Stage(model, inputs, adam, last_gradient, context=partial(loss_over_tensors, mesh, part))


def _styles(layer) -> dict[str, object]:
    """Heads are split over the ranks; what all heads share is computed on each of them."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

    columns = ColwiseParallel()
    styles = {
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "attention.q": columns,
        "attention.up": columns,
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
    }
    shared = [name for name in ("q_down", "q_norm", "down", "norm") if hasattr(layer.attention, name)]
    styles.update({f"attention.{name}": everywhere() for name in shared})
    return styles if hasattr(layer.feed_forward, "experts") else {**styles, **gated_plan()}
