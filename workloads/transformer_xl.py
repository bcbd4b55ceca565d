"""Transformer-XL with segment recurrence and relative attention (Dai et al. 2019), at the depths that GDP places.

Module paths (``op_layer``): ``embedding``, ``position``, ``layer0`` ... (inside: ``attention``, ``attention_norm``,
``feed_forward``, ``norm``) and ``softmax`` (projection and loss). A layer's memory, the hidden states of the last
segment, is a buffer of that layer; the step writes the new states into it.

The sizes are those of the 12-layer enwik8 model, which has 204 symbols and hence an ordinary softmax, its projection
tied to the embedding; the WikiText-103 model's adaptive softmax has shapes that depend on the data. Dropout and
gradient clipping are left out.
"""

from __future__ import annotations

from simdev.graphs.workload import InferenceStep, TrainingStep, workload
from simdev.workloads._transformer import small_normal

_SIZES = {"batch": 22, "length": 512, "memory": 512, "units": 512, "heads": 8, "inner": 2048, "vocabulary": 204}
_SOURCE = "Dai et al., Transformer-XL, 2019, sections 3.2-3.3 and 4.1; depths: Zhou et al., GDP, 2019"


def transformer_xl(layers, batch, length, memory, units, heads, inner, vocabulary):
    """A step on ``batch`` segments of ``length`` symbols. Adam at 2.5e-4 as in the paper's enwik8 runs."""
    import torch

    model = _model(layers, batch, memory, units, heads, inner, vocabulary)
    tokens = torch.randint(vocabulary, (length + 1, batch))
    optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-4)
    return TrainingStep(model, (tokens,), lambda model, tokens: model(tokens), optimizer)


# Table 2 of the paper: 41 M parameters with 12 layers. Training logs of the authors' 16-layer WikiText-103 model (410
# units, 10 heads, 2,100 inner units) count 41,066,400 parameters outside the embedding.
for _layers in (2, 4, 8):
    workload(
        f"transformer-xl-{_layers}",
        family="transformer-xl",
        defaults={"layers": _layers, **_SIZES},
        published={"parameters_at_12_layers": 41e6, "layer_parameters_of_wikitext_model": 41_066_400},
        source=_SOURCE,
    )(transformer_xl)


@workload(
    "transformer-xl-8-inference",
    family="transformer-xl",
    defaults={"layers": 8, **_SIZES, "batch": 1},
    published={"parameters_at_12_layers": 41e6},
    source=_SOURCE,
)
def transformer_xl_inference(layers, batch, length, memory, units, heads, inner, vocabulary):
    """The scores of every next symbol of a segment of ``length``; the memories are the cache, which the step renews."""
    import torch

    model = _model(layers, batch, memory, units, heads, inner, vocabulary).eval()
    tokens = torch.randint(vocabulary, (length, batch))
    return InferenceStep(model, (tokens,), lambda model, tokens: model.softmax.scores(model.hidden(tokens)))


def _model(layers, batch, memory, units, heads, inner, vocabulary):
    import torch
    from torch import nn
    from torch.nn import functional as F

    width = units // heads

    class Attention(nn.Module):
        """Relative attention (section 3.3): a query meets keys of memory and segment, and sinusoids of distances."""

        def __init__(self):
            super().__init__()
            self.query_key_value = nn.Linear(units, 3 * units, bias=False)
            self.distance = nn.Linear(units, units, bias=False)
            self.output = nn.Linear(units, units, bias=False)

        def forward(self, joined, length, positions, content_bias, position_bias, ahead):
            size = joined.shape[1]
            query, key, value = self.query_key_value(joined).chunk(3, dim=2)
            query = query[-length:].reshape(length, size, heads, width)
            key, value = (x.reshape(-1, size, heads, width) for x in (key, value))
            distance = self.distance(positions).view(-1, heads, width)
            scores = torch.einsum("ibhd,jbhd->bhij", query + content_bias, key)
            scores = scores + _shift(torch.einsum("ibhd,jhd->bhij", query + position_bias, distance))
            scores = (scores / width**0.5).masked_fill(ahead, float("-inf"))
            mixed = torch.einsum("bhij,jbhd->ibhd", torch.softmax(scores, dim=3), value)
            return self.output(mixed.reshape(length, size, units))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.attention_norm = Attention(), nn.LayerNorm(units)
            self.feed_forward = nn.Sequential(nn.Linear(units, inner), nn.ReLU(), nn.Linear(inner, units))
            self.norm = nn.LayerNorm(units)
            self.register_buffer("memory", torch.zeros(memory, batch, units))

        def forward(self, segment, *relative):
            joined = torch.cat([self.memory, segment])
            self.memory.copy_(joined[-memory:].detach())
            attended = self.attention_norm(segment + self.attention(joined, len(segment), *relative))
            return self.norm(attended + self.feed_forward(attended))

    class Position(nn.Module):
        """Sinusoids of the distances ``memory + length - 1 ... 0``, the two biases that all layers share, and the mask
        of the symbols ahead."""

        def __init__(self):
            super().__init__()
            self.content_bias = nn.Parameter(torch.empty(heads, width).normal_(0.0, 0.02))
            self.position_bias = nn.Parameter(torch.empty(heads, width).normal_(0.0, 0.02))

        def forward(self, length, like):
            keys = memory + length
            distances = torch.arange(keys - 1, -1, -1, device=like.device, dtype=like.dtype)
            rates = torch.arange(0, units, 2, device=like.device, dtype=like.dtype)
            angles = distances[:, None] * (10_000.0 ** (-rates / units))[None]
            ahead = torch.ones(length, keys, device=like.device, dtype=torch.bool).triu(memory + 1)
            positions = torch.cat([angles.sin(), angles.cos()], dim=1)
            return positions, self.content_bias, self.position_bias, ahead

    class Softmax(nn.Module):
        def __init__(self, embedding):
            super().__init__()
            self.weight, self.bias = embedding.weight, nn.Parameter(torch.zeros(vocabulary))

        def scores(self, hidden):
            return F.linear(hidden, self.weight, self.bias)

        def forward(self, hidden, target):
            return F.cross_entropy(self.scores(hidden).view(-1, vocabulary), target.reshape(-1))

    class TransformerXL(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.position = nn.Embedding(vocabulary, units), Position()
            for number in range(layers):
                setattr(self, f"layer{number}", Layer())
            self.softmax = Softmax(self.embedding)
            small_normal(self)

        def hidden(self, tokens):
            hidden = self.embedding(tokens) * units**0.5
            relative = self.position(len(hidden), hidden)
            for number in range(layers):
                hidden = getattr(self, f"layer{number}")(hidden, *relative)
            return hidden

        def forward(self, tokens):
            return self.softmax(self.hidden(tokens[:-1]), tokens[1:])

    return TransformerXL()


def _shift(scores):
    """Move row ``i`` of ``(batch, heads, n, keys)`` left by ``n - 1 - i``, so that column ``j`` holds distance
    ``i + memory - j`` (appendix B of the paper). What wraps round lies ahead of the query and is masked."""
    import torch

    batch, heads, rows, columns = scores.shape
    padded = torch.cat([scores.new_zeros(batch, heads, rows, 1), scores], dim=3)
    return padded.view(batch, heads, columns + 1, rows)[:, :, 1:].reshape(batch, heads, rows, columns)
