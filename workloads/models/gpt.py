"""GPT as Megatron-LM trains it (Shoeybi et al. 2019, Narayanan et al. 2021): tensor-parallel layers with two
all-reduces forward and two backward, vocabulary split over the ranks, pipeline stages of equal depth, gradients reduced
once after the last backward pass, Adam on float32 copies of float16 parameters.

Fused kernels are one op each: scaled and masked softmax, bias with GELU, dropout. Attention is two batched products
around the softmax, as before flash attention. ``recompute="full"`` recomputes each layer from its input,
``"selective"`` only the attention between its two batched products (Korthikanti et al. 2022). With
``sequence_parallel="yes"`` the ranks of ``tp`` divide the tokens between products: activations are gathered before a
product and reduce-scattered after it; a backward pass gathers again what its forward pass gathered, beside the product
of the other gradient (the same paper, section 4.2.2).
``update="fused"`` is Adam's kernel alone; ``"mixed"`` also copies gradients to float32 and parameters back, and takes
the norm of the gradients.
"""

from __future__ import annotations

from simdev.errors import InvalidInput, UnknownName
from simdev.graphs.parallel_model import Part, Stage, parallel_model
from simdev.workloads.models._megatron import tensor_products

SIZES = {
    "1.3b": {"width": 2048, "layers": 24, "heads": 16},  # GPT-3 XL (Brown et al. 2020, table 2.1)
    # table 1 of Narayanan et al. 2021, and the sizes that VIA-Research/vTrain measured
    "3.6b": {"width": 3072, "layers": 30, "heads": 32},
    "18.4b": {"width": 6144, "layers": 40, "heads": 48},
    "39.1b": {"width": 8192, "layers": 48, "heads": 64},
    "76.1b": {"width": 10240, "layers": 60, "heads": 80},
    "175b": {"width": 12288, "layers": 96, "heads": 96},
}
DEFAULTS = {
    **SIZES["3.6b"],
    "vocabulary": 51_200,
    "length": 2048,
    "microbatch": 1,
    "recompute": "full",
    "update": "mixed",
    "sequence_parallel": "no",
}


def gpt_flops(p) -> float:
    """Model FLOPs of one sequence, forward and backward (Narayanan et al. 2021, equation 3, without recomputation)."""
    s, h, layers, v = p["length"], p["width"], p["layers"], p["vocabulary"]
    return 72.0 * s * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))


def gpt_checks(p, mesh) -> None:
    """Raise :class:`InvalidInput` if heads, width or vocabulary do not divide by the tensor-parallel ranks."""
    for name in ("heads", "width", "vocabulary"):
        if p[name] % mesh["tp"]:
            message = f"{p[name]} does not divide by {mesh['tp']} tensor-parallel ranks"
            raise InvalidInput(message, source="gpt", field=name)
    if p["width"] % p["heads"]:
        raise InvalidInput(f"{p['width']} does not divide by {p['heads']} heads", source="gpt", field="width")
    known = {"recompute": ("none", "selective", "full"), "sequence_parallel": ("no", "yes")}
    for name, values in known.items():
        if p[name] not in values:
            raise UnknownName(name, str(p[name]), values, source="gpt")
    if p["sequence_parallel"] == "yes" and p["length"] % mesh["tp"]:
        message = f"{p['length']} tokens do not divide among {mesh['tp']} tensor-parallel ranks"
        raise InvalidInput(message, source="gpt", field="length")
    if p["update"] not in ("mixed", "fused"):
        raise UnknownName("update", str(p["update"]), ("mixed", "fused"), source="gpt")


