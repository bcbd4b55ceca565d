"""BERT (Devlin et al. 2019): a bidirectional transformer with the norms after each block, answering questions.

Module paths (``op_layer``): ``embedding``, ``layer0`` ... (inside: ``attention_norm``, ``attention``, ``norm``,
``feed_forward``) and ``head`` (the scores of each word as the first and as the last of the answer).
"""

from __future__ import annotations

from simdev.graphs.workload import InferenceStep, workload
from simdev.workloads._transformer import layer


# 30,522 words, 512 positions and 2 kinds of sentences with a norm, 24 layers of 12,596,224, and 2 scores of 1,024 units
@workload(
    "bert-large-inference",
    family="bert",
    defaults={"batch": 1, "length": 384, "layers": 24, "units": 1024, "heads": 16, "vocabulary": 30_522},
    published={"parameters": 334_094_338},
    source="Devlin et al., BERT, 2019, sections 3 and 4.2 (340 M parameters, rounded); length 384: MLPerf Inference",
)
def bert_large_inference(batch, length, layers, units, heads, vocabulary):
    """The scores of ``batch`` questions with their passages, of ``length`` words together; nothing is masked."""
    import torch

    model = _model(layers, units, heads, vocabulary).eval()
    words, sentence = torch.randint(vocabulary, (batch, length)), torch.randint(2, (batch, length))
    return InferenceStep(model, (words, sentence))


def _model(layers, units, heads, vocabulary):
    from torch import nn

    class Embedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.word, self.position = nn.Embedding(vocabulary, units), nn.Embedding(512, units)
            self.sentence, self.norm = nn.Embedding(2, units), nn.LayerNorm(units, eps=1e-12)

        def forward(self, words, sentence):
            return self.norm(self.word(words) + self.sentence(sentence) + self.position.weight[: words.shape[1]])

    class Bert(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = Embedding()
            for number in range(layers):
                block = layer(units, heads, 4 * units, causal=False, eps=1e-12, gelu="none", after=True)
                setattr(self, f"layer{number}", block)
            self.head = nn.Linear(units, 2)

        def forward(self, words, sentence):
            x = self.embedding(words, sentence)
            for number in range(layers):
                x = getattr(self, f"layer{number}")(x)
            return self.head(x)

    return Bert()
