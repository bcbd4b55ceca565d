"""Mixtral (Jiang et al. 2024): Mistral's layers with a mixture of eight experts in place of the feed-forward part, two
for each token; FSDP2 around each layer, expert parallelism along ``ep``, activation checkpointing by layer if asked for
(``recompute="full"``).

Weights and gradients are bfloat16 in computation and float32 in storage; AdamW is fused. Tokens are taken as balanced
over the experts (see ``_moe.py``). The sliding window of attention is longer than the sequences here.
"""

from __future__ import annotations

from simdev.errors import InvalidInput, UnknownName
from simdev.graphs.parallel_model import Part, Stage, parallel_model
from simdev.workloads.parallel._data import adam, last_gradient, over_data
from simdev.workloads.parallel._moe import check_balance, mixture

SIZES = {
    "8x7b": {"width": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocabulary": 32_000},
    "8x22b": {"width": 6144, "layers": 56, "heads": 48, "kv_heads": 8, "hidden": 16384, "vocabulary": 32_768},
}
DEFAULTS = {**SIZES["8x7b"], "experts": 8, "active": 2, "length": 4096, "microbatch": 1, "recompute": "none"}


def mixtral_flops(p) -> float:
    """Model FLOPs of one sequence, forward and backward: 6 per parameter that a token meets, and causal attention in
    full."""
    key_value = p["width"] * p["kv_heads"] // p["heads"]
    layer = 2 * p["width"] ** 2 + 2 * p["width"] * key_value + 3 * p["active"] * p["width"] * p["hidden"]
    parameters = p["layers"] * (layer + p["width"] * p["experts"]) + p["width"] * p["vocabulary"]
    return p["length"] * (6.0 * parameters + 12.0 * p["layers"] * p["width"] * p["length"])


def mixtral_checks(p, mesh) -> None:
    """Raise :class:`InvalidInput` where heads, experts or tokens do not divide."""
    if p["heads"] % p["kv_heads"] or p["width"] % p["heads"]:
        raise InvalidInput("width, heads and kv_heads do not divide", source="mixtral", field="heads")
    if p["recompute"] not in ("none", "full"):
        raise UnknownName("recompute", str(p["recompute"]), ("none", "full"), source="mixtral")
    check_balance(p, mesh, "mixtral")


@parallel_model(
    "mixtral",
    sizes=SIZES,
    defaults=DEFAULTS,
    axes=("dp_replicate", "dp_shard", "ep"),
    flops=mixtral_flops,
    source="Jiang et al., Mixtral of Experts, 2024; pytorch/torchtitan",
    checks=mixtral_checks,
)
def mixtral(
    mesh,
    part: Part,
    *,
    width,
    layers,
    heads,
    kv_heads,
    hidden,
    vocabulary,
    experts,
    active,
    length,
    microbatch,
    recompute,
):
    import torch
    from torch import nn
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.nn import functional as F

    head, half = width // heads, torch.bfloat16

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
            self.k, self.v = (nn.Linear(width, kv_heads * head, bias=False) for _ in range(2))

        def forward(self, x, rotation):
            batch, tokens, _ = x.shape
            q = self.q(x).view(batch, tokens, heads, head)
            k, v = (f(x).view(batch, tokens, kv_heads, head) for f in (self.k, self.v))
            q, k = rotate(q, rotation), rotate(k, rotation)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != heads)
            return self.o(y.transpose(1, 2).reshape(batch, tokens, width))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.norm = nn.RMSNorm(width), nn.RMSNorm(width)
            self.attention = Attention()
            self.mixture = mixture(width, hidden, experts, active, 0, mesh)

        def forward(self, x, rotation):
            x = x + self.attention(self.attention_norm(x), rotation)
            return x + self.mixture(self.norm(x))

    class Mixtral(nn.Module):
        def __init__(self):
            super().__init__()
            if part.first:
                self.embedding = nn.Embedding(vocabulary, width)
            self.layers = nn.ModuleList([Layer() for _ in range(part.layers)])
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
        model = Mixtral()
    parts = [layer.mixture.experts for layer in model.layers]
    if recompute == "full":
        for number, layer in enumerate(model.layers):
            model.layers[number] = checkpoint_wrapper(layer, preserve_rng_state=False)
    over_data(model, model.layers, mesh, MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32), parts)

    def inputs():
        rotation = torch.zeros(1, length, 1, head // 2, dtype=torch.complex64)
        tokens = torch.zeros(microbatch, length, dtype=torch.int64)
        x = tokens if part.first else torch.zeros(microbatch, length, width, dtype=half, requires_grad=True)
        return (x, rotation, tokens) if part.last else (x, rotation)

    return Stage(model, inputs, adam, last_gradient)
