"""MPT as MosaicML's llm-foundry trains it: a GPT without biases, flash attention, every layer sharded by FSDP,
activation checkpointing by layer if asked for.

Gradients are reduced with every microbatch, so that no rank ever holds all of them. ``precision="amp_bf16"`` keeps
float32 parameters and reduces float32 gradients; ``"bf16"`` shards, gathers and reduces bfloat16. A layer that is
recomputed stops after the last result that its backward pass reads, which spares its last product; with
``early_stop="no"`` it runs to its end, as PyTorch did before version 2.1 (pytorch/pytorch pull request 96866).
``train_metrics`` is how many metrics of the loss the trainer computes after each backward pass, each by a float32
cross-entropy of all logits, which it keeps until then: Composer, for which llm-foundry names two. ``loss="fused"`` is
one kernel each way that keeps no probabilities (flash-attn's, llm-foundry's default); kernels of PyTorch with the same
traffic and memory stand for it.
"""

from __future__ import annotations

from simdev.errors import InvalidInput, UnknownName
from simdev.graphs.parallel_model import Part, Stage, parallel_model
from simdev.workloads.models._data import over_data, recomputed

SIZES = {  # llm-foundry, scripts/train/yamls/pretrain/mpt-*.yaml
    "125m": {"width": 768, "layers": 12, "heads": 12},
    "350m": {"width": 1024, "layers": 24, "heads": 16},
    "760m": {"width": 1536, "layers": 24, "heads": 12},
    "1b": {"width": 2048, "layers": 24, "heads": 16},
    "3b": {"width": 2560, "layers": 32, "heads": 20},
    "7b": {"width": 4096, "layers": 32, "heads": 32},
    "13b": {"width": 5120, "layers": 40, "heads": 40},
    "30b": {"width": 7168, "layers": 48, "heads": 56},
    "70b": {"width": 8192, "layers": 80, "heads": 64},
}
DEFAULTS = {
    **SIZES["7b"],
    "vocabulary": 50_368,
    "length": 2048,
    "microbatch": 1,
    "recompute": "none",
    "precision": "amp_bf16",
    "early_stop": "yes",
    "train_metrics": 0,
    "loss": "composed",
}


def mpt_flops(p) -> float:
    """Model FLOPs of one sequence, forward and backward: 6 per parameter and token, and attention, as llm-foundry
    counts."""
    parameters = p["layers"] * 12 * p["width"] ** 2 + p["width"] * p["vocabulary"]
    return p["length"] * (6.0 * parameters + 12.0 * p["layers"] * p["width"] * p["length"])


def mpt_checks(p, mesh) -> None:
    """Raise :class:`InvalidInput` for a choice that the model does not know."""
    if p["width"] % p["heads"]:
        raise InvalidInput(f"{p['width']} does not divide by {p['heads']} heads", source="mpt", field="width")
    known_of = {
        "recompute": ("none", "full"),
        "precision": ("amp_bf16", "bf16"),
        "early_stop": ("yes", "no"),
        "loss": ("composed", "fused"),
    }
    for name, known in known_of.items():
        if p[name] not in known:
            raise UnknownName(name, str(p[name]), known, source="mpt")


def _losses(train_metrics: int):
    """``fused(logits)``, a loss in one kernel each way, and ``measured(x, held)``, whose backward pass, the last of a
    microbatch, computes ``train_metrics`` metrics of the logits and the target in the list ``held``."""
    import torch
    from torch.nn import functional as F

    class Metrics(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, held):
            ctx.held = held
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            logits, target = ctx.held
            for _ in range(train_metrics):
                F.cross_entropy(logits.float().flatten(0, 1), target.flatten(0, 1), reduction="sum")
            ctx.held.clear()
            return gradient, None

    class FusedLoss(torch.autograd.Function):
        """Reads the logits, keeps them, and writes their gradient: a sum and a softmax do as much."""

        @staticmethod
        def forward(ctx, logits):
            ctx.save_for_backward(logits)
            return logits.sum(dim=-1).float().mean()

        @staticmethod
        def backward(ctx, gradient):
            return torch.softmax(ctx.saved_tensors[0], dim=-1)

    def measured(x, held):
        return Metrics.apply(x, held) if train_metrics else x

    return FusedLoss.apply, measured


@parallel_model(
    "mpt",
    sizes=SIZES,
    defaults=DEFAULTS,
    axes=("dp_replicate", "dp_shard"),
    flops=mpt_flops,
    checks=mpt_checks,
    source="mosaicml/llm-foundry, scripts/train/benchmarking",
)
def mpt(
    mesh, part: Part, *, width, layers, heads, vocabulary, length, microbatch, recompute, precision, early_stop,
    train_metrics, loss,
):  # fmt: skip
    import torch
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.nn import functional as F
    from torch.utils.checkpoint import set_checkpoint_early_stop

    half, (fused, measured) = torch.bfloat16, _losses(train_metrics)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.norm = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
            self.query_key_value = nn.Linear(width, 3 * width, bias=False)
            self.output = nn.Linear(width, width, bias=False)
            self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

        def forward(self, x):
            y = self.query_key_value(self.attention_norm(x))
            q, k, v = (t.reshape(*x.shape[:2], heads, -1).transpose(1, 2) for t in y.chunk(3, dim=2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.output(y.transpose(1, 2).reshape(x.shape))
            return x + self.down(F.gelu(self.up(self.norm(x))))

    class MPT(nn.Module):
        def __init__(self):
            super().__init__()
            if part.first or part.last:
                self.embedding = nn.Embedding(vocabulary, width)  # tied to the output projection
            self.layers = nn.ModuleList([Layer() for _ in range(part.layers)])
            if part.last:
                self.norm = nn.LayerNorm(width, bias=False)

        def forward(self, x, target=None):
            held: list = []  # what metrics need after the backward pass
            x = measured(self.embedding(x) if part.first else x, held)
            with set_checkpoint_early_stop(early_stop == "yes"):
                for layer in self.layers:
                    x = layer(x)
            if not part.last:
                return x
            logits = F.linear(self.norm(x), self.embedding.weight)
            held += logits.detach(), target
            if loss == "fused":
                return fused(logits)
            return F.cross_entropy(logits.flatten(0, 1), target.flatten(0, 1))

    with torch.device("meta"):
        model = MPT()
    if precision == "bf16":
        model = model.to(half)
    recomputed(model, recompute)
    reduce = half if precision == "bf16" else torch.float32
    if mesh.mesh_dim_names:
        over_data(model, model.layers, mesh, MixedPrecisionPolicy(param_dtype=half, reduce_dtype=reduce))

    def inputs():
        tokens = torch.zeros(microbatch, length, dtype=torch.int64)
        x = tokens if part.first else torch.zeros(microbatch, length, width, dtype=half, requires_grad=True)
        return (x, tokens) if part.last else (x,)

    return Stage(model, inputs, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True))
