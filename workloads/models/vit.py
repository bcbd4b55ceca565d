"""Vision transformers: ViT-22B (Dehghani et al. 2023), whose layers compute attention and feed-forward side by side
with normalised queries and keys, and smaller sizes with the same layers. FSDP2 or replication around each layer, tensor
parallelism along ``tp``. An image is a sequence of ``length`` patches of 14 x 14 pixels; pooling is a mean. Weights and
gradients are bfloat16 in computation and float32 in storage; AdamW is fused (the paper used Adafactor).
"""

from __future__ import annotations

from functools import partial

from simdev.graphs.parallel_model import Part, Stage, parallel_model
from simdev.workloads.models._data import adam, axis_size, last_gradient
from simdev.workloads.models._encoder import encoder_checks, encoder_flops, encoder_layer, spread

SIZES = {
    "l": {"width": 1024, "layers": 24, "heads": 16, "hidden": 4096},
    "g": {"width": 1664, "layers": 48, "heads": 16, "hidden": 8192},
    "e": {"width": 1792, "layers": 56, "heads": 16, "hidden": 15360},
    "22b": {"width": 6144, "layers": 48, "heads": 48, "hidden": 24576},
}
DEFAULTS = {**SIZES["22b"], "classes": 29_593, "length": 256, "microbatch": 16, "recompute": "none"}
PIXELS = 3 * 14 * 14


def vit_flops(p) -> float:
    """Model FLOPs of one image, forward and backward."""
    patches = 2.0 * p["width"] * PIXELS * p["length"]
    return encoder_flops(p, 2.0 * p["width"] * p["classes"]) + 2 * patches  # an image needs no gradient


@parallel_model(
    "vit",
    sizes=SIZES,
    defaults=DEFAULTS,
    axes=("dp_replicate", "dp_shard", "tp"),
    flops=vit_flops,
    source="Dehghani et al., Scaling Vision Transformers to 22 Billion Parameters, ICML 2023, table 1",
    checks=partial(encoder_checks, "vit"),
)
def vit(mesh, part: Part, *, width, layers, heads, hidden, classes, length, microbatch, recompute):
    import torch
    from torch import nn
    from torch.nn import functional as F

    ways = axis_size(mesh, "tp")

    class ViT(nn.Module):
        def __init__(self):
            super().__init__()
            if part.first:
                self.patches, self.position = nn.Linear(PIXELS, width), nn.Embedding(length, width)
            self.layers = nn.ModuleList(
                encoder_layer(width, heads, hidden, ways, True, 0.0) for _ in range(part.layers)
            )
            if part.last:
                self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

        def forward(self, x, target=None):
            if part.first:
                x = self.patches(x) + self.position.weight
            for layer in self.layers:
                x = layer(x)
            return F.cross_entropy(self.head(self.norm(x).mean(dim=1)).float(), target) if part.last else x

    with torch.device("meta"):
        model = ViT()
    spread(model, mesh, recompute)

    def inputs():
        size = PIXELS if part.first else width
        x = torch.zeros(microbatch, length, size, dtype=torch.bfloat16, requires_grad=not part.first)
        return (x, torch.zeros(microbatch, dtype=torch.int64)) if part.last else (x,)

    return Stage(model, inputs, adam, last_gradient)
