"""A small transformer in float32 that two CPU processes train in a second: data parallel with one all-reduce of all
gradients, or with FSDP2; tensor parallel with PyTorch's column- and row-wise linear layers; in pipeline stages.

``simdev execute small MACHINE --mesh ...`` runs it for real and compares the measured step with its simulation.
"""

from __future__ import annotations

from simdev.errors import InvalidInput
from simdev.graphs.parallel_model import Part, Stage, parallel_model

DEFAULTS = {"width": 256, "layers": 4, "heads": 4, "vocabulary": 2048, "length": 128, "microbatch": 2}


def small_flops(p) -> float:
    """Model FLOPs of one sequence, forward and backward: 6 per parameter and token, and attention in full."""
    parameters = p["layers"] * 12 * p["width"] ** 2 + p["width"] * p["vocabulary"]
    return p["length"] * (6.0 * parameters + 12.0 * p["layers"] * p["width"] * p["length"])


def small_checks(p, mesh) -> None:
    """Raise :class:`InvalidInput` if heads do not divide by the tensor-parallel ranks, or the width by the heads."""
    if p["heads"] % mesh["tp"]:
        message = f"{p['heads']} does not divide by {mesh['tp']} tensor-parallel ranks"
        raise InvalidInput(message, source="small", field="heads")
    if p["width"] % p["heads"]:
        raise InvalidInput(f"{p['width']} does not divide by {p['heads']} heads", source="small", field="width")


@parallel_model(
    "small",
    sizes={},
    defaults=DEFAULTS,
    axes=("dp_replicate", "dp_shard", "tp"),
    flops=small_flops,
    source="a decoder of Radford et al. 2019, made small",
    checks=small_checks,
    precision="float32",
)
def small(mesh, part: Part, *, width, layers, heads, vocabulary, length, microbatch):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional as F

    tp = mesh["tp"] if "tp" in mesh.mesh_dim_names else None
    data = mesh["dp_replicate"].get_group() if "dp_replicate" in mesh.mesh_dim_names else None
    ways = tp.size() if tp else 1

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
            self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
            self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

        def forward(self, x):
            batch, tokens, _ = x.shape
            y = self.attention_norm(x)
            q, k, v = (
                f(y).view(batch, tokens, heads // ways, width // heads).transpose(1, 2)
                for f in (self.q, self.k, self.v)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(y.transpose(1, 2).reshape(batch, tokens, width // ways))
            return x + self.down(F.gelu(self.up(self.norm(x))))

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            if part.first:
                self.embedding = nn.Embedding(vocabulary, width)
            self.layers = nn.ModuleList([Layer() for _ in range(part.layers)])
            if part.last:
                self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

        def forward(self, x, target=None):
            x = self.embedding(x) if part.first else x
            for layer in self.layers:
                x = layer(x)
            if not part.last:
                return x
            return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1), target.flatten(0, 1))

    with torch.device("meta"):
        model = Decoder()
    _parallelise(model, mesh, tp)

    def inputs():
        tokens = torch.zeros(microbatch, length, dtype=torch.int64)
        x = tokens if part.first else torch.zeros(microbatch, length, width, requires_grad=True)
        return (x, tokens) if part.last else (x,)

    def sync(module, last):
        if hasattr(module, "set_requires_gradient_sync"):
            module.set_is_last_backward(last)
            module.set_requires_gradient_sync(last)

    def finish(module):
        if data is None or "dp_shard" in mesh.mesh_dim_names:
            return
        # What this rank has of each gradient: layers that "tp" divides have DTensors, and the others do not.
        gradients = [p.grad.to_local() if tp and hasattr(p.grad, "to_local") else p.grad for p in module.parameters()]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat, group=data)
        pieces = flat.split([g.numel() for g in gradients])
        torch._foreach_copy_(gradients, [piece.view_as(g) for piece, g in zip(pieces, gradients, strict=True)])

    def optimizer(module):
        kinds: dict[type, list] = {}  # a fused optimizer takes sharded and whole parameters apart
        for parameter in module.parameters():
            kinds.setdefault(type(parameter), []).append(parameter)
        return torch.optim.AdamW([{"params": group} for group in kinds.values()], lr=1e-4, fused=True)

    return Stage(model, inputs, optimizer, sync, finish)


def _parallelise(model, mesh, tp):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if tp:
        for layer in model.layers:
            columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
            parallelize_module(layer, tp, {**columns, "o": RowwiseParallel(), "down": RowwiseParallel()})
    names = [name for name in ("dp_replicate", "dp_shard") if name in mesh.mesh_dim_names]
    if "dp_shard" in names and mesh["dp_shard"].size() > 1:
        data = mesh[tuple(names)] if len(names) > 1 else mesh["dp_shard"]
        for layer in model.layers:
            fully_shard(layer, mesh=data)
        fully_shard(model, mesh=data)
