"""The two-layer LSTM language model of the first placement papers.

Module paths (``op_layer``): ``embedding``, ``layer0``, ``layer1`` and ``softmax`` (projection and loss). Unrolled over
``length`` steps from the zero state; one softmax serves all steps together, as in TensorFlow's language model tutorial
(Zaremba et al. 2014). The gradient of the embedding table is dense, dropout and gradient clipping are left out.
"""

from __future__ import annotations

from simdev.graphs.workload import TrainingStep, workload


@workload(
    "rnnlm",
    family="rnnlm",
    defaults={"batch": 64, "length": 40, "units": 2048, "vocabulary": 40_000, "layers": 2},
    source="Jozefowicz et al., Exploring the Limits of Language Modeling, 2016; "
    "Mirhoseini et al., Device Placement Optimization with Reinforcement Learning, 2017, section 4.1",
)
def rnnlm(batch, length, units, vocabulary, layers):
    """Two layers and batch 64 are those of Mirhoseini et al. (2017), who give no other size: 2,048 units (a size of
    Jozefowicz et al.), 40 steps and 40,000 words are ours. Adagrad at 0.2 follows Jozefowicz et al."""
    import torch

    model = _model(units, vocabulary, layers)
    tokens = torch.randint(vocabulary, (length + 1, batch))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.2)
    return TrainingStep(model, (tokens,), lambda model, tokens: model(tokens), optimizer)


def _model(units, vocabulary, layers):
    import torch
    from torch import nn

    from simdev.workloads._lstm import cell_class, softmax_class

    class LanguageModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, units)
            for number in range(layers):
                setattr(self, f"layer{number}", cell_class()(units, units))
            self.softmax = softmax_class()(units, vocabulary)

        def forward(self, tokens):
            cells = [getattr(self, f"layer{number}") for number in range(layers)]
            states = [cell.initial(tokens.shape[1]) for cell in cells]
            outputs = []
            for x in self.embedding(tokens[:-1]).unbind(0):
                for number, cell in enumerate(cells):
                    x, states[number] = cell((x,), states[number])
                outputs.append(x)
            return self.softmax(torch.cat(outputs), tokens[1:].flatten())

    return LanguageModel()
