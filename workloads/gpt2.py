"""GPT-2 (Radford et al. 2019): a decoder-only transformer with the norms before each block.

Module paths (``op_layer``): ``embedding``, ``layer0`` ... (inside: ``attention_norm``, ``attention``, ``norm``,
``feed_forward``), ``norm`` and ``softmax`` (projection, tied to the embedding, and loss). Weights, activations and
optimiser state are bfloat16 (``precision=f32``: float32), and the loss is computed in float32. There is no dropout.
"""

from __future__ import annotations

from simdev.graphs.workload import TrainingStep, workload
from simdev.workloads._transformer import layer


# The released 345M model ("medium") has 354,823,168 parameters: table 2 of the paper rounds its first count to 345 M.
@workload(
    "gpt2-medium",
    family="gpt2",
    defaults={
        "batch": 8,
        "length": 1024,
        "layers": 24,
        "units": 1024,
        "heads": 16,
        "vocabulary": 50_257,
        "precision": "bf16",
    },
    published={"parameters": 354_823_168},
    source="Radford et al., Language Models are Unsupervised Multitask Learners, 2019, section 2.3 and table 2",
)
def gpt2_medium(batch, length, layers, units, heads, vocabulary, precision):
    """A step on ``batch`` full contexts; the paper's batch of 512 is spread over replicas, 8 is ours."""
    import torch

    from simdev.workloads._transformer import precision_of

    with precision_of(precision):
        model = _model(length, layers, units, heads, vocabulary)
    tokens = torch.randint(vocabulary, (batch, length + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.5e-4, weight_decay=0.01)
    return TrainingStep(model, (tokens,), lambda model, tokens: model(tokens), optimizer)


def _model(length, layers, units, heads, vocabulary):
    from torch import nn
    from torch.nn import functional as F

    class Embedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.position = nn.Embedding(vocabulary, units), nn.Embedding(length, units)

        def forward(self, tokens):
            return self.token(tokens) + self.position.weight[: tokens.shape[1]]

    class Softmax(nn.Module):
        def __init__(self, table):
            super().__init__()
            self.weight = table.weight

        def forward(self, x, target):
            return F.cross_entropy(F.linear(x, self.weight).float().view(-1, vocabulary), target.reshape(-1))

    class GPT2(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = Embedding()
            for number in range(layers):
                setattr(self, f"layer{number}", layer(units, heads, 4 * units, causal=True, eps=1e-5, gelu="tanh"))
            self.norm, self.softmax = nn.LayerNorm(units), Softmax(self.embedding.token)
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    nn.init.normal_(parameter, 0.0, 0.02)

        def forward(self, tokens):
            x = self.embedding(tokens[:, :-1])
            for number in range(layers):
                x = getattr(self, f"layer{number}")(x)
            return self.softmax(self.norm(x), tokens[:, 1:])

    return GPT2()