@parallel_model(
    "gpt",
    sizes=SIZES,
    defaults=DEFAULTS,
    axes=("dp_replicate", "tp"),
    flops=gpt_flops,
    source="Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021",
    checks=gpt_checks,
    precision="mixed-float16",
)
def gpt(
    mesh, part: Part, *, width, layers, heads, vocabulary, length, microbatch, recompute, update, sequence_parallel
):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    axes = mesh.mesh_dim_names
    tp = mesh["tp"].get_group() if "tp" in axes else None
    data = mesh["dp_replicate"].get_group() if "dp_replicate" in axes else None
    ways = mesh["tp"].size() if tp else 1
    divided = tp is not None and sequence_parallel == "yes"
    ranks, half = tensor_products(tp, ways, divided), torch.float16
    dropout = torch.ops.aten.native_dropout

    def attend(q, k, v):
        scores = torch.baddbmm(q.new_empty(1), q, k.transpose(1, 2), beta=0.0, alpha=q.shape[-1] ** -0.5)
        return torch.bmm(dropout(torch.softmax(scores, dim=-1), 0.1, True)[0], v)

    def recomputed(function, *inputs):
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
            self.query_key_value = nn.Linear(width, 3 * width // ways)
            self.output = nn.Linear(width // ways, width, bias=False)
            self.up = nn.Linear(width, 4 * width // ways, bias=False)  # its bias is part of the fused GELU
            self.down = nn.Linear(4 * width // ways, width, bias=False)

        def forward(self, x):
            y = ranks.columns(self.attention_norm(x), self.query_key_value)
            tokens, batch, _ = y.shape
            y = y.view(tokens, batch * heads // ways, 3 * width // heads)
            q, k, v = (t.transpose(0, 1) for t in y.chunk(3, dim=-1))
            y = recomputed(attend, q, k, v) if recompute == "selective" else attend(q, k, v)
            y = y.transpose(0, 1).contiguous().view(tokens, batch, width // ways)
            x = x + dropout(ranks.rows(y, self.output), 0.1, True)[0]
            y = torch.nn.functional.gelu(ranks.columns(self.norm(x), self.up), approximate="tanh")
            return x + dropout(ranks.rows(y, self.down), 0.1, True)[0]

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            if part.first:
                self.token = nn.Embedding(vocabulary // ways, width)
                self.position = nn.Embedding(length, width)
            self.layers = nn.ModuleList([Layer() for _ in range(part.layers)])
            if part.last:
                self.norm = nn.LayerNorm(width)
                if not part.first:
                    self.token = nn.Embedding(vocabulary // ways, width)

        def forward(self, x, target=None):
            if part.first:
                words = ranks.words(x, self.token) + self.position.weight.unsqueeze(1)
                x = dropout(ranks.own(words), 0.1, True)[0]
            for layer in self.layers:
                x = recomputed(layer, x) if recompute == "full" else layer(x)
            if not part.last:
                return x
            normed = self.norm(x)
            logits = ranks.logits(normed, self.token.weight)
            return ranks.loss(logits, target)

    with torch.device("meta"):
        model = GPT().to(half)

    def inputs():
        tokens = torch.zeros(length, microbatch, dtype=torch.int64)
        shape = length // (ways if divided else 1), microbatch, width
        x = tokens if part.first else torch.zeros(*shape, dtype=half, requires_grad=True)
        return (x, tokens) if part.last else (x,)

    def finish(module):
        if data is None:
            return
        gradients = [p.grad for p in module.parameters()]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat, group=data)
        pieces = flat.split([g.numel() for g in gradients])
        torch._foreach_copy_(gradients, [piece.view_as(g) for piece, g in zip(pieces, gradients, strict=True)])

    return Stage(model, inputs, lambda module: _adam(module, fused=update == "fused"), finish=finish)


def _adam(module, fused: bool):
    """Adam on float32 copies of float16 parameters, with a loss scale: gradients are copied, their norm is taken.
    ``fused``: one kernel reads the gradients and writes the parameters as well."""
    import torch

    class MixedPrecisionAdam:
        def __init__(self):
            self.half = list(module.parameters())
            self.single = [torch.empty_like(p, dtype=torch.float32) for p in self.half]
            self.adam = torch.optim.AdamW(self.single, lr=1e-4, fused=True)

        @property
        def state(self):
            return {number: {"copy": p, **self.adam.state[p]} for number, p in enumerate(self.single)}

        def step(self):
            for single in self.single:
                single.grad = torch.empty_like(single)
            if not fused:
                torch._foreach_copy_([p.grad for p in self.single], [p.grad for p in self.half])
                torch._foreach_norm([p.grad for p in self.single])
            self.adam.step()
            if not fused:
                with torch.no_grad():
                    torch._foreach_copy_(self.half, self.single)

        def zero_grad(self):
            for parameter in (*self.half, *self.single):
                parameter.grad = None

    return MixedPrecisionAdam()
