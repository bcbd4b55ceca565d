"""Encoders (BERT, ViT): layers without a causal mask, with Megatron's tensor parallelism in DTensor's words (a column
product, then a row product and an all-reduce) and FSDP2 or replication around each layer."""

from __future__ import annotations

from simdev.errors import InvalidInput, UnknownName
from simdev.workloads.models._data import over_data, recomputed


def encoder_checks(name: str, p, mesh) -> None:
    """Raise :class:`InvalidInput` where a model called ``name`` does not divide."""
    if p["width"] % p["heads"]:
        raise InvalidInput(f"{p['width']} does not divide by {p['heads']} heads", source=name, field="width")
    for field in ("heads", "hidden"):
        if p[field] % mesh["tp"]:
            message = f"{p[field]} does not divide by {mesh['tp']} tensor-parallel ranks"
            raise InvalidInput(message, source=name, field=field)
    if p["recompute"] not in ("none", "full"):
        raise UnknownName("recompute", str(p["recompute"]), ("none", "full"), source=name)


def encoder_flops(p, rest: float) -> float:
    """Model FLOPs of one sequence, forward and backward: 6 per parameter and token, attention, and ``rest`` forward."""
    layer = 4 * p["width"] ** 2 + 2 * p["width"] * p["hidden"]
    per_token = 6.0 * p["layers"] * layer + 12.0 * p["layers"] * p["width"] * p["length"]
    return p["length"] * per_token + 3.0 * rest


def encoder_layer(width: int, heads: int, hidden: int, ways: int, parallel: bool, dropout: float):
    """One layer. ``parallel``: attention and feed-forward side by side after one norm, with normalised queries and keys
    (ViT-22B); otherwise one behind the other, each followed by a norm (BERT)."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    head = width // heads

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.o = nn.Linear(width, 3 * width, bias=not parallel), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
            self.norm = nn.LayerNorm(width)
            if parallel:
                self.q_norm, self.k_norm = nn.LayerNorm(head), nn.LayerNorm(head)
            else:
                self.second_norm = nn.LayerNorm(width)

        def attention(self, x):
            q, k, v = self.qkv(x).view(*x.shape[:2], heads // ways, 3 * head).chunk(3, dim=-1)
            if parallel:
                q, k = self.q_norm(q), self.k_norm(k)
            y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
            return self.drop(self.o(y.transpose(1, 2).reshape(*x.shape[:2], width // ways)))

        def feed_forward(self, x):
            return self.drop(self.down(F.gelu(self.up(x))))

        def drop(self, x):
            return torch.native_dropout(x, dropout, True)[0] if dropout else x

        def forward(self, x):
            if parallel:
                y = self.norm(x)
                return x + self.attention(y) + self.feed_forward(y)
            x = self.norm(x + self.attention(x))
            return self.second_norm(x + self.feed_forward(x))

    return Layer()


def spread(model, mesh, recompute: str) -> None:
    """Tensor parallelism, activation checkpointing and data parallelism of ``model.layers`` and the rest."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if "tp" in mesh.mesh_dim_names:
        columns, rows = ColwiseParallel(), RowwiseParallel()
        plan = {"qkv": columns, "up": columns, "o": rows, "down": rows}
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], plan)
    recomputed(model, recompute)
    over_data(model, model.layers, mesh)
