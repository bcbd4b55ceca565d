"""GPT-2 (Radford et al. 2019): a decoder-only transformer with the norms before each block.

Module paths (``op_layer``): ``embedding``, ``layer0`` ... (inside: ``attention_norm``, ``attention``, ``norm``,
``feed_forward``), ``norm`` and ``softmax`` (projection, tied to the embedding, and loss). Weights, activations and
optimiser state are bfloat16 (``precision=f32``: float32), and the loss is computed in float32. There is no dropout.
"""

from __future__ import annotations

from simdev.graphs.workload import InferenceStep, TrainingStep, workload
from simdev.workloads._transformer import layer, small_normal

_SIZES = {"layers": 24, "units": 1024, "heads": 16, "vocabulary": 50_257, "precision": "bf16"}
_SOURCE = "Radford et al., Language Models are Unsupervised Multitask Learners, 2019, section 2.3 and table 2"


# The released 345M model ("medium") has 354,823,168 parameters: table 2 of the paper rounds its first count to 345 M.
@workload(
    "gpt2-medium",
    family="gpt2",
    defaults={"batch": 8, "length": 1024, **_SIZES},
    published={"parameters": 354_823_168},
    source=_SOURCE,
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


@workload(
    "gpt2-medium-prefill",
    family="gpt2",
    defaults={"batch": 1, "length": 1024, **_SIZES, "resident": 4},
    published={"parameters": 354_823_168},
    source=_SOURCE,
)
def gpt2_medium_prefill(batch, length, layers, units, heads, vocabulary, precision, resident):
    """The first word after ``batch`` prompts of ``length`` words, whose keys and values fill the cache."""
    return _inference(batch, length, length, layers, units, heads, vocabulary, precision, resident)


@workload(
    "gpt2-medium-decode",
    family="gpt2",
    defaults={"batch": 16, "length": 1024, **_SIZES, "resident": 4},
    published={"parameters": 354_823_168},
    source=_SOURCE,
)
def gpt2_medium_decode(batch, length, layers, units, heads, vocabulary, precision, resident):
    """The last word of ``batch`` contexts of ``length`` words, with the keys and values of the others in the cache."""
    return _inference(batch, 1, length, layers, units, heads, vocabulary, precision, resident)


def _inference(batch, words, length, layers, units, heads, vocabulary, precision, resident):
    """A step on the last ``words`` of each context. The cache holds ``resident`` batches: those that are in progress
    on the devices of a pipeline."""
    import torch

    from simdev.workloads._transformer import precision_of

    with precision_of(precision):
        model = _model(length, layers, units, heads, vocabulary, (resident * batch, length)).eval()
    return InferenceStep(model, (torch.randint(vocabulary, (batch, words)),), lambda model, tokens: model.next(tokens))


def _model(length, layers, units, heads, vocabulary, cache=()):
    from torch import nn
    from torch.nn import functional as F

    class Embedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.position = nn.Embedding(vocabulary, units), nn.Embedding(length, units)

        def forward(self, tokens):
            first = length - tokens.shape[1] if cache else 0
            return self.token(tokens) + self.position.weight[first : first + tokens.shape[1]]

    class Softmax(nn.Module):
        def __init__(self, table):
            super().__init__()
            self.weight = table.weight

        def scores(self, x):
            return F.linear(x, self.weight).float()

        def forward(self, x, target):
            return F.cross_entropy(self.scores(x).view(-1, vocabulary), target.reshape(-1))

    class GPT2(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = Embedding()
            for number in range(layers):
                block = layer(units, heads, 4 * units, causal=True, eps=1e-5, gelu="tanh", cache=cache)
                setattr(self, f"layer{number}", block)
            self.norm, self.softmax = nn.LayerNorm(units), Softmax(self.embedding.token)
            small_normal(self)

        def hidden(self, tokens):
            x = self.embedding(tokens)
            for number in range(layers):
                x = getattr(self, f"layer{number}")(x)
            return x

        def forward(self, tokens):
            return self.softmax(self.norm(self.hidden(tokens[:, :-1])), tokens[:, 1:])

        def next(self, tokens):
            return self.softmax.scores(self.norm(self.hidden(tokens)[:, -1:])).argmax(dim=2)

    return GPT2()
