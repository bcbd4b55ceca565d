"""Cells of the NASNet search space (Zoph et al. 2018, section 3): five blocks, each the sum of two operations on
earlier states; what the genotype names is concatenated. NASNet and AmoebaNet differ in genotype and operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Genotype:
    """``blocks``: pairs of (operation, state); states 0 and 1 are the current and the previous cell's output, state
    ``2 + i`` is block ``i``. ``concat``: the states that make the output. ``stride`` 2 halves the picture."""

    blocks: tuple[tuple[tuple[str, int], tuple[str, int]], ...]
    concat: tuple[int, ...]
    stride: int = 1


@dataclass(frozen=True)
class CellSpec:
    """One cell: ``current`` and ``previous`` count back from the latest output (the stem's output is the first). If
    ``previous`` is None, the current output, unchanged, is also the previous one."""

    genotype: Genotype
    channels: int
    current: int = -1
    previous: int | None = -2


def stack_class(operation: Callable, *, adjust_first: bool, drop_path: float = 0.0, norm: Callable):
    """A module class ``Cells(stem_channels, specs)``: cells applied in turn; ``forward(x, branch)`` returns the last
    output and the input of cell ``branch``.

    ``operation(name, inputs, outputs, stride)`` makes a module, or None for the identity. ``adjust_first``: with no
    previous cell, the current output still goes through a 1x1 convolution when it serves as the previous one.
    ``drop_path`` is the probability of dropping a path (Larsson et al. 2017), per picture.
    """
    import torch
    from torch import nn
    from torch.nn.functional import pad

    class ReluConvNorm(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(inputs, outputs, 1, bias=False), norm(outputs)

        def forward(self, x):
            return self.norm(self.conv(torch.relu(x)))

    class Halve(nn.Module):
        """Factorised reduction: every other pixel, and those right below them, half of the channels each."""

        def __init__(self, inputs, outputs):
            super().__init__()
            self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
            self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, stride=2, bias=False)
            self.norm = norm(outputs)

        def forward(self, x):
            x = torch.relu(x)
            return self.norm(torch.cat([self.even(x), self.odd(pad(x, (0, 1, 0, 1))[:, :, 1:, 1:])], 1))

    class DropPath(nn.Module):
        def forward(self, x):
            if not self.training or not drop_path:
                return x
            keep = torch.empty(len(x), 1, 1, 1, dtype=x.dtype, device=x.device).bernoulli_(1 - drop_path)
            return x * (keep / (1 - drop_path))

    class Cell(nn.Module):
        def __init__(self, spec, current, previous, halve):
            super().__init__()
            genotype, channels = spec.genotype, spec.channels
            self.genotype = genotype
            self.current, self.previous = ReluConvNorm(current, channels), None
            widths = [channels, channels]
            if halve:
                self.previous = Halve(previous, channels)
            elif spec.previous is None and not adjust_first:
                widths[1] = previous
            elif previous != channels:
                self.previous = ReluConvNorm(previous, channels)
            self.block = nn.ModuleList()
            for block in genotype.blocks:
                sides = []
                for name, state in block:
                    made = operation(
                        name, widths[state] if state < 2 else channels, channels, genotype.stride if state < 2 else 1
                    )
                    sides.append(nn.Identity() if made is None else nn.Sequential(made, DropPath()))
                self.block.append(nn.ModuleList(sides))

        def forward(self, current, previous):
            states = [self.current(current), previous if self.previous is None else self.previous(previous)]
            for (left, right), pair in zip(self.block, self.genotype.blocks, strict=True):
                states.append(left(states[pair[0][1]]) + right(states[pair[1][1]]))
            return torch.cat([states[i] for i in self.genotype.concat], 1)

    class Cells(nn.ModuleList):
        def __init__(self, stem_channels: int, specs: Sequence[CellSpec]):
            super().__init__()
            self.specs = tuple(specs)
            channels, scale = [stem_channels], [0]
            for spec in specs:
                previous = spec.current if spec.previous is None else spec.previous
                halve = scale[previous] != scale[spec.current]
                self.append(Cell(spec, channels[spec.current], channels[previous], halve))
                channels.append(spec.channels * len(spec.genotype.concat))
                scale.append(scale[spec.current] + (spec.genotype.stride == 2))
            self.channels = tuple(channels)

        def forward(self, x, branch=None):
            outputs, branched = [x], None
            for number, (spec, cell) in enumerate(zip(self.specs, self, strict=True)):
                if number == branch:
                    branched = outputs[-1]
                previous = spec.current if spec.previous is None else spec.previous
                outputs.append(cell(outputs[spec.current], outputs[previous]))
                del outputs[:-3]  # no cell reads older outputs
            return outputs[-1], branched

    return Cells
