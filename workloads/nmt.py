"""LSTM translation with attention: the two-layer NMT of the first placement papers, GNMT with four and eight layers.

Module paths (``op_layer``): ``encoder.embedding``, ``encoder.layer0`` ... , ``decoder.embedding``,
``decoder.attention`` (below it ``key``, ``query``, ``score``), ``decoder.layer0`` ... and ``softmax`` (projection and
loss). GNMT's first encoder layer runs in both directions: ``encoder.layer0`` and ``encoder.layer0_reversed``. Wu et al.
(2016, section 3.3) put each layer on a device of its own, the softmax on the last.

Encoder and decoder are unrolled over ``length`` steps. NMT has a softmax in each step, as TensorFlow's static
sequence-to-sequence graphs had; in GNMT one softmax serves all steps, as in TensorFlow's GNMT. All sentences have the
full length, so nothing is masked. Source and target tables are separate, the gradient of an embedding table is dense,
dropout and gradient clipping are left out.
"""

from __future__ import annotations

from simdev.graphs.workload import InferenceStep, TrainingStep, workload

_NMT = {"batch": 64, "length": 68, "units": 1024, "vocabulary": 32_000}
_GNMT = {"batch": 128, "length": 50, "units": 1024, "vocabulary": 32_000}
_SOURCE = "Wu et al., Google's Neural Machine Translation System, 2016, sections 3.1-3.3"


@workload(
    "nmt",
    family="nmt",
    defaults=_NMT,
    source="Mirhoseini et al., Device Placement Optimization with Reinforcement Learning, 2017, section 4.1",
)
def nmt(batch, length, units, vocabulary):
    """Two LSTM layers each in encoder and decoder, both one-way, no residual connections.

    Batch 64 is the paper's; it gives neither length nor vocabulary. With the 32,000 words of Wu et al., 68 is in the
    middle of the lengths (65 to 72) at which the step is too large for one K80 of 12 GB, but fits two under the
    expert's placement, as the paper found.
    """
    return _step(batch, length, units, vocabulary, layers=2, google=False)


@workload("nmt-inference", family="nmt", defaults={**_NMT, "batch": 32}, source=_SOURCE)
def nmt_inference(batch, length, units, vocabulary):
    """Greedy translation of ``batch`` sentences into ``length`` words each: a word is the best scored one, and the
    input of the next step."""
    import torch

    model = _model(units, vocabulary, layers=2, google=False).eval()
    source = torch.randint(vocabulary, (length, batch))
    start = torch.zeros(batch, dtype=torch.int64)
    return InferenceStep(model, (source, start), lambda model, source, start: model.translate(source, start, length))


@workload("gnmt-4", family="nmt", defaults=_GNMT, source=_SOURCE)
def gnmt_4(batch, length, units, vocabulary):
    """GNMT cut to four layers each side (Mirhoseini et al. 2018 place it on four devices)."""
    return _step(batch, length, units, vocabulary, layers=4, google=True)


# Shazeer et al., Outrageously Large Neural Networks, 2017, results on WMT'14 En-Fr: GNMT has 278 M parameters and does
# 214 M multiply-adds in a time step of the forward pass. Batch 128 is that of Wu et al. (section 8.3).
@workload(
    "gnmt-8",
    family="nmt",
    defaults={**_GNMT, "length": 84},
    published={"parameters": 278e6, "forward_macs_per_timestep": 214e6},
    source=_SOURCE,
)
def gnmt_8(batch, length, units, vocabulary):
    """GNMT in full: eight layers each side. Length 84 makes the captured graph larger than 50,000 ops, the size that
    GDP (Zhou et al. 2019) reports for it."""
    return _step(batch, length, units, vocabulary, layers=8, google=True)


def _step(batch, length, units, vocabulary, *, layers, google):
    import torch

    model = _model(units, vocabulary, layers, google)
    # The decoder reads a sentence from its start mark on and predicts it up to its end mark: one token more.
    source = torch.randint(vocabulary, (length, batch))
    target = torch.randint(vocabulary, (length + 1, batch))
    # Wu et al. train with Adam at 2e-4 first, then with plain gradient descent; this is a step of the first part.
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    return TrainingStep(model, (source, target), lambda model, *sentences: model(*sentences), optimizer)


