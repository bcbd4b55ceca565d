"""Megatron's tensor parallelism, and a decoder of its products.

The ranks of ``tp`` divide the weights of products, the vocabulary, and, with sequence parallelism, the tokens between
products (Shoeybi et al. 2019; Korthikanti et al. 2022, section 4.2.2). The loss over a split vocabulary is computed in
place, in float32 (megatron/core/tensor_parallel/cross_entropy.py).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from simdev.graphs.parallel_model import Part
from simdev.workloads.models._data import axis_size
from simdev.workloads.models._decoder import rotate


def tensor_products(tp, ways: int, divided: bool) -> SimpleNamespace:
    """What the ranks of the group ``tp`` (None: one rank) compute together.

    ``columns(x, layer)`` and ``rows(x, layer)`` apply column- and row-parallel layers. ``words(tokens, table)`` embeds
    tokens whose vocabulary is split over the ranks, ``logits(x, table)`` multiplies by it, and ``loss(logits, target)``
    is the cross-entropy over it. With ``divided``, each rank holds its ``own(x)`` share of the tokens between products.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.functional import linear

    def reduce(x):
        if tp is not None:
            x = x.contiguous()
            dist.all_reduce(x, group=tp)
        return x

    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from PyTorch 2.13 on
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    def gather(x, later=False):
        whole = x.new_empty((x.shape[0] * ways, *x.shape[1:]))
        all_gather(whole, x.contiguous(), group=tp, async_op=later)
        return whole

    def scatter(x, later=False):
        piece = x.new_empty((x.shape[0] // ways, *x.shape[1:]))
        reduce_scatter(piece, x.contiguous(), group=tp, async_op=later)
        return piece

    class GatheredProduct(torch.autograd.Function):
        """A column-parallel product of tokens that the ranks divide; the gathered tokens are not kept."""

        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x, weight)
            return linear(gather(x), weight, bias)

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            whole = gather(x, later=True)
            of_input = scatter(gradient.matmul(weight), later=True)
            rows = gradient.flatten(0, -2)
            of_weight = rows.t().matmul(whole.flatten(0, -2))
            return of_input, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None

    class Scattered(torch.autograd.Function):
        """After a row-parallel layer: a reduce-scatter forward, a gather backward."""

        @staticmethod
        def forward(ctx, x):
            return scatter(x)

        @staticmethod
        def backward(ctx, gradient):
            return gather(gradient)

    class OwnTokens(torch.autograd.Function):
        """This rank's tokens of what all ranks have."""

        @staticmethod
        def forward(ctx, x):
            return x[: x.shape[0] // ways].contiguous()

        @staticmethod
        def backward(ctx, gradient):
            return gather(gradient)

    class ToRanks(torch.autograd.Function):
        """Before a column-parallel layer: nothing forward, an all-reduce backward."""

        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, gradient):
            return reduce(gradient)

    class FromRanks(torch.autograd.Function):
        """After a row-parallel layer: an all-reduce forward, nothing backward."""

        @staticmethod
        def forward(ctx, x):
            return reduce(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    def columns(x, layer):
        return GatheredProduct.apply(x, layer.weight, layer.bias) if divided else layer(ToRanks.apply(x))

    def rows(x, layer):
        return Scattered.apply(layer(x)) if divided else FromRanks.apply(layer(x))

    class CrossEntropy(torch.autograd.Function):
        """The loss over a split vocabulary."""

        @staticmethod
        def forward(ctx, logits, target):
            ctx.given = logits.dtype
            logits = logits.float()
            largest = logits.amax(dim=-1)
            reduce(largest)
            logits.sub_(largest.unsqueeze(-1))
            predicted = reduce(logits.gather(-1, target.unsqueeze(-1)).squeeze(-1))
            exponents = logits.exp_()
            total = reduce(exponents.sum(dim=-1))
            exponents.div_(total.unsqueeze(-1))
            ctx.save_for_backward(exponents)
            return (total.log() - predicted).mean()

        @staticmethod
        def backward(ctx, gradient):
            (weights,) = ctx.saved_tensors
            return weights.mul_(gradient).to(ctx.given), None

    def words(tokens, table):
        return FromRanks.apply(table(tokens))

    def own(x):
        return OwnTokens.apply(x) if divided else x

    def logits(x, table):
        return GatheredProduct.apply(x, table, None) if divided else linear(ToRanks.apply(x), table)

    return SimpleNamespace(columns=columns, rows=rows, words=words, own=own, logits=logits, loss=CrossEntropy.apply)


def merged_decoder(
    part: Part,
    mesh,
    microbatch: int,
    length: int,
    width: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    vocabulary: int,
    norm: Callable,
):
    """A pipeline stage of a decoder with ``norm`` as Megatron-Core builds it with Transformer Engine: one product makes
    queries, keys and values, another one makes both parts of the gate, and one kernel each way applies it (``glu``
    moves the bytes of a fused SwiGLU). Tokens of all sequences lie behind each other: ``(tokens, width)``."""
    from torch import nn
    from torch.nn import functional as F

    ways, head = axis_size(mesh, "tp"), width // heads
    ranks = tensor_products(mesh["tp"].get_group() if ways > 1 else None, ways, ways > 1)
    sizes = [width // ways, *[kv_heads * head // ways] * 2]

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.norm = norm(width), norm(width)
            self.qkv, self.o = nn.Linear(width, sum(sizes), bias=False), nn.Linear(width // ways, width, bias=False)
            self.gate_up = nn.Linear(width, 2 * hidden // ways, bias=False)
            self.down = nn.Linear(hidden // ways, width, bias=False)

        def forward(self, x, rotation):
            parts = ranks.columns(self.attention_norm(x), self.qkv).split(sizes, dim=-1)
            q, k, v = (one.view(microbatch, length, -1, head) for one in parts)
            q, k, v = (one.transpose(1, 2) for one in (rotate(q, rotation), rotate(k, rotation), v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != heads)
            x = x + ranks.rows(y.transpose(1, 2).reshape(-1, width // ways), self.o)
            return x + ranks.rows(F.glu(ranks.columns(self.norm(x), self.gate_up)), self.down)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            if part.first:
                self.embedding = nn.Embedding(vocabulary // ways, width)
            self.layers = nn.ModuleList([Layer() for _ in range(part.layers)])
            if part.last:
                self.norm, self.output = norm(width), nn.Linear(width, vocabulary // ways, bias=False)

        def forward(self, x, rotation, target=None):
            x = x.flatten(0, 1)
            x = ranks.rows(x, self.embedding) if part.first else x
            for layer in self.layers:
                x = layer(x, rotation)
            if not part.last:
                return x
            return ranks.loss(ranks.columns(self.norm(x), self.output), target.flatten())

    return Decoder()
