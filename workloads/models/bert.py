"""BERT (Devlin et al. 2019) as it is pre-trained: the loss is that of the masked words, 15 % of a sequence; the second
task (does one sentence follow the other?) is left out. FSDP2 or replication around each layer, tensor parallelism along
``tp``. Weights and gradients are bfloat16 in computation and float32 in storage; AdamW is fused.
"""

from __future__ import annotations

from functools import partial

from simdev.graphs.parallel_model import Part, Stage, parallel_model
from simdev.workloads.models._data import adam, axis_size, last_gradient
from simdev.workloads.models._encoder import encoder_checks, encoder_flops, encoder_layer, spread

SIZES = {
    "base": {"width": 768, "layers": 12, "heads": 12, "hidden": 3072},
    "large": {"width": 1024, "layers": 24, "heads": 16, "hidden": 4096},
}
DEFAULTS = {**SIZES["large"], "vocabulary": 30_522, "length": 512, "microbatch": 8, "recompute": "none"}


def masked(length: int) -> int:
    """Words to predict in a sequence."""
    return max(1, length * 15 // 100)


def bert_flops(p) -> float:
    """Model FLOPs of one sequence, forward and backward."""
    return encoder_flops(p, 2.0 * masked(p["length"]) * p["width"] * (p["width"] + p["vocabulary"]))


@parallel_model(
    "bert",
    sizes=SIZES,
    defaults=DEFAULTS,
    axes=("dp_replicate", "dp_shard", "tp"),
    flops=bert_flops,
    source="Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers, NAACL 2019",
    checks=partial(encoder_checks, "bert"),
)
def bert(mesh, part: Part, *, width, layers, heads, hidden, vocabulary, length, microbatch, recompute):
    import torch
    from torch import nn
    from torch.nn import functional as F

    ways = axis_size(mesh, "tp")
    words = masked(length)

    class BERT(nn.Module):
        def __init__(self):
            super().__init__()
            if part.first or part.last:
                self.token = nn.Embedding(vocabulary, width)  # tied to the output projection
            if part.first:
                self.position, self.kind, self.norm = (
                    nn.Embedding(length, width),
                    nn.Embedding(2, width),
                    nn.LayerNorm(width),
                )
            made = (encoder_layer(width, heads, hidden, ways, False, 0.1) for _ in range(part.layers))
            self.layers = nn.ModuleList(made)
            if part.last:
                self.last, self.last_norm = nn.Linear(width, width), nn.LayerNorm(width)

        def forward(self, x, target=None):
            if part.first:
                x = self.token(x) + self.position.weight + self.kind(torch.zeros_like(x))
                x = torch.native_dropout(self.norm(x), 0.1, True)[0]
            for layer in self.layers:
                x = layer(x)
            if not part.last:
                return x
            x = self.last_norm(F.gelu(self.last(x[:, :words])))
            logits = F.linear(x, self.token.weight)
            return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(0, 1))

    with torch.device("meta"):
        model = BERT()
    spread(model, mesh, recompute)

    def inputs():
        tokens = torch.zeros(microbatch, length, dtype=torch.int64)
        x = tokens if part.first else torch.zeros(microbatch, length, width, dtype=torch.bfloat16, requires_grad=True)
        return (x, torch.zeros(microbatch, words, dtype=torch.int64)) if part.last else (x,)

    return Stage(model, inputs, adam, last_gradient)
