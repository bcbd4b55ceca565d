"""WaveNet (van den Oord et al., "WaveNet: A Generative Model for Raw Audio", 2016).

Layers: ``input`` is the first causal convolution, ``stack.S.L.*`` layer L of stack S (``filter``, ``gate``,
``residual``, ``skip``), ``head.*`` the two convolutions that end in the distribution over sample values.

GDP (Zhou et al. 2019) places "2-stack, 18-layer" and "4-stack, 36-layer" networks; read as totals, each stack has nine
layers with dilations 1, 2, 4 ... 256 (the paper doubles the dilation up to a limit, then repeats).
"""

from __future__ import annotations

from simdev.graphs.workload import TrainingStep, workload

_DEFAULTS = {"batch": 8, "length": 6144, "channels": 512, "skips": 256, "levels": 256}
_SOURCE = (
    "van den Oord et al. 2016, section 2; widths and length of NSynth's decoder (Engel et al. 2017, section 2.1.1)"
)


@workload("wavenet-2x18", family="wavenet", defaults={"stacks": 2, "layers": 18, **_DEFAULTS}, source=_SOURCE)
@workload("wavenet-4x36", family="wavenet", defaults={"stacks": 4, "layers": 36, **_DEFAULTS}, source=_SOURCE)
def wavenet(stacks, layers, batch, length, channels, skips, levels):
    """Predict each of ``length`` samples (one of ``levels`` mu-law values) from those before it; Adam.

    ``layers`` is the total over all stacks. The paper states no widths: the residual width of 512, the skip width of
    256 and the length of 6144 samples are those of NSynth's decoder; the batch of 8 is ours. Filters have width 2 as in
    the paper.
    """
    import torch

    model = build(stacks, layers // stacks, channels, skips, levels)
    samples = torch.randint(levels, (batch, length))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    return TrainingStep(model, (samples,), loss, optimizer)


def loss(model, samples):
    """Cross-entropy of every sample under the prediction from those before it."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(model(samples)[:, :, :-1], samples[:, 1:])


def build(stacks: int, depth: int, channels: int, skips: int, levels: int):
    """The model; ``forward`` maps samples int64 ``(batch, length)`` to scores ``(batch, levels, length)``."""
    import torch
    from torch import nn
    from torch.nn.functional import pad

    class Layer(nn.Module):
        def __init__(self, dilation, last):
            super().__init__()
            self.dilation = dilation
            self.filter = nn.Conv1d(channels, channels, 2, dilation=dilation)
            self.gate = nn.Conv1d(channels, channels, 2, dilation=dilation)
            self.skip = nn.Conv1d(channels, skips, 1)
            self.residual = None if last else nn.Conv1d(channels, channels, 1)

        def forward(self, x, total):
            past = pad(x, (self.dilation, 0))
            z = torch.tanh(self.filter(past)) * torch.sigmoid(self.gate(past))
            skip = self.skip(z)
            total = skip if total is None else total + skip
            return x if self.residual is None else x + self.residual(z), total

    class Input(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(levels, channels, 2)

        def forward(self, samples):
            one_hot = torch.zeros(len(samples), levels, samples.shape[1], device=samples.device)
            return self.conv(pad(one_hot.scatter(1, samples[:, None], 1.0), (1, 0)))

    class WaveNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.input = Input()
            end = (stacks - 1, depth - 1)  # nothing reads the residual output of the last layer
            self.stack = nn.ModuleList(
                nn.ModuleList(Layer(2**i, last=(s, i) == end) for i in range(depth)) for s in range(stacks)
            )
            self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(skips, skips, 1), nn.ReLU(), nn.Conv1d(skips, levels, 1))

        def forward(self, samples):
            x, total = self.input(samples), None
            for stack in self.stack:
                for layer in stack:
                    x, total = layer(x, total)
            return self.head(total)

    return WaveNet()
