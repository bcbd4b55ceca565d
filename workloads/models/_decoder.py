"""Decoders (Llama, Mixtral, DeepSeek): what they share, and PyTorch's tensor and sequence parallelism of them.

Between layers, the ranks of axis ``tp`` divide the tokens of a sequence; a layer gathers them before its column
products and scatters what its row products return (``SequenceParallel``), as torchtitan does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

from simdev.errors import InvalidInput
from simdev.graphs.parallel_model import Part


def check_tensors(p, mesh, source: str, names: tuple[str, ...]) -> None:
    """Raise :class:`InvalidInput` if one of these sizes does not divide by the tensor-parallel ranks."""
    for name in names:
        if p[name] % mesh["tp"]:
            message = f"{p[name]} does not divide by {mesh['tp']} tensor-parallel ranks"
            raise InvalidInput(message, source=source, field=name)


def check_heads(p, source: str) -> None:
    """Raise :class:`InvalidInput` if the width does not divide by the heads (unless their size is given), or these by
    those of keys and values."""
    if "head" not in p and p["width"] % p["heads"]:
        raise InvalidInput(f"{p['width']} does not divide by {p['heads']} heads", source=source, field="width")
    if p["heads"] % p["kv_heads"]:
        raise InvalidInput(f"{p['heads']} does not divide by {p['kv_heads']} of keys", source=source, field="heads")


def rotate(x, rotation):
    """``x`` ``(batch, tokens, heads, size)`` with pairs of its numbers turned by ``rotation``, complex."""
    import torch

    real = x.float().reshape(*x.shape[:-1], -1, 2)
    return (torch.view_as_real(torch.view_as_complex(real) * rotation).flatten(3)).type_as(x)


def reduced_apart(x, uses: int):
    """``x``, a DTensor that the ranks of ``tp`` divide by tokens, whole on each of them for ``uses`` products. It is
    gathered once; each product's gradient is reduced by itself. So does a compiled program whose products gather their
    input each for itself: the compiler merges equal gathers, and there is nothing to merge in the backward pass."""
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            whole = x.redistribute(placements=[Replicate()])
            return tuple(whole.view_as(whole) for _ in range(uses))

        @staticmethod
        def backward(ctx, *gradients):
            first, *others = (gradient.redistribute(placements=[Shard(1)]) for gradient in gradients)
            for other in others:
                first = first + other
            return first

    return Gather.apply(x) if isinstance(x, DTensor) else (x,) * uses


def grouped_attention(
    width: int,
    heads: int,
    kv_heads: int,
    ways: int,
    apart: bool = False,
    head: int = 0,
    normed: bool = False,
):
    """Causal attention of ``heads`` queries that share ``kv_heads`` keys and values, on one of ``ways`` ranks. Each
    head has ``head`` numbers (0: its share of the width).
    ``apart``: see :func:`reduced_apart`; keys and values are then repeated for each query, too. ``normed``: queries
    and keys pass an RMSNorm over their head before they are rotated (Qwen 3)."""
    from torch import nn
    from torch.nn import functional as F

    head = head or width // heads

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.o = nn.Linear(width, heads * head, bias=False), nn.Linear(heads * head, width, bias=False)
            self.k, self.v = (nn.Linear(width, kv_heads * head, bias=False) for _ in range(2))
            if normed:
                self.q_norm, self.k_norm = nn.RMSNorm(head), nn.RMSNorm(head)

        def forward(self, x, rotation):
            batch, tokens, _ = x.shape
            inputs = reduced_apart(x, 3) if apart else (x,) * 3
            q, k, v = (f(one) for f, one in zip((self.q, self.k, self.v), inputs, strict=True))
            q, k, v = (part.view(batch, tokens, -1, head) for part in (q, k, v))
            if normed:
                q, k = self.q_norm(q), self.k_norm(k)
            q, k = rotate(q, rotation), rotate(k, rotation)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            if apart and kv_heads != heads:
                k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
            return self.o(y.transpose(1, 2).reshape(batch, tokens, heads * head // ways))

    return Attention()


def gated(width: int, hidden: int, apart: bool = False):
    """The feed-forward part: a product gated by another one. ``apart``: see :func:`reduced_apart`."""
    from torch import nn
    from torch.nn import functional as F

    class FeedForward(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
            self.down = nn.Linear(hidden, width, bias=False)

        def forward(self, x):
            to_gate, to_up = reduced_apart(x, 2) if apart else (x, x)
            return self.down(F.silu(self.gate(to_gate)) * self.up(to_up))

    return FeedForward()


def decoder_layer(width: int, attention, feed_forward, norm: Callable):
    """Attention and the feed-forward part (or experts), each after a norm and added to what came in."""
    from torch import nn

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.norm = norm(width), norm(width)
            self.attention, self.feed_forward = attention, feed_forward

        def forward(self, x, rotation):
            x = x + self.attention(self.attention_norm(x), rotation)
            return x + self.feed_forward(self.norm(x))

    return Layer()


def decoder(part: Part, layers: list, width: int, vocabulary: int, norm: Callable, half_loss: bool = False):
    """A pipeline stage: ``layers``, before them the embedding on the first one, after them the loss on the last one,
    which is computed in float32 unless ``half_loss`` leaves logits in bfloat16."""
    from torch import nn
    from torch.nn import functional as F

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            if part.first:
                self.embedding = nn.Embedding(vocabulary, width)
            self.layers = nn.ModuleList(layers)
            if part.last:
                self.norm, self.output = norm(width), nn.Linear(width, vocabulary, bias=False)

        def forward(self, x, rotation, target=None):
            x = self.embedding(x) if part.first else x
            for layer in self.layers:
                x = layer(x, rotation)
            if not part.last:
                return x
            logits = self.output(self.norm(x))
            logits = logits.flatten(0, 1)
            return F.cross_entropy(logits if half_loss else logits.float(), target.flatten(0, 1))

    return Decoder()


def decoder_inputs(part: Part, microbatch: int, length: int, width: int, rotated: int, ways: int) -> Callable:
    """A function of the inputs of one microbatch: tokens or activations, the rotation of ``rotated`` numbers of each
    head, and on the last stage the tokens to predict. ``ways`` tensor-parallel ranks divide activations."""
    import torch

    def inputs():
        rotation = torch.zeros(1, length, 1, rotated // 2, dtype=torch.complex64)
        tokens = torch.zeros(microbatch, length, dtype=torch.int64)
        shape = microbatch, length // ways, width
        x = tokens if part.first else torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True)
        return (x, rotation, tokens) if part.last else (x, rotation)

    return inputs


def over_tensors(
    model, mesh, part: Part, of_layer: Callable[[object], Mapping[str, object]], whole_loss: bool = False
) -> None:
    """Tensor and sequence parallelism of a :func:`decoder` along ``tp``, if the mesh has it. ``of_layer`` returns what
    a layer has beside its norms: PyTorch's parallel styles by the names of its modules. ``whole_loss``: each rank has
    the whole embedding, and gathers the logits for a loss over the whole vocabulary."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    if "tp" not in mesh.mesh_dim_names:
        return
    whole = {}
    if part.first and whole_loss:
        whole["embedding"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    elif part.first:
        whole["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if part.last:
        whole["norm"] = SequenceParallel()
        logits = Replicate() if whole_loss else Shard(-1)
        whole["output"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=logits, use_local_output=whole_loss)
    parallelize_module(model, mesh["tp"], whole)
    for layer in model.layers:
        norms = {"attention_norm": SequenceParallel(), "norm": SequenceParallel()}
        parallelize_module(layer, mesh["tp"], {**norms, **of_layer(layer)})


def loss_over_tensors(mesh, part: Part):
    """The context in which the last stage computes its loss over a vocabulary that the ranks of ``tp`` divide."""
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel() if "tp" in mesh.mesh_dim_names and part.last else nullcontext()


def everywhere():
    """A parallel style: each rank of ``tp`` computes the whole module on the whole input, as torchtitan's
    ``NoParallel``."""
    from torch.distributed.tensor import distribute_module
    from torch.distributed.tensor.parallel import ParallelStyle

    class Everywhere(ParallelStyle):
        def _apply(self, module, device_mesh):
            return distribute_module(module, device_mesh)

    return Everywhere()


def on_rank(x):
    """The plain tensor of a DTensor that each rank of ``tp`` has whole, and of whose gradient it has a part."""
    from torch.distributed.tensor import DTensor, Partial

    return x.to_local(grad_placements=[Partial()]) if isinstance(x, DTensor) else x


def grouped_attention_plan(apart: bool = False, normed: bool = False) -> dict[str, object]:
    """Styles of :func:`grouped_attention` for :func:`over_tensors`. Norms of heads are divided by heads."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    wanted = Shard(1) if apart else Replicate()
    return {
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(wanted, None)),
        **{f"attention.{name}": columns for name in ("q", "k", "v")},
        "attention.o": rows,
        **{
            f"attention.{name}": SequenceParallel(sequence_dim=2, use_local_output=True)
            for name in (("q_norm", "k_norm") if normed else ())
        },
    }


def gated_plan(apart: bool = False) -> dict[str, object]:
    """Styles of :func:`gated` for :func:`over_tensors`."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

    wanted = Shard(1) if apart else Replicate()
    return {
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(wanted,)),
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
