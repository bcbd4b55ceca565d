"""Llama 3 (Grattafiori et al. 2024), parallelised as torchtitan does: DTensor tensor and sequence parallelism within a
layer, FSDP2 around each layer, PyTorch's context parallelism along ``cp`` (each rank has a part of every sequence; keys
and values are gathered for attention), activation checkpointing by layer if asked for: ``recompute="full"`` keeps a
layer's input alone; ``"selective"`` also keeps the results of attention, of reduce-scatters and of every second product
(torchtitan's ``selective_ac_option = "op"``, the setting of its published runs); ``"selective-read"`` keeps those of
them that the backward pass reads, as ``torch.compile`` does; ``"every-2"`` recomputes every second layer in full,
``"every-3"`` every third one.

Weights and gradients are bfloat16 in computation and float32 in storage (FSDP's mixed precision); AdamW is fused.
``norm="composed"`` computes RMSNorm in float32 by separate kernels, as PyTorch did before version 2.8 outside of
``torch.compile``; ``"fused"`` is ``nn.RMSNorm``, one kernel each way since then.

``build="megatron"`` is one replica as Megatron-Core has it with Transformer Engine: weights are stored in bfloat16, and
tensor and sequence parallelism, products and loss are Megatron's (:mod:`simdev.workloads.models._megatron`). Its
optimizer's state and traffic between replicas are not those of Megatron's distributed optimizer.

``build="kempnerforge"`` is KempnerForge's tensor parallelism, compiled (kempnerforge/distributed/tensor_parallel.py in
KempnerInstitute/KempnerForge): each rank has the whole embedding, the gradients of the inputs of queries, keys, values,
gate and up are reduced one by one, and the loss is computed in bfloat16 over gathered logits.

``weights="bfloat16"`` stores weights and the optimizer's state in bfloat16; ``reduce="bfloat16"`` reduces gradients in
it.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial

from simdev.errors import InvalidInput, UnknownName
from simdev.graphs.parallel_model import Part, Stage, every_nth, parallel_model
from simdev.graphs.selective import CONTEXTS, eager_kind
from simdev.workloads.models._data import adam, axis_size, last_gradient, over_data, recomputed
from simdev.workloads.models._decoder import (
    check_heads,
    check_tensors,
    decoder,
    decoder_inputs,
    decoder_layer,
    gated,
    gated_plan,
    grouped_attention,
    grouped_attention_plan,
    loss_over_tensors,
    over_tensors,
)
from simdev.workloads.models._megatron import merged_decoder

SIZES = {
    "8b": {"width": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336},
    "70b": {"width": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "hidden": 28672},
    "405b": {"width": 16384, "layers": 126, "heads": 128, "kv_heads": 8, "hidden": 53248},
}
DEFAULTS = {**SIZES["8b"], "vocabulary": 128_256, "length": 8192, "microbatch": 1, "recompute": "none", "norm": "fused",
            "build": "torchtitan", "weights": "float32", "reduce": "float32"}  # fmt: skip
NORMS = ("fused", "composed")
BUILDS = ("torchtitan", "megatron", "kempnerforge")
FORMATS = ("float32", "bfloat16")
RECOMPUTE = ("none", "selective", "full")


def llama3_flops(p) -> float:
    """Model FLOPs of one sequence, forward and backward: 6 per parameter and token, and causal attention in full."""
    key_value = p["width"] * p["kv_heads"] // p["heads"]
    layer = 2 * p["width"] ** 2 + 2 * p["width"] * key_value + 3 * p["width"] * p["hidden"]
    parameters = p["layers"] * layer + p["width"] * p["vocabulary"]
    return p["length"] * (6.0 * parameters + 12.0 * p["layers"] * p["width"] * p["length"])


def llama3_checks(p, mesh) -> None:
    """Raise :class:`InvalidInput` if heads, hidden units or tokens do not divide by the tensor-parallel ranks."""
    check_heads(p, "llama3")
    check_tensors(p, mesh, "llama3", ("heads", "kv_heads", "hidden", "length", "vocabulary"))
    if mesh["cp"] > 1 and p["length"] % (2 * mesh["cp"] * mesh["tp"]):
        message = (
            f"{p['length']} does not divide into two pieces for each of {mesh['cp'] * mesh['tp']} ranks of cp and tp"
        )
        raise InvalidInput(message, source="llama3", field="length")
    if eager_kind(p["recompute"]) not in RECOMPUTE and not every_nth(p):
        raise UnknownName("recompute", str(p["recompute"]), RECOMPUTE, source="llama3")
    if p["norm"] not in NORMS:
        raise UnknownName("norm", str(p["norm"]), NORMS, source="llama3")
    if p["build"] not in BUILDS:
        raise UnknownName("build", str(p["build"]), BUILDS, source="llama3")
    for name in ("weights", "reduce"):
        if p[name] not in FORMATS:
            raise UnknownName(name, str(p[name]), FORMATS, source="llama3")
    if p["build"] == "megatron" and any(mesh[axis] > 1 for axis in ("dp_replicate", "dp_shard", "cp")):
        raise InvalidInput("megatron is one replica: only pp and tp may be above 1", source="llama3", field="build")


@parallel_model(
    "llama3",
    sizes=SIZES,
    defaults=DEFAULTS,
    axes=("dp_replicate", "dp_shard", "cp", "tp"),
    flops=llama3_flops,
    source="Grattafiori et al., The Llama 3 Herd of Models, 2024, table 3; pytorch/torchtitan",
    checks=llama3_checks,
    selective=True,
)
def llama3(
    mesh, part: Part, *, width, layers, heads, kv_heads, hidden, vocabulary, length, microbatch, recompute, norm, build,
    weights, reduce,
):  # fmt: skip
    import torch
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy

    ways = axis_size(mesh, "tp")
    tokens = length // axis_size(mesh, "cp")  # of a sequence, on this rank

    class ComposedNorm(nn.RMSNorm):
        def forward(self, x):
            y = x.float()
            scale = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps)
            return (y * scale).type_as(x) * self.weight

    Norm = ComposedNorm if norm == "composed" else nn.RMSNorm
    inputs = decoder_inputs(part, microbatch, tokens, width, width // heads, ways)
    again = partial(recomputed, recompute=recompute, context_fn=CONTEXTS.get(recompute), kinds=part.kinds)
    if build == "megatron":
        with torch.device("meta"):
            shape = width, heads, kv_heads, hidden, vocabulary
            model = merged_decoder(part, mesh, microbatch, length, *shape, Norm).to(torch.bfloat16)
        again(model)
        return Stage(model, inputs, adam)

    apart = build == "kempnerforge"

    def layer():
        attention = grouped_attention(width, heads, kv_heads, ways, apart)
        return decoder_layer(width, attention, gated(width, hidden, apart), Norm)

    with torch.device("meta"):
        model = decoder(part, [layer() for _ in range(part.layers)], width, vocabulary, Norm, half_loss=apart)
    styles = {**grouped_attention_plan(apart), **gated_plan(apart)}
    over_tensors(model, mesh, part, lambda _: styles, whole_loss=apart)
    again(model)
    if weights == "bfloat16":
        model.to(torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, reduce))
    over_data(model, model.layers, mesh, policy)
    return Stage(model, inputs, adam, last_gradient, context=partial(_context, mesh, part, length, apart))


@contextmanager
def _context(mesh, part: Part, length, whole_loss):
    """What torchtitan trains inside: attention along ``cp`` on a sequence split between the ranks, and a loss over a
    split vocabulary."""
    import torch
    from torch.distributed.tensor.experimental import context_parallel

    with ExitStack() as stack:
        if "cp" in mesh.mesh_dim_names:
            positions = torch.zeros(1, length)
            buffers = {"buffers": [positions], "buffer_seq_dims": [1], "no_restore_buffers": {positions}}
            stack.enter_context(context_parallel(mesh["cp"], **buffers))
        if not whole_loss:
            stack.enter_context(loss_over_tensors(mesh, part))
        yield
