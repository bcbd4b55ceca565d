"""The LSTM cell and the softmax of the recurrent workloads; the cell is unrolled by its users."""

from __future__ import annotations

from functools import cache


@cache
def cell_class():
    """The class ``LSTMCell(input_size, units)``; PyTorch is imported on the first call."""
    import torch
    from torch import nn

    class Join(torch.autograd.Function):
        """Matrices side by side. The gradient is cut into copies, like TensorFlow's Slice ops do, so that a layer on
        another device receives only its own part, not a view into the whole."""

        @staticmethod
        def forward(ctx, *parts):
            ctx.widths = [part.shape[1] for part in parts]
            return torch.cat(parts, dim=1)

        @staticmethod
        def backward(ctx, gradient):
            parts = zip(gradient.split(ctx.widths, dim=1), ctx.needs_input_grad, strict=True)
            return tuple(part.clone() if needed else None for part, needed in parts)

    class LSTMCell(nn.Module):
        """One step of an LSTM without peepholes (Hochreiter and Schmidhuber 1997; Zaremba et al. 2014, section 3.1).

        The inputs (each ``(batch, k)``, together ``input_size`` wide) and the last output are joined, and one product
        with a ``(input_size + units, 4 * units)`` matrix gives all four gates, as TensorFlow's BasicLSTMCell did. The
        forget gate's bias starts at 1, so that no op adds it in every step.
        """

        def __init__(self, input_size: int, units: int):
            super().__init__()
            self.units = units
            self.weight = nn.Parameter(torch.empty(input_size + units, 4 * units).uniform_(-0.08, 0.08))
            self.bias = nn.Parameter(torch.zeros(4 * units))
            with torch.no_grad():
                self.bias[units : 2 * units].fill_(1.0)

        def initial(self, batch: int):
            """The zero state: output and cell, each ``(batch, units)``."""
            zeros = self.weight.new_zeros(batch, self.units)
            return zeros, zeros

        def forward(self, inputs, state, residual=None):
            """Output for the layer above, to which ``residual`` is added, and the next state."""
            output, memory = state
            joined = Join.apply(*inputs, output)
            enter, forget, candidate, leave = torch.addmm(self.bias, joined, self.weight).chunk(4, dim=1)
            memory = torch.sigmoid(forget) * memory + torch.sigmoid(enter) * torch.tanh(candidate)
            output = torch.sigmoid(leave) * torch.tanh(memory)
            return output if residual is None else output + residual, (output, memory)

    return LSTMCell


@cache
def softmax_class():
    """The class ``Softmax(units, vocabulary)``; PyTorch is imported on the first call."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Softmax(nn.Module):
        """Output projection ``(n, units)`` to ``(n, vocabulary)`` and mean cross-entropy, in nats."""

        def __init__(self, units: int, vocabulary: int):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(units, vocabulary).uniform_(-0.08, 0.08))
            self.bias = nn.Parameter(torch.zeros(vocabulary))

        def scores(self, hidden):
            return torch.addmm(self.bias, hidden, self.weight)

        def forward(self, hidden, target):
            return F.cross_entropy(self.scores(hidden), target)

    return Softmax