def _model(units, vocabulary, layers, google):
    import torch
    from torch import nn

    from simdev.workloads._lstm import cell_class, softmax_class

    LSTMCell, Softmax = cell_class(), softmax_class()

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, units)
            self.layer0 = LSTMCell(units, units)
            if google:
                self.layer0_reversed = LSTMCell(units, units)
            for number in range(1, layers):
                # The layer above the two-way one reads both directions side by side.
                setattr(self, f"layer{number}", LSTMCell(2 * units if google and number == 1 else units, units))

        def forward(self, tokens):
            embedded = self.embedding(tokens).unbind(0)
            steps: list[tuple] = [(output,) for output in _unroll(self.layer0, [(x,) for x in embedded])]
            if google:
                back = _unroll(self.layer0_reversed, [(x,) for x in reversed(embedded)])
                steps = [(*forth, output) for forth, output in zip(steps, reversed(back), strict=True)]
            for number in range(1, layers):
                residual = google and number >= 2  # residual connections start at the third layer (section 3.1)
                steps = [(output,) for output in _unroll(getattr(self, f"layer{number}"), steps, residual)]
            return torch.stack([output for (output,) in steps])

    class Attention(nn.Module):
        """Bahdanau's: a feed-forward network with one hidden layer scores each source position (Wu et al., eq. 4)."""

        def __init__(self):
            super().__init__()
            self.key = nn.Linear(units, units, bias=False)
            self.query = nn.Linear(units, units, bias=False)
            self.score = nn.Linear(units, 1, bias=False)

        def forward(self, output, keys, encoded):
            scores = self.score(torch.tanh(keys + self.query(output)))  # (length, batch, 1)
            weights = torch.softmax(scores.squeeze(2), dim=0)
            return torch.bmm(weights.t().unsqueeze(1), encoded.transpose(0, 1)).squeeze(1)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, units)
            self.attention = Attention()
            for number in range(layers):
                reads_context = google or number == 0  # GNMT sends the context to every layer
                setattr(self, f"layer{number}", LSTMCell(2 * units if reads_context else units, units))

        def forward(self, tokens, encoded):
            states, keys, outputs = self.start(tokens.shape[1], encoded)
            for x in self.embedding(tokens).unbind(0):
                outputs.append(self.step(x, states, keys, encoded))
            return outputs

        def start(self, batch, encoded):
            """The zero states of all layers, the keys of the attention, and no outputs."""
            states = [getattr(self, f"layer{number}").initial(batch) for number in range(layers)]
            return states, self.attention.key(encoded), []

        def step(self, x, states, keys, encoded):
            """The output for one word; ``states`` is renewed."""
            # The query is the bottom layer's output of the step before.
            context = self.attention(states[0][0], keys, encoded)
            for number in range(layers):
                inputs = (x, context) if google or number == 0 else (x,)
                residual = x if google and number >= 2 else None
                x, states[number] = getattr(self, f"layer{number}")(inputs, states[number], residual)
            return x

    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder, self.softmax = Encoder(), Decoder(), Softmax(units, vocabulary)

        def forward(self, source, target):
            outputs = self.decoder(target[:-1], self.encoder(source))
            if google:
                return self.softmax(torch.cat(outputs), target[1:].flatten())
            losses = [self.softmax(output, token) for output, token in zip(outputs, target[1:].unbind(0), strict=True)]
            return torch.stack(losses).mean()

        def translate(self, source, word, length):
            encoded = self.encoder(source)
            states, keys, words = self.decoder.start(len(word), encoded)
            for _ in range(length):
                output = self.decoder.step(self.decoder.embedding(word), states, keys, encoded)
                word = self.softmax.scores(output).argmax(dim=1)
                words.append(word)
            return torch.stack(words)

    return Translator()


def _unroll(cell, steps, residual=False):
    """Outputs of ``cell`` over ``steps``, a list of tuples of ``(batch, k)`` inputs, from the zero state."""
    state, outputs = cell.initial(steps[0][0].shape[0]), []
    for inputs in steps:
        output, state = cell(inputs, state, inputs[0] if residual else None)
        outputs.append(output)
    return outputs
