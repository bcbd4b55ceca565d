"""What transformer workloads share: their number formats, and the layer that normalises before each part."""

from __future__ import annotations

from contextlib import contextmanager

from simdev.errors import UnknownName


def layer(units: int, heads: int, inner: int, *, causal: bool, eps: float, gelu: str):
    """A module from f32 ``(batch, length, units)`` to the same shape: multi-head self-attention, then two linear maps
    with a GELU between them, of which ``gelu`` is PyTorch's approximation. Each is added to its input, which it reads
    normalised."""
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query_key_value, self.output = nn.Linear(units, 3 * units), nn.Linear(units, units)

        def forward(self, x):
            split = self.query_key_value(x).view(*x.shape[:2], 3, heads, units // heads).permute(2, 0, 3, 1, 4)
            query, key, value = split.unbind(0)
            mixed = scaled_dot_product_attention(query, key, value, is_causal=causal)
            return self.output(mixed.transpose(1, 2).reshape(x.shape))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.attention = nn.LayerNorm(units, eps=eps), Attention()
            self.norm = nn.LayerNorm(units, eps=eps)
            self.feed_forward = nn.Sequential(
                nn.Linear(units, inner), nn.GELU(approximate=gelu), nn.Linear(inner, units)
            )

        def forward(self, x):
            x = x + self.attention(self.attention_norm(x))
            return x + self.feed_forward(self.norm(x))

    return Layer()


_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@contextmanager
def precision_of(name: str):
    """A context in which new parameters have the format ``name``. (``Module.to`` fails on fake tensors.)"""
    import torch

    if name not in _DTYPES:
        raise UnknownName("precision", name, _DTYPES)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, _DTYPES[name]))
    try:
        yield
    finally:
        torch.set_default_dtype(before)
