"""A Llama-style decoder with mixtures of experts as feed-forward blocks: Mixtral 8x7B (Jiang et al. 2024) scaled down.

Module paths (``op_layer``): ``embedding``, ``position``, ``layer0`` ... (inside: ``attention_norm``, ``attention``,
``norm``, ``experts.router``, ``experts.dispatch``, ``experts.expert0`` ..., ``experts.combine``), ``norm`` and
``softmax`` (projection and loss).

Depth, width and expert width are 3/4, 1/2 and 1/2 of Mixtral's. Everything, including Adam's state, is bfloat16
(``precision=f32``: float32), except for the softmax of the router and of the loss.

Routing has static shapes: each token chooses its two best experts, and each expert takes at most ``capacity`` times an
even share of them, the best weighted first (Riquelme et al. 2021, batch prioritized routing); the other tokens skip the
experts on the residual path. Mixtral drops no token, which needs shapes that depend on the data. An expert with too few
tokens is filled up with tokens of weight zero.
"""

from __future__ import annotations

from simdev.graphs.workload import TrainingStep, workload


@workload(
    "llama-moe",
    family="llama-moe",
    defaults={
        "batch": 4,
        "length": 2048,
        "layers": 24,
        "units": 2048,
        "heads": 16,
        "key_heads": 4,
        "experts": 8,
        "inner": 7168,
        "vocabulary": 32_000,
        "capacity": 1.25,
        "precision": "bf16",
    },
    # Jiang et al. 2024: 47 B parameters in all, 13 B active for a token, with 32 layers of 4,096 units, 32 heads, 8 key
    # heads, 8 experts of 14,336 and 32,000 words.
    published={"parameters_of_mixtral_8x7b": 47e9},
    source="Jiang et al., Mixtral of Experts, 2024, section 2; Touvron et al., LLaMA, 2023, section 2.2",
)
def llama_moe(batch, length, layers, units, heads, key_heads, experts, inner, vocabulary, capacity, precision):
    """A step on ``batch`` sequences, with the load-balancing loss of Fedus et al. (2022, section 2.2) at 0.01."""
    import torch

    from simdev.workloads._transformer import precision_of

    share = batch * length * 2 / experts
    places = min(batch * length, max(1, round(capacity * share)))
    with precision_of(precision):
        model = _model(layers, units, heads, key_heads, experts, inner, vocabulary, places)
    tokens = torch.randint(vocabulary, (batch, length + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    return TrainingStep(model, (tokens,), lambda model, tokens: model(tokens), optimizer)


def _model(layers, units, heads, key_heads, experts, inner, vocabulary, places):
    import torch
    from torch import nn
    from torch.nn import functional as F

    from simdev.workloads._transformer import rotate, small_normal

    width = units // heads

    class Position(nn.Module):
        """Cosines and sines of the rotary embedding (Su et al. 2021), each ``(length, width / 2)``."""

        def forward(self, length, like):
            rates = 10_000.0 ** (-torch.arange(0, width, 2, device=like.device).float() / width)
            angles = torch.arange(length, device=like.device).float()[:, None] * rates[None]
            return angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    class Attention(nn.Module):
        """Causal attention; each key head serves ``heads / key_heads`` query heads (Ainslie et al. 2023)."""

        def __init__(self):
            super().__init__()
            self.query = nn.Linear(units, units, bias=False)
            self.key = nn.Linear(units, key_heads * width, bias=False)
            self.value = nn.Linear(units, key_heads * width, bias=False)
            self.output = nn.Linear(units, units, bias=False)

        def forward(self, x, cosines, sines):
            query, key, value = (
                project(x).view(*x.shape[:2], -1, width).transpose(1, 2)
                for project in (self.query, self.key, self.value)
            )
            query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
            key, value = (part.repeat_interleave(heads // key_heads, dim=1) for part in (key, value))
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            return self.output(mixed.transpose(1, 2).reshape(x.shape))

    class Router(nn.Module):
        """Weights ``(tokens, experts)``, a softmax over a token's two best experts and zero elsewhere; balance loss."""

        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(units, experts, bias=False)

        def forward(self, tokens):
            scores = self.gate(tokens).float()
            best, chosen = scores.topk(2, dim=1)
            weights = torch.zeros_like(scores).scatter(1, chosen, torch.softmax(best, dim=1))
            fraction = F.one_hot(chosen[:, 0], experts).float().mean(dim=0)
            balance = experts * (fraction * torch.softmax(scores, dim=1).mean(dim=0)).sum()
            return weights, balance

    class Dispatch(nn.Module):
        """The ``places`` best weighted tokens of one expert: their rows, weights and numbers."""

        def forward(self, tokens, weights):
            weight, number = weights.topk(places)
            return tokens.index_select(0, number), weight, number

    class Expert(nn.Module):
        """SwiGLU (Shazeer 2020)."""

        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(units, inner, bias=False)
            self.up = nn.Linear(units, inner, bias=False)
            self.down = nn.Linear(inner, units, bias=False)

        def forward(self, x, weight):
            return self.down(F.silu(self.gate(x)) * self.up(x)) * weight[:, None].to(x.dtype)

    class Combine(nn.Module):
        def forward(self, tokens, results):
            mixed = torch.zeros_like(tokens)
            for rows, number in results:
                mixed.index_add_(0, number, rows)
            return mixed

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.dispatch, self.combine = Router(), Dispatch(), Combine()
            for number in range(experts):
                setattr(self, f"expert{number}", Expert())

        def forward(self, x):
            tokens = x.reshape(-1, units)
            weights, balance = self.router(tokens)
            results = []
            for expert, column in enumerate(weights.unbind(1)):
                rows, weight, number = self.dispatch(tokens, column)
                results.append((getattr(self, f"expert{expert}")(rows, weight), number))
            return self.combine(tokens, results).view(x.shape), balance

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.attention = nn.RMSNorm(units, eps=1e-5), Attention()
            self.norm, self.experts = nn.RMSNorm(units, eps=1e-5), Experts()

        def forward(self, x, cosines, sines):
            x = x + self.attention(self.attention_norm(x), cosines, sines)
            mixed, balance = self.experts(self.norm(x))
            return x + mixed, balance

    class Softmax(nn.Module):
        def __init__(self):
            super().__init__()
            self.projection = nn.Linear(units, vocabulary, bias=False)

        def forward(self, x, target):
            return F.cross_entropy(self.projection(x).float().view(-1, vocabulary), target.reshape(-1))

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.position = nn.Embedding(vocabulary, units), Position()
            for number in range(layers):
                setattr(self, f"layer{number}", Layer())
            self.norm, self.softmax = nn.RMSNorm(units, eps=1e-5), Softmax()
            small_normal(self)

        def forward(self, tokens):
            x, target = self.embedding(tokens[:, :-1]), tokens[:, 1:]
            cosines, sines = self.position(x.shape[1], x)
            balances = []
            for number in range(layers):
                x, balance = getattr(self, f"layer{number}")(x, cosines, sines)
                balances.append(balance)
            return self.softmax(self.norm(x), target) + 0.01 * torch.stack(balances).mean()

    return Decoder()
