"""Llama 3 (Grattafiori et al. 2024), parallelised as torchtitan does: DTensor tensor and sequence parallelism within a
layer, FSDP2 around each layer, PyTorch's context parallelism along ``cp`` (each rank has a part of every sequence; keys
and values are gathered for attention), activation checkpointing by layer if asked for: ``recompute="full"`` keeps a
layer's input alone; ``"selective"`` also keeps the results of attention, of reduce-scatters and of every second product
(torchtitan's ``selective_ac_option = "op"``, the setting of its published runs).

Weights and gradients are bfloat16 in computation and float32 in storage (FSDP's mixed precision); AdamW is fused.
``norm="composed"`` computes RMSNorm in float32 by separate kernels, as PyTorch did before version 2.8 outside of
``torch.compile``; ``"fused"`` is one kernel.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial

from simdev.errors import InvalidInput, UnknownName
from simdev.graphs.parallel_model import Part, Stage, parallel_model
from simdev.workloads.parallel._data import adam, last_gradient, over_data

SIZES = {
    "8b": {"width": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336},
    "70b": {"width": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "hidden": 28672},
    "405b": {"width": 16384, "layers": 126, "heads": 128, "kv_heads": 8, "hidden": 53248},
}
DEFAULTS = {**SIZES["8b"], "vocabulary": 128_256, "length": 8192, "microbatch": 1, "recompute": "none", "norm": "fused"}
NORMS = ("fused", "composed")
RECOMPUTE = ("none", "selective", "full")


def llama3_flops(p) -> float:
    """Model FLOPs of one sequence, forward and backward: 6 per parameter and token, and causal attention in full."""
    key_value = p["width"] * p["kv_heads"] // p["heads"]
    layer = 2 * p["width"] ** 2 + 2 * p["width"] * key_value + 3 * p["width"] * p["hidden"]
    parameters = p["layers"] * layer + p["width"] * p["vocabulary"]
    return p["length"] * (6.0 * parameters + 12.0 * p["layers"] * p["width"] * p["length"])


def llama3_checks(p, mesh) -> None:
    """Raise :class:`InvalidInput` if heads, hidden units or tokens do not divide by the tensor-parallel ranks."""
    for name in ("heads", "kv_heads", "hidden", "length", "vocabulary"):
        if p[name] % mesh["tp"]:
            message = f"{p[name]} does not divide by {mesh['tp']} tensor-parallel ranks"
            raise InvalidInput(message, source="llama3", field=name)
    if mesh["cp"] > 1 and p["length"] % (2 * mesh["cp"] * mesh["tp"]):
        message = (
            f"{p['length']} does not divide into two pieces for each of {mesh['cp'] * mesh['tp']} ranks of cp and tp"
        )
        raise InvalidInput(message, source="llama3", field="length")
    if p["recompute"] not in RECOMPUTE:
        raise UnknownName("recompute", str(p["recompute"]), RECOMPUTE, source="llama3")
    if p["norm"] not in NORMS:
        raise UnknownName("norm", str(p["norm"]), NORMS, source="llama3")


@parallel_model(
    "llama3",
    sizes=SIZES,
    defaults=DEFAULTS,
    axes=("dp_replicate", "dp_shard", "cp", "tp"),
    flops=llama3_flops,
    source="Grattafiori et al., The Llama 3 Herd of Models, 2024, table 3; pytorch/torchtitan",
    checks=llama3_checks,
)
def llama3(
    mesh, part: Part, *, width, layers, heads, kv_heads, hidden, vocabulary, length, microbatch, recompute, norm
):
    import torch
    from torch import nn
    from torch.nn import functional as F

    tp = mesh["tp"] if "tp" in mesh.mesh_dim_names else None
    ways = tp.size() if tp else 1
    whole, length = length, length // (mesh["cp"].size() if "cp" in mesh.mesh_dim_names else 1)  # tokens of this rank
    head = width // heads

    class ComposedNorm(nn.RMSNorm):
        def forward(self, x):
            y = x.float()
            scale = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps)
            return (y * scale).type_as(x) * self.weight

    Norm = ComposedNorm if norm == "composed" else nn.RMSNorm

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
            self.k, self.v = (nn.Linear(width, kv_heads * head, bias=False) for _ in range(2))

        def forward(self, x, rotation):
            batch, tokens, _ = x.shape
            q = self.q(x).view(batch, tokens, heads // ways, head)
            k, v = (f(x).view(batch, tokens, kv_heads // ways, head) for f in (self.k, self.v))
            q, k = rotate(q, rotation), rotate(k, rotation)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != heads)
            return self.o(y.transpose(1, 2).reshape(batch, tokens, width // ways))

    class FeedForward(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
            self.down = nn.Linear(hidden, width, bias=False)

        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.norm = Norm(width), Norm(width)
            self.attention, self.feed_forward = Attention(), FeedForward()

        def forward(self, x, rotation):
            x = x + self.attention(self.attention_norm(x), rotation)
            return x + self.feed_forward(self.norm(x))

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            if part.first:
                self.embedding = nn.Embedding(vocabulary, width)
            self.layers = nn.ModuleList([Layer() for _ in range(part.layers)])
            if part.last:
                self.norm, self.output = Norm(width), nn.Linear(width, vocabulary, bias=False)

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
        model = Llama()
    _parallelise(model, mesh, part, tp, recompute)

    def inputs():
        rotation = torch.zeros(1, length, 1, head // 2, dtype=torch.complex64)
        tokens = torch.zeros(microbatch, length, dtype=torch.int64)
        shape = (
            microbatch,
            length // ways,
            width,
        )  # between layers the sequence is split over the tensor-parallel ranks
        x = tokens if part.first else torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True)
        return (x, rotation, tokens) if part.last else (x, rotation)

    context = partial(_context, mesh, whole, loss_parallel=bool(tp and part.last))
    return Stage(model, inputs, adam, last_gradient, context=context)


@contextmanager
def _context(mesh, length, loss_parallel):
    """What torchtitan trains inside: attention along ``cp`` on a sequence split between the ranks, and a loss over a
    split vocabulary."""
    import torch
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.parallel import loss_parallel as split_loss

    with ExitStack() as stack:
        if "cp" in mesh.mesh_dim_names:
            positions = torch.zeros(1, length)
            buffers = {"buffers": [positions], "buffer_seq_dims": [1], "no_restore_buffers": {positions}}
            stack.enter_context(context_parallel(mesh["cp"], **buffers))
        if loss_parallel:
            stack.enter_context(split_loss())
        yield


def _parallelise(model, mesh, part, tp, recompute):
    """torchtitan's order: tensor parallelism, activation checkpointing, FSDP."""
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    if tp:
        whole = {}
        if part.first:
            whole["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        if part.last:
            whole["norm"] = SequenceParallel()
            whole["output"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, tp, whole)
        for layer in model.layers:
            columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
            parallelize_module(
                layer,
                tp,
                {
                    "attention_norm": SequenceParallel(),
                    "norm": SequenceParallel(),
                    "attention": PrepareModuleInput(
                        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                    ),
                    "attention.q": columns,
                    "attention.k": columns,
                    "attention.v": columns,
                    "attention.o": rows,
                    "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                    "feed_forward.gate": columns,
                    "feed_forward.up": columns,
                    "feed_forward.down": rows,
                },
            )
    if recompute != "none":
        how = {"context_fn": _selective_contexts} if recompute == "selective" else {}
        for number, layer in enumerate(model.layers):
            model.layers[number] = checkpoint_wrapper(layer, preserve_rng_state=False, **how)
    over_data(model, model.layers, mesh, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def _selective_contexts():
    """Contexts of a layer's forward pass and of its recomputation, by torchtitan's policy: keep attention,
    reduce-scatters and the first of every two products, recompute the rest."""
    import torch
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten, product = torch.ops.aten, torch.ops.aten.mm.default
    kept = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
    products = {False: 0, True: 0}  # met so far, in the forward pass and in its recomputation

    def policy(context, op, *_, **__):
        if op == product:
            products[context.is_recompute] += 1
        keep = op in kept or (op == product and products[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
