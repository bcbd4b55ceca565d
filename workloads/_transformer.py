"""What transformer workloads share: their number formats, and the layer that normalises before each part."""

from __future__ import annotations

from contextlib import contextmanager

from simdev.errors import UnknownName


def layer(
    units: int, heads: int, inner: int, *, causal: bool, eps: float, gelu: str, cache: tuple = (), after: bool = False
):
    """A module from f32 ``(batch, length, units)`` to the same shape: multi-head self-attention, then two linear maps
    with a GELU between them, of which ``gelu`` is PyTorch's approximation. Each is added to its input, which it reads
    normalised; ``after`` normalises the sums instead.

    ``cache`` ``(sequences, length)`` adds a key-value cache (:func:`cached`), whose last positions the module fills.
    """
    import torch
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query_key_value, self.output = nn.Linear(units, 3 * units), nn.Linear(units, units)
            if cache:
                for name in ("keys", "values"):
                    self.register_buffer(name, torch.zeros(cache[0], heads, cache[1], units // heads))

        def forward(self, x):
            split = self.query_key_value(x).view(*x.shape[:2], 3, heads, units // heads).permute(2, 0, 3, 1, 4)
            query, key, value = split.unbind(0)
            if cache:
                key, value = cached(self.keys, key), cached(self.values, value)
            mixed = scaled_dot_product_attention(query, key, value, is_causal=causal and x.shape[1] > 1)
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
            if after:
                x = self.attention_norm(x + self.attention(x))
                return self.norm(x + self.feed_forward(x))
            x = x + self.attention(self.attention_norm(x))
            return x + self.feed_forward(self.norm(x))

    return Layer()


def small_normal(model) -> None:
    """Draw the matrices of ``model`` from a normal distribution of deviation 0.02."""
    from torch import nn

    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, 0.0, 0.02)


def cached(cache, new):
    """Write ``new`` ``(batch, heads, n, width)`` into the last ``n`` positions of the first ``batch`` sequences of
    ``cache`` ``(sequences, heads, length, width)``, a buffer. Returns all positions of these sequences: ``new`` itself
    where it fills them."""
    mine = cache[: new.shape[0]]
    mine[:, :, -new.shape[2] :].copy_(new)
    return new if new.shape[2] == cache.shape[2] else mine


def rotate(x, cosines, sines):
    """Turn the pairs ``(x[..., i], x[..., i + width / 2])`` of ``x``, ``(batch, heads, length, width)``."""
    import torch

    low, high = x.chunk(2, dim=3)
    return torch.cat([low * cosines - high * sines, high * cosines + low * sines], dim=3)


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
