"""DeepSeek-V2 and V3 (DeepSeek-AI 2024): latent attention, whose keys and values come from a small vector for each
token; a few dense layers, then layers of many small experts with shared ones. FSDP2 around each layer, expert
parallelism along ``ep``, activation checkpointing by layer if asked for (``recompute="full"``).

``layers`` counts the layers with experts; the ``dense`` ones before them are part of the first pipeline stage. The
second token that V3 predicts is left out. Values are padded to the width of keys, as flash-attention kernels want them.
Weights and gradients are bfloat16 in computation and float32 in storage (V3 itself trained in FP8). Tokens are taken as
balanced over the experts (see ``_moe.py``).
"""

from __future__ import annotations

from simdev.errors import UnknownName
from simdev.graphs.parallel_model import Part, Stage, parallel_model
from simdev.workloads.parallel._data import adam, last_gradient, over_data
from simdev.workloads.parallel._moe import check_balance, mixture

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
DEFAULTS = {**SIZES["v3"], **LATENT, "length": 4096, "microbatch": 1, "recompute": "none"}


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
    check_balance(p, mesh, "deepseek")


@parallel_model(
    "deepseek",
    sizes=SIZES,
    defaults=DEFAULTS,
    axes=("dp_replicate", "dp_shard", "ep"),
    flops=deepseek_flops,
    source="DeepSeek-AI, DeepSeek-V3 Technical Report, 2024; pytorch/torchtitan",
    checks=deepseek_checks,
)
def deepseek(
    mesh, part: Part, *, width, layers, dense, heads, query_rank, hidden, dense_hidden, experts, active, shared,
    vocabulary, rank, head, rotated, length, microbatch, recompute,
):  # fmt: skip
    import torch
    from torch import nn
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.nn import functional as F

    half, key = torch.bfloat16, head + rotated

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
            q = self.q(self.q_norm(self.q_down(x)) if query_rank else x).view(batch, tokens, heads, key)
            q = torch.cat([q[..., :head], rotate(q[..., head:], rotation)], dim=-1)
            small, turned = self.down(x).split([rank, rotated], dim=-1)
            turned = rotate(turned.unsqueeze(2), rotation).expand(-1, -1, heads, -1)
            k, v = self.up(self.norm(small)).view(batch, tokens, heads, 2 * head).chunk(2, dim=-1)
            k, v = torch.cat([k, turned], dim=-1), F.pad(v, [0, rotated])
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., :head]
            return self.o(y.transpose(1, 2).reshape(batch, tokens, heads * head))

    class FeedForward(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = (nn.Linear(width, dense_hidden, bias=False) for _ in range(2))
            self.down = nn.Linear(dense_hidden, width, bias=False)

        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    class Layer(nn.Module):
        def __init__(self, mixed):
            super().__init__()
            self.attention_norm, self.norm, self.attention = nn.RMSNorm(width), nn.RMSNorm(width), Attention()
            self.rest = mixture(width, hidden, experts, active, shared, mesh, sigmoid=True) if mixed else FeedForward()

        def forward(self, x, rotation):
            x = x + self.attention(self.attention_norm(x), rotation)
            return x + self.rest(self.norm(x))

    class DeepSeek(nn.Module):
        def __init__(self):
            super().__init__()
            if part.first:
                self.embedding = nn.Embedding(vocabulary, width)
            mixed = [False] * (dense if part.first else 0) + [True] * part.layers
            self.layers = nn.ModuleList([Layer(one) for one in mixed])
            if part.last:
                self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

        def forward(self, x, rotation, target=None):
            x = self.embedding(x) if part.first else x
            for layer in self.layers:
                x = layer(x, rotation)
            if not part.last:
                return x
            logits = self.output(self.norm(x))
            return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(0, 1))

    def rotate(x, rotation):
        real = x.float().reshape(*x.shape[:-1], -1, 2)
        return (torch.view_as_real(torch.view_as_complex(real) * rotation).flatten(3)).type_as(x)

    with torch.device("meta"):
        model = DeepSeek()
    parts = [layer.rest.experts for layer in model.layers if hasattr(layer.rest, "experts")]
    if recompute == "full":
        for number, layer in enumerate(model.layers):
            model.layers[number] = checkpoint_wrapper(layer, preserve_rng_state=False)
    over_data(model, model.layers, mesh, MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32), parts)

    def inputs():
        rotation = torch.zeros(1, length, 1, rotated // 2, dtype=torch.complex64)
        tokens = torch.zeros(microbatch, length, dtype=torch.int64)
        x = tokens if part.first else torch.zeros(microbatch, length, width, dtype=half, requires_grad=True)
        return (x, rotation, tokens) if part.last else (x, rotation)

    return Stage(model, inputs, adam, last_gradient)
