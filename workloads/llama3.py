"""Llama 3 8B (Grattafiori et al. 2024): one step of decoding with a key-value cache.

Module paths (``op_layer``): ``embedding``, ``layer0`` ... (inside: ``attention_norm``, ``attention``, ``norm``,
``feed_forward``), ``norm`` and ``softmax`` (the scores of the next word). Weights and cache are bfloat16
(``precision=f32``: float32). The rotary embedding of the last position is a constant.
"""

from __future__ import annotations

from simdev.graphs.workload import InferenceStep, workload


@workload(
    "llama3-8b-decode",
    family="llama3",
    defaults={
        "batch": 4,
        "length": 8192,
        "layers": 32,
        "units": 4096,
        "heads": 32,
        "key_heads": 8,
        "inner": 14_336,
        "vocabulary": 128_256,
        "precision": "bf16",
        "resident": 4,
    },
    published={"parameters": 8_030_261_248},
    source="Grattafiori et al., The Llama 3 Herd of Models, 2024, section 3.2 and table 3; the exact count is that of "
    "the released weights",
)
def llama3_8b_decode(batch, length, layers, units, heads, key_heads, inner, vocabulary, precision, resident):
    """The last word of ``batch`` contexts of ``length`` words, with the keys and values of the others in the cache. The
    cache holds ``resident`` batches: those that are in progress on the devices of a pipeline."""
    import torch

    from simdev.workloads._transformer import precision_of

    with precision_of(precision):
        model = _model(layers, units, heads, key_heads, inner, vocabulary, (resident * batch, length)).eval()
        angles = torch.zeros(2, units // heads // 2)
    words = torch.randint(vocabulary, (batch, 1))
    return InferenceStep(model, (words, angles))


def _model(layers, units, heads, key_heads, inner, vocabulary, cache):
    import torch
    from torch import nn
    from torch.nn import functional as F

    from simdev.workloads._transformer import cached, rotate

    width = units // heads

    class Attention(nn.Module):
        """The query heads that share a key head (Ainslie et al. 2023) stand in the place of positions, so that the
        cache is read once and never repeated."""

        def __init__(self):
            super().__init__()
            self.query, self.output = (nn.Linear(units, units, bias=False) for _ in range(2))
            self.key, self.value = (nn.Linear(units, key_heads * width, bias=False) for _ in range(2))
            for name in ("keys", "values"):
                self.register_buffer(name, torch.zeros(cache[0], key_heads, cache[1], width))

        def forward(self, x, angles):
            query, key, value = (
                project(x).view(len(x), -1, 1, width) for project in (self.query, self.key, self.value)
            )
            key = cached(self.keys, rotate(key, *angles))
            value = cached(self.values, value)
            query = rotate(query, *angles).view(len(x), key_heads, -1, width)
            mixed = F.scaled_dot_product_attention(query, key, value)
            return self.output(mixed.reshape(x.shape))

    class FeedForward(nn.Module):
        """SwiGLU (Shazeer 2020)."""

        def __init__(self):
            super().__init__()
            self.gate, self.up = (nn.Linear(units, inner, bias=False) for _ in range(2))
            self.down = nn.Linear(inner, units, bias=False)

        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.attention = nn.RMSNorm(units, eps=1e-5), Attention()
            self.norm, self.feed_forward = nn.RMSNorm(units, eps=1e-5), FeedForward()

        def forward(self, x, angles):
            x = x + self.attention(self.attention_norm(x), angles)
            return x + self.feed_forward(self.norm(x))

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, units)
            for number in range(layers):
                setattr(self, f"layer{number}", Layer())
            self.norm, self.softmax = nn.RMSNorm(units, eps=1e-5), nn.Linear(units, vocabulary, bias=False)

        def forward(self, words, angles):
            x = self.embedding(words)
            for number in range(layers):
                x = getattr(self, f"layer{number}")(x, angles)
            return self.softmax(self.norm(x)).argmax(dim=2)

    return Decoder()
